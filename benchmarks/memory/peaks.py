"""
Peak memory and time per optimizer step: streamed training, resident training and peers, on the same model and batches.

    python -m benchmarks.memory.peaks                     # CPU, a 60M Llama, 16 modes, eight minutes on two cores
    python -m benchmarks.memory.peaks --smoke             # CPU, a tiny Llama, three modes, half a minute
    python -m benchmarks.memory.peaks --gpu               # shapes of 1B to 50B under a cap of device memory
    python -m benchmarks.memory.peaks --gpu --models 7b 14b 32b 50b 30b-a3b --cap_gib 24   # home cards; also 16
    python -m benchmarks.memory.peaks --gpu --models 8b --modes resident-8bit stream-8bit stream --tokens 2048 16384
    python -m benchmarks.memory.peaks --gpu --smoke       # the same with tiny models, to check the plumbing
    python -m benchmarks.memory.peaks --report            # the table from what is there

Every mode runs in a process of its own, one after the other, on random weights and tokens; nothing is downloaded.
`--models`, `--modes` and `--tokens` choose rows. Each row is appended to the results as soon as it is measured, and a
finished row is not measured again. `--smoke` writes to a temporary file unless `--results` names one.
On a machine with several GPUs, the processes see the first that is visible here.

Modes: `resident*` and `lora-resident` are plain `transformers.Trainer`; `stream*` and `lora-stream*` are
`HybridTrainer(memory="stream", enable_predict=False)`; `zero3` is `Trainer` with DeepSpeed's ZeRO-3, whose weights and
optimizer are on the host (bf16 over fp32 masters, whatever the others have); `fsdp2` is FSDP2 with CPU offload in one
process. `zero3` needs a GPU.
`*in_backward` updates layers inside the backward pass, without clipping. `*-8bit` has bf16 weights and 8-bit AdamW
states, the others AdamW states in the dtype of the weights. All but `resident` recompute activations layer by layer,
streamed ones as far as graphs do not fit. A mode whose package is not installed is skipped, and its row says so.

Fields of a row:

- `seconds`: median over the steps after the first two, from the end of a step to the end of the next, with the device
  synchronised. A streamed layer is updated in the step after the one that made its gradients; that time is included.
- `floor`: a lower bound of `seconds` for this mode, from the rates measured here. It is the time of the computation
  without attention, or of the transfers if they take longer.
- `device_reserved`, `device_allocated` (GPU): peaks of torch's allocator.
- `device_used` (GPU): memory of the process after the last step, as the driver counts it. It includes CUDA's context,
  and so does the cap.
- `device_held`: bytes of weights, gradients and optimizer states on the device, counted at the end of a backward pass,
  without activations. For streamed modes these are the slots and all that is not streamed. On a CPU, where device and
  host share one memory, no other number of the device is measured.
- `device_plan`: the peak that the planner expects on the device, activations included.
- `host_peak`: peak of the process's resident memory above what it was before the model was built. On a CPU it includes
  the device's.
- `host_pinned` (GPU): bytes of torch's page-locked memory, which the kernel need not count as resident. Buffers above
  32 MiB are registered instead, and are resident.
- `host_training_peak`: the same from the first step on, without the copies that setting up made.
- `host_held`: bytes of weights, gradients, states and parked activations that streaming keeps on the host.

The table adds `ratio`: `seconds` over those of the resident mode with the same weights, states and tokens per step.

The frozen weights of the models from 30B on share one small vector until they are packed or moved, so that the host
never holds them in bf16; all that is packed, moved and trained is real. One process trains windows of several sizes,
the smallest first. Peaks are counted anew for each window; host peaks include what earlier windows left allocated.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.results import Results, command, command_line

HERE = Path(__file__).resolve().parent
KEY = ("model", "mode", "device", "cap_gib", "tokens")
GIB = 2**30


@dataclass(frozen=True)
class Mode:
    """One way to train."""

    trainer: str  # "plain", "streamed", "zero3" or "fsdp2"
    against: str = "resident-checkpointed"  # the resident mode whose time its own is divided by
    options: dict = field(default_factory=dict)  # of HybridConfig
    kept: float = 0.0  # share of the layers that stay on the device
    low_bit: bool = False  # bf16 weights, 8-bit states
    adapters: bool = False
    checkpointing: bool = True


BY_LAYER = {"accumulation_walk": "layer"}
IN_BACKWARD = {**BY_LAYER, "max_grad_norm": 0.0, "out_of_memory": "raise"}
MODES = {
    "resident": Mode("plain", checkpointing=False),
    "resident-checkpointed": Mode("plain"),
    "stream": Mode("streamed", options=BY_LAYER),
    "stream-micro_batch": Mode("streamed", options={"accumulation_walk": "micro_batch"}),
    "stream-parked": Mode("streamed", options={**BY_LAYER, "offload_activations": True}),
    "stream-kept": Mode("streamed", options=BY_LAYER, kept=0.5),
    "stream-ends": Mode("streamed", options={**BY_LAYER, "stream_embeddings": True}),
    "stream-in_backward": Mode("streamed", options=IN_BACKWARD),
    "zero3": Mode("zero3"),
    "fsdp2": Mode("fsdp2"),
    "resident-8bit": Mode("plain", "resident-8bit", low_bit=True),
    "stream-8bit": Mode("streamed", "resident-8bit", {**BY_LAYER, "optimizer_states": "8bit"}, low_bit=True),
    "stream-8bit-in_backward": Mode(
        "streamed", "resident-8bit", {**IN_BACKWARD, "optimizer_states": "8bit"}, low_bit=True
    ),
    "lora-resident": Mode("plain", "lora-resident", adapters=True),
    "lora-stream": Mode("streamed", "lora-resident", BY_LAYER, adapters=True),
    "lora-stream-int8": Mode("streamed", "lora-resident", {**BY_LAYER, "base_precision": "int8"}, adapters=True),
}


@dataclass(frozen=True)
class Model:
    """A Llama, or a Qwen3 mixture of experts, from its configuration, with random weights."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    modes: tuple[str, ...]
    tied: bool = False
    weights: str = "float32"  # of modes with exact states; with float32 a GPU computes under bf16 autocast
    device_goal: float | None = None  # GiB, of the streamed modes; also their `vram_budget_gib`
    host_goal: float | None = None
    options: dict = field(default_factory=dict)  # more of HybridConfig, for streamed modes
    shared: bool = False  # frozen weights are one small vector until they are packed or moved
    experts: dict = field(default_factory=dict)  # what the configuration of a mixture has beside these


EXACT = ("resident-checkpointed", "stream", "zero3", "fsdp2")
LOW_BIT = ("resident-8bit", "stream-8bit")
LORA = ("lora-resident", "lora-stream", "lora-stream-int8")
PARKED = {"offload_activations": True}
MODELS = {
    "1b": Model(2048, 8192, 16, 32, 8, 128256, EXACT + LOW_BIT, True, "float32", 4, None, PARKED),
    "7b": Model(4096, 11008, 32, 32, 32, 32000, (*LOW_BIT, *EXACT[:2]), False, "bfloat16", options=PARKED),
    "8b": Model(
        4096, 14336, 32, 32, 8, 128256, LOW_BIT + EXACT + ("stream-8bit-in_backward", "stream-in_backward"), False,
        "bfloat16", 8, 55, PARKED,
    ),
    "13b": Model(5120, 13824, 40, 40, 40, 32000, LOW_BIT, False, "bfloat16", None, 80, PARKED),
    "14b": Model(5120, 13824, 48, 40, 8, 152064, ("stream-8bit", "stream"), False, "bfloat16", options=PARKED),
    "32b": Model(5120, 27648, 64, 40, 8, 152064, LORA, False, "bfloat16", options=PARKED, shared=True),
    "50b": Model(
        8192, 22016, 64, 64, 8, 128256, ("lora-resident", "lora-stream-int8"), False, "bfloat16", 12, 60, PARKED, True
    ),
    "30b-a3b": Model(
        2048, 6144, 48, 32, 4, 151936, LORA, False, "bfloat16", options=PARKED, shared=True,
        experts={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128},
    ),
}  # fmt: skip
ON_CPU = {"60m": Model(512, 1408, 16, 8, 8, 8192, tuple(MODES))}
SMOKE_MODES = ("resident-checkpointed", "stream-8bit", "lora-stream-int8")
TINY = {"hidden": 64, "intermediate": 128, "layers": 4, "heads": 4, "kv_heads": 2, "vocab": 512}
TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}


@dataclass
class Job:
    """Which rows to measure, and how."""

    models: dict[str, Model]
    modes: tuple[str, ...]
    device: str
    sequence: int
    windows: list[int]  # micro-batches of one sequence each
    steps: int
    product: int  # rows and columns of the matrices whose product measures the machine
    cap_gib: float | None
    host_gib: float | None
    row_seconds: float
    results: Results
    machines: Results
    ends_at: float = float("inf")

    def cap(self, mode: str) -> float | None:
        """Device memory that a mode may take; the resident references have the whole device."""
        return None if MODES[mode].trainer == "plain" else self.cap_gib

    def found(self, model: str, mode: str) -> list[dict]:
        """The rows that are there, in the order of their tokens."""
        rows = self.results.rows(model=model, mode=mode, device=self.device, cap_gib=self.cap(mode))
        return sorted((row for row in rows if row["sequence"] == self.sequence), key=lambda row: row["tokens"])

    def spec(self, name: str, model: Model, mode_name: str, windows: list[int], machine: dict) -> dict:
        """The specification for the process of one model and mode."""
        mode = MODES[mode_name]
        options = {**model.options, **mode.options} if mode.trainer == "streamed" else {}
        if mode.kept:
            options["resident_layers"] = int(mode.kept * model.layers)
        if mode.trainer == "streamed" and self.cap_gib is not None:
            # Without a goal, a tenth of the cap is left for fragments.
            options["vram_budget_gib"] = min(model.device_goal or 0.9 * self.cap_gib, self.cap_gib)
        if mode.trainer == "streamed" and self.host_gib is not None:
            options["host_budget_gib"] = self.host_gib
        return {
            "name": name,
            "mode_name": mode_name,
            "model": asdict(model),
            "mode": {**asdict(mode), "options": options},
            "device": self.device,
            "sequence": self.sequence,
            "windows": windows,
            "steps": self.steps,
            "cap_gib": self.cap(mode_name),
            "machine": machine,
            "results": str(self.results.path),
            "command": command(),
        }


# Processes.

LOCAL = {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # no network


def run_process(spec: dict, seconds: float) -> tuple[int | None, str]:
    """Run a specification. Returns the exit code (`None`: it took too long) and the end of the error output."""
    arguments = [sys.executable, "-m", "benchmarks.memory.process", json.dumps(spec)]
    # Trainer would spread each batch over all GPUs that it sees.
    gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            arguments, stderr=errors, start_new_session=True, env={**LOCAL, **os.environ, **gpu}, cwd=HERE.parents[1]
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        errors.seek(0)
        return code, errors.read()[-2000:]


def measured_machine(job: Job) -> dict:
    """Rates of copies and of matrix products, measured in a process of its own, which leaves nothing on the device."""
    if job.machines.get(device=job.device) is None:
        spec = {"machine": True, "device": job.device, "product": job.product}
        spec |= {"results": str(job.machines.path), "command": command()}
        code, errors = run_process(spec, 120)
        if code != 0:
            raise RuntimeError(f"The machine could not be measured:\n{errors}")
        job.machines.reload()
    return job.machines.get(device=job.device)


DONE = ("measured", "out of memory", "refused", "skipped")


def note_failure(job: Job, spec: dict, code: int | None, errors: str) -> None:
    """Add a row for each window of a process that left none."""
    job.results.reload()
    if code == 0:
        return
    name, mode, machine = spec["name"], spec["mode_name"], spec["machine"]
    written = {row["tokens"] for row in job.found(name, mode) if row["outcome"] in DONE}
    for tokens in {count * job.sequence for count in spec["windows"]} - written:
        key = {"model": name, "mode": mode, "device": job.device, "cap_gib": job.cap(mode), "tokens": tokens}
        why = {"outcome": "timeout" if code is None else "failed", "detail": errors}
        origin = {"command": command(), "hardware": machine["hardware"], "versions": machine["versions"]}
        job.results.add({**key, "sequence": job.sequence, **why, **origin})


def run_row(job: Job, name: str, mode: str, machine: dict) -> None:
    """Measure the windows of one model and mode that have no result yet."""
    done = {row["tokens"] for row in job.found(name, mode) if row["outcome"] in DONE}
    missing = [count for count in job.windows if count * job.sequence not in done]
    left = job.ends_at - time.monotonic()
    if not missing or left < 30:
        return
    print(f"{name} {mode} ...", flush=True)
    started = time.monotonic()
    # DeepSpeed's engine cannot be made twice of one model: a process for each window.
    groups = [[count] for count in missing] if MODES[mode].trainer == "zero3" else [missing]
    for windows in groups:
        spec = job.spec(name, job.models[name], mode, windows, machine)
        code, errors = run_process(spec, min(job.row_seconds, max(job.ends_at - time.monotonic(), 1)))
        note_failure(job, spec, code, errors)
    before, asked = time.monotonic() - started, {count * job.sequence for count in missing}
    for row in job.found(name, mode):
        if row["tokens"] in asked:
            print(f"  {line(row, None)}", flush=True)
    print(f"  {before:.0f} s in all", flush=True)


# The table.


def gib(count: float | None) -> str:
    return "-" if count is None else f"{count / GIB:.2f}" if count >= GIB else f"{count / 2**20:.0f}M"


def line(row: dict, ratio: float | None) -> str:
    """One row of the table."""
    if row["outcome"] != "measured":
        return f"{row['tokens']:6d}  {row['outcome']}: {' '.join(row['detail'].split())[-300:]}"
    share = "    -" if ratio is None else f"{ratio:5.2f}"
    device = "  ".join(f"{gib(row.get(f'device_{name}')):>6}" for name in ("reserved", "used", "held", "plan"))
    host = "  ".join(f"{gib(row.get(f'host_{name}')):>6}" for name in ("peak", "training_peak", "held"))
    time_of_step = f"{row['seconds']:7.3f}  {row['tokens_per_second']:7.0f}  {share}  {row['floor']:7.3f}"
    busy = row["processors_busy_elsewhere"]
    noise = f"  ({busy:.1f} processors were busy elsewhere)" if busy > 0.2 else ""
    return f"{row['tokens']:6d}  {time_of_step}  {device}  {host}{noise}"


HEADER = (
    f"{'':31s}tokens  s/step    tok/s  ratio    floor  device: reserved, used, held, plan  "
    "host: peak, in training, held (GiB, or M for MiB)"
)


def report(job: Job) -> None:
    """Print the table, with ratios where the resident rows are there."""
    rows = [row for name, model in job.models.items() for mode in model.modes for row in job.found(name, mode)]
    seconds = {(r["model"], r["mode"], r["tokens"]): r["seconds"] for r in rows if r["outcome"] == "measured"}
    print(f"\n{HEADER}")
    for row in rows:
        reference = seconds.get((row["model"], MODES[row["mode"]].against, row["tokens"]))
        ratio = row["seconds"] / reference if reference and row["outcome"] == "measured" else None
        print(f"{row['model']:8s}{row['mode']:22s} {line(row, ratio)}")


# Command line.


def chosen_job(args: argparse.Namespace) -> Job:
    """Make the job from the options; its defaults depend on the scale."""
    models = MODELS if args.gpu else ON_CPU
    models = {name: model for name, model in models.items() if args.models is None or name in args.models}
    if args.smoke:
        models = {n: replace(m, **TINY, experts=TINY_EXPERTS if m.experts else {}) for n, m in models.items()}
    sequence = 32 if args.smoke else 2048 if args.gpu else 128
    windows = [1, 4, 8] if args.gpu else [4]
    if args.tokens:
        windows = [max(tokens // (2048 if args.gpu else sequence), 1) for tokens in args.tokens]
    modes = args.modes or (SMOKE_MODES if args.smoke else tuple(MODES))
    return Job(
        models=models,
        modes=modes,
        device="cuda" if args.gpu else "cpu",
        sequence=sequence,
        windows=sorted(set(windows)),
        steps=args.steps or (4 if args.gpu or args.smoke else 6),
        product=256 if args.smoke else 8192 if args.gpu else 1024,
        cap_gib=args.cap_gib if args.gpu else None,
        host_gib=args.host_gib if args.gpu else None,
        row_seconds=args.row_seconds,
        results=Results(args.results, "peaks", KEY),
        machines=Results(args.results, "machine", ("device",)),
        ends_at=time.monotonic() + args.total_seconds,
    )


def parse() -> argparse.Namespace:
    parser = command_line(__doc__, HERE)
    parser.add_argument("--gpu", action="store_true", help="Shapes of 1B to 50B under a cap of device memory.")
    parser.add_argument("--smoke", action="store_true", help="A tiny model, a few modes.")
    parser.add_argument("--report", action="store_true", help="Only print what is there.")
    parser.add_argument("--models", nargs="+", choices=[*ON_CPU, *MODELS])
    parser.add_argument("--modes", nargs="+", choices=list(MODES))
    parser.add_argument("--tokens", nargs="+", type=int, help="Per step; multiples of the sequence length.")
    parser.add_argument("--steps", type=int, help="Per window, the first two of them to warm up.")
    parser.add_argument(
        "--cap_gib", type=float, default=24, help="Device memory that a row may take, but resident ones."
    )
    parser.add_argument("--host_gib", type=float, default=120, help="Host memory that plans may count on (with --gpu).")
    parser.add_argument("--row_seconds", type=float, default=300, help="For one model and mode; then it is stopped.")
    parser.add_argument("--total_seconds", type=float, default=float("inf"), help="For all rows of this call.")
    return parser.parse_args()


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as scratch:
        if args.smoke:
            LOCAL["OMP_NUM_THREADS"] = "1"  # tiny products take longer on several
            if args.results == HERE / "results.jsonl":
                args.results = Path(scratch) / "results.jsonl"
        job = chosen_job(args)
        if not args.report:
            machine = measured_machine(job)
            for name, model in job.models.items():
                for mode in model.modes:
                    if mode in job.modes:
                        run_row(job, name, mode, machine)
        report(job)


if __name__ == "__main__":
    main()
