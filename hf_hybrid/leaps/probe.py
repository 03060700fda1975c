"""
Probes: compare the losses of some sequences before and after a leap, in pairs.

A leap changes the loss by far less than sequences differ from each other. So the same sequences are evaluated before
and after it, and what counts is the mean of the paired differences and its standard error. They must be sequences that
the steps before the leap have not used: on used ones a leap along recent gradients always looks good. By default they
are the first of the next training batches ([`NextBatches`]), which are fetched early and trained on later, so no
training data is lost. `probe_dataset=` names others ([`HeldOutBatches`]).

A probed leap is kept unless it is clearly worse, by a margin and two standard errors. The rule is lenient on purpose: a
leap that pays later looks neutral at first (short-horizon bias, Wu et al., 2018, arXiv 1803.02021).

A preference loss can fall while fewer pairs are ranked right, because pairs that are right already become more clearly
right and outweigh others that turn wrong. [`Losses`] of pairs say which pairs are right. If fewer are right after a
leap, the leap is not kept, whatever its loss is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from hf_hybrid.run.trainer_view import LossView, vocabulary_size


@dataclass(frozen=True)
class Losses:
    """Losses of some sequences."""

    values: list[float]
    """One per sequence (nats)."""
    accuracies: list[float] | None = None
    """One per preference pair, if the sequences are such: 1 if the chosen completion has the higher reward, else 0."""

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def accuracy(self) -> float | None:
        """Share of the pairs that are ranked right, or `None` if these are not losses of pairs."""
        return sum(self.accuracies) / len(self.accuracies) if self.accuracies else None

    def first(self, count: int) -> Losses:
        return Losses(self.values[:count], None if self.accuracies is None else self.accuracies[:count])

    @classmethod
    def joined(cls, parts: Iterable[Losses]) -> Losses:
        parts = list(parts)
        pairs = [part.accuracies for part in parts if part.accuracies is not None]
        return cls([loss for part in parts for loss in part.values], sum(pairs, []) if pairs else None)


# The comparison.

MIN_SEQUENCES = 2
"""Fewer have no standard error."""


def paired_decrease(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """
    Compare two evaluations of the same sequences, of which there are at least `MIN_SEQUENCES`.

    Returns the mean fall of the loss (nats, positive is better) and its standard error. A loss that is not finite after
    the leap counts as an infinite rise.
    """
    differences = [b - a for b, a in zip(before, after)]
    mean = sum(differences) / len(differences)
    if not math.isfinite(mean):
        return -math.inf, 0.0
    variance = sum((d - mean) ** 2 for d in differences) / (len(differences) - 1)
    return mean, math.sqrt(variance / len(differences))


def is_clearly_worse(decrease: float, standard_error: float, *, margin: float, z: float) -> bool:
    """Whether the loss rose by more than `margin` (nats) and `z` standard errors."""
    return -decrease > margin + z * standard_error


def costs_accuracy(before: float | None, after: float | None) -> bool:
    """Whether fewer pairs are ranked right than before, beyond rounding; never where there are no pairs."""
    return before is not None and after is not None and after < before - 1e-6


# The sequences.


@dataclass(frozen=True)
class ProbeBatch:
    """A collated batch of a probe."""

    inputs: Any
    """In any form that the trainer's `compute_loss` takes."""
    sequences: int
    """How many it holds, over all processes; what an evaluation says of more is left out."""
    cost: float
    """Of one evaluation, in real steps. A step costs as much as three forward passes."""


@dataclass
class NextBatches:
    """Draws the first sequences of the batches that training is about to use."""

    peek: Callable[[int], list]
    """From a number to that many of the next micro-batches, fewer where the epoch ends."""
    wanted: int
    """Sequences of a probe over all processes, at most; at least this many if nothing can be cut."""
    size: Callable[[Any], int]
    """From a micro-batch to its number of sequences."""
    cut: Callable[[Any, int], list[Any]]
    """From a micro-batch and a number to parts of at most that many sequences; the whole if it cannot be cut."""
    accumulation: int
    """Micro-batches of a step."""
    processes: int
    """Each draws from its own part of the data."""
    next_batch: int = 0
    """Kept for a later resume with held-out batches."""

    def draw(self) -> list[ProbeBatch]:
        drawn: list[ProbeBatch] = []
        missing = self.wanted
        while missing > 0 and len(batches := self.peek(len(drawn) + 1)) > len(drawn):
            inputs = self.cut(batches[-1], math.ceil(missing / self.processes))[0]
            sequences = self.size(inputs)
            share = sequences / self.size(batches[-1])
            drawn.append(ProbeBatch(inputs, sequences * self.processes, share / (3.0 * self.accumulation)))
            missing -= drawn[-1].sequences
        return drawn


class HeldOutBatches:
    """Rotates through batches of a set of the user's. At least `wanted` sequences are drawn, as whole batches."""

    def __init__(self, batches: Sequence[ProbeBatch], *, wanted: int):
        self.batches = list(batches)
        self.wanted = min(wanted, sum(batch.sequences for batch in batches))
        self.next_batch = 0

    def draw(self) -> list[ProbeBatch]:
        drawn: list[ProbeBatch] = []
        while sum(batch.sequences for batch in drawn) < self.wanted:
            drawn.append(self.batches[self.next_batch % len(self.batches)])
            self.next_batch = (self.next_batch + 1) % len(self.batches)
        return drawn


class Probe:
    """
    Evaluates the sequences of one comparison after the other, and counts what that costs.

    They come from `source`. `evaluate` leads from `ProbeBatch.inputs` to their [`Losses`], without gradients. `price`
    is what one evaluation will about cost, in real steps; later it is what the last one cost.
    """

    def __init__(self, source: NextBatches | HeldOutBatches, evaluate: Callable[[Any], Losses], *, price: float):
        self.source, self.evaluate, self.price = source, evaluate, price
        self.forward_passes = 0
        self.cost_steps = 0.0
        self._current: list[ProbeBatch] = []

    def choose(self) -> bool:
        """Pick the sequences of the next comparison. Return whether the epoch still has enough of them."""
        self._current = self.source.draw()
        self.price = sum(batch.cost for batch in self._current) or self.price
        return sum(batch.sequences for batch in self._current) >= MIN_SEQUENCES

    def losses(self) -> Losses:
        losses = []
        for batch in self._current:
            losses.append(self.evaluate(batch.inputs).first(batch.sequences))
            self.forward_passes += 1
            self.cost_steps += batch.cost
        return Losses.joined(losses)

    def load_state_dict(self, state: dict) -> None:
        self.source.next_batch = state["next_batch"]
        self.price, self.forward_passes = state["price"], state["forward_passes"]
        self.cost_steps = state["cost_steps"]


# The losses.


class ProbedTrainer(LossView, Protocol):
    """A trainer whose sequences are evaluated."""

    def get_test_dataloader(self, test_dataset: Any) -> Any: ...

    def _prepare_inputs(self, inputs: Any) -> Any: ...


class SequenceLosses:
    """
    Evaluates one collated batch to one loss per sequence, in evaluation mode and without gradients.

    Where the trainer's loss is the usual shifted cross-entropy, all sequences go through the model together and their
    losses are read from the logits; this is checked against the trainer's own loss on the first batch. Any other loss
    (preference losses, auxiliary terms, a user's `compute_loss_func`) is asked for sequence by sequence.
    """

    TOLERANCE = 1e-2
    MOST_LOGIT_BYTES = 2**30

    def __init__(self, trainer: ProbedTrainer):
        self.trainer = trainer
        self.from_logits: bool | None = None

    def held_out(self) -> list:
        """The batches of `probe_dataset`, collated as for an evaluation."""
        # Not `get_eval_dataloader`, whose loader of persistent workers would be that of later evaluations. Starting to
        # iterate draws from the global generator, which the training data and dropout are drawn from as well.
        with torch.random.fork_rng(devices=[]):
            return list(self.trainer.get_test_dataloader(self.trainer.probe_dataset))

    def size(self, batch) -> int:
        return _rows(batch)

    def __call__(self, batch) -> Losses:
        trainer, model = self.trainer, self.trainer.model
        was_training = model.training
        model.eval()
        try:
            trainer.run.call("before_probe")
            with torch.no_grad(), trainer.compute_loss_context_manager():
                losses = self._losses(model, trainer._prepare_inputs(batch))
        finally:
            trainer.run.call("after_probe")
            model.train(was_training)
        return Losses(trainer.accelerator.gather(losses).float().tolist())

    def _losses(self, model, inputs) -> torch.Tensor:
        if self.from_logits is not False and not self._too_many_logits(inputs):
            loss, outputs = self.trainer.compute_loss(model, dict(inputs), return_outputs=True)
            summed = _token_losses(outputs, inputs)
            if self.from_logits is None:
                self.from_logits = self._on_all(summed is not None and self._agrees(loss, *summed))
            if self.from_logits and summed is not None:
                losses, counts = summed
                return losses / counts.clamp(min=1)
        return self._one_by_one(model, inputs)

    def _one_by_one(self, model, inputs) -> torch.Tensor:
        count = _rows(inputs)
        return torch.stack([self._loss(model, _row(inputs, index, count)) for index in range(count)])

    def _loss(self, model, inputs) -> torch.Tensor:
        """Return a sequence's loss as the trainer computes it, or 0 if it is NaN because no label must be predicted."""
        loss = self.trainer.compute_loss(model, inputs).detach().reshape(())
        labels = inputs.get("labels")
        unlabelled = torch.is_tensor(labels) and labels.dim() == 2 and not labels[:, 1:].ne(-100).any()
        return torch.zeros_like(loss) if unlabelled and loss.isnan() else loss

    def _too_many_logits(self, inputs) -> bool:
        """Whether logits of all sequences are more than training holds, whose loss is computed in chunks."""
        labels = inputs.get("labels")
        if labels is None or not self.trainer.loss_in_chunks:
            return False
        return labels.numel() * (vocabulary_size(self.trainer.model) or 0) * 4 > self.MOST_LOGIT_BYTES

    def _on_all(self, holds: bool) -> bool:
        """Whether something holds on all processes: they must make the same forward passes, as FSDP2 joins them."""
        flag = torch.tensor([float(holds)], device=self.trainer.args.device)
        return bool(self.trainer.accelerator.gather(flag).min())

    def _agrees(self, loss: torch.Tensor, losses: torch.Tensor, counts: torch.Tensor) -> bool:
        mean = losses.sum() / counts.sum().clamp(min=1)
        return bool((mean - loss.detach().float()).abs() <= self.TOLERANCE * mean.abs())


def _token_losses(outputs, inputs) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Summed cross-entropy per sequence and number of predicted tokens, `None` where logits and labels do not match."""
    logits = outputs.get("logits") if isinstance(outputs, dict) else getattr(outputs, "logits", None)
    labels = inputs.get("labels")
    if logits is None or labels is None or logits.dim() != 3 or logits.shape[:2] != labels.shape:
        return None
    targets = labels[:, 1:]
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), targets, reduction="none", ignore_index=-100)
    return losses.sum(dim=1), targets.ne(-100).sum(dim=1)


def _rows(batch) -> int:
    """Return the rows of the first tensor of a batch; 1 if there is none."""
    values = batch.values() if isinstance(batch, Mapping) else ()
    return next((value.shape[0] for value in values if torch.is_tensor(value) and value.dim()), 1)


def _row(inputs, index: int, count: int) -> dict:
    """Return one of `count` rows. Tensors and lists of that length are cut; everything else is passed on."""
    return {
        name: value[index : index + 1] if hasattr(value, "__len__") and len(value) == count else value
        for name, value in inputs.items()
    }


def check_probe_set(dataset: Any) -> None:
    """Refuse a `probe_dataset` that is known to hold fewer than two sequences."""
    if hasattr(dataset, "__len__") and len(dataset) < MIN_SEQUENCES:
        count = len(dataset)
        raise ValueError(
            f"`probe_dataset` has {count} sample{'s' if count != 1 else ''}; at least {MIN_SEQUENCES} are needed to "
            "compare losses in pairs. Pass more, or leave it out: leaps are then verified on the next training batches."
        )


def held_out_batches(losses: SequenceLosses, dataset: Any, per_step: int, processes: int) -> list[ProbeBatch]:
    """
    Return the batches of `probe_dataset`; `per_step` counts the sequences of a step, of all processes.

    Raises:
        ValueError: If it gives fewer than `MIN_SEQUENCES` sequences, or no label.
    """
    batches = losses.held_out()
    sizes = [losses.size(batch) * processes for batch in batches]
    if processes > 1 and hasattr(dataset, "__len__"):
        # Processes fill up the last batch with the first sequences, which must not count twice.
        sizes[-1] -= max(sum(sizes) - len(dataset), 0)
    if sum(sizes) < MIN_SEQUENCES:
        raise ValueError(
            f"`probe_dataset` gave {sum(sizes)} sequences; at least {MIN_SEQUENCES} are needed to verify a leap. Pass "
            "more, lower `per_device_eval_batch_size` if `dataloader_drop_last` dropped them, or leave it out."
        )
    labels = [batch.get("labels") for batch in batches if hasattr(batch, "get")]
    if labels and all(torch.is_tensor(label) and not label.ne(-100).any() for label in labels):
        raise ValueError(
            "Every label of `probe_dataset` is -100, so that no loss could tell whether a leap helps. Pass sequences "
            "with labels, or leave it out: leaps are then verified on the next training batches."
        )
    return [ProbeBatch(batch, size, size / (3.0 * per_step)) for batch, size in zip(batches, sizes)]
