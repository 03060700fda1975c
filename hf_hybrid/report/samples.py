"""
Samples of generations: the prompts of a file, and the completions that a run wrote to `samples.jsonl`, or TRL to
`completions/`.

The command line checks prompts before torch is imported, and a report needs no torch at all.
"""

from __future__ import annotations

from pathlib import Path

from hf_hybrid.records.log import load_log
from hf_hybrid.records.readings import as_dict, number, numbered
from hf_hybrid.records.summary import format_number

SAMPLES_NAME = "samples.jsonl"
MOST_PROMPTS = 32
"""Prompts of a run: each is completed at each evaluation, one after the other."""
MOST_SAMPLES = 300
"""Samples in a report; `samples.jsonl` has all."""


def read_prompts(path: str | Path) -> list[str]:
    """Return the prompts in a text file, one on each line that is not empty. Raises `ValueError`."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"`sample_prompts={path}` cannot be read: {error.strerror or error}. Name a file with a prompt per line."
        ) from None
    except UnicodeDecodeError:
        raise ValueError(f"`sample_prompts={path}` is not text in UTF-8. Save it as UTF-8.") from None
    return checked_prompts([line for line in map(str.strip, text.splitlines()) if line], str(path))


def checked_prompts(prompts: list[str], source: str) -> list[str]:
    """Return the prompts if there are neither none nor too many. Raises `ValueError`."""
    if not prompts:
        raise ValueError(f"`sample_prompts={source}` has no prompt. Write one on each line.")
    if len(prompts) > MOST_PROMPTS:
        raise ValueError(
            f"`sample_prompts={source}` has {len(prompts):,} prompts, and at most {MOST_PROMPTS} are completed at each "
            "evaluation. Keep the ones that you want to read."
        )
    return prompts


def samples_of(folder: Path) -> list[dict]:
    """Return the samples of the newest run in an output folder: `step`, `prompt`, `completion`, `tokens`, `ended`."""
    lines = [line for line in load_log(folder, name=SAMPLES_NAME).lines if isinstance(line.get("prompt"), str)]
    lines = [line for line in lines if isinstance(line.get("completion"), str)]
    # A resumed run may evaluate the step of its checkpoint once more.
    return list({(line["step"], line["prompt"]): line for line in lines}.values())[-MOST_SAMPLES:]


def completions_of(folder: Path, notes: list[str]) -> list[dict]:
    """
    Return completions of a training by rewards, the newest first: `step`, `prompt`, `completion`, `rewards` by function
    and `advantage`. TRL writes them with `log_completions=True`; of each step the best and the worst are kept.
    """
    completions: list[dict] = []
    for step, path in reversed(numbered(folder / "completions", r"completions_(\d+)\.parquet")):
        try:
            from pyarrow.parquet import read_table

            rows = read_table(path).to_pylist()
        except (ImportError, OSError, ValueError) as error:  # pyarrow's own errors are of these classes too
            notes.append(f"`{path.name}` cannot be read and was left out: {error}.")
            continue
        rows.sort(key=lambda row: -(number(row.get("advantage")) or 0))
        for row in rows[:1] + rows[1:][-1:]:
            about = {name: _text(row.pop(name, None)) for name in ("prompt", "completion")}
            advantage, _ = number(row.pop("advantage", None)), row.pop("step", None)
            rewards = {name: value for name, value in row.items() if number(value) is not None}
            text = ", ".join(f"{name} {format_number(value)}" for name, value in rewards.items())
            completions.append({"step": step, **about, "rewards": text, "advantage": advantage})
        if len(completions) >= MOST_SAMPLES:
            break
    return completions


def _text(value: object) -> str:
    """A prompt or a completion as text; of a chat the last message."""
    return str(as_dict(value[-1]).get("content", "")) if isinstance(value, list) and value else str(value)
