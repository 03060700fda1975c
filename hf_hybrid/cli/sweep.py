"""
`hf-hybrid sweep`: try learning rates, and other options, and write the YAML of the best.

Every trial is a training with the same data and seeds; `cli/trials.py` runs them. Two rules choose the
values. The range of a single parameter becomes a grid of `--trials` values, evenly spaced, on a logarithmic scale where
it spans a decade or more. The grid is searched, not walked through: see [`Range.next_value`]. The values of several
parameters are proposed by Optuna's TPE.
"""

from __future__ import annotations

import argparse
import enum
import math
import signal
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_hybrid.arguments import check_range
from hf_hybrid.cli.console import quiet_imports, write_error, write_out
from hf_hybrid.cli.options import COMMAND, TRAIN, TRAINING, Command, CommandLine, OptionError
from hf_hybrid.cli.yaml_file import as_yaml
from hf_hybrid.files import write_text
from hf_hybrid.records.redaction import is_secret_name

if TYPE_CHECKING:
    from hf_hybrid.cli.trials import Trials

PROGRAM = "hf-hybrid sweep"
RESERVED = ("output_dir", "config", "resume_from_checkpoint", "num_processes", "accelerate_config")
"""Options that are no parameters: the sweep sets the first three, and the others change no loss."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = (
        "Try learning rates, and other options of a training. Each trial has the same data and seeds; it ends "
        "early when the forecast of its final loss says that it cannot win. The same command goes on with an "
        "interrupted sweep. Ends with a table, and best.yaml for `--config`."
    )
    add = parser.add_argument
    text = f"what trains: {', '.join(TRAINING)} (default: train)"
    add("trainer", nargs="?", choices=TRAINING, default="train", metavar="COMMAND", help=text)
    add("--config", required=True, metavar="FILE", help="YAML file with the options of all trials, for that command")
    add("--learning_rate", metavar="VALUES", help="learning rates to try: a range, 1e-5..1e-2, or values, 1e-4,3e-4")
    text = "another option to try, and its values: lora_r=8,32 or weight_decay=0..0.1; may be repeated"
    add("--param", action="append", default=[], metavar="NAME=VALUES", help=text)
    add("--trials", type=int, default=10, help="trials, those that end early included (default: 10)")
    add("--output", metavar="FOLDER", help="folder of the sweep (default: OUTPUT_DIR-sweep)")
    text = "end a trial when its probability of winning is below; 0: only when it diverges (default: 0.15)"
    add("--threshold", type=float, default=0.15, help=text)


# What is tried.


@dataclass(frozen=True)
class Choices:
    """An option, spelled with underscores, and the values that are tried in their order."""

    name: str
    choices: tuple

    def next_value(self, count: int, ended: dict[Any, tuple], running: Collection) -> Any:
        """Return the first that was not tried, `None` if all were; the arguments are those of [`Range`]."""
        return next((value for value in self.choices if value not in {*ended, *running}), None)


@dataclass(frozen=True)
class Range:
    """An option, spelled with underscores, and the numbers from `low` to `high`: integers if it takes such."""

    name: str
    low: float
    high: float

    @property
    def logarithmic(self) -> bool:
        """Whether values are spaced by ratio and not by difference: learning rates are, and a decade or more."""
        return self.low > 0 and (self.name == "learning_rate" or self.high / self.low >= 10)

    def grid(self, count: int) -> list:
        """`count` values over the range, in order; fewer if there are no more integers."""
        shares = [index / max(count - 1, 1) for index in range(count)]
        values = [self.low + (self.high - self.low) * share for share in shares]
        if self.logarithmic:
            values = [self.low * (self.high / self.low) ** share for share in shares]
        if isinstance(self.low, int):
            return list(dict.fromkeys(map(round, values)))
        # Digits that a person would write, within the range.
        return [min(max(float(f"{value:.3g}"), self.low), self.high) for value in values]

    def next_value(self, count: int, ended: dict[Any, tuple], running: Collection) -> Any:
        """
        Return the value of the grid of `count` values to try next, `None` if no other can be the best.

        The loss falls and rises once over a range. So no value can be the best that lies beyond one that is worse than
        the best so far. Of the others the one is next that lies farthest from all that were tried and from the ends of
        the range, which is bisection. If two are as far, it is the one on a side of the best where nothing was tried,
        or where the neighbour was better, or the larger one. The middle is the first.

        `ended` says by value how good it was (the smallest is the best), `running` are values that are being tried.
        """
        grid, tried = self.grid(count), {*ended, *running}
        left = [value for value in grid if value not in tried]
        if not tried:
            return left[(len(left) - 1) // 2] if left else None
        known = [value for value, standing in ended.items() if math.isfinite(standing[-1])]
        best = min(known, key=lambda value: ended[value], default=None)
        below = max((value for value in ended if known and value < best), default=None)
        above = min((value for value in ended if known and value > best), default=None)

        def merit(value: Any) -> tuple:
            place, taken = self._place(value, count), (-1, count, *(self._place(other, count) for other in tried))
            distance = round(min(abs(place - other) for other in taken), 1)
            neighbour = None if best is None else below if value < best else above
            return distance, neighbour is None, [-part for part in ended.get(neighbour, ())], value

        left = [value for value in left if (below is None or below < value) and (above is None or value < above)]
        return max(left, key=merit, default=None)

    def _place(self, value: float, count: int) -> float:
        """Where a value stands between the numbers 0 and `count - 1` of the grid."""
        scale = math.log if self.logarithmic else float
        return (count - 1) * (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))


def read_parameter(name: str, values: str, config: str, command: Command = TRAIN) -> Choices | Range:
    """Read `lo..hi` or `a,b,c`, as the command would read each value with this `--config`."""
    name, shown = name.replace("-", "_"), f"`{values}` for `{name}`"
    if name in RESERVED or is_secret_name(name):
        raise OptionError(f"`{name}` cannot be swept. Set it in the file of `--config`, or leave it out.")
    words = values.split("..") if ".." in values else values.split(",")
    read = [_value(name, word.strip(), config, command) for word in words]
    if len(read) < 2 or len(read) > 2 and ".." in values:
        raise OptionError(
            f"{shown} is no range and no list. Write `lo..hi`, for example `1e-5..1e-2`, or two values or more with "
            "commas. A single value belongs into the file of `--config`."
        )
    if ".." not in values:
        if len(set(read)) < len(read):
            raise OptionError(f"{shown} names a value twice.")
        return Choices(name, tuple(read))
    low, high = read
    if any(isinstance(end, bool) or not isinstance(end, (int, float)) for end in read):
        raise OptionError(f"{shown} is a range, and the option takes words. List them with commas.")
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise OptionError(f"{shown} must go from a number to a larger one, as in `1e-5..1e-2`.")
    if name == "learning_rate" and low <= 0:
        raise OptionError(f"{shown} must begin above 0: learning rates are tried on a logarithmic scale.")
    return Range(name, low, high)


def _value(name: str, word: str, config: str, command: Command) -> Any:
    """Return a value as the command reads it. Building all options checks it, also against the others."""
    line = CommandLine(["--config", config, f"--{name}={word}"], command)
    value = getattr(line.values, name)
    line.options()
    return value.value if isinstance(value, enum.Enum) else value


# The command.


def run(args: argparse.Namespace) -> int:
    """Run the trials. Returns 0; 1 if none finished, or after a message (of a full disk); 130 after Ctrl-C."""
    with quiet_imports():
        trials = _prepare(args)
    try:
        return _work(trials)
    except KeyboardInterrupt:
        write_out("Interrupted. The same command goes on.\n")
        return 128 + signal.SIGINT
    except (OSError, OptionError) as error:
        write_error(f"{PROGRAM}: error: {error} The same command goes on when that is put right.\n")
        return 1


def _prepare(args: argparse.Namespace) -> Trials:
    """Return the trials of the sweep, some of which may have been made."""
    from hf_hybrid.cli.data import Reader
    from hf_hybrid.cli.trials import Trials
    from hf_hybrid.integrations.optuna import ForecastPruner  # says what to install

    check_range("--trials", args.trials, {"at_least": 1})
    command = TRAINING[args.trainer]
    line = CommandLine(["--config", args.config], command)
    line.set_environment()
    line.check_required()
    parameters = _read_parameters(args, command)
    options = line.options()
    reader = Reader.of(options)
    if reader.holds_prompts or not reader.evaluates:
        raise OptionError(
            f"`eval_share: 0` in `{args.config}` leaves nothing to compare trials on, and by rewards a default of few "
            "prompts. Set `eval_share` to another share, or name an `eval_dataset`."
        )
    if options.data.early_stopping_patience is not None:
        raise OptionError("`early_stopping_patience` does not go with a sweep, which ends trials itself. Leave it out.")
    folder = Path(args.output or f"{options.config.output_dir}-sweep")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"`--output {folder}` cannot be made: {error.strerror}. Choose another.") from None
    pruner = ForecastPruner(options.config, threshold=args.threshold)
    values = {**({} if command is TRAIN else {COMMAND: command.name}), **line.from_file()}
    return Trials(folder, values, parameters, pruner=pruner, count=args.trials)


def _read_parameters(args: argparse.Namespace, command: Command) -> list[Choices | Range]:
    pairs = [] if args.learning_rate is None else [("learning_rate", args.learning_rate)]
    for word in args.param:
        name, equals, values = word.partition("=")
        if not equals:
            raise OptionError(f"`--param {word}` must be `NAME=VALUES`, for example `lora_r=8,32`.")
        pairs.append((name, values))
    parameters = [read_parameter(name, values, args.config, command) for name, values in pairs]
    names = [parameter.name for parameter in parameters]
    if not names:
        raise OptionError("Nothing is tried. Give `--learning_rate 1e-5..1e-2`, or `--param NAME=VALUES`.")
    if len(set(names)) < len(names):
        raise OptionError(f"A parameter is given twice: {', '.join(names)}.")
    return parameters


def _work(trials: Trials) -> int:
    """Run the rest of the sweep, and return the exit status."""
    from hf_hybrid.cli.trials import best_trial, table, tell

    trials.work()
    study, folder = trials.study(), trials.folder
    write_out(f"{table(study, trials.pruner, trials.count)}\n")
    best = best_trial(study)
    if best is None:
        write_error(f"{PROGRAM}: no trial finished. `output.txt` in `{folder}/trial-*` says why.\n")
        return 1
    for name, value in best.params.items():
        tried = {trial.params[name] for trial in study.get_trials(deepcopy=False) if name in trial.params}
        if len(tried) > 1 and not isinstance(value, (str, bool)) and value in (min(tried), max(tried)):
            beyond = "lower" if value == min(tried) else "higher"
            tell(f"No `{name}` that was tried is {beyond} than the best one. Try {beyond} ones too.")
    write_text(folder / "best.yaml", as_yaml({**trials.options, **best.params}))
    command = trials.options.get(COMMAND, "train")
    tell(f"Written: {folder / 'best.yaml'}, for `hf-hybrid {command} --config {folder / 'best.yaml'}`")
    return 0
