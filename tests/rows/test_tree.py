"""A tree holds each token once, and every label of every row finds its place in it."""

import numpy as np
import pytest
import torch
from rig.sft_rows import IGNORED, KINDS, pad, row, slots_of

from hf_hybrid.rows.tree import WORD, Batch, Targets, Tree, common, divide, on_host, padded


def batch_of(rows, left=False):
    made = pad(rows, left)
    return Batch(made["input_ids"], made["attention_mask"], made["labels"])


def to_bytes(tokens):
    """As `Row.ids` has them."""
    return np.array(tokens, dtype=np.int64).astype(WORD).tobytes()


def to_tokens(ids):
    return np.frombuffer(ids, WORD).tolist()


def flat(tree):
    """The token and the position of each slot."""
    return tuple(tensor.tolist() for tensor in tree.flat())


def tree_of(*rows, left=False):
    batch = batch_of(rows, left)
    found = batch.rows()
    assert found is not None
    return batch, Tree.of(found)


def test_rows_that_begin_alike_share_a_segment_and_positions_restart_at_the_branch():
    start = [5, 6, 7, 8, 9]
    batch, tree = tree_of(row((start, 0), ([20, 21], 1)), row((start, 0), ([30, 31, 32], 1)))
    # The last token of a row predicts nothing.
    assert flat(tree) == ([5, 6, 7, 8, 9, 20, 30, 31], [0, 1, 2, 3, 4, 5, 5, 6])
    assert [(s.begin, s.end, s.path) for s in tree.segments] == [(0, 5, ()), (5, 6, ((0, 5),)), (6, 8, ((0, 5),))]
    targets = Targets.of(tree, [batch])
    assert list(zip(targets.slots.tolist(), targets.tokens.tolist())) == [(4, 20), (4, 30), (5, 21), (6, 31), (7, 32)]


def test_a_conversation_unrolled_into_turns_is_one_chain():
    turns = [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14], [15, 16, 17, 18, 19]]
    rows = [row((sum(turns[:n], []), 0), (turns[n], 1)) for n in range(3)]
    _, tree = tree_of(*rows)
    assert flat(tree)[0] == sum(turns, [])[:-1] and tree.labels == 14  # the first token of a row is predicted by none
    assert [len(s.path) for s in tree.segments] == [0, 1, 2]


def test_rows_with_other_labels_share_and_a_target_stands_once():
    tokens = list(range(5, 15))
    batch, tree = tree_of(row((tokens, 1)), row((tokens[:6], 0), (tokens[6:], 1)))
    targets = Targets.of(tree, [batch])
    assert tree.size == 9 and len(targets.slots) == 9 and len(targets.readers) == 9 + 4


def test_what_predicts_nothing_is_left_out():
    _, tree = tree_of(row(([5, 6], 0), ([7, 8], 1), ([9] * 20, 0)), row(([5] * 30, 0)))
    assert flat(tree)[0] == [5, 6, 7] and len(tree.rows) == 1


def test_positions_are_columns_unless_the_model_counts_the_mask():
    batch = batch_of([row(([5], 0), ([6, 7], 1)), row(([8, 9, 10, 11, 12], 1))], left=True)
    assert [found.position for found in batch.rows()] == [2, 0]
    assert [found.position for found in batch.rows(counts_mask=True)] == [0, 0]


def test_a_row_with_a_hole_has_no_place_in_a_tree():
    batch = batch_of([row(([5, 6, 7, 8], 1))])
    batch.mask[0, 1] = 0
    assert batch.rows() is None
    padding = batch_of([row(([5, 6, 7, 8], 1))], left=True)
    padding.mask[0, 0] = 0  # the second token is predicted from padding
    assert padding.rows() is None


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_its_path(kind, left):
    """Reference: each row by itself. Its tokens stand in its slots, in order, and its labels are all read."""
    batches = [batch_of(KINDS[kind]()[start : start + 8], left) for start in (0, 8, 16)]
    rows = [found for number, batch in enumerate(batches) for found in batch.rows(number)]
    trees = divide(rows, max(batch.ids.numel() for batch in batches))
    assert sum(len(tree.rows) for tree in trees) == len(rows)
    found = [torch.full_like(batch.labels, IGNORED) for batch in batches]
    for tree in trees:
        ids, positions = tree.flat()
        for index, each in enumerate(tree.rows):
            slots = slots_of(tree, index)
            assert ids[slots].tolist() == to_tokens(each.ids)[:-1]
            assert positions[slots].tolist() == list(range(each.position, each.position + each.length))
        covered = [slot for segment in tree.segments for slot in range(segment.begin, segment.end)]
        assert covered == list(range(tree.size))
        targets = Targets.of(tree, batches)
        assert len({*zip(targets.slots.tolist(), targets.tokens.tolist())}) == len(targets.slots)
        for (number, line, column), reader in zip(targets.places.tolist(), targets.readers.tolist()):
            found[number][line, column + 1] = targets.tokens[reader]
    for batch, labels in zip(batches, found):
        assert torch.equal(batch.labels[:, 1:], labels[:, 1:])
    assert sum(tree.size for tree in trees) < sum(batch.tokens for batch in batches)


def test_a_path_of_a_segment_is_that_of_its_rows():
    batch = batch_of(KINDS["agent"]()[:16])
    tree = Tree.of(batch.rows())
    ends = {segment.end: segment for segment in tree.segments}
    for index in range(len(tree.rows)):
        last = ends[tree.spans[index][-1][1]]
        path = [slot for begin, end in (*last.path, (last.begin, last.end)) for slot in range(begin, end)]
        assert path == slots_of(tree, index).tolist()


def test_micro_batches_take_no_more_memory_than_asked():
    rows = [found for found in batch_of(KINDS["instructions"]()).rows()]
    trees = divide(rows, 100)
    assert all(tree.memory <= 100 for tree in trees) and len(trees) > 3
    assert len(divide(rows, 10)) == len(rows)  # one row may take more


def test_a_tree_as_a_padded_batch_holds_its_rows_whole():
    batches = [batch_of(KINDS["answers"]()[start : start + 4]) for start in (0, 4)]
    tree = Tree.of([found for number, batch in enumerate(batches) for found in batch.rows(number)])
    batch, same = padded(tree, batches)
    assert batch.tokens == sum(each.tokens for each in batches)
    assert sorted(r.ids for r in batch.rows()) == sorted(r.ids for r in tree.rows)
    for each in same.rows:
        assert batch.ids[each.number, each.first :][: each.length + 1].tolist() == to_tokens(each.ids)


def test_a_row_that_learns_to_end_with_padding_keeps_this_label():
    batch = batch_of([row(([5, 6, 7, 8], 1)), row(([5, 6], 1))])
    batch.mask[0, 3] = 0
    tree = Tree.of(batch.rows())
    same, tree = padded(tree, [batch])
    assert tree.labels == len(Targets.of(tree, [same]).readers) == 4


def test_batches_of_other_lengths_are_copied_together():
    batches = [pad(KINDS["system"]()[:3]), pad(KINDS["agent"]()[:5])]
    copies = on_host([(b["input_ids"], b["attention_mask"], b["labels"]) for b in batches])
    assert all(torch.equal(copy.labels, batch["labels"]) for copy, batch in zip(copies, batches))


@pytest.mark.parametrize("first, second, expected", [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 3, 3], 1)])
def test_common_beginning(first, second, expected):
    first, second = (to_bytes(tokens) for tokens in (first, second))
    assert common(first, second) == common(second, first) == expected


def test_rows_sort_as_their_tokens():
    tokens = [[1], [1, 2], [2], [255, 1], [256], [70_000, 5], [150_000]]
    assert sorted(tokens) == [to_tokens(ids) for ids in sorted(to_bytes(each) for each in tokens)]
