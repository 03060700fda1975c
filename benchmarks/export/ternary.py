"""
1.58-bit training against full precision: the quickstart's model after equally many steps.

    python -m benchmarks.export.ternary

`fp32` is the model of examples/07_from_scratch.py after its 300 steps, `bitnet` the same with ternary layers
(`hf_hybrid.export.bitnet`): the same initial weights, data, options and number of steps. Both are then exported to
packed ternary weights. For `fp32` that is rounding after training: the control.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.export.formats import HERE, THREADS, quickstart_run
from benchmarks.results import Results, command_line, provenance

ARMS = ("fp32", "bitnet")


def main() -> None:
    args = command_line(__doc__, HERE).parse_args()

    import torch

    from hf_hybrid.export import exporter

    torch.set_num_threads(THREADS)
    results = Results(args.results, "ternary", ("arm",))
    for arm in ARMS:
        if results.get(arm=arm) is not None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "run")
            held_out, steps = quickstart_run(source, ternary=arm == "bitnet")
            found = exporter.export(source, Path(folder, "packed"), "bitnet", batches=held_out)
        keys = ("original", "exported", "loss_change", "sequences", "tokens")
        results.add({"arm": arm, **{key: found[key] for key in keys}, "steps": steps, **provenance(THREADS)})
        print(arm, steps, exporter.as_text(found), sep="\n", flush=True)


if __name__ == "__main__":
    main()
