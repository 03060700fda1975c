"""Tables from benchmarks/world_model: forecasts of losses."""

from __future__ import annotations

from benchmarks.results import Row
from benchmarks.tables import losses, markdown, results, table


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
        others = [theirs[windows][name]["crps"]["mean"] for name in ("persistence", "power law", "ridge")]
        minus = row["minus"]["ridge"]["crps"]
        told = f"{minus['low']:.4f} to {minus['high']:.4f}"
        rows.append([row["real_steps"], f"**{row['crps']['mean']:.4f}** / {losses(others, 4)}", told])
    heading = ["real steps ahead", "CRPS: model / persistence / power law / ridge", "model minus ridge (95 %)"]
    return markdown(heading, rows)


@table("forecast-final-loss")
def forecast_final_loss() -> str:
    names = ("persistence", "power law", "past curves", "mixture of laws")
    stored, rows = results("world_model", "final_loss", "loss", "share"), []
    for group, words in (("all", ""), ("kinds never seen", ", kinds never seen")):
        for share in (0.1, 0.2, 0.5):
            row: Row = stored.get(loss="training", share=share)[group]
            cells = [*(f"{row['crps'][name]:.3f}" for name in names), f"**{row['crps']['both']:.3f}**"]
            cells += [interval(row["ratio_to_best"]), f"{100 * row['coverage']['both']:.1f} %"]
            rows.append([f"{100 * share:.0f} %{words}", row["runs"], *cells])
    heading = ["at", "runs", *names, "**both**", "both over the best baseline, 95 % interval"]
    return markdown([*heading, "coverage of the 90 % interval"], rows)
