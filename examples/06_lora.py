"""
Fine-tune a model with LoRA adapters in HybridTrainer (about a minute on two CPU cores).

    python examples/06_lora.py
    python examples/06_lora.py --method dora --optim muon --merge True
    python examples/06_lora.py --four_bits True        # QLoRA; needs bitsandbytes

Nothing is downloaded. A small Llama is trained briefly on the source of Python's standard library, and then adapted to
Python's documentation. With a model from the Hub and your own text:

    python examples/06_lora.py --model_name_or_path Qwen/Qwen2.5-0.5B --text_file my.txt --block_size 512 --bf16 True \\
        --learning_rate 2e-4 --num_train_epochs 1 --max_steps -1

With adapters no leaps are made by default, because they did not pay (docs/peft_and_trl.md). `--direction orthogonal`
makes them: then the weights of the adapters leap, and the base stays.

With `--four_bits True` bitsandbytes quantises the base to nf4, on CPUs too. Create the trainer before you evaluate or
generate with such a model. On some CPUs bitsandbytes packs 4-bit weights at the first evaluation, and packed weights
cannot be trained. HybridTrainer prevents this.
"""

from __future__ import annotations

import runpy
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics
from typing import Literal, Optional

from hf_hybrid.cli.console import quiet_imports

with quiet_imports():
    import torch
    from datasets import Dataset
    from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        BitsAndBytesConfig,
        HfArgumentParser,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    from hf_hybrid import HybridConfig, HybridTrainer

from_scratch = runpy.run_path(str(Path(__file__).with_name("07_from_scratch.py")))


@dataclass
class ScriptArguments:
    model_name_or_path: Optional[str] = field(
        default=None, metadata={"help": "Model on the Hub or in a folder. Default: a small Llama trained on the spot."}
    )
    base_steps: int = field(default=120, metadata={"help": "Training steps of the small Llama."})
    text_file: Optional[str] = field(default=None, metadata={"help": "Text to adapt to. Default: Python's docs."})
    block_size: int = field(default=128, metadata={"help": "Tokens per training sequence."})
    method: Literal["lora", "dora", "ia3", "prompt"] = field(default="lora", metadata={"help": "Kind of adapter."})
    rank: int = field(default=8, metadata={"help": "Rank of LoRA and DoRA."})
    four_bits: bool = field(default=False, metadata={"help": "QLoRA: load the base in 4 bits (bitsandbytes)."})
    merge: bool = field(default=False, metadata={"help": "Also save the model with merged adapters."})


def make_base(folder: str, steps: int, seed: int = 0) -> str:
    """Train a small Llama briefly on source code, and return the folder with the model and its tokenizer."""
    texts = from_scratch["python_source"]()[:150]
    tokenizer = from_scratch["train_tokenizer"]([*texts, *topics.topics.values()])
    data = from_scratch["blocks"](Dataset.from_dict({"text": texts}), tokenizer, 128)
    set_seed(seed)
    args = TrainingArguments(
        folder, max_steps=steps, learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=min(20, steps // 5),
        save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    print(f"Trainer trains a small Llama on source code, {steps} steps: the base of what follows.", flush=True)
    trainer = Trainer(from_scratch["small_llama"](tokenizer), args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    return folder


def load_base(folder: str, four_bits: bool, args: HybridConfig):
    """Load the base unquantised, or in nf4 with quantised scales, norms in fp32 and activation checkpointing."""
    if not four_bits:
        return AutoModelForCausalLM.from_pretrained(folder)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if args.bf16 else torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, device_map={"": args.device})
    return prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})


def make_adapters(model, script: ScriptArguments):
    """Add adapters of the chosen kind, and freeze all other weights."""
    if script.method == "ia3":
        config = IA3Config(task_type="CAUSAL_LM")
    elif script.method == "prompt":
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=16)
    else:
        config = LoraConfig(
            r=script.rank, lora_alpha=2 * script.rank, target_modules="all-linear", use_dora=script.method == "dora",
            task_type="CAUSAL_LM",
        )  # fmt: skip
    return get_peft_model(model, config)


def load_blocks(script: ScriptArguments, tokenizer, seed: int):
    """Load training and evaluation sequences."""
    texts = [Path(script.text_file).read_text()] if script.text_file else list(topics.topics.values())
    data = from_scratch["blocks"](Dataset.from_dict({"text": texts}), tokenizer, script.block_size)
    split = data.train_test_split(0.1, seed=seed)
    return split["train"], split["test"].select(range(min(len(split["test"]), 128)))


def report(trainer, before: float, after: float) -> str:
    """Format the run in a few lines."""
    summary = trainer.hybrid_summary()
    phases = "  ".join(f"{name} {count}" for name, count in summary["steps_by_phase"].items())
    verdicts = "  ".join(f"{name} {count}" for name, count in sorted(summary["leaps_by_verdict"].items())) or "none"
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    return (
        f"\ntrained parameters  {trained:,} of {trainer.model.num_parameters():,}"
        f"\nsteps by phase      {phases}"
        f"\nbackward passes     {summary['backward_passes']} done, {summary['backward_passes_avoided']} avoided"
        f"\nleaps               {verdicts}"
        f"\nevaluation loss     {before:.4f} -> {after:.4f}"
    )


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, HybridConfig))
    parser.set_defaults(
        output_dir="out/lora", max_steps=100, learning_rate=8e-3, lr_scheduler_type="cosine", logging_steps=20,
        save_strategy="no", report_to="none", dataloader_pin_memory=False,
    )  # fmt: skip
    script, args = parser.parse_args_into_dataclasses()
    base = script.model_name_or_path or make_base(f"{args.output_dir}/base", script.base_steps, args.seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    loaded = load_base(base, script.four_bits, args)
    size = loaded.get_memory_footprint()
    set_seed(args.seed)
    model = make_adapters(loaded, script)
    train_set, evaluation = load_blocks(script, tokenizer, args.seed)

    trainer = HybridTrainer(model, args, train_dataset=train_set, eval_dataset=evaluation, processing_class=tokenizer)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()  # the adapters alone
    print(report(trainer, before, after))
    if script.four_bits:
        print(f"base in 4 bits      {size / 2**20:.1f} MiB (embeddings and norms are not quantised)")
    print(f"adapters            {args.output_dir}")
    if script.merge and script.method != "prompt":
        trainer.model.merge_and_unload().save_pretrained(f"{args.output_dir}/merged")
        print(f"merged model        {args.output_dir}/merged")


if __name__ == "__main__":
    main()
