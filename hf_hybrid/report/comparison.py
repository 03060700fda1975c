"""Several runs side by side: a table of their final numbers, and the options that differ."""

from __future__ import annotations

from html import escape
from pathlib import Path

from hf_hybrid.records.redaction import shareable
from hf_hybrid.report.findings import findings
from hf_hybrid.report.page import NUMBERS, at, output_folder, section, table, write_files
from hf_hybrid.report.run_folder import Run, load_run


def write_comparison(*folders: str | Path, output: str | Path | None = None, refresh: int | None = None) -> list[Path]:
    """
    Compare runs by their folders: `comparison.html` and `comparison.json` in `output`, by default `report/comparison`
    in the last folder. Returns the files, the page first. `refresh` is as in `write_report`.

    Raises:
        ValueError: If there is nothing in one of the folders to report on, or there are fewer than two.
    """
    if len(folders) < 2:
        raise ValueError(f"A comparison needs two runs at least, got {len(folders)}. Name their folders.")
    runs = [load_run(folder) for folder in folders]
    values, output = compare(*runs), output_folder(output or runs[-1].folder / "report" / "comparison")
    about = [
        f"<p>{number}: {escape(run['name'])}. {escape(run['status'])} "
        f'<span class="muted"><code>{escape(run["folder"])}</code></span></p>'
        for number, run in values["runs"].items()
    ]
    columns, options = tuple(values["runs"]), values["different_options"]
    body = [
        f"<header><h1>{len(runs)} runs</h1>{''.join(about)}</header>",
        section("Final numbers", table(("", *columns), values["table"], "By run")),
        section("Options that differ", table(("option", *columns), options, "By run", words=True)),
    ]
    refresh = None if all(run.finished for run in runs) else refresh
    return write_files(output, "comparison", body, f"Comparison of {len(runs)} runs", values, [], refresh)


def compare(*runs: Run) -> dict:
    """
    Compare runs, and return plain values: `runs` with the headline and the scores of each, `table` and
    `different_options` with rows of text (name, and a value by run).
    """
    each = [shareable(findings(run)) for run in runs]
    numbers = [(label, show, [at(values, place) for values in each]) for label, place, show, *_ in NUMBERS]
    names = sorted({name for values in each for name in values["options"]} - {"output_dir", "logging_dir", "run_name"})
    options = [[name, *(str(values["options"].get(name, "not recorded")) for values in each)] for name in names]
    kept = ("name", "folder", "finished", "status", "headline", "scores")
    return {
        "schema_version": 3,
        "runs": {str(index): {name: values[name] for name in kept} for index, values in enumerate(each, start=1)},
        "table": [
            [label, *("–" if value is None else show(value) for value in values)]
            for label, show, values in numbers
            if any(value is not None for value in values)
        ],
        "different_options": [row for row in options if len(set(row[1:])) > 1],
    }
