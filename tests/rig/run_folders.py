"""Output folders as runs leave them, written by hand: known numbers, and as broken as a test wants them."""

import json
from pathlib import Path

from hf_hybrid.saving import manifest

GIB = 1 << 30
NASTY = '<script>alert("1")</script> & $x_1$'


def leap(step: int, verdict: str = "kept", **values) -> dict:
    """A record with every field that `LeapRecord` has."""
    defaults = {
        "step": step,
        "horizon": 0 if verdict == "rejected" else 2,
        "gain": 3.0,
        "worth": 1.5,
        "verdict": verdict,
        "relative_norm": 0.01,
        "loss_before": 3.0,
        "loss_after": 2.98,
        "standard_error": 0.005,
        "e": 2.0,
        "predicted_decrease": 0.03,
        "forecast_error": 0.01,
        "probe_cost_steps": 1.0,
    }
    return {**defaults, **values}


def record(leaps: list[dict], steps: dict[str, int]) -> dict:
    """What `RunRecord` saves."""
    return {
        "steps_by_phase": steps,
        "seconds_by_phase": {phase: 0.5 * count for phase, count in steps.items()},
        "backward_passes": sum(steps.values()) - steps["predict"],
        "forward_only_passes": 7,
        "backward_passes_avoided": steps["predict"],
        "skipped_batches": 0,
        "roll_backs": 0,
        "probe_cost_steps": 3.0,
        "leap_cost_steps": 1.0,
        "leaps": leaps,
        "divergence_events": [],
        "learning_rate_scales": [],
    }


def phases(leaps: list[dict], last: int, warmup: int = 10) -> dict[int, str]:
    """Warmup, then Full, with Predict and two steps of Correct behind each leap that stayed."""
    names = {step: "warmup" if step <= warmup else "full" for step in range(1, last + 1)}
    for made in leaps:
        end = made["step"] + made["horizon"]
        names.update({step: "predict" for step in range(made["step"] + 1, end + 1) if step in names})
        if made["verdict"] != "rejected":
            names.update({step: "correct" for step in range(end + 1, end + 3) if step in names})
    return names


def write(path: Path, values) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def change(path: Path, **values) -> None:
    """Give a dictionary in a file other values."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def hybrid_run(folder: Path, *, steps: int = 100, finished: bool = True, leaps: list[dict] | None = None) -> list[dict]:
    """A hybrid run of 100 planned steps, checkpoints every 40; returns its leaps."""
    leaps = [leap(20), leap(30, "rejected", loss_after=3.2), leap(50)] if leaps is None else leaps
    history = [
        {
            "step": step,
            "loss": 5.0 - 0.02 * step,
            "learning_rate": 1e-3 * (1 - step / 101),
            "hybrid/leaps": sum(made["step"] < step for made in leaps),
            "hybrid/confidence": 0.8,
            "hybrid/predicted_steps": sum(phase == "predict" for phase in phases(leaps, step).values()),
            "hybrid/backward_passes": sum(phase != "predict" for phase in phases(leaps, step).values()),
        }
        for step in range(5, steps + 1, 5)
    ]
    history += [{"step": step, "eval_loss": 5.1 - 0.02 * step} for step in range(50, steps + 1, 50)]
    write(folder / "hybrid_config.json", {"output_dir": str(folder), "learning_rate": 1e-3, "preset": NASTY})
    for checkpoint in (*range(40, steps + 1, 40), *([steps] if finished else [])):
        so_far = phases(leaps, checkpoint)
        counts = {p: sum(phase == p for phase in so_far.values()) for p in ("warmup", "full", "predict", "correct")}
        saved = record([made for made in leaps if made["step"] < checkpoint], counts)
        at = folder / f"checkpoint-{checkpoint}"
        seen = [entry for entry in history if entry["step"] <= checkpoint]
        write(at / "trainer_state.json", {"global_step": checkpoint, "max_steps": 100, "log_history": seen})
        options, parts = {"direction": "gradient_memory"}, {"run": {"record": saved}}
        write(at / "hybrid_state.json", {"schema_version": 5, "options": options, "parts": parts})
    if finished:
        memory = {"held": {"weights": {"device": 0, "host": 4096}, "total": {"device": 0, "host": 4096}}}
        summary = {**saved, "direction": "gradient_memory", "planner": {}, "memory": memory}
        write(folder / "hybrid_summary.json", summary)
    return leaps


def log(folder: Path, leaps: list[dict]) -> None:
    """The log of a [`hybrid_run`] that ended, and was resumed once at step 40."""
    history = json.loads((folder / "checkpoint-100" / "trainer_state.json").read_text())["log_history"]
    lines = [*history, *({"step": made["step"] + 4, "leap": made} for made in leaps)]
    lines.append({"step": 33, "event": {"step": 32, "level": "caution", "reason": NASTY, "action": "shorten"}})
    lines.sort(key=lambda line: line["step"])
    resumed = next(index for index, line in enumerate(lines) if line["step"] > 40)
    begun = {"begun": True, "hardware": {"Accelerator": NASTY}}
    lines = [{"step": 0, **begun}, *lines[: resumed + 3], {"step": 40, **begun}, *lines[resumed:]]
    (folder / "hybrid_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def plain_run(folder: Path, steps: int = 100) -> None:
    """What plain `Trainer` leaves."""
    history = [{"step": step, "loss": 5.0 - 0.01 * step, "learning_rate": 1e-3} for step in range(10, steps + 1, 10)]
    state = {"global_step": steps, "max_steps": 100, "log_history": history}
    write(folder / f"checkpoint-{steps}" / "trainer_state.json", state)


def step_record(step: int, phase: str, *, device: bool = True, seconds: float | None = None, **values) -> dict:
    """A line of `steps.jsonl`: 8 GiB allocated, 12 GiB at the peak, of 24."""
    held = {"weights": {"device": 2 * GIB, "host": 0}, "states": {"device": 4 * GIB, "host": GIB}}
    line = {
        "step": step,
        "phase": phase,
        "seconds": float(step) if seconds is None else seconds,
        "step_seconds": 1.0,
        "device": {"allocated": 8 * GIB, "reserved": 13 * GIB, "peak_allocated": 12 * GIB, "peak_reserved": 13 * GIB},
        "nvml": {"used": 14 * GIB, "total": 24 * GIB},
        "host": {"rss": 3 * GIB, "peak_rss": 4 * GIB, "pinned": 0},
        "measured": 12 * GIB,
        "held": held if step % 10 == 0 else None,
        "unexplained": 6 * GIB if step % 10 == 0 else None,
    }
    if not device:
        line |= {"device": None, "nvml": None}
    return {**line, **values}


def profile(folder: Path, records: list[dict], **run) -> None:
    """A profile with these lines behind that of its beginning."""
    lines = [{"step": 0, "begun": True, "max_steps": 100, **run}, *records]
    (folder / "profile").mkdir(parents=True, exist_ok=True)
    (folder / "profile" / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def reseal(checkpoint):
    """Write a manifest that fits to the files of a checkpoint."""
    path = checkpoint / manifest.MANIFEST_NAME
    values = json.loads(path.read_text())
    del values["xxh3_128"]
    values["files"] = manifest.sizes_and_checksums(checkpoint, [checkpoint / name for name in values["files"]])
    path.write_text(json.dumps({**values, "xxh3_128": manifest.digest_of(values)}))
