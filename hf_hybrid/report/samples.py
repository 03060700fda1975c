"""
Samples of generations: the prompts of a file, and the completions that a run wrote to `samples.jsonl`.

The command line checks prompts before torch is imported, and a report needs no torch at all.
"""

from __future__ import annotations

from pathlib import Path

from hf_hybrid.records.log import load_log

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
