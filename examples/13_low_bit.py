"""
Ship a model small: train, export in low-bit formats, and see what each costs (two minutes on two CPU cores).

    pip install "hf-hybrid[export,quantization,torchao]"
    python examples/13_low_bit.py
    python examples/13_low_bit.py --formats int8 gguf-q4_1 --ternary False

It trains a small Llama on Python's language reference and exports it in each format. With `--ternary True` it trains
the same model again with ternary weights (1.58 bits), which are rounded in every step, and packs them. The first model
is packed in the same way for comparison: rounding that training did not know of. The folders are in `out/`.

Without a C++ compiler set TORCHDYNAMO_DISABLE=1, because transformers compiles the ternary layers. Every option of
HybridConfig is a flag too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pydoc_data import topics

from hf_hybrid.cli.console import quiet_imports

with quiet_imports():
    from datasets import Dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    from hf_hybrid import HybridConfig, HybridTrainer
    from hf_hybrid.export.bitnet import to_bitnet
    from hf_hybrid.export.exporter import as_text

BLOCK = 64


@dataclass
class ScriptArguments:
    formats: list[str] = field(
        default_factory=lambda: ["int8", "nf4", "gguf-q8_0"], metadata={"help": "Formats to export the model in."}
    )
    ternary: bool = field(default=True, metadata={"help": "Also train with ternary weights, and pack them."})


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with 1,024 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def small_llama(tokenizer, seed: int) -> LlamaForCausalLM:
    """Build a Llama whose rows are multiples of 64 weights, as bitsandbytes needs on a CPU."""
    set_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **sizes, **special))


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, HybridConfig))
    parser.set_defaults(
        output_dir="out/low_bit",
        max_steps=150,
        learning_rate=2e-3,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
    )
    script, args = parser.parse_args_into_dataclasses()
    texts = [topics.topics[name] for name in sorted(topics.topics)]
    tokenizer = train_tokenizer(texts)
    ids = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    rows = [ids[start : start + BLOCK] for start in range(0, len(ids) - BLOCK + 1, BLOCK)]
    split = Dataset.from_dict({"input_ids": rows, "labels": rows}).train_test_split(32, seed=args.seed)

    def train(model) -> HybridTrainer:
        data = {"train_dataset": split["train"], "eval_dataset": split["test"], "processing_class": tokenizer}
        trainer = HybridTrainer(model, args, **data)
        trainer.train()
        return trainer

    trainer = train(small_llama(tokenizer, args.seed))
    for name in script.formats:
        print(as_text(trainer.export(name)))
    if script.ternary:
        print("Rounded to three values after training:")
        print(as_text(trainer.export("bitnet", f"{args.output_dir}-rounded")))
        print("Trained with three values:")
        print(as_text(train(to_bitnet(small_llama(tokenizer, args.seed))).export("bitnet")))


if __name__ == "__main__":
    main()
