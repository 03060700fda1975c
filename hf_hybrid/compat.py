"""
The differences between the admitted versions of torch, transformers and TRL that this package bridges.

Each is one function here, with the version that brought it. A function asks for the thing itself (a method, a field, a
parameter) where it can, as a build of the main branch has the number of a release that has it or not. Whoever drops a
version deletes the function and writes the new name where it was called.

The module imports nothing, so that every other module can import it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

NEWEST_TESTED = {"torch": (2, 15), "transformers": (5, 24), "trl": (1, 16), "peft": (0, 21)}
"""The newest version of each that the tests of the savings ran with: `.ci/versions`, docs/support.md."""


@functools.cache
def warn_of_untested_versions() -> None:
    """Warn once if a package is newer than the newest version that was tested, and name it."""
    for name in NEWEST_TESTED:
        version, newest, is_newer = _against_newest(name)
        if is_newer:
            logger.warning(
                "%s %s is newer than %s, the newest version that this package was tested with. If a run fails or is "
                "not what you expect, try `pip install \"%s==%s.*\"`.", name, version, newest, name, newest
            )  # fmt: skip


def _against_newest(name: str) -> tuple[str, str, bool]:
    """Return a package's version ("" before it is imported), the newest tested one, and whether the first is newer."""
    version, tested = getattr(sys.modules.get(name), "__version__", ""), NEWEST_TESTED[name]
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return version, ".".join(map(str, tested)), numbers > tested


@functools.cache
def _takes(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


# torch.


def options_for_fewer_heads() -> dict[str, Any]:
    """Return what `varlen_attn` has to be told where keys have fewer heads than queries. 2.12: `enable_gqa`."""
    from torch.nn.attention import varlen

    return {"enable_gqa": True} if _takes(varlen.varlen_attn, "enable_gqa") else {}


# TRL.


def trl_error(error: ImportError) -> ImportError:
    """Return what to raise where an import of TRL failed: which versions were tested, and what to install."""
    version, newest, is_newer = _against_newest("trl")
    has = f"; TRL {version} is installed" if version else ""
    install = f"trl=={newest}.*" if is_newer else "hf-hybrid[trl]"
    return ImportError(
        f"What is for TRL needs TRL 1.15 or newer, and was tested up to {newest}. It cannot be imported here ({error}"
        f'{has}). Install it with `pip install "{install}"`.'
    )


# transformers.


def norm_of_experts(experts: Any) -> Callable[..., Any] | None:
    """Return the norm behind each expert, if there is one. 5.17 has none, and no `has_post_expert_norm`."""
    return experts.post_expert_norm if getattr(experts, "has_post_expert_norm", False) else None


def shards_experts(experts: Any) -> bool:
    """Whether processes have some of the experts each. 5.17 does not tell by `_is_expert_parallel`."""
    return bool(getattr(experts, "_is_expert_parallel", False))


def configs_of_layers(config: Any) -> list[Any]:
    """Return the config of each layer. 5.23: layers may differ, and the config of the model has no answer then."""
    differ = getattr(config, "per_layer_attributes", None)
    return [config.per_layer_config[n] if differ else config for n in range(config.num_hidden_layers)]


def checkpointing_option() -> str:
    """Return what options and methods begin with. 5.23: `activation_checkpointing`; before `gradient_checkpointing`."""
    from transformers import PreTrainedModel

    # Asked of the model, because `TrainingArguments` take a second longer to import.
    new = hasattr(PreTrainedModel, "activation_checkpointing_enable")
    return "activation_checkpointing" if new else "gradient_checkpointing"


def switch_checkpointing_on(model: nn.Module, options: dict[str, Any]) -> None:
    """Switch activation checkpointing on, with options of `torch.utils.checkpoint`. 5.23: as `checkpointing_option`."""
    name = checkpointing_option()
    getattr(model, f"{name}_enable")(**{f"{name}_kwargs": options})


@functools.cache
def cache_name() -> str:
    """Return the name of keys and values in a model's arguments and output. 5.24: `cache`; until then as below."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return "cache" if _takes(CausalLMOutputWithPast, "cache") else "past_key_values"


CACHES = ("cache", "past_key_values", "past_key_value", "layer_past", "cache_params")
"""Names of the cache in the arguments of a layer. 5.24: `cache`; until then one of the others, by the model."""


@functools.cache
def packs_heads() -> bool:
    """Whether a token attends without copies of keys and values for each head that reads them. 5.23: `pack_gqa`."""
    from transformers.integrations import sdpa_attention

    return hasattr(sdpa_attention, "pack_gqa")


def layers_that_keep_nothing() -> tuple[type, ...]:
    """Return the kinds of layers of a cache that hold nothing. 5.23: `DummyLayer`; until then none."""
    from transformers import cache_utils

    kind = getattr(cache_utils, "DummyLayer", None)
    return () if kind is None else (kind,)
