"""Layers with a state go on where the segment above ended, in few passes that compute each token once."""

import itertools

import pytest
import torch
from rig.sft_rows import KINDS, pad
from torch import nn

from hf_hybrid.rows import recurrent
from hf_hybrid.rows.attention import Layout, spans_of
from hf_hybrid.rows.recurrent import by_row, passes_of
from hf_hybrid.rows.tree import Batch, Segment, Tree


def tree_of(kind):
    made = pad(KINDS[kind]()[:12])
    return Tree.of(Batch(made["input_ids"], made["attention_mask"], made["labels"]).rows())


def slots_of(segment):
    return [slot for span in spans_of(segment) for slot in range(span.start, span.stop)]


@pytest.mark.parametrize("least", [1, 12, float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_and_those_that_it_starts_behind_are_a_row(kind, least):
    segments = tree_of(kind).segments
    inner = {begin for segment in segments for begin, _ in segment.path}
    rows, before = {0: []}, 0
    for sequences in passes_of(segments, least):
        assert max(start for start, _ in sequences) <= before  # of a pass before this one
        for start, slots in sequences:
            rows[len(rows)] = rows[start] + slots
        before += len(sequences)
    leaves = [slots_of(segment) for segment in segments if segment.begin not in inner]
    assert all(leaf in rows.values() for leaf in leaves)
    paths = [slots_of(segment) for segment in segments]
    assert all(any(row == path[: len(row)] for path in paths) for row in rows.values())
    assert least < float("inf") or len(rows) - 1 == len(leaves)


def test_each_token_is_computed_once_where_a_pass_saves_enough():
    root, a, b = Segment(0, 9, ()), Segment(9, 12, ((0, 9),)), Segment(12, 19, ((0, 9),))
    below = Segment(19, 20, ((0, 9), (12, 19)))  # the only one below, so it goes on
    once = [[(0, [*range(9)])], [(1, [9, 10, 11]), (1, [*range(12, 20)])]]
    assert passes_of([root, a, b, below], 9) == once
    assert passes_of([root, a, b, below], 10) == [[(0, [*range(12)]), (0, [*range(9), *range(12, 20)])]]


def test_sequences_of_one_length_are_computed_together():
    def tree(*lengths):
        slots = itertools.count()
        for length in lengths:
            begin = next(slots)
            end = begin + length
            yield Segment(begin, end, ())
            slots = itertools.count(end)
            for _ in range(2):
                start = next(slots)
                yield Segment(start, start + 1, ((begin, end),))

    assert [len(sequences) for sequences in passes_of([*tree(5, 7, 5)], 1)] == [2, 1, 6]
    leaves = [Segment(0, 10, ()), Segment(10, 74, ()), Segment(74, 139, ())]  # of 10, 64 and 65 tokens
    assert [len(sequences) for sequences in passes_of(leaves, 1)] == [2, 1]


class Sums(nn.Module):
    """A layer whose states are the sum of a row and its last two tokens; with or without linear layers."""

    def __init__(self, linear):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 2)
        self.first = nn.Linear(4, 4) if linear else None
        self.last = nn.Linear(4, 4) if linear else None

    def forward(self, hidden_states, cache_params=None):
        mine = (hidden_states if self.first is None else self.first(hidden_states)).transpose(1, 2)
        start = None if cache_params is None else cache_params.get_recurrent_state(0)
        summed = mine.cumsum(-1) + (0 if start is None else start[..., None])
        if cache_params is not None:
            length, mine = mine.shape[-1], cache_params.update_conv_state(mine, 0, conv_kernel_size=2)
            cache_params.update_recurrent_state(summed[..., -1], 0)
        found = self.conv(nn.functional.pad(mine, (1, 0)))
        found = (found if cache_params is None else found[..., -length:]) * summed
        return found.transpose(1, 2) if self.last is None else self.last(found.transpose(1, 2))


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("least", [1, float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_each_row(kind, least, linear, monkeypatch):
    monkeypatch.setattr(recurrent, "LEAST", least)
    torch.manual_seed(0)
    layer, segments = Sums(linear).double(), tree_of(kind).segments
    flat = torch.randn(1, segments[-1].end, 4, dtype=torch.float64, requires_grad=True)
    expected = torch.zeros_like(flat)
    for segment in segments:
        slots = slots_of(segment)
        expected[0, segment.begin : segment.end] = layer(flat[:, slots])[0, -(segment.end - segment.begin) :]
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), [flat, *layer.parameters()])
    layout = Layout(segments, torch.device("cpu"))
    with by_row([layer], lambda: True):
        found = layer(flat, tree_layout=layout)
    assert torch.allclose(found, expected)
    for one, other in zip(torch.autograd.grad((found * weights).sum(), [flat, *layer.parameters()]), wanted):
        assert torch.allclose(one, other)
