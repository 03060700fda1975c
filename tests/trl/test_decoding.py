"""Completions that cost once: those of TRL's trainers, token by token, with the generator left in the same state."""

import contextlib
import itertools

import pytest
import torch
from conftest import assert_same_weights, mostly_slow, weights

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

from peft import LoraConfig, PromptTuningConfig, get_peft_model  # noqa: E402
from rig import with_eyes  # noqa: E402
from rig.completions import (  # noqa: E402
    ARCHITECTURES,
    COPIES,
    OTHERS,
    SHAPES,
    VOCABULARY,
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
from rig.rollouts import WITH_TOOLS, build, distance, policy  # noqa: E402
from rig.tiny_architectures import build_model  # noqa: E402
from rig.trainers import fitted  # noqa: E402
from transformers import (  # noqa: E402
    DynamicCache,
    GenerationMixin,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.utils import DeferredStopCheck  # noqa: E402
from trl import GRPOTrainer, RLOOTrainer  # noqa: E402

from hf_hybrid import HybridGRPOConfig, HybridGRPOTrainer, HybridRLOOTrainer  # noqa: E402
from hf_hybrid.trl import decoding as decoding_module  # noqa: E402
from hf_hybrid.trl.completions import GrowingRows, Prompts  # noqa: E402
from hf_hybrid.trl.decoding import Decoding, reason_not_this_cache, reason_not_this_model  # noqa: E402
from hf_hybrid.trl.groups import SAMPLER  # noqa: E402

WITH_WINDOWS = ("gemma3_text", "gpt_oss")


@pytest.fixture(params=["growing", "captured"])
def passes(request):
    """How tokens are computed."""
    with capturing() if request.param == "captured" else contextlib.nullcontext():
        yield request.param


# Completions.

QUICK = {
    ("llama", way, shape) for way, shape in zip(("sampled", "greedy", "repetitions"), SHAPES)
} | {(name, "sampled", "similar and not") for name in (*ARCHITECTURES, *OTHERS[:3])}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "way", "shape"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
        for case in itertools.product((*ARCHITECTURES, *OTHERS), WAYS, SHAPES)
    ],
)
def test_completions_are_those_of_generate(name, way, shape, passes):
    rows, inputs = batch(SHAPES[shape])
    decoding = check_equal(model(name), rows, inputs, config_for(name, **WAYS[way]))
    assert decoding.plain_because is None and decoding.counts["rows_decoded"] > 0
    lengths = SHAPES[shape]
    assert decoding.counts["prompt_tokens_shared"] == (COPIES - 1) * sum(lengths[n % len(lengths)] for n in range(4))
    assert decoding.counts["rows_decoded_saved"] > 0 or way in ("greedy", "no end") or name in OTHERS


QUICK_STATES = {("qwen3_5_text", "sampled"), ("lfm2", "repetitions"), ("bamba", "sampled"), ("falcon_h1", "greedy")}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(*case, marks=[] if case in QUICK_STATES else [pytest.mark.slow])
        for case in itertools.product(sorted(WITH_STATES.keys() - {"mamba2"}), WAYS)
    ],
)
@pytest.mark.parametrize("beginning", [(), tuple(range(20, 60))], ids=["apart", "alike"])
def test_states_are_forked_after_a_prompt(name, way, beginning):
    """What prompts share at their beginning is computed for each: padding behind a state would change it."""
    rows, inputs = batch([5, 9, 30, 31], beginnings=[beginning])
    decoding = check_equal(model(name), rows, inputs, config(**WAYS[way]))
    assert decoding.plain_because is None
    assert decoding.counts["prompt_tokens_shared"] == (COPIES - 1) * sum(map(len, rows)) // COPIES
    assert decoding.counts["rows_decoded_saved"] > 0 or way in ("greedy", "no end")


@pytest.mark.parametrize("kind", with_eyes.KINDS)
def test_prompts_of_text_of_models_with_images(kind, passes):
    """`generate` gives them positions of four parts, which are equal in text, and no images."""
    rows, inputs = batch([5, 9, 30, 31])
    seeing = with_eyes.build(kind, vocab_size=VOCABULARY, pad_token_id=0, eos_token_id=1).eval()
    decoding = check_equal(seeing, rows, inputs, config())
    assert decoding.plain_because is None
    assert decoding.counts["prompt_tokens_shared"] == (COPIES - 1) * sum(map(len, rows)) // COPIES


def test_what_is_counted():
    """Every row of every pass is one that TRL computes."""
    rows, inputs = batch([8, 12])
    seen = []
    hook = model("llama").register_forward_pre_hook(
        lambda model, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    theirs = completed(model("llama"), rows, inputs, config())[0]
    passes = [shape for shape in seen if shape[1] == 1]
    assert seen[0] == (16, 12) and len(passes) == theirs.shape[1] - 13
    seen.clear()
    decoding = check_equal(model("llama"), rows, inputs, config())
    hook.remove()
    ours = [shape for shape in seen[len(passes) + 1 :] if shape[1] == 1]
    assert seen[len(passes) + 1] == (4, 12)  # a tree would have 8 tokens less, which is not worth it
    assert decoding.counts["rows_decoded"] == sum(shape[0] for shape in ours) < sum(shape[0] for shape in passes)
    assert decoding.counts["rows_decoded"] + decoding.counts["rows_decoded_saved"] == sum(shape[0] for shape in passes)
    with decoding.completing(model("llama"), rows, counts=False):  # an evaluation
        model("llama").generate(**inputs, generation_config=config())
    assert decoding.counts["rows_decoded"] == sum(shape[0] for shape in ours)


SYSTEM, OTHER = ([*range(first, 90, step)] for first, step in ((20, 2), (21, 2)))
ALIKE = {
    "one beginning": ([SYSTEM], [5, 9, 30, 31]),
    "two": ([SYSTEM, OTHER[:20], SYSTEM], [5, 12, 9, 7]),
    "two with a beginning of their own": ([SYSTEM + OTHER, SYSTEM + [9] * 20], [5, 2, 9, 5]),
    "a prompt that others continue": ([SYSTEM], [0, 1, 9, 0]),
}
QUICK_ALIKE = {
    *(("llama", way, case) for way, case in zip(("sampled", "greedy", "repetitions", "sampled"), ALIKE)),
    *((name, "sampled", "one beginning") for name in (*ARCHITECTURES, *OTHERS[:3])),
}


@pytest.mark.parametrize(
    ("name", "way", "case"),
    [
        pytest.param(*case, marks=[] if case in QUICK_ALIKE else [pytest.mark.slow])
        for case in itertools.product((*ARCHITECTURES, *OTHERS), ("sampled", "greedy", "repetitions"), ALIKE)
    ],
)
def test_prompts_that_begin_alike(name, way, case, passes):
    beginnings, lengths = ALIKE[case]
    rows, inputs = batch(lengths, prompts=8, beginnings=beginnings)
    decoding = check_equal(model(name), rows, inputs, config_for(name, **WAYS[way], max_new_tokens=19))
    assert decoding.plain_because is None
    copies = sum(map(len, rows)) - sum(map(len, set(map(tuple, rows))))
    counted = decoding.counts["prompt_tokens_shared"] - copies
    assert counted == 0 if name.startswith("bloom") else counted > 100


def test_what_is_computed_of_prompts_that_begin_alike():
    """Two short rows in both ways, once; then the beginning and the rest of each in one pass."""
    rows, inputs = batch([5, 9], prompts=6, beginnings=[SYSTEM])
    seen = []
    hook = model("llama").register_forward_pre_hook(
        lambda model, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    decoding = Decoding(off=False)
    computed = len(SYSTEM) + 3 * 5 + 3 * 9
    completed(model("llama"), rows, inputs, config(), decoding)
    assert seen[:4] == [(2, 16), (1, 24), (1, computed), (6 * COPIES, 1)]
    assert decoding.counts["prompt_tokens_shared"] == sum(map(len, rows)) - computed
    seen.clear()
    completed(model("llama"), rows, inputs, config(), decoding)
    hook.remove()
    assert seen[:2] == [(1, computed), (6 * COPIES, 1)]


@pytest.mark.parametrize("takes_trees", [True, False])
@pytest.mark.parametrize(
    "name", mostly_slow(("mistral, a window that fits", *WITH_WINDOWS), ("mistral, a window that fits", "gpt_oss"))
)
def test_windows_that_rows_outgrow(name, takes_trees, monkeypatch):
    """Some prompts, and the completions of others. The cache keeps every token, and the mask hides those outside."""
    if not takes_trees:
        monkeypatch.setattr(decoding_module, "reason_not_tree", lambda *_: "it is padded here")
    made = model(name, sliding_window=12) if name in ARCHITECTURES else build_model(name).eval()
    rows, inputs = batch([5, 9, 30, 31])
    decoding = check_equal(made, rows, inputs, config(eos_token_id=[*range(2, 30)]))
    assert decoding.plain_because is None and (decoding.padded.because is None) is takes_trees
    assert decoding.counts["rows_decoded_saved"] > 0


class Shifts(torch.nn.Module):
    """A layer that adds the token before, and is not told of trees."""

    def forward(self, states):
        return states + torch.nn.functional.pad(states, (0, 0, 1, -1))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bloom", "the model is not told positions, and may count padding"),
        ("refuses", "the model does not take a tree (RuntimeError"),
        ("shifts", "of their length away from those of padded rows"),
    ],
)
def test_prompts_that_are_padded_rows(name, reason, caplog):
    """The model cannot compute a tree, or would compute something else: that is found with few tokens."""
    caplog.set_level("INFO", logger="hf_hybrid")
    made = model.__wrapped__("bloom, which is not told positions" if name == "bloom" else "llama")
    if name == "shifts":
        norm = made.model.layers[0].input_layernorm
        made.model.layers[0].input_layernorm = torch.nn.Sequential(Shifts(), norm)
    if name == "refuses":  # as an attention of its own, which computes with the mask
        attend = made.model.layers[0].self_attn.forward

        def own(tree_layout=None, attention_mask=None, **given):
            return attend(attention_mask=None if attention_mask is None else attention_mask[:, :1], **given)

        made.model.layers[0].self_attn.forward = own
    rows, inputs = batch([20], beginnings=[range(20, 70)])
    decoding = Decoding(off=False)
    for _ in range(2):
        check_equal(made, rows, inputs, config(), decoding)
    assert decoding.plain_because is None and reason in decoding.padded.because
    assert sum(reason in record.message for record in caplog.records) == 1


def test_prompts_under_dropout_are_a_tree():
    """They are compared without it, and draw it once."""
    made = model.__wrapped__("llama").train()
    for layer in made.model.layers:
        layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.Dropout(0.2))
    rows, inputs = batch([20, 24], prompts=6, beginnings=[range(20, 70)])
    decoding = Decoding(off=False)
    completed(made, rows, inputs, config(do_sample=True), decoding)
    assert decoding.padded.because is None and decoding.plain_because is None and made.training
    assert decoding.counts["prompt_tokens_shared"] > 200


def test_padding_to_a_multiple_and_prompts_that_differ():
    """TRL's `pad_to_multiple_of`; and later turns with tools, where no prompt is another's."""
    rows, inputs = batch([5, 9])
    padded = {name: torch.nn.functional.pad(tensor, (7, 0)) for name, tensor in inputs.items()}
    check_equal(model("llama"), rows, padded, config())
    rows, inputs = batch([5, 9, 11], prompts=6, copies=1)
    assert check_equal(model("qwen2"), rows, inputs, config(repetition_penalty=1.2)).counts["prompt_tokens_shared"] == 0


def test_bf16(passes):
    """Rounding is coarser, and on this machine's CPU the same in batches of any shape."""
    rows, inputs = batch([5, 9, 30, 31])
    with torch.autocast("cpu", torch.bfloat16):
        decoding = Decoding(off=False)
        theirs, ours = (completed(model("llama"), rows, inputs, config(), how) for how in (None, decoding))
    assert torch.equal(theirs[1], ours[1]) and decoding.counts["rows_decoded_saved"] > 0
    width = min(theirs[0].shape[1], ours[0].shape[1])
    assert (theirs[0][:, :width] == ours[0][:, :width]).all(dim=1).float().mean() >= 0.75


def test_prompts_are_told_apart_by_their_tokens():
    prompts = Prompts.of([[1, 2], [1, 2], [3], [1, 2], [3, 3]])
    assert prompts == Prompts(owner=[0, 0, 1, 0, 2], first=[0, 2, 4], tokens=[(1, 2), (3,), (3, 3)], lengths=[2, 1, 2])


def test_errors_leave_the_model_as_it_was():
    rows, inputs = batch([5])
    broken = model("llama")
    hook = broken.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        completed(broken, rows, inputs, config(), Decoding(off=False))
    hook.remove()
    assert "generate" not in vars(broken)


@pytest.mark.falls_back
@pytest.mark.parametrize("passes", [0, 3])
def test_an_unforeseen_error_is_told_and_changes_no_completion(passes, monkeypatch, caplog):
    """Before the first random number and after some: `generate` begins anew, with the same numbers."""
    rows, inputs = batch([5, 9, 30, 31])
    theirs, state = completed(model("llama"), rows, inputs, config())
    calls, move = [], GrowingRows.move

    def fails(passes_of, rows):
        calls.append(rows)
        if len(calls) > passes:
            raise IndexError("of a new version")
        move(passes_of, rows)

    monkeypatch.setattr(GrowingRows, "move", fails)
    decoding = Decoding(off=False)
    for _ in range(2):
        ours, state_of_ours = completed(model("llama"), rows, inputs, config(), decoding)
        assert torch.equal(theirs, ours) and torch.equal(state, state_of_ours)
    assert len(calls) == passes + 1  # it was not tried again
    (reason,) = decoding.failed
    assert "IndexError: of a new version" in reason and decoding.plain_because == reason
    assert decoding.counts["rows_decoded"] == decoding.counts["prompt_tokens_shared"] == 0
    assert [record.levelname for record in caplog.records if "did not work" in record.message] == ["WARNING"]


def test_probabilities_that_are_none(passes):
    """transformers raises an error, and so does this package."""
    broken = model.__wrapped__("llama")
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    rows, inputs = batch([5, 9])
    for how in (None, Decoding(off=False)):
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            completed(broken, rows, inputs, config(), how)


def test_a_lack_of_memory_is_no_fault_of_the_loop(monkeypatch):
    def ends(*_):
        raise torch.OutOfMemoryError("out of memory")

    rows, inputs = batch([5, 9])
    monkeypatch.setattr(GrowingRows, "move", ends)
    decoding = Decoding(off=False)
    with pytest.raises(torch.OutOfMemoryError):
        completed(model("llama"), rows, inputs, config(), decoding)
    assert not decoding.failed


# What is left to transformers.

LEFT = {
    "beams": ("llama", {"num_beams": 2, "do_sample": False}, "`beam_search`"),
    "scores": ("llama", {"return_dict_in_generate": True, "output_scores": True}, "`return_dict_in_generate=True`"),
    "several": ("llama", {"num_return_sequences": 2}, "32 rows are asked for"),
    "chunks of a prompt": ("llama", {"prefill_chunk_size": 8}, "`prefill_chunk_size=8`"),
    "no cache": ("llama", {"use_cache": False}, "no cache of keys and values"),
    "a static cache": ("llama", {"cache_implementation": "static"}, "`StaticCache`"),
    "guidance": ("llama", {"guidance_scale": 1.5}, "`UnbatchedClassifierFreeGuidanceLogitsProcessor`"),
    "the prompt's tokens": ("llama", {"encoder_repetition_penalty": 1.2}, "`EncoderRepetitionPenaltyLogitsProcessor`"),
    "a clock": ("llama", {"max_time": 1000.0}, "`MaxTimeCriteria`"),
}


@pytest.mark.parametrize("name", mostly_slow(LEFT, ("beams", "a clock")))
def test_left_to_transformers(name, caplog):
    caplog.set_level("INFO", logger="hf_hybrid")
    architecture, options, reason = LEFT[name]
    rows, inputs = batch([20])
    decoding = Decoding(off=False)
    for _ in range(2):
        check_equal(model(architecture), rows, inputs, config(**options), decoding)
    assert reason in decoding.plain_because and decoding.counts["rows_decoded"] == 0
    assert sum(reason in record.message for record in caplog.records) == 1


def test_a_model_of_states_alone_is_left_to_transformers():
    rows, inputs = batch([20])
    reason = check_equal(model("mamba2"), rows, inputs, config()).plain_because
    assert "`cache_params` beside tokens" in reason or "no layer of the cache counts tokens" in reason


def test_caches_that_are_left_to_transformers():
    """Layers that attend and have a state, where passes are captured; chunks of a batch's columns."""
    cache = DynamicCache(config=model("falcon_h1").config)
    assert reason_not_this_cache(cache, 10, captures=False, chunks=False) is None
    assert "are not captured" in reason_not_this_cache(cache, 10, captures=True, chunks=False)
    assert reason_not_this_cache(DynamicCache(config=model("bamba").config), 10, captures=True, chunks=False) is None
    cache = DynamicCache(config=model("mistral, a window that fits").config)
    assert reason_not_this_cache(cache, 100, captures=False, chunks=True) is None
    assert "a chunk of 100 tokens" in reason_not_this_cache(cache, 101, captures=False, chunks=True)


def test_images_and_others_are_left_to_transformers():
    rows, inputs = batch([5])
    decoding = Decoding(off=False)
    with decoding.completing(model("llama"), rows, counts=True):
        model("llama").generate(**inputs, generation_config=config(), streamer=None)
        assert "`streamer`" in decoding.plain_because
        model("llama").generate(inputs["input_ids"], generation_config=config())
        assert "`inputs`" in decoding.plain_because


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_longest_row(kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 24}
    changed = model.__wrapped__("llama", rope_parameters=rope, max_position_embeddings=24)
    rows, inputs = batch([5, 9])
    assert f"`{kind}` positions" in check_equal(changed, rows, inputs, config()).plain_because
    assert check_equal(changed, rows, inputs, config(max_new_tokens=15)).plain_because is None


class Own(LlamaForCausalLM):
    def generate(self, *args, **kwargs):
        return super().generate(*args, **kwargs)


def test_models_that_are_left_to_transformers():
    llama = model("llama")
    assert reason_not_this_model(llama) is None
    encoder = T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    assert "encoder" in reason_not_this_model(encoder)
    assert "`Own` has a `generate` of its own" in reason_not_this_model(Own(llama.config))
    tuned = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    assert "before the prompt" in reason_not_this_model(get_peft_model(model.__wrapped__("llama"), tuned))
    adapters = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    assert reason_not_this_model(get_peft_model(model.__wrapped__("llama"), adapters)) is None
    activated = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[9])
    assert "activated" in reason_not_this_model(get_peft_model(model.__wrapped__("llama"), activated))
    eight_bit = model.__wrapped__("llama")
    eight_bit.is_loaded_in_8bit = True
    assert "8 bits" in reason_not_this_model(eight_bit)
    assert "passes are not captured on `meta`" in reason_not_this_model(model.__wrapped__("llama").to("meta"))


def test_what_is_used_of_transformers_is_there():
    """CONTRIBUTING.md lists it: read the new `_sample` of transformers before this test is changed."""
    assert callable(GenerationMixin._optimize_model_for_decode)
    # Where the check for the end is deferred, a token more is drawn.
    assert not DeferredStopCheck.is_supported(torch.device("cuda"), None, False, is_assistant=False)


# A run.


def train(trainer_class, folder, share=0.5, **options):
    """Train, and keep the completions of each generation."""
    trainer = build(trainer_class, folder, share, **options)
    trainer.seen, generates = [], trainer._generate_single_turn

    def generate(*args, **kwargs):
        found = generates(*args, **kwargs)
        trainer.seen.append(found[0] if isinstance(found, tuple) else found)
        return found

    trainer._generate_single_turn = generate
    trainer.train()
    return trainer


RUNS = {
    "grpo": (GRPOTrainer, HybridGRPOTrainer, {}),
    "rloo": (RLOOTrainer, HybridRLOOTrainer, {}),
    "evaluation": (
        GRPOTrainer, HybridGRPOTrainer, {"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2},
    ),
    "options of the user": (
        GRPOTrainer, HybridGRPOTrainer, {"generation_kwargs": {"min_new_tokens": 2}, "repetition_penalty": 1.1},
    ),
    "padded": (GRPOTrainer, HybridGRPOTrainer, {"pad_to_multiple_of": 8, "temperature": 0.8, "top_p": 0.9}),
    "adapters": (GRPOTrainer, HybridGRPOTrainer, {
        "peft_config": LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
        ),
    }),
    "tools": (GRPOTrainer, HybridGRPOTrainer, {"max_completion_length": 60, **WITH_TOOLS}),
    "tools, rewards first": (
        GRPOTrainer, HybridGRPOTrainer, {"max_completion_length": 60, "steps_per_generation": 4, **WITH_TOOLS}
    ),
}  # fmt: skip
SEVERAL_TURNS = ("tools", "tools, rewards first")
"""Later turns complete other prompts, each longer."""


@pytest.mark.parametrize("name", mostly_slow(RUNS, ("grpo", "adapters", "tools, rewards first")))
def test_a_run_is_that_of_trl(name, passes, tmp_path):
    theirs, ours, options = RUNS[name]
    theirs, ours = (train(kind, tmp_path / kind.__name__, max_steps=4, **options) for kind in (theirs, ours))
    turns = {"evaluation": 6, "tools": 9, "tools, rewards first": 3}.get(name, 4)
    assert theirs.seen == ours.seen and len(ours.seen) >= turns
    assert distance(weights(theirs.model), weights(ours.model)) <= 1e-6
    found = ours.hybrid_summary()
    assert found["plain_rollouts_because"] is None and not ours.decoding.tensors_held()
    assert found["rows_decoded"] > 0 and found["prompt_tokens_shared"] > 0
    assert found["rows_decoded_saved"] > 0 or passes == "captured" or name in SEVERAL_TURNS
    assert (found["log_probs_skipped"] > 0) is (name in ("rloo", "tools, rewards first"))
    assert f"rows decoded: {found['rows_decoded']}\n" in str(found) and "left to TRL" not in str(found)
    # RLOO keeps sums over a row, and what is sampled after other options has other probabilities than training.
    if name not in ("rloo", "options of the user", "padded", *SEVERAL_TURNS):
        differences = [entry[SAMPLER + "max"] for entry in ours.state.log_history if SAMPLER + "max" in entry]
        assert len(differences) == 4 and 0 < max(differences) < 1e-4


@pytest.mark.parametrize("reason", ["off", "layer drop"])
def test_a_run_that_is_left_to_trl(reason, tmp_path, caplog):
    caplog.set_level("INFO", logger="hf_hybrid")

    def model():
        made = policy()
        if reason == "layer drop":
            made.lm_head.register_forward_hook(lambda head, args, logits: logits * (1 + torch.rand(1) * head.training))
        return made

    options = {"max_steps": 2, "gradient_accumulation_steps": 1}
    theirs = train(GRPOTrainer, tmp_path, model=model(), **options)
    ours = train(HybridGRPOTrainer, tmp_path, model=model(), rollouts="off" if reason == "off" else "auto", **options)
    found = ours.hybrid_summary()
    assert theirs.seen == ours.seen and found["rows_decoded"] == found["prompt_tokens_shared"] == 0
    told = [record.message for record in caplog.records if "`rollouts`" in record.message]
    assert ("left to TRL: a forward pass in training draws a random number" in str(found)) is (reason != "off")
    assert len(told) == (reason != "off") and (found["plain_rollouts_because"] is None) is (reason == "off")
    assert_same_weights(weights(theirs.model), weights(ours.model))


def test_other_engines_are_left_alone(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", logger="hf_hybrid")
    trainer = build(HybridGRPOTrainer, tmp_path)
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", lambda *_: None)
    for name in ("use_vllm", "use_transformers_continuous_batching"):
        setattr(trainer, name, True)
        trainer._generate_single_turn([])
        assert f"`{name}=True`" in trainer.decoding.plain_because
        setattr(trainer, name, False)
    assert trainer._reason_not_decoded(trainer.model) is None
    assert {record.levelname for record in caplog.records if "`rollouts`" in record.message} == {"INFO"}


def test_the_option_is_checked(tmp_path):
    with pytest.raises(ValueError, match="`rollouts` must be one of auto, off"):
        HybridGRPOConfig(str(tmp_path), use_cpu=True, rollouts="on")


def test_prompts_tell_before_a_run_what_rollouts_leave_out(tmp_path):
    """Copies of a prompt at least: completions are not there yet."""
    trainer = build(HybridGRPOTrainer, tmp_path, 0.7, max_steps=1, share_rows="auto")
    said = trainer.would_save()
    assert said["reason"] is None and said["shared"] >= 1 - 1 / trainer.num_generations - 0.1
    assert said["but"] == ("these are shares of the tokens of prompts: completions are not there yet",)


def test_counts_go_on_after_a_resume(tmp_path):
    options = {"steps_per_generation": 4, "save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    whole = train(HybridGRPOTrainer, tmp_path, **options)
    resumed = fitted(build(HybridGRPOTrainer, tmp_path / "resumed", **options), resume=str(tmp_path / "checkpoint-3"))
    counts = ("rows_decoded", "rows_decoded_saved", "prompt_tokens_shared")
    assert [whole.hybrid_summary()[key] for key in counts] == [resumed.hybrid_summary()[key] for key in counts]
    assert_same_weights(weights(whole.model), weights(resumed.model))
