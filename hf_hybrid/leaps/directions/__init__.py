"""Directions of leaps: one class per method, each with its paper."""

from hf_hybrid.leaps.directions.base import Direction, NoDirection
from hf_hybrid.leaps.directions.gradient_memory import GradientMemory
from hf_hybrid.leaps.directions.orthogonal import Orthogonal

DIRECTIONS: dict[str, type[Direction]] = {
    "orthogonal": Orthogonal,
    "gradient_memory": GradientMemory,
    "none": NoDirection,
}
"""The choices of the option `direction`."""
