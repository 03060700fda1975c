"""
Make steps of a run again, and say where the run differs from them.

A resumed run computes the same bits. So if steps are made again from a checkpoint and something comes out otherwise,
the run or the repetition is wrong, and which of them it is can be told:

1. The steps agree with the digests in the log (digests.py). Then the run is sound between these steps.
2. They differ. They are made once more. If the two repetitions differ from each other, the machine, or an operation
   that the training uses, is not deterministic.
3. Both repetitions agree with each other and differ from the run. If the batches are the first that differ, the data
   was another one, or was read otherwise. If loss, gradients, weights or states are, the run computed something that
   these steps do not give: memory or a processor was at fault, or the versions or the machine were others.

The first step that differs is named. The log has a print of every step, so that it is exact for what changes the loss:
data, and weights. Weights and states themselves are in the log at each save, as checksums of their files, and with
`digest_steps=1` at every step. Without that, a state of the optimizer that changed shows one step later, in the loss
that its update leads to. The steps made again are saved where the run was saved, in a folder beside that of the run,
which is deleted in the end.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from hf_hybrid.prints.digests import WIDTH, Digests
from hf_hybrid.prints.fingerprint import environment, saved_environment
from hf_hybrid.records.log import read_log
from hf_hybrid.records.readings import numbered
from hf_hybrid.run.typing import TrainerLike

logger = logging.getLogger(__name__)

CHECKPOINT = r"checkpoint-(\d+)"


@dataclass
class Course:
    """
    What a log knows of some steps.

    Attributes:
        batches (`dict[int, list[str]]`): By step, a print of its batches for each process.
        losses (`dict[int, list[str]]`): By step, a print of the losses of its micro-batches for each process.
        numbers (`dict[int, str]`): By step, a print of its loss and gradient norm over all processes.
        states (`dict[int, dict]`): By step, hashes of weights and states after it: one, or one for each process.
        files (`dict[int, dict]`): By step, checksums of the files of its checkpoint that hold weights or states.
    """

    batches: dict[int, list[str]] = field(default_factory=dict)
    losses: dict[int, list[str]] = field(default_factory=dict)
    numbers: dict[int, str] = field(default_factory=dict)
    states: dict[int, dict[str, str | list[str]]] = field(default_factory=dict)
    files: dict[int, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, lines: Iterable[dict], start: int, end: int) -> Course:
        """Read the digests of the steps behind `start`, up to `end`."""
        found = cls()
        for line in lines:
            if start < line["step"] <= end and isinstance(line.get("sealed"), dict):
                found.files[line["step"]] = line["sealed"]
            digests = line.get("digests")
            if not isinstance(digests, dict):
                continue
            if start < line["step"] <= end and "weights" in digests:
                found.states[line["step"]] = {kind: digests[kind] for kind in ("weights", "optimizer")}
            for place in range(len(digests.get("steps", "")) // WIDTH):
                step, part = digests["from"] + place, slice(place * WIDTH, (place + 1) * WIDTH)
                if start < step <= end:
                    found.numbers[step] = digests["steps"][part]
                    found.batches[step] = [of_process[part] for of_process in digests["batches"]]
                    found.losses[step] = [of_process[part] for of_process in digests["losses"]]
        return found


@dataclass
class Difference:
    """The first difference of two courses: the step, what differs in it, and the processes in which it does."""

    step: int
    what: str
    processes: list[int]


def first_difference(one: Course, other: Course) -> Difference | None:
    """Return the first step in which two courses differ, as far as both know it."""
    for step in sorted({*one.numbers, *one.states, *one.files}):
        if step in one.numbers and step in other.numbers:
            for what in ("batches", "losses"):
                first, second = getattr(one, what)[step], getattr(other, what)[step]
                if first != second:
                    return Difference(step, what, _which(first, second))
            if one.numbers[step] != other.numbers[step]:
                return Difference(step, "gradients", [])
        for kind in ("weights", "optimizer") if step in one.states and step in other.states else ():
            if one.states[step][kind] != other.states[step][kind]:
                return Difference(step, kind, _which(one.states[step][kind], other.states[step][kind]))
        first, second = one.files.get(step, {}), other.files.get(step, {})
        if differ := [name for name in sorted(first) if name in second and first[name] != second[name]]:
            return Difference(step, "optimizer" if all("optimizer" in name for name in differ) else "weights", [])
    return None


def _which(one: str | list[str], other: str | list[str]) -> list[int]:
    """Return the processes that differ; none if that is all there are, or if there is one."""
    count = max(len(value) if isinstance(value, list) else 1 for value in (one, other))
    pairs = list(zip(*(value if isinstance(value, list) else [value] * count for value in (one, other))))
    found = [process for process, (first, second) in enumerate(pairs) if first != second]
    return found if len(found) < count else []


# Making steps again.


class _StopsAt(TrainerCallback):
    """Ends a training after a step. What it saves and evaluates on the way is as in the run."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step >= self.step


def make_again(trainer: TrainerLike, checkpoint: str | None, start: int, end: int) -> Course:
    """
    Make steps again.

    Args:
        trainer: Of the run, with a folder of its own as `output_dir`, and untrained.
        checkpoint (`str`, *optional*): Where the steps begin. `None`: at the beginning of the run.
        start (`int`), end (`int`): The steps behind the first and up to the second are returned.
    """
    digests = next((part for part in trainer.parts if isinstance(part, Digests)), None)
    if digests is None:
        trainer.parts.append(digests := Digests(trainer))
    digests.every = 1
    trainer.args.load_best_model_at_end, trainer.args.save_total_limit = False, 1
    trainer.add_callback(_StopsAt(end))
    trainer.train(resume_from_checkpoint=checkpoint)
    return Course.of(read_log(trainer.run_folder), start, end)


@dataclass
class Replay:
    """
    What a replay found.

    Attributes:
        verdict (`str`): `same`, `corrupted`, `other data`, `nondeterministic`, or `unknown` if the log has no digests
            of these steps.
        step (`int`, *optional*): The first step that differs.
        what (`str`, *optional*): What differs in it first: `batches`, `losses`, `gradients`, `weights` or `optimizer`.
        processes (`list[int]`): The processes of the run that differ from the steps made again, if not all do.
        text (`str`): The same in words.
    """

    verdict: str
    text: str
    step: int | None = None
    what: str | None = None
    processes: list[int] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def replay(
    make_trainer: Callable[[str], TrainerLike], folder: str | Path, start: int, end: int, *, times: int = 2
) -> Replay:
    """
    Make the steps of a run between two others again, and say whether and where the run differs from them.

    Args:
        make_trainer (`Callable[[str], HybridTrainer]`):
            Makes the trainer as the script of the run did, with the model, data, options and number of processes of the
            run, and with its argument as `output_dir`. It is called for each repetition.
        folder (`str` or `Path`): `output_dir` of the run, with its log and the checkpoint to begin at.
        start (`int`): The steps behind this one are compared. They are made again from the newest checkpoint up to it.
        end (`int`): The last step.
        times (`int`): How often the steps are made again at most: the second time only if the first one differs.

    Returns:
        [`Replay`]: On every process.

    Raises:
        ValueError: If the steps are none, or there is no checkpoint to begin at.

    Example:

    ```python
    from hf_hybrid.prints.replay import replay


    def make_trainer(output_dir):
        return HybridTrainer(load_model(), HybridConfig(output_dir, max_steps=500), train_dataset=load_data())


    print(replay(make_trainer, "out", start=200, end=300).text)
    ```
    """
    folder = Path(folder)
    if not 0 <= start < end:
        raise ValueError(f"`start={start}` must be 0 or more, and below `end={end}`: the steps behind it are compared.")
    checkpoints = [(step, path) for step, path in numbered(folder, CHECKPOINT) if step <= start]
    if not checkpoints and start:
        raise ValueError(
            f"`{folder}` has no checkpoint up to step {start}. Give `start` the step of one that is there, or 0 for "
            "the beginning of the run."
        )
    checkpoint = str(checkpoints[-1][1]) if checkpoints else None
    run, courses, others = Course.of(read_log(folder), start, end), [], []
    if not run.numbers and not run.states and not run.files:
        return Replay("unknown", f"The log in `{folder}` has no digests of the steps {start + 1} to {end}.")
    for number in range(times):
        with tempfile.TemporaryDirectory(dir=folder.absolute().parent, prefix="_replay.") as output:
            trainer = make_trainer(output)
            logger.info("Making the steps behind %d again, up to %d, for the %d. time.", start, end, number + 1)
            courses.append(_of_first_process(trainer, make_again(trainer, checkpoint, start, end)))
            trainer.accelerator.wait_for_everyone()
        others = environment_changes(checkpoint, trainer)
        if first_difference(run, courses[0]) is None:
            break
    return judge(run, courses, others)


def _of_first_process(trainer: TrainerLike, course: Course) -> Course:
    """Return the course that the first process read: it alone writes the log."""
    from accelerate.utils import broadcast_object_list

    found = [course]
    if trainer.accelerator.num_processes > 1:
        broadcast_object_list(found)
    return found[0]


def environment_changes(checkpoint: str | None, trainer: TrainerLike) -> list[str]:
    """Return what is other than when a checkpoint was saved and changes bits: versions, devices, threads."""
    then, now = saved_environment(checkpoint), environment(trainer)
    return [
        f"`{name}` was `{then[name]}` and is `{value}`" for name, value in now.items() if then.get(name, value) != value
    ]


def judge(run: Course, courses: list[Course], changes: list[str]) -> Replay:
    """
    Compare a run with its repetitions.

    Args:
        run (`Course`): Of the log.
        courses (`list[Course]`): Of one repetition, or of two.
        changes (`list[str]`): What is other on this machine than when the run was made.
    """
    found = first_difference(run, courses[0])
    if found is None:
        states = {*run.states, *run.files} & {*courses[0].states, *courses[0].files}
        known = f"weights and states after {len(states)} of them" if states else "no weights"
        text = f"The run made these {len(run.numbers)} steps right: batches, losses and gradients of all, {known}."
        return Replay("same", text)
    again = first_difference(courses[0], courses[1]) if len(courses) > 1 else None
    if again is not None and again.step <= found.step:
        return Replay(
            "nondeterministic",
            f"Made twice, the steps differ from each other from step {again.step} on, in {_named(again.what)}. An "
            "operation of this training is not deterministic, or this machine is at fault. Try "
            "`full_determinism=True`.",
            again.step,
            again.what,
            again.processes,
        )
    of = f" of process {', '.join(map(str, found.processes))}" if found.processes else ""
    seen = f" (first seen on process {', '.join(map(str, found.processes))})" if found.processes else ""
    twice = "twice the same " if len(courses) > 1 else ""
    if found.what == "batches":
        verdict = "other data"
        text = (
            f"Step {found.step} is the first that differs: the run trained on other batches{of} than the data gives "
            "now. The data was changed, was read otherwise, or changed in memory."
        )
    else:
        verdict = "corrupted"
        text = (
            f"Step {found.step} is the first that differs: {_named(found.what)} of the run{seen} are not what the step "
            f"gives, made again {twice}from the same batches."
        )
        if found.what in ("losses", "gradients") and found.step - 1 not in {*run.states, *run.files}:
            text += f" What it began with may have changed in step {found.step - 1} already, after its loss."
        text += " Memory or a processor was at fault."
    if changes:
        text += f" But the machine is another one, which may explain it: {'; '.join(changes)}."
    return Replay(verdict, text, found.step, found.what, found.processes)


def _named(what: str) -> str:
    return "states of the optimizer" if what == "optimizer" else what
