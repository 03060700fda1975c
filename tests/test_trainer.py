"""`hf_hybrid/trainer.py`: what it takes, what it counts and logs, and the metrics it returns."""

import inspect
import json

import pytest
import torch
from conftest import ByteText, assert_same_weights, config_values, finite, hybrid_config, tiny_model, weights
from rig.trainers import build, train
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.part import Phase

# What is counted and logged.


def test_default_options_reach_every_phase_in_100_steps(tmp_path):
    args = HybridConfig(**config_values(tmp_path, max_steps=100))
    trainer = HybridTrainer(tiny_model(), args, train_dataset=ByteText(600))
    trainer.train()
    summary = trainer.hybrid_summary()
    assert all(summary["steps_by_phase"][phase.value] > 0 for phase in Phase), summary["steps_by_phase"]
    assert summary["steps"] == trainer.state.global_step == 100
    assert summary["backward_passes"] == summary["real_steps"] < 100


def test_summary_counts_what_happened(tmp_path, monkeypatch):
    backward = []
    forward = []
    model = tiny_model()
    model.register_forward_hook(lambda m, *_: forward.append(torch.is_grad_enabled()))
    # Whether blocks of text begin alike, so that a first batch is compared, differs between versions of Python.
    trainer = build(tmp_path, model=model, gradient_accumulation_steps=2, share_rows="off")
    original = trainer.accelerator.backward
    monkeypatch.setattr(trainer.accelerator, "backward", lambda *a, **k: backward.append(1) or original(*a, **k))
    trainer.train()
    summary = trainer.hybrid_summary()
    assert summary["backward_passes"] == len(backward) == 2 * summary["real_steps"]
    assert summary["backward_passes_avoided"] == 2 * summary["predicted_steps"] > 0
    assert forward.count(True) == len(backward)
    assert summary["forward_only_passes"] == forward.count(False) > 0
    assert summary["steps"] == 30 == sum(summary["steps_by_phase"].values())
    assert set(summary["seconds_by_phase"]) == {phase.value for phase in Phase}
    written = json.loads((tmp_path / "hybrid_summary.json").read_text())
    assert written == json.loads(json.dumps(summary))
    keys = {"step", "horizon", "gain", "loss_before", "loss_after", "standard_error", "verdict", "e"}
    assert summary["leaps"] and all(keys <= set(leap) for leap in summary["leaps"])
    assert sum(leap["horizon"] for leap in summary["leaps"]) == summary["predicted_steps"]


def test_predicted_steps_take_no_data(tmp_path):
    seen = []

    class Counting(ByteText):
        def __getitem__(self, index):
            seen.append(index)
            return super().__getitem__(index)

    trainer = train(tmp_path, train_dataset=Counting(400), probe_dataset=ByteText(16, offset=500))
    summary = trainer.hybrid_summary()
    # accelerate fetches one batch ahead
    assert len(seen) <= 4 * (summary["real_steps"] + 1) < 4 * 30


def test_tokens_and_flops_are_counted_for_real_steps_only(tmp_path, caplog):
    trainer = train(tmp_path, include_num_input_tokens_seen="all")
    real = trainer.hybrid_summary()["real_steps"]
    assert real < 30
    assert trainer.state.num_input_tokens_seen == trainer.run.speed.tokens == real * 4 * 32
    assert trainer.state.total_flos == 6 * real * 4 * 32 * trainer.model.num_parameters(exclude_embeddings=True)
    assert "Tried to track" not in caplog.text


def test_logged_losses_are_those_of_real_steps(tmp_path):
    seen = []
    trainer = build(tmp_path, logging_steps=4)
    original = trainer.training_step

    def training_step(*args, **kwargs):
        loss = original(*args, **kwargs)
        seen.append((trainer.run.phase, loss.item()))
        return loss

    trainer.training_step = training_step
    output = trainer.train()
    logged = [(e["step"], e["loss"]) for e in trainer.state.log_history if "loss" in e]
    assert logged
    for step, loss in logged:
        window = [value for phase, value in seen[step - 4 : step] if phase is not Phase.PREDICT]
        assert loss == pytest.approx(sum(window) / len(window), rel=1e-4)
    real = [value for phase, value in seen if phase is not Phase.PREDICT]
    assert output.training_loss == pytest.approx(sum(real) / len(real), rel=1e-4)
    entry = next(e for e in trainer.state.log_history if "loss" in e)
    assert all(isinstance(entry[key], (int, float)) for key in entry)
    assert {"hybrid/phase", "hybrid/backward_passes", "hybrid/leaps", "hybrid/credit"} <= set(entry)


def test_the_schedule_goes_on_through_predicted_steps(tmp_path):
    rates = {}

    class Rates(TrainerCallback):
        def on_step_begin(self, args, state, control, lr_scheduler=None, **kwargs):
            rates[state.global_step] = lr_scheduler.get_last_lr()[0]

    trainer = train(tmp_path, callbacks=[Rates])
    assert trainer.hybrid_summary()["predicted_steps"] > 0
    for step, rate in rates.items():
        assert rate == pytest.approx(3e-3 * (1 - step / 30))


# The signature, and the metrics of a run.


def test_every_parameter_of_trainer_is_there_by_name_and_place():
    theirs = inspect.signature(Trainer.__init__).parameters
    ours = inspect.signature(HybridTrainer.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs) and len(theirs) > 10
    for name, parameter in theirs.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind), name
    more = {name: parameter.kind.name for name, parameter in ours.items() if name not in theirs}
    own = dict.fromkeys(("probe_dataset", "parts", "direction", "device_map"), "KEYWORD_ONLY")
    assert more == {**own, "kwargs": "VAR_KEYWORD"}


def test_every_parameter_is_passed_on(tmp_path, monkeypatch):
    """Each argument arrives under its own name; what `Trainer` does not take is refused by it."""
    passed = {}
    mixin = HybridTrainer.__mro__[1]
    monkeypatch.setattr(mixin, "__init__", lambda self, **given: passed.update(given))
    names = [name for name in inspect.signature(HybridTrainer.__init__).parameters if name not in ("self", "kwargs")]
    HybridTrainer(**{name: object() for name in names}, later=1)
    assert list(passed) == [*names, "later"] and len({id(value) for value in passed.values()}) == len(passed)
    monkeypatch.undo()
    with pytest.raises(TypeError, match="eval_datasets"):
        HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=ByteText(100), eval_datasets=ByteText(8))


def test_metrics_of_a_run_say_what_was_saved(tmp_path):
    trainer = HybridTrainer(
        tiny_model(), hybrid_config(tmp_path, gradient_accumulation_steps=2, probe_budget=1.0),
        train_dataset=ByteText(400),
    )  # fmt: skip
    metrics, summary = trainer.train().metrics, trainer.hybrid_summary()
    for key in ("backward_passes", "backward_passes_avoided"):
        assert metrics[f"hybrid_{key}"] == summary[key] > 0
    assert metrics["hybrid_leaps"] == len(summary["leaps"]) > 0
    logged = trainer.state.log_history[-1]
    assert {key: logged[key] for key in metrics} == metrics
    assert sum("hybrid_leaps" in entry for entry in trainer.state.log_history) == 1
    trainer.log_metrics("train", metrics)  # as scripts show them
    trainer.save_metrics("train", metrics)
    assert json.loads((tmp_path / "train_results.json").read_text())["hybrid_leaps"] == metrics["hybrid_leaps"]


def test_without_leaps_the_metrics_are_those_of_trainer(tmp_path):
    values = config_values(tmp_path, max_steps=2)
    plain = Trainer(tiny_model(), TrainingArguments(**values), train_dataset=ByteText(40))
    hybrid = HybridTrainer(tiny_model(), HybridConfig(**values, enable_predict=False), train_dataset=ByteText(40))
    assert hybrid.train().metrics.keys() == plain.train().metrics.keys()


# What can be trained.


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_very_short_runs_train(tmp_path, steps):
    args = HybridConfig(**config_values(tmp_path, max_steps=steps))
    trainer = HybridTrainer(tiny_model(), args, train_dataset=ByteText(100))
    before = weights(trainer.model)
    trainer.train()
    assert trainer.hybrid_summary()["steps"] == steps
    assert any(not torch.equal(before[name], p) for name, p in weights(trainer.model).items())


def test_a_frozen_model_is_refused(tmp_path):
    model = tiny_model()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="`model` has no trainable parameters"):
        HybridTrainer(model, hybrid_config(tmp_path), train_dataset=ByteText(100))


def test_partly_frozen_models_leap_with_what_is_trainable(tmp_path):
    model = tiny_model()
    model.model.layers[0].requires_grad_(False)
    frozen = {name: p.clone() for name, p in model.model.layers[0].named_parameters()}
    trainer = train(tmp_path, model=model)
    assert trainer.hybrid_summary()["leaps"]
    assert all(torch.equal(frozen[name], p) for name, p in trainer.model.model.layers[0].named_parameters())


def test_bf16_weights(tmp_path):
    trainer = train(tmp_path, model=tiny_model().bfloat16())
    assert trainer.hybrid_summary()["leaps"] and finite(trainer.model)


def test_train_can_be_called_again(tmp_path):
    trainer = train(tmp_path)
    trainer.train()
    assert trainer.hybrid_summary()["steps"] == 30


def test_a_model_init_is_trained(tmp_path):
    trainer = HybridTrainer(args=hybrid_config(tmp_path), model_init=lambda: tiny_model(), train_dataset=ByteText(400))
    trainer.train()
    assert trainer.hybrid_summary()["predicted_steps"] > 0


def test_plain_training_arguments_are_accepted(tmp_path):
    args = TrainingArguments(**config_values(tmp_path, max_steps=6))
    trainer = HybridTrainer(tiny_model(), args, train_dataset=ByteText(400))
    trainer.train()
    assert trainer.hybrid_summary()["steps"] == 6


def test_a_step_of_the_users_own_that_does_not_call_the_packages(tmp_path):
    """It would train in skipped steps. So there are none, and phases are told of its loss."""

    class OwnStep(HybridTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
            return loss.detach()

    def config(folder, **values):
        return HybridConfig(**config_values(folder, **values))

    own = train(tmp_path / "own", OwnStep, config, max_steps=40, share_rows="off")
    plain = train(tmp_path / "plain", HybridTrainer, config, max_steps=40, share_rows="off", leap_gain=0)
    assert "OwnStep.training_step` does not name" in own.hybrid_summary()["no_leaps"]
    assert own.hybrid_summary()["predicted_steps"] == 0
    assert_same_weights(weights(plain.model), weights(own.model))
