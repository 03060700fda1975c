"""int8 probes compute nearly the same, and leave the training weights alone."""

import math

import pytest
import torch
from conftest import ByteText, assert_same_weights, hybrid_config, tiny_model, weights
from rig import trainers

from hf_hybrid import HybridTrainer
from hf_hybrid.experimental.precision import PhaseMemory, layer_linears
from hf_hybrid.leaps.probe import SequenceLosses
from hf_hybrid.part import Part
from hf_hybrid.run.run import Run
from hf_hybrid.streaming.low_bit import quantize_rows

pytestmark = pytest.mark.slow

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}


def test_linears_of_layers_without_head_adapters_and_shared_weights():
    model = tiny_model(tie_word_embeddings=False)
    assert len(layer_linears(model)) == 14
    shared = model.model.layers[0].self_attn.q_proj
    model.extra = torch.nn.Linear(32, 32)
    model.extra.weight = shared.weight
    assert shared not in layer_linears(model) and len(layer_linears(model)) == 13
    model.model.layers[1].mlp.up_proj.forward = lambda x: x
    assert len(layer_linears(model)) == 12


def test_linears_under_lora_are_those_of_the_base():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=32, target_modules=["q_proj"]))
    found = layer_linears(model)
    assert len(found) == 14 and not any(module.weight.requires_grad for module in found)


def started(model, word="int8") -> PhaseMemory:
    plugin = PhaseMemory(f"predict={word}")
    plugin.begin(Run(model=model, optimizer=None, max_steps=1))
    return plugin


def quantised(model) -> list[torch.nn.Linear]:
    """The modules that compute through int8 now."""
    return [m for m in model.modules() if type(m) is torch.nn.Linear and "forward" in vars(m)]


def stored_bytes(plugin):
    """Bytes of the quantised modules' weights as they are stored for a probe, and as they would be in bf16."""
    matrices = {id(module.weight): module.weight for module in plugin._linears}.values()
    stored = sum(weight.numel() + 4 * weight.shape[0] for weight in matrices)
    return stored, sum(2 * weight.numel() for weight in matrices)


def logits(model):
    with torch.no_grad():
        return model(input_ids=ByteText(2)[0]["input_ids"][None]).logits


@pytest.mark.parametrize("word", ["int8", "int8_bitsandbytes"])
@pytest.mark.parametrize("autocast", [False, True])
def test_probe_computes_nearly_the_same_in_the_same_dtype(word, autocast):
    if word == "int8_bitsandbytes":
        pytest.importorskip("bitsandbytes")
    model = tiny_model(**WIDE, attention_bias=True)
    seen = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        full = logits(model)
        plugin = started(model, word)
        plugin.before_probe()
        int8 = logits(model)
        plugin.after_probe()
        assert torch.equal(logits(model), full)
    assert int8.dtype == full.dtype and not torch.equal(int8, full)
    assert [x.dtype for x in seen] == 3 * [torch.bfloat16 if autocast else torch.float32]
    assert seen[1].shape == seen[0].shape
    assert ((int8 - full).norm() / full.norm()) < 0.03


def test_stored_form_is_little_more_than_half_of_bf16():
    model = tiny_model(**WIDE)
    plugin = started(model)
    stored, bf16 = stored_bytes(plugin)
    assert bf16 == 2 * 2 * (4 * 256 * 256 + 3 * 256 * 512)
    assert stored <= 0.55 * bf16
    plugin.before_probe()
    held = [module.forward.args[:2] for module in quantised(model)]
    assert sum(t.numel() * t.element_size() for pair in held for t in pair) == stored
    plugin.after_probe()


def test_masters_are_parked_and_come_back_bit_equal():
    model = tiny_model(**WIDE)
    before, parameters = weights(model), dict(model.named_parameters())
    plugin = started(model)
    plugin.before_probe()
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.untyped_storage().nbytes() == 4 and weight.shape == (512, 256) and weight.isnan().all()
    assert not model.lm_head.weight.isnan().any()
    plugin.after_probe()
    assert_same_weights(weights(model), before)
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert not quantised(model)


def test_weights_shared_between_layers_are_stored_once():
    model = tiny_model(**WIDE)
    first, second = (layer.mlp.up_proj for layer in model.model.layers)
    second.weight = first.weight
    before = weights(model)
    plugin = started(model)
    assert stored_bytes(plugin)[1] == 2 * (8 * 256 * 256 + 5 * 256 * 512)
    plugin.before_probe()
    assert torch.isfinite(logits(model)).all()
    plugin.after_probe()
    assert first.weight is second.weight
    assert_same_weights(weights(model), before)


def test_failure_half_way_restores(monkeypatch):
    model = tiny_model(**WIDE)
    before = weights(model)
    plugin = started(model)
    calls = []

    def failing(weight):
        calls.append(weight)
        if len(calls) > 3:
            raise torch.OutOfMemoryError("no")
        return quantize_rows(weight)

    monkeypatch.setattr("hf_hybrid.experimental.precision.quantize_rows", failing)
    with pytest.raises(torch.OutOfMemoryError):
        plugin.before_probe()
    assert_same_weights(weights(model), before)
    assert not quantised(model)


def test_failing_probe_restores(tmp_path):
    model = tiny_model(**WIDE)
    trainer = HybridTrainer(model, hybrid_config(tmp_path), train_dataset=ByteText(100))
    before = weights(model)
    plugin = started(model)
    trainer.run = Run([plugin])
    losses = SequenceLosses(trainer)
    with pytest.raises(Exception, match="index out of range"):
        losses({"input_ids": torch.full((2, 8), 10_000), "labels": torch.zeros(2, 8, dtype=torch.long)})
    assert_same_weights(weights(model), before)
    assert not quantised(model)


class Witness(Part):
    """Stands around int8 probes: sees the weights before and after each probe."""

    def __init__(self):
        self.probes, self.quantised = 0, 0

    def begin(self, run):
        self.model = run.model

    def before_probe(self):
        self.kept = weights(self.model), dict(self.model.named_parameters())

    def after_probe(self):
        kept, parameters = self.kept
        assert_same_weights(weights(self.model), kept)
        assert all(parameters[name] is p for name, p in self.model.named_parameters())
        assert not quantised(self.model)
        self.probes += 1


def run(folder, plugin, **overrides):
    witness = Witness()

    class Inside(Part):
        def before_probe(self):
            witness.quantised += len(quantised(witness.model)) > 0

    config = hybrid_config(folder, probe_budget=0.5, leap_budget=100.0, learning_rate=1e-3, **overrides)
    model = tiny_model(**WIDE, num_hidden_layers=1)
    trainer = HybridTrainer(model, config, train_dataset=ByteText(400), parts=[witness, plugin, Inside()])
    trainer.probe_sequences = 8
    trainer.train()
    return trainer, witness


@pytest.mark.parametrize("bf16", [False, True])
def test_training_with_int8_probes(tmp_path, bf16):
    plugin = PhaseMemory("predict=int8")
    trainer, witness = run(tmp_path, plugin, bf16=bf16)
    assert witness.probes >= 8 and witness.quantised == witness.probes
    assert all(torch.isfinite(p).all() and p.dtype == torch.float32 for p in trainer.model.parameters())
    assert not quantised(trainer.model) and stored_bytes(plugin) == (0, 0)
    probed = [leap for leap in trainer.hybrid_summary()["leaps"] if leap["verdict"] != "unprobed"]
    assert probed and all(math.isfinite(leap["loss_after"]) for leap in probed)


def test_int8_probes_on_bitsandbytes(tmp_path, train_set, monkeypatch):
    functional = pytest.importorskip("bitsandbytes.functional")
    multiply, products = functional.int8_linear_matmul, []

    def counted(*args):
        products.append(len(args))
        return multiply(*args)

    monkeypatch.setattr(functional, "int8_linear_matmul", counted)
    model = tiny_model(num_hidden_layers=2, hidden_size=256, intermediate_size=256)
    options = {"weight_precision": "predict=int8_bitsandbytes", "probe_budget": 0.3, "leap_budget": 100.0}
    trainer = trainers.train(tmp_path, model=model, train_dataset=train_set, max_steps=24, **options)
    assert products and any(leap["verdict"] != "unprobed" for leap in trainer.hybrid_summary()["leaps"])
    assert all(type(module.weight) is torch.nn.Parameter for module in model.modules() if hasattr(module, "weight"))
