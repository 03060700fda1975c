"""
Axolotl's trainer, trained in phases: `plugins: [hf_hybrid.integrations.axolotl.HybridPlugin]` in its YAML file.

The options of [`HybridArguments`] stand under one key, `hybrid`:

```yaml
plugins:
  - hf_hybrid.integrations.axolotl.HybridPlugin
hybrid:
  preset: balanced
  leap_gain: 2.0
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from hf_hybrid.arguments import HybridArguments
from hf_hybrid.config import HybridConfigBase

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel, ConfigDict, create_model
except ImportError as error:
    raise ImportError(
        f"`HybridPlugin` needs Axolotl, which cannot be imported here ({error}). Install it as docs.axolotl.ai says; "
        "without Axolotl use `HybridTrainer` or `HybridSFTTrainer`."
    ) from error

KEY = "hybrid"
_REFUSED = {
    "rl": "trains with a trainer of TRL; use `HybridDPOTrainer` in a script of yours for DPO",
    "reward_model": "trains with a trainer of TRL",
    "process_reward_model": "trains with a trainer of TRL",
    "trainer_cls": "names another trainer, and there can be only one",
}


def _options_model() -> type[BaseModel]:
    """Every hybrid option, not given by default; a name that is none of them is refused."""
    hints = get_type_hints(HybridArguments)
    optional = {option.name: (hints[option.name] | None, None) for option in fields(HybridArguments)}
    return create_model("HybridOptions", __config__=ConfigDict(extra="forbid"), **optional)


HybridOptions = _options_model()


class HybridInputArgs(BaseModel):
    """What the plugin adds to Axolotl's YAML file."""

    hybrid: HybridOptions | None = None


@dataclass
class HybridTrainingArgsMixin(HybridConfigBase):
    """What the plugin adds to Axolotl's training arguments: options, defaults and checks of [`HybridConfig`]."""


class HybridPlugin(BasePlugin):
    """
    Axolotl's plugin interface: options, training arguments and the trainer, which is Axolotl's with our mixin in front.

    Everything else of a run (data, chat templates, adapters, callbacks) stays Axolotl's.
    """

    def get_input_args(self) -> str:
        """Where Axolotl finds the pydantic model that it merges into its own."""
        return f"{__name__}.HybridInputArgs"

    def get_training_args_mixin(self) -> str:
        """Where Axolotl finds the dataclass that it puts in front of `TrainingArguments`."""
        return f"{__name__}.HybridTrainingArgsMixin"

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """
        The options that were given under `hybrid`; the others keep their defaults.

        Args:
            cfg (`DictDefault`): Axolotl's configuration.

        Raises:
            ValueError: If `hybrid` holds a name that is no option, or a value of the wrong kind.
        """
        given = _get(cfg, KEY)
        if given is None:
            return {}
        if isinstance(given, BaseModel):
            given = given.model_dump()
        # Again, as not every version of Axolotl validates what comes from plugins.
        options = HybridOptions.model_validate(dict(given))
        return {name: value for name, value in options.model_dump().items() if value is not None}

    def pre_model_load(self, cfg: Any) -> None:
        """Refuse what cannot be trained in phases before a model is loaded. Raises as [`get_trainer_cls`]."""
        _check(cfg)

    def get_trainer_cls(self, cfg: Any) -> type:
        """
        Axolotl's trainer of causal language models with [`HybridTrainerMixin`] in front.

        Args:
            cfg (`DictDefault`): Axolotl's configuration.

        Raises:
            ValueError: For reinforcement learning, reward models, Mamba and another `trainer_cls`.
        """
        _check(cfg)
        return hybrid_axolotl_trainer()


def hybrid_axolotl_trainer() -> type:
    """`HybridAxolotlTrainer`; made when it is asked for, as Axolotl's trainers import its plugins."""
    from axolotl.core.trainers import AxolotlTrainer

    from hf_hybrid.trainer import HybridTrainerMixin

    class HybridAxolotlTrainer(HybridTrainerMixin, AxolotlTrainer):
        """`AxolotlTrainer` in phases."""

    return HybridAxolotlTrainer


def _get(cfg: Any, name: str) -> Any:
    return cfg.get(name) if isinstance(cfg, Mapping) else getattr(cfg, name, None)


def _check(cfg: Any) -> None:
    for name, why in _REFUSED.items():
        value = _get(cfg, name)
        if value:
            raise ValueError(
                f"`{name}: {value}` {why}. Remove `hf_hybrid.integrations.axolotl.HybridPlugin` from `plugins`, or "
                f"`{name}`."
            )
    if _get(cfg, "model_config_type") == "mamba":
        raise ValueError(
            "`model_config_type: mamba` trains with a trainer and a loss of its own in Axolotl. Remove "
            "`hf_hybrid.integrations.axolotl.HybridPlugin` from `plugins`, or train it with `HybridTrainer`."
        )
