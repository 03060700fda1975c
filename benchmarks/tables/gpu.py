"""Tables from benchmarks/gpu: a step on a GPU, beside what users have without this package."""

from __future__ import annotations

import statistics

from benchmarks.results import Row
from benchmarks.tables import markdown, results, table

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
    "free_liger": "padding-free, Liger", "trl": "TRL",
}  # fmt: skip


def measured(use: str, shape: str, kind: str) -> dict[str, Row]:
    """For each arm the means of its runs in both orders; those that failed have an `error`."""
    rows = [row for row in results("gpu", use, *KEY).rows(shape=shape) if row["kind"] == kind]
    arms = {row["arm"]: [other for other in rows if other["arm"] == row["arm"]] for row in rows}
    return {arm: _mean(of_arm) for arm, of_arm in arms.items()}


def _mean(rows: list[Row]) -> Row:
    if any("error" in row for row in rows):
        return {"error": True}
    return {name: statistics.mean(row[name] for row in rows) for name in ("seconds", "peak_gib")}


def gain(use: str, shape: str, kind: str) -> float:
    """How many times as long the fastest peer takes."""
    arms = measured(use, shape, kind)
    return fastest(arms)[1]["seconds"] / arms["hybrid"]["seconds"]


def fastest(arms: dict[str, Row]) -> tuple[str, Row] | None:
    """The fastest arm that is not ours; `None` if all ran out of memory."""
    others = {arm: row for arm, row in arms.items() if not arm.startswith("hybrid") and "error" not in row}
    return min(others.items(), key=lambda item: item[1]["seconds"], default=None)


def cell(row: Row | None) -> str:
    if row is None:
        return "-"
    return "out of memory" if "error" in row else f"{row['seconds']:.2f} s, {row['peak_gib']:.1f} GiB"


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
