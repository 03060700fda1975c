"""GRPO and RLOO without rows that teach nothing: the weights of TRL's trainers, with fewer backward passes."""

import dataclasses
import inspect
import itertools
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import assert_same_weights, mostly_slow, tiny_model, weights

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

from accelerate.utils import AutocastKwargs  # noqa: E402
from peft import LoraConfig  # noqa: E402
from rig import rollouts  # noqa: E402
from rig.rollouts import MIDDLE, TOKENIZER, Stop, build, policy  # noqa: E402
from rig.trainers import fitted  # noqa: E402
from torch.nn.functional import dropout  # noqa: E402
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig, TrainerCallback  # noqa: E402
from trl import GRPOTrainer, RLOOTrainer  # noqa: E402

from hf_hybrid import (  # noqa: E402
    HybridArguments,
    HybridConfig,
    HybridGRPOConfig,
    HybridGRPOTrainer,
    HybridRLOOConfig,
    HybridRLOOTrainer,
    UnrecoveredMemoryError,
)
from hf_hybrid.arguments import options_of  # noqa: E402
from hf_hybrid.run.run import RandomStates  # noqa: E402
from hf_hybrid.trl.groups import (  # noqa: E402
    MEAN_OF_LOSS,
    ON_HOST,
    SAMPLER,
    ExactSkips,
    on_host,
    rebin,
    rewarded_alike,
    rows_that_count,
    total_rewards,
)
from hf_hybrid.trl.rl import _OF_LEAPS  # noqa: E402

LOSSES = sorted(MEAN_OF_LOSS)
SHARES = (0.0, 0.3, 0.7, 1.0)
KINDS = ((GRPOTrainer, HybridGRPOTrainer), (RLOOTrainer, HybridRLOOTrainer))
CLOCKS = ("step_time", "runtime", "per_second")
OF_COMPUTED_ROWS = ("entropy", "clip_ratio", "vespo")


def train(trainer_class, folder, share, **options):
    trainer = fitted(build(trainer_class, folder, share, **options))
    return trainer


def largest_difference(first: dict, second: dict) -> float:
    """Of two sets of weights; to the next number in fp32, which is 1.2e-7 away at 1, counts as 1e-7."""
    assert first.keys() == second.keys()
    steps = torch.finfo(torch.float32).eps / 1e-7
    return max(
        ((weight - second[name]).abs() / (steps * weight.abs()).clamp(min=1)).max().item()
        for name, weight in first.items()
    )


def history(trainer) -> list[dict]:
    """Everything logged but for clocks, what is measured on the computed rows, and what TRL does not measure."""
    left_out = (*CLOCKS, *OF_COMPUTED_ROWS, SAMPLER)
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in left_out)}
        for entry in trainer.state.log_history
    ]


def lora(**options):
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)


def check_equal(theirs, ours, share: float) -> None:
    assert ours.hybrid_summary()["every_row_because"] is None
    assert largest_difference(weights(theirs.model), weights(ours.model)) <= 1e-7
    for first, second in itertools.zip_longest(history(theirs), history(ours)):
        assert first == pytest.approx(second, abs=2e-6, rel=1e-5)
    found = ours.hybrid_summary()
    assert found["rows"] == 8 * ours.args.gradient_accumulation_steps * ours.args.per_device_train_batch_size
    if share == 0.7:
        assert found["backward_passes_avoided_exactly"] > 0
    if share == 1:
        assert found["rows_skipped"] == found["rows"] - 1  # one shows which parameters get gradients


# The weights after eight steps.

DIVISIONS = {
    "one generation per step": {},
    "two steps per generation": {"steps_per_generation": 4},
    "two generations per step": {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
    "two iterations": {"num_iterations": 2},
    "across windows": {"steps_per_generation": 3, "num_iterations": 2, "gradient_accumulation_steps": 4},
}
MASKED = {"mask_truncated_completions": True}
OF_ADAPTERS = {"peft_config": lora(), "learning_rate": 1.0}
QUICK = [
    (KINDS[0], 0.7, {"loss_type": "dapo", **MASKED, **DIVISIONS["two iterations"]}),
    (KINDS[0], 0.3, {"loss_type": "bnpo", **MASKED, **DIVISIONS["across windows"]}),
    (KINDS[0], 1.0, {"loss_type": "grpo", **MASKED}),
    (KINDS[0], 0.7, {"loss_type": "dapo", **OF_ADAPTERS}),
    (KINDS[1], 0.7, {"num_iterations": 2, **MASKED}),
]
SLOW = [
    *((KINDS[0], 0.7, {"loss_type": loss, **OF_ADAPTERS}) for loss in ("bnpo", "grpo")),
    *((KINDS[1], share, {"num_iterations": 2, **MASKED}) for share in (0.0, 0.3, 1.0)),
    *(
        (KINDS[0], share, {"loss_type": loss, **DIVISIONS[division]})
        for loss, share, division in itertools.product(LOSSES, SHARES, DIVISIONS)
    ),
]


@pytest.mark.parametrize(("kinds", "share", "options"), mostly_slow([*QUICK, *SLOW], QUICK))
def test_weights_are_those_of_trl(kinds, share, options, tmp_path):
    theirs, ours = (train(cls, tmp_path, share, **options) for cls in kinds)
    check_equal(theirs, ours, share)


@pytest.mark.parametrize("share_rows", mostly_slow(["auto", "off"], ["auto"]))
def test_adapters_in_bf16_are_as_near_to_fp32_as_trls(share_rows, tmp_path):
    """They compute with fewer kernels, unless rows are to stay TRL's. PEFT generates in fp32, so completions agree."""
    options = {"peft_config": lora(init_lora_weights=False), "max_steps": 2, "learning_rate": 0.01, "optim_args": None}

    def moved(kind, **more):
        torch.manual_seed(0)
        trainer = train(kind, tmp_path, 0.5, **options, **more)
        trained = [p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad]
        return torch.cat(trained), trainer

    (exact, _), (theirs, _) = (moved(GRPOTrainer, bf16=bf16) for bf16 in (False, True))
    ours, trainer = moved(HybridGRPOTrainer, bf16=True, share_rows=share_rows)
    names = {part.name for part in trainer.parts}
    assert ("adapter_products" in names) == (share_rows == "auto")
    assert 0 < (ours - exact).norm() <= 1.1 * (theirs - exact).norm()


@pytest.mark.parametrize("share", mostly_slow([0.7, 1.0], [0.7]))
def test_weights_with_a_gradient_scaler(share, tmp_path):
    """
    As fp16 has it on a GPU. Micro-batches and whole windows are left out between its scaled losses. Autocast is off:
    its rounding depends on the rows of a batch.
    """

    def trained(kind):
        trainer = build(kind, tmp_path, share, gradient_accumulation_steps=2)
        trainer.accelerator.native_amp, trainer.accelerator.state._mixed_precision = True, "fp16"
        trainer.accelerator.autocast_handler = AutocastKwargs(enabled=False)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        try:
            trainer.train()
        finally:
            trainer.accelerator.state._mixed_precision = "no"
        assert trainer.accelerator.scaler.get_scale() == 2.0**10 and trainer.optimizer.scaler is not None
        return trainer

    theirs, ours = (trained(kind) for kind in (GRPOTrainer, HybridGRPOTrainer))
    check_equal(theirs, ours, share)


EVERYTHING = {"share_rows": "auto", "num_iterations": 2, "per_device_train_batch_size": 8}
"""With shared rows, which gives gradients other rounding, and rewards before log-probabilities."""


@pytest.mark.parametrize(
    ("theirs", "ours", "options"),
    [
        (GRPOTrainer, HybridGRPOTrainer, {"loss_type": "dapo"}),
        *(
            pytest.param(GRPOTrainer, HybridGRPOTrainer, {"loss_type": loss}, marks=pytest.mark.slow)
            for loss in LOSSES
            if loss != "dapo"
        ),
        pytest.param(RLOOTrainer, HybridRLOOTrainer, {}, marks=pytest.mark.slow),
        pytest.param(GRPOTrainer, HybridGRPOTrainer, {"peft_config": lora()}, marks=pytest.mark.slow),
    ],
)
def test_weights_with_everything_on(theirs, ours, options, tmp_path):
    plain = {key: value for key, value in EVERYTHING.items() if key != "share_rows"}
    theirs = train(theirs, tmp_path / "trl", 0.5, **plain, **options)
    ours = train(ours, tmp_path / "ours", 0.5, **EVERYTHING, **options)
    assert largest_difference(weights(theirs.model), weights(ours.model)) <= 1e-6
    found = ours.hybrid_summary()
    assert all(found[key] > 0 for key in (*rollouts.COUNTS, "tokens_shared"))
    assert found["every_row_because"] is found["plain_rollouts_because"] is found["plain_rows_because"] is None


def test_steps_without_rows_go_on_with_momentum_and_weight_decay(tmp_path):
    """AdamW divides by its averages of the gradients, so that only exact zeros give the same bits."""
    options = {"optim": "adamw_torch", "optim_args": None, "weight_decay": 0.1, "learning_rate": 1e-2}
    theirs, ours = (train(cls, tmp_path, 1.0, **options) for cls in (GRPOTrainer, HybridGRPOTrainer))
    assert_same_weights(weights(theirs.model), weights(ours.model))
    assert largest_difference(weights(ours.model), weights(policy())) > 1e-4
    steps = [entry for entry in ours.state.log_history if "grad_norm" in entry]
    assert [(step["loss"], step["grad_norm"]) for step in steps] == [(0.0, 0.0)] * 8


@pytest.mark.parametrize(
    ("theirs", "ours", "share_rows"),
    mostly_slow(
        [(*kinds, share_rows) for kinds in KINDS for share_rows in ("auto", "off")],
        [(*KINDS[0], "auto"), (*KINDS[1], "off")],
    ),
)
def test_entries_of_left_out_rows_have_the_keys_of_trl(theirs, ours, share_rows, tmp_path):
    options = {"learning_rate": 0.0, "gradient_accumulation_steps": 1, "steps_per_generation": 1, "logging_steps": 1}
    first = train(theirs, tmp_path, 1.0, **options)
    second = train(ours, tmp_path, 1.0, **options, share_rows=share_rows)
    entries = [[e for e in trainer.state.log_history if "loss" in e] for trainer in (first, second)]
    assert len(entries[0]) == 8 and second.hybrid_summary()["rows_skipped"] > 0
    for expected, found in zip(*entries):
        keys = {key for key in found if not key.startswith(SAMPLER)}  # TRL does not compare, where rows are computed
        assert keys == expected.keys() and {"entropy", "clip_ratio/region_mean"} < keys
        if found is not entries[1][0]:  # in the first step one row is computed
            same = [key for key in expected if any(word in key for word in OF_COMPUTED_ROWS)]
            assert [found[key] for key in same] == pytest.approx([expected[key] for key in same], rel=1e-5)
    counted = train(ours, tmp_path, 1.0, **{**options, "logging_steps": 100}, share_rows=share_rows).hybrid_summary()
    assert {key: second.hybrid_summary()[key] for key in ("rows", "tokens")} == {
        key: counted[key] for key in ("rows", "tokens")
    }


def test_nothing_to_leave_out_gives_the_same_bits(tmp_path):
    theirs, ours = (train(cls, tmp_path, 0.0, max_steps=3) for cls in (GRPOTrainer, HybridGRPOTrainer))
    assert_same_weights(weights(theirs.model), weights(ours.model))
    assert ours.hybrid_summary()["rows_skipped"] == 0


# Equal rewards.


def test_which_rows_are_rewarded_alike():
    nan = float("nan")
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.2, nan, 0.3, nan, nan, 0.0, -0.0])
    assert rewarded_alike(rewards, 2).tolist() == [True, True, False, False, True, True, True, True, True, True]
    weighted = total_rewards(torch.tensor([[1.0, nan], [nan, nan], [2.0, 3.0]]), torch.tensor([0.5, 2.0]))
    assert weighted[[0, 2]].tolist() == [0.5, 7.0] and weighted[1].isnan()


def rewarded(trainer_class, folder, reward, monkeypatch, **options):
    """A trainer with eight completions of each prompt and AdamW, which makes full steps of small gradients."""
    monkeypatch.setattr(rollouts, "reward", reward)
    options = {"num_generations": 8, "per_device_train_batch_size": 8, "optim": "adamw_torch", **options}
    return train(trainer_class, folder, 0.5, **{"optim_args": None, "weight_decay": 0.0, **options})


@pytest.mark.parametrize(
    "theirs, ours", [(GRPOTrainer, HybridGRPOTrainer), (RLOOTrainer, HybridRLOOTrainer)], ids=["grpo", "rloo"]
)
def test_equal_rewards_teach_nothing(theirs, ours, tmp_path, monkeypatch):
    """Eight times 0.1 have a mean in fp32 that is not 0.1, and TRL trains on the difference."""

    def same(completions, **_):
        return [0.1] * len(completions)

    start = weights(policy())
    plain = rewarded(theirs, tmp_path / "trl", same, monkeypatch)
    assert largest_difference(start, weights(plain.model)) > 1e-3
    trained = rewarded(ours, tmp_path / "ours", same, monkeypatch)
    summary = trained.hybrid_summary()
    assert largest_difference(start, weights(trained.model)) == 0.0
    assert (
        summary["rows_of_rounding"] == summary["rows"] == 8 * 2 * 8 and summary["rows_skipped"] >= summary["rows"] - 8
    )
    assert set(trained._logs["advantages"]) == {0.0} != set(plain._logs["advantages"])
    as_trl = rewarded(ours, tmp_path / "as trl", same, monkeypatch, equal_rewards="trl", exact_skips="off")
    assert_same_weights(weights(plain.model), weights(as_trl.model))
    assert as_trl.hybrid_summary()["rows_of_rounding"] == 0


def test_other_rewards_stay_those_of_trl(tmp_path, monkeypatch):
    """Several functions, of which some give none, groups in which one reward differs, and groups that are alike."""

    def graded(prompts, completions, **_):
        return [None if "3" in prompt else round(len(text) / 10, 1) for prompt, text in zip(prompts, completions)]

    options = {"scale_rewards": "none", "num_generations": 2, "optim": "sgd", "loss_type": "grpo"}
    plain = rewarded(GRPOTrainer, tmp_path / "trl", graded, monkeypatch, **options)
    trained = rewarded(HybridGRPOTrainer, tmp_path / "ours", graded, monkeypatch, **options)
    assert largest_difference(weights(plain.model), weights(trained.model)) <= 1e-6
    assert trained.hybrid_summary()["rows_skipped"] > 0


@pytest.mark.parametrize(
    "ours, options",
    [
        (HybridGRPOTrainer, {"multi_objective_aggregation": "normalize_then_sum"}),
        (HybridRLOOTrainer, {"normalize_advantages": True}),
        (HybridRLOOTrainer, {"beta": 0.1, "peft_config": LoraConfig(r=2, target_modules=["q_proj"])}),
    ],
    ids=["normalised", "normalised rloo", "distance"],
)
def test_where_the_batch_has_a_part_advantages_stay(ours, options, tmp_path, monkeypatch):
    trained = rewarded(ours, tmp_path, lambda completions, **_: [0.1] * len(completions), monkeypatch, **options)
    assert trained._total_rewards() is None and trained.hybrid_summary()["rows_of_rounding"] == 0


def test_rows_become_forward_passes(tmp_path):
    trainer, seen = build(HybridGRPOTrainer, tmp_path, 0.7, max_steps=4, gradient_accumulation_steps=4), []
    trainer.model.register_forward_pre_hook(
        lambda model, args, kwargs: seen.append(len(kwargs["input_ids"])) if "labels" in kwargs else None,
        with_kwargs=True,
    )
    trainer.train()
    found = trainer.hybrid_summary()
    assert sum(seen) == found["rows"] - found["rows_skipped"] < 0.5 * found["rows"]
    assert len(seen) == 16 - found["backward_passes_avoided_exactly"] < 9
    assert "rows skipped: 40" in str(found)
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "| rows | 64 |" in card and "| rows skipped | 40 |" in card


@pytest.mark.parametrize("options", [{}, {"num_iterations": 2}, {"mask_truncated_completions": True}])
@pytest.mark.parametrize("ours", [HybridGRPOTrainer, HybridRLOOTrainer])
def test_a_plan_reads_on_the_host_what_the_device_has(ours, options, tmp_path, monkeypatch):
    seen = []

    def plan(skips, batches, plan=ExactSkips.plan, **how):
        here, there = on_host(batches), on_host([{k: v for k, v in b.items() if k != ON_HOST} for b in batches])
        assert here.keys() == there.keys() > {"prompt_ids", "advantages"}
        for name, value in here.items():
            used = there["prompt_mask" if "prompt" in name else "completion_mask"] if "ids" in name else 1
            assert torch.equal(value * used, there[name] * used) and value.dtype == there[name].dtype
        counts = plan(skips, batches, **how)
        for planned, read in zip(skips.computed, skips.on_host, strict=True):
            assert torch.equal(planned["completion_mask"], read["completion_mask"])
            assert torch.equal(planned["prompt_mask"], read["prompt_mask"])
        seen.append(ON_HOST in batches[0])
        return counts

    monkeypatch.setattr(ExactSkips, "plan", plan)
    train(ours, tmp_path, 0.5, **({"beta": 0.0} | options))
    assert seen and all(seen) is ("mask_truncated_completions" not in options)


@pytest.mark.parametrize("loss_type", mostly_slow(["grpo", "bnpo", "dapo", "dr_grpo"], ["grpo", "dapo"]))
def test_under_deepspeed_each_micro_batch_keeps_a_row(loss_type, tmp_path, monkeypatch):
    """The first backward pass of a window begins its sums of gradients. It has to compute something."""
    theirs = train(GRPOTrainer, tmp_path / "trl", 0.6, loss_type=loss_type)
    monkeypatch.setattr(HybridGRPOTrainer, "_sharding", "deepspeed")
    ours = train(HybridGRPOTrainer, tmp_path / "ours", 0.6, loss_type=loss_type)
    found = ours.hybrid_summary()
    assert found["rows_skipped"] > 0 == found["backward_passes_avoided_exactly"]
    assert largest_difference(theirs.model.state_dict(), ours.model.state_dict()) < 2e-7


def with_longer_completions(base):
    class Longer(base):
        def _generate(self, prompts):
            prompt_ids, completion_ids, *others = super()._generate(prompts)
            return (prompt_ids, [[*ids, 7, 9] for ids in completion_ids], *others)

    return Longer


def with_other_rewards(base):
    class Other(base):
        def _calculate_rewards(self, *args, **kwargs):
            rewards = super()._calculate_rewards(*args, **kwargs)
            return rewards + 0.1 * torch.arange(len(rewards))[:, None]

    return Other


def pops(completion_ids, **columns):
    """A reward that changes the lists that it gets."""
    rewards = rollouts.reward(**columns)
    for ids in completion_ids:
        del ids[1:]
    return rewards


OVERRIDDEN = {
    "completions": (with_longer_completions, {}),
    "rewards": (with_other_rewards, {}),
    "rewards first": (with_other_rewards, {"num_iterations": 2}),
    "lists": (lambda base: base, {"reward_funcs": pops}),
}


@pytest.mark.parametrize(("theirs", "ours"), mostly_slow(KINDS, KINDS[:1]))
@pytest.mark.parametrize("what", OVERRIDDEN)
def test_what_a_user_makes_of_completions_and_rewards_is_trained_on(what, theirs, ours, tmp_path, monkeypatch):
    kind, options = OVERRIDDEN[what]
    trained = []
    for base, more in ((theirs, {}), (ours, {"share_rows": "auto"})):
        made = kind(base)
        monkeypatch.setitem(rollouts.CONFIGS, made, rollouts.CONFIGS[base])
        trained.append(train(made, tmp_path / base.__name__, 0.5, **options, **more, max_steps=4))
    assert largest_difference(*(weights(trainer.model) for trainer in trained)) <= 1e-6


# The gradient of one window, in settings that a tiny run does not reach.

SETTINGS = {
    "plain": {},
    "two-sided clipping": {"delta": 1.1},
    "sequence ratios": {"importance_sampling_level": "sequence"},
    "off-policy mask": {"off_policy_mask_threshold": 0.3},
    "advantages of tokens": {"batch": "advantages"},
    "tools": {"batch": "tool_mask"},
    "ratios of vLLM": {"batch": "importance_sampling_ratio"},
}


def micro_batches(share, kind=None, count=4, size=4, length=5):
    """Micro-batches as TRL buffers them, with log-probabilities of another policy."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.rand(*shape, generator=generator)

    rows = count * size
    ends = torch.randint(1, length + 1, (rows, 1), generator=generator)
    mask = (torch.arange(length) < ends).long()
    mask[2] = 0  # a truncated completion
    advantages = (random(rows) - 0.5) * (random(rows) >= share)
    whole = {
        "prompt_ids": torch.randint(2, 90, (rows, 4), generator=generator),
        "prompt_mask": torch.ones(rows, 4, dtype=torch.long),
        "completion_ids": torch.randint(2, 90, (rows, length), generator=generator),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": -4.7 + 0.4 * random(rows, length),
    }
    if kind == "tool_mask":
        whole["tool_mask"] = (random(rows, length) < 0.7).long()
    if kind == "importance_sampling_ratio":
        whole["importance_sampling_ratio"] = 0.5 + random(rows, length)
    if kind == "advantages":
        whole["advantages"] = advantages.unsqueeze(1) * (random(rows, length) - 0.3)
    items = mask.sum()
    parts = [{name: value[first : first + size] for name, value in whole.items()} for first in range(0, rows, size)]
    return [{**part, "num_items_in_batch": items} for part in parts]


def gradient_of(trainer, batches):
    trainer.model.zero_grad()
    loss = sum(trainer._compute_loss(trainer.model, batch) for batch in batches)
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in trainer.model.parameters()]


@pytest.fixture(scope="module")
def trl(tmp_path_factory):
    trainer = build(GRPOTrainer, tmp_path_factory.mktemp("window"), gradient_accumulation_steps=4)
    trainer.current_gradient_accumulation_steps = 4
    return trainer


@pytest.mark.parametrize("loss_type", LOSSES)
def test_gradient_of_a_window_is_that_of_trl(loss_type, trl):
    for (setting, options), share in zip(SETTINGS.items(), itertools.cycle((0.8, 0.3))):
        trl.loss_type, trl.args.delta = loss_type, options.get("delta")
        trl.importance_sampling_level = options.get("importance_sampling_level", "token")
        trl.off_policy_mask_threshold = options.get("off_policy_mask_threshold")
        trl.use_vllm = options.get("batch") == "importance_sampling_ratio"
        batches = micro_batches(share, options.get("batch"))
        rows = torch.cat([rows_that_count(batch) for batch in batches]).nonzero().flatten()
        fewer = rebin(batches, rows, -(-len(rows) // 4), MEAN_OF_LOSS[loss_type])
        (loss, gradient), (ours, found) = gradient_of(trl, batches), gradient_of(trl, fewer)
        where = f"{setting}, {share}: {len(rows)} rows"
        assert len(fewer) < 4 or share == 0.3, where
        assert ours.item() == pytest.approx(loss.item(), abs=1e-6), where
        for one, other in zip(gradient, found, strict=True):
            torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-4, msg=where)


# Where leaving rows out would change the update.


def experts(config_class=MixtralConfig):
    """A mixture of experts whose router has a loss of its own."""
    torch.manual_seed(0)
    count = {"num_local_experts" if config_class is MixtralConfig else "num_experts": 4}
    config = config_class(
        vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.1,
        moe_intermediate_size=16, head_dim=8, eos_token_id=1, pad_token_id=0, bos_token_id=None, **count,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = [1, *range(30, 45)]
    return model


@pytest.mark.parametrize("config_class", mostly_slow((MixtralConfig, Qwen3MoeConfig), [MixtralConfig]))
@pytest.mark.parametrize("trainer", mostly_slow((HybridGRPOTrainer, HybridRLOOTrainer), [HybridGRPOTrainer]))
def test_experts_without_a_router_loss_skip_rows(trainer, config_class, tmp_path):
    options = {"router_aux_loss_coef": 0.0, "num_iterations": 2}
    classes = (GRPOTrainer if trainer is HybridGRPOTrainer else RLOOTrainer, trainer)
    theirs, ours = (train(cls, tmp_path, 0.7, model=experts(config_class), **options) for cls in classes)
    check_equal(theirs, ours, 0.7)
    found = ours.hybrid_summary()
    assert found["rows_decoded_saved"] > 0
    assert found["plain_rollouts_because"] is None


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_dead_rows_of_experts_end_at_the_weights_of_trl(coefficient, tmp_path):
    """With the router's loss every row is computed, without it dead rows are not: within 1e-6 after 8 steps."""
    found = []
    for cls in (GRPOTrainer, HybridGRPOTrainer):
        model = experts(Qwen3MoeConfig)
        model.config.output_router_logits = False  # TRL asks for them itself; `generate` fails with them
        more = {} if cls is GRPOTrainer else {"share_rows": "auto"}
        trainer = train(cls, tmp_path, 0.5, model=model, router_aux_loss_coef=coefficient, **more)
        found.append(trainer)
    theirs, ours = (weights(trainer.model) for trainer in found)
    assert max((theirs[name] - ours[name]).abs().max() for name in theirs) < 1e-6
    summary = found[1].hybrid_summary()
    assert summary["tokens_shared"] > 0 and summary["plain_rows_because"] is None
    assert (summary["rows_skipped"] > 0) == (coefficient == 0.0)
    assert any("aux_loss" in entry for entry in found[1].state.log_history) == (coefficient > 0)


class OwnLoss(HybridGRPOTrainer):
    def _compute_loss(self, model, inputs):
        return 2 * super()._compute_loss(model, inputs)


def batch_norm():
    model = policy()
    model.norm_of_batches = torch.nn.BatchNorm1d(4)
    return model


def counting():
    """A model that counts the tokens that it gets in training, from which a callback may balance experts."""
    model = policy()
    model.register_buffer("tokens", torch.zeros(()), persistent=False)

    def count(module, args, hidden):
        if module.training:
            model.tokens += args[0].numel()

    model.get_input_embeddings().register_forward_hook(count)
    return model


def drawing(change):
    """A model that computes `change(ids, hidden)` behind its embedding in training, as a layer of its own would."""
    model = policy()
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, hidden: change(args[0], hidden) if module.training else hidden
    )
    return model


def of_all_rows(ids, hidden):
    return hidden * (0.9 + 0.2 * random.random())


EVERY_ROW = {
    "beta": ({"beta": 0.1, "peft_config": lora}, "`beta=0.1`", "set `beta=0.0`"),
    "entropy bonus": ({"entropy_coef": 0.01}, "entropy bonus", "leave out `entropy_coef`"),
    "adaptive entropy": ({"use_adaptive_entropy": True}, "entropy bonus", "leave out"),
    "quantile": ({"top_entropy_quantile": 0.5}, "`top_entropy_quantile=0.5`", "set `top_entropy_quantile=1.0`"),
    "router": ({"model": experts}, "router", "set `router_aux_loss_coef=0.0`"),
    "own loss": ({"trainer": OwnLoss}, "`OwnLoss._compute_loss` is not TRL's", "train without `OwnLoss._compute_loss`"),
    "a number for all rows": (
        {"model": lambda: drawing(of_all_rows)},
        "several rows",
        "set that rate to 0",
    ),
    "counts of tokens": ({"model": counting}, "changes the buffer `tokens`", None),
    "batch normalisation": ({"model": batch_norm}, "batch normalisation mixes rows", None),
}


@pytest.mark.parametrize("name", EVERY_ROW)
def test_every_row_is_computed_and_the_log_says_why(name, tmp_path, caplog):
    """A warning where the user can change it, which says how."""
    given, reason, change = EVERY_ROW[name]
    options = {key: value() if key in ("model", "peft_config") else value for key, value in given.items()}
    cls = options.pop("trainer", HybridGRPOTrainer)
    if cls is OwnLoss:
        rollouts.CONFIGS[OwnLoss] = HybridGRPOConfig
    caplog.set_level(logging.INFO, "hf_hybrid")
    trainer = train(cls, tmp_path, 1.0, max_steps=2, **options)
    found = trainer.hybrid_summary()
    assert found["rows_skipped"] == found["backward_passes_avoided_exactly"] == 0
    assert reason in found["every_row_because"] and found["failed_savings"] == []
    (said,) = [record for record in caplog.records if reason in record.message]
    assert said.levelname == ("WARNING" if change else "INFO")
    assert change is None or f"To leave them out, {change}" in said.message


# Dropout. Rows are left out: each draws its own masks.


@pytest.mark.parametrize(
    "options",
    [
        {"model": lambda: policy(attention_dropout=0.1)},
        {"peft_config": lambda: lora(lora_dropout=0.1)},
        {"model": lambda: drawing(lambda ids, hidden: dropout(hidden, 0.1)), "num_iterations": 2},
    ],
    ids=["attention", "adapter", "function"],
)
def test_under_dropout_rows_are_left_out_and_prompts_draw_once(options, tmp_path, caplog):
    caplog.set_level(logging.INFO, "hf_hybrid")
    options = {key: value() if callable(value) else value for key, value in options.items()}
    found = train(HybridGRPOTrainer, tmp_path, 0.7, max_steps=3, share_rows="auto", **options).hybrid_summary()
    assert found["rows_skipped"] > 0 and found["backward_passes_avoided_exactly"] > 0
    assert found["log_probs_skipped"] > 0 or "num_iterations" not in options
    assert found["every_row_because"] is None and found["failed_savings"] == []
    assert found["tokens_padding"] > 0 and found["tokens_shared"] > found["rows"]  # more than the last token of each
    assert found["prompt_tokens_shared"] > 0 and found["plain_rollouts_because"] is None
    assert found["dropout_drawn_once"] and len([r for r in caplog.records if "once for its rows" in r.message]) == 1


@pytest.mark.parametrize("theirs, ours", KINDS, ids=["grpo", "rloo"])
def test_a_token_with_a_mask_of_its_own_counts_as_in_trl(theirs, ours, tmp_path):
    """
    What is drawn here is not used, and the generator is set back, so that both sample the same completions. The mask of
    a token follows from it.
    """

    def mask(ids, hidden):
        with torch.random.fork_rng(devices=[]):
            torch.rand_like(hidden)
        return hidden * ((torch.arange(hidden.shape[2]) + ids[..., None]) % 5 != 0) / 0.8

    options = {"num_iterations": 2, "loss_type": "bnpo"} if theirs is GRPOTrainer else {"num_iterations": 2}
    theirs, ours = (train(cls, tmp_path, 0.7, model=drawing(mask), **options) for cls in (theirs, ours))
    check_equal(theirs, ours, 0.7)
    found = ours.hybrid_summary()
    assert found["prompt_tokens_shared"] > 0 and found["plain_rollouts_because"] is None


def test_dropout_with_every_row_gives_the_same_bits_as_trl(tmp_path):
    theirs, ours = (
        train(cls, tmp_path, 0.7, max_steps=3, model=policy(attention_dropout=0.1), **options)
        for cls, options in ((GRPOTrainer, {}), (HybridGRPOTrainer, {"exact_skips": "off", "rollouts": "off"}))
    )
    assert_same_weights(weights(theirs.model), weights(ours.model))


@pytest.mark.parametrize("draws", [False, True])
def test_generators_are_left_as_by_trl(draws, tmp_path):
    """Also where the rows of the first batch are compared, and metrics of rows that were left out are measured."""

    def trained(kind, **options):
        # Ten numbers per pass, which the first batch of ten tokens shows as one for each token.
        model = drawing(lambda ids, hidden: hidden + 0 * torch.rand(2, 5).sum()) if draws else policy()
        share = 0.0 if draws else 0.7  # with fewer rows there are fewer passes
        train(kind, tmp_path, share, model=model, max_steps=3, num_iterations=2, **options)
        return RandomStates.now(torch.device("cpu"))

    assert trained(GRPOTrainer).same_as(trained(HybridGRPOTrainer, share_rows="auto"))


@pytest.mark.falls_back
def test_where_it_cannot_be_found_what_is_drawn_the_run_is_that_of_trl(tmp_path, caplog):
    def refuse(module, args, inputs):
        if inputs["input_ids"].shape == (2, 5) and "labels" not in inputs:
            raise IndexError("too short")

    def trained(kind, **options):
        model = policy()
        model.register_forward_pre_hook(refuse, with_kwargs=True)
        return train(kind, tmp_path, 0.7, max_steps=2, model=model, **options)

    theirs, ours = trained(GRPOTrainer), trained(HybridGRPOTrainer, share_rows="auto")
    assert_same_weights(weights(theirs.model), weights(ours.model))
    found = ours.hybrid_summary()
    (why,) = found["failed_savings"]
    assert "IndexError: too short" in why and found["every_row_because"] == why
    assert found["rows_skipped"] == found["prompt_tokens_shared"] == found["tokens_shared"] == 0
    said = [record.message for record in caplog.records if record.levelname == "WARNING" and why in record.message]
    assert len(said) == 2 and all("Please report this" in message for message in said)  # rows that share, and those


def test_off_computes_every_row_without_a_word(tmp_path, caplog):
    trainer = train(HybridGRPOTrainer, tmp_path, 1.0, max_steps=2, exact_skips="off")
    assert trainer.hybrid_summary()["rows_skipped"] == 0
    assert not [record for record in caplog.records if "row" in record.message]


# Resume.


@pytest.mark.parametrize("stop", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_resume_in_the_middle_of_a_generation_batch(stop, tmp_path):
    whole = train(HybridGRPOTrainer, tmp_path / "whole", 0.5, **MIDDLE)
    train(HybridGRPOTrainer, tmp_path / "cut", 0.5, callbacks=[Stop(stop)], **MIDDLE)
    resumed = fitted(build(HybridGRPOTrainer, tmp_path / "cut", 0.5, **MIDDLE), resume=True)
    assert_same_weights(weights(whole.model), weights(resumed.model))
    assert history(whole)[:-1] == history(resumed)[:-1]
    counts = ("rows", "rows_skipped", "backward_passes_avoided_exactly")
    assert [whole.hybrid_summary()[key] for key in counts] == [resumed.hybrid_summary()[key] for key in counts]


def test_resume_in_a_later_epoch(tmp_path):
    options = {
        "save_strategy": "steps",
        "save_steps": 3,
        "gradient_accumulation_steps": 4,
        "per_device_train_batch_size": 32,
    }
    whole = train(HybridGRPOTrainer, tmp_path / "whole", 0.9, **{**options, "max_steps": 4})
    train(HybridGRPOTrainer, tmp_path / "cut", 0.9, callbacks=[Stop(3)], **{**options, "max_steps": 4})
    resumed = fitted(build(HybridGRPOTrainer, tmp_path / "cut", 0.9, **{**options, "max_steps": 4}), resume=True)
    assert whole.state.epoch >= 2
    assert_same_weights(weights(whole.model), weights(resumed.model))


def test_save_inside_a_step(tmp_path):
    class Save(TrainerCallback):
        trainer = None

        def on_substep_end(self, args, state, control, **kwargs):
            if state.global_step == 2 and self.trainer is not None:
                self.trainer._save_checkpoint(self.trainer.model, trial=None)
                control.should_training_stop = True

    # Where a callback sees micro-batches they stay as TRL makes them, in all three.
    whole = train(HybridGRPOTrainer, tmp_path / "whole", 0.5, callbacks=[Save()], **{**MIDDLE, "save_strategy": "no"})
    save = Save()
    cut = build(HybridGRPOTrainer, tmp_path / "cut", 0.5, callbacks=[save], **{**MIDDLE, "save_strategy": "no"})
    save.trainer = cut
    cut.train()
    resumed = build(HybridGRPOTrainer, tmp_path / "cut", 0.5, callbacks=[Save()], **{**MIDDLE, "save_strategy": "no"})
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8
    assert_same_weights(weights(whole.model), weights(resumed.model))


def test_checkpoint_of_trl_is_taken_with_a_warning(tmp_path, caplog):
    train(GRPOTrainer, tmp_path, 0.5, callbacks=[Stop(3)], **MIDDLE)
    resumed = fitted(build(HybridGRPOTrainer, tmp_path, 0.5, **MIDDLE), resume=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == 8
    assert any("completions are generated anew" in record.message for record in caplog.records)


RIG = Path(__file__).parents[1] / "rig" / "rollouts.py"
DDP = Path(__file__).parents[2] / "examples" / "accelerate_configs" / "ddp_cpu.yaml"
TWO = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(DDP), "--main_process_port", "0")


def child(trainer: str, folder: Path, *launcher: str, **options) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    command = [*(launcher or (sys.executable,)), str(RIG), trainer, str(folder), json.dumps(options)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))


@pytest.mark.processes
@pytest.mark.slow
def test_killed_in_the_middle_of_a_generation_batch(tmp_path):
    """Killed at the first checkpoint that is not at the begin of a generation batch, and again later."""
    options = {**MIDDLE, "share": 0.5, "max_steps": 16, "save_steps": 1}
    whole = fitted(build(HybridGRPOTrainer, tmp_path / "whole", **options))
    kills = 0
    for step in (3, 6, 9):
        process = child("HybridGRPOTrainer", tmp_path / "killed", **options)
        while (
            process.poll() is None
            and not (tmp_path / "killed" / f"checkpoint-{step}" / "hybrid_manifest.json").exists()
        ):
            time.sleep(0.005)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills == 3
    assert child("HybridGRPOTrainer", tmp_path / "killed", **options).wait() == 0
    found = torch.load(tmp_path / "killed" / "weights.pt")
    assert largest_difference(found, weights(whole.model)) <= 1e-7
    counts = json.loads((tmp_path / "killed" / "summary.json").read_text())
    assert counts["rows"] == 16 * 8 and counts["rows_decoded_saved"] > 0 and counts["log_probs_skipped"] > 0
    assert {name: whole.hybrid_summary()[name] for name in rollouts.COUNTS} == {
        name: counts[name] for name in rollouts.COUNTS
    }


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "grpo"])
@pytest.mark.parametrize("share", [0.7, 1.0])
def test_two_processes(loss_type, share, tmp_path):
    """Processes with different numbers of rows exchange gradients and metrics as TRL's do."""
    options = {"share": share, "loss_type": loss_type, "num_iterations": 2, "gradient_accumulation_steps": 4}
    for name in ("GRPOTrainer", "HybridGRPOTrainer"):
        assert child(name, tmp_path / name, *TWO, **options).wait(timeout=300) == 0
    first, second = (torch.load(tmp_path / name / "weights.pt") for name in ("GRPOTrainer", "HybridGRPOTrainer"))
    assert largest_difference(first, second) <= 1e-7
    found = json.loads((tmp_path / "HybridGRPOTrainer" / "summary.json").read_text())
    assert found["processes"] == 2 and found["rows_skipped"] > 0
    assert found["log_probs_skipped"] > 0 and found["prompt_tokens_shared"] > 0


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("vllm", [None, "colocate", "server"])
@pytest.mark.parametrize("trainers", ["GRPO", "RLOO"])
def test_two_processes_with_everything_on(trainers, vllm, tmp_path):
    options = {"share": 0.5, "num_iterations": 2, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 8}
    if vllm:
        options |= {"use_vllm": True, "vllm_mode": vllm}
    for name in (f"{trainers}Trainer", f"Hybrid{trainers}Trainer"):
        shared = {"share_rows": "auto"} if name.startswith("Hybrid") else {}
        assert child(name, tmp_path / name, *TWO, **options, **shared).wait(timeout=300) == 0
    first, second = (torch.load(tmp_path / name / "weights.pt") for name in (f"{trainers}Trainer", name))
    assert largest_difference(first, second) <= 1e-6
    found = json.loads((tmp_path / name / "summary.json").read_text())
    of_generation = ("rows_decoded", "rows_decoded_saved", "prompt_tokens_shared")
    assert all((found[key] > 0) is not (vllm is not None and key in of_generation) for key in rollouts.COUNTS)


@pytest.mark.processes
@pytest.mark.slow
def test_two_processes_resume_in_the_middle_of_a_generation_batch(tmp_path):
    """Each process has completions of its own."""
    assert child("HybridGRPOTrainer", tmp_path, *TWO, share=0.5, **MIDDLE).wait(timeout=300) == 0
    whole = torch.load(tmp_path / "weights.pt")
    for folder in set(tmp_path.glob("checkpoint-*")) - {tmp_path / "checkpoint-3"}:
        shutil.rmtree(folder)
    assert len(list(tmp_path.glob("checkpoint-3/hybrid_state*.safetensors"))) == 2
    assert child("HybridGRPOTrainer", tmp_path, *TWO, share=0.5, **MIDDLE).wait(timeout=300) == 0
    assert_same_weights(whole, torch.load(tmp_path / "weights.pt"))


# What is refused.

REFUSED = {
    "leaps": ({"enable_predict": True}, "`enable_predict=True` does not work here"),
    "a gain": ({"leap_gain": 2.0}, "`leap_gain=2.0` does not work"),
    "a preset": ({"preset": "aggressive"}, "`preset=aggressive` does not work"),
    "rescue": ({"auto_lr": "on"}, "`auto_lr=on` does not work"),
    "phases": ({"predict_states": "host"}, "`predict_states` follows the phases"),
    "divergence": ({"divergence_threshold": 3.0}, "`divergence_threshold=3.0` does not work"),
    "chunks": ({"chunked_loss": "on"}, "`chunked_loss=on` changes the head of the model"),
    "a word": ({"exact_skips": "on"}, "`exact_skips` must be one of auto, off"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_config_refuses(name, tmp_path):
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        HybridGRPOConfig(str(tmp_path), use_cpu=True, **options)


def test_what_needs_no_leaps_is_taken(tmp_path):
    options = {"async_save": False, "profile_memory": True, "forecast": False, "guard_warn_at": 0.5, "auto_lr": "off"}
    for config in (HybridGRPOConfig, HybridRLOOConfig):
        made = config(str(tmp_path), use_cpu=True, **options)
        assert {name: getattr(made, name) for name in options} == options


@pytest.mark.parametrize("trainer", [HybridGRPOTrainer, HybridRLOOTrainer])
def test_saves_wait_and_memory_is_profiled_if_asked(trainer, tmp_path, caplog):
    caplog.set_level(logging.INFO, "hf_hybrid")
    train(trainer, tmp_path, 0.7, async_save=False, profile_memory=True, save_strategy="steps", save_steps=1)
    assert "Checkpoints are written before training goes on: `async_save=False`" in caplog.text
    assert (tmp_path / "profile" / "steps.jsonl").stat().st_size > 0


def test_every_group_of_options_is_taken_or_refused():
    """A new group has to be looked at: whether its options work where completions are generated."""
    works = ("Exact skips", "Memory", "Running out of memory", "Checkpoints", "Forecast", "Samples", "Memory profile")
    beside = {"enable_predict", "preset", "muon_momentum"}
    known = {option.name for option in dataclasses.fields(HybridArguments)}
    assert known == {*options_of(*works), *_OF_LEAPS, *beside}


@pytest.mark.parametrize("name", ["probe_dataset", "direction"])
def test_what_is_for_leaps_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match=f"`{name}` is for leaps"):
        HybridGRPOTrainer(tiny_model(), None, HybridGRPOConfig(str(tmp_path), use_cpu=True), **{name: object()})


def test_other_configs(tmp_path):
    with pytest.raises(TypeError, match="Make it a `HybridGRPOConfig`"):
        HybridGRPOTrainer(tiny_model(), None, HybridConfig(str(tmp_path), use_cpu=True))
    values = vars(build(GRPOTrainer, tmp_path).args)
    plain = build(HybridGRPOTrainer, tmp_path)
    assert not plain.hybrid_args.enable_predict and values["learning_rate"] == plain.args.learning_rate


def test_muon_works(tmp_path):
    trainer = train(HybridGRPOTrainer, tmp_path, 0.7, max_steps=2, optim="muon", optim_args=None, learning_rate=1e-2)
    assert type(trainer.optimizer.optimizer).__name__ == "MuonAdamW"
    assert trainer.hybrid_summary()["rows_skipped"] > 0


@pytest.mark.parametrize("where, why", [
    ("update", "Tried in this run: split micro-batches"),
    ("completions", "not generated twice. Lower `per_device_train_batch_size`"),
])  # fmt: skip
def test_out_of_memory_that_nothing_helps_against(where, why, tmp_path, monkeypatch):
    trainer = build(HybridGRPOTrainer, tmp_path, 0.0)

    silu = torch.nn.functional.silu

    def full(*given, **more):
        if where == "update" and not torch.is_grad_enabled():
            return silu(*given, **more)
        raise torch.OutOfMemoryError("full")

    place = (torch.nn.functional, "silu") if where == "update" else (trainer.model, "generate")
    monkeypatch.setattr(*place, full)
    with pytest.raises(UnrecoveredMemoryError, match=why):
        trainer.train()


def test_what_is_used_of_trl_is_there(tmp_path):
    """CONTRIBUTING.md lists it: read TRL's new code before this test is changed."""
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Hooks of TRL")[1]
    named = re.findall(r"`(_\w+)`", "".join(re.findall(r"^\| ([^|]+) \|", text.split("\n## ")[0], re.M)))
    theirs = build(GRPOTrainer, tmp_path)
    assert len(named) == 11 and all(hasattr(theirs, name) for name in named)
    taken = {name: list(inspect.signature(getattr(theirs, name)).parameters) for name in named[:2]}
    assert taken == {
        "_prepare_inputs": ["generation_batch"],
        "_compute_loss": ["model", "inputs"],
    }
    assert next(iter(inspect.signature(getattr(theirs, named[2])).parameters)) == "model"
    assert next(iter(inspect.signature(theirs._generate_single_turn).parameters)) == "prompt_ids"
