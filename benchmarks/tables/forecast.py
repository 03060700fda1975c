"""Tables from benchmarks/world_model: forecasts of losses, and who judges leaps."""

from __future__ import annotations

from benchmarks.results import Row
from benchmarks.tables import losses, markdown, results, table

JUDGES = {
    "linear trend of 32 losses": "line through 32 losses (the default)", "level of 32 losses": "level of 32 losses",
    "linear trend of 64 losses": "line through 64 losses", "world model": "world model",
}  # fmt: skip


def interval(found: dict, digits: int = 3) -> str:
    return f"{found['mean']:.{digits}f} ({found['low']:.{digits}f} to {found['high']:.{digits}f})"


@table("forecast-world-model")
def forecast_world_model() -> str:
    ours = results("world_model", "forecast", "arm").get(arm="start weights, fixed")["horizons"]
    theirs = results("world_model", "baselines").get()["horizons"]
    rows = []
    for windows, row in ours.items():
        if windows not in ("1", "5", "20"):
            continue
        cells = []
        for score, digits in (("crps", 4), ("nll", 2)):
            others = [theirs[windows][name][score]["mean"] for name in ("persistence", "power law", "ridge")]
            cells.append(f"**{row[score]['mean']:.{digits}f}** / {losses(others, digits)}")
        minus = row["minus"]["ridge"]["crps"]
        told = f"{minus['low']:.4f} to {minus['high']:.4f}"
        rows.append([row["real_steps"], row["runs"], *cells, told, f"{row['calibration']['ece']:.3f}"])
    heading = ["real steps ahead", "runs", "CRPS: model / persistence / power law / ridge", "NLL, same order"]
    return markdown([*heading, "CRPS, model minus ridge (95 %)", "calibration error"], rows)


@table("forecast-judges")
def forecast_judges() -> str:
    rows, stored = [], results("world_model", "judge", "judge")
    for judge, name in JUDGES.items():
        row = stored.get(judge=judge)
        caught = [f"{row['2'][rise]['caught'][0]:.3f}" for rise in ("1%", "2%", "5%", "10%")]
        _, low, high = row["2"]["10%"]["more"]
        more = f"{low:.3f} to {high:.3f}" if low or high else ""
        until = row["until"]["10%"]
        told = f"{until:.0f}" if until else "more than 16"
        cost = row["ms_per_case"]
        rows.append([name, *caught, more, told, f"{cost:.2f}" if cost < 1 else f"{cost:.0f}"])
    heading = ["judge", "raised by 1 %", "2 %", "5 %", "10 %", "10 %, minus the first line (95 %)"]
    return markdown([*heading, "steps until caught", "ms per leap"], rows)


@table("forecast-final-loss")
def forecast_final_loss() -> str:
    names = ("persistence", "power law", "annealing law", "multi-power law", "past curves", "mixture of laws")
    stored, rows = results("world_model", "final_loss", "loss", "share"), []
    for group, words in (("all", ""), ("kinds never seen", ", kinds never seen")):
        for share in (0.1, 0.2, 0.5):
            row: Row = stored.get(loss="training", share=share)[group]
            cells = [*(f"{row['crps'][name]:.3f}" for name in names), f"**{row['crps']['both']:.3f}**"]
            cells += [interval(row["ratio_to_best"]), f"{100 * row['coverage']['both']:.1f} %"]
            rows.append([f"{100 * share:.0f} %{words}", row["runs"], *cells])
    heading = ["at", "runs", *names, "**both**", "both over the best baseline, 95 % interval"]
    return markdown([*heading, "coverage of the 90 % interval"], rows)
