"""What plans count beside tensors of a model, as runs have them: slots, page-locked buffers, workspaces, transfers."""

import gc
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from conftest import ByteText, hybrid_config, tiny_model
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from benchmarks.memory.floors import step_traffic
from hf_hybrid import HybridTrainer, machine
from hf_hybrid.build import make_plan
from hf_hybrid.machine import SMALL, locked_bytes
from hf_hybrid.plan import of_trainer
from hf_hybrid.plan.accounting import ModelShape, storage_bytes
from hf_hybrid.plan.estimate import Estimator
from hf_hybrid.plan.setups import CONTEXT_BYTES, Setup, with_context
from hf_hybrid.plan.trace import Tracer
from hf_hybrid.streaming import optimizer, transfers, units
from hf_hybrid.streaming.layers import find_layers

MIB = 2**20


def llama(**sizes):
    return tiny_model(**{"num_hidden_layers": 4, "tie_word_embeddings": False, **sizes})


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=256, n_positions=64))


class Watch(TrainerCallback):
    """Calls `look(trainer)` before every update: a save of the step before is over, and no unit is on its way."""

    def __init__(self, look):
        self.look, self.seen, self.trainer = look, [], None

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.seen.append(self.look(self.trainer))


def run(folder, model, look, **options):
    """A streamed run, and what `look` saw in it."""
    watch = Watch(look)
    plan_values = {name: options.pop(name) for name in ("stream_embeddings", "prefetch_layers") if name in options}
    options = {"max_steps": 3, "memory": "stream", "enable_predict": False, **options}
    config = hybrid_config(folder, plan_values=plan_values, **options)
    watch.trainer = HybridTrainer(model, config, train_dataset=ByteText(60), callbacks=[watch])
    watch.trainer.train()
    return watch.trainer, watch.seen


# Slots.


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (llama, {}),
        (llama, {"prefetch_layers": 2, "resident_layers": 1, "stream_embeddings": True}),
        (llama, {"prefetch_layers": 0, "resident_layers": 3, "bf16": True, "stream_embeddings": True}),
        (gpt2, {"bf16": True, "resident_layers": 2}),  # its matrices are not those of linear layers: they stay in fp32
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_planned_slots_are_those_of_a_run_through_saves(make, options, tmp_path):
    buffers = []

    def look(trainer):
        held = trainer.memory.streamer.tensors_held()["slots"]
        buffers.extend(map(weakref.ref, held))
        return storage_bytes(held)

    trainer, seen = run(tmp_path, make(), look, save_strategy="steps", save_steps=1, **options)
    streamed = trainer.memory.streamer.streamed
    rest = storage_bytes(p for p in trainer.model.parameters() if id(p) not in streamed)
    planned = trainer.memory.plan.table.get("weights", "device") - rest
    assert seen == [planned] * 3
    gc.collect()
    assert trainer.memory.streamer.tensors_held()["slots"] == []
    assert not any(buffer() is not None for buffer in buffers), "slots are gone with the run"


# Page-locked memory of the host.


def test_small_buffers_are_powers_of_two_and_large_ones_whole_pages():
    sizes = (0, 1, 3 * MIB, 4 * MIB, SMALL - 1, SMALL, SMALL + 1, 100 * MIB)
    assert [locked_bytes(size) for size in sizes] == [0, 1, 4 * MIB, 4 * MIB, SMALL, SMALL, SMALL + 4096, 100 * MIB]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"bf16": True},
        pytest.param({"optimizer_states": "8bit"}, marks=pytest.mark.slow),
        {"offload_activations": True, "gradient_accumulation_steps": 2},
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.long
def test_host_bytes_on_a_gpu_are_those_of_the_buffers_that_a_run_takes(options, tmp_path, monkeypatch):
    if "optimizer_states" in options:
        pytest.importorskip("bitsandbytes")
    asked, own = [], machine.host_buffer

    def host_buffer(size, *, pin):
        asked.append(size)
        return own(size, pin=pin)

    for module in (machine, optimizer, transfers, units):
        monkeypatch.setattr(module, "host_buffer", host_buffer)
    model = llama(hidden_size=48, intermediate_size=80)
    shape = ModelShape.of(model, [name for name, _ in find_layers(model)])
    tracer = Tracer.of(model)
    trainer, _ = run(tmp_path, model, lambda trainer: None, **options)
    asked_for = trainer.memory.plan.setup
    on_cpu, on_gpu = (
        Estimator(shape, tracer).streamed(replace(asked_for, accelerator=name), 0, False).table
        for name in ("cpu", "cuda")
    )
    more = on_gpu.total("host") - on_cpu.total("host")
    parked = on_cpu.get("activations", "host")
    assert more > 0 and bool(parked) == ("offload_activations" in options)
    assert more == sum(map(locked_bytes, asked)) - sum(asked)


# Threads, each with a workspace.


@pytest.mark.usefixtures("of_a_library")
def test_a_walk_by_layer_has_a_thread_per_micro_batch_beside_the_trainers_own(tmp_path):
    """One thread computes the layers. Those of the micro-batches compute what the model does around them."""
    model, layers, around = llama(), set(), set()
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda *_: layers.add(threading.current_thread()))
    model.lm_head.register_forward_hook(lambda *_: around.add(threading.current_thread()))

    def look(trainer):  # the first step compares the walks
        if trainer.state.global_step == 0:
            layers.clear(), around.clear()

    trainer, _ = run(tmp_path, model, look, max_steps=2, gradient_accumulation_steps=3)
    assert layers == {threading.main_thread()} and len(around) == 3
    on_gpu = replace(trainer.memory.plan.setup, accelerator="cuda", workspace=MIB)
    assert on_gpu.workspaces(streamed=True) == (len(layers | around) + 1) * MIB, "and autograd's"


def test_workspaces_are_in_every_plan_for_a_gpu():
    model = llama()
    estimator = Estimator(ModelShape.of(model, [name for name, _ in find_layers(model)]))

    def counted(memory, accelerator="cuda", **options):
        setups = (Setup(8, memory=memory, accelerator=accelerator, workspace=size, **options) for size in (0, MIB))
        without, with_them = (estimator.plan(setup).table.get("buffers", "device") for setup in setups)
        return (with_them - without) / MIB

    assert counted("off") == counted("stream") == 2
    assert counted("stream", gradient_accumulation_steps=8) == 8 + 2
    assert counted("stream", gradient_accumulation_steps=8, accumulation_walk="micro_batch") == 2
    assert counted("stream", offload_activations=True) == 1 + 2, "also a window of one micro-batch is walked then"
    assert counted("stream", gradient_accumulation_steps=8, accelerator="cpu") == 0


# The CUDA context.


def test_the_context_is_counted_once(tmp_path, monkeypatch):
    total, free = 24 * 2**30, 23 * 2**30
    asked = Setup(8, accelerator="cuda", vram=total)
    assert asked.device_budget == int((total - CONTEXT_BYTES) / 1.05), "it is made within the memory that a user names"
    measured = Setup(8, accelerator="cuda", vram=with_context(free))
    assert measured.device_budget == int(free / 1.05), "it is gone from what is free"
    assert with_context(None) is None
    # The trainer measures where no budget is given.
    trainer = HybridTrainer(llama(), hybrid_config(tmp_path, enable_predict=False), train_dataset=ByteText(8))
    monkeypatch.setattr(of_trainer, "device_memory", lambda device: free)
    monkeypatch.setattr(type(trainer.args), "device", torch.device("cuda"))
    assert make_plan(trainer, None).setup.device_budget == measured.device_budget


# Transfers.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stream_embeddings": True},
        {"gradient_accumulation_steps": 3},
        {"prefetch_layers": 0},
        {"resident_layers": 2},
        {"stream_embeddings": True, "tied": True},
        {"stream_embeddings": True, "gradient_accumulation_steps": 3, "accumulation_walk": "micro_batch"},
        {"bf16": True, "stream_embeddings": True},
        pytest.param({"stream_embeddings": True, "gradient_accumulation_steps": 3}, marks=pytest.mark.slow),
        pytest.param({"bf16": True}, marks=pytest.mark.slow),
        pytest.param({"bf16": True, "gradient_accumulation_steps": 3}, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.long
def test_traffic_is_that_of_a_run(options, tmp_path):
    def look(trainer):
        moved = trainer.memory.statistics()
        return moved["bytes_in"], moved["bytes_out"]

    options = dict(options)
    model = llama(tie_word_embeddings=options.pop("tied", False))
    trainer, seen = run(tmp_path, model, look, **options)
    least = step_traffic(trainer.memory.plan)
    into, back = (seen[2][way] - seen[1][way] for way in (0, 1))
    assert (into, back) == (least["h2d"], least["d2h"])
