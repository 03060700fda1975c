"""What a callback or a hook changes about adapters in a run is heard: weights are those of Trainer up to rounding."""

import contextlib
import functools
import logging

import pytest
import torch
from conftest import ByteText, assert_same_weights, mostly_slow, tiny_model
from peft import LoraConfig, get_peft_model
from rig import trainers
from rig.adapter_changes import CHANGES, Changes, hooked, layers, products
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.phase_memory.adapter_products import AdapterProducts, UncastInputs

TEXT = ByteText(40)
ROUNDING = 1e-4
"""Three times what bf16 alone moves the weights here."""


def adapted(seed=1):
    model = tiny_model()
    torch.manual_seed(seed)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))


STAY = ("weights", "weights, data", "weights, assigned", "scale", "hooks behind layers")
"""What layers may compute with fewer kernels all the same."""
WHEN = ("on_step_begin", "on_substep_end", "on_step_end")
QUICK = [
    ("A frozen", "on_step_begin"), ("hooks behind B", "on_step_begin"), ("weights, data", "on_substep_end"),
    ("new weights", "on_step_end"), ("scale", "on_step_begin"), ("disabled", "on_substep_end"),
]  # fmt: skip


def dropout(model):
    for layer in layers(model):
        layer.lora_dropout["default"] = nn.Dropout(0.3)


def rounds(part):
    """What a product gets depends on whether it was cast before."""
    return part.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.001 + 0.001,))


CASTS = {"dropout": dropout, "hooks before A": hooked(rounds, functools.partial(products, kind="lora_A"))}
"""What the casts of inputs matter for."""


def trained(folder, kind, callbacks=(), **options):
    config = HybridConfig if issubclass(kind, HybridTrainer) else TrainingArguments
    values = {
        "max_steps": 5, "bf16": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2,
        "optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0, "lr_scheduler_type": "constant", **options,
    }  # fmt: skip
    trainer = trainers.build(
        folder, kind, config, model=adapted(), train_dataset=TEXT, callbacks=[*callbacks], **values
    )
    with contextlib.ExitStack() as undone:
        for callback in callbacks:
            undone.callback(lambda callback=callback: getattr(callback, "undo", None) and callback.undo())
        trainer.train()
    return trainer


def moved(trainer, adapter=".default"):
    parts = trainer.model.named_parameters()
    return {name: p.detach().float() for name, p in parts if adapter in name and ".parametrizations." not in name}


def apart(first, second):
    both = [(weight, second[name]) for name, weight in first.items() if name in second]
    return max((weight - other).abs().max().item() if weight.shape == other.shape else 1.0 for weight, other in both)


@functools.cache
def untouched(folder):
    return moved(trained(folder, Trainer))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("untouched")


CASES = [(change, when) for change in CHANGES for when in WHEN]


@pytest.mark.parametrize(("change", "when"), mostly_slow(CASES, QUICK))
def test_a_change_is_heard(change, when, folder, tmp_path, caplog):
    plain = trained(tmp_path / "plain", Trainer, [Changes(when, CHANGES[change])])
    with caplog.at_level(logging.INFO, logger="hf_hybrid"):
        ours = trained(tmp_path / "ours", HybridTrainer, [Changes(when, CHANGES[change])])
    wanted, found = moved(plain), moved(ours)
    assert wanted.keys() == found.keys() and apart(wanted, found) < ROUNDING
    assert apart(wanted, untouched(folder)) > 3 * ROUNDING, "the change matters"
    assert any(isinstance(part, AdapterProducts) for part in ours.parts)
    said = [record.getMessage() for record in caplog.records if "as PEFT does it" in record.getMessage()]
    assert len(said) == len(set(said)) and bool(said) == (change not in STAY)


@pytest.mark.parametrize("change", mostly_slow(CASTS, ["dropout"]))
def test_with_trainers_rows_a_changed_adapter_has_its_bits(change, tmp_path):
    plain = trained(tmp_path / "plain", Trainer, [Changes("on_step_begin", CASTS[change])])
    ours = trained(tmp_path / "ours", HybridTrainer, [Changes("on_step_begin", CASTS[change])], share_rows="off")
    assert any(isinstance(part, UncastInputs) for part in ours.parts)
    assert_same_weights(moved(plain), moved(ours))
    assert all(layer.cast_input_dtype_enabled for layer in layers(ours.model))


class Perturbs(Trainer):
    """Changes adapters around the forward pass of each micro-batch, as adversarial training of weights does."""

    change = staticmethod(CHANGES["scale"])

    def compute_loss(self, *args, **kwargs):
        undo = self.change(self.accelerator.unwrap_model(self.model))
        try:
            return super().compute_loss(*args, **kwargs)
        finally:
            undo()


class HybridPerturbs(Perturbs, HybridTrainer):
    pass


def perturb(model):
    for product in products(model):
        product.weight.data.add_(0.1)
    return lambda: [product.weight.data.sub_(0.1) for product in products(model)]


@pytest.mark.parametrize("change", mostly_slow([perturb, CHANGES["hooks behind B"]], [perturb]))
def test_what_a_loss_changes_around_its_forward_is_heard(change, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Perturbs, "change", staticmethod(change))
    wanted, found = (moved(trained(tmp_path / kind.__name__, kind)) for kind in (Perturbs, HybridPerturbs))
    assert apart(wanted, found) < ROUNDING < 3 * ROUNDING < apart(wanted, untouched(folder))
