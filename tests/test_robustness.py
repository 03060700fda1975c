"""Bad input is refused at construction with a way out; bad luck in training is survived. Never NaN in a checkpoint."""

import json
import math

import pytest
import torch
from conftest import ByteText, config_values, hybrid_config, tiny_model, weights
from datasets import Dataset as HubDataset
from datasets import IterableDataset as HubIterableDataset
from safetensors.torch import load_file
from torch.utils.data import IterableDataset

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.prediction.divergence import TrainingDivergedError
from hf_hybrid.prediction.trajectory import Trajectory


class Poisoned(tiny_model().__class__):
    """A model whose loss is poisoned in chosen forward passes of training."""

    poison: dict = {}
    calls = 0

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if self.training:
            self.calls += 1
            output.loss = output.loss * self.poison.get(self.calls, 1.0)
        return output


def poisoned(poison):
    model = Poisoned(tiny_model().config)
    model.load_state_dict(tiny_model().state_dict())
    model.poison = poison
    return model


def finite(model):
    return all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("call", [2, 12, 25])
def test_a_nan_batch_is_skipped(tmp_path, call):
    trainer = HybridTrainer(
        poisoned({call: math.nan}),
        hybrid_config(tmp_path, max_steps=40, remove_unused_columns=False),
        train_dataset=ByteText(400),
    )
    trainer.train()
    summary = trainer.hybrid_summary()
    assert finite(trainer.model) and summary["skipped_batches"] == 1
    (event,) = [e for e in summary["divergence_events"] if "not finite" in e["reason"]]
    assert (event["level"], event["action"]) == ("critical", "skip_batch")
    last = [e["loss"] for e in trainer.state.log_history if "loss" in e][-1]
    assert last < 5.0


@pytest.mark.parametrize("factor, clip", [(1e6, 0.0), (math.inf, 1.0)])
def test_a_poisoned_gradient_does_not_reach_weights_or_optimizer(tmp_path, factor, clip):
    config = hybrid_config(tmp_path, max_steps=50, max_grad_norm=clip, remove_unused_columns=False)
    trainer = HybridTrainer(poisoned({33: factor}), config, train_dataset=ByteText(400))
    trainer.train()
    summary = trainer.hybrid_summary()
    assert finite(trainer.model) and summary["skipped_batches"] == 1
    largest = max(s["exp_avg_sq"].max().item() for s in trainer.optimizer.state_dict()["state"].values())
    assert largest < 10.0


def test_endless_nan_aborts_and_names_the_last_good_checkpoint(tmp_path):
    config = hybrid_config(
        tmp_path, max_steps=60, save_strategy="steps", save_steps=10, max_bad_steps=5, remove_unused_columns=False
    )
    trainer = HybridTrainer(poisoned({call: math.nan for call in range(20, 200)}), config, train_dataset=ByteText(400))
    with pytest.raises(TrainingDivergedError, match=r"5 in a row.*last good checkpoint is `.*checkpoint-\d+`"):
        trainer.train()
    assert finite(trainer.model)
    for file in tmp_path.glob("checkpoint-*/model.safetensors"):
        assert all(torch.isfinite(t).all() for t in load_file(file).values())


def test_a_leap_into_nan_is_rolled_back(tmp_path, monkeypatch):
    """Correct is shorter than the row of bad steps that the monitor waits for: the way back must not close."""
    original, before = Trajectory.leap, []

    def leap(trajectory, gain):
        shape = original(trajectory, gain)
        if trajectory.steps_seen > 20 and not before:
            before.extend(saved.clone() for saved in trajectory.before_leap)
            trajectory.parameters[0].data.fill_(math.nan)
        return shape

    restored, rolled = [], Trajectory.roll_back

    def roll_back(trajectory):
        rolled(trajectory)
        restored.append([p.detach().clone() for p in trajectory.parameters])

    monkeypatch.setattr(Trajectory, "leap", leap)
    monkeypatch.setattr(Trajectory, "roll_back", roll_back)
    trainer = HybridTrainer(
        tiny_model(), hybrid_config(tmp_path, max_steps=50, probe_budget=0.0), train_dataset=ByteText(400)
    )
    trainer.train()
    assert before and finite(trainer.model)
    assert any(all(torch.equal(a, b) for a, b in zip(before, state)) for state in restored)
    assert "rolled_back" in trainer.hybrid_summary()["leaps_by_verdict"]


def test_nan_weights_are_never_saved(tmp_path):
    config = hybrid_config(tmp_path, save_strategy="steps", save_steps=2)
    trainer = HybridTrainer(tiny_model(), config, train_dataset=ByteText(400))
    original = trainer.training_step

    def training_step(*args, **kwargs):
        if trainer.state.global_step == 3:  # in Warmup: no leap to roll back
            next(trainer.model.parameters()).data.fill_(math.nan)
        return original(*args, **kwargs)

    trainer.training_step = training_step
    with pytest.raises(TrainingDivergedError, match="checkpoint-2"):
        trainer.train()
    assert not (tmp_path / "checkpoint-4").exists()


@pytest.mark.parametrize("samples", [1, 3])
def test_a_data_set_too_small_to_split_is_refused(tmp_path, samples):
    with pytest.raises(ValueError, match=rf"`train_dataset` has {samples} sample.*Pass `probe_dataset=`"):
        HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=ByteText(samples))


def test_one_sample_trains_with_a_probe_set_of_the_users(tmp_path):
    trainer = HybridTrainer(
        tiny_model(), hybrid_config(tmp_path), train_dataset=ByteText(1), probe_dataset=ByteText(4, offset=9)
    )
    before = weights(trainer.model)
    trainer.train()
    assert finite(trainer.model) and any(not torch.equal(before[n], p) for n, p in weights(trainer.model).items())


def test_a_missing_training_set_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`train_dataset` is missing"):
        HybridTrainer(tiny_model(), hybrid_config(tmp_path))


def test_a_probe_set_of_one_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="`probe_dataset` has 1 sample"):
        HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=ByteText(40), probe_dataset=ByteText(1))


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_very_short_runs_train(tmp_path, steps):
    args = HybridConfig(**config_values(tmp_path, max_steps=steps))
    trainer = HybridTrainer(tiny_model(), args, train_dataset=ByteText(100))
    before = weights(trainer.model)
    trainer.train()
    assert trainer.hybrid_summary()["steps"] == steps
    assert any(not torch.equal(before[name], p) for name, p in weights(trainer.model).items())


class Stream(IterableDataset):
    def __iter__(self):
        data = ByteText(300)
        return (data[i] for i in range(len(data)))


def test_a_stream_without_length_needs_a_probe_set(tmp_path):
    with pytest.raises(ValueError, match="`Stream` without a length.*Pass `probe_dataset=`"):
        HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=Stream())
    trainer = HybridTrainer(
        tiny_model(), hybrid_config(tmp_path), train_dataset=Stream(), probe_dataset=ByteText(16, offset=500)
    )
    trainer.train()
    assert trainer.hybrid_summary()["predicted_steps"] > 0


def test_a_stream_of_the_datasets_library_is_split(tmp_path):
    data = ByteText(300)
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in data.blocks]
    stream = HubIterableDataset.from_generator(lambda: iter(rows))
    trainer = HybridTrainer(tiny_model(), hybrid_config(tmp_path, probe_samples=8), train_dataset=stream)
    trainer.train()
    assert len(list(trainer.probe_dataset)) == 8
    assert next(iter(trainer.train_dataset))["input_ids"] == rows[8]["input_ids"]
    assert trainer.hybrid_summary()["predicted_steps"] > 0


def test_held_out_sequences_are_not_trained_on(tmp_path):
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in ByteText(200).blocks]
    trainer = HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=HubDataset.from_list(rows))
    held = {json.dumps(row["input_ids"]) for row in trainer.probe_dataset}
    trained = {json.dumps(row["input_ids"]) for row in trainer.train_dataset}
    assert len(trainer.probe_dataset) == 10 and len(trainer.train_dataset) == 190
    assert not held & trained


def test_a_frozen_model_is_refused(tmp_path):
    model = tiny_model()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="`model` has no trainable parameters"):
        HybridTrainer(model, hybrid_config(tmp_path), train_dataset=ByteText(100))


def test_partly_frozen_models_leap_with_what_is_trainable(tmp_path):
    model = tiny_model()
    model.model.layers[0].requires_grad_(False)
    frozen = {name: p.clone() for name, p in model.model.layers[0].named_parameters()}
    trainer = HybridTrainer(model, hybrid_config(tmp_path), train_dataset=ByteText(400))
    trainer.train()
    assert trainer.hybrid_summary()["leaps"]
    assert all(torch.equal(frozen[name], p) for name, p in trainer.model.model.layers[0].named_parameters())


def test_adapters_leap_and_the_base_stays(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    base = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    trainer = HybridTrainer(model, hybrid_config(tmp_path), train_dataset=ByteText(400))
    trainer.train()
    assert trainer.hybrid_summary()["predicted_steps"] > 0
    now = dict(trainer.model.named_parameters())
    assert all(torch.equal(value, now[name]) for name, value in base.items())


@pytest.mark.parametrize("optim", ["adafactor", "sgd", "adamw_torch", "adagrad"])
def test_optimizers_other_than_the_default(tmp_path, optim):
    trainer = HybridTrainer(tiny_model(), hybrid_config(tmp_path, optim=optim), train_dataset=ByteText(400))
    trainer.train()
    summary = trainer.hybrid_summary()
    assert finite(trainer.model) and summary["predicted_steps"] > 0
    assert summary["direction"] == "orthogonal" and any(leap["relative_norm"] > 0 for leap in summary["leaps"])


def test_bf16_weights(tmp_path):
    trainer = HybridTrainer(tiny_model().bfloat16(), hybrid_config(tmp_path), train_dataset=ByteText(400))
    trainer.train()
    assert trainer.hybrid_summary()["leaps"] and finite(trainer.model)


def test_train_can_be_called_again(tmp_path):
    trainer = HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=ByteText(400))
    trainer.train()
    trainer.train()
    assert trainer.hybrid_summary()["steps"] == 30


def test_a_model_init_is_trained(tmp_path):
    trainer = HybridTrainer(args=hybrid_config(tmp_path), model_init=lambda: tiny_model(), train_dataset=ByteText(400))
    trainer.train()
    assert trainer.hybrid_summary()["predicted_steps"] > 0
