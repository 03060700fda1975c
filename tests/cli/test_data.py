"""Data, models and adapters as people have them: what the commands make of each."""

import json
import shutil

import pytest
import torch
from conftest import mostly_slow
from rig.byte_llama import assistant, chat_tokenizer, save_llama, user
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from hf_hybrid.cli.data import Reader
from hf_hybrid.cli.options import DataOptions, OptionError
from hf_hybrid.cli.tokens import Answers, silent

pytest.importorskip("trl")

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|end|>\n{% endif %}"
MARKED = CHATML.replace(
    "m['content'] + '<|end|>\n' }}",
    "'' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|end|>\n' }}{% endif %}",
)
ENDLESS = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"


def read(path, command="sft", template=CHATML, streaming=False):
    data = DataOptions(dataset=[str(path)], streaming=streaming)
    (source,) = Reader(command, data, 0).sources("dataset", chat_tokenizer(template), silent)
    return source


# Files.


def lines(*rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def pair(prompt, completion):
    return {"prompt": prompt, "completion": completion}


DATES = [pair("When?", "2024-01-05"), pair("And?", "2023-12-31 10:00:00")]
FILES = [
    # Byte order marks, line ends, blank lines, separators that are no line ends.
    ("bom.jsonl", "\ufeff" + lines(*DATES), DATES),
    ("bom.json", "\ufeff" + json.dumps(DATES), DATES),
    ("pretty.json", "\n" + json.dumps(DATES, indent=2), DATES),
    ("bom.csv", "\ufeffprompt,completion\nx,y\n", [pair("x", "y")]),
    ("bom.txt", "\ufefffirst\r\nmore\r\n\r\n\r\n\r\n second\n", [{"text": "first\nmore"}, {"text": " second"}]),
    ("blank.jsonl", "\n" + lines(*DATES).replace("\n", "\r\n\n") + " \n", DATES),
    ("separators.jsonl", lines(pair("a\u2028b\x85c", "d")), [pair("a\u2028b\x85c", "d")]),
    # Numbers, truth values and words that a reader of tables takes for something else.
    ("numbers.jsonl", lines(pair("2 + 2?", 4), pair("Half?", 0.5), pair("Who?", "Ada"), pair("Is it?", True)),
     [pair("2 + 2?", "4"), pair("Half?", "0.5"), pair("Who?", "Ada"), pair("Is it?", "true")]),
    ("words.csv", "prompt,completion\nA,NA\nB,None\nC,nan\nD,True\n",
     [pair("A", "NA"), pair("B", "None"), pair("C", "nan"), pair("D", "True")]),
    ("zeros.csv", "prompt,completion\nZip?,02139\nPrice?,1.50\nId?,12345678901234567890123\n",
     [pair("Zip?", "02139"), pair("Price?", "1.50"), pair("Id?", "12345678901234567890123")]),
    ("fields.csv", f'prompt,completion\n"a\nb","{"x" * 200_000}"\n', [pair("a\nb", "x" * 200_000)]),
    ("inputs.csv", "instruction,input,output\nDouble,012,24\nSay hi,,hi\n",
     [{"prompt": [user("Double\n\n012")], "completion": [assistant("24")]},
      {"prompt": [user("Say hi")], "completion": [assistant("hi")]}]),
    # A column that comes late, long rows.
    ("late.jsonl", lines(*DATES, {**DATES[0], "source": "web"}), [*DATES, DATES[0]]),
    ("long.jsonl", lines(pair("x" * 3_000_000, "y"), *DATES), [pair("x" * 3_000_000, "y"), *DATES]),
]  # fmt: skip


NAMES = [name for name, _, _ in FILES]
STREAMED = ["bom.json", "bom.csv", "bom.txt", "blank.jsonl", "late.jsonl", "fields.csv"]


@pytest.mark.parametrize("name, streaming", mostly_slow(
    [(name, streaming) for streaming in (False, True) for name in NAMES],
    [*((name, False) for name in NAMES), *((name, True) for name in STREAMED)],
))  # fmt: skip
def test_texts_of_files_stay_as_they_are(tmp_path, name, streaming):
    _, content, rows = FILES[NAMES.index(name)]
    (tmp_path / name).write_bytes(content.encode())
    template = CHATML if name == "inputs.csv" else None
    source = read(tmp_path / name, "train" if name.endswith(".txt") else "sft", template, streaming)
    assert list(source.rows) == rows


def test_an_empty_answer_of_a_table_is_none(tmp_path):
    (tmp_path / "sums.csv").write_text("prompt,answer\n2+2?,4\nWho?,\n")
    assert read(tmp_path / "sums.csv", "grpo").rows[:]["answer"] == ["4", None]


@pytest.mark.parametrize(
    "name, content",
    [
        ("utf16.jsonl", lines(*DATES).encode("utf-16")),
        ("surrogate.jsonl", b'{"prompt": "x", "completion": "\\ud83d"}'),
        ("latin.csv", b"prompt,completion\nx,caf\xe9\n"), ("semicolons.csv", b"prompt;completion\nx;y\n"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read_are_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OptionError, match=name):
        read(tmp_path / name)


# Messages, and which tokens of them are learned.


def part(text):
    return [{"type": "text", "text": text}]


QUESTION, ANSWER = user("Hi"), assistant("Hello")
LEARNED = [
    # The row, and what is learned of it.
    ("parts", {"messages": [user(part("Hi")), assistant([*part("Hel"), "lo"])]}, ["Hello"]),
    ("weight", {"messages": [QUESTION, assistant("Bad", weight=0), user("No"), assistant("Good", weight=1)]}, ["Good"]),
    ("train", {"messages": [QUESTION, assistant("Bad", train=False), user("No"), ANSWER]}, ["Hello"]),
    ("a number", {"messages": [QUESTION, assistant(4)]}, ["4"]),
    ("assistant first", {"messages": [assistant("Welcome"), QUESTION, ANSWER]}, ["Welcome", "Hello"]),
    ("user last", {"messages": [QUESTION, ANSWER, QUESTION]}, ["Hello"]),
    ("whitespace", {"messages": [QUESTION, assistant("\n  return x "), QUESTION, ANSWER]}, ["\n  return x ", "Hello"]),
    ("letters", {"messages": [QUESTION, assistant("東 😀"), QUESTION, assistant("naïve é")]}, ["東 😀", "naïve é"]),
    ("capitals", {"conversations": [{"from": "Human", "value": "Hi"}, {"from": "GPT", "value": "Hello"}]}, ["Hello"]),
    ("role, value", {"messages": [{"role": "user", "value": "Hi"}, {"role": "gpt", "value": "Hello"}]}, ["Hello"]),
    ("empty tools", {"messages": [QUESTION, ANSWER], "tools": "", "system": ""}, ["Hello"]),
    ("no arguments", {"messages": [QUESTION, ANSWER], "chat_template_kwargs": None}, ["Hello"]),
]  # fmt: skip


@pytest.mark.parametrize(
    "template", mostly_slow([CHATML, SYSTEM + CHATML, MARKED], [SYSTEM + CHATML]), ids=["plain", "system", "marked"]
)
@pytest.mark.parametrize("row, answers", [case[1:] for case in LEARNED], ids=[case[0] for case in LEARNED])
def test_only_answers_are_learned(tmp_path, template, row, answers):
    tokenizer = chat_tokenizer(template, "<|im_start|>")
    (tmp_path / "rows.jsonl").write_text(lines(row))
    (piece,) = Answers(tokenizer, True, True).tokenise(read(tmp_path / "rows.jsonl"))
    text = tokenizer.decode([label for label in piece["labels"] if label >= 0])
    assert text.replace("<|end|>\n", "<|end|>") == "".join(f"{answer}<|end|>" for answer in answers)
    assert "None" not in tokenizer.decode(piece["input_ids"])


def test_a_system_column_is_the_system_message(tmp_path):
    row = {"messages": [QUESTION, ANSWER], "system": "Be brief."}
    (tmp_path / "rows.jsonl").write_text(lines(row, {**row, "system": None}))
    assert [len(row["messages"]) for row in read(tmp_path / "rows.jsonl").rows] == [3, 2]


# Runs: what nobody would see before it is too late.


@pytest.fixture
def run(tmp_path, monkeypatch, cli):
    """Train a model on chats or other rows, check how it ended, and return all that it wrote, in one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(name, rows, *words, model="model", status=0):
        (tmp_path / "rows.jsonl").write_text(lines(*rows))
        always = ["--max_steps", "2", "--use_cpu", "--report_to", "none", "--per_device_train_batch_size", "2"]
        always += ["--model", model, "--dataset", "rows.jsonl", "--eval_share", "0", "--output_dir", "out"]
        return " ".join("".join(cli(name, *always, *words, status=status)).split())

    return run


@pytest.fixture
def save(tmp_path):
    """Write a tokenizer, of chats if none is given, and a model that it fits to."""

    def save(tokenizer=None, **values):
        tokenizer = tokenizer or chat_tokenizer(CHATML, "<|im_start|>")
        save_llama(tmp_path / "model", tokenizer, eos_token_id=None, pad_token_id=None, **values)
        return tokenizer

    return save


CHATS = [{"messages": [user(f"What is {n}?"), assistant("Paris")]} for n in range(8)]
LONG = [{"messages": [user("What? " * 30), assistant("Paris")]}] * 8


@pytest.mark.parametrize(
    "tokenizer, words",
    [
        (lambda: chat_tokenizer(CHATML, "<|im_start|>"), None),
        (lambda: chat_tokenizer(CHATML, "<|im_start|>", "<|eos|>", eos_token="<|eos|>"), "Set `--eos_token '<|end|>'`"),
        (lambda: chat_tokenizer(ENDLESS), "`<|end|>`: the model will not stop after its answer"),
        (lambda: chat_tokenizer(CHATML), "`<|im_start|>` in the rows: no token of the vocabulary"),
    ],
    ids=["right", "other end", "no end", "no marks"],
)
@pytest.mark.long
def test_rows_that_make_a_model_that_never_stops_are_warned_of(run, save, tokenizer, words):
    save(tokenizer())
    told = run("sft", CHATS)
    assert words in told if words else "will not stop" not in told and "in the rows" not in told


@pytest.mark.parametrize("kind, statuses", [("learned", (2, 2, 2)), ("rotary", (0, 0, 0))])
def test_rows_longer_than_the_positions_of_the_model(run, save, tmp_path, kind, statuses):
    tokenizer = save(max_position_embeddings=48)
    if kind == "learned":
        values = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
        size = {"n_positions": 48, "n_embd": 16, "n_layer": 1, "n_head": 2}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **size, **values))
        model.save_pretrained(tmp_path / "model")
    pairs = [{"prompt": "What? " * 30, "chosen": "Paris", "rejected": f"{n}"} for n in range(8)]
    prompts = [{"prompt": "What? " * 30, "answer": "Paris"}] * 8
    rewarded = ["--reward", "exact_match", "--num_generations", "2", "--max_completion_length", "2"]
    commands = (("sft", LONG, []), ("dpo", pairs, []), ("grpo", prompts, rewarded))
    for (command, rows, more), status in zip(commands, statuses, strict=True):
        told = run(command, rows, *more, "--resume_from_checkpoint", "false", status=status)
        assert ("the model has 48 positions" in told) == (command != "grpo" or kind == "learned")


FULL = [pair("The capital of France is Paris. " * 12, " Paris")] * 8
SHORT = [pair("Q", " Paris")] * 8


def preferences(rows):
    return [{"prompt": row["prompt"], "chosen": f" {n}", "rejected": " no"} for n, row in enumerate(rows)]


@pytest.mark.parametrize(
    "command, rows, held, more, status",
    [
        *((command, *case) for command in ("sft", "dpo") for case in (
            (FULL, [], [], 2), ([*FULL, *SHORT], [], [], 0), (SHORT, FULL, [], 2), (SHORT, [*FULL, *SHORT], [], 0),
        )),
        ("sft", FULL, [], ["--packing", "true"], 2), ("sft", FULL, [], ["--streaming", "true"], 2),
    ],
)  # fmt: skip
@pytest.mark.long
def test_rows_that_are_cut_before_their_answer_are_counted(run, save, tmp_path, command, rows, held, more, status):
    if command == "dpo":
        rows, held = preferences(rows), preferences(held)
    save(chat_tokenizer(None))
    words = ["--max_length", "48", *more]
    if held:
        (tmp_path / "held.jsonl").write_text(lines(*held))
        words += ["--eval_dataset", "held.jsonl", "--eval_strategy", "steps", "--eval_steps", "1"]
    told = run(command, rows, *words, status=status)
    assert "--max_length 48" in told and ("before its answer begins. Raise it" in told) == (status == 2)


# Models.


def test_a_checkpoint_that_lacks_weights_is_refused(run, save, tmp_path):
    from safetensors.torch import load_file, save_file

    save()
    file = tmp_path / "model" / "model.safetensors"
    weights = {name.replace("layers.1.", "blocks.1."): weight for name, weight in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    told = run("sft", CHATS, status=2)
    assert "lacks 9 weights: `model.layers.1." in told and "`model.blocks.1." in told
    run("sft", CHATS, "--allow_new_weights", "true")


@pytest.mark.long
def test_trained_adapters_go_on_or_are_merged_under_new_ones(run, save, tmp_path):
    from peft import PeftModel
    from safetensors.torch import load_file

    tokenizer = save()
    lora = ["--peft", "lora", "--lora_r", "2", "--learning_rate", "1e-2", "--lr_scheduler_type", "constant"]
    run("sft", CHATS, *lora, "--output_dir", "first")
    first = load_file(tmp_path / "first" / "adapter_model.safetensors")
    merged = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tmp_path / "model"), tmp_path / "first")
    ids = torch.tensor([tokenizer("What is 1?")["input_ids"]])
    texts = ([{"text": "Paris " * 40}] * 8, "--sequence_length", "32")
    for command, (rows, *more) in {"sft": (CHATS,), "dpo": (preferences(SHORT),), "train": texts}.items():
        # At a rate of almost nothing it is the same adapter.
        further = ["--learning_rate", "1e-9", "--output_dir", "further"]
        assert "in adapters" in run(command, rows, *more, *further, model="first")
        saved = json.loads((tmp_path / "further" / "adapter_config.json").read_text())
        weights = load_file(tmp_path / "further" / "adapter_model.safetensors")
        assert saved["r"] == 2 and saved["base_model_name_or_path"] == "model" and weights.keys() == first.keys()
        assert all((weights[name] - first[name]).abs().max() < 1e-6 for name in first)
        words = ["--adapter", "new", "--peft", "lora", "--lora_r", "3", "--output_dir", "new"]
        assert "in adapters" in run(command, rows, *more, *words, model="first")
        assert json.loads((tmp_path / "new" / "adapter_config.json").read_text())["r"] == 3
        base = LlamaForCausalLM.from_pretrained(tmp_path / "new" / "_hybrid_base" / "plain")
        assert torch.allclose(base(ids).logits, merged(ids).logits, atol=1e-4)
        shutil.rmtree(tmp_path / "further"), shutil.rmtree(tmp_path / "new")
