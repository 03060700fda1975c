"""Reports on finished and killed runs: CSV, JSON, PNG and one HTML file; and comparisons of two runs."""

from __future__ import annotations

import csv
import json
import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from hf_hybrid.report.drawing import Plot, plots_available
from hf_hybrid.report.findings import accepted, findings, used_memory
from hf_hybrid.report.html import INSTALL_HINT, format_loss, render_comparison, render_run
from hf_hybrid.report.plots import comparison_plots, run_plots
from hf_hybrid.report.run_folder import Run, as_dict, load_run, number, phases_by_step, reading
from hf_hybrid.report.summary import format_bytes, format_number, format_seconds

logger = logging.getLogger(__name__)

_DEVICE = ("allocated", "reserved", "peak_allocated", "peak_reserved")
_HOST = ("rss", "peak_rss", "pinned")
_LOGGED = ("loss", "eval_loss", "learning_rate", "grad_norm")
_LEAP_FIELDS = (
    "step", "verdict", "horizon", "gain", "worth", "relative_norm", "loss_before", "loss_after", "standard_error", "e",
    "e_source", "cosine", "norm_ratio", "predicted_decrease", "forecast_error", "probe_cost_steps",
)  # fmt: skip


def write_report(folder: str | Path, output: str | Path | None = None) -> list[Path]:
    """
    Report on a run: `report.html`, `report.json`, `steps.csv`, `leaps.csv` for hybrid runs, and a PNG for each plot.

    Without matplotlib everything but the plots is written, and the page says how to get them.

    Args:
        folder (`str` or `Path`): `output_dir` of the run, which may have been killed or still be going on.
        output (`str` or `Path`, *optional*): Where the report goes; by default `report` in `folder`.

    Returns:
        `list[Path]`: The files, the page first.

    Raises:
        ValueError: If there is nothing in `folder` to report on.
    """
    run = load_run(folder)
    found = findings(run)
    output = _made(Path(output) if output is not None else run.folder / "report")
    plotted = plots_available()
    plots = run_plots(run, found, output) if plotted else _no_plots()
    files = [output / "report.html", output / "report.json", output / "steps.csv"]
    files[0].write_text(render_run(found, run.leaps, plots, plotted=plotted), encoding="utf-8")
    _write_json(files[1], {**found, "leap_records": run.leaps, "plots": [f"{plot.name}.png" for plot in plots]})
    _write_csv(files[2], _step_rows(run))
    if run.record is not None:
        files.append(output / "leaps.csv")
        _write_csv(files[-1], _leap_rows(run))
    return files + [output / f"{plot.name}.png" for plot in plots]


def write_comparison(first: str | Path, second: str | Path, output: str | Path | None = None) -> list[Path]:
    """
    Compare two runs: `comparison.html`, `comparison.json`, and PNGs of both losses and memories.

    Args:
        first (`str` or `Path`), second (`str` or `Path`): `output_dir` of run A, which B is measured against, and of B.
        output (`str` or `Path`, *optional*): Where the comparison goes; by default `report/comparison` in `second`.

    Returns:
        `list[Path]`: The files, the page first.

    Raises:
        ValueError: If there is nothing in one of the folders to report on.
    """
    runs = load_run(first), load_run(second)
    found = compare(*runs)
    output = _made(Path(output) if output is not None else runs[1].folder / "report" / "comparison")
    plotted = plots_available()
    plots = comparison_plots(*runs, output) if plotted else _no_plots()
    files = [output / "comparison.html", output / "comparison.json"]
    files[0].write_text(render_comparison(found, plots, plotted=plotted), encoding="utf-8")
    _write_json(files[1], {**found, "plots": [f"{plot.name}.png" for plot in plots]})
    return files + [output / f"{plot.name}.png" for plot in plots]


def _made(output: Path) -> Path:
    if output.exists() and not output.is_dir():
        raise ValueError(f"`output` is `{output}`, which is a file. Name a folder.")
    output.mkdir(parents=True, exist_ok=True)
    return output


def _no_plots() -> list[Plot]:
    logger.warning(INSTALL_HINT)
    return []


# Two runs.


def compare(first: Run, second: Run) -> dict:
    """
    What two runs have in common to be compared, as plain values.

    Args:
        first (`Run`), second (`Run`): A, which B is measured against, and B.

    Returns:
        `dict`: `runs` with the headline of each, `table` with rows of text (name, A, B, difference, ratio),
        `different_options`, `notes`.
    """
    both = [findings(run) for run in (first, second)]
    rows = [_compared(*row, *(_value(found["headline"], row[1]) for found in both)) for row in _ROWS]
    runs = {
        key: {name: found[name] for name in ("name", "folder", "finished", "status", "headline")}
        for key, found in zip("AB", both)
    }
    return {
        "schema_version": 1,
        "runs": runs,
        "table": [row for row in rows if row is not None],
        "different_options": different_options(both[0]["options"], both[1]["options"]),
        "notes": _comparison_notes(both),
    }


_ROWS = (
    ("held-out loss, last", "final_loss.held_out", format_loss),
    ("held-out loss, best", "final_loss.best_held_out", format_loss),
    ("training loss, last logged", "final_loss.training", format_loss),
    ("steps", "steps.total", format_number),
    ("real steps", "steps.real", format_number),
    ("predicted steps", "steps.predicted", format_number),
    ("backward passes", "backward_passes.done", format_number),
    ("wall time", "seconds.value", format_seconds),
    ("peak memory", "peak_memory.bytes", format_bytes),
)


def _value(headline: dict, path: str) -> float | None:
    part, _, key = path.partition(".")
    return number(as_dict(headline.get(part)).get(key))


def _compared(label: str, path: str, show, a: float | None, b: float | None) -> list[str] | None:
    if a is None and b is None:
        return None
    shown = [label, *("–" if value is None else show(value) for value in (a, b))]
    if a is None or b is None:
        return [*shown, "–", "–"]
    sign = "+" if b > a else "−" if b < a else ""
    return [*shown, f"{sign}{show(abs(b - a))}", f"{b / a:.3g}" if a else "–"]


def different_options(first: dict, second: dict) -> list[list[str]]:
    """Options whose values differ: name, A, B; a run that left an option at its default may not tell it."""
    names = sorted({*first, *second} - {"output_dir", "logging_dir", "run_name"})
    missing = object()
    return [
        [name, *(str(options[name]) if name in options else "not recorded" for options in (first, second))]
        for name in names
        if first.get(name, missing) != second.get(name, missing)
    ]


def _comparison_notes(both: Sequence[dict]) -> list[str]:
    notes = []
    for key, found in zip("AB", both):
        if not found["finished"]:
            notes.append(f"{key} did not finish: its numbers are of its last record.")
    sources = [found["headline"]["seconds"]["source"] for found in both]
    if None not in sources and sources[0] != sources[1]:
        notes.append(f"Wall times are of different kinds: A {sources[0]}; B {sources[1]}.")
    places = {(found["headline"]["peak_memory"] or {}).get("where") for found in both} - {None}
    if len(places) > 1:
        notes.append("Peak memory is of the device in one run and of the process on the host in the other.")
    if any(found["headline"]["peak_memory"] is None for found in both):
        notes.append("Memory is compared where both runs had `MemoryProfilerCallback`.")
    steps = [found["headline"]["final_loss"]["held_out_step"] for found in both]
    if None not in steps and steps[0] != steps[1]:
        notes.append(f"The last held-out losses are of different steps: A {steps[0]}, B {steps[1]}.")
    return notes


# CSV and JSON.


def _step_rows(run: Run) -> list[dict]:
    """One row by step that was profiled or logged: phase, memory used, total, utilisation, categories, losses."""
    profiled: dict[int, dict] = {}
    for entry in run.profile.steps if run.profile else []:
        if entry.get("phase") != "evaluate" or entry["step"] not in profiled:
            profiled[entry["step"]] = entry
    logged: dict[int, dict] = {}
    for entry in run.logs:
        logged.setdefault(entry["step"], {}).update(entry)
    phases = phases_by_step(run)
    total = number(as_dict(as_dict(run.profile and run.profile.run).get("device")).get("total_memory"))
    return [
        {
            "step": step,
            "phase": profiled.get(step, {}).get("phase", phases.get(step)),
            **_memory_columns(profiled.get(step, {}), total),
            **{name: number(logged.get(step, {}).get(name)) for name in _LOGGED},
        }
        for step in sorted({*profiled, *logged})
    ]


def _memory_columns(entry: dict, device_total: float | None) -> dict:
    used, total, source = used_memory(entry, device_total)
    row = {
        "used": used,
        "total": total,
        "utilisation": used / total if used is not None and total else None,
        "used_source": source,
        "seconds": number(entry.get("seconds")),
        "step_seconds": number(entry.get("step_seconds")),
    }
    row |= {f"device_{name}": reading(entry, f"device.{name}") for name in _DEVICE}
    row |= {f"host_{name}": reading(entry, f"host.{name}") for name in _HOST}
    for category, places in as_dict(entry.get("held")).items():
        row |= {f"held_{category}_{place}": number(as_dict(places).get(place)) for place in ("device", "host")}
    return {**row, "unexplained": number(entry.get("unexplained"))}


def _leap_rows(run: Run) -> list[dict]:
    rows = [{**{name: leap.get(name) for name in _LEAP_FIELDS}, "accepted": accepted(leap)} for leap in run.leaps]
    return rows or [dict.fromkeys((*_LEAP_FIELDS, "accepted"))]


def _write_csv(path: Path, rows: Sequence[dict]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(map(_cell, names))
        writer.writerows([_cell(row.get(name)) for name in names] for row in rows if any(_told(row)))


def _told(row: dict) -> Iterable[bool]:
    return (value is not None for value in row.values())


def _cell(value: object) -> object:
    """A spreadsheet must not take what comes from a file for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value


def _write_json(path: Path, values: dict) -> None:
    path.write_text(json.dumps(_plain(values), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
