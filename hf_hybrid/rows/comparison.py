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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_hybrid.rows.tree import WORD, Batch, Row, Targets, Tree, padded

TOLERANCES = {False: 1e-3, True: 0.1}
"""Most difference of the first batch, see [`apart`], in fp32 and in half precision."""
EXACT = {False: 1e-5, True: 0.02}
"""Most difference of two sums of the same losses."""
FEW = 16
"""Tokens of a row whose gradient shows that a backward pass runs."""


class Observed(NamedTuple):
    """What a forward pass gives."""

    hidden: Tensor  # of the backbone
    result: Any  # a loss, or what holds one
    router: Tensor | None  # the router's loss


Observe = Callable[[str, Batch, Tree], Observed]
"""Runs a forward pass, `padded` or as a `tree`."""


def sample(tree: Tree) -> list[Row]:
    """Return some rows of a tree: neighbours, which may share, the longest one and the last one."""
    last = len(tree.rows) - 1
    longest = max(range(last + 1), key=lambda index: len(tree.rows[index].ids))
    return [tree.rows[index] for index in sorted({0, min(1, last), longest, last})]


def two_rows(row: Row, means: bool) -> tuple[Batch, Tree]:
    """Return two rows of the tokens of a row, which begin alike, and their tree. `means`: their losses are means."""
    first = np.resize(np.frombuffer(row.ids, WORD).astype(np.int64), FEW)
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
