"""
Probes: compare the losses of held-out sequences before and after a leap, in pairs.

A leap changes the loss by far less than sequences differ from each other. So the same sequences are evaluated before
and after it, and what counts is the mean of the paired differences and its standard error. Sequences that training has
not seen are needed: on seen ones a leap along recent gradients always looks good. By default they are held out of the
training set; `probe_dataset=` names others.

A probed leap is kept unless it is clearly worse, by a margin and two standard errors. The rule is lenient on purpose: a
leap that pays later looks neutral at first (short-horizon bias, Wu et al., 2018, arXiv 1803.02021).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import find_batch_size
from torch.utils.data import Subset

from hf_hybrid.phases import PluginList

Losses = list[float]

# The comparison.


def paired_decrease(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """
    Compare two evaluations of the same sequences.

    Returns:
        Mean fall of the loss (nats, positive is better) and its standard error. A loss that is not finite after the
        leap counts as an infinite rise.

    Raises:
        ValueError: If the two do not hold the same number of sequences, or fewer than two.
    """
    if len(before) != len(after) or len(before) < 2:
        raise ValueError(
            f"A paired comparison needs the same two or more sequences, got {len(before)} and {len(after)}."
        )
    differences = [b - a for b, a in zip(before, after)]
    mean = sum(differences) / len(differences)
    if not math.isfinite(mean):
        return -math.inf, 0.0
    variance = sum((d - mean) ** 2 for d in differences) / (len(differences) - 1)
    return mean, math.sqrt(variance / len(differences))


def is_clearly_worse(decrease: float, standard_error: float, *, margin: float, z: float) -> bool:
    """Whether the held-out loss rose by more than `margin` (nats) and `z` standard errors."""
    return -decrease > margin + z * standard_error


class HeldOutProbe:
    """
    Rotates through held-out batches and counts the cost of probes.

    Args:
        batches (`Sequence`): Collated batches, in any form that `evaluate` takes.
        evaluate (`Callable`): From a batch to one loss per sequence, without gradients.
        sizes (`Sequence[int]`): Sequences in each batch; what `evaluate` says of more is left out.
        sequences_per_probe (`int`): At least this many sequences are used per probe (as whole batches).
        sequences_per_step (`int`): Sequences of a real step, for the price of a forward pass in real steps.
    """

    def __init__(
        self,
        batches: Sequence,
        evaluate: Callable[[object], Losses],
        *,
        sizes: Sequence[int],
        sequences_per_probe: int,
        sequences_per_step: int,
    ):
        self.batches, self.sizes, self.evaluate = list(batches), list(sizes), evaluate
        self.sequences_per_probe = min(sequences_per_probe, sum(self.sizes))
        self.sequences_per_step = sequences_per_step
        self.next_batch = 0
        self.forward_passes = 0
        self.cost_steps = 0.0
        self._current: list[int] = []

    def choose(self) -> None:
        """Pick the sequences of the next comparison. Every [`losses`] until the next call uses them."""
        self._current, count = [], 0
        while count < self.sequences_per_probe:
            self._current.append(self.next_batch)
            count += self.sizes[self.next_batch]
            self.next_batch = (self.next_batch + 1) % len(self.batches)

    @property
    def price(self) -> float:
        """Cost of one evaluation in real steps. A step costs as much as three forward passes."""
        count = max(self.sequences_per_probe, max(self.sizes))
        return count / (3.0 * self.sequences_per_step)

    def losses(self) -> Losses:
        """Return one loss per chosen sequence, at the current weights."""
        losses: Losses = []
        for index in self._current:
            losses += self.evaluate(self.batches[index])[: self.sizes[index]]
            self.forward_passes += 1
            self.cost_steps += self.sizes[index] / (3.0 * self.sequences_per_step)
        return losses

    def state_dict(self) -> dict:
        return {"next_batch": self.next_batch, "forward_passes": self.forward_passes, "cost_steps": self.cost_steps}

    def load_state_dict(self, state: dict) -> None:
        self.next_batch = state["next_batch"] % len(self.batches)
        self.forward_passes = state["forward_passes"]
        self.cost_steps = state["cost_steps"]


# The sequences.


class SequenceLosses:
    """
    Evaluates one collated batch to one loss per sequence, in evaluation mode and without gradients.

    Where the trainer's loss is the usual shifted cross-entropy, all sequences go through the model together and their
    losses are read from the logits; this is checked against the trainer's own loss on the first batch. Any other loss
    (preference losses, auxiliary terms, a user's `compute_loss_func`) is asked for sequence by sequence.
    """

    TOLERANCE = 1e-2
    MOST_LOGIT_BYTES = 2**30

    def __init__(self, trainer, plugins: PluginList):
        self.trainer = trainer
        self.plugins = plugins
        self.from_logits: bool | None = None

    def batches(self) -> list:
        """The held-out sequences, collated as for an evaluation."""
        # Not `get_eval_dataloader`, whose loader of persistent workers would be that of later evaluations. Starting to
        # iterate draws from the global generator, which the training data and dropout are drawn from as well.
        with torch.random.fork_rng(devices=[]):
            return list(self.trainer.get_test_dataloader(self.trainer.probe_dataset))

    @staticmethod
    def size(batch) -> int:
        """Sequences in a batch."""
        return find_batch_size(batch) or 0

    def __call__(self, batch) -> list[float]:
        trainer = self.trainer
        model = trainer.model
        was_training = model.training
        model.eval()
        try:
            self.plugins.call("before_probe")
            with torch.no_grad(), trainer.compute_loss_context_manager():
                losses = self._losses(model, trainer._prepare_inputs(batch))
        finally:
            self.plugins.call("after_probe")
            model.train(was_training)
        return trainer.accelerator.gather(losses).float().tolist()

    def _losses(self, model, inputs) -> torch.Tensor:
        if self.from_logits is not False and not self._too_many_logits(inputs):
            loss, outputs = self.trainer.compute_loss(model, dict(inputs), return_outputs=True)
            losses, counts = _token_losses(outputs, inputs)
            if self.from_logits is None:
                self.from_logits = losses is not None and self._agrees(loss, losses, counts)
            if self.from_logits:
                return losses / counts.clamp(min=1)
        return self._one_by_one(model, inputs)

    def _one_by_one(self, model, inputs) -> torch.Tensor:
        return torch.stack([self._loss(model, _row(inputs, index)) for index in range(self.size(inputs))])

    def _loss(self, model, inputs) -> torch.Tensor:
        """Return a sequence's loss as the trainer computes it, or 0 if it is NaN because no label must be predicted."""
        loss = self.trainer.compute_loss(model, inputs).detach().reshape(())
        labels = inputs.get("labels")
        unlabelled = torch.is_tensor(labels) and labels.dim() == 2 and not labels[:, 1:].ne(-100).any()
        return torch.zeros_like(loss) if unlabelled and loss.isnan() else loss

    def _too_many_logits(self, inputs) -> bool:
        """Return the losses sequence by sequence, in chunks, for a vocabulary whose loss is computed in chunks."""
        labels = inputs.get("labels")
        if not self.trainer.loss_in_chunks or labels is None:
            return False
        config = self.trainer.model.config.get_text_config()
        return labels.numel() * config.vocab_size * 4 > self.MOST_LOGIT_BYTES

    def _agrees(self, loss: torch.Tensor, losses: torch.Tensor, counts: torch.Tensor) -> bool:
        mean = losses.sum() / counts.sum().clamp(min=1)
        return bool((mean - loss.detach().float()).abs() <= self.TOLERANCE * mean.abs())


def _token_losses(outputs, inputs) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Summed cross-entropy per sequence and number of predicted tokens, `None` where logits and labels do not match."""
    logits = outputs.get("logits") if isinstance(outputs, dict) else getattr(outputs, "logits", None)
    labels = inputs.get("labels")
    if logits is None or labels is None or logits.dim() != 3 or logits.shape[:2] != labels.shape:
        return None, None
    targets = labels[:, 1:]
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), targets, reduction="none", ignore_index=-100)
    return losses.sum(dim=1), targets.ne(-100).sum(dim=1)


def _row(inputs, index: int) -> dict:
    """Return one sequence of a batch. Tensors and lists as long as the batch are cut; everything else is passed on."""
    size = SequenceLosses.size(inputs)
    return {
        name: value[index : index + 1] if hasattr(value, "__len__") and len(value) == size else value
        for name, value in inputs.items()
    }


def keep_differentiable(model: torch.nn.Module) -> None:
    """
    Keep bitsandbytes' 4-bit layers trainable, also after the model is evaluated on a CPU.

    On CPUs with bf16 instructions these layers pack their weights anew at the first evaluation, for a kernel whose
    backward pass is wrong without an error: cosines with the right gradients were measured down to 0.56.

    Raises:
        ValueError: If the layers are packed already.
    """
    for name, module in model.named_modules():
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
            raise ValueError(
                f"`model` was evaluated on the CPU, and bitsandbytes packed the 4-bit weights of `{name}` (and others) "
                "anew for it: gradients would be wrong. Load the model again, and create the trainer before anything "
                "is evaluated or generated."
            )
        module.support_avx512bf16_for_cpu = False


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
