"""
Would a correction byte beside each bf16 weight bring 8-bit training nearer to fp32 AdamW? SmolLM2-135M, small rates.

    python -m benchmarks.speedup.pretrained             # once: the model
    python -m benchmarks.memory.correction              # every arm, rate and seed; hours on one thread of a CPU
    python -m benchmarks.memory.correction --arms fp32 8bit --rates 1e-5 --seeds 0
    python -m benchmarks.memory.correction --report     # the table

At the rates of fine-tuning, 1e-6 to 1e-5, an update is far below half a unit in the last place of a bf16 weight. An arm
is a format of the weights and one of AdamW's states. All start from the same weights, those of SmolLM2 rounded to bf16,
see the same rows in the same order at a constant rate, and are evaluated in fp32 on the same held-out rows.

- `fp32`: fp32 weights, computation in fp32, torch's AdamW.
- `fp32-autocast`: the same with `bf16=True`. Autocast rounds the weights of linear layers to nearest in each step.
- `8bit`: `optimizer_states="8bit"` with a bf16 model: 8-bit states, stochastic rounding.
- `nearest`, `stochastic`: fp32 states and bf16 weights, rounded to nearest (this loses updates) or stochastically.
- `24bit`, `24bit-stochastic`: the same with a correction byte per weight, `split` below.
- `8bit-24bit-stochastic`: 8-bit states and a correction byte.

bf16 models compute in bf16. `eval_loss` is that of the weights that the model has, in fp32 for the first two arms and
in bf16 for the others. For the first two `eval_loss_in_bf16` is that of the weights rounded to the nearest bf16 once,
after training, and `eval_loss_in_bf16_stochastic` that of the weights rounded stochastically. The correction bytes are
added for `eval_loss_with_corrections`.

**The correction byte** (FlashOptim, arXiv 2602.23349). A bf16 weight is the upper half of an fp32 number, and the upper
byte of the lower half continues its digits. `split` rounds fp32 to the upper 24 bits and those to the nearest bf16; the
difference is a signed byte. As the bits of a float, read as an integer, grow with its magnitude, `join` is one
addition. The paper codes the same difference as a fraction of the largest possible one; this is the same precision.

**Noise that grows with a run.** Stochastic rounding makes no systematic error, but moves a weight by a whole unit `q`
with the probability `u / q` for an update `u`: a random walk of variance `q` times the path, the sum of all `|u|`. A
short run cannot show what a long one collects. `--walk` gives the weights of SmolLM2 the noise of a path that long,
without any training, and measures its loss. Training corrects such noise where the loss is sensitive to it, so this is
an upper bound. `path` in the rows of `fp32` is that of an average weight per step in units of the rate.
"""

from __future__ import annotations

import copy
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments

from benchmarks.results import Results, command_line, provenance
from benchmarks.speedup.pretrained import FOLDER
from benchmarks.speedup.tasks import QUIET
from benchmarks.texts import standard_library
from hf_hybrid.streaming.low_bit import AdamW8bit, stochastic_round_

KEY = ("arm", "rate", "seed", "steps")
BASELINE = "fp32"
ARMS: dict[str, tuple[str, str]] = {
    # states, rounding of the weights
    BASELINE: ("fp32", "none"),
    "fp32-autocast": ("fp32", "none"),
    "8bit": ("8bit", "stochastic"),
    "nearest": ("fp32", "nearest"),
    "stochastic": ("fp32", "stochastic"),
    "24bit": ("fp32", "24bit"),
    "24bit-stochastic": ("fp32", "24bit-stochastic"),
    "8bit-24bit-stochastic": ("8bit", "24bit-stochastic"),
}
RATES = (1e-6, 3e-6, 1e-5)
SEQUENCE, TEST = 64, 64
LOOK = 10
"""Steps from one look at the length of an update to the next."""
WALKS = (1e-4, 1e-3, 1e-2, 1e-1)
"""Paths of an average weight, in the unit of the weights: 1e-3 is a thousand updates of 1e-6."""


def split(exact: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """
    fp32 as the nearest bf16 and a signed byte, together the upper 24 bits of fp32.

    Args:
        exact (`torch.Tensor`): fp32, finite.
        noise (`torch.Tensor`, *optional*): Integers in [0, 256), for stochastic rounding to 24 bits; without it fp32 is
            rounded to nearest, ties away from zero.
    """
    upper = (exact.view(torch.int32) + (128 if noise is None else noise)) >> 8
    nearest = (upper + 128) >> 8
    return nearest.to(torch.int16).view(torch.bfloat16), (upper - (nearest << 8)).to(torch.int8)


def join(weights: Tensor, correction: Tensor) -> Tensor:
    """What `split` took apart, fp32."""
    return (((weights.view(torch.int16).to(torch.int32) << 8) + correction) << 8).view(torch.float32)


class Rounded(AdamW8bit):
    """`AdamW8bit` with other formats of states and weights. Remainders are kept in the state, as the moments are."""

    def __init__(self, params: Iterable, states: str, rounding: str, **options):
        super().__init__(params, **options)
        self.states, self.rounding = states, rounding

    def _begin(self, parameter: Tensor, state: dict) -> None:
        super()._begin(parameter, state)
        if self.states == "fp32":
            for name in [name for name in state if name.startswith("exp_avg")]:
                del state[name]
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros(parameter.shape, dtype=torch.float32)
        if self.rounding.startswith("24bit"):
            state["correction"] = torch.zeros(parameter.shape, dtype=torch.int8)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict) -> None:
        """Update the weights in fp32, by the inherited code, and round them."""
        state = self.state[parameter]
        if "step" not in state:
            self._begin(parameter, state)
        correction = state.get("correction")
        exact = parameter.detach().float() if correction is None else join(parameter.detach(), correction)
        self.state[exact] = state
        super()._update(exact, gradient, group)
        del self.state[exact]
        if self.rounding == "nearest":
            parameter.copy_(exact)
        elif self.rounding == "stochastic":
            stochastic_round_(parameter, exact)
        else:
            stochastic = self.rounding == "24bit-stochastic"
            noise = torch.randint(256, exact.shape, dtype=torch.int32) if stochastic else None
            nearest, remainder = split(exact, noise)
            parameter.copy_(nearest)
            correction.copy_(remainder)


class MeasuredAdamW(torch.optim.AdamW):
    """torch's AdamW, which looks at every tenth step how far an average weight goes, in units of the rate."""

    def __init__(self, params: Iterable, **options):
        super().__init__(params, fused=True, **options)
        self.steps, self.lengths = 0, []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.steps += 1
        if self.steps % LOOK:
            return super().step(closure)
        weights = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in weights]
        loss = super().step(closure)
        moved = sum(float((p.detach() - old).abs().sum()) for p, old in zip(weights, before))
        self.lengths.append(moved / sum(p.numel() for p in weights) / self.param_groups[0]["lr"])
        return loss


def load(dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16).to(dtype)


def blocks(test: slice = slice(TEST)) -> tuple[list[dict], list[dict]]:
    """
    Blocks of `SEQUENCE` tokens of Python's standard library, to train on and, some of them, held out: every eighth
    module is.
    """
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    parts: tuple[list[dict], list[dict]] = ([], [])
    for place, (_, text) in enumerate(standard_library()):
        ids = tokenizer(text[:20_000])["input_ids"]
        starts = range(0, len(ids) - SEQUENCE + 1, SEQUENCE)
        found = [ids[start : start + SEQUENCE] for start in starts]
        parts[place % 8 == 7].extend({"input_ids": block, "labels": list(block)} for block in found)
    random.Random(0).shuffle(parts[1])
    return parts[0], parts[1][test]


def held_out(model: PreTrainedModel, rows: list[dict]) -> float:
    """The mean loss of a token, computed in fp32."""
    model = model.float().eval()
    losses = []
    with torch.no_grad():
        for start in range(0, len(rows), 8):
            ids = torch.tensor([row["input_ids"] for row in rows[start : start + 8]])
            losses.append(model(input_ids=ids, labels=ids).loss.item())
    return statistics.mean(losses)


def unwrapped(model: PreTrainedModel) -> PreTrainedModel:
    """The model without the autocast that `Trainer` put around its `forward`, which would round in evaluation too."""
    return extract_model_from_parallel(model, keep_fp32_wrapper=False)


def rounded(model: PreTrainedModel, stochastically: bool) -> PreTrainedModel:
    """A copy in bf16."""
    copied = copy.deepcopy(model).bfloat16()
    if stochastically:
        for target, source in zip(copied.parameters(), model.parameters()):
            stochastic_round_(target.data, source.data)
    return copied


def train(arm: str, rate: float, seed: int, steps: int, data: tuple[list[dict], list[dict]]) -> dict:
    states, rounding = ARMS[arm]
    torch.manual_seed(seed)
    model = load(torch.float32 if rounding == "none" else torch.bfloat16)
    own = {
        "8bit": (AdamW8bit, {"lr": rate, "weight_decay": 0.0, "seed": seed}),
        **dict.fromkeys((BASELINE, "fp32-autocast"), (MeasuredAdamW, {"lr": rate, "weight_decay": 0.0})),
    }
    options = {"lr": rate, "weight_decay": 0.0, "states": states, "rounding": rounding}
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, learning_rate=rate, seed=seed, per_device_train_batch_size=1,
            lr_scheduler_type="constant", use_cpu=True, bf16=arm == "fp32-autocast", **QUIET,
        )  # fmt: skip
        trainer = Trainer(model, args, train_dataset=data[0], optimizer_cls_and_kwargs=own.get(arm, (Rounded, options)))
        metrics = trainer.train().metrics
    model = unwrapped(model)
    row = {"train_loss": metrics["train_loss"], "seconds": metrics["train_runtime"]}
    if rounding == "none":
        row["path"] = statistics.mean(getattr(trainer.optimizer, "optimizer", trainer.optimizer).lengths)
    start = load(torch.bfloat16)
    changed = sum(int((a.bfloat16() != b).sum()) for a, b in zip(model.parameters(), start.parameters()))
    row["changed"] = changed / sum(p.numel() for p in start.parameters())
    row["eval_loss"] = held_out(model, data[1])
    if rounding.startswith("24bit"):
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        for parameter in model.parameters():  # fp32 now, with the values of the bf16 weights
            parameter.data = join(parameter.data.bfloat16(), optimizer.state[parameter]["correction"])
        row["eval_loss_with_corrections"] = held_out(model, data[1])
    if rounding == "none":
        row["eval_loss_in_bf16"] = held_out(rounded(model, False), data[1])
        row["eval_loss_in_bf16_stochastic"] = held_out(rounded(model, True), data[1])
    return row


def walked(path: float, seed: int) -> PreTrainedModel:
    """SmolLM2 with the noise that stochastic rounding adds to weights whose updates have this path, and mean zero."""
    model, generator = load(torch.float32), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        weights = parameter.data
        unit = torch.exp2(torch.floor(torch.log2(weights.abs().clamp(min=1e-30))) - 7)  # bf16 has 8 significant bits
        weights += torch.randn(weights.shape, generator=generator) * (unit * path).sqrt()
    return model


def exact(row: dict) -> float:
    """The loss of the weights with all the digits that a run kept."""
    return row.get("eval_loss_with_corrections", row["eval_loss"])


def saved(row: dict) -> float:
    """The loss of the weights in bf16, as they are saved."""
    return row.get("eval_loss_in_bf16", row["eval_loss"])


def summarise(rows: list[dict], start: float) -> list[dict]:
    """
    For each rate, length and arm the losses, and what is lost of the fall that fp32 AdamW reached from the same seed.

    `start` is the loss before training. Shares are lists with a number for each seed.
    """
    baseline = {(row["rate"], row["steps"], row["seed"]): row["eval_loss"] for row in rows if row["arm"] == BASELINE}
    groups: dict[tuple, list[dict]] = {}
    for row in sorted(rows, key=lambda row: (row["steps"], row["rate"], list(ARMS).index(row["arm"]), row["seed"])):
        if (row["rate"], row["steps"], row["seed"]) in baseline:
            groups.setdefault((row["rate"], row["steps"], row["arm"]), []).append(row)
    told = []
    for (rate, steps, arm), own in groups.items():
        reached = [baseline[rate, steps, row["seed"]] for row in own]
        summary = {"rate": rate, "steps": steps, "arm": arm, "changed": statistics.mean(row["changed"] for row in own)}
        for name, loss in (("exact", exact), ("saved", saved)):
            summary[name] = statistics.mean(loss(row) for row in own)
            summary[f"{name}_above"] = [loss(row) - fp32 for row, fp32 in zip(own, reached)]
            summary[f"{name}_lost"] = [(loss(row) - fp32) / (start - fp32) for row, fp32 in zip(own, reached)]
        told.append(summary)
    return told


def main() -> None:
    parser = command_line(__doc__, Path(__file__).resolve().parent)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--walk", action="store_true", help="Only the noise of long paths.")
    parser.add_argument("--report", action="store_true", help="Only the table of what is there.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = Results(args.results, "correction", KEY)
    starts, walks = Results(args.results, "correction_start", ()), Results(args.results, "correction_walk", ("path",))
    data = None if args.report else blocks()
    if data and starts.get() is None:
        starts.add({"eval_loss": held_out(load(torch.float32), data[1]), **provenance(1)})
    if data and args.walk:
        for path in WALKS:
            if walks.get(path=path) is None:
                walks.add({"path": path, "eval_loss": held_out(walked(path, 0), data[1]), **provenance(1)})
    elif data:
        for rate in args.rates:
            for seed in args.seeds:
                for arm in args.arms:
                    key = {"arm": arm, "rate": rate, "seed": seed, "steps": args.steps}
                    if runs.get(**key) is None:
                        row = runs.add({**key, **train(arm, rate, seed, args.steps, data), **provenance(1)})
                        print(
                            f"{rate:g}  seed {seed}  {arm:22s} {row['eval_loss']:.5f}  {row['seconds']:.0f} s",
                            flush=True,
                        )
    start = starts.get()["eval_loss"]
    print(f"before training {start:.5f}")
    for row in summarise(runs.rows(), start):
        lost = (" ".join(f"{value:+.2%}" for value in row[f"{name}_lost"]) for name in ("exact", "saved"))
        print(
            f"{row['rate']:g}  {row['steps']:4d} steps  {row['arm']:22s} {row['exact']:.5f} lost {next(lost)};  "
            f"in bf16 {row['saved']:.5f} lost {next(lost)}  {row['changed']:.1%} changed"
        )
    for row in walks.rows():
        print(f"path {row['path']:g}: {row['eval_loss'] - start:+.5f}")


if __name__ == "__main__":
    main()
