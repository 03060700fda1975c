"""Reports on finished and killed runs: CSV, JSON, PNG and one HTML file; and comparisons of two runs."""

from __future__ import annotations

import csv
import json
import logging
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from hf_hybrid.report.findings import accepted, findings, used_memory
from hf_hybrid.report.plots import Plot, comparison_plots, plots_available, run_plots
from hf_hybrid.report.run_folder import Run, as_dict, load_run, number, phases_by_step, reading
from hf_hybrid.report.summary import format_bytes, format_number, format_seconds, html_table

logger = logging.getLogger(__name__)

_DEVICE = ("allocated", "reserved", "peak_allocated", "peak_reserved")
_HOST = ("rss", "peak_rss", "pinned")
_LOGGED = ("loss", "eval_loss", "learning_rate", "grad_norm")
_LEAP_FIELDS = (
    "step", "verdict", "horizon", "gain", "worth", "relative_norm", "loss_before", "loss_after", "standard_error", "e",
    "e_source", "cosine", "norm_ratio", "predicted_decrease", "forecast_error", "probe_cost_steps",
)  # fmt: skip


def format_loss(loss: float | None) -> str:
    """Four significant digits; an en dash for `None`."""
    return "–" if loss is None else f"{loss:#.4g}"


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
        writer.writerow(map(_csv_cell, names))
        writer.writerows([_csv_cell(row.get(name)) for name in names] for row in rows if any(_told(row)))


def _told(row: dict) -> Iterable[bool]:
    return (value is not None for value in row.values())


def _csv_cell(value: object) -> object:
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


# The page.

INSTALL_HINT = 'Plots need matplotlib: pip install "hf-hybrid[report]", then make the report again.'
MOST_ROWS = 300
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render_run(found: dict, leaps: Sequence[dict], plots: Sequence[Plot], *, plotted: bool) -> str:
    """
    The page of one run.

    Args:
        found (`dict`): See [`findings`].
        leaps (`Sequence[dict]`): Records of the leaps.
        plots (`Sequence[Plot]`): In the order of the page.
        plotted (`bool`): Whether matplotlib was there to draw.
    """
    notes = [*found["notes"], *([] if plotted else [INSTALL_HINT])]
    body = [
        f"<header><h1>{escape(found['name'])}</h1>",
        f'<p>{escape(found["status"])}</p><p class="muted"><code>{escape(found["folder"])}</code></p></header>',
        _cards(headline_cards(found)),
        _notes(notes),
        *(_figure(plot) for plot in plots),
        _phases(found),
        _leaps(found["leaps"], leaps),
        _memory(found["memory"]),
        _recoveries(found["recoveries"]),
        _displacement(found["calibration"].get("displacement") or []),
        _world_model(found["calibration"]),
        _events(found["events"]),
        _pairs("Environment", found["environment"]),
        _pairs("Options", found["options"]),
    ]
    return _page(f"{found['name']}: run report", body)


def render_comparison(found: dict, plots: Sequence[Plot], *, plotted: bool) -> str:
    """
    The page of two runs.

    Args:
        found (`dict`): See [`compare`].
        plots (`Sequence[Plot]`): In the order of the page.
        plotted (`bool`): Whether matplotlib was there to draw.
    """
    names = [found["runs"][key]["name"] for key in "AB"]
    body = [
        f"<header><h1>A: {escape(names[0])}<br>B: {escape(names[1])}</h1>",
        *(
            f'<p>{key}: {escape(run["status"])} <span class="muted"><code>{escape(run["folder"])}</code></span></p>'
            for key, run in found["runs"].items()
        ),
        "</header>",
        _section("Both runs", _scroll(html_table(("", "A", "B", "B − A", "B / A"), found["table"]), "Both runs")),
        _notes([*found["notes"], *([] if plotted else [INSTALL_HINT])]),
        *(_figure(plot) for plot in plots),
        _different_options(found["different_options"]),
    ]
    return _page(f"{names[0]} and {names[1]}: comparison", body)


# The page.


def _page(title: str, body: Iterable[str]) -> str:
    style = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Browsers ask for an icon, which nobody has, unless one is named.
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n'
        + "\n".join(part for part in body if part)
        + "\n<footer>Made by <code>hf-hybrid report</code>. The numbers are in the JSON file beside this page.</footer>"
        "\n</body>\n</html>\n"
    )


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _scroll(table: str, label: str, words: bool = False) -> str:
    """On a narrow screen the table moves, not the page."""
    kind = "scroll words" if words else "scroll"
    return f'<div class="{kind}" role="region" aria-label="{escape(label)}" tabindex="0">{table}</div>'


def _figure(plot: Plot) -> str:
    return _section(
        plot.title,
        f'<figure><div class="wide">{plot.wide}</div><div class="narrow">{plot.narrow}</div>'
        f"<figcaption>{escape(plot.alt)}</figcaption></figure>",
    )


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{_code(note)}</li>" for note in notes)
    return f'<aside class="notes" aria-label="Notes"><ul>{items}</ul></aside>' if notes else ""


def _code(text: str) -> str:
    """Escaped, with what stands between backticks as code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))


def _cards(cards: Sequence[tuple[str, str, str]]) -> str:
    items = "".join(
        f'<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd><dd class="detail">{escape(detail)}</dd></div>'
        for label, value, detail in cards
    )
    return f'<dl class="headline">{items}</dl>'


def headline_cards(found: dict) -> list[tuple[str, str, str]]:
    """Label, value and what it is, of the five numbers at the top."""
    numbers = found["headline"]
    return [
        _loss_card(numbers["final_loss"]),
        _steps_card(numbers["steps"]),
        _passes_card(numbers["backward_passes"], numbers["steps"]["total"]),
        ("Wall time", format_seconds(numbers["seconds"]["value"]), numbers["seconds"]["source"] or "not recorded"),
        _memory_card(numbers["peak_memory"]),
    ]


def _loss_card(loss: dict) -> tuple[str, str, str]:
    trained = f"training {format_loss(loss['training'])}" if loss["training"] is not None else ""
    if loss["held_out"] is None:
        detail = f"training, step {loss['training_step']:,}; no evaluation" if trained else "not recorded"
        return "Final loss", format_loss(loss["training"]), detail
    parts = [f"held out, step {loss['held_out_step']:,}", trained]
    return "Final loss", format_loss(loss["held_out"]), "; ".join(part for part in parts if part)


def _steps_card(steps: dict) -> tuple[str, str, str]:
    detail = f"{steps['real']:,} real, {steps['predicted']:,} predicted"
    return "Steps", f"{steps['total']:,}", detail


def _passes_card(passes: dict, last_step: int) -> tuple[str, str, str]:
    if passes["done"] is None:
        return "Backward passes", "–", "plain Trainer does not count them"
    parts = [] if passes["avoided"] is None else [f"{format_number(int(passes['avoided']))} avoided"]
    if passes["step"] < last_step:
        parts.append(f"to step {passes['step']:,}")
    return "Backward passes", format_number(int(passes["done"])), "; ".join(parts)


def _memory_card(peak: dict | None) -> tuple[str, str, str]:
    if peak is None:
        return "Peak memory", "–", "not profiled"
    whose = "device, allocated" if peak["where"] == "device" else "host, process"
    return "Peak memory", format_bytes(peak["bytes"]), f"{whose}; step {peak['step']:,}, {peak['phase']}"


# Tables.


def _phases(found: dict) -> str:
    rows, profiled = [], any(row["peak"] for row in found["phases"])
    for row in found["phases"]:
        each = row["seconds"] / row["steps"] if row["seconds"] is not None and row["steps"] else None
        cells = [row["phase"], format_number(row["steps"]), format_seconds(row["seconds"]), format_seconds(each)]
        if profiled:
            most = row["peak"]["bytes"] if row["peak"] else None
            cells += [format_bytes(count) for count in (row["peak_mean"], row["peak_min"], most)]
        rows.append(cells)
    headers = ["phase", "steps", "time", "per step", *(["peak of a step, mean", "least", "most"] if profiled else [])]
    return _section("Phases", _scroll(html_table(headers, rows), "Phases")) if rows else ""


def _leaps(summary: dict | None, leaps: Sequence[dict]) -> str:
    if not summary or not summary["made"]:
        return ""
    verdicts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in summary["by_verdict"].items())
    told = f"{summary['made']} leaps, {summary['accepted']} stayed in the weights: {verdicts}."
    if summary["mean_e"] is not None:
        told += f" Immediate gain of those that stayed: {format_number(summary['mean_e'])} real steps, "
        told += f"mean over the {summary['with_e']} where it was measured."
    if summary["probe_cost_steps"] is not None:
        told += f" Probes cost {format_number(summary['probe_cost_steps'])} real steps of compute."
    names = ("gain", "horizon", "worth", "e", "loss_before", "loss_after", "cosine", "norm_ratio", "forecast_error")
    rows = [
        [leap["step"], leap.get("verdict"), *(_cell(leap.get(name)) for name in names)] for leap in leaps[:MOST_ROWS]
    ]
    headers = ("step", "verdict", *(name.replace("_", " ") for name in names))
    title = "Every leap" if len(leaps) <= MOST_ROWS else f"The first {MOST_ROWS} leaps; all are in leaps.csv"
    table = _scroll(html_table(headers, rows), "Leaps")
    return _section("Leaps", f"<p>{escape(told)}</p><details><summary>{title}</summary>{table}</details>")


def _cell(value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return format_number(value)
    return "–" if value is None else str(value)


def _memory(memory: dict | None) -> str:
    if not memory:
        return ""
    parts = [_floor(memory), _held(memory.get("categories_by_phase") or [])]
    end = memory.get("held_at_the_end")
    if end:
        rows = [(name, *(format_bytes(places[place]) for place in ("device", "host"))) for name, places in end.items()]
        title = "Held between steps at the end of training"
        parts.append(_scroll(html_table(("", "device", "host"), rows, title), title))
    ranks = {rank: peak for rank, peak in (memory.get("peak_by_rank") or {}).items() if peak}
    if ranks:
        rows = [(f"process {rank}", format_bytes(p["bytes"]), p["where"], p["step"]) for rank, p in ranks.items()]
        table = html_table(("", "peak", "of", "step"), rows, "Other processes")
        parts.append(_scroll(table, "Other processes"))
    parts += [_spikes(memory.get("spikes") or []), _crashes(memory.get("out_of_memory") or [])]
    return _section("Memory", *parts) if any(parts) else ""


def _floor(memory: dict) -> str:
    if not memory.get("floor_bytes"):
        return ""
    over = memory["achieved_over_floor"]
    told = f" What was measured at the peak is {format_number(over)} times that." if over else ""
    return f"<p>Weights, gradients and states need {format_bytes(memory['floor_bytes'])} at least.{told}</p>"


def _held(phases: Sequence[dict]) -> str:
    """A table for each place: categories down, phases across."""
    tables = []
    for place in ("device", "host"):
        names = list(dict.fromkeys(n for row in phases for n, held in row["categories"].items() if held[place]))
        rows = [(n, *(row["categories"].get(n, {}).get(place, 0) for row in phases)) for n in names]
        rest = [row["unexplained"] if row["unexplained_place"] == place else None for row in phases]
        if any(count is not None for count in rest):
            rows.append(("unexplained", *rest))
        if not rows:
            continue
        cells = [(name, *map(format_bytes, counts)) for name, *counts in rows]
        sums = [sum(count or 0 for count in column) for column in list(zip(*rows))[1:]]
        cells.append(("sum", *map(format_bytes, sums)))
        tables.append((place, cells))
    headers = ("", *(f"{row['phase']}, step {row['step']}" for row in phases))
    return "".join(
        _scroll(html_table(headers, cells, f"On the {place}, where a phase held most"), f"Held on the {place}")
        for place, cells in tables
    )


def _spikes(spikes: Sequence[dict]) -> str:
    rows = [
        (_cell(s.get("step")), _cell(s.get("phase")), *(format_bytes(number(s.get(key))) for key in ("bytes", "usual")),
         _changes(as_dict(s.get("changed"))))
        for s in spikes[:MOST_ROWS]
    ]  # fmt: skip
    table = html_table(("step", "phase", "peak", "usual", "what changed"), rows, "Spikes")
    return _scroll(table, "Spikes", words=True) if rows else ""


def _changes(changed: dict) -> str:
    """What the profiler saw change before a spike: the part of the step, readings, categories."""
    parts = [f"reached in {changed['moment']}"] if changed.get("moment") else []
    counts = {name: number(value) for name, value in changed.items() if name != "since_step"}
    for category, places in as_dict(changed.get("held")).items():
        counts |= {f"{category} ({place})": number(value) for place, value in as_dict(places).items()}
    parts += [
        f"{name} {'+' if count > 0 else '−'}{format_bytes(abs(count))}" for name, count in counts.items() if count
    ]
    return ", ".join(parts)


def _crashes(crashes: Sequence[dict]) -> str:
    rows = [
        (crash["step"], _cell(crash["phase"]), _cell(crash["stage"]), format_bytes(number(crash["requested"])),
         f"profile/{crash['folder']}", _cell(crash["error"]))
        for crash in crashes
    ]  # fmt: skip
    table = html_table(("step", "phase", "while", "asked for", "folder", "error"), rows, "Out-of-memory errors")
    return _scroll(table, "Out-of-memory errors", words=True) if rows else ""


def _recoveries(events: Sequence[dict]) -> str:
    if not events:
        return ""
    names = ("step", "phase", "action", "from_size", "to_size", "error")
    rows = [[_cell(event.get(name)) for name in names] for event in events[:MOST_ROWS]]
    headers = ("after step", "phase", "what was done", "sequences at once, before", "after", "error")
    return _section("Recovered from out of memory", _scroll(html_table(headers, rows), "Recoveries", words=True))


def _displacement(rows: Sequence[dict]) -> str:
    if not rows:
        return ""
    cells = [
        (row["group"], int(row["leaps"]), format_number(row["cosine"]), format_number(row["norm_ratio"]))
        for row in rows[:MOST_ROWS]
    ]
    caption = "Means over the leaps: direction and length of what the real steps of Correct did, against the leap"
    table = _scroll(html_table(("", "leaps", "cosine", "norm ratio"), cells, caption), caption)
    title = f"{len(rows)} kinds of parameters"
    return _section("Displacement by kind of parameter", f"<details><summary>{title}</summary>{table}</details>")


def _world_model(calibration: dict) -> str:
    errors = calibration.get("world_model_errors")
    if not errors:
        return ""
    names = ("model", "persistence", "power_law")
    rows = [(ahead, *(format_number(found.get(name)) for name in names)) for ahead, found in errors.items()]
    caption = "Mean absolute error in the log loss"
    table = html_table(("windows ahead", "world model", "persistence", "power law"), rows, caption)
    return _section("Forecasts of the world model", _scroll(table, caption))


def _events(events: Sequence[dict]) -> str:
    if not events:
        return ""
    names = ("step", "phase", "level", "action", "reason")
    rows = [[_cell(event.get(name)) for name in names] for event in events[:MOST_ROWS]]
    table = _scroll(html_table(names, rows), "Divergence events", words=True)
    if len(events) > 10:
        title = f"{len(events)} events" if len(events) <= MOST_ROWS else f"The first {MOST_ROWS}; all: report.json"
        table = f"<details><summary>{title}</summary>{table}</details>"
    return _section("Divergence events", table)


def _pairs(title: str, values: dict) -> str:
    rows = [(name, value) for name, value in values.items()]
    if not rows:
        return ""
    table = _scroll(html_table((), rows), title, words=True)
    return _section(title, f"<details><summary>{len(rows)} entries</summary>{table}</details>")


def _different_options(rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    table = html_table(("option", "A", "B"), rows)
    return _section("Options that differ", _scroll(table, "Options that differ", words=True))
