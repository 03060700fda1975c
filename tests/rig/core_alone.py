"""
Train, save and resume with a copy of the package that lacks the optional rooms, for `tests/test_core_alone.py`.

    PYTHONPATH=FOLDER python tests/rig/core_alone.py FOLDER
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
# An editable installation finds the rooms in the checkout, whatever folder the package itself comes from.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]

from conftest import ByteText, assert_same_weights, hybrid_config, tiny_model, weights  # noqa: E402

import hf_hybrid  # noqa: E402
from hf_hybrid import HybridTrainer  # noqa: E402

assert hf_hybrid.__file__.startswith(sys.argv[1]), hf_hybrid.__file__


def train(folder, resume=None, **options):
    values = {"direction": "auto", "max_steps": 24, "leap_budget": 100.0, "save_strategy": "steps", "save_steps": 12}
    config = hybrid_config(f"{sys.argv[1]}/{folder}", **{**values, **options})
    trainer = HybridTrainer(tiny_model(), config, train_dataset=ByteText(200), eval_dataset=ByteText(8, offset=300))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


for name, options in {"leaps": {}, "plain": {"enable_predict": False}, "streamed": {"memory": "stream"}}.items():
    whole = train(name, **options)
    assert bool(whole.hybrid_summary()["leaps_made"]) == (name != "plain")
    resumed = train(f"{name}-again", resume=f"{sys.argv[1]}/{name}/checkpoint-12", **options)
    assert_same_weights(weights(resumed.model), weights(whole.model))
    assert whole.evaluate()["eval_loss"] == resumed.evaluate()["eval_loss"]
ASKS = {"planner": "bandit", "weight_precision": "bf16", "checkpoint_phases": "full"}
for option, value in ASKS.items():
    try:
        train("refused", direction="orthogonal", **{option: value})
    except ValueError as error:
        assert "which this installation lacks" in str(error), error
    else:
        raise AssertionError(f"{option} was not refused")
loaded = {name.split(".")[1] for name in sys.modules if name.startswith("hf_hybrid.")}
sys.stdout.write(f"rooms: {chr(32).join(sorted(loaded))}\n")
