"""Bad input is refused at construction with a way out; bad luck in training is survived. Never NaN in a checkpoint."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from conftest import ByteText, assert_same_weights, config_values, hybrid_config, tiny_model, weights
from datasets import Dataset as HubDataset
from datasets import IterableDataset as HubIterableDataset
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from transformers.training_args import OptimizerNames

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.checkpoint import VALUES_NAME, load_hybrid_state, save_hybrid_state
from hf_hybrid.leaps.divergence import DivergenceMonitor, Level, TrainingDivergedError
from hf_hybrid.leaps.trajectory import Trajectory


class Poisoned(tiny_model().__class__):
    """A model whose loss is poisoned in chosen forward passes of training."""

    poison: dict = {}
    calls = 0

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if self.training:
            self.calls += 1
            output.loss = output.loss * self.poison.get(self.calls, 1.0)
        return output


def poisoned(poison):
    model = Poisoned(tiny_model().config)
    model.load_state_dict(tiny_model().state_dict())
    model.poison = poison
    return model


def finite(model):
    return all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("call", [2, 12, 25])
def test_a_nan_batch_is_skipped(tmp_path, call):
    trainer = HybridTrainer(
        poisoned({call: math.nan}),
        hybrid_config(tmp_path, max_steps=40, remove_unused_columns=False),
        train_dataset=ByteText(400),
    )
    trainer.train()
    summary = trainer.hybrid_summary()
    assert finite(trainer.model) and summary["skipped_batches"] == 1
    (event,) = [e for e in summary["divergence_events"] if "not finite" in e["reason"]]
    assert (event["level"], event["action"]) == ("critical", "skip_batch")
    last = [e["loss"] for e in trainer.state.log_history if "loss" in e][-1]
    assert last < 5.0


@pytest.mark.parametrize("factor, clip", [(1e6, 0.0), (math.inf, 1.0)])
def test_a_poisoned_gradient_does_not_reach_weights_or_optimizer(tmp_path, factor, clip):
    config = hybrid_config(tmp_path, max_steps=50, max_grad_norm=clip, remove_unused_columns=False)
    trainer = HybridTrainer(poisoned({33: factor}), config, train_dataset=ByteText(400))
    trainer.train()
    summary = trainer.hybrid_summary()
    assert finite(trainer.model) and summary["skipped_batches"] == 1
    largest = max(s["exp_avg_sq"].max().item() for s in trainer.optimizer.state_dict()["state"].values())
    assert largest < 10.0


def test_endless_nan_aborts_and_names_the_last_good_checkpoint(tmp_path):
    config = hybrid_config(
        tmp_path, max_steps=60, save_strategy="steps", save_steps=10, max_bad_steps=5, remove_unused_columns=False
    )
    trainer = HybridTrainer(poisoned({call: math.nan for call in range(20, 200)}), config, train_dataset=ByteText(400))
    with pytest.raises(TrainingDivergedError, match=r"5 in a row.*last good checkpoint is `.*checkpoint-\d+`"):
        trainer.train()
    assert finite(trainer.model)
    for file in tmp_path.glob("checkpoint-*/model.safetensors"):
        assert all(torch.isfinite(t).all() for t in load_file(file).values())


def test_a_leap_into_nan_is_rolled_back(tmp_path, monkeypatch):
    """Correct is shorter than the row of bad steps that the monitor waits for: the way back must not close."""
    original, before = Trajectory.leap, []

    def leap(trajectory, gain):
        original(trajectory, gain)
        if trajectory.clock.steps_seen > 20 and not before:
            before.extend(saved.clone() for saved in trajectory.snapshot)
            trajectory.parameters[0].data.fill_(math.nan)

    restored, rolled = [], Trajectory.roll_back

    def roll_back(trajectory):
        rolled(trajectory)
        restored.append([p.detach().clone() for p in trajectory.parameters])

    monkeypatch.setattr(Trajectory, "leap", leap)
    monkeypatch.setattr(Trajectory, "roll_back", roll_back)
    trainer = HybridTrainer(
        tiny_model(), hybrid_config(tmp_path, max_steps=50, probe_budget=0.0), train_dataset=ByteText(400)
    )
    trainer.train()
    assert before and finite(trainer.model)
    assert any(all(torch.equal(a, b) for a, b in zip(before, state)) for state in restored)
    assert "rolled_back" in trainer.hybrid_summary()["leaps_by_verdict"]


def test_nan_weights_are_never_saved(tmp_path):
    config = hybrid_config(tmp_path, save_strategy="steps", save_steps=2)
    trainer = HybridTrainer(tiny_model(), config, train_dataset=ByteText(400))
    original = trainer.training_step

    def training_step(*args, **kwargs):
        if trainer.state.global_step == 3:  # in Warmup: no leap to roll back
            next(trainer.model.parameters()).data.fill_(math.nan)
        return original(*args, **kwargs)

    trainer.training_step = training_step
    with pytest.raises(TrainingDivergedError, match="checkpoint-2"):
        trainer.train()
    assert not (tmp_path / "checkpoint-4").exists()


@pytest.mark.parametrize("version, said", [(None, "missing"), (99, "`99`")])
def test_hybrid_state_of_another_version_is_refused(tmp_path, version, said):
    save_hybrid_state(tmp_path, {"a": torch.ones(2)}, {"engine": {}})
    tensors, values = load_hybrid_state(tmp_path)
    assert torch.equal(tensors["a"], torch.ones(2)) and values == {"engine": {}}
    written = json.loads((tmp_path / VALUES_NAME).read_text())
    changed = {**written, "schema_version": version} if version else {"engine": written["engine"]}
    (tmp_path / VALUES_NAME).write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=f"another version of hf_hybrid: its `schema_version` is {said}.*reads `2`"):
        load_hybrid_state(tmp_path)


@pytest.mark.parametrize("samples", [1, 3])
def test_a_data_set_too_small_to_split_is_refused(tmp_path, samples):
    with pytest.raises(ValueError, match=rf"`train_dataset` has {samples} sample.*Pass `probe_dataset=`"):
        HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=ByteText(samples))


def test_one_sample_trains_with_a_probe_set_of_the_users(tmp_path):
    trainer = HybridTrainer(
        tiny_model(), hybrid_config(tmp_path), train_dataset=ByteText(1), probe_dataset=ByteText(4, offset=9)
    )
    before = weights(trainer.model)
    trainer.train()
    assert finite(trainer.model) and any(not torch.equal(before[n], p) for n, p in weights(trainer.model).items())


def test_a_missing_training_set_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`train_dataset` is missing"):
        HybridTrainer(tiny_model(), hybrid_config(tmp_path))


def test_a_probe_set_of_one_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="`probe_dataset` has 1 sample"):
        HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=ByteText(40), probe_dataset=ByteText(1))


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_very_short_runs_train(tmp_path, steps):
    args = HybridConfig(**config_values(tmp_path, max_steps=steps))
    trainer = HybridTrainer(tiny_model(), args, train_dataset=ByteText(100))
    before = weights(trainer.model)
    trainer.train()
    assert trainer.hybrid_summary()["steps"] == steps
    assert any(not torch.equal(before[name], p) for name, p in weights(trainer.model).items())


class Stream(IterableDataset):
    def __iter__(self):
        data = ByteText(300)
        return (data[i] for i in range(len(data)))


def test_a_stream_without_length_needs_a_probe_set(tmp_path):
    with pytest.raises(ValueError, match="`Stream` without a length.*Pass `probe_dataset=`"):
        HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=Stream())
    trainer = HybridTrainer(
        tiny_model(), hybrid_config(tmp_path), train_dataset=Stream(), probe_dataset=ByteText(16, offset=500)
    )
    trainer.train()
    assert trainer.hybrid_summary()["predicted_steps"] > 0


def test_a_stream_of_the_datasets_library_is_split(tmp_path):
    data = ByteText(300)
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in data.blocks]
    stream = HubIterableDataset.from_generator(lambda: iter(rows))
    trainer = HybridTrainer(tiny_model(), hybrid_config(tmp_path, probe_samples=8), train_dataset=stream)
    trainer.train()
    assert len(list(trainer.probe_dataset)) == 8
    assert next(iter(trainer.train_dataset))["input_ids"] == rows[8]["input_ids"]
    assert trainer.hybrid_summary()["predicted_steps"] > 0


def test_held_out_sequences_are_not_trained_on(tmp_path):
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in ByteText(200).blocks]
    trainer = HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=HubDataset.from_list(rows))
    held = {json.dumps(row["input_ids"]) for row in trainer.probe_dataset}
    trained = {json.dumps(row["input_ids"]) for row in trainer.train_dataset}
    assert len(trainer.probe_dataset) == 10 and len(trainer.train_dataset) == 190
    assert not held & trained


def test_a_frozen_model_is_refused(tmp_path):
    model = tiny_model()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="`model` has no trainable parameters"):
        HybridTrainer(model, hybrid_config(tmp_path), train_dataset=ByteText(100))


def test_partly_frozen_models_leap_with_what_is_trainable(tmp_path):
    model = tiny_model()
    model.model.layers[0].requires_grad_(False)
    frozen = {name: p.clone() for name, p in model.model.layers[0].named_parameters()}
    trainer = HybridTrainer(model, hybrid_config(tmp_path), train_dataset=ByteText(400))
    trainer.train()
    assert trainer.hybrid_summary()["leaps"]
    assert all(torch.equal(frozen[name], p) for name, p in trainer.model.model.layers[0].named_parameters())


def test_adapters_leap_and_the_base_stays(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    base = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    trainer = HybridTrainer(model, hybrid_config(tmp_path), train_dataset=ByteText(400))
    trainer.train()
    assert trainer.hybrid_summary()["predicted_steps"] > 0
    now = dict(trainer.model.named_parameters())
    assert all(torch.equal(value, now[name]) for name, value in base.items())


# Optimizers. docs/how_it_works.md says which are tested; what it says is the list of tests.

DOCS = Path(__file__).parent.parent / "docs"
ROW = re.compile(r"^\| (?P<names>.*`) \| (?P<standing>tested|accepted, not tested|refused) \|", re.M)
_, SECTION, *_ = re.split(r"^### (?=Optimizers$)", (DOCS / "how_it_works.md").read_text(encoding="utf-8"), flags=re.M)
TABLE = [
    (name, row["standing"])
    for row in ROW.finditer(SECTION.partition("\n### ")[0])
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
    rate = 0.1 if optim == "sgd" else 1e-3
    config = hybrid_config(tmp_path, optim=optim, max_steps=12, learning_rate=rate, **leaps)
    trainer = HybridTrainer(model, config, train_dataset=ByteText(400))
    trainer.train()
    summary, losses = trainer.hybrid_summary(), [e["loss"] for e in trainer.state.log_history if "loss" in e]
    assert finite(trainer.model) and losses[-1] < losses[0]
    assert summary["predicted_steps"] > 0 and any(leap["relative_norm"] > 0 for leap in summary["leaps"])
    types = {v.dtype for state in trainer.optimizer.state.values() for v in state.values() if torch.is_tensor(v)}
    assert (torch.uint8 in types) == optim.endswith("8bit")


@pytest.mark.parametrize("optim, standing", TABLE)
def test_optimizers_are_accepted_and_refused_as_the_table_says(tmp_path, optim, standing):
    if optim not in ("muon", *(name.value for name in OptimizerNames)):
        pytest.skip("of another version of transformers")
    if standing == "refused":
        with pytest.raises(ValueError, match=f"`optim={optim}`"):
            HybridConfig(**config_values(tmp_path, optim=optim))
    else:
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


class TwoSets(torch.optim.SGD):
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
        (lambda p: Wrapped(WrappedTwoSets(torch.optim.SGD(p, lr=0.1))), "WrappedTwoSets"),
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


def test_an_optimizer_with_two_sets_of_weights_trains_without_leaps(tmp_path):
    model = tiny_model(num_hidden_layers=1)
    config = hybrid_config(tmp_path, max_steps=1, enable_predict=False)
    optimizers = (TwoSets(model.parameters(), lr=0.1), None)
    HybridTrainer(model, config, train_dataset=ByteText(40), optimizers=optimizers).train()
    assert finite(model)


def test_an_optimizer_inside_two_wrappers_trains_leaps_and_resumes_as_without(tmp_path):
    """SGD, as its rule is known by its class."""

    def train(folder, wrap, resume=None):
        model = tiny_model(num_hidden_layers=1)
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        config = hybrid_config(folder, max_steps=14, save_strategy="steps", save_steps=9)
        trainer = HybridTrainer(model, config, train_dataset=ByteText(400), optimizers=(optimizer, None))
        trainer.train(resume_from_checkpoint=resume)
        return weights(model), [(leap["step"], leap["relative_norm"]) for leap in trainer.hybrid_summary()["leaps"]]

    expected, leaps = train(tmp_path / "plain", lambda optimizer: optimizer)
    found, same_leaps = train(tmp_path / "wrapped", lambda optimizer: Wrapped(Wrapped(optimizer)))
    assert leaps and same_leaps == leaps
    assert_same_weights(found, expected)
    checkpoint = str(tmp_path / "wrapped" / "checkpoint-9")
    assert_same_weights(train(tmp_path / "resumed", lambda o: Wrapped(Wrapped(o)), resume=checkpoint)[0], expected)


def test_bf16_weights(tmp_path):
    trainer = HybridTrainer(tiny_model().bfloat16(), hybrid_config(tmp_path), train_dataset=ByteText(400))
    trainer.train()
    assert trainer.hybrid_summary()["leaps"] and finite(trainer.model)


def test_train_can_be_called_again(tmp_path):
    trainer = HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=ByteText(400))
    trainer.train()
    trainer.train()
    assert trainer.hybrid_summary()["steps"] == 30


def test_a_model_init_is_trained(tmp_path):
    trainer = HybridTrainer(args=hybrid_config(tmp_path), model_init=lambda: tiny_model(), train_dataset=ByteText(400))
    trainer.train()
    assert trainer.hybrid_summary()["predicted_steps"] > 0


def test_a_lasting_rise_of_the_loss_keeps_leaps_away(tmp_path, train_set, monkeypatch):
    """Whatever the leaps of a direction do, a run that gets worse goes on without leaps that nobody looks at."""
    rises = iter([(Level.NORMAL, "")] * 20 + [(Level.WARNING, "risen")] * 2)
    monkeypatch.setattr(DivergenceMonitor, "_rise", lambda monitor: next(rises, (Level.NORMAL, "")))
    config = hybrid_config(tmp_path, max_steps=60, probe_budget=0.0, leap_budget=100.0)
    trainer = HybridTrainer(tiny_model(), config, train_dataset=train_set)
    trainer.train()
    summary = trainer.hybrid_summary()
    events = [event for event in summary["divergence_events"] if event["reason"] == "risen"]
    assert [event["action"] for event in events] == ["back_off"] * 2
    made = [leap["step"] for leap in summary["leaps"]]
    assert any(step < events[0]["step"] for step in made)
    assert not any(step > events[-1]["step"] for step in made), "with no budget for a look there is none after that"
