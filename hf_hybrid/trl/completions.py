"""
Prompts and their completions: what every device does alike, and how a CPU computes a token.

Each prompt is computed once, and what prompts share at their beginning once too: [`flat`] computes them as a tree
(rows/tree.py) in one pass, without padding. Then keys and values are brought into the order of the completions, which
are rows that are padded at the left:

    flat row      s s s s p p p q          the beginning `s` of two prompts, and what they go on with
    rows          s s s s p p p            keys and values of three completions, from the slots above
                  s s s s p p p
                  . . s s s s q            padding has those of any slot: the mask hides it

Whether a model can do that is asked as for the rows of an update ([`reason_not_tree`]): two short rows are computed in
both ways. Models that cannot, those that are not told positions, and those with a state along the row compute prompts
as rows of one padded pass ([`padded`]). So does every model if a tree saves less than [`WORTH`].

The cache keeps every token. `generate` prepares layers that forget what is outside of a sliding window; but the mask
and the layout of a tree hide it, so nothing has to be forgotten.

Then one loop draws a token of each row and computes it, until the last row has ended ([`complete`]). What a row gets
(its token, or padding), whether it has ended and after how many tokens are tensors on the device. How tokens are
computed, and which rows stay, the device decides ([`Passes`]). On a GPU the host reads late which rows have ended
(captured.py): tokens that were drawn meanwhile are cut off, and the random generator is set back to its state after
the last one that counts. A CPU has nothing to wait for: rows leave as soon as a quarter of those in the batch has
ended, and with them the columns that are padding for all that stay ([`GrowingRows`]).

`torch.multinomial` would make the host wait twice per token, because it checks its probabilities there.
[`sample_tokens`] draws the same tokens from the same random numbers, and the check is one of the numbers that are read.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from hf_hybrid.compat import cache_name
from hf_hybrid.machine import PendingRead
from hf_hybrid.recovery import is_out_of_memory
from hf_hybrid.rows.attention import ARGUMENT, Layout, attention, no_mask, tree_attention
from hf_hybrid.rows.comparison import FEW, TOLERANCES, apart
from hf_hybrid.rows.exchange import with_states
from hf_hybrid.rows.facts import ModelFacts
from hf_hybrid.rows.images import SEES, TYPES, RowImages, encoder_of, standing_in
from hf_hybrid.rows.router_loss import OPTION
from hf_hybrid.rows.tree import WORD, Batch, Row, Tree, on_device
from hf_hybrid.run.run import as_before
from hf_hybrid.streaming.layers import base_model

CACHE = cache_name()
"""Argument and output of a model that holds keys and values."""
PER_ROW = {"attention_mask", "position_ids", CACHE}
"""What `generate` prepares for the model row by row."""
KEEP = 0.75
"""On a CPU rows leave when at most this share of those in the batch goes on: to leave costs a copy of the cache."""
EVERY = 8
"""Tokens after which a host that reads late orders what it reads."""
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
        """Tell the prompts of a batch apart by their tokens, which are codes where images stand (rows/images.py)."""
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
class Generation:
    """A batch of rows, and what `generate` has prepared to complete them."""

    model: Any
    input_ids: Tensor  # prompts, padded at the left: [rows, width]
    processors: RowwiseProcessors
    criteria: StoppingCriteriaList
    config: GenerationConfig
    inputs: dict[str, Any]  # what the model gets beside tokens
    prompts: Prompts  # with the codes of images, if they have any
    batch: Batch | None = None  # that of prompts with images, on the host

    def encoding(self, row: RowImages) -> contextlib.AbstractContextManager[None]:
        """Context in which the images of a pass are encoded, each once."""
        return standing_in(encoder_of(base_model(self.model)), lambda: row)


@dataclass
class Prefilled:
    """The prompts, each computed once."""

    logits: Tensor  # of the first token of each row: [rows, vocabulary]
    cache: Any  # keys and values of the prompts, and states; `None` if the model does not return it
    owner: Tensor  # the prompt of each row: [rows]
    slots: Tensor | None  # those of each prompt's tokens in a flat row, [prompts, width]; `None` if prompts are rows
    width: int  # columns of a row
    computed: int  # tokens of prompts that were computed, without padding
    places: np.ndarray | None = None  # `slots` on the host

    def take(self, layer: Any) -> tuple[Tensor, Tensor] | None:
        """
        Return keys and values of a layer of the cache for all rows, [rows, heads, width, size]; `None` if it does not
        attend. The cache forgets them, so that little memory is taken. A layer with a state gets that of all rows.
        """
        if isinstance(layer, LinearAttentionLayer):
            exchange_states(layer, lambda state: state.index_select(0, self.owner))
        if not isinstance(layer, DynamicLayer):
            return None
        both: Any = (layer.keys, layer.values)  # `generate` was left to transformers where there are none
        layer.keys = layer.values = None
        if self.slots is not None:
            both = [at_slots(states, self.slots) for states in both]
        return both[0].index_select(0, self.owner), both[1].index_select(0, self.owner)


# Caches.


def at_slots(states: Tensor, slots: Tensor) -> Tensor:
    """Return keys or values of a flat row, [1, heads, slots, size], at `slots` of rows: [rows, heads, width, size]."""
    heads, count = states.shape[1:3]
    places = slots[:, None] + count * torch.arange(heads, device=slots.device)[:, None]
    return F.embedding(places, states.reshape(-1, states.shape[-1]))


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


def attending(layers: Sequence[Any]) -> list[Any]:
    """Return the layers of a cache that hold keys and values."""
    return [layer for layer in layers if isinstance(layer, DynamicLayer)]


STATES = ("conv_states", "recurrent_states")
"""What a layer of a cache holds of a row whose state it keeps, by index: each `[rows, ...]`, or `None`."""


def states_of(layer: Any) -> list[Tensor]:
    """Return the states that a layer of a cache holds, each [rows, ...]; none if it only attends."""
    held = [getattr(layer, name) for name in STATES] if isinstance(layer, LinearAttentionLayer) else []
    return [state for by_index in held for state in by_index.values() if state is not None]


def all_states(layers: Sequence[Any]) -> list[Tensor]:
    """Return those of all of these layers."""
    return [state for layer in layers for state in states_of(layer)]


def exchange_states(layer: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Put what `change` returns of each of these states in its place."""
    for name in STATES if isinstance(layer, LinearAttentionLayer) else ():
        held = getattr(layer, name)
        setattr(layer, name, {index: state if state is None else change(state) for index, state in held.items()})


# Prompts.


def indices(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return indices on a device, for which the host does not wait."""
    return torch.tensor(numbers, dtype=torch.long).to(device, non_blocking=True)


def padded(generation: Generation) -> Prefilled:
    """Compute prompts as rows of one pass, padded as the rows of the batch, with what `generate` has prepared."""
    model, ids, prompts = generation.model, generation.input_ids, generation.prompts
    rows, width, inputs = indices(prompts.first, ids.device), ids.shape[1], dict(generation.inputs)
    inputs[CACHE], images = whole(inputs[CACHE]), contextlib.nullcontext()
    for name in ("attention_mask", "position_ids", TYPES, SEES):
        if inputs.get(name) is not None:
            inputs[name] = inputs[name].index_select(-2, rows)
    if generation.batch is not None:
        row = generation.batch.images.of_batch(ids.device, generation.batch.ids[prompts.first])
        inputs, images = {**inputs, **row.of.inputs(row.numbers, ids.device)}, generation.encoding(row)
    if inputs.get("position_ids") is not None and min(prompts.lengths) == width:
        inputs["attention_mask"] = None  # nothing is padded
    options = {"next_sequence_length": width, "is_first_iteration": True}
    prepared = model.prepare_inputs_for_generation(ids.index_select(0, rows), **options, **inputs)
    with images:
        outputs, owner = model(**prepared, return_dict=True), indices(prompts.owner, ids.device)
    logits, computed = outputs.logits[:, -1].index_select(0, owner), sum(prompts.lengths)
    return Prefilled(logits, outputs.get(CACHE), owner, None, width, computed)


def flat(generation: Generation, tree: Tree, facts: ModelFacts) -> Prefilled:
    """Compute the tree of prompts in one pass."""
    model, prompts = generation.model, generation.prompts
    device, width, batch = model.device, max(prompts.lengths), generation.batch
    (ids, positions), axes = tree.flat(), None if batch is None else batch.positions
    if batch is not None:
        ids = batch.images.decoded(ids)
    if axes is not None:
        positions = axes.new_zeros(len(axes), 1, tree.size)
    slots = np.zeros((len(tree.rows), width), np.int64)
    for row, spans in zip(tree.rows, tree.spans):
        places = slots[row.number, width - row.length :] = np.concatenate([np.arange(*span) for span in spans])
        if axes is not None:
            positions[:, 0, places] = axes[:, prompts.first[row.number], -row.length :]
    tensors = [ids[None], positions if axes is not None else positions[None]]
    ids, positions, places, owner = on_device([*tensors, torch.from_numpy(slots), torch.tensor(prompts.owner)], device)
    images = None if batch is None else batch.images.of_row(device, tree)
    layout, last = Layout(tree.segments, device, images=images), places[:, -1]

    def before(backbone: Any, args: tuple, inputs: dict[str, Any]) -> tuple:
        return args, {**inputs, ARGUMENT: layout}

    def behind(backbone: Any, args: tuple, output: Any) -> Any:
        return with_states(output, output[0][:, last.to(output[0].device)])

    inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": no_mask(device, layout.number)}
    if facts.router is not None:
        inputs[OPTION] = False  # its loss has no use here
    with contextlib.ExitStack() as stack:
        if images is not None:
            inputs |= images.inputs()
            stack.enter_context(generation.encoding(images))
        for config in facts.configs:
            stack.enter_context(attention(config, tree_attention(config._attn_implementation or "eager")))
        stack.callback(facts.backbone.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(facts.backbone.register_forward_hook(behind).remove)
        Layout.known[layout.number] = layout
        stack.callback(Layout.known.pop, layout.number)
        outputs = model(**inputs, **{CACHE: whole(generation.inputs[CACHE])}, use_cache=True, return_dict=True)
    logits = outputs.logits[0].index_select(0, owner)
    return Prefilled(logits, outputs.get(CACHE), owner, places, width, tree.size, slots)


def reason_not_tree(generation: Generation, facts: ModelFacts) -> str | None:
    """
    Return why prompts cannot be computed as a tree; `None` if they can. Two rows of few tokens are computed in both
    ways, and two that are longer than the window of the layers as soon as a prompt is.
    """
    model, prompts = generation.model, generation.prompts
    if generation.inputs.get("position_ids") is None:
        return "the model is not told positions, and may count padding"
    if facts.sees is None and (SEES in generation.inputs or generation.batch is not None):
        return "tokens that are of no image may see what stands behind them"
    if facts.reason is not None or facts.with_state:
        return facts.reason or "a state runs along the row, and completions go on from that of each prompt"
    if sum(prompts.lengths) > facts.most_slots:
        return f"rows of more than {facts.most_slots} tokens would be scaled by place, or attend by chunks"
    longest = max(prompts.tokens, key=len)
    batch = generation.batch
    if facts.has_compared(len(longest)) and (facts.compared_images or batch is None):
        return None
    tokens = np.resize(longest, FEW if len(longest) <= facts.window else int(facts.window) + FEW).tolist()
    ids = torch.tensor([tokens, tokens[: -FEW // 2] + tokens[: -FEW // 2 - 1 : -1]], device=model.device)
    positions = torch.arange(len(tokens), device=model.device).expand(2, -1)
    inputs = {"position_ids": positions, CACHE: generation.inputs[CACHE], "use_cache": True}
    two = replace(generation, input_ids=ids, inputs=inputs, prompts=Prompts.of(ids.tolist()))
    two = two if batch is None else generation  # prompts are compared as they are: images have sizes of their own
    half = torch.is_autocast_enabled(model.device.type) or model.dtype != torch.float32
    try:
        with as_before(model, model.device):
            model.eval()
            distance = apart(padded(two).logits, flat(two, two.prompts.tree(), facts).logits)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"the model does not take a tree ({type(error).__name__}: {error})"
    if not distance <= TOLERANCES[half]:
        return f"logits of a tree are {distance:.1e} of their length away from those of padded rows"
    facts.note_compared(len(longest), images=batch is not None)
    return None


# The next token.


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


def sample_tokens(probabilities: Tensor, count: int, places: Tensor | None) -> Tensor:
    """
    Draw a token of each row, shape [rows], as `torch.multinomial` does, and without a wait.

    `probabilities` are those of some rows, [rows, vocabulary]; `places` says which of the `count` rows of the whole
    batch they are (`None`: all), whose random numbers they get. From Distributions.cpp of torch: the token with the
    largest quotient of its probability and a random number of an exponential distribution.
    """
    numbers = probabilities.new_empty(count, probabilities.shape[1]).exponential_()
    numbers = numbers if places is None else numbers.index_select(0, places)
    return torch.div(probabilities, numbers, out=numbers).argmax(dim=-1)


def ends_of(criteria: StoppingCriteriaList, vocabulary: int, device: torch.device) -> Tensor:
    """
    Return which tokens end a row, as booleans, shape [vocabulary + 1]: one look-up where `EosTokenCriteria` compares
    with each, or sorts them and lets the host wait. The last is no token: ids that the model cannot choose.
    """
    ends = torch.zeros(vocabulary + 1, dtype=torch.bool, device=device)
    for criterion in criteria:
        if isinstance(criterion, EosTokenCriteria):
            ids = criterion.eos_token_id.to(device, non_blocking=True)
            ends.index_fill_(0, ids.where((ids >= 0) & (ids < vocabulary), vocabulary), True)
    return ends


class GeneratorStates:
    """The states of the device's random generator after each of the last tokens, on the host."""

    def __init__(self, device: torch.device):
        self._module: Any = torch if device.type == "cpu" else torch.get_device_module(device)
        self._device = () if device.type == "cpu" else (device,)
        self._after: deque[Tensor] = deque(maxlen=EVERY + 2)

    def note(self) -> None:
        self._after.append(self._module.get_rng_state(*self._device))

    def go_back(self, tokens: int) -> None:
        """Set the generator to its state so many tokens ago."""
        if tokens:
            self._module.set_rng_state(self._after[-1 - tokens], *self._device)


# The loop.


class Passes(Protocol):
    """How the next token of rows is computed; first that of all rows of a batch."""

    reads_late: bool
    """Whether the host reads which rows have ended only after it has launched one token more, and not of each token."""

    def rows_for(self, rows: int, go_on: int, left: int) -> int:
        """Return how many of the rows stay if so many go on, and at most so many tokens are left."""
        ...

    def move(self, rows: Tensor) -> None:
        """Keep these rows, [rows]."""
        ...

    def compute(self, tokens: Tensor) -> Tensor:
        """Compute these tokens, [rows], which follow those computed so far. Return the logits of the next."""
        ...

    def decoded(self) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of all tokens computed so far, of each layer: [rows, heads, tokens, size]."""
        ...

    @property
    def states(self) -> list[Tensor]:
        """Those of layers with a state, behind all tokens computed so far, each [rows, ...]."""
        ...


class Keeps(Protocol):
    """What keeps rows for later turns (turns.py)."""

    def keep_rows(self, decoded: Sequence[tuple[Tensor, Tensor]], rows: RowsInPass, which: Tensor) -> None: ...

    def keep_states(self, states: Sequence[Tensor], rows: RowsInPass, which: Tensor) -> None: ...


@dataclass
class RowsInPass:
    """The rows that a pass computes, all on the device."""

    tokens: Tensor  # prompts, completions so far and padding: [rows, longest]
    chosen: Tensor  # probability with which each token was drawn, 1 elsewhere: [rows, longest]
    active: Tensor  # which of them go on, as booleans: [rows]
    lengths: Tensor  # tokens of their completions: [rows]
    processors: RowwiseProcessors  # of these rows
    places: Tensor | None = None  # where they are in the whole batch, [rows]; `None` if they are all of it

    @classmethod
    def of(cls, generation: Generation, padding: int | None) -> RowsInPass:
        ids = generation.input_ids
        tokens = F.pad(ids, (0, generation.config.max_length - ids.shape[1]), value=padding or 0)
        chosen, active = torch.ones_like(tokens, dtype=torch.float32), torch.ones_like(ids[:, 0], dtype=torch.bool)
        return cls(tokens, chosen, active, torch.zeros_like(ids[:, 0]), generation.processors)

    def write_into(self, tokens: Tensor, chosen: Tensor) -> None:
        """Write into what belongs to the whole batch, and is the rows' own until some of them have left."""
        if self.places is not None:
            tokens.index_copy_(0, self.places, self.tokens)
            chosen.index_copy_(0, self.places, self.chosen)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows."""
        self.tokens, self.chosen, self.active, self.lengths = (
            states.index_select(0, rows) for states in (self.tokens, self.chosen, self.active, self.lengths)
        )
        self.processors = self.processors.of(rows)
        self.places = rows if self.places is None else self.places.index_select(0, rows)


def complete(
    generation: Generation, prefilled: Prefilled, passes: Passes, turns: Keeps | None = None
) -> tuple[Tensor, Tensor, int]:
    """
    Complete the rows of a batch, which `turns` keep. Return their completions, [rows, tokens of the longest], the
    probability with which each token was drawn, of the same shape, and how many rows all passes for these computed.

    Raises:
        PlainRolloutsError: If a pass cannot be computed in this way. Tokens may be drawn already.
        RuntimeError: If there is a row without probabilities, as of `torch.multinomial`.
    """
    config, (count, width) = generation.config, generation.input_ids.shape
    padding = config.pad_token_id if EosTokenCriteria in map(type, generation.criteria) else None  # behind the end
    rows, most, computed = RowsInPass.of(generation, padding), config.max_length - width, list[int]()
    whole, logits, ordered = (rows.tokens, rows.chosen), prefilled.logits, None
    go_on, longest, is_invalid, invalid = count, 0, False, rows.active.new_zeros(())
    states = GeneratorStates(logits.device) if passes.reads_late else None
    ends = ends_of(generation.criteria, max(logits.shape[1], (padding or 0) + 1), logits.device)
    for length in range(1, most + 1):
        # A token of each row; padding where a row has ended.
        column = width + length - 1
        logits = logits.to(dtype=torch.float32, copy=True)
        scores: Any = rows.processors(rows.tokens[:, :column], logits)  # ty: ignore[invalid-argument-type]
        if config.do_sample:
            probabilities = scores.softmax(dim=-1)
            invalid |= probabilities[:, 0].isnan().any()  # then all of the row are
            tokens = sample_tokens(probabilities, count, rows.places)
            torch.gather(probabilities, 1, tokens[:, None], out=rows.chosen[:, column : column + 1])
        else:
            tokens = scores.argmax(dim=-1)
        rows.lengths += rows.active
        if padding is not None:
            tokens = tokens.masked_fill(~rows.active, padding)
            rows.active &= ~ends.index_select(0, tokens)
        rows.tokens[:, column] = tokens

        # Which rows have ended.
        if states is None:
            before, go_on, longest, is_invalid = go_on, int(rows.active.sum()), length, bool(invalid)
            if turns is not None and go_on < before:
                turns.keep_states(passes.states, rows, (~rows.active & (rows.lengths == length)).nonzero()[:, 0])
        else:
            states.note()
            read, ordered = ordered, None
            if length % EVERY == 0 or length == most:
                ordered = PendingRead(torch.stack([rows.active.sum(), rows.lengths.max(), invalid.long()]))
            if (read := ordered if length == most else read) is not None:
                go_on, longest, is_invalid = read.read()
        if is_invalid:
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        if not go_on or length == most:
            break
        if go_on < len(tokens) and (stay := passes.rows_for(len(tokens), go_on, most - length)) < len(tokens):
            rows.write_into(*whole)
            # Those that go on have the longest completions. Next come those that ended last: TRL's are so long.
            order = (2 * rows.lengths + rows.active).argsort(descending=True, stable=True)
            kept, gone = order.tensor_split([stay])
            if turns is not None:
                turns.keep_rows(passes.decoded(), rows, gone)
            rows.keep(kept)
            passes.move(kept)
            tokens = tokens.index_select(0, kept)

        logits = passes.compute(tokens)
        computed.append(len(tokens))
    if states is not None:
        states.go_back(length - longest)
    rows.write_into(*whole)
    if turns is not None:
        turns.keep_rows(passes.decoded(), rows, torch.arange(len(rows.tokens), device=logits.device))
    tokens, chosen = whole
    return tokens[:, width : width + longest], chosen[:, width : width + longest], sum(computed[: longest - 1])


# How a CPU computes a token.


class GrowingRows:
    """Rows whose keys and values grow by a column for each token, in the cache of the prompts."""

    reads_late = False

    def __init__(self, generation: Generation, prefilled: Prefilled):
        self._model, self._cache, self._inputs = generation.model, prefilled.cache, generation.inputs
        for layer in prefilled.cache.layers:
            if (both := prefilled.take(layer)) is not None:
                layer.keys, layer.values = both
        lengths, inputs = generation.prompts.lengths, generation.inputs
        self._lengths = torch.tensor([lengths[prompt] for prompt in generation.prompts.owner])
        self._width = prefilled.width  # columns of prompts, with padding
        mask, self._positions = inputs.get("attention_mask"), inputs.get("position_ids")
        # Without padding there is no mask, unless a model counts its positions there.
        needs_mask = mask is not None and (self._positions is None or min(lengths) < self._width)
        self._mask = mask[:, -self._width :] if needs_mask else None
        if self._positions is not None:
            self._positions = self._positions[..., -1:]

    def rows_for(self, rows: int, go_on: int, left: int) -> int:
        stay = go_on if go_on < 3 else -(-go_on // 4) * 4  # products of three rows take longer than those of four
        return stay if stay <= KEEP * rows else rows

    def move(self, rows: Tensor) -> None:
        self._lengths, gone = self._lengths.index_select(0, rows), 0
        if self._positions is not None:
            self._positions, longest = self._positions.index_select(-2, rows), int(self._lengths.max())
            gone, self._width = self._width - longest, longest
            if int(self._lengths.min()) == longest:
                self._mask = None
        if self._mask is not None:
            self._mask = self._mask[:, gone:].index_select(0, rows)
        for layer in self._cache.layers:  # one after the other, so that little memory is taken
            exchange_states(layer, lambda state: state.index_select(0, rows))
            if isinstance(layer, DynamicLayer):
                attends: Any = layer  # of a model that has computed something
                attends.keys = attends.keys[:, :, gone:].index_select(0, rows)
                attends.values = attends.values[:, :, gone:].index_select(0, rows)

    def compute(self, tokens: Tensor) -> Tensor:
        if self._mask is not None:
            self._mask = F.pad(self._mask, (0, 1), value=1)
        if self._positions is not None:
            self._positions = self._positions + 1
        of_rows = {"attention_mask": self._mask, "position_ids": self._positions, CACHE: self._cache}
        inputs = {**self._inputs, **of_rows}
        inputs = self._model.prepare_inputs_for_generation(tokens[:, None], next_sequence_length=1, **inputs)
        return self._model(**inputs, return_dict=True).logits[:, -1]

    @property
    def states(self) -> list[Tensor]:
        return all_states(self._cache.layers)

    def decoded(self) -> list[tuple[Tensor, Tensor]]:
        held = [(layer.keys, layer.values) for layer in attending(self._cache.layers)]
        return [(keys[:, :, self._width :], values[:, :, self._width :]) for keys, values in held]
