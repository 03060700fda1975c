"""
Losses that read more than labels: rewards of pairs, KTO, ORPO, distillation, label smoothing, and those of a user.

They read the score of the last token, logits, or hidden states. So the backbones of their models compute flat rows and
give the states back as padded batches (exchange.py), and head and loss are the trainer's own. Padding has the state of
another token there. A loss that reads it would be another one. Those of the trainers in [`KNOWN`] do not, and of any
loss `share_rows="on"` says that it does not.

**Is it read?** Of other losses the first step with padding is computed as it is, and the gradient tells: that of the
states of padding is zero, or the loss reads them, and batches stay padded for good. No function of a user is called for
this. A loss may read them later in a run: the gradient is looked at in every step, and a warning names the one step
whose update read states of another token. A pass without a gradient is computed as it is. A loss that detaches states
of padding is not noticed. Where code of a user is in the model (a hook, a module, a `forward`), a loss may read what
that leaves, and batches stay padded.

For a reward model it is nothing that the head scores padding; where the vocabulary is large beside the layers, less is
saved than in SFT.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_hybrid.machine import PendingRead, mixed_precision_of, sharding_of
from hf_hybrid.part import Step
from hf_hybrid.rows.attention import FlatRow
from hf_hybrid.rows.exchange import Exchange
from hf_hybrid.rows.tree import Rows, rows_of_states
from hf_hybrid.run.trainer_view import IN_PLACE, TrainerView, overridden, own_losses

KNOWN = {("trl", f"{kind}Trainer") for kind in ("Reward", "KTO", "Distillation", "GKD", "CPO", "ORPO", "TPO")}
"""Trainers of TRL whose losses read no padding."""
MODELS = ("model", "ref_model", "teacher_model")
"""Attributes of a trainer with the models that its loss computes."""
OF_LOSSES = ("loss", "logp", "log_prob", "forward")
"""In names of methods of TRL's trainers: those that read what a model returns."""


class RowsForAnyLoss(Exchange):
    """Lets the backbones of a trainer's models compute batches as trees, whatever the loss does with their states."""

    reads_labels = False

    def __init__(self, trainer: TrainerView, reason_plain: str | None = None, is_known: bool = True):
        super().__init__(reason_plain=reason_plain, half_precision=mixed_precision_of(trainer.args) != "no")
        self.trainer = trainer
        self.asks = self.watches = not is_known
        self._is_answered = False
        self._watched: list[PendingRead] = []
        """Of the passes of a step: whether the gradient of padding was not zero."""
        self._parts: list[Any] = []
        """What a user has put in of the loss."""

    @property
    def models(self) -> list[nn.Module]:  # ty: ignore[incompatible-property-override]
        """Those that the trainer's loss computes, without what wraps them for several devices."""
        found = (getattr(self.trainer, name, None) for name in MODELS)
        return [self.trainer.accelerator.unwrap_model(model) for model in found if isinstance(model, nn.Module)]

    def begin_step(self, step: Step) -> None:
        super().begin_step(step)
        self.asks, self._is_answered = self.asks and not self._is_answered, False
        self._look_at_gradients()
        self._look_at_loss()

    def end(self) -> None:
        self._look_at_gradients()
        super().end()

    def _look_at_gradients(self) -> None:
        """Keep rows padded from here on if the gradient of padding was not zero in the step before."""
        if any(read.read() for read in self._watched) and self.reason_plain is None:
            name, step = self._name_of_loss, self.trainer.state.global_step - 1
            self.reason_plain = f"the loss of `{name}` reads states of padding since step {step}"
            self.fallbacks.cannot_be_exact(self.reason_plain, advice="That step read states of other tokens there.")
        self._watched.clear()

    @contextlib.contextmanager
    def evaluating(self, *models: nn.Module) -> Generator[None]:
        self._look_at_loss()
        with super().evaluating(*models):
            yield

    def _look_at_loss(self) -> None:
        """Ask again what the loss reads, if a user has put in a part of it."""
        trainer = self.trainer
        of_trl = [vars(kind) for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")]
        methods = sorted({name for methods in of_trl for name, method in methods.items() if callable(method)})
        place = overridden(trainer, *[name for name in methods if any([part in name for part in OF_LOSSES])])
        parts = [place, vars(trainer).get("compute_loss"), trainer.compute_loss_func]
        if parts != self._parts and (self._parts or place):
            self.asks = self.watches = trainer.hybrid_args.share_rows != "on"
        self._parts = parts

    def rows_foreseen(self, batch: Any) -> Rows | None:
        """Those of `input_ids`. A loss may generate, or put others together, of other tensors of tokens."""
        if not isinstance(batch, Mapping) or any("prompt" in name for name in batch):
            return None
        return rows_of_states(batch) if torch.is_tensor(batch.get("input_ids")) else None

    def reason_not_exchanged(self, model: nn.Module, inputs: Mapping[str, Any]) -> str | None:
        reason, facts = super().reason_not_exchanged(model, inputs), self.facts_of(model)
        if reason is not None or not self.watches:
            return reason
        hook = "a hook of yours" if facts.marks is not None and facts.marks.hooks else None
        in_place = facts.own_forward if (facts.own_forward or "").startswith(IN_PLACE) else None
        own = in_place or facts.user_module or hook
        return own and f"{own} may leave in the model what the loss of `{self._name_of_loss}` reads"

    def ask(self, model: nn.Module, inputs: Mapping[str, Any]) -> bool:
        mask = inputs.get("attention_mask")
        no_padding = not torch.is_tensor(mask) or bool(mask.all())
        if no_padding or self._pass.observed is not None or self.reason_not_exchanged(model, inputs) is not None:
            return False
        self.counts["tokens"] += int(mask.sum()) if self._is_counting else 0

        def see(grad: Tensor) -> None:
            self._is_answered = True  # from the next step on: a loss may put hooks into the model in its first call
            if grad[mask.to(grad.device) == 0].any():
                self.reason_plain = f"the loss of `{self._name_of_loss}` reads states of padding"
                self.fallbacks.cannot_be_exact(self.reason_plain)

        def behind(backbone: nn.Module, args: tuple, output: Any) -> None:
            hook.remove()
            if output[0].requires_grad:
                output[0].register_hook(see)

        hook = self.facts_of(model).backbone.register_forward_hook(behind)
        return True

    def watch(self, row: FlatRow, grad: Tensor) -> None:
        of_padding = grad.flatten(0, 1).abs().sum(-1).index_fill(0, row.places.to(grad.device), 0.0)
        self._watched.append(PendingRead(of_padding.any()))

    @property
    def _name_of_loss(self) -> str:
        place, *_ = self._parts or [None]
        if place is None and self.trainer.compute_loss_func is not None:
            return "compute_loss_func"
        own = own_losses(self.trainer)
        return place or (".".join(own[0][1:]) if own else type(self.trainer).__name__)


def reason_not_shared(trainer: TrainerView) -> str | None:
    """Return why batches stay padded, as far as that is known of the options."""
    args = trainer.args
    if (sharding := sharding_of(args)) is not None:
        return f"`{sharding}` wants equally many forward passes of all processes, and the first batch has more"
    if args.n_gpu > 1:
        return "`DataParallel` divides each batch over several GPUs"
    if args.torch_compile:
        return "`torch_compile=True` would compile the model anew for each length"
    if args.neftune_noise_alpha is not None:
        return f"`neftune_noise_alpha={args.neftune_noise_alpha}` scales its noise by the length of a padded row"
    return None
