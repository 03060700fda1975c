"""
What `hf-hybrid sft | dpo | grpo` do before they train: check everything that can be checked, then load the model.

The order is that of cost. Files, columns and names are looked at first, without torch ([`check_early`]); then options,
the config of the model, its tokenizer and every row; the weights of the model come last. The trainers are
[`HybridSFTTrainer`], [`HybridDPOTrainer`] and [`HybridGRPOTrainer`].
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_hybrid.cli import data as sources
from hf_hybrid.cli import formats, screen
from hf_hybrid.cli import rewards as reward_functions
from hf_hybrid.cli.options import CommandLine, ModelOptions, OptionError, required
from hf_hybrid.cli.tasks import FineTunedModel, FineTuneOptions, FineTuningData, RewardOptions

# First looks, with the standard library.


def check_early(line: CommandLine) -> None:
    """
    Refuse a missing option, a file that is not there, columns of no known format and names of no reward function.

    Raises:
        OptionError: What is wrong, and what there is.
    """
    command = line.command.name
    asked = ("model", "dataset", "eval_dataset", "columns", "dataset_weights", "reward", "reward_pattern")
    given = line.glimpse(*asked)
    program = line.command.program
    (model, *_), names = required("model", given["model"], program), required("dataset", given["dataset"], program)
    check_model(model)
    renamed = sources.renames(given["columns"])
    sources.check_sources(command, "dataset", names, renamed)
    sources.check_sources(command, "eval_dataset", given["eval_dataset"] or [], renamed)
    if command == "grpo":
        try:
            for name in required("reward", given["reward"], program):
                reward_functions.check_name(name, next(iter(given["reward_pattern"] or []), None))
        except reward_functions.RewardError as error:
            raise OptionError(str(error)) from None


def check_model(name: str) -> None:
    """Refuse a path that holds no model. What may be an id on the Hub is not looked at."""
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
            raise OptionError(
                f"`--model {name}` holds adapters. Merge them first, `hf-hybrid export {name} --format merged`, or set "
                "`--model` to their base."
            )
        if not (path / "config.json").is_file():
            raise OptionError(f"`--model {name}` holds no `config.json`, so it is not the folder of a model.")
    elif not path.exists() and (name.startswith((".", "/", "~")) or path.suffix == ".json" or name.count("/") > 1):
        raise OptionError(f"`--model {name}`: there is no such file or folder.")


# Everything else.


def prepare(line: CommandLine) -> tuple[Any, dict[str, str], frozenset[str]]:
    """
    Return the trainer of a command, the names of model and data for the card, and the options that were not given.

    Raises:
        OptionError, ValueError, TypeError, ImportError: What cannot be used, in one sentence.
    """
    from transformers import set_seed

    from hf_hybrid.cli.answers import needs_template, set_template
    from hf_hybrid.cli.run import DATA_NAME, check_output, check_vocabulary, load_tokenizer, read_config
    from hf_hybrid.files import write_note

    check_early(line)
    command, options = line.command.name, _options(line)
    model, data, args = options.model, options.data, options.config
    names: list[str] = required("dataset", data.dataset, line.command.program)
    check_output(args.output_dir)
    _check_options(options)
    functions = [] if options.rewards is None else _reward_functions(options.rewards, args)
    named = _as_model_options(model, trust_remote_code=args.trust_remote_code)
    with args.main_process_first(desc="loading the tokenizer"):
        config = read_config(named)
        tokenizer = load_tokenizer(named)
    check_vocabulary(config, required("model", model.model), len(tokenizer))
    set_template(tokenizer, args)
    note = data_note(command, options)  # before `assistant_only_loss` is done
    screen.say(line.command.program)
    set_seed(args.seed)
    with args.main_process_first(desc="reading the data"):
        parts = [_read(command, "dataset", name, data, tokenizer) for name in names]
        evaluated = [_read(command, "eval_dataset", name, data, tokenizer) for name in data.eval_dataset or []]
        for option, rows in (("dataset", parts), ("eval_dataset", evaluated)):
            for part in rows:
                needs_template(part, tokenizer, option, args)
                of = "" if part.of is None else f", {screen.plural(part.of, 'row')}"
                screen.fact("data" if option == "dataset" else "evaluated", f"{part.name}: {part.format.title}{of}")
        sets = _sets(command, options, parts, evaluated, tokenizer)
    if functions:
        _check_answers(functions, options, sets[0])
        weights = args.reward_weights or [1.0] * len(functions)
        named = zip(_reward_names(options), weights, strict=True)
        told = [name if weight == 1 else f"{name} (x {weight:g})" for name, weight in named]
        screen.fact("rewards", ", ".join(told))
    set_seed(args.seed)  # as if the data had taken no random numbers
    if args.should_save:
        write_note(Path(args.output_dir) / DATA_NAME, note)
    trainer = _trainer(command, options, tokenizer, sets, functions)
    if command == "dpo":
        _tell_of_pairs(trainer, sets[0])
    screen.tell_of_trainer(trainer, options.undecided)
    ids = {"finetuned_from": required("model", model.model)}
    return trainer, ids | ({"dataset_tags": names[0]} if len(names) == 1 else {}), options.undecided


def _options(line: CommandLine) -> FineTuneOptions:
    built = line.build()
    model, data, launch = built[:3]
    rewards = built[3] if len(built) > 4 else None
    return FineTuneOptions(model, data, launch, built[-1], line.undecided, rewards)


def _check_options(options: FineTuneOptions) -> None:
    """Refuse options that cannot be combined."""
    data, args, model = options.data, options.config, options.model
    sources.check_weights(data.dataset or [], data.dataset_weights)
    if data.streaming and args.max_steps <= 0:
        raise OptionError("`--streaming true` reads no more rows than it trains on, so it needs `--max_steps`.")
    if data.streaming and data.eval_share and not data.eval_dataset:
        raise OptionError(
            "`--eval_share` divides a data set whose rows are known. While streaming set `--eval_dataset`."
        )
    if data.eval_dataset and data.eval_share:
        raise OptionError("`--eval_share` and `--eval_dataset` both say what is evaluated on. Leave one out.")
    if model.load_in_8bit and model.load_in_4bit:
        raise OptionError("`--load_in_8bit` and `--load_in_4bit` cannot be combined. Leave one out.")
    if (model.load_in_8bit or model.load_in_4bit) and not with_adapters(model):
        bits = 8 if model.load_in_8bit else 4
        raise OptionError(
            f"`--load_in_{bits}bit` quantises a base, which cannot be trained itself. Add `--use_peft true`."
        )
    held = data.eval_dataset or data.eval_split or (data.eval_share or 0) or data.eval_share is None
    if args.eval_strategy != "no" and (not held or (data.streaming and not data.eval_dataset)):
        raise OptionError(
            f"`--eval_strategy {args.eval_strategy.value}` has nothing to evaluate on. Set `--eval_dataset` or "
            "`--eval_share`."
        )


def with_adapters(model: FineTunedModel) -> bool:
    """Whether adapters are trained in place of all weights."""
    return model.use_peft or model.peft != "none"


def _reward_functions(options: RewardOptions, args: Any) -> list[Any]:
    names = required("reward", options.reward, "hf-hybrid grpo")
    if args.reward_weights is not None and len(args.reward_weights) != len(names):
        raise OptionError(f"`--reward_weights` has {len(args.reward_weights)} numbers, and `--reward` {len(names)}.")
    try:
        return [reward_functions.load(name, options.reward_pattern) for name in names]
    except reward_functions.RewardError as error:
        raise OptionError(str(error)) from error


def _reward_names(options: FineTuneOptions) -> list[str]:
    rewards = options.rewards or RewardOptions()
    return [f"format {rewards.reward_pattern}" if name == "format" else name for name in rewards.reward or []]


def _check_answers(functions: Sequence[Any], options: FineTuneOptions, rows: Any) -> None:
    """Refuse rewards that compare with answers where the data has none."""
    named = options.rewards or RewardOptions()
    needing = [name for name in named.reward or [] if name in reward_functions.OWN]
    columns = sources.columns_of(rows)
    if needing and "answer" not in columns:
        raise OptionError(
            f"`--reward {needing[0]}` compares with a column `answer`, and the data has {', '.join(columns)}. "
            "`--columns answer=OLD` renames one."
        )
    if "numeric_answer" in needing:
        first = next(iter(rows))["answer"]
        if first is not None and reward_functions.last_number(str(first)) is None:
            raise OptionError(
                f"`--reward numeric_answer` compares numbers, and the first `answer` is `{first!r:.60}`. Use "
                "`exact_match`."
            )


def _as_model_options(model: FineTunedModel, **more: Any) -> ModelOptions:
    names = ("model", "tokenizer", "model_revision", "attn_implementation")
    return ModelOptions(**{name: getattr(model, name) for name in names}, **more)


def _read(command: str, option: str, name: str, data: FineTuningData, tokenizer: Any) -> sources.Rows:
    split = data.dataset_split if option == "dataset" else data.eval_split or "train"
    return sources.read_rows(
        command, option, name, split=split, config=data.dataset_config if option == "dataset" else None,
        streaming=data.streaming, limit=data.limit if option == "dataset" else None,
        renamed=sources.renames(data.columns), template=bool(tokenizer.chat_template), system=data.system_prompt,
    )  # fmt: skip


def _sets(
    command: str, options: FineTuneOptions, parts: list[sources.Rows], evaluated: list[sources.Rows], tokenizer: Any
) -> tuple[Any, Any]:
    """The rows to train on and to evaluate on, of SFT as tokens."""
    data, args = options.data, options.config
    seed = args.data_seed or args.seed
    if data.eval_split and not data.eval_dataset:
        evaluated = _of_eval_split(command, data, tokenizer)
    chats = "no chats"
    if command == "sft":
        train_parts, chats = _tokenised(options, parts, "dataset", tokenizer)
        eval_parts, _ = _tokenised(options, evaluated, "eval_dataset", tokenizer)
    else:
        train_parts, eval_parts = [part.data for part in parts], [part.data for part in evaluated]
    if data.dataset_weights is not None:
        _tell_of_mixture(data, train_parts)
    train_set = sources.mixed(train_parts, data.dataset_weights, seed)
    eval_set = sources.mixed(eval_parts, None, seed) if eval_parts else None
    share = data.eval_share
    if share is None:
        share = 0.0 if command == "grpo" or data.streaming or eval_set is not None else 0.05
    if share and eval_set is None:
        train_set, eval_set = sources.held_out(train_set, share, seed)
    if eval_set is not None and not data.streaming:
        screen.fact("held out", f"{screen.plural(len(eval_set), 'row')}, {len(train_set):,} to train on")
    if command == "sft":
        train_set = _told_and_bare(train_set, args, chats)
        eval_set = None if eval_set is None else _bare(eval_set)
    return train_set, eval_set


def _of_eval_split(command: str, data: FineTuningData, tokenizer: Any) -> list[sources.Rows]:
    whole = dataclasses.replace(data, limit=None)
    return [_read(command, "eval_dataset", name, whole, tokenizer) for name in data.dataset or []]


def _tell_of_mixture(data: FineTuningData, parts: list[Any]) -> None:
    names, weights = data.dataset or [], data.dataset_weights or []
    if data.streaming:
        told = [f"{weight / sum(weights):.0%} {name}" for name, weight in zip(names, weights, strict=True)]
    else:
        counts = [len(part) for part in parts]
        taken = zip(names, sources.shares(counts, weights), counts, strict=True)
        told = [f"{some:,} of {count:,} rows of {name}" for name, some, count in taken]
    screen.fact("mixture", ", ".join(told))


def _tokenised(
    options: FineTuneOptions, parts: list[sources.Rows], option: str, tokenizer: Any
) -> tuple[list[Any], str]:
    """The parts as tokens and labels, and what is learned, in words."""
    from hf_hybrid.cli.answers import Answers

    args = options.config
    undecided = "assistant_only_loss" in options.undecided
    answers_only = undecided or args.assistant_only_loss
    chats = {"messages", "sharegpt"} & {part.format.name for part in parts}
    if not undecided and args.assistant_only_loss and parts and not any(part.format.chats for part in parts):
        raise OptionError(
            f"`--assistant_only_loss true` needs chats, and `--{option} {parts[0].name}` holds {parts[0].format.title}."
        )
    completions_only = args.completion_only_loss is not False
    made = Answers(tokenizer, answers_only=answers_only, completions_only=completions_only)
    tokens = [made.tokenise(part, option, args.dataset_num_proc) for part in parts]
    args.assistant_only_loss = False  # done: the labels say it
    learned = set()
    for part in parts:
        if part.format.name in ("messages", "sharegpt"):
            learned.add("the answers of the assistant" if answers_only else "whole conversations")
        elif part.format.name == "text":
            learned.add("every token of the texts")
        else:
            learned.add("the completions" if completions_only else "prompts and completions")
    how = f", found by {made.way}" if chats and answers_only else ""
    return tokens, " and ".join(sorted(learned)) + how


_COUNTS = ["length", "learned", "divided"]


def _bare(data: Any) -> Any:
    return data.remove_columns(_COUNTS)


def _told_and_bare(data: Any, args: Any, learned: str) -> Any:
    """Say what is learned and what is cut, and return the rows without the counts."""
    from hf_hybrid.cli.answers import measured

    length, packing = args.max_length, args.packing
    if not hasattr(data, "__len__"):
        screen.fact("learned", learned)
        if length is not None:
            screen.fact("max_length", f"rows of more than {length:,} tokens are cut; how many is not known in a stream")
        return _bare(data)
    found = measured(data, length, args.truncation_mode == "keep_end")
    if not found.learned:
        raise OptionError(
            "No row has a token to learn. If the chat template hides the answers, set `--assistant_only_loss false`."
        )
    share = found.learned / max(found.tokens, 1)
    screen.fact(
        "learned", f"{learned}: {screen.count(found.learned)} of {screen.count(found.tokens)} tokens ({share:.0%})"
    )
    if found.divided:
        told = f"{found.divided:,} rows are one answer each: the chat template renders answers otherwise"
        screen.fact("divided", f"{told} once others follow")
    if packing:
        wrapped = args.packing_strategy == "wrapped"
        told = "rows are glued and cut" if wrapped else "whole rows share a sequence"
        screen.fact("packed", f"{told} of {length:,} tokens; longer rows: {found.cut:,}")
    elif found.cut:
        told = f"{screen.plural(found.cut, 'row')} of {len(data):,} cut at --max_length {length:,}"
        told += f" (the longest has {found.longest:,} tokens)"
        told += f"; {found.lost:,} of them keep no answer and are left out" if found.lost else ""
        screen.fact("cut", told)
        if found.lost == len(data):
            raise OptionError(f"`--max_length {length}` cuts every row before its answer begins. Raise it.")
    return _bare(data)


def _tell_of_pairs(trainer: Any, before: Any) -> None:
    """Say how many pairs TRL cuts or leaves out."""
    rows, length = trainer.train_dataset, trainer.args.max_length
    if not hasattr(rows, "__len__") or "prompt_ids" not in (rows.column_names or []):
        return
    sizes = [
        len(prompt) + max(len(chosen), len(rejected))
        for prompt, chosen, rejected in zip(*(rows[name][:] for name in ("prompt_ids", "chosen_ids", "rejected_ids")))
    ]
    prompts = sum(map(len, rows["prompt_ids"][:]))
    tokens = 2 * prompts + sum(len(ids) for name in ("chosen_ids", "rejected_ids") for ids in rows[name][:])
    screen.fact(
        "tokens", f"{screen.count(tokens)} in {screen.plural(len(rows), 'pair')}, the longest row {max(sizes):,}"
    )
    cut, lost = sum(length is not None and size > length for size in sizes), len(before) - len(rows)
    if cut or lost:
        told = f"{screen.plural(cut, 'pair')} cut at --max_length {length:,}"
        told += f"; {lost:,} with a longer prompt left out" if lost else ""
        screen.fact("cut", told)


# What was held out, for `hf-hybrid export`.


@dataclass(frozen=True)
class DataNote:
    """
    What a run notes of its data, beside the options in [`FineTuningData`], so that its held-out rows are found again.

    Attributes:
        command (`str`): `sft`, `dpo` or `grpo`.
        seed (`int`): That drew the held-out rows.
        answers_only, completions_only (`bool`): What of a row is learned.
        max_length (`int`, *optional*): Tokens of a row at most.
        keep_end (`bool`): Whether the beginning of long rows is cut, not their end.
    """

    command: str
    seed: int
    answers_only: bool
    completions_only: bool
    max_length: int | None
    keep_end: bool


def data_note(command: str, options: FineTuneOptions) -> dict[str, Any]:
    """Return the note of a run on its data, as JSON: [`FineTuningData`] with whole paths, and [`DataNote`]."""
    data, args = options.data, options.config
    values = dataclasses.asdict(data)
    for option in ("dataset", "eval_dataset"):
        paths = [(name, Path(name).expanduser()) for name in values[option] or []]
        values[option] = [str(path.resolve()) if path.exists() else name for name, path in paths] or None
    note = DataNote(
        command,
        args.data_seed or args.seed,
        "assistant_only_loss" in options.undecided or bool(getattr(args, "assistant_only_loss", True)),
        getattr(args, "completion_only_loss", None) is not False,
        getattr(args, "max_length", None),
        getattr(args, "truncation_mode", "keep_start") == "keep_end",
    )
    return {**values, **dataclasses.asdict(note)}


def held_out_rows(note: DataNote, data: FineTuningData, tokenizer: Any, most: int) -> list[dict[str, list[int]]]:
    """
    Return rows that a run did not train on, with `input_ids` and `labels`; of preference pairs the chosen side.

    Args:
        note, data: What the run noted; `data.eval_dataset` may be another.
        tokenizer: Of the run, with its chat template.
        most (`int`): Rows that are returned at most.

    Returns:
        `list[dict]`: None where nothing was held out, and of GRPO, whose prompts have no completions.

    Raises:
        OptionError: If the data cannot be read.
    """
    from hf_hybrid.cli.answers import Answers

    command, share = note.command, data.eval_share
    if share is None:
        share = 0.0 if data.streaming else 0.05
    if command == "grpo" or not (data.eval_dataset or data.eval_split or share):
        return []
    answers = Answers(tokenizer, answers_only=note.answers_only, completions_only=note.completions_only)

    def rows_of(option: str, names: list[str]) -> list[Any]:
        return [of_part(option, _read(command, option, name, data, tokenizer)) for name in names]

    def of_part(option: str, part: sources.Rows) -> Any:
        return part.data if command == "dpo" else answers.tokenise(part, option)

    if data.eval_dataset:
        rows = sources.mixed(rows_of("eval_dataset", data.eval_dataset), None, note.seed)
    elif data.eval_split:
        parts = _of_eval_split(command, data, tokenizer)
        rows = sources.mixed([of_part("eval_dataset", part) for part in parts], None, note.seed)
    else:
        parts = rows_of("dataset", data.dataset or [])
        rows = sources.held_out(sources.mixed(parts, data.dataset_weights, note.seed), share, note.seed)[1]
    found = list(sources.first_of(rows, most))
    if command == "dpo":
        found = list(answers.tokenise(_chosen(found), "dataset"))
    kept = slice(None) if note.max_length is None else slice(None, note.max_length)
    if note.keep_end and note.max_length is not None:
        kept = slice(-note.max_length, None)
    cut = [{name: row[name][kept] for name in ("input_ids", "labels")} for row in found]
    return [row for row in cut if any(label >= 0 for label in row["labels"][1:])]


def _chosen(pairs: list[dict[str, Any]]) -> sources.Rows:
    """The chosen sides of preference pairs as prompts with completions."""
    from datasets import Dataset
    from trl.data_utils import maybe_extract_prompt

    whole = [maybe_extract_prompt(pair) for pair in pairs]
    sides = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in whole]
    first = sides[0]
    chosen = formats.recognise("sft", list(first), first)
    return sources.Rows("the chosen answers", chosen, Dataset.from_list(sides), len(sides))


# The model and the trainer.


def load_model(model: FineTunedModel, args: Any, vocabulary: int) -> Any:
    """
    Return the model without adapters: TRL puts them on.

    Raises:
        OptionError: If it cannot be loaded.
        ImportError: If quantisation needs a package that is not installed.
    """
    from hf_hybrid.cli.run import load_base

    adapted = with_adapters(model)
    four = model.load_in_4bit or model.peft == "qlora"
    dtype = model.dtype or ("auto" if adapted else "float32")
    quantization = _quantization(model, args) if four or model.load_in_8bit else {}
    given = {"dtype": dtype, **quantization, **(args.model_init_kwargs or {})}
    named = _as_model_options(model, trust_remote_code=args.trust_remote_code)
    return load_base(named, vocabulary, adapted=adapted, **given)


def _quantization(model: FineTunedModel, args: Any) -> dict[str, Any]:
    import torch
    from transformers import BitsAndBytesConfig

    from hf_hybrid.cli.run import quantized_placement

    if model.load_in_8bit:
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        storage = (
            {} if model.bnb_4bit_quant_storage is None else {"bnb_4bit_quant_storage": model.bnb_4bit_quant_storage}
        )
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=model.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=model.use_bnb_nested_quant or model.peft == "qlora",
            bnb_4bit_compute_dtype=torch.bfloat16 if args.bf16 else torch.float32,
            **storage,
        )
    return {"quantization_config": config, **quantized_placement(on_host=args.memory != "off")}


def _adapters(model: FineTunedModel) -> Any:
    if not with_adapters(model):
        return None
    from hf_hybrid.cli.models import lora_config

    more = {"target_parameters": model.lora_target_parameters} if model.lora_target_parameters else {}
    targets = model.lora_target_modules or (None if model.lora_target_parameters else "all-linear")
    if isinstance(targets, list) and len(targets) == 1:
        targets = targets[0]  # a regular expression, or `all-linear`
    return lora_config(
        model.lora_r, targets, lora_alpha=model.lora_alpha, lora_dropout=model.lora_dropout,
        use_rslora=model.use_rslora, use_dora=model.use_dora, modules_to_save=model.lora_modules_to_save,
        task_type=model.lora_task_type, **more,
    )  # fmt: skip


def _trainer(command: str, options: FineTuneOptions, tokenizer: Any, sets: tuple[Any, Any], rewards: list[Any]) -> Any:
    """The trainer. Of several processes the first loads the model's files before the others."""
    args, adapters = options.config, _adapters(options.model)
    with args.main_process_first(desc="loading the model's files"):
        model = load_model(options.model, args, len(tokenizer))
    args.model_init_kwargs = None  # done
    common = {
        "args": args, "train_dataset": sets[0], "eval_dataset": sets[1], "processing_class": tokenizer,
        "peft_config": adapters,
    }  # fmt: skip
    if command == "sft":
        from hf_hybrid.trl.sft_dpo import HybridSFTTrainer

        return HybridSFTTrainer(model, **common)
    if command == "dpo":
        from hf_hybrid.trl.sft_dpo import HybridDPOTrainer

        # TRL would load the model again by its name.
        own = adapters is not None or args.precompute_ref_log_probs
        reference = None if own else copy.deepcopy(model)
        return HybridDPOTrainer(model, reference, **common)
    from hf_hybrid.trl.rl import HybridGRPOTrainer

    return HybridGRPOTrainer(model, reward_funcs=rewards, **common)
