"""What CONTRIBUTING.md says of the repository: rooms, files, names, commands, floors and limits."""

import ast
import os
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import test_architecture as architecture
from test_docs import check_python, prose

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hf_hybrid"
PAGE = ROOT / "CONTRIBUTING.md"
TEXT = prose(PAGE)
HOUSE = TEXT.split("## The house")[1].split("\n## ")[0]
FILE = re.compile(r"[\w./-]+\.(?:py|md|toml|yaml|yml|txt|jsonl|cpp)|(?:[\w.-]+/)+")
ELSEWHERE = {"node_modules/"}
"""What is outside of the repository."""
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def table(heading: str, text: str = TEXT) -> list[list[str]]:
    """The rows of the table with these columns."""
    lines = text.split(f"| {heading} |\n", 1)[1].splitlines()[1:]
    rows = lines[: next(index for index, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@cache
def places() -> list[str]:
    """Files and folders of the repository, as paths from its root."""
    folders = [ROOT / name for name in ("hf_hybrid", "tests", "benchmarks", "docs", "examples")]
    return [path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*")]


def found(name: str) -> list[Path]:
    """The files or folders that a name means: a path from the root or from the package, or else the end of a path."""
    name = name.rstrip("/")
    for place in (ROOT, PACKAGE):
        if (place / name).exists():
            return [place / name]
    return [ROOT / path for path in places() if path.endswith(f"/{name}")]


@cache
def names_in(path: Path) -> set[str]:
    """What a file defines: functions, classes, their arguments and what they assign."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


# The rooms.

ROOMS = {row[0]: row[1] for row in table("folder or file | content")}


def test_the_table_of_rooms_names_every_one_once_and_nothing_else():
    places = [path for path in PACKAGE.iterdir() if not path.name.startswith("_")]
    rooms = [f"{path.name}/" for path in places if path.is_dir()] + [p.name for p in places if p.suffix == ".py"]
    assert sorted(name for cell in ROOMS for name in quoted(cell)) == sorted(rooms)


@pytest.mark.parametrize("cell", ROOMS)
def test_what_the_table_names_in_a_room_is_there(cell):
    folders = [PACKAGE / name for name in quoted(cell) if name.endswith("/")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    defined = {name for path in files for name in names_in(path)}
    modules = {path.stem for path in files} | {f"{path.name}/" for folder in folders for path in folder.iterdir()}
    for name in quoted(ROOMS[cell]):
        if re.fullmatch(r"\w+/?", name):
            assert name in modules | defined, f"{cell} has no `{name}`"


def test_optional_rooms_are_those_of_the_test():
    optional = {quoted(cell)[0].rstrip("/") for cell, content in ROOMS.items() if content.startswith("optional:")}
    alone = [name for cell, content in ROOMS.items() if content.startswith("optional:") for name in quoted(cell)]
    assert optional == architecture.OPTIONAL and len(alone) == len(optional)
    assert f"The {NUMBERS[len(optional)]} optional rooms" in HOUSE


def test_floors_are_those_of_the_test():
    said = re.search(r"The package has (\w+) floors: ([^.]+)\.", HOUSE)
    assert said.group(2).split(", ") == list(architecture.FLOORS)
    assert said.group(1) == NUMBERS[len(architecture.FLOORS)]
    for pair in re.findall(r"`(\w+)`\s+and\s+`(\w+)`\s+never import each other", HOUSE):
        assert set(pair) in architecture.STRANGERS, pair


# Files, names and commands.


def test_files_that_are_named_exist():
    named = {name for name in quoted(TEXT) if FILE.fullmatch(name) and "FOLDER" not in name}
    assert len(named) > 50
    missing = sorted(name for name in named - ELSEWHERE if not found(name))
    assert not missing


@pytest.mark.parametrize("row", table("question | file"), ids=lambda row: row[0])
def test_where_to_look_names_what_is_there(row):
    files = [path for name in quoted(row[1]) if FILE.fullmatch(name) for path in found(name) if path.suffix == ".py"]
    defined = {name for path in files for name in names_in(path)}
    arguments = {f"{name}=" for name in names_in(PACKAGE / "trainer.py")}
    for name in quoted(row[1]):
        if re.fullmatch(r"\w+=?", name):
            assert name in defined | arguments, f"`{name}` is in none of {[path.name for path in files]}"


COMMANDS = sorted({name for name in quoted(TEXT) if re.match(r"(python|pytest) |\.ci/", name)})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_in_the_text_exists(command):
    program, *words = shlex.split(command)
    if program == "python":
        check_python(words)
    elif program == "pytest":
        check_python(["-m", program, *words])
    else:
        assert os.access(ROOT / program, os.X_OK), command


def test_private_names_that_the_package_is_said_to_use_are_used():
    source = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    listed = re.findall(r"`(_\w+)`", "".join(re.findall(r"^\| (`_.*?) \|", TEXT, re.M)))
    assert len(listed) > 20
    assert not [name for name in listed if not re.search(rf"\b{name}\b", source)]
