"""Packed rows are computed as the documents that they hold: the update is that of `Trainer` and of TRL's packing."""

import functools

import pytest
import torch
from conftest import assert_same_weights, mostly_slow, weights
from test_windows import Gradients, apart, build, checkpointing_option, config_values, lora
from transformers import Trainer, TrainingArguments

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.rows.attention import FlatRow
from hf_hybrid.rows.tree import IGNORED, Tree, places_of, reason_not_documents, rows_of, unpacked

SYSTEM = list(range(40, 64))


def documents(count=24, share=True):
    """Conversations of several lengths; the last tokens have labels."""
    found = []
    for number in range(count):
        own = [3 + (7 * number + step * (number % 3 + 1)) % 90 for step in range(4 + number % 5)]
        begin = SYSTEM if share else [3 + (5 * number + 11 * step) % 90 for step in range(24)]
        found.append((begin + own, [IGNORED] * len(begin) + own))
    return found


def packs(rows, size=4, **beside):
    """Packed rows of so many documents each, as TRL's collator lays them out, with `beside`."""
    found = []
    for first in range(0, len(rows), size):
        chosen = rows[first : first + size]
        labels = [label for _, of_row in chosen for label in (IGNORED, *of_row[1:])]
        found.append({
            "input_ids": [token for ids, _ in chosen for token in ids],
            "labels": labels,
            "position_ids": [place for ids, _ in chosen for place in range(len(ids))],
            **{name: make(chosen) for name, make in beside.items()},
        })  # fmt: skip
    return found


def one_row(examples):
    (example,) = examples
    return {name: torch.tensor([value]) for name, value in example.items()}


def train(kind, config, folder, rows, model, **options):
    callback = Gradients()
    values = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "max_grad_norm": 0.0, "max_steps": 2}
    values |= {"train_sampling_strategy": "sequential", "optim": "sgd", "learning_rate": 0.1, **options}
    args = config(**config_values(folder, **values))
    trainer = kind(model, args, data_collator=one_row, train_dataset=rows, callbacks=[callback])
    trainer.train()
    return trainer, callback.found


def both(folder, rows, make, **options):
    """Train with `Trainer` and here. Return trainers and gradients of the last window."""
    theirs = train(Trainer, TrainingArguments, folder / "plain", rows, make(), **options)
    ours = train(HybridTrainer, HybridConfig, folder / "shared", rows, make(), leap_gain=0, **options)
    return *theirs, *ours


MODELS = {
    "llama": build,
    "eager": lambda: build(attention="eager"),
    "lora": lora,
    "a window": lambda: build("mistral with a window"),
    "experts": lambda: build("qwen3_moe"),
    "caps": lambda: build("gemma2"),
}


@pytest.mark.parametrize("name", mostly_slow(MODELS, ["llama", "lora", "a window"]))
def test_gradients_are_those_of_packed_rows(name, tmp_path):
    plain, expected, trained, found = both(tmp_path, packs(documents()), MODELS[name])
    assert apart(expected, found) < 1e-5
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (plain, trained)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    summary = trained.hybrid_summary()
    assert summary["plain_rows_because"] is None and not summary["failed_savings"]
    assert summary["tokens_shared"] > 0.5 * summary["tokens"] and summary["micro_batches_saved"] == 4
    assert summary["tokens"] == sum(len(ids) for ids, _ in documents())


OPTIONS = {
    "recomputed": {checkpointing_option(): True},
    "streamed": {"memory": "stream"},
    "bf16": {"bf16": True},
    "chunked loss": {"chunked_loss": "on"},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_trainings_on_packed_rows_compose(case, tmp_path):
    options = OPTIONS[case]
    known = {name: value for name, value in options.items() if name in TrainingArguments.__dataclass_fields__}
    expected, _ = train(Trainer, TrainingArguments, tmp_path / "plain", packs(documents()), build(), **known)
    trained, _ = train(
        HybridTrainer, HybridConfig, tmp_path / "shared", packs(documents()), build(), leap_gain=0, **options
    )
    assert apart(weights(expected.model), weights(trained.model)) < (1e-2 if case == "bf16" else 1e-6)
    assert trained.hybrid_summary()["tokens_shared"] > 0


def test_documents_that_share_nothing_are_left_packed(tmp_path):
    """To the last bit."""
    plain, _, trained, _ = both(tmp_path, packs(documents(share=False)), build)
    assert_same_weights(weights(plain.model), weights(trained.model))
    assert trained.hybrid_summary()["tokens_shared"] == 0 and "5 %" in trained.hybrid_summary()["plain_rows_because"]


SEE_OTHERS = {
    "a mask of ones": lambda chosen: [1 for ids, _ in chosen for _ in ids],
    "a mask that numbers documents": lambda chosen: [number for number, (ids, _) in enumerate(chosen, 1) for _ in ids],
}


@pytest.mark.parametrize("case", SEE_OTHERS)
def test_where_documents_see_each_other_they_do_here(case, tmp_path):
    """transformers keeps documents apart only where there is no mask, and then sees them by their positions."""
    plain, _, trained, _ = both(tmp_path, packs(documents(), attention_mask=SEE_OTHERS[case]), build)
    assert_same_weights(weights(plain.model), weights(trained.model))
    assert "a document sees others" in trained.hybrid_summary()["plain_rows_because"]


@pytest.mark.parametrize("later", ["with a mask", "several documents"])
def test_packed_rows_of_another_kind_are_compared_later(later, tmp_path):
    """The first window tells nothing of documents that see each other: it has no mask, or one document in a row."""
    mask = {"attention_mask": SEE_OTHERS["a mask of ones"]}
    first = packs(documents(3), size=1, **mask) if later == "several documents" else packs(documents(12))
    rows = first + packs(documents()[::-1], size=4, **mask)
    plain, _, trained, _ = both(tmp_path, rows, build, max_steps=3)
    assert apart(weights(plain.model), weights(trained.model)) < 1e-5
    assert "a document sees others" in trained.hybrid_summary()["plain_rows_because"]


class Own(HybridTrainer):
    def training_step(self, model, inputs, *args, **kwargs):
        assert "position_ids" in inputs
        return super().training_step(model, inputs, *args, **kwargs)


def test_code_of_a_user_gets_packed_rows(tmp_path):
    """The documents of each share, as it gets one by one."""
    trained, _ = train(Own, HybridConfig, tmp_path / "own", packs(documents()), build(), leap_gain=0)
    plain, _ = train(Trainer, TrainingArguments, tmp_path / "plain", packs(documents()), build())
    assert apart(weights(plain.model), weights(trained.model)) < 1e-6
    assert trained.hybrid_summary()["tokens_shared"] > 0
    assert trained.hybrid_summary()["plain_rows_because"] is None


def own_loss(outputs, labels, num_items_in_batch=None):
    losses = torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="none"
    )
    return (losses * torch.linspace(1, 2, len(losses))).sum() / (num_items_in_batch or len(losses))


class OwnLoss:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        loss = own_loss(outputs, inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


LOSSES = {
    "a function": lambda kind: (kind, {"compute_loss_func": own_loss}),
    "a method": lambda kind: (type("Own", (OwnLoss, kind), {}), {}),
    "smoothed": lambda kind: (kind, {"label_smoothing_factor": 0.3}),
    "the model's": lambda kind: (kind, {}),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_packed_rows_and_evaluations_are_those_of_trainer(loss, tmp_path, monkeypatch):
    """A loss that weighs places of a packed row finds its states and labels there. It shares with a gradient alone."""
    rows, found, exchanged, inputs = packs(documents()), [], [], FlatRow.inputs
    monkeypatch.setattr(FlatRow, "inputs", lambda row, *args, **of: exchanged.append(row) or inputs(row, *args, **of))
    for own, config, more in ((Trainer, TrainingArguments, {}), (HybridTrainer, HybridConfig, {"leap_gain": 0})):
        kind, options = LOSSES[loss](own)
        beside = {name: options.pop(name) for name in ("compute_loss_func",) if name in options}
        make = functools.partial(kind, eval_dataset=rows[:4], **beside)
        trained, _ = train(make, config, tmp_path, rows, build(), per_device_eval_batch_size=1, **options, **more)
        exchanged.clear()
        found.append((weights(trained.model), trained.evaluate()["eval_loss"]))
    assert len(exchanged) == (4 if loss == "the model's" else 0)
    assert apart(found[0][0], found[1][0]) < 1e-6 and found[1][1] == pytest.approx(found[0][1], rel=1e-5)
    summary = trained.hybrid_summary()
    assert summary["plain_rows_because"] is None and summary["tokens_shared"] > 0.5 * summary["tokens"]


def test_ends_that_are_told_otherwise(tmp_path):
    """A collator of a user may let documents see each other that `position_ids` keep apart."""
    whole = {"cu_seq_lens_q": lambda chosen: [0, sum(len(ids) for ids, _ in chosen)]}
    (inputs,) = [one_row([row]) for row in packs(documents(2), size=2, **whole)]
    inputs["cu_seq_lens_q"] = inputs["cu_seq_lens_q"][0]
    assert "tell other documents" in reason_not_documents(inputs)
    inputs["cu_seq_lens_q"] = torch.tensor([0, len(documents(1)[0][0]), inputs["input_ids"].shape[1]])
    assert reason_not_documents(inputs) is None


def test_documents_of_packed_rows():
    """One that goes on, labels behind a document, padding between and behind, and one token alone."""
    inputs = {
        "input_ids": torch.tensor([[11, 12, 13, 21, 22, 31], [42, 43, 0, 51, 52, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0]]),
        "labels": torch.tensor([[-100, 12, 13, 21, 22, 31], [42, 43, -100, -100, 52, -100]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0], [2, 3, 0, 0, 1, 0]]),
    }
    batch = unpacked(inputs, rows_of)
    rows = batch.rows()
    assert [row.length for row in rows] == [3, 2, 1, 1] and [row.position for row in rows] == [0, 0, 2, 0]
    tokens = [list(memoryview(row.ids).cast("B")[3::4]) for row in rows]
    assert tokens == [[11, 12, 13, 21], [21, 22, 31], [42, 43], [51, 52]]
    assert batch.mask.sum(1).tolist() == [3, 2, 1, 2, 2] and places_of([batch]) == [12]
    assert batch.packed.rows.tolist() == [0, 0, 0, 1, 1] and batch.packed.shifts.tolist() == [0, 3, 5, -2, 3]
    assert Tree.of(rows).labels == 7
