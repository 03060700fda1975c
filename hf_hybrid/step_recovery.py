"""Out-of-memory in the optimizer's step, where its states are made: tried again only if nothing has changed yet."""

from __future__ import annotations

import functools

import torch

from hf_hybrid.guard import free_memory
from hf_hybrid.optimizers import MuonAdamW
from hf_hybrid.recovery import OutOfMemoryRecovery, UnrecoveredMemoryError

Tensor = torch.Tensor


class Marks:
    """
    How often every parameter and state tensor of an optimizer had been written at some moment.

    torch counts writes in `Tensor._version`; its fused kernels do not count those to parameters, but step counters
    are written before them. A parameter counts as untouched only if none of this moved.

    Args:
        optimizer (`torch.optim.Optimizer`): Unwrapped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.versions = [parameter._version for parameter in self.parameters]
        self.states = [_versions(optimizer.state.get(parameter)) for parameter in self.parameters]

    @property
    def can_tell(self) -> bool:
        """Whether writes of this optimizer leave marks."""
        of_torch = type(self.optimizer).__module__.startswith("torch.optim") or isinstance(self.optimizer, MuonAdamW)
        groups = self.optimizer.param_groups
        # Its fused kernel writes weights without any counter.
        return of_torch and not (isinstance(self.optimizer, torch.optim.SGD) and any(g.get("fused") for g in groups))

    def restore(self) -> bool:
        """
        Drop states that were made since, if that leaves everything as it was.

        Returns:
            `bool`: `False` if a weight or state was changed, or nobody can tell; nothing is dropped then.
        """
        if not self.can_tell:
            return False
        made = []
        for parameter, version, known in zip(self.parameters, self.versions, self.states):
            state = self.optimizer.state.get(parameter)
            if parameter._version != version:
                return False
            if known:
                if _versions(state) != known:
                    return False
            elif state:
                if float(state.get("step", 0)) != 0:
                    return False
                made.append(parameter)
        for parameter in made:
            del self.optimizer.state[parameter]
        return True


def _versions(state: dict | None) -> dict[str, int] | None:
    return None if not state else {name: v._version for name, v in state.items() if isinstance(v, torch.Tensor)}


class RecoverableStep:
    """
    Stands in for `step` of a run's optimizer (the object, not its class) between [`install`] and [`remove`].

    Args:
        optimizer: As the trainer calls it, wrapped by accelerate.
        recovery (`OutOfMemoryRecovery`): What may be tried, and where it is written down.
        streamed (`bool`): Whether units are stepped later. Such a step is not tried again.
    """

    def __init__(self, optimizer, recovery: OutOfMemoryRecovery, *, streamed: bool):
        self.optimizer, self.recovery, self.streamed = optimizer, recovery, streamed
        self._before = vars(optimizer).get("step")  # schedulers place theirs in the object, too
        self._step = optimizer.step

    def install(self) -> None:
        """From now on."""
        self.optimizer.step = functools.wraps(self._step)(lambda closure=None: self.step(closure))

    def remove(self) -> None:
        """The optimizer as it was."""
        if self._before is None:
            del self.optimizer.step
        else:
            self.optimizer.step = self._before

    def step(self, closure=None) -> None:
        """
        The optimizer's step; once more after an out-of-memory, if nothing had changed.

        Raises:
            UnrecoveredMemoryError: If something had, or if it does not fit again.
        """
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        inner = getattr(inner, "base", inner)
        marks = Marks(inner)
        may_try_again = not self.streamed and getattr(self.optimizer, "scaler", None) is None
        if self._attempt(closure):
            return
        recovery = self.recovery
        if not marks.restore():
            raise UnrecoveredMemoryError(
                f"{recovery.where()}, in the step of `{type(inner).__name__}`: {recovery.reason} Some weights may have "
                "been stepped and others not, so that this state is not saved. Resume from the last checkpoint with "
                "less, for example `optimizer_states=8bit` or `memory=auto`."
            )
        if may_try_again and self._attempt(closure):
            recovery.note("optimizer step tried again")
            return
        if may_try_again and not marks.restore():
            raise UnrecoveredMemoryError(f"{recovery.where()}: {recovery.reason} Resume from the last checkpoint.")
        recovery.forget_attempt()
        recovery.give_up(
            f"{recovery.where()}, in the step of `{type(inner).__name__}`, which had changed nothing yet: "
            f"{recovery.reason}"
        )

    def _attempt(self, closure) -> bool:
        try:
            self._step(closure)
            return True
        except Exception as error:
            self.recovery.catch(error)
        free_memory()
        return False
