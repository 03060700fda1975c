"""The search of the learning rate on made-up signals whose answer is known, and in real runs."""

import copy
import json
import math
import random

import pytest
import torch
from conftest import ByteText, assert_same_weights, config_values, tiny_model, weights
from peft import IA3Config, LoraConfig, OFTConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from hf_hybrid import HybridConfig, HybridTrainer, Part
from hf_hybrid.run.adapters import MAX_ADAPTER_RATE, AdapterRate
from hf_hybrid.run.rate import LearningRateSearch, step_cosine
from hf_hybrid.run.weights import TrainedWeights


def play(rescue, steps, *, edge, amplitude=0.15, noise=0.02, seed=0, loss=lambda t: 5.0 - 0.001 * t):
    """Cosine falls through zero where the log scale reaches `edge`; returns the scales on the way."""
    rng, scales = random.Random(seed), []
    for t in range(steps):
        cosine = amplitude * math.tanh(edge - rescue.log_scale) + rng.gauss(0, noise)
        rescue.observe(loss(t) + rng.gauss(0, 0.1), cosine if t else None)
        scales.append(rescue.scale)
    return scales


@pytest.mark.parametrize("steps", [50, 150, 300, 1000])
@pytest.mark.parametrize("edge", [2.0, 4.0])
def test_finds_a_scale_near_the_edge(steps, edge):
    for seed in range(5):
        scales = play(LearningRateSearch(max_steps=steps, max_scale=512), steps, edge=edge, seed=seed)
        assert edge - 1.6 < math.log(scales[-1]) < edge + 0.7


@pytest.mark.parametrize("steps", [50, 300, 3000])
def test_leaves_a_good_rate_alone(steps):
    """At the edge, and beyond it, the cosine of the first steps is not clear: nothing ever moves far."""
    for seed in range(5):
        for edge in (0.0, -1.0):
            rescue = LearningRateSearch(max_steps=steps, max_scale=512)
            assert max(play(rescue, steps, edge=edge, seed=seed)) < 2.5


def test_pure_noise_ends_at_one():
    noise, ends = {"edge": 0, "amplitude": 0, "noise": 0.1}, []
    for seed in range(20):
        ends += play(LearningRateSearch(max_steps=300, max_scale=512), 300, **noise, seed=seed)[-1:]
    assert sorted(ends)[17] < 1.5


def test_is_bounded():
    assert max(play(LearningRateSearch(max_steps=300, max_scale=8), 300, edge=10)) <= 8.0 + 1e-9


def test_instability_lowers_the_scale_and_back_off_to_a_quarter_at_most():
    rescue = LearningRateSearch(max_steps=300, max_scale=512)
    before = play(rescue, 120, edge=4.0)[-1]
    after = play(rescue, 10, edge=4.0, loss=lambda t: 8.0)[-1]
    rescue.back_off()
    assert after < before and rescue.scale <= after / 4


def test_state_survives_json():
    a = LearningRateSearch(max_steps=100, max_scale=512)
    play(a, 20, edge=4.0)
    b = LearningRateSearch(max_steps=100, max_scale=512)
    b.load_state_dict(json.loads(json.dumps(a.state_dict())))
    assert play(a, 60, edge=4.0, seed=3) == play(b, 60, edge=4.0, seed=3)


def run(tmp_path, **overrides):
    args = HybridConfig(**config_values(tmp_path, max_steps=80, **overrides))
    trainer = HybridTrainer(tiny_model(), args, train_dataset=ByteText(800), eval_dataset=ByteText(64, offset=900))
    trainer.train()
    return trainer, trainer.evaluate()["eval_loss"]


def test_the_default_learning_rate_is_rescued(tmp_path):
    rescued, loss = run(tmp_path / "a", learning_rate=None)
    _, left = run(tmp_path / "b", learning_rate=None, auto_lr="off")
    summary = rescued.hybrid_summary()
    assert summary["learning_rate_scale"] > 5
    assert summary["learning_rate_scales"][0]["scale"] < summary["learning_rate_scale"]
    assert loss < left - 0.5
    # The rate that is logged is the one that was used.
    entry = [e for e in rescued.state.log_history if "learning_rate" in e][60]
    assert entry["learning_rate"] == pytest.approx(5e-5 * (1 - 60 / 80) * entry["hybrid/learning_rate_scale"], rel=0.1)


def test_the_scheduler_never_sees_the_scale(tmp_path):
    trainer, _ = run(tmp_path, learning_rate=None, lr_scheduler_type="cosine")
    assert trainer.lr_scheduler.base_lrs == [5e-5, 5e-5]
    assert all(group["lr"] <= 5e-5 for group in trainer.optimizer.param_groups)


# Adapters.


@pytest.mark.parametrize("backs_off, scales", [(True, [2.5, 1.0, 1.0]), (False, [10.0] * 3)])
def test_the_rate_of_adapters_is_reduced_after_harm_but_never_below_the_one_that_was_set(backs_off, scales):
    """In DPO one pair that is ranked wrong stands out at any rate."""
    rescue, seen = AdapterRate(10.0, backs_off=backs_off), []
    for _ in range(3):
        rescue.back_off()
        seen.append(rescue.scale)
    again = AdapterRate(10.0, backs_off=backs_off)
    again.load_state_dict(json.loads(json.dumps(rescue.state_dict())))
    assert seen == scales and again.scale == rescue.scale


def adapters(model=None, **options):
    torch.manual_seed(0)
    config = {"r": 4, "lora_alpha": 128, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    return get_peft_model(model or tiny_model(hidden_size=64), LoraConfig(**config))


def adapted(tmp_path, model=None, kind=HybridTrainer, keywords=None, resume=None, **options):
    values = config_values(tmp_path, **{"max_steps": 12, "logging_steps": 1, "learning_rate": None, **options})
    args = (HybridConfig if kind is HybridTrainer else TrainingArguments)(**values)
    data = {"train_dataset": ByteText(200), "eval_dataset": ByteText(64, offset=900)}
    trainer = kind(model or adapters(), args, **data, **(keywords or {}))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def rates(trainer):
    return [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]


RATE = 1e-3 * (32 / 128) * (576 / 64)


@pytest.mark.parametrize("options, rate", [
    ({}, RATE),
    ({"r": 16}, RATE),
    ({"use_dora": True}, RATE),
    ({"lora_alpha": 64}, 2 * RATE),
    ({"lora_alpha": 64, "use_rslora": True}, RATE),
    ({"lora_alpha": 64, "alpha_pattern": {"q_proj": 256}}, RATE / 2),
    ({"rank_pattern": {"q_proj": 8}}, RATE),
    ({"lora_alpha": 1}, MAX_ADAPTER_RATE),
])  # fmt: skip
def test_adapters_have_the_rate_of_their_shape_from_the_first_step(options, rate, tmp_path, caplog):
    trainer = adapted(tmp_path, adapters(**options))
    assert rates(trainer) == pytest.approx([rate * (1 - step / 12) for step in range(12)])
    summary = trainer.hybrid_summary()
    assert summary["learning_rate_scale"] == pytest.approx(rate / 5e-5)
    assert [entry["step"] for entry in summary["learning_rate_scales"]] == [1]
    told = [r.getMessage() for r in caplog.records if "Adapters are trained" in r.getMessage()]
    assert len(told) == 1 and f"a learning rate of {rate:.3g} in place of 5e-05" in told[0]
    assert f"`lora_alpha={options.get('lora_alpha', 128)}`" in told[0] or len(options) == 2
    assert trainer.lr_scheduler.base_lrs[0] == 5e-5 >= trainer.optimizer.param_groups[0]["lr"]


def test_adapters_at_the_default_rate_train_as_plain_trainer_does_at_the_rate_of_the_rule(tmp_path):
    start = adapters()
    ours = adapted(tmp_path / "ours", copy.deepcopy(start), warmup_steps=4)
    plain = adapted(tmp_path / "plain", copy.deepcopy(start), Trainer, warmup_steps=4, learning_rate=RATE)
    left = adapted(tmp_path / "left", copy.deepcopy(start), warmup_steps=4, auto_lr="off")
    assert rates(ours) == pytest.approx(rates(plain)) and left.hybrid_summary()["learning_rate_scale"] == 1
    found, other = (weights(trainer.model) for trainer in (ours, plain))
    assert all(torch.allclose(found[name], other[name], atol=1e-5) for name in found)
    assert ours.evaluate()["eval_loss"] < left.evaluate()["eval_loss"] - 0.1


@pytest.mark.parametrize("options", [{"learning_rate": 2e-3}, {"auto_lr": "off"}], ids=str)
def test_a_rate_that_was_given_is_left_alone(options, tmp_path):
    start = adapters()
    ours = adapted(tmp_path / "ours", copy.deepcopy(start), **options)
    plain = adapted(tmp_path / "plain", copy.deepcopy(start), Trainer, learning_rate=options.get("learning_rate", 5e-5))
    assert rates(ours) == rates(plain)
    assert_same_weights(weights(ours.model), weights(plain.model))


def test_a_rate_above_that_of_the_rule_is_never_lowered(tmp_path, caplog):
    trainer = adapted(tmp_path, learning_rate=5e-3, auto_lr="on")
    assert rates(trainer)[0] == 5e-3 and "Adapters are trained" not in caplog.text


def with_a_group_of_its_own(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW([{"params": parameters[:2], "lr": 1e-4}, {"params": parameters[2:], "lr": 1e-3}])


@pytest.mark.parametrize("make, options, why", [
    (lambda: adapters(init_lora_weights="gaussian"), {}, "`init_lora_weights=gaussian`"),
    (lambda: adapters(modules_to_save=["lm_head"]), {}, "other weights are trained beside them"),
    (lambda: get_peft_model(tiny_model(), IA3Config(target_modules=["k_proj"], feedforward_modules=[])), {}, "`IA3`"),
    (lambda: get_peft_model(tiny_model(), OFTConfig(target_modules=["q_proj"], oft_block_size=4)), {}, "`OFT`"),
    (adapters, {"optim": "sgd"}, "the optimizer `SGD`"),
    (adapters, {"optim": "muon"}, "the optimizer `MuonAdamW`"),
    (adapters, {"label_smoothing_factor": 0.1}, "`label_smoothing_factor=0.1`"),
    (adapters, {"optimizer": with_a_group_of_its_own}, "learning rates of its own"),
    (adapters, {"loss": True}, "the loss of `compute_loss_func`"),
])  # fmt: skip
def test_adapters_that_are_not_known_train_at_the_rate_that_is_set(make, options, why, tmp_path, caplog):
    model, keywords, options = make(), {}, dict(options)
    if make_optimizer := options.pop("optimizer", None):
        keywords["optimizers"] = (make_optimizer(model), None)
    if options.pop("loss", False):
        keywords["compute_loss_func"] = lambda outputs, labels, **kwargs: outputs.logits.square().mean()
    trainer = adapted(tmp_path, model, keywords=keywords, max_steps=2, **options)
    assert trainer.hybrid_summary()["learning_rate_scale"] == 1
    assert rates(trainer)[0] == (1e-4 if make_optimizer else 5e-5)
    told = [r.getMessage() for r in caplog.records if "Adapters are trained" in r.getMessage()]
    assert len(told) == 1 and why in told[0]


@pytest.mark.parametrize("options", [{"memory": "stream"}, {"direction": "orthogonal"}], ids=str)
def test_streamed_and_leaping_adapters_have_that_rate(options, tmp_path):
    assert rates(adapted(tmp_path, **options))[0] == pytest.approx(RATE)


def test_a_resumed_run_keeps_the_rate_of_its_adapters(tmp_path):
    """Also where it was reduced on the way."""
    options = {"save_strategy": "steps", "save_steps": 6}

    class Alarm(Part):
        def begin(self, run):
            self.run = run

        def begin_step(self, step):
            if step.index == 4:
                self.run.rate.back_off()

    whole = adapted(tmp_path, keywords={"parts": [Alarm()]}, **options)
    assert rates(whole)[4] == pytest.approx(RATE / 4 * (8 / 12))
    resumed = adapted(tmp_path / "b", resume=str(tmp_path / "checkpoint-6"), **options)
    assert rates(resumed) == rates(whole) and resumed.hybrid_summary()["resumed"]["warnings"] == []
    assert_same_weights(weights(resumed.model), weights(whole.model))


# The cosine.


def test_the_cosine_is_that_with_the_last_step():
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
    trained = TrainedWeights(model.named_parameters(), optimizer)
    gradients = torch.cat([p.grad.view(-1) for p in model.parameters()])
    states = [optimizer.state[p] for p in model.parameters()]
    followed = torch.cat([(s["exp_avg"] / (s["exp_avg_sq"].sqrt() + 1e-8)).view(-1) for s in states])
    expected = torch.cosine_similarity(gradients, followed, dim=0).item()
    assert step_cosine(trained)() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("options", [{"optim": "sgd"}, {"optim": "muon"}, {"optimizer_states": "8bit"}], ids=str)
def test_the_rate_stays_under_optimizers_whose_last_step_is_not_known(options, tmp_path, caplog):
    config = HybridConfig(**config_values(tmp_path, max_steps=6, learning_rate=1e-5, auto_lr="on", **options))
    trainer = HybridTrainer(tiny_model(), config, train_dataset=ByteText(40))
    trainer.train()
    assert trainer.hybrid_summary()["learning_rate_scale"] == 1.0
    assert caplog.text.count("The run keeps `learning_rate=1e-05`: a better one is searched under torch's Adam") == 1


def test_a_run_of_no_steps_has_a_search():  # `max_steps=0`, with which Trainer makes one step
    assert LearningRateSearch(max_steps=0, max_scale=8).growth == LearningRateSearch(max_steps=1, max_scale=8).growth
