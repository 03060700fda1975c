"""
Trainings on the simulated device, beside the same on the CPU.

A scenario is a function of a [`Place`]. It returns the weights that must be equal in both places and facts that
test_scenarios.py asserts something of. Most are one training with other options; [`SCENARIOS`] lists them all.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from hf_hybrid import HybridConfig, HybridTrainer
from simulated_gpu import marks

Tensor = torch.Tensor

LEAPS = {
    "enable_predict": True,
    "max_steps": 12,
    "warmup_phase_steps": 2,
    "full_phase_steps": 2,
    "correct_phase_steps": 1,
    "max_predict_steps": 2,
    "leap_worth": 0.5,
    "leap_budget": 1.0,
    "probe_samples": 4,
}
STREAM = {"memory": "stream", "resident_layers": 0}
STREAMED = ("memory", "resident_layers", "accumulation_walk", "stream_embeddings", "prefetch_layers")


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

    def config(self, cls: type = HybridConfig, **options) -> HybridConfig:
        """Options of a short training that stays within its folder; the folder's name counts the trainings."""
        self._runs += 1
        values = {
            "output_dir": str(self.folder / str(self._runs)),
            "max_steps": 4,
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
        return cls(**{**values, **options})

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
        trainer.optimizer = trainer.lr_scheduler = None  # their states stay where they are, as plain Trainer's do
        trainer.callback_handler.optimizer = trainer.callback_handler.lr_scheduler = None
        trainer.accelerator.free_memory()
        gc.collect()
        if self.on_device:
            self.simulator.synchronize()
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

    def _now(self) -> tuple[Counter, int]:
        return Counter(self.simulator.found.stops), len(self.trainer.hybrid_summary()["leaps"])

    def on_step_end(self, args, state, control, **kwargs):
        self.marks.append(self._now())
        self.busy.append(control.should_save or control.should_evaluate)

    def _steps(self) -> Iterator[tuple[Counter, bool, bool]]:
        for index in range(1, len(self.marks)):
            (before, leaps), (after, now) = self.marks[index - 1], self.marks[index]
            yield after - before, now > leaps, self.busy[index] or self.busy[index - 1]

    def ordinary(self) -> dict[str, int]:
        """By package, the most stops of a step in which no leap was made and nothing saved or evaluated."""
        return self._most(stops for stops, leapt, busy in self._steps() if not leapt and not busy)

    def at_leaps(self) -> dict[str, int]:
        """By package, the most stops of a step with a leap."""
        return self._most(stops for stops, leapt, busy in self._steps() if leapt)

    @staticmethod
    def _most(steps) -> dict[str, int]:
        most: Counter = Counter()
        for stops in steps:
            for package, count in Counter({p: 0 for p, _ in stops}).items():
                count = sum(n for (p, _), n in stops.items() if p == package)
                most[package] = max(most[package], count)
        return dict(most)


def model(*, layers: int = 3, width: int = 16, seed: int = 0, **options) -> LlamaForCausalLM:
    """A Llama without SDPA, whose kernels for CUDA the simulator does not have."""
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
    return LlamaForCausalLM(LlamaConfig(**{**values, **options}))


def adapted(base: torch.nn.Module) -> torch.nn.Module:
    """With LoRA on it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def rows(count: int = 64, *, lengths: tuple[int, ...] = (12,)) -> list[dict[str, Tensor]]:
    """Random tokens; the rows take the lengths in turn."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(count):
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
    return HybridTrainer(
        made, place.config(**options), train_dataset=data, eval_dataset=data[:4], data_collator=padded, **extra
    )


# Kinds of scenarios.


def train(place: Place, *, tied: bool = True, lora: bool = False, architecture: dict | None = None, **options):
    """One training."""
    if place.resident:
        options = {name: value for name, value in options.items() if name not in STREAMED}
    made = model(tie_word_embeddings=tied, **(architecture or {}))
    if options.pop("on_device_already", False) and place.on_device:
        made.cuda()
    data = rows(lengths=options.pop("lengths", (12,)))
    trainer = trainer_of(place, adapted(made) if lora else made, data, **options)
    with place.counted(trainer):
        trainer.train()
    place.facts |= told_by(trainer)
    return weights_of(trainer)


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
    stops: int = 3
    """Most stops of the package in an ordinary step."""
    keeps_model: bool = False
    """The model stays on the device after training, as plain Trainer leaves it."""


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


# Streamed layers. On the host, the optimizer of a streamed layer computes as on the CPU. In bf16, autocast rounds other
# operations on a GPU than on a CPU, so that a resident training on the device is what a streamed one must equal.

AS_RESIDENT = {"beside": "resident"}
ROUNDED_STATES = {"tolerance": 1e-4}  # a rounding error may move a moment to the next of its 256 codes
ORTHOGONALISED = {"tolerance": 1e-3}  # in bf16, which makes much of a rounding error
WIDE = {"width": 64}  # matrices large enough for moments in 8 bits

training("by_micro_batch", **STREAM, accumulation_walk="micro_batch")
training("by_layer", **STREAM, accumulation_walk="layer")
training("parked", **STREAM, accumulation_walk="layer", offload_activations=True)
training("parked_uneven", **STREAM, offload_activations=True, lengths=(6, 12, 9))
training("uneven_by_micro_batch", **STREAM, accumulation_walk="micro_batch", lengths=(6, 12, 9))
training("ends_streamed", **STREAM, stream_embeddings=True, tied=False)
training("ends_streamed_tied", **STREAM, stream_embeddings=True)
training("no_accumulation", **STREAM, gradient_accumulation_steps=1)
training("no_clipping", **STREAM, max_grad_norm=0.0)
training("fetched_far_ahead", **STREAM, prefetch_layers=3, architecture={"layers": 5})
training("not_fetched_ahead", **STREAM, prefetch_layers=0)
training("kept_layers", memory="stream", resident_layers=2, architecture={"layers": 4})
training("dropout", **STREAM, architecture={"attention_dropout": 0.2})
training("chunked_loss", **STREAM, chunked_loss="on", tied=False)
training("sgd", **STREAM, optim="sgd")
training("muon", **STREAM, optim="muon", expect=ORTHOGONALISED)
training("bf16", **STREAM, bf16=True, expect=AS_RESIDENT)
training("bf16_by_micro_batch", **STREAM, bf16=True, accumulation_walk="micro_batch", expect=AS_RESIDENT)
training("bf16_of_a_device_model", **STREAM, bf16=True, on_device_already=True, expect=AS_RESIDENT)
training("eight_bit", **STREAM, optimizer_states="8bit", architecture=WIDE, expect=ROUNDED_STATES)
training("eight_bit_by_micro_batch", **STREAM, optimizer_states="8bit", accumulation_walk="micro_batch")
training("eight_bit_bf16", **STREAM, optimizer_states="8bit", bf16=True, expect=AS_RESIDENT)
training("lora", **STREAM, lora=True)
training("lora_int8", **STREAM, lora=True, base_precision="int8")
training("saves", **STREAM, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=1)
training("saves_eight_bit", **STREAM, optimizer_states="8bit", save_strategy="steps", save_steps=2)
training("saves_lora_int8", **STREAM, lora=True, base_precision="int8", save_strategy="steps", save_steps=2)

# Leaps. Orthogonalised in bf16 on a GPU and in fp32 on a CPU; streamed masters are orthogonalised on the host.

ALONG_GRADIENTS = {"direction": "gradient_memory"}

training("leaps", **STREAM, **LEAPS)
training("leaps_by_micro_batch", **STREAM, **LEAPS, accumulation_walk="micro_batch")
training("leaps_host_buffers", **STREAM, **LEAPS, buffers_device="cpu")
training("leaps_eight_bit", **STREAM, **LEAPS, optimizer_states="8bit")
training("leaps_bf16", **STREAM, **LEAPS, bf16=True, expect=ORTHOGONALISED | AS_RESIDENT)
training("leaps_ends_streamed", **STREAM, **LEAPS, stream_embeddings=True, tied=False)
training("leaps_probed", **STREAM, **LEAPS, probe_budget=1.0)
training("leaps_undone", **STREAM, **LEAPS, probe_budget=1.0, leap_gain=300.0)
training("leaps_and_saves", **STREAM, **LEAPS, save_strategy="steps", save_steps=1)
training("leaps_planned", **STREAM, **LEAPS, planner="dynamics")
training("leaps_gradient_memory", **STREAM, **LEAPS, **ALONG_GRADIENTS)
training("rescued_rate", **STREAM, **LEAPS, lr_rescue="on")
training("resident_leaps", **LEAPS, expect=ORTHOGONALISED | {"tolerance": 2e-2})
training("resident_leaps_gradient_memory", **LEAPS, **ALONG_GRADIENTS)
training("resident_leaps_host_buffers", **LEAPS, buffers_device="cpu")
training("resident_leaps_undone", **LEAPS, **ALONG_GRADIENTS, probe_budget=1.0, leap_gain=300.0)
training("resident_leaps_planned", **LEAPS, **ALONG_GRADIENTS, planner="dynamics")
training("fast", preset="fast", expect=ORTHOGONALISED)
training("fast_streamed", **STREAM, preset="fast", expect=ORTHOGONALISED)

# Memory by phase, of a model that stays on the device.

BIG_ENOUGH = {"width": 256, "layers": 2}  # for int8 probes

training("plain")
training("checkpointed", checkpoint_phases="full,correct", activation_checkpointing=True)
training("activations_offloaded", offload_activations=True, expect={"stops": 3})
training("states_on_host", **LEAPS, **ALONG_GRADIENTS, predict_states="host")
training("states_pinned", **LEAPS, **ALONG_GRADIENTS, predict_states="pinned")
training("states_eight_bit", **LEAPS, **ALONG_GRADIENTS, predict_states="8bit", expect=ROUNDED_STATES)
training("states_dropped", **LEAPS, **ALONG_GRADIENTS, predict_states="drop")
training("int8_probes", **LEAPS, **ALONG_GRADIENTS, weight_precision="predict=int8", probe_budget=1.0,
         architecture=BIG_ENOUGH)  # fmt: skip
training("bf16_copies", **LEAPS, **ALONG_GRADIENTS, weight_precision="predict=bf16", bf16=True,
         expect={"beside": "device"})  # fmt: skip


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
    weights = scenario.function(place)
    found = {
        "weights": weights,
        "facts": place.facts,
        "races": dict(simulator.found.races),
        "stop_sites": dict(simulator.found.stop_sites),
        "conversions": dict(simulator.found.conversions),
        "entered": sorted(marks.entered),
        "known": sorted(marks.known),
    }
    del weights
    gc.collect()
    place.facts["bytes_left"] = place.bytes()
    return found
