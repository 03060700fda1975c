"""`hf_hybrid/config.py`: options beside those of TrainingArguments, what cannot be combined, and the saved config."""

import copy
import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import ByteText, config_values, hybrid_config, tiny_model
from transformers import HfArgumentParser, TrainingArguments

from hf_hybrid import HybridArguments, HybridConfig, HybridTrainer
from hf_hybrid.config import check_training_arguments


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


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("preset", "bold", "`preset` must be one of conservative, balanced, aggressive, fast, got `bold`"),
        ("direction", "up", "`direction` must be one of auto, orthogonal, gradient_memory, none, got `up`"),
        ("lr_rescue", "yes", "`lr_rescue` must be one of auto, on, off, got `yes`"),
        ("max_predict_steps", 0, "`max_predict_steps` must be at least 1, got 0. To train without leaps set"),
        ("full_phase_steps", -1, "`full_phase_steps` must be at least 1, got -1"),
        ("learning_rate", float("nan"), "`learning_rate` must be between 0 and 1000, got nan"),
        ("gradient_accumulation_steps", 0, "`gradient_accumulation_steps` must be at least 1, got 0"),
        ("per_device_train_batch_size", None, "`per_device_train_batch_size` must be an integer, got `None`"),
        ("adam_beta2", 1.0, "`adam_beta2` must be at least 0 and less than 1, got 1.0"),
        ("probe_budget", 1.5, "`probe_budget` must be between 0 and 1, got 1.5"),
        ("probe_budget", -0.1, "`probe_budget` must be between 0 and 1, got -0.1"),
        ("leap_budget", 0.0, "`leap_budget` must be greater than 0, got 0.0"),
        ("muon_momentum", 1.0, "`muon_momentum` must be at least 0 and less than 1, got 1.0"),
        ("probe_batch_size", 1, "`probe_batch_size` must be at least 2, got 1"),
    ],
)
def test_values_that_cannot_work_are_refused(tmp_path, option, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        HybridConfig(**config_values(tmp_path, **{option: value}))


def test_yaml_files_may_say_on_off_and_numbers_as_they_are_written(tmp_path):
    """YAML 1.1 reads a bare `off` as a bool, and `1e-1` as text."""
    file = tmp_path / "run.yaml"
    file.write_text(f"output_dir: {tmp_path}\nmemory: off\nlr_rescue: on\nchunked_loss: off\nprobe_budget: 1e-1\n")
    (config,) = HfArgumentParser(HybridConfig).parse_yaml_file(str(file))
    assert (config.memory, config.lr_rescue, config.chunked_loss, config.probe_budget) == ("off", "on", "off", 0.1)
    assert HybridConfig(str(tmp_path), **{"lr_rescue": False, "chunked_loss": True}).lr_rescue == "off"


ASKED = {"direction": "orthogonal"}


@pytest.mark.parametrize(
    "optim, why",
    [
        ("schedule_free_adamw", "keeps two sets of weights"),
        ("schedule_free_sgd", "keeps two sets of weights"),
        ("galore_adamw_layerwise", "updates weights inside the backward pass"),
        ("adalomo", "updates weights inside the backward pass"),
    ],
)
def test_optimizers_that_leaps_cannot_work_with_are_refused_only_where_a_direction_is_named(tmp_path, optim, why):
    with pytest.raises(ValueError, match=f"`optim={optim}` {why}.*`enable_predict=False`"):
        HybridConfig(**config_values(tmp_path, optim=optim, **ASKED))
    for more in ({}, {"leap_gain": 0.0}, {"preset": "fast"}, {"enable_predict": False, **ASKED}):
        assert HybridConfig(**config_values(tmp_path, optim=optim, **more)).optim == optim


def test_without_leaps_any_learning_rate_is_taken(tmp_path):
    assert hybrid_config(tmp_path, learning_rate=1e9, enable_predict=False).learning_rate == 1e9
    with pytest.raises(ValueError, match="`learning_rate` must be between 0 and 1000, got 1000000000.0"):
        hybrid_config(tmp_path, learning_rate=1e9)


PLAIN = {"optim": "adamw_torch", "fp16": False, "bf16": False, "use_cpu": False, "deepspeed": None, "fsdp": None,
         "parallelism_config": None, "fsdp_plugin_args": None}  # fmt: skip
"""What the checks read of training arguments."""


def test_fp16_and_sharding_are_refused_only_where_a_direction_is_named(accelerator):
    for change, message in (
        ({"fp16": True}, "`fp16=True` cannot be combined with leaps.*Use `bf16=True`"),
        ({"deepspeed": "zero3.json"}, "`deepspeed` cannot be combined with leaps"),
        ({"fsdp": "full_shard"}, "`fsdp` cannot be combined with leaps"),
    ):
        args = SimpleNamespace(**{**PLAIN, **change})
        with pytest.raises(ValueError, match=message):
            check_training_arguments(args, HybridArguments(**ASKED))
        check_training_arguments(args, HybridArguments())
        check_training_arguments(args, HybridArguments(enable_predict=False))


def test_liger_is_refused_where_triton_cannot_compile(tmp_path, monkeypatch, train_set):
    """When the trainer is built: a config may be for another machine."""
    for more in ({}, {"enable_predict": False}):
        config = hybrid_config(tmp_path, use_liger_kernel=True, **more)
        with pytest.raises(ValueError, match="`use_liger_kernel=True` needs a GPU: .*Leave it out"):
            HybridTrainer(tiny_model(), config, train_dataset=train_set)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    HybridTrainer(tiny_model(), config, train_dataset=train_set)


def fsdp2_arguments(**change) -> SimpleNamespace:
    return SimpleNamespace(**{**PLAIN, "fsdp": True, "fsdp_plugin_args": {"fsdp_version": 2}, **change})


@pytest.fixture
def accelerator(monkeypatch):
    """There is one, as far as the check of options knows."""
    monkeypatch.setattr("hf_hybrid.config.computes_on_cpu", lambda args: False)


def test_fsdp_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match="`fsdp` shards nothing with `use_cpu=True` or without a GPU"):
        check_training_arguments(fsdp2_arguments(), HybridArguments())


def test_fsdp2_is_taken_and_version_1_is_refused(monkeypatch, accelerator):
    for optim in ("adamw_torch", "muon"):
        check_training_arguments(fsdp2_arguments(optim=optim), HybridArguments())
        with pytest.raises(ValueError, match="`fsdp` cannot be combined with .*version 1.*flat parameter.*Use FSDP2"):
            check_training_arguments(
                fsdp2_arguments(optim=optim, fsdp_plugin_args={"fsdp_version": 1}), HybridArguments(**ASKED)
            )
    # The launcher passes the version through its environment, and accelerate takes version 1 if it says nothing.
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    by_launcher = fsdp2_arguments(fsdp=None, fsdp_plugin_args=None)
    with pytest.raises(ValueError, match="`fsdp` cannot be combined with leaps"):
        check_training_arguments(by_launcher, HybridArguments(**ASKED))
    check_training_arguments(by_launcher, HybridArguments())
    monkeypatch.setenv("FSDP_VERSION", "2")
    check_training_arguments(by_launcher, HybridArguments())


@pytest.mark.parametrize(
    "option, value",
    [
        ("checkpoint_phases", "full"),
        ("weight_precision", "predict=bf16"),
        ("predict_states", "host"),
        ("offload_activations", True),
        ("optimizer_states", "8bit"),
        ("chunked_loss", "on"),
    ],
)
def test_options_for_whole_weights_are_refused_under_fsdp2(accelerator, option, value):
    with pytest.raises(ValueError, match=f"`{option}={value}` was made for whole weights, and FSDP2"):
        check_training_arguments(fsdp2_arguments(), HybridArguments(**{option: value}))


def test_the_config_is_saved_and_read_back(tmp_path):
    config = hybrid_config(tmp_path, preset="aggressive", hub_token="secret", optim_args="a=1")
    HybridTrainer(tiny_model(), config, train_dataset=ByteText(100)).train()
    text = (tmp_path / "hybrid_config.json").read_text()
    assert "secret" not in text
    again = HybridConfig.from_json(tmp_path, max_steps=7)
    for field in dataclasses.fields(HybridArguments):
        assert getattr(again, field.name) == getattr(config, field.name), field.name
    assert (again.learning_rate, again.optim_args, again.max_steps) == (config.learning_rate, "a=1", 7)


def test_a_token_is_in_no_pickle_and_in_every_copy(tmp_path):
    config = hybrid_config(tmp_path, hub_token="hf_s3cret", optim_args="a=1")
    config.own = [1]
    assert [copy.copy(config).hub_token, copy.deepcopy(config).hub_token] == ["hf_s3cret"] * 2
    assert copy.copy(config).own is config.own is not copy.deepcopy(config).own == [1]
    torch.save(config, tmp_path / "training_args.bin")  # as Trainer does
    assert b"s3cret" not in (tmp_path / "training_args.bin").read_bytes()
    read = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert (read.hub_token, read.optim_args, read.max_steps) == (None, "a=1", config.max_steps)


def test_unknown_keys_in_a_saved_config_are_named(tmp_path):
    (tmp_path / "hybrid_config.json").write_text(json.dumps({"output_dir": "x", "leap_gian": 1}))
    with pytest.raises(ValueError, match="Unknown options in .*`leap_gian`"):
        HybridConfig.from_json(tmp_path)
    for text, message in (("{", "hybrid_config.json` is not JSON: "), ("[1]", "holds no options by name")):
        (tmp_path / "hybrid_config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            HybridConfig.from_json(tmp_path)


@pytest.mark.parametrize(
    "options,complaint",
    [
        ({"memory": "always"}, "`memory` must be one of off, auto, stream"),
        ({"vram_budget_gib": 0}, "`vram_budget_gib` must be greater than 0"),
        ({"resident_layers": -1}, "`resident_layers` must be at least 0"),
        ({"base_precision": "int8"}, "`base_precision=int8`"),
        ({"weight_precision": "int4"}, "int4"),
        ({"weight_precision": "predict=int8_bnb"}, "`int8_bnb`"),
        ({"weight_precision": "bf16", "memory": "stream"}, "`weight_precision`"),
        ({"checkpoint_phases": "full", "enable_predict": False}, "`checkpoint_phases`"),
        ({"predict_states": "disk"}, "`predict_states`"),
    ],
)
def test_values_that_cannot_work(options, complaint, tmp_path):
    with pytest.raises(ValueError, match=complaint):
        hybrid_config(tmp_path, **options)


def test_8bit_states_need_an_adamw(tmp_path):
    with pytest.raises(ValueError, match="`optimizer_states=8bit`"):
        hybrid_config(tmp_path, optimizer_states="8bit", optim="sgd")


@pytest.mark.parametrize("optim", ["adamw_torch", "muon"])
@pytest.mark.parametrize("asks", ["option", "launcher"])
def test_deepspeed_is_refused_before_it_is_looked_for(tmp_path, monkeypatch, asks, optim):
    """Also where it is not installed."""
    if asks == "launcher":
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    given = {"deepspeed": "zero3.json"} if asks == "option" else {}
    what = "`optim=muon`" if optim == "muon" else "leaps"
    with pytest.raises(ValueError, match=f"`deepspeed` cannot be combined with {what}: .*its accessors.* Use FSDP2"):
        hybrid_config(tmp_path, optim=optim, enable_predict=optim != "muon", **{**ASKED, **given})


def test_deepspeed_is_taken_without_leaps(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    args = SimpleNamespace(**{**PLAIN, "bf16": True})
    check_training_arguments(args, HybridArguments(enable_predict=False))
