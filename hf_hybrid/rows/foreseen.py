"""
What a run would save in its first batches, as far as its data tell: nothing is computed, and no step is made.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from hf_hybrid.rows.costs import WORTH
from hf_hybrid.rows.facts import dropout_of
from hf_hybrid.rows.tree import divide, on_host
from hf_hybrid.run.run import RandomStates


class Foreseen(NamedTuple):
    """What a run would save, as far as options, model and rows tell before it begins."""

    reason: str | None = None  # why nothing is saved
    shared: float = 0.0  # share of the tokens in shared prefixes or without influence on a label
    padding: float = 0.0  # share of padding; both shares are of the padded rows
    but: tuple[str, ...] = ()  # what is computed again all the same, or left as it is, in clauses


WINDOWS, ROWS_READ = 4, 512
"""Windows from which [`foresee`] says what a run saves, and the rows behind which it reads no further window."""
LITTLE = f"less than {1 - WORTH:.0%} would be saved".replace("%", " %")


def foresee(trainer: Any) -> Foreseen | None:
    """
    Return what a run would save in its first windows, before it begins. `None` if that is found out in each step: a
    loss puts its rows together or generates them, or rows are a stream, which is read once. Random generators are as
    before.
    """
    if trainer.rows is None or trainer.rows.off:
        return Foreseen("`share_rows` is off")
    if isinstance(trainer.train_dataset, IterableDataset):
        return None
    batches, read = [], 0
    with RandomStates.now(trainer.args.device).again():
        loader, accumulated = trainer.get_train_dataloader(), trainer.args.gradient_accumulation_steps
        for chosen in loader.batch_sampler:
            batches.append(loader.collate_fn([loader.dataset[index] for index in chosen]))
            read += len(chosen)
            if len(batches) % accumulated == 0 and (len(batches) == WINDOWS * accumulated or read >= ROWS_READ):
                break
    if (of_windows := getattr(trainer.rows, "foresee", None)) is not None:
        return of_windows([batches[n : n + accumulated] for n in range(0, len(batches), accumulated)])
    model = trainer.accelerator.unwrap_model(trainer.model)
    return foresee_each(trainer.rows, model, batches)


def foresee_each(rows: Any, model: Any, batches: Sequence[Mapping[str, Any]]) -> Foreseen | None:
    """As [`foresee`], of batches that are each computed by itself."""
    given = [found for found in map(rows.rows_foreseen, batches) if found is not None]
    if len(given) < len(batches):
        return None
    facts, dropout = rows.facts_of(model), dropout_of(model)
    if (reason := rows.reason_plain or facts.reason) is not None:
        return Foreseen(reason)
    total = padding = shared = 0
    for inputs, batch in zip(batches, on_host(given)):
        if facts.encoder is not None and isinstance(batch := rows.with_images(facts, inputs, batch), str):
            return Foreseen(batch)
        plan = facts.plan([batch], functools.partial(divide, most=float("inf")), shares=True, compact=True, whole=False)
        if plan.reason is not None:
            return Foreseen(plan.reason)
        total += (size := len(batch.mask) * int(batch.mask.any(0).sum()))  # the last column may be one of labels
        if plan.trees and plan.cost <= rows.worth * plan.padded:
            padding += size - batch.tokens
            shared += batch.tokens - sum(tree.size for tree in plan.trees)
    if not shared + padding:
        return Foreseen(LITTLE)
    but = (f"under dropout ({dropout:g}) a shared prefix draws it once",) if dropout and shared else ()
    asks = ("the first step is as it is, to see what its loss reads",) if rows.asks else ()
    return Foreseen(None, shared / total, padding / total, (*but, *asks, *rows.unforeseen))
