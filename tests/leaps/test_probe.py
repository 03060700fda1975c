"""`hf_hybrid/leaps/probe.py`: what is held out, the losses of its sequences, their paired comparison, and the cost."""

import json
import math

import pytest
import torch
from conftest import ByteText, finite, hybrid_config, tiny_model, weights
from datasets import Dataset as HubDataset
from datasets import IterableDataset as HubIterableDataset
from torch.utils.data import IterableDataset

from hf_hybrid import HybridTrainer
from hf_hybrid.leaps.probe import HeldOutProbe, SequenceLosses, is_clearly_worse, paired_decrease
from hf_hybrid.phases import PluginList


def test_pairing_removes_the_spread_between_sequences():
    before = [1.0, 5.0, 9.0, 3.0]
    decrease, standard_error = paired_decrease(before, [loss - 0.01 for loss in before])
    assert decrease == pytest.approx(0.01)
    assert standard_error < 1e-12


def test_standard_error_is_that_of_the_mean_difference():
    decrease, standard_error = paired_decrease([1.0, 1.0, 1.0, 1.0], [0.9, 1.1, 0.9, 1.1])
    assert decrease == pytest.approx(0.0)
    assert standard_error == pytest.approx(math.sqrt(0.04 / 3) / 2)


def test_nan_after_a_leap_is_an_infinite_rise():
    assert paired_decrease([1.0, 1.0], [math.nan, 1.0]) == (-math.inf, 0.0)


@pytest.mark.parametrize("before, after", [([1.0], [1.0]), ([1.0, 2.0], [1.0])])
def test_comparisons_that_are_not_paired_are_refused(before, after):
    with pytest.raises(ValueError, match="same two or more sequences"):
        paired_decrease(before, after)


def test_a_leap_stays_unless_it_is_clearly_worse():
    assert not is_clearly_worse(-0.015, 0.01, margin=0.0, z=2.0)
    assert is_clearly_worse(-0.025, 0.01, margin=0.0, z=2.0)
    assert not is_clearly_worse(-0.025, 0.01, margin=0.01, z=2.0)
    assert is_clearly_worse(-math.inf, 0.0, margin=1.0, z=2.0)


def test_probe_counts_and_rotates():
    seen = []
    probe = HeldOutProbe(
        "abc", lambda b: seen.append(b) or [1.0] * 4, sizes=[4, 4, 4], sequences_per_probe=8, sequences_per_step=8
    )
    probe.choose()
    assert len(probe.losses()) == len(probe.losses()) == 8
    probe.choose()
    probe.losses()
    assert "".join(seen) == "ababca"
    assert probe.forward_passes == 6
    assert probe.cost_steps == pytest.approx(3 * probe.price) == pytest.approx(1.0)


# Which sequences are held out.


@pytest.mark.parametrize("samples", [1, 3])
def test_a_data_set_too_small_to_split_is_refused(tmp_path, samples):
    with pytest.raises(ValueError, match=rf"`train_dataset` has {samples} sample.*Pass `probe_dataset=`"):
        HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=ByteText(samples))


def test_one_sample_trains_with_a_probe_set_of_the_users(tmp_path):
    trainer = HybridTrainer(
        tiny_model(), hybrid_config(tmp_path), train_dataset=ByteText(1), probe_dataset=ByteText(4, offset=9)
    )
    before = weights(trainer.model)
    trainer.train()
    assert finite(trainer.model) and any(not torch.equal(before[n], p) for n, p in weights(trainer.model).items())


def test_a_missing_training_set_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`train_dataset` is missing"):
        HybridTrainer(tiny_model(), hybrid_config(tmp_path))


def test_a_probe_set_of_one_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="`probe_dataset` has 1 sample"):
        HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=ByteText(40), probe_dataset=ByteText(1))


class Stream(IterableDataset):
    def __iter__(self):
        data = ByteText(300)
        return (data[i] for i in range(len(data)))


def test_a_stream_without_length_needs_a_probe_set(tmp_path):
    with pytest.raises(ValueError, match="`Stream` without a length.*Pass `probe_dataset=`"):
        HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=Stream())
    trainer = HybridTrainer(
        tiny_model(), hybrid_config(tmp_path), train_dataset=Stream(), probe_dataset=ByteText(16, offset=500)
    )
    trainer.train()
    assert trainer.hybrid_summary()["predicted_steps"] > 0


def test_a_stream_of_the_datasets_library_is_split(tmp_path):
    data = ByteText(300)
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in data.blocks]
    stream = HubIterableDataset.from_generator(lambda: iter(rows))
    trainer = HybridTrainer(tiny_model(), hybrid_config(tmp_path, probe_samples=8), train_dataset=stream)
    trainer.train()
    assert len(list(trainer.probe_dataset)) == 8
    assert next(iter(trainer.train_dataset))["input_ids"] == rows[8]["input_ids"]
    assert trainer.hybrid_summary()["predicted_steps"] > 0


def test_held_out_sequences_are_not_trained_on(tmp_path):
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in ByteText(200).blocks]
    trainer = HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=HubDataset.from_list(rows))
    held = {json.dumps(row["input_ids"]) for row in trainer.probe_dataset}
    trained = {json.dumps(row["input_ids"]) for row in trainer.train_dataset}
    assert len(trainer.probe_dataset) == 10 and len(trainer.train_dataset) == 190
    assert not held & trained


# Losses of sequences.


def test_custom_losses_are_probed_sequence_by_sequence(tmp_path):
    """A loss that cannot be read from the logits is asked for as the trainer computes it."""

    def compute_loss(outputs, labels, num_items_in_batch=None):
        return outputs.logits.float().square().mean() + 1.0

    trainer = HybridTrainer(
        tiny_model(), hybrid_config(tmp_path), train_dataset=ByteText(400), compute_loss_func=compute_loss
    )
    trainer.train()
    probed = [leap for leap in trainer.hybrid_summary()["leaps"] if leap["loss_before"] is not None]
    assert probed and all(leap["loss_before"] >= 1.0 and math.isfinite(leap["loss_after"]) for leap in probed)


def test_padding_does_not_count_in_probes(tmp_path):
    class Padded(ByteText):
        def __getitem__(self, index):
            item = super().__getitem__(index)
            length = 8 + index % 20
            mask = torch.arange(len(item["input_ids"])) < length
            return {
                "input_ids": item["input_ids"],
                "attention_mask": mask.long(),
                "labels": torch.where(mask, item["labels"], -100),
            }

    trainer = HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=Padded(400))
    trainer.train()
    losses = SequenceLosses(trainer, PluginList())
    batch = next(iter(trainer.get_eval_dataloader(trainer.probe_dataset)))
    together = losses(batch)
    assert losses.from_logits
    losses.from_logits = False
    assert losses(batch) == pytest.approx(together, rel=1e-5)
