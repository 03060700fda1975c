"""`hyperparameter_search`: every trial has its own model and its own folder, and the best run is the best."""

import itertools
import math
import os

import pytest
from conftest import HERE, ByteText, config_values, hybrid_config, mostly_slow, tiny_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_hybrid import HybridTrainer, MemoryProfilerCallback
from hf_hybrid.records.log import load_log
from hf_hybrid.report.run_folder import load_run
from hf_hybrid.saving.manifest import read_manifest

RATES = (1e-4, 1e-2, 1e-3)
MODES = {"leaps": {}, "no_leaps": {"enable_predict": False}}
EVALUATED = {"max_steps": 12, "eval_strategy": "steps", "eval_steps": 4}


@pytest.fixture(autouse=True)
def quiet_optuna():
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def trainer_of(args, kind=HybridTrainer, **options):
    data = {"train_dataset": ByteText(64), "eval_dataset": ByteText(8, offset=64)}
    return kind(args=args, model_init=lambda trial=None: tiny_model(), **{**data, **options})


def space(trial):
    return {"learning_rate": trial.suggest_categorical("learning_rate", RATES)}


def search(trainer, backend="optuna", trials=3, hp_space=space, **options):
    """Try `RATES`, and return the best run and all trials of Optuna."""
    study = None
    if backend == "optuna":
        import optuna

        study = {"study_name": "search", "storage": optuna.storages.InMemoryStorage()}
        options = {"sampler": optuna.samplers.GridSampler({"learning_rate": RATES}, seed=0), **study, **options}
    best = trainer.hyperparameter_search(
        hp_space=hp_space,
        compute_objective=lambda metrics: metrics["eval_loss"],
        backend=backend,
        direction="minimize",
        n_trials=trials,
        **options,
    )
    return best, optuna.load_study(**study).trials if study else None


@pytest.mark.parametrize(
    "save_strategy, mode",
    mostly_slow(list(itertools.product(("no", "steps"), MODES)), [("no", "no_leaps"), ("steps", "leaps")]),
)
def test_a_search_finds_the_best_of_its_trials(mode, save_strategy, tmp_path):
    args = hybrid_config(tmp_path, **EVALUATED, save_strategy=save_strategy, save_steps=4, **MODES[mode])
    trainer = trainer_of(args)
    best, trials = search(trainer)
    trials = {trial.number: trial for trial in trials}
    assert len({trial.value for trial in trials.values()}) == len(RATES)
    assert best.objective == min(trial.value for trial in trials.values())
    for number, trial in trials.items():
        # The folder of a trial has its own log, checkpoints and record.
        folder, loss = tmp_path / f"run-{number}", trial.value
        held_out = [line["eval_loss"] for line in load_log(folder).lines if "eval_loss" in line]
        assert len(held_out) == 3 and held_out[-1] == loss
        assert load_run(folder).last_step == 12 and load_run(folder).series("eval_loss")[-1] == (12, loss)
        checkpoints = sorted(path.name for path in folder.glob("checkpoint-*"))
        assert checkpoints == (["checkpoint-12", "checkpoint-4", "checkpoint-8"] if save_strategy == "steps" else [])
        assert (folder / "hybrid_summary.json").exists() == (mode == "leaps")
        for path in checkpoints:
            assert f"checkpoint-{read_manifest(folder / path).step}" == path
    assert not list(tmp_path.glob("hybrid_*")) and not list(tmp_path.glob("checkpoint-*"))
    # What Trainer's documentation does next: train with the values found.
    trainer.args.learning_rate = best.hyperparameters["learning_rate"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == best.objective
    assert load_log(tmp_path).lines[-1]["eval_loss"] == best.objective


def test_without_leaps_the_trials_are_those_of_trainer(tmp_path):
    plain = trainer_of(TrainingArguments(**config_values(tmp_path / "plain", **EVALUATED)), Trainer)
    ours = trainer_of(hybrid_config(tmp_path / "ours", **EVALUATED, enable_predict=False))
    expected, found = ([trial.value for trial in search(t)[1]] for t in (plain, ours))
    assert found == expected


def test_a_trial_is_named_by_its_values_and_has_a_profile_of_its_own(tmp_path):
    trainer = trainer_of(hybrid_config(tmp_path, **EVALUATED), callbacks=[MemoryProfilerCallback()])
    search(trainer, trials=2, hp_name=lambda trial: f"rate-{trial.params['learning_rate']}")
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert len(folders) == 2 and all(name.startswith("rate-") for name in folders)
    for name in folders:
        assert (tmp_path / name / "profile" / "steps.jsonl").is_file()


def test_trials_that_draw_the_same_values_share_a_folder(tmp_path):
    """As with Trainer: the second one replaces the checkpoints of the first."""
    trainer = trainer_of(
        hybrid_config(tmp_path, **EVALUATED, enable_predict=False, save_strategy="steps", save_steps=4)
    )
    search(trainer, trials=2, hp_name=lambda trial: "same")
    assert read_manifest(tmp_path / "same" / "checkpoint-12").step == 12


@pytest.mark.parametrize("mode", MODES)
def test_pruned_and_failed_trials_leave_nothing_to_the_next(mode, tmp_path):
    import optuna

    class Second(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.number == 1

    class Fails(TrainerCallback):
        has_failed = False

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 8 and not self.has_failed:  # with leaps a leap is open there
                self.has_failed = True
                raise ArithmeticError("bad luck")

    trainer = trainer_of(hybrid_config(tmp_path / "bad", **EVALUATED, **MODES[mode]), callbacks=[Fails()])
    best, trials = search(trainer, catch=(ArithmeticError,), pruner=Second())
    states = [trial.state.name for trial in trials]
    assert states == ["FAIL", "PRUNED", "COMPLETE"]
    alone = trainer_of(hybrid_config(tmp_path / "alone", **EVALUATED, **MODES[mode]))
    alone.args.learning_rate = best.hyperparameters["learning_rate"]
    alone.train()
    assert best.objective == alone.evaluate()["eval_loss"]
    assert trainer.hybrid_summary()["real_steps"] == alone.hybrid_summary()["real_steps"]


def test_streamed_models_are_planned_anew_in_each_trial(tmp_path):
    options = {"memory": "stream", "enable_predict": False, "optim": "adamw_torch"}
    streamed, _ = search(trainer_of(hybrid_config(tmp_path / "streamed", **EVALUATED, **options)), trials=2)
    resident, _ = search(trainer_of(hybrid_config(tmp_path / "resident", **EVALUATED, enable_predict=False)), trials=2)
    assert math.isfinite(streamed.objective)
    assert streamed.objective == pytest.approx(resident.objective, rel=1e-4)


def test_cards_and_summaries_after_a_search(tmp_path):
    trainer = trainer_of(hybrid_config(tmp_path, **EVALUATED))
    search(trainer, trials=1)
    assert trainer.model is None  # Trainer lets go of it
    assert trainer.hybrid_summary()["real_steps"] and str(trainer.hybrid_summary())
    trainer.create_model_card()  # there is nothing to describe, and no error
    assert not (tmp_path / "README.md").exists()


@pytest.mark.parametrize("mode", MODES)
def test_a_search_with_ray(mode, tmp_path):
    ray = pytest.importorskip("ray", reason="`pip install ray[tune]` to run it")
    # Its processes import this file, and what it imports.
    found = {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": found})
    try:
        trainer = trainer_of(hybrid_config(tmp_path / "out", **EVALUATED, **MODES[mode]))
        best, _ = search(
            trainer,
            backend="ray",
            trials=1,
            hp_space=lambda _: {"learning_rate": ray.tune.grid_search(list(RATES))},
            resources_per_trial={"cpu": 1},
            storage_path=str(tmp_path / "ray"),
            verbose=0,
        )
    finally:
        ray.shutdown()
    results = {trial.config["learning_rate"]: trial.last_result for trial in best.run_summary.trials}
    assert best.objective == min(result["objective"] for result in results.values()) and len(results) == len(RATES)
    folders = [path for path in (tmp_path / "out").iterdir() if path.name.startswith("run-")]
    assert [load_log(path).lines[-1]["step"] for path in folders] == [12] * len(RATES)
