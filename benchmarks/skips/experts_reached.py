"""
How many experts do the tokens of a window reach? Streamed layers copy no others, where experts are frozen.

    python -m benchmarks.skips.experts_reached             # four small mixtures; twenty minutes on one core

A Qwen3-MoE of four layers, with 128 experts of which each token has 8 as in Qwen3-30B-A3B, learns modules of Python's
standard library and sections of its language reference, in tokens of a vocabulary that is made from them. The router's
loss, which spreads tokens over experts, is left out, or taken of all layers together, as transformers does, or of each
layer by itself. Then windows of held-out text are computed, each of consecutive rows. Printed are the shares of
experts that get a token by layer, on average over the windows of a size, the least of all windows and layers, and the
loss at the end of the training.

Then adapters of each mixture are trained on the held-out text with streamed layers, in steps of one window. Printed are
the bytes that layers have copied to the device after the first step, over those of whole layers: some experts are
fetched ahead in vain, because the window before has reached them.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PrinterCallback, Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback, set_seed
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter, load_balancing_loss_func

from benchmarks.results import Results, command_line, provenance
from benchmarks.texts import language_reference, standard_library
from hf_hybrid import HybridConfig, HybridTrainer

EXPERTS, WORDS, LENGTH, ROWS = 128, 4096, 128, 8
WINDOWS = (64, 256, 512, 1024, 2048, 4096)
MOST_WINDOWS = 16  # of each size
FACTORS = {"none": 0.0, "together": 0.01, "by layer, 0.001": 0.001, "by layer, 0.01": 0.01}
"""Of the router's loss: Qwen3's and Mixtral's."""


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens to train on, and held-out ones of other files."""
    texts = [*language_reference(), *(source for _, source in standard_library())]
    random.Random(0).shuffle(texts)
    held_out, training = texts[: len(texts) // 10], texts[len(texts) // 10 :]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(training, trainers.BpeTrainer(vocab_size=WORDS, initial_alphabet=alphabet))

    def tokens(texts: list[str]) -> torch.Tensor:
        return torch.tensor([token for encoding in tokenizer.encode_batch(texts) for token in encoding.ids])

    return tokens(training), tokens(held_out)


def build() -> Qwen3MoeForCausalLM:
    set_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=WORDS, hidden_size=128, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=EXPERTS, num_experts_per_tok=8,
        norm_topk_prob=True, router_aux_loss_coef=0.0, max_position_embeddings=max(WINDOWS), bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def train(model: Qwen3MoeForCausalLM, arm: str, tokens: torch.Tensor, steps: int, rate: float) -> float:
    """Train for so many steps of `ROWS` rows. Returns the loss of the last ones, without the router's."""
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
    chance, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        starts = torch.randint(len(tokens) - LENGTH, (ROWS,), generator=chance)
        rows = torch.stack([tokens[start : start + LENGTH] for start in starts.tolist()])
        output = model(input_ids=rows, labels=rows, output_router_logits=True)
        groups = [output.router_logits] if arm == "together" else [(logits,) for logits in output.router_logits]
        balance = sum(load_balancing_loss_func(logits, EXPERTS, 8) for logits in groups) / len(groups)
        (output.loss + FACTORS[arm] * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(output.loss.item())
    return sum(losses[-20:]) / len(losses[-20:])


@torch.no_grad()
def reached(model: Qwen3MoeForCausalLM, tokens: torch.Tensor, window: int) -> tuple[list[float], float]:
    """Return the share of experts that windows of so many tokens reach: by layer on average, and the least."""
    chosen: list[torch.Tensor] = []
    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    hooks = [router.register_forward_hook(lambda _, __, output: chosen.append(output[2])) for router in routers]
    shares = []
    for rows in tokens.split(window)[: min(MOST_WINDOWS, len(tokens) // window)]:
        chosen.clear()
        model(input_ids=rows.view(-1, min(window, LENGTH)))  # as long as the model has learnt
        shares.append([len(experts.unique()) / EXPERTS for experts in chosen])
    for hook in hooks:
        hook.remove()
    return torch.tensor(shares).mean(0).tolist(), torch.tensor(shares).min().item()


class Copied(TrainerCallback):
    """The bytes that travelling layers have copied to the device since the first step, over those of whole layers."""

    def _now(self) -> tuple[int, int]:
        streamer = self.trainer.memory.streamer
        return streamer.transfers.bytes_in, sum(unit.loads * unit.storage.packed_bytes for unit in streamer.units)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self._first = self._now()
        elif state.global_step == state.max_steps:
            copied, whole = (last - first for first, last in zip(self._first, self._now()))
            self.share = copied / whole


def copied(model: Qwen3MoeForCausalLM, tokens: torch.Tensor, window: int) -> float:
    """Train adapters, a window a step. Returns the share of bytes that is copied to the device."""
    rows = [{"input_ids": row, "labels": row} for row in tokens.split(min(window, LENGTH)) if len(row) == LENGTH]
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    clock = Copied()
    with tempfile.TemporaryDirectory() as folder:
        config = HybridConfig(
            folder, memory="stream", resident_layers=0, enable_predict=False, per_device_train_batch_size=4,
            gradient_accumulation_steps=window // LENGTH // 4, max_steps=min(9, len(rows) * LENGTH // window),
            learning_rate=2e-4, train_sampling_strategy="sequential", save_strategy="no", report_to="none",
            disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = HybridTrainer(adapted, config, train_dataset=rows, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        clock.trainer = trainer
        trainer.train()
    adapted.unload()
    return clock.share


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rate", type=float, default=2e-3)
    args = parser.parse_args()
    results = Results(args.results, "experts_reached", ("arm", "steps", "window"))
    trained = Results(args.results, "experts_copied", ("arm", "steps", "window"))
    training, held_out = data()
    print(f"{len(training):,} tokens to train on, {len(held_out):,} held out", flush=True)
    for arm, steps in (("none", 0), *((arm, args.steps) for arm in FACTORS)):
        model = build()
        loss = train(model, arm, training, steps, args.rate) if steps else None
        for window in WINDOWS:
            shares, least = reached(model, held_out, window)
            row = {**provenance(torch.get_num_threads()), "arm": arm, "steps": steps, "window": window}
            results.add({**row, "rate": args.rate, "loss": loss, "reached": shares, "least": least})
            by_layer = " ".join(f"{share:6.1%}" for share in shares)
            print(f"{arm:15} {steps:4} {window:5}  {by_layer}  {least:6.1%}  {loss or 0:.3f}", flush=True)
        for window in (window for window in WINDOWS if window >= 4 * LENGTH):
            share = copied(model, held_out, window)
            row = {**provenance(torch.get_num_threads()), "arm": arm, "steps": steps, "window": window}
            trained.add({**row, "rate": args.rate, "copied": share})
            print(f"{arm:15} {steps:4} {window:5}  {share:6.1%} of the bytes are copied", flush=True)


if __name__ == "__main__":
    main()
