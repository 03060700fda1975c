"""
Muon for the hidden matrices of a model and AdamW for the rest, as one optimizer.

Muon (Jordan et al., 2024) replaces the averaged gradient `U S V^T` of a matrix by `U V^T`, the nearest orthogonal
matrix. Newton-Schulz computes it without an SVD: with the matrix scaled so that no singular value exceeds 1, repeat
`X <- a X + b (X X^T) X + c (X X^T)^2 X`. The polynomial acts on each singular value alone, `s <- a s + b s^3 + c s^5`.
Muon's coefficients are not those that converge to 1: they are steep at 0, so that five rounds lift even small singular
values to somewhere between 0.7 and 1.2, which is as good for training and much faster.

A mixture of experts keeps the weights of all experts of a layer in one 3-D parameter, a stack of matrices. Each expert
is a layer of its own, so each matrix of the stack is orthogonalised by itself, many of them in one batched product.
`torch.optim.Muon` takes matrices alone and steps those; the stacks are stepped here, by the same rule.

Where processes share the weights (FSDP2), AdamW steps the rows that each holds. Muon needs whole matrices. Torch's
Muon works on rows too, through a collective for each of its matrix products. [`MuonAdamW.share`] makes it cheaper: each
process gets some matrices whole, orthogonalises them and sends the rows back. A stack is cut between experts, so that
each process orthogonalises those that it holds and sends nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from transformers import TrainingArguments

    InRounds = Callable[[Iterable[tuple], Callable[[DTensor, Tensor], Tensor]], Iterable[tuple[DTensor, Tensor]]]

FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
"""Devices on which torch has a fused AdamW."""

RATE_SCALE = 4.0
"""
Best learning rate of Muon with AdamW over that of AdamW alone, measured on three tasks with one model and checked on
others (benchmarks/speedup/rates.md, "`fast` at AdamW's learning rate").

It holds for the hidden matrices and for the rest: with the scale on the hidden matrices alone, runs ended higher.
Shapes need no more scales, as Muon's step has the root mean square of AdamW's whatever the shape. Adapters are the
exception. There Muon and AdamW have the same best rate.
"""

_LINEAR = (nn.Linear, Conv1D)
_EMBEDDING = (nn.Embedding, nn.EmbeddingBag)


def optimizer_name(args: TrainingArguments | type[TrainingArguments]) -> str:
    """Return the option `optim` of `TrainingArguments` as text. transformers turns it into an enumeration member."""
    return str(args.optim.value if isinstance(args.optim, Enum) else args.optim)


def optimizer_layers(optimizer: Any) -> list[Any]:
    """Return an optimizer and all that it wraps, outermost first. Streaming calls it `base`."""
    layers = [optimizer]
    while (inner := getattr(layers[-1], "optimizer", getattr(layers[-1], "base", None))) is not None:
        layers.append(inner)
    return layers


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside all wrappers."""
    return optimizer_layers(optimizer)[-1]


def skips_on_device(optimizer: Any) -> bool:
    """
    Whether a tensor `found_inf` that is 1 makes an optimizer leave out a step: weights, states and the number of steps
    stay. torch's gradient scaler knows it of all fused optimizers. That of SGD begins its momentum with such a step.
    """
    if not isinstance(optimizer, AcceleratedOptimizer):
        return False  # a wrapper of the user's may do anything
    inner: Any = optimizer.optimizer
    return (
        type(inner) in (torch.optim.Adam, torch.optim.AdamW)
        and all(group["fused"] for group in inner.param_groups)
        and not (inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks)
    )


def users_optimizer(optimizer: Any) -> Any:
    """Return the optimizer as `optim` or the user made it. A wrapper of the user's may do anything, so it stays."""
    layers = optimizer_layers(optimizer)
    return next(layer for layer in layers if not isinstance(layer, AcceleratedOptimizer) and not hasattr(layer, "base"))


def steps_in_backward(optim: str) -> bool:
    """Whether the optimizer `optim` updates weights inside the backward pass and frees their gradients there."""
    return "layerwise" in optim or "lomo" in optim


_ADAM = {
    "torch": {"Adam", "AdamW"},
    "hf_hybrid": {"AdamW8bit"},
    "bitsandbytes": {
        paged + name + bits for paged in ("", "Paged") for name in ("Adam", "AdamW") for bits in ("", "8bit", "32bit")
    },
    "torchao": {"AdamW4bit", "AdamW8bit", "AdamWFp8", "Adam4bit", "Adam8bit", "AdamFp8"},
    "apex": {"FusedAdam"},
    "torch_xla": {"Adam", "AdamW"},
    "torch_npu": {"NpuFusedAdam", "NpuFusedAdamW"},
}  # fmt: skip
"""Classes whose step is Adam's or AdamW's, in full or lower precision, by the package that defines them."""
_ADAM_OPTIONS = {
    "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_apex_fused",
    "adamw_torch_4bit", "adamw_torch_8bit", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit",
}  # fmt: skip
"""Values of `optim` that make one of them."""


def is_adam(optimizer: torch.optim.Optimizer | type | str) -> bool:
    """
    Whether an optimizer steps as Adam or AdamW does: an object, its class, or a value of `optim`. The class itself
    decides. A subclass may step otherwise, and nothing is known of other classes.
    """
    if isinstance(optimizer, str):
        return optimizer in _ADAM_OPTIONS
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    return kind.__name__ in _ADAM.get(kind.__module__.partition(".")[0], ())


# Newton-Schulz.

MUON_COEFFICIENTS, MUON_STEPS, MUON_EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
"""Muon's Newton-Schulz iteration (Jordan et al., 2024), where a parameter group does not say otherwise."""
SMALL_MATRIX = 2**18
"""Elements of a matrix that a GPU orthogonalises in fp32 as fast as in bf16, since launches take most of the time."""
AT_ONCE = 2**24
"""Elements of a stack that are orthogonalised in one batched product, if one of its matrices does not have more."""


def orthogonalise(
    matrix: Tensor,
    *,
    steps: int = MUON_STEPS,
    coefficients: tuple[float, float, float] = MUON_COEFFICIENTS,
    eps: float = MUON_EPS,
) -> Tensor:
    """
    Muon's quintic Newton-Schulz iteration on `[rows, columns]`, or on each matrix of `[experts, rows, columns]`: moves
    all singular values near 1.

    It computes in bf16, as `torch.optim.Muon` does; in fp32 on a CPU, where bf16 is several times slower, and for
    matrices that are too small to keep a GPU busy.
    """
    a, b, c = coefficients
    in_fp32 = matrix.device.type == "cpu" or math.prod(matrix.shape[-2:]) <= SMALL_MATRIX
    x = matrix.float() if in_fp32 else matrix.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    # Frobenius, so that no singular value exceeds 1.
    x = x / (x.norm() if x.ndim == 2 else x.norm(dim=(-2, -1), keepdim=True)).clamp(min=eps)
    multiply = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def orthogonalisation_flops(shape: torch.Size, steps: int = MUON_STEPS) -> float:
    """Floating-point operations of [`orthogonalise`] on a matrix, or a stack of them, of this shape."""
    short, long = sorted(shape[-2:])
    return math.prod(shape[:-2]) * steps * (4.0 * short**2 * long + 2.0 * short**3)


def elements_at_once(shape: torch.Size) -> int:
    """Return how many elements of a matrix or stack are orthogonalised at a time."""
    return math.prod(shape[-2:]) * _matrices_at_once(shape)


def at_once(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return views of as many matrices of some stacks as are orthogonalised at a time; a matrix as it is."""
    if tensors[0].ndim == 2:
        return iter([tensors])
    return zip(*(tensor.split(_matrices_at_once(tensor.shape)) for tensor in tensors), strict=True)


def _matrices_at_once(shape: torch.Size) -> int:
    return 1 if len(shape) == 2 else max(1, min(shape[0], AT_ONCE // max(1, math.prod(shape[-2:]))))


def muon_scale(shape: torch.Size, adjust_lr_fn: str | None) -> float:
    """
    Return what `torch.optim.Muon` multiplies an orthogonalised matrix with: `"original"` and `None`
    `sqrt(max(1, rows / columns))`, `"match_rms_adamw"` `0.2 sqrt(max(rows, columns))`, which gives its entries the root
    mean square of an Adam step (Liu et al., 2025, arXiv 2502.16982).
    """
    rows, columns = shape[-2:]
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


# The optimizer.


class MuonAdamW(torch.optim.Optimizer):
    """
    `torch.optim.Muon` and `torch.optim.AdamW` over the same groups and the same state.

    `group["algorithm"]` is `"muon"` or `"adamw"` (default) and selects the optimizer of a group. Muon's steps are
    scaled to the root mean square of AdamW's (`match_rms_adamw`; Liu et al., 2025, arXiv 2502.16982), so that both
    take the same learning rate. Groups and state are read anew at each step, so schedulers, clipping and checkpoints
    treat this as any other optimizer. AdamW holds two values per weight, Muon one.

    `group["rate_scale"]` (1 by default) multiplies the learning rate of a group inside [`step`], so that `group["lr"]`
    remains what the user and the scheduler know.

    Args:
        params (`Iterable`): Parameters or groups of them, AdamW's first. A group of Muon's holds matrices or, 3-D,
            stacks of them.
        lr (`float`), weight_decay (`float`): Learning rate and decoupled decay of groups without their own.
        betas (`tuple[float, float]`), eps (`float`): Of AdamW.
        momentum (`float`): Decay rate of Muon's average of the gradients, which steps look ahead along (Nesterov).
    """

    _in_rounds: InRounds | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
    ):
        adamw = torch.optim.AdamW([{"params": []}], lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)
        how: dict[str, Any] = {"momentum": momentum, "nesterov": True, "adjust_lr_fn": "match_rms_adamw"}
        muon = torch.optim.Muon([{"params": []}], lr=lr, weight_decay=weight_decay, **how)
        self._inner: dict[str, torch.optim.Optimizer] = {"adamw": adamw, "muon": muon}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def share(self, in_rounds: InRounds) -> None:
        """Orthogonalise matrices with other processes, which hold other rows of them ([`Shards.in_rounds`])."""
        self._in_rounds = in_rounds

    def add_param_group(self, param_group: dict) -> None:
        """Add a group, as in any optimizer; `param_group["algorithm"]` is `"adamw"` (default) or `"muon"`."""
        algorithm = param_group.setdefault("algorithm", "adamw")
        param_group.setdefault("rate_scale", 1.0)
        if algorithm not in self._inner:
            raise ValueError(f"`algorithm` must be one of {', '.join(self._inner)}, got `{algorithm}`.")
        passed = param_group["params"]
        parameters = [passed] if isinstance(passed, Tensor) else list(passed)
        stacks = algorithm == "muon" and bool(parameters) and all(p.ndim == 3 for p in parameters)
        self._link()
        # It fills in what the algorithm needs. torch's Muon does not take stacks, and gets a group without them.
        filled = {**param_group, "params": [] if stacks else parameters}
        self._inner[algorithm].add_param_group(filled)
        param_group.update({**filled, "params": parameters})
        odd = [tuple(parameter.shape) for parameter in parameters if parameter.ndim != 2]
        if algorithm == "muon" and odd and not stacks:
            raise ValueError(
                f"`params` of a group with `algorithm=muon` holds a parameter of shape {odd[0]}, and Muon "
                "orthogonalises matrices, or stacks of them in a group of their own. Move it to a group with "
                "`algorithm=adamw`."
            )
        if algorithm == "adamw" and param_group["fused"] is None and param_group["foreach"] is None:
            param_group["fused"] = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in parameters)
        super().add_param_group(param_group)

    def _link(self) -> Iterable[torch.optim.Optimizer]:
        """Return both optimizers over the current groups and state, which other code may have replaced."""
        for algorithm, inner in self._inner.items():
            inner.param_groups = [
                group for group in self.param_groups if group["algorithm"] == algorithm and not _holds_stacks(group)
            ]
            inner.state = self.state
        return self._inner.values()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step both optimizers, and return the result of `closure`, which computes the loss anew."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for inner in self._link():
            rates = [group["lr"] for group in inner.param_groups]
            for group, rate in zip(inner.param_groups, rates):
                group["lr"] = rate * group["rate_scale"]
            try:
                if self._in_rounds is not None and isinstance(inner, torch.optim.Muon):
                    self._step_in_rounds(inner, self._in_rounds)
                else:
                    inner.step()
            finally:
                for group, rate in zip(inner.param_groups, rates):
                    group["lr"] = rate
        for group in self.param_groups:
            if _holds_stacks(group):
                _step_stacks(group, self.state)
        return loss

    def _step_in_rounds(self, muon: torch.optim.Muon, in_rounds: InRounds) -> None:
        """As `muon.step()`, where each process holds some rows of every matrix."""
        group_of, tasks = {}, []
        for group in muon.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = _averaged(parameter.grad, _average_of(parameter, muon.state[parameter]), group)
                group_of[parameter] = group
                tasks.append((parameter, parameter.shape, update.to_local()))
        for parameter, step in in_rounds(tasks, lambda key, update: _muon_step(update, group_of[key])):
            rate, decay = group_of[parameter]["lr"], group_of[parameter]["weight_decay"]
            parameter.to_local().mul_(1 - rate * decay).add_(step, alpha=rate)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_inner": self._inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for inner in self._link():
            inner.__setstate__({})  # completes groups and states that another version of torch saved


def _holds_stacks(group: dict[str, Any]) -> bool:
    """Whether a group has what torch's Muon does not take."""
    return group["algorithm"] == "muon" and any(parameter.ndim == 3 for parameter in group["params"])


def _averaged(gradient: Tensor, average: Tensor, group: dict[str, Any]) -> Any:
    """Move Muon's average of the gradients on, and return what is orthogonalised: a `DTensor` if they are."""
    average.lerp_(gradient, 1 - group["momentum"])
    return gradient.lerp(average, group["momentum"]) if group["nesterov"] else average


def _average_of(parameter: Tensor, state: dict[str, Any]) -> Tensor:
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(parameter)
    return state["momentum_buffer"]


def _step_stacks(group: dict[str, Any], states: dict[Tensor, dict[str, Any]]) -> None:
    """Make Muon's step on stacks of matrices, or on those matrices of each that this process holds."""
    rate, decay = group["lr"] * group["rate_scale"], group["weight_decay"]
    how = {"steps": group["ns_steps"], "coefficients": group["ns_coefficients"], "eps": group["eps"]}
    for parameter in group["params"]:
        if parameter.grad is None:
            continue
        tensors: tuple[Any, ...] = (parameter, parameter.grad, _average_of(parameter, states[parameter]))
        held = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
        scale = rate * muon_scale(parameter.shape, group["adjust_lr_fn"])
        for weights, gradient, average in at_once(*held):
            step = orthogonalise(_averaged(gradient, average, group), **how)
            weights.mul_(1 - rate * decay).add_(step.to(weights.dtype), alpha=-scale)


def _muon_step(update: Tensor, group: dict[str, Any]) -> Tensor:
    """Return what `torch.optim.Muon` adds to a matrix for this average of gradients, at a learning rate of 1."""
    matrix = nn.Parameter(torch.zeros_like(update))
    matrix.grad = update
    same = {name: group[name] for name in ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([matrix], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **same).step()
    return matrix.detach()


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT's adapters were added to a model, which is not wrapped for several processes."""
    return hasattr(model, "peft_config")


def wraps_parameter(module: nn.Module) -> bool:
    """Whether a module is PEFT's adapter of a parameter (`target_parameters`), such as the weights of fused experts."""
    return type(module).__name__ == "ParamWrapper"


def split_parameters(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """
    Split the trainable parameters into those of Muon and those of AdamW, by name and in the model's order.

    Muon gets the hidden matrices: trainable 2-D `weight`s of linear layers (`nn.Linear`, transformers' `Conv1D`, the
    linear layers of LoRA), and stacks of them: 3-D weights of a module with as many `num_experts`. Not those of
    embeddings and output head, whatever shares their weight or is part of them (adapters too), nor any 2-D one with a
    side as long as the vocabulary, unless the model is as wide; and not those with a side of 1, which are vectors.
    Everything else is AdamW's: biases, norms, convolutions, parameters that a module holds itself (Mamba's `A_log`,
    routers of newer mixtures of experts), adapters of fused experts (PEFT writes the thin matrices of all experts as
    one matrix, which is none of a layer).
    """
    hidden, other = set(), {id(parameter) for end in _ends(model) for parameter in end.parameters()}
    for module in model.modules():
        if wraps_parameter(module) and module.num_experts != 1:
            other |= {id(p) for name, p in module.named_parameters() if name.startswith("lora_")}
        for name, parameter in module.named_parameters(recurse=False):
            linear = isinstance(module, _LINEAR) and name == "weight" and parameter.ndim == 2
            experts = parameter.ndim == 3 and getattr(module, "num_experts", None) == len(parameter)
            (hidden if linear or experts else other).add(id(parameter))
    vectors, vocabulary = {1}, {1, *_vocabulary_sizes(model)}
    matrices, rest = {}, {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            sides = vectors if parameter.ndim == 3 else vocabulary
            is_matrix = id(parameter) in hidden - other and sides.isdisjoint(parameter.shape[-2:])
            (matrices if is_matrix else rest)[name] = parameter
    return matrices, rest


def _ends(model: nn.Module) -> Iterator[nn.Module]:
    """Return input and output embeddings, of every part of the model that has its own."""
    for module in model.modules():
        if isinstance(module, _EMBEDDING):
            yield module
        for question in ("get_input_embeddings", "get_output_embeddings"):
            if isinstance(end := ask(module, question), nn.Module):
                yield end


def ask(model: nn.Module, question: str) -> nn.Module | None:
    """Return the result of `get_input_embeddings`, `get_output_embeddings` or `get_decoder`, if the model has it."""
    try:
        return getattr(model, question)()
    except (AttributeError, NotImplementedError):
        return None


def text_config(model: Any) -> Any:
    """Return the config of a model, of one with several the config of its language model; `None` if it has none."""
    config = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _vocabulary_sizes(model: nn.Module) -> set[int]:
    config = text_config(model)
    sizes, widths = {getattr(config, "vocab_size", None)}, {getattr(config, "hidden_size", None)}
    embedding = ask(model, "get_input_embeddings")  # without one the config alone has to do
    sizes.add(getattr(embedding, "num_embeddings", None))
    widths.add(getattr(embedding, "embedding_dim", None))
    # If the width of the model equals the length of its vocabulary (bytes, say), the length of a side decides nothing.
    return {size for size in sizes - widths if isinstance(size, int)}


def check_hidden_matrices(model: nn.Module) -> None:
    """Refuse a model without a matrix that Muon can train."""
    matrices, rest = split_parameters(model)
    if not matrices:
        raise ValueError(
            f"`optim=muon` finds no hidden matrix to train in `{type(model).__name__}`: of its {len(rest)} trainable "
            "parameters none is the 3-D weight of experts or the 2-D `weight` of a linear layer that is neither "
            "embedding nor head and has no side as long as the vocabulary. Unfreeze such layers, or set "
            "`optim=adamw_torch_fused`."
        )


def muon_groups(
    model: nn.Module, decay_names: Collection[str], *, lr: float, weight_decay: float
) -> list[dict[str, Any]]:
    """
    Groups for [`MuonAdamW`]: AdamW's with and without weight decay, as `Trainer` makes them, then Muon's, matrices
    before stacks. Their `rate_scale` is [`RATE_SCALE`], or 1 with adapters, so that the learning rate that is best for
    AdamW alone is right for both.
    """
    matrices, rest = split_parameters(model)
    rate_scale = 1.0 if has_adapters(model) else RATE_SCALE
    logger.info(
        "Muon trains %d matrices (%d weights), AdamW the other %d parameters (%d weights), at %g times the rate.",
        len(matrices),
        sum(parameter.numel() for parameter in matrices.values()),
        len(rest),
        sum(parameter.numel() for parameter in rest.values()),
        rate_scale,
    )
    decay_names, groups = set(decay_names), []
    plain = {name: parameter for name, parameter in matrices.items() if parameter.ndim == 2}
    stacks = {name: parameter for name, parameter in matrices.items() if parameter.ndim == 3}
    for algorithm, named in (("adamw", rest), ("muon", plain), ("muon", stacks)):
        for decays in (True, False):
            parameters = [parameter for name, parameter in named.items() if (name in decay_names) is decays]
            if parameters or algorithm == "adamw":  # the first group's rate is the one that is logged
                decay = weight_decay if decays else 0.0
                group = {"params": parameters, "lr": lr, "weight_decay": decay, "algorithm": algorithm}
                groups.append(group | {"rate_scale": rate_scale})
    return groups


# Whose a function is.


LIBRARIES = ("hf_hybrid", "transformers", "trl", "peft", "accelerate", "torch", "deepspeed")
"""Packages whose functions are no code of a user."""


def package_of(function: Any, known: Collection[str] = LIBRARIES) -> str:
    """
    Return the package in which a function was written. Of one that others wrap it is the outermost that is not `known`.
    """
    while True:
        while (inside := getattr(function, "func", None) or getattr(function, "__func__", None)) is not None:
            function = inside  # of a partial, a method
        # `functools.wraps` copies `__module__`, but no globals.
        home = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
        package, function = home.partition(".")[0], getattr(function, "__wrapped__", None)
        if function is None or package not in known:
            return package
