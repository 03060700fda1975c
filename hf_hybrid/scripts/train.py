"""
What `hf-hybrid train` runs, on every process that it launches: load, train, evaluate, save, write the card, push.

Also for launchers of your own: `torchrun --nproc_per_node 8 -m hf_hybrid.scripts.train --config run.yaml`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_hybrid.cli.options import PROGRAM, TrainOptions, check_required, parse_options, set_environment

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Train as the command line says.

    Returns:
        `int`: 0, or 2 after a message on what is wrong with the options. What fails later raises.
    """
    try:
        if arguments is None:
            arguments = sys.argv[1:]
            set_environment(arguments)
        options = parse_options(arguments)
        check_required(options.model.model, options.data.dataset)
        trainer = prepare(options)
    except (ValueError, ImportError) as error:  # refusals of HybridConfig and HybridTrainer among them
        logger.debug("The error in full:", exc_info=True)
        return complain(error)
    run(trainer, options)
    return 0


def complain(error: Exception) -> int:
    """Say what is wrong, once for all processes; returns the exit status of a wrong use."""
    if int(os.environ.get("RANK", 0)) == 0:
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
    return 2


def prepare(options: TrainOptions):
    """
    Everything that is needed before the first step; on several processes the first one tokenises for all.

    Returns:
        `HybridTrainer`: Ready to train.
    """
    from transformers import set_seed

    from hf_hybrid.scripts.models import load_model, load_tokenizer
    from hf_hybrid.scripts.text_blocks import training_data
    from hf_hybrid.trainer import HybridTrainer

    args = options.config
    set_seed(args.seed)
    with args.main_process_first(desc="loading the model's files"):
        tokenizer = load_tokenizer(options.model)
        on_host = args.memory != "off"
        model = load_model(options.model, options.adapters, len(tokenizer), bf16=args.bf16, on_host=on_host)
    with args.main_process_first(desc="tokenising"):
        train_set, eval_set = training_data(options.data, tokenizer, args.data_seed or args.seed)
    return HybridTrainer(model, args, train_dataset=train_set, eval_dataset=eval_set, processing_class=tokenizer)


def run(trainer, options: TrainOptions) -> None:
    """Train, evaluate, save, write the card, and push if asked to."""
    result = trainer.train(resume_from_checkpoint=_resume(trainer.args.resume_from_checkpoint))
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    trainer.save_model()
    if trainer.eval_dataset is not None:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    card = _card_values(options)
    if trainer.args.push_to_hub:
        trainer.push_to_hub(**card)
    elif trainer.is_world_process_zero():
        trainer.create_model_card(**card)
    # A process that leaves while another still talks to it makes the launcher report a failure.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def _resume(value: str | None) -> str | bool | None:
    """`true` for the last checkpoint, `false` for none, else a folder."""
    if value is None or value.lower() in ("false", "none", ""):
        return None
    return True if value.lower() == "true" else value


def _card_values(options: TrainOptions) -> dict:
    """What only the command line knows for the model card; names on the Hub alone, no local paths."""
    values = {"tasks": "text-generation"}
    if not Path(options.data.dataset).exists():
        values["dataset_tags"] = options.data.dataset
    if not Path(options.model.model).exists():
        values["finetuned_from"] = options.model.model
    return values


if __name__ == "__main__":
    sys.exit(main())
