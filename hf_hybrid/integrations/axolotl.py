"""
A plugin that adds [`HybridTrainerMixin`] to Axolotl's trainer.

Name it in Axolotl's YAML file. The options of [`HybridArguments`] go under one key, `hybrid`:

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
from dataclasses import dataclass
from enum import Enum
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
    "rl": "trains with a trainer of TRL; for DPO use `HybridDPOTrainer` in a script of your own",
    "reward_model": "trains with a trainer of TRL",
    "process_reward_model": "trains with a trainer of TRL",
    "trainer_cls": "names another trainer, and a run has only one",
}

# Every hybrid option, all optional; other names are refused.
_OPTIONAL: dict[str, Any] = {name: (hint | None, None) for name, hint in get_type_hints(HybridArguments).items()}
HybridOptions = create_model("HybridOptions", __config__=ConfigDict(extra="forbid"), **_OPTIONAL)


class HybridInputArgs(BaseModel):
    """The key that the plugin adds to Axolotl's YAML file."""

    hybrid: HybridOptions | None = None  # ty: ignore[invalid-type-form]  # a class that pydantic makes


@dataclass
class HybridTrainingArgsMixin(HybridConfigBase):
    """The options, defaults and checks of [`HybridConfig`], for Axolotl's training arguments."""

    def __new__(cls, *values, **named):
        config = super().__new__(cls, *values, **named)
        vars(config)["_written"] = None  # Axolotl writes defaults of its own beside what stands in the file
        return config


class HybridPlugin(BasePlugin):
    """
    Adds options and training arguments to Axolotl, and chooses the trainer.

    Everything else of a run (data, chat templates, adapters, callbacks) stays Axolotl's.
    """

    def get_input_args(self) -> str:
        """Dotted name of the pydantic model that Axolotl merges into its own."""
        return f"{__name__}.HybridInputArgs"

    def get_training_args_mixin(self) -> str:
        """Dotted name of the dataclass that Axolotl puts in front of `TrainingArguments`."""
        return f"{__name__}.HybridTrainingArgsMixin"

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """The options given under `hybrid`. A name that is no option, or a value of another type, is a `ValueError`."""
        # Validated here, as not every version of Axolotl validates the keys of plugins.
        return HybridOptions.model_validate(dict(_get(cfg, KEY) or {})).model_dump(exclude_none=True)

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """Refuse a configuration before its data are read, which Axolotl reads. Raises as [`get_trainer_cls`]."""
        _check(cfg)

    def pre_model_load(self, cfg: Any) -> None:
        """The same where the data were prepared before."""
        _check(cfg)

    def get_trainer_cls(self, cfg: Any) -> type:
        """
        Axolotl's trainer of causal language models with [`HybridTrainerMixin`] in front. Raises `ValueError` for
        reinforcement learning, reward models, Mamba and another `trainer_cls`.
        """
        _check(cfg)
        # Not at the top: Axolotl's trainers import its plugins.
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
        value = value.value if isinstance(value, Enum) else value  # what Axolotl makes of the words of the file
        if value:
            raise ValueError(
                f"`{name}: {value}` {why}. Remove `hf_hybrid.integrations.axolotl.HybridPlugin` from `plugins`, or "
                f"`{name}`."
            )
    if _get(cfg, "model_config_type") == "mamba":
        raise ValueError(
            "`model_config_type: mamba` has its own trainer and loss in Axolotl. Remove "
            "`hf_hybrid.integrations.axolotl.HybridPlugin` from `plugins`, or train it with `HybridTrainer`."
        )
