"""
The lazy update: the optimizer step of streamed units, put off until a unit is needed again, and exact.

The obvious place for a layer's update is right after its gradient, while the layer is still on the device. But then the
global gradient norm is not known yet, so clipping could only be approximated, and with gradient accumulation the
gradient is not complete. The other obvious place, after the whole backward pass, makes the next forward pass wait until
every weight of the model was stepped. The update can be put off instead, because nobody reads a layer's weights before
its next forward pass:

1. During the window, gradients of streamed layers add up in host memory, in the `grad` of their masters. The norm of
   each is computed on the device, as it leaves.
2. When the window is over, the device has every norm. The global norm is exact, and so is clipping: the scale is one
   number, which stays on the device and is applied when the layer is stepped.
3. `step()` steps the resident parameters. For each unit it freezes everything that the unit's step depends on: the
   parameter groups with the learning rates of this moment, and the scale. Then it returns, and the next window begins.
   The host has not waited for the device.
4. The device steps a unit in its slot just before its forward. What that needs travels in while the unit before it
   computes: states, masters where the weights travel rounded, gradients, weights. All but the gradients travel back
   while the unit itself and the next one compute.

The device steps eight billion weights in less time than their states travel, and the bus carries both directions at
once. A host takes several times as long: one pass over weights, gradients and states at the speed of its memory.

**Copies never hold up computation.** What an update needs lies in a [`Ring`] of device memory: for the unit that is
stepped, and for one layer more. A copy into the ring waits, on the stream of copies, until what lay there has left.
After the last update computation waits until all has left, because loss and backward pass get the memory of the ring.
On the host the states of a unit lie in one page-locked piece, as they do on the device, so that one copy moves them.
These pieces are made before the first step. Their sizes are those of the states that the optimizer makes when it steps
parameters of the same shapes once.

Every parameter sees the gradient, learning rate, scale and state that it would see in a run with resident weights, in
the same arithmetic on the same device. So the weights are equal bit for bit, as long as the optimizer steps each
parameter by itself ([`check_separable`]). On a CPU, which is device and host at once, the tests compare them with plain
`Trainer`.

**Inside the backward pass.** Where nothing is clipped, the last gradient of a layer is all that its update waits for.
With `in_backward` the layer is stepped then: its gradient never leaves the device, and its states travel beside the
computation of the backward pass. Embeddings and head wait for the next forward pass as before. The price is that an
error in such a pass leaves weights of no step ([`LazyOptimizer.torn`]), so nothing of the step can be computed again.

Readers of masters or states (saving, a leap, the end of training) call `flush` first, which finishes what is pending.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import UserDict
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hf_hybrid.machine import host_buffer
from hf_hybrid.optimizers import LIBRARIES, package_of
from hf_hybrid.streaming.streamer import LayerStreamer, Updates
from hf_hybrid.streaming.transfers import Event, Ring, Slot
from hf_hybrid.streaming.units import Packing, StreamedParameter, Unit, cannot_train

logger = logging.getLogger(__name__)

SEPARABLE: dict[str, dict[str, int]] = {
    "AdamW": {"adamw_torch": 2, "adamw_torch_fused": 2},
    "Adafactor": {"adafactor": 0},
    "SGD": {"sgd": 0},
    "Adagrad": {"adagrad": 1},
    "RMSprop": {"rmsprop": 1},
    "MuonAdamW": {"muon": 2},
    "AdamW8bit": {},
    **{name: {} for name in ("Adam", "Adamax", "NAdam", "RAdam", "Adadelta", "Muon")},
}
"""
Optimizers that step every parameter by itself, so that units may be stepped at different times. For each class the
values of `optim` that make it, and how many states it keeps per weight (Adafactor's are far fewer than one; MuonAdamW
keeps one of a hidden matrix). `optimizer_states="8bit"` makes AdamW8bit; the last are for `optimizers=`.
"""
STATES_PER_WEIGHT = {option: states for options in SEPARABLE.values() for option, states in options.items()}
"""States per weight by `optim`, for the values of `optim` whose optimizers can be streamed."""


class UnsupportedOptimizerError(ValueError):
    """The optimizer couples parameters, or steps them in a way that cannot be split by unit."""


def check_separable(optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        UnsupportedOptimizerError: If the optimizer is not known to step each parameter by itself.
    """
    step = vars(optimizer).get("step")
    if step is not None and (package := package_of(step)) not in LIBRARIES:  # schedulers put theirs there
        raise UnsupportedOptimizerError(
            f"A function of `{package}` is in place of `optimizer.step`, which nobody calls with `memory=stream`. Use "
            "a hook (`optimizer.register_step_post_hook`), a callback, or `memory=off`."
        )
    name = type(optimizer).__name__
    known = type(optimizer).__module__.partition(".")[0] in ("torch", "transformers", "hf_hybrid")
    if name not in SEPARABLE or not known:
        raise UnsupportedOptimizerError(
            f"`{type(optimizer).__module__}.{name}` is not known to step each parameter by itself, which streamed "
            "layers need. Choose `optim=adamw_torch_fused`, `optim=muon`, `optimizer_states=8bit`, or one of torch's "
            f"{', '.join(name for name in SEPARABLE if hasattr(torch.optim, name))}; or `memory=off`."
        )


class UpdateBuffers:
    """
    What the update of a unit needs beside its weights: masters of weights that travel rounded, gradients, and states.

    They lie one after the other in `size` bytes of the device, and in buffers of the host: one for the masters, one for
    the gradients, which do not come back, and one for the states of each type (`torch.save` takes no views of one
    memory as several types). Tensors are named by the identity of the model's parameter, states by that and their name.
    A unit that is updated `in_backward` has its gradients on the device already.
    """

    def __init__(
        self,
        unit: Unit,
        params: list[StreamedParameter],
        states: list[tuple[tuple[int, str], torch.Size, torch.dtype]],
        *,
        in_backward: bool,
    ):
        self.unit, self.params = unit, params
        pairs = [(param.parameter, param.master) for param in params if not in_backward]
        types = dict.fromkeys(dtype for _, _, dtype in states)
        gradients = Packing((id(parameter), master.shape, master.dtype) for parameter, master in pairs)
        of_states = [Packing(state for state in states if state[2] == dtype) for dtype in types]
        self._packings = [unit.storage.wide_packing, gradients, *of_states]
        self._starts = [0, *itertools.accumulate(packing.size for packing in self._packings)]
        self.size = self._starts[-1]
        self.locked_bytes = self.size - unit.storage.wide_packing.size
        self._gradients: Tensor | None = None
        self._states: list[Tensor] = []
        self.states: dict[tuple[int, str], Tensor] = {}
        """Where the states lie on the host."""
        self.has_states = False
        """Some of them are there."""

    def lock(self) -> None:
        """Page-lock the host's buffers that are not there."""
        pin, (_, gradients, *of_states) = self.unit.storage.pin, self._packings
        if self._gradients is None and gradients.size:
            self._gradients = host_buffer(gradients.size, pin=pin)
            views = gradients.views(self._gradients)
            for param in self.params:
                param.gradient = views[id(param.parameter)]
        if not self._states:
            self._states = [host_buffer(packing.size, pin=pin) for packing in of_states]
            for packing, buffer in zip(of_states, self._states):
                self.states |= packing.views(buffer)

    def drop_gradients(self) -> None:
        """Give the memory of the gradients back."""
        self._gradients = None

    def needed(self) -> list[tuple[int, Tensor, Event]]:
        """Return what travels to the device: where it begins there, the host's buffer, and when it may leave."""
        storage, found = self.unit.storage, []
        for start, buffer in self.written(states=self.has_states):
            found.append((start, buffer, storage.written))
        if self._gradients is not None:  # last: those of the first units have only just been sent
            found.append((self._starts[1], self._gradients, storage.gradients_sent))
        return found

    def written(self, *, states: bool = True) -> list[tuple[int, Tensor]]:
        """Return what an update writes, `states` among it: where each begins on the device, and the host's buffer."""
        masters = self.unit.storage.wide
        of_masters = [] if masters is None else [(self._starts[0], masters)]
        return [*of_masters, *(zip(self._starts[2:], self._states) if states else ())]

    def views(self, buffer: Tensor) -> tuple[dict[Any, Tensor], dict[Any, Tensor], dict[Any, Tensor]]:
        """Return masters, gradients and states in a buffer of the device."""
        masters, gradients, states = {}, {}, {}
        places = (masters, gradients, *[states] * len(self._states))
        for place, packing, start in zip(places, self._packings, self._starts):
            place |= packing.views(buffer[start:])
        return masters, gradients, states


def _travels(value: Any) -> bool:
    """Whether an entry of an optimizer's state lies on the device: step counters may lie on the host."""
    return torch.is_tensor(value) and (value.dim() > 0 or value.device.type != "cpu")


class _Group(dict):
    """A group of an optimizer that calls `asked` before it gives its parameters to anybody."""

    def __init__(self, group: dict, asked: Callable[[], None]):
        super().__init__(group)
        self.asked = asked

    def __getitem__(self, name):
        if name == "params":
            self.asked()
        return super().__getitem__(name)


class _States(UserDict):
    """States of an optimizer by its parameters, and by those of the model."""

    def __init__(self, states: dict, counterpart: Callable[[Any], Any]):
        self.data, self.counterpart = states, counterpart

    def __getitem__(self, key):
        return self.data[self.counterpart(key)]

    def __setitem__(self, key, item):
        self.data[self.counterpart(key)] = item

    def __delitem__(self, key):
        del self.data[self.counterpart(key)]

    def __contains__(self, key):
        return self.counterpart(key) in self.data


def _members(group: dict) -> list[nn.Parameter]:
    """Return the parameters of a group, and let nothing be called."""
    return dict.__getitem__(group, "params")


class LazyOptimizer(torch.optim.Optimizer, Updates):
    """
    Replaces an optimizer whose parameters are partly streamed, with the same groups, state and state dict.

    In the groups the masters take the places of the streamed parameters, so that schedulers, checkpoints and everything
    that reads `state` find what they expect. [`step`] steps what is resident and puts off the rest.

    `base` is made over the model's parameters, as usual. With `in_backward` layers are stepped inside the backward
    pass: their gradients must be used as they are, at the learning rates of that moment.

    Raises:
        UnsupportedOptimizerError: If `base` cannot be stepped unit by unit.
    """

    def __init__(self, base: torch.optim.Optimizer, streamer: LayerStreamer, *, in_backward: bool = False):
        check_separable(base)
        self.base, self.streamer = base, streamer
        self._gradients: dict[int, Tensor] = {}
        """On the device, of the unit that the backward pass is in, by the identity of the model's parameter."""
        self._step_begun = False
        """A unit was stepped, and the step of the others has not come."""
        self._written: Event = None
        """When what the last update wrote has left."""
        for group in base.param_groups:
            for index, parameter in enumerate(group["params"]):
                group["params"][index] = master = streamer.counterpart(parameter)
                if master is not parameter and parameter in base.state:
                    base.state[master] = base.state.pop(parameter)
        # Not Optimizer.__init__: groups and state are those of `base`, not copies.
        self.defaults = base.defaults
        self._watch_groups()
        vars(self).update({name: hooks for name, hooks in vars(base).items() if name.endswith("_hooks")})
        held = {id(parameter) for group in base.param_groups for parameter in group["params"]}
        self._params: dict[Unit, list[StreamedParameter]] = {}
        """What may be trained, also what is frozen now and waits for its turn."""
        for unit in streamer.units:
            params = [p for p in unit.planned if p.parameter.requires_grad or id(p.master) in held]
            if params:
                self._params[unit] = params
        self._without_group = [param for param in streamer.masters.values() if id(param.master) not in held]
        """They have gradients, whose norm counts, and are not stepped."""
        self._unit_of = {id(param.master): unit for unit, params in self._params.items() for param in params}
        self.in_backward = self._params.keys() & streamer.travelling if in_backward else set()
        """The units that are stepped inside the backward pass."""
        self.pending: dict[Unit, tuple[list[dict], Tensor | None]] = {}
        """The inputs of a unit's step: its groups, and the scale of its gradients."""
        self._scale: Tensor | None = None
        self._checked = self._states_given = False
        self._beside: dict[Unit, UpdateBuffers] = {}
        self._ring: Ring | None = None
        self._ring_size = 0
        self._coming: dict[Unit, Slot] = {}
        """Where that which the update of a unit needs lies on the device."""
        self._updating: Unit | None = None
        """The unit that is being updated. After an error: the one whose update it cut short."""
        streamer.updates = self

    @property
    def torn(self) -> str | None:
        if self._updating is not None:
            return f"The update of `{self._updating.name}` was cut short."
        return "The backward pass has updated some layers, and the step has not ended." if self._step_begun else None

    # Code of a user asks for weights or states.

    @property
    def param_groups(self) -> list[dict]:  # ty: ignore[incompatible-property-override]
        return self.base.param_groups

    @property
    def state(self) -> Any:  # ty: ignore[incompatible-property-override]
        """States as they are after every step. What is changed in them counts from the next on."""
        self._give_out()
        self._states_given = True
        return _States(self.base.state, self.streamer.counterpart)

    def _watch_groups(self) -> None:
        self.base.param_groups[:] = [_Group(group, self._give_out) for group in self.base.param_groups]

    def _give_out(self) -> None:
        """Somebody may read or write masters or states."""
        if self.streamer.attached:
            self.flush()
            for unit in self.streamer.units:
                unit.written = True

    def take_states(self) -> None:
        """Let states travel from now on that code of a user may have changed."""
        if self._states_given:
            self._states_given = False
            self._place_states()

    # A run begins and ends.

    def attach(self) -> None:
        """Make room for what travels, on the host and on the device."""
        if not self._beside:
            group_of = {id(parameter): group for group in self.param_groups for parameter in _members(group)}
            kinds: dict[tuple, dict[str, Tensor]] = {}
            for unit, params in self._params.items():
                states = self._states_of(params, group_of, kinds)
                self._beside[unit] = UpdateBuffers(unit, params, states, in_backward=unit in self.in_backward)
            of_layers, of_ends = (
                max((self._beside[unit].size for unit in units if unit in self._beside), default=0)
                for units in (self.streamer.travelling, self.streamer.ends)
            )
            if self.in_backward:  # what a layer wrote leaves while the next one's comes
                self._ring_size = max(2 * of_layers, of_ends)
            else:  # room for the largest unit, and for the layer that is fetched ahead
                self._ring_size = max(of_layers, of_ends) + of_layers * bool(self.streamer.ahead)
        self._lock()
        self._place_states()

    def _states_of(self, params: list[StreamedParameter], group_of: dict[int, dict], kinds: dict) -> list[tuple]:
        """Return names, shapes and types of states. The optimizer makes some like them of each kind once."""
        states: list[tuple] = []
        for param in params:
            master, group = param.master, group_of.get(id(param.master))
            if group is None:
                continue
            kind = (id(group), master.shape, master.dtype)
            if kind not in kinds:
                like = nn.Parameter(torch.zeros(master.shape, dtype=master.dtype, device=self.streamer.device))
                like.grad = torch.zeros_like(like)
                optimizer = self._over([{**group, "params": [like]}])
                optimizer.step()
                kinds[kind] = {name: v.to("meta") for name, v in optimizer.state[like].items() if _travels(v)}
            states += [((id(param.parameter), name), v.shape, v.dtype) for name, v in kinds[kind].items()]
        return states

    def _lock(self) -> None:
        total, done = sum(beside.locked_bytes for beside in self._beside.values()), 0
        for beside in self._beside.values():
            quarters = 4 * done // max(total, 1)
            beside.lock()
            done += beside.locked_bytes
            if total > 2**30 and 4 * done // total > quarters:
                ready = "%.1f of %.1f GiB of host memory are ready for gradients and states of streamed layers."
                logger.info(ready, done / 2**30, total / 2**30)

    def _place_states(self) -> None:
        """Let the states that are there lie where they travel from."""
        for beside in self._beside.values():
            for param in beside.params:
                state, key = self.base.state.get(param.master, {}), id(param.parameter)
                for name in [name for name in state if (key, name) in beside.states]:
                    state[name], beside.has_states = beside.states[key, name].copy_(state[name]), True

    def detach(self, *, for_good: bool) -> None:
        """Give back what an error may have left of a step, and `for_good` the memory of the gradients."""
        self._ring = None
        self._coming.clear()
        if for_good:
            self.pending.clear()
            for beside in self._beside.values():
                beside.drop_gradients()

    def held(self) -> list[Tensor]:
        return [] if self._ring is None else [self._ring.whole.buffer]

    # A window ends.

    def settle_gradients(self) -> None:
        """Let the gradients be on the host as the step will use them, because code of a user reads or changes them."""
        self.streamer.gradients_arrived()
        if self._scale is not None:
            scale, self._scale = self._scale.cpu(), None
            for gradient in [param.master.grad for _, param in self._updated() if param.master.grad is not None]:
                gradient.mul_(scale)

    @contextlib.contextmanager
    def showing_used_gradients(self) -> Generator[None]:
        """Context in which parameters still have the gradients that the last step has used."""
        self.shows_used = True
        try:
            yield
        finally:
            self.shows_used = False

    def used_gradient(self, unit: Unit, param: StreamedParameter) -> Tensor | None:
        """Return a copy of a gradient that the last step has used."""
        groups, scale = self.pending.get(unit, ((), None))
        if not any(master is param.host_weights for group in groups for master in group["params"]):
            return None
        self.streamer.gradients_arrived()
        gradient = param.place_of_gradient(pin=self.streamer.transfers.beside).clone()
        return gradient if scale is None else gradient.mul_(scale.to(gradient.device))

    def _updated(self) -> list[tuple[Unit, StreamedParameter]]:
        """Return the streamed parameters that have a master, with their units."""
        of_units = ((unit, param) for unit in self.streamer.units for param in unit.storage.params)
        return [(unit, param) for unit, param in of_units if param.host_weights is not None]

    def total_norm(self, parameters: Iterable[nn.Parameter], *, now: bool) -> Tensor:
        """
        Return the norm of all gradients of the window, as `torch.nn.utils.clip_grad_norm_` computes it, on the device.

        A gradient that left the device is there no more, but its norm is, and the norm of a norm is that norm. With
        `now` the host waits for all gradients and the norm, because somebody reads them before the step.
        """
        return self._norm([self.streamer.counterpart(parameter) for parameter in parameters], now=now)

    def _norm(self, parameters: list[nn.Parameter], *, now: bool) -> Tensor:
        self.streamer.end_backward()
        parts: list[Tensor] = []
        for parameter in parameters:
            param = self.streamer.masters.get(id(parameter))
            if param is not None and param.norm is not None:  # its gradient may be gone
                parts.append(param.norm)
                param.norm = None
            elif parameter.grad is not None:
                parts.append(parameter.grad)
        on_host = [place for place, part in enumerate(parts) if part.device.type != self.streamer.device.type]
        if on_host:  # code of a user may have changed them: their norms are computed there, and move at once
            norms = torch.stack([torch.linalg.vector_norm(parts[place]) for place in on_host])
            for place, of_part in zip(on_host, norms.to(self.streamer.device)):
                parts[place] = of_part
        norm = torch.nn.utils.get_total_norm(parts)
        if now:
            # It travels behind the gradients, so that the host waits once for all of them.
            landing = torch.empty(norm.shape, dtype=norm.dtype, pin_memory=self.streamer.transfers.beside)
            self.streamer.transfers.send(norm, landing)
            self.streamer.gradients_arrived()
            norm = landing.clone()  # not page-locked
        if not self._checked:
            self._checked = True
            unused = [unit.name for unit in self.streamer.layers if unit.calls == 0 and not unit.resident]
            if unused and not torch.isfinite(norm):
                raise RuntimeError(
                    f"The weights of `{unused[0]}` are used, but its `forward` is never called, so they were "
                    "placeholders. This model cannot be streamed. Train it with `memory=off`."
                )
        return norm

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float, *, now: bool) -> Tensor:
        """
        Clip by the global norm, exactly as `torch.nn.utils.clip_grad_norm_` does over the model's parameters in their
        order; returns the norm before clipping. With `now` the waiting gradients are scaled at once, because leaps read
        them before the step; otherwise they are scaled when their unit is stepped.
        """
        parameters = [self.streamer.counterpart(parameter) for parameter in parameters]
        norm = self._norm(parameters, now=now)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self._scale = None
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if now or id(parameter) not in self._unit_of:
                parameter.grad.mul_(scale)  # a number on the host multiplies on any device, and nothing is copied
            else:
                self._scale = scale
        return norm

    @torch.no_grad()
    def step(self, closure=None):
        """Step the resident parameters, and put off the units' steps, with the current learning rates."""
        if hooks := self._optimizer_step_pre_hooks:
            self.settle_gradients()
            for hook in hooks.values():
                hook(self, (), {})
        self.streamer.take_written()
        self.streamer.end_backward()
        self.streamer.check_recomputed()
        self.streamer.look_at_parameters()
        resident: list[dict] = []
        groups: dict[Unit, list[dict]] = {}
        for group in self.param_groups:
            by_unit: dict[Unit | None, list[nn.Parameter]] = {}
            for parameter in _members(group):
                if parameter.grad is not None:
                    by_unit.setdefault(self._unit_of.get(id(parameter)), []).append(parameter)
            for unit, parameters in by_unit.items():
                of_unit = resident if unit is None else groups.setdefault(unit, [])
                of_unit.append({**group, "params": parameters})
        scale, self._scale = self._scale, None
        if groups:
            self._make_room()  # if there is none, nothing was stepped
        if resident:
            optimizer = self._over(resident)
            optimizer.state = self.base.state
            optimizer.step()
        # In the order in which the next forward pass needs them. The groups are copies, with the rate of this step: the
        # scheduler will have set the next one when the unit is stepped.
        for unit in [unit for unit in self.streamer.units if unit in groups]:
            self.pending[unit] = groups[unit], scale
            for master in [master for group in groups[unit] for master in group["params"]]:
                master.grad = None  # its gradient lies where it landed; a step before the update must not see it
        for param in self._without_group:
            param.master.grad = param.norm = None
        self._step_begun = self.streamer.last_pass = False
        for unit in self.in_backward:
            unit.open_calls = 0  # of calls that had no part in the loss
        if self._ring is not None and not self.pending:
            self._give_room_back()
        for unit in self.streamer.first():
            self.streamer.fetch(unit)
        if hooks := self._optimizer_step_post_hooks:
            self._give_out()
            for hook in hooks.values():
                hook(self, (), {})

    def _over(self, groups: list[dict]) -> torch.optim.Optimizer:
        """Return the same optimizer over other groups."""
        make: Any = type(self.base)  # which has its own defaults, as `Optimizer` itself has not
        return make(groups)

    # A unit is updated.

    def _make_room(self) -> None:
        """Allocate the ring. It is there until nothing is pending."""
        if self._ring is None:
            self._ring = Ring(self._ring_size, self.streamer.device)
            self.streamer.transfers.release(self._ring.whole)  # its memory may still be read by what was computed

    def _give_room_back(self) -> None:
        """Nothing is pending: what computes next gets the memory, once all has left."""
        self.streamer.transfers.wait(self._written)
        self._ring = None
        self._coming.clear()

    def begin_load(self, unit: Unit) -> None:
        """Start to copy what the update needs to the device, if there is room in the ring."""
        if unit in self._coming or self._ring is None:
            return
        beside, transfers = self._beside[unit], self.streamer.transfers
        slot = self._ring.take(beside.size)
        if slot is not None:
            self._coming[unit] = slot
            # A first update inside the backward pass makes its states: it waits until what lay in their place has left.
            for place, buffer, after in beside.needed() or [(0, slot.buffer[:0], None)]:
                transfers.load(slot, buffer, start=place, after=after)

    def before_backward(self, unit: Unit) -> None:
        """Let what the update of a unit needs come while the unit computes."""
        self._make_room()
        self.begin_load(unit)

    def keep(self, param: StreamedParameter, gradient: Tensor) -> None:
        """Keep a gradient on the device, until all of its unit are there."""
        self._gradients[id(param.parameter)] = gradient

    @torch.no_grad()
    def update(self, unit: Unit) -> None:
        """
        Step a unit in its slot on the device, and start to copy states and weights back to the host: a pending one,
        whose gradients came with its states, or one whose gradients were kept.
        """
        here, self._gradients = self._gradients, {}
        if deferred := unit in self.pending:
            groups, scale = self.pending.pop(unit)
            if unit in self.in_backward:  # nobody could say there that its gradients were complete
                here = self._gradients_from_host(unit)
        elif here:
            groups, scale, self._step_begun = self._groups_of(unit, here), None, True
        else:
            return
        beside, storage, transfers, ring = self._beside[unit], unit.storage, self.streamer.transfers, self._ring
        if ring is None or unit.slot is None or storage.packed is None:
            raise RuntimeError(f"`{unit.name}` cannot be updated: it is not on the device.")
        if unit not in self._coming:  # units that were fetched for a turn that was not taken are in its way
            ring.forget()
            self._coming.clear()
            self.begin_load(unit)
        self._updating, slot = unit, self._coming.pop(unit)  # an error from here on tears the unit: see `torn`
        unit.updates += 1
        transfers.wait(slot.ready)
        masters, gradients, states = beside.views(slot.buffer)
        for group in groups:  # one call of the optimizer for each: its options may differ within a layer
            # The first makes states, which are not in the slot yet: of one parameter at a time.
            for params in [group["params"]] if beside.has_states else zip(group["params"]):
                self._step(beside, {**group, "params": [*params]}, scale, masters, gradients | here, states)
        for start, buffer in beside.written():
            transfers.send(slot.buffer[start : start + len(buffer)], buffer, keep=False)
        size = storage.whole_bytes  # what lies behind it is frozen
        storage.written = transfers.send(unit.slot.buffer[:size], storage.packed[:size], keep=False)
        slot.sent = unit.slot.sent = self._written = storage.written
        beside.has_states = True
        ring.give_back(slot)
        self._updating = None
        if deferred and not self.pending:
            self._give_room_back()

    def _groups_of(self, unit: Unit, gradients: dict[int, Tensor]) -> list[dict]:
        """Return the groups with the parameters of a unit alone, of which there are gradients."""
        masters = {id(param.master) for param in unit.planned if id(param.parameter) in gradients}
        groups = [{**group, "params": [p for p in _members(group) if id(p) in masters]} for group in self.param_groups]
        return [group for group in groups if group["params"]]

    def _gradients_from_host(self, unit: Unit) -> dict[int, Tensor]:
        """Return the gradients of a unit that has no place for them beside its states."""
        fetch, after = self.streamer.transfers.fetch, unit.storage.gradients_sent
        sent = {id(param.parameter): param.gradient for param in unit.planned if param.gradient is not None}
        return {key: fetch(gradient, after=after).take() for key, gradient in sent.items()}

    def _step(
        self, beside: UpdateBuffers, group: dict, scale: Tensor | None, masters: dict, gradients: dict, states: dict
    ) -> None:
        """Step parameters of a unit by one call of the optimizer."""
        places, stepped = beside.states, []
        # The optimizer steps stand-ins. They lie in the slot of the unit (weights that travel as they are), or in that
        # of the update: fp32 masters of weights in bf16, all gradients, and states (of AdamW two, of the same shape).
        for master in group["params"]:
            parameter = self.streamer.masters[id(master)].parameter
            stand_in = nn.Parameter(masters.get(id(parameter), parameter.data))
            gradient = gradients[id(parameter)]
            stand_in.grad = gradient if scale is None else gradient.mul_(scale)
            stepped.append((master, parameter, stand_in))
        optimizer = self._over([{**group, "params": [stand_in for _, _, stand_in in stepped]}])
        for master, parameter, stand_in in stepped:
            optimizer.state[stand_in] = own = dict(self.base.state.get(master, {}))
            for name in own:
                own[name] = states.get((id(parameter), name), own[name])
        optimizer.step()
        for master, parameter, stand_in in stepped:
            own = self.base.state[master]
            for name, value in optimizer.state[stand_in].items():
                key = id(parameter), name
                if key not in places:
                    own[name] = value
                elif name not in own:  # made by this step, and not in the slot
                    states[key].copy_(value)
                    own[name] = places[key]
            if id(parameter) in masters:
                parameter.data.copy_(stand_in)

    # Nothing is left pending.

    def flush(self) -> None:
        """Finish every step. After it the masters are the weights, nothing reads them and nothing travels."""
        for unit in [unit for unit in self.streamer.units if unit in self.pending]:
            self.streamer.bring_in(unit, backward=False)
            self.streamer.release(unit)
        # Also what comes in: layers that `step` fetched ahead are read from masters, which a leap may write now.
        self.streamer.transfers.finish()

    def drop_gradients(self) -> None:
        """Drop gradients that no step used, because the step was withheld or an error cut the window short."""
        for unit, param in self._updated():
            self.streamer.use_gradient(unit, param, None)
        self._scale = None
        self._gradients.clear()

    def add_param_group(self, param_group: dict) -> None:
        """Add a group of parameters that are not streamed: there is no place for the states of others."""
        parameters = param_group["params"]
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for param in [self.streamer.streamed[id(p)] for p in parameters if id(p) in self.streamer.streamed]:
            raise cannot_train(param)
        self.base.add_param_group({**param_group, "params": parameters})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. Those that a step has put off lie elsewhere."""
        self.drop_gradients()
        for parameter in itertools.chain(*map(_members, self.param_groups)):
            parameter.grad = None

    def state_dict(self) -> dict:
        """Return the plain optimizer's state dict, after every step."""
        self.flush()
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state dict of the plain optimizer. States of streamed parameters stay on the host."""
        self.flush()
        self.base.load_state_dict(state_dict)
        self._watch_groups()
        self._place_states()
