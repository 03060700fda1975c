"""The rescue on made-up signals whose answer is known, and in real runs."""

import json
import math
import random

import pytest
import torch
from conftest import ByteText, assert_same_weights, config_values, tiny_model, weights
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.leaps.probe import PairLoss
from hf_hybrid.leaps.rescue import AccuracyWatch, AdapterRateSearch, KeptWeights, LearningRateRescue
from hf_hybrid.leaps.shards import Whole
from hf_hybrid.leaps.trajectory import InPlace


def play(rescue, steps, *, edge, amplitude=0.15, noise=0.02, seed=0, loss=lambda t: 5.0 - 0.001 * t):
    """Cosine falls through zero where the log scale reaches `edge`; returns the scales on the way."""
    rng, scales = random.Random(seed), []
    for t in range(steps):
        cosine = amplitude * math.tanh(edge - rescue.log_scale) + rng.gauss(0, noise)
        rescue.observe(loss(t) + rng.gauss(0, 0.1), cosine if t else None, 1.0)
        scales.append(rescue.scale)
    return scales


@pytest.mark.parametrize("steps", [50, 150, 300, 1000])
@pytest.mark.parametrize("edge", [2.0, 4.0])
def test_finds_a_scale_near_the_edge(steps, edge):
    for seed in range(5):
        scales = play(LearningRateRescue(max_steps=steps, max_scale=512), steps, edge=edge, seed=seed)
        assert edge - 1.6 < math.log(scales[-1]) < edge + 0.7


@pytest.mark.parametrize("steps", [50, 300, 3000])
def test_leaves_a_good_rate_alone(steps):
    """At the edge, and beyond it, the cosine of the first steps is not clear: nothing ever moves far."""
    for seed in range(5):
        for edge in (0.0, -1.0):
            rescue = LearningRateRescue(max_steps=steps, max_scale=512)
            assert max(play(rescue, steps, edge=edge, seed=seed)) < 2.5


def test_pure_noise_ends_at_one():
    ends = [
        play(LearningRateRescue(max_steps=300, max_scale=512), 300, edge=0, amplitude=0, noise=0.1, seed=seed)[-1]
        for seed in range(20)
    ]
    assert sorted(ends)[17] < 1.5


def test_is_bounded():
    rescue = LearningRateRescue(max_steps=300, max_scale=8)
    assert max(play(rescue, 300, edge=10)) <= 8.0 + 1e-9


def test_instability_lowers_the_scale():
    rescue = LearningRateRescue(max_steps=300, max_scale=512)
    before = play(rescue, 120, edge=4.0)[-1]
    after = play(rescue, 10, edge=4.0, loss=lambda t: 8.0)[-1]
    assert after < before


def test_back_off_is_a_quarter_at_most():
    rescue = LearningRateRescue(max_steps=300, max_scale=512)
    before = play(rescue, 120, edge=4.0)[-1]
    rescue.back_off()
    assert rescue.scale <= before / 4


def accuracies(mean, count, *, pairs=8, seed=0):
    """Of steps with so many preference pairs."""
    rng = random.Random(seed)
    return [sum(rng.random() < mean for _ in range(pairs)) / pairs for _ in range(count)]


def test_a_fall_of_accuracy_is_noticed_and_chance_is_not():
    noticed = {after: 0 for after in (0.9, 0.8, 0.5)}
    for after in noticed:
        for seed in range(100):
            watch = AccuracyWatch()
            steps = [*accuracies(0.8, 16, seed=seed), *accuracies(after, 8, seed=100 + seed)]
            noticed[after] += [watch.fell(accuracy) for accuracy in steps][-1]
    assert noticed[0.9] == 0 and noticed[0.8] <= 5 and noticed[0.5] >= 75
    assert not any(AccuracyWatch().fell(None) for _ in range(40)), "no trainer but that of preferences has any"


def test_a_scale_that_costs_accuracy_is_lowered(caplog):
    """Loss and cosine are as good as before."""
    with_fall, without = (LearningRateRescue(max_steps=300, max_scale=512) for _ in range(2))
    rng = random.Random(0)
    for t, accuracy in enumerate([*accuracies(0.9, 24), *accuracies(0.4, 16)]):
        cosine, loss = 0.15 + rng.gauss(0, 0.02), 5.0 - 0.01 * t
        with_fall.observe(loss, cosine, 1.0, accuracy)
        without.observe(loss, cosine, 1.0, 0.9)
    assert with_fall.holding and not without.holding and with_fall.scale < without.scale / 2
    assert "Fewer preference pairs are ranked right" in caplog.text


def test_state_survives_json():
    a = LearningRateRescue(max_steps=100, max_scale=512)
    play(a, 20, edge=4.0)
    b = LearningRateRescue(max_steps=100, max_scale=512)
    b.load_state_dict(json.loads(json.dumps(a.state_dict())))
    assert play(a, 60, edge=4.0, seed=3) == play(b, 60, edge=4.0, seed=3)


def run(tmp_path, **overrides):
    args = HybridConfig(**config_values(tmp_path, max_steps=80, **overrides))
    trainer = HybridTrainer(tiny_model(), args, train_dataset=ByteText(800), eval_dataset=ByteText(64, offset=900))
    trainer.train()
    return trainer, trainer.evaluate()["eval_loss"]


def test_the_default_learning_rate_is_rescued(tmp_path):
    rescued, loss = run(tmp_path / "a", learning_rate=5e-5)
    _, left = run(tmp_path / "b", learning_rate=5e-5, lr_rescue="off")
    summary = rescued.hybrid_summary()
    assert summary["learning_rate_scale"] > 5
    assert summary["learning_rate_scales"][0]["scale"] < summary["learning_rate_scale"]
    assert loss < left - 0.5
    # The rate that is logged is the one that was used.
    entry = [e for e in rescued.state.log_history if "learning_rate" in e][60]
    assert entry["learning_rate"] == pytest.approx(5e-5 * (1 - 60 / 80) * entry["hybrid/learning_rate_scale"], rel=0.1)


def test_the_scheduler_never_sees_the_scale(tmp_path):
    trainer, _ = run(tmp_path, learning_rate=5e-5, lr_scheduler_type="cosine")
    assert trainer.lr_scheduler.base_lrs == [5e-5, 5e-5]
    assert all(group["lr"] <= 5e-5 for group in trainer.optimizer.param_groups)


# Adapters.


class Adapters:
    """A made-up training: the cosine crosses zero after steps whose log scale is `edge`; weights tell the log scale."""

    PEAK = 1e-6

    def __init__(self, edge: float, *, seed: int, noise: float = 0.03, bad_from: float = math.inf):
        self.weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.AdamW([self.weight], lr=self.PEAK)
        self.search = AdapterRateSearch(self.PEAK, KeptWeights(Whole([self.weight]), optimizer, InPlace()))
        self.edge, self.noise, self.bad_from, self.rng = edge, noise, bad_from, random.Random(seed)

    def losses(self) -> list[float]:
        """Of a probe: weights that a step with a log scale of `bad_from` or more has left are worse than all others."""
        reached = self.weight[0].item()
        return [6.0 if reached >= self.bad_from else 5.0 - 0.01 * reached] * 4

    def steps(self, count: int, share: float = 1.0, wrong_from: float | None = None) -> list[float]:
        """Make steps at this share of the peak learning rate, of pairs that are ranked right up to a log scale."""
        scales = []
        for _ in range(count):
            if self.search.probe_is_due:
                self.search.judge(self.losses)
            cosine = 0.2 * math.tanh(self.edge - self.search.used) + self.rng.gauss(0, self.noise)
            used = math.log(self.search.scale * share)
            with torch.no_grad():
                self.weight.fill_(used)  # what a step leaves
            if wrong_from is not None:
                (accuracy,) = accuracies(0.9 if used < wrong_from else 0.4, 1, seed=self.search.steps)
            self.search.observe(5.0, cosine, self.PEAK * share, None if wrong_from is None else accuracy)
            scales.append(self.search.scale)
        return scales


@pytest.mark.parametrize("edge", [2.0, 5.0, 8.0])
def test_adapters_get_the_better_one_of_two_rates_near_the_crossing(edge):
    """Three times the rate at which the cosine crosses zero where that leads to better weights, and else that rate."""
    for seed in range(10):
        for high_is_better, beyond in ((True, AdapterRateSearch.BEYOND), (False, 0.0)):
            training = Adapters(edge, seed=seed, bad_from=math.inf if high_is_better else edge + 0.6)
            scales = training.steps(50)
            assert math.log(scales[-1]) == pytest.approx(edge + beyond, abs=0.4)
            assert training.search.state == "held" and scales[42:] == scales[-1:] * 8
    going = Adapters(edge, seed=0)
    while going.search.state != "trying":
        going.steps(1)
    assert abs(going.weight[0] - edge) < 1.01 * AdapterRateSearch.GROWTH  # weights from before
    assert going.search.scale < math.exp(edge)  # a warm-up


def test_the_run_goes_on_from_the_weights_of_the_better_trial():
    training = Adapters(5.0, seed=0)
    while training.search.rival is None:
        training.steps(1)
    after_first = training.search.kept._kept["rival"][0][0].item()
    while training.search.state == "trying":
        last = training.weight[0].item()
        if training.search.probe_is_due:
            training.search.judge(training.losses)
        else:
            training.steps(1)
    assert last < after_first == training.weight[0] and training.search.kept.moments() == []
    assert training.search.scale == pytest.approx(math.exp(training.search.rival) / AdapterRateSearch.WARMUP)


def test_a_trial_that_diverges_is_not_held():
    training = Adapters(5.0, seed=0)
    while training.search.state != "trying":
        training.steps(1)
    training.search.back_off()
    assert math.log(training.steps(40)[-1]) == pytest.approx(5.0, abs=0.4)


def test_adapters_at_a_good_rate_are_left_alone():
    assert all(set(Adapters(-1.0, seed=seed).steps(40)) == {1.0} for seed in range(10))
    fast = AdapterRateSearch(0.1, KeptWeights(Whole([]), None, InPlace()))
    for _ in range(20):
        fast.observe(5.0, 0.2, 0.1)
    assert fast.scale == 1 and fast.state == "held"


@pytest.mark.parametrize("cosines, begins", [
    ([-0.018, 0.018, 0.024, 0.081, 0.043, 0.057, 0.054, 0.048, 0.020, 0.095], True),  # DPO of SmolLM2, 2 pairs a step
    ([0.2, 0.3, 0.25, 0.28, 0.22, 0.31], True),
    ([0.02, -0.03, 0.05, -0.01, 0.04, 0.01] * 3, False),
    ([-0.2, -0.1, -0.15] * 4, False),
])  # fmt: skip
def test_the_search_begins_where_the_first_cosines_are_clearly_positive_on_average(cosines, begins):
    search = Adapters(5.0, seed=0).search
    for cosine in cosines:
        search.observe(5.0, cosine, Adapters.PEAK)
    assert (search.state == "growing") is begins and (search.scale > 1) is begins
    assert begins or search.state == "held"


def test_the_schedule_is_counted_in():
    """The cosine crosses zero at a rate, whatever share of the peak the schedule is at."""
    late, early = (math.log(Adapters(6.0, seed=0).steps(40, share)[-1]) for share in (1.0, 0.5))
    assert late == pytest.approx(early, abs=0.4)


def test_one_cosine_by_chance_does_not_end_the_search():
    training = Adapters(6.0, seed=0, noise=0.0)
    training.steps(9)
    training.search.observe(5.0, -0.2, training.PEAK)
    assert math.log(training.steps(40)[-1]) == pytest.approx(6.0 + AdapterRateSearch.BEYOND, abs=0.4)


def test_adapters_do_not_hold_a_rate_that_does_harm():
    for seed in range(10):
        training = Adapters(8.0, seed=seed, bad_from=6.0)
        assert 4.5 < math.log(training.steps(90)[-1]) < 6.0 and training.weight[0] < 6.0
    nowhere = Adapters(3.0, seed=0, bad_from=-1.0)  # nothing ever helps: the search ends all the same
    assert nowhere.steps(80)[-1] == 1.0 and nowhere.search.state == "held"


@pytest.mark.parametrize("pairs", [99.0, None])
def test_harm_that_was_done_while_the_scale_grew_is_undone(pairs):
    """Preferences are always tried from the weights of the beginning, others once both trials have failed."""
    training = Adapters(8.0, seed=0, bad_from=-math.inf)
    search = training.search
    while search.state == "waiting":
        training.steps(1, wrong_from=pairs)
    beginning = training.weight.detach().clone()
    while search.state != "trying" or (pairs is None and (search.lower is not None or search.rival is not None)):
        if search.probe_is_due:
            search.judge(training.losses)
        else:
            training.steps(1, wrong_from=pairs)
    assert torch.equal(training.weight, beginning)


def test_adapters_that_diverge_while_the_scale_grows_go_back():
    training = Adapters(8.0, seed=0)
    before = training.steps(12)[-2]
    training.search.back_off()
    assert math.log(training.steps(20)[-1]) == pytest.approx(math.log(before / 5), abs=1e-6)


def test_adapters_do_not_hold_a_rate_that_costs_accuracy(caplog):
    """The loss says nothing: at the rate that it would hold, pairs are ranked wrong."""
    for seed in range(10):
        training, alone = Adapters(8.0, seed=seed), Adapters(8.0, seed=seed)
        ends = [made.steps(80, wrong_from=edge)[-1] for made, edge in ((training, 3.0), (alone, 99.0))]
        assert ends[0] < 0.6 * ends[1] < math.exp(6.0) and training.search.state == "held"
    assert "Fewer preference pairs are ranked right" in caplog.text


@pytest.mark.parametrize("wrong_from, steps_between, lowered", [(99.0, 9, False), (99.0, 8, True), (None, 9, True)])
def test_one_batch_of_pairs_does_not_lower_the_rate_that_is_held(wrong_from, steps_between, lowered):
    """Training without pairs, or two batches that stand out soon after another, are another matter."""
    training = Adapters(8.0, seed=0)
    before = training.steps(80, wrong_from=wrong_from)[-1]
    assert training.search.state == "held" and before > 4
    training.search.back_off()
    if wrong_from is not None:
        assert training.steps(steps_between, wrong_from=wrong_from)[-1] == before
        training.search.back_off()
    assert training.search.scale == pytest.approx(before / 4 if lowered else before)


def test_a_probe_of_pairs_asks_for_accuracy(caplog):
    training = Adapters(8.0, seed=0)
    training.losses = lambda: [PairLoss(0.6 - 0.01 * training.weight[0].item(), float(training.weight[0] < 6.0))] * 4
    assert math.log(training.steps(80)[-1]) < 6.0


def adapted(tmp_path, **overrides):
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear"))
    args = HybridConfig(**config_values(tmp_path, **{"max_steps": 60, "learning_rate": 2e-5, **overrides}))
    return HybridTrainer(model, args, train_dataset=ByteText(800), eval_dataset=ByteText(64, offset=900))


def test_adapters_are_rescued_from_the_default_rate(tmp_path):
    rescued, left = (adapted(tmp_path / mode, lr_rescue=mode) for mode in ("on", "off"))
    for trainer in (rescued, left):
        trainer.train()
    assert 50 < rescued.hybrid_summary()["learning_rate_scale"]
    assert rescued.evaluate()["eval_loss"] < left.evaluate()["eval_loss"] - 0.05


def test_adapters_at_a_good_rate_train_as_without_the_rescue(tmp_path):
    rescued, left = (adapted(tmp_path / mode, lr_rescue=mode, learning_rate=3e-2) for mode in ("on", "off"))
    for trainer in (rescued, left):
        trainer.train()
    assert rescued.hybrid_summary()["learning_rate_scale"] == 1
    assert_same_weights(weights(rescued.model), weights(left.model))


def test_streamed_adapters_are_rescued_alike(tmp_path):
    options = {"lr_rescue": "on", "max_steps": 30}
    streamed, resident = adapted(tmp_path / "a", memory="stream", **options), adapted(tmp_path / "b", **options)
    for trainer in (streamed, resident):
        trainer.train()
    scales = [trainer.hybrid_summary()["learning_rate_scales"] for trainer in (streamed, resident)]
    assert [entry["step"] for entry in scales[0]] == [entry["step"] for entry in scales[1]]
    assert scales[0][-1]["scale"] == pytest.approx(scales[1][-1]["scale"], rel=1e-3) and scales[0][-1]["scale"] > 50
    assert streamed.evaluate()["eval_loss"] == pytest.approx(resident.evaluate()["eval_loss"], abs=1e-3)


class SearchStages(TrainerCallback):
    """Steps after which the search grew, was in its first trial and in its second."""

    def __init__(self):
        self.steps = {}

    def on_step_end(self, args, state, control, **kwargs):
        search = self.trainer.run.rescue
        self.steps.setdefault((search.state, search.rival is None), []).append(state.global_step)


def test_a_resume_inside_of_the_search_goes_back_to_the_same_weights(tmp_path):
    options = {"lr_rescue": "on", "max_steps": 40, "save_strategy": "steps", "save_steps": 1}
    whole, stages = adapted(tmp_path, **options), SearchStages()
    stages.trainer = whole
    whole.add_callback(stages)
    whole.train()
    for stage in (("growing", True), ("trying", True), ("trying", False)):
        step = stages.steps[stage][len(stages.steps[stage]) // 2]
        resumed = adapted(tmp_path / str(step), **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert_same_weights(weights(resumed.model), weights(whole.model))
