"""Attention along paths is that of the rows by themselves, with windows and fewer heads of keys, in one call or not."""

import contextlib
import inspect
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import mostly_slow
from rig.sft_rows import KINDS, pad, slots_of
from rig.varlen import TWINS
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import varlen
from transformers import LlamaConfig
from transformers import modeling_flash_attention_utils as utils

from hf_hybrid.rows import attention
from hf_hybrid.rows.images import FIRST, Image, Images
from hf_hybrid.rows.tree import WORD, Batch, Tree

HEADS, FEWER, SIZE = 4, 2, 8


def tree_of(kind, count=12):
    made = pad(KINDS[kind]()[:count])
    return Tree.of(Batch(made["input_ids"], made["attention_mask"], made["labels"]).rows())


class CalledError(Exception):
    pass


def raising(*_):
    raise CalledError


def tensors(tree, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = [(HEADS, SIZE), (FEWER, SIZE), (FEWER, SIZE)]
    return [torch.randn(1, heads, tree.size, size, dtype=dtype, requires_grad=True) for heads, size in shapes]


def by_rows(tree, query, key, value, window=None, softcap=None, s_aux=None, images=None):
    """Reference: every row by itself, each token written to its slot. Tokens of `images` see theirs whole."""
    output = torch.zeros(1, tree.size, HEADS, SIZE, dtype=query.dtype)
    for index in range(len(tree.rows)):
        slots = slots_of(tree, index)
        keys, values = (tensor[0, :, slots].repeat_interleave(HEADS // FEWER, 0) for tensor in (key, value))
        places = torch.arange(len(slots))
        back = places[:, None] - places
        scores = query[0, :, slots] @ keys.transpose(1, 2) * SIZE**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        ids = torch.tensor(np.frombuffer(tree.rows[index].ids, WORD)[: len(slots)].astype(np.int64))
        within = (ids[:, None] == ids) & (ids >= FIRST) & bool(images and images.sees[window is not None])
        scores = scores.masked_fill(((back < 0) & ~within) | (back >= (window or len(slots))), float("-inf"))
        if s_aux is not None:
            scores = torch.cat([scores, s_aux[:, None, None].expand(-1, len(slots), 1)], -1)
        weights = scores.softmax(-1)[..., : len(slots)]
        output = output.index_copy(1, slots, (weights @ values).transpose(0, 1)[None])
    return output


def layout_of(tree, images=None):
    device, images = torch.device("cpu"), images and images.of_row(torch.device("cpu"), tree)
    layout = attention.Layout(tree.segments, device, attention.tensors_of(tree.segments), images)
    attention.Layout.known[layout.number] = layout
    return layout


@pytest.fixture(autouse=True)
def forget():
    yield
    attention.Layout.known.clear()


def attend(tree, query, key, value, window, images=None, **options):
    options |= {} if window is None else {"sliding_window": window}
    return attention.attend("sdpa", nn.Module(), query, key, value, tree_layout=layout_of(tree, images), **options)[0]


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
@pytest.mark.parametrize("sees", [(True, True), (False, True)])
def test_tokens_of_an_image_see_it_whole(sees, window, monkeypatch):
    """One image alone in a segment, two in a path, one behind the path of two rows; one call is not asked for."""
    images, first, second, third = Images(), [FIRST] * 5, [FIRST + 1] * 4, [FIRST + 2] * 3
    images.images, images.sees = [Image({}, size) for size in (5, 4, 3)], sees
    rows = [[1, *first, 2, *second, *end] for end in ([3, 4, 5, 6], [3, 4, 5, 7, 8], [9, *third, 5, 5])]
    ids = torch.tensor([row + [0] * (20 - len(row)) for row in [*rows, [*third, 8, 8]]])
    tree = Tree.of(Batch(ids, (ids > 0).long(), torch.where(ids > 0, ids, -100)).rows())
    mine, theirs = tensors(tree), tensors(tree)
    assert len(tree.segments) > 2 and tree.size < (ids > 0).sum()
    found, expected = attend(tree, *mine, window, images), by_rows(tree, *theirs, window, images=images)
    assert torch.allclose(found, expected, atol=1e-12)
    differs = not torch.allclose(found, by_rows(tree, *theirs, window), atol=1e-3)
    assert differs == sees[window is not None] == layout_of(tree, images).sees[window is not None]
    weight = torch.randn_like(found)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    assert all(torch.allclose(a.grad, b.grad, atol=1e-12) for a, b in zip(mine, theirs))
    single = [tensor.detach().float() for tensor in mine]
    flexed = layout_of(tree, images).by_flex(*single, attention.Asked(SIZE**-0.5, window))
    assert torch.allclose(flexed.double(), expected, atol=1e-5)
    monkeypatch.setattr(attention.Layout, "flashes", lambda *_: True)
    with pytest.raises(CalledError) if not differs else contextlib.nullcontext():
        monkeypatch.setattr(attention.Layout, "in_one_call", raising)
        attend(tree, *mine, window, images)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", TWINS)
def test_one_call_gets_the_arguments_of_all_segments(version, kind, window, monkeypatch):
    """`varlen_attn` needs a GPU: its twins stand in for it, one for each signature that it has had."""
    monkeypatch.setattr(varlen, "varlen_attn", TWINS[version])
    tree = tree_of(kind)
    query, key, value = tensors(tree)
    layout = layout_of(tree)
    found = layout.in_one_call(query, key, value, attention.Asked(SIZE**-0.5, window))
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
    found = layout_of(tree).in_one_call(query, *wide, attention.Asked(SIZE**-0.5))
    assert torch.allclose(found, by_rows(tree, query, key, value, None), atol=1e-12)


@pytest.mark.parametrize(("size", "of_values"), [(SIZE, 4), (10, 10), (12, 5)])
def test_heads_of_other_sizes_in_one_call(size, of_values, monkeypatch):
    """Of values that are narrower than keys (DeepSeek), and of no multiple of 8."""
    given = []

    def watched(*heads, **options):
        given.extend(tensor.shape[-1] for tensor in heads[:3])
        return TWINS["2.12"](*heads, **options)

    monkeypatch.setattr(varlen, "varlen_attn", watched)
    tree = tree_of("agent")
    query, key = (torch.randn(1, HEADS, tree.size, size, dtype=torch.float64) for _ in range(2))
    value, layout = torch.randn(1, HEADS, tree.size, of_values, dtype=torch.float64), layout_of(tree)
    found = layout.in_one_call(query, key, value, attention.Asked(0.3))
    assert torch.allclose(found, layout.by_segment(query, key, value, attention.Asked(0.3)), atol=1e-12)
    assert given == 3 * [-(-size // 8) * 8]
    layout.on_flash = True
    half = [tensor.bfloat16() for tensor in (query, key, value)]
    assert layout.flashes(*half) and not layout.flashes(half[0], half[1][..., : size - 1], half[2])


def test_without_segments_the_models_own_attention_computes():
    tree = tree_of("system", 2)
    query, key, value = (t.expand(1, HEADS, -1, -1).contiguous() if t.shape[1] == HEADS else t for t in tensors(tree))
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = HEADS // FEWER, True
    found, _ = attention.attend("sdpa", module, query, key, value)
    wide = [tensor.repeat_interleave(2, 1) for tensor in (key, value)]
    expected = F.scaled_dot_product_attention(query, *wide, is_causal=True).transpose(1, 2)
    assert torch.allclose(found, expected, atol=1e-12)


EXTRAS = {
    "capped": {"softcap": 0.5},
    "sinks": {"s_aux": torch.linspace(-1, 2, HEADS, dtype=torch.float64)},
    "both": {"softcap": 2.0, "s_aux": torch.linspace(-1, 2, HEADS, dtype=torch.float64)},
}


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("kind", ["system", "instructions"])
def test_scores_with_a_cap_and_sums_with_a_sink(kind, extras, window):
    """As Gemma 2 and gpt-oss have them. Sinks are learned."""
    tree, options, grads = tree_of(kind), EXTRAS[extras], []
    for compute in (attend, by_rows):
        leaves = tensors(tree)
        sinks = {"s_aux": options["s_aux"].clone().requires_grad_()} if "s_aux" in options else {}
        found = compute(tree, *leaves, window, **{**options, **sinks})
        (found * torch.linspace(-1, 1, found.numel()).view(found.shape)).sum().backward()
        grads.append([found, *(leaf.grad for leaf in [*leaves, *sinks.values()])])
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*grads, strict=True))


FLEX = list(itertools.product(["system", "agent", "instructions"], [*EXTRAS, "neither"], [None, 7]))


@pytest.mark.parametrize(
    "kind, extras, window", mostly_slow(FLEX, [f for f in FLEX if f[0] == "agent" or f[1] == "both"])
)
def test_flex_attention_sees_what_rows_see(kind, extras, window):
    """It has a gradient on a GPU alone, and compiles there; here it computes the same by its plain operations."""
    tree, options = tree_of(kind), {"softcap": None, "s_aux": None, **EXTRAS.get(extras, {})}
    query, key, value = (tensor.detach() for tensor in tensors(tree, torch.float32))
    softcap, sinks = options["softcap"], options["s_aux"]
    found = layout_of(tree).by_flex(query, key, value, attention.Asked(SIZE**-0.5, window, softcap, sinks))
    expected = by_rows(tree, *(t.double() for t in (query, key, value)), window, softcap, sinks)
    assert torch.allclose(found.double(), expected, atol=1e-5)


def test_flex_attention_takes_a_cap_as_a_constant(monkeypatch):
    """Where a second cap becomes a symbol, torch 2.15 refuses it."""
    torch.compiler.reset()
    monkeypatch.setattr(ShapeEnv, "create_symfloatnode", lambda *_, **__: pytest.fail("a symbol"))
    tree = tree_of("agent")
    query, key, value = (tensor.detach() for tensor in tensors(tree, torch.float32))
    for softcap in (0.3, 0.7):
        found = layout_of(tree).by_flex(query, key, value, attention.Asked(SIZE**-0.5, softcap=softcap))
        expected = by_rows(tree, *(t.double() for t in (query, key, value)), None, softcap)
        assert torch.allclose(found.double(), expected, atol=1e-5)


@pytest.mark.parametrize(
    "options, why",
    [
        ({"position_bias": torch.ones(1)}, "bias"),
        ({"dropout": 0.1, "softcap": 1.0}, "dropout"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_what_a_tree_does_not_have_is_refused(options, why):
    tree = tree_of("system", 2)
    with pytest.raises(attention.CannotAttendError, match=why):
        attention.attend("sdpa", nn.Module(), *tensors(tree), tree_layout=layout_of(tree), **options)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_flash_attention_of_the_model_computes_trees(kind, window, monkeypatch):
    """transformers looks for its kernels by the name in the config, and they get all segments in one call."""
    names = []

    def kernel(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
    ):  # fmt: skip
        assert causal and not dropout_p
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return TWINS["2.12"](q, k, v, *lengths, scale=softmax_scale, window_size=(window_size[0], 0), enable_gqa=True)

    def kernels(implementation, *_, **__):
        names.append(implementation)
        return None, kernel, None, None, None

    monkeypatch.setattr(utils, "_loaded_implementation", None)
    monkeypatch.setattr(utils, "_lazy_imports", kernels)
    module, tree = nn.Module(), tree_of(kind)
    module.is_causal, module.config = True, LlamaConfig(attn_implementation=attention.tree_attention("eager"))
    query, key, value = tensors(tree)
    found, _ = attention.attend(
        "flash_attention_2", module, query, key, value, tree_layout=layout_of(tree), sliding_window=window
    )
    assert names == ["flash_attention_2"]
    assert torch.allclose(found, by_rows(tree, query, key, value, window), atol=1e-12)
