"""
Draw the picture of the README from results.jsonl: final held-out loss against backward passes.

    python -m benchmarks.speedup.picture

Writes docs/images/speedup.png. Each dot is a whole run that ended there, with a learning-rate schedule of its own; the
grey line joins the means of plain `Trainer` (AdamW, its best learning rate) at several budgets.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.results import Results
from benchmarks.speedup.report import COLOURS, mean_curve, table_of
from benchmarks.speedup.run import KEY

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "speedup.png"
TITLES = {"code": "from scratch, source code", "docs": "fine-tuning, documentation"}
ARMS = {"hybrid": "HybridTrainer, defaults (AdamW)", "fast": 'HybridTrainer, preset="fast" (Muon, no leaps)'}


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = Results(Path(__file__).with_name("results.jsonl"), "speedup", KEY)
    figure, axes = pyplot.subplots(1, len(TITLES), figsize=(9.6, 3.8))
    for axis, (task, title) in zip(axes, TITLES.items()):
        table = table_of(results, task, list(ARMS), [0, 1, 2])
        steps, losses = zip(*mean_curve(table["plain"]))
        axis.plot(steps, losses, "o-", color=COLOURS["adamw"], label="plain Trainer (AdamW)", zorder=2)
        for arm, label in ARMS.items():
            runs = table["arms"][arm]["runs"]
            passes = [run["backward_passes"] for run in runs]
            ends = [run["eval_loss"] for run in runs]
            axis.scatter(passes, ends, s=34, color=COLOURS[arm], label=label, zorder=3)
        ours = table["arms"]["hybrid"]
        passes, loss = ours["backward_passes"], statistics.mean(run["eval_loss"] for run in ours["runs"])
        needed = ours["S"] * passes
        axis.annotate("", (needed, loss), (passes, loss), arrowprops={"arrowstyle": "->", "color": COLOURS["hybrid"]})
        middle = (needed * passes) ** 0.5
        axis.text(middle, loss, f"x {ours['S']:.2f}", color=COLOURS["hybrid"], ha="center", va="top")
        axis.set_xscale("log")
        axis.set_xticks(steps, [str(tick) for tick in steps])
        axis.minorticks_off()
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("backward passes of the whole run")
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("held-out loss at its end")
    axes[0].legend(frameon=False, fontsize=8.5)
    figure.tight_layout()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
