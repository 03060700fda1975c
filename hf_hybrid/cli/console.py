"""
What a command says on the terminal: lines, facts before a training, a summary after it.

Only the first process speaks. Facts and lines go to stdout, the bar (`cli/progress.py`) and errors to stderr. Names and
texts come from models and data of strangers, so every command writes through this file, which makes them [`visible`].
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shlex
import shutil
import sys
import textwrap
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any


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
    """Context in which dependencies show no bars and speak of errors alone, unless `TRANSFORMERS_VERBOSITY` is set."""
    with quiet_imports():
        import datasets
        import transformers
    with contextlib.ExitStack() as undo, warnings.catch_warnings():
        if not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            undo.callback(datasets.enable_progress_bars)
        if "TRANSFORMERS_VERBOSITY" not in os.environ:
            undo.callback(transformers.logging.set_verbosity, transformers.logging.get_verbosity())
            transformers.logging.set_verbosity_error()
            if transformers.logging.is_progress_bar_enabled():
                transformers.logging.disable_progress_bar()
                undo.callback(transformers.logging.enable_progress_bar)
            for name in ("trl", "accelerate", "peft", "bitsandbytes", "torchao"):
                other = logging.getLogger(name)
                undo.callback(other.setLevel, other.level)
                other.setLevel(logging.ERROR)
            warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def speaking(unsaid: tuple[str, ...] = ()) -> Generator[None]:
    """Context in which dependencies are quiet, and warnings of the package are lines, see [`Said`]."""
    said, own = Said(unsaid), logging.getLogger("hf_hybrid")
    with quiet_dependencies():
        own.addHandler(said)
        try:
            yield
        finally:
            own.removeHandler(said)


class Said(logging.Handler):
    """Writes warnings of the package past the bar, but those of `unsaid` (before their values are put in)."""

    def __init__(self, unsaid: tuple[str, ...]):
        super().__init__(logging.WARNING)
        self.unsaid = unsaid

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg not in self.unsaid:
            print_line(record.getMessage())


# Control characters but line feeds and tabs, what turns the direction of text, and halves of characters.
_INVISIBLE = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Return a text in which nothing is a command to the terminal or hides: an escape is `\\u001b`."""
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def write_out(text: str) -> None:
    """Write a text to stdout as it can be shown."""
    sys.stdout.write(visible(text))


def write_error(text: str) -> None:
    """Write a text to stderr as it can be shown."""
    sys.stderr.write(visible(text))


def print_line(text: str = "", indent: int = 0, *, unwrapped: bool = False) -> None:
    """Write a line, past a bar and wrapped to the terminal; of several processes the first one speaks."""
    if int(os.environ.get("RANK", 0)) == 0:
        from tqdm import tqdm

        lines = [text := visible(text)]
        if not unwrapped:
            further = " " * max(indent, 2)
            lines = textwrap.wrap(
                text, terminal_width(), subsequent_indent=further, break_long_words=False, break_on_hyphens=False
            )
        tqdm.write("\n".join(lines))
        sys.stdout.flush()


def print_fact(name: str, text: str, *, unwrapped: bool = False) -> None:
    """Write a fact: its name, and behind it the text, wrapped; `unwrapped`: in one line, for commands to copy."""
    before = f"  {name:<10} "
    print_line(before + text, len(before), unwrapped=unwrapped)


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


def is_number(value: Any) -> bool:
    """Whether an entry of a log can be shown as a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def outcome(metrics: dict[str, Any], likelihood: bool = True) -> str:
    """Return loss and perplexity (of a `likelihood`), or accuracy, or reward of an evaluation, in words."""
    parts: list[str] = []
    loss: Any = metrics.get("eval_loss")
    accuracy, reward = metrics.get("eval_rewards/accuracies", metrics.get("eval_accuracy")), metrics.get("eval_reward")
    if is_number(reward):
        parts.append(f"reward {reward:.3g}")
    elif is_number(loss):
        parts.append(f"loss {loss:.4g}")
    if is_number(accuracy):
        parts.append(f"{accuracy:.0%} of the pairs ranked right")
    elif is_number(loss) and not is_number(reward) and loss < 20 and likelihood:
        parts.append(f"perplexity {math.exp(loss):.4g}")
    return ", ".join(parts)


# Before and after.


def print_trainer(trainer: Any, *, by_rule: bool, saves: bool = True) -> None:
    """Say what is trained, and how. `by_rule`: the command has chosen the rate; `saves`: a model will be saved."""
    from hf_hybrid.hub.card import count_parameters
    from hf_hybrid.machine import describe_device
    from hf_hybrid.records.summary import format_bytes

    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    parameters = list(model.parameters())
    total = count_parameters(parameters)
    trained = count_parameters(parameter for parameter in parameters if parameter.requires_grad)
    name = Path(getattr(model, "name_or_path", "") or type(model).__name__).name
    dtype = str(next(iter(parameters)).dtype).removeprefix("torch.")
    device = describe_device(args.device).get("name", args.device)
    base = total - trained if hasattr(model, "peft_config") else total
    print_fact("model", f"{name}: {count(base)} parameters in {dtype}, on {device}")
    experts = [module for module in model.modules() if hasattr(module, "has_gate")]  # as transformers marks them
    if ways := sorted({module.config._experts_implementation for module in experts}):
        by_use = trainer.memory.streams and any(unit.storage.experts for unit in trainer.memory.streamer.units)
        way = f"computed by {', '.join(ways)} (experts_implementation of transformers)"
        print_fact("experts", way + "; those that tokens reach are copied to the device" * by_use)
    if trained < total:
        share = trained / total
        print_fact("trained", f"{count(trained)} ({share:{'.1%' if share >= 0.001 else '.2g'}}) in adapters")
    else:
        print_fact("trained", "all of them")
    if (teacher := getattr(trainer, "teacher_model", None)) is not None:
        size, own = count(count_parameters([*teacher.parameters()])), f"answers {args.lmbda:.0%} of the micro-batches"
        name = Path(teacher.name_or_path).name
        print_fact("teacher", f"{name}: {size} parameters; the model itself {own} (--lmbda)")
    print_fact("steps", _steps(trainer))
    print_fact("rate", _rate(trainer, by_rule))
    if trainer.memory.streams:
        plan, where = trainer.memory.plan, "host" if args.device.type == "cpu" else "device"
        text = f"{format_bytes(plan.peak_device_bytes)} planned on the {where} (an estimate), "
        print_fact("memory", f"{text}{format_bytes(plan.peak_host_bytes)} on the host, from where layers are streamed")
    if (rows := _rows(trainer)) is not None:
        print_fact("rows", rows)
    steps = f"{args.save_steps:.0%} of the run" if args.save_steps < 1 else f"{int(args.save_steps):,} steps"
    every = {"steps": args.save_steps > 0 and steps, "epoch": "epoch"}.get(args.save_strategy.value)
    checkpoints = f"a checkpoint every {every}" if every else "no checkpoints on the way"
    if saves:
        print_fact("output", f"{args.output_dir}; {checkpoints}", unwrapped=True)
    print_line()


def _steps(trainer: Any) -> str:
    args = trainer.args
    rows, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
    factors = [number for number in (rows, accumulated, args.world_size) if number > 1]
    what = "completions" if hasattr(trainer, "num_generations") else "pairs" if trainer.trains_preferences else "rows"
    text = f"{math.prod(factors)} {what} each" + (f" ({' x '.join(map(str, factors))})" if len(factors) > 1 else "")
    if what == "completions":
        text += f", {trainer.num_generations} for each prompt, of at most {args.max_completion_length} tokens"
    if (steps := steps_of(trainer)) is None:
        return text
    epochs = f" ({plural(args.num_train_epochs, 'epoch').replace('.0 ', ' ')})" * (args.max_steps <= 0)
    return f"{steps:,}{epochs}, {text}"


def steps_of(trainer: Any) -> int | None:
    """Return how many steps a run has; `None` for a stream of rows without `max_steps`."""
    args = trainer.args
    if args.max_steps > 0:
        return args.max_steps
    try:
        per_epoch = max(math.ceil(len(trainer.get_train_dataloader()) / args.gradient_accumulation_steps), 1)
    except TypeError:
        return None
    return math.ceil(args.num_train_epochs * per_epoch)


def print_time(seconds: float, steps: int) -> None:
    """Say how long a run takes whose second and third step took so many seconds each, if that is a minute or more."""
    from tqdm import tqdm

    if seconds * steps >= 60:
        each = f"{seconds:.3g}" if seconds < 100 else f"{seconds:,.0f}"
        took = f"{tqdm.format_interval(seconds * steps)} for {plural(steps, 'step')}, {each} s each"
        print_fact("time", f"{took} (by its second and third)")


def _rate(trainer: Any, by_rule: bool) -> str:
    from hf_hybrid.build import chooses_rate
    from hf_hybrid.config import was_given
    from hf_hybrid.run.trainer_view import own_losses

    args, written = trainer.args, was_given(trainer.args, "learning_rate")
    source = "the rule for adapters" if by_rule and written else "as given" if written else "the default"
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)).replace("_", " ")
    text = f"{args.learning_rate:.3g} ({source}), {schedule}"
    adapters = any(not parameter.requires_grad for parameter in trainer.model.parameters())
    no_rule = adapters and own_losses(trainer) and not trainer.trains_preferences
    if trainer.has_phases and chooses_rate(args, trainer.hybrid_args) and not no_rule:
        by = "by the rule for LoRA" if adapters else "by auto_lr if that helps"
        return f"{text}; raised {by}, unless you set --learning_rate"
    if adapters and not written:
        return f"{text}; adapters often need ten times the rate of all weights: set --learning_rate"
    return text


def _rows(trainer: Any) -> str | None:
    """What the run leaves out of its first windows, in words; `None` where each step finds that out."""
    from hf_hybrid.rows.foreseen import foresee

    if trainer.rows is None:
        return "padded, each for itself (share_rows)"
    if (found := foresee(trainer)) is None:
        return None
    if found.reason is not None:
        return f"as they are, padded: {found.reason}"
    text = f"about {found.shared + found.padding:.0%} of the tokens are not computed ({found.shared:.0%} in shared "
    text += f"prefixes or after the last label, {found.padding:.0%} padding)"
    return "; ".join([text, *found.but])


def print_interruption(trainer: Any) -> None:
    """Say what an interrupted run has saved, and how to go on."""
    from hf_hybrid.saving import manifest

    step, last = trainer.state.global_step, manifest.last_checkpoint(Path(trainer.args.output_dir))
    print_line()
    if last is None:
        print_line(f"Stopped at step {step:,}. No checkpoint was saved, so the same command begins anew.")
        return
    behind = step - int(Path(last).name.rpartition("-")[2])
    lost = f", {plural(behind, 'step')} before" if behind > 0 else ""
    print_line(f"Stopped at step {step:,} of {trainer.state.max_steps:,}. Saved: {last}{lost}.")
    print_line("To go on, run the same command again.")


def print_end(trainer: Any, trained: dict[str, Any], metrics: dict[str, Any]) -> None:
    """Say how a run ended, where the model is, and what can be done with it."""
    from tqdm import tqdm

    from hf_hybrid.run.trainer_view import own_losses

    state, folder, summary = trainer.state, shlex.quote(trainer.args.output_dir), trainer.hybrid_summary()
    logged = [entry for entry in state.log_history if "loss" in entry]
    print_line()
    of_all = f" of {state.max_steps:,}" if state.global_step < state.max_steps else ""
    seconds = f" in {tqdm.format_interval(trained['train_runtime'])}" if "train_runtime" in trained else ""
    print_line(f"Done: {state.global_step:,}{of_all} step{'s' * (state.max_steps > 1)}{seconds}.")
    for name in ("reward", "loss"):
        if values := [entry[name] for entry in logged if is_number(entry.get(name))]:
            some = math.ceil(len(values) / 5)  # a single batch says little
            first, last = (math.fsum(part) / some for part in (values[:some], values[-some:]))
            print_fact(name, f"{last:.4g}{' on average' * (some > 1)} at the end ({first:.4g} at first)")
            break
    if logged and (accuracy := logged[-1].get("rewards/accuracies")) is not None:
        print_fact("accuracy", f"{accuracy:.0%} of the pairs ranked right at the end")
    likelihood = not own_losses(trainer)
    if text := outcome(metrics, likelihood):
        before = [outcome(entry, likelihood) for entry in state.log_history if entry["step"] == 0]
        text += "".join(f" ({ended.removeprefix('reward ')} before the training)" for ended in before[:1])
        print_fact("eval", text)
    if (scale := summary.get("learning_rate_scale", 1.0)) != 1.0:
        print_fact("rate", f"auto_lr multiplied the scheduled rate by {scale:.3g} at the end")
    if per_second := summary["tokens_per_second"]:
        print_fact("speed", f"{per_second:,.0f} tokens/s")
    if summary["speed_hint"]:
        print_fact("", summary["speed_hint"])
    elif share := summary["device_share"]:
        print_fact("" if per_second else "speed", f"the device computed in {share:.0%} of the time")
    if text := _saved_work(summary):
        print_fact("saved", text)
    if total := summary.get("images"):
        shared = summary["images_shared"]
        print_fact("images", f"{shared:,} of {total:,} ({shared / total:.0%}) were shared, and not encoded again")
    if summary.get("leaps_made"):
        print_fact("leaps", f"{summary['leaps_made']}, which replaced {plural(summary['predicted_steps'], 'step')}")
    adapters = (Path(trainer.args.output_dir) / "adapter_config.json").is_file()
    print_fact("model", folder + (" (adapters)" if adapters else ""), unwrapped=True)
    images = hasattr(trainer.processing_class, "image_processor")
    answers = trainer.model.get_output_embeddings() is not None  # a reward model scores
    commands = [f"chat {folder}"] if answers and getattr(trainer.processing_class, "chat_template", None) else []
    commands += [f"report {folder}"]
    commands += [f"export {folder} --format {'merged' if adapters else 'gguf-q8_0'}"] * (answers and not images)
    for number, command in enumerate(commands):
        print_fact("" if number else "next", f"hf-hybrid {command}", unwrapped=True)


def _saved_work(summary: dict[str, Any]) -> str:
    """What was not computed, in words."""
    tokens, shared, padding = (summary.get(name) or 0 for name in ("tokens", "tokens_shared", "tokens_padding"))
    parts, of_what = [], "the tokens"
    if summary.get("rows_skipped"):
        parts.append(f"{summary['rows_skipped']:,} of {summary['rows']:,} rows were left out, without advantage")
        of_what = "the others' tokens"
    if tokens and (shared or padding):
        parts.append(
            f"{(shared + padding) / (tokens + padding):.0%} of {of_what} were not computed: {count(shared)} in shared "
            f"prefixes or after the last label, {count(padding)} padding"
        )
    elif tokens and (reason := summary.get("plain_rows_because")):
        parts.append(f"no token, as rows were computed padded: {reason}")
    return "; ".join(parts)
