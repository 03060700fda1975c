"""The windows of a run, kept to learn from again, with the latent states that they were seen from."""

from __future__ import annotations

from collections import deque

import torch

from hf_hybrid.world_model.rssm import RSSM, State
from hf_hybrid.world_model.rssm_training import Batch

Tensor = torch.Tensor

LATENT_DTYPES = ("float32", "int8")


def quantise(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors `[..., D]` as int8 with one scale each, `[..., 1]`; the error is at most half a scale."""
    scale = vectors.abs().amax(-1, keepdim=True) / 127
    return (vectors / scale.clamp_min(1e-20)).round().to(torch.int8), scale


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """Inverse of [`quantise`]."""
    return codes.float() * scale


class Replay:
    """
    The last windows of a run, on the host.

    Args:
        model (`RSSM`): Whose latent states these are.
        capacity (`int`): Windows to keep.
        latent_dtype (`str`): `"float32"` or `"int8"`, a quarter of the bytes.

    Raises:
        ValueError: If there is no such `latent_dtype`.
    """

    _COLUMNS = ("observations", "actions", "log_losses", "weights", "codes", "scales")

    def __init__(self, model: RSSM, capacity: int, latent_dtype: str):
        if latent_dtype not in LATENT_DTYPES:
            raise ValueError(f"`latent_dtype` is {latent_dtype!r}: latent states are kept as one of {LATENT_DTYPES}.")
        self.latent_dtype = latent_dtype
        self._split = model.deterministic
        for name in self._COLUMNS:
            setattr(self, name, deque(maxlen=capacity))

    def __len__(self) -> int:
        return len(self.actions)

    def append(self, before: State, observation: Tensor, action: Tensor, log_loss: float, weights: Tensor) -> None:
        """
        Keep a window.

        Args:
            before (`State`): Latent state before it, `[M, 1, ...]`.
            observation (`Tensor`), action (`Tensor`), log_loss (`float`): `[69]`, `[4]`, and what was lost.
            weights (`Tensor`): `[M]`, how much each member learns from chunks that begin here.
        """
        parts = [part[:, 0].cpu() for part in before]
        if self.latent_dtype == "int8":
            (first, scale), (second, other_scale) = (quantise(part) for part in parts)
            self.codes.append(torch.cat((first, second), -1))
            self.scales.append(torch.cat((scale, other_scale), -1))
        else:
            self.codes.append(torch.cat(parts, -1))
            self.scales.append(torch.ones(len(parts[0]), 2))
        self.observations.append(observation.cpu())
        self.actions.append(action.cpu())
        self.log_losses.append(torch.tensor(log_loss))
        self.weights.append(weights)

    def before(self, index: int) -> State:
        """Latent state before a window, `[M, ...]`."""
        codes, scales = self.codes[index], self.scales[index]
        deterministic = dequantise(codes[:, : self._split], scales[:, :1])
        return State(deterministic, dequantise(codes[:, self._split :], scales[:, 1:]))

    def chunks(self, count: int, observed: int, starts: int, horizon: int, generator: torch.Generator) -> Batch:
        """
        Stretches of the run that begin anywhere, to observe and then imagine from.

        Args:
            count (`int`): Number of chunks.
            observed (`int`): Windows to observe, fewer than there are in the replay.
            starts (`int`): Windows of each chunk to imagine from.
            horizon (`int`): Windows to imagine.
            generator (`torch.Generator`): Chooses.
        """
        total = len(self)
        begins = torch.randint(total - observed, (count,), generator=generator)
        index = (begins[:, None] + torch.arange(observed + horizon)).clamp_max(total - 1).tolist()
        states = [self.before(begin) for begin in begins.tolist()]
        return Batch(
            observations=torch.stack([torch.stack([self.observations[i] for i in row]) for row in index]),
            actions=torch.stack([torch.stack([self.actions[i] for i in row]) for row in index]),
            log_losses=torch.stack([torch.stack([self.log_losses[i] for i in row]) for row in index]),
            lengths=(total - begins).clamp_max(observed + horizon),
            weights=torch.stack([self.weights[begin] for begin in begins.tolist()], 1),
            starts=torch.randint(observed, (count, starts), generator=generator),
            observed=observed,
            horizon=horizon,
            state=State(*(torch.stack(parts, 1) for parts in zip(*states))),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything, by column; empty before the first window."""
        return {name: torch.stack(list(getattr(self, name))) for name in self._COLUMNS} if len(self) else {}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what [`tensors`] returned."""
        for name in self._COLUMNS:
            getattr(self, name).clear()
            getattr(self, name).extend(tensors[name].clone() if name in tensors else ())
