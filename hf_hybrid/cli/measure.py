"""
`hf-hybrid plan --measure`: seconds of a step on this GPU, from short trainings of the first layers of the model.

No data sheet and no model of a clock says how long a step takes: copies, kernels and the host overlap as they do in a
run, or they do not. So the trainer itself runs, with the options of the plan and random weights, on the first `n` and
the first `2n` layers. What the second takes more is the time of `n` layers in the middle of a step, and what the first
takes beyond that is everything else: embeddings, head, the beginning and the end of a pass. So with `L` layers

    t(L) = t(n) + (L - n) * (t(2n) - t(n)) / n

`n` is at least four, as fewer would leave a pass without a middle, and a multiple of the period in which kinds of
layers alternate. If a plan treats some layers otherwise (they live on the device beside streamed ones, or are not
recomputed), a further training of `n` layers, one for each of both, has some of them, and each is that much faster. A
model of `2n` layers or less is trained as it is.

One more step runs under torch's profiler, whose seconds of kernels and of copies in each direction are extrapolated in
the same way. The largest of the three bounds the step: it would be the time of a step that overlaps all it can.
"""

from __future__ import annotations

import copy
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, PrinterCallback, TrainerCallback
from transformers.initialization import no_init_weights

from hf_hybrid.compat import checkpointing_option
from hf_hybrid.config import HybridConfig
from hf_hybrid.machine import wait_for
from hf_hybrid.plan.planner import Planner
from hf_hybrid.plan.trace import Excerpt
from hf_hybrid.plan.ways import WayPlan
from hf_hybrid.trainer import HybridTrainer

STEPS = 4
"""Timed steps of a training. The step before them makes the optimizer's states, the one after them is profiled."""
FEWEST_LAYERS = 4
RANDOM = 2**22
"""Random numbers that are drawn; the weights repeat them, because drawing billions takes a minute on a host."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step. What the profiler did not see, on a device that it does not know, is 0."""

    seconds: float
    kernels: float = 0.0
    copies_in: float = 0.0
    copies_out: float = 0.0

    @property
    def bound(self) -> str:
        """What a step waits for that overlaps all it can; empty if the profiler saw nothing."""
        parts = {name: value for name, value in asdict(self).items() if name != "seconds" and value}
        return max(parts, key=parts.__getitem__, default="").replace("_", " ")


@dataclass(frozen=True)
class Measurement:
    """A measured plan. `trained` has the numbers of layers that were trained; memory is that of the largest of them."""

    step: StepTime
    tokens: int  # of a step
    trained: tuple[int, ...]
    device_bytes: int = 0  # at the peak; 0: not known
    planned_bytes: int = 0  # for the same layers; 0: the plan of a resident model is not made by the trainer

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"tokens_per_second": self.tokens / self.step.seconds, "bound": self.step.bound}


@dataclass(frozen=True)
class Run:
    """
    A training of the first `layers` layers, of which the plan treats the first or last `other` otherwise. `graphs`
    passes through streamed layers are not recomputed.
    """

    layers: int
    other: int = 0
    graphs: int = 0


def measure(
    planner: Planner, plan: WayPlan, prepare: Callable[[PreTrainedModel], nn.Module] = lambda model: model
) -> Measurement:
    """
    Train the first layers of a plan's model on this machine, and say how long a step of the whole model takes.

    `prepare` makes of a model what is trained, for example by adding adapters. Raises `ValueError` for a plan that
    cannot be measured, and `RuntimeError` if memory runs out.
    """
    if plan.way.kind == "QLoRA":
        raise ValueError("bitsandbytes packs a base as its weights are loaded, and a config has none")
    excerpt = Excerpt.of(planner.full_model(plan.way.weights))
    if not excerpt.stands_for:
        raise ValueError("the model has no list of decoder layers")
    layers = len(plan.shape.layers)
    first = layers_of_a_run(excerpt.stands_for)
    other = plan.resident_layers if plan.mode == "streamed" else 0
    if plan.mode != "streamed" and plan.recomputed_layers:
        other = layers - plan.recomputed_layers
    runs, graphs = [Run(first), Run(2 * first)], plan.kept_graphs
    if layers <= 2 * first:
        runs = [Run(layers, other, graphs)]
    else:
        runs += [Run(first, min(other, first))] * bool(other)
        runs += [Run(first, 0, min(graphs, first * plan.setup.micro_batches_in_flight))] * bool(graphs)
    measured = [train_layers(planner, plan, excerpt.listed, run, prepare) for run in runs]
    device_bytes, planned_bytes = measured[min(1, len(runs) - 1)][1:]
    times = [time for time, *_ in measured]
    whole = times[0] if len(runs) == 1 else extrapolated(runs, times, Run(layers, other, graphs))
    tokens = plan.setup.tokens * plan.setup.gradient_accumulation_steps
    return Measurement(whole, tokens, tuple(run.layers for run in runs), device_bytes, planned_bytes)


def layers_of_a_run(stands_for: Sequence[int]) -> int:
    """
    The fewest layers that a training should have: a multiple of the period in which kinds alternate.

    `stands_for` names the kind of each layer, as [`Excerpt`] does: the first and the last are kinds of their own.
    """
    between = stands_for[1:-1]
    period = next(n for n in range(1, len(stands_for) + 1) if between[n:] == between[: max(len(between) - n, 0)])
    return -(-FEWEST_LAYERS // period) * period


def extrapolated(runs: Sequence[Run], times: Sequence[StepTime], whole: Run) -> StepTime:
    """A step of the `whole` model; see the top of this file."""

    def value(name: str) -> float:
        few, many, *others = (getattr(time, name) for time in times)
        more = (whole.layers - runs[0].layers) * (many - few) / (runs[1].layers - runs[0].layers)
        for other, run in zip(others, runs[2:]):
            more += (other - few) * (whole.other / run.other if run.other else whole.graphs / run.graphs)
        return max(few + more, 0.0)

    return StepTime(**{field.name: value(field.name) for field in fields(StepTime)})


def train_layers(
    planner: Planner, plan: WayPlan, listed: frozenset[str], run: Run, prepare: Callable[[PreTrainedModel], nn.Module]
) -> tuple[StepTime, int, int]:
    """Train a few steps. Returns their time, the bytes of the device at the peak, and the bytes planned for them."""
    model = prepare(_model(planner, plan, listed, run.layers))
    options: dict[str, Any] = {**plan.options, "enable_predict": False}
    decided: dict[str, Any] = {"prefetch_layers": plan.setup.prefetch_layers}
    if plan.mode == "streamed":
        options["resident_layers"] = run.other
        decided |= {"stream_embeddings": plan.stream_embeddings, "kept_graphs": run.graphs}
    elif plan.recomputed_layers:
        options[checkpointing_option()] = "auto"
        decided["recomputed_layers"] = run.layers - run.other
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = HybridConfig(
            folder, max_steps=STEPS + 2, save_strategy="no", logging_strategy="no", report_to="none",
            disable_tqdm=True, out_of_memory="raise", **options,
        )  # fmt: skip
        config.plan_values = decided
        vocabulary, rows = planner.config.get_text_config().vocab_size, plan.setup.batch_size * (STEPS + 2)
        data = _RandomTokens(vocabulary, plan.setup.sequence_length, rows * plan.setup.gradient_accumulation_steps)
        trainer = HybridTrainer(model, config, train_dataset=data, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        if clock.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
        planned = trainer.memory.plan.peak_device_bytes if trainer.memory.streams else 0
    held = torch.cuda.max_memory_allocated() if clock.on_gpu else 0
    del trainer, model
    gc.collect()
    if clock.on_gpu:
        torch.cuda.empty_cache()
    return clock.time(), held, planned


def _model(planner: Planner, plan: WayPlan, listed: frozenset[str], layers: int) -> PreTrainedModel:
    """The first layers of the model, with weights that repeat a few random numbers."""
    config = copy.deepcopy(planner.config)
    text = config.get_text_config()
    for part in {id(part): part for part in (config, text)}.values():
        for name in listed & set(vars(part)):
            setattr(part, name, vars(part)[name][:layers])
    text.num_hidden_layers = layers
    with no_init_weights():
        dtype = getattr(torch, plan.way.weights)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.tie_weights()
    numbers = 0.02 * torch.randn(RANDOM, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            for piece in parameter.view(-1).split(RANDOM):
                piece.copy_(numbers[: len(piece)])
    return model


class _RandomTokens(Dataset):
    """Rows of random tokens, all of one length."""

    def __init__(self, vocabulary: int, length: int, rows: int):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (rows, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class _Clock(TrainerCallback):
    """
    Times all steps but the first and the last, which it profiles. It stops the host only before and after the timed
    steps, so that they overlap with each other as in a run.
    """

    def __init__(self):
        self.on_gpu = torch.cuda.is_available()
        self._begin = self._seconds = 0.0
        self._profiler: torch.profiler.profile | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        of_gpu = torch.profiler.ProfilerActivity.CUDA  # which a torch without CUPTI does not know
        if state.global_step == STEPS + 1 and of_gpu in torch.profiler.supported_activities():
            self._profiler = torch.profiler.profile(activities=[of_gpu])
            self._profiler.start()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in (1, STEPS + 1, STEPS + 2) and self.on_gpu:
            wait_for(args.device)
        if state.global_step == 1:
            self._begin = time.perf_counter()
        elif state.global_step == STEPS + 1:
            self._seconds = (time.perf_counter() - self._begin) / STEPS
        elif self._profiler is not None:
            self._profiler.stop()

    def time(self) -> StepTime:
        """What was measured."""
        seconds = {"kernels": 0.0, "copies_in": 0.0, "copies_out": 0.0}
        for event in self._profiler.key_averages() if self._profiler is not None else ():
            name = {"Memcpy HtoD": "copies_in", "Memcpy DtoH": "copies_out"}.get(event.key[:11], "kernels")
            if not event.key.startswith(("Memcpy DtoD", "Memset")):
                seconds[name] += event.self_device_time_total / 1e6
        return StepTime(self._seconds, **seconds)
