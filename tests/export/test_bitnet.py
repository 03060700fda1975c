"""1.58-bit training: what is computed, all phases, resume, streamed layers, and the packed export."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ByteText, assert_same_weights, losses, tiny_model, weights
from rig import trainers
from safetensors.torch import load_file
from test_export import train_command
from transformers import AutoModelForCausalLM

from hf_hybrid import HybridTrainer
from hf_hybrid.cli.main import main
from hf_hybrid.export import exporter, measure
from hf_hybrid.export.bitnet import to_bitnet, trains_bitnet
from hf_hybrid.export.formats import ExportError
from hf_hybrid.leaps.trajectory import Trajectory

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def eager():
    """transformers compiles the rounding of these layers, which takes half a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


def trainer_of(folder: Path, model=None, resume: bool = False, **options) -> HybridTrainer:
    model = to_bitnet(tiny_model()) if model is None else model
    options = {"max_steps": 24, "eval_dataset": ByteText(8, offset=500), **options}
    return trainers.train(folder, model=model, resume=resume, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> HybridTrainer:
    with torch.compiler.set_stance("force_eager"):
        trainer = trainer_of(tmp_path_factory.mktemp("bitnet") / "out", save_strategy="steps", save_steps=12)
        trainer.save_model()
        return trainer


def test_layers_compute_with_ternary_weights_and_inputs_of_8_bits():
    model = tiny_model()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    to_bitnet(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert model.lm_head.weight is model.model.embed_tokens.weight and trains_bitnet(model.config)
    layer, inputs = model.model.layers[0].mlp.up_proj, torch.randn(3, 5, 32, requires_grad=True)
    mean = layer.weight.abs().mean()
    ternary = (layer.weight / mean).round().clamp(-1, 1)
    assert set(ternary.unique().tolist()) == {-1.0, 0.0, 1.0}
    steps = 127 / inputs.abs().amax(-1, keepdim=True)
    rounded = (inputs * steps).round() / steps
    output = layer(inputs)
    torch.testing.assert_close(output, rounded @ (ternary * mean).T)
    output.backward(upstream := torch.randn_like(output))
    # The rounding counts as the identity.
    torch.testing.assert_close(layer.weight.grad, (upstream.flatten(0, 1).T @ rounded.flatten(0, 1)).detach())
    torch.testing.assert_close(inputs.grad, upstream @ (ternary * mean).detach())


def test_all_phases_train_the_latent_weights(trained):
    summary = trained.hybrid_summary()
    assert all(summary["steps_by_phase"][phase] for phase in ("warmup", "full", "predict", "correct"))
    assert summary["leaps_made"] and losses(trained)[-1] < losses(trained)[0] - 1
    latent = trained.model.model.layers[0].mlp.up_proj.weight
    assert len(latent.detach().unique()) > 100  # not three


def test_a_leap_that_hurts_the_rounded_model_is_undone_in_the_latent_weights(tmp_path, monkeypatch):
    leap, roll_back, before, undone = Trajectory.leap, Trajectory.roll_back, [], []

    def far_uphill(trajectory, gain):
        if trajectory.open.gain == 0:  # not moved yet
            before.append([parameter.detach().clone() for parameter in trajectory.parameters])
        trajectory.max_relative_norm = 1e3
        trajectory.direction.most_per_step = math.inf
        return leap(trajectory, -1e6 * gain)

    def compared(trajectory):
        moved = not all(map(torch.equal, trajectory.parameters, before[-1]))
        roll_back(trajectory)
        undone.append(moved and all(map(torch.equal, trajectory.parameters, before[-1])))

    monkeypatch.setattr(Trajectory, "leap", far_uphill)
    monkeypatch.setattr(Trajectory, "roll_back", compared)
    summary = trainer_of(tmp_path / "out", probe_budget=1.0).hybrid_summary()
    probed = [record for record in summary["leaps"] if record["verdict"] == "rejected"]
    assert probed and all(record["loss_after"] > record["loss_before"] for record in probed)
    assert undone and all(undone)


def test_a_resumed_run_is_equal_to_the_last_bit(trained, tmp_path):
    folder = Path(trained.args.output_dir)
    shutil.copytree(folder / "checkpoint-12", tmp_path / "out" / "checkpoint-12")
    resumed = trainer_of(tmp_path / "out", to_bitnet(tiny_model(seed=3)), tmp_path / "out" / "checkpoint-12")
    assert_same_weights(weights(resumed.model), weights(trained.model))


def test_training_goes_on_from_pretrained_weights_and_from_latent_ones(trained, tmp_path):
    folder = Path(trained.args.output_dir)
    latent = AutoModelForCausalLM.from_pretrained(folder)
    assert trains_bitnet(latent.config) and to_bitnet(latent) is latent
    assert_same_weights(weights(latent), weights(trained.model))
    assert losses(trainer_of(tmp_path / "more", latent, max_steps=3))[0] < losses(trained)[0] - 1
    tiny_model().save_pretrained(tmp_path / "base")
    continued = trainer_of(tmp_path / "out", to_bitnet(AutoModelForCausalLM.from_pretrained(tmp_path / "base")))
    assert_same_weights(weights(continued.model), weights(trained.model))


def test_streamed_layers_train_the_same(trained, tmp_path):
    plain = trainer_of(tmp_path / "resident", enable_predict=False, max_steps=4)
    streamed = trainer_of(tmp_path / "out", enable_predict=False, max_steps=4, memory="stream", vram_budget_gib=1)
    assert streamed.memory.streams
    torch.testing.assert_close(losses(streamed), losses(plain), rtol=1e-4, atol=1e-4)
    result = streamed.export("bitnet")
    assert result["exported"]["loss"] == pytest.approx(streamed.evaluate()["eval_loss"], rel=1e-3)


def test_the_packed_model_is_the_latent_one_rounded(trained, tmp_path):
    result = trained.export("bitnet", tmp_path / "small", max_shard_size="20KB")
    original, exported = result["original"], result["exported"]
    assert original["loss"] == pytest.approx(trained.evaluate()["eval_loss"], rel=1e-4)
    assert exported["loss"] == pytest.approx(original["loss"], abs=1e-3)
    index = json.loads((tmp_path / "small" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1 and "lm_head.weight" not in index["weight_map"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    layer = model.model.layers[1].self_attn.q_proj
    assert layer.weight.dtype == torch.uint8 and layer.weight.shape == (8, 32)  # four weights to a byte
    assert model.lm_head.weight is model.model.embed_tokens.weight
    written = (load_file(path) for path in (tmp_path / "small").glob("*.safetensors"))
    stored = sum(tensor.nbytes for tensors in written for tensor in tensors.values())
    sizes = {name: parameter.numel() for name, parameter in trained.model.named_parameters()}
    ternary = [size for name, size in sizes.items() if "proj" in name]
    dense = sum(ternary)
    assert stored == dense / 4 + 4 * len(ternary) + 4 * (sum(sizes.values()) - dense)
    saved = original["disk_bytes"] - exported["disk_bytes"]
    assert saved == pytest.approx(4 * dense - dense / 4, rel=0.05)
    prompt = torch.tensor([[72, 101, 32, 84]])
    generated = [m.eval().generate(prompt, max_new_tokens=8, do_sample=False) for m in (model, trained.model)]
    assert torch.equal(*generated)


def test_a_plain_run_is_rounded_after_training_and_says_so(tmp_path, caplog, trained):
    plain = trainer_of(tmp_path / "out", tiny_model(), enable_predict=False, max_steps=8)
    result = plain.export("bitnet")
    says = "The model was not trained to be ternary: its weights are rounded to -1, 0 and 1 after training"
    assert says in caplog.text and says in " ".join(exporter.as_text(result).split()) and says in result["caveat"]
    assert says in (tmp_path / "out-bitnet" / "README.md").read_text()
    assert result["original"]["loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-4)
    rounded = to_bitnet(plain.model).eval()
    batches = [{key: value[None] for key, value in ByteText(8, 500)[index].items()} for index in range(8)]
    assert result["exported"]["loss"] == pytest.approx(measure.held_out(rounded, batches)["loss"], abs=1e-3)
    assert result["exported"]["loss"] != pytest.approx(result["original"]["loss"], abs=1e-3)
    caplog.clear()
    ternary = trained.export("bitnet", tmp_path / "ternary")
    assert ternary["caveat"] is None and says not in " ".join(exporter.as_text(ternary).split()) + caplog.text


def test_what_cannot_work_is_refused(trained, tmp_path):
    with pytest.raises(ExportError, match="was trained to be ternary: export it with `format=bitnet`, got `gguf-f16`"):
        exporter.export(trained.args.output_dir, tmp_path / "export", "gguf-f16")
    with pytest.raises(ValueError, match="`model.layers.0.mlp.gate_proj` has 66 rows"):
        to_bitnet(tiny_model(intermediate_size=66))
    trained.export("bitnet", tmp_path / "small")
    with pytest.raises(ValueError, match="is quantised already"):
        to_bitnet(AutoModelForCausalLM.from_pretrained(tmp_path / "small"))
    with pytest.raises(ExportError, match=r"is quantised already \(`bitnet`\)"):
        exporter.export(tmp_path / "small", tmp_path / "export", "bitnet")


def test_the_command_trains_resumes_and_exports(tmp_path, capsys):
    command = train_command(tmp_path, qat="bitnet")
    assert main([*command, "--peft", "lora"]) == 2
    assert main(command) == 0
    first = (tmp_path / "out" / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "out" / "checkpoint-6")  # a run goes on from its last checkpoint
    assert main([*command, "--resume_from_checkpoint", str(tmp_path / "out" / "checkpoint-3")]) == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == first
    assert main(["export", str(tmp_path / "out"), "--format", "bitnet", "--measure"]) == 0
    result = json.loads((tmp_path / "out-bitnet" / "export.json").read_text())
    evaluated = json.loads((tmp_path / "out" / "eval_results.json").read_text())["eval_loss"]
    assert result["exported"]["loss"] == pytest.approx(evaluated, abs=1e-3)
