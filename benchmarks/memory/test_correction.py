"""The correction byte keeps 24 bits of fp32, and 16 of them are the nearest bf16."""

import torch

from benchmarks.memory.correction import join, split


def test_24_bits_are_kept_and_the_weight_is_the_nearest_bf16():
    scales = torch.logspace(-30, 30, 61).repeat_interleave(2000)
    exact = scales * torch.randn(scales.shape, generator=torch.Generator().manual_seed(0))
    weights, correction = split(exact)
    assert correction.min() == -128 and correction.max() == 127
    assert ((join(weights, correction) - exact).abs() <= exact.abs() * 2**-16).all()  # half a unit of 16 digits
    off = (weights.float() - exact).abs() - (exact.bfloat16().float() - exact).abs()
    assert (off <= exact.abs() * 2**-15).all()  # rounded twice: at most two of those halves further than the nearest


def test_what_24_bits_can_hold_stays():
    exact = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    exact[:2] = torch.tensor([0.0, -0.0])
    weights, correction = split(exact)
    noise = torch.randint(256, exact.shape, dtype=torch.int32)
    for again in (split(join(weights, correction)), split(join(weights, correction), noise)):
        assert torch.equal(again[0].view(torch.int16), weights.view(torch.int16)) and torch.equal(again[1], correction)


def test_stochastic_rounding_to_24_bits_is_exact_in_expectation():
    exact = torch.full((100_000,), 0.1234567)
    noise = torch.randint(256, exact.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    rounded = join(*split(exact, noise)).double()
    unit = 2.0**-4 * 2**-15
    assert len(rounded.unique()) == 2
    assert (rounded.mean() - exact[0].double()).abs() < 4 * unit / 2 / 100_000**0.5
