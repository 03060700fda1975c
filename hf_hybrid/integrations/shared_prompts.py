"""
A prompt that several completions share is computed once.

Preference optimisation needs the log-probabilities of two completions of a prompt, GRPO those of G. TRL gives the model
one row per completion, so the model computes the prompt twice, or G times:

    prompt | y1                                    prompt | y1 | y2
    prompt | y2             becomes one row
    2 (P + C) tokens                               P + 2 C tokens

In a causal transformer the result is the same. A token sees the tokens before it and nothing else, so the hidden
states of a prompt do not depend on what follows. The row needs three things:

- **Positions restart.** Every completion goes on where the prompt ended: a token keeps the position that it has in
  TRL's row.
- **A mask of four dimensions** `[rows, 1, query, key]` lets a completion see its prompt and itself, and not the others.
- **The last token of the prompt opens each completion.** The first token of a completion is predicted there. So that
  every token of the row predicts one token, the row is `[prompt without its last token, (last, y1), (last, y2), ...]`.
  In exchange the last token of each completion is left out, because it predicts nothing.

Log-probabilities are read from the shared row back into TRL's layout. Where two completions read the same one, autograd
adds up their gradients. TRL's loss then goes on as if nothing had happened: every loss type, the reference pass, PEFT
and metrics work as before. Gradients are those of TRL up to rounding, about 1e-6 in fp32.

More is shared than the prompt if completions begin alike: the shared part of a group is its longest common beginning.

**How many completions share a row, and how many prompts.** The linear layers of a model cost the same per token.
Attention under a mask costs the square of a row's width, whatever the mask hides. Long completions in one row would
therefore cost more attention than the prompt saves. On the other hand, prompts of different lengths that share a row
need less padding than rows of their own. `arrange` compares several arrangements with TRL's rows: up to 2, 4, ...
completions per prompt in a bundle, and the bundles spread over 1, 2, 4, ... rows. The cheapest is used.

**Where it does not work.** State-space layers and convolutions mix the tokens of a row in their own way, so completions
would see each other. A window of attention counts tokens of the row, so a row must fit into it. ALiBi and flash
attention take no such mask. Dropout would be drawn once where TRL draws it for each completion. `SharedPrompts` knows
reasons like these, and it compares the first batch of each model with TRL's rows. After a mismatch TRL's rows are used,
and a warning says why.

See "Accelerating Direct Preference Optimization with Prefix Sharing" (https://arxiv.org/abs/2410.20305).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_hybrid.machine import mixed_precision_of, sharding_of
from hf_hybrid.part import Part, Step
from hf_hybrid.recovery import is_out_of_memory

if TYPE_CHECKING:
    from hf_hybrid.run.run import Run
    from hf_hybrid.trainer import HybridTrainerMixin as _Trainer
else:
    _Trainer = object

logger = logging.getLogger(__name__)

Model = Any
"""A model of transformers, or a wrapper such as peft's that has its attributes."""
IGNORED = -100
"""Label of a token that nobody has to predict."""
WORTH = 0.95
"""TRL's rows are exchanged for rows that cost less than this share of them."""


# The batch, as TRL made it.


class Batch(NamedTuple):
    """
    One row per completion, on the host.

    Attributes:
        ids (`Tensor`): Tokens, `[batch, length]`, padded on either side.
        mask (`Tensor`): 1 where there is a token, 0 where there is padding.
        labels (`Tensor`): The tokens that are to be predicted, `IGNORED` elsewhere.
        ends (`list[int]`): Of each row, the column behind the last one that predicts a label; 0 without labels.
    """

    ids: Tensor
    mask: Tensor
    labels: Tensor
    ends: list[int]

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Batch:
        """Copy a batch to the host, in one transfer."""
        return copied_together([(input_ids, attention_mask, labels)])[0]


Rows = tuple[Tensor, Tensor, Tensor]
"""Tokens, mask and labels that TRL gives a model, each `[batch, length]`."""


def copied_together(batches: list[Rows]) -> list[Batch]:
    """Copy batches to the host in one transfer."""
    rows = [torch.stack([tensor.long() for tensor in batch]) for batch in batches]
    flat = torch.cat([tensor.flatten() for tensor in rows]).cpu()
    parts = flat.split([tensor.numel() for tensor in rows])
    made = []
    for tensor, part in zip(rows, parts, strict=True):
        ids, mask, labels = part.view(tensor.shape)
        columns = torch.arange(1, ids.shape[1])
        made.append(Batch(ids, mask, labels, (columns * predicted(labels)).amax(1).tolist()))
    return made


_PAIRS = ("input_ids", "attention_mask", "completion_mask")


def rows_of_pairs(batch: Mapping[str, Tensor]) -> Rows:
    """Return what TRL gives a model for a batch of preference pairs."""
    ids, mask, completion = (batch[name] for name in _PAIRS)
    return ids, mask, ids.masked_fill(completion == 0, IGNORED)


def rows_of_completions(batch: Mapping[str, Tensor]) -> Rows:
    """Return what TRL gives a model for a batch of prompts with a sampled completion each."""
    prompt, completion = batch["prompt_ids"], batch["completion_ids"]
    labels = completion.masked_fill(batch["completion_mask"] == 0, IGNORED)
    return (
        torch.cat([prompt, completion], dim=1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
        torch.cat([torch.full_like(prompt, IGNORED), labels], dim=1),
    )


def predicted(labels: Tensor) -> Tensor:
    """Which tokens predict a label: `[batch, length - 1]`, as each predicts the one behind it."""
    return labels[:, 1:] != IGNORED


def same_prompts(batch: Batch) -> list[list[int]]:
    """Group rows by their prompt, which is what stands before the first label. Rows without labels are left out."""
    columns = torch.arange(batch.ids.shape[1])
    first = (batch.labels != IGNORED).int().argmax(1)
    prompts = batch.ids.where(batch.mask.bool(), -1).where(columns < first[:, None], -2)
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts.unique(dim=0, return_inverse=True)[1].tolist()):
        if batch.ends[row]:
            groups.setdefault(prompt, []).append(row)
    return list(groups.values())


class Bundle(NamedTuple):
    """
    Rows of a batch that share their beginning.

    Attributes:
        rows (`list[int]`): Their numbers in the batch.
        columns (`list[Tensor]`): The columns that are computed: first the shared ones, then those of each row alone.
    """

    rows: list[int]
    columns: list[Tensor]

    @property
    def length(self) -> int:
        """Number of tokens to compute."""
        return sum(len(columns) for columns in self.columns)


def bundle(batch: Batch, rows: list[int]) -> Bundle:
    """Bundle rows: a column is shared up to the last one whose token and whose next token and label are common."""
    first = rows[0]
    alike = (batch.ids[rows] == batch.ids[first]) & (batch.labels[rows] == batch.labels[first])
    alike = (alike & (batch.mask[rows] == batch.mask[first])).all(0)
    common = max(int(alike.long().cumprod(0).sum()) - 1, 0)
    end = max(batch.ends[row] for row in rows)
    columns = [batch.mask[first, : min(common, end)].nonzero()[:, 0]]
    columns += [common + batch.mask[row, common : batch.ends[row]].nonzero()[:, 0] for row in rows]
    return Bundle(rows, columns)


def bundles(batch: Batch, groups: list[list[int]], most: int) -> list[Bundle]:
    """Bundle the rows of each group, at most `most` of them together, in parts of about equal size."""
    found = []
    for group in groups:
        parts = -(-len(group) // most)
        found += [bundle(batch, group[part::parts]) for part in range(parts)]
    return found


# The arrangement.


def spread(lengths: list[int], rows: int) -> tuple[list[list[int]], int]:
    """
    Spread items over rows so that the longest row is short: the longest item first, each into the shortest row.

    Returns:
        The items (indices) of each row, and the length of the longest row.
    """
    filled: list[list[int]] = [[] for _ in range(rows)]
    sums = [0] * rows
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        row = sums.index(min(sums))
        filled[row].append(item)
        sums[row] += lengths[item]
    return filled, max(sums)


def doubling(end: int) -> list[int]:
    """Return 1, 2, 4, ... and `end`."""
    return sorted({2**power for power in range(end.bit_length()) if 2**power < end} | {end})


def arrange(batch: Batch, even: float, window: float = float("inf")) -> list[list[Bundle]] | None:
    """
    Find the cheapest arrangement of a batch in which prompts are shared.

    Args:
        batch ([`Batch`]):
            As TRL made it.
        even (`float`):
            Width of a row, in tokens, at which its attention costs as much as its linear layers. A row of width n costs
            `n + n^2 / even`.
        window (`float`):
            Most tokens of a row.

    Returns:
        The bundles of each row; `None` if nothing saves enough, see `WORTH`.
    """

    def cost(rows: int, width: int) -> float:
        return rows * (width + width**2 / even)

    if (predicted(batch.labels) & (batch.mask[:, :-1] == 0)).any():
        return None  # a completion without a prompt, predicted from padding
    groups = same_prompts(batch)
    largest = max(map(len, groups), default=0)
    best, cheapest = None, WORTH * cost(*batch.ids.shape)
    for most in doubling(largest)[1:]:
        found = bundles(batch, groups, most)
        lengths = [bundle.length for bundle in found]
        for count in doubling(len(found)):
            filled, width = spread(lengths, count)
            if width <= window and cost(count, width) < cheapest:
                cheapest = cost(count, width)
                best = [[found[item] for item in items] for items in filled]
    return best


class SharedRows(NamedTuple):
    """
    Rows that take the place of TRL's, on the host. All of `[rows, width]` but the last two.

    Attributes:
        ids (`Tensor`): The token that each slot computes.
        positions (`Tensor`): Its position.
        labels (`Tensor`): The token that it predicts, or `IGNORED`.
        group (`Tensor`): Number of its bundle; -1 for padding.
        part (`Tensor`): 0 for what a bundle shares, and one number for each of its completions.
        slots (`Tensor`): Where each token of the batch is predicted, `[batch, length - 1]`: row times width plus slot.
        predicted (`Tensor`): Whether it is, `[batch, length - 1]`.
    """

    ids: Tensor
    positions: Tensor
    labels: Tensor
    group: Tensor
    part: Tensor
    slots: Tensor
    predicted: Tensor

    def readable_on(self, device: torch.device) -> SharedRows:
        """Return the same with the last two on a device, where values of the model are read."""
        slots, predicted = (tensor.to(device, non_blocking=True) for tensor in (self.slots, self.predicted))
        return self._replace(slots=slots, predicted=predicted)

    @property
    def tokens(self) -> int:
        """Number of tokens that are computed."""
        return int((self.group >= 0).sum())


def assemble(batch: Batch, rows: list[list[Bundle]]) -> SharedRows:
    """Lay out an arrangement of a batch."""
    length = batch.ids.shape[1]
    shape = len(rows), max(sum(bundle.length for bundle in row) for row in rows)
    source, part, group = (torch.full(shape, value) for value in (0, 0, -1))
    slots = torch.zeros_like(batch.ids)
    numbers = itertools.count()
    for index, row in enumerate(rows):
        end = 0
        for bundle in row:
            number = next(numbers)
            readers = [bundle.rows, *([row] for row in bundle.rows)]  # of the shared part, and of each completion
            for which, columns in enumerate(bundle.columns):
                begin, end = end, end + len(columns)
                source[index, begin:end] = readers[which][0] * length + columns
                group[index, begin:end], part[index, begin:end] = number, which
                slots[torch.tensor(readers[which])[:, None], columns] = index * shape[1] + torch.arange(begin, end)
    slots, wanted = slots[:, :-1], predicted(batch.labels)
    labels = torch.full(shape, IGNORED)
    labels.view(-1)[slots[wanted]] = batch.labels[:, 1:][wanted]
    return SharedRows(batch.ids.flatten()[source], source % length, labels, group, part, slots, wanted)


def visible(group: Tensor, part: Tensor) -> Tensor:
    """Return whether a slot sees another, `[rows, 1, query, key]`: earlier ones of its part and of the shared one."""
    index = torch.arange(group.shape[1], device=group.device)
    seen = (group[:, :, None] == group[:, None]) & ((part[:, None] == 0) | (part[:, :, None] == part[:, None]))
    return (seen & (index[:, None] >= index))[:, None]


def read(values: Tensor, rows: SharedRows) -> Tensor:
    """Bring values of slots `[rows, width]` into the layout of the batch `[batch, length - 1]`; 0 without a label."""
    slots, wanted = rows.slots.to(values.device), rows.predicted.to(values.device)
    return values.flatten()[slots].masked_fill(~wanted, 0)


# Models.


def apart(plain: Tensor, shared: Tensor, predicted: Tensor) -> float:
    """Return the mean difference of two sets of log-probabilities as a share of their spread (mean deviation)."""
    predicted = predicted.to(plain.device)
    plain, shared = plain[predicted].double(), shared[predicted].double()
    spread = (plain - plain.mean()).abs().mean().clamp(min=1e-3)
    return ((shared - plain).abs().mean() / spread).item()


def even_width(model: Model) -> float:
    """
    Return the width of a row, in tokens, at which its attention costs as much as its linear layers.

    Forward, a token costs 2 operations per weight, and a pair of tokens 4 per layer, head and dimension of a head.
    """
    config = model.config.get_text_config()
    weights = sum(parameter.numel() for parameter in model.parameters()) - model.get_input_embeddings().weight.numel()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return weights / (2 * config.num_hidden_layers * heads * size)


_BATCH = ("input_ids", "attention_mask", "labels")
_ROUTER = "the router loss counts every token of TRL's rows"
TOLERANCES = {False: 1e-3, True: 0.1}
"""Most difference of the first batch, see [`apart`], in fp32 and in half precision."""
_FROM_MASK = ("opt", "biogpt")
"""Models that count positions in the mask of two dimensions."""


def window_of(model: Model) -> float:
    """Return how many tokens of a row the layers look back at least."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["window"]
    if not getattr(config, "use_sliding_window", True) or set(kinds) == {"full_attention"}:
        return float("inf")
    names = ("sliding_window", "attention_chunk_size", "window_size")
    return min((size for name in names if isinstance(size := getattr(config, name, None), int)), default=float("inf"))


def why_not(model: Model) -> str | None:
    """Return why a model cannot share prompts, if that is known without running it."""
    config = model.config.get_text_config()
    adapter = getattr(model, "active_peft_config", None)
    kinds = {
        kind
        for kind in getattr(config, "layer_types", None) or ()
        if kind.startswith("linear") or "attention" not in kind
    }
    if adapter is not None and (adapter.is_prompt_learning or getattr(adapter, "alora_invocation_tokens", None)):
        return f"adapters of the kind {adapter.peft_type.value} act on places of a row"
    if config.is_encoder_decoder:
        return "the model has an encoder"
    if getattr(model, "_is_stateful", False) or kinds:
        return f"it has layers with a state that runs along the row ({', '.join(sorted(kinds)) or config.model_type})"
    if config._attn_implementation not in ("eager", "sdpa"):
        return f'`attn_implementation="{config._attn_implementation}"` takes no mask of four dimensions (`"sdpa"` does)'
    if config.model_type in _FROM_MASK:
        return f"`{config.model_type}` takes positions from the mask"
    if getattr(config, "output_router_logits", False):
        return _ROUTER
    return None


def dropout_of(model: nn.Module) -> float:
    """Return the largest probability of dropout in a model."""
    rates = [m.p if isinstance(m, nn.Dropout) else getattr(m, "attention_dropout", 0.0) for m in model.modules()]
    return max((rate for rate in rates if isinstance(rate, float)), default=0.0)


# Sharing.


def inputs_of(model: Model, rows: SharedRows, device: torch.device) -> dict[str, Tensor | None]:
    """Return what a model takes for shared rows, in place of `input_ids`, `attention_mask` and `labels`."""
    ids, positions, labels, group, part = torch.stack(rows[:5]).to(device, non_blocking=True)
    mask = visible(group, part)
    if model.config.get_text_config()._attn_implementation == "eager":  # adds the mask
        hidden = torch.finfo(model.dtype).min
        mask = torch.zeros(mask.shape, dtype=model.dtype, device=device).masked_fill(~mask, hidden)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": None, "shift_labels": labels}


@dataclass
class _Known:
    """What was found out about a model: `why` it computes TRL's rows (`None`: it need not), or its measures."""

    why: str | None
    even: float = 0.0
    window: float = 0.0
    compared: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> _Known:
        try:
            why = why_not(model)
            return cls(why) if why else cls(None, even_width(model), window_of(model))
        except (AttributeError, TypeError) as error:  # of a model with a config of its own
            return cls(f"its config does not tell how large attention is ({error})")


class SharedPrompts(Part):
    """
    Lets models compute shared prompts once, where TRL asks them for log-probabilities.

    As a part of the run it counts `tokens` of the passes for log-probabilities on this process (as TRL has them,
    without padding) and `tokens_shared` (those not computed). `plain_prompts_because` in the summary says why a prompt
    was computed once per completion.

    While [`on`] is open, hooks of torch exchange the inputs and the outputs of a model. TRL's code notices neither.

    Args:
        off (`bool`): Do nothing.
        why_plain (`str`, *optional*): Why no prompt is shared in this run.
        half_precision (`bool`): Whether models compute in bf16 or fp16.

    Attributes:
        tokens (`int`): Tokens of TRL's rows so far, without padding.
        tokens_shared (`int`): Those of them that were not computed.
        plain_because (`str`, *optional*): Why the last batch that was not shared was not.
    """

    name = "shared_prompts"

    def __init__(self, off: bool = False, why_plain: str | None = None, half_precision: bool = False):
        self.off, self.why_plain, self.half_precision = off, why_plain, half_precision
        self.tokens = self.tokens_shared = 0
        self._counts_before: dict[str, int] | None = None
        """The counters before the step under way."""
        self.plain_because: str | None = None
        self._known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
        self._told: set[str] = set()
        self._rows: SharedRows | None = None
        self._copied: list[tuple[weakref.ref[Tensor], Batch]] = []
        self._computed: Tensor | None = None
        self._comparing = False

    @property
    def may_share(self) -> bool:
        """Whether prompts may be shared, as far as is known."""
        return not self.off and self.why_plain is None

    @contextlib.contextmanager
    def on(self, *models: nn.Module | None) -> Generator[None]:
        """Share the prompts of the batches that models get inside the context."""
        handles = []
        for model in models:
            if model is None or self.off:
                continue
            handles.append(model.register_forward_pre_hook(self._before, with_kwargs=True))
            handles.append(model.register_forward_hook(self._after))
        try:
            yield
        finally:
            self._rows = None
            for handle in handles:
                handle.remove()

    def begin(self, run: Run) -> None:
        self.tokens = self.tokens_shared = 0

    def begin_step(self, step: Step) -> None:
        self._counts_before = self.counts()
        pairs = [
            batch
            for batch in step.batches
            if isinstance(batch, Mapping) and all(torch.is_tensor(batch.get(name)) for name in _PAIRS)
        ]
        self.copy_ahead(pairs, rows_of_pairs, known_by="input_ids")

    def end_step(self, step: Step) -> None:
        self._counts_before = None

    def counts(self) -> dict[str, int]:
        """Return the counters."""
        return {"tokens": self.tokens, "tokens_shared": self.tokens_shared}

    def count_from(self, counts: dict[str, int]) -> None:
        """Go on counting from what [`counts`] returned."""
        self.tokens, self.tokens_shared = counts["tokens"], counts["tokens_shared"]

    def summary(self) -> dict[str, Any]:
        return {**self.counts(), "plain_prompts_because": self.plain_because}

    def state_dict(self) -> dict[str, int]:
        counts = self.counts() if self._counts_before is None else self._counts_before
        return counts if counts["tokens"] else {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count_from(state)

    def _before(self, model: nn.Module, args: tuple, inputs: dict[str, Any]):
        """Exchange TRL's rows for shared ones."""
        if self._comparing or not inputs.get("fused_lm_head") or any(inputs.get(name) is None for name in _BATCH):
            return None
        batch = self._on_host(inputs)
        tokens = int(batch.mask.sum())
        self.tokens += tokens
        why = self._why_not(model, inputs)
        if why is None:
            rows, why = self._share(model, batch, inputs)
        if why is not None:
            self._tell(why)
        if why is not None or rows is None:
            return None
        self.tokens_shared += tokens - rows.tokens
        self._rows = rows = rows.readable_on(inputs["input_ids"].device)
        return args, {**inputs, **inputs_of(model, rows, inputs["input_ids"].device)}

    def copy_ahead(self, batches: Sequence[Mapping], rows: Callable[[Mapping], Rows], known_by: str) -> None:
        """
        Copy the batches of a step to the host at once: the host waits for the device at every copy.

        Args:
            batches (`Sequence[Mapping]`): As the trainer gets them.
            rows (`Callable`): From a batch to what a model will get of it: [`rows_of_pairs`], [`rows_of_completions`].
            known_by (`str`): Name of the tensor that a model will get, or of that of [`computing`].
        """
        self._copied = []
        if self.may_share and batches:
            copies = copied_together([rows(batch) for batch in batches])
            self._copied = [(weakref.ref(batch[known_by]), copy) for batch, copy in zip(batches, copies, strict=True)]

    @contextlib.contextmanager
    def computing(self, tensor: Tensor) -> Generator[None]:
        """Inside, a model gets tokens that TRL has just put together. Their copy on the host is known by `tensor`."""
        self._computed = tensor
        try:
            yield
        finally:
            self._computed = None

    def _on_host(self, inputs: dict[str, Any]) -> Batch:
        """Return a batch on the host: as it was copied ahead, or for another pass, or else copied now."""
        known_by = inputs["input_ids"] if self._computed is None else self._computed
        for seen, batch in self._copied:
            if seen() is known_by:
                return batch
        batch = Batch.of(*(inputs[name] for name in _BATCH))
        self._copied = [(weakref.ref(known_by), batch)]
        return batch

    def _after(self, model: nn.Module, args: tuple, outputs):
        """Exchange the values of shared rows for those of TRL's."""
        if self._comparing or self._rows is None:
            return None
        rows, self._rows = self._rows, None
        return type(outputs)(**{name: read(values, rows) for name, values in outputs.items() if values.dim() == 2})

    def _why_not(self, model: nn.Module, inputs: dict[str, Any]) -> str | None:
        """Return why the batch at hand is computed in TRL's rows, if that is known beforehand."""
        if self.why_plain is not None:
            return self.why_plain
        if others := [name for name, value in inputs.items() if torch.is_tensor(value) and name not in _BATCH]:
            return f"a batch holds `{others[0]}` beside tokens"
        if inputs.get("output_router_logits"):
            return _ROUTER
        if model.training and (rate := dropout_of(model)) > 0:
            return f"dropout ({rate:g}) would be drawn once for all completions of a prompt"
        if model not in self._known:
            self._known[model] = _Known.of(model)
        return self._known[model].why

    def _share(self, model: nn.Module, batch: Batch, inputs: dict[str, Any]) -> tuple[SharedRows | None, str | None]:
        """Return the shared rows of a batch, `None` if nothing is saved; or why there are none."""
        known = self._known[model]
        arrangement = arrange(batch, known.even, known.window)
        if arrangement is None:
            narrow = known.window < batch.ids.shape[1] and arrange(batch, known.even) is not None
            return None, f"layers look back {known.window} tokens, fewer than a row has" if narrow else None
        rows = assemble(batch, arrangement)
        if not known.compared:
            known.compared, self.why_plain = True, self._compare(model, inputs, rows)
        return rows, self.why_plain

    def _compare(self, model: nn.Module, inputs: dict[str, Any], rows: SharedRows) -> str | None:
        """Compare log-probabilities of shared rows with those of TRL's, and return why they are not the same."""
        self._comparing = True
        try:
            with torch.no_grad():
                plain = model(**inputs).log_probs
                try:
                    changed = {**inputs, **inputs_of(model, rows, inputs["input_ids"].device)}
                    shared = read(model(**changed).log_probs, rows)
                except Exception as error:
                    if is_out_of_memory(error):
                        raise
                    return f"the model does not take them ({type(error).__name__}: {error})"
        finally:
            self._comparing = False
        half = self.half_precision or model.dtype in (torch.float16, torch.bfloat16)
        difference, most = apart(plain, shared, rows.predicted), TOLERANCES[half]
        if difference <= most:
            return None
        return (
            f"log-probabilities of the first batch are {difference:.1e} of their spread away from those of TRL's rows, "
            f"more than {most:g}"
        )

    def _tell(self, why: str) -> None:
        self.plain_because = why
        if why not in self._told:
            logger.warning("Shared prompts are computed once per completion, as TRL does: %s.", why)
            self._told.add(why)


# Trainers.


class SharedPromptsMixin(_Trainer):
    """
    Part of trainers that share prompts: `self.shared_prompts` is a part of their runs.

    The trainer calls [`_share_prompts`] before TRL's `__init__`, which may compute log-probabilities already, and opens
    `self.shared_prompts.on(...)` around what computes them.
    """

    def _share_prompts(self, args: Any) -> None:
        """Make `self.shared_prompts` as the options `args` (`None`: defaults) have it."""
        off, why = getattr(args, "share_prompt", "auto") == "off", None
        if (sharding := sharding_of(args)) is not None:
            why = f"`{sharding}` wants equally many forward passes of all processes, and the first batch has more"
        elif getattr(args, "torch_compile", False):
            why = "`torch_compile=True` would compile anew for each arrangement"
        self.shared_prompts = SharedPrompts(off, why, half_precision=mixed_precision_of(args) != "no")

    def own_parts(self) -> list[Part]:
        return [*super().own_parts(), self.shared_prompts]
