"""
Preemption: a job that gets a signal saves a checkpoint and ends, all of its processes after the same step.

Schedulers send a signal some time before they kill. `enable_jit_checkpoint` of transformers waits three seconds when
SIGTERM arrives and saves then. A job with a shorter grace is killed before. And with several processes this cannot
work: each gets the signal at another moment. A process that saves waits for the others, which continue to compute and
wait for it in the next exchange of gradients. Both wait forever.

So this module takes the place of transformers' callback. One process saves at the end of the step in which the signal
arrives. Several agree. The signal handler only sets a flag. At the end of every step the flags are summed over all
processes. A process that reads a sum above zero asks Trainer to save and to stop. All read it at the end of the same
step. They read the sum that was started at the end of the previous step: it has arrived by then, so no process and no
device waits for it. The answer comes one step late.

    signal        process 0: step 7     process 1: step 8      (skewed)
    end of step   7: flags 1 + 0 on their way    8: read 1 -> both save step 8 and stop

SIGUSR1 has the same effect as SIGTERM, because Slurm's users send it. Only the main thread of Python may handle
signals: a training in another thread says that it saves at none.

Trainer evaluates before it saves, and an evaluation may take longer than a scheduler waits. So an evaluation that is
due at the last step before the end is left out. The checkpoint says so (`evaluation_is_due`), and the resumed run
evaluates before its first step, with the random numbers of that moment, like an uninterrupted run.
"""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

import torch
from transformers.trainer_jit_checkpoint import CheckpointManager, JITCheckpointCallback

from hf_hybrid.run.trainer_view import TrainerView

logger = logging.getLogger(__name__)

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Preemption(JITCheckpointCallback):
    """
    Ends a training with a checkpoint when one of its processes is asked to end.

    It is found where transformers' callback is looked for. Its `jit_manager` handles no signal.
    """

    trainer: TrainerView

    def __init__(self, trainer: TrainerView):
        super().__init__()
        self.trainer, self.jit_manager = trainer, CheckpointManager(trainer)
        self._before: dict[signal.Signals, Any] = {}
        self._reset()

    def _reset(self) -> None:
        self.asked = self._agreed = False
        self.leaves_out_evaluation = False
        """Whether an evaluation at the step under way is left to the run that goes on."""
        self._sum: tuple[torch.Tensor, Any] | None = None
        """Flags of all processes, as they were at the end of the step before, and the work that adds them up."""

    @property
    def ended(self) -> bool:
        """Whether the training ended before its last step because a process was asked."""
        state = self.trainer.state
        return self._agreed and state.global_step < state.max_steps

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def on_train_begin(self, args, state, control, **kwargs):
        self._reset()
        if threading.current_thread() is threading.main_thread():  # the only one that may
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._on_signal)
        else:
            logger.warning(
                "`enable_jit_checkpoint` saves at no signal, because Python handles signals in the main thread alone "
                "and this training runs in another one. Call `train` in the main thread."
            )

    def on_step_end(self, args, state, control, **kwargs):
        if self._all_stop():
            control.should_save = control.should_training_stop = self._agreed = True
            if self.trainer.is_world_process_zero():
                logger.warning("The job was asked to end: step %d is saved, and training ends.", state.global_step)
        if self.ended and control.should_training_stop:
            self.leaves_out_evaluation, control.should_evaluate = control.should_evaluate, False

    def on_epoch_end(self, args, state, control, **kwargs):
        # Trainer comes here in the middle of an epoch too, and would evaluate and save once more.
        if self.ended and control.should_training_stop:
            control.should_evaluate = False
            control.should_save &= self.trainer.saver.saved_step != state.global_step

    def _all_stop(self) -> bool:
        """Whether any process was asked, told by the flags that were sent off a step ago."""
        if self.trainer.accelerator.num_processes == 1:
            return self.asked
        previous, self._sum = self._sum, None
        if previous is not None:
            flags, work = previous
            work.wait()
            if flags.item():
                return True
        flags = torch.tensor([float(self.asked)], device=self.trainer.args.device)
        self._sum = flags, torch.distributed.all_reduce(flags, async_op=True)
        return False

    def on_train_end(self, args, state, control, **kwargs):
        if self._sum is not None:  # all processes come here
            self._sum[1].wait()
        self.give_back()

    def give_back(self) -> None:
        """End what is under way: signals have their handlers from before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:  # nobody has given it back already
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
        self._sum = None  # after an error others may never send theirs: waiting for them would hide it


def agree_on_preemption(trainer: TrainerView) -> Preemption | None:
    """Put the callback of a trainer with `enable_jit_checkpoint=True` in the place of transformers'."""
    if not trainer.args.enable_jit_checkpoint:
        return None
    replaced = trainer.callback_handler.pop_callback(JITCheckpointCallback)
    if replaced is not None:  # it has taken the signal already
        replaced.on_train_end(trainer.args, trainer.state, trainer.control)
    callback = Preemption(trainer)
    trainer.callback_handler.add_callback(callback)
    return callback
