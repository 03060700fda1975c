"""
Which epoch of the data is under way, and where in it a resumed run goes on.

`Trainer` finds the place of a resumed run by counting steps, and skips as many batches. With leaps, steps and batches
are no longer the same number, so the run reads its batches itself (`BatchFeed` in run.py) and knows its own place.
"""

from __future__ import annotations

from transformers.trainer_utils import has_length

from hf_hybrid.run.trainer_view import TrainerView


class Epochs:
    """The epochs of a training."""

    def __init__(self, trainer: TrainerView):
        self._trainer = trainer
        self.next = 0  # the one that begins next
        self.is_at_start = False  # one has begun, and none of its batches was read
        self._began_at: list[int] = []

    def find_place(self) -> None:
        """Find the epoch in which the run begins, once its loader is there."""
        self.next = self.place()[0]

    def place(self) -> tuple[int, int]:
        """Return the epoch that Trainer enters next, and how many of its batches a resume skips."""
        trainer = self._trainer
        loader, accumulation = trainer.callback_handler.train_dataloader, trainer.args.gradient_accumulation_steps
        if not has_length(loader):
            return int(trainer.state.epoch or 0), 0
        epoch, steps = divmod(trainer.state.global_step, max(-(-len(loader) // accumulation), 1))
        return epoch, 0 if trainer.args.ignore_data_skip else steps * accumulation

    def begin(self) -> None:
        """Begin an epoch; `ValueError` if the data gives too few batches for a step."""
        trainer, args, feed = self._trainer, self._trainer.args, self._trainer.run.feed
        loader = trainer.callback_handler.train_dataloader
        self._began_at = [*self._began_at, trainer.state.global_step][-3:]
        if len(self._began_at) == 3 and len(set(self._began_at)) == 1:  # a resumed pass may be at its end
            raise ValueError(
                f"Two passes through `train_dataset` made no step: it gives fewer batches than "
                f"`gradient_accumulation_steps={args.gradient_accumulation_steps}`. Lower that or "
                "`per_device_train_batch_size`, or pass more data."
            )
        epoch, self.next, self.is_at_start = self.next, self.next + 1, True
        trainer.order.enter(epoch, loader)
        if feed is None:
            return
        if has_length(loader) and len(loader) == 0:
            raise ValueError(
                f"`train_dataset` gives no batch: `dataloader_drop_last={args.dataloader_drop_last}` drops one with "
                f"fewer rows than `per_device_train_batch_size={args.per_device_train_batch_size}`. Lower the batch "
                "size, or pass more data."
            )
        feed.enter(epoch)
        if trainer.saver.resumed_from is not None:
            reads_itself, trainer.saver.resumed_from = feed.begun, None
            if not reads_itself:
                feed.trained = self.place()[1]
        else:  # Trainer does not know how often a resumed run has gone through a stream, which may differ by epoch
            reads_itself = trainer.saver.report is not None and not has_length(loader)
        if reads_itself:
            feed.read(loader)
            self.is_at_start = False

    def restore_order(self) -> None:
        """Restore the order of the epoch again, because random generators were restored after it began."""
        if self.is_at_start:
            self._trainer.order.enter(self.next - 1, self._trainer.callback_handler.train_dataloader)
