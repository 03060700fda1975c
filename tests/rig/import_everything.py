"""A process that imports every module of the package and compares what other packages are before and after."""

import importlib
import logging
import os
import pkgutil
import sys
import types
import warnings

import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: F401  (transformers loads what is asked for)

OPTIONAL = ("trl", "peft", "bitsandbytes", "matplotlib", "IPython", "axolotl")
OTHERS = {
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "huggingface_hub",
    "safetensors",
    "tqdm",
    "socket",
    *OPTIONAL,
}
MEMBERS = (types.FunctionType, property, classmethod, staticmethod)


def functions_and_classes() -> dict[tuple, object]:
    """Every function and class of the other packages, and every method, by where it is found."""
    found: dict[tuple, object] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in OTHERS or module is None:
            continue
        for key, value in list(vars(module).items()):
            if issubclass(type(value), (types.FunctionType, types.BuiltinFunctionType, type)):
                found[name, key] = value
            if issubclass(type(value), type) and value.__module__.split(".")[0] in OTHERS:
                members = ((value, member, vars(value)[member]) for member in list(vars(value)))
                found |= {(owner, member): held for owner, member, held in members if isinstance(held, MEMBERS)}
    return found


def settings() -> dict[str, object]:
    """What a process has once."""
    return {
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "handlers": list(logging.root.handlers),
        "level": logging.root.level,
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "random": torch.random.get_rng_state().tolist(),
        "verbosity": transformers.logging.get_verbosity(),
    }


def main() -> None:
    for name in OPTIONAL:
        try:
            package = importlib.import_module(name)
            [getattr(package, own) for own in ("SFTTrainer", "DPOTrainer", "SFTConfig", "DPOConfig") if name == "trl"]
        except ImportError:
            continue
    before, set_before = functions_and_classes(), settings()
    import hf_hybrid

    imported = []
    for module in pkgutil.walk_packages(hf_hybrid.__path__, "hf_hybrid."):
        if module.name.endswith("__main__"):
            continue
        try:
            imported.append(importlib.import_module(module.name).__name__)
        except ImportError as error:
            assert any(name in str(error) for name in OPTIONAL), error
    assert {"hf_hybrid.trainer", "hf_hybrid.report.profiler", "hf_hybrid.report.publishing"} <= set(imported)
    after, set_after = functions_and_classes(), settings()
    changed = [where for where, held in before.items() if after.get(where) is not held]
    owners = {where[0] for where in before if isinstance(where[0], type)}
    added = [where for where in after if where[0] in owners and where not in before]
    assert len(before) > 10_000 and not changed and not added, (changed, added)
    assert set_before == set_after, {key for key in set_before if set_before[key] != set_after[key]}


if __name__ == "__main__":
    main()
