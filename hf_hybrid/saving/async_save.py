"""
Async saves: training continues while a checkpoint is written.

A save has two parts. Its state has to be read at once, because the next step changes it. Writing, hashing, flushing to
the disk, committing and deleting older checkpoints may take longer than many steps, and nothing of it needs the model.
So the state is copied into host memory (*staged*), and a thread does the rest:

    step    | copy | step | step | step | step ...
    thread         | write | hash, flush | commit, rename | rotate |

What is copied. All that is written: weights, buffers, the optimizer's states and the tensors of the run's parts. Frozen
weights too, because they may change all the same: layers are frozen in turn, and a moving average follows the weights.
Only the base of adapters, which is not written, is left out. Memory that was never touched is slow to write to, so the
copies are kept from save to save: the first one of a run costs more. Small files (the scheduler, random generators, the
state of Trainer) are written at once.

What stays true. A checkpoint gets its name when it is whole (manifest.py), so a kill loses the save in flight and
nothing else, as a kill inside of a save always did. One save is in flight at most: the next one, a load of the best
checkpoint and the end of the training wait for it. An error of the thread (a full disk) is raised by the next step, or
logged if there is none.

When training waits instead. The last save of a run has no steps to overlap with. If other code may read the checkpoint
as soon as `Trainer` has saved, it must be complete then: callbacks with their own `on_save`, pushes to the Hub,
subclasses that override how Trainer saves. FSDP, DeepSpeed and streamed layers have savers of their own, which read
weights while they write. Quantised models write more than their tensors, and so do adapters other than LoRA. And the
copies must fit into a quarter of the host memory that is free.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import KeyPath, tree_flatten_with_path, tree_unflatten
from transformers import TrainerCallback

from hf_hybrid.plan.accounting import host_memory
from hf_hybrid.run.trainer_view import TrainerView

logger = logging.getLogger(__name__)

SHARE_OF_FREE = 0.25
"""Of the host memory that is free, what copies may take."""


class CannotStageError(RuntimeError):
    """A state cannot be copied; the message is a clause that says why."""


class Staging:
    """Copies of nested tensors in host memory, which the next copies of the same names reuse."""

    def __init__(self, free: Callable[[], int] = host_memory):
        self.free = free
        self.copies: dict[tuple[str, KeyPath], Tensor] = {}

    def copy(self, name: str, value: Any, unwritten: Iterable[Tensor] = ()) -> Any:
        """
        Return a value (dictionaries, lists and tuples, nested) whose tensors are copies, but for those that are not
        written. Tensors that share their memory share it in the copy too. Copies of the same name are
        overwritten. Raise [`CannotStageError`] if a tensor is not a plain one, or the copies do not fit into the memory
        that is free.
        """
        paths_and_leaves, spec = tree_flatten_with_path(value)
        leaves, left_out = [leaf for _, leaf in paths_and_leaves], {tensor.data_ptr() for tensor in unwritten}
        to_copy, needed = [], 0
        for index, (path, leaf) in enumerate(paths_and_leaves):
            if not isinstance(leaf, Tensor):
                continue
            if type(leaf) not in (Tensor, nn.Parameter) or leaf.layout is not torch.strided or leaf.is_quantized:
                raise CannotStageError(f"a tensor is a `{type(leaf).__name__}` that is not plain")
            if leaf.numel() and leaf.data_ptr() in left_out:
                continue
            to_copy.append((index, (name, path)))
            copy = self.copies.get((name, path))
            if copy is None or (copy.shape, copy.dtype) != (leaf.shape, leaf.dtype):
                self.copies.pop((name, path), None)
                needed += leaf.nbytes
        if needed and needed > SHARE_OF_FREE * (free := self.free()):
            raise CannotStageError(
                f"the copies need {needed / 2**30:,.2f} GiB, more than a quarter of the {free / 2**30:,.2f} GiB of "
                "host memory that are free"
            )
        by_memory: dict[tuple, Tensor] = {}
        for index, key in to_copy:
            tensor = leaves[index].detach()
            memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else key
            if memory not in by_memory:
                if key not in self.copies:
                    self.copies[key] = torch.empty_like(tensor, device="cpu")
                by_memory[memory] = self.copies[key].copy_(tensor)
            leaves[index] = by_memory[memory]
        return tree_unflatten(leaves, spec)


class AsyncSaver:
    """
    Writes the files of a checkpoint: at once, or on a thread beside the steps that follow.

    A save begins with [`begin`]. What is written in it goes through [`write`], with tensors from [`staged`]. [`finish`]
    ends it. [`wait`] returns when nothing is in flight.
    """

    def __init__(self, staging: Staging | None = None) -> None:
        self.training = False
        """Whether a training is under way, so that steps may follow a save."""
        self.is_async = False
        """Whether the save under way is written on the thread."""
        self.thread: threading.Thread | None = None
        """That writes the save in flight."""
        self.error: Exception | None = None
        """Of an async save that failed; [`wait`] raises it."""
        self._staging = staging or Staging()
        self._writes: list[Callable[[], Any]] = []
        self._logged_reasons: set[str] = set()

    def begin(self, reason_not_async: str | None) -> None:
        """Begin a save, which is async unless there is a reason not to. Waits for the one before."""
        self.wait()
        self._writes, self.is_async = [], reason_not_async is None
        if reason_not_async is not None and reason_not_async not in self._logged_reasons:
            self._logged_reasons.add(reason_not_async)
            logger.info("Checkpoints are written before training goes on: %s.", reason_not_async)

    def staged(self, name: str, value: Any, unwritten: Iterable[Tensor] = ()) -> Any:
        """Return a value as it is now, also after training has gone on. In a save that is written at once, itself."""
        if not self.is_async:
            return value
        try:
            return self._staging.copy(name, value, unwritten)
        except CannotStageError as error:
            logger.info("A checkpoint is written before training goes on: %s.", error)
            self.is_async = False
            for write in self._writes:
                write()
            return value

    def write(self, function: Callable[[], Any]) -> None:
        """Call a function that writes files, now or on the thread."""
        if self.is_async:
            self._writes.append(function)
        else:
            function()

    def finish(self, commit: Callable[[], Any], context: Callable[[], AbstractContextManager]) -> None:
        """End the save by `commit`, which makes the checkpoint whole. `context` deletes what fails on the thread."""
        if not self.is_async:
            return commit()
        writes = [*self._writes, commit]
        self.abandon()

        def work() -> None:
            try:
                with context():
                    for write in writes:
                        write()
            except Exception as error:  # raised where the run trains
                self.error = error

        self.thread = threading.Thread(target=work, name="hf_hybrid-save")
        self.thread.start()

    def abandon(self) -> None:
        """Forget the save under way, if an error ended it."""
        self._writes, self.is_async = [], False

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def wait(self) -> None:
        """Wait for the save in flight. Raise its error if it failed, because the disk is full for example."""
        self.join()
        error, self.error = self.error, None
        if error is not None:
            raise error

    def end(self) -> None:
        """End with a training: wait, and give the memory of the copies back. A failed save is logged, not raised."""
        self.training = False
        self.abandon()
        try:
            self.wait()
        except Exception as error:
            logger.error("A checkpoint could not be written: %s", error)
        self._staging.copies.clear()


def reason_not_async(trainer: TrainerView) -> str | None:
    """Return why the save that begins is written before training goes on, or `None` if it may be async."""
    args, state, control = trainer.args, trainer.state, trainer.control
    at_the_end = control.should_training_stop or 0 < state.max_steps <= state.global_step
    for reason, holds in {
        "`async_save=False`": not trainer.hybrid_args.async_save,
        "another process writes them": not args.should_save,
        "no step follows at once": at_the_end or not (trainer.saver.writer.training and control.should_save),
        "they are pushed": args.push_to_hub,
        "FSDP and DeepSpeed write them in their own way": trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled,
        "layers are streamed": trainer.memory.streams,
    }.items():
        if holds:
            return reason
    for name in ("_save_checkpoint", "_save", "save_model", "_save_optimizer_and_scheduler"):
        if not getattr(type(trainer), name).__module__.startswith("hf_hybrid."):
            return f"`{type(trainer).__name__}` has a `{name}` of its own"
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        if kind.on_save is not TrainerCallback.on_save and not kind.__module__.startswith("hf_hybrid."):
            return f"`{kind.__name__}` may read them as soon as they are saved"
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if not hasattr(model, "peft_config"):
        return "a quantised model writes more than its tensors" if getattr(model, "hf_quantizer", None) else None
    kinds = {str(getattr(adapter.peft_type, "value", adapter.peft_type)) for adapter in model.peft_config.values()}
    others = ", ".join(sorted(kinds - {"LORA"}))
    return f"adapters of the kind {others} write more than their tensors" if others else None
