"""Llamas and a mixture of experts by shape with random weights, and the clock of a training. Nothing is downloaded."""

from __future__ import annotations

import time
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    TrainerCallback,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GIB = 2**30
SHAPES = {  # as Llama and Qwen have them
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
    "10m": {"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 7, "num_attention_heads": 5,
            "num_key_value_heads": 5, "vocab_size": 4096, "tie_word_embeddings": True},
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
    "124m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
             "num_key_value_heads": 12, "vocab_size": 49152, "tie_word_embeddings": True},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "head_dim": 64},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "30b-a3b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
                "num_key_value_heads": 4, "vocab_size": 151936, "head_dim": 128, "num_experts": 128,
                "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}  # fmt: skip
ADAPTERS = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")

COMMON = {
    "bf16": True, "save_strategy": "no", "logging_steps": 1000, "report_to": "none", "disable_tqdm": True,
    "use_cpu": DEVICE == "cpu",
}  # fmt: skip
"""Options of all arms but those that stream."""


def config_of(shape: str) -> PreTrainedConfig:
    kind, name = (Qwen3MoeConfig, "Qwen3Moe") if "num_experts" in SHAPES[shape] else (LlamaConfig, "Llama")
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return kind(max_position_embeddings=16384, architectures=[f"{name}ForCausalLM"], **ids, **SHAPES[shape])


def build(shape: str, *, lora: bool, seed: int = 0):
    """Return a model of a shape in bf16 on the device. With `lora`, fp32 adapters on all linear layers train alone."""
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.bfloat16)
    if not lora:
        return model
    model = get_peft_model(model, ADAPTERS)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def tokenizer(shape: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose words are `w2`, `w3` ..., one for each token of a shape's vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, SHAPES[shape]["vocab_size"])}
    by_word = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=by_word, pad_token="<pad>", eos_token="<eos>")


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def memory() -> dict[str, float]:
    """The most GiB that tensors took on the device since the last [`forget_peak`], and that torch held for them."""
    if DEVICE != "cuda":
        return {"peak_gib": 0.0, "reserved_gib": 0.0}
    return {"peak_gib": torch.cuda.max_memory_allocated() / GIB, "reserved_gib": torch.cuda.max_memory_reserved() / GIB}


def forget_peak() -> None:
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()


def scaled(shape: str, tokens: int) -> int:
    """So many tokens, and a twentieth for the tiny shape."""
    return max(1, tokens // 20) if shape == "tiny" else tokens


class Clock(TrainerCallback):
    """
    Wall seconds of a step, without those of the first ones.

    The host waits for the device twice: after the warm-up and at the end. In between it may run ahead, as in a
    training; how long each step took is read from events of the device. With `profiled`, one more step comes after the
    timed ones, of which torch's profiler counts the kernels.

    Args:
        warm_up (`int`): Steps that are not timed: kernels are chosen and memory is reserved in them.
        steps (`int`): Steps that are timed.
        profiled (`bool`, defaults to `False`): Profile one more step.
    """

    def __init__(self, warm_up: int, steps: int, profiled: bool = False):
        self.warm_up, self.steps, self.profiled = warm_up, steps, profiled
        self.counted, self._ends = Kernels(), list[Any]()

    @property
    def max_steps(self) -> int:
        return self.warm_up + self.steps + self.profiled

    @property
    def seconds(self) -> float:
        return (self._end - self._begin) / self.steps

    def measured(self) -> dict[str, Any]:
        """What a row says of the steps."""
        if DEVICE == "cuda":
            steps = [one.elapsed_time(other) / 1e3 for one, other in zip(self._ends, self._ends[1:])]
        else:
            steps = [other - one for one, other in zip(self._ends, self._ends[1:])]
        return {
            "seconds": self.seconds,
            "steps": [round(value, 4) for value in steps],
            "warm_up_seconds": self.warm_up_seconds,
            **self.memory,
            **self.counted.measured(),
        }

    def on_train_begin(self, args, state, control, **kwargs):
        synchronize()
        self._first = time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs):
        if self.profiled and state.global_step == self.max_steps - 1:
            self.counted.begin()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.warm_up:
            synchronize()
            self._begin = time.perf_counter()
            self.warm_up_seconds = self._begin - self._first
            forget_peak()
        if self.warm_up <= state.global_step <= self.warm_up + self.steps:
            self._ends.append(time.perf_counter() if DEVICE == "cpu" else torch.cuda.Event(enable_timing=True))
            if DEVICE == "cuda":
                self._ends[-1].record()
        if state.global_step == self.warm_up + self.steps:
            synchronize()
            self._end, self.memory = time.perf_counter(), memory()
        elif self.profiled and state.global_step == self.max_steps:
            self.counted.end()


class Kernels:
    """Counts the kernels between two points of a training, and the seconds in which at least one of them runs."""

    def __init__(self):
        self.kernels: int | None = None
        self.busy: float | None = None

    def begin(self) -> None:
        kinds = torch.profiler.ProfilerActivity
        self._profile = torch.profiler.profile(activities=[kinds.CUDA if DEVICE == "cuda" else kinds.CPU])
        self._profile.__enter__()

    def end(self) -> None:
        synchronize()
        self._profile.__exit__(None, None, None)
        on_device = torch.autograd.DeviceType.CUDA
        kernels = [event.time_range for event in self._profile.events() if event.device_type == on_device]
        self.kernels = len(kernels)
        self.busy = _covered([(span.start, span.end) for span in kernels]) / 1e6

    def measured(self) -> dict[str, Any]:
        return {"kernels": self.kernels, "busy_seconds": self.busy}


def _covered(spans: list[tuple[float, float]]) -> float:
    """How long at least one of the spans runs."""
    total, end = 0.0, float("-inf")
    for begin, until in sorted(spans):
        total += max(0.0, until - max(begin, end))
        end = max(end, until)
    return total
