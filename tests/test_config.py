import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ByteText, config_values, hybrid_config, tiny_model
from transformers import HfArgumentParser, TrainingArguments

from hf_hybrid import HybridArguments, HybridConfig, HybridTrainer
from hf_hybrid.arguments import PRESETS
from hf_hybrid.setup import leap_memory_steps, phase_lengths, rescue_is_on

PACKAGE = Path(__file__).parent.parent / "hf_hybrid"


def test_defaults_of_training_arguments_are_untouched(tmp_path):
    plain, hybrid = TrainingArguments(str(tmp_path)), HybridConfig(str(tmp_path))
    for field in dataclasses.fields(TrainingArguments):
        if field.init and field.name not in ("logging_dir", "run_name"):
            assert getattr(hybrid, field.name) == getattr(plain, field.name), field.name


def test_command_line_and_yaml(tmp_path):
    parser = HfArgumentParser(HybridConfig)
    (config,) = parser.parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--preset", "aggressive", "--leap_gain", "3", "--lr_rescue", "off"]
        + ["--full_phase_steps", "7", "--enable_predict", "False"]
    )
    assert (config.preset, config.leap_gain, config.lr_rescue, config.full_phase_steps) == ("aggressive", 3.0, "off", 7)
    assert config.enable_predict is False
    file = tmp_path / "run.yaml"
    file.write_text(f"output_dir: {tmp_path}\npreset: conservative\nleap_gain: 1.5\nlearning_rate: 0.001\n")
    (config,) = parser.parse_yaml_file(str(file))
    assert (config.preset, config.leap_gain, config.learning_rate) == ("conservative", 1.5, 1e-3)


def test_help_is_complete_and_cheap():
    """The options alone need neither torch nor transformers, and argparse can print them."""
    code = (
        "import sys, dataclasses, argparse\n"
        "from hf_hybrid import HybridArguments\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "parser = argparse.ArgumentParser()\n"
        "for f in dataclasses.fields(HybridArguments):\n"
        "    assert len(f.metadata['help']) > 20, f.name\n"
        "    parser.add_argument('--' + f.name, help=f.metadata['help'])\n"
        "print(parser.format_help())\n"
    )
    text = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "--leap_worth" in text and "5% of" in text
    assert "Must be at least 0 and less than 1." in text


def test_options_are_few():
    assert len(dataclasses.fields(HybridArguments)) <= 40


def test_every_option_is_read_by_something():
    source = {path: path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "arguments.py"}
    text = "\n".join(source.values())
    unread = [
        field.name
        for field in dataclasses.fields(HybridArguments)
        if not re.search(rf'options\.{field.name}\b|hybrid_args\.{field.name}\b|["\']{field.name}["\']', text)
    ]
    # Read by `preset_value` and `final_gain`.
    assert set(unread) <= {"preset", "leap_gain"}


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("preset", "bold", "`preset` must be one of conservative, balanced, aggressive, fast, got `bold`"),
        ("direction", "up", "`direction` must be one of orthogonal, gradient_memory, none, got `up`"),
        ("lr_rescue", "yes", "`lr_rescue` must be one of auto, on, off, got `yes`"),
        ("max_predict_steps", 0, "`max_predict_steps` must be at least 1, got 0. To train without leaps set"),
        ("full_phase_steps", -1, "`full_phase_steps` must be at least 1, got -1"),
        ("probe_budget", 1.5, "`probe_budget` must be between 0 and 1, got 1.5"),
        ("probe_budget", -0.1, "`probe_budget` must be between 0 and 1, got -0.1"),
        ("leap_budget", 0.0, "`leap_budget` must be greater than 0, got 0.0"),
        ("muon_momentum", 1.0, "`muon_momentum` must be at least 0 and less than 1, got 1.0"),
        ("probe_samples", 1, "`probe_samples` must be at least 2, got 1"),
    ],
)
def test_values_that_cannot_work_are_refused(tmp_path, option, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        HybridConfig(**config_values(tmp_path), **{option: value})


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("enable_predict", "False", "`enable_predict` must be `True` or `False`, got `'False'`"),
        ("enable_predict", None, "`enable_predict` must be `True` or `False`, got `None`"),
        ("correct_gain", 1, "`correct_gain` must be `True` or `False`, got `1`"),
        ("stream_embeddings", "no", "`stream_embeddings` must be `True` or `False`, got `'no'`"),
        ("probe_samples", 2.5, "`probe_samples` must be an integer, got `2.5`"),
        ("probe_samples", None, "`probe_samples` must be an integer, got `None`"),
        ("full_phase_steps", 1.5, "`full_phase_steps` must be an integer, got `1.5`"),
        ("full_phase_steps", True, "`full_phase_steps` must be an integer, got `True`"),
        ("full_phase_steps", "4", "`full_phase_steps` must be an integer, got `'4'`"),
        ("max_bad_steps", float("inf"), "`max_bad_steps` must be an integer, got `inf`"),
        ("leap_gain", "much", "`leap_gain` must be a finite number, got `'much'`"),
        ("leap_gain", float("nan"), "`leap_gain` must be at least 0, got nan"),
        ("max_bad_steps", float("nan"), "`max_bad_steps` must be an integer, got `nan`"),
        ("leap_gain", False, "`leap_gain` must be a finite number, got `False`"),
        ("leap_gain", "inf", "`leap_gain` must be a finite number, got `'inf'`"),
        ("leap_budget", float("inf"), "`leap_budget` must be a finite number, got `inf`"),
        ("probe_budget", [0.1], "`probe_budget` must be a finite number, got `[0.1]`"),
        ("vram_budget_gib", 10**400, "`vram_budget_gib` must be a finite number, got `1000"),
        ("checkpoint_phases", ["full"], "`checkpoint_phases` must be text, got `['full']`"),
        ("preset", True, "`preset` must be one of conservative, balanced, aggressive, fast, got `True`"),
        ("preset", ["fast"], "`preset` must be one of conservative, balanced, aggressive, fast, got `['fast']`"),
        ("memory", True, "`memory` must be one of off, auto, stream, got `on`"),
    ],
)
def test_values_of_another_type_are_refused(option, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        HybridArguments(**{option: value})


@pytest.mark.parametrize("value", [{}, float("nan"), float("inf")])
def test_every_option_refuses_what_none_can_use(value):
    for field in dataclasses.fields(HybridArguments):
        with pytest.raises(ValueError, match=f"`{field.name}` must be "):
            HybridArguments(**{field.name: value})


def test_numbers_have_the_type_of_their_option():
    numbers = HybridArguments(
        leap_gain="1e-1", leap_worth=np.float32(0.5), probe_budget=0, full_phase_steps=2.0, probe_samples=np.int64(9)
    )
    values = [numbers.leap_gain, numbers.leap_worth, numbers.full_phase_steps, numbers.probe_samples]
    assert values == [0.1, 0.5, 2, 9] and [type(value) for value in values] == [float, float, int, int]
    assert numbers.probe_budget == 0


def test_yaml_files_may_say_on_off_and_numbers_as_they_are_written(tmp_path):
    """YAML 1.1 reads a bare `off` as a bool, and `1e-1` as text."""
    file = tmp_path / "run.yaml"
    file.write_text(f"output_dir: {tmp_path}\nmemory: off\nlr_rescue: on\nchunked_loss: off\nprobe_budget: 1e-1\n")
    (config,) = HfArgumentParser(HybridConfig).parse_yaml_file(str(file))
    assert (config.memory, config.lr_rescue, config.chunked_loss, config.probe_budget) == ("off", "on", "off", 0.1)
    assert HybridConfig(str(tmp_path), **{"lr_rescue": False, "chunked_loss": True}).lr_rescue == "off"


@pytest.mark.parametrize("optim", ["schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"])
def test_schedule_free_is_refused_for_leaps_only(tmp_path, optim):
    with pytest.raises(ValueError, match=f"`optim={optim}` keeps two sets of weights.*`enable_predict=False`"):
        HybridConfig(**config_values(tmp_path, optim=optim))
    assert HybridConfig(**config_values(tmp_path, optim=optim, enable_predict=False)).optim == optim


@pytest.mark.parametrize("optim", ["galore_adamw_layerwise", "adalomo"])
def test_layerwise_optimizers_are_refused(tmp_path, optim):
    with pytest.raises(ValueError, match=f"`optim={optim}` updates weights inside the backward pass"):
        HybridConfig(**config_values(tmp_path, optim=optim))


def test_fp16_and_sharding_are_refused_for_leaps_only(tmp_path):
    from types import SimpleNamespace

    from hf_hybrid.config import check_training_arguments

    base = {"fp16": False, "deepspeed": None, "fsdp": None, "optim": "adamw_torch"}
    on, off = HybridArguments(), HybridArguments(enable_predict=False)
    for change, message in (
        ({"fp16": True}, "`fp16=True` cannot be combined with predicted steps.*Use `bf16=True`"),
        ({"deepspeed": "zero3.json"}, "`deepspeed` cannot be combined with leaps"),
        ({"fsdp": "full_shard"}, "`fsdp` cannot be combined with leaps"),
    ):
        args = SimpleNamespace(**{**base, **change})
        with pytest.raises(ValueError, match=message):
            check_training_arguments(args, on)
        check_training_arguments(args, off)


def test_presets_are_ordered_and_options_win():
    names = list(PRESETS)
    for option in ("leap_worth", "divergence_threshold"):
        values = [HybridArguments(preset=name).preset_value(option) for name in names[:3]]
        assert values == sorted(values) and len(set(values)) == 3
    gains = [HybridArguments(preset=name).final_gain(3.0) for name in names[:3]]
    assert gains == sorted(gains) and len(set(gains)) == 3
    assert HybridArguments(preset="aggressive", leap_worth=0.5).preset_value("leap_worth") == 0.5
    assert HybridArguments(leap_gain=0.5).final_gain(3.0) == 0.5 and HybridArguments().final_gain(4.0) == 4.0


@pytest.mark.parametrize("steps", [1, 10, 50, 300, 10_000])
def test_phase_lengths_suit_the_run(steps):
    lengths = phase_lengths(HybridArguments(), steps)
    cycle = lengths.warmup + lengths.full + lengths.correct
    assert cycle < steps or steps < 10
    assert lengths.warmup <= 100 and lengths.max_predict <= 10
    assert 5 <= leap_memory_steps(HybridArguments(), steps, None) <= 1000
    assert phase_lengths(HybridArguments(warmup_phase_steps=3), steps).warmup == 3


def test_rescue_respects_a_learning_rate_that_was_chosen(tmp_path):
    chosen, default = HybridConfig(**config_values(tmp_path)), HybridConfig(str(tmp_path))
    assert rescue_is_on(default, default) and not rescue_is_on(chosen, chosen)
    for value, expected in (("on", True), ("off", False)):
        config = HybridConfig(str(tmp_path), lr_rescue=value)
        assert rescue_is_on(config, config) is expected


def test_the_config_is_saved_and_read_back(tmp_path):
    config = hybrid_config(tmp_path, preset="aggressive", hub_token="secret", optim_args="a=1")
    HybridTrainer(tiny_model(), config, train_dataset=ByteText(100)).train()
    text = (tmp_path / "hybrid_config.json").read_text()
    assert "secret" not in text
    again = HybridConfig.from_json(tmp_path, max_steps=7)
    for field in dataclasses.fields(HybridArguments):
        assert getattr(again, field.name) == getattr(config, field.name), field.name
    assert (again.learning_rate, again.optim_args, again.max_steps) == (config.learning_rate, "a=1", 7)


def test_unknown_keys_in_a_saved_config_are_named(tmp_path):
    (tmp_path / "hybrid_config.json").write_text(json.dumps({"output_dir": "x", "leap_gian": 1}))
    with pytest.raises(ValueError, match="Unknown options in .*`leap_gian`"):
        HybridConfig.from_json(tmp_path)
