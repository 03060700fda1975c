"""`hf_hybrid/saving/state.py`: `kill -9` in each phase and resume, what a checkpoint holds and a resume tells."""

import json
import logging
import multiprocessing
import random
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from conftest import (
    TIMES,
    ByteText,
    assert_same_weights,
    hybrid_config,
    mostly_slow,
    tiny_model,
    weights,
)
from rig import trainers
from rig.run_folders import reseal
from safetensors.torch import save_file
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from transformers import AutoModelForCausalLM, TrainerCallback, default_data_collator
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.part import Phase
from hf_hybrid.run.run import DataOrder, RandomStates
from hf_hybrid.saving.manifest import MANIFEST_NAME, CheckpointError, is_committed
from hf_hybrid.saving.sharded import load_weights
from hf_hybrid.saving.state import TENSORS_NAME, VALUES_NAME, OtherVersionError, load_state, save_state

STEPS = 48
# Two epochs and a bit, so that a resume has to find its place in a shuffled epoch behind steps that took no data;
# a low learning rate that is searched, so that the rate moves on the way too.
OPTIONS = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 8,
    "learning_rate": 5e-4,
    "auto_lr": "on",
    "probe_budget": 0.2,
    "max_predict_steps": 4,
    "leap_worth": 1.0,
    "save_strategy": "steps",
    "save_steps": 1,
}
SAMPLES = 200
# Where callbacks may save inside a step; `True`: callbacks that were added after those of the trainer.
INSIDE = [
    ("on_step_begin", False), ("on_substep_end", False), ("on_pre_optimizer_step", False),
    ("on_pre_optimizer_step", True), ("on_optimizer_step", False), ("on_step_end", False),
]  # fmt: skip
PLAIN = {"enable_predict": False}
QUICK = [("on_step_begin", False, {}), ("on_pre_optimizer_step", True, {}), ("on_substep_end", False, PLAIN)]


def build(folder, callbacks=(), **overrides):
    torch.manual_seed(0)
    model = tiny_model(attention_dropout=0.1)
    return trainers.build(folder, model=model, samples=SAMPLES, callbacks=list(callbacks), **{**OPTIONS, **overrides})


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    trainer = build(folder)
    trainer.train()
    phases = {}
    for step in range(1, STEPS + 1):
        state = json.loads((folder / f"checkpoint-{step}" / "hybrid_state.json").read_text())
        controller = state["parts"]["leaps"]["controller"]
        phases[step] = Phase(controller["phase"]), controller["leap_due"], controller["remaining"]
    return folder, weights(trainer.model), trainer.hybrid_summary(), phases


def die_at(folder: Path, step: int, **options) -> None:
    """Train in a forked process and kill it as soon as the checkpoint of `step` is whole."""
    process = multiprocessing.get_context("fork").Process(target=lambda: build(folder, **options).train())
    process.start()
    deadline = time.time() + 300
    while not is_committed(folder / f"checkpoint-{step}"):
        if not process.is_alive() or time.time() > deadline:
            process.kill()
            pytest.fail("training ended before it could be killed")
        time.sleep(0.005)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def comparable(summary):
    of_a_start = (*TIMES, "resumed", "shared_if_together")  # the last one is of the first rows that a start has seen
    return {key: value for key, value in summary.items() if key not in of_a_start}


@pytest.mark.processes
@pytest.mark.parametrize("options", mostly_slow([{}, {"memory": "stream"}], [{}]), ids=["resident", "streamed"])
@pytest.mark.parametrize("phase", mostly_slow(list(Phase), [Phase.PREDICT]))
def test_kill_and_resume(phase, options, uninterrupted, tmp_path):
    """Also with streamed layers to the weights of a run that was neither interrupted nor streamed."""
    _, expected, summary, phases = uninterrupted
    # The checkpoint of a step whose successor is in the phase: behind the first epoch where that can be.
    steps = [
        step for step, (after, pending, _) in phases.items() if after is phase and not pending and step < STEPS - 5
    ]
    step = min((s for s in steps if s > SAMPLES // 8 + 3), default=steps[-1])
    die_at(tmp_path, step, **options)
    for folder in tmp_path.glob("checkpoint-*"):  # what was written between the poll and the kill
        if int(folder.name.split("-")[1]) > step:
            shutil.rmtree(folder)
    trainer = build(tmp_path, **options)
    trainer.train(resume_from_checkpoint=True)
    resumed = trainer.hybrid_summary()
    assert resumed["steps"] == STEPS
    assert_same_weights(weights(trainer.model), expected)
    if options:
        assert resumed["leaps"] == summary["leaps"] and resumed["memory"]["plan"]["mode"] == "streamed"
    else:
        assert comparable(resumed) == comparable(summary)


@pytest.mark.long
def test_resume_from_every_kind_of_moment(uninterrupted, tmp_path):
    """Also right before a leap, inside a longer Predict phase, and at the boundary of an epoch."""
    folder, expected, _, phases = uninterrupted
    pending = next(step for step, (_, waiting, _) in phases.items() if waiting and step > 20)
    inside = next(
        step for step, (phase, waiting, left) in phases.items() if phase is Phase.PREDICT and not waiting and left == 1
    )
    epoch = -(-190 // 8)  # 10 of the 200 samples are held out
    for step in (pending, inside, epoch):
        trainer = build(tmp_path / str(step), save_strategy="no")
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
        assert_same_weights(weights(trainer.model), expected)


def test_the_run_that_is_resumed_has_it_all(uninterrupted):
    """The comparison above means something: leaps of several kinds, predicted steps, a moving learning rate."""
    _, _, summary, _ = uninterrupted
    assert all(count > 0 for count in summary["steps_by_phase"].values())
    assert summary["learning_rate_scale"] > 1.0 and summary["resumed"] is None
    assert {"kept", "shrunk"} & set(summary["leaps_by_verdict"])


def test_no_pickle_of_ours(uninterrupted):
    folder = uninterrupted[0] / "checkpoint-30"
    ours = [path.name for path in folder.iterdir() if path.name.startswith("hybrid")]
    assert sorted(ours) == ["hybrid_manifest.json", "hybrid_state.json", "hybrid_state.safetensors"]


def test_resume_without_hybrid_state_says_so_and_trains(uninterrupted, tmp_path, caplog):
    shutil.copytree(uninterrupted[0] / "checkpoint-30", tmp_path / "checkpoint-30")
    for name in ("hybrid_state.json", "hybrid_manifest.json"):
        (tmp_path / "checkpoint-30" / name).unlink()
    trainer = build(tmp_path, save_strategy="no")
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-30"))
    assert "holds no hybrid state" in caplog.text
    assert trainer.hybrid_summary()["resumed"]["restored"] is None
    assert trainer.state.global_step == STEPS


def test_options_that_changed_since_the_checkpoint_are_named(uninterrupted, tmp_path, caplog):
    on_from(uninterrupted, tmp_path, leap_gain=1.0)
    assert re.search(r"the new ones hold from here on:\n.*\n  `leap_gain`  None  1.0", caplog.text)


class Drawn(Sampler):
    """A sampler of a user's own, which asks a function for its order."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter(self.draw())


class Mine(Drawn):
    """The same with a generator of its own."""

    def __init__(self, rng, draw):
        super().__init__(lambda: draw(rng))
        self.rng = rng


ROWS = 12
WEIGHTS = torch.arange(1.0, ROWS + 1)
OWN = {
    "in order": lambda: SequentialSampler(range(ROWS)),
    "random": lambda: RandomSampler(range(ROWS)),
    "random, replaced": lambda: RandomSampler(range(ROWS), replacement=True, num_samples=ROWS, generator=seeded()),
    "by length": lambda: LengthGroupedSampler(4, lengths=list(range(ROWS))),
    "balanced": lambda: BatchRebalanceSampler(list(range(1, ROWS + 1)), 4, 1, 2),
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, ROWS),
    "weighted, generator": lambda: WeightedRandomSampler(WEIGHTS, ROWS, generator=seeded()),
    "subset": lambda: SubsetRandomSampler(range(ROWS)),
    "subset, generator": lambda: SubsetRandomSampler(range(ROWS), generator=seeded()),
    "torch": lambda: Drawn(lambda: torch.randperm(ROWS).tolist()),
    "numpy": lambda: Drawn(lambda: numpy.random.permutation(ROWS).tolist()),
    "python": lambda: Drawn(lambda: random.sample(range(ROWS), ROWS)),
    "own python": lambda: Mine(random.Random(3), lambda rng: rng.sample(range(ROWS), ROWS)),
    "own numpy": lambda: Mine(numpy.random.default_rng(3), lambda rng: rng.permutation(ROWS).tolist()),
    "own old numpy": lambda: Mine(numpy.random.RandomState(3), lambda rng: rng.permutation(ROWS).tolist()),
    "own, one by one": lambda: Mine(
        seeded(), lambda rng: (int(torch.randint(ROWS, (1,), generator=rng)) for _ in range(ROWS))
    ),
}


def seeded():
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("seedable", [True, False])
def test_every_sampler_goes_on_with_the_order_of_its_epoch(tmp_path, seedable):
    """In a new process, whose generators have no past, in any epoch; the model draws from the global ones as well."""
    place = torch.device("cpu")

    def start(make):
        random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
        sampler = make()
        batches = {"batch_sampler": sampler} if name == "balanced" else {"sampler": sampler, "batch_size": 2}
        return DataOrder(place), prepare_data_loader(DataLoader(range(ROWS), **batches), use_seedable_sampler=seedable)

    for name, make in OWN.items():
        order, loader = start(make)
        orders, saved = [], []
        for epoch in range(3):
            order.enter(epoch, loader)
            orders.append([])
            for batch in loader:
                orders[-1].append(batch.tolist())
                torch.rand(3), numpy.random.rand(), random.random()  # dropout
                save_state(tmp_path / f"{epoch}-{len(orders[-1])}", {"order": order.state_dict()}, {})
            saved.append(RandomStates.now(place))
        batches = len(orders[0])
        for epoch, step in ((0, 2), (1, 1), (1, batches), (2, 3)):
            order, loader = start(make)
            state, _ = load_state(tmp_path / f"{epoch}-{step}")
            order.load_state_dict(state["order"])
            if step == batches:  # as Trainer does at the end of an epoch
                epoch, step = epoch + 1, 0
                saved[epoch - 1].restore()
            order.enter(epoch, loader)
            loader.set_epoch(epoch)
            rest = [batch.tolist() for batch in skip_first_batches(loader, step)]
            assert rest == orders[epoch][step:], f"{name}, epoch {epoch}, step {step}"


@pytest.mark.parametrize("options", [{}, PLAIN], ids=["leaps", "plain"])
@pytest.mark.parametrize(
    "name", mostly_slow(["by length", "weighted, generator", "own numpy"], ["weighted, generator"])
)
def test_a_run_with_any_sampler_resumes_to_the_same_bits(name, options, tmp_path):
    class Sampled(HybridTrainer):
        def _get_train_sampler(self, dataset=None):
            return OWN[name]()

    def run(folder, **values):
        values = {"save_steps": 1, "per_device_train_batch_size": 2, "save_strategy": "no", **options, **values}
        config = hybrid_config(folder, max_steps=14, warmup_phase_steps=3, **values)
        trainer = Sampled(tiny_model(attention_dropout=0.1), config, train_dataset=ByteText(ROWS))
        trainer.train(resume_from_checkpoint=values.get("resume_from_checkpoint"))
        return weights(trainer.model)

    whole = run(tmp_path, save_strategy="steps")
    for step in (2, 6, 9):
        folder = str(tmp_path / f"checkpoint-{step}")
        assert_same_weights(whole, run(tmp_path / "again", resume_from_checkpoint=folder))


def test_draws_with_every_batch_are_said(tmp_path, caplog):
    for draw, says in ((lambda batch: torch.rand(1), True), (lambda batch: None, False)):
        caplog.clear()

        def collate(batch, draw=draw):
            draw(batch)
            return default_data_collator(batch)

        options = {"max_steps": 6, "per_device_train_batch_size": 2}
        trainers.train(tmp_path, samples=20, data_collator=collate, **options)
        assert (caplog.text.count("draws from the global random generators with every batch") == 1) is says


def test_data_order_of_real_steps_survives_a_resume(tmp_path):
    """Real steps see the samples one after the other, whatever was predicted or resumed in between."""

    class Recording(ByteText):
        def __init__(self):
            super().__init__(SAMPLES)
            self.seen = []

        def __getitem__(self, index):
            self.seen.append(index)
            return super().__getitem__(index)

    def go(folder, resume=None):
        data = Recording()
        options = {**OPTIONS, "save_steps": 10, "auto_lr": "off", "probe_dataset": ByteText(16, offset=300)}
        trainers.train(folder, train_dataset=data, resume=resume, **options)
        return data.seen

    whole = go(tmp_path / "a")
    for step in (10, 30):
        rest = go(tmp_path / f"b-{step}", str(tmp_path / "a" / f"checkpoint-{step}"))
        assert rest == whole[len(whole) - len(rest) :], step
        assert len(rest) < len(whole)


# Checkpoints made inside a step.


class SaveIn(TrainerCallback):
    """Save in every step at one event, as `enable_jit_checkpoint` and users' callbacks do."""

    def __init__(self, event):
        setattr(self, event, self._save)

    def _save(self, args, state, control, **kwargs):
        self.trainer._save_checkpoint(self.trainer.model, trial=None)


def of_short_run(folder, callback=None, late=False, **options):
    """Two micro-batches a step, an epoch and a half, a leap, with dropout; `late`: a callback added after ours."""
    torch.manual_seed(0)
    options = {"save_strategy": "no", "max_steps": 12, "gradient_accumulation_steps": 2, **options}
    options |= {"learning_rate": 1e-3, "probe_budget": 0.2, "leap_worth": 1.0, "max_predict_steps": 3}
    options |= {"per_device_train_batch_size": 4, "include_num_input_tokens_seen": "all"}
    options |= {"model": tiny_model(attention_dropout=0.1), "samples": 60}
    trainer = trainers.build(folder, callbacks=[callback] if callback and not late else None, **options)
    if callback and late:
        trainer.add_callback(callback)
    if callback:
        callback.trainer = trainer
    return trainer


def counted(trainer):
    summary = comparable(trainer.hybrid_summary())
    return {key: value for key, value in summary.items() if key not in ("memory", "buffer_bytes")}


@pytest.mark.parametrize(
    "event, late, options",
    [
        pytest.param(event, late, options, marks=[] if (event, late, options) in QUICK else pytest.mark.slow)
        for options in ({}, PLAIN, {"memory": "stream"})
        for event, late in INSIDE
    ],
)
@pytest.mark.long
def test_a_checkpoint_made_inside_a_step_resumes_to_the_same_bits(event, late, options, tmp_path):
    """The weights, and the counters. Making it changes nothing for the run that goes on."""
    reference = of_short_run(tmp_path / "reference", **options)
    reference.train()
    expected, seen = weights(reference.model), reference.state.num_input_tokens_seen
    saving = of_short_run(tmp_path, SaveIn(event), late, **options)
    saving.train()
    assert_same_weights(weights(saving.model), expected)
    made = sorted(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    assert len(made) >= 11
    for checkpoint in made[2::7]:
        resumed = of_short_run(tmp_path / "resumed", **options)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert_same_weights(weights(resumed.model), expected)
        assert resumed.state.num_input_tokens_seen == seen
        assert resumed.state.total_flos == pytest.approx(reference.state.total_flos)
        assert counted(resumed) == counted(reference)


@pytest.mark.parametrize("predict", [True, False])
def test_resuming_a_finished_run_trains_nothing(tmp_path, predict):
    options = {"enable_predict": predict, "lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 12}
    finished = of_short_run(tmp_path, **options)
    finished.train()
    resumed = of_short_run(tmp_path, **options)
    result = resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 12 and result.training_loss == 0.0
    assert_same_weights(weights(resumed.model), weights(finished.model))
    assert counted(resumed) == counted(finished)


# What the user is told.


def on_from(uninterrupted, folder, step=40, **options):
    trainer = build(folder, save_strategy="no", **options)
    trainer.train(resume_from_checkpoint=str(uninterrupted[0] / f"checkpoint-{step}"))
    assert trainer.state.global_step == STEPS
    return trainer


def ours(caplog, level):
    return [r.getMessage() for r in caplog.records if r.name.startswith("hf_hybrid") and r.levelno == level]


def test_what_was_restored_is_told(uninterrupted, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="hf_hybrid")
    report = on_from(uninterrupted, tmp_path).hybrid_summary()["resumed"]
    checkpoint = uninterrupted[0] / "checkpoint-40"
    saved = json.loads((checkpoint / "hybrid_state.json").read_text())
    parts, restored = saved["parts"], report["restored"]
    assert report["checkpoint"] == str(checkpoint) and report["step"] == 40
    assert report["changed_options"] == {} and report["warnings"] == [] and not ours(caplog, logging.WARNING)
    assert restored["phase"] == parts["leaps"]["controller"]["phase"] and restored["data"] == parts["feed"]
    (line,) = [message for message in ours(caplog, logging.INFO) if message.startswith("Resumed from")]
    assert f"`{checkpoint}` at step 40: phase `{restored['phase']}`" in line
    assert f"data behind {parts['feed']['trained']} batches of epoch {parts['feed']['epoch']}" in line


def test_the_line_stands_above_the_progress_bar(uninterrupted, tmp_path, capsys, caplog):
    """By default nobody sees the INFO of a package; where there is no bar, nothing is printed."""
    caplog.set_level(logging.WARNING, logger="hf_hybrid")
    on_from(uninterrupted, tmp_path / "a", disable_tqdm=False)
    assert capsys.readouterr().out.count("Resumed from `") == 1
    on_from(uninterrupted, tmp_path / "b")
    assert "Resumed from" not in capsys.readouterr().out


def test_what_is_not_restored_is_told(uninterrupted, tmp_path, caplog):
    folder = tmp_path / "checkpoint-40"
    shutil.copytree(uninterrupted[0] / "checkpoint-40", folder)
    for name in ("rng_state.pth", "hybrid_manifest.json"):
        (folder / name).unlink()
    changed = {"planner": "dynamics", "direction": "gradient_memory", "auto_lr": "off", "max_grad_norm": 0.5}
    trainer = build(tmp_path, save_strategy="no", learning_rate=1e-3, ignore_data_skip=True, **changed)
    trainer.train(resume_from_checkpoint=str(folder))
    report, warnings = trainer.hybrid_summary()["resumed"], ours(caplog, logging.WARNING)
    (table,) = [message for message in warnings if message.startswith("Options differ")]  # with all that differs
    assert all(warning in table or warning in warnings for warning in report["warnings"])
    for part in (
        "`learning_rate=0.001` is not taken up: optimizer and schedule go on with the checkpoint's `0.0005`",
        "What the planner has learned is not restored: it was `schedule` and is `dynamics`",
        "The memories of the direction are not restored: it was `orthogonal` and is `gradient_memory`",
        "The place in the data is not restored (`ignore_data_skip=True`)",
        "Automatic learning rate was on and is off: the scale begins at 1.",
        "Random generators are not restored",
        "nothing tells whether its files are whole",
    ):
        assert sum(part in warning for warning in report["warnings"]) == 1, part
    assert len(report["warnings"]) == 7 and "`max_grad_norm`  1.0" in table and len(table.splitlines()) == 2 + 4 + 5
    assert trainer.lr_scheduler.base_lrs == [5e-4] * len(trainer.lr_scheduler.base_lrs)  # as the warning says
    assert trainer.args.max_grad_norm == 0.5 and report["changed_options"]["max_grad_norm"] == [1.0, 0.5]
    assert set(report["changed_options"]) == set(changed)
    assert report["restored"]["data"] is None


def test_a_checkpoint_that_says_less_resumes(uninterrupted, tmp_path, caplog):
    """Options and counts to compare with are missing."""
    folder = tmp_path / "checkpoint-40"
    shutil.copytree(uninterrupted[0] / "checkpoint-40", folder)
    values = json.loads((folder / "hybrid_state.json").read_text())
    values = {name: values[name] for name in ("schema_version", "options", "parts")}
    (folder / "hybrid_state.json").write_text(json.dumps(values))
    (folder / "hybrid_manifest.json").unlink()
    trainer = build(tmp_path, save_strategy="no")
    trainer.train(resume_from_checkpoint=str(folder))
    assert len(ours(caplog, logging.WARNING)) == 1  # that there is no manifest
    assert_same_weights(weights(trainer.model), uninterrupted[1])


def test_what_parts_that_are_gone_left_in_a_checkpoint_is_passed_over(uninterrupted, tmp_path, caplog):
    """A planner that is no longer offered, a part that followed leaps, and what that measured of each."""
    folder = tmp_path / "checkpoint-40"
    shutil.copytree(uninterrupted[0] / "checkpoint-40", folder)
    values = json.loads((folder / "hybrid_state.json").read_text())
    values["options"]["planner"] = "bandit"
    parts = values["parts"]
    parts["leaps"]["gains"] = {"arm": 2, "last_loss": 3.0, "usual": 0.1, "spread": 0.1}
    parts["planner_observer"] = {"linearity": 0.5, "steps_since_leap": 3}
    parts["leap_residuals"] = {"gradient_steps": 1, "leap_rate": 0.1, "slopes_before": None, "slopes": {}, "means": {}}
    for leap in parts["run"]["record"]["leaps"]:
        leap.update(cosine=0.4, norm_ratio=1.2, rate=0.003)
    assert parts["run"]["record"]["leaps"]
    (folder / "hybrid_state.json").write_text(json.dumps(values))
    (folder / "hybrid_manifest.json").unlink()
    trainer = build(tmp_path, save_strategy="no")
    trainer.train(resume_from_checkpoint=str(folder))
    assert any("it was `bandit` and is `schedule`" in message for message in ours(caplog, logging.WARNING))
    assert_same_weights(weights(trainer.model), uninterrupted[1])


# What a checkpoint holds.


@pytest.mark.parametrize("version, said", [(None, "missing"), (5, "`5`"), (99, "`99`")])
def test_hybrid_state_of_another_version_is_not_read(tmp_path, version, said):
    save_state(tmp_path, {"part": {"a": [torch.ones(2)], "b": 1}}, {"options": {}})
    state, about = load_state(tmp_path)
    assert torch.equal(state["part"]["a"][0], torch.ones(2)) and state["part"]["b"] == 1 and about == {"options": {}}
    written = json.loads((tmp_path / VALUES_NAME).read_text())
    changed = {**written, "schema_version": version} if version else {"parts": written["parts"]}
    (tmp_path / VALUES_NAME).write_text(json.dumps(changed))
    with pytest.raises(OtherVersionError, match=f"its `schema_version` is {said}.*reads `6`"):
        load_state(tmp_path)


@pytest.mark.parametrize("options", [{}, PLAIN])
def test_a_checkpoint_of_an_earlier_version_goes_on_where_the_user_says_so(tmp_path, caplog, options):
    """`auto` promises the same run, and refuses it. Both ways out that the refusal names work."""
    options = {"max_steps": 8, "save_steps": 4, **options}
    build(tmp_path, **options).train()
    checkpoint = tmp_path / "checkpoint-4"
    shutil.rmtree(tmp_path / "checkpoint-8")
    saved = json.loads((checkpoint / VALUES_NAME).read_text())
    saved |= {"schema_version": saved["schema_version"] - 1, "parts": {"of": "another form"}}
    (checkpoint / VALUES_NAME).write_text(json.dumps(saved))
    reseal(checkpoint)
    with pytest.raises(CheckpointError, match="hybrid_state.json` was written by another version.*delete the file"):
        build(tmp_path, **options).train(resume_from_checkpoint="auto")
    assert (checkpoint / VALUES_NAME).is_file()
    shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-deleted"))
    (tmp_path.with_name(f"{tmp_path.name}-deleted") / "checkpoint-4" / VALUES_NAME).unlink()
    deleted = build(tmp_path.with_name(f"{tmp_path.name}-deleted"), **options)
    deleted.train(resume_from_checkpoint="auto")
    assert deleted.state.global_step == 8
    assert any("`hybrid_state.json` is gone from" in message for message in ours(caplog, logging.WARNING))
    caplog.clear()
    trainer = build(tmp_path, callbacks=[First()], **options)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    (warning,) = ours(caplog, logging.WARNING)
    assert re.search(r"checkpoint-4/hybrid_state.json` is not restored: its `schema_version` is `5`, and", warning)
    assert ("Phases" in warning) is trainer.has_phases and trainer.state.global_step == 8
    (first,) = (callback for callback in trainer.callback_handler.callbacks if isinstance(callback, First))
    expected = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert first.step == 4 and first.steps == {4.0} and is_committed(tmp_path / "checkpoint-8")
    assert_same_weights(first.weights, weights(expected))


class First(TrainerCallback):
    """Notes the state that a run begins with."""

    step = None

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        if self.step is None:
            self.step, self.weights = state.global_step, weights(model)
            self.steps = {float(found["step"]) for found in optimizer.state.values()}


def test_the_advice_for_a_damaged_hybrid_state_works(tmp_path):
    """With a manifest the damage is told first. Each message leads to the next, and the last to a run that goes on."""
    options = {"max_steps": 8, "save_steps": 4}
    build(tmp_path, **options).train()
    for name in (VALUES_NAME, TENSORS_NAME):
        checkpoint = Path(shutil.copytree(tmp_path / "checkpoint-8", tmp_path / name / "checkpoint-8"))
        (checkpoint / name).write_text("{")
        state = (
            f"Delete `{MANIFEST_NAME}`, `{VALUES_NAME}` and `{TENSORS_NAME}` in .*`resume_from_checkpoint={checkpoint}`"
        )
        for resume, advice, files in [
            ("auto", "to the folder of one of them", []),
            (checkpoint, f"delete its `{MANIFEST_NAME}`", [MANIFEST_NAME]),
            (checkpoint, state, [VALUES_NAME, TENSORS_NAME]),
        ]:
            trainer = build(checkpoint.parent, **options)
            with pytest.raises(ValueError, match=advice):
                trainer.train(resume_from_checkpoint=resume if resume == "auto" else str(resume))
            for file in files:
                (checkpoint / file).unlink()
        trainer = build(checkpoint.parent, **options)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert trainer.state.global_step == 8


def test_evaluate_and_save_see_the_weights_of_the_moment(tmp_path):
    """In every phase a checkpoint loads to exactly the weights that the model holds."""
    held, phases = {}, set()

    class Keep(TrainerCallback):
        def on_save(self, args, state, control, model=None, **kwargs):
            held[state.global_step] = weights(model)
            phases.add(trainer.run.last_phase)

    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer = trainers.build(tmp_path, eval_dataset=ByteText(32, offset=800), callbacks=[Keep], **options)
    trainer.train()
    assert phases == set(Phase)
    evals = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    for step in (2, 6, 12, 20, 29):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{step}")
        assert_same_weights(weights(loaded), held[step])
        data = {"eval_dataset": trainer.eval_dataset}
        fresh = trainers.build(tmp_path / "e", config=HybridConfig, model=loaded, enable_predict=False, **data)
        assert fresh.evaluate()["eval_loss"] == evals[step]


@pytest.mark.parametrize("sharded", [False, True], ids=["into one process", "under FSDP2"])
def test_a_checkpoint_without_a_trained_weight_is_refused(tmp_path, sharded):
    """Weights that FSDP2 wrote are read into one process, and those of one process under FSDP2."""
    model = tiny_model()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in saved.items()})
    accelerator = SimpleNamespace(is_fsdp2=sharded, is_main_process=True)
    trainer = SimpleNamespace(accelerator=accelerator, is_fsdp_enabled=False)

    def write():
        if sharded:
            save_file(saved, tmp_path / "model.safetensors")
        else:
            torch.save(saved, tmp_path / "pytorch_model_fsdp.bin")

    write()
    if not sharded:
        assert load_weights(trainer, tmp_path, model)
        assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    name = next(name for name in saved if "down_proj" in name)
    del saved[name]
    write()
    with pytest.raises(ValueError, match=f"`{re.escape(str(tmp_path))}` holds no weights for `{re.escape(name)}`"):
        load_weights(trainer, tmp_path, model)
