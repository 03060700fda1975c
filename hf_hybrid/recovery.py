"""
Goes on after an out-of-memory: the accumulation window is computed again in smaller parts, to the same effective batch.

An attempt that failed leaves nothing behind: its tensors are let go, its gradients dropped, the random generators put
back. What fits then is kept for the rest of the run, and by checkpoints.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hf_hybrid.guard import drop_tensors_of, free_memory, is_out_of_memory
from hf_hybrid.micro_batches import UnsplittableBatchError, parts_of, sequences_in, split_batch
from hf_hybrid.phase_memory.activations import ActivationCheckpointing
from hf_hybrid.phases import Phase, PluginContext
from hf_hybrid.state_io import write_json
from hf_hybrid.streaming.walk import RandomStates

logger = logging.getLogger(__name__)

Tensor = torch.Tensor

RECOVERY_NAME = "out_of_memory.json"
MAX_EVENTS = 1000
PAIRED = ("DPOTrainer", "RewardTrainer")
"""TRL's trainers whose batches hold all chosen completions and then all rejected ones."""


class UnrecoveredMemoryError(torch.OutOfMemoryError):
    """Memory ran out and nothing helped, or nothing may be tried; says what was tried, and what to change."""


@dataclass
class MemoryPolicy:
    """What was found necessary so far in a run."""

    micro_batch_size: int | None = None
    """Most sequences that are computed at once; `None` for as many as a micro-batch has."""
    activation_checkpointing: bool = False
    walk_by_micro_batch: bool = False


class OutOfMemoryRecovery:
    """
    Computes the micro-batches of every window, in parts no larger than what fits.

    Args:
        trainer: The trainer of the run. Read: its arguments, model, callbacks and streaming engine; written:
            `current_gradient_accumulation_steps`, by which `Trainer` divides losses that are means.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.reset()
        self.on_device = False
        """Whether it is certain that the last out-of-memory was the device's."""
        self.reason = ""
        """First line of what the last out-of-memory said."""
        self.losses: list[Tensor] = []
        """Of the parts of the window that are computed, in order; they add up to its loss."""
        self._batches: list = []
        self._items: Any = None
        self._returned: list[Tensor] = []
        self._random: RandomStates | None = None
        self._checkpointing: ActivationCheckpointing | None = None

    # A run.

    def reset(self) -> None:
        """A run begins that nothing is known of."""
        self.retries = self.trainer.hybrid_args.out_of_memory == "retry"
        self.policy = MemoryPolicy()
        self.events: list[dict[str, Any]] = []

    def begin(self, context: PluginContext) -> None:
        """The model is ready to run: put in force what a checkpoint says is necessary."""
        streaming = self.trainer.streaming
        if self.policy.activation_checkpointing and streaming is None:
            self._checkpoint_activations(context)
        if self.policy.walk_by_micro_batch and streaming is not None:
            streaming.window.order = "micro_batch"

    def end(self) -> None:
        """Leave the model as it was, and hold no batch."""
        if self._checkpointing is not None:
            self._checkpointing.on_train_end()
            self._checkpointing = None
        self._batches, self._returned, self.losses, self._random = [], [], [], None

    @property
    def blocks(self) -> int:
        """Blocks of rows in a batch: 2 where chosen completions are followed by rejected ones, as TRL has it."""
        return 2 if any(base.__name__ in PAIRED for base in type(self.trainer).__mro__) else 1

    # A window.

    def begin_window(self, batches: list, items: Any = None) -> None:
        """An accumulation window begins; `batches` are its micro-batches, `items` see [`compute`]."""
        self._batches, self._items = list(batches), items
        self._returned, self.losses, self._random = [], [], None
        self._tell_the_walk()

    def end_window(self) -> None:
        """The step is over."""
        self.begin_window([])

    @property
    def window_size(self) -> int:
        """Micro-batches of the window under way, as the trainer fetched them; 0 between steps."""
        return len(self._batches)

    def compute(self, inputs: Any, run: Callable[[Any], Tensor], items: Any) -> Tensor:
        """
        Compute one micro-batch and its gradients; after an out-of-memory, the whole window so far anew.

        Args:
            inputs (`Any`): The micro-batch.
            run (`Callable`): Computes a batch, or a part of one, and accumulates its gradients; returns its loss.
            items (`Any`): Items of the window by which losses are normalised; `None` where they are means.

        Returns:
            `torch.Tensor`: The micro-batch's share of the loss of the window.

        Raises:
            UnrecoveredMemoryError: If nothing helped, or nothing may be tried.
        """
        if len(self._returned) >= len(self._batches):
            self.begin_window([inputs], items)  # called outside of a training loop
        if self._random is None and self.retries:
            self._random = RandomStates.now(self.trainer.args.device)
        position = len(self._returned)
        loss = self._attempt([inputs], run)
        while loss is None:
            self._escalate()
            self.forget_attempt()
            whole = self._attempt(self._batches[: position + 1], run)
            loss = None if whole is None else whole - sum(self._returned)
        self._returned.append(loss)
        return loss

    def _attempt(self, batches: list, run: Callable[[Any], Tensor]) -> Tensor | None:
        try:
            return self._compute(batches, run)
        except Exception as error:
            self.catch(error)
        # Not before the exception is gone: its frames hold what the attempt had computed.
        free_memory()
        return None

    def _compute(self, batches: list, run: Callable[[Any], Tensor]) -> Tensor:
        losses = []
        for batch in batches:
            for part, share in self._parts(batch):
                if self.policy.micro_batch_size is not None:
                    # As `Trainer` divides with the smaller micro-batch and more accumulation steps.
                    self.trainer.current_gradient_accumulation_steps = len(self._batches) / share
                losses.append(run(part))
        self.losses += losses
        return sum(losses[1:], losses[0])

    def _parts(self, batch: Any) -> list[tuple[Any, float]]:
        """What is computed at a time, and its share of the micro-batch."""
        parts = parts_of(batch, self.policy.micro_batch_size, self.blocks)
        if len(parts) == 1:
            return [(batch, 1.0)]
        count = sequences_in(batch, self.blocks)
        return [(part, sequences_in(part, self.blocks) / count) for part in parts]

    def _tell_the_walk(self) -> None:
        if self.trainer.streaming is None or not self._batches:
            return
        parts = [part for batch in self._batches for part in self._parts(batch)]
        # A walk computes all parts in one go: losses that are means must count alike. Else each is computed by itself.
        alike = self._items is not None or len({share for _, share in parts}) <= 1
        self.trainer.streaming.window.begin([part for part, _ in parts] if alike else [])

    # An out-of-memory.

    def catch(self, error: Exception) -> None:
        """
        Take an exception that may be an out-of-memory: report it, and let go of what it holds.

        Raises:
            Exception: `error` itself, if it is none or `out_of_memory=raise`.
            UnrecoveredMemoryError: If nothing may be tried here.
        """
        if isinstance(error, UnrecoveredMemoryError) or not is_out_of_memory(error):
            raise error
        for callback in self.trainer.callback_handler.callbacks:
            record = getattr(callback, "record_out_of_memory", None)
            if callable(record):
                record(error)
        if not self.retries:
            raise error
        self.on_device = isinstance(error, torch.OutOfMemoryError)
        self.reason = str(error).strip().partition("\n")[0] or type(error).__name__
        obstacle = _obstacle(self.trainer)
        if obstacle is not None:
            raise UnrecoveredMemoryError(f"{self.where()}: {self.reason} Nothing was tried: {obstacle}") from error
        drop_tensors_of(error)

    def where(self) -> str:
        """Step and phase, for messages."""
        phase = self.trainer.phase_name
        return f"Out of memory in step {self.trainer.state.global_step + 1}" + (f", phase `{phase}`" if phase else "")

    def note(self, action: str, *, before: int | None = None, after: int | None = None) -> None:
        """Write down what was done; `before` and `after` in sequences, where a size changed."""
        event = {
            "step": self.trainer.state.global_step,
            "phase": self.trainer.phase_name,
            "from_size": before,
            "to_size": after,
            "action": action,
            "error": self.reason,
        }
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)

    def forget_attempt(self) -> None:
        """Gradients and random generators as if the window had not begun."""
        streaming = self.trainer.streaming
        if streaming is not None:
            streaming.streamer.gradients_arrived()
            streaming.optimizer.drop_gradients()
        for parameter in self.trainer.model.parameters():
            parameter.grad = None
        self.losses = []
        if self._random is not None:
            self._random.restore()
        self._tell_the_walk()

    def _escalate(self) -> None:
        """One rung: half the sequences at a time; then what costs time instead of memory; then give up."""
        size, obstacle = self._largest_part()
        if size > 1 and obstacle is None:
            smaller = (size + 1) // 2
            self.policy.micro_batch_size = smaller
            self.note("split micro-batches", before=size, after=smaller)
            self._warn(
                f"micro-batches are computed in parts of at most {smaller} sequences instead of {size} from here on; "
                "the effective batch stays the same"
            )
        elif self.trainer.streaming is not None and self._changes_the_walk():
            self.policy.walk_by_micro_batch = True
            self.trainer.streaming.window.order = "micro_batch"
            self.note("walk by micro-batch", before=size, after=size)
            self._warn("windows are walked micro-batch by micro-batch from here on, not layer by layer")
        elif self._can_checkpoint():
            self.policy.activation_checkpointing = True
            state = self.trainer.state
            context = PluginContext(self.trainer.model_wrapped, self.trainer.optimizer, state.max_steps)
            self._checkpoint_activations(context)
            self.note("activation checkpointing", before=size, after=size)
            self._warn("activations are checkpointed from here on")
        else:
            self.forget_attempt()
            at_a_time = f", with {size} sequence{'' if size == 1 else 's'} at a time" if size else ""
            self.give_up(f"{self.where()}{at_a_time}: {self.reason}", obstacle)

    def _largest_part(self) -> tuple[int, str | None]:
        """Sequences that are computed at once now (0: not known), and why they cannot be fewer, if so."""
        trainer, size = self.trainer, 0
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None) or trainer.compute_loss_func is not None
        try:
            size = max(sequences_in(batch, self.blocks) for batch in self._batches)
            for batch in self._batches if size > 1 else ():
                split_batch(batch, 1, self.blocks)
            if size > trainer._train_batch_size:
                # Rows in an order that only the trainer's loss knows, pairs for example.
                raise UnsplittableBatchError(f"It has {size} rows for {trainer._train_batch_size} examples.")
        except UnsplittableBatchError as error:
            return size, f"The batch cannot be split: {error}"
        if scaled and self._items is None and size > 1:
            return size, (
                "The batch cannot be split: the loss is said to be normalised over the whole window "
                "(`compute_loss_func`, `loss_is_scaled_for_ga`), but its items cannot be counted."
            )
        return min(size, self.policy.micro_batch_size or size), None

    def _warn(self, text: str) -> None:
        logger.warning("%s (%s): %s.", self.where(), self.reason, text)

    def _changes_the_walk(self) -> bool:
        parts = sum(len(self._parts(batch)) for batch in self._batches)
        return self.trainer.streaming.window.order != "micro_batch" and parts > 1

    def _can_checkpoint(self) -> bool:
        if self.trainer.streaming is not None:
            return False  # streamed layers always are
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        on = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        return bool(getattr(model, "supports_gradient_checkpointing", False)) and not on

    def _checkpoint_activations(self, context: PluginContext) -> None:
        own = [part for part in self.trainer.plugins.plugins if isinstance(part, ActivationCheckpointing)]
        if own:  # it switches by phase already: from now on in every one
            own[0].phases = frozenset(phase for phase in Phase if phase is not Phase.PREDICT)
        else:
            self._checkpointing = ActivationCheckpointing()
            self._checkpointing.on_train_begin(context)

    def give_up(self, what: str, obstacle: str | None = None) -> None:
        """
        Save the state of after the last step, and stop.

        The weights, the optimizer and the random generators must be those of the end of the last step.

        Raises:
            UnrecoveredMemoryError: Always.
        """
        tried = [f"{event['action']} ({event['from_size']} to {event['to_size']})" for event in self.events]
        tried = list(dict.fromkeys(text.replace(" (None to None)", "") for text in tried))
        parts = [what if what.endswith(".") else f"{what}."]
        parts += [obstacle] if obstacle else []
        parts.append(f"Tried in this run: {', '.join(tried)}." if tried else "Nothing else could be tried.")
        parts.append(self.trainer.emergency_checkpoint())
        parts.append(f"Resume from it with less: {', '.join(_less_memory(self.trainer))}.")
        raise UnrecoveredMemoryError(" ".join(parts))

    # Saving.

    def save(self, folder: str | Path) -> None:
        """Write what was found necessary beside the checkpoint; nothing if nothing was."""
        if self.events:
            write_json(Path(folder) / RECOVERY_NAME, {"policy": asdict(self.policy), "events": self.events})

    def load(self, folder: str | Path) -> None:
        """Read it back, for the run that goes on from the checkpoint."""
        path = Path(folder) / RECOVERY_NAME
        if not path.is_file():
            return
        values = json.loads(path.read_text(encoding="utf-8"))
        self.events = list(values["events"])
        if self.retries:
            self.policy = MemoryPolicy(**values["policy"])
            logger.warning("`%s` ran out of memory before, and goes on with what fitted: %s.", folder, self.policy)


def _obstacle(trainer) -> str | None:
    """Why a step cannot be computed again in this run."""
    args, optim = trainer.args, str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if trainer.accelerator.num_processes > 1 or args.n_gpu > 1:
        return (
            "with more than one process or GPU the others would wait for this one for ever. Lower "
            "`per_device_train_batch_size` and raise `gradient_accumulation_steps` for all of them."
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return "DeepSpeed and FSDP keep gradients of their own. Lower `per_device_train_batch_size`."
    if "layerwise" in optim or "lomo" in optim:
        return f"`optim={optim}` changes weights inside the backward pass, so that a step cannot be computed twice."
    if trainer.streaming is not None and trainer.streaming.torn:
        return (
            f"{trainer.streaming.torn} The weights in memory are not those of any step. "
            "Resume from the last checkpoint with less."
        )
    return None


def _less_memory(trainer) -> list[str]:
    """Options that take less and are not in use."""
    options = trainer.hybrid_args
    choices = {
        "shorter sequences": True,
        "`memory=auto` (layers are streamed from the host)": trainer.streaming is None,
        "`offload_activations=True`": not options.offload_activations,
        "`chunked_loss=on`": not trainer.loss_in_chunks,
        "`optimizer_states=8bit`": options.optimizer_states != "8bit",
        "`buffers_device=cpu`": options.enable_predict and options.buffers_device != "cpu",
    }
    return [name for name, possible in choices.items() if possible]
