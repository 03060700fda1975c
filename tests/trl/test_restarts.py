"""A run that ends in the middle of a generation batch goes on at the same bits, with calls of user's code counted."""

import functools
import random

import numpy
import pytest
import torch
from conftest import assert_same_weights, weights

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

from datasets import Dataset  # noqa: E402
from rig import own_generators  # noqa: E402
from rig.own_generators import drawn  # noqa: E402
from rig.rollouts import MIDDLE, Stop, build, conversations, policy, reward  # noqa: E402
from rig.trainers import fitted  # noqa: E402
from trl import GRPOTrainer  # noqa: E402

from hf_hybrid import HybridDPOConfig, HybridDPOTrainer, HybridGRPOTrainer  # noqa: E402
from hf_hybrid.run.generators import held_by  # noqa: E402
from hf_hybrid.trl.rewards import CheckedReward  # noqa: E402

CLOCKS = ("step_time", "runtime", "per_second", "train_loss")
COUNTS = ("rows", "rows_skipped", "backward_passes_avoided_exactly", "log_probs_skipped", "rows_decoded")


def log_of(trainer) -> list[dict]:
    return [
        {name: value for name, value in entry.items() if not any(word in name for word in CLOCKS)}
        for entry in trainer.state.log_history
        if "train_runtime" not in entry
    ]


class Asked:
    """A reward function that remembers for what it was asked, and raises an error at a call."""

    __name__ = "asked"

    def __init__(self, fails_at: int | None = None, error: BaseException | None = None):
        self.prompts, self.steps, self.fails_at, self.error = [], [], fails_at, error

    def __call__(self, prompts, completions, trainer_state, log_metric, log_extra, **_):
        self.prompts.append(list(prompts))
        self.steps.append(trainer_state.global_step)
        log_metric("fails", float(len(self.prompts) == self.fails_at))
        log_extra("length", [numpy.int64(len(completion)) for completion in completions])
        if len(self.prompts) == self.fails_at:
            raise self.error
        return reward(prompts, completions)


def same_run(first, second) -> None:
    assert_same_weights(weights(first.model), weights(second.model))
    assert log_of(first) == log_of(second)
    assert [first.hybrid_summary()[name] for name in COUNTS] == [second.hybrid_summary()[name] for name in COUNTS]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the service is down")], ids=["ctrl-c", "error"])
def test_a_trainer_that_was_interrupted_goes_on(error, tmp_path):
    """In the same process: nothing is left of the batch under way, or of what a reward function logged for it."""
    options = {**MIDDLE, "save_steps": 1, "log_completions": True}
    whole = fitted(build(HybridGRPOTrainer, tmp_path / "whole", reward_funcs=Asked(), **options))
    trainer = build(HybridGRPOTrainer, tmp_path / "cut", reward_funcs=Asked(2, error), **options)
    with pytest.raises(type(error)):
        trainer.train()
    trainer.train(resume_from_checkpoint=True)
    same_run(whole, trainer)
    tables = [sorted((tmp_path / name).glob("completions/*")) for name in ("whole", "cut")]
    assert [path.read_bytes() for path in tables[0]] == [path.read_bytes() for path in tables[1]]
    assert [len(call) for call in trainer.reward_funcs[0].prompts] == [16] * 3  # the last one was asked for twice
    assert trainer.reward_funcs[0].prompts[1] == trainer.reward_funcs[0].prompts[2]


def test_a_trainer_that_begins_anew_generates(tmp_path):
    """Completions of the run that was interrupted belong to other prompts."""
    asked = Asked(2, KeyboardInterrupt())
    trainer = build(HybridGRPOTrainer, tmp_path, reward_funcs=asked, **{**MIDDLE, "save_strategy": "no"})
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer._step += 3  # as if it had been in the middle
    trainer.train()
    assert asked.prompts[2:] == asked.prompts[:2] and asked.steps == [0, 4, 0, 4]


def test_where_nothing_is_learnt_a_resumed_run_leaves_out_as_many_rows(tmp_path):
    """It computes no row to find out which parameters get gradients: the checkpoint says so."""
    whole = fitted(build(HybridGRPOTrainer, tmp_path / "whole", 1.0, **MIDDLE))
    fitted(build(HybridGRPOTrainer, tmp_path / "cut", 1.0, callbacks=[Stop(3)], **MIDDLE))
    resumed = fitted(build(HybridGRPOTrainer, tmp_path / "cut", 1.0, **MIDDLE), resume=True)
    same_run(whole, resumed)
    assert resumed.hybrid_summary()["rows_skipped"] == resumed.hybrid_summary()["rows"] - 1


@pytest.mark.falls_back
def test_behind_a_checkpoint_of_trl_the_next_prompts_come_when_they_would(tmp_path):
    """Its completions are lost. Their prompts are completed again for the rest of their steps."""
    asked, again = Asked(), Asked()
    fitted(build(GRPOTrainer, tmp_path, callbacks=[Stop(6)], reward_funcs=asked, **MIDDLE))
    fitted(build(HybridGRPOTrainer, tmp_path, reward_funcs=again, **MIDDLE), resume=str(tmp_path / "checkpoint-3"))
    assert again.prompts == asked.prompts and asked.steps == [0, 4] and again.steps == [3, 4]


class Unwilling(Asked):
    """Its state is for somebody else."""

    def __getstate__(self):
        raise TypeError("a connection cannot be pickled")

    def __setstate__(self, state):
        raise AssertionError


class Twisted(Unwilling):
    def __getstate__(self):
        return {1: (2, 3)}  # JSON would return other ones


@pytest.mark.parametrize("kind", [Unwilling, Twisted])
def test_a_state_that_is_no_json_is_left_out_with_a_warning(kind, tmp_path, caplog):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole = fitted(build(HybridGRPOTrainer, tmp_path, reward_funcs=kind(), **options))
    said = [record.message for record in caplog.records if f"The state of `{kind.__name__}`" in record.message]
    assert len(said) == 1
    resumed = build(HybridGRPOTrainer, tmp_path, reward_funcs=kind(), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_weights(weights(whole.model), weights(resumed.model))


def test_environments_are_made_again_in_their_order(tmp_path):
    """Each has a number, and the generator of its own that its factory gives it."""
    made, asked = [], []

    class Numbered:
        def __init__(self, number):
            self.number, self.own = number, random.Random(number)

        def reset(self, **_):
            asked.append((self.number, self.own.random()))

        def look(self) -> str:
            """Look around."""
            return "nothing"

        def get_reward(self) -> float:
            return self.own.random()

    def factory():
        made.append(len(made))
        return Numbered(made[-1])

    def run(folder, resume=None, **options):
        made.clear()
        asked.clear()
        options = {**MIDDLE, "environment_factory": factory, "data": conversations, **options}
        return fitted(build(HybridGRPOTrainer, folder, **options), resume=resume), list(asked)

    whole, of_whole = run(tmp_path / "whole")
    _, of_cut = run(tmp_path / "cut", callbacks=[Stop(3)])
    resumed, of_resumed = run(tmp_path / "cut", resume=True)
    same_run(whole, resumed)
    assert of_cut + of_resumed == of_whole and len({number for number, _ in of_whole}) == 16


def test_a_state_that_the_run_has_no_more_is_named(tmp_path, caplog):
    class Judge(Asked):
        def __init__(self):
            super().__init__()
            self.own = random.Random(0)

    fitted(build(HybridGRPOTrainer, tmp_path, reward_funcs=Judge(), callbacks=[Stop(3)], **MIDDLE))
    fitted(build(HybridGRPOTrainer, tmp_path, reward_funcs=Asked(), **MIDDLE), resume=True)
    assert "The checkpoint has states of rewards.0.own, and this run has none of that name" in caplog.text


def test_a_reference_that_follows_the_model_is_in_checkpoints(tmp_path):
    """Of DPO; for GRPO and RLOO the chaos suite looks at it."""
    policy().save_pretrained(tmp_path / "base")
    rows = Dataset.from_dict({
        "prompt": [f"{number} and" for number in range(16)], "chosen": [" more"] * 16, "rejected": [" less"] * 16,
    })  # fmt: skip

    def trainer(name, **options):
        from conftest import config_values
        from rig.rollouts import TOKENIZER

        values = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "sync_ref_model": True, "bf16": False}
        values |= {"ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5, "enable_predict": False, **options}
        args = HybridDPOConfig(**config_values(tmp_path / name, **values))
        model = type(policy()).from_pretrained(tmp_path / "base")
        return HybridDPOTrainer(model, None, args, train_dataset=rows, processing_class=TOKENIZER)

    whole = fitted(trainer("whole"))
    resumed = fitted(trainer("resumed"), resume=str(tmp_path / "whole" / "checkpoint-3"))
    assert_same_weights(weights(whole.model), weights(resumed.model))
    assert_same_weights(weights(whole.ref_model), weights(resumed.ref_model))


# Generators of a user.

OWN, ARRAYS = random.Random(1), numpy.random.default_rng(0)
DRAW, NORMAL = random.Random(5).random, numpy.random.default_rng(3).normal


def helper():
    return ARRAYS.random()


def in_a_comprehension(completions, **_):
    return [OWN.random() + helper() for _ in completions]


class World:
    def __init__(self):
        self.inside = torch.Generator()


class Place:
    shared = random.Random(9)

    def __init__(self):
        self.world, self.system = World(), random.SystemRandom()

    def reset(self):
        return DRAW() + NORMAL()

    @staticmethod
    def apart():
        return (lambda: OWN.random())()


def in_a_closure():
    mine = random.Random(7)
    return functools.partial(lambda other: mine.random(), other=numpy.random.RandomState(3))


BY_NAME, TWO = {"one": random.Random(2), "world": World()}, (random.Random(4), [random.Random(6)])


def in_containers():  # one level deep
    return BY_NAME["one"].random() + TWO[0].random()


def in_other_modules():
    return own_generators.draw() + own_generators.OTHER.random() + drawn()


def test_generators_of_functions_and_objects_are_found():
    place = Place()
    of_place = [place.shared, DRAW.__self__, NORMAL.__self__, OWN, place.world.inside]
    given = in_a_closure()
    cases = [
        (in_a_comprehension, [OWN, ARRAYS]),
        (place, of_place),
        (place.reset, of_place),
        (CheckedReward("judge", in_a_comprehension), [OWN, ARRAYS]),
        (in_containers, [BY_NAME["one"], BY_NAME["world"].inside, TWO[0]]),
        (in_other_modules, [own_generators.OTHER, own_generators.ARRAYS, own_generators.INSIDE]),
        (given, [given.func.__closure__[0].cell_contents, given.keywords["other"]]),
        (torch.nn.Linear(2, 2).forward, []),
        (print, []),
        (None, []),
    ]
    for user, expected in cases:
        found = held_by({"user": user})
        assert sorted(map(id, found.values())) == sorted(map(id, expected)), found
        assert list(found) == list(held_by({"user": user}))
