"""AdamW with 8-bit moments: stochastic rounding, distance from exact AdamW, bytes, resume to the last bit."""

import builtins
import copy

import pytest
import torch
from conftest import ByteText, assert_same_weights, config_values, losses, tiny_model, weights
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.streaming import low_bit
from hf_hybrid.streaming.low_bit import AdamW8bit, stochastic_round_

torch.set_num_threads(1)
pytest.importorskip("bitsandbytes")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# Stochastic rounding.


@pytest.mark.parametrize("value", [1.001, -3.14159, 1e-20, -7.7e5])
def test_rounding_is_unbiased_and_goes_to_the_neighbours(value):
    source = torch.full((200_000,), value)
    rounded = stochastic_round_(torch.empty_like(source, dtype=torch.bfloat16), source, generator()).float()
    below, above = rounded.abs().min(), rounded.abs().max()
    assert below < abs(value) < above and len(rounded.unique()) == 2
    # Neighbours in bf16: their upper halves are consecutive.
    assert (above.view(torch.int32) - below.view(torch.int32)).item() == 1 << 16
    error = (rounded.double() - source.double()).mean().abs().item()
    step = (above - below).item()
    assert error < 4 * step / 2 / 200_000**0.5


def test_rounding_keeps_what_bf16_can_hold():
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rounded = stochastic_round_(torch.zeros_like(patterns), patterns.float(), generator())
    finite = ~patterns.isnan()
    assert torch.equal(rounded[finite], patterns[finite])
    assert rounded[~finite].isnan().all()


def test_rounding_of_nan_of_any_pattern_and_infinity():
    patterns = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert patterns.isnan().all()
    target = torch.zeros(4, dtype=torch.bfloat16)
    for seed in range(8):
        assert stochastic_round_(target, patterns, generator(seed)).isnan().all()
    infinite = torch.tensor([float("inf"), -float("inf")]).repeat(100)
    rounded = stochastic_round_(torch.zeros(200, dtype=torch.bfloat16), infinite, generator())
    assert torch.equal(rounded.float(), infinite)


def test_rounding_follows_its_generator_and_leaves_the_source():
    source = torch.randn(1000)
    before = source.clone()
    first, second, other = (
        stochastic_round_(torch.empty(1000, dtype=torch.bfloat16), source, generator(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert torch.equal(source, before)


def test_rounding_refuses_other_dtypes():
    with pytest.raises(ValueError, match="`target` must be bf16"):
        stochastic_round_(torch.empty(3), torch.empty(3))


# The optimizer on a small problem: a least-squares fit with noisy gradients.


class Problem:
    """Linear regression with a matrix (quantised states) and a bias (fp32 states); the same batches for everybody."""

    def __init__(self, dtype=torch.float32):
        draw = generator(3)
        self.truth = torch.randn(64, 96, generator=draw) / 8
        start = torch.randn(64, 96, generator=draw) / 8
        self.matrix = nn.Parameter(start.to(dtype))
        self.bias = nn.Parameter(torch.zeros(64, dtype=dtype))

    @property
    def parameters(self):
        return [self.matrix, self.bias]

    def gradients(self, step):
        inputs = torch.randn(32, 96, generator=generator(1000 + step))
        outputs = inputs @ self.matrix.float().T + self.bias.float()
        loss = (outputs - inputs @ self.truth.T - 0.5).square().mean()
        for parameter, gradient in zip(self.parameters, torch.autograd.grad(loss, self.parameters)):
            parameter.grad = gradient
        return loss.item()

    def train(self, optimizer, steps, first=0):
        losses = []
        for step in range(first, first + steps):
            losses.append(self.gradients(step))
            optimizer.step()
        return losses


SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}


def fitted(make, steps=200, dtype=torch.float32, **overrides):
    problem = Problem(dtype)
    return problem, problem.train(make(problem.parameters, **{**SETTINGS, **overrides}), steps)


def test_small_parameters_follow_torch_to_the_last_bit():
    ours, theirs = nn.Parameter(torch.ones(500)), nn.Parameter(torch.ones(500))
    first, second = AdamW8bit([ours], **SETTINGS), torch.optim.AdamW([theirs], foreach=False, **SETTINGS)
    for step in range(20):
        ours.grad = torch.randn(500, generator=generator(step))
        theirs.grad = ours.grad.clone()
        first.step()
        second.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_near_the_trajectory_of_exact_adamw(dtype):
    exact, exact_losses = fitted(torch.optim.AdamW)
    ours, losses = fitted(AdamW8bit, dtype=dtype)
    moved = (exact.matrix - Problem().matrix).norm()
    assert (ours.matrix.float() - exact.matrix).norm() < 0.05 * moved
    assert exact_losses[-1] < 0.1 * exact_losses[0]
    end, exact_end = sum(losses[-20:]), sum(exact_losses[-20:])
    assert abs(end / exact_end - 1) < 0.1


def test_small_updates_of_bf16_weights_add_up_only_with_stochastic_rounding():
    """Updates of 1e-4 on weights of 1: a fortieth of the distance between neighbours in bf16."""
    ends = {}
    for stochastic in (True, False):
        parameter = nn.Parameter(torch.ones(8192, dtype=torch.bfloat16))
        optimizer = AdamW8bit([parameter], lr=1e-4, weight_decay=0.0, stochastic_rounding=stochastic)
        for _ in range(100):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        ends[stochastic] = parameter.detach().float().mean().item()
    assert ends[True] == pytest.approx(0.99, abs=5e-4)
    assert ends[False] == 1.0


def test_weights_without_gradients_do_not_drift():
    parameter = nn.Parameter(torch.ones(64, 128))
    optimizer = AdamW8bit([parameter], lr=2e-3, weight_decay=0.0)
    for step in range(50):
        parameter.grad = torch.randn(64, 128, generator=generator(step))
        parameter.grad[1::2] = 0  # rows of tokens that do not occur, in blocks with others that do
        optimizer.step()
    assert (parameter[1::2] == 1).all() and (parameter[::2] != 1).all()


def test_bytes_of_the_states():
    problem = Problem()
    optimizer = AdamW8bit(problem.parameters)
    problem.train(optimizer, 1)
    held = {p: sum(t.nbytes for t in optimizer.state[p].values()) for p in problem.parameters}
    assert held[problem.matrix] / problem.matrix.numel() == pytest.approx(2 + 8 / 256, abs=0.01)
    assert held[problem.bias] == 64 * 8 + 4 + 8
    # Nobody may take codes for moments.
    assert not {"exp_avg", "exp_avg_sq"} & set(optimizer.state[problem.matrix])
    assert all(torch.is_tensor(t) for state in optimizer.state.values() for t in state.values())


# Resume and order.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_exact(dtype, tmp_path):
    whole, _ = fitted(AdamW8bit, 30, dtype, seed=5)
    half = Problem(dtype)
    optimizer = AdamW8bit(half.parameters, **SETTINGS, seed=5)
    half.train(optimizer, 15)
    torch.save({"weights": half.parameters, "optimizer": optimizer.state_dict()}, tmp_path / "half.pt")
    saved = torch.load(tmp_path / "half.pt", weights_only=True)
    resumed = Problem(dtype)
    for parameter, value in zip(resumed.parameters, saved["weights"]):
        parameter.data.copy_(value)
    optimizer = AdamW8bit(resumed.parameters, lr=1.0)  # everything comes from the checkpoint, the seed too
    optimizer.load_state_dict(saved["optimizer"])
    state = optimizer.state[resumed.matrix]
    assert state["exp_avg_8bit"].dtype == torch.uint8 and state["exp_avg_absmax"].dtype == torch.float32
    saved["optimizer"]["state"][0]["exp_avg_8bit"].zero_()  # what was loaded is a copy
    resumed.train(optimizer, 15, first=15)
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters, whole.parameters))


def test_steps_by_parts_in_any_order_are_the_same():
    whole, _ = fitted(AdamW8bit, 20, torch.bfloat16)
    parts = Problem(torch.bfloat16)
    base = AdamW8bit(parts.parameters, **SETTINGS)
    options = {key: value for key, value in base.param_groups[0].items() if key != "params"}
    for step in range(20):
        parts.gradients(step)
        for parameter in reversed(parts.parameters):
            clone = AdamW8bit([{"params": [parameter], **options}])
            clone.state = base.state
            clone.step()
    assert all(torch.equal(a, b) for a, b in zip(parts.parameters, whole.parameters))


def test_parameters_and_steps_and_seeds_have_random_bits_of_their_own():
    numbers = {low_bit._mixed(seed, p, step) % 2**32 for seed in range(5) for p in range(20) for step in range(20)}
    assert len(numbers) == 2000

    def after_one_step(seed):
        twins = [nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)) for _ in range(2)]
        for parameter in twins:
            parameter.grad = torch.ones_like(parameter)
        AdamW8bit(twins, lr=1e-3, seed=seed).step()
        return twins

    (first, second), (other, _) = after_one_step(0), after_one_step(1)
    assert not torch.equal(first, second) and not torch.equal(first, other)


def test_chunks_change_nothing_without_rounding(monkeypatch):
    whole, _ = fitted(AdamW8bit, 5)
    monkeypatch.setattr(low_bit, "CHUNK", 1024)
    parts, _ = fitted(AdamW8bit, 5)
    assert torch.equal(whole.matrix, parts.matrix) and torch.equal(whole.bias, parts.bias)


def test_weights_that_do_not_lie_in_one_piece():
    plain = nn.Parameter(torch.randn(64, 96, generator=generator()))
    turned = nn.Parameter(plain.detach().T.contiguous().T)
    assert not turned.is_contiguous()
    for parameter in (plain, turned):
        parameter.grad = torch.randn(64, 96, generator=generator(1))
        AdamW8bit([parameter]).step()
    assert torch.equal(plain, turned)


# Misuse.


def test_values_out_of_range_are_named():
    parameter = [nn.Parameter(torch.ones(3))]
    for name in ("lr", "eps", "weight_decay"):
        with pytest.raises(ValueError, match=f"`{name}` must not be negative, got -1"):
            AdamW8bit(parameter, **{name: -1})
    with pytest.raises(ValueError, match="`betas`"):
        AdamW8bit(parameter, betas=(0.9, 1.0))


def test_other_dtypes_are_refused():
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float16))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match="fp32 and bf16 weights, got `torch.float16`"):
        AdamW8bit([parameter]).step()


def test_the_state_of_another_optimizer_is_refused():
    problem = Problem()
    other = torch.optim.AdamW(problem.parameters)
    problem.train(other, 1)
    with pytest.raises(ValueError, match="written by another optimizer"):
        AdamW8bit(problem.parameters).load_state_dict(copy.deepcopy(other.state_dict()))


def test_without_bitsandbytes_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def fail(name, *args, **kwargs):
        if name.startswith("bitsandbytes"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(ImportError, match=r'pip install "hf-hybrid\[quantization\]"'):
        AdamW8bit([nn.Parameter(torch.ones(3))])


# In a Trainer.


def trainer(folder, **overrides):
    values = config_values(folder, max_steps=12, **overrides)
    model = tiny_model(hidden_size=64, intermediate_size=128).to(torch.bfloat16)
    optimizer = (AdamW8bit, {"lr": values["learning_rate"]})
    return Trainer(model, TrainingArguments(**values), train_dataset=ByteText(200), optimizer_cls_and_kwargs=optimizer)


def test_trainer_resumes_to_the_last_bit(tmp_path):
    whole = trainer(tmp_path, save_strategy="steps", save_steps=6)
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert any(state["exp_avg_8bit"].dtype == torch.uint8 for state in whole.optimizer.state.values() if len(state) > 4)
    resumed = trainer(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert_same_weights(weights(resumed.model), weights(whole.model))


# Of the options, streamed or not.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.long
def test_8bit_states_streamed_or_not(dtype, tmp_path, train_set):
    """The same update, on the device as units stream in or resident: the same weights."""
    found = []
    for memory in ("off", "stream"):
        model = tiny_model(num_hidden_layers=4, hidden_size=64, intermediate_size=128).to(dtype)
        config = HybridConfig(
            **config_values(tmp_path, max_steps=8, gradient_accumulation_steps=2),
            enable_predict=False, memory=memory, optimizer_states="8bit", accumulation_walk="micro_batch",
        )  # fmt: skip
        trainer = HybridTrainer(model, config, train_dataset=train_set)
        trainer.train()
        found.append(trainer)
    assert losses(found[0]) == losses(found[1])
    assert_same_weights(weights(found[0].model), weights(found[1].model))
    states = found[1].optimizer.optimizer.state
    assert any(value.dtype == torch.uint8 for state in states.values() for value in state.values())


def test_8bit_states_resume(tmp_path, train_set):
    options = {
        "max_steps": 8, "save_strategy": "steps", "save_steps": 4, "enable_predict": False, "memory": "stream",
        "optimizer_states": "8bit",
    }  # fmt: skip

    def make(folder):
        model = tiny_model(num_hidden_layers=4, hidden_size=64, intermediate_size=128).to(torch.bfloat16)
        return HybridTrainer(model, HybridConfig(**config_values(folder, **options)), train_dataset=train_set)

    whole, resumed = make(tmp_path / "whole"), make(tmp_path / "resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert_same_weights(weights(resumed.model), weights(whole.model))
