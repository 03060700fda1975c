"""One small training run: its settings, data and model, and a loop that leaps and can be copied."""

from __future__ import annotations

import copy
import functools
import math
import statistics
import unicodedata
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from hf_hybrid.world_model.observer import gradient_statistics
from hf_hybrid.world_model.signals import SignalObserver, StepSignals
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, get_scheduler

from benchmarks.texts import language_reference, standard_library
from hf_hybrid.leaps.directions import DIRECTIONS
from hf_hybrid.leaps.trajectory import Trajectory
from hf_hybrid.optimizers import MuonAdamW, muon_groups, split_parameters
from hf_hybrid.part import Phase
from hf_hybrid.run.record import Leap
from hf_hybrid.run.weights import TrainedWeights

STRIDE = 10
"""Real steps of a stretch."""
HELD_OUT, PROBE = 32, 16
PROBE_EVERY = 8
"""One leap in so many is probed; the package's budget makes probes about as rare."""
STATISTICS_EVERY = 8
"""Real steps between measurements of the optimizer's moments, as in the package."""
MAX_PREDICT = 8
TEXT_BYTES = 8_000_000
PRETRAINING_STEPS = 120


class DivergedError(Exception):
    """The loss or the gradients of a run are not finite."""


@dataclass(frozen=True)
class Policy:
    """
    When a run leaps and how far: after every `every` real steps between `first` and `last`, with the gain `gain *
    progress**power`.
    """

    every: int
    gain: float
    power: int
    worth: float
    """Predicted steps granted per real step at full gain; most policies grant none."""
    first: int
    last: int


@dataclass(frozen=True)
class Course:
    """A policy for the whole run (`None`: no leaps), and another one from step `first` to step `last`."""

    base: Policy | None
    other: Policy | None = None
    first: int = 0
    last: int = 0

    def at(self, step: int) -> Policy | None:
        policy = self.other if self.first <= step < self.last else self.base
        return policy if policy is not None and policy.first <= step < policy.last else None


@dataclass(frozen=True)
class Settings:
    """All that a run follows from."""

    index: int
    architecture: str
    layers: int
    hidden: int
    heads: int
    tied: bool
    dropout: float
    text: str
    text_before: str | None
    """The text that the model was trained on for a short while before a fine-tuning run; `None` from scratch."""
    rows: int
    """Number of different training sequences."""
    batch: int
    length: int
    steps: int
    optimizer: str
    betas: tuple[float, float]
    """SGD takes the first as its momentum."""
    weight_decay: float
    rate: float
    rate_over_reference: float
    schedule: str
    warmup: int
    clip: float
    direction: str
    memory_steps: int
    max_relative_norm: float
    confidence: float
    base: Policy | None


def reference_rate(optimizer: str, betas: tuple[float, float], hidden: int, fine_tuning: bool) -> float:
    """A learning rate near the best one of these small models."""
    rate = 0.5 * (1.0 - betas[0]) * 10 if optimizer == "sgd" else 6e-3 * math.sqrt(48 / hidden)
    return rate * (0.5 if fine_tuning else 1.0)


@functools.cache
def text_bytes(name: str) -> np.ndarray:
    """A text that every Python ships with: the standard library's source, its language reference, Unicode's names."""
    if name == "docs":
        text = "\n".join(language_reference())
    elif name == "names":
        text = "\n".join(unicodedata.name(chr(code), "") for code in range(0x2FFF))
    else:
        text = "\n".join(source for _, source in standard_library())
    return np.frombuffer(text.encode()[:TEXT_BYTES], dtype=np.uint8)


@dataclass(frozen=True)
class Material:
    """Disjoint sequences `[n, length]`, and the indices of those that make each batch, `order` `[steps, batch]`."""

    train: torch.Tensor
    order: torch.Tensor
    held_out: torch.Tensor
    probe: torch.Tensor


def make_material(settings: Settings, text: str, rows: int, steps: int) -> Material:
    """Cut a stretch of the text into sequences, shuffle them, and draw an order for each epoch."""
    rng = np.random.default_rng((settings.index, steps))
    source = text_bytes(text)
    rows = min(rows, len(source) // settings.length - HELD_OUT - PROBE)
    count = rows + HELD_OUT + PROBE
    start = rng.integers(0, len(source) - count * settings.length + 1)
    cut = source[start : start + count * settings.length].reshape(count, settings.length)
    sequences = torch.from_numpy(rng.permutation(cut).astype(np.int64))
    epochs = -(-steps * settings.batch // rows)
    order = np.concatenate([rng.permutation(rows) for _ in range(epochs)])[: steps * settings.batch]
    return Material(
        sequences[HELD_OUT + PROBE :],
        torch.from_numpy(order.reshape(steps, settings.batch)),
        sequences[:HELD_OUT],
        sequences[HELD_OUT : HELD_OUT + PROBE],
    )


def make_model(settings: Settings) -> torch.nn.Module:
    torch.manual_seed(settings.index)
    common = {"vocab_size": 256, "tie_word_embeddings": settings.tied, "bos_token_id": None, "eos_token_id": None}
    if settings.architecture == "gpt2":
        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), settings.dropout)
        sizes = {"n_embd": settings.hidden, "n_layer": settings.layers, "n_head": settings.heads, "n_positions": 128}
        config = CONFIG_MAPPING["gpt2"](**common, **sizes, **drop)
    else:
        config = CONFIG_MAPPING[settings.architecture](
            **common,
            hidden_size=settings.hidden,
            intermediate_size=8 * settings.hidden // 3,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads // 2,
            head_dim=settings.hidden // settings.heads,
            max_position_embeddings=128,
            pad_token_id=None,
        )
    return AutoModelForCausalLM.from_config(config)


def make_optimizer(settings: Settings, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer. Only matrices decay, as in `Trainer`."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if settings.optimizer == "muon":
        decay = {name for name, p in model.named_parameters() if p.ndim > 1}
        groups = muon_groups(model, decay, lr=settings.rate, weight_decay=settings.weight_decay)
        return MuonAdamW(groups, lr=settings.rate, betas=settings.betas)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.rate, momentum=settings.betas[0])
    return torch.optim.AdamW(groups, lr=settings.rate, betas=settings.betas, fused=True)


@functools.cache
def schedule_of(name: str, warmup: int, steps: int) -> tuple[float, ...]:
    """Learning rate of every step over the peak, from the schedule that `Trainer` would use."""
    more = {"scheduler_specific_kwargs": {"num_decay_steps": steps // 5}} if name == "warmup_stable_decay" else {}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps, **more)
    return tuple(scheduler.lr_lambdas[0](step) for step in range(steps))


def sequence_losses(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Mean next-byte loss of every sequence, `[n]`, in nats."""
    logits = model(rows, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return losses.view(len(rows), -1).mean(1)


@torch.no_grad()
def evaluate(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    model.eval()
    losses = sequence_losses(model, rows)
    model.train()
    return losses


def pretrain(settings: Settings, model: torch.nn.Module) -> None:
    """Train the model on the text of before a fine-tuning run."""
    steps = PRETRAINING_STEPS
    material = make_material(settings, settings.text_before, steps * settings.batch, steps)
    rate = reference_rate("adamw", (0.9, 0.99), settings.hidden, False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), fused=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1.0 - step / steps)
        sequence_losses(model, material.train[material.order[step]]).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@dataclass
class Stretches:
    """The record of each stretch, in order; `hf_hybrid.world_model.dynamics` explains features and actions."""

    features: list[list[float]] = field(default_factory=list)
    actions: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


@dataclass
class Counters:
    """Where a run stands, in plain numbers."""

    step: int = 0
    real: int = 0
    owed: int = 0
    """Predicted steps of the last leap that are still to be skipped."""
    leaps: int = 0
    phase: Phase = Phase.WARMUP
    steps_in_phase: int = 0
    steps_since_leap: int = 0
    correct: int = 0
    credit: float = 0.0
    gain: float = 0.0
    relative_norm: float = 0.0
    residual: float = 0.0
    moved: float = 0.0
    """Sum over the leaps of this stretch: gain times real steps of the leap's block."""
    predicted: int = 0
    """In the stretch."""
    losses: tuple[float, ...] = ()
    """In the stretch."""


class Training:
    """A run at one moment. [`advance`] makes a step; [`copy`] makes a second run that can take another course."""

    def __init__(self, settings: Settings, material: Material, model: torch.nn.Module):
        self.settings, self.material, self.model = settings, material, model
        self.optimizer = make_optimizer(settings, model)
        self.trajectory = Trajectory(
            TrainedWeights(model.named_parameters(), self.optimizer),
            direction=DIRECTIONS[settings.direction],
            matrices=frozenset(split_parameters(model)[0]),
            memory_steps=settings.memory_steps,
            max_relative_norm=settings.max_relative_norm,
        )
        self.observer = SignalObserver()
        self.now = Counters()
        self.schedule = schedule_of(settings.schedule, settings.warmup, settings.steps)

    @classmethod
    def start(cls, settings: Settings) -> Training:
        model = make_model(settings)
        model.train()
        if settings.text_before is not None:
            pretrain(settings, model)
        return cls(settings, make_material(settings, settings.text, settings.rows, settings.steps), model)

    def copy(self) -> Training:
        twin = Training(self.settings, self.material, copy.deepcopy(self.model))
        twin.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        twin.trajectory.load_state_dict(*copy.deepcopy(self.trajectory.state_dict()))
        twin.observer.load_state_dict(copy.deepcopy(self.observer.state_dict()))
        twin.now = replace(self.now)
        return twin

    @property
    def ended(self) -> bool:
        return self.now.step >= self.settings.steps

    def held_out_loss(self) -> float:
        return float(evaluate(self.model, self.material.held_out).mean())

    def advance(self, policy: Policy | None, stretches: Stretches) -> bool:
        """
        One step, a leap before it where it is due.

        Returns:
            `bool`: Whether it ended a stretch, which is then in `stretches`.

        Raises:
            DivergedError: If loss or gradients are not finite.
        """
        now = self.now
        probed = self._leap(policy) if policy is not None and self._is_due(policy) else None
        rate = self.settings.rate * self.schedule[now.step]
        self._enter(Phase.PREDICT if now.owed else self._real_phase())
        measured = {} if now.owed else self._real_step(rate)
        self._observe(rate, measured, probed)
        now.step += 1
        now.steps_in_phase += 1
        now.steps_since_leap += 1
        if now.owed:
            now.owed -= 1
            now.predicted += 1
            return False
        if len(now.losses) < STRIDE:
            return False
        self._close_stretch(stretches)
        return True

    def _real_phase(self) -> Phase:
        if self.now.step < max(round(0.05 * self.settings.steps), 2):
            return Phase.WARMUP
        return Phase.CORRECT if self.now.correct > 0 else Phase.FULL

    def _enter(self, phase: Phase) -> None:
        if phase is not self.now.phase:
            self.now.phase, self.now.steps_in_phase = phase, 0

    def _is_due(self, policy: Policy) -> bool:
        trajectory, now = self.trajectory, self.now
        if now.owed or self._real_phase() is Phase.WARMUP or now.step + 1 >= self.settings.steps:
            return False
        return trajectory.clock.steps_in_block >= policy.every and trajectory.clock.lr_sum > 0

    def _leap(self, policy: Policy) -> float | None:
        """Returns the held-out decrease in standard errors if the leap was probed."""
        now, real = self.now, self.trajectory.clock.steps_in_block
        share = (now.step / self.settings.steps) ** policy.power
        before = evaluate(self.model, self.material.probe) if now.leaps % PROBE_EVERY == 0 else None
        # As in the package: a block grown long without leaps is not repaid in one go.
        leap = Leap(step=now.step, real_steps=real)
        with self.trajectory.trial(leap):
            self.trajectory.leap(policy.gain * share * min(1.0, 2 * policy.every / real))
            self.trajectory.keep()
        self.trajectory.accept()  # policies differ in what they try; none takes a leap back
        now.leaps += 1
        now.gain, now.relative_norm = leap.gain, leap.relative_norm
        now.moved += leap.gain * real
        now.credit += policy.worth * real * share
        now.owed = min(int(now.credit), MAX_PREDICT, self.settings.steps - now.step - 1)
        now.credit -= now.owed
        now.steps_since_leap, now.correct = 0, max(policy.every // 3, 1)
        if before is None:
            return None
        decrease = (before - evaluate(self.model, self.material.probe)).tolist()
        mean, error = statistics.fmean(decrease), statistics.stdev(decrease) / math.sqrt(len(decrease))
        now.residual = mean / leap.predicted_decrease if leap.predicted_decrease > 0 else 0.0
        return mean / max(error, 1e-12)

    def _real_step(self, rate: float) -> dict:
        settings, now = self.settings, self.now
        torch.manual_seed(settings.index * 10_000 + now.real)  # dropout: the same in all branches
        rows = self.material.train[self.material.order[now.real]]
        loss = sequence_losses(self.model, rows).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip or math.inf)
        measured = {"loss": loss.item(), "gradient_norm": norm.item(), "statistics": None}
        if not math.isfinite(measured["loss"]) or not math.isfinite(measured["gradient_norm"]):
            raise DivergedError
        self.trajectory.observe_gradients()
        if now.real % STATISTICS_EVERY == 0:
            measured["statistics"] = gradient_statistics(self.trajectory)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.trajectory.observe_step([rate] * len(self.optimizer.param_groups))
        self.optimizer.zero_grad()
        now.real += 1
        now.correct = max(now.correct - 1, 0)
        now.losses += (measured["loss"],)
        return measured

    def _observe(self, rate: float, measured: dict, probed: float | None) -> None:
        now, settings = self.now, self.settings
        self.observer.observe(
            StepSignals(
                phase=now.phase,
                progress=(now.step + 1) / settings.steps,
                learning_rate=rate,
                rate_scale=1.0,
                max_grad_norm=settings.clip,
                **measured,
                steps_in_phase=now.steps_in_phase,
                steps_since_leap=now.steps_since_leap,
                rate_in_block=self.trajectory.clock.lr_sum,
                leap_gain=now.gain,
                leap_credit=now.credit,
                leap_decrease=probed,
                leap_kept=True if now.steps_since_leap == 0 and now.leaps else None,
                leap_residual=now.residual,
                leap_relative_norm=now.relative_norm,
                confidence=settings.confidence,
            )
        )

    def _close_stretch(self, stretches: Stretches) -> None:
        now, steps = self.now, self.settings.steps
        stretches.features.append(list(self.observer.features))
        rate = self.schedule[now.step - 1]
        stretches.actions.append([now.moved / STRIDE, now.predicted / STRIDE, now.step / steps, rate])
        stretches.losses.append(statistics.fmean(now.losses))
        stretches.steps.append(now.step)
        now.moved, now.predicted, now.losses = 0.0, 0, ()
