"""
Completions by captured passes: those of `generate`, with the generator left in the same state.

On this CPU a graph repeats recorded operations (rig/graphs.py): what Python would do otherwise at a replay is not done.
"""

import contextlib
import functools
import gc
import itertools
import weakref
from pathlib import Path

import pytest
import torch
from conftest import assert_same_weights, mostly_slow, weights

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

from peft import LoraConfig, get_peft_model  # noqa: E402
from peft.tuners.lora import LoraLayer  # noqa: E402
from rig.completions import (  # noqa: E402
    NEW,
    OTHERS,
    SHAPES,
    WAYS,
    WITH_STATES,
    batch,
    capturing,
    check_equal,
    completed,
    config,
    config_for,
    model,
)
from rig.graphs import RecordedGraph, record  # noqa: E402
from rig.rollouts import MIDDLE, Stop, build  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import EosTokenCriteria, LlamaConfig, LlamaForCausalLM  # noqa: E402

from hf_hybrid import HybridGRPOTrainer  # noqa: E402
from hf_hybrid.machine import PendingRead  # noqa: E402
from hf_hybrid.run.run import Run  # noqa: E402
from hf_hybrid.trl import captured  # noqa: E402
from hf_hybrid.trl.captured import Buffers, PlainRolloutsError  # noqa: E402
from hf_hybrid.trl.completions import sample_tokens  # noqa: E402
from hf_hybrid.trl.decoding import Decoding, adapters_of, reason_not_this_model  # noqa: E402
from hf_hybrid.trl.groups import SAMPLER  # noqa: E402
from hf_hybrid.trl.host_reads import READ_ON_HOST, HostReads  # noqa: E402


@pytest.fixture(autouse=True)
def captures():
    with capturing():
        yield


@pytest.fixture
def called(monkeypatch):
    """How often each of these was called."""
    counts = dict.fromkeys(("widen", "grow", "move", "compute", "capture", "read"), 0)

    def counted(kind, name):
        method = getattr(kind, name)

        @functools.wraps(method)
        def call(*args):
            counts[name] += 1
            return method(*args)

        monkeypatch.setattr(kind, name, call)

    for name in ("widen", "grow", "move", "compute", "capture"):
        counted(Buffers, name)
    counted(PendingRead, "read")
    return counts


# Completions.


@pytest.mark.parametrize("name", mostly_slow(("llama", "qwen3", *OTHERS), ("llama", "gemma3_text")))
def test_heads_that_read_the_same_keys_are_packed(name, monkeypatch):
    """As transformers does from 5.23."""
    calls, attend = [], captured.attend
    monkeypatch.setattr(captured, "packs_heads", lambda: False)
    monkeypatch.setattr(captured, "attend", lambda *args, **options: (calls.append(1), attend(*args, **options))[1])
    monkeypatch.setattr(captured, "sdpa_attention_forward", None)
    rows, inputs = batch(SHAPES["similar and not"])
    assert check_equal(model(name), rows, inputs, config_for(name)).plain_because is None
    assert calls or model(name).config._attn_implementation == "eager"
    assert model(name).config._attn_implementation in captured.ATTENTION


def test_small_buffers_have_all_columns_at_once(called):
    rows, inputs = batch(SHAPES["similar and not"])
    assert check_equal(model("llama"), rows, inputs, config()).plain_because is None
    assert called["widen"] > called["grow"] == 0 and called["move"] > 0


@pytest.mark.parametrize("worth", [10, 200])
def test_a_graph_that_is_used_once_has_to_pay(worth, called, monkeypatch):
    monkeypatch.setattr(captured, "SHARE_KEPT", 0.0)
    monkeypatch.setattr(captured, "BLOCK", 128)
    monkeypatch.setattr(captured, "WORTH_A_CAPTURE", worth)
    rows, inputs = batch([5, 9])
    assert check_equal(model("llama"), rows, inputs, config()).plain_because is None
    assert called["capture"] == called["move"] + 1 and bool(called["move"]) is (worth < NEW)


@pytest.mark.parametrize("name", mostly_slow(("llama", "lfm2", *OTHERS), ("llama", "lfm2", "gemma3_text")))
def test_buffers_that_are_not_small_grow(name, called, monkeypatch):
    """And few rows move where a graph is due anyway: one more would not pay in the few tokens that are left."""
    monkeypatch.setattr(captured, "SHARE_KEPT", 0.0)
    rows, inputs = batch(SHAPES["similar and not"])
    decoding = check_equal(model(name), rows, inputs, config_for(name))
    assert decoding.plain_because is None and not decoding.tensors_held()
    assert called["widen"] == called["grow"] > 0 and called["capture"] == called["grow"] + 1 and called["move"] > 0


QUICK_STATES = {("qwen3_next", "sampled"), ("lfm2", "repetitions"), ("bamba", "no end")}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(*case, marks=[] if case in QUICK_STATES else [pytest.mark.slow])
        for case in itertools.product(sorted(WITH_STATES.keys() - {"mamba2", "falcon_h1"}), WAYS)
    ],
)
def test_states_are_overwritten_in_their_place(name, way, called):
    """A generation in other buffers, and one in the same: a capture leaves states as they were."""
    rows, inputs = batch([5, 9, 30, 31])
    decoding = check_equal(model(name), rows, inputs, config(**WAYS[way]))
    assert decoding.plain_because is None and called["capture"] > 0
    assert called["move"] > 0 or way in ("greedy", "no end")
    captures = called["capture"]
    check_equal(model(name), *batch([4, 9, 31, 20]), config(**WAYS[way]), decoding)
    assert decoding.plain_because is None and (called["capture"] == captures or way != "no end")


@pytest.mark.parametrize("tokens", mostly_slow(range(1, 22), (1, 2, 7, 8, 9, 10, 16, 17, 21)))
def test_whenever_the_last_row_ends(tokens):
    """What was computed meanwhile is cut off, and draws no random number."""
    rows, inputs = batch([5, 9])
    for ends in (range(2, 8), range(2, 60), range(2, 95)):
        asked = config(eos_token_id=[*ends], max_new_tokens=tokens)
        assert check_equal(model("llama"), rows, inputs, asked).plain_because is None


def test_draws_are_those_of_multinomial():
    probabilities = torch.rand(6, 500, generator=torch.Generator().manual_seed(0)).mul(9).softmax(dim=-1)
    torch.manual_seed(3)
    whole, state = torch.multinomial(probabilities, 1)[:, 0], torch.get_rng_state()
    for places in (None, torch.tensor([1, 2, 5])):
        torch.manual_seed(3)
        rows = probabilities if places is None else probabilities[places]
        assert torch.equal(sample_tokens(rows, 6, places), whole if places is None else whole[places])
        assert torch.equal(torch.get_rng_state(), state)


# What the host does.


class HostMeets(TorchDispatchMode):
    """Counts operations outside of graphs, and where the host reads a value."""

    operations = reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        HostMeets.operations += 1
        HostMeets.reads += func in READ_ON_HOST
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["sampled", "greedy"])
def test_one_replay_a_token_and_one_wait_in_eight(way, called, monkeypatch):
    monkeypatch.setattr(captured, "BLOCK", 256)
    rows, inputs = batch([5, 9, 30, 31])
    seen: list = []
    compute = Buffers.compute

    def counted(buffers, tokens):
        with torch.utils._python_dispatch._disable_current_modes():
            before, logits = RecordedGraph.replays, compute(buffers, tokens)
        fixed = [*itertools.chain(*buffers.layers), buffers.token, buffers.positions, buffers.mask, buffers.place]
        places = [states.data_ptr() for states in fixed]
        seen.append((RecordedGraph.replays - before, places, HostMeets.operations, HostMeets.reads))
        return logits

    monkeypatch.setattr(Buffers, "compute", counted)
    monkeypatch.setattr(HostMeets, "operations", 0)
    monkeypatch.setattr(HostMeets, "reads", 0)
    processors = {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.7} if way == "sampled" else {}
    asked = config(repetition_penalty=1.1, **WAYS[way], **processors)
    found, _ = completed(model("llama"), rows, inputs, asked, Decoding(off=False))  # and captures what is needed
    tokens = found.shape[1] - 31
    seen.clear()
    called["read"] = 0
    decoding = Decoding(off=False)
    with HostMeets():
        completed(model("llama"), rows, inputs, asked, decoding)
    assert decoding.plain_because is None and tokens > 16
    assert {replays for replays, *_ in seen} == {1} and tokens - 1 <= len(seen) <= tokens + 8
    assert len({tuple(places) for _, places, *_ in seen}) == 1
    assert called["read"] <= tokens // 8 + 1 and len({reads for *_, reads in seen}) == 1
    launches = [after - before for (*_, before, _), (*_, after, _) in itertools.pairwise(seen)]
    assert sorted(launches)[len(launches) // 2] <= (70 if way == "sampled" else 40)  # with views, which launch nothing


def test_a_wait_is_for_tokens_drawn_before(monkeypatch):
    """Between the copy and its reading a token is drawn, and its pass is under way."""
    events = []
    for kind, name, event in (
        (PendingRead, "__init__", "order"), (PendingRead, "read", "read"), (Buffers, "compute", "compute")
    ):  # fmt: skip
        call = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *args, e=event, c=call: (events.append(e), c(*args))[1])
    rows, inputs = batch([5, 9])
    completed(model("llama"), rows, inputs, config(eos_token_id=[95]), Decoding(off=False))
    reads = [place for place, event in enumerate(events) if event == "read"][:-1]  # the last one is at the end
    assert len(reads) == (NEW - 1) // 8
    assert all(events[place - 2 : place + 1] == ["order", "compute", "read"] for place in reads)


# From one generation to the next.


def test_graphs_are_used_again_until_weights_move(called, monkeypatch):
    monkeypatch.setattr(captured, "BLOCK", 64)
    changing = model.__wrapped__("llama")
    rows, inputs = batch([20])
    decoding, captures = Decoding(off=False), []
    head = changing.lm_head.weight
    for change in (None, lambda: head.data.mul_(1.5), lambda: setattr(head, "data", head.data * 0.5)):
        if change is not None:
            change()
        before = called["capture"]
        check_equal(changing, rows, inputs, config(), decoding)
        captures.append(called["capture"] - before)
    assert captures[0] == captures[2] > 0 and captures[1] <= 2  # rows may need a size that was not needed before
    assert called["grow"] == 0 and decoding.plain_because is None


SIZES = {"1,024 tokens": (256, 200, 1024, 300), "a sixteenth": (16, 12, 64, 19)}
"""Columns of a block; tokens of a prompt, of the longest completion and of the mean."""


@pytest.mark.parametrize("name", mostly_slow(SIZES, ("a sixteenth",)))
def test_a_second_generation_captures_nothing(name, called, monkeypatch):
    """64 rows, of which many end long before the longest; all tokens are about as likely."""
    block, width, most, mean = SIZES[name]
    monkeypatch.setattr(captured, "BLOCK", block)
    monkeypatch.setattr(captured, "FEWEST_ROWS", 8)
    torch.manual_seed(0)
    even = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            vocab_size=1000, max_position_embeddings=4096, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    decoding, captures = Decoding(off=False), []
    for more in (0, 1, 2):
        before = called["capture"]
        rows = torch.randint(100, 1000, (8, width + more)).repeat_interleave(8, 0).tolist()
        inputs = {"input_ids": torch.tensor(rows), "attention_mask": torch.ones(64, width + more, dtype=torch.long)}
        asked = config(max_new_tokens=most, eos_token_id=[*range(1, 1 + round(1000 / mean))])
        found, _ = completed(even, rows, inputs, asked, decoding)
        assert found.shape[1] > width + most * 3 // 4 and decoding.plain_because is None
        captures.append(called["capture"] - before)
    assert captures[0] > 3 and captures[1:] == [0, 0] and called["grow"] == 0


def test_fewer_rows_use_the_same_buffers(called, monkeypatch):
    monkeypatch.setattr(captured, "BLOCK", 128)
    decoding = Decoding(off=False)
    for prompts in (4, 2, 4):
        rows, inputs = batch([5, 9], prompts=prompts)
        check_equal(model("llama"), rows, inputs, config(), decoding)
    assert decoding.captured._buffers.rows == 16 and called["capture"] == len(decoding.captured._buffers.graphs) <= 4


@pytest.mark.parametrize("share", [0.05, 0.0], ids=["buffers that are kept", "buffers that grow"])
def test_graphs_have_a_stream_of_their_own(share, monkeypatch):
    """And their warm-ups. Memory has another name as soon as no graph has it any more."""
    monkeypatch.setattr(captured, "SHARE_KEPT", share)
    seen, entered, on = [], [], torch.cpu.stream

    @contextlib.contextmanager
    def capture(graph, pool, stream, **options):
        seen.append((stream, pool))
        with record(graph):
            yield

    monkeypatch.setattr(torch.cpu, "stream", lambda stream: (entered.append(stream), on(stream))[1])
    monkeypatch.setattr(torch.cpu, "graph", capture)
    rows, inputs = batch([5, 9])
    decoding = Decoding(off=False)
    for _ in range(2):
        completed(model("llama"), rows, inputs, config(), decoding)
    streams, pools = zip(*seen)
    assert len({*streams}) == 1 and entered.count(streams[0]) == len(seen) >= 3 and entered[1] is not streams[0]
    assert len({*pools}) == (1 if share else len(seen))


def test_buffers_are_gone_as_soon_as_they_are_dropped():
    """They and their graphs wait for no collection of cycles."""
    rows, inputs = batch([5, 9])
    decoding = Decoding(off=False)
    completed(model("llama"), rows, inputs, config(), decoding)
    gone = weakref.ref(decoding.captured._buffers)
    gc.disable()
    try:
        decoding.captured.free()
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("ids", [[1], [*range(2, 9)], [*range(2, 60)], [5, 97, 5000]], ids=len)
def test_any_number_of_ends_is_one_look_up(ids, monkeypatch):
    """`EosTokenCriteria` sorts many ids, and the host waits for how many differ. Some ids no logit stands for."""
    rows, inputs = batch([5, 9])
    asked = config(eos_token_id=ids)
    theirs = completed(model("llama"), rows, inputs, asked)
    monkeypatch.setattr(EosTokenCriteria, "__call__", None)
    ours = completed(model("llama"), rows, inputs, asked, Decoding(off=False))
    assert torch.equal(theirs[0], ours[0]) and torch.equal(theirs[1], ours[1])


def test_other_prompts_use_the_same_graphs(called, monkeypatch):
    monkeypatch.setattr(captured, "BLOCK", 128)
    decoding = Decoding(off=False)
    for lengths in ([5, 9, 30, 31], [20], [3, 60]):
        rows, inputs = batch(lengths)
        check_equal(model("llama"), rows, inputs, config(), decoding)
    assert called["capture"] <= 4  # 16, 8, 4, 2 rows


def test_adapters_that_change(monkeypatch):
    adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = get_peft_model(model.__wrapped__("llama"), adapters).eval()
    rows, inputs = batch([5, 9])
    decoding, found = Decoding(off=False), []
    for change in (lambda: None, adapted.base_model.disable_adapter_layers, adapted.base_model.enable_adapter_layers):
        change()
        theirs, ours = (completed(adapted, rows, inputs, config(), how) for how in (None, decoding))
        assert torch.equal(theirs[0], ours[0]) and torch.equal(theirs[1], ours[1])
        found.append(ours[0])
    assert decoding.plain_because is None and not torch.equal(found[0], found[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_compute_with_fewer_kernels(dtype):
    """Their copies follow the weights, and a graph that was captured before computes with them."""
    every = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = get_peft_model(model.__wrapped__("llama").to(dtype), every)
    rows, inputs = batch([5, 9])
    launches = {}
    for way, products in (("peft", None), ("ours", adapters_of(adapted))):
        decoding = Decoding(off=False)
        decoding.captured.adapters = products
        for change in (1.0, 3.0):
            for layer in adapted.modules():
                if getattr(layer, "lora_B", None):
                    layer.lora_B["default"].weight.data.mul_(change)
            theirs, ours = (completed(adapted, rows, inputs, config(), how) for how in (None, decoding))
            width = min(theirs[0].shape[1], ours[0].shape[1])
            same = (theirs[0][:, :width] == ours[0][:, :width]).all(dim=1).float().mean()
            assert same == 1 if dtype == torch.float32 else same >= 0.75
        (graph, *_) = decoding.captured._buffers.graphs.values()
        launches[way] = len(graph._graph.operations)
        assert not any("forward" in vars(module) for module in adapted.modules())
    layers, adapted_layers = 2, 14
    # PEFT: four kernels for each adapted layer, and three casts where its weights are in fp32 alone.
    saved = 4 * adapted_layers - (adapted_layers + 4 * layers)
    assert launches["peft"] - launches["ours"] >= saved


def layers_of(adapted):
    return [module for module in adapted.modules() if isinstance(module, LoraLayer)]


def scaled(adapted):
    for layer in layers_of(adapted):
        layer.set_scale("default", 7.0)


def replaced(adapted):
    for layer in layers_of(adapted):
        torch.manual_seed(2)
        layer.lora_B["default"].weight = torch.nn.Parameter(torch.randn_like(layer.lora_B["default"].weight))


def switched(adapted):
    adapted.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.set_adapter("other")


def patched(adapted):
    for layer in layers_of(adapted):
        product = layer.lora_B["default"]
        product.forward = functools.partial(lambda forward, x: forward(x) * 9, product.forward)


class Times9(torch.nn.Module):
    def forward(self, x):
        return x * 9


def dropping(adapted):
    """As dropout would be put in place, but no number is drawn."""
    for layer in layers_of(adapted):
        layer.lora_dropout["default"] = Times9()


@pytest.mark.parametrize("products", mostly_slow([False, True], [True]), ids=["peft", "products"])
@pytest.mark.parametrize("change", [scaled, replaced, switched, patched, dropping])
def test_an_adapter_that_changes_between_generations(change, products):
    """What a kept graph would not know."""
    every = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = get_peft_model(model.__wrapped__("llama"), every).eval()
    rows, inputs = batch([5, 9])
    decoding, found = Decoding(off=False), []
    decoding.captured.adapters = adapters_of(adapted) if products else None
    for step in (lambda _: None, change):
        step(adapted)
        theirs, ours = (completed(adapted, rows, inputs, config(), how) for how in (None, decoding))
        assert torch.equal(theirs[0], ours[0]) and torch.equal(theirs[1], ours[1])
        found.append(ours[0])
    assert decoding.plain_because is None and not torch.equal(*found)
    if products:
        assert bool(decoding.captured.adapters.used) == (change is scaled)


def test_a_hook_is_not_captured():
    """A graph would not call it. Hooks of libraries, and those on gradients, do not matter."""
    every = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model.__wrapped__("llama"), every)
    adapted.enable_input_require_grads()
    layers_of(adapted)[0].lora_A["default"].weight.register_hook(lambda gradient: gradient)
    assert reason_not_this_model(adapted) is None
    handle = layers_of(adapted)[3].lora_B["default"].register_forward_hook(lambda *_: None)
    assert "hook" in reason_not_this_model(adapted)
    handle.remove()
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(torch.nn.modules.module.register_module_forward_hook(lambda *_: None).remove)
        assert "hook" in reason_not_this_model(adapted)
    assert reason_not_this_model(adapted) is None


LAUNCH_NOTHING = {"empty", "empty_like", "new_empty", "_unsafe_view", "lift_fresh"}
"""Operations beside those that return a view."""


@pytest.fixture
def process(tmp_path):
    """One that trains with others, of which there are none."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/peers", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_adapters_that_processes_share_compute_as_in_peft(process):
    adapters = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    sharded = get_peft_model(model.__wrapped__("llama"), adapters)
    assert adapters_of(sharded) is not None
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    Decoding(off=False).begin(Run(model=sharded))
    assert adapters_of(sharded) is None


def test_a_token_of_half_a_billion_weights_launches_fewer_than_1300_kernels(process):
    """Layers and heads of Qwen2.5 0.5B, tiny widths, adapters on all linear layers; under DDP as alone."""
    sizes = {"hidden_size": 112, "head_dim": 8, "num_hidden_layers": 24, "num_attention_heads": 14}
    every = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model.__wrapped__("llama", **sizes).to(torch.bfloat16), every)
    for weight in filter(lambda weight: weight.requires_grad, adapted.parameters()):
        weight.data = weight.data.float()
    wrapped = torch.nn.parallel.DistributedDataParallel(adapted)
    rows, inputs = batch([5, 9], prompts=1, copies=2)
    launched = []
    for trained in (adapted, wrapped):
        decoding = Decoding(off=False)
        decoding.begin(Run(model=trained))
        completed(adapted, rows, inputs, config(max_new_tokens=4), decoding)
        (graph,) = decoding.captured._buffers.graphs.values()
        names = [op._schema.name.removeprefix("aten::").rstrip("_") for op, *_ in graph._graph.operations]
        launched.append([name for name in names if name not in LAUNCH_NOTHING])
    assert launched[0] == launched[1] and len(launched[0]) < 1300


def test_buffers_are_kept_if_they_are_small(monkeypatch):
    rows, inputs = batch([5])
    decoding = Decoding(off=False)
    completed(model("llama"), rows, inputs, config(), decoding)
    assert len(decoding.tensors_held()) == 4  # of two layers
    assert "given back after each generation" in decoding.spare_memory() and not decoding.tensors_held()
    completed(model("llama"), rows, inputs, config(), decoding)
    assert not decoding.tensors_held() and decoding.spare_memory() is None
    monkeypatch.setattr(captured, "SHARE_KEPT", 0.0)
    decoding = Decoding(off=False)
    completed(model("llama"), rows, inputs, config(), decoding)
    assert not decoding.tensors_held() or not hasattr(torch.cpu, "mem_get_info")


# What is left to transformers.


def test_models_that_are_not_captured(monkeypatch):
    assert reason_not_this_model(model("llama")) is None
    made = model.__wrapped__("llama")
    monkeypatch.setattr(made.config, "_attn_implementation", "flash_attention_2")
    assert "`attn_implementation='flash_attention_2'`" in reason_not_this_model(made)
    made = model.__wrapped__("llama")
    made.model.norm.to("meta")
    assert "several devices: cpu, meta" in reason_not_this_model(made)
    monkeypatch.setattr(type(made), "_can_compile_fullgraph", False)
    assert "keys and values of a fixed size" in reason_not_this_model(made)


def check_left(reading, reason) -> Decoding:
    decoding = check_equal(reading, *batch([5, 9]), config())
    assert reason in decoding.plain_because and not decoding.failed and decoding.counts["rows_decoded"] == 0
    return decoding


READS = {
    "a number": lambda hidden: hidden * float(hidden.abs().max() > -1),
    "by a mask": lambda hidden: hidden + hidden[hidden > 1e9].sum(),
}


@pytest.mark.parametrize("name", READS)
def test_a_pass_that_reads_on_the_host(name, called):
    reading = model.__wrapped__("llama")
    reading.model.norm.register_forward_hook(lambda module, args, output: READS[name](output))
    decoding = check_left(reading, "reads values on the host")
    rows, inputs = batch([5, 9])
    completed(reading, rows, inputs, config(), decoding)
    assert called["capture"] == 1  # and is not tried again


HERE = torch.ones(3)
COPIED = {
    "a copy": lambda there: HERE.to(there.device),
    "into a tensor": lambda there: there.copy_(HERE),
    "places": lambda there: there[torch.tensor([0, 1])],
    "a number at places": lambda there: there.index_put_((there.long(),), torch.tensor(2.0)),
    "a new tensor": lambda there: torch.ops.aten.lift_fresh(there),  # what `torch.tensor` calls at its end
}
READ = {
    "by a mask": lambda there: there.index_put_((there > 0,), torch.ones_like(there[:1])),
    "ends of groups": lambda there: torch._grouped_mm(
        *(there.new_empty(*shape, 8, 8, dtype=torch.bfloat16) for shape in ((), (2,))), offs=there[:2].int()
    ),
}
NEITHER = {
    "a factor": lambda there: there * torch.tensor(2.0),
    "filled": lambda there: torch.full_like(there, 2.0) + torch.arange(3, device=there.device),
    "filled by a mask": lambda there: there.index_put_((there > 0,), torch.tensor(2.0)),
    "places of the device": lambda there: there[there.long()],
}


@pytest.mark.parametrize("name", [*COPIED, *READ, *NEITHER])
def test_what_the_host_gives_or_reads(name):
    """Torch's device without values stands for one that captures."""
    there, check = torch.ones(3, device="meta"), contextlib.nullcontext()
    for what, cases in {"copies values from": COPIED, "reads values on": READ}.items():
        if name in cases:
            check = pytest.raises(PlainRolloutsError, match=what)
    with check, HostReads():
        (COPIED | READ | NEITHER)[name](there)


def test_buffers_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(captured, "device_memory", lambda device: 1000)
    check_left(model("llama"), "buffers for keys, values and states take 0.0 GiB")


INVALIDATED = "CUDA error: operation failed due to a previous error during capture"


class Raises(TorchDispatchMode):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def __torch_dispatch__(self, *_):
        raise self.error


class Failing:
    """Graphs of which some captures fail as in torch 2.11, where an error inside one is followed by another."""

    def __init__(self, error, after, ends_badly):
        self.error, self.after, self.ends_badly, self.tried, self.asked = error, after, ends_badly, 0, []

    @contextlib.contextmanager
    def capture(self, graph, **options):
        self.tried += 1
        if self.tried <= self.after:
            with record(graph, **options):
                yield
            return
        try:
            with Raises(self.error):
                yield
        except RuntimeError:
            if self.ends_badly:
                raise torch.AcceleratorError(INVALIDATED)  # noqa: B904
            raise

    def clone_state(self):
        return "fresh"

    def graphsafe_set_state(self, state):
        self.asked.append(state)

    def end_pool(self, index, pool):
        self.asked.append((index, pool))
        if not self.ends_badly:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")


MEMORY = "memory ran out when a pass was captured"
FAILURES = {
    "of memory": (torch.OutOfMemoryError("CUDA out of memory"), MEMORY),
    "of memory, said otherwise": (torch.AcceleratorError(INVALIDATED), MEMORY),
    "another": (torch.AcceleratorError("operation not permitted when stream is capturing"), "not permitted"),
}


@pytest.mark.falls_back
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("name", FAILURES)
def test_an_error_in_a_capture_leaves_nothing_behind(name, after, monkeypatch, called):
    """Completions are TRL's, also when tokens were drawn before, and no other is tried."""
    error, reason = FAILURES[name]
    failing = Failing(error, after, ends_badly=after == 0)
    monkeypatch.setattr(torch.cpu, "graph", failing.capture)
    monkeypatch.setattr(torch.cpu, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", failing.end_pool, raising=False)
    monkeypatch.setattr(torch.cuda, "default_generators", {None: failing})  # by the index of the device
    rows, inputs = batch([5, 9])
    decoding = Decoding(off=False)
    for _ in range(2):
        check_equal(model("llama"), rows, inputs, config(), decoding)
        assert reason in decoding.captured.refused and reason in decoding.plain_because
    assert failing.asked == [(None, (0, 7)), "fresh"] and failing.tried == after + 1 == called["capture"]
    assert bool(decoding.failed) is (reason != MEMORY) and not decoding.tensors_held()
    decoding.begin(Run(model=model("llama")))  # another training may have fewer rows
    assert decoding.captured.refused is None


def test_what_a_failed_capture_needs_is_in_this_torch():
    said = (Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text()
    for name in ("_cuda_endAllocateToPool", "clone_state", "graphsafe_set_state"):
        assert f"def {name}(" in said


# A run.


@pytest.mark.long
def test_resume_in_the_middle_of_a_generation_batch(tmp_path, called):
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    options = {**MIDDLE, "peft_config": adapters, "share_rows": "auto"}

    def trainer(folder, stop=None):
        torch.manual_seed(0)  # adapters
        return build(HybridGRPOTrainer, tmp_path / folder, 0.5, callbacks=stop and [Stop(stop)], **options)

    (whole := trainer("whole")).train()
    trainer("cut", 3).train()
    before = called["compute"]
    (resumed := trainer("cut")).train(resume_from_checkpoint=True)
    assert called["compute"] > before
    assert_same_weights(weights(whole.model), weights(resumed.model))
    assert [line.get(SAMPLER + "max") for line in whole.state.log_history] == [
        line.get(SAMPLER + "max") for line in resumed.state.log_history
    ]
