"""Published directions against their recursions and closed forms, and what holds for every direction."""

import math
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.directions.drift import Drift, Snoo
from benchmarks.directions.extrapolation import Linear, ReducedRank
from benchmarks.directions.nino import NiNo, Nowcaster, parameter_kind
from hf_hybrid import HybridTrainer
from hf_hybrid.leaps.trajectory import Trajectory
from hf_hybrid.run.record import Leap
from hf_hybrid.run.weights import TrainedWeights

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "leaps")]

from conftest import ByteText, assert_same_weights, hybrid_config, tiny_model, weights  # noqa: E402
from test_directions import (  # noqa: E402
    MOMENTS,
    advance,
    check_reset,
    check_resume,
    check_rollback,
    check_second_leap,
    check_values_per_weight,
)
from test_trajectory import Toy, kept_leap  # noqa: E402

PUBLISHED = Path(os.environ.get("HYBRID_BENCHMARK_NINO", "not named"))
NAMES = ("drift", "snoo", "linear", "rre", "nino")


def tiny_nowcaster(path, hidden=4, horizons=40):
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    state = {"layer_embed.weight": random(15, hidden)}
    for name, rows, columns in (
        ("edge_proj.fc.0", hidden, 5),
        ("edge_mlp.fc.0", hidden, hidden),
        ("edge_mlp.fc.2", hidden, hidden),
        ("edge_mlp.fc.4", hidden, hidden),
        ("edge_mlp.fc.6", horizons, hidden),
    ):
        state |= {f"{name}.weight": random(rows, columns), f"{name}.bias": random(rows)}
    torch.save({"state_dict": state, "model_args": {"gnn": False, "hid": hidden}}, path)
    return str(path)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return tiny_nowcaster(tmp_path_factory.mktemp("nino") / "tiny.pt")


def make(name, checkpoint):
    """A direction that is ready after a few steps."""
    return {
        "drift": Drift,
        "snoo": Snoo,
        "linear": partial(Linear, spacing=1),
        "rre": partial(ReducedRank, spacing=1),
        "nino": partial(NiNo, network=Nowcaster.load(checkpoint), spacing=1),
    }[name]


class Course:
    """Weights that go where the test says, under learning rates that the test says."""

    def __init__(self, direction, *starts, memory_steps=20):
        self.parameters = [torch.nn.Parameter(torch.as_tensor(start).float().clone()) for start in starts]
        optimizer = torch.optim.SGD([{"params": [p]} for p in self.parameters], lr=0.1)
        named = [(f"layer{i}.weight", p) for i, p in enumerate(self.parameters)]
        self.trajectory = Trajectory(
            TrainedWeights(named, optimizer), direction=direction, memory_steps=memory_steps, max_relative_norm=1e6
        )

    def step(self, rates, *places):
        self.trajectory.observe_gradients()
        for parameter, place in zip(self.parameters, places):
            parameter.data.copy_(torch.as_tensor(place))
        self.trajectory.observe_step(list(rates))

    def weights(self):
        return [p.detach().clone() for p in self.parameters]


# Published recursions and closed forms.


def test_linear_is_exact_on_a_straight_line():
    start, slope = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 1.0, -4.0])
    course = Course(partial(Linear, spacing=2), start, start[:2])
    way = 0.0
    for step in range(12):
        rate = 0.01 * (1 + step % 3)
        way += rate
        course.step((rate, 2 * rate), start + way * slope, start[:2] + 2 * way * slope[:2])
    before, lr_sum = course.weights(), course.trajectory.clock.lr_sums[0]
    assert kept_leap(course.trajectory, 3.0).relative_norm > 0
    torch.testing.assert_close(course.weights()[0], before[0] + 3 * lr_sum * slope, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(course.weights()[1], before[1] + 6 * lr_sum * slope[:2], rtol=1e-5, atol=1e-5)


def test_linear_fits_real_steps_alone():
    """Least squares over the last states, with leaps in between that do not count as movement."""
    rng = np.random.default_rng(0)
    course = Course(partial(Linear, spacing=1, states=4), np.zeros(5))
    moves, rates = [], []
    for step in range(14):
        moves.append(rng.normal(size=5))
        rates.append(float(rng.uniform(0.1, 1.0)))
        course.step((rates[-1],), course.weights()[0] + torch.tensor(moves[-1]).float())
        if step in (5, 11):
            kept_leap(course.trajectory, 2.0)
            course.trajectory.accept()
    places, ways = np.cumsum([np.zeros(5), *moves], axis=0)[-4:], np.cumsum([0.0, *rates])[-4:]
    slope = np.polyfit(ways, places, 1)[0]
    before = course.weights()[0]
    kept_leap(course.trajectory, 1.0)
    expected = before + torch.tensor(slope * sum(rates[-2:])).float()
    torch.testing.assert_close(course.weights()[0], expected, rtol=1e-3, atol=1e-3)


def test_rre_finds_the_fixed_point_of_a_linear_iteration():
    matrix, fixed = torch.diag(torch.tensor([0.9, 0.5, -0.3])), torch.tensor([1.0, -2.0, 0.5])
    x = torch.zeros(3)
    course = Course(partial(ReducedRank, spacing=1, regularization=0.0), x[:2], x[2:])
    for _ in range(6):
        x = fixed + matrix @ (x - fixed)
        course.step((0.1, 0.2), x[:2], x[2:])
    assert (x - fixed).norm() > 0.3
    kept_leap(course.trajectory, 1.0)
    torch.testing.assert_close(torch.cat(course.weights()), fixed, rtol=1e-3, atol=1e-3)


def test_rre_damped_to_the_end_is_an_average_of_the_states():
    """With all the weight on the regularisation, every state but the last counts the same."""
    course = Course(partial(ReducedRank, spacing=1, states=4, regularization=1e9), np.zeros(3))
    places = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    for place in places:
        course.step((0.1,), place)
    kept_leap(course.trajectory, 1.0)
    torch.testing.assert_close(course.weights()[0], places[-4:-1].mean(0), rtol=1e-4, atol=1e-4)


def test_snoo_follows_the_published_recursion():
    generator = torch.Generator().manual_seed(0)
    course = Course(partial(Snoo, momentum=0.6, rate=0.7), torch.zeros(4), torch.zeros(2))
    course.step((0.1, 0.3), torch.zeros(4), torch.zeros(2))  # blocks are counted from behind the first step
    slow, momentum = torch.zeros(6), torch.zeros(6)
    for _ in range(4):
        fast = slow.clone()
        for _ in range(3):
            fast = fast + torch.randn(6, generator=generator)
            course.step((0.1, 0.3), fast[:4], fast[4:])
        displacement = fast - slow
        momentum = 0.6 * momentum + displacement
        slow = slow + 0.7 * (0.6 * momentum + displacement)
        kept_leap(course.trajectory, 1.0)
        course.trajectory.accept()
        torch.testing.assert_close(torch.cat(course.weights()), slow, rtol=1e-4, atol=1e-5)


def nowcast(path, states, kind, ahead):
    """NiNo's forecast, one weight after the other."""
    tensors = torch.load(path, weights_only=True)["state_dict"]
    mean, deviation = states.mean(), states.std() + 1e-6
    result = torch.empty(states.shape[1])
    for i in range(states.shape[1]):
        hidden = tensors["edge_proj.fc.0.weight"] @ ((states[:, i] - mean) / deviation) + tensors["edge_proj.fc.0.bias"]
        hidden = hidden + tensors["layer_embed.weight"][kind]
        for layer in (0, 2, 4):
            hidden = tensors[f"edge_mlp.fc.{layer}.weight"] @ hidden + tensors[f"edge_mlp.fc.{layer}.bias"]
            hidden = hidden * torch.sigmoid(hidden)
        output = tensors["edge_mlp.fc.6.weight"] @ hidden + tensors["edge_mlp.fc.6.bias"]
        result[i] = states[-1, i] + output[ahead - 1] * deviation
    return result


def course_of_states(path, states, progress, split, monkeypatch):
    monkeypatch.setattr("benchmarks.directions.nino.CHUNK", 7)  # several chunks, the last one shorter
    course = Course(partial(NiNo, network=Nowcaster.load(path), spacing=2), states[0, :split], states[0, split:])
    course.step((0.1, 0.2), states[0, :split], states[0, split:])
    for place in states[1:]:
        course.step((0.1, 0.2), 0 * place[:split], 0 * place[split:])  # what lies between two states does not matter
        course.step((0.1, 0.2), place[:split], place[split:])
    course.trajectory.clock.progress = progress
    return course


@pytest.mark.parametrize("progress, ahead", [(0.0, 40), (0.5, 13), (1.0, 1)])
def test_nino_equals_a_plain_loop(progress, ahead, checkpoint, monkeypatch):
    states = torch.randn(8, 30, generator=torch.Generator().manual_seed(0))
    course = course_of_states(checkpoint, states, progress, 20, monkeypatch)
    kept_leap(course.trajectory, 1.0)
    expected = [nowcast(checkpoint, states[-5:, part], 4, ahead) for part in (slice(0, 20), slice(20, 30))]
    for weight, reference in zip(course.weights(), expected):  # vectors called `weight` belong to a norm
        torch.testing.assert_close(weight, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="needs the published checkpoints of NiNo beside the repository")
@pytest.mark.parametrize("name", ["nino_mlp.pt", "nino_mlp_h32.pt"])
def test_nino_with_the_published_networks(name, monkeypatch):
    states = 0.02 * torch.randn(1, 24, generator=torch.Generator().manual_seed(0)) + torch.linspace(0, 1, 5)[:, None]
    course = course_of_states(str(PUBLISHED / name), states, 0.0, 14, monkeypatch)
    before = course.weights()
    kept_leap(course.trajectory, 0.2)
    for weight, old, part in zip(course.weights(), before, (slice(0, 14), slice(14, 24))):
        forecast = nowcast(PUBLISHED / name, states[:, part], 4, 40)
        torch.testing.assert_close(weight, old + 0.2 * (forecast - old), rtol=1e-4, atol=1e-5)


def test_types_of_parameters_are_read_from_names_and_shapes():
    kinds = {
        ("model.embed_tokens.weight", (9, 4)): 5,
        ("transformer.wpe.weight", (9, 4)): 6,
        ("bert.embeddings.position_embeddings.weight", (9, 4)): 6,
        ("model.layers.0.self_attn.q_proj.weight", (4, 4)): 7,
        ("bert.encoder.layer.0.attention.self.key.weight", (4, 4)): 8,
        ("model.layers.0.self_attn.v_proj.weight", (4, 4)): 9,
        ("model.layers.0.self_attn.v_proj.bias", (4,)): 2,
        ("transformer.h.0.attn.c_attn.weight", (4, 12)): 1,
        ("model.layers.0.input_layernorm.weight", (4,)): 4,
        ("model.layers.0.mixer.conv1d.weight", (4, 1, 3)): 3,
        ("model.layers.0.mixer.A_log", (4, 2)): 2,
        ("lm_head.weight", (9, 4)): 1,
    }
    assert {key: parameter_kind(key[0], torch.Size(key[1])) for key in kinds} == kinds


def test_drift_leap_equals_its_formula():
    toy = Toy(torch.optim.SGD, Drift, momentum=0.9)
    toy.real_step()  # the block is counted from behind the first step
    start = toy.weights()
    for _ in range(3):
        toy.real_step()
    end = toy.weights()
    toy.leap(0.5)
    for index, (a, b, (_, parameter)) in enumerate(zip(start, end, toy.named)):
        lr = 1e-2 if index == 0 else 2e-2
        # The memory was empty: its weight is the block's share of the steps seen so far.
        direction = (b - a) / (3 * lr) * min(1.0, 3 / 4)
        torch.testing.assert_close(parameter.detach(), b + 0.5 * 3 * lr * direction, rtol=1e-4, atol=1e-5)


# What holds for every direction, checked as in tests/leaps/test_directions.py.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_rollback_is_exact_before_and_after_real_steps(name, dtype, checkpoint):
    check_rollback(make(name, checkpoint), dtype)


@pytest.mark.parametrize("name", NAMES)
def test_a_leap_that_is_formed_again_starts_anew(name, checkpoint):
    check_second_leap(make(name, checkpoint))


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", NAMES)
def test_resume_is_bit_exact(name, moment, checkpoint):
    check_resume(make(name, checkpoint), moment, torch.optim.AdamW)


@pytest.mark.parametrize("name, values", [("drift", 2), ("snoo", 2), ("linear", 6), ("rre", 6), ("nino", 6)])
def test_buffers_are_those_that_plans_count(name, values, checkpoint):
    assert check_values_per_weight(make(name, checkpoint)) == values * 4 * (12 + 5 + 8)


@pytest.mark.parametrize("name", NAMES)
def test_a_reset_clears_the_memories(name, checkpoint):
    check_reset(make(name, checkpoint))


@pytest.mark.parametrize("name", ["linear", "rre", "nino"])
def test_steps_after_a_leap_that_was_undone_are_not_history(name, checkpoint):
    toys = [Toy(direction=make(name, checkpoint)) for _ in range(2)]
    for toy, undone in zip(toys, (True, False)):
        advance(toy, 7)
        before = toy.weights()
        if undone:
            toy.leap(0.5)
            advance(toy, 3)
            toy.trajectory.roll_back()
        else:
            with toy.trajectory.trial(Leap(0, 6)):
                toy.trajectory.leap(0.5)
        assert all(torch.equal(a, b) for a, b in zip(before, toy.weights()))
    (first, first_values), (second, second_values) = (toy.trajectory.state_dict() for toy in toys)
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    assert first_values["direction_state"] == second_values["direction_state"]


# Through the trainer.


def train(folder, direction, resume=None, **overrides):
    options = {"max_steps": 36, "probe_budget": 0.2, **overrides}
    config = hybrid_config(folder, **options)
    trainer = HybridTrainer(tiny_model(), config, train_dataset=ByteText(400), direction=direction)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("name", NAMES)
def test_every_direction_trains_and_streams(name, tmp_path, checkpoint):
    options = {"accumulation_walk": "micro_batch", "leap_worth": 4.0}
    plain, streamed = (
        train(tmp_path / memory, make(name, checkpoint), memory=memory, **options) for memory in ("off", "stream")
    )
    summary = plain.hybrid_summary()
    assert summary["direction"] == name and summary["predicted_steps"] > 0
    assert len(summary["leaps"]) >= 3
    assert all(leap["relative_norm"] > 0 for leap in summary["leaps"])  # none before there is a direction
    assert streamed.hybrid_summary()["leaps"] == summary["leaps"]
    assert_same_weights(weights(streamed.model), weights(plain.model))
    losses = [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.5


def test_a_run_resumes_bit_for_bit(tmp_path):
    direction = partial(ReducedRank, spacing=1)
    whole = train(tmp_path, direction, save_strategy="steps", save_steps=1)
    for step in (9, 21, 22):
        resumed = train(tmp_path / "again", direction, resume=str(tmp_path / f"checkpoint-{step}"))
        assert_same_weights(weights(resumed.model), weights(whole.model))


# What is refused.


@pytest.mark.parametrize("direction, message", [
    (partial(Linear, states=1), "`states` must be at least 2"),
    (partial(ReducedRank, states=2), "`states` must be at least 3"),
    (partial(ReducedRank, regularization=-1.0), "`regularization` must be at least 0"),
    (partial(Snoo, momentum=1.5), "`momentum` must be between 0 and 1"),
    (partial(Snoo, rate=0.0), "`rate` must be greater than 0"),
])  # fmt: skip
def test_numbers_out_of_range_are_refused(direction, message):
    with pytest.raises(ValueError, match=message):
        Toy(direction=direction)


def test_wrong_checkpoints_are_refused(tmp_path, checkpoint):
    with pytest.raises(ValueError, match="none.pt` is not a file"):
        Nowcaster.load(tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    torch.save({"state_dict": {"weight": torch.zeros(3)}}, tmp_path / "other.pt")
    broken = torch.load(checkpoint, weights_only=True)
    broken["state_dict"]["edge_mlp.fc.2.weight"] = torch.zeros(3, 3)
    torch.save(broken, tmp_path / "broken.pt")
    for name in ("text.pt", "other.pt", "broken.pt"):
        with pytest.raises(ValueError, match=f"{name}` is no checkpoint of NiNo's MLP"):
            Nowcaster.load(tmp_path / name)
    assert Nowcaster.load(checkpoint).states == 5
