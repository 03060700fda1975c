"""Where users put methods of their own: on an object, in a class above or below, or into a class that is known."""

import functools

import pytest
import torch
from conftest import ByteText, hybrid_config, tiny_model
from transformers import Trainer, TrainerCallback

from hf_hybrid import HybridTrainer
from hf_hybrid.run.trainer_view import acts_between, overridden


def loss(self, *args, **kwargs):
    raise NotImplementedError


class Below(Trainer):
    compute_loss = loss


class Above(HybridTrainer):
    compute_loss = loss


class Around(Above):
    @functools.wraps(Trainer.compute_loss)
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(("kind", "place"), [(HybridTrainer, None), (Above, "Above"), (Around, "Around")])
def test_a_class(kind, place):
    trainer = kind.__new__(kind)
    assert overridden(trainer, "compute_loss") == (place and f"{place}.compute_loss")
    assert overridden(trainer, "training_step") is None


def test_what_a_library_decorates(monkeypatch):
    monkeypatch.setattr(Trainer, "training_step", staticmethod(torch.no_grad()(Trainer.training_step)))
    assert overridden(HybridTrainer.__new__(HybridTrainer), "training_step") is None


def test_a_class_below_the_mixin():
    kind = type("Mixed", (*HybridTrainer.__mro__[1:-2], Below), {})
    assert overridden(kind.__new__(kind), "compute_loss") == "Below.compute_loss"


@pytest.mark.parametrize("patch", [loss, functools.partial(loss, 1), loss.__get__(1), lambda *_: None])
def test_an_object(patch):
    trainer = Above.__new__(Above)
    trainer.training_step = patch
    assert overridden(trainer, "training_step") == "trainer.training_step"


@functools.wraps(Trainer.training_step)
def around(self, *args, **kwargs):
    raise NotImplementedError


@pytest.mark.parametrize("patch", [loss, around, staticmethod(loss), torch.no_grad()(loss)])
def test_a_known_class(patch, monkeypatch):
    monkeypatch.setattr(Trainer, "training_step", patch)
    trainer = HybridTrainer.__new__(HybridTrainer)
    assert overridden(trainer, "training_step") == "Trainer.training_step"


def test_a_method_on_a_callback_object(tmp_path):
    """Trainer calls what the object has, whatever its class."""
    callback = TrainerCallback()
    trainer = HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=ByteText(8), callbacks=[callback])
    assert acts_between(trainer) is None
    callback.on_substep_end = lambda *args, **kwargs: None
    assert "TrainerCallback.on_substep_end" in acts_between(trainer)
