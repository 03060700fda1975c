"""Tables from benchmarks/memory, equality and planning."""

from __future__ import annotations

import collections
import statistics

from benchmarks.memory.low_bit import summarise
from benchmarks.memory.peaks import KEY as PEAK_KEY
from benchmarks.memory.peaks import MODES
from benchmarks.memory.recomputation import STREAMED
from benchmarks.memory.rounding import KEY as ROUNDING_KEY
from benchmarks.memory.rounding import summarise as summarise_roundings
from benchmarks.planning.accuracy import MODELS as PLANNED
from benchmarks.planning.accuracy import REFERENCES, WAYS
from benchmarks.tables import all_lines, between, markdown, mib, percent, rate, results, table
from benchmarks.tables.skips import recomputed

GIB = 2**30
CHECKS = ("sft", "dpo", "rollouts")
WALKS = ("micro_batch", "layer", "in_backward")


def streamed(walk: str) -> list[dict]:
    return results("equality", "streamed", "model_type", "walk").rows(walk=walk)


def outcomes() -> collections.Counter:
    return collections.Counter(row["outcome"] for row in streamed("micro_batch"))


@table("families")
def families() -> str:
    """Model families with the same outcomes stand in one row."""
    found, walked = all_lines("equality", "families"), results("equality", "streamed", "model_type", "walk")
    cells: dict[str, dict[str, str]] = {}
    for row in found:
        told = row["detail"] if row["outcome"] == "falls back" else ""
        of_family = cells.setdefault(row["family"], {})
        of_family[row["check"]] = f"{row['outcome']}: {told}" if told else row["outcome"]
        of_family["streamed"] = walked.get(model_type=row["model_type"], walk="micro_batch")["outcome"]
    groups: dict[tuple[str, ...], list[str]] = {}
    for family, of_family in cells.items():
        groups.setdefault(tuple(of_family[name] for name in (*CHECKS, "streamed")), []).append(family)
    rows = [[", ".join(names), *outcomes_of_group] for outcomes_of_group, names in groups.items()]
    return markdown(["families", "SFT", "DPO", "rollouts of GRPO", "streamed"], rows)


@table("memory-equality")
def memory_equality() -> str:
    told: dict[str, dict[str, str]] = {}
    for walk in WALKS:
        for outcome, count in collections.Counter(row["outcome"] for row in streamed(walk)).items():
            told.setdefault(outcome, {})[walk] = str(count)
    names = {}
    for outcome in told:
        types = dict.fromkeys(row["model_type"] for row in streamed("layer") if row["outcome"] == outcome)
        types |= dict.fromkeys(row["model_type"] for row in streamed("in_backward") if row["outcome"] == outcome)
        names[outcome] = ", ".join(f"`{name}`" for name in types)
    words = {
        "equal": "equal to plain `Trainer` to the last bit",
        "equal, falls back": "equal, but walked micro-batch by micro-batch",
        "asks for the other walk": "end in an error in the first step, which asks for `accumulation_walk=micro_batch`",
        "differs": "differ",
        "no layer list": "refused (its reversible layers have other calls)",
        "plain fails": "not trained by plain `Trainer` here",
    }
    rows = [
        [words[outcome] + (f": {names[outcome]}" if outcome != "equal" else ""), *(count.get(w, "") for w in WALKS)]
        for outcome in words
        if (count := told.get(outcome))
    ]
    return markdown(["types", "micro-batch walk", "layer walk", "updated in the backward pass"], rows)


@table("experts-copied")
def experts_copied() -> str:
    reached, copied = (results("skips", f"experts_{what}", "arm", "steps", "window") for what in ("reached", "copied"))
    losses = {"none": "none", "together": "of all layers together, 0.01 (transformers)"}
    losses |= {f"by layer, {factor}": f"of each layer, {factor}" for factor in (0.001, 0.01)}
    windows, rows = (512, 2048, 4096), []
    for arm, words in losses.items():
        found = [{"arm": arm, "steps": 400, "window": window} for window in windows]
        shares = [(statistics.mean(reached.get(**key)["reached"]), copied.get(**key)["copied"]) for key in found]
        rows.append([words, *(f"{share:.0%}, {of_bytes:.0%}" for share, of_bytes in shares)])
    return markdown(["router's loss", *(f"{window:,} tokens" for window in windows)], rows)


@table("memory-architectures")
def memory_architectures() -> str:
    rows = results("equality", "architectures", "model_type").rows()
    plain = sum(row["plain"] == "ok" for row in rows)
    ours = sum(row["hybrid"] == "ok" for row in rows)
    told = [["registered", len(rows)], ["trained by plain `Trainer`", plain], ["trained by `HybridTrainer`", ours]]
    return markdown(["model types", ""], told)


CPU_MODES = {
    "resident": "plain `Trainer`, no checkpointing", "resident-checkpointed": "**plain `Trainer`**, checkpointed",
    "stream": "**streamed**, layer by layer", "stream-micro_batch": "streamed, micro-batch by micro-batch",
    "stream-parked": "streamed, activations on the host", "stream-kept": "streamed, half of the layers kept",
    "stream-ends": "streamed, embeddings and head too", "stream-in_backward": "streamed, updated in the backward pass",
    "fsdp2": "FSDP2 with CPU offload, one process", "resident-8bit": "8-bit states, resident",
    "stream-8bit": "8-bit states, streamed", "stream-8bit-in_backward": "8-bit states, streamed, in the backward pass",
    "lora-resident": "LoRA, resident", "lora-stream": "LoRA, streamed base",
    "lora-stream-int8": "LoRA, streamed int8 base",
}  # fmt: skip


def peak(model: str, mode: str, tokens: int) -> dict | None:
    found = results("memory", "peaks", *PEAK_KEY).rows(model=model, mode=mode, tokens=tokens)
    return found[-1] if found and found[-1]["outcome"] == "measured" else None


def times_resident(row: dict) -> float:
    return row["seconds"] / peak(row["model"], MODES[row["mode"]].against, row["tokens"])["seconds"]


@table("memory-peaks")
def memory_peaks() -> str:
    rows = []
    for mode, name in CPU_MODES.items():
        row = peak("60m", mode, 512)
        held = mib(row["device_held"]) if row.get("device_held") is not None else "not counted"
        host = mib(row["host_held"]) if row.get("host_held") and row.get("device_held") is not None else ""
        rows.append([name, held, host, f"{row['seconds']:.2f}", f"{times_resident(row):.2f}", f"{row['floor']:.2f}"])
    heading = ["mode", "held on the device", "held on the host by streaming", "s per step", "ratio", "floor"]
    return markdown(heading, rows)


@table("memory-graphs")
def memory_graphs() -> str:
    rows = []
    for arm, graphs in STREAMED.items():
        both = [recomputed(trains, arm, "streamed 0") for trains in ("adapters", "all weights")]
        rows.append([str(graphs), *(f"{value:.2f}" for pair in both for value in pair)])
    heading = ["not recomputed, of 30 layers", "LoRA: seconds", "recomputing all takes", "all weights: seconds"]
    return markdown([*heading, "recomputing all takes"], rows)


H100 = {
    ("8b", "stream"): "8b, streamed, bf16 states", ("8b", "stream-8bit"): "8b, streamed, 8-bit states",
}  # fmt: skip


@table("memory-h100")
def memory_h100() -> str:
    rows = []
    for (model, mode), name in H100.items():
        for tokens in (2048, 16384):
            row = peak(model, mode, tokens)
            if row is None:
                continue
            share = times_resident(row)
            device = ", ".join(f"{row[f'device_{kind}'] / GIB:.1f}" for kind in ("allocated", "reserved", "used"))
            rows.append([
                name if tokens == 2048 else "", f"{tokens:,}", f"{row['seconds']:.3f}",
                f"{share:.{1 if share >= 10 else 2}f}", device, f"{row['device_plan'] / GIB:.1f}",
                f"{row['host_peak'] / GIB:.1f}",
            ])  # fmt: skip
    heading = ["model, mode", "tokens per step", "s/step", "times resident"]
    return markdown([*heading, "device: allocated, reserved, used", "plan", "host"], rows)


def low_bit() -> dict[str, dict]:
    return summarise(results("memory", "low_bit", "arm", "seed", "steps", "rate").rows())


@table("memory-low-bit")
def memory_low_bit() -> str:
    rows = []
    for arm, name in (
        ("adamw", "fp32, fp32"),
        ("bf16-8bit-stochastic", '**bf16 rounded stochastically, 8-bit** (`optimizer_states="8bit"`, bf16 model)'),
        ("fp32-8bit", 'fp32, 8-bit (`optimizer_states="8bit"`, fp32 model)'),
        ("bf16-8bit-nearest", "bf16 rounded to nearest, 8-bit (control)"),
    ):
        found = low_bit()[arm]
        by_seed = found["excess_by_seed"]
        error = statistics.stdev(by_seed) / len(by_seed) ** 0.5
        over = f"{percent(found['excess'], 2)} +- {100 * error:.2f}" if arm != "adamw" else ""
        rows.append([name, f"{found['eval_loss']:.3f}", over, f"{found['bytes_per_weight']:.2f}"])
    return markdown(["weights, states", "loss", "above fp32 AdamW", "bytes per weight"], rows)


ROUNDED = {"nearest": "nearest", "stochastic": "**stochastically**"}
TRAINED = {"weights": "all weights", "adapters": "adapters, merged in fp32"}


@table("memory-rounding")
def memory_rounding() -> str:
    rows = []
    for found in summarise_roundings(results("memory", "rounding", *ROUNDING_KEY).rows()):
        if found["rounding"] in ROUNDED:
            kept = between([100 * share for share in found["kept"]], 1)
            name = f"{TRAINED[found['trained']]}, {rate(found['rate'])}"
            rows.append([name, ROUNDED[found["rounding"]], f"{found['loss']:.4f}", f"{kept} %"])
    return markdown(["trained, rate", "rounded", "loss", "kept"], rows)


LOSSES = [  # labelled slots, vocabulary, precision, head
    (1024, 49_152, "float32", "trained"), (1024, 49_152, "bfloat16", "trained"), (1024, 49_152, "bfloat16", "frozen"),
    (1024, 128_256, "bfloat16", "trained"), (16_384, 4_096, "bfloat16", "trained"),
]  # fmt: skip


@table("memory-losses")
def memory_losses() -> str:
    stored = results("skips", "losses", "vocabulary", "dtype", "labelled", "head", "softcap", "arm")
    rows = []
    for tokens, words, dtype, head in LOSSES:
        where = {"labelled": tokens, "vocabulary": words, "dtype": dtype, "head": head, "softcap": None}
        plain = stored.get(**where, arm="all_logits")
        cells = [f"{tokens:,} of {words:,}, {'fp32' if dtype == 'float32' else 'bf16'}, {head}"]
        for arm in ("ours", "torch_512", "trl"):
            row = stored.get(**where, arm=arm)
            parts = [] if row is None else [row[name] / plain[name] for name in ("seconds", "peak_bytes")]
            cells.append(", ".join(f"{part:.2f}" for part in parts))
        rows.append(cells)
    return markdown(["tokens of words, precision, head", "ours", "torch, 512 at a time", "TRL"], rows)


STOPPED = {
    "trainer": "plain `Trainer`", "off, at once": '`enable_predict=False`, `async_save=False`',
    "off, behind": "`enable_predict=False`", "leaps, at once": 'leaps, `async_save=False`', "leaps, behind": "leaps",
}  # fmt: skip


def stopped(size: str, arm: str) -> tuple[float, float]:
    """Median seconds for which a save stops training, and that over plain `Trainer`'s."""
    stored = results("memory", "stopped", "size", "arm", "round")
    seconds = {
        name: statistics.median(s for row in stored.rows(size=size, arm=name) for s in row["seconds"])
        for name in (arm, "trainer")
    }
    return seconds[arm], seconds[arm] / seconds["trainer"]


@table("resume-saves")
def resume_saves() -> str:
    stored, rows = results("memory", "stopped", "size", "arm", "round"), []
    for size in ("27M", "135M"):
        for arm in dict.fromkeys(row["arm"] for row in stored.rows(size=size)):
            save, over = stopped(size, arm)
            rows.append([size, STOPPED[arm], f"{save:.2f}", f"{over:.2f}"])
    return markdown(["weights", "", "a save", "over plain `Trainer`'s"], rows)


def accuracy(gpu: bool) -> list[dict]:
    return results("planning", "accuracy", "reference", "model", "layers", "way").rows(reference=REFERENCES[gpu])


@table("planning-accuracy")
def planning_accuracy() -> str:
    """For each architecture and way the error that is farthest from zero, over the sizes: tracker, H100."""
    known = {(name, config.num_hidden_layers) for name, configs in PLANNED.items() for config in configs}
    found = [[row for row in accuracy(gpu) if (row["model"], row["layers"]) in known] for gpu in (False, True)]
    rows = []
    for name in PLANNED:
        cells = []
        for way in WAYS:
            errors = [[r["error"] for r in some if (r["model"], r["way"]) == (name, way)] for some in found]
            cells.append(", ".join(percent(max(some, key=abs), 2) for some in errors))
        rows.append([name, *cells])
    told = (f"{len(some)} rows, largest error {100 * max(abs(r['error']) for r in some):.2f} %" for some in found)
    return f"{markdown(['model', *WAYS], rows)}\n\n{'; '.join(told)}"
