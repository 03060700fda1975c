"""`hf-hybrid plan`: the memory that each way to train a model needs, and the best that fit, as commands and a file."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import shlex
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_hybrid.cli.console import quiet_imports, terminal_width, write_error, write_out
from hf_hybrid.cli.options import TRAINING
from hf_hybrid.files import write_text

if TYPE_CHECKING:
    from hf_hybrid.plan.planner import Planner
    from hf_hybrid.plan.ways import WayPlan

GIB, BUS = 2**30, 25e9  # bytes a second that PCIe 4.0 copies to a device
COMPLETES = ("grpo", "rloo")
"""Commands that make completions: half of the length is planned for the prompt."""
LENGTHS = {"train": "sequence_length", **dict.fromkeys(("sft", "distill", "dpo", "kto", "reward"), "max_length")}
LENGTHS |= dict.fromkeys(COMPLETES, "max_completion_length")
"""The option of each command for the length of a sequence."""
DATA = dict.fromkeys(LENGTHS, "--dataset DATA") | dict.fromkeys(COMPLETES, "--dataset DATA --reward REWARD")
"""What each command needs beside its plan."""
TWICE = ("dpo", "kto", "reward")
"""Commands that compute two sequences of a row: of a pair, or an answer and one to another question (KTO)."""
DEFAULTS = {
    "optim": "adamw_torch_fused", "memory": "off", "optimizer_states": "exact", "chunked_loss": "off", "lora_r": 16,
    "gradient_accumulation_steps": 1, "offload_activations": False, "base_precision": "same",
}  # fmt: skip
"""Options that a printed command need not have."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = (
        "Plan the memory of training a model from its config alone: no weights, no data, no GPU. Prints how much "
        "device and host memory each way to train needs and which of them fit, and recommends the cheapest exact "
        "one of each kind: full training, LoRA, and QLoRA."
    )
    add = parser.add_argument
    add("model", help="causal language model: id on the Hub, folder or config file; only config.json is read")
    add("--sequence_length", type=int, help="tokens per sequence (default: 1024, less if the model takes less)")
    add("--batch_size", type=int, default=8, help="sequences per micro-batch (default: 8)")
    add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per optimizer step (default: 1)")
    add("--vram", help="device memory, as 24 or 24GiB, or 24GB (decimal) (default: what is free on the GPU)")
    add("--ram", help="host memory (default: what is available on this machine)")
    text = "mixed: fp32 weights (a frozen base: bf16) under bf16 autocast; or all in one type (default: mixed)"
    add("--dtype", choices=("mixed", "float32", "bfloat16"), default="mixed", help=text)
    add("--for", dest="task", choices=tuple(LENGTHS), default="sft", help="command that trains (default: sft)")
    add("--teacher", help="of --for distill: the model to learn from; only its config.json is read")
    add("--peft", choices=("none", "lora", "qlora"), help="plan this alone; none: all weights (default: all three)")
    add("--qat", choices=("none", "bitnet"), default="none", help="bitnet: ternary weights (default: none)")
    add("--lora_r", type=int, default=16, help="rank of the adapters (default: 16)")
    add("--lora_target_modules", nargs="+", metavar="NAME", help="modules with adapters (default: all linear ones)")
    add("--enable_predict", action="store_true", help="count the memory of leaps, which adapters train without")
    text = "write the best plan (of several kinds the first that needs no streaming) as YAML, for --config of --for"
    add("--output", metavar="FILE", help=text)
    add("--json", action="store_true", help="print JSON instead of a table: every plan, with its bytes by category")


def run(args: argparse.Namespace) -> int:
    """Plan, print, write a YAML file. Returns 0; 1 if nothing fits to be written."""
    with quiet_imports():
        report = _Report(args)
    write_out(report.as_json() if args.json else report.as_text())
    if args.output is None:
        return 0
    best = report.written()
    if best is None:
        write_error(f"hf-hybrid plan: nothing fits, so `{args.output}` is not written.\n")
        return 1
    try:
        write_text(Path(args.output), report.as_yaml(best))
    except (OSError, ValueError) as error:  # a ValueError: of a NUL in the name
        reason = getattr(error, "strerror", error)
        raise ValueError(f"`--output {args.output}` cannot be written: {reason}.") from None
    write_error(f"Written: {args.output} ({report.title(best)})\n")
    return 0


class _Report:
    """All plans for one command line."""

    def __init__(self, args: argparse.Namespace):
        from hf_hybrid.machine import device_memory
        from hf_hybrid.plan.accounting import host_memory
        from hf_hybrid.plan.models import lora_config, takes_images
        from hf_hybrid.plan.planner import Planner, recommended
        from hf_hybrid.plan.setups import with_context
        from hf_hybrid.plan.ways import KINDS, parse_size

        if args.qat != "none" and args.peft in ("lora", "qlora"):
            raise ValueError(f"`--qat {args.qat}` trains all weights, and `--peft {args.peft}` freezes them.")
        if (args.task == "distill") != (args.teacher is not None):
            raise ValueError(
                "`--teacher` names the model that `--for distill` learns from. Give both of them, or none."
            )
        if args.task in COMPLETES and args.batch_size * args.gradient_accumulation_steps % 2:
            raise ValueError(f"`--batch_size {args.batch_size}` holds no groups of completions. Give an even number.")
        self.args = args
        self.with_peft = importlib.util.find_spec("peft") is not None
        kinds = KINDS if self.with_peft and args.qat == "none" else KINDS[:1]
        if args.peft is not None:
            kinds = tuple(kind for kind in KINDS if kind.lower() == args.peft.replace("none", "full"))
        adapters = kinds != KINDS[:1]  # without peft the error says what to install
        self.ram = parse_size(args.ram or host_memory(), "ram")
        self.planner: Planner = Planner(
            args.model,
            sequence_length=args.sequence_length,
            batch_size=args.batch_size * (2 if args.task in TWICE else 1),
            teacher=args.teacher,
            generates=args.batch_size * args.gradient_accumulation_steps * (args.task in COMPLETES),
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            peft=lora_config(args.lora_r, args.lora_target_modules or "all-linear") if adapters else None,
            qat=args.qat,
            vram=args.vram or with_context(device_memory()),
            ram=self.ram,
            enable_predict=args.enable_predict,
            accelerator="cuda",
        )
        self.sees = takes_images(self.planner.config)
        if self.sees and not TRAINING[args.task].sees:
            raise ValueError(f"`--for {args.task}` trains models of text, and `{args.model}` takes images.")
        chunks = "maybe" if args.task in ("train", "distill") else "always"
        self.plans: list[WayPlan] = self.planner.plans(args.dtype, kinds, chunks=chunks)
        self.best = {kind: recommended(self.plans, kind) for kind in kinds}
        divisors = [count for count in range(2, args.batch_size + 1) if args.batch_size % count == 0]

        def smaller(kind: str, count: int) -> WayPlan | None:
            best = self.best[kind]
            how: dict[str, Any] = {"chunks": chunks, "can_stream": best is None}
            plan = recommended(self.planner.plans(args.dtype, (kind,), micro_batches=count, **how), kind)
            return plan if plan is None or best is None or plan.way.exact >= best.way.exact else None

        for kind, best in self.best.items():  # the same update in smaller micro-batches is quicker than streaming
            if divisors and (best is None or best.mode == "streamed") and smaller(kind, divisors[-1]) is not None:
                found = next(plan for count in divisors if (plan := smaller(kind, count)) is not None)
                self.best[kind] = found
                self.plans.append(found)

    def written(self) -> WayPlan | None:
        """The plan for `--output`."""
        fitting = [plan for plan in self.best.values() if plan is not None]
        return next((plan for plan in fitting if plan.mode != "streamed"), next(iter(fitting), None))

    def _size(self, plan: WayPlan) -> int:
        """Rows of a micro-batch."""
        return plan.setup.batch_size // (2 if self.args.task in TWICE else 1)

    def title(self, plan: WayPlan) -> str:
        """The way of a plan, and its micro-batches where they are smaller than asked for."""
        size = self._size(plan)
        return plan.title + f", {size} x {self.args.batch_size // size}" * (size < self.args.batch_size)

    def as_json(self) -> str:
        """All plans, and the recommended ones, as JSON."""
        setup = self.planner.setup
        names = "peak_device_bytes peak_host_bytes margin_bytes categories stage traced fits device_shortfall"
        names += " host_shortfall options recomputed_layers kept_graphs"
        plans = [
            {name: getattr(plan.way, name) for name in ("title", "kind", "exact")}
            | {"batch_size": self._size(plan)}
            | {name: getattr(plan, name) for name in names.split()}
            for plan in self.plans
        ]
        best = {kind: plan and plan.way.title for kind, plan in self.best.items()}
        values = {"vram": setup.vram, "ram": setup.ram, "plans": plans, "recommended": best}
        return json.dumps(values, indent=2) + "\n"

    def as_text(self) -> str:
        """The table of all plans, and the best of each kind with its command."""
        return "\n".join([self._head(), self._table(), self._legend(), self._recommended()])

    def _head(self) -> str:
        args, setup, shape, config = self.args, self.planner.setup, self.plans[0].shape, self.planner.config
        weights = shape.total.frozen or shape.total.trainable  # without adapters
        model = (
            f"{args.model} ({config.get_text_config().model_type}): {weights / 1e9:.2f} billion weights, "
            f"{len(shape.layers)} layers, width {shape.hidden}, vocabulary {shape.vocab}"
            f"{', tied to the head' * shape.tied}"
        )
        pairs, steps = " pairs of two" * (args.task in TWICE), setup.gradient_accumulation_steps
        source = "--vram" if args.vram else "free on this GPU, and the CUDA context of this process"
        device = "no GPU here and no --vram: no limit"
        if setup.vram is not None:
            device = f"{setup.vram / GIB:.2f} GiB ({source})"
        source = "--ram" if args.ram else "available on this machine"
        lines = textwrap.wrap(model, terminal_width())
        micro_batches = f" x {steps} micro-batches" * (steps > 1)
        lines.append(f"{args.batch_size}{pairs} sequences of {setup.sequence_length} tokens{micro_batches}")
        return "\n".join([*lines, f"device: {device}", f"host:   {self.ram / GIB:.2f} GiB ({source})", ""])

    def _table(self) -> str:
        lines = ["   device    host  fits        GiB at the peak, estimated"]
        for plan in self.plans:
            mark, exact = ">" if plan in self.best.values() else " ", "" if plan.way.exact else " *"
            device, host, short = plan.peak_device_bytes, plan.peak_host_bytes, plan.device_shortfall
            fits = f"-{(short or plan.host_shortfall) / GIB:.2f}{'' if short else ' host'}" if plan.shortfall else "yes"
            row = f"{mark}{device / GIB:8.2f} {host / GIB:7.2f}  {fits:<12}{self.title(plan)}{exact}"
            lines += textwrap.wrap(row, terminal_width(), subsequent_indent=" " * 31, break_on_hyphens=False)
        return "\n".join(lines) + "\n"

    def _legend(self) -> str:
        from hf_hybrid.plan.setups import CONTEXT_BYTES, MARGIN

        text = (
            f"fits: with {CONTEXT_BYTES / GIB:.1f} GiB for the CUDA context and {MARGIN:.0%} for the allocator, both "
            "assumed; or what is missing. *: not exact AdamW: rounded states, or a rounded base. Attention is fused, "
            "and batches are not padded."
        )
        text += " Half of the tokens stand for images, which the encoder computes." * self.sees
        if self.args.task in COMPLETES:
            most = max(map(self.planner.keys_and_values, (plan.way for plan in self.plans))) / GIB
            text += " Completions hold keys and values, as if all went on to their last token. "
            text += f"With tools up to {most:.3g} GiB more wait between turns, if that is not over half of what is "
            text += "free then."
            layers, weights = self.plans[0].shape.layers, {"float32": 4}.get(self.plans[0].way.weights, 2)
            size = weights * sum(layer.trainable + layer.frozen for layer in layers)
            seconds = f"{size / BUS:.2g} s at an assumed 25 GB/s"
            text += f" Streamed, each token of all rows copies {size / GIB:.3g} GiB: {seconds}."
        text += " The teacher is loaded as the student is." * (self.args.task == "distill")
        text += ' Plans with adapters need peft: pip install "hf-hybrid[peft]"' * (not self.with_peft)
        return textwrap.fill(text, terminal_width()) + "\n"

    def _recommended(self) -> str:
        begin = f"hf-hybrid {self.args.task}"
        lines = [f"Best of each kind for `{begin}`:"]
        for kind, plan in self.best.items():
            if plan is None:
                least = min((plan for plan in self.plans if plan.way.kind == kind), key=lambda plan: plan.shortfall)
                places = {"device": least.device_shortfall, "host": least.host_shortfall}
                short = ", ".join(f"{short / GIB:.2f} GiB ({place})" for place, short in places.items() if short)
                lines.append(f"{kind}: does not fit, short by {short}")
                continue
            exact = "" if plan.way.exact else " *"
            lines += textwrap.wrap(
                f"{self.title(plan)}, {plan.peak_device_bytes / GIB:.2f} GiB{exact}", terminal_width()
            )
            options = {name: value for name, value in self._options(plan).items() if DEFAULTS.get(name) != value}
            words = [begin, *(f"--{name} {_word(value)}" for name, value in options.items()), DATA[self.args.task]]
            text = " ".join(word.replace(" ", "\0") for word in words)  # no break within
            how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": " " * 4}
            command = textwrap.wrap(text, terminal_width() - 2, initial_indent="  ", **how)
            lines.append(" \\\n".join(command).replace("\0", " "))
        if not any(self.best.values()):
            lines.append("Nothing fits, in micro-batches of one sequence neither. Lower --sequence_length.")
        return "\n".join(lines) + "\n"

    def _options(self, plan: WayPlan) -> dict[str, Any]:
        """A plan as options of its command, which needs nothing but data beside them."""
        args, length, task = self.args, plan.setup.sequence_length, self.args.task
        values: dict[str, Any] = {"model": args.model, "dtype": plan.way.weights}
        values[LENGTHS[task]] = max(length // 2, 1) if task in COMPLETES else length
        if self.sees:
            values.pop("max_length", None)  # which would cut images
        if task == "distill":
            values["teacher"] = args.teacher
        if plan.way.kind != "full":
            values |= {"peft": plan.way.kind.lower(), "lora_r": args.lora_r}
            if args.lora_target_modules:
                values["lora_target_modules"] = args.lora_target_modules
        if args.qat != "none":
            values["qat"] = args.qat
        values |= {"output_dir": "out", **plan.options}
        values["per_device_train_batch_size"] = self._size(plan)
        # Leaps alone are left out: `enable_predict=False` would leave out shared rows and the rule for rates too.
        del values["enable_predict"]
        if plan.way.kind == "full" and task in ("train", "sft") and not args.enable_predict:
            values["leap_gain"] = 0
        if task not in ("train", "distill"):
            del values["chunked_loss"]
        if task in ("dpo", "kto") and plan.way.kind == "full":
            values["precompute_ref_log_probs"] = True  # no second model
        if task in COMPLETES:
            completions = args.batch_size * args.gradient_accumulation_steps
            values["num_generations"] = math.gcd(completions, 8)  # 8 as in TRL, or what divides them
        return values

    def as_yaml(self, best: WayPlan) -> str:
        """A plan as a file for `--config`."""
        import yaml

        device, host = best.peak_device_bytes / GIB, best.peak_host_bytes / GIB
        head = (
            f"# {self.title(best)}: {device:.2f} GiB on the device, {host:.2f} GiB on the host, estimated by "
            "`hf-hybrid plan`\n"
            f"# hf-hybrid {self.args.task} --config {self.args.output} {DATA[self.args.task]}\n"
        )
        return head + yaml.safe_dump(self._options(best), sort_keys=False)


def _word(value: Any) -> str:
    """A value of YAML as on the command line."""
    if isinstance(value, list):
        return shlex.join(value)
    return shlex.quote(value if isinstance(value, str) else json.dumps(value))
