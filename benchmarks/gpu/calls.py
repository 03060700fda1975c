"""
What is run when time on a card is short: `first`, then, when its rows were read, `second`.

A call is a list of lines, the most important first. Each line has a limit, and so has each arm of it. The limits of all
lines may add up to more than the call has: the last lines are cut. Our arm is the first of each line.

If the first row of `first` says `plain_rollouts_because`, or has rounds of more than 3 s, read that before all else.
"""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """A use with its options."""

    seconds: float
    """Limit of the line."""
    arm_seconds: float
    """Limit of each arm."""
    words: str


MINUTES = {"first": 8.0, "second": 4.0}
"""Limit of a call."""
CALLS = {
    "first": [
        Line(90, 60, "grpo --steps 3 --arms hybrid trl"),
        Line(70, 35, "sft --kinds full instructions --arms hybrid trainer --steps 10 --warm_up 3 --profile"),
        Line(60, 40, "dpo --kinds even --arms hybrid trl --steps 8 --warm_up 3 --profile"),
        Line(150, 70, "stream --tokens 16384 --steps 3 --arms stream_8bit resident stream resident_exact"),
        Line(60, 30, "sft --kinds system agent --arms hybrid free --steps 6 --profile"),
        Line(95, 40, "grpo --steps 2 --arms hybrid_eager hybrid_peft trl_continuous trl_static"),
        Line(60, 40, "dpo --kinds even --steps 6 --arms trl_precomputed trl_liger trl_padding_free"),
        Line(60, 30, "sft --kinds full system --steps 6 --arms hybrid_liger free_liger"),
    ],
    "second": [
        Line(95, 95, "checks --arms gpu_tests"),
        Line(60, 35, "checks --arms flex_gemma2 flex_gpt_oss"),
        Line(90, 90, "sft --kinds system --arms hybrid_compiled --steps 4 --warm_up 4"),
        Line(80, 40, "dpo --kinds even --steps 4 --warm_up 2 --arms hybrid_streamed hybrid"),
        Line(120, 60, "grpo --turns 6 --length 1024 --tokens 64 --mean 40 --steps 2 --arms hybrid trl"),
    ],
}
TINY = "--shape tiny --steps 1 --warm_up 1"
"""Options with which each line shows on a CPU that it runs, and no speed."""
