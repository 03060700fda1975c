"""
Trainings on the simulated device, beside the same on the CPU.

A scenario is a function of a [`Place`]. It returns the weights that must be equal in both places and facts that
test_scenarios.py asserts something of. Most are one training with other options; [`SCENARIOS`] lists them all.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import logging
import math
import random
import sys
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rig import vision
from rig.graphs import RecordedGraph
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TrainerCallback,
)

from hf_hybrid import HybridConfig, HybridTrainer, MemoryProfilerCallback, machine, optimizers
from hf_hybrid.build import estimator_for
from hf_hybrid.optimizers import inner_optimizer
from hf_hybrid.phase_memory.activations import ActivationCheckpointing, BoundaryOffload
from hf_hybrid.plan.setups import CONTEXT_BYTES, MARGIN, Evaluated
from hf_hybrid.recovery import MemoryPolicy
from hf_hybrid.run import trainer_view
from hf_hybrid.saving.drift import hashes_of
from hf_hybrid.streaming.optimizer import LazyOptimizer
from hf_hybrid.streaming.streamer import Updates
from hf_hybrid.streaming.transfers import Transfers
from hf_hybrid.streaming.units import Unit
from simulated_gpu import marks
from simulated_gpu.real import RealDevice

Tensor = torch.Tensor

LEAPS = {
    "enable_predict": True,
    "max_steps": 12,
    "warmup_phase_steps": 2,
    "full_phase_steps": 2,
    "correct_phase_steps": 1,
    "max_predict_steps": 2,
    "leap_worth": 10.0,
    "leap_budget": 1.0,
}
A_LEAP = {**LEAPS, "max_steps": 7}
"""Until the first leap has been judged, and one step more."""
STREAM = {"memory": "stream", "resident_layers": 0}
STREAMED = ("memory", "resident_layers", "accumulation_walk")
# Values of a plan that no option has.
ENDS, ON_HOST = {"stream_embeddings": True}, {"buffers_device": "cpu"}


@dataclass
class Place:
    """Where a scenario runs: the simulated device, or the CPU."""

    name: str
    """`"device"`; `"resident"`, the same without streamed layers; or `"cpu"`."""
    folder: Path
    simulator: Any
    facts: dict[str, Any] = field(default_factory=dict)
    _runs: int = 0

    @property
    def on_device(self) -> bool:
        return self.name != "cpu"

    @property
    def resident(self) -> bool:
        return self.name == "resident"

    def driver(self) -> contextlib.AbstractContextManager:
        """NVML: a made-up one for the simulated device, and the machine's own for a real one."""
        simulated = self.on_device and not isinstance(self.simulator, RealDevice)
        return a_driver() if simulated else contextlib.nullcontext()

    def config(self, cls: type = HybridConfig, **options) -> HybridConfig:
        """Options of a short training that stays within its folder; the folder's name counts the trainings."""
        self._runs += 1
        values = {
            "output_dir": str(self.folder / str(self._runs)),
            "max_steps": 3,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 3e-3,
            "weight_decay": 0.1,
            "max_grad_norm": 0.3,
            "warmup_steps": 1,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "enable_predict": False,
            "use_cpu": not self.on_device,
        }
        plan_values = options.pop("plan_values", {})
        config = cls(**{**values, **options})
        # The device has room for all graphs: unless a scenario says otherwise, layers are recomputed.
        config.plan_values = {"kept_graphs": 0, **config.plan_values, **plan_values}
        return config

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Let the simulator see what the host does to page-locked memory meanwhile."""
        with self.simulator.HostMode() if self.on_device else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def counted(self, trainer: HybridTrainer) -> Iterator[Steps]:
        """Around a training: the stops of each step, and the bytes that stay."""
        steps = Steps(trainer, self.simulator)
        trainer.add_callback(steps)
        before = self.bytes()
        with self.watched():
            yield steps
        trainer.remove_callback(steps)
        # The states of the optimizer stay where they are, as plain Trainer's do: they are not counted.
        trainer.optimizer = trainer.lr_scheduler = None
        if trainer.memory.streams:
            trainer.memory.optimizer, trainer.memory.streamer.updates = None, Updates()
        trainer.callback_handler.optimizer = trainer.callback_handler.lr_scheduler = None
        trainer.accelerator.free_memory()
        if self.on_device:
            self.simulator.synchronize()
        for _ in range(3):  # a thread may still hold the last thing that it was given
            gc.collect()
            time.sleep(0.01)
        self.facts["stops"] = steps.ordinary()
        self.facts["stops_at_leaps"] = steps.at_leaps()
        self.facts["bytes"] = (before, self.bytes())

    def bytes(self) -> dict[str, int]:
        """Bytes on the device, and of page-locked memory."""
        return {"device": self.simulator.device_bytes, **self.simulator.page_locked_bytes()}


class Steps(TrainerCallback):
    """Counts what stops the host in each step."""

    def __init__(self, trainer: HybridTrainer, simulator: Any):
        self.trainer, self.simulator = trainer, simulator
        self.marks = [self._now()]
        self.busy = [True]

    def _now(self) -> tuple[Counter, str]:
        leaps = [leap.summary() for leap in self.trainer.run.record.leaps]  # a whole summary would wait
        return Counter(self.simulator.found.stops), repr(leaps)

    def on_step_end(self, args, state, control, **kwargs):
        self.marks.append(self._now())
        self.busy.append(control.should_save or control.should_evaluate)

    def _steps(self) -> Iterator[tuple[Counter, bool, bool]]:
        for index in range(1, len(self.marks)):
            (before, leaps), (after, now) = self.marks[index - 1], self.marks[index]
            yield after - before, now != leaps, self.busy[index] or self.busy[index - 1]

    def ordinary(self) -> dict[str, int]:
        """By package, the most stops of a step in which no leap was made or judged and nothing saved or evaluated."""
        return self._most(stops for stops, leapt, busy in self._steps() if not leapt and not busy)

    def at_leaps(self) -> dict[str, int]:
        """By package, the most stops of a step in which a leap was made or judged."""
        return self._most(stops for stops, leapt, busy in self._steps() if leapt)

    @staticmethod
    def _most(steps) -> dict[str, int]:
        most: Counter = Counter()
        for stops in steps:
            for package, count in Counter({p: 0 for p, _ in stops}).items():
                count = sum(n for (p, _), n in stops.items() if p == package)
                most[package] = max(most[package], count)
        return dict(most)


def model(*, layers: int = 3, width: int = 16, seed: int = 0, experts: int = 0, **options) -> PreTrainedModel:
    """A Llama, or a mixture, without SDPA, whose kernels for CUDA the simulator does not have."""
    torch.manual_seed(seed)
    values = {
        "vocab_size": 64,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "attn_implementation": "eager",
        "use_cache": False,
    }
    if experts:
        values |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": width, "head_dim": 8}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**values, **options}))
    return LlamaForCausalLM(LlamaConfig(**{**values, **options}))


def adapted(base: torch.nn.Module) -> torch.nn.Module:
    """With LoRA on it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def rows(count: int = 64, *, lengths: tuple[int, ...] = (12,), distinct: int = 64) -> list[dict[str, Tensor]]:
    """Random tokens; the rows take the lengths in turn. After `distinct` rows they repeat, which leaps can learn."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(count):
        if index % distinct == 0:
            generator.manual_seed(0)
        ids = torch.randint(64, (lengths[index % len(lengths)],), generator=generator)
        made.append({"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)})
    return made


def padded(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of rows of unequal length."""
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in batch], batch_first=True, padding_value=value)
        for name, value in fill.items()
    }


def weights_of(trainer: HybridTrainer) -> dict[str, Tensor]:
    return {name: p.detach().cpu().float().clone() for name, p in trainer.model.named_parameters()}


def trainer_of(place: Place, made: torch.nn.Module, data=None, **options) -> HybridTrainer:
    extra = {name: options.pop(name) for name in ("callbacks", "data_collator") if name in options}
    data = rows() if data is None else data
    extra = {"data_collator": padded, **extra}
    return HybridTrainer(made, place.config(**options), train_dataset=data, eval_dataset=data[:4], **extra)


def trained(place: Place, trainer: HybridTrainer) -> dict[str, Tensor]:
    """Train, count, and return the weights."""
    with place.counted(trainer):
        trainer.train()
    return weights_of(trainer)


# Kinds of scenarios.


def train(place: Place, *, tied: bool = True, lora: bool = False, architecture: dict | None = None, **options):
    """One training. Beside it nothing is streamed: tests/streaming shows that on a CPU this changes nothing."""
    # Only streamed layers are held in int8, and those that are walked layer by layer draw dropout in another order.
    streamed_alone = options.get("base_precision") == "int8" or "attention_dropout" in (architecture or {})
    if place.resident or (not place.on_device and not streamed_alone):
        options = {name: value for name, value in options.items() if name not in STREAMED}
    made = model(tie_word_embeddings=tied, **(architecture or {}))
    if options.pop("on_device_already", False) and place.on_device:
        made.cuda()
    data = rows(lengths=options.pop("lengths", (12,)), distinct=options.pop("distinct", 64))
    trainer = trainer_of(place, adapted(made) if lora else made, data, **options)
    weights = trained(place, trainer)
    place.facts |= told_by(trainer)
    return weights


class Peak(TrainerCallback):
    """The largest number of bytes on the device within a step, beside what is there when it begins."""

    def __init__(self, place: Place):
        self.place, self.grown = place, []

    def on_step_begin(self, *args, **kwargs):
        if self.place.on_device:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()

    def on_step_end(self, *args, **kwargs):
        if self.place.on_device:
            self.grown.append(torch.cuda.max_memory_allocated() - self.before)


def told_by(trainer: HybridTrainer) -> dict[str, Any]:
    """Losses of every step, and what became of the leaps."""
    return {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "leaps": [leap["verdict"] for leap in trainer.hybrid_summary()["leaps"]],
    }


SCENARIOS: dict[str, Scenario] = {}


@dataclass(frozen=True)
class Scenario:
    """What runs, where else, and what is expected of it."""

    function: Callable[[Place], dict[str, Tensor]]
    beside: str = "cpu"
    """Where the weights come from that must be reached: the CPU, or a "resident" training on the device."""
    tolerance: float = 1e-6
    """Largest difference of a weight between the places."""
    stops: int = 4
    """Most stops of the package in an ordinary step."""
    keeps_model: bool = False
    """The model stays on the device after training, as plain Trainer leaves it."""
    left: int = 0
    """Bytes on the device that a process keeps when everything else is gone: tables of bitsandbytes."""
    locks_masters: bool = False
    """Masters are page-locked when the optimizer is made, and stay so: they are the model's weights."""
    simulated_only: bool = False
    """A real GPU cannot run it, for a reason that stands where the scenario does."""


def training(name: str, *, expect: dict | None = None, **options) -> None:
    """Add a scenario that is one training."""
    expect = {"keeps_model": options.get("memory", "off") == "off", **(expect or {})}
    SCENARIOS[name] = Scenario(partial(train, **options), **expect)


def scenario(**expect) -> Callable:
    """Add a function as a scenario."""

    def add(function):
        SCENARIOS[function.__name__] = Scenario(function, **expect)
        return function

    return add


def packed(base: torch.nn.Module) -> torch.nn.Module:
    """The same model, whose layers hold their matrices in 4 bits."""
    import bitsandbytes

    for parent in [part for layer in base.model.layers for part in (layer.self_attn, layer.mlp)]:
        for name, old in list(parent.named_children()):
            if isinstance(old, torch.nn.Linear):
                sizes = old.in_features, old.out_features
                new = bitsandbytes.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4")
                new.weight = bitsandbytes.nn.Params4bit(old.weight.data, False, quant_type="nf4", module=new)
                setattr(parent, name, new.to("cpu"))
    return base


# Streamed layers. On the host, the optimizer of a streamed layer computes as on the CPU. In bf16, autocast rounds other
# operations on a GPU than on a CPU, so that a resident training on the device is what a streamed one must equal.

AS_RESIDENT = {"beside": "resident"}
ROUNDED_STATES = {"tolerance": 1e-4, "left": 2048}  # a rounding error may move a moment to the next of its 256 codes
ORTHOGONALISED = {"tolerance": 1e-3}  # in bf16, which makes much of a rounding error
MORE = {"gradient_accumulation_steps": 3, "architecture": {"layers": 4}}
WIDE = {"width": 64}  # matrices large enough for moments in 8 bits

training("by_micro_batch", **STREAM, accumulation_walk="micro_batch")
training("by_layer", **STREAM, accumulation_walk="layer")
training("by_micro_batch_more", **STREAM, accumulation_walk="micro_batch", **MORE)
training("by_layer_more", **STREAM, accumulation_walk="layer", **MORE)
training("parked", **STREAM, accumulation_walk="layer", offload_activations=True)
training("parked_uneven", **STREAM, offload_activations=True, lengths=(6, 12, 9))
training("uneven_by_micro_batch", **STREAM, accumulation_walk="micro_batch", lengths=(6, 12, 9))
# Untied, so that no gradient is a sum in another order: the update is that of the resident model to the last bit.
TO_THE_LAST_BIT = {"beside": "resident", "tolerance": 0.0}
training("ends_streamed", **STREAM, plan_values=ENDS, tied=False, expect=TO_THE_LAST_BIT)
training("ends_streamed_tied", **STREAM, plan_values=ENDS)
training("no_accumulation", **STREAM, gradient_accumulation_steps=1)
training("no_clipping", **STREAM, max_grad_norm=0.0)
IN_BACKWARD = {"max_grad_norm": 0.0, "out_of_memory": "raise"}
training("in_backward", **STREAM, **IN_BACKWARD, tied=False, expect=TO_THE_LAST_BIT)
training("in_backward_eight_bit", **STREAM, **IN_BACKWARD, optimizer_states="8bit", architecture=WIDE, tied=False,
         expect=AS_RESIDENT | ROUNDED_STATES)  # fmt: skip
training("in_backward_alone", **STREAM, **IN_BACKWARD, gradient_accumulation_steps=1, plan_values=ENDS)
# The third layer of the first backward pass is there already: nothing comes that would wait for the first to leave.
training("in_backward_far_ahead", **STREAM, **IN_BACKWARD, plan_values={"prefetch_layers": 2},
         architecture={"layers": 5})  # fmt: skip
training("in_backward_by_micro_batch", **STREAM, **IN_BACKWARD, accumulation_walk="micro_batch", **MORE)
training("fetched_far_ahead", **STREAM, plan_values={"prefetch_layers": 3}, architecture={"layers": 5})
training("not_fetched_ahead", **STREAM, plan_values={"prefetch_layers": 0})
SOME_RESIDENT = {"memory": "stream", "resident_layers": 2, "architecture": {"layers": 4}}
training("some_resident", **SOME_RESIDENT)
training("some_resident_bf16", **SOME_RESIDENT, bf16=True, expect=AS_RESIDENT)
# One layer travels: the sum of its gradients comes back while it still leaves.
training("some_resident_by_micro_batch", **{**SOME_RESIDENT, "resident_layers": 3}, bf16=True,
         accumulation_walk="micro_batch", expect=AS_RESIDENT)  # fmt: skip
training("some_resident_parked", **SOME_RESIDENT, offload_activations=True)
training("some_resident_fetched_far_ahead", **SOME_RESIDENT, plan_values={"prefetch_layers": 3})
training("some_resident_leaps", **SOME_RESIDENT, **A_LEAP, distinct=4)
training(
    "some_resident_saves", **SOME_RESIDENT, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=1
)
training("some_resident_eight_bit", memory="stream", resident_layers=1, optimizer_states="8bit", architecture=WIDE,
         expect=AS_RESIDENT | ROUNDED_STATES)  # fmt: skip
training("all_resident", memory="stream", resident_layers=2)
# Two of four layers and one of two passes through a third are not recomputed: their weights come by other slots.
GRAPHS = {**STREAM, "architecture": {"layers": 4}, "plan_values": {"kept_graphs": 5}}
training("graphs", **GRAPHS, tied=False, expect=TO_THE_LAST_BIT)
training("graphs_by_micro_batch", **{**GRAPHS, "plan_values": {"kept_graphs": 3}}, accumulation_walk="micro_batch")
training("graphs_in_backward", **GRAPHS, **IN_BACKWARD, tied=False, expect=TO_THE_LAST_BIT)
training("graphs_lora_int8", **GRAPHS, lora=True, base_precision="int8")
training(
    "graphs_eight_bit_bf16", **GRAPHS, optimizer_states="8bit", bf16=True, expect=AS_RESIDENT | {"locks_masters": True}
)
# A GPU has a random generator of its own.
training("dropout", **STREAM, architecture={"attention_dropout": 0.2}, expect={"simulated_only": True})
training(
    "chunked_loss", **STREAM, chunked_loss="on", tied=False, expect={"stops": 6}
)  # where labels are, by micro-batch
training("sgd", **STREAM, optim="sgd")
training("muon", **STREAM, optim="muon", tied=False, expect=TO_THE_LAST_BIT)
training("bf16", **STREAM, bf16=True, tied=False, expect=TO_THE_LAST_BIT)
training("bf16_by_micro_batch", **STREAM, bf16=True, accumulation_walk="micro_batch", expect=AS_RESIDENT)
training("bf16_no_accumulation", **STREAM, bf16=True, gradient_accumulation_steps=1, expect=AS_RESIDENT)
training("bf16_of_a_device_model", **STREAM, bf16=True, on_device_already=True, expect=AS_RESIDENT)
# The kernel of bitsandbytes for CUDA rounds moments to the nearest code. That for the CPU does not: `eight_bit` on an
# H100 was 1.9e-3 from the CPU. So is an update with the nearest codes that is computed on the CPU: the largest
# differences of 15 tensors are equal to 1e-6.
training("eight_bit", **STREAM, optimizer_states="8bit", architecture=WIDE, expect=AS_RESIDENT | ROUNDED_STATES)
training("eight_bit_more", **STREAM, optimizer_states="8bit", **MORE, expect=ROUNDED_STATES)
training("eight_bit_by_micro_batch", **STREAM, optimizer_states="8bit", accumulation_walk="micro_batch")
training("eight_bit_bf16", **STREAM, optimizer_states="8bit", bf16=True,
         expect=AS_RESIDENT | {"locks_masters": True})  # fmt: skip


def with_peak(place: Place, *, architecture: dict, **options) -> dict[str, Tensor]:
    """Copies to the host are as late as they may be, so the peak of a step tells how many sources are kept for them."""
    peak = Peak(place)
    found = train(place, **STREAM, architecture={"width": 32, **architecture}, callbacks=[peak], **options)
    place.facts["grown"] = max(peak.grown, default=0)
    return found


for _layers in (4, 8):
    _options = {"architecture": {"layers": _layers}, "gradient_accumulation_steps": 1, "max_steps": 2}
    SCENARIOS[f"layers_{_layers}"] = Scenario(partial(with_peak, **_options))


@scenario(simulated_only=True, stops=2)  # a real GPU does not tell what its streams wait for
def in_order(place: Place, in_backward: bool = False) -> dict[str, Tensor]:
    """
    What was enqueued in which order, in forward passes that update all layers, or backward passes that do.

    `steps` has of each step events (what, unit, tasks): `begin_load` and `update` with the tasks that each gave the
    streams of copies, as {way: (first, last)}; `computes` with the last task of them that computation waits for when a
    layer computes a micro-batch in such a pass, and the stops of the host until then.
    """
    options = {**STREAM, "plan_values": ENDS, "chunked_loss": "on"}
    options |= IN_BACKWARD if in_backward else {}
    trainer = trainer_of(place, model(layers=5, tie_word_embeddings=False), **options)
    if not place.on_device:
        trainer.train()
        return weights_of(trainer)
    transfers, steps, stack = trainer.memory.streamer.transfers, [], contextlib.ExitStack()
    known = (*trainer_view.LIBRARIES, __name__.partition(".")[0])  # what follows is no code of a user
    stack.enter_context(mock.patch.object(trainer_view, "LIBRARIES", known))
    ways, stops = {"in": transfers._in, "out": transfers._out}, place.simulator.found.stops

    def note(name: str) -> None:
        real = getattr(LazyOptimizer, name)

        def call(optimizer: LazyOptimizer, unit: Unit) -> None:
            before = {way: stream.clock.get(stream.name, 0) for way, stream in ways.items()}
            real(optimizer, unit)
            tasks = {way: (before[way] + 1, stream.clock.get(stream.name, 0)) for way, stream in ways.items()}
            steps[-1].append((name, unit.name, tasks))

        stack.enter_context(mock.patch.object(LazyOptimizer, name, call))

    def computes(unit: Unit) -> None:
        if torch.is_grad_enabled() is in_backward:  # in the recomputation
            clock = place.simulator.default_stream.clock
            waits_for = {way: clock.get(stream.name, 0) for way, stream in ways.items()}
            steps[-1].append(("computes", unit.name, {**waits_for, "stops": sum(stops.values())}))

    class Begins(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            steps.append([])

    trainer.add_callback(Begins())
    for unit in trainer.memory.streamer.layers:
        unit.modules[0].mlp.register_forward_pre_hook(lambda *_, unit=unit: computes(unit))
    note("begin_load")
    note("update")
    with stack, place.counted(trainer):
        trainer.train()
    place.facts["steps"] = steps
    return weights_of(trainer)


SCENARIOS["in_order_in_backward"] = Scenario(partial(in_order, in_backward=True), simulated_only=True, stops=2)


training("lora", **STREAM, lora=True)
# With phases, so that adapters are multiplied by the trainer and not by PEFT.
training("lora_bf16", **STREAM, lora=True, bf16=True, enable_predict=True, direction="none", architecture=WIDE,
         expect=TO_THE_LAST_BIT)  # fmt: skip


@scenario(left=64)  # the 16 values of a code
def lora_four_bits(place: Place) -> dict[str, Tensor]:
    """The backward pass of a layer in 4 bits begins with a product that reads nothing but the weights."""
    options = STREAM if place.on_device else {}
    made = adapted(packed(model(layers=4, width=64)))
    trainer = trainer_of(place, made, **options, **({"accumulation_walk": "micro_batch"} if options else {}))
    trained(place, trainer)
    return {name: weight for name, weight in weights_of(trainer).items() if "lora" in name}


training("lora_int8", **STREAM, lora=True, base_precision="int8")
# A window reaches two thirds of the experts.
training("lora_experts", **STREAM, lora=True, architecture={"experts": 64}, expect={"stops": 12})
training("lora_experts_int8", **STREAM, lora=True, base_precision="int8", architecture={"experts": 64},
         expect={"stops": 12})  # fmt: skip
training("lora_kept", **SOME_RESIDENT, lora=True)
training("lora_kept_int8", **SOME_RESIDENT, lora=True, base_precision="int8")
training("saves", **STREAM, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=1)
training("saves_eight_bit", **A_LEAP, **STREAM, optimizer_states="8bit", save_strategy="steps", save_steps=2)
training("saves_lora_int8", **STREAM, lora=True, base_precision="int8", save_strategy="steps", save_steps=2)

# Leaps. Streamed masters are orthogonalised on the host; large resident matrices in bf16 on a GPU, in fp32 on a CPU.

ALONG_GRADIENTS = {"direction": "gradient_memory"}

training("leaps", **STREAM, **A_LEAP, distinct=4)
training("leaps_by_micro_batch", **STREAM, **LEAPS, accumulation_walk="micro_batch")
training("leaps_host_buffers", **STREAM, **LEAPS, plan_values=ON_HOST)
training("leaps_eight_bit", **STREAM, **A_LEAP, optimizer_states="8bit")
training("leaps_bf16", **STREAM, **LEAPS, **ALONG_GRADIENTS, bf16=True,
         expect=AS_RESIDENT | {"tolerance": 1e-3})  # fmt: skip
training("leaps_ends_streamed", **STREAM, **LEAPS, plan_values=ENDS, tied=False)
training("leaps_probed", **STREAM, **LEAPS, distinct=4, probe_budget=1.0)
training("leaps_undone", **STREAM, **A_LEAP, probe_budget=1.0, leap_gain=300.0, expect={"tolerance": 1e-5})
training("leaps_deeper", **STREAM, **A_LEAP, distinct=4, architecture={"layers": 5})
training("leaps_probed_deeper", **STREAM, **LEAPS, distinct=4, probe_budget=1.0, architecture={"layers": 5})
training("leaps_and_saves", **STREAM, **A_LEAP, save_strategy="steps", save_steps=1)
A_STRETCH = {"stops": 7}  # a world model learns from ten steps at once, which is four stops more in one of them
training("leaps_planned", **STREAM, **LEAPS, planner="dynamics", expect=A_STRETCH)
training("leaps_gradient_memory", **STREAM, **LEAPS, **ALONG_GRADIENTS)
training("rescued_rate", **STREAM, **LEAPS, auto_lr="on")
training("rescued_rate_without_leaps", **A_LEAP, auto_lr="on", direction="auto")
training("resident_leaps", **A_LEAP)
training("resident_leaps_gradient_memory", **LEAPS, **ALONG_GRADIENTS)
training("resident_leaps_host_buffers", **LEAPS, plan_values=ON_HOST)
training("resident_leaps_undone", **LEAPS, **ALONG_GRADIENTS, probe_budget=1.0, leap_gain=300.0,
         expect={"tolerance": 1e-4})  # fmt: skip
training("resident_leaps_planned", **LEAPS, **ALONG_GRADIENTS, planner="dynamics", expect=A_STRETCH)
training("fast", preset="fast", expect=ORTHOGONALISED)
training("fast_streamed", **STREAM, preset="fast", expect=ORTHOGONALISED)

# Memory by phase, of a model that stays on the device.

training("plain")
training("checkpointed", **LEAPS, **ALONG_GRADIENTS, checkpoint_phases="full,correct")
training("states_on_host", **LEAPS, **ALONG_GRADIENTS, predict_states="host")
training("bf16_copies", **LEAPS, **ALONG_GRADIENTS, bf16=True, weight_precision="full=bf16,correct=bf16",
         expect={"beside": "device"})  # fmt: skip


class AtHome(TrainerCallback):
    """Optimizer states are on the device whenever something is saved."""

    def on_save(self, args, state, control, optimizer=None, **kwargs):
        away = [value for state in optimizer.state.values() for value in state.values() if value.numel() > 1]
        away = [value.device for value in away if value.device.type != args.device.type]
        assert not away, away[0]


@scenario(keeps_model=True)
def states_on_host_and_saves(place: Place) -> dict[str, Tensor]:
    """Every step is saved, also those in Predict, with the states at home."""
    options = {**LEAPS, **ALONG_GRADIENTS, "predict_states": "host", "save_strategy": "steps", "save_steps": 1}
    return train(place, **options, callbacks=[AtHome()])


class Interrupts(TrainerCallback):
    """Ctrl-C in the first step of a phase, or in the first real one after it."""

    def __init__(self, *, after: bool):
        self.after, self.seen = after, False

    def on_step_begin(self, args, state, control, **kwargs):
        predicted = self.trainer.phase_name == "predict"
        if predicted if not self.after else self.seen and not predicted:
            self.seen = False
            raise KeyboardInterrupt
        self.seen = self.seen or predicted


def interrupted(place: Place, *, after: bool, **options) -> dict[str, Tensor]:
    """A run is interrupted while optimizer states are away, or when they are back, and the trainer trains again."""
    interrupts = Interrupts(after=after)
    trainer = interrupts.trainer = trainer_of(place, model(), callbacks=[interrupts], **options)
    with place.watched(), contextlib.suppress(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(interrupts)
    return trained(place, trainer)


for _name, _after in {"in_predict": False, "after_predict": True}.items():
    _options = {**A_LEAP, **ALONG_GRADIENTS, "predict_states": "host"}
    SCENARIOS[f"interrupted_{_name}"] = Scenario(partial(interrupted, after=_after, **_options), keeps_model=True)


@scenario(keeps_model=True)
def activations_offloaded(place: Place) -> dict[str, Tensor]:
    """The inputs of checkpointed layers wait on the host, however small they are."""
    with default(ActivationCheckpointing, "min_bytes", 1):
        return train(place, offload_activations=True)


@scenario(keeps_model=True)
def activations_offloaded_with_leaps(place: Place) -> dict[str, Tensor]:
    """The same, with probes in between, which keep no graph."""
    with default(ActivationCheckpointing, "min_bytes", 1):
        return train(place, offload_activations=True, **LEAPS, **ALONG_GRADIENTS)


@scenario(keeps_model=True, tolerance=1e-2)
def resident_leaps_of_large_matrices(place: Place) -> dict[str, Tensor]:
    """Matrices are orthogonalised in bf16, as if they were large."""
    with patched(vars(optimizers), "SMALL_MATRIX", 0):
        return train(place, **LEAPS)


@scenario(keeps_model=True, tolerance=1e-5)
def int8_probes(place: Place) -> dict[str, Tensor]:
    """The weights are codes while a leap is probed, and wait on the host."""
    return train(place, **A_LEAP, **ALONG_GRADIENTS, weight_precision="predict=int8", probe_budget=1.0)


@scenario(keeps_model=True, tolerance=1e-5)
def int8_probes_registered(place: Place) -> dict[str, Tensor]:
    """The weights wait in memory that is registered with the driver, and let go of once they are back."""
    with patched(vars(machine), "SMALL", 0):
        return train(place, **LEAPS, **ALONG_GRADIENTS, weight_precision="predict=int8", probe_budget=1.0)


# Page-locked memory.


@scenario()
def registered(place: Place) -> dict[str, Tensor]:
    """Host buffers are large enough to be registered with the driver."""
    with patched(vars(machine), "SMALL", 0):
        return train(place, **STREAM, **A_LEAP, save_strategy="steps", save_steps=4)


@scenario()
def registered_lora_int8(place: Place) -> dict[str, Tensor]:
    """The codes of a frozen base are registered for a run, and let go of after it."""
    with patched(vars(machine), "SMALL", 0):
        return train(place, **STREAM, lora=True, base_precision="int8", save_strategy="steps", save_steps=2)


@scenario(stops=100, simulated_only=True)  # a driver refuses when it must
def registration_refused(place: Place) -> dict[str, Tensor]:
    """The driver refuses to lock pages: ordinary memory serves, and copies wait."""
    place.simulator.refuse_registration = True
    with patched(vars(machine), "SMALL", 0):
        return train(place, **STREAM)


# A training among others.


@scenario()
def resumed(place: Place) -> dict[str, Tensor]:
    """Four steps, two of them after a resume, are those of one run."""
    first = trainer_of(place, model(), **STREAM, **A_LEAP, save_strategy="steps", save_steps=5)
    with place.watched():
        first.train()
    second = trainer_of(place, model(), **STREAM, **A_LEAP)
    with place.counted(second):
        second.train(resume_from_checkpoint=str(Path(first.args.output_dir) / "checkpoint-5"))
    place.facts["as_without"] = largest_difference(weights_of(first), weights_of(second))
    return weights_of(second)


@scenario(tolerance=1e-4)
def resumed_eight_bit(place: Place) -> dict[str, Tensor]:
    """The same with moments in 8 bits."""
    options = {**STREAM, "optimizer_states": "8bit"}
    first = trainer_of(place, model(), **options, save_strategy="steps", save_steps=2)
    with place.watched():
        first.train()
    second = trainer_of(place, model(), **options)
    with place.counted(second):
        second.train(resume_from_checkpoint=str(Path(first.args.output_dir) / "checkpoint-2"))
    place.facts["as_without"] = largest_difference(weights_of(first), weights_of(second))
    return weights_of(second)


@scenario()
def evaluated_only(place: Place) -> dict[str, Tensor]:
    """A streamed trainer that never trains, right after the device was busy."""
    trainer = trainer_of(place, model(), **STREAM)
    with place.watched():
        busy = torch.ones(64, 64, device=trainer.args.device)
        busy = busy @ busy
        place.facts["losses"] = [trainer.evaluate()["eval_loss"], trainer.evaluate()["eval_loss"]]
        place.facts["predicted"] = float(torch.as_tensor(trainer.predict(rows(4)).predictions).double().sum())
    return weights_of(trainer)


@scenario(tolerance=1e-5)
def trained_twice(place: Place) -> dict[str, Tensor]:
    """One trainer, two runs, with an evaluation between and after them."""
    trainer = trainer_of(place, model(), **STREAM, **LEAPS)
    with place.watched():
        trainer.train()
        trainer.evaluate()
    trained(place, trainer)
    trainer.evaluate()
    return weights_of(trainer)


@scenario()
def two_trainers(place: Place) -> dict[str, Tensor]:
    """A streamed and a resident trainer in one process, in turn."""
    streamed, resident = trainer_of(place, model(), **STREAM), trainer_of(place, model(seed=1), max_steps=3)
    with place.watched():
        resident.train()
    trained(place, streamed)
    with place.watched():
        resident.evaluate()
    return weights_of(streamed) | {f"resident.{name}": value for name, value in weights_of(resident).items()}


@scenario()
def error_in_the_middle(place: Place) -> dict[str, Tensor]:
    """A callback raises; the model has its weights, and another training begins from them."""

    class Raises(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise KeyboardInterrupt

    trainer = trainer_of(place, model(), **STREAM, optimizer_states="8bit", callbacks=[Raises()])
    with place.watched(), contextlib.suppress(KeyboardInterrupt):
        trainer.train()
    again = trainer_of(place, trainer.model, **STREAM)
    return trained(place, again)


@scenario(beside="resident", left=ROUNDED_STATES["left"])
def looked_at_before_a_step(place: Place) -> dict[str, Tensor]:
    """
    A callback runs all but the head before each step: weights come in that have only just been updated and sent, while
    the head still waits for its update.

    The other place is the same training on the same device without the callback, which ends at the same bits.
    """

    class Looks(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                model.model(input_ids=torch.arange(8, device=args.device)[None])

    made = model(layers=3, width=64, tie_word_embeddings=False)
    made.model.layers[1:].requires_grad_(False)
    callbacks = [] if place.resident else [Looks()]
    options = {**STREAM, "plan_values": ENDS, "optimizer_states": "8bit"}
    trainer = trainer_of(place, made, **options, callbacks=callbacks)
    return trained(place, trainer)


@scenario()
def a_layer_left_out(place: Place) -> dict[str, Tensor]:
    """Every other step leaves the last layer out: its update waits a step longer, and those of the others do not."""

    class LeavesOut(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            model.config.num_hidden_layers = 4 - state.global_step % 2

    options = {} if place.name == "cpu" else {**STREAM, "plan_values": ENDS}
    trainer = trainer_of(place, model(layers=4), **options, max_steps=5, callbacks=[LeavesOut()])
    return trained(place, trainer)


@scenario()
def a_call_that_does_not_count(place: Place) -> dict[str, Tensor]:
    """The backward pass never comes to it: its layer is updated before its next forward, by gradients of the host."""
    options = {"max_grad_norm": 0.0} if place.name == "cpu" else {**STREAM, **IN_BACKWARD}
    made = model(layers=4)

    def call(module, args, hidden):
        one = torch.ones_like(hidden[:1, :1])
        made.model.layers[1](one, position_embeddings=(one[..., :8],) * 2)

    made.model.layers[2].register_forward_hook(call)
    trainer = trainer_of(place, made, **options, gradient_accumulation_steps=1)
    return trained(place, trainer)


@scenario(**AS_RESIDENT)
def gradients_looked_at(place: Place) -> dict[str, Tensor]:
    """A callback reads the gradients between clipping and the step. They have left the device in bf16."""
    seen: dict[str, Tensor] = {}

    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            for name, parameter in trainer.model.named_parameters():
                gradient = trainer.memory.parameter(parameter).grad
                seen[f"{state.global_step} {name}"] = gradient.detach().cpu().float().clone()

    options = {} if place.resident else STREAM
    callbacks = [Looks()]
    trainer = trainer_of(
        place, model(), **options, bf16=True, gradient_accumulation_steps=1, max_grad_norm=1e3, callbacks=callbacks
    )
    trained(place, trainer)
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    return {**seen, "norms": torch.tensor(norms)}


class OfAUser(HybridTrainer):
    """Masks labels in its step, and halves gradients behind it. What it reads lies where Trainer has it."""

    def training_step(self, model, inputs, *args, **kwargs):
        assert {tensor.device.type for tensor in inputs.values()} == {self.args.device.type}
        inputs["labels"].masked_fill_(inputs["input_ids"] % 3 == 0, -100)
        loss = super().training_step(model, inputs, *args, **kwargs)
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.5
        return loss


def of_a_user(place: Place, **options) -> dict[str, Tensor]:
    data = rows(lengths=(12, 9), distinct=8)
    config = place.config(**options, gradient_accumulation_steps=2, share_rows="on")
    trainer = OfAUser(model(), config, train_dataset=data, data_collator=padded)
    return trained(place, trainer)


@scenario(stops=99, keeps_model=True)
def a_step_of_the_user(place: Place) -> dict[str, Tensor]:
    """Each of its micro-batches is what it made of it, and its gradients are there behind each."""
    return of_a_user(place)


@scenario(stops=99)
def a_step_of_the_user_streamed(place: Place) -> dict[str, Tensor]:
    return of_a_user(place, **({} if place.name == "cpu" else STREAM))


class Penalised(HybridTrainer):
    """The loss has a penalty of all weights."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + 0.01 * sum(parameter.pow(2).sum() for parameter in model.parameters())
        return (loss, outputs) if return_outputs else loss


class OnWeights(TrainerCallback):
    """Reads and writes weights and gradients between steps, with tensors that lie where the model computes."""

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.start = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
        self.mean = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)

    def on_optimizer_step(self, args, state, control, model, **kwargs):
        assert all(parameter.grad.abs().max() <= 0.01 for parameter in model.parameters())

    def on_step_end(self, args, state, control, model, **kwargs):
        for name, parameter in model.named_parameters():
            half = torch.full((), 0.5, device=args.device)
            assert self.mean[name].lerp_(parameter.detach(), 0.5).device == half.device
            with torch.no_grad():
                assert {parameter.norm().device, (parameter * 2).device} == {half.device}
                parameter.view(-1)[:1] = half
            if args.device.type != "cpu" and state.global_step > 1:  # there a copy on the host stays what it was
                assert (parameter.detach().cpu() - self.start[name]).any()
            parameter.data.mul_(0.99)
            with torch.no_grad():
                parameter.add_(parameter * half, alpha=0.01).sub_(self.mean[name], alpha=0.01)
                parameter.data = parameter.data - 0.001

    def on_train_end(self, args, state, control, **kwargs):
        self.mean.clear()


@scenario(stops=999)
def weights_of_the_user(place: Place) -> dict[str, Tensor]:
    """Code of a user reads and writes weights of streamed layers."""
    config = place.config(**STREAM)
    trainer = Penalised(model(), config, train_dataset=rows(), data_collator=padded, callbacks=[OnWeights()])
    return trained(place, trainer)


@scenario()
def failed_evaluation(place: Place) -> dict[str, Tensor]:
    """A layer fails in an evaluation, while the next ones are under way; then the trainer trains."""
    trainer = trainer_of(place, model(), **STREAM)
    handle = trainer.model.model.layers[1].mlp.register_forward_pre_hook(_fail)
    with place.watched(), contextlib.suppress(ArithmeticError):
        trainer.evaluate()
    handle.remove()
    return trained(place, trainer)


def _fail(*_) -> None:
    raise ArithmeticError


@scenario()
def walk_that_does_not_fit(place: Place) -> dict[str, Tensor]:
    """
    Memory ends where activations of the second micro-batch should come back, while those of the first are on their way.
    Nobody will take these: the window is computed anew.
    """
    fetch, calls = Transfers.fetch, Counter()

    def fail(*args, **kwargs):
        calls["all"] += 1
        if calls["all"] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory (injected).")
        return fetch(*args, **kwargs)

    trainer = trainer_of(place, model(), **STREAM, offload_activations=True)
    with mock.patch.object(Transfers, "fetch", fail), place.counted(trainer):
        trainer.train()
    place.facts["caught"] = len(trainer.hybrid_summary()["out_of_memory"])
    return weights_of(trainer)


@scenario()
def moved_by_hand(place: Place) -> dict[str, Tensor]:
    """A model on the device is given to a streamed trainer."""
    return train(place, **STREAM, on_device_already=True)


# Out of memory. A real GPU cannot be told at which allocation.

OUT_OF_MEMORY = {"max_steps": 200, "gradient_accumulation_steps": 1, "lr_scheduler_type": "constant", "warmup_steps": 0}


class Fault(TrainerCallback):
    """Lets memory end in every step, `every` allocations later than in the step before, until no step has so many."""

    def __init__(self, at: int, every: int, patience: int):
        self.every = every
        self.at, self.count, self.now, self.fired, self.ended = at, 0, False, False, False
        self.patience = patience
        self.too_short = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.count, self.now, self.fired = 0, True, False
        # Each time is the first time: nothing was learned from the steps before.
        recovery = self.trainer.recovery
        recovery.end()
        recovery.policy = MemoryPolicy()
        if self.trainer.memory.streams:
            self.trainer.memory.window.order = "auto"

    def on_step_end(self, args, state, control, **kwargs):
        self.now = False
        self.too_short = 0 if self.fired else self.too_short + 1
        self.ended = control.should_training_stop = self.too_short == self.patience

    def __call__(self, size: int) -> bool:
        self.count += self.now
        if self.now and not self.fired and self.count > self.at:
            self.fired = True
            self.at += self.every
            return True
        return False


def out_of_memory(place: Place, every: int = 10, **options) -> dict[str, Tensor]:
    """Memory ends at every `every`-th allocation of a step. Where that ends the training, another one goes on."""
    if not place.on_device:
        return {}
    options = {**OUT_OF_MEMORY, **options}
    at, errors, logs, caught = 0, [], [], 0
    while len(errors) < 40:
        fault = Fault(at, every, 10 if "leap_worth" in options else 2)  # some steps are skipped, and few have a leap
        trainer = fault.trainer = trainer_of(place, model(layers=2), callbacks=[fault], **options)
        place.simulator.fault = fault
        try:
            with place.watched():
                trainer.train()
        except torch.OutOfMemoryError as error:
            errors.append(str(error))
        place.simulator.fault = None
        logs += [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
        caught += len(trainer.hybrid_summary()["out_of_memory"])
        at = fault.at
        if fault.ended:
            break
    longest = max(step for step, _ in logs)
    undisturbed = trainer_of(place, model(layers=2), **{**options, "max_steps": min(longest, 50)})
    undisturbed.train()
    right = {entry["step"]: entry["loss"] for entry in undisturbed.state.log_history if "loss" in entry}
    place.facts |= {
        "tried": at // every,
        "allocations": at,
        "caught": caught,
        "errors": errors,
        "off": max(abs(right[step] - loss) for step, loss in logs if step in right),
        "ended": fault.ended,
    }
    return {}


for _name, _options in {
    "streamed": STREAM,
    "streamed_eight_bit": {**STREAM, "optimizer_states": "8bit"},
    "seldom": {**STREAM, "optimizer_states": "8bit", "every": 100},
    "resident": {},
    "leaps": {**STREAM, **LEAPS, "max_steps": 200},
}.items():
    SCENARIOS[f"out_of_memory_{_name}"] = Scenario(partial(out_of_memory, **_options), simulated_only=True)


def within(place: Place, known: bool) -> dict[str, Tensor]:
    """Three of six layers have to be recomputed, by the plan or (if the limit is not `known`) after errors."""
    data, options = rows(lengths=(48,)), {"activation_checkpointing": True}
    if place.on_device:
        options = {"activation_checkpointing": "auto", "vram_budget_gib": 15.0}
        asked = trainer_of(place, model(layers=6, width=32), data, **options)
        estimator, setup = estimator_for(asked, None)
        asked.model.cpu()
        needed = estimator.resident(replace(setup, memory="off", recomputed_layers=3)).peak_device_bytes
        limit = needed - setup.workspaces(False)  # which the simulated device does not have
        if known:
            options["vram_budget_gib"] = (CONTEXT_BYTES + math.ceil((1 + MARGIN) * needed)) / 2**30
    trainer = trainer_of(place, model(layers=6, width=32), data, **options)
    if place.on_device:
        torch.cuda.set_per_process_memory_fraction((1 + MARGIN) * limit / place.simulator.TOTAL)
    trained(place, trainer)
    summary = trainer.hybrid_summary()
    place.facts["recomputed"] = summary.get("recomputed_layers")
    place.facts["actions"] = [event["action"] for event in summary["out_of_memory"]]
    return weights_of(trainer)


# A real GPU has no limit for a model that is so small.
SCENARIOS["within_the_device"] = Scenario(partial(within, known=True), keeps_model=True, simulated_only=True)
SCENARIOS["within_less_than_planned"] = Scenario(partial(within, known=False), keeps_model=True, simulated_only=True)


def streamed_within(place: Place, kept: int | None = None) -> dict[str, Tensor]:
    """Graphs of nine passes fit; a run that does not know that keeps too many, and recomputes all after an error."""
    data, made = rows(lengths=(96,)), partial(model, layers=6, width=32)
    options: dict[str, Any] = {"gradient_accumulation_steps": 3, **(STREAM if place.on_device else {})}
    if place.on_device:
        asked = trainer_of(place, made(), data, **options, vram_budget_gib=15.0)
        estimator, setup = estimator_for(asked, None)
        asked.model.cpu()
        setup = replace(setup, resident_layers=0)
        needed = estimator.streamed(replace(setup, kept_graphs=9), 0, False).peak_device_bytes
        limit = needed - setup.workspaces(True)  # which the simulated device does not have
        vram = CONTEXT_BYTES + math.ceil((1 + MARGIN) * needed) if kept is None else 15 * 2**30
        options |= {"resident_layers": 0, "vram_budget_gib": vram / 2**30, "plan_values": {"kept_graphs": kept}}
    trainer = trainer_of(place, made(), data, **options)
    if place.on_device:
        torch.cuda.set_per_process_memory_fraction((1 + MARGIN) * limit / place.simulator.TOTAL)
        place.facts["graphs"] = trainer.memory.plan.kept_graphs
        torch.cuda.reset_peak_memory_stats()
    trained(place, trainer)
    if place.on_device:
        place.facts["peak"] = torch.cuda.max_memory_allocated(), limit
    place.facts["actions"] = [event["action"] for event in trainer.hybrid_summary()["out_of_memory"]]
    return weights_of(trainer)


SCENARIOS["graphs_within_the_device"] = Scenario(streamed_within, simulated_only=True)
SCENARIOS["graphs_that_do_not_fit"] = Scenario(partial(streamed_within, kept=18), simulated_only=True)


def with_pictures(place: Place, *, lora: bool = False, **options) -> dict[str, Tensor]:
    """Layers of the language model are streamed, and the image encoder stays on the device."""
    made, processor = vision.vision_model("qwen2_vl", num_hidden_layers=4)
    made.set_attn_implementation("eager")
    made.model.visual.patch_embed.requires_grad_(False)  # the simulator has no gradients of convolutions
    own = made.model.get_rope_index

    def on_host(ids: Tensor, **given: Any) -> list[Tensor]:
        """The simulator makes no tensor of a list of tensors of the device."""
        given = {name: value.cpu() for name, value in given.items() if torch.is_tensor(value)}
        return [value.to(ids.device) for value in own(ids.cpu(), **given)]

    def collated(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        texts = [processor.apply_chat_template(row["messages"]) for row in batch]
        tensors = processor(images=[row["images"] for row in batch], text=texts, padding=True, return_tensors="pt")
        return {**tensors, "labels": tensors["input_ids"].masked_fill(tensors["attention_mask"] == 0, -100)}

    made.model.get_rope_index = on_host
    draw, data = random.Random(0), []
    for number in range(24):  # two rows share a picture, and all have one length
        parts = [{"type": "image"}, {"type": "text", "text": vision.words(draw, 3, 3)}]
        pictures = [vision.picture(number // 2, (32, 32))]
        data.append({"images": pictures, "messages": [{"role": "user", "content": parts}]})
    options |= {} if not place.on_device else STREAM
    options |= {"remove_unused_columns": False, "train_sampling_strategy": "sequential"}
    trainer = trainer_of(place, adapted(made) if lora else made, data, data_collator=collated, **options)
    if place.on_device:
        torch.cuda.reset_peak_memory_stats()
    found = trained(place, trainer)
    if place.on_device:
        plan = trainer.memory.plan
        planned = plan.peak_device_bytes - plan.setup.workspaces(True)  # which the simulated device does not have
        place.facts["peak"] = torch.cuda.max_memory_allocated(), planned
    return found


SCENARIOS["pictures"] = Scenario(with_pictures)
SCENARIOS["pictures_lora"] = Scenario(partial(with_pictures, lora=True))
SCENARIOS["pictures_shared"] = Scenario(partial(with_pictures, share_rows="on"))


@scenario()
def offloaded_graphs_together(place: Place) -> dict[str, Tensor]:
    """Two graphs are alive at once and two are dropped: their activations wait on the host."""
    made, device = model(), torch.device("cuda" if place.on_device else "cpu")
    made.to(device).train()
    made.gradient_checkpointing_enable({"use_reentrant": False})
    batches = [torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(n)).to(device) for n in range(4)]
    with place.watched():
        with BoundaryOffload(made, min_bytes=1):
            losses = [made(input_ids=batch, labels=batch).loss for batch in batches]
        losses = losses[::2]
        for loss in losses:
            loss.backward()
    return {name: parameter.grad.cpu() for name, parameter in made.named_parameters()}


# What watches, and what TRL trains.


@scenario()
def profiled(place: Place) -> dict[str, Tensor]:
    """The profiler reads allocator, driver and host."""
    with place.driver():
        weights = train(place, **STREAM, **A_LEAP, callbacks=[MemoryProfilerCallback(account_every=1)])
    profile = next(place.folder.rglob("profile"))
    place.facts["records"] = [json.loads(line) for line in (profile / "steps.jsonl").read_text().splitlines()]
    return weights


@scenario(keeps_model=True)
def sampled(place: Place) -> dict[str, Tensor]:
    """The driver says in what share of the time the device computed."""
    with place.driver():
        trainer = trainer_of(place, model(), share_rows="on")
        with place.counted(trainer):
            trainer.train()
    place.facts["summary"] = trainer.hybrid_summary()
    return weights_of(trainer)


@scenario()
def told(place: Place) -> dict[str, Tensor]:
    """What profiler and card say of a device."""
    profiler = MemoryProfilerCallback()
    trainer = trainer_of(place, model(), **STREAM, callbacks=[profiler])
    trained(place, trainer)
    trainer.create_model_card()
    card = (Path(trainer.args.output_dir) / "README.md").read_text()
    place.facts |= {"card": card, "profile": profiler.summary()["peak"]}
    return weights_of(trainer)


@scenario(keeps_model=True)
def hashed(place: Place) -> dict[str, Tensor]:
    """Processes compare hashes of weights and states: one flipped bit of either changes one hash."""
    trainer = trainer_of(place, model(layers=1), max_steps=1)
    trainer.train()
    states = [value for state in inner_optimizer(trainer.optimizer).state.values() for value in state.values()]
    tensors, flips = [*trainer.model.parameters(), *states], []
    before = hashes_of(tensors)
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(torch.uint8)
        bits[-1] ^= 4
        flips.append(sum(one != other for one, other in zip(before, hashes_of(tensors))))
        bits[-1] ^= 4
    place.facts["hashes"] = {"of one flip": sorted(set(flips)), "without": hashes_of(tensors) == before}
    return weights_of(trainer)


@scenario(keeps_model=True)
def profiled_resident(place: Place) -> dict[str, Tensor]:
    """The same beside plain steps."""
    return train(place, callbacks=[MemoryProfilerCallback(account_every=2)])


@scenario(keeps_model=True, simulated_only=True)  # torch reserves more than this model has, at once
def guarded(place: Place) -> dict[str, Tensor]:
    """The device is nearly full, by the driver's count: the guard warns and asks for a checkpoint."""
    if place.on_device:
        torch.cuda.set_per_process_memory_fraction(600_000 / place.simulator.TOTAL)
    trainer = trainer_of(place, model(), guard_warn_at=0.1)
    trainer.memory_guard.checkpoint_at = 0.2
    trained(place, trainer)
    place.facts |= told_by(trainer)
    weights = weights_of(trainer)
    place.facts["checkpoints"] = len(list(place.folder.rglob("checkpoint-*")))
    return weights


@scenario(keeps_model=True)
def with_a_bar(place: Place) -> dict[str, Tensor]:
    """The progress bar of a run with leaps shows the device's memory."""
    return train(place, disable_tqdm=False, **{**A_LEAP, "max_steps": 3})


@scenario()
def compiled_is_refused(place: Place) -> dict[str, Tensor]:
    """`torch_compile` would compile placeholders."""
    with pytest.raises(ValueError, match="torch_compile"):
        trainer_of(place, model(), **STREAM, torch_compile=True)
    return {}


def sft(place: Place, **options) -> dict[str, Tensor]:
    """TRL's supervised fine-tuning."""
    import datasets

    from hf_hybrid import HybridSFTConfig, HybridSFTTrainer

    data = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows(32)])
    config = place.config(HybridSFTConfig, bf16=False, max_length=32, **options)
    made = model(layers=2, vocab_size=320)
    trainer = HybridSFTTrainer(made, args=config, train_dataset=data, processing_class=tokenizer())
    weights = trained(place, trainer)
    place.facts |= told_by(trainer)
    return weights


SCENARIOS["sft"] = Scenario(partial(sft, **A_LEAP, **ALONG_GRADIENTS), keeps_model=True, tolerance=1e-5)
SCENARIOS["sft_streamed"] = Scenario(partial(sft, **STREAM, **LEAPS))


def chats() -> list[dict[str, Tensor]]:
    """Rows of different lengths that begin alike, of which the end is learned."""
    made = []
    for number, row in enumerate(rows(32)):
        ids = torch.cat([torch.arange(1, 9), row["input_ids"][: 3 + number % 7]])
        labels = ids.where(torch.arange(len(ids)) > 8, -100)
        made.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})
    return made


def shared_rows(place: Place, **options) -> dict[str, Tensor]:
    """Windows as trees, with the plan on the host, and evaluations as trees."""
    if place.name != "device":
        options = {name: value for name, value in options.items() if name not in STREAMED}
    trainer = trainer_of(place, model(), chats(), share_rows="on", gradient_accumulation_steps=2, **options)
    trained(place, trainer)
    place.facts |= told_by(trainer)
    summary = trainer.hybrid_summary()
    assert summary["tokens_shared"] > 0.3 * summary["tokens"] and summary["plain_rows_because"] is None
    trainer.evaluate(chats())
    return weights_of(trainer)


SCENARIOS["rows"] = Scenario(shared_rows, keeps_model=True, tolerance=1e-5)
SCENARIOS["rows_streamed"] = Scenario(partial(shared_rows, **STREAM))


def nothing_to_save(place: Place, *, lora: bool = False, **options) -> dict[str, Tensor]:
    """Rows of one length that begin differently: what is looked at is what the loader holds on the host."""
    options = {"gradient_accumulation_steps": 2, **options}
    trainer = trainer_of(place, adapted(model()) if lora else model(), rows(), **options)
    trained(place, trainer)
    place.facts |= told_by(trainer)
    assert trainer.hybrid_summary()["plain_rows_because"] == "less than 5 % would be saved"
    return weights_of(trainer)


SCENARIOS["nothing_to_save"] = Scenario(
    partial(nothing_to_save, share_rows="on", enable_predict=False), keeps_model=True, stops=0
)
# The divergence monitor looks at loss and gradient norm in the next step.
SCENARIOS["nothing_to_save_monitored"] = Scenario(
    partial(nothing_to_save, lora=True, enable_predict=True), keeps_model=True, stops=0
)
SCENARIOS["nothing_to_save_searched"] = Scenario(
    partial(nothing_to_save, enable_predict=True, leap_gain=0.0, auto_lr="on"), keeps_model=True, stops=0
)
# Without its filter of losses Trainer does not wait either, but at the first step and the last.
SCENARIOS["nothing_to_save_unfiltered"] = Scenario(
    partial(
        nothing_to_save, lora=True, enable_predict=True, logging_nan_inf_filter=False, logging_strategy="no",
        max_steps=6,
    ),
    keeps_model=True, stops=0,
)  # fmt: skip


@scenario(keeps_model=True, stops=0)
def withheld(place: Place) -> dict[str, Tensor]:
    """The device leaves out the updates of two steps, one with a gradient of NaN and one with an infinite one."""
    made = adapted(model())
    factors = iter([1.0, math.nan, 1.0, math.inf, 1.0, 1.0])
    last = [parameter for parameter in made.parameters() if parameter.requires_grad][-1]
    last.register_hook(lambda gradient: gradient * next(factors))
    trainer = trainer_of(place, made, rows(), gradient_accumulation_steps=1, max_steps=6, enable_predict=True)
    trainer.model_accepts_loss_kwargs = False  # so labels are looked for in the batches
    trained(place, trainer)
    place.facts |= told_by(trainer)
    place.facts["withheld"] = [event["step"] for event in trainer.hybrid_summary()["divergence_events"]]
    return weights_of(trainer)


@scenario(keeps_model=True, tolerance=2e-3, stops=200)  # the twin's own
def rows_in_one_call(place: Place) -> dict[str, Tensor]:
    """In 16 bits all segments go through one call. A twin stands in for it: its kernel needs a real GPU."""
    from rig.varlen import varlen_twin
    from torch.nn.attention import varlen

    calls: list[int] = []

    @functools.wraps(varlen_twin)
    def counting(*args, **options):
        calls.append(len(args[0]))
        return varlen_twin(*args, **options)

    with patched(vars(varlen), "varlen_attn", counting):
        found = shared_rows(place, bf16=True)
    assert bool(calls) == place.on_device
    return found


def peak_of(place: Place, trainer: HybridTrainer, train: Callable[[], Any]) -> Any:
    """Train, and note the peak of the device and that of the plan."""
    if not (place.on_device and trainer.memory.streams):
        return train()
    torch.cuda.reset_peak_memory_stats()
    found = train()
    plan = trainer.memory.plan
    planned = plan.peak_device_bytes - plan.setup.workspaces(True)  # which the simulated device does not have
    place.facts["peak"] = torch.cuda.max_memory_allocated(), planned
    return found


def dpo(place: Place, *, lora: bool = False, layers: int = 2, width: int = 16, **options) -> dict[str, Tensor]:
    """TRL's preference optimisation with a reference model, or with adapters and their base as reference."""
    import datasets
    from trl.trainer import utils

    from hf_hybrid import HybridDPOConfig, HybridDPOTrainer

    pairs = [{"prompt": f"Say {n}.", "chosen": f" It is {n}.", "rejected": " No."} for n in range(32)]
    options = {
        "bf16": False, "max_length": 32, "learning_rate": 1e-3, "gradient_accumulation_steps": 1, **options,
    }  # fmt: skip
    if not place.on_device:
        options = {name: value for name, value in options.items() if name not in STREAMED}
    made, reference = (model(layers=layers, width=width, vocab_size=320) for _ in range(2))
    trainer = HybridDPOTrainer(
        adapted(made) if lora else made, ref_model=None if lora else reference,
        args=place.config(HybridDPOConfig, **options),
        train_dataset=datasets.Dataset.from_list(pairs), processing_class=tokenizer(),
    )  # fmt: skip
    with patched(vars(utils), "_CHUNKED_LOGPROB_CHUNK_SIZE", 320):  # of a vocabulary that fills TRL's tiles
        peak_of(place, trainer, partial(trained, place, trainer))
    merged = trainer.hybrid_summary()["micro_batches_saved"]
    shares = place.on_device and not trainer.memory.streams
    assert bool(merged) == (shares and trainer.args.gradient_accumulation_steps > 1)
    place.facts |= told_by(trainer)
    return weights_of(trainer)


SCENARIOS["dpo"] = Scenario(
    partial(dpo, **A_LEAP, **ALONG_GRADIENTS, probe_budget=1.0), keeps_model=True, tolerance=1e-5
)
SCENARIOS["dpo_without_leaps"] = Scenario(
    partial(dpo, enable_predict=True, gradient_accumulation_steps=2), keeps_model=True, tolerance=1e-5, stops=0
)


DPO_STREAMED = {**STREAM, "layers": 4, "width": 256, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
SCENARIOS["dpo_streamed"] = Scenario(partial(dpo, **DPO_STREAMED), tolerance=1e-5)
SCENARIOS["dpo_streamed_by_micro_batch"] = Scenario(
    partial(dpo, **DPO_STREAMED, accumulation_walk="micro_batch"), tolerance=1e-5
)
SCENARIOS["dpo_streamed_lora"] = Scenario(partial(dpo, **DPO_STREAMED, lora=True), tolerance=1e-5)
SCENARIOS["dpo_streamed_precomputed"] = Scenario(
    partial(dpo, **DPO_STREAMED, lora=True, precompute_ref_log_probs=True), tolerance=1e-5
)


def distilled(place: Place, teachers: int, **options) -> dict[str, Tensor]:
    """A student learns from teachers that are twice as deep as it is."""

    class Learns(HybridTrainer):
        def __init__(self, *args, teachers, **given):
            self.teachers = teachers
            super().__init__(*args, **given)

        def compute_loss(self, model, inputs, *args, **given):
            found, inputs = super().compute_loss(model, inputs, *args, **given), dict(inputs)
            labels = inputs.pop("labels")
            logits = model(**inputs).logits.log_softmax(-1)
            for teacher in self.teachers:
                with torch.no_grad():
                    of_teacher = teacher(**inputs).logits.softmax(-1)
                found = found - 1e-3 * (of_teacher * logits)[labels != -100].sum()
            return found

    if not place.on_device:
        options = {name: value for name, value in options.items() if name not in STREAMED}
    of_teachers = [model(layers=8, width=32, seed=seed + 1).requires_grad_(False) for seed in range(teachers)]
    for teacher in of_teachers if not options.get("memory") else ():
        teacher.to(place.config().device)
    trainer = Learns(
        model(layers=4, width=32), place.config(**options), data_collator=padded, train_dataset=rows(),
        teachers=of_teachers,
    )  # fmt: skip
    found = peak_of(place, trainer, partial(trained, place, trainer))
    place.facts |= told_by(trainer)
    return found


for _teachers in (1, 4):
    SCENARIOS[f"teachers_{_teachers}"] = Scenario(partial(distilled, teachers=_teachers, **STREAM), tolerance=1e-5)


CHAT = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] }}{% endfor %}"


@contextlib.contextmanager
def _few_logits() -> Iterator[None]:
    """Eight tokens are a chunk."""
    from hf_hybrid.plan import trace
    from hf_hybrid.trl import distillation

    with patched(vars(trace), "DISTANCE_LOGITS", 8 * 320), patched(vars(distillation), "DISTANCE_LOGITS", 8 * 320):
        yield


def of_trl(place: Place, name: str, budget: bool = False, **options) -> dict[str, Tensor]:
    """
    Another trainer of TRL's, streamed. With a `budget` of a resident student and two layers of its teacher the plan
    streams the teacher alone.
    """
    import datasets
    from transformers import LlamaForSequenceClassification
    from trl.trainer import utils

    import hf_hybrid

    long = {"chosen": " It is so." * 4, "rejected": " It is not" * 4}
    pair = [{"prompt": f"Say {n}.", **long} for n in range(32)]
    data = {
        "KTO": [{"prompt": p["prompt"], "completion": p["chosen"], "label": n % 2 == 0} for n, p in enumerate(pair)],
        "GKD": [{"messages": [{"role": r, "content": p[c]} for r, c in (("user", "prompt"), ("assistant", "chosen"))]}
                for p in pair],
    }.get(name, pair)  # fmt: skip
    processing = tokenizer()
    of_chat = 4 * (name == "GKD") or 1
    length = max(len(processing(pair[-1]["prompt"] + text)["input_ids"]) for text in long.values()) + of_chat
    options = {"bf16": False, "max_length": length, "learning_rate": 1e-3, **STREAM, **options}
    options |= {"lmbda": 0.0} if name == "GKD" else {}
    if not place.on_device:
        options = {key: value for key, value in options.items() if key not in STREAMED}
    made, other = (model(layers=layers, width=128, vocab_size=320) for layers in (4, 8))
    if name == "Reward":
        made.config.num_labels, made.config.pad_token_id = 1, 0
        made = LlamaForSequenceClassification(made.config)
    beside = {"GKD": {"teacher_model": other}, "KTO": {"ref_model": other}}.get(name, {})
    processing.chat_template = CHAT if name == "GKD" else None

    def trainer_with(**more) -> Any:
        config = place.config(getattr(hf_hybrid, f"Hybrid{name}Config"), **options, **more)
        return getattr(hf_hybrid, f"Hybrid{name}Trainer")(
            model=made, args=config, train_dataset=datasets.Dataset.from_list(data), processing_class=processing,
            **beside,
        )  # fmt: skip

    if budget and place.on_device:
        options |= {"memory": "auto", "resident_layers": None}
        estimator, setup = estimator_for(trainer_with(vram_budget_gib=15.0), None)
        alone = replace(setup, memory="off", evaluated=Evaluated(), vram=None)
        needed = estimator.resident(alone).peak_device_bytes + setup.evaluated.slots + 2048  # its last norm
        made, other = made.cpu(), other.cpu()
        options["vram_budget_gib"] = (CONTEXT_BYTES + math.ceil((1 + MARGIN) * needed)) / 2**30
    with _few_logits():
        trainer = trainer_with()
    if budget and place.on_device:
        assert not trainer.memory.streams and trainer.memory.evaluated is not None
        limit = needed - setup.workspaces(False)  # which the simulated device does not have
        torch.cuda.set_per_process_memory_fraction((1 + MARGIN) * limit / place.simulator.TOTAL)
        place.facts["limit"] = limit
    with patched(vars(utils), "_CHUNKED_LOGPROB_CHUNK_SIZE", 320), _few_logits():
        found = peak_of(place, trainer, partial(trained, place, trainer))
    place.facts |= told_by(trainer)
    place.facts["actions"] = [event["action"] for event in trainer.hybrid_summary()["out_of_memory"]]
    return found


for _name in ("KTO", "Reward", "ORPO", "GKD"):
    SCENARIOS[f"{_name.lower()}_streamed"] = Scenario(partial(of_trl, name=_name), tolerance=1e-5)
SCENARIOS["gkd_chunks"] = Scenario(partial(of_trl, name="GKD", chunked_loss="on"), tolerance=1e-5)
SCENARIOS["gkd_within"] = Scenario(
    partial(of_trl, name="GKD", budget=True), tolerance=1e-5, keeps_model=True, simulated_only=True
)


def three_turns(prompts, trainer):
    """A `rollout_func`: each completion is told something twice, and completed again."""
    first = trainer._tokenize_prompts(prompts)[0]
    rows = list(first)
    for turn in range(3):
        completed = trainer._generate_single_turn(rows, None, {}, 1)[0]
        rows = [row + ids + [70 + n, 71] * (turn < 2) for n, (row, ids) in enumerate(zip(rows, completed))]
    completions = [row[len(prompt) :] for row, prompt in zip(rows, first)]
    return {"prompt_ids": first, "completion_ids": completions, "logprobs": None}


def grpo(
    place: Place, ends: int = 60, beginning: str = "", made=None, talk=None, prompts=None, **options
) -> dict[str, Tensor]:
    """TRL's GRPO: rows without advantage are left out, and two completions share a prompt in the update."""
    import datasets
    from trl.trainer import utils

    from hf_hybrid import HybridGRPOConfig, HybridGRPOTrainer

    def reward(prompts, completions, **_) -> list[float]:
        easy = ["Say 0" in prompt for prompt in prompts]
        return [1.0 if e else sum(map(ord, text)) % 7 / 7 for e, text in zip(easy, completions)]

    prompts = prompts or [f"{beginning}Say {n % 4}: {'and again ' * (n % 3)}" for n in range(32)]
    options = {
        "bf16": False, "num_generations": 2, "max_completion_length": 6, "disable_dropout": True,
        "generation_kwargs": {"eos_token_id": list(range(1, ends)), "use_cache": True}, **options,
    }  # fmt: skip
    trainer = HybridGRPOTrainer(
        made or model(vocab_size=320), reward, place.config(HybridGRPOConfig, **options),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer(), rollout_func=talk,
    )  # fmt: skip
    with place.counted(trainer), _drawn_on_host(place), patched(vars(utils), "_CHUNKED_LOGPROB_CHUNK_SIZE", 64):
        peak_of(place, trainer, trainer.train)
    place.facts |= told_by(trainer)
    place.facts["actions"] = [event["action"] for event in trainer.hybrid_summary()["out_of_memory"]]
    place.facts["rollouts"] = {key: trainer.hybrid_summary()[key] for key in ROLLOUTS}
    place.facts["replays"] = RecordedGraph.replays
    return weights_of(trainer)


ROLLOUTS = ("rows_decoded", "rows_decoded_saved", "prompt_tokens_shared", "log_probs_skipped", "plain_rollouts_because")


@contextlib.contextmanager
def _drawn_on_host(place: Place) -> Iterator[None]:
    """Tokens from the host's random generator: a real GPU has one of its own, and would complete prompts otherwise."""
    if not (place.on_device and isinstance(place.simulator, RealDevice)):
        yield
        return
    from hf_hybrid.trl import completions

    def sample_tokens(
        probabilities: Tensor, count: int, places: Tensor | None, draw=completions.sample_tokens
    ) -> Tensor:
        on_host = draw(probabilities.cpu(), count, None if places is None else places.cpu())
        return on_host.to(probabilities.device)

    def states(device: torch.device, of=completions.GeneratorStates) -> completions.GeneratorStates:
        return of(torch.device("cpu"))

    with (
        patched(vars(completions), "sample_tokens", sample_tokens),
        patched(vars(completions), "GeneratorStates", states),
    ):
        yield


ROLLED = {"keeps_model": True, "tolerance": 1e-5, "stops": 1}
"""The host waits once for the completions, as TRL does, and not in the update."""
SCENARIOS["grpo"] = Scenario(grpo, **ROLLED)
SCENARIOS["grpo_long"] = Scenario(partial(grpo, max_completion_length=40, ends=20), **{**ROLLED, "stops": 5})
"""Of up to 40 tokens: once more for every eight."""
SCENARIOS["grpo_turns"] = Scenario(partial(grpo, talk=three_turns), **{**ROLLED, "stops": 9})
SCENARIOS["grpo_tree"] = Scenario(partial(grpo, beginning="Of all that can be said: " * 3), **{**ROLLED, "stops": 2})
"""Prompts share enough to be computed as a tree."""
SCENARIOS["grpo_more"] = Scenario(partial(grpo, gradient_accumulation_steps=6), **ROLLED)
SCENARIOS["grpo_streamed"] = Scenario(
    lambda place: grpo(place, **(STREAM if place.on_device else {"rollouts": "off"})), tolerance=1e-5, keeps_model=True
)
"""Completions are those of `generate`: a layer comes in for each token of all rows. TRL keeps the last ones."""


def grpo_peak(
    place: Place, *, lora: bool = False, width: int = 256, runs_out: bool = False, **options
) -> dict[str, Tensor]:
    """All rows of a streamed update are as long as planned, and all have an advantage."""
    made = model(layers=4, width=width, vocab_size=320)
    made.config._name_or_path = str(place.folder / "reference")
    made.save_pretrained(made.config._name_or_path)  # TRL reads a reference from there
    options = {"max_completion_length": 24, "share_rows": "off", **options}
    options["generation_kwargs"] = {"min_new_tokens": options["max_completion_length"], "use_cache": True}
    options |= STREAM if place.on_device else {"rollouts": "off"}
    prompts = [f"Say {n}." for n in range(1, 10)]
    if runs_out and place.on_device:
        place.simulator.fault = once_in_backward()
    return grpo(place, made=adapted(made) if lora else made, prompts=prompts, **options)


def once_in_backward() -> Callable[[int], bool]:
    """A fault of the first allocation of autograd while a window is computed."""
    fired = []

    def fault(size: int) -> bool:
        frames = () if fired else traceback.walk_stack(None)
        now = any(frame.f_code.co_name == "_differentiate" for frame, _ in frames)
        fired.extend([now] * now)
        return now

    return fault


GRPO_PEAK = {"tolerance": 1e-5, "keeps_model": True, "stops": 9}
SCENARIOS["grpo_peak"] = Scenario(grpo_peak, **GRPO_PEAK)
SCENARIOS["grpo_again"] = Scenario(partial(grpo_peak, runs_out=True, width=64), **GRPO_PEAK, simulated_only=True)
"""In each step memory runs out in the backward pass, and the window is computed again with the same completions."""
SCENARIOS["grpo_peak_reference"] = Scenario(partial(grpo_peak, beta=0.1), **GRPO_PEAK)
SCENARIOS["grpo_peak_lora"] = Scenario(partial(grpo_peak, lora=True), **GRPO_PEAK)
SCENARIOS["grpo_peak_lora_reference"] = Scenario(partial(grpo_peak, lora=True, beta=0.1), **GRPO_PEAK)
SCENARIOS["grpo_rewards_first"] = Scenario(partial(grpo, steps_per_generation=4), **{**ROLLED, "stops": 5})
"""Log-probabilities are computed in micro-batches, each of which is copied to the host."""


class NotedDropout(torch.nn.Dropout):
    """
    Dropout that notes its factors of each pass over one token per row, for [passes, rows, values]. It notes them on the
    device: a graph calls nothing else.
    """

    passes = rows = 128
    noted: Tensor | None = None
    next: Tensor

    def forward(self, values: Tensor) -> Tensor:
        factors = super().forward(torch.ones_like(values))
        if self.noted is None:
            self.noted = values.new_full((self.passes, self.rows, values.shape[-1]), float("nan"))
            self.next = torch.zeros(1, dtype=torch.long, device=values.device)
        if values.shape[1] == 1 and self.training:
            rows = self.noted[:, : len(values)]
            rows.index_copy_(0, self.next % self.passes, factors.detach().transpose(0, 1))
            self.next += 1
        return values * factors


@scenario(keeps_model=True, stops=99)
def rollouts_under_dropout(place: Place) -> dict[str, Tensor]:
    """A captured pass draws anew in each replay, and for each row. Nothing is learned: both places draw other masks."""
    made = adapted(model(vocab_size=320))
    layer = made.base_model.model.model.layers[1].self_attn.q_proj
    layer.lora_dropout["default"] = noted = NotedDropout(0.5)
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    options = {"disable_dropout": False, "max_completion_length": 40, "ends": 2, "learning_rate": 0.0, "max_steps": 2}
    weights = grpo(place, made=made, **options)
    assert noted.noted is not None
    factors = noted.noted[:, :2].cpu()  # of completions that share a prompt
    place.facts["factors"] = factors[~factors.isnan().any(dim=(1, 2))]
    return weights


@scenario(keeps_model=True, simulated_only=True)  # a GPU cannot be told at which allocation memory ends
def buffers_that_do_not_fit(place: Place) -> dict[str, Tensor]:
    """Memory ends where the buffers of leaps are made: they go to the host."""
    fired = []

    def fault(size: int) -> bool:
        frames = () if fired else traceback.walk_stack(None)
        now = any(frame.f_code.co_filename.endswith("leaps/directions.py") for frame, _ in frames)
        fired.extend([now] * now)
        return now

    place.simulator.fault = fault if place.on_device else None
    options = {} if place.on_device else {"plan_values": ON_HOST}
    return train(place, **A_LEAP, **ALONG_GRADIENTS, probe_budget=1.0, **options)


@scenario()
def measured(place: Place) -> dict[str, Tensor]:
    """What commands, planner and TRL's options ask of a device."""
    from hf_hybrid import HybridSFTConfig
    from hf_hybrid.cli import env
    from hf_hybrid.machine import device_memory

    place.facts["environment"] = env.report()
    place.facts["free"] = device_memory()
    place.facts["bf16"] = place.config(HybridSFTConfig).bf16
    return {}


# Helpers of scenarios.


@contextlib.contextmanager
def patched(values: Any, name: str, value: Any) -> Iterator[None]:
    """Another value in a dictionary meanwhile."""
    before = values[name]
    values[name] = value
    try:
        yield
    finally:
        values[name] = before


@contextlib.contextmanager
def default(cls: type, name: str, value: Any) -> Iterator[None]:
    """Another default of an argument of a class meanwhile."""
    original = cls.__init__
    cls.__init__ = functools.partialmethod(original, **{name: value})
    try:
        yield
    finally:
        cls.__init__ = original


@contextlib.contextmanager
def a_driver() -> Iterator[None]:
    """NVML, as far as the package reads it. Between two calls it takes 20 samples of the device: 38 %."""
    import pynvml

    taken = itertools.count(1)

    def samples(handle: Any, kind: int, since: int) -> tuple[int, list]:
        assert kind == pynvml.NVML_GPU_UTILIZATION_SAMPLES
        return pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, [
            pynvml.c_nvmlSample_t(next(taken), pynvml.c_nvmlValue_t(uiVal=38)) for _ in range(20)
        ]

    driver = types.ModuleType("pynvml")
    driver.NVMLError, driver.NVML_ERROR_NOT_FOUND = pynvml.NVMLError, pynvml.NVML_ERROR_NOT_FOUND
    driver.NVML_GPU_UTILIZATION_SAMPLES = pynvml.NVML_GPU_UTILIZATION_SAMPLES
    driver.nvmlDeviceGetSamples = samples
    driver.nvmlInit = driver.nvmlShutdown = lambda: None
    driver.nvmlDeviceGetHandleByUUID = lambda identity: identity
    driver.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(used=3 << 30, free=13 << 30, total=16 << 30)
    driver.nvmlDeviceGetCount, driver.nvmlDeviceGetHandleByIndex = lambda: 1, lambda index: index
    driver.nvmlDeviceGetName, driver.nvmlSystemGetDriverVersion = lambda handle: b"Simulated GPU", lambda: "1.0"
    driver.nvmlDeviceGetMaxPcieLinkGeneration = lambda handle: 4
    driver.nvmlDeviceGetMaxPcieLinkWidth = lambda handle: 16
    before = sys.modules.get("pynvml")
    sys.modules["pynvml"] = driver
    try:
        yield
    finally:
        sys.modules["pynvml"] = before


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Over all weights."""
    return max((first[name] - second[name]).abs().max().item() for name in first)


def tokenizer():
    """A tokenizer of bytes, made from text that ships with Python."""
    from pydoc_data import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator([topics.topics["if"], topics.topics["while"]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<eos>")


class Lines(logging.Handler):
    """Keeps what was logged."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.getMessage()}\n")


SLOW = (
    "a_layer_left_out", "a_step_of_the_user", "activations_offloaded", "activations_offloaded_with_leaps",
    "all_resident", "bf16_by_micro_batch", "bf16_copies", "bf16_no_accumulation", "bf16_of_a_device_model",
    "by_layer_more", "by_micro_batch_more", "checkpointed", "chunked_loss", "dpo", "dpo_streamed_by_micro_batch",
    "dpo_streamed_precomputed", "dropout", "eight_bit", "eight_bit_bf16",
    "eight_bit_by_micro_batch", "eight_bit_more", "ends_streamed", "ends_streamed_tied", "failed_evaluation",
    "fast_streamed", "fetched_far_ahead", "gkd_streamed", "gradients_looked_at", "graphs_by_micro_batch",
    "graphs_eight_bit_bf16", "graphs_in_backward", "graphs_lora_int8", "grpo_again", "grpo_long", "grpo_more",
    "grpo_peak", "grpo_peak_lora_reference", "grpo_peak_reference", "grpo_rewards_first",
    "in_backward_alone", "in_backward_by_micro_batch", "in_backward_eight_bit", "in_backward_far_ahead",
    "int8_probes_registered", "interrupted_after_predict", "kto_streamed", "leaps_and_saves", "leaps_bf16",
    "leaps_by_micro_batch", "leaps_deeper", "leaps_eight_bit", "leaps_ends_streamed", "leaps_gradient_memory",
    "leaps_host_buffers", "leaps_planned", "leaps_probed", "leaps_probed_deeper", "leaps_undone",
    "looked_at_before_a_step", "lora_bf16", "lora_experts_int8", "lora_int8", "lora_kept", "lora_kept_int8",
    "moved_by_hand", "muon", "no_accumulation", "no_clipping", "not_fetched_ahead", "nothing_to_save_monitored",
    "nothing_to_save_searched", "orpo_streamed", "out_of_memory_leaps", "out_of_memory_resident",
    "out_of_memory_seldom", "out_of_memory_streamed", "out_of_memory_streamed_eight_bit", "parked_uneven",
    "pictures_lora", "pictures_shared", "profiled_resident", "registered_lora_int8", "rescued_rate",
    "rescued_rate_without_leaps", "resident_leaps", "resident_leaps_gradient_memory", "resident_leaps_host_buffers",
    "resident_leaps_of_large_matrices", "resident_leaps_planned", "resident_leaps_undone", "resumed", "reward_streamed",
    "rollouts_under_dropout", "rows_in_one_call", "rows_streamed", "saves_eight_bit", "saves_lora_int8", "sft_streamed",
    "sgd", "some_resident_bf16", "some_resident_by_micro_batch", "some_resident_eight_bit",
    "some_resident_fetched_far_ahead", "some_resident_leaps", "some_resident_parked", "some_resident_saves",
    "states_on_host", "states_on_host_and_saves", "trained_twice", "two_trainers", "uneven_by_micro_batch",
)  # fmt: skip
"""Run with `-m slow` alone: combinations of what other scenarios have."""


def places(name: str) -> tuple[str, ...]:
    """Where a scenario runs."""
    return ("device", SCENARIOS[name].beside)


def run(name: str, where: str, simulator: Any, folder: Path) -> dict[str, Any]:
    """Run one scenario in this process."""
    scenario = SCENARIOS[name]
    place = Place(where, folder, simulator)
    if place.on_device:
        simulator.install()
    torch.set_num_threads(1)
    handler = Lines()
    logging.getLogger("hf_hybrid").addHandler(handler)
    weights = scenario.function(place)
    found = {
        "weights": weights,
        "facts": place.facts,
        "races": dict(simulator.found.races),
        "stop_sites": dict(simulator.found.stop_sites),
        "looks": dict(simulator.found.looks),
        "conversions": dict(simulator.found.conversions),
        "entered": sorted(marks.entered),
        "known": sorted(marks.known),
    }
    found["log"] = "".join(handler.lines)
    del weights
    gc.collect()
    place.facts |= {"bytes_left": place.bytes(), "seconds": time.process_time()}
    return found
