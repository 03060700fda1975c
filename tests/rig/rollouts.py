"""
Tiny GRPO and RLOO trainings in which a chosen share of the prompts gives no advantage, and a process that makes one.

    PYTHONPATH=tests [accelerate launch --config_file FILE] tests/rig/rollouts.py TRAINER FOLDER JSON

trains in `FOLDER`, goes on from its newest checkpoint if there is one, and writes the weights to `weights.pt` there.
"""

import json
import string
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import config_values, tiny_model, weights

from hf_hybrid import HybridGRPOConfig, HybridGRPOTrainer, HybridRLOOConfig, HybridRLOOTrainer
from hf_hybrid.arguments import HybridArguments
from rig import vllm_stand_in

CONFIGS = {
    GRPOTrainer: GRPOConfig,
    HybridGRPOTrainer: HybridGRPOConfig,
    RLOOTrainer: RLOOConfig,
    HybridRLOOTrainer: HybridRLOOConfig,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {text: index for index, text in enumerate(["<pad>", "<eos>", *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


TOKENIZER = make_tokenizer()
COUNTS = ("rows", "rows_skipped", "log_probs_skipped", "rows_decoded", "rows_decoded_saved", "prompt_tokens_shared")
"""Keys of the summary that the process writes down."""


def policy(**overrides):
    """A model one seventh of whose tokens end a completion, so that lengths differ."""
    model = tiny_model(vocab_size=len(TOKENIZER), eos_token_id=1, pad_token_id=0, bos_token_id=None, **overrides)
    model.generation_config.eos_token_id = [1, *range(30, 45)]
    return model


def prompts(share: float) -> Dataset:
    """Prompts of which a `share`, evenly spread, is so easy that every completion is right."""
    easy = [int((index + 1) * share) > int(index * share) for index in range(64)]
    return Dataset.from_dict({"prompt": [f"{'easy' if e else 'hard'} {index}" for index, e in enumerate(easy)]})


def reward(prompts, completions, **_) -> list[float]:
    return [
        1.0 if prompt.startswith("easy") else sum(map(ord, completion)) % 7 / 7
        for prompt, completion in zip(prompts, completions)
    ]


class CallsTools(PreTrainedTokenizerFast):
    """A completion with a digit calls the tool [`double`] with it."""

    def parse_response(self, ids, prefix=None, tools=None):
        text = self.decode(ids, skip_special_tokens=True)
        digits = [character for character in text if character.isdigit()]
        calls = [{"type": "function", "function": {"name": "double", "arguments": {"number": int(d)}}} for d in digits]
        return {"role": "assistant", "content": text, **({"tool_calls": calls[:1]} if calls else {})}


def double(number: int) -> int:
    """
    Double a number.

    Args:
        number: The number.

    Returns:
        Twice the number.
    """
    return 2 * number


def calls_tools() -> CallsTools:
    plain = make_tokenizer()
    tokenizer = CallsTools(tokenizer_object=plain.backend_tokenizer, pad_token="<pad>", eos_token="<eos>")
    tokenizer.response_template = {"by": "parse_response"}  # TRL wants one
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
        "{% endif %}|{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    return tokenizer


def conversations(share: float) -> Dataset:
    return prompts(share).map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})


def reward_of_conversation(prompts, completions, **_) -> list[float]:
    return reward([prompt[-1]["content"] for prompt in prompts], [str(completion) for completion in completions])


class Game:
    """An environment whose method is a tool, and which gives the reward."""

    def reset(self, prompt, **_):
        self.easy, self.total = "easy" in str(prompt), 0

    def double(self, number: int) -> int:
        """
        Double a number.

        Args:
            number: The number.

        Returns:
            Twice the number.
        """
        self.total += number
        return 2 * number

    def get_reward(self) -> float:
        return 1.0 if self.easy else self.total % 7 / 7


WITH_TOOLS = {"tools": [double], "reward_funcs": reward_of_conversation, "data": conversations}
WITH_GAME = {"environment_factory": Game, "data": conversations}
"""Options of [`build`]; the tokenizer is that of [`calls_tools`]."""


def build(
    trainer_class,
    folder,
    share=0.5,
    *,
    model=None,
    callbacks=None,
    peft_config=None,
    reward_funcs=None,
    data=prompts,
    tools=None,
    environment_factory=None,
    rollout_func=None,
    **options,
):
    """Make a trainer whose optimizer is SGD with momentum and weight decay: AdamW would magnify rounding."""
    agents = {"tools": tools, "environment_factory": environment_factory, "rollout_func": rollout_func}
    calls = tools or environment_factory
    model = model or policy()
    values = {
        "max_steps": 8, "gradient_accumulation_steps": 2, "num_generations": 4, "max_completion_length": 6,
        "learning_rate": 0.1, "optim": "sgd", "optim_args": "momentum=0.9", "weight_decay": 0.01, "bf16": False,
        "beta": 0.0, "shuffle_dataset": True,
    }  # fmt: skip
    if issubclass(CONFIGS[trainer_class], HybridArguments):
        values["share_rows"] = "off"  # where a test does not ask for it
    args = CONFIGS[trainer_class](**config_values(folder, **{**values, **options}))
    return trainer_class(
        model,
        reward_funcs or (None if environment_factory else reward),
        args,
        train_dataset=data(share),
        eval_dataset=data(share).select(range(8)) if "eval_strategy" in options else None,
        processing_class=calls_tools() if calls else TOKENIZER,
        callbacks=callbacks,
        peft_config=peft_config,
        **{name: value for name, value in agents.items() if value is not None},
    )


class Stop(TrainerCallback):
    """Ends a run after a step, as if it had been killed."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


MIDDLE = {"steps_per_generation": 4, "num_iterations": 2, "save_strategy": "steps", "save_steps": 3}
"""Options of [`build`] with which a save is in the middle of a generation batch."""


def distance(first: dict, second: dict) -> float:
    """Of two sets of weights, the largest."""
    return max((one - other).abs().max().item() for one, other in zip(first.values(), second.values(), strict=True))


def main() -> None:
    name, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    with vllm_stand_in.installed(policy):
        trainer = build(next(cls for cls in CONFIGS if cls.__name__ == name), folder, **options)
        trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")) or None)
    if trainer.is_world_process_zero():
        torch.save(weights(trainer.model), folder / "weights.pt")
        summary = trainer.hybrid_summary() if hasattr(trainer, "hybrid_summary") else {}
        found = {key: summary.get(key) for key in COUNTS}
        found["processes"] = trainer.accelerator.num_processes
        (folder / "summary.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
