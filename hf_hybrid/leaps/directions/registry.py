"""Directions by name."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from hf_hybrid.leaps.directions.base import DirectionFactory, NoDirection
from hf_hybrid.leaps.directions.drift import SNOO_MOMENTUM, SNOO_RATE, Drift, Snoo
from hf_hybrid.leaps.directions.extrapolation import RRE_REGULARIZATION, Linear, ReducedRank
from hf_hybrid.leaps.directions.gradient_memory import GradientMemory
from hf_hybrid.leaps.directions.history import STATES
from hf_hybrid.leaps.directions.nino import NiNo, Nowcaster
from hf_hybrid.leaps.directions.orthogonal import Orthogonal


def direction_factory(
    name: str,
    *,
    states: int | None = None,
    spacing: int | None = None,
    snoo_momentum: float | None = None,
    snoo_rate: float | None = None,
    rre_regularization: float | None = None,
    nino_checkpoint: str | None = None,
    matrices: Collection[str] = (),
) -> DirectionFactory:
    """
    What makes the direction `name` from a [`~hf_hybrid.leaps.directions.base.DirectionContext`].

    Args:
        name (`str`): `"orthogonal"`, `"gradient_memory"`, `"drift"`, `"linear"`, `"snoo"`, `"rre"`, `"nino"` or
            `"none"`.
        states, spacing (`int`, *optional*): States to look back on, and real steps between them: `linear`, `rre`,
            `nino`.
        snoo_momentum, snoo_rate (`float`, *optional*): Of the outer step of `snoo`.
        rre_regularization (`float`, *optional*): Of `rre`.
        nino_checkpoint (`str`, *optional*): File of the network of `nino`.
        matrices (`Collection[str]`): Names of the hidden matrices, for `orthogonal`.

    Raises:
        ValueError: If the name is unknown, or `nino` does not find what it needs.
    """
    if name == "nino":
        return partial(NiNo, network=_network(nino_checkpoint, states), spacing=spacing)
    rate = SNOO_RATE if snoo_rate is None else snoo_rate
    momentum = SNOO_MOMENTUM if snoo_momentum is None else snoo_momentum
    regularization = RRE_REGULARIZATION if rre_regularization is None else rre_regularization
    states = states or STATES
    factories = {
        "orthogonal": partial(Orthogonal, matrices=frozenset(matrices)),
        "gradient_memory": GradientMemory,
        "drift": Drift,
        "linear": partial(Linear, states=states, spacing=spacing),
        "snoo": partial(Snoo, momentum=momentum, rate=rate),
        "rre": partial(ReducedRank, states=states, spacing=spacing, regularization=regularization),
        "none": NoDirection,
    }
    if name not in factories:
        raise ValueError(f"`direction` must be one of {', '.join([*factories, 'nino'])}, got `{name}`.")
    return factories[name]


def _network(checkpoint: str | None, states: int | None) -> Nowcaster:
    if checkpoint is None:
        raise ValueError(
            "`direction=nino` needs `nino_checkpoint`, the path of the published `nino_mlp.pt`. Pass it, or choose "
            "another `direction`."
        )
    network = Nowcaster.load(checkpoint)
    if states not in (None, network.states):
        raise ValueError(
            f"`leap_history={states}` does not fit `nino_checkpoint={checkpoint}`, which reads {network.states}. "
            "Leave `leap_history` out."
        )
    return network
