"""GRPO and RLOO with images: rows that count nothing are left out with their images, and weights stay TRL's."""

import itertools
from types import SimpleNamespace

import pytest
from conftest import config_values, mostly_slow, weights

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

from rig import vision  # noqa: E402
from rig.trainers import fitted  # noqa: E402
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: E402

from hf_hybrid import HybridGRPOConfig, HybridGRPOTrainer, HybridRLOOConfig, HybridRLOOTrainer  # noqa: E402

COPIES = 4
CLASSES = {
    "grpo": ((GRPOTrainer, GRPOConfig), (HybridGRPOTrainer, HybridGRPOConfig)),
    "rloo": ((RLOOTrainer, RLOOConfig), (HybridRLOOTrainer, HybridRLOOConfig)),
}


def reward(completions):
    """Every second prompt of a generation has equal rewards."""
    values = [sum(map(ord, str(completion))) % 7 / 7 for completion in completions]
    return [0.1 if row // COPIES % 2 else value for row, value in enumerate(values)]


def trained(trainer, config, name, folder, rows=None, **options):
    """Train; the result has the trainer, the completions of its generations, and how often images were encoded."""
    model, processor = vision.vision_model(name)
    rows = vision.prompts(several=name in vision.SEVERAL) if rows is None else rows
    values = {"gradient_accumulation_steps": 4, "max_steps": 3, "optim": "sgd", "learning_rate": 0.05, "bf16": False}
    values |= {"max_grad_norm": 0.0, "num_generations": COPIES, "max_completion_length": 8, "beta": 0.0}
    args = config(**config_values(folder, **{**values, **options}))
    sampled = []

    def rewarding(completions, completion_ids, **_):
        sampled.append(completion_ids)
        return reward(completions)

    made = trainer(model, rewarding, args, train_dataset=rows, processing_class=processor)
    return SimpleNamespace(trainer=fitted(made), completions=sampled)


def both(name, folder, kind="grpo", ours=None, **options):
    """Train with TRL and here, where options are `ours` too."""
    plain, hybrid = CLASSES[kind]
    theirs = trained(*plain, name, folder / "plain", **options)
    return theirs, trained(*hybrid, name, folder / "ours", **{**options, **(ours or {})})


def assert_same(theirs, ours):
    assert theirs.completions == ours.completions
    before, after = weights(theirs.trainer.model), weights(ours.trainer.model)
    assert max((before[name] - after[name]).abs().max().item() for name in before) < 1e-6


DIVISIONS = {
    "one step": {},
    "several steps": {"num_iterations": 2},
    "means of tokens": {"loss_type": "bnpo", "steps_per_generation": 8, "per_device_train_batch_size": 2},
}
OF_ROWS = [
    *itertools.product(vision.KINDS, ["grpo"], DIVISIONS),
    *((name, "rloo", "one step") for name in vision.KINDS),
]
QUICK = [
    *((name, "grpo", "one step") for name in ("qwen2_vl", "idefics3", "llava_next", "gemma3")),
    ("smolvlm", "grpo", "several steps"), ("qwen3_vl", "rloo", "one step"), ("llava", "grpo", "means of tokens"),
]  # fmt: skip


@pytest.mark.parametrize("name, kind, division", mostly_slow(OF_ROWS, QUICK))
def test_rows_without_advantage_are_left_out_with_their_images(name, kind, division, tmp_path):
    ours = {"rollouts": "off"}
    theirs, here = both(name, tmp_path, kind, ours, **DIVISIONS[division])
    assert_same(theirs, here)
    summary = here.trainer.hybrid_summary()
    assert summary["every_row_because"] is None and summary["rows_skipped"] >= summary["rows"] / 4
    assert (summary["log_probs_skipped"] > 0) == (division != "one step" or kind == "rloo")
