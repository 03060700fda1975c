"""`quantize_rows` of `hf_hybrid/streaming/low_bit.py`: int8 rows keep their bound, and come back in any dtype."""

import math

import pytest
import torch

from hf_hybrid.streaming.low_bit import dequantize_rows, quantize_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 33), (3, 5, 64), (1, 1)])
def test_rows_are_off_by_half_a_step_at_most(shape, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(3).to(dtype)
    codes, scales = quantize_rows(weight)
    assert codes.dtype == torch.int8 and codes.shape == weight.shape
    assert scales.dtype == torch.float32 and scales.shape == (*shape[:-1], 1)
    out = dequantize_rows(codes, scales, torch.empty(shape))
    bound = weight.float().abs().amax(dim=-1, keepdim=True) / 254
    assert ((out - weight.float()).abs() <= bound * (1 + 1e-5)).all()
    assert codes.abs().amax(dim=-1).eq(127).all()


def test_rows_are_the_same_in_chunks(monkeypatch):
    weight = torch.randn(6, 9, 11)
    whole = quantize_rows(weight)
    monkeypatch.setattr("hf_hybrid.streaming.low_bit.ROWS_CHUNK", 40)
    assert all(torch.equal(a, b) for a, b in zip(whole, quantize_rows(weight)))
    transposed = weight.transpose(0, 1)
    assert torch.equal(quantize_rows(transposed)[0], whole[0].transpose(0, 1))


def test_zeros_stay_zeros_and_broken_rows_stay_broken():
    weight = torch.tensor([[0.0, 0.0], [1.0, -2.0], [math.nan, 1.0], [math.inf, 1.0], [1e-41, 0.0]])
    out = dequantize_rows(*quantize_rows(weight), torch.empty(5, 2))
    assert torch.equal(out[0], torch.zeros(2))
    assert torch.allclose(out[1], weight[1], atol=2 / 254)
    assert out[2:4].isnan().all()
    assert out[4].abs().max() < 1e-38


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rows_come_back_in_any_float_dtype(dtype):
    codes, scales = quantize_rows(torch.randn(4, 16))
    out = torch.nn.Parameter(torch.empty(4, 16, dtype=dtype))
    address = out.data_ptr()
    dequantize_rows(codes, scales, out)
    assert out.data_ptr() == address
    assert torch.equal(out.data, (codes * scales).to(dtype))


def test_rows_refuse_what_they_cannot_store():
    with pytest.raises(ValueError, match=r"`weight` must be a floating-point matrix.*`\(3,\)`"):
        quantize_rows(torch.ones(3))
    with pytest.raises(ValueError, match="`torch.int64`"):
        quantize_rows(torch.ones(3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"got `\(3, 2\)` and `\(2, 1\)`"):
        dequantize_rows(*quantize_rows(torch.ones(2, 3)), torch.empty(3, 2))
