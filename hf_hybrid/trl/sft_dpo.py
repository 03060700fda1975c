"""TRL's supervised fine-tuning and preference optimisation in phases. This needs `pip install "hf-hybrid[trl]"`."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate.utils import send_to_device
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

from hf_hybrid.arguments import HybridArguments
from hf_hybrid.build import leave_out_leaps
from hf_hybrid.compat import trl_error
from hf_hybrid.config import HybridConfigBase
from hf_hybrid.leaps.probe import Losses, SequenceLosses, check_probe_set
from hf_hybrid.machine import LeapObstacleError, mixed_precision_of, native_bf16, sharding_of
from hf_hybrid.optimizers import optimizer_name, steps_in_backward
from hf_hybrid.part import Step
from hf_hybrid.plan.of_trainer import checkpointing
from hf_hybrid.recovery import sequences_in, split_batch
from hf_hybrid.rows.exchange import Exchange, seen_now
from hf_hybrid.rows.images import NAMES, encoder_of
from hf_hybrid.rows.merging import MergedRows
from hf_hybrid.rows.tree import IGNORED, Rows
from hf_hybrid.rows.windows import quiet_metrics
from hf_hybrid.run.fallbacks import Fallbacks
from hf_hybrid.run.trainer_view import overridden
from hf_hybrid.streaming.loss import ChunkedLossSwitch
from hf_hybrid.trainer import HybridTrainerMixin

try:
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
    from trl.trainer.utils import (
        FusedCausalLMOutput,  # noqa: F401  # of TRL 1.15 and newer: rows are shared in it
        use_adapter,
    )
except ImportError as error:
    raise trl_error(error) from error


class TRLConfigBase(HybridConfigBase):
    """The options and checks that the configs for TRL have in common."""

    plan_values = {"stream_embeddings": False}  # TRL multiplies with the head's weights without calling it
    chunked_by_trl = True

    def __post_init__(self):
        if self.bf16 is None and not self.fp16:  # by the hardware: TRL has it on, which fails where nothing can do it
            if self.use_cpu or torch.backends.mps.is_available():  # emulated on many
                self.bf16 = False
            elif (native := native_bf16()) is not None:
                self.bf16 = native
            else:
                self.bf16 = is_torch_bf16_gpu_available() or is_torch_xla_available()
        super().__post_init__()
        if self.chunked_loss == "on" and self.chunked_by_trl:
            raise ValueError(
                "`chunked_loss=on` changes the head of the model, past which TRL computes its loss, in chunks already. "
                "Leave `chunked_loss` out."
            )


@functools.cache
def hybrid_config(config_class: type) -> type[Any]:
    """
    Return a config of TRL's, say `RewardConfig`, with the options of [`HybridArguments`], for a trainer with
    [`HybridTrainerMixin`]. One default of the former differs, `bf16`, as in [`HybridSFTConfig`].
    """
    # A pickle knows this function and the class of TRL's: the class that it returns has no place in a module.
    methods = {"__reduce__": lambda config: (_of_kind, (config_class,), vars(config))}
    return make_dataclass(f"Hybrid{config_class.__name__}", [], bases=(TRLConfigBase, config_class), namespace=methods)


def _of_kind(config_class: type) -> Any:
    kind = hybrid_config(config_class)
    return kind.__new__(kind)


@dataclass
class HybridSFTConfig(TRLConfigBase, SFTConfig):
    """
    [`~trl.SFTConfig`] with the options of [`HybridArguments`]. One default of the former differs: `bf16` is on where
    the accelerator computes in bf16, as TRL has it everywhere, and off on a CPU, on MPS and on older GPUs.

    Raises:
        ValueError: As [`HybridConfig`], and for `chunked_loss=on`, which would change a head that TRL multiplies with
            by itself.
    """


@dataclass
class HybridDPOConfig(TRLConfigBase, DPOConfig):
    """
    [`~trl.DPOConfig`] with the options of [`HybridArguments`]. One default of the former differs, `bf16`, as in
    [`HybridSFTConfig`]. `padding_free` works.

    Raises:
        ValueError: As [`HybridConfig`], and for `padding_free=True` with `share_rows=off`.
    """

    padding_free: bool = field(
        default=False,
        metadata={
            "help": "Compute no padding, with any attention, also with enable_predict=False. share_rows does it, and "
            "computes a shared prompt once."
        },
    )

    @property
    def exactness(self) -> Literal["bits", "rounding"]:
        return "rounding" if self.padding_free else super().exactness

    def __post_init__(self):
        super().__post_init__()
        if self.padding_free and self.share_rows == "off":
            raise ValueError(
                "`padding_free=True` needs `share_rows`, which leaves padding out, and `share_rows=off` turns it off. "
                "Leave one of the two out."
            )
        if self.beta == 0 and "sft" not in self.loss_type:
            raise ValueError("`beta=0` multiplies all that these losses compare, so nothing is learned. Raise it.")
        if "robust" in self.loss_type and self.label_smoothing >= 0.5:
            raise ValueError(
                f"`label_smoothing={self.label_smoothing}` is the share of pairs with swapped labels, and the loss "
                "`robust` divides by 1 minus twice that share. Set it below 0.5."
            )


class _Recording:
    """A model that remembers its last output."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.outputs = model, None

    def __call__(self, *args, **kwargs):
        self.outputs = self.model(*args, **kwargs)
        return self.outputs


class _QuietLosses(SequenceLosses):
    """Probes do not change TRL's logged metrics, which its `compute_loss` collects."""

    trainer: Any  # one of TRL's, with what it keeps for itself

    def __call__(self, batch) -> Losses:
        with quiet_metrics(self.trainer):
            return super().__call__(batch)


class CompletionLosses(_QuietLosses):
    """
    Loss of a probe of [`HybridSFTTrainer`]: per sequence, or per packed row.

    Sequences of a batch are told apart by the log-probabilities that `compute_loss` got from the model; the router loss
    of a batch counts for each of them. Under another loss (`compute_loss_func`, label smoothing) they are evaluated one
    by one. Without padding a batch is one row, whose sequences follow each other.
    """

    def __init__(self, trainer):
        super().__init__(trainer)
        if trainer.compute_loss_func is not None or trainer.label_smoother is not None:
            self.from_logits = False  # also where a model that knows nothing yet has about the same loss

    def size(self, batch) -> int:
        if not self.trainer.padding_free or self.from_logits is False:
            return super().size(batch)
        return int(_second_tokens(batch).sum())

    def _losses(self, model, inputs) -> torch.Tensor:
        if self.from_logits is not False:
            recording = _Recording(model)
            loss = self.trainer.compute_loss(recording, dict(inputs))
            losses, counts, router = self._by_sequence(recording.outputs, inputs)
            if self.from_logits is None:
                self.from_logits = self._agrees(loss - router, losses, counts)
            if self.from_logits:
                return losses / counts.clamp(min=1) + router
        return self._one_by_one(model, inputs)

    def _by_sequence(self, outputs, inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
        """Summed loss and number of predicted tokens per sequence, and the router loss of the batch."""
        trainer, logs = self.trainer, outputs.log_probs.float()  # zero where there is no label
        losses = -logs * logs.exp() if trainer.args.loss_type == "dft" else -logs
        router = trainer.router_aux_loss_coef * outputs.aux_loss.float() if trainer.aux_loss_enabled else 0.0
        if not trainer.padding_free:
            return losses.sum(dim=1), outputs.label_mask.sum(dim=1), router
        seconds = _second_tokens(inputs)
        owner = (seconds.cumsum(0) - 1).clamp(min=0)[1:]  # of each predicted token; first ones carry no loss
        empty = losses.new_zeros(int(seconds.sum()))
        sums = (empty.index_add(0, owner, values[0].float()) for values in (losses, outputs.label_mask))
        return *sums, router


def _second_tokens(batch) -> torch.Tensor:
    """Mark the second token of each sequence of a batch without padding: a sequence of one token predicts nothing."""
    return batch["position_ids"][0] == 1


ACCURACIES = "rewards/accuracies"
"""TRL's metric of a batch of pairs: the share of those, of all processes, whose chosen completion has more reward."""


class PreferenceLosses(_QuietLosses):
    """
    Loss and accuracy of a probe of [`HybridDPOTrainer`] per pair of completions, by the trainer's own `compute_loss`,
    which collects the accuracy for the log.
    """

    def size(self, batch) -> int:
        return sequences_in(batch, blocks=2)  # of two rows each

    def __call__(self, batch) -> Losses:
        values = super().__call__(batch).values
        return Losses(values, list(itertools.islice(itertools.cycle(self._accuracies), len(values))))

    def _losses(self, model, inputs) -> torch.Tensor:
        losses = torch.stack([self._loss(model, pair) for pair in split_batch(inputs, 1, blocks=2)])
        self._accuracies = self.trainer._metrics["eval"][ACCURACIES]
        return losses


class _HeadOfTRL(ChunkedLossSwitch):
    """TRL computes the loss in chunks itself: nothing is installed."""

    def install(self, trainer) -> None:
        pass


# Rows that share. TRL gives a model padded rows and reads log-probabilities in their layout (rows/exchange.py).

MOST_MERGED = 1.5
"""
Memory of merged micro-batches, as a multiple of that of the largest padded one, where no plan counts on less and a
window can be computed again if memory runs out. Two micro-batches of pairs whose prompts are twice as long as their
completions take 4 thirds.
"""
_PAIRS = ("input_ids", "attention_mask", "completion_mask")


def options_of_rows(args: TrainingArguments) -> tuple[bool, str | None, bool]:
    """
    Return the arguments of [`Exchange`] for a trainer that computes losses from log-probabilities.

    TRL's `__init__` may compute some already, so only its options are known here.
    """
    options = args if isinstance(args, HybridArguments) else HybridArguments()
    off, why = options.share_rows == "off" or options.exactness == "bits", None
    if (sharding := sharding_of(args)) is not None:
        why = f"`{sharding}` wants equally many forward passes of all processes, and the first batch has more"
    elif (alpha := getattr(args, "neftune_noise_alpha", None)) is not None:
        why = f"`neftune_noise_alpha={alpha}` scales its noise by the length of a padded row"
    return off, why, mixed_precision_of(args) != "no"


def rows_of_pairs(batch: Mapping[str, torch.Tensor]) -> Rows:
    """Return what TRL gives a model for a batch of preference pairs."""
    ids, mask, completion = (batch[name] for name in _PAIRS)
    return ids, mask, ids.masked_fill(completion == 0, IGNORED)


def copy_pairs_ahead(rows: Exchange, step: Step) -> None:
    """Copy the micro-batches of a step to the host, which hold answers to prompts."""
    pairs = [
        (batch, on_host)
        for batch, on_host in zip(step.batches, step.on_host)
        if isinstance(batch, Mapping) and all(torch.is_tensor(batch.get(name)) for name in _PAIRS)
    ]
    known = [{name: batch[name] for name in (*_PAIRS, *NAMES) if name in batch} for batch, _ in pairs]
    there = [on_host for _, on_host in pairs]
    rows.copy_ahead([batch["input_ids"] for batch in known], map(rows_of_pairs, there), there, map(seen_now, known))


class PairRows(MergedRows):
    """Shares the rows of preference pairs, whose micro-batches are copied to the host together, and merged."""

    unforeseen = ("micro-batches that are merged may share more",)

    def rows_foreseen(self, batch: Any) -> Rows | None:
        return rows_of_pairs(batch) if all(torch.is_tensor(batch.get(name)) for name in _PAIRS) else None

    def begin_step(self, step: Step) -> None:
        super().begin_step(step)
        copy_pairs_ahead(self, step)


class TRLTrainerMixin(HybridTrainerMixin):
    """Common part of the trainers of this module: a `probe_dataset` in the form of the training set, and refusals."""

    _is_vision_dataset: bool
    more_inputs = {"fused_lm_head": True}  # TRL computes the head in chunks, on a GPU by kernels of its own
    loss_switch = _HeadOfTRL

    def __init__(self, *args, probe_dataset=None, **kwargs):
        super().__init__(*args, probe_dataset=probe_dataset, **kwargs)
        check_images(self)
        if self.has_phases and self._is_vision_dataset:
            reason = "`train_dataset` holds images, and leaps are verified on text alone."
            leave_out_leaps(self, LeapObstacleError(reason, "Train on text, or leave `direction` out."))
        if self.has_phases and probe_dataset is not None:
            self.probe_dataset = self._prepare_probe_set(probe_dataset)
            check_probe_set(self.probe_dataset)

    def _prepare_probe_set(self, dataset):
        """Return a probe set in the form in which TRL trains on its training set."""
        raise NotImplementedError

    @property
    def loss_in_chunks(self) -> bool:
        """Always: TRL never holds all logits in training."""
        return True


def config_for(args: Any, model: Any, kind: type, method: str) -> Any:
    """
    Return the config of a trainer: the one that it was given, or else one of `kind` with TRL's output folder
    (`Qwen2-0.5B-GRPO`). A hybrid config without the options of TRL's is refused.
    """
    plain = kind.__bases__[-1]
    if args is None:
        name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
        return kind(f"{name.split('/')[-1]}-{method}")
    if isinstance(args, HybridArguments) and not isinstance(args, plain):
        raise TypeError(
            f"`args` is a `{type(args).__name__}`, which lacks TRL's options. Make it a `{kind.__name__}`: "
            "every option of `HybridConfig` is there as well."
        )
    return args


LOOKED_AT = 16
"""Rows with images, spread over a data set, whose lengths are asked for."""


def check_images(trainer: Any) -> None:
    """Refuse a `max_length` that cuts through an image of some rows: TRL would end in the step that reaches one."""
    collator, encoder = copy.copy(trainer.data_collator), encoder_of(trainer.model)
    if encoder is None or (most := getattr(collator, "max_length", None)) is None or not trainer._is_vision_dataset:
        return
    collator.max_length = None
    for name in ("train_dataset", "eval_dataset"):
        data = getattr(trainer, name)
        if not hasattr(data, "__getitem__") or isinstance(data, dict):
            continue
        for number in range(0, len(data), max(len(data) // LOOKED_AT, 1)):
            ids = collator([dict(data[number])])["input_ids"]
            end = int(((ids == encoder.config.image_token_id) * torch.arange(1, ids.shape[1] + 1)).max())
            if end > most:
                raise ValueError(
                    f"`max_length={most}` cuts through an image: in row {number} of `{name}` images end with token "
                    f"{end:,}. Raise it, or cut no row with `max_length=None`."
                )


# Trainers. Each ignores one rule: TRL's `create_model_card` takes other arguments than `Trainer`'s, as ours does.


class HybridSFTTrainer(TRLTrainerMixin, SFTTrainer):  # ty: ignore[incompatible-method-override]
    """
    Drop-in for [`~trl.SFTTrainer`] that trains in phases, as [`HybridTrainer`] does.

    Data sets, chat templates, packing, completion-only and assistant-only losses, the router loss of mixtures of
    experts and the logged metrics are TRL's. Leaps are verified on the sequences (packed rows) of the next training
    batches.

    Args:
        model, args, positional, kwargs:
            As [`~trl.SFTTrainer`]; `args` is best a [`HybridSFTConfig`].
        probe_dataset (*optional*):
            As [`HybridTrainerMixin`], prepared as `train_dataset` is; also `parts` and `direction`.

    Raises:
        TypeError: If `args` is a hybrid config without TRL's options.
        ValueError: As [`HybridTrainerMixin`], and for images if a `direction` is named.

    Example:

    ```python
    from hf_hybrid import HybridSFTConfig, HybridSFTTrainer

    trainer = HybridSFTTrainer("Qwen/Qwen2.5-0.5B", HybridSFTConfig("out"), train_dataset=conversations)
    trainer.train()
    ```
    """

    sequence_losses = CompletionLosses
    args: SFTConfig
    processing_class: PreTrainedTokenizerBase | ProcessorMixin

    def __init__(self, model, args=None, *positional, **kwargs):
        super().__init__(model, config_for(args, model, HybridSFTConfig, "SFT"), *positional, **kwargs)

    def _prepare_probe_set(self, dataset):
        if self._skip_prepare_dataset:
            return dataset
        options = (self.processing_class, self.args, self.args.packing, self._formatting_func)
        return self._prepare_dataset(dataset, *options, "probe")


if TYPE_CHECKING:
    _OfReference = DPOTrainer  # what the mixin reads is in `KTOTrainer` too
else:
    _OfReference = object


def as_reference(trainer: Any) -> contextlib.AbstractContextManager[None]:
    """Context in which a trainer's model is its reference: without adapters, or with the copy that TRL made of them."""
    bare = trainer.accelerator.unwrap_model(trainer.model)
    return use_adapter(bare, "ref" if "ref" in bare.peft_config else None)


class ReferenceMixin(_OfReference):
    """Common part of trainers that compare a policy with a reference, which is evaluated where the plan has it."""

    args: DPOConfig
    rows: Any
    memory: Any
    _memory_option: str
    _memory_is_planned: bool
    _precomputes = False
    _beside = threading.local()
    """Of a walk's thread: whether the reference is computed beside it."""

    def __init__(self, *args, **kwargs):
        self._apart = Fallbacks("The reference is computed in a walk of its own (`memory`)")
        super().__init__(*args, **kwargs)
        if self._memory_option != "off" and self.precompute_ref_logps:
            args, train, evals = self.args, self.train_dataset, self.eval_dataset
            size = args.precompute_ref_batch_size
            self.train_dataset = self._precompute_ref_logps(train, "train", size or args.per_device_train_batch_size)
            of_evals = functools.partial(self._precompute_ref_logps, batch_size=size or args.per_device_eval_batch_size)
            if isinstance(evals, dict):
                self.eval_dataset = {name: of_evals(dataset, name) for name, dataset in evals.items()}
            elif evals is not None:
                self.eval_dataset = of_evals(evals, "eval")

    def _precompute_ref_logps(self, dataset, name, batch_size):
        if self._memory_option != "off" and not self._memory_is_planned:
            return dataset  # it is computed when the models are where they compute
        with self.memory.running():
            return super()._precompute_ref_logps(dataset, name, batch_size)

    @property
    def of_reference(self) -> tuple[tuple[str, ...], ...]:
        """Of each pass of the reference that goes beside the policy's, the names of what it tells of a batch."""
        beside = self.ref_model is None and not self._precomputes
        return (("ref_chosen_logps", "ref_rejected_logps"),) if beside else ()

    def passes_beside(self) -> int:
        return len(self.of_reference)

    @property
    def precompute_ref_logps(self) -> bool:
        """Whether batches hold log-probabilities of the reference: of the data, or those that are computed beside."""
        return self._precomputes or hasattr(self._beside, "reference")

    @precompute_ref_logps.setter
    def precompute_ref_logps(self, value: bool) -> None:
        self._precomputes = value

    def compute_loss(self, model, inputs, *args, **kwargs):
        found = {}
        for names in self.of_reference if self._goes_beside() else ():
            function = functools.partial(self._compute_of_reference, names, inputs)
            if (later := self.memory.beside(function, len(names))) is not None:
                found |= zip(names, later)
                self._beside.reference = True
        return super().compute_loss(model, {**inputs, **found} if found else inputs, *args, **kwargs)

    def _goes_beside(self) -> bool:
        """Whether passes of this micro-batch may go beside the one with gradients: no code of a user reads them."""
        if not (self.memory.streams and torch.is_grad_enabled()):
            return False
        own = overridden(self, "_compute_loss", "compute_ref_log_probs", "_compute_kl_logps")
        if own is not None and self.passes_beside():
            self._apart.cannot_be_exact(f"`{own}` is not TRL's")
        return own is None

    def _compute_of_reference(self, names, inputs):
        """Return those of [`of_reference`] that a pass tells."""
        return self.compute_ref_log_probs(self.ref_model or self.model, inputs)

    def compute_ref_log_probs(self, model, inputs):
        inputs = send_to_device(inputs, self.args.device)
        with self.rows.on(self.accelerator.unwrap_model(model)):
            return super().compute_ref_log_probs(model, inputs)


class HybridDPOTrainer(ReferenceMixin, TRLTrainerMixin, DPOTrainer):
    """
    Drop-in for [`~trl.DPOTrainer`] that trains in phases, as [`HybridTrainer`] does. It computes a prompt once for both
    of its completions (`share_rows`).

    A leap is verified on loss and accuracy of the next pairs, with the reference that TRL trains against.

    Arguments are those of [`~trl.DPOTrainer`], with a [`HybridDPOConfig`] as `args`; those beyond them, and what is
    raised, are as in [`HybridSFTTrainer`].

    Example:

    ```python
    from hf_hybrid import HybridDPOConfig, HybridDPOTrainer

    trainer = HybridDPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", args=HybridDPOConfig("out"), train_dataset=preferences)
    trainer.train()
    ```
    """

    sequence_losses = PreferenceLosses
    args: DPOConfig
    ref_model: torch.nn.Module | None
    processing_class: PreTrainedTokenizerBase | ProcessorMixin
    no_leaps_because = "preference pairs are trained on"
    trains_preferences = True
    blocks_of_rows = 2

    def __init__(self, model, ref_model=None, args=None, *positional, **kwargs):
        args = config_for(args, model, HybridDPOConfig, "DPO")
        self.rows = PairRows(*options_of_rows(args), compiles=args.torch_compile)
        padding_free = args.padding_free
        if padding_free:
            self.rows.worth = float("inf")
            self.rows.fallbacks = Fallbacks(
                "`padding_free=True` has no effect, and rows are computed padded (`share_rows`)",
                advice="Leave `padding_free` out, or what prevents it.",
            )
            if self.rows.reason_plain is not None:
                self.rows.fallbacks.cannot_be_exact(self.rows.reason_plain)
        vars(args)["padding_free"] = False  # TRL has none, and would warn that rows are padded
        try:
            super().__init__(model, ref_model, args, *positional, **kwargs)
        finally:
            vars(args)["padding_free"] = padding_free
        self.padding_free = padding_free
        self.rows.held = self._merged_memory

    def compute_loss(self, model, inputs, *args, **kwargs):
        own = overridden(self, "_compute_loss") or overridden(self, "compute_loss", below=HybridDPOTrainer)
        with self.rows.on(self.model, self.ref_model), self.rows.micro_batch(inputs, may_change=own is not None):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        takes_all = torch.is_grad_enabled() and self.rows.ends_window and torch.is_tensor(loss)
        return self.rows.with_what_waits(loss) if takes_all else loss

    def _merged_memory(self) -> float:
        """Return what merged micro-batches may hold, as a multiple of the largest padded one; 0: they stay apart."""
        if self.memory.streams:  # layers compute the rows of a window in one visit anyway
            return 0.0
        args, options = self.args, self.hybrid_args
        # A loss may ask for gradients of weights by itself, and a hook keep what a module returned.
        because, marks = self.run.step.acts, self.rows.facts_of(self.model).marks
        if (loss := overridden(self, "compute_loss", "_compute_loss")) is not None:
            because = f"`{loss}` may read more than the rows of one"
        if because is None and marks is not None and marks.hooks:
            because = f"a hook of yours (`{marks.hooks[0]!r:.60}`) sees each by itself"
        trained = (weight for group in self.optimizer.param_groups for weight in group["params"])
        if because is None and not all(weight.requires_grad for weight in trained):
            because = "a weight is frozen, and a pass of the reference may change that"  # as PEFT does
        if because is not None:
            self.rows.apart.cannot_be_exact(because)
        offloads = args.activation_offloading or options.offload_activations
        if because or offloads or options.weight_precision or steps_in_backward(optimizer_name(args)):
            return 0.0
        planned = checkpointing(args) == "auto" or options.vram_budget_gib is not None
        return MOST_MERGED if self.rows.repeats and not planned else 1.0

    def _prepare_probe_set(self, dataset):
        dataset: Any = self._prepare_dataset(dataset, self.processing_class, self.args, "probe")
        if self.precompute_ref_logps:
            batch_size = self.args.precompute_ref_batch_size or self.args.per_device_eval_batch_size
            dataset = self._precompute_ref_logps(dataset, "probe", batch_size)
        return dataset
