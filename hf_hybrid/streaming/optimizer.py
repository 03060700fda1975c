"""
The lazy update: the optimizer step of streamed units, put off until a unit is needed again, and exact.

The obvious place for a layer's update is right after its gradient, while the layer is still on the device. But then the
global gradient norm is not known yet, so clipping could only be approximated, and with gradient accumulation the
gradient is not complete. The other obvious place, after the whole backward pass, makes the device wait while the host
steps every weight of the model. The update can be put off instead, because nobody reads a layer's weights before its
next forward pass:

1. During the window, gradients of streamed layers add up in host memory, in the `grad` of their masters.
2. When the window is over, every gradient is there. Its global norm is exact, and so is clipping: the scale is one
   number, which is remembered and applied when the layer is stepped.
   The norm of each gradient is computed before that, on the device as it leaves. A gradient that leaves in fewer bytes
   than its master has (one micro-batch under autocast) is converted by the thread of step 4 when it lands.
3. `step()` steps the resident parameters. For each unit it freezes everything that the unit's step depends on: the
   parameter groups with the learning rates of this moment, and the scale. Then it returns, and the next window begins.
4. A thread steps unit after unit on the host, in forward order, while the device already computes the embeddings and
   the first layers. `LayerStreamer.bring_in` waits for a unit's update before its weights travel.

Every parameter sees the gradient, learning rate, scale and state that it would see in a plain run, in the same
arithmetic. So the weights are equal bit for bit, as long as the optimizer steps each parameter by itself
([`check_separable`]); in fp32 on a CPU the tests compare them with plain `Trainer`.

With 8-bit states (`on_device`) the host would be too slow: the kernels of bitsandbytes are made for the device. Then
gradients and moments travel in beside the weights (masters too, where the weights travel rounded), the unit is stepped
in its slot just before its forward, and weights and moments travel back.

Readers of masters or states (saving, a leap, the end of training) call `flush` first, which finishes what is pending.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor, nn

from hf_hybrid.machine import host_tensor
from hf_hybrid.streaming.streamer import LayerStreamer, Updates
from hf_hybrid.streaming.transfers import Fetched, is_big
from hf_hybrid.streaming.units import StreamedParameter, Unit

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
    name = type(optimizer).__name__
    known = type(optimizer).__module__.partition(".")[0] in ("torch", "transformers", "hf_hybrid")
    if name not in SEPARABLE or not known:
        raise UnsupportedOptimizerError(
            f"`{type(optimizer).__module__}.{name}` is not known to step each parameter by itself, which streamed "
            "layers need. Choose `optim=adamw_torch_fused`, `optim=muon`, `optimizer_states=8bit`, or one of torch's "
            f"{', '.join(name for name in SEPARABLE if hasattr(torch.optim, name))}; or `memory=off`."
        )


class LazyOptimizer(torch.optim.Optimizer, Updates):
    """
    Replaces an optimizer whose parameters are partly streamed, with the same groups, state and state dict.

    In the groups the masters take the places of the streamed parameters, so that schedulers, checkpoints and everything
    that reads `state` find what they expect. [`step`] steps what is resident and schedules the rest.

    `base` is made over the model's parameters, as usual. With `on_device` units are stepped on the device as they are
    brought in, with gradients and states streamed too, instead of on the host.

    Raises:
        UnsupportedOptimizerError: If `base` cannot be stepped unit by unit.
    """

    def __init__(self, base: torch.optim.Optimizer, streamer: LayerStreamer, *, on_device: bool = False):
        check_separable(base)
        self.base, self.streamer, self.on_device = base, streamer, on_device
        for group in base.param_groups:
            for index, parameter in enumerate(group["params"]):
                group["params"][index] = master = streamer.counterpart(parameter)
                if master is not parameter and parameter in base.state:
                    base.state[master] = base.state.pop(parameter)
        # Not Optimizer.__init__: groups and state are those of `base`, not copies.
        self.defaults, self.param_groups, self.state = base.defaults, base.param_groups, base.state
        vars(self).update({name: hooks for name, hooks in vars(base).items() if name.endswith("_hooks")})
        self._unit_of = {id(param.master): unit for unit in streamer.units for param in unit.trainable}
        self.pending = {}
        """The inputs of a unit's step: the optimizer with its groups, and the scale of its gradients."""
        self._scale: Tensor | None = None
        self._checked = False
        self._worker = ThreadPoolExecutor(
            1, "lazy_update", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )
        self._coming: dict[int, tuple[Fetched, dict[str, Fetched]]] = {}
        self.updating: Unit | None = None
        """The unit that is updated on the device. After an error: the one whose update it cut short."""
        streamer.updates = self
        for unit in streamer.units if on_device else ():
            unit.storage.lock_masters()

    # A window ends.

    def total_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """
        Return the norm of all gradients of the window, as `torch.nn.utils.clip_grad_norm_` computes it.

        A gradient that left the device is there no more, but its norm is, and the norm of a norm is that norm.
        """
        self.streamer.end_backward()
        parameters = [self.streamer.counterpart(parameter) for parameter in parameters]
        norms = [norm for parameter in parameters if (norm := self._norm_or_gradient(parameter)) is not None]
        resident = [norm for norm in norms if norm.device.type != "cpu"]
        on_host = [norm for norm in norms if norm.device.type == "cpu"]
        streamed = any(id(p) in self.streamer.masters and p.grad is not None for p in parameters)
        norm = torch.nn.utils.get_total_norm(resident)
        if resident and streamed:
            # It travels behind the gradients, so that the host waits once for all of them.
            landing = host_tensor(norm.shape, norm.dtype, pin=self.streamer.transfers.beside)
            self.streamer.transfers.send(norm, landing)
            self.streamer.gradients_arrived()
            norm = landing.clone()  # not page-locked
        else:
            self.streamer.gradients_arrived()
        if on_host:
            host_norm = torch.nn.utils.get_total_norm(on_host)
            norm = torch.linalg.vector_norm(torch.stack([host_norm, norm])) if resident else host_norm
        if not self._checked:
            self._checked = True
            unused = [unit.name for unit in self.streamer.layers if unit.calls == 0 and not unit.resident]
            if unused and not torch.isfinite(norm):
                raise RuntimeError(
                    f"The weights of `{unused[0]}` are used, but its `forward` is never called, so they were "
                    "placeholders. This model cannot be streamed. Train it with `memory=off`."
                )
        return norm

    def _norm_or_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        param = self.streamer.masters.get(id(parameter))
        if parameter.grad is None or param is None or param.norm is None:
            return parameter.grad
        norm, param.norm = param.norm, None
        return norm

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float, *, now: bool) -> Tensor:
        """
        Clip by the global norm, exactly as `torch.nn.utils.clip_grad_norm_` does over the model's parameters in their
        order; returns the norm before clipping. With `now` the waiting gradients are scaled at once, because leaps read
        them before the step; otherwise they are scaled when their unit is stepped.
        """
        parameters = [self.streamer.counterpart(parameter) for parameter in parameters]
        norm = self.total_norm(parameters)
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
        """Step the resident parameters, and schedule the units' steps with the current learning rates."""
        self.streamer.gradients_arrived()
        resident: list[dict] = []
        groups: dict[Unit, list[dict]] = {}
        for group in self.param_groups:
            by_unit: dict[Unit | None, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_unit.setdefault(self._unit_of.get(id(parameter)), []).append(parameter)
            for unit, parameters in by_unit.items():
                of_unit = resident if unit is None else groups.setdefault(unit, [])
                of_unit.append({**group, "params": parameters})
        scale, self._scale = self._scale, None
        if resident:
            self._optimizer_over(resident).step()
        for unit in [unit for unit in self.streamer.units if unit in groups]:  # what is needed first is stepped first
            self.streamer.forget(unit)
            pending = self._optimizer_over(groups[unit]), scale
            if self.on_device:
                self.pending[unit] = pending
            else:
                unit.updating = True
                unit.update = self._worker.submit(self._step_on_host, unit, *pending)
        for unit in self.streamer.travelling[: self.streamer.ahead + 1]:
            self.streamer.fetch(unit)

    def _optimizer_over(self, groups: list[dict]) -> torch.optim.Optimizer:
        """Return the same optimizer over some of the parameters, with the same state."""
        clone = self._new(groups)
        clone.state = self.state
        return clone

    def _new(self, groups: list[dict]) -> torch.optim.Optimizer:
        make: Any = type(self.base)  # which has its own defaults, as `Optimizer` itself has not
        return make(groups)

    @torch.no_grad()
    def _step_on_host(self, unit: Unit, optimizer: torch.optim.Optimizer, scale: Tensor | None) -> None:
        masters = [master for group in optimizer.param_groups for master in group["params"]]
        if scale is not None and scale.item() != 1.0:
            torch._foreach_mul_([master.grad for master in masters], scale)
        optimizer.step()
        unit.storage.refresh()
        for master in masters:
            master.grad = None
        self.streamer.updated(unit)  # here and not by a callback: once the future is done, no load begins any more

    def widen_soon(self, param: StreamedParameter) -> Future:
        return self._worker.submit(param.widen_when_it_lands)

    def begin_load(self, unit: Unit) -> None:
        """Start to copy gradients and states to the device beside the weights."""
        fetch, self.updating = self.streamer.transfers.fetch, unit
        groups = self.pending[unit][0].param_groups
        for master in [master for group in groups for master in group["params"] if id(master) not in self._coming]:
            # Noted one by one: where memory ends in between, copies under way must not be forgotten.
            _, states = self._coming[id(master)] = fetch(master.grad), {}
            for name, value in self.state.get(master, {}).items():
                if is_big(value):
                    states[name] = fetch(value)
        self.updating = None

    @torch.no_grad()
    def before_forward(self, unit: Unit) -> None:
        """Step a unit in its slot on the device, and copy weights and states back to the host."""
        self.updating, (optimizer, scale) = unit, self.pending.pop(unit)
        params = {id(param.master): param for param in unit.trainable}
        for group in optimizer.param_groups:
            masters, group["params"] = group["params"], []
            for master in masters:
                self._step_one(params[id(master)], group, scale)
        if unit.slot is not None:
            unit.slot.sent = unit.storage.written
        self.updating = None

    def _step_one(self, param: StreamedParameter, group: dict, scale: Tensor | None) -> None:
        master, transfers = param.master, self.streamer.transfers
        storage = self._unit_of[id(master)].storage
        gradient, states = self._coming.pop(id(master))
        weights = param.parameter.data
        travels_rounded = weights.dtype != master.dtype
        if travels_rounded:
            weights = transfers.fetch(master.data).take()
        on_device = nn.Parameter(weights)
        on_device.grad = gradient.take()
        if scale is not None:
            on_device.grad.mul_(scale)
        stepper = self._new([{**group, "params": [on_device]}])
        host_state = self.state.get(master, {})
        # A step counter of one element stays where the optimizer keeps it: on the host.
        stepper.state[on_device] = {k: states[k].take() if k in states else v for k, v in host_state.items()}
        stepper.step()
        for name, value in stepper.state[on_device].items():
            if is_big(value):
                if name not in host_state:
                    host_state[name] = host_tensor(value.shape, value.dtype, pin=transfers.beside)
                transfers.send(value, host_state[name])
            else:
                host_state[name] = value
        self.state[master] = host_state
        storage.written = transfers.send(on_device.data, master.data)
        if travels_rounded and storage.packed is not None:
            param.parameter.data.copy_(weights)
            storage.written = transfers.send(param.parameter.data, param.view(storage.packed))
        master.grad = None

    # Nothing is left pending.

    def flush(self) -> None:
        """Finish every scheduled step. After it the masters are the weights, nothing reads them and nothing travels."""
        for unit in self.streamer.units:
            if unit.update is not None:
                unit.update.result()
                unit.update = None
        for unit in [unit for unit in self.streamer.units if unit in self.pending]:
            self.streamer.bring_in(unit, backward=False)
            self.streamer.release(unit)
        # Also what comes in: layers that `step` fetched ahead are read from masters, which a leap may write now.
        self.streamer.transfers.finish()

    def drop_gradients(self) -> None:
        """Drop gradients that no step used, because the step was withheld or an error cut the window short."""
        scheduled = {unit for unit in self.streamer.units if unit.update is not None or unit in self.pending}
        for unit in self.streamer.units:
            if unit not in scheduled:
                for param in unit.trainable:
                    if param.widening is not None:
                        wait([param.widening])
                    param.master.grad = param.norm = param.widening = None
        self._scale = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of resident parameters. Those of units are dropped with their step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._unit_of:
                    parameter.grad = None

    def state_dict(self) -> dict:
        """Return the plain optimizer's state dict, after every scheduled step."""
        self.flush()
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state dict of the plain optimizer. States of streamed parameters stay on the host."""
        self.flush()
        self.base.load_state_dict(state_dict)
        self.param_groups, self.state = self.base.param_groups, self.base.state
        if self.on_device and self.streamer.transfers.beside:
            for param in self.streamer.masters.values():
                state = self.state.get(param.master, {})
                for name in [name for name, value in state.items() if is_big(value)]:
                    # They travel at every step, so they are page-locked as those of a new run are.
                    state[name] = host_tensor(state[name].shape, state[name].dtype, pin=True).copy_(state[name])
