"""Models whose `forward` is not that of transformers: what they compute is found out, or they get padded rows."""

import functools
import logging

import pytest
import torch
from conftest import weights
from peft import LoraConfig, get_peft_model
from rig import trainers
from rig.sft_rows import KINDS, SIZES, lively, pad
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_hybrid import HybridConfig, HybridTrainer


def losses(model, logits, labels):
    """Of each label of a batch, shifted here."""
    return nn.functional.cross_entropy(
        model(logits)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="none"
    )


class Shifts(LlamaForCausalLM):
    """Shifts labels whether or not they are shifted already, as the code of many a model on the Hub."""

    def forward(self, input_ids, attention_mask=None, labels=None, num_items_in_batch=None, **kwargs):
        kwargs.pop("shift_labels", None)
        outputs = self.model(input_ids, attention_mask=attention_mask, **kwargs)
        of_labels = losses(self.lm_head, outputs.last_hidden_state, labels)
        return {"loss": of_labels.sum() / num_items_in_batch if num_items_in_batch else of_labels.mean()}


class Mean(LlamaForCausalLM):
    """Drops the count, so that its loss is a mean where Trainer takes it for a sum."""

    def forward(self, *args, num_items_in_batch=None, **kwargs):
        return super().forward(*args, **kwargs)


class Changed(LlamaForCausalLM):
    """Adds to the loss that transformers computes."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        if outputs.loss is not None:
            outputs.loss = self.change(outputs)
        return outputs


class Squares(Changed):
    def change(self, outputs):
        return outputs.loss + 1e-3 * outputs.logits.square().mean()


class Penalty(Changed):
    def change(self, outputs):
        return outputs.loss + 1e-3 * sum(weight.square().sum() for weight in self.parameters())


class InTraining(Changed):
    def change(self, outputs):
        return outputs.loss * 3 if self.training else outputs.loss


class ConfidentInTraining(Changed):
    def change(self, outputs):
        return outputs.loss + 1e-3 * outputs.logits.square().mean() if self.training else outputs.loss


class Counts(Changed):
    """A loss that depends on how often it was computed."""

    calls = 0

    def change(self, outputs):
        self.calls += 1
        return outputs.loss / self.calls


class TakesNothing(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, labels=None, num_items_in_batch=None):
        return super().forward(input_ids, attention_mask, labels=labels, num_items_in_batch=num_items_in_batch)


PADDED = (Shifts, Mean, Squares, Penalty, ConfidentInTraining, TakesNothing)
SHARED = (InTraining, Changed)
Changed.change = lambda self, outputs: outputs.loss


def build(kind, zero=False):
    model = lively(kind, LlamaConfig(**SIZES))
    if zero:  # every token is as likely: the loss is the same for all targets
        nn.init.zeros_(model.lm_head.weight)
    return model


def train(trainer, config, folder, model, **options):
    values = {"optim": "sgd", "learning_rate": 0.1, "gradient_accumulation_steps": 3, "max_steps": 3, **options}
    values["remove_unused_columns"] = False  # they are those of `forward`, which takes any
    return trainers.train(
        folder, trainer, config, model=model, data_collator=pad, train_dataset=KINDS["agent"](), **values
    )


def pair(folder, make, **options):
    plain = train(Trainer, TrainingArguments, folder / "plain", make(), **options)
    found = train(HybridTrainer, HybridConfig, folder / "hybrid", make(), leap_gain=0, **options)
    expected, trained = weights(plain.model), weights(found.model)
    assert all(torch.allclose(trained[name], expected[name], rtol=0, atol=2e-6) for name in expected)
    return found.hybrid_summary()


@pytest.mark.parametrize("kind", PADDED)
def test_another_loss_gets_padded_rows(kind, tmp_path, caplog):
    caplog.set_level(logging.INFO, "hf_hybrid")
    summary = pair(tmp_path, functools.partial(build, kind, zero=kind is Shifts))
    assert summary["tokens_shared"] == summary["micro_batches_saved"] == 0
    told = summary["plain_rows_because"]
    assert kind.forward.__qualname__ in told or kind is Shifts and "the loss of the first batch" in told
    assert not summary["failed_savings"] and "eport this" not in caplog.text


@pytest.mark.parametrize("kind", SHARED)
def test_the_same_loss_is_shared(kind, tmp_path):
    summary = pair(tmp_path, functools.partial(build, kind))
    assert summary["tokens_shared"] > 0 and summary["micro_batches_saved"] > 0, summary


def test_a_model_learns_what_its_forward_says(tmp_path):
    """The next token, not the one after it: no loss shows this where the head begins at zero."""
    kind = type("RemoteForCausalLM", (Shifts,), {})
    summary = pair(tmp_path, functools.partial(build, kind, zero=True), max_steps=6, learning_rate=0.5)
    assert summary["tokens_shared"] == 0


def test_the_comparison_calls_no_function_that_counts(tmp_path):
    """A counter of a forward pass is what it would be with Trainer; so is one of a function on the model."""
    plain, found = build(Counts), build(Counts)
    train(Trainer, TrainingArguments, tmp_path / "plain", plain, max_steps=2, gradient_accumulation_steps=1)
    train(HybridTrainer, HybridConfig, tmp_path / "hybrid", found, max_steps=2, gradient_accumulation_steps=1)
    assert plain.calls == found.calls
    assert all(torch.allclose(a, b, rtol=0, atol=2e-6) for a, b in zip(plain.parameters(), found.parameters()))


def test_a_function_on_the_model(tmp_path):
    calls = []

    def make():
        model, own = build(LlamaForCausalLM), LlamaForCausalLM.forward

        @functools.wraps(own)
        def forward(*args, **kwargs):
            calls.append(kwargs)
            outputs = own(model, *args, **kwargs)
            outputs.loss = outputs.loss / len(calls)
            return outputs

        model.forward = forward
        calls.clear()
        return model

    assert "model.forward" in pair(tmp_path, make)["plain_rows_because"]
    assert len(calls) == 9


class TakesNoLayout(LlamaDecoderLayer):
    """A layer of the user's, which wants the mask that padded rows have."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        assert attention_mask is None or attention_mask.numel(), "there is no mask"
        return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)


def test_a_layer_of_the_user_that_takes_no_tree(tmp_path, caplog):
    def make():
        model = build(LlamaForCausalLM)
        model.model.layers[1].__class__ = TakesNoLayout
        return model

    summary = pair(tmp_path, make)
    assert "`TakesNoLayout` does not take a flat row" in summary["plain_rows_because"]
    assert not summary["failed_savings"] and "eport this" not in caplog.text


def test_layers_that_peft_repeats_share(tmp_path):
    """Each of them has a config of its own."""
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", layer_replication=[(0, 2), (1, 2)])

    def make():
        model = build(LlamaForCausalLM)
        torch.manual_seed(1)
        return get_peft_model(model, lora)

    assert pair(tmp_path, make)["tokens_shared"] > 0
