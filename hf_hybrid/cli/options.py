"""
What `hf-hybrid train` takes, and in which order it holds: default < YAML < command line.

Importing this needs the standard library alone, so that `--help` is instant; parsing imports transformers.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Optional, get_type_hints

from hf_hybrid.arguments import HybridArguments

PROGRAM = "hf-hybrid train"
ENVIRONMENT = "env"
"""Key of a YAML file under which environment variables stand."""


class OptionError(ValueError):
    """An option that does not exist, or a value that it does not take."""


def _option(default, help_text: str):
    return field(default=default, metadata={"help": help_text})


@dataclass
class ModelOptions:
    """Which model is trained, and how it is loaded."""

    _argument_group_name = "Model"

    model: Optional[str] = _option(
        None,
        "Causal language model: an id on the Hub, a folder, or the config.json of one that is trained from scratch "
        "(as is a folder without weights).",
    )
    tokenizer: Optional[str] = _option(None, "Its tokenizer: id or folder. Default: that of the model.")
    model_revision: Optional[str] = _option(None, "Branch, tag or commit of the model on the Hub.")
    from_scratch: bool = _option(False, "Random weights, even where trained ones are there.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _option(
        "auto",
        "Precision of the weights in memory; computing in bf16 is `--bf16`. auto: float32, but with adapters what the "
        "checkpoint was saved in.",
    )
    attn_implementation: Optional[str] = _option(
        None, "Attention of the model, for example sdpa or flash_attention_2. Default: what transformers chooses."
    )
    trust_remote_code: bool = _option(False, "Run code that a model on the Hub brings with it.")


@dataclass
class DataOptions:
    """What it is trained on."""

    _argument_group_name = "Data"

    dataset: Optional[str] = _option(
        None, "Texts or conversations: a .txt, .json, .jsonl, .csv or .parquet file, a folder, or an id on the Hub."
    )
    dataset_config: Optional[str] = _option(None, "Configuration of the data set, where it has several.")
    dataset_split: str = _option("train", "Split that is trained on.")
    eval_dataset: Optional[str] = _option(
        None, "Data that is evaluated on. Default: eval_share of the blocks, never trained on."
    )
    eval_split: str = _option("train", "Split of eval_dataset that is evaluated on.")
    eval_share: float = _option(
        0.05, "Share of the blocks that is evaluated on; unused with eval_dataset. 0: no evaluation."
    )
    text_column: str = _option("text", "Column with the texts.")
    messages_column: str = _option(
        "messages", "Column with conversations, which go through the tokenizer's chat template; wins over text_column."
    )
    sequence_length: int = _option(
        512, "Tokens per training sequence. Documents are joined by end-of-text tokens and cut into such blocks."
    )

    def __post_init__(self):
        if self.sequence_length < 2:
            raise OptionError(f"`sequence_length` must be at least 2, got {self.sequence_length}.")
        if not 0 <= self.eval_share < 1:
            raise OptionError(f"`eval_share` must be at least 0 and less than 1, got {self.eval_share}.")


@dataclass
class AdapterOptions:
    """Adapters instead of all weights."""

    _argument_group_name = "Adapters"

    peft: Literal["none", "lora", "qlora"] = _option(
        "none", "lora: train low-rank adapters. qlora: the same over a base in 4 bits (nf4, bitsandbytes)."
    )
    lora_r: int = _option(16, "Rank of the adapters.")
    lora_alpha: int = _option(32, "Their scale is lora_alpha over lora_r.")
    lora_dropout: float = _option(0.0, "Dropout before the adapters.")
    lora_target_modules: Optional[list[str]] = _option(
        None, "Names of the modules that get adapters. Default: all linear layers but the head."
    )

    def __post_init__(self):
        for name in ("lora_r", "lora_alpha"):
            if getattr(self, name) < 1:
                raise OptionError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if not 0 <= self.lora_dropout < 1:
            raise OptionError(f"`lora_dropout` must be at least 0 and less than 1, got {self.lora_dropout}.")


@dataclass
class LaunchOptions:
    """On how many processes; read before any of them starts."""

    _argument_group_name = "Processes"

    num_processes: Optional[int] = _option(
        None, "Processes, one for each GPU. Default: all GPUs; 1 with --cpu, memory=auto or memory=stream."
    )
    accelerate_config: Optional[str] = _option(
        None,
        "How they work together: ddp, fsdp2, zero2, zero3, or a file that `accelerate config` wrote. Default: ddp.",
    )
    cpu: bool = _option(False, "Train on the CPU, as use_cpu; with --num_processes over gloo.")

    def __post_init__(self):
        if self.num_processes is not None and self.num_processes < 1:
            raise OptionError(f"`num_processes` must be at least 1, got {self.num_processes}.")


OWN_OPTIONS = (ModelOptions, DataOptions, AdapterOptions, LaunchOptions)

_TRAINING_OPTIONS = """\
Every option of transformers.TrainingArguments is taken as well; --help_all lists them. The usual ones:
  --output_dir --max_steps --num_train_epochs --learning_rate --per_device_train_batch_size
  --gradient_accumulation_steps --bf16 --optim --lr_scheduler_type --warmup_steps --logging_steps --save_steps
  --save_total_limit --eval_strategy --seed --report_to --push_to_hub --hub_model_id --resume_from_checkpoint true

Names may be written with dashes too: --max-steps. In a YAML file they have the same names, without those in front.
docs/cli.md, docs/launch.md and examples/configs/ have more."""


def help_text() -> str:
    """What `--help` prints: our own options, in groups."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [--config run.yaml] [--model MODEL] [--dataset DATASET] [option ...]",
        description="Train a causal language model on texts or conversations. Options hold in this order: default < "
        "YAML < command line.",
        epilog=_TRAINING_OPTIONS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    general = parser.add_argument_group("General")
    general.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with options, for example what `plan` wrote, and with environment variables under `env`.",
    )
    general.add_argument("-h", "--help", action="store_true", help="Show this and exit.")
    text = "Show these and all options of TrainingArguments."
    general.add_argument("--help_all", "--help-all", action="store_true", help=text)
    for options in OWN_OPTIONS:
        _describe(parser.add_argument_group(options._argument_group_name), options, fields(options))
    group = None
    for option in fields(HybridArguments):
        if option.metadata["help"].group:
            group = parser.add_argument_group(option.metadata["help"].group)
        _describe(group, HybridArguments, [option])
    return parser.format_help()


def _describe(group, owner: type, options: Iterable) -> None:
    hints = get_type_hints(owner)
    for option in options:
        text, default = option.metadata["help"], option.default
        if default is not None:
            text += f" (default: {default})"
        group.add_argument(f"--{option.name}", metavar=_metavar(hints[option.name]), help=text)


def _metavar(hint: Any) -> str:
    kinds = getattr(hint, "__args__", ())
    if type(None) in kinds:
        hint = kinds[0]  # Optional[kind]
    if getattr(hint, "__origin__", None) is Literal:
        return "{" + ",".join(hint.__args__) + "}"
    return {bool: "BOOL", int: "INT", float: "FLOAT"}.get(hint, "TEXT")


class TrainOptions(NamedTuple):
    """Everything that a training script needs to know."""

    model: ModelOptions
    data: DataOptions
    adapters: AdapterOptions
    launch: LaunchOptions
    config: Any
    """A `HybridConfig`."""


def parse_options(arguments: Sequence[str]) -> TrainOptions:
    """
    Read a command line, and the YAML file that it names; builds the `HybridConfig`.

    Raises:
        OptionError: If an option is unknown, which is said with the nearest known one, or has a value that it does not
            take.
        ValueError: If `HybridConfig` refuses the options together.
    """
    parser = _parser()
    tokens = _tokens(parser, arguments)
    if parser.parse_args(tokens).cpu:
        tokens.append("--use_cpu=True")
    return TrainOptions(*parser.parse_args_into_dataclasses(tokens, look_for_args_file=False))


def parse_values(arguments: Sequence[str]) -> argparse.Namespace:
    """
    Read them without building anything: what is decided before processes start must not touch a device.

    Raises:
        OptionError: As [`parse_options`].
    """
    parser = _parser()
    return parser.parse_args(_tokens(parser, arguments))


def set_environment(arguments: Sequence[str]) -> None:
    """
    Set the variables under `env` in the YAML file that a command line names, over those that are set already: once, by
    what starts a run, before anything imports torch. Processes that it launches inherit them.

    Raises:
        OptionError: If the file cannot be read, or `env` does not hold names with single values.
    """
    path = _config_file(arguments)[0]
    variables = None if path is None else read_yaml(path).get(ENVIRONMENT)
    if variables is None:
        return
    if not isinstance(variables, dict):
        raise OptionError(f"`{ENVIRONMENT}` in `{path}` must hold lines of the form `NAME: value`, got `{variables}`.")
    for name, value in variables.items():
        if not isinstance(name, str) or not name or set(name) & {"=", "\0"}:
            raise OptionError(f"`{name}` under `{ENVIRONMENT}` in `{path}` is no name of an environment variable.")
        if not isinstance(value, (str, bool, int, float)):
            raise OptionError(
                f"`{name}` under `{ENVIRONMENT}` in `{path}` must be a text or a number, got `{value}`. Put text that "
                "YAML reads as something else in quotes."
            )
    os.environ.update({name: str(value) for name, value in variables.items()})


def check_required(model: str | None, dataset: str | None) -> None:
    """
    Refuse a run that has nothing to train, or nothing to train it on.

    Raises:
        OptionError: Which of the two is missing.
    """
    for name, value in (("model", model), ("dataset", dataset)):
        if value is None:
            raise OptionError(f"`--{name}` is missing. `{PROGRAM} --help` says what it takes.")


def help_all() -> str:
    """What `--help_all` prints: all options, those of TrainingArguments too."""
    parser = _parser()
    parser.usage = f"{PROGRAM} [--config run.yaml] [--model MODEL] [--dataset DATASET] [option ...]"
    return parser.format_help()


def _parser():
    from transformers import HfArgumentParser

    from hf_hybrid.config import HybridConfig

    class Parser(HfArgumentParser):
        def error(self, message):
            _refuse(message)

    return Parser((*OWN_OPTIONS, HybridConfig), prog=PROGRAM, allow_abbrev=False, add_help=False)


def _tokens(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """One command line: what the YAML file says, then what the user says, so that the latter wins."""
    file, rest = _config_file(arguments)
    actions = {action.dest: action for action in parser._actions}
    names = [string for action in parser._actions for string in action.option_strings]
    for argument in rest:
        name = argument.split("=", 1)[0]
        if name.startswith("--") and name not in names:
            raise OptionError(f"`{name}` is no option.{_did_you_mean(name, names)}")
    from_file = [] if file is None else _yaml_tokens(parser, actions, file)
    tokens = [*from_file, *rest]
    stray = parser.parse_known_args(tokens)[1]
    if stray:
        raise OptionError(f"`{stray[0]}` belongs to no option. Options begin with two dashes.")
    return tokens


def _config_file(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The YAML file that a command line names, and what else is in it."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--config")
    own.error = _refuse
    given, rest = own.parse_known_args(list(arguments))
    return given.config, rest


def _refuse(message: str) -> NoReturn:
    raise OptionError(message)  # not the usage of 200 options


def _did_you_mean(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f" Did you mean `{near[0]}`?" if near else f" `{PROGRAM} --help_all` lists all."


def read_yaml(path: str | Path) -> dict[str, Any]:
    """
    Options from a YAML (or JSON) file.

    Raises:
        OptionError: If it cannot be read, or does not hold names with values.
    """
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"`--config {path}` cannot be read: {error.strerror or error}.") from None
    except yaml.YAMLError as error:
        raise OptionError(f"`--config {path}` is no valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise OptionError(f"`--config {path}` must hold lines of the form `learning_rate: 0.001`.")
    return values


def _yaml_tokens(parser, actions: dict[str, argparse.Action], path: str) -> list[str]:
    tokens = []
    for key, value in read_yaml(path).items():
        name = key.replace("-", "_")
        if name == ENVIRONMENT:
            continue
        if name not in actions:
            raise OptionError(f"`{key}` in `{path}` is no option.{_did_you_mean(name, actions)}")
        takes_list = actions[name].nargs in ("+", "*")
        if value is None or isinstance(value, list) and not takes_list:
            parser.set_defaults(**{name: value})
        elif isinstance(value, list):
            tokens += [f"--{name}", *map(str, value)]
        elif isinstance(value, dict):
            tokens.append(f"--{name}={json.dumps(value)}")
        else:
            tokens.append(f"--{name}={_word(value, actions[name].choices)}")
    return tokens


def _word(value: Any, choices: Iterable | None) -> Any:
    """What a bare `on`, `off`, `yes` or `no`, which YAML reads as a bool, is for an option with such choices."""
    words = {True: ("on", "yes"), False: ("off", "no")}[value] if isinstance(value, bool) else ()
    return next((word for word in words if word in (choices or ())), value)
