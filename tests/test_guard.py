"""The memory guard of `hf_hybrid/recovery.py`: it warns early and once, cleans up, and saves before memory runs out."""

import logging
from types import SimpleNamespace

import pytest
import torch
from conftest import ByteText, assert_same_weights, hybrid_config, tiny_model, weights
from transformers import HfArgumentParser

from hf_hybrid import HybridTrainer
from hf_hybrid import recovery as guard_module
from hf_hybrid.arguments import HybridArguments
from hf_hybrid.part import Step
from hf_hybrid.recovery import MemoryGuard, device_probe

GIB = 2**30


def guard_of(shares, **options):
    """A guard of a device of 10 GiB whose use at the end of each step is given."""
    readings = iter(shares)
    return MemoryGuard(lambda: (int(next(readings) * 10 * GIB), 10 * GIB), **options)


def asks_save(guard, number=1):
    """End a step. Whether the guard asks for a checkpoint."""
    step = Step(number - 1)
    guard.end_step(step)
    return step.asks_save


def test_it_warns_and_saves_once_until_use_fell(caplog):
    shares = [0.5, 0.92, 0.95, 0.98, 0.99, 0.95, 0.98, 0.6, 0.99]
    guard = guard_of(shares)
    with caplog.at_level(logging.WARNING, "hf_hybrid.recovery"):
        saves = [asks_save(guard, step) for step in range(1, len(shares) + 1)]
    assert saves == [False, False, False, True, False, False, False, False, True]
    warnings = [record.getMessage() for record in caplog.records if "guard_warn_at" in record.getMessage()]
    assert [text.partition(" ends")[0] for text in warnings] == ["Step 2", "Step 9"]
    assert "9.20 of 10.00 GiB in use (92.0%)" in warnings[0] and "gradient_accumulation_steps" in warnings[0]


def test_it_cleans_up_at_the_warning(monkeypatch):
    cleaned = []
    monkeypatch.setattr(guard_module, "free_memory", lambda: cleaned.append(step))
    guard = guard_of([0.95, 0.95, 0.5, 0.95, 0.95])
    for step in range(1, 6):
        asks_save(guard, step)
    assert cleaned == [1, 4]


def test_one_is_never(caplog):
    guard = guard_of([1.0, 1.0], warn_at=1.0)
    assert not asks_save(guard) and not asks_save(guard, 2) and not caplog.records


@pytest.mark.parametrize("predict", [False, True])
def test_a_run_near_the_limit_saves_once_and_resumes(tmp_path, predict, caplog):
    def build(**options):
        config = hybrid_config(tmp_path, max_steps=12, enable_predict=predict, **options)
        return HybridTrainer(tiny_model(), config, train_dataset=ByteText(120))

    trainer = build(guard_warn_at=0.5)
    trainer.memory_guard.checkpoint_at = 0.8
    trainer.memory_guard.probe = lambda: ((9 if trainer.state.global_step >= 5 else 1) * GIB, 10 * GIB)
    with caplog.at_level(logging.WARNING, "hf_hybrid"):
        trainer.train()
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-5"]  # save_strategy is "no"
    assert sum("a checkpoint is written now" in record.getMessage() for record in caplog.records) == 1
    resumed = build()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert_same_weights(weights(resumed.model), weights(trainer.model))


def test_on_a_cpu_it_watches_nothing(tmp_path):
    config = hybrid_config(tmp_path, max_steps=2)
    assert HybridTrainer(tiny_model(), config, train_dataset=ByteText(120)).memory_guard.probe is None
    assert device_probe(torch.device("cpu")) is None


@pytest.mark.parametrize(
    "fraction, reserved, expected",
    [(1.0, 3, (7, 10)), (0.5, 4, (4, 5)), (0.5, 1, (7, 10))],
    ids=["whole device", "own part is tighter", "others fill the device"],
)
def test_the_tighter_limit_counts(monkeypatch, fraction, reserved, expected):
    fake = SimpleNamespace(
        mem_get_info=lambda device: (3 * GIB, 10 * GIB),
        memory_reserved=lambda device: reserved * GIB,
        get_per_process_memory_fraction=lambda device: fraction,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    used, total = device_probe(torch.device("cuda", 0))()
    assert (used / GIB, total / GIB) == expected


def test_the_warning_comes_first():
    assert not asks_save(guard_of([0.98], warn_at=0.99)) and asks_save(guard_of([0.98], warn_at=0.9))


def test_help_shows_the_options(capsys):
    with pytest.raises(SystemExit) as ended:
        HfArgumentParser(HybridArguments).parse_args_into_dataclasses(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for flag in ("--out_of_memory", "--guard_warn_at"):
        assert flag in shown
