"""The pruner that compares where trials will end: its verdicts, its schedules, and a search of plain `Trainer`."""

import math

import optuna
import pytest
from conftest import ByteText, config_values, tiny_model
from optuna.trial import TrialState, create_trial
from transformers import Trainer, TrainingArguments

from hf_hybrid import ForecastPruner
from hf_hybrid.forecast.final_loss import FinalLoss
from hf_hybrid.integrations import optuna as module
from hf_hybrid.integrations.optuna import scheduled_rates

RATE = optuna.distributions.FloatDistribution(1e-6, 1.0, log=True)


@pytest.fixture
def args(tmp_path):
    return TrainingArguments(**config_values(tmp_path, max_steps=100))


@pytest.fixture
def forecasts(monkeypatch):
    """Forecasts that are told, by the last loss that was seen; any other loss is too little to know."""
    told = {}
    monkeypatch.setattr(module, "forecast_final_loss", lambda steps, losses, *more: told.get(losses[-1]))
    return told


def interval(middle, half):
    return FinalLoss(middle, middle - half, middle + half, (1.0,), (middle,), (half / 1.645,))


def study_of(pruner, *trials):
    """A study whose trials have these losses by step; the last one is asked about."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(pruner=pruner)
    for losses in trials:
        study.add_trial(
            create_trial(
                state=TrialState.COMPLETE if losses.get(90) else TrialState.RUNNING,
                value=losses.get(90),
                params={"learning_rate": 1e-3},
                distributions={"learning_rate": RATE},
                intermediate_values=losses,
            )
        )
    return study, study.trials[-1]


def verdict(pruner, *trials):
    return pruner.prune(*study_of(pruner, *trials))


def test_a_trial_ends_when_it_cannot_beat_what_its_rival_is_sure_to_reach(args, forecasts):
    forecasts |= {3.0: interval(3.0, 0.1), 4.0: interval(4.0, 0.3), 3.2: interval(3.2, 0.3)}
    pruner = ForecastPruner(args)
    assert verdict(pruner, {50: 3.0}, {50: 4.0})
    assert not verdict(ForecastPruner(args), {50: 3.0}, {50: 3.2})
    assert not verdict(ForecastPruner(args), {50: 4.0}, {50: 3.0})  # the best one never
    assert not verdict(ForecastPruner(args, threshold=0.0), {50: 3.0}, {50: 4.0})


def test_what_is_not_known_ends_no_trial_and_what_is_not_finite_does(args, forecasts):
    forecasts |= {3.0: interval(3.0, 0.1), 9.0: interval(9.0, 0.1)}
    assert not verdict(ForecastPruner(args), {50: 3.0}, {})
    assert not verdict(ForecastPruner(args), {50: 3.0}, {2: 8.0})  # too little is known
    assert not verdict(ForecastPruner(args), {50: 8.0}, {50: 9.0})  # of the rival too
    assert not verdict(ForecastPruner(args), {50: 3.0}, {100: 9.0})  # nothing is left to save
    for loss in (math.nan, math.inf):
        assert verdict(ForecastPruner(args), {50: 8.0, 51: loss})
        assert not verdict(ForecastPruner(args), {50: 3.0, 51: loss}, {50: 9.0})  # is no rival


def test_a_trial_that_failed_before_its_first_loss_stands_last(args, forecasts):
    forecasts |= {3.0: interval(3.0, 0.1)}
    pruner = ForecastPruner(args)
    study, _ = study_of(pruner, {50: 3.0})
    study.add_trial(create_trial(state=TrialState.FAIL))
    assert pruner.standing(study.trials[-1]) == (1, math.inf)


def test_wrong_use_is_refused(args, forecasts, tmp_path):
    with pytest.raises(ValueError, match="`threshold=0.5` must be at least 0 and below 0.5"):
        ForecastPruner(args, threshold=0.5)
    upwards = optuna.create_study(direction="maximize")
    with pytest.raises(ValueError, match="direction='minimize'"):
        ForecastPruner(args).prune(upwards, study_of(None, {5: 3.0})[1])
    by_epochs = ForecastPruner(TrainingArguments(**config_values(tmp_path, max_steps=-1)))
    with pytest.raises(ValueError, match="`max_steps=-1` does not say how many steps trial 0 has"):
        verdict(by_epochs, {5: 3.0})


@pytest.mark.parametrize("options", [
    {"lr_scheduler_type": "linear", "warmup_steps": 0.1},
    {"lr_scheduler_type": "cosine", "warmup_steps": 5},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    {"lr_scheduler_type": "constant"},
], ids=lambda options: options["lr_scheduler_type"])  # fmt: skip
def test_the_rates_are_those_of_trainer(options, tmp_path):
    args = TrainingArguments(**config_values(tmp_path, **options))
    trainer = Trainer(tiny_model(), args)
    trainer.create_optimizer_and_scheduler(30)
    used = []
    for _ in range(30):
        used.append(trainer.lr_scheduler.get_last_lr()[0])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert scheduled_rates(args, 30, {}) == pytest.approx(used)
    doubled = scheduled_rates(args, 30, {"learning_rate": 2 * args.learning_rate, "lora_r": 8})
    assert doubled == pytest.approx([2 * rate for rate in used])


def test_a_search_of_plain_trainer_ends_trials(tmp_path, forecasts):
    values = config_values(tmp_path, max_steps=12, eval_strategy="steps", eval_steps=3, logging_steps=12)
    args = TrainingArguments(**values)

    class Pruner(ForecastPruner):
        def prune(self, study, trial):
            loss = trial.intermediate_values[trial.last_step]
            forecasts[loss] = interval(loss, 0.01)
            return super().prune(study, trial)

    def space(trial):
        rate = (1e-2, 1e-6)[trial.number]
        return {"learning_rate": trial.suggest_float("learning_rate", rate, rate)}

    trainer = Trainer(
        None, args, train_dataset=ByteText(48), eval_dataset=ByteText(8, 48), model_init=lambda: tiny_model()
    )
    options = {"storage": f"sqlite:///{tmp_path}/study.db", "study_name": "search", "pruner": Pruner(args)}
    best = trainer.hyperparameter_search(space, n_trials=2, direction="minimize", backend="optuna", **options)
    assert best.hyperparameters["learning_rate"] == 1e-2
    trials = optuna.load_study(study_name="search", storage=options["storage"]).trials
    assert [(trial.state, trial.last_step) for trial in trials] == [(TrialState.COMPLETE, 12), (TrialState.PRUNED, 3)]
