"""
Is it the same? Some rows of a batch are computed as padded rows and as a tree, before trees are trained on.

The hidden states that labels are predicted from are compared, and the loss. Both passes are made in evaluation mode.
Where the model draws random numbers in training, one more pass shows that it takes a flat row in that mode too.

A kernel that works forward may fail backward. So before a model is trained on trees, two rows of few tokens are
computed, and the gradient of their embeddings. That runs every attention backward, and gives no weight a gradient.

**A `forward` that is not one of transformers** may compute any loss, for example one that shifts labels which are
shifted already. Where all targets are as likely, as before a training from scratch, the loss does not show it. So
[`not_a_sum`] compares more: the gradients of the hidden states, which tell targets apart; two micro-batches with one;
and a count with twice the count. The outermost module is in training mode meanwhile, those inside of it are not: they
may drop.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hf_hybrid.recovery import is_out_of_memory
from hf_hybrid.rows.attention import CannotAttendError
from hf_hybrid.rows.costs import share_saved
from hf_hybrid.rows.images import FIRST, has_images
from hf_hybrid.rows.tree import WORD, Batch, Row, Targets, Tree, padded
from hf_hybrid.run.fallbacks import Fallbacks
from hf_hybrid.run.run import as_before
from hf_hybrid.run.trainer_view import module_of_user

logger = logging.getLogger(__name__)

TOLERANCES = {False: 1e-3, True: 0.1}
"""Most difference of the first batch, see [`apart`], in fp32 and in half precision."""
EXACT = {False: 1e-5, True: 0.02}
"""Most difference of two sums of the same losses."""
FEW = 16
"""Tokens of a row whose gradient shows that a backward pass runs."""


@dataclass
class Observed:
    """A forward pass that is made to look, and what it gives."""

    tree: tuple[Batch, Tree] | None = None
    """The batch and its tree, if it is computed as one."""
    cuts: bool = False
    """Whether the states are cut off from the layers, to read their gradient."""
    hidden: Any = None
    """States that the backbone returned."""
    router: Tensor | None = None
    """The router's loss."""
    result: Any = None
    """A loss, or what holds one."""


Observe = Callable[[str, Batch, Tree], Observed]
"""Runs a forward pass, `padded` or as a `tree`."""
Compute = Callable[[dict[str, Tensor]], Any]
"""Computes a batch of tokens, mask and labels, and returns a loss or what holds one."""


def sample(tree: Tree) -> list[Row]:
    """Return some rows of a tree: neighbours, which may share, the longest, the last, and one with images."""
    last = len(tree.rows) - 1
    longest = max(range(last + 1), key=lambda index: len(tree.rows[index].ids))
    seeing = [index for index, row in enumerate(tree.rows) if has_images(row)][:1]
    return [tree.rows[index] for index in sorted({0, min(1, last), longest, last, *seeing})]


def two_rows(row: Row, means: bool) -> tuple[Batch, Tree]:
    """Return two rows of the tokens of a row, which begin alike, and their tree. `means`: their losses are means."""
    tokens = np.frombuffer(row.ids, WORD).astype(np.int64)
    first = np.resize(tokens[tokens < FIRST], FEW)
    ids = torch.from_numpy(np.stack([first, np.concatenate([first[: FEW // 2], first[: FEW // 2 - 1 : -1]])]))
    batch = Batch(ids, torch.ones_like(ids), ids.clone(), None, torch.ones(2, dtype=torch.long) if means else None)
    return batch, Tree.of(batch.rows() or [])


def apart(plain: Tensor, tree: Tensor) -> float:
    """Return the mean distance of two sets of hidden states `[labels, width]`, as a share of their length."""
    plain, tree = plain.double(), tree.double()
    return ((tree - plain).norm(dim=-1) / plain.norm(dim=-1).clamp(min=1e-9)).mean().item()


def loss_of(result: Any) -> Tensor | None:
    """Return a loss, of what may be one, or hold one, or TRL's log-probabilities."""
    if torch.is_tensor(result):
        return result
    logs = getattr(result, "log_probs", None)
    return getattr(result, "loss", None) if logs is None else -logs.sum()


def difference(observe: Observe, rows: Tree, batches: Sequence[Batch], most: float) -> str | None:
    """Return why rows are not the same in both ways: they are further apart than `most` of their size."""
    batch, tree = padded(rows, batches)
    targets = Targets.of(tree, [batch])
    divisors = None if batch.divisors is None else torch.full_like(batch.divisors, max(len(targets.readers), 1))
    batch = batch._replace(micro_batches=None, divisors=divisors)  # it is one
    plain, shared = (observe(way, batch, tree) for way in ("padded", "tree"))
    if len(targets.readers):
        distance = apart(
            plain.hidden[tuple(targets.places[:, 1:].t())], shared.hidden[0, targets.slots[targets.readers]]
        )
        if distance > most or distance != distance:
            return (
                f"hidden states of the first batch are {distance:.1e} of their length away from those of padded rows, "
                f"more than {most:g}"
            )
    losses = {"router's loss": (plain.router, shared.router)}
    if len(targets.readers):
        losses["loss"] = loss_of(plain.result), loss_of(shared.result)
    for name, (of_plain, of_shared) in losses.items():
        if of_plain is None and of_shared is None:
            continue
        if of_plain is None or of_shared is None:
            return f"only one of padded and flat rows has a {name}"
        of_plain, of_shared = of_plain.double(), of_shared.double()
        if not (of_shared - of_plain).abs() <= most * of_plain.abs():
            return f"the {name} of the first batch is {of_shared:.6g}, and {of_plain:.6g} in padded rows"
    return None


def difference_of_packed(observe: Observe, batch: Batch, tree: Tree, most: float) -> str | None:
    """Return why a packed batch as it is given is not its documents, each by itself."""
    targets, (plain, flat) = Targets.of(tree, [batch]), (observe(way, batch, tree) for way in ("packed", "tree"))
    if batch.packed is None or not len(targets.readers):
        return None
    _, documents, columns = targets.places.t()
    of_plain = plain.hidden[batch.packed.rows[documents], columns + batch.packed.shifts[documents]]
    distance = apart(of_plain, flat.hidden[0, targets.slots[targets.readers]])
    if distance <= most:
        return None
    return f"in a packed row a document sees others (states are {distance:.1e} of their length from its own)"


def not_a_sum(
    compute: Callable[[str, Batch, Tree, int | None], tuple[Tensor, Tensor]],
    rows: Tree,
    batches: Sequence[Batch],
    counted: bool,
    half_precision: bool,
) -> str | None:
    """
    Return why a loss is not the sum of what is lost at each label, divided by a count (if `counted`, else a mean).

    `compute` takes `padded` or `tree`, a batch with its tree, and the count. It returns the loss and its gradient of
    the hidden states, `[batch, length, width]` or `[1, slots, width]`.
    """
    most, exact = TOLERANCES[half_precision], EXACT[half_precision]
    batch, tree = padded(rows, batches)
    batch, targets = batch._replace(micro_batches=None, divisors=None), Targets.of(tree, [batch])
    count = len(targets.readers) if counted else None
    (plain, of_plain), (flat, of_flat) = (compute(way, batch, tree, count) for way in ("padded", "tree"))
    of_plain, of_flat, places = of_plain.double(), of_flat[0].double(), tuple(targets.places[:, 1:].t())
    slots = targets.slots[targets.readers].to(of_flat.device)
    summed = torch.zeros_like(of_flat).index_add_(0, slots, of_plain[places].to(of_flat.device))
    of_plain[places] = 0
    if of_plain.any():
        return "reads tokens that predict no label"
    if not (summed - of_flat).norm() <= most * summed.norm() or not _alike(plain, flat, most):
        return "has another gradient for a flat row than for padded rows"
    if count is not None:
        halves = [tree.rows[: len(tree.rows) // 2], tree.rows[len(tree.rows) // 2 :]]
        alone = [padded(Tree.of(half), [batch]) for half in halves if half]
        parts = sum(compute("padded", part._replace(micro_batches=None), of_part, count)[0] for part, of_part in alone)
        if not _alike(parts, flat, exact):
            return "is no sum over micro-batches"
        if not _alike(2 * compute("tree", batch, tree, 2 * count)[0], flat, exact):
            return "is not divided by `num_items_in_batch`"
    return None


def _alike(one: Any, other: Tensor, most: float) -> bool:
    return bool((one - other).abs() <= most * other.abs())


class Exchanges(Protocol):
    """What is asked of exchange.py, which makes comparisons."""

    fallbacks: Fallbacks

    @property
    def attended(self) -> bool: ...
    def facts_of(self, model: nn.Module) -> Any: ...
    def observing(self, observed: Observed) -> contextlib.AbstractContextManager[None]: ...
    def in_trees(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]: ...
    def eager(self) -> contextlib.AbstractContextManager[Any]: ...
    def on(self, *models: nn.Module | None) -> contextlib.AbstractContextManager[None]: ...


class Comparison:
    """
    Compares the first rows of each model, and the first that are longer than its sliding window.

    `half_precision` tells whether models compute in bf16 or fp16.
    """

    is_possible = True
    """Whether a model can run once more inside of a pass: not where processes wait for each other."""
    in_any_order = True
    """Whether a backward pass may be tried: not where layers are fetched in the order of a training."""

    def __init__(self, rows: Exchanges, half_precision: bool):
        self.rows, self.half_precision = rows, half_precision

    def trains(self, model: nn.Module) -> bool:
        """Whether a backward pass follows, before which one may be tried."""
        trains = self.in_any_order and model.training and torch.is_grad_enabled()
        return trains and any(parameter.requires_grad for parameter in model.parameters())

    def _is_half(self, model: nn.Module) -> bool:
        return self.half_precision or model.dtype in (torch.float16, torch.bfloat16)

    def _observe(
        self,
        model: nn.Module,
        compute: Compute,
        device: torch.device,
        how: str,
        batch: Batch,
        tree: Tree,
        cuts: bool = False,
    ) -> Observed:
        rows, given = self.rows, {"input_ids": batch.decoded, "attention_mask": batch.mask, "labels": batch.labels}
        if batch.images is not None:
            given |= batch.images.padded(*batch[:2])
        if how == "packed" and batch.packed is not None:
            given = dict(batch.packed.given)
        inputs = {name: value.to(device) if torch.is_tensor(value) else value for name, value in given.items()}
        observed = Observed((batch, tree) if how == "tree" else None, cuts)
        with rows.observing(observed), rows.in_trees(model) if how == "tree" else contextlib.nullcontext():
            observed.result = compute(inputs)
        if observed.hidden is None:
            raise CannotAttendError(
                f"`{type(rows.facts_of(model).base).__name__}` does not call its backbone as a module"
            )
        return observed

    def reason_not_same(
        self,
        model: nn.Module,
        tree: Tree,
        batches: Sequence[Batch],
        compute: Compute,
        device: torch.device,
        packed: tuple[Batch, Tree] | None = None,
    ) -> str | None:
        """Compute some rows, and one `packed` batch, in both ways, and return why the results are not the same."""
        exchange, facts, rows = self.rows, self.rows.facts_of(model), Tree.of(sample(tree))
        trains, fallbacks, saved = model.training, self.rows.fallbacks, share_saved(rows)
        tries_backward = not facts.ran_backward and self.trains(model)
        observe, doing = functools.partial(self._observe, model, compute, device), "the model does not take a tree"
        try:
            with as_before(model, device), exchange.eager():
                model.eval()
                reason = difference(observe, rows, batches, TOLERANCES[self._is_half(model)])
                if reason is None and packed is not None:
                    reason = difference_of_packed(observe, *packed, TOLERANCES[self._is_half(model)])
                if reason is None and trains and facts.drawn.get(True, "nothing") != "nothing":
                    model.train()
                    observe("tree", *padded(rows, batches))
                if reason is None and tries_backward:
                    model.eval()
                    doing = "the backward pass of a tree does not run"
                    with exchange.on(model), exchange.in_trees(model):
                        run_backward(observe, facts.base, *two_rows(rows.rows[0], batches[0].divisors is not None))
                    facts.ran_backward = True
        except CannotAttendError as error:
            reason = str(error)
            fallbacks.cannot_be_exact(reason)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if (own := facts.own_forward or module_of_user(model)) is not None:  # nobody else can mend it
                reason = f"{own} does not take a flat row ({type(error).__name__}: {error})"
            elif exchange.attended:
                cost = f"About {saved:.0%} of the tokens of the first batch, and its padding, are not saved."
                return fallbacks.did_not_work(error, doing, cost=cost)
            else:
                reason = (
                    f"the attention of `{type(facts.base).__name__}` is its own, not one of transformers' interface"
                )
                logger.debug("%s", reason, exc_info=error)
            fallbacks.cannot_be_exact(reason)
        else:
            if reason is not None:
                fallbacks.cannot_be_exact(
                    reason, advice=f"About {saved:.0%} of its tokens, and padding, are not saved."
                )
        return reason

    def reason_no_sum(
        self,
        model: nn.Module,
        tree: Tree,
        batches: Sequence[Batch],
        compute: Callable[..., Any],
        device: torch.device,
        counted: bool,
    ) -> str | None:
        """Return why the loss of a model's own `forward` is not one that windows may be laid out anew for."""
        facts, rows = self.rows.facts_of(model), Tree.of(sample(tree))
        if not self.trains(model):
            reason = "is not compared where layers are fetched in the order of a training"
        else:
            if len(rows.rows) < 2:
                batch, rows = two_rows(rows.rows[0], means=False)
                batches = [batch]

            def observe(how: str, batch: Batch, tree: Tree, count: int | None) -> tuple[Tensor, Tensor]:
                items = None if count is None else torch.tensor(count, device=device)
                with torch.enable_grad():
                    quiet = functools.partial(compute, items=items)
                    observed = self._observe(model, quiet, device, how, batch, tree, cuts=True)
                    return observed.result.detach(), torch.autograd.grad(observed.result, observed.hidden)[0]

            try:
                with as_before(model, device):
                    model.eval()
                    facts.base.training = True
                    reason = not_a_sum(observe, rows, batches, counted, self._is_half(model))
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                reason = f"does not take a flat row in training ({type(error).__name__}: {error})"
        facts.adds_up = reason is None
        if reason is not None:
            reason = f"the loss of {facts.own_forward} {reason}"
            self.rows.fallbacks.cannot_be_exact(reason)
        return reason


def run_backward(observe: Observe, base: Any, batch: Batch, tree: Tree) -> None:
    """Compute the gradient of the embeddings of a tree, and nothing else: no weight gets one."""
    embedded: list[Tensor] = []

    def cut(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0].clone()  # some models scale it in place

    hook = base.get_input_embeddings().register_forward_hook(cut)
    try:
        with torch.enable_grad():
            observed = observe("tree", batch, tree)
            loss = loss_of(observed.result)
            loss = observed.hidden.float().mean() if loss is None else loss
            if embedded and loss.requires_grad:
                torch.autograd.grad(loss, embedded[0], allow_unused=True)
    finally:
        hook.remove()
