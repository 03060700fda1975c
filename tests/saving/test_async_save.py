"""Async saves: the same files as of a save that training waits for, and nothing lost when one fails."""

import errno
import itertools
import threading
from pathlib import Path

import pytest
import torch
from conftest import ByteText, assert_same_weights, mostly_slow, tiny_model, weights
from peft import LoraConfig, get_peft_model
from rig import trainers
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_hybrid.saving import manifest
from hf_hybrid.saving.async_save import AsyncSaver, CannotStageError, Staging
from hf_hybrid.saving.manifest import is_committed


def build(folder, model=None, callbacks=None, **overrides):
    """A trainer of six steps. Its model has no say in what a save may do."""
    options = {"max_steps": 6, "save_strategy": "steps", "per_device_train_batch_size": 2, "save_total_limit": None}
    data = {"samples": 30, "eval_dataset": ByteText(4)}
    return trainers.build(folder, model_seed=0, model=model, callbacks=callbacks, **data, **{**options, **overrides})


class Slow(TrainerCallback):
    """Holds the thread of a save back until a step is over, and notes when checkpoints got their names."""

    def __init__(self, monkeypatch, until: int):
        self.go_on, self.until, self.there = threading.Event(), until, []
        commit = manifest.commit

        def slow_commit(*args, **kwargs):
            if threading.current_thread() is not threading.main_thread():
                assert self.go_on.wait(60)
            return commit(*args, **kwargs)

        monkeypatch.setattr(manifest, "commit", slow_commit)

    def on_step_end(self, args, state, control, **kwargs):
        self.there.append(sorted(path.name for path in Path(args.output_dir).glob("checkpoint-*")))
        if state.global_step >= self.until:
            self.go_on.set()


def files_of(folder: Path) -> dict:
    """The tensors of a checkpoint, by file and name."""
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= {f"{path.name}/{name}": tensor for name, tensor in load_file(path).items()}
    states = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    return found | {f"{index}/{name}": value for index, state in states.items() for name, value in state.items()}


@pytest.mark.parametrize(
    "adapters, options",
    mostly_slow(
        [*itertools.product([False, True], [{}, {"enable_predict": False}])],
        [(False, {}), (True, {"enable_predict": False})],
    ),
)
@pytest.mark.long
def test_a_checkpoint_holds_the_step_it_is_of_although_training_goes_on(tmp_path, monkeypatch, options, adapters):
    def model():
        torch.manual_seed(0)
        made = tiny_model(tie_word_embeddings=True)
        return get_peft_model(made, LoraConfig(r=2, target_modules="all-linear")) if adapters else made

    slow = Slow(monkeypatch, until=4)
    later = build(tmp_path / "async", model=model(), callbacks=[slow], save_steps=2, **options)
    later.train()
    assert slow.there[2] == [] and slow.there[-1][0] == "checkpoint-2"  # step 3 ran before the save of step 2 was over
    monkeypatch.undo()
    at_once = build(tmp_path / "at_once", model=model(), save_steps=2, async_save=False, **options)
    at_once.train()
    for step in (2, 4, 6):
        ours, theirs = (files_of(tmp_path / way / f"checkpoint-{step}") for way in ("async", "at_once"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        names = [
            {path.name for path in (tmp_path / way / f"checkpoint-{step}").iterdir()} for way in ("async", "at_once")
        ]
        assert names[0] == names[1]
    resumed = build(tmp_path / "resumed", model=model(), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "async" / "checkpoint-2"))
    assert_same_weights(weights(resumed.model), weights(at_once.model))


class InTurn(TrainerCallback):
    """One layer trains in each step, and the others are frozen meanwhile."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        for number, layer in enumerate(model.model.layers):
            layer.requires_grad_(number == state.global_step % len(model.model.layers))


class Follows(TrainerCallback):
    """Frozen weights that follow others after each step: a moving average, or an adapter of a reference."""

    def __init__(self, name: str, of: str):
        self.name, self.of = name, of

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.get_parameter(self.name).data.lerp_(model.get_parameter(self.of).data, 0.5)


def frozen_in_turn():
    torch.manual_seed(0)
    return tiny_model(), InTurn()


def with_average():
    torch.manual_seed(0)
    made = tiny_model()
    made.average = torch.nn.Linear(32, 256, bias=False).requires_grad_(False)
    return made, Follows("average.weight", of="model.embed_tokens.weight")


def with_reference_adapter():
    torch.manual_seed(0)
    made = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    made.add_adapter("ref", made.peft_config["default"])
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.{}.weight"
    return made, Follows(name.format("ref"), of=name.format("default"))


@pytest.mark.parametrize("make", [frozen_in_turn, with_average, with_reference_adapter])
def test_weights_that_are_frozen_and_change_all_the_same_are_those_of_the_step(tmp_path, monkeypatch, make):
    def train(folder, **options):
        model, changes = make()
        build(folder, model=model, callbacks=[changes, slow], save_steps=2, enable_predict=False, **options).train()

    slow, finish = Slow(monkeypatch, until=0), AsyncSaver.finish

    def finish_late(saver, commit, context):
        if saver.is_async:
            slow.until = 4
            slow.go_on.clear()
            saver._writes.insert(0, lambda: slow.go_on.wait(60))
        finish(saver, commit, context)

    monkeypatch.setattr(AsyncSaver, "finish", finish_late)
    train(tmp_path / "async")
    assert slow.there[2] == []  # step 3 ran before the save of step 2 was over
    train(tmp_path / "at_once", async_save=False)
    for step in (2, 4, 6):
        folders = [tmp_path / way / f"checkpoint-{step}" for way in ("async", "at_once")]
        for file in folders[1].rglob("*model.safetensors"):
            theirs, ours = load_file(file), load_file(folders[0] / file.relative_to(folders[1]))
            assert ours.keys() == theirs.keys()
            assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_a_save_that_fails_is_raised_by_the_next_step_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = build(tmp_path, save_steps=2)
    monkeypatch.setattr(manifest, "commit", full)
    with pytest.raises(OSError, match="disk is full.*checkpoint-2` could not be written"):
        trainer.train()
    assert trainer.state.global_step in (3, 4)
    assert not list(tmp_path.glob("*checkpoint-*")) and not list(tmp_path.glob("_*"))


class SavesAtFive(TrainerCallback):
    """Asks for a save with one step left."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == 5


def test_a_save_that_fails_beside_the_last_step_is_logged(tmp_path, monkeypatch, caplog):
    slow = Slow(monkeypatch, until=6)

    def fails(*args, **kwargs):
        assert slow.go_on.wait(60)
        raise OSError("the disk is gone")

    monkeypatch.setattr(manifest, "commit", fails)
    trainer = build(tmp_path, save_strategy="no", callbacks=[SavesAtFive(), slow])
    trainer.train()
    assert trainer.state.global_step == 6
    assert "A checkpoint could not be written: the disk is gone" in caplog.text
    assert not list(tmp_path.glob("*checkpoint-*")) and not list(tmp_path.glob("_*"))


class Reads(TrainerCallback):
    """Looks at a checkpoint as soon as it is saved."""

    def __init__(self):
        self.committed = []

    def on_save(self, args, state, control, **kwargs):
        self.committed.append(is_committed(Path(args.output_dir, f"checkpoint-{state.global_step}")))


def test_a_callback_that_reads_checkpoints_finds_them(tmp_path):
    reads = Reads()
    build(tmp_path, save_steps=2, callbacks=[reads]).train()
    assert reads.committed == [True] * 3


def test_the_best_checkpoint_is_loaded_when_it_is_whole(tmp_path, monkeypatch):
    slow = Slow(monkeypatch, until=5)
    options = {"save_steps": 4, "eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True}
    trainer = build(tmp_path, callbacks=[slow], save_total_limit=1, **options)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert is_committed(best)
    assert_same_weights(weights(trainer.model), load_file(best / "model.safetensors"))


# Copies.


def test_copies_are_kept_and_share_what_is_shared():
    tied = torch.arange(6.0).view(2, 3)
    staging = Staging()
    first = staging.copy("weights", {"a": tied, "b": tied, "step": 3, "list": [torch.ones(2), "text"]})
    assert first["a"].data_ptr() == first["b"].data_ptr() != tied.data_ptr()
    assert first["step"] == 3 and first["list"][1] == "text"
    tied += 1
    assert torch.equal(first["a"], torch.arange(6.0).view(2, 3))
    second = staging.copy("weights", {"a": tied, "b": tied, "step": 4, "list": [torch.zeros(2), "text"]})
    assert second["a"].data_ptr() == first["a"].data_ptr() and torch.equal(second["a"], tied)


def test_what_is_not_written_is_not_copied():
    base, trained = torch.ones(3), torch.ones(3)
    copy = Staging(free=lambda: 100).copy("weights", {"base": base, "trained": trained}, unwritten=[base])
    assert copy["base"] is base and copy["trained"] is not trained


def test_the_base_of_adapters_is_not_copied(tmp_path):
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    trainer = build(tmp_path, model=model, save_steps=2, enable_predict=False)
    copied, copy = set(), trainer.saver.writer._staging.copy

    def noted(name, value, *args):
        made = copy(name, value, *args)
        if name == "weights":
            copied.update(key for key in made if made[key].data_ptr() != value[key].data_ptr())
        return made

    trainer.saver.writer._staging.copy = noted
    trainer.train()
    assert copied == {name for name, weight in model.named_parameters() if weight.requires_grad}


def test_copies_that_do_not_fit_are_refused():
    with pytest.raises(CannotStageError, match="more than a quarter"):
        Staging(free=lambda: 100).copy("weights", {"a": torch.ones(7)})
    with pytest.raises(CannotStageError, match="not plain"):
        Staging().copy("weights", {"a": torch.ones(3).to_sparse()})


def test_a_save_whose_copies_do_not_fit_is_written_at_once(tmp_path, caplog):
    trainer = build(tmp_path, save_steps=2)
    trainer.saver.writer = AsyncSaver(Staging(free=lambda: 1000))
    with caplog.at_level("INFO"):
        trainer.train()
    assert "written before training goes on: the copies need" in caplog.text
    assert [is_committed(tmp_path / f"checkpoint-{step}") for step in (2, 4, 6)] == [True] * 3
