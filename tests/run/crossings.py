"""
A user's code in the places where people put it, in trainings of Trainer or TRL and of this package on the same seed.

A [`Crossing`] names a trainer, what is trained, a place, a way and a change of `rig/user_code.py`:

| way | the user's code stands |
|---|---|
| above | in a subclass of the trainer |
| below | in a class of the user's that `HybridTrainerMixin` is put in front of |
| between | in a class of the user's beside which one of this package's trainers for TRL is put |
| object | as an attribute of the trainer, or of its model |
| class | on the class of transformers or TRL, or of the model |
| before, after | in hooks that are put before the trainer is made, and after it |
"""

import functools
from typing import NamedTuple

import torch
import transformers
import trl
from conftest import config_values, losses, weights
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from pytest import MonkeyPatch
from rig import user_code
from rig.rollouts import TOKENIZER, policy, prompts, reward
from rig.user_code import subclass
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import hf_hybrid


class Crossing(NamedTuple):
    """See the table of this module."""

    trainer: str
    weights: str
    place: str
    change: str
    way: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.trainer, self.weights, self.place, self.way, self.change)))


class Trained(NamedTuple):
    """What a training left."""

    weights: dict
    losses: list[float]
    notes: list
    summary: dict


# Rows.


def rows(count=16, alike=20):
    """Rows that begin alike and differ in length; the first four tokens are not learned."""
    draw, made = torch.Generator().manual_seed(0), []
    for number in range(count):
        ids = torch.randint(5, len(TOKENIZER), (alike + 4 + number * 5 % 12,), generator=draw).tolist()
        ids[:alike] = [5 + place % 50 for place in range(alike)]
        made.append({"input_ids": ids, "labels": [user_code.IGNORED] * 4 + ids[4:]})
    return made


def collate(batch):
    width = max(len(row["input_ids"]) for row in batch)

    def pad(name, filler):
        return torch.tensor([row[name] + [filler] * (width - len(row[name])) for row in batch])

    mask = torch.tensor([[int(place < len(row["input_ids"])) for place in range(width)] for row in batch])
    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", user_code.IGNORED), "attention_mask": mask}


def text(seed, count):
    draw = torch.Generator().manual_seed(seed)
    return "".join("abcdefgh"[int(torch.randint(8, (1,), generator=draw))] for _ in range(count))


PAIRS = [
    {"prompt": text(n // 2, 18), "chosen": text(n + 50, 3 + n % 5), "rejected": text(n + 90, 4 + n % 3)}
    for n in range(12)
]
JUDGED = [
    {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
    for pair in PAIRS
    for side in ("chosen", "rejected")
]

# Trainers.

KINDS = {
    "trainer": (transformers.Trainer, transformers.TrainingArguments, hf_hybrid.HybridTrainer, hf_hybrid.HybridConfig),
    "reward": (trl.RewardTrainer, trl.RewardConfig, None, trl.RewardConfig),
    "kto": (trl.KTOTrainer, trl.KTOConfig, None, trl.KTOConfig),
} | {
    name.lower(): tuple(
        getattr(*of) for of in (
            (trl, f"{name}Trainer"), (trl, f"{name}Config"),
            (hf_hybrid, f"Hybrid{name}Trainer"), (hf_hybrid, f"Hybrid{name}Config"),
        )
    )
    for name in ("SFT", "DPO", "GRPO")
}  # fmt: skip
"""The trainer and its options, and ours. Others have the mixin."""
OPTIONS = {
    "trainer": {"learning_rate": 0.02, "remove_unused_columns": False},
    "sft": {"learning_rate": 0.02},
    "dpo": {"learning_rate": 1.0, "max_length": None},
    "grpo": {"learning_rate": 0.1, "num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 6},
    "reward": {"learning_rate": 0.5},
    "kto": {"learning_rate": 1.0, "per_device_train_batch_size": 4},
}
MORE = {
    "trainer": lambda: {"train_dataset": rows(), "data_collator": collate},
    "sft": lambda: {"train_dataset": Dataset.from_list(rows()), "processing_class": TOKENIZER},
    "dpo": lambda: {"train_dataset": Dataset.from_list(PAIRS), "processing_class": TOKENIZER},
    "grpo": lambda: {"train_dataset": prompts(0.5), "processing_class": TOKENIZER, "reward_funcs": reward},
    "reward": lambda: {"train_dataset": Dataset.from_list(PAIRS), "processing_class": TOKENIZER},
    "kto": lambda: {"train_dataset": Dataset.from_list(JUDGED), "processing_class": TOKENIZER},
}
LORA_RATES = {"trainer": 0.005, "sft": 0.005, "dpo": 0.03, "grpo": 0.05, "reward": 0.01, "kto": 0.05}
"""At which bf16 rounds less than 1e-4 of a weight away."""
SIZES = {
    "vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": None, "initializer_range": 0.1,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}


def make_model(trainer, weights, seed=0):
    torch.manual_seed(seed)
    if weights in ("experts", "balanced"):
        return MixtralForCausalLM(MixtralConfig(**SIZES, **EXPERTS, output_router_logits=weights == "balanced"))
    if trainer == "grpo":
        model = policy()
    elif weights == "reads_keys":
        model = user_code.reads_keys(LlamaForCausalLM)(LlamaConfig(**SIZES))
    else:
        kind = transformers.LlamaForSequenceClassification if trainer == "reward" else LlamaForCausalLM
        model = kind(LlamaConfig(**SIZES, **({"num_labels": 1} if trainer == "reward" else {})))
    if weights in ("lora", "lora_fp32"):
        task = "SEQ_CLS" if trainer == "reward" else "CAUSAL_LM"
        torch.manual_seed(1)
        model = get_peft_model(
            model, LoraConfig(task, r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
    return model


# Places.

METHODS = (
    "training_step", "_prepare_inputs", "compute_loss", "_compute_loss", "get_batch_samples", "_get_num_items_in_batch",
    "_clip_grad_norm", "_calculate_rewards", "_generate_and_score_completions", "_get_per_token_logps_and_entropies",
)  # fmt: skip


def as_method(place, change):
    """Return a function of the trainer, the method below and its arguments, that makes a change there."""
    batches = user_code.BATCHES
    if place == "get_batch_samples":
        if change in user_code.WINDOWS:
            return lambda trainer, own, *args: user_code.WINDOWS[change](*own(*args))

        def window(trainer, own, *args):
            made, items = own(*args)
            return [batches[change](batch) for batch in made], items

        return window
    if change in batches and place == "_prepare_inputs":
        return lambda trainer, own, inputs: batches[change](own(inputs))
    if change in batches:
        return lambda trainer, own, model, inputs, *args, **kw: own(model, batches[change](inputs), *args, **kw)
    if (weigh := user_code.LOSSES.get(change)) is not None:

        def of_loss(trainer, own, model, *args, **kwargs):
            loss = own(model, *args, **kwargs)
            return (weigh(loss[0], model), *loss[1:]) if isinstance(loss, tuple) else weigh(loss, model)

        return of_loss
    return {**user_code.STEPS, **user_code.WHOLE_LOSSES, **user_code.OTHERS}[change]


def on_object(thing, name, change):
    setattr(thing, name, functools.partial(change, thing, getattr(thing, name)))


def on_class(patch, kind, name, change):
    owner = next(owner for owner in kind.__mro__ if name in vars(owner))
    own = vars(owner)[name]

    def method(self, *args, **kwargs):
        return change(self, functools.partial(own, self), *args, **kwargs)

    patch.setattr(owner, name, method)


def as_forward(change):
    """Return a function of a model, its forward and its arguments."""
    if (of_batch := user_code.BATCHES.get(change)) is not None:
        return lambda model, own, *args, **batch: own(*args, **(of_batch(batch) if "labels" in batch else batch))
    weigh = user_code.LOSSES[change]

    def forward(model, own, *args, **kwargs):
        outputs = own(*args, **kwargs)
        if model.training and outputs.loss is not None:
            outputs.loss = weigh(outputs.loss, model)
        return outputs

    return forward


def hook_forward(model, change):
    forward = as_forward(change)
    if change in user_code.LOSSES:
        model.register_forward_hook(lambda module, inputs, outputs: forward(module, lambda: outputs))
    else:
        model.register_forward_pre_hook(
            lambda module, args, kwargs: (args, forward(module, dict, **kwargs)), with_kwargs=True
        )


def kind_of(crossing, hybrid):
    """Return the trainer's class and that of its options."""
    theirs, their_config, ours, config = KINDS[crossing.trainer]
    change = as_method(crossing.place, crossing.change) if crossing.place in METHODS else None
    if crossing.way in ("below", "between"):
        theirs = subclass(theirs, crossing.place, change)
    if not hybrid:
        kind, config = theirs, their_config
    elif crossing.way == "below" or ours is None:
        kind = type("OverTheUsers", (hf_hybrid.HybridTrainerMixin, theirs), {})
    elif crossing.way == "between":
        kind = type("BesideTheUsers", (ours, theirs), {})
    else:
        kind = ours
    return (subclass(kind, crossing.place, change) if crossing.way == "above" else kind), config


def put(trainer, crossing):
    """Put the user's code onto a trainer and its model."""
    place, change, way = crossing.place, crossing.change, crossing.way
    if place in METHODS and way == "object":
        on_object(trainer, place, as_method(place, change))
    elif place == "backward":
        own = trainer.accelerator.backward
        trainer.accelerator.backward = functools.partial(user_code.OTHERS[change], trainer, own)
    elif place == "collator":
        collator = trainer.data_collator
        trainer.data_collator = lambda rows: user_code.BATCHES[change](collator(rows))
    elif place == "forward" and way == "object":
        on_object(trainer.model, "forward", as_forward(change))
    elif place == "callback":
        trainer.add_callback(user_code.callback(*user_code.CALLBACKS[change]))


def put_hooks(model, crossing):
    if crossing.place == "hook":
        user_code.HOOKS[crossing.change](model)
    elif crossing.place == "forward":
        hook_forward(model, crossing.change)


def train(crossing, hybrid, folder, **options):
    """Make a trainer with the user's code, and train."""
    model = make_model(crossing.trainer, crossing.weights)
    kind, config = kind_of(crossing, hybrid)
    values = {
        "max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "optim": "sgd",
        "lr_scheduler_type": "constant", "max_grad_norm": 1e9, "bf16": crossing.weights == "lora",
        "gradient_checkpointing": False, **OPTIONS[crossing.trainer], **options,
    }  # fmt: skip
    if crossing.weights == "whole":
        values.update(per_device_train_batch_size=4, gradient_accumulation_steps=1)
    if crossing.weights in ("lora", "lora_fp32"):
        values["learning_rate"] = LORA_RATES[crossing.trainer]
    if hybrid and crossing.weights == "stream":
        values["memory"] = "stream"
    with MonkeyPatch.context() as patch:
        if crossing.way == "class" and crossing.place in METHODS:
            change = as_method(crossing.place, crossing.change)
            on_class(patch, KINDS[crossing.trainer][0], crossing.place, change)
        elif crossing.way == "class":
            on_class(patch, type(model), "forward", as_forward(crossing.change))
        if crossing.way == "before":
            put_hooks(model, crossing)
        torch.manual_seed(0)
        more = MORE[crossing.trainer]()
        if crossing.trainer in ("dpo", "kto") and crossing.weights != "lora":
            more["ref_model"] = make_model(crossing.trainer, crossing.weights, seed=1)
        trainer = kind(model=model, args=config(**config_values(folder, **values)), **more)
        if crossing.way == "after":
            put_hooks(trainer.model, crossing)
        put(trainer, crossing)
        trainer.train()
    return trainer


def left_by(trainer):
    """Return what a training left."""
    summary = trainer.hybrid_summary() if hasattr(trainer, "hybrid_summary") else {}
    notes = user_code.notes_of(trainer) + user_code.notes_of(trainer.model)
    return Trained(weights(trainer.model), losses(trainer), notes, summary)


def apart(first, second):
    """Return the largest difference of a weight that both have."""
    both = first.weights.keys() & second.weights.keys()
    return max((first.weights[name] - second.weights[name]).abs().max().item() for name in both)
