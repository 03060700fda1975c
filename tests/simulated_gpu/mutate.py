"""
Removes every wait of the package, one at a time, and tells which scenario of the simulated GPU notices.

    python tests/simulated_gpu/mutate.py             # about 20 minutes on two cores
    python tests/simulated_gpu/mutate.py --list      # the waits

A wait is a call of `wait_event`, `wait_stream`, `record_stream` or `synchronize`. In `streaming` and `phase_memory` so
is a call of what wraps them (`wait`, `finish`, `finish_sending`), or an argument `after=EVENT`. One that no scenario
notices is superfluous, or a scenario is missing.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parents[1] / "hf_hybrid"
DEVICE = ("streaming", "phase_memory")
"""Folders in which `wait` waits for a device, and `after=` is an event."""
FIRST = (
    "failed_evaluation", "walk_that_does_not_fit", "looked_at_before_a_step", "ends_streamed",
    "a_layer_left_out", "some_resident_by_micro_batch",
    "gradients_looked_at", "by_micro_batch", "parked", "eight_bit_bf16", "leaps_and_saves", "leaps_host_buffers",
    "saves_eight_bit", "states_on_host_and_saves", "int8_probes_registered", "offloaded_graphs_together",
    "evaluated_only", "error_in_the_middle", "in_backward", "a_call_that_does_not_count", "lora_experts",
)  # fmt: skip
"""Scenarios that notice most, so that few mutations need all of them."""


def waits() -> list[str]:
    """Every wait, as `FILE:LINE:COLUMN`."""
    from simulated_gpu.marks import is_wait

    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if is_wait(node, wrapped=path.parent.name in DEVICE):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}:{node.col_offset}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("waits", nargs="*", help="Some of the waits, as --list names them.")
    args = parser.parse_args()
    sys.path[0] = str(HERE.parent)  # not this folder: its kernels.py would hide the package of that name
    chosen = args.waits or waits()
    if args.list:
        print("\n".join(chosen))
        return
    import torch

    from simulated_gpu.scenarios import SCENARIOS

    order = [*FIRST, *(name for name in SCENARIOS if name not in FIRST and not name.startswith("out_of_memory"))]
    with tempfile.TemporaryDirectory() as folder:
        right = Path(folder) / "right"
        _run(right, order, None)
        for index, wait in enumerate(chosen):
            file, line, _ = wait.split(":")
            source = (PACKAGE / file).read_text().splitlines()[int(line) - 1].strip()
            noticed = None
            for batch in (order[: len(FIRST)], order[len(FIRST) :]):
                wrong = Path(folder) / f"{index}.{len(batch)}"
                _run(wrong, batch, wait)
                noticed = next((told for name in batch if (told := _notices(torch, right, wrong, name))), None)
                if noticed:
                    break
            print(f"{wait}  {source}\n    {noticed or 'NOBODY NOTICES'}", flush=True)


def _run(folder: Path, names: list[str], mutation: str | None) -> None:
    command = [sys.executable, str(HERE / "runner.py"), "--workers", str(os.cpu_count()), "--place", "device"]
    command += ["--mutate", mutation] if mutation else []
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([*command, str(folder), *names], env=environment, capture_output=True, check=True)


def _notices(torch, right: Path, wrong: Path, name: str) -> str | None:
    expected = torch.load(right / f"{name}.device.pt", weights_only=False)
    path = wrong / f"{name}.device.pt"
    if not path.exists():
        return f"{name}: {path.with_suffix('.error').read_text().strip().splitlines()[-1][:150]}"
    found = torch.load(path, weights_only=False)
    if found["races"]:
        return f"{name}: {next(iter(found['races']))[:150]}"
    off = [key for key, value in expected["weights"].items() if not torch.equal(value, found["weights"][key])]
    if off:
        return f"{name}: {len(off)} weights differ"
    if found["facts"].get("bytes_left") != expected["facts"].get("bytes_left"):
        return f"{name}: {found['facts']['bytes_left']} left"
    return None


if __name__ == "__main__":
    main()
