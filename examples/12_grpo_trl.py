"""
Train with rewards (GRPO) with TRL, without the rows that teach nothing (about two minutes on two CPU cores).

    pip install "hf-hybrid[trl]"
    python examples/12_grpo_trl.py
    python examples/12_grpo_trl.py --exact_skips off
    python examples/12_grpo_trl.py --loss_type dr_grpo --steps_per_generation 8

Nothing is downloaded. The model is the small Llama of 06_lora.py, which has seen some source code of Python's standard
library. A prompt is the begin of a line of code, and the reward is 1 if the finished line is valid Python. After "#"
it always is, and after many others it hardly ever is: where all eight completions of a prompt get the same reward, they
have no advantage and no gradient, and are not computed. With a model and a data set from the Hub:

    python examples/12_grpo_trl.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name my/prompts \\
        --learning_rate 1e-6 --max_completion_length 256 --use_cpu False --bf16 True

To start from it, change two lines of your own script: `GRPOTrainer` to `HybridGRPOTrainer`, `GRPOConfig` to
`HybridGRPOConfig`.
"""

from __future__ import annotations

import ast
import random
import runpy
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from hf_hybrid.cli.console import quiet_imports

with quiet_imports():
    from datasets import Dataset, load_dataset
    from transformers import AutoTokenizer, HfArgumentParser

    from hf_hybrid import HybridGRPOConfig, HybridGRPOTrainer

lora = runpy.run_path(str(Path(__file__).with_name("06_lora.py")))


@dataclass
class ScriptArguments:
    model_name_or_path: Optional[str] = field(
        default=None, metadata={"help": "Model on the Hub or in a folder. Default: a small Llama trained on the spot."}
    )
    base_steps: int = field(default=120, metadata={"help": "Training steps of the small Llama."})
    dataset_name: Optional[str] = field(
        default=None, metadata={"help": "Prompts on the Hub or in a folder. Default: begins of lines of code."}
    )


def begins_of_lines(seed: int = 0) -> Dataset:
    """Make prompts: the first one to three words of lines of the standard library."""
    chance, rows = random.Random(seed), []
    for text in lora["from_scratch"]["python_source"]()[150:200]:
        for line in text.splitlines():
            words = line.split()
            if len(words) > 3:
                rows.append({"prompt": " ".join(words[: chance.randint(1, 3)])})
    chance.shuffle(rows)
    return Dataset.from_list(rows[:2000])


def is_a_line_of_python(prompts: list[str], completions: list[str], **_) -> list[float]:
    """Reward finished lines that are valid Python, or become so with an empty body."""
    return [
        float(_is_valid((prompt + completion).partition("\n")[0])) for prompt, completion in zip(prompts, completions)
    ]


def _is_valid(line: str) -> bool:
    for code in (line, f"{line} pass"):
        try:
            with warnings.catch_warnings(action="ignore"):
                ast.parse(code)
            return True
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue
    return False


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, HybridGRPOConfig))
    parser.set_defaults(
        output_dir="out/grpo", max_steps=60, per_device_train_batch_size=8, gradient_accumulation_steps=8,
        num_generations=8, max_completion_length=16, learning_rate=2e-3, lr_scheduler_type="constant", logging_steps=10,
        save_strategy="no", report_to="none", dataloader_pin_memory=False, use_cpu=True, bf16=False,
        activation_checkpointing=False,
    )  # fmt: skip
    script, args = parser.parse_args_into_dataclasses()
    base = script.model_name_or_path or lora["make_base"](f"{args.output_dir}/base", script.base_steps, args.seed)
    data = load_dataset(script.dataset_name, split="train") if script.dataset_name else begins_of_lines(args.seed)

    trainer = HybridGRPOTrainer(
        base,
        reward_funcs=is_a_line_of_python,
        args=args,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(base, padding_side="left"),
    )
    trainer.train()
    trainer.save_model()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    found = trainer.hybrid_summary()
    passes = args.max_steps * args.gradient_accumulation_steps
    print(f"\nmean reward         {rewards[0]:.2f} -> {rewards[-1]:.2f}")
    print(f"rows                {found['rows']} generated, {found['rows_skipped']} left out of the update")
    avoided = found["backward_passes_avoided_exactly"]
    print(f"backward passes     {passes - avoided} done, {avoided} avoided; the update is that of TRL's trainer")
    print(f"model               {args.output_dir}")


if __name__ == "__main__":
    main()
