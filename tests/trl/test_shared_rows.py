"""Rows of preferences and of sampled completions share, and nothing that TRL computes from them changes."""

import logging
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_same_weights, config_values, mostly_slow, weights
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

import trl.trainer.utils  # noqa: E402
from datasets import Dataset  # noqa: E402
from rig import rollouts, with_eyes  # noqa: E402
from rig.pairs import (  # noqa: E402
    BLOOM,
    LOSSES,
    OF_KIND,
    PAIRS,
    SIZES,
    STATES,
    TOKENIZER,
    WORDS,
    apart,
    build,
    dpo,
    gradients,
    history,
    lora,
    lora_and_head,
    of_kind,
    trained_adapters,
    with_states,
)  # fmt: skip
from rig.trainers import fitted  # noqa: E402
from trl import DPOConfig, DPOTrainer, GRPOTrainer, RLOOTrainer, SFTConfig, SFTTrainer  # noqa: E402

from hf_hybrid import (  # noqa: E402
    HybridDPOConfig,
    HybridDPOTrainer,
    HybridGRPOTrainer,
    HybridRLOOTrainer,
    HybridSFTConfig,
    HybridSFTTrainer,
)
from hf_hybrid.compat import checkpointing_option  # noqa: E402
from hf_hybrid.rows import recurrent  # noqa: E402
from hf_hybrid.run.run import RandomStates  # noqa: E402
from hf_hybrid.trl.sft_dpo import options_of_rows  # noqa: E402


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name.endswith("fallbacks") and r.levelno == logging.WARNING]


# Models.


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", OF_KIND)
def test_gradients_are_those_of_trl(architecture, attention, tmp_path):
    found = []
    for trainer, config in ((DPOTrainer, DPOConfig), (HybridDPOTrainer, HybridDPOConfig)):
        model = build(architecture, attn_implementation=attention)
        reference = build(architecture, seed=1, attn_implementation=attention)
        built = dpo(trainer, config, tmp_path, model=model, reference=reference)
        batch = built.data_collator([built.train_dataset[index] for index in range(4)])
        found.append(gradients(built, batch))
    (plain_loss, plain), (loss, shared) = found
    assert loss == pytest.approx(plain_loss, rel=1e-6) and apart(plain, shared) < 1e-5
    summary = built.hybrid_summary()
    assert summary["plain_rows_because"] is None
    # Two passes, of policy and reference; a prompt is two thirds of a row, and half of them are shared.
    assert summary["tokens"] == 2 * batch["attention_mask"].sum()
    assert 0.25 < summary["tokens_shared"] / summary["tokens"] < 0.5


@pytest.mark.parametrize("architecture", STATES)
def test_completions_start_from_the_state_of_their_prompt(architecture, tmp_path, monkeypatch):
    """Gradients are those of TRL, also where layers are recomputed."""
    monkeypatch.setattr(recurrent, "LEAST", 4)  # tokens of a tiny prompt that a pass has to save
    found = []
    for trainer, config in ((DPOTrainer, DPOConfig), (HybridDPOTrainer, HybridDPOConfig)):
        model, reference = with_states(architecture), with_states(architecture, scale=0.9)
        built = dpo(trainer, config, tmp_path, model=model, reference=reference, router_aux_loss_coef=0.0)
        found.append(gradients(built, built.data_collator([built.train_dataset[index] for index in range(4)])))
    (plain_loss, plain), (loss, shared) = found
    assert loss == pytest.approx(plain_loss, rel=1e-6) and apart(plain, shared) < 1e-5
    summary = built.hybrid_summary()
    assert summary["plain_rows_because"] is None and summary["tokens_shared"] > 0.25 * summary["tokens"]


@pytest.mark.parametrize("architecture", mostly_slow(STATES, ["qwen3_next", "lfm2", "mamba2"]))
def test_preferences_with_states_are_recomputed_and_resumed(architecture, tmp_path, monkeypatch):
    """Recomputed layers give the gradients of TRL, and a resumed run ends at the same bits."""
    monkeypatch.setattr(recurrent, "LEAST", 4)
    options = {checkpointing_option(): True, "router_aux_loss_coef": 0.0, "save_strategy": "steps", "save_steps": 1}

    def made(trainer, config, folder, **more):
        model, reference = with_states(architecture), with_states(architecture, scale=0.9)
        return dpo(trainer, config, folder, model=model, reference=reference, **options, **more)

    theirs = fitted(made(DPOTrainer, DPOConfig, tmp_path / "trl", max_steps=1))
    whole = made(HybridDPOTrainer, HybridDPOConfig, tmp_path, max_steps=2)
    recomputes = []
    whole.model.get_decoder().layers[0].register_forward_pre_hook(
        lambda layer, _: recomputes.append(layer.training and layer.gradient_checkpointing)
    )
    whole.train()
    assert any(recomputes)
    resumed = made(HybridDPOTrainer, HybridDPOConfig, tmp_path / "resumed", max_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_same_weights(weights(whole.model), weights(resumed.model))
    first = type(whole.model).from_pretrained(tmp_path / "checkpoint-1")
    assert apart(weights(theirs.model), weights(first)) < 1e-5
    assert whole.hybrid_summary()["plain_rows_because"] is None


CASES = {
    "accumulation": {"gradient_accumulation_steps": 3},
    "adapters": {"peft_config": lora, "reference": None},
    "adapters and head": {"peft_config": lora_and_head, "reference": None},
    "adapters trained before": {"model": trained_adapters, "reference": None},
    "reference beforehand": {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 4, "ld_alpha": 0.5},
    "adapters, reference beforehand": {"precompute_ref_log_probs": True, "peft_config": lora, "reference": None},
    "reference that follows": {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5},
    "padding free": {"padding_free": True, "share_rows": "auto"},
    "padding free, adapters": {"padding_free": True, "share_rows": "auto", "peft_config": lora, "reference": None},
    "checkpointing": {checkpointing_option(): True},
    "truncated": {"max_length": 18},
    "truncated at the beginning": {"max_length": 18, "truncation_mode": "keep_end"},
    "multiple": {"pad_to_multiple_of": 16},
}


@pytest.mark.parametrize("draws", [False, True])
def test_generators_of_dpo_are_left_as_by_trl(draws, tmp_path):
    """Also where the rows of the first batch are compared, and it was found out what is drawn."""
    states = []
    for trainer, config in ((DPOTrainer, DPOConfig), (HybridDPOTrainer, HybridDPOConfig)):
        model = build("llama")
        if draws:  # ten numbers per pass, in each layout; ten tokens show that there is one for each
            model.get_input_embeddings().register_forward_hook(
                lambda module, args, hidden: hidden + 0 * torch.rand(2, 5).sum() if module.training else hidden
            )
        built = fitted(dpo(trainer, config, tmp_path, model=model, max_steps=2))
        states.append(RandomStates.now(torch.device("cpu")))
    assert states[0].same_as(states[1])
    summary = built.hybrid_summary()
    assert summary["tokens_padding"] > 0 and summary["dropout_drawn_once"] is draws


QUICK = (
    "adapters and head",
    "adapters trained before",
    "reference beforehand",
    "reference that follows",
    "padding free",
)


@pytest.mark.parametrize("case", mostly_slow(CASES, QUICK))
def test_training_is_that_of_trl(case, tmp_path):
    options = {"eval_dataset": PAIRS.select(range(4)), "eval_strategy": "steps", "eval_steps": 4, "max_steps": 4}
    options |= CASES[case]
    trained = []
    for trainer, config in ((DPOTrainer, DPOConfig), (HybridDPOTrainer, HybridDPOConfig)):
        made = {name: value() if callable(value) else value for name, value in options.items()}
        if config is DPOConfig:
            made.pop("share_rows", None)
        trained.append(dpo(trainer, config, tmp_path / trainer.__name__, **made))
        if config is HybridDPOConfig:  # the reference beforehand
            assert bool(trained[1].rows.counts["tokens_shared"]) is ("precompute_ref_log_probs" in options)
        trained[-1].train()
    plain, shared = trained
    # The rows of the reference are no rows that are trained on.
    assert shared.run.speed.tokens == max(entry.get("num_tokens", 0) for entry in plain.state.log_history)
    assert shared.rows.counts["tokens_shared"] > (0 if "beginning" in case else 0.2 * shared.rows.counts["tokens"])
    assert apart(weights(plain.model), weights(shared.model)) < 1e-6
    for theirs, ours in zip(history(plain), history(shared), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


def test_padding_free_computes_no_padding(tmp_path, caplog):
    """In TRL 1.16 it does nothing, and a warning says so."""
    plain = dpo(DPOTrainer, DPOConfig, tmp_path, padding_free=True)
    assert not plain.padding_free and "`padding_free=True` is temporarily unavailable" in caplog.text
    caplog.clear()
    trainer = dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path, padding_free=True, share_rows="auto")
    assert trainer.padding_free and trainer.args.padding_free
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(4)])
    gradients(trainer, batch)  # in both ways, to compare
    seen = []
    for model in (trainer.model, trainer.ref_model):
        model.model.embed_tokens.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    gradients(trainer, batch)
    assert (batch["input_ids"] == 0).any() and len(seen) == 2
    assert all(len(ids) == 1 and (ids != 0).all() and ids.numel() < batch["attention_mask"].sum() for ids in seen)
    assert not caplog.records


def test_padding_free_that_cannot_be_is_told(tmp_path, caplog):
    with pytest.raises(ValueError, match="`padding_free=True` needs `share_rows`.*Leave one of the two out"):
        HybridDPOConfig(**config_values(tmp_path, bf16=False), padding_free=True, share_rows="off")
    options = {"padding_free": True, "share_rows": "auto", "max_steps": 1}
    dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path, neftune_noise_alpha=5.0, **options)
    dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path, model=bloom(), reference=bloom(), **options).train()
    for told, why in zip(warnings_of(caplog), ("`neftune_noise_alpha=5.0`", "`BloomForCausalLM`"), strict=True):
        assert "`padding_free=True` has no effect" in told and why in told and "Leave `padding_free` out" in told


def test_every_loss_is_that_of_trl(tmp_path):
    trainer = dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path, label_smoothing=0.1)
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(4)])

    def compare():
        trainer.rows.off = True
        plain_loss, plain = gradients(trainer, batch)
        trainer.rows.off = False
        loss, shared = gradients(trainer, batch)
        assert loss == pytest.approx(plain_loss, rel=1e-5) and apart(plain, shared) < 1e-5

    for loss in LOSSES:
        trainer.loss_types = [loss]
        compare()
    trainer.loss_types, trainer.loss_weights, trainer.ld_alpha = ["sigmoid", "sft"], [0.8, 0.2], 0.5
    compare()
    trainer = dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path, use_weighting=True, f_divergence_type="js_divergence")
    compare()
    assert trainer.rows.counts["tokens_shared"] > 0


@pytest.mark.parametrize("options", [{"bf16": True}, {"dtype": torch.bfloat16}], ids=["autocast", "weights"])
def test_in_half_precision_prompts_are_shared(options, tmp_path):
    model = build("llama").to(options.get("dtype", torch.float32))
    trainer = fitted(dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path, model=model, bf16=options.get("bf16", False)))
    assert trainer.hybrid_summary()["tokens_shared"] > 0.25 * trainer.hybrid_summary()["tokens"]


PHASES = {
    "max_steps": 14, "warmup_phase_steps": 3, "full_phase_steps": 2, "correct_phase_steps": 1, "max_predict_steps": 2,
    "leap_worth": 0.5, "leap_budget": 10.0, "probe_budget": 1.0, "direction": "orthogonal", "enable_predict": True,
}  # fmt: skip


@pytest.mark.slow
def test_leaps_and_probes_share_prompts(tmp_path):
    trainer = fitted(dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path, optim="adamw_torch", **PHASES))
    summary = trainer.hybrid_summary()
    assert summary["forward_only_passes"] > 0 and summary["tokens_shared"] > 0.25 * summary["tokens"]


# Completions that are generated.

REWARDED = {
    "dapo": {},
    "window of several steps": {"num_iterations": 2, "steps_per_generation": 4},
    "adapters and reference": {"beta": 0.1, "peft_config": lora},
    "reference": {"beta": 0.1, "loss_type": "grpo"},
    "tokens": {"loss_type": "bnpo"},
    "tokens and reference": {"loss_type": "bnpo", "beta": 0.1},
    "every row": {"exact_skips": "off"},
    "entropy": {"entropy_coef": 0.1},
}


def compare_rollouts(theirs, ours, folder, share, **options):
    made = {name: value() if callable(value) else value for name, value in options.items()}
    hybrid = {name: made.pop(name) for name in ("exact_skips",) if name in made}
    rollouts.policy().save_pretrained(folder / "base")  # from where TRL takes the reference
    trained = []
    for trainer, extra in ((theirs, {}), (ours, {"share_rows": "on", **hybrid})):
        model = LlamaForCausalLM.from_pretrained(folder / "base")
        trained.append(fitted(rollouts.build(trainer, folder / trainer.__name__, share, model=model, **made, **extra)))
    plain, shared = trained
    assert shared.state.global_step == 8 and apart(weights(plain.model), weights(shared.model)) < 1e-6
    return shared


@pytest.mark.parametrize(
    "case",
    [c if c in ("dapo", "adapters and reference") else pytest.param(c, marks=pytest.mark.slow) for c in REWARDED],
)
def test_updates_by_rewards_are_those_of_trl(case, tmp_path):
    """Prompts are shared among the rows that exact skips leave, in passes of policy, old policy and reference."""
    shared = compare_rollouts(GRPOTrainer, HybridGRPOTrainer, tmp_path, 0.5, **REWARDED[case])
    summary = shared.hybrid_summary()
    together = case not in ("tokens and reference", "entropy")  # there the rows of a prompt stay where TRL put them
    assert summary["plain_rows_because"] is None
    assert summary["tokens_shared"] > (0.3 if together else 0.05) * summary["tokens"]


@pytest.mark.slow
def test_rloo_shares_prompts(tmp_path):
    shared = compare_rollouts(RLOOTrainer, HybridRLOOTrainer, tmp_path, 0.5, beta=0.05)
    assert shared.hybrid_summary()["tokens_shared"] > 0.3 * shared.hybrid_summary()["tokens"]


@pytest.mark.slow
def test_a_resumed_run_with_rewards_goes_on_counting_and_ends_at_the_same_weights(tmp_path):
    options = {"share_rows": "on", "max_steps": 4, "save_strategy": "steps", "save_steps": 1, "num_iterations": 2}
    whole = fitted(rollouts.build(HybridGRPOTrainer, tmp_path, **options))
    resumed = rollouts.build(HybridGRPOTrainer, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert apart(weights(whole.model), weights(resumed.model)) == 0.0
    for name in ("tokens", "tokens_shared", "rows", "rows_skipped"):
        assert whole.hybrid_summary()[name] == resumed.hybrid_summary()[name] > 0


# What is not shared.


def mamba():
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id")}
    return of_kind("mamba", **sizes, eos_token_id=1, bos_token_id=None)


def bloom():
    return of_kind("bloom", **BLOOM, hidden_dropout=0.0, attention_dropout=0.0)


class Counted(LlamaForCausalLM):
    """A model whose layers know the place of a token in its row, which is found only by looking."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].register_forward_hook(self._count)

    @staticmethod
    def _count(layer, args, output):
        return output + torch.linspace(0, 1, output.shape[1])[:, None]


PLAIN = {
    "state-space layers": (mamba, "`MambaMixer` has a state, and is not told where rows end"),
    "ALiBi": (bloom, "the attention of `BloomForCausalLM` is its own"),
    "first batch": (lambda: Counted(LlamaConfig(**SIZES)), "hidden states of the first batch are .* away"),
}


@pytest.mark.parametrize("case", PLAIN)
def test_where_a_prompt_cannot_be_shared_training_is_trls_to_the_last_bit(case, tmp_path, caplog):
    caplog.set_level("INFO")
    build_model, why = PLAIN[case]
    trained = []
    for trainer, config in ((DPOTrainer, DPOConfig), (HybridDPOTrainer, HybridDPOConfig)):
        torch.manual_seed(0)
        models = {"model": build_model(), "reference": build_model()}
        trained.append(fitted(dpo(trainer, config, tmp_path / trainer.__name__, max_steps=2, **models)))
    plain, shared = trained
    assert apart(weights(plain.model), weights(shared.model)) == 0.0
    assert shared.hybrid_summary()["tokens_shared"] == 0
    (told,) = (record.getMessage() for record in caplog.records if "computed padded" in record.getMessage())
    assert re.search(why, told) and re.search(why, shared.hybrid_summary()["plain_rows_because"])


@pytest.mark.parametrize("window", [8, 40])
def test_windows_of_attention_go_along_paths(window, tmp_path):
    trainer = dpo(
        HybridDPOTrainer,
        HybridDPOConfig,
        tmp_path,
        model=of_kind("gemma3_text", **SIZES, head_dim=8, sliding_window=window),
    )
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(4)])
    _, shared = gradients(trainer, batch)
    assert trainer.rows.counts["tokens_shared"] > 0
    trainer.rows.off = True
    assert apart(gradients(trainer, batch)[1], shared) < 1e-5


def test_off_is_trl_to_the_last_bit(tmp_path):
    plain = fitted(dpo(DPOTrainer, DPOConfig, tmp_path / "plain"))
    off = fitted(dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path / "off", share_rows="off"))
    assert apart(weights(plain.model), weights(off.model)) == 0.0
    assert off.hybrid_summary()["tokens"] == 0


def test_the_option_is_checked(tmp_path):
    with pytest.raises(ValueError, match="`share_rows` must be one of auto, on, off, got `yes`"):
        HybridDPOConfig(**config_values(tmp_path, bf16=False), share_rows="yes")


def test_sharded_runs_compute_trls_rows():
    names = ("fsdp", "deepspeed", "parallelism_config", "fp16", "bf16")
    _, why, _ = options_of_rows(SimpleNamespace(**{name: name == "fsdp" for name in names}))
    assert "`fsdp" in why


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
def test_layers_of_policy_and_reference_compile_twice(adapters, tmp_path):
    """With a gradient and without one, in windows of other lengths; the reference of adapters is their base."""
    options = {"reference": None if adapters else True, "max_steps": 6}
    if adapters:
        options["peft_config"] = lora()
    expected = fitted(dpo(DPOTrainer, DPOConfig, tmp_path, **options))
    torch._dynamo.reset()
    counters.clear()
    found = fitted(dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path, torch_compile_backend="aot_eager", **options))
    # Attention is computed outside of what is compiled: the graphs before, between and behind it, of both modes.
    assert counters["stats"]["unique_graphs"] == 6
    assert apart(weights(expected.model), weights(found.model)) < 1e-6
    assert found.hybrid_summary()["plain_rows_because"] is None


def test_noise_of_the_length_of_a_row_is_that_of_trl(tmp_path):
    trained = []
    for trainer, config in ((DPOTrainer, DPOConfig), (HybridDPOTrainer, HybridDPOConfig)):
        trained.append(dpo(trainer, config, tmp_path, max_steps=2, neftune_noise_alpha=5.0))
        trained[-1].train()  # each begins with its seed when it is built
    assert_same_weights(*(weights(built.model) for built in trained))
    assert "`neftune_noise_alpha=5.0`" in trained[1].hybrid_summary()["plain_rows_because"]


# Counters.


@pytest.mark.parametrize("phases", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "leaps"])
def test_a_resumed_run_goes_on_counting_and_ends_at_the_same_weights(phases, tmp_path):
    options = {"max_steps": 6, "save_strategy": "steps", "optim": "adamw_torch", **(PHASES if phases else {})}
    options["save_steps"] = options["max_steps"] // 2
    whole = fitted(dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path, **options))
    resumed = dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{options['save_steps']}"))
    assert apart(weights(whole.model), weights(resumed.model)) == 0.0
    first, second = whole.hybrid_summary(), resumed.hybrid_summary()
    assert [first[name] for name in ("tokens", "tokens_shared")] == [
        second[name] for name in ("tokens", "tokens_shared")
    ]
    whole.args.max_steps, whole.args.output_dir = 1, str(tmp_path / "again")
    whole.train()
    assert whole.hybrid_summary()["tokens"] < first["tokens"] / 3


# Supervised fine-tuning.


def conversations(count=24, seed=0):
    """Questions and answers under one system prompt, as TRL's data sets of prompts and completions have them."""
    generator = torch.Generator().manual_seed(seed)

    def words(least, most):
        number = int(torch.randint(least, most, (), generator=generator))
        return " ".join(f"w{word}" for word in torch.randint(2, WORDS, (number,), generator=generator).tolist())

    system = words(12, 13)
    return Dataset.from_list(
        [{"prompt": f"{system} {words(2, 8)}", "completion": " " + words(3, 9)} for _ in range(count)]
    )


TALKS = conversations()


def sft(trainer, config, folder, data=TALKS, model=None, **options):
    values = {
        "max_length": None, "bf16": False, "max_steps": 4, "optim": "sgd", "learning_rate": 0.2,
        "gradient_accumulation_steps": 3, "eval_strategy": "steps", "eval_steps": 3, **options,
    }  # fmt: skip
    extra = {name: values.pop(name) for name in ("peft_config",) if name in values}
    built = trainer(
        model or build("llama"),
        config(**config_values(folder, **values)),
        train_dataset=data,
        eval_dataset=data.select(range(6)),
        processing_class=TOKENIZER,
        **extra,
    )
    built.train()
    return built


SFT = {
    "completions": {},
    "every token": {"completion_only_loss": False},
    "dft": {"loss_type": "dft"},
    "adapters": {"peft_config": lora},
    "adapters and head": {"peft_config": lora_and_head},
    "checkpointing": {checkpointing_option(): True},
    "no accumulation": {"gradient_accumulation_steps": 1},
    "multiple": {"pad_to_multiple_of": 16},
    "means": {"model": lambda: with_eyes.build("qwen3_vl")},
    "means and states": {"model": lambda: with_eyes.build("qwen3_5_vl"), "max_steps": 1},  # rounding grows by step
    "means and experts": {"model": lambda: with_eyes.build("qwen3_vl_moe"), "router_aux_loss_coef": 0.5},
    "means under dft": {"model": lambda: with_eyes.build("qwen3_vl"), "loss_type": "dft"},
}


@pytest.mark.parametrize(
    "case", mostly_slow(SFT, [case for case in SFT if case not in ("adapters", "dft", "means", "no accumulation")])
)
@pytest.mark.long
def test_fine_tuning_is_that_of_trl(case, tmp_path):
    options = {"max_grad_norm": 0.0, **SFT[case]}
    trained = []
    for trainer, config in ((SFTTrainer, SFTConfig), (HybridSFTTrainer, HybridSFTConfig)):
        made = {name: value() if callable(value) else value for name, value in options.items()}
        hybrid = {"leap_gain": 0} if config is HybridSFTConfig else {}
        trained.append(sft(trainer, config, tmp_path / trainer.__name__, **made, **hybrid))
    plain, shared = trained
    summary = shared.hybrid_summary()
    assert summary["plain_rows_because"] is None and summary["tokens_shared"] > 0.3 * summary["tokens"]
    assert apart(weights(plain.model), weights(shared.model)) < (1e-5 if case == "means and states" else 1e-6)
    for theirs, ours in zip(history(plain), history(shared), strict=True):
        theirs.pop("entropy", None), theirs.pop("mean_token_accuracy", None)  # means over micro-batches
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    tokens = [[e["num_tokens"] for e in t.state.log_history if "num_tokens" in e] for t in trained]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("adapters", [None, lora, lora_and_head])
def test_the_head_scores_labels_alone(adapters, tmp_path, monkeypatch):
    """On a CPU TRL's head scores every token of a batch."""
    scored, function = [], trl.trainer.utils._ChunkedLogProbFunction
    score = function.apply
    monkeypatch.setattr(function, "apply", lambda hidden, *args: scored.append(len(hidden)) or score(hidden, *args))
    options = {"max_steps": 2, "eval_strategy": "no", "gradient_accumulation_steps": 1}
    options |= {"per_device_train_batch_size": len(TALKS), "peft_config": adapters and adapters()}
    theirs = sft(SFTTrainer, SFTConfig, tmp_path / "trl", **options)
    assert scored[-1] == len(TALKS) * (max(map(len, theirs.train_dataset["input_ids"])) - 1)
    ours = sft(HybridSFTTrainer, HybridSFTConfig, tmp_path / "ours", leap_gain=0, **options)
    assert scored[-1] == sum(label != -100 for row in ours.train_dataset["labels"] for label in row[1:])


def test_metrics_of_one_micro_batch_are_those_of_trl(tmp_path):
    """Entropy and accuracy are means over micro-batches: with one of them per window they are TRL's."""
    plain = sft(SFTTrainer, SFTConfig, tmp_path / "trl", gradient_accumulation_steps=1)
    ours = sft(HybridSFTTrainer, HybridSFTConfig, tmp_path / "ours", gradient_accumulation_steps=1, leap_gain=0)
    for theirs, mine in zip(history(plain), history(ours), strict=True):
        assert {name: mine[name] for name in theirs} == pytest.approx(theirs, rel=1e-3, abs=1e-4)


def test_the_comparison_of_rows_counts_no_tokens(tmp_path):
    """TRL counts tokens in training mode, in which the first window of a model with dropout is computed once more."""
    counted = []
    for trainer, config in ((SFTTrainer, SFTConfig), (HybridSFTTrainer, HybridSFTConfig)):
        options = {"max_steps": 2, "logging_steps": 1, "logging_strategy": "steps", "eval_strategy": "no"}
        trained = sft(trainer, config, tmp_path, peft_config=lora(lora_dropout=0.1), **options)
        counted.append([entry["num_tokens"] for entry in trained.state.log_history if "num_tokens" in entry])
    assert trained.hybrid_summary()["dropout_drawn_once"]
    assert counted[0] == counted[1]


PACKED = [
    {"packing": True, "max_length": 32},
    {"padding_free": True},
    {"padding_free": True, "label_smoothing_factor": 0.2},
]


@pytest.mark.parametrize("options", PACKED, ids=str)
def test_packed_rows_share_the_prefixes_of_their_documents(options, tmp_path):
    """In evaluations too, whose metrics are TRL's."""
    plain = sft(SFTTrainer, SFTConfig, tmp_path / "trl", **options)
    ours = sft(HybridSFTTrainer, HybridSFTConfig, tmp_path / "ours", leap_gain=0, **options)
    assert apart(weights(plain.model), weights(ours.model)) < 1e-6
    summary = ours.hybrid_summary()
    assert summary["tokens_shared"] > 0 and summary["plain_rows_because"] is None
    for theirs, mine in zip(history(plain), history(ours), strict=True):
        of_trl = {name: value for name, value in theirs.items() if name not in ("entropy", "mean_token_accuracy")}
        assert {name: mine[name] for name in of_trl} == pytest.approx(of_trl, rel=1e-4)
