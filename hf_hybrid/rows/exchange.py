"""
Every token once: the part of a run that computes batches as trees (tree.py, attention.py).

A model gets a padded batch, and its loss is read from what it returns. While [`Exchange.on`] is open, hooks of torch
exchange both, and neither the model's code nor the trainer's notices:

    padded batch -> [before the model] -> flat row -> backbone -> [behind it] -> the slots that predict -> head, loss

- **Before the model** the batch becomes a flat row with positions of its own, and the labels become the targets.
- **Behind the backbone** the hidden states of the slots that predict are taken out. So the head scores nothing else.
  A loss that the model computes itself is a sum over targets: a target that several rows read stands there several
  times. It is the loss of the padded batch.
- **Behind the model** of TRL, values of each target (log-probability, entropy, ...) are put where TRL expects them, in
  the layout of the batch. Where rows share a target they read the same value, and autograd adds up their gradients.

**Windows.** transformers divides a summed loss by the number of labels in the accumulation window. So any row may be
computed in any micro-batch of its window. windows.py puts rows with a common prefix together, and makes as few
micro-batches as memory allows, or as keep a large GPU busy. Batches, their order, the number of steps and the schedule
are those of plain `Trainer`; the micro-batches that are left over compute nothing. They come first, because processes
exchange gradients in the last backward pass of a window.

**Is it the same?** The gradient is, up to rounding: about 1e-6 in fp32. Four things guard it. What is known not to
work is not tried ([`obstacle_in_model`], and `reason_not_shared` in windows.py). The first batch of every model is
computed in both ways and compared (comparison.py); so is the first batch with rows longer than the model's sliding
window. A layer that asks for an attention that a tree does not have raises an error in that comparison. And before a
model is trained on trees, a backward pass of few tokens is tried. After a mismatch or an error the padded rows are
computed, and the log says why.

**Dropout.** In padded rows each copy of a prefix has random numbers of its own, so that it cannot be computed once. But
padding can be left out: rows follow each other in the flat row, and each token draws numbers of its own. The update has
the distribution of `Trainer`'s, not its bits. Which numbers a model draws is found by drawing (randomness.py). If one
number belongs to many tokens (layer drop), padded rows are computed.

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
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hf_hybrid.part import Part, Step
from hf_hybrid.recovery import is_out_of_memory
from hf_hybrid.rows.attention import (
    ARGUMENT,
    CannotAttendError,
    Layout,
    attention,
    no_mask,
    tensors_of,
    tree_attention,
)
from hf_hybrid.rows.comparison import TOLERANCES, Observed, difference, loss_of, sample, two_rows
from hf_hybrid.rows.costs import WORTH, share_saved
from hf_hybrid.rows.facts import ModelFacts, dropout_of
from hf_hybrid.rows.randomness import Drawn, changed_buffer, drawn_numbers
from hf_hybrid.rows.recurrent import by_row
from hf_hybrid.rows.router_loss import OPTION, router_losses
from hf_hybrid.rows.tree import (
    IGNORED,
    Batch,
    Row,
    Rows,
    Targets,
    Tree,
    divide,
    labels_of,
    on_device,
    on_host,
    owners_of,
    padded,
)
from hf_hybrid.run.fallbacks import Fallbacks
from hf_hybrid.run.run import Run, as_before
from hf_hybrid.run.trainer_view import module_of_user

logger = logging.getLogger(__name__)

COUNTS = ("tokens", "tokens_padding", "tokens_shared", "micro_batches_saved")
HOLE = "a row has a hole in its mask, or predicts a token from padding"
IF_NO_PADDING = 'If your loss reads nothing of padding, `share_rows="on"` says so, and rows share.'
INSIDE = "a hook of yours is on the model inside of adapters, and would see a flat row"
MICRO_BATCHES, DIVISORS = "hybrid_micro_batches", "hybrid_divisors"
"""Names of [`Batch.micro_batches`] and [`Batch.divisors`] in a batch that windows.py laid out. No model gets them."""
_BATCH = ("input_ids", "attention_mask", "labels")
_OPTIONS = {"num_items_in_batch", "fused_lm_head", "use_cache", "return_dict", OPTION}
"""Arguments that trainers of the libraries give a model beside a batch."""


# A batch as a flat row.


class FlatRow(NamedTuple):
    """
    What a model gets and gives for a batch. Tensors are on the model's device.

    TRL expects the values of each label at its `places`, which are indices into `[batch, length - 1]`.
    """

    ids: Tensor  # [1, slots]
    positions: Tensor  # [1, slots]
    layout: Layout
    slots: Tensor  # where each target is predicted: [targets]
    tokens: Tensor  # what is predicted there: [targets]
    readers: Tensor  # the target of each label: [labels]
    places: Tensor  # [labels]
    shape: tuple[int, int]  # of the batch
    repeats: bool  # whether a target stands once for each row that reads it; then there are no readers
    reads: Tensor | None  # [`Tree.reads`], if the model has a router's loss
    divisors: Tensor | None  # where losses are means: of the loss of targets if they repeat, else of rows

    @classmethod
    def of_window(
        cls, micro_batches: Sequence[tuple[Batch, Tree]], device: torch.device, *, repeats: bool, balances: bool
    ) -> list[tuple[Batch, FlatRow]]:
        """
        Lay out trees of rows, each of one batch, and move them to the device in one copy, their batches as well.
        `balances` tells whether the model has a router's loss.
        """
        tensors = []
        for batch, tree in micro_batches:
            divisors = [] if batch.divisors is None else [batch.divisors]
            if repeats:  # nothing is read from it
                pairs, wanted = labels_of(tree, [batch])
                order = np.argsort(pairs, kind="stable")
                slots, tokens = torch.from_numpy(pairs[order] >> 32), torch.from_numpy(pairs[order] & 0xFFFFFFFF)
                readers = places = torch.zeros(0, dtype=torch.long)
                if divisors:
                    numbers = np.array([row.number for row in tree.rows])[owners_of(tree, wanted[order])[0]]
                    divisors = [divisors[0][numbers]]
            else:
                slots, tokens, readers, places = Targets.of(tree, [batch])
                places = places[:, 1] * (batch.ids.shape[1] - 1) + places[:, 2]
            if not len(slots):  # a loss of nothing, with a gradient of zero
                slots, tokens = torch.zeros(1, dtype=torch.long), torch.full((1,), IGNORED)
                divisors = [torch.ones_like(slots)] if divisors and repeats else divisors
            of_layout = [] if device.type == "cpu" else tensors_of(tree.segments)
            reads = [tree.reads(batch)] if balances else []
            tensors.append([*batch[:3], *tree.flat(), slots, tokens, readers, places, *reads, *divisors, *of_layout])
        moved, rows = iter(on_device(list(itertools.chain(*tensors)), device)), []
        for (batch, tree), host in zip(micro_batches, tensors, strict=True):
            *there, ids, positions, slots, tokens, readers, places = itertools.islice(moved, 9)
            reads = next(moved) if balances else None
            divisors = None if batch.divisors is None else next(moved)
            of_layout = list(itertools.islice(moved, len(host) - 9 - balances - (divisors is not None)))
            layout, shape = Layout(tree.segments, device, of_layout or None), (len(batch.ids), batch.ids.shape[1])
            of_targets = slots, tokens, readers, places
            row = cls(ids[None], positions[None], layout, *of_targets, shape, repeats, reads, divisors)
            rows.append((Batch(*there), row))
        return rows

    @classmethod
    def of_several(
        cls, tree: Tree, batches: Sequence[Batch], numbers: Sequence[int], device: torch.device
    ) -> dict[int, FlatRow]:
        """
        Lay out one tree with rows of the batches of these numbers, and move it to the device in one copy. Return by
        number the flat row as each batch reads it: they differ in readers, places and shape alone.
        """
        slots, tokens, readers, places = Targets.of(tree, batches)
        tensors = [*tree.flat(), slots, tokens]
        shapes = {number: (len(batches[number].ids), batches[number].ids.shape[1]) for number in numbers}
        for number, (_, length) in shapes.items():
            mine = places[:, 0] == number
            tensors += [readers[mine], places[mine, 1] * (length - 1) + places[mine, 2]]
        of_layout = [] if device.type == "cpu" else tensors_of(tree.segments)
        ids, positions, slots, tokens, *read = on_device([*tensors, *of_layout], device)
        layout = Layout(tree.segments, device, read[2 * len(shapes) :] or None)
        common = ids[None], positions[None], layout, slots, tokens
        return {
            number: cls(*common, read[2 * index], read[2 * index + 1], shape, False, None, None)
            for index, (number, shape) in enumerate(shapes.items())
        }

    def inputs(self, mask: Tensor) -> dict[str, Any]:
        """Return what a model takes in place of `input_ids`, `attention_mask` and `labels`; the mask is [`no_mask`]."""
        # Of means the model would compute one: it gets no labels, and `mean_losses` stand in for its loss behind it.
        targets = None if self.repeats and self.divisors is not None else self.tokens[None]
        return {
            "input_ids": self.ids,
            "attention_mask": mask,
            "position_ids": self.positions,
            "labels": targets,
            "shift_labels": targets,
            "use_cache": False,
            **({} if self.reads is None else {OPTION: False}),  # the losses are added behind the model
        }

    def read(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """
        Bring values of targets, each `[1, targets]`, into the layout of the batch, `[batch, length - 1]`; 0 elsewhere.
        """
        rows, length = self.shape
        alike: dict[Any, list[str]] = {}
        for name, of_targets in values.items():
            # What has a gradient is read alone: the head has less to do for what no loss reads.
            kind = name if of_targets.requires_grad else (of_targets.device, of_targets.dtype)
            alike.setdefault(kind, []).append(name)
        read: dict[str, Tensor] = {}
        for names in alike.values():
            stacked = values[names[0]] if len(names) == 1 else torch.cat([values[name] for name in names])
            places, readers = (tensor.to(stacked.device) for tensor in (self.places, self.readers))
            put = stacked.new_zeros(len(names), rows * (length - 1)).index_copy_(1, places, stacked[:, readers])
            read.update(zip(names, put.view(len(names), rows, length - 1), strict=True))
        return read


def with_states(output: Any, states: Tensor) -> Any:
    """Return what a backbone returned, with other hidden states."""
    if isinstance(output, tuple):
        return (states, *output[1:])
    output.last_hidden_state = states
    return output


def mean_losses(logits: Tensor, tokens: Tensor, divisors: Tensor) -> Tensor:
    """Return the cross-entropy of targets, `[targets, vocabulary]` and `[targets]`, each divided by its divisor."""
    tokens, divisors = tokens.to(logits.device), divisors.to(logits.device)
    losses = nn.functional.cross_entropy(logits.float(), tokens, ignore_index=IGNORED, reduction="none")
    return (losses / divisors).sum()


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


def rows_of(inputs: Mapping[str, Any]) -> Rows:
    """Return tokens, mask and labels of what a model gets."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    return ids, torch.ones_like(ids) if mask is None else mask != 0, inputs["labels"]


class HostBatches:
    """The batches of a step on the host."""

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
        copied = Copied(on_host([rows_of(inputs)])[0])
        if known_by.device.type != "cpu":  # else it is no copy, and would keep the key alive
            self.known[known_by] = copied
        return copied


def obstacle_in_batch(inputs: Any, beside: Container[str] = ()) -> str | None:
    """
    Return why a batch is not rows of tokens with labels and nothing else, as far as its form tells. `beside` are
    arguments of a forward pass that say nothing of the rows.
    """
    if not isinstance(inputs, Mapping):
        return "a batch is no mapping of names to tensors"
    for name in ("input_ids", "labels"):
        if not torch.is_tensor(inputs.get(name)):
            return f"a batch holds no `{name}`"
    given = {name: value for name, value in inputs.items() if value is not None and name not in beside}
    if others := given.keys() - set(_BATCH):
        return f"a batch holds `{min(others)}` beside tokens"
    if inputs["input_ids"].dim() != 2 or len({getattr(value, "shape", None) for value in given.values()}) > 1:
        return "tokens, mask and labels of a batch have different shapes"
    return "labels of a batch are not tokens" if inputs["labels"].is_floating_point() else None


# Sharing.


class Plan(NamedTuple):
    """What one process would do with the batches of a window: nothing, if there are no trees."""

    reason: str | None = None  # there are none; it was said already
    trees: tuple[Tree, ...] = ()
    cost: float = 0.0  # operations of the trees
    padded: float = 0.0  # operations of the padded rows


class UnderWay(threading.local):
    """The forward pass of this thread: the micro-batches of a window may go through a model on several."""

    row: FlatRow | None = None
    router: Tensor | None = None  # sum of the router's losses
    comparing: str | None = None  # `padded` or `tree` in a comparison
    hidden: Tensor | None = None  # what the backbone returned in a comparison
    cuts: bool = False  # whether that is cut off from the layers, and its gradient read


class Exchange(Part):
    """
    Lets models compute batches as trees.

    It counts `tokens` (of all rows, without padding, on this process), and what was not computed:
    `tokens_padding`, and `tokens_shared`, to which tokens without influence on a label belong. `plain_rows_because` in
    the summary says why the last batch that was computed as it is was.

    With `off` it does nothing. `reason_plain` says why no batch is exchanged in this run. `half_precision` tells
    whether models compute in bf16 or fp16. `may_compare` tells whether a model can run one more forward pass inside of
    one. It cannot where processes, or the layers of a window, wait for each other.
    """

    name = "shared_rows"
    needs_numbers = False
    in_every_pass = True
    """Whether the trainer opens [`around`] for every micro-batch, not only for those that were laid out."""

    def __init__(
        self,
        off: bool = False,
        reason_plain: str | None = None,
        half_precision: bool = False,
        may_compare: bool = True,
        compiles: bool = False,
    ):
        self.off, self.reason_plain, self.half_precision = off, reason_plain, half_precision
        self.may_compare, self.compiles = may_compare, compiles
        self.worth = float("inf") if compiles else WORTH
        """Rows are exchanged for trees that cost less than this share of them; compiled layers get no other shape."""
        self.fallbacks = Fallbacks("Rows are computed padded, each for itself (`share_rows`)")
        self.shares_nothing = Fallbacks("Padding is left out, but no shared prefix (`share_rows`)")
        self.apart = Fallbacks("Each micro-batch is computed by itself (`share_rows`)")
        self.counts: Counter[str] = Counter()
        """Those of the run, once it begins."""
        self._facts: weakref.WeakKeyDictionary[nn.Module, ModelFacts] = weakref.WeakKeyDictionary()
        self._looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Models whose facts are those of the step under way."""
        self.host = HostBatches()
        self._opened: dict[nn.Module, contextlib.ExitStack] = {}
        self._layouts: list[Layout] = []
        """Those that are known, for the backward passes that follow."""
        self._attended = False
        """Whether attentions computed the last ones."""
        self._backward_follows = False
        self._under_way = UnderWay()
        self._is_counting, self._said_drawn = True, False

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

    # Open and closed. Recomputed layers need the attention of trees in the backward pass too.

    @contextlib.contextmanager
    def around(self) -> Generator[None]:
        """Context for forward and backward pass of a micro-batch: models that are opened in it stay open until then."""
        self._backward_follows = True
        try:
            yield
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

    def _open(self, model: nn.Module) -> None:
        inside: Any = getattr(model, "_orig_mod", None)
        if inside is not None and model.forward == inside.__call__:
            model = inside  # its layers are compiled (compiled.py), not the model as a whole
        if self.off or model in self._opened:
            return
        self._opened[model] = stack = contextlib.ExitStack()
        stack.callback(model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True).remove)
        if self.may_share and (facts := self.facts_of(model)).reason is None:
            hooks: Any = model._forward_pre_hooks
            of_users = [number for number, hook in hooks.items() if facts.marks and hook in facts.marks.hooks]
            for number in reversed(of_users):  # they see the batch before it is exchanged, and may change it
                hooks.move_to_end(number, last=False)
            stack.callback(model.register_forward_hook(self._after, prepend=True).remove)
            if facts.with_state:
                stack.enter_context(by_row(facts.with_state, lambda: self._under_way.row is not None))
            hooks: Any = facts.backbone
            stack.callback(hooks.register_forward_pre_hook(self._before_backbone, with_kwargs=True).remove)
            stack.callback(hooks.register_forward_hook(functools.partial(self._behind_backbone, facts)).remove)

    def _close(self, but: Iterable[nn.Module] = ()) -> None:
        for model in [model for model in reversed(self._opened) if model not in but]:
            self._opened.pop(model).close()
        if not self._opened:
            for layout in self._layouts:
                Layout.known.pop(layout.number, None)
                self._attended = layout.attended
            self._layouts.clear()

    def _in_trees(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Context in which a model attends along paths where it gets a tree, and as it is elsewhere."""
        configs, stack = self.facts_of(model).configs, contextlib.ExitStack()
        name = tree_attention(configs[0]._attn_implementation or "eager")
        for config in configs:
            stack.enter_context(attention(config, name))
        return stack

    def _eager(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which compiled layers run as they are: what runs once does not pay for a compilation."""
        return torch.compiler.set_stance("force_eager") if self.compiles else contextlib.nullcontext()

    # A run.

    def begin(self, run: Run) -> None:
        self.counts = run.counts
        for facts in self._facts.values():
            facts.drawn.clear()  # rates may have changed since the last training
        self._said_drawn = False

    def begin_step(self, step: Step) -> None:
        self.host.known.clear()
        self._looked_at.clear()

    def arrange(self, step: Step) -> None:
        """Lay out the micro-batches of a step anew, if this part does, once `on_step_begin` has been called."""

    @contextlib.contextmanager
    def evaluating(self, *models: nn.Module) -> Generator[None]:
        """As [`on`], for passes whose tokens are not those of the training."""
        self.host.known.clear()
        self._looked_at.clear()
        before, self._is_counting = self._is_counting, False
        try:
            with self.on(*models):
                yield
        finally:
            self._is_counting = before

    def summary(self) -> dict[str, Any]:
        return {**{name: self.counts[name] for name in COUNTS}, "plain_rows_because": self.plain_because}

    def state_dict(self) -> dict[str, Any]:
        return {"plain_because": self.plain_because} if self.plain_because else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fallbacks.because = state.get("plain_because")

    # Batches on the host.

    def copy_ahead(self, tensors: Sequence[Tensor], batches: Iterable[Rows]) -> None:
        """
        Copy the batches of a step to the host at once: the host waits for the device at every copy. `tensors` are what
        a model will get of each, or what [`HostBatches.computing`] will name.
        """
        self.host.known.clear()
        if self.may_share:
            for tensor, batch in zip(tensors, on_host(list(batches))):
                self.host.known[tensor] = Copied(batch)

    # The exchange.

    def _before(self, model: nn.Module, args: tuple, inputs: dict[str, Any]):
        """Exchange a padded batch for a flat row."""
        way = self._under_way
        way.row = way.router = None
        micro_batches, divisors = inputs.pop(MICRO_BATCHES, None), inputs.pop(DIVISORS, None)
        if way.comparing == "padded" or args:
            return None
        if (reason := self._obstacle(model, inputs)) is not None:
            if inputs.get("labels") is not None:  # else nothing could be left out
                self.fallbacks.cannot_be_exact(reason)
            return None
        copied = self.host.copied(inputs)
        batch, tree, row = copied.batch, copied.tree, copied.row
        if tree is None:
            if micro_batches is not None:  # a part of a micro-batch that did not fit
                divisors = None if divisors is None else divisors.cpu()
                batch = batch._replace(micro_batches=micro_batches.cpu(), divisors=divisors)
            tree = self._tree_if_worth(model, inputs, batch)
            if self._is_counting and way.comparing is None:
                self._count(batch, tree, batch.ids.numel())
        if tree is None:
            return None
        repeats, copied.row = not inputs.get("fused_lm_head"), None
        if row is None or row.repeats != repeats:
            balances, device = self.facts_of(model).balances(inputs), inputs["input_ids"].device
            ((_, row),) = FlatRow.of_window([(batch, tree)], device, repeats=repeats, balances=balances)
        self._begin(model, row)
        return args, {**inputs, **row.inputs(self._mask(row))}

    def _mask(self, row: FlatRow) -> Tensor:
        number = 1 if self.compiles else row.layout.number  # a compiler would make it a constant
        return no_mask(row.ids.device, number, named=self._under_way.comparing is not None)

    def _begin(self, model: nn.Module, row: FlatRow) -> None:
        """Note that a model computes a flat row now, and its backward pass later."""
        way = self._under_way
        way.row, Layout.known[row.layout.number] = row, row.layout
        self._layouts.append(row.layout)
        if way.comparing is None:
            self._opened[model].enter_context(self._in_trees(model))

    def _before_backbone(self, backbone: nn.Module, args: tuple, inputs: dict[str, Any]):
        """Give the layout to the layers, and ask for router logits where the model was told to leave their loss out."""
        row = self._under_way.row
        if row is None:
            return None
        return args, {**inputs, ARGUMENT: row.layout, **({} if row.reads is None else {OPTION: True})}

    def _behind_backbone(self, facts: ModelFacts, backbone: nn.Module, args: tuple, output: Any):
        """Take out the hidden states of the slots that predict, and the router logits."""
        way = self._under_way
        if way.comparing is not None:
            if way.cuts:
                output = with_states(output, output[0].detach().requires_grad_())
            way.hidden = output[0]
        if way.row is None:
            return output
        if way.row.reads is not None and (logits := getattr(output, "router_logits", None)):
            router: Any = facts.router
            way.router = router_losses(logits, router.chosen, way.row.reads).sum()
            output.router_logits = None
        return with_states(output, output[0][:, way.row.slots.to(output[0].device)])

    def _after(self, model: nn.Module, args: tuple, output: Any):
        """Exchange the values of targets for those of the batch, where the caller reads any; add the router's loss."""
        way = self._under_way
        row, way.row = way.row, None
        if row is None:
            if way.comparing is not None:
                way.router = getattr(output, "aux_loss", None)
            return None
        if getattr(output, "log_probs", None) is None:
            if row.divisors is not None:
                output["loss"] = mean_losses(output.logits[0], row.tokens, row.divisors)
            if way.router is not None:
                router: Any = self.facts_of(model).router
                output.loss = output.loss + router.weight * way.router.to(output.loss.device)
                output.aux_loss = way.router
            return None
        values = row.read({name: values for name, values in output.items() if values.dim() == 2})
        if row.divisors is not None:  # TRL divides the sum by all labels
            values["log_probs"] = values["log_probs"] * (values["label_mask"].sum() / row.divisors)[:, None]
        return type(output)(**values, **({} if way.router is None else {"aux_loss": way.router}))

    def _count(self, batch: Batch, tree: Tree | None, places: int) -> None:
        """Count the tokens of a batch of so many places, padding included."""
        self.counts["tokens"] += batch.tokens
        if tree is not None:
            self.counts["tokens_padding"] += places - batch.tokens
            self.counts["tokens_shared"] += batch.tokens - tree.size

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

    def _obstacle(self, model: nn.Module, inputs: Mapping[str, Any]) -> str | None:
        """Return why a batch is computed as it is, if that is known before anything is copied to the host."""
        if self.reason_plain is not None:
            return self.reason_plain
        if (reason := obstacle_in_batch(inputs, _OPTIONS)) is not None:
            return reason
        facts = self.facts_of(model)
        if facts.marks is not None and facts.marks.inside:
            return INSIDE
        if facts.reason is None and facts.balances(inputs):
            return self.obstacle_in_router(facts, fused="fused_lm_head" in inputs)
        return facts.reason

    def obstacle_in_router(self, facts: ModelFacts, *, fused: bool) -> str | None:
        """Return why a router's loss cannot be had from a flat row, if that is known. `fused` heads have TRL's loss."""
        router: Any = facts.router
        if self.compiles:
            return "router logits do not leave compiled layers"
        if router.chosen is None or (router.weight is None and not fused):
            return (
                f"the router's loss of `{type(facts.base).__name__}` is not that of transformers' mixtures of experts"
            )
        return None

    def _exchanged(self, model: nn.Module) -> nn.Module:
        """Return the module whose random numbers are looked for: no `forward` of a user, which may want labels."""
        facts = self.facts_of(model)
        return model if facts.own_forward is None else facts.backbone

    def _drawn(self, model: nn.Module, device: torch.device) -> Drawn | None:
        """
        Return which random numbers a model draws in its mode. `None` if that cannot be found out, or if a forward pass
        changes a buffer; it says why.
        """
        facts, way = self.facts_of(model), self._under_way
        drawn = facts.drawn
        if model.training not in drawn:
            before, way.comparing = way.comparing, "padded"  # it runs inside of a forward pass
            try:
                with self._eager():
                    module = self._exchanged(model)
                    if model.training and (buffer := changed_buffer(module, device)) is not None:
                        facts.reason = f"a forward pass changes the buffer `{buffer}`, which counts every token"
                        self.fallbacks.cannot_be_exact(facts.reason)
                        return None
                    drawn[model.training] = drawn_numbers(module, device)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                own, doing = module_of_user(model), "the model does not take ten tokens"
                self.reason_plain = self.fallbacks.did_not_work_with(own, error, doing)
                return None
            finally:
                way.comparing = before
        return drawn[model.training]

    def _note_drawn(self, model: nn.Module, drawn: Drawn, rows: Sequence[Row]) -> None:
        """Say once what random numbers of these rows cost: the share of their tokens that is not saved."""
        if self._said_drawn:
            return
        saved, rate = share_saved(Tree.of(rows)), dropout_of(model)
        numbers = f"dropout ({rate:g})" if rate else "the random numbers of a forward pass"
        change = "`lora_dropout=0`" if hasattr(model, "peft_config") else "the rates of dropout in its config at 0"
        cost = f"About {saved:.0%} of the tokens would be saved with {change}."
        self._said_drawn = drawn == "by batch" or saved > 1 - WORTH
        if drawn == "by batch":
            self.fallbacks.cannot_be_exact(f"{numbers} would be drawn for more than one row at a time", advice=cost)
        elif self._said_drawn:
            self.shares_nothing.cannot_be_exact(f"{numbers} would be drawn once for all rows that share", advice=cost)

    def _plan(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        divide: Callable[..., list[Tree]],
        device: torch.device,
        compact: bool,
        balances: bool,
    ) -> Plan:
        """
        Return the trees of some batches. `divide` makes them of the rows, which come batch by batch, and options of
        [`Tree.of`]. In `compact` padded rows the head scores only the tokens with labels. `balances` tells
        whether there is a router's loss, which counts all tokens.
        """
        facts, rows = self.facts_of(model), []
        for number, batch in enumerate(batches):
            of_batch = batch.rows(number, counts_mask=facts.counts_mask, whole=balances)
            if of_batch is None:
                self.fallbacks.cannot_be_exact(HOLE)
                return Plan(HOLE)
            rows += of_batch
        padded_cost = sum(facts.costs.padded(batch, compact=compact) for batch in batches)
        if not rows or (drawn := self._drawn(model, device)) is None:
            return Plan(self.reason_plain or facts.reason, padded=padded_cost)
        if drawn != "nothing":
            self._note_drawn(model, drawn, rows)
        if drawn == "by batch":
            return Plan(self.plain_because)
        trees = divide(rows, shares=drawn == "nothing", again=facts.again)
        if max(tree.size for tree in trees) > facts.most_slots:
            reason = f"rows of more than {facts.most_slots} tokens would be scaled by place, or attend by chunks"
            self.fallbacks.cannot_be_exact(reason)
            return Plan(reason, padded=padded_cost)
        return Plan(None, tuple(trees), sum(map(facts.costs.tree, trees)), padded_cost)

    def _tree_if_worth(self, model: nn.Module, inputs: dict[str, Any], batch: Batch) -> Tree | None:
        """Return the tree of a batch, or `None` if the batch is computed as it is."""
        facts, device = self.facts_of(model), inputs["input_ids"].device
        compact = bool(inputs.get("fused_lm_head")) and inputs["input_ids"].is_cuda
        whole = facts.balances(inputs) or batch.divisors is not None  # a part of rows without labels has a loss too
        plan = self._plan(model, [batch], functools.partial(divide, most=float("inf")), device, compact, whole)
        # Parts of several micro-batches have several router's losses and means, which padded rows do not.
        if not plan.trees or (plan.cost > self.worth * plan.padded and batch.micro_batches is None):
            return None
        (tree,) = plan.trees
        compute = lambda part: model(**{**inputs, **part})  # noqa: E731
        return tree if self._is_same(model, tree, [batch], compute, device) else None

    def _is_same(
        self, model: nn.Module, tree: Tree, batches: Sequence[Batch], compute: Callable[..., Any], device: torch.device
    ) -> bool:
        """Whether trees may be computed, once rows of this kind have been compared."""
        if not self._has_compared(model, tree.longest):
            if not self.may_compare:
                self.fallbacks.cannot_be_exact("no batch of its kind was compared yet")
                return False
            self.reason_plain = self._compare(model, tree, batches, compute, device)
            self.facts_of(model).note_compared(tree.longest)
        return self.reason_plain is None

    def _has_compared(self, model: nn.Module, longest: int) -> bool:
        """Whether rows of this length have been compared, and a backward pass was tried before the model trains."""
        facts = self.facts_of(model)
        return facts.has_compared(longest) and (facts.ran_backward or not self._trains(model))

    def _trains(self, model: nn.Module) -> bool:
        """Whether a backward pass follows, before which one may be tried."""
        trains = model.training and torch.is_grad_enabled()
        return trains and any(parameter.requires_grad for parameter in model.parameters())

    def _compare(
        self,
        model: nn.Module,
        tree: Tree,
        batches: Sequence[Batch],
        compute: Callable[[dict[str, Tensor]], Any],
        device: torch.device,
    ) -> str | None:
        """
        Compute some rows in both ways (comparison.py), and return why the results are not the same. `compute` takes
        `input_ids`, `attention_mask` and `labels`, and returns a loss or what holds one.
        """
        facts, rows, trains, runs_backward = (
            self.facts_of(model),
            Tree.of(sample(tree)),
            model.training,
            self._trains(model),
        )
        doing = "the model does not take a tree"
        half_precision = self.half_precision or model.dtype in (torch.float16, torch.bfloat16)
        observe, saved = functools.partial(self._observe, model, compute, device), share_saved(rows)
        try:
            with as_before(model, device), self._eager():
                model.eval()
                reason = difference(observe, rows, batches, TOLERANCES[half_precision])
                if reason is None and trains and facts.drawn.get(True, "nothing") != "nothing":
                    model.train()
                    observe("tree", *padded(Tree.of(rows.rows, shares=False), batches))
                if reason is None and runs_backward and not facts.ran_backward:
                    model.eval()
                    doing = "the backward pass of a tree does not run"
                    self._run_backward(model, observe, *two_rows(rows.rows[0], batches[0].divisors is not None))
        except CannotAttendError as error:
            self.fallbacks.cannot_be_exact(str(error))
            return str(error)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if (own := facts.own_forward or module_of_user(model)) is not None:  # nobody else can mend it
                reason = f"{own} does not take a flat row ({type(error).__name__}: {error})"
                self.fallbacks.cannot_be_exact(reason)
                return reason
            if self._attended or any(layout.attended for layout in self._layouts):
                cost = f"About {saved:.0%} of the tokens of the first batch, and its padding, are not saved."
                return self.fallbacks.did_not_work(error, doing, cost=cost)
            reason = f"the attention of `{type(facts.base).__name__}` is its own, not one of transformers' interface"
            logger.debug("%s", reason, exc_info=error)
            self.fallbacks.cannot_be_exact(reason)
            return reason
        if reason is not None:
            self.fallbacks.cannot_be_exact(
                reason, advice=f"About {saved:.0%} of its tokens, and padding, are not saved."
            )
        return reason

    def _run_backward(self, model: nn.Module, observe: Callable[..., Observed], batch: Batch, tree: Tree) -> None:
        """Compute the gradient of the embeddings of a tree, and nothing else: no weight gets one."""
        facts, embedded = self.facts_of(model), []

        def cut(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            embedded.append(output.detach().requires_grad_())
            return embedded[0].clone()  # some models scale it in place

        hook = facts.base.get_input_embeddings().register_forward_hook(cut)
        try:
            with self.on(model), torch.enable_grad(), self._in_trees(model):
                observed = observe("tree", batch, tree)
                loss = loss_of(observed.result)
                loss = observed.hidden.float().mean() if loss is None else loss
                if embedded and loss.requires_grad:
                    torch.autograd.grad(loss, embedded[0], allow_unused=True)
        finally:
            hook.remove()
        facts.ran_backward = True

    def _observe(
        self, model: nn.Module, compute: Callable, device: torch.device, how: str, batch: Batch, tree: Tree
    ) -> Observed:
        """Compute a batch `padded` or as a `tree`, and return what the backbone and `compute` returned."""
        inputs = {name: tensor.to(device) for name, tensor in zip(_BATCH, batch[:3])}
        way, named = self._under_way, self.host.named
        self.host.known[inputs["input_ids"]] = Copied(batch, tree)
        way.comparing, self.host.named = how, None
        try:
            with self._in_trees(model) if how == "tree" else contextlib.nullcontext():
                result = compute(inputs)
            if way.hidden is None:
                base = type(self.facts_of(model).base).__name__
                raise CannotAttendError(f"`{base}` does not call its backbone as a module")
            return Observed(way.hidden, result, way.router)
        finally:
            way.comparing = way.row = way.hidden = way.router = None
            self.host.named = named
