"""A tokenizer of bytes, a tiny Llama that fits to it, and messages."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"
ENDS = {"eos_token": END, "pad_token": END}


def user(text, **more):
    return {"role": "user", "content": text, **more}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def byte_tokenizer(more=(END,), merges=(), **values) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2's. Like it, it has no pad token unless one is given."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *more]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, list(merges)))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **values)


def chat_tokenizer(template, *marks, **values) -> PreTrainedTokenizerFast:
    """With a template of chats, and marks as special tokens."""
    tokenizer = byte_tokenizer(**{**ENDS, "chat_template": template, **values})
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    return tokenizer


def llama_config(**values) -> LlamaConfig:
    sizes = {
        "vocab_size": 257, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 256,
    }  # fmt: skip
    return LlamaConfig(**{**sizes, **values})


def save_llama(folder, tokenizer, **values) -> None:
    """Write a tokenizer and a model of its size."""
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(vocab_size=len(tokenizer), **values)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
