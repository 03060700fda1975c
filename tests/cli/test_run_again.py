"""The same command goes on, another run is refused or moved aside, and nothing that a run saved is lost."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from conftest import ByteText, mostly_slow, tiny_model
from rig.byte_llama import END, byte_tokenizer, llama_config
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.cli import progress
from hf_hybrid.saving.manifest import checkpoints_of, step_of

TRAIN = ["--model", "model", "--sequence_length", "32", "--max_steps", "6", "--save_steps", "2", "--use_cpu"]
TRAIN += ["--per_device_train_batch_size", "2", "--report_to", "none", "--eval_share", "0", "--disable_tqdm", "true"]


class Killed(BaseException):
    """Ends a run as a kill does: nobody handles it."""


class Ends(TrainerCallback):
    """Ends a training at a step, by a kill or by Ctrl-C."""

    def __init__(self, step, interrupt=False):
        self.step, self.interrupt = step, interrupt

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and self.interrupt:
            os.kill(os.getpid(), signal.SIGINT)
        elif state.global_step == self.step:
            raise Killed


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    byte_tokenizer(eos_token=END).save_pretrained("model")
    llama_config(max_position_embeddings=64).save_pretrained("model")
    shutil.copytree("model", "other")
    for name, word in (("text.txt", "one "), ("other.txt", "two ")):
        Path(name).write_text("\n\n".join(word * 40 for _ in range(12)), encoding="utf-8")
    return tmp_path


def left(folder=Path("out")):
    """The files of a run by name, without the log and the lock, with their bytes."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "hybrid_log.jsonl"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def script(resume=None, ends=None, samples=30, plain=False, **options):
    """A script of a user, as it is started again and again. Returns its trainer."""
    options = {
        "max_steps": 6,
        "save_steps": 2,
        "learning_rate": 1e-3,
        **({} if plain else {"async_save": False}),
        **options,
    }
    kind, config = (Trainer, TrainingArguments) if plain else (HybridTrainer, HybridConfig)
    args = config("out", use_cpu=True, report_to=[], disable_tqdm=True, **options)
    trainer = kind(tiny_model(), args, train_dataset=ByteText(samples), callbacks=[ends] if ends else [])
    try:
        trainer.train(resume_from_checkpoint=resume)
    except (Killed, KeyboardInterrupt):
        pass
    return trainer


@pytest.fixture
def command(cli, monkeypatch):
    def run(*words, data="text.txt", ends=None, status=0):
        monkeypatch.setattr(progress, "print_time", lambda *_: None)
        begin = progress.Progress.__init__

        def beginning(self, trainer, *args, **kwargs):
            begin(self, trainer, *args, **kwargs)
            if ends is not None:
                trainer.add_callback(ends)

        with monkeypatch.context() as patch:
            patch.setattr(progress.Progress, "__init__", beginning)
            return cli("train", *TRAIN, "--dataset", data, "--output_dir", "out", *words, status=status)

    return run


# What was before, what is started, and at which step it begins: `None` if it is refused.
BY_COMMAND = {
    "killed before its first save": (Ends(1), {}, 0),
    "killed after a save": (Ends(3), {}, 2),
    "stopped by Ctrl-C": (Ends(3, interrupt=True), {}, 3),
    "ended": (None, {}, 6),
    "other data": (None, {"data": "other.txt"}, None),
    "data that were changed": (None, {"more": "three"}, None),
    "another model": (None, {"words": ["--model", "other"]}, None),
    "other options": (Ends(3), {"words": ["--learning_rate", "1e-2"]}, None),
    "of a script": (script, {}, None),
}
BY_SCRIPT = {
    "killed before its first save": (Ends(1), None, 0),
    "killed after a save": (Ends(3), None, 0),
    "killed after a save, and to go on": (Ends(3), "auto", 2),
    "stopped by Ctrl-C": (Ends(3, interrupt=True), None, 0),
    "stopped by Ctrl-C, and to go on": (Ends(3, interrupt=True), "auto", 2),
    "ended": (None, None, 0),
    "of other data": (None, {"samples": 20}, 0),
    "of plain Trainer": ("plain", None, 0),
    "of a command": ("command", None, 0),
    "of other options": (None, {"learning_rate": 1e-2, "max_steps": 4}, 0),
}


QUICK = ("killed before its first save", "stopped by Ctrl-C", "ended", "other data", "another model", "of a script")


@pytest.mark.parametrize("before", mostly_slow(BY_COMMAND, QUICK))
def test_the_same_command_goes_on_and_another_is_refused(folder, command, before):
    how, again, begins = BY_COMMAND[before]
    if how is script:
        script()
    elif isinstance(how, Ends) and not how.interrupt:
        with pytest.raises(Killed):
            command(ends=how)
    else:
        command(ends=how, status=130 if how else 0)
    files = left()
    with open("text.txt", "a") as file:
        file.write(again.get("more", ""))
    out, err = command(*again.get("words", []), data=again.get("data", "text.txt"), status=2 if begins is None else 0)
    if begins is None:
        assert "importing torch" not in out and left() == files, "refused at once, and nothing is written"
        assert "`--output_dir out` holds another run: " in err
        more = [*again.get("words", []), "--resume_from_checkpoint", "false"]
        out, _ = command(*more, data=again.get("data", "text.txt"))
        aside = Path("out/_hybrid_earlier_1")
        assert f"is in `{aside}` now" in " ".join(out.split())
        assert left(aside).items() <= files.items() and (aside / "checkpoint-2").is_dir()
        assert (aside / "_hybrid_command.json").exists() == (how is not script)
    else:
        assert (f"This run continues from step {begins} of 6." in out) == (begins > 0)
        assert not list(Path("out").glob("_hybrid_earlier*"))
    assert [step_of(path) for path in checkpoints_of(Path("out"))][-1] == 6
    results = json.loads(Path("out/train_results.json").read_text())
    assert results["train_loss"] > 1, "also of a run that had ended: what it reported stays"


QUICK_SCRIPTS = ("killed after a save", "stopped by Ctrl-C, and to go on", "ended", "of plain Trainer", "of a command")


@pytest.mark.parametrize("before", mostly_slow(BY_SCRIPT, QUICK_SCRIPTS))
def test_a_script_that_is_started_again_trains(folder, caplog, command, before):
    how, again, begins = BY_SCRIPT[before]
    command() if how == "command" else script(plain=True) if how == "plain" else script(ends=how)
    files = {name: held for name, held in left().items() if name.startswith("checkpoint-")}
    caplog.clear()
    trainer = script("auto" if again == "auto" else None, **(again if isinstance(again, dict) else {}))
    last = trainer.args.max_steps
    assert trainer.state.global_step == last
    assert ("checkpoint-2" in str(trainer.saver.start.folder)) == (begins == 2)
    aside = Path("out/_hybrid_earlier_1")
    moved = bool(files) and again != "auto"
    assert aside.exists() == moved and caplog.text.count("is in `out/_hybrid_earlier_1` now") == moved
    if moved:
        assert {name: held for name, held in left(aside).items() if name.startswith("checkpoint-")} == files
    assert checkpoints_of(Path("out"))[-1].name == f"checkpoint-{last}"
    assert script("auto").saver.start.folder == f"out/checkpoint-{last}", "and not of the run before"
