"""Leaps under every optimizer of transformers, as the table in docs/optimizers.md says, and under wrapped ones."""

import re
from pathlib import Path

import pytest
import torch
from conftest import ByteText, assert_same_weights, config_values, finite, hybrid_config, losses, tiny_model, weights
from rig import trainers
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from hf_hybrid import HybridConfig, HybridTrainer

# What the page says is the list of tests.
DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| (?P<names>.*`) \| (?P<standing>tested|accepted, not tested|refused) \|", re.M)
_, SECTION, *_ = re.split(r"^## (?=Optimizers$)", (DOCS / "optimizers.md").read_text(encoding="utf-8"), flags=re.M)
TABLE = [
    (name, row["standing"])
    for row in ROW.finditer(SECTION.partition("\n## ")[0])
    for name in re.findall("`(\\w+)`", row["names"])
]


def test_every_optimizer_of_transformers_stands_in_one_row():
    names = [name for name, _ in TABLE]
    assert len(names) == len(set(names)) and "muon" in names
    assert {name.value for name in OptimizerNames} <= set(names)


@pytest.mark.parametrize("optim", [name for name, standing in TABLE if standing == "tested"])
def test_optimizers_that_leaps_are_tested_with(tmp_path, optim):
    model = tiny_model(num_hidden_layers=1)
    if optim.endswith("8bit"):
        pytest.importorskip("bitsandbytes")
        model = tiny_model(num_hidden_layers=1, hidden_size=64, intermediate_size=128)  # smaller ones stay in fp32
    leaps = {"leap_gain": 0.05, "leap_budget": 100.0, "leap_worth": 1.0, "probe_budget": 0.0}
    trainer = trainers.train(tmp_path, model=model, optim=optim, max_steps=12, learning_rate=1e-3, **leaps)
    summary = trainer.hybrid_summary()
    assert finite(trainer.model) and losses(trainer)[-1] < losses(trainer)[0]
    assert summary["predicted_steps"] > 0 and any(leap["relative_norm"] > 0 for leap in summary["leaps"])
    types = {v.dtype for state in trainer.optimizer.state.values() for v in state.values() if torch.is_tensor(v)}
    assert (torch.uint8 in types) == optim.endswith("8bit")


@pytest.mark.parametrize("optim, standing", TABLE)
def test_optimizers_are_accepted_and_refused_as_the_table_says(tmp_path, optim, standing):
    if optim not in ("muon", *(name.value for name in OptimizerNames)):
        pytest.skip("of another version of transformers")
    if standing == "refused":
        with pytest.raises(ValueError, match=f"`optim={optim}`"):
            HybridConfig(**config_values(tmp_path, optim=optim, direction="orthogonal"))
    else:
        assert HybridConfig(**config_values(tmp_path, optim=optim, direction="orthogonal")).optim == optim
    assert HybridConfig(**config_values(tmp_path, optim=optim)).optim == optim
    assert HybridConfig(**config_values(tmp_path, optim=optim, enable_predict=False)).optim == optim


class Wrapped(torch.optim.Optimizer):
    """Passes everything on, as wrappers do that log or clip."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)


class TwoSets(torch.optim.AdamW):
    """As Schedule-Free optimizers look from outside."""

    def train(self):
        """To the weights of training."""

    def eval(self):
        """To their average."""


class WrappedTwoSets(Wrapped):
    train, eval = TwoSets.train, TwoSets.eval


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda p: TwoSets(p, lr=0.1), "TwoSets"),
        (lambda p: Wrapped(Wrapped(TwoSets(p, lr=0.1))), "TwoSets"),
        (lambda p: Wrapped(WrappedTwoSets(torch.optim.AdamW(p, lr=0.1))), "WrappedTwoSets"),
    ],
)
def test_leaps_refuse_an_optimizer_with_two_sets_of_weights(tmp_path, make, name):
    model = tiny_model(num_hidden_layers=1)
    before = weights(model)
    optimizers = (make(model.parameters()), None)
    trainer = HybridTrainer(model, hybrid_config(tmp_path), train_dataset=ByteText(40), optimizers=optimizers)
    with pytest.raises(ValueError, match=f"`{name}` keeps two sets of weights.*`enable_predict=False`"):
        trainer.train()
    assert_same_weights(before, weights(model))


def test_an_optimizer_with_two_sets_of_weights_trains_if_nobody_asked_for_leaps(tmp_path, caplog):
    made = []
    for kind, config, leaps in (
        (HybridTrainer, hybrid_config, {"direction": "auto"}),
        (HybridTrainer, hybrid_config, {"enable_predict": False}),
        (Trainer, TrainingArguments, {}),
    ):
        model, options = tiny_model(num_hidden_layers=1), {"max_steps": 4, "learning_rate": 0.1, "samples": 40, **leaps}
        optimizers = (TwoSets(model.parameters(), lr=0.1), None)
        folder = tmp_path / str(len(made))
        made.append(trainers.train(folder, kind, config, model=model, optimizers=optimizers, **options))
    for trainer in made[:2]:
        assert_same_weights(weights(trainer.model), weights(made[2].model))
    told = [r.getMessage() for r in caplog.records if "makes no leaps" in r.getMessage()]
    assert len(told) == 1 and told[0].startswith("`TwoSets` keeps two sets of weights")
    assert "two sets" in made[0].hybrid_summary()["no_leaps"]


def test_an_optimizer_inside_two_wrappers_trains_leaps_and_resumes_as_without(tmp_path):
    def train(folder, wrap, resume=None):
        model = tiny_model(num_hidden_layers=1)
        optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
        options = {"max_steps": 14, "save_strategy": "steps", "save_steps": 9, "optimizers": (optimizer, None)}
        trainer = trainers.train(folder, model=model, resume=resume, **options)
        return weights(model), [(leap["step"], leap["relative_norm"]) for leap in trainer.hybrid_summary()["leaps"]]

    expected, leaps = train(tmp_path / "plain", lambda optimizer: optimizer)
    found, same_leaps = train(tmp_path / "wrapped", lambda optimizer: Wrapped(Wrapped(optimizer)))
    assert leaps and same_leaps == leaps
    assert_same_weights(found, expected)
    checkpoint = str(tmp_path / "wrapped" / "checkpoint-9")
    assert_same_weights(train(tmp_path / "resumed", lambda o: Wrapped(Wrapped(o)), resume=checkpoint)[0], expected)
