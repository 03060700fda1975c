"""
Train a model to use a calculator with GRPO and TRL's `tools` (SmolLM2-135M; ten minutes on two busy CPU cores).

    pip install "hf-hybrid[trl,peft]"
    python examples/15_grpo_tools.py                                   # SmolLM2 from the Hub, 270 MB
    python examples/15_grpo_tools.py --model_name_or_path my/folder --max_steps 40

A question asks for the sum of two numbers. The model may call `calculate`, whose result it gets as a message, and
answers in the next turn. The reward is 1 if the answer is right. A turn goes on from the keys and values of the turns
before, and what a tool says is in no loss. Before and after the training the model answers held-out questions: after
ten steps the reward has risen from 0.25 to 1.00. Each entry of the log has the tokens that were not computed again
(`turns/tokens_kept`), and the last conversation is printed turn by turn. `--num_completions_to_print 1` prints one in
each entry, as TRL's table.

To start from it, change two lines of your own script with tools or an environment: `GRPOTrainer` to
`HybridGRPOTrainer`, `GRPOConfig` to `HybridGRPOConfig`.
"""

from __future__ import annotations

import random
import re
import textwrap
from dataclasses import dataclass, field

from hf_hybrid.cli.console import quiet_imports

with quiet_imports():
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, HfArgumentParser

    from hf_hybrid import HybridGRPOConfig, HybridGRPOTrainer

TEMPLATE = (  # ChatML, where a call is written as in Python
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}({% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}"
    "{% endfor %}){% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RESPONSE = {  # how transformers reads such a call
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"(?P<name>calculate)\(expression=",
            "close_pattern": r"\)\s*",
            "content": "text",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": {"expression": "{content}"}}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


@dataclass
class ScriptArguments:
    model_name_or_path: str = field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct", metadata={"help": "A model with ChatML's tokens."}
    )
    held_out: int = field(default=32, metadata={"help": "Questions that are asked before and after the training."})


def calculate(expression: str) -> str:
    """
    Calculate a sum.

    Args:
        expression: The sum, as `1 + 2`.

    Returns:
        The result.
    """
    parts = re.fullmatch(r"\s*(\d+)\s*\+\s*(\d+)\s*", expression)
    if parts is None:
        raise ValueError("that is no sum")
    return str(int(parts[1]) + int(parts[2]))


def questions(count: int, seed: int) -> Dataset:
    """Make questions after a worked one."""
    chance, rows = random.Random(seed), []
    worked = [
        {"role": "system", "content": "Use calculate(expression=...) and then answer with the result."},
        {"role": "user", "content": "Add 12 and 31."},
        {"role": "assistant", "content": "calculate(expression=12 + 31)"},
        {"role": "tool", "content": "43"},
        {"role": "assistant", "content": "43"},
    ]
    for _ in range(count):
        a, b = chance.randint(100, 999), chance.randint(100, 999)
        rows.append({"prompt": [*worked, {"role": "user", "content": f"Add {a} and {b}."}], "answer": str(a + b)})
    return Dataset.from_list(rows)


LAST: list[dict] = []
"""The conversation that was rewarded last."""


def is_right(prompts: list, completions: list, answer: list[str], **_) -> list[float]:
    """Reward a last message that has the right number and no other."""
    LAST[:] = prompts[-1][-1:] + completions[-1]
    said = [one[-1]["content"] if one[-1]["role"] == "assistant" else "" for one in completions]
    return [float(re.findall(r"\d+", text) == [right]) for text, right in zip(said, answer)]


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, HybridGRPOConfig))
    parser.set_defaults(
        output_dir="out/tools", max_steps=10, per_device_train_batch_size=16, num_generations=8,
        max_completion_length=48, max_tool_calling_iterations=3, learning_rate=3e-4, lr_scheduler_type="constant",
        logging_steps=2, save_strategy="no", report_to="none", dataloader_pin_memory=False, use_cpu=True, bf16=False,
        activation_checkpointing=False, per_device_eval_batch_size=16, num_generations_eval=1, log_completions=True,
        num_completions_to_print=0,
    )  # fmt: skip
    script, args = parser.parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path, padding_side="left")
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    trainer = HybridGRPOTrainer(
        script.model_name_or_path,
        reward_funcs=is_right,
        args=args,
        train_dataset=questions(2000, seed=0),
        eval_dataset=questions(script.held_out, seed=1),
        processing_class=tokenizer,
        tools=[calculate],
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    before = trainer.evaluate()["eval_reward"]
    trainer.train()
    after, found = trainer.evaluate()["eval_reward"], trainer.hybrid_summary()
    trainer.save_model()
    computed, kept = found["prompt_tokens_computed"], found["prompt_tokens_shared"]
    print(f"\nheld-out reward     {before:.2f} -> {after:.2f}")
    print(
        f"turns               {found['turns']}, calls of the tool {found['tool_calls']}, errors {found['tool_errors']}"
    )
    print(f"tokens of prompts   {computed} computed, {kept} not computed again")
    print(f"model               {args.output_dir}\n")
    for message in LAST:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        said = [message.get("content") or "", *(f"{call['name']}{call['arguments']}" for call in calls)]
        print(textwrap.fill(f"{message['role']:<20}{' '.join(filter(None, said))}", 80, subsequent_indent=" " * 20))


if __name__ == "__main__":
    main()
