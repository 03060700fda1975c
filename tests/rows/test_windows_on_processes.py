"""Windows of two processes, also sharded: they agree on micro-batches, and end at the weights of one process."""

import json
import os

import pytest
import torch
import transformers
from conftest import mostly_slow
from packaging.version import Version
from rig import deepspeed_on_cpu, fsdp2_on_cpu, trainers
from rig.processes import together
from rig.sft_rows import KINDS, SIZES, Text, lively, pad, row
from safetensors.torch import load_file, save_file
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.rows import comparison, exchange, recurrent

pytestmark = pytest.mark.processes
SHARDING = {"ddp": {}, "ddp, compiled": {"torch_compile_backend": "aot_eager"}, "fsdp2": {"fsdp": True}}
SHARDING |= {f"zero{stage}": {"deepspeed": deepspeed_on_cpu.options(stage)} for stage in (1, 2, 3)}


def uneven(count=48, all_learned=False):
    """Rows of which the processes need different numbers of micro-batches: every other one is short, or unlabelled."""
    text = Text(8)
    rows = [
        row((text(20, 40), 1)) if n % 2 else row((text(3), 0), (text(2), all_learned or n % 4)) for n in range(count)
    ]
    return rows


EXPERTS = {  # and a state along the row
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16,
    "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "output_router_logits": True, "router_aux_loss_coef": 0.5,
}  # fmt: skip
DATA = {"agent": KINDS["agent"], "uneven": uneven}


class Readers(LlamaForCausalLM):
    """A model whose losses are means over the labels of a micro-batch, as those of images and text are."""

    accepts_loss_kwargs = False


STATES = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 16}
KINDS_OF_MODELS = {
    "experts": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, **EXPERTS)),
    "means": lambda: Readers(LlamaConfig(**SIZES)),
    "own tokens": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "lfm2": lambda: Lfm2ForCausalLM(Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])),
    "mamba2": lambda: Mamba2ForCausalLM(Mamba2Config(**SIZES, **STATES)),
    "text": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
}
COMPARED = {
    "experts": (uneven, {}),
    "means": (lambda: uneven(all_learned=True), {}),  # `Trainer` takes no mean of nothing
    "own tokens": (uneven, {"average_tokens_across_devices": False}),
    "lfm2": (KINDS["agent"], {}),
    "mamba2": (KINDS["agent"], {}),
}
COMPARED_IN = {"ddp": tuple(COMPARED), **dict.fromkeys(("fsdp2", "zero1", "zero2", "zero3"), ("experts", "means"))}
"""What is compared with `Trainer` on as many processes."""


def train(trainer, config, folder, rows, kind="text", **options):
    values = {"optim": "sgd", "learning_rate": 0.1, "gradient_accumulation_steps": 3, "max_steps": 3, **options}
    rows_each = 4 // int(os.environ.get("WORLD_SIZE", 1))
    values |= {"model": lively(KINDS_OF_MODELS[kind]), "data_collator": pad, "train_dataset": rows}
    return trainers.train(folder, trainer, config, per_device_train_batch_size=rows_each, **values)


def run(folder, sharding):
    (deepspeed_on_cpu if "deepspeed" in SHARDING[sharding] else fsdp2_on_cpu).enable()
    recurrent.LEAST = 8  # tokens of tiny rows that a pass has to save
    rank = int(os.environ["RANK"])
    for name, data in DATA.items():
        trainer = train(HybridTrainer, HybridConfig, folder / name, data(), leap_gain=0, **SHARDING[sharding])
        found = {**trainer.hybrid_summary(), "losses": [e["loss"] for e in trainer.state.log_history if "loss" in e]}
        found["tokens_of_all"] = trainer.run.speed.tokens
        (folder / f"{name}{rank}.json").write_text(json.dumps(found, default=str))
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if rank == 0:
            save_file({key: tensor.clone() for key, tensor in weights.items()}, folder / f"{name}.safetensors")
    for name in COMPARED_IN.get(sharding, ()):
        data, options = COMPARED[name]
        for kind, config in ((Trainer, TrainingArguments), (HybridTrainer, HybridConfig)):
            own = {**options, **({"leap_gain": 0} if kind is HybridTrainer else {}), **SHARDING[sharding]}
            trainer = train(kind, config, folder / kind.__name__, data(), kind=name, **own)
            weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
            if rank == 0:
                weights = {key: tensor.clone() for key, tensor in weights.items()}
                save_file(weights, folder / f"{name} {kind.__name__}.safetensors")
        (folder / f"{name}{rank}.json").write_text(json.dumps(trainer.hybrid_summary(), default=str))
    torch.distributed.barrier()


# DDP has a default test in test_images.py.
@pytest.fixture(scope="module", params=mostly_slow(SHARDING, ["fsdp2"]))
def launched(request, tmp_path_factory):
    if "deepspeed" in SHARDING[request.param]:
        pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp(request.param)
    assert together(2, lambda: run(folder, request.param)) == [0, 0]
    return folder


@pytest.mark.parametrize("name", DATA)
def test_two_processes_end_where_plain_trainer_on_one_does(launched, tmp_path, name):
    alone = train(Trainer, TrainingArguments, tmp_path, DATA[name]())
    expected = {key: tensor.detach() for key, tensor in alone.model.state_dict().items()}
    found = load_file(launched / f"{name}.safetensors")
    assert all(torch.allclose(found[key], expected[key], rtol=0, atol=2e-7) for key in found)
    first, second = (json.loads((launched / f"{name}{rank}.json").read_text()) for rank in (0, 1))
    losses = [entry["loss"] for entry in alone.state.log_history if "loss" in entry]
    assert first["losses"] == second["losses"] == pytest.approx(losses, rel=1e-5)
    assert first["tokens_of_all"] == second["tokens_of_all"] == first["tokens"] + second["tokens"]
    assert first["micro_batches_saved"] == second["micro_batches_saved"] > 0
    assert first["plain_rows_because"] is None and first["tokens_padding"] + first["tokens_shared"] > 0


@pytest.mark.parametrize("name", COMPARED)
def test_two_processes_end_where_those_of_plain_trainer_do(launched, name):
    """A micro-batch of a process has a loss of its own; one of the processes may need fewer micro-batches."""
    if not (launched / f"{name}0.json").exists():
        pytest.skip("compared under DDP; router logits do not leave compiled layers")
    if name == "lfm2" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("its layers are not told where rows end")
    expected, found = (load_file(launched / f"{name} {kind}.safetensors") for kind in ("Trainer", "HybridTrainer"))
    assert all(torch.allclose(found[key], expected[key], rtol=0, atol=1e-6) for key in found)
    for rank in (0, 1):
        summary = json.loads((launched / f"{name}{rank}.json").read_text())
        assert summary["plain_rows_because"] is None and summary["micro_batches_saved"] > 0


@pytest.mark.parametrize("where", mostly_slow(["ten tokens", "tree", "key"], ["ten tokens"]))
def test_a_process_that_cannot_share_does_not_leave_the_other_waiting(where, tmp_path, monkeypatch):
    """The model of one rank takes no ten tokens, or no tree, or its batches hold a key: both train as with Trainer."""
    monkeypatch.undo()  # what does not work is no error here

    def broken(*args, **kwargs):
        raise RuntimeError("not on this rank")

    def with_key(rows):
        return {**pad(rows), "task": "a"}

    class Tasks(LlamaForCausalLM):
        def forward(self, *args, task=None, **kwargs):
            return super().forward(*args, **kwargs)

    def run():
        rank = int(os.environ["RANK"])
        if rank == 1 and where != "key":
            room, name = {"ten tokens": (exchange, "drawn_numbers"), "tree": (comparison, "difference")}[where]
            setattr(room, name, broken)
        for kind, config in ((Trainer, TrainingArguments), (HybridTrainer, HybridConfig)):
            torch.manual_seed(0)
            collator = with_key if where == "key" and rank else pad
            options = {"model": Tasks(LlamaConfig(**SIZES)), "data_collator": collator}
            options |= {"optim": "sgd", "learning_rate": 0.1, "gradient_accumulation_steps": 3, "max_steps": 2}
            options |= {"remove_unused_columns": False, "train_dataset": KINDS["agent"]()}
            trainer = trainers.train(tmp_path / kind.__name__, kind, config, per_device_train_batch_size=2, **options)
            if rank == 0:
                torch.save(dict(trainer.model.state_dict()), tmp_path / f"{kind.__name__}.pt")
        summary = trainer.hybrid_summary()
        assert summary["plain_rows_because"] and not summary["tokens_shared"]

    assert together(2, run, timeout=60) == [0, 0]
    theirs, ours = (torch.load(tmp_path / f"{kind.__name__}.pt") for kind in (Trainer, HybridTrainer))
    assert all(torch.equal(weight, ours[name]) for name, weight in theirs.items())
