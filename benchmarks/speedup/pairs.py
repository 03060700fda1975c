"""
Steps on the product of low-rank pairs, made beside the optimizer: a prototype and its controls.

LoRA adds `B A` to a frozen matrix, with `A` of `r x columns` and `B` of `rows x r`. What the model computes depends on
the product alone, and `B R` with `R^-1 A` is the same product, so that a rule for each factor alone makes steps that
depend on how the product happens to be split. To first order a step changes the product by `dB A + B dA`. LoRA-Muon
(arXiv 2606.12921) makes the two terms orthogonal matrices of one size, and solves for the factors: with averaged
gradients `G_A`, `G_B` and the Gram matrices of the factors,

    dB = -s orthogonal(G_B (A A^T)^-1/2) (A A^T)^-1/2        dA = -s (B^T B)^-1/2 orthogonal((B^T B)^-1/2 G_A)

Then `dB A` and `B dA` have only singular values `s` and 0. `s = 0.2 sqrt(max(rows, columns))` is the scale of the
direction `orthogonal`. A share of the mean eigenvalue is added to the Gram matrices (`DAMPING`). `B` begins at zero, so
that `dA` would be large at first; its entries have at most the root mean square of Adam's first step, 1.

[`ExtraSteps`] makes such a step after every fifth step of the optimizer, at the same learning rate. It costs no forward
and no backward pass. The control makes steps of the same norms that know nothing of the product: it divides the same
average of the gradients by the root of Adam's second moments.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import TrainerCallback

from hf_hybrid.leaps.directions import adam

DAMPING = 0.02
"""Of a Gram matrix, over its mean eigenvalue."""
EVERY, MEMORY = 5, 0.8
"""Steps of the optimizer for one extra step, and the share of the average that a new gradient leaves in place."""


def inverse_root(gram: Tensor) -> Tensor | None:
    """`(gram + damping)^-1/2` of a symmetric matrix without negative eigenvalues; `None` if it is zero."""
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp(min=0)
    values = values + DAMPING * values.mean()
    return (vectors * values.rsqrt()) @ vectors.T if values[-1] > 0 else None


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthonormal columns, of one with more rows than columns."""
    values, vectors = torch.linalg.eigh(matrix.T @ matrix)
    return matrix @ ((vectors * values.clamp(min=1e-12 * float(values[-1]) + 1e-30).rsqrt()) @ vectors.T)


def product_step(memory_a: Tensor, memory_b: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Steps of `a` and `b` per unit of learning rate, from averages of their gradients; see above."""
    scale = 0.2 * math.sqrt(max(b.shape[0], a.shape[1]))
    root_a, root_b = inverse_root(a @ a.T), inverse_root(b.T @ b)
    step_b = -scale * orthogonal(memory_b @ root_a) @ root_a
    if root_b is None:
        return torch.zeros_like(a), step_b
    step_a = -scale * root_b @ orthogonal((root_b @ memory_a).T).T
    return step_a * min(1.0, math.sqrt(a.numel()) / float(step_a.norm())), step_b


class ExtraSteps(TrainerCallback):
    """
    After every fifth step of AdamW, one more step of each pair of factors.

    Args:
        rule (`str`): `"product"`, or the control of the same norms, `"adam"`.
    """

    def __init__(self, rule: str):
        self.rule = rule
        self.averages: dict[str, Tensor] = {}

    @torch.no_grad()
    def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        factors = {name: p for name, p in model.named_parameters() if ".lora_A." in name or ".lora_B." in name}
        for name, p in factors.items():
            self.averages.setdefault(name, torch.zeros_like(p)).lerp_(p.grad, 1 - MEMORY)
        if (state.global_step + 1) % EVERY:
            return
        group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name_a in [name for name in factors if ".lora_A." in name]:
            names = (name_a, name_a.replace(".lora_A.", ".lora_B."))
            pair, averages = [factors[name] for name in names], [self.averages[name] for name in names]
            for p, average, step in zip(pair, averages, product_step(*averages, *pair)):
                group = group_of[id(p)]
                if self.rule == "adam":
                    other = adam(average, optimizer.state[p], group, torch.empty_like(step))
                    step = other * (step.norm() / other.norm())
                p.add_(step, alpha=group["lr"])
