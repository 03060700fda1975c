"""
Every process of a command that trains runs this: load model and data, train, evaluate, save, write the card, push.

Your own launcher can start it too: `torchrun --nproc_per_node 8 -m hf_hybrid.cli.run --config run.yaml`. The name of
another command than `train` comes first: `-m hf_hybrid.cli.run sft --config sft.yaml`.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import logging
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_hybrid.cli import screen
from hf_hybrid.cli.options import (
    TRAIN,
    AdapterOptions,
    CommandLine,
    DataOptions,
    ModelOptions,
    OptionError,
    TrainOptions,
    complain,
    required,
)
from hf_hybrid.cli.tasks import FINE_TUNING

logger = logging.getLogger(__name__)

DATA_NAME = "_hybrid_data.json"
"""In `output_dir`, for `hf-hybrid export`: where the data came from. Files with a leading underscore are not pushed."""
TRY_AGAIN = 75
"""Exit status that asks for the same command once more (EX_TEMPFAIL of BSD's sysexits.h)."""
_SAVED = re.compile(
    r"(all|train|eval)_results\.json|trainer_state\.json|training_args\.bin|README\.md|(generation_|adapter_)?config\.json"
    r"|(adapter_)?(model|pytorch_model)[-.].*|.*token.*\.(json|model)|vocab\..*|merges\.txt|chat_template\..*|.*\.py"
)
"""Names of what Trainer, the model and the tokenizer write into the folder of a run."""
_OFFLINE = "an id on the Hub, which needs the network (HF_HUB_OFFLINE=1 forbids it) unless it is cached."


def main() -> int:
    """Train in this process. Returns the exit status, as [`train`]."""
    words = sys.argv[1:]
    command = FINE_TUNING.get(words[0], TRAIN) if words else TRAIN
    try:
        line = CommandLine(words[command is not TRAIN :], command)
        line.set_environment()
        return train(line)
    except (OptionError, ImportError) as error:  # an ImportError: of TRL, with how to install it
        return complain(error, command.program)


def train(line: CommandLine) -> int:
    """
    Train as the command line says.

    Returns 0; 2 after a message if the options cannot work; 1 after a message if the training diverged or ran out of
    memory for good, or if the disk is full; 75 if processes drifted apart and the same command shall go on; 130 after
    Ctrl-C, and 143 if the job was asked to end before its last step.
    """
    from hf_hybrid.files import is_disk_full

    with screen.quiet_imports():
        line.command.config_class()
    from hf_hybrid.run.run import NO_LEAPS

    # Whoever fine-tunes expects no leaps.
    with screen.speaking(unsaid=() if line.command is TRAIN else (NO_LEAPS,)):
        try:
            return _train(line)
        except Exception as error:
            if not is_disk_full(error):
                raise
            logger.debug("The error in full:", exc_info=True)
            reason = getattr(error, "strerror", None) or error
            sys.stderr.write(f"{line.command.program}: error: {reason}\n")  # of any process
            return 1


def _train(line: CommandLine) -> int:
    from transformers import TrainerCallback

    from hf_hybrid.files import is_disk_full
    from hf_hybrid.recovery import UnrecoveredMemoryError
    from hf_hybrid.run.monitor import TrainingDivergedError
    from hf_hybrid.saving.drift import RanksDriftedError

    class FirstStep(TrainerCallback):
        begun = False

        def on_step_begin(self, args, state, control, **kwargs):
            self.begun = True

    first_step, program = FirstStep(), line.command.program
    trainer: Any = None
    try:
        line.check_required()
        trainer, names, undecided = _prepared(line)
        trainer.add_callback(first_step)
        # `true` resumes from the last checkpoint, `false` from none.
        words = {None: None, "": None, "none": None, "false": None, "true": True}
        resume = trainer.args.resume_from_checkpoint
        with screen.Interrupts(alone=trainer.args.world_size == 1) as interrupts:
            trainer.add_callback(
                screen.progress_callback(trainer, interrupts, chooses_steps="logging_steps" in undecided)
            )
            result = trainer.train(resume_from_checkpoint=words.get(resume and resume.lower(), resume))
    except (ValueError, TypeError, ImportError) as error:
        # Before the first step HybridConfig, HybridTrainer and Trainer refuse options and checkpoints with these.
        if first_step.begun:
            raise
        logger.debug("The error in full:", exc_info=True)
        return complain(error, program)
    except (TrainingDivergedError, UnrecoveredMemoryError) as error:
        complain(error, program)
        return 1
    except RanksDriftedError as error:
        complain(error, program)
        return TRY_AGAIN
    except KeyboardInterrupt:
        if trainer is not None:
            screen.tell_of_interruption(trainer)
        return 128 + signal.SIGINT
    if interrupts.asked and trainer.state.global_step < trainer.state.max_steps:
        screen.tell_of_interruption(trainer)
        return 128 + signal.SIGINT
    if trainer.preempted:
        screen.tell_of_interruption(trainer)
        trainer.accelerator.wait_for_everyone()
        trainer.accelerator.end_training()
        return 128 + signal.SIGTERM
    try:
        _save(trainer, result.metrics, names, _evaluated_last(trainer) if first_step.begun else {})
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise OSError(
            errno.ENOSPC,
            f"The disk is full, or a limit on it is reached: the run is trained, and `{trainer.args.output_dir}` "
            f"could not be written ({error}). Free space, then end the run with `--resume_from_checkpoint true`.",
        ) from error
    return 0


def _save(trainer: Any, trained: dict[str, Any], names: dict[str, str], metrics: dict[str, Any]) -> None:
    """Save the model, evaluate it unless its `metrics` are known, and write its card; push what was asked for."""
    if trainer.is_world_process_zero():
        _remove_links(Path(trainer.args.output_dir))
    trainer.save_metrics("train", trained)
    trainer.save_state()
    trainer.save_model()
    if trainer.eval_dataset is not None:
        metrics = metrics or trainer.evaluate()
        trainer.save_metrics("eval", metrics)
    # What only the command line knows: names on the Hub, no local paths.
    card = {key: name for key, name in names.items() if not Path(name).exists()} | {"tasks": "text-generation"}
    if trainer.args.push_to_hub:
        trainer.push_to_hub(**card)
    elif trainer.is_world_process_zero():
        trainer.create_model_card(**card)
    screen.tell_of_end(trainer, trained, metrics)
    # If a process exits while another still communicates with it, the launcher reports a failure.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def _evaluated_last(trainer: Any) -> dict[str, Any]:
    """
    Return the metrics of the evaluation after the last step, if there was one and the model still has its weights. With
    several data sets each has an entry of its own, and nothing is returned.
    """
    if trainer.args.load_best_model_at_end or isinstance(trainer.eval_dataset, dict):
        return {}
    logged, step = trainer.state.log_history, trainer.state.global_step
    found = next((entry for entry in reversed(logged) if "eval_loss" in entry and entry["step"] == step), {})
    return {name: value for name, value in found.items() if name != "step"}


def _remove_links(folder: Path) -> None:
    """
    Remove links in the place of files that Trainer writes at the end of a run.

    It would write through them. A copy of a model as links, such as the Hub's cache makes, would lose the original.
    """
    for path in folder.iterdir():
        if path.is_symlink() and _SAVED.fullmatch(path.name):
            path.unlink()


def _prepared(line: CommandLine) -> tuple[Any, dict[str, str], frozenset[str]]:
    """
    Return the trainer of a command, the names of model and data for the card, and the options that were not given.

    The banner is written on the way, as soon as each fact is known.
    """
    if line.command is not TRAIN:
        from hf_hybrid.cli.fine_tune import prepare

        return prepare(line)
    options = line.options()
    # Names on the Hub, or local paths.
    names = {
        "finetuned_from": required("model", options.model.model),
        "dataset_tags": required("dataset", options.data.dataset),
    }
    check_output(options.config.output_dir)
    trainer = make_trainer(options)
    screen.tell_of_trainer(trainer, options.undecided)
    return trainer, names, options.undecided


def check_output(folder: str) -> None:
    """Refuse an `output_dir` that cannot be written to, before the work that would be lost with it."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # a ValueError: of a NUL
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"`--output_dir {folder}` cannot be written to: {reason}. Choose another folder.") from None


def make_trainer(options: TrainOptions):
    """Return a trainer of the model and the data. Of several processes the first downloads and tokenises for all."""
    from transformers import default_data_collator, set_seed

    from hf_hybrid.files import write_note
    from hf_hybrid.trainer import HybridTrainer

    args = options.config
    set_seed(args.seed)
    with args.main_process_first(desc="loading the tokenizer"):
        config = read_config(options.model)
        tokenizer = load_tokenizer(options.model)
    _check_fit(config, options, len(tokenizer))
    screen.say(f"{TRAIN.program}")
    with args.main_process_first(desc="tokenising"):
        seed = args.data_seed or args.seed
        train_set, eval_set = training_data(options.data, tokenizer, seed)
    _tell_of_sequences(options.data, train_set, eval_set)
    set_seed(args.seed)  # as if the data had taken no random numbers
    with args.main_process_first(desc="loading the model's files"):
        on_host = args.memory != "off"
        model = load_model(options.model, options.adapters, len(tokenizer), bf16=args.bf16, on_host=on_host)
        if options.model.qat == "bitnet":
            model = _to_bitnet(model, options)
    if args.should_save:
        write_note(Path(args.output_dir) / DATA_NAME, {**_with_whole_paths(options.data), "seed": seed})
    # Rows are of one length, so nothing is padded. Trainer's collator would pad, which takes a pad token.
    return HybridTrainer(
        model,
        args,
        data_collator=default_data_collator,
        train_dataset=train_set,
        eval_dataset=eval_set,
        processing_class=tokenizer,
    )


def _check_fit(config: Any, options: TrainOptions, vocabulary: int) -> None:
    """Refuse data and options that the model cannot take, as far as its config tells."""
    check_vocabulary(config, required("model", options.model.model), vocabulary)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    if 0 < longest < options.data.sequence_length:
        raise OptionError(
            f"`sequence_length={options.data.sequence_length}` is over the {longest} positions of the model "
            "(`max_position_embeddings`). Lower it, or raise that number in the config of the model."
        )


def _tell_of_sequences(options: DataOptions, train_set: Any, eval_set: Any) -> None:
    length = options.sequence_length
    told = f"{options.dataset}: {screen.plural(len(train_set), 'sequence')} of {length} tokens, all of them learned"
    told += f"; {len(eval_set):,} more to evaluate on" if eval_set is not None else "; no evaluation"
    screen.fact("data", told)


def _to_bitnet(model: Any, options: TrainOptions):
    from hf_hybrid.export.bitnet import to_bitnet

    if options.adapters.peft != "none":
        raise OptionError(f"`--qat bitnet` trains all weights, and `--peft {options.adapters.peft}` freezes them.")
    return to_bitnet(model)


def _with_whole_paths(options: DataOptions) -> dict[str, Any]:
    values = dataclasses.asdict(options)
    paths = {key: Path(values[key]) for key in ("dataset", "eval_dataset") if values[key] is not None}
    return values | {key: str(path.resolve()) for key, path in paths.items() if path.exists()}


# The model: from the Hub, a folder or a config; with or without adapters.


def load_tokenizer(options: ModelOptions) -> Any:
    """Load the tokenizer that `options` name, or else the model's."""
    from transformers import AutoTokenizer

    model = required("model", options.model)
    name = options.tokenizer or (str(Path(model).parent) if Path(model).suffix == ".json" else model)
    revision = "main" if options.tokenizer else options.model_revision or "main"
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=options.trust_remote_code)
    except Exception as error:  # whatever a broken file leads to
        raise OptionError(
            f"No tokenizer can be loaded from `{name}`: {_reason(error)} Name one with `--tokenizer`."
        ) from error


def load_model(
    options: ModelOptions, adapters: AdapterOptions, vocabulary: int, *, bf16: bool = False, on_host: bool = False
) -> Any:
    """
    The model that `options` name, ready to train, with its adapters. See [`load_base`].

    A 4-bit base computes in bf16 if training does (`bf16`). With `on_host` it is packed in host memory, from where its
    layers are streamed, and not on the GPU.

    Raises:
        OptionError: If the model cannot be loaded, or does not go with the tokenizer (of so many tokens).
        ImportError: If adapters need a package that is not installed; with the command that installs it.
    """
    import torch

    adapted = adapters.peft != "none"
    dtype: Any = options.dtype
    if dtype == "auto" and not adapted:
        dtype = torch.float32
    given = _four_bit(bf16, on_host) if adapters.peft == "qlora" else {}
    model = load_base(options, vocabulary, adapted=adapted, dtype=dtype, **given)
    return _add_adapters(model, adapters) if adapted else model


def load_base(options: ModelOptions, vocabulary: int, *, adapted: bool, dtype: Any, **given: Any) -> Any:
    """
    The model that `options` name, without adapters. The caller has set the seed that random weights are drawn with.

    Args:
        options (`ModelOptions`): All but the dtype is read.
        vocabulary (`int`): Tokens of the tokenizer.
        adapted (`bool`): Whether adapters will be trained, which takes weights that were trained.
        dtype: Of the weights; `"auto"`: as the checkpoint has them, float32 for random ones.
        given: More that `from_pretrained` takes.

    Raises:
        OptionError: If the model cannot be loaded, or does not go with the tokenizer.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from hf_hybrid.export.source import shard_names

    name, config = required("model", options.model), read_config(options)
    common: dict[str, Any] = {"trust_remote_code": options.trust_remote_code, "dtype": dtype}
    revision = options.model_revision or "main"
    check_vocabulary(config, name, vocabulary)
    if options.attn_implementation is not None:
        common["attn_implementation"] = options.attn_implementation
    path = Path(name)
    for index in path.glob("*.index.json") if path.is_dir() else ():
        try:
            shard_names(index)
        except ValueError as error:
            raise OptionError(f"`--model {name}` cannot be loaded: `{index.name}` {error}.") from None
    without_weights = path.is_dir() and not any(any(path.glob(f"*.{kind}")) for kind in ("safetensors", "bin"))
    if options.from_scratch or path.suffix == ".json" or without_weights:
        if adapted:
            raise OptionError(f"`--peft lora` adapts trained weights, and `{name}` has none.")
        common["dtype"] = torch.float32 if dtype == "auto" else dtype
        try:
            model = AutoModelForCausalLM.from_config(config, **common)
        except Exception as error:  # whatever absurd sizes lead to
            raise OptionError(f"`--model {name}` cannot be built: {_reason(error)}") from error
        # DeepSpeed's `ds_id` marks parameters that lie on other processes, and are empty on this one.
        empty = [key for key, weight in model.named_parameters() if not weight.numel() and not hasattr(weight, "ds_id")]
        if empty:
            raise OptionError(f"`--model {name}`: `{empty[0]}` has no elements. Correct the sizes in the config.")
        return model
    try:
        return AutoModelForCausalLM.from_pretrained(name, config=config, revision=revision, **common, **given)
    except Exception as error:  # whatever a broken file leads to
        raise OptionError(f"`--model {name}` cannot be loaded: {_reason(error)}") from error


def read_config(options: ModelOptions) -> Any:
    """Return the config of the model that `options` name. Raises [`OptionError`] if it cannot be read."""
    from transformers import AutoConfig

    from hf_hybrid.cli.models import check_depth

    name = required("model", options.model)
    revision = options.model_revision or "main"
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=options.trust_remote_code)
    except Exception as error:  # whatever a broken file leads to
        raise OptionError(
            f"`--model {name}` cannot be loaded: {_reason(error)} It must be a folder, a config.json, or {_OFFLINE}"
        ) from error
    check_depth(config)
    return config


def check_vocabulary(config: Any, name: str, vocabulary: int) -> None:
    """Refuse a tokenizer with more tokens than the model embeds. Raises [`OptionError`]."""
    embedded = config.get_text_config().vocab_size
    if embedded is not None and vocabulary > embedded:
        raise OptionError(
            f"The tokenizer has {vocabulary} tokens, and the model `{name}` embeds {embedded}. Set "
            "`--tokenizer` to the one that belongs to the model."
        )


def _four_bit(bf16: bool, on_host: bool) -> dict[str, Any]:
    import torch
    from transformers import BitsAndBytesConfig

    placement = quantized_placement(on_host)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    return {"quantization_config": quantization, **placement}


def quantized_placement(on_host: bool) -> dict[str, Any]:
    """Return where a quantised base is loaded. Raises `ImportError` without bitsandbytes."""
    from accelerate import PartialState

    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise ImportError(
            '`--peft qlora` needs bitsandbytes. Install it: pip install "hf-hybrid[peft,quantization]"'
        ) from None
    return {"device_map": {"": "cpu" if on_host else PartialState().device}}


def _add_adapters(model: Any, options: AdapterOptions) -> Any:
    from hf_hybrid.cli.models import lora_config

    scale = {"lora_alpha": options.lora_alpha, "lora_dropout": options.lora_dropout}
    adapters = lora_config(options.lora_r, options.lora_target_modules or "all-linear", **scale)  # or how to get peft
    from peft import get_peft_model, prepare_model_for_kbit_training

    if options.peft == "qlora":
        # Activation checkpointing is an option of TrainingArguments and stays one.
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return get_peft_model(model, adapters)


# The data: from a file, a folder or the Hub to sequences of equal length.

_FORMATS = {".txt": "text", ".text": "text", ".md": "text", ".jsonl": "json"}
_FORMATS |= {f".{kind}": kind for kind in ("json", "csv", "parquet")}


def training_data(options: DataOptions, tokenizer: Any, seed: int) -> tuple[Any, Any]:
    """
    Load the data that `options` name, tokenise it and cut it into sequences; `seed` draws those to evaluate on.

    Returns:
        Two `datasets.Dataset` of sequences with `input_ids` and `labels`: to train on, and to evaluate on (`None` with
        `eval_share=0` and no `eval_dataset`).

    Raises:
        OptionError: If the data cannot be found, has neither texts nor conversations, or is too short.
    """
    blocks = _blocks("dataset", options, tokenizer)
    if options.eval_dataset is not None:
        return blocks, evaluation_data(options, tokenizer, seed)
    if not options.eval_share:
        return blocks, None
    if len(blocks) < 2:
        raise OptionError(
            f"`{options.dataset}` makes one sequence of {options.sequence_length} tokens, and `eval_share` takes one. "
            "Set `eval_share=0` or a shorter `sequence_length`."
        )
    held = min(max(round(options.eval_share * len(blocks)), 1), len(blocks) - 1)
    split = blocks.train_test_split(held, seed=seed)
    return split["train"], split["test"]


def evaluation_data(options: DataOptions, tokenizer: Any, seed: int) -> Any:
    """Return the sequences to evaluate on, as [`training_data`] does, without those to train on where it can."""
    if options.eval_dataset is not None:
        return _blocks("eval_dataset", options, tokenizer)
    return training_data(options, tokenizer, seed)[1]


def _load_texts(option: str, name: str, split: str, config: str | None):
    from datasets import load_dataset, load_from_disk

    path = Path(name)
    kind = _FORMATS.get(path.suffix.lower())
    if kind is not None and not path.is_file():
        raise OptionError(f"`--{option} {name}`: there is no such file.")
    try:
        if kind is not None:
            # By paragraph: as one document, a whole book would be tokenised in one piece.
            by: dict[str, Any] = {"sample_by": "paragraph"} if kind == "text" else {}
            return load_dataset(kind, data_files=str(path), split="train", **by)
        if any((path / saved).is_file() for saved in ("state.json", "dataset_dict.json")):  # of `save_to_disk`
            saved = load_from_disk(str(path))
            return saved[split] if isinstance(saved, dict) else saved
        return load_dataset(name, config, split=split)
    except Exception as error:  # whatever a broken file leads to
        if kind is not None:
            raise OptionError(f"`--{option} {name}` cannot be read as {kind}: {_reason(error)}") from error
        raise OptionError(
            f"`--{option} {name}` cannot be loaded: {_reason(error)} It must be a file ({', '.join(_FORMATS)}), a "
            f"folder, or {_OFFLINE}"
        ) from error


def _reason(error: BaseException) -> str:
    """What an error says, or else the error that it hides: `datasets` wraps what went wrong in a file."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip() or type(error).__name__
    return text if text.endswith(".") else f"{text}."


def _blocks(option: str, options: DataOptions, tokenizer):
    """The sequences of `dataset` or `eval_dataset`, whichever `option` is."""
    name, split = {
        "dataset": (options.dataset, options.dataset_split),
        "eval_dataset": (options.eval_dataset, options.eval_split),
    }[option]
    name = required(option, name)
    texts = _load_texts(option, name, split, options.dataset_config if name == options.dataset else None)
    encode = _encoder(name, texts.column_names, options, tokenizer)
    length = options.sequence_length

    def cut(rows, numbers):
        ids = [token for document in encode(rows, numbers) for token in document]
        pieces = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
        return {"input_ids": pieces, "labels": [list(piece) for piece in pieces]}

    blocks = texts.map(cut, batched=True, with_indices=True, remove_columns=texts.column_names, desc="Tokenising")
    if len(blocks) == 0:
        raise OptionError(f"`{name}` holds fewer than {length} tokens. Set a shorter `sequence_length`.")
    return blocks


def _encoder(
    name: str, columns: list[str], options: DataOptions, tokenizer
) -> Callable[[Any, list[int]], list[list[int]]]:
    """The function from a batch of rows, and their numbers, to tokens: one list per document."""
    if options.messages_column in columns:
        if not tokenizer.chat_template:
            raise OptionError(
                f"The column `{options.messages_column}` holds conversations, and the tokenizer has no chat template. "
                "Set `--tokenizer` to one that has (that of an instruct model), or `--text_column`."
            )

        def from_messages(rows: Any, numbers: list[int]) -> list[list[int]]:
            texts = []
            for number, messages in zip(numbers, rows[options.messages_column], strict=True):
                try:
                    texts.append(tokenizer.apply_chat_template(messages, tokenize=False))
                except Exception as error:  # whatever a template does with a conversation that it was not made for
                    raise OptionError(
                        f"The chat template cannot format row {number} of `{name}` (`{options.messages_column}` is "
                        f"`{messages!r:.80}`): {_reason(error)} Correct or remove the row."
                    ) from error
            return tokenizer(texts, add_special_tokens=False)["input_ids"]

        return from_messages
    if options.text_column not in columns:
        near = difflib.get_close_matches(options.text_column, columns, n=1)
        raise OptionError(
            f"`--text_column {options.text_column}` is not in the data set, which has {', '.join(columns) or 'none'}."
            + (f" Did you mean `--text_column {near[0]}`?" if near else "")
        )
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if not end:
        logger.warning("The tokenizer has no end-of-text token, so documents are joined without one.")

    def from_texts(rows: Any, numbers: list[int]) -> list[list[int]]:
        texts = rows[options.text_column]
        for number, text in zip(numbers, texts, strict=True):
            if not isinstance(text, str):
                raise OptionError(
                    f"Row {number} of `{name}` has no text in the column `{options.text_column}`, but `{text!r:.80}`. "
                    "Correct or remove the row."
                )
        # Some tokenizers end each text themselves.
        try:
            found = tokenizer(texts)["input_ids"]
        except Exception as error:  # whatever a broken file leads to
            raise OptionError(f"The tokenizer cannot tokenise `{name}`: {_reason(error)} Save it again.") from error
        return [ids if ids[-1:] == end else ids + end for ids in found]

    return from_texts


if __name__ == "__main__":
    sys.exit(main())
