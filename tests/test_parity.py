"""`enable_predict=False` is plain Trainer, to the last bit of every logged loss and every final weight."""

import os

import pytest
import torch
from conftest import ByteText, assert_same_weights, config_values, tiny_model, weights
from rig import trainers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    Trainer,
    TrainingArguments,
)

from hf_hybrid import HybridConfig, HybridTrainer

CASES = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 4, "max_steps": 8},
    "bf16": {"bf16": True, "max_steps": 10},
    "adafactor": {"optim": "adafactor"},
    "lora": {},
    "epochs": {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 32},
}


def with_lora(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(7)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


def train(trainer_class, config_class, folder, *, lora=False, resume=None, **overrides):
    model = with_lora(tiny_model()) if lora else tiny_model()
    values = {"model": model, "eval_dataset": ByteText(40, offset=400), **overrides}
    return trainers.train(folder, trainer_class, config_class, resume=resume, **values)


def history(trainer):
    """Everything logged, but for the clock."""
    clock = ("runtime", "per_second")
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in clock)}
        for entry in trainer.state.log_history
    ]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_disabled_equals_plain_trainer(case, tmp_path):
    overrides = {"eval_strategy": "steps", "eval_steps": 5, **CASES[case]}
    overrides["lora"] = case == "lora"
    plain = train(Trainer, TrainingArguments, tmp_path / "plain", **overrides)
    hybrid = train(HybridTrainer, HybridConfig, tmp_path / "hybrid", enable_predict=False, **overrides)
    assert len(history(plain)) > 8
    assert history(hybrid) == history(plain)
    assert_same_weights(weights(hybrid.model), weights(plain.model))


def test_disabled_and_resumed_equals_plain_trainer(tmp_path):
    overrides = {"save_strategy": "steps", "save_steps": 10}
    plain = train(Trainer, TrainingArguments, tmp_path / "plain", **overrides)
    train(HybridTrainer, HybridConfig, tmp_path / "hybrid", enable_predict=False, **overrides)
    files = [sorted(os.listdir(tmp_path / arm)) for arm in ("plain", "hybrid")]
    assert files[0] == files[1] and "checkpoint-10" in files[0]
    options = {**overrides, "enable_predict": False, "resume": str(tmp_path / "hybrid" / "checkpoint-10")}
    resumed = train(HybridTrainer, HybridConfig, tmp_path / "resumed", **options)
    assert history(resumed)[:-1] == history(plain)[:-1]  # the last entry sums up one call of `train`
    assert_same_weights(weights(resumed.model), weights(plain.model))


class Line(torch.nn.Module):
    """What Trainer takes besides transformers' models: a module that returns its loss, without a config."""

    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.slope * x, labels)}


@pytest.mark.parametrize(
    "options", [{"enable_predict": False}, {}, {"direction": "orthogonal"}], ids=["off", "default", "leaps"]
)
def test_a_model_without_config(tmp_path, options):
    """By default it makes no leaps: what its loss is is not known."""
    points = [{"x": x / 40, "labels": 2 * x / 40} for x in range(40)]
    values = {"max_steps": 30, "learning_rate": 0.1, "logging_steps": 1, "report_to": []}
    plain = Trainer(Line(), TrainingArguments(str(tmp_path / "plain"), **values), train_dataset=points)
    plain.train()
    args = HybridConfig(str(tmp_path / "hybrid"), **options, **values)
    hybrid = HybridTrainer(Line(), args, train_dataset=points)
    hybrid.train()
    if options.get("direction"):
        assert abs(hybrid.model.slope.item() - 2) < 0.5 and hybrid.hybrid_summary()["leaps_made"] > 0
        return
    assert hybrid.model.slope.item() == plain.model.slope.item() and hybrid.hybrid_summary()["leaps_made"] == 0
    if not hybrid.has_phases:
        assert history(hybrid) == history(plain)


def test_warmup_equals_plain_trainer(tmp_path):
    """A user's own probe set leaves the training data alone, so Warmup walks the same path as plain Trainer."""
    plain = train(Trainer, TrainingArguments, tmp_path / "plain", max_steps=12)
    args = HybridConfig(**config_values(tmp_path / "hybrid", max_steps=12), warmup_phase_steps=12)
    hybrid = HybridTrainer(tiny_model(), args, train_dataset=ByteText(400), probe_dataset=ByteText(16, offset=500))
    hybrid.train()
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (plain, hybrid)]
    assert losses[0] == losses[1]
    assert_same_weights(weights(hybrid.model), weights(plain.model))


# Batches that are not rows of tokens with a label each. Trainer takes them, so that nothing may look at them first.

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
OF_BART = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "dropout": 0.0, "decoder_start_token_id": 2,
}  # fmt: skip
DOCUMENTS = torch.tril(torch.ones(12, 12)).bool()
DOCUMENTS[6:, :6] = False


class Nested(torch.nn.Module):
    """A model of the user's own, without tokens, whose outputs are nested and have names."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, dense, labels=None):
        scores = self.linear(dense)
        loss = torch.nn.functional.mse_loss(scores, labels)
        return {"loss": loss, "scores": scores, "parts": (scores[:, :1], {"rest": scores[:, 1:]})}


def of_tokens(label):
    draw = torch.Generator().manual_seed(0)
    rows = [torch.cat([torch.arange(5, 11), torch.randint(11, 60, (6,), generator=draw)]) for _ in range(16)]
    mask = torch.ones(12, dtype=torch.long)
    return [{"input_ids": ids, "attention_mask": mask, **label(ids, number)} for number, ids in enumerate(rows)]


def masked(ids, number):
    mask = torch.zeros(12, 12).masked_fill(~DOCUMENTS, torch.finfo(torch.float32).min)
    return {"labels": ids, "attention_mask": mask[None]}


def embedded():
    rows = of_tokens(lambda ids, number: {"labels": ids})
    return [{"inputs_embeds": torch.randn(12, 32), "labels": row["labels"]} for row in rows]


OTHER_BATCHES = {
    "a class per row": (
        lambda: LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=3)),
        lambda: of_tokens(lambda ids, number: {"labels": torch.tensor(number % 3)}),
    ),
    "numbers per row": (
        lambda: LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=2, problem_type="regression")),
        lambda: of_tokens(lambda ids, number: {"labels": torch.tensor([float(number), 1.0])}),
    ),
    "a class per token": (
        lambda: LlamaForTokenClassification(LlamaConfig(**SIZES, num_labels=3)),
        lambda: of_tokens(lambda ids, number: {"labels": ids % 3}),
    ),
    "an encoder": (
        lambda: BartForConditionalGeneration(BartConfig(**OF_BART)),
        lambda: of_tokens(lambda ids, number: {"labels": ids[:7]}),
    ),
    "masked tokens": (
        lambda: BertForMaskedLM(BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
        lambda: of_tokens(lambda ids, number: {"labels": ids}),
    ),
    "a mask of four dimensions": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), lambda: of_tokens(masked)),
    "documents in the mask": (
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
        lambda: of_tokens(lambda ids, number: {"labels": ids, "attention_mask": torch.tensor([1] * 6 + [2] * 6)}),
    ),
    "embeddings": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), embedded),
    "no tokens, nested": (
        Nested,
        lambda: [{"dense": torch.randn(4), "labels": torch.full((3,), number / 16)} for number in range(16)],
    ),
}


@pytest.mark.parametrize("sharing", ["auto", "on"])
@pytest.mark.parametrize("case", OTHER_BATCHES)
def test_evaluation_and_prediction_take_what_trainer_takes(case, sharing, tmp_path):
    make, data = OTHER_BATCHES[case]
    results = []
    for kinds, more in (((Trainer, TrainingArguments), {}), ((HybridTrainer, HybridConfig), {"share_rows": sharing})):
        torch.manual_seed(0)
        model, rows = make(), data()
        options = config_values(tmp_path, max_steps=2, remove_unused_columns=False, learning_rate=1e-2, **more)
        trainer = kinds[0](model, kinds[1](**options), train_dataset=rows, eval_dataset=rows)
        before = trainer.evaluate()["eval_loss"]
        predictions = trainer.predict(rows).predictions
        trainer.train()
        results.append((before, predictions, trainer.evaluate()["eval_loss"]))
    (before, predictions, after), (before_ours, predictions_ours, after_ours) = results
    assert before == pytest.approx(before_ours, abs=1e-5) and after == pytest.approx(after_ours, abs=2e-4)
    plain, ours = (torch.utils._pytree.tree_leaves(found) for found in (predictions, predictions_ours))
    assert len(plain) == len(ours) and all((a == b).all() for a, b in zip(plain, ours))
