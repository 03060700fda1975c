"""The tables of the documents are those that the results of the benchmarks give."""

import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("trl")  # the benchmarks of DPO and GRPO, whose tables these are, import it
pytest.importorskip("optuna")
ROOT = Path(__file__).parents[2]
GENERATOR = runpy.run_path(str(ROOT / "docs" / "generate_tables.py"))
PAGES = [path for path in GENERATOR["pages"]() if "<!-- table: " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_agree_with_the_results(path):
    text = path.read_text(encoding="utf-8")
    assert text == GENERATOR["written"](text), "run `python docs/generate_tables.py`"


def test_a_number_that_is_not_in_the_results_is_found():
    page = ROOT / "docs" / "results.md"
    text = page.read_text(encoding="utf-8")
    number = re.search(r"\d\.\d\d", text[text.index("<!-- table: results -->") :]).group()
    changed = text.replace(number, "9.99")
    assert changed != text == GENERATOR["written"](changed).replace("9.99", number)


def test_every_table_is_on_a_page_and_every_mark_is_closed():
    text = "".join(path.read_text(encoding="utf-8") for path in GENERATOR["pages"]())
    named = re.findall(r"<!-- table: ([\w-]+) -->", text)
    assert sorted(named) == sorted(GENERATOR["tables"].load())
    assert text.count("<!-- end of table -->") == len(named)
