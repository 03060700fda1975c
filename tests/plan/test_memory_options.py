"""The memory options, as users meet them: what they change, what they refuse, and what they say then."""

import logging

import pytest
import torch
from conftest import assert_same_weights, config_values, hybrid_config, tiny_model, weights
from transformers import Trainer, TrainingArguments

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.phases import Phase, PhasePlugin
from hf_hybrid.plan.estimate import PlanError

LAYERS = 4


def build(folder, data, model=None, plugins=(), **options):
    model = tiny_model(num_hidden_layers=LAYERS) if model is None else model
    return HybridTrainer(model, hybrid_config(folder, **options), train_dataset=data, plugins=plugins)


def losses(trainer):
    return [e["loss"] for e in trainer.state.log_history if "loss" in e]


# Plans.


def test_auto_streams_only_what_does_not_fit(tmp_path, train_set):
    roomy = build(tmp_path, train_set, memory="auto")
    assert not roomy.memory.streams
    tight = build(tmp_path, train_set, memory="auto", vram_budget_gib=0.002)
    assert tight.memory.plan.peak_device_bytes <= 0.002 * 2**30
    tight.train()
    roomy.train()
    assert_same_weights(weights(tight.model), weights(roomy.model))


def test_more_memory_keeps_more_layers(tmp_path, train_set):
    least = build(tmp_path, train_set, memory="stream").memory.plan.peak_device_bytes / 2**30
    kept = [
        build(tmp_path, train_set, memory="stream", vram_budget_gib=budget).memory.plan.resident_layers
        for budget in (least, 1.15 * least, 1.0)
    ]
    assert kept[0] < kept[1] <= kept[2] == LAYERS


@pytest.mark.parametrize(
    "options,limit",
    [
        ({"vram_budget_gib": 0.0005, "memory": "stream"}, "vram_budget_gib"),
        ({"host_budget_gib": 0.0005, "memory": "stream"}, "host_budget_gib"),
    ],
)
def test_impossible_plans_are_refused_with_their_bytes(options, limit, tmp_path, train_set):
    model = tiny_model(num_hidden_layers=LAYERS)
    with pytest.raises(PlanError) as refusal:
        build(tmp_path, train_set, model, **options)
    text = str(refusal.value)
    assert limit in text and "weights" in text and "states" in text and "total" in text.lower()
    assert "No change of options fits" in text or "Nearest plan that works" in text


def test_the_nearest_plan_works(tmp_path, train_set):
    options = {"memory": "stream", "vram_budget_gib": 0.00125, "per_device_train_batch_size": 16}
    with pytest.raises(PlanError) as refusal:
        build(tmp_path, train_set, **options)
    assert refusal.value.changes
    build(tmp_path, train_set, **{**options, **refusal.value.changes}).train()


def test_unsupported_optimizer_is_refused_with_the_bytes(tmp_path, train_set):
    with pytest.raises(PlanError, match="`optim=ademamix`") as refusal:
        build(tmp_path, train_set, memory="stream", optim="ademamix")
    assert "optim=adamw_torch_fused" in str(refusal.value) and "weights" in str(refusal.value)


def test_quantised_trainable_base_is_refused_with_the_bytes(tmp_path, train_set):
    model = tiny_model(num_hidden_layers=LAYERS)
    model.is_quantized = True
    with pytest.raises(PlanError, match="quantised and has no adapters") as refusal:
        build(tmp_path, train_set, model, memory="stream")
    assert "LoRA" in str(refusal.value)


@pytest.mark.parametrize(
    "options,complaint",
    [
        ({"memory": "always"}, "`memory` must be one of off, auto, stream"),
        ({"vram_budget_gib": 0}, "`vram_budget_gib` must be greater than 0"),
        ({"resident_layers": -1}, "`resident_layers` must be at least 0"),
        ({"base_precision": "int8"}, "`base_precision=int8`"),
        ({"weight_precision": "int4"}, "int4"),
        ({"weight_precision": "bf16", "memory": "stream"}, "`weight_precision`"),
        ({"checkpoint_phases": "full", "enable_predict": False}, "`checkpoint_phases`"),
        ({"predict_states": "disk"}, "`predict_states`"),
    ],
)
def test_values_that_cannot_work(options, complaint, tmp_path):
    with pytest.raises(ValueError, match=complaint):
        hybrid_config(tmp_path, **options)


def test_wrong_checkpoint_phase(tmp_path, train_set):
    with pytest.raises(ValueError, match="`predict`"):
        build(tmp_path, train_set, checkpoint_phases="full,predict")


# Parts that follow the phases, from options.


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_phases": "full, correct"},
        {"offload_activations": True},
        {"predict_states": "host"},
        {"weight_precision": "fp32"},
        {"chunked_loss": "off"},
    ],
    ids=str,
)
def test_exact_options_change_no_bit(options, tmp_path, train_set):
    plain = build(tmp_path, train_set, max_steps=16)
    plain.train()
    changed = build(tmp_path, train_set, max_steps=16, **options)
    changed.train()
    assert losses(changed) == losses(plain)
    assert_same_weights(weights(changed.model), weights(plain.model))


class WatchCheckpointing(PhasePlugin):
    def __init__(self, model):
        self.model, self.seen = model, {}

    def before_forward(self, phase):
        self.seen.setdefault(phase, set()).add(self.model.model.layers[0].gradient_checkpointing)


def test_checkpointing_follows_the_phase(tmp_path, train_set):
    model = tiny_model(num_hidden_layers=LAYERS)
    watch = WatchCheckpointing(model)
    build(tmp_path, train_set, model, [watch], max_steps=16, checkpoint_phases="full").train()
    assert watch.seen == {Phase.WARMUP: {False}, Phase.FULL: {True}, Phase.CORRECT: {False}}


def test_int8_probes(tmp_path, train_set):
    pytest.importorskip("bitsandbytes")
    model = tiny_model(num_hidden_layers=2, hidden_size=256, intermediate_size=256)
    options = {"weight_precision": "predict=int8", "probe_budget": 0.3, "leap_budget": 100.0}
    trainer = build(tmp_path, train_set, model, max_steps=24, **options)
    trainer.train()
    summary = trainer.hybrid_summary()
    assert any(leap["verdict"] != "unprobed" for leap in summary["leaps"])
    assert all(type(module.weight) is torch.nn.Parameter for module in model.modules() if hasattr(module, "weight"))


@pytest.mark.parametrize("placement", ["8bit", "drop"])
def test_lossy_placements_finish(placement, tmp_path, train_set):
    if placement == "8bit":
        pytest.importorskip("bitsandbytes")
    trainer = build(tmp_path, train_set, predict_states=placement)
    trainer.train()
    assert trainer.hybrid_summary()["predicted_steps"] > 0
    assert losses(trainer)[-1] < losses(trainer)[0]


# The loss in chunks.


def big_vocabulary():
    return tiny_model(num_hidden_layers=2, vocab_size=40_000)


@pytest.mark.parametrize("memory", ["off", "stream"])
def test_chunked_loss_is_the_loss(memory, tmp_path, train_set):
    options = {"max_steps": 6, "gradient_accumulation_steps": 2, "weight_decay": 0.1}
    plain = Trainer(big_vocabulary(), TrainingArguments(**config_values(tmp_path, **options)), train_dataset=train_set)
    config = HybridConfig(
        **config_values(tmp_path, **options), enable_predict=False, memory=memory,
        chunked_loss="auto" if memory == "stream" else "on", stream_embeddings=memory == "stream" or None,
    )  # fmt: skip
    chunked = HybridTrainer(big_vocabulary(), config, train_dataset=train_set)
    plain.train()
    chunked.train()
    torch.testing.assert_close(losses(chunked), losses(plain), rtol=1e-5, atol=0)
    assert "forward" not in vars(chunked.model.lm_head)
    for name, weight in weights(plain.model).items():
        torch.testing.assert_close(chunked.model.get_parameter(name), weight, rtol=0, atol=2e-4)


def test_chunked_loss_is_not_forced_on_a_loss_of_ones_own(tmp_path, train_set, caplog):
    options = config_values(tmp_path, max_steps=2)

    def own_loss(outputs, labels, num_items_in_batch=None):
        return outputs.logits.float().square().mean()

    with pytest.raises(ValueError, match="`chunked_loss=on` cannot be used"):
        config = HybridConfig(**options, enable_predict=False, chunked_loss="on")
        HybridTrainer(big_vocabulary(), config, train_dataset=train_set, compute_loss_func=own_loss).train()
    config = HybridConfig(**options, enable_predict=False, memory="stream")
    trainer = HybridTrainer(big_vocabulary(), config, train_dataset=train_set, compute_loss_func=own_loss)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "computed from all logits" in caplog.text


# 8-bit states.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_8bit_states_streamed_or_not(dtype, tmp_path, train_set):
    """The same update, on the device as units stream in or resident: the same weights."""
    pytest.importorskip("bitsandbytes")
    found = []
    for memory in ("off", "stream"):
        model = tiny_model(num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=128).to(dtype)
        config = HybridConfig(
            **config_values(tmp_path, max_steps=8, gradient_accumulation_steps=2),
            enable_predict=False, memory=memory, optimizer_states="8bit", accumulation_walk="micro_batch",
        )  # fmt: skip
        trainer = HybridTrainer(model, config, train_dataset=train_set)
        trainer.train()
        found.append(trainer)
    assert losses(found[0]) == losses(found[1])
    assert_same_weights(weights(found[0].model), weights(found[1].model))
    states = found[1].optimizer.optimizer.state
    assert any(value.dtype == torch.uint8 for state in states.values() for value in state.values())


def test_8bit_states_resume(tmp_path, train_set):
    pytest.importorskip("bitsandbytes")
    options = {
        "max_steps": 8, "save_strategy": "steps", "save_steps": 4, "enable_predict": False, "memory": "stream",
        "optimizer_states": "8bit",
    }  # fmt: skip

    def make(folder):
        model = tiny_model(num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=128).to(torch.bfloat16)
        return HybridTrainer(model, HybridConfig(**config_values(folder, **options)), train_dataset=train_set)

    whole, resumed = make(tmp_path / "whole"), make(tmp_path / "resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert_same_weights(weights(resumed.model), weights(whole.model))


def test_8bit_states_need_an_adamw(tmp_path):
    with pytest.raises(ValueError, match="`optimizer_states=8bit`"):
        hybrid_config(tmp_path, optimizer_states="8bit", optim="sgd")


# Telling.


def test_what_was_streamed_is_in_the_summary(tmp_path, train_set):
    trainer = build(tmp_path, train_set, memory="stream")
    trainer.train()
    memory = trainer.hybrid_summary()["memory"]
    assert memory["plan"]["mode"] == "streamed"
    assert memory["statistics"]["loads"] > 0 and memory["statistics"]["bytes_in"] > 0
    held = memory["held"]
    model_bytes = sum(p.numel() * 4 for p in trainer.model.model.layers.parameters())
    assert model_bytes <= held["weights"]["host"] <= 1.1 * model_bytes
    assert held["states"]["host"] == pytest.approx(2 * model_bytes, rel=0.01)
