"""
CPU seconds of steps with a model that is evaluated beside the trained one: resident, and with all layers streamed.

    python -m benchmarks.memory.references             # DPO and distillation, one thread, fifteen minutes
    python -m benchmarks.memory.references --report

Llamas with random weights, fp32 and TRL's default options (layers are recomputed in both arms). DPO: two micro-batches
of two pairs, a reference of the policy's size, and adapters with their base as reference; both also with rows that
share prompts of half their tokens, in both arms. Distillation (GKD on the
data's own answers): a teacher with twice as many layers. Arms take turns, and the seconds are `process_time` of each
step from the third on; in the first ones the optimizer makes its states and the walks of a window are compared.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl.experimental.gkd import GKDConfig, GKDTrainer

from benchmarks.results import Results, command_line, provenance
from hf_hybrid import HybridDPOConfig, HybridDPOTrainer, hybrid_config
from hf_hybrid.trainer import HybridTrainerMixin

KINDS = ("dpo", "dpo lora", "dpo shared", "dpo lora shared", "distillation")
ARMS = ("resident", "streamed")
WARM = 2
"""Steps that are not counted."""


class HybridGKDTrainer(HybridTrainerMixin, GKDTrainer):
    """Distillation with the options of the package."""


class Seconds(TrainerCallback):
    """Seconds of the processor in each step."""

    def __init__(self):
        self.values: list[float] = []
        self._begun = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self._begun = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        self.values.append(time.process_time() - self._begun)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    words = {text: number for number, text in enumerate(["<pad>", "<eos>", *map(chr, range(32, 127))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    found = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
    found.chat_template = "{% for m in messages %}{{ m['role'][0] + m['content'] }}{% endfor %}"
    return found


def llama(layers: int, width: int, seed: int = 0) -> LlamaForCausalLM:
    """A model with random weights."""
    torch.manual_seed(seed)
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(vocab_size=2048, **shape, **heads, pad_token_id=0, eos_token_id=1))


def measure(kind: str, arm: str, args: Any, folder: str) -> dict[str, Any]:
    """Train in one arm, and return the seconds of each step."""
    seconds, half = Seconds(), args.tokens // 2
    text = "".join(chr(97 + (7 * n) % 26) for n in range(half))
    values: dict[str, Any] = {
        "max_steps": WARM + args.steps, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "use_cpu": True, "bf16": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "logging_steps": 1, "max_length": None, "enable_predict": False,
        "share_rows": "on" if "shared" in kind else "off",
        "memory": {"resident": "off", "streamed": "stream"}[arm], "dataloader_pin_memory": False,
    }  # fmt: skip
    common = {"processing_class": tokenizer(), "callbacks": [seconds]}
    student = llama(args.layers, args.width)
    if kind == "distillation":
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]
        config = hybrid_config(GKDConfig)(folder, lmbda=0.0, **values)
        rows = Dataset.from_list([{"messages": turns}] * 64)
        teacher = llama(2 * args.layers, args.width, seed=1)
        trainer: Any = HybridGKDTrainer(student, teacher, args=config, train_dataset=rows, **common)
    else:
        pairs = []
        for n in range(64):
            prompt = text[n % 26 :] + text[: n % 26]
            rejected = prompt[half // 2 :] + prompt[: half // 2]
            pairs.append({"prompt": prompt, "chosen": prompt[::-1], "rejected": rejected})
        lora = LoraConfig(r=8, target_modules="all-linear") if "lora" in kind else None
        reference = None if lora else llama(args.layers, args.width, seed=1)
        trainer = HybridDPOTrainer(
            student, reference, HybridDPOConfig(folder, **values), train_dataset=Dataset.from_list(pairs),
            peft_config=lora, **common,
        )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"seconds": seconds.values[WARM:], "loss": losses[-1]}


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "references", ("kind", "layers", "width", "tokens"))
    for kind in () if args.report else args.kinds:
        found: dict[str, list] = {arm: [] for arm in ARMS}
        losses: dict[str, float] = {}
        for _ in range(args.turns):
            for arm in ARMS:
                with tempfile.TemporaryDirectory() as folder:
                    row = measure(kind, arm, args, folder)
                found[arm] += row["seconds"]
                losses[arm] = row["loss"]
        ratio = statistics.median(found["streamed"]) / statistics.median(found["resident"])
        shape = {"kind": kind, "layers": args.layers, "width": args.width, "tokens": args.tokens}
        results.add({**shape, "seconds": found, "losses": losses, "ratio": ratio, **provenance(threads=1)})
    for row in results.rows():
        print(f"{row['kind']}: streamed {row['ratio']:.3f} times the CPU seconds, losses {row['losses']}")


if __name__ == "__main__":
    main()
