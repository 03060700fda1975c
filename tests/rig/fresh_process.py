"""
A process that begins with nothing imported, for `tests/test_side_effects.py`: what importing the package brings and
changes, and what a training sends. No environment variable keeps it from the network, and every connection is refused.

    PYTHONPATH=tests python tests/rig/fresh_process.py FOLDER
"""

import importlib
import json
import logging
import os
import pkgutil
import socket
import sys
import types
import warnings
from pathlib import Path

OPTIONAL = ("trl", "peft", "bitsandbytes", "torchao", "gguf", "matplotlib", "IPython", "axolotl")
TRAINERS = tuple(f"{kind}{part}" for kind in ("SFT", "DPO", "GRPO", "RLOO") for part in ("Trainer", "Config"))
OTHERS = {"torch", "transformers", "accelerate", "datasets", "huggingface_hub", "safetensors", "tqdm", "socket"}
OTHERS |= set(OPTIONAL)
MEMBERS = (types.FunctionType, property, classmethod, staticmethod)


def functions_and_classes() -> dict[tuple, object]:
    """Every function and class of the other packages, and every method, by where it is found."""
    held_at: dict[tuple, object] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in OTHERS or module is None:
            continue
        for key, value in list(vars(module).items()):
            if issubclass(type(value), (types.FunctionType, types.BuiltinFunctionType, type)):
                held_at[name, key] = value
            if issubclass(type(value), type) and value.__module__.split(".")[0] in OTHERS:
                members = ((value, member, vars(value)[member]) for member in list(vars(value)))
                held_at |= {(owner, member): held for owner, member, held in members if isinstance(held, MEMBERS)}
    return held_at


def settings() -> dict[str, object]:
    """What a process has once."""
    import torch
    import transformers

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


def refuse_connections() -> list[tuple]:
    """Returns the list of those that will be tried."""
    tried: list[tuple] = []

    def refuse(*args, **kwargs):
        tried.append(args)
        raise OSError("no connection in this test")

    socket.socket.connect = socket.socket.connect_ex = socket.socket.sendto = refuse
    socket.create_connection = socket.getaddrinfo = socket.gethostbyname = refuse
    return tried


def import_others() -> None:
    """What the package uses, and may use, of other packages."""
    from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: F401 - it loads what is asked for

    for name in OPTIONAL:
        try:
            package = importlib.import_module(name)
            [getattr(package, own) for own in TRAINERS if name == "trl"]
        except ImportError:
            continue


def import_package(package) -> list[str]:
    """Import every module of it. Returns their names."""
    imported = []
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.name.endswith("__main__"):
            continue
        try:
            imported.append(importlib.import_module(module.name).__name__)
        except ImportError as error:
            assert any(name in str(error) for name in OPTIONAL), error
    return imported


def train(folder: Path) -> dict:
    """Train, save and write a card. Returns the summary."""
    import conftest
    import huggingface_hub

    from hf_hybrid import HybridTrainer, MemoryProfilerCallback

    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    args = conftest.hybrid_config(folder, max_steps=10, save_strategy="steps", save_steps=5)
    options = {"train_dataset": conftest.ByteText(100), "callbacks": [MemoryProfilerCallback()]}
    trainer = HybridTrainer(conftest.tiny_model(), args, **options)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    return trainer.hybrid_summary()


def main() -> None:
    folder = Path(sys.argv[1])
    tried = refuse_connections()
    import hf_hybrid

    heavy = {"torch", "transformers", "accelerate", "datasets"} & set(sys.modules)
    import_others()
    before, set_before = functions_and_classes(), settings()
    imported = import_package(hf_hybrid)
    after, set_after = functions_and_classes(), settings()
    owners = {where[0] for where in before if isinstance(where[0], type)}
    results = {
        "heavy": sorted(heavy),
        "absent": [name for name in hf_hybrid.__all__ if getattr(hf_hybrid, name) is None],
        "imported": imported,
        "compared": len(before),
        "changed": [str(where) for where, held in before.items() if after.get(where) is not held],
        "added": [str(where) for where in after if where[0] in owners and where not in before],
        "set": [key for key in set_before if set_before[key] != set_after[key]],
        "leaps": len(train(folder / "out")["leaps"]),
        "tried": [str(connection) for connection in tried],
    }
    (folder / "found.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
