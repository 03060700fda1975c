"""`hf-hybrid sft | dpo | kto | reward | grpo`, `chat`: formats, which tokens are learned, runs, refusals."""

import dataclasses
import importlib
import io
import json
import re
import sys
import threading
import unicodedata
from decimal import Decimal
from types import SimpleNamespace

import pytest
from conftest import config_values, mostly_slow, tiny_model
from datasets import Dataset
from peft import AutoPeftModelForSequenceClassification
from rig.byte_llama import END, ENDS, assistant, byte_tokenizer, chat_tokenizer, llama_config, save_llama, user
from rig.processes import ROOT, python
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    LlavaConfig,
    MixtralConfig,
    T5Config,
)

from benchmarks.equality.families import build as build_family
from hf_hybrid.cli import chat, console, formats, progress
from hf_hybrid.cli.data import Reader, mixed, shares
from hf_hybrid.cli.export import held_out_rows, read_note
from hf_hybrid.cli.formats import FormatError, recognise
from hf_hybrid.cli.main import COMMANDS, main
from hf_hybrid.cli.options import (
    GRPO,
    SFT,
    TRAINING,
    TRAINING_OPTIONS,
    AdapterOptions,
    CommandLine,
    DataOptions,
    ModelOptions,
    OptionError,
    help_text,
)
from hf_hybrid.cli.recipe import check_options
from hf_hybrid.cli.tokens import Answers
from hf_hybrid.run.record import Speed
from hf_hybrid.trl import rewards
from hf_hybrid.trl.rewards import exact_match, last_number, numeric_answer

trl = pytest.importorskip("trl")

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FORGETFUL = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'].split('|')[-1] }}")
"""A template that leaves what stands before a bar out of earlier turns, as reasoning models do."""
MARKED = TEMPLATE.replace(
    "{{ m['content'] }}{{ eos_token }}",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}{% else %}"
    "{{ m['content'] + eos_token }}{% endif %}",
)


ROWS = {
    "chats": [
        {"messages": [user(f"Say {i}"), assistant(f"{i}!"), user("again"), assistant(f"{i} {i}")]} for i in range(12)
    ],
    "sharegpt": [
        {"conversations": [{"from": "human", "value": f"Say {i}"}, {"from": "gpt", "value": f"{i}"}]} for i in range(12)
    ],
    "completions": [{"prompt": f"{i} and", "completion": f" {i + 1}"} for i in range(12)],
    "alpaca": [{"instruction": f"Add {i}", "input": "1" * (i % 2), "output": f"{i + 1}"} for i in range(12)],
    "texts": [{"text": f"number {i}"} for i in range(12)],
    "pairs": [{"prompt": f"Say {i}:", "chosen": f" {i}", "rejected": " no"} for i in range(12)],
    "chat_pairs": [
        {"chosen": [user(f"Say {i}"), assistant("yes")], "rejected": [user(f"Say {i}"), assistant("no")]}
        for i in range(12)
    ],
    "questions": [{"question": f"What is {i} + 1?", "answer": f"So it is #### {i + 1}"} for i in range(12)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a chat template, and a file of each format."""
    folder = tmp_path_factory.mktemp("fine_tuning")
    save_llama(folder / "model", chat_tokenizer(TEMPLATE), max_position_embeddings=128)
    save_llama(folder / "base", byte_tokenizer(**ENDS), max_position_embeddings=128)
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "pairs.json").write_text(json.dumps(ROWS["pairs"], indent=1), encoding="utf-8")
    (folder / "table.csv").write_text('instruction,output\n"Add, please",2\n', encoding="utf-8")
    return folder


@pytest.fixture
def run(folder, tmp_path, monkeypatch, cli):
    """Run a command on a file, check how it ended, and return what it wrote to stdout and to stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")

    def run(name, *words, steps=2, model="model", status=0):
        always = ["--use_cpu", "--report_to", "none", "--per_device_train_batch_size", "2", "--max_steps", steps]
        out = [] if "--output_dir" in words else ["--output_dir", tmp_path / "out"]
        return cli(name, "--model", model, *always, *out, *words, status=status)

    return run


@pytest.fixture
def left(tmp_path):
    """What a run has left in a file of JSON."""
    return lambda name: json.loads((tmp_path / "out" / f"{name}.json").read_text())


# Formats.


@pytest.mark.parametrize(
    "command, name, title, first",
    [
        ("sft", "chats", "chats (`messages`)", ROWS["chats"][0]),
        ("sft", "sharegpt", "ShareGPT", {"messages": [user("Say 0"), assistant("0")]}),
        ("sft", "completions", "`completion` (text: an answer that begins with a space continues its prompt)",
         ROWS["completions"][0]),
        ("sft", "alpaca", "through the chat template", {"prompt": [user("Add 0")], "completion": [assistant("1")]}),
        ("sft", "texts", "plain text", ROWS["texts"][0]),
        ("dpo", "pairs", "preference pairs (`chosen` and `rejected`) with `prompt`, text: an answer", ROWS["pairs"][0]),
        ("dpo", "chat_pairs", "(`chosen` and `rejected`), prompt inside, messages", ROWS["chat_pairs"][0]),
        ("grpo", "questions", "`question` with `answer`",
         {"prompt": [user("What is 0 + 1?")], "answer": "So it is #### 1"}),
        ("grpo", "chats", "chats (`messages`); their last answer is the reference",
         {"prompt": ROWS["chats"][0]["messages"][:-1], "answer": "0 0"}),
    ],
)  # fmt: skip
def test_formats_are_recognised_and_named(command, name, title, first):
    row = ROWS[name][0]
    form = recognise(command, list(row), row)
    assert title in form.title and form.convert(row) == first


def test_alpaca_without_a_chat_template_has_alpacas_prompt():
    row = ROWS["alpaca"][1]
    made = recognise("sft", list(row), row, template=False).convert(row)
    assert made["prompt"].endswith("### Instruction:\nAdd 1\n\n### Input:\n1\n\n### Response:\n")
    assert made["completion"] == "2"


def converted(command, row, template=True):
    """A row as a command takes it from a data set."""
    rows = pytest.importorskip("datasets").Dataset.from_list([row])
    return formats.convert_rows("`--dataset x`", rows, command, {}, None, template).rows[0]


BRIEF = {"role": "system", "content": "Be brief"}
ANSWERS = {"chosen": "yes", "rejected": "no"}
TURNS = {"chosen": [assistant("yes")], "rejected": [assistant("no")]}


@pytest.mark.parametrize(
    "row, prompt",
    [
        ({"system": "Be brief", "question": "Say", **ANSWERS}, [BRIEF, user("Say")]),
        ({"system": "", "question": "Say", **ANSWERS}, [user("Say")]),
        ({"instruction": "Add", "input": "1 and 2", **ANSWERS}, [user("Add\n\n1 and 2")]),
        ({"input": "Say", **ANSWERS}, [user("Say")]),
        ({"prompt": "Say", **TURNS}, [user("Say")]),
        ({"prompt": [user("Say")], **ANSWERS}, [user("Say")]),
        ({"system": "Be brief", "prompt": [user("Say")], **TURNS}, [BRIEF, user("Say")]),
        ({"messages": [user("Say")], "chosen": assistant("yes"), "rejected": assistant("no")}, [user("Say")]),
        ({"conversations": [{"from": "human", "value": "Say"}], "chosen": {"from": "gpt", "value": "yes"},
          "rejected": {"from": "gpt", "value": "no"}}, [user("Say")]),
    ],
)  # fmt: skip
def test_a_pair_keeps_its_question(row, prompt):
    assert converted("dpo", row) == {"prompt": prompt, **TURNS}


def test_without_a_chat_template_questions_of_pairs_are_text():
    for command, row in (("dpo", ANSWERS), ("sft", {"answer": "yes"}), ("grpo", {"answer": "yes"})):
        made = converted(command, {"question": "Add", "context": "1", **row}, template=False)
        assert made["prompt"].endswith("### Instruction:\nAdd\n\n### Input:\n1\n\n### Response:\n")
    assert converted("dpo", {"prompt": "Say", **ANSWERS}, template=False) == {"prompt": "Say", **ANSWERS}


@pytest.mark.parametrize(
    "command, row",
    [
        ("sft", {"prompt": [user("a")], "completion": [assistant("b")]}),
        ("grpo", {"question": "a", "answer": "b"}),
        ("grpo", {"messages": [user("a"), assistant("b")]}),
        ("dpo", {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}),
    ],
)
def test_a_system_message_in_a_column_is_put_in_front(command, row):
    made = converted(command, {**row, "system": "Be brief"})
    assert all(made[name][0] == BRIEF for name in ("prompt", "chosen") if name in made)


def test_the_input_of_an_instruction_is_part_of_the_prompt_of_grpo():
    row = {"instruction": "Add", "input": "1 and 2", "answer": "3"}
    assert converted("grpo", row)["prompt"] == [user("Add\n\n1 and 2")]


@pytest.mark.parametrize(
    "command, row, unread",
    [
        ("sft", {"prompt": "a", "completion": "b", "label": True, "id": 1}, "`label`, `id`"),
        ("sft", {"messages": ROWS["chats"][0]["messages"], "system_prompt": "c", "tools": [], "x": 1}, "`x`"),
        ("dpo", {"prompt": "a", "system": "c", "input": "d", "chosen": " b", "rejected": " c"}, "`system`, `input`"),
        ("train", {"text": "a", "images": ["b.png"]}, "`images`"),
        ("sft", ROWS["alpaca"][0], None),
        ("dpo", {"question": "a", "system": "c", **ANSWERS}, None),
        ("grpo", {**ROWS["questions"][0], "level": 1}, None),  # the reward functions get it
    ],
)
def test_columns_that_are_not_read_are_named(tmp_path, command, row, unread):
    told, file = {}, tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    reader = Reader(command, DataOptions(dataset=[str(file)]), 0)
    list(reader.sources("dataset", chat_tokenizer(TEMPLATE), told.__setitem__))
    assert told.get("not read") == (unread and f"columns {unread}")


def test_numbers_of_a_table_are_text():
    row = {"prompt": 2, "completion": 2.5}
    assert recognise("sft", list(row), row, template=False).convert(row) == {"prompt": "2", "completion": "2.5"}


def test_roles_of_sharegpt_and_a_system_message():
    row = {"system": "Be brief.", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    made = converted("sft", row)
    assert [message["role"] for message in made["messages"]] == ["system", "user", "assistant"]
    assert formats.with_system({"messages": [user("a")]}, "Be kind.")["messages"][0]["content"] == "Be kind."
    assert formats.with_system(made, "Be kind.") == made  # it has one


def test_prompts_of_ultrafeedback_are_taken_from_the_pairs():
    row = {"prompt": "Say", "chosen": [user("Say"), assistant("a")], "rejected": [user("Say"), assistant("b")]}
    assert recognise("dpo", list(row), row).convert(row).keys() == {"chosen", "rejected"}
    with pytest.raises(FormatError, match="are the same"):
        recognise("dpo", list(row), row).convert({**row, "rejected": row["chosen"]})


def test_other_names_of_columns_streams_and_limits(folder, monkeypatch):
    monkeypatch.chdir(folder)
    columns = ["prompt=question", "completion=answer"]
    for streaming in (False, True):
        data = DataOptions(dataset=["questions.jsonl"], columns=columns, limit=3, streaming=streaming, eval_share=0)
        (source,) = Reader("sft", data, 0).sources("dataset", chat_tokenizer(TEMPLATE), print)
        rows = list(source.rows)
        assert rows[2] == {"prompt": [user("What is 2 + 1?")], "completion": [assistant("So it is #### 3")]}
        assert len(rows) == 3


def test_shares_of_a_mixture_repeat_no_row():
    assert shares([100, 30], [0.5, 0.5]) == [30, 30]
    assert shares([100, 30], [3, 1]) == [90, 30]
    assert shares([100, 30], [1, 0]) == [100, 0]
    datasets = pytest.importorskip("datasets")
    parts = [datasets.Dataset.from_dict({"number": list(numbers)}) for numbers in (range(100), range(100, 130))]
    numbers = mixed(parts, [3, 1], seed=1)["number"][:]
    assert len(set(numbers)) == 120 and sum(number < 100 for number in numbers) == 90


# Which tokens are learned.


def tokens_of(name, template=TEMPLATE, answers_only=True):
    """The tokens and labels of a format, and the tokenizer."""
    tokenizer = chat_tokenizer(template)
    (source,) = Reader("sft", DataOptions(dataset=[name]), 0).sources("dataset", tokenizer, print)
    answers = Answers(tokenizer, answers_only, completions_only=True)
    return answers.tokenise(source), tokenizer, answers.way


def learned(row, tokenizer):
    return tokenizer.decode([label for label in row["labels"] if label >= 0])


@pytest.mark.parametrize("template, way", [(TEMPLATE, "rendering"), (MARKED, "marks")])
def test_only_answers_are_learned_with_any_template(folder, monkeypatch, template, way):
    monkeypatch.chdir(folder)
    rows, tokenizer, taken = tokens_of("chats.jsonl", template)
    assert taken == way
    assert tokenizer.decode(rows[3]["input_ids"]).startswith("user: Say 3<|end|>assistant: 3!<|end|>user: again")
    assert learned(rows[3], tokenizer) == "3!<|end|>3 3<|end|>"
    whole, _, _ = tokens_of("chats.jsonl", template, answers_only=False)
    assert whole[3]["labels"] == whole[3]["input_ids"] == rows[3]["input_ids"]


def test_a_template_that_forgets_makes_a_row_of_each_answer(tmp_path):
    messages = [user("Say"), assistant("think|one"), user("again"), assistant("think|two")]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}))
    rows, tokenizer, _ = tokens_of(str(tmp_path / "chats.jsonl"), FORGETFUL)
    assert [learned(row, tokenizer) for row in rows] == ["think|one<|end|>", "think|two<|end|>"]
    assert tokenizer.decode(rows[1]["input_ids"]).startswith("user: Say<|end|>assistant: one<|end|>user: again")


@pytest.mark.parametrize("name", ["chats", "sharegpt", "completions", pytest.param("texts", marks=pytest.mark.slow)])
def test_tokens_and_labels_are_those_of_trl(folder, tmp_path, monkeypatch, name):
    from datasets import Dataset

    monkeypatch.chdir(folder)
    ours, tokenizer, _ = tokens_of(f"{name}.jsonl", MARKED)
    args = trl.SFTConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_length=None,
        assistant_only_loss=name in ("chats", "sharegpt"),
    )  # fmt: skip
    roles = {"human": "user", "gpt": "assistant"}
    rows = [
        {"messages": [{"role": roles[m["from"]], "content": m["value"]} for m in row["conversations"]]}
        if name == "sharegpt" else row
        for row in ROWS[name]
    ]  # fmt: skip
    data = Dataset.from_list(rows)
    theirs = trl.SFTTrainer("model", args, train_dataset=data, processing_class=tokenizer).train_dataset
    for column in ("input_ids", "labels"):
        assert ours[column][:] == theirs[column][:]


# Rewards.


@pytest.mark.parametrize(
    "text, number",
    [
        ("It is 1,234.50.", "1234.50"), ("so #### -7 apples", "-7"), (r"\boxed{3/4} of 9", "0.75"), ("none", None),
        ("1 then 2", "2"), ("2e3", "2000"), ("1/0", None), ("5\n\n####", None), ("#### 5, so \\boxed{6}", "6"),
        # Separators of thousands, LaTeX, fractions.
        (r"\boxed{9{,}500}", "9500"), (r"\boxed{$9,\!500$}", "9500"), ("1 000 000", "1000000"), ("1.000,50", "1000.5"),
        (r"\boxed{1\,000}", "1000"), ("1'000", "1000"), (r"\boxed{\dfrac{1}{2}}", "0.5"),
        (r"\boxed{-\frac34}", "-0.75"),
        (r"2\frac{1}{2}", "2.5"), ("2 1/2", "2.5"), (r"\boxed{\text{12 apples}}", "12"), (r"\boxed{12\%}", "12"),
        (r"\boxed{90^{\circ}}", "90"), (r"5. \boxed{\text{twelve}}", None), (r"\boxed{5", None),
        # Signs and ranges.
        ("It is \u22125.", "-5"), ("-$5", "-5"), ("x = -3", "-3"), ("between 2-3", "3"), ("10 - 3", "3"),
        ("is *5*", "5"),
        # A part of something else is no answer.
        (r"\boxed{2^{10}}", None), (r"\boxed{\sqrt{2}}", None), (r"\boxed{\frac{x}{2}}", None), ("5\u00b2", None),
        (r"\boxed{x^2 = 4}", "4"), ("2+3", None), ("2 * 3 = 6", "6"), ("2024-01-05", None), ("10:30", None),
        ("H2O", None),
        # Nothing raises.
        ("1e999999999/3", None), ("1e99999999999999999999", None), ("7" * 9000 + "/0", None), ("\u0663", "3"),
    ],
)  # fmt: skip
def test_the_number_that_a_text_answers_with(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


def test_rewards_of_our_own():
    texts = ["The answer!", [assistant("answer")], "other"]
    assert exact_match(texts, answer=["Answer", "an answer", None]) == [1, 1, None]
    for text, other, equal in (
        ("The Paris.", "paris", 1), ("\u201cdon\u2019t\u201d", "don't", 1), ("Caf\u00e9", "cafe\u0301", 1),
        ("1,000", "1000", 1),
        ("-5", "5", 0), ("\u22125", "-5", 1), ("3.5", "35", 0), ("3/4", "34", 0), ("!", "?", 0), ("", "...", 0),
        ("A", "B", 0),
        ("A.", "a", 1), ("the", "a", 0),
    ):  # fmt: skip
        assert exact_match([text], answer=[other]) == [equal], (text, other)
    assert numeric_answer(["4.0", "5"], answer=["#### 4", "4"]) == [1, 0]
    form = rewards.load("format", "<a>.*</a>")
    assert form(["<a>1\n2</a>\n", "x<a>1</a>"]) == [1, 0]


def test_rewards_by_import_path(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def short(completions, **columns):\n    return [1.0 for _ in completions]\n")
    assert rewards.load(f"{tmp_path / 'mine.py'}:short", None)(["a", "b"]) == [1, 1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert rewards.load("mine:short", None)(["a"]) == [1]
    monkeypatch.delitem(sys.modules, "mine")


# Runs.


def test_sft_says_what_it_does_and_what_comes_next(run, tmp_path, left):
    words = ["--max_length", "50", "--use_peft", "true", "--lora_r", "2", "--limit", "9"]
    out, _ = run("sft", "--dataset", "chats.jsonl", *words)
    for sentence in (
        "chats.jsonl: chats (`messages`), 9 rows",
        "eval       1 of 9 rows, which are not trained on",
        "loss on    assistant turns, found by rendering",
        "8 of 8 rows cut at --max_length 50 (the longest has",
        "in adapters",
        "steps      2, 2 rows each",
        "the rule for LoRA",
        "step 1/2  loss",
        "eval       loss",
        "perplexity",
        "hf-hybrid chat",
    ):
        assert sentence in out
    assert re.findall(r"^  speed      [\d,]+ tokens/s$", out, re.MULTILINE)
    assert all(len(line) <= 80 for line in out.splitlines() if str(tmp_path) not in line)  # a path is not broken
    state = left("trainer_state")
    assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == [1, 2]
    adapters = left("adapter_config")
    assert adapters["r"] == 2 and adapters["lora_dropout"] == 0 and adapters["base_model_name_or_path"] == "model"


def test_a_dry_run_says_what_would_be_saved_and_trains_nothing(run, folder, tmp_path):
    out, _ = run("sft", "--dataset", "chats.jsonl", "--dry_run", "true", "--packing", "true")
    text = " ".join(out.split())
    assert re.search(r"rows about \d+% of the tokens are not computed", text), text
    assert "steps " in text and not list((tmp_path / "out").iterdir())  # what a run has written there stays


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", mostly_slow(["llama", "qwen3_moe", "lfm2", "jamba", "dropout", "off"], ["llama", "off"])
)
def test_sft_says_before_the_run_what_it_leaves_out(run, folder, tmp_path, kind, left):
    """As many tokens as are left out then, within 6 of 100; of mixtures and layers with a state too, and why not."""
    config = build_family(kind if kind not in ("dropout", "off") else "llama").config
    config.vocab_size, config.max_position_embeddings, config.eos_token_id = 257, 512, 256
    config.pad_token_id = 256
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    chat_tokenizer(TEMPLATE).save_pretrained(tmp_path / "model")
    more = {"dropout": ("--use_peft", "true", "--lora_dropout", "0.1"), "off": ("--share_rows", "off")}.get(kind, ())
    steps = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--eval_share", "0")
    out, _ = run("sft", "--dataset", "chats.jsonl", *steps, *more, model=str(tmp_path / "model"))
    text = " ".join(out.split())
    summary = left("hybrid_summary")
    if kind == "off":
        assert "rows padded, each for itself (share_rows)" in text
        return
    said = re.search(r"rows about (\d+)% of the tokens are not computed \((\d+)% in shared", text)
    whole = summary["tokens"] + summary["tokens_padding"]
    left_out = 100 * (summary["tokens_shared"] + summary["tokens_padding"]) / whole
    if kind == "jamba":
        assert "the first step finds out if the model's layers with a state can do this" in text
        assert "saved no token, as rows were computed padded: `JambaMambaMixer` has a state, and is not" in text
    else:
        assert abs(int(said[1]) - left_out) < 6 and left_out > 2
    assert ("under dropout (0.1) a shared prefix draws it once" in text) == (kind == "dropout")
    said_of_experts = "experts computed by grouped_mm (experts_implementation of transformers)"
    assert (said_of_experts in text) == (kind in ("qwen3_moe", "jamba"))
    assert ("for the router's loss" in text) == (kind in ("qwen3_moe", "jamba"))
    assert ("layers with a state" in text) == (kind in ("lfm2", "jamba"))


@pytest.mark.parametrize("share", [0.38, 0.95])
def test_on_a_gpu_the_end_says_what_share_it_computed_and_what_to_do(run, monkeypatch, share, tmp_path):
    monkeypatch.setattr(Speed, "device_share", share)
    out, _ = run("sft", "--dataset", "chats.jsonl", "--torch_compile", "false")
    said = " ".join(out.split())
    limit = "The host is the limit: the device computed in 38 % of the time. A larger `per_device_train_batch_size` or"
    assert (limit if share == 0.38 else "the device computed in 95% of the time") in said
    assert said.count("device computed") == 1, "once"
    assert all(len(line) <= 80 for line in out.splitlines() if str(tmp_path) not in line)


@pytest.mark.parametrize("more", [[], ["--load_best_model_at_end", "--save_steps", "1"]])
def test_what_the_last_step_evaluated_is_not_evaluated_again(run, more, left):
    """Unless the best weights were loaded after it."""
    steps = ["--eval_strategy", "steps", "--eval_steps", "1", "--eval_share", "0.3"]
    out, _ = run("sft", "--dataset", "chats.jsonl", *steps, *more)
    assert out.count("step 2/2  eval: loss") == (2 if more else 1) and "eval       loss" in out
    logged = left("trainer_state")["log_history"]
    evaluated = left("eval_results")
    losses = [entry["eval_loss"] for entry in logged if "eval_loss" in entry]
    assert len(losses) == 2 and evaluated["eval_loss"] == pytest.approx(min(losses) if more else losses[-1])


def test_a_finished_run_is_evaluated_on_the_data_that_are_given_now(run, tmp_path, left):
    """Its log has an evaluation of the last step, perhaps on other data."""
    (tmp_path / "other.jsonl").write_text(json.dumps({"messages": [user("a"), assistant("b b b")]}) + "\n")
    steps = ["--eval_strategy", "steps", "--eval_steps", "1", "--save_steps", "2"]
    losses = []
    for data, more in (("chats.jsonl", []), (str(tmp_path / "other.jsonl"), ["--resume_from_checkpoint", "true"])):
        run("sft", "--dataset", "chats.jsonl", *steps, "--eval_dataset", data, *more)
        losses.append(left("eval_results")["eval_loss"])
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    "file, more", [("chats.jsonl", []), ("completions.jsonl", ["--max_length", "7", "--truncation_mode", "keep_end"])]
)
def test_export_measures_on_the_rows_that_sft_held_out(run, left, cli, refused, tmp_path, monkeypatch, file, more):
    run("sft", "--dataset", file, "--eval_share", "0.3", *more)
    evaluated = left("eval_results")["eval_loss"]
    monkeypatch.chdir(tmp_path)  # the note has whole paths
    cli("export", "out", "--format", "gguf-f16", "--measure")
    result = json.loads((tmp_path / "out-gguf-f16" / "export.json").read_text())
    assert result["sequences"] == 4 and result["original"]["loss"] == pytest.approx(evaluated, rel=2e-3)
    monkeypatch.setenv("COLUMNS", "60")
    out, err = cli("export", "out", "--format", "merged", "--measure")
    assert "eval loss" in out and max(map(len, out.splitlines())) <= 60
    # Nothing comes before: no bars, and no warnings of dependencies.
    assert err.splitlines() == [
        "Writing merged ...",
        "Written: out-merged",
        "Measuring the loss of the original and of the export. Ctrl-C is safe now.",
        "To try it: hf-hybrid chat out-merged",
    ]
    note, values = tmp_path / "out" / "_hybrid_data.json", left("_hybrid_data")
    for wrong, message in (
        ({"command": "fly"}, "it is damaged ('fly')"),
        ({"wings": 2}, "it is damaged"),
        ({"dataset": [str(tmp_path / "gone.jsonl")]}, "there is no such file"),
    ):
        note.write_text(json.dumps(values | wrong))
        assert message in refused("export", "out", "--format", "merged", "--output", "other", "--measure")
    note.write_text(json.dumps({key: value for key, value in values.items() if key != "seed"}))
    assert "it is damaged" in refused("export", "out", "--format", "merged", "--output", "other", "--measure")


@pytest.mark.parametrize("name, data, peft", mostly_slow(
    [(*of, peft) for of in (("sft", "chats"), ("dpo", "pairs"), ("grpo", "questions")) for peft in ("lora", "none")],
    [("sft", "chats", "lora"), ("dpo", "pairs", "none"), ("grpo", "questions", "lora")],
))  # fmt: skip
@pytest.mark.long
def test_a_plan_runs_unchanged_under_its_command(folder, tmp_path, monkeypatch, cli, left, name, data, peft):
    monkeypatch.chdir(folder)
    words = ["model", "--for", name, "--peft", peft, "--sequence_length", "64", "--batch_size", "4"]
    cli("plan", *words, "--dtype", "float32", "--vram", "2", "--ram", "4", "--output", tmp_path / "plan.yaml")
    needed = ["--reward", "numeric_answer"] if name == "grpo" else []
    here = ["--use_cpu", "--max_steps", "2", "--report_to", "none", "--output_dir", tmp_path / "out", *needed]
    cli(name, "--config", tmp_path / "plan.yaml", "--dataset", f"{data}.jsonl", *here)
    assert (tmp_path / "out" / "adapter_config.json").is_file() == (peft == "lora")
    if name == "sft":  # rows are shared, the rate follows a rule, and no leaps are made
        summary = left("hybrid_summary")
        assert summary["tokens_padding"] + summary["tokens_shared"] > 0 and not summary["leaps_made"]
        assert peft == "none" or summary["learning_rate_scale"] > 1


@pytest.mark.parametrize("name, data", mostly_slow([("dpo", "pairs"), ("grpo", "questions")], [("dpo", "pairs")]))
@pytest.mark.long
def test_commands_stream_layers(folder, tmp_path, monkeypatch, cli, left, name, data):
    monkeypatch.chdir(folder)
    needed = ["--reward", "numeric_answer", "--max_completion_length", "8"] if name == "grpo" else ["--peft", "none"]
    here = ["--use_cpu", "--max_steps", "2", "--report_to", "none", "--output_dir", tmp_path / "out", *needed]
    cli(name, "--model", "model", "--dataset", f"{data}.jsonl", "--memory", "stream", *here)
    assert left("hybrid_summary")["plain_rows_because"] is None


def test_held_out_pairs_are_measured_by_their_chosen_side(folder, tmp_path):
    tokenizer = chat_tokenizer(TEMPLATE)
    for file, read in (("pairs.jsonl", "Say {}:"), ("chat_pairs.jsonl", "user: Say {}<|end|>assistant: ")):
        note = Reader("dpo", DataOptions(dataset=[str(folder / file)]), seed=1)
        (row,) = held_out_rows(note, tokenizer, 9)
        whole, answer = tokenizer.decode(row["input_ids"]), learned(row, tokenizer)
        number = re.search(r"Say (\d+)", whole)[1]
        assert answer == ("yes" if file.startswith("chat") else f" {number}") + "<|end|>"
        assert whole == read.format(number) + answer
    (tmp_path / "note.json").write_text(json.dumps(dataclasses.replace(note, command="grpo").to_dict()))
    note = read_note(tmp_path / "note.json")
    assert note.command == "grpo" and note.holds_prompts


def test_kto_learns_from_labels_as_trl_does(run, left, tmp_path):
    rows = [{"messages": [user(f"Say {i}"), assistant(f"{i}")], "label": bool(i % 2)} for i in range(8)]
    (tmp_path / "labelled.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = ["--eval_share", "0", "--learning_rate", "1e-2", "--logging_steps", "1", "--bf16", "false"]
    out, _ = run("kto", "--dataset", tmp_path / "labelled.jsonl", *common, "--resume_from_checkpoint", "false")
    assert "chats (`messages`) with `label`, 8 rows" in out
    losses = [entry["loss"] for entry in left("trainer_state")["log_history"] if "loss" in entry]
    data = [{"prompt": row["messages"][:1], "completion": row["messages"][1:], "label": row["label"]} for row in rows]
    options = {"per_device_train_batch_size": 2, "max_steps": 2, "learning_rate": 1e-2, "logging_steps": 1}
    args = trl.KTOConfig(tmp_path / "trl", use_cpu=True, report_to=[], bf16=False, save_strategy="no", **options)
    models = [AutoModelForCausalLM.from_pretrained("model", dtype="float32") for _ in range(2)]
    tokenizer = byte_tokenizer().from_pretrained("model")
    theirs = trl.KTOTrainer(
        models[0], models[1], args, train_dataset=Dataset.from_list(data), processing_class=tokenizer
    )
    theirs.train()
    expected = [entry["loss"] for entry in theirs.state.log_history if "loss" in entry]
    assert losses == pytest.approx(expected, rel=1e-5) and losses[0] != losses[1]


@pytest.mark.parametrize("peft", ["none", "lora"])
def test_a_reward_model_scores(run, tmp_path, peft):
    out, _ = run("reward", "--dataset", "pairs.jsonl", "--peft", peft, "--eval_share", "0.2")
    assert "of the pairs ranked right" in out and "hf-hybrid chat" not in out and "hf-hybrid report" in out
    kind = AutoPeftModelForSequenceClassification if peft == "lora" else AutoModelForSequenceClassification
    assert kind.from_pretrained(tmp_path / "out", num_labels=1).score.weight.shape[0] == 1


@pytest.mark.parametrize("row, said", [
    ({"prompt": "a", "completion": " b", "label": "good"}, "`label` is `'good'`, not true or false"),
    ({"messages": [assistant("b")], "label": True}, "its last message is no answer to others"),
    ({"prompt": "a", "completion": " b"}, "`hf-hybrid kto` takes `prompt`, `completion` and `label`"),
])  # fmt: skip
def test_rows_of_kto_have_a_label(row, said):
    with pytest.raises((FormatError, OptionError), match=re.escape(said)):
        recognise("kto", list(row), row).convert(row)


def test_dpo_ranks_pairs(run):
    more = ["--padding_free", "true", "--eval_strategy", "steps", "--eval_steps", "1"]
    out, err = run("dpo", "--dataset", "pairs.jsonl", *more)
    assert "padding_free" not in err + out
    assert "with `prompt`, text" in " ".join(out.split()) and "tokens" in out and "in 11 pairs" in out
    assert "of the pairs ranked right" in out and "step 1/2  eval: loss" in out


@pytest.mark.slow
@pytest.mark.parametrize("command, file", [
    *(("sft", name) for name in ("sharegpt.jsonl", "completions.jsonl", "alpaca.jsonl", "texts.jsonl", "table.csv")),
    ("dpo", "pairs.json"), ("dpo", "chat_pairs.jsonl"),
])  # fmt: skip
def test_every_format_trains(run, command, file):
    more = ["--eval_share", "0"] if file == "table.csv" else []
    assert "Done: 2 steps" in run(command, "--dataset", file, *more)[0]


def test_data_sets_are_mixed_as_streams_too(run, tmp_path):
    files = ["--dataset", "chats.jsonl", "completions.jsonl", "--dataset_weights", "2", "1"]
    out, _ = run("sft", *files, "--dataset_streaming", "true")
    assert "67% chats.jsonl, 33% completions.jsonl" in out and "is not known in a stream" in " ".join(out.split())
    out, _ = run("sft", *files, "--max_grad_norm", "0.5", "--output_dir", str(tmp_path / "other"))
    assert "12 of 12 rows of chats.jsonl, 6 of 12 rows of completions.jsonl" in " ".join(out.split())


def test_grpo_stops_at_ctrl_c_with_a_checkpoint_and_goes_on(run, folder, left):
    (folder / "stopping.py").write_text(
        "import os, signal\n\n"
        "def stop(completions, answer, log_metric, **columns):\n"
        "    tried_out = not columns['trainer_state'].max_steps\n"
        "    if not tried_out and not os.path.exists('stopped'):\n"
        "        open('stopped', 'w').close()\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return [float(number) for number, _ in enumerate(completions)]\n"
    )
    words = ["--dataset", "questions.jsonl", "--reward", "stopping.py:stop", "numeric_answer", "--num_generations", "2"]
    words += ["--max_completion_length", "4", "--learning_rate", "1e-4"]
    out, err = run("grpo", *words, steps=3, status=130)
    assert "Ctrl-C: the step ends" in err
    assert "Stopped at step 1 of 3." in out and "checkpoint-1" in out and "run the same command again." in out
    assert "rewards    stopping.py:stop, numeric_answer" in out and "auto_lr" not in out  # GRPO has none
    assert left("hybrid_config") and left("hybrid_summary")
    out, _ = run("grpo", *words, steps=3)
    assert "step 3/3  reward" in out and "step 1/3" not in out


@pytest.mark.parametrize(
    "reward, words, status, lines",
    [
        ("short", [], 0, ["No reward differed in 2 rounds, so nothing was learned", "which cut 100% of the last",
                          'short 0: "What is']),
        ("short", ["--peft", "lora", "--lora_alpha", "800"], 0, ["rate 0.000432 (the rule for adapters)"]),
        ("later", ["--save_steps", "1"], 1, ["Stopped at step 1 of 2. Saved: "]),
    ],
    ids=["nothing learned", "adapters", "fails in the second step"],
)  # fmt: skip
def test_grpo_says_what_it_learns_from(run, left, wrong_files, tmp_path, reward, words, status, lines):
    grpo = ["--dataset", "questions.jsonl", "--reward", f"mine.py:{reward}", "--num_generations", "2"]
    out, err = run("grpo", *grpo, "--max_completion_length", "4", *words, status=status)
    assert all(line in " ".join(out.split()) for line in lines)
    assert ("`--reward mine.py:later` returned 1 rewards" in err) == (status == 1)
    written = sorted(path.name for path in (tmp_path / "out" / "completions").iterdir())
    assert written == ["completions_00001.parquet", "completions_00002.parquet"][: 2 - status]
    if status == 0:
        assert left("hybrid_config")["activation_checkpointing"] == "auto" and left("hybrid_summary")["rows_skipped"]
        written = ["--config", str(tmp_path / "out" / "hybrid_config.json")]
        assert CommandLine(written, GRPO).options(), "it can be used again"


def test_true_and_false_in_a_file_mean_what_they_mean_to_trl(tmp_path):
    file = tmp_path / "run.yaml"
    for value, scaled in (("true", "group"), ("false", "none")):
        file.write_text(f"scale_rewards: {value}\nfsdp: false\ntrackio_static_space_id: false\noutput_dir: out\n")
        options = CommandLine(["--config", str(file), "--use_cpu"], GRPO).options()
        check_options(options)
        assert options.config.scale_rewards == scaled and not options.config.fsdp
        assert options.config.trackio_static_space_id is False


def test_a_negative_save_steps_saves_at_the_end_alone_as_in_trainer(run, tmp_path):
    out, _ = run("sft", "--dataset", "chats.jsonl", "--save_steps", "-1")
    assert "no checkpoints on the way" in " ".join(out.split())
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]


def test_early_stopping_keeps_the_best_model(run, left):
    words = ["--early_stopping_patience", "1", "--learning_rate", "100", "--enable_predict", "false"]
    assert "Done: 2 of 6 steps" in run("sft", "--dataset", "chats.jsonl", *words, steps=6)[0]
    assert left("trainer_state")["best_model_checkpoint"].endswith("checkpoint-1")
    assert left("hybrid_config") and left("hybrid_summary")


def test_the_rate_of_adapters_is_the_same_in_fp16(run, left):
    rates = []
    for more in (["--fp16", "true"], []):
        run("sft", "--dataset", "chats.jsonl", "--peft", "lora", *more, "--resume_from_checkpoint", "false", steps=1)
        rates.append(left("hybrid_summary")["learning_rate_scale"])
    assert rates[0] == rates[1] > 100


def test_a_base_model_gets_the_plain_template(run, tmp_path):
    _, err = run("sft", "--dataset", "chats.jsonl", model="base", status=2)
    assert "has no chat template. Set `--tokenizer`" in err
    out, _ = run("sft", "--dataset", "chats.jsonl", "--chat_template_path", "plain", model="base")
    assert "found by marks" in out
    saved = byte_tokenizer().from_pretrained(tmp_path / "out")
    text = saved.apply_chat_template([user("a")], tokenize=False, add_generation_prompt=True)
    assert text == "User: a\n\nAssistant: "


@pytest.mark.processes
@pytest.mark.slow
def test_two_processes_fine_tune(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ["--model", "model", "--dataset", "chats.jsonl", "--max_steps", "2", "--per_device_train_batch_size", "2"]
    words += ["--report_to", "none", "--output_dir", str(tmp_path / "two"), "--num_processes", "2", "--cpu"]
    assert main(["sft", *words]) == 0
    assert (tmp_path / "two" / "model.safetensors").is_file()


# Chat.


def talk(monkeypatch, capsys, *words, lines):
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    status = main(["chat", *words, "--cpu", "--max_new_tokens", "4"])
    return status, capsys.readouterr()


def test_chat_answers_each_line(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    status, written = talk(monkeypatch, capsys, "model", "--temperature", "0", lines="hi\n\n/reset\nhi\n/exit\nhi\n")
    first, second = re.findall(r"> (?:> )*([^>]+)\n", written.out)
    assert status == 0 and first == second != "" and written.out.endswith("> "), "the conversation was forgotten"
    status, written = talk(monkeypatch, capsys, "base", lines="hi\n")
    assert status == 2 and "has no chat template" in written.err


EVIL = "\x1b]52;c;aGk=\x07\x1b]0;owned\x07\x1b[2J\x1b[8mhidden\x9b31m\r\x7f\u202edesrever\u2066"
"""Sets the clipboard and the title, clears the screen, hides text, turns it around."""


def is_visible(text):
    return all(letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cf", "Cs") for letter in text)


def test_what_a_model_writes_is_no_command_to_the_terminal(tmp_path, monkeypatch, capsys):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({END: 0, EVIL: 1, "a": 2}, unk_token="a"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    template = "{% for m in messages %}a {% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **ENDS, chat_template=template)
    model = LlamaForCausalLM(llama_config(vocab_size=3, eos_token_id=0, pad_token_id=0))
    for parameter in model.parameters():
        parameter.data.fill_(0.1)
    model.lm_head.weight.data[[0, 2]] = 0  # always says the same
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path)
    words = ["--temperature", "0", "--max_new_tokens", "2"]
    status, written = talk(monkeypatch, capsys, str(tmp_path), *words, lines="hi\n")
    assert status == 0 and "\\u001b]52;c;aGk=\\u0007" in written.out and "\\u202edesrever" in written.out
    assert is_visible(written.out)


def test_names_of_strangers_are_no_commands_to_the_terminal(run, tmp_path, monkeypatch, capsys):
    evil = EVIL + "\ud83d"  # half of an emoji, which no terminal can write
    console.print_line(evil)
    console.print_line(evil, unwrapped=True)
    (tmp_path / "rows.jsonl").write_text(json.dumps({evil: "a"}))
    out, err = run("sft", "--dataset", str(tmp_path / "rows.jsonl"), status=2)
    assert "it has `\\u001b]52" in err
    assert main(["chat", "./" + evil]) == 2 and main(["env", f"--{evil}"]) == 2
    trainer = SimpleNamespace(_logs={"prompt": ["a"], "completion": [evil], "rewards": {"b": [1.0]}})
    console.print_line(progress.last_completion(trainer))
    later = capsys.readouterr()
    assert is_visible(out + err + later.out + later.err) and later.out.count("owned") == 1


def test_chat_greets_once_the_model_is_there(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    status, written = talk(monkeypatch, capsys, "no/model", lines="hi\n")
    assert status == 2 and "`no/model` cannot be loaded" in written.err and written.out == ""


def test_chat_keeps_the_conversation_and_the_system_message(folder, monkeypatch, capsys):
    conversations = []

    def answer(model, tokenizer, messages, args):
        conversations.append([message["content"] for message in messages])
        return f"answer {len(conversations)}"

    monkeypatch.chdir(folder)
    monkeypatch.setattr(chat, "_answer", answer)
    lines = "one\ntwo\n/what\n/system Be long.\nthree\n/reset\nfour\n"
    status, written = talk(monkeypatch, capsys, "model", "--system", "Be brief.", lines=lines)
    assert status == 0 and written.out.count(chat.HELP[:20]) == 2
    assert conversations == [
        ["Be brief.", "one"], ["Be brief.", "one", "answer 1", "two"], ["Be long.", "three"], ["Be long.", "four"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words, message",
    [
        (["model", "--max_new_tokens", "0"], "`--max_new_tokens` must be at least 1, got 0"),
        (["model", "--temperature", "-1"], "`--temperature` must be between 0 and 100, got -1.0"),
        (["./nowhere"], "`./nowhere`: there is no such folder"),
        (["."], "`.` holds no model"),
    ],
)
def test_chat_refuses(folder, monkeypatch, refused, words, message):
    monkeypatch.chdir(folder)
    assert message in refused("chat", *words)


# Wrong inputs: one sentence and status 2, before the model is loaded.

WRONG = [
    # Files, the model and columns.
    ("sft", [], "`--dataset` is missing"),
    ("sft", ["--dataset", "chat.jsonl"], "there is no such file. Did you mean `chats.jsonl`?"),
    ("sft", ["--dataset", "gone/chats.jsonl"], "The folder `gone` does not exist"),
    ("sft", ["--dataset", "chats.xlsx"], "`--dataset chats.xlsx` ends in `.xlsx`, and these files are read"),
    ("sft", ["--dataset", "empty.jsonl"], "`--dataset empty.jsonl` holds no rows"),
    ("sft", ["--dataset", "broken.jsonl"], "`--dataset broken.jsonl`, row 1: it is no JSON (Expecting"),
    ("sft", ["--dataset", "late_broken.jsonl"], "`--dataset late_broken.jsonl`, row 2: it is no JSON"),
    ("sft", ["--dataset", "wide.csv"], "cannot be read as csv: its first row has more fields than the 2 names above"),
    ("sft", ["--dataset", "images.jsonl"], "row 1: it has images in its messages, and `hf-hybrid sft` trains models"),
    ("sft", ["--dataset", "weights.jsonl"], "row 1: `messages` has a message whose `weight` is `0.5`, not 0 or 1"),
    *((command, ["--dataset", "pictures.jsonl", *more], f"has images in `images`, and `hf-hybrid {command}` trains")
      for command, more in (("sft", []), ("dpo", []), ("grpo", ["--reward", "exact_match"]))),
    ("dpo", ["--dataset", "half.jsonl"], "it has `prompt`, `chosen`, and no `rejected`"),
    ("sft", ["--dataset", "header.csv"], "`--dataset header.csv` holds no rows"),
    ("sft", ["--dataset", "latin.csv"], "`--dataset latin.csv` cannot be read as csv"),
    ("sft", ["--dataset", "latin.csv"], "Save it as UTF-8."),
    ("sft", ["--dataset", "broken.parquet"], "`--dataset broken.parquet` cannot be read as parquet"),
    ("sft", ["--dataset", "numbers.jsonl"], "`--dataset numbers.jsonl`, row 1: it is `1`, no JSON object"),
    ("sft", ["--dataset", "odd.jsonl"], "it has `que`, `ans`, and `hf-hybrid sft` takes `messages` (chats)"),
    ("sft", ["--dataset", "pairs.jsonl"], "That is what `hf-hybrid dpo` takes"),
    ("dpo", ["--dataset", "chats.jsonl"], "That is what `hf-hybrid sft` takes"),
    ("sft", ["--dataset", "roles.jsonl"], "row 1: `from` is `'robot'` in `conversations`, which is none of human"),
    ("sft", ["--dataset", "late.jsonl"],
     "`--dataset late.jsonl`, row 2: `messages` has no message of `assistant`, only of `user`"),
    ("sft", ["--dataset", "nulls.jsonl"], "row 2: `completion` is `None`, not a text. Correct or remove the row"),
    ("dpo", ["--dataset", "answered.jsonl"], "row 1: `messages` ends with an answer, so that it is no prompt"),
    ("dpo", ["--dataset", "same.jsonl"], "row 1: `chosen` and `rejected` are the same"),
    ("sft", ["--dataset", "chats.jsonl", "--eval_dataset", "nowhere.jsonl"], "`--eval_dataset nowhere.jsonl`:"),
    ("sft", ["--dataset", "nobody/nothing"], "`--dataset nobody/nothing` cannot be loaded"),
    ("sft", ["--dataset", "questions.jsonl", "--columns", "prompt"], "`--columns prompt` is not of the form NEW=OLD"),
    ("sft", ["--dataset", "questions.jsonl", "--columns", "prompt=quest"], "Did you mean `question`?"),
    ("sft", ["--dataset", "chats.jsonl", "--model", "./gone"], "`--model ./gone`: there is no such file or folder"),
    ("sft", ["--dataset", "chats.jsonl", "--model", "."], "`--model .` holds no `config.json`"),
    ("sft", ["--dataset", "chats.jsonl", "--model", "adapters"], "`adapter_config.json` does not name their base"),
    ("sft", ["--dataset", "chats.jsonl", "--model", "t5"], "`--model t5` is no causal language model but a `t5`"),
    ("sft", ["--dataset", "chats.jsonl", "--model", "bert"], "`--model bert` is no causal language model but a `bert`"),
    ("sft", ["--dataset", "chats.jsonl", "--model", "llava"], "`--model llava` is no causal language model but a `"),
    ("sft", ["--dataset", "chats.jsonl", "--model", "trained", "--lora_r", "4"], "`--lora_r 4` shapes new adapters"),
    ("sft", ["--dataset", "chats.jsonl", "--model", "nobody/nothing"], "`--model nobody/nothing` cannot be loaded"),
    ("sft", ["--dataset", "chats.jsonl", "--tokenizer", "nobody/none"], "No tokenizer can be loaded from `nobody/"),
    # Options.
    ("sft", ["--dataset", "chats.jsonl", "--lora-rank", "4"], "no option. Write `--lora_r` in its place"),
    ("sft", ["--dataset", "chats.jsonl", "--warmup_ratio", "0.1"], "Write `--warmup_steps` in its place"),
    ("dpo", ["--dataset", "pairs.jsonl", "--max_seq_length", "9"], "Write `--max_length` in its place"),
    ("train", ["--dataset", "texts.jsonl", "--max_length", "9"], "Write `--sequence_length` in its place"),
    ("sft", ["--dataset", "chats.jsonl", "--report_to", "trackio"], "trackio is not installed. `pip install trackio`"),
    ("sft", ["--dataset", "chats.jsonl", "--early_stopping_patience", "0"], "must be at least 1, got 0"),
    ("sft", ["--dataset", "chats.jsonl", "--early_stopping_patience", "1", "--eval_share", "0"], "nothing to evaluate"),
    ("sft", ["--dataset", "chats.jsonl", "--early_stopping_patience", "1", "--load_best_model_at_end", "false"],
     "`--early_stopping_patience` keeps the best model"),
    ("sft", ["--dataset", "chats.jsonl", "--lora_r", "0"], "`lora_r` must be at least 1, got 0"),
    ("sft", ["--dataset", "chats.jsonl", "--lora_r", "many"], "invalid int value: 'many'"),
    ("sft", ["--dataset", "chats.jsonl", "--limit", "0"], "`limit` must be at least 1, got 0"),
    ("sft", ["--dataset", "chats.jsonl", "--learning_rate", "-1"], "`learning_rate` must be at least 0, got -1"),
    ("sft", ["--dataset", "chats.jsonl", "--dataset_weights", "1", "2"], "has 2 numbers, and `--dataset` names 1"),
    ("sft", ["--dataset", "chats.jsonl", "--dataset_weights", "0"], "must be at least 0, and one greater"),
    ("sft", ["--dataset", "chats.jsonl", "--streaming", "true", "--max_steps", "-1"], "so it needs `--max_steps`"),
    ("sft", ["--dataset", "chats.jsonl", "--streaming", "true", "--eval_share", "0.1"], "While streaming set"),
    ("sft", ["--dataset", "chats.jsonl", "--load_in_4bit", "true"], "Add `--use_peft true`"),
    ("sft", ["--dataset", "chats.jsonl", "--eval_strategy", "steps", "--eval_share", "0"], "nothing to evaluate on"),
    ("sft", ["--dataset", "texts.jsonl", "--assistant_only_loss", "true"], "needs chats, and `--dataset texts.jsonl`"),
    ("sft", ["--dataset", "chats.jsonl", "--chat_template_path", "gone.jinja"], "is neither a file nor `plain`"),
    ("sft", ["--dataset", "chats.jsonl", "--eos_token", "<nope>"], "`--eos_token <nope>` is not in the vocabulary"),
    ("sft", ["--dataset", "chats.jsonl", "--max_length", "3"], "`--max_length 3` cuts every row before its answer"),
    ("sft", ["--dataset", "chats.jsonl", "--config", "gone.yaml"], "`--config gone.yaml` cannot be read"),
    ("sft", ["--dataset", "chats.jsonl", "--output_dir", "texts.jsonl/out"], "cannot be written to: Not a directory"),
    ("sft", ["--dataset", "chats.jsonl", "--dataset_split", "test"], "`chats.jsonl` has none. Leave it out."),
    ("sft", ["--dataset", "chats.jsonl", "--dataset_config", "main"], "`--dataset_config main` chooses a part of a "),
    ("sft", ["--dataset", "chats.jsonl", "--eval_split", "test"], "`--eval_split test` chooses a part of a data set"),
    ("sft", ["--dataset", "chats.jsonl", "--push_to_hub", "true"], "`--push_to_hub true`: `out` cannot be made on the"),
    ("sft", ["--dataset", "chats.jsonl", "--num_train_epochs", "-1", "--max_steps", "-1"], "`num_train_epochs` must"),
    ("dpo", ["--dataset", "pairs.jsonl", "--beta", "-1"], "`beta` must be at least 0, got -1"),
    ("dpo", ["--dataset", "pairs.jsonl", "--label_smoothing", "2"], "`label_smoothing` must be between 0 and 1, got 2"),
    ("dpo", ["--dataset", "pairs.jsonl", "--loss_type", "robust", "--label_smoothing", "0.5"], "Set it below 0.5."),
    ("sft", ["--dataset", "chats.jsonl", "--neftune_noise_alpha", "-1"], "`neftune_noise_alpha` must be at least 0"),
    ("dpo", ["--dataset", "pairs.jsonl", "--beta", "0", "--loss_type", "ipo"], "`beta=0` multiplies all that these"),
    ("dpo", ["--dataset", "pairs.jsonl", "--discopop_tau", "0"], "`discopop_tau` must be greater than 0, got 0"),
    ("dpo", ["--dataset", "pairs.jsonl", "--ld_alpha", "2"], "`ld_alpha` must be between 0 and 1, got 2"),
    ("dpo", ["--dataset", "pairs.jsonl", "--ref_model_mixup_alpha", "2"], "`ref_model_mixup_alpha` must be between 0"),
    ("dpo", ["--dataset", "pairs.jsonl", "--ref_model_sync_steps", "0"], "`ref_model_sync_steps` must be at least 1"),
    ("dpo", ["--dataset", "pairs.jsonl", "--padding_free", "true", "--share_rows", "off"], "needs `share_rows`"),
    # Rewards.
    ("grpo", ["--dataset", "questions.jsonl"], "`--reward` is missing"),
    ("grpo", ["--dataset", "questions.jsonl", "--reward", "exact"], "is none of exact_match, numeric_answer, format"),
    ("grpo", ["--dataset", "questions.jsonl", "--reward", "gone.py:f"], "there is no file `gone.py`"),
    ("grpo", ["--dataset", "questions.jsonl", "--reward", "no_module_x:f"], "`no_module_x` cannot be imported"),
    ("grpo", ["--dataset", "questions.jsonl", "--reward", "mine.py:shrt"], "`mine.py` has short, nan, words"),
    ("grpo", ["--dataset", "questions.jsonl", "--reward", "format"], "needs `--reward_pattern`"),
    ("grpo", ["--dataset", "questions.jsonl", "--reward", "format", "--reward_pattern", "("], "is no regular expr"),
    ("grpo", ["--dataset", "bare.jsonl", "--reward", "exact_match"], "compares with a column `answer`"),
    ("grpo", ["--dataset", "words.jsonl", "--reward", "numeric_answer"], "compares numbers, and the first `answer`"),
    ("grpo", ["--dataset", "texts.jsonl", "--reward", "exact_match"], "`hf-hybrid grpo` takes `prompt`"),
    ("grpo", ["--dataset", "questions.jsonl", "--reward", "mine.py:short", "--reward_weights", "1", "2"],
     "`--reward_weights` has 2 numbers, and `--reward` 1"),
    ("grpo", ["--dataset", "questions.jsonl", "--reward", "numeric_answer", "--gradient_accumulation_steps", "3",
              "--num_generations", "4"], "(6) must be divisible by num_generations (4)"),
    ("sft", ["--dataset", "chats.jsonl", "--max_length", "0"], "`max_length` must be at least 1, got 0"),
    *(("grpo", ["--dataset", "questions.jsonl", "--reward", "mine.py:short", f"--{name}", value], message)
      for name, value, message in (
          ("num_generations", "0", "`num_generations` must be at least 2, got 0"),
          ("num_iterations", "0", "`num_iterations` must be at least 1, got 0"),
          ("max_completion_length", "0", "`max_completion_length` must be at least 1, got 0"),
          ("beta", "-1", "`beta` must be at least 0, got -1"),
          ("top_p", "0", "`top_p` must be greater than 0 and at most 1, got 0"),
          ("top_k", "-1", "`top_k` must be at least 0, got -1"),
          ("min_p", "2", "`min_p` must be between 0 and 1, got 2"),
          ("repetition_penalty", "0", "`repetition_penalty` must be greater than 0, got 0"),
          ("top_entropy_quantile", "2", "`top_entropy_quantile` must be between 0 and 1, got 2"),
          ("top_p", "2", "`top_p` must be greater than 0 and at most 1, got 2"),
          ("epsilon", "-0.1", "`epsilon` must be at least 0, got -0.1"),
          ("epsilon_high", "-0.1", "`epsilon_high` must be at least 0, got -0.1"),
          ("temperature", "0", "`temperature` must be greater than 0, got 0"),
      )),
    *(("grpo", ["--dataset", "questions.jsonl", "--reward", f"mine.py:{name}"], f"`--reward mine.py:{name}` {message}")
      for name, message in (
          ("nan", "returned `nan` for a completion"), ("words", "returned `'good'` for a completion"),
          ("few", "returned 1 rewards. It must return a list of 2"), ("nothing", "returned `None`"),
          ("single", "returned `1.0`"), ("raises", "raised `KeyError: 'label'` in line 11 of `mine.py`"),
      )),
]  # fmt: skip


MINE = """\
def short(completions, **columns):
    return [0.0 for _ in completions]

def nan(completions, **columns): return [float("nan") for _ in completions]
def words(completions, **columns): return ["good" for _ in completions]
def few(completions, **columns): return [1.0]
def nothing(completions, **columns): pass
def single(completions, **columns): return 1.0
def later(completions, trainer_state, **columns): return [1.0] * (1 if trainer_state.global_step else len(completions))
def raises(completions, **columns):
    return columns["label"]
"""


@pytest.fixture(scope="module")
def wrong_files(folder):
    def rows(name, *values):
        (folder / name).write_text("\n".join(map(json.dumps, values)))

    (folder / "chats.xlsx").write_text("")
    (folder / "empty.jsonl").write_text("\n\n")
    (folder / "broken.jsonl").write_text('{"messages": [}\n')
    (folder / "latin.csv").write_bytes(b"prompt,completion\ncaf\xe9,x\n")
    (folder / "header.csv").write_text("prompt,completion\n")
    (folder / "broken.parquet").write_bytes(b"PAR1 nothing")
    (folder / "late_broken.jsonl").write_text(json.dumps(ROWS["chats"][0]) + "\n\n{")
    (folder / "wide.csv").write_text("prompt,completion\na,b,c\n")
    rows("images.jsonl", {"messages": [user([{"type": "image_url", "image_url": "x"}]), assistant("a")]})
    rows(
        "pictures.jsonl", {"messages": [user("<image> What?"), assistant("a")], "images": ["a.png"], **ROWS["pairs"][0]}
    )
    rows("weights.jsonl", {"messages": [user("a"), {**assistant("a"), "weight": 0.5}]})
    rows("half.jsonl", {"prompt": "a", "chosen": "b"})
    rows("numbers.jsonl", 1, 2)
    rows("odd.jsonl", {"que": "a", "ans": "b"})
    rows("roles.jsonl", {"conversations": [{"from": "robot", "value": "beep"}]})
    rows("late.jsonl", ROWS["chats"][0], {"messages": [user("hello")]})
    rows("nulls.jsonl", {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None})
    rows("answered.jsonl", {**ROWS["chats"][0], "chosen": "a", "rejected": "b"})
    rows("same.jsonl", {"chosen": "a", "rejected": "a"})
    rows("bare.jsonl", {"prompt": "a"})
    rows("words.jsonl", {"prompt": "a", "answer": "yes"})
    (folder / "mine.py").write_text(MINE)
    (folder / "adapters").mkdir()
    (folder / "adapters" / "adapter_config.json").write_text("{}")
    (folder / "trained").mkdir()
    (folder / "trained" / "adapter_config.json").write_text('{"base_model_name_or_path": "model"}')
    masked = {"architectures": ["BertForMaskedLM"]}
    for config in (T5Config(), BertConfig(**masked), LlavaConfig()):
        config.save_pretrained(folder / config.model_type)
        chat_tokenizer(TEMPLATE).save_pretrained(folder / config.model_type)


@pytest.mark.parametrize("command, words, message", WRONG, ids=lambda value: str(value)[:50])
def test_wrong_inputs_are_one_sentence_and_status_2(run, wrong_files, monkeypatch, command, words, message):
    import transformers

    def load(*args, **kwargs):
        pytest.fail("the model was loaded")

    for name in ("from_pretrained", "from_config"):
        monkeypatch.setattr(transformers.AutoModelForCausalLM, name, load)
    more = ["--num_generations", "2"] if command == "grpo" and "--num_generations" not in words else []
    _, err = run(command, *words, *more, status=2)
    sentence = err[err.index(f"hf-hybrid {command}: error: ") :]
    assert message in sentence and sentence.count("\n") == 1


def test_without_trl_the_command_says_how_to_install_it(run, monkeypatch):
    monkeypatch.delitem(sys.modules, "hf_hybrid.trl.sft_dpo", raising=False)
    monkeypatch.setitem(sys.modules, "trl", None)
    assert 'pip install "hf-hybrid[trl]"' in run("sft", "--dataset", "chats.jsonl", status=2)[1]


@pytest.mark.processes
def test_a_misspelt_file_is_refused_without_torch(folder):
    code = (
        "from hf_hybrid.cli.main import main\n"
        "assert main(['sft', '--model', 'model', '--dataset', 'chat.jsonl']) == 2\n"
        "assert main(['grpo', '--model', 'model', '--dataset', 'chats.jsonl', '--reward', 'gone.py:f']) == 2\n"
        "assert main(['grpo', '--help']) == 0\n"
    )
    shown = python(code, without={"torch", "transformers", "datasets", "trl"}, cwd=folder)
    assert "usage: hf-hybrid grpo" in shown and "--reward_pattern" in shown


@pytest.mark.processes
def test_the_first_line_comes_before_torch_is_imported(folder):
    code = (
        "sys.modules['torch'] = None\nfrom hf_hybrid.cli.main import main\n"
        "main(['sft', '--model', 'model', '--dataset', 'chats.jsonl'])\n"
    )
    assert python(code, cwd=folder) == "hf-hybrid sft: model on chats.jsonl; importing torch ...\n"


# Options and words.


def test_the_options_of_the_model_are_trls():
    ours = {field.name for owner in (ModelOptions, AdapterOptions) for field in dataclasses.fields(owner)}
    theirs = {field.name for field in dataclasses.fields(trl.ModelConfig)}
    assert theirs - ours == {"model_name_or_path"}  # `model`; both names are taken


@pytest.mark.parametrize("name", [name for name in TRAINING if name != "train"])
def test_every_option_of_trl_is_taken(name, tmp_path):
    command = TRAINING[name]
    module, _, config = command.kind.rpartition(".")
    config = getattr(importlib.import_module(module), config)
    assert issubclass(command.of("Config"), config)
    line = CommandLine(["--model_name_or_path", "m", "--dataset_name", "d", "--dataset-train-split", "t"], command)
    values = vars(line.values)
    assert {field.name for field in dataclasses.fields(config) if field.init} <= values.keys()
    assert (values["model"], values["dataset"], values["dataset_split"]) == ("m", ["d"], "t")
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\ndataset: [a, b]\nlora_target_modules: [q_proj]\nauto_lr: off\n")
    values = CommandLine(["--config", str(file)], command).values
    assert values.model == "m" and values.dataset == ["a", "b"] and values.auto_lr == "off"


@pytest.mark.parametrize("defaulted, steps, first", [
    ({"logging_steps", "logging_first_step"}, 5, True), ({"logging_steps"}, 5, False),
    ({"logging_first_step"}, 7, False),
])  # fmt: skip
def test_the_first_step_has_a_line_unless_logging_was_chosen(defaulted, steps, first):
    trainer = SimpleNamespace(remove_callback=lambda kind: None)
    args = SimpleNamespace(logging_steps=7, logging_first_step=False, disable_tqdm=True, should_save=True)
    state = SimpleNamespace(max_steps=100, global_step=0, logging_steps=7, is_world_process_zero=True)
    callback = progress.Progress(trainer, threading.Event(), defaulted=frozenset(defaulted), notes={})
    callback.on_train_begin(args, state, None)
    assert (args.logging_steps, args.logging_first_step) == (steps, first)


def test_what_was_not_given_is_decided_by_the_command():
    assert CommandLine([], SFT).defaulted == {"logging_steps", "logging_first_step", "assistant_only_loss"}
    words = ["--logging_steps", "7", "--logging_first_step", "false"]
    assert CommandLine(words, GRPO).defaulted == {"learning_rate", "log_completions"}
    for words, value in (([], "auto"), (["--gradient_checkpointing", "false"], None)):
        line = CommandLine(["--use_cpu", *words], SFT)
        assert line.options().config.activation_checkpointing in (value, bool(value))
    assert [progress.logging_steps(steps) for steps in (1, 10, 100, 400, 10**5)] == [1, 1, 5, 20, 50]


def test_a_line_of_losses_fits_the_terminal():
    logs = {"loss": 2.13456, "grad_norm": 1.23456, "learning_rate": 2e-4, "mean_token_accuracy": 0.5}
    line = progress.log_line(5, 10, logs, rate=1234.0, left="1:05")
    assert line == "step  5/10  loss 2.1346  token acc 50%  rate 2.0e-04  1,234 tokens/s  1:05 left"
    assert len(progress.log_line(5, 10, logs, rate=1234.0, width=80)) <= 80
    assert len(progress.log_line(5, 10, logs, rate=1234.0, left="1:05", width=50)) <= 50
    assert progress.log_line(10, 10, {"eval_loss": 1.0}) == "step 10/10  eval: loss 1, perplexity 2.718"
    assert progress.log_line(1, 2, {"train_loss": 1.0}) == ""
    reward = progress.log_line(1, 2, {"loss": 0.0, "reward": 0.5, "completions/mean_length": 12.0})
    assert reward == "step 1/2  reward 0.500  length 12"


def experts():
    values = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    few = {"num_key_value_heads": 2, "intermediate_size": 32, "num_local_experts": 2}
    return AutoModelForCausalLM.from_config(MixtralConfig(**values, **few, output_router_logits=True))


@pytest.mark.parametrize(
    "model, options, padding, shared",
    [
        (lambda: tiny_model(vocab_size=257), {}, True, True),
        (lambda: tiny_model(vocab_size=257, attention_dropout=0.1), {}, True, True),
        (experts, {}, True, True),
        (lambda: tiny_model(vocab_size=257), {"share_rows": "off"}, False, False),
        (lambda: tiny_model(vocab_size=257), {"label_smoothing_factor": 0.1}, True, True),
    ],
    ids=["plain", "dropout", "experts", "off", "another loss"],
)
def test_what_is_saved_depends_on_the_model_and_the_loss(model, options, padding, shared, tmp_path):
    from datasets import Dataset

    from hf_hybrid import HybridSFTConfig, HybridSFTTrainer

    rows = [{"input_ids": [3, 4, 5, 6, *range(7, 8 + i % 9)], "labels": [-100, -100, 5, 6, *range(7, 8 + i % 9)]}
            for i in range(32)]  # fmt: skip
    config = HybridSFTConfig(**config_values(tmp_path, max_steps=2, **options))
    data = Dataset.from_list(rows)
    trainer = HybridSFTTrainer(model(), config, train_dataset=data, processing_class=byte_tokenizer(**ENDS))
    trainer.train()
    summary = trainer.hybrid_summary()
    saved = (summary.get("tokens_padding", 0) > 0, summary.get("tokens_shared", 0) > 0.2 * summary.get("tokens", 0))
    assert saved == (padding, shared)


@pytest.mark.parametrize("command", TRAINING.values(), ids=lambda command: command.name)
def test_help_fits_three_screens(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = help_text(command).splitlines()
    assert len(lines) <= 3 * 40 and max(map(len, lines)) <= 80
    shown = {name for name in TRAINING_OPTIONS if f"--{name} " in help_text(command)}
    assert shown <= vars(CommandLine([], command).values).keys()
    assert {"output_dir", "learning_rate", *command.training} <= shown


def test_commands_are_in_the_help(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(re.search(rf"^ +{name} ", out, re.M) for name in COMMANDS)
