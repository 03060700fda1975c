"""Of frozen experts those that tokens reach travel, and nothing that a run computes changes."""

import pytest
import torch
from conftest import assert_same_weights, config_values, hybrid_config, mostly_slow, weights
from peft import LoraConfig, get_peft_model
from rig.tiny_architectures import build_model, samples
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments, set_seed

from hf_hybrid import HybridTrainer
from hf_hybrid.streaming.expert_streaming import runs
from hf_hybrid.streaming.streamer import LayerStreamer

COUNT = 32
OPTIONS = {"max_steps": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.3, "enable_predict": False}


def base(count=COUNT):
    set_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=count, num_experts_per_tok=2,
        max_position_embeddings=128,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def lora(model, **options):
    torch.manual_seed(1)
    values = {"target_modules": ["q_proj", "v_proj"], "r": 4, "init_lora_weights": False, **options}
    return get_peft_model(model, LoraConfig(**values))


def mixture():
    return lora(base())


def frozen_experts(model):
    """Everything else is trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    return model


def rows(count, words, length=24):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(words, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def streamed(folder, data, model, **options):
    config = hybrid_config(folder, **{**OPTIONS, "memory": "stream", **options})
    return HybridTrainer(model, config, train_dataset=data)


def plain(folder, data, model):
    options = {name: value for name, value in OPTIONS.items() if name != "enable_predict"}
    trainer = Trainer(model, TrainingArguments(**config_values(folder, **options)), train_dataset=data)
    trainer.train()
    return trainer


@pytest.fixture
def spoiled(monkeypatch):
    """Slots hold NaN where nothing was copied to, whenever a unit takes one anew."""
    fetch = LayerStreamer.fetch

    def spoiling(self, unit):
        if (unit.slot is not None or self._take_slot(unit)) and not unit.loaded:
            unit.slot.buffer.fill_(0xFF)
        fetch(self, unit)

    monkeypatch.setattr(LayerStreamer, "fetch", spoiling)


def whole(monkeypatch, *given, **options):
    """The same run, in which experts travel with their layer."""
    monkeypatch.setattr("hf_hybrid.streaming.units.frozen_experts", lambda modules: [])
    trainer = streamed(*given, **options)
    trainer.train()
    return trainer


def assert_same_run(one, other):
    def logged(trainer):
        return [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]

    assert logged(one) == logged(other)
    assert_same_weights(weights(one.model), weights(other.model))


@pytest.mark.parametrize("walk", ["micro_batch", "layer"])
@pytest.mark.parametrize("words", [3, 64], ids=["few reached", "nearly all reached"])
def test_a_run_is_that_of_trainer_with_fewer_copies(walk, words, tmp_path, spoiled, monkeypatch):
    data = rows(16, words)
    trainer = streamed(tmp_path, data, mixture(), accumulation_walk=walk)
    trainer.train()
    assert_same_run(trainer, plain(tmp_path, data, mixture()))
    moved = trainer.memory.statistics()
    before = whole(monkeypatch, tmp_path, data, mixture(), accumulation_walk=walk).memory.statistics()
    assert moved["loads"] == before["loads"] and before["bytes_spared"] == 0
    assert moved["bytes_in"] + moved["bytes_spared"] == before["bytes_in"]
    assert moved["bytes_in"] < (0.6 if words == 3 else 1.0) * before["bytes_in"]


@pytest.mark.usefixtures("of_a_library")
def test_experts_that_were_reached_are_fetched_ahead(tmp_path, monkeypatch):
    """From the second step on nothing has to be waited for: the rows are the same."""
    late = []
    on_choice = LayerStreamer._on_choice

    def noting(self, unit, experts, *args):
        before = set(experts.here)
        on_choice(self, unit, experts, *args)
        late.append((trainer.state.global_step, unit.name, experts.here - before))

    monkeypatch.setattr(LayerStreamer, "_on_choice", noting)
    data = rows(2, 3) * 8
    trainer = streamed(tmp_path, data, mixture(), max_steps=3, learning_rate=0.0, accumulation_walk="layer")
    trainer.train()
    assert any(fetched for step, _, fetched in late if step == 0)
    assert not any(fetched for step, _, fetched in late if step > 0)


def test_where_all_are_reached_the_host_does_not_ask(tmp_path, monkeypatch):
    asked = []
    to_list = torch.Tensor.tolist

    def noting(tensor):
        if tensor.dtype == torch.bool and tensor.shape == (COUNT,):
            asked.append(trainer.state.global_step)
        return to_list(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", noting)
    options = {"gradient_accumulation_steps": 6, "max_steps": 2, "accumulation_walk": "layer"}
    trainer = streamed(tmp_path, rows(24, 64, length=100), mixture(), **options)
    trainer.train()
    assert asked and set(asked) == {0}


def test_generation_copies_a_few_experts_per_token(tmp_path):
    trainer = streamed(tmp_path, rows(16, 64, length=100), mixture())
    prompt = torch.arange(40)[None]
    with trainer.memory.running():
        streamer = trainer.memory.streamer
        trainer.model.generate(input_ids=prompt, max_new_tokens=2, do_sample=False, pad_token_id=0)
        before = streamer.transfers.bytes_in
        tokens = trainer.model.generate(input_ids=prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
        moved = streamer.transfers.bytes_in - before
    everything = sum(unit.storage.packed_bytes for unit in streamer.units)
    assert moved < 0.6 * 12 * everything
    expected = mixture().generate(input_ids=prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("walk", mostly_slow(["micro_batch", "layer"], ["layer"]))
def test_an_int8_base_is_expanded_expert_by_expert(walk, tmp_path, spoiled, monkeypatch):
    data, options = rows(16, 3), {"base_precision": "int8", "accumulation_walk": walk}
    trainer = streamed(tmp_path, data, mixture(), **options)
    trainer.train()
    together = whole(monkeypatch, tmp_path, data, mixture(), **options)
    assert_same_run(trainer, together)
    assert trainer.memory.statistics()["bytes_in"] < 0.8 * together.memory.statistics()["bytes_in"]


def test_experts_stay_what_they_are_where_the_rest_is_trained(tmp_path, spoiled):
    """An update writes a layer back without its experts: most of them are not in the slot."""

    data = rows(16, 1)
    trainer = streamed(tmp_path, data, frozen_experts(base(4)))
    assert all(unit.storage.experts and unit.trainable for unit in trainer.memory.streamer.layers)
    trainer.train()
    assert trainer.memory.statistics()["bytes_spared"] > 0
    assert_same_run(trainer, plain(tmp_path, data, frozen_experts(base(4))))


@pytest.mark.parametrize("implementation", mostly_slow(["grouped_mm", "eager"], ["grouped_mm"]))
@pytest.mark.parametrize("count", [COUNT, 8], ids=["adapters stay", "adapters travel"])
def test_adapted_experts(implementation, count, tmp_path, spoiled):
    """With transformers' default implementation adapters are multiplied by tokens, otherwise added by PEFT."""

    def build():
        model = lora(base(count), r=4 if count == COUNT else 32, target_parameters=["mlp.experts.down_proj"])
        model.get_base_model().set_experts_implementation(implementation)
        return model

    data = rows(16, 3)
    trainer = streamed(tmp_path, data, build())
    units = trainer.memory.streamer.layers
    assert all(unit.storage.experts and bool(unit.trainable) == (count == 8) for unit in units)
    trainer.train()
    assert trainer.memory.statistics()["bytes_spared"] > 0
    resident = HybridTrainer(build(), hybrid_config(tmp_path, **OPTIONS), train_dataset=data)
    resident.train()
    assert_same_run(trainer, resident)


def test_trained_experts_travel_whole(tmp_path):
    trainer = streamed(tmp_path, rows(4, 3), base())
    assert not any(unit.storage.experts for unit in trainer.memory.streamer.units)


@pytest.mark.parametrize(
    "kind", mostly_slow(["gpt_oss", "lfm2_moe", "deepseek_v3", "nemotron_h"], ["gpt_oss", "lfm2_moe"])
)
@pytest.mark.parametrize("implementation", mostly_slow(["grouped_mm", "eager"], ["grouped_mm"]))
def test_architectures(kind, implementation, tmp_path, spoiled):
    def build():
        model = frozen_experts(build_model(kind))
        model.set_experts_implementation(implementation)
        return model

    data = samples(16)
    trainer = streamed(tmp_path, data, build(), accumulation_walk="micro_batch")  # some tie their embeddings
    assert any(unit.storage.experts for unit in trainer.memory.streamer.units)
    trainer.train()
    assert_same_run(trainer, plain(tmp_path, data, build()))


def test_runs():
    assert list(runs([])) == []
    assert list(runs({5, 3, 4, 9})) == [(3, 6), (9, 10)]
