"""
Traced steps that are remembered: tests plan the same tiny models again and again.

A step is traced on tensors without data, so what it holds follows from what [`_key`] lists: modules and their plain
attributes, configs, shapes, dtypes, which weights are shared and trained, and the sizes of the batch. Whatever it does
not know, such as hooks, a `forward` of an instance or an object of a test, lets the step be traced.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import os
import pickle
import types
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from hf_hybrid.plan import trace

LISTED = {"_modules", "_parameters", "_buffers"}
"""Attributes of modules that have a line of their own."""
UNREAD = {
    "_gradient_checkpointing_func",  # what `enable_checkpointing` gives, for the accelerator
    "_non_persistent_buffers_set", "_require_grads_hook", "_require_grads_hooks", "generation_config",
}  # fmt: skip
"""Attributes that no step reads."""
LIBRARIES = ("torch", "transformers", "peft")
OURS = "hf_hybrid.plan.stand_ins"
"""Layers in few bits, in a plan for a model that is not there."""
SIZES = ("batch_size", "sequence_length", "accelerator", "autocast", "chunked_loss", "distills")
"""What a traced step reads of a setup, beside whether gradients are accumulated."""


class _Unknown(Exception):
    """This step must be traced."""


def remember(folder: Path | None = None) -> None:
    """
    Let equal steps share a trace in this process, from now on.

    Args:
        folder (`Path`, *optional*): Share them with the processes that were given the same folder, too.
    """
    fresh = trace.trace_step
    if hasattr(fresh, "__wrapped__"):
        return
    known: dict[str, trace.StepTrace] = {}

    @functools.wraps(fresh)
    def trace_step(model, layers, setup, **more_inputs):
        try:
            key = hashlib.sha256(repr(_key(model, layers, setup, more_inputs)).encode()).hexdigest()
        except _Unknown:
            return fresh(model, layers, setup, **more_inputs)
        file = folder and folder / key
        if key not in known and file and file.exists():
            known[key] = pickle.loads(file.read_bytes())
        if key not in known:
            known[key] = fresh(model, layers, setup, **more_inputs)
            if file:
                made = file.with_name(f"{key}.{os.getpid()}")
                made.write_bytes(pickle.dumps(known[key]))
                made.replace(file)
        return known[key]

    trace.trace_step = trace_step


def _key(model, layers, setup, more_inputs) -> tuple:
    places: dict[int, int] = {}

    def tensor(value: torch.Tensor) -> tuple:
        shared = places.setdefault(id(value), len(places))
        kind, stride, grad = type(value).__name__, value.stride(), getattr(value, "grad", None) is not None
        return kind, shared, tuple(value.shape), stride, str(value.dtype), value.requires_grad, grad

    def plain(value) -> object:
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
            return repr(value)
        if isinstance(value, torch.Tensor):
            return tensor(value)
        if isinstance(value, PreTrainedConfig):
            return _named(type(value)), repr(value), str(value._attn_implementation)
        if isinstance(value, dict):
            return "dict", [(plain(name), plain(inner)) for name, inner in value.items()]
        if isinstance(value, (list, tuple)):
            return type(value).__name__, [plain(inner) for inner in value]
        if isinstance(value, (set, frozenset)):
            return type(value).__name__, sorted(map(repr, map(plain, value)))
        if isinstance(value, functools.partial):
            return "partial", plain(value.func), plain(value.args), plain(value.keywords)
        if isinstance(value, torch.nn.Module) and id(value) in names:
            return "module", names[id(value)]
        if isinstance(value, enum.Enum):
            return _named(type(value)), value.name
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _named(type(value)), plain(vars(value))
        if isinstance(value, types.MethodType):
            return "method", plain(value.__self__), _named(value.__func__)
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            return _named(value)
        raise _Unknown(value)

    def fused(forward) -> object:
        """A head of TRL's before the `forward` of the class: a closure over that and over what the head is to give."""
        function = getattr(forward, "__func__", None)
        if getattr(function, "__globals__", {}).get("__name__") != "trl.trainer.utils":
            raise _Unknown(forward)
        closes = [cell.cell_contents for cell in function.__closure__]
        own = [value for value in closes if isinstance(value, types.MethodType)]
        if [value.__func__ for value in own] != [type(forward.__self__).forward]:
            raise _Unknown(forward)
        return function.__code__.co_name, [plain(value) for value in closes if value not in own]

    def attribute(name: str, value) -> object:
        if name == "forward":
            return fused(value)
        # by hooks that are numbered anew in each process
        return plain(list(value.values()) if "_hooks" in name and isinstance(value, dict) else value)

    names = {id(module): name or "(whole)" for name, module in model.named_modules(remove_duplicate=False)}
    modules = []
    for name, module in model.named_modules(remove_duplicate=False):
        attributes = {key: value for key, value in vars(module).items() if key not in LISTED | UNREAD}
        own = [(key, value) for held in (module._parameters, module._buffers) for key, value in held.items()]
        tensors = [(key, value if value is None else tensor(value)) for key, value in own]
        listed = [(key, attribute(key, value)) for key, value in attributes.items()]
        modules.append((name, _named(type(module)), _named(type(module).forward, closures=True), listed, tensors))
    sizes = [getattr(setup, name) for name in SIZES] + [setup.gradient_accumulation_steps > 1]
    return plain(sizes), plain(more_inputs), [names[id(layer)] for layer in layers], model.training, modules


def _named(value, *, closures: bool = False) -> str:
    """A class or function that its name tells apart from all others: of a library, and no closure unless it may be."""
    closes = not closures and getattr(value, "__closure__", None)
    module = str(value.__module__)
    if (module != OURS and module.partition(".")[0] not in LIBRARIES) or closes:
        raise _Unknown(value)
    return f"{value.__module__}.{value.__qualname__}"
