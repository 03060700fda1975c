"""
What a CPU and a GPU do alike to complete prompts, and the loop of a CPU.

Each prompt is computed once, and what prompts share at their beginning once too: [`flat`] computes them as a tree
(rows/tree.py) in one pass, without padding. Then keys and values are brought into the order of the completions, which
are rows that are padded at the left:

    flat row      s s s s p p p q          the beginning `s` of two prompts, and what they go on with
    rows          s s s s p p p            keys and values of three completions, from the slots above
                  s s s s p p p
                  . . s s s s q            padding has those of any slot: the mask hides it

Whether a model can do that is asked as for the rows of an update ([`why_no_tree`]): two short rows are computed in both
ways. Models that cannot, those that are not told positions, and those with a state along the row compute prompts as
rows of one padded pass ([`padded`]). So does every model if a tree saves less than [`WORTH`].

The cache keeps every token. `generate` prepares layers that forget what is outside of a sliding window; but the mask
and the layout of a tree hide it, so nothing has to be forgotten.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, RepetitionPenaltyLogitsProcessor, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_hybrid.compat import cache_name
from hf_hybrid.recovery import is_out_of_memory
from hf_hybrid.rows.attention import ARGUMENT, Layout, attention, no_mask, tree_attention
from hf_hybrid.rows.comparison import FEW, TOLERANCES, apart
from hf_hybrid.rows.exchange import with_states
from hf_hybrid.rows.facts import ModelFacts
from hf_hybrid.rows.router_loss import OPTION
from hf_hybrid.rows.tree import WORD, Row, Tree, on_device
from hf_hybrid.run.run import as_before

CACHE = cache_name()
"""Argument and output of a model that holds keys and values."""


KEEP = 0.75
"""Rows leave when at most this share of the rows in the batch goes on: to leave costs a copy of the cache."""
WORTH = 32
"""Tokens of padded rows that a tree has to save."""


class PlainRolloutsError(Exception):
    """Completions are left to transformers; the message says why."""

    advice = ""


@dataclass(frozen=True)
class Prompts:
    """The prompts of a batch, of which many are the same."""

    owner: list[int]  # the prompt of each row
    first: list[int]  # the first row of each prompt
    tokens: list[tuple[int, ...]]  # of each prompt
    lengths: list[int]  # how many these are

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Prompts:
        """Tell the prompts of a batch apart by their tokens."""
        known: dict[tuple[int, ...], int] = {}
        owner, first = [], []
        for row, tokens in enumerate(rows):
            number = known.setdefault(tuple(tokens), len(known))
            owner.append(number)
            if number == len(first):
                first.append(row)
        return cls(owner, first, [*known], [*map(len, known)])

    def tree(self) -> Tree:
        """Return their tree, whose rows have the numbers of the prompts."""
        tokens = [np.array(of, WORD).tobytes() for of in self.tokens]
        return Tree.of([Row(0, ids, self.lengths[number], 0, 0, number, 1) for number, ids in enumerate(tokens)])

    def tree_if_worth(self) -> Tree | None:
        """Return their tree; `None` if it has few tokens less than padded rows."""
        count, width = len(self.tokens), max(self.lengths)
        if (count - 1) * width < WORTH or count * width - (tree := self.tree()).size < WORTH:
            return None
        return tree


@dataclass
class Prefilled:
    """The prompts, each computed once."""

    logits: Tensor  # of the first token of each row: [rows, vocabulary]
    cache: Any  # keys and values of the prompts, and states; `None` if the model does not return it
    owner: Tensor  # the prompt of each row: [rows]
    slots: Tensor | None  # those of each prompt's tokens in a flat row, [prompts, width]; `None` if prompts are rows
    width: int  # columns of a row
    computed: int  # tokens of prompts that were computed, without padding

    def of_all_rows(self) -> Iterator[tuple[Any, Tensor, Tensor]]:
        """
        Yield each layer of the cache that attends, and its keys and values for all rows, [rows, heads, width, size].
        The cache forgets them, so that little memory is taken. Layers with a state get that of all rows.
        """
        for layer in self.cache.layers:
            if isinstance(layer, LinearAttentionLayer):
                exchange_states(layer, lambda state: state.index_select(0, self.owner))
            if not isinstance(layer, DynamicLayer):
                continue
            both = []
            for states in (layer.keys, layer.values):
                assert states is not None  # `generate` was left to transformers else
                if self.slots is not None:
                    heads, slots, size = states.shape[1:]
                    places = self.slots[:, None] + slots * torch.arange(heads, device=states.device)[:, None]
                    states = F.embedding(places, states.reshape(-1, size))
                both.append(states.index_select(0, self.owner))
            layer.keys = layer.values = None
            yield layer, both[0], both[1]


# Caches.


class WholeLayer(DynamicLayer):
    """Keys and values of all tokens, in a layer that attends within a sliding window."""

    is_sliding = True


def whole(cache: Any) -> Any:
    """Return an empty cache like this one, which is empty too, that keeps all tokens."""
    cache = copy.deepcopy(cache)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicSlidingWindowLayer):
            cache.layers[index] = WholeLayer()
    return cache


STATES = ("conv_states", "recurrent_states")
"""What a layer of a cache holds of a row whose state it keeps, by index: each `[rows, ...]`, or `None`."""


def states_of(layer: Any) -> list[Tensor]:
    """Return the states that a layer of a cache holds, each [rows, ...]; none if it only attends."""
    held = [getattr(layer, name) for name in STATES] if isinstance(layer, LinearAttentionLayer) else []
    return [state for by_index in held for state in by_index.values() if state is not None]


def exchange_states(layer: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Put what `change` returns of each of these states in its place."""
    for name in STATES if isinstance(layer, LinearAttentionLayer) else ():
        held = getattr(layer, name)
        setattr(layer, name, {index: state if state is None else change(state) for index, state in held.items()})


# A pass.


def indices(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return indices on a device, for which the host does not wait."""
    return torch.tensor(numbers, dtype=torch.long).to(device, non_blocking=True)


def cut(model_inputs: dict[str, Any], rows: Tensor | None, columns: slice, padded: bool) -> dict[str, Any]:
    """Take rows (`None`: all) and columns of the mask and the positions. Without padding there is no mask."""
    inputs = dict(model_inputs)
    for name in ("attention_mask", "position_ids"):
        if (tensor := model_inputs.get(name)) is not None:
            inputs[name] = tensor[:, columns] if rows is None else tensor[:, columns].index_select(0, rows)
    if not padded:
        inputs["attention_mask"] = None
    return inputs


def padded(model: Any, input_ids: Tensor, prompts: Prompts, model_inputs: dict[str, Any]) -> Prefilled:
    """Compute prompts as rows of one pass, padded as those of `input_ids`, with what `generate` has prepared."""
    rows, width = indices(prompts.first, input_ids.device), input_ids.shape[1]
    is_padded = model_inputs.get("position_ids") is None or min(prompts.lengths) < width
    part = cut({**model_inputs, CACHE: whole(model_inputs[CACHE])}, rows, slice(None), is_padded)
    tokens, options = input_ids.index_select(0, rows), {"next_sequence_length": width, "is_first_iteration": True}
    outputs = model(**model.prepare_inputs_for_generation(tokens, **options, **part), return_dict=True)
    owner, computed = indices(prompts.owner, input_ids.device), sum(prompts.lengths)
    return Prefilled(outputs.logits[:, -1].index_select(0, owner), outputs.get(CACHE), owner, None, width, computed)


def flat(model: Any, prompts: Prompts, tree: Tree, facts: ModelFacts, empty: Any) -> Prefilled:
    """Compute the tree of prompts in one pass. `empty` is the cache that `generate` has prepared."""
    device, width = model.device, max(prompts.lengths)
    slots = np.zeros((len(tree.rows), width), np.int64)
    for row, spans in zip(tree.rows, tree.spans):
        slots[row.number, width - row.length :] = np.concatenate([np.arange(*span) for span in spans])
    tensors = [*tree.flat(), torch.from_numpy(slots), torch.tensor(prompts.owner)]
    ids, positions, places, owner = on_device(tensors, device)
    layout, last = Layout(tree.segments, device), places[:, -1]

    def before(backbone: Any, args: tuple, inputs: dict[str, Any]) -> tuple:
        return args, {**inputs, ARGUMENT: layout}

    def behind(backbone: Any, args: tuple, output: Any) -> Any:
        return with_states(output, output[0][:, last.to(output[0].device)])

    inputs = {"input_ids": ids[None], "position_ids": positions[None], "attention_mask": no_mask(device, layout.number)}
    if facts.router is not None:
        inputs[OPTION] = False  # its loss has no use here
    with contextlib.ExitStack() as stack:
        for config in facts.configs:
            stack.enter_context(attention(config, tree_attention(config._attn_implementation or "eager")))
        stack.callback(facts.backbone.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(facts.backbone.register_forward_hook(behind).remove)
        Layout.known[layout.number] = layout
        stack.callback(Layout.known.pop, layout.number)
        outputs = model(**inputs, **{CACHE: whole(empty)}, use_cache=True, return_dict=True)
    return Prefilled(outputs.logits[0].index_select(0, owner), outputs.get(CACHE), owner, places, width, tree.size)


def why_no_tree(model: Any, facts: ModelFacts, prompts: Prompts, model_inputs: dict[str, Any]) -> str | None:
    """
    Return why prompts cannot be computed as a tree; `None` if they can. Two rows of few tokens are computed in both
    ways, and two that are longer than the window of the layers as soon as a prompt is.
    """
    if model_inputs.get("position_ids") is None:
        return "the model is not told positions, and may count padding"
    if facts.reason is not None or facts.with_state:
        return facts.reason or "a state runs along the row, and completions go on from that of each prompt"
    if sum(prompts.lengths) > facts.most_slots:
        return f"rows of more than {facts.most_slots} tokens would be scaled by place, or attend by chunks"
    longest = max(prompts.tokens, key=len)
    if facts.has_compared(len(longest)):
        return None
    tokens = np.resize(longest, FEW if len(longest) <= facts.window else int(facts.window) + FEW).tolist()
    ids = torch.tensor([tokens, tokens[: -FEW // 2] + tokens[: -FEW // 2 - 1 : -1]], device=model.device)
    positions, empty = torch.arange(len(tokens), device=model.device).expand(2, -1), model_inputs[CACHE]
    inputs = {"position_ids": positions, CACHE: empty, "use_cache": True}
    two, half = Prompts.of(ids.tolist()), torch.is_autocast_enabled(model.device.type)
    half = half or model.dtype != torch.float32
    try:
        with as_before(model, model.device):
            plain = padded(model, ids, two, inputs).logits
            distance = apart(plain, flat(model, two, two.tree(), facts, empty).logits)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"the model does not take a tree ({type(error).__name__}: {error})"
    if not distance <= TOLERANCES[half]:
        return f"logits of a tree are {distance:.1e} of their length away from those of padded rows"
    facts.note_compared(len(longest))
    return None


# The next token of rows, also in captured passes.


class RowwiseProcessors(LogitsProcessorList):
    """Logits processors that look at one row at a time."""

    def of(self, rows: Tensor) -> RowwiseProcessors:
        """Return those of some of the rows. The penalty of repetitions knows how far each row is padded."""
        of_rows = RowwiseProcessors()
        for processor in self:
            if isinstance(processor, RepetitionPenaltyLogitsProcessor):
                ignored = processor.prompt_ignore_length
                if isinstance(ignored, Tensor):
                    ignored = ignored.to(rows.device).index_select(0, rows)
                    processor = RepetitionPenaltyLogitsProcessor(processor.penalty, ignored)
            of_rows.append(processor)
        return of_rows


def drawn(probabilities: Tensor, count: int, places: Tensor | None) -> Tensor:
    """
    Draw a token of each row, shape [rows], as `torch.multinomial` does, and without a wait.

    `probabilities` are those of some rows, [rows, vocabulary]; `places` says which of the `count` rows of the whole
    batch they are (`None`: all), whose random numbers they get. From Distributions.cpp of torch: the token with the
    largest quotient of its probability and a random number of an exponential distribution.
    """
    numbers = probabilities.new_empty(count, probabilities.shape[1]).exponential_()
    numbers = numbers if places is None else numbers.index_select(0, places)
    return torch.div(probabilities, numbers, out=numbers).argmax(dim=-1)


# The loop of a CPU.


def _keep(cache: Any, rows: Tensor, cut: int) -> None:
    """Take rows out of a cache, and its first columns. Layers one after the other, so that little memory is taken."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            exchange_states(layer, lambda state: state.index_select(0, rows))
        if not isinstance(layer, DynamicLayer):
            continue
        attends: Any = layer  # of a model that has computed something
        attends.keys = attends.keys[:, :, cut:].index_select(0, rows)
        attends.values = attends.values[:, :, cut:].index_select(0, rows)


@dataclass
class RowsLeft:
    """The rows that are still completed. Those that have ended leave the batch."""

    tokens: Tensor  # prompts, at full width, and completions so far: [rows left, width and tokens]
    active: Tensor  # which of them go on, as booleans: [rows left]
    prompt_lengths: list[int]  # tokens of their prompts
    processors: RowwiseProcessors  # of these rows
    places: Tensor | None = None  # where they are in the whole batch, [rows left]; `None` if no row has left

    def drop_ended(self, goes_on: list[bool], completed: int, model_inputs: dict[str, Any]) -> dict[str, Any]:
        """
        Keep the rows that go on, without columns that are padding for all of them. Return what the model gets for them.

        `goes_on` is `active` on the host. The last of the `completed` tokens of a completion is not computed yet.
        """
        rows = self.active.int().argsort(descending=True, stable=True)[: sum(goes_on)]
        self.prompt_lengths = lengths = [length for length, active in zip(self.prompt_lengths, goes_on) if active]
        self.tokens, self.active = self.tokens.index_select(0, rows), self.active.index_select(0, rows)
        self.processors = self.processors.of(rows)
        self.places = rows if self.places is None else self.places.index_select(0, rows)
        positions, held = model_inputs.get("position_ids"), model_inputs[CACHE].get_seq_length()
        gone = 0 if positions is None else held - (max(lengths) + completed - 1)
        _keep(model_inputs[CACHE], rows, gone)
        # Mask and positions have a column for the token that is computed next.
        columns = slice(gone - held - 1, None)
        return cut(model_inputs, rows, columns, padded=positions is None or min(lengths) < max(lengths))


def complete_on_cpu(
    prompts: Prompts,
    model: Any,
    input_ids: Tensor,
    prefilled: Prefilled,
    processors: RowwiseProcessors,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    padding: int | None,
    model_inputs: dict[str, Any],
) -> tuple[Tensor, Tensor, int]:
    """
    Complete the rows of `input_ids`, shape [rows, width], which leave when they have ended. Arguments and results are
    those of [`Captured.complete`].
    """
    device, (count, width) = input_ids.device, input_ids.shape
    completions = input_ids.new_full((count, config.max_length - width), padding or 0)
    chosen = torch.ones(completions.shape, device=device)
    logits, lengths = prefilled.logits, [*map(prompts.lengths.__getitem__, prompts.owner)]
    is_padded = model_inputs.get("position_ids") is None or min(lengths) < prefilled.width
    for layer, keys, values in prefilled.of_all_rows():
        layer.keys, layer.values = keys, values
    model_inputs = cut({**model_inputs, CACHE: prefilled.cache}, None, slice(-prefilled.width, None), is_padded)
    filled = CausalLMOutputWithPast(**{CACHE: prefilled.cache})
    model_inputs = model._update_model_kwargs_for_generation(filled, model_inputs)
    rows = RowsLeft(input_ids, torch.ones(count, dtype=torch.bool, device=device), lengths, processors)
    length = computed = 0
    while True:
        # One token of each row, padding where a row has ended.
        places = slice(None) if rows.places is None else rows.places
        logits = logits.to(dtype=torch.float32, device=device, copy=True)
        scores: Any = rows.processors(rows.tokens, logits)  # ty: ignore[invalid-argument-type]
        if config.do_sample:
            probabilities = scores.softmax(dim=-1)
            if probabilities[:, 0].isnan().any():  # then all of the row are
                raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
            tokens = drawn(probabilities, count, rows.places)
            chosen[places, length] = probabilities.gather(1, tokens[:, None])[:, 0]
        else:
            tokens = scores.argmax(dim=-1)
        if padding is not None:
            tokens = tokens.masked_fill(~rows.active, padding)
        completions[places, length] = tokens
        rows.tokens, length = torch.cat([rows.tokens, tokens[:, None]], dim=1), length + 1
        if width + length >= config.max_length:
            break
        if padding is not None:
            rows.active = rows.active & ~criteria(rows.tokens, None)
            goes_on = rows.active.tolist()
            if not any(goes_on):
                break
            if sum(goes_on) <= KEEP * len(goes_on):
                model_inputs = rows.drop_ended(goes_on, length, model_inputs)
        # The logits of the next token.
        inputs = model.prepare_inputs_for_generation(rows.tokens, next_sequence_length=1, **model_inputs)
        outputs = model(**inputs, return_dict=True)
        model_inputs = model._update_model_kwargs_for_generation(outputs, model_inputs)
        logits, computed = outputs.logits[:, -1], computed + len(rows.tokens)
        del outputs
    return completions[:, :length], chosen[:, :length], computed
