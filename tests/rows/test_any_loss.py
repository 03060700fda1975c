"""Losses that are not of next tokens: models that classify, and a `training_step` with a loss of its own."""

import pytest
import torch
from conftest import weights
from transformers import (
    BertConfig,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    Trainer,
    TrainingArguments,
)

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.trainer import HybridTrainerMixin

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = {**SIZES, "vocab_size": 100, "pad_token_id": 0, "num_labels": 3}


def rows(of_tokens):
    draw = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 100, (count,), generator=draw).tolist() for count in (30, *(4 + n % 7 for n in range(24)))]
    return [
        {"input_ids": ids[0] + own, "labels": [-100] * 30 + [token % 3 for token in own] if of_tokens else own[0] % 3}
        for own in ids[1:]
    ]


def pad(batch):
    """Padded to the same width, so that each batch has padding."""
    ids = [row["input_ids"] for row in batch]
    padded = {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
    fills = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    if isinstance(batch[0]["labels"], list):
        padded["labels"] = [row["labels"] for row in batch]
    made = {
        name: torch.tensor([row + [fills[name]] * (41 - len(row)) for row in given]) for name, given in padded.items()
    }
    return made if "labels" in made else {**made, "labels": torch.tensor([row["labels"] for row in batch])}


def train(kind, model, folder, of_tokens):
    torch.manual_seed(0)
    values = {
        "max_steps": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.1,
        "optim": "sgd", "report_to": "none", "use_cpu": True, "save_strategy": "no", "logging_strategy": "no",
    }  # fmt: skip
    args = HybridConfig(folder, leap_gain=0, **values) if issubclass(kind, HybridTrainerMixin) else None
    args = args or TrainingArguments(folder, **values)
    trainer = kind(model(), args, data_collator=pad, train_dataset=rows(of_tokens))
    trainer.train()
    return trainer


def check_equal(plain, ours):
    others = weights(ours.model)
    assert max((weight - others[name]).abs().max().item() for name, weight in weights(plain.model).items()) < 1e-6
    return ours.hybrid_summary()


@pytest.mark.parametrize("kind", [LlamaForSequenceClassification, LlamaForTokenClassification])
def test_a_model_that_classifies(kind, tmp_path):
    of_tokens = kind is LlamaForTokenClassification
    model = lambda: kind(LlamaConfig(**CONFIG, num_key_value_heads=2))  # noqa: E731
    found = check_equal(*(train(k, model, tmp_path, of_tokens) for k in (Trainer, HybridTrainer)))
    assert found["tokens_shared"] > 0.3 * found["tokens"] and found["tokens_padding"] > 0
    assert found["plain_rows_because"] is None


def test_a_model_that_sees_what_follows(tmp_path):
    model = lambda: BertForTokenClassification(BertConfig(**CONFIG))  # noqa: E731
    found = check_equal(*(train(k, model, tmp_path, True) for k in (Trainer, HybridTrainer)))
    assert found["plain_rows_because"] == "its attention is not causal"


class OwnStep(Trainer):
    """A loss that only `training_step` knows."""

    of_padding = 0.0

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        wanted = inputs["labels"] != -100
        loss = logits[wanted].logsumexp(-1).square().mean() + self.of_padding * logits.square().mean()
        self.accelerator.backward(loss / self.args.gradient_accumulation_steps)
        return loss.detach()


class OfPadding(OwnStep):
    of_padding = 0.1


@pytest.mark.parametrize("kind", [OwnStep, OfPadding])
def test_a_training_step_with_a_loss_of_its_own(kind, tmp_path):
    model = lambda: LlamaForCausalLM(LlamaConfig(**CONFIG, num_key_value_heads=2))  # noqa: E731
    ours = type(f"Hybrid{kind.__name__}", (HybridTrainerMixin, kind), {})
    found = check_equal(*(train(k, model, tmp_path, True) for k in (kind, ours)))
    if kind is OwnStep:
        assert found["tokens_shared"] > 0.3 * found["tokens"] and found["plain_rows_because"] is None
    else:
        assert found["plain_rows_because"] == "the loss of `OwnStep.training_step` reads states of padding"
