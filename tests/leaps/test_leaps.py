"""Leaps in whole trainings: what is written down, what moves the weights and puts them back, and how they resume."""

import copy
import math
import types

import pytest
import torch
from conftest import (
    ByteText,
    assert_same_weights,
    config_values,
    finite,
    hybrid_config,
    losses,
    mostly_slow,
    tiny_model,
    weights,
)
from peft import LoraConfig, get_peft_model
from rig import trainers
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.leaps.directions import Orthogonal
from hf_hybrid.leaps.trajectory import Trajectory
from hf_hybrid.leaps.trust import GainPlanner
from hf_hybrid.part import Phase
from hf_hybrid.run.monitor import DivergenceMonitor

SEEN = {"unprobed", "kept", "shrunk"}


def lora():
    torch.manual_seed(1)
    return get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj", "up_proj"], r=4, init_lora_weights=False))


def train(folder, model=None, **options):
    values = {"accumulation_walk": "micro_batch", "probe_budget": 0.1, "leap_budget": 100.0, "logging_steps": 12}
    probes = ByteText(16, offset=200)
    return trainers.train(folder, model=model, samples=200, probe_dataset=probes, **{**values, **options})


# The log.


def test_every_leap_tells_what_it_was_and_what_became_of_it(tmp_path):
    summary = train(tmp_path, max_steps=50).hybrid_summary()
    leaps = summary["leaps"]
    assert {leap["verdict"] for leap in leaps} >= {"unprobed", "kept"} and len(leaps) > 8
    for leap in leaps[:-1]:  # the last one may not have been judged
        probed = leap["verdict"] != "unprobed"
        assert leap["verdict"] in SEEN and leap["gain"] > 0 and 0 < leap["relative_norm"] <= 0.5 + 1e-6
        assert probed or leap["e"] is None, "without a probe nobody knows what a leap gained"
        assert (leap["probe_cost_steps"] > 0) == probed == (leap["loss_after"] is not None)
    assert sum(leap["probe_cost_steps"] for leap in leaps) == pytest.approx(summary["probe_cost_steps"])


def test_a_direction_that_is_never_ready_makes_no_leap_and_is_named_once(tmp_path, caplog):
    class Never(Orthogonal):
        ready = False

    trainer = train(tmp_path, direction=Never)
    assert trainer.hybrid_summary()["leaps_made"] == 0
    assert len([text for text in caplog.messages if "do not tell the direction how" in text]) == 1


def test_a_probed_leap_is_worth_its_fall_of_the_held_out_loss(tmp_path):
    leaps = train(tmp_path, max_steps=40, probe_budget=1.0).hybrid_summary()["leaps"]
    by_probe = [leap for leap in leaps if leap["e"] is not None]
    assert len(by_probe) > 2
    for leap in by_probe:
        slope = (leap["loss_before"] - leap["loss_after"]) / leap["e"]
        assert slope > 0, "in units of what a real step gained"


# Gains.


def test_a_planner_that_wants_no_leap_makes_none(tmp_path, monkeypatch):
    monkeypatch.setattr(GainPlanner, "gain", lambda self, progress: 0.0)
    without, plain = train(tmp_path), train(tmp_path, enable_predict=False)
    summary = without.hybrid_summary()
    assert summary["leaps"] == [] and summary["real_steps"] == 30
    assert_same_weights(weights(without.model), weights(plain.model))


# Resuming.


@pytest.mark.parametrize("options", [{"direction": "gradient_memory"}, {"memory": "stream"}])
@pytest.mark.long
def test_a_run_resumes_bit_for_bit(options, tmp_path):
    options = {"max_steps": 48, "save_strategy": "steps", "save_steps": 19, **options}
    whole = train(tmp_path / "whole", **options)
    summary = whole.hybrid_summary()
    assert losses(whole)[-1] < losses(whole)[0] - 0.5 and len(summary["leaps"]) > 5
    for step in (19, 38):
        checkpoint = str(tmp_path / "whole" / f"checkpoint-{step}")
        resumed = train(tmp_path / f"again-{step}", resume=checkpoint, **options)
        assert_same_weights(weights(resumed.model), weights(whole.model))
        assert resumed.hybrid_summary()["leaps"] == summary["leaps"]


# Wherever the weights are, and of adapters.


@pytest.mark.parametrize("build", [tiny_model, lora])
def test_leaps_are_the_same_wherever_weights_and_buffers_are(build, tmp_path):
    resident = train(tmp_path, build())
    leaps = resident.hybrid_summary()["leaps"]
    assert len(leaps) > 3 and all(leap["relative_norm"] > 0 for leap in leaps)
    streamed = train(tmp_path, build(), memory="stream")
    host = train(tmp_path, build(), plan_values={"buffers_device": "cpu"})
    assert streamed.hybrid_summary()["leaps"] == leaps
    assert_same_weights(weights(streamed.model), weights(resident.model))
    # Host buffers take in gradients one by one, with another rounding.
    assert [leap["verdict"] for leap in host.hybrid_summary()["leaps"]] == [leap["verdict"] for leap in leaps]
    expected = weights(resident.model)
    assert all(torch.allclose(weight, expected[name], atol=1e-4) for name, weight in weights(host.model).items())


# The weights: what moves them, and what puts them back.


class Recorder(TrainerCallback):
    """Weights and optimizer step counts around every step."""

    def __init__(self):
        self.before, self.after, self.counts = [], [], []

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.before.append(weights(model))

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.after.append(weights(model))
        states = optimizer.state_dict()["state"].values()
        self.counts.append(max(int(s["step"]) for s in states))


def run(folder, **options):
    """With the options of `hybrid_config`."""
    return trainers.train(folder, eval_dataset=ByteText(32, offset=800), **options)


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_every_step_does_what_its_phase_says(tmp_path):
    recorder = Recorder()
    phases = []

    class Phases(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            phases.append(trainer.run.last_phase)

    trainer = trainers.build(tmp_path, max_steps=40, callbacks=[recorder, Phases])
    trainer.train()
    summary = trainer.hybrid_summary()
    assert set(phases) == set(Phase)
    counted = 0
    for phase, before, after, count in zip(phases, recorder.before, recorder.after, recorder.counts):
        if phase is Phase.PREDICT:
            assert same(before, after)  # the leap was made before the step; the step itself costs nothing
        else:
            counted += 1
            assert not same(before, after)
        assert count == counted  # AdamW's own counter sees real steps only
    # Between two steps weights change only by a leap, and an accepted leap changes every one of them.
    kept = {leap["step"] for leap in summary["leaps"] if leap["verdict"] != "rejected"}
    moved = {i + 1 for i, (a, b) in enumerate(zip(recorder.after, recorder.before[1:])) if not same(a, b)}
    assert moved == kept and kept
    for step in kept:
        a, b = recorder.after[step - 1], recorder.before[step]
        assert all(not torch.equal(a[name], b[name]) for name in a)


def test_frozen_control_changes_nothing_in_predicted_steps(tmp_path):
    recorder = Recorder()
    trainer = run(tmp_path, callbacks=[recorder], direction="none")
    assert trainer.hybrid_summary()["predicted_steps"] > 0
    assert all(same(a, b) for a, b in zip(recorder.after, recorder.before[1:]))


def test_a_leap_is_not_clipped_by_max_grad_norm(tmp_path):
    """A clipping threshold far below any gradient leaves the size of Adam's steps, and so of leaps, as they are."""
    norms = [
        [leap["relative_norm"] for leap in run(tmp_path / str(limit), max_grad_norm=limit).hybrid_summary()["leaps"]]
        for limit in (0.0, 1e-3)
    ]
    # Adam's second moment shrinks with the clipped gradients: the leap keeps its size instead of shrinking with them.
    assert norms[0][0] > 1e-3 and norms[1][0] == pytest.approx(norms[0][0], rel=0.3)


@pytest.fixture
def restored(monkeypatch):
    """The weights after each roll-back."""
    states, rolled = [], Trajectory.roll_back

    def roll_back(trajectory):
        rolled(trajectory)
        states.append([p.detach().clone() for p in trajectory.parameters])

    monkeypatch.setattr(Trajectory, "roll_back", roll_back)
    return states


def is_among(weights, states):
    return any(all(torch.equal(a, b) for a, b in zip(weights, state)) for state in states)


def test_rejected_leaps_leave_the_weights_bit_equal(tmp_path, monkeypatch):
    original = Trajectory.leap

    def leap(trajectory, gain):  # uphill, far
        trajectory.max_relative_norm = 1e3
        return original(trajectory, -5000.0 * gain)

    monkeypatch.setattr(Trajectory, "leap", leap)
    monkeypatch.setattr(Orthogonal, "most_per_step", math.inf)
    recorder = Recorder()
    trainer = run(tmp_path, callbacks=[recorder], probe_budget=1.0)
    rejected = [leap for leap in trainer.hybrid_summary()["leaps"] if leap["verdict"] == "rejected"]
    assert len(rejected) >= 2
    for leap in rejected:
        assert leap["loss_after"] - leap["loss_before"] > 2 * leap["standard_error"]
        assert same(recorder.after[leap["step"] - 1], recorder.before[leap["step"]])
        assert leap["horizon"] == 0


@pytest.mark.long
@pytest.mark.slow
def test_leaps_at_a_rate_that_is_far_too_high_do_no_harm(tmp_path):
    """Leaps that were shortened sixteenfold used to be followed by unprobed ones of full length, which stayed."""
    above = []
    for seed in range(3):
        ends = []
        for enable_predict in (False, True):
            values = {"max_steps": 60, "learning_rate": 0.06, "seed": seed, "logging_steps": 1000, "auto_lr": "off"}
            values |= {"enable_predict": enable_predict, "direction": "orthogonal", "leap_budget": 100.0}
            data = {"train_dataset": ByteText(600), "eval_dataset": ByteText(64, offset=700)}
            trainer = trainers.train(tmp_path, config=HybridConfig, **values, **data, model_seed=seed)
            ends.append(trainer.evaluate()["eval_loss"])
        assert trainer.hybrid_summary()["leaps_made"] > 0
        above.append(ends[1] / ends[0] - 1)
    assert sum(above) / len(above) < 0.01 and max(above) < 0.03


def test_terrible_leap_that_was_not_probed_is_rolled_back(tmp_path, monkeypatch, restored):
    """Probed at first, terrible later when nobody looks: Correct sees the loss jump and goes back exactly."""
    original, at_leap = Trajectory.leap, []

    def leap(trajectory, gain):
        terrible = trajectory.clock.steps_seen > 60 and not at_leap
        if terrible:
            at_leap.extend(p.detach().clone() for p in trajectory.parameters)
        trajectory.max_relative_norm = 10.0
        return original(trajectory, -600.0 if terrible else gain)

    monkeypatch.setattr(Trajectory, "leap", leap)
    trainer = run(tmp_path, max_steps=90, probe_budget=0.0, direction="gradient_memory")
    summary = trainer.hybrid_summary()
    terrible = [leap for leap in summary["leaps"] if leap["gain"] < -100]
    assert [leap["verdict"] for leap in terrible] == ["rolled_back"]
    back = [event for event in summary["divergence_events"] if event["action"] == "roll_back"]
    assert len(back) == summary["roll_backs"] and back[-1]["step"] <= terrible[0]["step"] + 2
    assert is_among(at_leap, restored)
    assert sum(losses(trainer)[-10:]) < sum(losses(trainer)[:10]) - 5


def test_leaps_do_not_depend_on_how_a_batch_is_accumulated(tmp_path):
    """The same 8 sequences a step as 8 or 2 at a time: the same phases, leaps and verdicts, the same losses."""
    found = {}
    for size, parts in ((8, 1), (2, 4)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts, "probe_budget": 1.0}
        trainer = run(tmp_path / str(size), max_steps=40, **options)
        summary, log = trainer.hybrid_summary(), trainer.state.log_history
        assert summary["backward_passes"] == parts * summary["real_steps"]
        found[size] = (
            [entry["hybrid/phase"] for entry in log if "hybrid/phase" in entry],
            [(leap["step"], leap["horizon"], leap["verdict"]) for leap in summary["leaps"]],
            losses(trainer),
            [leap["loss_after"] for leap in summary["leaps"] if leap["loss_after"] is not None],
        )
    phases, leaps, logged, probed = found[8]
    assert set(phases) == {phase.index for phase in Phase} and len(leaps) >= 4 and probed
    assert found[2][:2] == (phases, leaps)
    assert found[2][2] == pytest.approx(logged, abs=1e-5)
    assert found[2][3] == pytest.approx(probed, abs=1e-5)


def test_a_leap_into_nan_is_rolled_back(tmp_path, monkeypatch, restored):
    """Correct is shorter than the row of bad steps that the monitor waits for: the way back must not close."""
    original, before = Trajectory.leap, []

    def leap(trajectory, gain):
        original(trajectory, gain)
        if trajectory.clock.steps_seen > 20 and not before:
            before.extend(saved.clone() for saved in trajectory.snapshot)
            trajectory.parameters[0].data.fill_(math.nan)

    monkeypatch.setattr(Trajectory, "leap", leap)
    trainer = trainers.train(tmp_path, max_steps=50, probe_budget=0.0)
    assert before and finite(trainer.model) and is_among(before, restored)
    assert "rolled_back" in trainer.hybrid_summary()["leaps_by_verdict"]


# Where nobody asks for leaps: none with adapters, none on a pretrained model.


class OfFewWords(ByteText):
    """Text of eight different words, so that a tiny model soon knows the most of it."""

    def __getitem__(self, index):
        ids = self.blocks[index] % 8
        return {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A model whose loss is below half of the logarithm of its vocabulary."""
    given = {"train_dataset": OfFewWords(200), "max_steps": 25, "learning_rate": 1e-2}
    trainer = trainers.train(tmp_path_factory.mktemp("base"), Trainer, TrainingArguments, **given)
    assert losses(trainer)[-1] < math.log(256) / 2 < losses(trainer)[0]
    return trainer.model


def without_being_asked(model, folder, resume=None, **options):
    values = {"direction": "auto", "leap_budget": 100.0, "logging_steps": 1, **options}
    return trainers.train(folder, model=copy.deepcopy(model), train_dataset=OfFewWords(200), resume=resume, **values)


@pytest.mark.parametrize("kind, why", [("pretrained", "the model is pretrained"), ("adapters", "adapters are trained")])
def test_runs_where_leaps_did_not_pay_are_plain_trainers(kind, why, pretrained, tmp_path, caplog):
    model = pretrained if kind == "pretrained" else lora()
    hybrid = without_being_asked(model, tmp_path / "hybrid", save_strategy="steps", save_steps=5)
    summary = hybrid.hybrid_summary()
    assert summary["leaps_made"] == 0 and why in summary["no_leaps"] and why in str(summary)
    assert sum(summary["buffer_bytes"].values()) == 0
    assert [why in record.getMessage() for record in caplog.records] == [True]

    given = {"model": copy.deepcopy(model), "train_dataset": OfFewWords(200)}
    plain = trainers.train(tmp_path / "plain", Trainer, TrainingArguments, **given)
    assert losses(hybrid) == losses(plain)
    assert_same_weights(weights(hybrid.model), weights(plain.model))

    resumed = without_being_asked(model, tmp_path / "resumed", resume=f"{hybrid.args.output_dir}/checkpoint-15")
    assert resumed.hybrid_summary()["leaps_made"] == 0
    assert_same_weights(weights(resumed.model), weights(plain.model))


def test_the_rescue_goes_on_without_leaps_and_without_buffers(pretrained, tmp_path):
    options = {"auto_lr": "on", "learning_rate": 1e-5}
    whole = without_being_asked(pretrained, tmp_path / "whole", save_strategy="steps", save_steps=15, **options)
    summary = whole.hybrid_summary()
    assert summary["leaps_made"] == sum(summary["buffer_bytes"].values()) == 0 and summary["learning_rate_scale"] > 1.5
    at = f"{whole.args.output_dir}/checkpoint-15"
    resumed = without_being_asked(pretrained, tmp_path / "resumed", resume=at, **options)
    assert resumed.hybrid_summary()["resumed"]["warnings"] == []
    assert_same_weights(weights(resumed.model), weights(whole.model))


def test_a_model_that_knows_little_leaps_without_being_asked_and_others_when_they_are(pretrained, tmp_path):
    runs = {"fresh": (tiny_model(), "auto"), "pretrained": (pretrained, "orthogonal"), "adapters": (lora(), "none")}
    for name, (model, direction) in runs.items():
        summary = without_being_asked(model, tmp_path / name, direction=direction, max_steps=15).hybrid_summary()
        assert summary["leaps_made"] > 0 and summary["no_leaps"] is None, name


def summary_of(model, folder, **given):
    """A run with all defaults, as far as leaps are concerned, which would have time for several."""
    options = {"direction": "auto", "leap_budget": 100.0, "max_steps": 15, **given.pop("options", {})}
    kind = given.pop("kind", HybridTrainer)
    trainer = kind(model, hybrid_config(folder, **options), train_dataset=ByteText(200), **given)
    trainer.train()
    return trainer.hybrid_summary()


@pytest.mark.parametrize(
    "optim", mostly_slow(["muon", "sgd", "rmsprop", "adafactor", "adagrad"], ["muon", "adafactor"])
)
def test_optimizers_that_leaps_were_not_measured_with_make_none(optim, tmp_path, caplog):
    summary = summary_of(tiny_model(), tmp_path / "auto", options={"optim": optim})
    assert summary["leaps_made"] == summary["predicted_steps"] == 0
    told = [record.getMessage() for record in caplog.records if "No leaps are made" in record.getMessage()]
    assert len(told) == 1 and f"the optimizer is `{'MuonAdamW' if optim == 'muon' else ''}" in told[0]
    with pytest.raises(ValueError, match=f"Leaps need Adam or AdamW, and the optimizer is `optim={optim}`"):
        hybrid_config(tmp_path / "asked", optim=optim, direction="gradient_memory")


class LikeAdamW(torch.optim.AdamW):
    """A user's optimizer, which may step in any way."""


def test_leaps_that_are_asked_for_under_another_optimizer_are_refused_with_the_trainer(tmp_path):
    model = tiny_model()
    config = hybrid_config(tmp_path, direction="orthogonal")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for given in ({"optimizers": (sgd, None)}, {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})}):
        with pytest.raises(ValueError, match="Leaps need Adam or AdamW, and the optimizer is `SGD`.*`direction`"):
            HybridTrainer(model, config, train_dataset=ByteText(40), **given)
    config = hybrid_config(tmp_path, direction="auto", optim="sgd")
    with pytest.raises(ValueError, match="Leaps need Adam or AdamW"):
        HybridTrainer(model, config, train_dataset=ByteText(40), direction=Orthogonal)
    config = hybrid_config(tmp_path, direction="orthogonal", max_steps=12)
    optimizer = LikeAdamW(model.parameters(), lr=1e-3)
    trainer = HybridTrainer(model, config, train_dataset=ByteText(100), optimizers=(optimizer, None))
    trainer.train()
    assert trainer.hybrid_summary()["leaps_made"] > 0


def test_an_optimizer_of_the_users_makes_leaps_if_it_is_adamw_itself(tmp_path):
    for kind, leaps in ((torch.optim.AdamW, True), (torch.optim.Adam, True), (LikeAdamW, False)):
        model = tiny_model()
        optimizer = kind(model.parameters(), lr=3e-3)
        summary = summary_of(model, tmp_path / kind.__name__, optimizers=(optimizer, None))
        assert (summary["leaps_made"] > 0) is leaps, kind
        model = tiny_model()
        summary = summary_of(model, tmp_path / f"class_{kind.__name__}", optimizer_cls_and_kwargs=(kind, {"lr": 3e-3}))
        assert (summary["leaps_made"] > 0) is leaps, kind


class OwnLoss(HybridTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        return (5 * loss, outputs) if return_outputs else 5 * loss


class OwnForward(type(tiny_model())):
    def forward(self, input_ids, labels=None, **kwargs):
        outputs = super().forward(input_ids, labels=labels, **kwargs)
        outputs.loss = 5 * outputs.loss
        return outputs


def test_a_loss_that_may_not_be_the_plain_cross_entropy_makes_no_leaps(tmp_path):
    """A pretrained model would seem to know nothing, or one that knows nothing pretrained."""

    def five_times(outputs, labels, num_items_in_batch=None):
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return 5 * torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())

    own = tiny_model()
    own.loss_function = lambda logits, labels, **kwargs: five_times(types.SimpleNamespace(logits=logits), labels)
    runs = {
        "compute_loss_func": (tiny_model(), {"compute_loss_func": five_times}),
        "label_smoothing_factor": (tiny_model(), {"options": {"label_smoothing_factor": 0.1}}),
        "OwnLoss.compute_loss": (tiny_model(), {"kind": OwnLoss}),
        "OwnForward": (OwnForward(tiny_model().config), {}),
        "loss_function": (own, {}),
    }
    for what, (model, given) in runs.items():
        summary = summary_of(model, tmp_path / what, **copy.deepcopy(given))
        assert summary["leaps_made"] == 0 and f"{what}" in summary["no_leaps"], what
    given = {"compute_loss_func": five_times, "options": {"direction": "orthogonal"}}
    assert summary_of(tiny_model(), tmp_path / "asked", **given)["leaps_made"] > 0


@pytest.mark.parametrize("chosen", [{"preset": "fast"}, {"leap_gain": 0.0}])
def test_no_leaps_by_choice_take_no_memory_and_no_words(chosen, tmp_path, caplog):
    options = {"direction": "auto", **chosen}
    summary = summary_of(tiny_model(), tmp_path, options=options)
    assert summary["leaps_made"] == 0 and sum(summary["buffer_bytes"].values()) == 0
    assert next(iter(chosen)) in summary["no_leaps"]
    assert "leap" not in caplog.text


def test_runs_without_leaps_have_no_words_of_them(tmp_path):
    model = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj", "up_proj"], r=4))
    trainer = trainers.build(tmp_path, model=model, samples=40, direction="auto", max_steps=6, auto_lr="on")
    shown = []

    class Look(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            shown.append(str(trainer.run_position()))

    trainer.add_callback(Look())
    output = trainer.train()
    logged = {name for entry in trainer.state.log_history for name in entry} | set(output.metrics)
    words = {name for name in logged if name.startswith("hybrid") and "forecast" not in name}
    assert words == {"hybrid/learning_rate_scale"}
    assert all("phase" not in text for text in shown) and all("loss=" in text for text in shown[1:])
    assert trainer.hybrid_summary()["backward_passes"] == 6


def fp16(folder, kind, model, *, init_scale=2.0**10, **options):
    """A training with a gradient scaler, as on a GPU: accelerate makes none on a CPU."""
    make = (
        hybrid_config
        if kind is HybridTrainer
        else lambda folder, **more: TrainingArguments(**config_values(folder, **more))
    )
    options = {"fp16": True, "max_steps": 24, "remove_unused_columns": False, **options}
    trainer = kind(model, make(folder, **options), train_dataset=ByteText(96))
    trainer.accelerator.native_amp = True
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    trainer.train()
    return trainer


def test_fp16_makes_no_leaps_and_steps_as_plain_trainer(tmp_path, caplog, monkeypatch):
    """
    Steps that the scaler leaves out, because it multiplied the loss by too much, are no divergence: here more than
    `MAX_BAD_STEPS` in a row.
    """
    monkeypatch.setattr(DivergenceMonitor, "MAX_BAD_STEPS", 3)
    model = tiny_model()
    options = {"direction": "auto", "auto_lr": "off", "share_rows": "off"}
    hybrid = fp16(tmp_path / "hybrid", HybridTrainer, copy.deepcopy(model), init_scale=2.0**24, **options)
    plain = fp16(tmp_path / "plain", Trainer, copy.deepcopy(model), init_scale=2.0**24)
    skipped = sum(not math.isfinite(entry.get("grad_norm", 0.0)) for entry in plain.state.log_history)
    assert 3 < skipped < 20 and losses(hybrid) == losses(plain)
    assert_same_weights(weights(hybrid.model), weights(plain.model))
    assert hybrid.accelerator.scaler.get_scale() == plain.accelerator.scaler.get_scale()
    told = [r.getMessage() for r in caplog.records if "makes no leaps" in r.getMessage()]
    assert len(told) == 1 and "`fp16=True`" in told[0] and "No leaps are made" not in caplog.text
    summary = hybrid.hybrid_summary()
    assert "`fp16=True`" in summary["no_leaps"] and summary["leaps_made"] == 0
    assert summary["divergence_events"] == [] and summary["skipped_batches"] == 0
    # Monitor, forecast and the record of the run are there.
    assert len(hybrid.run.summary()["steps_by_phase"]) == 4 and summary["real_steps"] == 24
    assert any("hybrid/forecast_loss" in entry for entry in hybrid.state.log_history)


def test_fp16_keeps_the_monitor_and_the_rule_of_adapters(tmp_path):
    """A batch that the monitor drops leaves the scaler ready for the next one."""

    class Poisoned(LlamaForCausalLM):
        calls = 0

        def forward(self, *args, **kwargs):
            output, self.calls = super().forward(*args, **kwargs), self.calls + 1
            output.loss = output.loss * {3: math.nan, 24: 1e5}.get(self.calls, 1.0)
            return output

    model, options = Poisoned(tiny_model().config), {"direction": "auto", "share_rows": "off"}
    trainer = fp16(tmp_path, HybridTrainer, model, init_scale=1.0, **options)
    assert trainer.hybrid_summary()["skipped_batches"] == 2 and finite(trainer.model)

    adapted = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    trainer = fp16(tmp_path, HybridTrainer, adapted, direction="auto", learning_rate=None)
    assert trainer.hybrid_summary()["learning_rate_scale"] > 1.0


def test_fp16_is_refused_if_leaps_are_asked_for(tmp_path):
    own = {"direction": lambda context: None}
    for options, given in (({}, own), ({"checkpoint_phases": "full"}, {})):
        args = hybrid_config(tmp_path, fp16=True, direction="auto", **options)
        with pytest.raises(ValueError, match="`fp16=True` cannot be combined with leaps"):
            HybridTrainer(tiny_model(), args, train_dataset=ByteText(60), **given)
