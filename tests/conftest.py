"""Tiny models from config and text that ships with Python: nothing here needs a network or a GPU."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
# The tests see no GPU, and torch's CUDA sanitizer would ask for one. Those marked gpu have processes that see one.
os.environ.setdefault("HIDDEN_FROM_TESTS_CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
if "TORCH_CUDA_SANITIZER" in os.environ:
    os.environ["HIDDEN_FROM_TESTS_TORCH_CUDA_SANITIZER"] = os.environ.pop("TORCH_CUDA_SANITIZER")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from pydoc_data import topics

import pytest
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from hf_hybrid import HybridConfig

torch.set_num_threads(1)

CHECKPOINTING = "activation_checkpointing"
"""The option of `TrainingArguments`, which had another name in the oldest versions that are supported."""
if not hasattr(TrainingArguments, CHECKPOINTING):
    CHECKPOINTING = "gradient_checkpointing"

LENGTH = 32


def pytest_collection_finish(session):
    """Every full garbage collection would look through the million objects that the libraries made at import."""
    gc.collect()
    gc.freeze()


def tiny_model(seed: int = 0, **overrides) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    values = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**{**values, **overrides}))


class ByteText(Dataset):
    """English text as bytes, in blocks of `LENGTH`."""

    def __init__(self, samples: int, offset: int = 0):
        text = "".join(topics.topics[name] for name in sorted(topics.topics)).encode()
        blocks = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // LENGTH * LENGTH]
        self.blocks = blocks.view(-1, LENGTH)[offset : offset + samples].long()

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def config_values(output_dir, **overrides) -> dict:
    """Arguments that plain `TrainingArguments` takes as well."""
    return {
        "output_dir": str(output_dir),
        "max_steps": 30,
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        **overrides,
    }


def hybrid_config(output_dir, **overrides) -> HybridConfig:
    """A short run that goes through all four phases several times."""
    phases = {
        "warmup_phase_steps": 4,
        "full_phase_steps": 3,
        "correct_phase_steps": 2,
        "max_predict_steps": 3,
        "leap_worth": 0.5,
        "direction": "orthogonal",
    }
    return HybridConfig(**config_values(output_dir, **{**phases, **overrides}))


def weights(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_weights(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"{len(different)} of {len(first)} parameters differ, first {different[:3]}"


def losses(trainer) -> list[float]:
    """The losses that were logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def finite(model) -> bool:
    return all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.fixture
def train_set() -> ByteText:
    return ByteText(400)
