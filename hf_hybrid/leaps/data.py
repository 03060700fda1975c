"""Data around predicted steps: sequences held out for probes, and batches that are only fetched when they are used."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import skip_first_batches
from torch.utils.data import Subset

MAX_SHARE = 0.05
MIN_SEQUENCES = 2


def hold_out(dataset: Any, samples: int, seed: int) -> tuple[Any, Any]:
    """
    Take sequences out of a training set to verify leaps on.

    At most a twentieth of the set, at least two sequences, drawn at random; the order of the others is kept. From a
    `datasets.IterableDataset` the first `samples` are taken.

    Returns:
        The training set without them, and the held-out set.

    Raises:
        ValueError: If the set is too small, or cannot be split because it has no length.
    """
    instead = "Pass `probe_dataset=` to the trainer, or set `enable_predict=False`."
    if dataset is None:
        raise ValueError(f"`train_dataset` is missing, and leaps are verified on sequences held out of it. {instead}")
    if not hasattr(dataset, "__len__"):
        if hasattr(dataset, "take") and hasattr(dataset, "skip"):
            return dataset.skip(samples), dataset.take(samples)
        raise ValueError(
            f"`train_dataset` is a `{type(dataset).__name__}` without a length, so no sequences can be held out of it "
            f"to verify leaps on. {instead}"
        )
    count = len(dataset)
    held = max(min(samples, int(count * MAX_SHARE)), MIN_SEQUENCES)
    if count < 2 * MIN_SEQUENCES:
        raise ValueError(
            f"`train_dataset` has {count} sample{'s' if count != 1 else ''}; at least {2 * MIN_SEQUENCES} are needed "
            f"to hold out {MIN_SEQUENCES} that verify leaps. {instead}"
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    chosen, kept = sorted(order[:held]), sorted(order[held:])
    if hasattr(dataset, "select"):
        return dataset.select(kept), dataset.select(chosen)
    return Subset(dataset, kept), Subset(dataset, chosen)


def check_probe_set(dataset: Any) -> None:
    """
    Refuse a held-out set that no leap can be verified on.

    Raises:
        ValueError: If it is known to hold fewer than two sequences.
    """
    if hasattr(dataset, "__len__") and len(dataset) < MIN_SEQUENCES:
        count = len(dataset)
        raise ValueError(
            f"`probe_dataset` has {count} sample{'s' if count != 1 else ''}; at least {MIN_SEQUENCES} are needed to "
            "compare losses in pairs. Pass more, or leave it out to hold sequences out of `train_dataset`."
        )


class BatchFeed:
    """
    Lets predicted steps pass without fetching their batches, also across a resume.

    `Trainer` counts batches by steps when it resumes inside an epoch and would skip those that were never fetched.
    The feed remembers how many those were and then reads from an iterator of its own.
    """

    def __init__(self):
        self.epoch = 0
        self.fetched = 0
        self.passed_over = 0
        self._own: Iterator | None = None

    def enter(self, epoch: int) -> None:
        """Epoch `epoch` begins, or goes on after a resume."""
        if epoch != self.epoch:
            self.epoch, self.fetched, self.passed_over, self._own = epoch, 0, 0, None

    def resume(self, dataloader) -> None:
        """Continue the epoch of a restored state behind the batches that were really fetched."""
        if self.fetched + self.passed_over == 0:
            return
        own = skip_first_batches(dataloader, self.fetched)
        for part in (own, getattr(getattr(own, "batch_sampler", None), "batch_sampler", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)
        iterator = iter(own)
        # Starting to iterate draws from the global generator, whose state Trainer restores before the first step: that
        # has to be over by then, also where the first steps take no batch.
        self._own = itertools.chain(list(itertools.islice(iterator, 1)), iterator)

    def source(self, epoch_iterator: Iterator) -> Iterator:
        """Where the next batches come from."""
        return epoch_iterator if self._own is None else self._own

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "fetched": self.fetched, "passed_over": self.passed_over}

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.fetched, self.passed_over = state["epoch"], state["fetched"], state["passed_over"]


def tokens_of(inputs: dict) -> int:
    """Tokens in a batch: elements of `input_ids`, or of whatever stands in its place."""
    found = inputs.get("input_ids")
    if found is None:
        found = next((value for value in inputs.values() if getattr(value, "ndim", 0) >= 2), None)
    return 0 if found is None else found.shape[0] * found.shape[1]
