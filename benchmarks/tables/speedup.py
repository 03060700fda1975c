"""Tables from benchmarks/speedup: leaps, learning rates, and a pretrained model."""

from __future__ import annotations

import math
import statistics

from benchmarks.results import Row
from benchmarks.speedup.elsewhere import KEY as ELSEWHERE_KEY
from benchmarks.speedup.elsewhere import STEPS, Table, relative
from benchmarks.speedup.report import table_of
from benchmarks.speedup.run import KEY
from benchmarks.speedup.tasks import TASKS
from benchmarks.tables import (
    all_lines,
    between,
    losses,
    markdown,
    percent,
    rate,
    results,
    standard_error,
    table,
    with_error,
)

SEEDS = [0, 1, 2]


def speedup():
    return results("speedup", "speedup", *KEY)


def runs(task: str, arm: str, at: float, steps: int | None = None, gpu: bool = False) -> list[Row]:
    """The runs of an arm at a learning rate, by seed."""
    stored = results("speedup", "speedup_gpu", *KEY) if gpu else speedup()
    found = [row for row in stored.rows(task=task, arm=arm) if math.isclose(row["rate"], at, rel_tol=1e-6)]
    steps = steps or TASKS[task].steps
    return sorted((row for row in found if row["steps"] == steps), key=lambda row: row["seed"])


def of_seeds(found: list[Row], name: str = "eval_loss", digits: int = 3, sep: str = " / ") -> str:
    return losses([row[name] for row in found if row["seed"] in SEEDS], digits, sep)


def bound(row: dict) -> str:
    return "> " if any(run["how"] == "beyond" for run in row["runs"]) else ""


def s_of(row: dict, key: str = "S") -> str:
    """S with its standard error, and `>` where plain training does not get there."""
    values = [run[key] for run in row["runs"]]
    if all(math.isclose(value, 1.0, rel_tol=1e-9) for value in values):
        return "1"
    if bound(row):
        return f"> {statistics.fmean(values):.1f}"
    digits = 3 if len(values) > 1 and standard_error(values) < 0.0095 else 2
    return with_error(values, digits)


def arm_cells(row: dict) -> list[str]:
    """Losses, backward passes, S, all costs."""
    ends = losses(run["eval_loss"] for run in row["runs"])
    return [
        ends,
        f"{row['backward_passes']:.0f}",
        s_of(row),
        f"{bound(row)}{row['S_all_costs']:.{1 if bound(row) else 2}f}",
    ]


ARMS = {
    "adamw": "AdamW", "hybrid": "**hybrid**", "none": '`direction="none"` (frozen control)', "muon": '`optim="muon"`',
    "fast": '**`preset="fast"`**',
}  # fmt: skip


@table("leaps-tasks")
def leaps_tasks() -> str:
    rows = []
    for task in ("code", "small", "docs", "lora"):
        arms = table_of(speedup(), task, list(ARMS), SEEDS)["arms"]
        for arm, name in ARMS.items():
            if arm in arms:
                row = arms[arm]
                told = f"{name}, {rate(row['rate'])}"
                over = "" if arm == "adamw" else percent(row["over_plain"])
                rows.append(["" if arm != "adamw" else f"`{task}`", told, *arm_cells(row), over])
    heading = ["task", "arm, best rate", "held-out loss by seed", "backward passes", "S", "all costs"]
    return markdown([*heading, "loss over AdamW at equal `max_steps`"], rows)


def elsewhere() -> Table:
    return Table(results("speedup", "elsewhere", *ELSEWHERE_KEY), SEEDS)


@table("leaps-elsewhere")
def leaps_elsewhere() -> str:
    found, rows, others = elsewhere(), [], {}
    for optim in dict.fromkeys(row["optim"] for row in found.results.rows()):
        for steps in STEPS:
            best, _ = found.best_rate(optim, steps)
            for at in found.rates(optim, best) if best else []:
                pairs, verdicts = found.pairs(optim, steps, at)
                if not pairs:
                    continue
                if optim != "adamw_torch":
                    others.setdefault(optim, []).extend(pairs)
                    assert not verdicts, optim
                    continue
                over = relative(pairs)
                mean = f"{statistics.fmean(over):+.2f} +- {standard_error(over):.2f} %"
                rows.append([steps, f"{at:.3g}, {at / best:g}", mean])
    equal = all(plain == hybrid for pairs in others.values() for plain, hybrid in pairs)
    assert equal, "without leaps a run is plain `Trainer`'s"
    return markdown(["steps", "rate, over the best", "difference"], rows)


def elsewhere_s() -> list[float]:
    """S after the longest run at AdamW's best rate, by seed."""
    best, _ = elsewhere().best_rate("adamw_torch", STEPS[-1])
    values, ways = zip(*elsewhere().speed_ups(best))
    assert len(values) == len(SEEDS) and set(ways) == {"interpolated"}, ways
    return list(values)


OTHERS = {
    '`direction="gradient_memory"`': "gradient_memory", '`planner="dynamics"`': "planner-dynamics",
    '`planner="bandit"`': "planner-bandit", "control: random direction of equal norm": "random",
    "control: lines through a shuffled history": "shuffled", "control: line search alone": "line-search",
}  # fmt: skip


@table("leaps-arms")
def leaps_arms() -> str:
    found = {task: table_of(speedup(), task, None, SEEDS)["arms"] for task in ("code", "docs")}
    rows = [[name, *(s_of(found[task][arm]) for task in found)] for name, arm in OTHERS.items()]
    return markdown(["", "S on `code`", "S on `docs`"], rows)


PREDICTORS = {
    "lines through past weights": "linear", "the average of past displacements (EMA-Nesterov)": "drift", "SNOO": "snoo",
    "reduced rank extrapolation": "rre", "NiNo, a published network": "nino",
    "control: a random direction of the same length": "random",
    "the default: the last ten gradients, orthogonalised": "hybrid",
}  # fmt: skip


@table("why-predictors")
def why_predictors() -> str:
    found = {task: table_of(speedup(), task, None, SEEDS)["arms"] for task in ("code", "docs")}
    rows = [[name, *(f"{found[task][arm]['S']:.2f}" for task in found)] for name, arm in PREDICTORS.items()]
    return markdown(["leaps along", "S, from scratch (`code`)", "S, fine-tuning (`docs`)"], rows)


@table("leaps-overhead")
def leaps_overhead() -> str:
    last = {row["arm"]: row for row in all_lines("speedup", "overhead")}
    off, rows = last["disabled"], []
    ratio = off["ratio"]
    told = f"{ratio['median']:.3f} ({ratio['least']:.3f} to {ratio['most']:.3f})"
    rows.append([f"`enable_predict=False` over plain `Trainer`, CPU seconds of a step, {off['rounds']} pairs", told])
    for arm, name in (
        ("hybrid", "a default run of 300 steps: the package's own work over the rest of the run"),
        ("rejected", "the same with every leap turned uphill and rejected"),
        ("pretrained", "a default run of 10 steps on SmolLM2 (`smol-full`), which makes no leaps"),
    ):
        row = last[arm]
        probes = f"; probes worth {row['probe_cost_steps']:.1f} steps" if row["probe_cost_steps"] else ""
        digits = 2 if row["share"] < 0.01 else 1
        rows.append([name, f"{row['own_seconds']:.2f} s, {100 * row['share']:.{digits}f} %{probes}"])
    return markdown(["", "measured"], rows)


# Learning rates.

ADAPTERS = [  # (task, name, on a GPU)
    ("lora", "rank 8, alpha 16, width 128", False),
    ("smol-lora-long", "rank 16, alpha 32", True),
    ("smol-lora-r8", "rank 8, alpha 8", True),
    ("smol-lora-r64", "rank 64, alpha 16", True),
    ("smol-c-lora", "rank 16, alpha 32, other text", True),
]


def default_runs(task: str, gpu: bool) -> tuple[list[Row], tuple[float, float]]:
    """Runs at the rule's rate, and AdamW's best loss with its rate (seed 0)."""
    stored = results("speedup", "speedup_gpu", *KEY) if gpu else speedup()
    default = {"lora": "lora-default", "smol-lora-long": "smol-lora-default"}.get(task, f"{task}-default")
    rule = sorted(stored.rows(task=default, arm="rule"), key=lambda row: row["seed"])
    plain = [row for row in stored.rows(task=task, arm="adamw", steps=200, seed=0) if row["eval_loss"] is not None]
    return rule, min((row["eval_loss"], row["rate"]) for row in plain)


@table("rates-adapters")
def rates_adapters() -> str:
    rows = []
    for task, shape, gpu in ADAPTERS:
        rule, (best, best_rate) = default_runs(task, gpu)
        mean = statistics.fmean(row["eval_loss"] for row in rule)
        used = f"{rate(rule[0]['rate_used'])}: {of_seeds(rule)}, {mean:.3f}"
        rows.append([f"`{task}`", shape, used, f"{best:.3f} ({rate(best_rate)})"])
    return markdown(["task", "adapters", "rule: rate, loss by seed, mean", "AdamW, seed 0, at its best rate"], rows)


@table("rates-dpo")
def rates_dpo() -> str:
    rows = []
    for task, arm, name, at, used in (
        ("dpo", "adamw", "AdamW", 5e-4, 5e-4),
        ("dpo", "adamw", "", 1e-3, 1e-3),
        ("dpo", "adamw", "", 2e-3, 2e-3),
        ("dpo", "adamw", "", 4e-3, 4e-3),
        ("dpo-default", "hybrid", "**hybrid, from TRL's default of 1e-6**", 1e-6, 2.25e-3),
    ):
        found = runs(task, arm, at, 200)
        if at in (5e-4, 1e-3):
            found = found[:1]
        accuracy = losses((row["accuracy"] for row in found), 2, ", ")
        rows.append([name, rate(used), of_seeds(found), accuracy])
    return markdown(["arm", "peak rate", "held-out loss by seed", "accuracy"], rows)


@table("rates-fast")
def rates_fast() -> str:
    rows = []
    for task, best in (("code", 1.5e-3), ("small", 3e-3), ("docs", 4e-3)):
        stored = {row["rate"]: row for row in speedup().rows(task=task, arm="fast", seed=0)}
        cells = []
        for factor in (0.25, 0.5, 1, 2):
            found = [row for at, row in stored.items() if math.isclose(at, best * factor, rel_tol=0.01)]
            cells.append(f"{found[0]['eval_loss']:.3f}" if found else "")
        row = table_of(speedup(), task, ["fast"], SEEDS)["arms"]["fast"]
        rows.append([f"`{task}`", rate(best), *cells[:2], f"**{cells[2]}**", cells[3], s_of(row)])
    heading = ["task", "AdamW's best", "`fast` at a quarter of it", "half", "**the same**", "twice"]
    return markdown([*heading, "S at the same, three seeds"], rows)


# A pretrained model.

SMOL = {
    "smol-full": [
        ("AdamW", "adamw", 1e-4, 40), ("**hybrid** (makes no leaps)", "hybrid", 1e-4, 40),
        ("`orthogonal-often`", "orthogonal-often", 1e-4, 40), ("AdamW, `adam_beta1=0.7`", "beta1-0.7", 1e-4, 40),
        ("`fast`", "fast", 1e-4, 40),
    ],
    "smol-lora": [
        ("AdamW", "adamw", 1.4e-3, 40), ("**hybrid** (makes no leaps)", "hybrid", 1.4e-3, 40),
        ("`orthogonal-often`", "orthogonal-often", 2e-3, 40), ("AdamW, `adam_beta1=0.7`", "beta1-0.7", 2e-3, 40),
        ("`fast` with Muon", "fast-muon", 5.6e-3, 40),
    ],
    "smol-dpo": [
        ("AdamW", "adamw", 5e-4, 40), ("**hybrid** (makes no leaps, shares prompts)", "hybrid", 5e-4, 40),
        ("`orthogonal-often`", "orthogonal-often", 5e-4, 40),
    ],
}  # fmt: skip


@table("pretrained-tasks")
def pretrained_tasks() -> str:
    rows = []
    for task, arms in SMOL.items():
        for number, (name, arm, at, steps) in enumerate(arms):
            found = [row for row in runs(task, arm, at, steps) if row["seed"] in SEEDS]
            loss = of_seeds(found)
            if task == "smol-dpo":
                loss += f" (accuracy {losses((row['accuracy'] for row in found), 2, ', ')})"
            passes = between([row["summary"]["backward_passes"] for row in found])
            seconds = between([row["cpu_seconds"] for row in found])
            first = "" if number else f"`{task}`"
            rows.append([first, f"{name}, {rate(at)}", loss, of_seeds(found, "other_loss", 3, ", "), passes, seconds])
    heading = ["task", "arm, rate", "held-out loss", "other text", "backward passes", "CPU seconds"]
    return markdown(heading, rows)


@table("experts")
def experts() -> str:
    """Losses of each arm after 400 steps at its best rate, and how far they are from AdamW's, seed by seed."""
    told = {
        "adamw": "AdamW",
        "fast": '`preset="fast"`',
        "fast-whole": "the same, experts by AdamW",
        "leaps": "leaps under AdamW",
        "leaps-whole": "the same, experts along the average gradient",
    }
    rows, found = [], results("speedup", "experts", "model", "arm", "steps", "rate", "seed")
    for kind in ("mixtral", "qwen3_moe"):
        plain: list[float] = []
        for arm, words in told.items():
            runs = [row for row in found.rows(model=kind, arm=arm, steps=400) if row["eval_loss"] is not None]
            if not runs:
                continue
            best = min((row for row in runs if row["seed"] == 0), key=lambda row: row["eval_loss"])["rate"]
            at_best = sorted((row for row in runs if row["rate"] == best), key=lambda row: row["seed"])
            ends = [row["eval_loss"] for row in at_best]
            plain = plain or ends
            apart = [ours / theirs - 1 for ours, theirs in zip(ends, plain)]
            over = "" if arm == "adamw" else f"{percent(statistics.fmean(apart))} +- {100 * standard_error(apart):.1f}"
            name = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3-MoE"}[kind]
            rows.append([name if arm == "adamw" else "", words, rate(best), over])
    return markdown(["model", "trained by", "best rate", "loss over AdamW's, three seeds"], rows)
