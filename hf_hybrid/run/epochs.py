"""
Which epoch of the data is under way, where in it a resumed run goes on, and which random generators order it.

`Trainer` finds the place of a resumed run by counting steps, and skips as many batches. With leaps, steps and batches
are no longer the same number, so the run reads its batches itself (`BatchFeed` in run.py) and knows its own place.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch.utils.data import IterableDataset, Sampler
from transformers.trainer_utils import has_length

from hf_hybrid.run.trainer_view import TrainerView


class Epochs:
    """The epochs of a training."""

    def __init__(self, trainer: TrainerView):
        self._trainer = trainer
        self.next = 0  # the one that begins next
        self.is_at_start = False  # one has begun, and none of its batches was read
        self._began_at: list[int] = []

    def find_place(self) -> None:
        """Find the epoch in which the run begins, once its loader is there."""
        self.next = self._place()[0]

    def _place(self) -> tuple[int, int]:
        """Return the epoch that Trainer enters next, and how many of its batches a resume skips."""
        trainer = self._trainer
        loader, accumulation = trainer.callback_handler.train_dataloader, trainer.args.gradient_accumulation_steps
        if not has_length(loader):
            return int(trainer.state.epoch or 0), 0
        epoch, steps = divmod(trainer.state.global_step, max(-(-len(loader) // accumulation), 1))
        return epoch, 0 if trainer.args.ignore_data_skip else steps * accumulation

    def begin(self) -> None:
        """Begin an epoch; `ValueError` if the data gives too few batches for a step."""
        trainer, args, feed = self._trainer, self._trainer.args, self._trainer.run.feed
        loader = trainer.callback_handler.train_dataloader
        self._began_at = [*self._began_at, trainer.state.global_step][-3:]
        if len(self._began_at) == 3 and len(set(self._began_at)) == 1:  # a resumed pass may be at its end
            raise ValueError(
                f"Two passes through `train_dataset` made no step: it gives fewer batches than "
                f"`gradient_accumulation_steps={args.gradient_accumulation_steps}`. Lower that or "
                "`per_device_train_batch_size`, or pass more data."
            )
        epoch, self.next, self.is_at_start = self.next, self.next + 1, True
        trainer.order.enter(epoch, loader)
        if feed is None:
            return
        if has_length(loader) and len(loader) == 0:
            raise ValueError(
                f"`train_dataset` gives no batch: `dataloader_drop_last={args.dataloader_drop_last}` drops one with "
                f"fewer rows than `per_device_train_batch_size={args.per_device_train_batch_size}`. Lower the batch "
                "size, or pass more data."
            )
        feed.enter(epoch)
        if trainer.saver.resumed_from is not None:
            reads_itself, trainer.saver.resumed_from = feed.begun, None
            if not reads_itself:
                feed.trained = self._place()[1]
        else:  # Trainer does not know how often a resumed run has gone through a stream, which may differ by epoch
            reads_itself = trainer.saver.report is not None and not has_length(loader)
        if reads_itself:
            feed.read(loader)
            self.is_at_start = False

    def restore_order(self) -> None:
        """Restore the order of the epoch again, because random generators were restored after it began."""
        if self.is_at_start:
            self._trainer.order.enter(self.next - 1, self._trainer.callback_handler.train_dataloader)


# The generators that order the data.

RandomGenerator = torch.Generator | random.Random | numpy.random.Generator | numpy.random.RandomState
"""Objects that draw random numbers for somebody who does not use the global generators."""


def generator_state(generator: RandomGenerator) -> Any:
    """Return the state of a generator for a checkpoint: JSON values and tensors."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return with_tensors(generator.getstate())
    if isinstance(generator, numpy.random.Generator):
        return with_tensors(generator.bit_generator.state)
    return with_tensors(generator.get_state(legacy=False))


def restore_generator(generator: RandomGenerator, state: Any) -> None:
    """Set a generator to what [`generator_state`] returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(without_tensors(state))
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = without_tensors(state)
    else:
        generator.set_state(without_tensors(state))


def with_tensors(state: Any) -> Any:
    """Turn the long rows of numbers in the state of a generator into tensors."""
    if isinstance(state, dict):
        return {key: with_tensors(value) for key, value in state.items()}
    if isinstance(state, numpy.ndarray):
        return {"array": torch.from_numpy(state.copy())}
    if isinstance(state, tuple) and len(state) > 3:
        return {"tuple": torch.tensor(state)}
    return [with_tensors(value) for value in state] if isinstance(state, tuple) else state


def without_tensors(state: Any) -> Any:
    """Return what [`with_tensors`] took."""
    if isinstance(state, dict) and set(state) == {"array"}:
        return state["array"].numpy()
    if isinstance(state, dict) and set(state) == {"tuple"}:
        return tuple(state["tuple"].tolist())
    if isinstance(state, dict):
        return {key: without_tensors(value) for key, value in state.items()}
    return tuple(map(without_tensors, state)) if isinstance(state, list) else state


_LOADERS = ("base_dataloader", "dataloader", "batch_sampler", "sampler", "synchronized_generator", "generator")


def generators_of(dataloader: Any) -> dict[str, RandomGenerator]:
    """
    Return the generators that a loader, its samplers and its stream hold, each by the attributes that lead to it.

    A data set that is no stream is left out: a resume skips its first rows without reading them.
    """
    generators: dict[str, RandomGenerator] = {}
    seen: set[int] = set()

    def visit(value: Any, at: str) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, RandomGenerator) and not isinstance(value, random.SystemRandom):
            generators[at] = value
            return
        for name, held in list(getattr(value, "__dict__", {}).items()):
            if name in _LOADERS or isinstance(held, (RandomGenerator, Sampler, IterableDataset)):
                visit(held, f"{at}.{name}" if at else name)

    visit(dataloader, "")
    return generators
