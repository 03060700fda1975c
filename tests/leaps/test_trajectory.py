"""Leaps against a plain reference that is written out element by element."""

import math

import pytest
import torch

from hf_hybrid.leaps import trajectory as trajectory_module
from hf_hybrid.leaps.directions import GradientMemory, NoDirection, has_second_moments
from hf_hybrid.leaps.trajectory import Trajectory
from hf_hybrid.part import Leap
from hf_hybrid.run.weights import TrainedWeights


class Toy:
    """Three parameters of different shapes under a real optimizer, and gradients that the test can replay."""

    def __init__(
        self, optimizer=torch.optim.AdamW, direction=GradientMemory, dtype=torch.float32, *, steps=0, host=False
    ):
        self.generator = generator = torch.Generator().manual_seed(0)
        self.named = [
            (name, torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
            for name, shape in (("a", (4, 3)), ("b", (5,)), ("c", (2, 2, 2)))
        ]
        groups = [{"params": [self.named[0][1]], "lr": 1e-2}, {"params": [p for _, p in self.named[1:]], "lr": 2e-2}]
        self.optimizer = optimizer(groups)
        self.trajectory = Trajectory(
            TrainedWeights(self.named, self.optimizer),
            direction=direction,
            memory_steps=4,
            max_relative_norm=10.0,
            matrices=["a"],
            host=host,
        )
        self.advance(steps)

    def advance(self, steps):
        for _ in range(steps):
            self.real_step()

    def real_step(self):
        for _, parameter in self.named:
            noise = torch.randn(parameter.shape, generator=self.generator)
            parameter.grad = (parameter.detach().float() + 0.1 * noise).to(parameter.dtype)
        self.trajectory.observe_gradients()
        gradients = [p.grad.clone() for _, p in self.named]
        self.optimizer.step()
        self.trajectory.observe_step([group["lr"] for group in self.optimizer.param_groups])
        self.optimizer.zero_grad()
        return gradients

    def weights(self):
        return [p.detach().clone() for _, p in self.named]

    def holds(self, weights):
        return all(torch.equal(a, b) for a, b in zip(weights, self.weights()))

    def leap(self, gain):
        return kept_leap(self.trajectory, gain)


def kept_leap(trajectory, gain):
    """A leap that is kept and can still be undone."""
    leap = Leap(step=0, real_steps=trajectory.clock.steps_in_block)
    with trajectory.trial(leap):
        trajectory.leap(gain)
        trajectory.keep()
    return leap


def reference_memory(history, memory_steps=4):
    """Running mean until the memory is full, exponential average from then on."""
    memory = [torch.zeros_like(g) for g in history[0]]
    for count, gradients in enumerate(history, 1):
        weight = 1 / min(count, memory_steps)
        memory = [(1 - weight) * m + weight * g for m, g in zip(memory, gradients)]
    return memory


def test_gradient_memory_leap_equals_its_formula():
    toy = Toy()
    history = [toy.real_step() for _ in range(7)]
    before = toy.weights()
    shape = toy.leap(1.5)
    linear = 0.0
    for old, memory, (_, parameter) in zip(before, reference_memory(history), toy.named):
        lr = 1e-2 if parameter is toy.named[0][1] else 2e-2
        state = toy.optimizer.state[parameter]
        v_hat = state["exp_avg_sq"] / (1 - 0.999 ** state["step"].item())
        delta = -1.5 * 7 * lr * memory / (v_hat.sqrt() + 1e-8)
        linear -= (delta * memory).sum().item()
        torch.testing.assert_close(parameter.detach(), old + delta, rtol=1e-5, atol=1e-6)
    assert shape.predicted_decrease == pytest.approx(linear, rel=1e-4)
    norm = math.sqrt(sum((p.detach() - o).square().sum().item() for (_, p), o in zip(toy.named, before)))
    size = math.sqrt(sum(o.square().sum().item() for o in before))
    assert shape.relative_norm == pytest.approx(norm / size, rel=1e-4)


@pytest.mark.parametrize("at", ["snapshot", "in the middle", "behind the leap"])
def test_a_trial_that_raises_restores_the_weights(at, monkeypatch):
    toy = Toy(steps=5)
    before, calls, real = toy.weights(), [], trajectory_module._add

    def add(parameter, delta):
        calls.append(1)
        if at == "in the middle" and len(calls) == 2:
            raise MemoryError
        real(parameter, delta)

    monkeypatch.setattr(trajectory_module, "_add", add)
    if at == "snapshot":
        monkeypatch.setattr(toy.trajectory.context, "buffer", lambda *a, **k: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        with toy.trajectory.trial(Leap(step=0, real_steps=5)):
            toy.trajectory.leap(1.0)
            assert not toy.holds(before)
            raise MemoryError
    assert toy.holds(before)
    assert toy.trajectory.open is None


def test_one_leap_at_a_time():
    toy = Toy(steps=1)
    toy.leap(1.0)
    with pytest.raises(RuntimeError, match="is still open"):
        toy.leap(1.0)
    toy.trajectory.roll_back()
    with pytest.raises(RuntimeError, match="no leap"):
        toy.trajectory.roll_back()


def test_the_cap_limits_the_relative_norm():
    toy = Toy()
    toy.trajectory.max_relative_norm = 0.01
    for _ in range(5):
        toy.real_step()
    shape = toy.leap(100.0)
    assert shape.relative_norm == pytest.approx(0.01, rel=1e-3)
    assert 0 < shape.gain < 100.0


def test_a_leap_leaves_the_optimizer_alone():
    toy = Toy(steps=5)
    before = [{k: v.clone() for k, v in toy.optimizer.state[p].items()} for _, p in toy.named]
    toy.leap(1.0)
    for old, (_, parameter) in zip(before, toy.named):
        assert all(torch.equal(old[key], value) for key, value in toy.optimizer.state[parameter].items())


def test_none_changes_nothing():
    toy = Toy(direction=NoDirection, steps=3)
    before = toy.weights()
    assert toy.leap(5.0).relative_norm == 0.0
    assert toy.holds(before)
    assert toy.trajectory.bytes_held()["memory"] == 0


def test_host_buffers_leap_the_same():
    here, host = Toy(steps=6), Toy(steps=6, host=True)
    for toy in (here, host):
        toy.leap(1.0)
    for a, b in zip(here.weights(), host.weights()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer, supported", [(torch.optim.AdamW, True), (torch.optim.Adagrad, False)])
def test_support_is_read_from_the_state(optimizer, supported):
    toy = Toy(optimizer, steps=1)
    parameter = toy.named[0][1]
    state = toy.optimizer.state[parameter]
    assert has_second_moments(state, toy.optimizer.param_groups[0], parameter.shape) is supported


def test_parameters_without_gradients_do_not_move():
    toy = Toy()
    _, parameter = toy.named[1]
    for _ in range(3):
        for _, p in toy.named:
            p.grad = None if p is parameter else torch.ones_like(p)
        toy.trajectory.observe_gradients()
        toy.optimizer.step()
        toy.trajectory.observe_step([1e-2, 2e-2])
    before = parameter.detach().clone()
    toy.leap(1.0)
    assert torch.equal(parameter.detach(), before)


def test_state_of_another_model_is_refused():
    toy = Toy(steps=1)
    tensors, values = toy.trajectory.state_dict()
    tensors["memory.other"] = tensors.pop("memory.a")
    with pytest.raises(ValueError, match="belongs to other parameters"):
        Toy().trajectory.load_state_dict(tensors, values)
