"""Steps on low-rank products: what they do to the product. Run with `python -m pytest benchmarks/speedup`."""

import pytest
import torch

from benchmarks.speedup import pairs


@pytest.fixture
def factors():
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 24), (32, 4), (4, 24), (32, 4))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def test_the_parts_of_the_product_are_orthogonal_matrices_of_one_size(factors, monkeypatch):
    gradient_a, gradient_b, a, b = factors
    monkeypatch.setattr(pairs, "DAMPING", 0.0)
    step_a, step_b = pairs.product_step(gradient_a, gradient_b, a, b)
    assert step_a.norm() < a.numel() ** 0.5  # below the cap
    for part in (step_b @ a, b @ step_a):
        torch.testing.assert_close(torch.linalg.svdvals(part)[:4], torch.full((4,), 0.2 * 32**0.5, dtype=a.dtype))
    assert (gradient_a * step_a).sum() < 0 and (gradient_b * step_b).sum() < 0


def test_the_step_of_the_product_does_not_depend_on_how_it_is_split(factors, monkeypatch):
    gradient_a, gradient_b, a, b = factors
    monkeypatch.setattr(pairs, "DAMPING", 0.0)
    mix = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=a.dtype) / 4 + torch.eye(4)
    inverse = torch.linalg.inv(mix)
    step_a, step_b = pairs.product_step(gradient_a, gradient_b, a, b)
    other_a, other_b = pairs.product_step(mix.T @ gradient_a, gradient_b @ inverse.T, inverse @ a, b @ mix)
    assert max(step_a.norm(), other_a.norm()) < a.numel() ** 0.5
    torch.testing.assert_close(step_b @ a, other_b @ inverse @ a)
    torch.testing.assert_close(b @ step_a, b @ mix @ other_a)


def test_new_adapters_move_the_second_factor_alone(factors):
    gradient_a, gradient_b, a, b = factors
    step_a, step_b = pairs.product_step(gradient_a, gradient_b, a, torch.zeros_like(b))
    assert not step_a.any() and step_b.any()
