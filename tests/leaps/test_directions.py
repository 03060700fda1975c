"""`hf_hybrid/leaps/directions.py`: what holds for every direction, and a user's own."""

import json
from copy import deepcopy
from functools import partial

import pytest
import torch
from conftest import ByteText, hybrid_config, tiny_model, weights
from rig import trainers
from test_trajectory import Toy
from transformers import MixtralConfig, MixtralForCausalLM

from hf_hybrid import Direction, HybridTrainer, optimizers
from hf_hybrid.build import build_run, direction_of, make_plan
from hf_hybrid.leaps.directions import (
    DIRECTIONS,
    GradientMemory,
    NoDirection,
    Orthogonal,
    direction_class,
)
from hf_hybrid.leaps.leap import Leaps
from hf_hybrid.leaps.trajectory import Trajectory
from hf_hybrid.optimizers import orthogonalisation_flops, split_parameters
from hf_hybrid.part import Leap
from hf_hybrid.run.weights import TrainedWeights

EVERY = pytest.mark.parametrize("direction", DIRECTIONS.values(), ids=str)

# What holds for every direction.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY
def test_rollback_is_exact_at_once_and_after_real_steps(direction, dtype):
    toy = Toy(direction=direction, dtype=dtype, steps=7)
    before = toy.weights()
    with toy.trajectory.trial(Leap(0, 7)):
        toy.trajectory.leap(0.5)
        assert direction is NoDirection or not toy.holds(before)
    assert toy.holds(before)
    toy.advance(3)
    before = toy.weights()
    toy.leap(0.5)
    toy.advance(2)
    toy.trajectory.roll_back()
    assert toy.holds(before)


@EVERY
def test_a_leap_that_is_formed_again_starts_from_the_same_weights(direction):
    first, second = Toy(direction=direction, steps=8), Toy(direction=direction, steps=8)
    before = first.weights()
    with first.trajectory.trial(Leap(0, 8)), second.trajectory.trial(Leap(0, 8)):
        for gain in (2.0, -1.0, 0.5):
            first.trajectory.leap(gain)
        second.trajectory.leap(0.5)
        assert first.trajectory.open == second.trajectory.open and first.holds(second.weights())
        first.trajectory.max_relative_norm = 1e-6
        first.trajectory.leap(3.0)
        capped = first.trajectory.open.relative_norm
        assert direction is NoDirection or capped == pytest.approx(1e-6, rel=1e-2)
        first.trajectory.keep()
    first.trajectory.roll_back()
    assert first.holds(before)


def resumed(toy, fresh):
    """`fresh`, brought to the state of `toy` through what a checkpoint holds."""
    fresh.advance(1)
    fresh.optimizer.load_state_dict(deepcopy(toy.optimizer.state_dict()))
    for (_, there), (_, here) in zip(toy.named, fresh.named):
        here.data.copy_(there.data)
    tensors, values = toy.trajectory.state_dict()
    tensors, values = {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(values))
    fresh.trajectory.load_state_dict(tensors, values, deepcopy(toy.trajectory.open))
    fresh.generator.set_state(toy.generator.get_state())
    return fresh


@pytest.mark.parametrize("moment", ["before the first leap", "in a block", "before a roll back", "before a leap stays"])
@EVERY
def test_a_resumed_run_goes_on_bit_for_bit(direction, moment):
    toy = Toy(direction=direction, steps=7)
    if moment != "before the first leap":
        toy.leap(0.5)
        toy.advance(2)
    if moment == "in a block":
        toy.trajectory.accept()
        toy.advance(1)
    copy = resumed(toy, Toy(direction=direction))
    for t in (toy, copy):
        if moment == "before a roll back":
            t.trajectory.roll_back()
        t.advance(3)
        if moment == "before a leap stays":
            t.trajectory.accept()
        t.leap(1.0)
        t.advance(2)
        t.trajectory.accept()
        t.leap(0.5)
    assert toy.holds(copy.weights()) and toy.trajectory.bytes_held() == copy.trajectory.bytes_held()


@EVERY
def test_buffers_are_those_that_plans_count(direction):
    """On the host and beside the weights as many bytes."""
    here, there = (Toy(direction=direction, host=host).trajectory for host in (False, True))
    assert here.bytes_held() == there.bytes_held()
    toy = Toy(direction=direction, steps=8)
    toy.leap(0.5)
    held = toy.trajectory.bytes_held()
    buffers = sum(held.values()) - held["snapshot"] - held["scratch"]
    assert buffers <= direction_class(direction).values_per_weight * 4 * (12 + 5 + 8)


@EVERY
def test_a_reset_clears_the_memories_and_the_direction_learns_anew(direction):
    toy = Toy(direction=direction, steps=7)
    toy.trajectory.reset_memory()
    kinds = toy.trajectory.direction.buffers
    assert all(not t.any() for kind in ("memory", "history") for t in kinds.get(kind, []))
    toy.advance(7)
    assert toy.trajectory.direction.ready and (direction is NoDirection or toy.leap(1.0).relative_norm > 0)


def test_another_direction_starts_anew():
    toy = Toy(direction=GradientMemory, steps=7)
    copy = resumed(toy, Toy(direction=Orthogonal))
    assert copy.trajectory.direction.name == "orthogonal"
    assert copy.trajectory.clock.steps_in_block == toy.trajectory.clock.steps_in_block
    copy.advance(7)
    assert copy.leap(1.0).relative_norm > 0


# Through the trainer.


def train(folder, train_set, **options):
    return trainers.train(folder, **{"max_steps": 36, "probe_budget": 0.2, "train_dataset": train_set, **options})


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


@pytest.mark.parametrize("layers, expected", [(True, Orthogonal), (False, GradientMemory)])
def test_gradient_memory_leads_where_nothing_is_orthogonalised(layers, expected, tmp_path):
    model = tiny_model()
    model.model.layers.requires_grad_(layers)
    trainer = trainers.build(tmp_path, model=model, optim="adamw_torch")
    trainer.create_optimizer()
    assert direction_of(trainer, split_parameters(model)[0]) is expected


def test_a_direction_of_the_user(tmp_path, train_set):
    first, second = (train(tmp_path, train_set, direction=partial(RandomDirection, seed=seed)) for seed in (0, 1))
    summary = first.hybrid_summary()
    assert summary["direction"] == "RandomDirection"
    assert summary["leaps"] and all(leap["relative_norm"] > 0 for leap in summary["leaps"])
    assert not torch.equal(first.model.lm_head.weight, second.model.lm_head.weight)


class Steady(GradientMemory):
    gain, gain_power, memory_steps, values_per_weight = 0.5, 0.0, 7, 3.0


@pytest.mark.parametrize(
    "direction", [Steady, partial(Steady), lambda context: Steady(context)], ids=["class", "partial", "function"]
)
def test_attributes_of_a_direction_count(direction, tmp_path, train_set):
    """Its own gain, whatever the options' direction; before it is built only those of a class are known."""
    trainer = HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=train_set, direction=direction)
    trainer.create_optimizer_and_scheduler(36)
    trainer.state.max_steps = 36
    leaps = build_run(trainer).part(Leaps)
    assert leaps.gains.peak == 0.5 and leaps.gains.power == 0.0
    known = direction_class(direction)
    assert known is (Direction if "lambda" in str(direction) else Steady)
    assert leaps.trajectory.context.memory_steps == (7 if known is Steady else 6)
    assert make_plan(trainer, None).setup.values_per_weight == known.values_per_weight
    trainer.hybrid_args.leap_gain = 0.25
    assert build_run(trainer).part(Leaps).gains.peak == 0.25


def test_a_name_is_no_direction_of_the_user(tmp_path, train_set):
    with pytest.raises(ValueError, match="`direction` must be a subclass of `Direction`.*got `'none'`"):
        HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=train_set, direction="none")


# Orthogonal leaps.


def trained(optimizer, names, gain=3.0, model=None):
    """A tiny model after six steps, and how each of the directions moves its weights from there."""
    model, moved, memories = model or tiny_model(), {}, {}
    for name in names:
        twin = deepcopy(model)
        matrices = split_parameters(twin)[0]
        trajectory = Trajectory(
            TrainedWeights(list(twin.named_parameters()), made := optimizer(twin.parameters(), lr=1e-3)),
            direction=DIRECTIONS[name],
            matrices=matrices,
            memory_steps=10,
            max_relative_norm=10.0,
        )
        text = ByteText(48)
        for step in range(6):
            ids = torch.stack([text[i]["input_ids"] for i in range(8 * step, 8 * step + 8)])
            twin(input_ids=ids, labels=ids).loss.backward()
            trajectory.observe_gradients()
            made.step()
            trajectory.observe_step([1e-3])
            made.zero_grad()
        before = weights(twin)
        with trajectory.trial(Leap(6, real_steps=6)):
            trajectory.leap(gain)
            moved_to = weights(twin)
        moved[name] = {key: value - before[key] for key, value in moved_to.items()}
        memories[name] = dict(zip(trajectory.weights.names, trajectory.direction.buffers["memory"]))
    return moved, memories, list(matrices), gain * 6e-3


def newton_schulz(matrix):
    """Muon's iteration (Jordan et al., 2024) in fp64."""
    matrix = matrix / matrix.norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        square = matrix @ matrix.mT
        matrix = 3.4445 * matrix + (-4.7750 * square + 2.0315 * square @ square) @ matrix
    return matrix


def test_orthogonal_leaps_of_hidden_matrices_and_of_the_rest():
    moved, memories, matrices, way = trained(torch.optim.AdamW, ["orthogonal", "gradient_memory"])
    assert len(matrices) == 14 and way == pytest.approx(3.0 * 6e-3)
    for name, delta in moved["orthogonal"].items():
        if name not in matrices:
            assert torch.equal(delta, moved["gradient_memory"][name])
            continue
        root_mean_square = delta.square().mean().sqrt().item()
        assert root_mean_square == pytest.approx(0.2 * way, rel=0.3)
        expected = -0.2 * way * max(delta.shape) ** 0.5 * newton_schulz(memories["orthogonal"][name].double())
        assert (delta - expected).norm() < 0.03 * expected.norm()
        assert not torch.allclose(delta, moved["gradient_memory"][name], rtol=0.1)


@pytest.mark.parametrize("most", [1, 2**24], ids=["one expert at a time", "all"])
def test_orthogonal_leaps_of_each_expert(most, monkeypatch):
    monkeypatch.setattr(optimizers, "AT_ONCE", most)
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        )
    )  # fmt: skip
    moved, memories, _, way = trained(torch.optim.AdamW, ["orthogonal"], model=model)
    stacks = {name: delta for name, delta in moved["orthogonal"].items() if delta.ndim == 3}
    assert len(stacks) == 2 * 2
    for name, delta in stacks.items():
        expected = -0.2 * way * max(delta.shape[1:]) ** 0.5 * newton_schulz(memories["orthogonal"][name].double())
        for one, other in zip(delta, expected, strict=True):
            assert (one - other).norm() < 0.03 * other.norm()


def test_the_work_of_a_leap_counts_every_expert():
    assert orthogonalisation_flops(torch.Size([8, 30, 20])) == 8 * orthogonalisation_flops(torch.Size([20, 30])) > 0
