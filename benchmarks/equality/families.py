"""
What holds for the model families that people train: supervised fine-tuning, preferences and rollouts that share rows.

    python -m benchmarks.equality.families                  # all, in three minutes; goes on where it stopped
    python -m benchmarks.equality.families --only llama     # some model types, also where they are there

A tiny random model of each family (`tests/rig/tiny_architectures.py`) is trained in both ways, in fp32 on the CPU:

    sft         a window of 12 rows of an agent in 3 micro-batches: gradients of `Trainer` and of `HybridTrainer`
    dpo         a batch of 4 pairs: gradients of TRL's rows and of rows that share
    rollouts    2 steps of GRPO: weights of `GRPOTrainer` and of `HybridGRPOTrainer`, which decodes a prompt once

`outcome` is `equal`, `differs`, `falls back` (`detail` says why: it is the reason that a user reads in the summary) or
`fails`. Gradients and weights are equal if they are within 1e-5 of their norm. Mixtures train with their router's loss,
where TRL can compute it. States last: their decay is that of a trained model. Nothing is downloaded.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from datasets import Dataset
from rig import rollouts, with_eyes
from rig.sft_rows import agent, pad
from rig.tiny_architectures import FIRST_DATA_TOKEN, VOCAB, build_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments
from trl import GRPOTrainer

from benchmarks.equality.pool import Worker
from benchmarks.results import Results, Row, command_line, provenance
from hf_hybrid import HybridConfig, HybridDPOConfig, HybridDPOTrainer, HybridGRPOTrainer, HybridTrainer

FAMILIES = {
    "Llama 3": "llama", "SmolLM3": "smollm3", "Mistral": "mistral", "Mixtral": "mixtral", "Qwen2.5": "qwen2",
    "Qwen3": "qwen3", "Qwen3-MoE": "qwen3_moe", "Qwen3-Next": "qwen3_next", "Qwen3.5": "qwen3_5_text",
    "Gemma 2": "gemma2", "Gemma 3": "gemma3_text", "gpt-oss": "gpt_oss", "DeepSeek-V3": "deepseek_v3",
    "GLM-4": "glm4", "Phi-3": "phi3", "OLMo 2": "olmo2", "OLMoE": "olmoe", "OLMo Hybrid": "olmo_hybrid",
    "Granite": "granite", "Granite 4": "granitemoehybrid", "Cohere 2": "cohere2", "StarCoder2": "starcoder2",
    "LFM2": "lfm2", "LFM2-MoE": "lfm2_moe", "Mamba 2": "mamba2", "Bamba": "bamba", "Falcon-H1": "falcon_h1",
    "Nemotron-H": "nemotron_h", "Zamba 2": "zamba2", "Jamba": "jamba", "Mamba": "mamba", "MiniMax": "minimax",
    "RecurrentGemma": "recurrent_gemma", "RWKV": "rwkv", "GPT-2": "gpt2",
    "GPT-NeoX": "gpt_neox", "OPT": "opt", "BLOOM": "bloom", "Qwen3.5 with images (rows of text)": "qwen3_5_vl",
    "Qwen3-VL (rows of text)": "qwen3_vl", "Qwen3-VL-MoE (rows of text)": "qwen3_vl_moe",
}  # fmt: skip
HALF = ["linear_attention", "full_attention"] * 2
KINDS = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "bamba": {"attn_layer_indices": [1, 3], "layer_types": HALF, "layers_block_type": HALF},
    "granitemoehybrid": {"layer_types": HALF, "layers_block_type": HALF},
    "jamba": {"layer_types": HALF, "layers_block_type": HALF, "attn_layer_period": 2, "attn_layer_offset": 1},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
}
"""Kinds of layers of the models whose first layers are all of one kind."""
CHECKS = ("sft", "dpo", "rollouts")
MOST = 1e-5
WINDOW = 16
"""Tokens: shorter than rows of an agent, and longer than those that are sampled, whose cache has to fit."""
ROWS, MICRO_BATCHES = 12, 3


def build(model_type: str, with_router: bool = False) -> PreTrainedModel:
    """Return a model in which tokens matter to each other, without dropout. TRL asks for a router's loss itself."""
    if model_type in with_eyes.KINDS:
        own = {"output_router_logits": with_router} if "moe" in model_type else {}
        return with_eyes.build(model_type, vocab_size=VOCAB, **own)
    model = build_model(model_type)
    if model_type in KINDS:
        own = {name: value for name, value in KINDS[model_type].items() if name in model.config.to_dict()}
        model.config = type(model.config)(**{**model.config.to_dict(), **own})
    for config in (model.config, model.config.get_text_config()):
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        if hasattr(config, "router_aux_loss_coef"):
            config.output_router_logits = with_router
        if getattr(config, "sliding_window", None):
            config.sliding_window = WINDOW
    model = type(model)(model.config)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.constant_(parameter, -2.0)
        elif parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def apart(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, as a share of the norm. What is zero up to rounding is left out."""
    least = 1e-6 * max(tensor.norm() for tensor in first.values())
    return max(((first[n] - second[n]).norm() / first[n].norm()).item() for n in first if first[n].norm() > least)


def outcome(reason: str | None, difference: float) -> Row:
    if reason is not None:
        return {"outcome": "falls back", "detail": reason}
    return {"outcome": "equal" if difference < MOST else "differs", "detail": f"{difference:.1e}"}


class Gradients(TrainerCallback):
    """Keeps the gradients of the last window."""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def sft(model_type: str, folder: str) -> Row:
    rows = [
        {"input_ids": [i + FIRST_DATA_TOKEN for i in row["input_ids"]],
         "labels": [i if i < 0 else i + FIRST_DATA_TOKEN for i in row["labels"]]}
        for row in agent(ROWS)[:ROWS]
    ]  # fmt: skip
    found = []
    for trainer_class, config_class, more in (
        (Trainer, TrainingArguments, {}),
        (HybridTrainer, HybridConfig, {"share_rows": "on", "enable_predict": False}),
    ):
        config = config_class(
            folder, max_steps=1, per_device_train_batch_size=ROWS // MICRO_BATCHES, max_grad_norm=0.0, optim="sgd",
            gradient_accumulation_steps=MICRO_BATCHES, train_sampling_strategy="sequential", report_to="none",
            save_strategy="no", disable_tqdm=True, use_cpu=True, **more,
        )  # fmt: skip
        gradients = Gradients()
        trainer = trainer_class(
            build(model_type, with_router=True), config, train_dataset=rows, data_collator=pad, callbacks=[gradients]
        )
        trainer.train()
        found.append(gradients.found)
    return outcome(trainer.hybrid_summary()["plain_rows_because"], apart(*found))


def router_of(model: PreTrainedModel) -> dict[str, float]:
    """Return options that turn the router's loss off where TRL 1.16 cannot compute it."""
    config = model.config.get_text_config()
    return {} if hasattr(config, "num_experts") else {"router_aux_loss_coef": 0.0}


def dpo(model_type: str, folder: str) -> Row:
    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, VOCAB)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    generator = torch.Generator().manual_seed(0)

    def text(least: int, most: int) -> str:
        count = int(torch.randint(least, most, (), generator=generator))
        ids = torch.randint(FIRST_DATA_TOKEN, VOCAB, (count,), generator=generator)
        return "".join(f" w{number}" for number in ids.tolist())

    pairs = [{"prompt": text(8, 20)[1:], "chosen": text(3, 10), "rejected": text(3, 10)} for _ in range(4)]
    model, reference = build(model_type), build(model_type)
    config = HybridDPOConfig(
        folder, max_length=None, bf16=False, report_to="none", disable_tqdm=True, use_cpu=True, share_rows="on",
        enable_predict=False, **router_of(model),
    )  # fmt: skip
    for parameter in reference.parameters():
        parameter.data.mul_(0.9)
    trainer = HybridDPOTrainer(
        model, reference, config, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer
    )
    batch, found = trainer.data_collator(list(trainer.train_dataset)), []
    model.train()
    for off in (True, False):
        trainer.rows.off = off
        model.zero_grad()
        with trainer.rows.around(ends_window=True):
            trainer.compute_loss(model, dict(batch)).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return outcome(trainer.hybrid_summary()["plain_rows_because"], apart(*found))


def grpo(model_type: str, folder: str) -> Row:
    found = []
    for trainer_class in (GRPOTrainer, HybridGRPOTrainer):
        model = build(model_type)
        model.generation_config.eos_token_id = [1, *range(30, 45)]
        model.generation_config.pad_token_id = 0
        more = {"share_rows": "auto"} if trainer_class is HybridGRPOTrainer else {}
        more |= router_of(model)
        trainer = rollouts.build(trainer_class, folder, 0.5, model=model, max_steps=2, **more)
        trainer.train()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return outcome(trainer.hybrid_summary()["plain_rollouts_because"], apart(*found))


def check(model_type: str, name: str) -> Row:
    """Train a model in both ways, and return the row."""
    key, ways = {"model_type": model_type, "check": name}, {"sft": sft, "dpo": dpo, "rollouts": grpo}
    try:
        with tempfile.TemporaryDirectory() as folder:
            return {**key, **ways[name](model_type, folder)}
    except Exception as error:
        return {**key, "outcome": "fails", "detail": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}


def main() -> int:
    parser = command_line(__doc__, Path(__file__).resolve().parent)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="Check these model types only.")
    parser.add_argument("--check", nargs="+", choices=CHECKS, default=CHECKS, help="What is checked.")
    parser.add_argument("--timeout", type=float, default=180.0, help="Seconds for one check.")
    options = parser.parse_args()
    results, rows = Results(options.results, "families", ("model_type", "check")), []
    names = {model_type: name for name, model_type in FAMILIES.items()}
    with Worker(options.timeout) as worker:
        for model_type in options.only or FAMILIES.values():
            for name in options.check:
                key = {"model_type": model_type, "check": name}
                row = None if options.only else results.get(**key)
                if row is None:
                    row = worker.ask(check, model_type, name) or {**key, "outcome": "fails", "detail": "no answer"}
                    row = results.add({"family": names.get(model_type, model_type), **row, **provenance(1)})
                rows.append(row)
                print(f"{model_type:<20} {name:<9} {row['outcome']:<11} {row['detail']}", flush=True)
    return int(any(row["outcome"] in ("differs", "fails") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
