"""
The Axolotl plugin against Axolotl's documented interface, written down here: Axolotl itself is not installed, and
`test_axolotl_itself.py` is the job that has it.

`docs.axolotl.ai/docs/custom_integrations.html`: a plugin derives from `BasePlugin`; `get_input_args` and
`get_training_args_mixin` return dotted names of classes that are merged into the schema of the YAML file and into the
training arguments; `get_training_args` returns values for the latter; the first `get_trainer_cls` that is not None is
used.
"""

import enum
import importlib
import inspect
import sys
import types
from dataclasses import dataclass, field
from typing import Optional

import pytest
from conftest import ByteText, config_values, tiny_model
from transformers import Trainer, TrainingArguments

pydantic = pytest.importorskip("pydantic", reason="Axolotl brings it along")
MODULE = "hf_hybrid.integrations.axolotl"


class BasePlugin:
    """Names and arguments of every hook that Axolotl calls."""

    def register(self, cfg): ...
    def get_input_args(self): ...
    def get_training_args_mixin(self): ...
    def load_datasets(self, cfg, preprocess=False): ...
    def pre_model_load(self, cfg): ...
    def post_model_build(self, cfg, model): ...
    def pre_lora_load(self, cfg, model): ...
    def post_lora_load(self, cfg, model): ...
    def post_model_load(self, cfg, model): ...
    def get_trainer_cls(self, cfg): ...
    def post_trainer_create(self, cfg, trainer): ...
    def get_training_args(self, cfg): ...
    def get_collator_cls_and_kwargs(self, cfg, is_eval=False): ...
    def create_optimizer(self, cfg, trainer): ...
    def create_lr_scheduler(self, cfg, trainer, optimizer, num_training_steps): ...
    def add_callbacks_pre_trainer(self, cfg, model): ...
    def add_callbacks_post_trainer(self, cfg, trainer): ...
    def post_train(self, cfg, model): ...
    def post_train_unload(self, cfg): ...


class AxolotlTrainer(Trainer):
    """The constructor of Axolotl's trainer: further collators and tags, everything else is Trainer's."""

    def __init__(self, *args, bench_data_collator=None, eval_data_collator=None, dataset_tags=None, **kwargs):
        self.collators, self.dataset_tags = (bench_data_collator, eval_data_collator), dataset_tags
        super().__init__(*args, **kwargs)
        assert self.args.sample_packing is False


@dataclass
class AxolotlTrainingMixins:
    """Axolotl's own training arguments: a dataclass without a `__post_init__`, in front of the plugins'."""

    model_type: Optional[str] = field(default=None)
    sample_packing: bool = field(default=False)
    max_seq_length: int = field(default=2048)


class InputConfig(pydantic.BaseModel):
    """Axolotl's schema."""

    model_config = pydantic.ConfigDict(extra="ignore")
    base_model: str
    plugins: list[str] = []


@pytest.fixture
def plugin_module(monkeypatch):
    """The plugin's module, imported where a stand-in for Axolotl can be imported."""
    parts = ("axolotl", "axolotl.integrations", "axolotl.integrations.base", "axolotl.core", "axolotl.core.trainers")
    modules = {name: types.ModuleType(name) for name in parts}
    modules["axolotl.integrations.base"].BasePlugin = BasePlugin
    modules["axolotl.core.trainers"].AxolotlTrainer = AxolotlTrainer
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def load(name: str):
    """How Axolotl finds a class by its dotted name."""
    module, cls = name.rsplit(".", 1)
    return getattr(importlib.import_module(module), cls)


def merged_arguments(plugin) -> type:
    """How Axolotl makes its training arguments: the mixins of plugins behind its own, without a decorator."""
    mixins = type("AxolotlTrainingMixins", (AxolotlTrainingMixins, load(plugin.get_training_args_mixin())), {})
    return dataclass(type("AxolotlTrainingArguments", (mixins, TrainingArguments), {}))


def test_every_hook_has_the_documented_name_and_arguments(plugin_module):
    plugin = load("hf_hybrid.integrations.axolotl.HybridPlugin")()
    assert isinstance(plugin, BasePlugin)
    for name, hook in inspect.getmembers(type(plugin), inspect.isfunction):
        if not name.startswith("_"):
            documented = inspect.signature(getattr(BasePlugin, name))
            assert list(inspect.signature(hook).parameters) == list(documented.parameters), name


def test_options_under_one_key_are_checked_with_the_yaml_file(plugin_module):
    plugin = plugin_module.HybridPlugin()
    schema = type("AxolotlInputConfig", (InputConfig, load(plugin.get_input_args())), {})
    config = schema(base_model="m", plugins=[], hybrid={"preset": "aggressive", "leap_gain": 2})
    assert plugin.get_training_args(config) == {"preset": "aggressive", "leap_gain": 2.0}
    as_dictionary = config.model_dump(exclude_none=True)
    assert plugin.get_training_args(as_dictionary) == {"preset": "aggressive", "leap_gain": 2.0}
    assert plugin.get_training_args(schema(base_model="m")) == {}
    with pytest.raises(pydantic.ValidationError, match="leap_gian"):
        schema(base_model="m", hybrid={"leap_gian": 2})
    with pytest.raises(pydantic.ValidationError, match="preset"):
        plugin.get_training_args({"hybrid": {"preset": "reckless"}})


def test_training_arguments_take_and_check_every_option(plugin_module, tmp_path):
    plugin = plugin_module.HybridPlugin()
    arguments = merged_arguments(plugin)
    given = plugin.get_training_args({"hybrid": {"full_phase_steps": 3, "memory": "off"}})
    args = arguments(**config_values(tmp_path), max_seq_length=64, **given)
    assert (args.full_phase_steps, args.max_seq_length, args.preset) == (3, 64, "balanced")
    assert args.device.type == "cpu"  # TrainingArguments' own __post_init__ ran
    with pytest.raises(ValueError, match="`leap_gain` must be at least 0"):
        arguments(**config_values(tmp_path), leap_gain=-1)
    with pytest.raises(ValueError, match="`fp16=True` cannot be combined"):
        arguments(**config_values(tmp_path), fp16=True, direction="orthogonal")


def test_a_run_goes_through_the_phases(plugin_module, tmp_path):
    plugin = plugin_module.HybridPlugin()
    phases = {"warmup_phase_steps": 4, "full_phase_steps": 3, "leap_worth": 3.0, "leap_budget": 100}
    cfg = {"hybrid": {**phases, "direction": "orthogonal"}}
    plugin.pre_model_load(cfg)
    trainer_class = plugin.get_trainer_cls(cfg)
    assert issubclass(trainer_class, AxolotlTrainer)
    args = merged_arguments(plugin)(**config_values(tmp_path, max_steps=20), **plugin.get_training_args(cfg))
    trainer = trainer_class(
        model=tiny_model(), args=args, train_dataset=ByteText(200), dataset_tags=["text"], callbacks=[]
    )
    trainer.train()
    summary = trainer.hybrid_summary()
    assert trainer.dataset_tags == ["text"] and summary["leaps"] and summary["steps_by_phase"]["predict"] > 0
    assert sum(summary["steps_by_phase"].values()) == 20


class RLType(str, enum.Enum):
    """Axolotl's schema makes this of the word in the file."""

    DPO = "dpo"


@pytest.mark.parametrize(
    "cfg", [{"rl": "dpo"}, {"rl": RLType.DPO}, {"reward_model": True}, {"model_config_type": "mamba"}]
)
def test_what_axolotl_trains_with_other_trainers_is_refused(cfg, plugin_module):
    plugin = plugin_module.HybridPlugin()
    name, value = next(iter(cfg.items()))
    value = getattr(value, "value", value)
    for hook in (plugin.load_datasets, plugin.pre_model_load, plugin.get_trainer_cls):
        with pytest.raises(ValueError, match=f"`{name}: {value}` .*Remove `hf_hybrid.integrations.axolotl"):
            hook(cfg)


def test_without_axolotl_the_import_says_so(monkeypatch):
    if importlib.util.find_spec("axolotl") is not None:
        pytest.skip("Axolotl is installed")
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(ImportError, match="^`HybridPlugin` needs Axolotl, which cannot be imported here"):
        importlib.import_module(MODULE)
