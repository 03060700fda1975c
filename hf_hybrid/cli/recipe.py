"""
From a command (`hf-hybrid train | sft | dpo | ...`) to a trained model, in the order of events.

1. [`run`] reads the words and the YAML file, and sets the environment variables under `env`.
2. [`check_early`] refuses what can be seen to be wrong before torch is imported, which takes seconds. Then comes the
   first line on the terminal.
3. Several processes are launched if there are several GPUs ([`launch`]). Each of them begins here again at 1.
4. [`train`] begins in each process that trains.
5. [`make_trainer`] builds the options and checks them together ([`check_options`]); then come the tokenizer, every row
   of the data ([`Reader`]), and last the weights, because they take longest. The trainer puts adapters on them.
6. The trainer trains.
7. [`finish`] saves the model, evaluates it, writes its card and pushes it.

A message says what is wrong as soon as it is known, in one sentence, with exit status 2.
"""

from __future__ import annotations

import copy
import errno
import importlib.util
import itertools
import json
import logging
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_hybrid.cli import console, loading, tokens
from hf_hybrid.cli.data import NOTE_NAME, Reader, check_parts, check_paths, command_of, new_names
from hf_hybrid.cli.launch import launch
from hf_hybrid.cli.options import (
    DPO,
    GRPO,
    KTO,
    REWARD,
    SFT,
    TRAIN,
    TRAINING,
    CommandLine,
    OptionError,
    Options,
    complain,
    help_all,
    help_text,
    imported,
    required,
)
from hf_hybrid.files import is_disk_full, write_note
from hf_hybrid.records.readings import as_dict
from hf_hybrid.records.redaction import shareable
from hf_hybrid.trl import rewards

logger = logging.getLogger(__name__)

TRACKERS = frozenset({"wandb", "trackio", "mlflow", "comet_ml", "swanlab", "clearml", "dvclive"})
"""What `--report_to` takes that is a package of the same name."""
COMMAND_NOTE = "_hybrid_command.json"
"""In `output_dir`: what tells the run from others, see [`check_folder`]. Files with a leading `_` are not pushed."""
TRY_AGAIN = 75
"""Exit status that asks for the same command once more (EX_TEMPFAIL of BSD's sysexits.h)."""


DATA_HELP = """\
usage: hf-hybrid data FILE ... --model NAME [--show_rows 2] ...

Show rows as the model sees them (what is learned stands behind `>`), what is cut and what nobody reads, and what
training on them would save. It is `--dry_run true` of the command that takes the files, with whose options:
`hf-hybrid sft --help`.
"""


def see(arguments: Sequence[str]) -> int:
    """Run `hf-hybrid data`. Returns the exit status, as [`run`]."""
    files = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    if not files:
        console.write_out(DATA_HELP)
        return 0
    words = ["--dataset", *files, *arguments[len(files) :], "--dry_run", "true"]
    try:
        with console.quiet_imports():
            name = command_of(files[0], CommandLine(words, SFT).early("columns", "dataset_split", "dataset_config"))
    except OptionError as error:
        return complain(error, "hf-hybrid data")
    if name == "grpo" and "--reward" not in words:
        words += ["--reward", "format", "--reward_pattern", ".*"]  # any will do
    with tempfile.TemporaryDirectory() as folder:
        return run(name, ["--show_rows", "2", "--num_processes", "1", "--output_dir", folder, *words])


def run(name: str, arguments: Sequence[str]) -> int:
    """
    Train, or print help. Returns 0; 2 after a message if the options cannot work; 1 after a message if the training
    diverged or ran out of memory for good, or if the disk is full; 75 if processes drifted apart and the same command
    shall go on; 130 after Ctrl-C; 143 if the job was asked to end before its last step; else the exit status of the
    process that failed.
    """
    if name == "data":
        return see(arguments)
    command = TRAINING[name]
    if {"--help_all", "--help-all"} & set(arguments) or "--help all" in " ".join(arguments):
        with console.quiet_imports():
            console.write_out(help_all(command))
        return 0
    if not arguments or {"-h", "--help"} & set(arguments):
        console.write_out(help_text(command))
        return 0
    try:
        line = CommandLine(arguments, command)
        line.set_environment()
        line.check_required()
        check_early(line)
        if "LOCAL_RANK" not in os.environ:
            names = {name: Path(words[0]).name for name, words in line.early("model", "dataset").items()}
            console.print_line(f"{command.program}: {names['model']} on {names['dataset']}; importing torch ...")
        with console.quiet_imports():
            processes = line.processes  # imports what knows all options
        # A launcher of the user's that started this process has decided on the number of processes.
        if "LOCAL_RANK" not in os.environ:
            if line.values.accelerate_config or processes > 1:
                return launch(line, processes)
            from hf_hybrid.machine import use_one_gpu

            use_one_gpu()
        from hf_hybrid.run.record import HOST_IS_LIMIT
        from hf_hybrid.run.run import NO_LEAPS

        # The message about leaps would confuse users who fine-tune. The other one is said at the end.
        with console.speaking(unsaid=(HOST_IS_LIMIT,) if command is TRAIN else (HOST_IS_LIMIT, NO_LEAPS)):
            return train(line)
    except (OptionError, ImportError) as error:  # an ImportError: of TRL, with how to install it
        return complain(error, command.program)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if not is_disk_full(error):
            raise
        logger.debug("The error in full:", exc_info=True)
        reason = getattr(error, "strerror", None) or error
        console.write_error(f"{command.program}: error: {reason}\n")  # of any process
        return 1


def check_early(line: CommandLine) -> None:
    """Refuse what can be seen to be wrong without torch. Raises [`OptionError`]."""
    early = line.early(
        "model", "dataset", "eval_dataset", "columns", "reward", "reward_pattern", "sample_prompts", "report_to",
        "dataset_split", "dataset_config", "eval_split",
    )  # fmt: skip
    names = required("reward", early["reward"] or None, line.command.program) if line.command is GRPO else []
    try:
        for path in early["sample_prompts"]:
            from hf_hybrid.report.samples import read_prompts

            read_prompts(path)
        for name in names:
            rewards.check_name(name, next(iter(early["reward_pattern"]), None))
    except ValueError as error:
        raise OptionError(str(error)) from None
    loading.check_model(early["model"][0])
    check_paths("dataset", early["dataset"])
    check_paths("eval_dataset", early["eval_dataset"])
    check_parts(early["dataset"], dataset_split=early["dataset_split"], dataset_config=early["dataset_config"])
    check_parts(early["eval_dataset"] or early["dataset"], eval_split=early["eval_split"])
    new_names(early["columns"])
    check_folder(line)
    for tracker in TRACKERS.intersection(early["report_to"]):
        if importlib.util.find_spec(tracker) is None:
            raise OptionError(
                f"`--report_to {tracker}`: {tracker} is not installed. `pip install {tracker}`, or leave it out."
            )


def check_folder(line: CommandLine) -> None:
    """Refuse a folder that has another run, unless the options say what to do with that. The same run goes on."""
    folder = Path(next(iter(line.early("output_dir")["output_dir"]), "trainer_output"))  # as transformers calls it
    states = [path for path in folder.glob("checkpoint-*/trainer_state.json")]
    if not (states or (folder / "trainer_state.json").is_file()):
        return
    begins, own = line.early("resume_from_checkpoint")["resume_from_checkpoint"], line.note()
    if begins or own["options"].pop("dry_run", ["false"]) != ["false"]:
        return
    try:
        noted = as_dict(json.loads((folder / COMMAND_NOTE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        noted = {}
    if noted == own:
        return
    old, new = as_dict(noted.get("options")), own["options"]
    others = [
        f"`{name}` was {_words(old.get(name))} and is {_words(new.get(name))}"
        for name in dict.fromkeys((*new, *old))
        if old.get(name) != new.get(name)
    ]
    if noted.get("command") != own["command"]:
        others = [f"`hf-hybrid {noted['command']}` began it" if noted else "nothing says how it began"]
    more = f", and {len(others) - 3} more" * (len(others) > 3)
    raise OptionError(
        f"`--output_dir {folder}` holds another run: {', '.join(others[:3])}{more}. Set another `--output_dir`. Or "
        "begin anew here by `--resume_from_checkpoint false`, which moves that run aside, or go on with it by "
        "`--resume_from_checkpoint true`."
    )


def _words(words: list[str] | None) -> str:
    return "not given" if words is None else f"`{' '.join(words):.60}`"


def train(line: CommandLine) -> int:
    """Train in this process, and say how it ended. Returns the exit status, as [`run`]."""
    from hf_hybrid.cli.progress import Progress, interrupts
    from hf_hybrid.recovery import UnrecoveredMemoryError
    from hf_hybrid.run.monitor import TrainingDivergedError
    from hf_hybrid.saving.drift import RanksDriftedError
    from hf_hybrid.trainer import SUMMARY_NAME

    program, trainer, progress = line.command.program, None, None
    try:
        options = line.options()
        trainer, reader = make_trainer(options)
        console.print_trainer(trainer, by_rule="learning_rate" in options.defaulted, saves=not options.data.dry_run)
        if options.data.dry_run:
            return 0
        with interrupts(alone=trainer.args.world_size == 1) as interrupted:
            notes = {NOTE_NAME: reader.to_dict(), COMMAND_NOTE: line.note(), **_config_note(trainer)}
            progress = Progress(trainer, interrupted, defaulted=options.defaulted, notes=notes)
            trainer.add_callback(progress)
            # `true` resumes from the last checkpoint, `false` from none. The same run goes on: see [`check_folder`].
            words = {None: "auto", "": None, "none": None, "false": None, "true": True}
            resume = trainer.args.resume_from_checkpoint
            result = trainer.train(resume_from_checkpoint=words.get(resume and resume.lower(), resume))
        if not trainer.has_phases and trainer.args.should_save:  # else the trainer wrote it
            write_note(Path(trainer.args.output_dir) / SUMMARY_NAME, shareable(trainer.hybrid_summary()))
    except (TrainingDivergedError, UnrecoveredMemoryError, RanksDriftedError) as error:
        complain(error, program)
        return TRY_AGAIN if isinstance(error, RanksDriftedError) else 1
    except rewards.RewardError as error:
        if progress is None or not progress.stepped:
            return complain(error, program)
        console.write_error(f"{program}: error: {error}\n")  # of any process
        console.print_interruption(trainer)
        return 1
    except (ValueError, TypeError, ImportError) as error:
        # Before the first step HybridConfig, HybridTrainer and Trainer refuse options and checkpoints with these.
        if progress is not None and progress.stepped:
            raise
        logger.debug("The error in full:", exc_info=True)
        return complain(error, program)
    except KeyboardInterrupt:
        if trainer is not None:
            console.print_interruption(trainer)
        return 128 + signal.SIGINT
    if interrupted.is_set() and trainer.state.global_step < trainer.state.max_steps:
        console.print_interruption(trainer)
        return 128 + signal.SIGINT
    if trainer.preempted:
        console.print_interruption(trainer)
        _end_together(trainer)
        return 128 + signal.SIGTERM
    evaluated = _evaluated_last(trainer) if progress.stepped else {}
    finish(trainer, result.metrics if progress.stepped else {}, options, evaluated)
    return 0


# Before training.


def make_trainer(options: Options) -> tuple[Any, Reader]:
    """
    Return the trainer of a command, and what has read its data. Of several processes the first downloads and tokenises
    for all.
    """
    from transformers import EarlyStoppingCallback, default_data_collator, set_seed

    from hf_hybrid.config import was_given

    command, args = options.command, options.config
    check_output(args.output_dir)
    check_options(options)
    check_push(args)
    with args.main_process_first(desc="merging adapters"):
        adapter = loading.take_adapter(options)
    adapters = loading.adapters_config(options.adapters) if adapter is None else None
    if command is REWARD and adapters is not None:
        adapters.task_type = "SEQ_CLS"
    with args.main_process_first(desc="loading the tokenizer"):
        config = loading.read_config(options.model, options.trust_remote_code)
        own_template = any(getattr(held, "chat_template_path", None) for held in (args, options.model))
        tokenizer = loading.load_tokenizer(options.model, options.trust_remote_code)
        known = 0 if adapter is not None else len(tokenizer)  # adapters may have added some
        new = loading.equip(tokenizer, options.model, args)
    if new and adapter is not None:
        raise OptionError(
            f"`{new[0]}` is a new token, and training goes on with adapters that train no such token. Merge them into "
            "their base first: `--adapter new`."
        )
    loading.check_sizes(config, str(options.model.model), known, getattr(options.data, "sequence_length", 0))
    reader = Reader.of(options)
    if args.eval_strategy != "no" and not reader.evaluates:
        raise OptionError(
            f"`--eval_strategy {args.eval_strategy.value}` has nothing to evaluate on. Set `--eval_dataset` or "
            "`--eval_share`."
        )
    set_seed(args.seed)
    with args.main_process_first(desc="reading the data"):
        processes = getattr(args, "dataset_num_proc", None)
        train_set, eval_set = reader.train_and_eval(tokenizer, console.print_fact, processes, config)
        images, processing = "images" in (train_set.column_names or next(iter(train_set))), tokenizer
        if images:
            processing = loading.load_processor(options.model, tokenizer, options.trust_remote_code, own_template)
            if not was_given(args, "max_length") and getattr(args, "max_length", None) is not None:
                args.max_length = None
                console.print_fact("max_length", "none: rows with images are not cut, unless you set it")
        if command is GRPO and loading.learns_positions(config) and not options.data.streaming:
            tokens.check_prompts(train_set, tokenizer, config, args.max_completion_length or 0)
    more: dict[str, Any] = {} if command is TRAIN else {"peft_config": adapters}
    if "log_completions" in options.defaulted:
        args.log_completions, args.num_completions_to_print = True, 0  # TRL writes them, and `Progress` shows one
    if options.rewards is not None:
        pattern, names = options.rewards.reward_pattern, options.rewards.reward or []
        row = next(iter(train_set))
        more["reward_funcs"], text = rewards.load_all(names, pattern, args.reward_weights, row)
        console.print_fact("rewards", text)
    set_seed(args.seed)  # as if the data had taken no random numbers
    with args.main_process_first(desc="loading the model's files"):
        model = loading.load_model(options, config, adapter, images, len(tokenizer))
    if new:
        more_than_shown = f", and {len(new) - 4:,} more" * (len(new) > 4)
        console.print_fact("new tokens", f"{', '.join(new[:4])}{more_than_shown}: their embeddings are trained")
        if adapters is not None:
            loading.train_tokens(adapters, model, tokenizer.convert_tokens_to_ids(new))
    if images and adapters is not None and adapters.target_modules == "all-linear":
        adapters.exclude_modules = loading.around_images(model)
        console.print_fact("adapters", "on the language model; what encodes images stays as it is")
    if command is SFT:
        args.assistant_only_loss = False  # done: the labels say it
    if command is SFT and not images:
        tokens.warn_of_traps(train_set, tokenizer, model)
    if command is TRAIN:
        # Rows are of one length, so nothing is padded. Trainer's collator would pad, which takes a pad token.
        more["data_collator"] = default_data_collator
        model = model if adapters is None else loading.add_adapters(model, adapters, options.adapters)
    else:
        args.model_init_kwargs = None  # done
    if command in (DPO, KTO) and adapters is None and adapter is None and not args.precompute_ref_log_probs:
        more["ref_model"] = copy.deepcopy(model)  # TRL would load the model again by its name
    trainer = imported(command.trainer)(
        model, args=args, train_dataset=train_set, eval_dataset=eval_set, processing_class=processing, **more
    )
    loading.finish_tokens(trainer.model)
    if "learning_rate" in options.defaulted:
        from hf_hybrid.run.adapters import reward_rate

        if (rate := reward_rate(trainer)) is not None:
            args.learning_rate = rate
    if options.data.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(options.data.early_stopping_patience))
    if command is DPO:
        tokens.report_pairs(trainer, (train_set, eval_set), config, console.print_fact)
    shown = trainer.train_dataset if command in (DPO, KTO, REWARD) else train_set
    tokens.show_rows(shown, options.data.show_rows, processing, reader, console.print_fact)
    return trainer, reader


def _config_note(trainer: Any) -> dict[str, Any]:
    """Return the options as a note by its name, unless the trainer writes them itself."""
    from hf_hybrid.config import CONFIG_NAME, config_values

    if trainer.has_phases:
        return {}
    values = config_values(trainer.args)
    if "steps_per_generation" in values:
        values.pop("generation_batch_size", None)  # TRL sets both, and takes one of them
    return {CONFIG_NAME: shareable(values)}


def check_options(options: Options) -> None:
    """Refuse options that cannot be combined. Raises [`OptionError`]."""
    data, args, adapters = options.data, options.config, options.adapters
    names, weights = data.dataset or [], data.dataset_weights
    if weights is not None and len(weights) != len(names):
        raise OptionError(f"`--dataset_weights` has {len(weights)} numbers, and `--dataset` names {len(names)}.")
    if weights is not None and (min(weights) < 0 or not 0 < sum(weights) < float("inf")):
        words = " ".join(f"{weight:g}" for weight in weights)
        raise OptionError(f"`--dataset_weights {words}` must be at least 0, and one greater.")
    if data.streaming and args.max_steps <= 0:
        raise OptionError("`--streaming true` reads no more rows than it trains on, so it needs `--max_steps`.")
    if data.streaming and data.eval_share and not data.eval_dataset:
        raise OptionError(
            "`--eval_share` divides a data set whose rows are known. While streaming set `--eval_dataset`."
        )
    if data.eval_dataset and data.eval_share:
        raise OptionError("`--eval_share` and `--eval_dataset` both say what is evaluated on. Leave one out.")
    if data.early_stopping_patience is not None and not args.load_best_model_at_end:
        raise OptionError(
            "`--early_stopping_patience` keeps the best model. Leave out `--load_best_model_at_end false`."
        )
    if adapters.load_in_8bit and adapters.load_in_4bit:
        raise OptionError("`--load_in_8bit` and `--load_in_4bit` cannot be combined. Leave one out.")


def check_output(folder: str) -> None:
    """Refuse an `output_dir` that cannot be written to, before the work that would be lost with it."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise OptionError(f"`--output_dir {folder}` cannot be written to: {reason}. Choose another folder.") from None


def check_push(args: Any) -> None:
    """Refuse a push that the Hub will not take, before the work: make the repository, as Trainer would do later."""
    if not args.push_to_hub or args.process_index > 0:
        return
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    how = {"token": args.hub_token, "private": args.hub_private_repo}
    loading.make_repository(name, "--push_to_hub true", args.output_dir, how)


# After training.


def finish(trainer: Any, trained: dict[str, Any], options: Options, evaluated: dict[str, Any]) -> None:
    """
    Save the model, evaluate it unless that is `evaluated`, write its card, and push what was asked for. `trained` has
    the metrics of the training, and nothing where no step was left: what the run has written of them stays.
    """
    try:
        if trained:
            trainer.save_metrics("train", trained)
            trainer.save_state()
        trainer.save_model()
        if trainer.eval_dataset is not None:
            evaluated = evaluated or trainer.evaluate()
            trainer.save_metrics("eval", evaluated)
        # What only the command line knows: names on the Hub, no local paths.
        names = {"finetuned_from": str(options.model.model)}
        if len(options.data.dataset) == 1:
            names["dataset_tags"] = options.data.dataset[0]
        card = {key: name for key, name in names.items() if not Path(name).exists()} | {"tasks": "text-generation"}
        if trainer.args.push_to_hub:
            trainer.push_to_hub(**card)
        elif trainer.is_world_process_zero():
            trainer.create_model_card(**card)
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise OSError(
            errno.ENOSPC,
            f"The disk is full, or a limit on it is reached: the run is trained, and `{trainer.args.output_dir}` "
            f"could not be written ({error}). Free space, then end the run with the same command.",
        ) from error
    console.print_end(trainer, trained, evaluated)
    _end_together(trainer)


def _evaluated_last(trainer: Any) -> dict[str, Any]:
    """Return the metrics of the evaluation after the last step, if the model still has its weights."""
    if trainer.args.load_best_model_at_end or isinstance(trainer.eval_dataset, dict):  # each has its own entry
        return {}
    logged, step = trainer.state.log_history, trainer.state.global_step
    last = next((entry for entry in reversed(logged) if "eval_loss" in entry and entry["step"] == step), {})
    return {name: value for name, value in last.items() if name != "step"}


def _end_together(trainer: Any) -> None:
    """If a process exits while another still communicates with it, the launcher reports a failure."""
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
