"""Loss per held-out sequence, forward only, for whatever loss the trainer trains with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate.utils import find_batch_size

from hf_hybrid.phases import PluginList


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
        """Of one sequence, as the trainer computes it; 0 where it is NaN because there is no label to predict."""
        loss = self.trainer.compute_loss(model, inputs).detach().reshape(())
        labels = inputs.get("labels")
        unlabelled = torch.is_tensor(labels) and labels.dim() == 2 and not labels[:, 1:].ne(-100).any()
        return torch.zeros_like(loss) if unlabelled and loss.isnan() else loss

    def _too_many_logits(self, inputs) -> bool:
        """Of a vocabulary whose loss is computed in chunks: then sequence by sequence, in chunks as well."""
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
    """One sequence of a batch: every tensor (or list) as long as the batch is cut, the rest is passed as it is."""
    size = SequenceLosses.size(inputs)
    return {
        name: value[index : index + 1] if hasattr(value, "__len__") and len(value) == size else value
        for name, value in inputs.items()
    }


def keep_differentiable(model: torch.nn.Module) -> None:
    """
    Keep bitsandbytes' 4-bit layers as they can be trained, also when the model is evaluated on a CPU in between.

    On CPUs with bf16 instructions these layers pack their weights anew at the first evaluation, for a kernel whose
    backward pass is wrong without an error: cosines with the right gradients were measured down to 0.56.

    Raises:
        ValueError: If it has happened already.
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
