"""
Walk an accumulation window layer by layer: each layer computes all micro-batches before the next one is brought in.

With gradient accumulation, a window of J micro-batches would copy every layer in 2 J times: for each forward and each
backward pass. The bus is the bottleneck of streaming, so the loops are exchanged: for each layer, for each micro-batch.
Weights are then copied twice per optimizer step, whatever J is. The price is that the activations between two layers
exist for all micro-batches at once; they can be offloaded to the host meanwhile.

**Exchanging the loops without knowing the model.** What a model does between its layers (masks, positions, the head,
the loss) is its own code, and it calls the layers, not the other way round. So every micro-batch runs the model's own
forward, on a thread that stops wherever a streamed layer is called ([`_MicroBatch.wait_for`]). When all have stopped at
the same layer, it is brought in, and the caller's thread computes it for all of them in one loop. Then the threads go
on to the next layer, one after the other. Only one thread runs at a time, so this is a way to pause functions, not
parallelism; nothing in the model needs to be thread-safe. Micro-batches may differ in length.

**Exchanging the loops of the backward pass.** Autograd would run it per micro-batch, through all layers. So the graph
is cut at the layers. A layer runs without gradients, and its outputs enter the rest of the model as leaves. The loss's
own backward call, inside the micro-batch's turn, ends at those leaves and leaves its gradients there. After that, layer
calls are taken in reverse order: the layer is brought in, and for each micro-batch the call is repeated with gradients
and differentiated from the gradients of its outputs, which puts gradients on its inputs, the outputs of the layer
below. The random generators are set back for the repetition, so that dropout drops the same elements. A call that keeps
its graph ([`hf_hybrid.streaming.graphs`]) runs with gradients, enters the rest of the model as leaves all the same, and
is not repeated.

**Tensors between two layers** (a residual scale, the embeddings) have a graph of their own. When such a tensor enters
a layer it is cut as well, into the tensor and a leaf. As soon as the layer has put a gradient on the leaf, the piece in
between is differentiated down to the outputs of earlier layers. Pieces that depend on no layer, as the embeddings, wait
until the end and are differentiated once, since several layers may have used them.

**Passes without gradients** that come behind the first layer with gradients, those of a reference or a teacher, wait at
each layer too. If other micro-batches make none, or not now, a micro-batch computes its own alone. A loss switches
adapters around such a pass, so each micro-batch has its own choice of adapters in its turn ([`_Adapters`]). What a loss
computes before (it may generate) does not wait: micro-batches would draw random numbers in another order.

**Beside a micro-batch** a trainer may let such passes begin as soon as the micro-batch does ([`LayerWalk.beside`]), on
threads of their own. So a layer computes policy and reference in one visit, where both are one base. A pass goes on
before its micro-batch does, so what it found is there when the loss reads it.

**What cannot be walked.** Layers that pass tensors through an object (a cache, a dictionary) would go around the cuts.
So does a model that uses what it computed before its layers (embeddings) after them once more: the loss's backward call
frees the graph of it. Micro-batches may also call different layers. [`Window`] then drops the gradients of the window,
and walks micro-batch by micro-batch. What layers share beside their inputs and outputs shows in no cut: see
[`hf_hybrid.streaming.comparison`].
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from hf_hybrid.machine import copies_beside
from hf_hybrid.run.run import LOOKS, RandomStates
from hf_hybrid.streaming.comparison import CannotWalkError, difference
from hf_hybrid.streaming.layers import reason_not_walked
from hf_hybrid.streaming.streamer import LayerStreamer, autocast_now
from hf_hybrid.streaming.transfers import Event, HostBuffers, Transfers
from hf_hybrid.streaming.units import Unit, adapter_weights, as_plain

logger = logging.getLogger(__name__)

COLLECTOR = "output_collector"
"""The variable of transformers in which hooks inside of layers leave what a pass asks for (router logits)."""
OTHER_LAYERS = "The micro-batches of a window do not call the same layers in the same order."
Cut = tuple[Tensor, Tensor]
"""A tensor that was computed between layers, and the leaf that stands for it in the layers that it enters."""


class _Abandoned(BaseException):
    """Ends the threads of the other micro-batches after one failed."""


class _Output:
    """
    One output of a layer: a leaf that the rest of the model uses, where its gradient arrives.

    While it is parked on the host, the leaf lives only if something besides the next layer holds it.
    """

    def __init__(self, leaf: Tensor, transfers: Transfers, parking: Any):
        self._here: Tensor | None = leaf
        self._original = weakref.ref(leaf)
        self._transfers, self._parking = transfers, parking
        self._host: Any = None
        self._left: Event = None
        self._coming: Any = None

    def park(self) -> None:
        """Send the output to the host, if it has not gone."""
        if self._here is not None:
            self._host = self._parking.take(self._here)
            self._left = self._transfers.send(self._here.detach(), self._host)
            self._here = None

    def fetch(self) -> None:
        """Start to copy the output back to the device."""
        if self._here is None and self._coming is None:
            self._coming = self._transfers.fetch(self._host, after=self._left)

    def bring_back(self) -> Tensor:
        """Return a tensor to compute with, whose gradient counts for the output."""
        if self._here is None:
            self.fetch()
            self._here = self._coming.take().requires_grad_()
            self._parking.give_back(self._host)
        return self._here

    def take_gradient(self) -> Tensor | None:
        """Return the sum of the gradients over all uses, and drop it."""
        total = None
        # After parking there are two leaves: the copy that came back for the next layer, and the original, if the model
        # used it elsewhere too (a loss of hidden states, say) and its graph still holds it.
        for leaf in (self._here, self._original()):
            if leaf is not None and leaf.grad is not None:
                gradient, leaf.grad = leaf.grad, None
                total = gradient if total is None else total + gradient
        return total


@dataclass(eq=False)
class _Call:
    """One call of one layer by one micro-batch."""

    streamer: LayerStreamer
    unit: Unit
    with_graph: bool
    """Whether gradients are enabled: a backward pass may come to it."""
    function: Callable
    inputs: list
    """The arguments, flat. Behind the call outputs of earlier layers stand for themselves, so that they can leave."""
    structure: TreeSpec
    cuts: list[Cut]
    """Those that begin with this call."""
    context: contextvars.Context
    autocast: dict
    adapters: Any = None
    """Which adapters computed when it was made."""
    random_states: Any = None
    """From which it was computed."""
    outputs: list[_Output] = field(default_factory=list)
    results: dict[int, Tensor] | None = None
    """What the call computed, with its graph, if that is kept."""


class _MicroBatch(threading.Thread):
    """Runs one micro-batch up to the next streamed layer whenever it is its turn."""

    def __init__(self, function: Callable[[], Any], stream: torch.Stream | None):
        super().__init__(daemon=True)
        self.function, self.stream = function, stream
        self.calls: list[_Call] = []
        """Computed, and to be differentiated in reverse order."""
        self.waiting_for: _Call | None = None
        self.computed: Any = None
        """What that call has returned."""
        self.result: Any = None
        self.error: BaseException | None = None
        self.abandoned = False
        self.has_begun = False
        """It has come to a layer with gradients."""
        self.adapters: Any = None
        """Which ones compute, to the code of this micro-batch."""
        self.outputs: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """By the leaf that stands for it."""
        self.cuts: dict[int, Cut] = {}
        self._turn, self._parked = threading.Semaphore(0), threading.Semaphore(0)
        self._context, self._threads = contextvars.copy_context(), torch.get_num_threads()

    def advance(self) -> None:
        """Let the micro-batch run until it waits at a layer or is done."""
        if not self.is_alive():
            self.start()
        self._turn.release()
        self._parked.acquire()
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        self._turn.acquire()
        torch.set_num_threads(self._threads)
        if self.stream is not None:
            torch.accelerator.set_stream(self.stream)  # every thread begins with the first device, and its default one
        try:
            if not self.abandoned:
                self.result = self._context.run(self.function)
        except _Abandoned:
            pass
        except BaseException as error:
            self.error = error
        self._parked.release()

    def wait_for(self, call: _Call) -> Any:
        """Pause this thread while the walk computes a call, and return what that returned."""
        self.waiting_for = call
        self._parked.release()
        self._turn.acquire()
        # Nothing of the call may outlive its turn here: an activation would stay until the next layer.
        computed, self.computed, self.waiting_for = self.computed, None, None
        if self.abandoned:
            raise _Abandoned
        return computed


class _Adapters:
    """
    Which adapters of a model compute. A loss switches them off, or exchanges them, around the pass of its reference. So
    each micro-batch has its own choice while it is its turn.
    """

    NAMES = ("_disable_adapters", "_active_adapter", "_adapters_disabled", "active_adapter")

    def __init__(self, model: nn.Module):
        modules = [module for module in model.modules() if "_disable_adapters" in vars(module)]
        switched = [vars(module) for module in (*modules, *model.modules()) if modules]
        self._places = [(own, name) for own in switched for name in self.NAMES if name in own]
        configs = getattr(model, "peft_config", {}).values()
        self.are_any = bool(self._places or configs)
        self._parameters = [parameter for _, parameter in adapter_weights(model)] if self.are_any else []
        self._choice = self._look() if self.are_any else ([], [])
        self.in_place = not any(config.is_prompt_learning or config.is_adaption_prompt for config in configs)
        """Whether switching them exchanges no `forward`, which would be that of all micro-batches."""

    def _look(self) -> tuple[list, list[bool]]:
        with as_plain():
            return [own[name] for own, name in self._places], [p.requires_grad for p in self._parameters]

    def now(self) -> Any:
        # They are switched together, so two places tell whether they were.
        if any(own[name] != before for (own, name), before in zip(self._places[:2], self._choice[0])):
            self._choice = self._look()
        return self._choice

    def choose(self, choice: Any) -> None:
        if choice is not self.now():
            self._choice = choice
            for (own, name), value in zip(self._places, choice[0]):
                own[name] = value
            with as_plain():
                for parameter, trains in zip(self._parameters, choice[1]):
                    parameter.requires_grad_(trains)


@dataclass
class LayerWalk:
    """
    Walks windows through the layers of a streamer. The activations between layers wait in `parking`, or on the device.
    Passes without gradients through its layers, or through those of the models that are only `evaluated`, are walked
    too: each layer comes in once for all micro-batches.
    """

    streamer: LayerStreamer
    parking: HostBuffers | None = None
    evaluated: LayerStreamer | None = None
    several: bool = False
    """Whether the window has more than one micro-batch."""
    others: list[_MicroBatch] = field(default_factory=list)
    """Passes beside micro-batches, until they are over."""

    def __post_init__(self):
        adapters = _Adapters(self.streamer.model)
        self.adapters: Any = adapters if adapters.are_any else None
        self.advance = _MicroBatch.advance if self.adapters is None else self._advance

    def run(self, functions: Sequence[Callable[[], Any]], begun: bool = False) -> list[Any]:
        """
        Compute every micro-batch and its gradients: each function is forward, loss and backward of one. Returns their
        results. `begun`: they are passes without gradients alone, maybe inside of a micro-batch of another walk.

        Raises:
            CannotWalkError: If the micro-batches do not call the same layers in the same order, a layer takes something
                that is neither tensor nor plain value, or what is computed before the layers is used after them too.
                Some gradients may have been accumulated then.
        """
        device = self.streamer.device
        stream = torch.accelerator.current_stream(device) if copies_beside(device) else None
        jobs = [_MicroBatch(function, stream) for function in functions]
        self.several = len(jobs) > 1
        streamers = [streamer for streamer in (self.streamer, self.evaluated) if streamer is not None]
        outer, before = self.streamer.walk, self.adapters and self.adapters.now()
        for streamer in streamers:
            streamer.walk = self
        for job in jobs:
            job.adapters, job.has_begun = before, begun
        try:
            walking = list(jobs)
            for way in (self._forward, self._backward):
                way(walking)
                for unit in self.streamer.ends:  # the head, then the embeddings: all micro-batches have added to them
                    self.streamer.collect(unit)
        except BaseException:
            # Activations that leave, or come back to nobody, are still copied: their memory goes with this error.
            for streamer in streamers:
                streamer.transfers.finish()
            if self.parking is not None:
                self.parking.take_back()
            raise
        finally:
            for job in [*jobs, *self.others]:
                if job.waiting_for is not None:
                    job.abandoned = True
                    with contextlib.suppress(BaseException):
                        self.advance(job)
            for streamer in streamers:
                streamer.walk = outer
            if self.adapters is not None:
                self.adapters.choose(before)
        return [job.result for job in jobs]

    def _forward(self, jobs: list[_MicroBatch]) -> None:
        for job in jobs:
            self.advance(job)
        jobs[:] = [job for job in jobs if job.waiting_for is not None]  # without the rest, which compute nothing
        for other in self.others:
            self.advance(other)
        while waiting := [(job, job.waiting_for) for job in self.others + jobs if job.waiting_for is not None]:
            if len(waiting) < len(self.others) + len(jobs) or len({call.unit for _, call in waiting}) > 1:
                # A pass without gradients that others do not make, or not now.
                without = [(job, call) for job, call in waiting if not call.with_graph]
                waiting = [(job, call) for job, call in without if call.unit is without[0][1].unit]
                if not waiting or (self.others and any(job.waiting_for is None for job in jobs)):
                    raise CannotWalkError(OTHER_LAYERS)
            calls = [call for _, call in waiting]
            streamer, unit = calls[0].streamer, calls[0].unit
            try:
                for job, call in waiting:
                    if not unit.bound:  # at first, or taken by a pass without gradients inside a micro-batch
                        streamer.bring_in(unit)
                    if self.adapters is not None:
                        self.adapters.choose(call.adapters)
                    job.computed = call.context.run(self._compute, job, call)
            finally:
                streamer.release(unit)
            if self.parking is not None:
                for output in _boundaries(calls):
                    output.park()
            head = streamer.behind.get(unit)
            for job, _ in waiting:
                if head is not None and not head.bound:  # the micro-batch before has gone on to embeddings
                    streamer.bring_in(head)
                self.advance(job)
            if self.others:
                self.others = [other for other in self.others if other.waiting_for is not None]
        self.streamer.end_backward()

    def _advance(self, job: _MicroBatch) -> None:
        """Let a micro-batch run with the adapters that it chose last."""
        self.adapters.choose(job.adapters)
        try:
            job.advance()
        finally:
            job.adapters = self.adapters.now()

    def beside(self, function: Callable[[], Sequence[Tensor]], count: int) -> list[Tensor] | None:
        """
        Let a function of a micro-batch, which computes passes without gradients, run beside the rest of it. Return as
        many tensors as it does, which are filled when it is done. `None` if that cannot be.
        """
        job = threading.current_thread()
        if not isinstance(job, _MicroBatch) or not self._in_place:
            return None
        later = [torch.empty(0, device=self.streamer.device) for _ in range(count)]

        def compute() -> None:
            for tensor, found in zip(later, function(), strict=True):
                tensor.data = found

        self.others.append(other := _MicroBatch(compute, job.stream))
        other.has_begun, other.adapters = True, self.adapters and self.adapters.now()
        return later

    # A layer is called.

    @property
    def _in_place(self) -> bool:
        return self.adapters is None or self.adapters.in_place

    def takes(self, args: tuple, kwargs: dict) -> bool:
        """
        Whether a call without gradients waits for those of other micro-batches. What comes before the first pass with
        gradients does not: a loss may generate there, and draw random numbers.
        """
        job = threading.current_thread()
        begun = isinstance(job, _MicroBatch) and job.has_begun and not LOOKS.get()
        waits = begun and self._in_place and (self.several or bool(self.others))
        return waits and _side_channel((*args, *kwargs.values())) is None

    def call(self, streamer: LayerStreamer, unit: Unit, function: Callable, args: tuple, kwargs: dict):
        """Replace the layer's forward, on a micro-batch's thread."""
        job = threading.current_thread()
        if not isinstance(job, _MicroBatch):
            raise RuntimeError(f"`{unit.name}` is called on a thread that computes no micro-batch of the window.")
        if (found := _side_channel((*args, *kwargs.values()))) is not None:
            kind = type(found).__name__
            raise CannotWalkError(f"`{unit.name}` takes a `{kind}`, through which layers may share tensors.")
        inputs, structure = tree_flatten((args, kwargs))
        cuts: list[Cut] = []
        with_graph = torch.is_grad_enabled()
        job.has_begun |= with_graph
        for place, value in enumerate(inputs):
            if with_graph and isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                if id(value) not in job.cuts:
                    cuts.append((value, value.detach().requires_grad_()))
                    job.cuts[id(value)] = cuts[-1]
                inputs[place] = job.cuts[id(value)][1]
        context, autocast = contextvars.copy_context(), autocast_now(self.streamer.device)
        collects = next((value for name, value in context.items() if name.name == COLLECTOR), None)
        if with_graph and collects:
            raise CannotWalkError(f"The loss asks the model for `{[*collects][0]}`, taken out of layers by hooks.")
        adapters = None if self.adapters is None else self.adapters.now()
        call = _Call(streamer, unit, with_graph, function, inputs, structure, cuts, context, autocast, adapters)
        return job.wait_for(call)

    def _compute(self, job: _MicroBatch, call: _Call) -> Any:
        """Compute a call, and return leaves in place of its outputs, as far as a gradient may come to them."""
        unit, inputs, call.inputs = call.unit, call.inputs, []
        takes_gradients = itertools.chain(inputs, *map(nn.Module.parameters, unit.modules)) if call.with_graph else ()
        trains = any(isinstance(value, Tensor) and value.requires_grad for value in takes_gradients)
        call.random_states = RandomStates.now(self.streamer.device) if trains else None
        keeps = trains and unit.open_graphs < unit.graphs
        graph = call.streamer.keeping_graph(unit) if keeps else contextlib.nullcontext()
        args, kwargs = tree_unflatten(inputs, call.structure)
        with graph, torch.set_grad_enabled(keeps), torch.autocast(**call.autocast):
            outputs, structure = tree_flatten(call.function(*args, **kwargs))
        if results := _computed(outputs, inputs) if trains else {}:
            # Hidden states mostly, `[batch, tokens, width]`. A leaf shares their memory and not their graph: what the
            # model computes with it, up to the next layer or the loss, is differentiated down to here.
            leaves = {key: result.detach().requires_grad_() for key, result in results.items()}
            for leaf in leaves.values():
                job.outputs[leaf] = _Output(leaf, self.streamer.transfers, self.parking)
                call.outputs.append(job.outputs[leaf])
            outputs = [leaves.get(id(value), value) for value in outputs]
            call.inputs = [job.outputs.get(v, v) if isinstance(v, Tensor) else v for v in inputs]
            call.results = results if keeps else None
            job.calls.append(call)
            unit.open_calls += 1
        return tree_unflatten(outputs, structure)

    # Backward, on the caller's thread.

    def _backward(self, jobs: list[_MicroBatch]) -> None:
        before: list[list[Cut]] = [[] for _ in jobs]
        while jobs and jobs[0].calls:
            for job in jobs:
                if not job.calls or job.calls[-1].unit is not jobs[0].calls[-1].unit:
                    raise CannotWalkError(OTHER_LAYERS)
            calls = [job.calls.pop() for job in jobs]
            streamer, unit = calls[0].streamer, calls[0].unit
            unit.open_calls -= len(calls)  # so that gradients count as complete behind these
            streamer.bring_in(unit, backward=True)
            for output in _boundaries(calls):  # all at once: that of one micro-batch comes while another computes
                output.fetch()
            try:
                for job, call, early in zip(jobs, calls, before):
                    self._differentiate(call)
                    # The leaves of cuts that begin with this call have their gradients now. What earlier layers had a
                    # part in goes down to these at once, before it is their turn.
                    between: list[Cut] = []
                    for cut in call.cuts:
                        (between if _depends_on(cut[0], job.outputs) else early).append(cut)
                    if between:
                        _backward_through(between)
                streamer.collect(unit)
                if unit in streamer.updates.in_backward:
                    streamer.updates.update(unit)
            finally:
                streamer.release(unit)
        for job in jobs:
            if job.calls:
                raise CannotWalkError(OTHER_LAYERS)
        for early in before:
            # Computed before the first layer (embeddings): differentiated once, when all layers have contributed.
            _backward_through(early)

    def _differentiate(self, call: _Call) -> None:
        """Compute a call again, unless its graph was kept, and let gradients go from its outputs to its inputs."""
        gradients = [output.take_gradient() for output in call.outputs]
        inputs = [value.bring_back() if isinstance(value, _Output) else value for value in call.inputs]
        if all(gradient is None for gradient in gradients):
            return
        results = call.results
        if results is None:
            args, kwargs = tree_unflatten(inputs, call.structure)
            if self.adapters is not None:
                self.adapters.choose(call.adapters)
            with call.random_states.again(), torch.enable_grad(), torch.autocast(**call.autocast):
                outputs = call.function(*args, **kwargs)
            results = _computed(tree_leaves(outputs), inputs)
        if reached := [(r, g) for r, g in zip(results.values(), gradients) if g is not None and r.requires_grad]:
            tensors, arrived = zip(*reached)
            torch.autograd.backward(tensors, arrived)


class Window:
    """
    The micro-batches of one optimizer step, computed in the order that the option asks for.

    Trainer asks for one micro-batch after the other. A window that is walked layer by layer computes all of them when
    the first one is asked for, and hands out what it found when the others are.

    `order` is `"layer"`, `"micro_batch"`, or `"auto"`: by layer unless the model cannot be walked so, or its loss for a
    `reason`. `park` keeps the activations between layers on the host meanwhile. Whether code of a user stands in the
    way is asked at each step, and the first window of a run is compared ([`hf_hybrid.streaming.comparison`]).

    Raises:
        CannotWalkError: If this model cannot be walked by layer, and `order` is `"layer"`.
    """

    def __init__(
        self,
        streamer: LayerStreamer,
        order: str,
        *,
        park: bool = False,
        evaluated: LayerStreamer | None = None,
        reason: str | None = None,
    ):
        self.streamer, self.order, self.evaluated = streamer, order, evaluated
        self.parking = HostBuffers(pin=streamer.transfers.beside) if park else None
        self.by_layer = True
        """Windows of several micro-batches are walked by layer, if the order admits it."""
        self.users: str | None = None
        """What code of a user stands in the way now, as a clause."""
        self.asks = False
        """Whether [`look`] is to be called before the first micro-batch of the window."""
        self.is_compared = False
        """Whether the walks were compared in this run."""
        self.updates_late = False
        """No layer is updated in the backward pass: gradients are clipped, or code of a user sees them first."""
        self.beside = False
        """Whether the loss has passes beside those with gradients: a single micro-batch is walked by layer then."""
        self.counter: Any = None
        """What counts micro-batches as `_step`, if anything does: by it a trainer takes them from what it generated."""
        self._inputs: list = []
        self._results: list = []
        self._left = 0
        """Micro-batches that are yet to be computed."""
        reason = reason or reason_not_walked(streamer.model)
        if reason is not None and (order != "micro_batch" or park):
            self._cannot_walk(reason)

    def begin(self, inputs: list) -> None:
        """Begin a window, whose micro-batches are `inputs`."""
        self.streamer.begin_window()
        self._inputs, self._results, self._left = list(inputs), [], len(inputs)
        self.asks = len(inputs) > 1 or self.parking is not None or self.beside

    def _goes_by_layer(self, window: list) -> bool:
        """Whether this is walked by layer. A single micro-batch is, if its activations are parked."""
        alone = self.parking is None and not (self.beside and self.order != "micro_batch")
        return self.by_layer and len(window) > alone

    def look(self, inputs: Any) -> None:
        """Find out whether the walk that begins may be one by layer. An out-of-memory error leaves that open."""
        window = [inputs] if self.order == "micro_batch" else self._inputs
        if self._goes_by_layer(window):
            why = reason_not_walked(self.streamer.model) if self.users is None else f"Code of a user: {self.users}."
            if why is None and not self.is_compared:
                why = difference(self.streamer, LayerWalk(self.streamer).run, window)
                self.is_compared = True
            if why is not None:
                self._cannot_walk(why)
        self.asks = False

    def next(self, step: Callable[[Any], Any], inputs: Any) -> Any:
        """Compute a micro-batch with `step`, or the whole window at its first, and return this micro-batch's result."""
        if self._results:
            return self._results.pop(0)
        window, self._inputs = [inputs] if self.order == "micro_batch" else self._inputs, []
        self.streamer.take_written()
        if self._goes_by_layer(window):
            try:
                self.streamer.last_pass = not self.updates_late
                walk = LayerWalk(self.streamer, self.parking, self.evaluated)
                if self.counter is None:
                    self._results = walk.run([partial(step, inputs) for inputs in window])
                else:
                    with self._counting(len(window)) as counted:
                        self._results = walk.run([counted(n, step, inputs) for n, inputs in enumerate(window)])
                return self._results.pop(0)
            except CannotWalkError as error:
                self._cannot_walk(str(error))
                # There are no others: a window is a whole step, which is computed from its beginning now.
                for parameter in self.streamer.model.parameters():
                    parameter.grad = None
                self.streamer.updates.drop_gradients()
        self._left -= 1
        self.streamer.last_pass = self._left == 0 and not self.updates_late
        result = step(inputs)
        self.streamer.end_backward()
        return result

    @contextlib.contextmanager
    def _counting(self, micro_batches: int) -> Generator[Callable[..., Callable[[], Any]]]:
        """Context that gives functions of micro-batches, each of which begins at its own number of the `counter`."""
        counter, first, ends_at = self.counter, getattr(self.counter, "_step", 0), 0

        def counted(number: int, step: Callable[[Any], Any], inputs: Any) -> Callable[[], Any]:
            def compute():
                counter._step = first + number
                return step(inputs)

            return compute

        try:
            yield counted
            ends_at = micro_batches
        finally:
            counter._step = first + ends_at

    def _cannot_walk(self, why: str) -> None:
        if self.order == "layer" or self.streamer.updates.torn is not None:  # a layer is updated: no way back
            raise CannotWalkError(f"{why} Set `accumulation_walk=micro_batch`.")
        logger.warning(
            "%s Windows are walked micro-batch by micro-batch, with the activations between layers on the device.", why
        )
        self.by_layer = False


def _boundaries(calls: list[_Call]) -> list[_Output]:
    """Return the outputs of earlier layers that went into calls."""
    return [value for call in calls for value in call.inputs if isinstance(value, _Output)]


def _computed(values: list, inputs: list) -> dict[int, Tensor]:
    """Return the tensors among `values` that may have gradients and were not given, by their identity."""
    given = set(map(id, inputs))
    return {id(v): v for v in values if isinstance(v, Tensor) and v.is_floating_point() and id(v) not in given}


def _backward_through(cuts: list[Cut]) -> None:
    """Let the gradients that have come to the leaves of cuts go on through what was computed between layers."""
    if reached := [(tensor, leaf.grad) for tensor, leaf in cuts if leaf.grad is not None]:
        try:
            # Kept: parts of the graph may be shared with what a later call still has to differentiate.
            tensors, gradients = zip(*reached)
            torch.autograd.backward(tensors, gradients, retain_graph=True)
        except RuntimeError as error:
            if "a second time" not in str(error):
                raise
            raise CannotWalkError("The model uses what it computed before its layers after them too.") from error


def _depends_on(tensor: Tensor, leaves: WeakIdKeyDictionary) -> bool:
    seen, stack = set(), [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and variable in leaves:
            return True
        stack.extend(following for following, _ in node.next_functions)
    return False


PLAIN = (Tensor, int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, slice)


def _side_channel(arguments: tuple) -> Any:
    """Return an object that a layer gets to write into (a cache, a dictionary): its tensors would escape the cuts."""
    for value in arguments:
        mutable = isinstance(value, (dict, list)) and value
        for part in tree_leaves(value):
            if mutable or not (isinstance(part, PLAIN) or getattr(part, "holds_no_activations", False)):
                return value
    return None
