"""
A report on a run: one HTML file, its numbers as JSON, and a PNG for each plot.

The page has style and plots inside, no script, and loads nothing: its content policy forbids every request, so that it
opens offline and can be mailed. Whatever comes from files (names, options, reasons) is escaped.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import jinja2

from hf_hybrid.files import delete_temporaries, own_folder, plain, write_text
from hf_hybrid.records.readings import as_dict
from hf_hybrid.records.redaction import shareable
from hf_hybrid.records.summary import format_bytes, format_number, format_seconds, html_table
from hf_hybrid.report.findings import findings
from hf_hybrid.report.plots import plots_available, run_plots
from hf_hybrid.report.run_folder import load_run
from hf_hybrid.report.series import SCORES

logger = logging.getLogger(__name__)

INSTALL_HINT = 'Plots need matplotlib: pip install "hf-hybrid[report]", then make the report again.'
MOST_ROWS = 300
"""Rows of a table in the page."""
HERE = Path(__file__).parent


def write_report(folder: str | Path, output: str | Path | None = None) -> list[Path]:
    """
    Write a report on the `output_dir` of a run, which may have been killed or still be going on: `report.html`,
    `report.json`, and a PNG for each plot, in `output`, by default `report` in `folder`. Returns the files, the page
    first.

    Without matplotlib everything but the plots is written, and the page says how to get them.

    Raises:
        ValueError: If there is nothing in `folder` to report on, or the folder for the report is a file.
    """
    run = load_run(folder)
    values = shareable(findings(run))
    output = _output_folder(output, run.folder)
    plots, hints = [], []
    if plots_available():
        plots = run_plots(run, output)
    else:
        logger.warning(INSTALL_HINT)
        hints.append(INSTALL_HINT)
    files = [output / "report.html", output / "report.json", *(output / f"{plot.name}.png" for plot in plots)]
    goes_on = [
        one if one.get("ended") else {**one, "completion": f"{one['completion']} …"} for one in values["samples"]
    ]
    tables = {**values, "samples": goes_on}
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string((HERE / "page.html").read_text(encoding="utf-8")).render(
        {**values, "notes": [*values["notes"], *hints]},
        style=(HERE / "report.css").read_text(encoding="utf-8"),
        cards=_cards(values),
        plots=plots,
        sections={
            heading: [table for part in parts if (table := _table(tables, *part))]
            for heading, parts in _SECTIONS.items()
        },
    )
    write_text(files[0], page + "\n")
    values = {**values, "plots": [file.name for file in files[2:]]}
    write_text(files[1], json.dumps(plain(values), allow_nan=False) + "\n")
    return files


def _output_folder(named: str | Path | None, folder: Path) -> Path:
    """Make the folder of a report: the one that was named, or `report` below `folder`. `ValueError` if it is a file."""
    output = Path(named or folder / "report")
    if output.exists() and not output.is_dir():
        raise ValueError(f"`output` is `{output}`, which is a file. Name a folder.")
    if not named:
        own_folder(folder, "report")
    output.mkdir(parents=True, exist_ok=True)
    delete_temporaries(output)
    return output


def _format_loss(loss: float | None) -> str:
    """Four significant digits; an en dash for `None`."""
    return "–" if loss is None else f"{loss:#.4g}"


# Parts of the page of a run.


NUMBERS = (
    ("Eval loss", "headline.final_loss.held_out", _format_loss, "step", "headline.final_loss.held_out_step"),
    ("Best eval loss", "headline.final_loss.best_held_out", _format_loss, "", ""),
    ("Training loss", "headline.final_loss.training", _format_loss, "step", "headline.final_loss.training_step"),
    *(
        (f"{kind}{name}", f"scores.{key}.{place}", _format_loss, about, f"scores.{key}.{detail}")
        for key, name in SCORES
        for kind, place, about, detail in (
            ("Before training: ", "held_out.before", "", ""),
            ("Eval: ", "held_out.last", "best", "held_out.best"),
            ("", "training.last", "at first", "training.first"),
        )
    ),
    ("Steps", "headline.steps.total", format_number, "planned", "headline.steps.planned"),
    ("Predicted steps", "headline.steps.predicted", format_number, "", ""),
    ("Leaps", "leaps.made", format_number, "accepted", "leaps.accepted"),
    ("Backward passes", "headline.backward_passes.done", format_number, "to step", "headline.backward_passes.step"),
    ("Wall time", "headline.seconds.value", format_seconds, "", "headline.seconds.source"),
    ("Tokens/s", "headline.tokens_per_second.value", format_number, "", "headline.tokens_per_second.source"),
    ("Peak memory", "headline.peak_memory.bytes", format_bytes, "", "headline.peak_memory.where"),
)
"""The numbers of a run: label, place in the findings, how a value is shown, and a detail with its place."""


def _cards(values: dict) -> list[tuple[str, str, str]]:
    """Label, value and detail of the numbers that the run has. The loss of learning by rewards says nothing."""
    hidden = ["headline.final_loss"] if "reward" in values["scores"] else []
    hidden += [] if values["leaps"] else ["headline.steps.predicted"]
    cards = []
    for label, place, show, about, detail_place in NUMBERS:
        if (value := _at(values, place)) is not None and not place.startswith(tuple(hidden)):
            detail = _at(values, detail_place)
            cards.append((label, show(value), "" if detail is None else f"{about} {_cell('', detail)}".strip()))
    return cards


# Tables of the page of a run.

_CATEGORIES = ("weights", "gradients", "states", "activations", "drift", "buffers")
_PEAKS = " ".join(f"{peak}.{key}" for peak in ("peak_allocated", "peak_rss") for key in ("mean", "min", "max"))
_HELD = " ".join(f"accounted.held.{name}.{place}" for place in ("device", "host") for name in _CATEGORIES)
_BYTES = re.compile(r"(bytes|device|host|unexplained|measured|peak_\w+\.\w+)$")
"""Columns of bytes."""
_HEADINGS = {"name": " ", "phase": "kind", "from_size": "before", "to_size": "after"}
_SECTIONS = {
    "Savings": [("What was not computed", "savings", "name value")],
    "Samples": [
        ("Completions of prompts at evaluations, the newest first", "samples", "step prompt completion"),
    ],
    "Steps": [("Their phases", "phases", "name steps seconds")],
    "Leaps": [
        ("What became of them", "leaps.by_verdict", "name value"),
        ("The last leaps", "leap_records",
         "step verdict gain horizon worth e loss_before loss_after forecast_error"),
    ],
    "Memory": [
        ("Peaks within a step", "memory.by_phase", f"name records step_seconds.mean {_PEAKS}"),
        ("What they consist of, on average", "memory.by_phase", f"name {_HELD} accounted.unexplained"),
        ("Held between steps at the end of training", "memory.held_at_the_end", "name device host"),
    ],
    "Recovered from out of memory": [("Recoveries", "recoveries", "step phase action from_size to_size error")],
    "Divergence events": [("The last events", "events", "step phase level action reason")],
    "Environment": [("Of the last start", "environment", "name value")],
    "Options": [("Those that differ from the defaults", "options", "name value")],
}  # fmt: skip
"""Tables by section: caption, dotted place in the findings, and the columns, which are dotted places in a row."""


def _table(values: dict, caption: str, place: str, columns: str) -> dict[str, Any] | None:
    """A table for the page; `None` without rows. `words`: aligned to the left."""
    rows = _at(values, place) or []
    if isinstance(rows, dict):  # by name
        named = ((name, row if isinstance(row, dict) else {"value": row}) for name, row in rows.items())
        rows = [{"name": name, **row} for name, row in named]
    rows = rows[-MOST_ROWS:]
    if not rows:
        return None
    known = [column for column in columns.split() if any(_at(row, column) not in (None, 0) for row in rows)]
    cells = [[_cell(column, _at(row, column)) for column in known] for row in rows]
    headings = [_HEADINGS.get(column) or re.sub("[._]", " ", column.removeprefix("accounted.")) for column in known]
    html = html_table([] if known == ["name", "value"] else headings, cells, caption)
    words = not {"value", "completion", "error", "reason"}.isdisjoint(known)
    return {"caption": caption, "html": html, "words": words, "count": len(rows)}


def _at(entry: object, place: str) -> Any:
    """The value at a dotted place in plain values; `None` if there is none."""
    for key in place.split("."):
        entry = as_dict(entry).get(key)
    return entry


def _cell(column: str, value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        is_bytes, is_time = _BYTES.search(column), "seconds" in column
        return format_bytes(value) if is_bytes else format_seconds(value) if is_time else format_number(value)
    return "–" if value is None else str(value)
