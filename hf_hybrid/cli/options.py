"""
The options of the commands that train. YAML overrides defaults, and the command line overrides YAML.

The module imports only the standard library, so `--help` is fast. Parsing imports transformers.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import importlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Optional, get_args, get_origin, get_type_hints

from hf_hybrid.arguments import HybridArguments, check_ranges, option
from hf_hybrid.cli.yaml_file import ENVIRONMENT, holds_secret, known_variables, read_options, split_private

PROGRAM = "hf-hybrid train"
PRIVATE = "HF_HYBRID_PRIVATE_OPTIONS"
"""Environment variable with options as JSON, which stand in no file: a sweep gives them to its trials so."""


class OptionError(ValueError):
    """An option does not exist or does not take its value."""


@dataclass
class OptionGroup:
    """Options under one heading of `--help`."""

    _argument_group_name = ""

    def __post_init__(self):
        try:
            check_ranges(self, fields(self))
        except ValueError as error:
            raise OptionError(str(error)) from None


@dataclass
class ModelOptions(OptionGroup):
    """Which model is trained, and how it is loaded."""

    _argument_group_name = "Model"

    model: Optional[str] = option(
        None,
        "Causal language model: an id on the Hub, a folder, or a config.json. A config.json, and a folder without "
        "weights, are trained from scratch.",
    )
    tokenizer: Optional[str] = option(None, "Tokenizer: id or folder. Default: that of the model.")
    model_revision: Optional[str] = option(None, "Branch, tag or commit of the model on the Hub.")
    from_scratch: bool = option(False, "Start from random weights, even if trained ones exist.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Precision of the weights in memory; --bf16 sets that of the computation. auto: float32, but with adapters "
        "the precision of the checkpoint.",
    )
    attn_implementation: Optional[str] = option(
        None, "Attention of the model, for example sdpa or flash_attention_2. Default: transformers chooses."
    )
    qat: Literal["none", "bitnet"] = option(
        "none",
        "bitnet: train linear layers whose weights are rounded to -1, 0 and 1 in every forward pass (1.58 bits), from "
        "random weights or on pretrained ones.",
    )
    trust_remote_code: bool = option(False, "Run the code that a model on the Hub brings with it.")


@dataclass
class DataOptions(OptionGroup):
    """What the model is trained on."""

    _argument_group_name = "Data"

    dataset: Optional[str] = option(
        None, "Texts or conversations: a .txt, .json, .jsonl, .csv or .parquet file, a folder, or an id on the Hub."
    )
    dataset_config: Optional[str] = option(None, "Configuration of the data set, if it has several.")
    dataset_split: str = option("train", "Split to train on.")
    eval_dataset: Optional[str] = option(
        None, "Data to evaluate on. Default: eval_share of the training data, which is then not trained on."
    )
    eval_split: str = option("train", "Split of eval_dataset to evaluate on.")
    eval_share: float = option(
        0.05,
        "Share of the sequences to evaluate on. Not used with eval_dataset. 0: no evaluation.",
        at_least=0,
        below=1,
    )
    text_column: str = option("text", "Column with the texts.")
    messages_column: str = option(
        "messages",
        "Column with conversations, which the tokenizer's chat template turns into text. Wins over text_column.",
    )
    sequence_length: int = option(
        512,
        "Tokens per training sequence. Documents are joined by end-of-text tokens and cut into sequences.",
        at_least=2,
    )


@dataclass
class AdapterOptions(OptionGroup):
    """Adapters that are trained in place of all weights."""

    _argument_group_name = "Adapters"

    peft: Literal["none", "lora", "qlora"] = option(
        "none", "lora: train low-rank adapters. qlora: the same over a base in 4 bits (nf4, bitsandbytes)."
    )
    lora_r: int = option(16, "Rank of the adapters.", at_least=1)
    lora_alpha: int = option(32, "The adapters are scaled by lora_alpha / lora_r.", at_least=1)
    lora_dropout: float = option(0.0, "Dropout before the adapters.", at_least=0, below=1)
    lora_target_modules: Optional[list[str]] = option(
        None, "Names of the modules that get adapters. Default: all linear layers except the head."
    )


@dataclass
class LaunchOptions(OptionGroup):
    """Options of the processes that train. They are read before any process starts."""

    _argument_group_name = "Processes"

    num_processes: Optional[int] = option(
        None, "Processes, one for each GPU. Default: all GPUs; 1 with --cpu, memory=auto or memory=stream.", at_least=1
    )
    accelerate_config: Optional[str] = option(
        None,
        "How processes share the work: ddp, fsdp2, zero2, zero3, or a file that `accelerate config` wrote. Default: "
        "ddp.",
    )
    cpu: bool = option(False, "Train on the CPU, as use_cpu does; several processes communicate over gloo.")


OWN_OPTIONS = (ModelOptions, DataOptions, AdapterOptions, LaunchOptions)

_TRAINING_OPTIONS = """\
Every option of {kind} is taken as well; --help_all lists them. The usual ones:
  --output_dir --max_steps --num_train_epochs --learning_rate --per_device_train_batch_size
  --gradient_accumulation_steps --bf16 --optim --lr_scheduler_type --warmup_steps --logging_steps --save_steps
  --save_total_limit --eval_strategy --seed --report_to --push_to_hub --hub_model_id --resume_from_checkpoint true

Names may be written with dashes too: --max-steps. A YAML file has the same names without leading dashes. More in
docs/cli.md, docs/launch.md and examples/configs/."""


@dataclass(frozen=True)
class Command:
    """
    A command that trains, and its options.

    Attributes:
        name (`str`): Of the command.
        summary (`str`): What it does, in one sentence.
        groups (`tuple[type[OptionGroup], ...]`): Dataclasses of its own options.
        config (`str`): Module and name of its training arguments, a class with the options of [`HybridArguments`].
        kind (`str`): The class that these extend, for people.
        undecided (`tuple[str, ...]`):
            Options of the training arguments that the command decides itself unless they are given.
        aliases (`Mapping[str, str]`): Other names of options.
    """

    name: str
    summary: str
    groups: tuple[type[OptionGroup], ...]
    config: str
    kind: str
    undecided: tuple[str, ...] = ("logging_steps",)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def program(self) -> str:
        return f"hf-hybrid {self.name}"

    @property
    def usage(self) -> str:
        return f"{self.program} [--config run.yaml] [--model MODEL] [--dataset DATASET] [option ...]"

    def config_class(self) -> Any:
        module, _, name = self.config.partition(":")
        return getattr(importlib.import_module(module), name)


TRAIN = Command(
    "train",
    "Train a causal language model on texts or conversations.",
    OWN_OPTIONS,
    "hf_hybrid.config:HybridConfig",
    "transformers.TrainingArguments",
)


# Help.


def help_text(command: Command = TRAIN) -> str:
    """Return the text of `--help`: the options of this package, in groups."""
    parser = argparse.ArgumentParser(
        prog=command.program,
        usage=command.usage,
        description=f"{command.summary} Order of the options: default < YAML < command line.",
        epilog=_TRAINING_OPTIONS.format(kind=command.kind),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    general = parser.add_argument_group("General")
    text = "YAML file with options, for example one that `plan` wrote; environment variables are under `env`."
    general.add_argument("--config", metavar="FILE", help=text)
    general.add_argument("-h", "--help", action="store_true", help="Show this and exit.")
    text = f"Show these options and all options of {command.kind}."
    general.add_argument("--help_all", "--help-all", action="store_true", help=text)
    for owner in (*command.groups, HybridArguments):
        hints = get_type_hints(owner)
        # The first option of `HybridArguments` has a heading of its own.
        group = general if owner is HybridArguments else parser.add_argument_group(owner._argument_group_name)
        for described in fields(owner):
            text = described.metadata["help"]
            if text.group:
                group = parser.add_argument_group(text.group)
            text += "" if described.default is None else f" (default: {described.default})"
            group.add_argument(f"--{described.name}", metavar=_metavar(hints[described.name]), help=text)
    return parser.format_help()


def _metavar(hint: Any) -> str:
    if type(None) in get_args(hint):
        hint = get_args(hint)[0]  # Optional[kind]
    if get_origin(hint) is Literal:
        return "{" + ",".join(get_args(hint)) + "}"
    return {bool: "BOOL", int: "INT", float: "FLOAT"}.get(hint, "TEXT")


def help_all(command: Command = TRAIN) -> str:
    """Return the text of `--help_all`: all options, also those of the training arguments."""
    parser = _parser(command)
    parser.usage = command.usage
    return parser.format_help()


# Parsing.


def _parser(command: Command):
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message):
            _refuse(message)

    # It is annotated with a `NewType` that no dataclass is.
    kinds: Any = (*command.groups, command.config_class())
    parser = Parser(kinds, prog=command.program, allow_abbrev=False, add_help=False)
    for action in parser._actions:
        if action.dest in command.undecided:
            action.default = None
    return parser


def complain(error: Exception, program: str = PROGRAM) -> int:
    """Print the error once for all processes, and return the exit status of a wrong use."""
    if int(os.environ.get("RANK", 0)) == 0:
        sys.stderr.write(f"{program}: error: {error}\n")
    return 2


def _refuse(message: str) -> NoReturn:
    raise OptionError(message)  # without the usage of 200 options


class TrainOptions(NamedTuple):
    """The options of a training, checked."""

    model: ModelOptions
    data: DataOptions
    adapters: AdapterOptions
    launch: LaunchOptions
    config: Any
    """A `HybridConfig`."""
    undecided: frozenset[str] = frozenset()
    """Options of the config that were not given, and that the command decides."""


class CommandLine:
    """
    A command line of a [`Command`] that trains, and the YAML file that it names.

    A training reads it in three stages. [`set_environment`] comes first, before anything imports torch, because torch
    reads some variables at import. [`values`] comes second. It knows every option but builds nothing, so processes can
    be started before any device is touched. [`options`] comes last, in each process that trains, because building a
    `HybridConfig` sets up the device. The file is read once.

    Values that cannot be read or are refused raise an [`OptionError`].
    """

    def __init__(self, arguments: Sequence[str], command: Command = TRAIN):
        self.command = command
        own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        own.add_argument("--config")
        own.error = _refuse
        given, words = own.parse_known_args(list(arguments))
        self._words = [self._by_own_name(word) for word in words]
        self.arguments, self.path = list(arguments), given.config
        self._from_file = {} if self.path is None else _read_yaml(self.path)
        self._from_file = {command.aliases.get(name, name): value for name, value in self._from_file.items()}
        self._variables = self._from_file.pop(ENVIRONMENT, None)
        self._from_file |= _private_options()

    @classmethod
    def again(cls, saved: dict[str, Any], overrides: Iterable[str] = ()) -> CommandLine:
        """
        Return the command line that [`to_dict`] returned, with words after it that override others.

        Somebody else may have written what was saved: of the variables it has only [`ABOUT_ARITHMETIC`].
        """
        line = cls([*saved["arguments"], *overrides])
        line._from_file = dict(saved["config"])
        line._from_file.pop(ENVIRONMENT, None)
        variables = known_variables(saved["variables"])
        line._variables = {name: value for name, value in variables.items() if value is not None}
        return line

    def to_dict(self) -> dict[str, Any]:
        """
        Return words and file as plain values, without secrets and the words that follow them. Of the variables under
        `env` these are the names, and the values of [`ABOUT_ARITHMETIC`].
        """
        words, option = [], []
        for word in [*self._words, "--"]:
            if word.startswith("--"):  # the option before has ended
                name, _, value = option[0].partition("=") if option else ("", "", "")
                words += [] if holds_secret(name, [value, *option[1:]]) else option
                option = []
            option.append(word)
        return {
            "arguments": words,
            "config": split_private(self.from_file())[0],
            "variables": known_variables(self._variables),
        }

    def _by_own_name(self, word: str) -> str:
        """Return a word with the name that the command has for an option of another."""
        name, equals, value = word.partition("=")
        known = self.command.aliases.get(name[2:].replace("-", "_")) if name.startswith("--") else None
        return word if known is None else f"--{known}{equals}{value}"

    def from_file(self) -> dict[str, Any]:
        """Return the options of the YAML file by name, as it has them, with the variables under `env`."""
        options = {name.replace("-", "_"): value for name, value in self._from_file.items()}
        return options if self._variables is None else {**options, ENVIRONMENT: self._variables}

    def glimpse(self, *names: str) -> dict[str, list[str] | None]:
        """Return the words of some options, which are checked before torch is imported; `None` where none is given."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for name in names:
            parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), nargs="*", dest=name)
        parser.error = _refuse
        given, file = vars(parser.parse_known_args(self._words)[0]), self.from_file()

        def words(name: str) -> list[str] | None:
            value = file.get(name) if given[name] is None else given[name]
            values = value if isinstance(value, list) else [] if value is None else [value]
            return [str(value) for value in values] or None

        return {name: words(name) for name in names}

    def set_environment(self) -> None:
        """Set the variables under `env` in the YAML file, over those that are set. Launched processes inherit them."""
        variables, where = {} if self._variables is None else self._variables, f"`{ENVIRONMENT}` in `{self.path}`"
        if not isinstance(variables, dict):
            raise OptionError(f"{where} must hold lines of the form `NAME: value`{_got(where, variables)}.")
        for name, value in variables.items():
            if not isinstance(name, str) or "=" in name or not _can_be_set(name):
                raise OptionError(f"`{name}` under {where} cannot be the name of an environment variable.")
            if not isinstance(value, (str, bool, int, float)):
                raise OptionError(
                    f"`{name}` under {where} must be a text or a number{_got(name, value)}. Put text that YAML reads "
                    "as something else in quotes."
                )
            if value != "" and not _can_be_set(str(value)):
                raise OptionError(
                    f"`{name}` under {where} cannot be the value of an environment variable{_got(name, repr(value))}. "
                    "Take out NUL and half surrogates."
                )
        os.environ.update({name: str(value) for name, value in variables.items()})

    @property
    def values(self) -> argparse.Namespace:
        """Every option by name, read without building anything or touching a device."""
        return self._parsed[0]

    @functools.cached_property
    def _parsed(self) -> tuple[argparse.Namespace, dict[str, Any]]:
        """Every option by name, and those alone that stand in the file or on the command line."""
        parser = self._parser
        actions = {action.dest: action for action in parser._actions}
        names = ["--config", *(string for action in parser._actions for string in action.option_strings)]
        for word in self._words:
            name = word.split("=", 1)[0]
            if name.startswith("--") and name not in names:
                raise OptionError(f"`{name}` is no option.{self._did_you_mean(name, names)}")
        # The words of the file come first, so that the user's win.
        of_file, written = self._words_of_file(actions)
        words = [*of_file, *self._words]
        # The parser writes no default over a value that is there.
        values, stray = parser.parse_known_args(words, argparse.Namespace(**written))
        if stray:
            raise OptionError(f"`{stray[0]}` belongs to no option. Options begin with two dashes.")
        unwritten = object()
        read, _ = parser.parse_known_args(words, argparse.Namespace(**dict.fromkeys(actions, unwritten)))
        written |= {name: value for name, value in vars(read).items() if value is not unwritten}
        if values.cpu:
            values.use_cpu = written["use_cpu"] = True
        return values, written

    @functools.cached_property
    def _parser(self):
        return _parser(self.command)

    def _did_you_mean(self, name: str, names: Iterable[str]) -> str:
        near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.75)
        return f" Did you mean `{near[0]}`?" if near else f" `{self.command.program} --help_all` lists all."

    def _words_of_file(self, actions: dict[str, argparse.Action]) -> tuple[list[str], dict[str, Any]]:
        """The options of the file as words, and those that no word can say (nothing, a list) as values."""
        words, values = [], {}
        for key, value in self._from_file.items():
            name = key.replace("-", "_")
            if name not in actions:
                raise OptionError(f"`{key}` in `{self.path}` is no option.{self._did_you_mean(name, actions)}")
            takes_list = actions[name].nargs in ("+", "*")
            self._check_kind(name, value)
            if value is None or isinstance(value, list) and not takes_list:
                values[name] = value
            elif isinstance(value, list):
                words += [f"--{name}", *map(str, value)]
            elif isinstance(value, dict):
                words.append(f"--{name}={json.dumps(value)}")
            else:
                words.append(f"--{name}={_word(value, actions[name].choices)}")
        return words, values

    def _check_kind(self, name: str, value: Any) -> None:
        """Refuse an empty line, a list or a mapping where the option takes none of them: argparse never sees these."""
        owner = next(owner for owner in self._parser.dataclass_types if name in get_type_hints(owner))
        hint, where = get_type_hints(owner)[name], f"`{name}` in `{self.path}`"
        kinds = {get_origin(kind) or kind for kind in get_args(hint) or (hint,)}
        if get_origin(hint) in (list, dict):
            kinds = {get_origin(hint)}
        if value is None and type(None) not in kinds:
            raise OptionError(f"{where} is empty. Give a value, or leave the line out for the default.")
        if isinstance(value, (list, dict)) and type(value) not in kinds:
            raise OptionError(f"{where} takes a single value{_got(name, repr(value))}.")

    def check_required(self) -> None:
        """Refuse a run without a model or without data."""
        required("model", self.values.model, self.command.program)
        required("dataset", self.values.dataset, self.command.program)

    @property
    def undecided(self) -> frozenset[str]:
        """The options that the command decides, as they were not given."""
        return frozenset(name for name in self.command.undecided if getattr(self.values, name) is None)

    def build(self, **decided: Any) -> tuple[Any, ...]:
        """
        Check the options and build each of the command's dataclasses; `decided` is added to what was given. They get
        nothing else, so that they know which defaults the user wrote.
        """
        return self._parser.parse_dict(self._parsed[1] | decided, allow_extra_keys=True)

    def options(self) -> TrainOptions:
        """Check the options and build the `HybridConfig`; a `ValueError` says what it refuses."""
        return TrainOptions(*self.build(), self.undecided)


def required(name: str, value: Any, program: str = PROGRAM) -> Any:
    """Return the value of an option that a run needs. Raises [`OptionError`] if it was not given."""
    if value is None:
        raise OptionError(f"`--{name}` is missing. `{program} --help` says what it takes.")
    return value


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        values = read_options(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"`--config {path}` cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"`--config {path}` is not text in UTF-8: {error}. Save it as UTF-8.") from None
    except RecursionError:
        raise OptionError(f"`--config {path}` is nested too deeply. It takes lines `learning_rate: 0.001`.") from None
    except ValueError as error:
        raise OptionError(f"`--config {path}` {error}.") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise OptionError(f"`--config {path}` must hold lines of the form `learning_rate: 0.001`.")
    return values


def _got(name: str, value: Any) -> str:
    """The end of a message, which shows a value only if it cannot be a secret."""
    secret = holds_secret(name, value) or isinstance(value, list) and any("=" in str(item) for item in value)
    return "" if secret else f", got `{str(value):.80}`"


def _private_options() -> dict[str, Any]:
    try:
        values = json.loads(os.environ.get(PRIVATE) or "{}")
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise OptionError(f"The environment variable `{PRIVATE}` must hold options as JSON. Unset it.")
    return values


def _can_be_set(text: str) -> bool:
    """Whether the text can stand in the environment of a process."""
    try:
        return "\0" not in text and bool(os.fsencode(text))
    except UnicodeEncodeError:
        return False


def _word(value: Any, choices: Iterable | None) -> Any:
    """YAML reads a bare `on`, `off`, `yes` or `no` as a bool; give the word back where it is one of `choices`."""
    words = {True: ("on", "yes"), False: ("off", "no")}[value] if isinstance(value, bool) else ()
    return next((word for word in words if word in (choices or ())), value)
