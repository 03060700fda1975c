"""
Every token once, under any loss: the backbone computes a flat row, and gives its states back as a padded batch.

exchange.py exchanges batch and labels around a whole model, because it knows what the loss reads: labels. Other losses
read what they want: the score of the last token (reward models), logits (CPO, ORPO), hidden states (distillation). So
here hooks of torch exchange less, around the backbone alone:

    padded batch -> [before the backbone] -> flat row -> backbone -> [behind it] -> padded states -> head, loss

Every token of a row is computed, padding is not, and what rows share is computed once. States are copied to where the
padded batch has them. So head and loss are the trainer's own, and find nothing changed but the states of padding, which
are zero. A loss that reads these would be another one; that of the trainers in [`KNOWN`] does not, and for others, and
where a user has put in a part of it, `share_rows="on"` says so. The states of the first batch are compared with those
of padded rows.

The head scores padding as before. For a reward model that is nothing; where the vocabulary is large beside the layers,
less is saved than in SFT.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_hybrid.compat import cache_name
from hf_hybrid.machine import mixed_precision_of, sharding_of
from hf_hybrid.part import Step
from hf_hybrid.rows.attention import ARGUMENT
from hf_hybrid.rows.exchange import IF_NO_PADDING, Exchange, FlatRow, ModelFacts, with_states
from hf_hybrid.rows.recurrent import by_row
from hf_hybrid.rows.tree import IGNORED, Batch, Rows, Tree, divide, on_host
from hf_hybrid.run.trainer_view import TrainerView, overridden

KNOWN = {("trl", f"{kind}Trainer") for kind in ("Reward", "KTO", "Distillation", "CPO", "ORPO", "TPO")}
"""Trainers of TRL whose losses read no padding."""
MODELS = ("model", "ref_model", "teacher_model")
"""Attributes of a trainer with the models that its loss computes."""
TAKEN = {"input_ids", "attention_mask"}
"""Tensors that a backbone may be given."""
OF_LOSSES = ("loss", "logp", "log_prob", "forward")
"""In names of methods of TRL's trainers: those that read what a model returns."""


def rows_of_states(ids: Tensor, mask: Tensor) -> Rows:
    """
    Return rows of which every token predicts something: tokens, mask and labels, each `[batch, length + 1]`.

    One more column is there for what the last token of a row predicts.
    """
    more = torch.zeros_like(ids[:, :1])
    labels = torch.zeros_like(ids).masked_fill(mask == 0, IGNORED)  # any token will do: nobody scores it
    return (
        torch.cat([ids, more], dim=1),
        torch.cat([mask.to(ids.dtype), more], dim=1),
        torch.cat([more + IGNORED, labels], dim=1),
    )


def scores_hidden(model: Any, ids: Tensor, mask: Tensor) -> bool:
    """
    Whether a model scores a token that the mask hides. One that classifies rows scores the last token of each that is
    not the padding token, whatever the mask says.
    """
    if not type(model).__name__.endswith("ForSequenceClassification"):
        return False
    last = ((ids != model.config.get_text_config().pad_token_id) * torch.arange(ids.shape[1])).argmax(dim=1)
    return bool((mask.gather(1, last[:, None]) == 0).any())


def in_padded_rows(states: Tensor, row: FlatRow) -> Tensor:
    """Return the states of a flat row, `[1, slots, width]`, as those of a padded batch, `[batch, length, width]`."""
    rows, length = row.shape[0], row.shape[1] - 1
    slots, readers, places = (part.to(states.device) for part in (row.slots, row.readers, row.places))
    empty = states.new_zeros(rows * length, states.shape[-1])
    return empty.index_put((places,), states[0][slots[readers]]).view(rows, length, -1)


class RowsForAnyLoss(Exchange):
    """
    Lets the backbones of a trainer's models compute batches as trees, whatever the loss does with their states.

    It counts as [`Exchange`] does.
    """

    def __init__(self, trainer: TrainerView, reason_plain: str | None = None):
        super().__init__(reason_plain=reason_plain, half_precision=mixed_precision_of(trainer.args) != "no")
        self.trainer = trainer

    @property
    def models(self) -> list[nn.Module]:
        """Those that the trainer's loss computes, without what wraps them for several devices."""
        found = (getattr(self.trainer, name, None) for name in MODELS)
        return [self.trainer.accelerator.unwrap_model(model) for model in found if isinstance(model, nn.Module)]

    @contextlib.contextmanager
    def around(self) -> Generator[None]:
        """Context for forward and backward pass of a micro-batch."""
        with super().around():
            for model in self.models:
                self._open(model)
            yield

    @contextlib.contextmanager
    def evaluating(self, *models: nn.Module) -> Generator[None]:
        self._look_at_loss()
        with super().evaluating(*models, *self.models):
            yield

    def begin_step(self, step: Step) -> None:
        super().begin_step(step)
        self._look_at_loss()

    def _look_at_loss(self) -> None:
        """Keep rows padded from here on if a user has put in a part of the loss."""
        of_trl = [vars(kind) for kind in type(self.trainer).__mro__ if kind.__module__.startswith("trl.")]
        methods = sorted({name for methods in of_trl for name, method in methods.items() if callable(method)})
        place = overridden(self.trainer, *[name for name in methods if any([part in name for part in OF_LOSSES])])
        if place is not None and self.reason_plain is None and self.trainer.hybrid_args.share_rows != "on":
            self.reason_plain = f"`{place}` may read states of padding"
            self.fallbacks.cannot_be_exact(self.reason_plain, advice=IF_NO_PADDING)

    # The exchange.

    def _open(self, model: nn.Module) -> None:
        facts = self.facts_of(model)
        if model in self._opened or not self.may_share or facts.reason is not None:
            if reason := self.reason_plain or facts.reason:
                self.fallbacks.cannot_be_exact(reason)
            return
        self._opened[model] = stack = contextlib.ExitStack()
        before = functools.partial(self._exchange, model, facts)
        stack.callback(facts.backbone.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
        stack.callback(facts.backbone.register_forward_hook(self._put_back).remove)
        stack.enter_context(by_row(facts.with_state, lambda: self._under_way.row is not None))

    def _exchange(self, model: nn.Module, facts: ModelFacts, backbone: nn.Module, args: tuple, inputs: dict[str, Any]):
        """Exchange a padded batch for a flat row."""
        way = self._under_way
        way.row = None
        if way.comparing == "padded":
            return None
        given = {**dict(zip(("input_ids", "attention_mask"), args)), **inputs}
        if given.get(cache_name()) is not None or len(args) > 2:
            return None  # a model that generates
        if (reason := _obstacle(given)) is not None:
            self.fallbacks.cannot_be_exact(reason)
            return None
        tree, batch = self._tree_of(model, facts, given)
        if tree is None:
            return None
        ((_, row),) = FlatRow.of_window([(batch, tree)], given["input_ids"].device, repeats=False, balances=False)
        self._begin(model, row)
        flat = row.inputs(self._mask(row))
        names = ("input_ids", "attention_mask", "position_ids", "use_cache")
        return (), {**given, **{name: flat[name] for name in names}, ARGUMENT: row.layout}

    def _put_back(self, backbone: nn.Module, args: tuple, output: Any) -> Any:
        """Put the states where the padded batch has them."""
        way = self._under_way
        row, way.row = way.row, None
        if way.comparing is not None:
            way.hidden = output[0]
        if row is None:
            return None
        return with_states(output, in_padded_rows(output[0], row))

    # Whether.

    def _exchanged(self, model: nn.Module) -> nn.Module:
        """
        Return the backbone. The model is not called again within its own forward pass: accelerate gives it one object
        of autocast for all passes, which notes only once what to go back to.
        """
        return self.facts_of(model).backbone

    def _tree_of(self, model: nn.Module, facts: ModelFacts, given: Mapping[str, Any]) -> tuple[Tree | None, Batch]:
        """Return the tree of a batch, or `None` if the batch is computed as it is, and the batch on the host."""
        ids, mask = given["input_ids"], given.get("attention_mask")
        if (copied := self.host.known.get(ids)) is not None:  # in the comparison
            return copied.tree, copied.batch
        (batch,) = on_host([rows_of_states(ids, torch.ones_like(ids) if mask is None else mask)])
        if scores_hidden(facts.base, batch.ids[:, :-1], batch.mask[:, :-1]):
            self.fallbacks.cannot_be_exact("the model scores a token that the mask hides")
            return None, batch
        tree = self._tree_if_it_pays(model, facts, batch, ids.device)
        if self._is_counting:
            self._count(batch, tree, ids.numel())
        return tree, batch

    def _tree_if_it_pays(self, model: nn.Module, facts: ModelFacts, batch: Batch, device: torch.device) -> Tree | None:
        def compute(inputs: dict[str, Tensor]) -> None:
            ids, mask = (inputs[name][:, :-1] for name in ("input_ids", "attention_mask"))
            self.host.known[ids] = self.host.known[inputs["input_ids"]]
            facts.backbone(input_ids=ids, attention_mask=mask, use_cache=False)

        plan = self._plan(model, [batch], functools.partial(divide, most=float("inf")), device, True, False)
        if not plan.trees or plan.cost > self.worth * plan.padded:
            return None
        (tree,) = plan.trees
        return tree if self._is_same(model, tree, [batch], compute, device) else None


def _obstacle(given: Mapping[str, Any]) -> str | None:
    """Return why what a backbone is given is not rows of tokens and nothing else."""
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if not torch.is_tensor(ids) or ids.dim() != 2:
        return "a batch holds no `input_ids`"
    if mask is not None and (not torch.is_tensor(mask) or mask.shape != ids.shape):
        return "the mask of a batch has another shape than its tokens"
    tensors = {name for name, value in given.items() if torch.is_tensor(value) and value.dim()}
    if others := sorted(tensors - TAKEN):
        return f"a batch holds `{others[0]}` beside tokens"
    names = ("output_hidden_states", "output_attentions", "output_router_logits")
    if asked := [name for name in names if given.get(name)]:
        return f"the loss reads more of the model (`{asked[0]}`)"
    return None


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
