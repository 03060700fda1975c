"""
Train a small Llama, write its model card and push both to the Hub (under a minute on two CPU cores).

    python examples/09_push_to_hub.py
    python examples/09_push_to_hub.py --repo_id your-name/small-llama --dry_run False

The first command writes the folder and the card `out/push_to_hub/README.md`. It needs no account. The second command
pushes them. Log in first with `hf auth login`, or set HF_TOKEN. `--hub_private_repo True` makes the repository private.
`--push_to_hub True` also pushes during training. Every other option of HybridConfig is a flag too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics
from typing import Optional

from hf_hybrid.cli.console import quiet_imports

with quiet_imports():
    from datasets import Dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    from hf_hybrid import HybridConfig, HybridTrainer

BLOCK = 64


@dataclass
class ScriptArguments:
    repo_id: Optional[str] = field(default=None, metadata={"help": "Repository to push to, as your-name/model-name."})
    dry_run: bool = field(default=True, metadata={"help": "Write the folder and the card, and push nothing."})
    license: Optional[str] = field(default=None, metadata={"help": "Licence of the model, for example apache-2.0."})


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
    """Build a Llama of half a million parameters with random weights."""
    set_seed(seed)
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), max_position_embeddings=256, tie_word_embeddings=True, **sizes, **special
        )
    )


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, HybridConfig))
    parser.set_defaults(
        output_dir="out/push_to_hub",
        max_steps=120,
        learning_rate=2e-3,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
    )
    script, args = parser.parse_args_into_dataclasses()
    pushing = args.push_to_hub or not script.dry_run
    if pushing and script.repo_id is None:
        parser.error("--repo_id is needed to push, for example --repo_id your-name/small-llama")
    args.hub_model_id = script.repo_id

    texts = [topics.topics[name] for name in sorted(topics.topics)]  # the texts of Python's `help()`
    tokenizer = train_tokenizer(texts)
    ids = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    rows = [ids[start : start + BLOCK] for start in range(0, len(ids) - BLOCK, BLOCK)]
    split = Dataset.from_dict({"input_ids": rows, "labels": rows}).train_test_split(0.05, seed=args.seed)
    data = {"train_dataset": split["train"], "eval_dataset": split["test"]}

    trainer = HybridTrainer(small_llama(tokenizer, args.seed), args, processing_class=tokenizer, **data)
    trainer.train()
    trainer.evaluate()

    card = {"language": "en", "license": script.license, "dataset": "the texts of Python's help()"}
    if script.dry_run:
        trainer.save_model()
        trainer.create_model_card(**card)
        print(f"Written to {args.output_dir}; nothing was pushed. The card: {Path(args.output_dir) / 'README.md'}")
    else:
        trainer.push_to_hub(**card)
        print(f"Pushed to {trainer.hub_model_id}.")


if __name__ == "__main__":
    main()
