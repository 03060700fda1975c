"""Kernels that are counted on the simulated device (kernels.py), of passes whose kernels are known."""

import json
import os
import subprocess
import sys

import pytest

from simulated_gpu.results import TESTS, python_path

PASSES = """
import torch

def passes(device):
    on_host = torch.ones(4, 8)
    left, right = on_host.to(device).requires_grad_(), torch.ones(8, 2).to(device)
    made = []

    def product():
        with torch.autocast(device, dtype=torch.bfloat16):
            made[:] = [torch.mm(left, right)]

    return {
        "a product of rounded factors": product,
        "its gradient": lambda: made[0].backward(torch.ones_like(made[0])),
        "views": lambda: left.t()[1:].reshape(7, 4),
        "a copy": lambda: on_host.to(device),
        "on the host": lambda: torch.mul(on_host, 2.0).add_(1.0),
    }
"""


@pytest.mark.simulated
def test_kernels_and_operations_of_the_host_are_counted(tmp_path):
    (tmp_path / "known.py").write_text(PASSES)
    environment = {**os.environ, "PYTHONPATH": python_path(TESTS.parent, TESTS, tmp_path)}
    command = [sys.executable, "-m", "simulated_gpu.kernels", "known"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "Unavailable" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "a product of rounded factors": [3, 0],
        "its gradient": [3, 0],  # ones, the product, and its result in the dtype of the factor
        "views": [0, 0],
        "a copy": [1, 0],
        "on the host": [0, 2],
    }
