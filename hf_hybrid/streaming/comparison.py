"""
Is it the same? Before a run walks its windows by layer, a few tokens of two micro-batches are computed by both walks.

The walk by layer is right as long as layers get and leave nothing beside their inputs and outputs. A loss that they
leave in an attribute, or a note of the batch that they find on the model, is that of another micro-batch there, or has
no gradient. No look at the model can exclude that, so losses and gradients are compared.

Nothing remains of it: the model is as it was, no gradient leaves the device, and no weight is updated. Of each gradient
only a number is kept, its product with two fixed vectors ([`_number`]). The number of a sum is the sum of the numbers,
so the gradients of several micro-batches need not be added up anywhere.

The model is in training mode, because some layers leave something in that mode alone. Where it draws random numbers
then, it is in evaluation mode: the walks draw in another order.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_hybrid.machine import is_out_of_memory
from hf_hybrid.optimizers import ask
from hf_hybrid.run.run import RandomStates, as_before
from hf_hybrid.streaming.layers import base_model
from hf_hybrid.streaming.streamer import LayerStreamer, Updates
from hf_hybrid.streaming.units import StreamedParameter, as_plain

TOKENS = 16
"""Of the first micro-batch. The second one is shorter, so that what is noted of it does not fit the first."""
ROWS = 2
TOLERANCES = {False: 1e-3, True: 0.1}
"""Most difference of a loss or a gradient, as a share of its size, in fp32 and in half precision."""
FLOOR = 1e-2
"""Gradients below this share of the largest count as large as that: some are zero but for rounding (biases of keys)."""


class CannotWalkError(RuntimeError):
    """This model's layers cannot be walked for several micro-batches at once."""


Walk = Callable[[Any], list[Any]]


class _Numbers(Updates):
    """Keeps [`_number`] of the gradients that leave layers, in place of the gradients."""

    def __init__(self, streamer: LayerStreamer):
        self.in_backward = set(streamer.units)
        self.of: dict[int, Tensor] = {}
        """By the id of the parameter: the number, and the norm, summed up over micro-batches."""

    def keep(self, param: StreamedParameter, gradient: Tensor) -> None:
        self.add(param.parameter, gradient)

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        self.of[id(parameter)] = self.of.get(id(parameter), 0.0) + _number(gradient)


def _number(gradient: Tensor) -> Tensor:
    """Return the product of a gradient with two fixed vectors, about as large as its norm, and the norm."""
    matrix = gradient.reshape(gradient.shape[0] if gradient.dim() else 1, -1)
    left, right = (1.4 * torch.cos(1.7 * torch.arange(1, size + 1, device=matrix.device)) for size in matrix.shape)
    product = left @ (matrix @ right.to(matrix.dtype)).float()
    return torch.stack([product, torch.linalg.vector_norm(matrix, dtype=torch.float32)])


def difference(streamer: LayerStreamer, walk: Walk, batches: list[Any]) -> str | None:
    """
    Return why micro-batches are not the same in both walks, as a sentence, or that this cannot be found out. `walk`
    computes them by layer. Raise an out-of-memory error.
    """
    doing = "The walks of a window cannot be compared"
    try:
        with as_before(streamer.model, streamer.device), torch.enable_grad(), _nothing_left(streamer):
            few = [_few(streamer.model, batch, TOKENS - 4 * number) for number, batch in enumerate(batches[:2])]
            functions = [functools.partial(_compute, streamer, batch) for batch in few]
            losses, numbers = _one_by_one(streamer, functions)
            doing = "A window cannot be walked by layer"
            by_layer = streamer.updates = _Numbers(streamer)
            return _apart(streamer, (losses, numbers), (walk(functions), _with_rest(streamer, by_layer)))
    except CannotWalkError as error:
        return str(error)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"{doing} ({type(error).__name__}: {str(error).partition(chr(10))[0]})."


def _few(model: nn.Module, batch: Any, tokens: int) -> dict[str, Any]:
    """
    Return some rows of a batch, cut to `tokens`; all of it if it holds anything of another shape. Of a batch of which a
    loss makes what the model gets, any tokens will do.
    """
    takes = inspect.signature(base_model(model).forward).parameters
    if isinstance(batch, Mapping) and any(parameter.kind is parameter.VAR_POSITIONAL for parameter in takes.values()):
        takes = batch  # it says nothing
    batch = {name: batch[name] for name in batch if name in takes} if isinstance(batch, Mapping) else {}
    if not any(map(torch.is_tensor, batch.values())):
        embeddings: Any = ask(base_model(model), "get_input_embeddings")
        words = ROWS * tokens if embeddings is None else len(embeddings.weight)
        batch = {"input_ids": (torch.arange(ROWS * tokens) % words).view(ROWS, tokens)}
    ids = next((batch[name] for name in ("input_ids", "inputs_embeds") if torch.is_tensor(batch.get(name))), None)
    tensors = [value for value in batch.values() if torch.is_tensor(value) and value.dim()]
    if ids is None or any(len(tensor) not in (1, len(ids)) or tensor.dim() > 3 for tensor in tensors):
        return dict(batch)
    rows, length = ids.shape[:2]
    if any(length not in tensor.shape[1:2] and tensor.dim() > 1 for tensor in tensors):
        return dict(batch)
    mask, start = batch.get("attention_mask"), 0
    if torch.is_tensor(mask):  # padding may come first
        start = min(int(mask[0].int().argmax()), max(length - tokens, 0))

    def cut(name: str, value: Any) -> Any:
        if name == "labels" and torch.is_tensor(value) and value.dim() > 1:  # tokens without one get any that exists
            value = value.where(value >= 0, value.max().clamp(min=0))
        if torch.is_tensor(value) and value.dim() > 1:
            return value[:ROWS, start : start + tokens].contiguous()
        has_rows = isinstance(value, (Tensor, list, tuple)) and not (torch.is_tensor(value) and not value.dim())
        return value[:ROWS] if has_rows and len(value) == rows else value

    return {name: cut(name, value) for name, value in batch.items()}


def _compute(streamer: LayerStreamer, batch: Mapping[str, Any]) -> Tensor:
    """Compute a loss, or of a batch without labels something like one, and its gradients."""
    output = streamer.model(
        **{name: value.to(streamer.device) if torch.is_tensor(value) else value for name, value in batch.items()}
    )
    loss = getattr(output, "loss", None)
    if loss is None:
        loss = getattr(output, "logits", output[0]).float().square()
    loss.mean().backward()
    return loss.detach().float().mean()


def _one_by_one(streamer: LayerStreamer, functions: Sequence[Callable[[], Tensor]]) -> tuple[list[Tensor], _Numbers]:
    """Compute micro-batch by micro-batch, in training mode or, where the first one draws, in evaluation mode."""
    for mode in (True, False):
        streamer.model.train(mode)
        numbers = streamer.updates = _Numbers(streamer)
        before, losses = RandomStates.now(streamer.device), []
        for function in functions:
            losses.append(function())
            streamer.end_backward()
            _with_rest(streamer, numbers)
            if mode and not before.same_as(RandomStates.now(streamer.device)):
                break
        else:
            break
    return losses, numbers


def _with_rest(streamer: LayerStreamer, numbers: _Numbers) -> _Numbers:
    """Take the gradients of parameters that are not streamed, and those that were complete before a recomputation."""
    sent = [param for param in streamer.masters.values() if param.master.grad is not None]
    if sent:
        streamer.gradients_arrived()
    with as_plain():
        for of, holder in [*((p.parameter, p.master) for p in sent), *((p, p) for p in streamer.model.parameters())]:
            if holder.grad is not None:
                numbers.add(of, holder.grad.to(streamer.device))
                holder.grad = None
    return numbers


def _apart(
    streamer: LayerStreamer, alone: tuple[list[Tensor], _Numbers], by_layer: tuple[list[Tensor], _Numbers]
) -> str | None:
    (losses, ours), (other_losses, theirs) = alone, by_layer
    parameters = [(n, p) for n, p in streamer.model.named_parameters() if id(p) in ours.of or id(p) in theirs.of]
    nothing = torch.zeros(2, device=streamer.device)
    pairs = [torch.stack([numbers.of.get(id(p), nothing) for numbers in (ours, theirs)]) for _, p in parameters]
    pairs += [torch.stack([loss, loss, other, other]).view(2, 2) for loss, other in zip(losses, other_losses)]
    values = torch.stack(pairs).tolist()  # the host waits once
    names = [f"gradient of `{name}`" for name, _ in parameters]
    largest = max((size for _, ((_, size), _) in zip(names, values)), default=0.0)
    names += ["loss"] * len(losses)
    most = TOLERANCES[any(p.dtype in (torch.float16, torch.bfloat16) for p in streamer.model.parameters())]
    for name, ((value, size), (other, _)) in zip(names, values):
        distance = abs(value - other) / max(abs(size), FLOOR * largest, 1e-30)
        if value - value != 0:
            return f"The walks of a window cannot be compared: the {name} of the first tokens is {value}."
        if not distance <= most:
            return (
                f"Walked by layer, the {name} of the first tokens is {distance:.1e} of its size away, more than "
                f"{most:g}: layers leave or find something beside their inputs and outputs."
            )
    return None


@contextlib.contextmanager
def _nothing_left(streamer: LayerStreamer) -> Generator[None]:
    """
    Context after which gradients, units and updates are as before. Inside there are no gradients, and no hooks on
    weights but the streamer's: a user's may count, or change a sum.
    """
    streamer.updates.flush()
    updates, last_pass = streamer.updates, streamer.last_pass
    units = [(unit, unit.calls, unit.open_calls, unit.open_graphs) for unit in streamer.units]
    with as_plain():
        gradients = [(parameter, parameter.grad) for parameter in streamer.model.parameters()]
        of_weights = [of for p, _ in gradients for of in (p._backward_hooks, p._post_accumulate_grad_hooks) if of]
        for parameter, _ in gradients:
            parameter.grad = None
    hooks = [(of_weight, dict(of_weight)) for of_weight in of_weights]
    masters = [(param, param.master.grad, param.gradient, param.norm) for param in streamer.masters.values()]
    for of_weight, all_of_them in hooks:
        for number, hook in all_of_them.items():
            if getattr(hook, "func", None) != streamer._on_gradient:
                del of_weight[number]
    for param, *_ in masters:
        param.master.grad = param.gradient = None
    streamer.last_pass = True  # all gradients are complete at once
    try:
        yield
    finally:
        streamer.end_backward()
        streamer.updates, streamer.last_pass = updates, last_pass
        for unit, calls, open_calls, open_graphs in units:
            unit.calls, unit.open_calls, unit.open_graphs = calls, open_calls, open_graphs
        for of_weight, all_of_them in hooks:
            of_weight.clear()
            of_weight.update(all_of_them)
        with as_plain():
            for parameter, gradient in gradients:
                parameter.grad = gradient
        for param, gradient, place, norm in masters:
            param.master.grad, param.gradient, param.norm, param.total = gradient, place, norm, None
