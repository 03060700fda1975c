"""
Every token once: the part of a run that computes batches as trees (tree.py, attention.py).

A model gets a padded batch, and its loss is read from what it returns. While [`Exchange.on`] is open, hooks of torch
exchange both, and neither the model's code nor the trainer's notices. The backbone's hooks do it for any loss:

    padded batch -> [before the backbone] -> flat row -> backbone -> [behind it] -> padded states -> head, loss

Every token is computed, padding is not, and what rows share is computed once. Head and loss are the trainer's own, and
find nothing changed but the states of padding. The head scores padding as before.

**Where the loss is known to read labels** ([`Exchange.reads_labels`]), hooks of the whole model exchange more:

    padded batch -> [before the model] -> flat row -> backbone -> [behind it] -> the slots that predict -> head, loss

- **Before the model** the labels become the targets, and rows end with their last one.
- **Behind the backbone** the hidden states of the slots that predict are taken out. So the head scores nothing else.
- **Behind the model** of TRL, values of each target are put where TRL expects them, in the layout of the batch.

How a loss reads a flat row says [`FlatRow`]. The parts of this room differ in what they exchange:
windows.py lays out the accumulation windows of `Trainer` and SFT, merging.py enters a model once for several
micro-batches of pairs, and any_loss.py has the trainers whose losses read states.

**Is it the same?** The gradient is, up to rounding: about 1e-6 in fp32. Four things guard it. What is known not to
work is not tried (the functions named `reason_not_...`). The first batch of every model is computed in both ways and
compared (comparison.py); so is the first batch with rows longer than the model's sliding window. A layer that asks for
an attention that a tree does not have raises an error in that comparison. And before a model is trained on trees, a
backward pass of few tokens is tried. After a mismatch or an error the padded rows are computed, and the log says why.

**Dropout** draws numbers for each token. A prefix draws its own once, for all rows that share it. So the loss of a row
has the distribution that it has in `Trainer`, and a sum of losses has the same expected gradient; only rows that share
become correlated. A loss that compares rows (a pair's, a router's) has another expectation, by terms of second order in
what is dropped: trees of a router's loss share nothing then. Which numbers a model draws is found by drawing
(randomness.py). If one number belongs to many tokens (layer drop), padded rows are computed.

**Is it worth it?** Only where a tree computes clearly less than the padded rows (costs.py).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hf_hybrid.compat import cache_name
from hf_hybrid.part import Part, Step
from hf_hybrid.recovery import is_out_of_memory
from hf_hybrid.rows.attention import ARGUMENT, FlatRow, Layout, attention, no_mask, tree_attention
from hf_hybrid.rows.comparison import Comparison, Observed
from hf_hybrid.rows.costs import WORTH, share_saved
from hf_hybrid.rows.facts import ModelFacts, Plan, dropout_of
from hf_hybrid.rows.images import FIRST, SHARED, Images, numbers_of, standing_in
from hf_hybrid.rows.randomness import Drawn, changed_buffer, drawn_numbers
from hf_hybrid.rows.recurrent import by_row
from hf_hybrid.rows.router_loss import OPTION, router_losses
from hf_hybrid.rows.tree import (
    ENDS,
    IGNORED,
    IMAGES,
    PACKED,
    Batch,
    Row,
    Rows,
    Tree,
    batches_of,
    divide,
    on_host,
    reason_not_documents,
    reason_not_rows,
    rows_of_states,
    unpacked,
)
from hf_hybrid.run.fallbacks import Fallbacks
from hf_hybrid.run.run import Run
from hf_hybrid.run.trainer_view import IN_PLACE, module_of_user

logger = logging.getLogger(__name__)

COUNTS = ("tokens", "tokens_padding", "tokens_shared", "micro_batches_saved")
OF_IMAGES = ("images", SHARED)
"""How many stand in rows, and how many of them were not encoded."""
MICRO_BATCHES, DIVISORS = "hybrid_micro_batches", "hybrid_divisors"
"""Names of [`Batch.micro_batches`] and [`Batch.divisors`] in a batch that windows.py laid out. No model gets them."""
Origins = tuple["Tensor | None", "Tensor | None"]
_OPTIONS = {"num_items_in_batch", "fused_lm_head", "use_cache", "return_dict", OPTION}
"""Arguments that trainers of the libraries give a model beside a batch."""
_ASKED = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Arguments of a backbone that ask for more than states."""


# Batches on the host.


Seen = dict[str, tuple[Tensor, int, "Tensor | None"]]
"""Tensors by their names, their versions, and copies of those on the host."""


@dataclass
class Copied:
    """A batch on the host, its tree if it was laid out, and the row of that tree if it is on the device already."""

    batch: Batch
    tree: Tree | None = None
    row: FlatRow | None = None
    seen: Seen = field(default_factory=dict)
    """What it was copied from, where that tells whether a user's code changed it."""
    again: Mapping[int, int] | None = None
    """Its images that later micro-batches of the window have, see [`Images.in_turn`], once they are known."""


class LaidOut(NamedTuple):
    """A micro-batch as it was when its window began: its tensors, what a model gets of them, and all on the host."""

    tensors: Seen
    copied: Copied
    here: Mapping[str, Any]


def seen_now(inputs: Mapping[str, Any]) -> Seen:
    """Return the tensors of inputs as they are now, to ask later if they still are ([`are_still`])."""
    tensors = {name: tensor for name, tensor in inputs.items() if torch.is_tensor(tensor)}
    copies = {name: tensor.clone() for name, tensor in tensors.items() if tensor.device.type == "cpu"}
    return {name: (tensor, tensor._version, copies.get(name)) for name, tensor in tensors.items()}


def are_still(seen: Seen, inputs: Mapping[str, Any]) -> bool:
    """Whether inputs hold these tensors, and nobody has written into them."""
    for name, (tensor, version, copy) in seen.items():
        if inputs.get(name) is not tensor or tensor._version != version:
            return False
        if copy is not None and not torch.equal(tensor, copy):  # torch does not count what numpy writes
            return False
    return True


class HostBatches:
    """
    The batches of a step on the host, each known by its `input_ids`. Where a trainer puts tokens together anew for each
    pass (GRPO), it names the tensor that they are known by.
    """

    def __init__(self) -> None:
        self.known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """[`Copied`] of batches, by the tensor that they are known by."""
        self.named: Tensor | None = None

    @contextlib.contextmanager
    def computing(self, tensor: Tensor) -> Generator[None]:
        """Inside, a model gets tokens that the trainer has just put together. `tensor` is what they are known by."""
        self.named = tensor
        try:
            yield
        finally:
            self.named = None

    def copied(self, inputs: Mapping[str, Any]) -> Copied:
        """Return a batch on the host: as it was copied ahead, or else copied now."""
        known_by = inputs["input_ids"] if self.named is None else self.named
        if (copied := self.known.get(known_by)) is not None and are_still(copied.seen, inputs):
            return copied
        copied = Copied(batches_of([inputs])[0])
        if known_by.device.type != "cpu":  # else it is no copy, and would keep the key alive
            self.known[known_by] = copied
        return copied


# The exchange.


class _Pass(threading.local):
    """The forward pass of this thread: the micro-batches of a window may go through a model on several."""

    row: FlatRow | None = None
    router: Tensor | None = None  # sum of the router's losses
    joint: Any = None  # what several micro-batches are computed in (merging.py)
    observed: Observed | None = None  # in a comparison


class Exchange(Part):
    """
    Lets models compute batches as trees.

    It counts `tokens` (of all rows, without padding, on this process), and what was not computed:
    `tokens_padding`, and `tokens_shared`, to which tokens without influence on a label belong. `plain_rows_because` in
    the summary says why the last batch that was computed as it is was.

    With `off` it does nothing. `reason_plain` says why no batch is exchanged in this run. `half_precision` tells
    whether models compute in bf16 or fp16, and `compiles` whether their layers are compiled.
    """

    name = "shared_rows"
    needs_numbers = False
    in_every_pass = True
    """Whether the trainer opens [`around`] for every micro-batch, not only for those that were laid out."""
    reads_labels = True
    """Whether the loss is known to read what predicts labels, and nothing else of a model."""
    asks = watches = False
    """Whether the gradient has yet to tell what the loss reads, and may tell otherwise later (any_loss.py)."""
    unforeseen: tuple[str, ...] = ()
    """What [`rows_foreseen`] does not know, in clauses."""
    models: Sequence[nn.Module] = ()
    """Those that are open in every pass; others are opened where they are computed."""

    def __init__(
        self,
        off: bool = False,
        reason_plain: str | None = None,
        half_precision: bool = False,
        compiles: bool = False,
    ):
        self.off, self.reason_plain, self.compiles = off, reason_plain, compiles
        self.worth = float("inf") if compiles else WORTH
        """Rows are exchanged for trees that cost less than this share of them; compiled layers get no other shape."""
        self.fallbacks = Fallbacks("Rows are computed padded, each for itself (`share_rows`)")
        self.shares_nothing = Fallbacks("Padding is left out, but no shared prefix (`share_rows`)")
        self._drew_first: weakref.WeakKeyDictionary[nn.Module, Drawn] = weakref.WeakKeyDictionary()
        """What models drew in training when the run began."""
        self._draws_late = False
        self.draws_once = False
        """Whether rows shared a prefix under dropout."""
        self.apart = Fallbacks("Each micro-batch is computed by itself (`share_rows`)")
        self.counts: Counter[str] = Counter()
        """Those of the run, once it begins."""
        self._facts: weakref.WeakKeyDictionary[nn.Module, ModelFacts] = weakref.WeakKeyDictionary()
        self._looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Models whose facts are those of the step under way."""
        self.host = HostBatches()
        self.images: Images | None = None
        """Those of the step under way, once it has some."""
        self.comparison = Comparison(self, half_precision)
        self._opened: dict[nn.Module, contextlib.ExitStack] = {}
        self._layouts: list[Layout] = []
        """Those that are known, for the backward passes that follow."""
        self._attended = False
        """Whether attentions computed the last ones."""
        self._backward_follows = self._is_laid_out = self._said_drawn = False
        self._pass = _Pass()
        self._is_counting = True
        self._window: list[LaidOut] = []
        self._acts: str | None = None
        """What code of a user acts between micro-batches."""
        self.ends_window = False
        """Whether the micro-batch under way is the last one of its window."""
        self.repeats = False
        """Whether a window is computed again if memory runs out."""
        self._holds_images, self._has_held = True, False
        """Whether an encoder's activations are held until the last pass that reads an image, and some were."""

    @property
    def plain_because(self) -> str | None:
        """Why the last batch that was computed as it is was; or why prefixes are not shared."""
        return self.fallbacks.because or self.shares_nothing.because

    @property
    def failed(self) -> Sequence[str]:
        return self.fallbacks.failed

    @property
    def may_share(self) -> bool:
        """Whether batches may be exchanged, as far as is known."""
        return not self.off and self.reason_plain is None

    @property
    def attended(self) -> bool:
        """Whether attentions computed a tree that is under way, or the last ones."""
        return self._attended or any(layout.attended for layout in self._layouts)

    # A run.

    def begin(self, run: Run) -> None:
        self.counts = run.counts
        for facts in self._facts.values():
            facts.drawn.clear()  # rates may have changed since the last training
        self._drew_first.clear()
        self._said_drawn = self._draws_late = False

    def clean_up(self) -> None:
        self.host.known.clear()
        self._window, self.images = [], None  # they lie on the device

    def begin_step(self, step: Step) -> None:
        self.host.known.clear()
        self._looked_at.clear()
        self._window, self.images = [], None

    def arrange(self, step: Step) -> None:
        """Lay out the micro-batches of a step anew, if this part does, once `on_step_begin` has been called."""
        self._acts = step.acts

    def end(self) -> None:
        """Say what was saved."""
        if self.counts["tokens"]:
            logger.info("%s", self._saved())

    def _saved(self) -> str:
        tokens, padding, shared, micro_batches = (self.counts[name] for name in COUNTS)
        if not micro_batches + shared + padding:
            return f"Rows were computed as they are: {self.plain_because}."
        return (
            f"{shared:,} of {tokens:,} tokens ({shared / tokens:.0%}) were shared or had no influence on a label, and "
            f"{padding:,} of padding were not computed; {micro_batches:,} micro-batches were left over."
        )

    def copy_ahead(
        self,
        tensors: Sequence[Tensor],
        batches: Iterable[Rows],
        here: Sequence[Mapping[str, Any]],
        seen: Iterable[Seen] = (),
    ) -> None:
        """
        Copy the micro-batches of a window to the host at once: the host waits for the device at every copy. `tensors`
        are what a model will get of each, or what [`HostBatches.computing`] will name. `here` are all of their tensors,
        and `seen` those that code of a user may change.
        """
        self.host.known.clear()
        self._window = []
        if self.may_share:
            for tensor, batch, inputs, before in itertools.zip_longest(tensors, on_host(list(batches)), here, seen):
                self.host.known[tensor] = copied = Copied(batch)
                self._window.append(LaidOut(before or {}, copied, inputs))

    def number_of(self, inputs: Mapping[str, Any], may_change: bool) -> int | None:
        """Return which micro-batch of the window these are. `may_change`: a trainer makes others of them."""
        window = () if may_change else enumerate(self._window)
        number = next((number for number, laid_out in window if are_still(laid_out.tensors, inputs)), None)
        if number is None and torch.is_tensor(ids := inputs.get("input_ids")):
            self.host.known.pop(ids, None)  # other parts of the batch are new
        return number

    def summary(self) -> dict[str, Any]:
        counts = {name: self.counts[name] for name in (*COUNTS, *OF_IMAGES * bool(self.counts["images"]))}
        return {**counts, "dropout_drawn_once": self.draws_once, "plain_rows_because": self.plain_because}

    def spare_memory(self) -> str | None:
        if self.images is not None:
            self.images.forget()
        has_held, self._has_held = self._has_held, False
        self._holds_images = self._holds_images and not has_held
        return "an image is encoded in each micro-batch that has it" if has_held else None

    def state_dict(self) -> dict[str, Any]:
        state = {"plain_because": self.plain_because, "draws_once": self.draws_once, "draws_late": self._draws_late}
        state["encodes_again"] = not self._holds_images
        return {name: value for name, value in state.items() if value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fallbacks.because = state.get("plain_because")
        self._holds_images = not state.get("encodes_again", False)
        self.draws_once, self._draws_late = state.get("draws_once", False), state.get("draws_late", False)

    # Open and closed. Recomputed layers need the attention of trees in the backward pass too.

    @contextlib.contextmanager
    def around(self, ends_window: bool) -> Generator[None]:
        """Context for forward and backward pass of a micro-batch: models that are opened in it stay open until then."""
        self._backward_follows, self.ends_window = True, ends_window
        try:
            for model in self.models:
                self._open(model)
            yield
            if self.images is not None and ends_window:
                self.images.run_backward(joined=True)
        finally:
            self._backward_follows = False
            self._close()

    @contextlib.contextmanager
    def on(self, *models: nn.Module | None) -> Generator[None]:
        """Exchange the batches that models get inside the context, and until the backward pass if one follows."""
        before = set(self._opened)
        for model in models:
            if model is not None:
                self._open(model)
        try:
            yield
        finally:
            if not (self._backward_follows and torch.is_grad_enabled()):
                self._close(before)

    @contextlib.contextmanager
    def evaluating(self, *models: nn.Module) -> Generator[None]:
        """As [`on`], for passes whose tokens are not those of the training."""
        self.host.known.clear()
        self._looked_at.clear()
        self.images = None
        before, self._is_counting, self._is_laid_out = self._is_counting, False, False
        try:
            with self.on(*models, *self.models):
                yield
        finally:
            self._is_counting = before

    def _open(self, model: nn.Module) -> None:
        inside: Any = getattr(model, "_orig_mod", None)
        if inside is not None and model.forward == inside.__call__:
            model = inside  # its layers are compiled (compiled.py), not the model as a whole
        if self.off or model in self._opened:
            return
        self._opened[model] = stack = contextlib.ExitStack()
        if self.reads_labels:
            stack.callback(model.register_forward_pre_hook(self._before_model, with_kwargs=True, prepend=True).remove)
        if (reason := self.reason_plain or (facts := self.facts_of(model)).reason) is not None:
            if not self.reads_labels:  # else it is said of a batch
                self.fallbacks.cannot_be_exact(reason)
            return
        if self.reads_labels:
            hooks: Any = model._forward_pre_hooks
            of_users = [number for number, hook in hooks.items() if facts.marks and hook in facts.marks.hooks]
            for number in reversed(of_users):  # they see the batch before it is exchanged, and may change it
                hooks.move_to_end(number, last=False)
            stack.callback(model.register_forward_hook(self._after_model, prepend=True).remove)
        if facts.with_state:
            stack.enter_context(by_row(facts.with_state, lambda: self._pass.row is not None))
        if facts.encoder is not None and self.reads_labels:
            row_of = lambda: getattr(self._pass.row, "images", None)  # noqa: E731
            stack.enter_context(standing_in(facts.encoder, row_of))
        before, options = functools.partial(self._before_backbone, model), {"prepend": not self.reads_labels}
        stack.callback(facts.backbone.register_forward_pre_hook(before, with_kwargs=True, **options).remove)
        behind = functools.partial(self._behind_backbone, model)
        stack.callback(facts.backbone.register_forward_hook(behind).remove)

    def _close(self, but: Iterable[nn.Module] = ()) -> None:
        for model in [model for model in reversed(self._opened) if model not in but]:
            self._opened.pop(model).close()
        if not self._opened:
            for layout in self._layouts:
                Layout.known.pop(layout.number, None)
                self._attended = layout.attended
            self._layouts.clear()

    def in_trees(self, model: nn.Module) -> contextlib.ExitStack:
        """Context in which a model attends along paths where it gets a tree, and as it is elsewhere."""
        configs, stack = self.facts_of(model).configs, contextlib.ExitStack()
        name = tree_attention(configs[0]._attn_implementation or "eager")
        for config in configs:
            stack.enter_context(attention(config, name))
        return stack

    def eager(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which compiled layers run as they are: what runs once does not pay for a compilation."""
        return torch.compiler.set_stance("force_eager") if self.compiles else contextlib.nullcontext()

    @contextlib.contextmanager
    def observing(self, observed: Observed) -> Generator[None]:
        """Context of a pass that is made to look, also within another one."""
        way, before, named = self._pass, self._pass.observed, self.host.named
        way.observed, self.host.named = observed, None
        try:
            yield
        finally:
            way.observed, self.host.named = before, named
            way.row = way.router = None

    def rows_foreseen(self, batch: Any) -> Rows | None:
        """Return rows that a model will get of a batch as it is loaded; `None` if that is not known (foreseen.py)."""
        return None

    # The exchange.

    def _before_model(self, model: nn.Module, args: tuple, inputs: dict[str, Any]):
        """Exchange a padded batch for a flat row, with the targets in place of labels."""
        way = self._pass
        way.row = way.router = way.joint = None
        origins = inputs.pop(MICRO_BATCHES, None), inputs.pop(DIVISORS, None)
        row = None if args else self._row_of(model, inputs, origins)
        return None if row is None else (args, {**inputs, **row.inputs(self._begin(model, row), labels=True)})

    def _before_backbone(self, model: nn.Module, backbone: nn.Module, args: tuple, inputs: dict[str, Any]):
        """
        Exchange a padded batch for a flat row, if nothing before the model has. Give the layout to the layers, and ask
        for router logits where the model was told to leave their loss out.
        """
        way = self._pass
        if not self.reads_labels:
            way.row = None
            inputs = {**dict(zip(("input_ids", "attention_mask"), args)), **inputs}
            as_is = inputs.get(cache_name()) is not None or len(args) > 2  # a model that generates
            if self.watches and way.observed is None:  # what no gradient tells of may be read as numbers
                as_is = as_is or not torch.is_grad_enabled() or (self.asks and self.ask(model, inputs))
            row = None if as_is else self._row_of(model, inputs)
            if row is not None:
                args, inputs = (), {**inputs, **row.inputs(self._begin(model, row), labels=False)}
        if (row := way.row) is None:
            return None
        return args, {**inputs, ARGUMENT: row.layout, **({} if row.reads is None else {OPTION: True})}

    def _behind_backbone(self, model: nn.Module, backbone: nn.Module, args: tuple, output: Any):
        """Take out the states of the slots that predict, and the router logits; or put states where rows have them."""
        way = self._pass
        if (observed := way.observed) is not None:
            if observed.cuts:
                output = with_states(output, output[0].detach().requires_grad_())
            observed.hidden = output[0]
        if (row := way.row) is None:
            return output
        if not self.reads_labels:
            way.row, states = None, row.states(output[0])
            if self.watches and states.requires_grad and observed is None:
                states.register_hook(functools.partial(self.watch, row))
            return with_states(output, states)
        if row.reads is not None and (logits := getattr(output, "router_logits", None)):
            router: Any = self.facts_of(model).router
            way.router = router_losses(logits, router.chosen, row.reads).sum()
            output.router_logits = None
        return with_states(output, output[0][:, row.slots.to(output[0].device)])

    def _after_model(self, model: nn.Module, args: tuple, output: Any):
        """Exchange the values of targets for those of the batch, where the caller reads any; add the router's loss."""
        way = self._pass
        row, way.row = way.row, None
        if self.images is not None and self.ends_window and way.observed is None and torch.is_grad_enabled():
            self.images.run_backward(joined=False)  # before processes wait for the gradients of this pass
        if way.observed is not None:
            way.observed.router = way.router if row is not None else getattr(output, "aux_loss", None)
        joint, way.joint = way.joint, None
        if row is None:
            return None
        if getattr(output, "log_probs", None) is None:
            if row.divisors is not None:
                output["loss"] = mean_losses(output.logits[0], row.tokens, row.divisors)
            if way.router is not None:
                router: Any = self.facts_of(model).router
                output.loss = output.loss + router.weight * way.router.to(output.loss.device)
                output.aux_loss = way.router
            return None
        values = row.values(values_in(output) if joint is None else joint.values_of(output))
        if row.divisors is not None:  # TRL divides the sum by all labels
            values["log_probs"] = values["log_probs"] * (values["label_mask"].sum() / row.divisors)[:, None]
        return type(output)(**values, **({} if way.router is None else {"aux_loss": way.router}))

    def _begin(self, model: nn.Module, row: FlatRow) -> Tensor:
        """Note that a model computes a flat row now, and its backward pass later. Return its mask."""
        way = self._pass
        way.row, Layout.known[row.layout.number] = row, row.layout
        self._layouts.append(row.layout)
        if way.observed is None:
            self._opened[model].enter_context(self.in_trees(model))
        number = 1 if self.compiles else row.layout.number  # a compiler would make it a constant
        return no_mask(row.ids.device, number, named=way.observed is not None)

    def ask(self, model: nn.Module, inputs: Mapping[str, Any]) -> bool:
        """Whether a batch is computed as it is, to see what its loss reads."""
        return False

    def watch(self, row: FlatRow, grad: Tensor) -> None:
        """Look at the gradient of states that were put where the padded batch has them."""

    # What rows a batch has.

    def _row_of(self, model: nn.Module, inputs: dict[str, Any], origins: Origins = (None, None)) -> FlatRow | None:
        """Return the flat row of a batch on its device; `None` if the batch is computed as it is."""
        observed = self._pass.observed
        if observed is not None and observed.tree is None:
            return None
        if (reason := self.reason_not_exchanged(model, inputs)) is not None:
            if not self.reads_labels or inputs.get("labels") is not None:  # else nothing could be left out
                self.fallbacks.cannot_be_exact(reason)
            return None
        if observed is not None and observed.tree is not None:
            copied = Copied(*observed.tree)
        elif self.reads_labels:
            copied = self.host.copied(inputs)
        elif inputs.get("position_ids") is None:
            copied = Copied(on_host([rows_of_states(inputs)])[0])
        else:
            copied = Copied(unpacked(inputs, rows_of_states))
        batch, tree, row = copied.batch, copied.tree, copied.row
        is_counted = tree is None and self._is_counting
        if tree is None:
            unread = self.reads_labels and (batch.images is None or copied.again is None)
            if unread and (facts := self.facts_of(model)).encoder is not None:
                is_first = copied.again is None and torch.is_grad_enabled()
                if is_first and any(copied is laid_out.copied for laid_out in self._window):
                    self._look_ahead(facts)
                coded = self.with_images(facts, inputs, copied.batch) if copied.batch.images is None else copied.batch
                if isinstance(coded, str):
                    self.fallbacks.cannot_be_exact(coded)
                    return None
                batch = copied.batch = coded
            if batch.packed is not None and (reason := reason_not_documents(inputs)) is not None:
                self.fallbacks.cannot_be_exact(reason)
                return None
            if origins[0] is not None:  # a part of a micro-batch that did not fit
                numbers, divisors = (None if origin is None else origin.cpu() for origin in origins)
                batch = batch._replace(micro_batches=numbers, divisors=divisors)
            tree = self._tree_of(model, inputs, batch)
            if is_counted:
                self._count([batch], tree, inputs["input_ids"].numel())
        if tree is None:
            return None
        for name in ENDS if batch.packed is not None else ():  # the tree says it
            inputs.pop(name, None)
        repeats, copied.row = self.reads_labels and not inputs.get("fused_lm_head"), None
        if row is None or row.repeats != repeats:
            balances = self.reads_labels and self.facts_of(model).balances(inputs)
            device = inputs["input_ids"].device
            options: Any = {"repeats": repeats, "balances": balances, "images": batch.images}
            ((rows,), _) = FlatRow.on(device, [(tree, [batch])], **options)
            row = rows[0]
            if row.images is not None:
                row = row._replace(images=row.images._replace(again=copied.again, is_counted=is_counted))
        return row

    def _look_ahead(self, facts: ModelFacts) -> None:
        """Read the images of the micro-batches of a window, and find out which of them later ones have too."""
        if self._holds_images and self._who_acts(facts) is None:
            self._code_ahead(facts)
            numbers = [numbers_of(laid_out.copied.batch.ids.numpy()) for laid_out in self._window]
            agains = self._in_turn(facts, numbers, [laid_out.copied.batch for laid_out in self._window])
            for laid_out, again in zip(self._window, agains):
                laid_out.copied.again = again

    def _code_ahead(self, facts: ModelFacts) -> bool:
        """Return whether the images of all micro-batches of a window can be read, and do; what cannot is said later."""
        copies = [(laid_out.copied, laid_out.here) for laid_out in self._window if laid_out.copied.batch.images is None]
        coded = [self.with_images(facts, here, copied.batch) for copied, here in copies]
        for (copied, _), batch in zip(copies, coded):
            copied.batch = batch if isinstance(batch, Batch) else copied.batch
        return not any(isinstance(reason, str) for reason in coded)

    def _in_turn(self, facts: ModelFacts, passes: Sequence[Collection[int]], batches: Sequence[Batch]) -> Sequence[Any]:
        """
        As [`Images.in_turn`]. Unless layers are recomputed, or a window is if memory runs out, no more is held than
        computing the largest of the `batches` takes.
        """
        images: Any = self.images
        if not self._holds_images:
            return [None] * len(passes)
        is_little = self.repeats or any(getattr(of, "gradient_checkpointing", False) for of in facts.encoder.modules())
        most = float("inf") if is_little else max(int((batch.ids >= FIRST).sum()) for batch in batches)
        found = images.in_turn(passes, most)
        self._has_held = any(found)
        return found

    def _who_acts(self, facts: ModelFacts) -> str | None:
        """Return what code of a user acts on each of several micro-batches."""
        marks = facts.marks
        if self._acts is None and marks is not None and marks.of_gradients:
            return f"a hook of yours (`{marks.hooks[0]!r:.60}`) sees each by itself"
        return self._acts

    def _tree_of(self, model: nn.Module, inputs: Mapping[str, Any], batch: Batch) -> Tree | None:
        """Return the tree of a batch, or `None` if the batch is computed as it is."""
        facts, device, compute = self.facts_of(model), inputs["input_ids"].device, model
        if self.reads_labels:
            fused = bool(inputs.get("fused_lm_head"))
            # In a step: parts of a micro-batch after an out-of-memory, but no passes that other parts make to look.
            if (self._is_laid_out and not model.training) or not (fused or facts.adds_up):
                return None
            # A part of rows without labels has a loss too.
            compact, whole = fused and device.type == "cuda", facts.balances(inputs) or batch.divisors is not None
            compute = self._computing(model, inputs)
        else:
            if facts.scores_hidden(batch):
                self.fallbacks.cannot_be_exact("the model scores a token that the mask hides")
                return None
            compact, whole, compute = True, False, functools.partial(_states_of, facts.backbone)
        plan = self._plan(model, [batch], functools.partial(divide, most=float("inf")), device, compact, whole)
        # Parts of several micro-batches have several router's losses and means, which padded rows do not.
        worth = self.worth if batch.images is None else max(self.worth, 1.0)  # others may have an image too
        if not plan.trees or (plan.cost > worth * plan.padded and batch.micro_batches is None):
            return None
        (tree,) = plan.trees
        return tree if self._is_same(model, tree, [batch], compute, device) else None

    def _computing(self, model: nn.Module, inputs: Mapping[str, Any]) -> Callable[[dict[str, Tensor]], Any]:
        """Return what computes other rows with the arguments of a batch; rows bring their images and documents."""
        own = (*ENDS, "position_ids", *self.facts_of(model).of_images)
        beside = {name: value for name, value in inputs.items() if name not in own}
        return lambda rows: model(**{**beside, **rows})

    def _count(self, batches: Sequence[Batch], tree: Tree | None, places: int) -> None:
        """Count the tokens of batches of so many places, padding included."""
        tokens = sum(batch.tokens for batch in batches)
        self.counts["tokens"] += tokens
        if self.images is not None:
            self._count_images(batches, tree is not None)
        if tree is not None:
            self.counts["tokens_padding"] += places - tokens
            self.counts["tokens_shared"] += tokens - tree.size

    def with_images(self, facts: ModelFacts, inputs: Mapping[str, Any], batch: Batch) -> Batch | str:
        """Return a batch of a model that sees with codes of its images, or why it cannot be read."""
        self.images = self.images or Images(self.counts)
        self.images.keeps = self._who_acts(facts) is None
        return self.images.coded(facts.encoder, inputs, batch, facts.sees)

    def _count_images(self, batches: Sequence[Batch], is_exchanged: bool) -> None:
        """Count the images of batches. What is encoded of those that are exchanged is taken off later."""
        images: Any = self.images
        count = sum(images.count(batch)[0] for batch in batches if batch.images is not None)
        self.counts["images"] += count
        self.counts[SHARED] += count * is_exchanged

    # Whether.

    def facts_of(self, model: nn.Module) -> ModelFacts:
        """Return what is known of a model. What a user has changed since the last step is found out again."""
        facts = self._facts.get(model)
        if facts is None or model not in self._looked_at:
            if facts is None or not (facts.reason is not None or facts.is_still(model)):
                facts = self._facts[model] = ModelFacts.of(model, compiles=self.compiles)
                if facts.reason is None:
                    facts.is_still(model)
            self._looked_at.add(model)
        return facts

    def reason_not_exchanged(self, model: nn.Module, inputs: Mapping[str, Any]) -> str | None:
        """Return why a batch is computed as it is, if that is known before anything is copied to the host."""
        if self.reason_plain is not None:
            return self.reason_plain
        if self.reads_labels:
            facts = self.facts_of(model)
            own = {"balances": facts.balances(inputs), "fused": "fused_lm_head" in inputs}
            return reason_not_rows(inputs, {*_OPTIONS, *facts.of_images}) or self.reason_not_trees(facts, **own)
        if asked := [name for name in _ASKED if inputs.get(name)]:
            return f"the loss reads more of the model (`{asked[0]}`)"
        if inputs.get("input_ids") is None and self.facts_of(model).encoder is not None:
            return "the loss is not known to read labels, and where a model encodes images its decoder gets no tokens"
        tensors = {name: value for name, value in inputs.items() if torch.is_tensor(value) and value.dim()}
        return reason_not_rows(tensors, needs=("input_ids",)) or self.facts_of(model).reason

    def reason_not_trees(self, facts: ModelFacts, *, balances: bool, fused: bool) -> str | None:
        """
        Return why a model gets no trees, as far as that is known without running it. `balances` tells whether there is
        a router's loss, and `fused` whether TRL computes head and loss.
        """
        if facts.reason is not None:
            return facts.reason
        if balances:
            router: Any = facts.router
            if self.compiles:
                return "router logits do not leave compiled layers"
            if router.chosen is None or (router.weight is None and not fused):
                kind = type(facts.base).__name__
                return f"the router's loss of `{kind}` is not that of transformers' mixtures of experts"
        if not fused and (facts.own_forward or "").startswith(IN_PLACE):
            return f"{facts.own_forward} may compute any loss"
        if facts.marks is not None and facts.marks.inside:
            return "a hook of yours is on the model inside of adapters, and would see a flat row"
        return None

    def drawn_by(self, model: nn.Module, device: torch.device) -> Drawn | None:
        """
        Return which random numbers a model draws in its mode. `None` if that cannot be found out, or if a forward pass
        changes a buffer; it says why.
        """
        facts = self.facts_of(model)
        if model.training in facts.drawn:
            return facts.drawn[model.training]
        # No `forward` of a user, which may want labels. And for states no model within its own pass: accelerate gives
        # it one object of autocast for all passes, which notes only once what to go back to.
        module = model if self.reads_labels and facts.own_forward is None else facts.backbone
        try:
            with self.observing(Observed()), self.eager():  # it runs inside of a forward pass
                if model.training and (buffer := changed_buffer(module, device)) is not None:
                    facts.reason = f"a forward pass changes the buffer `{buffer}`, which counts every token"
                    self.fallbacks.cannot_be_exact(facts.reason)
                    return None
                return facts.drawn.setdefault(model.training, drawn_numbers(module, device))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            own, doing = module_of_user(model), "the model does not take ten tokens"
            self.reason_plain = self.fallbacks.did_not_work_with(own, error, doing)
            return None

    def _note_drawn(self, model: nn.Module, drawn: Drawn, shares: bool, rows: Sequence[Row]) -> None:
        """Say once what it means for these rows that a forward pass draws numbers, or what it costs."""
        saved = 0.0 if self._said_drawn else share_saved(Tree.of(rows))
        if self._said_drawn or (drawn == "by token" and saved <= 1 - WORTH):
            return
        self._said_drawn, self.draws_once, rate = True, shares, dropout_of(model)
        numbers = f"dropout ({rate:g})" if rate else "the random numbers of a forward pass"
        change = "`lora_dropout=0`" if hasattr(model, "peft_config") else "the rates of dropout in its config at 0"
        cost = f"About {saved:.0%} of the tokens would be saved with {change}."
        if shares:
            logger.info("A shared prefix draws %s once for its rows; a row's loss varies as in `Trainer`.", numbers)
        elif drawn == "by batch":
            self.fallbacks.cannot_be_exact(f"{numbers} would be drawn for more than one row at a time", advice=cost)
        else:
            why = "for rows that share, and was put in when the run had begun"
            why = why if self._draws_late else "for rows that the router's loss compares"
            why = f"{numbers} would be drawn once {why}"
            self.shares_nothing.cannot_be_exact(why, advice=cost)

    def _plan(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        divide: Callable[..., list[Tree]],
        device: torch.device,
        compact: bool,
        whole: bool,
    ) -> Plan:
        """As [`ModelFacts.plan`], with what the model draws, of which the log tells."""
        facts = self.facts_of(model)
        if (drawn := self.drawn_by(model, device)) is None:
            return Plan(self.reason_plain or facts.reason)
        if model.training and self._drew_first.setdefault(model, drawn) == "nothing" != drawn:
            self._draws_late = True  # a run that began as `Trainer`'s to rounding goes on with its numbers for each row
        shares = drawn == "nothing" or (drawn == "by token" and not self._draws_late and not (whole and facts.router))
        plan = facts.plan(batches, divide, shares=shares, compact=compact, whole=whole)
        if plan.reason is not None:
            self.fallbacks.cannot_be_exact(plan.reason)
        elif plan.trees and drawn != "nothing" and (drawn == "by batch" or plan.cost <= self.worth * plan.padded):
            self._note_drawn(model, drawn, shares, [row for tree in plan.trees for row in tree.rows])
            return Plan(self.plain_because) if drawn == "by batch" else plan
        return plan

    def _has_compared(self, model: nn.Module, longest: int, batches: Sequence[Batch] = ()) -> bool:
        """Whether such rows have been compared, and a backward pass was tried before the model trains."""
        facts = self.facts_of(model)
        if self.images is not None and not facts.compared_images:
            if any(map(IMAGES, batches)):
                return False
        return facts.has_compared(longest) and (facts.ran_backward or not self.comparison.trains(model))

    def _is_same(
        self, model: nn.Module, tree: Tree, batches: Sequence[Batch], compute: Callable[..., Any], device: torch.device
    ) -> bool:
        """Whether trees may be computed, once rows of this kind have been compared."""
        packed = self.facts_of(model).unknown_packed(batches) if any(map(PACKED, batches)) else None
        if not self._has_compared(model, tree.longest, batches) or packed is not None:
            if not self.comparison.is_possible:
                self.fallbacks.cannot_be_exact("no batch of its kind was compared yet")
                return False
            of_packed = None if packed is None else (packed, tree)
            self.reason_plain = self.comparison.reason_not_same(model, tree, batches, compute, device, of_packed)
            self.facts_of(model).note_compared(tree.longest, packed, any(map(IMAGES, batches)))
        return self.reason_plain is None


def with_states(output: Any, states: Tensor) -> Any:
    """Return what a backbone returned, with other hidden states."""
    if isinstance(output, tuple):
        return (states, *output[1:])
    output.last_hidden_state = states
    return output


def values_in(output: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values of targets that a model of TRL returned, `[1, targets]` each."""
    return {name: values for name, values in output.items() if values.dim() == 2}


def mean_losses(logits: Tensor, tokens: Tensor, divisors: Tensor) -> Tensor:
    """Return the cross-entropy of targets, `[targets, vocabulary]` and `[targets]`, each divided by its divisor."""
    tokens, divisors = tokens.to(logits.device), divisors.to(logits.device)
    losses = nn.functional.cross_entropy(logits.float(), tokens, ignore_index=IGNORED, reduction="none")
    return (losses / divisors).sum()


def _states_of(backbone: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Compute the states of rows of [`rows_of_states`], whose last column is there for a label, or of packed rows."""
    if inputs.get("position_ids") is None:
        ids, mask = (inputs[name][:, :-1] for name in ("input_ids", "attention_mask"))
        inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    backbone(**inputs)
