"""The merged export: 16-bit safetensors that compute what the run computes, adapters of every kind included."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ByteText, tiny_model
from rig import trainers
from safetensors.torch import load_file
from test_export import batches, bpe_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hybrid.cli.main import main
from hf_hybrid.export import exporter, measure
from hf_hybrid.export.formats import FORMATS, ExportError
from hf_hybrid.files import BASE_NAME

peft = pytest.importorskip("peft")
IDS = torch.arange(40)[None] * 5
CHAT = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
pytestmark = pytest.mark.filterwarnings("ignore")


def base_folder(folder: Path, dtype: torch.dtype = torch.float32, **options) -> Path:
    """A model with the tokenizer that has a chat template, as it comes from the Hub."""
    model = tiny_model(vocab_size=264, hidden_size=64, **options).to(dtype)
    model.generation_config.temperature, model.generation_config.do_sample = 0.25, True
    model.save_pretrained(folder)
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def adapted(base: Path, load: dict | None = None, **options):
    """Adapters on a base, none of whose weights is zero."""
    options = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    model = AutoModelForCausalLM.from_pretrained(base, **(load or {}))
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(IDS).logits.float()


def assert_within_rounding(found: torch.Tensor, wanted: torch.Tensor, bits: int = 8) -> None:
    """Each of a dozen layers rounds its weights to so many bits; a merge that went wrong changes the logits wholly."""
    error, scale = (found - wanted).norm(), wanted.norm()
    assert error < 3 * 2.0**-bits * scale


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FRESH = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
found, ids = {}, torch.arange(40)[None] * 5
for name, folder in json.loads(sys.argv[1]).items():
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    talk = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    temperature = GenerationConfig.from_pretrained(folder).temperature
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    found[name] = [str(model.dtype), model(ids).logits.float().tolist(), talk, temperature, tied]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """By dtype of the base: the folder, the model with its adapters, the result, and what a fresh process finds."""
    made, folders = {}, {}
    for dtype in DTYPES:
        folder = tmp_path_factory.mktemp("merged")
        model = adapted(base_folder(folder / "base", dtype))
        model.save_pretrained(folder / "run")
        made[dtype] = folder, model, exporter.export(folder / "run", folder / "merged", "merged", batches=batches(2))
        folders[str(dtype)] = str(folder / "merged")
    command = [sys.executable, "-c", FRESH, json.dumps(folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {dtype: (*values, found[str(dtype)]) for dtype, values in made.items()}


@pytest.mark.processes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fresh_process_computes_what_the_adapters_compute(merged, dtype):
    folder, model, result, (found_dtype, found, talk, temperature, tied) = merged[dtype]
    kept = torch.float16 if dtype is torch.float16 else torch.bfloat16
    assert result["dtype"] == str(kept)[6:] and result["caveat"] is None
    written = load_file(folder / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {kept}
    assert not any("lora" in name for name in written) and "lm_head.weight" not in written
    assert not (folder / "merged" / "adapter_config.json").exists()
    assert (found_dtype, talk, temperature, tied) == (str(kept), "user: the<|end|>", 0.25, True)
    wanted = logits(model.float())
    assert_within_rounding(torch.tensor(found), wanted)
    assert (logits(AutoModelForCausalLM.from_pretrained(folder / "base")) - wanted).norm() > wanted.norm() / 10


@pytest.mark.parametrize("tied", [False, True])
def test_the_sum_is_computed_in_fp32_and_rounded_once(tmp_path, tied):
    """Adapters this small move most weights by less than half a step, where the nearest number is the base."""
    modules = {"target_modules": ["q_proj", "down_proj", "embed_tokens"] + ["lm_head"] * tied}
    base = base_folder(tmp_path / "base", torch.bfloat16)
    model = adapted(base, **modules)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.mul_(0.01 if "lora_" in name else 1.0)
        if tied:  # equal sums
            entry, head = model.get_input_embeddings(), model.get_output_embeddings()
            head.lora_A["default"].weight.copy_(entry.lora_embedding_B["default"].T)
            head.lora_B["default"].weight.copy_(entry.lora_embedding_A["default"].T)
    model.save_pretrained(tmp_path / "run")
    exporter.export(tmp_path / "run", tmp_path / "merged", "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.tie_word_embeddings == tied
    adapters = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    sums = {f"{name.removeprefix('base_model.model.')}.weight": adapter for name, adapter in adapters.items()}
    assert len(sums) == 5 + tied
    start = AutoModelForCausalLM.from_pretrained(base).state_dict()
    for name, found in merged.state_dict().items():
        if name not in sums:
            assert torch.equal(found, start[name]), name
            continue
        learned = sums[name].get_delta_weight("default").detach()
        exact = start[name].float() + learned
        assert_between_neighbours(found, exact)
        kept, of_nearest = (
            float(((weights.float() - start[name].float()) * learned).sum() / learned.square().sum())
            for weights in (found, exact.bfloat16())
        )
        assert kept == pytest.approx(1, abs=0.15) and not of_nearest == pytest.approx(1, abs=0.15), name


def assert_between_neighbours(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Each number of 16 bits is next to the exact one, below or above."""
    step = torch.finfo(found.dtype).eps * exact.abs().clamp(min=1e-30)  # a step is at most as long
    assert ((found.float() - exact).abs() < step).all()


@pytest.mark.parametrize(
    "options, tied",
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, False),
        ({"target_modules": ["q_proj", "lm_head"]}, False),
        ({"target_modules": ["q_proj", "embed_tokens", "lm_head"], "ensure_weight_tying": True}, True),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [5, 10]}, True),
        ({"use_dora": True}, True),
    ],
    ids=str,
)
def test_adapters_on_tied_embeddings_compute_the_same_after_merging(tmp_path, options, tied):
    model = adapted(base_folder(tmp_path / "base"), **options)
    wanted = logits(model)
    model.save_pretrained(tmp_path / "run")
    exporter.export(tmp_path / "run", tmp_path / "merged", "merged", dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), wanted, rtol=1e-4, atol=1e-4)
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == merged.config.tie_word_embeddings == tied


def test_a_run_without_adapters_is_written_in_16_bits(tmp_path, capsys):
    base = base_folder(tmp_path / "run", tie_word_embeddings=False)
    assert main(["export", str(base), "--format", "merged"]) == 0
    captured = capsys.readouterr()
    assert "weights on disk" in captured.out and "run-merged" in captured.err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run-merged")
    exact = AutoModelForCausalLM.from_pretrained(base)
    for found, parameter in zip(model.parameters(), exact.parameters()):
        assert_between_neighbours(found, parameter)
    assert AutoTokenizer.from_pretrained(tmp_path / "run-merged").chat_template == CHAT
    written = load_file(tmp_path / "run-merged" / "model.safetensors")
    stored = sum(tensor.nbytes for tensor in written.values())
    assert stored == 2 * sum(weights.numel() for weights in exact.parameters()) and "lm_head.weight" in written
    card = (tmp_path / "run-merged" / "README.md").read_text()
    assert "## Merged export" in card and "quantized" not in card
    assert "They are in bfloat16, rounded stochastically." in card


def test_a_trainer_exports_its_adapters_as_a_plain_model(tmp_path):
    model = adapted(base_folder(tmp_path / "base"))
    options = {"max_steps": 6, "learning_rate": 1e-2, "processing_class": bpe_tokenizer()}
    trainer = trainers.train(tmp_path / "out", model=model, samples=40, eval_dataset=ByteText(8, offset=200), **options)
    trainer.save_model()
    trainer.create_model_card(model_name="small")
    result = trainer.export("merged", max_shard_size="60KB")
    loss = trainer.evaluate()["eval_loss"]
    assert result["exported"]["loss"] == pytest.approx(loss, rel=2e-3)
    folder = tmp_path / "out-merged"
    assert_within_rounding(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(trainer.model))
    assert len(set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())) > 1
    # The run is loaded by peft, and the export by transformers.
    run, card = [(path / "README.md").read_text() for path in (tmp_path / "out", folder)]
    assert "library_name: peft" in run and "library_name: transformers" in card
    assert not (tmp_path / "out" / BASE_NAME).exists()


def four_bits() -> dict:
    pytest.importorskip("bitsandbytes")
    return {"quantization_config": FORMATS["nf4"].quantization(torch.float32), "device_map": "cpu"}


def test_a_base_that_trained_in_4_bits_is_dequantised(tmp_path):
    load, base = four_bits(), base_folder(tmp_path / "base")
    options = {"max_steps": 6, "save_steps": 3, "save_strategy": "steps", "eval_dataset": ByteText(8, offset=200)}
    trainer = trainers.train(tmp_path / "out", model=adapted(base, load), samples=40, **options)
    wanted, loss = logits(trainer.model), trainer.evaluate()["eval_loss"]
    checkpoint = tmp_path / "out" / "checkpoint-6"
    result = exporter.export(checkpoint, tmp_path / "merged", "merged", dtype="float32", batches=batches())
    assert result["exported"]["loss"] == pytest.approx(loss, rel=1e-4)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert getattr(merged.config, "quantization_config", None) is None
    torch.testing.assert_close(logits(merged), wanted, rtol=1e-4, atol=1e-4)
    # Without the note of the run the unquantised base is taken, which is another model.
    (checkpoint / BASE_NAME).unlink()
    (checkpoint / "hybrid_manifest.json").unlink()  # it lists the note
    exporter.export(checkpoint, tmp_path / "other", "merged", dtype="float32")
    assert (logits(AutoModelForCausalLM.from_pretrained(tmp_path / "other")) - wanted).abs().max() > 1e-3


def test_a_base_that_is_saved_in_4_bits_is_dequantised(tmp_path):
    load = four_bits()
    packed = AutoModelForCausalLM.from_pretrained(base_folder(tmp_path / "base"), **load)
    packed.save_pretrained(tmp_path / "packed")
    model = adapted(tmp_path / "packed")
    wanted = logits(model)
    model.save_pretrained(tmp_path / "run")
    exporter.export(tmp_path / "run", tmp_path / "merged", "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype is torch.bfloat16
    assert_within_rounding(logits(merged), wanted)


def test_the_note_of_a_quantised_base_goes_with_the_next_run(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / BASE_NAME).write_text("{}")  # of an earlier run in 4 bits
    trainers.build(tmp_path / "out", model=adapted(base_folder(tmp_path / "base")), max_steps=1).save_model()
    assert not (tmp_path / "out" / BASE_NAME).exists()


def test_weights_that_overflow_are_refused(tmp_path):
    model = tiny_model(vocab_size=264)
    with torch.no_grad():
        model.model.norm.weight[0] = 1e6
    model.save_pretrained(tmp_path / "run")
    with pytest.raises(ExportError, match="`model.norm.weight` has values that are not finite in `float16`"):
        exporter.export(tmp_path / "run", tmp_path / "merged", "merged", dtype="float16")
    assert not (tmp_path / "merged").exists()
    exporter.export(tmp_path / "run", tmp_path / "merged", "merged")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert measure.held_out(found, batches(1))["loss"] > 0


@pytest.mark.parametrize("in_fp32", [False, True])
def test_layers_that_trained_whole_beside_adapters_keep_what_they_learned(tmp_path, in_fp32):
    """Whoever casts them to fp32 for training, as is advised for heads, gets them in the one type of an export."""
    base = base_folder(tmp_path / "base", torch.bfloat16)
    model = adapted(base, target_modules=["q_proj"], modules_to_save=["lm_head"])
    head = model.get_output_embeddings().modules_to_save["default"]
    start = head.weight.detach().float()
    if in_fp32:
        head.float()
    with torch.no_grad():
        head.weight.mul_(1 + 2**-11 if in_fp32 else 1.5)  # a quarter of the distance to the next number, and less
    model.save_pretrained(tmp_path / "run")
    exporter.export(tmp_path / "run", tmp_path / "merged", "merged")
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert {weights.dtype for weights in found.values()} == {torch.bfloat16}
    learned = head.weight.detach().float() - start
    assert_between_neighbours(found["lm_head.weight"], start + learned)
    kept = float(((found["lm_head.weight"].float() - start) * learned).sum() / learned.square().sum())
    assert kept == pytest.approx(1, abs=0.15)
