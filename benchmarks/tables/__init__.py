"""
The tables of the documents, made from results.jsonl.

A document names a table in a comment, and what stands between that comment and the next is this package's:

    <!-- table: sft-rows -->
    | rows | model | ...
    <!-- end of table -->

`python docs/generate_tables.py` writes them anew, and a test fails when a document and the results differ. So a number
in such a table cannot be older than the runs, and a run that was repeated cannot be forgotten in a document.

A table is a function without arguments that returns Markdown. `table` registers it under its name. The modules are
sorted by the folder that the results come from; `summary` has the tables of README.md and docs/results.md, whose cells
are sentences around numbers of several folders.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.results import Results, Row, lines

BENCHMARKS = Path(__file__).parents[1]
TABLES: dict[str, Callable[[], str]] = {}


def table(name: str) -> Callable:
    """Register a function that returns the table of this name."""

    def register(make: Callable[[], str]) -> Callable[[], str]:
        assert name not in TABLES, name
        TABLES[name] = make
        return make

    return register


@functools.cache
def results(folder: str, benchmark: str, *key: str) -> Results:
    """The runs of a benchmark, of each key the last."""
    return Results(BENCHMARKS / folder / "results.jsonl", benchmark, key)


@functools.cache
def all_lines(folder: str, benchmark: str) -> list[Row]:
    """All lines of a benchmark, the oldest first."""
    return [row for row in lines(BENCHMARKS / folder / "results.jsonl") if row["benchmark"] == benchmark]


# Markdown.


def markdown(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    made = [f"| {' | '.join(map(str, row))} |" for row in (heading, *rows)]
    made.insert(1, f"|{'---|' * len(heading)}")
    return re.sub(r"\|  (?=\|)", "| ", "\n".join(made))


def rate(value: float) -> str:
    """A learning rate: `1.5e-3`, `5e-5`, `1`."""
    if value >= 0.1:
        return f"{value:g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e-{abs(int(exponent))}"


def losses(values: Iterable[float | None], digits: int = 3, between: str = " / ") -> str:
    return between.join("not finite" if value is None else f"{value:.{digits}f}" for value in values)


def percent(share: float, digits: int = 1) -> str:
    """`+2.5 %`; a change that rounds to nothing has no sign."""
    text = f"{100 * share:+.{digits}f}"
    return f"{text.lstrip('+-') if float(text) == 0 else text} %"


def with_error(values: Sequence[float], digits: int = 2) -> str:
    """Mean and standard error."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} +- {standard_error(values):.{digits}f}"


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def between(values: Sequence[float], digits: int = 0) -> str:
    """`97 to 104`, or one number."""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def mib(count: float) -> str:
    return f"{count / 2**20:.0f} MiB"


def load() -> dict[str, Callable[[], str]]:
    """All tables by name."""
    from benchmarks.tables import forecast, gpu, memory, other, skips, speedup, summary  # noqa: F401

    return TABLES
