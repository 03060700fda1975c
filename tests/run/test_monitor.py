"""The divergence monitor: which losses and gradients alarm it, and what a training does then."""

import itertools
import json
import logging
import math
import random

import pytest
import torch
from conftest import ByteText, config_values, finite, hybrid_config, losses, mostly_slow, tiny_model, weights
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_hybrid import HybridTrainer, Part
from hf_hybrid.part import Action, Level, Phase
from hf_hybrid.run.monitor import DivergenceMonitor, TrainingDivergedError, linear_trend, robust_trend
from hf_hybrid.run.run import Run


def monitor(**overrides):
    monitor = DivergenceMonitor(overrides.get("threshold", 4.0))
    monitor.MAX_BAD_STEPS = overrides.get("max_bad_steps", 5)
    return monitor


def settled(steps=60, **overrides):
    """A monitor that has watched a quiet run."""
    rng, m = random.Random(0), monitor(**overrides)
    for step in range(steps):
        m.judge_gradients(1.0, rng.uniform(0.9, 1.1), leap_open=False)
        verdict = m.judge_step(3.0 - 0.005 * step + rng.gauss(0, 0.02), 1.0, leap_open=False)
        assert verdict.level <= Level.CAUTION, verdict
    return m


def test_quiet_run_raises_no_alarm():
    verdict = settled(400).judge_step(1.0, 1.0, leap_open=False)
    assert verdict.level <= Level.CAUTION and verdict.action is not Action.ROLL_BACK


@pytest.mark.parametrize(
    "loss, norm, leap_open, level, action",
    [
        (3.5, 1.0, True, Level.CRITICAL, Action.ROLL_BACK),  # it jumps after a leap
        (3.5, 1.0, False, Level.CRITICAL, Action.FORCE_FULL),
        (1.0, 1.0, True, Level.NORMAL, Action.NONE),  # it lies below its trend
        (2.7, 200.0, False, Level.WARNING, Action.FORCE_FULL),
        (2.7, 1e-5, False, Level.WARNING, Action.FORCE_FULL),
    ],
)
def test_a_step_after_a_quiet_run(loss, norm, leap_open, level, action):
    verdict = settled().judge_step(loss, norm, leap_open=leap_open)
    assert (verdict.level, verdict.action) == (level, action)
    assert level is not Level.CRITICAL or "standard deviations above its trend" in verdict.reason


def test_exploding_gradients_are_not_used():
    m = settled()
    verdict = m.judge_gradients(2.7, 5000.0, leap_open=False)
    assert (verdict.level, verdict.action) == (Level.CRITICAL, Action.SKIP_BATCH)
    assert m.judge_gradients(2.7, 5000.0, leap_open=True).action is Action.ROLL_BACK


def test_nan_ladder():
    m = settled(max_bad_steps=5)
    actions = [m.judge_gradients(math.nan, 1.0, leap_open=False).action for _ in range(5)]
    assert actions == [
        Action.SKIP_BATCH, Action.SKIP_BATCH, Action.RESET_PREDICTOR, Action.SKIP_BATCH, Action.ABORT
    ]  # fmt: skip


def test_nan_after_a_leap_suspects_the_leap():
    m = settled()
    assert [m.judge_gradients(1.0, math.inf, leap_open=True).action for _ in range(3)][-1] is Action.ROLL_BACK


def test_one_good_step_ends_a_row_of_bad_ones():
    m = settled(max_bad_steps=2)
    for _ in range(10):
        assert m.judge_gradients(math.nan, 1.0, leap_open=False).action is Action.SKIP_BATCH
        assert m.judge_gradients(1.0, 1.0, leap_open=False).action is Action.NONE


def test_three_warnings_in_a_row_are_critical():
    m = settled()
    levels = [m.judge_step(2.7, 200.0, leap_open=False).level for _ in range(3)]
    assert levels == [Level.WARNING, Level.WARNING, Level.CRITICAL]


def test_a_loss_that_grows_step_by_step_is_noticed():
    """Its trend grows with it, so that no single loss stands out; leaps stay away until it is down or usual."""
    m, rng, alarms = settled(), random.Random(1), []
    for step in range(200):
        loss = 2.7 * 1.02 ** min(step, 60) + rng.gauss(0, 0.02)
        verdict = m.judge_step(loss, 1.0, leap_open=False)
        if verdict.level >= Level.WARNING and "when they were lowest" in verdict.reason:
            assert verdict.action is Action.BACK_OFF
            alarms.append(step)
    assert 10 < alarms[0] < 40 and min(b - a for a, b in zip(alarms, alarms[1:])) == m.RISE_EVERY
    for _ in range(5000):
        verdict = m.judge_step(8.86 + rng.gauss(0, 0.02), 1.0, leap_open=False)
    assert verdict.level <= Level.CAUTION, "what stays is normal in the end"


def test_a_resumed_watch_goes_on():
    """By its state as JSON, with the lowest losses."""
    m, rng = settled(), random.Random(2)
    again = monitor()
    again.load_state_dict(json.loads(json.dumps(m.state_dict())))
    for step in range(60):
        loss, norm = 2.7 * 1.02**step + rng.gauss(0, 0.02), rng.choice([1.0, 9.0])
        verdicts = [w.judge_step(loss, norm, leap_open=step % 2 == 1) for w in (m, again)]
        assert verdicts[0] == verdicts[1]
    assert m.best is not None and m.state_dict() == again.state_dict()


def test_a_robust_trend_is_that_of_the_values_without_the_jumps_of_bad_leaps():
    noise = [0.02 * math.sin(7.0 * step) for step in range(32)]
    clean = [5.0 - 0.01 * step + noise[step] for step in range(32)]
    hurt = [loss + (2.0 if step in (20, 21, 22, 26, 27) else 0.0) for step, loss in enumerate(clean)]
    trend, deviation = robust_trend(clean)
    assert trend == pytest.approx(5.0 - 0.01 * 32, abs=0.01) and deviation == pytest.approx(0.02, rel=0.5)
    trend_hurt, deviation_hurt = robust_trend(hurt)
    assert trend_hurt == pytest.approx(trend, abs=0.05) and deviation_hurt < 2 * deviation
    assert linear_trend(hurt)[1] > 10 * deviation, "least squares take the jumps for noise"


def test_linear_trend_continues_a_line():
    trend, deviation = linear_trend([5.0 - 0.5 * step for step in range(10)])
    assert abs(trend - 0.0) < 1e-9 and deviation < 1e-9


# In whole trainings: bad luck is survived, and no checkpoint holds NaN.


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


def poisoned_trainer(folder, poison, **options):
    config = hybrid_config(folder, remove_unused_columns=False, **options)
    return HybridTrainer(poisoned(poison), config, train_dataset=ByteText(400))


@pytest.mark.parametrize("call", [2, 12, 25])
def test_a_nan_batch_is_skipped(tmp_path, call):
    trainer = poisoned_trainer(tmp_path, {call: math.nan}, max_steps=40)
    trainer.train()
    summary = trainer.hybrid_summary()
    assert finite(trainer.model) and summary["skipped_batches"] == 1
    (event,) = [e for e in summary["divergence_events"] if "not finite" in e["reason"]]
    assert (event["level"], event["action"]) == ("critical", "skip_batch")
    last = [e["loss"] for e in trainer.state.log_history if "loss" in e][-1]
    assert last < 5.0


@pytest.mark.parametrize("factor, clip", [(1e6, 0.0), (math.inf, 1.0)])
def test_a_poisoned_gradient_does_not_reach_weights_or_optimizer(tmp_path, factor, clip):
    trainer = poisoned_trainer(tmp_path, {33: factor}, max_steps=50, max_grad_norm=clip)
    trainer.train()
    summary = trainer.hybrid_summary()
    assert finite(trainer.model) and summary["skipped_batches"] == 1
    largest = max(s["exp_avg_sq"].max().item() for s in trainer.optimizer.state_dict()["state"].values())
    assert largest < 10.0


# The device decides on a step, and the host learns of it in the next one.


class AtOnce(Part):
    """A part that needs the numbers of a step when it ends: the host judges every step before the update."""

    def end_step(self, step):
        pass


def adapted(model):
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))


NAN, LARGE = math.nan, 1e7
LATER = {
    "nothing": {},
    "first and last": {"poison": {1: NAN, 30: NAN}},
    "in a row": {"poison": dict.fromkeys((12, 13, 14, 15), NAN), "logging_steps": 7},
    "infinite": {"poison": {12: math.inf}, "max_grad_norm": 0.0},
    "exploding": {"poison": {26: LARGE}, "logging_strategy": "no"},
    "without clipping": {"poison": {26: LARGE, 27: LARGE}, "max_grad_norm": 0.0, "lr_scheduler_type": "cosine"},
    "accumulated": {"poison": {13: NAN, 53: LARGE, 54: LARGE}, "gradient_accumulation_steps": 2, "logging_steps": 4},
    "saved": {"poison": {10: NAN, 20: LARGE}, "save_strategy": "steps", "save_steps": 10, "logging_steps": 9},
    "bf16": {"poison": {12: NAN}, "bf16": True},
    "all weights": {"poison": {12: NAN, 26: LARGE}, "adapters": False},
    "a search of the rate": {"poison": {12: NAN, 26: LARGE}, "adapters": False, "auto_lr": "on", "logging_steps": 7},
    "without labels": {"masked": range(8, 16)},
}


def later(folder, at_once, poison=None, adapters=True, masked=(), resume=None, **options):
    """A training that judges at once, or later; `resume` is the step after which it is stopped and resumed."""
    config = hybrid_config(
        folder, direction="auto", remove_unused_columns=False, train_sampling_strategy="sequential", share_rows="off",
        **options,
    )  # fmt: skip

    def build():
        model = poisoned(poison or {})
        model = adapted(model) if adapters else model
        trainer = HybridTrainer(model, config, train_dataset=Masked(masked, 400), parts=[AtOnce()] if at_once else [])
        trainer.saw = []
        reads, trainer.log_file.add = trainer.log_file.add, lambda entry: (trainer.saw.append(entry), reads(entry))
        return trainer

    trainer = build()
    if resume is not None:
        trainer.add_callback(Stop(resume))
        trainer.train()
        first, trainer = trainer, build()
        trainer.model.get_base_model().calls = resume
        trainer.saw = first.saw
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / f"checkpoint-{resume}"))
    return trainer


class Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_save = state.global_step == self.step


def told(trainer, caplog):
    """All that a run says, but how long it took."""
    summary = trainer.hybrid_summary()
    counts = ("steps_by_phase", "backward_passes", "skipped_batches", "divergence_events", "learning_rate_scales")
    entries = [*trainer.state.log_history, *(entry for entry in trainer.saw if "event" in entry)]
    entries = [{k: v for k, v in e.items() if not k.endswith(("runtime", "per_second"))} for e in entries]
    states = trainer.optimizer.state_dict()["state"]
    states = [value.clone() for state in states.values() for value in state.values()]
    said = [
        record.getMessage()
        for record in caplog.records
        if "hf_hybrid" in record.name and record.levelno >= logging.WARNING
    ]
    return [*weights(trainer.model).values(), *states], repr([entries, [summary[name] for name in counts], said])


def check_later(tmp_path, caplog, monkeypatch, **options):
    monkeypatch.setattr("hf_hybrid.build.pretrained_below", lambda trainer: 100.0)  # so no leaps with all weights
    found = []
    for at_once in (True, False):
        caplog.clear()
        trainer = later(tmp_path / str(at_once), at_once, **options)
        tensors, text = told(trainer, caplog)
        found.append((tensors, text.replace(str(trainer.args.output_dir), "")))
    for first, second in zip(*(tensors for tensors, _ in found), strict=True):
        assert torch.equal(first, second)
    assert found[0][1] == found[1][1]
    return found[0][1]


QUICK = ("in a row", "infinite", "exploding", "accumulated", "saved", "a search of the rate", "without labels")


@pytest.mark.parametrize("name", mostly_slow(LATER, QUICK))
def test_what_is_read_later_ends_as_what_is_read_at_once(name, tmp_path, caplog, monkeypatch):
    """Weights, states of the optimizer, logs, events, counts and messages."""
    text = check_later(tmp_path, caplog, monkeypatch, **LATER[name])
    assert ("skip_batch" in text) is ("poison" in LATER[name])


def test_what_is_read_later_is_known_to_a_checkpoint(tmp_path, caplog, monkeypatch):
    """The run is stopped after a step that the device left out, and resumed."""
    options = {"poison": {9: NAN, 10: NAN, 11: NAN}, "resume": 10, "max_steps": 20, "logging_strategy": "no"}
    assert "(3 in a row)" in check_later(tmp_path, caplog, monkeypatch, **options)


@pytest.mark.parametrize("at", [15, 26])  # the second ends with the last step
def test_endless_nan_that_is_read_later_ends_the_run(at, tmp_path, monkeypatch):
    monkeypatch.setattr(DivergenceMonitor, "MAX_BAD_STEPS", 5)
    said = rf"at step {at + 3}: loss is not finite \(5 in a row.*those of the last good step.*No checkpoint"
    with pytest.raises(TrainingDivergedError, match=said):
        later(tmp_path, False, dict.fromkeys(range(at, 99), NAN), logging_strategy="no")


def test_where_the_host_reads_later(tmp_path, train_set):
    """By default with adapters. Not where a part or the host needs the numbers, or the optimizer cannot skip a step."""

    class Seen(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            self.later = trainer.run.reads_later
            self.left = "found_inf" in vars(trainer.run.optimizer)

    def hooked(model):
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer.register_step_post_hook(lambda *args: None)
        return {"optimizers": (optimizer, None)}

    cases = [
        ({}, lambda model: {}, True),
        ({"optim": "adamw_torch"}, lambda model: {}, False),
        ({"optim": "sgd"}, lambda model: {}, False),
        ({"direction": "orthogonal"}, lambda model: {}, False),
        ({}, lambda model: {"parts": [AtOnce()]}, False),
        ({}, hooked, False),
    ]
    for number, (options, more, expected) in enumerate(cases):
        model, seen = adapted(tiny_model()), Seen()
        config = hybrid_config(tmp_path / str(number), max_steps=2, **{"direction": "auto", **options})
        trainer = HybridTrainer(model, config, train_dataset=train_set, callbacks=[seen], **more(model))
        trainer.train()
        assert seen.later is expected and not seen.left, options


def test_the_device_decides_as_the_host():
    """On every kind of number, with and without a usual norm."""
    numbers = [0.0, 1.0, 999.0, 1001.0, 1e9, math.inf, -math.inf, math.nan]
    for norms, phase in itertools.product(([], [1.0] * 30), (Phase.WARMUP, Phase.FULL)):
        for loss, norm, has_loss in itertools.product(numbers, numbers, (0.0, 1.0)):
            run = Run([monitor(max_bad_steps=99)], warmup=1)
            run.begin()
            run.monitor.norms.extend(norms)
            run.step.phase = phase
            withheld = run.monitor.withheld(run.step, torch.tensor([loss, norm, has_loss], dtype=torch.float64))
            may_step = run.before_update([loss, norm, has_loss])
            assert withheld.item() == float(not may_step), (loss, norm, has_loss, norms, phase)


class Masked(ByteText):
    """Rows of which some have no label."""

    def __init__(self, masked, count=64):
        super().__init__(count)
        self.masked = masked

    def __getitem__(self, index):
        ids = self.blocks[index]
        return {"input_ids": ids, "labels": torch.full_like(ids, -100) if index in self.masked else ids}


class Means(tiny_model().__class__):
    """A model whose loss is the mean over its own batch, whatever the window holds."""

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


class Divides(Means):
    """A model that sums over what has labels and divides by their number: 0 / 0 has a gradient of NaN."""

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        output = super().forward(input_ids, attention_mask, labels)
        kept = labels[:, 1:].ne(-100)
        output.loss = (output.logits[:, :-1].logsumexp(-1) * kept).sum() / kept.sum()
        return output


_plain: dict[tuple, Trainer] = {}
"""Those of `Trainer`, by kind of model and name of the window."""
WINDOWS = {"one row": range(1, 2), "a micro-batch": range(2, 4), "first": range(4), "many": range(4, 28)}


@pytest.mark.parametrize(
    "kind, options",
    [(None, {}), (None, {"share_rows": "on"}), (None, {"chunked_loss": "on"}), (Means, {})],
    ids=["plain", "shared", "chunked", "means"],
)
@pytest.mark.long
def test_a_step_without_labels_is_that_of_trainer(tmp_path, caplog, kind, options):
    """A step of the optimizer with a gradient of zero, said once: no divergence, however many follow each other."""

    def trained(trainer_class, config, masked):
        torch.manual_seed(0)
        model = tiny_model() if kind is None else kind(tiny_model().config)
        model.load_state_dict(tiny_model().state_dict())
        trainer = trainer_class(model, config, train_dataset=Masked(masked))
        trainer.train()
        return trainer

    values = {
        "max_steps": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "sequential", "remove_unused_columns": False,
    }  # fmt: skip
    for name, masked in WINDOWS.items():
        caplog.clear()
        if (plain := _plain.get((kind, name))) is None:
            arguments = TrainingArguments(**config_values(tmp_path, **values))
            plain = _plain[kind, name] = trained(Trainer, arguments, masked)
        config = hybrid_config(tmp_path, **values, **{"leap_gain": 0, "auto_lr": "off", "share_rows": "off", **options})
        ours = trained(HybridTrainer, config, masked)
        for first, second in zip(plain.model.parameters(), ours.model.parameters()):
            torch.testing.assert_close(first, second, rtol=0, atol=1e-4 if options else 0)
        assert losses(ours) == pytest.approx(losses(plain), rel=1e-4)
        assert ours.hybrid_summary()["divergence_events"] == []
        assert caplog.text.count("no token of the batch has a label") == (name in ("first", "many"))


def test_a_step_without_labels_whose_gradient_is_nan_changes_nothing(tmp_path):
    """`Trainer` itself ends with weights of NaN."""
    model = Divides(tiny_model().config)
    config = hybrid_config(
        tmp_path, max_steps=16, per_device_train_batch_size=4, remove_unused_columns=False, share_rows="off",
        train_sampling_strategy="sequential",
    )  # fmt: skip
    HybridTrainer(model, config, train_dataset=Masked(range(8, 64))).train()
    assert finite(model)


def test_endless_nan_aborts_and_names_the_last_good_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(DivergenceMonitor, "MAX_BAD_STEPS", 5)
    poison, saves = dict.fromkeys(range(20, 200), math.nan), {"save_strategy": "steps", "save_steps": 10}
    trainer = poisoned_trainer(tmp_path, poison, max_steps=60, **saves)
    said = r"5 in a row.*in memory are those of the last good step.*last good checkpoint is `.*checkpoint-\d+`"
    with pytest.raises(TrainingDivergedError, match=said):
        trainer.train()
    assert finite(trainer.model)
    for file in tmp_path.glob("checkpoint-*/model.safetensors"):
        assert all(torch.isfinite(t).all() for t in load_file(file).values())


def test_nan_weights_are_never_saved(tmp_path):
    config = hybrid_config(tmp_path, save_strategy="steps", save_steps=2)
    trainer = HybridTrainer(tiny_model(), config, train_dataset=ByteText(400))
    original = trainer.training_step

    def training_step(*args, **kwargs):
        if trainer.state.global_step == 3:  # in Warmup: no leap to roll back
            next(trainer.model.parameters()).data.fill_(math.nan)
        return original(*args, **kwargs)

    trainer.training_step = training_step
    with pytest.raises(TrainingDivergedError, match="in memory hold NaN or infinite values.*checkpoint-2"):
        trainer.train()
    assert not (tmp_path / "checkpoint-4").exists()


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


class OwnStep:
    """Computes the micro-batch itself, as some scripts do."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.parametrize("memory", ["off", "stream"])
def test_a_training_step_of_its_own_trains_as_with_trainer(memory, tmp_path):
    options = {"direction": "auto", "memory": memory, "max_steps": 8}
    own = type("Own", (OwnStep, HybridTrainer), {})(
        tiny_model(), hybrid_config(tmp_path, **options), train_dataset=ByteText(64)
    )
    arguments = TrainingArguments(**config_values(tmp_path, max_steps=8))
    plain = type("Plain", (OwnStep, Trainer), {})(tiny_model(), arguments, train_dataset=ByteText(64))
    for trainer in (plain, own):
        trainer.train()
    assert losses(own) == losses(plain)
    for first, second in zip(plain.model.parameters(), own.model.parameters()):
        assert torch.equal(first, second)
