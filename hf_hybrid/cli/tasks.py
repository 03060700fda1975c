"""
`hf-hybrid sft | dpo | grpo` and their options, beside those of TRL's configs.

Options of TRL's scripts have the same names here, or are taken under both. The module imports only the standard
library, so `--help` is fast; a test compares the options of the model with TRL's `ModelConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Optional

from hf_hybrid.arguments import option
from hf_hybrid.cli.options import Command, LaunchOptions, OptionGroup


@dataclass
class FineTunedModel(OptionGroup):
    """Which model is fine-tuned, and what of it."""

    _argument_group_name = "Model"

    model: Optional[str] = option(
        None,
        "Causal language model: an id on the Hub, a folder, or a config.json (random weights). Also "
        "--model_name_or_path.",
    )
    tokenizer: Optional[str] = option(None, "Tokenizer: id or folder. Default: that of the model.")
    model_revision: Optional[str] = option(None, "Branch, tag or commit of the model on the Hub.")
    dtype: Optional[Literal["auto", "bfloat16", "float16", "float32"]] = option(
        None,
        "Precision of the weights in memory; --bf16 sets that of the computation. auto: as the checkpoint has them. "
        "Default: float32, but with adapters auto.",
    )
    attn_implementation: Optional[str] = option(
        None, "Attention of the model, for example sdpa or flash_attention_2. Default: transformers chooses."
    )
    peft: Literal["none", "lora", "qlora"] = option(
        "none",
        "lora: train low-rank adapters, as --use_peft does. qlora: the same over a base in 4 bits, as --use_peft "
        "--load_in_4bit does.",
    )
    use_peft: bool = option(False, "Train low-rank adapters in place of all weights.")
    lora_r: int = option(16, "Rank of the adapters.", at_least=1)
    lora_alpha: int = option(32, "The adapters are scaled by lora_alpha / lora_r.", at_least=1)
    lora_dropout: float = option(
        0.0, "Dropout before the adapters. Rows share no prefix under dropout.", at_least=0, below=1
    )
    lora_target_modules: Optional[list[str]] = option(
        None, "Names of the modules that get adapters. Default: all linear layers except the head."
    )
    lora_target_parameters: Optional[list[str]] = option(None, "Names of parameters that get adapters.")
    lora_modules_to_save: Optional[list[str]] = option(None, "Modules that are trained whole beside the adapters.")
    lora_task_type: str = option("CAUSAL_LM", "Kind of task that peft notes in the adapters.")
    use_rslora: bool = option(False, "Scale the adapters by lora_alpha / sqrt(lora_r).")
    use_dora: bool = option(False, "DoRA: train magnitude and direction of the weights apart.")
    load_in_8bit: bool = option(False, "Load the base in 8 bits (bitsandbytes). With adapters only.")
    load_in_4bit: bool = option(False, "Load the base in 4 bits (bitsandbytes). With adapters only.")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = option("nf4", "Kind of 4 bits.")
    use_bnb_nested_quant: bool = option(False, "Quantise the scales of the 4 bits too. peft=qlora does.")
    bnb_4bit_quant_storage: Optional[str] = option(None, "Dtype in which the 4 bits are stored.")


@dataclass
class FineTuningData(OptionGroup):
    """What the model is fine-tuned on."""

    _argument_group_name = "Data"

    dataset: Optional[list[str]] = option(
        None,
        "Data sets, one or several: .json, .jsonl, .csv, .parquet or .txt files, folders, or ids on the Hub. Also "
        "--dataset_name.",
    )
    dataset_config: Optional[str] = option(None, "Configuration of a data set on the Hub, if it has several.")
    dataset_split: str = option("train", "Split to train on. Also --dataset_train_split.")
    dataset_weights: Optional[list[float]] = option(
        None,
        "Shares of several data sets, one each. No row is repeated: as many rows are taken as the shares allow. "
        "Default: all rows of all.",
    )
    columns: Optional[list[str]] = option(
        None, "Other names of columns, as NEW=OLD: prompt=question completion=answer."
    )
    limit: Optional[int] = option(None, "Read at most so many rows of each data set.", at_least=1)
    streaming: bool = option(
        False, "Read rows while training, in place of all before; needs max_steps. Also --dataset_streaming."
    )
    system_prompt: Optional[str] = option(None, "System message of conversations that have none.")
    eval_dataset: Optional[list[str]] = option(
        None, "Data to evaluate on. Default: eval_share of the training data, which is then not trained on."
    )
    eval_split: Optional[str] = option(
        None, "Split to evaluate on: of eval_dataset (default: train), or else of dataset. Also --dataset_test_split."
    )
    eval_share: Optional[float] = option(
        None,
        "Share of the rows to evaluate on. 0: no evaluation. Default: 0.05, and 0 in grpo and while streaming.",
        at_least=0,
        below=1,
    )


@dataclass
class RewardOptions(OptionGroup):
    """What completions are rewarded for."""

    _argument_group_name = "Rewards"

    reward: Optional[list[str]] = option(
        None,
        "Reward functions: exact_match, numeric_answer, format, module:function, or file.py:function. Also "
        "--reward_funcs.",
    )
    reward_pattern: Optional[str] = option(
        None, "Regular expression that a whole completion has to match for --reward format."
    )


class FineTuneOptions(NamedTuple):
    """The options of a fine-tuning, checked."""

    model: FineTunedModel
    data: FineTuningData
    launch: LaunchOptions
    config: Any
    """The hybrid config of the trainer."""
    undecided: frozenset[str]
    rewards: RewardOptions | None = None


_ALIASES = {
    "model_name_or_path": "model",
    "dataset_name": "dataset",
    "dataset_train_split": "dataset_split",
    "dataset_test_split": "eval_split",
    "dataset_streaming": "streaming",
    "reward_funcs": "reward",
}
_GROUPS = (FineTunedModel, FineTuningData, LaunchOptions)

SFT = Command(
    "sft",
    "Fine-tune a model on chats, instructions or texts. By default only the answers are learned.",
    _GROUPS,
    "hf_hybrid.trl.sft_dpo:HybridSFTConfig",
    "trl.SFTConfig",
    ("logging_steps", "assistant_only_loss"),
    _ALIASES,
)
DPO = Command(
    "dpo",
    "Train a model on preference pairs.",
    _GROUPS,
    "hf_hybrid.trl.sft_dpo:HybridDPOConfig",
    "trl.DPOConfig",
    aliases=_ALIASES,
)
GRPO = Command(
    "grpo",
    "Train a model by rewards for what it answers.",
    (*_GROUPS, RewardOptions),
    "hf_hybrid.trl.rl:HybridGRPOConfig",
    "trl.GRPOConfig",
    aliases=_ALIASES,
)
FINE_TUNING = {command.name: command for command in (SFT, DPO, GRPO)}
