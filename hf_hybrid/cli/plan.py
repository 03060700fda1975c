"""`hf-hybrid plan`: the memory that each way to train a model needs, which of them fit, and the best as a YAML file."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_hybrid.cli.console import quiet_imports
from hf_hybrid.files import write_text

if TYPE_CHECKING:
    from hf_hybrid.plan.planner import Planner
    from hf_hybrid.plan.ways import WayPlan

GIB = 2**30
COLUMNS = ("weights", "gradients", "states", "activations")
HEADINGS = ("weights", "gradients", "states", "activ.", "other", "device", "host")


def add_parser(subparsers, summary: str) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help=summary,
        description=(
            "Plan the memory of training a model from its config alone: no weights, no data, no GPU. Prints how much "
            "device and host memory each way to train needs and which of them fit, and recommends the cheapest exact "
            "one."
        ),
    )

    def add(name: str, **options) -> None:
        names = dict.fromkeys((name, name.replace("_", "-")))  # as `train` takes them
        parser.add_argument(*names, **options)

    add("model", help="causal language model: id on the Hub, folder or config file; only config.json is read")
    add("--sequence_length", type=int, help="tokens per sequence (default: 1024, less if the model takes less)")
    add("--batch_size", type=int, default=8, help="sequences per micro-batch (default: 8)")
    add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per optimizer step (default: 1)")
    add("--vram", help="device memory, as 24GiB, 24GB (decimal) or bytes (default: what is free on the GPU)")
    add("--ram", help="host memory (default: what is available on this machine)")
    text = "mixed: fp32 weights (a frozen base: bf16) under bf16 autocast; or all in one type (default: mixed)"
    add("--dtype", choices=("mixed", "float32", "bfloat16"), default="mixed", help=text)
    add("--peft", choices=("none", "lora", "qlora"), default="none", help="what the best plan trains (default: none)")
    text = "bitnet: ternary weights, with their rounded copies beside the latent ones (default: none)"
    add("--qat", choices=("none", "bitnet"), default="none", help=text)
    add("--lora_r", type=int, default=16, help="rank of the adapters (default: 16)")
    add("--lora_target_modules", nargs="+", metavar="NAME", help="modules with adapters (default: all linear ones)")
    add("--num_processes", type=int, default=1, help="processes, one for each GPU; more with --accelerate_config")
    add("--accelerate_config", choices=("fsdp2",), help="how processes share the model; plans are of each of them")
    add("--enable_predict", action="store_true", help="count the memory of leaps, which adapters train without")
    add(
        "--output",
        metavar="FILE",
        help="write the recommended plan as YAML: options of `hf-hybrid train`, which then needs a data set",
    )
    add("--details", action="store_true", help="print every plan by category, on device and host")
    add("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Plan, print, write a YAML file. Returns 0; 1 if nothing fits to be written; 2 for wrong options."""
    try:
        if args.output is not None:
            _check_output(args.output)
        with quiet_imports():  # of a model that is never trained nothing is told
            report = _Report(args)
    except (ImportError, ValueError) as error:
        sys.stderr.write(f"hf-hybrid plan: error: {error}\n")
        return 2
    sys.stdout.write(report.as_json() if args.json else report.as_text())
    if args.output is None:
        return 0
    if report.best is None:
        sys.stderr.write(f"hf-hybrid plan: nothing fits, so `{args.output}` is not written.\n")
        return 1
    try:
        write_text(Path(args.output), report.as_yaml(report.best))
    except OSError as error:  # the disk may be full by now
        sys.stderr.write(f"hf-hybrid plan: error: `--output {args.output}` cannot be written: {error.strerror}.\n")
        return 2
    sys.stderr.write(f"Written: {args.output}\n")
    return 0


def _check_output(name: str) -> None:
    """Refuse a file that cannot be written, before the work that would be lost with it."""
    try:
        if Path(name).is_dir():
            raise ValueError("it is a folder")
        with tempfile.TemporaryFile(dir=Path(name).parent):
            pass
    except (OSError, ValueError) as error:  # a ValueError: of a NUL, too
        raise ValueError(f"`--output {name}` cannot be written: {getattr(error, 'strerror', error)}.") from None


class _Report:
    """All plans for one command line."""

    def __init__(self, args: argparse.Namespace):
        import torch

        from hf_hybrid.machine import device_memory
        from hf_hybrid.plan.accounting import host_memory
        from hf_hybrid.plan.exports import exported_bytes
        from hf_hybrid.plan.models import build, lora_config
        from hf_hybrid.plan.planner import Planner, recommended
        from hf_hybrid.plan.setups import with_context
        from hf_hybrid.plan.ways import parse_size

        if (args.num_processes > 1) != (args.accelerate_config is not None):
            raise ValueError(
                f"`--num_processes {args.num_processes}` and `--accelerate_config {args.accelerate_config}` do not go "
                "together. Give `--accelerate_config fsdp2` with two processes or more. Otherwise leave both out: with "
                "DDP each process holds what one holds, and its gradients twice."
            )
        if args.num_processes > 1 and args.peft == "qlora":
            raise ValueError("`--peft qlora` is not planned with FSDP2. Give `--peft lora`, or plan for one process.")
        if args.qat != "none" and args.peft != "none":
            raise ValueError(f"`--qat {args.qat}` trains all weights, and `--peft {args.peft}` freezes them.")
        self.args = args
        self.with_adapters = importlib.util.find_spec("peft") is not None
        asks = self.with_adapters or args.peft != "none"  # without peft the error says what to install
        with_adapters = self.with_adapters and args.qat == "none"
        self.ram = parse_size(args.ram or host_memory(), "ram") // args.num_processes
        self.planner: Planner = Planner(
            args.model,
            sequence_length=args.sequence_length,
            batch_size=args.batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            peft=lora_config(args.lora_r, args.lora_target_modules or "all-linear") if asks else None,
            qat=args.qat,
            vram=args.vram or with_context(device_memory()),
            ram=self.ram,
            processes=args.num_processes,
            enable_predict=args.enable_predict,
            accelerator="cuda",
        )
        self.plans: list[WayPlan] = self.planner.plans(args.dtype, with_adapters=with_adapters)
        self.exports = exported_bytes(build(self.planner.config, torch.float32))
        self.best = recommended(self.plans, None if args.peft == "none" else args.peft)

    def as_json(self) -> str:
        """All plans, and the recommended one, as JSON."""
        plans, setup = [self._row(plan) for plan in self.plans], self.planner.setup
        best = None if self.best is None else self.best.way.title
        values = {"vram": setup.vram, "ram": setup.ram, "plans": plans, "recommended": best, "exports": self.exports}
        return json.dumps(values, indent=2) + "\n"

    def _row(self, plan: WayPlan) -> dict:
        names = ("peak_device_bytes", "peak_host_bytes", "margin_bytes", "categories", "stage", "traced", "fits")
        names += ("device_shortfall", "host_shortfall", "options")
        values = {name: getattr(plan, name) for name in (*names, "recomputed_layers")}
        return {"title": plan.way.title, **values, "exact": plan.way.exact}

    def as_text(self) -> str:
        """The table, and the recommended plan by category."""
        sizes = ", ".join(f"{name} {count / GIB:.2f}" for name, count in self.exports.items())
        exports = f"GiB of weights after `hf-hybrid export --dtype bfloat16`: {sizes}\n"
        parts = [self._head(), self._table(), self._legend(), exports]
        if self.args.details:
            parts += [f"{plan.title}, estimated\n{plan.table}\n" for plan in self.plans]
        if self.best is None:
            parts.append(
                "Nothing fits. Lower --batch_size or --sequence_length, or see above which plan is short by least.\n"
            )
        else:
            exact = "" if self.best.way.exact else ", as nothing exact fits"
            parts.append(f"Recommended{exact}: {self.best.title}\nestimated at the peak:\n{self.best.table}\n")
        return "\n".join(parts)

    def _head(self) -> str:
        args, setup, shape = self.args, self.planner.setup, self.plans[0].shape
        config = self.planner.config.get_text_config()
        experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        facts = [f"{shape.total.weights / 1e9:.2f} billion weights", f"{config.num_hidden_layers} layers"]
        facts += [f"width {shape.hidden}", f"{config.num_attention_heads} heads"]
        facts += [f"{experts} experts"] * bool(experts)
        facts += [f"vocabulary {shape.vocab}" + ", tied to the head" * shape.tied]
        count = setup.gradient_accumulation_steps
        steps = f" x {count} micro-batches" * (count > 1)
        device = "no GPU here and no --vram: no limit"
        if setup.vram is not None:
            source = "free on this GPU, and the CUDA context of this process"
            device = f"{setup.vram / GIB:.2f} GiB ({'--vram' if args.vram else source})"
        host = f"{self.ram / GIB:.2f} GiB ({'--ram' if args.ram else 'available on this machine'})"
        share = ""
        if setup.processes > 1:
            share = f"{setup.processes} processes share the weights (FSDP2): all numbers are of each of them\n"
            host = f"{host[:-1]}, divided by {setup.processes})"
        return (
            f"{args.model} ({config.model_type}): {', '.join(facts)}\n"
            f"{setup.batch_size} sequences of {setup.sequence_length} tokens{steps}\n{share}"
            f"device: {device}\nhost:   {host}\n"
        )

    def _table(self) -> str:
        width = max(len(plan.title) for plan in self.plans) + 4
        headings = "".join(f"{name:>10}" for name in HEADINGS)
        lines = [f"{'GiB at the peak, estimated':<{width}}{headings}  fits"]
        for plan in self.plans:
            name = f"{'> ' if plan is self.best else '  '}{plan.title}{'' if plan.way.exact else ' *'}"
            by_category = [plan.table.get(category, "device") for category in COLUMNS]
            total = plan.peak_device_bytes
            numbers = [count / GIB for count in (*by_category, total - sum(by_category), total, plan.peak_host_bytes)]
            lines.append(f"{name:<{width}}{''.join(f'{number:>10.2f}' for number in numbers)}  {_verdict(plan)}")
        return "\n".join(lines) + "\n"

    def _legend(self) -> str:
        from hf_hybrid.plan.setups import CONTEXT_BYTES, MARGIN

        missing = 'Plans with adapters need peft: pip install "hf-hybrid[peft]"\n'
        return (
            "*: not exact AdamW: rounded states, or a rounded base.\n"
            f"fits: with {CONTEXT_BYTES / GIB:.1f} GiB for the CUDA context and {MARGIN:.0%} for the allocator, both "
            "assumed.\nAttention is fused, and batches are not padded.\n"
            f"{missing * (not self.with_adapters)}"
        )

    def as_yaml(self, best: WayPlan) -> str:
        """A plan as options of `hf-hybrid train`, which needs nothing but a data set beside them."""
        import yaml

        args = self.args
        values: dict[str, Any] = {
            "model": args.model,
            "sequence_length": best.setup.sequence_length,
            "dtype": best.way.weights,
        }
        if best.way.trains == "adapters":
            values |= {"peft": "qlora" if best.way.packed else "lora", "lora_r": args.lora_r}
            if args.lora_target_modules:
                values["lora_target_modules"] = args.lora_target_modules
        if args.qat != "none":
            values["qat"] = args.qat
        if args.accelerate_config is not None:
            values |= {"num_processes": args.num_processes, "accelerate_config": args.accelerate_config}
        device, host = best.peak_device_bytes / GIB, best.peak_host_bytes / GIB
        head = (
            f"# {best.title}: {device:.2f} GiB on the device, {host:.2f} GiB on the host, estimated by "
            "`hf-hybrid plan`\n"
            f"# hf-hybrid train --config {args.output} --dataset ...\n"
        )
        return head + yaml.safe_dump({**values, "output_dir": "out", **best.options}, sort_keys=False)


def _verdict(plan: WayPlan) -> str:
    if plan.fits:
        return "yes"
    shortfalls = {"device": plan.device_shortfall, "host": plan.host_shortfall}
    return "short by " + ", ".join(f"{short / GIB:.2f} ({place})" for place, short in shortfalls.items() if short)
