"""Images in the data of `sft`, `dpo` and `grpo`."""

import base64
import json
import re

import pytest
import torch
from conftest import mostly_slow
from datasets import Dataset, Features, List
from datasets import Image as ImageFeature
from rig import vision
from rig.byte_llama import assistant, chat_tokenizer, save_llama, user

from hf_hybrid.cli.data import Reader
from hf_hybrid.cli.options import TRAINING, OptionError

pytest.importorskip("trl")

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PLACE, ANSWER = {"type": "image"}, [assistant("w5 w6")]
TALK = [
    {"from": "human", "value": "<image>\nw1 w2"}, {"from": "gpt", "value": "w5 w6"},
    {"from": "human", "value": "w3"}, {"from": "gpt", "value": "w7"},
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model that sees, with its processor."""
    folder = tmp_path_factory.mktemp("smolvlm")
    for part in vision.vision_model("smolvlm"):
        part.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with images of two sizes."""
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        vision.picture(number).save(f"{number}.png")
    return tmp_path


def text(words):
    return {"type": "text", "text": words}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(command, path, **more):
    """The rows as the trainer takes them, and what is said of them."""
    said, data = [], TRAINING[command].data(dataset=[str(path)], eval_share=0, **more)
    config = vision.config_of("smolvlm", vision.processor_of("smolvlm"))
    reader = Reader(command, data, 0)
    rows, _ = reader.train_and_eval(vision.tokenizer(), lambda *fact: said.append(": ".join(fact)), config=config)
    return rows, "\n".join(said)


def shape_of(row):
    """A row without the values that a table adds, images by their sizes."""
    plain = {"images": [image.size for image in row["images"]]}
    for name in ("prompt", "completion", "chosen", "rejected"):
        for message in row.get(name) or ():
            kept = [{key: part[key] for key in part if part[key] is not None} for part in message["content"]]
            plain.setdefault(name, []).append((message["role"], kept))
    return plain


ASKED = [("user", [PLACE, text("w1 w2")])]
ANSWERED = [("assistant", [text("w5 w6")])]
FORMS = {
    "a path": {"image": "0.png", "prompt": "w1 w2", "completion": "w5 w6"},
    "paths": {"images": ["0.png"], "messages": [user("w1 w2"), *ANSWER]},
    "placeholders": {"images": ["0.png"], "messages": [user("<image>\nw1 w2"), *ANSWER]},
    "llava": {"id": "1", "image": "0.png", "conversations": TALK[:2]},
    "parts": {"images": ["0.png"], "messages": [user([PLACE, text("w1 w2")]), *ANSWER]},
    "own": {"messages": [user([{"type": "image", "image": "0.png"}, text("w1 w2")]), *ANSWER]},
    "openai": {"messages": [user([{"type": "image_url", "image_url": {"url": "DATA"}}, text("w1 w2")]), *ANSWER]},
    "alpaca": {"images": ["0.png"], "instruction": "<image>w1 w2", "output": "w5 w6"},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_images_stand_where_messages_have_their_place(folder, form):
    data = "data:image/png;base64," + base64.b64encode((folder / "0.png").read_bytes()).decode()
    row = json.loads(json.dumps(FORMS[form]).replace("DATA", data))
    write(folder / "rows.jsonl", row, row)
    rows, said = read("sft", "rows.jsonl")
    assert shape_of(rows[0]) == {"images": [(24, 24)], "prompt": ASKED, "completion": ANSWERED}
    assert "images: 2 in 2 rows" in said and "loss on: answers alone" in said


def test_images_of_datasets_are_taken_as_they_are_stored(folder):
    kinds = {"images": List(ImageFeature()), "messages": vision.MESSAGES}
    columns = {"images": [[vision.picture(0)], []], "messages": [[user("w1 w2"), *ANSWER]] * 2}
    Dataset.from_dict(columns, features=Features(kinds)).to_parquet(folder / "rows.parquet")
    rows, _ = read("sft", "rows.parquet")
    assert shape_of(rows[0]) == {"images": [(24, 24)], "prompt": ASKED, "completion": ANSWERED}
    assert shape_of(rows[1])["images"] == [] and rows[0]["images"][0].tobytes() == vision.picture(0).tobytes()


def test_a_stream_has_the_same_rows(folder):
    write(folder / "rows.jsonl", {"images": ["0.png"], "conversations": TALK})
    rows, streamed = read("sft", "rows.jsonl")[0], read("sft", "rows.jsonl", streaming=True)[0]
    assert list(map(shape_of, streamed)) == list(map(shape_of, rows))


def test_images_that_are_left_out_on_purpose_are_not_read(folder):
    kinds = {"images": List(ImageFeature()), "messages": vision.MESSAGES}
    columns = {"images": [[vision.picture(0)]], "messages": [[user("w1 w2"), *ANSWER]]}
    Dataset.from_dict(columns, features=Features(kinds)).to_parquet(folder / "rows.parquet")
    rows, _ = read("sft", "rows.parquet", columns=["ignored=images"])
    assert rows.column_names == ["input_ids", "labels"]


def test_each_answer_of_a_chat_is_a_row_with_the_images_before_it(folder):
    later = [{"from": "human", "value": "<image> w4"}, {"from": "gpt", "value": "w8"}]
    write(folder / "rows.jsonl", {"images": ["0.png", "3.png"], "conversations": [*TALK, *later]})
    rows, said = read("sft", "rows.jsonl")
    assert [[image.size for image in row["images"]] for row in rows] == [[(24, 24)]] * 2 + [[(24, 24), (40, 16)]]
    assert shape_of(rows[1])["prompt"] == [*ASKED, *ANSWERED, ("user", [text("w3")])]
    assert "divided: 2 more rows: chats with images have one for each answer" in said


def test_what_pairs_begin_with_is_their_prompt(folder):
    chats = {"chosen": [user("<image>w1 w2"), *ANSWER], "rejected": [user("<image>w1 w2"), assistant("w7")]}
    write(folder / "rows.jsonl", {"image": "0.png", **chats})
    (row, *_), _ = read("dpo", "rows.jsonl")
    rejected = [("assistant", [text("w7")])]
    assert shape_of(row) == {"images": [(24, 24)], "prompt": ASKED, "chosen": ANSWERED, "rejected": rejected}


WRONG = {
    "there is no image `.*gone.png`. Correct or remove": {"image": "gone.png"},
    "`https://a.b/c.png` is not downloaded. Save the image beside the data": {"image": "https://a.b/c.png"},
    "an image cannot be read: cannot identify": {"image": "rows.jsonl"},
    r"its images are 2, and the places for them in its messages \(`<image>`\) 1": {"images": ["0.png", "1.png"]},
    "its images are 0, and the places for them": {"images": []},
    "place for an image in an answer": {"image": "0.png", "messages": [user("w1"), assistant("<image>")]},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_row_is_refused_with_its_number(folder, message):
    messages = [user("<image>w1 w2"), *ANSWER]
    rows = [{"image": "0.png", "messages": messages}, {"messages": messages, **WRONG[message]}]
    write(folder / "rows.jsonl", *rows)
    with pytest.raises(OptionError, match=f"`--dataset rows.jsonl`, row 2: .*{message}"):
        read("sft", "rows.jsonl")


def test_prompts_of_grpo_all_have_images_or_none(folder):
    write(folder / "rows.jsonl", {"images": ["0.png"], "question": "w1"}, {"images": [], "question": "w1"})
    with pytest.raises(
        OptionError, match="Some prompts have images and others none.* Train on one kind after the other"
    ):
        read("grpo", "rows.jsonl")


def test_a_model_of_text_says_how_to_do_without(folder, cli):
    save_llama(folder / "model", chat_tokenizer(TEMPLATE))
    write(folder / "rows.jsonl", {"image": "0.png", "messages": [user("a"), assistant("b")]})
    told = cli("sft", "--model", "model", "--dataset", "rows.jsonl", "--output_dir", "out", status=2)[1]
    assert "it has images in `image`, and `hf-hybrid sft` trains models of text" in " ".join(told.split())
    assert "`--columns ignored=image` reads the rows without them" in " ".join(told.split())


@pytest.mark.parametrize("command", ["reward", "orpo", "distill", "train"])
def test_commands_of_text_say_how_to_do_without(folder, command):
    pair = {"prompt": "w1", "chosen": "w2", "rejected": "w3"}
    row = pair if command in ("reward", "orpo") else {"messages": [user("<image>w1"), *ANSWER]}
    write(folder / "rows.jsonl", {"images": ["0.png"], **row})
    told = f"`hf-hybrid {command}` trains models of text. `--columns ignored=images` reads the rows without them."
    with pytest.raises(OptionError, match=re.escape(told)):
        read(command, "rows.jsonl")
    more = {"sequence_length": 2} if command == "train" else {}
    rows, _ = read(command, "rows.jsonl", columns=["ignored=images"], **more)
    assert len(rows) and "images" not in rows.column_names


MIXED = {
    "sft": {"messages": [user("w1 w2"), *ANSWER]},
    "dpo": {"prompt": "w1 w2", "chosen": "w5", "rejected": "w6"},
    "kto": {"prompt": "w1 w2", "completion": "w5", "label": True},
}


@pytest.mark.parametrize("command", mostly_slow(MIXED, ["sft"]))
@pytest.mark.parametrize("where", ["data", "eval"])
def test_data_with_and_without_images_train_together(folder, saved, cli, command, where):
    row = MIXED[command]
    write(folder / "with.jsonl", *[{"images": [f"{n % 2}.png"], **row} for n in range(4)])
    write(folder / "without.jsonl", *[row] * 4)
    data = ["--dataset", "without.jsonl", "with.jsonl", "--eval_share", "0"]
    if where == "eval":
        data = ["--dataset", "without.jsonl", "--eval_dataset", "with.jsonl"]
    words = ["--model", saved, "--output_dir", "out", "--max_steps", "2", "--use_cpu", "--report_to", "none"]
    out = cli(command, *data, *words, "--per_device_train_batch_size", "4")[0]
    assert "Done: 2 steps" in out and ("images     4 in 8 rows" in out) == (where == "data")
    assert ("eval       loss" in out) == (where == "eval") and "nan" not in out


def test_a_length_that_cuts_through_an_image_is_said_before_training(folder, saved, refused):
    write(folder / "rows.jsonl", {"image": "0.png", "messages": [user("w1"), *ANSWER]})
    words = ["--output_dir", "out", "--max_length", "7", "--eval_share", "0", "--report_to", "none", "--use_cpu"]
    said = refused("sft", "--model", str(saved), "--dataset", "rows.jsonl", *words)
    assert "`max_length=7` cuts through an image: in row 0 of `train_dataset` images end with token" in said


RUNS = {
    "sft": ({"image": "{}.png", "conversations": TALK}, ["--learning_rate", "0.01"]),
    "dpo": ({"image": "{}.png", "prompt": "w1", "chosen": "w2", "rejected": "w3"}, ["--peft", "lora"]),
    "grpo": (
        {"image": "{}.png", "question": "w1", "answer": "w2"},
        ["--reward", "exact_match", "--max_completion_length", "4", "--num_generations", "2", "--exact_skips", "off"],
    ),
}


@pytest.mark.parametrize("command", RUNS)
def test_a_command_trains_and_says_which_images_were_shared(folder, saved, cli, command):
    row, more = RUNS[command]
    write(folder / "rows.jsonl", *(json.loads(json.dumps(row).replace("{}", str(n % 2))) for n in range(8)))
    words = ["--model", str(saved), "--dataset", "rows.jsonl", "--output_dir", "out", "--max_steps", "2", "--use_cpu"]
    words += ["--per_device_train_batch_size", "4", "--eval_share", "0", "--report_to", "none", *more]
    out = cli(command, *words)[0]
    total = re.search(r"images +(\d+) in", out)[1]
    shared = re.search(r"images +(\d+) of (\d+) \(\d+%\) were shared, and not encoded again", out)
    assert int(total) == {"sft": 16, "dpo": 8, "grpo": 8}[command] and 0 < int(shared[1]) < int(shared[2])
    assert ("max_length none" in out) is (command != "grpo") and max(map(len, out.splitlines())) <= 80
    assert (folder / "out" / "processor_config.json").is_file()
    if command == "dpo":
        assert "on the language model; what encodes images stays as it is" in out
        from safetensors.torch import load_file

        names = load_file(folder / "out" / "adapter_model.safetensors")
        assert names and all(".text_model." in name for name in names)


@pytest.mark.parametrize("adapters", mostly_slow([False, True], [True]), ids=["all", "lora"])
def test_what_was_trained_is_shown_an_image_in_a_chat(folder, saved, cli, monkeypatch, adapters):
    write(folder / "rows.jsonl", {"image": "0.png", "messages": [user("w1"), *ANSWER]})
    words = ["--model", str(saved), "--dataset", "rows.jsonl", "--output_dir", "out", "--max_steps", "40", "--use_cpu"]
    words += ["--eval_share", "0", "--report_to", "none", "--learning_rate", "0.02", *["--peft", "lora"] * adapters]
    assert "hf-hybrid chat out" in cli("sft", *words)[0]
    lines = iter(["/image gone.png", "/image 0.png", "w1"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, "/exit"))
    out = cli("chat", "out", "--cpu", "--temperature", "0", "--max_new_tokens", "3")[0]
    assert "There is no file `gone.png`." in out and out.rstrip().endswith("w5 w6")


def test_the_command_trains_as_trl_does(folder, saved, cli):
    """The weights are those of TRL's trainer on the same prompts and completions."""
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import SFTConfig, SFTTrainer

    rows = [{"image": f"{n % 2}.png", "prompt": f"w1 w{n}", "completion": f"w5 w{n}"} for n in range(8)]
    write(folder / "rows.jsonl", *rows)
    words = ["--max_steps", "2", "--per_device_train_batch_size", "4", "--learning_rate", "0.1", "--use_cpu"]
    words += ["--output_dir", "out", "--report_to", "none", "--eval_share", "0", "--optim", "sgd"]
    cli("sft", "--model", str(saved), "--dataset", "rows.jsonl", *words)
    plain = [
        {"images": [vision.picture(n % 2)], "prompt": [user(f"w1 w{n}")], "completion": [assistant(f"w5 w{n}")]}
        for n in range(8)
    ]
    kinds = {"images": List(ImageFeature()), "prompt": vision.MESSAGES, "completion": vision.MESSAGES}
    args = SFTConfig(
        "trl", max_steps=2, per_device_train_batch_size=4, learning_rate=0.1, use_cpu=True, max_length=None,
        report_to="none", bf16=False, optim="sgd",
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_pretrained(saved, dtype=torch.float32)
    data = Dataset.from_list(plain, features=Features(kinds))
    SFTTrainer(model, args, train_dataset=data, processing_class=AutoProcessor.from_pretrained(saved)).train()
    found = AutoModelForImageTextToText.from_pretrained("out").state_dict()
    begun = load_file(saved / "model.safetensors")
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-6, msg=name)
    assert any(not torch.equal(weight, found[name]) for name, weight in begun.items() if name in found)
