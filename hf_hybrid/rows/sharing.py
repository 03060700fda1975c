"""
Every token once: the part of a run that computes batches as trees (tree.py, attention.py).

A model gets a padded batch, and its loss is read from what it returns. While [`SharedRows.on`] is open, hooks of torch
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
micro-batches as the memory of the largest padded one allows. Batches, their order, the number of steps and the schedule
are those of plain `Trainer`; the micro-batches that are left over compute nothing. They come first, because processes
exchange gradients in the last backward pass of a window.

**Is it the same?** The gradient is, up to rounding: about 1e-6 in fp32. Three things guard it. What is known not to
work is not tried ([`why_not`], and `reason_not_shared` in windows.py). The first batch of every model is computed in
both ways, and hidden states and loss are compared; so is the first batch with rows longer than the model's sliding
window. And a layer that asks for an attention that a tree does not have raises an error in that comparison. After a
mismatch the padded rows are computed, and the log says why.

**Dropout.** In padded rows each copy of a prefix has random numbers of its own, so that it cannot be computed once. But
padding can be left out: rows follow each other in the flat row, and each token draws numbers of its own. The update has
the distribution of `Trainer`'s, not its bits. Which numbers a model draws is found by drawing (randomness.py). If one
number belongs to many tokens (layer drop), padded rows are computed.

**Is it worth it?** Linear layers cost the same per token, attention per pair of tokens, and the head per scored token.
[`Costs`] counts all three for the padded batch and for the trees. If less than 5 % is saved the padded batch is
computed, to the last bit as plain `Trainer` does.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_hybrid.part import Part, Phase, Step
from hf_hybrid.recovery import is_out_of_memory
from hf_hybrid.rows.attention import ARGUMENT, CannotAttendError, attention, layout_of, no_mask, tree_attention
from hf_hybrid.rows.randomness import Drawn, drawn_numbers
from hf_hybrid.rows.tree import IGNORED, Batch, Row, Rows, Segment, Targets, Tree, on_host, padded
from hf_hybrid.run.fallbacks import Fallbacks
from hf_hybrid.run.run import RandomStates
from hf_hybrid.streaming.layers import base_model

if TYPE_CHECKING:
    from hf_hybrid.run.run import Run

logger = logging.getLogger(__name__)

Model = Any
"""A model of transformers, or a wrapper such as peft's that has its attributes."""
WORTH = 0.95
"""Padded rows are exchanged for trees that cost less than this share of them."""
TOLERANCES = {False: 1e-3, True: 0.1}
"""Most difference of the first batch, see [`apart`], in fp32 and in half precision."""


COUNTS = ("tokens", "tokens_padding", "tokens_shared", "micro_batches_saved")

# What a model is, and what it costs.

_BATCH = ("input_ids", "attention_mask", "labels")
_COUNTS_MASK = ("opt", "biogpt")
"""Models whose positions count the tokens in the mask, not the columns."""


def _bare(model: nn.Module) -> Model:
    """Return a model without the wrapper of adapters."""
    return base_model(model)


def backbone_of(model: nn.Module) -> nn.Module:
    """Return the module that computes the hidden states which the head gets."""
    return _bare(model).get_decoder()


def why_not(model: Model) -> str | None:
    """Return why a model cannot compute trees, if that is known without running it."""
    base = _bare(model)
    config = base.config.get_text_config()
    adapter = getattr(model, "active_peft_config", None)
    kinds = {
        kind
        for kind in getattr(config, "layer_types", None) or ()
        if kind.startswith("linear") or "attention" not in kind
    }
    if adapter is not None and (adapter.is_prompt_learning or getattr(adapter, "alora_invocation_tokens", None)):
        return f"adapters of the kind {adapter.peft_type.value} act on places of a row"
    if config.is_encoder_decoder:
        return "the model has an encoder"
    if getattr(base, "_is_stateful", False) or kinds:
        return f"it has layers with a state that runs along the row ({', '.join(sorted(kinds)) or config.model_type})"
    if backbone_of(model) is base:
        return f"`{type(base).__name__}` has no backbone that is called by itself"
    if getattr(config, "output_router_logits", False):
        return "the router loss counts every token of the padded rows"
    return None


def dropout_of(model: Model) -> float:
    """Return the largest rate of dropout that modules and config name, for messages; [`drawn_numbers`] decides."""
    rates = [m.p if isinstance(m, nn.Dropout) else getattr(m, "attention_dropout", 0.0) for m in model.modules()]
    rates += [value for name, value in _bare(model).config.to_dict().items() if "drop" in name]
    return max((rate for rate in rates if isinstance(rate, float)), default=0.0)


def window_of(model: Model) -> float:
    """Return how many tokens of a row the layers look back at least."""
    config = _bare(model).config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["window"]
    if not getattr(config, "use_sliding_window", True) or set(kinds) == {"full_attention"}:
        return float("inf")
    names = ("sliding_window", "attention_chunk_size", "window_size")
    return min((size for name in names if isinstance(size := getattr(config, name, None), int)), default=float("inf"))


class Costs(NamedTuple):
    """
    Operations of a forward pass; the backward pass has about twice as many.

    Attributes:
        token (`float`): Per token, in linear layers without the head.
        pair (`float`): Per pair of tokens, in attention.
        scored (`float`): Per token that the head scores.
    """

    token: float
    pair: float
    scored: float

    @classmethod
    def of(cls, model: Model) -> Costs:
        """Count the operations of a model: 2 per weight, and 4 per layer, head and dimension for a pair of tokens."""
        base = _bare(model)
        config, tables = base.config.get_text_config(), {}
        for table in (base.get_input_embeddings(), base.get_output_embeddings()):
            if table is not None:
                tables[id(table.weight)] = table.weight.numel()
        weights = sum(parameter.numel() for parameter in model.parameters()) - sum(tables.values())
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(2.0 * weights, 4.0 * config.num_hidden_layers * heads * size, 2.0 * max(tables.values()))

    def padded(self, batch: Batch, *, compact: bool) -> float:
        """Return the operations of a padded batch, whose head scores every token unless it is `compact`."""
        rows, length = batch.ids.shape
        scored = int(batch.predicted.sum()) if compact else rows * length
        return rows * (length * self.token + length**2 * self.pair) + scored * self.scored

    def tree(self, tree: Tree) -> float:
        """Return the operations of a tree, each label counted once per row."""
        pairs = sum(segment.pairs for segment in tree.segments)
        return len(tree.ids) * self.token + pairs * self.pair + tree.labels * self.scored


@dataclass
class _Known:
    """What was found out about a model: `why` it computes padded rows, or what it costs and how far it looks back."""

    why: str | None = None
    costs: Costs = Costs(0.0, 0.0, 0.0)
    window: float = float("inf")
    counts_mask: bool = False
    """Whether positions count tokens in the mask, not columns."""
    compared: bool = False
    compared_beyond: bool = False
    """Whether rows longer than the window were compared too."""
    drawn: dict[bool, Drawn] = field(default_factory=dict)
    """Random numbers of a forward pass, in training and out of it, once they are known."""

    @classmethod
    def of(cls, model: nn.Module) -> _Known:
        try:
            why = why_not(model)
            counts_mask = _bare(model).config.model_type in _COUNTS_MASK
            return cls(why) if why else cls(None, Costs.of(model), window_of(model), counts_mask)
        except (AttributeError, TypeError) as error:  # of a model with a config of its own
            return cls(f"its config does not tell what it costs ({error})")

    def has_compared(self, longest: int) -> bool:
        """Whether rows of this length have been compared, as far as windows of attention go."""
        return self.compared and (self.compared_beyond or longest <= self.window)

    def note(self, longest: int) -> None:
        """Rows of this length have been compared."""
        self.compared, self.compared_beyond = True, self.compared_beyond or longest > self.window


def _in_trees(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Context in which a model attends along paths where it gets a tree, and as it is elsewhere."""
    config = _bare(model).config
    return attention(config, tree_attention(config._attn_implementation or "eager"))


# A batch as a flat row.


class FlatRow(NamedTuple):
    """
    What a model gets and gives for a batch. Tensors are on the model's device.

    Attributes:
        ids, positions (`Tensor`): `[1, slots]`.
        segments (`tuple[Segment, ...]`): Of the row.
        slots, tokens (`Tensor`): Where each target is predicted, and what: `[targets]`.
        readers (`Tensor`): Target of each label, `[labels]`.
        places (`Tensor`): Where TRL expects the label's values, as an index into `[batch, length - 1]`: `[labels]`.
        shape (`tuple[int, int]`): Of the batch.
    """

    ids: Tensor
    positions: Tensor
    segments: tuple[Segment, ...]
    slots: Tensor
    tokens: Tensor
    readers: Tensor
    places: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, tree: Tree, batch: Batch, device: torch.device, *, repeat: bool) -> FlatRow:
        """Lay out a tree of rows of one batch. With `repeat` a target stands once for each row that reads it."""
        targets = Targets.of(tree, [batch])
        slots, tokens, readers = targets.slots, targets.tokens, targets.readers
        if repeat:
            order = readers.sort().values
            slots, tokens = slots[order], tokens[order]
        if not len(slots):  # a loss of nothing, with a gradient of zero
            slots, tokens = torch.zeros(1, dtype=torch.long), torch.full((1,), IGNORED)
        places = targets.places[:, 1] * (batch.ids.shape[1] - 1) + targets.places[:, 2]
        parts = [torch.tensor(tree.ids), torch.tensor(tree.positions), slots, tokens, readers, places]
        moved = torch.cat(parts).to(device, non_blocking=True).split([len(part) for part in parts])
        ids, positions, slots, tokens, readers, places = moved
        shape = len(batch.ids), batch.ids.shape[1]
        return cls(ids[None], positions[None], tree.segments, slots, tokens, readers, places, shape)

    def inputs(self) -> dict[str, Any]:
        """Return what a model takes in place of `input_ids`, `attention_mask` and `labels`."""
        return {
            "input_ids": self.ids,
            "attention_mask": no_mask(self.ids.device),
            "position_ids": self.positions,
            "labels": self.tokens[None],
            "shift_labels": self.tokens[None],
            "use_cache": False,
            ARGUMENT: self.segments,
        }

    def read(self, values: Tensor) -> Tensor:
        """Bring values of targets `[1, targets]` into the layout of the batch `[batch, length - 1]`; 0 elsewhere."""
        rows, length = self.shape
        places, readers = (tensor.to(values.device) for tensor in (self.places, self.readers))
        found = values.new_zeros(rows * (length - 1))
        return found.index_put((places,), values[0][readers]).view(rows, length - 1)


def apart(plain: Tensor, tree: Tensor) -> float:
    """Return the mean distance of two sets of hidden states `[labels, width]`, as a share of their length."""
    plain, tree = plain.double(), tree.double()
    return ((tree - plain).norm(dim=-1) / plain.norm(dim=-1).clamp(min=1e-9)).mean().item()


def loss_of(output: Any) -> Tensor | None:
    """Return a loss of what a model returned: that of TRL's log-probabilities, or its own."""
    logs = getattr(output, "log_probs", None)
    return getattr(output, "loss", None) if logs is None else -logs.sum()


def sample(tree: Tree) -> list[Row]:
    """Return some rows of a tree: neighbours, which may share, the longest one and the last one."""
    last = len(tree.rows) - 1
    longest = max(range(last + 1), key=lambda index: len(tree.rows[index].ids))
    return [tree.rows[index] for index in sorted({0, min(1, last), longest, last})]


def rows_of(inputs: Mapping[str, Any]) -> Rows:
    """Return tokens, mask and labels of what a model gets."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    return ids, torch.ones_like(ids) if mask is None else mask != 0, inputs["labels"]


def why_no_rows(inputs: Any) -> str | None:
    """Return why a batch is not rows of tokens with labels and nothing else, as far as its form tells."""
    if not isinstance(inputs, Mapping):
        return "a batch is no mapping of names to tensors"
    for name in ("input_ids", "labels"):
        if not torch.is_tensor(inputs.get(name)):
            return f"a batch holds no `{name}`"
    tensors = {name: value for name, value in inputs.items() if torch.is_tensor(value) and value.dim()}
    if others := tensors.keys() - set(_BATCH):
        return f"a batch holds `{min(others)}` beside tokens"
    if inputs["input_ids"].dim() != 2 or len({tensor.shape for tensor in tensors.values()}) > 1:
        return "tokens, mask and labels of a batch have different shapes"
    return "labels of a batch are not tokens" if inputs["labels"].is_floating_point() else None


# Sharing.


HOLE = "a row has a hole in its mask, or predicts a token from padding"


class _UnderWay(threading.local):
    """The forward pass of this thread: the micro-batches of a window may go through a model on several."""

    row: FlatRow | None = None
    comparing: str | None = None
    """`padded` or `tree` in a comparison."""
    hidden: Tensor | None = None
    """What the backbone returned in a comparison."""


class SharedRows(Part):
    """
    Lets models compute batches as trees.

    It counts `tokens` (of all rows, without padding, on this process), and what was not computed:
    `tokens_padding`, and `tokens_shared`, to which tokens without influence on a label belong. `plain_rows_because` in
    the summary says why the last batch that was computed as it is was.

    Args:
        off (`bool`): Do nothing.
        why_plain (`str`, *optional*): Why no batch is exchanged in this run.
        half_precision (`bool`): Whether models compute in bf16 or fp16.
        may_compare (`bool`): Whether a model can run one more forward pass inside of one. It cannot where processes, or
            the layers of a window, wait for each other.
    """

    name = "shared_rows"

    def __init__(
        self,
        off: bool = False,
        why_plain: str | None = None,
        half_precision: bool = False,
        may_compare: bool = True,
    ):
        self.off, self.why_plain, self.half_precision = off, why_plain, half_precision
        self.may_compare = may_compare
        self.fallbacks = Fallbacks("Rows are computed padded, each for itself (`share_rows`)")
        self.shares_nothing = Fallbacks("Padding is left out, but no shared prefix (`share_rows`)")
        self.counts: Counter[str] = Counter()
        """Those of the run, once it begins."""
        self._known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
        self._copied: list[tuple[weakref.ref[Tensor], Batch, Tree | None]] = []
        self._computed: Tensor | None = None
        self._opened: list[tuple[nn.Module, contextlib.ExitStack]] = []
        self._backward_follows = False
        self._under_way = _UnderWay()
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
        return not self.off and self.why_plain is None

    # Open and closed. Recomputed layers need the attention of trees in the backward pass too.

    @contextlib.contextmanager
    def on(self, *models: nn.Module | None) -> Generator[None]:
        """Exchange the batches that models get inside the context, and until the backward pass if one follows."""
        first = len(self._opened)
        for model in models:
            if model is not None:
                self._open(model)
        try:
            yield
        finally:
            if not (self._backward_follows and torch.is_grad_enabled()):
                self._close(first)

    def _open(self, model: nn.Module) -> None:
        if self.off or any(model is opened for opened, _ in self._opened):
            return
        stack = contextlib.ExitStack()
        self._opened.append((model, stack))
        stack.callback(model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True).remove)
        if self.may_share and self._know(model).why is None:
            stack.callback(model.register_forward_hook(self._after).remove)
            stack.callback(backbone_of(model).register_forward_hook(self._behind_backbone).remove)

    def _close(self, first: int = 0) -> None:
        while len(self._opened) > first:
            self._opened.pop()[1].close()
        if not self._opened:
            layout_of.cache_clear()

    def _attend(self, model: nn.Module) -> None:
        """Let a model attend along paths from here on until it is closed, also in layers that are recomputed."""
        stack = next(stack for opened, stack in self._opened if opened is model)
        stack.enter_context(_in_trees(model))

    def before_forward(self, phase: Phase | None) -> None:
        self._backward_follows = True

    def after_backward(self, phase: Phase | None) -> None:
        self._backward_follows = False
        self._close()

    # A run.

    def begin(self, run: Run) -> None:
        self.counts = run.counts
        for known in self._known.values():
            known.drawn.clear()  # rates may have changed since the last training
        self._said_drawn = False

    def end_step(self, step: Step) -> None:
        self._copied = []

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Generator[None]:
        """Context for an evaluation, whose tokens are not those of the training."""
        with self.on(model), self.uncounted():
            yield

    @contextlib.contextmanager
    def uncounted(self) -> Generator[None]:
        """Context for passes that do not belong to the training."""
        before, self._is_counting = self._is_counting, False
        try:
            yield
        finally:
            self._is_counting = before

    def summary(self) -> dict[str, Any]:
        return {**{name: self.counts[name] for name in COUNTS}, "plain_rows_because": self.plain_because}

    def state_dict(self) -> dict[str, Any]:
        return {"plain_because": self.plain_because} if self.plain_because else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fallbacks.because = state["plain_because"]

    # Batches on the host.

    def copy_ahead(
        self, batches: Sequence[tuple[Mapping, Mapping]], rows: Callable[[Mapping], Rows], known_by: str
    ) -> None:
        """
        Copy the batches of a step to the host at once: the host waits for the device at every copy.

        Args:
            batches (`Sequence[tuple[Mapping, Mapping]]`):
                As the trainer gets them, each with the same on the host, or once more where it is not there.
            rows (`Callable`): From a batch to what a model will get of it.
            known_by (`str`): Name of the tensor that a model will get, or of that of [`computing`].
        """
        copies = on_host([rows(there) for _, there in batches]) if self.may_share else []
        self._copied = [(weakref.ref(batch[known_by]), copy, None) for (batch, _), copy in zip(batches, copies)]

    @contextlib.contextmanager
    def computing(self, tensor: Tensor) -> Generator[None]:
        """Inside, a model gets tokens that the trainer has just put together. `tensor` is what they are known by."""
        self._computed = tensor
        try:
            yield
        finally:
            self._computed = None

    def known_as(self, tensor: Tensor, batch: Batch, tree: Tree | None = None) -> None:
        """A model may get this tensor: its batch on the host, and its tree if it was laid out."""
        self._copied.append((weakref.ref(tensor), batch, tree))

    def _on_host(self, inputs: Mapping[str, Any]) -> tuple[Batch, Tree | None]:
        """Return a batch on the host, and its tree if it was laid out: as it was copied ahead, or else copied now."""
        known_by = inputs["input_ids"] if self._computed is None else self._computed
        for seen, batch, tree in self._copied:
            if seen() is known_by:
                return batch, tree
        batch = on_host([rows_of(inputs)])[0]
        self.known_as(known_by, batch)
        return batch, None

    # The exchange.

    def _before(self, model: nn.Module, args: tuple, inputs: dict[str, Any]):
        """Exchange a padded batch for a flat row."""
        way = self._under_way
        way.row = None
        if way.comparing == "padded" or args:
            return None
        if (why := self._why_not(model, inputs)) is not None:
            if inputs.get("labels") is not None:  # else nothing could be left out
                self.fallbacks.cannot_be_exact(why)
            return None
        batch, tree = self._on_host(inputs)
        if tree is None:
            tree = self._tree_if_worth(model, inputs, batch)
            self._count(batch, tree)
        if tree is None:
            return None
        fused = bool(inputs.get("fused_lm_head"))
        way.row = FlatRow.of(tree, batch, inputs["input_ids"].device, repeat=not fused)
        if way.comparing is None:
            self._attend(model)
        return args, {**inputs, **way.row.inputs()}

    def _behind_backbone(self, backbone: nn.Module, args: tuple, output: Any):
        """Take out the hidden states of the slots that predict."""
        way = self._under_way
        if way.comparing is not None:
            way.hidden = output[0]
        if way.row is None:
            return None
        hidden = output[0][:, way.row.slots.to(output[0].device)]
        if isinstance(output, tuple):
            return (hidden, *output[1:])
        output.last_hidden_state = hidden
        return output

    def _after(self, model: nn.Module, args: tuple, output: Any):
        """Exchange the values of targets for those of the batch, where the caller reads any."""
        row, self._under_way.row = self._under_way.row, None
        if row is None or getattr(output, "log_probs", None) is None:
            return None
        return type(output)(**{name: row.read(values) for name, values in output.items() if values.dim() == 2})

    def _count(self, batch: Batch, tree: Tree | None) -> None:
        if not self._is_counting or self._under_way.comparing:
            return
        self.counts["tokens"] += batch.tokens
        if tree is not None:
            self.counts["tokens_padding"] += batch.ids.numel() - batch.tokens
            self.counts["tokens_shared"] += batch.tokens - len(tree.ids)

    # Whether.

    def _know(self, model: nn.Module) -> _Known:
        if model not in self._known:
            self._known[model] = _Known.of(model)
        return self._known[model]

    def _why_not(self, model: nn.Module, inputs: Mapping[str, Any]) -> str | None:
        """Return why a batch is computed as it is, if that is known before anything is copied to the host."""
        if self.why_plain is not None:
            return self.why_plain
        if (why := why_no_rows(inputs)) is not None:
            return why
        if inputs.get("output_router_logits"):
            return "the router loss counts every token of the padded rows"
        return self._know(model).why

    def _drawn(self, model: nn.Module, device: torch.device) -> Drawn:
        """Return which random numbers a model draws in its mode."""
        drawn = self._know(model).drawn
        if model.training not in drawn:
            way, before = self._under_way, self._under_way.comparing
            try:
                way.comparing = "padded"  # it runs inside of a forward pass
                drawn[model.training] = drawn_numbers(model, device)
            finally:
                way.comparing = before
        return drawn[model.training]

    def _note_drawn(self, model: nn.Module, drawn: Drawn, rows: Sequence[Row]) -> None:
        """Say once what random numbers of these rows cost: the share of their tokens that is not saved."""
        if self._said_drawn:
            return
        saved = 1 - len(Tree.of(rows).ids) / max(sum(len(row.fed) for row in rows), 1)
        rate = dropout_of(model)
        numbers = f"dropout ({rate:g})" if rate else "the random numbers of a forward pass"
        change = "`lora_dropout=0`" if hasattr(model, "peft_config") else "the rates of dropout in its config at 0"
        cost = f"About {saved:.0%} of the tokens would be saved with {change}."
        self._said_drawn = drawn == "by batch" or saved > 1 - WORTH
        if drawn == "by batch":
            self.fallbacks.cannot_be_exact(f"{numbers} would be drawn for more than one row at a time", advice=cost)
        elif self._said_drawn:
            self.shares_nothing.cannot_be_exact(f"{numbers} would be drawn once for all rows that share", advice=cost)

    def _tree_if_worth(self, model: nn.Module, inputs: dict[str, Any], batch: Batch) -> Tree | None:
        """Return the tree of a batch, or `None` if the batch is computed as it is."""
        known, device = self._know(model), inputs["input_ids"].device
        rows = batch.rows(counts_mask=known.counts_mask)
        if rows is None:
            self.fallbacks.cannot_be_exact(HOLE)
        if not rows:
            return None
        try:
            drawn = self._drawn(model, device)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.why_plain = self.fallbacks.did_not_work(error, "the model does not take ten tokens")
            return None
        tree = Tree.of(rows, shares=drawn == "nothing")
        if drawn != "nothing":
            self._note_drawn(model, drawn, rows)
        compact = bool(inputs.get("fused_lm_head")) and inputs["input_ids"].is_cuda
        if drawn == "by batch" or known.costs.tree(tree) > WORTH * known.costs.padded(batch, compact=compact):
            return None
        if not known.has_compared(tree.longest):
            if not self.may_compare:
                self.fallbacks.cannot_be_exact("no batch of its kind was compared yet")
                return None
            self.why_plain = self._compare(model, tree, [batch], lambda part: model(**{**inputs, **part}), device)
        return tree if self.why_plain is None else None

    def _compare(
        self,
        model: nn.Module,
        tree: Tree,
        batches: Sequence[Batch],
        compute: Callable[[dict[str, Tensor]], Any],
        device: torch.device,
    ) -> str | None:
        """
        Compute some rows in both ways, and return why the results are not the same.

        Both passes are made in evaluation mode. Where the model draws random numbers in training, one more pass shows
        that it takes a flat row in that mode too. Generators are as they were afterwards.

        Args:
            compute (`Callable`): From `input_ids`, `attention_mask` and `labels` to what holds a `loss`, or to a loss.
            device (`torch.device`): Where the model computes.
        """
        modes, before = [module.training for module in model.modules()], RandomStates.now(device)
        trains, draws = model.training, self._know(model).drawn.get(True, "nothing") != "nothing"
        model.eval()
        try:
            why = self._differs(model, Tree.of(sample(tree)), batches, compute, device)
            if why is None and trains and draws:
                model.train()
                why = self._differs(model, Tree.of(sample(tree), shares=False), batches, compute, device, only="tree")
            return why
        finally:
            before.restore()
            for module, mode in zip(model.modules(), modes):
                module.training = mode

    def _differs(
        self,
        model: nn.Module,
        tree: Tree,
        batches: Sequence[Batch],
        compute: Callable[[dict[str, Tensor]], Any],
        device: torch.device,
        only: str | None = None,
    ) -> str | None:
        """As [`_compare`], in the mode that the model is in; `only="tree"`: whether it takes a flat row at all."""
        batch, part = padded(tree, batches)
        inputs = {name: tensor.to(device) for name, tensor in zip(_BATCH, batch)}
        targets = Targets.of(part, [batch])
        way, known_by, self._computed = self._under_way, self._computed, None
        self.known_as(inputs["input_ids"], batch, part)
        found: list[tuple[Tensor, Any]] = []
        try:
            with torch.no_grad():
                for way.comparing in ("padded", "tree") if only is None else (only,):
                    way.hidden = None
                    with _in_trees(model) if way.comparing == "tree" else contextlib.nullcontext():
                        result = compute(dict(inputs))
                    if way.hidden is None:
                        why = f"`{type(_bare(model)).__name__}` does not call its backbone as a module"
                        self.fallbacks.cannot_be_exact(why)
                        return why
                    loss = result if torch.is_tensor(result) else loss_of(result)
                    rows, columns = targets.places[:, 1:].t()
                    where = (rows, columns) if way.comparing == "padded" else (0, targets.slots[targets.readers])
                    found.append((way.hidden[where], None if loss is None else loss.double()))
        except CannotAttendError as error:
            self.fallbacks.cannot_be_exact(str(error))
            return str(error)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if not getattr(_bare(model), "_supports_attention_backend", False):
                why = f"the attention of `{type(_bare(model)).__name__}` is its own, not one of transformers' interface"
                self.fallbacks.cannot_be_exact(why)
                return why
            saved = 1 - len(tree.ids) / sum(len(row.fed) for row in tree.rows)
            cost = f"About {saved:.0%} of the tokens of the first batch, and its padding, are not saved."
            return self.fallbacks.did_not_work(error, "the model does not take a tree", cost=cost)
        finally:
            way.comparing = way.row = way.hidden = None
            self._computed = known_by
            self._copied.pop()
        if only is not None:
            return None
        self._know(model).note(tree.longest)
        most = TOLERANCES[self.half_precision or model.dtype in (torch.float16, torch.bfloat16)]
        (plain, plain_loss), (shared, shared_loss) = found
        if not len(targets.readers):
            return None
        why = None
        if (distance := apart(plain, shared)) > most or distance != distance:
            why = (
                f"hidden states of the first batch are {distance:.1e} of their length away from those of padded rows, "
                f"more than {most:g}"
            )
        elif plain_loss is not None and not (shared_loss - plain_loss).abs() <= most * plain_loss.abs():
            why = f"the loss of the first batch is {shared_loss:.6g}, and {plain_loss:.6g} in padded rows"
        if why is not None:
            saved = 1 - len(tree.ids) / sum(len(row.fed) for row in tree.rows)
            self.fallbacks.cannot_be_exact(why, advice=f"About {saved:.0%} of its tokens, and padding, are not saved.")
        return why
