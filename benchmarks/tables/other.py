"""Tables from benchmarks/export and sweep, and of long runs."""

from __future__ import annotations

from benchmarks.tables import markdown, percent, results, table

BITS = {"gguf-q5_1": "6.0", "gguf-q4_m": "5.4", "gguf-q4_0": "4.5", "nf4": "4.1"}
"""Bits of a weight of a linear layer with its scales, by the definition of the formats."""


def size(count: float) -> str:
    """`1.86 MiB`, `98.4 MiB`, `210 MiB`."""
    value = count / 2**20
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} MiB"


def exported(model: str, form: str) -> dict:
    return results("export", "formats", "model", "format").get(model=model, format=form)


def change(row: dict, digits: int = 2) -> str:
    return percent(row["loss_change"], digits)


@table("export-reordered")
def export_reordered() -> str:
    rows = []
    for form, bits in BITS.items():
        row = exported("reordered", form)
        found = row["exported"]
        rows.append([f"`{form}`", f"{found['loss']:.4f}", change(row), size(found["disk_bytes"]), bits])
    return markdown(["format", "held-out loss", "change", "on disk", "bits a weight"], rows)


@table("export-ternary")
def export_ternary() -> str:
    rows = []
    for arm, name in (("bitnet", "`--qat bitnet`"), ("fp32", "fp32, rounded afterwards")):
        row = results("export", "ternary", "arm").get(arm=arm)
        ends = [f"{row[key]['loss']:.4f}" for key in ("original", "exported")]
        rows.append([name, *ends, change(row, 4 if arm == "bitnet" else 2), size(row["exported"]["disk_bytes"])])
    return markdown(["training", "held-out loss", "packed", "change", "on disk"], rows)


PRUNERS = {
    "forecast": "`ForecastPruner`", "none": "none", "successive halving": "Optuna's successive halving",
}  # fmt: skip


def sweep_cell(task: str, pruner: str) -> str:
    found = results("sweep", "replay", "task", "seed", "pruner", "order").rows(task=task, pruner=pruner, order="search")
    found = sorted(found, key=lambda row: row["seed"])
    return ", ".join(f"{row['steps_percent']:.0f} % ({row['worse_percent']:.1f} %)" for row in found)


@table("sweeps")
def sweeps() -> str:
    tasks, rows = ("code", "docs", "lora", "smol-lora"), []
    for pruner, name in PRUNERS.items():
        rows.append([name, *(sweep_cell(task, pruner) for task in tasks)])
    return markdown(["pruner", *(f"`{task}`" for task in tasks)], rows)


def searched() -> list[dict]:
    """Searches with the forecast, over tasks and seeds."""
    return results("sweep", "replay", "task", "seed", "pruner", "order").rows(pruner="forecast", order="search")
