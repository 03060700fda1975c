"""
GGUF, the file format of llama.cpp, through the `gguf` package that llama.cpp's authors publish.

A GGUF file is one file with three parts: facts about the model (`llama.block_count`, ...), the tokenizer, and the
tensors under llama.cpp's names. The package has the names, the writer and the quantisers. What is left to do here:

- **Facts.** Those that llama.cpp needs to build the model, read from the config of transformers.
- **Order of rows.** llama.cpp rotates pairs of neighbouring rows of queries and keys in a Llama, and transformers
  rotates the first half of a head against the second. Their rows are interleaved accordingly. Experts have gate and up
  projection apart. Norms that multiply by 1 + weight (Gemma's) are written with the 1.
- **Kinds.** In a block format, 32 weights of a row share a scale (and a least value in q4_1 and q5_1). Vectors stay in
  fp32, rows that blocks do not divide in fp16. Embeddings and head have 8 bits in the formats with fewer: they are
  read in every token, and llama.cpp too gives them more bits than the rest. `q4_m` is q4_1 with more bits where they
  count most: in the value projections, which are small where heads share them, and in the second matrix of the MLP.
  llama.cpp's own mixes (`q4_k_m`) favour the same two. fp16 is rounded stochastically (rounding.py).
- **Tokenizer.** Byte-level BPE, with the name that llama.cpp has for the pattern that splits text into words. Or BPE
  over whole texts in which a space is `▁` (SentencePiece's): llama.cpp merges the pair with the highest score, and a
  token's score is the negative rank of its merge.

Models and tokenizers of other kinds are refused: they need llama.cpp's own converter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hybrid.export.modelfile import MODELFILE_NAME, modelfile
from hf_hybrid.export.rounding import round_
from hf_hybrid.files import write_text

KINDS = {
    "f16": "16 bits, rounded stochastically, for llama.cpp's own quantiser (gguf)",
    "q8_0": "8 bits in blocks of 32 (gguf)",
    "q5_1": "5 bits in blocks of 32, with a least value (gguf)",
    "q4_1": "4 bits in blocks of 32, with a least value (gguf)",
    "q4_0": "4 bits in blocks of 32 (gguf)",
    "q4_m": "4 bits in blocks of 32, with a least value; 8 for value and 5 for down projections (gguf)",
}
"""What the Python package can quantise. K-quants (`q4_k_m`, ...) it only reads."""
MIXED = {"attn_v": "Q8_0", "ffn_down": "Q5_1", "ffn_down_exps": "Q5_1"}
"""What `q4_m` has in place of q4_1, by llama.cpp's names."""
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "phi3": "phi3",
    "gemma2": "gemma2", "gemma3_text": "gemma3",
}  # fmt: skip
"""`model_type` in transformers, and the name of the architecture in GGUF."""
INTERLEAVED = ("llama",)
"""Of these, llama.cpp wants the rows of queries and keys in pairs."""
FULL_EVERY = {"gemma2": 2, "gemma3": 6}
"""Of these, every so manieth layer attends to all tokens, and the others to a window."""
USUAL = {
    "attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
"""What a GGUF file of these architectures cannot say otherwise, or transformers does not read from it."""

_NOT_GREEDY = {"<unk>", "<s>", "<|endoftext|>"}
"""All special tokens of Phi-3 but these take the spaces behind them."""
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}"
    r"\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt-2": [{"type": "ByteLevel", "use_regex": True}],
    "tekken": [{"type": "Split", "pattern": {"Regex": _TEKKEN}}, {"type": "ByteLevel", "use_regex": False}],
    "smollm": [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "use_regex": True}],
    "llama-bpe": [{"type": "Split", "pattern": {"Regex": _LLAMA_3}}, {"type": "ByteLevel", "use_regex": False}],
    "qwen2": [
        {"type": "Split", "pattern": {"Regex": _LLAMA_3.replace("{1,3}", "")}},
        {"type": "ByteLevel", "use_regex": False},
    ],
}
"""Patterns that split text into words, by llama.cpp's names, as the steps that `tokenizer.json` has for them."""


def reason_not_written(config: PreTrainedConfig, tokenizer: Any) -> str | None:
    """Return why a model or its tokenizer is not written here, as a sentence."""
    if (architecture := ARCHITECTURES.get(config.model_type)) is None:
        return f"models of type `{config.model_type}` are not written, only {', '.join(ARCHITECTURES)}."
    for rope in _ropes(config):
        if (kind := rope.get("rope_type", "default")) != "default":
            return f"stretched positions (`rope_type={kind}`) are not written."
        if (share := rope.get("partial_rotary_factor", 1.0)) != 1.0:
            return f"`partial_rotary_factor={share}` is not written, only `1.0`."
    every = FULL_EVERY.get(architecture)
    act = "hidden_activation" if hasattr(config, "hidden_activation") else "hidden_act"
    wants: dict[str, Any] = {**USUAL, act: "gelu_pytorch_tanh" if every else "silu"}
    if every:
        layers = range(1, config.num_hidden_layers + 1)
        kinds = ["sliding_attention" if number % every else "full_attention" for number in layers]
        caps = (50.0, 30.0) if architecture == "gemma2" else (None, None)
        wants |= {"head_dim": 256, "query_pre_attn_scalar": 256, "layer_types": kinds}
        wants |= {"attn_logit_softcapping": caps[0], "final_logit_softcapping": caps[1]}
    for option, wanted in wants.items():
        if (value := getattr(config, option, wanted)) != wanted:
            return f"`{option}={value}` is not written, only `{wanted}`."
    if tokenizer is None:
        return "the file holds the tokenizer, and the run has none."
    if _words(tokenizer) is None:
        return f"the tokenizer (`{type(tokenizer).__name__}`) is no BPE that llama.cpp has a name for."
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    if (greedy := _taking_spaces(tokenizer)) and not (_NOT_GREEDY <= special and greedy == special - _NOT_GREEDY):
        return f"the token `{min(greedy)}` takes the spaces behind it, which llama.cpp knows of Phi-3's tokens alone."
    return None


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """How positions are rotated: in layers that attend to all tokens, and in those with a window."""
    rope = config.rope_parameters
    return [rope.get(kind, rope) for kind in ("full_attention", "sliding_attention")]


def _head(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _taking_spaces(tokenizer: Any) -> set[str]:
    return {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special and token.rstrip}


def _words(tokenizer: Any) -> tuple[str, str] | None:
    """llama.cpp's names for the tokenizer and for how it splits words; `None` if it has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = json.loads(backend.to_str())
    steps = parts["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    if parts["model"]["type"] != "BPE":
        return None
    if parts["model"].get("byte_fallback"):
        return None if _begins_with_space(parts) is None else ("llama", "default")
    if parts["normalizer"] not in (None, {"type": "NFC"}):
        return None
    for name, wanted in SPLITS.items():
        if len(steps) == len(wanted) and all(part.items() <= step.items() for step, part in zip(steps, wanted)):
            return "gpt2", name
    return None


def _begins_with_space(parts: dict[str, Any]) -> bool | None:
    """
    Whether texts get a space in front, of a `tokenizer.json` in which spaces are `▁`; `None` of others. With the scheme
    `first` none: llama.cpp would add one behind tokens like `[INST]` too, and chats begin with such a token.
    """
    made = parts["normalizer"] or parts["pre_tokenizer"] or {}
    if made.get("type") == "Metaspace":
        return made["prepend_scheme"] == "always"
    kinds = tuple(step.get("type") for step in made.get("normalizers", [made]))
    return {("Prepend", "Replace"): True, ("Replace",): False}.get(kinds)


def write(model: PreTrainedModel, tokenizer: Any, path: Path, kind: str, title: str) -> None:
    """
    Write a model and its tokenizer, which is saved in the folder of `path`, as a GGUF file of a kind of `KINDS`, and a
    Modelfile beside it. Servers show the `title`.
    """
    import gguf

    config, architecture = model.config, ARCHITECTURES[model.config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    # llama.cpp knows by the name alone that tokens of Phi-3 take the spaces behind them, and loads no others so named.
    greedy = _taking_spaces(tokenizer)
    writer.add_name(f"{title} (Phi-3)" if greedy else re.sub("phi-?3", "Phi 3", title, flags=re.IGNORECASE))
    _add_facts(writer, config, gguf.LlamaFileType["MOSTLY_" + _most(kind)], gguf.GGML_QUANT_VERSION)
    _add_tokenizer(writer, tokenizer, path.parent, model)
    names = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    tensor_names = gguf.get_tensor_name_map(names[architecture], config.num_hidden_layers)
    for name, tensor in _tensors(model, architecture):
        known = tensor_names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise ValueError(f"`{name}` has no name in GGUF.")
        to = gguf.GGMLQuantizationType[_kind_of(known, tuple(tensor.shape), kind)]
        if to.name == "F16":
            tensor = round_(torch.empty_like(tensor, dtype=torch.float16), tensor, name).float()
        writer.add_tensor(known, gguf.quantize(tensor.numpy(), to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_text(path.with_name(MODELFILE_NAME), modelfile(tokenizer, path.name))


def _tensors(model: PreTrainedModel, architecture: str) -> Generator[tuple[str, torch.Tensor]]:
    """The weights of a model in fp32, as llama.cpp has them, by names of transformers."""
    config = model.config
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor, parts = tensor.to("cpu", torch.float32), name.split(".")
        if architecture in INTERLEAVED and parts[-2] in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if parts[-2] == "q_proj" else config.num_key_value_heads
            tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        if architecture in FULL_EVERY and parts[-2].endswith("norm"):
            tensor = tensor + 1
        if parts[-2] != "experts":
            yield name, tensor
        elif parts[-1] == "gate_up_proj":
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True):
                yield f"{name.removesuffix(parts[-1])}{part}.weight", half.contiguous()
        else:
            yield f"{name}.weight", tensor


def _kind_of(name: str, shape: tuple[int, ...], kind: str) -> str:
    if len(shape) == 1 or ".ffn_gate_inp." in name:  # which chooses experts
        return "F32"
    if kind == "f16" or shape[-1] % 32:
        return "F16"
    if name in ("token_embd.weight", "output.weight"):
        return "Q8_0"
    return MIXED.get(name.split(".")[-2], _most(kind)) if kind == "q4_m" else _most(kind)


def _most(kind: str) -> str:
    return "Q4_1" if kind == "q4_m" else kind.upper()


def _add_facts(writer: Any, config: PreTrainedConfig, file_type: int, version: int) -> None:
    head, (rope, of_window), positions = _head(config), _ropes(config), config.max_position_embeddings
    window = getattr(config, "sliding_window", None)
    if hasattr(config, "query_pre_attn_scalar"):  # Gemma's
        writer.add_sliding_window(window)
        writer.add_rope_freq_base_swa(of_window["rope_theta"])
    elif window and getattr(config, "use_sliding_window", True):  # which the architecture has not, so texts end there
        positions = min(positions, window)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_context_length(positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(file_type)
    writer.add_quantization_version(version)


def _add_tokenizer(writer: Any, tokenizer: Any, folder: Path, model: PreTrainedModel) -> None:
    """Every row of the embeddings gets a token. Rows over the tokenizer's vocabulary are unused ones."""
    import gguf

    size, kinds = model.config.vocab_size, gguf.TokenType
    parts, (kind, splits) = json.loads(tokenizer.backend_tokenizer.to_str()), _words(tokenizer) or ("", "")
    tokens, types = [f"[PAD{number}]" for number in range(size)], [kinds.UNUSED] * size
    added = tokenizer.added_tokens_decoder
    for token, number in tokenizer.get_vocab().items():
        special = added[number].special if number in added else None
        tokens[number] = token
        types[number] = {None: kinds.NORMAL, True: kinds.CONTROL, False: kinds.USER_DEFINED}[special]
        if kind == "llama" and re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            types[number] = kinds.BYTE
        if token == parts["model"].get("unk_token") and kind == "llama":
            types[number] = kinds.UNKNOWN
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(splits)
    writer.add_token_list(tokens)
    if kind == "llama":
        ranks: dict[str, float] = {}
        for rank, pair in enumerate(parts["model"]["merges"]):
            ranks.setdefault("".join(pair), float(-rank))
        writer.add_token_scores([ranks.get(token, -1e6) for token in tokens])
        writer.add_add_space_prefix(bool(_begins_with_space(parts)))
    writer.add_token_types(types)
    gguf.SpecialVocab(folder, load_merges=kind == "gpt2", n_vocab=size).add_to_gguf(writer, quiet=True)
    ends = getattr(model.generation_config, "eos_token_id", None)
    for other in [end for end in ends if end != tokenizer.eos_token_id][:1] if isinstance(ends, list) else []:
        writer.add_eot_token_id(other)  # where answers end too
