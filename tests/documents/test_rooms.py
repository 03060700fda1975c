"""Each room of the package earns its place: a row of docs/results.md names it, with a number and how to get it."""

import re
from pathlib import Path

import pytest
from test_contributing import table
from test_docs import check_python

ROOT = Path(__file__).parents[2]
PACKAGE, PAGE = ROOT / "hf_hybrid", ROOT / "docs" / "results.md"
LINES_OF_A_ROOM = 100
"""A file of the core with more lines belongs to a room that results.md names."""
TEXT = PAGE.read_text(encoding="utf-8")
USES = table("use | rooms | by default | gain | cost | evidence", TEXT)
OTHERS = table("room | what holds | shown by", TEXT)


def rooms(cell: str) -> list[str]:
    names = re.findall(r"`([\w.]+/?)`", cell)
    assert names and cell == ", ".join(f"`{name}`" for name in names), f"{cell} names no rooms"
    return names


def test_each_room_is_in_one_of_the_tables():
    files = [path for path in PACKAGE.rglob("*.py") if "experimental" not in path.parts and path.name != "__init__.py"]
    places = {path: path.relative_to(PACKAGE).parts for path in files}
    room_of = {path: parts[0] if len(parts) == 1 else f"{parts[0]}/" for path, parts in places.items()}
    long = {room for path, room in room_of.items() if path.read_text().count("\n") > LINES_OF_A_ROOM}
    saving, others = ({name for row in table for name in rooms(row[at])} for table, at in ((USES, 1), (OTHERS, 0)))
    assert not saving & others and long <= saving | others <= set(room_of.values())


def test_each_use_has_a_gain_and_where_it_was_measured():
    assert not [row[0] for row in USES if not re.search(r"\d", row[3]) or not row[5]]


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row[0])
def test_what_the_other_rooms_show_has_its_command_and_numbers(row):
    command, link = re.fullmatch(r"`(.+)` \(\[more\]\((.+?)(?:#.*)?\)\)", row[2]).groups()
    if command.startswith("python "):
        check_python(command.split()[1:])
    else:
        assert (ROOT / command).is_file()
    numbers = re.findall(r"\d(?:[\d.,]*\d)?(?:e-?\d)?", row[1])
    page = (PAGE.parent / link).read_text(encoding="utf-8")
    assert numbers and not [number for number in numbers if not re.search(rf"\b{re.escape(number)}\b", page)]
