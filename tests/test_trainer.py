"""Runs through all four phases: what a user is promised about leaps, counts, logs and exports."""

import inspect
import json
import math

import pytest
import torch
from conftest import ByteText, assert_same_weights, config_values, hybrid_config, tiny_model, weights
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_hybrid import HybridConfig, HybridTrainer, PhasePlugin
from hf_hybrid.leaps.trajectory import Trajectory
from hf_hybrid.phases import Phase


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


def run(tmp_path, *, callbacks=(), plugins=(), samples=400, **overrides):
    trainer = HybridTrainer(
        tiny_model(),
        hybrid_config(tmp_path, **overrides),
        train_dataset=ByteText(samples),
        eval_dataset=ByteText(32, offset=800),
        callbacks=list(callbacks),
        plugins=plugins,
    )
    trainer.train()
    return trainer


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_default_options_reach_every_phase_in_50_steps(tmp_path):
    args = HybridConfig(**config_values(tmp_path, max_steps=50))
    trainer = HybridTrainer(tiny_model(), args, train_dataset=ByteText(600))
    trainer.train()
    summary = trainer.hybrid_summary()
    assert all(summary["steps_by_phase"][phase.value] > 0 for phase in Phase), summary["steps_by_phase"]
    assert summary["steps"] == trainer.state.global_step == 50
    assert summary["backward_passes"] == summary["real_steps"] < 50


def test_every_step_does_what_its_phase_says(tmp_path):
    recorder = Recorder()
    phases = []

    class Phases(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            phases.append(trainer.run.last_phase)

    trainer = HybridTrainer(
        tiny_model(),
        hybrid_config(tmp_path, max_steps=40),
        train_dataset=ByteText(400),
        callbacks=[recorder],
    )
    trainer.add_callback(Phases)
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


class Spy:
    """Stands in for `Trajectory.leap` and keeps the weights around it."""

    def __init__(self, monkeypatch, factor=1.0):
        original = Trajectory.leap
        self.before = []

        def leap(trajectory, gain):
            if trajectory.open.gain == 0:  # not moved yet
                self.before.append([p.detach().clone() for p in trajectory.parameters])
            trajectory.max_relative_norm = 1e3
            return original(trajectory, gain * factor)

        monkeypatch.setattr(Trajectory, "leap", leap)


def test_rejected_leaps_leave_the_weights_bit_equal(tmp_path, monkeypatch):
    Spy(monkeypatch, factor=-5000.0)  # uphill, far
    recorder = Recorder()
    trainer = run(tmp_path, callbacks=[recorder], probe_budget=1.0)
    rejected = [leap for leap in trainer.hybrid_summary()["leaps"] if leap["verdict"] == "rejected"]
    assert len(rejected) >= 2
    for leap in rejected:
        assert leap["loss_after"] - leap["loss_before"] > 2 * leap["standard_error"]
        assert same(recorder.after[leap["step"] - 1], recorder.before[leap["step"]])
        assert leap["horizon"] == 0


def test_terrible_leap_that_was_not_probed_is_rolled_back(tmp_path, monkeypatch):
    """Probed at first, terrible later when nobody looks: Correct sees the loss jump and goes back exactly."""
    original = Trajectory.leap
    at_leap = []

    def leap(trajectory, gain):
        trajectory.max_relative_norm = 10.0
        terrible = trajectory.clock.steps_seen > 60 and not at_leap
        if terrible:
            at_leap.extend(p.detach().clone() for p in trajectory.parameters)
        trajectory.max_relative_norm = 10.0
        return original(trajectory, -600.0 if terrible else gain)

    restored = []
    rolled = Trajectory.roll_back

    def roll_back(trajectory):
        rolled(trajectory)
        restored.append([p.detach().clone() for p in trajectory.parameters])

    monkeypatch.setattr(Trajectory, "leap", leap)
    monkeypatch.setattr(Trajectory, "roll_back", roll_back)
    trainer = run(tmp_path, max_steps=90, probe_budget=0.0, direction="gradient_memory")
    summary = trainer.hybrid_summary()
    terrible = [leap for leap in summary["leaps"] if leap["gain"] < -100]
    assert [leap["verdict"] for leap in terrible] == ["rolled_back"]
    back = [event for event in summary["divergence_events"] if event["action"] == "roll_back"]
    assert len(back) == summary["roll_backs"] and back[-1]["step"] <= terrible[0]["step"] + 2
    assert any(all(torch.equal(a, b) for a, b in zip(at_leap, state)) for state in restored)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-10:]) < sum(losses[:10]) - 5


def test_summary_counts_what_happened(tmp_path, monkeypatch):
    backward = []
    forward = []
    model = tiny_model()
    model.register_forward_hook(lambda m, *_: forward.append(torch.is_grad_enabled()))
    trainer = HybridTrainer(model, hybrid_config(tmp_path, gradient_accumulation_steps=2), train_dataset=ByteText(400))
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
    assert json.loads((tmp_path / "hybrid_summary.json").read_text()) == json.loads(json.dumps(summary))
    keys = {"step", "horizon", "gain", "loss_before", "loss_after", "standard_error", "verdict", "e"}
    assert summary["leaps"] and all(keys <= set(leap) for leap in summary["leaps"])
    assert sum(leap["horizon"] for leap in summary["leaps"]) == summary["predicted_steps"]


def test_predicted_steps_take_no_data(tmp_path):
    seen = []

    class Counting(ByteText):
        def __getitem__(self, index):
            seen.append(index)
            return super().__getitem__(index)

    trainer = HybridTrainer(
        tiny_model(),
        hybrid_config(tmp_path),
        train_dataset=Counting(400),
        probe_dataset=ByteText(16, offset=500),
    )
    trainer.train()
    summary = trainer.hybrid_summary()
    # accelerate fetches one batch ahead
    assert len(seen) <= 4 * (summary["real_steps"] + 1) < 4 * 30


def test_tokens_and_flops_are_counted_for_real_steps_only(tmp_path, caplog):
    trainer = run(tmp_path, include_num_input_tokens_seen="all")
    real = trainer.hybrid_summary()["real_steps"]
    assert real < 30
    assert trainer.state.num_input_tokens_seen == real * 4 * 32
    assert trainer.state.total_flos == 6 * real * 4 * 32 * trainer.model.num_parameters(exclude_embeddings=True)
    assert "Tried to track" not in caplog.text


def test_logged_losses_are_those_of_real_steps(tmp_path):
    seen = []
    trainer = HybridTrainer(tiny_model(), hybrid_config(tmp_path, logging_steps=4), train_dataset=ByteText(400))
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
    assert {"hybrid/phase", "hybrid/backward_passes", "hybrid/leaps", "hybrid/confidence"} <= set(entry)


def test_evaluate_and_save_see_the_weights_of_the_moment(tmp_path):
    """In every phase a checkpoint loads to exactly the weights that the model holds."""
    held, phases = {}, set()

    class Keep(TrainerCallback):
        def on_save(self, args, state, control, model=None, **kwargs):
            held[state.global_step] = weights(model)
            phases.add(trainer.run.last_phase)

    trainer = HybridTrainer(
        tiny_model(),
        hybrid_config(tmp_path, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1),
        train_dataset=ByteText(400),
        eval_dataset=ByteText(32, offset=800),
        callbacks=[Keep],
    )
    trainer.train()
    assert phases == set(Phase)
    evals = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    for step in (2, 6, 12, 20, 29):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{step}")
        assert_same_weights(weights(loaded), held[step])
        fresh = HybridTrainer(
            loaded,
            HybridConfig(**config_values(tmp_path / "e"), enable_predict=False),
            eval_dataset=trainer.eval_dataset,
        )
        assert fresh.evaluate()["eval_loss"] == evals[step]


def test_the_schedule_goes_on_through_predicted_steps(tmp_path):
    rates = {}

    class Rates(TrainerCallback):
        def on_step_begin(self, args, state, control, lr_scheduler=None, **kwargs):
            rates[state.global_step] = lr_scheduler.get_last_lr()[0]

    trainer = run(tmp_path, callbacks=[Rates])
    assert trainer.hybrid_summary()["predicted_steps"] > 0
    for step, rate in rates.items():
        assert rate == pytest.approx(3e-3 * (1 - step / 30))


def test_the_progress_bar_shows_phase_and_loss(tmp_path, capfd):
    run(tmp_path, disable_tqdm=False, max_steps=15)
    text = capfd.readouterr().err
    assert "phase=warmup loss=" in text and "phase=correct loss=" in text
    assert text.count("15/15") >= 1


def test_plugins_are_called_in_order_and_keep_their_state(tmp_path):
    calls = []

    class Plugin(PhasePlugin):
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

    first, second = Plugin("first"), Plugin("second")
    run(tmp_path, plugins=[first, second], save_strategy="steps", save_steps=10)
    index = calls.index(("first", "before", Phase.WARMUP))
    assert [c[:2] for c in calls[index : index + 4]] == [
        ("first", "before"), ("second", "before"), ("second", "after"), ("first", "after")
    ]  # fmt: skip
    changes = [call[2:] for call in calls if call[:2] == ("first", "change")]
    assert changes[0] == (Phase.WARMUP, Phase.FULL) and all(a != b for a, b in changes)
    assert ("first", "probe") in calls and not any(Phase.PREDICT in call for call in calls if call[1] == "before")
    resumed = Plugin("first")
    trainer = HybridTrainer(
        tiny_model(),
        hybrid_config(tmp_path, max_steps=10),
        train_dataset=ByteText(400),
        plugins=[resumed],
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    state = json.loads((tmp_path / "checkpoint-10" / "hybrid_state.json").read_text())
    assert resumed.restored == state["plugins"]["first"]["count"] > 0


def test_custom_losses_are_probed_sequence_by_sequence(tmp_path):
    """A loss that cannot be read from the logits is asked for as the trainer computes it."""

    def compute_loss(outputs, labels, num_items_in_batch=None):
        return outputs.logits.float().square().mean() + 1.0

    trainer = HybridTrainer(
        tiny_model(), hybrid_config(tmp_path), train_dataset=ByteText(400), compute_loss_func=compute_loss
    )
    trainer.train()
    probed = [leap for leap in trainer.hybrid_summary()["leaps"] if leap["loss_before"] is not None]
    assert probed and all(leap["loss_before"] >= 1.0 and math.isfinite(leap["loss_after"]) for leap in probed)


def test_padding_does_not_count_in_probes(tmp_path):
    class Padded(ByteText):
        def __getitem__(self, index):
            item = super().__getitem__(index)
            length = 8 + index % 20
            mask = torch.arange(len(item["input_ids"])) < length
            return {
                "input_ids": item["input_ids"],
                "attention_mask": mask.long(),
                "labels": torch.where(mask, item["labels"], -100),
            }

    trainer = HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=Padded(400))
    trainer.train()
    from hf_hybrid.leaps.probe import SequenceLosses
    from hf_hybrid.phases import PluginList

    losses = SequenceLosses(trainer, PluginList())
    batch = next(iter(trainer.get_eval_dataloader(trainer.probe_dataset)))
    together = losses(batch)
    assert losses.from_logits
    losses.from_logits = False
    assert losses(batch) == pytest.approx(together, rel=1e-5)


# The signature, and the metrics of a run.


def test_every_parameter_of_trainer_is_there_by_name_and_place():
    theirs = inspect.signature(Trainer.__init__).parameters
    ours = inspect.signature(HybridTrainer.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs) and len(theirs) > 10
    for name, parameter in theirs.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind), name
    more = {name: parameter.kind.name for name, parameter in ours.items() if name not in theirs}
    own = dict.fromkeys(("probe_dataset", "plugins", "direction", "device_map"), "KEYWORD_ONLY")
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


def test_metrics_of_a_run_say_what_was_saved_and_what_it_took(tmp_path):
    trainer = HybridTrainer(
        tiny_model(), hybrid_config(tmp_path, gradient_accumulation_steps=2, probe_budget=1.0),
        train_dataset=ByteText(400),
    )  # fmt: skip
    metrics, summary = trainer.train().metrics, trainer.hybrid_summary()
    for key in ("backward_passes", "backward_passes_avoided"):
        assert metrics[f"hybrid_{key}"] == summary[key] > 0
    assert metrics["hybrid_leaps"] == len(summary["leaps"]) > 0
    leaps, probes = metrics["hybrid_leap_runtime"], metrics["hybrid_probe_runtime"]
    assert leaps > 0 and probes > 0 and leaps + probes < metrics["train_runtime"]
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


def test_leaps_do_not_depend_on_how_a_batch_is_accumulated(tmp_path):
    """The same 8 sequences a step as 8, 2 or 1 at a time: the same phases, leaps and verdicts, the same losses."""
    found = {}
    for size, parts in ((8, 1), (2, 4), (1, 8)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts, "probe_budget": 1.0}
        trainer = run(tmp_path / str(size), max_steps=40, **options)
        summary, log = trainer.hybrid_summary(), trainer.state.log_history
        assert summary["backward_passes"] == parts * summary["real_steps"]
        found[size] = (
            [entry["hybrid/phase"] for entry in log if "hybrid/phase" in entry],
            [(leap["step"], leap["horizon"], leap["verdict"]) for leap in summary["leaps"]],
            [entry["loss"] for entry in log if "loss" in entry],
            [leap["loss_after"] for leap in summary["leaps"] if leap["loss_after"] is not None],
        )
    phases, leaps, losses, probed = found[8]
    assert set(phases) == {phase.index for phase in Phase} and len(leaps) >= 4 and probed
    for size in (2, 1):
        assert found[size][:2] == (phases, leaps)
        assert found[size][2] == pytest.approx(losses, abs=1e-5)
        assert found[size][3] == pytest.approx(probed, abs=1e-5)
