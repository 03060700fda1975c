"""`hf_hybrid/saving/run_identity.py`: what a resume compares, refuses and says, with leaps and without."""

import json
import logging
import random
import re
import shutil

import numpy
import pytest
import torch
from conftest import ByteText, assert_same_weights, config_values, hybrid_config, tiny_model, weights
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from rig import trainers
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from hf_hybrid import HybridTrainer
from hf_hybrid.saving import run_identity
from hf_hybrid.saving.manifest import MANIFEST_NAME, CheckpointError

STEPS = 8
OPTIONS = {"max_steps": STEPS, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 5}
MODES = {"leaps": {}, "off": {"enable_predict": False}}
MIDDLE, END = 21, 10
"""Rows of which step 5 is in the middle of an epoch, and at the end of one."""


def table(count, offset=0):
    """The rows as a data set of the Hub's library."""
    rows = ByteText(count, offset).blocks.tolist()
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def adapted(base=0, dtype=torch.float32, target="q_proj"):
    model = tiny_model(base).to(dtype)
    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(r=2, target_modules=[target]))


def build(folder, model=None, data=None, collator=None, callbacks=None, optimizers=(None, None), **options):
    torch.manual_seed(0)
    arguments = {"data_collator": collator, "callbacks": callbacks, "optimizers": optimizers}
    model = tiny_model(attention_dropout=0.1) if model is None else model
    data = ByteText(MIDDLE) if data is None else data
    return trainers.build(folder, model=model, train_dataset=data, **arguments, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that returns the checkpoint of step 5 of a run, made once."""
    made = {}

    def of(mode, name="plain", **values):
        if (mode, name) not in made:
            folder = tmp_path_factory.mktemp("saved")
            build(folder, **{**MODES[mode], **values}).train()
            made[mode, name] = folder / "checkpoint-5"
        return made[mode, name]

    return of


@pytest.fixture
def go_on(tmp_path, caplog):
    """Resume, and return what was said."""

    def going_on(checkpoint, mode, *, auto=False, **values):
        caplog.clear()
        trainer = build(tmp_path, **{**MODES[mode], "save_strategy": "no", **values})
        if auto:
            shutil.copytree(checkpoint, tmp_path / checkpoint.name, dirs_exist_ok=True)
        trainer.train(resume_from_checkpoint="auto" if auto else str(checkpoint))
        ours = [r.getMessage() for r in caplog.records if r.name.startswith("hf_hybrid") and r.levelno > logging.INFO]
        return [line for line in ours if "makes no leaps" not in line and "Rows are computed padded" not in line]

    return going_on


# Options.

CHANGES = {
    "seed": 7, "data_seed": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 9,
    "lr_scheduler_type": "cosine", "max_grad_norm": 0.01, "bf16": True, "dataloader_drop_last": True,
    "train_sampling_strategy": "sequential", "label_smoothing_factor": 0.1, "neftune_noise_alpha": 1.0,
    "warmup_steps": 2, "share_rows": "on", "weight_decay": 0.3, "learning_rate": 1e-4, "adam_beta2": 0.9,
}  # fmt: skip
QUICK = ("seed", "max_steps", "train_sampling_strategy", "share_rows", "learning_rate")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CHANGES]
)
def test_an_option_that_changes_the_bits_is_said_once_in_every_mode(saved, go_on, mode, name):
    said = go_on(saved(mode), mode, **{name: CHANGES[name]})
    (table,) = said
    row = rf"  `{name}` +\S.* +{re.escape(str(CHANGES[name]))}"
    assert len(re.findall(row, table)) + table.count(f"`{name}={CHANGES[name]}` is not taken up") == 1, table


@pytest.mark.parametrize("mode", MODES)
def test_the_same_run_is_told_nothing(saved, go_on, mode):
    assert go_on(saved(mode), mode, save_steps=3, logging_steps=5) == []


@pytest.mark.parametrize("mode", MODES)
def test_other_dropout_is_said(saved, go_on, mode):
    (line,) = go_on(saved(mode), mode, model=tiny_model(attention_dropout=0.5))
    assert line == "Dropout of the model was `[0.1]` and is `[0.5]`."


# The optimizer.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optim", ["sgd", "adafactor"])
def test_another_optimizer_is_refused_and_not_a_key_error(saved, go_on, mode, optim):
    with pytest.raises(CheckpointError, match="its optimizer was `torch.AdamW`, and `.*` cannot go on with .*Set `opt"):
        go_on(saved(mode), mode, optim=optim, direction="auto")  # a direction that is named needs Adam


def test_another_implementation_of_the_same_optimizer_is_taken(saved, go_on):
    assert "`optim`  adamw_torch_fused  adamw_torch" in go_on(saved("off"), "off", optim="adamw_torch")[0]


def test_weights_alone_resume_with_any_optimizer(saved, go_on, tmp_path):
    checkpoint = tmp_path / "checkpoint-5"
    shutil.copytree(saved("off"), checkpoint)
    for name in ("optimizer.pt", MANIFEST_NAME):
        (checkpoint / name).unlink()
    assert "Optimizer and schedule are not restored" in " ".join(go_on(checkpoint, "off", optim="sgd"))


def test_other_trained_parameters_of_the_same_shapes_are_refused(saved, go_on):
    checkpoint = saved("off", "o_proj", model=adapted(target="o_proj"))
    with pytest.raises(CheckpointError, match="it trained other parameters, by their names"):
        go_on(checkpoint, "off", model=adapted(target="q_proj"))


# The frozen base.

OTHER_BASE = "The frozen weights are not those that the checkpoint was trained over."


@pytest.mark.parametrize("mode", MODES)
def test_adapters_over_another_base_are_said_and_no_promise_of_the_same_run(saved, go_on, mode):
    checkpoint = saved(mode, "lora", model=adapted())
    assert go_on(checkpoint, mode, model=adapted()) == []
    assert go_on(checkpoint, mode, model=adapted(base=1)) == [OTHER_BASE]
    with pytest.raises(CheckpointError, match="frozen weights are not those it was trained over, and adapters fit one"):
        go_on(checkpoint, mode, model=adapted(base=1), auto=True)


def test_a_base_in_another_precision_is_said(saved, go_on):
    checkpoint = saved("off", "lora", model=adapted())
    (line,) = go_on(checkpoint, "off", model=adapted(dtype=torch.bfloat16))
    assert line == "The frozen weights were loaded in `float32` and are in `bfloat16` now."
    assert go_on(checkpoint, "off", model=adapted(base=1, dtype=torch.bfloat16)) == [OTHER_BASE]


def test_frozen_weights_that_the_checkpoint_holds_are_no_other_base(saved, go_on):
    """Whoever builds the model with other random weights gets those of the checkpoint."""

    def partly(seed):
        model = tiny_model(seed)
        model.model.layers[0].requires_grad_(False)
        return model

    checkpoint = saved("off", "partly", model=partly(0))
    assert go_on(checkpoint, "off", model=partly(1)) == []


def test_a_streamed_base_is_the_same_base(saved, go_on):
    checkpoint = saved("off", "lora", model=adapted())
    assert all("frozen" not in line for line in go_on(checkpoint, "off", model=adapted(), memory="stream"))
    assert OTHER_BASE in go_on(checkpoint, "off", model=adapted(base=1), memory="stream")[0]


def test_packed_values_that_differ_are_said():
    config = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "dataloader_drop_last": False}
    now = {"options": {}, "config": config, "dropout": [], "processes": 1, "optimizer": "a", "trained": None}
    now |= {"data": None, "environment": {}}
    frozen = [{"parts": [], "values": {"w": {"packed": [value]}}} for value in (1, 2)]
    found = run_identity.compare({**now, "frozen": frozen[0]}, {**now, "frozen": frozen[1]})
    assert not found.refused and "are quantised" in found.notes[0]


# The data.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [40, 9])
def test_data_of_another_length_in_the_middle_of_an_epoch_is_no_promise_of_the_same_run(saved, go_on, mode, rows):
    """Whoever names the checkpoint trains on; `auto` refuses it."""
    (said,) = go_on(saved(mode), mode, data=ByteText(rows))
    assert f"had 21 rows and has {rows} rows: the run goes on with other data, at the place where `Trainer`" in said
    match = f"had 21 rows and has {rows} rows, .*middle of an epoch.*`ignore_data_skip=True`"
    with pytest.raises(CheckpointError, match=match):
        go_on(saved(mode), mode, data=ByteText(rows), auto=True)
    said = " ".join(go_on(saved(mode), mode, data=ByteText(rows), auto=True, ignore_data_skip=True))  # as it says
    assert f"had 21 rows and has {rows} rows: the run goes on with other data" in said


def test_a_named_resume_with_other_data_and_batches_trains_as_trainer_does(saved, tmp_path):
    """And what it saves in that epoch resumes to the same bits."""
    values = {"max_steps": 11, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}

    def trained(kind, config, checkpoint):
        trainer = kind(tiny_model(attention_dropout=0.1), config, train_dataset=ByteText(72))
        trainer.train(resume_from_checkpoint=str(checkpoint))
        return weights(trainer.model)

    args = TrainingArguments(**config_values(tmp_path / "t", **{**OPTIONS, **values}))
    expected = trained(Trainer, args, saved("off"))
    for name, options in (("off", {"enable_predict": False}), ("on", {"leap_gain": 0, "share_rows": "off"})):
        config = hybrid_config(tmp_path / name, **{**OPTIONS, **values, **options})
        assert_same_weights(expected, trained(HybridTrainer, config, saved("off")))
        shutil.rmtree(tmp_path / name / "checkpoint-11")
        assert_same_weights(expected, trained(HybridTrainer, config, tmp_path / name / "checkpoint-10"))


@pytest.mark.parametrize("mode", MODES)
def test_data_of_another_length_at_the_end_of_an_epoch_is_said(saved, go_on, mode):
    checkpoint = saved(mode, "end", data=ByteText(END), direction="auto", leap_gain=0)
    said = go_on(checkpoint, mode, data=ByteText(40), direction="auto", leap_gain=0)
    assert sum("`train_dataset` had 10 rows and has 40 rows: the run" in line for line in said) == 1


@pytest.mark.parametrize("mode", MODES)
def test_other_rows_of_the_same_number_are_refused_or_said(saved, go_on, mode, tmp_path):
    """Refused where the same run is promised, and said elsewhere. A class of the user may compute its rows."""
    with pytest.raises(CheckpointError, match="`train_dataset` has other rows, and the checkpoint is in the middle"):
        go_on(saved(mode, "table", data=table(MIDDLE)), mode, data=table(MIDDLE, offset=300), auto=True)
    shutil.rmtree(tmp_path / "checkpoint-5")
    (line,) = go_on(saved(mode, "table"), mode, data=table(MIDDLE, offset=300))
    assert line.startswith("`train_dataset` has other rows: the run goes on with other data")
    assert go_on(saved(mode), mode, data=ByteText(MIDDLE, offset=300)) == []


def test_the_same_table_made_anew_is_the_same_data(saved, go_on):
    """Whatever its `_fingerprint` is, which some functions that `map` takes make differ in each process."""
    same = table(MIDDLE)
    same._fingerprint = "another"
    assert go_on(saved("off", "table", data=table(MIDDLE)), "off", data=same) == []


class Stream(IterableDataset):
    """Cannot be iterated before training does, and notes what was read."""

    def __init__(self, offset=0):
        self.rows, self.read = ByteText(64, offset), []

    def __iter__(self):
        for index in range(len(self.rows)):
            self.read.append(index)
            yield self.rows[index]


class Drawing:
    """Its rows are random, from the global generators and one of its own; it counts what it is asked for."""

    def __init__(self, rows=MIDDLE):
        self.own, self.asked, self.path = random.Random(0), [], ["a"] * rows

    def __len__(self):
        return len(self.path)

    def __getitem__(self, index):
        self.asked.append(index)
        ids = torch.randint(256, (8,)) * 0 + self.own.randrange(256)
        return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    "data",
    [
        Stream(), Drawing(), table(8).to_iterable_dataset(num_shards=2), [{"a": 1, "b": "text", "c": None}] * 3,
        TensorDataset(torch.arange(20)), Subset(table(9), [1, 2]), ConcatDataset([ByteText(3), ByteText(4)]),
        {"input_ids": [1, 2]}, numpy.arange(9.0), iter(()), None, table(8).with_transform(lambda rows: 1 / 0),
    ],
    ids=lambda data: type(data).__name__,
)  # fmt: skip
def test_any_data_has_a_fingerprint_and_is_left_alone(tmp_path, data):
    trainer = build(tmp_path, enable_predict=False)
    trainer.train_dataset = data
    random.seed(3), numpy.random.seed(3), torch.manual_seed(3)
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    first, second = run_identity.identity_of(trainer), run_identity.identity_of(trainer)
    assert first == second and json.loads(json.dumps(first)) == first
    assert before[:2] == (random.getstate(), numpy.random.get_state()[1].tolist())
    assert torch.equal(before[2], torch.get_rng_state())
    if isinstance(data, Drawing):
        assert data.asked == [] and data.own.getstate() == random.Random(0).getstate()
    if isinstance(data, Stream):
        assert data.read == []


@pytest.mark.parametrize(
    "one, other",
    [
        (Subset(table(9), [1]), Subset(table(9, 30), [1])),
        (Subset(table(9), [1]), Subset(table(9), [2])),
        (ConcatDataset([table(3), table(4)]), ConcatDataset([table(3), table(4, 30)])),
        (TensorDataset(torch.arange(9)), TensorDataset(torch.arange(1, 10))),
        ([{"text": "a", "ids": numpy.arange(3)}], [{"text": "a", "ids": numpy.arange(1, 4)}]),
    ],
)
def test_rows_inside_a_data_set_count(tmp_path, one, other):
    trainer = build(tmp_path, enable_predict=False)
    trainer.train_dataset = one
    first = run_identity.identity_of(trainer)["data"]
    trainer.train_dataset = other
    second = run_identity.identity_of(trainer)["data"]
    assert first["row_hash"] is not None and first["row_hash"] != second["row_hash"]


def own_collator(rows):
    return default_data_collator(rows)


def test_another_collator_is_said(saved, go_on):
    (line,) = go_on(saved("off"), "off", collator=own_collator)
    assert line == "The data collator was `default_data_collator` and is `own_collator`."


# An open leap, and older checkpoints.


def test_an_open_leap_that_nothing_will_judge_is_said(tmp_path, caplog):
    class Ends(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if trainer.run.has_phases and trainer.run.summary()["leaps_made"] and trainer.run.step.leap is None:
                control.should_save = True

    options = {"max_steps": 16, "save_strategy": "steps", "save_steps": 1, "leap_budget": 100.0}
    trainer = build(tmp_path, data=ByteText(100), **options)
    trainer.train()
    is_open = []
    for checkpoint in tmp_path.glob("checkpoint-*"):
        parts = json.loads((checkpoint / "hybrid_state.json").read_text())["parts"]
        if any(name.startswith("snapshot.") for name in parts["leaps"]["tensors"]):
            is_open.append(checkpoint)
    assert is_open
    for values in ({"enable_predict": False}, {"direction": "auto", "leap_gain": 0}):
        caplog.clear()
        build(tmp_path / "off", data=ByteText(100), **{**options, "save_strategy": "no", **values}).train(
            resume_from_checkpoint=str(is_open[0])
        )
        assert caplog.text.count("saved while a leap was open: its weights hold a leap that nothing has verified") == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_without_an_identity_resumes(saved, go_on, tmp_path, mode):
    checkpoint = tmp_path / "checkpoint-5"
    shutil.copytree(saved(mode), checkpoint)
    values = json.loads((checkpoint / "hybrid_state.json").read_text())
    values = {name: values[name] for name in ("schema_version", "options", "parts")}
    (checkpoint / "hybrid_state.json").write_text(json.dumps(values))
    (checkpoint / MANIFEST_NAME).unlink()
    said = go_on(checkpoint, mode, data=ByteText(MIDDLE, offset=300))
    assert len(said) == 1 and "so nothing tells whether its files are whole" in said[0]


def test_a_checkpoint_of_plain_trainer_is_compared_with_nothing(tmp_path, go_on):
    args = {"max_steps": 5, "per_device_train_batch_size": 2, "save_steps": 5, "report_to": [], "use_cpu": True}
    Trainer(tiny_model(), TrainingArguments(tmp_path / "t", **args), train_dataset=ByteText(MIDDLE)).train()
    said = go_on(tmp_path / "t" / "checkpoint-5", "off", data=ByteText(9))
    assert len(said) == 1 and "so nothing tells whether its files are whole" in said[0]


def test_a_resumed_run_without_leaps_ends_at_the_same_bits(saved, tmp_path):
    """And its own checkpoints have an identity again."""
    whole = build(tmp_path / "a", **MODES["off"])
    whole.train()
    resumed = build(tmp_path / "b", **MODES["off"], save_steps=1)
    resumed.train(resume_from_checkpoint=str(saved("off")))
    assert_same_weights(weights(whole.model), weights(resumed.model))
    values = [json.loads((path / "hybrid_state.json").read_text()) for path in (tmp_path / "b").glob("checkpoint-*")]
    assert values and all(of_checkpoint["data"]["length"] == MIDDLE for of_checkpoint in values)
