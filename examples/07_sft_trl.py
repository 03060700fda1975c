"""
Fine-tune on conversations with TRL, in phases (about a minute on two CPU cores).

    pip install "hf-hybrid[trl]"
    python examples/07_sft_trl.py
    python examples/07_sft_trl.py --packing True

Nothing is downloaded. The conversations are questions about Python's documentation, and the model is the small Llama
of 06_lora.py. With a model and a data set from the Hub:

    python examples/07_sft_trl.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name trl-lib/Capybara \\
        --learning_rate 2e-5 --num_train_epochs 1 --max_steps -1 --use_cpu False --bf16 True

To start from it, change two lines of your own script: `SFTTrainer` to `HybridSFTTrainer`, `SFTConfig` to
`HybridSFTConfig`. Chat templates, packing and completion-only loss are TRL's.
"""

from __future__ import annotations

import runpy
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics
from typing import Optional

from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, HfArgumentParser

from hf_hybrid import HybridSFTConfig, HybridSFTTrainer

lora = runpy.run_path(str(Path(__file__).with_name("06_lora.py")))

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + '\n' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)


@dataclass
class ScriptArguments:
    model_name_or_path: Optional[str] = field(
        default=None, metadata={"help": "Model on the Hub or in a folder. Default: a small Llama trained on the spot."}
    )
    base_steps: int = field(default=120, metadata={"help": "Training steps of the small Llama."})
    dataset_name: Optional[str] = field(
        default=None, metadata={"help": "Conversations on the Hub or in a folder. Default: made from Python's docs."}
    )
    lora_rank: int = field(default=0, metadata={"help": "Train LoRA adapters of this rank; 0: all weights."})


def conversations() -> Dataset:
    """Make conversations. Each asks about a topic of Python's documentation, and a paragraph of it is the answer."""
    rows = []
    for topic in sorted(topics.topics):
        for paragraph in topics.topics[topic].split("\n\n")[:12]:
            if len(paragraph) > 40:
                question = [{"role": "user", "content": f"Tell me about {topic}."}]
                rows.append({"prompt": question, "completion": [{"role": "assistant", "content": paragraph}]})
    return Dataset.from_list(rows)


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, HybridSFTConfig))
    parser.set_defaults(
        output_dir="out/sft", max_steps=80, max_length=128, learning_rate=1e-3, lr_scheduler_type="cosine",
        logging_steps=20, save_strategy="no", report_to="none", dataloader_pin_memory=False, use_cpu=True, bf16=False,
        activation_checkpointing="auto",
    )  # fmt: skip
    script, args = parser.parse_args_into_dataclasses()
    base = script.model_name_or_path or lora["make_base"](f"{args.output_dir}/base", script.base_steps, args.seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT_TEMPLATE
    data = load_dataset(script.dataset_name, split="train") if script.dataset_name else conversations()
    split = data.train_test_split(64, seed=args.seed)
    peft_config = None
    if script.lora_rank:
        from peft import LoraConfig

        peft_config = LoraConfig(r=script.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")

    trainer = HybridSFTTrainer(
        base,
        args,
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
    accuracy = f"{before['eval_mean_token_accuracy']:.3f} -> {after['eval_mean_token_accuracy']:.3f}"
    print(f"token accuracy      {accuracy}, of the answers' tokens")
    summary = trainer.hybrid_summary()
    if summary.get("tokens"):  # `share_rows=off` counts none
        tokens, padding, shared = (summary[name] for name in ("tokens", "tokens_padding", "tokens_shared"))
        print(f"tokens              {tokens:,}, {shared:,} of them not computed again, nor {padding:,} of padding")
    print(f"model               {args.output_dir}")


if __name__ == "__main__":
    main()
