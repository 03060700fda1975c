"""
The estimate of a setup's peak on device and host, whether it fits, and the nearest setup that fits.

One [`Estimator`] serves the trainer (for its live model) and `hf-hybrid plan` (for a model that is made from its config
and has no data). Both get the same plan for the same setup.

**Resident.** The device's peak is read from a trace of a step ([`trace`]): the largest moment, by category. Leaps add
their buffers, category `drift`: per trainable weight the direction's fp32 values and a snapshot. Adapters train
without leaps.

With `activation_checkpointing="auto"` as few layers are recomputed as fit ([`Estimator.lightest`]): the first ones.
They hold their inputs alone. When backward reaches them, the activations of all other layers are gone, so that one
layer in full is no new peak.

**Streamed.** Layers visit the device, so a trace of the resident model is not theirs. What a step holds is summed up
from the sizes of the layers and from the trace's activations ([`step_memory`]).

Where a model cannot be traced because its code needs values, activations are estimated from hidden size and vocabulary
instead. They enter the same sums, and the plan says that it was not traced.

**Models that are only evaluated** (a reference, teachers) lie on the device, or their layers on the host.

**Does it fit?** A limit of a GPU leaves room for the CUDA context and 5 % for the allocator (`Setup.margin`). Of the
candidates (resident; streamed; streamed with embeddings and head) the first that fits is chosen; a streamed one keeps
as many layers on the device as there is room for (all of them if that is enough for a walk micro-batch by micro-batch:
no layer travels then, so there is no need to hold the activations of all micro-batches at once). What is left keeps the
graphs of its last layers, which then are not recomputed ([`Estimator._keeping_graphs`]). Only if none fits, buffers of
leaps are kept on the host and no layer is fetched ahead. If even that does not fit, the refusal shows the table of the
plan that is over by least, and names the cheapest change of options that fits. Each option that helps has a cost: what
only takes time (a chunked loss, waiting for transfers, smaller micro-batches) comes before leaps, and these before
exactness. All combinations are tried in the order of their cost, so that the advice is known to work.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hf_hybrid.plan.accounting import ByteTable, ModelShape, format_bytes
from hf_hybrid.plan.setups import Setup, config_option
from hf_hybrid.plan.step_memory import StreamedStep, WeightBytes, estimated_activations, untraced_table
from hf_hybrid.plan.trace import TRACED, Activations, Tracer
from hf_hybrid.streaming.expert_streaming import frozen_experts
from hf_hybrid.streaming.layers import decoder_layers

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Plan:
    """A setup and the bytes that it holds at its peak."""

    setup: Setup
    shape: ModelShape
    mode: str  # "resident" or "streamed"
    resident_layers: int
    stream_embeddings: bool
    table: ByteTable  # on the device at its largest moment, on the host between steps
    stage: str = ""  # of a traced resident model, when the device holds most: "forward", "backward" or "update"
    traced: bool = False  # else activations are estimated from sizes
    parked: int = 0  # bytes of activations that wait on the host

    @property
    def peak_device_bytes(self) -> int:
        """Bytes of tensors on the device at its largest moment."""
        return self.table.total("device")

    @property
    def peak_host_bytes(self) -> int:
        """Bytes of tensors on the host."""
        return self.table.total("host")

    @property
    def categories(self) -> dict[str, dict[str, int]]:
        """`{category: {"device": bytes, "host": bytes}}`, and the same under `"total"`."""
        return self.table.to_dict()

    @property
    def recomputed_layers(self) -> int:
        """Layers of a model that is not streamed that are recomputed in backward, from the first on."""
        return self.setup.recomputed(len(self.shape.layers))

    @property
    def kept_graphs(self) -> int:
        """Passes through streamed layers that are not recomputed: so many of the last ones, one for a micro-batch."""
        return self.setup.kept_graphs or 0

    @property
    def buffers_on_host(self) -> bool:
        """Whether leaps, if there are any, keep their buffers on the host."""
        return self.setup.buffers_device == "cpu"

    @property
    def margin_bytes(self) -> int:
        """Device memory beside tensors: the CUDA context, and what the allocator rounds up and cannot use."""
        return self.setup.margin(self.peak_device_bytes)

    @property
    def device_shortfall(self) -> int:
        """Bytes by which the device is too small, with its margin; 0 if it is not."""
        vram = self.setup.vram
        return 0 if vram is None else max(self.peak_device_bytes + self.margin_bytes - vram, 0)

    @property
    def host_shortfall(self) -> int:
        """Bytes by which the host is too small; 0 if it is not."""
        return 0 if self.setup.ram is None else max(self.peak_host_bytes - self.setup.ram, 0)

    @property
    def shortfall(self) -> int:
        """Bytes by which device and host together are too small."""
        return self.device_shortfall + self.host_shortfall

    @property
    def fits(self) -> bool:
        """Whether device (with its margin) and host are large enough. Without a limit they are."""
        return not self.shortfall

    @property
    def options(self) -> dict[str, Any]:
        """The fields of `HybridConfig` that carry the plan out."""
        names = ["batch_size", "gradient_accumulation_steps", "autocast", "enable_predict", "optimizer_states"]
        names += ["memory", "chunked_loss"]
        streamed = ["offload_activations", "base_precision", "vram", "ram", "resident_layers", "accumulation_walk"]
        names += streamed if self.mode == "streamed" else ["activation_checkpointing"]
        mode = "stream" if self.mode == "streamed" else "off"
        if self.mode == "resident" and self.setup.evaluated_on_host:
            names, mode = [*names, "vram"], "auto"
        decided = replace(self.setup, memory=mode, resident_layers=self.resident_layers)
        options = (config_option(name, getattr(decided, name)) for name in names)
        return {"optim": "adamw_torch_fused", **{key: value for key, value in options if value is not None}}

    def to_dict(self) -> dict:
        """Plain values for JSON: what was decided, and the peaks expected by category."""
        streamed = self.mode == "streamed"
        return {
            "mode": self.mode,
            "resident_layers": self.resident_layers,
            "kept_graphs": self.kept_graphs,
            "prefetch_layers": self.setup.prefetch_layers if streamed else 0,
            "stream_embeddings": self.stream_embeddings,
            "optimizer_states": self.setup.optimizer_states,
            "base_precision": self.setup.base_precision if streamed else "same",
            "peak": self.table.to_dict(),
            "traced": self.traced,
        }

    def describe(self) -> str:
        """The plan in words, and the table of its bytes, which are estimates."""
        words = [f"optimizer states {self.setup.optimizer_states}"]
        if self.mode != "streamed" and self.recomputed_layers:
            words.append(f"{self.recomputed_layers} of {len(self.shape.layers)} layers recomputed")
        if self.mode == "streamed":
            words += [f"{self.resident_layers} resident layers", f"{self.setup.prefetch_layers} fetched ahead"]
            passes = len(self.shape.layers) * self.setup.micro_batches_in_flight
            words += [f"{self.kept_graphs} of {passes} passes through layers not recomputed"]
            one_by_one = self.setup.micro_batches_in_flight < self.setup.gradient_accumulation_steps
            words += ["micro-batches one by one"] * one_by_one
            words += ["embeddings and head streamed"] * self.stream_embeddings
            travel = self.shape.place(self.stream_embeddings, self.resident_layers).layers
            trained = any(layer.trainable for layer in travel)
            words += ["layers updated in the backward pass"] * (trained and self.setup.update_in_backward)
            words += ["frozen layers in int8"] * (self.setup.base_precision == "int8")
        words += ["evaluated models streamed"] * bool(self.setup.evaluated.layers and self.setup.evaluated_on_host)
        words += ["buffers of leaps on the host"] * (self.setup.leaps and self.buffers_on_host)
        return f"{self.mode}: {', '.join(words)}\nestimated bytes at the peak:\n{self.table}"


class Estimator:
    """Plans of one model, by its sizes and its tracer; without a tracer, activations are estimated from the sizes."""

    def __init__(self, shape: ModelShape, tracer: Tracer | None = None):
        self.shape, self.tracer = shape, tracer

    @property
    def reason_not_chunked(self) -> str | None:
        """Why the loss cannot be computed in chunks. Without a tracer this is not known, and `None`."""
        return None if self.tracer is None else self.tracer.reason_not_chunked

    def plan(self, setup: Setup) -> Plan:
        """Return the best plan. If nothing fits, raise [`PlanError`] with the bytes and the nearest plan that works."""
        plan = self.best(setup)
        if not plan.fits:
            raise self._refusal(setup, plan)
        return plan

    def best(self, setup: Setup) -> Plan:
        """The first candidate that fits, else the one that is over by least."""
        return _first_that_fits(plan for candidate in _placements(setup) for plan in self._candidates(candidate))

    def _candidates(self, setup: Setup) -> Iterator[Plan]:
        asks_for_streaming = setup.resident_layers is not None or setup.base_precision == "int8"
        if setup.memory == "off" or (setup.memory == "auto" and not asks_for_streaming):
            yield self.lightest(setup)
            if setup.memory == "auto" and setup.evaluated.layers:
                yield self.lightest(replace(setup, evaluated_on_host=True))
        if setup.memory == "off":
            return
        setup = replace(setup, evaluated_on_host=True)
        for ends in (False, True) if setup.stream_embeddings is None else (setup.stream_embeddings,):
            if setup.resident_layers is not None or setup.vram is None:
                yield self._keeping_graphs(self.streamed(setup, setup.resident_layers or 0, ends))
                continue
            layers = len(self.shape.layers)
            if setup.accumulation_walk == "auto" and not (ends or setup.offload_activations):
                one_by_one = self.streamed(replace(setup, accumulation_walk="micro_batch"), layers, False)
                if not one_by_one.device_shortfall:
                    yield self._keeping_graphs(one_by_one)
                    continue
            # As many as fit; none if even that does not.
            place = functools.partial(self.streamed, setup, stream_embeddings=ends)
            most = bisect.bisect_left(range(1, layers + 1), True, key=lambda count: place(count).device_shortfall > 0)
            yield self._keeping_graphs(place(most))

    def _keeping_graphs(self, plan: Plan) -> Plan:
        """The same with as many graphs as fit, unless the setup says how many, or that all layers are recomputed."""
        setup = plan.setup
        if setup.kept_graphs is not None or setup.vram is None or setup.activation_checkpointing is True:
            return plan
        if setup.offload_activations or plan.device_shortfall or not self._graph(setup):
            return plan

        def keeping(count: int) -> Plan:
            return self.streamed(replace(setup, kept_graphs=count), plan.resident_layers, plan.stream_embeddings)

        counts = range(1, len(self.shape.layers) * setup.micro_batches_in_flight + 1)
        return keeping(bisect.bisect_left(counts, True, key=lambda count: keeping(count).device_shortfall > 0))

    def lightest(self, setup: Setup) -> Plan:
        """Everything on the device; if the setup leaves that open, recomputed are as few layers as fit, or else all."""
        layers = len(self.shape.layers)
        if setup.recomputed_layers is not None or setup.activation_checkpointing != "auto":
            return self.resident(setup)

        def recomputing(count: int) -> Plan:
            return self.resident(replace(setup, recomputed_layers=count))

        some = self.tracer is not None and self.tracer.may_recompute_some()
        counts = range(layers + 1) if some else (0, layers)
        for count in (0, layers):
            if recomputing(count).fits == (count == 0):  # nothing has to be recomputed, or nothing helps
                return recomputing(count)
        return recomputing(counts[bisect.bisect_left(counts[:-1], True, key=lambda count: recomputing(count).fits)])

    def resident(self, setup: Setup) -> Plan:
        """Everything on the device."""
        shape, per = self.shape, WeightBytes(self.shape, setup)
        scratch = per.update_scratch + per.orthogonal_device
        traced = self._ask_tracer(lambda tracer: (tracer.peak(setup, scratch), tracer.states(setup)))
        waiting = max(len(shape.layers) - 2, 0) if setup.offload_activations else 0  # boundaries that lie on the host
        boundary = self._activations(setup).boundary if waiting else 0
        stage, parked = "", waiting * boundary
        if traced is None:
            table = untraced_table(shape, setup, self._activations(setup), parked)
        else:
            peak, states = traced
            stage, table = peak.stage, ByteTable()
            for category in TRACED:
                away = parked if category == "activations" else 0
                table.add(category, "device", max(peak.get(category) - away, 0))
            table.add("activations", "device", self._waiting(setup, 1))
            table.add("states", "device", states - math.ceil(shape.total.muon * per.stored.trainable))
            table.add("buffers", "device", setup.workspaces(False))
            per.add_leaps(table, shape.total)
        table.add("activations", "host", waiting * per.locked(boundary))
        per.add_beside(table)
        return Plan(setup, shape, "resident", len(shape.layers), False, table, stage, traced is not None, parked)

    def streamed(self, setup: Setup, resident_layers: int, stream_embeddings: bool) -> Plan:
        """Layers on the host but for so many, and maybe embeddings and head."""
        if self.tracer is not None and not self.tracer.excerpt.stands_for:
            raise ValueError("`memory=stream`: the model has no list of decoder layers. Set `memory=off`.")
        place = (resident_layers, stream_embeddings)
        graph = self._graph(setup) if setup.kept_graphs else 0
        step = StreamedStep(self.shape, setup, self._activations(setup), *place, self._adapter_copies(setup), graph)
        traced, table = self.tracer is not None, step.table()
        table.add("activations", "device", self._waiting(setup, setup.micro_batches_in_flight))
        step.per.add_beside(table)
        return Plan(setup, self.shape, "streamed", *place, table, traced=traced, parked=step.parked)

    def _waiting(self, setup: Setup, computed: int) -> int:
        return 0 if self.tracer is None else self.tracer.waiting(setup, computed)

    def _adapter_copies(self, setup: Setup) -> int:
        """Bytes of the 16-bit copies in which the trainer multiplies adapters, and of their gradients in fp32."""
        if self.tracer is None or not setup.autocast:
            return 0
        from hf_hybrid.phase_memory.adapter_products import lora_weights, plain_lora_layers

        excerpt, counts = self.tracer.excerpt, []
        for layer in decoder_layers(excerpt.model):
            counts.append(sum(w.numel() for module in plain_lora_layers(layer) for w in lora_weights(module)))
        return (2 + 4) * sum(counts[index] for index in excerpt.stands_for)

    def _graph(self, setup: Setup) -> int:
        """Bytes that a layer's graph keeps; 0 if that is not known, or its experts travel by their use."""
        if self.tracer is None or any(frozen_experts(decoder_layers(self.tracer.excerpt.model))):
            return 0
        return self._ask_tracer(lambda tracer: tracer.graph(setup)) or 0

    def _activations(self, setup: Setup) -> Activations:
        return self._ask_tracer(lambda tracer: tracer.activations(setup)) or estimated_activations(self.shape, setup)

    def _ask_tracer(self, question: Callable[[Tracer], Answer]) -> Answer | None:
        if self.tracer is None:
            return None
        try:
            return question(self.tracer)
        except Exception as error:  # whatever a model's own code makes of tensors without data
            logger.info("No step of this model can be traced (%r). Its activations are estimated from sizes.", error)
            self.tracer = None
            return None

    # Refusals.

    def _levers(self, setup: Setup) -> list[list[tuple[int, dict]]]:
        """Other options and their costs: speed is cheap, leaps and exact numbers are expensive."""
        has_base = any(layer.frozen for layer in self.shape.layers)
        is_adamw = setup.states_per_weight == 2 and self.shape.total.trainable and not self.shape.total.muon
        levers = [
            (not setup.chunked_loss and self.reason_not_chunked is None, 1, {"chunked_loss": True}),
            (setup.resident_layers is not None, 1, {"resident_layers": None}),
            (not setup.offload_activations, 2, {"offload_activations": True}),
            (setup.memory == "off" and not setup.activation_checkpointing, 2, {"activation_checkpointing": True}),
            (setup.memory == "off", 3, {"memory": "auto"}),
            (setup.micro_batches_in_flight > 1, 3, {"accumulation_walk": "micro_batch"}),
            (setup.enable_predict, 6, {"enable_predict": False}),
            (setup.optimizer_states == "exact" and is_adamw, 7, {"optimizer_states": "8bit"}),
            (setup.base_precision == "same" and has_base, 7, {"base_precision": "int8"}),
        ]
        sizes, size = [(0, {})], setup.batch_size // 2
        while size:
            steps = -(-setup.gradient_accumulation_steps * setup.batch_size // size)
            sizes.append((3 + len(sizes), {"batch_size": size, "gradient_accumulation_steps": steps}))
            size //= 2
        return [[(0, {}), (cost, change)] for helps, cost, change in levers if helps] + [sizes]

    def _nearest(self, setup: Setup) -> Plan:
        """Return the cheapest change of options that fits, or else the one with the smallest excess."""
        choices = sorted(itertools.product(*self._levers(setup)), key=lambda choice: sum(cost for cost, _ in choice))
        changes = ({name: value for _, change in choice for name, value in change.items()} for choice in choices)
        return _first_that_fits(self.best(replace(setup, **change)) for change in changes)

    def _refusal(self, setup: Setup, refused: Plan) -> PlanError:
        nearest = self._nearest(setup)
        changes = setup.changes(nearest.setup)
        # What a change leaves to the plan is named as the plan decided it.
        left = [name for name, value in changes.items() if value is None and nearest.mode == "streamed"]
        changes |= {name: getattr(nearest, name) for name in left}
        options = ", ".join(f"`{name}={value}`" for name, value in changes.items()) or "the options as they are"
        device, host = format_bytes(nearest.peak_device_bytes), format_bytes(nearest.peak_host_bytes)
        advice = "No change of options fits these limits. The smallest need found"
        advice = "Nearest plan that works" if nearest.fits else advice
        advice = f"{advice}: {options} (estimated: {device} on the device, {host} on the host)."
        error = refuse(self._reason(refused), refused, advice)
        if nearest.fits:
            error.nearest, error.changes = nearest, changes
        return error

    def _reason(self, refused: Plan) -> str:
        setup, parts, margin = refused.setup, [], refused.margin_bytes
        beside = f" and needs {format_bytes(margin)} beside" if margin else ""
        for place, held, more, short, name, limit in (
            ("device", refused.peak_device_bytes, beside, refused.device_shortfall, "vram_budget_gib", setup.vram),
            ("host", refused.peak_host_bytes, "", refused.host_shortfall, "host_budget_gib", setup.ram),
        ):
            if limit is not None and short:
                over = f"{format_bytes(short)} ({short} bytes) over `{name}={limit / 2**30:.3g}`"
                parts.append(f"the {place} would hold an estimated {format_bytes(held)}{more}, {over}")
        per, budget = WeightBytes(self.shape, setup), setup.device_budget
        slot = max(per.packed(layer.split()[0], int8=True) for layer in set(self.shape.layers))
        if refused.mode == "streamed" and budget is not None and slot > budget:
            parts.append(f"the largest layer alone takes {format_bytes(slot)}")
        return f"`memory={setup.memory}` cannot train this model: {'; '.join(parts)}."


def _placements(setup: Setup) -> Iterator[Setup]:
    """The setup, then with the buffers of leaps on the host, and with no layer fetched ahead."""
    places = ["auto", "cpu"] if setup.leaps else ["auto"]
    places = places if setup.buffers_device == "auto" else [setup.buffers_device]
    aheads = [setup.prefetch_layers] if setup.memory == "off" else sorted({setup.prefetch_layers, 0}, reverse=True)
    for ahead, place in itertools.product(aheads, places):
        yield replace(setup, buffers_device=place, prefetch_layers=ahead)


def _first_that_fits(plans: Iterator[Plan]) -> Plan:
    """Return the first plan that fits, else the one that exceeds its limits least."""
    least = next(plans)
    while not least.fits and (plan := next(plans, None)) is not None:
        if plan.shortfall < least.shortfall:
            least = plan
    return least


class PlanError(ValueError):
    """No plan fits. `plan` was refused; `nearest` works after `changes` (options and their values), if there is one."""

    def __init__(self, message: str, plan: Plan | None = None):
        super().__init__(message)
        self.plan = plan
        self.nearest: Plan | None = None
        self.changes: dict[str, Any] = {}


def refuse(reason: str, what: ModelShape | Plan, nearest: str | None = None) -> PlanError:
    """Return an error with `reason`, the bytes of a plan or of a model's weights, and `nearest`, which works."""
    if isinstance(what, Plan):
        refused, shown = what, what.describe()
    else:
        refused, shown = None, ByteTable()
        shown.add("weights", "device", what.total.bytes((what.trainable_bytes, what.element_bytes)))
    return PlanError(f"{reason}\n\n{shown}\n\n{nearest or 'No change of options is known to work.'}", refused)
