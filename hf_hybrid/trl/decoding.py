"""
The completions of TRL's GRPO and RLOO without repeated work: token by token those of transformers' `generate`.

What `generate` repeats. TRL samples several completions of each prompt and gives `generate` as many copies of the
prompt. `generate` computes every copy, and pads short prompts to the longest of the batch. Prompts that begin alike,
with a system prompt or worked examples, are computed in full each. Then it computes one token of each row per pass
until the last row has ended. It also computes rows that have ended, and discards the result.

What is computed instead, here for two prompts with three completions each:

    prompts        s s s s p p p p          each once, those of similar length together, and the beginning that they
                           q q q            share once; then keys and values are repeated for the completions
    completions    p: a a a .  .            a row that has ended leaves the batch, as soon as a quarter of the rows in
                   p: b b b b  b b          it have. The columns that are padding for all rows that are left go too
                   p: c .  .
                   q: ...

Why the completions are the same. A row of a transformer does not depend on other rows. Positions and masks of a row are
those that it has in TRL's batch, so its logits are the same too, up to the rounding of a batch of another shape.
`torch.multinomial` draws tokens from the probabilities of the *whole* batch, in which those of removed rows are stale.
So each row gets the random numbers that it gets in TRL, and the generator is left in the same state. Rounding changes a
sampled token only if two tokens are closer than the rounding. It is coarser in bf16, where TRL's own completions depend
on the shape of the batch too.

Layers with a state along the row (Gated DeltaNet, Mamba 2, short convolutions) have it repeated for the completions, as
keys and values are. Padding at the left of a prompt leaves such a state at zero, so a chunk of prompts may have it.
Behind a state it would change the state: so what different prompts share at their beginning is computed for each.

Logits processors, stopping criteria, configs and models stay those of transformers. `generate` itself prepares them,
and then calls [`Decoding`] in place of its own loop: it takes a loop as `custom_generate`. TRL calls `generate` of the
model without this argument. So [`Decoding.completing`] puts a function in front of it, on this one model and until TRL
has its completions.

If the result is not known to be exact, transformers generates the whole batch; [`why_plain_model`] and
[`_reason_plain`] list these cases. [`PlainRolloutsError`] ends the call, and `generate` is called as TRL calls it. It
is called too if the loop raises an error that nobody foresaw, from then on for the rest of the run. The random
generators are set back first, so the completions are still TRL's.

**This loop is for a CPU.** There a token costs what the rows in the batch cost. On a GPU it costs what the host needs
to start the kernels, so rows that leave save nothing, and each new shape costs more: without a mask
`scaled_dot_product_attention` plans anew for each length of the keys. On an H200 this loop took 1.5 to 2.4 times the
seconds of `generate`. So on a CUDA device captured.py completes the prompts. They are computed once here too, padded to
a few lengths ([`PREFILL`]). On every other accelerator TRL's call stays as it is.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    GenerationMixin,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteriaList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_hybrid.compat import layers_that_keep_nothing
from hf_hybrid.optimizers import has_adapters
from hf_hybrid.part import Part
from hf_hybrid.recovery import drop_tensors_of, is_out_of_memory
from hf_hybrid.rows.costs import Costs, busy
from hf_hybrid.run.fallbacks import Fallbacks
from hf_hybrid.run.run import RandomStates, Run
from hf_hybrid.run.trainer_view import module_of_user
from hf_hybrid.trl.captured import (
    CACHE,
    CAPTURING,
    Captured,
    PlainRolloutsError,
    exchange_states,
    states_of,
    why_not_captured,
)

if TYPE_CHECKING:
    from hf_hybrid.phase_memory.adapters import AdapterProducts

ROWWISE = frozenset({
    EpsilonLogitsWarper, EtaLogitsWarper, ExponentialDecayLengthPenalty, ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor, InfNanRemoveLogitsProcessor, LogitNormalization, MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor, MinPLogitsWarper, NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor, SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor, TemperatureLogitsWarper, TopHLogitsWarper, TopKLogitsWarper, TopPLogitsWarper,
    TypicalLogitsWarper,
})  # fmt: skip
"""Logits processors that compute a row from this row alone. [`RowwiseProcessors`] tells one of them of its rows."""
KNOWN = {"attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep"}
"""What `generate` may give the model beside tokens."""
KINDS_OF_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
)
"""Of a cache from which rows can be taken."""
COUNTS = ("rows_decoded", "rows_decoded_saved", "prompt_tokens_shared")
KEEP = 0.75
"""Rows leave when at most this share of the rows in the batch goes on: to leave costs a copy of the cache."""
PREFILL = 64
"""On a GPU prompts are padded to a multiple of so many columns: attention is planned anew for each length."""

PASS = 32
"""Tokens that a further pass has to save on a CPU: it reads all weights, which takes as long as 20 tokens."""

# Arithmetic.


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


def tokens_of_a_pass(model: Any) -> float:
    """
    Return how many tokens a further pass of the prompts has to save.

    On a GPU as many as keep it busy while its host launches the pass, a third of what [`busy`] counts: on an H100
    14,500 of a model of 0.5B, 900 of one of 7B.
    """
    if model.device.type not in CAPTURING:
        return PASS
    costs = Costs.of(model)
    return busy(model.device) / 3 * costs.layers / costs.token


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two prompts have in common at their beginning."""
    for place, (one, other) in enumerate(zip(first, second)):
        if one != other:
            return place
    return min(len(first), len(second))


class Branch(NamedTuple):
    """Prompts that begin alike."""

    shared: int  # tokens that all begin with, which are computed once
    first: int  # one of all prompts
    prompts: list[int]  # those that share no more than this
    branches: list[Branch]  # those that share more


def branch_of(
    prompts: Sequence[Sequence[int]], order: Sequence[int], least: float, multiple: int, most: int, above: int = 0
) -> Branch:
    """
    Return what prompts share at their beginning. `order` are their indices, sorted by their tokens.

    What is shared takes a pass of its own, so it has to save more than `least` tokens beside the `above` tokens that
    are computed already. It is a `multiple`, at most `most`, and leaves each prompt a last token.
    """
    rows = [*map(prompts.__getitem__, order)]
    alike = common(rows[0], rows[-1])  # and so those between them
    shared = min(alike, most, min(map(len, rows)) - 1) // multiple * multiple
    is_worth = (len(order) - 1) * (shared - above) > least
    branch = Branch(shared if is_worth else above, order[0], [], [])
    next_tokens = [*map(operator.itemgetter(slice(alike, alike + 1)), rows)]  # none where a prompt ends
    for _, places in itertools.groupby(range(len(order)), next_tokens.__getitem__):
        members = [*map(order.__getitem__, places)]
        if len(members) == 1:
            branch.prompts.extend(members)
            continue
        below = branch_of(prompts, members, least, multiple, most, branch.shared)
        if below.shared > branch.shared:
            branch.branches.append(below)
        else:
            branch.prompts.extend(below.prompts)
            branch.branches.extend(below.branches)
    return branch


def chunks_of_similar_length(lengths: Sequence[int], more: int = 16) -> list[list[int]]:
    """
    Return indices of prompts in groups that are computed together, short ones first.

    The longest of a group has at most a quarter and `more` tokens more than its shortest. So little is padding, and
    there are few groups: lengths between 50 and 500 make eight.
    """
    chunks: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not chunks or lengths[index] > 1.25 * lengths[chunks[-1][0]] + more:
            chunks.append([])
        chunks[-1].append(index)
    return chunks


def drawn(probabilities: Tensor, all_probabilities: Tensor | None, places: Tensor | None) -> Tensor:
    """
    Draw a token of each row that is left, shape [rows left], with the random numbers that it gets in the whole batch.

    `probabilities` of shape [rows left, vocabulary] are written into `all_probabilities` of shape [rows, vocabulary] at
    `places`; those of rows that have left are any. Both are `None` if no row has left.
    """
    if all_probabilities is None or places is None:
        return torch.multinomial(probabilities, 1)[:, 0]
    return torch.multinomial(all_probabilities.index_copy_(0, places, probabilities), 1)[places, 0]


def indices(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return indices on a device, for which the host does not wait."""
    return torch.tensor(numbers, dtype=torch.long).to(device, non_blocking=True)


# What is left to transformers.


def why_plain_model(model: Any) -> str | None:
    """Return why completions of this model, which may have adapters, are left to transformers; `None` if not."""
    for adapter in getattr(model, "peft_config", {}).values():
        if adapter.is_prompt_learning:
            return f"`{adapter.peft_type.value}` puts learned tokens before the prompt"
        if getattr(adapter, "alora_invocation_tokens", None):
            return "activated LoRA looks for the place in each row where it begins"
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base.config.is_encoder_decoder:
        return "the model has an encoder"
    if "generate" in vars(base) or type(base).generate is not GenerationMixin.generate:
        return f"`{type(base).__name__}` has a `generate` of its own"
    if getattr(base, "is_loaded_in_8bit", False):
        return "matrix products in 8 bits look at all rows at once"
    if base.device.type in CAPTURING:
        return why_not_captured(base)
    if base.device.type != "cpu":
        return f"passes are not captured on `{base.device.type}`, and fewer rows are not faster there"
    return None


def adapters_of(model: Any) -> AdapterProducts | None:
    """Return what computes the adapters of a model in captured passes; `None` if PEFT does, or processes share them."""
    whole = all(weight.numel() and getattr(weight, "device_mesh", None) is None for weight in model.parameters())
    if model.device.type not in CAPTURING or not has_adapters(model) or not whole:
        return None
    from hf_hybrid.phase_memory.adapters import AdapterProducts, plain_lora_layers

    if not (layers := plain_lora_layers(model)):
        return None
    products = AdapterProducts(layers, model.get_input_embeddings().weight.dtype, autocast=False)
    products.place(model)
    return products


def why_plain_cache(cache: Any, longest: int, window_by_mask: bool) -> str | None:
    """
    Return why rows cannot be taken out of this cache; `None` if they can.

    `cache` is what `generate` has prepared, still empty; `longest` the tokens of a row at the end, with its padding;
    `window_by_mask` whether keys outside of a window are kept, and hidden by the mask, as in captured passes.
    """
    if type(cache) is not DynamicCache or cache.offloading:
        kind = "an offloaded cache" if getattr(cache, "offloading", False) else f"`{type(cache).__name__}`"
        return f"keys and values are in {kind}, not in a plain `DynamicCache`"
    counts = not cache.layers  # or some layer of it
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionAndFullAttentionLayer) and window_by_mask:
            return "passes of layers that attend and have a state are not captured"
        if type(layer) not in KINDS_OF_LAYERS and (window_by_mask or type(layer) not in layers_that_keep_nothing()):
            return f"the cache has a layer of another kind, `{type(layer).__name__}`"
        sliding = isinstance(layer, DynamicSlidingWindowLayer) and not window_by_mask
        if sliding and longest > layer.sliding_window:
            return f"a row of {longest} tokens does not fit into the window of {layer.sliding_window} tokens"
        counts = counts or isinstance(layer, DynamicLayer)
    if not counts:
        return "no layer of the cache counts tokens (all have a state along the row)"
    return None


def why_plain_positions(config: Any, longest: int) -> str | None:
    """Return why positions of a row depend on other rows; `None` if they do not."""
    rope = getattr(config, "rope_parameters", None) or {}
    for values in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = values.get("rope_type") or ""
        trained = [values.get("original_max_position_embeddings"), getattr(config, "max_position_embeddings", None)]
        if ("dynamic" in kind or kind == "longrope") and longest > min([n for n in trained if n], default=0):
            return f"the frequencies of `{kind}` positions depend on the longest row of the batch"
    return None


def _reason_plain(
    model: Any,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_inputs: dict[str, Any],
    prompts: Prompts,
) -> str | None:
    """Return why a call is left to transformers; `None` if it is not. See [`Decoding._decode`]."""
    if (mode := config.get_generation_mode()) not in ("greedy_search", "sample"):
        return f"the generation config asks for `{mode.value}`"
    for name in ("return_dict_in_generate", "prefill_chunk_size", "token_healing"):
        if getattr(config, name, None):
            return f"the generation config has `{name}={getattr(config, name)}`"
    if len(input_ids) != len(prompts.owner):
        return f"{len(input_ids)} rows are asked for, and there are {len(prompts.owner)} prompts"
    if min(prompts.lengths) == 0:
        return "a prompt has no tokens"
    if others := sorted(name for name, value in model_inputs.items() if value not in (None, {}) and name not in KNOWN):
        return f"the model gets `{others[0]}` beside tokens"
    for processor in processors:
        if type(processor) not in ROWWISE:
            return f"`{type(processor).__name__}` is not known to look at one row at a time"
    kinds = set(map(type, criteria))
    if others := sorted(kind.__name__ for kind in kinds - {MaxLengthCriteria, EosTokenCriteria}):
        return f"`{others[0]}` is not known to look at one row at a time"
    if MaxLengthCriteria not in kinds or (EosTokenCriteria in kinds and config.pad_token_id is None):
        return "there is no length at which rows end, or no padding token"
    positions = model_inputs.get("position_ids")
    if positions is not None and positions.shape != input_ids.shape:
        return "positions have another shape than tokens"
    if not model_inputs.get("use_cache") or model_inputs.get(CACHE) is None:
        return "there is no cache of keys and values (`use_cache=False`, or a model with a state of its own)"
    longest, text = config.max_length, model.config.get_text_config(decoder=True)
    window_by_mask = input_ids.device.type in CAPTURING and "chunked_attention" not in (
        getattr(text, "layer_types", None) or ()
    )
    return why_plain_cache(model_inputs[CACHE], longest, window_by_mask) or why_plain_positions(text, longest)


# The loop.


@dataclass
class Prefilled:
    """The prompts, each computed once."""

    logits: Tensor  # of the first token of each row: [rows, vocabulary]
    caches: list[DynamicCache]  # keys and values of the prompts, which are padded at the left
    places: Tensor  # where each row's prompt is, counted through all caches: [rows]
    width: int  # tokens of the longest prompt
    computed: int  # tokens of prompts that were computed, without padding

    def of_all_rows(self) -> Iterator[tuple[Any, Tensor, Tensor]]:
        """
        Yield each layer of the first cache that attends, and its keys and values for all rows, [rows, heads, width,
        size]. The caches forget them, so that little memory is taken. Layers with a state get that of all rows.
        """
        for of_caches in zip(*(cache.layers for cache in self.caches)):
            if isinstance(of_caches[0], LinearAttentionLayer):
                chunks_of_states = iter(list(zip(*map(states_of, of_caches))))
                exchange_states(
                    of_caches[0],
                    lambda _, all_of=chunks_of_states: torch.cat(next(all_of)).index_select(0, self.places),
                )
            if not isinstance(of_caches[0], DynamicLayer):
                continue
            both = []
            for name in ("keys", "values"):
                chunks = []
                for layer in of_caches:
                    values: Tensor = getattr(layer, name)[:, :, -self.width :]
                    chunks.append(pad(values, (0, 0, self.width - values.shape[2], 0)))
                    setattr(layer, name, None)
                both.append(torch.cat(chunks).index_select(0, self.places))
            yield of_caches[0], both[0], both[1]


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


def _prefill(
    model: Any, input_ids: Tensor, prompts: Prompts, model_inputs: dict[str, Any], multiple: int = 1
) -> Prefilled:
    """
    Compute each prompt once, padded at the left to a `multiple` of columns where the model is told positions, and what
    prompts share at their beginning once too.

    The rest of prompts that begin alike is computed as `generate` goes on from a cache. Each prompt has the columns of
    a padded batch, and as many of them are computed as the longest one needs:

        first pass      s s s s s                what they share, without padding
        second pass     s s s s s | q q q        keys and values of `s` are those of the first pass
                        . s s s s | s q q        a shorter prompt computes the last tokens of `s` once more
    """
    device, positions = input_ids.device, model_inputs.get("position_ids")
    lengths, empty = prompts.lengths, model_inputs[CACHE]
    if positions is None:  # a model that is not told positions may count padding: then rows keep theirs
        width, branch = input_ids.shape[1], Branch(0, 0, [*range(len(lengths))], [])
    else:
        width, in_order = max(lengths), sorted(range(len(lengths)), key=prompts.tokens.__getitem__)
        least, most = tokens_of_a_pass(model), width - 1
        for layer in empty.layers:
            if isinstance(layer, LinearAttentionLayer):
                least = float("inf")  # padding behind a state would change it, so nothing goes on from a beginning
            if isinstance(layer, DynamicSlidingWindowLayer):
                most = min(most, layer.sliding_window - 1)  # it keeps no more
        branch = branch_of(prompts.tokens, in_order, least, multiple, most)
    if positions is not None and (more := -input_ids.shape[1] % multiple):
        mask = model_inputs.get("attention_mask")  # `None` if nothing is padded
        mask = torch.ones_like(input_ids) if mask is None else mask
        input_ids, mask, positions = (pad(tensor, (more, 0)) for tensor in (input_ids, mask, positions))
        model_inputs = {**model_inputs, "attention_mask": mask, "position_ids": positions}
    logits, caches, order, computed = [], [], [], 0
    ahead: list[tuple[Branch, Any]] = [(branch, None)]
    while ahead:
        branch, start = ahead.pop()
        known = 0 if start is None else start.get_seq_length()
        if branch.shared > known:
            rows = indices([prompts.first[branch.first]], device)
            end = input_ids.shape[1] - lengths[branch.first] + branch.shared
            part = _cut(model_inputs, rows, slice(end - branch.shared, end), padded=False)
            tokens = input_ids[:, end - branch.shared : end].index_select(0, rows)
            start = _pass(model, tokens, part, start, [0])[CACHE]
            computed, known = computed + branch.shared - known, branch.shared
        ahead += [(below, start) for below in branch.branches]
        own = [lengths[prompt] - known for prompt in branch.prompts]
        chunks = [[*range(len(own))]] if positions is None else chunks_of_similar_length(own, max(multiple, 16))
        for chunk in chunks:
            chunk = [*map(branch.prompts.__getitem__, chunk)]
            longest = width if positions is None else -(-lengths[chunk[-1]] // multiple) * multiple
            rows = indices([*map(prompts.first.__getitem__, chunk)], device)
            padding = [longest - lengths[prompt] for prompt in chunk]
            part = _cut(model_inputs, rows, slice(-longest, None), padded=positions is None or max(padding) > 0)
            outputs = _pass(model, input_ids[:, -longest:].index_select(0, rows), part, start, padding)
            logits.append(outputs.logits[:, -1])
            caches.append(outputs[CACHE])
            del outputs
            computed += sum([longest - max(known, columns) for columns in padding])
            order += chunk
    computed_at = dict(zip(order, range(len(order))))
    places = indices([*map(computed_at.__getitem__, prompts.owner)], device)
    return Prefilled(torch.cat(logits).index_select(0, places), caches, places, width, computed)


def _pass(model: Any, tokens: Tensor, model_inputs: dict[str, Any], start: Any, padding: list[int]) -> Any:
    """
    Compute prompts, shape [prompts, columns], of which each begins with `padding` columns. What `start` holds, the
    keys and values of a beginning that they share, stands in their first columns.
    """
    cache, known = copy.deepcopy(model_inputs[CACHE]), 0
    if start is not None:
        known = start.get_seq_length()
        # Padding, which the mask hides, gets the states of the first token.
        places = torch.arange(known, device=tokens.device) - indices(padding, tokens.device)[:, None]
        places.clamp_(min=0)
        for index, layer in enumerate(start.layers):
            if isinstance(layer, DynamicLayer):
                both = (states[0][:, places].transpose(0, 1) for states in (layer.keys, layer.values))
                cache.update(*both, index)
    inputs = model.prepare_inputs_for_generation(
        tokens,
        next_sequence_length=tokens.shape[1] - known,
        is_first_iteration=True,
        **{**model_inputs, CACHE: cache},
    )
    outputs = model(**inputs, return_dict=True)
    if CACHE not in outputs:
        raise PlainRolloutsError("the model keeps its state to itself")
    for layer in outputs[CACHE].layers:
        if isinstance(layer, DynamicLayer) and layer.keys is None:
            raise PlainRolloutsError("without images the model leaves layers of its cache empty")
    return outputs


def _cut(model_inputs: dict[str, Any], rows: Tensor | None, columns: slice, padded: bool) -> dict[str, Any]:
    """Take rows (`None`: all) and columns of the mask and the positions. Without padding there is no mask."""
    inputs = dict(model_inputs)
    for name in ("attention_mask", "position_ids"):
        if (tensor := model_inputs.get(name)) is not None:
            inputs[name] = tensor[:, columns] if rows is None else tensor[:, columns].index_select(0, rows)
    if not padded:
        inputs["attention_mask"] = None
    return inputs


def _keep(cache: DynamicCache, rows: Tensor, cut: int) -> None:
    """Take rows out of a cache, and its first columns. Layers one after the other, so that little memory is taken."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            exchange_states(layer, lambda state: state.index_select(0, rows))
        if not isinstance(layer, DynamicLayer):
            continue
        attends: Any = layer  # of a model that has computed something
        attends.keys = attends.keys[:, :, cut:].index_select(0, rows)
        attends.values = attends.values[:, :, cut:].index_select(0, rows)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length -= cut


@dataclass
class RowsLeft:
    """The rows that are still completed. Those that have ended leave the batch."""

    tokens: Tensor  # prompts, at full width, and completions so far: [rows left, width and tokens]
    active: Tensor  # which of them go on, as booleans: [rows left]
    prompt_lengths: list[int]  # tokens of their prompts
    processors: RowwiseProcessors  # of these rows
    places: Tensor | None = None  # where they are in the whole batch, [rows left]; `None` if no row has left
    all_probabilities: Tensor | None = None  # see [`drawn`]

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
        cut = 0 if positions is None else held - (max(lengths) + completed - 1)
        _keep(model_inputs[CACHE], rows, cut)
        # Mask and positions have a column for the token that is computed next.
        columns = slice(cut - held - 1, None)
        return _cut(model_inputs, rows, columns, padded=positions is None or min(lengths) < max(lengths))


def _complete(
    model: Any,
    input_ids: Tensor,
    prefilled: Prefilled,
    processors: RowwiseProcessors,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    padding: int | None,
    model_inputs: dict[str, Any],
    prompts: Prompts,
) -> tuple[Tensor, Tensor, int]:
    """
    Complete the rows of `input_ids`, shape [rows, width], which leave when they have ended. Arguments and results are
    those of [`Captured.complete`].
    """
    device, (count, width) = input_ids.device, input_ids.shape
    completions = input_ids.new_full((count, config.max_length - width), padding or 0)
    chosen = torch.ones(completions.shape, device=device)
    logits, lengths = prefilled.logits, [*map(prompts.lengths.__getitem__, prompts.owner)]
    padded = model_inputs.get("position_ids") is None or min(lengths) < prefilled.width
    cache: Any = prefilled.caches[0]  # which gets all rows
    for layer, keys, values in prefilled.of_all_rows():
        layer.keys, layer.values = keys, values
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = prefilled.width
    model_inputs = _cut({**model_inputs, CACHE: cache}, None, slice(-prefilled.width, None), padded)
    filled = CausalLMOutputWithPast(**{CACHE: cache})
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
            tokens = drawn(probabilities, rows.all_probabilities, rows.places)
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
                if config.do_sample and rows.all_probabilities is None:
                    rows.all_probabilities = scores.new_ones((count, scores.shape[1]))
        # The logits of the next token.
        inputs = model.prepare_inputs_for_generation(rows.tokens, next_sequence_length=1, **model_inputs)
        outputs = model(**inputs, return_dict=True)
        model_inputs = model._update_model_kwargs_for_generation(outputs, model_inputs)
        logits, computed = outputs.logits[:, -1], computed + len(rows.tokens)
        del outputs
    return completions[:, :length], chosen[:, :length], computed


class Decoding(Part):
    """
    Samples the completions of a run.

    It counts, on this process and in training: `rows_decoded`, rows of the forward passes that
    computed one token of each; `rows_decoded_saved`, those that transformers would compute beside them; and
    `prompt_tokens_shared`, tokens of prompts that it would compute once more. `plain_rollouts_because` in the summary
    says why the last completions that were left to transformers were. With `off` everything is left to them, without a
    word. `tells` says whether this process writes to the log.
    """

    name = "decoding"

    def __init__(self, off: bool, tells: Callable[[], bool] = lambda: True):
        self.off = off
        self.fallbacks = Fallbacks("Completions are generated as TRL does it (`rollouts`)", tells)
        self.captured = Captured()
        self.chosen: Tensor | None = None
        """
        Probabilities with which the completions of a generation batch were drawn, shape [rows, tokens]; `None` if TRL
        drew them, or they have several turns.
        """
        self.counts: Counter[str] = Counter()
        """Those of the run, once it begins."""

    @property
    def plain_because(self) -> str | None:
        """Why the last completions that were left to transformers were, or another engine's."""
        return self.fallbacks.because

    @property
    def failed(self) -> Sequence[str]:
        return self.fallbacks.failed

    # Completions.

    @contextlib.contextmanager
    def completing(self, model: Any, prompts: Sequence[Sequence[int]] | None, counts: bool) -> Generator[None]:
        """
        Inside, `model.generate` completes these prompts, one per row, or `None` where only it knows them; `model` is
        unwrapped. Only completions of the training are counted.
        """
        known = None if prompts is None else Prompts.of(prompts)
        plain, loop = model.generate, functools.partial(self._decode, known, counts)

        def generate(*args, **kwargs):
            others = sorted(kwargs.keys() - {"input_ids", "attention_mask", "generation_config"})
            if args or others:
                what = others[0] if others else "inputs"
                self.fallbacks.cannot_be_exact(f"`generate` is given `{what}` beside tokens")
                return plain(*args, **kwargs)
            if self.failed:
                return plain(**kwargs)
            before = RandomStates.now(model.device)
            try:
                return plain(**kwargs, custom_generate=loop)
            except Exception as reason:
                if is_out_of_memory(reason):
                    raise
                error = reason
            drop_tensors_of(error)  # of the loop, before as much is needed again
            before.restore()
            if isinstance(error, PlainRolloutsError):
                self.fallbacks.cannot_be_exact(str(error), advice=error.advice)
                return plain(**kwargs)
            completions = plain(**kwargs)  # raises the error again if it is the model's own
            self.fallbacks.did_not_work_with(module_of_user(model), error, "this package's loop does not run")
            return completions

        model.generate = generate
        try:
            yield
        finally:
            del model.generate

    def _decode(
        self, prompts, counts, model, input_ids, logits_processor, stopping_criteria, generation_config, **model_inputs
    ) -> Tensor:
        """
        Complete the rows of `input_ids`, shape [rows, width], with what else `generate` has prepared: its loop. Return
        prompts and completions, shape [rows, width and tokens of the longest completion], or raise
        `PlainRolloutsError`. The model gets `model_inputs` beside tokens.
        """
        processors, criteria, config = logits_processor, stopping_criteria, generation_config
        if prompts is None:
            mask = model_inputs.get("attention_mask")
            kept = torch.ones_like(input_ids, device="cpu") if mask is None else mask.cpu()
            if (kept.diff(dim=1) < 0).any():
                raise PlainRolloutsError("a prompt is not padded at the left")
            prompts = Prompts.of([ids[of_row != 0].tolist() for ids, of_row in zip(input_ids.cpu(), kept)])
        positions = model_inputs.get("position_ids")
        if positions is not None and positions.dim() == 3 and (positions == positions[:1]).all():
            model_inputs["position_ids"] = positions[0]  # in text the parts of a position are equal
        reason = _reason_plain(model, input_ids, processors, criteria, config, model_inputs, prompts)
        if reason is not None:
            raise PlainRolloutsError(reason)
        count, width = input_ids.shape
        padding = config.pad_token_id if EosTokenCriteria in map(type, criteria) else None
        call = (RowwiseProcessors(processors), criteria, config, padding)
        if input_ids.device.type in CAPTURING:
            if self.captured.refused is not None:
                raise PlainRolloutsError(self.captured.refused)
            prefilled = _prefill(model, input_ids, prompts, model_inputs, multiple=PREFILL)
            with model._optimize_model_for_decode():
                completions, chosen, computed = self.captured.complete(model, input_ids, prefilled, *call, model_inputs)
        else:
            prefilled = _prefill(model, input_ids, prompts, model_inputs)
            with model._optimize_model_for_decode():
                completions, chosen, computed = _complete(model, input_ids, prefilled, *call, model_inputs, prompts)
        self.chosen = chosen if config.do_sample else None
        if counts:
            self.counts["rows_decoded"] += computed
            self.counts["rows_decoded_saved"] += count * (completions.shape[1] - 1) - computed
            of_all_rows = sum(map(prompts.lengths.__getitem__, prompts.owner))
            self.counts["prompt_tokens_shared"] += of_all_rows - prefilled.computed
        return torch.cat([input_ids, completions], dim=1)

    # A run.

    def begin(self, run: Run) -> None:
        self.counts = run.counts
        self.captured.keeps, self.captured.refused = True, None
        self.captured.free()  # graphs of other copies
        self.captured.adapters = None if self.off else adapters_of(extract_model_from_parallel(run.model))
        self.fallbacks.because = None
        self.fallbacks.failed.clear()

    def clean_up(self) -> None:
        self.captured.free()
        self.captured.adapters = None

    def spare_memory(self) -> str | None:
        self.captured.keeps = False
        return "keys and values are given back after each generation" if self.captured.free() else None

    def tensors_held(self) -> Sequence[Tensor]:
        return self.captured.tensors()

    def summary(self) -> dict[str, Any]:
        return {**{name: self.counts[name] for name in COUNTS}, "plain_rollouts_because": self.plain_because}

    def state_dict(self) -> dict[str, Any]:
        return {"plain_because": self.plain_because} if self.plain_because else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fallbacks.because = state.get("plain_because")
