"""TRL's trainers in phases: what TRL prepares, computes and logs stays TRL's; leaps are verified on what it trains."""

import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import re
import sys

import pytest
import torch
from conftest import assert_same_weights, config_values, mostly_slow, weights
from rig.chats import CHATS, PAIRS, PHASES, TOKENIZER, dpo, history, llama, lora, mixtral, sft
from rig.live_bytes import LiveBytes
from rig.trainers import fitted

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

import trl.trainer.utils  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import HfArgumentParser  # noqa: E402
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer  # noqa: E402

from hf_hybrid import (  # noqa: E402
    Direction,
    HybridArguments,
    HybridConfig,
    HybridDPOConfig,
    HybridDPOTrainer,
    HybridSFTConfig,
    HybridSFTTrainer,
)
from hf_hybrid.build import estimator_for  # noqa: E402
from hf_hybrid.leaps.leap import Leaps  # noqa: E402
from hf_hybrid.leaps.trajectory import Trajectory  # noqa: E402
from hf_hybrid.recovery import parts_of  # noqa: E402

SFT_CASES = {
    "chats": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "packing": {"packing": True},
    "bf16": {"bf16": True},
    "lora": {"peft_config": lora},
    "mixture": {"model": mixtral},
}


def made(options):
    return {name: value() if callable(value) else value for name, value in options.items()}


@pytest.mark.parametrize("case", mostly_slow(SFT_CASES, ["accumulation", "packing", "lora", "mixture"]))
def test_sft_disabled_equals_trl(case, tmp_path):
    options = {"max_steps": 6, **SFT_CASES[case]}
    plain = fitted(sft(SFTTrainer, SFTConfig, tmp_path / "plain", **made(options)))
    hybrid = fitted(sft(HybridSFTTrainer, HybridSFTConfig, tmp_path / "hybrid", enable_predict=False, **made(options)))
    assert len(history(plain)) > 5 and "mean_token_accuracy" in history(plain)[0]
    assert history(hybrid) == history(plain)
    assert_same_weights(weights(hybrid.model), weights(plain.model))


@pytest.mark.parametrize("case", ["reference", "lora"])
def test_dpo_disabled_equals_trl(case, tmp_path):
    options = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 3, "extra": {"eval_dataset": PAIRS.select([1])}}
    options |= {"lora": {"peft_config": lora}, "reference": {}}[case]
    plain = fitted(dpo(DPOTrainer, DPOConfig, tmp_path / "plain", **made(options)))
    exact = {"enable_predict": False, "share_rows": "off"}
    hybrid = fitted(dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path / "hybrid", **exact, **made(options)))
    assert "rewards/margins" in history(plain)[0]
    assert history(hybrid) == history(plain)
    assert_same_weights(weights(hybrid.model), weights(plain.model))


class RandomDirection(Direction):
    """Noise, which a probe must refuse."""

    def displacement(self, index, out):
        return out.normal_(std=100.0, generator=torch.Generator().manual_seed(index))


@pytest.mark.parametrize("build, plain, hybrid, config, probe, share_rows", [
    pytest.param(
        sft, (SFTTrainer, SFTConfig), HybridSFTTrainer, HybridSFTConfig, CHATS, "off", marks=pytest.mark.slow
    ),
    (sft, (HybridSFTTrainer, HybridSFTConfig), HybridSFTTrainer, HybridSFTConfig, CHATS, "on"),
    (dpo, (DPOTrainer, DPOConfig), HybridDPOTrainer, HybridDPOConfig, PAIRS, "off"),
], ids=["sft", "sft that shares rows in evaluations", "dpo"])  # fmt: skip
@pytest.mark.long
def test_warmup_and_refused_leaps_leave_no_trace(
    build, plain, hybrid, config, probe, share_rows, tmp_path, monkeypatch
):
    """
    Probes happen, with dropout in the model and evaluations in between: neither weights nor any metric that TRL logs
    (entropy, accuracy, counted tokens, rewards) knows of them.
    """
    options = {"max_steps": 18, "logging_steps": 3, "eval_strategy": "steps", "eval_steps": 5, "disable_dropout": False}
    if build is sft:
        del options["disable_dropout"]
    held_out = {"eval_dataset": probe.select(range(3))}
    # Shared rows round otherwise than padded ones, so a run that shares is compared with one that shares.
    alike = {"share_rows": share_rows, "enable_predict": False} if share_rows == "on" else {}
    plain = build(*plain, tmp_path / "plain", model=llama(attention_dropout=0.2), extra=held_out, **alike, **options)
    plain.train()
    extra = {**held_out, "probe_dataset": probe.select(range(3, 12)), "direction": RandomDirection}
    model, leap = llama(attention_dropout=0.2), Trajectory.leap

    def far(trajectory, gain):
        trajectory.max_relative_norm = 5.0
        return leap(trajectory, 1e6 * gain)  # as far as the cap, however much a leap is shortened

    monkeypatch.setattr(Trajectory, "leap", far)
    options["share_rows"] = share_rows
    trainer = fitted(build(hybrid, config, tmp_path / "hybrid", model=model, extra=extra, **options, **PHASES))
    summary = trainer.hybrid_summary()
    assert summary["leaps_by_verdict"].keys() == {"rejected"} and summary["forward_only_passes"] >= 6
    assert history(trainer, last=False) == history(plain, last=False)
    assert_same_weights(weights(trainer.model), weights(plain.model))


def test_sft_leaps_in_all_phases(tmp_path):
    trainer = fitted(sft(HybridSFTTrainer, HybridSFTConfig, tmp_path, **PHASES))
    summary = trainer.hybrid_summary()
    assert all(summary["steps_by_phase"].values()) and summary["forward_only_passes"] > 0
    assert {"kept", "shrunk"} & set(summary["leaps_by_verdict"])
    real = [e for e in trainer.state.log_history if e.get("hybrid/phase") not in (None, 2)]
    predicted = [e for e in trainer.state.log_history if e.get("hybrid/phase") == 2]
    assert all({"loss", "entropy", "mean_token_accuracy"} <= e.keys() for e in real)
    assert predicted and not any({"loss", "entropy", "eval_entropy"} & e.keys() for e in predicted)
    counted = [e["num_tokens"] for e in real]
    assert counted == sorted(set(counted))
    assert real[-1]["loss"] < real[0]["loss"] - 0.5


def test_metrics_are_means_over_real_steps_behind_an_evaluation(tmp_path):
    """A predicted step after an evaluation must not take training for evaluation: TRL asks the model for its mode."""
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "logging_steps": 1,
        "extra": {"eval_dataset": CHATS.select([0])},
        "max_steps": 18,
    }
    trainer = fitted(sft(HybridSFTTrainer, HybridSFTConfig, tmp_path, **{**PHASES, "leap_worth": 10.0}, **options))
    training = [e for e in trainer.state.log_history if "hybrid/phase" in e]
    assert sum(e["hybrid/phase"] == 2 for e in training) > 2
    assert not any(key.startswith("eval_") for entry in training for key in entry)


def test_dpo_leaps_are_verified_on_the_preference_loss(tmp_path):
    trainer = dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path, **PHASES, max_steps=18)
    trainer.probe_sequences = 3
    trainer.train()
    summary = trainer.hybrid_summary()
    assert all(summary["steps_by_phase"].values())
    probed = [leap for leap in summary["leaps"] if leap["loss_before"] is not None]
    # Of three pairs: below the loss of an untrained policy, where that of tokens would be about 5.7.
    assert probed and all(0 < leap["loss_after"] < math.log(2) for leap in probed)


class GainsLossLosesAccuracy(HybridDPOTrainer):
    """While a leap is tested the loss of every pair is lower, and none is ranked right."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss, leap = super().compute_loss(model, inputs, *args, **kwargs), self.run.part(Leaps)
        if model.training or leap is None:
            return loss
        tried = leap.trajectory.open is not None and leap.trajectory.open.gain > 0
        self._metrics["eval"]["rewards/accuracies"][-1] = float(not tried)
        return loss - 0.1 * tried


def test_dpo_leaps_that_cost_accuracy_are_undone(tmp_path):
    options = {**PHASES, "max_steps": 14, "share_rows": "off"}
    trainer = dpo(GainsLossLosesAccuracy, HybridDPOConfig, tmp_path / "hybrid", **options)
    trainer.probe_sequences = 3
    trainer.train()
    leaps = trainer.hybrid_summary()["leaps"]
    assert leaps and all(
        (leap["verdict"], leap["worse_in"], leap["accuracy_before"], leap["accuracy_after"])
        == ("rejected", "accuracy", 1.0, 0.0) and leap["loss_after"] < leap["loss_before"]
        for leap in leaps
    )  # fmt: skip
    plain = fitted(dpo(DPOTrainer, DPOConfig, tmp_path / "plain", max_steps=14))
    assert_same_weights(weights(trainer.model), weights(plain.model))


@pytest.mark.long
def test_dpo_has_a_rate_for_adapters_in_place_of_its_default(tmp_path):
    """TRL's 1e-6 is for full fine-tuning. A quarter of the rate of supervised training is that of preferences."""
    losses, first = {}, {}
    options = {"max_steps": 12, "logging_steps": 1, "learning_rate": None, "lr_scheduler_type": "constant"}
    for rescue in ("auto", "off"):
        trainer = dpo(
            HybridDPOTrainer, HybridDPOConfig, tmp_path / rescue, peft_config=lora(lora_alpha=64), auto_lr=rescue,
            extra={"eval_dataset": PAIRS.select(range(20))}, disable_dropout=True, **options,
        )  # fmt: skip
        trainer.train()
        losses[rescue] = trainer.evaluate()["eval_loss"]
        first[rescue] = trainer.state.log_history[0]["learning_rate"]
    width = trainer.model.config.hidden_size
    assert first == {"auto": pytest.approx(1e-3 * (32 / 64) * (576 / width) / 4), "off": 1e-6}
    gained = {rescue: math.log(2) - loss for rescue, loss in losses.items()}  # since before training
    assert gained["auto"] > 0.005 and gained["auto"] > 100 * gained["off"]


def test_supervised_fine_tuning_of_adapters_has_a_rate_in_place_of_its_default(tmp_path):
    trainer = sft(
        HybridSFTTrainer, HybridSFTConfig, tmp_path, peft_config=lora(lora_alpha=128), max_steps=2, logging_steps=1,
        learning_rate=None, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer.train()
    width = trainer.model.config.hidden_size
    assert trainer.state.log_history[0]["learning_rate"] == pytest.approx(1e-3 * (32 / 128) * (576 / width))


def test_pairs_stay_together_when_a_batch_is_split(tmp_path):
    """As after an out-of-memory; half of the rows would be chosen completions alone."""
    trainer = dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path, model=llama(seed=1))
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(4)])
    parts = parts_of(batch, 1, trainer.recovery.blocks)
    assert len(batch["input_ids"]) == 8 and [len(part["input_ids"]) for part in parts] == [2] * 4
    trainer.model.eval()
    losses = [trainer.compute_loss(trainer.model, part).item() for part in parts]
    assert sum(losses) / 4 == pytest.approx(trainer.compute_loss(trainer.model, batch).item(), rel=1e-5)


def pair_losses(trainer, rows):
    """By the formula of the paper, from logits."""
    losses = []
    trainer.model.eval()
    with torch.no_grad():
        for row in rows:
            margins = []
            for completion in ("chosen_ids", "rejected_ids"):
                ids = torch.tensor([row["prompt_ids"] + row[completion]])[:, :64]
                targets, start = ids[:, 1:, None], len(row["prompt_ids"]) - 1
                logs = [
                    model(ids).logits[:, :-1].log_softmax(-1).gather(2, targets)[:, start:].sum()
                    for model in (trainer.model, trainer.ref_model)
                ]
                margins.append(logs[0] - logs[1])
            losses.append(-torch.nn.functional.logsigmoid(0.1 * (margins[0] - margins[1])).item())
    return losses


def test_probed_preference_losses_are_those_of_the_paper(tmp_path):
    trainer = dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path, model=llama(seed=1))
    evaluate = trainer.sequence_losses(trainer)
    rows = [trainer.train_dataset[index] for index in range(4)]
    rows.append({**rows[0], "chosen_ids": rows[0]["rejected_ids"], "rejected_ids": rows[0]["chosen_ids"]})
    batch = trainer.data_collator(rows)
    losses, expected = evaluate(batch), pair_losses(trainer, rows)
    found = losses.values
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(found) == evaluate.size(batch) == 5 and max(found) - min(found) > 1e-4
    right = [float(loss < math.log(2)) for loss in expected]  # which says that the chosen one has more reward
    assert losses.accuracies == right and 0 < sum(right) < 5


@pytest.mark.parametrize("options", [
    {},
    {"loss_type": "dft"},
    {"label_smoothing_factor": 0.2},
    {"model": mixtral},
    {"packing": True},
    {"peft_config": lora},
    {"model": lambda: llama(attention_dropout=0.3)},
], ids=["nll", "dft", "smoothed", "mixture", "packed", "lora", "dropout"])  # fmt: skip
def test_probed_losses_are_those_that_trl_computes(options, tmp_path):
    """One by one through TRL's `compute_loss`, in evaluation mode; and nothing of the trainer's state has moved."""
    trainer = sft(HybridSFTTrainer, HybridSFTConfig, tmp_path, **made(options))
    evaluate = trainer.sequence_losses(trainer)
    trainer._metrics["eval"]["entropy"].append(1.0)
    trainer.model.train()
    before = torch.get_rng_state()
    rows = [trainer.train_dataset[index] for index in range(5)]
    batch = trainer.data_collator(rows)
    found = evaluate(batch).values
    assert trainer.model.training and torch.equal(torch.get_rng_state(), before)
    assert dict(trainer._metrics["eval"]) == {"entropy": [1.0]} and not trainer._metrics["train"]
    trainer.model.eval()
    rows = [part for row in rows for part in documents(row)]
    expected = [trainer.compute_loss(trainer.model, trainer.data_collator([row])).item() for row in rows]
    # The router loss is a mean over a batch: of several sequences it is not that of each.
    assert found == pytest.approx(expected, rel=5e-3 if "model" in options else 1e-5)
    assert len(found) == evaluate.size(batch) == len(rows)


def documents(row):
    """Those of a packed row, or the row itself."""
    if "seq_lengths" not in row:
        return [row]
    ends = list(itertools.accumulate(row["seq_lengths"]))
    cuts = [slice(end - length, end) for end, length in zip(ends, row["seq_lengths"]) if length > 1]
    return [{name: row[name][cut] for name in ("input_ids", "labels")} for cut in cuts]


def test_sequences_without_labels_give_no_nan(tmp_path):
    """Prompts that fill `max_length`, prepared by the user: TRL drops only those that it prepares itself."""
    ids = list(range(8, 40))
    rows = Dataset.from_list([{"input_ids": ids, "labels": ids if i % 3 else [-100] * 32} for i in range(60)])
    for factor in (0.0, 0.1):
        trainer = sft(
            HybridSFTTrainer, HybridSFTConfig, tmp_path, data=rows, extra={"probe_dataset": rows.select(range(6))},
            label_smoothing_factor=factor, dataset_kwargs={"skip_prepare_dataset": True}, **PHASES,
        )  # fmt: skip
        evaluate = trainer.sequence_losses(trainer)
        found = [loss for batch in evaluate.held_out() for loss in evaluate(batch).values]
        assert [loss > 1.0 for loss in found] == [False, True, True] * 2 and all(map(math.isfinite, found))
    trainer = sft(
        HybridSFTTrainer, HybridSFTConfig, tmp_path, data=rows, extra={"probe_dataset": rows.select(range(6))},
        dataset_kwargs={"skip_prepare_dataset": True}, max_steps=18, **PHASES,
    )  # fmt: skip
    trainer.train()
    summary = trainer.hybrid_summary()
    assert summary["skipped_batches"] == 0 and set(summary["leaps_by_verdict"]) & {"kept", "shrunk"}


@pytest.mark.parametrize("options", [{}, {"packing": True, "max_length": 256}], ids=["padded", "packed"])
def test_probe_sets_are_of_prepared_rows(options, tmp_path):
    given = sft(
        HybridSFTTrainer, HybridSFTConfig, tmp_path, extra={"probe_dataset": CHATS.select(range(20))}, **options
    )
    whole = sft(SFTTrainer, SFTConfig, tmp_path, **options)
    assert len(whole.train_dataset) == len(given.train_dataset)
    assert {"input_ids", "labels"} <= set(given.probe_dataset.column_names)
    assert "prompt" not in given.probe_dataset.column_names or not options
    assert all(any(label != -100 for label in row["labels"]) for row in given.probe_dataset)
    assert all(-100 in row["labels"] for row in given.probe_dataset)  # prompts carry no loss
    assert ("seq_lengths" in given.probe_dataset.column_names) == bool(options)
    if options:
        assert len(given.probe_dataset) < 20  # several chats in a row


def test_a_probe_set_that_packs_into_one_row_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`probe_dataset` has 1 sample"):
        extra = {"probe_dataset": CHATS.select([0, 1])}
        sft(HybridSFTTrainer, HybridSFTConfig, tmp_path, packing=True, max_length=256, extra=extra)


def test_dpo_probe_set_and_precomputed_references(tmp_path):
    """References are computed once, before training, for the probe set as well."""
    options = {"precompute_ref_log_probs": True, "max_steps": 14, **PHASES}
    trainer = dpo(
        HybridDPOTrainer, HybridDPOConfig, tmp_path, extra={"probe_dataset": PAIRS.select(range(6))}, **options
    )
    assert {"prompt_ids", "ref_chosen_logps"} <= set(trainer.probe_dataset.column_names)
    assert {"prompt_ids", "ref_chosen_logps"} <= set(trainer.train_dataset.column_names)
    trainer.train()
    probed = [leap for leap in trainer.hybrid_summary()["leaps"] if leap["loss_before"] is not None]
    assert probed and all(leap["loss_before"] < math.log(2) for leap in probed)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_streamed_data(kind, tmp_path):
    """A `datasets.IterableDataset` is prepared by TRL, and leaps are verified on what comes next in it."""
    build, trainer, config, data = {
        "sft": (sft, HybridSFTTrainer, HybridSFTConfig, CHATS),
        "dpo": (dpo, HybridDPOTrainer, HybridDPOConfig, PAIRS),
    }[kind]
    stream = {"train_dataset": data.to_iterable_dataset()} if kind == "dpo" else None
    options = {"data": data.to_iterable_dataset()} if kind == "sft" else {}
    trainer = fitted(build(trainer, config, tmp_path, extra=stream, **options, **PHASES, max_steps=14))
    summary = trainer.hybrid_summary()
    assert summary["steps"] == 14 and any(leap["loss_before"] is not None for leap in summary["leaps"])


def test_router_loss_is_trained_through_all_phases(tmp_path):
    trainer = sft(HybridSFTTrainer, HybridSFTConfig, tmp_path, model=mixtral(), max_steps=18, **PHASES)
    before = weights(trainer.model)
    trainer.train()
    summary = trainer.hybrid_summary()
    assert all(summary["steps_by_phase"].values()) and set(summary["leaps_by_verdict"]) & {"kept", "shrunk"}
    assert all(e["aux_loss"] > 0 for e in trainer.state.log_history if "loss" in e)
    gates = [name for name in before if name.endswith("mlp.gate.weight")]
    assert len(gates) == 2
    assert not any(torch.equal(before[name], trainer.model.get_parameter(name).detach()) for name in gates)


@pytest.mark.parametrize("adapters", [None, pytest.param(lambda: lora(lora_dropout=0.0), marks=pytest.mark.slow)])
def test_router_losses_of_windows_that_share_are_those_of_trl(adapters, tmp_path):
    """TRL divides the loss of a micro-batch by their number, and logs its mean: windows have fewer of them."""
    options = {"max_steps": 6, "gradient_accumulation_steps": 3, "optim": "sgd", "learning_rate": 0.3}
    options |= {"eval_strategy": "steps", "eval_steps": 3, "extra": {"eval_dataset": CHATS.select(range(4))}}
    options |= {"router_aux_loss_coef": 0.5, "data": CHATS.select([n % 5 for n in range(60)])}
    trained = []
    for trainer, config in ((SFTTrainer, SFTConfig), (HybridSFTTrainer, HybridSFTConfig)):
        shares = {"enable_predict": False, "share_rows": "on"} if config is HybridSFTConfig else {}
        config_of_adapters = None if adapters is None else adapters()
        trained.append(
            sft(trainer, config, tmp_path / str(len(trained)), model=mixtral(), peft_config=config_of_adapters,
                **options, **shares)
        )  # fmt: skip
        trained[-1].train()
    plain, shared = trained
    summary = shared.hybrid_summary()
    assert summary["micro_batches_saved"] > 0 and summary["plain_rows_because"] is None
    found, expected = weights(shared.model), weights(plain.model)
    assert max(((found[n] - expected[n]).norm() / expected[n].norm()).item() for n in found) < 1e-6
    for theirs, ours in zip(history(plain), history(shared), strict=True):
        names = [name for name in theirs if "loss" in name or name == "grad_norm"]
        assert [ours[name] for name in names] == pytest.approx([theirs[name] for name in names], rel=1e-5)
    assert "aux_loss" in history(plain)[0] and "eval_aux_loss" in str(history(plain))


@pytest.mark.parametrize("case", mostly_slow(["packing", "dpo with lora"], ["dpo with lora"]))
@pytest.mark.long
def test_resume_ends_at_the_same_weights(case, tmp_path):
    options = {**PHASES, "max_steps": 16, "save_strategy": "steps", "save_steps": 1}

    def build(folder=tmp_path, **more):
        if case == "packing":
            return sft(HybridSFTTrainer, HybridSFTConfig, folder, packing=True, max_length=64, **options | more)
        return dpo(HybridDPOTrainer, HybridDPOConfig, folder, peft_config=lora(), **options | more)

    trainer = fitted(build())
    steps = {e["step"]: e["hybrid/phase"] for e in trainer.state.log_history if "hybrid/phase" in e}
    inside = [step for step, phase in steps.items() if phase == 2]
    assert inside, trainer.hybrid_summary()["leaps_by_verdict"]
    for step in (inside[0], 14):
        resumed = fitted(build(tmp_path / f"{step}", save_strategy="no"), resume=str(tmp_path / f"checkpoint-{step}"))
        assert_same_weights(weights(resumed.model), weights(trainer.model))
        ends = [[e["num_tokens"] for e in t.state.log_history if "num_tokens" in e][-1] for t in (resumed, trainer)]
        assert ends[0] == ends[1]


@pytest.mark.parametrize("options", [{}, {"peft_config": lora}], ids=["full", "lora"])
def test_streamed_layers_equal_trl(options, tmp_path):
    plain = fitted(sft(SFTTrainer, SFTConfig, tmp_path / "plain", max_steps=5, **made(options)))
    streamed = sft(
        HybridSFTTrainer, HybridSFTConfig, tmp_path / "hybrid", max_steps=5, enable_predict=False, memory="stream",
        **made(options),
    )  # fmt: skip
    streamed.train()
    assert streamed.memory_summary()["statistics"]["loads"] > 0
    assert history(streamed) == history(plain)
    assert_same_weights(weights(streamed.model), weights(plain.model))


def trained_in_bytes(build, trainer, config, folder, **options):
    """A trainer of a deep model after two steps, and the most bytes of tensors that were alive at a time."""
    model = llama(num_hidden_layers=6, hidden_size=128, intermediate_size=1024)
    built = build(trainer, config, folder, model=model, **{"enable_predict": False, "max_steps": 2, **options})
    with LiveBytes() as live:
        built.train()
    return built, live.peak


@pytest.mark.long
def test_as_few_layers_are_recomputed_as_fit_beside_trls_head(tmp_path):
    """The plan traces TRL's own way to the loss. A budget is measured on the bytes of a run."""
    trained = functools.partial(trained_in_bytes, sft, HybridSFTTrainer, HybridSFTConfig)
    (every, least), (_, most) = trained(tmp_path / "every"), trained(tmp_path / "none", gradient_checkpointing=False)
    budget = {"vram_budget_gib": 1.05 * (least + most) / 2 / 2**30}
    trainer, peak = trained(tmp_path / "auto", gradient_checkpointing="auto", **budget)
    assert least < peak <= 1.05 * (least + most) / 2 and 0 < trainer.hybrid_summary()["recomputed_layers"] < 6
    assert_same_weights(weights(trainer.model), weights(every.model))
    estimator, setup = estimator_for(trainer, None)
    assert estimator.resident(setup).traced


@pytest.mark.slow
def test_dpo_recomputes_as_few_layers_as_fit_too(tmp_path):
    """The plan counts both rows of each pair. A budget is measured on the bytes of a run."""
    trained = functools.partial(trained_in_bytes, dpo, HybridDPOTrainer, HybridDPOConfig)
    (every, least), (_, most) = trained(tmp_path / "every"), trained(tmp_path / "none", gradient_checkpointing=False)
    budget = {"vram_budget_gib": 1.1 * most / 2**30}
    trainer, peak = trained(tmp_path / "auto", gradient_checkpointing="auto", **budget)
    assert least <= peak <= most and trainer.hybrid_summary()["recomputed_layers"] < 6
    assert_same_weights(weights(trainer.model), weights(every.model))
    estimator, setup = estimator_for(trainer, None)
    assert estimator.resident(setup).traced and setup.batch_size == 2 * trainer.args.per_device_train_batch_size
    rows = trainer.train_dataset
    longest = max(len(r["prompt_ids"]) + max(len(r["chosen_ids"]), len(r["rejected_ids"])) for r in rows)
    assert setup.sequence_length == min(longest, trainer.args.max_length)


def test_model_card_and_tags(tmp_path):
    for build, trainer, config, tag in (
        (sft, HybridSFTTrainer, HybridSFTConfig, "sft"), (dpo, HybridDPOTrainer, HybridDPOConfig, "dpo"),
    ):  # fmt: skip
        folder = tmp_path / tag
        built = fitted(build(trainer, config, folder, max_steps=2, save_strategy="steps", save_steps=2))
        card = (folder / "README.md").read_text()
        for name in ("trl", tag, "hf-hybrid"):
            assert re.search(rf"^- {name}$", card, re.MULTILINE), name
            assert name in built.model.model_tags


# Configs.


@pytest.mark.parametrize("config, plain", [(HybridSFTConfig, SFTConfig), (HybridDPOConfig, DPOConfig)])
def test_configs_keep_trls_defaults_and_have_ours(config, plain, tmp_path):
    ours = config(str(tmp_path), use_cpu=True)
    theirs = plain(str(tmp_path), use_cpu=True)
    assert (ours.bf16, theirs.bf16) == (False, True)  # the one that differs, by the hardware
    for field in dataclasses.fields(plain):
        if field.init and field.name not in ("logging_dir", "run_name", "bf16"):
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert isinstance(ours, plain) and isinstance(ours, HybridArguments)
    (parsed,) = HfArgumentParser(config).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--preset", "aggressive", "--leap_gain", "2"]
    )
    assert (parsed.preset, parsed.leap_gain, parsed.max_length) == ("aggressive", 2.0, theirs.max_length)
    assert config(str(tmp_path), use_cpu=True, optim="muon").optim == "muon"


@pytest.mark.parametrize("config, plain", [(HybridSFTConfig, SFTConfig), (HybridDPOConfig, DPOConfig)])
@pytest.mark.parametrize(
    "hardware, expected",
    [
        ({}, False),
        ({"cuda": True, "native": True}, True),
        ({"cuda": True, "native": False}, False),  # a V100 or T4, where torch emulates bf16
        ({"mps": True}, False),
        ({"other": True}, True),
    ],
    ids=["cpu", "new gpu", "old gpu", "mps", "other"],
)
def test_bf16_is_chosen_by_the_hardware(config, plain, hardware, expected, tmp_path, monkeypatch):
    found, name = [], "hf_hybrid.trl.sft_dpo.is_torch_bf16_gpu_available"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: hardware.get("cuda", False))
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or hardware["native"]
    )
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: hardware.get("mps", False))
    monkeypatch.setattr(name, lambda: hardware.get("other", False))
    # Stop before TrainingArguments looks for a device that is not there.
    monkeypatch.setattr(plain, "__post_init__", lambda self: found.append((self.bf16, self.fp16)))
    for options in ({}, {"use_cpu": True}, {"bf16": True}, {"bf16": False}, {"fp16": True, "enable_predict": False}):
        config("out", **options)
    # Given values hold; with `fp16` it is left to TRL, which then has `bf16` off.
    assert found == [(expected, False), (False, False), (True, False), (False, False), (None, True)]


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="transformers takes bf16 on MPS")
def test_on_a_machine_without_bf16_the_defaults_train(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="doesn't support bf16"):
        SFTConfig(str(tmp_path))  # TRL's own: drop `bf16` of `TRLConfigBase` once this works
    trainer = HybridSFTTrainer(
        llama(), HybridSFTConfig(str(tmp_path), max_steps=2), train_dataset=CHATS, processing_class=TOKENIZER
    )
    trainer.train()
    assert trainer.args.bf16 is False and trainer.state.global_step == 2
    assert HybridDPOConfig(str(tmp_path)).bf16 is False


def test_a_config_is_read_back(tmp_path):
    fitted(sft(HybridSFTTrainer, HybridSFTConfig, tmp_path, max_steps=2, packing=True, preset="conservative"))
    again = HybridSFTConfig.from_json(tmp_path)
    assert isinstance(again, HybridSFTConfig)
    assert (again.packing, again.preset, again.max_length, again.max_steps) == (True, "conservative", 48, 2)
    # Elsewhere too: `None` would ask the hardware of the machine that reads it.
    assert json.loads((tmp_path / "hybrid_config.json").read_text())["bf16"] is False


@pytest.mark.parametrize(
    "config, options, message",
    [
        (HybridSFTConfig, {"leap_gain": float("nan")}, "`leap_gain` must be at least 0, got nan"),
        (HybridDPOConfig, {"preset": "bold"}, "`preset` must be one of"),
        (
            HybridSFTConfig,
            {"bf16": False, "fp16": True, "direction": "orthogonal"},
            "`fp16=True` cannot be combined with leaps",
        ),
        (HybridSFTConfig, {"base_precision": "int8"}, "`base_precision=int8` is for streamed layers"),
        (HybridSFTConfig, {"chunked_loss": "on"}, "`chunked_loss=on` changes the head.*in chunks already"),
        (
            HybridDPOConfig,
            {"sync_ref_model": True, "direction": "orthogonal"},
            "`sync_ref_model=True` copies .*`enable_predict=False`",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(config, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config(str(tmp_path), use_cpu=True, **options)


@pytest.mark.parametrize(
    "more", mostly_slow([{}, {"preset": "fast", "optim": "adamw_torch"}, {"leap_gain": 0.0}], [{}])
)
def test_a_synchronised_reference_trains_as_trl_does(more, tmp_path, caplog):
    """The default rate would be searched, and weights that the search takes back must not be in the reference."""
    options = {"sync_ref_model": True, "ref_model_sync_steps": 2, "max_steps": 6, "learning_rate": 1e-6}
    more = {**more, "share_rows": "off"}
    hybrid = dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path / "hybrid", **options, **more)
    told = [r.getMessage() for r in caplog.records if "makes no leaps" in r.getMessage()]
    assert len(told) == 1 and told[0].startswith("`sync_ref_model=True` copies")
    plain = dpo(DPOTrainer, DPOConfig, tmp_path / "plain", optim=more.get("optim", "adamw_torch_fused"), **options)
    hybrid.train(), plain.train()
    assert_same_weights(weights(hybrid.model), weights(plain.model))
    assert_same_weights(weights(hybrid.ref_model), weights(plain.ref_model))
    assert "`sync_ref_model=True`" in hybrid.hybrid_summary()["no_leaps"]


def test_configs_that_were_mixed_up_are_named(tmp_path):
    args = HybridConfig(**config_values(tmp_path))
    for trainer, right in ((HybridSFTTrainer, "HybridSFTConfig"), (HybridDPOTrainer, "HybridDPOConfig")):
        with pytest.raises(TypeError, match=f"`args` is a `HybridConfig`, which lacks TRL's.*Make it a `{right}`"):
            trainer(llama(), args=args, train_dataset=CHATS)


def test_trainers_without_a_config_make_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = (
        (HybridSFTTrainer(llama(), train_dataset=CHATS, processing_class=TOKENIZER), HybridSFTConfig, "-SFT"),
        (HybridDPOTrainer(llama(), llama(), train_dataset=PAIRS, processing_class=TOKENIZER), HybridDPOConfig, "-DPO"),
    )
    for trainer, config, folder in made:
        assert type(trainer.args) is config and trainer.args.output_dir == folder


def test_plain_trl_configs_are_accepted(tmp_path):
    trainer = fitted(sft(HybridSFTTrainer, SFTConfig, tmp_path, max_steps=3))
    assert trainer.hybrid_summary()["steps"] == 3


def test_images_leave_leaps_out_and_are_refused_if_they_were_asked_for(tmp_path, monkeypatch, caplog):
    """What TRL found out about the data set decides; nothing here can train on images."""
    original = SFTTrainer.__init__

    def looked(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self._is_vision_dataset = True

    monkeypatch.setattr(SFTTrainer, "__init__", looked)
    with pytest.raises(ValueError, match="`train_dataset` holds images.*`enable_predict=False`"):
        sft(HybridSFTTrainer, HybridSFTConfig, tmp_path, direction="orthogonal")
    sft(HybridSFTTrainer, HybridSFTConfig, tmp_path, enable_predict=False)
    assert "images" not in caplog.text
    trainer = sft(HybridSFTTrainer, HybridSFTConfig, tmp_path)
    assert caplog.text.count("holds images") == 1 and not trainer.has_phases


@pytest.mark.parametrize("has", ["none", "1.14"])
def test_without_trl_the_way_to_install_it_is_told(has, monkeypatch):
    if has == "none":
        monkeypatch.setitem(sys.modules, "trl", None)
    else:
        monkeypatch.delattr(trl.trainer.utils, "FusedCausalLMOutput")
    spec = importlib.util.find_spec("hf_hybrid.trl.sft_dpo")
    with pytest.raises(
        ImportError, match=re.escape("needs TRL 1.15 or newer") + ".*" + re.escape('`pip install "hf-hybrid[trl]"`')
    ):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("loss", mostly_slow(["sigmoid", "ipo", "sppo_hard"], ["ipo"]))
def test_dpo_makes_no_leaps_whatever_its_loss_begins_at(loss, tmp_path, caplog):
    """At log 2, at 25 (IPO: (1 / (2 * 0.1)) ** 2) or at 50, with random weights and with pretrained ones."""
    options = {**PHASES, "direction": "auto", "loss_type": [loss], "max_steps": 15}
    trainer = fitted(dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path, **options))
    summary = trainer.hybrid_summary()
    assert summary["leaps_made"] == summary["predicted_steps"] == 0
    assert summary["no_leaps"] == "preference pairs are trained on" and "pretrained" not in caplog.text


def test_dft_makes_no_leaps_and_does_not_pass_for_pretrained(tmp_path, caplog):
    """Its loss begins near 0 with random weights."""
    options = {**PHASES, "direction": "auto", "max_steps": 15}
    trainer = fitted(sft(HybridSFTTrainer, HybridSFTConfig, tmp_path / "dft", loss_type="dft", **options))
    summary = trainer.hybrid_summary()
    assert summary["leaps_made"] == 0 and "`loss_type=dft`" in summary["no_leaps"] and "pretrained" not in caplog.text
    trainer = fitted(sft(HybridSFTTrainer, HybridSFTConfig, tmp_path / "nll", **options))
    assert trainer.hybrid_summary()["leaps_made"] > 0
