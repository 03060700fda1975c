"""
Reports on runs and comparisons of several: CSV, JSON, PNG and one HTML file.

The page has style and plots inside, no script, and loads nothing: its content policy forbids every request, so that it
opens offline and can be mailed. Whatever comes from files (names, options, reasons) is escaped.
"""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hf_hybrid.files import plain, write_text
from hf_hybrid.records.readings import PHASES, as_dict, evenly, number, reading
from hf_hybrid.records.redaction import shareable
from hf_hybrid.records.summary import format_bytes, format_number, format_seconds, html_table
from hf_hybrid.report.findings import MOST_RECORDS, accepted, findings, used_memory
from hf_hybrid.report.plots import Plot, comparison_plots, plots_available, run_plots
from hf_hybrid.report.run_folder import Run, leaps_made, load_run, phase_stretches
from hf_hybrid.report.scores import MOST_PARTS, SCORES, scores_of, speed_of

logger = logging.getLogger(__name__)

INSTALL_HINT = 'Plots need matplotlib: pip install "hf-hybrid[report]", then make the report again.'
MOST_ROWS = 300
"""Rows of a table in the page."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_LEAP_FIELDS = (
    "step", "verdict", "horizon", "gain", "worth", "relative_norm", "loss_before", "loss_after", "standard_error",
    "accuracy_before", "accuracy_after", "worse_in", "e", "cosine", "norm_ratio", "predicted_decrease",
    "forecast_error", "probe_cost_steps",
)  # fmt: skip


def write_report(folder: str | Path, output: str | Path | None = None, *, refresh: int | None = None) -> list[Path]:
    """
    Write a report: `report.html`, `report.json`, `steps.csv`, `leaps.csv` if there were leaps, and a PNG for each plot.

    Without matplotlib everything but the plots is written, and the page says how to get them.

    Args:
        folder (`str` or `Path`): `output_dir` of the run, which may have been killed or still be going on.
        output (`str` or `Path`, *optional*): Where the report goes; by default `report` in `folder`.
        refresh (`int`, *optional*): Seconds after which a browser loads the page anew, while the run is not finished.

    Returns the files, the page first.

    Raises:
        ValueError: If there is nothing in `folder` to report on, or the folder for the report is a file, or a link that
            was not named.
    """
    run = load_run(folder)
    found = shareable(findings(run))
    output = _made(output, run.folder / "report")
    plots = run_plots(run, found, output) if _can_plot() else []
    steps, leaps = _recorded_steps(run), evenly(run.leaps, MOST_RECORDS)
    found["notes"] += _cut(run, len(steps))
    body = _run_body(found, run.leaps, plots)
    values, again = {**found, "leap_records": leaps}, None if run.finished else refresh
    files = _write(output, "report", body, f"{run.name}: run report", values, plots, again)
    files.insert(2, _write_csv(output / "steps.csv", _step_rows(run, evenly(steps, MOST_RECORDS))))
    if leaps_made(run):
        rows = [{**{key: leap.get(key) for key in _LEAP_FIELDS}, "accepted": accepted(leap)} for leap in leaps]
        rows = rows or [dict.fromkeys((*_LEAP_FIELDS, "accepted"))]
        files.insert(3, _write_csv(output / "leaps.csv", rows))
    return files


def write_comparison(*folders: str | Path, output: str | Path | None = None, refresh: int | None = None) -> list[Path]:
    """
    Compare runs: `comparison.html`, `comparison.json`, and PNGs of their losses, scores, speeds and memories.

    Args:
        folders (`str` or `Path`): `output_dir` of run A, which B is measured against if there are two, of B, and so on.
        output (`str` or `Path`, *optional*): Where the comparison goes; by default `report/comparison` in the last one.
        refresh (`int`, *optional*): As in [`write_report`], while one of the runs is not finished.

    Returns the files, the page first.

    Raises:
        ValueError: If there is nothing in one of the folders to report on, or there are fewer than two.
    """
    if len(folders) < 2:
        raise ValueError(f"A comparison needs two runs at least, got {len(folders)}. Name their folders.")
    runs = [load_run(folder) for folder in folders]
    found = compare(*runs)
    output = _made(output, runs[-1].folder / "report" / "comparison")
    plots = comparison_plots(dict(zip(found["runs"], runs)), output) if _can_plot() else []
    title = f"{', '.join(run.name for run in runs[:-1])} and {runs[-1].name}: comparison"
    again = None if all(run.finished for run in runs) else refresh
    return _write(output, "comparison", _comparison_body(found, plots), title, found, plots, again)


def _cut(run: Run, steps: int) -> list[str]:
    """What the files of the report hold in part only."""
    told = "`{}` has {:,} of {:,} {}, evenly spaced; `hybrid_log.jsonl` has all."
    found = (("steps.csv", steps, "steps that were logged or profiled"), ("leaps.csv", len(run.leaps), "leaps"))
    notes = [told.format(name, MOST_RECORDS, count, what) for name, count, what in found if count > MOST_RECORDS]
    if len(run.events) > MOST_RECORDS:
        notes.append(f"`report.json` has the last {MOST_RECORDS:,} of {len(run.events):,} divergence events.")
    return notes


def _made(given: str | Path | None, usual: Path) -> Path:
    """Make the folder that was named, or else the usual one, which the folder of a run may have as a link."""
    if given is None and (link := next((path for path in (usual, usual.parent) if path.is_symlink()), None)):
        raise ValueError(f"`{link}` is a link, and a report is not written through one. Name its folder as `output`.")
    output = usual if given is None else Path(given)
    if output.exists() and not output.is_dir():
        raise ValueError(f"`output` is `{output}`, which is a file. Name a folder.")
    output.mkdir(parents=True, exist_ok=True)
    return output


def _can_plot() -> bool:
    if not plots_available():
        logger.warning(INSTALL_HINT)
    return plots_available()


def _write(
    output: Path, name: str, body: Iterable[str], title: str, values: dict, plots: list[Plot], refresh: int | None
) -> list[Path]:
    files = [output / f"{name}.html", output / f"{name}.json"]
    values = {**values, "plots": [f"{plot.name}.png" for plot in plots]}
    write_text(files[0], _page(title, body, refresh))
    write_text(files[1], json.dumps(plain(values), indent=1, allow_nan=False) + "\n")
    return files + [output / f"{plot.name}.png" for plot in plots]


# CSV.


def _recorded_steps(run: Run) -> list[int]:
    """The steps that were profiled or logged."""
    return sorted({entry["step"] for entries in (run.profile.steps, run.logs) for entry in entries})


def _step_rows(run: Run, steps: Sequence[int]) -> list[dict]:
    """One row for each of these steps: phase, memory used, total, utilisation, categories, losses."""
    profiled: dict[int, dict] = {}
    for entry in run.profile.steps:
        if entry.get("phase") != "evaluate" or entry["step"] not in profiled:
            profiled[entry["step"]] = entry
    logged: dict[int, dict] = {}
    for entry in run.logs:
        logged.setdefault(entry["step"], {}).update(entry)
    stretches = iter(phase_stretches(run))
    first, last, phase = next(stretches, (0, 0, None))
    total, speeds = reading(run.profile.run, "device.total_memory"), dict(speed_of(run))
    names = ["loss", "eval_loss", "learning_rate", "grad_norm"]
    names += [f"{kind}{key}" for key in scores_of(run) for kind in ("", "eval_") if run.series(f"{kind}{key}")]
    parts = sorted({key for entry in run.logs for key in entry if key.startswith("rewards/") and key not in names})
    names += parts[: 4 * MOST_PARTS]
    rows = []
    for step in steps:
        entry, logs = profiled.get(step, {}), logged.get(step, {})
        while last < step and (following := next(stretches, None)):
            first, last, phase = following
        of_record = phase if first <= step <= last else None
        row = {"step": step, "phase": entry.get("phase", of_record), **_memory_columns(entry, total)}
        rows.append({**row, **{name: number(logs.get(name)) for name in names}})
        rows[-1] |= {"tokens_per_second": speeds.get(step)} if speeds else {}
    return rows


def _memory_columns(entry: dict, device_total: float | None) -> dict:
    used, total, source = used_memory(entry, device_total)
    row: dict[str, Any] = {
        "used": used,
        "total": total,
        "utilisation": used / total if used is not None and total else None,
    }
    row |= {"used_source": source, **{name: reading(entry, name) for name in ("seconds", "step_seconds")}}
    for name in ("allocated", "reserved", "peak_allocated", "peak_reserved"):
        row[f"device_{name}"] = reading(entry, f"device.{name}")
    row |= {f"host_{name}": reading(entry, f"host.{name}") for name in ("rss", "peak_rss", "pinned")}
    for category, places in as_dict(entry.get("held")).items():
        row |= {f"held_{category}_{place}": number(as_dict(places).get(place)) for place in ("device", "host")}
    return {**row, "unexplained": reading(entry, "unexplained")}


def _write_csv(path: Path, rows: Sequence[dict]) -> Path:
    def safe(value: object) -> object:
        # A spreadsheet must not take what comes from a file for a formula.
        return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value

    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(map(safe, names))
    filled = (row for row in rows if any(value is not None for value in row.values()))
    writer.writerows([safe(row.get(name)) for name in names] for row in filled)
    write_text(path, text.getvalue())
    return path


# Several runs.


def format_loss(loss: float | None) -> str:
    """Four significant digits; an en dash for `None`."""
    return "–" if loss is None else f"{loss:#.4g}"


_COMPARED = (
    ("held-out loss, last", "final_loss.held_out", format_loss),
    ("held-out loss, best", "final_loss.best_held_out", format_loss),
    ("training loss, last logged", "final_loss.training", format_loss),
    ("steps", "steps.total", format_number),
    ("real steps", "steps.real", format_number),
    ("predicted steps", "steps.predicted", format_number),
    ("backward passes", "backward_passes.done", format_number),
    ("wall time", "seconds.value", format_seconds),
    ("tokens per second", "tokens_per_second.value", format_number),
    ("peak memory", "peak_memory.bytes", format_bytes),
)


def letters(count: int) -> list[str]:
    """Names of runs that are compared: A to Z, then AA, AB and so on."""
    alphabet = [chr(ord("A") + index) for index in range(26)]
    return [("" if index < 26 else alphabet[index // 26 - 1]) + alphabet[index % 26] for index in range(count)]


def compare(*runs: Run) -> dict:
    """
    Compare runs, and return plain values.

    Args:
        runs (`Run`): A, B and so on; of two, B is measured against A.

    Returns:
        `dict`: `runs` with the headline and the scores of each, `table` with rows of text (name, a value by run, and of
        two runs difference and ratio), `different_options`, `notes`.
    """
    all_found = {key: shareable(findings(run)) for key, run in zip(letters(len(runs)), runs)}
    each = all_found.values()
    leaps = any(found["leaps"] for found in each)
    rows = [
        _compared(label, show, [reading(found["headline"], place) for found in each])
        for label, place, show in _COMPARED
        if leaps or label not in ("real steps", "predicted steps")
    ]
    kinds = (
        ("held out, last", "held_out.last"),
        ("held out, best", "held_out.best"),
        ("training, last", "training.last"),
    )
    rows[3:3] = [
        _compared(
            f"{name.lower()}, {kind}", format_loss, [reading(found["scores"].get(key, {}), place) for found in each]
        )
        for key, name in SCORES
        for kind, place in kinds
    ]
    kept = ("name", "folder", "finished", "status", "headline", "scores")
    return {
        "schema_version": 1,
        "runs": {key: {name: found[name] for name in kept} for key, found in all_found.items()},
        "table": [row for row in rows if row is not None],
        "different_options": _different_options([found["options"] for found in each]),
        "notes": _comparison_notes(all_found),
    }


def _compared(label: str, show, values: Sequence[float | None]) -> list[str] | None:
    """A row of the table, with difference and ratio if there are two values; `None` if no run has one."""
    if all(value is None for value in values):
        return None
    shown = [label, *("–" if value is None else show(value) for value in values)]
    if len(values) > 2:
        return shown
    a, b = values
    if a is None or b is None:
        return [*shown, "–", "–"]
    sign = "+" if b > a else "−" if b < a else ""
    return [*shown, f"{sign}{show(abs(b - a))}", f"{b / a:.3g}" if a else "–"]


def _different_options(each: Sequence[dict]) -> list[list[str]]:
    """Options whose values differ: name, A, B... A run does not record every option that it left at its default."""
    missing = object()
    return [
        [name, *(str(options[name]) if name in options else "not recorded" for options in each)]
        for name in sorted({name for options in each for name in options} - {"output_dir", "logging_dir", "run_name"})
        if any(options.get(name, missing) != each[0].get(name, missing) for options in each[1:])
    ]


def _comparison_notes(runs: dict[str, dict]) -> list[str]:
    notes = [f"{key} did not finish. Its numbers are of its last record." for key in runs if not runs[key]["finished"]]
    heads = {key: found["headline"] for key, found in runs.items()}
    sources = {key: head["seconds"]["source"] for key, head in heads.items()}
    if None not in sources.values() and len(set(sources.values())) > 1:
        told = "; ".join(f"{key} {source}" for key, source in sources.items())
        notes.append(f"Wall times are of different kinds: {told}.")
    places = {key: (head["peak_memory"] or {}).get("where") for key, head in heads.items()}
    if len(set(places.values()) - {None}) > 1:
        notes.append("Peak memory is of the device in some runs and of the process on the host in others.")
    if None in places.values():
        notes.append("Memory is compared only if all runs had `profile_memory=True` or `MemoryProfilerCallback`.")
    steps = {key: head["final_loss"]["held_out_step"] for key, head in heads.items()}
    if None not in steps.values() and len(set(steps.values())) > 1:
        told = ", ".join(f"{key} {step}" for key, step in steps.items())
        notes.append(f"The last held-out losses are of different steps: {told}.")
    return notes


# The page.


def _page(title: str, body: Iterable[str], refresh: int | None = None) -> str:
    """The whole page. `refresh`: seconds after which a browser loads it anew, which is no request of its content."""
    again = "" if refresh is None else f'<meta http-equiv="refresh" content="{int(refresh)}">\n'
    style = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'{again}<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Browsers request an icon unless one is named.
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n'
        + "\n".join(part for part in body if part)
        + "\n<footer>Made by <code>hf-hybrid report</code>. The numbers are in the JSON file beside this page.</footer>"
        "\n</body>\n</html>\n"
    )


def _run_body(found: dict, leaps: Sequence[dict], plots: Sequence[Plot]) -> list[str]:
    return [
        f"<header><h1>{escape(found['name'])}</h1>",
        f'<p>{escape(found["status"])}</p><p class="muted"><code>{escape(found["folder"])}</code></p></header>',
        _headline(found["headline"], found["leaps"], found["scores"]),
        _notes(found["notes"]),
        *map(_figure, plots),
        _samples(found["samples"]),
        _phases(found["phases"]),
        _leaps(found["leaps"], leaps),
        _memory(found["memory"]),
        _pairs("Every token once", found["tokens"]),
        _recoveries(found["recoveries"]),
        _displacement(found["displacement"]),
        _world_model(found["forecast_errors"]),
        _events(found["events"], found["events_seen"]),
        _pairs("Environment", found["environment"]),
        _pairs("Options", found["options"]),
    ]


def _comparison_body(found: dict, plots: Sequence[Plot]) -> list[str]:
    runs = found["runs"]
    names, title = [f"{key}: {escape(run['name'])}" for key, run in runs.items()], "Both runs"
    difference = ["B − A", "B / A"] if len(runs) == 2 else []
    if not difference:
        title = f"{len(runs)} runs"
    status = [
        f'<p>{key}: {escape(run["status"])} <span class="muted"><code>{escape(run["folder"])}</code></span></p>'
        for key, run in runs.items()
    ]
    return [
        f"<header><h1>{'<br>'.join(names)}</h1>",
        *status,
        "</header>",
        _section(title, _table(("", *runs, *difference), found["table"], title)),
        _notes(found["notes"]),
        *map(_figure, plots),
        _section("Options that differ", _table(("option", *runs), found["different_options"], "Options", words=True)),
    ]


def _section(title: str, *parts: str) -> str:
    """A section under its heading; nothing if all parts are empty."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>" if any(parts) else ""


def _table(headers: Sequence[str], rows: Sequence, label: str, *, caption: str = "", words: bool = False) -> str:
    """A table that moves alone on a narrow screen; nothing without rows. `words`: aligned to the left."""
    rows = list(rows)[:MOST_ROWS]
    kind = "scroll words" if words else "scroll"
    table = html_table(headers, rows, caption)
    return f'<div class="{kind}" role="region" aria-label="{escape(label)}" tabindex="0">{table}</div>' if rows else ""


def _folded(title: str, table: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{table}</details>"


def _cell(value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return format_number(value)
    return "–" if value is None else str(value)


def _cells(entry: dict, names: Iterable[str]) -> list[str]:
    return [_cell(entry.get(name)) for name in names]


def _figure(plot: Plot) -> str:
    scrolls = f'<div class="scroll" role="region" aria-label="{escape(plot.title)}" tabindex="0">{plot.svg}</div>'
    return _section(plot.title, f"<figure>{scrolls}<figcaption>{escape(plot.alt)}</figcaption></figure>")


def _words(text: str) -> str:
    """Text between backticks as code."""
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(escape(text).split("`")))


def _notes(notes: Sequence[str]) -> str:
    notes = [*notes, *([] if plots_available() else [INSTALL_HINT])]
    listed = "".join(f"<li>{_words(note)}</li>" for note in notes)
    return f'<aside class="notes" aria-label="Notes"><ul>{listed}</ul></aside>' if notes else ""


def _headline(numbers: dict, leaps: dict | None, scores: dict) -> str:
    """Show the five most important numbers, each with its meaning; before them the score, if the run has one."""
    loss, steps, passes = numbers["final_loss"], numbers["steps"], numbers["backward_passes"]
    seconds, peak = numbers["seconds"], numbers["peak_memory"]
    trained = f"training {format_loss(loss['training'])}" if loss["training"] is not None else ""
    if loss["held_out"] is None:
        about = f"training, step {loss['training_step']:,}; no evaluation" if trained else "not recorded"
    else:
        about = "; ".join(filter(None, [f"held out, step {loss['held_out_step']:,}", trained]))
    value = loss["training"] if loss["held_out"] is None else loss["held_out"]
    cards = [
        ("Final loss", format_loss(value), about),
        ("Steps", f"{steps['total']:,}", f"of {steps['planned']:,} planned" if steps["planned"] else ""),
    ]
    if leaps:
        cards[1] = (*cards[1][:2], f"{steps['real']:,} real, {steps['predicted']:,} predicted")
    if passes["done"] is None:
        cards.append(("Backward passes", "–", "plain Trainer does not count them"))
    else:
        parts = (
            []
            if passes["avoided"] is None or not (leaps or passes["avoided"])
            else [f"{format_number(int(passes['avoided']))} avoided"]
        )
        parts += [f"to step {passes['step']:,}"] if passes["step"] < steps["total"] else []
        cards.append(("Backward passes", format_number(int(passes["done"])), "; ".join(parts)))
    cards.append(("Wall time", format_seconds(seconds["value"]), seconds["source"] or "not recorded"))
    if peak is None:
        cards.append(("Peak memory", "–", "not profiled"))
    else:
        whose = "device, allocated" if peak["where"] == "device" else "host, process"
        cards.append(("Peak memory", format_bytes(peak["bytes"]), f"{whose}; step {peak['step']:,}, {peak['phase']}"))
    if speed := numbers["tokens_per_second"]:
        tokens = "" if speed["tokens"] is None else f"{int(speed['tokens']):,} tokens"
        value = "–" if speed["value"] is None else format_number(speed["value"])
        cards.append(("Tokens per second", value, "; ".join(filter(None, (tokens, speed["source"])))))
    cards[:0] = [_score(score) for score in list(scores.values())[:1]]
    items = "".join(
        f'<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd><dd class="detail">{escape(detail)}</dd></div>'
        for label, value, detail in cards
    )
    return f'<dl class="headline">{items}</dl>'


def _score(score: dict) -> tuple[str, str, str]:
    """The card of an accuracy or a reward: the last of evaluations, or else of the training."""
    held_out, trained = score.get("held_out"), score.get("training")
    told = [f"held out, step {held_out['step']:,}"] if held_out else []
    if trained:
        value = "" if held_out is None else f" {format_loss(trained['last'])}"
        told.append(
            f"training{value or ', step ' + format(trained['step'], ',')}, at first {format_loss(trained['first'])}"
        )
    return score["name"], format_loss((held_out or trained or {}).get("last")), "; ".join(told)


def _samples(samples: Sequence[dict]) -> str:
    """Completions of the same prompts by step, the newest evaluation first."""
    rows = [
        (sample["step"], sample["prompt"], sample["completion"] + ("" if sample.get("ended") else " …"))
        for sample in sorted(samples, key=lambda sample: -sample["step"])
    ]
    table = _table(("step", "prompt", "completion"), rows, "Samples", words=True)
    told = "Written greedily at evaluations; … where the completion reached the most tokens of a sample."
    many = len(rows) > 12
    title = f"{len(rows):,} samples, the newest first"
    return _section("Samples", table and f'<p class="muted">{told}</p>', _folded(title, table) if many else table)


def _phases(phases: Sequence[dict]) -> str:
    rows, profiled = [], any(row["peak"] for row in phases)
    for row in phases:
        each = row["seconds"] / row["steps"] if row["seconds"] is not None and row["steps"] else None
        cells = [row["phase"], format_number(row["steps"]), format_seconds(row["seconds"]), format_seconds(each)]
        if profiled:
            most = row["peak"]["bytes"] if row["peak"] else None
            cells += [format_bytes(count) for count in (row["peak_mean"], row["peak_min"], most)]
        rows.append(cells)
    title = "Phases" if any(row["phase"] in PHASES for row in phases) else "Steps"
    headers = [
        "phase" if title == "Phases" else "",
        "steps",
        "time",
        "per step",
        *(["peak of a step: mean", "min", "max"] if profiled else []),
    ]
    return _section(title, _table(headers, rows, title))


def _leaps(summary: dict | None, leaps: Sequence[dict]) -> str:
    if not summary:
        return ""
    verdicts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in summary["by_verdict"].items())
    told = f"{summary['made']:,} leaps, {summary['accepted']:,} stayed in the weights: {verdicts}."
    if summary["mean_e"] is not None:
        told += f" The immediate gain of those that stayed was {format_number(summary['mean_e'])} real steps, "
        told += f"mean over the {summary['with_e']:,} that were probed."
    if summary["probe_cost_steps"] is not None:
        told += f" Probes cost {format_number(summary['probe_cost_steps'])} real steps of compute."
    names = ("gain", "horizon", "worth", "e", "loss_before", "loss_after", "cosine", "norm_ratio", "forecast_error")
    rows = [[leap["step"], leap.get("verdict"), *_cells(leap, names)] for leap in leaps[-MOST_ROWS:]]
    title = "Every leap" if len(rows) == summary["made"] else f"The last {len(rows)} leaps; leaps.csv has more"
    table = _table(("step", "verdict", *(name.replace("_", " ") for name in names)), rows, "Leaps")
    return _section("Leaps", f"<p>{escape(told)}</p>", _folded(title, table))


def _memory(memory: dict | None) -> str:
    if not memory:
        return ""
    floor = ""
    if memory.get("floor_bytes"):
        over = memory["achieved_over_floor"]
        told = f" The peak was {format_number(over)} times that." if over else ""
        floor = f"<p>Weights, gradients and states need {format_bytes(memory['floor_bytes'])} at least.{told}</p>"
    title = "Held between steps at the end of training"
    end = [
        (name, *(format_bytes(places[place]) for place in ("device", "host")))
        for name, places in (memory.get("held_at_the_end") or {}).items()
    ]
    ranks = [
        (f"process {rank}", format_bytes(peak["bytes"]), peak["where"], peak["step"])
        for rank, peak in (memory.get("peak_by_rank") or {}).items()
        if peak
    ]
    spikes = [
        (*_cells(spike, ("step", "phase")), *(format_bytes(number(spike.get(key))) for key in ("bytes", "usual")))
        for spike in memory.get("spikes") or []
    ]
    crashes = [
        (crash["step"], *_cells(crash, ("phase", "stage")), format_bytes(number(crash["requested"])),
         f"profile/{crash['folder']}", _cell(crash["error"]))
        for crash in memory.get("out_of_memory") or []
    ]  # fmt: skip
    columns = ("step", "phase", "while", "asked for", "folder", "error")
    return _section(
        "Memory",
        floor,
        *(_held(memory.get("categories_by_phase") or [], place) for place in ("device", "host")),
        _table(("", "device", "host"), end, title, caption=title),
        _table(("", "peak", "of", "step"), ranks, "Other processes", caption="Other processes"),
        _table(("step", "phase", "peak", "usual"), spikes, "Spikes", caption="Spikes", words=True),
        _table(columns, crashes, "Out-of-memory errors", caption="Out-of-memory errors", words=True),
    )


def _held(phases: Sequence[dict], place: str) -> str:
    """Bytes in one place: categories down, phases across."""
    names = dict.fromkeys(name for row in phases for name, held in row["categories"].items() if held[place])
    rows = [(name, *(row["categories"].get(name, {}).get(place, 0) for row in phases)) for name in names]
    rest = [row["unexplained"] if row["unexplained_place"] == place else None for row in phases]
    if any(count is not None for count in rest):
        rows.append(("unexplained", *rest))
    sums = [sum(count or 0 for count in column) for column in list(zip(*rows))[1:]]
    cells = [(name, *map(format_bytes, counts)) for name, *counts in [*rows, ("sum", *sums)]] if rows else []
    headers = ("", *(f"{row['phase']}, step {row['step']}" for row in phases))
    when = "where a phase held most" if any(row["phase"] in PHASES for row in phases) else "when most was held"
    return _table(headers, cells, f"Held on the {place}", caption=f"On the {place}, {when}")


def _recoveries(events: Sequence[dict]) -> str:
    names = ("step", "phase", "action", "from_size", "to_size", "error")
    headers = ("after step", "phase", "what was done", "sequences at once, before", "after", "error")
    table = _table(headers, [_cells(event, names) for event in events], "Recoveries", words=True)
    return _section("Recovered from out of memory", table)


def _displacement(rows: Sequence[dict]) -> str:
    cells = [(row["group"], int(row["leaps"]), *_cells(row, ("cosine", "norm_ratio"))) for row in rows]
    caption = "Means over the leaps: direction and length of what the real steps of Correct did, against the leap"
    table = _table(("", "leaps", "cosine", "norm ratio"), cells, caption, caption=caption)
    return _section("Displacement by kind of parameter", table and _folded(f"{len(rows)} kinds of parameters", table))


def _world_model(errors: dict) -> str:
    names = ("model", "persistence", "power_law")
    rows = [(ahead, *_cells(as_dict(found), names)) for ahead, found in errors.items()]
    caption = "Mean absolute error in the log loss"
    headers = ("stretches ahead", "world model", "persistence", "power law")
    return _section("Forecasts of the world model", _table(headers, rows, caption, caption=caption))


def _events(events: Sequence[dict], seen: int) -> str:
    names = ("step", "phase", "level", "action", "reason")
    rows = [_cells(event, names) for event in events[-MOST_ROWS:]]
    table = _table(names, rows, "Divergence events", words=True)
    if len(events) > 10:
        table = _folded(f"{seen:,} events" + (f", the last {len(rows)}" if seen > len(rows) else ""), table)
    return _section("Divergence events", table)


def _pairs(title: str, values: dict) -> str:
    table = _table((), list(values.items()), title, words=True)
    return _section(title, table and _folded(f"{len(values)} entries", table))
