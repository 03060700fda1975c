"""
A run from its first step to its last: the list of its parts, the step under way, and the batches.

The trainer calls `begin`, then for each step `begin_step`, `count` for each micro-batch, `before_update` and
`after_update` around the optimizer, and `end_step`; in the end `end`. The run calls the parts (part.py explains the
hooks), keeps the record (record.py), and corrects Trainer's log for steps that were skipped.

Where no part needs loss and gradient norm of a step at once, the host does not wait for them: `read_later` takes the
place of `before_update`, the device decides whether the optimizer steps, and `settle` makes up for it in the next step.

The order of the list matters in two places. The monitor comes first: it judges the gradients before anybody uses them.
What scales the learning rate comes before the leaps, because it compares a gradient with what was known before it.

A run without phases (`enable_predict=False`) has parts too, the memory guard for example. Its monitor is missing, its
steps have no phase, and it leaves Trainer's log and batches alone.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy
import torch
from accelerate import PartialState, skip_first_batches
from accelerate.utils import reduce

from hf_hybrid.machine import PendingRead
from hf_hybrid.part import Action, Part, Phase, RealStep, Step, check_parts, listening, name_of
from hf_hybrid.run import generators
from hf_hybrid.run.monitor import DivergenceMonitor, TrainingDivergedError, overflowed
from hf_hybrid.run.rate import RateScale
from hf_hybrid.run.record import HOST_IS_LIMIT, RunRecord, Speed
from hf_hybrid.run.weights import TrainedWeights

logger = logging.getLogger(__name__)

NO_LEAPS = "No leaps are made: %s. Name a `direction` to make them all the same."
READ_EVERY = 5.0
"""Seconds of training between two readings of the device's share: the driver keeps samples of about ten."""

if TYPE_CHECKING:
    from hf_hybrid.forecast.final_loss import FinalLoss

P = TypeVar("P", bound=Part)
ABSENT: dict[str, Any] = {
    "direction": None,
    "planner": {},
    "buffer_bytes": {},
    "bytes_sent": 0,
    "learning_rate_scale": 1.0,
    "forecast": None,
}
"""Entries of the summary whose parts are not in the run."""


def survive_nothing(error: Exception, otherwise: str) -> None:
    """Raise `error`. A trainer with out-of-memory recovery passes its own function, which does `otherwise` instead."""
    raise error


@dataclass(eq=False)
class Run:
    """One run: its parts in the order in which they are called, the step under way, and the record."""

    parts: Sequence[Part] = ()
    _: KW_ONLY
    warmup: int | None = None
    """Steps of Warmup. `None` for a run without phases."""
    model: Any = None
    """As it is trained."""
    optimizer: Any = None
    """Unwrapped."""
    weights: TrainedWeights | None = None
    """What the optimizer moves. `None` in a run without phases."""
    feed: BatchFeed | None = None
    """The batches. `None`: they are Trainer's."""
    rate: RateScale | None = None
    """The part that scales the learning rate."""
    max_steps: int = 0
    decides_on_device: bool = False
    """Whether the optimizer leaves out a step by itself, where the device finds that it should."""
    diverged: Callable[[TrainingDivergedError], TrainingDivergedError] = lambda error: error
    """Returns an error that also says what is left to go on from."""
    no_leaps: str | None = None
    """Why no leaps are made, if that is known; `None` if they are."""
    survive: Callable[[Exception, str], None] = survive_nothing
    """Takes an exception from work that training can do without, and raises it unless it is an out-of-memory; the text
    says what is lost."""
    write: Callable[[dict], None] = lambda entry: None
    """Takes what became of each leap and each event of the monitor: `step` (1-based), and `leap` or `event`."""
    speed: Speed = field(default_factory=Speed)

    def __post_init__(self):
        self.record = RunRecord()
        self.counts: Counter[str] = Counter()
        """What parts count, on this process."""
        self._counts_before: Counter[str] | None = None
        """Before the step under way."""
        self.logged, self.trained = LoggedSteps(), LoggedSteps()
        self.step = Step(0)
        """The one under way; an empty one between steps."""
        self._unread: tuple[Step, PendingRead] | None = None
        """A step that is put off until its numbers are on the host, with them."""
        self.has_phases = self.warmup is not None
        """Whether training goes in phases, with leaps or without."""
        self.accumulations: set[int] = set()
        """Values of `gradient_accumulation_steps` so far: callbacks may change it."""
        self.phase: Phase | None = None
        """Of the step under way, or of the last one; `None` without phases and before the first."""
        self.last_loss: float | None = None
        """Training loss of the last real step whose gradients were used; `None` before the first."""
        self.steps_done = 0
        self.learning_rate = 0.0
        """The scheduled one of the last step."""
        self.later: list[Callable[[], Any]] = []
        """Work that can wait until the device is busy with the next micro-batch."""
        self.forecast: FinalLoss | None = None
        """The last one of the loss at the end of the run, if a part makes such."""
        self._scheduled_rates: list[float] = []
        self._announced = Phase.FULL if self.warmup == 0 else Phase.WARMUP
        self.last_phase = self._announced if self.has_phases else None
        self._ended: dict[str, Any] | None = None
        self._warned_of_no_label = False
        self._began_at = time.perf_counter()
        self.set_parts(self.parts)

    def set_parts(self, parts: Sequence[Part]) -> None:
        """Replace the list of parts. A hook is then called for those alone that do something in it."""
        self.parts = list(parts)
        hooks = [name for name, value in vars(Part).items() if callable(value) and not name.startswith("_")]
        self._hooks = {hook: listening(self.parts, hook) for hook in hooks}
        self.around_forward = bool(self._hooks["before_forward"] or self._hooks["after_backward"])
        """Whether any part does something around the forward pass of a micro-batch."""
        self._with_state = [(name_of(part), part) for part in self.parts if listening([part], "state_dict")]
        self.monitor: Any = self.part(DivergenceMonitor)
        self._in_time = listening([part for part in self.parts if part is not self.monitor], "before_update")
        at_once = [part for part in self.parts if part.needs_numbers]
        in_step = ("before_update", "after_update", "end_step", "decide")
        self.reads_later = self.decides_on_device and not any(listening(at_once, hook) for hook in in_step)
        """Whether the host reads loss and norm of a step in the next one, because nobody needs them before."""

    def replace(self, part: Part, others: Sequence[Part]) -> None:
        """Put other parts in the place of one, and begin them."""
        place = self.parts.index(part)
        self.set_parts([*self.parts[:place], *others, *self.parts[place + 1 :]])
        for other in others:
            other.begin(self)

    def part(self, kind: type[P]) -> P | None:
        """Return the part of a class, if the run has one."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of the parts."""
        for method in self._hooks[hook]:
            method(*args)

    @property
    def rate_scale(self) -> float:
        """Factor on the learning rate of the next real step."""
        return 1.0 if self.rate is None else self.rate.scale

    def phase_of(self, index: int) -> Phase | None:
        """Return the phase of a step in a run without leaps; those with leaps say it themselves."""
        if self.warmup is None:
            return None
        return Phase.WARMUP if index < self.warmup else Phase.FULL

    # The course of a run.

    def begin(self) -> None:
        """Begin all parts."""
        check_parts(self.parts)
        self.call("begin", self)

    def begin_step(
        self,
        index: int,
        batches: Sequence[Any] = (),
        items: Any = None,
        learning_rate: float = 0.0,
        on_host: Sequence[Any] | None = None,
        acts: str | None = None,
    ) -> Step:
        """Begin step `index` (0-based), with its batches and its scheduled learning rate, and return it."""
        self._began_at, self._counts_before = time.perf_counter(), self.counts.copy()
        speed = self.speed
        if speed.clock is None:
            speed.clock = self._began_at
            if speed.driver is not None:
                speed.read(keep=False)
        self.step = step = Step(index, learning_rate=learning_rate, batches=batches, items=items, acts=acts)
        step.on_host = batches if on_host is None else on_host
        self.learning_rate = learning_rate
        self.phase = step.phase = self.phase_of(index)
        for method in self._hooks["begin_step"]:
            method(step)
        self.phase = step.phase
        for batch in step.on_host if step.phase is not Phase.PREDICT and speed.tokens is not None else ():
            ids, mask = (batch.get("input_ids"), batch.get("attention_mask")) if isinstance(batch, Mapping) else (0, 0)
            if not torch.is_tensor(ids):
                speed.tokens = None
                break
            masked = torch.is_tensor(mask) and mask.shape == ids.shape
            speed.tokens = speed.tokens + ((mask != 0).sum() if masked else ids.numel())
        # After the leap, which may be worth no step, and which needs what parts put away in Predict.
        if step.phase is not self._announced and step.phase is not None:
            old, self._announced = self._announced, step.phase
            self.call("on_phase_change", old, step.phase)
        if self.feed is not None and step.phase is not Phase.PREDICT:  # which trains on none: they stay the next
            self.feed.begin(len(batches))
        return step

    def count(self, inputs: dict, loss: torch.Tensor) -> None:
        """Count one micro-batch whose gradients are computed; `loss` is its share of the loss of the step."""
        self.step.losses.append(loss)
        if self.has_phases:
            self.step.tokens += tokens_of(inputs)
        while self.later:
            self.later.pop(0)()

    def before_update(self, numbers: Sequence[float], step: Step | None = None, scaler: Any = None) -> bool:
        """
        Show the parts loss and gradients of the real step, the monitor first, which may raise `TrainingDivergedError`.
        Return whether the optimizer may step. If not, the caller must drop the gradients.

        The `numbers` are those of [`~hf_hybrid.run.monitor.numbers_of`]. A step in which no token has a label has no
        gradient, and the optimizer steps as with `Trainer`, but nothing can be learnt from it: the parts are not shown
        it. `step` is the one under way, or one that is over and was put off.
        """
        hooks = self._hooks["before_update"] if step is None else [self.monitor.before_update]  # others looked in time
        step, (loss, gradient_norm, has_loss) = cast("RealStep", step or self.step), numbers
        if has_loss and math.isfinite(loss) and scaler is not None and overflowed(gradient_norm, scaler):
            step.counts = False  # the scaler leaves the update out, and the parts are shown nothing
            return True
        if not has_loss:
            if not self._warned_of_no_label:
                logger.warning(
                    "Step %d: no token of the batch has a label (every label is -100), so that it has no loss and a "
                    "gradient of zero. The optimizer steps as with `Trainer`. Further such steps are not named. Check "
                    "how labels are masked, and whether `max_length` cuts off what has labels.",
                    step.index,
                )
            self._warned_of_no_label = True
            step.withheld = not math.isfinite(gradient_norm)
            return not step.withheld
        step.loss, step.gradient_norm = loss, gradient_norm
        for method in hooks:
            method(step)
        step.counts = not step.withheld
        return step.counts

    def read_later(self, numbers: torch.Tensor) -> None:
        """Show the parts the step later ([`settle`]): its `numbers` are on the device, which decides by itself."""
        self._unread = self.step, PendingRead(numbers)
        self.optimizer.found_inf = self.monitor.withheld(self.step, numbers)
        for method in self._in_time:
            method(self.step)

    def settle(self) -> None:
        """
        Do for the last step what was put off until its numbers are on the host. By now the device has the next step to
        compute; in front of a save or at the end it has not, and the host waits. May raise `TrainingDivergedError`.

        The rate learns before the next update, so it is the one that it would be.
        """
        if self._unread is None or self._unread[0] is self.step:
            return
        (step, numbers), self._unread = self._unread, None
        self.before_update(numbers.read(), step)
        if self.rate is not None:
            self.rate.end_step(step)
        self._follow(step)

    def _follow(self, step: Step) -> None:
        """Do what follows from loss and norm of a step that is over, in a run with phases."""
        if step.counts:
            self.last_loss = step.loss
        if step.verdict is not None and step.verdict.action is not Action.NONE:
            self.call("react", step, step.verdict)
        real, finite = step.phase is not Phase.PREDICT, step.loss is None or math.isfinite(step.loss)
        for steps in (self.logged, self.trained):
            steps.count(real=real, finite=real and finite)

    def scale_rates(self, groups: Sequence[dict[str, Any]]) -> None:
        """Scale the learning rate for one step of the optimizer. This is done here and nowhere else."""
        scale, self._scheduled_rates = self.rate_scale, []
        for group in groups:
            self._scheduled_rates.append(group["lr"])
            group["lr"] = group["lr"] * scale

    def after_update(self, groups: Sequence[dict[str, Any]], stepped: bool) -> None:
        """The optimizer `stepped` or not: tell the parts its learning rates, and take the scale out of them."""
        if stepped:
            rates = [float(group["lr"]) * group.get("rate_scale", 1.0) for group in groups]
            for method in self._hooks["after_update"]:
                method(self.step, rates)
        vars(self.optimizer).pop("found_inf", None)  # what the device decided
        # Schedulers of the chained kind compute the next rate from the last: leave them theirs.
        for group, rate in zip(groups, self._scheduled_rates):
            group["lr"] = rate

    def end_step(self) -> Step:
        """Close the step, and let the parts decide what comes next. Return the step that ended."""
        step, self._counts_before = self.step, None
        if self.feed is not None:
            self.feed.close()
        for method in self._hooks["end_step"]:
            method(step)
        phase = step.phase
        if phase is not None:
            # Not before the step ends: a checkpoint inside it is resumed at its beginning.
            record = self.record
            record.steps_by_phase[phase.value] += 1
            record.backward_passes += len(step.losses)
            record.backward_passes_avoided += step.skipped
            if self._unread is None:
                self._follow(step)
        for method in self._hooks["decide"]:
            method(step)
        if phase is not None:
            self.record.seconds_by_phase[phase.value] += time.perf_counter() - self._began_at
        speed, now = self.speed, time.perf_counter()
        if speed.clock is not None:
            speed.seconds, speed.clock = speed.seconds + now - speed.clock, now
            if speed.driver is not None and (not self.steps_done or now - speed.read_at >= READ_EVERY):
                speed.read(keep=self.steps_done > 0)  # the first step warms up
        self.last_phase, self.step, self.steps_done = phase, Step(step.index + 1), step.index + 1
        return step

    def before_export(self) -> None:
        """Weights are evaluated, saved or pushed: the parts put them in place, and the clock stops until a step."""
        self.settle()
        self._stop_clock()
        for method in self._hooks["before_export"]:
            method()

    def _stop_clock(self) -> None:
        speed = self.speed
        if speed.clock is not None:
            speed.seconds, speed.clock = speed.seconds + time.perf_counter() - speed.clock, None
            if speed.driver is not None:
                speed.read(keep=self.steps_done > 0)

    def end(self) -> None:
        """End the run. Its parts are released, and the summary stays."""
        self.call("end")
        self._ended = self.summary()
        self.set_parts(())
        self.model = self.optimizer = self.weights = self.feed = self.phase = self.last_phase = None
        self.step, self.has_phases, self.warmup, self.rate, self.later = Step(self.steps_done), False, None, None, []

    # Reports.

    def summary(self) -> dict[str, Any]:
        """Return the run so far as plain values; see [`RunRecord`]."""
        self.settle()
        if self._ended is not None:
            return self._ended
        summary: dict[str, Any] = {**self.record.summary(), **ABSENT, "no_leaps": self.no_leaps}
        summary |= self.speed.summary()
        for part in self.parts:
            summary.update(part.summary())
        return summary

    def amend_logs(self, step: int, logs: dict[str, Any]) -> None:
        """Correct Trainer's log entry, whose means count skipped steps as zeros, and let the parts add to it."""
        self.settle()
        if self.has_phases:
            if "loss" in logs:
                self.logged.correct_mean(logs, "loss")
                logs["learning_rate"] = self.learning_rate * self.rate_scale
                if not self.logged.last_was_real:
                    logs.pop("grad_norm", None)
                self.logged = LoggedSteps()
            self.trained.correct_mean(logs, "train_loss")
        if "train_runtime" in logs:
            self._end_clock()
        for method in self._hooks["log"]:
            method(step, logs)

    def _end_clock(self) -> None:
        """The training is over: add up what all processes counted, and say so if the host was the limit."""
        self._stop_clock()
        speed = self.speed
        if PartialState().num_processes > 1:
            count = torch.tensor(math.nan if speed.tokens is None else float(speed.tokens))
            total = reduce(count.to(PartialState().device), "sum").item()
            speed.tokens = None if math.isnan(total) else int(total)
        if speed.hint is not None:
            logger.warning(HOST_IS_LIMIT, *speed.hint)

    def tensors_held(self) -> list[torch.Tensor]:
        """Return what parts hold between steps beside model and optimizer."""
        return [tensor for part in self.parts for tensor in part.tensors_held()]

    # Saving.

    def state_dict(self) -> dict[str, Any]:
        """
        Return what a resumed run goes on from, bit for bit: JSON values and dictionaries of tensors. All processes must
        call this. Empty if no part has a state and there are no phases.
        """
        self.settle()
        states = {name: state for name, part in self._with_state if (state := part.state_dict())}
        if self.has_phases:
            states["run"] = {
                "announced": self._announced.value,
                "no_leaps": self.no_leaps,
                "last_loss": self.last_loss,
                "record": asdict(self.record),
            }
        counts = self.counts if self._counts_before is None else self._counts_before
        if any(counts.values()):
            states["run_counts"] = {"own": dict(counts)}
        if self.feed is not None:
            states["feed"] = self.feed.state_dict()
        return states

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what [`state_dict`] returned. A part that is not in it starts anew."""
        own = state.get("run")
        if own is not None and self.has_phases:
            self._announced, self.last_loss = Phase(own["announced"]), own["last_loss"]
            self.record.load_state_dict(own["record"])
        dict.update(self.counts, state.get("run_counts", {}).get("own", {}))
        if self.feed is not None and "feed" in state:
            self.feed.load_state_dict(state["feed"])
        self.call("resume", state)
        for part in list(self.parts):
            if name_of(part) in state:
                part.load_state_dict(state[name_of(part)])


# Log entries.


@dataclass
class LoggedSteps:
    """Steps since the last log entry, to correct means that count skipped steps as zeros."""

    real: int = 0
    """Steps that were not skipped."""
    finite: int = 0
    """Those of them whose loss was finite."""
    total: int = 0
    last_was_real: bool = True

    def count(self, *, real: bool, finite: bool) -> None:
        """Count one step, which has a finite loss or none."""
        self.real += real
        self.finite += finite
        self.total += 1
        self.last_was_real = real

    def correct_mean(self, logs: dict, key: str) -> None:
        """
        Turn the mean over all steps into the mean over the real ones. Drop it if there was none. If none of them had a
        finite loss it stays what `Trainer` logs: zero, unless `logging_nan_inf_filter=False`.
        """
        if key not in logs:
            return
        if self.finite:
            logs[key] *= self.total / self.real
        elif self.total and not self.real and math.isfinite(logs[key]):
            del logs[key]


# Batches.


class BatchFeed:
    """
    Hands out the batches of an epoch, in the order of `Trainer`'s own loader, of which some are fetched early.

    A batch stays in the queue until the step that trains on it is over. So a probe may look at the next ones, a skipped
    step, which trains on none, shows the next ones to subclasses, and a checkpoint that is saved inside a step counts
    that step's batches as not trained on yet.

    `Trainer` counts batches by steps when it resumes inside an epoch, and would skip those that were never trained on.
    The feed remembers how many were, and then reads from an iterator of its own.
    """

    def __init__(self):
        self.epoch = 0
        self.trained = 0
        """Batches of this epoch that steps were made with."""
        self.begun = False
        """Whether a step of this epoch is over; it may have been skipped."""
        self._queue: list = []
        self._under_way = 0
        self._source: Iterator | None = None

    def enter(self, epoch: int) -> None:
        """Begin epoch `epoch`, or continue it after a resume."""
        if epoch != self.epoch:
            self.epoch, self.trained, self.begun = epoch, 0, False
        self._queue, self._under_way, self._source = [], 0, None

    def read(self, dataloader) -> None:
        """Read the epoch after the batches that were trained on, with an iterator of our own."""
        own = skip_first_batches(dataloader, self.trained)
        for part in (own, getattr(getattr(own, "batch_sampler", None), "batch_sampler", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)
        self._source = iter(own)
        # Starting to iterate draws from the global generator, whose state Trainer restores before the first step: that
        # has to be over by then, also where the first steps take no batch.
        self.peek(1)

    def fetch(self, get: Callable[..., Any], epoch_iterator: Iterator, count: int, device: Any) -> tuple[list, Any]:
        """
        Return the next batches and their labels' count by `get`, which is `Trainer`'s `get_batch_samples`. They come
        from `Trainer`'s iterator of the epoch unless [`read`] made one of our own.

        A window that a stream ended in the middle of was trained on, though no step came of it.
        """
        if self._under_way:
            self.close()
        if self._source is None:
            self._source = epoch_iterator
        coming = self.peek(count)
        return get(iter(coming), len(coming), device) if coming else ([], None)  # a stream has ended

    def peek(self, count: int) -> list:
        """Return the next `count` batches, or as many as the epoch still has, and leave them in the queue."""
        source = () if self._source is None else self._source
        self._queue.extend(itertools.islice(source, max(count - len(self._queue), 0)))
        return self._queue[:count]

    def begin(self, count: int) -> None:
        """A step trains on the next `count` batches."""
        self._under_way = count

    def close(self) -> None:
        """The step is over."""
        del self._queue[: self._under_way]
        self.trained += self._under_way
        self._under_way, self.begun = 0, True

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "trained": self.trained, "begun": self.begun}

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.trained, self.begun = state["epoch"], state["trained"], state["begun"]


# The order of the data.
#
# Samplers draw the order of an epoch when its first batch is asked for: from a generator of their own, or from the
# global ones, which dropout and everything else has used since the run began. A new process has neither state, and
# would skip the first batches of another order. So a checkpoint has all generators as they were when its epoch began. A
# resume in the middle of an epoch sets them back, lets the sampler draw the same order again, and only then restores
# those of the moment of the save. At the end of an epoch the next one draws from generators as they are by then: the
# global ones are in Trainer's files, and those of samplers are here.
#
# What draws from the global generators later, with every batch (a collator that masks tokens, say), does so in turns
# with the model. A resume does not repeat that, and the run says so at its second step.


DRAWS_LATE = (
    "The sampler, the data set or the collator draws from the global random generators with every batch, in turns with "
    "the model. If this run is resumed in the middle of an epoch, its first batches will be others. A sampler that "
    "draws the whole order when an epoch begins, or from a generator of its own, resumes to the same bits."
)


class DataOrder(Part):
    """
    Keeps the generators that order the data in checkpoints. One of them is that of `place`, the device that computes.
    `tells` says whether this process writes to the log.
    """

    name = "order"

    def __init__(self, place: torch.device, tells: Callable[[], bool] = lambda: True):
        self.place, self.tells = place, tells
        self.epoch: int | None = None
        """The one under way."""
        self._began: dict[str, Any] = {}
        self._generators: dict[str, generators.RandomGenerator] = {}
        self._restored: dict[str, Any] | None = None
        self._windows, self._draws_late = 0, False

    def begin(self, run: Run) -> None:
        self.epoch, self._began, self._generators, self._restored = None, {}, {}, None

    def enter(self, epoch: int, dataloader: Any) -> None:
        """
        Note the state of all generators before an epoch is read, or restore it where a resumed run goes on inside this
        epoch. After a resume it may be called again until the first batch is read.
        """
        self.epoch, self._generators, self._windows = epoch, generators.generators_of(dataloader), 0
        if (restored := self._restored) is not None:
            inside = restored["epoch"] == epoch
            for name, state in restored["began" if inside else "now"]["generators"].items():
                if name in self._generators:
                    generators.restore_generator(self._generators[name], state)
            if inside:
                RandomStates.from_state_dict(restored["began"]["random"], self.place).restore()
        self._began = {"random": RandomStates.now(self.place).state_dict(), "generators": self._states()}

    @contextlib.contextmanager
    def reading(self) -> Generator[None]:
        """Context in which the batches of a step are read. Those of an epoch's second step should draw nothing more."""
        self._restored, self._windows = None, self._windows + 1  # what was restored holds for one epoch alone
        if self._windows != 2 or self._draws_late:
            yield
            return
        before = RandomStates.now(self.place)
        yield
        self._draws_late = not before.same_as(RandomStates.now(self.place))
        if self._draws_late and self.tells():
            logger.warning(DRAWS_LATE)

    def _states(self) -> dict[str, Any]:
        return {name: generators.generator_state(generator) for name, generator in self._generators.items()}

    def state_dict(self) -> dict[str, Any]:
        if self.epoch is None:
            return {}
        return {"own": {"epoch": self.epoch, "began": self._began, "now": {"generators": self._states()}}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state.get("own")  # none if the run had fewer processes


@dataclass
class RandomStates:
    """A snapshot of all random generators that a step may use: Python's, NumPy's, torch's on host and device."""

    python: tuple
    numpy: dict
    host: torch.Tensor
    device: torch.Tensor | None
    place: torch.device

    @classmethod
    def now(cls, place: torch.device) -> RandomStates:
        """Take the snapshot; `place` is the device that computes."""
        on_device = None if place.type == "cpu" else torch.get_device_module(place).get_rng_state(*_which(place))
        return cls(random.getstate(), numpy.random.get_state(legacy=False), torch.get_rng_state(), on_device, place)

    def restore(self) -> None:
        """Set the generators back."""
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.get_device_module(self.place).set_rng_state(self.device, *_which(self.place))

    def state_dict(self) -> dict[str, Any]:
        """Return the snapshot for a checkpoint: JSON values and tensors."""
        python, numpy_state = generators.with_tensors(self.python), generators.with_tensors(self.numpy)
        return {"python": python, "numpy": numpy_state, "host": self.host, "device": self.device}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], place: torch.device) -> RandomStates:
        """Return the snapshot that [`state_dict`] returned. One of another kind of device says nothing of this one."""
        python, numpy_state = generators.without_tensors(state["python"]), generators.without_tensors(state["numpy"])
        return cls(python, numpy_state, state["host"], None if place.type == "cpu" else state["device"], place)

    def same_as(self, other: RandomStates) -> bool:
        """Whether nothing was drawn between two snapshots."""
        device = self.device is None or other.device is None or torch.equal(self.device, other.device)
        return (
            device
            and self.python == other.python
            and torch.equal(self.host, other.host)
            and self.numpy["state"]["pos"] == other.numpy["state"]["pos"]
            and bool((self.numpy["state"]["key"] == other.numpy["state"]["key"]).all())
        )

    @contextlib.contextmanager
    def again(self) -> Generator[None]:
        """Repeat a computation with the same random numbers; afterwards the generators are as they were before."""
        current = RandomStates.now(self.place)
        self.restore()
        try:
            yield
        finally:
            current.restore()


LOOKS: ContextVar[bool] = ContextVar("looks", default=False)
"""Whether what is computed now is over, and no part of the training: inside of [`as_before`]."""


@contextlib.contextmanager
def as_before(model: torch.nn.Module, device: torch.device) -> Generator[None]:
    """
    Context without gradients after which modes, buffers (running means), random generators and the numbers that a
    module keeps (a counter of its calls) are as they were.
    """
    buffers = [
        (m._buffers, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None
    ]
    numbers, looked = [(module, _numbers(module)) for module in model.modules()], LOOKS.set(True)
    with RandomStates.now(device).again(), torch.no_grad():
        try:
            yield
        finally:
            LOOKS.reset(looked)
            for module, values in numbers:
                for name in _numbers(module).keys() - values.keys():
                    del vars(module)[name]
                vars(module).update(values)
            for of_module, name, buffer, value in buffers:
                of_module[name] = buffer.copy_(value)  # a forward pass may have put another tensor there


STAYS = "_output_capturing_hooks_installed"
"""Of transformers: without it hooks that are there would be installed again, and outputs collected twice."""


def _numbers(module: torch.nn.Module) -> dict[str, Any]:
    kinds = (bool, int, float)
    return {name: value for name, value in vars(module).items() if isinstance(value, kinds) and name != STAYS}


def _which(place: torch.device) -> tuple[torch.device, ...]:
    return () if place.type == "mps" else (place,)  # there is one only, and its functions take none


def tokens_of(inputs: Any) -> int:
    """Return the tokens in a batch: the elements of `input_ids`, or of the tensor that replaces it; 0 of raw rows."""
    if not isinstance(inputs, Mapping):
        return 0
    tokens = inputs.get("input_ids")
    if tokens is None:
        tokens = next((value for value in inputs.values() if getattr(value, "ndim", 0) >= 2), None)
    return 0 if tokens is None else tokens.shape[0] * tokens.shape[1]
