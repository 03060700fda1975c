"""
`nino`: a published network that forecasts each weight from its last values.

NiNo (Knyazev et al., "Accelerating Training with Neuron Interaction and Nowcasting Networks", ICLR 2025, arXiv
2409.04434) trains a network on recorded runs to predict, from a weight's last five values, its value up to 40 states
later. Values are normalised per parameter, so that one network serves all; an embedding tells it the kind of the
parameter. This is the variant without the graph over neurons (`nino_mlp.pt`), which needs nothing but the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import linear, silu

from benchmarks.directions.history import HistoryDirection
from hf_hybrid.leaps.directions import DirectionContext

Tensor = torch.Tensor

CHUNK = 2**15
"""Weights that are forecast at a time: at 128 hidden units, 16 MiB per layer of the network."""
EPS = 1e-6

CONNECTED, OTHER, CONVOLUTION, NORM, WORD_EMBEDDING, POSITION_EMBEDDING, QUERY, KEY, VALUE = range(1, 10)
"""Types of parameters, as rows of the network's embedding."""

_HIDDEN_LAYERS = ("edge_mlp.fc.0", "edge_mlp.fc.2", "edge_mlp.fc.4")
_ATTENTION = {
    QUERY: ("q_proj", "query", "q_lin", "wq", "to_q"),
    KEY: ("k_proj", "key", "k_lin", "wk", "to_k"),
    VALUE: ("v_proj", "value", "v_lin", "wv", "to_v"),
}


@dataclass(frozen=True)
class Nowcaster:
    """
    The network of NiNo without its graph (Knyazev et al., 2025, arXiv 2409.04434): each weight by itself.

    Attributes:
        tensors (`dict[str, torch.Tensor]`): Its parameters by name, as published, fp32.
    """

    tensors: dict[str, Tensor]

    @property
    def states(self) -> int:
        """How many values of a weight it reads."""
        return self.tensors["edge_proj.fc.0.weight"].shape[1]

    @property
    def horizons(self) -> int:
        """How many states it looks ahead."""
        return self.tensors["edge_mlp.fc.6.weight"].shape[0]

    @classmethod
    def load(cls, path: str | Path) -> Nowcaster:
        """
        Read a published checkpoint (`nino_mlp.pt`, `nino_mlp_h32.pt`).

        Raises:
            ValueError: If there is no such file, or it holds something else.
        """
        if not Path(path).is_file():
            raise ValueError(
                f"`path={path}` is not a file. Download `nino_mlp.pt` from the repository of NiNo "
                "(SamsungSAILMontreal/nino on GitHub) and pass its path."
            )
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            tensors = {name: tensor.float() for name, tensor in content["state_dict"].items()}
            cls._check(tensors)
        except Exception as error:  # torch raises several kinds for what is no checkpoint of its own
            raise ValueError(
                f"`path={path}` is no checkpoint of NiNo's MLP without graph ({error}). Pass `nino_mlp.pt` "
                "or `nino_mlp_h32.pt`."
            ) from error
        return cls(tensors)

    @staticmethod
    def _check(tensors: dict[str, Tensor]) -> None:
        hidden = tensors["edge_proj.fc.0.weight"].shape[0]
        shapes = {"layer_embed.weight": (None, hidden), "edge_proj.fc.0.weight": (hidden, None)}
        shapes |= {f"{name}.weight": (hidden, hidden) for name in _HIDDEN_LAYERS}
        shapes |= {"edge_mlp.fc.6.weight": (None, hidden)}
        for name, shape in shapes.items():
            matches = [expected in (None, length) for expected, length in zip(shape, tensors[name].shape)]
            if tensors[name].ndim != 2 or not all(matches):
                raise ValueError(f"`{name}` has the shape {tuple(tensors[name].shape)}")
        for name in ("edge_proj.fc.0", *_HIDDEN_LAYERS, "edge_mlp.fc.6"):
            if tensors[f"{name}.bias"].shape != tensors[f"{name}.weight"].shape[:1]:
                raise ValueError(f"`{name}.bias` does not fit its weight")
        if len(tensors["layer_embed.weight"]) <= VALUE:
            raise ValueError("`layer_embed.weight` knows too few types of parameters")

    def to(self, device: torch.device) -> Nowcaster:
        """The network on a device."""
        return Nowcaster({name: tensor.to(device) for name, tensor in self.tensors.items()})

    def forecast(self, values: Tensor, kind: int, ahead: int) -> Tensor:
        """
        Change of weights after `ahead` more states.

        Args:
            values (`torch.Tensor`): `[weights, states]`, oldest first, normalised, fp32.
            kind (`int`): Type of their parameter.
            ahead (`int`): From 1 to `horizons`.

        Returns:
            `torch.Tensor`: `[weights]`, normalised as `values` are.
        """
        tensors = self.tensors
        hidden = linear(values, tensors["edge_proj.fc.0.weight"], tensors["edge_proj.fc.0.bias"])
        hidden = hidden + tensors["layer_embed.weight"][kind]
        for name in _HIDDEN_LAYERS:
            hidden = silu(linear(hidden, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
        return hidden @ tensors["edge_mlp.fc.6.weight"][ahead - 1] + tensors["edge_mlp.fc.6.bias"][ahead - 1]


class NiNo(HistoryDirection):
    """
    Nowcasting by the published MLP of NiNo.

    A leap of gain 1 is the forecast itself, another gain is NiNo's `upd_scale`. It looks ahead by
    `round(((1 - p) sqrt(40) + p)^2)` states at the share `p` of the run: far at first, one state at the end. In the
    paper states lie 200 steps apart.

    Args:
        context (`DirectionContext`): Parameters, optimizer and the place of buffers.
        network (`Nowcaster`): The network; it determines how many states are kept.
        spacing (`int`, *optional*): Real steps between states.
    """

    name = "nino"
    gain, gain_power = 0.2, 0.0
    values_per_weight = HistoryDirection.values_per_weight + 1  # a leap holds its forecast
    papers = (
        ("Accelerating Training with Neuron Interaction and Nowcasting Networks", "https://arxiv.org/abs/2409.04434"),
    )

    def __init__(self, context: DirectionContext, network: Nowcaster, spacing: int | None = None):
        super().__init__(context, network.states, spacing)
        self.least_increments = network.states - 1
        self._networks = {torch.device("cpu"): network}
        self._kinds = [parameter_kind(name, p.shape) for name, p in zip(context.names, context.parameters)]
        self._ahead = network.horizons
        self._forecasts: dict[int, Tensor] = {}

    def prepare(self) -> None:
        super().prepare()
        horizons = self._networks[torch.device("cpu")].horizons
        progress = min(max(self.context.clock.progress, 0.0), 1.0)
        self._ahead = round(((1.0 - progress) * math.sqrt(horizons) + progress) ** 2)

    @torch.no_grad()
    def displacement(self, index: int, out: Tensor) -> Tensor | None:
        lr_sum = self.context.lr_sum(index)
        if not self.ready or lr_sum <= 0:
            return None
        if index not in self._forecasts:  # a leap asks several times, and the network costs far more than memory
            self._forecasts[index] = self._forecast(index, torch.empty_like(out))
        return torch.div(self._forecasts[index], lr_sum, out=out)

    def block_begins(self, *, undoable: bool) -> None:
        super().block_begins(undoable=undoable)
        self._forecasts.clear()

    def _forecast(self, index: int, out: Tensor) -> Tensor:
        """The forecast change of a parameter in `out`, in chunks, so that memory does not grow with the parameter."""
        device, count = out.device, out.numel() * self.states
        network = self._networks.setdefault(device, self._networks[torch.device("cpu")].to(device))
        starts = range(0, out.numel(), CHUNK)
        total, squares = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
        for start in starts:
            values = self._values(index, start).double()
            total += values.sum()
            squares += values.square().sum()
        mean = total / count
        deviation = ((squares - count * mean.square()).clamp(min=0.0) / max(count - 1, 1)).sqrt() + EPS
        for start in starts:
            values = (self._values(index, start).double() - mean) / deviation
            change = network.forecast(values.float(), self._kinds[index], self._ahead)
            out.view(-1)[start : start + CHUNK] = change * deviation
        return out

    def _values(self, index: int, start: int) -> Tensor:
        """A chunk of a parameter in all its states, `[weights, states]`, oldest first; the last is the current one."""
        chunk = slice(start, start + CHUNK)
        history = self.buffers["history"][index].view(self.states, -1)
        states = [self.context.parameters[index].detach().reshape(-1)[chunk].to(history.device, torch.float32)]
        for slot in reversed(self.increments):
            states.append(states[-1] - history[slot, chunk])
        return torch.stack(states[::-1], dim=1)


def parameter_kind(name: str, shape: torch.Size) -> int:
    """
    Type of a parameter, read from its name in the model and its shape.

    Matrices of attention that hold queries, keys and values in one count as fully connected.
    """
    *_, owner, leaf = ("", *name.lower().split("."))
    if leaf != "weight" or not shape:
        return OTHER
    if "emb" in owner or owner in ("wte", "wpe"):
        return POSITION_EMBEDDING if "pos" in owner or owner == "wpe" else WORD_EMBEDDING
    if len(shape) == 1:
        return NORM
    if len(shape) > 2:
        return CONVOLUTION if "conv" in owner else CONNECTED
    return next((kind for kind, owners in _ATTENTION.items() if owner in owners), CONNECTED)
