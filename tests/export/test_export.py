"""Exports in every format: what they hold and cost, how they load, and what is refused without leaving a trace."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import ByteText, mostly_slow, tiny_model
from huggingface_hub import ModelCard
from rig import trainers
from rig.run_folders import change
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hf_hybrid import HybridTrainer
from hf_hybrid.cli.data import NOTE_NAME, Reader
from hf_hybrid.cli.main import main
from hf_hybrid.cli.options import TextDataOptions
from hf_hybrid.export import exporter, formats, measure, source
from hf_hybrid.export.formats import FORMATS, ExportError

PACKAGES = {"int8": "torchao", "nf4": "bitsandbytes", **{name: "gguf" for name in FORMATS if name.startswith("gguf")}}
WRITTEN = sorted(PACKAGES)
"""Formats that a CPU can write."""
LOSSES = {"int8": 0.005, "nf4": 0.04, "gguf-f16": 0.001, "gguf-q8_0": 0.005}
"""How far each may move the held-out loss; other formats with 4 and 5 bits as `nf4`."""
pytestmark = pytest.mark.filterwarnings("ignore")


def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with two merges."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"th": 256, "the": 257, "<|end|>": 258}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def spaced_tokenizer(prefix: bool = False, **ends) -> PreTrainedTokenizerFast:
    """BPE over whole texts in which a space is `▁`, with bytes for unknown letters, as of SentencePiece."""
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("th", "e"), ("▁", "▁"), ("i", "n"), ("in", "g"), ("▁", "o")]
    words = ["<unk>", "<s>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256)), *map("".join, merges)]
    words += [*"▁theo ing,rndx12mf"]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(word for word in words if word != " "))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps) if prefix else steps[0]
    ends = {"bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>", "pad_token": "<|end|>", **ends}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)


KINDS = (Qwen3Config, MistralConfig, Qwen3MoeConfig, Phi3Config, Gemma2Config, Gemma3TextConfig)


def of_kind(kind, tied: bool, **values):
    """A small model of a kind, with fewer heads of keys than of queries, some heads wide and some windows small."""
    gemma, head = "Gemma" in kind.__name__, {Qwen3Config: 128, Gemma2Config: 256, Gemma3TextConfig: 256}.get(kind, 16)
    shape = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head,
        "num_hidden_layers": 7 if gemma else 2,
    }
    shape |= {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 264, "max_position_embeddings": 64}
    rope = {"rope_type": "default", "rope_theta": 500.0}
    if kind is Gemma3TextConfig:
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    own = {
        MistralConfig: {"sliding_window": 48}, Phi3Config: {"sliding_window": 48, "pad_token_id": 0},
        Qwen3MoeConfig: {"num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True},
        Gemma2Config: {"sliding_window": 16}, Gemma3TextConfig: {"sliding_window": 16},
    }  # fmt: skip
    shape |= {"tie_word_embeddings": tied, "rope_parameters": rope, "rms_norm_eps": 1e-3, **own.get(kind, {}), **values}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))  # no bias is zero, and no norm one
    return model.eval()


def trained(folder: Path, model=None, callbacks=(), **options) -> HybridTrainer:
    """A run of twelve steps. Rows of 64 weights are the shortest that bitsandbytes computes with on a CPU."""
    model = tiny_model(vocab_size=264, hidden_size=64) if model is None else model
    data = {"samples": 100, "eval_dataset": ByteText(8, offset=200), "processing_class": bpe_tokenizer()}
    return trainers.train(folder, model=model, callbacks=list(callbacks), max_steps=12, **data, **options)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    trainer = trained(tmp_path_factory.mktemp("export") / "out")
    trainer.save_model()
    trainer.evaluate()
    trainer.create_model_card(model_name="small")
    return trainer


@pytest.fixture(scope="module")
def run(trainer) -> Path:
    return Path(trainer.args.output_dir)


@pytest.fixture(scope="module")
def exports(trainer) -> dict[str, tuple[Path, dict]]:
    """By format: the folder, and what was measured."""
    found = {}
    for name in WRITTEN:
        try:
            __import__(PACKAGES[name])
        except ImportError:
            continue
        found[name] = (Path(f"{trainer.args.output_dir}-{name}"), trainer.export(name))
    return found


def batches(sequences: int = 8) -> list[dict]:
    return [
        {key: value[None] for key, value in row.items()}
        for row in map(ByteText(sequences, 200).__getitem__, range(sequences))
    ]


def loaded(folder: Path, name: str):
    return AutoModelForCausalLM.from_pretrained(folder, **({"gguf_file": "model.gguf"} if "gguf" in name else {}))


def given(exports: dict, name: str) -> tuple[Path, dict]:
    if name not in exports:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    return exports[name]


def train_command(folder: Path, **more) -> list[str]:
    """The words that train a tiny model on a text for six steps, in `out` below a folder."""
    tiny_model(vocab_size=264).config.save_pretrained(folder / "model")
    bpe_tokenizer().save_pretrained(folder / "model")
    (folder / "text.txt").write_text("\n\n".join(["The other thing is there, and then some more of them."] * 80))
    words = {"model": folder / "model", "dataset": folder / "text.txt", "output_dir": folder / "out", **more}
    words |= {"sequence_length": 32, "max_steps": 6, "save_steps": 3, "per_device_train_batch_size": 2}
    words |= {"report_to": "none", "use_cpu": "true", "disable_tqdm": "true"}
    return ["train", *(word for name, value in words.items() for word in (f"--{name}", str(value)))]


# What an export is.


@pytest.mark.parametrize("name", WRITTEN)
def test_an_export_is_measured_beside_the_original(exports, trainer, name):
    folder, result = given(exports, name)
    assert result == json.loads((folder / "export.json").read_text())
    original, exported = result["original"], result["exported"]
    assert original["loss"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)
    assert abs(result["loss_change"]) < LOSSES.get(name, 0.04)
    again = measure.held_out(loaded(folder, name), batches())
    assert again["loss"] == pytest.approx(exported["loss"], rel=1e-4)
    assert (result["sequences"], result["tokens"]) == (8, 8 * 31)
    weights = sum(path.stat().st_size for path in folder.glob("model.*"))
    assert exported["disk_bytes"] == weights < original["disk_bytes"] * (0.7 if name == "gguf-f16" else 0.5)
    assert sorted(path.name for path in folder.parent.glob("_*")) == []


@pytest.mark.parametrize("name", WRITTEN)
def test_tied_weights_stay_tied(exports, name):
    folder, _ = given(exports, name)
    model = loaded(folder, name)
    assert model.config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.slow
@pytest.mark.processes
def test_exports_generate_in_a_fresh_process_what_they_generate_in_memory(exports, run):
    prompt = torch.tensor([[72, 101, 257, 32, 84]])
    expected = {}
    for name, (folder, _) in exports.items():
        quantization = FORMATS[name].quantization
        more = {} if quantization is None else {"quantization_config": quantization(torch.float32)}
        model = formats.load(folder if quantization is None else run, torch.float32, **more)
        expected[name] = model.generate(prompt, max_new_tokens=8, do_sample=False).tolist()
    script = (
        "import json, sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "found, prompt = {}, torch.tensor(json.loads(sys.argv[1]))\n"
        "for name, folder in json.loads(sys.argv[2]).items():\n"
        "    more = {'gguf_file': 'model.gguf'} if 'gguf' in name else {}\n"
        "    model = AutoModelForCausalLM.from_pretrained(folder, **more)\n"
        "    found[name] = model.generate(prompt, max_new_tokens=8, do_sample=False).tolist()\n"
        "print(json.dumps(found))\n"
    )
    folders = json.dumps({name: str(folder) for name, (folder, _) in exports.items()})
    command = [sys.executable, "-c", script, json.dumps(prompt.tolist()), folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected


@pytest.mark.parametrize(
    "kind, tied", [(LlamaConfig, True), (LlamaConfig, False), (Qwen2Config, True), *((kind, False) for kind in KINDS)]
)
def test_gguf_holds_the_same_model_and_tokenizer(tmp_path, kind, tied):
    pytest.importorskip("gguf")
    tied = tied or "Gemma" in kind.__name__
    model = of_kind(kind, tied)
    model.save_pretrained(tmp_path / "run")
    bpe_tokenizer().save_pretrained(tmp_path / "run")
    result = exporter.export(tmp_path / "run", tmp_path / "export", "gguf-f16")
    assert result["original"]["loss"] is None and result["loss_change"] is None
    read = loaded(tmp_path / "export", "gguf")
    assert read.config.tie_word_embeddings == tied
    positions = 48 if kind in (MistralConfig, Phi3Config) else 64  # their window
    assert read.config.max_position_embeddings == positions and read.config.rms_norm_eps == pytest.approx(1e-3)
    ids = torch.arange(40)[None]
    torch.testing.assert_close(read(ids).logits, model(ids).logits, atol=2e-3, rtol=1e-2)
    text = "the other thing,  and 12 more<|end|>"
    ids = bpe_tokenizer()(text)["input_ids"]
    assert 258 in ids and 257 in ids
    assert AutoTokenizer.from_pretrained(tmp_path / "export")(text)["input_ids"] == ids
    assert AutoTokenizer.from_pretrained(tmp_path / "export", gguf_file="model.gguf")(text)["input_ids"] == ids


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_weights_are_written_in_shards(run, tmp_path, name):
    pytest.importorskip(PACKAGES[name])
    result = exporter.export(
        run, tmp_path / "export", name, batches=batches(2), max_shard_size="40KB", dtype="bfloat16"
    )
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    model = loaded(tmp_path / "export", name)
    assert model.model.norm.weight.dtype == torch.bfloat16 and model.generation_config is not None
    assert measure.held_out(model, batches(2))["loss"] == pytest.approx(result["exported"]["loss"], rel=1e-3)


def test_the_card_has_the_costs_in_place_of_the_results(exports):
    folder, result = given(exports, "int8")
    card = (folder / "README.md").read_text()
    assert "# small" in card and "## Low-bit export" in card and "### Phases" in card and "## Results" not in card
    assert f"| eval loss | {result['original']['loss']:.4f} | {result['exported']['loss']:.4f} (" in card
    assert "model-index" not in card and "## Results" in (folder.parent / "out" / "README.md").read_text()
    assert card.count("AutoModelForCausalLM.from_pretrained(") == 1 and "- quantized" in card
    assert str(folder.parent) not in card + (folder / "export.json").read_text()
    code = card.split("```python\n")[1].split("```")[0].replace("path/to/this/folder", str(folder))
    exec(code, names := {})
    assert names["tokenizer"].eos_token == "<|end|>" and names["model"].config.vocab_size == 264


# Runs of every kind.


def test_adapters_are_merged(tmp_path):
    peft = pytest.importorskip("peft")
    pytest.importorskip("torchao")
    tiny_model(vocab_size=264, hidden_size=64).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = trained(tmp_path / "out", peft.get_peft_model(base, config), learning_rate=2e-2)
    loss = trainer.evaluate()["eval_loss"]
    untrained = measure.held_out(tiny_model(vocab_size=264, hidden_size=64).eval(), batches())["loss"]
    assert loss < untrained - 0.05
    result = trainer.export("int8")
    assert result["original"]["loss"] == pytest.approx(loss, rel=1e-4)
    assert result["exported"]["loss"] == pytest.approx(loss, rel=5e-3)
    trainer.save_model()
    again = exporter.export(tmp_path / "out", tmp_path / "again", "int8", batches=batches())
    assert again["exported"]["loss"] == pytest.approx(result["exported"]["loss"], rel=1e-5)
    assert not (tmp_path / "again" / "adapter_config.json").exists()


def test_adapters_of_a_base_in_4_bits_are_merged_into_the_base_in_its_own_precision(tmp_path):
    peft = pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("gguf")
    base = tiny_model(vocab_size=264, hidden_size=64)
    base.save_pretrained(tmp_path / "base")
    bpe_tokenizer().save_pretrained(tmp_path / "out")
    packed = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=FORMATS["nf4"].quantization(torch.float32), device_map="cpu"
    )
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")  # which change nothing yet
    peft.get_peft_model(packed, config).save_pretrained(tmp_path / "out")
    result = exporter.export(tmp_path / "out", tmp_path / "export", "gguf-q8_0", batches=batches())
    assert result["original"]["loss"] == pytest.approx(measure.held_out(base.eval(), batches())["loss"], rel=1e-6)


def test_an_export_pushes_nothing(trainer, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setattr(trainer.args, "push_to_hub", True)
    monkeypatch.setattr(trainer, "push_to_hub", lambda *args, **kwargs: pytest.fail("pushed"))
    trainer.export("gguf-q8_0", tmp_path / "export")


def test_a_streamed_run_is_exported(tmp_path):
    pytest.importorskip("torchao")
    trainer = trained(tmp_path / "out", memory="stream", vram_budget_gib=1)
    assert trainer.memory.streams
    loss = trainer.evaluate()["eval_loss"]
    result = trainer.export("int8", tmp_path / "small")
    assert result["original"]["loss"] == pytest.approx(loss, rel=1e-4)
    assert abs(result["loss_change"]) < 0.005
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-6)  # it goes on streaming


def test_the_command_measures_on_what_the_run_held_out(tmp_path, capsys):
    pytest.importorskip("torchao")
    out = tmp_path / "out"
    assert main(train_command(tmp_path)) == 0
    evaluated = json.loads((out / "eval_results.json").read_text())["eval_loss"]
    capsys.readouterr()
    assert main(["export", str(out), "--format", "int8", "--measure"]) == 0
    captured = capsys.readouterr()
    result = json.loads((tmp_path / "out-int8" / "export.json").read_text())
    assert result["original"]["loss"] == pytest.approx(evaluated, rel=1e-4)
    assert f"eval loss  {evaluated:.4f}"[:18] in " ".join(captured.out.split()).replace("loss ", "loss  ")
    assert re.search(r"Writing int8 .*Written: \S*out-int8\nMeasuring the loss of ", captured.err, re.S)
    # A checkpoint finds the note beside it, and other texts take its place.
    own = ["--eval-dataset", str(tmp_path / "text.txt"), "--eval_sequences", "3"]
    assert main(["export", str(out / "checkpoint-3"), "--format", "int8", *own]) == 0
    assert json.loads((out / "checkpoint-3-int8" / "export.json").read_text())["sequences"] == 3
    # Nothing is written over, and the same command says so.
    before = (tmp_path / "out-int8" / "export.json").read_bytes()
    assert main(["export", str(out), "--format", "int8"]) == 2
    assert "exists, and nothing is written over" in capsys.readouterr().err
    assert (tmp_path / "out-int8" / "export.json").read_bytes() == before


# What is refused.


def written(name: str, value) -> Callable[[Path], object]:
    """A damage: a file with this text, or with this value as JSON."""
    return lambda folder: (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def index_of(value) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder.parent / "secret.safetensors")
        written("model.safetensors.index.json", value)(folder)

    return damage


def options_of(name: str, **values) -> Callable[[Path], None]:
    """A damage: other values in a file of JSON."""
    return lambda folder: change(folder / name, **values)


def cut_short(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def only_checkpoints(folder: Path) -> None:
    (folder / "checkpoint-6").mkdir()
    for path in list(folder.glob("*.*")):
        path.rename(folder / "checkpoint-6" / path.name)
    (folder / "checkpoint-6" / "hybrid_manifest.json").touch()


def without_a_shard(folder: Path) -> None:
    model = tiny_model(vocab_size=264)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="60KB")
    next(folder.glob("model-00002-*")).unlink()


def without_a_layer(folder: Path) -> None:
    tiny_model(vocab_size=264, hidden_size=64, num_hidden_layers=1).save_pretrained(folder)
    change(folder / "config.json", num_hidden_layers=2)


@pytest.mark.parametrize(
    "damage, says",
    [
        (cut_short, r"model.safetensors` is damaged: .*Train again, or save the model"),
        (only_checkpoints, r"holds no model.*export its last checkpoint: `hf-hybrid export .*checkpoint-6`"),
        (without_a_shard, r"is not whole: `model-00002-of-\d+.safetensors` is missing"),
        (without_a_layer, r"lacks weights of its model.*`model.layers.1"),
        (written("config.json", "{"), r"cannot be read"),
        (options_of("config.json", quantization_config={"quant_method": "fp8"}), r"is quantised already \(`fp8`\)"),
        (shutil.rmtree, r"is no folder"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_run_that_is_not_whole_is_refused(run, tmp_path, damage, says):
    pytest.importorskip("gguf")
    shutil.copytree(run, tmp_path / "out")
    damage(tmp_path / "out")
    with pytest.raises(ExportError, match=f"(?s){says}"):
        exporter.export(tmp_path / "out", tmp_path / "export", "gguf-q8_0", batches=batches(1))
    assert {path.name for path in tmp_path.iterdir()} <= {"out"}


INDEX = "model.safetensors.index.json"


def noted(**values) -> Callable[[Path], object]:
    """A damage: the note of a run on its data, with other values."""
    return written(NOTE_NAME, {**Reader("train", TextDataOptions(), seed=0).to_dict(), **values})


BROKEN = {
    "config cut short": (written("config.json", "{"), "The config of the model in"),
    "config and the texts to measure on": (
        lambda folder: (written("config.json", "{")(folder), noted(dataset=["text.txt"])(folder)),
        "The config of the model in",
    ),
    "config is a list": (written("config.json", [1]), "The config of the model in"),
    "config with words for sizes": (options_of("config.json", num_hidden_layers="two"), "The config of the model in"),
    "quantization is a number": (options_of("config.json", quantization_config=5), "The config of the model in"),
    "code of its own": (options_of("config.json", model_type="evil", auto_map={"AutoConfig": "evil.C"}), "The config"),
    "tokenizer with a list for a length": (
        lambda folder: (
            options_of("tokenizer_config.json", model_max_length=[1])(folder),
            (folder / "text.txt").write_text("To be or not to be."),
            noted(dataset=[str(folder / "text.txt")], sequence_length=8)(folder),
        ),
        "The tokenizer",
    ),
    "tokenizer cut short": (written("tokenizer.json", "{"), "The tokenizer in"),
    "index of lists": (index_of({"weight_map": {"a": ["x"]}}), f"{INDEX}` is damaged"),
    "index is a list": (index_of([]), f"{INDEX}` is damaged"),
    "index whose map is a list": (index_of({"weight_map": ["x"]}), f"{INDEX}` is damaged"),
    "index that leads out": (index_of({"weight_map": {"a": "../secret.safetensors"}}), "lies outside of its folder"),
    "index with a path from the root": (index_of({"weight_map": {"a": "/etc/passwd"}}), "lies outside of its folder"),
    "note cut short": (
        written(NOTE_NAME, "{"),
        f"{NOTE_NAME}` does not say what the run was evaluated on: it is damaged",
    ),
    "note is a list": (written(NOTE_NAME, []), "it is damaged"),
    "note is deep": (written(NOTE_NAME, "[" * 9000), "it is damaged"),
    "note with another key": (noted(x=1), "it is damaged"),
    "note with a word for a number": (noted(sequence_length="x"), "it is damaged"),
    "note with a share over 1": (noted(eval_share=2), "`eval_share` must be at least 0 and less than 1"),
    "note on a file that is gone": (noted(dataset=["gone.txt"]), "`--dataset gone.txt`"),
}


OUTSIDE = ["../x.safetensors", "/etc/x", "a/../../x", "C:\\x", "..\\x"]
DAMAGED = ["", "{", "[]", "1", "{}", '{"weight_map": ["x"]}', '{"weight_map": {}}', "[" * 9000]
DAMAGED += [json.dumps({"weight_map": {"a": name}}) for name in (["x"], 1, None)]


@pytest.mark.parametrize(
    "text, said",
    [*((json.dumps({"weight_map": {"a": name}}), "lies outside of its folder") for name in OUTSIDE),
     *((text, "is damaged") for text in DAMAGED)],
)  # fmt: skip
def test_an_index_names_each_of_its_files_once_and_none_outside_of_its_folder(tmp_path, text, said):
    index = tmp_path / "index.json"
    index.write_text(text)
    with pytest.raises(ValueError, match=said):
        source.shard_names(index)
    index.write_text(json.dumps({"weight_map": {"a": "2.bin", "b": "1.bin", "c": "2.bin"}}))
    assert source.shard_names(index) == ["1.bin", "2.bin"]


QUICK = ("config and the texts to measure on", "index of lists", "index that leads out", "note is a list",
         "note with another key", "note with a word for a number")  # fmt: skip


@pytest.mark.parametrize("kind", mostly_slow(BROKEN, QUICK))
def test_the_command_refuses_broken_files_with_a_sentence(run, tmp_path, capsys, kind):
    damage, sentence = BROKEN[kind]
    shutil.copytree(run, tmp_path / "out")
    damage(tmp_path / "out")
    assert main(["export", str(tmp_path / "out"), "--format", "merged", "--measure"]) == 2
    said = capsys.readouterr().err
    assert "hf-hybrid export: error: " in said and sentence in said
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "secret.safetensors"}


def test_an_export_is_whole_before_it_is_measured(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("The other thing is there, and then some more of them. " * 40)
    command = ["export", str(run), "--format", "merged", "--output", "small"]
    assert main([*command, "--measure"]) == 2
    assert "`--measure`: the run held out no texts with answers" in capsys.readouterr().err
    assert not Path("small").exists()

    def stopped(*arguments):
        assert loaded(Path("small"), "merged") is not None
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "held_out", stopped)
    assert main([*command, "--eval_dataset", "text.txt"]) == 0
    assert "Stopped: `small` is whole, and its loss was not measured." in capsys.readouterr().err
    assert json.loads(Path("small", "export.json").read_text())["loss_change"] is None
    assert "No held-out loss was measured." in Path("small", "README.md").read_text()
    assert [path.name for path in tmp_path.glob("_*")] == []
    assert main(["export", str(run), "--format", "merged", "--output", "other"]) == 0  # which measures nothing


@pytest.mark.parametrize("number", ["0", "-3"])
def test_the_command_evaluates_on_one_sequence_or_more(run, tmp_path, capsys, number):
    output = str(tmp_path / "merged")
    words = ["--format", "merged", "--output", output, "--measure", "--eval_sequences", number]
    assert main(["export", str(run), *words]) == 2
    assert f"`--eval_sequences` must be at least 1, got {number}" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["model", "tokenizer", "base", "base tokenizer"])
def test_code_that_a_folder_brings_is_neither_run_nor_asked_about(tmp_path, capsys, monkeypatch, where):
    peft = pytest.importorskip("peft")
    base, run = tmp_path / "base", tmp_path / "run"
    tiny_model(vocab_size=264, hidden_size=64).save_pretrained(base)
    bpe_tokenizer().save_pretrained(base)
    if "base" in where:
        model = AutoModelForCausalLM.from_pretrained(base)
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(run)
    else:
        shutil.copytree(base, run)
    brings = base if "base" in where else run
    file = brings / ("tokenizer_config.json" if "tokenizer" in where else "config.json")
    (brings / "other.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Other: pass\n")
    classes = {"AutoTokenizer": ["other.Other", None]} if "tokenizer" in where else {"AutoConfig": "other.Other"}
    unknown = {"tokenizer_class": "Other"} if "tokenizer" in where else {"model_type": "other"}
    change(file, auto_map=classes, **unknown)
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail(f"a question: {prompt}"))
    status = main(["export", str(run), "--format", "merged"])
    assert not (tmp_path / "ran").exists()
    told = capsys.readouterr().err
    if where in ("model", "base"):
        assert status == 2 and "brings code of its own (`auto_map`), and an export runs none" in told
    elif where == "tokenizer":
        assert status == 2 and "The tokenizer in" in told


def test_a_link_in_the_place_of_an_export_is_refused(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for target in ("empty", "nowhere"):
        link = tmp_path / f"to-{target}"
        link.symlink_to(tmp_path / target)
        assert main(["export", str(run), "--format", "merged", "--output", str(link)]) == 2
        assert f"`{link}` is a link, and nothing is written through one" in capsys.readouterr().err
    assert not any((tmp_path / "empty").iterdir()) and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    "head", mostly_slow(["x: [", "- a", "tags: 5", "tags: [[1], {a: b}]", "license: {a: 1}", "\x00"], ["x: ["])
)
def test_a_card_that_was_broken_gives_way_to_a_short_one(run, tmp_path, caplog, head):
    shutil.copytree(run, tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text(f"---\n{head}\n---\n*Written by `hf_hybrid` 1.0 on a day*\n")
    exporter.export(tmp_path / "out", tmp_path / "export", "merged")
    card = ModelCard.load(tmp_path / "export" / "README.md")
    assert "hf-hybrid" in card.data.tags and "## Merged export" in card.text
    assert ("the export gets a short card" in caplog.text) == (head in ("x: [", "- a", "tags: 5", "\x00"))


def test_a_card_is_of_the_run_if_this_package_wrote_it(run, tmp_path):
    shutil.copytree(run, tmp_path / "out")
    card, exported = tmp_path / "out" / "README.md", tmp_path / "export" / "README.md"
    card.write_text(card.read_text() + "\nMine, trained with `--hub_token s3cr3tValue9`\n")
    exporter.export(tmp_path / "out", tmp_path / "export", "merged")
    assert "Mine, trained with `--hub_token REMOVED`" in exported.read_text()
    shutil.rmtree(tmp_path / "export")
    card.write_text("---\n---\n# Of another model\n\nNot *Written by `hf_hybrid`, but by hand.\n")
    exporter.export(tmp_path / "out", tmp_path / "export", "merged")
    assert "Of another model" not in exported.read_text()


class Full(Exception):
    """As tokenizers raises: no `OSError`."""


@pytest.mark.parametrize("error", [Full("No space left on device (os error 28)"), OSError(28, "No space left")])
def test_a_full_disk_is_told_whatever_the_error(run, tmp_path, monkeypatch, error):
    def full(*arguments, **options):
        raise error

    monkeypatch.setattr(exporter, "write", full)
    with pytest.raises(ExportError, match="cannot be written: .*Free space, or name another folder"):
        exporter.export(run, tmp_path / "export", "merged")
    assert not list(tmp_path.iterdir())


@contextlib.contextmanager
def files_up_to(size: int):
    """No file of this process may grow beyond that, as on a disk that is full."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_command_on_a_full_disk_ends_with_a_sentence(run, tmp_path, capfd):
    with files_up_to(30_000):
        assert main(["export", str(run), "--format", "merged", "--output", str(tmp_path / "export")]) == 2
    said = capfd.readouterr().err
    assert "cannot be written: " in said and "Free space, or name another folder" in said
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_refused(tmp_path):
    trained(tmp_path / "out", save_strategy="steps", save_steps=12)
    folder = tmp_path / "out" / "checkpoint-12"
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1  # a bit that no loader looks at
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(ExportError, match="is damaged: `model.safetensors` is not what was saved"):
        exporter.export(folder, tmp_path / "export", "gguf-q8_0")


def test_formats_that_cannot_be_written_are_refused_with_what_to_do(run, tmp_path, monkeypatch):
    pytest.importorskip("gguf")

    def refusal(name: str, source: Path = run, **options) -> str:
        with pytest.raises(ExportError) as error:
            exporter.export(source, tmp_path / "export", name, **options)
        assert not (tmp_path / "export").exists()
        return str(error.value)

    assert "`format` must be one of merged, int8, " in refusal("int3")
    half = f"{run}-gguf-f16"
    said = f"--format gguf-f16`, then `llama-quantize {half}/model.gguf {half}/q4_k_m.gguf q4_k_m`."
    assert refusal("gguf-q4_k_m").endswith(said)
    assert "`dtype` must be one of auto" in refusal("int8", dtype="fp8")
    tiny_model(vocab_size=264).save_pretrained(tmp_path / "narrow")
    assert "takes rows of a multiple of 64 weights" in refusal("nf4", tmp_path / "narrow")
    assert "the run has none" in refusal("gguf-q8_0", tmp_path / "narrow")
    AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    assert "models of type `gpt2` are not written" in refusal("gguf-q8_0", tmp_path / "gpt2")
    assert f"then `python convert_hf_to_gguf.py {tmp_path / 'gpt2'}-merged`." in refusal("gguf-f16", tmp_path / "gpt2")
    tiny_model(vocab_size=264, attention_bias=True).save_pretrained(tmp_path / "narrow")
    assert "`attention_bias=True` is not written" in refusal("gguf-q8_0", tmp_path / "narrow")
    tiny_model(vocab_size=264, hidden_size=64).save_pretrained(tmp_path / "silent")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in (name for name, known in FORMATS.items() if known.package is not None):
        extra = {"nf4": "quantization", "int8": "torchao"}.get(name, "export")
        assert f'pip install "hf-hybrid[{extra}]"' in refusal(name)


def test_an_export_that_fails_leaves_nothing(trainer, run, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    with pytest.raises(ValueError, match="must give batches with `labels`"):
        exporter.export(run, tmp_path / "export", "gguf-q8_0", batches=[{"input_ids": torch.zeros(1, 4).long()}])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "_export.unfinished").mkdir()  # of one that was killed

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporter, "write_json", full)
    with pytest.raises(ExportError, match="cannot be written: .*No space left"):
        trainer.export("gguf-q8_0", tmp_path / "export")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match="nothing is written over"):
        trainer.export("gguf-q8_0", tmp_path / "file")


def test_the_command_says_how_to_serve_and_pushes(tmp_path, monkeypatch, capsys):
    gguf = pytest.importorskip("gguf")
    monkeypatch.chdir(tmp_path)
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    tiny_model(vocab_size=len(tokenizer)).save_pretrained("My run")
    tokenizer.save_pretrained("My run")
    done = []
    monkeypatch.setattr("huggingface_hub.create_repo", lambda name, **how: done.append(("made", name)))
    monkeypatch.setattr("huggingface_hub.upload_folder", lambda **how: done.append(("pushed", how)) or "https://hub")
    assert main(["export", "My run", "--format", "gguf-q8_0", "--push", "me/mine"]) == 0
    assert done == [
        ("made", "me/mine"),
        ("pushed", {"repo_id": "me/mine", "folder_path": Path("My run-gguf-q8_0").resolve()}),
    ]
    said = capsys.readouterr().err
    assert "llama-server -m 'My run-gguf-q8_0/model.gguf'" in said and "Pushed: https://hub" in said
    assert "ollama create my-run -f 'My run-gguf-q8_0/Modelfile' && ollama run my-run" in said
    assert 'if eq .Role "user"' in Path("My run-gguf-q8_0", "Modelfile").read_text()
    field = gguf.GGUFReader("My run-gguf-q8_0/model.gguf").fields["general.name"]
    assert bytes(field.parts[field.data[0]]) == b"My run"


def test_cards_say_how_an_export_is_served_and_what_of_it_was_tried():
    tokenizer = bpe_tokenizer()
    of_gguf = exporter._serving("My run (v1)", "gguf-q8_0", tokenizer)
    assert "llama-server -m model.gguf" in of_gguf and "ollama create my-run-v1 -f Modelfile" in of_gguf
    assert "This file, these lines and Ollama were not tried." in of_gguf and "chat template" not in of_gguf
    tokenizer.chat_template = "{{ messages }}"
    assert "with the chat template that is in it" in exporter._serving("x", "gguf-f16", tokenizer)
    merged = exporter._serving("x", "merged", tokenizer)
    assert "vllm serve path/to/this/folder" in merged and "This line was not tried." in merged
    assert exporter._serving("x", "int8", tokenizer) == exporter._serving("x", "merged", None) == ""
