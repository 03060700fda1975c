"""Several runs side by side: a table of their final numbers, the options that differ, and their curves."""

from __future__ import annotations

from html import escape
from pathlib import Path

from hf_hybrid.records.redaction import shareable
from hf_hybrid.report.findings import findings
from hf_hybrid.report.page import NUMBERS, at, figure, note_list, output_folder, section, table, write_files
from hf_hybrid.report.plots import comparison_plots, plots_available
from hf_hybrid.report.run_folder import Run, load_run


def write_comparison(*folders: str | Path, output: str | Path | None = None, refresh: int | None = None) -> list[Path]:
    """
    Compare runs: `comparison.html`, `comparison.json`, and PNGs of their losses, scores, speeds and memories.

    Args:
        folders (`str` or `Path`): `output_dir` of each run.
        output (`str` or `Path`, *optional*): Where the comparison goes; by default `report/comparison` in the last one.
        refresh (`int`, *optional*): As in `write_report`, while one of the runs is not finished.

    Returns the files, the page first.

    Raises:
        ValueError: If there is nothing in one of the folders to report on, or there are fewer than two.
    """
    if len(folders) < 2:
        raise ValueError(f"A comparison needs two runs at least, got {len(folders)}. Name their folders.")
    runs = [load_run(folder) for folder in folders]
    values, output = compare(*runs), output_folder(output or runs[-1].folder / "report" / "comparison")
    plots = comparison_plots(dict(zip(values["runs"], runs)), output) if plots_available() else []
    about = [
        f"<p>{number}: {escape(run['name'])}. {escape(run['status'])} "
        f'<span class="muted"><code>{escape(run["folder"])}</code></span></p>'
        for number, run in values["runs"].items()
    ]
    body = [
        f"<header><h1>{len(runs)} runs</h1>{''.join(about)}</header>",
        section("Final numbers", table(("", *values["runs"]), values["table"], "By run")),
        note_list([]),
        *map(figure, plots),
        section(
            "Options that differ", table(("option", *values["runs"]), values["different_options"], "By run", words=True)
        ),
    ]
    refresh = None if all(run.finished for run in runs) else refresh
    return write_files(output, "comparison", body, f"Comparison of {len(runs)} runs", values, plots, refresh)


def compare(*runs: Run) -> dict:
    """
    Compare runs, and return plain values: `runs` with the headline and the scores of each, `table` and
    `different_options` with rows of text (name, and a value by run). A run does not record every option that it left at
    its default.
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
