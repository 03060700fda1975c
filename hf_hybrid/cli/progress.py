"""What a training says on the terminal while it runs: a line per log entry, a bar, and what Ctrl-C does."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Generator
from typing import Any

from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from hf_hybrid.cli.console import is_number, outcome, plural, print_line, print_time, terminal_width, write_error
from hf_hybrid.files import write_note
from hf_hybrid.machine import copies_beside, wait_for
from hf_hybrid.records.progress import HybridProgressCallback, PositionBar
from hf_hybrid.run.trainer_view import own_losses
from hf_hybrid.trl.rewards import text_of

FORMATS = {
    "loss": "loss {:.4f}",
    "reward": "reward {:.3f}",
    "rewards/accuracies": "accuracy {:>4.0%}",
    "rewards/margins": "margin {:.2f}",
    "mean_token_accuracy": "token acc {:>3.0%}",
    "completions/mean_length": "length {:.0f}",
    "grad_norm": "grad {:.2f}",
}
"""Of a log entry, what a line shows and how, in this order."""
LEAST_IMPORTANT = ("grad ", "token acc ", " tokens/s", "margin ", " skipped", "length ")
"""What a narrow terminal has no room for, the least important first."""
ROUNDS = 5
"""Rounds of completions, of which a difference of rewards is the least that a model learns from."""


@contextlib.contextmanager
def interrupts(alone: bool) -> Generator[threading.Event]:
    """
    Context of a training, whose event Ctrl-C sets: the first lets the step end, saves a checkpoint and stops, the
    second stops at once. If the process is not `alone`, the first does.
    """
    asked = threading.Event()

    def first(number: int, frame: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        write_error("\nCtrl-C: the step ends, then a checkpoint is saved. Ctrl-C again stops at once.\n")

    if not alone or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGINT, first)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


class Progress(TrainerCallback):
    """
    Writes the lines and, on a terminal, the bar, in place of Trainer's own. With `log_completions` each line is
    followed by a completion. After Ctrl-C (`interrupted`) it ends the run at the next step.

    It writes the `notes` of the run, by name, when the training begins: a run that is refused writes nothing.

    Of the options that were left out (`defaulted`), `logging_steps` follows from the length of the run, and then the
    first step has a line as well. The time that is left follows from the steps after the first, which takes longer, and
    a line behind the third step says how long the run takes.
    """

    def __init__(
        self, trainer: Any, interrupted: threading.Event, *, defaulted: frozenset[str], notes: dict[str, dict[str, Any]]
    ):
        for kind in (HybridProgressCallback, ProgressCallback, PrinterCallback):
            trainer.remove_callback(kind)
        self.trainer, self.interrupted, self.defaulted, self.notes = trainer, interrupted, defaulted, notes
        self.bar: PositionBar | None = None
        self.begun = False  # whether a training has
        self.stepped = False  # whether a step has begun
        self.seen = self.alike = self.advised = 0  # rounds since the last log, without a difference, and at the advice
        self.scale: float | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if "logging_steps" in self.defaulted:
            args.logging_steps = state.logging_steps = logging_steps(state.max_steps)
            args.logging_first_step |= "logging_first_step" in self.defaulted
        if args.should_save:
            for name, values in self.notes.items():
                write_note(self.trainer.run_folder / name, values)
        if state.global_step > 0:
            print_line(f"This run continues from step {state.global_step:,} of {state.max_steps:,}.")
        self.begun, self.logged = True, time.monotonic()
        self.first_step, self.tokens = state.global_step, 0
        self.second = 0.0  # when the second step began
        if state.is_world_process_zero and sys.stderr.isatty() and not args.disable_tqdm:
            options = {"total": state.max_steps, "initial": state.global_step, "dynamic_ncols": True}
            self.bar = PositionBar(position_of_run=self.trainer.run_position, leave=False, **options)

    def on_step_begin(self, args, state, control, **kwargs):
        self.stepped = True

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)
        steps = state.global_step - self.first_step
        if steps in (1, 3) and copies_beside(args.device):
            wait_for(args.device)  # else the host may be ahead
        self.second = self.second or time.monotonic()
        if steps == 3 and state.is_world_process_zero:
            print_time(self._of_step(3), state.max_steps)
        self.count_rounds()
        if self.interrupted.is_set():
            control.should_save = control.should_training_stop = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs or "train_runtime" in logs or not self.begun:
            return  # without a beginning it is an evaluation without a training
        clock, steps = time.monotonic(), state.global_step - self.first_step
        seconds = self._of_step(steps) * (state.max_steps - state.global_step) if steps > 1 else 0
        left = tqdm.format_interval(seconds) if seconds >= 1 else ""
        tokens = logs.get("num_tokens") or 0
        rate = (tokens - self.tokens) / max(clock - self.logged, 1e-9) if tokens > self.tokens else None
        scale = logs.get("hybrid/learning_rate_scale")
        if scale == self.scale:  # said before
            logs = {name: value for name, value in logs.items() if name != "hybrid/learning_rate_scale"}
        self.scale = scale or self.scale
        text = log_line(
            state.global_step,
            state.max_steps,
            logs,
            rate=rate,
            left=left,
            width=terminal_width(),
            likelihood=not own_losses(self.trainer),
        )
        if "loss" in logs:
            self.tokens, self.logged = tokens, clock
        if text:
            print_line(text)
        if "loss" in logs and (rounds := rounds_of(self.trainer)):
            self.seen, prompts = 0, args.generation_batch_size // args.num_generations
            if alike := round(sum(rounds) * prompts):
                print_line(f"  {alike:,} of {len(rounds) * prompts:,} prompts: all completions got the same reward", 4)
        if "reward" in logs and getattr(args, "log_completions", False):
            print_line(f"  {last_completion(self.trainer)}", 4)

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        if self.alike >= min(ROUNDS, state.max_steps) and self.alike != self.advised:
            self._advise()

    def count_rounds(self) -> None:
        """Count the rounds since rewards last differed, and advise as soon as they are [`ROUNDS`], once."""
        for share in (rounds := rounds_of(self.trainer))[self.seen :]:
            self.alike = self.alike + 1 if share == 1 else 0
        self.seen = len(rounds)
        if self.alike >= ROUNDS and not self.advised:
            self._advise()

    def _advise(self) -> None:
        """Say that no reward differed, and what to look at."""
        self.advised, args = self.alike, self.trainer.args
        logged, key = self.trainer.state.log_history, "completions/clipped_ratio"
        cut = self.trainer._metrics["train"].get(key) or [entry[key] for entry in logged if is_number(entry.get(key))]
        print_line()
        print_line(
            f"No reward differed in {plural(self.alike, 'round')}, so nothing was learned: all completions of a prompt "
            "got the same reward. Look at"
        )
        for line in (
            "the completions above: do they have the form that the reward reads?",
            f"--max_completion_length {args.max_completion_length}, which cut {(cut or [0])[-1]:.0%} of the last ones;",
            "the prompts: a model learns from those that it gets right sometimes;",
            f"--num_generations {args.num_generations} and --temperature {args.temperature:g}: with higher ones "
            "completions differ more.",
        ):
            print_line(f"  - {line}", 4)

    def _of_step(self, steps: int) -> float:
        """Seconds of a step, from all of this run's `steps` but the first, with evaluations and checkpoints."""
        return (time.monotonic() - self.second) / (steps - 1)


def rounds_of(trainer: Any) -> list[float]:
    """Return of the rounds of completions since the last log the shares of prompts without a difference of rewards."""
    return getattr(trainer, "_metrics", {}).get("train", {}).get("frac_reward_zero_std", [])


def last_completion(trainer: Any) -> str:
    """
    Return the last completion that TRL has noted: its rewards, the prompt and the text. The texts are JSON, so that
    nothing that a model writes reaches the terminal as a command to it.
    """
    noted = trainer._logs
    prompt, completion = noted["prompt"][-1], noted["completion"][-1]
    rewards = ", ".join(f"{name} {values[-1]:.3g}" for name, values in noted["rewards"].items())
    asked, answer = (
        json.dumps(textwrap.shorten(text, 100, placeholder=" ..."), ensure_ascii=False)
        for text in (text_of(prompt if isinstance(prompt, str) else prompt[-1:]), text_of(completion))
    )
    return f"{rewards}: {asked} -> {answer}"


def logging_steps(max_steps: int) -> int:
    """Return the steps between two lines for a run of a length: about 20 lines, at most 50 steps apart."""
    return min(max(max_steps // 20, 1), 50)


def log_line(
    step: int, steps: int, logs: dict[str, Any], *, rate: float | None = None, left: str = "", width: int = 80,
    likelihood: bool = True,
) -> str:  # fmt: skip
    """
    Return the line for a log entry, in so many columns at most; empty if it has nothing to show. `rate` is in tokens
    per second, `left` the time to the end, and `likelihood` whether the loss is that of a language model.
    """
    place = f"step {step:>{len(str(steps))}}/{steps}"
    if any(name.startswith("eval_") for name in logs):
        text = outcome(logs, likelihood)
        return f"{place}  eval: {text}" if text else ""
    names = [name for name in FORMATS if is_number(logs.get(name))]
    if "rewards/accuracies" in names:
        names = [name for name in names if name != "mean_token_accuracy"]
    if "reward" in names:
        names = [name for name in names if name != "loss"]  # of GRPO: it says nothing, and is about zero
    if not names:
        return ""
    parts = [FORMATS[name].format(logs[name]) for name in names]
    if is_number(logs.get("learning_rate")):
        scale = logs.get("hybrid/learning_rate_scale", 1.0)  # is in the rate
        parts.append(f"rate {logs['learning_rate']:.1e}" + (f" ({scale:.3g}x)" if scale != 1 else ""))
    if logs.get("hybrid/leaps"):
        leaps, skipped = logs["hybrid/leaps"], logs.get("hybrid/predicted_steps", 0)
        parts.append(f"{plural(leaps, 'leap')}, {plural(skipped, 'step')} skipped")
    if rate:
        parts.append(f"{rate:,.0f} tokens/s")
    if left:
        parts.append(f"{left} left")
    for dropped in LEAST_IMPORTANT:
        if len(place) + sum(len(part) + 2 for part in parts) > width:
            parts = [part for part in parts if dropped not in part]
    return "  ".join([place, *parts])
