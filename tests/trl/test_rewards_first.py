"""Rewards before log-probabilities: the weights of TRL's trainers, with log-probabilities only of rows that count."""

import asyncio
import copy

import pytest
import torch
from conftest import assert_same_weights, weights

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

from rig.rollouts import build, distance, reward  # noqa: E402
from rig.trainers import fitted  # noqa: E402
from trl import GRPOTrainer, RLOOTrainer  # noqa: E402

from hf_hybrid import HybridGRPOTrainer, HybridRLOOTrainer  # noqa: E402
from hf_hybrid.trl.groups import Sampled  # noqa: E402

NEEDED = {"steps_per_generation": 4}
"""Makes TRL compute log-probabilities before the update: a generation batch is trained on in two steps."""


class Asked:
    """Reward functions that note what they are asked."""

    def __init__(self):
        self.calls = []
        self.functions = [self.plain, self.later]

    def _note(self, name, found, trainer_state=None, log_extra=None, log_metric=None, **kwargs):
        log_metric(name, float(len(self.calls)))
        self.calls.append((name, torch.is_grad_enabled(), trainer_state.global_step, copy.deepcopy(kwargs), found))
        return found

    def plain(self, prompts, completions, **kwargs):
        return self._note(
            "plain", reward(prompts, completions), prompts=list(prompts), completions=list(completions), **kwargs
        )

    async def later(self, prompts, completions, **kwargs):
        await asyncio.sleep(0)
        rewards = [None if prompt.startswith("easy") else float("1" in prompt) for prompt in prompts]
        return self._note("later", rewards, prompts=list(prompts), completions=list(completions), **kwargs)


def data(share):
    from rig.rollouts import prompts

    return prompts(share).map(lambda row: {"length": len(row["prompt"])})


@pytest.mark.parametrize(
    ("theirs", "ours"), [(GRPOTrainer, HybridGRPOTrainer), (RLOOTrainer, HybridRLOOTrainer)], ids=["grpo", "rloo"]
)
def test_functions_are_asked_once_and_what_trl_asks(theirs, ours, tmp_path):
    """Several of them, one asynchronous, with columns of the data, the trainer's state, and gradients on as in TRL."""
    asked = [Asked(), Asked()]
    trained = []
    for kind, functions in zip((theirs, ours), asked):
        options = {"reward_funcs": functions.functions, "data": data, "reward_weights": [1.0, 0.5], "max_steps": 4}
        trained.append(fitted(build(kind, tmp_path / kind.__name__, 0.6, logging_steps=1, **options, **NEEDED)))
    assert asked[0].calls == asked[1].calls and len(asked[0].calls) == 2 * 2
    assert {"completion_ids", "length"} <= asked[0].calls[0][3].keys()
    assert distance(*(weights(trainer.model) for trainer in trained)) <= 1e-6
    assert trained[1].hybrid_summary()["log_probs_skipped"] > 0
    metrics = [[entry.get("plain") for entry in trainer.state.log_history] for trainer in trained]
    assert metrics[0] == metrics[1]


def test_rows_in_the_pass_before_the_update(tmp_path):
    """Of 16 rows in two generation batches, those of the hard prompts whose rewards differ."""
    seen = []
    trainer = build(HybridGRPOTrainer, tmp_path, 0.5, max_steps=4, **NEEDED)
    trainer.model.register_forward_pre_hook(
        lambda model, args, kwargs: (
            seen.append(len(kwargs["input_ids"])) if "labels" in kwargs and not torch.is_grad_enabled() else None
        ),
        with_kwargs=True,
    )
    trainer.train()
    found = trainer.hybrid_summary()
    assert sum(seen) == 2 * 16 - found["log_probs_skipped"] and 8 <= found["log_probs_skipped"] < 32


@pytest.mark.parametrize(
    "options",
    [{"equal_rewards": "trl"}, {"exact_skips": "off"}, {"multi_objective_aggregation": "normalize_then_sum"}],
    ids=lambda options: next(iter(options)),
)
def test_where_the_values_of_all_rows_are_read(options, tmp_path):
    trainer = fitted(build(HybridGRPOTrainer, tmp_path, 1.0, max_steps=2, **options, **NEEDED))
    assert trainer.hybrid_summary()["log_probs_skipped"] == 0


class Reads(HybridGRPOTrainer):
    """A subclass that may read anything of a generation batch."""

    def _generate_and_score_completions(self, inputs):
        return super()._generate_and_score_completions(inputs)


def test_a_subclass_that_sees_the_batch_gets_all_values(tmp_path):
    from rig import rollouts

    rollouts.CONFIGS[Reads] = rollouts.CONFIGS[HybridGRPOTrainer]
    trainer = fitted(build(Reads, tmp_path, 1.0, max_steps=2, **NEEDED))
    assert trainer.hybrid_summary()["log_probs_skipped"] == 0 < trainer.hybrid_summary()["rows_skipped"]


def test_counts_go_on_after_a_resume(tmp_path):
    options = {**NEEDED, "save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    whole = fitted(build(HybridGRPOTrainer, tmp_path, 0.7, **options))
    resumed = build(HybridGRPOTrainer, tmp_path / "resumed", 0.7, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same_weights(weights(whole.model), weights(resumed.model))
    assert whole.hybrid_summary()["log_probs_skipped"] == resumed.hybrid_summary()["log_probs_skipped"] > 0


def test_fields_of_a_rollout_function_reach_the_rewards():
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]
    Sampled([], [], [], [], extra={"score": [1, 2], "same": "x"}).extend(rows)
    assert rows == [{"prompt": "a", "score": 1, "same": "x"}, {"prompt": "b", "score": 2, "same": "x"}, {
        "prompt": "c", "same": "x"}]  # fmt: skip
