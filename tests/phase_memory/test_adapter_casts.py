"""Casts of LoRA's inputs, and of weights below them, are left out under bf16 autocast, and nothing else changes."""

import copy

import pytest
import torch
from conftest import ByteText, assert_same_weights, losses, tiny_model, weights
from peft import LoraConfig, get_peft_model
from rig import trainers
from rig.live_bytes import saved_for_backward
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.compat import checkpointing_option
from hf_hybrid.phase_memory.adapter_products import FrozenInBf16, UncastInputs, plain_lora_layers

TEXT = ByteText(200)


def lora(**options):
    torch.manual_seed(0)
    values = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False, **options}
    return get_peft_model(tiny_model(), LoraConfig(**values))


def build(trainer, config, folder, model=None, callbacks=(), **options):
    values = {"max_steps": 6, "bf16": True, "gradient_accumulation_steps": 2, **options}
    given = {"model": lora() if model is None else model, "train_dataset": TEXT, "callbacks": list(callbacks)}
    return trainers.build(folder, trainer, config, **given, **values)


def part_of(trainer):
    return next((part for part in trainer.parts if isinstance(part, UncastInputs)), None)


@pytest.mark.parametrize("options", [{}, {checkpointing_option(): True}], ids=["stored", "recomputed"])
def test_weights_are_those_of_trainer_to_the_last_bit(options, tmp_path):
    _, (plain, ours) = both(tmp_path, lambda model: None, lora, **options)
    assert part_of(ours).layers
    assert_same_weights(weights(plain.model), weights(ours.model))
    assert losses(plain) == losses(ours)


def test_less_is_kept_for_the_backward_pass(tmp_path):
    trainer = build(HybridTrainer, HybridConfig, tmp_path, share_rows="off")
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
    trainer = build(HybridTrainer, HybridConfig, tmp_path, callbacks=[Fails()], share_rows="off")
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
    assert part_of(build(HybridTrainer, HybridConfig, tmp_path, model(), **options)) is None


def test_layers_of_other_kinds_are_left_alone():
    model = lora(modules_to_save=["lm_head"], target_modules=["q_proj"])
    assert {type(layer).__name__ for layer in plain_lora_layers(model)} == {"Linear"}


# Frozen weights.


def saved_in_bf16(**options):
    """Adapters over a model whose fp32 weights have the values of a checkpoint in bf16."""
    model = lora(**options)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def holder(trainer):
    return next((part for part in trainer.parts if isinstance(part, FrozenInBf16)), None)


class Looks(TrainerCallback):
    """Calls `look(model)` at the end of each step, outside of autocast."""

    def __init__(self, look):
        self.look, self.seen = look, []

    def on_step_end(self, args, state, control, model, **kwargs):
        self.seen.append(self.look(model))


def both(folder, look, make=saved_in_bf16, callbacks=(), given=lambda model: {}, own=None, **options):
    """What plain Trainer and we saw, and the trainers. `given` returns options for a model; `own` are ours alone."""
    seen, trainers = [], []
    for kind, config in ((Trainer, TrainingArguments), (HybridTrainer, HybridConfig)):
        looks, model = Looks(look), make()
        more = {"share_rows": "off", **(own or {})} if kind is HybridTrainer else {}
        more |= {**options, **given(model)}
        trainers.append(build(kind, config, folder / kind.__name__, model, [looks, *callbacks], **more))
        trainers[-1].train()
        seen.append(looks.seen)
    return seen, trainers


def types(model):
    return {m.weight.dtype for m in model.modules() if type(m) is torch.nn.Linear and not m.weight.requires_grad}


@pytest.mark.parametrize("options", [{}, {checkpointing_option(): True}], ids=["stored", "recomputed"])
def test_frozen_weights_in_bf16_change_no_bit(options, tmp_path):
    seen, (plain, ours) = both(tmp_path, types, **options)
    assert seen[0][-1] == {torch.float32} and torch.bfloat16 in seen[1][-1]
    assert types(ours.model) == {torch.float32} and not any("forward" in vars(layer) for layer in holder(ours).layers)
    assert_same_weights(weights(plain.model), weights(ours.model))
    assert losses(plain) == losses(ours)


def test_frozen_weights_in_bf16_take_less_memory(tmp_path):
    batch = {name: tensor[None] for name, tensor in TEXT[0].items()}
    trainer, kept = build(HybridTrainer, HybridConfig, tmp_path, saved_in_bf16()), []
    for hold in (lambda _: None, holder(trainer).begin):
        hold(None)
        with torch.autocast("cpu", torch.bfloat16):
            kept.append(saved_for_backward(trainer.model, lambda: trainer.model(**batch).loss))
    layers = holder(trainer).layers
    first = trainer.model.get_base_model().model.layers[0].self_attn  # nothing below it has a gradient
    unread = [first.q_proj.base_layer, first.k_proj.base_layer, first.v_proj.base_layer]
    rounded = sum(layer.weight.numel() for layer in layers) - sum(layer.weight.numel() for layer in unread)
    assert kept[0] - kept[1] == 2 * rounded
    assert {layer.weight.element_size() for layer in layers} == {2}  # and the weights themselves halve
    holder(trainer).end()


def test_weights_that_would_be_rounded_stay(tmp_path):
    seen, (plain, ours) = both(tmp_path, types, make=lora)
    assert holder(ours).layers and seen[1][-1] == {torch.float32}
    assert_same_weights(weights(plain.model), weights(ours.model))


def test_outside_of_autocast_they_compute_as_before(tmp_path):
    """Generation and evaluation in a callback."""

    def logits(model):
        with torch.no_grad():
            return model(input_ids=TEXT[0]["input_ids"][None]).logits

    (plain, ours), _ = both(tmp_path, logits)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours))


@pytest.mark.parametrize("copied", [False, True], ids=["in place", "of a copy"])
def test_merging_during_a_run_is_that_of_fp32(copied, tmp_path):
    def merged(model):
        if copied:
            return weights(copy.deepcopy(model).merge_and_unload())
        model.merge_adapter()
        found = {name: value.clone() for name, value in weights(model).items()}
        model.unmerge_adapter()
        return found

    (plain, ours), trainers = both(tmp_path, merged)
    for a, b in zip(plain, ours):
        assert_same_weights(a, b)
    assert_same_weights(*(weights(trainer.model) for trainer in trainers))


def of_base(model):
    return model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight


class Unfreezes(TrainerCallback):
    """Trains a weight of the base, which the optimizer knows, from the third step on."""

    def on_step_begin(self, args, state, control, model, **kwargs):
        of_base(model).requires_grad_(state.global_step >= 2)


def test_frozen_weights_that_are_trained_later_are_trained_in_fp32(tmp_path):
    def optimizer(model):
        trained = [p for p in model.parameters() if p.requires_grad or p is of_base(model)]
        return {"optimizers": (torch.optim.SGD(trained, lr=0.1), None)}

    _, trained = both(tmp_path, lambda model: None, callbacks=[Unfreezes()], given=optimizer, own={"auto_lr": "off"})
    plain, ours = (trainer.model for trainer in trained)
    assert holder(trained[1]).layers and not torch.equal(of_base(plain), of_base(saved_in_bf16()))
    assert_same_weights(weights(plain), weights(ours))


def test_weights_are_in_fp32_again_after_an_error(tmp_path):
    trainer = build(HybridTrainer, HybridConfig, tmp_path, saved_in_bf16(), callbacks=[Fails()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert types(trainer.model) == {torch.float32}
    trainer.remove_callback(Fails)
    trainer.train()
    plain = build(Trainer, TrainingArguments, tmp_path / "plain", saved_in_bf16())
    assert weights(plain.model).keys() == weights(trainer.model).keys()


@pytest.mark.parametrize(
    "model, options",
    [
        (lambda: saved_in_bf16(use_dora=True), {}),
        (tiny_model, {}),
        (saved_in_bf16, {"bf16": False}),
        (saved_in_bf16, {"enable_predict": False}),
        (saved_in_bf16, {"memory": "stream"}),
        (lambda: saved_in_bf16().to(torch.bfloat16), {}),
    ],
    ids=["dora", "no adapters", "fp32", "switch", "streamed", "bf16 already"],
)
def test_where_frozen_weights_stay(model, options, tmp_path):
    assert holder(build(HybridTrainer, HybridConfig, tmp_path, model(), **options)) is None
