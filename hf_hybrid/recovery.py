"""
Recovery when memory runs out, and the guard that warns before.

Forward and backward. The present accumulation window is computed again in smaller parts, with the same effective batch.
A failed attempt leaves nothing behind: its tensors are released, its gradients dropped, and the random generators
reset, so the result has the bits of a run with smaller micro-batches from the start. The measures, in order: free what
parts of the run can spare (recompute more layers); half as many sequences at a time, down to one; streamed layers
walked micro-batch by micro-batch; activation checkpointing. The size that fits is kept for the rest of the run and
saved with every checkpoint. When no measure is left, the state after the last good step is saved, and
`UnrecoveredMemoryError` says what was tried and what to change.

A leap. Every leap is a trial (leaps/trajectory.py), which restores the weights, and the run continues with real steps.
If memory runs out while the direction reads a gradient, or while a leap is judged, this one observation is left out.

The optimizer's step. It cannot be repeated, because some weights may be updated and others not. The run stops with a
message that names the last checkpoint.

The guard watches the device at the end of every step. It warns early, cleans up, and asks for one checkpoint before the
limit is reached.

With several processes nothing is retried, because the others would wait for this one forever.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from hf_hybrid.compat import checkpointing_option
from hf_hybrid.config import was_given
from hf_hybrid.leaps.probe import Losses
from hf_hybrid.machine import is_out_of_memory
from hf_hybrid.optimizers import inner_optimizer, optimizer_name, steps_in_backward
from hf_hybrid.part import Part, Phase, Step
from hf_hybrid.run.run import RandomStates, Run
from hf_hybrid.run.trainer_view import LossView
from hf_hybrid.saving.manifest import last_checkpoint
from hf_hybrid.streaming.graphs import computed_otherwise, kept_twice
from hf_hybrid.streaming.layers import base_model
from hf_hybrid.streaming.walk import Window

logger = logging.getLogger(__name__)

MAX_EVENTS = 1000
GIB = 2**30

# Cleaning up.


def drop_tensors_of(error: BaseException | None) -> None:
    """Clear the local variables of every frame of the traceback, because they hold the tensors of the attempt."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def free_memory() -> None:
    """Collect reference cycles, and return the cached blocks of the device's allocator."""
    gc.collect()
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        if hasattr(module, "empty_cache"):
            module.empty_cache()


# The guard.

MemoryProbe = Callable[[], tuple[int, int]]
"""Returns bytes in use on the device and bytes that it has."""


def device_probe(device: torch.device) -> MemoryProbe | None:
    """
    Return a function that reads the memory in use on a device, by any process, and the memory that it has. `None` for a
    CPU and for devices that cannot tell.

    Where this process may use a part of the device only (`torch.cuda.set_per_process_memory_fraction`), what its
    allocator holds out of that part, if that is the tighter limit.
    """
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None

    def read() -> tuple[int, int]:
        free, total = module.mem_get_info(device)
        fraction = getattr(module, "get_per_process_memory_fraction", lambda _: 1.0)(device)
        mine = (module.memory_reserved(device), int(total * fraction)) if fraction < 1 else (0, total)
        return max((total - free, total), mine, key=lambda pair: pair[0] / pair[1])

    return read


class MemoryGuard(Part):
    """
    Watches device memory at the end of every step. Above a share of the device (`warn_at`; 1 for never) it warns and
    cleans up, and above another one (`checkpoint_at`) it asks for a checkpoint. Then it keeps quiet until a step ends
    below `warn_at`. With no `probe` it watches nothing.

    What the allocator keeps for later counts as in use, so that a reading at the end of a step stands for its peak.
    """

    name = "memory_guard"
    needs_numbers = False

    def __init__(self, probe: MemoryProbe | None, *, warn_at: float = 0.90, checkpoint_at: float = 0.97):
        self.probe = probe
        self.warn_at, self.checkpoint_at = warn_at, max(warn_at, checkpoint_at)  # the warning comes first
        self.warned = self.asked = False

    def end_step(self, step: Step) -> None:
        if self.probe is None:
            return
        used, total = self.probe()
        number, share, text = step.index + 1, used / total, self._describe(used, total)
        save = share > self.checkpoint_at and not self.asked
        logger.debug("Step %d ends with %s.", number, text)
        if share <= self.warn_at:
            self.warned = self.asked = False
        elif not self.warned:
            self.warned = True
            logger.warning(
                "Step %d ends with %s, above `guard_warn_at=%g`. Lower `per_device_train_batch_size` and raise "
                "`gradient_accumulation_steps`, or see docs/memory.md for what takes less.", number, text, self.warn_at
            )  # fmt: skip
            free_memory()
        if save:
            self.asked = step.asks_save = True
            text = f"{text}, above {100 * self.checkpoint_at:.0f} %"
            logger.warning("Step %d ends with %s: a checkpoint is written now, once.", number, text)

    @staticmethod
    def _describe(used: int, total: int) -> str:
        return f"{used / GIB:.2f} of {total / GIB:.2f} GiB in use ({used / total:.1%})"


# Parts of a micro-batch.

SEQUENCES = ("input_ids", "inputs_embeds", "labels")
"""Keys that decide how many sequences a batch has, in this order; otherwise the first tensor decides."""


class UnsplittableBatchError(ValueError):
    """The batch cannot be split, because something in it does not have one row per sequence."""


def sequences_in(batch: Any, blocks: int = 1) -> int:
    """
    Return the number of sequences (or pairs of them) in a collated batch. Its rows consist of `blocks`, each with one
    row per sequence: 2 where all chosen completions are followed by all rejected ones.
    """
    if not isinstance(batch, Mapping):
        raise UnsplittableBatchError(f"The batch is a `{type(batch).__name__}`, not a dictionary of tensors.")
    first = [batch[name] for name in SEQUENCES if name in batch]
    for value in tree_leaves([first, dict(batch)]):
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape[0] // blocks
    raise UnsplittableBatchError("The batch holds no tensor with rows.")


def split_batch(
    batch: Mapping[str, Any], most: int, blocks: int = 1, model: nn.Module | None = None
) -> list[dict[str, Any]]:
    """
    Cut a batch into parts of at most `most` sequences, in their order. With one block nothing is copied, but images:
    which are of which sequence is known of a `model` whose rows with images are shared (rows/images.py).

    Cut are tensors, lists and tuples with one entry per sequence (or per sequence and block), also inside dictionaries.
    Numbers, strings and tensors of one row, which hold for all sequences, go into every part. Raise
    [`UnsplittableBatchError`] for anything else.
    """
    if model is not None and (parts := _with_their_images(batch, most, blocks, model)) is not None:
        return parts
    count = sequences_in(batch, blocks)
    bounds = [(first, min(first + most, count)) for first in range(0, count, most)]

    def part(value: Any, start: int, stop: int, name: str) -> Any:
        if isinstance(value, Mapping):
            return {key: part(inner, start, stop, f"{name}.{key}") for key, inner in value.items()}
        if not isinstance(value, (Tensor, list, tuple)) or (isinstance(value, Tensor) and not value.dim()):
            return value
        if len(value) == count:
            return value[start:stop]
        if len(value) == blocks * count:
            rows = [value[block * count + start : block * count + stop] for block in range(blocks)]
            return torch.cat(rows) if isinstance(value, Tensor) else type(value)(sum(map(list, rows), []))
        if len(value) == 1 and isinstance(value, Tensor):
            return value
        raise UnsplittableBatchError(f"`{name}` has {len(value)} entries for {count} sequences.")

    return [{name: part(value, start, stop, name) for name, value in batch.items()} for start, stop in bounds]


def _with_their_images(batch: Mapping[str, Any], most: int, blocks: int, model: nn.Module) -> list[dict] | None:
    """Return the parts of a batch with images; `None` of another one, and where each sequence has one image."""
    from hf_hybrid.rows.images import NAMES, Images, encoder_of, sees_behind
    from hf_hybrid.rows.tree import Batch

    encoder = encoder_of(base := base_model(model))
    if encoder is None or batch.get("pixel_values") is None or "input_ids" not in batch:
        return None
    ids, images = batch["input_ids"], Images()
    mask = batch.get("attention_mask", torch.ones_like(ids))
    coded = images.coded(encoder, batch, Batch(ids.cpu(), mask.cpu(), ids.cpu()), sees_behind(base))
    if isinstance(coded, str):
        if len(batch["pixel_values"]) == len(ids) and (ids == encoder.config.image_token_id).any(1).all():
            return None
        raise UnsplittableBatchError(f"{coded[0].upper()}{coded[1:]}.")
    rows = split_batch({"codes": coded.ids, "mask": coded.mask}, most, blocks)
    parts = split_batch({name: value for name, value in batch.items() if name not in NAMES}, most, blocks)
    return [part | send_to_device(images.padded(**of_part), ids.device) for part, of_part in zip(parts, rows)]


def parts_of(batch: Any, most: int | None, blocks: int = 1, model: nn.Module | None = None) -> list:
    """Return the batch in parts of at most `most` sequences, or whole if it has no more or cannot be split."""
    try:
        if most is None or sequences_in(batch, blocks) <= most:
            return [batch]
        return split_batch(batch, most, blocks, model)
    except UnsplittableBatchError:
        return [batch]


# Recovery.


class UnrecoveredMemoryError(torch.OutOfMemoryError):
    """Memory ran out and no measure helped or is allowed. The message says what was tried and what to change."""


@dataclass
class MemoryPolicy:
    """The measures in use in a run."""

    micro_batch_size: int | None = None
    """Most sequences that are computed at once; `None` for as many as a micro-batch has."""
    scored_rows: int | None = None
    """Most sequences that a pass without gradients computes at once, as log-probabilities of completions."""
    activation_checkpointing: bool = False
    walk_by_micro_batch: bool = False


class RecoveringTrainer(LossView, Protocol):
    """A trainer whose windows can be computed again."""

    model_wrapped: Any
    current_gradient_accumulation_steps: float
    blocks_of_rows: int
    draws_first: bool
    _train_batch_size: int

    @property
    def cannot_repeat(self) -> str | None: ...

    @property
    def rows_at_once(self) -> int | None: ...

    def begin_again(self) -> None: ...

    @property
    def phase_name(self) -> str | None: ...

    def _save_checkpoint(self, model: Any, trial: Any) -> None: ...


class OutOfMemoryRecovery(Part):
    """
    Computes the micro-batches of every accumulation window, in parts no larger than what fits. Of the trainer it writes
    `current_gradient_accumulation_steps`, by which `Trainer` divides losses that are means.
    """

    name = "out_of_memory"
    needs_numbers = False

    def __init__(self, trainer: RecoveringTrainer):
        self.trainer, self.blocks = trainer, trainer.blocks_of_rows
        self.reset()
        self.reason = ""
        """First line of the message of the last out-of-memory."""
        self._batches: list = []
        self._num_items: Any = None
        self._returned: list[Tensor] = []
        self.random: RandomStates | None = None
        """From which the window is computed again."""
        self._laid_out = False
        """Whether a part laid the window out, in any number of rows per micro-batch."""
        self._divisor: int | None = None
        """What `Trainer` divides the losses of the window by, where those of parts add up and there are no items."""
        self._checkpointing: Part | None = None

    # A run.

    def reset(self) -> None:
        """Reset for a new run."""
        self.retries = self.trainer.hybrid_args.out_of_memory == "retry"
        self.policy = MemoryPolicy()
        self.events: list[dict[str, Any]] = []
        self.stepping = False
        """Whether the optimizer's step is under way."""

    def end(self) -> None:
        """Restore the model's settings and release all batches."""
        if self._checkpointing is not None:
            self._checkpointing.end()
            self._checkpointing = None
        self._batches, self._returned, self.random = [], [], None

    # A window.

    def begin_window(self, batches: list, num_items: Any = None) -> None:
        """An accumulation window begins; `batches` are its micro-batches, `num_items` see [`compute`]."""
        self._batches, self._num_items = list(batches), num_items
        self._returned, self.random = [], None
        if (window := self.trainer.memory.window) is not None:
            self._begin_walk(window)

    def compute(self, inputs: Any, run: Callable[[Any], Tensor], num_items: Any) -> Tensor:
        """
        Compute one micro-batch and its gradients, and return its share of the loss of the window. After an
        out-of-memory error, compute the whole window so far again. Raise [`UnrecoveredMemoryError`] if nothing helps.

        `run` computes a batch, or a part of one, accumulates its gradients and returns its loss, which is divided by
        `num_items` (the labels of the window; `None` where losses are means).
        """
        position = len(self._returned)
        if position >= len(self._batches) and not self.trainer.run.step.batches:
            self.begin_window([inputs], num_items)  # called outside of a training loop
            position = 0
        self._batches[position:] = [inputs, *self._batches[position + 1 :]]  # code of a user may have changed it
        if self.random is None and self.retries and not self.trainer.draws_first:
            self.random = RandomStates.now(self.trainer.args.device)
        loss = self._compute([inputs], run)
        while loss is None:
            self._escalate()
            self._discard_attempt()
            total = self._compute(self._batches[: position + 1], run)
            loss = None if total is None else total - sum(self._returned)
        self._returned.append(loss)
        return loss

    def _compute(self, batches: list, run: Callable[[Any], Tensor]) -> Tensor | None:
        """Return the sum of the losses of all parts, or `None` after an out-of-memory error."""
        try:
            losses = []
            for batch in batches:
                if self.policy.micro_batch_size is None:
                    losses.append(run(batch))
                    continue
                for part, share in self._parts(batch):
                    # As `Trainer` divides with the smaller micro-batch and more accumulation steps.
                    self.trainer.current_gradient_accumulation_steps = self._divisor or len(self._batches) / share
                    losses.append(run(part))
            return sum(losses[1:], losses[0])
        except Exception as error:
            self.catch(error)
        # Not before the exception is gone: its frames hold what the attempt had computed.
        free_memory()
        return None

    def _parts(self, batch: Any) -> list[tuple[Any, float]]:
        """Return the parts that are computed at a time, each with its share of the micro-batch."""
        if self.policy.micro_batch_size is None:
            return [(batch, 1.0)]
        parts = parts_of(batch, self.policy.micro_batch_size, self.blocks, self.trainer.model)
        sizes = [1] if len(parts) == 1 else [sequences_in(part, self.blocks) for part in parts]
        return [(part, size / sum(sizes)) for part, size in zip(parts, sizes)]

    def _begin_walk(self, window: Window) -> None:
        """Streamed layers walk a window in one go: losses that are means must count alike, or each part goes alone."""
        parts = [part for batch in self._batches for part in self._parts(batch)]
        alike = self._num_items is not None or len({share for _, share in parts}) <= 1
        window.begin([part for part, _ in parts] if alike else [])

    def probe(self, evaluate: Callable[[Any], Losses], batch: Any) -> Losses:
        """Evaluate a batch of a probe, in parts as large as those that are trained on."""
        return Losses.joined(map(evaluate, parts_of(batch, self.policy.micro_batch_size, self.blocks)))

    # An out-of-memory error.

    def survive(self, error: Exception, otherwise: str) -> None:
        """
        Go on without the work that raised `error`, if it is an out-of-memory that may be survived: the work left
        everything unchanged, or training does not need it. `otherwise` says for the log what happens instead.
        """
        self.catch(error)
        free_memory()
        self._take(otherwise, otherwise)

    def catch(self, error: Exception) -> None:
        """
        Take note of an out-of-memory error, and release what it holds. Raise `error` itself, if it is none or with
        `out_of_memory=raise`, and [`UnrecoveredMemoryError`] if nothing may be tried here.
        """
        if isinstance(error, UnrecoveredMemoryError) or not is_out_of_memory(error) or not self.retries:
            raise error
        self.reason = _first_line(error)
        obstacle = self._reason_not_repeated()
        if obstacle is not None:
            raise UnrecoveredMemoryError(f"{self.where()}: {self.reason} Nothing was tried: {obstacle}") from error
        drop_tensors_of(error)

    def explain(self, error: Exception) -> Exception:
        """Return the exception to raise for one that ended the run; it says what the user cannot see in it."""
        if self.trainer.memory.streams and isinstance(error, CheckpointError):
            return computed_otherwise()
        if self.trainer.memory.streams and "backward through the graph a second time" in str(error):
            return kept_twice(error)
        if not self.stepping or not self.retries or not is_out_of_memory(error):
            return error
        self.reason, optimizer = _first_line(error), type(inner_optimizer(self.trainer.optimizer)).__name__
        self.trainer.saver.writer.join()
        checkpoint = last_checkpoint(self.trainer.run_folder)
        where = f"from `{checkpoint}`" if checkpoint else "from the start (no checkpoint was saved yet)"
        return UnrecoveredMemoryError(
            f"{self.where()}, in the step of `{optimizer}`: {self.reason} Some weights may have been stepped and "
            f"others not, so this state is not saved. Resume {where} with less: {', '.join(self._less_memory())}."
        )

    def where(self) -> str:
        """Step and phase, for messages."""
        phase = self.trainer.phase_name
        return f"Out of memory in step {self.trainer.state.global_step + 1}" + (f", phase `{phase}`" if phase else "")

    def note(self, action: str, *, before: int | None = None, after: int | None = None) -> None:
        """Record a measure, with `before` and `after` in sequences if a size changed."""
        event = {"step": self.trainer.state.global_step, "phase": self.trainer.phase_name}
        event |= {"from_size": before, "to_size": after, "action": action, "error": self.reason}
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)

    def _take(self, action: str, text: str, *, before: int | None = None, after: int | None = None) -> None:
        """Record a measure, and warn of it in words."""
        self.note(action, before=before, after=after)
        logger.warning("%s (%s): %s.", self.where(), self.reason, text)

    def _discard_attempt(self) -> None:
        """Put gradients and random generators back to the beginning of the window."""
        self.trainer.memory.discard_gradients()
        for parameter in self.trainer.model.parameters():
            parameter.grad = None
        if self.random is not None:
            self.random.restore()
        self.trainer.begin_again()
        if (window := self.trainer.memory.window) is not None:
            self._begin_walk(window)

    def _escalate(self) -> None:
        """Take one measure: ask the parts; halve the sequences at a time; trade time for memory; give up."""
        for part in self.trainer.parts:
            if (measure := part.spare_memory()) is not None:
                self._take(measure, f"{measure} from here on")
                return
        if self.trainer.memory.recompute_all():
            self.policy.activation_checkpointing = True
            self._take("activation checkpointing", "all layers are recomputed from here on")
            return
        size, obstacle = self._largest_part()
        if size > 1 and obstacle is None:
            smaller = self.policy.micro_batch_size = (size + 1) // 2
            text = f"micro-batches are computed in parts of at most {smaller} sequences instead of {size} from here on;"
            self._take("split micro-batches", f"{text} the effective batch stays the same", before=size, after=smaller)
        elif sum(len(self._parts(batch)) for batch in self._batches) > 1 and self.trainer.memory.walk_by_micro_batch():
            self.policy.walk_by_micro_batch = True
            text = "windows are walked micro-batch by micro-batch from here on, not layer by layer"
            self._take("walk by micro-batch", text, before=size, after=size)
        elif self._can_checkpoint():
            self.policy.activation_checkpointing = True
            self._checkpoint_activations()
            text = "activations are checkpointed from here on"
            self._take("activation checkpointing", text, before=size, after=size)
        else:
            self._discard_attempt()
            self._give_up(size, obstacle)

    def _largest_part(self) -> tuple[int, str | None]:
        """Return the sequences computed at once (0: unknown), and why there cannot be fewer, if so."""
        trainer, size = self.trainer, 0
        if (rows := trainer.rows_at_once) is not None:
            return min(rows, self.policy.micro_batch_size or rows), None
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None) or trainer.compute_loss_func is not None
        try:
            size = max(sequences_in(batch, self.blocks) for batch in self._batches)
            for batch in self._batches if size > 1 else ():
                split_batch(batch, 1, self.blocks, trainer.model)
            if size > trainer._train_batch_size and not self._laid_out:
                # Rows in an order that only the trainer's loss knows, pairs for example.
                raise UnsplittableBatchError(f"It has {size} rows for {trainer._train_batch_size} examples.")
        except UnsplittableBatchError as error:
            return size, f"The batch cannot be split: {error}"
        if scaled and self._num_items is None and size > 1:
            return size, (
                "The batch cannot be split: the loss is said to be normalised over the whole window "
                "(`compute_loss_func`, `loss_is_scaled_for_ga`), but its items cannot be counted."
            )
        return min(size, self.policy.micro_batch_size or size), None

    def _can_checkpoint(self) -> bool:
        if self.trainer.memory.streams:
            return False  # streamed layers are by now
        args, name = self.trainer.args, checkpointing_option()
        if was_given(args, name) and getattr(args, name) is False:
            return False  # the user wrote that nothing is recomputed
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        on = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        return bool(getattr(model, "supports_gradient_checkpointing", False)) and not on

    def _checkpoint_activations(self) -> None:
        from hf_hybrid.phase_memory.activations import ActivationCheckpointing

        own = [part for part in self.trainer.parts if isinstance(part, ActivationCheckpointing)]
        if own:  # it switches by phase already: from now on in every one
            own[0].phases = frozenset(phase for phase in Phase if phase is not Phase.PREDICT)
        else:
            self._checkpointing = ActivationCheckpointing()
            model, optimizer = self.trainer.model_wrapped, self.trainer.optimizer
            self._checkpointing.begin(Run(model=model, optimizer=optimizer, max_steps=self.trainer.state.max_steps))

    def _give_up(self, size: int, obstacle: str | None) -> None:
        """Save the state after the last step, and stop. Every gradient of the window is gone by now."""
        tried = [f"{event['action']} ({event['from_size']} to {event['to_size']})" for event in self.events]
        tried = list(dict.fromkeys(text.replace(" (None to None)", "") for text in tried))
        at_a_time = f", with {size} sequence{'' if size == 1 else 's'} at a time" if size else ""
        sentences = [f"{self.where()}{at_a_time}: {self.reason.removesuffix('.')}.", *([obstacle] if obstacle else [])]
        sentences.append(f"Tried in this run: {', '.join(tried)}." if tried else "Nothing else could be tried.")
        sentences.append(self._emergency_checkpoint())
        sentences.append(f"Resume from it with less: {', '.join(self._less_memory())}.")
        raise UnrecoveredMemoryError(" ".join(sentences))

    def _emergency_checkpoint(self) -> str:
        """Save the state after the last step, and return a sentence that says where, or why not."""
        trainer, step = self.trainer, self.trainer.state.global_step
        trainer.saver.writer.join()
        if trainer.saver.saved_step != step:
            try:
                trainer._save_checkpoint(trainer.model, trial=trainer.trial)
            except Exception as error:
                logger.exception("The emergency checkpoint could not be written.")
                checkpoint = last_checkpoint(trainer.run_folder)
                where = f"the last one is `{checkpoint}`" if checkpoint else "there is none"
                return f"An emergency checkpoint could not be written (`{type(error).__name__}`); {where}."
            trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        folder = trainer.run_folder / f"checkpoint-{step}"
        return f"The state after step {step}, the last good one, is in `{folder}`."

    def _reason_not_repeated(self) -> str | None:
        """Return why a step cannot be computed again in this run, or `None`."""
        trainer, optim = self.trainer, optimizer_name(self.trainer.args)
        if trainer.accelerator.num_processes > 1 or trainer.args.n_gpu > 1:
            return (
                "with more than one process or GPU the others would wait for this one forever. Lower "
                "`per_device_train_batch_size` and raise `gradient_accumulation_steps` for all of them."
            )
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            return "DeepSpeed and FSDP keep gradients of their own. Lower `per_device_train_batch_size`."
        if steps_in_backward(optim):
            return f"`optim={optim}` changes weights inside the backward pass, so that a step cannot be computed twice."
        if self._returned and not self.stepping and (because := trainer.run.step.acts) is not None:
            return f"{because}, and those before this one would be computed again. Lower `per_device_train_batch_size`."
        if trainer.cannot_repeat is not None:
            return trainer.cannot_repeat
        if trainer.memory.torn is not None:
            return (
                f"{trainer.memory.torn} The weights in memory are not those of any step. "
                "Resume from the last checkpoint with less."
            )
        return None

    def _less_memory(self) -> list[str]:
        """Return options that take less memory and are not in use."""
        options = self.trainer.hybrid_args
        choices = {
            "shorter sequences": True,
            "`memory=auto` (layers are streamed from the host)": not self.trainer.memory.streams,
            "`offload_activations=True`": not options.offload_activations,
            "`chunked_loss=on`": not self.trainer.loss_in_chunks,
            "`optimizer_states=8bit`": options.optimizer_states != "8bit",
        }
        return [name for name, possible in choices.items() if possible]

    # As a part of the run.

    def arrange(self, step: Step) -> None:
        """Note what will be computed in a step."""
        computed = step.batches if step.window is None else [batch for batch in step.window if batch is not None]
        self.begin_window(list(computed), step.items)
        self._laid_out = step.window is not None
        self._divisor = len(step.batches) if step.parts_add_up else None

    def end_step(self, step: Step) -> None:
        self.begin_window([])

    def summary(self) -> dict[str, Any]:
        return {"out_of_memory": list(self.events)}

    def state_dict(self) -> dict[str, Any]:
        return {"policy": asdict(self.policy), "events": self.events} if self.events else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the measures of the run that is resumed."""
        self.events = list(state["events"])
        if not self.retries:
            return
        vars(self.policy).update(state["policy"])
        logger.warning("The run ran out of memory before, and resumes with what fitted: %s.", self.policy)
        if self.policy.activation_checkpointing:
            if self.trainer.memory.streams:
                self.trainer.memory.recompute_all()
            else:
                self._checkpoint_activations()
        if self.policy.walk_by_micro_batch:
            self.trainer.memory.walk_by_micro_batch()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
