"""
The completions of TRL's GRPO and RLOO without repeated work: token by token those of transformers' `generate`.

What `generate` repeats. TRL samples several completions of each prompt and gives `generate` as many copies of the
prompt. `generate` computes every copy, and pads short prompts to the longest of the batch. Prompts that begin alike,
with a system prompt or worked examples, are computed in full each. Then it computes one token of each row per pass
until the last row has ended. It also computes rows that have ended, and discards the result.

What is computed instead, here for two prompts with three completions each (completions.py):

    prompts        s s s s p p p p          each once, and the beginning that they share once, without padding
                           q q q            Then keys and values are repeated for the completions
    completions    p: a a a .  .            a row that has ended leaves the batch, as soon as a quarter of the rows in
                   p: b b b b  b b          it have. The columns that are padding for all rows that are left go too
                   p: c .  .
                   q: ...

That is how a CPU computes tokens, where each costs what the rows in the batch cost. On a GPU it costs what the host
needs to start the kernels: rows that leave save nothing, and each new shape costs more. So on a CUDA device passes are
captured (captured.py). On every other accelerator TRL's call stays as it is.

Why the completions are the same. A row of a transformer does not depend on other rows. Positions and masks of a row are
those that it has in TRL's batch, so its logits are the same too, up to the rounding of a batch of another shape.
`torch.multinomial` draws tokens from the probabilities of the *whole* batch, in which those of removed rows are stale.
So each row gets the random numbers that it gets in TRL, and the generator is left in the same state. Rounding changes a
sampled token only if two tokens are closer than the rounding. It is coarser in bf16, where TRL's own completions depend
on the shape of the batch too.

Layers with a state along the row (Gated DeltaNet, Mamba 2, short convolutions) have it repeated for the completions, as
keys and values are. Padding at the left of a prompt leaves such a state at zero, so prompts may have it.

`generate` encodes the image of each row. Here it is given none: each distinct image is encoded once (rows/images.py),
when prompts are computed. Prompts are told apart by their images too. Behind them positions go on as in text.

Logits processors, stopping criteria, configs and models stay those of transformers. `generate` itself prepares them,
and then calls [`Decoding`] in place of its own loop: it takes a loop as `custom_generate`. TRL calls `generate` of the
model without this argument. So [`Decoding.completing`] puts a function in front of it, on this one model and until TRL
has its completions.

If the result is not known to be exact, transformers generates the whole batch; [`reason_not_this_model`] and
[`reason_not_this_call`] list these cases. [`PlainRolloutsError`] ends the call, and `generate` is called as TRL calls
it. It is called too if the loop raises an error that nobody foresaw, from then on for the rest of the run. The random
generators are set back first, so the completions are still TRL's.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor
from transformers import DynamicCache, EosTokenCriteria, GenerationMixin, MaxLengthCriteria
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)
from transformers.generation import logits_process as processors

from hf_hybrid.compat import layers_that_keep_nothing
from hf_hybrid.optimizers import has_adapters
from hf_hybrid.part import Part
from hf_hybrid.recovery import drop_tensors_of, is_out_of_memory
from hf_hybrid.rows.facts import ModelFacts, window_of
from hf_hybrid.rows.images import MASK, NAMES, PLACES, SEES, SIZES, encoder_of, sees_behind
from hf_hybrid.rows.tree import Batch, Tree
from hf_hybrid.run.fallbacks import Fallbacks
from hf_hybrid.run.run import RandomStates, Run
from hf_hybrid.run.trainer_view import module_of_user
from hf_hybrid.streaming.layers import base_model
from hf_hybrid.trl.captured import CAPTURING, Captured, reason_not_captured
from hf_hybrid.trl.completions import (
    CACHE,
    Generation,
    GrowingRows,
    PlainRolloutsError,
    Prefilled,
    Prompts,
    RowwiseProcessors,
    complete,
    flat,
    padded,
    reason_not_tree,
)
from hf_hybrid.trl.turns import Turns, reason_not_in_pieces, structure_of, sums_of

if TYPE_CHECKING:
    from hf_hybrid.phase_memory.adapter_products import AdapterProducts

ROWWISE = frozenset({
    processors.EpsilonLogitsWarper, processors.EtaLogitsWarper, processors.ExponentialDecayLengthPenalty,
    processors.ForcedBOSTokenLogitsProcessor, processors.ForcedEOSTokenLogitsProcessor,
    processors.InfNanRemoveLogitsProcessor, processors.LogitNormalization, processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor, processors.MinPLogitsWarper, processors.NoBadWordsLogitsProcessor,
    processors.NoRepeatNGramLogitsProcessor, processors.RepetitionPenaltyLogitsProcessor,
    processors.SequenceBiasLogitsProcessor, processors.SuppressTokensAtBeginLogitsProcessor,
    processors.SuppressTokensLogitsProcessor, processors.TemperatureLogitsWarper, processors.TopHLogitsWarper,
    processors.TopKLogitsWarper, processors.TopPLogitsWarper, processors.TypicalLogitsWarper,
})  # fmt: skip
"""Logits processors that compute a row from this row alone. [`RowwiseProcessors`] tells one of them of its rows."""
KNOWN = {"attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep"}
"""What `generate` may give the model beside tokens."""
PIXELS = {"pixel_values", SIZES, MASK, PLACES}
"""What of images `generate` needs for nothing but to encode them."""
KINDS_OF_LAYERS = (
    DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer,
)  # fmt: skip
"""Of a cache from which rows can be taken."""
COUNTS = (
    "rows_decoded", "rows_decoded_saved", "prompt_tokens_computed", "prompt_tokens_shared", "turns", "tool_calls",
    "tool_errors",
)  # fmt: skip

# What is left to transformers.


def reason_not_this_model(model: Any) -> str | None:
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
        return reason_not_captured(base)
    if base.device.type != "cpu":
        return f"passes are not captured on `{base.device.type}`, and fewer rows are not faster there"
    return None


def adapters_of(model: Any) -> AdapterProducts | None:
    """Return what computes the adapters of a model in captured passes; `None` if PEFT does, or processes share them."""
    whole = all(weight.numel() and getattr(weight, "device_mesh", None) is None for weight in model.parameters())
    if model.device.type not in CAPTURING or not has_adapters(model) or not whole:
        return None
    from hf_hybrid.phase_memory.adapter_products import AdapterProducts, plain_lora_layers

    if not (layers := plain_lora_layers(model)):
        return None
    products = AdapterProducts(layers, model.get_input_embeddings().weight.dtype, autocast=False)
    products.place(model)
    return products


def reason_not_this_cache(cache: Any, longest: int, *, captures: bool, chunks: bool) -> str | None:
    """
    Return why rows cannot be taken out of this cache; `None` if they can.

    `cache` is what `generate` has prepared, still empty; `longest` the tokens of a row at the end, with its padding;
    `captures` whether passes are captured, and `chunks` whether layers attend in chunks of the columns of a batch.
    """
    if type(cache) is not DynamicCache or cache.offloading:
        kind = "an offloaded cache" if getattr(cache, "offloading", False) else f"`{type(cache).__name__}`"
        return f"keys and values are in {kind}, not in a plain `DynamicCache`"
    counts = not cache.layers  # or some layer of it
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionAndFullAttentionLayer) and captures:
            return "passes of layers that attend and have a state are not captured"
        if type(layer) not in KINDS_OF_LAYERS and (captures or type(layer) not in layers_that_keep_nothing()):
            return f"the cache has a layer of another kind, `{type(layer).__name__}`"
        if chunks and isinstance(layer, DynamicSlidingWindowLayer) and longest > layer.sliding_window:
            return f"a row of {longest} tokens does not fit into a chunk of {layer.sliding_window} tokens"
        counts = counts or isinstance(layer, DynamicLayer)
    if not counts:
        return "no layer of the cache counts tokens (all have a state along the row)"
    return None


def reason_not_these_positions(config: Any, longest: int) -> str | None:
    """Return why positions of a row depend on other rows; `None` if they do not."""
    rope = getattr(config, "rope_parameters", None) or {}
    for values in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = values.get("rope_type") or ""
        trained = [values.get("original_max_position_embeddings"), getattr(config, "max_position_embeddings", None)]
        if ("dynamic" in kind or kind == "longrope") and longest > min([n for n in trained if n], default=0):
            return f"the frequencies of `{kind}` positions depend on the longest row of the batch"
    return None


def reason_not_this_call(generation: Generation) -> str | None:
    """Return why a call is left to transformers; `None` if it is not."""
    config, inputs, prompts = generation.config, generation.inputs, generation.prompts
    if (mode := config.get_generation_mode()) not in ("greedy_search", "sample"):
        return f"the generation config asks for `{mode.value}`"
    for name in ("return_dict_in_generate", "prefill_chunk_size", "token_healing"):
        if getattr(config, name, None):
            return f"the generation config has `{name}={getattr(config, name)}`"
    if (rows := len(generation.input_ids)) != len(prompts.owner):
        return f"{rows} rows are asked for, and there are {len(prompts.owner)} prompts"
    if not min(prompts.lengths):
        return "a prompt has no tokens"
    known = KNOWN if generation.batch is None else KNOWN.union(NAMES)
    if others := sorted(name for name, value in inputs.items() if name not in known and value not in (None, {})):
        return f"the model gets `{others[0]}` beside tokens"
    for processor in generation.processors:
        if type(processor) not in ROWWISE:
            return f"`{type(processor).__name__}` is not known to look at one row at a time"
    kinds = set(map(type, generation.criteria))
    if others := sorted(kind.__name__ for kind in kinds - {MaxLengthCriteria, EosTokenCriteria}):
        return f"`{others[0]}` is not known to look at one row at a time"
    if MaxLengthCriteria not in kinds or (EosTokenCriteria in kinds and config.pad_token_id is None):
        return "there is no length at which rows end, or no padding token"
    positions = inputs.get("position_ids")
    if positions is not None and positions.shape[-2:] != generation.input_ids.shape:
        return "positions have another shape than tokens"
    if not inputs.get("use_cache") or inputs.get(CACHE) is None:
        return "there is no cache of keys and values (`use_cache=False`, or a model with a state of its own)"
    longest, text = config.max_length, generation.model.config.get_text_config(decoder=True)
    captures = generation.input_ids.device.type in CAPTURING
    chunks = "chunked_attention" in (getattr(text, "layer_types", None) or ())
    reason = reason_not_this_cache(inputs[CACHE], longest, captures=captures, chunks=chunks)
    return reason or reason_not_these_positions(text, longest)


# The part.


class Decoding(Part):
    """
    Samples the completions of a run.

    It counts [`COUNTS`], on this process and in training: rows of the forward passes that computed one token of each;
    those that transformers would compute beside them; tokens of prompts that were computed, and those that it would
    compute once more; rows that were completed, several times where they have turns; and calls of tools. With `off`
    everything is left to transformers, without a word. `tells` says whether this process writes to the log.
    """

    name = "decoding"

    def __init__(self, off: bool, tells: Callable[[], bool] = lambda: True):
        self.off = off
        self.fallbacks = Fallbacks("Completions are generated as TRL does it (`rollouts`)", tells)
        self.padded = Fallbacks("Prompts of completions are padded rows, and no tree", tells)
        self.anew = Fallbacks("Each turn is computed with all that came before (`rollouts`)", tells)
        self.captured = Captured()
        self.turns: Turns | None = None
        """What is kept of the conversations of a generation batch; `None` if they have one turn, or nothing is."""
        self._in_pieces = WeakKeyDictionary[Any, tuple[Any, bool]]()  # models, and whether rows outgrew their windows
        self._facts = WeakKeyDictionary[Any, ModelFacts]()
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
        plain = model.generate

        def generate(*args, **kwargs):
            others = sorted(kwargs.keys() - {"input_ids", "attention_mask", "generation_config", *NAMES})
            if args or others:
                what = others[0] if others else "inputs"
                self.fallbacks.cannot_be_exact(f"`generate` is given `{what}` beside tokens")
                return plain(*args, **kwargs)
            if self.fallbacks.failed:
                return plain(**kwargs)
            images = kwargs if "pixel_values" in kwargs else None
            loop, given = functools.partial(self._decode, prompts, counts, images), dict(kwargs)
            for name in PIXELS:  # `generate` would encode those of each row
                given.pop(name, None)
            before = RandomStates.now(model.device)
            try:
                return plain(**given, custom_generate=loop)
            except Exception as reason:
                if is_out_of_memory(reason):
                    raise
                error = reason
            drop_tensors_of(error)  # of the loop, before as much is needed again
            self.turns = None
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
        self, rows, counts, images, model, input_ids, logits_processor, stopping_criteria, generation_config,
        **model_inputs,
    ) -> Tensor:  # fmt: skip
        """
        Complete the rows of `input_ids`, shape [rows, width], with what else `generate` has prepared: its loop. Return
        prompts and completions, shape [rows, width and tokens of the longest completion], or raise
        `PlainRolloutsError`. The model gets `model_inputs` and `images` beside tokens.
        """
        coded: Any = None
        if rows is None or images:
            mask, ids = model_inputs.get("attention_mask"), input_ids.cpu()
            kept = torch.ones_like(ids) if mask is None else mask.cpu()
            if (kept.diff(dim=1) < 0).any():
                raise PlainRolloutsError("a prompt is not padded at the left")
            coded = Batch(ids, kept, ids)
            if images:
                if (encoder := encoder_of(base := base_model(model))) is None:
                    raise PlainRolloutsError("the model does not tell where it takes images")
                coded = (self.turns or Turns()).images.coded(encoder, images, coded, sees_behind(base), padded=True)
                model_inputs.pop("mm_encoder_outputs", None)  # none: `generate` was given no pixels
            if isinstance(coded, str):
                raise PlainRolloutsError(coded)
            rows = [of_row[is_token != 0].tolist() for of_row, is_token in zip(coded.ids, kept)]
        positions = model_inputs.get("position_ids")
        if positions is not None and positions.dim() == 3 and (positions == positions[:1]).all():
            model_inputs["position_ids"] = positions[0]  # in text the parts of a position are equal
        prepared = RowwiseProcessors(logits_processor), stopping_criteria, generation_config, model_inputs
        generation = Generation(model, input_ids, *prepared, prompts := Prompts.of(rows), coded if images else None)
        captures = input_ids.device.type in CAPTURING
        reason = reason_not_this_call(generation) or (self.captured.refused if captures else None)
        if reason is not None:
            raise PlainRolloutsError(reason)
        tree = prompts.tree_if_worth()
        prefilled = None if self.turns is None else self._go_on(self.turns, generation, tree)
        if prefilled is None:
            facts = None if tree is None else self._facts_of(generation)
            prefilled = padded(generation) if tree is None or facts is None else flat(generation, tree, facts)
            if prefilled.cache is None:
                raise PlainRolloutsError("the model keeps its state to itself")
            for layer in prefilled.cache.layers:
                if isinstance(layer, DynamicLayer) and layer.keys is None:
                    raise PlainRolloutsError("without images the model leaves layers of its cache empty")
            if self.turns is not None:
                self.turns.keep_prompts(prompts, prefilled)
        for name in NAMES:  # images are in the cache
            model_inputs.pop(name, None)
        with model._optimize_model_for_decode():
            if captures:
                opened = self.captured.passes(generation, prefilled)
            else:
                opened = contextlib.nullcontext(GrowingRows(generation, prefilled))
            with opened as passes:
                completions, chosen, computed = complete(generation, prefilled, passes, self.turns)
        if self.turns is not None:
            self.turns.note(prompts, completions)
            self.counts["bytes_between_turns"] = max(self.counts["bytes_between_turns"], self.turns.most_bytes)
        self.chosen = chosen if generation_config.do_sample else None
        if counts:
            self.counts["rows_decoded"] += computed
            self.counts["rows_decoded_saved"] += len(input_ids) * (completions.shape[1] - 1) - computed
            of_all_rows = sum(map(prompts.lengths.__getitem__, prompts.owner))
            self.counts["prompt_tokens_computed"] += prefilled.computed
            self.counts["prompt_tokens_shared"] += of_all_rows - prefilled.computed
        return torch.cat([input_ids, completions], dim=1)

    def _go_on(self, turns: Turns, generation: Generation, tree: Tree | None) -> Prefilled | None:
        """Compute the prompts from where they differ from what earlier turns have left; `None` if that is no less."""
        if (reason := self._reason_not_kept(generation, turns)) is not None:
            self.anew.cannot_be_exact(reason)
            self.turns = None
            return None
        prompts = generation.prompts
        return turns.go_on(generation, len(prompts.tokens) * max(prompts.lengths) if tree is None else tree.size)

    def _reason_not_kept(self, generation: Generation, turns: Turns) -> str | None:
        """Return why nothing is kept from one turn to the next; `None` if it is, of this model as it is now."""
        model = generation.model
        if SEES in generation.inputs and sees_behind(base_model(model)) is None:
            return "tokens that are of no image may see what stands behind them"
        if turns.is_full:
            return "keys and values of all conversations would take half of the free memory"
        structure = structure_of(model)
        turns.begin((structure, sums_of(model)))
        outgrown = max(generation.prompts.lengths) > window_of(model.config.get_text_config(decoder=True))
        known = self._in_pieces.get(model)
        if turns.known and (known is None or known[0] != structure or known[1] < outgrown):
            if (reason := reason_not_in_pieces(generation)) is not None:
                return reason
            self._in_pieces[model] = structure, outgrown
        return None

    def _facts_of(self, generation: Generation) -> ModelFacts | None:
        """Return what is known of a model that takes trees; `None` of others, and say why."""
        model = generation.model
        if (facts := self._facts.get(model)) is None or not facts.is_still(model):
            facts = self._facts[model] = ModelFacts.of(model, compiles=False)
        if (reason := reason_not_tree(generation, facts)) is None:
            return facts
        facts.reason = reason
        self.padded.cannot_be_exact(reason)
        return None

    # A run.

    def begin(self, run: Run) -> None:
        self.counts = run.counts
        self.captured.keeps, self.captured.refused = True, None
        self.captured.free()  # graphs of other copies
        self._facts.clear()
        self._in_pieces.clear()
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
        return self.captured.tensors() + (self.turns.tensors() if self.turns is not None else [])

    def summary(self) -> dict[str, Any]:
        return {
            **{name: self.counts[name] for name in (*COUNTS, "bytes_between_turns")},
            "plain_rollouts_because": self.plain_because,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"plain_because": self.plain_because} if self.plain_because else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fallbacks.because = state.get("plain_because")
