"""Tables from benchmarks/gpu: a step on a GPU, beside what users have without this package."""

from __future__ import annotations

import statistics

from benchmarks.memory.peaks import KEY as PEAK_KEY
from benchmarks.results import Row
from benchmarks.tables import between, losses, markdown, rate, results, table

KEY = ("shape", "kind", "arm", "order", "hardware")
USES = {
    "sft": ("SFT, LoRA", {
        "full": "one length, nothing to save",
        "instructions": "instructions, nothing shared",
        "system": "a system prompt of 1,000 tokens",
        "agent": "agents: 1,500 tokens of prompt and tools, 4 actions a task",
    }),
    "dpo": ("DPO, LoRA", {"even": "prompts of 600, answers of 300 tokens", "mixed": "mixed lengths up to these"}),
    "grpo": ("GRPO, LoRA", {"256 + 128": "8 x 8 completions of up to 128 tokens, half without advantage"}),
}  # fmt: skip
PLAIN = {"sft": "trainer", "dpo": "trl", "grpo": "trl"}
WORDS = {
    "trainer": "`Trainer`", "by_length": "`group_by_length`", "free": "padding-free",
    "free_liger": "padding-free, Liger", "trl": "TRL", "trl_precomputed": "TRL, `precompute_ref_log_probs`",
    "trl_liger": "TRL, Liger", "trl_padding_free": "TRL, padding-free", "trl_continuous": "TRL, continuous batching",
    "trl_static": 'TRL, `cache_implementation="static"`',
}  # fmt: skip


def measured(use: str, shape: str, kind: str) -> dict[str, Row]:
    """
    For each arm the means of its runs, on the machine of the last one; those that failed have an `error`. Rows of
    processes that ran several arms have an `order`, and count only where no arm has run in a process of its own.
    """
    rows = [row for row in results("gpu", use, *KEY).rows(shape=shape) if row["kind"] == kind]
    rows = [row for row in rows if row["hardware"] == rows[-1]["hardware"]]
    rows = [row for row in rows if row["order"] is None] or rows
    arms = {row["arm"]: [other for other in rows if other["arm"] == row["arm"]] for row in rows}
    return {arm: _mean(of_arm) for arm, of_arm in arms.items()}


def _mean(rows: list[Row]) -> Row:
    if failed := [row["error"] for row in rows if "error" in row]:
        return {"error": failed[0]}
    means = {name: statistics.mean(row[name] for row in rows) for name in ("seconds", "peak_gib")}
    return {**means, "after_liger": any(row.get("after_liger") and "liger" not in row["arm"] for row in rows)}


def gain(use: str, shape: str, kind: str) -> float:
    """How many times as long the fastest peer takes."""
    arms = measured(use, shape, kind)
    return fastest(arms)[1]["seconds"] / arms["hybrid"]["seconds"]


def fastest(arms: dict[str, Row]) -> tuple[str, Row] | None:
    """The fastest arm that is not ours; `None` if all failed."""
    others = {arm: row for arm, row in arms.items() if not arm.startswith("hybrid") and "error" not in row}
    return min(others.items(), key=lambda item: item[1]["seconds"], default=None)


def cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if "error" in row:
        return "out of memory" if "OutOfMemory" in row["error"] else "failed"
    return f"{row['seconds']:.2f} s, {row['peak_gib']:.1f} GiB" + ", L" * row["after_liger"]


@table("gpu")
def gpu() -> str:
    lines = []
    for use, (name, kinds) in USES.items():
        shapes = dict.fromkeys(row["shape"] for row in results("gpu", use, *KEY).rows())
        for shape in sorted(shapes, key=lambda shape: "8b" in shape):
            for kind, words in kinds.items():
                arms = measured(use, shape, kind)
                if not arms:
                    continue
                ours = arms["hybrid"]
                others = {arm: row for arm, row in arms.items() if not arm.startswith("hybrid") and "error" not in row}
                best = min(others, key=lambda arm: others[arm]["seconds"], default=None)
                beside = f"{WORDS[best]}: {cell(others[best])}" if best else "out of memory"
                gain = f"**{others[best]['seconds'] / ours['seconds']:.2f}**" if best else "-"
                lines.append(
                    [f"{name}, {shape.upper()}: {words}", cell(arms.get(PLAIN[use])), beside, cell(ours), gain]
                )
    return markdown(["a step of", "`Trainer`, TRL", "the fastest peer", "ours, by default", "times"], lines)


STREAMED = {
    "resident": "8B, all weights, resident, 8-bit states",
    "stream_8bit": "8B, all weights, streamed, 8-bit states",
    "stream_on_host": "8B, all weights, streamed, bf16 states, updated on the host (no more)",
    "stream": "the same, updated on the device",
}


@table("memory-h200")
def memory_h200() -> str:
    lines = []
    stored = results("gpu", "stream", "arm", "kind", "hardware")
    for arm, name in STREAMED.items():
        for row in sorted(stored.rows(arm=arm, hardware=H200), key=lambda row: row["kind"]):
            memory = f"{row['peak_gib']:.1f}, {row['reserved_gib']:.1f}"
            lines.append([name, *_speed(row["kind"], row["seconds"]), memory])
            name = ""
    name = "50B, LoRA over an int8 base, streamed"
    large = results("memory", "peaks", *PEAK_KEY).rows(model="50b", mode="lora-stream-int8", cap_gib=24.0)
    for row in sorted(large, key=lambda row: row["tokens"]):
        lines.append([name, *_speed(row["tokens"], row["seconds"]), f"-, {row['device_reserved'] / 2**30:.1f}"])
        name = ""
    return markdown(["", "tokens per step", "s/step", "tokens/s", "device: allocated, reserved GiB"], lines)


def _speed(tokens: int, seconds: float) -> tuple[str, str, str]:
    return f"{tokens:,}", f"{seconds:.2f}", f"{tokens / seconds:,.0f}"


H200 = "x86_64 CPU, NVIDIA H200"
SCRATCH = {
    "adamw": "AdamW", "hybrid": "the default: leaps under AdamW", "muon": '`optim="muon"`, no leaps',
    "fast": '`preset="fast"`',
}  # fmt: skip
SIZES = {"10m": "10M, 16 x 256 tokens a step, a CPU", "124m": "124M, 32 x 1,024 tokens a step, an H200"}


def from_scratch(shape: str) -> dict[tuple[str, int], list[Row]]:
    """By arm and number of steps the runs at AdamW's best rate, by seed."""
    rows = results("gpu", "scratch", "shape", "kind", "arm", "seed", "run_steps").rows(shape=shape)
    best = min((row for row in rows if row["arm"] == "adamw"), key=lambda row: row["eval_loss"])["kind"]
    found: dict[tuple[str, int], list[Row]] = {}
    order = list(SCRATCH)
    for row in sorted(rows, key=lambda row: (order.index(row["arm"]), row["run_steps"], row["seed"])):
        if row["kind"] == best:
            found.setdefault((row["arm"], row["run_steps"]), []).append(row)
    return found


def loss_from_scratch(shape: str, arm: str) -> float:
    return statistics.fmean(row["eval_loss"] for row in from_scratch(shape)[arm, 400])


@table("scratch-sizes")
def scratch_sizes() -> str:
    lines = []
    for shape, size in SIZES.items():
        for (arm, steps), runs in from_scratch(shape).items():
            passes = between([row.get("backward_passes", steps) for row in runs])
            of_seeds = losses(row["eval_loss"] for row in runs)
            lines.append([size, f"{SCRATCH[arm]}, {rate(runs[0]['kind'])}", steps, passes, of_seeds])
            size = ""
    return markdown(["weights", "arm, rate", "steps", "backward passes", "held-out loss by seed"], lines)
