"""Windows that are laid out as trees train as plain `Trainer` does, and say what they saved."""

import contextlib
import functools
import logging
import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import assert_same_weights, config_values, losses, mostly_slow, weights
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from rig import trainers, with_eyes
from rig.fails_backward import Fails
from rig.sft_rows import KINDS, SIZES, Text, lively, pad, row
from rig.strict import SavingIsOffError
from rig.tiny_architectures import build_model as tiny
from rig.varlen import take_varlen_on_cpu
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.compat import checkpointing_option
from hf_hybrid.rows import attention, comparison, costs, recurrent, windows
from hf_hybrid.rows.exchange import Exchange
from hf_hybrid.rows.tree import on_host
from hf_hybrid.rows.windows import SharedWindows

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
    "n_routed_experts": 4, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
GPT_OSS = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12}
OLMOE = {"num_experts": 4, "num_experts_per_tok": 2}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
DELTA = {
    "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
QWEN3_NEXT = {"num_experts": 4, "shared_expert_intermediate_size": 16, **EXPERTS}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
NO_DROPOUT = {"residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0}
ARCHITECTURES = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 8, "num_experts": 4, **EXPERTS}),
    "mistral with a window": ("Mistral", {"sliding_window": 12}),
    "gemma3 with a window": (
        "Gemma3Text",
        {"head_dim": 8, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma": ("Gemma", {"head_dim": 8}),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {}),
    "gpt2": ("GPT2", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "gpt_neox": ("GPTNeoX", {}),
    "smollm3": ("SmolLM3", {}),
    "granite": ("Granite", {"logits_scaling": 3.0}),
    "cohere": ("Cohere", {"logit_scale": 0.3}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "olmo2": ("Olmo2", {}),
    "opt": ("OPT", {"ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 2}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, **EXPERTS}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 12, "attn_logit_softcapping": 1.0}),
    "gpt_oss": ("GptOss", GPT_OSS),
    "olmoe": ("Olmoe", OLMOE),
    "mixtral with its loss": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1, **BALANCED}),
    "qwen3_moe with its loss": ("Qwen3Moe", {"head_dim": 8, "num_experts": 4, **EXPERTS, **BALANCED}),
    "gpt_oss with its loss": ("GptOss", {**GPT_OSS, **BALANCED}),
    "olmoe with its loss": ("Olmoe", {**OLMOE, **BALANCED}),
    "qwen3_next": ("Qwen3Next", {**DELTA, **QWEN3_NEXT}),
    "qwen3_next with its loss": ("Qwen3Next", {**DELTA, **QWEN3_NEXT, **BALANCED}),
    "qwen3_5": ("Qwen3_5Text", DELTA),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 16}),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", {**MAMBA, "mamba_d_ssm": 64, "head_dim": 8}),
    "starcoder2": ("Starcoder2", {"sliding_window": None, **NO_DROPOUT}),
    "stablelm": ("StableLm", {}),
    "nemotron": ("Nemotron", {}),
    "afmoe": ("Afmoe", {"head_dim": 8, "num_experts": 4, "num_shared_experts": 1, "sliding_window": 12, **EXPERTS}),
    "jetmoe": ("JetMoe", {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": ("Llama4Text", {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48}),
}


COMMON = (
    "llama", "qwen3", "qwen3_moe", "mistral with a window", "gemma3 with a window", "phi3", "gpt2", "smollm3", "opt",
    "deepseek_v3", "gemma2", "gpt_oss", "qwen3_moe with its loss", "gpt_oss with its loss", "qwen3_next with its loss",
    "lfm2", "bamba", "stablelm", "afmoe", "jetmoe", "llama4",
)  # fmt: skip
"""Those of the default suite."""


def build(architecture="llama", attention="sdpa", **options):
    if architecture == "lfm2" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("its layers are not told where rows end")
    kind, own = ARCHITECTURES[architecture]
    if kind in ("Gemma2", "GptOss", "Mamba2"):  # `sdpa` has neither caps nor sinks
        attention = "eager"
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **own, **options})
    return lively(AutoModelForCausalLM.from_config, config, attn_implementation=attention)


BALANCED_MODEL = "qwen3_moe with its loss"
NO_ADAPTERS = (
    "mamba2", "bamba", "falcon_h1", "olmoe", "olmoe with its loss", "qwen3_next", "qwen3_next with its loss",
    "llama4",
)  # fmt: skip
"""
Widths that are not those of the others; experts that bf16 chooses otherwise than fp32, in padded rows too; a linear
router that returns two things, which PEFT does not take.
"""
STATES = ("qwen3_next", "qwen3_next with its loss", "qwen3_5", "lfm2", "mamba2", "bamba", "falcon_h1")
NOT_TOLD = ("stablelm", "nemotron")
"""Layers that do not give their attention what they are given."""
COMPILE = [name for name in ARCHITECTURES if name not in (*STATES, *NOT_TOLD) and "loss" not in name]
OF_ADAPTERS = [name for name in ARCHITECTURES if name not in NO_ADAPTERS]
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def lora(base=None, **options):
    torch.manual_seed(1)
    model = get_peft_model(build() if base is None else base, LoraConfig(**{**LORA, **options}))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, so that A would get no gradient
            torch.nn.init.normal_(parameter, std=0.1)
    return model


COMPILED = {"torch_compile_backend": "aot_eager"}
PLAIN = {"optim": "sgd", "learning_rate": 0.1, "gradient_accumulation_steps": 3, "max_steps": 4, "max_grad_norm": 1.0}


def train(trainer, config, folder, rows, model=None, left=False, resume=None, callbacks=(), **options):
    given = {"model": build() if model is None else model, "data_collator": functools.partial(pad, left=left)}
    given |= {"train_dataset": rows, "eval_dataset": rows[:10], "callbacks": list(callbacks)}
    return trainers.train(folder, trainer, config, resume=resume, **{**given, **PLAIN, **options})


def shared(folder, rows, **options):
    return train(HybridTrainer, HybridConfig, folder, rows, **{"leap_gain": 0, **options})


def plain(folder, rows, **options):
    return train(Trainer, TrainingArguments, folder, rows, **options)


def evaluated(trainer):
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def apart(first, second):
    """The largest relative difference. What is zero up to rounding (a bias of keys) is left out."""
    assert first.keys() == second.keys()
    least = 1e-6 * max(tensor.norm() for tensor in first.values())
    return max(((first[n] - second[n]).norm() / first[n].norm()).item() for n in first if first[n].norm() > least)


# Gradients.


class Gradients(TrainerCallback):
    """Keeps the gradients of the last window."""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gradients(train, folder, rows, model, **options):
    """Loss and gradients of one window with all rows, and the trainer."""
    callback = Gradients()
    options |= {"max_steps": 1, "gradient_accumulation_steps": len(rows) // 4, "max_grad_norm": 0.0}
    options |= {"train_sampling_strategy": "sequential"}
    trained = train(folder, rows, model=model, callbacks=[callback], **options)
    return losses(trained)[0], callback.found, trained


def assert_same_gradients(folder, rows, build_model, merges=True, **options):
    loss, expected, _ = gradients(plain, folder / "plain", rows, build_model())
    same, found, trained = gradients(shared, folder / "shared", rows, build_model(), **options)
    assert same == pytest.approx(loss, rel=1e-5) and apart(expected, found) < 1e-5
    summary = trained.hybrid_summary()
    assert summary["plain_rows_because"] is None and summary["tokens_padding"] + summary["tokens_shared"] > 0
    assert summary["micro_batches_saved"] > 0 or not merges
    return summary


@pytest.mark.parametrize("architecture", mostly_slow(ARCHITECTURES, COMMON))
def test_gradients_of_a_window_are_those_of_padded_rows(architecture, tmp_path, monkeypatch):
    monkeypatch.setattr(recurrent, "LEAST", 8)  # tokens of tiny rows that a pass has to save
    rows = KINDS["agent"]()[:12]
    summary = assert_same_gradients(tmp_path, rows, lambda: build(architecture))
    assert summary["tokens_shared"] > 0.5 * summary["tokens"]


@pytest.mark.parametrize(
    "model",
    [functools.partial(build, attention="eager"), pytest.param(lora, marks=pytest.mark.slow)],
    ids=["eager", "lora"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_kind_of_data(kind, model, tmp_path):
    assert_same_gradients(tmp_path, KINDS[kind]()[-12:], model)


def packed():
    """Adapters over a base in four bits."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = build(hidden_size=64, intermediate_size=128)
    for parent in [part for layer in model.model.layers for part in (layer.self_attn, layer.mlp)]:
        for name, old in list(parent.named_children()):
            if isinstance(old, torch.nn.Linear):
                new = bitsandbytes.nn.Linear4bit(
                    old.in_features, old.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
                )
                new.weight = bitsandbytes.nn.Params4bit(
                    old.weight.data, requires_grad=False, quant_type="nf4", module=new
                )
                setattr(parent, name, new.to("cpu"))
    return lora(model)


def test_gradients_over_a_base_in_four_bits(tmp_path):
    assert_same_gradients(tmp_path, KINDS["agent"]()[-12:], packed)


@pytest.mark.parametrize("kind", mostly_slow(KINDS, ["unrolled", "instructions"]))
@pytest.mark.parametrize("architecture", with_eyes.KINDS)
def test_text_rows_of_models_with_images(architecture, kind, tmp_path, monkeypatch):
    """`Trainer` takes the mean of the losses of each micro-batch, whatever number of labels it has."""
    monkeypatch.setattr(recurrent, "LEAST", 8)
    assert_same_gradients(tmp_path, KINDS[kind]()[-12:], lambda: with_eyes.build(architecture))


class Readers(LlamaForCausalLM):
    """A model whose losses are means, with whatever options a text model has."""

    accepts_loss_kwargs = False


def means(**options):
    return lively(Readers, LlamaConfig(**SIZES, **options))


MEANS = {
    "evaluated": {"eval_strategy": "steps", "eval_steps": 2},
    "checkpointing": {checkpointing_option(): True},
    "streamed by layer": {"memory": "stream", "accumulation_walk": "layer"},
    "chunked loss": {"chunked_loss": "on"},
    "on a busy GPU": {},
    "out of memory": {},
}


@pytest.fixture(scope="module")
def means_of_trainer(tmp_path_factory):
    """`Trainer` with these options. Most cases have none that it knows."""
    rows = KINDS["instructions"]()
    return functools.cache(lambda **options: plain(tmp_path_factory.mktemp("plain"), rows, model=means(), **options))


@pytest.mark.parametrize("case", MEANS)
def test_trainings_whose_losses_are_means_compose(case, means_of_trainer, tmp_path, monkeypatch):
    rows, options = KINDS["instructions"](), MEANS[case]
    of_trainer = {name: value for name, value in options.items() if name in TrainingArguments.__dataclass_fields__}
    expected = means_of_trainer(**of_trainer)
    if case == "on a busy GPU":
        monkeypatch.setattr(windows, "WITHOUT_LAUNCHES", ())
        monkeypatch.setattr(costs, "BUSY", 0.0)
    model = means()
    if case == "out of memory":
        model.model.layers[0].register_forward_pre_hook(Limit(100), with_kwargs=True)
    found = shared(tmp_path / "shared", rows, model=model, **options)
    assert apart(weights(expected.model), weights(found.model)) < 1e-6
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    assert evaluated(found) == pytest.approx(evaluated(expected), rel=1e-5)
    summary = found.hybrid_summary()
    assert summary["plain_rows_because"] is None and summary["tokens_padding"] > 0
    assert (summary["micro_batches_saved"] > 0) == (case not in ("chunked loss", "on a busy GPU"))
    assert bool(summary["out_of_memory"]) == (case == "out of memory")


@pytest.mark.parametrize("kind", ["text", "videos"])
def test_what_a_batch_tells_beside_tokens(kind, tmp_path):
    """Rows of text of a model that sees share; where a token is one of a video, rows are padded."""

    def collate(rows):
        made = pad(rows)
        types = torch.zeros_like(made["input_ids"])
        types[0, 0] = 2 if kind == "videos" else 0
        return {**made, "mm_token_type_ids": types}

    options = {"data_collator": collate, "max_steps": 2}
    expected, found = (
        train(tmp_path, KINDS["agent"](), model=with_eyes.build("qwen3_vl"), **options) for train in (plain, shared)
    )
    summary = found.hybrid_summary()
    if kind == "text":
        assert apart(weights(expected.model), weights(found.model)) < 1e-5
        assert summary["tokens_shared"] and summary["plain_rows_because"] is None
    else:
        assert_same_weights(weights(expected.model), weights(found.model))
        assert "`mm_token_type_ids` of a batch tell of more than images" in summary["plain_rows_because"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_of_all_architectures_on_all_data(architecture, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(recurrent, "LEAST", 1)
    assert_same_gradients(tmp_path, KINDS[kind]()[-12:], lambda: build(architecture))


# Trainings.


@pytest.mark.parametrize(
    "kind, left",
    # Padded on the left, the first tokens of `repeated` would be predicted from padding.
    mostly_slow(
        [(kind, left) for kind in KINDS for left in (False, True) if not (left and kind == "repeated")],
        [("unrolled", False), ("agent", True), ("instructions", False), ("repeated", False)],
    ),
)
def test_training_ends_at_the_weights_of_trainer(kind, left, tmp_path):
    rows = KINDS[kind]()
    options = {"left": left, "eval_strategy": "steps", "eval_steps": 4, "include_num_input_tokens_seen": "non_padding"}
    options["max_steps"] = 8  # of `repeated`, the first windows save no micro-batch
    expected, found = plain(tmp_path / "plain", rows, **options), shared(tmp_path / "shared", rows, **options)
    assert apart(weights(expected.model), weights(found.model)) < 1e-6
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    assert evaluated(found) == pytest.approx(evaluated(expected), rel=1e-5) and len(evaluated(found)) == 2
    summary = found.hybrid_summary()
    assert summary["plain_rows_because"] is None and (left or summary["micro_batches_saved"] > 0)
    assert summary["tokens"] == found.state.num_input_tokens_seen == expected.state.num_input_tokens_seen
    assert summary["tokens_per_second"] == summary["tokens"] / found.run.speed.seconds
    assert summary["backward_passes"] + summary["micro_batches_saved"] == 3 * 8
    assert summary["tokens_padding"] + summary["tokens_shared"] > 0.1 * summary["tokens"]


VARIANTS = {
    "adamw": {"optim": "adamw_torch", "learning_rate": 3e-3},
    "one micro-batch": {"gradient_accumulation_steps": 1},
    "checkpointing": {checkpointing_option(): True},
    "streamed by layer": {"memory": "stream", "accumulation_walk": "layer"},
    "streamed by micro-batch": {"memory": "stream", "accumulation_walk": "micro_batch"},
    "chunked loss": {"chunked_loss": "on"},
    "bf16": {"bf16": True},
    "8-bit states": {"optim": "adamw_torch_fused", "optimizer_states": "8bit", "learning_rate": 1e-3},
    "leaps": {
        "optim": "adamw_torch",
        "max_steps": 8,
        "learning_rate": 3e-3,
        "leap_gain": None,
        "direction": "orthogonal",
        "warmup_phase_steps": 2,
        "leap_worth": 0.0,
    },  # fmt: skip
    "without phases": {"enable_predict": False, "share_rows": "on"},
}


@pytest.mark.parametrize(
    "case", mostly_slow(VARIANTS, ["checkpointing", "streamed by layer", "bf16", "8-bit states", "leaps"])
)
@pytest.mark.long
def test_it_composes(case, tmp_path):
    """The run without shared rows is the reference: with the same options it makes the same steps."""
    rows, options = KINDS["agent"](), {"optim": "sgd", **VARIANTS[case]}
    off = shared(tmp_path / "off", rows, **{**options, "share_rows": "off"})
    on = shared(tmp_path / "on", rows, **options)
    limit = {"bf16": 2e-3, "adamw": 1e-3, "leaps": 1e-5}.get(case, 2e-6)
    assert apart(weights(off.model), weights(on.model)) < limit
    assert losses(on) == pytest.approx(losses(off), rel=1e-2 if case == "bf16" else 1e-4)
    assert on.hybrid_summary()["tokens_shared"] > 0.3 * on.hybrid_summary()["tokens"]
    assert on.hybrid_summary()["plain_rows_because"] is None
    assert "tokens_shared" not in off.hybrid_summary()


def test_adapters_train_as_in_trainer(tmp_path):
    rows = KINDS["system"]()
    expected, found = plain(tmp_path / "plain", rows, model=lora()), shared(tmp_path / "shared", rows, model=lora())
    assert apart(weights(expected.model), weights(found.model)) < 1e-6


RESUMED = {
    "eager": ("llama", {}),
    "router loss": (BALANCED_MODEL, {}),
    "states": ("bamba", {}),
    "compiled": ("llama", COMPILED),
}


@pytest.mark.parametrize("case", mostly_slow(RESUMED, ["eager", "router loss"]))
def test_a_resumed_run_ends_at_the_same_weights_and_goes_on_counting(case, tmp_path):
    architecture, compiled = RESUMED[case]
    rows, options = KINDS["unrolled"](), {"save_strategy": "steps", "save_steps": 2, **compiled}
    whole = shared(tmp_path, rows, model=build(architecture), **options)
    checkpoint = str(tmp_path / "checkpoint-2")
    resumed = shared(tmp_path / "resumed", rows, model=build(architecture), resume=checkpoint, **options)
    assert_same_weights(weights(whole.model), weights(resumed.model))
    for name in ("tokens", "tokens_padding", "tokens_shared", "micro_batches_saved"):
        assert whole.hybrid_summary()[name] == resumed.hybrid_summary()[name] > 0


OF_STATES = ("qwen3_next", "lfm2", "mamba2", "bamba")


@pytest.mark.parametrize("architecture", OF_STATES)
def test_states_are_recomputed(architecture, tmp_path, monkeypatch):
    monkeypatch.setattr(recurrent, "LEAST", 8)
    rows, options = KINDS["agent"]()[:12], {checkpointing_option(): True}
    assert_same_gradients(tmp_path, rows, lambda: build(architecture), **options)


@pytest.mark.parametrize("architecture", mostly_slow(OF_STATES, ["qwen3_next", "lfm2", "mamba2"]))
def test_states_go_on_after_a_resume(architecture, tmp_path, monkeypatch):
    """To the same bits, also where layers are recomputed."""
    monkeypatch.setattr(recurrent, "LEAST", 8)
    rows, options = KINDS["agent"](), {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    options[checkpointing_option()] = True
    whole = shared(tmp_path, rows, model=build(architecture), **options)
    checkpoint = str(tmp_path / "checkpoint-2")
    resumed = shared(tmp_path / "resumed", rows, model=build(architecture), resume=checkpoint, **options)
    assert_same_weights(weights(whole.model), weights(resumed.model))
    assert whole.hybrid_summary()["tokens_shared"] == resumed.hybrid_summary()["tokens_shared"] > 0


def test_the_best_experts_are_loaded_at_the_end(tmp_path):
    """transformers saves experts one by one, and `Trainer` keeps the last ones where it looks for the best."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trained = shared(tmp_path, KINDS["agent"](), model=build(BALANCED_MODEL), **options)
    best = AutoModelForCausalLM.from_pretrained(trained.state.best_model_checkpoint)
    assert trained.state.best_model_checkpoint.endswith("checkpoint-1")  # of the largest loss
    assert_same_weights(weights(best), weights(trained.model))


@pytest.mark.long
@pytest.mark.parametrize("architecture", mostly_slow(OF_ADAPTERS, ["llama", "qwen3_moe", "qwen3_5"]))
def test_products_of_adapters_in_bf16_are_as_near_to_fp32_as_pefts(architecture, tmp_path):
    def model():
        return lora(build(architecture, hidden_size=64, intermediate_size=96))

    def error(train, **options):
        train = functools.partial(train, bf16=True, **options)
        return apart(exact, gradients(train, tmp_path / train.func.__name__, rows, model())[1])

    rows = KINDS["agent"]()[:12]
    exact = gradients(plain, tmp_path / "exact", rows, model())[1]
    assert error(shared) < 1.25 * error(plain)


# Compiled layers.


def ten_kinds():
    """Twelve rows of each kind, which are a window each."""
    text = Text(7)
    lengths = {"full": (40, 40), "long": (60, 90), "short": (4, 6), "ragged": (4, 90)}
    more = [[row((text(length), 1)) for length in torch.linspace(*ends, 12).int()] for ends in lengths.values()]
    return [rows for kind in [*(kind()[-12:] for kind in KINDS.values()), *more] for rows in kind]


def few_adapters(**options):
    """A compilation and a pass take longer with every adapter."""
    return lora(target_modules=["q_proj", "down_proj"], **options)


CPU = torch.device("cpu")
IN_ORDER = {"train_sampling_strategy": "sequential", "max_steps": 10, "eval_strategy": "steps", "eval_steps": 5}


@pytest.mark.slow
@pytest.mark.parametrize("model", [build, lora, few_adapters])
def test_layers_compile_twice_in_a_run_on_ten_kinds_of_windows(model, tmp_path):
    """Once for training and once for evaluation, with a comparison and with adapters, whose inputs need no gradient."""
    rows, options = ten_kinds(), {**IN_ORDER, "learning_rate": 0.01}
    expected = shared(tmp_path / "eager", rows, model=model(), **options)
    torch._dynamo.reset()
    counters.clear()
    found = shared(tmp_path / "compiled", rows, model=model(), **options, **COMPILED)
    assert counters["stats"]["unique_graphs"] == 2 * 6  # around attention, which is computed as it is
    assert apart(weights(expected.model), weights(found.model)) < 1e-6
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    summary = found.hybrid_summary()
    assert summary["plain_rows_because"] is None and summary["tokens_shared"] > 0 < summary["micro_batches_saved"]
    assert not any("_compiled_call_impl" in vars(module) for module in found.model.modules())


@pytest.mark.slow
def test_layers_with_flash_attention_compile_as_often(tmp_path, monkeypatch):
    """torch's own function, with a kernel for a CPU."""
    take_varlen_on_cpu()
    init = attention.Layout.__init__
    monkeypatch.setattr(attention.Layout, "flashes", lambda *tensors: True)
    monkeypatch.setattr(
        attention.Layout,
        "__init__",
        lambda self, segments, *_: init(self, segments, CPU, attention.tensors_of(segments)),
    )
    rows, options = ten_kinds(), {**IN_ORDER, "learning_rate": 0.01}
    torch._dynamo.reset()
    counters.clear()
    found = shared(tmp_path, rows, model=build(head_dim=24), **options, **COMPILED)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    expected = plain(tmp_path, rows, model=build(head_dim=24), **options)
    assert apart(weights(expected.model), weights(found.model)) < 1e-6
    assert found.hybrid_summary()["plain_rows_because"] is None


@pytest.mark.slow
@pytest.mark.parametrize("architecture", COMPILE)
def test_gradients_of_compiled_layers(architecture, tmp_path):
    torch._dynamo.reset()
    rows = KINDS["agent"]()[:12]
    loss, expected, _ = gradients(plain, tmp_path / "plain", rows, build(architecture))
    train = functools.partial(shared, **COMPILED)
    same, found, trained = gradients(train, tmp_path / "compiled", rows, build(architecture))
    assert same == pytest.approx(loss, rel=1e-5) and apart(expected, found) < 1e-5
    assert trained.hybrid_summary()["plain_rows_because"] is None


@pytest.mark.slow
def test_compiled_layers_in_bf16_and_recomputed(tmp_path):
    torch._dynamo.reset()
    options = {"bf16": True, checkpointing_option(): True, "max_steps": 4}
    expected = shared(tmp_path / "eager", KINDS["agent"](), **options)
    found = shared(tmp_path / "compiled", KINDS["agent"](), **options, **COMPILED)
    assert apart(weights(expected.model), weights(found.model)) < 2e-3
    assert found.hybrid_summary()["plain_rows_because"] is None


@pytest.mark.slow
def test_compiled_layers_with_dropout_in_attention(tmp_path):
    """Attention is computed outside of what is compiled then."""
    torch._dynamo.reset()
    trained = shared(tmp_path, KINDS["agent"](), model=build(attention_dropout=0.1), max_steps=2, **COMPILED)
    summary = trained.hybrid_summary()
    assert summary["tokens_padding"] > 0 < summary["tokens_shared"] and summary["dropout_drawn_once"]


class Halves(TrainerCallback):
    """A hook on a module of one layer, from this step on until two steps later."""

    def __init__(self, module, step):
        self.module, self.step = module, step

    def on_step_begin(self, args, state, control, model, **kwargs):
        if state.global_step == self.step:
            module = model.get_submodule(self.module)
            self.handle = module.register_forward_hook(lambda module, inputs, output: output * 0.5)
        elif state.global_step == self.step + 2:
            self.handle.remove()


@pytest.mark.parametrize(
    ("module", "step"),
    mostly_slow([(f"model.layers.{n}.mlp", step) for n in (0, 1) for step in (0, 1)], [("model.layers.1.mlp", 1)]),
)
def test_a_hook_in_one_of_the_compiled_layers_is_heard(module, step, tmp_path):
    """Layers share code, also with one that was compiled before there was a hook."""
    torch._dynamo.reset()
    rows, backend = KINDS["unrolled"](), {"torch_compile_backend": "eager"}
    without = weights(plain(tmp_path / "without", rows).model)
    expected = weights(plain(tmp_path / "plain", rows, callbacks=[Halves(module, step)]).model)
    found = shared(tmp_path / "compiled", rows, callbacks=[Halves(module, step)], **backend)
    assert apart(expected, weights(found.model)) < 1e-5 < 1e-3 < apart(expected, without)
    summary = found.hybrid_summary()
    assert summary["plain_rows_because"] is None and summary["tokens_shared"] > 0
    assert torch._dynamo.config.skip_nnmodule_hook_guards


def test_a_model_that_is_compiled_as_a_whole_has_padded_rows(tmp_path):
    model = torch.compile(build(), backend="eager")
    with torch.compiler.set_stance("force_eager"):
        trained = shared(tmp_path, KINDS["agent"](), model=model, max_steps=1, remove_unused_columns=False)
    assert trained.hybrid_summary()["plain_rows_because"] == "it is compiled as a whole"


@pytest.mark.slow
def test_a_router_loss_of_a_compiled_model_is_that_of_padded_rows(tmp_path):
    trained = shared(tmp_path, KINDS["agent"](), model=build(BALANCED_MODEL), max_steps=1, **COMPILED)
    assert trained.hybrid_summary()["plain_rows_because"] == "router logits do not leave compiled layers"


def test_evaluations_of_a_training_compute_trees(tmp_path):
    model, lengths = build(), []
    model.model.layers[0].register_forward_pre_hook(
        lambda layer, args: lengths.append(args[0].shape[:2].numel()) if not torch.is_grad_enabled() else None
    )
    shared(tmp_path, KINDS["system"](), model=model, max_steps=1, eval_strategy="steps", eval_steps=1)
    padded = pad(KINDS["system"]()[:8])["input_ids"].numel(), pad(KINDS["system"]()[8:10])["input_ids"].numel()
    assert lengths[-2] < padded[0] / 2 and lengths[-1] < padded[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "architecture"),
    [
        pytest.param("checkpointing", BALANCED_MODEL, marks=pytest.mark.slow),
        ("checkpointing", "bamba"),
        ("one micro-batch", BALANCED_MODEL),
        ("streamed by micro-batch", BALANCED_MODEL),
        ("streamed by layer", "bamba"),
        ("chunked loss", BALANCED_MODEL),
        ("bf16", BALANCED_MODEL),
        ("checkpointing", "stablelm"),
        pytest.param("streamed by layer", "stablelm", marks=pytest.mark.slow),
        pytest.param("streamed by micro-batch", "nemotron", marks=pytest.mark.slow),
        pytest.param("checkpointing", "nemotron", marks=pytest.mark.slow),
    ],
)
def test_kinds_of_layers_compose(case, architecture, tmp_path):
    rows, options = KINDS["agent"](), {"optim": "sgd", **VARIANTS[case], "max_steps": 2}
    off, on = (
        shared(tmp_path / way, rows, model=build(architecture), **{**options, "share_rows": way})
        for way in ("off", "on")
    )
    limit, of_losses = (5e-3, 1e-2) if case == "bf16" else (2e-6, 1e-4)
    assert apart(weights(off.model), weights(on.model)) < limit
    assert losses(on) == pytest.approx(losses(off), rel=of_losses)
    assert on.hybrid_summary()["tokens_shared"] > 0.3 * on.hybrid_summary()["tokens"]
    assert on.hybrid_summary()["plain_rows_because"] is None


def test_without_a_mask_routers_count_padding(tmp_path):
    """As they do in `Trainer`, where the model gets tokens and labels alone."""
    model, batch = build(BALANCED_MODEL), pad(KINDS["agent"]()[:8])
    del batch["attention_mask"]
    found = []
    for engine in (None, Exchange()):
        model.zero_grad()
        with contextlib.nullcontext() if engine is None else engine.on(model):
            output = model(**batch)
        output.loss.backward()
        found.append((output.loss.item(), output.aux_loss.item(), [p.grad.clone() for p in model.parameters()]))
    assert engine.counts["tokens_shared"] > 0 == engine.counts["tokens_padding"]
    (loss, router, expected), (same_loss, same_router, gradients) = found
    assert (same_loss, same_router) == pytest.approx((loss, router), rel=1e-5)
    assert apart(dict(enumerate(expected)), dict(enumerate(gradients))) < 1e-5


def test_parts_of_several_micro_batches_have_a_router_loss_each(tmp_path):
    """Such parts are computed after an out-of-memory error. A loss is that of a run with micro-batches of that size."""
    model, rows = build(BALANCED_MODEL), KINDS["agent"]()[:6]
    numbers = torch.tensor([7, 2, 7, 2, 2, 7])
    labels = sum(sum(label != -100 for label in row["labels"][1:]) for row in rows)
    of_micro_batches = [[row for row, own in zip(rows, numbers) if own == number] for number in (2, 7)]
    expected = sum(model(**pad(own), num_items_in_batch=labels).loss for own in of_micro_batches)
    engine = Exchange()
    with engine.on(model):
        found = model(**pad(rows), num_items_in_batch=labels, hybrid_micro_batches=numbers).loss
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    limit = Limit(60)
    model.model.layers[0].register_forward_pre_hook(limit, with_kwargs=True)
    trained = shared(tmp_path, KINDS["agent"](), model=model, max_steps=2)
    assert trained.hybrid_summary()["out_of_memory"] and trained.hybrid_summary()["tokens_shared"] > 0


class Limit:
    """A device whose memory ends at so many tokens of a forward pass."""

    def __init__(self, most):
        self.most, self.largest = most, 0

    def __call__(self, layer, args, kwargs):
        tokens = (args[0] if args else kwargs["hidden_states"]).shape[:2].numel()
        if tokens > self.most and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        self.largest = max(self.largest, tokens if torch.is_grad_enabled() else 0)


def test_after_an_out_of_memory_a_window_is_computed_in_smaller_trees(tmp_path):
    rows, model, limit = KINDS["instructions"](), build(), Limit(100)
    model.model.layers[0].register_forward_pre_hook(limit, with_kwargs=True)
    found = shared(tmp_path / "limited", rows, model=model)
    assert apart(weights(shared(tmp_path / "shared", rows).model), weights(found.model)) < 1e-6
    assert found.hybrid_summary()["out_of_memory"] and found.hybrid_summary()["tokens_padding"] > 0


def test_a_micro_batch_takes_no_more_tokens_than_the_largest_padded_one(tmp_path):
    rows, model, limit = KINDS["instructions"](), build(), Limit(10**9)
    model.model.layers[0].register_forward_pre_hook(limit, with_kwargs=True)
    shared(tmp_path, rows, model=model)
    model, padded = build(), Limit(10**9)
    model.model.layers[0].register_forward_pre_hook(padded, with_kwargs=True)
    plain(tmp_path, rows, model=model)
    assert 0 < limit.largest <= padded.largest


# How many micro-batches: where each keeps a GPU busy, they hold no more than without padding.


def ragged(count=12):
    """One long row in each micro-batch, and nothing shared."""
    text = Text(5)
    return [row((text(4, 6), 0), (text(6) if n % 4 else text(30), 1)) for n in range(count)]


@pytest.mark.parametrize("data", [ragged, KINDS["agent"]])
def test_where_each_micro_batch_keeps_a_gpu_busy_gradients_are_those_of_padded_rows(data, tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "WITHOUT_LAUNCHES", ())
    rows, saved, largest = data()[:12], [], []
    expected_loss, expected, _ = gradients(plain, tmp_path / "plain", rows, build())
    for busy in (0.0, float("inf")):
        monkeypatch.setattr(costs, "BUSY", busy)
        model, limit = build(), Limit(10**9)
        model.model.layers[0].register_forward_pre_hook(limit, with_kwargs=True)
        loss, found, trained = gradients(shared, tmp_path / str(busy), rows, model)
        assert loss == pytest.approx(expected_loss, rel=1e-5) and apart(expected, found) < 1e-5
        assert trained.hybrid_summary()["plain_rows_because"] is None
        saved.append(trained.hybrid_summary()["micro_batches_saved"])
        largest.append(limit.largest)
    if data is ragged:
        tokens = [len(row["input_ids"]) for row in rows]
        assert saved[0] == 0 < saved[1]
        assert largest[0] <= max(sum(tokens[first : first + 4]) for first in (0, 4, 8)) < largest[1]
    else:
        assert saved[0] > 0


def test_weights_in_four_bits_cost_as_much_as_others_and_experts_only_where_they_compute():
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    assert costs.Costs.of(packed()) == costs.Costs.of(lora(build(**sizes)))
    few, all_of_them = (costs.Costs.of(build("qwen3_moe", num_experts_per_tok=number)) for number in (1, 4))
    weights = sum(p.numel() for n, p in build("qwen3_moe").named_parameters() if ".experts." in n)
    assert all_of_them.token - few.token == 2 * weights * 3 / 4 > 0
    assert few.passes == 3 and 2 < costs.Costs.of(lora()).passes < 2.5  # of frozen weights nobody needs the gradient


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="layers do not differ in size")
def test_layers_with_heads_of_different_sizes():
    """Their config does not say which the model has."""
    model = tiny("gemma4_text")
    sizes = [layer.self_attn.head_dim for layer in model.model.layers]
    assert len(set(sizes)) > 1
    assert costs.Costs.of(model).pair == 4 * model.config.num_attention_heads * sum(sizes)


@pytest.mark.parametrize(
    ("clock", "width", "times"), [(2_619_000, 5120, 1.0), (10_501_000, 384, 0.30), (3_201_000, 6144, 1.47), (0, 0, 1.0)]
)
def test_a_gpu_with_slower_memory_is_kept_busy_by_less(clock, width, times, monkeypatch):
    """An H100, an RTX 4090, an H200, and one whose driver does not tell."""
    told = SimpleNamespace(memory_clock_rate=clock, memory_bus_width=width)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    assert costs.busy(torch.device("cuda")) == pytest.approx(times * costs.BUSY, rel=0.01)
    assert costs.busy(torch.device("cpu")) == costs.BUSY


def on_a_gpu(shape):
    """Windows of a Llama whose weights are nowhere, as they would be on a GPU: LoRA, no dropout."""
    sizes = {"vocab_size": 128_256, "num_attention_heads": 32, "num_key_value_heads": 8, **SHAPES[shape]}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=torch.bfloat16)
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    accelerator = SimpleNamespace(num_processes=1, unwrap_model=lambda model: model)
    args = SimpleNamespace(device=torch.device("cuda"), bf16=True, fp16=False, torch_compile=False)
    memory = SimpleNamespace(streams=False)
    told = {"accelerator": accelerator, "args": args, "memory": memory, "loss_in_chunks": True, "more_inputs": {}}
    rows = SharedWindows(SimpleNamespace(model=model, **told))
    rows.facts_of(model.train()).drawn[True] = "nothing"
    return rows


SHAPES = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
}


def long(kind):
    """16 rows as `benchmarks/gpu/sft.py` has them, of which the last 100 tokens are learned."""
    text, past = Text(5), []
    if kind == "ragged":
        return [row((text(length - 100), 0), (text(100), 1)) for length in (120, 900, 300, 250, 400, 150, 180, 200) * 2]
    prompt, rows = text(1500), []
    for _ in range(4):
        past = prompt + text(150)
        for _ in range(4):
            rows.append(row((past, 0), (text(100), 1)))
            past = past + text(350)
    return rows


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["ragged", "agent"])
def test_a_window_on_a_gpu_holds_no_more_than_without_padding_unless_launches_are_the_limit(shape, kind):
    made = [pad(long(kind)[first : first + 8]) for first in (0, 8)]
    batches = on_host([(batch["input_ids"], batch["attention_mask"], batch["labels"]) for batch in made])
    plan = on_a_gpu(shape)._plan_window(batches)
    in_two = shape == "8B" and kind == "ragged"
    assert len(plan.trees) == 1 + in_two and plan.cost < 0.95 * plan.padded
    without_padding = max(batch.tokens for batch in batches)
    assert (max(tree.memory for tree in plan.trees) <= without_padding) == (in_two or kind == "agent")


# What a user is told.


def test_what_was_saved_is_told(tmp_path, caplog):
    """Conversations whose rows are shuffled apart: the log says what would be shared if they stood together."""
    caplog.set_level(logging.INFO, logger="hf_hybrid")
    text = Text(9)
    rows = [row((prompt, 0), (text(6), 1)) for _ in range(2) for prompt in [Text(n)(20) for n in range(24)]]
    found = shared(tmp_path, rows, gradient_accumulation_steps=2, max_steps=6)
    summary = found.hybrid_summary()
    apart_in_windows = summary["tokens_shared"] / summary["tokens"]
    assert 0.3 < summary["shared_if_together"] < 0.5 and apart_in_windows < 0.3
    (told,) = (r.getMessage() for r in caplog.records if "would be shared" in r.getMessage())
    assert f"{summary['tokens']:,} tokens" in told and f"{summary['shared_if_together']:.0%} would" in told
    assert "tokens shared" in str(summary)
    assert ("micro-batches saved" in str(summary)) == (summary["micro_batches_saved"] > 0)  # no line for a zero


# What stays as it is.


def full(count=48):
    """Rows of one length, all of which is learned: nothing can be saved."""
    text = Text(7)
    return [row((text(16), 1)) for _ in range(count)]


def test_where_nothing_is_saved_the_run_is_that_of_trainer_to_the_last_bit(tmp_path):
    expected, found = plain(tmp_path / "plain", full()), shared(tmp_path / "shared", full())
    assert_same_weights(weights(expected.model), weights(found.model))
    summary = found.hybrid_summary()
    assert (
        summary["tokens"] == PLAIN["max_steps"] * 12 * 16
        and summary["tokens_shared"] == summary["micro_batches_saved"] == 0
    )
    assert summary["plain_rows_because"] == "less than 5 % would be saved"


@pytest.mark.parametrize("options", [{"share_rows": "off"}, {"enable_predict": False}], ids=["off", "switch"])
def test_off_is_trainer_to_the_last_bit(options, tmp_path):
    rows = KINDS["system"]()
    expected, found = plain(tmp_path / "plain", rows), shared(tmp_path / "off", rows, **options)
    assert_same_weights(weights(expected.model), weights(found.model))
    assert losses(expected) == losses(found)


def own_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"][:, :-1].transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:], reduction="sum") / num_items_in_batch


class OwnLoss(HybridTrainer):
    """A trainer whose loss reads more than labels."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs)


class Counted(torch.nn.Module):
    """Layers that know the place of a token in its batch, which is found only by looking."""

    def forward(self, layer, args, output):
        return output + torch.linspace(0, 1, output.shape[1])[:, None]


def counted():
    model = build()
    model.model.layers[0].register_forward_hook(Counted())
    return model


def counting():
    """Experts that are balanced by how many tokens each got, as in DeepSeek-V3: a callback would read the counts."""
    model = build("deepseek_v3")
    layer = model.model.layers[1].mlp
    layer.register_buffer("tokens", torch.zeros(4))

    def count(router, args, output):
        if router.training:
            layer.tokens = layer.tokens + (args[0].flatten(0, -2) @ router.weight.t()).topk(
                2
            ).indices.flatten().bincount(minlength=4)

    layer.gate.register_forward_hook(count)
    return model


def stateful(kind, **options):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**{**SIZES, **options}))


def linear_attention():
    """Layers with a state and no convolution."""
    kinds = ["linear_attention", "full_attention"]
    return stateful("MiniMax", num_local_experts=2, head_dim=8, layer_types=kinds)


REFUSED = {
    "Mamba": (
        lambda: stateful("Mamba"),
        {},
        "`MambaMixer` has a state, and is not told where rows end",
    ),
    "positions": (
        lambda: stateful("RecurrentGemma", head_dim=8, num_hidden_layers=3),
        {},
        "`RecurrentGemmaRecurrentBlock` has a state, and needs",
    ),
    "linear attention": (linear_attention, {}, r"no convolution \(linear_attention\)"),
    "compiled states": (
        lambda: build("lfm2"),
        COMPILED,
        "layers with a state that runs along the row are not compiled",
    ),
    "counts": (counting, {}, "a forward pass changes the buffer `model.layers.1.mlp.tokens`, which counts every token"),
    "noise": (build, {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
    "first batch": (counted, {}, "hidden states of the first batch are .* away"),
    "alibi": (lambda: stateful("Bloom"), {}, "the attention of `BloomForCausalLM` is its own"),
    "index": (lambda: tiny("deepseek_v32"), {}, "`DeepseekV32Indexer` reads the mask, and is no attention of"),
    "layers that are not told, compiled": (lambda: build("stablelm"), COMPILED, "`StableLmAttention` is not told"),
    "rows over a chunk": (lambda: build("llama4", attention_chunk_size=24), {}, "rows of more than 24 tokens"),
    "queries scaled by place": (lambda: build("llama4", floor_scale=24), {}, "rows of more than 23 tokens"),
}


@pytest.mark.parametrize("case", mostly_slow(REFUSED, [case for case in REFUSED if "compiled" not in case]))
def test_what_would_not_be_exact_is_trained_in_padded_rows(case, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    build_model, options, why = REFUSED[case]
    options, rows = {"max_steps": 2, **options}, KINDS["agent"]()
    expected = plain(tmp_path / "plain", rows, model=build_model(), **options)
    found = shared(tmp_path / "shared", rows, model=build_model(), **options)
    assert_same_weights(weights(expected.model), weights(found.model))
    assert re.search(why, found.hybrid_summary()["plain_rows_because"])
    told = [record.getMessage() for record in caplog.records if "share_rows" in record.getMessage()]
    assert len(told) == 1 and re.search(why, told[0])


RANDOM = {
    "of attention": lambda rate: build(attention_dropout=rate),
    "of adapters": lambda rate: lora(lora_dropout=rate),
    "by functions, and a number per layer": lambda rate: build("opt", dropout=rate),
    "of a hook": lambda rate: hooked(rate),
}


def hooked(rate):
    model = build()
    model.model.layers[0].register_forward_hook(
        lambda layer, args, output: torch.nn.functional.dropout(output, rate, layer.training)
    )
    return model


@pytest.mark.parametrize("case", RANDOM)
def test_under_dropout_a_shared_prefix_draws_once(case, tmp_path, caplog):
    caplog.set_level(logging.INFO, "hf_hybrid")
    model, rows, options = RANDOM[case](0.1), KINDS["agent"](), {"max_steps": 2, "eval_strategy": "no"}
    start = weights(model)
    summary = shared(tmp_path, rows, model=model, **options).hybrid_summary()
    without = shared(tmp_path, rows, model=RANDOM[case](0.0), **options).hybrid_summary()
    for name in ("tokens_padding", "tokens_shared", "micro_batches_saved"):
        assert summary[name] == without[name] > 0
    numbers = "the random numbers of a forward pass" if case == "of a hook" else "dropout (0.1)"
    (told,) = [record for record in caplog.records if f"draws {numbers} once" in record.getMessage()]
    assert told.levelname == "INFO" and summary["dropout_drawn_once"] and not without["dropout_drawn_once"]
    assert summary["plain_rows_because"] is None and not summary["failed_savings"]
    assert any(not torch.equal(start[name], weight) for name, weight in weights(model).items())


@pytest.mark.parametrize("case", mostly_slow(["of attention", "of adapters"], ["of adapters"]))
@pytest.mark.long
def test_under_dropout_gradients_have_the_mean_of_padded_rows(case):
    """
    Means over draws agree within their standard errors. Rows that share a prefix draw it together, so that a window
    varies more; a row alone varies as it does in padded rows.
    """
    torch.manual_seed(0)
    model, few = RANDOM[case](0.3).train(), KINDS["agent"]()[:4]
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    watched = [parameter for parameter in model.parameters() if parameter.requires_grad]
    together, alone = pad(few), pad([few[0], row((list(range(20, 44)), 1))])
    for batch, shares in ((together, True), (alone, False)):
        draws = []
        for engine in (None, Exchange()):
            gradients = []
            for _ in range(200):
                model.zero_grad()
                with contextlib.nullcontext() if engine is None else engine.on(model):
                    model(**batch).loss.backward()
                gradients.append(torch.cat([parameter.grad.flatten() for parameter in watched]).clone())
            draws.append(torch.stack(gradients).double())
            assert engine is None or (engine.counts["tokens_shared"] > 0.3 * engine.counts["tokens"]) == shares
        plain, ours = draws
        error = (plain.var(0).sum() / 200 + ours.var(0).sum() / 200).sqrt()
        assert (plain.mean(0) - ours.mean(0)).norm() < 1.3 * error < 0.5 * plain.mean(0).norm()
        ratio = (ours.var(0).sum() / plain.var(0).sum()).item()
        assert 0.85 < ratio < (1.5 if shares else 1.2)


def test_under_dropout_a_routers_loss_is_computed_of_rows_that_share_nothing(tmp_path):
    """It compares tokens, so that masks which several rows have would change what it is expected to be."""
    options = {"max_steps": 2, "eval_strategy": "no"}
    summary = shared(
        tmp_path, KINDS["agent"](), model=build(BALANCED_MODEL, attention_dropout=0.1), **options
    ).hybrid_summary()
    assert summary["tokens_padding"] > 0 and summary["tokens_shared"] == 0 and not summary["dropout_drawn_once"]
    assert "that the router's loss compares" in summary["plain_rows_because"]


def test_dropout_is_said_where_the_first_rows_share_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO, "hf_hybrid")
    alone = [row((list(range(10 + n, 30 + n)), 1)) for n in range(4)]
    alike = [row((list(range(40, 60)), 0), ([5 + n], 1)) for n in range(4)]
    options = {"max_steps": 2, "train_sampling_strategy": "sequential", "gradient_accumulation_steps": 1}
    shared(tmp_path, alone + alike, model=build(attention_dropout=0.1), **options)
    assert any("draws dropout (0.1) once" in record.getMessage() for record in caplog.records)


def test_dropout_is_not_said_to_be_drawn_once_where_too_little_would_be_saved(tmp_path, caplog):
    """Rows share 7 % of their tokens, but the head, which is most of the work, scores all of them."""
    caplog.set_level(logging.INFO, "hf_hybrid")
    rows = [row((list(range(40, 44)) + list(range(10 + n, 46 + n)), 1)) for n in range(8)]
    model, options = build(attention_dropout=0.1, vocab_size=2048), {"max_steps": 2, "eval_strategy": "no"}
    summary = shared(tmp_path, rows, model=model, **options).hybrid_summary()
    assert summary["tokens_shared"] == 0 and not summary["dropout_drawn_once"]
    assert "once" not in caplog.text


def test_layer_drop_keeps_padded_rows(tmp_path):
    """One random number belongs to all rows of a micro-batch: fewer micro-batches would draw fewer."""
    model, options = lambda: build("opt", layerdrop=0.3), {"max_steps": 2}
    expected = plain(tmp_path / "plain", KINDS["agent"](), model=model(), **options)
    found = shared(tmp_path / "shared", KINDS["agent"](), model=model(), **options)
    assert_same_weights(weights(expected.model), weights(found.model))
    assert "would be drawn for more than one row" in found.hybrid_summary()["plain_rows_because"]


@pytest.mark.falls_back
def test_an_exception_that_nobody_foresaw_is_told_and_padded_rows_are_trained(tmp_path, monkeypatch, caplog):
    def broken(*args, **options):
        raise TypeError("varlen_attn() got an unexpected keyword argument")

    monkeypatch.setattr(attention.Layout, "by_segment", broken)
    caplog.set_level(logging.DEBUG, "hf_hybrid")
    expected = plain(tmp_path / "plain", KINDS["agent"](), max_steps=2)
    found = shared(tmp_path / "shared", KINDS["agent"](), max_steps=2)
    assert_same_weights(weights(expected.model), weights(found.model))
    (failed,) = found.hybrid_summary()["failed_savings"]
    assert "the model does not take a tree (TypeError: varlen_attn() got an unexpected" in failed
    (told,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and failed in r.getMessage()]
    assert re.search(r"About \d+% of the tokens of the first batch", told)
    assert any(r.levelno == logging.DEBUG and r.exc_info and failed == r.getMessage() for r in caplog.records)


FAIL_BACKWARD = {
    "resident": {},
    "checkpointed": {checkpointing_option(): True},
    "evaluated before": {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True},
    "adapters": {"adapters": True},
}


@pytest.mark.falls_back
@pytest.mark.parametrize("case", FAIL_BACKWARD)
def test_a_kernel_that_fails_backward_alone_is_told_and_padded_rows_are_trained(case, tmp_path, monkeypatch):
    own, options = attention.Layout.by_segment, dict(FAIL_BACKWARD[case])
    monkeypatch.setattr(attention.Layout, "by_segment", lambda *args: Fails.apply(own(*args)))
    if options.pop("adapters", False):
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        options["model"] = lambda: get_peft_model(build(), lora)
    made = [{name: value() if name == "model" else value for name, value in options.items()} for _ in range(2)]
    expected = plain(tmp_path / "plain", KINDS["agent"](), max_steps=2, **made[0])
    found = shared(tmp_path / "shared", KINDS["agent"](), max_steps=2, **made[1])
    assert_same_weights(weights(expected.model), weights(found.model))
    (failed,) = found.hybrid_summary()["failed_savings"]
    assert "the backward pass of a tree does not run (RuntimeError: No valid triton configs" in failed


def test_the_backward_pass_that_is_tried_leaves_nothing(tmp_path, monkeypatch):
    """No gradient, and nothing to see for hooks of weights. It is made once, in a run that evaluates in between."""
    model, seen, tried = build(), [], []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: seen.append(grad))
    own = comparison.run_backward

    def run(*args):
        own(*args)
        tried.append(all(parameter.grad is None for parameter in model.parameters()) and not seen)

    monkeypatch.setattr(comparison, "run_backward", run)
    shared(tmp_path, KINDS["agent"](), model=model, max_steps=2, eval_strategy="steps", eval_steps=1)
    assert tried == [True] and seen


def test_a_test_fails_if_a_saving_does(tmp_path, monkeypatch):
    monkeypatch.setattr(attention.Layout, "by_segment", None)
    with pytest.raises(SavingIsOffError):
        shared(tmp_path, KINDS["agent"](), max_steps=1)


@pytest.mark.parametrize("case", ["class", "function", "label smoothing"])
def test_losses_of_ones_own_share_rows(case, tmp_path):
    rows, trained = KINDS["agent"](), []
    ours = OwnLoss if case == "class" else HybridTrainer
    for kind, config in ((Trainer, TrainingArguments), (ours, HybridConfig)):
        values = {"label_smoothing_factor": 0.1} if case == "label smoothing" else {}
        values |= {"leap_gain": 0} if config is HybridConfig else {}
        args = config(**config_values(tmp_path / kind.__name__, max_steps=3, **values))
        more = {"compute_loss_func": own_loss} if case == "function" else {}
        trained.append(kind(build(), args, data_collator=pad, train_dataset=rows, **more))
        trained[-1].train()
    assert apart(*(weights(trainer.model) for trainer in trained)) < 1e-5
    summary = trained[1].hybrid_summary()
    assert summary["tokens_shared"] > 0.2 * summary["tokens"] and summary["plain_rows_because"] is None


def test_what_would_be_saved_is_said_before(tmp_path):
    """Windows of an epoch, which is trained afterwards."""
    config = HybridConfig(**config_values(tmp_path, num_train_epochs=1, max_steps=-1, leap_gain=0))
    trainer = HybridTrainer(build(), config, data_collator=pad, train_dataset=KINDS["agent"]()[:24])
    before = torch.random.get_rng_state()
    said = trainer.would_save()
    assert torch.equal(before, torch.random.get_rng_state()) and trainer.state.global_step == 0
    trainer.train()
    found = trainer.hybrid_summary()
    whole = found["tokens"] + found["tokens_padding"]
    assert said["reason"] is None and said["but"] == ()
    assert said["shared"] == pytest.approx(found["tokens_shared"] / whole, abs=0.05)
    assert said["padding"] == pytest.approx(found["tokens_padding"] / whole, abs=0.05)


def test_positions_of_a_batch_are_not_lost(tmp_path):
    def collate(rows):
        made = pad(rows)
        return {**made, "position_ids": torch.arange(7, 7 + made["input_ids"].shape[1]).expand_as(made["input_ids"])}

    trained = []
    for kind, config in ((Trainer, TrainingArguments), (HybridTrainer, HybridConfig)):
        args = config(**config_values(tmp_path, max_steps=2, learning_rate=1e-3))
        trained.append(kind(build(), args, data_collator=collate, train_dataset=KINDS["agent"]()))
        trained[-1].train()
    assert apart(*(weights(trainer.model) for trainer in trained)) < 1e-5
    assert trained[1].hybrid_summary()["tokens_shared"] > 0


def test_the_model_is_left_as_it_was(tmp_path):
    model = build()
    before = model.config._attn_implementation, len(model._forward_hooks), len(model._forward_pre_hooks)
    shared(tmp_path, KINDS["agent"](), model=model, eval_strategy="steps", eval_steps=2)
    assert before == (model.config._attn_implementation, len(model._forward_hooks), len(model._forward_pre_hooks))
    assert not model.model._forward_hooks


def test_other_passes_of_a_model_do_not_notice(tmp_path):
    """Generation in a callback, and logits of an evaluation with `compute_metrics`."""
    shapes = []

    class Generates(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            shapes.append(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, min_new_tokens=3).shape)

    def metrics(found):
        shapes.append(found.predictions.shape[0] == found.label_ids.shape[0])
        return {}

    options = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "compute_metrics": metrics}
    trained = shared(tmp_path, KINDS["agent"](), callbacks=[Generates()], **options)
    assert shapes == [(1, 6), (1, 6), True] and trained.hybrid_summary()["tokens_shared"] > 0


def test_the_option_is_checked(tmp_path):
    with pytest.raises(ValueError, match="`share_rows` must be one of auto, on, off, got `yes`"):
        HybridConfig(**config_values(tmp_path), share_rows="yes")


def test_parts_are_those_that_were_asked_for(tmp_path):
    made = {}
    for asked in ({}, {"share_rows": "on", "enable_predict": False}, {"enable_predict": False}, {"share_rows": "off"}):
        made[str(asked)] = type(trainers.build(tmp_path, model=build(), config=HybridConfig, **asked).rows)
    assert list(made.values()) == [SharedWindows, SharedWindows, type(None), type(None)]
    assert issubclass(SharedWindows, Exchange)
