"""`plan_memory`: the memory that training a model needs on device and host, from its config alone."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_hybrid.machine import workspace_bytes
from hf_hybrid.optimizers import split_parameters
from hf_hybrid.plan.accounting import ModelShape
from hf_hybrid.plan.estimate import Estimator, Plan
from hf_hybrid.plan.images import SomeImages, encoder_of
from hf_hybrid.plan.models import add_adapters, build, lora_config, read_config, takes_images
from hf_hybrid.plan.of_trainer import bytes_evaluated, keys_and_values
from hf_hybrid.plan.setups import Evaluated, Setup
from hf_hybrid.plan.stand_ins import make_ternary, pack_base
from hf_hybrid.plan.trace import Excerpt, Tracer
from hf_hybrid.plan.ways import KINDS, Way, WayPlan, loaded, parse_size, usual_ways
from hf_hybrid.streaming.layers import find_layers

if TYPE_CHECKING:
    from peft import PeftConfig

LARGEST_TRACE = 2**26
"""Tokens of a micro-batch beyond which a plan is refused as absurd."""


def plan_memory(
    model: str | Path | PreTrainedConfig | nn.Module,
    *,
    sequence_length: int,
    batch_size: int = 1,
    dtype: str = "mixed",
    memory: str = "auto",
    peft: str | PeftConfig | None = None,
    qat: str = "none",
    vram: str | int | None = None,
    ram: str | int | None = None,
    gradient_accumulation_steps: int = 1,
    activation_checkpointing: bool | str = False,
    chunked_loss: bool = False,
    optimizer_states: str = "exact",
    enable_predict: bool = False,
    accelerator: str = "cuda",
) -> Plan:
    """
    Plan the memory of training by category, without weights, data or a GPU.

    The estimator is the trainer's: `HybridTrainer` gets the same plan for the same setup.

    Args:
        model: A Hub id, a folder, a config file, a config or a model; only its config is read.
        sequence_length (`int`), batch_size (`int`):
            Tokens per sequence, padding included (of models that take images half of them are those of images);
            sequences per micro-batch.
        dtype (`str`): `"mixed"`: fp32 weights (a frozen base: bf16) under bf16 autocast; `"float32"`, `"bfloat16"`.
        memory (`str`): `"off"`: resident; `"stream"`: layers on the host; `"auto"`: streamed if it does not fit.
        peft (`str` or `peft.PeftConfig`, *optional*): `"lora"`, `"qlora"` (base in nf4) or a config; all weights else.
        qat (`str`): `"bitnet"`: layers with ternary weights, and their rounded copies beside the latent weights.
        vram (`str` or `int`, *optional*), ram (`str` or `int`, *optional*): As `"24GiB"` or in bytes; no limit else.
        gradient_accumulation_steps (`int`): Micro-batches per optimizer step.
        activation_checkpointing (`bool` or `"auto"`):
            `"auto"`: of as few layers as fit; of streamed ones, `False` means that too.
        chunked_loss (`bool`): Compute the loss without ever holding all logits.
        optimizer_states (`str`): AdamW's: `"exact"` or `"8bit"`.
        enable_predict (`bool`):
            Count what leaps hold. A pretrained model gives this back in its first step, because no leaps are made.
            Adapters train without them.
        accelerator (`str`): `"cuda"`, or `"cpu"` for autocast's rules of a CPU and no CUDA context.

    Returns:
        [`Plan`]: with `peak_device_bytes`, `peak_host_bytes`, `categories` and `fits`. The plan is returned also where
        it does not fit.

    Raises:
        ValueError: If an argument is out of range, or the model cannot be planned.
        ImportError: If adapters are asked for and peft is not installed.
    """
    if peft == "qlora" and memory == "stream":
        raise ValueError("`memory=stream` is not planned with `peft=qlora`. Set `memory=off`, or `peft=lora`.")
    if qat != "none" and peft is not None:
        raise ValueError(f"`qat={qat}` trains all weights, and `peft` freezes them. Leave one of them out.")
    planner = Planner(
        model,
        peft=peft,
        qat=qat,
        sequence_length=sequence_length,
        batch_size=batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        vram=vram,
        ram=ram,
        memory="off" if peft == "qlora" else memory,
        activation_checkpointing=activation_checkpointing,
        chunked_loss=chunked_loss,
        optimizer_states=optimizer_states,
        enable_predict=enable_predict,
        accelerator=accelerator,
    )
    kind = "full" if peft is None else "QLoRA" if peft == "qlora" else "LoRA"
    weights, autocast = loaded(dtype, kind)
    return planner.plan(Way(memory, replace(planner.setup, autocast=autocast), kind, weights))


class Planner:
    """Plans for one model, batch and machine. Common parts of several plans are built and traced once."""

    def __init__(
        self,
        model: str | Path | PreTrainedConfig | nn.Module,
        *,
        peft: str | PeftConfig | None = None,
        qat: str = "none",
        sequence_length: int | None = None,
        teacher: str | Path | PreTrainedConfig | None = None,
        generates: int = 0,
        **setup: Any,
    ):
        """`teacher` is evaluated beside the model. `generates` is the number of completions that are made together."""
        if isinstance(peft, str) and peft not in ("lora", "qlora"):
            raise ValueError(f"`peft` must be lora, qlora or a `peft.PeftConfig`, got `{peft}`.")
        if qat not in ("none", "bitnet"):
            raise ValueError(f"`qat` must be none or bitnet, got `{qat}`.")
        self._peft, self._ternary = peft, qat == "bitnet"
        self.config = read_config(model)
        longest = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        sequence_length = min(1024, longest or 1024) if sequence_length is None else sequence_length
        setup |= {name: parse_size(setup[name], name) for name in ("vram", "ram") if setup.get(name) is not None}
        self.setup = Setup(sequence_length, workspace=workspace_bytes(), distills=teacher is not None, **setup)
        if self.setup.tokens > LARGEST_TRACE:
            tokens = f"`batch_size={self.setup.batch_size}` times `sequence_length={sequence_length}`"
            raise ValueError(f"{tokens} is over {LARGEST_TRACE} tokens at once. Lower one of them.")
        if longest is not None and sequence_length > longest:
            raise ValueError(
                f"`sequence_length={sequence_length}` is over the {longest} positions of the model "
                "(`max_position_embeddings`). Lower it, or raise that number in the config."
            )
        self.full_model = functools.cache(lambda weights: build(self.config, getattr(torch, weights)))
        self._teacher = None if teacher is None else read_config(teacher)
        self._generates = generates
        self._estimators: dict[tuple[str, str], Estimator] = {}

    def plans(
        self,
        dtype: str = "mixed",
        kinds: Collection[str] = KINDS,
        *,
        chunks: str = "maybe",
        can_stream: bool = True,
        micro_batches: int = 1,
    ) -> list[WayPlan]:
        """
        All usual ways to train, the cheapest of each kind first; `dtype` as in [`plan_memory`].

        `chunks`: whether the trainer computes the loss in chunks by itself, as in [`usual_ways`]. `can_stream`: layers
        may be streamed. Each micro-batch is divided into so many (`micro_batches`), so that the update stays.
        """
        size, steps = self.setup.batch_size // micro_batches, self.setup.gradient_accumulation_steps * micro_batches
        setup = replace(self.setup, batch_size=size, gradient_accumulation_steps=steps)
        can_chunk = self._estimator(loaded(dtype, "full")[0], "full").reason_not_chunked is None
        ways = usual_ways(dtype, setup, kinds, chunks=chunks if can_chunk else "never", can_stream=can_stream)
        plans = [self.plan(way) for way in ways]
        # Where "auto" recomputes all layers, the next plan says the same.
        fixed = (plan.setup.activation_checkpointing != "auto" for plan in plans)
        return [p for p, is_fixed in zip(plans, fixed) if is_fixed or p.recomputed_layers < len(p.shape.layers)]

    def plan(self, way: Way) -> WayPlan:
        """Plan one way to train. Raises `ValueError` if the model cannot be trained in this way."""
        estimator = self._estimator(way.weights, way.kind)
        reason = estimator.reason_not_chunked
        if way.setup.chunked_loss and reason is not None:
            raise ValueError(f"`chunked_loss=True` cannot be used: {reason}. Leave it out.")
        evaluated = self._evaluated(way.weights, way.kind)
        setup = replace(way.setup, evaluated=evaluated, cached=self.keys_and_values(way))
        setup = setup if way.kind == "full" else replace(setup, values_per_weight=None)
        return WayPlan(**vars(estimator.best(setup)), way=way)

    @functools.cache  # noqa: B019  # a planner lives as long as a command
    def _evaluated(self, weights: str, kind: str) -> Evaluated:
        if self._teacher is None:
            return Evaluated()
        teacher = build(self._teacher, getattr(torch, weights))
        return bytes_evaluated([pack_base(teacher) if kind == "QLoRA" else teacher])

    def keys_and_values(self, way: Way) -> int:
        """Bytes of keys and values of all completions that are made together."""
        size = 2 if way.setup.autocast else getattr(torch, way.weights).itemsize
        return self._generates * self.setup.sequence_length * keys_and_values(self.config, size)

    def _estimator(self, weights: str, kind: str) -> Estimator:
        if (weights, kind) not in self._estimators:
            full_model = self.full_model(weights)
            excerpt = Excerpt.of(full_model)
            model = excerpt.model
            if kind == "QLoRA":
                model = pack_base(model)
            elif self._ternary:
                model = make_ternary(model)
            if kind != "full":
                peft = lora_config() if self._peft is None or isinstance(self._peft, str) else self._peft
                model = add_adapters(model, peft)
            excerpt = replace(excerpt, model=model)
            # Leaps and counts are those of the weights that are packed.
            shape = self._estimator(weights, "LoRA").shape if kind == "QLoRA" else _shape(excerpt, full_model)
            sees = takes_images(self.config)
            images = SomeImages.assumed(encoder_of(full_model), self.setup.sequence_length) if sees else None
            self._estimators[weights, kind] = Estimator(shape, Tracer(excerpt, images=images))
        return self._estimators[weights, kind]


def _shape(excerpt: Excerpt, full_model: nn.Module) -> ModelShape:
    """The shape of the full model, of whose layers an excerpt has one of each kind."""
    model, stands_for = excerpt.model, excerpt.stands_for
    names = [name for name, _ in find_layers(model)] if stands_for else [""]
    shape = ModelShape.of(model, names, leaps=split_parameters(model)[0].values())
    layers = tuple(shape.layers[index] for index in stands_for) or shape.layers
    return replace(shape, layers=layers, buffer_bytes=sum(buffer.nbytes for buffer in full_model.buffers()))


def recommended(plans: Sequence[WayPlan], kind: str) -> WayPlan | None:
    """Return the first plan of a kind that fits, with exact states and weights if there is one."""
    usable = [plan for plan in plans if plan.way.kind == kind and plan.fits]
    return next((plan for plan in usable if plan.way.exact), usable[0] if usable else None)
