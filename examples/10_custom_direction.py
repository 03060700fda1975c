"""
Write your own direction for leaps, and a part that follows the phases (under half a minute on two idle CPU cores).

    python examples/10_custom_direction.py
    python examples/10_custom_direction.py --least_agreement 0 --leap_gain 2

`Agreement` repeats Adam's last step for weights whose gradients kept their sign. It shows the parts of a direction. It
is not a good direction; the script compares it with the default. `PhaseClock` is a part. Nothing is downloaded. Every
option of HybridConfig is a flag.
"""

from __future__ import annotations

import runpy
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from hf_hybrid.cli.console import quiet_imports

with quiet_imports():
    import torch
    from transformers import HfArgumentParser

    from hf_hybrid import Direction, HybridConfig, HybridTrainer, Part

compare = runpy.run_path(str(Path(__file__).with_name("02_compare_with_trainer.py")))


class Agreement(Direction):
    """
    Repeats Adam's last step for weights whose gradients mostly have the same sign.

    Args:
        context (`DirectionContext`): Parameters, optimizer and where buffers belong.
        least (`float`): Least absolute mean of the sign, 0 to 1, for a weight to move.
    """

    name = "agreement"
    gain, memory_steps = 3.0, 10  # the default of the option `leap_gain`, and the length of slow averages
    values_per_weight = 1  # `signs`, counted by memory plans

    def __init__(self, context, least: float):
        super().__init__(context)
        self.least = least
        # Tensors in `buffers`, one per parameter, are saved and restored with every checkpoint.
        self.buffers["signs"] = [context.buffer(parameter, zero=True) for parameter in context.parameters]

    @property
    def ready(self) -> bool:
        return "exp_avg" in self.context.state(0)

    @torch.no_grad()
    def observe_gradients(self) -> None:
        """Average the signs of the clipped gradients, after every real backward pass."""
        for signs, parameter in zip(self.buffers["signs"], self.context.parameters):
            signs.lerp_(parameter.grad.sign().to(signs), 1.0 / self.context.memory_steps)

    def displacement(self, index: int, out: torch.Tensor) -> torch.Tensor:
        """Write the displacement per unit of learning rate into `out`, which is on the device of the buffers."""
        state, group = self.context.state(index), self.context.group(index)
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        scale = out.copy_(state["exp_avg_sq"]).div_(1 - beta2**step).sqrt_().add_(group["eps"])
        update = state["exp_avg"].to(out) / (1 - beta1**step) / scale
        return out.copy_(-update * (self.buffers["signs"][index].abs() >= self.least))

    def reset(self) -> None:
        for signs in self.buffers["signs"]:
            signs.zero_()


class PhaseClock(Part):
    """Counts seconds and forward passes in each phase. Its `state_dict` is part of every checkpoint."""

    name = "phase_clock"

    def __init__(self):
        self.seconds, self.passes, self.probes = {}, {}, 0
        self._phase, self._since = "warmup", time.perf_counter()

    def on_phase_change(self, old, new) -> None:
        self._count(old.value)
        self._phase = new.value

    def before_forward(self, phase) -> None:
        self.passes[phase.value] = self.passes.get(phase.value, 0) + 1

    def before_probe(self) -> None:
        self.probes += 1

    def end(self) -> None:
        self._count(self._phase)

    def _count(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

    def state_dict(self) -> dict:
        return {"seconds": self.seconds, "passes": self.passes, "probes": self.probes, "phase": self._phase}

    def load_state_dict(self, state: dict) -> None:
        self.seconds, self.passes = state["seconds"], state["passes"]
        self.probes, self._phase = state["probes"], state["phase"]


@dataclass
class ScriptArguments:
    least_agreement: float = field(default=0.3, metadata={"help": "Least mean of the signs for a weight to leap."})


def train(name: str, args: HybridConfig, **more) -> str:
    train_set, evaluation = compare["byte_blocks"](64)
    clock = PhaseClock()
    trainer = HybridTrainer(
        compare["small_llama"](args.seed),
        replace(args, output_dir=f"{args.output_dir}/{name}"),
        train_dataset=train_set,
        eval_dataset=evaluation,
        data_collator=compare["collate"],
        parts=[clock],
        **more,
    )
    trainer.train()
    summary, loss = trainer.hybrid_summary(), trainer.evaluate()["eval_loss"]
    seconds = "  ".join(f"{phase} {value:.1f}" for phase, value in clock.seconds.items())
    return (
        f"{summary['direction']}: loss {loss:.4f}, {summary['leaps_made']} leaps {summary['leaps_by_verdict']}, "
        f"{summary['backward_passes']} backward passes, {summary['backward_passes_avoided']} avoided\n"
        f"    seconds by phase  {seconds}; {sum(clock.passes.values())} forward passes, {clock.probes} probes"
    )


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, HybridConfig))
    parser.set_defaults(
        output_dir="out/custom_direction", max_steps=150, learning_rate=3e-3, per_device_train_batch_size=16,
        per_device_eval_batch_size=64, save_strategy="no", report_to="none", disable_tqdm=True,
        logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    script, args = parser.parse_args_into_dataclasses()
    print(train("agreement", args, direction=partial(Agreement, least=script.least_agreement)), flush=True)
    print(train("default", args))


if __name__ == "__main__":
    main()
