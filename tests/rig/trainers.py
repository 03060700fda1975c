"""Trainers of the tiny model on `ByteText`, for tests in which an option or two matter."""

import torch
from conftest import ByteText, config_values, hybrid_config, tiny_model

from hf_hybrid import HybridTrainer

ARGUMENTS = ("data_collator", "train_dataset", "eval_dataset", "callbacks", "optimizers", "parts", "direction")
ARGUMENTS += ("probe_dataset", "processing_class", "compute_loss_func", "compute_metrics")


def build(folder, kind=HybridTrainer, config=hybrid_config, *, model=None, samples=400, model_seed=None, **options):
    """
    Make a trainer.

    Args:
        folder: Its output.
        kind: Its class.
        config (`Callable` or `type`): From the folder and options to its arguments, or their class.
        model: Default: the tiny one.
        samples (`int`): Rows of the training data, if `train_dataset` is not given.
        model_seed (`int`, *optional*): Of the tiny model and of what draws until the training.
        options: Options, and [`ARGUMENTS`] of the trainer. A `direction` that is a name is an option.
    """
    if model_seed is not None:
        torch.manual_seed(model_seed)
    own = [name for name in ARGUMENTS if name in options and not isinstance(options[name], str)]
    arguments = {name: options.pop(name) for name in own}
    data = arguments.pop("train_dataset", None)
    data = ByteText(samples) if data is None else data
    args = config(**config_values(folder, **options)) if isinstance(config, type) else config(folder, **options)
    return kind(tiny_model() if model is None else model, args, train_dataset=data, **arguments)


def train(folder, *args, resume=None, **options):
    """Make a trainer as [`build`] does, and train."""
    trainer = build(folder, *args, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer
