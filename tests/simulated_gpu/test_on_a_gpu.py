"""
The scenarios on a real GPU: `python -m pytest -m gpu`, with TORCH_CUDA_SANITIZER=1 under torch's own finder of races.
"""

import math

import pytest

from simulated_gpu.results import Results
from simulated_gpu.scenarios import SCENARIOS, places

pytestmark = pytest.mark.gpu

ROUNDING = 2e-4
"""
What a GPU may add to the tolerance of a scenario, whose other place is the CPU or other kernels of the GPU. These round
other sums in fp32 (TF32 is off). Random errors of that size in every product, sum and function of the same trainings on
the CPU changed weights by up to 5e-7, and by up to 9e-5 where moments have 8 bits or gradients are orthogonalised in
bf16; a rounding error in every update, under autocast, changed them by up to 1e-4 in `bf16_copies`, and by 5e-4 in
`leaps_bf16`, whose own tolerance is larger. A step moves a weight by about 2e-3.
"""
NEXT_VALUE = {"gradients_looked_at": 1e-3}
"""What it may add where values in bf16 are compared: a rounding error may make one the next value."""
BLOCKS = 32 * 512
"""Bytes on the device that a process may keep: scalars and placeholders, each a block of the allocator."""
ON_A_GPU = [name for name, scenario in SCENARIOS.items() if not scenario.simulated_only]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    here = [item for item in request.session.items if item.fspath == request.path]
    asked = {item.callspec.params["name"] for item in here}
    made = Results([name for name in ON_A_GPU if name in asked], tmp_path_factory.mktemp("on_a_gpu"), real=True)
    yield made
    made.end()


# By module: all tests of a scenario run before those of the next, so that a run that is cut short has tested it whole.
each = pytest.mark.parametrize("name", ON_A_GPU, scope="module")


@each
def test_a_gpu_reaches_the_weights_of_the_other_place(name, results):
    here, there = (results.of(name, place)["weights"] for place in places(name))
    assert here.keys() == there.keys()
    off = {key: (here[key] - there[key]).abs().max().item() for key in here}
    most = SCENARIOS[name].tolerance + NEXT_VALUE.get(name, ROUNDING)
    wrong = {key: value for key, value in off.items() if not value <= most}
    assert not wrong, f"more than {most} from {SCENARIOS[name].beside}: {wrong}"


@each
def test_a_gpu_gets_its_memory_back(name, results):
    facts = results.of(name)["facts"]
    assert facts["bytes_left"]["device"] <= SCENARIOS[name].left + BLOCKS and facts["bytes_left"]["pinned"] == 0
    if "bytes" in facts:
        before, after = facts["bytes"]
        if not SCENARIOS[name].keeps_model:
            assert after["device"] <= before["device"] + BLOCKS
        assert after["pinned"] <= before["pinned"] or SCENARIOS[name].locks_masters


@each
def test_losses_on_a_gpu_are_finite(name, results):
    assert all(math.isfinite(loss) for loss in results.of(name)["facts"].get("losses", ()))
