"""
TRL's GRPO and RLOO without the rows whose gradient is zero. This needs `pip install "hf-hybrid[trl]"`.

Why a row can be left out. GRPO samples several completions per prompt, a row each. The advantage of a row says how much
better its reward is than the mean of its group. If a prompt is so easy or so hard that all completions get the same
reward, every advantage of the group is zero. The loss of a row is a sum over its tokens of

    advantage * f(log-probabilities, sign of the advantage)

so its value and its gradient are exactly zero. TRL computes forward and backward of such rows anyway. In TRL the
advantage is the reward minus a rounded mean: in fp32 the mean of eight rewards of 0.1 is not 0.1. TRL divides the
remainder by a standard deviation of almost zero, and AdamW makes steps of full size from it. So if all rewards of a
group are the same number, the advantage is set to zero here (`equal_rewards`). A row without a token in the loss (a
truncated completion with `mask_truncated_completions=True`) has no gradient either.

What is computed instead. TRL divides a generation batch into micro-batches and collects the gradients of one
accumulation window for each optimizer step. Here the rows with an advantage are taken out of the micro-batches of a
window and packed into as few new ones as they fill. Rows of the same prompt are put together, so the prompt can be
computed once (rows/exchange.py). The other calls of `training_step` return a loss of zero and compute nothing. A row
never leaves its window, so each row contributes to the same optimizer step as in TRL, also with several
`num_iterations` or a `steps_per_generation` of its own. A window may need completions that are not generated before its
first micro-batch is over; then each part of the window that shares a generation batch is planned by itself.

    TRL's window             advantages: ( 0 0 a b ) ( 0 0 0 0 ) ( c 0 0 0 ) ( 0 d e 0 )      4 backward passes
    this one                 zero loss   zero loss   ( a b c ) ( d e )                       2 backward passes

Why the gradient stays the same. TRL averages over the rows or the tokens of a micro-batch, or divides by a number that
belongs to the generation batch. Let `R` be the rows and `T` the tokens of the micro-batch that a row comes from, and
`r`, `t` those of the new one:

| `loss_type` | divided by | factor |
|---|---|---|
| `dapo`, `cispo`, `vespo` | tokens of the generation batch | 1 |
| `grpo`, `dr_grpo`, `luspo`, `sapo`, and RLOO | rows of the micro-batch | r / R |
| `bnpo` | tokens of the micro-batch | t / T |

The advantage of each row is multiplied by the factor. Every loss above scales with the advantage (`f` depends on its
sign alone, and the minimum of two products with it scales too), so each row gets the weight that it has in TRL.

A window without rows that count still makes its step, with gradients of zero: momentum, weight decay and the schedule
go on as in TRL. Parameters that a left-out row would have reached get a zero gradient in place of none.

Rewards first. TRL needs log-probabilities of the sampling policy if completions are trained on in several steps or come
from vLLM. It computes them for all rows before it calls the reward functions. Here the reward functions are called when
TRL starts to compute the log-probabilities, once and with TRL's arguments, and TRL gets the rewards when it asks for
them ([`GenerationBatch`]). So rows of groups with equal rewards are left out of this pass too, and their places hold
zeros. No computation with a gradient reads them. With vLLM they hold NaN until TRL has compared them with vLLM's. TRL
reads that as log-probabilities that vLLM could not give. So the importance ratio is 1, and the metrics of the
difference are those of the computed rows.

Several processes exchange gradients and metrics in each micro-batch. They agree on the number of rows, and a process
with fewer rows adds rows without advantage.

Dropout draws for each token, so rows are left out under it too. A prompt that is computed once draws its masks once for
its completions: each row has the distribution of TRL's (rows/exchange.py), but its random numbers are others. Where a
number belongs to several rows (LayerDrop), every row is computed; randomness.py finds out.

Where the result would not be exact, every row is computed, and the log says why; see `_reason_not_left_out`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hf_hybrid.compat import trl_error
from hf_hybrid.machine import PendingRead
from hf_hybrid.rows.tree import IGNORED, Rows

try:
    from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid
except ImportError as error:
    raise trl_error(error) from error

Batch = dict[str, Any]
"""A micro-batch of TRL: tensors with one row per completion, and scalars of the generation batch."""

# Arithmetic.

Mean = Literal["items", "rows", "tokens"]
"""What a loss is divided by: a number of the generation batch, or the rows or tokens of the micro-batch."""

MEAN_OF_LOSS: dict[str, Mean] = {
    "dapo": "items",
    "cispo": "items",
    "vespo": "items",
    "grpo": "rows",
    "dr_grpo": "rows",
    "luspo": "rows",
    "sapo": "rows",
    "bnpo": "tokens",
}


def tokens_in_loss(batch: Batch) -> Tensor:
    """Return the mask of the tokens that the loss reads, shape [rows, completion length]."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def rows_that_count(batch: Batch) -> Tensor:
    """Return which rows have an advantage on a token in the loss, as booleans of shape [rows]."""
    advantages = batch["advantages"]
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    return (advantages * tokens_in_loss(batch)).ne(0).any(dim=1)


def total_rewards(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the rewards of each row, shape [rows]; NaN where no function gave one."""
    return (rewards * weights).nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), float("nan"))


def rewarded_alike(rewards: Tensor, group: int) -> Tensor:
    """
    Return which rows belong to a group all of whose rewards are the same number, as booleans of shape [rows].

    `rewards` are those of all rows, shape [rows], with the `group` of a prompt one after the other; NaN for none.
    """
    groups = rewards.view(-1, group)
    least = groups.where(~groups.isnan(), float("inf")).amin(dim=1)
    most = groups.where(~groups.isnan(), float("-inf")).amax(dim=1)
    return (least >= most).repeat_interleave(group)  # also where there is none


def rows_of_completions(batch: Batch) -> Rows:
    """Return what TRL gives a model for a batch of prompts with a sampled completion each."""
    prompt, completion = batch["prompt_ids"], batch["completion_ids"]
    labels = completion.masked_fill(batch["completion_mask"] == 0, IGNORED)
    return (
        torch.cat([prompt, completion], dim=1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
        torch.cat([torch.full_like(prompt, IGNORED), labels], dim=1),
    )


READ = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages")
"""What a plan reads of a micro-batch, if it is there."""
ON_HOST = "on_host"
"""Key of a micro-batch for the same on the host, side by side: [rows, columns] in fp64."""


def on_host(batches: list[Batch]) -> Batch:
    """Return on the host what a plan reads of micro-batches, one after the other: what is not there yet is copied."""
    first = batches[0]
    names = [name for name in READ if name in first]
    widths = [first[name].shape[1] if first[name].dim() > 1 else 1 for name in names]
    if ON_HOST in first:
        beside = [batch[ON_HOST] for batch in batches]
    else:
        values = [[batch[name].double().view(-1, width) for name, width in zip(names, widths)] for batch in batches]
        beside = [torch.cat(of_batch, dim=1) for of_batch in values]
    together = dict(zip(names, torch.cat(beside).cpu().split(widths, dim=1)))
    here: Batch = {name: value.to(first[name].dtype) for name, value in together.items()}
    return {**here, "advantages": here["advantages"].view(-1, *first["advantages"].shape[1:])}


def take(batches: list[Batch], rows: Tensor) -> Batch:
    """
    Return some rows of micro-batches of one generation batch, with the images that stand in them. `rows` are their
    indices on the host, counted through all micro-batches.
    """
    batches = [*map(split_pixel_values_by_grid, batches)]  # where images may be lists of those of rows
    found, tensors = dict(batches[0]), filter(torch.is_tensor, batches[0].values())
    places = rows.to(next(tensors, rows).device, non_blocking=True)
    for name, value in batches[0].items():  # scalars are the same for the whole generation batch
        parts: Any = [batch[name] for batch in batches]
        if list in map(type, parts):
            entries = [entry for part in parts for entry in (part if isinstance(part, list) else part.split(1))]
            found[name] = [entries[row] for row in rows.tolist()]
        elif isinstance(value, Tensor) and value.dim() and name != ON_HOST:
            found[name] = torch.cat(parts)[places]
    return unsplit_pixel_values_by_grid(found)


def sums_of_images(batches: list[Batch]) -> Tensor:
    """Return the sum of the pixels of each row, [rows, 1]: where it is another one, so is the prompt."""
    pixels = [of_row for batch in map(split_pixel_values_by_grid, batches) for of_row in batch["pixel_values"]]
    return torch.stack([of_row.double().sum() for of_row in pixels])[:, None].cpu()


def rebin(batches: list[Batch], rows: Tensor, count: int, mean: Mean) -> list[Batch]:
    """
    Put rows of several micro-batches into `count` others, at most one per row, each with the weight that it had.

    `batches` are of one generation batch and have equally many rows. `rows` has the indices of those to keep, counted
    through all micro-batches, shape [rows], on the host.
    """
    size = len(batches[0]["advantages"])
    tokens_before = torch.stack([tokens_in_loss(batch).sum().clamp(min=1) for batch in batches])
    rebinned = []
    for part in rows.tensor_split(count):
        batch = take(batches, part)
        advantages = batch["advantages"]
        if mean == "tokens":
            before = tokens_before[(part // size).to(advantages.device, non_blocking=True)]
            weight = tokens_in_loss(batch).sum() / before
            advantages = advantages * weight.to(advantages.dtype).view(-1, *[1] * (advantages.dim() - 1))
        elif mean == "rows":
            advantages = advantages * (len(part) / size)
        rebinned.append({**batch, "advantages": advantages})
    return rebinned


# State.


class ExactSkips:
    """
    Plans the micro-batches of each accumulation window, whose loss is divided by `mean`.

    `counts` says which rows of a micro-batch count, see [`rows_that_count`]. `agree` returns the largest of the numbers
    that all processes pass.
    """

    def __init__(self, mean: Mean, counts: Callable[[Batch], Tensor], agree: Callable[[int], int]):
        self.mean, self.counts, self.agree = mean, counts, agree
        self.planned: deque[Batch | None] = deque()
        """The next micro-batches; `None` where nothing is computed."""
        self.computed: list[Batch] = []
        """Of those that were planned last, the ones that are computed."""
        self.on_host: list[Batch] = []
        """On the host, what was read of these."""
        self._reached: dict[torch.nn.Parameter, bool] = {}
        """Whether a parameter got a gradient, for those that were trained when something was computed."""

    def plan(self, batches: list[Batch], *, at_least: int, leave_out: bool, by_prompt: bool) -> dict[str, int]:
        """
        Plan the next micro-batches in place of TRL's `batches`, which are of one generation batch and one window.
        Return what the run counts: rows, those not computed, and micro-batches without any.

        The computed ones come last: processes exchange gradients in the last backward pass of a window. At least
        `at_least` of them are computed, each with a row. With `leave_out` rows that do not count are left out, with
        `by_prompt` rows of the same prompt are put together.
        """
        here = on_host(batches)
        counts = self.counts(here) if leave_out else torch.ones(len(here["advantages"]), dtype=torch.bool)
        total, size = len(counts), len(counts) // len(batches)
        needed = max(self.agree(int(counts.sum())), at_least)
        computed, rows, count = list(batches), torch.arange(total), len(batches)
        if needed < total or by_prompt:
            rows = torch.argsort(counts.logical_not().int(), stable=True)[:needed].sort().values
            if by_prompt:
                prompts = here["prompt_ids"]
                if "pixel_values" in batches[0]:
                    prompts = torch.cat([sums_of_images(batches), prompts], dim=1)  # first those on one image
                rows = rows[prompts.unique(dim=0, return_inverse=True)[1][rows].argsort(stable=True)]
            count = max(-(-needed // size), at_least)
            computed = rebin(batches, rows, count, self.mean) if count else []
        parts, avoided = rows.tensor_split(count) if count else (), len(batches) - count
        self.computed, self.planned = computed, deque([*[None] * avoided, *computed])
        self.on_host = [{name: here[name][part] for name in here} for part in parts]
        return {"rows": total, "rows_skipped": total - needed, "backward_passes_avoided_exactly": avoided}

    def knows(self, model: torch.nn.Module) -> bool:
        """Whether a pass has shown which of the parameters that are trained now get gradients."""
        for weight in model.parameters():
            if weight.requires_grad and weight not in self._reached:
                return False
        return True

    def reached(self, model: torch.nn.Module) -> dict[str, bool]:
        """Return for a checkpoint what passes have shown of the parameters, by name."""
        return {name: self._reached[weight] for name, weight in model.named_parameters() if weight in self._reached}

    def take_up(self, model: torch.nn.Module, reached: dict[str, bool]) -> None:
        """Take up what [`reached`] returned."""
        self._reached |= {weight: reached[name] for name, weight in model.named_parameters() if name in reached}

    def fill_gradients(self, model: torch.nn.Module) -> None:
        """Give a zero gradient to trained parameters that computing the other rows would have given one."""
        trained, computed = [], False
        for weight in model.parameters():
            if weight.requires_grad:
                trained.append(weight)
                computed = computed or weight.grad is not None
        for weight in trained:
            if computed:
                self._reached[weight] = weight.grad is not None or self._reached.get(weight, False)
            if weight.grad is None and self._reached.get(weight):
                weight.grad = torch.zeros_like(weight)


@dataclass
class Sampled:
    """What TRL has sampled for a generation batch, as it gives it to reward functions."""

    prompts: list[Any]
    completion_ids: list[list[int]]
    completions: list[Any]
    prompt_ids: list[list[int]]
    is_whole: bool = True
    """Whether the loss reads all tokens of the completions, which hold none of tools."""
    extra: dict[str, Any] = field(default_factory=dict)

    def on_host(self, prompt: int, completion: int, advantages: Tensor) -> Tensor:
        """
        Return what a plan reads ([`ON_HOST`]) in the layout of TRL, where prompts and completions are so wide. 0 is
        padding. `advantages` has shape [rows].
        """
        rows = torch.zeros(len(advantages), 2 * (prompt + completion) + 1, dtype=torch.float64)
        for row, before, after in zip(rows, self.prompt_ids, self.completion_ids):
            ids, mask, of_completion = row[:prompt], row[prompt : 2 * prompt], row[2 * prompt : -1].view(2, completion)
            ids[prompt - len(before) :], mask[prompt - len(before) :] = torch.tensor(before), 1
            of_completion[0, : len(after)], of_completion[1, : len(after)] = torch.tensor(after), 1
        rows[:, -1] = advantages
        return rows

    def extend(self, inputs: list[dict[str, Any]]) -> None:
        """Add the fields of a `rollout_func` to the rows of the dataset, as TRL does before it asks for rewards."""
        for name, values in self.extra.items():
            of_rows = values if isinstance(values, list) else [values] * len(inputs)
            for row, value in zip(inputs, of_rows):
                row[name] = value


SAMPLER = "sampling/sampling_logp_difference/"
"""TRL's names for distances of vLLM's log-probabilities from those of training: their mean, and the largest."""


class SamplerDistance:
    """How far log-probabilities of the sampler are from those of training, since the last log."""

    def __init__(self):
        self._pending: PendingRead | None = None
        self._means, self._largest = tuple[float, ...](), 0.0  # a copy of this object stays as it is

    def add(self, numbers: Tensor) -> None:
        """Add the mean and the largest distance in a micro-batch, of all processes; NaN where one has none."""
        self._read()  # TRL has waited for metrics that were computed after it
        self._pending = PendingRead(numbers)

    def _read(self) -> None:
        if self._pending is not None:
            for mean, largest in torch.tensor(self._pending.read()).view(-1, 2).tolist():
                if not math.isnan(mean):
                    self._means += (mean,)
                    self._largest = max(self._largest, largest)
            self._pending = None

    def state_dict(self) -> dict[str, Any]:
        self._read()
        return {"means": [*self._means], "largest": self._largest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._means, self._largest = tuple(state.get("means", ())), state.get("largest", 0.0)

    def take(self) -> dict[str, float]:
        """Return what is logged, and begin anew."""
        self._read()
        means, largest, self._means, self._largest = self._means, self._largest, (), 0.0
        return {SAMPLER + "mean": sum(means) / len(means), SAMPLER + "max": largest} if means else {}


@dataclass
class GenerationBatch:
    """A generation batch from its sampling to its advantages."""

    inputs: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the dataset on this process."""
    with_grad: bool = False
    """Whether gradients were on. TRL turns them off for log-probabilities, not for rewards."""
    rewards_first: bool = False
    """Whether rewards are asked for before TRL does, until it has its batch."""
    turns: int = 0
    """How often the model completed rows."""
    sampled: Sampled | None = None
    rewards: Tensor | None = None
    """Of all processes, once they were asked for before TRL does, shape [rows, functions]."""
    on_host: PendingRead | None = None
    """The same, whoever asked."""
    of_reference: tuple[Tensor, Tensor] | None = None
    """Tokens, and their log-probabilities by the reference, if those of the policy were computed with them."""
    left_out: Tensor | None = None
    """Which rows of this process have no log-probabilities of the sampling policy, as booleans of shape [rows]."""
