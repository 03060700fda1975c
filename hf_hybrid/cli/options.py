"""
The commands that train, their options, and how a command line becomes them: default < YAML < command line.

There is one set of option classes. `train` adds two options that TRL's configs have or do not need, `grpo` its rewards.
Options of TRL's scripts have the same names here, or are taken under both; a test compares them with TRL's
`ModelConfig`. The module imports only the standard library, so `--help` is fast. Parsing imports transformers.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Optional, get_args, get_origin, get_type_hints

from hf_hybrid.arguments import HybridArguments, check_ranges, option
from hf_hybrid.cli.console import write_error
from hf_hybrid.cli.other_tools import advice
from hf_hybrid.cli.yaml_file import ENVIRONMENT, holds_secret, read_options, split_private

COMMAND = "command"
"""Key of a YAML file under which the command stands that its options are for."""
PRIVATE = "HF_HYBRID_PRIVATE_OPTIONS"
"""Environment variable with options as JSON, which stand in no file: a sweep gives them to its trials so."""

NO_OTHER_RUN = (
    "output_dir", "resume_from_checkpoint", "save_", "async_save", "enable_jit_checkpoint", "logging_", "log_",
    "run_name", "report_to", "disable_tqdm", "push_to_hub", "hub_", "eval_st", "num_processes", "dataloader_num",
    "dataset_num_proc", "profile_memory", "sample_prompts",
)  # fmt: skip
"""How the names of options begin with which a run stays the same: where it computes, saves and reports."""

FOREIGN = (("adapter", "lora"), ("adapter", "qlora"), ("bf16", "auto"), ("fp16", "auto"), ("tf32", "auto"))
"""Names of ours with values that only other tools take."""


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
        "weights, are trained from scratch. Also --model_name_or_path.",
    )
    tokenizer: Optional[str] = option(None, "Tokenizer: id or folder. Default: that of the model.")
    add_tokens: Optional[list[str]] = option(None, "Tokens to add. Their embeddings are trained, with adapters too.")
    model_revision: Optional[str] = option(None, "Branch, tag or commit of the model on the Hub.")
    from_scratch: bool = option(False, "Start from random weights, even if trained ones exist.")
    allow_new_weights: bool = option(False, "Train a checkpoint that lacks weights (random ones begin), or has others.")
    dtype: Optional[Literal["auto", "bfloat16", "float16", "float32"]] = option(
        None,
        "Precision of the weights in memory; --bf16 sets that of the computation. auto: as the checkpoint has them. "
        "Default: float32, but with adapters auto.",
    )
    attn_implementation: Optional[str] = option(None, "sdpa, flash_attention_2, ... Default: transformers chooses.")
    qat: Literal["none", "bitnet"] = option(
        "none", "bitnet: linear layers whose weights are rounded to -1, 0 and 1 in every forward pass (1.58 bits)."
    )


@dataclass
class TemplateOptions(ModelOptions):
    """Of commands whose training arguments lack what those of SFT have."""

    chat_template_path: Optional[str] = option(
        None, "Chat template: a file, a name (chatml, llama3, qwen3, plain, ...), or a model to take it from."
    )
    eos_token: Optional[str] = option(None, "Token that ends answers. Default: that of the chat template.")


@dataclass
class TextModelOptions(TemplateOptions):
    """Of `train`, whose training arguments lack what those of TRL have."""

    trust_remote_code: bool = option(False, "Run the code that a model on the Hub brings with it.")


@dataclass
class DataOptions(OptionGroup):
    """What the model is trained on."""

    _argument_group_name = "Data"

    dataset: Optional[list[str]] = option(
        None,
        "Data sets, one or several: .json, .jsonl, .csv, .parquet or .txt files, folders, or ids on the Hub. Also "
        "--dataset_name.",
    )
    dataset_config: Optional[str] = option(None, "Configuration of a data set on the Hub, if it has several.")
    dataset_split: str = option("train", "Split to train on. Also --dataset_train_split.")
    dataset_weights: Optional[list[float]] = option(
        None,
        "Shares of several data sets, one each. No row is repeated: as many rows are taken as the shares allow. "
        "Default: all rows of all.",
    )
    columns: Optional[list[str]] = option(None, "Names of columns, as NEW=OLD: prompt=question completion=answer.")
    limit: Optional[int] = option(None, "Read at most so many rows of each data set.", at_least=1)
    dry_run: bool = option(False, "Say what would be trained, and what its rows would save; train nothing.")
    show_rows: int = option(0, "Show so many rows as the model sees them, and what of them is learned.", at_least=0)
    streaming: bool = option(False, "Read rows while training, not before; needs max_steps. Also --dataset_streaming.")
    system_prompt: Optional[str] = option(None, "System message of conversations that have none.")
    eval_dataset: Optional[list[str]] = option(None, "Data to evaluate on. Default: eval_share of the rows, held out.")
    eval_split: Optional[str] = option(
        None, "Split to evaluate on: of eval_dataset (default: train), or else of dataset. Also --dataset_test_split."
    )
    eval_share: Optional[float] = option(
        None,
        "Share of the rows to evaluate on. 0: no evaluation. Default: 0.05, and 0 in grpo and while streaming.",
        at_least=0,
        below=1,
    )
    early_stopping_patience: Optional[int] = option(
        None,
        "Stop after so many evaluations without a better loss (grpo: reward), and keep the best model. Evaluates and "
        "saves ten times in a run, or every eval_steps.",
        at_least=1,
    )


@dataclass
class TextDataOptions(DataOptions):
    """Of `train`, which joins texts and cuts them."""

    sequence_length: int = option(
        512, "Tokens of a sequence. Documents are joined by end-of-text tokens and cut into sequences.", at_least=2
    )


@dataclass
class AdapterOptions(OptionGroup):
    """Adapters that are trained in place of all weights, and the bits of the base under them."""

    _argument_group_name = "Adapters"

    peft: Literal["none", "lora", "qlora"] = option(
        "none",
        "lora: train low-rank adapters, as --use_peft does. qlora: the same over a base in 4 bits (nf4, bitsandbytes), "
        "as --use_peft --load_in_4bit does.",
    )
    adapter: Literal["continue", "new"] = option(
        "continue",
        "Where --model is a folder of trained adapters. continue: train them further. new: merge them into their base, "
        "and train new ones on that.",
    )
    use_peft: bool = option(False, "Train low-rank adapters in place of all weights.")
    lora_r: int = option(16, "Rank of the adapters.", at_least=1)
    lora_alpha: int = option(32, "The adapters are scaled by lora_alpha / lora_r.", at_least=1)
    lora_dropout: float = option(0.0, "Dropout before adapters. A shared prefix draws it once.", at_least=0, below=1)
    lora_target_modules: Optional[list[str]] = option(None, "Modules with adapters. Default: all linear but the head.")
    lora_target_parameters: Optional[list[str]] = option(None, "Names of parameters that get adapters.")
    lora_modules_to_save: Optional[list[str]] = option(None, "Modules that are trained whole beside the adapters.")
    lora_task_type: str = option("CAUSAL_LM", "Kind of task that peft notes in the adapters.")
    use_rslora: bool = option(False, "Scale the adapters by lora_alpha / sqrt(lora_r).")
    use_dora: bool = option(False, "DoRA: train magnitude and direction of the weights apart.")
    load_in_8bit: bool = option(False, "Load the base in 8 bits (bitsandbytes). With adapters only.")
    load_in_4bit: bool = option(False, "Load the base in 4 bits (bitsandbytes). With adapters only.")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = option("nf4", "Kind of 4 bits.")
    use_bnb_nested_quant: bool = option(False, "Quantise the scales of the 4 bits too. peft=qlora does.")
    bnb_4bit_quant_storage: Optional[str] = option(None, "Dtype in which the 4 bits are stored.")

    def __post_init__(self):
        super().__post_init__()
        self.use_peft = self.use_peft or self.peft != "none"
        self.load_in_4bit = self.load_in_4bit or self.peft == "qlora"
        self.use_bnb_nested_quant = self.use_bnb_nested_quant or self.peft == "qlora"


@dataclass
class LaunchOptions(OptionGroup):
    """Options of the processes that train. They are read before any process starts."""

    _argument_group_name = "Processes"

    num_processes: Optional[int] = option(
        None, "Processes, one for each GPU. Default: all GPUs; 1 with --cpu, memory=auto or memory=stream.", at_least=1
    )
    accelerate_config: Optional[str] = option(
        None, "How processes share the work: ddp, fsdp2, zero2, zero3, or a file of `accelerate config`. Default: ddp."
    )
    cpu: bool = option(False, "Train on the CPU, as use_cpu does; several processes communicate over gloo.")


@dataclass
class RewardOptions(OptionGroup):
    """What completions are rewarded for."""

    _argument_group_name = "Rewards"

    reward: Optional[list[str]] = option(
        None, "exact_match, numeric_answer, format, module:function or file.py:function. Also --reward_funcs."
    )
    reward_pattern: Optional[str] = option(None, "What a whole completion has to match for --reward format, a regex.")


# The commands.

ALIASES = {
    "model_name_or_path": "model",
    "dataset_name": "dataset",
    "dataset_train_split": "dataset_split",
    "dataset_test_split": "eval_split",
    "dataset_streaming": "streaming",
    "reward_funcs": "reward",
}
"""Names of options in TRL's scripts, which are taken too."""


@dataclass(frozen=True)
class Command:
    """A command that trains, and its options."""

    name: str
    summary: str
    config: str  # module and name of its training arguments, a class with the options of [`HybridArguments`]
    trainer: str  # module and name of its trainer
    kind: str  # the class that the training arguments extend, for people
    model: type[ModelOptions] = ModelOptions
    data: type[DataOptions] = DataOptions
    more: tuple[type[OptionGroup], ...] = ()  # options that it has alone
    training: tuple[str, ...] = ("max_length",)  # of [`TRAINING_OPTIONS`] those that no other command has
    defaulted: tuple[str, ...] = ("logging_steps", "logging_first_step")  # it decides these unless they are given

    @property
    def groups(self) -> tuple[type[OptionGroup], ...]:
        """Dataclasses of its options, in the order of [`Options`]."""
        return (self.model, self.data, AdapterOptions, LaunchOptions, *self.more)

    @property
    def program(self) -> str:
        return f"hf-hybrid {self.name}"


def imported(place: str) -> Any:
    """Return what a module and a name lead to: `module:name`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


TRAIN = Command(
    "train",
    "Train a causal language model on texts or conversations.",
    "hf_hybrid.config:HybridConfig",
    "hf_hybrid.trainer:HybridTrainer",
    "transformers.TrainingArguments",
    model=TextModelOptions,
    data=TextDataOptions,
    training=(),
)
SFT = Command(
    "sft",
    "Fine-tune a model on chats, instructions or texts. By default only the answers are learned.",
    "hf_hybrid.trl.sft_dpo:HybridSFTConfig",
    "hf_hybrid.trl.sft_dpo:HybridSFTTrainer",
    "trl.SFTConfig",
    training=("max_length", "packing"),
    defaulted=("logging_steps", "logging_first_step", "assistant_only_loss"),
)
DPO = Command(
    "dpo",
    "Train a model on preference pairs.",
    "hf_hybrid.trl.sft_dpo:HybridDPOConfig",
    "hf_hybrid.trl.sft_dpo:HybridDPOTrainer",
    "trl.DPOConfig",
    model=TemplateOptions,
    training=("max_length", "beta"),
)
GRPO = Command(
    "grpo",
    "Train a model by rewards for what it answers.",
    "hf_hybrid.trl.rl:HybridGRPOConfig",
    "hf_hybrid.trl.rl:HybridGRPOTrainer",
    "trl.GRPOConfig",
    model=TemplateOptions,
    more=(RewardOptions,),
    training=("num_generations", "max_completion_length", "temperature"),
    defaulted=("logging_steps", "logging_first_step", "learning_rate", "log_completions"),
)
KTO = Command(
    "kto",
    "Train a model on answers that are labelled as good or bad.",
    "hf_hybrid.trl.others:HybridKTOConfig",
    "hf_hybrid.trl.others:HybridKTOTrainer",
    "trl.KTOConfig",
    model=TemplateOptions,
    training=("max_length", "beta"),
)
REWARD = Command(
    "reward",
    "Train a reward model, which scores answers, on preference pairs.",
    "hf_hybrid.trl.others:HybridRewardConfig",
    "hf_hybrid.trl.others:HybridRewardTrainer",
    "trl.RewardConfig",
)
TRAINING = {command.name: command for command in (TRAIN, SFT, DPO, KTO, REWARD, GRPO)}


class Options(NamedTuple):
    """The options of a training, checked."""

    command: Command
    model: ModelOptions
    data: Any
    adapters: AdapterOptions
    launch: LaunchOptions
    config: Any
    """The hybrid config of the trainer."""
    defaulted: frozenset[str]
    """Options of the config that were not given, and that the command decides."""
    trust_remote_code: bool
    """Whether code of the model may run: an option of `train`, and of TRL's configs."""
    rewards: RewardOptions | None = None


# Help.

USUAL = {
    "Model and data": (
        "model", "dataset", "columns", "limit", "system_prompt", "sequence_length", "eval_dataset", "eval_share",
        "early_stopping_patience", "dry_run", "show_rows",
    ),
    "Rewards": ("reward", "reward_pattern"),
    "Adapters": ("peft", "lora_r", "lora_alpha", "lora_target_modules"),
    "Processes": ("num_processes", "cpu"),
}  # fmt: skip
"""Options that `--help` shows, by heading; then it shows those of [`TRAINING_OPTIONS`]."""
TRAINING_OPTIONS = {
    "output_dir": "Folder of the model and its checkpoints.",
    "max_length": "Tokens of a row; longer ones are cut. Default: 1024.",
    "packing": "Put several rows into one of max_length tokens.",
    "num_generations": "Completions of a prompt, whose rewards are compared. Default: 8.",
    "max_completion_length": "Tokens of a completion at most. Default: 512.",
    "temperature": "Of the sampling. Default: 1.",
    "beta": "How close the model stays to its beginning. Default: 0.1.",
    "learning_rate": "Default: with lora by a rule, from the shape of the adapters.",
    "num_train_epochs": "Passes over the data. Default: 3.",
    "max_steps": "Steps, in place of epochs.",
    "per_device_train_batch_size": "Rows of a micro-batch on each device. Default: 8.",
    "gradient_accumulation_steps": "Micro-batches of a step. Default: 1.",
    "warmup_steps": "Steps, or a share of all steps, in which the rate rises.",
    "bf16": "Compute in bf16. Default: where the GPU does, but in train false.",
    "activation_checkpointing": "true, false or auto (as few layers as memory asks for).",
    "eval_steps": "Evaluate every so many steps, with --eval_strategy steps.",
    "save_steps": "Save a checkpoint every so many steps. Default: 500.",
    "resume_from_checkpoint": "false: begin anew. true: go on with other options. Default: auto.",
    "report_to": "wandb, tensorboard, trackio, ... Default: none.",
    "seed": "Default: 42.",
}
"""What `--help` says of options of transformers and TRL, in a line: their own help takes many."""


def help_text(command: Command = TRAIN) -> str:
    """Return the text of `--help`: the usual options, on three screens at most."""
    end = f"`{command.program} --help all` lists every option, also those of {command.kind}. More in docs/cli.md."
    parser, described = _help_parser(command, end), {}
    for owner in command.groups:
        described |= {known.name: (known, get_type_hints(owner)[known.name]) for known in fields(owner)}
    for title, names in USUAL.items():
        group = parser.add_argument_group(title)
        for name in names:
            if name in described:
                _describe(group, *described[name])
    group = parser.add_argument_group("Training")
    group.add_argument("--config", metavar="FILE", help="YAML file with options, under those of the command line.")
    others = {name for other in TRAINING.values() for name in other.training} - {*command.training}
    for name, text in TRAINING_OPTIONS.items():
        if name not in others:
            group.add_argument(f"--{name}", metavar="X", help=text)
    return parser.format_help()


def help_all(command: Command = TRAIN) -> str:
    """Return the text of `--help all`: all options, also those of the training arguments."""
    parser = _help_parser(command, "Names may be written with dashes too: --max-steps. More in docs/cli.md.")
    for owner in (*command.groups, HybridArguments):
        hints, title = get_type_hints(owner), getattr(owner, "_argument_group_name", "")
        group = parser.add_argument_group(title) if title else parser
        for known in fields(owner):
            if known.metadata["help"].group:
                group = parser.add_argument_group(known.metadata["help"].group)
            _describe(group, known, hints[known.name])
    described = {action.dest for action in parser._actions}
    group = parser.add_argument_group(command.kind)
    for action in _parser(command)._actions:
        if action.dest not in described:
            group._add_action(action)
    return parser.format_help()


def _help_parser(command: Command, end: str) -> argparse.ArgumentParser:
    reward = " --reward R" if command is GRPO else ""
    usage = f"{command.program} [--config FILE] --model NAME --dataset DATA{reward} ..."
    return argparse.ArgumentParser(usage=usage, description=command.summary, epilog=end, add_help=False)


def _describe(group: Any, known: Field, hint: Any) -> None:
    text = known.metadata["help"] + ("" if known.default is None else f" (default: {known.default})")
    group.add_argument(f"--{known.name}", metavar=_metavar(hint), help=text)


def _metavar(hint: Any) -> str:
    if type(None) in get_args(hint):
        hint = get_args(hint)[0]  # Optional[kind]
    if get_origin(hint) is Literal:
        return "{" + ",".join(get_args(hint)) + "}"
    return {bool: "BOOL", int: "INT", float: "FLOAT"}.get(hint, "TEXT")


# Parsing.


def _parser(command: Command):
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message):
            _refuse(message)

    # It is annotated with a `NewType` that no dataclass is.
    kinds: Any = (*command.groups, imported(command.config))
    parser = Parser(kinds, prog=command.program, allow_abbrev=False, add_help=False)
    for action in parser._actions:
        if action.dest in command.defaulted:
            action.default = None
    return parser


def _refuse(message: str) -> NoReturn:
    raise OptionError(message)  # without the usage of 200 options


def complain(error: Exception, program: str) -> int:
    """Print the error once for all processes, and return the exit status of a wrong use."""
    if int(os.environ.get("RANK", 0)) == 0:
        write_error(f"{program}: error: {error}\n")
    return 2


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
        self.command, self.arguments = command, list(arguments)
        own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        own.add_argument("--config")
        own.error = _refuse
        known, words = own.parse_known_args(self.arguments)
        self.path = known.config
        self._words = [_by_own_name(word) for word in words]
        file = {} if self.path is None else read_file(self.path)
        self._variables, wanted = file.pop(ENVIRONMENT, None), file.pop(COMMAND, command.name)
        if wanted != command.name:
            raise OptionError(f"`--config {self.path}` is for another command: `hf-hybrid {wanted}`.")
        names = {key: key.replace("-", "_") for key in file}
        self._from_file = {ALIASES.get(names[key], names[key]): value for key, value in file.items()}
        self._from_file |= _private_options()

    def from_file(self) -> dict[str, Any]:
        """Return the options of the YAML file by name, as it has them, with the variables under `env`."""
        return self._from_file if self._variables is None else {**self._from_file, ENVIRONMENT: self._variables}

    def early(self, *names: str) -> dict[str, list[str]]:
        """Return the words of some options, for checks before torch is imported; none where it is not given."""
        return {name: self._written.get(name, []) for name in names}

    @functools.cached_property
    def _written(self) -> dict[str, list[str]]:
        """The words of every option that was given."""
        found: dict[str, list[str]] = {}
        for name, value in self._from_file.items():
            found[name] = list(map(str, value if isinstance(value, list) else [] if value is None else [value]))
        words: list[str] = []
        for word in self._words:
            if word.startswith("--"):
                name, equals, value = word.removeprefix("--").partition("=")
                words = found[name.replace("-", "_")] = [value] * bool(equals)
            else:
                words.append(word)
        return found

    def note(self) -> dict[str, Any]:
        """Return what tells this run from another: its command and options, in one form, and without secrets."""
        written = {name: words or ["true"] for name, words in self._written.items()}
        options = {n: list(map(_plain, words)) for n, words in written.items() if not n.startswith(NO_OTHER_RUN)}
        for name in ("model", "tokenizer", "dataset", "eval_dataset"):
            if name in options:
                paths = [Path(word).expanduser() for word in self._written[name]]
                options[name] = [str(path.resolve()) if path.exists() else str(path) for path in paths]
                if "dataset" in name and any(held := list(map(_held, paths))):
                    options[f"{name} (what it holds)"] = held
        return {"command": self.command.name, "options": split_private(options)[0]}

    def set_environment(self) -> None:
        """Set the variables under `env` in the YAML file, over those that are set. Launched processes inherit them."""
        variables, where = {} if self._variables is None else self._variables, f"`{ENVIRONMENT}` in `{self.path}`"
        if not isinstance(variables, dict):
            raise OptionError(f"{where} must hold lines of the form `NAME: value`{_got(where, variables)}.")
        for name, value in variables.items():
            if not isinstance(name, str) or not name or "=" in name:
                raise OptionError(f"`{name}` under {where} cannot be the name of an environment variable.")
            if not isinstance(value, (str, bool, int, float)):
                raise OptionError(
                    f"`{name}` under {where} must be a text or a number{_got(name, value)}. Put text that YAML reads "
                    "as something else in quotes."
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
        strings = ["--config", *(string for action in parser._actions for string in action.option_strings)]
        for word in self._words:
            name = word.split("=", 1)[0]
            if name.startswith("--") and name not in strings:
                raise OptionError(f"`{name}` is no option.{self._advice(name, strings)}")
        unwritten = object()
        # The words of the file come first, so that the user's win. The parser writes no default over a value.
        of_file, values_of_file = self._words_of_file(actions)
        blank = argparse.Namespace(**{**dict.fromkeys(actions, unwritten), **values_of_file})
        parsed, stray = parser.parse_known_args([*of_file, *self._words], blank)
        if stray:
            raise OptionError(f"`{stray[0]}` belongs to no option. Options begin with two dashes.")
        written = {name: value for name, value in vars(parsed).items() if value is not unwritten}
        if written.get("cpu"):
            written["use_cpu"] = True
        defaults = {action.dest: action.default for action in reversed(parser._actions)}  # an option, then its `--no_`
        return argparse.Namespace(**{**defaults, **written}), written

    @functools.cached_property
    def _parser(self):
        return _parser(self.command)

    def _advice(self, name: str, names: Iterable[str]) -> str:
        if said := advice(name.removeprefix("--").replace("-", "_"), {own.removeprefix("--") for own in names}):
            return f" {said}"
        near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.75)
        return f" Did you mean `{near[0]}`?" if near else f" `{self.command.program} --help all` lists all."

    def _words_of_file(self, actions: dict[str, argparse.Action]) -> tuple[list[str], dict[str, Any]]:
        """The options of the file as words, and those that no word can say (nothing, a list) as values."""
        self._check_names(actions)
        words, values = [], {}
        for name, value in self._from_file.items():
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

    def _check_names(self, actions: dict[str, argparse.Action]) -> None:
        """Refuse the names in the file that are no options, all in one message."""
        others = [n for n, value in self._from_file.items() if n not in actions or (n, value) in FOREIGN]
        if len(others) == 1 and others[0] not in actions:
            raise OptionError(f"`{others[0]}` in `{self.path}` is no option.{self._advice(others[0], actions)}")
        if others:
            lines = [f"  {name}:{self._advice(name, actions)}" for name in others]
            raise OptionError(
                f"`{self.path}` has what is no option of `{self.command.program}`:\n" + "\n".join(lines) + "\n"
                f"`hf-hybrid convert {self.path} > run.yaml` writes a file of another tool with our names."
            )

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
        """Refuse a run without a model or without data. A file of another tool has them under other names."""
        for name, words in self.early("model", "dataset").items():
            if not words and self._from_file:
                self._check_names({action.dest: action for action in self._parser._actions})
            required(name, words or None, self.command.program)

    @property
    def processes(self) -> int:
        """Processes that train: one for each GPU, unless the options say otherwise."""
        if self.values.num_processes is not None:
            return LaunchOptions(num_processes=self.values.num_processes).num_processes or 1  # checked
        if self.values.use_cpu or self.values.memory != "off":
            return 1
        import torch

        return max(torch.accelerator.device_count(), 1)

    @property
    def defaulted(self) -> frozenset[str]:
        """The options that the command decides, as they were not given."""
        return frozenset(name for name in self.command.defaulted if getattr(self.values, name) is None)

    def _decided(self) -> dict[str, Any]:
        """Training arguments that follow from other options, or are the command's, where they are not written."""
        written, values = self._parsed[1], {}
        if self.command is not TRAIN and not any("checkpointing" in name for name in written):
            values["activation_checkpointing"] = "auto"
        if written.get("early_stopping_patience") is not None:
            rewarded, by = self.command is GRPO, written.get("eval_strategy", "steps")
            values |= {"load_best_model_at_end": True, "greater_is_better": rewarded, "eval_strategy": by}
            values |= {"metric_for_best_model": f"eval_{'reward' if rewarded else 'loss'}", "save_strategy": by}
            steps = written.get("eval_steps", written.get("save_steps", 0.1))
            values |= {"eval_steps": steps, "save_steps": steps, "save_total_limit": 1}  # beside the best one
        return values

    def options(self) -> Options:
        """
        Check the options and build the config of the trainer; a `ValueError` says what it refuses.

        The dataclasses get what was written and nothing else, so that they know which defaults the user wrote.
        """
        defaulted, values = self.defaulted, {**self._decided(), **self._parsed[1]}
        if "dataset_text_field" in values:  # TRL's name for it
            values["columns"] = [*(values.get("columns") or ()), f"text={values['dataset_text_field']}"]
        model, data, adapters, launch, *more, config = self._parser.parse_dict(values, allow_extra_keys=True)
        trusted = (model if isinstance(model, TextModelOptions) else config).trust_remote_code
        return Options(self.command, model, data, adapters, launch, config, defaulted, trusted, *more)


def _plain(word: str) -> str:
    """Return a word of an option in the form that is compared: `1e-3` is `0.001`, `True` is `true`."""
    try:
        return f"{float(word):.15g}"
    except ValueError:
        return word.lower() if word.lower() in ("true", "false") else word


def _held(path: Path) -> str:
    """Return bytes and checksum of a file, of a large one its first part; of a folder the bytes; else nothing."""
    if path.is_file():
        with path.open("rb") as file:
            return f"{path.stat().st_size:,} bytes, {zlib.crc32(file.read(1 << 26)):08x}"
    return f"{sum(file.stat().st_size for file in path.rglob('*')):,} bytes" if path.is_dir() else ""


def _by_own_name(word: str) -> str:
    """Return a word of the command line with our name for an option of TRL's scripts."""
    name, equals, value = word.partition("=")
    own = ALIASES.get(name[2:].replace("-", "_")) if name.startswith("--") else None
    return word if own is None else f"--{own}{equals}{value}"


def required(name: str, value: Any, program: str) -> Any:
    """Return the value of an option that a run needs. Raises [`OptionError`] if it was not given."""
    if value is None:
        raise OptionError(f"`--{name}` is missing. `{program} --help` says what it takes.")
    return value


def read_file(path: str) -> dict[str, Any]:
    """Return the options of a YAML file. Raises [`OptionError`]."""
    try:
        values = read_options(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"`--config {path}` cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"`--config {path}` is not text in UTF-8: {error}. Save it as UTF-8.") from None
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


def _word(value: Any, choices: Iterable | None) -> Any:
    """YAML reads a bare `on`, `off`, `yes` or `no` as a bool; give the word back where it is one of `choices`."""
    words = {True: ("on", "yes"), False: ("off", "no")}[value] if isinstance(value, bool) else ()
    return next((word for word in words if word in (choices or ())), value)
