"""
Distillation: a student learns the distribution of a teacher, on answers that are given and on its own (TRL's GKD).

TRL's collator knows the last answer of a chat. Here rows come with labels, as those of SFT, so that every answer of a
chat is learned from; the student itself answers what stands before the last one.

TRL's distance makes ten tensors of the size of the logits. [`ChunkedDistance`] computes it a few tokens at a time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hf_hybrid.compat import trl_error
from hf_hybrid.machine import sharding_of
from hf_hybrid.optimizers import ask
from hf_hybrid.rows.tree import IGNORED
from hf_hybrid.run.run import as_before
from hf_hybrid.run.trainer_view import overridden
from hf_hybrid.streaming.layers import base_model
from hf_hybrid.streaming.loss import (
    DISTANCE_LOGITS,
    PROBE,
    ChunkedCausalLoss,
    ChunkedLossSwitch,
    checked_part,
    indices_that_count,
    sum_in_chunks,
    transfer_of,
)
from hf_hybrid.trainer import HybridTrainerMixin
from hf_hybrid.trl.sft_dpo import TRLConfigBase

try:
    from trl.experimental.gkd import GKDConfig, GKDTrainer
except ImportError as error:
    raise trl_error(error) from error


@dataclass
class HybridGKDConfig(TRLConfigBase, GKDConfig):
    """TRL's `GKDConfig` with the options of [`HybridArguments`]; `bf16` is as in [`HybridSFTConfig`]."""

    chunked_by_trl = False

    def __post_init__(self):
        super().__post_init__()
        for name in ("packing", "padding_free"):
            if getattr(self, name):
                raise ValueError(f"`{name}=True` does nothing where a student answers by itself. Leave it out.")


class ChunkedDistance:
    """The loss of TRL's `GKDTrainer`, without the logits of all tokens. Several threads may compute it."""

    def __init__(self, trainer: HybridGKDTrainer):
        self.trainer = trainer
        self.disagreement: str | None = None
        """Why the last [`agrees`] was `False`."""
        self._transfers: dict[nn.Module, tuple[float, float | None]] = {}

    def remove(self) -> None:
        """Nothing was changed."""

    def agrees(self, model: nn.Module, inputs: Mapping[str, Any], items: Any) -> bool:
        """Whether it is TRL's on a small part of a batch, by four small passes. Modes and generators are restored."""
        trainer, names = self.trainer, ("input_ids", "attention_mask", "labels")
        part = checked_part({name: inputs[name] for name in names}, ChunkedCausalLoss.CHECKED_TOKENS)
        try:
            with as_before(model, trainer.args.device):
                model.eval()
                for of in (model, trainer.teacher_model):
                    with self._states(of, torch.tensor(PROBE, device=trainer.args.device)):
                        arrived = of(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits
                    self._transfers[self._head(of)] = transfer_of(arrived, type(base_model(of)).__name__)
                own = GKDTrainer.compute_loss(trainer, model, part, num_items_in_batch=items)
                loss = self(model, part, items)
            half = own.dtype == torch.bfloat16 or trainer.accelerator.mixed_precision != "no"
            most = ChunkedCausalLoss.LOW_PRECISION_TOLERANCE if half else ChunkedCausalLoss.TOLERANCE
            equal = bool((loss - own).abs() <= most * own.abs())  # not with NaN either
            self.disagreement = None if equal else f"chunked loss `{loss.item()}`, TRL's own `{own.item()}`"
        except Exception as error:  # whatever a model raises that does something else with its logits
            self.disagreement = f"{type(error).__name__}: {error}"
        return self.disagreement is None

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any], items: Any) -> Tensor:
        trainer, given = self.trainer, {name: inputs[name] for name in ("input_ids", "attention_mask")}
        # The host waits for their number: before the first layer, and not behind the last.
        kept = indices_that_count(F.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED))
        student, dtype = self._passed(model, given, kept)
        trainer.teacher_model.eval()
        with torch.no_grad():
            teacher, of_teacher = self._passed(trainer.teacher_model, given, kept)

        def distance(part: Tensor, rows: slice) -> Tensor:
            with torch.no_grad():
                goal = self._logits(trainer.teacher_model, teacher[rows], of_teacher)
            logits = self._logits(model, part, dtype)
            return trainer.generalized_jsd_loss(logits, goal, beta=trainer.beta, reduction="sum")

        head = self._head(model)
        size = max(DISTANCE_LOGITS // len(head.weight), 1)
        total = sum_in_chunks(distance, student, [w for w in head.parameters() if w.requires_grad], size)
        return total / (max(len(kept), 1) if items is None else torch.as_tensor(items, device=total.device))

    def _head(self, model: nn.Module) -> Any:
        return ask(base_model(self.trainer.accelerator.unwrap_model(model)), "get_output_embeddings")

    def _passed(self, model: nn.Module, given: dict[str, Tensor], kept: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return what the head would score of the tokens `kept`, and the type in which the model gives logits."""
        with self._states(model) as states:
            dtype = model(**given).logits.dtype
        return states[0].flatten(0, 1)[kept.to(states[0].device)], dtype

    def _logits(self, model: nn.Module, states: Tensor, dtype: torch.dtype) -> Tensor:
        head = self._head(model)
        scale, cap = self._transfers[head]
        with self.trainer.accelerator.autocast():
            logits = head(states)
        logits = logits if scale == 1 else logits * scale
        return (logits if cap is None else torch.tanh(logits / cap) * cap).to(dtype)

    @contextlib.contextmanager
    def _states(self, model: nn.Module, stand_in: Tensor | None = None) -> Generator[list[Tensor]]:
        """
        Context in which the head of a model scores the first token of each row alone, on this thread, or gives
        `stand_in` numbers for it. The list has the states of all tokens.
        """
        head, thread, states = self._head(model), threading.get_ident(), []

        def before(_, args):
            if threading.get_ident() == thread:
                states.append(args[0])
                return (args[0][:, :1],)

        def behind(_, args, output):
            is_here = stand_in is not None and threading.get_ident() == thread
            return stand_in.expand(*output.shape[:-1], -1).clone() if is_here else output

        hooks = head.register_forward_pre_hook(before), head.register_forward_hook(behind)
        try:
            yield states
        finally:
            for hook in hooks:
                hook.remove()


class _DistanceSwitch(ChunkedLossSwitch):
    """Computes the distance in chunks where a student's cross-entropy would be."""

    def reason_not_chunked(self, trainer: Any) -> str | None:
        if (place := overridden(trainer, "compute_loss", "generalized_jsd_loss")) is not None:
            return f"`{place}` is not TRL's, and may read all of them"
        if (sharding := sharding_of(trainer.args)) is not None:
            return f"`{sharding}` has the whole head in a pass of the model alone"
        for name in ("model", "teacher_model"):
            model = trainer.accelerator.unwrap_model(getattr(trainer, name))
            head: Any = ask(base_model(model), "get_output_embeddings")
            if not torch.is_tensor(getattr(head, "weight", None)):
                return f"the head of `{name}` has no weight"
            if head._forward_hooks or head._forward_pre_hooks:
                return f"the head of `{name}` has hooks"
        return None

    def loss_of(self, trainer: Any) -> ChunkedDistance:
        return ChunkedDistance(trainer)


class HybridGKDTrainer(HybridTrainerMixin, GKDTrainer):  # ty: ignore[incompatible-method-override]
    """
    Drop-in for TRL's `GKDTrainer` that computes no padding, and what rows share once, in student and teacher. Rows may
    have `input_ids` and `labels` with a [`AnswersCollator`]. `chunked_loss` is the distance without all logits.
    """

    loss_switch = _DistanceSwitch

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # TRL turns the cache off where layers are recomputed, and then generates without recomputing.
        self.generation_config.use_cache = self.generation_kwargs["use_cache"] = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        chunked = self._chunked_loss
        if return_outputs or not chunked.applies(model, inputs, num_items_in_batch):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return chunked.loss(model, inputs, num_items_in_batch)


@dataclass
class AnswersCollator:
    """Pads rows with `input_ids` and `labels` on the left, and what stands before the last answer of each."""

    pad: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        labels = [torch.tensor(row["labels"]) for row in rows]
        prompts = [tokens[: _last_answer(label)] for tokens, label in zip(ids, labels)]
        batch = {"input_ids": (ids, self.pad), "labels": (labels, IGNORED), "prompts": (prompts, self.pad)}
        for name, parts in (("attention_mask", ids), ("prompt_attention_mask", prompts)):
            batch[name] = [torch.ones_like(part) for part in parts], 0
        return {
            name: pad_sequence(parts, batch_first=True, padding_value=float(fill), padding_side="left")
            for name, (parts, fill) in batch.items()
        }


def _last_answer(labels: torch.Tensor) -> int:
    """Return where the last stretch of learned tokens begins, behind at least one token."""
    before = (labels == IGNORED).nonzero()
    last = int((labels != IGNORED).nonzero()[-1])
    return max(int(before[before < last].max()) + 1 if (before < last).any() else 0, 1)
