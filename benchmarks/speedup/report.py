"""
Tables and plots of the speed-up benchmark, from the lines of its runs.

The question is what a lower loss is worth in backward passes. Plain AdamW is run at several budgets, each run with a
complete schedule, so that its losses form a curve: loss against steps. An arm's final loss is looked up on that curve;
the steps found there, over the backward passes that the arm made, are its speed-up S.

Two runs of the same seed share their first weights and the order of their data, so that their losses differ less than
those of two seeds. Therefore each run of an arm is paired with the plain run of its seed at the same budget, and the
difference of the two, not the loss itself, is put on the mean curve. Between budgets the curve is a straight line in
the logarithm of the steps. Above the shortest run it is extrapolated; below the longest run it is not: there S is a
lower bound, shown as ">". Where chance moves the loss by more than the steps do, so that the curve does not fall, there
is no S.

An arm counts at the learning rate at which most seeds were run, and of several such rates at the one with the lowest
mean loss.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from benchmarks.results import Results
from benchmarks.speedup.tasks import TASKS


def matched_steps(loss: float, curve: list[tuple[int, float]]) -> tuple[float, str]:
    """
    Steps at which a plain curve of `(steps, final loss)` reaches `loss`: straight lines in log steps.

    Returns:
        The steps, and `"interpolated"`, `"extrapolated"` (above the shortest run), or `"beyond"` (the longest run does
        not get there: a lower bound). NaN and `"not monotone"` if the curve does not fall from the shortest run to its
        lowest loss; after that it may rise, because long runs overfit.
    """
    points = sorted(curve)
    levels = [level for _, level in points]
    falling = levels[: levels.index(min(levels)) + 1]
    if len(falling) < 2 or falling != sorted(falling, reverse=True):
        return math.nan, "not monotone"
    for (t0, l0), (t1, l1) in zip(points, points[1:]):
        if l1 <= loss <= l0:
            share = (l0 - loss) / (l0 - l1) if l0 > l1 else 0.0
            return math.exp(math.log(t0) + share * math.log(t1 / t0)), "interpolated"
    if loss < min(levels):
        return float(points[-1][0]), "beyond"
    (t0, l0), (t1, l1) = points[:2]
    return math.exp(math.log(t0) - (loss - l0) * math.log(t1 / t0) / (l0 - l1)), "extrapolated"


def mean_curve(plain: dict[int, dict[int, float]]) -> list[tuple[int, float]]:
    """
    Plain loss by steps, mean over seeds.

    A seed that was not run at a budget is filled in by the mean difference between seeds at the budgets they share, so
    that a lucky seed does not bend the curve.

    Args:
        plain (`dict`): steps -> seed -> final loss.
    """
    seeds = sorted({seed for losses in plain.values() for seed in losses})
    full = [losses for losses in plain.values() if set(losses) == set(seeds)]
    offset = {
        s: statistics.mean(row[s] - statistics.mean(row.values()) for row in full) if full else 0.0 for s in seeds
    }
    return sorted(
        (steps, statistics.mean(loss - offset[seed] for seed, loss in losses.items()))
        for steps, losses in plain.items()
    )


def cost_of(result: dict) -> dict[str, float]:
    """Costs of a run in steps: backward passes, probes, arithmetic of leaps and of Muon, and their sum."""
    names = ("backward_passes", "probe_cost_steps", "leap_cost_steps", "optimizer_cost_steps")
    costs = {name: result["summary"][name] for name in names}
    return {**costs, "total": sum(costs.values())}


def arm_row(results: list[dict], plain: dict[int, dict[int, float]], steps: int) -> dict:
    """
    One arm at one learning rate against the plain curve.

    Each seed is paired with the plain run of that seed at the same budget: the difference is put on the mean curve.

    Args:
        results (`list[dict]`): Runs of the arm at budget `steps`, one per seed.
        plain (`dict`): Of plain AdamW at its best learning rate: steps -> seed -> final loss.
        steps (`int`): The budget at which seeds are paired. Without a plain run there is no S.
    """
    curve = mean_curve(plain)
    level, paired = dict(curve).get(steps, math.nan), plain.get(steps)
    rows = []
    for result in sorted(results, key=lambda r: r["seed"]):
        if (paired and result["seed"] not in paired) or not math.isfinite(result["eval_loss"]):
            continue
        with_plain = paired[result["seed"]] if paired else math.nan
        difference = result["eval_loss"] - with_plain
        matched, how = matched_steps(level + difference, curve) if paired else (math.nan, "not monotone")
        cost = cost_of(result)
        rows.append(
            {
                "seed": result["seed"],
                "eval_loss": result["eval_loss"],
                "over_plain": difference / with_plain,
                "S": matched / cost["backward_passes"],
                "S_all_costs": matched / cost["total"],
                "how": how,
                "seconds": result["seconds"],
                **cost,
            }
        )
    if not rows:
        return {"runs": []}
    table = {"runs": rows}
    for key in ("S", "S_all_costs", "over_plain", "backward_passes", "seconds"):
        values = [row[key] for row in rows]
        table[key] = statistics.mean(values)
        if len(values) > 1 and all(map(math.isfinite, values)):
            table[f"{key}_standard_error"] = statistics.stdev(values) / math.sqrt(len(values))
    return table


def pace(results: list[dict], tuned: dict[int, dict[int, float]]) -> dict:
    """
    Steps that plain AdamW at its best learning rate needs for the mean loss of these runs, over their backward passes.

    The mean loss is looked up, not each loss: where the curve is flat, seeds differ by more than its whole fall.

    Args:
        results (`list[dict]`): Runs of the arm, one per seed.
        tuned (`dict`): Of plain AdamW: steps -> seed -> final loss.
    """
    steps, how = matched_steps(statistics.mean(result["eval_loss"] for result in results), mean_curve(tuned))
    backward_passes = statistics.mean(cost_of(result)["backward_passes"] for result in results)
    return {"pace": steps / backward_passes, "pace_how": how}


def plain_losses(results: Results, task: str, seeds: list[int]) -> dict[int, dict[int, float]]:
    """Collect plain AdamW's final losses: steps -> seed -> the best over learning rates."""
    found: dict[int, dict[int, float]] = {}
    for row in results.rows(task=task, arm="adamw"):
        if row["seed"] in seeds and row["eval_loss"] is not None:
            losses = found.setdefault(row["steps"], {})
            losses[row["seed"]] = min(row["eval_loss"], losses.get(row["seed"], math.inf))
    return dict(sorted(found.items()))


def table_of(results: Results, task: str, arms: list[str] | None, seeds: list[int]) -> dict | None:
    """
    Arms of a task at their best rates, those that are no longer offered included.

    Args:
        results (`Results`): Of the benchmark `speedup`.
        task (`str`): Name of the task.
        arms (`list[str]`, *optional*): Which; all that were run by default.
        seeds (`list[int]`): Which.

    Returns:
        `None` while plain AdamW has no curve.
    """
    steps, plain = TASKS[task].steps, plain_losses(results, task, seeds)
    tuned = {} if TASKS[task].tuned is True else plain_losses(results, TASKS[task].tuned, seeds)
    if len(tuned) < 2 and (steps not in plain or len(plain) < 2):
        return None
    table = {"task": task, "about": TASKS[task].about, "steps": steps, "plain": plain, "arms": {}}
    by_arm: dict[str, list[dict]] = {}
    for row in results.rows(task=task, steps=steps):
        if row["seed"] in seeds and (arms is None or row["arm"] in arms):
            by_arm.setdefault(row["arm"], []).append(row)
    for arm, rows in by_arm.items():
        best = better_rate([row for row in rows if row["eval_loss"] is not None])
        found = arm_row(best, plain, steps)
        if best and len(tuned) > 1:
            found |= pace(best, tuned)
        table["arms"][arm] = {"rate": (best or rows)[0]["rate"], **found}
    return table


def better_rate(results: list[dict]) -> list[dict]:
    """Choose the learning rate with the most seeds, and of several such rates the one with the lowest mean loss."""
    by_rate: dict[float, list[dict]] = {}
    for result in results:
        by_rate.setdefault(result["rate"], []).append(result)
    return min(
        by_rate.values(),
        key=lambda some: (-len(some), statistics.mean(result["eval_loss"] for result in some)),
        default=[],
    )


def print_table(table: dict) -> None:
    """Print the arms of a task, the best first."""
    print(f"\n{table['task']}: {table['about']}; {table['steps']} steps")
    for steps, losses in sorted(table["plain"].items(), key=lambda item: int(item[0])):
        print(f"  adamw, {steps} steps: " + "  ".join(f"{loss:.4f}" for _, loss in sorted(losses.items())))
    print(f"  {'arm':16s} {'rate':>8s}  n   S              all costs    loss over adamw   backward  losses")
    no_curve = any(run["how"] == "not monotone" for row in table["arms"].values() for run in row["runs"])
    if no_curve:
        print("  No S: AdamW was not run at two budgets, or its loss does not fall from one to the next.")
    best_first = (lambda row: row.get("over_plain", math.inf)) if no_curve else (lambda row: -row.get("S", 0.0))
    for arm, row in sorted(table["arms"].items(), key=lambda item: best_first(item[1])):
        if not row["runs"]:
            print(f"  {arm:16s} {row['rate']:8.2g}  0   diverged or not finite")
            continue
        bound = ">" if any(r["how"] == "beyond" for r in row["runs"]) else " "
        error = row.get("S_standard_error", math.nan)
        speed_up = f"{bound}{row['S']:.3f} +- {error:.3f}  {row['S_all_costs']:.3f}"
        over = "" if math.isnan(row["over_plain"]) else f"{row['over_plain']:+.2%}"
        print(
            f"  {arm:16s} {row['rate']:8.2g}  {len(row['runs'])}  {'none' if no_curve else speed_up:23s}      "
            f"{over:>7s}          {row['backward_passes']:5.0f}     "
            + " ".join(f"{r['eval_loss']:.3f}" for r in row["runs"])
            + (f"  pace {row['pace']:.2f} ({row['pace_how']})" if "pace" in row else "")
        )


IN_CURVES = {"hybrid": None, "muon": None, "fast": None, "beta1-0.7": "adamw", "hybrid-beta1-0.7": "hybrid"}
"""Arms drawn beside the plain curve. One that differs from another by an option is hollow, in the other's colour."""
COLOURS = {"adamw": "#444444", "hybrid": "#0b6e99", "muon": "#c26a00", "fast": "#2a7d2e"}


def plot_curves(tables: list[dict], path: Path) -> None:
    """Draw the plain curve with a band of one standard deviation over seeds, and the final losses of the arms."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tables = [table for table in tables if len(table["plain"]) > 1]
    if not tables:
        return
    figure, axes = pyplot.subplots(1, len(tables), figsize=(5.2 * len(tables), 4.4), squeeze=False)
    for axis, table in zip(axes[0], tables):
        plain = {int(steps): losses for steps, losses in table["plain"].items()}
        curve = mean_curve(plain)
        steps, losses = zip(*curve)
        spread = [statistics.stdev(plain[s].values()) if len(plain[s]) > 1 else 0.0 for s in steps]
        axis.plot(steps, losses, "o-", color=COLOURS["adamw"], label="AdamW, best rate")
        low, high = [m - d for m, d in zip(losses, spread)], [m + d for m, d in zip(losses, spread)]
        axis.fill_between(steps, low, high, color=COLOURS["adamw"], alpha=0.15, linewidth=0)
        for arm, like in IN_CURVES.items():
            row = table["arms"].get(arm)
            if not row or not row["runs"]:
                continue
            cost = [r["total"] for r in row["runs"]]
            loss = [r["eval_loss"] for r in row["runs"]]
            colour = COLOURS[like or arm]
            face = "none" if like else colour
            axis.scatter(cost, loss, s=28, edgecolors=colour, facecolors=face, label=arm, zorder=3)
        axis.set_xscale("log")
        ticks = sorted(set(steps))
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel("all costs, in backward passes of a step")
        axis.set_ylabel("held-out loss at the end of the run")
        axis.set_title(table["task"])
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_speedups(tables: list[dict], path: Path) -> None:
    """Draw S of every arm with its standard error, one panel per task."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tables = [table for table in tables if table["arms"]]
    if not tables:
        return
    height = max(len(table["arms"]) for table in tables)
    figure, axes = pyplot.subplots(1, len(tables), figsize=(4.6 * len(tables), 1.2 + 0.32 * height), squeeze=False)
    for axis, table in zip(axes[0], tables):
        arms = sorted(
            (item for item in table["arms"].items() if item[1]["runs"]), key=lambda item: item[1]["S_all_costs"]
        )
        values = [row["S_all_costs"] for _, row in arms]
        errors = [row.get("S_all_costs_standard_error", 0.0) for _, row in arms]
        colours = [COLOURS.get(arm, "#9aa5b1") for arm, _ in arms]
        axis.barh(range(len(arms)), values, xerr=errors, color=colours, height=0.7, error_kw={"lw": 1})
        axis.set_yticks(range(len(arms)), [arm for arm, _ in arms], fontsize=9)
        axis.set_ylim(len(arms) - height - 0.6, len(arms) - 0.4)  # bars as thick in every panel
        axis.axvline(1.0, color="black", lw=1)
        axis.set_xlabel("S over AdamW, all costs counted")
        axis.set_title(table["task"])
        axis.grid(axis="x", alpha=0.25)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
