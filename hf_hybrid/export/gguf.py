"""
GGUF, the file format of llama.cpp, through the `gguf` package that llama.cpp's authors publish.

A GGUF file is one file with three parts: facts about the model (`llama.block_count`, ...), the tokenizer, and the
tensors under llama.cpp's names. The package has the names, the writer and the quantisers. What is left to do here:

- **Facts.** Those that llama.cpp needs to build the model, read from the config of transformers.
- **Order of rows.** llama.cpp rotates pairs of neighbouring rows of queries and keys in a Llama, and transformers
  rotates the first half of a head against the second. Their rows are interleaved accordingly.
- **Kinds.** In a block format, 32 weights of a row share a scale (and a least value in q4_1 and q5_1). Vectors stay in
  fp32, rows that blocks do not divide in fp16. Embeddings and head have 8 bits in the formats with fewer: they are
  read in every token, and llama.cpp too gives them more bits than the rest. `q4_m` is q4_1 with more bits where they
  count most: in the value projections, which are small where heads share them, and in the second matrix of the MLP.
  llama.cpp's own mixes (`q4_k_m`) favour the same two. fp16 is rounded stochastically (rounding.py).
- **Tokenizer.** Byte-level BPE, with the name that llama.cpp has for the pattern that splits text into words.

Models and tokenizers of other kinds are refused: they need llama.cpp's own converter.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import transformers
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
MIXED = {"attn_v": "Q8_0", "ffn_down": "Q5_1"}
"""What `q4_m` has in place of q4_1, by llama.cpp's names."""
ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""`model_type` in transformers, and the name of the architecture in GGUF."""
INTERLEAVED = ("llama",)
"""Of these, llama.cpp wants the rows of queries and keys in pairs."""
USUAL = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
"""What a GGUF file of these architectures cannot say otherwise, or transformers does not read from it."""

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt-2": [{"type": "ByteLevel", "use_regex": True}],
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
    if config.model_type not in ARCHITECTURES:
        return f"models of type `{config.model_type}` are not written, only {', '.join(ARCHITECTURES)}."
    rope = config.rope_parameters.get("rope_type", "default")
    if rope != "default":
        return f"stretched positions (`rope_type={rope}`) are not written."
    for option, wanted in USUAL.items():
        if (value := getattr(config, option, wanted)) != wanted:
            return f"`{option}={value}` is not written, only `{wanted}`."
    if tokenizer is None:
        return "the file holds the tokenizer, and the run has none."
    if _words(tokenizer) is None:
        return f"the tokenizer (`{type(tokenizer).__name__}`) is no byte-level BPE that llama.cpp has a name for."
    return None


def _words(tokenizer: Any) -> str | None:
    """llama.cpp's name for how the tokenizer splits words; `None` if it has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = json.loads(backend.to_str())
    if parts["model"]["type"] != "BPE" or parts["normalizer"] not in (None, {"type": "NFC"}):
        return None
    steps = parts["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    for name, wanted in SPLITS.items():
        if len(steps) == len(wanted) and all(part.items() <= step.items() for step, part in zip(steps, wanted)):
            return name
    return None


def write(model: PreTrainedModel, tokenizer: Any, path: Path, kind: str, title: str) -> None:
    """
    Write a model and its tokenizer, which is saved in the folder of `path`, as a GGUF file of a kind of `KINDS`, and a
    Modelfile beside it. Servers show the `title`.
    """
    import gguf

    config = model.config
    names = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_name(title)
    _add_facts(writer, config, gguf.LlamaFileType["MOSTLY_" + _most(kind)], gguf.GGML_QUANT_VERSION)
    _add_tokenizer(writer, tokenizer, path.parent, config)
    tensor_names = gguf.get_tensor_name_map(names[config.model_type], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        known = tensor_names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise ValueError(f"`{name}` has no name in GGUF.")
        if config.model_type in INTERLEAVED and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        exact = tensor.to("cpu", torch.float32)
        to = gguf.GGMLQuantizationType[_kind_of(known, tuple(exact.shape), kind)]
        if to.name == "F16":
            exact = round_(torch.empty_like(exact, dtype=torch.float16), exact, name).float()
        writer.add_tensor(known, gguf.quantize(exact.numpy(), to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_text(path.with_name(MODELFILE_NAME), modelfile(tokenizer, path.name))


@contextlib.contextmanager
def quiet_reading() -> Generator[None]:
    """
    Context to load a model in, which may be a GGUF file: transformers draws a bar over its tensors that transformers'
    own switch for bars does not reach. Where the switch is off, what is written to stderr is dropped in here.
    """
    bars = transformers.logging.is_progress_bar_enabled()
    with contextlib.nullcontext() if bars else contextlib.redirect_stderr(io.StringIO()):
        yield


def _kind_of(name: str, shape: tuple[int, ...], kind: str) -> str:
    if len(shape) == 1:
        return "F32"
    if kind == "f16" or shape[-1] % 32:
        return "F16"
    if name in ("token_embd.weight", "output.weight"):
        return "Q8_0"
    return MIXED.get(name.split(".")[-2], _most(kind)) if kind == "q4_m" else _most(kind)


def _most(kind: str) -> str:
    return "Q4_1" if kind == "q4_m" else kind.upper()


def _add_facts(writer: Any, config: PreTrainedConfig, file_type: int, version: int) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(file_type)
    writer.add_quantization_version(version)


def _add_tokenizer(writer: Any, tokenizer: Any, folder: Path, config: PreTrainedConfig) -> None:
    """Every row of the embeddings gets a token. Rows over the tokenizer's vocabulary are unused ones."""
    import gguf

    tokens = [f"[PAD{number}]" for number in range(config.vocab_size)]
    types = [gguf.TokenType.UNUSED] * config.vocab_size
    added = tokenizer.added_tokens_decoder
    for token, number in tokenizer.get_vocab().items():
        special = added[number].special if number in added else None
        names = {None: gguf.TokenType.NORMAL, True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED}
        tokens[number], types[number] = token, names[special]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_words(tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=config.vocab_size).add_to_gguf(writer, quiet=True)
