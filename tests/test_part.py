"""`hf_hybrid/part.py`: parts are called in order, and their state is saved."""

import json
import re

import pytest
from conftest import ByteText, hybrid_config, tiny_model
from rig.trainers import build, train

from hf_hybrid import HybridTrainer, Part, part
from hf_hybrid.part import Phase


def test_parts_are_called_in_order_and_keep_their_state(tmp_path):
    calls = []

    class Counts(Part):
        def __init__(self, name):
            self.name, self.count = name, 0

        def on_phase_change(self, old, new):
            calls.append((self.name, "change", old, new))

        def before_forward(self, phase):
            self.count += 1
            calls.append((self.name, "before", phase))

        def after_backward(self, phase):
            calls.append((self.name, "after", phase))

        def before_probe(self):
            calls.append((self.name, "probe"))

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = self.restored = state["count"]

    first, second = Counts("first"), Counts("second")
    config = hybrid_config(tmp_path, save_strategy="steps", save_steps=10)
    HybridTrainer(tiny_model(), config, train_dataset=ByteText(400), parts=[first, second]).train()
    index = calls.index(("first", "before", Phase.WARMUP))
    assert [c[:2] for c in calls[index : index + 4]] == [
        ("first", "before"), ("second", "before"), ("second", "after"), ("first", "after")
    ]  # fmt: skip
    changes = [call[2:] for call in calls if call[:2] == ("first", "change")]
    assert changes[0] == (Phase.WARMUP, Phase.FULL) and all(a != b for a, b in changes)
    assert ("first", "probe") in calls and not any(Phase.PREDICT in call for call in calls if call[1] == "before")
    resumed = Counts("first")
    train(tmp_path / "resumed", parts=[resumed], resume=str(tmp_path / "checkpoint-10"), max_steps=10)
    state = json.loads((tmp_path / "checkpoint-10" / "hybrid_state.json").read_text())
    assert resumed.restored == state["parts"]["first"]["count"] > 0


def test_a_part_that_has_the_name_of_one_of_the_packages_is_refused(tmp_path):
    class Monitor(Part):
        name = "monitor"

    trainer = build(tmp_path, samples=40, parts=[Monitor()])
    with pytest.raises(ValueError, match="Two parts are named `monitor`. Give each its own `name`"):
        trainer.train()


def test_the_table_has_every_hook_and_there_are_few():
    hooks = {name for name, value in vars(Part).items() if callable(value) and not name.startswith("_")}
    rows = [row.split("|")[1] for row in part.__doc__.splitlines() if row.startswith("| `")]
    listed = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(listed) == sorted(hooks) and len(hooks) <= 23
