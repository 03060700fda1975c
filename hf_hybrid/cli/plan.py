"""`hf-hybrid plan`: the memory that each way to train a model needs, which of them fit, and the best as a YAML file."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_hybrid.plan.estimate import Plan
    from hf_hybrid.plan.planner import Planner

GIB = 2**30
COLUMNS = ("weights", "gradients", "states", "activations", "other")
HEADINGS = ("weights", "gradients", "states", "activ.", "other", "device", "host")


def add_parser(subparsers, summary: str) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help=summary,
        description=(
            "Plan the memory of training a model from its config alone: no weights, no data, no GPU. Prints how much "
            "device and host memory each way to train needs and which of them fit, and recommends the fastest exact "
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
    add(
        "--dtype",
        choices=("mixed", "float32", "bfloat16"),
        default="mixed",
        help="mixed: fp32 weights (a frozen base: bf16) under bf16 autocast; or all in one type (default: mixed)",
    )
    add("--peft", choices=("none", "lora", "qlora"), default="none", help="what the best plan trains (default: none)")
    add("--lora_r", type=int, default=16, help="rank of the adapters (default: 16)")
    add("--lora_target_modules", nargs="+", metavar="NAME", help="modules with adapters (default: all linear ones)")
    add("--enable_predict", action="store_true", help="count what leaps need: average of the gradients, and snapshot")
    add("--output", metavar="FILE", help="write the recommended plan as YAML: options of HybridConfig")
    add("--details", action="store_true", help="print every plan by category, on device and host")
    add("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """
    Plan, print, and write the YAML file that was asked for.

    Returns:
        `int`: 0; 1 if a file was asked for and nothing fits; 2 if the model cannot be planned.
    """
    try:
        with _quiet():
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
    Path(args.output).write_text(report.as_yaml(), encoding="utf-8")
    sys.stderr.write(f"Written: {args.output}\n")
    return 0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what transformers and others log about a model that is never trained."""
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
        transformers.logging.set_verbosity(before)


class _Report:
    """All plans for one command line."""

    def __init__(self, args: argparse.Namespace):
        from hf_hybrid.plan.accounting import device_memory, measure_machine
        from hf_hybrid.plan.models import adapters_installed, lora_config
        from hf_hybrid.plan.planner import Planner, recommended

        self.args, self.rates = args, None if device_memory() is None else measure_machine()
        self.vram, self.vram_said = _device_limit(args.vram)
        self.ram, self.ram_said = _host_limit(args.ram)
        with_adapters = adapters_installed()
        peft = lora_config(args.lora_r, args.lora_target_modules or "all-linear") if with_adapters else None
        if args.peft != "none" and not with_adapters:
            peft = lora_config(args.lora_r)  # says what to install
        self.planner: Planner = Planner(
            args.model,
            sequence_length=args.sequence_length,
            batch_size=args.batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            peft=peft,
            vram=self.vram,
            ram=self.ram,
            enable_predict=args.enable_predict,
            accelerator="cuda",
        )
        self.plans: list[Plan] = self.planner.plans(args.dtype, with_adapters=with_adapters)
        self.best = recommended(self.plans, None if args.peft == "none" else args.peft)
        missing = 'Plans with adapters need peft: pip install "hf-hybrid[peft]"\n'
        self.without_adapters = "" if with_adapters else missing

    def as_json(self) -> str:
        """All plans, and the recommended one, as JSON."""
        plans = [self._row(plan) for plan in self.plans]
        best = None if self.best is None else self.best.way.title
        limits = {"vram": self.vram, "ram": self.ram}
        return json.dumps({**limits, "rates": self.rates, "plans": plans, "recommended": best}, indent=2) + "\n"

    def _row(self, plan: Plan) -> dict:
        names = ("peak_device_bytes", "peak_host_bytes", "margin_bytes", "categories", "stage", "traced", "fits")
        names += ("device_shortfall", "host_shortfall", "options")
        values = {name: getattr(plan, name) for name in names}
        return {"title": plan.way.title, **values, "exact": plan.way.exact, "floor_seconds": self._floor(plan)}

    def as_text(self) -> str:
        """The table, and the recommended plan by category."""
        parts = [self._head(), self._table(), self._legend()]
        if self.args.details:
            parts += [f"{plan.way.title}\n{plan.table}\n" for plan in self.plans]
        return "\n".join([*parts, self._recommendation()])

    def _head(self) -> str:
        setup, first = self.planner.setup, self.plans[0]
        config = self.planner.config.get_text_config()
        experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        facts = [f"{first.shape.total.weights / 1e9:.2f} billion weights", f"{config.num_hidden_layers} layers"]
        facts += [f"width {first.shape.hidden}", f"{config.num_attention_heads} heads"]
        facts += [f"{experts} experts"] * bool(experts)
        facts += [f"vocabulary {first.shape.vocab}" + ", tied to the head" * first.shape.tied]
        count = setup.gradient_accumulation_steps
        steps = f" x {count} micro-batches" * (count > 1)
        return (
            f"{self.args.model} ({config.model_type}): {', '.join(facts)}\n"
            f"{setup.batch_size} sequences of {setup.sequence_length} tokens{steps}\n"
            f"device: {self.vram_said}\nhost:   {self.ram_said}\n"
        )

    def _table(self) -> str:
        width = max(len(plan.way.title) for plan in self.plans) + 4
        headings = "".join(f"{name:>10}" for name in HEADINGS) + f"{'floor s':>10}" * (self.rates is not None)
        lines = [f"{'GiB at the peak':<{width}}{headings}  fits"]
        for plan in self.plans:
            mark = "> " if plan is self.best else "  "
            name = f"{mark}{plan.way.title}{'' if plan.way.exact else ' *'}"
            lines.append(f"{name:<{width}}{self._numbers(plan)}  {_verdict(plan)}")
        return "\n".join(lines) + "\n"

    def _numbers(self, plan: Plan) -> str:
        by_category = {name: plan.table.get(name, "device") for name in COLUMNS[:-1]}
        other = plan.peak_device_bytes - sum(by_category.values())
        numbers = [*by_category.values(), other, plan.peak_device_bytes, plan.peak_host_bytes]
        text = "".join(f"{number / GIB:>10.2f}" for number in numbers)
        floor = self._floor(plan)
        return text if floor is None else f"{text}{floor:>10.2f}"

    def _floor(self, plan: Plan) -> float | None:
        from hf_hybrid.plan.estimate import step_floor_seconds

        tokens = plan.setup.tokens * plan.setup.gradient_accumulation_steps
        return None if self.rates is None else step_floor_seconds(plan, tokens, self.rates)

    def _legend(self) -> str:
        from hf_hybrid.plan.setups import CONTEXT_BYTES, MARGIN

        floor = (
            "No floor of the step time: rates are measured, and there is no GPU here.\n"
            if self.rates is None
            else "floor s: no step is faster, at the rates of copies and products measured here.\n"
        )
        return (
            "*: not exact AdamW: rounded states, or a rounded base.\n"
            f"fits: with {CONTEXT_BYTES / GIB:.1f} GiB for the CUDA context and {MARGIN:.0%} for the allocator, both "
            "assumed.\nAttention is fused, and batches are not padded.\n"
            f"{floor}{self.without_adapters}"
        )

    def _recommendation(self) -> str:
        if self.best is None:
            return "Nothing fits. Lower --batch_size or --sequence_length, or see what is short by least above.\n"
        exact = "" if self.best.way.exact else ", as nothing exact fits"
        return f"Recommended{exact}: {self.best.way.title}\n{self.best.table}\n"

    def as_yaml(self) -> str:
        """The recommended plan as options of `HybridConfig`; a comment holds the command line that goes with it."""
        import yaml

        args, best = self.args, self.best
        more = [f"--model {args.model}", f"--sequence_length {best.setup.sequence_length}"]
        more.append(f"--dtype {best.way.weights}")
        if best.way.trains == "adapters":
            more.append(f"--peft {'qlora' if best.way.packed else 'lora'} --lora_r {args.lora_r}")
        device, host = best.peak_device_bytes / GIB, best.peak_host_bytes / GIB
        head = (
            f"# {best.way.title}: {device:.2f} GiB on the device, {host:.2f} GiB on the host, by `hf-hybrid plan`\n"
            f"# hf-hybrid train --config {args.output or 'plan.yaml'} {' '.join(more)} --dataset ...\n"
        )
        return head + yaml.safe_dump({"output_dir": "out", **best.options}, sort_keys=False)


def _verdict(plan: Plan) -> str:
    if plan.fits:
        return "yes"
    shortfalls = {"device": plan.device_shortfall, "host": plan.host_shortfall}
    return "short by " + ", ".join(f"{short / GIB:.2f} ({place})" for place, short in shortfalls.items() if short)


def _device_limit(given: str | None) -> tuple[int | None, str]:
    from hf_hybrid.plan.accounting import device_memory
    from hf_hybrid.plan.setups import parse_size

    if given is not None:
        size = parse_size(given, "vram")
        return size, f"{size / GIB:.2f} GiB (--vram)"
    size = device_memory()
    return size, "no GPU here and no --vram: no limit" if size is None else f"{size / GIB:.2f} GiB (free on this GPU)"


def _host_limit(given: str | None) -> tuple[int, str]:
    from hf_hybrid.plan.accounting import host_memory
    from hf_hybrid.plan.setups import parse_size

    size = host_memory() if given is None else parse_size(given, "ram")
    return size, f"{size / GIB:.2f} GiB ({'available on this machine' if given is None else '--ram'})"
