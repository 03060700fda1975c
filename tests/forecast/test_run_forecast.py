"""`hf_hybrid/forecast/run_forecast.py`: the forecast of the final loss in the log of a run."""

import math

import numpy as np
import pytest
import torch
from conftest import ByteText
from rig import trainers
from transformers import Trainer, TrainingArguments, get_scheduler

from hf_hybrid import ForecastCallback
from hf_hybrid.forecast.run_forecast import MOST_STEPS, RunForecast, schedule_of
from hf_hybrid.records.summary import RunPosition
from hf_hybrid.report.run_folder import load_run
from hf_hybrid.run.monitor import TrainingDivergedError

KEYS = ("hybrid/forecast_loss", "hybrid/forecast_low", "hybrid/forecast_high")


def scheduler(name="linear", steps=100, rate=1e-3):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    return get_scheduler(name, optimizer, num_warmup_steps=0, num_training_steps=steps)


def begun(steps=100, history=()):
    return RunForecast(steps, scheduler(steps=steps), history)


def log(forecast, step, logs):
    """What is added to a log entry; the step after it has begun."""
    found = forecast.log_values(step, logs)
    forecast.make()
    return found


def entry(step, loss=None):
    loss = 2.0 + 3.0 / math.sqrt(step + 3) if loss is None else loss
    return {"loss": loss, "learning_rate": 1e-3 * (1 - (step - 1) / 100), "step": step}


def test_the_schedule_is_known_in_advance():
    assert schedule_of(scheduler(), 100) == pytest.approx(1 - np.arange(100) / 100)
    long = schedule_of(scheduler(steps=1_000_000), 1_000_000)
    assert long[[0, 500_000, 999_999]] == pytest.approx([1.0, 0.5, 0.0], abs=1e-4)
    assert (schedule_of(object(), 10) == 1).all()


def test_forecasts_begin_after_five_per_cent_and_five_losses():
    forecast = begun()
    found = [bool(log(forecast, step, entry(step))) for step in range(1, 8)]
    assert found == [False] * 5 + [True] * 2, "the entry after the fifth has it"
    sparse = begun()
    found = [bool(log(sparse, step, entry(step))) for step in (10, 20, 30, 40, 50, 60)]
    assert found == [False] * 5 + [True]


def test_a_log_entry_waits_for_no_forecast():
    forecast = begun()
    for step in range(1, 20):
        assert forecast.log_values(step, entry(step)) == {}, "no step has begun since"
    forecast.make()
    assert set(forecast.log_values(20, entry(20))) == set(KEYS)


def test_a_scaled_rate_scales_the_rates_to_come():
    forecast = begun()
    for step in range(1, 21):
        rate = entry(step)["learning_rate"] * (4 if step > 10 else 1)
        log(forecast, step, {**entry(step), "learning_rate": rate})
    rates = forecast.learning_rates()
    assert rates[9] == pytest.approx(1e-3 * 0.91)
    assert rates[20:] == pytest.approx(4e-3 * (1 - np.arange(20, 100) / 100))


@pytest.mark.parametrize("evaluated", [[], [{"eval_loss": 3.1, "step": 20}]], ids=["", "with an evaluation"])
def test_a_resumed_run_goes_on_with_its_history(evaluated):
    whole, history = begun(), [entry(step) for step in range(1, 31)]
    history[20:20] = evaluated
    for row in history:
        log(whole, row["step"], row)
    resumed = begun(history=history)
    assert resumed.log_values(31, entry(31)) == log(whole, 31, entry(31))
    assert log(resumed, 31, entry(31)) == {}  # nothing is counted twice


def test_a_run_that_breaks_has_no_forecast():
    forecast = begun()
    for step in range(1, 31):
        assert log(forecast, step, entry(step, math.nan if step == 30 else None)).keys() == (
            set() if step < 6 or step == 30 else set(KEYS)
        )
    assert forecast.summary() is None


EVAL_KEYS = ("hybrid/forecast_eval_loss", "hybrid/forecast_eval_low", "hybrid/forecast_eval_high")


def test_an_evaluation_forecasts_the_held_out_loss_in_the_entries_after_it():
    forecast = begun()
    evaluations = {3: 9.0, 20: 3.1, 40: 2.9, 100: 2.4}
    found = {}
    for step in range(1, 101):
        found[step] = log(forecast, step, entry(step))
        if step in evaluations:
            assert log(forecast, step, {"eval_loss": evaluations[step]}) == {}, "searches add metrics up"
    assert not set(EVAL_KEYS) & set(found[20]), "the evaluation after step 3 came before 5 % of the run"
    assert set(EVAL_KEYS) <= set(found[21])
    for key in EVAL_KEYS:
        assert found[21][key] == found[40][key] != found[41][key] == found[100][key]
    loss, low, high = (found[41][key] for key in EVAL_KEYS)
    assert 2.2 < low < loss < high < 3.3
    assert forecast.summary()["held_out"] == {"step": 40, "loss": loss, "low": low, "high": high}


def test_endless_runs_have_no_forecast():
    forecast = RunForecast(MOST_STEPS + 1, scheduler())
    assert log(forecast, 1, entry(1)) == {}


def test_the_progress_bar_shows_the_end():
    forecast = begun()
    for step in range(1, 51):
        log(forecast, step, entry(step))
    shown = str(RunPosition("full", 2.31, 2**30, forecast.last))
    assert shown.startswith("phase=full loss=2.31 end=2.") and "+-" in shown and shown.endswith(" gib=1.0")
    for step in range(51, 101):
        log(forecast, step, entry(step))
    assert "+-" not in str(RunPosition("full", 2.31, 2**30, forecast.last)), "the run has ended"


def test_the_callback_leaves_plain_training_as_it_is(tmp_path):
    logs = []
    for callbacks in ([], [ForecastCallback()]):
        options = {"eval_strategy": "steps", "eval_steps": 10, "eval_dataset": ByteText(16), "callbacks": callbacks}
        trainer = trainers.train(tmp_path, Trainer, TrainingArguments, **options)
        logs.append([row for row in trainer.state.log_history if "loss" in row])
    plain, forecast = logs
    assert [row["loss"] for row in plain] == [row["loss"] for row in forecast]
    assert not set(KEYS) & set(plain[-1]) and set(KEYS + EVAL_KEYS) <= set(forecast[-1])
    assert forecast[-1]["hybrid/forecast_low"] < forecast[-1]["hybrid/forecast_high"]


@pytest.mark.parametrize("options", [{}, {"forecast": False}, {"enable_predict": False}])
@pytest.mark.long
def test_hybrid_trainer_forecasts_unless_told_otherwise(tmp_path, options):
    evaluates = {"eval_strategy": "steps", "eval_steps": 10, "eval_dataset": ByteText(16)}
    trainer = trainers.train(tmp_path, **evaluates, **options)
    last = [row for row in trainer.state.log_history if "loss" in row][-1]
    assert (set(KEYS + EVAL_KEYS) <= set(last)) is (not options)
    assert not any(key.startswith("hybrid/") for key in trainer.evaluate()), "searches add metrics up"
    summary = trainer.hybrid_summary()
    if options:
        assert summary["forecast"] is None
        return
    assert summary["forecast"]["low"] < summary["forecast"]["loss"] < summary["forecast"]["high"]
    assert "forecast of the final loss: " in str(summary)
    assert summary["forecast"]["held_out"]["low"] < summary["forecast"]["held_out"]["high"]
    assert "forecast of the final eval loss: " in str(summary)
    run = load_run(tmp_path)
    assert len(run.series("hybrid/forecast_loss")) > 15


def test_a_run_of_five_steps(tmp_path):
    for row in trainers.train(tmp_path, max_steps=5).state.log_history:
        assert row.get("hybrid/forecast_low", 1.0) > 0


class Losses:
    """A `compute_loss_func` that breaks from the given step on, or is constant."""

    def __init__(self, breaks_at=math.inf, constant=None):
        self.breaks_at, self.constant, self.calls = breaks_at, constant, 0

    def __call__(self, outputs, labels, num_items_in_batch=None):
        self.calls += 1
        if self.constant is not None:
            return outputs.logits.float().sum() * 0 + self.constant
        loss = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss if self.calls < self.breaks_at else loss * math.nan


@pytest.mark.parametrize("filtered", [True, False])
def test_a_plain_run_whose_loss_is_not_finite_any_more(tmp_path, train_set, filtered):
    options = {"max_steps": 30, "logging_nan_inf_filter": filtered, "compute_loss_func": Losses(breaks_at=15)}
    options |= {"train_dataset": train_set, "callbacks": [callback := ForecastCallback()]}
    trainers.train(tmp_path, Trainer, TrainingArguments, **options)
    assert callback.forecast.last is None


def test_a_hybrid_run_whose_loss_is_not_finite_any_more(tmp_path, train_set):
    losses = Losses(breaks_at=15)
    trainer = trainers.build(tmp_path, train_dataset=train_set, compute_loss_func=losses, max_steps=50)
    with pytest.raises(TrainingDivergedError):
        trainer.train()
    rows = [row for row in trainer.state.log_history if KEYS[0] in row]
    assert rows[-1]["step"] < 20, "no loss was finite afterwards"
    assert all(row["loss"] > 1 and 0 <= row[KEYS[1]] <= row[KEYS[0]] <= row[KEYS[2]] for row in rows)
    logged = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    assert all(loss == 0 or step < 20 for step, loss in logged.items()), "as Trainer's filter has it"


def test_a_hybrid_run_with_a_constant_loss(tmp_path, train_set):
    losses = Losses(constant=2.0)
    trainer = trainers.train(tmp_path, train_dataset=train_set, compute_loss_func=losses, max_steps=30)
    rows = [row for row in trainer.state.log_history if KEYS[0] in row]
    assert len(rows) > 10
    for row in rows:
        assert row[KEYS[1]] <= 2.0 <= row[KEYS[2]]
    assert rows[-1][KEYS[0]] == pytest.approx(2.0, abs=1e-3) and rows[-1][KEYS[2]] - rows[-1][KEYS[1]] < 0.05
