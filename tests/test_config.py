"""`hf_hybrid/config.py`: options beside those of TrainingArguments, what cannot be combined, and the saved config."""

import copy
import dataclasses
import json
import pickle
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import ByteText, config_values, hybrid_config, tiny_model
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from trl import DPOConfig, GRPOConfig, RLOOConfig, SFTConfig, TrlParser

from hf_hybrid import HybridArguments, HybridConfig, HybridDPOConfig, HybridSFTConfig, HybridTrainer
from hf_hybrid.arguments import PRESETS
from hf_hybrid.build import chooses_rate
from hf_hybrid.cli.options import TRAINING, CommandLine, OptionGroup
from hf_hybrid.config import REPLACED, check_training_arguments, was_given
from hf_hybrid.trl.rl import HybridGRPOConfig, HybridRLOOConfig


def test_defaults_of_training_arguments_are_untouched(tmp_path):
    plain, hybrid = TrainingArguments(str(tmp_path)), HybridConfig(str(tmp_path))
    for field in dataclasses.fields(TrainingArguments):
        if field.init and field.name not in ("logging_dir", "run_name"):
            assert getattr(hybrid, field.name) == getattr(plain, field.name), field.name


def test_command_line_and_yaml(tmp_path):
    parser = HfArgumentParser(HybridConfig)
    (config,) = parser.parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--preset", "aggressive", "--leap_gain", "3", "--auto_lr", "off"]
        + ["--full_phase_steps", "7", "--enable_predict", "False"]
    )
    assert (config.preset, config.leap_gain, config.auto_lr, config.full_phase_steps) == ("aggressive", 3.0, "off", 7)
    assert config.enable_predict is False
    file = tmp_path / "run.yaml"
    file.write_text(f"output_dir: {tmp_path}\npreset: conservative\nleap_gain: 1.5\nlearning_rate: 0.001\n")
    (config,) = parser.parse_yaml_file(str(file))
    assert (config.preset, config.leap_gain, config.learning_rate) == ("conservative", 1.5, 1e-3)


# Was it given? A run replaces some defaults, and never what the user wrote: not if it equals the default either.

PLAIN_CLASSES = {
    HybridConfig: TrainingArguments, HybridSFTConfig: SFTConfig, HybridDPOConfig: DPOConfig,
    HybridGRPOConfig: GRPOConfig, HybridRLOOConfig: RLOOConfig,
}  # fmt: skip
ON_CPU = {"use_cpu": True, "report_to": "none"}


def default_of(config_class, name):
    return next(field.default for field in dataclasses.fields(config_class) if field.name == name)


def is_replaced(config, name) -> bool:
    """Whether the run takes another value than the default for an option."""
    if name == "learning_rate":
        return chooses_rate(config, config)
    return getattr(config, name) != default_of(type(config), name)


def written_in_every_way(config_class, name, folder):
    """Configs in which a user wrote the default of an option, by how it was written."""
    value, common = default_of(config_class, name), {"output_dir": str(folder), "preset": "fast", **ON_CPU}
    parser, file = HfArgumentParser(config_class), folder / "options"
    file.write_text(json.dumps({**common, name: value}))  # which is YAML too
    by_keyword = config_class(**common, **{name: value})
    order = [field.name for field in dataclasses.fields(config_class) if field.init and not field.kw_only]
    defaults = [field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
                for field in dataclasses.fields(config_class) if field.name in order]  # fmt: skip
    values = dict(zip(order, defaults)) | common
    until = max(order.index(known) for known in (name, "preset" if "preset" in order else name))
    yield "keyword", by_keyword
    if until < len(order) - 1:
        yield "positional", config_class(*[values[known] for known in order[: until + 1]])
    yield "copies", copy.copy(by_keyword)
    yield "deep copies", copy.deepcopy(by_keyword)
    yield "pickles", pickle.loads(pickle.dumps(by_keyword))
    yield "JSON", parser.parse_json_file(str(file))[0]
    yield "YAML", parser.parse_yaml_file(str(file))[0]
    yield "dict", parser.parse_dict({**common, name: value})[0]


@pytest.mark.parametrize("config_class", PLAIN_CLASSES)
@pytest.mark.parametrize("name", REPLACED)
def test_a_default_that_was_written_is_kept(config_class, name, tmp_path):
    common = {"output_dir": str(tmp_path), "preset": "fast", **ON_CPU}
    left = config_class(**common)
    for config in (left, copy.copy(left), copy.deepcopy(left), pickle.loads(pickle.dumps(left))):
        assert was_given(config, name) is False and is_replaced(config, name)
    for way, config in written_in_every_way(config_class, name, tmp_path):
        assert was_given(config, name) is True and not is_replaced(config, name), way
    setattr(left, name, default_of(config_class, name))  # by the user, or by a trial of a search
    assert was_given(left, name) is True and not is_replaced(left, name)


def test_a_subclass_with_arguments_of_its_own_keeps_what_it_sets(tmp_path):
    class Mine(HybridConfig):
        def __init__(self, folder, rate, optim):
            super().__init__(folder, learning_rate=rate, optim=optim, preset="fast", **ON_CPU)

    config = Mine(str(tmp_path), 1e-3, "sgd")
    assert config.learning_rate == 1e-3 and config.optim == "sgd" and not chooses_rate(config, config)


@pytest.mark.parametrize("config_class", PLAIN_CLASSES)
def test_of_what_wrote_every_option_nothing_is_replaced(config_class, tmp_path):
    words = ["--output_dir", str(tmp_path), "--preset", "fast", "--use_cpu", "true", "--report_to", "none"]
    for parser in (HfArgumentParser(config_class), TrlParser(config_class)):
        (config,) = parser.parse_args_into_dataclasses(words)
        derived = {"generation_batch_size": None} if hasattr(config, "generation_batch_size") else {}  # TRL's two names
        again = dataclasses.replace(config, seed=7, **derived)
        for name in REPLACED:
            assert was_given(config, name) is was_given(again, name) is None
            assert not is_replaced(config, name) and not is_replaced(again, name)
        (config,) = parser.parse_args_into_dataclasses([*words, "--learning_rate", "0.1", "--optim", "muon"])
        assert was_given(config, "learning_rate") is was_given(config, "optim") is True


def test_a_kept_default_is_told_and_read_back(tmp_path, caplog):
    """One line says what would have been; the saved config means the same run."""
    (parsed,) = HfArgumentParser(HybridConfig).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--preset", "fast", "--use_cpu", "true", "--report_to", "none"]
        + ["--max_steps", "2", "--save_strategy", "no", "--disable_tqdm", "true"]
    )
    plain = TrainingArguments(**{**config_values(tmp_path, max_steps=2), "learning_rate": 5e-5})
    for args, kept in ((parsed, REPLACED), (plain, ("learning_rate",))):
        caplog.clear()
        trainer = HybridTrainer(tiny_model(), args, train_dataset=ByteText(100))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        (line,) = [record.getMessage() for record in caplog.records if "whether you wrote" in record.getMessage()]
        assert [name for name in REPLACED if f"`{name}=" in line] == list(kept), line
        again = HybridConfig.from_json(tmp_path)
        assert again.learning_rate == 5e-5 and not chooses_rate(again, again) and again.optim == args.optim


def test_a_written_default_stays_written_in_the_saved_config_and_on_resume(tmp_path):
    common = {**ON_CPU, "max_steps": 4, "save_steps": 2, "logging_steps": 1, "disable_tqdm": True}
    common |= {"lr_scheduler_type": "constant", "leap_gain": 0}
    for name, given in (("left", {}), ("written", {"learning_rate": 5e-5})):
        for resume in (None, True):
            config = HybridConfig(str(tmp_path / name), **common, **given)
            trainer = HybridTrainer(tiny_model(), config, train_dataset=ByteText(100))
            trainer.remove_callback(PrinterCallback)
            trainer.train(resume_from_checkpoint=resume and str(tmp_path / name / "checkpoint-2"))
            log = (tmp_path / name / "hybrid_log.jsonl").read_text()
            assert ("hybrid/learning_rate_scale" in log) is (name == "left")
            rates = {entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry}
            assert name == "left" or rates == {5e-5}
        again = HybridConfig.from_json(tmp_path / name)
        assert was_given(again, "learning_rate") is (name == "written")


@pytest.mark.parametrize("config_class, plain_class", PLAIN_CLASSES.items())
def test_no_other_default_is_replaced(config_class, plain_class, tmp_path):
    """`bf16` is, where it is `None`: nobody writes that. A value is kept."""
    plain = plain_class(str(tmp_path), **ON_CPU)
    for preset in PRESETS:
        if config_class in (HybridGRPOConfig, HybridRLOOConfig) and preset in ("conservative", "aggressive"):
            continue  # refused
        config = config_class(str(tmp_path), preset=preset, **ON_CPU)
        other = {field.name for field in dataclasses.fields(plain_class)
                 if field.init and getattr(config, field.name) != getattr(plain, field.name)}  # fmt: skip
        assert other <= {*REPLACED, "bf16"}, other
    for value in (True, False):
        assert config_class(str(tmp_path), **ON_CPU, bf16=value).bf16 is value


@pytest.mark.parametrize("command", TRAINING.values(), ids=lambda command: command.name)
def test_commands_know_their_words_and_the_keys_of_their_file(command, tmp_path):
    """Also those that they decide themselves, and the options of adapters."""
    config_class = command.of("Config")
    lora = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0}
    written = {name: default_of(config_class, name) for name in (*REPLACED, *command.defaulted)} | lora
    common = ["--output_dir", str(tmp_path), "--preset", "fast", "--use_cpu", "true"]
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(written))
    left = CommandLine(common, command)
    assert left.defaulted == frozenset(command.defaulted)
    assert all(was_given(left.options().config, name) is False for name in REPLACED)
    in_file, in_words = ["--config", str(file)], [f"--{name}={value}" for name, value in written.items()]
    for words in (in_file, in_words, [*in_words[:3], *in_file]):
        line = CommandLine([*common, *words], command)
        options = line.options()
        config, groups = options.config, [part for part in options if isinstance(part, OptionGroup)]
        assert not line.defaulted
        assert {name for name, _ in written.items() if hasattr(config, name)} == written.keys() - lora.keys()
        for name in (*REPLACED, *command.defaulted):
            assert was_given(config, name) is True and not is_replaced(config, name)
        assert any(all(getattr(group, name, None) == value for name, value in lora.items()) for group in groups)


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("memory", "always", "`memory` must be one of off, auto, stream"),
        ("vram_budget_gib", 0, "`vram_budget_gib` must be greater than 0"),
        ("resident_layers", -1, "`resident_layers` must be at least 0"),
        ("base_precision", "int8", "`base_precision=int8`"),
        ("weight_precision", "int4", "int4"),
        ("weight_precision", "predict=int8_bnb", "`predict=int8_bnb`"),
        ("predict_states", "disk", "`predict_states`"),
        ("guard_warn_at", 1.5, "`guard_warn_at` must be between 0 and 1"),
        ("guard_warn_at", -0.1, "`guard_warn_at` must be between 0 and 1"),
        ("out_of_memory", "ignore", "`out_of_memory` must be one of retry, raise"),
        ("preset", "bold", "`preset` must be one of conservative, balanced, aggressive, fast, got `bold`"),
        ("direction", "up", "`direction` must be one of auto, orthogonal, gradient_memory, none, got `up`"),
        ("auto_lr", "yes", "`auto_lr` must be one of auto, on, off, got `yes`"),
        ("max_predict_steps", 0, "`max_predict_steps` must be at least 1, got 0. To train without leaps set"),
        ("full_phase_steps", -1, "`full_phase_steps` must be at least 1, got -1"),
        ("learning_rate", float("nan"), "`learning_rate` must be at least 0, got nan"),
        ("learning_rate", -1e-3, "`learning_rate` must be at least 0, got -0.001"),
        ("weight_decay", -0.1, "`weight_decay` must be at least 0, got -0.1"),
        ("gradient_accumulation_steps", 0, "`gradient_accumulation_steps` must be at least 1, got 0"),
        ("per_device_train_batch_size", None, "`per_device_train_batch_size` must be an integer, got `None`"),
        ("adam_beta2", 1.0, "`adam_beta2` must be at least 0 and less than 1, got 1.0"),
        ("probe_budget", 1.5, "`probe_budget` must be between 0 and 1, got 1.5"),
        ("probe_budget", -0.1, "`probe_budget` must be between 0 and 1, got -0.1"),
        ("leap_budget", 0.0, "`leap_budget` must be greater than 0, got 0.0"),
        ("muon_momentum", 1.0, "`muon_momentum` must be at least 0 and less than 1, got 1.0"),
    ],
)
def test_values_that_cannot_work_are_refused(tmp_path, option, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        HybridConfig(**config_values(tmp_path, **{option: value}))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"weight_precision": "bf16", "memory": "stream"}, "`weight_precision`"),
        ({"checkpoint_phases": "full", "enable_predict": False}, "`checkpoint_phases`"),
        ({"optimizer_states": "8bit", "optim": "sgd"}, "`optimizer_states=8bit`"),
        ({"optimizer_states": "8bit", "optim": "muon"}, "`optimizer_states=8bit` is an AdamW .*`optim=muon`"),
        (
            {"direction": "gradient_memory", "optim": "adamw_bnb_8bit"},
            "`direction=gradient_memory` needs .*`optim=adamw_bnb_8bit`",
        ),
        (
            {"direction": "gradient_memory", "optimizer_states": "8bit"},
            "`direction=gradient_memory` needs .*`optimizer_states=8bit`",
        ),
        ({"muon_momentum": 0.9, "optim": "sgd"}, "`muon_momentum=0.9` is for `optim=muon`, and `optim` is `sgd`"),
    ],
)
def test_options_that_cannot_be_combined_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        hybrid_config(tmp_path, **options)


def test_yaml_files_may_say_on_off_and_numbers_as_they_are_written(tmp_path):
    """YAML 1.1 reads a bare `off` as a bool, and `1e-1` as text."""
    file = tmp_path / "run.yaml"
    file.write_text(f"output_dir: {tmp_path}\nmemory: off\nauto_lr: on\nchunked_loss: off\nprobe_budget: 1e-1\n")
    (config,) = HfArgumentParser(HybridConfig).parse_yaml_file(str(file))
    assert (config.memory, config.auto_lr, config.chunked_loss, config.probe_budget) == ("off", "on", "off", 0.1)
    assert HybridConfig(str(tmp_path), **{"auto_lr": False, "chunked_loss": True}).auto_lr == "off"


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


@pytest.mark.parametrize("enable_predict", [True, False])
def test_any_learning_rate_is_taken_as_by_trainer(tmp_path, enable_predict):
    values = {"learning_rate": 1e9, "weight_decay": 2e3, "max_steps": 1}
    ours = hybrid_config(tmp_path, **values, enable_predict=enable_predict, share_rows="off")
    weights = []
    for trainer, config in ((HybridTrainer, ours), (Trainer, TrainingArguments(**config_values(tmp_path, **values)))):
        model = tiny_model()
        trainer(model, config, train_dataset=ByteText(64)).train()
        weights.append(next(model.parameters()).detach())
    assert torch.equal(*weights) and weights[0].abs().max() > 1e3


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
    if asks == "launcher":
        args = SimpleNamespace(**{**PLAIN, "bf16": True})
        check_training_arguments(args, HybridArguments(enable_predict=False))  # which has no leaps
