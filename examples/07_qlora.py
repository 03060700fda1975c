"""
Fine-tune adapters over a base in 4 bits (QLoRA) in HybridTrainer; about a minute on two CPU cores.

    python examples/07_qlora.py

Nothing is downloaded: the base is the small Llama of 06_lora.py, quantised to nf4 by bitsandbytes, which works on CPUs
too. With a model from the Hub, on a GPU:

    python examples/07_qlora.py --model_name_or_path Qwen/Qwen2.5-7B --text_file my.txt --block_size 1024 --bf16 True \\
        --learning_rate 2e-4 --optim paged_adamw_8bit --gradient_accumulation_steps 8 --max_steps -1

Create the trainer before anything is evaluated or generated with the model: on some CPUs bitsandbytes packs 4-bit
weights at the first evaluation in a way that cannot be trained, and HybridTrainer keeps it from that.
"""

from __future__ import annotations

import runpy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Optional

import torch
from peft import prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, HfArgumentParser, set_seed

from hf_hybrid import HybridConfig, HybridTrainer

lora = runpy.run_path(str(Path(__file__).with_name("06_lora.py")))


@dataclass
class ScriptArguments:
    model_name_or_path: Optional[str] = field(
        default=None, metadata={"help": "Model on the Hub or in a folder. Default: a small Llama trained on the spot."}
    )
    base_steps: int = field(default=120, metadata={"help": "Steps that the small Llama is trained for."})
    text_file: Optional[str] = field(default=None, metadata={"help": "Text to adapt to. Default: Python's docs."})
    block_size: int = field(default=128, metadata={"help": "Tokens per training sequence."})
    method: Literal["lora", "dora"] = field(default="lora", metadata={"help": "Kind of adapter."})
    rank: int = field(default=8, metadata={"help": "Rank of the adapters."})


def load_in_4_bits(folder: str, args: HybridConfig):
    """The base in nf4 with quantised scales, ready for adapters: norms in fp32, activation checkpointing."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if args.bf16 else torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, device_map={"": args.device})
    return prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, HybridConfig))
    parser.set_defaults(
        output_dir="out/qlora", max_steps=60, learning_rate=8e-3, lr_scheduler_type="cosine", logging_steps=20,
        save_strategy="no", report_to="none", dataloader_pin_memory=False,
    )  # fmt: skip
    script, args = parser.parse_args_into_dataclasses()
    base = script.model_name_or_path or lora["make_base"](f"{args.output_dir}/base", script.base_steps, args.seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    quantised = load_in_4_bits(base, args)
    size = quantised.get_memory_footprint()
    set_seed(args.seed)
    model = lora["make_adapters"](quantised, script)
    train_set, evaluation = lora["load_blocks"](script, tokenizer, args.seed)

    trainer = HybridTrainer(model, args, train_dataset=train_set, eval_dataset=evaluation, processing_class=tokenizer)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()  # the adapters alone
    print(lora["report"](trainer, before, after))
    print(f"base in 4 bits      {size / 2**20:.1f} MiB (embeddings and norms are not quantised)")
    print(f"adapters            {args.output_dir}")


if __name__ == "__main__":
    main()
