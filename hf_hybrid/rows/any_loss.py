"""
Trainers whose losses read states of a model: rewards of pairs, KTO, CPO, ORPO, TPO, distillation.

They read the score of the last token, logits, or hidden states. So the backbones of their models compute flat rows and
give the states back as padded batches (exchange.py), and head and loss are the trainer's own. A loss that reads states
of padding would be another one. Those of the trainers in [`KNOWN`] do not. For others, and where a user has put in a
part of a loss, `share_rows="on"` says so.

For a reward model it is nothing that the head scores padding; where the vocabulary is large beside the layers, less is
saved than in SFT.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from torch import nn

from hf_hybrid.machine import mixed_precision_of, sharding_of
from hf_hybrid.part import Step
from hf_hybrid.rows.exchange import Exchange
from hf_hybrid.run.trainer_view import TrainerView, overridden

IF_NO_PADDING = 'If your loss reads nothing of padding, `share_rows="on"` says so, and rows share.'
KNOWN = {("trl", f"{kind}Trainer") for kind in ("Reward", "KTO", "Distillation", "CPO", "ORPO", "TPO")}
"""Trainers of TRL whose losses read no padding."""
MODELS = ("model", "ref_model", "teacher_model")
"""Attributes of a trainer with the models that its loss computes."""
OF_LOSSES = ("loss", "logp", "log_prob", "forward")
"""In names of methods of TRL's trainers: those that read what a model returns."""


class RowsForAnyLoss(Exchange):
    """Lets the backbones of a trainer's models compute batches as trees, whatever the loss does with their states."""

    reads_labels = False

    def __init__(self, trainer: TrainerView, reason_plain: str | None = None):
        super().__init__(reason_plain=reason_plain, half_precision=mixed_precision_of(trainer.args) != "no")
        self.trainer = trainer

    @property
    def models(self) -> list[nn.Module]:  # ty: ignore[incompatible-property-override]
        """Those that the trainer's loss computes, without what wraps them for several devices."""
        found = (getattr(self.trainer, name, None) for name in MODELS)
        return [self.trainer.accelerator.unwrap_model(model) for model in found if isinstance(model, nn.Module)]

    def begin_step(self, step: Step) -> None:
        super().begin_step(step)
        self._look_at_loss()

    @contextlib.contextmanager
    def evaluating(self, *models: nn.Module) -> Generator[None]:
        self._look_at_loss()
        with super().evaluating(*models):
            yield

    def _look_at_loss(self) -> None:
        """Keep rows padded from here on if a user has put in a part of the loss."""
        of_trl = [vars(kind) for kind in type(self.trainer).__mro__ if kind.__module__.startswith("trl.")]
        methods = sorted({name for methods in of_trl for name, method in methods.items() if callable(method)})
        place = overridden(self.trainer, *[name for name in methods if any([part in name for part in OF_LOSSES])])
        if place is not None and self.reason_plain is None and self.trainer.hybrid_args.share_rows != "on":
            self.reason_plain = f"`{place}` may read states of padding"
            self.fallbacks.cannot_be_exact(self.reason_plain, advice=IF_NO_PADDING)


def reason_not_shared(trainer: TrainerView) -> str | None:
    """Return why batches stay padded, as far as that is known of the options."""
    args = trainer.args
    if trainer.memory.streams:
        return "layers are streamed (`memory`), and a comparison within a pass would fetch them out of turn"
    if (sharding := sharding_of(args)) is not None:
        return f"`{sharding}` wants equally many forward passes of all processes, and the first batch has more"
    if args.n_gpu > 1:
        return "`DataParallel` divides each batch over several GPUs"
    if args.torch_compile:
        return "`torch_compile=True` would compile the model anew for each length"
    if args.neftune_noise_alpha is not None:
        return f"`neftune_noise_alpha={args.neftune_noise_alpha}` scales its noise by the length of a padded row"
    return None
