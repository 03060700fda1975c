"""
Train a small Llama from scratch with HybridTrainer, and compare with plain Trainer (two minutes on two CPU cores).

    python examples/07_from_scratch.py
    python examples/07_from_scratch.py --direction gradient_memory --max_steps 600

On two CPU processes (`accelerate launch --cpu` would ignore `--num_processes` and start only one):

    accelerate launch --config_file examples/accelerate_configs/ddp_cpu.yaml examples/07_from_scratch.py --use_cpu

Nothing is downloaded. The text is the source of Python's standard library, and the tokenizer is trained on it first.
The same script fine-tunes a real model on your text. Every option of HybridConfig and TrainingArguments is a flag:

    python examples/07_from_scratch.py --model_name_or_path Qwen/Qwen2.5-0.5B --text_file my.txt --block_size 512 \\
        --learning_rate 2e-5 --num_train_epochs 1 --max_steps -1 --compare_with_trainer False
    python examples/07_from_scratch.py --model_name_or_path openai-community/gpt2 --dataset_name Salesforce/wikitext \\
        --dataset_config wikitext-2-raw-v1 --text_column text --compare_with_trainer False

To start from it, change two lines of your own script: `Trainer` to `HybridTrainer`, `TrainingArguments` to
`HybridConfig`.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from hf_hybrid.cli.console import quiet_imports

with quiet_imports():
    from datasets import Dataset, load_dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        HfArgumentParser,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    from hf_hybrid import HybridConfig, HybridTrainer


@dataclass
class ScriptArguments:
    model_name_or_path: Optional[str] = field(
        default=None, metadata={"help": "Model on the Hub or in a folder. Default: a small Llama built from config."}
    )
    dataset_name: Optional[str] = field(default=None, metadata={"help": "Data set on the Hub or in a folder."})
    dataset_config: Optional[str] = field(default=None, metadata={"help": "Its configuration."})
    text_column: str = field(default="text", metadata={"help": "Column of the data set that holds the text."})
    text_file: Optional[str] = field(default=None, metadata={"help": "A text file to train on."})
    block_size: int = field(default=128, metadata={"help": "Tokens per training sequence."})
    eval_share: float = field(default=0.05, metadata={"help": "Share of the text used for evaluation."})
    compare_with_trainer: bool = field(
        default=True, metadata={"help": "Also run plain Trainer for as many backward passes."}
    )


def python_source() -> list[str]:
    """Read the source files of the standard library, which every Python installation has."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
    files = sorted(path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts))
    return [path.read_text(encoding="utf-8", errors="ignore") for path in files]


def train_tokenizer(texts: list[str], vocab_size: int = 2048) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which takes seconds."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def small_llama(tokenizer) -> LlamaForCausalLM:
    """Build a Llama of a million parameters with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def blocks(texts: Dataset, tokenizer, block_size: int, text_column: str = "text") -> Dataset:
    """Tokenise, join with end-of-text tokens, and cut into sequences of `block_size`."""

    def cut(batch):
        ids = [token for ids in tokenizer(batch[text_column])["input_ids"] for token in [*ids, tokenizer.eos_token_id]]
        rows = [ids[start : start + block_size] for start in range(0, len(ids) - block_size + 1, block_size)]
        return {"input_ids": rows, "labels": [list(row) for row in rows]}

    return texts.map(cut, batched=True, remove_columns=texts.column_names, desc="Tokenising")


def load_texts(script: ScriptArguments) -> Dataset:
    if script.dataset_name:
        return load_dataset(script.dataset_name, script.dataset_config, split="train")
    if script.text_file:
        return load_dataset("text", data_files=script.text_file, split="train", sample_by="paragraph")
    return Dataset.from_dict({"text": python_source()})


def report(summary: dict, losses: dict[str, float], seconds: dict[str, float]) -> str:
    """Format the run as a short table."""
    phases = summary["steps_by_phase"]
    lines = [
        "",
        "steps by phase      " + "  ".join(f"{name} {count}" for name, count in phases.items()),
        f"backward passes     {summary['backward_passes']} done, {summary['backward_passes_avoided']} avoided",
        f"forward-only passes {summary['forward_only_passes']} (probes, worth {summary['probe_cost_steps']:.1f} steps)",
        f"learning rate       scaled by {summary['learning_rate_scale']:.3g} at the end",
        "leaps               " + "  ".join(f"{v} {n}" for v, n in sorted(summary["leaps_by_verdict"].items())),
    ]
    codes = {"unprobed": ".", "kept": "k", "shrunk": "s", "rejected": "R", "rolled_back": "B"}
    order = "".join(codes[leap["verdict"]] for leap in summary["leaps"])
    for start in range(0, len(order), 80):
        lines.append(f"{'' if start else 'the last, in order':19s} {order[start : start + 80]}")
    probed = [leap for leap in summary["leaps"] if leap["loss_before"] is not None]
    if probed:
        lines += ["", "probed leaps: step  gain    loss              standard error  verdict"]
        lines += [
            f"{leap['step']:18d}  {leap['gain']:<6.3g}  {leap['loss_before']:.4f} -> {leap['loss_after']:.4f}  "
            f"{leap['standard_error']:14.4f}  {leap['verdict']}"
            for leap in probed
        ]
    lines += ["", "evaluation loss     " + "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items())]
    lines += ["seconds             " + "  ".join(f"{name} {value:.0f}" for name, value in seconds.items())]
    return "\n".join(lines)


def plain_trainer(model, args: HybridConfig, steps: int, **data) -> Trainer:
    """Make a plain Trainer with the same settings, and its own schedule over `steps` steps."""
    names = (
        "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "learning_rate",
        "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "optim",
        "seed", "bf16", "use_cpu", "logging_steps", "disable_tqdm", "dataloader_pin_memory",
    )  # fmt: skip
    values = {name: getattr(args, name) for name in names}
    plain = TrainingArguments(f"{args.output_dir}-trainer", max_steps=steps, save_strategy="no", **values)
    return Trainer(model, plain, **data)


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, HybridConfig))
    parser.set_defaults(
        output_dir="out/scratch",
        max_steps=300,
        logging_steps=25,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        learning_rate=2e-3,  # of 1e-3, 1.5e-3, 2e-3, 3e-3 and 6e-3 the best for plain Trainer
        auto_lr="off",
        lr_scheduler_type="cosine",
        warmup_steps=15,
    )
    script, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)

    with args.main_process_first(desc="loading the text"):
        texts = load_texts(script)
    if script.model_name_or_path:
        tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)

        def build():
            return AutoModelForCausalLM.from_pretrained(script.model_name_or_path)
    else:
        tokenizer = train_tokenizer(texts[script.text_column])

        def build():
            set_seed(args.seed)
            return small_llama(tokenizer)

    with args.main_process_first(desc="tokenising"):  # the other processes read its cache
        sequences = blocks(texts, tokenizer, script.block_size, script.text_column)
    split = sequences.train_test_split(script.eval_share, seed=args.seed)
    evaluation = split["test"].select(range(min(len(split["test"]), 256)))

    trainer = HybridTrainer(
        build(), args, train_dataset=split["train"], eval_dataset=evaluation, processing_class=tokenizer
    )
    losses = {"start": trainer.evaluate()["eval_loss"]}
    result = trainer.train()
    losses["HybridTrainer"] = trainer.evaluate()["eval_loss"]
    seconds = {"HybridTrainer": result.metrics["train_runtime"]}
    trainer.save_model()

    summary = trainer.hybrid_summary()
    if script.compare_with_trainer:
        plain = plain_trainer(
            build(), args, summary["real_steps"], train_dataset=split["train"], eval_dataset=evaluation
        )
        seconds["Trainer"] = plain.train().metrics["train_runtime"]
        losses["Trainer"] = plain.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(report(summary, losses, seconds))
        if script.compare_with_trainer:
            print(f"Both ran {summary['real_steps']} optimizer steps with backward passes and the same settings.")
    trainer.accelerator.wait_for_everyone()  # a process that exits early looks dead to the others
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
