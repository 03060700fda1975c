"""
Rows with images: an image that rows share is encoded once, and what follows it is shared as text is.

    rows           <image A> how many?          tokens of the tree    A A A A how many ?
                   <image A> what colour?   ->                                what colour ?
                   <image B> how many?                                B B B B how many ?        encoded: A, B

**What is the same.** An image stands in a row as tokens that are all alike, so the tokens do not tell which image they
are of. [`Images.coded`] numbers the images of a window, by what the model gets of them (pixels, grid, size), and gives
the tokens of image `n` the code `FIRST + n`, beyond any vocabulary. A tree is made of these codes (tree.py), so two
rows share an image if it is the same one, after the same tokens.

**What the model gets.** Its own `forward` gets the flat row with the image token of its vocabulary, and the distinct
images in the order in which they first stand there. It calls its `get_image_features`, where a stand-in encodes them
and puts the features where the flat row has their tokens, which may be several places. So adapters, recomputation,
autocast and sharding find the encoder where they expect it. Features of an encoder that is not trained are kept until
the step is over, for the other micro-batches and models of the same weights. Those of one that is are held for the
micro-batches of a window, the last of which takes the gradients of all through the encoder ([`Images.in_turn`]).

**Positions** of an image's tokens may have two axes (Qwen's models). They are those of the model's own
`get_rope_index` for the padded batch: each token of the flat row has the position that it has in its row.

**Which tokens are of which image** is not written in a batch. [`_in_order`] finds it: images stand in the order of
their tokens, each as one run of tokens, or all of one size, or one in each row. Where none of these holds the batch
stays padded, and so do videos, and models whose batches hold more than [`NAMES`].

**Tokens that see what stands behind them.** Those of an image may see it whole, in all layers (Gemma 3) or in some
(Gemma 4). [`sees_behind`] asks the masks that the model makes, and attention.py attends so. Rows part before or behind
an image, never inside. Prompts that see each other whole (PaliGemma) stay padded.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hf_hybrid.rows.attention import attention
from hf_hybrid.rows.tree import IGNORED, WORD, Batch, Row, Tree

FIRST = 1 << 31
"""Code of the tokens of the first image."""
GRID, SIZES, MASK, PLACES = "image_grid_thw", "image_sizes", "pixel_attention_mask", "image_position_ids"
TYPES, SEES = "mm_token_type_ids", "token_type_ids"
"""Arguments that tell tokens of images from others, 1 and 0; the second one where they may see each other."""
NAMES = ("pixel_values", GRID, SIZES, MASK, PLACES, TYPES, SEES)
"""Arguments of a model that [`Images`] can read."""
SHARED = "images_shared"
"""Name of the count of images that stand in rows and were not encoded."""

KINDS_OF_LAYERS = ("full_attention", "sliding_attention")
"""Those that models make masks for: without a window, and with one."""


class Image(NamedTuple):
    """An image, as a model gets it."""

    tensors: dict[str, Tensor]
    """What stands in a batch for this one; of `pixel_values` with a grid the rows of its patches."""
    tokens: int


class Joined(torch.autograd.Function):
    """Values, to whose gradients those of their leaves are added."""

    @staticmethod
    def forward(ctx: Any, leaves: Sequence[Tensor], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.leaves = leaves
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        sums = []
        for leaf, grad in zip(ctx.leaves, grads, strict=True):
            before, leaf.grad = leaf.grad, None
            sums.append(before if grad is None else grad if before is None else grad + before)
        return None, *sums


class Held(NamedTuple):
    """Features of an image that several flat rows read: all but the last one from leaves, which add up gradients."""

    last: int  # see [`Images.in_turn`]
    parts: list[Tensor]
    leaves: list[Tensor]  # of what needs no gradient they need none either

    @property
    def trained(self) -> list[tuple[Tensor, Tensor]]:
        """Those that do, and their leaves."""
        return [pair for pair in zip(self.parts, self.leaves) if pair[0].requires_grad]


class RowImages(NamedTuple):
    """The images of a flat row."""

    of: Images
    numbers: list[int]  # those that are encoded, in this order
    index: Tensor  # for each image token of the row its place in the features of these: [image tokens]
    types: dict[str, Tensor]  # of the slots, each [1, slots]
    behind: np.ndarray | None  # how many slots behind its own each sees, where `of.sees` tells: [slots]
    again: Mapping[int, int] | None = None  # see [`Images.in_turn`]; of a row that is computed for itself `None`
    is_counted: bool = True  # whether what it encodes is

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of a model that tell of images."""
        return {**self.of.inputs(self.numbers, self.index.device), **self.types}


def encoder_of(base: Any) -> Any:
    """Return the module of a model that calls its own `get_image_features`; `None` of a model that sees nothing."""
    found = [module for module in base.modules() if hasattr(type(module), "get_image_features")]
    return found[-1] if found and isinstance(getattr(base.config, "image_token_id", None), int) else None


def has_images(row: Row) -> bool:
    """Whether tokens of a row are of images: the first byte of their codes is above 127."""
    return max(row.ids[:: WORD.itemsize], default=0) >= FIRST >> 24


def sees_behind(model: Any) -> tuple[bool, bool] | None:
    """
    Return whether tokens of an image see it whole: in layers without a window, and in those with one. `None` if a model
    makes masks of another kind.
    """
    make, text = getattr(model, "create_masks_for_generate", None), model.config.get_text_config()
    if make is None or "flash" in (text._attn_implementation or ""):  # flash attention has no such masks
        return False, False
    blocks = torch.tensor([[0, 1, 1, 0, 2, 2, 0]])
    causal, types = torch.ones(7, 7, dtype=torch.bool).tril(), blocks.clamp(max=1)
    whole = causal | (blocks == blocks.T) & (blocks > 0)
    with attention(text, "eager"):
        masks = make(model.config, torch.zeros(1, 7, 1), None, None, None, **{TYPES: types, SEES: types})
    if not isinstance(masks, dict):
        masks = dict.fromkeys(KINDS_OF_LAYERS, masks)
    seen = [masks[kind][0, 0] == 0 if kind in masks else causal for kind in KINDS_OF_LAYERS]
    if not all(torch.equal(mask, causal) or torch.equal(mask, whole) for mask in seen):
        return None
    return torch.equal(seen[0], whole), torch.equal(seen[1], whole)


def numbers_of(codes: np.ndarray) -> list[int]:
    """Return the numbers of the images that codes are of."""
    return np.unique(codes[codes >= FIRST].astype(np.int64) - FIRST).tolist()


def numbers_in(*trees: Tree) -> list[int]:
    """Return those of trees."""
    return numbers_of(np.concatenate([np.frombuffer(row.ids, WORD) for tree in trees for row in tree.rows]))


def patches_of(encoder: Any) -> int:
    """Return how many patches of an image stand side by side in one of its tokens, as far as its config tells."""
    merged = getattr(encoder.config.vision_config, "spatial_merge_size", None)
    return merged or getattr(encoder.config, "scale_factor", None) or 1


def adapters_of(modules: Iterable[nn.Module]) -> tuple:
    """Which adapters of modules compute: the reference may be the same model without them."""
    layer: Any = next((module for module in modules if hasattr(module, "_disable_adapters")), None)
    return () if layer is None else (layer._disable_adapters, tuple(layer.active_adapters))


def mode_of(encoder: Any) -> tuple:
    """What decides which features images have: adapters, and whether gradients may run through the encoder."""
    decoder, embeds = encoder.get_decoder(), encoder.get_input_embeddings()
    eyes = set(encoder.modules()).difference(() if decoder is encoder else decoder.modules())
    weights = [*embeds.parameters(), *(weight for module in eyes for weight in module.parameters(recurse=False))]
    trains = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    return encoder.training, adapters_of(eyes), trains


@contextlib.contextmanager
def standing_in(encoder: Any, row_of: Callable[[], RowImages | None]) -> Generator[None]:
    """Context in which the features of images are put where the flat row that `row_of` returns has their tokens."""
    own, of_user = encoder.get_image_features, vars(encoder).get("get_image_features")

    def get_image_features(*args: Any, **kwargs: Any) -> Any:
        if (row := row_of()) is None:
            return own(*args, **kwargs)
        # By the names of the model's own method: a user's in its place may take any arguments.
        _, *named = inspect.signature(type(encoder).get_image_features).parameters

        def encode(images: dict[str, Tensor]) -> Any:
            given = {**dict(zip(named, args)), **kwargs}
            return own(**{**given, **{name: images[name] for name in images.keys() & given.keys()}})

        *mode, trains = mode_of(encoder)
        trains = torch.is_grad_enabled() if of_user is not None else trains
        return row.of.features(row, encode, (id(encoder), *mode, trains))

    encoder.get_image_features = get_image_features
    try:
        yield
    finally:
        del encoder.get_image_features
        if of_user is not None:
            encoder.get_image_features = of_user


class Images:
    """The images of a step, by their numbers. What rows encode is taken off `counts`."""

    def __init__(self, counts: Counter[str] | None = None) -> None:
        self.counts: Counter[str] = Counter() if counts is None else counts
        self._numbers: dict[bytes, int] = {}
        self.images: list[Image] = []
        self.token = 0
        self.sees = (False, False)
        """That of [`sees_behind`]."""
        self._has: set[str] = set()
        """Which of the arguments batches have that tell tokens apart."""
        self._by_row = False
        """Whether tensors of a batch have a row for each of its rows, and its images in there."""
        self._kinds: dict[tuple, Any] = {}
        """What an encoder returned last."""
        self._kept: dict[tuple, list[Tensor]] = {}
        """Features of images that need no gradient."""
        self.keeps = True
        """Whether these are: code of a user may change the encoder between micro-batches."""
        self._held: dict[tuple, Held] = {}
        """Features of images that do, and that later rows of the window read."""
        self._joined: list[Held] = []
        """Those that the last of these has read."""

    # Of a batch.

    def coded(
        self,
        encoder: Any,
        inputs: Mapping[str, Any],
        batch: Batch,
        sees: tuple[bool, bool] | None,
        padded: bool = False,
    ) -> Batch | str:
        """
        Return a batch on the host with codes in place of image tokens, and its positions, or why it cannot be read.
        `inputs` are what the model gets of it, `encoder` is its [`encoder_of`], and `sees` its [`sees_behind`].
        `padded`: its rows stay as they are.
        """
        if not any(inputs.get(name) is not None for name in NAMES):
            return batch
        there = {name: value for name in NAMES if torch.is_tensor(value := inputs.get(name))}
        given = {name: value.cpu() for name, value in there.items()}
        self.token = encoder.config.image_token_id
        is_image = (batch.ids == self.token) & (batch.mask != 0)
        self._has |= given.keys() & {TYPES, SEES}
        self.sees = (False, False) if sees is None else sees
        if sees is None and not padded:
            return "tokens that are of no image may see what stands behind them"
        last = torch.where(batch.labels != IGNORED, torch.arange(batch.ids.shape[1]), 0).amax(1, keepdim=True)
        if any(self.sees) and not padded and is_image.gather(1, last).any():
            return "a row ends within an image whose tokens see it whole"
        for name in (TYPES, SEES) if not padded else (TYPES,):
            if name in given and not torch.equal(given[name] * batch.mask, is_image.long()):
                return f"`{name}` of a batch tell of more than images"
        codes = batch.ids
        if "pixel_values" in given:
            counts = _in_order(is_image.numpy(), given, encoder)
            if counts is None or (any(self.sees) and counts != np.concatenate(_runs(is_image.numpy())).tolist()):
                return "a batch does not tell which tokens are of which image"
            each = (self._each(tensors, is_image) for tensors in (given, there))
            numbers = [self._number(*image) for image in zip(*each, counts)]
            of_tokens = np.repeat(np.array(numbers, np.int64), np.array(counts, np.int64))
            codes = codes.masked_scatter(is_image, torch.from_numpy(of_tokens) + FIRST)
        elif is_image.any():
            return "a batch holds tokens of images, but no `pixel_values`"
        return batch._replace(ids=codes, images=self, positions=_positions(encoder, batch, given))

    def _each(self, given: Mapping[str, Tensor], is_image: Tensor) -> list[dict[str, Tensor]]:
        """Return the tensors of each image of a batch."""
        images: dict[str, Any] = {name: value for name, value in given.items() if name not in (TYPES, SEES)}
        self._by_row = _stands_by_row(given)
        if self._by_row:
            places = [(row, n) for row, runs in enumerate(_runs(is_image.numpy())) for n in range(len(runs))]
            return [{name: value[place] for name, value in images.items()} for place in places]
        pixels = images["pixel_values"]
        if SIZES in images and pixels.dim() == 5:  # batches with larger ones have more tiles of zeros
            images["pixel_values"] = [tiles[: int(tiles.flatten(1).any(1).sum())] for tiles in pixels]
        elif SIZES in images and pixels.dim() == 4:
            images["pixel_values"] = [one[:, :height, :width] for one, (height, width) in zip(pixels, images[SIZES])]
        if (grid := images.get(GRID)) is not None:
            images["pixel_values"] = pixels.split(grid.prod(-1).tolist())
        return [dict(zip(images, parts)) for parts in zip(*images.values())]

    def _number(self, tensors: dict[str, Tensor], there: dict[str, Tensor], tokens: int) -> int:
        """Return the number of an image, a new one if it is new. `there` are its tensors where the model has them."""
        digest = hashlib.blake2b(str(tokens).encode())
        for name, tensor in tensors.items():
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        number = self._numbers.setdefault(digest.digest(), len(self.images))
        if number == len(self.images):
            self.images.append(Image(there, tokens))
        return number

    # Features.

    def features(self, row: RowImages, encode: Callable[[dict[str, Tensor]], Any], key: tuple) -> Any:
        """
        Return what an encoder returns for the image tokens of a flat row. `encode` computes images, and `key` says
        which encoder it is, in which mode, and at its end whether gradients may run through it.

        Features without a gradient are kept for the rest of the step. Others are held for later rows of the window. The
        last row that reads an image takes the gradients of all through the encoder.
        """
        again, found = row.again or {}, dict[int, list[Tensor]]()
        if row.again is not None:
            found |= self._join(key, row.numbers, again)
            held = {number: self._held.get((*key, number)) for number in row.numbers}
            found |= {number: of_image.leaves for number, of_image in held.items() if of_image is not None}
        found |= {number: self._kept[*key, number] for number in row.numbers if (*key, number) in self._kept}
        missing = [number for number in row.numbers if number not in found]
        # What is read until the same flat row is encoded together: one backward pass runs through each encoding.
        for last in sorted({again.get(number, 0) for number in missing}):
            together = [number for number in missing if again.get(number, 0) == last]
            with torch.set_grad_enabled(key[-1]):
                self._kinds[key] = output = encode(self.inputs(together, row.index.device))
            self.counts[SHARED] -= len(together) * row.is_counted
            counts = [self.images[number].tokens for number in together]
            for number, *parts in zip(together, *(features.split(counts) for features in _tensors_of(output))):
                found[number] = parts
                if not any(part.requires_grad for part in parts):
                    self._kept[*key, number] = parts
                elif last:
                    found[number] = [part.detach().requires_grad_(part.requires_grad) for part in parts]
                    self._held[*key, number] = Held(last, parts, found[number])
        chosen = zip(*(found[number] for number in row.numbers))
        read = [torch.cat(parts)[row.index.to(parts[0].device)] for parts in chosen]
        if not self.keeps:
            self._kept.clear()
        output = self._kinds[key]
        # By image, or of all together, as it has them.
        pooled, *layers = (one if torch.is_tensor(of) else [one] for of, one in zip(_parts_of(output), read))
        return type(output)(pooler_output=pooled, **({"deepstack_features": layers} if layers else {}))

    def _join(self, key: tuple, numbers: Sequence[int], again: Mapping[int, int]) -> dict[int, list[Tensor]]:
        """Return features of held images that no later row reads, and of what was encoded with them."""
        held = [self._held.get((*key, number)) for number in numbers if number not in again]
        lasts = {of_image.last for of_image in held if of_image is not None}
        names = [name for name, of_image in self._held.items() if name[:-1] == key and of_image.last in lasts]
        ended = {name[-1]: self._held.pop(name) for name in names}
        pairs = [pair for of_image in ended.values() for pair in of_image.trained]
        values = iter(Joined.apply([leaf for _, leaf in pairs], *(part for part, _ in pairs)) if pairs else ())
        self._joined += ended.values()
        return {n: [next(values) if part.requires_grad else part for part in of.parts] for n, of in ended.items()}

    def run_backward(self, joined: bool) -> None:
        """
        Take gradients through the encoder that wait for a row which was not computed; with `joined`, also those that no
        loss has taken.
        """
        waiting = [*self._held.values(), *(self._joined if joined else ())]
        pairs = [pair for held in waiting for pair in held.trained if pair[1].grad is not None]
        self._held.clear()
        if joined:
            self._joined.clear()
        if pairs:
            torch.autograd.backward([part for part, _ in pairs], [leaf.grad for _, leaf in pairs])

    def forget(self) -> None:
        """Let go of all features."""
        for known in (self._kinds, self._kept, self._held, self._joined):
            known.clear()

    def in_turn(self, passes: Sequence[Collection[int]], most: float) -> list[dict[int, int]]:
        """
        Return which images of each of some passes, which a window makes in this order, later ones read too: the place
        of the last that does. Meanwhile an encoder's activations are held, together at most those of `most` tokens.
        """
        last = {number: place for place, numbers in enumerate(passes) for number in numbers}
        there, found = [set(numbers) for numbers in passes], list[dict[int, int]]()
        for place, numbers in enumerate(passes):
            found.append({})
            for number in numbers:
                between = there[place + 1 : last[number] + 1]
                limited = between if most < float("inf") else ()
                if between and all(self.tokens_of(images | {number}) <= most for images in limited):
                    found[-1][number] = last[number]
                    for images in between:
                        images.add(number)
        return found

    def tokens_of(self, numbers: Collection[int]) -> int:
        """Return how many tokens images have."""
        return sum(self.images[number].tokens for number in numbers)

    # For a model.

    def decoded(self, codes: Tensor) -> Tensor:
        """Return tokens of the vocabulary."""
        return codes.masked_fill(codes >= FIRST, self.token)

    def types(self, codes: Tensor) -> dict[str, Tensor]:
        """Return the arguments that tell tokens apart."""
        is_image = (codes >= FIRST).long()
        return dict.fromkeys(self._has, is_image)

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return how many images stand in the rows of a batch, and how many tokens they have."""
        codes = batch.ids.numpy()
        return sum(len(self.in_order(row)[0]) for row in codes), int((codes >= FIRST).sum())

    def in_order(self, codes: np.ndarray) -> tuple[list[int], np.ndarray]:
        """
        Return the images whose tokens stand in a row, one entry each time that one does, and for each image token its
        place within its image.
        """
        numbers, found, places = codes[codes >= FIRST] - FIRST, [], []
        start = 0
        while start < len(numbers):
            found.append(int(numbers[start]))
            count = min(self.images[found[-1]].tokens, len(numbers) - start)
            places.append(np.arange(count))
            start += count
        return found, np.concatenate([np.arange(0), *places])

    def padded(self, codes: Tensor, mask: Tensor) -> dict[str, Any]:
        """Return what a model gets of a padded batch beside its tokens, mask and labels."""
        of_rows = [self.in_order(row)[0] for row in codes.masked_fill(mask == 0, 0).numpy()]
        inputs = self.inputs([number for numbers in of_rows for number in numbers], codes.device)
        if self._by_row and any(of_rows):
            counts = list(map(len, of_rows))
            for name, value in inputs.items():
                inputs[name] = nn.utils.rnn.pad_sequence(value[0].split(counts), batch_first=True)
        return {**inputs, **self.types(codes)}

    def inputs(self, numbers: Sequence[int], device: torch.device) -> dict[str, Any]:
        """Return the tensors of some images, as a batch of one row has them; `None` for each if there are none."""
        if not numbers:
            return dict.fromkeys(self.images[0].tensors) if self.images else {}
        chosen, found = [self.images[number].tensors for number in numbers], {}
        for name in chosen[0]:
            parts = [tensors[name] for tensors in chosen]
            joined = torch.cat(parts) if name == "pixel_values" and GRID in chosen[0] else _stacked(parts)
            found[name] = (joined[None] if self._by_row else joined).to(device, non_blocking=True)
        return found

    def of_row(self, device: torch.device, tree: Tree) -> RowImages:
        """Return the images of a tree, each once, as its flat row has them on a device."""
        codes = tree.flat()[0].numpy()
        places = np.zeros(len(codes), np.int64)
        for spans in tree.spans:
            slots = np.concatenate([np.arange(*span) for span in spans])
            slots = slots[codes[slots] >= FIRST]
            places[slots] = self.in_order(codes[slots])[1]
        return self._of_slots(device, codes, places[codes >= FIRST])

    def of_batch(self, device: torch.device, codes: Tensor) -> RowImages:
        """Return the images of a padded batch, each once, as the rows `codes` have them one after the other."""
        places = [self.in_order(row)[1] for row in codes.numpy()]
        return self._of_slots(device, codes.flatten().numpy(), np.concatenate(places))

    def _of_slots(self, device: torch.device, codes: np.ndarray, places: np.ndarray) -> RowImages:
        """Return the images of slots. `places` has those of image tokens within their images."""
        numbers = codes[codes >= FIRST] - FIRST
        distinct, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
        order = np.argsort(first)
        begins = np.zeros(len(distinct), np.int64)
        begins[order] = np.cumsum([0, *(self.images[number].tokens for number in distinct[order])])[:-1]
        index, behind = torch.from_numpy(begins[inverse] + places), None
        if any(self.sees):
            behind = np.zeros(len(codes), np.int64)
            behind[codes >= FIRST] = [self.images[number].tokens for number in numbers] - places - 1
        types = {name: of_slots[None].to(device) for name, of_slots in self.types(torch.from_numpy(codes)).items()}
        return RowImages(self, distinct[order].tolist(), index.to(device), types, behind)


def _parts_of(output: Any) -> list[Any]:
    """Return the features that stand for tokens, and those of layers."""
    return [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]


def _tensors_of(output: Any) -> list[Tensor]:
    """Return these of all images, each `[tokens, width]`."""
    parts = _parts_of(output)
    joined = [part if torch.is_tensor(part) else torch.cat([one.flatten(0, -2) for one in part]) for part in parts]
    return [part.flatten(0, -2) for part in joined]


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors of images as one. Where their sizes differ, zeros are added behind them, as processors do."""
    sizes = [max(sizes) for sizes in zip(*(part.shape for part in parts))]
    if any(list(part.shape) != sizes for part in parts):
        stacked = parts[0].new_zeros(len(parts), *sizes)
        for filled, part in zip(stacked, parts):
            filled[tuple(map(slice, part.shape))] = part
        return stacked
    return torch.stack(list(parts))


def _stands_by_row(given: Mapping[str, Tensor]) -> bool:
    """Whether `pixel_values` are `[batch, images of a row, ...]`, as those of Idefics: they come with a mask."""
    return MASK in given and given[MASK].dim() == 4


def _runs(is_image: np.ndarray) -> list[np.ndarray]:
    """Return how long the runs of image tokens are in each row."""
    edges = np.diff(np.pad(is_image.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    return [np.flatnonzero(row == -1) - np.flatnonzero(row == 1) for row in edges]


def _in_order(is_image: np.ndarray, given: Mapping[str, Tensor], encoder: Any) -> list[int] | None:
    """Return the number of tokens of each image of a batch, in order; `None` if neither batch nor model tell."""
    runs, pixels = _runs(is_image), given["pixel_values"]
    if _stands_by_row(given):
        return np.concatenate(runs).tolist() if max(map(len, runs)) <= pixels.shape[1] else None
    count, of_rows = len(given.get(GRID, pixels)), [int(row.sum()) for row in runs if len(row)]
    if any(len(given[name]) != count for name in (SIZES, MASK) if name in given):
        return None
    if sum(map(len, runs)) == count:
        return np.concatenate(runs).tolist()
    alike = all((value == value[:1]).all() for name, value in given.items() if name in (GRID, SIZES))
    size = sum(of_rows) // max(count, 1)
    if alike and size and not any(tokens % size for tokens in of_rows) and sum(of_rows) == size * count:
        return [size] * count
    if len(of_rows) == count:
        return of_rows
    tiled = pixels.dim() == 5 and SIZES in given and hasattr(encoder, "pack_image_features")
    counts = _packed(encoder, given) if tiled else _by_area(given[SIZES], sum(of_rows)) if SIZES in given else []
    whole = np.isin(np.cumsum(of_rows), np.cumsum(counts)).all() and sum(counts) == sum(of_rows)
    return counts if whole else None


def _by_area(sizes: Tensor, total: int) -> list[int]:
    """Divide tokens among images as their areas are, where that is even (Pixtral, which ends lines with a token)."""
    areas = sizes.prod(-1)
    return [] if (areas * total % areas.sum()).any() else (areas * total // areas.sum()).tolist()


def _packed(encoder: Any, given: Mapping[str, Tensor]) -> list[int]:
    """Return how many features a model makes of the tiles of each image, as it does itself, of features of width 1."""
    vision, known = encoder.config.vision_config, inspect.signature(encoder.pack_image_features).parameters
    of_tile, newline = (vision.image_size // vision.patch_size) ** 2, torch.ones(1)
    tiles = given["pixel_values"].flatten(2).any(2).sum(1).tolist()
    features, name = [torch.ones(count, of_tile, 1) for count in tiles], "vision_feature_select_strategy"
    named = {name: getattr(encoder.config, name)} if name in known else {}
    return encoder.pack_image_features(features, given[SIZES], image_newline=newline, **named)[1].tolist()


def _positions(encoder: Any, batch: Batch, given: Mapping[str, Tensor]) -> Tensor | None:
    """Return the positions of a batch with several axes, `[axes, batch, length]`, if the model has such."""
    if not hasattr(encoder, "get_rope_index") or GRID not in given:
        return None
    named = {name: given[name] for name in (GRID, TYPES) if name in given}
    return encoder.get_rope_index(batch.ids, attention_mask=batch.mask, **named)[0]
