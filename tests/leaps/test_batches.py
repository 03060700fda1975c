"""The batches of a run: those of plain `Trainer`, in its order, whatever the data are; and exact after a resume."""

import functools

import pytest
import torch
from conftest import ByteText, assert_same_weights, hybrid_config, tiny_model, weights
from datasets import Dataset as HubDataset
from torch.utils.data import ConcatDataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_hybrid import HybridTrainer
from hf_hybrid.run.run import BatchFeed

model = functools.partial(tiny_model, num_hidden_layers=1, hidden_size=8, intermediate_size=8)
ROWS = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in ByteText(50).blocks]


class Stream(IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return iter(ROWS if worker is None else ROWS[worker.id :: worker.num_workers])


class SizedStream(Stream):
    def __len__(self):
        return len(ROWS)


class Numbered(IterableDataset):
    """Other rows in every epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(ROWS[self.epoch :] + ROWS[: self.epoch])


class OwnLoader:
    """A mixin of a user's that ignores `train_dataset`."""

    def get_train_dataloader(self):
        return self.accelerator.prepare(torch.utils.data.DataLoader(ROWS, batch_size=4, collate_fn=self.data_collator))


def hub_stream():
    return HubDataset.from_list(ROWS).to_iterable_dataset(num_shards=5).shuffle(seed=3, buffer_size=10)


def ragged():
    return [{name: value[: 8 + index % 5] for name, value in row.items()} for index, row in enumerate(ROWS[:20])]


KINDS = {
    "list": (lambda: ROWS, {}),
    "concatenated": (lambda: ConcatDataset([ByteText(30), ByteText(23, offset=90)]), {}),
    "datasets": (lambda: HubDataset.from_list(ROWS), {"gradient_accumulation_steps": 3}),
    "stream": (Stream, {"max_steps": 30}),
    "sized_stream": (SizedStream, {}),
    "stream_of_epochs": (Numbered, {"max_steps": 30}),
    "stream_of_datasets": (hub_stream, {"max_steps": 30, "gradient_accumulation_steps": 2}),
    "workers": (Stream, {"max_steps": 26, "dataloader_num_workers": 2}),
    "one_row": (lambda: ROWS[:1], {"num_train_epochs": 30}),
    "ragged_rows": (ragged, {"per_device_train_batch_size": 1, "num_train_epochs": 1}),
    "incomplete_batches_dropped": (lambda: ROWS[:9], {"dataloader_drop_last": True, "num_train_epochs": 10}),
    "grouped_by_length": (
        ragged,
        {"train_sampling_strategy": "group_by_length", "per_device_train_batch_size": 1, "num_train_epochs": 1},
    ),
}


SLOW = ("concatenated", "grouped_by_length", "ragged_rows")


def trained(trainer_class, args, data):
    """Train, and return the trainer with what it trained on: rows by epoch, of every step that computed something."""
    seen: list[list] = []

    class Epochs(TrainerCallback):
        def on_epoch_begin(self, args, state, control, **kwargs):
            seen.append([])

    class Watching(trainer_class):
        def compute_loss(self, model, inputs, *positional, **keywords):
            if model.training:
                seen[-1].append(inputs["input_ids"].tolist())
            return super().compute_loss(model, inputs, *positional, **keywords)

    trainer = Watching(model(), args, train_dataset=data, callbacks=[Epochs()])
    trainer.train()
    return trainer, seen


def marks(kind):
    return [pytest.mark.slow] * (kind in SLOW) + [pytest.mark.processes] * (kind == "workers")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks(kind), id=kind) for kind in KINDS])
def test_batches_and_steps_are_those_of_plain_trainer(kind, tmp_path):
    data, options = KINDS[kind]
    options = {"num_train_epochs": 2, "max_steps": -1, "per_device_train_batch_size": 4, "logging_steps": 5, **options}
    # Early leaps are probed, which such small batches pay dearly for: they are worth a step all the same.
    probes = {"probe_budget": 0.2, "leap_worth": 2.0}
    config = hybrid_config(tmp_path / "hybrid", leap_budget=100.0, **probes, **options)
    hybrid, found = trained(Probing, config, data())
    values = {
        name: getattr(config, name) for name in ("learning_rate", "report_to", "use_cpu", "save_strategy", "seed")
    }
    plain, expected = trained(Trainer, TrainingArguments(str(tmp_path / "plain"), **values, **options), data())
    assert hybrid.state.global_step == plain.state.global_step
    assert hybrid.state.num_train_epochs == plain.state.num_train_epochs
    assert hybrid.hybrid_summary()["predicted_steps"] > 0
    if "stream" not in kind and kind != "workers":  # an epoch of a stream ends with its data, which last longer here
        assert hybrid.state.epoch == plain.state.epoch
    for batches, of_plain in zip(found, expected):
        assert batches == of_plain[: len(batches)]


class Probing(HybridTrainer):
    probe_sequences = 4


class Own(OwnLoader, HybridTrainer):
    pass


def test_a_loader_of_the_users_is_probed_too(tmp_path):
    trainer = Own(model(), hybrid_config(tmp_path, max_steps=30, probe_budget=0.2))
    trainer.train()
    assert any(leap["loss_before"] for leap in trainer.hybrid_summary()["leaps"])


@pytest.mark.parametrize("kind", ["datasets", "stream_of_datasets", "one_row"])
@pytest.mark.long
def test_a_resumed_run_goes_on_with_the_batches_that_were_not_trained_on(kind, tmp_path):
    data, options = KINDS[kind]
    options = {"max_steps": 20, "leap_budget": 100.0, **options, "save_strategy": "steps", "save_steps": 6}
    options |= {"probe_budget": 0.2}
    config = hybrid_config(tmp_path, **options)
    whole, _ = trained(HybridTrainer, config, data())
    for step in (6, 12):
        again = HybridTrainer(model(), hybrid_config(tmp_path / f"{step}", **options), train_dataset=data())
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert_same_weights(weights(whole.model), weights(again.model))


@pytest.mark.parametrize("leaps", [True, False])
def test_a_stream_too_short_for_a_step_is_refused(leaps, tmp_path):
    """Plain `Trainer` goes through it for ever."""
    config = hybrid_config(tmp_path, enable_predict=leaps, gradient_accumulation_steps=20)
    with pytest.raises(ValueError, match="made no step: .*`gradient_accumulation_steps=20`"):
        HybridTrainer(model(), config, train_dataset=Stream()).train()


def test_data_that_give_no_batch_are_refused(tmp_path):
    config = hybrid_config(tmp_path, dataloader_drop_last=True)
    with pytest.raises(ValueError, match="gives no batch: `dataloader_drop_last=True`"):
        HybridTrainer(model(), config, train_dataset=ROWS[:3]).train()


def test_a_checkpoint_inside_a_step_counts_its_batches_as_not_trained_on():
    feed = BatchFeed()
    feed.enter(0)
    feed.fetch(lambda batches, count, device: (list(batches), None), iter("abcdef"), 2, None)
    assert feed.peek(4) == list("abcd")
    feed.begin(2)
    assert feed.state_dict()["trained"] == 0
    feed.close()
    assert feed.state_dict()["trained"] == 2 and feed.peek(5) == list("cdef")
