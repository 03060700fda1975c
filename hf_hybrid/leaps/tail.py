"""Mean of the weights over the end of a run (LAWA, arXiv 2306.03241): averaging back where the rate decays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Tensor = torch.Tensor


class TailAverage:
    """
    Running mean of the trainable weights over the last real steps, put in their place at the end if that is better.

    Args:
        names (`Sequence[str]`), parameters (`Sequence[torch.nn.Parameter]`): The trainable parameters.
        share (`float`): Share of the run that is averaged over, in `(0, 1]`.
        buffer (`Callable`): From a parameter to an fp32 buffer of its shape. Called when the tail begins: until then
            nothing is held.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        *,
        share: float,
        buffer: Callable[[Tensor], Tensor],
    ):
        self.names, self.parameters = list(names), list(parameters)
        self.share, self.buffer = share, buffer
        self.mean: list[Tensor] = []
        self.count = 0

    def wants(self, progress: float) -> bool:
        """Whether weights at `progress` (share of the run that is done) belong to the tail."""
        return progress > 1.0 - self.share

    @torch.no_grad()
    def observe(self) -> None:
        """Take in the weights after a real step of the tail."""
        if not self.mean:
            self.mean = [self.buffer(p) for p in self.parameters]
        self.count += 1
        for mean, parameter in zip(self.mean, self.parameters):
            weight = parameter.detach().to(mean.device, torch.float32)
            if self.count == 1:
                mean.copy_(weight)
            else:
                mean.lerp_(weight, 1.0 / self.count)

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap weights and mean; twice restores both, to the rounding of the weights' own precision."""
        for mean, parameter in zip(self.mean, self.parameters):
            weight = parameter.detach().to(mean.device, torch.float32, copy=True)
            parameter.copy_(mean)
            mean.copy_(weight)

    def conclude(self, losses: Callable[[], float], changed: Callable[[], None]) -> dict | None:
        """
        Keep what has the lower held-out loss: the weights, or their mean.

        Args:
            losses (`Callable`): Mean held-out loss at the weights of now.
            changed (`Callable`): Called after the weights were written.

        Returns:
            `dict`: `loss` of the weights, `loss_of_mean`, `steps` averaged over, whether the mean was `kept`; `None`
            if there was nothing to average.
        """
        if self.count < 2:
            return None
        before = losses()
        self.exchange()
        changed()
        after = losses()
        if not after < before:
            self.exchange()
            changed()
        steps, self.mean, self.count = self.count, [], 0
        return {"loss": before, "loss_of_mean": after, "steps": steps, "kept": after < before}

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.mean))

    def state_dict(self) -> dict:
        return {"count": self.count}

    @torch.no_grad()
    def load_state_dict(self, tensors: dict[str, Tensor], state: dict) -> None:
        """Restore what `tensors` and `state_dict` returned."""
        self.count, self.mean = state["count"], []
        if self.count:
            self.mean = [self.buffer(p) for p in self.parameters]
            for name, mean in zip(self.names, self.mean):
                mean.copy_(tensors[name])
