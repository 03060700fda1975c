"""`hf_hybrid/leaps/probe.py`: what is held out, the losses of its sequences, their paired comparison, and the cost."""

import math

import pytest
import torch
from conftest import ByteText, hybrid_config, tiny_model
from rig import trainers

from hf_hybrid import HybridTrainer
from hf_hybrid.leaps.probe import (
    HeldOutBatches,
    Losses,
    NextBatches,
    Probe,
    ProbeBatch,
    SequenceLosses,
    costs_accuracy,
    is_clearly_worse,
    paired_decrease,
)


@pytest.mark.parametrize("before, after, decrease, error", [
    ([1.0, 5.0, 9.0, 3.0], [0.99, 4.99, 8.99, 2.99], 0.01, 0.0),  # no spread between sequences
    ([1.0, 1.0, 1.0, 1.0], [0.9, 1.1, 0.9, 1.1], 0.0, math.sqrt(0.04 / 3) / 2),  # of the mean difference
    ([1.0, 1.0], [math.nan, 1.0], -math.inf, 0.0),
])  # fmt: skip
def test_losses_are_compared_in_pairs(before, after, decrease, error):
    assert paired_decrease(before, after) == pytest.approx((decrease, error), abs=1e-12)


def test_a_leap_stays_unless_it_is_clearly_worse():
    assert not is_clearly_worse(-0.015, 0.01, margin=0.0, z=2.0)
    assert is_clearly_worse(-0.025, 0.01, margin=0.0, z=2.0)
    assert not is_clearly_worse(-0.025, 0.01, margin=0.01, z=2.0)
    assert is_clearly_worse(-math.inf, 0.0, margin=1.0, z=2.0)


def test_pairs_have_an_accuracy_and_other_sequences_have_none():
    pairs = Losses([0.5, 0.9], [1.0, 0.0])
    assert pairs.accuracy == 0.5 and pairs.mean == 0.7
    assert Losses([0.5, 0.9]).accuracy is None
    assert Losses.joined([pairs, pairs.first(1)]) == Losses([0.5, 0.9, 0.5], [1.0, 0.0, 1.0])


@pytest.mark.parametrize("before, after, expected", [
    (0.75, 0.5, True), (0.5, 0.5, False), (0.5, 0.75, False), (0.1 + 0.2, 0.3, False), (None, None, False),
])  # fmt: skip
def test_accuracy_falls_beyond_rounding(before, after, expected):
    assert costs_accuracy(before, after) is expected


def test_probe_counts_and_rotates():
    seen = []
    source = HeldOutBatches([ProbeBatch(name, 4, 1 / 6) for name in "abc"], wanted=8)
    probe = Probe(source, lambda b: seen.append(b) or Losses([1.0] * 4), price=1 / 3)
    assert probe.choose()
    assert len(probe.losses().values) == len(probe.losses().values) == 8
    probe.choose()
    probe.losses()
    assert "".join(seen) == "ababca"
    assert probe.forward_passes == 6
    assert probe.cost_steps == pytest.approx(3 * probe.price) == pytest.approx(1.0)


# Which sequences are probed.


def next_batches(batches, wanted, **options):
    values = {"size": len, "cut": lambda batch, most: [batch[:most], batch[most:]], "accumulation": 2, "processes": 1}
    return NextBatches(lambda count: batches[:count], wanted=wanted, **{**values, **options}).draw()


def test_a_probe_takes_the_first_sequences_of_the_next_batches():
    drawn = next_batches(["abcd", "efgh", "ijkl"], wanted=6)
    assert [batch.inputs for batch in drawn] == ["abcd", "ef"]
    assert [batch.sequences for batch in drawn] == [4, 2]
    assert [batch.cost for batch in drawn] == [1 / 6, 1 / 12]  # a step is two micro-batches, forward and backward
    whole = next_batches(["abcd", "efgh"], wanted=2, cut=lambda batch, most: [batch])
    assert [(batch.inputs, batch.cost) for batch in whole] == [("abcd", 1 / 6)]
    assert [batch.sequences for batch in next_batches(["abcd", "efgh"], wanted=6, processes=2)] == [6]


def test_an_epoch_that_ends_has_too_few_sequences_for_a_probe():
    assert [batch.inputs for batch in next_batches(["a", "b"], wanted=8)] == ["a", "b"]
    probe = Probe(NextBatches(lambda n: ["a"], wanted=8, size=len, cut=lambda b, n: [b], accumulation=1, processes=1),
                  None, price=1.0)  # fmt: skip
    assert not probe.choose()


class Watching(HybridTrainer):
    """Remembers which rows were probed and which were trained on."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        rows = inputs["input_ids"].tolist()
        assert rows  # also in a skipped step
        self.seen.append((self.phase_name, rows))
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not model.training:
            self.seen.append(("probe", inputs["input_ids"].tolist()))
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def test_probes_look_at_what_is_trained_on_next(tmp_path):
    trainer = Watching(tiny_model(), hybrid_config(tmp_path, probe_budget=0.2), train_dataset=ByteText(400))
    trainer.probe_sequences = 8
    trainer.seen = []
    trainer.train()
    probes = [index for index, (phase, _) in enumerate(trainer.seen) if phase == "probe"]
    assert probes and trainer.hybrid_summary()["predicted_steps"]
    for index in probes:
        coming = [row for phase, rows in trainer.seen[index:] if phase not in ("probe", "predict") for row in rows]
        assert coming[: len(trainer.seen[index][1])] == trainer.seen[index][1] or trainer.seen[index - 1][0] == "probe"
    skipped = [index for index, (phase, _) in enumerate(trainer.seen) if phase == "predict"]
    for index in skipped:  # it is shown what the next real step trains on
        coming = next(rows for phase, rows in trainer.seen[index:] if phase not in ("probe", "predict"))
        assert trainer.seen[index][1] == coming


@pytest.mark.parametrize("mode", ["evaluate", "predict"])
def test_a_trainer_without_training_data_evaluates(tmp_path, mode):
    trainer = HybridTrainer(tiny_model(), hybrid_config(tmp_path), eval_dataset=ByteText(4))
    assert trainer.evaluate()["eval_loss"] > 0 if mode == "evaluate" else trainer.predict(ByteText(4)).metrics
    with pytest.raises(ValueError, match="train_dataset"):
        trainer.train()


def test_a_probe_set_of_one_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="`probe_dataset` has 1 sample"):
        HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=ByteText(40), probe_dataset=ByteText(1))


def test_a_probe_set_without_labels_is_refused(tmp_path):
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [-100] * 4}] * 4
    trainer = HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=ByteText(40), probe_dataset=rows)
    with pytest.raises(ValueError, match="Every label of `probe_dataset` is -100"):
        trainer.train()


# Losses of sequences.


def test_custom_losses_are_probed_sequence_by_sequence(tmp_path):
    """A loss that cannot be read from the logits is asked for as the trainer computes it."""

    def compute_loss(outputs, labels, num_items_in_batch=None):
        return outputs.logits.float().square().mean() + 1.0

    trainer = trainers.train(tmp_path, compute_loss_func=compute_loss)
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

    trainer = trainers.train(tmp_path, train_dataset=Padded(400))
    losses = SequenceLosses(trainer)
    batch = next(iter(trainer.get_train_dataloader()))
    together = losses(batch)
    assert losses.from_logits
    losses.from_logits = False
    assert losses(batch).values == pytest.approx(together.values, rel=1e-5)
