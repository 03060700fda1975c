"""
Make steps of a run again, and say where the run differs from them.

A resumed run computes the same bits. So if steps are made again from a checkpoint and something comes out otherwise,
the run or the repetition is wrong, and which of them it is can be told:

1. The steps agree with the digests in the log (drift.py). Then the run is sound between these steps.
2. They differ. They are made once more. If the two repetitions differ from each other, the machine, or an operation
   that the training uses, is not deterministic.
3. Both repetitions agree with each other and differ from the run. If the batches are the first that differ, the data
   was another one, or was read otherwise. If loss, gradients, weights or states are, the run computed something that
   these steps do not give: memory or a processor was at fault, or the versions or the machine were others.

The first step that differs is named. The log has a print of every step, so that it is exact for what changes the loss:
data, and weights. Weights and states themselves are in the log at each save, as checksums of their files, and with
`digest_steps=1` at every step. Without that, a change shows later than it came if the loss does not show it at once: a
state of the optimizer shows in the loss that its update leads to, and a low bit of a weight may take more steps. So the
step since which it may have been there is said too. The steps made again are saved where the run was saved, in a folder
beside that of the run, which is deleted in the end.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from hf_hybrid.records.log import read_log
from hf_hybrid.records.readings import numbered
from hf_hybrid.run.typing import TrainerLike
from hf_hybrid.saving.courses import Course, first_difference
from hf_hybrid.saving.drift import Digests
from hf_hybrid.saving.run_identity import environment, saved_environment

logger = logging.getLogger(__name__)

CHECKPOINT = r"checkpoint-(\d+)"


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
        since (`int`, *optional*): The first step in which the change may have come: behind this one's beginning weights
            and states are not known to be right.
        what (`str`, *optional*): What differs in it first: `batches`, `losses`, `gradients`, `weights` or `optimizer`.
        processes (`list[int]`): The processes of the run that differ from the steps made again, if not all do.
        text (`str`): The same in words.
    """

    verdict: str
    text: str
    step: int | None = None
    what: str | None = None
    processes: list[int] = field(default_factory=list)
    since: int | None = None

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
    from hf_hybrid.saving.replay import replay


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
    return judge(run, courses, others, checkpoints[-1][0] if checkpoints else 0)


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


def judge(run: Course, courses: list[Course], changes: list[str], begun: int = 0) -> Replay:
    """
    Compare a run with its repetitions.

    Args:
        run (`Course`): Of the log.
        courses (`list[Course]`): Of one repetition, or of two.
        changes (`list[str]`): What is other on this machine than when the run was made.
        begun (`int`): The step of the checkpoint that the repetitions began at.
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
    since = found.step
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
        since = max((step for step in {*run.states, *run.files} if step < found.step), default=begun) + 1
        if since < found.step:
            text += (
                f" Weights and states were right after step {since - 1}. They may have changed in any step since, if "
                "losses did not show it at once; `digest_steps=1` tells which."
            )
        text += " Memory or a processor was at fault."
    if changes:
        text += f" But the machine is another one, which may explain it: {'; '.join(changes)}."
    return Replay(verdict, text, found.step, found.what, found.processes, since)


def _named(what: str) -> str:
    return "states of the optimizer" if what == "optimizer" else what
