"""
Images in a traced step: their encoder computes on tensors without data, and finds the sizes that it loops over.

The trace of a step gives a model tokens alone. Where rows have images, a hook on the embeddings lets the model's own
`get_image_features` encode them, and puts what it returns among the embeddings, as the model would: the places are of
no matter for what is held.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

TEXT = ("input_ids", "attention_mask", "labels")
LARGEST_VALUE = 2**27
"""Elements of a tensor beyond which its values are not computed."""


class SomeImages(NamedTuple):
    """What a model gets of some rows with images beside their tokens."""

    tensors: Mapping[str, Tensor]
    of_tokens: tuple[str, ...]
    """Arguments of a model that say what each token is."""
    rows: int

    @classmethod
    def in_batch(cls, batch: Mapping[str, Any]) -> SomeImages | None:
        """Of a batch as a collator made it; `None` if it has no images."""
        ids = batch["input_ids"]
        more = {name: value for name, value in batch.items() if torch.is_tensor(value) and name not in TEXT}
        of_tokens = tuple(name for name, value in more.items() if value.shape == ids.shape)
        tensors = {name: value for name, value in more.items() if name not in of_tokens}
        return cls(tensors, of_tokens, len(ids)) if tensors else None

    @classmethod
    def assumed(cls, encoder: Any, length: int) -> SomeImages:
        """Of one row, half of whose tokens stand for images; of images of one size for at least one of them."""
        config, tokens = encoder.config, max(length // 2, 1)
        vision, known = config.vision_config, inspect.signature(encoder.get_image_features).parameters
        patch = vision.patch_size
        if "image_grid_thw" in known:
            height, merged = math.isqrt(tokens), vision.spatial_merge_size
            grid = torch.tensor([[1, height * merged, tokens // height * merged]])
            pixels = torch.ones(int(grid.prod()), vision.in_channels * vision.temporal_patch_size * patch**2)
            tensors = {"pixel_values": pixels, "image_grid_thw": grid}
        elif known.get("image_sizes", inspect.Parameter).default is not inspect.Parameter.empty:
            of_one = (vision.image_size // patch // getattr(config, "scale_factor", 1)) ** 2
            pixels = torch.ones(max(tokens // of_one, 1), vision.num_channels, vision.image_size, vision.image_size)
            tensors = {"pixel_values": pixels[None] if "pixel_attention_mask" in known else pixels}
        else:
            raise ValueError(
                f"`model`: a config of `{config.model_type}` does not tell how images are cut into tiles. Make a "
                "trainer with `memory=auto`, which plans with the images of its rows."
            )
        of_tokens = ("token_type_ids",) if "token_type_ids" in inspect.signature(encoder.forward).parameters else ()
        return cls(tensors, of_tokens, 1)

    @property
    def bytes_of_a_row(self) -> int:
        """Bytes of what the model gets, by row."""
        return sum(tensor.nbytes for tensor in self.tensors.values()) // self.rows

    def of(self, rows: int) -> dict[str, Tensor]:
        """The same of so many rows, as tensors without data, which know their values."""
        with _disable_current_modes():
            values = {name: torch.cat([t] * max(rows // self.rows, 1)) for name, t in self.tensors.items()}
        return {name: _standing_in(value) for name, value in values.items()}


def encoder_of(model: nn.Module) -> Any:
    """Return the module of a model that encodes images, or `None`."""
    found = [module for module in model.modules() if hasattr(type(module), "get_image_features")]
    return found[-1] if found else None


def put_among_embeddings(model: Any, images: Mapping[str, Tensor]) -> Callable[[], None]:
    """Let the embeddings of a model end with the features of images. Return what undoes that."""
    encoder = encoder_of(model)
    known = inspect.signature(encoder.get_image_features).parameters
    given = {name: tensor for name, tensor in images.items() if name in known}

    def put(_module: nn.Module, _args: Any, embedded: Tensor) -> Tensor:
        features = encoder.get_image_features(**given, return_dict=True).pooler_output
        features = features if torch.is_tensor(features) else torch.cat([one.flatten(0, -2) for one in features])
        places = torch.empty((*embedded.shape[:2], 1), dtype=torch.bool).expand_as(embedded)
        return embedded.masked_scatter(places, features.to(embedded.dtype))

    return model.get_input_embeddings().register_forward_hook(put).remove


def run_knowing(run: Callable, func: Any, args: tuple, kwargs: dict) -> Any:
    """
    Run an operation on tensors without data, and on their values if all of them are known: those of grids, masks and
    indices, which decide over sizes. `run` does the first.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(_value(tensor) is None for tensor in tensors):
        if func._schema.is_mutable:
            vars(args[0]).pop("value", None)
        if func is torch.ops.aten.index.Tensor:
            args = args[0], [place for index in args[1] for place in _places(index)]
        return run(func, args, kwargs)
    decides = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags)
    made = None if decides else run(func, args, kwargs)
    if any(leaf.numel() > LARGEST_VALUE for leaf in tree_leaves(made) if isinstance(leaf, Tensor)):
        return made
    with _disable_current_modes():
        own_args, own_kwargs = tree_map_only(Tensor, _value, (args, kwargs))
        values = func(*own_args, **own_kwargs)
    if decides:
        return tree_map_only(Tensor, _standing_in, values)
    for tensor, value in zip(tree_leaves(made), tree_leaves(values)):
        if isinstance(tensor, Tensor):
            vars(tensor)["value"] = value
    return made


def _places(index: Tensor | None) -> list[Tensor | None]:
    """The indices that a mask stands for, if it is known."""
    if index is None or index.dtype != torch.bool or (value := _value(index)) is None:
        return [index]
    with _disable_current_modes():
        places = value.nonzero(as_tuple=True)
    return [_standing_in(place) for place in places]


def _value(tensor: Tensor) -> Tensor | None:
    return vars(tensor).get("value") if isinstance(tensor, FakeTensor) else tensor


def _standing_in(value: Tensor) -> Tensor:
    """A tensor of the same shape without data, under a mode of such tensors, that knows its values."""
    stands_in = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    vars(stands_in)["value"] = value
    return stands_in
