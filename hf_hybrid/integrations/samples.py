"""
Samples of generations at evaluations.

After each evaluation the first process completes a few prompts greedily, one after the other, with the weights that
were evaluated. Training does not notice: nothing is drawn at random, the random states are put back all the same, no
gradient is recorded, and each module gets the mode back that it had. tests/integrations/test_samples.py compares the
weights of runs with and without samples to the bit.

What a model has to be for this: whole on one process. Shards of weights (FSDP, DeepSpeed) would need all processes for
each token, and streamed layers would travel once for each token; both are left out, and a warning says so.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from hf_hybrid.machine import sharding_of
from hf_hybrid.optimizers import text_config
from hf_hybrid.records.log import append_line
from hf_hybrid.report.samples import SAMPLES_NAME, checked_prompts, read_prompts
from hf_hybrid.run.run import as_before

logger = logging.getLogger(__name__)


class SampleCallback(TrainerCallback):
    """
    Completes prompts at every evaluation of any `Trainer` that has a tokenizer, and appends them to `samples.jsonl` in
    its output folder. `HybridConfig(sample_prompts="prompts.txt")` does the same.

    A line has `step`, `prompt`, `completion` (text without special tokens), `tokens` (generated) and `ended` (whether
    the model ended it). If the tokenizer has a chat template, a prompt is the message of a user. A step is sampled
    once, also with several evaluation sets.

    Args:
        prompts (`str`, `Path` or `Sequence[str]`): Text file with a prompt per line, or the prompts themselves, as in
            `callbacks=[SampleCallback(["The capital of France is", "2 + 2 ="])]`.
        max_new_tokens (`int`, defaults to 64): Tokens of a completion at most.

    Raises:
        ValueError: If there is no prompt, there are more than 32, or `max_new_tokens` is not a whole number from 1;
            when the trainer is made, if it has no tokenizer, if its model generates no text, or a prompt fills it.
    """

    def __init__(self, prompts: str | Path | Sequence[str], max_new_tokens: int = 64):
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` must be a whole number from 1, got `{max_new_tokens!r}`.")
        if isinstance(prompts, (str, Path)):
            self.prompts = read_prompts(prompts)
        else:
            self.prompts = checked_prompts(list(prompts), "[...]")
            if wrong := [prompt for prompt in self.prompts if not isinstance(prompt, str)]:
                raise ValueError(f"`prompts` must be texts, got `{wrong[0]!r}`.")
        self.max_new_tokens = max_new_tokens
        self.trainer: weakref.ref | None = None  # its trials in a hyperparameter search have folders of their own
        self._sampled_at: int | None = None
        self._left_out: str | None = None

    def check(self, model: Any, processing_class: Any) -> None:
        """Refuse a trainer that cannot complete the prompts. Raises `ValueError`."""
        if processing_class is None:
            raise ValueError("`sample_prompts` needs a tokenizer. Pass it to the trainer as `processing_class`.")
        if model is None:  # a trainer with `model_init` makes it later
            return
        if not (hasattr(model, "generate") and getattr(model, "can_generate", lambda: True)()):
            raise ValueError(
                f"`sample_prompts` needs a model that generates text, and `{type(model).__name__}` does not. Leave it "
                "out."
            )
        positions = positions_of(model)
        for prompt in self.prompts:
            length = len(tokens_of(prompt, processing_class)[0])
            if positions is not None and length >= positions:
                raise ValueError(
                    f"`sample_prompts` has a prompt of {length:,} tokens (`{prompt[:40]}`), and the model has "
                    f"{positions:,} positions. Shorten it."
                )

    def on_init_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        self.check(model, processing_class)

    def on_train_begin(self, args, state, control, **kwargs):
        self._sampled_at, self._left_out = None, None
        if (sharding := sharding_of(args)) is not None:
            self._leave_out(state, f"`{sharding}` leaves each process a part of the weights")
        elif args.eval_strategy == IntervalStrategy.NO and state.is_world_process_zero:
            logger.warning(
                "`sample_prompts` are completed at evaluations, and `eval_strategy=no` makes none while it trains. Set "
                "`eval_strategy` and `eval_steps`."
            )
        self._write(args, state, {"step": state.global_step, "begun": True})

    def on_evaluate(self, args, state, control, model=None, processing_class=None, **kwargs):
        if self._left_out or not state.is_world_process_zero or self._sampled_at == state.global_step:
            return
        self._sampled_at = state.global_step
        try:
            samples = complete(model, processing_class, self.prompts, self.max_new_tokens)
        except Exception as error:  # whatever a model does with a prompt, or memory that ran out: training goes on
            self._leave_out(state, f"generating failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})")
            return
        for sample in samples:
            self._write(args, state, {"step": state.global_step, **sample})

    def _leave_out(self, state: Any, reason: str) -> None:
        self._left_out = reason
        if state.is_world_process_zero:
            logger.warning("No samples of generations are made: %s.", reason)

    def _write(self, args: Any, state: Any, entry: dict) -> None:
        if self._left_out or not state.is_world_process_zero:
            return
        trainer = None if self.trainer is None else self.trainer()
        folder = Path(getattr(trainer, "run_folder", args.output_dir))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            append_line(folder / SAMPLES_NAME, entry)
        except OSError as error:
            self._leave_out(state, f"`{SAMPLES_NAME}` cannot be written ({error.strerror})")


def install(trainer: Any) -> None:
    """Give a trainer the callback that its options ask for. Raises `ValueError` as [`SampleCallback`]."""
    callback = SampleCallback(trainer.hybrid_args.sample_prompts)
    if trainer.memory.streams:
        logger.warning(
            "No samples of generations are made: with `memory=%s` each layer would be fetched once for each token.",
            trainer.hybrid_args.memory,
        )
        return
    callback.check(trainer.model, trainer.processing_class)
    callback.trainer = weakref.ref(trainer)
    trainer.add_callback(callback)


def positions_of(model: Any) -> int | None:
    """Return the number of positions of a model; `None` if its config does not tell."""
    return getattr(text_config(model), "max_position_embeddings", None)


def tokens_of(prompt: str, processing_class: Any) -> torch.Tensor:
    """Return the tokens of a prompt, shape [1, tokens]: with a chat template, of a message of a user."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": prompt}]
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        return tokenizer.apply_chat_template(message, **options)["input_ids"]
    return tokenizer(prompt, return_tensors="pt")["input_ids"]


def complete(model: Any, processing_class: Any, prompts: Sequence[str], max_new_tokens: int) -> list[dict]:
    """Complete prompts greedily: `prompt`, `completion`, `tokens` and `ended` of each. Modes and random states stay."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    device, positions, samples = model.device, positions_of(model), []
    ends = getattr(model.generation_config, "eos_token_id", None)
    listed = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
    known = sorted({token for token in listed if token is not None})
    pad = next((token for token in (tokenizer.pad_token_id, *known) if token is not None), 0)
    with as_before(model, device):
        model.eval()
        for prompt in prompts:
            tokens = tokens_of(prompt, processing_class).to(device)
            length = tokens.shape[1]
            room = max_new_tokens if positions is None else min(max_new_tokens, positions - length)
            ids = {"pad_token_id": pad, "eos_token_id": known or None}
            config = GenerationConfig(do_sample=False, num_beams=1, max_new_tokens=room, **ids)
            sequence = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
            new = sequence[0, length:].tolist()
            completion = tokenizer.decode(new, skip_special_tokens=True)
            ended = bool(new) and new[-1] in known
            samples.append({"prompt": prompt, "completion": completion, "tokens": len(new), "ended": ended})
    return samples
