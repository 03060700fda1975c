"""
CPU seconds of training on pictures that rows share, TRL's trainers and ours in turn. Forty minutes; one thread.

    python -m benchmarks.skips.images
    python -m benchmarks.skips.images --size tiny    # seconds: whether it runs

A model of Qwen2-VL's kind with random weights: 96M, of which 44M are its image encoder. A picture has 256 tokens. The
update is in fp32 by SGD, all weights are trained. A step is what lies between the ends of two; the first of a run,
which compares rows, is left out.

    sft         4 questions on a picture, with answers of 2 to 64 tokens
    sft apart   4 questions on 4 pictures
    dpo         2 pairs, each on a picture
    grpo        the update with 8 completions of 32 tokens on a picture, without generation and rewards
    grpo small  the same in 4 micro-batches of 2
    dpo small   4 pairs on a picture, in 4 micro-batches
    kto small   8 answers on a picture, in 4 micro-batches
    prefill     generation of one token for each of these 8
    gemma3 ...  the same with a model of Gemma 3's kind, whose tokens of a picture see it whole

Beside the seconds stand the largest difference between the weights at the end, and which part of the tokens was shared.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rig import vision
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

import hf_hybrid
from benchmarks.results import Results, command_line, provenance
from benchmarks.timing import Stopwatch


class Size(NamedTuple):
    """Widths and layers of the image encoder and of the language model, words, and the side of a picture."""

    encoder: tuple[int, int]
    language: tuple[int, int]
    words: int
    side: int


SIZES = {"full": Size((512, 12), (576, 12), 16384, 448), "tiny": Size((64, 2), (64, 2), 512, 112)}
GROUP, ANSWER = 8, 64
WHOLE: dict = {"max_length": None}
FOUR = {"gradient_accumulation_steps": 4}
SAMPLED = {"num_generations": GROUP, "beta": 0.0, "shuffle_dataset": False}
CASES = {
    "sft": (SFTTrainer, SFTConfig, lambda: vision.sft_rows(24, 4, False, longest=ANSWER), 4, WHOLE),
    "sft apart": (SFTTrainer, SFTConfig, lambda: vision.sft_rows(24, 1, False, longest=ANSWER), 4, WHOLE),
    "dpo": (DPOTrainer, DPOConfig, lambda: vision.pairs(12, 1, False, longest=ANSWER), 2, WHOLE),
    "grpo": (GRPOTrainer, GRPOConfig, lambda: vision.prompts(12, 1, False), GROUP,
             {**SAMPLED, "max_completion_length": 32}),
    "grpo small": (GRPOTrainer, GRPOConfig, lambda: vision.prompts(12, 1, False), 2,
                   {**SAMPLED, "max_completion_length": 32, **FOUR}),
    "dpo small": (DPOTrainer, DPOConfig, lambda: vision.pairs(12, 4, False, longest=ANSWER), 1, {**WHOLE, **FOUR}),
    "kto small": (KTOTrainer, KTOConfig, lambda: vision.judged(24, 8, False), 2, {**WHOLE, **FOUR}),
    "prefill": (GRPOTrainer, GRPOConfig, lambda: vision.prompts(12, 1, False), GROUP,
                {**SAMPLED, "max_completion_length": 1}),
}  # fmt: skip
"""TRL's classes, rows, how many a micro-batch has, and options."""
GEMMA = "gemma3 "
CASES |= {GEMMA + case: CASES[case] for case in ("sft", "dpo", "grpo")}


def build_gemma(size: Size, seed: int) -> tuple[Any, Any]:
    """As [`build`], a model of Gemma 3's kind: tokens of a picture see it whole."""
    (encoder, depth), (width, layers), heads = size.encoder, size.language, max(size.language[0] // 64, 1)
    square, tokenizer = {"height": size.side, "width": size.side}, vision.tokenizer("<boi>")
    pictures, tokens = Gemma3ImageProcessorPil(size=square), (size.side // 28) ** 2
    text = {
        "vocab_size": size.words, "hidden_size": width, "intermediate_size": 8 * width // 3, "head_dim": 64,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": max(heads // 3, 1),
        "sliding_window": 1024, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    eyes = {
        "hidden_size": encoder, "intermediate_size": 4 * encoder, "num_hidden_layers": depth, "image_size": size.side,
        "num_attention_heads": max(encoder // 64, 1), "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    own = {
        f"{name}_index": tokenizer.convert_tokens_to_ids(vision.PICTURE[name]) for name in ("boi_token", "eoi_token")
    }
    own |= {"image_token_id": tokenizer.convert_tokens_to_ids("<image>"), "mm_tokens_per_image": tokens}
    torch.manual_seed(seed)
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=eyes, **own))
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.02)  # else zeros
    model.generation_config.update(pad_token_id=0, eos_token_id=1)
    template = tokenizer.chat_template
    return model, Gemma3Processor(pictures, tokenizer, chat_template=template, image_seq_length=tokens)


def build(size: Size, seed: int = 0) -> tuple[Any, Any]:
    """Return a model of Qwen2-VL's kind, and a processor that gives a picture a token per 28 x 28 dots."""
    tokenizer = vision.tokenizer("<picture><image></picture>")
    dots = {"shortest_edge": size.side**2, "longest_edge": size.side**2}
    processor = vision.Qwen2Processor(
        Qwen2VLImageProcessorPil(size=dots), tokenizer, chat_template=tokenizer.chat_template
    )
    width, layers = size.language
    heads = max(width // 64, 1)
    text = {
        "vocab_size": size.words, "hidden_size": width, "intermediate_size": 8 * width // 3,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": max(heads // 3, 1),
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
    }  # fmt: skip
    encoder, depth = size.encoder
    eyes = {"embed_dim": encoder, "hidden_size": width, "depth": depth, "num_heads": max(encoder // 64, 1)}
    tokens = {f"{name}_id": tokenizer.convert_tokens_to_ids(vision.PICTURE[name]) for name in list(vision.PICTURE)[:4]}
    torch.manual_seed(seed)
    config = Qwen2VLConfig(text_config=text, vision_config=eyes, tie_word_embeddings=True, **tokens)
    model = Qwen2VLForConditionalGeneration(config)
    model.generation_config.update(pad_token_id=0, eos_token_id=1)
    return model, processor


def reward(completion_ids: list[list[int]], **_) -> list[float]:
    return [float(sum(ids) % 101) for ids in completion_ids]


class Ends(TrainerCallback):
    """CPU seconds until the end of each step, all and those of generation with rewards."""

    def __init__(self):
        self.generation, self.ends = Stopwatch(), []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append((time.process_time(), self.generation.seconds))

    def seconds(self, case: str) -> float:
        """Return the median of the steps behind the first: of what the case is about."""
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(self.ends, self.ends[1:])]
        return statistics.median(part if case == "prefill" else whole - part for whole, part in steps)


def train(arm: str, case: str, size: Size, steps: int) -> tuple[float, dict[str, torch.Tensor], dict[str, Any]]:
    """Return the CPU seconds of a step, the weights at the end, and what our trainer tells."""
    trainer_class, config_class, rows, count, options = CASES[case]
    alone: dict[str, Any] = {}
    if arm == "hybrid":
        trainer_class, config_class = (
            getattr(hf_hybrid, f"Hybrid{kind.__name__}") for kind in (trainer_class, config_class)
        )
        alone = {"enable_predict": False, "share_rows": "on"}
    made = build_gemma if case.startswith(GEMMA) else build
    model, processor = made(size, 0)
    given: dict[str, Any] = {"callbacks": [ends := Ends()], "processing_class": processor}
    samples, compares = issubclass(config_class, GRPOConfig), any(kind in case for kind in ("dpo", "kto"))
    given |= {"reward_funcs": reward} if samples else {}
    given |= {"ref_model": made(size, 1)[0]} if compares else {}
    data = rows().map(lambda row: {"images": [picture.resize((size.side,) * 2) for picture in row["images"]]})
    with tempfile.TemporaryDirectory() as folder:
        args = config_class(
            folder, max_steps=steps + 1, per_device_train_batch_size=count, learning_rate=1e-2, optim="sgd", bf16=False,
            use_cpu=True, report_to="none", save_strategy="no", logging_steps=steps + 1, disable_tqdm=True,
            dataloader_pin_memory=False, gradient_checkpointing=False, train_sampling_strategy="sequential", **options,
            **alone,
        )  # fmt: skip
        trainer = trainer_class(model, args=args, train_dataset=data, **given)
        if samples:
            trainer._generate_and_score_completions = ends.generation.around(trainer._generate_and_score_completions)
        trainer.train()
        told = trainer.hybrid_summary() if arm == "hybrid" else {}
    weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return ends.seconds(case), weights, told


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--rounds", type=int, default=3, help="Pairs of runs per case.")
    parser.add_argument("--steps", type=int, default=2, help="Steps of a run behind its first.")
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--size", choices=list(SIZES), default="full")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = SIZES[args.size]
    results = Results(args.results, "images", ("case", "size"))
    for case in args.case:
        seconds: dict[str, list[float]] = {"trl": [], "hybrid": []}
        for number in range(args.rounds):
            made = {}
            for arm in sorted(seconds, reverse=bool(number % 2)):
                made[arm] = train(arm, case, size, args.steps)
                seconds[arm].append(made[arm][0])
        (_, theirs, _), (_, ours, told) = made["trl"], made["hybrid"]
        shared = told["tokens_shared"] / told["tokens"] if told["tokens"] else 0.0
        row = results.add({
            **provenance(1), "case": case, "size": args.size, "steps": args.steps, "seconds": seconds,
            "ratio": statistics.median(a / b for a, b in zip(seconds["trl"], seconds["hybrid"])),
            "largest_difference": max((theirs[name] - ours[name]).abs().max().item() for name in theirs),
            "shared_part": shared, "plain_rows_because": told["plain_rows_because"],
            "parameters": sum(tensor.numel() for tensor in theirs.values()),
        })  # fmt: skip
        print({name: row[name] for name in list(row)[5:]}, flush=True)


if __name__ == "__main__":
    main()
