"""
Random options: every option of `HybridConfig` through Python, and command lines of `hf-hybrid` through YAML and words.

An option takes a usual value, an extreme one or one of a wrong type. What is accepted has to train. What is refused has
to be refused by name: with a `ValueError`, `TypeError` or `ImportError` at construction, whose message names an option
or argument in backticks; on the command line with one message and exit status 2. Data that can never make a step are
refused when training begins, as an evaluation needs none. What plain `Trainer` cannot train either, for options of its
own, counts as refused.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import random
import re
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import datasets
import torch
import yaml
from conftest import LENGTH, ByteText, config_values, finite, tiny_model, weights
from rig.byte_llama import byte_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from chaos import Case, Result, children, trainings
from hf_hybrid import HybridArguments, HybridConfig, HybridTrainer
from hf_hybrid.arguments import check_range
from hf_hybrid.cli import env, options, plan, recipe  # noqa: F401 - imported once, before processes are forked
from hf_hybrid.cli.main import main
from hf_hybrid.run.monitor import TrainingDivergedError

PATIENCE = 60.0
"""Seconds after which a case hangs. A usual one takes less than one."""
REFUSALS = (ValueError, TypeError, ImportError)
OPTIONS = {"max_steps": 6, "warmup_phase_steps": 1, "full_phase_steps": 1, "correct_phase_steps": 1, "leap_worth": 1.0}

ODD = [
    None, "", " ", "abc", "None", "1", "-1", "1e-3", "nan", "\0", "\ud800", "é" * 300, True, False, 0, 1, 2, -1,
    10**6, 10**9, 10**18, 10**400, -(10**18), 0.0, -0.0, 0.5, 1.0, 1.5, -0.5, 1e-300, 1e300, math.nan, math.inf,
    -math.inf, [], [1], ["a", "b"], {}, {"a": 1}, (), b"bytes", object(), torch.tensor(1.0), Path("x"), print, 1j,
]  # fmt: skip
"""Values for any option, most of them of a wrong type."""
USUAL = {int: [0, 1, 2, 3, 8], float: [0.0, 1e-4, 0.1, 0.5, 1.0, 2.0], bool: [True, False]}
TEXTS = {
    "checkpoint_phases": ["full", "full,correct", "predict", "full,", ",", "FULL", "warmup,full,correct"],
    "weight_precision": "auto bf16 fp32 predict=int8 predict=int8_bitsandbytes full=bf16,predict=int8 int8 full=full "
    "= a=".split(),
    "optim": ["adamw_torch", "sgd", "adafactor", "rmsprop", "muon", "adamw", "adagrad", "adamw_hf", "lomo", "rprop"],
    "lr_scheduler_type": ["linear", "cosine", "constant", "polynomial", "inverse_sqrt", "cosine_with_min_lr", "never"],
    "save_strategy": ["no", "steps", "epoch", "best", "sometimes"],
    "logging_strategy": ["no", "steps", "epoch", "sometimes"],
    "eval_strategy": ["no", "steps", "epoch", "sometimes"],
    "train_sampling_strategy": ["random", "sequential", "group_by_length", "backwards"],
    "include_num_input_tokens_seen": ["all", "non_padding", "no"],
}
"""Texts that options of this kind take, and others like them."""
TRAINERS_OWN = (
    "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps learning_rate weight_decay "
    "adam_beta1 adam_beta2 adam_epsilon max_grad_norm num_train_epochs lr_scheduler_type lr_scheduler_kwargs "
    "warmup_steps optim optim_args label_smoothing_factor neftune_noise_alpha bf16 fp16 seed data_seed "
    "dataloader_drop_last logging_steps logging_strategy logging_first_step eval_strategy eval_steps eval_on_start "
    "save_strategy save_steps save_total_limit save_only_model load_best_model_at_end metric_for_best_model "
    "gradient_checkpointing gradient_checkpointing_kwargs auto_find_batch_size skip_memory_metrics disable_tqdm "
    "remove_unused_columns prediction_loss_only train_sampling_strategy include_num_input_tokens_seen use_cache "
    "torch_empty_cache_steps"
).split()
"""Options of `TrainingArguments` that work on one process without a network."""


def constructions(count: int, seed: int) -> list[Result]:
    """Construct and train with so many drawn configurations."""
    return _all("constructions", construction, count, seed)


def command_lines(count: int, seed: int) -> list[Result]:
    """Run so many drawn command lines of `hf-hybrid`."""
    return _all("command-lines", command_line, count, seed)


def _all(part: str, check: Callable[[Case], Result], count: int, seed: int) -> list[Result]:
    results = []
    for number in range(count):
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            results.append(check(Case(f"{part}/all/{number}", seed, Path(folder))))
    return results


def _run(case: Case, told: str, function: Callable, *arguments) -> Result:
    """Call the function, which returns an outcome and a detail, in a forked process."""
    ended = children.run(function, *arguments, case.folder, log=case.log, patience=PATIENCE)
    outcome, detail = {
        "returned": lambda: ended.value,
        "raised": lambda: ("traceback", ended.trace),
        "died": lambda: ("traceback", "The process died without a word."),
        "hang": lambda: ("hang", f"after {PATIENCE:.0f} s"),
    }[ended.how]()
    return case.result(outcome, f"{told}\n{detail}".encode(errors="backslashreplace").decode())


# Through Python.


def construction(case: Case) -> Result:
    """Construct a trainer with drawn options and train if it is accepted."""
    dice = case.chance
    made = {"model": dice.choice([*MODELS, "llama"]), "data": dice.choice([*DATA, "rows", "rows"])}
    drawn = draw_options(dice)
    told = ", ".join(f"{name}={value!r:.60}" for name, value in (made | drawn).items())
    return _run(case, told, _construct, made, drawn)


def _gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=16, n_layer=2, n_head=2, n_positions=64))


MODELS: dict[str, Callable] = {"llama": tiny_model, "gpt2": _gpt2, "adapters": trainings.adapted}
DATA: dict[str, Callable] = {
    "rows": lambda: ByteText(24),
    "few rows": lambda: ByteText(3),
    "one row": lambda: ByteText(1),
    "stream": lambda: trainings.Stream(ByteText(24)),
}


def draw_options(dice: random.Random) -> dict[str, Any]:
    """Draw one to six options, most of them of this package, and their values; in every other case one is odd."""
    own, hints = [field.name for field in fields(HybridArguments)], get_type_hints(HybridConfig)
    names = dice.sample(own, dice.randint(1, 4)) + dice.sample(TRAINERS_OWN, dice.choice([0, 0, 1, 2]))
    drawn = {name: usual_value(dice, name, hints[name]) for name in names}
    if "muon_momentum" in names:
        drawn["optim"] = "muon"
    if dice.random() < 0.3:
        drawn["memory"] = dice.choice(["stream", "auto"])
    if dice.random() < 1 / 2:
        drawn[dice.choice(names)] = dice.choice(ODD)
    return drawn


def usual_value(dice: random.Random, name: str, hint: Any) -> Any:
    """Draw a value of the kind that the option takes."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    if get_origin(hint) is Literal:
        return dice.choice(kinds)
    if name in TEXTS:
        return dice.choice(TEXTS[name])
    limits = getattr(HybridArguments.__dataclass_fields__.get(name), "metadata", {}).get("help")
    return dice.choice([value for value in USUAL.get(kinds[0], ODD) if limits is None or _within(name, value, limits)])


def _within(name: str, value: Any, text: Any) -> bool:
    try:
        check_range(name, value, text.limits)
    except ValueError:
        return False
    return True


def _construct(made: dict[str, str], drawn: dict[str, Any], folder: Path) -> tuple[str, str]:
    config = {**config_values(folder / "run"), **OPTIONS, **drawn}
    parts = {"train_dataset": DATA[made["data"]](), "eval_dataset": ByteText(8)}
    plain = functools.partial(_plain, made["model"], config, parts, folder)
    try:
        torch.manual_seed(0)
        trainer = HybridTrainer(MODELS[made["model"]](), HybridConfig(**config), **parts)
    except Exception as error:
        trace = traceback.format_exc()
        if isinstance(error, REFUSALS) and re.search("`[a-z_]+", str(error)):
            return "refused", str(error)
        return ("refused", f"as Trainer does: {error}") if _fails(plain) else ("traceback", trace)
    before = weights(trainer.model)
    try:
        trainer.train()
    except TrainingDivergedError as error:
        return "refused", str(error)
    except Exception as error:
        if isinstance(error, ValueError) and "`train_dataset`" in str(error) and trainer.state.global_step == 0:
            return "refused", str(error)
        trace = traceback.format_exc()
        return ("refused", f"as Trainer does: {trace}") if _fails(plain) else ("traceback", trace)
    state = trainer.state
    if not finite(trainer.model):
        return "nonsense", "The weights are not finite."
    if state.global_step != state.max_steps:
        return "nonsense", f"{state.global_step} steps of {state.max_steps}."
    if not _moved(before, trainer) and _moved(before, plain()):
        return "nonsense", "No weight has changed."
    return "trained", ""


def _plain(model: str, config: dict[str, Any], parts: dict[str, Any], folder: Path) -> Trainer:
    """Plain Trainer, trained with its own options among these."""
    torch.manual_seed(0)
    own = {field.name for field in fields(TrainingArguments)}
    taken = {name: value for name, value in config.items() if name in own and value != "muon"}
    args = TrainingArguments(**taken)
    args.output_dir = str(folder / "plain")
    trainer = Trainer(MODELS[model](), args, **parts)
    trainer.train()
    return trainer


def _fails(training: Callable) -> bool:
    try:
        training()
    except Exception:
        return True
    return False


def _moved(before: dict[str, torch.Tensor], trainer: Trainer) -> bool:
    after = weights(trainer.model)
    return any(not torch.equal(before[name], after[name]) for name in before)


# Through the command line.

WORDS = [
    "", " ", "abc", "None", "null", "true", "1", "-1", "0", "0.5", "1e-3", "nan", "inf", "-inf", "1e400", "9" * 30,
    "[1]", "{}", '{"a": 1}', "é", "--", "=", "/", "/dev/null", "/proc/none", "text.txt", "gone", "gone.jsonl",
    "model", "a,b",
]  # fmt: skip
YAML_VALUES = [
    None, True, False, 0, 1, -1, 3, 10**9, 10**30, 0.5, math.nan, math.inf, "", "abc", "1e-3", "on", "off",
    [], [1], [None], ["q_proj"], [[1]], {}, {"a": 1}, {"a": {"b": None}}, "model", "text.txt", "gone", "2026-01-31",
    "é" * 300,
]  # fmt: skip
BASE = {
    "model": "model", "dataset": "text.txt", "max_steps": 4, "sequence_length": LENGTH,
    "per_device_train_batch_size": 2, "output_dir": "run", "use_cpu": True, "eval_share": 0.1, "save_strategy": "no",
    "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False, "warmup_phase_steps": 1,
}  # fmt: skip
BROKEN_FILES = {
    "empty.json": b"", "empty.jsonl": b"", "empty.csv": b"", "empty.txt": b"", "empty.parquet": b"",
    "binary.json": b"\0\xff", "binary.jsonl": b"\x89PNG\r\n\0", "binary.txt": b"\xff\xfe\0\0",
    "binary.parquet": b"PAR1", "broken.json": b"{", "broken.jsonl": b'{"text": "a"}\n{"text"', "list.json": b"[1, 2]",
    "number.json": b"3", "null.jsonl": b'{"text": null}\n', "number.jsonl": b'{"text": 3}\n{"text": 4}\n',
    "other.jsonl": b'{"words": "a"}\n', "ragged.csv": b'text\na,b,c\n"',
    "roles.jsonl": b'{"messages": [{"who": "me"}]}\n', "flat.jsonl": b'{"messages": "hello"}\n', "short.txt": b"a",
    "mixed.jsonl": b'{"text": "a"}\n{"text": {"b": 1}}\n', "deep.json": b"[" * 5000, "nul.txt": b"a\0b" * 100,
}  # fmt: skip
BROKEN_YAML = [
    b"\xff\xfe", b"model: caf\xe9", b"[" * 3000, b"a: [", b"- a\n- b", b"3", b"\0", b"seed: 2026-02-31",
    b"model: !!python/x a", b"a: &a [*a]", b"? [1]\n: 2", b'env: {"": x}',
    b"env: [1]", b"env: {A: [1]}", b"env: 3", b"%YAML 9.9\n---\na: 1", b"model: model\nmodel: other", b"",
    b"\xef\xbb\xbfmodel: model",
]  # fmt: skip
BROKEN_MODELS = {
    "config.json": ["{", "[]", "3", "{}", '{"model_type": "none"}', '{"model_type": 3}', "\ud800", "", "null"],
    "tokenizer.json": ["{", "{}", "", '{"version": "1.0"}', "[]", "null"],
    "tokenizer_config.json": [
        "{", "[]", '{"tokenizer_class": "Gone"}', '{"chat_template": "{% for"}', '{"eos_token": 3}',
    ],
    "model.safetensors": ["", "abc", "\0" * 100],
    "generation_config.json": ["{", "[]", '{"temperature": "hot"}'],
}  # fmt: skip
SIZES = ["n_embd", "n_layer", "n_head", "vocab_size", "n_positions", "n_inner", "activation_function"]


def command_line(case: Case) -> Result:
    """Run a drawn command line in a folder with a model like GPT-2's, texts and broken files."""
    words, changes = case.chance.choice([_train_words, _train_words, _train_files, _plan_words, _env_words])(
        case.chance
    )
    told = " ".join(map(repr, words)) + "".join(f"\n{name}: {text!r:.200}" for name, text in changes.items())
    return _run(case, told, _command, words, changes)


def _train_words(dice: random.Random) -> tuple[list[str], dict[str, Any]]:
    """Options of `train`: some in YAML, some as words, in three of four cases one to three of them odd."""
    hints = get_type_hints(HybridConfig) | {
        name: hint for owner in options.TRAIN.groups for name, hint in get_type_hints(owner).items()
    }
    own = [field.name for owner in (*options.TRAIN.groups, HybridArguments) for field in fields(owner)]
    # A Hub may be asked for what these name, and processes may be started.
    names = [name for name in (*own, *TRAINERS_OWN) if name not in ("num_processes", "accelerate_config")]
    names += ["resume_from_checkpoint", "output_dir", "max_steps", "num_processes"]
    hints["num_processes"] = bool  # one process, or refused
    in_yaml = {**BASE}
    words = []
    for name in dice.sample(names, dice.randint(0, 3)):
        if dice.random() < 0.5:
            in_yaml[name] = dice.choice(YAML_VALUES) if dice.random() < 0.7 else usual_value(dice, name, hints[name])
        else:
            words += [f"--{name}", dice.choice(WORDS)] if dice.random() < 0.8 else [f"--{name}"]
    in_yaml = {name: value for name, value in in_yaml.items() if value is None or isinstance(value, _OF_YAML)}
    if in_yaml.get("num_processes") not in (None, 1) or "--num_processes" in words:
        in_yaml["num_processes"], words = dice.choice([0, -1, [1], "x", None]), []
    return ["train", "--config", "run.yaml", *words], {"run.yaml": yaml.safe_dump(in_yaml).encode()}


_OF_YAML = (str, bool, int, float, list, dict)


def _train_files(dice: random.Random) -> tuple[list[str], dict[str, Any]]:
    """`train` on a broken file: of data, YAML or the model."""
    kind, words = dice.choice(["data", "yaml", "model", "size"]), ["train", "--config", "run.yaml"]
    changes: dict[str, Any] = {"run.yaml": yaml.safe_dump(BASE).encode()}
    if kind == "data":
        name = dice.choice(list(BROKEN_FILES))
        changes[name] = BROKEN_FILES[name]
        words += [dice.choice(["--dataset", "--dataset", "--eval_dataset"]), name]
    elif kind == "yaml":
        broken = dice.choice(BROKEN_YAML)
        changes["run.yaml"] = broken if dice.random() < 0.5 else changes["run.yaml"] + broken
    elif kind == "model":
        name = dice.choice(list(BROKEN_MODELS))
        changes[f"model/{name}"] = dice.choice(BROKEN_MODELS[name]).encode("utf-8", "surrogatepass")
    else:
        changes["config"] = {dice.choice(SIZES): dice.choice([*YAML_VALUES[:12], [1], "abc", 10**6])}
    return words, changes


def _plan_words(dice: random.Random) -> tuple[list[str], dict[str, Any]]:
    """`plan` with odd sizes of the model and odd words."""
    changes = {"config": {dice.choice(SIZES): dice.choice(YAML_VALUES)}} if dice.random() < 0.5 else {}
    words = ["plan", dice.choice(["model", "model", "model", *WORDS]), "--ram", "4GiB"]
    names = "sequence_length batch_size gradient_accumulation_steps vram ram dtype peft lora_r lora_target_modules "
    for name in dice.sample([*names.split(), "output"], dice.randint(0, 2)):
        words += [f"--{name}", dice.choice(WORDS)]
    return words, changes


def _env_words(dice: random.Random) -> tuple[list[str], dict[str, Any]]:
    """`env`, `report`, no command, or one that does not exist."""
    word = dice.choice(WORDS)
    return dice.choice([["env"], ["env", word], ["report", word], [word], [], ["--version"], ["train"]]), {}


def _command(words: list[str], changes: dict[str, Any], folder: Path) -> tuple[str, str]:
    os.chdir(folder)
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    make_model(folder / "model", changes.pop("config", {}))
    Path("text.txt").write_text("\n\n".join(f"{number}. {'To be or not to be. ' * 8}" for number in range(20)))
    for name, text in changes.items():
        Path(name).write_bytes(text)
    with open("err", "w") as err, open("out", "w") as out:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
            try:
                status = main(words)
            except SystemExit as error:  # of argparse
                status = error.code or 0
    said = Path("err").read_text()
    if status == 0:
        return _trained(words)
    if status == 1 and "plan: nothing fits" in said:
        return "refused", said
    told = [line for line in said.splitlines() if line.startswith("hf-hybrid")]
    return ("refused" if status == 2 and len(told) == 1 else "traceback"), f"status {status}\n{said[-3000:]}"


def _trained(words: list[str]) -> tuple[str, str]:
    """Whether a training that ended well did train: its steps are done, its weights written and finite."""
    if words[:1] != ["train"] or len(words) == 1 or Path("out").read_text().startswith("usage:"):
        return "trained", "nothing to train"
    from safetensors.torch import load_file

    (state,) = Path().glob("*/trainer_state.json")
    steps = json.loads(state.read_text())
    if not 0 < steps["global_step"] == steps["max_steps"]:
        return "nonsense", f"{steps['global_step']} steps of {steps['max_steps']}"
    written = load_file(next(state.parent.glob("*.safetensors")))
    broken = [name for name, tensor in written.items() if not torch.isfinite(tensor).all()]
    return ("nonsense", f"{broken[0]} is not finite") if broken else ("trained", "")


def make_model(folder: Path, sizes: dict[str, Any]) -> None:
    """Write a folder like GPT-2's: a config, and a byte-level tokenizer without a pad token."""
    byte_tokenizer(["<|endoftext|>"], eos_token="<|endoftext|>").save_pretrained(folder)
    config = GPT2Config(vocab_size=257, n_embd=16, n_layer=2, n_head=2, n_positions=64, eos_token_id=256)
    config.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes))
