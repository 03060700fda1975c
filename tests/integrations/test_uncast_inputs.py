"""Casts of LoRA's inputs that change nothing are left out under bf16 autocast, and nothing else changes."""

import pytest
import torch
from conftest import ByteText, assert_same_weights, config_values, losses, tiny_model, weights
from peft import LoraConfig, get_peft_model
from rig.live_bytes import saved_for_backward
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.integrations.adapters import UncastInputs, layers_with_idle_casts
from hf_hybrid.plan.setups import checkpointing_option

TEXT = ByteText(200)


def lora(**options):
    torch.manual_seed(0)
    values = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False, **options}
    return get_peft_model(tiny_model(), LoraConfig(**values))


def train(trainer, config, folder, model=None, callbacks=(), **options):
    values = {"max_steps": 6, "bf16": True, "gradient_accumulation_steps": 2, **options}
    args = config(**config_values(folder, **values))
    built = trainer(lora() if model is None else model, args, train_dataset=TEXT, callbacks=list(callbacks))
    return built


def part_of(trainer):
    return next((part for part in trainer.parts if isinstance(part, UncastInputs)), None)


@pytest.mark.parametrize("options", [{}, {checkpointing_option(): True}], ids=["stored", "recomputed"])
def test_weights_are_those_of_trainer_to_the_last_bit(options, tmp_path):
    plain = train(Trainer, TrainingArguments, tmp_path / "plain", **options)
    ours = train(HybridTrainer, HybridConfig, tmp_path / "ours", share_rows="off", **options)
    for trainer in (plain, ours):
        trainer.train()
    assert part_of(ours).layers
    assert_same_weights(weights(plain.model), weights(ours.model))
    assert losses(plain) == losses(ours)


def test_less_is_kept_for_the_backward_pass(tmp_path):
    trainer = train(HybridTrainer, HybridConfig, tmp_path)
    batch = {name: tensor[None] for name, tensor in TEXT[0].items()}
    part, kept = part_of(trainer), []
    for switch in (lambda _: None, part.before_forward):
        switch(None)
        with torch.autocast("cpu", torch.bfloat16):
            kept.append(saved_for_backward(trainer.model, lambda: trainer.model(**batch).loss))
    part.after_backward(None)
    assert kept[1] < kept[0]


class Fails(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        raise KeyboardInterrupt


def test_the_layers_are_left_as_they_were(tmp_path):
    trainer = train(HybridTrainer, HybridConfig, tmp_path, callbacks=[Fails()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert all(layer.cast_input_dtype_enabled for layer in part_of(trainer).layers)


@pytest.mark.parametrize(
    "model, options",
    [
        (lambda: lora(lora_dropout=0.1), {}),
        (lambda: lora(use_dora=True), {}),
        (tiny_model, {}),
        (lora, {"bf16": False}),
        (lora, {"enable_predict": False}),
    ],
    ids=["dropout", "dora", "no adapters", "fp32", "switch"],
)
def test_where_the_casts_stay(model, options, tmp_path):
    assert part_of(train(HybridTrainer, HybridConfig, tmp_path, model(), **options)) is None


def test_layers_of_other_kinds_are_left_alone():
    model = lora(modules_to_save=["lm_head"], target_modules=["q_proj"])
    assert {type(layer).__name__ for layer in layers_with_idle_casts(model)} == {"Linear"}
