"""
Traces: run one training step on tensors without data, and record what it holds.

1. **A few layers stand for all.** An [`Excerpt`] of the model keeps the first decoder layer, the last, and one of each
   kind between them. Layers are of one kind if their modules, the shapes of their weights and what the config lists for
   them are the same. The first and the last stand only for themselves: the first may have inputs without gradients, and
   no layer keeps the output of the last. A trace takes a quarter of a second for a model of any size; an image encoder
   is traced with all its layers ([`hf_hybrid.plan.images`]).
2. **One step runs under `FakeTensorMode`**: forward, backward, clipping, as `Trainer` runs them. Every operation makes
   the tensors that it would make, without their memory. A few things that a CPU does differently are traced as on a
   GPU: attention is fused (no matrix of scores), and autocast computes powers, norms and softmax in fp32.
3. **Every storage is followed** from its allocation to its end by [`StorageTracker`], a dispatch mode with a weak
   reference to each storage. A storage has a category (weights, gradients, activations, buffers) and an owner: the
   layer that computed when it was made, or the code outside the layers. After each operation that allocated something,
   a [`Moment`] records all of this. Optimizer states exist all the time; they are added afterwards.
4. **The missing layers are added** by [`unfold`]. Layers run one after the other. In forward, while layer `l` computes,
   earlier layers hold what they hold at the end of their forward, and later layers what they held at the start of the
   step. In backward, later layers are as they are after their backward, and earlier layers as they were before theirs.
   So at every moment of the trace, a missing layer holds what the traced layer of its kind holds before or after it
   computes. If a kind is at several places, the place with the largest bytes counts. The tests show that this gives the
   peak of all layers to the byte.

So the peak is that of a single operation, with everything that exists at that moment: logits in three copies, casts
that autocast keeps, masks, experts. No architecture has its own rules. A trace does not cover the inside of kernels.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_hybrid.compat import switch_checkpointing_on
from hf_hybrid.plan.images import TEXT, SomeImages, put_among_embeddings, run_knowing
from hf_hybrid.plan.setups import Setup
from hf_hybrid.plan.stand_ins import stand_in_for_low_bit
from hf_hybrid.streaming.layers import base_model, decoder_layers, find_layers
from hf_hybrid.streaming.loss import (
    DISTANCE_LOGITS,
    ChunkedCausalLoss,
    head_of,
    linear_cross_entropy,
    sum_in_chunks,
)
from hf_hybrid.streaming.low_bit import BLOCK, LEAST_QUANTIZED

logger = logging.getLogger(__name__)

TRACED = ("weights", "gradients", "activations", "buffers")
_INDEX = {name: index for index, name in enumerate(TRACED)}
_WIDTH, _ACTIVATIONS = len(TRACED), _INDEX["activations"]

Bytes = tuple[int, ...]  # by category, in the order of `TRACED`
Held = tuple[int, ...]  # bytes held at one moment: by owner, and of each owner by category, one after the other


# A few layers of a model.


Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Excerpt(Generic[Model]):
    """A model with some layers of another, on the meta device."""

    model: Model
    stands_for: tuple[int, ...]  # for each layer of the whole, the layer here; empty if no list of layers was found
    listed: frozenset[str] = frozenset()  # names of what the config lists layer by layer

    @classmethod
    def of(cls, full_model: Model) -> Excerpt[Model]:
        """Of a live model, whose weights may lie anywhere: no data is copied, and the model is not changed."""
        memo = _tensors_without_data(full_model, "meta")
        layers = decoder_layers(full_model)
        if not layers:
            return cls(_as_trained(copy.deepcopy(full_model, memo)), ())
        listed = _lists(_config(full_model), len(layers))
        chosen, stands_for = _choose([_signature(listed, layer, index) for index, layer in enumerate(layers)])
        names = frozenset(name for _, name, _ in listed)
        model = _copy_with_layers(full_model, memo, [(index, memo) for index in chosen], names)
        return cls(_as_trained(model), stands_for, names)

    def with_two_of_each(self) -> Excerpt[Model]:
        """
        Of the same model, for steps in which some layers are recomputed and others are not: each kind between the first
        and the last layer is here twice, first once each and then once more each.
        """
        layers, config = decoder_layers(self.model), _config(self.model)
        between, last = range(1, len(layers) - 1), len(layers) - 1
        memo = _tensors_without_data(self.model, "meta")
        configs = {id(part): copy.deepcopy(part, memo) for part in (config, config.get_text_config())}
        again = [(index, {**_tensors_without_data(layers[index], "meta"), **configs}) for index in between]
        twice = [(0, memo), *((index, memo) for index in between), *again, (last, memo)]
        return Excerpt(_copy_with_layers(self.model, memo, twice, self.listed), self.stands_for, self.listed)

    def standing_for(self, recomputed: int) -> tuple[int, ...]:
        """What [`with_two_of_each`] stands for, if the first `recomputed` layers of the whole are recomputed."""
        between = max(self.stands_for) - 1
        last, more = len(self.stands_for) - 1, [0] + [between] * (len(self.stands_for) - 1)
        return tuple(
            2 * between + 1 if place == last else stands + (more[place] if place >= recomputed else 0)
            for place, stands in enumerate(self.stands_for)
        )


def _copy_with_layers(model: Model, memo: dict, chosen: list[tuple[int, dict]], listed: Iterable[str]) -> Model:
    """
    Copy a model with other layers: `chosen` has their indices among its own, and a memo to copy each with. The copies
    know their new places, and the config of the copy, which lists `listed` layer by layer, has as many entries.
    """
    layers = find_layers(model)
    copies = memo[id(model.get_submodule(layers[0][0].rpartition(".")[0]))] = nn.ModuleList()
    copies.extend(copy.deepcopy(layers[index][1], memo_of_layer) for index, memo_of_layer in chosen)
    copied = copy.deepcopy(model, memo)
    config = _config(copied)
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name in set(listed) & set(vars(part)):
            setattr(part, name, [vars(part)[name][index] for index, _ in chosen])
    config.get_text_config().num_hidden_layers = len(chosen)
    for position, layer in enumerate(copies if len(chosen) > 1 else ()):
        for attributes in map(vars, layer.modules()):
            if isinstance(attributes.get("layer_idx"), int):
                attributes["layer_idx"] = position
    return copied


def _tensors_without_data(model: nn.Module, device: str) -> dict[int, Any]:
    """A memo for `copy.deepcopy`: for each tensor of the model one of its shape, which shared weights share as well."""
    memo: dict[int, Any] = {}
    libraries = ("torch", "transformers", "peft", "accelerate")
    for module in model.modules():
        # The hooks of users are left out: they would be called here, and what they hold would be copied.
        for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
            hooks = getattr(module, name)
            sources = {key: str(getattr(hook, "__module__", "")).partition(".")[0] for key, hook in hooks.items()}
            memo[id(hooks)] = type(hooks)((key, hook) for key, hook in hooks.items() if sources[key] in libraries)
        held = [value.values() if isinstance(value, dict) else [value] for value in vars(module).values()]
        for tensor in itertools.chain(*held):  # also what adapters keep in a dict beside parameters and buffers
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                like = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(like, tensor.requires_grad) if is_parameter else like
    return memo


def _as_trained(model: Model) -> Model:
    """Run the step as `Trainer` does on a GPU."""
    base = stand_in_for_low_bit(base_model(model))
    config = _config(base)
    config.use_cache = False
    attention = config._attn_implementation or ""
    if isinstance(base, PreTrainedModel) and (attention == "sdpa" or "flash" in attention):
        AttentionInterface.register("hf_hybrid_fused", _attention)
        AttentionMaskInterface.register("hf_hybrid_fused", _mask)
        base.set_attn_implementation("hf_hybrid_fused")
    return model.train()


def _config(model: nn.Module) -> PreTrainedConfig:
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"`{type(model).__name__}` has no config of transformers.")
    return config


def _choose(kinds: Sequence[object]) -> tuple[list[int], tuple[int, ...]]:
    """The layers that are kept, and for each layer the position among them of the one that stands for it."""
    last = len(kinds) - 1
    between = {kind: index for index, kind in reversed(list(enumerate(kinds))) if 0 < index < last}
    chosen = sorted({0, last, *between.values()})
    place = {index: position for position, index in enumerate(chosen)}
    return chosen, tuple(place[i] if i in place else place[between[kind]] for i, kind in enumerate(kinds))


def _signature(listed: list[tuple], layer: nn.Module, index: int) -> tuple:
    """Tells layers of different kinds apart: their modules and weights, and what the config lists for each."""
    modules = tuple(type(module).__name__ for module in layer.modules())
    weights = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in layer.parameters())
    return modules, weights, tuple(repr(values[index]) for _, _, values in listed)


def _lists(config: PreTrainedConfig, layers: int) -> list[tuple[object, str, Sequence]]:
    """What the config lists layer by layer."""
    parts = {id(part): part for part in (config, config.get_text_config())}.values()
    entries = [(part, name, values) for part in parts for name, values in vars(part).items()]
    return [entry for entry in entries if isinstance(entry[2], (list, tuple)) and len(entry[2]) == layers]


# A GPU's attention and autocast, on a CPU.


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, bias):
        batch, heads, length, _ = query.shape
        shape = (batch, heads, length, value.shape[-1])
        result = torch.empty_permuted(shape, (0, 2, 1, 3), dtype=query.dtype, device=query.device)
        logsumexp = torch.empty(shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, bias, result, logsumexp)
        return result

    @staticmethod
    def backward(ctx, *_):
        query, key, value, _, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _attention(module, query, key, value, attention_mask, **kwargs) -> tuple[Tensor, None]:
    """What `F.scaled_dot_product_attention` allocates where it is fused: a shape without numbers."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and attention_mask is not None:  # kernels with a mask take no groups: transformers repeats the heads
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    bias = attention_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype)  # kernels turn it into this, in each layer anew
    return _FusedAttention.apply(query, key, value, bias).transpose(1, 2).contiguous(), None


def _mask(*, kv_length: int, local_size: int | None = None, **kwargs) -> Tensor | None:
    """None where attention is causal and nothing else, as transformers finds by looking at the values of a batch."""
    if local_size is None or kv_length < local_size:
        return None
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(kv_length=kv_length, local_size=local_size, **kwargs)


class _AutocastOfCuda(TorchFunctionMode):
    """What autocast computes in fp32 on a GPU and in bf16 on a CPU: with fp32 inputs, or with fp32 results alone."""

    INPUTS = {*"layer_norm group_norm softplus cross_entropy nll_loss normalize".split()}
    INPUTS |= {*"pow __pow__ rsqrt exp log norm reciprocal".split()}
    RESULTS = {*"softmax log_softmax cumsum cumprod prod sum".split()}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", None) if torch.is_autocast_enabled("cpu") else None
        if name in self.INPUTS:
            args = tuple(value.float() if _is_low(value) else value for value in args)
            kwargs = {name: value.float() if _is_low(value) else value for name, value in kwargs.items()}
        elif name in self.RESULTS and args and _is_low(args[0]):
            kwargs = {"dtype": torch.float32, **kwargs}
        return func(*args, **kwargs)


def _is_low(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _autocast_rules(accelerator: str) -> contextlib.AbstractContextManager:
    return _AutocastOfCuda() if accelerator == "cuda" else contextlib.nullcontext()


def enable_checkpointing(model: nn.Module, accelerator: str, without: Iterable[nn.Module] = ()) -> None:
    """
    Activation checkpointing as `Trainer` switches it on, but for some layers; what is recomputed follows the
    accelerator's autocast.
    """
    options = {
        "use_reentrant": False,
        "preserve_rng_state": False,
        "context_fn": lambda: (contextlib.nullcontext(), _autocast_rules(accelerator)),
    }
    switch_checkpointing_on(model, options)
    for layer in without:
        vars(layer)["gradient_checkpointing"] = False


# Every byte, at every moment.


class Moment(NamedTuple):
    """The bytes held just after an operation that allocated something."""

    stage: str  # "forward", "backward" or "update"
    where: int  # the owner that computes
    held: Held


class StorageTracker(TorchDispatchMode):
    """
    Records what live storages hold while layers run. Copies of weights in another dtype count as weights. `run` runs an
    operation.
    """

    def __init__(self, layers: list[nn.Module], run: Callable | None = None):
        super().__init__()
        self._run = run or _run_operation
        self.stage, self.where, self.outside = "forward", len(layers), len(layers)
        self.moments: list[Moment] = []
        self.after_forward: Held | None = None  # of the layers, before head and loss
        self.before_backward: Held | None = None  # of the layers, after head and loss
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(functools.partial(self._entering, index), with_kwargs=True)
            layer.register_forward_hook(functools.partial(self._leaving, index))
        self._held = [0] * ((len(layers) + 1) * _WIDTH)
        self._places: dict[int, int] = {}  # of known storages in what is held
        self._watches: dict[int, weakref.ref] = {}
        self._weights: set[int] = set()

    def hold(self, tensor: Tensor, category: str, owner: int) -> None:
        """Count a tensor that exists already. A known storage keeps its owner."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._places:
            self._places[key] = owner * _WIDTH + _INDEX[category]
            self._held[self._places[key]] += size
            self._watches[key] = weakref.ref(storage, lambda _: self._freed(key, size))
        if category == "weights":
            self._weights.add(key)

    def move(self, tensor: Tensor, category: str, owner: int) -> None:
        """Give a storage another category and owner."""
        storage, place = tensor.untyped_storage(), owner * _WIDTH + _INDEX[category]
        self._held[self._places[storage._cdata]] -= storage.nbytes()
        self._held[place] += storage.nbytes()
        self._places[storage._cdata] = place

    def now(self) -> Held:
        """What is held at this moment."""
        return tuple(self._held)

    def record(self) -> None:
        """Write down this moment."""
        self.moments.append(Moment(self.stage, self.where, self.now()))

    def _freed(self, key: int, size: int) -> None:
        self._held[self._places.pop(key)] -= size
        del self._watches[key]
        self._weights.discard(key)

    def _entering(self, index: int, _, args, kwargs) -> None:
        if self.stage == "forward":  # else it is recomputed in backward
            if index == 0:
                self._at_gradient(args[0] if args else kwargs.get("hidden_states"), self.outside)
            self.where = index

    def _leaving(self, index: int, _, args, output) -> None:
        if self.stage == "forward":
            self.after_forward, self.where = self.now(), self.outside
            self._at_gradient(output[0] if isinstance(output, tuple) else output, index)

    def _at_gradient(self, tensor: Tensor | None, where: int) -> None:
        def hook(_):
            self.before_backward, self.where = self.before_backward or self.now(), where

        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(hook)

    def __torch_dispatch__(self, func, types, args: tuple = (), kwargs=None):
        result = self._run(func, args, kwargs or {})
        if func in (torch.ops.prim.device.default, torch.ops.aten.detach.default):
            return result
        tensors = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        allocated = [tensor for tensor in tensors if tensor.untyped_storage()._cdata not in self._places]
        casts = func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self._weights
        for tensor in allocated:
            self.hold(tensor, "activations", self.where)
            if casts:
                self.move(tensor, "weights", self.where)
        if allocated:
            self.record()
        return result


def _run_operation(func: Callable, args: tuple, kwargs: dict):
    if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
        return func(*args, **kwargs)
    # Its shape function knows bf16 alone, though other types are computed as well.
    first = args[0]
    like = func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **kwargs)
    return torch.empty_strided(like.shape, like.stride(), dtype=first.dtype, device=first.device)


# One step.


class StepTrace(NamedTuple):
    """The bytes that a step held, by owner (its layers in order, then the rest) and category."""

    layers: int
    moments: list[Moment]
    begin: Held
    after_forward: Held  # as the tracker has them; as after_backward where there are no layers
    before_backward: Held
    after_backward: Held


def trace_step(
    model: nn.Module, layers: list[nn.Module], setup: Setup, *, images: SomeImages | None = None, **more_inputs: Any
) -> StepTrace:
    """Trace forward, backward and clipping as `Trainer` runs them, on a copy of the model: hooks stay on it."""
    names, shape = (*TEXT, *(images.of_tokens if images else ())), (setup.batch_size, setup.sequence_length)
    inputs = {name: torch.empty(shape, dtype=torch.int64) for name in names}
    given = images.of(setup.batch_size) if images else {}
    if given:
        put_among_embeddings(base_model(model), given)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if setup.gradient_accumulation_steps > 1:  # gradients of earlier micro-batches are there
        for parameter in trainable:
            parameter.grad = torch.empty_like(parameter)
    owners = {id(t): index for index, layer in enumerate(layers) for t in [*layer.parameters(), *layer.buffers()]}
    tracker = StorageTracker(layers, functools.partial(run_knowing, _run_operation) if given else None)

    def owner(tensor: Tensor) -> int:
        return owners.get(id(tensor), tracker.outside)

    def gradient_is_there(parameter: Tensor) -> None:
        if parameter.grad is not None:
            tracker.move(parameter.grad, "gradients", owner(parameter))

    for tensor in (*inputs.values(), *given.values()):
        tracker.hold(tensor, "activations", tracker.outside)
    for parameter in model.parameters():
        tracker.hold(parameter, "weights", owner(parameter))
        if parameter.grad is not None:
            tracker.hold(parameter.grad, "gradients", owner(parameter))
    for buffer in model.buffers():
        tracker.hold(buffer, "buffers", owner(buffer))
    begin = tracker.now()
    for parameter in trainable:
        parameter.register_post_accumulate_grad_hook(gradient_is_there)
    with tracker:
        tracker.record()
        with _autocast_rules(setup.accelerator):
            loss = _loss(model, inputs, setup, **more_inputs)
        tracker.stage = "backward"
        loss.backward()
        after_backward = tracker.now()
        tracker.stage, tracker.where = "update", tracker.outside
        torch.nn.utils.clip_grad_norm_([p for p in trainable if p.grad is not None], 1.0)
        tracker.record()  # the fused AdamW updates in place; scratch of other updates is added by `unfold`
    between = (tracker.after_forward or after_backward, tracker.before_backward or after_backward)
    return StepTrace(len(layers), tracker.moments, begin, *between, after_backward)


def state_bytes(parameter: Tensor, setup: Setup) -> int:
    """Bytes of the optimizer's states of a parameter on its device."""
    count = parameter.numel()
    if setup.optimizer_states == "exact":
        return setup.states_per_weight * count * parameter.element_size() + 4  # and the step
    return sum(eight_bit_sizes(count))


def eight_bit_sizes(count: int) -> tuple[int, ...]:
    """Bytes of each tensor that `AdamW8bit` keeps of a parameter: codes and their maxima, or small ones in fp32."""
    return 2 * ((count, 4 * math.ceil(count / BLOCK)) if count >= LEAST_QUANTIZED else (4 * count,))


def _loss(model: nn.Module, inputs: dict[str, Tensor], setup: Setup, **more_inputs: Any) -> Tensor:
    """As `Trainer.compute_loss`, with accelerate's autocast around the model; the output ends with this function."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=setup.autocast):
        # Without the mask of ones, whose values nobody can look at here: attention is causal.
        given = {name: value for name, value in inputs.items() if name != "attention_mask"}
        if setup.chunked_loss:
            return _chunked_loss(model, given, setup)
        if setup.distills:
            given.pop("labels")
        outputs = model(**given, **more_inputs)
    if setup.autocast:
        outputs = convert_outputs_to_fp32(lambda: outputs)()
    return _distance(outputs["logits"]) if setup.distills else outputs["loss"]


def _distance(logits: Tensor) -> Tensor:
    """What TRL's distance between these logits and those of a teacher allocates."""
    both = logits[..., :-1, :], torch.empty_like(logits)[..., :-1, :]
    scaled = [logits / 1.0 for logits in both]
    student, teacher = (logits.log_softmax(-1) for logits in scaled)
    mixture = torch.logsumexp(torch.stack([student + 1.0, teacher + 1.0]), dim=0)
    parts = [F.kl_div(mixture, of, reduction="none", log_target=True) for of in (teacher, student)]
    return (0.5 * parts[0] + 0.5 * parts[1]).clone().sum()


_TRACED_ROWS = 1024  # of the chunked loss: two chunks


def _chunked_loss(model: nn.Module, inputs: dict[str, Tensor], setup: Setup) -> Tensor:
    head, seen = head_of(base_model(model)), []
    if not isinstance(head, nn.Linear):
        raise TypeError(f"The head is a `{type(head).__name__}`, whose loss is not computed in chunks.")

    def forward(input: Tensor) -> Tensor:
        seen.append(input)
        return input[..., :1]

    head.forward = forward
    targets = inputs.pop("labels")
    model(**inputs)
    targets = F.pad(targets, (0, 1), value=-100)[..., 1:].flatten()
    hidden, chunk = seen.pop().flatten(0, 1), max(DISTANCE_LOGITS // len(head.weight), 1)
    rows = 2 * chunk if setup.distills else _TRACED_ROWS
    if len(hidden) > rows:
        if torch.is_autocast_enabled("cpu") and not setup.distills:
            hidden = hidden.to(torch.get_autocast_dtype("cpu"))
        hidden, targets = _FirstRows.apply(hidden, rows), targets[:rows]
    if not setup.distills:
        return linear_cross_entropy(hidden, head.weight, targets, bias=head.bias)

    def distance(part: Tensor, _: slice) -> Tensor:
        logits = F.linear(part, head.weight, head.bias)
        with torch.autocast("cpu", enabled=False):
            return _distance(logits.float() if setup.autocast else logits)

    return sum_in_chunks(distance, hidden, [w for w in head.parameters() if w.requires_grad], chunk)


class _FirstRows(torch.autograd.Function):
    """Chunks are alike: a few are computed, and the gradient of all rows is held, as it would be."""

    @staticmethod
    def forward(ctx, hidden, rows):
        ctx.gradient = torch.zeros_like(hidden)
        return hidden[:rows]

    @staticmethod
    def backward(ctx, *_):
        gradient, ctx.gradient = ctx.gradient, None
        return gradient, None


# From a few layers to all of them.


class Peak(NamedTuple):
    """The largest moment of a step: bytes by category, and when it is."""

    held: Bytes
    stage: str

    def get(self, category: str) -> int:
        """Bytes of one category at this moment."""
        return self.held[_INDEX[category]]


def unfold(trace: StepTrace, stands_for: Sequence[int], at_update: int = 0) -> Peak:
    """The peak of the whole model from the trace of its excerpt; `at_update`: bytes of scratch of the update."""
    best = Peak((0,) * _WIDTH, "forward")
    more = [sum(1 for stands in stands_for if stands == layer) - 1 for layer in range(trace.layers)]
    computing: dict[tuple[str, int], Bytes] = {}
    for moment in trace.moments:
        key = (moment.stage, moment.where)
        if moment.where == trace.layers:  # head, loss, embeddings or update compute: all layers are at the same point
            missing = _sum(tuple(n * value for value in _of(moment.held, layer)) for layer, n in enumerate(more) if n)
        else:
            if moment.where not in stands_for:
                continue  # no layer of the whole is recomputed, or not, as this one is
            if key not in computing:
                places = [place for place, stands in enumerate(stands_for) if stands == moment.where]
                computing[key] = max((_missing(trace, stands_for, *key, place) for place in places), key=sum)
            missing = computing[key]
        held = [sum(moment.held[category::_WIDTH]) + missing[category] for category in range(_WIDTH)]
        held[_INDEX["buffers"]] += at_update * (moment.stage == "update")
        if sum(held) > sum(best.held):
            best = Peak(tuple(held), moment.stage)
    return best


def _missing(trace: StepTrace, stands_for: Sequence[int], stage: str, layer: int, place: int) -> Bytes:
    """What layers that are not in the trace hold while `layer` computes at a place of the whole."""
    before, after = trace.after_forward, trace.begin
    if stage != "forward":
        before, after = trace.before_backward, trace.after_backward
    untraced = _sum(
        _of(before if index < place else after, stands) for index, stands in enumerate(stands_for) if index != place
    )
    traced = _sum(_of(before if index < layer else after, index) for index in range(trace.layers) if index != layer)
    return tuple(a - b for a, b in zip(untraced, traced))


def _of(held: Held, owner: int) -> Bytes:
    return held[owner * _WIDTH : (owner + 1) * _WIDTH]


def _sum(parts: Iterable[Bytes]) -> Bytes:
    return tuple(sum(column) for column in zip((0,) * _WIDTH, *parts))


class Activations(NamedTuple):
    """Bytes of activations of one micro-batch through checkpointed layers: what streaming needs to know of a step."""

    always: int  # through forward and backward, outside the layers: inputs, the embeddings' output, masks
    behind: int  # beside these from the loss on: gradients of what is computed in chunks
    boundary: int  # of one layer on average, from its forward to its backward; the last keeps nothing
    output: int  # of one layer: what waits on the host as a whole
    layer: int  # while one layer is recomputed and computes its gradients
    loss: int  # while head and loss compute


def activations(trace: StepTrace, stands_for: Sequence[int]) -> Activations:
    """Of the whole model, from a step that was traced with activation checkpointing."""
    kept = [_of(trace.before_backward, owner)[_ACTIVATIONS] for owner in range(trace.layers + 1)]
    forward_end = sum(trace.after_forward[_ACTIVATIONS::_WIDTH])
    layer = loss = 0
    for moment in trace.moments:
        held = sum(moment.held[_ACTIVATIONS::_WIDTH])
        if moment.where < trace.layers and moment.stage == "backward":
            layer = max(layer, held - kept[-1] - sum(kept[: moment.where + 1]))
        elif moment.where == trace.layers and moment.stage != "update":
            loss = max(loss, held - forward_end)
    boundary = math.ceil(sum(kept[layer] for layer in stands_for) / len(stands_for))
    always = min(_of(trace.after_forward, trace.layers)[_ACTIVATIONS], kept[-1])
    return Activations(always, kept[-1] - always, boundary, max(kept[:-1], default=0), layer, loss)


def graph(trace: StepTrace, stands_for: Sequence[int]) -> int:
    """Bytes that the graph of the largest layer keeps, from a step that was traced without activation checkpointing."""
    return max((_of(trace.before_backward, layer)[_ACTIVATIONS] for layer in stands_for), default=0)


class Tracer:
    """Traces steps of the model that an excerpt is of; setups that differ only in where things lie share a trace."""

    def __init__(self, excerpt: Excerpt, *, images: SomeImages | None = None, **more_inputs: Any):
        self.excerpt, self.images, self.more_inputs = excerpt, images, more_inputs
        self.traces: dict[tuple, StepTrace] = {}
        self._answers: dict[tuple, Peak | Activations] = {}

    @classmethod
    def of(cls, full_model: nn.Module, **more_inputs: Any) -> Tracer | None:
        """Of a live model, which gets `more_inputs` beside a batch; `None` if it cannot be copied without data."""
        try:
            return cls(Excerpt.of(full_model), **more_inputs)
        except Exception as error:  # whatever a model of the user's own does
            logger.info("This model cannot be copied without data (%r), so no step is traced.", error)
            return None

    @functools.cached_property
    def reason_not_chunked(self) -> str | None:
        """Why the loss cannot be computed in chunks, if so."""
        return ChunkedCausalLoss.reason_not_chunked(self.excerpt.model)

    def peak(self, setup: Setup, at_update: int) -> Peak:
        """Of the resident model, without optimizer states."""
        return self._read(setup, setup.recomputed(len(self.excerpt.stands_for) or 1), unfold, at_update)

    def activations(self, setup: Setup) -> Activations:
        """Of streamed layers."""
        return self._read(setup, len(self.excerpt.stands_for), activations)

    def graph(self, setup: Setup) -> int:
        """Bytes of activations that a streamed layer keeps which is not recomputed."""
        return self._read(setup, 0, graph)

    def waiting(self, setup: Setup, computed: int) -> int:
        """Bytes of the images of micro-batches that are on the device already, when so many of them are computed."""
        rows = (setup.gradient_accumulation_steps - computed) * setup.batch_size
        return 0 if self.images is None else rows * self.images.bytes_of_a_row

    def states(self, setup: Setup) -> int:
        """Bytes of the optimizer's states of all trainable parameters."""
        times = dict.fromkeys(self.excerpt.model.parameters(), 1)
        for traced, layer in enumerate(decoder_layers(self.excerpt.model)):
            times.update(dict.fromkeys(layer.parameters(), self.excerpt.stands_for.count(traced)))
        return sum(count * state_bytes(p, setup) for p, count in times.items() if p.requires_grad)

    def may_recompute_some(self) -> bool:
        """
        Whether transformers can checkpoint some of the layers and not others. From now on a trace has checkpointing
        where its setup says so alone: the model may have it from an earlier training.
        """
        for module in self.excerpt.model.modules():
            if "gradient_checkpointing" in vars(module):
                vars(module)["gradient_checkpointing"] = False
        layers = decoder_layers(self.excerpt.model)
        return bool(layers) and all(isinstance(layer, GradientCheckpointingLayer) for layer in layers)

    @functools.cached_property
    def _mixed(self) -> Excerpt:
        return self.excerpt.with_two_of_each()

    def _read(self, setup: Setup, recomputed: int, reading: Callable, *more):
        """Read a trace of a step in which the first `recomputed` layers are recomputed."""
        excerpt, stands_for = self.excerpt, self.excerpt.stands_for
        some = 0 < recomputed < len(stands_for)
        if some:
            excerpt, stands_for = self._mixed, self.excerpt.standing_for(recomputed)
        batch = (setup.sequence_length, setup.batch_size, setup.gradient_accumulation_steps > 1)
        kind = "some" if some else recomputed > 0
        by_plan = self.images is not None and setup.activation_checkpointing is not True
        if by_plan and reading is activations:
            kind = "streamed"  # and what does not travel is not recomputed
        key = (kind, *batch, setup.autocast, setup.chunked_loss, setup.accelerator, setup.distills)
        if key not in self.traces:
            with warnings.catch_warnings(), FakeTensorMode():
                warnings.simplefilter("ignore")
                model = copy.deepcopy(excerpt.model, _tensors_without_data(excerpt.model, "cpu"))
                layers, more_inputs = decoder_layers(model), self.more_inputs
                if setup.chunked_loss:  # then no other way to compute the head is traced, which `forward` may wrap
                    vars(base_model(model)).pop("forward", None)
                    more_inputs = {}
                if recomputed:
                    without = layers[len(layers) // 2 :] if some else ()
                    if kind == "streamed":
                        without = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
                        without = set(without).difference(layers)
                    enable_checkpointing(model, setup.accelerator, without)
                    if by_plan:  # a frozen encoder keeps nothing
                        base: Any = base_model(model)
                        base.disable_input_require_grads()
                if self.images is not None:
                    more_inputs = {**more_inputs, "images": self.images}
                self.traces[key] = trace_step(model, layers, setup, **more_inputs)
        answer = (*key, recomputed * some, reading, *more)
        if answer not in self._answers:
            self._answers[answer] = reading(self.traces[key], stands_for, *more)
        return self._answers[answer]
