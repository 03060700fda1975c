"""Several runs side by side: a table, the options that differ, and their curves over each other."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from hf_hybrid.records.redaction import shareable
from hf_hybrid.report.findings import findings
from hf_hybrid.report.page import NUMBERS, at, can_plot, figure, note_list, output_folder, section, table, write_files
from hf_hybrid.report.plots import Plot, comparison_plots
from hf_hybrid.report.run_folder import Run, load_run


def write_comparison(*folders: str | Path, output: str | Path | None = None, refresh: int | None = None) -> list[Path]:
    """
    Compare runs: `comparison.html`, `comparison.json`, and PNGs of their losses, scores, speeds and memories.

    Args:
        folders (`str` or `Path`): `output_dir` of run A, which B is measured against if there are two, of B, and so on.
        output (`str` or `Path`, *optional*): Where the comparison goes; by default `report/comparison` in the last one.
        refresh (`int`, *optional*): As in `write_report`, while one of the runs is not finished.

    Returns the files, the page first.

    Raises:
        ValueError: If there is nothing in one of the folders to report on, or there are fewer than two.
    """
    if len(folders) < 2:
        raise ValueError(f"A comparison needs two runs at least, got {len(folders)}. Name their folders.")
    runs = [load_run(folder) for folder in folders]
    values = compare(*runs)
    output = output_folder(output or runs[-1].folder / "report" / "comparison")
    plots = comparison_plots(dict(zip(values["runs"], runs)), output) if can_plot() else []
    title = f"{', '.join(run.name for run in runs[:-1])} and {runs[-1].name}: comparison"
    refresh = None if all(run.finished for run in runs) else refresh
    return write_files(output, "comparison", _body(values, plots), title, values, plots, refresh)


def compare(*runs: Run) -> dict:
    """
    Compare runs, and return plain values.

    Args:
        runs (`Run`): A, B and so on; of two, B is measured against A.

    Returns:
        `dict`: `runs` with the headline and the scores of each, `table` with rows of text (name, a value by run, and of
        two runs difference and ratio), `different_options`, `notes`.
    """
    by_letter = {letter: shareable(findings(run)) for letter, run in zip(letters(len(runs)), runs)}
    each = list(by_letter.values())
    rows = [_row(label, show, [at(values, place) for values in each]) for label, place, show, *_ in NUMBERS]
    kept = ("name", "folder", "finished", "status", "headline", "scores")
    return {
        "schema_version": 2,
        "runs": {letter: {name: values[name] for name in kept} for letter, values in by_letter.items()},
        "table": [row for row in rows if row is not None],
        "different_options": _different_options([values["options"] for values in each]),
        "notes": _notes(by_letter),
    }


def letters(count: int) -> list[str]:
    """Names of runs that are compared: A to Z, then AA, AB and so on."""
    alphabet = [chr(ord("A") + index) for index in range(26)]
    return [("" if index < 26 else alphabet[index // 26 - 1]) + alphabet[index % 26] for index in range(count)]


def _row(label: str, show, values: Sequence[float | None]) -> list[str] | None:
    """A row of the table, with difference and ratio if there are two values; `None` if no run has one."""
    if all(value is None for value in values):
        return None
    cells = [label, *("–" if value is None else show(value) for value in values)]
    if len(values) > 2:
        return cells
    a, b = values
    if a is None or b is None:
        return [*cells, "–", "–"]
    sign = "+" if b > a else "−" if b < a else ""
    return [*cells, f"{sign}{show(abs(b - a))}", f"{b / a:.3g}" if a else "–"]


def _different_options(each: Sequence[dict]) -> list[list[str]]:
    """Options whose values differ: name, A, B... A run does not record every option that it left at its default."""
    missing = object()
    return [
        [name, *(str(options[name]) if name in options else "not recorded" for options in each)]
        for name in sorted({name for options in each for name in options} - {"output_dir", "logging_dir", "run_name"})
        if any(options.get(name, missing) != each[0].get(name, missing) for options in each[1:])
    ]


def _notes(runs: dict[str, dict]) -> list[str]:
    notes = [f"{key} did not finish. Its numbers are of its last record." for key in runs if not runs[key]["finished"]]
    heads = [values["headline"] for values in runs.values()]
    if len({head["seconds"]["source"] for head in heads} - {None}) > 1:
        notes.append("Wall times are of different kinds: each page of a run says which.")
    places = {at(head, "peak_memory.where") for head in heads}
    if len(places - {None}) > 1:
        notes.append("Peak memory is of the device in some runs and of the process on the host in others.")
    if None in places:
        notes.append("Memory is compared only if all runs had `profile_memory=True` or `MemoryProfilerCallback`.")
    if len({head["final_loss"]["held_out_step"] for head in heads} - {None}) > 1:
        notes.append("The last eval losses are of different steps.")
    return notes


def _body(values: dict, plots: Sequence[Plot]) -> list[str]:
    runs = values["runs"]
    title = "Both runs" if len(runs) == 2 else f"{len(runs)} runs"
    difference = ["B − A", "B / A"] if len(runs) == 2 else []
    names = "<br>".join(f"{key}: {escape(run['name'])}" for key, run in runs.items())
    status = [
        f'<p>{key}: {escape(run["status"])} <span class="muted"><code>{escape(run["folder"])}</code></span></p>'
        for key, run in runs.items()
    ]
    return [
        f"<header><h1>{names}</h1>",
        *status,
        "</header>",
        section(title, table(("", *runs, *difference), values["table"], title)),
        note_list(values["notes"]),
        *map(figure, plots),
        section("Options that differ", table(("option", *runs), values["different_options"], "Options", words=True)),
    ]
