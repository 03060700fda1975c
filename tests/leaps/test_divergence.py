import json
import math
import random

from hf_hybrid.leaps.divergence import Action, DivergenceMonitor, Level, linear_trend


def monitor(**overrides):
    return DivergenceMonitor(**{"threshold": 4.0, "max_bad_steps": 5, **overrides})


def settled(steps=60, **overrides):
    """A monitor that has watched a quiet run."""
    rng, m = random.Random(0), monitor(**overrides)
    for step in range(steps):
        m.judge_gradients(1.0, rng.uniform(0.9, 1.1), leap_open=False)
        verdict = m.judge_step(3.0 - 0.005 * step + rng.gauss(0, 0.02), 1.0, predicted_loss=None, leap_open=False)
        assert verdict.level <= Level.CAUTION, verdict
    return m


def test_quiet_run_raises_no_alarm():
    settled(400)


def test_loss_jump_after_a_leap_is_rolled_back():
    verdict = settled().judge_step(3.5, 1.0, predicted_loss=2.7, leap_open=True)
    assert (verdict.level, verdict.action) == (Level.CRITICAL, Action.ROLL_BACK)
    assert "standard deviations above its trend" in verdict.reason


def test_loss_jump_without_a_leap_forces_real_steps():
    verdict = settled().judge_step(3.5, 1.0, predicted_loss=None, leap_open=False)
    assert (verdict.level, verdict.action) == (Level.CRITICAL, Action.FORCE_FULL)


def test_loss_below_its_trend_is_no_alarm():
    assert settled().judge_step(1.0, 1.0, predicted_loss=None, leap_open=True).level is Level.NORMAL


def test_exploding_and_vanishing_gradients():
    m = settled()
    assert m.judge_step(2.7, 200.0, predicted_loss=None, leap_open=False).level is Level.WARNING
    assert m.judge_step(2.7, 1e-5, predicted_loss=None, leap_open=False).level is Level.WARNING
    verdict = m.judge_gradients(2.7, 5000.0, leap_open=False)
    assert (verdict.level, verdict.action) == (Level.CRITICAL, Action.SKIP_BATCH)
    assert m.judge_gradients(2.7, 5000.0, leap_open=True).action is Action.ROLL_BACK


def test_nan_ladder():
    m = settled(max_bad_steps=5)
    actions = [m.judge_gradients(math.nan, 1.0, leap_open=False).action for _ in range(5)]
    assert actions == [
        Action.SKIP_BATCH, Action.SKIP_BATCH, Action.RESET_PREDICTOR, Action.SKIP_BATCH, Action.ABORT
    ]  # fmt: skip


def test_nan_after_a_leap_suspects_the_leap():
    m = settled()
    assert [m.judge_gradients(1.0, math.inf, leap_open=True).action for _ in range(3)][-1] is Action.ROLL_BACK


def test_one_good_step_ends_a_row_of_bad_ones():
    m = settled(max_bad_steps=2)
    for _ in range(10):
        assert m.judge_gradients(math.nan, 1.0, leap_open=False).action is Action.SKIP_BATCH
        assert m.judge_gradients(1.0, 1.0, leap_open=False).action is Action.NONE


def test_three_warnings_in_a_row_are_critical():
    m = settled()
    levels = [m.judge_step(2.7, 200.0, predicted_loss=None, leap_open=False).level for _ in range(3)]
    assert levels == [Level.WARNING, Level.WARNING, Level.CRITICAL]


def test_forecasts_that_are_always_too_low_are_noticed():
    m = settled()
    levels = []
    for _ in range(16):
        levels.append(m.judge_step(2.7, 1.0, predicted_loss=2.0, leap_open=True).level)
    assert levels[-1] is Level.WARNING


def test_bouncing_loss_is_a_caution():
    m = monitor()
    for step in range(80):
        verdict = m.judge_step(2.0 + 0.1 * (-1) ** step, 1.0, predicted_loss=None, leap_open=False)
    assert (verdict.level, verdict.action) == (Level.CAUTION, Action.SHORTEN)


def test_a_loss_that_grows_step_by_step_is_noticed():
    """Its trend grows with it, so that no single loss stands out; leaps stay away until it is down or usual."""
    m, rng, alarms = settled(), random.Random(1), []
    for step in range(200):
        loss = 2.7 * 1.02 ** min(step, 60) + rng.gauss(0, 0.02)
        verdict = m.judge_step(loss, 1.0, predicted_loss=None, leap_open=False)
        if verdict.level >= Level.WARNING and "when they were lowest" in verdict.reason:
            assert verdict.action is Action.BACK_OFF
            alarms.append(step)
    assert 10 < alarms[0] < 40 and min(b - a for a, b in zip(alarms, alarms[1:])) == m.RISE_EVERY
    for _ in range(5000):
        verdict = m.judge_step(8.86 + rng.gauss(0, 0.02), 1.0, predicted_loss=None, leap_open=False)
    assert verdict.level <= Level.CAUTION, "what stays is normal in the end"


def test_a_resumed_watch_remembers_the_lowest_losses():
    m, rng = settled(), random.Random(2)
    again = monitor()
    again.load_state_dict(json.loads(json.dumps(m.state_dict())))
    for step in range(60):
        loss = 2.7 * 1.02**step + rng.gauss(0, 0.02)
        verdicts = [w.judge_step(loss, 1.0, predicted_loss=None, leap_open=False) for w in (m, again)]
        assert verdicts[0] == verdicts[1]
    assert m.best is not None and m.best == again.best


def test_state_survives_json():
    m = settled()
    copy = monitor()
    copy.load_state_dict(json.loads(json.dumps(m.state_dict())))
    assert m.judge_step(3.5, 9.0, predicted_loss=2.0, leap_open=True) == copy.judge_step(
        3.5, 9.0, predicted_loss=2.0, leap_open=True
    )
    assert m.state_dict() == copy.state_dict()


def test_linear_trend_continues_a_line():
    trend, deviation = linear_trend([5.0 - 0.5 * step for step in range(10)])
    assert abs(trend - 0.0) < 1e-9 and deviation < 1e-9
