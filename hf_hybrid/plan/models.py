"""From a Hub id, a folder or a config file to a model without data, whole or with a few of its layers."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import constants
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from hf_hybrid.plan.attention import register
from hf_hybrid.streaming.layers import NoLayerListError, find_layers


def read_config(model: str | Path | PreTrainedConfig | nn.Module) -> PreTrainedConfig:
    """
    The config of a causal language model.

    Args:
        model: A config, a model, a config file, a folder with a `config.json`, or a Hub id.

    Raises:
        ValueError: If there is no such config, or it is not of a decoder-only language model.
    """
    if isinstance(model, nn.Module):
        config = getattr(model, "config", None)
        if not isinstance(config, PreTrainedConfig):
            raise ValueError(f"`model` of type `{type(model).__name__}` has no transformers config. Give its config.")
    else:
        config = model if isinstance(model, PreTrainedConfig) else _load(model)
    config = copy.deepcopy(config)
    _check_kind(config, model if isinstance(model, (str, Path)) else type(model).__name__)
    return config


def _load(model: str | Path) -> PreTrainedConfig:
    path = Path(model).expanduser()
    local = path.exists() or str(model).startswith((".", "/", "~")) or path.suffix == ".json"
    file = path / "config.json" if path.is_dir() else path
    if local and not file.is_file():
        raise ValueError(
            f"`model`: there is no file `{file}`. Give a config file, a folder with `config.json`, or a Hub id."
        )
    try:
        if local:
            values = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(values, dict) or "model_type" not in values:
                raise ValueError(
                    f"`model`: `{file}` has no `model_type`. Give the `config.json` of a transformers model."
                )
        return AutoConfig.from_pretrained(str(file if local else model))
    except json.JSONDecodeError as error:
        raise ValueError(f"`model`: `{file}` is not JSON ({error}). Give the `config.json` of a model.") from None
    except OSError as error:
        offline = "`HF_HUB_OFFLINE` is set, and it is not in the cache. Unset it to download `config.json`"
        why = offline if constants.HF_HUB_OFFLINE else f"{_first_line(error)} Check the name and the network"
        message = f"`model`: the config of `{model}` cannot be loaded: {why}, or give a folder or a config file."
        raise ValueError(message) from None
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:  # whatever absurd values lead to
        if str(error).startswith("`model`"):
            raise
        raise ValueError(f"`model`: the config of `{model}` cannot be read: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _check_kind(config: PreTrainedConfig, name: object) -> None:
    kind = type(config)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"`model`: `{name}` ({config.model_type}) is an encoder-decoder model. Plans are for decoder-only ones."
        )
    encoder = kind in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    if encoder:
        raise ValueError(
            f"`model`: `{name}` ({config.model_type}) is an encoder: it is trained on masked tokens, not as a causal "
            "language model. Plans are for decoder-only models."
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"`model`: transformers has no causal language model for `{name}` ({config.model_type}). Plans are for "
            "models that `AutoModelForCausalLM` builds."
        )


@dataclass
class Blueprint:
    """
    A model's config, and the model itself on the meta device, by dtype.

    Args:
        config (`PreTrainedConfig`): Of a causal language model.
    """

    config: PreTrainedConfig
    _whole: dict[torch.dtype, nn.Module] = field(default_factory=dict)

    def whole(self, dtype: torch.dtype) -> nn.Module:
        """
        All layers, without data.

        Raises:
            ValueError: If transformers cannot build it.
        """
        if dtype not in self._whole:
            try:
                with torch.device("meta"):
                    model = AutoModelForCausalLM.from_config(copy.deepcopy(self.config), dtype=dtype)
            except Exception as error:  # whatever a model's constructor makes of absurd sizes
                reason = f"{type(error).__name__}: {_first_line(error)}"
                kind = self.config.model_type
                raise ValueError(f"`model`: no `{kind}` can be built from this config ({reason}).") from None
            self._whole[dtype] = model
        return self._whole[dtype]

    def excerpt(self, dtype: torch.dtype) -> Excerpt:
        """
        A few layers that stand for all, as a copy on the meta device.

        Raises:
            ValueError: If transformers cannot build the model.
        """
        whole = self.whole(dtype)
        try:
            layers = [layer for _, layer in find_layers(whole)]
        except NoLayerListError:
            return Excerpt(_ready(copy.deepcopy(whole)), ())
        chosen, stands_for = _choose([_signature(whole.config, layer, i) for i, layer in enumerate(layers)])
        name, _ = find_layers(whole)[0]
        parent, attribute = name.rsplit(".", 1)[0].rpartition(".")[::2]
        module = whole.get_submodule(parent)
        kept = getattr(module, attribute)
        setattr(module, attribute, nn.ModuleList(kept[index] for index in chosen))
        try:
            model = copy.deepcopy(whole)
        finally:
            setattr(module, attribute, kept)
        _cut(model, chosen, len(layers))
        return Excerpt(_ready(model), stands_for)


@dataclass(frozen=True)
class Excerpt:
    """A model with some layers of another; `stands_for[i]` is its layer that stands for layer `i` of the whole."""

    model: nn.Module
    stands_for: tuple[int, ...]

    def copy(self) -> nn.Module:
        """The model, to be changed."""
        return copy.deepcopy(self.model)


def _ready(model: nn.Module) -> nn.Module:
    """As `Trainer` runs it on a GPU."""
    model.config.use_cache = False
    if getattr(model.config, "_attn_implementation", None) == "sdpa":
        model.set_attn_implementation(register())
    return model.train()


def _choose(kinds: Sequence[object]) -> tuple[list[int], tuple[int, ...]]:
    """
    The first and the last layer, which stand for themselves alone, and one of each kind between them.

    The first may have inputs without gradients, and the output of the last is not kept by a layer behind it.
    """
    last = len(kinds) - 1
    between = {kind: index for index, kind in reversed(list(enumerate(kinds))) if 0 < index < last}
    chosen = sorted({0, last, *between.values()})
    place = {index: position for position, index in enumerate(chosen)}
    return chosen, tuple(place[i] if i in place else place[between[kind]] for i, kind in enumerate(kinds))


def _signature(config: PreTrainedConfig, layer: nn.Module, index: int) -> tuple:
    """What distinguishes layers: their modules and weights, and what the config lists for each."""
    listed = tuple(repr(values[index]) for _, _, values in _lists(config, index + 1))
    modules = tuple(type(module).__name__ for module in layer.modules())
    return (modules, tuple(tuple(p.shape) for p in layer.parameters()), listed)


def _lists(config: PreTrainedConfig, least: int) -> list[tuple[PreTrainedConfig, str, list]]:
    """What the config lists layer by layer."""
    found = []
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        layers = getattr(part, "num_hidden_layers", None)
        for name, values in vars(part).items():
            if isinstance(values, (list, tuple)) and len(values) == layers and len(values) >= least:
                found.append((part, name, list(values)))
    return found


def _cut(model: nn.Module, chosen: list[int], layers: int) -> None:
    config = model.config
    for part, name, values in _lists(config, layers):
        setattr(part, name, [values[index] for index in chosen])
    config.get_text_config().num_hidden_layers = len(chosen)
    for position, (_, layer) in enumerate(find_layers(model) if len(chosen) > 1 else ()):
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = position


def on_cpu(model: nn.Module) -> nn.Module:
    """Put a model of the meta device on the CPU in place, weights that are shared stay shared; for `FakeTensorMode`."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    like = torch.empty(tensor.shape, dtype=tensor.dtype)
                    parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(like, tensor.requires_grad) if parameter else like
                tensors[name] = made[id(tensor)]
    return model
