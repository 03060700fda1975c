"""
The rows of a batch as a prefix tree: nothing is padded, and no shared prefix is computed twice.

    rows          s s s s a a a            s: a system prompt, a b c: turns
                  s s s s b b .    -->     s s s s a a a b b c c c c      one flat row; positions restart at a branch
                  s s s s c c c c

In a causal transformer a hidden state depends only on the tokens up to its own. So rows with a common prefix have the
same hidden states there, whatever follows and whatever their labels are. A [`Tree`] computes each of these states once.
It holds three things:

- **Segments**, the pieces between two branches. A segment attends to all of the segments on its path from the root, and
  to itself causally (attention.py). A token keeps the position that it has in its row, so positions restart at a
  branch.
- **Slots**: where each token of each row is computed. Slots are numbered through the flat row.
- **Targets**: the pairs of a slot and the token that a row predicts there. Where a branch begins, one slot has several
  targets. Where rows repeat each other, several rows read the same target, and each counts.

Tokens that predict nothing are left out: padding, the last token of a row, the tokens after a row's last label, and
rows without labels. A router's loss counts all but padding (router_loss.py): there rows and micro-batches stay whole.

**How the tree is built.** The rows are sorted, so rows with a common prefix are neighbours. They enter the tree one
after the other, and only the path of the previous row is open. A new row follows this path as far as both agree, splits
the segment where they differ, and adds the rest of itself below. Sharing fewer than `LEAST` tokens is not worth a
segment: the row then branches off where the segment before began.

**How rows are divided.** The rows of an accumulation window may be computed in any of its micro-batches, because the
gradients of all are added. [`divide`] fills micro-batches with rows in sorted order. What counts is the memory that a
micro-batch takes: that of its tokens, and a little for the keys and values that segments gather along their paths.

The same idea without sharing is known as packing without padding. With sharing it is "tree training"
(https://arxiv.org/abs/2511.00413), and "prefix sharing" for preference pairs (https://arxiv.org/abs/2410.20305).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_hybrid.machine import copy_to_device_

IGNORED = -100
"""Label of a token that nobody has to predict."""
LEAST = 4
"""Fewer shared tokens are not worth a segment of their own."""
KEY_SHARE = 1 / 16
"""
Memory that a gathered key and value take, as a share of what a token takes: 2 of about 34 tensors of its width that a
decoder layer keeps for the backward pass.
"""


WORD = np.dtype(">u4")
"""A token in [`Row.ids`]: four bytes, the high ones first. So rows compare as their tokens do, in C."""


class Row(NamedTuple):
    """One row of a batch. Rows sort by what they begin with."""

    position: int  # of its first token
    ids: bytes  # its tokens up to the last one that is predicted, or all that are computed, each a `WORD`
    length: int  # number of its tokens that are computed: the last one predicts nothing
    first: int  # column of its first token; what stands before it is padding
    batch: int  # the number of the batch it comes from
    number: int  # its own number there
    labels: int  # how many of its tokens are predicted


Rows = tuple[Tensor, Tensor, Tensor]
"""Tokens, mask and labels as a model gets them, each `[batch, length]`."""


class Packed(NamedTuple):
    """The packed batch whose documents a [`Batch`] holds, each as a row of its own."""

    given: Mapping[str, Any]  # as the trainer has it
    shape: tuple[int, int]  # of its rows, with a column for what their last tokens predict
    rows: Tensor  # where each document is: its row, `[batch]`
    shifts: Tensor  # and what its columns are ahead of those here, `[batch]`


class Batch(NamedTuple):
    """A padded batch, on the host: `[batch, length]`, padded on either side."""

    ids: Tensor
    mask: Tensor  # 1 where there is a token, 0 where there is padding
    labels: Tensor  # the tokens that are to be predicted, `IGNORED` elsewhere
    micro_batches: Tensor | None = None  # of the trainer, that rows come from, `[batch]`: none is -1, `None` is one
    divisors: Tensor | None = None  # of each row's loss, where losses are means, `[batch]`; `None` where they are sums
    packed: Any = None  # [`Packed`] of a batch of documents
    images: Any = None  # [`Images`] of a batch with some: `ids` hold their codes (images.py)
    positions: Tensor | None = None  # of tokens, where they have several axes, `[axes, batch, length]`

    @property
    def decoded(self) -> Tensor:
        """Tokens as a model gets them."""
        return self.ids if self.images is None else self.images.decoded(self.ids)

    @property
    def tokens(self) -> int:
        """Number of tokens without padding."""
        return int(self.mask.sum())

    @property
    def predicted(self) -> np.ndarray:
        """Which tokens predict a label: `[batch, length - 1]`, as each predicts the one behind it."""
        return self.labels.numpy()[:, 1:] != IGNORED

    def as_mean(self) -> Batch:
        """Return the batch as one whose loss is the mean over its labels, wherever its rows are computed."""
        return self._replace(divisors=torch.full((len(self.ids),), max(int(self.predicted.sum()), 1)))

    def rows(self, number: int = 0, *, counts_mask: bool = False, whole: bool = False) -> list[Row] | None:
        """
        Return the rows with labels, as those of batch `number`; where `whole`, all rows and all of their tokens.

        A token's position is its column, or where `counts_mask`, its place among the tokens of its row. `None` if a row
        has a hole in its mask, or predicts a label from padding: it has no place in a tree.
        """
        ids, mask, predicted = self.ids.numpy().astype(WORD), self.mask.numpy() != 0, self.predicted
        rows, labels = [], predicted.sum(1)
        counts_mask = counts_mask or self.positions is not None  # they do
        kept = mask.any(1) if whole else labels > 0
        if not kept.any():
            return rows
        begins, predicting = mask.argmax(1), np.where(labels, predicted.argmax(1), mask.shape[1])
        ends = np.where(labels, predicted.shape[1] - predicted[:, ::-1].argmax(1), 0)  # behind the last that predicts
        if whole:
            ends = np.maximum(ends, mask.shape[1] - mask[:, ::-1].argmax(1))
        for row in np.flatnonzero(kept).tolist():
            begin, end = int(begins[row]), int(ends[row])
            if predicting[row] < begin or not mask[row, begin:end].all():
                return None
            tokens, position = ids[row, begin : end + (not whole)].tobytes(), 0 if counts_mask else begin
            rows.append(Row(position, tokens, end - begin, begin, number, row, int(labels[row])))
        return rows


PACKED, IMAGES = attrgetter("packed"), attrgetter("images")
"""Of a [`Batch`]: what it holds the documents of."""


def rows_of(inputs: Mapping[str, Any]) -> Rows:
    """Return tokens, mask and labels of what a model gets."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    return ids, torch.ones_like(ids) if mask is None else mask != 0, inputs["labels"]


ENDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What TRL gives beside `position_ids`, and says the same: where documents end."""


def unpacked(inputs: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Rows] = rows_of) -> Batch:
    """
    Return the documents of packed rows as rows; [`rows_of`] or [`rows_of_states`] `read` the packed ones. Their
    `position_ids` count on within a document.

        ids        a a a b b | c c c c .        a a a
        positions  0 1 2 0 1 | 5 6 7 8 0        b b
                                                . . . . . c c c c

    A token stands in the column of its position. Behind a document stands the token that its last one predicts, if it
    predicts one: the first of the next document, where nobody has hidden its label.
    """
    ids, mask, labels = (tensor.cpu().numpy() for tensor in read(inputs))
    places = inputs["position_ids"].cpu().numpy()
    places = np.pad(places, ((0, 0), (0, ids.shape[1] - places.shape[1])))
    begins = mask != 0
    begins[:, 1:] &= (places[:, 1:] != places[:, :-1] + 1) | (mask[:, :-1] == 0)
    rows, columns = begins.nonzero()
    # Tokens are counted through the batch: those of a document end where those of the next one begin.
    counted = np.append(mask.astype(bool).cumsum()[rows * mask.shape[1] + columns] - 1, mask.astype(bool).sum())
    ends = columns + np.diff(counted)
    firsts = places[rows, columns]
    width = int((firsts + ends - columns).max(initial=1)) + 1
    of_documents = np.zeros((3, len(rows), width), np.int64)
    of_documents[2] = IGNORED
    for number, (row, begin, end, first) in enumerate(zip(rows, columns, ends, firsts)):
        stop = min(end + 1, ids.shape[1])
        for filled, given in zip(of_documents, (ids, mask, labels)):
            filled[number, first : first + stop - begin] = given[row, begin:stop]
        of_documents[1, number, first + end - begin :] = 0
        of_documents[2, number, first] = IGNORED  # no token of this document predicts its first one
    packed = Packed(dict(inputs), ids.shape, torch.from_numpy(rows), torch.from_numpy(columns - firsts))
    return Batch(*torch.from_numpy(of_documents), packed=packed)


def reason_not_documents(inputs: Mapping[str, Any]) -> str | None:
    """Return why what a batch on the host says of its documents cannot be read."""
    positions, ends = inputs.get("position_ids"), inputs.get("cu_seq_lens_q")
    if positions is None:
        return None
    if (positions < 0).any():
        return "`position_ids` of a batch are below 0"
    if ends is not None and not torch.equal(ends[:-1].long(), (positions == 0).flatten().nonzero()[:, 0]):
        return "`position_ids` and `cu_seq_lens_q` of a batch tell other documents"
    return None


def rows_of_states(inputs: Mapping[str, Any]) -> Rows:
    """
    Return rows of which every token predicts something: tokens, mask and labels, each `[batch, length + 1]`.

    One more column is there for what the last token of a row predicts.
    """
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    mask, more = torch.ones_like(ids) if mask is None else (mask != 0).to(ids.dtype), torch.zeros_like(ids[:, :1])
    labels = torch.zeros_like(ids).masked_fill(mask == 0, IGNORED)  # any token will do: nobody scores it
    return torch.cat([ids, more], 1), torch.cat([mask, more], 1), torch.cat([more + IGNORED, labels], 1)


def reason_not_rows(
    inputs: Any, beside: Collection[str] = (), needs: Sequence[str] = ("input_ids", "labels")
) -> str | None:
    """
    Return why a batch is not rows of tokens with what the loss `needs` and nothing else, as far as its form tells.
    `beside` are arguments of a forward pass that say nothing of the rows. The batch may be packed.
    """
    if not isinstance(inputs, Mapping):
        return "a batch is no mapping of names to tensors"
    if inputs.get("position_ids") is not None:
        beside, needs = {*beside, *ENDS}, (*needs, "position_ids")
    for name in needs:
        if not torch.is_tensor(inputs.get(name)):
            return f"a batch holds no `{name}`"
    given = {name: value for name, value in inputs.items() if value is not None and name not in beside}
    if others := given.keys() - {*needs, "attention_mask"}:
        return f"a batch holds `{min(others)}` beside tokens"
    if inputs["input_ids"].dim() != 2 or len({getattr(value, "shape", None) for value in given.values()}) > 1:
        return "tokens, mask and labels of a batch have different shapes"
    return "labels of a batch are not tokens" if "labels" in given and given["labels"].is_floating_point() else None


def batches_of(window: Sequence[Mapping[str, Any]]) -> list[Batch]:
    """Return batches on the host, packed rows as their documents."""
    if not [inputs for inputs in window if inputs.get("position_ids") is not None]:
        return on_host([rows_of(inputs) for inputs in window])
    return [unpacked(i) if i.get("position_ids") is not None else on_host([rows_of(i)])[0] for i in window]


def places_of(batches: Sequence[Batch]) -> list[int]:
    """Return the number of places, padding included, of the batches that the trainer would compute."""
    return [(b.ids if b.packed is None else b.packed.given["input_ids"]).numel() for b in batches]


def on_host(batches: Sequence[Rows]) -> list[Batch]:
    """Copy batches to the host, in one transfer. What is there already is not copied."""
    if not batches:
        return []
    tensors = [tensor.long() for batch in batches for tensor in batch]
    if tensors[0].device.type != "cpu":
        sizes = [tensor.numel() for tensor in tensors]
        parts = torch.cat([tensor.flatten() for tensor in tensors]).cpu().split(sizes)
        tensors = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    return [Batch(*tensors[first : first + 3]) for first in range(0, len(tensors), 3)]


def on_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors of int64 to a device, in one transfer that the host does not wait for."""
    if device.type == "cpu":
        return list(tensors)
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    parts = copy_to_device_(torch.empty_like(flat, device=device), flat).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for tensor, part in zip(tensors, parts, strict=True)]


def common(first: bytes, second: bytes) -> int:
    """Return how many tokens two [`Row.ids`] have in common at their beginning."""
    low, high, size = 0, min(len(first), len(second)) // WORD.itemsize, WORD.itemsize
    while low < high:  # slices compare in C
        middle = (low + high + 1) // 2
        if first[low * size : middle * size] == second[low * size : middle * size]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass
class _Node:
    """A segment while the tree grows: slots `[slot, slot + stop - start)`, tokens `[start, stop)` of its rows."""

    row: Row  # the first one
    slot: int
    start: int
    stop: int
    parent: _Node | None


class Segment(NamedTuple):
    """Tokens between two branches. Plain numbers, so that it can go through a model as an argument."""

    begin: int  # its first slot
    end: int  # the slot behind its last
    path: tuple[tuple[int, int], ...]  # slots of its ancestors, from the root on

    @property
    def keys(self) -> int:
        """Number of tokens that its last token sees."""
        return self.end - self.begin + sum(end - begin for begin, end in self.path)

    @property
    def pairs(self) -> int:
        """Pairs of query and key that its attention computes; causal halves are counted whole."""
        return (self.end - self.begin) * self.keys


def memory_of(row: Row, taken: int, again: float = 0.0) -> float:
    """
    Return the memory that a row takes in a tree that has `taken` of its tokens already, in tokens. They take `again` a
    share of what a token takes, in layers that compute them once for each row (recurrent.py).
    """
    return row.length - (1 - again) * taken + (KEY_SHARE * row.length if taken else 0)


@dataclass
class Tree:
    """Rows that are computed together."""

    rows: list[Row] = field(default_factory=list)  # in sorted order
    size: int = 0  # number of slots
    spans: list[list[tuple[int, int]]] = field(default_factory=list)  # of each row, the slots of its tokens in order
    memory: float = 0.0  # that it takes, in tokens
    shares: bool = True  # prefixes are computed once; if not, each row is a segment of its own
    again: float = 0.0  # share of the memory of a token that is taken once for each row, also of a prefix
    _path: list[_Node] = field(default_factory=list)
    _nodes: list[_Node] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Sequence[Row], **options: Any) -> Tree:
        """Build the tree of some rows; options are `shares` and `again`."""
        tree = cls(**options)
        for row in sorted(rows):
            tree.add(row, tree.taken(row))
        return tree

    def taken(self, row: Row) -> int:
        """Return how many tokens of the next row, which must not sort before the last one, are in the tree already."""
        if not self.shares or not self.rows or self.rows[-1].position != row.position:
            return 0
        shared = min(common(self.rows[-1].ids, row.ids), self.rows[-1].length, row.length)
        cut = next((node for node in self._path if node.stop > shared), None)
        if cut is not None and shared - cut.start < LEAST:
            shared = cut.start
        return shared if shared >= KEY_SHARE * row.length else 0

    def add(self, row: Row, taken: int) -> None:
        """Add the next row, of which `taken` tokens are in the tree already."""
        length = row.length
        self.memory += memory_of(row, taken, self.again)
        while self._path and self._path[-1].stop > taken:
            node = self._path.pop()
            if node.start < taken:  # both rows go on inside of it, so it is cut in two
                upper = _Node(node.row, node.slot, node.start, taken, node.parent)
                node.slot, node.start, node.parent = node.slot + taken - upper.start, taken, upper
                self._nodes.append(upper)
                self._path.append(upper)
        if length > taken:
            node = _Node(row, self.size, taken, length, self._path[-1] if self._path else None)
            self.size += length - taken
            self._nodes.append(node)
            self._path.append(node)
        self.rows.append(row)
        self.spans.append([(node.slot, node.slot + node.stop - node.start) for node in self._path])

    def flat(self) -> tuple[Tensor, Tensor]:
        """Return the token and the position of each slot, both `[slots]`."""
        nodes = sorted(self._nodes, key=lambda node: node.slot)
        ids = [np.frombuffer(node.row.ids, WORD)[node.start : node.stop] for node in nodes]
        positions = [np.arange(node.start + node.row.position, node.stop + node.row.position) for node in nodes]
        return torch.from_numpy(np.concatenate(ids).astype(np.int64)), torch.from_numpy(np.concatenate(positions))

    def positions(self, batches: Sequence[Batch]) -> Tensor | None:
        """Return the positions of slots where those of a batch have several axes, `[axes, slots]`."""
        axes = next((len(batch.positions) for batch in batches if batch.positions is not None), 0)
        filled = torch.zeros(axes, self.size, dtype=torch.long)
        for row, spans in zip(self.rows, self.spans, strict=True) if axes else ():
            given, places = batches[row.batch].positions, np.concatenate([np.arange(*span) for span in spans])
            if given is None:
                filled[:, places] = torch.arange(row.position, row.position + row.length)
            else:
                filled[:, places] = given[:, row.number, row.first : row.first + row.length]
        return filled if axes else None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, in the order of their slots: together they are all slots."""
        segments = []
        for node in sorted(self._nodes, key=lambda node: node.slot):
            path, above = [], node.parent
            while above is not None:
                path.append((above.slot, above.slot + above.stop - above.start))
                above = above.parent
            segments.append(Segment(node.slot, node.slot + node.stop - node.start, tuple(reversed(path))))
        return tuple(segments)

    def reads(self, batch: Batch) -> Tensor:
        """Return how many rows of each micro-batch in a batch read each slot: `[micro_batches, slots]`."""
        of_rows = np.zeros(len(batch.ids), np.int64) if batch.micro_batches is None else batch.micro_batches.numpy()
        numbers = np.unique(of_rows[of_rows >= 0])
        reads = np.zeros((len(numbers), self.size), np.int64)
        for row, spans in zip(self.rows, self.spans, strict=True):
            for begin, end in spans:
                reads[numbers == of_rows[row.number], begin:end] += 1
        return torch.from_numpy(reads)

    @property
    def labels(self) -> int:
        """Number of predicted tokens, each counted once per row."""
        return sum(row.labels for row in self.rows)

    @property
    def longest(self) -> int:
        """Number of tokens of its longest row that are computed."""
        return max(row.length for row in self.rows)


class Targets(NamedTuple):
    """What is predicted in a tree, and who reads it. Each pair of slot and token stands once."""

    slots: Tensor  # where each target is predicted, in ascending order: [targets]
    tokens: Tensor  # what is predicted there: [targets]
    readers: Tensor  # for each label of the batches, its target: [labels]
    places: Tensor  # for each label its batch, row and column of the predicting token: [labels, 3]

    @classmethod
    def of(cls, tree: Tree, batches: Sequence[Batch]) -> Targets:
        """Collect the targets of a tree whose rows come from these batches."""
        # The last token of a row predicts what would stand behind it.
        of_batches = [np.pad(batch.labels.numpy(), ((0, 0), (0, 1)), constant_values=IGNORED) for batch in batches]
        of_rows = [of_batches[row.batch][row.number, row.first + 1 : row.first + 1 + row.length] for row in tree.rows]
        labels = np.concatenate(of_rows)
        wanted = np.flatnonzero(labels != IGNORED)  # the tokens that predict, of all rows one after the other
        begins, ends = np.array([span for spans in tree.spans for span in spans]).T
        starts = np.cumsum([0, *(ends - begins)])
        slots = wanted + np.repeat(begins - starts[:-1], np.diff(np.searchsorted(wanted, starts)))
        # With the index it sorts by merging, which is fast where they are nearly in order.
        pairs, _, readers = np.unique(slots << 32 | labels[wanted], return_index=True, return_inverse=True)
        starts = np.cumsum([0, *map(len, of_rows)])
        owners = np.searchsorted(starts, wanted, side="right") - 1
        numbers = np.array([(row.batch, row.number, row.first) for row in tree.rows])[owners]
        numbers[:, 2] += wanted - starts[owners]
        return cls(*map(torch.from_numpy, (pairs >> 32, pairs & 0xFFFFFFFF, readers, numbers)))


def divide(rows: Sequence[Row], most: float, **options: Any) -> list[Tree]:
    """
    Divide rows into trees that take at most the memory of `most` tokens each; one row may take more. Options are those
    of [`Tree.of`].
    """
    trees: list[Tree] = []
    for row in sorted(rows):
        taken = trees[-1].taken(row) if trees else 0
        if not trees or trees[-1].memory + memory_of(row, taken, trees[-1].again) > most:
            trees.append(Tree(**options))
            taken = 0
        trees[-1].add(row, taken)
    return trees


def by_batch(rows: Sequence[Row], most: float, **options: Any) -> list[Tree]:
    """As [`divide`], of rows that come batch by batch: each batch is a tree of its own, whatever memory it takes."""
    return [Tree.of(list(of_batch), **options) for _, of_batch in itertools.groupby(rows, lambda row: row.batch)]


def join(rows: Sequence[Row], most: float, **options: Any) -> list[Tree]:
    """As [`divide`], of rows that come batch by batch: those of a batch stay together, whatever memory they take."""
    trees: list[Tree] = []
    for tree in by_batch(rows, most, **options):
        if trees and (joined := Tree.of([*trees[-1].rows, *tree.rows], **options)).memory <= most:
            trees[-1] = joined
        else:
            trees.append(tree)
    return trees


def padded(tree: Tree, batches: Sequence[Batch], beside: Sequence[tuple[int, int]] = ()) -> tuple[Batch, Tree]:
    """
    Return the rows of a tree as a padded batch, whole and in their own columns, and the tree as one of that batch.
    `beside` are the numbers of batch and row of other rows that stand in the batch too.
    """
    wanted = [(row.batch, row.number) for row in tree.rows] + list(beside)
    length = max(batches[number].ids.shape[1] for number, _ in wanted)
    filled = np.zeros((3, len(wanted), length), np.int64)
    filled[2] = IGNORED
    arrays = [[tensor.numpy() for tensor in batch[:3]] for batch in batches]
    for place, (number, row) in enumerate(wanted):
        for part, of_batch in zip(filled, arrays[number]):
            part[place, : of_batch.shape[1]] = of_batch[row]
    # Padding on the right has no use, but a row may learn to end with it.
    last = int(np.flatnonzero(filled[1].any(0)).max(initial=0))
    end = max([last] + [row.first + row.length for row in tree.rows]) + 1
    numbers = torch.tensor([number for number, _ in wanted])
    of_rows = [(batches[number].divisors, row) for number, row in wanted]
    divisors = [of_batch[row] for of_batch, row in of_rows if of_batch is not None]
    batch = Batch(*torch.from_numpy(filled[:, :, :end]), numbers, torch.stack(divisors) if divisors else None)
    if images := [of_batch.images for of_batch in batches if of_batch.images is not None]:
        batch = batch._replace(images=images[0], positions=_positions_of(wanted, batches, end))
    return batch, replace(tree, rows=[row._replace(batch=0, number=place) for place, row in enumerate(tree.rows)])


def _positions_of(wanted: Sequence[tuple[int, int]], batches: Sequence[Batch], end: int) -> Tensor | None:
    """Return positions with several axes of rows, by their numbers of batch and row, `[axes, rows, end]`."""
    axes = next((len(batch.positions) for batch in batches if batch.positions is not None), 0)
    filled = torch.arange(end).repeat(axes, len(wanted), 1)
    for place, (number, row) in enumerate(wanted) if axes else ():
        if (given := batches[number].positions) is not None:
            filled[:, place, : given.shape[2]] = given[:, row, :end]
    return filled if axes else None
