"""What a run shows while it goes on: the bar, lines on the console, the table in a notebook, and what is logged."""

import ast
import json
import re
from pathlib import Path

import psutil
import torch
from conftest import ByteText, hybrid_config, tiny_model
from rig import trainers
from transformers import ProgressCallback, Trainer, TrainingArguments
from transformers.integrations.integration_utils import rewrite_logs

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.records.progress import HybridProgressCallback, PositionBar, memory_in_use, short_logs
from hf_hybrid.records.summary import RunPosition

ROOT = Path(__file__).parents[2]
STEPS = 15


def make(folder, config=hybrid_config, trainer_class=HybridTrainer, **overrides):
    values = {"max_steps": STEPS, "disable_tqdm": False, "eval_dataset": ByteText(8, offset=500), **overrides}
    return trainers.build(folder, trainer_class, config, samples=200, **values)


def console(text: str) -> list[str]:
    """The bars and lines of what went to a terminal."""
    return [part.strip() for part in re.split(r"[\r\n]|\x1b\[A", text) if part.strip()]


# The console.


def test_one_bar_says_phase_loss_and_memory(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(PositionBar, "__init__", drawn_at_every_step(PositionBar.__init__))
    make(tmp_path, logging_steps=4).train()
    bars = [part for part in console(capfd.readouterr().err) if f"/{STEPS} [" in part]
    first = [bar for bar in bars if re.search(rf"\D0/{STEPS} ", bar)]
    assert len(first) == 1 and "phase=warmup gib=" in first[0]
    said = {
        int(step): rest
        for step, rest in (re.search(rf"(\d+)/{STEPS} \[.*?, (phase=.*)\]", bar).groups() for bar in bars)
    }
    phases = {
        re.fullmatch(r"phase=(\w+) loss=\d\.\d\d gib=\d\.\d", rest).group(1) for step, rest in said.items() if step
    }
    assert phases == {"warmup", "full", "predict", "correct"}
    assert len(said) == STEPS + 1 and bars[-1].startswith("100%")


def drawn_at_every_step(original):
    def init(self, *args, **kwargs):
        original(self, *args, mininterval=0, miniters=1, **kwargs)

    return init


def test_memory_is_read_when_the_bar_is_drawn(tmp_path, capfd, monkeypatch):
    read = []
    monkeypatch.setattr("hf_hybrid.records.of_trainer.memory_in_use", lambda device: read.append(device) or 3 << 30)
    original = PositionBar.__init__
    slow = {"mininterval": 3600, "maxinterval": 7200}
    monkeypatch.setattr(PositionBar, "__init__", lambda self, *a, **k: original(self, *a, **k, **slow))
    make(tmp_path, logging_steps=100).train()
    assert "gib=3.0" in capfd.readouterr().err
    assert len(read) < STEPS // 2


def test_console_lines_are_short_and_the_log_is_whole(tmp_path, capfd):
    trainer = make(tmp_path, logging_steps=5, eval_strategy="steps", eval_steps=5)
    trainer.train()
    lines = [ast.literal_eval(line) for line in console(capfd.readouterr().out) if line.startswith("{")]
    training = [line for line in lines if "loss" in line]
    assert len(training) == 3
    for line in training:
        assert set(line) - {"grad_norm"} == {"loss", "learning_rate", "epoch", "phase", "leaps", "predicted"}
    assert training[-1]["predicted"] == trainer.hybrid_summary()["predicted_steps"] > 0
    assert {line["phase"] for line in training} <= {"warmup", "full", "predict", "correct"}
    assert sum("eval_loss" in line and "eval_runtime" in line for line in lines) == 3
    assert "train_loss" in lines[-1]
    assert sum("hybrid/credit" in entry for entry in trainer.state.log_history) == 3


def test_other_values_are_shown():
    logs = {"loss": 2.0, "mean_token_accuracy": 0.5, "mine/score": 1, "memory/rss_gib": 1.0, "hybrid/credit": 0.5}
    assert short_logs(logs) == {"loss": 2.0, "mean_token_accuracy": 0.5, "mine/score": 1}
    assert len(logs) == 5  # it belongs to the callbacks behind


def test_without_bars(tmp_path, capfd):
    make(tmp_path, disable_tqdm=True, logging_steps=5).train()
    shown = capfd.readouterr()
    assert "it/s" not in shown.err + shown.out and f"/{STEPS}" not in shown.err
    assert shown.out.count("'hybrid/phase'") == 3  # entries whole, by Trainer's own printer


def test_without_phases_the_bar_is_trainers(tmp_path, capfd):
    shown, kinds = [], []
    plain, ours = {"config": TrainingArguments, "trainer_class": Trainer}, {"enable_predict": False}
    ours["config"] = HybridConfig
    for index, arm in enumerate((plain, ours)):
        trainer = make(tmp_path / str(index), logging_steps=5, **arm)
        kinds.append([type(callback) for callback in trainer.callback_handler.callbacks])
        trainer.train()
        found = capfd.readouterr()
        lines = [line for line in console(found.out) if "runtime" not in line]
        shown.append(([re.sub(r"\[.*", "", bar) for bar in console(found.err) if bar.startswith("100%")][-1:], lines))
    assert kinds[0] == kinds[1] and ProgressCallback in kinds[0]
    assert shown[0] == shown[1] and len(shown[0][1]) == 3 and "phase" not in str(shown[0])


def test_a_progress_callback_of_the_user_stays(tmp_path, capfd):
    class Mine(ProgressCallback):
        pass

    args = hybrid_config(tmp_path, max_steps=2, disable_tqdm=True)
    trainer = HybridTrainer(tiny_model(), args, train_dataset=ByteText(100), callbacks=[Mine()])
    assert [type(cb) for cb in trainer.callback_handler.callbacks if isinstance(cb, ProgressCallback)] == [Mine]
    trainer.remove_callback(ProgressCallback)  # as users take Trainer's bar away
    args.disable_tqdm = False
    trainer = HybridTrainer(tiny_model(), args, train_dataset=ByteText(100))
    assert sum(isinstance(cb, HybridProgressCallback) for cb in trainer.callback_handler.callbacks) == 1
    trainer.remove_callback(ProgressCallback)
    trainer.train()
    assert "it/s" not in capfd.readouterr().err


def test_memory_in_use(monkeypatch):
    resident = memory_in_use(torch.device("cpu"))
    assert 0.5 < resident / psutil.Process().memory_info().rss < 2
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * 2**30 if device.index == 1 else 0)
    assert memory_in_use(torch.device("cuda:1")) == 5 * 2**30
    assert str(RunPosition("predict", 2.3094, int(5.1 * 2**30))) == "phase=predict loss=2.31 gib=5.1"


def test_outside_of_a_run_there_is_no_position(tmp_path):
    trainer = make(tmp_path, max_steps=4, disable_tqdm=True)
    assert trainer.run_position() is None
    trainer.train()
    assert trainer.run_position() is None


# Notebooks.


def test_first_cell_installs_from_where_the_notebook_is():
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))
    first = next("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    path, extra = re.fullmatch(r'%pip install --quiet "(\.\.)\[(\w+)\]"', first).groups()
    project = (ROOT / "examples" / path / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(rf"^{extra} = \[", project, re.M)


# What is logged.


def documented(prefix: str) -> list[str]:
    text = (ROOT / "docs" / "logging.md").read_text(encoding="utf-8")
    return re.findall(rf"^\| `({prefix}\w+)` \| [^|]+ \| [^|]+ \|$", text, re.M)


def test_the_page_lists_every_value(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 10, "auto_lr": "on", "planner": "dynamics"}
    trainer = make(tmp_path, disable_tqdm=True, max_steps=20, **options)
    output = trainer.train()
    history = trainer.state.log_history
    assert {entry["hybrid/phase"] for entry in history if "loss" in entry} == {0, 1, 3}
    steps = [entry for entry in history if "learning_rate" in entry]
    assert {entry["hybrid/phase"] for entry in steps} == {0, 1, 2, 3}
    forecast = {key for key in documented("hybrid/") if "forecast" in key}  # from the fifth loss on
    for entry in steps:
        assert {key for key in entry if key.startswith("hybrid")} - forecast == {*documented("hybrid/")} - forecast
    assert forecast <= set([entry for entry in history if "loss" in entry][-1])
    assert sorted(key for key in output.metrics if key.startswith("hybrid")) == sorted(documented("hybrid_"))
    known = [*documented("hybrid/"), *documented("hybrid_")]
    assert len(known) == len(set(known)) and all(key in known for e in history for key in e if key.startswith("hybrid"))


def test_trackers_show_the_values_as_the_page_says():
    assert list(rewrite_logs({"hybrid/phase": 1})) == ["train/hybrid/phase"]
    assert "`train/hybrid/phase`" in (ROOT / "docs" / "logging.md").read_text(encoding="utf-8")
