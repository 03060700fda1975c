"""
Train models whose layers do not fit: weights live on the host and are on the device only while they compute.

A streamed layer takes part in a step three times:

1. Forward. Its weights are copied into a slot while the layer before it computes. Its parameters become views into the
   slot, it computes, and its parameters become placeholders again.
2. Backward. Autograd would hold every weight of the forward pass until the backward pass is over, so all layers would
   be on the device at once. So every streamed unit is checkpointed (Chen et al., 2016, arXiv 1604.06174): only its
   input is kept. Units are copied in again, from the last to the first. Each is recomputed and stays until its
   gradients are complete. The last ones may keep their graphs instead ([`hf_hybrid.streaming.graphs`]).
3. Each gradient goes to the host as soon as autograd has finished it, into the master's `grad`. The optimizer reads it
   there ([`hf_hybrid.streaming.optimizer`]).

The model stays the user's own: same modules, same parameter objects, same names. A placeholder is one NaN expanded to
the shape of the weight (`expand`): shape, dtype and device are right, it takes no memory, and a computation with it
gives NaN instead of a plausible wrong number. The streamer uses three mechanisms that PyTorch offers for instances: a
`forward` set on the module, hooks on gradients, and a class of the parameter, which gives real weights to code of a
user ([`hf_hybrid.streaming.placeholders`]). [`LayerStreamer.detach`] removes all of them.

Passes without gradients (evaluation, probes, generation) need only the first part, and no checkpointing.

Code of a user in a layer may compute something else the second time: from a random generator of its own, or because the
user has changed the layer in between. Its gradient would be that of another function. Where there is such code, a
sample of what a layer computes is compared, and a step with a difference is refused ([`LayerStreamer.compares`]).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import time
from collections.abc import Callable, Collection, Generator, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hf_hybrid.compat import CACHES
from hf_hybrid.machine import copy_to_device_
from hf_hybrid.streaming.expert_streaming import Experts
from hf_hybrid.streaming.graphs import KeptGraph, computed_otherwise, refuse_second_derivative, updated_since
from hf_hybrid.streaming.layers import base_model, save_packed_weights
from hf_hybrid.streaming.placeholders import become_placeholders
from hf_hybrid.streaming.transfers import Transfers
from hf_hybrid.streaming.units import SlotPool, StreamedParameter, Unit, as_plain, cannot_train, make_units


class Walk(Protocol):
    """What runs the layers of a window (walk.py), which drives the streamer."""

    several: bool

    def takes(self, args: tuple, kwargs: dict) -> bool: ...

    def call(self, streamer: LayerStreamer, unit: Unit, function: Callable, args: tuple, kwargs: dict) -> Any: ...


class Updates:
    """What a streamer calls while weights are updated. [`LazyOptimizer`] says what for; here nothing is done."""

    pending: dict[Unit, Any] = {}
    """Units that are updated on the device when they are needed next."""
    in_backward: Collection[Unit] = ()
    """Units that are updated inside the backward pass that completes their gradients."""
    shows_used = False
    """Whether gradients that the last step has used are still to be seen."""

    @property
    def torn(self) -> str | None:
        """Return a sentence, if an error now leaves weights or states that belong to no step."""
        return None

    def _nothing(self, *_: Any, **__: Any) -> Any:
        return None

    # The model's layers are streamed from now on, or not any more.
    attach: Any = _nothing
    detach: Any = _nothing
    # Masters, states or gradients on the host are about to be read, or may have been changed.
    flush: Any = _nothing
    take_states: Any = _nothing
    settle_gradients: Any = _nothing
    used_gradient: Any = _nothing
    drop_gradients: Any = _nothing
    # A pending unit is about to travel, and then lies in its slot; one of `in_backward` does so before its backward.
    begin_load: Any = _nothing
    update: Any = _nothing
    before_backward: Any = _nothing
    keep: Any = _nothing

    def held(self) -> list[Tensor]:
        """Return what updates hold on the device."""
        return []


class LayerStreamer:
    """
    Streams the units of one model. Built detached: the model's parameters are then ordinary host tensors.

    `layers` are the decoder layers to stream, in the order of their execution, and `ends` the embeddings and the head
    if they are streamed too. The model computes on `device`, which may be the host itself. `ahead` layers are fetched
    ahead. `resident` layers stay on the device: the first trained ones with gradients and optimizer states, and beyond
    those the copies of frozen ones after their use. `dtype_of` tells the dtype that a parameter has on the device. With
    `int8` frozen matrices of the layers are held and transported as int8. Of the passes through the last layers so many
    keep their `graphs` and are not recomputed, where so many micro-batches are `in_flight` at once.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[tuple[str, nn.Module]],
        ends: Iterable[tuple[str, list[nn.Module]]] = (),
        *,
        device: torch.device,
        ahead: int = 1,
        resident: int = 0,
        dtype_of: Callable[[nn.Parameter], torch.dtype] = lambda parameter: parameter.dtype,
        int8: bool = False,
        graphs: int = 0,
        in_flight: int = 1,
    ):
        self.model, self.device, self.ahead = model, device, ahead
        self.transfers = Transfers(device)
        self.walk: Walk | None = None
        """Set while a window is walked layer by layer: it then runs the layers."""
        self.updates = Updates()
        self.bytes_spared = 0
        """Of experts that were not copied, because no token reached them."""
        self.last_pass = False
        """Whether the pass under way completes the gradients of its step."""
        self.compares = True
        """Whether code of a user may let a layer compute something else when it is recomputed."""
        self._compared: list[tuple[Unit, Tensor]] = []
        """Units that were recomputed, and whether they computed something else, on the device."""
        self.overlay: Callable[[nn.Parameter], Tensor | None] | None = None
        """The weights of a master with a leap under test that is not in it yet; asked for as a unit is brought in."""
        pin = self.transfers.beside
        self.layers, self.ends = make_units(layers, ends, dtype_of=dtype_of, int8=int8, pin=pin, resident=resident)
        self._first = first = [u for u in self.ends if any(isinstance(module, nn.Embedding) for module in u.modules)]
        self.travelling = [unit for unit in self.layers if not unit.resident]
        self.units = [*first, *self.layers, *(unit for unit in self.ends if unit not in first)]
        """In the order in which a forward pass needs them: embeddings, layers, head."""
        self.kept = resident - sum(unit.resident for unit in self.layers)
        self.streamed = {id(param.parameter): param for unit in self.units for param in unit.storage.params}
        self.masters = {id(param.master): param for unit in self.units for param in unit.planned}
        # One unit's gradients leave while the next are computed. Without any, activations may leave in their place.
        trained = max((sum(param.master.nbytes for param in unit.trainable) for unit in self.units), default=0)
        self.transfers.most_leaving = trained or max((unit.storage.packed_bytes for unit in self.units), default=0)
        self.keep_graphs(graphs, in_flight)
        self._next: dict[Unit, list[list[Unit]]] = {}
        """What is fetched ahead while a layer computes, in the forward and in the backward pass."""
        for place, unit in enumerate(self.layers):
            ways = self.layers[place + 1 :], self.layers[:place][::-1]
            most = ahead + unit.resident  # a resident unit leaves its slot to one more
            self._next[unit] = [[other for other in way if not other.resident][:most] for way in ways]
        self.behind: dict[Unit, Unit] = {}
        """Heads, each by the last layer before it, that losses read by themselves, past their `forward`."""
        self.holds_heads = False
        self._in_backward: Unit | None = None
        self._undo: list[Callable[[], None]] = []
        dtypes = {param.dtype for param in self.streamed.values()}
        self._nothing = {
            d: torch.full((), math.nan if d.is_floating_point else 0, dtype=d, device=device) for d in dtypes
        }
        self._pools: list[SlotPool] = []
        self._expanded = torch.empty(0)

    def read_behind(self, layer: nn.Module, head: nn.Module) -> None:
        """A loss may read the weights of a head that is streamed, when this last layer has computed."""
        last = next((unit for unit in self.layers if layer in unit.modules), None)
        of_head = next((unit for unit in self.ends if head in unit.modules), None)
        if last is not None and of_head is not None:
            self.behind[last] = of_head
            self._next[last][0].append(of_head)

    @contextlib.contextmanager
    def holding_heads(self) -> Generator[None]:
        """Context in which a head that comes in behind its last layer stays until another end needs its slot."""
        self.holds_heads = True
        try:
            yield
        finally:
            self.holds_heads = False
            for unit in [unit for unit in self.ends if unit.bound]:
                self.release(unit)

    def keep_graphs(self, graphs: int, in_flight: int) -> None:
        """Let so many passes through the last layers keep their graphs. Experts that travel by use are recomputed."""
        for unit in reversed(self.layers):
            unit.graphs = 0 if unit.storage.experts else min(graphs, in_flight)
            graphs -= unit.graphs

    # In place of the model's own weights, and back.

    @property
    def attached(self) -> bool:
        return bool(self._undo)

    def attach(self) -> None:
        """Take over the model: streamed parameters become placeholders, everything else moves to the device."""
        if self.attached:
            return
        # Each micro-batch calls the embeddings, and then the head: these share a slot.
        for units, slots in ((self.travelling, self.ahead + 1 + self.kept), (self.ends, 1)):
            if units:
                size, slots = max(unit.storage.packed_bytes for unit in units), min(slots, len(units))
                self._pools.append(SlotPool(size, slots=slots, device=self.device))
                for slot in self._pools[-1].slots:
                    self.transfers.release(slot)  # its memory may still be read by what was computed before
                for unit in units:
                    unit.pool = self._pools[-1]
        expanded = max((unit.storage.expanded_bytes for unit in self.units), default=0)
        self._expanded = torch.empty(expanded, dtype=torch.uint8, device=self.device)
        for unit in self.units:
            unit.storage.pack()
            for experts in unit.storage.experts:
                hook = functools.partial(self._on_choice, unit, experts)
                self._undo.append(experts.called.register_forward_pre_hook(hook, with_kwargs=True).remove)
            for module in unit.modules:
                own = [vars(module)["forward"]] if "forward" in vars(module) else []
                self._undo.append(functools.partial(setattr if own else delattr, module, "forward", *own))
                module.forward = _Forward(self, unit, module)
                self._undo += save_packed_weights(module)
            for param in unit.planned:
                hook, trains = functools.partial(self._on_gradient, unit, param), param.parameter.requires_grad
                param.parameter.requires_grad_()  # torch takes no hook on one that is frozen meanwhile
                handle = param.parameter.register_post_accumulate_grad_hook(hook)
                param.hooks = [handle.id]
                self._undo.append(handle.remove)
                if param in unit.storage.rounded:
                    param.parameter.grad_dtype = None  # penalties of weights have that of the master
                    self._undo.append(functools.partial(setattr, param.parameter, "grad_dtype", param.master.dtype))
                param.parameter.requires_grad_(trains)
            become_placeholders(self, unit, self._nothing)
        base: Any = base_model(self.model)
        if (switch := getattr(base, "_set_gradient_checkpointing", None)) is not None:
            # A loss switches checkpointing off for the pass of its reference, and on again in the middle of a step.
            base._set_gradient_checkpointing = lambda *args, **kwargs: (
                switch(*args, **kwargs),
                self._checkpoint_here(),
            )
            self._undo.append(functools.partial(vars(base).pop, "_set_gradient_checkpointing"))
        self._move_rest(self.device)
        self.updates.attach()

    def detach(self, *, for_good: bool = True, expand: bool = True) -> None:
        """
        Give the model its weights back, on the host. `for_good` also moves back what is not streamed and drops the
        gradients; else the model is only read for a moment. Without `expand` an int8 base stays placeholders.
        """
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._compared.clear()
        self._in_backward = None
        for unit in self.units:
            # Without its pool too: a unit would keep every slot alive while the next attach makes new ones.
            unit.pool, unit.slot, unit.loaded, unit.bound = None, None, False, False
        # Layers fetched ahead still travel into slots and out of packed buffers, which both go now.
        self.transfers.finish()
        for unit in self.units:
            unit.storage.restore(for_good=expand)
        self._pools.clear()
        self._expanded = torch.empty(0)
        if for_good:
            self._move_rest(torch.device("cpu"))
            for param in self.masters.values():
                param.gradient = param.master.grad = None  # page-locked as long as it is there
        self.updates.detach(for_good=for_good)

    # Code of a user reads and writes between passes, see placeholders.py.

    def weights_of(self, unit: Unit, param: StreamedParameter) -> Tensor:
        """Return the weights of a placeholder on the host, which may be written to until the next pass begins."""
        if param.host_weights is None:
            raise RuntimeError(
                f"The weights of `{param.name}` are packed as int8 (`memory=stream`, `base_precision=int8`): nothing "
                "can be computed from them while they are. Set `base_precision=same`."
            )
        if self.updates.pending and any(other.bound for other in self.travelling):
            raise RuntimeError(
                f"The weights of `{param.name}` were used while another layer computes. With `memory=stream` they are "
                "not updated then. Use them in `compute_loss` or in a callback, or train with `memory=off`."
            )
        self.updates.flush()
        unit.written = True
        return param.host_weights.data

    def take_written(self) -> None:
        """Let weights and states travel anew that may have been written to."""
        self.updates.take_states()
        for unit in [unit for unit in self.units if unit.written]:
            self.renew(unit)

    def renew(self, unit: Unit) -> None:
        """Let the weights of a unit travel anew, because its masters have changed."""
        unit.written = unit.loaded = False
        unit.storage.refresh()
        if unit.pool is not None:
            unit.pool.forget(unit)

    def gradient_of(self, unit: Unit, param: StreamedParameter) -> Tensor | None:
        """
        Return the gradient of a placeholder on the host: the sum of its window so far, as the step will use it, or a
        copy of what the last step used.
        """
        if param.host_weights is None or param.host_weights.grad is None:
            return self.updates.used_gradient(unit, param)
        self.updates.settle_gradients()
        param.norm = None  # it may be changed
        return param.host_weights.grad

    def use_gradient(self, unit: Unit, param: StreamedParameter, gradient: Tensor | None) -> None:
        """Replace the gradient of a placeholder, or drop it."""
        with as_plain():
            param.parameter.grad = None
        param.norm = param.total = None
        if (master := param.host_weights) is None or gradient is master.grad:
            return
        if gradient is not None:
            if unit in self.updates.pending:  # which reads the place of the last one
                self.updates.flush()
            gradient = param.place_of_gradient(pin=self.transfers.beside).copy_(gradient)
        master.grad = gradient

    def __reduce_ex__(self, protocol):
        raise RuntimeError(
            "A model whose layers are streamed (`memory=stream`) cannot be copied as a whole in a run: its modules "
            "compute for this trainer. Copy it before the trainer is made, or take its `state_dict()`."
        )

    def begin_window(self) -> None:
        """Take note of what may have changed since the last step."""
        for unit in self.units:
            unit.open_graphs = 0  # of passes that had no part in the last loss, or ended in an error
        self._checkpoint_here()
        if self.attached:
            self.look_at_parameters()

    def _checkpoint_here(self) -> None:
        """Switch off the layers' own checkpointing, which a callback may have switched on: they are recomputed here."""
        for unit in self.units:
            for module in unit.modules:
                if getattr(module, "gradient_checkpointing", False):
                    vars(module)["gradient_checkpointing"] = False

    def look_at_parameters(self) -> None:
        """
        Look at what a user may have changed of the parameters since the last step. Raise `RuntimeError` if one is to be
        trained for which nothing is planned. Hooks of a user on gradients see the sum so far, as in `Trainer`; ours
        comes last and takes what they leave.
        """
        for unit in self.units:
            for param in unit.storage.params:
                with as_plain():
                    hooks, trains = param.parameter._post_accumulate_grad_hooks, param.parameter.requires_grad
                if trains and not param.planned:
                    raise cannot_train(param)
                if hooks is None or len(hooks) < 2 or not param.hooks:
                    continue
                if len(param.hooks) < 2:
                    hook = functools.partial(self._add_sum_so_far, unit, param)
                    handle = param.parameter.register_post_accumulate_grad_hook(hook)
                    param.hooks.append(handle.id)
                    self._undo.append(handle.remove)
                taking, adding = param.hooks
                of_user = {key: hook for key, hook in hooks.items() if key not in param.hooks}
                ordered = {adding: hooks[adding], **of_user, taking: hooks[taking]}
                hooks.clear()  # `move_to_end` would not change the order in which autograd reads them
                hooks.update(ordered)

    def _move_rest(self, device: torch.device) -> None:
        packed = [unit.storage.packed for unit in self.units if unit.storage.packed is not None]
        places = {buffer.untyped_storage().data_ptr() for buffer in packed}
        for parameter in self.model.parameters():
            if id(parameter) not in self.streamed:
                gradient, parameter.grad = parameter.grad, None  # it lies where its weights do
                made_of_unit = parameter.untyped_storage().data_ptr() in places  # whose copy back would overwrite it
                parameter.data = parameter.data.to(device, copy=made_of_unit)
                parameter.grad = None if gradient is None else gradient.to(device)
            elif (state := getattr(parameter, "quant_state", None)) is not None:
                state.to(device)  # of a 4-bit weight: its bytes travel, their scales stay
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

    # A unit computes.

    def _call(self, unit: Unit, module: nn.Module, original: Callable, args: tuple, kwargs: dict):
        unit.calls += 1
        # The backward pass of an embedding reads no weights, nor does that of a head that computed its loss in chunks.
        reads_once = isinstance(module, nn.Embedding) or kwargs.get("targets") is not None
        with_graph = torch.is_grad_enabled() and not reads_once
        if with_graph:
            kwargs = _without_cache(module, kwargs)
        if self.walk is not None and unit in self._next and (with_graph or self.walk.takes(args, kwargs)):
            return self.walk.call(self, unit, original, args, kwargs)
        if not with_graph:
            with self._for_forward(unit):
                return original(*args, **kwargs)

        unit.open_calls += 1
        if unit.open_graphs < unit.graphs:  # the first passes of a window keep theirs, the others are recomputed
            with self._for_forward(unit), self.keeping_graph(unit):
                return original(*args, **kwargs)
        # Checkpointing enters one context around the forward pass, after which the weights leave, and the other around
        # each recomputation, after which they stay until the gradients of the layer are complete.
        contexts: Any = self._for_forward(unit), _Recomputation(self, unit)
        compute = functools.partial(checkpoint, use_reentrant=False, context_fn=functools.partial(tuple, contexts))
        if not self.compares:
            return compute(original, *args, **kwargs)
        outputs: Any = compute(self._comparing(unit, original), *args, early_stop=False, **kwargs)
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(refuse_second_derivative, unit))
        return outputs

    def _comparing(self, unit: Unit, function: Callable) -> Callable:
        """Return the function of a unit, which compares what it computes again: see [`check_recomputed`]."""
        before: tuple[list[str], list[Tensor]] | None = None

        def compute(*args, **kwargs):
            nonlocal before
            choices = _adapter_choices(unit)
            if before is not None and before[0] != choices:
                raise computed_otherwise(f"`{unit.name}`")
            outputs = function(*args, **kwargs)
            sample = _sample(outputs)
            if before is None:
                before = choices, sample
                return outputs
            if [values.shape for values in before[1]] != [values.shape for values in sample]:
                raise computed_otherwise(f"`{unit.name}`")
            autocast = autocast_now(self.device)
            for first, values in zip(before[1], sample):
                # Half of the last place is left to kernels that add up in any order.
                most = max(torch.finfo(autocast["dtype"] if autocast["enabled"] else first.dtype).eps / 2, 1e-5)
                difference = torch.linalg.vector_norm((values - first).float())
                self._compared.append((unit, difference > most * torch.linalg.vector_norm(first.float())))
            return outputs

        return compute

    def check_recomputed(self) -> None:
        """Raise `RuntimeError` if a unit that was recomputed has computed something else."""
        compared, self._compared = self._compared, []
        if compared and self.compares:
            differs = torch.stack([differs for _, differs in compared]).tolist()
            for unit in [unit for (unit, _), different in zip(compared, differs) if different][:1]:
                raise computed_otherwise(f"`{unit.name}`")

    @contextlib.contextmanager
    def _for_forward(self, unit: Unit) -> Generator[None]:
        self.bring_in(unit)
        try:
            with torch.autocast(**autocast_now(self.device)):
                yield
        finally:
            self.release(unit)

    def keeping_graph(self, unit: Unit) -> contextlib.AbstractContextManager:
        """Context of a forward pass that is not recomputed. A walk brings the unit in for its backward pass."""
        return KeptGraph(unit, self._expanded, None if self.walk else self.begin_backward).saving()

    def begin_backward(self, unit: Unit, again: bool) -> None:
        """
        A backward pass comes to a call of a unit, the first time or `again`. Its weights stay until the backward pass
        has left the unit.
        """
        if self._in_backward is not unit:
            # Autograd says when it comes to a layer, and not when it leaves it. So a layer is released when it comes to
            # the next one, and the last by a callback behind the whole pass, which is queued as the pass begins.
            if self._in_backward is None:
                torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
            self.end_backward()
            self.bring_in(unit, backward=True)
            self._in_backward = unit
        unit.open_calls -= not again

    def end_backward(self) -> None:
        """Release the unit that the backward pass came to last, after the backward pass has left it."""
        if (unit := self._in_backward) is not None:
            if unit in self.updates.in_backward:
                self.updates.update(unit)
            self.release(unit)

    # Transfers of weights.

    def bring_in(self, unit: Unit, *, backward: bool = False) -> None:
        """Make the unit's parameters its weights on the device, and fetch the next units of this direction."""
        if not unit.resident:
            self._bind(unit, backward=backward)
        unit.bound = True
        if unit in self._next:
            coming = self._next[unit][backward]
            if backward and self.last_pass and not coming:  # the next step begins with these
                coming = self._first
            for other in coming:
                self.fetch(other)

    def _bind(self, unit: Unit, *, backward: bool) -> None:
        if unit.slot is None and not self._take_slot(unit):
            # Everything is in use: by units fetched ahead for a turn that was not taken, or by a backward pass before.
            if not backward:
                self.end_backward()
            for other in self.units:
                if other.slot is not None and other is not self._in_backward and other.pool is unit.pool:
                    self.release(other)
        self.fetch(unit)
        slot = unit.slot
        if slot is None:
            raise RuntimeError(f"No slot is free for `{unit.name}`.")
        self.transfers.wait(slot.ready)
        unit.storage.bind(slot.buffer, self._expanded)
        if backward:
            if unit in self.updates.in_backward and self.last_pass:
                self.updates.before_backward(unit)
        else:
            for experts in unit.storage.experts:
                experts.reached = set()
            if unit in self.updates.pending:
                self.updates.update(unit)
            if (overlay := self.overlay) is not None:
                for param in unit.planned:
                    if (weights := overlay(param.master)) is not None:
                        copy_to_device_(param.parameter.data, weights)
                        unit.altered = True

    def first(self) -> list[Unit]:
        """Return what a forward pass needs first: embeddings and the first layers."""
        return [*self._first, *self.travelling[: self.ahead + 1]]

    def fetch(self, unit: Unit) -> None:
        """Start to copy a unit to the device. Without a free slot, do nothing."""
        if unit.written:
            self.renew(unit)
        if unit.slot is None and not self._take_slot(unit):
            return
        if unit in self.updates.pending:
            self.updates.begin_load(unit)
        packed = unit.storage.packed
        if unit.slot is None or packed is None:
            return
        if not unit.loaded:
            self.transfers.load(unit.slot, packed[: unit.storage.whole_bytes], after=unit.storage.written)
            unit.loaded = True
            unit.loads += 1
            self.bytes_spared += unit.storage.packed_bytes - unit.storage.whole_bytes
            for experts in unit.storage.experts:
                experts.here.clear()
        for experts in unit.storage.experts:
            self._fetch_experts(unit, experts, experts.ahead)

    def _fetch_experts(self, unit: Unit, experts: Experts, wanted: set[int]) -> None:
        slot, packed = unit.slot, unit.storage.packed
        if slot is None or packed is None:
            return
        for start, stop in experts.places(wanted - experts.here):
            self.transfers.load(slot, packed[start:stop], start=start)
            self.bytes_spared -= stop - start
        experts.here |= wanted

    def _on_choice(self, unit: Unit, experts: Experts, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Tokens have chosen their experts, which are about to compute."""
        if (slot := unit.slot) is None:
            return
        wanted = experts.chosen((*args, *kwargs.values())[1])  # behind the tokens
        experts.reached |= wanted
        if not wanted <= experts.here:
            self._fetch_experts(unit, experts, wanted)
            self.transfers.wait(slot.ready)
        experts.expand(wanted, slot.buffer, self._expanded)

    def _take_slot(self, unit: Unit) -> bool:
        if unit.pool is None:
            raise RuntimeError(f"`{unit.name}` has no slots: the model is not attached.")
        unit.loaded = unit in unit.pool.held
        unit.slot = unit.pool.take(unit, turns=torch.is_grad_enabled())
        return unit.slot is not None

    def release(self, unit: Unit) -> None:
        """Make the unit's parameters placeholders again."""
        if unit is self._in_backward:
            self._in_backward = None
        become_placeholders(self, unit, self._nothing)
        unit.bound = False
        slot, unit.slot = unit.slot, None
        if slot is None or unit.pool is None:
            return
        self.transfers.release(slot)
        if unit.altered:
            unit.altered = False
            unit.pool.forget(unit)
        if self.holds_heads and unit in self.behind:
            self.bring_in(self.behind[unit])

    # Transfers of gradients.

    def _on_gradient(self, unit: Unit, param: StreamedParameter, parameter: nn.Parameter) -> None:
        if self.walk is None:
            self._collect(unit, param)
        elif self.walk.several:
            with as_plain():  # embeddings and head are placeholders again
                if parameter.grad is not None and parameter.grad.dtype != param.master_dtype:
                    # A sum in bf16 would lose what later micro-batches add to it.
                    gradient, parameter.grad = parameter.grad.to(param.master_dtype), None
                    param.total = gradient if param.total is None else param.total.add_(gradient)

    def _add_sum_so_far(self, unit: Unit, param: StreamedParameter, parameter: nn.Parameter) -> None:
        """Add the sum of the window so far to a gradient that hooks of a user are about to see."""
        with as_plain():
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = None  # it may have any type
        if gradient is None:
            return
        gradient, master = gradient.to(param.master.dtype), param.master
        if param.total is not None:
            gradient, param.total = gradient.add_(param.total), None
        if master.grad is not None and param.gradient is not None:
            before = self.transfers.fetch(param.gradient, after=unit.storage.gradients_sent)
            gradient, master.grad = gradient.add_(before.take()), None
        with as_plain():
            parameter.grad = gradient

    def collect(self, unit: Unit) -> None:
        """Let the gradients of a unit leave, which have added up over the micro-batches of a walk."""
        for param in unit.trainable:
            self._collect(unit, param)

    def _collect(self, unit: Unit, param: StreamedParameter) -> None:
        """Move the gradient of a parameter of the unit into, or add it to, its master's."""
        with as_plain():
            gradient, param.parameter.grad = param.parameter.grad, None
        if param.total is not None:
            gradient, param.total = param.total, None
        master = param.host_weights
        if gradient is None or master is None:  # nothing came, or nothing is updated
            return
        gradient = gradient.to(master.dtype)  # from bf16 to fp32 on the device: the host adds nothing up
        if master.grad is not None and param.gradient is not None:
            # The sum so far comes back and is added to on the device, which is faster than the host is.
            before = self.transfers.fetch(param.gradient, after=unit.storage.gradients_sent)
            gradient = gradient.add_(before.take())
        # Taken here, where the whole sum lies on the device: behind the last micro-batch it is that of the window.
        param.norm = torch.linalg.vector_norm(gradient)
        if unit in self.updates.in_backward and self.last_pass and not unit.open_calls:
            master.grad = None
            self.updates.keep(param, gradient)
            return
        place = param.gradient
        master.grad = place = param.place_of_gradient(pin=self.transfers.beside) if place is None else place
        unit.storage.gradients_sent = self.transfers.send(gradient, place)

    def gradients_arrived(self) -> None:
        """Wait until the gradients of everything computed so far are on the host."""
        self.end_backward()
        self.transfers.finish_sending()

    def copies_of_a_pass(self) -> tuple[int, float]:
        """
        Return the bytes that come in for a pass without gradients which begins anew, as for each token of a completion,
        and about how many seconds that takes: by the time of a copy of one layer, made now.
        """
        held = 0 if not self._pools else max(len(self._pools[0].slots) - self.ahead - 1, 0)
        coming = [unit.storage.packed for unit in self.travelling[held:] if unit.storage.packed is not None]
        if len(coming) <= self.ahead + 1:
            return 0, 0.0
        slots = self._pools[0]
        slot = next((slot for slot in slots.slots if slot not in slots.held.values()), None)  # as when a run begins
        for _ in range(2):  # the first one warms up
            begun = time.perf_counter()
            self.transfers.fetch(coming[0]).take() if slot is None else self.transfers.load(slot, coming[0])
            self.transfers.finish()
            seconds = time.perf_counter() - begun
        total = sum(packed.numel() for packed in coming)
        return total, seconds * total / coming[0].numel()

    # For the optimizer, and for reports.

    def counterpart(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that the optimizer updates: the master of a streamed one, otherwise itself."""
        param = self.streamed.get(id(parameter))
        return parameter if param is None or param.host_weights is None else param.host_weights

    def statistics(self) -> dict:
        """Loads, bytes each way, and those of experts that were not copied."""
        return {
            "loads": sum(unit.loads for unit in self.units),
            "bytes_in": self.transfers.bytes_in,
            "bytes_out": self.transfers.bytes_out,
            "bytes_spared": self.bytes_spared,
            "streamed_units": sum(not unit.resident for unit in self.units),
            "resident_units": sum(unit.resident for unit in self.units),
            "kept_units": self.kept,
            "kept_graphs": sum(unit.graphs for unit in self.layers),
        }

    def tensors_held(self) -> dict[str, list[Tensor]]:
        """The streamer's own tensors: slots and the expanded layer on the device, weights and gradients on the host."""
        storages = [unit.storage for unit in self.units if unit.storage.packed is not None]
        masters = [param.master.data for storage in storages for param in storage.rounded]
        return {
            "slots": [slot.buffer for pool in self._pools for slot in pool.slots],
            "expanded": [self._expanded],
            "updates": self.updates.held(),
            "host_weights": [storage.packed for storage in storages if storage.packed is not None] + masters,
            "host_gradients": [param.gradient for param in self.masters.values() if param.gradient is not None],
        }


class _Forward:
    """The `forward` of a module while a streamer computes it. A copy of the module has its own one again."""

    def __init__(self, streamer: LayerStreamer, unit: Unit, module: nn.Module):
        self.streamer, self.unit, self.module, self.original = streamer, unit, module, module.forward
        functools.update_wrapper(self, self.original)

    def __call__(self, *args, **kwargs):
        return self.streamer._call(self.unit, self.module, self.original, args, kwargs)

    def __deepcopy__(self, memo):
        if (function := getattr(self.original, "__func__", None)) is None:  # a user set it
            return copy.deepcopy(self.original, memo)
        return function.__get__(memo[id(self.module)])


class _Recomputation:
    """Context of the recomputations of one call of a unit: each backward pass that comes to it enters it once."""

    def __init__(self, streamer: LayerStreamer, unit: Unit):
        self.streamer, self.unit = streamer, unit
        self._updates = unit.updates + (unit in streamer.updates.pending)  # which its forward pass makes
        self._again = False
        self._autocast = contextlib.nullcontext()

    def __enter__(self) -> None:
        if self._updates != self.unit.updates:
            raise updated_since(self.unit)
        self.streamer.begin_backward(self.unit, self._again)
        self._again, self._autocast = True, torch.autocast(**autocast_now(self.streamer.device))
        self._autocast.__enter__()

    def __exit__(self, *error) -> None:
        self._autocast.__exit__(*error)


def _sample(outputs: Any) -> list[Tensor]:
    """Return some hundred values of what a unit has computed."""
    flat = [t.detach().flatten() for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()]
    return [values[:: len(values) // 256 | 1].clone() for values in flat]  # an odd step reaches all columns


def _adapter_choices(unit: Unit) -> list[str]:
    """Return which adapters compute, with which scales: with new ones only gradients tell."""
    names = ("scaling", "_active_adapter", "_disable_adapters")
    modules = [vars(module) for layer in unit.modules for module in layer.modules()]
    return [str([own.get(name) for name in names]) for own in modules if "scaling" in own]


def autocast_now(device: torch.device) -> dict:
    """
    Return the current autocast state as arguments of `torch.autocast`, without the cache of cast weights.

    The cache would keep the weights of every layer on the device until autocast is left.
    """
    return {
        "device_type": device.type,
        "dtype": torch.get_autocast_dtype(device.type),
        "enabled": torch.is_autocast_enabled(device.type),
        "cache_enabled": False,
    }


def _without_cache(module: nn.Module, kwargs: dict) -> dict:
    """The recomputation would append to a cache a second time; transformers' own checkpointing drops it too."""
    if getattr(module, "_can_checkpoint_with_cache", False):
        return kwargs
    kwargs = {name: None if name in CACHES else value for name, value in kwargs.items()}
    return {**kwargs, "use_cache": False} if kwargs.get("use_cache") else kwargs
