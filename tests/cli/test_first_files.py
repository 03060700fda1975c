"""Files as strangers have them: each is read right, or refused in a sentence whose advice works word by word."""

import bz2
import gzip
import json
import re
import shlex
import sys

import pytest
from conftest import mostly_slow
from rig.byte_llama import assistant, chat_tokenizer, save_llama, user

from hf_hybrid.cli.data import Reader
from hf_hybrid.cli.options import TRAINING, DataOptions, OptionError

pytest.importorskip("trl")

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHOWING = (
    "{% if tools %}{{ tools[0]['function']['name'] + '; ' }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + "
    "m['role'] + '\n' + m['content'] + (m['reasoning_content'] or '') }}{% for c in m['tool_calls'] or [] %}"
    "{{ c['function']['arguments'] | tojson }}{% endfor %}{{ '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template that shows tools, calls and reasoning."""
Q, A, B = "What is 1 plus 3?", "It is 4.", "No."
CHAT = [user(Q), assistant(A)]
SHAREGPT = [{"from": "human", "value": Q}, {"from": "gpt", "value": A}]
PAIR = {"chosen": A, "rejected": B}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def call(content, **arguments):
    function = {"name": "weather", "arguments": json.dumps(arguments)}
    return assistant(content, tool_calls=[{"id": "1", "type": "function", "function": function}])


CALLS = [user(Q), call(None, city="Rome"), {"role": "tool", "tool_call_id": "1", "content": "12"}, assistant(A)]
TRAJECTORY = {
    "environment": "main", "trajectory": [{"action": "ls", "response": "Look."}],
    "history": [{**message, "agent": "primary"} for message in CHAT], "info": {"exit": "done"},
}  # fmt: skip


def lines(*rows, times=4):
    return "".join(json.dumps(row) + "\n" for row in rows * times)


# What a command reads of the first row.
ASKED = {"prompt": [user(Q)], "completion": [assistant(A)]}
PREFERRED = {"prompt": [user(Q)], "chosen": [assistant(A)], "rejected": [assistant(B)]}
SFT = {
    # Chats.
    "messages as text.jsonl": (lines({"messages": json.dumps(CHAT)}), {"messages": CHAT}),
    "messages as Python has them.csv": (f'id,messages\n1,"{CHAT!r}"\n', {"messages": CHAT}),
    "a list as a row.jsonl": (lines(SHAREGPT), {"messages": CHAT}),
    "a list of lists.json": (json.dumps([SHAREGPT] * 3), {"messages": CHAT}),
    "one chat.json": (json.dumps(CHAT, indent=1), {"messages": CHAT}),
    "one object.json": (json.dumps(TRAJECTORY, indent=1), {"messages": [{**m, "agent": "primary"} for m in CHAT]}),
    "one object.traj": (json.dumps(TRAJECTORY), {"messages": [{**m, "agent": "primary"} for m in CHAT]}),
    "rows inside.json": (json.dumps({"version": "1", "data": [{"messages": CHAT}] * 3}, indent=1), {"messages": CHAT}),
    "rows inside in a line.json": (json.dumps({"data": [{"question": Q, "answer": A}] * 3}), ASKED),
    "a trajectory in each line.jsonl": (lines(TRAJECTORY), {"messages": [{**m, "agent": "primary"} for m in CHAT]}),
    "parts with value.jsonl": (
        lines({"messages": [{"role": m["role"], "content": [{"type": "text", "value": m["content"]}]} for m in CHAT]}),
        {"messages": CHAT},
    ),
    "packed.jsonl.gz": (gzip.compress(lines({"messages": CHAT}).encode()), {"messages": CHAT}),
    "packed.json.bz2": (bz2.compress(json.dumps([{"messages": CHAT}] * 3).encode()), {"messages": CHAT}),
    "packed.csv.gz": (gzip.compress(f"question,answer\n{Q},{A}\n".encode()), ASKED),
    "roles.jsonl": (lines({"messages": [{"role": "DEVELOPER", "content": "Add."}, {**user(Q), "role": "Human"},
                                        {**assistant(A), "role": "GPT"}]}),
                    {"messages": [{"role": "DEVELOPER", "content": "Add."}, *CHAT]}),
    "an answer first.jsonl": (lines({"conversations": [SHAREGPT[1], *SHAREGPT]}), {"messages": [CHAT[1], *CHAT]}),
    "calls.jsonl": (lines({"fncall_messages": CHAT, "fncall_tools": [], "response": [A]}), {"messages": CHAT}),
    "a chat as text too.jsonl": (lines({"conversations": SHAREGPT, "text": f"{Q} {A}"}), {"messages": CHAT}),
    # Questions and answers.
    **{f"{q} {a}.jsonl": (lines({q: Q, a: A}), ASKED) for q, a in (
        ("prompt", "completion"), ("question", "answer"), ("query", "response"), ("input", "output"),
        ("prompt", "response"), ("problem", "solution"), ("instruction", "response"),
    )},
    "table.csv": (f"question,answer\n{Q},{A}\n{Q},{A}\n", ASKED),
    "squad.jsonl": (lines({"context": "Sums.", "question": Q, "answers": {"text": [A], "answer_start": [0]}}),
                    {"prompt": [user(f"{Q}\n\nSums.")], "completion": [assistant(A)]}),
    "orca.jsonl": (lines({"system_prompt": "Be brief.", "question": Q, "response": A}),
                   {**ASKED, "prompt": [{"role": "system", "content": "Be brief."}, user(Q)]}),
    "a chat and a text.jsonl": (lines({"prompt": [user(Q)], "completion": A}), ASKED),
    "code.jsonl": (lines({"task_id": "x/1", "prompt": "def f(x):\n", "canonical_solution": "    return x\n"}),
                   {"prompt": "def f(x):\n", "completion": "    return x\n"}),
    "formatted.jsonl": (lines({"prompt": f"<|im_start|>user\n{Q}", "completion": A}),
                        {"prompt": f"<|im_start|>user\n{Q}", "completion": A}),
    "tokens.jsonl": (lines({"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8], "attention_mask": [0, 1, 1, 1]}),
                     {"input_ids": [6, 7, 8], "labels": [-100, 7, 8]}),
    "masked tokens.jsonl": (lines({"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]}),
                            {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}),
    "upper case.csv": (f"Question,Answer\n{Q},{A}\n", ASKED),
    "pandas.json": (json.dumps({"question": {"0": Q, "1": "2?"}, "answer": {"0": A, "1": "2."}}), ASKED),
    "columns.json": (json.dumps({"question": [Q, "2?"], "answer": [A, "2."]}), ASKED),
    "JSON.jsonl": (lines(*({"prompt": Q, "completion": text} for text in ('{"from": "Rome"}', '[{"role": 1}]'))),
                   {**ASKED, "completion": [assistant('{"from": "Rome"}')]}),
    "a text and a talk.jsonl": (lines({"text": "A text.", "talk": CHAT}), {"text": "A text."}),
    "history.jsonl": (lines({"instruction": Q, "output": A, "history": [["Hi", "Hello"]]}),
                      {**ASKED, "prompt": [user("Hi"), assistant("Hello"), user(Q)]}),
    "two names.jsonl": (lines({"messages": None, "conversations": SHAREGPT}), {"messages": CHAT}),
    "lines.txt": ("One document.\nAnother one.\nA third one.\n", {"text": "One document."}),
    # Refused, with advice.
    "odd names.jsonl": (lines({"id": "x", "que": Q, "ans": A}), ASKED),
    "an odd answer.jsonl": (lines({"prompt": Q, "my_answer": A}), ASKED),
    "an odd text.jsonl": (lines({"body": "A text of words."}), {"text": "A text of words."}),
    "two chats.jsonl": (lines({"talk": CHAT, "other": SHAREGPT}), {"messages": CHAT}),
    "images.jsonl": (lines({"messages": CHAT, "images": ["a.png"]}), {"messages": CHAT}),
    "judged.jsonl": (lines({"messages": CHAT, "label": True}, {"messages": CHAT, "label": False}), {"messages": CHAT}),
    "judged completions.jsonl": (lines({"prompt": Q, "completion": A, "label": False}), ASKED),
    "weighed.jsonl": (lines({"question": Q, "answer": A, "loss_weight": 0}), ASKED),
    "not trained.csv": (f"question,answer,train\n{Q},{A},False\n", ASKED),
    # Another command's.
    "axolotl.jsonl": (lines({"conversation": [user(Q)], "chosen": assistant(A), "rejected": assistant(B)}), PREFERRED),
    "factory.jsonl": (lines({"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": assistant(B)}),
                      PREFERRED),
    "prompts.jsonl": (lines({"prompt": Q}), {"prompt": Q}),
}  # fmt: skip
DPO = {
    "stack.jsonl": (lines({"question": Q, "response_j": A, "response_k": B}), PREFERRED),
    "prompt.jsonl": (lines({"prompt": Q, **PAIR}), PREFERRED),
    "continued.jsonl": (lines({"prompt": "1 + 3 =", "chosen": " 4", "rejected": " 5"}),
                        {"prompt": "1 + 3 =", "chosen": " 4", "rejected": " 5"}),
    "orca.jsonl": (lines({"system": "", "question": Q, **PAIR}), PREFERRED),
    "alpaca.jsonl": (lines({"instruction": "Add", "input": "1 and 3", **PAIR}),
                     {**PREFERRED, "prompt": [user("Add\n\n1 and 3")]}),
    "hh.jsonl": (lines({side: f"\n\nHuman: {Q}\n\nAssistant: {answer}" for side, answer in PAIR.items()}),
                 {side: f"\n\nHuman: {Q}\n\nAssistant: {answer}" for side, answer in PAIR.items()}),
    "ultrafeedback.jsonl": (lines({"prompt": Q, "prompt_id": "1", "score_chosen": 8.0, "score_rejected": 2.0,
                                   **{side: [user(Q), assistant(answer)] for side, answer in PAIR.items()}}),
                            {side: [user(Q), assistant(answer)] for side, answer in PAIR.items()}),
    "openai.jsonl": (lines({"input": {"messages": [user(Q)]}, "preferred_output": [assistant(A)],
                            "non_preferred_output": [assistant(B)]}), PREFERRED),
    "odd.jsonl": (lines({"question": Q, "good one": A, "bad one": B}), PREFERRED),
    "chats.jsonl": (lines({"messages": CHAT}), {"messages": CHAT}),
    "judged.jsonl": (lines({"prompt": Q, "completion": A, "label": False}), {**ASKED, "label": False}),
}  # fmt: skip
GRPO = {
    "sharegpt.jsonl": (lines({"conversations": SHAREGPT}), {"prompt": [user(Q)], "answer": A}),
    "squad.jsonl": (lines({"question": Q, "answers": {"text": [A], "answer_start": [0]}}),
                    {"prompt": [user(Q)], "answer": A}),
    "odd.jsonl": (lines({"body": Q}), {"prompt": Q}),
    "history.jsonl": (lines(TRAJECTORY), {"prompt": [{**user(Q), "agent": "primary"}], "answer": A}),
}  # fmt: skip
CASES = [(of, name) for of, files in (("sft", SFT), ("dpo", DPO), ("grpo", GRPO)) for name in files]


class Watched(Reader):
    def sources(self, *args):
        self.__dict__["seen"] = list(super().sources(*args))
        return iter(self.seen)


def read(command, path, columns=None, template=CHATML, streaming=False):
    """A data set in TRL's form, its rows as the trainer takes them, and what is said of it."""
    said, data = [], DataOptions(dataset=[str(path)], columns=columns, eval_share=0, streaming=streaming)
    reader, tokenizer = Watched(command, data, 0), chat_tokenizer(template, "<|im_start|>")
    rows, _ = reader.train_and_eval(tokenizer, lambda name, text: said.append(f"{name}: {text}"))
    return reader.seen[0], rows, "\n".join(said)


def follow(command, path, columns=None, template=CHATML):
    """Read a file by a command, or as each refusal says, word by word; also the refusals."""
    refusals = []
    while True:
        try:
            return *read(command, path, columns, template), refusals
        except OptionError as error:
            refusals.append(str(error))
            assert len(refusals) < 4, refusals
            new = re.search(r"`--columns ([^`]+)`", str(error))
            other = re.search(r"`hf-hybrid (\w+)` takes\.", str(error))
            assert new or other, error
            columns = [*(columns or []), *shlex.split(new[1])] if new else columns
            command = command if new else other[1]


@pytest.mark.parametrize("command, name", CASES, ids=[f"{of} {name}" for of, name in CASES])
def test_a_file_is_read_right_or_refused_with_advice_that_works(tmp_path, command, name):
    content, first = {"sft": SFT, "dpo": DPO, "grpo": GRPO}[command][name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    source, _, said, _ = follow(command, tmp_path / name)
    row = source.rows[0]
    assert {key: row[key] for key in first} == first
    if command == "sft":  # the rewards of grpo get what is left
        named, unread = re.findall(r"`(\w+)`", said), {"id", "task_id", "agent", "environment", "trajectory", "info"}
        assert {*named} >= unread & {*re.findall(r'"(\w+)":', str(content))}


FILES = {(of, name): files[name] for of, files in (("sft", SFT), ("dpo", DPO), ("grpo", GRPO)) for name in files}
NO_PAIRS = ("an odd text.jsonl", "two chats.jsonl", "odd.jsonl")
"""Files of which nothing says whose they are, where pairs are asked for."""
QUICK = [("sft", "one object.json"), ("dpo", "hh.jsonl")]


@pytest.mark.parametrize("of, name", mostly_slow(list(FILES), QUICK))
def test_every_command_reads_a_file_or_names_one_that_does(tmp_path, of, name):
    """Word by word: whoever follows the sentences of refusals has rows in the end."""
    content = FILES[of, name][0]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for command in TRAINING:
        pairs = TRAINING[command].rows in ("dpo", "kto")  # or labelled answers
        if command not in (of, "train") and not (pairs and name in NO_PAIRS and of != "dpo"):
            source, rows, _, refusals = follow(command, tmp_path / name)
            assert len(rows) and (not refusals or source.format.title)


@pytest.mark.parametrize("name", ["packed.jsonl.zst", "packed.json.zst", "packed.csv.zst", "packed.txt.zst"])
def test_files_of_zstd_are_read(tmp_path, name):
    zstandard = pytest.importorskip("zstandard")
    content, first = {
        "jsonl": (lines({"messages": CHAT}), {"messages": CHAT}), "csv": (f"question,answer\n{Q},{A}\n", ASKED),
        "json": (json.dumps([{"messages": CHAT}] * 3, indent=1), {"messages": CHAT}), "txt": (Q, {"text": Q}),
    }[name.split(".")[1]]  # fmt: skip
    (tmp_path / name).write_bytes(zstandard.compress(content.encode()))
    for path in (tmp_path / name, tmp_path):
        row = read("sft", path)[0].rows[0]
        assert {key: row[key] for key in first} == first


def test_a_file_of_zstd_says_what_to_install(tmp_path, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "rows.jsonl.zst").write_bytes(b"packed")
    told = refused("sft", "--model", "m", "--dataset", tmp_path / "rows.jsonl.zst")
    assert "is unpacked by zstandard. Install it: pip install zstandard" in told
    (tmp_path / "more.jsonl.zst").write_bytes(b"packed")
    with pytest.raises(OptionError, match="Install it: pip install zstandard"):
        read("sft", tmp_path)


@pytest.mark.parametrize("name", ["odd names.jsonl", "images.jsonl", "factory.jsonl", "tokens.jsonl", "packed.csv.gz"])
def test_what_the_command_says_is_what_it_takes(tmp_path, monkeypatch, cli, name):
    """The same through the command, with a training of a step."""
    monkeypatch.chdir(tmp_path)
    save_llama(tmp_path / "model", chat_tokenizer(CHATML, "<|im_start|>"))
    name, content = name.replace(" ", "_"), SFT[name][0]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    words = ["--model", "model", "--dataset", name, "--max_steps", "1", "--use_cpu", "--eval_share", "0"]
    words += ["--report_to", "none", "--output_dir", "out"]
    command = "sft"
    if name in ("odd_names.jsonl", "images.jsonl", "factory.jsonl"):
        told = cli(command, *words, status=2)[1]
        new, other = re.search(r"`(--columns [^`]+)`", told), re.search(r"`hf-hybrid (\w+)` takes\.", told)
        command, words = other[1] if other else command, [*words, *(new[1].split() if new else ())]
    assert "step 1/1" in cli(command, *words)[0]


@pytest.mark.parametrize(
    "command, row, message",
    [
        ("sft", user(Q), "it is one message, and a row is a whole conversation: a list of messages."),
        ("sft", {"id": "x", "question": [[user(Q)]], "function": []}, "or one column of messages."),
        ("sft", {"id": "x", "instruction": Q, "instances": [{"input": "", "output": A}]}, "or one column of messages."),
    ],
)
def test_no_advice_is_better_than_a_wrong_one(tmp_path, command, row, message):
    (tmp_path / "rows.jsonl").write_text(lines(row))
    with pytest.raises(OptionError) as refused:
        read(command, tmp_path / "rows.jsonl")
    assert str(refused.value).endswith(message)


# What is said.


@pytest.mark.parametrize("content", [None, ""])
def test_a_call_that_the_template_hides_is_no_empty_answer(tmp_path, content):
    (tmp_path / "rows.jsonl").write_text(lines({"messages": [CALLS[0], call(content, city="Rome"), *CALLS[2:]],
                                                "tools": TOOLS}))  # fmt: skip
    tokenizer = chat_tokenizer(CHATML, "<|im_start|>")
    _, rows, said = read("sft", tmp_path / "rows.jsonl")
    assert tokenizer.decode([label for label in rows[0]["labels"] if label >= 0]) == f"{A}<|end|>\n"
    assert "not shown: `tool_calls` (4 rows), `tools` (4 rows): the chat template has no place for them; turns" in said
    _, rows, said = read("sft", tmp_path / "rows.jsonl", template=SHOWING)
    assert "not shown" not in said and tokenizer.decode(rows[0]["input_ids"]).startswith("weather; ")
    learned = tokenizer.decode([label for label in rows[0]["labels"] if label >= 0])
    assert learned == f'{{"city": "Rome"}}<|end|>\n{A}<|end|>\n'  # as values, not as text that is quoted once more


def test_a_template_that_takes_arguments_as_text_gets_them_so(tmp_path):
    (tmp_path / "rows.jsonl").write_text(lines({"messages": CALLS}))
    template = SHOWING.replace("c['function']['arguments'] | tojson", "'=' + c['function']['arguments']")
    _, rows, _ = read("sft", tmp_path / "rows.jsonl", template=template)
    assert '={"city": "Rome"}' in chat_tokenizer(CHATML, "<|im_start|>").decode(rows[0]["input_ids"])


def test_answers_that_are_hidden_calls_are_refused_where_they_are_all_there_is(tmp_path):
    side = {"prompt": [user(Q)], "chosen": [call("", city="Rome")], "rejected": [assistant(B)]}
    (tmp_path / "rows.jsonl").write_text(lines(side))
    with pytest.raises(OptionError, match="row 1: the answer is a call of a tool, which the chat template does not"):
        read("dpo", tmp_path / "rows.jsonl")
    assert "not shown" not in read("dpo", tmp_path / "rows.jsonl", template=SHOWING)[2]


def test_reasoning_that_the_template_hides_is_named(tmp_path):
    rows = [{"messages": [user(Q), assistant(A, reasoning_content="Add them.", thought="So.")]}, {"messages": CHAT}]
    (tmp_path / "rows.jsonl").write_text(lines(*rows))
    said = read("sft", tmp_path / "rows.jsonl")[2]
    assert "not shown: `reasoning_content` (4 rows), `thought` (4 rows): the chat template" in said
    assert "not shown: `reasoning_content`" in read("sft", tmp_path / "rows.jsonl", streaming=True)[2]
    assert "not shown: `thought` (4 rows):" in read("sft", tmp_path / "rows.jsonl", template=SHOWING)[2]


@pytest.mark.parametrize("key, value", [("weight", 0), ("train", False), ("training", False), ("loss_weight", 0.0)])
def test_a_turn_that_is_switched_off_is_not_learned(tmp_path, key, value):
    rows = {"messages": [user(Q), assistant(B, **{key: value}), *CHAT]}
    (tmp_path / "rows.jsonl").write_text(lines(rows))
    (row, *_), tokenizer = read("sft", tmp_path / "rows.jsonl")[1], chat_tokenizer(CHATML, "<|im_start|>")
    assert tokenizer.decode([label for label in row["labels"] if label >= 0]) == f"{A}<|end|>\n"


def test_the_text_that_is_asked_for_is_read(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    save_llama(tmp_path / "model", chat_tokenizer(CHATML, "<|im_start|>"))
    (tmp_path / "rows.jsonl").write_text(lines({"conversations": SHAREGPT, "text": "A text.", "body": "Another."}))
    words = ["--dataset", "rows.jsonl", "--model", "model", "--use_cpu", "--report_to", "none", "--eval_share", "0"]
    words += ["--output_dir", "out", "--dry_run", "true", "--show_rows", "1"]
    for more, text, unread in (
        ([], A, "`text`, `body`"),
        (["--dataset_text_field", "text"], "A text.", "`conversations`, `body`"),
        (["--dataset_text_field", "body"], "Another.", None),
        (["--columns", "text=text"], "A text.", "`conversations`, `body`"),
    ):
        if unread is None:  # a name that is there already
            assert "has a column `text` already" in cli("sft", *words, *more, status=2)[1]
            continue
        out, _ = cli("sft", *words, *more)
        assert f"not read   columns {unread}" in out and f"  >          {text}" in out
    assert "is read as chats (`text`)" not in cli("sft", *words, "--columns", "system=body", status=0)[0]


# Rows of another shape.


def test_calls_that_come_late_fit_into_the_table(tmp_path):
    many = [{"messages": CHAT}] * 1000
    late = [{"messages": [*CHAT, user("?"), call("", **arguments)]} for arguments in ({"city": "Rome"}, {"n": 3})]
    (tmp_path / "rows.jsonl").write_text(lines(*many, *late, times=1))
    rows = read("sft", tmp_path / "rows.jsonl", template=SHOWING)[1]
    tokenizer = chat_tokenizer(CHATML, "<|im_start|>")
    assert [tokenizer.decode(rows[n]["input_ids"]).count("null") for n in (1000, 1001)] == [0, 0]
    assert '{"n": 3}' in tokenizer.decode(rows[1001]["input_ids"])
    pairs = [{**row, "chosen": [assistant(A)], "rejected": [assistant(B)]} for row in [{"prompt": [user(Q)]}] * 1000]
    (tmp_path / "pairs.jsonl").write_text(lines(*pairs, {**pairs[0], "prompt": CALLS[:-1]}, times=1))
    assert len(read("dpo", tmp_path / "pairs.jsonl")[1]) == 1001


def test_files_of_a_folder_may_have_other_columns(tmp_path):
    for folder, files in {
        "trajectories": {"a.traj": {"history": CHAT}, "b.traj": TRAJECTORY, "c.log": "nothing"},
        "json": {"a.json": [{"messages": CHAT}] * 2, "b.json": {"messages": CHAT, "id": 1}, "dataset_info.json": {}},
    }.items():
        (tmp_path / folder).mkdir()
        for name, content in files.items():
            (tmp_path / folder / name).write_text(json.dumps(content, indent=1))
        source, rows, said = read("sft", tmp_path / folder)
        assert len(rows) == len(files) - 1 + (folder == "json") and ("not read: c.log" in said) == (folder != "json")
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "a.csv").write_text("question,answer\n1+1?,02\n")
    (tmp_path / "csv" / "b.csv").write_text("question,answer,level\n2+2?,04,1\n")
    source, _, said = read("sft", tmp_path / "csv")
    assert [row["completion"] for row in source.rows] == [[assistant("02")], [assistant("04")]]
    (tmp_path / "split").mkdir()
    for name in ("train", "test"):
        (tmp_path / "split" / f"{name}.jsonl").write_text(lines({"messages": CHAT}, times=1 + (name == "train")))
    assert len(read("sft", tmp_path / "split")[1]) == 2


def test_documents_of_a_text_are_its_paragraphs_or_else_its_lines(tmp_path):
    (tmp_path / "lines.txt").write_text("One.\nTwo.\n")
    (tmp_path / "paragraphs.txt").write_text("One\nmore.\n\nTwo.\n")
    source, _, said = read("sft", tmp_path / "lines.txt")
    assert [row["text"] for row in source.rows] == ["One.", "Two."] and "a document in each line" in said
    source, _, said = read("sft", tmp_path / "paragraphs.txt")
    assert [row["text"] for row in source.rows] == ["One\nmore.", "Two."] and "in each line" not in said


# Rows as the model sees them.


def test_data_shows_what_is_learned_and_trains_nothing(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    save_llama(tmp_path / "model", chat_tokenizer(CHATML, "<|im_start|>"))
    rows = {
        "chats": {"messages": CHAT}, "pairs": {"question": Q, **PAIR}, "prompts": {"question": Q}, "tokens": SFT,
        "judged": {"messages": CHAT, "label": True},
    }  # fmt: skip
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(SFT["tokens.jsonl"][0] if name == "tokens" else lines(row))
    asked = "  |          <|im_start|>user\n  |          What is 1 plus 3?<|end|>\n  |          <|im_start|>assistant\n"
    answered = f"{asked}  >          It is 4.<|end|>\n"
    for name, command, shown in (
        ("chats", "sft", f"  row 1      46 tokens, 10 learned\n{answered}"),
        ("pairs", "dpo", f"  row 1      chosen: 46 tokens, 10 learned\n{answered}"),
        ("pairs", "dpo", f"  row 1      rejected: 41 tokens, 5 learned\n{asked}  >          No.<|end|>\n"),
        ("judged", "kto", f"  row 1      completion: 46 tokens, 10 learned\n{answered}"),
        ("prompts", "grpo", f"  row 1      36 tokens, 0 learned\n{asked}"),
        ("tokens", "sft", "  row 1      3 tokens, 2 learned\n"),
    ):
        out, _ = cli("data", f"{name}.jsonl", "--model", "model", "--use_cpu")
        assert out.startswith(f"hf-hybrid {command}: model on {name}.jsonl") and shown in out, out
        assert "row 2" in out and "row 3" not in out and "step 1" not in out and "output" not in out
        assert all(len(line) <= 80 for line in out.splitlines())
    assert "rows       about" in cli("data", "chats.jsonl", "--model", "model", "--use_cpu")[0]
    out, _ = cli("data", "chats.jsonl", "--model", "model", "--use_cpu", "--max_length", "40", "--show_rows", "1")
    assert "row 1      40 tokens, cut from 46, 4 learned" in out and "row 2" not in out
    assert "usage: hf-hybrid data FILE" in cli("data")[0] and "holds no rows" not in cli("data", "--help")[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["model", *(f"{name}.jsonl" for name in rows)])
    assert "there is no such file" in cli("data", "gone.jsonl", "--model", "model", status=2)[1]
