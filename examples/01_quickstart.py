"""
Fine-tune on chats with LoRA, beside TRL's trainer with the same settings (two minutes on two CPU cores).

    pip install -c constraints.txt ".[all]"
    python examples/01_quickstart.py
    python examples/01_quickstart.py --lora_rank 0 --learning_rate 1e-3    # all weights

Nothing is downloaded. The chats are questions about Python's documentation below one system prompt, and the model is
the small Llama of 06_lora.py, trained on the spot. With a model and a data set from the Hub:

    python examples/01_quickstart.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name trl-lib/Capybara \\
        --learning_rate 2e-4 --num_train_epochs 1 --max_steps -1 --use_cpu False --bf16 True --compare False

To start from it, change two lines of your own script: `SFTTrainer` to `HybridSFTTrainer`, `SFTConfig` to
`HybridSFTConfig`. Chat templates, packing and completion-only loss are TRL's.
"""

from __future__ import annotations

import runpy
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics
from typing import Optional

from hf_hybrid.cli.console import quiet_imports

with quiet_imports():
    from datasets import Dataset, load_dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, HfArgumentParser
    from trl import SFTConfig, SFTTrainer

    from hf_hybrid import HybridSFTConfig, HybridSFTTrainer

lora = runpy.run_path(str(Path(__file__).with_name("06_lora.py")))

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + '\n' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)
SYSTEM = (
    "You explain the Python language. Answer from the language reference, in a few sentences and in plain words. Name "
    "the statement, the operator or the method that the question is about, and say what it does, what it returns and "
    "which exception it raises. If the question is not about Python, say so."
)
SETTINGS = (
    "max_steps", "num_train_epochs", "max_length", "packing", "learning_rate", "lr_scheduler_type", "warmup_steps",
    "per_device_train_batch_size", "gradient_accumulation_steps", "optim", "seed", "bf16", "use_cpu", "logging_steps",
    "disable_tqdm", "dataloader_pin_memory", "activation_checkpointing",
)  # fmt: skip
"""What both trainers are given."""


@dataclass
class ScriptArguments:
    model_name_or_path: Optional[str] = field(
        default=None, metadata={"help": "Model on the Hub or in a folder. Default: a small Llama trained on the spot."}
    )
    base_steps: int = field(default=300, metadata={"help": "Training steps of the small Llama."})
    dataset_name: Optional[str] = field(
        default=None, metadata={"help": "Conversations on the Hub or in a folder. Default: made from Python's docs."}
    )
    lora_rank: int = field(default=8, metadata={"help": "Train LoRA adapters of this rank; 0: all weights."})
    compare: bool = field(default=True, metadata={"help": "Also train with TRL's `SFTTrainer`."})


def conversations() -> Dataset:
    """Make conversations. Each asks about a topic of Python's documentation, and a paragraph of it is the answer."""
    rows = []
    for topic in sorted(topics.topics):
        for paragraph in map(str.strip, topics.topics[topic].split("\n\n")[:12]):
            if len(paragraph) > 40:
                question = {"role": "user", "content": f"Tell me about {topic}."}
                prompt = [{"role": "system", "content": SYSTEM}, question]
                rows.append({"prompt": prompt, "completion": [{"role": "assistant", "content": paragraph}]})
    return Dataset.from_list(rows)


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, HybridSFTConfig))
    parser.set_defaults(
        output_dir="out/quickstart", max_steps=60, max_length=512, learning_rate=1e-2, lr_scheduler_type="cosine",
        logging_steps=20, save_strategy="no", report_to="none", dataloader_pin_memory=False, use_cpu=True, bf16=False,
        activation_checkpointing=False,
    )  # fmt: skip
    script, args = parser.parse_args_into_dataclasses()
    base = script.model_name_or_path or lora["make_base"](f"{args.output_dir}/base", script.base_steps, args.seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT_TEMPLATE
    data = load_dataset(script.dataset_name, split="train") if script.dataset_name else conversations()
    split = data.train_test_split(64, seed=args.seed)

    def trainer_of(kind, config):
        """The trainer of either package, with new adapters."""
        adapters = LoraConfig(r=script.lora_rank, lora_alpha=2 * script.lora_rank, target_modules="all-linear")
        return kind(
            base,
            config,
            train_dataset=split["train"],
            eval_dataset=split["test"],
            processing_class=tokenizer,
            peft_config=adapters if script.lora_rank else None,
        )

    print("HybridSFTTrainer trains on chats.", flush=True)
    trainer = trainer_of(HybridSFTTrainer, args)
    losses = {"before": trainer.evaluate()["eval_loss"]}
    seconds = {"HybridSFTTrainer": trainer.train().metrics["train_runtime"]}
    losses["HybridSFTTrainer"] = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if script.compare:
        print("TRL's SFTTrainer trains on the same chats.", flush=True)
        same = {name: getattr(args, name) for name in SETTINGS}
        plain = trainer_of(
            SFTTrainer, SFTConfig(f"{args.output_dir}-trl", save_strategy="no", report_to="none", **same)
        )
        seconds["SFTTrainer"] = plain.train().metrics["train_runtime"]
        losses["SFTTrainer"] = plain.evaluate()["eval_loss"]

    summary = trainer.hybrid_summary()
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    print(f"\ntrained parameters  {trained:,} of {trainer.model.num_parameters():,}")
    if summary.get("tokens"):  # `share_rows=off` counts none
        tokens, padding, shared = (summary[name] for name in ("tokens", "tokens_padding", "tokens_shared"))
        print(f"tokens              {tokens:,}, {shared:,} of them not computed again, nor {padding:,} of padding")
    print("evaluation loss     " + "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))
    print("seconds of training " + "  ".join(f"{name} {value:.0f}" for name, value in seconds.items()))
    print(f"adapters            {args.output_dir}" if script.lora_rank else f"model               {args.output_dir}")


if __name__ == "__main__":
    main()
