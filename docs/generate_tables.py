"""
Write the tables of the documents from the results of the benchmarks.

    python docs/generate_tables.py              # writes README.md, and the pages of docs/ and benchmarks/
    python docs/generate_tables.py --print NAME # prints one table

benchmarks/tables/__init__.py says how a document names a table. tests/documents/test_tables.py fails when a document
and the results differ.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import tables  # noqa: E402

MARKED = re.compile(
    r"^(?P<begin> *<!-- table: (?P<name>[\w-]+) -->)\n.*?^(?P<end> *<!-- end of table -->)$", re.M | re.S
)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]


def written(text: str) -> str:
    """A page with its tables as the results have them."""
    made = tables.load()

    def replaced(match: re.Match) -> str:
        if match["name"] not in made:
            raise KeyError(f"`{match['name']}` is not a table; there are {', '.join(sorted(made))}.")
        indent = re.match(" *", match["begin"])[0]
        body = "\n".join(f"{indent}{line}".rstrip() for line in made[match["name"]]().splitlines())
        return f"{match['begin']}\n\n{body}\n\n{match['end']}"

    return MARKED.sub(replaced, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", dest="name", help="Print this table, and write nothing.")
    args = parser.parse_args()
    if args.name:
        sys.stdout.write(tables.load()[args.name]() + "\n")
        return
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = written(text)
        if new != text:
            page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
