"""
Completions on a GPU: the pass that computes one token of each row is captured once as a CUDA graph, and then replayed.

What costs time on a GPU. A pass over one token per row is a thousand small kernels. The host needs longer to launch
them than the device to compute them: 42 ms against 6 ms, measured for 0.5B parameters with adapters on an H200. So it
saves nothing to compute fewer rows. What saves is to launch all kernels at once, which a graph does. A graph repeats
the same kernels on the same memory, so whatever changes from token to token must lie at a fixed place:

    keys, values     of each layer [rows, heads, length, size]; the new token is written to column `place` of all rows
    mask             [rows, length]: 0 where a prompt is padded, 1 elsewhere. Columns after `place` are in the future,
                     which the model's causal mask hides
    states           of layers with a state along the row, [rows, ...]: each pass overwrites them
    token, position  [rows, 1], and `place` []: written before each replay

`length` is a multiple of [`BLOCK`]. Small buffers ([`SHARE_KEPT`]) have room for the longest completion at once. A
graph works on the first of their rows and columns. Where these columns are full, a graph of twice as many takes over.
Larger buffers grow then, and the pass is captured again. Ended rows stay where they are and get padding. When at most
half of the rows go on, these move to the front of the buffers. A graph of half as many rows takes over, if it is there,
is of use later or is worth it ([`WORTH_A_CAPTURE`]). To capture a pass is to compute it too, so states are put back.

The model and the logits processors are those of transformers, and the model makes its masks as for a `StaticCache`.
These become numbers once, not in each layer ([`numbers_of`]). Heads that read the same keys are computed together
([`packing`]). A table says which tokens end a row. Adapters compute with fewer kernels than in PEFT
(phase_memory/adapter_products.py), from copies that are brought up to date before each generation. Tokens are drawn
outside of the graph.

The host never waits for the token that it has just drawn. Every eight tokens it orders a copy of what it has to
know, launches one more token, and then reads: so it learns of the end up to nine tokens late.

Small buffers and their graphs stay for the next generation: to capture costs as much as tens of tokens. A graph reads
the weights where they were when it was captured, and knows nothing of Python: so it is used again only if every weight
is at the same place and the adapters are the same ([`_identity`]).

A pass that reads a value on the host, or brings one from there, cannot be captured. The pass that warms up is watched
for this ([`HostReads`]), and TRL's `generate` is called instead. So it is after an error in a capture, and for the rest
of the run.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import _has_any_global_hook as has_any_global_hook
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, Cache, StaticCache
from transformers.cache_utils import LinearAttentionLayer, StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_hybrid.compat import packs_heads
from hf_hybrid.machine import device_memory
from hf_hybrid.phase_memory.adapter_products import users_forward
from hf_hybrid.recovery import is_out_of_memory
from hf_hybrid.rows.attention import attention
from hf_hybrid.rows.facts import of_user
from hf_hybrid.trl.completions import (
    CACHE,
    PER_ROW,
    Generation,
    PlainRolloutsError,
    Prefilled,
    all_states,
    attending,
    exchange_states,
    states_of,
)
from hf_hybrid.trl.host_reads import HostReads

if TYPE_CHECKING:
    from hf_hybrid.phase_memory.adapter_products import AdapterProducts

CAPTURING = {"cuda"}
"""Types of devices on which passes are captured."""
BLOCK = 256
"""Columns by which buffers grow."""
FEWEST_ROWS = 8
"""Rows of the smallest graph. A pass of so few should cost its launches alone; no card has measured it."""
SHARE_KEPT = 0.05
"""Buffers that take at most this share of the device's memory have all columns at once, and are kept."""
WARM_UPS = 2
"""Passes before one is captured, in which libraries allocate what they keep."""
WORTH_A_CAPTURE = 200
"""Tokens that pay for a graph of half the rows that is used once. Estimated: it costs 50, and saves 1/4 of each."""
ATTENTION = frozenset({"sdpa", "eager"})
"""Attention that computes a token against a buffer with a mask, without a look at it on the host."""


class LittleMemoryError(PlainRolloutsError):
    """There is too little memory on the device."""

    advice = "Fewer rows in a generation, or shorter ones, take less, and are computed several times as fast."


def reason_not_captured(model: Any) -> str | None:
    """Return why a pass of this model, without adapters around it, cannot be captured; `None` if it may be."""
    if not model._can_compile_fullgraph:
        return f"`{type(model).__name__}` does not say that it takes keys and values of a fixed size"
    of_modules = [
        hook for m in model.modules() for hooks in (m._forward_pre_hooks, m._forward_hooks) for hook in hooks.values()
    ]
    if has_any_global_hook() or of_user(of_modules):
        return "a hook looks into its modules, and a graph would not call it"
    if (attention := model.config._attn_implementation) not in ATTENTION:
        return f"`attn_implementation={attention!r}` looks at the mask on the host, which cannot be captured"
    places = {str(tensor.device) for tensor in itertools.chain(model.parameters(), model.buffers())}
    if len(places) > 1:
        return f"the weights are on several devices: {', '.join(sorted(places))}"
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        return f"`{type(quantizer).__name__}` does not say that its layers can be captured"
    return None


def packing(model: Any) -> contextlib.AbstractContextManager[None]:
    """Context in which heads of a model that read the same keys are rows of one product, whatever transformers does."""
    text = model.config.get_text_config(decoder=True)
    if packs_heads() or text._attn_implementation != "sdpa":
        return contextlib.nullcontext()
    AttentionInterface.register("hf_hybrid_packed", attend)
    return attention(text, "hf_hybrid_packed")


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
    """Attend for one token of each row by `scaled_dot_product_attention`; arguments and result of transformers."""
    if attention_mask is None or attention_mask.shape[1] > 1 or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    rows, heads, _, size = query.shape
    packed, dropout = query.reshape(rows, key.shape[1], -1, size), options.get("dropout", 0.0)
    output = scaled_dot_product_attention(packed, key, value, attention_mask, dropout, scale=options.get("scaling"))
    return output.reshape(rows, 1, heads, -1), None


# The pass.


class FixedLayer(StaticLayer):
    """
    Keys and values of one layer, [rows, heads, length, size], at a fixed place. transformers' `StaticLayer` counts its
    tokens by itself; this one is told by `place`, which all layers share. A layer with a sliding window keeps all
    columns, and its mask hides those outside of the window.
    """

    def __init__(self, keys: Tensor, values: Tensor, place: Tensor, is_sliding: bool):
        super().__init__(max_cache_len=keys.shape[2])
        self.keys, self.values, self.cumulative_length, self.is_sliding = keys, values, place, is_sliding
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        keys: Any = self.keys
        values: Any = self.values
        column = self.cumulative_length.view(1)
        # Under autocast `torch.cat` of a `DynamicLayer` may have made the prompt's values wider.
        key_states, value_states = key_states.to(keys.dtype), value_states.to(values.dtype)
        return keys.index_copy_(2, column, key_states), values.index_copy_(2, column, value_states)


class FixedCache(StaticCache):
    """A cache of such layers. Some models ask whether it is a `StaticCache`, whose layers are made from a config."""

    def __init__(self, layers: list[Any]):
        Cache.__init__(self, layers=layers)


class CapturedPass:
    """A pass over fixed tensors, as a graph. `output` is overwritten by each [`replay`]."""

    def __init__(self, compute: Callable[[], Tensor], device: torch.device, stream: Any, pool: Any):
        module = torch.get_device_module(device)
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            for _ in range(WARM_UPS):
                with HostReads():
                    compute()
        module.current_stream().wait_stream(stream)
        self._graph, first = module.CUDAGraph(), None
        # Other threads of the process may ask the driver for memory meanwhile.
        capture = module.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        try:
            # After an error `torch.cuda.graph` does not leave its stream: the context around it does.
            with module.stream(module.current_stream()), capture:
                try:
                    self.output = compute()
                except BaseException as error:
                    first = error
                    raise
        except BaseException:
            give_back(device, pool)
            if first is not None:  # `torch.cuda.graph` may raise another, which says only that there was one
                raise first from first.__cause__
            raise

    def replay(self) -> Tensor:
        """Compute the next token's logits, [rows, vocabulary]."""
        self._graph.replay()
        return self.output


def give_back(device: torch.device, pool: Any) -> None:
    """
    Undo what an error in a capture leaves behind. Torch 2.11 goes on to take all memory from its `pool`, and its random
    generator draws nothing more.
    """
    with contextlib.suppress(RuntimeError):  # later ones have ended it by themselves
        torch._C._cuda_endAllocateToPool(device.index, pool)
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())


class Buffers:
    """
    Fixed tensors for the rows of a generation, of at most `length` tokens, and the graphs that work on them, by their
    number of rows and of columns: each works on the first of them. All are captured on one `stream`, which no other
    graph may have: torch 2.12 frees what graphs of a stream share as soon as one of them is dropped, so they are
    dropped together.
    """

    reads_late = True
    refused: str | None = None
    """Why a pass could not be captured."""

    def __init__(
        self, generation: Generation, prefilled: Prefilled, length: int, adapters: AdapterProducts | None, stream: Any
    ):
        self.model, self.inputs, self._stream, self._pool = generation.model, fixed_inputs(generation), stream, None
        self._adapts = contextlib.nullcontext if adapters is None else adapters.computing
        self.rows, self.length, self.graphs = len(prefilled.logits), length, dict[tuple[int, int], CapturedPass]()
        self.columns, self.stays = length, False
        self.held = self.longest = self.width = 0
        """Columns with tokens, those at the end of the longest possible completion, and those of prompts."""
        self.device = device = prefilled.logits.device
        self.with_state: list[Any] = [None for _ in prefilled.cache.layers]  # layers of a cache, or `None`
        attends = attending(prefilled.cache.layers)
        self.sliding = [layer.is_sliding for layer in attends]
        self.layers = [(self._of_layer(layer.keys), self._of_layer(layer.values)) for layer in attends]
        self.token = torch.zeros(self.rows, 1, dtype=torch.long, device=device)
        self.place = torch.zeros((), dtype=torch.long, device=device)
        # Columns behind the token are hidden by causality, so that the mask need not change with each token.
        self.mask = torch.ones(self.rows, length, dtype=torch.long, device=device)
        positions = generation.inputs.get("position_ids")  # where images stand they have several axes
        self.positions = None if positions is None else positions.new_zeros(*positions.shape[:-2], self.rows, 1)

    def _of_layer(self, states: Tensor) -> Tensor:
        """Zeros, as what is hidden by a mask must be finite."""
        return states.new_zeros(self.rows, states.shape[1], self.length, states.shape[3])

    @property
    def states(self) -> list[Tensor]:
        """Those of layers with a state, each [rows, ...]."""
        return all_states(self.with_state)

    def fill(self, generation: Generation, prefilled: Prefilled) -> None:
        """Write the prompts of all rows, the first of the buffers."""
        count, width, inputs = len(prefilled.logits), prefilled.width, generation.inputs
        self.held, self.longest, self.width = width, longest_of(generation, prefilled), width
        taken = filter(None, map(prefilled.take, prefilled.cache.layers))
        for (keys, values), (of_keys, of_values) in zip(self.layers, taken, strict=True):
            keys[:count, :, :width], values[:count, :, :width] = of_keys, of_values
        for number, layer in enumerate(prefilled.cache.layers):
            if self.with_state[number] is None and isinstance(layer, LinearAttentionLayer):
                self.with_state[number] = layer
            for state, of_prompts in zip(states_of(self.with_state[number]), states_of(layer)):
                state[:count] = of_prompts
        self.place.fill_(width)
        self.mask.fill_(1)
        if (mask := inputs.get("attention_mask")) is not None:
            self.mask[:count, :width] = mask[:, -width:]
        if self.positions is not None:
            self.positions[..., :count, :] = inputs["position_ids"][..., -1:] + 1

    def rows_for(self, rows: int, go_on: int, left: int) -> int:
        fewest = fewest_rows(rows, go_on)
        is_due = self.stays or self.held == self.columns or (fewest, self.columns) in self.graphs
        return fewest if is_due or left >= WORTH_A_CAPTURE else rows

    def widen(self, rows: int) -> None:
        """Let passes see more columns, of rows of which there are so many."""
        if self.columns < self.length:
            self.columns = min(room_for(2 * self.columns), self.length)
        else:
            self.grow(rows, room_for(min(max(self.length + BLOCK, self.length * 5 // 4), self.longest)))

    def grow(self, rows: int, length: int) -> None:
        """Make room for longer rows, of which there are so many. The graphs are of no use any more."""
        self.graphs.clear()
        more = (0, 0, 0, length - self.length)
        for index, (keys, values) in enumerate(self.layers):
            self.layers[index] = (pad(keys[:rows], more), pad(values[:rows], more))
        for layer in self.with_state:
            exchange_states(layer, lambda state: state[:rows])
        self.mask = pad(self.mask[:rows], (0, length - self.length), value=1)
        self.rows, self.length, self.columns, self.token = rows, length, length, self.token[:rows]
        self.positions = None if self.positions is None else self.positions[..., :rows, :]

    def move(self, rows: Tensor) -> None:
        """Bring these rows to the front."""
        positions = () if self.positions is None else (self.positions.movedim(-2, 0),)
        seen = (states[:, :, : self.columns] for states in itertools.chain(*self.layers))
        for states in itertools.chain(seen, self.states, (self.mask,), positions):
            # In place, as graphs know the addresses. The selection is a copy, so rows may move over each other.
            states[: len(rows)] = states.index_select(0, rows)

    def compute(self, tokens: Tensor) -> Tensor:
        count = len(tokens)
        with self._refusing():
            if self.held == self.columns:  # no column is left for the next token
                self.widen(count)
            if (count, self.columns) not in self.graphs:
                self.capture(count)
        self.token[:count, 0] = tokens
        logits = self.graphs[count, self.columns].replay()
        self.held += 1
        self.place += 1  # on the device: the graph writes there in its next replay
        if self.positions is not None:
            self.positions += 1
        return logits

    def decoded(self) -> list[tuple[Tensor, Tensor]]:
        computed = slice(self.width, self.held)
        return [(keys[:, :, computed], values[:, :, computed]) for keys, values in self.layers]

    @contextlib.contextmanager
    def _refusing(self) -> Generator[None]:
        """After an error inside no pass is captured any more: it may come again, and take more with it."""
        try:
            yield
        except Exception as error:
            self.refused = str(error)
            if is_out_of_memory(error):
                self.refused = "memory ran out when a pass was captured"
                raise LittleMemoryError(self.refused) from None
            raise

    def capture(self, count: int) -> None:
        """Capture the pass of so many rows. It is computed meanwhile, and writes to the column of the next token."""
        module = torch.get_device_module(self.device)
        if not self.graphs:
            self._pool = module.graph_pool_handle()  # no two of them run at the same time
        before = [*map(torch.clone, self.states)]  # [rows, ...]: warm-ups go on from the states, and move them
        self.graphs[count, self.columns] = CapturedPass(self._pass(count), self.device, self._stream, self._pool)
        for state, earlier in zip(self.states, before):
            state.copy_(earlier)

    def _pass(self, count: int) -> Callable[[], Tensor]:
        model, token, adapts, columns = self.model, self.token[:count], self._adapts, self.columns
        inputs = {**self.inputs, "attention_mask": self.mask[:count, :columns]}
        fixed = (
            FixedLayer(keys[:count, :, :columns], values[:count, :, :columns], self.place, sliding)
            for (keys, values), sliding in zip(self.layers, self.sliding)
        )
        # A layer with a state is copied, not its tensors: each graph works on the first `count` rows of the same ones.
        layers = [next(fixed) if layer is None else copy.copy(layer) for layer in self.with_state]
        for layer in layers:
            exchange_states(layer, lambda state: state[:count])
        inputs[CACHE] = FixedCache(layers)
        if self.positions is not None:
            inputs["position_ids"] = self.positions[..., :count, :]
        kind, dtype = self.device.type, self.layers[0][0].dtype
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
        seen, hidden = (torch.full((), number, dtype=dtype, device=self.device) for number in (0.0, -torch.inf))

        def compute() -> Tensor:
            # Under autocast weights are cast within the pass: a copy from outside would be old at the next replay.
            torch.clear_autocast_cache()
            prepared = model.prepare_inputs_for_generation(token, next_sequence_length=1, **inputs)
            masks = prepared.get("attention_mask")
            prepared["attention_mask"] = tree_map(lambda mask: numbers_of(mask, seen, hidden), masks)
            with adapts(), packing(model):
                logits = model(**prepared, return_dict=True).logits[:, -1]
            torch.clear_autocast_cache()
            return logits

        return compute


def numbers_of(mask: Any, seen: Tensor, hidden: Tensor) -> Any:
    """Return what of a mask is added to scores: `scaled_dot_product_attention` makes it of booleans in each layer."""
    is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() == 4
    return torch.where(mask, seen, hidden) if is_mask else mask


def fixed_inputs(generation: Generation) -> dict[str, Any]:
    """Return what the model gets in each pass alike."""
    return {name: value for name, value in generation.inputs.items() if name not in PER_ROW}


def longest_of(generation: Generation, prefilled: Prefilled) -> int:
    """Return the columns that the longest possible completion takes. Those of `prefilled` may have less padding."""
    return prefilled.width + generation.config.max_length - generation.input_ids.shape[1]


def room_for(length: int) -> int:
    """Return the columns of buffers for rows of so many tokens."""
    return -(-length // BLOCK) * BLOCK


def fewest_rows(rows: int, go_on: int) -> int:
    """Return the rows of the smallest graph in which so many go on: 64, or the half of that, and so on."""
    while (half := (rows + 1) // 2) >= max(go_on, FEWEST_ROWS):
        rows = half
    return rows


class Captured:
    """Captures passes, and keeps buffers and graphs from one generation to the next."""

    def __init__(self):
        self.keeps = True
        """Whether buffers have all columns from the beginning and are kept, if they are small."""
        self.refused: str | None = None
        """Why the pass of this model cannot be captured, once that was tried."""
        self.adapters: AdapterProducts | None = None
        """How adapters of the model compute in a captured pass, if not by PEFT's forward."""
        self._buffers: Buffers | None = None
        self._identity: Any = None
        self._stream: Any = None  # one for all buffers, of which there are never two: libraries keep memory for each

    def free(self) -> bool:
        """Give buffers and graphs back. Return whether there were any."""
        kept, self._buffers = self._buffers is not None, None
        return kept

    def tensors(self) -> list[Tensor]:
        """Return the keys and values that are kept, and copies of adapters."""
        kept = [] if self._buffers is None else [*itertools.chain(*self._buffers.layers), *self._buffers.states]
        return kept if self.adapters is None else [*kept, *self.adapters.tensors_held()]

    @contextlib.contextmanager
    def passes(self, generation: Generation, prefilled: Prefilled) -> Generator[Buffers]:
        """Inside, captured passes compute the tokens of a generation, from buffers that are kept if they are small."""
        buffers = self._prepared(generation, prefilled)
        try:
            yield buffers
            self._buffers = buffers if buffers.stays else None
        finally:
            self.refused = buffers.refused

    def _prepared(self, generation: Generation, prefilled: Prefilled) -> Buffers:
        """Return buffers with all prompts, which are those of the last generation if they are of use."""
        if self.adapters is not None:
            self.adapters.refresh()
        used = None if self.adapters is None else self.adapters.used
        identity, rows, device = (_identity(generation), used), len(prefilled.logits), prefilled.logits.device
        longest = longest_of(generation, prefilled)
        first, longest = room_for(min(longest, prefilled.width + BLOCK)), room_for(longest)
        buffers, self._buffers = self._buffers, None  # until it is known that all went well
        if buffers is None or identity != self._identity or buffers.rows < rows or buffers.length < longest:
            buffers = None  # before others are made
            module, free = torch.get_device_module(device), device_memory(device)
            total = module.mem_get_info(device)[1] if hasattr(module, "mem_get_info") else float("inf")
            free, at_the_end = float("inf") if free is None else free, bytes_of(prefilled, longest)
            stays = self.keeps and at_the_end <= free and at_the_end <= SHARE_KEPT * total
            length = longest if stays else first
            if (needed := bytes_of(prefilled, length)) > free:
                what = f"buffers for keys, values and states take {needed / 2**30:.1f} GiB"
                raise LittleMemoryError(f"{what}, and {free / 2**30:.1f} GiB are free")
            self._stream = self._stream or module.Stream()
            buffers = Buffers(generation, prefilled, length, self.adapters, self._stream)
            self._identity, buffers.stays = identity, stays
        buffers.columns = first
        buffers.fill(generation, prefilled)
        return buffers


def bytes_of(prefilled: Prefilled, length: int) -> int:
    """Return the bytes of buffers of this length for all rows, and of states that are put back after a capture."""
    layers, rows = attending(prefilled.cache.layers), len(prefilled.logits)
    of_a_token = sum(states[0, :, 0].nbytes for layer in layers for states in (layer.keys, layer.values))
    of_states = sum(state[0].nbytes for state in all_states(prefilled.cache.layers))
    return rows * (of_a_token * length + 2 * of_states)


def identity_of(model: Any) -> Any:
    """Where the weights of a model are, which adapters are active and how strong, and how modules compute."""
    device = model.device.type
    adapters = [
        (tuple(module.active_adapters), module.disable_adapters, tuple(module.merged_adapters), scaling.copy())
        for module in model.modules()
        if isinstance(scaling := getattr(module, "scaling", None), dict) and hasattr(module, "merged_adapters")
    ]
    return (
        id(model),
        [tensor.data_ptr() for tensor in itertools.chain(model.parameters(), model.buffers())],
        adapters,
        [*map(type, model.modules())],
        {id(module): users_forward(module) for module in model.modules() if "forward" in vars(module)},
        [module.p for module in model.modules() if isinstance(module, _DropoutNd)],
        model.training,
        model.config._attn_implementation,
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
    )


def _identity(generation: Generation) -> Any:
    """
    What a graph depends on beside the values of its buffers and of the weights, compared by `==`: the model, and what
    else it is given.
    """
    positions = generation.inputs.get("position_ids")
    return identity_of(generation.model), None if positions is None else positions.shape[:-2], fixed_inputs(generation)
