"""`tests/rig/traces.py`: a step that the other tests remember holds what it would hold if it were traced again."""

import copy
import types

import pytest
from conftest import mostly_slow, tiny_model
from peft import LoraConfig, get_peft_model
from rig import traces

from hf_hybrid.plan import trace
from hf_hybrid.plan.setups import Setup
from hf_hybrid.plan.trace import Tracer

BASE = {"activation_checkpointing": False, "accelerator": "cuda"}
OTHERS = {
    "rows": ({}, {"batch_size": 3}),
    "tokens": ({}, {"sequence_length": 24}),
    "accumulated": ({}, {"gradient_accumulation_steps": 2}),
    "accelerator": ({}, {"accelerator": "cpu", "autocast": True}),
    "autocast": ({}, {"autocast": True}),
    "chunked": ({}, {"chunked_loss": True}),
    "distilled": ({}, {"distills": True}),
    "recomputed": ({}, {"activation_checkpointing": True}),
    "width": ({"intermediate_size": 96}, {}),
    "untied": ({"tie_word_embeddings": False}, {}),
    "attention": ({"attn_implementation": "eager"}, {}),
    "dropout": ({"attention_dropout": 0.1}, {}),
    "heads": ({"num_key_value_heads": 1}, {}),
}


@pytest.fixture
def traced(monkeypatch):
    """Peak of a setup, with traces that are remembered, and the steps that were traced for it."""
    fresh, steps = getattr(trace.trace_step, "__wrapped__", trace.trace_step), []

    def counted(*args, **kwargs):
        steps.append(args)
        return fresh(*args, **kwargs)

    monkeypatch.setattr(trace, "trace_step", counted)
    traces.remember()

    def ask(model, more_inputs=None, **options):
        setup = Setup(**{"sequence_length": 16, "batch_size": 2, **BASE, **options})
        return Tracer.of(model, **more_inputs or {}).peak(setup, 0)

    return ask, steps, lambda: monkeypatch.setattr(trace, "trace_step", fresh)


def test_equal_steps_are_traced_once(traced):
    ask, steps, _ = traced
    assert ask(tiny_model()) == ask(tiny_model(seed=1)) and len(steps) == 1


@pytest.mark.parametrize("name", mostly_slow(OTHERS, ["tokens", "accumulated", "recomputed", "chunked", "width"]))
@pytest.mark.long
def test_other_steps_are_traced(traced, name):
    ask, steps, forget = traced
    changes, options = OTHERS[name]
    ask(tiny_model())
    found = ask(tiny_model(**changes), **options)
    assert len(steps) == 2
    forget()
    assert ask(tiny_model(**changes), **options) == found


def test_frozen_weights_and_adapters_are_told_apart(traced):
    ask, steps, _ = traced
    frozen, adapted = tiny_model(), [get_peft_model(tiny_model(), LoraConfig(r=rank)) for rank in (2, 4)]
    frozen.model.layers[0].requires_grad_(False)
    peaks = [ask(model) for model in (tiny_model(), frozen, *adapted)]
    assert len(steps) == len(set(peaks)) == 4
    assert ask(get_peft_model(tiny_model(), LoraConfig(r=2))) == peaks[2] and len(steps) == 4


def test_a_head_of_trls_is_told_from_others(traced):
    """As `SFTTrainer` and `DPOTrainer` put it before the `forward` of a model."""
    add_head = getattr(pytest.importorskip("trl.trainer.utils"), "add_fused_lm_head", None)
    if add_head is None:
        pytest.skip("this TRL has another head")
    ask, steps, _ = traced

    def peak(**options):
        model = tiny_model()
        add_head(model, **options)
        return ask(model, {"fused_lm_head": True})

    assert peak() == peak() and len(steps) == 1
    peak(outputs=("log_probs", "entropy")), peak(temperature=2.0), ask(tiny_model())
    assert len(steps) == 4


def test_what_a_test_makes_of_a_model_is_traced(traced):
    ask, steps, _ = traced
    changed = tiny_model()
    layer = changed.model.layers[0].mlp
    layer.forward = types.MethodType(copy.copy(type(layer).forward), layer)
    ask(changed), ask(changed)
    assert len(steps) == 2
