"""Tables from benchmarks/skips, and of recomputation: what SFT, DPO and GRPO save."""

from __future__ import annotations

import statistics

from benchmarks.memory.recomputation import STREAMED
from benchmarks.skips.rewards import KEY as RUN_KEY
from benchmarks.skips.rewards import PARTS
from benchmarks.skips.rows import ratio
from benchmarks.tables import all_lines, losses, markdown, results, table

KINDS = [  # (kind, model, order, words)
    ("system", "smollm2", "shuffled", "a system prompt of 300 tokens and short turns"),
    ("system", "fifth", "shuffled", "the same"),
    ("unrolled", "fifth", "kept", "chats of 4 turns, a row per answer, conversations together"),
    ("unrolled", "fifth", "shuffled", "the same, shuffled"),
    ("answers", "fifth", "kept", "4 answers to each question, together"),
    ("answers", "fifth", "shuffled", "the same, shuffled"),
    ("agent", "fifth", "kept", "agents' rows: tools, tasks, trajectories, actions, together"),
    ("agent", "fifth", "shuffled", "the same, shuffled"),
    ("agent", "mixture", "kept", "the same, together"),
    ("agent", "mixture", "shuffled", "the same, shuffled"),
    ("agent", "states", "kept", "the same, together"),
    ("agent", "states", "shuffled", "the same, shuffled"),
    ("trajectories", "fifth", "shuffled", "agents' long trajectories, 3 % learned, shuffled"),
    ("instructions", "smollm2", "shuffled", "instructions as long as Alpaca's, nothing shared"),
    ("instructions", "fifth", "shuffled", "the same"),
    ("full", "fifth", "shuffled", "equal length, all learned"),
]
THEIRS = {
    "trainer": "`Trainer`", "by_length": "`group_by_length`", "trl": "TRL", "trl_packing": "TRL, `packing`",
    "trl_padding_free": "TRL, `padding_free`",
}  # fmt: skip


def measured_beside(model: str, order: str, kind: str, arm: str) -> tuple[dict, dict]:
    """
    A run of `arm` and ours that was made in the same call of the benchmark.

    Seconds compare only within a call. Some arms were measured a day after the others, with an own run of ours beside.
    """
    where = {"model": model, "trains": "adapters", "order": order, "kind": kind}
    found = [row for row in all_lines("skips", "rows") if all(row[name] == value for name, value in where.items())]
    theirs = [row for row in found if row["arm"] == arm]
    if not theirs:
        return {}, {}
    ours = [row for row in found if row["arm"] == "hybrid"]
    same = [row for row in ours if row["command"] == theirs[-1]["command"]]
    return theirs[-1], (same or ours)[-1]


def row_ratio(model: str, order: str, kind: str, arm: str) -> float | None:
    theirs, ours = measured_beside(model, order, kind, arm)
    return ratio(theirs, ours) if theirs else None


@table("sft-rows")
def sft_rows() -> str:
    rows = []
    for kind, model, order, words in KINDS:
        cells = [row_ratio(model, order, kind, arm) for arm in THEIRS]
        _, ours = measured_beside(model, order, kind, "trainer")
        kept = (ours["tokens"] - ours["tokens_shared"]) / (ours["tokens"] + ours["tokens_padding"])
        name = "SmolLM2" if model == "smollm2" else model
        told = ["" if cell is None else f"{cell:.2f}" for cell in cells]
        rows.append([words, name, *told, f"{100 * kept:.0f} %"])
    return markdown(["rows", "model", *THEIRS.values(), "tokens that are computed"], rows)


def recomputed(trains: str, arm: str, other: str = "all") -> tuple[float, float]:
    """Seconds of a step, and how many times longer the `other` arm takes: by default TRL's default."""
    stored = results("memory", "recomputation", "trains", "arm")
    seconds, longer = (statistics.median(stored.get(trains=trains, arm=a)["seconds"]) for a in (arm, other))
    return seconds, longer / seconds


@table("sft-recomputation")
def sft_recomputation() -> str:
    rows, stored = [], results("memory", "recomputation", "trains", "arm")
    resident = [row for row in stored.rows(trains="adapters") if row["arm"] not in STREAMED]
    for row in sorted(resident, key=lambda row: -row["recomputed_layers"]):
        cells = [f"{row['recomputed_layers']}"]
        if row["arm"] == "all":
            cells = [f"{row['recomputed_layers']} of {row['recomputed_layers']} (TRL)"]
        elif row["recomputed_layers"] == 0:
            cells = ["none: everything fits"]
        for trains in ("adapters", "all weights"):
            seconds, longer = recomputed(trains, row["arm"])
            cells += [f"{seconds:.2f}", f"{longer:.2f}"]
        rows.append(cells)
    heading = ["recomputed layers", "LoRA: seconds", "TRL's default takes", "all weights: seconds"]
    return markdown([*heading, "TRL's default takes"], rows)


def medians(row: dict, digits: int, ours: str = "hybrid") -> list[str]:
    """Seconds of TRL and ours."""
    return [f"{statistics.median(row['seconds'][arm]):.{digits}f}" for arm in ("trl", ours)]


def prompts(case: str) -> dict:
    return results("skips", "prompts", "case").get(case=case)


@table("skips-prompts")
def skips_prompts() -> str:
    rows = []
    for case, words in (
        ("pairs", "DPO, 4 pairs, prompt : completion = 128 : 64 tokens"),
        ("pairs of different lengths", "the same with prompts of 64, 96, 160 and 192 tokens, where TRL pads"),
        ("groups of 4", "GRPO, 2 prompts with 4 completions each, 128 : 64"),
    ):
        row = prompts(case)
        seconds = medians(row, 1, "shared")
        rows.append([words, f"{100 * row['shared_part']:.0f} %", *seconds, f"{row['ratio']:.2f}"])
    heading = ["micro-batch", "tokens not computed", "CPU seconds of the update, TRL's rows", "shared", "ratio"]
    return markdown(heading, rows)


def grpo_run(model: str, **fields) -> list[dict]:
    """Whole runs; lines in which `tokens` counts the run's tokens are of a script that came before."""
    return [row for row in results("skips", "whole_run", *RUN_KEY).rows(model=model, **fields) if row["tokens"] <= 96]


@table("grpo-runs")
def grpo_runs() -> str:
    """Of the grid of the small model the page shows what SmolLM2 was not run with; the file has all."""
    rows = []
    names = {"small": "Llama, 3.2M", "smollm2": "SmolLM2", "smollm2-sentences": "SmolLM2, ends with a sentence"}
    names["smollm2-system"] = "SmolLM2, after a system prompt of 300"
    for row in [found for model in names for found in grpo_run(model)]:
        if row["model"] == "small" and not row["beta"] and (row["rewards"], row["iterations"]) != ("binary", 3):
            continue
        name = names[row["model"]] + f", {row['iterations']} iterations" * (row["iterations"] > 1)
        name += f", `beta={row['beta']:g}`" * (row["beta"] > 0)
        size = f"{row['prompts']} x {row['generations']}"
        spent = [
            statistics.median(map(sum, zip(*(row["seconds"][arm][p] for p in PARTS)))) for arm in ("trl", "hybrid")
        ]
        tokens = f"{row['length']}, {row['mean_length']:.0f} of {row['tokens']}"
        ratios = [f"{row[key]:.2f}" for key in ("generation_ratio", "ratio")]
        rows.append([name, size, tokens, losses(spent, 2, ", "), *ratios])
    heading = ["model", "completions", "prompt, completion", "whole run", "generation, ratio", "whole, ratio"]
    return markdown(heading, rows)


@table("grpo-rows")
def grpo_rows() -> str:
    rows = []
    for row in sorted(results("skips", "grpo", "share").rows(), key=lambda row: row["share"]):
        seconds = medians(row, 2)
        told = [
            f"{row['rows_skipped']} of {row['rows']}",
            f"{row['backward_passes_avoided']} of {row['backward_passes']}",
        ]
        rows.append([f"{100 * row['share']:.0f} %", *told, *seconds, f"{row['ratio']:.2f}"])
    heading = ["prompts without advantage", "rows left out", "backward passes avoided"]
    return markdown([*heading, "CPU seconds of the update, TRL", "here", "ratio"], rows)


@table("grpo-turns")
def grpo_turns() -> str:
    names = {"smollm2": "SmolLM2", "small-llama": "Llama, 4M", "small-gemma3_text": "Gemma 3, 4M"}
    names |= {"small-lfm2": "LFM2, 4M", "small-qwen3_5_text": "Qwen 3.5, 4M"}
    rows = []
    for row in sorted(
        results("skips", "turns", "model", "completions").rows(), key=lambda row: [*names].index(row["model"])
    ):
        assert row["equal"], "the page says that TRL's are the same"
        shares = [f"{row[key]:.2f}" for key in ("prefilled_share", "share_of_seconds")]
        seconds = medians({"seconds": row["generation"]}, 1)
        rows.append([names[row["model"]], row["completions"], f"{row['turns']:.1f}", shares[0], *seconds, shares[1]])
    heading = ["model", "completions", "turns", "tokens of prompts computed, of TRL's 1"]
    return markdown([*heading, "CPU seconds of generation, TRL", "here", "share"], rows)


@table("grpo-equal-rewards")
def grpo_equal_rewards() -> str:
    rows = []
    for row in results("skips", "equal_rewards", "kind").rows():
        cells = [
            "/".join(sorted({f"{100 * row['not_zero'][n]:.0f} %" for n in some})) for some in (("2", "4"), ("8", "16"))
        ]
        rows.append([row["kind"], *cells, f"{row['largest']:.0e}".replace("e-0", "e-") if row["largest"] else "0"])
    return markdown(["rewards", "2 or 4 completions", "8 or 16 completions", "largest advantage"], rows)


@table("grpo-arithmetic")
def grpo_arithmetic() -> str:
    """Pairs of runs at one rate; the held-out reward at the end, and where TRL is after as many CPU seconds."""
    rows = []
    found = results("skips", "arithmetic", "arm", "rate", "seed", "steps")
    for ours in sorted(found.rows(arm="hybrid"), key=lambda row: (row["rate"], row["seed"])):
        theirs = found.get(arm="trl", rate=ours["rate"], seed=ours["seed"], steps=ours["steps"])
        if theirs is None:
            continue
        spent = [[row["seconds"]["generation"], row["seconds"]["update"]] for row in (theirs, ours)]
        whole = [sum(row["seconds"].values()) for row in (theirs, ours)]
        rewards = [dict((step, reward) for step, _, reward in row["held_out"]) for row in (theirs, ours)]
        looks = [f"{reward:.2f}" for reward in rewards[1].values()]
        assert rewards[0] == rewards[1], "the page says that TRL's are the same"
        ratio = f"{whole[0] / whole[1]:.1f}"
        rows.append([ours["seed"], *(f"{a:.0f}, {b:.0f}" for a, b in zip(*spent)), ratio, ", ".join(looks)])
    heading = ["seed", "CPU seconds of generation, TRL and here", "of the update", "whole run, ratio"]
    return markdown([*heading, "held-out reward before the run and every 5 steps"], rows)


@table("skips-others")
def skips_others() -> str:
    rows = []
    for trainer, words in (("reward", "`RewardTrainer`"), ("orpo", "`ORPOTrainer`"), ("kto", "`KTOTrainer`")):
        row = results("skips", "others", "trainer").get(trainer=trainer)
        left_out = (row["tokens_padding"] + row["tokens_shared"]) / (row["tokens"] + row["tokens_padding"])
        rows.append([words, f"{100 * left_out:.0f} %", *medians(row, 1), f"{row['ratio']:.2f}"])
    heading = ["trainer", "tokens and padding not computed", "CPU seconds of a step, TRL", "with the mixin", "ratio"]
    return markdown(heading, rows)
