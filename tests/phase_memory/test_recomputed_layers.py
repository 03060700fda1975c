"""`activation_checkpointing="auto"`: as few layers are recomputed as fit, and no bit moves."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from conftest import ByteText, hybrid_config, mostly_slow, tiny_model, weights
from conftest import assert_same_weights as assert_same
from peft import LoraConfig, get_peft_model
from rig import trainers
from rig.fake_device import MESSAGE
from rig.live_bytes import LiveBytes
from transformers import Trainer

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.build import estimator_for
from hf_hybrid.cli.options import CommandLine
from hf_hybrid.compat import checkpointing_option
from hf_hybrid.config import config_values
from hf_hybrid.plan.setups import MARGIN
from hf_hybrid.saving.state import VALUES_NAME

LAYERS = 8
ADAPTED = 4_600_000
"""Bytes."""
TEXT = ByteText(200)
OPTION = checkpointing_option()


def deep_model(**options):
    return tiny_model(num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=160, **options)


def build(folder, checkpointing="auto", model=None, budget=None, kind=HybridTrainer, **options):
    asked = {OPTION: checkpointing, "vram_budget_gib": budget and budget / 2**30}
    options = {"max_steps": 4, "enable_predict": False, **asked, **options}
    return trainers.build(folder, kind, model=model or deep_model(), train_dataset=TEXT, **options)


def train(*args, **options):
    """Train, and return the trainer and the most bytes of tensors that were alive at a time."""
    trainer = build(*args, **options)
    with LiveBytes() as live:
        trainer.train()
    return trainer, live.peak


def assert_same_weights(first, second):
    assert_same(weights(first.model), weights(second.model))


def recomputed(trainer) -> int:
    return trainer.hybrid_summary()["recomputed_layers"]


@pytest.fixture(scope="module")
def every_layer(tmp_path_factory):
    """With all layers recomputed, as plain `Trainer` and TRL do it."""
    return train(tmp_path_factory.mktemp("every"), True)


@pytest.fixture(scope="module")
def no_layer(tmp_path_factory):
    return train(tmp_path_factory.mktemp("none"), False)


def planned(trainer, count) -> int:
    """Bytes at the peak with so many layers recomputed, as the planner has it."""
    estimator, setup = estimator_for(trainer, None)
    assert estimator.tracer.may_recompute_some()
    asked = {"memory": "off", "activation_checkpointing": "auto", "recomputed_layers": count}
    return estimator.resident(replace(setup, **asked)).peak_device_bytes


@pytest.mark.parametrize("share", mostly_slow([0.3, 0.6, 0.9], [0.6]))
@pytest.mark.long
def test_as_few_layers_are_recomputed_as_fit(share, every_layer, no_layer, tmp_path):
    """Under a budget of bytes on the CPU: measured, the step fits; planned with one layer fewer, it does not."""
    (full, least), (_, most) = every_layer, no_layer
    budget = int((1 + MARGIN) * (least + share * (most - least)))
    trainer, peak = train(tmp_path / "auto", budget=budget)
    count = recomputed(trainer)
    assert 0 < count < LAYERS and peak <= budget
    assert (1 + MARGIN) * planned(trainer, count) <= budget < (1 + MARGIN) * planned(trainer, count - 1)
    assert peak == pytest.approx(planned(trainer, count), rel=0.01)
    assert_same_weights(trainer, full)


def test_without_need_no_layer_is_recomputed_and_without_hope_all_are(every_layer, no_layer, tmp_path):
    roomy, peak = train(tmp_path / "roomy")
    assert recomputed(roomy) == 0 and peak == no_layer[1]
    tight, peak = train(tmp_path / "tight", budget=1000)
    assert recomputed(tight) == LAYERS and peak == every_layer[1]
    for trainer in (roomy, tight):
        assert_same_weights(trainer, every_layer[0])


def test_a_model_that_was_trained_with_checkpointing_is_planned_anew(no_layer, tmp_path):
    model = deep_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    trainer, peak = train(tmp_path, model=model)
    assert recomputed(trainer) == 0 and peak == pytest.approx(no_layer[1], rel=0.001)


def test_the_model_has_its_setting_again(tmp_path):
    trainer = build(tmp_path)
    trainer.train()
    plain = Trainer(deep_model(), trainer.args, train_dataset=TEXT)
    plain.train()
    settings = [[m.gradient_checkpointing for m in t.model.modules() if hasattr(m, "gradient_checkpointing")]
                for t in (trainer, plain)]  # fmt: skip
    assert settings[0] == settings[1]
    assert len(trainer.model._require_grads_hooks) == len(plain.model._require_grads_hooks)


@pytest.mark.slow
def test_in_phases_with_leaps(tmp_path):
    phases = {"enable_predict": True, "max_steps": 20, "warmup_phase_steps": 3, "direction": "orthogonal"}
    trainers = [build(tmp_path / str(asked), asked, budget=6 << 20, **phases) for asked in ("auto", True)]
    for trainer in trainers:
        trainer.train()
    assert recomputed(trainers[0]) > 0 and trainers[0].hybrid_summary()["predicted_steps"] > 0
    assert_same_weights(*trainers)


def test_adapters(tmp_path):
    """Trainer makes the embeddings' output differentiable for checkpointing, which is not needed here."""

    def adapted():
        torch.manual_seed(0)
        return get_peft_model(deep_model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

    seen = []

    class Watched(HybridTrainer):
        def training_step(self, *args, **kwargs):
            seen.append(bool(getattr(self.model.get_base_model(), "_require_grads_hooks", None)))
            return super().training_step(*args, **kwargs)

    trainer, peak = train(tmp_path / "auto", budget=ADAPTED, kind=Watched, model=adapted())
    assert 0 < recomputed(trainer) < LAYERS and peak <= ADAPTED
    assert not any(seen) and trainer.model.get_base_model()._require_grads_hooks
    assert_same_weights(trainer, train(tmp_path / "all", True, model=adapted())[0])


# Memory runs out all the same.


def runs_out(trainer, *, layers=0, rows=4):
    """From the second step on, its device fits so many rows, with so many layers recomputed."""

    def check(model, args, inputs):
        on = sum(layer.gradient_checkpointing for layer in model.model.layers)
        if trainer.state.global_step >= 1 and (on < layers or len(inputs["input_ids"]) > rows):
            raise torch.OutOfMemoryError(MESSAGE.format(limit=rows))

    trainer.model.register_forward_pre_hook(check, with_kwargs=True)
    return trainer


def actions(trainer):
    return [event["action"][:6] for event in trainer.hybrid_summary()["out_of_memory"]]


def test_after_an_out_of_memory_more_layers_are_recomputed(every_layer, tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 3}
    trainer = runs_out(build(tmp_path, **saves), layers=4)
    trainer.train()
    assert actions(trainer) == ["2 of 8", "4 of 8"] and recomputed(trainer) == 4
    assert_same_weights(trainer, every_layer[0])
    saved = json.loads((tmp_path / "checkpoint-3" / VALUES_NAME).read_text())["parts"]
    assert saved["activation_checkpointing"] == {"layers": 4}
    resumed = build(tmp_path / "resumed", **saves)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert recomputed(resumed) == 4
    assert_same_weights(resumed, every_layer[0])


def test_when_all_layers_are_recomputed_micro_batches_are_split(tmp_path):
    trainer = runs_out(build(tmp_path), layers=LAYERS, rows=2)
    trainer.train()
    assert actions(trainer) == ["2 of 8", "4 of 8", "8 of 8", "split "]


# What is asked for.


def test_a_loss_that_no_plan_knows_recomputes_all_layers(every_layer, tmp_path, caplog):
    class Own(HybridTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    with caplog.at_level(logging.INFO, "hf_hybrid"):
        _, peak = train(tmp_path, kind=Own)
    assert peak == every_layer[1] and "`Own.compute_loss`" in caplog.text


def test_with_parked_inputs_all_layers_are_recomputed(tmp_path):
    trainer = build(tmp_path, offload_activations=True)
    trainer.train()
    assert "recomputed_layers" not in trainer.hybrid_summary()


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_auto_has_both_names(name, tmp_path):
    assert getattr(HybridConfig(tmp_path, **{name: "auto"}), OPTION) == "auto"
    with pytest.raises(ValueError, match=f"`{name}` must be `True`, `False` or `auto`, got `atuo`"):
        HybridConfig(tmp_path, **{name: "atuo"})


@pytest.mark.parametrize("details", [{"every_n_layers": 2}, {"use_reentrant": True}])
def test_details_that_auto_decides_are_refused(details, tmp_path):
    with pytest.raises(ValueError, match=f"Leave `{next(iter(details))}` out of `{OPTION}_kwargs`"):
        HybridConfig(tmp_path, **{OPTION: "auto", f"{OPTION}_kwargs": details})
    assert getattr(HybridConfig(tmp_path, **{OPTION: True, f"{OPTION}_kwargs": details}), OPTION) is True


@pytest.mark.parametrize(
    ("given", "value"), [(["auto"], "auto"), ([], True), (["true"], True), (["false"], False), (None, False)]
)
def test_on_the_command_line(given, value, tmp_path):
    words = [] if given is None else ["--activation_checkpointing", *given]
    options = CommandLine(["--model", "m", "--dataset", "d", "--output_dir", str(tmp_path), "--cpu", *words]).options()
    assert getattr(options.config, OPTION) == value


def test_in_a_file(tmp_path):
    for text, value in (("auto", "auto"), ("true", True)):
        (tmp_path / "run.yaml").write_text(f"model: m\ndataset: d\ncpu: true\nactivation_checkpointing: {text}\n")
        assert getattr(CommandLine(["--config", str(tmp_path / "run.yaml")]).options().config, OPTION) == value


def test_it_survives_the_file_of_options(tmp_path):
    config = hybrid_config(tmp_path, **{OPTION: "auto"})
    (tmp_path / "hybrid_config.json").write_text(json.dumps(config_values(config)))
    assert getattr(HybridConfig.from_json(tmp_path), OPTION) == "auto"
