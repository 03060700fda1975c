"""Rounding to bf16: exact in expectation, repeatable, and an export keeps updates of less than half a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from safetensors.torch import load_file
from test_export import bpe_tokenizer
from transformers import AutoModelForCausalLM

from hf_hybrid.cli.main import main
from hf_hybrid.export import exporter, rounding
from hf_hybrid.export.rounding import round_

pytestmark = pytest.mark.filterwarnings("ignore")


HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def rounded(exact: torch.Tensor, dtype: torch.dtype = torch.bfloat16, name: str = "weight") -> torch.Tensor:
    return round_(torch.empty_like(exact, dtype=dtype), exact, name)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def step_of(weights: torch.Tensor) -> torch.Tensor:
    """The distance from a number of 16 bits to the next, away from zero."""
    return (bits(weights) + 1).view(weights.dtype).float() - weights.float()


@HALVES
def test_what_16_bits_hold_keeps_its_bits(dtype, monkeypatch):
    monkeypatch.setattr(rounding, "CHUNK", 1000)  # three rows, and the last part is shorter
    held = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)  # all of them
    found = rounded(held.float(), dtype)
    assert torch.equal(found.isnan(), held.isnan()) and held.isinf().sum() == 2
    assert torch.equal(bits(found[~held.isnan()]), bits(held[~held.isnan()]))


@HALVES
def test_the_mean_of_many_roundings_is_the_weight(dtype):
    scales = torch.tensor([1.0, 3e-5, 1e-7]).repeat_interleave(64)  # the last are no normal numbers of fp16
    exact = scales * torch.randn(scales.shape, generator=torch.Generator().manual_seed(0))
    draws, steps = 2000, step_of(exact.to(dtype)).abs()
    drawn = torch.stack([rounded(exact, dtype, f"layers.{number}.weight").float() for number in range(draws)])
    assert all(len(column.unique()) <= 2 for column in drawn.T)
    assert ((drawn - exact).abs() < steps).all()
    error = 5 * steps / 2 / draws**0.5
    assert ((drawn.mean(0) - exact).abs() < error).all()
    assert ((exact.to(dtype).float() - exact).abs() > error).sum() > len(exact) / 2  # to nearest it is not


@HALVES
def test_beyond_the_largest_number_the_nearest_is_taken(dtype):
    largest = torch.finfo(dtype).max
    exact = torch.tensor([largest * (1 + 2**-13), -largest * (1 + 2**-13), 3e38 if dtype is torch.float16 else 1.0])
    for number in range(20):
        assert torch.equal(rounded(exact, dtype, str(number)), exact.to(dtype))


def test_the_noise_follows_from_the_name_alone():
    exact = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    once = rounded(exact)
    before = torch.get_rng_state()
    target = torch.empty(8, 64, dtype=torch.bfloat16).T  # as transformers may lay a weight out
    assert torch.equal(round_(target, exact, "weight"), once)
    assert not torch.equal(rounded(exact, name="other"), once)
    assert torch.equal(round_(torch.empty((), dtype=torch.bfloat16), torch.tensor(0.5), "scale"), torch.tensor(0.5))
    assert torch.equal(torch.get_rng_state(), before)


def moved_run(folder: Path, share: float) -> tuple[dict, dict]:
    """A run in fp32 whose every second weight left a number of bf16 by this share of a step: start and weights."""
    model = tiny_model(vocab_size=264, hidden_size=64)
    start = {name: weights.detach().bfloat16() for name, weights in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start[name].float())
            parameter.view(-1)[::2] += share * step_of(start[name]).view(-1)[::2]
    model.save_pretrained(folder)
    bpe_tokenizer().save_pretrained(folder)
    return start, {name: weights.detach().clone() for name, weights in model.named_parameters()}


def kept(found: dict, start: dict, exact: dict) -> float:
    """The share of the updates of matrices that is there."""
    matrices = [name for name in start if start[name].dim() > 1]
    there = torch.cat([(found[name].float() - start[name].float()).view(-1) for name in matrices])
    learned = torch.cat([(exact[name] - start[name].float()).view(-1) for name in matrices])
    return float(there.dot(learned) / learned.dot(learned))


def test_a_merged_export_keeps_updates_of_less_than_half_a_step(tmp_path):
    start, exact = moved_run(tmp_path / "run", 0.2)
    for output in ("once", "again"):
        assert main(["export", str(tmp_path / "run"), "--format", "merged", "--output", str(tmp_path / output)]) == 0
    found, again = (load_file(tmp_path / output / "model.safetensors") for output in ("once", "again"))
    assert all(torch.equal(bits(weights), bits(again[name])) for name, weights in found.items())
    assert kept(found, start, exact) == pytest.approx(1, abs=0.1)
    assert kept({name: weights.bfloat16() for name, weights in exact.items()}, start, exact) == 0  # to nearest
    for name, weights in found.items():
        assert torch.equal(bits(weights.view(-1)[1::2]), bits(start[name].view(-1)[1::2])), name  # these did not move
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "once").dtype is torch.bfloat16
    assert json.loads((tmp_path / "once" / "export.json").read_text())["rounding"] == "stochastic"
    assert "They are in bfloat16, rounded stochastically." in (tmp_path / "once" / "README.md").read_text()


@pytest.mark.parametrize("options", [["merged", "--dtype", "float16"], ["gguf-f16"]], ids=" ".join)
def test_so_do_exports_in_float16(tmp_path, options):
    in_gguf = {}
    if "gguf-f16" in options:
        pytest.importorskip("gguf")
        in_gguf = {"gguf_file": "model.gguf"}
    start, exact = moved_run(tmp_path / "run", 0.03)  # a quarter of a step of fp16
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "small"), "--format", *options]) == 0
    found = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "small", **in_gguf).named_parameters())
    assert kept({name: weights.detach() for name, weights in found.items()}, start, exact) == pytest.approx(1, abs=0.1)
    assert kept({name: weights.half() for name, weights in exact.items()}, start, exact) < 0.1  # to nearest


def test_an_export_in_fp32_keeps_its_bits(tmp_path):
    _, exact = moved_run(tmp_path / "run", 0.2)
    command = ["export", str(tmp_path / "run"), "--format", "merged"]
    assert main([*command, "--dtype", "float32", "--output", str(tmp_path / "fp32")]) == 0
    written = load_file(tmp_path / "fp32" / "model.safetensors")
    assert all(torch.equal(weights, exact[name]) for name, weights in written.items())
    assert "stochastically" not in (tmp_path / "fp32" / "README.md").read_text()


def test_a_run_in_the_other_16_bits_is_rounded_to_nearest(tmp_path):
    model = tiny_model(vocab_size=264, hidden_size=64).half()
    model.save_pretrained(tmp_path / "run")
    result = exporter.export(tmp_path / "run", tmp_path / "merged", "merged", dtype="bfloat16")
    written = load_file(tmp_path / "merged" / "model.safetensors")
    exact = dict(model.named_parameters())
    assert all(torch.equal(weights, exact[name].bfloat16()) for name, weights in written.items())
    assert result["rounding"] == "nearest"
