"""
What a training by a command says on the terminal: facts before it, a line per log entry, a summary after it.

Only the first process speaks. Facts and lines go to stdout, the bar and errors to stderr. There is a bar on a terminal
alone.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import random
import shutil
import signal
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

INDENT, NAME = 2, 10
"""Columns before a fact, and of its name."""
LINES = 20
"""Lines of losses that a run of any length shows, about, if `logging_steps` is not given."""
MOST_STEPS = 50
"""Steps between two lines at most then."""


@contextlib.contextmanager
def quiet_imports() -> Generator[None]:
    """Context in which dependencies warn of nothing, for their import: they speak before the first line of ours."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def quiet_dependencies() -> Generator[None]:
    """
    Context in which dependencies show no bars and speak of errors alone, unless the user asked for more
    (`TRANSFORMERS_VERBOSITY`).
    """
    with quiet_imports():
        import datasets
        import transformers
    others = [logging.getLogger(name) for name in ("trl", "accelerate", "peft", "bitsandbytes", "torchao")]
    before = transformers.logging.get_verbosity(), [other.level for other in others]
    bars = transformers.logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled()
    try:
        with warnings.catch_warnings():
            datasets.disable_progress_bars()
            if "TRANSFORMERS_VERBOSITY" not in os.environ:
                transformers.logging.set_verbosity_error()
                transformers.logging.disable_progress_bar()
                for other in others:
                    other.setLevel(logging.ERROR)
                warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before[0])
        for other, level in zip(others, before[1], strict=True):
            other.setLevel(level)
        if bars[0]:
            transformers.logging.enable_progress_bar()
        if not bars[1]:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def speaking(unsaid: tuple[str, ...] = ()) -> Generator[None]:
    """
    Context in which dependencies are quiet, and warnings of the package are lines on the terminal.

    Args:
        unsaid (`tuple[str, ...]`): Messages of the package, without their values, that are left out.
    """
    said, own = Said(unsaid), logging.getLogger("hf_hybrid")
    with quiet_dependencies():
        own.addHandler(said)
        try:
            yield
        finally:
            own.removeHandler(said)


class Said(logging.Handler):
    """Writes warnings of the package as lines of their own, past the bar, but those of `unsaid`."""

    def __init__(self, unsaid: tuple[str, ...]):
        super().__init__(logging.WARNING)
        self.unsaid = unsaid

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg not in self.unsaid and first_process():
            from tqdm import tqdm

            tqdm.write(
                textwrap.fill(record.getMessage(), terminal_width(), subsequent_indent=" " * INDENT), file=sys.stdout
            )


def first_process() -> bool:
    """Whether this is the process that speaks, of those that a launcher started."""
    return int(os.environ.get("RANK", 0)) == 0


def say(text: str = "") -> None:
    """Write a line, wrapped to the terminal."""
    if first_process():
        sys.stdout.write(textwrap.fill(text, terminal_width(), subsequent_indent=" " * INDENT) + "\n")
        sys.stdout.flush()


def fact(name: str, text: str, *, whole: bool = False) -> None:
    """Write a fact: its name, and behind it the text, wrapped; `whole`: in one line, for commands to copy."""
    if first_process() and whole:
        sys.stdout.write(f"{' ' * INDENT}{name:<{NAME}} {text}\n")
    elif first_process():
        before = " " * INDENT + f"{name:<{NAME}} "
        options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        folded = textwrap.fill(
            text, terminal_width(), initial_indent=before, subsequent_indent=" " * len(before), **options
        )
        sys.stdout.write(folded + "\n")
        sys.stdout.flush()


def terminal_width() -> int:
    """Return the columns that lines are wrapped to: those of the terminal, between 40 and 100."""
    return min(max(shutil.get_terminal_size((80, 24)).columns, 40), 100)


# Words.


def count(number: float) -> str:
    """Return a number of parameters or tokens in three digits: 134.5M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= size:
            return f"{number / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{number:,.0f}"


def plural(number: float, name: str) -> str:
    """Return a number of things, with an s where there is not one."""
    return f"{number:,} {name}" + ("" if number == 1 else "s")


def duration(seconds: float) -> str:
    """Return seconds as people write them: 0:12, 1:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def folder_name(folder: str | Path) -> str:
    """Return a folder as a command takes it."""
    text = str(folder)
    return f"'{text}'" if any(letter.isspace() for letter in text) else text


def logging_steps(max_steps: int) -> int:
    """Return the steps between two lines for a run of a length: about `LINES` lines, at most `MOST_STEPS` apart."""
    return min(max(max_steps // LINES, 1), MOST_STEPS)


_NAMES = {
    "loss": "loss {:.4f}",
    "reward": "reward {:.3f}",
    "rewards/accuracies": "accuracy {:>4.0%}",
    "rewards/margins": "margin {:.2f}",
    "mean_token_accuracy": "right {:>3.0%}",
    "completions/mean_length": "length {:.0f}",
    "frac_reward_zero_std": "equal rewards {:>4.0%}",
    "grad_norm": "grad {:.2f}",
}
"""Of a log entry, what a line shows and how, in this order."""


def log_line(
    step: int, steps: int, logs: dict[str, Any], *, rate: float | None = None, left: str = "", width: int = 80
) -> str:
    """
    Return the line for a log entry; empty if it has nothing to show.

    Args:
        step, steps (`int`): Where the run is, and its length.
        logs (`dict`): The entry.
        rate (`float`, *optional*): Tokens per second.
        left (`str`): Time that is left.
        width (`int`): Columns that it may take.
    """
    number = len(str(steps))
    place = f"step {step:>{number}}/{steps}"
    if "eval_loss" in logs or any(name.startswith("eval_") for name in logs):
        told = outcome(logs)
        return f"{place}  held out: {told}" if told else ""
    names = [name for name in _NAMES if _is_number(logs.get(name))]
    if "rewards/accuracies" in names:
        names = [name for name in names if name != "mean_token_accuracy"]
    if "reward" in names:
        names = [name for name in names if name != "loss"]  # of GRPO: it says nothing, and is about zero
    parts = [_NAMES[name].format(logs[name]) for name in names]
    if not parts:
        return ""
    if _is_number(logs.get("learning_rate")):
        scale = logs.get("hybrid/learning_rate_scale", 1.0)  # is in the rate
        parts.append(f"rate {logs['learning_rate']:.1e}" + (f" ({scale:.3g}x)" if scale != 1 else ""))
    if logs.get("hybrid/leaps"):
        leaps, skipped = logs["hybrid/leaps"], logs.get("hybrid/predicted_steps", 0)
        parts.append(f"{plural(leaps, 'leap')}, {plural(skipped, 'step')} skipped")
    if rate:
        parts.append(f"{rate:,.0f} tokens/s")
    if left:
        parts.append(f"{left} left")
    # What a narrow terminal has no room for, the least important first.
    for dropped in ("grad ", "right ", " tokens/s", "equal rewards ", "margin "):
        if len(place) + sum(len(part) + 2 for part in parts) > width:
            parts = [part for part in parts if dropped not in part]
    return "  ".join([place, *parts])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def outcome(metrics: dict[str, Any], prefix: str = "eval_") -> str:
    """Return loss and perplexity, or accuracy, or reward of an evaluation, in words."""
    parts: list[str] = []
    loss: Any = metrics.get(f"{prefix}loss")
    accuracy, reward = metrics.get(f"{prefix}rewards/accuracies"), metrics.get(f"{prefix}reward")
    if _is_number(reward):
        parts.append(f"reward {reward:.3g}")
    elif _is_number(loss):
        parts.append(f"loss {loss:.4g}")
    if _is_number(accuracy):
        parts.append(f"{accuracy:.0%} of the pairs ranked right")
    elif _is_number(loss) and not _is_number(reward) and loss < 20:
        parts.append(f"perplexity {math.exp(loss):.4g}")
    return ", ".join(parts)


# Ctrl-C.


class Interrupts:
    """
    Ctrl-C in a training on one process: the first lets the step end, saves a checkpoint and stops, the second stops at
    once.

    Attributes:
        asked (`bool`): Whether Ctrl-C was pressed.
    """

    def __init__(self, alone: bool):
        self.asked = False
        self._works = alone and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interrupts:
        if self._works:
            self._before = signal.signal(signal.SIGINT, self._first)
        return self

    def __exit__(self, *error) -> None:
        if self._works:
            signal.signal(signal.SIGINT, self._before)

    def _first(self, number: int, frame: Any) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stderr.write("\nCtrl-C: the step ends, then a checkpoint is saved. Ctrl-C again stops at once.\n")


def progress_callback(trainer: Any, interrupts: Interrupts, *, chooses_steps: bool) -> Any:
    """
    Return the callback that writes the lines and the bar, in place of Trainer's own.

    Args:
        trainer: Whose run it is.
        interrupts (`Interrupts`): Of Ctrl-C.
        chooses_steps (`bool`): Whether `logging_steps` follows from the length of the run.
    """
    from transformers import PrinterCallback, ProgressCallback, TrainerCallback

    from hf_hybrid.records.progress import HybridProgressCallback, PositionBar

    for kind in (HybridProgressCallback, ProgressCallback, PrinterCallback):
        trainer.remove_callback(kind)

    class Progress(TrainerCallback):
        bar: Any = None
        scale: float | None = None

        def on_train_begin(self, args, state, control, **kwargs):
            if chooses_steps:
                args.logging_steps = state.logging_steps = logging_steps(state.max_steps)
            self.begun = self.logged = time.monotonic()
            self.first_step = state.global_step
            self.tokens = 0
            if state.is_world_process_zero and sys.stderr.isatty() and not args.disable_tqdm:
                options = {"total": state.max_steps, "initial": state.global_step, "dynamic_ncols": True}
                self.bar = PositionBar(position_of_run=trainer.run_position, leave=False, **options)

        def on_step_end(self, args, state, control, **kwargs):
            if self.bar is not None:
                self.bar.update(state.global_step - self.bar.n)
            if interrupts.asked:
                control.should_save = control.should_training_stop = True

        def on_log(self, args, state, control, logs=None, **kwargs):
            if not state.is_world_process_zero or not logs or "train_runtime" in logs:
                return
            if not hasattr(self, "begun"):  # an evaluation without a training
                return
            now, done = time.monotonic(), state.global_step - self.first_step
            seconds = (now - self.begun) / max(done, 1) * (state.max_steps - state.global_step)
            left = duration(seconds) if seconds >= 1 else ""
            tokens = logs.get("num_tokens") or 0
            rate = (tokens - self.tokens) / max(now - self.logged, 1e-9) if tokens > self.tokens else None
            scale = logs.get("hybrid/learning_rate_scale")
            if scale == self.scale:  # said before
                logs = {name: value for name, value in logs.items() if name != "hybrid/learning_rate_scale"}
            self.scale = scale or self.scale
            text = log_line(state.global_step, state.max_steps, logs, rate=rate, left=left, width=terminal_width())
            if "loss" in logs:
                self.tokens, self.logged = tokens, now
            if text and self.bar is not None:
                self.bar.write(text)
            elif text:
                say(text)

        def on_train_end(self, args, state, control, **kwargs):
            if self.bar is not None:
                self.bar.close()
                self.bar = None

    return Progress()


# Before and after.


def tell_of_trainer(trainer: Any, undecided: frozenset[str]) -> None:
    """Say what is trained, how long, at which rate, in how much memory, and where it is saved."""
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    parameters = list(model.parameters())
    total = sum(_size(parameter) for parameter in parameters)
    trained = sum(_size(parameter) for parameter in parameters if parameter.requires_grad)
    name = Path(getattr(model, "name_or_path", "") or type(model).__name__).name
    dtype = str(next(iter(parameters)).dtype).removeprefix("torch.")
    device = str(args.device) if args.device.type == "cpu" else _device_name(args.device)
    fact("model", f"{name}: {count(total)} parameters in {dtype}, on {device}")
    if trained < total:
        share = trained / total
        fact("trained", f"{count(trained)} of them ({share:.2g}), adapters" if share < 0.001 else
             f"{count(trained)} ({share:.1%}) in adapters")  # fmt: skip
    else:
        fact("trained", "all of them")
    fact("steps", _steps(trainer))
    fact("rate", _rate(trainer))
    if (memory := _memory(trainer)) is not None:
        fact("memory", memory)
    if (shared := _sharing(trainer)) is not None:
        fact("sharing", shared)
    fact("output", f"{args.output_dir}{_saving(trainer)}", whole=True)
    say()


def _size(parameter: Any) -> int:
    """Number of weights, of a packed parameter those that are in it."""
    state = getattr(parameter, "quant_state", None)
    if state is not None and getattr(state, "shape", None) is not None:
        return math.prod(state.shape)
    return getattr(parameter, "ds_numel", None) or parameter.numel()


def _device_name(device: Any) -> str:
    import torch

    module = torch.get_device_module(device)
    return module.get_device_name(device) if hasattr(module, "get_device_name") else str(device)


def _steps(trainer: Any) -> str:
    args = trainer.args
    rows, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
    product = " x ".join(str(n) for n in (rows, accumulated, args.world_size) if n > 1) or "1"
    each = rows * accumulated * args.world_size
    what = "completions" if hasattr(trainer, "num_generations") else "pairs" if trainer.trains_preferences else "rows"
    told = f"{each} {what} each" + (f" ({product})" if " x " in product else "")
    if what == "completions":
        told += f", {trainer.num_generations} for each prompt, of at most {args.max_completion_length} tokens"
    if args.max_steps > 0:
        return f"{args.max_steps:,}, {told}"
    try:
        per_epoch = max(math.ceil(len(trainer.get_train_dataloader()) / accumulated), 1)
    except TypeError:
        return told
    steps = math.ceil(args.num_train_epochs * per_epoch)
    return f"{steps:,} ({plural(args.num_train_epochs, 'epoch').replace('.0 ', ' ')}), {told}"


def _rate(trainer: Any) -> str:
    from hf_hybrid.build import rescue_is_on
    from hf_hybrid.config import was_given

    args, options = trainer.args, trainer.hybrid_args
    given = was_given(args, "learning_rate")
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)).replace("_", " ")
    told = f"{args.learning_rate:g} ({'as given' if given else 'the default'}), {schedule}"
    adapters = any(not parameter.requires_grad for parameter in trainer.model.parameters())
    if not trainer.has_phases and adapters and not given:
        return f"{told} of training all weights; adapters often need ten times as much: set --learning_rate"
    if not trainer.has_phases or not rescue_is_on(args, options):
        return told
    if adapters:
        return f"{told}, times a factor that lr_rescue knows for adapters; --learning_rate turns that off"
    return f"{told}; lr_rescue raises it in the first steps while that helps; --learning_rate turns that off"


def _memory(trainer: Any) -> str | None:
    """What the plan says, in words; `None` where no plan can be made."""
    from hf_hybrid.build import make_plan
    from hf_hybrid.plan.estimate import PlanError
    from hf_hybrid.records.summary import format_bytes

    try:
        plan = trainer.memory.plan if trainer.memory.streams else make_plan(trainer, None)
    except (PlanError, ValueError, TypeError, AttributeError):
        return None
    if plan is None:
        return None
    where = "host" if trainer.args.device.type == "cpu" else "device"
    told = f"{format_bytes(plan.peak_device_bytes)} planned on the {where} (an estimate)"
    if trainer.memory.streams:
        told += f", {format_bytes(plan.peak_host_bytes)} on the host, from where layers are streamed"
    return told


SAMPLED_TOKENS = 100_000
"""Tokens of windows on which the savings are tried out before a run."""


def _sharing(trainer: Any) -> str | None:
    """
    Say what computing every token once saves on windows drawn from the training set; `None` where it is not known.

    TRL pads each micro-batch to its longest row. A tree of the rows of a window has each shared prefix once, unless
    there is dropout, and nothing behind the last label. Pairs of DPO share within a micro-batch alone.
    """
    from hf_hybrid.rows.sharing import dropout_of, why_not

    args, rows, model = trainer.args, trainer.train_dataset, trainer.accelerator.unwrap_model(trainer.model)
    columns = set(getattr(rows, "column_names", None) or ())
    if not hasattr(rows, "__len__") or not ({"labels", "chosen_ids"} & columns) or not len(rows):
        return None
    if trainer.rows is None or not trainer.rows.may_share or why_not(model) is not None:
        return None
    shares = dropout_of(model) == 0.0
    draw = random.Random(args.seed)
    size = args.per_device_train_batch_size
    per_window = size * (args.gradient_accumulation_steps if "labels" in columns else 1)
    padded = computed = 0
    while padded < SAMPLED_TOKENS:
        window = [rows[place] for place in draw.sample(range(len(rows)), min(per_window, len(rows)))]
        found = [row for example in window for row in _as_rows(example, getattr(args, "max_length", None))]
        each = size if "labels" in columns else len(found)
        batches = [found[start : start + each] for start in range(0, len(found), each)]
        padded += sum(max(len(ids) for ids, _ in batch) * len(batch) for batch in batches)
        computed += _computed(found) if shares else sum(count for _, count in found)
        if len(rows) <= per_window:
            break
    saved = 1 - computed / max(padded, 1)
    if saved < 0.05:
        return None
    what = "padding, and shared prefixes" if shares else "padding, but no shared prefixes, because there is dropout"
    return f"about {saved:.0%} of the tokens need not be computed: {what}"


def _as_rows(example: dict[str, Any], longest: int | None) -> list[tuple[list[int], int]]:
    """The tokens of an example as the trainer cuts them, a list for each row, with how many of them are computed."""
    if "labels" in example:
        ids, labels = example["input_ids"][:longest], example["labels"][:longest]
        last = max((place for place, label in enumerate(labels) if label >= 0), default=0)
        return [(ids, last)]
    both = [(example["prompt_ids"] + example[name])[:longest] for name in ("chosen_ids", "rejected_ids")]
    return [(ids, len(ids) - 1) for ids in both]


def _computed(rows: list[tuple[list[int], int]]) -> int:
    """Tokens that a tree of the rows holds. Sorted, a row shares most with its neighbour."""
    from hf_hybrid.rows.tree import common

    fed = sorted(ids[:count] for ids, count in rows)
    return len(fed[0]) + sum(len(ids) - common(before, ids) for before, ids in itertools.pairwise(fed))


def _saving(trainer: Any) -> str:
    args = trainer.args
    strategy = getattr(args.save_strategy, "value", args.save_strategy)
    if strategy == "steps":
        every = f"{int(args.save_steps):,} steps" if args.save_steps >= 1 else f"{args.save_steps:.0%} of the run"
        return f"; a checkpoint every {every}"
    return "; a checkpoint every epoch" if strategy == "epoch" else "; no checkpoints on the way"


def tell_of_interruption(trainer: Any) -> None:
    """Say what an interrupted run has saved, and how to go on."""
    from hf_hybrid.saving import manifest

    if not first_process():
        return
    step, folder = trainer.state.global_step, trainer.args.output_dir
    last = manifest.last_checkpoint(Path(folder))
    say()
    if last is None:
        say(f"Stopped at step {step:,}. No checkpoint was saved, so the same command begins anew.")
        return
    behind = step - int(Path(last).name.rpartition("-")[2])
    lost = f", {plural(behind, 'step')} before" if behind > 0 else ""
    say(f"Stopped at step {step:,} of {trainer.state.max_steps:,}. Saved: {last}{lost}.")
    say("To go on, run the same command with --resume_from_checkpoint true")


def tell_of_end(trainer: Any, trained: dict[str, Any], metrics: dict[str, Any]) -> None:
    """Say how a run ended, where the model is, and what can be done with it."""
    if not first_process():
        return
    state, folder = trainer.state, folder_name(trainer.args.output_dir)
    summary = trainer.hybrid_summary()
    say()
    say(f"Done: {plural(state.global_step, 'step')} in {duration(trained.get('train_runtime', 0))}.")
    logged = [entry for entry in state.log_history if "loss" in entry]
    if logged and "reward" in logged[-1]:
        fact("reward", f"{logged[-1]['reward']:.3g} at the end ({logged[0]['reward']:.3g} at first)")
    elif logged:
        fact("loss", f"{logged[-1]['loss']:.4g} at the end ({logged[0]['loss']:.4g} at first)")
        if (accuracy := logged[-1].get("rewards/accuracies")) is not None:
            fact("accuracy", f"{accuracy:.0%} of the pairs ranked right at the end")
    if told := outcome(metrics):
        fact("held out", told)
    if (scale := summary.get("learning_rate_scale", 1.0)) != 1.0:
        fact("rate", f"lr_rescue multiplied the scheduled rate by {scale:.3g} at the end")
    if told := _saved_work(summary):
        fact("saved", told)
    if summary.get("leaps_made"):
        fact("leaps", f"{summary['leaps_made']}, which replaced {plural(summary['predicted_steps'], 'step')}")
    adapters = (Path(trainer.args.output_dir) / "adapter_config.json").is_file()
    fact("model", folder + (" (adapters)" if adapters else ""), whole=True)
    chats = bool(getattr(trainer.processing_class, "chat_template", None))
    commands = [f"chat {folder}"] if chats else []
    commands += [f"report {folder}", f"export {folder} --format {'merged' if adapters else 'gguf-q8_0'}"]
    for number, command in enumerate(commands):
        fact("" if number else "next", f"hf-hybrid {command}", whole=True)


def _saved_work(summary: dict[str, Any]) -> str:
    """What was not computed, in words."""
    tokens, shared, padding = (summary.get(name) or 0 for name in ("tokens", "tokens_shared", "tokens_padding"))
    told = []
    if tokens and (shared or padding):
        told.append(
            f"{(shared + padding) / (tokens + padding):.0%} of the tokens were not computed: {count(shared)} shared or "
            f"without influence, {count(padding)} padding"
        )
    if summary.get("rows_skipped"):
        told.append(f"{summary['rows_skipped']:,} of {summary['rows']:,} rows had no advantage")
    return "; ".join(told)
