"""
`hf-hybrid sweep`: what it tries, what becomes of its trials, and that it survives its end.

Most tests put a process in the place of `hf-hybrid train` (rig/stand_in_training.py). Its best rate is 1.5e-3.
"""

import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
import yaml
from conftest import mostly_slow
from optuna.trial import TrialState
from rig.byte_llama import END, byte_tokenizer, llama_config
from rig.processes import ROOT

from hf_hybrid.cli import sweep, trials
from hf_hybrid.cli.main import main
from hf_hybrid.cli.options import TRAINING as TRAINING_COMMANDS
from hf_hybrid.cli.options import CommandLine
from hf_hybrid.cli.sweep import Choices, Range, read_parameter
from hf_hybrid.forecast.final_loss import FinalLoss
from hf_hybrid.integrations import optuna as pruner
from hf_hybrid.saving.lock import own_lock

STEPS = 20
TWO = ("--learning_rate", "1e-3,1.5e-3", "--trials", "2")
WORDS = ("--learning_rate", "1e-5..10", "--trials", "7")


def write_config(folder):
    run = {"model": "m", "dataset": "d.txt", "max_steps": STEPS, "use_cpu": True, "output_dir": str(folder / "out"),
           "report_to": "none", "lr-scheduler-type": "cosine"}  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    return folder / "run.yaml"


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out-sweep"


@pytest.fixture
def start(config, cli):
    """Start a sweep, check how it ended, and return what it wrote to stdout and to stderr."""
    return functools.partial(cli, "sweep", "--config", config)


@pytest.fixture
def made_up(monkeypatch):
    make_up(monkeypatch)


def make_up(monkeypatch):
    """Trials train in no time, and what a trial forecasts is its last loss."""
    monkeypatch.setattr(trials, "PROCESS", (sys.executable, "-S", str(ROOT / "tests" / "rig" / "stand_in_training.py")))
    monkeypatch.setattr(trials, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(pruner, "forecast_final_loss", lambda steps, losses, *more: around(losses[-1]))


def around(loss):
    return FinalLoss(loss, loss - 0.1, loss + 0.1, weights=(1.0,), means=(loss,), deviations=(0.06,))


def trials_in(folder):
    """The trials of a sweep, by what their folders say."""
    return [trial_in(path) for path in sorted(folder.glob("trial-???"))]


def states_in(folder):
    return [trial.state for trial in trials_in(folder)]


def trial_in(folder):
    values = yaml.safe_load((folder / "trial.yaml").read_text())
    outcome = trials.read_outcome(folder) or trials.Outcome(TrialState.RUNNING)
    return SimpleNamespace(state=outcome.state, value=outcome.loss, values=values)


def interrupt(folder):
    """Leave a third trial as a process does that is killed in it."""
    (folder / "trial-002").mkdir()
    shutil.copy(folder / "trial-001" / "trial.yaml", folder / "trial-002")


# What is tried.


@pytest.mark.parametrize("words, sentence", [
    ([], "Nothing is tried. Give `--learning_rate 1e-5..1e-2`"),
    (["--learning_rate", "1e-2..1e-5"], "`1e-2..1e-5` for `learning_rate` must go from a number to a larger one"),
    (["--learning_rate", "0..1e-2"], "must begin above 0"),
    (["--learning_rate", "1e-3"], "is no range and no list"),
    (["--learning_rate", "1..2..3"], "is no range and no list"),
    (["--learning_rate", "a..1"], "invalid float value: 'a'"),
    (["--learning_rate", "1e-3,1e-3"], "names a value twice"),
    (["--learning_rate", "1e-4..1e-2", "--param", "learning-rate=1,2"], "A parameter is given twice: learning_rate"),
    (["--param", "learning_rate"], "`--param learning_rate` must be `NAME=VALUES`"),
    (["--param", "hub_token=a,b"], "`hub_token` cannot be swept"),
    (["--param", "lora_rr=1,2"], "`--lora_rr` is no option. Did you mean `--lora_r`?"),
    (["--param", "lora_r=0,2"], "`lora_r` must be at least 1, got 0"),
    (["--param", "optim=sgd..adamw_torch"], "is a range, and the option takes words"),
    (["--param", "output_dir=a,b"], "`output_dir` cannot be swept"),
    (["--learning_rate", "1e-4..1e-2", "--trials", "0"], "`--trials` must be at least 1, got 0"),
    (["--learning_rate", "1e-4..1e-2", "--threshold", "0.7"], "`threshold=0.7` must be at least 0 and below 0.5"),
])  # fmt: skip
def test_what_cannot_be_tried_is_refused(start, folder, words, sentence):
    _, error = start(*words, status=2)
    assert sentence in error and error.startswith("hf-hybrid sweep: error: ")
    assert not list(folder.glob("trial-*"))


def test_without_optuna_or_held_out_data_there_is_no_sweep(config, start, monkeypatch):
    sweep = functools.partial(start, "--learning_rate", "1e-4..1e-2", status=2)
    config.write_text(config.read_text() + "eval_share: 0\n")
    assert "`eval_share: 0`" in sweep()[1]
    config.write_text(config.read_text().replace("eval_share: 0\n", "early_stopping_patience: 2\n"))
    assert "`early_stopping_patience` does not go with a sweep" in sweep()[1]
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "hf_hybrid.integrations.optuna")
    _, said = sweep()
    assert "need Optuna, which cannot be imported here" in said and 'pip install "hf-hybrid[sweep]"' in said


def test_a_grid_covers_its_range():
    rates = Range("learning_rate", 1e-5, 1e-2)
    assert rates.grid(4) == [1e-5, 1e-4, 1e-3, 1e-2] and trials.distribution(rates).log
    assert Range("weight_decay", 0.0, 0.1).grid(3) == [0.0, 0.05, 0.1]
    assert Range("lora_r", 2, 4).grid(9) == [2, 3, 4]


@pytest.mark.parametrize("best", range(10))
def test_the_search_of_a_grid_finds_the_best_value_without_trying_all(best):
    rates = Range("learning_rate", 1e-5, 1e-2)
    grid, ended = rates.grid(10), {}
    while (value := rates.next_value(10, ended, ())) is not None:
        ended[value] = (0, abs(grid.index(value) - best - 0.1))
    assert min(ended, key=ended.get) == grid[best] and 4 <= len(ended) <= 6


def test_the_search_goes_where_the_better_neighbour_is_and_spreads_what_runs_at_a_time():
    rates = Range("learning_rate", 1e-5, 1e-1)
    low, left, middle, right, high = rates.grid(5)
    assert rates.next_value(5, {}, ()) == middle and rates.next_value(5, {}, [high]) == middle
    tried = {middle: (0, 2.0), low: (1, 4.0), high: (1, 5.0)}
    assert rates.next_value(5, tried, ()) == left and rates.next_value(5, tried, [left]) == right
    assert rates.next_value(5, tried | {left: (0, 1.0)}, ()) is None  # right lies beyond the middle, which is worse
    diverged = {high: (1, float("inf")), right: (1, float("inf"))}
    assert rates.next_value(5, diverged, ()) == left
    assert Choices("optim", ("a", "b")).next_value(2, {"a": (0, 1.0)}, ()) == "b"
    assert Choices("optim", ("a", "b")).next_value(2, {"a": (0, 1.0)}, ["b"]) is None


def test_values_are_read_as_train_reads_them(config):
    assert read_parameter("weight-decay", "0..0.1", str(config)) == Range("weight_decay", 0.0, 0.1)
    assert read_parameter("lora_r", "4..64", str(config)) == Range("lora_r", 4, 64)
    assert read_parameter("enable_predict", "true, false", str(config)).choices == (True, False)
    assert read_parameter("lr_scheduler_type", "linear,cosine", str(config)).choices == ("linear", "cosine")


# What becomes of the trials.


@pytest.mark.processes
def test_a_sweep_finds_the_best_rate_and_ends_the_others_early(config, made_up, start, folder):
    said, _ = start(*WORDS)
    states = {trial.values["learning_rate"]: trial.state for trial in trials_in(folder)}
    assert states == {0.01: TrialState.COMPLETE, 1.0: TrialState.PRUNED, 1e-4: TrialState.PRUNED,
                      1e-3: TrialState.COMPLETE}  # fmt: skip
    assert re.search(r"^ *\d +0.001  20/20  held-out loss 2.0310  <- best$", said, flags=re.M)
    assert "diverged" in said and "ended early; training loss would end at 3.383 (3.283 to 3.483)" in said
    assert re.search(r"4 trials made \d+ steps, \d+% of those of 7 whole trials", said)
    best = CommandLine(["--config", str(folder / "best.yaml")]).options().config
    assert (best.learning_rate, best.lr_scheduler_type, best.max_steps) == (1e-3, "cosine", STEPS)
    assert best.output_dir == str(config.parent / "out") and best.logging_steps == 500
    assert len(list(folder.glob("trial-*/model.safetensors"))) == 1  # the best one's


@pytest.mark.processes
@pytest.mark.parametrize(
    "command, more, best",
    [
        ("sft", {"max_length": 64}, "held-out loss 2.0000"),
        ("dpo", {"beta": 0.2}, "held-out loss 2.0000"),
        ("grpo", {"reward": "numeric_answer", "eval_share": 0.1}, "held-out reward -1.0000"),
    ],
)
def test_every_command_that_trains_is_swept(config, made_up, cli, refused, folder, command, more, best):
    config.write_text(config.read_text() + yaml.safe_dump(more))
    said, _ = cli("sweep", command, "--config", config, *TWO)
    assert f"0.0015  20/20  {best}  <- best" in said and f"for `hf-hybrid {command} --config" in said
    assert "No `learning_rate` that was tried is higher than the best one. Try higher ones too." in said
    assert f"training.py', '{command}', '--config'" in (folder / "trial-000" / "output.txt").read_text()
    written = str(folder / "best.yaml")
    assert CommandLine(["--config", written], TRAINING_COMMANDS[command]).values.learning_rate == 1.5e-3
    assert f"is for another command: `hf-hybrid {command}`" in refused("train", "--config", written)


@pytest.mark.processes
def test_several_parameters_are_tried_together_and_more_trials_go_on(made_up, start, folder):
    words = ["--learning_rate", "9e-4..1.1e-3", "--param", "lora_r=4,8", "--trials"]
    start(*words, "2")
    start(*words, "3")
    tried = [trial.values for trial in trials_in(folder)]
    assert len(tried) == 3 and all(9e-4 <= p["learning_rate"] <= 1.1e-3 and p["lora_r"] in (4, 8) for p in tried)
    assert len({values["learning_rate"] for values in tried}) == 3
    written = yaml.safe_load((folder / "best.yaml").read_text())
    pairs = [(values["learning_rate"], values["lora_r"]) for values in tried]
    assert (written["learning_rate"], written["lora_r"]) in pairs


@pytest.mark.processes
def test_the_same_command_goes_on_and_another_one_is_refused(made_up, start, folder):
    start(*TWO)
    before = files_of(folder)
    start(*TWO)
    assert files_of(folder) == before
    _, said = start("--learning_rate", "1e-3,2e-3", status=2)
    assert "holds a trial with other options or other values" in said


@pytest.mark.processes
def test_a_wider_range_goes_on_and_a_narrower_one_is_refused(made_up, start, folder):
    start("--learning_rate", "1e-3..1.1e-3", "--trials", "2")
    before = trials_in(folder)
    start("--learning_rate", "1e-3..2e-3", "--trials", "3")
    after = trials_in(folder)
    assert after[:2] == before and [trial.values["learning_rate"] for trial in after[2:]] == [0.002]
    _, said = start("--learning_rate", "1.2e-3..2e-3", "--trials", "3", status=2)
    assert "holds a trial with other options or other values" in said


@pytest.mark.processes
def test_an_interrupted_trial_goes_on_as_the_same_trial(made_up, start, folder, monkeypatch):
    start(*TWO)
    interrupt(folder)
    monkeypatch.setattr(trials, "last_checkpoint", lambda folder: "checkpoint-5" if "002" in str(folder) else None)
    assert "trial 2 was interrupted and goes on" in start(*TWO)[0]
    assert states_in(folder) == [TrialState.COMPLETE] * 3
    assert "'--resume_from_checkpoint', 'true'" in (folder / "trial-002" / "output.txt").read_text()
    assert "--resume_from_checkpoint" not in (folder / "trial-001" / "output.txt").read_text()


@pytest.mark.processes
def test_a_trial_that_somebody_works_on_is_left_alone(made_up, start, folder):
    start(*TWO)
    interrupt(folder)
    with own_lock(folder / "trial-002.lock"):
        start(*TWO)
    assert trials_in(folder)[2].state == TrialState.RUNNING


@pytest.mark.processes
def test_a_file_system_without_locks_is_said_and_stops_no_sweep(made_up, monkeypatch, start, folder):
    """Not either where a sweep that was killed left the file."""
    import fcntl

    def refuses(*args):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    folder.mkdir()
    for name in ("sweep.lock", "trial-000.lock"):
        (folder / name).write_text("4711\nanother\n")
    monkeypatch.setattr(fcntl, "flock", refuses)
    assert start(*TWO)[0].count("cannot be locked") == 1
    assert states_in(folder) == [TrialState.COMPLETE] * 2


@pytest.mark.processes
def test_commands_at_a_time_make_each_trial_once(config, made_up, folder, monkeypatch):
    monkeypatch.setattr(sweep, "quiet_imports", contextlib.nullcontext)  # which is for one thread
    words = ["sweep", "--config", str(config), "--learning_rate", "1e-3,1.1e-3,1.2e-3,1.3e-3", "--trials", "4"]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(main, [words] * 2)) == [0, 0]
    rates = [trial.values["learning_rate"] for trial in trials_in(folder)]
    assert sorted(rates) == [1e-3, 1.1e-3, 1.2e-3, 1.3e-3] and set(states_in(folder)) == {TrialState.COMPLETE}


@pytest.mark.processes
def test_a_sweep_whose_trials_cannot_begin_ends_at_once(made_up, start, folder):
    out, err = start("--learning_rate", "666,667", "--trials", "2", status=1)
    assert "failed: it does not work" in out and "no trial finished" in err
    assert states_in(folder) == [TrialState.FAIL]


# Secrets.

SECRETS = {"hub_token": "hf_s3cret", "WANDB_API_KEY": "s3cret-key", "PLAIN": "s3cret-value"}


def files_with(folder, text):
    return {path.name for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()}


@pytest.mark.processes
def test_no_file_of_a_sweep_holds_a_secret_and_every_trial_has_them(config, made_up, start, folder, monkeypatch):
    for name in ("WANDB_API_KEY", "PLAIN"):
        monkeypatch.setenv(name, "of another run")
    before = config.read_text()
    given = {"hub_token": SECRETS["hub_token"], "env": {name: SECRETS[name] for name in ("WANDB_API_KEY", "PLAIN")}}
    config.write_text(before + yaml.safe_dump({**given, "run_name": "https://me:s3cret@host/x"}))
    words = ["--learning_rate", "1e-3,1.5e-3,2e-3", "--trials"]
    start(*words, "2")
    start(*words, "3")
    assert files_with(folder, "s3cret") == set()
    private = json.dumps({"hub_token": SECRETS["hub_token"], "run_name": "https://me:s3cret@host/x"})
    expected = {"HF_HYBRID_PRIVATE_OPTIONS": private, **SECRETS}
    for number in range(3):
        printed = (folder / f"trial-00{number}" / "output.txt").read_text()
        for name in ("HF_HYBRID_PRIVATE_OPTIONS", "WANDB_API_KEY", "PLAIN"):
            assert f"{name} {hashlib.sha256(expected[name].encode()).hexdigest()}" in printed
    best = (folder / "best.yaml").read_text()
    assert best.startswith("# Left out, because it may be secret: `hub_token`, `run_name`, `PLAIN` under `env`, ")
    assert not {"env", "hub_token", "run_name"} & set(yaml.safe_load(best))
    config.write_text(before + yaml.safe_dump({"hub_token": "hf_another", "env": {"WANDB_API_KEY": "a new one"}}))
    start(*words, "3")  # a key may change between two starts


@pytest.mark.processes
def test_what_a_trial_prints_is_private_and_its_reason_is_without_secrets(config, made_up, start, folder):
    config.write_text(config.read_text() + yaml.safe_dump({"env": {"PLAIN": "s3cret-value"}}))
    out, _ = start("--learning_rate", "666,667", "--trials", "2", status=1)
    assert "failed: it does not work, says REMOVED" in out, "and not the progress bar after it"
    assert files_with(folder, "s3cret") == {"output.txt"}
    assert (folder / "trial-000" / "output.txt").stat().st_mode & 0o777 == 0o600


# Trials that are killed.


@pytest.mark.processes
@pytest.mark.parametrize("number", mostly_slow([signal.SIGKILL, signal.SIGTERM], [signal.SIGKILL]))
def test_a_trial_that_was_killed_goes_on_as_the_same_trial(made_up, start, folder, monkeypatch, number):
    monkeypatch.setenv("KILLED_BY", str(int(number)))
    was_killed = lambda folder: "out/checkpoint-5" if (folder / "was-killed").exists() else None  # noqa: E731
    monkeypatch.setattr(trials, "last_checkpoint", was_killed)
    said, _ = start("--learning_rate", "7e-4,1.5e-3", "--trials", "2")
    assert f"trial 0 was killed by {number.name} after `checkpoint-5`\ntrial 0 was interrupted and goes on" in said
    assert states_in(folder) == [TrialState.COMPLETE] * 2
    assert (folder / "trial-000" / "output.txt").read_text().count("'--resume_from_checkpoint', 'true'") == 1


@pytest.mark.processes
def test_a_trial_that_is_killed_again_and_again_has_failed(made_up, start, folder):
    said, _ = start("--learning_rate", "8e-4,1.5e-3", "--trials", "2")
    assert "failed: killed by SIGKILL 3 times without a checkpoint; is memory short?" in said
    assert states_in(folder) == [TrialState.FAIL, TrialState.COMPLETE]


@pytest.mark.parametrize("status, name", [(-9, "SIGKILL"), (137, "SIGKILL"), (143, "SIGTERM"), (-signal.SIGSEGV, None),
                                          (1, None), (2, None), (0, None)])  # fmt: skip
def test_a_signal_from_outside_is_told_from_an_error(status, name):
    assert trials._signal(status) == name


@pytest.mark.processes
@pytest.mark.parametrize("text", mostly_slow(["", '{"eval_lo', "[]", '{"eval_loss": "low"}', "{}"], ['{"eval_lo']))
def test_results_that_were_cut_short_are_made_again(made_up, start, folder, text):
    start(*TWO)
    interrupt(folder)
    (folder / "trial-002" / "eval_results.json").write_text(text)  # killed while Trainer wrote it
    start(*TWO)
    assert states_in(folder) == [TrialState.COMPLETE] * 3


def test_a_training_that_was_told_to_end_early_has_no_result(tmp_path):
    (tmp_path / "eval_results.json").write_text('{"eval_loss": 2.5}')
    assert trials.held_out_loss(tmp_path) == 2.5
    (tmp_path / "trainer_state.json").write_text('{"global_step": 3, "max_steps": 20}')
    assert trials.held_out_loss(tmp_path) is None and trials.ended_early(tmp_path)
    (tmp_path / "trainer_state.json").write_text('{"global_step": 20, "max_steps": 20}')
    assert trials.held_out_loss(tmp_path) == 2.5
    (tmp_path / "eval_results.json").write_text("{")
    (tmp_path / "all_results.json").write_text('{"eval_loss": 2.5, "train_loss": 3}')
    assert trials.held_out_loss(tmp_path) == 2.5, "Trainer writes it there, too"
    (tmp_path / "all_results.json").write_text('{"eval_loss": NaN}')
    assert math.isnan(trials.held_out_loss(tmp_path))


def test_a_sweep_on_a_full_disk_ends_with_a_sentence(made_up, start, monkeypatch):
    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trials.Trials, "_choose", full)
    _, said = start(*TWO, status=1)
    assert "hf-hybrid sweep: error: [Errno 28] No space left on device The same command goes on" in said


# Folders, which are all that a sweep knows.


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    made = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        make_up(patch)
        assert main(["sweep", "--config", str(write_config(made)), *WORDS]) == 0
    return made / "out-sweep"


@pytest.fixture
def finished(kept, folder, made_up):
    """The folder of a finished sweep, with trials of every kind but failed ones."""
    return shutil.copytree(kept, folder)


def files_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("trial-*/*")}


@pytest.mark.processes
def test_nothing_else_is_needed_to_go_on(finished, start):
    folder = finished
    before = files_of(folder)
    for path in folder.glob("*"):
        if path.is_file():
            path.unlink()
    (folder / "sweep.db").write_text("of an older version")
    (folder / "trial-004").mkdir()  # as a sweep leaves it that dies while it begins a trial
    out, err = start(*WORDS)
    assert files_of(folder) == before, "nothing was trained again, and nothing deleted"
    assert re.search(r"0.001  20/20  held-out loss 2.0310  <- best$", out, flags=re.M) and not err
    assert (folder / "best.yaml").exists() and (folder / "sweep.db").read_text() == "of an older version"


@pytest.mark.processes
@pytest.mark.parametrize("content", ["[", '{"state": "complete"}'])
def test_a_trial_whose_outcome_is_damaged_goes_on(finished, start, content):
    [best] = [path.parent for path in finished.glob("trial-*/model.safetensors")]
    outcome = best / "outcome.json"
    whole = outcome.read_text()
    outcome.write_text(content)
    assert f"trial {int(best.name[-3:])} was interrupted and goes on" in start(*WORDS)[0]
    assert outcome.read_text() == whole


@pytest.mark.processes
def test_folders_of_an_older_version_tell_what_they_can(finished, start):
    """Without `outcome.json`: a finished trial is one with results, and any other goes on."""
    [weights] = finished.glob("trial-*/model.safetensors")
    saved = weights.stat().st_mtime_ns
    for path in finished.glob("trial-*/outcome.json"):
        path.unlink()
    assert "<- best" in start(*WORDS)[0] and weights.stat().st_mtime_ns == saved


@pytest.mark.processes
def test_what_cannot_be_told_is_refused_and_nothing_is_deleted(config, finished, start):
    def refused(*words):
        before = files_of(finished)
        _, said = start(*words, status=2)
        assert said.count("\n") == 1 and said.startswith("hf-hybrid sweep: error: ")
        assert files_of(finished) == before
        return said

    assert "holds a trial with other options or other values" in refused("--learning_rate", "1e-6..1e-5")
    config.write_text(config.read_text() + "weight_decay: 0.5\n")
    assert "holds a trial with other options or other values" in refused(*WORDS)
    config.write_text(config.read_text().replace("weight_decay: 0.5\n", ""))
    (finished / "trial-001" / "trial.yaml").write_text("[")
    assert "nothing says which values the trial had" in refused(*WORDS)
    shutil.rmtree(finished / "trial-001")
    assert "failed: its folder is missing" in start(*WORDS)[0]


# Links and what lies in the way.


@pytest.mark.processes
def test_a_sweep_writes_through_no_link(made_up, start, folder):
    precious = folder.with_name("precious")
    precious.mkdir()
    for name in ("file", "checkpoint-3", "model.safetensors"):
        (precious / name).write_text("of another user")
    folder.mkdir()
    (folder / "trial-000").symlink_to(precious)
    (folder / "best.yaml").symlink_to(precious / "file")
    start(*TWO)
    assert {path.name for path in precious.iterdir()} == {"file", "checkpoint-3", "model.safetensors"}
    assert {path.read_text() for path in precious.iterdir()} == {"of another user"}
    assert not any((folder / name).is_symlink() for name in ("best.yaml", "trial-000"))
    # A trial that goes on finds links where its own files are.
    interrupt(folder)
    for name in ("output.txt", "outcome.json"):
        (folder / "trial-002" / name).symlink_to(precious / "file")
    start(*TWO)
    assert (precious / "file").read_text() == "of another user"
    assert trials_in(folder)[2].state == TrialState.COMPLETE


# Real trainings.


@pytest.mark.processes
@pytest.mark.slow
def test_a_killed_sweep_leaves_no_process_and_goes_on(tmp_path, folder):
    from cli.test_cli import TEXTS

    byte_tokenizer(eos_token=END).save_pretrained(tmp_path / "model")
    llama_config(max_position_embeddings=64).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS), encoding="utf-8")
    run = {"model": str(tmp_path / "model"), "dataset": str(tmp_path / "text.txt"), "sequence_length": 32,
           "max_steps": 200, "save_steps": 20, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
           "dataloader_pin_memory": False, "output_dir": str(tmp_path / "out")}  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    words = ["--learning_rate", "1e-3,2e-3", "--trials", "2", "--threshold", "0"]
    command = [sys.executable, "-m", "hf_hybrid", "sweep", "--config", str(tmp_path / "run.yaml"), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(list(folder.glob("trial-001/checkpoint-*"))) < 2:  # the first one is whole
        assert killed.poll() is None
        time.sleep(0.2)
    training = psutil.Process(killed.pid).children()
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert len(training) == 1 and not psutil.wait_procs(training, timeout=20)[1]

    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "trial 1 was interrupted and goes on" in done.stdout
    assert "2 trials made 400 steps, 100% of those of 2 whole trials" in done.stdout
    assert states_in(folder) == [TrialState.COMPLETE] * 2
    log = [json.loads(line) for line in (folder / "trial-001" / "hybrid_log.jsonl").read_text().splitlines()]
    assert [line["step"] > 0 for line in log if "begun" in line] == [False, True]  # from its checkpoint
    best = CommandLine(["--config", str(folder / "best.yaml")]).options().config
    assert best.learning_rate in (1e-3, 2e-3)
