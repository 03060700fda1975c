"""`plan_memory`: what training a model would hold on device and host, from its config alone."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_hybrid.optimizers import split_parameters
from hf_hybrid.plan import fit
from hf_hybrid.plan.accounting import ByteTable, ModelShape
from hf_hybrid.plan.adapters import add_adapters, lora_config, pack_base
from hf_hybrid.plan.models import Blueprint, Excerpt, on_cpu, read_config
from hf_hybrid.plan.replay import activations, replay
from hf_hybrid.plan.request import Request
from hf_hybrid.plan.setups import Setup, loaded, training_options, usual_setups
from hf_hybrid.plan.sizes import parse_size
from hf_hybrid.plan.step import StepOptions, StepTrace, enable_checkpointing, trace_step
from hf_hybrid.plan.tracker import CATEGORIES
from hf_hybrid.streaming.layers import find_layers
from hf_hybrid.streaming.loss import ChunkedCausalLoss

CONTEXT_BYTES = int(0.6 * 2**30)
"""What a CUDA context and the libraries' kernels take of a device; approximate, it differs by driver and card."""
MARGIN = 0.05
"""Share of the device's peak that is left for what the allocator rounds up and cannot use; assumed, not measured."""
LARGEST_TRACE = 2**26
"""Tokens of a micro-batch beyond which a plan is refused as absurd."""


@dataclass(frozen=True)
class TrainingPlan:
    """What one way to train a model holds at its peak."""

    setup: Setup
    table: ByteTable  # at the moment that the device holds most, and what the host holds between steps
    stage: str  # when the device holds most: "forward", "backward", "update", or "" where it is computed, not traced
    vram: int | None
    ram: int | None
    context_bytes: int  # of the device, beside tensors
    trainable: int  # weights
    weights: int
    shape: ModelShape
    memory_plan: fit.MemoryPlan
    options: dict[str, object] = field(repr=False)  # of `HybridConfig`
    refused_by_trainer: bool = False  # a streamed plan that fits, but not by the trainer's own coarser estimate

    @property
    def peak_device_bytes(self) -> int:
        """Bytes of tensors on the device at its largest moment."""
        return self.table.total("device")

    @property
    def peak_host_bytes(self) -> int:
        """Bytes of tensors on the host."""
        return self.table.total("host")

    @property
    def categories(self) -> dict[str, dict[str, int]]:
        """`{category: {"device": bytes, "host": bytes}}`, and the same under `"total"`."""
        return self.table.to_dict()

    @property
    def margin_bytes(self) -> int:
        """Device memory beyond the tensors: the context, and what the allocator rounds up and cannot use."""
        return self.context_bytes + int(MARGIN * self.peak_device_bytes) * (self.context_bytes > 0)

    @property
    def device_shortfall(self) -> int:
        """Bytes by which the device is too small, its margin counted; 0 if it is not."""
        need = self.peak_device_bytes + self.margin_bytes
        return 0 if self.vram is None else max(need - self.vram, 0)

    @property
    def host_shortfall(self) -> int:
        """Bytes by which the host is too small; 0 if it is not."""
        return 0 if self.ram is None else max(self.peak_host_bytes - self.ram, 0)

    @property
    def fits(self) -> bool:
        """Whether device, with its margin, and host are large enough; where no limit is known they are."""
        return not self.device_shortfall and not self.host_shortfall

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {
            "title": self.setup.title,
            "peak_device_bytes": self.peak_device_bytes,
            "peak_host_bytes": self.peak_host_bytes,
            "margin_bytes": self.margin_bytes,
            "categories": self.categories,
            "stage": self.stage,
            "fits": self.fits,
            "device_shortfall": self.device_shortfall,
            "host_shortfall": self.host_shortfall,
            "exact": self.setup.exact,
            "refused_by_trainer": self.refused_by_trainer,
            "options": self.options,
        }

    def __str__(self) -> str:
        return f"{self.setup.title}\n{self.table}"


def plan_memory(
    model: str | Path | object,
    *,
    sequence_length: int,
    batch_size: int = 1,
    dtype: str = "mixed",
    memory: str = "auto",
    peft: object = None,
    vram: str | int | None = None,
    ram: str | int | None = None,
    gradient_accumulation_steps: int = 1,
    activation_checkpointing: bool = False,
    chunked_loss: bool = False,
    optimizer_states: str = "exact",
    enable_predict: bool = False,
    accelerator: str = "cuda",
) -> TrainingPlan:
    """
    What training would hold, by category, without weights, data or a GPU.

    A training step of a few layers is traced on tensors without data; the other layers are added by what layers of
    their kind held. The device's peak of a resident model is that of an operation, not a formula.

    Args:
        model: A Hub id, a folder, a config file, a config or a model; only its config is read.
        sequence_length (`int`), batch_size (`int`): Tokens per sequence, padding included; sequences per micro-batch.
        dtype (`str`): `"mixed"`: fp32 weights (a frozen base: bf16) under bf16 autocast; `"float32"`, `"bfloat16"`.
        memory (`str`): `"off"`: resident; `"stream"`: layers on the host; `"auto"`: streamed if it does not fit.
        peft (`str` or `peft.PeftConfig`, *optional*): `"lora"`, `"qlora"` (base in nf4) or a config; all weights else.
        vram (`str` or `int`, *optional*), ram (`str` or `int`, *optional*): As `"24GiB"` or in bytes; no limit else.
        gradient_accumulation_steps (`int`): Micro-batches per optimizer step.
        activation_checkpointing (`bool`): Of a resident model; streamed layers always are.
        chunked_loss (`bool`): Compute the loss without ever holding all logits.
        optimizer_states (`str`): AdamW's: `"exact"` or `"8bit"`.
        enable_predict (`bool`): Count what leaps hold.
        accelerator (`str`): `"cuda"`, or `"cpu"` for autocast's rules of a CPU and no CUDA context.

    Returns:
        [`TrainingPlan`]: with `peak_device_bytes`, `peak_host_bytes`, `categories` and `fits`.

    Raises:
        ValueError: If an argument is out of range, or the model cannot be planned.
        ImportError: If adapters are asked for and peft is not installed.
    """
    setup = _asked_for(memory, peft, dtype, activation_checkpointing, chunked_loss, optimizer_states)
    planner = Planner(
        model, sequence_length=sequence_length, batch_size=batch_size, micro_batches=gradient_accumulation_steps,
        peft=peft, vram=vram, ram=ram, enable_predict=enable_predict, accelerator=accelerator,
    )  # fmt: skip
    found = planner.plan(setup)
    if memory == "auto" and not found.fits and not setup.packed:
        return planner.plan(replace(setup, title="streamed", streamed=True))
    return found


def _asked_for(memory: str, peft: object, dtype: str, checkpointing: bool, chunked_loss: bool, states: str) -> Setup:
    if memory not in ("off", "auto", "stream"):
        raise ValueError(f"`memory` must be one of off, auto, stream, got `{memory}`.")
    if states not in ("exact", "8bit"):
        raise ValueError(f"`optimizer_states` must be one of exact, 8bit, got `{states}`.")
    if peft == "qlora" and memory == "stream":
        raise ValueError("`memory=stream` is not planned with `peft=qlora`. Set `memory=off`, or `peft=lora`.")
    trains = "all" if peft is None else "adapters"
    weights, autocast = loaded(dtype, trains)
    streamed = memory == "stream"
    return Setup(
        "streamed" if streamed else "resident", trains, weights, autocast, peft == "qlora", streamed, checkpointing,
        chunked_loss, states,
    )  # fmt: skip


class Planner:
    """
    Plans for one model, batch and machine; what several plans have in common is traced once.

    Args:
        model: As in [`plan_memory`], and so are the others.
        sequence_length (`int`, *optional*): `None`: 1024, or what the model takes at most.
        batch_size (`int`), micro_batches (`int`): Of a step.
        peft (`str` or `peft.PeftConfig`, *optional*): The adapters of setups that train adapters.
        vram (`str` or `int`, *optional*), ram (`str` or `int`, *optional*): Limits.
        enable_predict (`bool`): Count what leaps hold.
        accelerator (`str`): `"cuda"` or `"cpu"`.

    Raises:
        ValueError: As [`plan_memory`].
    """

    def __init__(
        self,
        model: str | Path | object,
        *,
        sequence_length: int | None,
        batch_size: int = 1,
        micro_batches: int = 1,
        peft: object = None,
        vram: str | int | None = None,
        ram: str | int | None = None,
        enable_predict: bool = False,
        accelerator: str = "cuda",
    ):
        if accelerator not in ("cuda", "cpu"):
            raise ValueError(f"`accelerator` must be one of cuda, cpu, got `{accelerator}`.")
        self.vram = None if vram is None else parse_size(vram, "vram")
        self.ram = None if ram is None else parse_size(ram, "ram")
        self._peft = _checked_adapters(peft)
        self.blueprint = Blueprint(read_config(model))
        longest = getattr(self.blueprint.config.get_text_config(), "max_position_embeddings", None)
        if sequence_length is None:
            sequence_length = min(1024, longest or 1024)
        _check_sizes(sequence_length, batch_size, micro_batches, longest)
        self.sequence_length, self.batch_size, self.micro_batches = sequence_length, batch_size, micro_batches
        self.enable_predict, self.accelerator = enable_predict, accelerator
        self._traces: dict[StepOptions, dict[tuple, StepTrace]] = {}
        self._excerpts: dict[str, Excerpt] = {}
        self._shapes: dict[tuple[str, str], ModelShape] = {}

    @functools.cached_property
    def adapters(self):
        """The `peft.PeftConfig` of setups that train adapters."""
        return lora_config() if self._peft is None or isinstance(self._peft, str) else self._peft

    @property
    def can_chunk(self) -> bool:
        """Whether the loss of the model can be computed in chunks."""
        return ChunkedCausalLoss.unsupported_reason(self.blueprint.whole(torch.float32)) is None

    def plans(self, dtype: str = "mixed", *, with_adapters: bool = True) -> list[TrainingPlan]:
        """All usual ways to train, the fastest first; `dtype` as in [`plan_memory`]."""
        setups = usual_setups(dtype, self.can_chunk)
        return [self.plan(setup) for setup in setups if with_adapters or setup.trains == "all"]

    def plan(self, setup: Setup) -> TrainingPlan:
        """
        What one way to train holds.

        Raises:
            ValueError: If it asks for what the model cannot do.
        """
        if setup.chunked_loss and not self.can_chunk:
            reason = ChunkedCausalLoss.unsupported_reason(self.blueprint.whole(torch.float32))
            raise ValueError(f"`chunked_loss=True` cannot be used: {reason}. Leave it out.")
        shape = self._shape(setup)
        request = self._request(setup)
        if setup.streamed:
            trace = self._trace(setup.checkpointed())
            stands_for = self._excerpt(setup.weights).stands_for
            if not stands_for:
                raise ValueError("`memory=stream`: the model has no list of decoder layers. Set `memory=off`.")
            found = fit.best_plan(shape, replace(request, activations=activations(trace, stands_for)))
            coarse = fit.best_plan(shape, request)
            refused = not coarse.fits(request.device_budget, request.host_budget)
            plan = self._result(setup, shape, found, found.table, "")
            return replace(plan, refused_by_trainer=plan.fits and refused)
        resident = fit.best_plan(shape, request)
        peak = replay(self._trace(setup), self._excerpt(setup.weights).stands_for)
        table = ByteTable()
        for category in CATEGORIES:
            table.add(category, "device", peak.get(category))
        for place in ("device", "host"):
            table.add("drift", place, resident.table.get("drift", place))
        return self._result(setup, shape, resident, table, peak.stage)

    def _result(
        self, setup: Setup, shape: ModelShape, found: fit.MemoryPlan, table: ByteTable, stage: str
    ) -> TrainingPlan:
        context = CONTEXT_BYTES if self.accelerator == "cuda" else 0
        budgets = {"vram_budget_gib": self._device_budget(context), "host_budget_gib": self.ram}
        options = training_options(
            setup,
            batch_size=self.batch_size,
            micro_batches=self.micro_batches,
            enable_predict=self.enable_predict,
            limits={name: round(size / 2**30, 3) for name, size in budgets.items() if size is not None},
            decided={"resident_layers": found.resident_layers, "stream_embeddings": found.stream_embeddings},
        )
        total = shape.total
        return TrainingPlan(
            setup, table, stage, self.vram, self.ram, context, total.trainable, total.weights, shape, found, options
        )  # fmt: skip

    def _device_budget(self, left_in: int) -> int | None:
        """What tensors may take; with `left_in`, of the context, as the trainer counts."""
        if self.vram is None or self.accelerator != "cuda":
            return self.vram
        return max(int((self.vram - CONTEXT_BYTES) / (1 + MARGIN)), 1) + left_in

    def _request(self, setup: Setup) -> Request:
        return Request(
            tokens=self.batch_size * self.sequence_length,
            device_budget=self._device_budget(0),
            host_budget=self.ram,
            micro_batches=self.micro_batches,
            batch_size=self.batch_size,
            mode="stream" if setup.streamed else "off",
            optimizer_states=setup.optimizer_states,
            base_precision=setup.base_precision,
            offload_activations=setup.offload_activations,
            chunked_loss=setup.chunked_loss,
            activation_checkpointing=setup.checkpointing,
            enable_predict=self.enable_predict,
            working_bytes=2 if setup.autocast else None,
        )

    def _excerpt(self, weights: str) -> Excerpt:
        if weights not in self._excerpts:
            self._excerpts[weights] = self.blueprint.excerpt(getattr(torch, weights))
        return self._excerpts[weights]

    def _trace(self, setup: Setup) -> StepTrace:
        options = StepOptions(
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            autocast=setup.autocast,
            activation_checkpointing=setup.checkpointing,
            chunked_loss=setup.chunked_loss,
            optimizer_states=setup.optimizer_states,
            accumulates=self.micro_batches > 1,
            accelerator=self.accelerator,
        )
        known = self._traces.setdefault(options, {})
        key = (setup.weights, setup.trains, setup.packed)
        if key not in known:
            with self._fake_model(setup) as model:
                layers = [layer for _, layer in find_layers(model)] if self._excerpt(setup.weights).stands_for else []
                known[key] = trace_step(model, layers, options)
        return known[key]

    @contextlib.contextmanager
    def _fake_model(self, setup: Setup) -> Iterator[nn.Module]:
        """The excerpt as it is trained, with tensors without data."""
        model = self._excerpt(setup.weights).copy()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.device("meta"):
                if setup.packed:
                    pack_base(model)
                if setup.trains == "adapters":
                    model = add_adapters(model, copy.deepcopy(self.adapters)).train()
            with FakeTensorMode():
                on_cpu(model)
                if setup.checkpointing:
                    enable_checkpointing(model, self.accelerator)
                yield model

    def _shape(self, setup: Setup) -> ModelShape:
        """Of the whole model, its base unpacked."""
        key = (setup.weights, setup.trains)
        if key not in self._shapes:
            excerpt = self._excerpt(setup.weights)
            with self._fake_model(replace(setup, packed=False, checkpointing=False)) as model:
                names = [name for name, _ in find_layers(model)] if excerpt.stands_for else [""]
                shape = ModelShape.of(model, names, orthogonal=split_parameters(model)[0].values())
            layers = tuple(shape.layers[index] for index in excerpt.stands_for) or shape.layers
            shape = replace(shape, layers=layers)
            _check_count(shape, self.blueprint.whole(getattr(torch, setup.weights)), setup.trains)
            self._shapes[key] = shape
        return self._shapes[key]


def recommended(plans: Sequence[TrainingPlan], peft: str | None = None) -> TrainingPlan | None:
    """
    The first plan that fits: of those with exact states and weights, then of the others.

    Args:
        plans (`Sequence[TrainingPlan]`): The fastest first.
        peft (`str`, *optional*): `"lora"`: of those that train adapters; `"qlora"`: on a packed base; else all weights.
    """
    trains = "all" if peft is None else "adapters"
    usable = [plan for plan in plans if plan.setup.trains == trains and plan.fits and not plan.refused_by_trainer]
    if peft == "qlora":
        return next((plan for plan in usable if plan.setup.packed), None)
    return next((plan for plan in usable if plan.setup.exact), next(iter(usable), None))


def _check_sizes(sequence_length: int, batch_size: int, micro_batches: int, longest: int | None) -> None:
    least = {"sequence_length": 2, "batch_size": 1, "gradient_accumulation_steps": 1}
    for (name, smallest), value in zip(least.items(), (sequence_length, batch_size, micro_batches)):
        if value < smallest:
            raise ValueError(f"`{name}` must be at least {smallest}, got {value}.")
    if batch_size * sequence_length > LARGEST_TRACE:
        tokens = f"`batch_size={batch_size}` times `sequence_length={sequence_length}`"
        raise ValueError(f"{tokens} is over {LARGEST_TRACE} tokens at once. Lower one of them.")
    if longest is not None and sequence_length > longest:
        raise ValueError(
            f"`sequence_length={sequence_length}` is over the {longest} positions of the model "
            "(`max_position_embeddings`). Lower it, or raise that number in the config."
        )


def _checked_adapters(peft: object):
    if isinstance(peft, str) and peft not in ("lora", "qlora"):
        raise ValueError(f"`peft` must be lora, qlora or a `peft.PeftConfig`, got `{peft}`.")
    return peft


def _check_count(shape: ModelShape, whole: nn.Module, trains: str) -> None:
    """The layers that stand for others must add up to the model."""
    real = sum(parameter.numel() for parameter in whole.parameters())
    counted = shape.total.weights
    if trains == "all" and counted != real:
        raise ValueError(f"`model`: its layers add up to {counted} weights and it has {real}. It cannot be planned.")
