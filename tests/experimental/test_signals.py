"""`hf_hybrid/experimental/signals.py`: the features of a step are bounded, independent of units, and never constant."""

import json

import pytest
from conftest import ByteText, hybrid_config, tiny_model

from hf_hybrid import HybridTrainer, Part
from hf_hybrid.experimental.observer import PlannerObserver
from hf_hybrid.experimental.signals import FEATURE_NAMES, LIMIT, SignalObserver, StepSignals
from hf_hybrid.part import Phase

pytestmark = pytest.mark.slow


def step(index, **overrides):
    values = {
        "phase": Phase.FULL, "progress": index / 100, "learning_rate": 1e-3, "rate_scale": 1.0, "max_grad_norm": 1.0,
        "loss": 5.0 / (1 + index), "gradient_norm": 1.0 + index % 3,
    }  # fmt: skip
    return StepSignals(**{**values, **overrides})


def test_sixty_four_names():
    assert len(FEATURE_NAMES) == len(set(FEATURE_NAMES)) == 64


def test_features_are_bounded_whatever_comes_in():
    observer = SignalObserver()
    for index, loss in enumerate([1e-12, 1e12, 0.0, 3.0, 3.0, 3.0, -5.0]):
        observer.observe(step(index, loss=loss, gradient_norm=abs(loss), learning_rate=0.0))
        assert len(observer.features) == 64
        assert all(-LIMIT <= value <= LIMIT for value in observer.features)


def test_predicted_steps_leave_the_loss_history_alone():
    observer = SignalObserver()
    for index in range(5):
        observer.observe(step(index))
    before = list(observer.losses)
    observer.observe(step(5, phase=Phase.PREDICT, loss=None, gradient_norm=None))
    features = dict(zip(FEATURE_NAMES, observer.features))
    assert list(observer.losses) == before
    assert features["phase_predict"] == 1.0 and features["phase_full"] == 0.0


def test_features_do_not_depend_on_the_unit_of_the_gradient():
    # Ratios of norms stay the same when all of them are scaled.
    small, large = SignalObserver(), SignalObserver()
    for index in range(40):
        small.observe(step(index, max_grad_norm=0.0))
        large.observe(step(index, gradient_norm=1e3 * (1.0 + index % 3), max_grad_norm=0.0))
    named = {name: (x, y) for name, x, y in zip(FEATURE_NAMES, small.features, large.features)}
    for name in ("norm_log_ratio_to_mean", "norm_std_over_mean", "norm_slope_16", "norm_autocorrelation"):
        assert abs(named[name][0] - named[name][1]) < 1e-9


def test_state_survives_json():
    observer, copy = SignalObserver(), SignalObserver()
    for index in range(30):
        observer.observe(step(index))
    copy.load_state_dict(json.loads(json.dumps(observer.state_dict())))
    for both in (observer, copy):
        both.observe(step(30))
    assert observer.features == copy.features


class Watcher(Part):
    name = "watcher"

    def __init__(self):
        self.rows = []

    def before_forward(self, phase):
        self.rows.append(self.trainer.run.part(PlannerObserver).signals.features)


def test_no_feature_is_constant_over_a_real_run(tmp_path):
    """Every one of the 64 carries something: it takes several values in an ordinary run."""
    watcher = Watcher()
    # Rescue on, so that the scale of the learning rate moves too.
    config = hybrid_config(
        tmp_path, max_steps=120, learning_rate=1e-4, auto_lr="on", warmup_steps=10, planner="dynamics"
    )
    watcher.trainer = HybridTrainer(tiny_model(), config, train_dataset=ByteText(800), parts=[watcher])
    watcher.trainer.train()
    rows = watcher.rows[1:]
    constant = [name for name, values in zip(FEATURE_NAMES, zip(*rows)) if len(set(values)) < 2]
    # A run whose real steps never are in Predict cannot show that one; the leap's own step does.
    assert set(constant) <= {"phase_predict"}
