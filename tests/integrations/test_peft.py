"""Adapters: leaps move what is trainable and nothing else; what is saved, merged and resumed is what was trained."""

import copy

import pytest
import torch
from conftest import ByteText, assert_same_weights, hybrid_config, losses, tiny_model, weights
from rig import trainers
from transformers import Trainer, TrainingArguments

from hf_hybrid import HybridTrainer

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

METHODS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True),
    "ia3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "saved modules": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
    ),
    "tied": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
}
# Leaps often enough to be sure of them in a short run, and looked at.
LEAPING = {"leap_worth": 10.0, "leap_budget": 10.0, "probe_budget": 1.0, "learning_rate": 1e-2}


def adapted(method, base=None):
    base = tiny_model(tie_word_embeddings=method == "tied") if base is None else base
    torch.manual_seed(1)
    return peft.get_peft_model(base, METHODS[method]())


def train(folder, model, resume=None, **options):
    return trainers.train(folder, model=model, resume=resume, **{**LEAPING, **options})


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=ByteText(4, offset=900).blocks).logits


@pytest.fixture(scope="module", params=METHODS)
def trained(request, tmp_path_factory):
    """Method, trainer, and the weights of before."""
    model = adapted(request.param)
    before = weights(model)
    folder = tmp_path_factory.mktemp("adapter")
    trainer = train(folder, model, max_steps=24, save_strategy="steps", save_steps=1)
    return request.param, trainer, before


@pytest.mark.long
def test_leaps_move_what_is_trainable_and_nothing_else(trained):
    method, trainer, before = trained
    summary = trainer.hybrid_summary()
    assert set(summary["leaps_by_verdict"]) & {"kept", "shrunk"}
    assert summary["predicted_steps"] > 0
    after = dict(trainer.model.named_parameters())
    trainable = {name for name, parameter in after.items() if parameter.requires_grad}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == trainable and len(moved) < len(before)


@pytest.mark.long
def test_no_leap_touches_the_base(trained, tmp_path, monkeypatch):
    """Right behind each leap: of all parameters, those that it wrote are the trainable ones."""
    from hf_hybrid.leaps.trajectory import Trajectory

    method, _, _ = trained
    model, original, seen = adapted(method), Trajectory.leap, []

    def leap(self, gain):
        before = weights(model)
        shape = original(self, gain)
        seen.append({name for name, value in weights(model).items() if not torch.equal(value, before[name])})
        return shape

    monkeypatch.setattr(Trajectory, "leap", leap)
    train(tmp_path, model, max_steps=12)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(written <= trainable for written in seen)
    assert set.union(*seen) == trainable


def test_saved_adapters_are_what_was_trained(trained, tmp_path):
    method, trainer, before = trained
    trainer.save_model(str(tmp_path))
    base = tiny_model(tie_word_embeddings=method == "tied")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(base, str(tmp_path))), logits(trainer.model))
    names = [path.name for path in tmp_path.iterdir()]
    assert "adapter_model.safetensors" in names and "model.safetensors" not in names


def test_merged_models_compute_the_same(trained, tmp_path):
    method, trainer, _ = trained
    if method == "prompt":
        assert not hasattr(trainer.model, "merge_and_unload")  # a prompt is no weight
        return
    merged = copy.deepcopy(trainer.model).merge_and_unload()
    merged.save_pretrained(tmp_path)
    loaded = type(merged).from_pretrained(tmp_path)
    assert torch.allclose(logits(loaded), logits(trainer.model), atol=1e-5)
    assert not any("lora" in name or "ia3" in name for name in weights(loaded))


def test_adapters_resume(trained, tmp_path):
    method, trainer, _ = trained
    phases = {e["step"]: e["hybrid/phase"] for e in trainer.state.log_history if "hybrid/phase" in e}
    inside = next(step for step, phase in phases.items() if phase == 2)
    model = adapted(method)
    resumed = train(tmp_path, model, f"{trainer.args.output_dir}/checkpoint-{inside}", max_steps=24)
    assert_same_weights(weights(resumed.model), weights(trainer.model))


@pytest.mark.parametrize("method", ["lora", "prompt"])
def test_warmup_equals_plain_trainer(method, tmp_path):
    """Dropout in the adapters included: looking at held-out sequences draws no random numbers."""
    plain = trainers.train(tmp_path / "plain", Trainer, TrainingArguments, model=adapted(method), max_steps=8)
    options = {"max_steps": 8, "warmup_phase_steps": 8, "probe_dataset": ByteText(16, offset=500)}
    hybrid = trainers.train(tmp_path / "hybrid", model=adapted(method), **options)
    assert losses(hybrid) == losses(plain)
    assert_same_weights(weights(hybrid.model), weights(plain.model))


# 4 bits.


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_model(hidden_size=64, intermediate_size=128).save_pretrained(folder)
    return folder


def nf4_base(folder):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, device_map={"": "cpu"})


def qlora(folder):
    base = peft.prepare_model_for_kbit_training(
        nf4_base(folder), gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    torch.manual_seed(1)
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))


def test_qlora_in_all_phases_with_evaluations(base_folder, tmp_path):
    """Packed weights stay as they are; saved adapters on a base quantised anew compute the same; resume is exact."""
    options = {"max_steps": 20, "save_strategy": "steps", "save_steps": 5, "eval_strategy": "steps", "eval_steps": 7}

    def build(folder=tmp_path):
        data = {"eval_dataset": ByteText(4, offset=500)}
        return trainers.build(folder, model=qlora(base_folder), **data, **LEAPING, **options)

    trainer = build()
    before = weights(trainer.model)
    assert any(value.dtype == torch.uint8 for value in before.values())
    trainer.train()
    summary = trainer.hybrid_summary()
    assert all(summary["steps_by_phase"].values())
    assert set(summary["leaps_by_verdict"]) & {"kept", "shrunk"}
    after = weights(trainer.model)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {n for n in before if "lora" in n}
    trainer.save_model(str(tmp_path / "saved"))
    base = peft.prepare_model_for_kbit_training(nf4_base(base_folder))
    for module in base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    assert torch.equal(logits(peft.PeftModel.from_pretrained(base, tmp_path / "saved")), logits(trainer.model))
    resumed = build(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert_same_weights(weights(resumed.model), after)


def gradients(model):
    blocks = ByteText(4).blocks
    model.train().zero_grad()
    model(input_ids=blocks, labels=blocks).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_evaluations_leave_gradients_of_4_bit_layers_right(base_folder, tmp_path):
    """On a CPU with bf16 instructions bitsandbytes would pack them for a kernel without a right backward pass."""
    trainer = trainers.build(tmp_path, model=qlora(base_folder), eval_dataset=ByteText(4, offset=500))
    before = gradients(trainer.model)
    trainer.evaluate()
    after = gradients(trainer.model)
    assert len(before) == 8
    assert all(torch.allclose(after[name], before[name], rtol=1e-4, atol=1e-6) for name in before)


def test_a_model_that_was_packed_for_inference_is_refused(base_folder, tmp_path):
    model = qlora(base_folder)
    layer = next(module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu"))
    layer.weight.quant_state.packing_format_for_cpu = True  # what an evaluation leaves on a CPU with the instructions
    with pytest.raises(ValueError, match="`model` was evaluated on the CPU.*create the trainer before anything"):
        HybridTrainer(model, hybrid_config(tmp_path), train_dataset=ByteText(400))


def test_streamed_4_bit_base_equals_the_resident_one(base_folder, tmp_path):
    resident, streamed = (
        train(tmp_path / memory, qlora(base_folder), max_steps=6, memory=memory) for memory in ("off", "stream")
    )
    assert losses(resident) == losses(streamed)


@pytest.mark.processes
def test_loaders_with_persistent_workers_are_not_mixed_up(tmp_path):
    """`Trainer` keeps one evaluation loader for all data sets then; probes must not be it, nor take it for theirs."""
    held_out, evaluation = ByteText(6, offset=500), ByteText(10, offset=600)
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "max_steps": 4}
    options |= {"warmup_phase_steps": 2, "eval_dataset": evaluation, "probe_dataset": held_out}
    trainer = trainers.build(tmp_path, samples=100, **options)
    first = trainer.evaluate()["eval_loss"]
    batches = trainer.sequence_losses(trainer).held_out()
    assert torch.equal(torch.cat([batch["input_ids"] for batch in batches]), held_out.blocks)
    assert trainer.evaluate()["eval_loss"] == first
