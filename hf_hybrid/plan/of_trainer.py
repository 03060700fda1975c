"""
The memory plan of a trainer: its options and its model as the [`~hf_hybrid.plan.setups.Setup`] of a plan, the fewest
layers that have to be recomputed, and what streaming refuses.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from transformers import TrainingArguments

from hf_hybrid.compat import checkpointing_option
from hf_hybrid.machine import copies_beside, device_memory, mixed_precision_of, sharding_of, workspace_bytes
from hf_hybrid.optimizers import LIBRARIES, has_adapters, optimizer_name, split_parameters
from hf_hybrid.plan.accounting import ModelShape, host_memory
from hf_hybrid.plan.estimate import Estimator, refuse
from hf_hybrid.plan.images import SomeImages, encoder_of
from hf_hybrid.plan.setups import MARGIN, Evaluated, Setup, with_context
from hf_hybrid.plan.trace import Tracer
from hf_hybrid.run.run import RandomStates
from hf_hybrid.run.trainer_view import TrainerView, overridden, own_losses, unknown_loss
from hf_hybrid.streaming.layers import decoder_layers, embeddings_and_head, find_layers, layers_on_host
from hf_hybrid.streaming.loss import BIG_VOCABULARY, DISTANCE, ChunkedCausalLoss, ChunkedLossSwitch
from hf_hybrid.streaming.optimizer import STATES_PER_WEIGHT
from hf_hybrid.streaming.units import padded

logger = logging.getLogger(__name__)


class PlannedTrainer(TrainerView, Protocol):
    """A trainer whose memory is planned."""

    more_inputs: Mapping[str, Any]
    loss_switch: type[ChunkedLossSwitch]
    blocks_of_rows: int
    data_collator: Any

    def passes_beside(self) -> int: ...


class LeapBuffers(NamedTuple):
    """What leaps hold beside the model."""

    values_per_weight: float | None  # see [`Direction`]; None if no leaps are made
    orthogonalises: bool  # whether their direction orthogonalises matrices


HOST_SHARE = 0.9
"""Share of the free host memory that a step on a CPU may take before layers are recomputed. Assumed, not measured."""
SAMPLED_LENGTHS = 256
"""Sequences of the data, evenly spread, the longest of which is planned for."""
SAMPLED_IMAGES = 8
"""The same where a collator has to prepare images."""


def estimator_of(trainer: PlannedTrainer, device_map: dict | None, leaps: LeapBuffers) -> tuple[Estimator, Setup]:
    """Return the estimator for a trainer's model, and the setup that its options ask for."""
    args, options, model = trainer.args, trainer.hybrid_args, trainer.model
    hidden, muon = split_parameters(model)[0].values(), args.optim == "muon"
    orthogonalises = muon or leaps.orthogonalises
    shape = shape_of(model, device_map, muon=hidden if muon else (), leaps=hidden if orthogonalises else ())
    on_gpu = args.device.type != "cpu"  # of any kind: all are planned by the rules of CUDA
    vram, ram = (
        None if gib is None else int(gib * 2**30) for gib in (options.vram_budget_gib, options.host_budget_gib)
    )
    held = int(shape.total.bytes((shape.trainable_bytes, shape.element_bytes)))  # lies on the host already
    pays = options.memory != "off" and shape.vocab >= BIG_VOCABULARY
    chunks = options.chunked_loss == "on" or (options.chunked_loss == "auto" and pays)
    chunks = chunks and trainer.loss_switch().reason_not_chunked(trainer) is None
    distills = getattr(trainer, "teacher_model", None) is not None
    # TRL's kernels hold about as much, and so does its distance to a teacher where it has no whole logits.
    chunks = chunks or bool(on_gpu and trainer.more_inputs) or (distills and not hasattr(trainer, DISTANCE))
    recomputed, decided = checkpointing(args), dict[str, Any](options.plan_values)
    reason = _reason_not_fewest(trainer)
    if recomputed == "auto" and reason is not None:
        recomputed = True
    if reason is not None:  # streamed ones too
        decided.setdefault("kept_graphs", 0)
    most = len(shape.layers)  # more could not be kept or fetched, and each takes a buffer
    length, images = sampled(trainer)
    setup = Setup(
        sequence_length=length,
        batch_size=args.per_device_train_batch_size * trainer.blocks_of_rows,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        vram=with_context(device_memory(args.device)) if vram is None and on_gpu else vram,
        ram=host_memory() + held if ram is None else ram,
        accelerator="cuda" if on_gpu else "cpu",
        workspace=workspace_bytes(args.device if on_gpu else None),
        memory="stream" if device_map is not None else options.memory,
        autocast=args.bf16,
        activation_checkpointing=recomputed,
        offload_activations=options.offload_activations,
        chunked_loss=chunks and ChunkedCausalLoss.reason_not_chunked(model) is None,
        distills=distills,
        cached=bytes_cached(trainer, length),
        optimizer_states=options.optimizer_states,
        states_per_weight=STATES_PER_WEIGHT.get(optimizer_name(args), 2),
        base_precision=options.base_precision,
        resident_layers=None if options.resident_layers is None else min(options.resident_layers, most),
        accumulation_walk=options.accumulation_walk,
        update_in_backward=updates_in_backward(trainer),
        enable_predict=trainer.has_phases,
        values_per_weight=leaps.values_per_weight,
        beside=trainer.passes_beside(),
        evaluated=bytes_evaluated(evaluated_models(trainer)) if options.memory != "off" else Evaluated(),
        **decided,
    )
    setup = dataclasses.replace(setup, prefetch_layers=min(setup.prefetch_layers, most))
    return Estimator(shape, Tracer.of(model, images=images, **trainer.more_inputs)), setup


def checkpointing(args: TrainingArguments) -> bool | str:
    """Return whether activations are checkpointed: a truth value, or `auto`."""
    value = getattr(args, checkpointing_option())
    return value if value == "auto" else bool(value)


def fewest_recomputed_layers(trainer: PlannedTrainer, leaps: LeapBuffers) -> int | None:
    """Return how many layers have to be recomputed so that a step fits on its device; `None`: not known, so all."""
    args, options, model = trainer.args, trainer.hybrid_args, trainer.model
    if (reason := _reason_not_fewest(trainer)) is not None:
        logger.info("`activation_checkpointing=auto` recomputes all layers: %s.", reason)
        return None
    estimator, setup = estimator_of(trainer, None, leaps)
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()) if t.device.type == args.device.type)
    others = (args.world_size > 1) * sum(p.nbytes for p in model.parameters() if p.requires_grad)  # buckets of DDP
    if options.vram_budget_gib is None:  # what is free, beside the model; on a CPU other processes want some of it
        free = HOST_SHARE * host_memory() if setup.vram is None else setup.vram
        setup = dataclasses.replace(setup, vram=int(free) + held)
    elif (reference := getattr(trainer, "ref_model", None)) is not None:  # of DPO, which a budget counts
        others += sum(p.nbytes for p in reference.parameters())
    vram = max((setup.vram or 0) - others, 1)
    vram = vram if setup.accelerator == "cuda" else int(vram / (1 + MARGIN))  # there the plan leaves it
    plan = estimator.lightest(dataclasses.replace(setup, memory="off", vram=vram))
    count = torch.tensor(plan.recomputed_layers, device=args.device)
    return int(trainer.accelerator.gather(count).max())


def _reason_not_fewest(trainer: TrainerView) -> str | None:
    if trainer.hybrid_args.offload_activations:
        return "`offload_activations=True` keeps what they leave on the host"
    if (sharding := sharding_of(trainer.args)) is not None:
        return f"`{sharding}` divides the weights"
    if trainer.args.n_gpu > 1:
        return "`DataParallel` divides each batch"
    if not decoder_layers(trainer.model):
        return f"`{type(trainer.model).__name__}` has no list of decoder layers"
    is_known = trainer.trains_preferences and own_losses(trainer) == [("trl", "DPOTrainer", "compute_loss")]
    return None if is_known else unknown_loss(trainer)


def keys_and_values(config: Any, size: int) -> int:
    """Return the bytes of a token's keys and values in all layers, as if each attended to all tokens before it."""
    config = config.get_text_config()
    if not (heads := getattr(config, "num_attention_heads", 0)):
        return 0  # layers with a state alone
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * width * size


def bytes_cached(trainer: Any, length: int) -> int:
    """Return the bytes of keys and values of the completions that are made together, if any are here."""
    args = trainer.args
    if (together := getattr(args, "steps_per_generation", None)) is None or getattr(args, "use_vllm", False):
        return 0
    size = 2 if mixed_precision_of(args) != "no" else next(trainer.model.parameters()).element_size()
    return together * args.per_device_train_batch_size * length * keys_and_values(trainer.model.config, size)


def updates_in_backward(trainer: TrainerView) -> bool:
    """Whether streamed layers are updated in the backward pass: nothing is clipped, and nothing computed again."""
    clips, retries = trainer.args.max_grad_norm > 0, trainer.hybrid_args.out_of_memory == "retry"
    return not (clips or retries or trainer.has_phases)


def sampled(trainer: PlannedTrainer) -> tuple[int, SomeImages | None]:
    """
    Return the longest of some training sequences, and its images: where rows are not tokens yet, of a few as their
    collator makes them. If none can be read, 1024 or the model's maximum, and no images.
    """
    data: Any = trainer.train_dataset
    try:
        rows = list(_spread(data, SAMPLED_LENGTHS))
        if tokens_of := getattr(getattr(trainer, "rows", None), "tokens_of", None):  # rows are prompts
            most = vars(trainer.args)["max_completion_length"]
            return max(map(len, tokens_of([row["prompt"] for row in rows]))) + most, None
        longest = max(map(_tokens, rows))
        return min(longest, getattr(trainer.args, "max_length", None) or longest), None
    except (TypeError, KeyError, IndexError, ValueError):
        most = getattr(getattr(trainer.model, "config", None), "max_position_embeddings", None)
        usual = min(most or 1024, getattr(trainer.args, "max_length", None) or 1024, 1024)
    if encoder_of(trainer.model) is None:
        return usual, None
    before = RandomStates.now(trainer.args.device)
    try:
        batches = [trainer.data_collator([dict(row)]) for row in _spread(data, SAMPLED_IMAGES)]
        batch = max(batches, key=lambda batch: batch["input_ids"].shape[1])
    except Exception as error:  # whatever a collator of a user's own does
        logger.info("The rows cannot be collated (%r): %d tokens and no images are planned.", error, usual)
        return usual, None
    finally:
        before.restore()
    return batch["input_ids"].shape[1], SomeImages.in_batch(batch)


def _spread(data: Any, count: int) -> Iterator[Mapping[str, Any]]:
    """Yield some rows, evenly spread."""
    return (data[index] for index in range(0, len(data), max(len(data) // count, 1))[:count])


def _tokens(row: Mapping[str, Any]) -> int:
    pair = [len(row[name]) for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in row]
    return len(row["prompt_ids"]) + max(pair) if pair else len(row["input_ids"])


def streamed_layers(model: torch.nn.Module, device_map: dict | None) -> list[tuple[str, torch.nn.Module]]:
    """Return the decoder layers that are streamed; with a device map those that it keeps on the host."""
    layers = find_layers(model)
    if device_map is None:
        return layers
    streamed = layers_on_host(layers, device_map)
    if not streamed:
        raise ValueError(
            f"`device_map` keeps no decoder layer on `cpu` or `disk` (the layers are `{layers[0][0]}` to "
            f"`{layers[-1][0]}`): nothing would be streamed. Put some there, or leave `device_map` out."
        )
    return streamed


def shape_of(model: torch.nn.Module, device_map: dict | None, **matrices) -> ModelShape:
    """Return the weights of a model, by layers that are streamed and the rest."""
    return ModelShape.of(model, [name for name, _ in streamed_layers(model, device_map)], **matrices)


def evaluated_models(trainer: Any) -> list[torch.nn.Module]:
    """
    Return the models with decoder layers that a trainer has beside the trained one and does not train: a reference,
    teachers, judges. Where code of a user computes the loss, they are frozen ones. A model that lies on several devices
    stays there.
    """
    own, found = {id(parameter) for parameter in trainer.model.parameters()}, {}
    methods = ("training_step", "create_optimizer")
    users = any(loss[0] not in LIBRARIES for loss in own_losses(trainer)) or overridden(trainer, *methods)
    for held in vars(trainer).values():
        for value in held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else [held]:
            if isinstance(value, torch.nn.Module) and own.isdisjoint(map(id, value.parameters())):
                found[id(value)] = value
    return [
        model
        for model in found.values()
        if len({*(getattr(model, "hf_device_map", None) or {}).values()} - {"cpu", "disk"}) < 2
        and not (users and any(p.requires_grad for p in model.parameters()))
        and decoder_layers(model)
        and not in_eight_bits(model)
    ]


def in_eight_bits(model: torch.nn.Module) -> bool:
    """Whether layers of bitsandbytes keep their weights on the device themselves."""
    return any(type(module).__name__ == "Linear8bitLt" for module in model.modules())


def bytes_evaluated(models: Sequence[torch.nn.Module]) -> Evaluated:
    """Return what models take that are evaluated and not trained, as [`LayerStreamer`] places them."""
    weights = {id(tensor): tensor for model in models for tensor in (*model.parameters(), *model.buffers())}
    layers = [[layer] for model in models for layer in decoder_layers(model)]
    ends = [modules for model in models for _, modules in embeddings_and_head(model)]
    of_layers, of_ends = (
        [sum(padded(w.nbytes) for w in {id(w): w for m in unit for w in m.parameters()}.values()) for unit in units]
        for units in (layers, ends)
    )
    slots = min(2, len(layers)) * max(of_layers, default=0) + max(of_ends, default=0)
    return Evaluated(sum(weight.nbytes for weight in weights.values()), sum(of_layers + of_ends), slots)


def check_streamable(args, model: torch.nn.Module, device_map: dict | None) -> None:
    """Refuse options that streaming cannot be combined with, before anything is built, with what to change."""
    why = None
    if args.device.type != "cpu" and not copies_beside(args.device):
        why = (
            f"`{args.device.type}` has no streams beside the one that computes and reads no page-locked memory, so the "
            "device would stand still while layers travel. Use a device of CUDA, ROCm or XPU, or `use_cpu=True`"
        )
    elif mixed_precision_of(args) == "fp16":
        why = "`fp16=True` scales losses, and streamed gradients leave before they are unscaled. Use `bf16=True`"
    elif sharding_of(args):
        why = f"`{sharding_of(args)}` places the weights itself. Drop it"
    elif any(getattr(parameter, "device_mesh", None) is not None for parameter in model.parameters()):
        why = "the model is spread over processes already. Load it without `tp_plan` and `distributed_config`"
    elif args.world_size > 1:
        why = (
            f"there are {args.world_size} processes, and streaming is for one: each would hold all on the host. "
            "Launch one process, or let FSDP2 spread the weights over them (`fsdp=True`, with `cpu_offload` in "
            "`fsdp_config` if they do not fit), which keeps one copy on the host"
        )
    elif args.torch_compile:
        why = "`torch_compile=True` would compile placeholders. Drop it"
    elif getattr(args, "activation_offloading", False):  # of TRL
        why = "`activation_offloading=True` moves what layers save, and these save little. Set `offload_activations`"
    elif args.bf16_full_eval or args.fp16_full_eval:
        why = "`bf16_full_eval` and `fp16_full_eval` cast the whole model. Drop them"
    if why is not None:
        raise ValueError(f"`memory={args.memory}` cannot be used here: {why}, or set `memory=off`.")
    optim = optimizer_name(args)
    if optim not in STATES_PER_WEIGHT:
        raise refuse(
            f"`optim={optim}` is not known to step each parameter by itself, which streamed layers need.",
            shape_of(model, device_map),
            f"Nearest plan that works: `optim=adamw_torch_fused`; also one of {', '.join(STATES_PER_WEIGHT)}.",
        )
    if in_eight_bits(model):
        raise refuse(
            "The base is quantised by bitsandbytes to int8, whose layers keep their weights on the device.",
            shape_of(model, device_map),
            "Nearest plan that works: load it unquantised and set `base_precision=int8`; or load it in 4 bits.",
        )
    trains_quantised = getattr(model, "is_quantized", False) and not has_adapters(model)
    trains_quantised &= not getattr(getattr(model, "hf_quantizer", None), "is_qat_trainable", False)
    if trains_quantised:
        raise refuse(
            "The model is quantised and has no adapters: its weights cannot be trained.",
            shape_of(model, device_map),
            "Nearest that works: add LoRA adapters with peft; or load it unquantised and set `optimizer_states=8bit`.",
        )
