"""
Train on preferences (DPO) with TRL, in phases (about a minute on two CPU cores).

    pip install "hf-hybrid[trl]"
    python examples/08_dpo_trl.py
    python examples/08_dpo_trl.py --loss_type ipo --lora_rank 8

Nothing is downloaded. The prompt is the beginning of a passage of Python's documentation. The preferred completion is
the rest of it, and the rejected one has its words in another order. The prompt is computed once for both. The model is
the small Llama of 06_lora.py. With a model and a data set from the Hub:

    python examples/08_dpo_trl.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
        --dataset_name trl-lib/ultrafeedback_binarized --learning_rate 5e-7 --num_train_epochs 1 --max_steps -1 \\
        --use_cpu False --bf16 True

To start from it, change two lines of your own script: `DPOTrainer` to `HybridDPOTrainer`, `DPOConfig` to
`HybridDPOConfig`. Leaps are tested on the preference loss of the pairs that come next.
"""

from __future__ import annotations

import random
import runpy
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics
from typing import Optional

from hf_hybrid.cli.console import quiet_imports

with quiet_imports():
    from datasets import Dataset, load_dataset
    from transformers import AutoTokenizer, HfArgumentParser

    from hf_hybrid import HybridDPOConfig, HybridDPOTrainer

lora = runpy.run_path(str(Path(__file__).with_name("06_lora.py")))


@dataclass
class ScriptArguments:
    model_name_or_path: Optional[str] = field(
        default=None, metadata={"help": "Model on the Hub or in a folder. Default: a small Llama trained on the spot."}
    )
    base_steps: int = field(default=120, metadata={"help": "Training steps of the small Llama."})
    dataset_name: Optional[str] = field(
        default=None, metadata={"help": "Preferences on the Hub or in a folder. Default: made from Python's docs."}
    )
    lora_rank: int = field(default=0, metadata={"help": "Train LoRA adapters of this rank; 0: all weights."})


def preferences(seed: int = 0) -> Dataset:
    """Make preferences. How passages of Python's documentation go on is preferred to the same words in random order."""
    shuffle, rows = random.Random(seed).shuffle, []
    for topic in sorted(topics.topics):
        for paragraph in topics.topics[topic].split("\n\n")[:12]:
            words = paragraph.split()[:40]
            if len(words) > 12:
                half = len(words) // 2
                prompt, chosen = " ".join([f"{topic}\n\n", *words[:half]]), words[half:]
                mixed = list(chosen)
                shuffle(mixed)
                rows.append({"prompt": prompt, "chosen": " " + " ".join(chosen), "rejected": " " + " ".join(mixed)})
    return Dataset.from_list(rows)


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, HybridDPOConfig))
    parser.set_defaults(
        output_dir="out/dpo", max_steps=40, max_length=128, learning_rate=2e-4, lr_scheduler_type="cosine",
        logging_steps=10, save_strategy="no", report_to="none", dataloader_pin_memory=False, use_cpu=True, bf16=False,
        activation_checkpointing=False,
    )  # fmt: skip
    script, args = parser.parse_args_into_dataclasses()
    base = script.model_name_or_path or lora["make_base"](f"{args.output_dir}/base", script.base_steps, args.seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    data = load_dataset(script.dataset_name, split="train") if script.dataset_name else preferences(args.seed)
    split = data.train_test_split(64, seed=args.seed)
    peft_config = None
    if script.lora_rank:
        from peft import LoraConfig

        peft_config = LoraConfig(r=script.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")

    trainer = HybridDPOTrainer(
        base,
        args=args,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model()
    print(lora["report"](trainer, before["eval_loss"], after["eval_loss"]))
    accuracy, margin = after["eval_rewards/accuracies"], after["eval_rewards/margins"]
    print(
        f"held-out pairs      {accuracy:.0%} in the preferred order (50% is chance), margin of the rewards {margin:.3f}"
    )
    summary = trainer.hybrid_summary()
    if summary.get("tokens"):  # `share_rows=off` counts none
        print(f"tokens              {summary['tokens']:,}, {summary['tokens_shared']:,} of them not computed again")
    print(f"model               {args.output_dir}")


if __name__ == "__main__":
    main()
