"""
Conversations: their keys and values stay from one turn to the next.

With tools and environments a completion has several turns. The model writes, a tool answers, and TRL gives `generate`
the whole conversation again. All of it but the answer was computed before:

    first turn     p p p p a a a              p: a prompt, a: what the model writes
    second turn    p p p p a a a t t b b b    t: what the tool answers. Computed are the last a, both t, then each b
    third turn     p p p p a a a t t b b b u c c      the last b, u, then each c

What is kept. Keys and values of each token have a slot in one flat row per layer, `[1, heads, slots, size]`, as those
of a tree of prompts (completions.py). A [`Conversation`] says in which slots its tokens are, so completions of a prompt
share the prompt's. Rows that leave a pass, and those in it at its end, leave there what they have computed.

What is computed. A prompt is looked up by its tokens, not by its place: it goes on from the longest beginning that any
conversation has. So where a template changes what came before, a prompt is computed from where it differs. Padding
stays at the left of rows, so the pass has no gaps, and masks and windows are those of `generate`:

    . . p p p p a a|a t t t    kept keys and values of both rows, and a pass of four columns; of the second row the last
    p p p p p a a b|b b t t    kept token is computed again. Rows with more new tokens have a pass of their own

Layers with a state cannot go back: a state is that behind a whole prompt, or on a CPU that of a row when its last token
was drawn. Captured passes go on before the host learns of it, and what the model wrote is computed again. Padding
inside of a row would change a state. So passes have sizes of 64, 32, ... 1 tokens, each of the rows whose number of new
tokens has it as a part, as numbers have powers of two.

Images stand in front: where new tokens are of an image, everything is computed anew. So it is if the model has changed
([`identity_of`]), if it draws random numbers (a turn of TRL draws new ones for all tokens), and if two short rows in
two pieces differ from the same rows in one ([`reason_not_in_pieces`]).

Everything is given back when TRL has its completions. Nothing more is kept if it would take half of the free memory.
"""

from __future__ import annotations

import bisect
import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_hybrid.machine import device_memory
from hf_hybrid.plan.accounting import host_memory
from hf_hybrid.recovery import is_out_of_memory
from hf_hybrid.rows.comparison import FEW, TOLERANCES, apart
from hf_hybrid.rows.facts import of_user, window_of
from hf_hybrid.rows.images import FIRST, NAMES, Images
from hf_hybrid.rows.tree import WORD
from hf_hybrid.run.run import STAYS, as_before
from hf_hybrid.trl.captured import identity_of
from hf_hybrid.trl.completions import (
    CACHE,
    PER_ROW,
    Generation,
    Prefilled,
    Prompts,
    RowsInPass,
    all_states,
    at_slots,
    attending,
    exchange_states,
    indices,
    padded,
)

LAUNCHES = {"cpu": 32}
"""Tokens that cost as much as the launches of a pass, by the type of the device."""
LAUNCHES_OF_OTHERS = 4096
"""The same on other devices: 42 ms, in which an H200 computes more tokens of 0.5B."""


class Conversation(NamedTuple):
    """The beginning of rows."""

    ids: bytes
    """Its tokens, each a `WORD`; codes where images stand."""
    slots: np.ndarray
    """Where keys and values of each token are."""
    states: Sequence[Tensor] = ()
    """Those of all layers with a state, behind the last token, each [1, ...]."""
    is_prompt: bool = True
    """Whether the model wrote nothing behind the prompt."""

    def common(self, ids: bytes) -> int:
        """Return how many tokens other tokens begin with that these begin with too."""
        count = min(len(self.ids), len(ids)) // WORD.itemsize
        differ = np.frombuffer(self.ids, WORD, count) != np.frombuffer(ids, WORD, count)
        return int(differ.argmax()) if differ.any() else count


NOTHING = Conversation(b"", np.arange(0))


def passes_of(new: Sequence[int], with_state: bool) -> list[tuple[int, list[int]]]:
    """Return passes: how many tokens each computes, and of which rows, whose numbers of new tokens are given."""
    groups: dict[int, list[int]] = {}
    for number, count in enumerate(new):
        bits = [bit for bit in range(count.bit_length()) if count >> bit & 1]
        for bit in bits if with_state else bits[-1:]:
            groups.setdefault(bit, []).append(number)
    sizes = [(1 << bit if with_state else max(new[n] for n in rows), rows) for bit, rows in groups.items()]
    return sorted(sizes, reverse=True)


class Turns:
    """What is kept of the conversations of a generation batch, which one model has computed."""

    def __init__(self) -> None:
        self.images = Images()
        """Those of all turns: an image has one code."""
        self.most_bytes = 0
        self.is_full = False
        """Whether nothing more is kept."""
        self._identity: Any = None
        self.forget()

    def forget(self) -> None:
        self.images.forget()  # what an encoder has made of them
        self.known: list[Conversation] = []
        """Sorted by their tokens."""
        self._size = 0  # slots
        self._parts: list[tuple[list[Tensor], list[Tensor]]] = []  # keys and values of each layer that attends
        self._layers: list[Any] = []  # of a cache, without rows
        self._prompts: list[Conversation] = []  # those that are completed now
        self._left: list[tuple[Tensor, Tensor, int, int]] = []  # rows, their tokens, and where these are
        self._states: dict[int, tuple[Tensor, ...]] = {}  # of rows that have ended, behind all tokens but the last

    def tensors(self) -> list[Tensor]:
        kept = [part for both in self._parts for parts in both for part in parts]
        states = [conversation.states for conversation in self.known]
        return [*itertools.chain(kept, *states, *self._states.values())]

    def begin(self, identity: Any) -> None:
        """Forget what a model that was another has computed, and what an error has left."""
        if identity != self._identity:
            self.forget()
        self._identity = identity
        self._left.clear()
        self._states.clear()

    def _add(self, layers: Sequence[tuple[Tensor, ...]]) -> int:
        """Keep keys and values of each layer, [rows, heads, tokens, size]. Return the first of their slots."""
        self._parts, begin = self._parts or [([], []) for _ in layers], self._size
        for parts, both in zip(self._parts, layers, strict=True):
            for kept, states in zip(parts, both):
                kept.append(states.transpose(0, 1).reshape(1, states.shape[1], -1, states.shape[3]))
        self._size += layers[0][0].shape[0] * layers[0][0].shape[2]
        return begin

    def _has_room(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these may be kept too."""
        device, taken = tensors[0].device, sum(tensor.nbytes for tensor in self.tensors())
        needed, free = sum(tensor.nbytes for tensor in tensors), device_memory(device)
        free = host_memory() if free is None else free
        if not self.is_full and taken + 2 * needed > (free + taken) / 2:
            self.is_full = True
            self.forget()
        self.most_bytes = max(self.most_bytes, 0 if self.is_full else taken + needed)
        return not self.is_full

    # Prompts.

    def go_on(self, generation: Generation, otherwise: int) -> Prefilled | None:
        """
        Compute the prompts from where they differ from what is kept. `None` if that costs more than to compute
        `otherwise` so many tokens in one pass.
        """
        if not self.known:
            return None
        prompts, launches = generation.prompts, LAUNCHES.get(generation.input_ids.device.type, LAUNCHES_OF_OTHERS)
        with_state = bool(all_states(self._layers))
        now = [self._beginning_of(np.array(tokens, WORD).tobytes(), with_state) for tokens in prompts.tokens]
        new = [length - len(one.slots) for length, one in zip(prompts.lengths, now)]
        passes = passes_of(new, with_state)
        if sum(size * len(rows) + launches for size, rows in passes) >= otherwise + launches:
            return None
        if any(max(prompts.tokens[row][-size:]) >= FIRST for size, rows in passes for row in rows):
            return None
        self._prompts, logits, computed = now, dict[int, Tensor](), 0
        for size, rows in passes:
            logits |= zip(rows, self._pass(generation, rows, size, with_state))
            computed += sum(min(size, prompts.lengths[row]) for row in rows)
        width, device = max(prompts.lengths), generation.input_ids.device
        cache = self._cache(generation, self._prompts, None)
        owner, places = indices(prompts.owner, device), self._table(self._prompts, width).to(device, non_blocking=True)
        of_prompts = torch.stack([logits[row] for row in range(len(now))])
        return Prefilled(of_prompts.index_select(0, owner), cache, owner, places, width, computed)

    def _beginning_of(self, ids: bytes, with_state: bool) -> Conversation:
        """Return the longest beginning of a prompt that is kept, without the last token, whose logits are needed."""
        if with_state:
            whole = (one for one in self.known if len(one.ids) < len(ids) and ids.startswith(one.ids))
            return max(whole, key=lambda one: len(one.ids), default=NOTHING)
        place = bisect.bisect(self.known, ids, key=attrgetter("ids"))  # a neighbour begins with the most of it
        near = [(one.common(ids[: -WORD.itemsize]), one) for one in self.known[max(place - 1, 0) : place + 1]]
        count, one = max(near, key=lambda pair: pair[0], default=(0, NOTHING))
        return Conversation(one.ids[: count * WORD.itemsize], one.slots[:count])

    def _pass(self, generation: Generation, rows: list[int], size: int, with_state: bool) -> Tensor:
        """Compute so many tokens of these prompts, and return the logits of the next, [rows, vocabulary]."""
        prompts, inputs, ids = generation.prompts, generation.inputs, generation.input_ids
        if not with_state:
            for row in rows:
                cut = max(prompts.lengths[row] - size, 0)
                self._prompts[row] = Conversation(b"", self._prompts[row].slots[:cut])
        now, device = [self._prompts[row] for row in rows], ids.device
        ends = [min(len(one.slots) + size, prompts.lengths[row]) for row, one in zip(rows, now)]
        width = max(size, *ends)
        behind = indices([prompts.lengths[row] - end for row, end in zip(rows, ends)], device)
        columns = torch.arange(ids.shape[1] - size, ids.shape[1], device=device) - behind[:, None]
        first = indices([prompts.first[row] for row in rows], device)
        given: dict[str, Any] = {n: v for n, v in inputs.items() if n not in PER_ROW and n not in NAMES}
        if (positions := inputs.get("position_ids")) is not None:
            positions = positions.index_select(-2, first)
            given["position_ids"] = positions.gather(-1, columns.expand(*positions.shape[:-1], size))
        if positions is None or min(ends) < width:
            is_token = torch.arange(width, device=device) >= width - indices(ends, device)[:, None]
            given["attention_mask"] = is_token.long()
        cache = given[CACHE] = self._cache(generation, now, width - size)
        tokens = ids.index_select(0, first).gather(1, columns)
        prepared = generation.model.prepare_inputs_for_generation(tokens, next_sequence_length=size, **given)
        outputs = generation.model(**prepared, return_dict=True)
        states = all_states(cache.layers)
        begin = self._add([(layer.keys[:, :, -size:], layer.values[:, :, -size:]) for layer in attending(cache.layers)])
        for place, (row, one, end) in enumerate(zip(rows, now, ends)):
            own = np.arange(size - (end - len(one.slots)), size) + begin + place * size
            of_row = [state[place : place + 1] for state in states]
            self._prompts[row] = Conversation(b"", np.concatenate([one.slots, own]), of_row)
        return outputs.logits[:, -1]

    def _cache(self, generation: Generation, rows: list[Conversation], width: int | None) -> Any:
        """Return a cache of rows of so many tokens, padded at the left; `None`: it has the flat rows in their place."""
        cache, device = copy.copy(generation.inputs[CACHE]), generation.input_ids.device
        cache.layers = [*map(copy.copy, self._layers)]
        empty = [*map(torch.zeros_like, all_states(self._layers))]
        states = map(torch.cat, zip(*(one.states or empty for one in rows)))
        table = None if width is None else self._table(rows, width).to(device, non_blocking=True)
        for layer in cache.layers:
            exchange_states(layer, lambda _: next(states))
        for layer, both in zip(attending(cache.layers), self._parts):
            for parts in both:
                if len(parts) > 1:
                    parts[:] = [torch.cat(parts, 2)]
            layer.keys, layer.values = (part if table is None else at_slots(part, table) for (part,) in both)
        return cache

    @staticmethod
    def _table(rows: list[Conversation], width: int) -> Tensor:
        """Return the slots of rows that are padded at the left, [rows, width]."""
        table = np.zeros((len(rows), width), np.int64)
        for places, one in zip(table, rows):
            places[width - len(one.slots) :] = one.slots
        return torch.from_numpy(table)

    def keep_prompts(self, prompts: Prompts, prefilled: Prefilled) -> None:
        """Keep prompts that were computed without what is kept."""
        layers = [(layer.keys, layer.values) for layer in attending(prefilled.cache.layers)]
        if not self._has_room([*itertools.chain(*layers)]):
            return
        if not self._layers:
            self._layers = [*map(copy.copy, prefilled.cache.layers)]
            for layer in self._layers:
                exchange_states(layer, lambda state: state[:1])
            for layer in attending(self._layers):
                layer.keys = layer.values = None
        begin = self._add(layers)
        places, width = prefilled.places, prefilled.width
        if places is None:
            places = np.arange(len(prompts.tokens) * width).reshape(-1, width)
        states = all_states(prefilled.cache.layers)
        self._prompts = [
            Conversation(b"", begin + places[row, width - length :], [state[row : row + 1] for state in states])
            for row, length in enumerate(prompts.lengths)
        ]

    # Completions.

    def keep_rows(self, decoded: Sequence[tuple[Tensor, Tensor]], rows: RowsInPass, which: Tensor) -> None:
        """
        Keep what passes have computed of some rows: `decoded` are keys and values of each layer, [rows, heads, tokens,
        size].
        """
        count = decoded[0][0].shape[2]
        if self.is_full or not count or (self._prompts[0].states and not self._states):
            return
        of_rows = [tuple(states.index_select(0, which) for states in both) for both in decoded]
        if self._has_room([*itertools.chain(*of_rows)]):
            places = which if rows.places is None else rows.places.index_select(0, which)
            self._left.append((places, rows.lengths.index_select(0, which), self._add(of_rows), count))

    def keep_states(self, states: Sequence[Tensor], rows: RowsInPass, which: Tensor) -> None:
        """Keep the states, each [rows, ...], of rows that have ended: padding comes behind them."""
        of_rows = [state.index_select(0, which) for state in states]
        if of_rows and not self.is_full and self._has_room(of_rows):
            places = which if rows.places is None else rows.places.index_select(0, which)
            self._states |= dict(zip(places.tolist(), zip(*(state.split(1) for state in of_rows))))

    def note(self, prompts: Prompts, completions: Tensor) -> None:
        """Note the conversations: prompts and their completions, [rows, tokens of the longest], as far as computed."""
        if self.is_full:
            return
        ids, kept = [np.array(of, WORD).tobytes() for of in prompts.tokens], {}
        tensors = [completions, *(tensor for of_rows in self._left for tensor in of_rows[:2])]
        here = torch.cat([tensor.flatten() for tensor in tensors]).cpu()  # one wait for all
        tokens, *left = (part.numpy() for part in here.split([tensor.numel() for tensor in tensors]))
        tokens = tokens.reshape(completions.shape)
        for number in prompts.owner:
            kept[ids[number]] = self._prompts[number]
        for (*_, begin, count), rows, lengths in zip(self._left, left[::2], left[1::2]):
            for place, (row, length) in enumerate(zip(rows, lengths)):
                number, states = prompts.owner[row], self._states.get(row, ())
                own = np.arange(min(length - bool(states), count))
                slots = np.concatenate([self._prompts[number].slots, begin + place * count + own])
                if len(own) and len(states) == len(self._prompts[number].states):
                    after = ids[number] + tokens[row, : len(own)].astype(WORD).tobytes()
                    kept[after] = Conversation(b"", slots, states, is_prompt=False)
        everything = {**{one.ids: one for one in self.known}, **kept}
        ordered = sorted(everything)
        goes_on = {one for one, after in zip(ordered, ordered[1:]) if after.startswith(one)}
        # A template that changes what the model wrote goes on from the state of a prompt again.
        goes_on -= {one for one in goes_on if everything[one].states and everything[one].is_prompt}
        self.known = [everything[one]._replace(ids=one) for one in ordered if one not in goes_on]
        self._states.clear()


# When.


PLAIN = (bool, int, float, str, type(None))


def structure_of(model: Any) -> Any:
    """Return what beside its weights decides how a model computes, compared by `==`."""
    values, hooks = list[Any](), list[Any]()
    for module in model.modules():
        values += [(name, value) for name, value in vars(module).items() if isinstance(value, PLAIN) and name != STAYS]
        hooks += (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    # Those of libraries pile up: one more asks for gradients of embeddings each time that recomputation is turned on.
    return identity_of(model), values, of_user(hooks), model.config.to_dict()


def sums_of(model: Any) -> list[int]:
    """Return a number for each weight that changes with its bits, also with those that `weight.data` changes."""
    sums, versions = list[Tensor](), list[int]()
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if type(values := tensor.data) is not Tensor:
            versions.append(tensor._version)
            continue
        values = values.reshape(-1).view(torch.uint8)
        # A sum of long words takes as long as to read them, and no doubling of all numbers leaves it as it was.
        is_whole = len(values) % 8 == values.storage_offset() % 8 == 0
        sums.append((values.view(torch.int64) if is_whole else values).sum())
    return versions + (torch.stack(sums).tolist() if sums else [])


def reason_not_in_pieces(generation: Generation) -> str | None:
    """Return why rows cannot be computed in pieces; `None` if they can. Two short ones are computed in both ways."""
    model, longest = generation.model, max(generation.prompts.tokens, key=len)
    window = window_of(model.config.get_text_config(decoder=True))
    count = FEW if len(longest) <= window else int(window) + FEW
    tokens = np.resize([token for token in longest if token < FIRST], count).tolist()

    def batch(end: int) -> Generation:
        rows = [tokens[:end], tokens[3:end]]
        ids = torch.tensor([rows[0], [0] * 3 + rows[1]], device=model.device)
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        inputs = {"attention_mask": mask, CACHE: generation.inputs[CACHE], "use_cache": True}
        if generation.inputs.get("position_ids") is not None:
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        return replace(generation, input_ids=ids, inputs=inputs, prompts=Prompts.of(rows), batch=None)

    half = torch.is_autocast_enabled(model.device.type) or model.dtype != torch.float32
    turns, first, both = Turns(), batch(count - 7), batch(count)
    try:
        with as_before(model, model.device):
            model.eval()
            turns.keep_prompts(first.prompts, padded(first))
            turns.note(first.prompts, first.input_ids[:, :0])
            pieces = turns.go_on(both, 1 << 30)
            distance = float("inf") if pieces is None else apart(padded(both).logits, pieces.logits)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"the model does not go on from its cache ({type(error).__name__}: {error})"
    if not distance <= TOLERANCES[half]:
        return f"logits of rows in two pieces are {distance:.1e} of their length away from those in one"
    return None
