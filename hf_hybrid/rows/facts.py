"""
What is known of a model whose rows are computed as trees, and what of it may change in a run.

Much of this takes a forward pass to find out, so it is known until something changes. Callbacks, hooks and schedules
change models between two steps. So [`Marks`] are taken once per step, after `on_step_begin`, and compared with those of
the step before. They are read on the host, without a look at a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from accelerate.utils import is_compiled_module
from torch import nn

from hf_hybrid.optimizers import LIBRARIES, package_of
from hf_hybrid.rows.costs import Costs
from hf_hybrid.rows.images import NAMES, encoder_of, numbers_in, sees_behind
from hf_hybrid.rows.randomness import Drawn
from hf_hybrid.rows.recurrent import again, layers_with_state
from hf_hybrid.rows.router_loss import OPTION, Router
from hf_hybrid.rows.tree import Batch, Packed, Row, Tree
from hf_hybrid.run.trainer_view import module_of_user, own_forward
from hf_hybrid.streaming.layers import base_model

Model = Any
"""A model of transformers, or a wrapper such as peft's that has its attributes."""
_COUNTS_MASK = ("opt", "biogpt")
"""Models whose positions count the tokens in the mask, not the columns."""


HOLE = "a row has a hole in its mask, or predicts a token from padding"


class Plan(NamedTuple):
    """What one process would do with some batches: nothing, if there are no trees."""

    reason: str | None = None  # there are none; it was said already
    trees: tuple[Tree, ...] = ()
    cost: float = 0.0  # operations of the trees
    padded: float = 0.0  # operations of the padded rows


def reason_not_in_trees(model: Model) -> str | None:
    """Return why a model cannot compute trees, if that is known without running it."""
    base: Model = base_model(model)
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and (adapter.is_prompt_learning or getattr(adapter, "alora_invocation_tokens", None)):
        return f"adapters of the kind {adapter.peft_type.value} act on places of a row"
    config = base.config.get_text_config()
    if config.is_encoder_decoder:
        return "the model has an encoder"
    kinds = {kind for kind in getattr(config, "layer_types", None) or () if "attention" not in kind or "linear" in kind}
    if (getattr(base, "_is_stateful", False) or kinds) and not layers_with_state(base):
        kinds = ", ".join(sorted(kinds)) or config.model_type
        return f"it has layers with a state that runs along the row, and no convolution ({kinds})"
    if is_compiled_module(model):
        return "it is compiled as a whole"
    if backbone_of(base) is base:
        return f"`{type(base).__name__}` has no backbone that is called by itself"
    return None


def backbone_of(base: Model) -> Model:
    """Return the module that computes the hidden states which the head gets, or the model itself."""
    # Llama 4 names another attribute as its backbone, and ModernBERT calls its head a decoder.
    backbone = base.get_decoder()
    if backbone is not base and backbone is not base.get_output_embeddings():
        return backbone
    parts = [part for part in base.children() if hasattr(part, "get_decoder")]
    return parts[0] if len(parts) == 1 else base


def most_slots_of(config: Any) -> float:
    """
    Return how many tokens a flat row may have at most. Where attention sees chunks, rows end within the first one; and
    Llama 4 scales queries by their place in what it is given, from `floor_scale` on.
    """
    tuned = getattr(config, "attn_temperature_tuning", False)
    chunk, scaled = getattr(config, "attention_chunk_size", None), getattr(config, "floor_scale", 0)
    return min(chunk or float("inf"), scaled - 1 if tuned and scaled else float("inf"))


def dropout_of(model: Model) -> float:
    """Return the largest rate of dropout that modules and config name, for messages; [`Drawn`] decides."""
    base: Model = base_model(model)
    rates = [m.p if isinstance(m, nn.Dropout) else getattr(m, "attention_dropout", 0.0) for m in model.modules()]
    rates += [value for name, value in base.config.to_dict().items() if "drop" in name]
    return max((rate for rate in rates if isinstance(rate, float)), default=0.0)


def window_of(config: Any) -> float:
    """Return how many tokens of a row the layers look back at least."""
    kinds = getattr(config, "layer_types", None) or ["window"]
    if not getattr(config, "use_sliding_window", True) or set(kinds) == {"full_attention"}:
        return float("inf")
    names = ("sliding_window", "attention_chunk_size", "window_size")
    return min((size for name in names if isinstance(size := getattr(config, name, None), int)), default=float("inf"))


_RATES: dict[type, list[str]] = {}
"""Attributes of a kind of module that are rates of dropout, as its first one has them."""


_OF_LIBRARIES: dict[tuple, bool] = {}
"""Whether functions of this code, and what they wrap, are of libraries: each weight may have a hook of the same."""


class Marks(NamedTuple):
    """What may change of a model between two steps."""

    draws: list[bool]
    """Of every rate of dropout, of modules and config: whether it is above 0."""
    parts: list[Any]
    """Modules, what a user set as `forward` of one, hooks of a user, and whether a router's loss is asked for."""
    hooks: list[Any]
    """Hooks of a user, on modules and weights."""
    of_gradients: bool
    """Whether such a hook sees gradients, or what goes into or out of the whole model: each micro-batch by itself."""
    inside: bool
    """Whether one sees what adapters give to the whole model inside of them."""

    @classmethod
    def of(cls, model: nn.Module, base: nn.Module) -> Marks:
        """Look at a model. `base` is the one inside of adapters."""
        draws, parts, forwards, stack = [], [], [], [model]
        on_modules: list[Any] = []
        on_whole: list[Any] = []
        on_base: list[Any] = []
        of_gradients: list[Any] = []
        while stack:  # `modules()` takes four times as long
            module = stack.pop()
            own, kind = module.__dict__, type(module)
            parts.append(module)
            if (rates := _RATES.get(kind)) is None:
                numbers = [name for name, value in own.items() if isinstance(value, (int, float))]
                rates = _RATES[kind] = [name for name in numbers if "drop" in name or name == "p"]
            for name in rates:
                draws.append(bool(own.get(name)))
            if "forward" in own:
                forwards.append(own["forward"])
            before, behind = own["_forward_pre_hooks"], own["_forward_hooks"]
            if before or behind:
                place = on_whole if module is model else on_base if module is base else on_modules
                place += (*before.values(), *behind.values())
            if own["_backward_pre_hooks"] or own["_backward_hooks"]:
                of_gradients += (*own["_backward_pre_hooks"].values(), *own["_backward_hooks"].values())
            for weight in own["_parameters"].values():
                if weight is not None:
                    if weight._backward_hooks:
                        of_gradients += weight._backward_hooks.values()
                    if weight._post_accumulate_grad_hooks:
                        of_gradients += weight._post_accumulate_grad_hooks.values()
            for child in own["_modules"].values():
                if child is not None:
                    stack.append(child)
        config: Any = base.config
        for of_part in {id(config): config, id(text := config.get_text_config()): text}.values():
            draws += [bool(value) for name, value in vars(of_part).items() if "drop" in name]
            parts.append(getattr(of_part, OPTION, None))
        users = [of_user(hooks) if hooks else hooks for hooks in (of_gradients, on_whole, on_base, on_modules)]
        hooks = [hook for of_kind in users for hook in of_kind]
        return cls(draws, parts + of_user(forwards) + hooks, hooks, bool(users[0] or users[1]), bool(users[2]))


def of_user(hooks: Sequence[Any]) -> list[Any]:
    """Return those hooks, or other functions, that are of no library."""
    found = []
    for hook in hooks:
        wrapped = getattr(hook, "__wrapped__", None)
        code = getattr(hook, "__code__", None), getattr(wrapped, "__code__", None)
        of_library = _OF_LIBRARIES.get(code)
        if of_library is None:
            of_library = package_of(hook) in LIBRARIES
            if code[0] is not None:  # no object, which this would keep alive
                _OF_LIBRARIES[code] = of_library
        if not of_library:
            found.append(hook)
    return found


@dataclass
class ModelFacts:
    """What is known of a model: the `reason` for padded rows, or what it costs and what was compared."""

    reason: str | None = None
    base: Any = None
    """The model without the wrapper of adapters."""
    backbone: Any = None
    """The module that computes the hidden states which the head gets."""
    costs: Costs = Costs(0.0, 0.0, 0.0)
    window: float = float("inf")
    most_slots: float = float("inf")
    """Tokens of a flat row at most, see [`most_slots_of`]."""
    counts_mask: bool = False
    """Whether positions count tokens in the mask, not columns."""
    router: Router | None = None
    with_state: list[nn.Module] = field(default_factory=list)
    """Layers with a state along the row."""
    again: float = 0.0
    """That of [`Tree`]."""
    compared: int = 0
    """Tokens of the longest row that was compared."""
    encoder: Any = None
    """The module whose `get_image_features` encodes images, see [`encoder_of`]."""
    sees: tuple[bool, bool] | None = (False, False)
    """Whether tokens of an image see it whole, see [`sees_behind`]."""
    of_images: tuple[str, ...] = ()
    """Arguments of the model that tell of images."""
    compared_images: bool = False
    """Whether rows with images were compared."""
    compared_packed: set[tuple] = field(default_factory=set)
    """Which packed rows have been compared with their documents: with a mask or not, with a cache or not."""
    ran_backward: bool = False
    """Whether the backward pass of a tree has run."""
    own_forward: str | None = None
    """That of the model if it is not one of transformers, see [`own_forward`]."""
    user_module: str | None = None
    """The class of a module of a user's, if it has one."""
    adds_up: bool = True
    """Whether its loss is known to be a sum over labels, divided by a count; of its own forward once it is compared."""
    configs: list[Any] = field(default_factory=list)
    """Those that its layers ask for their attention: PEFT copies one for each layer that it repeats."""
    marks: Marks | None = None
    """Those of the last step."""
    drawn: dict[bool, Drawn] = field(default_factory=dict)
    """Random numbers of a forward pass, in training and out of it, once they are known."""

    @classmethod
    def of(cls, model: nn.Module, *, compiles: bool) -> ModelFacts:
        try:
            base: Model = base_model(model)
            if (reason := reason_not_in_trees(model)) is not None:
                return cls(reason)
            counts_mask, window = base.config.model_type in _COUNTS_MASK, window_of(base.config.get_text_config())
            costs, backbone = Costs.of(model), backbone_of(base)
            with_state = layers_with_state(backbone)
            if with_state and compiles:
                return cls("layers with a state that runs along the row are not compiled")
            facts = cls(None, base, backbone, costs, window)
            facts.counts_mask, facts.router, facts.with_state = counts_mask, Router.of(base), with_state
            facts.most_slots = most_slots_of(base.config.get_text_config())
            facts.again, facts.own_forward, facts.user_module = again(base), own_forward(model), module_of_user(model)
            text = type(base.config.get_text_config())
            own = [module.config for module in backbone.modules() if type(getattr(module, "config", None)) is text]
            facts.configs = [base.config, *{id(config): config for config in own}.values()]
            facts.adds_up, facts.encoder = facts.own_forward is None, encoder_of(base)
            if facts.encoder is not None:
                facts.of_images, facts.sees = NAMES, sees_behind(base)
            return facts
        except (AttributeError, TypeError) as error:  # of a model with a config of its own
            return cls(f"its config does not tell what it costs ({error})")

    def is_still(self, model: nn.Module) -> bool:
        """Whether the model is as it was when this was last asked, except for rates of dropout, which are noted."""
        before, self.marks = self.marks, Marks.of(model, self.base)
        if before is not None and before.draws != self.marks.draws:
            self.drawn.clear()
        return before is None or before.parts == self.marks.parts

    def balances(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the model adds a router's loss for these inputs."""
        return self.router is not None and self.router.has_loss(inputs)

    def plan(
        self,
        batches: Sequence[Batch],
        divide: Callable[..., list[Tree]],
        *,
        shares: bool,
        compact: bool,
        whole: bool,
    ) -> Plan:
        """
        Return the trees of some batches. `divide` makes them of the rows, which come batch by batch, and options of
        [`Tree.of`]. In `compact` padded rows the head scores only the tokens with labels. Of `whole` rows all tokens
        are computed, as a router's loss counts them.
        """
        rows: list[Row] = []
        padded, images = 0.0, None
        for number, batch in enumerate(batches):
            of_batch = batch.rows(number, counts_mask=self.counts_mask, whole=whole)
            if of_batch is None:
                return Plan(HOLE)
            if batch.images is not None:
                images = batch.images
                padded += images.count(batch)[1] * self.costs.image
            if batch.packed is None:
                padded += self.costs.padded(batch, compact=compact)
            elif self.counts_mask:
                return Plan("its positions are not those of the batch")
            elif of_batch:
                padded += self.costs.tree(Tree.of(of_batch, shares=False))
            rows += of_batch
        trees = divide(rows, shares=shares, again=self.again) if rows else []
        if max((tree.size for tree in trees), default=0) > self.most_slots:
            reason = f"rows of more than {self.most_slots} tokens would be scaled by place, or attend by chunks"
            return Plan(reason, padded=padded)
        cost = sum(map(self.costs.tree, trees))
        if images is not None and trees:
            cost += images.tokens_of(numbers_in(*trees)) * self.costs.image
        return Plan(None, tuple(trees), cost, padded)

    def scores_hidden(self, batch: Batch) -> bool:
        """
        Whether the model scores a token that the mask hides. One that classifies rows scores the last token of each
        that is not the padding token, whatever the mask says. The last column of the batch is no token.
        """
        if not type(self.base).__name__.endswith("ForSequenceClassification"):
            return False
        ids, mask = batch.ids[:, :-1], batch.mask[:, :-1]
        last = ((ids != self.base.config.get_text_config().pad_token_id) * torch.arange(ids.shape[1])).argmax(dim=1)
        return bool((mask.gather(1, last[:, None]) == 0).any())

    def has_compared(self, longest: int) -> bool:
        """Whether rows of this length have been compared, as far as windows of attention go."""
        return self.compared > 0 and (self.compared > self.window or longest <= self.window)

    def note_compared(self, longest: int, packed: Batch | None = None, images: bool = False) -> None:
        self.compared, self.compared_images = max(self.compared, longest), self.compared_images or images
        if packed is not None and packed.packed is not None:
            self.compared_packed.add(self._kind_of(packed.packed))

    def unknown_packed(self, batches: Sequence[Batch]) -> Batch | None:
        """Return a batch with several documents in a row, of a kind that was not compared with its documents yet."""
        for batch in batches:
            if (packed := batch.packed) is None or len(packed.rows.unique()) == len(packed.rows):
                continue
            if self._kind_of(packed) not in self.compared_packed:
                return batch
        return None

    def _kind_of(self, packed: Packed) -> tuple:
        """Return what decides whether transformers keeps the documents of a packed batch apart."""
        return packed.given.get("attention_mask") is not None, getattr(self.base.config, "use_cache", None)
