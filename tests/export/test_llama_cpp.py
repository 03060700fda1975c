"""
GGUF files in llama.cpp itself: the loss, the token ids and the chat template are those of transformers.

llama.cpp comes with the npm package node-llama-cpp, compiled. `HYBRID_NODE_LLAMA_CPP` names the folder of the package;
without it the tests are skipped.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from conftest import ByteText, tiny_model
from rig.byte_llama import assistant, user
from test_export import KINDS, bpe_tokenizer, of_kind, spaced_tokenizer
from transformers import (
    AddedToken,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Trainer,
    TrainingArguments,
)

from hf_hybrid.cli import chat
from hf_hybrid.export import exporter, measure
from hf_hybrid.export.formats import ExportError

MODULE = os.environ.get("HYBRID_NODE_LLAMA_CPP")
if MODULE is None or not Path(MODULE, "dist", "index.js").is_file() or shutil.which("node") is None:
    reason = "needs node and llama.cpp: `npm install node-llama-cpp`, then HYBRID_NODE_LLAMA_CPP=.../node_modules/"
    pytest.skip(f"{reason}node-llama-cpp", allow_module_level=True)
pytest.importorskip("gguf")
pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]

SCRIPT = Path(__file__).parents[1] / "rig" / "llama_cpp.mjs"
TEXTS = ["the other thing,  and 12 more", "Grüße\n\n\tthe end<|end|>", " then, 😀 the", "def f(x):\n    return x"]
CHAT = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
ROWS = [ByteText(8, 200)[index]["input_ids"].tolist() for index in range(8)]


def in_llama_cpp(folder: Path, work: Path, texts=TEXTS) -> dict:
    (work / "texts.json").write_text(json.dumps(texts))
    (work / "rows.json").write_text(json.dumps(ROWS))
    files = [folder / "model.gguf", work / "texts.json", work / "rows.json"]
    done = subprocess.run(
        ["node", str(SCRIPT), str(Path(MODULE).resolve()), *map(str, files)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def in_transformers(folder: Path, **options) -> float:
    rows = [{"input_ids": torch.tensor([row]), "labels": torch.tensor([row])} for row in ROWS]
    return measure.held_out(AutoModelForCausalLM.from_pretrained(folder, **options).eval(), rows)["loss"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A Llama that learned something, so that a wrong file shows in its loss."""
    folder = tmp_path_factory.mktemp("llama_cpp") / "run"
    model = tiny_model(vocab_size=264, hidden_size=64, num_attention_heads=4)
    options = {"max_steps": 40, "learning_rate": 1e-2, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    Trainer(model, TrainingArguments(str(folder), save_strategy="no", **options), train_dataset=ByteText(200)).train()
    model.save_pretrained(folder)
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q5_1", "q4_1", "q4_0", "q4_m"])
def test_llama_cpp_computes_the_loss_of_transformers(run, tmp_path, kind):
    result = exporter.export(run, tmp_path / "export", f"gguf-{kind}")
    assert result["format"] == f"gguf-{kind}"
    found = in_llama_cpp(tmp_path / "export", tmp_path)
    same_file = in_transformers(tmp_path / "export", gguf_file="model.gguf")
    original = in_transformers(run)
    assert original < math.log(264) - 1 and found["tokens"] == 8 * 31
    # llama.cpp rounds the inputs of a layer to 8 bits too.
    assert found["loss"] == pytest.approx(same_file, rel=1e-4 if kind == "f16" else 2e-3)
    assert found["loss"] == pytest.approx(original, rel=0.02)
    assert found["ids"] == AutoTokenizer.from_pretrained(run)(TEXTS)["input_ids"]
    assert found["chat_template"] == CHAT


@pytest.mark.parametrize("kind, tied", [(LlamaConfig, False), (Qwen2Config, True), *((kind, False) for kind in KINDS)])
@pytest.mark.parametrize("words", [bpe_tokenizer, spaced_tokenizer])
def test_every_architecture_that_is_written_runs(tmp_path, kind, tied, words):
    if words is spaced_tokenizer and kind not in (LlamaConfig, MistralConfig, Gemma2Config):
        pytest.skip("another architecture has no other tokenizer")
    of_kind(kind, tied or "Gemma" in kind.__name__, vocab_size=300).save_pretrained(tmp_path / "run")
    words().save_pretrained(tmp_path / "run")
    exporter.export(tmp_path / "run", tmp_path / "my-phi-3", "gguf-f16")  # a name by which llama.cpp knows tokens
    found = in_llama_cpp(tmp_path / "my-phi-3", tmp_path)
    assert found["loss"] == pytest.approx(in_transformers(tmp_path / "run"), rel=1e-3)
    assert found["ids"] == AutoTokenizer.from_pretrained(tmp_path / "run")(TEXTS)["input_ids"]


@pytest.mark.parametrize("prefix", [True, False])
def test_texts_are_cut_at_spaces_as_sentencepiece_does(tmp_path, prefix):
    of_kind(LlamaConfig, False, vocab_size=300).save_pretrained(tmp_path / "run")
    spaced_tokenizer(prefix).save_pretrained(tmp_path / "run")
    exporter.export(tmp_path / "run", tmp_path / "export", "gguf-q8_0")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    ids = in_llama_cpp(tmp_path / "export", tmp_path)["ids"]
    assert ids == tokenizer(TEXTS)["input_ids"] and any(tokenizer.convert_tokens_to_ids("▁the") in row for row in ids)


def test_merged_adapters_run(run, tmp_path):
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(run)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "run")
    rows = [{"input_ids": torch.tensor([row]), "labels": torch.tensor([row])} for row in ROWS]
    loss = measure.held_out(model.eval(), rows)["loss"]
    exporter.export(tmp_path / "run", tmp_path / "export", "gguf-f16")
    assert in_llama_cpp(tmp_path / "export", tmp_path)["loss"] == pytest.approx(loss, rel=1e-3)
    assert abs(loss / in_transformers(run) - 1) > 0.01


def test_tokens_of_phi_3_take_the_spaces_behind_them(tmp_path):
    tokenizer = spaced_tokenizer(prefix=True, eos_token=AddedToken("</s>", rstrip=True), pad_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken("<|user|>", rstrip=True, special=True)], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "run")
    of_kind(Phi3Config, False, vocab_size=300).save_pretrained(tmp_path / "run")
    exporter.export(tmp_path / "run", tmp_path / "export", "gguf-q8_0")
    texts = [*TEXTS, "<|user|>\nthe other</s>\n<|user|>   the<s> the"]
    found = in_llama_cpp(tmp_path / "export", tmp_path, texts)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert found["ids"][-1] == tokenizer(texts)["input_ids"][-1]
    tokenizer.add_tokens([AddedToken("<|end|>", special=True)], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "run")
    with pytest.raises(ExportError, match="the token `</s>` takes the spaces behind it"):
        exporter.export(tmp_path / "run", tmp_path / "other", "gguf-q8_0")


OWN = (
    "{% if messages[0]['role'] != 'system' %}<|system|>Count.<|end|>{% endif %}{% for m in messages %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.skipif(
    not Path(MODULE, "../@evertdespiegeleer/go-template").is_dir(),
    reason="needs `npm install @evertdespiegeleer/go-template`",
)
def test_a_run_with_its_own_template_answers_in_llama_cpp_and_by_its_modelfile_as_chat_does(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model(vocab_size=264, hidden_size=64, num_attention_heads=4, max_position_embeddings=128).save_pretrained(
        "base"
    )
    bpe_tokenizer().save_pretrained("base")
    rows = [{"messages": [user(f"the {n}"), assistant(f"{n} and {n + 1}")]} for n in range(10)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("own.jinja").write_text(OWN)
    words = ["--model", "base", "--dataset", "rows.jsonl", "--chat_template_path", "own.jinja", "--max_steps", "60"]
    words += ["--add_tokens", "<|user|>", "<|assistant|>", "<|system|>", "--learning_rate", "1e-2", "--eval_share", "0"]
    cli("sft", *words, "--output_dir", "out", "--use_cpu", "--report_to", "none", "--enable_predict", "false")
    exporter.export("out", "gguf", "gguf-f16")
    modelfile = Path("gguf/Modelfile").read_text()
    chats = [[user("the 4")], [user("the 2"), assistant("2 and 3"), user("the 7")]]
    chats += [[{"role": "system", "content": "Count."}, user("the 9")]]
    asked = {"chats": chats, "stops": re.findall('stop "(.*)"', modelfile)}
    asked["template"] = re.search('TEMPLATE """(.*?)"""', modelfile, re.S)[1]
    Path("asked.json").write_text(json.dumps(asked))
    command = [
        "node",
        str(SCRIPT.with_name("serve.mjs")),
        str(Path(MODULE).resolve().parent),
        "gguf/model.gguf",
        "asked.json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    args = Namespace(model="out", dtype="auto", cpu=True, seed=0, trust_remote_code=False, temperature=0, top_p=None)
    args.max_new_tokens = 16
    model, tokenizer = chat.load(args)
    for number, messages in enumerate(chats):
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        answer = chat._answer(model, tokenizer, messages, args)
        for served in (found["file"][number], found["modelfile"][number]):
            assert served == {"prompt": prompt, "answer": answer}
    assert " and " in answer
