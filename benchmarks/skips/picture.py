"""
Draw pictures from the results: CPU seconds of fine-tuning SmolLM2-135M, and of training on images, here over plain
training.

    python -m benchmarks.skips.picture

Writes docs/images/fine_tuning.png and once.png. A bar is one over the median ratio of a benchmark that ran both sides
in turn, one CPU thread each. The update is the same on both sides.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables.skips import grpo_run, prompts, recomputed, row_ratio
from benchmarks.tables.summary import images_times, verified_runs

FOLDER = Path(__file__).parents[2] / "docs" / "images"
OURS, THEIRS = "#0b6e99", "#d5dadf"


def bars() -> list[tuple[str, str, float]]:
    """What is trained, beside what, and how many times longer the other side takes."""
    grpo = {tokens: grpo_run("smollm2", length=64, tokens=tokens)[-1]["ratio"] for tokens in (24, 48)}
    return [
        ("SFT, a common system prompt of 300 tokens", "TRL", row_ratio("smollm2", "shuffled", "system", "trl")),
        ("the same", "Trainer", row_ratio("smollm2", "shuffled", "system", "trainer")),
        ("SFT, instructions as long as Alpaca's", "TRL", row_ratio("smollm2", "shuffled", "instructions", "trl")),
        ("the same", "Trainer", row_ratio("smollm2", "shuffled", "instructions", "trainer")),
        ("LoRA where no layer has to be recomputed", "TRL", recomputed("adapters", "auto")[1]),
        ("DPO, prompt : completion = 2 : 1", "TRL", prompts("pairs")["ratio"]),
        ("GRPO, half of the rows without advantage", "TRL, completions of 24 tokens", grpo[24]),
        ("the same", "TRL, 48 tokens", grpo[48]),
        ("GRPO with a verifier, short answers", "TRL, the whole training", verified_runs()[0]),
    ]


def bars_of_images() -> list[tuple[str, str, float]]:
    """The same of rows that share images."""
    images = images_times()
    return [
        ("SFT, 4 questions on an image", "TRL", images["sft"]),
        ("DPO, a pair on an image", "TRL", images["dpo"]),
        ("GRPO's update, 8 completions on an image", "TRL", images["grpo"]),
        ("GRPO's generation, until the first token", "TRL", images["prefill"]),
        ("SFT, images that no rows share", "TRL", images["sft apart"]),
    ]


def draw(name: str, title: str, of: str, rows: list[tuple[str, str, float]]) -> None:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9.6, 1 + 0.4 * len(rows)))
    for place, (_, beside, ratio) in enumerate(rows):
        axis.barh(-place, 100, color=THEIRS, height=0.72)
        axis.barh(-place, 100 / ratio, color=OURS, height=0.72)
        beside_bar = ratio > 1.3
        at, looks = (100 / ratio + 1, {}) if beside_bar else (100 / ratio - 1, {"color": "white", "ha": "right"})
        axis.text(
            at, -place, f"{ratio:.{2 - beside_bar}f} times fewer than {beside}", va="center", fontsize=8.5, **looks
        )
    axis.set_yticks([-place for place in range(len(rows))], [name for name, _, _ in rows], fontsize=9)
    axis.set_xlim(0, 108)
    axis.set_xticks(range(0, 101, 20))
    axis.set_xlabel(f"CPU seconds of {of}, in percent of the other side's; the same update")
    axis.set_title(title, fontsize=11, loc="left")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)
    figure.tight_layout()
    FOLDER.mkdir(parents=True, exist_ok=True)
    figure.savefig(FOLDER / name, dpi=110)


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    draw("fine_tuning.png", "Fine-tuning SmolLM2-135M, one CPU thread", "a step (GRPO: of a run)", bars())
    draw("once.png", "A Qwen2-VL of 96M weights, images of 256 tokens, one CPU thread", "a step", bars_of_images())


if __name__ == "__main__":
    main()
