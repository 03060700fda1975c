"""
GRPO and RLOO with vLLM: the weights of TRL's trainers from the same completions, with every saving of the update on.

vLLM is a stand-in (tests/rig/vllm_stand_in.py), which TRL's own code asks.
"""

import itertools

import pytest
from conftest import assert_same_weights, mostly_slow, weights

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

from peft import LoraConfig  # noqa: E402
from rig import rollouts, vllm_stand_in  # noqa: E402
from rig.rollouts import WITH_GAME, WITH_TOOLS, Game, build, distance, policy  # noqa: E402
from rig.trainers import fitted  # noqa: E402
from trl import GRPOTrainer, RLOOTrainer  # noqa: E402

from hf_hybrid import HybridGRPOTrainer, HybridRLOOTrainer  # noqa: E402
from hf_hybrid.trl.groups import MEAN_OF_LOSS  # noqa: E402

GRPO, RLOO = (GRPOTrainer, HybridGRPOTrainer), (RLOOTrainer, HybridRLOOTrainer)
SHARED = {HybridGRPOTrainer: {"share_rows": "auto"}, HybridRLOOTrainer: {"share_rows": "auto"}}
"""Options of our trainers; `build` turns it off."""
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
WAYS = {
    "colocate": {},
    "asleep": {"vllm_enable_sleep_mode": True},
    "server": {"vllm_mode": "server"},
}
DIVISIONS = {
    "one generation per step": {},
    "two iterations": {"num_iterations": 2},
    "two steps per generation": {"steps_per_generation": 4},
    "across windows": {"steps_per_generation": 3, "num_iterations": 2, "gradient_accumulation_steps": 4},
}


def train(kind, folder, share=0.5, resume=None, **options):
    """Train with vLLM. Return the trainer and the engine that sampled."""
    with vllm_stand_in.installed(policy):
        trainer = fitted(build(kind, folder / kind.__name__, share, use_vllm=True, **options), resume=resume)
    (engine,) = vllm_stand_in.LLM.made
    return trainer, engine


def test_layers_are_streamed_while_vllm_samples(tmp_path):
    """The engine gets the weights that lie on the host, after updates that are put off."""
    streamed = {"memory": "stream", "resident_layers": 0}
    (theirs, their_engine), (ours, engine) = (
        train(kind, tmp_path, **options) for kind, options in zip(GRPO, ({}, streamed))
    )
    assert ours.memory.streams and engine.synchronised == their_engine.synchronised > 1
    assert distance(weights(theirs.model), weights(ours.model)) <= 1e-6
    assert distance(engine.loaded, their_engine.loaded) <= 1e-6


def check(kinds, folder, share=0.5, *, skips=("rows_skipped",), agent=dict, **options):
    """
    Train TRL's trainer and ours, with shared rows. Return both trainers and our engine.

    `agent` returns further options, of each trainer its own.
    """
    (theirs, their_engine), (ours, engine) = (
        train(kind, folder, share, **options, **agent(), **SHARED.get(kind, {})) for kind in kinds
    )
    assert engine.prompts == their_engine.prompts and engine.synchronised == their_engine.synchronised > 1
    assert distance(weights(theirs.model), weights(ours.model)) <= 1e-6
    assert distance(engine.loaded, their_engine.loaded) <= 1e-6
    assert distance(engine.loaded, dict(policy().named_parameters())) > 1e-3
    summary = ours.hybrid_summary()
    assert all(summary[key] > 0 for key in (*skips, "tokens_shared")), summary
    assert summary["every_row_because"] is summary["plain_rows_because"] is None
    return theirs, ours, engine


LOSSES = [
    (loss, mode, division)
    for loss in sorted(MEAN_OF_LOSS)
    for mode in MODES
    for division in DIVISIONS
    if loss != "vespo" or mode.startswith("token")  # TRL refuses the others
]


@pytest.mark.parametrize(
    ("loss_type", "mode", "division"),
    mostly_slow(
        LOSSES,
        [
            ("vespo", "token_truncate", "two iterations"),
            ("bnpo", "token_mask", "across windows"),
        ],
    ),
)
def test_every_loss(loss_type, mode, division, tmp_path):
    options = {"loss_type": loss_type, "vllm_importance_sampling_mode": mode, **DIVISIONS[division]}
    check(GRPO, tmp_path, skips=("rows_skipped", "log_probs_skipped"), **options)


@pytest.mark.parametrize(
    ("kinds", "way"),
    mostly_slow(
        [(kinds, way) for kinds in (GRPO, RLOO) for way in WAYS],
        [(GRPO, "asleep"), (RLOO, "colocate")],
    ),
)
def test_every_way(kinds, way, tmp_path):
    skips = ("rows_skipped", "log_probs_skipped", "backward_passes_avoided_exactly")
    _, ours, engine = check(kinds, tmp_path, 0.7, skips=skips, mask_truncated_completions=True, **WAYS[way])
    assert (engine.sleeps > 1) is (way == "asleep")
    because = ours.hybrid_summary()["plain_rollouts_because"]
    assert because == "`use_vllm=True` has an engine of its own"


SETTINGS = {
    "adapters": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), "learning_rate": 1.0},
    "sequence ratios": {"importance_sampling_level": "sequence", "loss_type": "luspo"},
    "off-policy mask": {"off_policy_mask_threshold": 0.05, "num_iterations": 2},
    "two-sided clipping": {"delta": 1.1, "num_iterations": 2},
    "both limits": {"vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.2},
    "temperature": {"temperature": 0.7},
    "padded": {"pad_to_multiple_of": 8},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 3, "num_generations_eval": 2},
    "not corrected": {"vllm_importance_sampling_correction": False},
    "not corrected, twice": {"vllm_importance_sampling_correction": False, "num_iterations": 2},
}


@pytest.mark.parametrize("setting", mostly_slow(SETTINGS, ["adapters", "not corrected"]))
def test_settings(setting, tmp_path):
    compared = setting != "not corrected"
    check(GRPO, tmp_path, skips=("rows_skipped", *(("log_probs_skipped",) if compared else ())), **SETTINGS[setting])


@pytest.mark.parametrize("setting", mostly_slow(["adapters", "temperature"], ["adapters"]))
def test_settings_of_rloo(setting, tmp_path):
    check(RLOO, tmp_path, skips=("rows_skipped", "log_probs_skipped"), **SETTINGS[setting])


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [GRPO, RLOO], ids=["grpo", "rloo"])
def test_distance_from_the_reference(kinds, tmp_path):
    """Every row counts, and prompts are shared in all three passes."""
    options = {**SETTINGS["adapters"], "beta": 0.1}
    theirs, ours = (train(kind, tmp_path, **options, **SHARED.get(kind, {}))[0] for kind in kinds)
    assert distance(weights(theirs.model), weights(ours.model)) <= 1e-6
    assert ours.hybrid_summary()["tokens_shared"] > 0


# The metrics of the difference between vLLM and the training pass.


def test_metrics_of_the_difference(tmp_path):
    """Of the rows that are computed, where TRL has all. The stand-in is wrong by 0.24 in the mean."""
    theirs, ours, _ = check(GRPO, tmp_path, 0.7, max_steps=6)
    name = "sampling/sampling_logp_difference/"
    pairs = [
        (one, other) for one, other in zip(theirs.state.log_history, ours.state.log_history) if name + "mean" in one
    ]
    assert len(pairs) == 6
    computed = [other for _, other in pairs if other["frac_reward_zero_std"] < 1]
    assert len(computed) > 2 and all(0.15 < entry[name + "mean"] < 0.35 for entry in computed)
    assert all(other[name + "max"] <= one[name + "max"] for one, other in pairs)
    alike = [(one, other) for one, other in pairs if one["frac_reward_zero_std"] == 0]
    sampling = [key for key in pairs[0][0] if key.startswith("sampling/")]
    assert alike and len(sampling) == 5
    for one, other in alike:
        assert [other[key] for key in sampling] == pytest.approx([one[key] for key in sampling], rel=1e-5)


def test_all_rows_without_advantage(tmp_path):
    trainer, _ = train(HybridGRPOTrainer, tmp_path, 1.0, max_steps=4)
    found = trainer.hybrid_summary()
    assert found["log_probs_skipped"] == found["rows"] == 4 * 8
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["loss"] == 0.0 and all(value == value for value in entry.values()) for entry in entries)
    assert {entry["sampling/sampling_logp_difference/max"] for entry in entries} == {0.0}
    assert {entry["sampling/importance_sampling_ratio/mean"] for entry in entries} == {1.0}
    assert all(batch["old_per_token_logps"].isfinite().all() for batch in trainer.generated)


# Resume.


def test_resume_in_the_middle_of_a_generation_batch(tmp_path):
    """Completions and ratios come from the checkpoint. The next ones need the weights of that time."""
    options = {"steps_per_generation": 4, "num_iterations": 2, "save_strategy": "steps", "save_steps": 3}
    whole, _ = train(HybridGRPOTrainer, tmp_path, max_steps=4, **options)
    checkpoint = str(tmp_path / "HybridGRPOTrainer" / "checkpoint-3")
    resumed, engine = train(HybridGRPOTrainer, tmp_path / "short", resume=checkpoint, max_steps=4, **options)
    assert_same_weights(weights(whole.model), weights(resumed.model))
    assert engine.synchronised == 0 and not engine.prompts
    _, engine = train(HybridGRPOTrainer, tmp_path / "long", resume=checkpoint, max_steps=5, **options)
    assert engine.synchronised == 1 and len(engine.prompts) == 16
    assert_same_weights(weights(whole.model), engine.loaded)


# Equal rewards.


@pytest.mark.parametrize("way", mostly_slow(WAYS, ["server"]))
def test_equal_rewards_teach_nothing(way, tmp_path, monkeypatch):
    """Eight times 0.1 have a mean in fp32 that is not 0.1, and TRL trains on the difference."""
    monkeypatch.setattr(rollouts, "reward", lambda completions, **_: [0.1] * len(completions))
    options = {"num_generations": 8, "per_device_train_batch_size": 8, "optim": "adamw_torch", "optim_args": None}
    options |= {"weight_decay": 0.0, "max_steps": 4, **WAYS[way]}
    theirs, ours = (train(kind, tmp_path, **options)[0] for kind in GRPO)
    assert distance(weights(policy()), weights(theirs.model)) > 1e-3
    assert distance(weights(policy()), weights(ours.model)) == 0.0
    found = ours.hybrid_summary()
    assert found["rows_of_rounding"] == found["log_probs_skipped"] == found["rows"] == 4 * 2 * 8


# Agents.


class Turns:
    """
    A `rollout_func`: the first turn and the answer to it are the same in all rows of a prompt, and the engine goes on.
    """

    first, answer = [40, 50, 60, 70], [80, 81]

    def __init__(self):
        self.rows = []

    def __call__(self, prompts, trainer):
        ids = [rollouts.TOKENIZER(prompt)["input_ids"] for prompt in prompts]
        turns = [prompt + self.first + self.answer for prompt in ids]
        _, ends, log_probs, _ = trainer.vllm_generation.generate(turns, None, trainer.num_generations)
        self.rows += [turn + end for turn, end in zip(turns, ends)]
        begin = len(self.first + self.answer)
        return {
            "prompt_ids": ids,
            "completion_ids": [self.first + self.answer + end for end in ends],
            "logprobs": [[-4.0] * begin + [value for (value,) in row] for row in log_probs],
            "env_mask": [[1] * len(self.first) + [0] * len(self.answer) + [1] * len(end) for end in ends],
            "score": [float(len(end)) for end in ends],
        }


def scored(prompts, score, **_):
    return [1.0 if "easy" in prompt else value for prompt, value in zip(prompts, score)]


class Quiz(Game):
    """An environment that has the data as well, two questions in each generation batch."""

    asked = itertools.count()

    def reset(self, **_):
        question = "easy" if next(self.asked) // 4 % 2 else "hard"
        super().reset(question)
        return question


def several_games():
    def data(share):
        return WITH_GAME["data"](share).map(lambda row, place: {"environment": "ab"[place % 2]}, with_indices=True)

    return {"environment_factory": {"a": Game, "b": Game}, "data": data}


AGENTS = {
    "tools": lambda: WITH_TOOLS,
    "environment": lambda: WITH_GAME,
    "environments": several_games,
    "environment with the data": lambda: {
        "environment_factory": type("Quiz", (Quiz,), {"asked": itertools.count()}),
        "data": lambda _: None,
    },
    "rollout": lambda: {"rollout_func": Turns(), "reward_funcs": scored},
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("agent", "way", "options"),
    mostly_slow(
        [
            (agent, way, options)
            for agent in AGENTS
            for way in WAYS
            for options in ({"loss_type": "dapo", "num_iterations": 2}, {"loss_type": "bnpo"}, {"loss_type": "grpo"})
        ],
        [
            ("tools", "server", {"loss_type": "bnpo"}),
            ("environment", "colocate", {"loss_type": "dapo", "num_iterations": 2}),
        ],
    ),
)
def test_agents(agent, way, options, tmp_path):
    """Tokens of tools and environments are in the rows and not in the loss."""
    options = {"max_steps": 4, "max_completion_length": 40, **options, **WAYS[way]}
    theirs, ours, _ = check(GRPO, tmp_path, skips=("rows_skipped", "log_probs_skipped"), agent=AGENTS[agent], **options)
    masks = [batch["tool_mask"] for batch in ours.generated]
    assert any(mask.eq(0).any() for mask in masks)
    assert [entry["reward"] for entry in theirs.state.log_history if "reward" in entry] == [
        entry["reward"] for entry in ours.state.log_history if "reward" in entry
    ]


@pytest.mark.parametrize(
    "agent", mostly_slow(["environment", "environments", "environment with the data"], ["environment with the data"])
)
def test_agents_without_vllm(agent, tmp_path):
    options = {"max_steps": 4, "max_completion_length": 40, "num_iterations": 2}
    trained = []
    for kind in GRPO:
        trained.append(build(kind, tmp_path / kind.__name__, **options, **AGENTS[agent](), **SHARED.get(kind, {})))
        trained[-1].train()
    theirs, ours = trained
    assert distance(weights(theirs.model), weights(ours.model)) <= 1e-6
    found = ours.hybrid_summary()
    assert all(found[key] > 0 for key in ("rows_skipped", "log_probs_skipped", "tokens_shared", "prompt_tokens_shared"))


def test_rows_share_the_turns_that_are_alike(tmp_path):
    """All rows are computed: in each micro-batch those of one prompt, whose first turn and its answer are the same."""
    agent = Turns()
    options = {"rollout_func": agent, "reward_funcs": scored, "exact_skips": "off", "share_rows": "auto"}
    trainer, _ = train(HybridGRPOTrainer, tmp_path, max_steps=4, vllm_importance_sampling_correction=False, **options)
    assert len(agent.rows) == 4 * 8
    groups = [agent.rows[start : start + 4] for start in range(0, len(agent.rows), 4)]
    beginnings = sum(len({tuple(row[:length]) for row in rows for length in range(1, len(row) + 1)}) for rows in groups)
    repeated = sum(map(len, agent.rows)) - beginnings
    turn = len(agent.first + agent.answer)
    assert trainer.hybrid_summary()["tokens_shared"] >= repeated >= (4 - 1) * turn * len(groups)


# Continuous batching of transformers.

FEW_PAGES = {
    "transformers_continuous_batching_config": {
        "num_blocks": 32, "max_batch_tokens": 64, "max_requests_per_batch": 8,
    }
}  # fmt: skip
"""TRL's default takes most of the memory, and a CPU ten seconds for it."""


@pytest.mark.parametrize(
    ("kinds", "options"),
    mostly_slow(
        [
            (GRPO, {"num_iterations": 2}),
            (GRPO, {"loss_type": "bnpo"}),
            (GRPO, {**SETTINGS["adapters"], "steps_per_generation": 4}),
            (GRPO, {**WITH_TOOLS, "max_completion_length": 40}),
            (RLOO, {}),
        ],
        [(GRPO, {"num_iterations": 2})],
    ),
)
def test_continuous_batching(kinds, options, tmp_path):
    """TRL's samples completions from the same random numbers in both trainers."""
    options |= {"max_steps": 4, "use_transformers_continuous_batching": True}
    trained, lengths = [], []
    for kind in kinds:
        trained.append(build(kind, tmp_path / kind.__name__, 0.7, **FEW_PAGES, **options, **SHARED.get(kind, {})))
        trained[-1].train()
        history = trained[-1].state.log_history
        lengths.append([entry["completions/mean_length"] for entry in history if "num_tokens" in entry])
    theirs, ours = trained
    assert lengths[0] == lengths[1]
    assert distance(weights(theirs.model), weights(ours.model)) <= 1e-6
    found = ours.hybrid_summary()
    assert 0 < found["rows_skipped"] < found["rows"] and found["tokens_shared"] > 0
    assert found["plain_rollouts_because"].startswith("`use_transformers_continuous_batching=True`")
