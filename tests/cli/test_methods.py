"""`hf-hybrid distill | orpo | cpo | simpo`: they train as TRL does, go on, and say what they cannot use."""

import json
import re

import pytest
import torch
from conftest import mostly_slow
from datasets import Dataset
from rig.byte_llama import assistant, byte_tokenizer, chat_tokenizer, llama_config, save_llama, user
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

from trl.experimental.cpo import CPOConfig, CPOTrainer  # noqa: E402
from trl.experimental.gkd import GKDConfig, GKDTrainer  # noqa: E402
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CHATS = [{"messages": [user(f"Say {n}"), assistant(f"{n} " * (1 + n % 3))]} for n in range(12)]
TALKS = [{"messages": [*row["messages"], user("again"), assistant("no")]} for row in CHATS]
PAIRS = [
    {"prompt": [user(f"Say {n}")], "chosen": [assistant(f"{n}")], "rejected": [assistant("no " * (n % 4 + 1))]}
    for n in range(12)
]
OF_TRL = {
    "orpo": (ORPOTrainer, ORPOConfig, PAIRS, {}),
    "cpo": (CPOTrainer, CPOConfig, PAIRS, {}),
    "simpo": (CPOTrainer, CPOConfig, PAIRS, {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0}),
    "distill": (GKDTrainer, GKDConfig, CHATS, {"lmbda": 0.0}),
    "distill by itself": (GKDTrainer, GKDConfig, CHATS, {"lmbda": 1.0, "max_new_tokens": 6}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("methods")
    save_llama(folder / "model", chat_tokenizer(TEMPLATE), max_position_embeddings=128)
    save_llama(folder / "teacher", chat_tokenizer(TEMPLATE), max_position_embeddings=128, hidden_size=32)
    save_llama(folder / "other", byte_tokenizer(("<s>",), eos_token="<s>"), max_position_embeddings=128)
    for name, rows in (("chats", CHATS), ("talks", TALKS), ("pairs", PAIRS)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def run(folder, tmp_path, monkeypatch, cli):
    """Run a command, and return what it wrote to stdout, or the sentence that it ended with."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")

    def run(name, *words, out="out", status=0):
        command, distills = name.split()[0], name.startswith("distill")
        data = [] if "--dataset" in words else ["--dataset", "chats.jsonl" if distills else "pairs.jsonl"]
        data += ["--teacher", "teacher"] if distills and "--teacher" not in words else []
        always = ["--use_cpu", "--report_to", "none", "--per_device_train_batch_size", "2", "--learning_rate", "1e-2"]
        always += ["--max_steps", "3", "--logging_steps", "1", "--output_dir", tmp_path / out]
        shown, error = cli(command, "--model", "model", *data, *always, *words, status=status)
        assert all(len(line) <= 80 for line in shown.splitlines() if str(tmp_path) not in line), shown
        return error if status else shown

    return run


def losses_of(folder):
    logged = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in logged if "loss" in entry]


@pytest.mark.parametrize("name", OF_TRL)
def test_losses_are_those_of_trl(run, tmp_path, name):
    trainer_class, config_class, rows, options = OF_TRL[name]
    words = [word for key, value in options.items() for word in (f"--{key}", value)] if name != "simpo" else []
    run(name, "--eval_share", "0", *words)
    common = {"per_device_train_batch_size": 2, "max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1, **options}
    common |= {"use_cpu": True, "report_to": [], "bf16": False, "save_strategy": "no", "disable_tqdm": True}
    models = {"model": AutoModelForCausalLM.from_pretrained("model", dtype="float32")}
    if trainer_class is GKDTrainer:
        models["teacher_model"] = AutoModelForCausalLM.from_pretrained("teacher", dtype="float32")
    args = config_class(tmp_path / "trl", **common)
    tokenizer = byte_tokenizer().from_pretrained("model")
    theirs = trainer_class(**models, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    theirs.train()
    expected = [entry["loss"] for entry in theirs.state.log_history if "loss" in entry]
    assert losses_of(tmp_path / "out") == pytest.approx(expected, rel=1e-4) and len({*expected}) == 3
    summary = json.loads((tmp_path / "out" / "hybrid_summary.json").read_text())
    assert summary["plain_rows_because"] is None
    assert summary["tokens_padding"] > 0 or name == "distill by itself"  # its rows are too alike to be worth it


@pytest.mark.parametrize("name", mostly_slow(["orpo", "simpo", "distill"], ["orpo", "distill"]))
def test_the_same_command_goes_on(run, tmp_path, name):
    out = run(name, "--save_steps", "1", "--eval_share", "0.2")
    assert "Done: 3 steps" in out
    assert ("perplexity" in out) is False and ("of the pairs ranked right" in out) == (name != "distill")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    for path in (tmp_path / "out").glob("checkpoint-[23]"):
        path.rename(tmp_path / path.name)
    assert "continues from step 1 of 3" in run(name, "--save_steps", "1", "--eval_share", "0.2")
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(weights[key], again[key]) for key in weights)


def test_rows_of_pairs_are_shown_counted_and_cut(run, folder):
    out = run("orpo", "--show_rows", "1", "--max_length", "30", "--peft", "lora")
    assert re.search(r"cut        \d+ of 11 pairs cut at --max_length 30\n", out)
    assert "  row 1      chosen: " in out and "  row 1      rejected: " in out and "in 11 pairs, the longest" in out
    long = {**PAIRS[0], "prompt": [user("Say " * 20)]}
    (folder / "long.jsonl").write_text("\n".join(map(json.dumps, [*PAIRS[:6], long])))
    out = run("simpo", "--dataset", "long.jsonl", "--max_length", "40", "--eval_share", "0", out="long")
    assert "1 of them keep no answer and are left out" in " ".join(out.split())
    assert "nan" not in out, "TRL's loss of a pair that is cut to its prompt"


@pytest.mark.parametrize("name, by_rule", [("distill", False), ("simpo", True)])
def test_the_rate_of_adapters_is_the_one_that_is_said(folder, cli, tmp_path, monkeypatch, name, by_rule):
    """No rule is known for the loss of a teacher."""
    monkeypatch.chdir(folder)
    data = ["chats.jsonl", "--teacher", "teacher", "--lmbda", "0"] if name == "distill" else ["pairs.jsonl"]
    words = ["--model", "model", "--dataset", *data, "--peft", "lora", "--use_cpu", "--report_to", "none"]
    out = " ".join(cli(name, *words, "--max_steps", "1", "--output_dir", tmp_path / "out")[0].split())
    assert ("raised by the rule for LoRA" in out) == ("in place of" in out) == by_rule
    assert ("adapters often need ten times the rate of all weights" in out) != by_rule


def test_every_answer_of_a_chat_is_distilled(run, folder, tmp_path):
    out = run("distill", "--dataset", "talks.jsonl", "--show_rows", "1", "--lmbda", "0", "--eval_share", "0.2")
    assert "assistant turns, found by rendering" in out and out.count("  >          ") == 2
    assert re.search(r"teacher    teacher: [\d.]+k parameters; the model itself answers 0% of the\n", out)
    from hf_hybrid.trl.distillation import AnswersCollator

    rows = [{"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, -100, 4, 5]}, {"input_ids": [6, 7], "labels": [6, 7]}]
    batch = AnswersCollator(0)(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [0, 0, 0, 6, 7]]
    assert batch["labels"].tolist() == [[-100, 2, -100, 4, 5], [-100, -100, -100, 6, 7]]
    assert batch["prompts"].tolist() == [[1, 2, 3], [0, 0, 6]]
    assert batch["prompt_attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_a_teacher_may_be_adapters_and_end_with_more_tokens(run, folder, tmp_path):
    """Models of a family fill their vocabularies up to other sizes."""
    tokenizer = chat_tokenizer(TEMPLATE)
    sizes = {"vocab_size": len(tokenizer) + 7, "max_position_embeddings": 128, "hidden_size": 32}
    LlamaForCausalLM(llama_config(**sizes)).save_pretrained(folder / "larger")
    tokenizer.save_pretrained(folder / "larger")
    assert "Done: 3 steps" in run("distill", "--teacher", "larger")
    run("orpo", "--peft", "lora", out="adapters")
    assert "Done: 3 steps" in run("distill", "--teacher", tmp_path / "adapters", out="of_adapters")


@pytest.mark.parametrize(
    "name, words, message",
    [
        ("distill", ["--teacher", "other"], "`--teacher other` has other tokens than the student"),
        ("distill", ["--teacher", "./gone"], "`--teacher ./gone`: there is no such file or folder"),
        ("distill", ["--packing", "true"], "`packing=True` does nothing where a student answers by itself"),
        ("distill", ["--dataset", "pairs.jsonl"], "That is what `hf-hybrid dpo` takes"),
        ("distill", ["--lmbda", "2"], "lmbda must be in the range [0.0, 1.0]"),
        ("orpo", ["--dataset", "chats.jsonl"], "`hf-hybrid orpo` takes `chosen` and `rejected`"),
        ("orpo", ["--max_length", "3"], "`--max_length 3` cuts every pair before its answer begins. Raise it."),
        ("simpo", ["--teacher", "teacher"], "`--teacher` is no option."),
    ],
)
def test_what_cannot_be_used_is_one_sentence(run, name, words, message):
    error = run(name, *words, status=2)
    assert message in error and error.count("\n") == 1


def test_a_teacher_is_needed(cli):
    _, error = cli("distill", "--model", "m", "--dataset", "d.jsonl", status=2)
    assert "`--teacher` is missing. `hf-hybrid distill --help` says what it takes." in error
