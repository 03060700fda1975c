"""
Does it pay to orthogonalise every expert? Tiny mixtures of experts from scratch, rates swept to interior optima.

    python -m benchmarks.speedup.experts                    # about half an hour on one core; goes on where it stopped
    python docs/generate_tables.py --print experts

The models are a Mixtral and a Qwen3-MoE of 0.2M weights, 8 experts of which each token has 2, in two layers. They
learn bytes of Python's language reference, 80 steps of 8 rows of 32 bytes (`--steps`), with the router's loss. Arms:

- `adamw`: plain `Trainer`.
- `fast`: `preset="fast"`, Muon for hidden matrices and for each expert.
- `fast-whole`: the same with the experts left to AdamW.
- `leaps`: AdamW with leaps along `orthogonal`, each expert orthogonalised.
- `leaps-whole`: the same with the experts along the average of the gradients.

Each arm's learning rate is searched on seed 0 in factors of two until the best one is interior. Then all seeds are run
at it. Arms see the same rows in the same order and begin with the same weights.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

from benchmarks.results import Results, command_line, provenance
from benchmarks.texts import language_reference
from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.leaps.directions import Orthogonal
from hf_hybrid.optimizers import MuonAdamW, muon_groups, split_parameters

ARMS = ("adamw", "fast", "fast-whole", "leaps", "leaps-whole")
MODELS = ("mixtral", "qwen3_moe")
LENGTH, EXPERTS, FIRST_RATE, MOST_RATES = 32, 8, 6e-3, 7
KEY = ("model", "arm", "steps", "rate", "seed")


class WholeStacks(Orthogonal):
    """Experts go along the average of the gradients, as everything that is not a matrix."""

    def __init__(self, context):
        super().__init__(context)
        self._matrices = {index for index in self._matrices if context.parameters[index].ndim == 2}


def data() -> tuple[TensorDataset, TensorDataset]:
    text = "".join(language_reference()).encode()
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // LENGTH * LENGTH].view(-1, LENGTH).long()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return TensorDataset(rows[order[256:]]), TensorDataset(rows[order[:256]])


def collate(rows) -> dict[str, torch.Tensor]:
    ids = torch.stack([row for (row,) in rows])
    return {"input_ids": ids, "labels": ids}


def build(kind: str, seed: int):
    set_seed(seed)
    count = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}[kind]
    config = AutoConfig.for_model(
        kind, vocab_size=256, hidden_size=48, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=12, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.01, tie_word_embeddings=False, max_position_embeddings=128, pad_token_id=None,
        bos_token_id=None, eos_token_id=None, **{count: EXPERTS},
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def whole_stacks(model, config: HybridConfig) -> MuonAdamW:
    """The optimizer of `preset="fast"` with the experts among AdamW's parameters."""
    matrices, _ = split_parameters(model)
    stacks = {name for name, parameter in matrices.items() if parameter.ndim == 3}
    decay = [name for name, parameter in model.named_parameters() if parameter.ndim > 1]
    common = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    groups = muon_groups(model, decay, **common)
    moved = [model.get_parameter(name) for name in stacks]
    ids = {id(parameter) for parameter in moved}
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in ids]
    groups[0]["params"] += moved  # with decay
    groups = [group for group in groups if group["params"]]
    betas = (config.adam_beta1, config.adam_beta2)
    momentum = config.preset_value("muon_momentum")
    return MuonAdamW(groups, **common, betas=betas, eps=config.adam_epsilon, momentum=momentum)


def train(kind: str, arm: str, steps: int, rate: float, seed: int) -> dict:
    learned, held_out = data()
    model, begun = build(kind, seed), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "output_dir": folder, "max_steps": steps, "learning_rate": rate, "seed": seed, "warmup_steps": 0.05,
            "per_device_train_batch_size": 8, "per_device_eval_batch_size": 64, "adam_beta2": 0.95, "weight_decay": 0.1,
            "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_strategy": "no",
            "dataloader_pin_memory": False, "use_cpu": True,
        }  # fmt: skip
        given = {"train_dataset": learned, "eval_dataset": held_out, "data_collator": collate}
        if arm == "adamw":
            trainer = Trainer(model, TrainingArguments(**options), **given)
        elif arm.startswith("leaps"):
            direction = Orthogonal if arm == "leaps" else WholeStacks
            trainer = HybridTrainer(model, HybridConfig(**options), direction=direction, **given)
        else:
            config = HybridConfig(**options, preset="fast")
            optimizers = (whole_stacks(model, config), None) if arm == "fast-whole" else (None, None)
            trainer = HybridTrainer(model, config, optimizers=optimizers, **given)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    found = {"eval_loss": loss, "seconds": time.process_time() - begun}
    if arm.startswith("leaps"):
        summary = trainer.hybrid_summary()
        found |= {name: summary[name] for name in ("backward_passes_avoided", "leap_cost_steps", "leaps_by_verdict")}
    return found


def search(results: Results, kind: str, arm: str, steps: int) -> float:
    """Return the best rate on seed 0, which has a worse one on either side."""

    def loss(rate: float) -> float:
        key = {"model": kind, "arm": arm, "steps": steps, "rate": rate, "seed": 0}
        row = results.get(**key) or results.add({**provenance(1), **key, **train(kind, arm, steps, rate, 0)})
        return math.inf if row["eval_loss"] is None else row["eval_loss"]

    rates = [FIRST_RATE / 2, FIRST_RATE, FIRST_RATE * 2]
    while len(rates) < MOST_RATES:
        best = min(rates, key=loss)
        if best == rates[0]:
            rates.insert(0, best / 2)
        elif best == rates[-1]:
            rates.append(best * 2)
        else:
            return best
    raise SystemExit(f"{kind}, {arm}: no interior optimum between {rates[0]:g} and {rates[-1]:g}")


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="What is trained.")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="How.")
    parser.add_argument("--steps", type=int, default=80, help="Steps of a run.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="Seeds at the best rate.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "experts", KEY)
    for kind, arm in itertools.product(args.models, args.arms):
        rate = search(results, kind, arm, args.steps)
        for seed in args.seeds:
            key = {"model": kind, "arm": arm, "steps": args.steps, "rate": rate, "seed": seed}
            if results.get(**key) is None:
                results.add({**provenance(1), **key, **train(kind, arm, args.steps, rate, seed)})
        print(f"{kind} {arm}: best rate {rate:g}", flush=True)


if __name__ == "__main__":
    main()
