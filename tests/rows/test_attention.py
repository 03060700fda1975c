"""Attention along paths is that of the rows by themselves, with windows and fewer heads of keys, in one call or not."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from rig.sft_rows import KINDS, pad, slots_of
from rig.varlen import TWINS
from torch import nn
from torch.nn.attention import varlen

from hf_hybrid.rows import attention
from hf_hybrid.rows.tree import Batch, Tree

HEADS, FEWER, SIZE = 4, 2, 8


def tree_of(kind, count=12):
    made = pad(KINDS[kind]()[:count])
    return Tree.of(Batch(made["input_ids"], made["attention_mask"], made["labels"]).rows())


def tensors(tree, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = [(HEADS, SIZE), (FEWER, SIZE), (FEWER, SIZE)]
    return [torch.randn(1, heads, tree.size, size, dtype=dtype, requires_grad=True) for heads, size in shapes]


def by_rows(tree, query, key, value, window):
    """Reference: every row by itself, each token written to its slot."""
    output = torch.zeros(1, tree.size, HEADS, SIZE, dtype=query.dtype)
    for index in range(len(tree.rows)):
        slots = slots_of(tree, index)
        keys = [tensor[:, :, slots].repeat_interleave(HEADS // FEWER, 1) for tensor in (key, value)]
        places = torch.arange(len(slots))
        back = places[:, None] - places
        seen = (back >= 0) & (back < (window or len(slots)))
        found = F.scaled_dot_product_attention(query[:, :, slots], *keys, attn_mask=seen)
        output = output.index_copy(1, slots, found.transpose(1, 2))
    return output


@pytest.fixture(autouse=True)
def forget():
    yield
    attention.layout_of.cache_clear()


def attend(tree, query, key, value, window):
    options = {} if window is None else {"sliding_window": window}
    return attention.attend("sdpa", nn.Module(), query, key, value, tree_segments=tree.segments, **options)[0]


@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_a_path_sees_what_its_row_sees(kind, window):
    tree = tree_of(kind)
    mine, theirs = tensors(tree), tensors(tree)
    found, expected = attend(tree, *mine, window), by_rows(tree, *theirs, window)
    assert torch.allclose(found, expected, atol=1e-12)
    weight = torch.randn_like(found)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    assert all(torch.allclose(a.grad, b.grad, atol=1e-12) for a, b in zip(mine, theirs))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", TWINS)
def test_one_call_gets_the_arguments_of_all_segments(version, kind, window, monkeypatch):
    """`varlen_attn` needs a GPU: its twins stand in for it, one for each signature that it has had."""
    monkeypatch.setattr(varlen, "varlen_attn", TWINS[version])
    tree = tree_of(kind)
    query, key, value = tensors(tree)
    layout = attention.layout_of(tree.segments, query.device)
    found = layout.in_one_call(query, key, value, None, window)
    assert torch.allclose(found, by_rows(tree, query, key, value, window), atol=1e-12)
    found.sum().backward()
    assert key.grad is not None and key.grad.abs().sum() > 0


def test_a_twin_takes_what_torch_takes():
    """If torch changes the signature, read what is new, and add a twin."""
    newest, oldest = TWINS["2.12"], TWINS["2.11"]
    twin = oldest if torch.__version__.startswith("2.11.") else newest
    installed, of_twin = (inspect.signature(function).parameters for function in (varlen.varlen_attn, twin))
    assert {name: (p.kind, p.default) for name, p in installed.items()} == {
        name: (p.kind, p.default) for name, p in of_twin.items()
    }


@pytest.mark.parametrize("version", TWINS)
def test_one_call_with_as_many_heads_of_keys(version, monkeypatch):
    """Nothing is said of heads."""
    monkeypatch.setattr(varlen, "varlen_attn", TWINS[version])
    tree = tree_of("system")
    query, key, value = (tensor.detach() for tensor in tensors(tree))
    wide = [tensor.repeat_interleave(HEADS // FEWER, 1) for tensor in (key, value)]
    found = attention.layout_of(tree.segments, query.device).in_one_call(query, *wide, None, None)
    assert torch.allclose(found, by_rows(tree, query, key, value, None), atol=1e-12)


def test_without_segments_the_models_own_attention_computes():
    tree = tree_of("system", 2)
    query, key, value = (t.expand(1, HEADS, -1, -1).contiguous() if t.shape[1] == HEADS else t for t in tensors(tree))
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = HEADS // FEWER, True
    found, _ = attention.attend("sdpa", module, query, key, value)
    wide = [tensor.repeat_interleave(2, 1) for tensor in (key, value)]
    expected = F.scaled_dot_product_attention(query, *wide, is_causal=True).transpose(1, 2)
    assert torch.allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize(
    "options, why",
    [({"softcap": 30.0}, "caps"), ({"s_aux": torch.ones(4)}, "sinks"), ({"position_bias": torch.ones(1)}, "bias"),
     ({"dropout": 0.1}, "dropout"), ({"is_causal": False}, "not causal")],
)  # fmt: skip
def test_what_a_tree_does_not_have_is_refused(options, why):
    tree = tree_of("system", 2)
    with pytest.raises(attention.CannotAttendError, match=why):
        attention.attend("sdpa", nn.Module(), *tensors(tree), tree_segments=tree.segments, **options)


def test_flash_attention_is_kept_where_no_rows_share(monkeypatch):
    """Its function gets the lengths of the rows; where rows share, segments are computed one by one."""
    asked = []

    def flash(module, query, key, value, mask, **options):
        asked.append(options)
        return query.transpose(1, 2), None

    monkeypatch.setattr(attention.ALL_ATTENTION_FUNCTIONS, "get_interface", lambda own, eager: flash)
    text = KINDS["instructions"]()[:6]
    made = pad(text)
    tree = Tree.of(Batch(made["input_ids"], made["attention_mask"], made["labels"]).rows())
    assert not any(segment.path for segment in tree.segments)
    attention.attend("flash_attention_2", nn.Module(), *tensors(tree), tree_segments=tree.segments)
    (options,) = asked
    ends = options["cu_seq_lens_q"].tolist()
    assert ends == options["cu_seq_lens_k"].tolist() == [0, *(segment.end for segment in tree.segments)]
    assert options["max_length_q"] == tree.longest
    shared = tree_of("system")
    attention.attend("flash_attention_2", nn.Module(), *tensors(shared), tree_segments=shared.segments)
    assert len(asked) == 1
