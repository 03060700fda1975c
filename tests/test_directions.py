"""Every way of predicting weights against a plain reference, and what holds for all of them."""

import json
import math
from copy import deepcopy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import hybrid_config, tiny_model
from test_trajectory import Toy
from transformers.optimization import Adafactor

from hf_hybrid import Direction, HybridTrainer
from hf_hybrid.assembly import leading_direction
from hf_hybrid.leaps.directions.nino import parameter_kind
from hf_hybrid.leaps.directions.preconditioners import preconditioner_of
from hf_hybrid.leaps.directions.registry import direction_factory
from hf_hybrid.leaps.trajectory import Trajectory
from hf_hybrid.optimizers import MuonAdamW

PUBLISHED = Path(__file__).resolve().parents[2] / "shared" / "nino"
DIRECTIONS = ("gradient_memory", "drift", "linear", "snoo", "rre", "nino", "none")


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


def options_of(name, checkpoint):
    """Options under which a direction is ready after a few steps."""
    options = {"leap_history_spacing": 1} if name in ("linear", "rre", "nino") else {}
    return options | ({"nino_checkpoint": checkpoint} if name == "nino" else {})


def factory_of(name, checkpoint):
    options = options_of(name, checkpoint)
    return direction_factory(
        name, spacing=options.get("leap_history_spacing"), nino_checkpoint=options.get("nino_checkpoint")
    )


class Course:
    """Weights that go where the test says, under learning rates that the test says."""

    def __init__(self, direction, *starts, memory_steps=20):
        self.parameters = [torch.nn.Parameter(torch.as_tensor(start).float().clone()) for start in starts]
        optimizer = torch.optim.SGD([{"params": [p]} for p in self.parameters], lr=0.1)
        named = [(f"layer{i}.weight", p) for i, p in enumerate(self.parameters)]
        self.trajectory = Trajectory(
            named, optimizer, direction=direction, memory_steps=memory_steps, max_relative_norm=1e6
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
    course = Course(direction_factory("linear", spacing=2), start, start[:2])
    way = 0.0
    for step in range(12):
        rate = 0.01 * (1 + step % 3)
        way += rate
        course.step((rate, 2 * rate), start + way * slope, start[:2] + 2 * way * slope[:2])
    before, lr_sum = course.weights(), course.trajectory.clock.lr_sums[0]
    assert course.trajectory.leap(3.0).norm > 0
    torch.testing.assert_close(course.weights()[0], before[0] + 3 * lr_sum * slope, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(course.weights()[1], before[1] + 6 * lr_sum * slope[:2], rtol=1e-5, atol=1e-5)


def test_linear_fits_real_steps_alone():
    """Least squares over the last states, with leaps in between that do not count as movement."""
    rng = np.random.default_rng(0)
    course = Course(direction_factory("linear", spacing=1, states=4), np.zeros(5))
    moves, rates = [], []
    for step in range(14):
        moves.append(rng.normal(size=5))
        rates.append(float(rng.uniform(0.1, 1.0)))
        course.step((rates[-1],), course.weights()[0] + torch.tensor(moves[-1]).float())
        if step in (5, 11):
            course.trajectory.leap(2.0)
            course.trajectory.settle()
            course.trajectory.forget()
    places, ways = np.cumsum([np.zeros(5), *moves], axis=0)[-4:], np.cumsum([0.0, *rates])[-4:]
    slope = np.polyfit(ways, places, 1)[0]
    before = course.weights()[0]
    course.trajectory.leap(1.0)
    expected = before + torch.tensor(slope * sum(rates[-2:])).float()
    torch.testing.assert_close(course.weights()[0], expected, rtol=1e-3, atol=1e-3)


def test_rre_finds_the_fixed_point_of_a_linear_iteration():
    matrix, fixed = torch.diag(torch.tensor([0.9, 0.5, -0.3])), torch.tensor([1.0, -2.0, 0.5])
    x = torch.zeros(3)
    course = Course(direction_factory("rre", spacing=1, rre_regularization=0.0), x[:2], x[2:])
    for _ in range(6):
        x = fixed + matrix @ (x - fixed)
        course.step((0.1, 0.2), x[:2], x[2:])
    assert (x - fixed).norm() > 0.3
    course.trajectory.leap(1.0)
    torch.testing.assert_close(torch.cat(course.weights()), fixed, rtol=1e-3, atol=1e-3)


def test_rre_damped_to_the_end_is_an_average_of_the_states():
    """With all the weight on the regularisation, every state but the last counts the same."""
    course = Course(direction_factory("rre", spacing=1, states=4, rre_regularization=1e9), np.zeros(3))
    places = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    for place in places:
        course.step((0.1,), place)
    course.trajectory.leap(1.0)
    torch.testing.assert_close(course.weights()[0], places[-4:-1].mean(0), rtol=1e-4, atol=1e-4)


def test_snoo_follows_the_published_recursion():
    generator = torch.Generator().manual_seed(0)
    course = Course(direction_factory("snoo", snoo_momentum=0.6, snoo_rate=0.7), torch.zeros(4), torch.zeros(2))
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
        course.trajectory.leap(1.0)
        course.trajectory.settle()
        course.trajectory.forget()
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
    monkeypatch.setattr("hf_hybrid.leaps.directions.nino.CHUNK", 7)  # several chunks, the last one shorter
    course = Course(direction_factory("nino", spacing=2, nino_checkpoint=path), states[0, :split], states[0, split:])
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
    course.trajectory.leap(1.0)
    expected = [nowcast(checkpoint, states[-5:, part], 4, ahead) for part in (slice(0, 20), slice(20, 30))]
    for weight, reference in zip(course.weights(), expected):  # vectors called `weight` belong to a norm
        torch.testing.assert_close(weight, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="needs the published checkpoints of NiNo beside the repository")
@pytest.mark.parametrize("name", ["nino_mlp.pt", "nino_mlp_h32.pt"])
def test_nino_with_the_published_networks(name, monkeypatch):
    states = 0.02 * torch.randn(1, 24, generator=torch.Generator().manual_seed(0)) + torch.linspace(0, 1, 5)[:, None]
    course = course_of_states(str(PUBLISHED / name), states, 0.0, 14, monkeypatch)
    before = course.weights()
    course.trajectory.leap(0.2)
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


# The optimizer's own rule.


def constant_gradient(optimizer, parameter, steps=3, direction="gradient_memory"):
    """Weights before and after the last of a few steps along one gradient, and the trajectory that saw them."""
    trajectory = Trajectory(
        [("a.weight", parameter)], optimizer, direction=direction, memory_steps=10, max_relative_norm=1e6
    )
    gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    for _ in range(steps):
        parameter.grad = gradient.clone()
        before = parameter.detach().clone()
        trajectory.observe_gradients()
        optimizer.step()
        trajectory.observe_step([optimizer.param_groups[0]["lr"]])
    return before, parameter.detach().clone(), trajectory


@pytest.mark.parametrize("shape", [(6, 20), (20, 6)])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("joined", [False, True])
def test_muon_leaps_as_muon_steps(shape, adjust, joined):
    parameter = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    if joined:
        optimizer = MuonAdamW([{"params": [parameter], "algorithm": "muon"}], lr=0.02, weight_decay=0.0)
        optimizer.param_groups[0]["adjust_lr_fn"] = adjust
    else:
        optimizer = torch.optim.Muon([parameter], lr=0.02, weight_decay=0.0, adjust_lr_fn=adjust, ns_steps=4)
    before, after, trajectory = constant_gradient(optimizer, parameter)
    trajectory.leap(0.5)
    # Orthogonalised is orthogonalised, whatever the momentum's length; three rates, gain one half. Torch's step is
    # in bf16, which costs it two to three per cent in five iterations.
    leap, expected = parameter.detach() - after, 1.5 * (after - before)
    assert (leap - expected).norm() < 0.04 * expected.norm()


@pytest.mark.parametrize("shape", [(6, 20), (2, 3, 4), (7,)])
@pytest.mark.parametrize("scaled", [False, True])
def test_adafactor_leaps_as_adafactor_steps(shape, scaled):
    parameter = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    optimizer = Adafactor([parameter], lr=0.01, relative_step=False, scale_parameter=scaled)
    before, after, trajectory = constant_gradient(optimizer, parameter)
    trajectory.leap(1.0)
    torch.testing.assert_close(parameter.detach() - after, 3 * (after - before), rtol=1e-3, atol=1e-5)


class SignDescent(torch.optim.Optimizer):
    """Moves every weight by its learning rate and remembers nothing."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


@pytest.mark.parametrize("make", [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adamax, SignDescent])
@pytest.mark.parametrize("shape", [(5, 7), (150, 101)])
def test_any_optimizer_leaps_as_far_as_it_went(make, shape):
    """Along the slow memory, and at gain 1 as far as the block; of large tensors the length is estimated."""
    parameter = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    optimizer = make([parameter], lr=0.01)
    assert preconditioner_of(optimizer, {}, optimizer.param_groups[0], parameter.shape) is None
    _, start, trajectory = constant_gradient(optimizer, parameter, steps=1)
    for _ in range(4):
        trajectory.observe_gradients()
        optimizer.step()
        trajectory.observe_step([0.01])
    end = parameter.detach().clone()
    shape_of_leap = trajectory.leap(1.0)
    is_small = parameter.numel() <= 4096
    assert shape_of_leap.norm == pytest.approx((end - start).norm().item(), rel=1e-4 if is_small else 0.05)
    leap = parameter.detach() - end
    cosine = torch.nn.functional.cosine_similarity(leap.flatten(), parameter.grad.flatten(), dim=0)
    assert cosine.item() == pytest.approx(-1.0, abs=1e-4)
    assert shape_of_leap.linear_decrease > 0
    assert trajectory.bytes_held()["sample"] <= 4 * 4096


# What holds for every direction.


def toy_of(name, checkpoint, **kwargs):
    return Toy(direction=factory_of(name, checkpoint), **kwargs)


def advance(toy, steps):
    for _ in range(steps):
        toy.real_step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DIRECTIONS)
def test_rollback_is_exact_before_and_after_real_steps(name, dtype, checkpoint):
    toy = toy_of(name, checkpoint, dtype=dtype)
    advance(toy, 7)
    before = toy.weights()
    toy.trajectory.leap(0.5)
    assert name == "none" or any(not torch.equal(a, b) for a, b in zip(before, toy.weights()))
    toy.trajectory.roll_back()
    assert all(torch.equal(a, b) for a, b in zip(before, toy.weights()))
    advance(toy, 3)
    before = toy.weights()
    toy.trajectory.leap(0.5)
    toy.trajectory.settle()
    advance(toy, 2)
    toy.trajectory.roll_back()
    assert all(torch.equal(a, b) for a, b in zip(before, toy.weights()))


@pytest.mark.parametrize("name", ["linear", "rre", "nino"])
def test_steps_after_a_leap_that_was_undone_are_not_history(name, checkpoint):
    toys = [toy_of(name, checkpoint) for _ in range(2)]
    for toy, undone in zip(toys, (True, False)):
        advance(toy, 7)
        before = toy.weights()
        toy.trajectory.leap(0.5)
        if undone:
            toy.trajectory.settle()
            advance(toy, 3)
        toy.trajectory.roll_back()
        assert all(torch.equal(a, b) for a, b in zip(before, toy.weights()))
    (first, first_values), (second, second_values) = (toy.trajectory.state_dict() for toy in toys)
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    assert first_values["direction_state"] == second_values["direction_state"]


@pytest.mark.parametrize("name", DIRECTIONS)
def test_a_second_look_starts_anew(name, checkpoint):
    first, second = toy_of(name, checkpoint), toy_of(name, checkpoint)
    for toy in (first, second):
        advance(toy, 8)
    for gain in (2.0, -1.0, 0.5):
        shape = first.trajectory.leap(gain)
    assert shape == second.trajectory.leap(0.5)
    assert all(torch.equal(a, b) for a, b in zip(first.weights(), second.weights()))
    first.trajectory.max_relative_norm = 1e-6
    assert name == "none" or first.trajectory.leap(3.0).relative_norm == pytest.approx(1e-6, rel=1e-2)


def resumed(toy, fresh):
    """`fresh`, brought to where `toy` is by what a checkpoint holds."""
    advance(fresh, 1)
    fresh.optimizer.load_state_dict(deepcopy(toy.optimizer.state_dict()))
    for (_, there), (_, here) in zip(toy.named, fresh.named):
        here.data.copy_(there.data)
    tensors, values = toy.trajectory.state_dict()
    fresh.trajectory.load_state_dict({k: t.clone() for k, t in tensors.items()}, json.loads(json.dumps(values)))
    fresh.generator.set_state(toy.generator.get_state())
    return fresh


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("moment", ["before the first leap", "in a block", "while a leap is open"])
@pytest.mark.parametrize("name", DIRECTIONS)
def test_resume_is_bit_exact(name, moment, optimizer, checkpoint):
    toy = toy_of(name, checkpoint, optimizer=optimizer)
    advance(toy, 7)
    if moment != "before the first leap":
        toy.trajectory.leap(0.5)
        toy.trajectory.settle()
        advance(toy, 2)
    if moment == "in a block":
        toy.trajectory.forget()
        advance(toy, 1)
    copy = resumed(toy, toy_of(name, checkpoint, optimizer=optimizer))
    for t in (toy, copy):
        if moment == "while a leap is open":
            t.trajectory.roll_back()
        advance(t, 3)
        t.trajectory.leap(1.0)
        t.trajectory.settle()
        advance(t, 2)
        t.trajectory.forget()
        t.trajectory.leap(0.5)
    assert all(torch.equal(a, b) for a, b in zip(toy.weights(), copy.weights()))
    assert toy.trajectory.bytes_held() == copy.trajectory.bytes_held()


def test_another_direction_starts_anew(checkpoint):
    toy = toy_of("drift", checkpoint)
    advance(toy, 7)
    copy = resumed(toy, toy_of("rre", checkpoint))
    assert copy.trajectory.direction.name == "rre" and copy.trajectory.steps_in_block == toy.trajectory.steps_in_block
    advance(copy, 7)
    assert copy.trajectory.leap(1.0).norm > 0


def test_host_buffers_are_counted_and_give_the_same(checkpoint):
    for name in DIRECTIONS:
        here, there = (
            Trajectory(
                toy.named,
                toy.optimizer,
                direction=factory_of(name, checkpoint),
                memory_steps=4,
                max_relative_norm=10.0,
                host=host,
            )
            for toy, host in ((Toy(), False), (Toy(), True))
        )
        assert here.bytes_held() == there.bytes_held()
        states = {"linear": 5, "rre": 5, "nino": 5}.get(name, 0)
        assert here.bytes_held().get("history", 0) == states * 4 * (12 + 5 + 8)


def test_a_reset_forgets_what_leads_the_way(checkpoint):
    for name in DIRECTIONS:
        toy = toy_of(name, checkpoint)
        advance(toy, 7)
        toy.trajectory.reset_memory()
        kinds = toy.trajectory.direction.buffers
        assert all(not t.any() for kind in ("memory", "history") for t in kinds.get(kind, []))
        advance(toy, 7)
        assert toy.trajectory.ready and (name == "none" or toy.trajectory.leap(1.0).norm > 0)


# Through the trainer.


def train(folder, train_set, *, keyword=None, **overrides):
    options = {"max_steps": 36, "leap_memory_steps": 10, "probe_budget": 0.2, **overrides}
    trainer = HybridTrainer(tiny_model(), hybrid_config(folder, **options), train_dataset=train_set, direction=keyword)
    trainer.train()
    return trainer


class RandomDirection(Direction):
    """A control: noise, in the same place for the same leap."""

    def __init__(self, context, seed=0):
        super().__init__(context)
        self.seed, self.leaps = seed, 0

    def prepare(self):
        self.leaps += 1

    def displacement(self, index, out):
        generator = torch.Generator().manual_seed(1000 * self.leaps + index + self.seed)
        return out.normal_(generator=generator)

    def state_dict(self):
        return {"leaps": self.leaps}

    def load_state_dict(self, buffers, values):
        super().load_state_dict(buffers, values)
        self.leaps = values["leaps"]


@pytest.mark.parametrize("optim, layers, expected", [
    ("adamw_torch", True, "orthogonal"), ("sgd", True, "gradient_memory"), ("adamw_torch", False, "gradient_memory"),
])  # fmt: skip
def test_gain_and_memory_are_those_of_what_leads(optim, layers, expected, tmp_path, train_set):
    model = tiny_model()
    model.model.layers.requires_grad_(layers)
    trainer = HybridTrainer(model, hybrid_config(tmp_path, optim=optim), train_dataset=train_set)
    trainer.create_optimizer()
    assert leading_direction(trainer) == expected


def test_a_direction_of_the_user(tmp_path, train_set):
    first, second = (train(tmp_path, train_set, keyword=partial(RandomDirection, seed=seed)) for seed in (0, 1))
    assert first.hybrid_summary()["direction"] == "RandomDirection"
    assert first.hybrid_summary()["leaps"] and all(
        leap["relative_norm"] > 0 for leap in first.hybrid_summary()["leaps"]
    )
    assert not torch.equal(first.model.lm_head.weight, second.model.lm_head.weight)


# What is refused.


def test_a_name_is_no_direction_of_the_user(tmp_path, train_set):
    with pytest.raises(ValueError, match="`direction` must be a subclass of `Direction`.*got `'drift'`"):
        HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=train_set, direction="drift")
