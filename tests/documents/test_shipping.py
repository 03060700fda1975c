"""The Dockerfile and the notebook for Colab name what there is: files, extras, commands and options."""

import json
import re
import shlex
from pathlib import Path

import pytest

from hf_hybrid.cli import formats
from hf_hybrid.cli.main import build_parser
from hf_hybrid.cli.options import TRAINING, CommandLine

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def assert_extras_exist(words: str) -> None:
    for extra in re.search(r"\[([\w,]+)\]", words)[1].split(","):
        assert re.search(rf"^{extra} = \[", PROJECT, re.M), extra


# The Dockerfile.


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def test_what_the_image_copies_is_in_its_context(instructions):
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    admitted = [line[1:] for line in ignored if line.startswith("!")]
    assert "*" in ignored
    copied = [source for name, words in instructions if name == "COPY" for source in words.split()[:-1]]
    assert sorted(copied) == sorted(admitted)
    assert all((ROOT / source).exists() for source in copied)
    metadata = re.findall(r'^(?:readme|license-files) = \[?"([^"]+)"', PROJECT, re.M)
    assert set(metadata) < set(copied)  # building the package reads them


def test_the_image_installs_and_starts_what_there_is(instructions):
    runs = [words for name, words in instructions if name == "RUN"]
    torch, package = (words for words in runs if words.startswith("pip install"))
    assert_extras_exist(package)
    pattern = re.search(r"grep '([^']+)' constraints.txt", torch)[1]
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if re.match(pattern, line)]
    assert len(pins) == 1
    (entry,) = (json.loads(words) for name, words in instructions if name == "ENTRYPOINT")
    assert re.search(rf'^{entry[0]} = "hf_hybrid', PROJECT, re.M)
    python = re.fullmatch(r"python:(3\.\d+)-slim", instructions[0][1])[1]
    assert f"Python :: {python}" in PROJECT
    example = (ROOT / "Dockerfile").read_text().replace("#", "").replace("\\\n", " ")
    words = shlex.split(re.search(r"hf-hybrid\s+(sft .*)", example)[1])
    assert CommandLine(words[1:], TRAINING["sft"]).values.peft == "lora"


# The notebook.


@pytest.fixture(scope="module")
def notebook() -> dict:
    return json.loads((ROOT / "examples" / "colab.ipynb").read_text(encoding="utf-8"))


def test_cells_of_the_notebook_name_extras_commands_and_options(notebook):
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook["cells"])
    assert_extras_exist(re.search(r"^%pip install .*$", cells[0], re.M)[0])
    commands = [
        shlex.split(words.replace("{MODEL}", "model").replace("{STEPS}", "2"))
        for cell in cells
        for words in re.findall(r"^!(?:.*\| )?hf-hybrid (.*)$", cell, re.M)
    ]
    assert [words[0] for words in commands] == ["sft", "chat", "export", "export"]
    for command, *words in commands:
        if command in TRAINING:
            assert CommandLine(words, TRAINING[command]).values.output_dir == "out"
        else:
            build_parser(command).parse_args([command, *words])
    for cell in cells:
        compile(re.sub(r"^[!%].*$", "pass", cell, flags=re.M), "cell", "exec")


def test_rows_of_the_notebook_are_chats(notebook, tmp_path, monkeypatch):
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    monkeypatch.chdir(tmp_path)
    exec(compile(next(cell for cell in cells if "chats.jsonl" in cell and "open(" in cell), "cell", "exec"), {})
    rows = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    found = formats.recognise("sft", list(rows[0]), rows[0])
    assert found.title == "chats (`messages`)" and len(rows) > 50
    for row in rows:
        found.convert(row)
