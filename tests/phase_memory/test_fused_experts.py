"""Adapters on fused experts: what PEFT computes, without its copies; trained, resumed and exported."""

import pytest
import torch
from conftest import assert_same_weights, mostly_slow, weights
from peft import LoraConfig, get_peft_model
from rig import trainers
from rig.sft_rows import agent, pad
from rig.tiny_architectures import FIRST_DATA_TOKEN, build_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.build import make_plan
from hf_hybrid.export import exporter
from hf_hybrid.optimizers import split_parameters
from hf_hybrid.phase_memory.fused_experts import FusedExperts, adapted_experts
from hf_hybrid.run.run import Run
from hf_hybrid.streaming.low_bit import dequantize_rows, quantize_rows

TARGETS = {
    "qwen3_moe": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "gpt_oss": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],  # transposed, with biases
    "lfm2_moe": ["feed_forward.experts.down_proj"],
}


def adapted(kind, base=None, **options):
    """Adapters of attention and experts whose `B` are not zero."""
    base = build_model(kind) if base is None else base
    torch.manual_seed(1)
    values = {"r": 8, "lora_alpha": 12, "target_modules": ["q_proj"], "target_parameters": TARGETS[kind], **options}
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **values))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def rows(count):
    return [
        {"input_ids": [token + FIRST_DATA_TOKEN for token in row["input_ids"]],
         "labels": [token if token < 0 else token + FIRST_DATA_TOKEN for token in row["labels"]]}
        for row in agent(count)[:count]
    ]  # fmt: skip


def part_of(model):
    part = FusedExperts(adapted_experts(model))
    part.begin(Run([]))
    return part


def gradients(model, batch):
    """Loss, gradients, and bytes that autograd keeps until the backward pass beside the weights."""
    resident = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in resident:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**batch).loss
    loss.backward()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, kept


@pytest.mark.parametrize("kind", TARGETS)
def test_experts_compute_what_peft_computes(kind):
    model, batch = adapted(kind), pad(rows(3))
    model.eval()
    wanted, of_peft, _ = gradients(model, batch)
    with model.disable_adapter():
        base = model(**batch).loss
    part = part_of(model)
    assert part.layers
    found, ours, _ = gradients(model, batch)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert ours.keys() == of_peft.keys() and any("experts" in name for name in ours)
    for name, gradient in of_peft.items():
        assert (ours[name] - gradient).norm() < 1e-5 * gradient.norm() + 1e-9, name
    with model.disable_adapter():
        assert model(**batch).loss == base  # the reference of DPO
    model.merge_adapter()
    assert model(**batch).loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    model.unmerge_adapter()
    part.clean_up()
    torch.testing.assert_close(gradients(model, batch)[0], wanted)


def test_no_copy_of_the_experts_is_kept_for_the_backward_pass():
    model, batch = adapted("qwen3_moe"), pad(rows(1))
    copies = {parameter.nbytes for parameter in model.parameters() if parameter.ndim == 3}
    _, _, of_peft = gradients(model, batch)
    part_of(model)
    _, _, ours = gradients(model, batch)
    assert copies <= set(of_peft.values()) and not copies & set(ours.values())


def test_a_plan_counts_no_copy_of_the_experts(tmp_path):
    """Where PEFT's forward stays, it does."""
    peaks = []
    for share_rows in ("on", "off"):
        values = {"share_rows": share_rows, "use_cpu": True, "per_device_train_batch_size": 1, "save_strategy": "no"}
        trainer = trainers.build(
            tmp_path,
            config=HybridConfig,
            model=adapted("qwen3_moe"),
            train_dataset=rows(8),
            data_collator=pad,
            **values,
        )
        plan = make_plan(trainer, None)
        assert plan.traced
        peaks.append(plan.peak_device_bytes)
    experts = sum(p.nbytes for p in trainer.model.parameters() if p.ndim == 3)
    assert peaks[1] - peaks[0] > 0.9 * experts


@pytest.mark.parametrize("other", ["eager", "rank"])
def test_what_cannot_be_grouped_keeps_the_bits_of_peft(other):
    """Another implementation that the user chose, and rows that are not aligned."""
    model, batch = adapted("qwen3_moe", r=8 if other == "eager" else 3), pad(rows(2))
    if other == "eager":
        model.get_base_model().set_experts_implementation("eager")
    wanted = model(**batch).loss
    assert bool(part_of(model).layers) == (other == "eager")
    assert model(**batch).loss == wanted


def halves(module, inputs, output):
    return output * 0.5


def hook_experts(layer):
    return layer.get_base_layer().register_forward_hook(halves).remove


def hook_wrapper(layer):
    return layer.base_layer.register_forward_hook(halves).remove


def replace(layer):
    experts = layer.get_base_layer()
    forward = experts.forward
    experts.forward = lambda *args: forward(*args) * 0.5
    return lambda: vars(experts).pop("forward")


@pytest.mark.parametrize("change", [hook_experts, hook_wrapper, replace])
def test_what_looks_into_experts_sees_pefts_forward(change, caplog):
    """Also where it comes after the run began; when it is gone, experts compute in groups again."""
    caplog.set_level("INFO", logger="hf_hybrid")
    model, batch = adapted("qwen3_moe").eval(), pad(rows(2))
    part, found = part_of(model), [model(**batch).loss]
    undo = [change(layer) for layer in part.layers]
    found += [model(**batch).loss, model(**batch).loss]
    part.clean_up()
    wanted = model(**batch).loss
    for one in undo:
        one()
    assert found[1] == found[2] == wanted and abs(found[0] - wanted) > 1e-4
    part.begin(Run([]))
    assert model(**batch).loss == found[0]
    assert sum("of experts are computed as PEFT does it" in record.getMessage() for record in caplog.records) == 1


def test_another_adapter_of_experts_whose_rows_are_not_aligned():
    model, batch = adapted("qwen3_moe").eval(), pad(rows(2))
    part = part_of(model)
    model.add_adapter("odd", LoraConfig(r=3, target_modules=["q_proj"], target_parameters=TARGETS["qwen3_moe"]))
    model.set_adapter("odd")
    found = model(**batch).loss
    part.clean_up()
    assert found == model(**batch).loss


def trained(folder, kind=HybridTrainer, config=HybridConfig, *, model=None, resume=None, **options):
    values = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4, "optim": "sgd",
        "learning_rate": 1.0, "max_grad_norm": 0.0, "save_strategy": "no", "use_cpu": True, **options,
    }  # fmt: skip
    if config is HybridConfig:
        values = {"auto_lr": "off", "share_rows": "on", "enable_predict": False, **values}
    model = adapted("qwen3_moe") if model is None else model
    trainer = trainers.build(folder, kind, config, model=model, train_dataset=rows(32), data_collator=pad, **values)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("options", [{}, {"memory": "stream"}, {"gradient_checkpointing": True}], ids=str)
def test_a_training_equals_plain_trainer(options, tmp_path):
    """With rows that share."""
    wanted = trained(tmp_path / "plain", Trainer, TrainingArguments).model
    trainer = trained(tmp_path / "hybrid", **options)
    assert trainer.hybrid_summary()["tokens_shared"] > 0
    assert any(isinstance(part, FusedExperts) for part in trainer.parts)
    start, found = dict(adapted("qwen3_moe").named_parameters()), dict(trainer.model.named_parameters())
    for name, parameter in wanted.named_parameters():
        moved = (parameter - start[name]).norm()
        assert (parameter - found[name]).norm() <= 1e-4 * moved + 1e-7, name
        assert (moved > 0) == parameter.requires_grad


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"direction": "orthogonal", "enable_predict": True}], ids=str)
def test_a_resumed_run_ends_at_the_same_bits(options, tmp_path):
    more = {"optim": "adamw_torch", "learning_rate": 1e-3, "max_steps": 12, "max_grad_norm": 1.0, **options}
    more |= {"save_strategy": "steps", "save_steps": 6, "per_device_train_batch_size": 2}
    whole = trained(tmp_path / "run", **more)
    again = trained(tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-6"), **more)
    assert_same_weights(weights(again.model), weights(whole.model))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_merged_and_low_bit_exports(kind, tmp_path, caplog):
    """Experts are merged. What quantises linear layers alone says how much of the model it leaves as it is."""
    pytest.importorskip("torchao")
    build_model(kind).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    model, batch = adapted(kind, base).eval(), pad(rows(3))
    model.save_pretrained(tmp_path / "run")
    with torch.no_grad():
        wanted = model.float()(**batch).loss.item()
        with model.disable_adapter():
            assert abs(model(**batch).loss.item() - wanted) > 3e-3
    merged = exporter.export(tmp_path / "run", tmp_path / "merged", "merged", dtype="float32", batches=[batch])
    assert merged["exported"]["loss"] == pytest.approx(wanted, rel=2e-4) and merged["caveat"] is None
    low = exporter.export(tmp_path / "run", tmp_path / "int8", "int8", batches=[batch])
    assert "Weights of experts that lie in one tensor stay in bfloat16: 8" in low["caveat"]
    assert low["caveat"] in caplog.text and low["caveat"] in (tmp_path / "int8" / "README.md").read_text()


def test_muon_leaves_adapters_of_experts_to_adamw():
    """PEFT writes the thin matrices of all experts as one, which Muon would orthogonalise across experts."""
    matrices, rest = split_parameters(adapted("qwen3_moe"))
    assert matrices and all("q_proj" in name for name in matrices)
    assert rest and all("experts" in name for name in rest)


@pytest.mark.parametrize("kind", mostly_slow(TARGETS, ["qwen3_moe"]))
def test_over_an_int8_base_the_update_is_that_over_its_rounded_weights(kind, tmp_path):
    """Packed experts too, to the last bit: nothing but the rounding of the base changes."""
    found = []
    for options in ({}, {"base_precision": "int8"}):
        model = adapted(kind)
        for weight in model.get_base_model().get_decoder().layers.parameters():
            if not options and not weight.requires_grad and weight.ndim >= 2:
                dequantize_rows(*quantize_rows(weight.data), out=weight.data)
        values = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1, "share_rows": "on", "memory": "stream"}
        values |= {**options, "model": model, "train_dataset": rows(12), "data_collator": pad}
        trained = trainers.train(tmp_path, HybridTrainer, HybridConfig, **values)
        found.append({name: p.detach().clone() for name, p in trained.model.named_parameters() if p.requires_grad})
    assert_same_weights(*found)
