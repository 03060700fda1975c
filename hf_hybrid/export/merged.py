"""
Adapters merged into their base.

An adapter of rank r adds the product of two thin matrices to a weight. Merging adds it once and for all. The result is
a plain model that computes the same as the base with the adapter.

- **Precision.** The sum is computed in fp32, layer by layer, and rounded once to the type of the base. In bf16 the
  product itself would be rounded first: an update of a few hundredths of a weight would lose most of its digits. To 16
  bits the sum is rounded stochastically (rounding.py): the base lies on the grid of its type, and the nearest number
  of a sum that is close to a weight of the base would be that weight.
- **Layers that trained whole** (`modules_to_save`) may be saved in fp32 beside a base in bf16. peft would load them in
  the type of the base, rounded to nearest. So they are loaded in fp32, and rounded as the sums are.
- **A base in 4 or 8 bits.** peft would round the sum to the few bits of the base again, which loses much of what was
  learned. So the base is dequantised before. Training saw exactly these values, because each layer dequantises its
  weights before it computes.
- **Tied embeddings.** If input and output embeddings share one tensor, adapters on one of the two make them differ.
  They then get a tensor each, and the config says so. If the sums are equal they stay tied. So they are compared
  before they are rounded.
"""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_hybrid.export.rounding import HALVES, round_
from hf_hybrid.files import BASE_NAME

logger = logging.getLogger(__name__)


@torch.no_grad()
def merge(folder: Path, base: PreTrainedModel) -> PreTrainedModel:
    """Put adapters on their base and merge them. Returns a plain model in the dtype of the base."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = PeftModel.from_pretrained(base, folder)
    shared = _give_each_its_own(base)
    trained_whole = _load_in_fp32(folder, model)
    unrounded = []
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            layer = module.get_base_layer()
            sums = [Sum(f"{name}.{part}", p, p.dtype) for part, p in layer.named_parameters(recurse=False)]
            for _, parameter, _ in sums:
                parameter.data = parameter.data.float()
            module.merge()
            if shared and layer in _embeddings(base):
                unrounded.append(sums)
            else:
                _round(sums)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that everything is merged already, and that embeddings are not tied
        merged = model.merge_and_unload()
    if shared:
        _tie_again(merged)
    for sums in [*unrounded, trained_whole]:
        _round(sums)
    return merged


def load_base(folder: Path, name: str, device: torch.device, as_trained: bool, **options: Any) -> PreTrainedModel:
    """
    Load the base of the adapters in `folder`, by its name and the options of `from_pretrained`.

    With `as_trained` it is the quantised one that training had, if it had one, and not the base as it is saved.
    """
    note = folder / BASE_NAME
    if as_trained and note.is_file():
        from transformers.quantizers import AutoQuantizationConfig

        saved = getattr(AutoConfig.from_pretrained(name, **options), "quantization_config", None)
        if saved is None:
            values = json.loads(note.read_text(encoding="utf-8"))["quantization_config"]
            options["quantization_config"] = AutoQuantizationConfig.from_dict(values)
    base = AutoModelForCausalLM.from_pretrained(name, dtype="auto", device_map={"": device}, **options)
    if getattr(base, "hf_quantizer", None) is not None:
        base = base.dequantize()
        base._weight_conversions = None  # transformers would pack the weights again when it saves them, and cannot
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        rows = base.get_input_embeddings().get_parameter("weight").shape[0]
        if tokenizer is not None and len(tokenizer) > rows:  # training added some
            base.resize_token_embeddings(len(tokenizer))
    return base


class Sum(NamedTuple):
    """A weight in fp32, with its adapters if it has any: its name, and the dtype of the base, in which it will be."""

    name: str
    parameter: nn.Parameter
    dtype: torch.dtype


def _load_in_fp32(folder: Path, model: nn.Module) -> list[Sum]:
    """Load the layers anew that trained whole, in fp32."""
    from peft import load_peft_weights, set_peft_model_state_dict
    from peft.utils.other import ModulesToSaveWrapper

    trained_whole = {}  # each once: tied ones have two layers
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            for part, parameter in module.modules_to_save.named_parameters():
                if parameter.dtype in HALVES:
                    trained_whole[parameter] = Sum(f"{name}.{part}", parameter, parameter.dtype)
                    parameter.data = parameter.data.float()
    if trained_whole:
        set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
    return list(trained_whole.values())


def _round(sums: list[Sum]) -> None:
    for name, parameter, dtype in sums:
        exact = parameter.data
        parameter.data = exact.to(dtype)
        if dtype in HALVES:
            round_(parameter.data, exact, name)


def _embeddings(model: PreTrainedModel) -> list[nn.Module]:
    """Input embeddings and head, as far as there are any, without adapters around them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    return [one.get_base_layer() if isinstance(one, BaseTunerLayer) else one for one in layers if one is not None]


def _give_each_its_own(model: PreTrainedModel) -> bool:
    """Untie embeddings that have adapters, which would else be added to both. Returns whether that was done."""
    layers = _embeddings(model)
    adapted = any(hasattr(layer, "merge") for layer in (model.get_input_embeddings(), model.get_output_embeddings()))
    if not adapted or len(layers) < 2 or layers[0].weight is not layers[1].weight:
        return False
    layers[1].weight = nn.Parameter(layers[1].get_parameter("weight").detach().clone(), requires_grad=False)
    return True


def _tie_again(model: PreTrainedModel) -> None:
    entry, head = (layer.get_parameter("weight") for layer in _embeddings(model))
    model.config.tie_word_embeddings = torch.allclose(entry.float(), head.float(), rtol=1e-5, atol=1e-7)
    if model.config.tie_word_embeddings:
        _embeddings(model)[1].weight = entry
    else:
        logger.warning(
            "The adapters changed one of two tied embeddings: the merged model has both, and "
            "`tie_word_embeddings=False` in its config."
        )
