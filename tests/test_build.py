"""`hf_hybrid/build.py`: from options to lengths, rates and refusals."""

from types import SimpleNamespace

import pytest
import torch
from conftest import ByteText, config_values, tiny_model
from peft import LoraConfig, get_peft_model
from rig.trainers import train
from transformers import TrainingArguments
from trl import DPOConfig, SFTConfig

from hf_hybrid import HybridArguments, HybridConfig, HybridDPOConfig, HybridGRPOConfig, HybridTrainer
from hf_hybrid.build import chooses_rate, memory_steps, phase_lengths
from hf_hybrid.plan.of_trainer import check_streamable


@pytest.mark.parametrize("steps", [1, 10, 50, 300, 10_000])
def test_phase_lengths_suit_the_run(steps):
    lengths = phase_lengths(HybridArguments(), steps)
    cycle = lengths.warmup + lengths.full + lengths.correct
    assert cycle < steps or steps < 10
    assert lengths.warmup <= 100 and lengths.max_predict <= 10
    assert 5 <= memory_steps(steps) <= 1000
    assert phase_lengths(HybridArguments(warmup_phase_steps=3), steps).warmup == 3


def test_rescue_respects_a_learning_rate_that_was_chosen(tmp_path):
    chosen, default = HybridConfig(**config_values(tmp_path)), HybridConfig(str(tmp_path))
    assert chooses_rate(default, default) and not chooses_rate(chosen, chosen)
    for value, expected in (("on", True), ("off", False)):
        config = HybridConfig(str(tmp_path), auto_lr=value)
        assert chooses_rate(config, config) is expected


@pytest.mark.parametrize(
    "kind, options, exactness",
    [
        (HybridConfig, {}, "rounding"),
        (HybridConfig, {"enable_predict": False}, "bits"),
        (HybridConfig, {"enable_predict": False, "share_rows": "off"}, "bits"),
        (HybridConfig, {"enable_predict": False, "share_rows": "on"}, "rounding"),
        (HybridDPOConfig, {"enable_predict": False}, "bits"),
        (HybridDPOConfig, {"enable_predict": False, "padding_free": True}, "rounding"),
        (HybridGRPOConfig, {}, "rounding"),
    ],
)
def test_one_property_says_whether_sums_may_be_in_another_order(tmp_path, kind, options, exactness):
    """And adapters under autocast are computed with fewer casts only then."""
    args = kind(str(tmp_path), use_cpu=True, bf16=True, **options)
    assert args.exactness == exactness
    if kind is HybridConfig:
        model = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"]))
        names = {part.name for part in HybridTrainer(model, args, train_dataset=ByteText(8)).parts}
        assert bool(names & {"adapter_products", "uncast_inputs", "frozen_in_bf16"}) == (exactness == "rounding"), names


@pytest.mark.parametrize("config", [TrainingArguments, SFTConfig, DPOConfig])
def test_a_plain_config_does_not_tell_whether_its_rate_was_written(tmp_path, config):
    for given in ({}, {"learning_rate": 1e-4}):
        assert not chooses_rate(config(str(tmp_path), use_cpu=True, bf16=False, **given), HybridArguments())


def test_the_advice_where_the_host_is_the_limit_is_one_that_helps(tmp_path):
    sentence = (
        "A larger `per_device_train_batch_size` or `torch_compile=True` gives the host less to do for each token."
    )
    streamed = {"memory": "stream", "enable_predict": False}  # the bus may be the limit
    for name, options, advice in (("resident", {}, sentence), ("streamed", streamed, None)):
        assert train(tmp_path / name, samples=8, max_steps=1, **options).run.speed.advice == advice


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "`deepspeed` places the weights itself. Drop it, or set `memory=off`"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "`fp16=True` scales losses.*Use `bf16=True`, or set `memory=off`"),
        ({"WORLD_SIZE": "2"}, "there are 2 processes, and streaming is for one: .* Launch one process"),
    ],
)
def test_streaming_is_refused_with_sharding_fp16_and_several_processes(monkeypatch, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    off = dict.fromkeys(("torch_compile", "deepspeed", "fsdp", "parallelism_config", "fp16", "bf16"))
    size = int(environment.get("WORLD_SIZE", 1))
    args = SimpleNamespace(device=torch.device("cpu"), memory="stream", world_size=size, **off)
    with pytest.raises(ValueError, match=f"`memory=stream` cannot be used here: .*{message}"):
        check_streamable(args, tiny_model(), None)
