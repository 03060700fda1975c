"""
Prints how often the package stops the host, by scenario of the simulated GPU.

The table in tests/simulated_gpu/README.md comes from here.

    python tests/simulated_gpu/stops.py

An ordinary step has no leap, save or evaluation. Trainer, accelerate and TRL stop the host too; they are not counted.
Nor is a wait for numbers of the device behind which it has more to do, or which the host has waited for before.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHOWN = (
    "by_layer", "by_layer_more", "by_micro_batch", "by_micro_batch_more", "parked", "bf16", "ends_streamed",
    "eight_bit", "eight_bit_more", "eight_bit_bf16", "muon", "lora", "lora_int8", "leaps", "leaps_deeper",
    "leaps_host_buffers", "leaps_eight_bit", "leaps_probed", "leaps_probed_deeper", "resident_leaps",
    "resident_leaps_host_buffers", "fast", "activations_offloaded", "states_on_host", "int8_probes",
    "nothing_to_save", "nothing_to_save_monitored", "nothing_to_save_searched", "rows", "dpo", "dpo_without_leaps",
    "grpo", "grpo_more",
)  # fmt: skip


def main() -> None:
    sys.path[0] = str(HERE.parent)  # not this folder: its kernels.py would hide the package of that name
    import torch

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "runner.py"), "--workers", str(os.cpu_count()), "--place", "device"]
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
        subprocess.run([*command, folder, *SHOWN], env=environment, capture_output=True, check=True)
        print("| scenario | ordinary step | step with a leap, or its verdict |\n|---|---|---|")
        for name in SHOWN:
            facts = torch.load(Path(folder) / f"{name}.device.pt", weights_only=False)["facts"]
            at_leaps = facts["stops_at_leaps"].get("hf_hybrid", "") if facts.get("leaps") else ""
            print(f"| `{name}` | {facts['stops'].get('hf_hybrid', 0)} | {at_leaps} |")


if __name__ == "__main__":
    main()
