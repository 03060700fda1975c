"""Publishing on the Hub: a card with every push, and a message that helps if a push fails."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard
from huggingface_hub.constants import REPOCARD_NAME

from hf_hybrid.config import HybridConfigBase
from hf_hybrid.files import write_text
from hf_hybrid.hub import provenance
from hf_hybrid.hub.card import card_facts, is_local, is_repo_id, render
from hf_hybrid.hub.provenance import listed, unique

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object

logger = logging.getLogger(__name__)


class PublishingMixin(Trainer):
    """
    Model cards and pushing, for any `Trainer` subclass that has `hybrid_summary()`.

    The tags of all its classes are also put on the model, for `model.push_to_hub`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._tag(self.model)
        self._watched_uploads = set()
        kept_out = isinstance(self.args, HybridConfigBase)
        if self.args.hub_token and not kept_out and self.is_world_process_zero():
            logger.warning(
                "`hub_token` is part of the arguments, which Trainer writes to `training_args.bin` and pushes with the "
                "model: whoever can read the repository can read the token. Leave it out, and log in with `hf auth "
                "login` or set `HF_TOKEN`. A `HybridConfig` keeps it out of that file."
            )

    def _tag(self, model: Any) -> None:
        if hasattr(model, "add_model_tags"):
            model.add_model_tags(_class_tags(self))

    def create_model_card(
        self,
        language: str | list[str] | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
        dataset_name: str | list[str] | None = None,
    ) -> None:
        """
        Write the model card, `README.md` in the output folder, from what the run recorded. The arguments are those of
        [`~transformers.Trainer.create_model_card`], and `dataset_name` as in TRL; [`push_to_hub`] passes its keyword
        arguments here.

        Whatever is neither passed nor known is left out, and so are data sets that are paths. Tags of the trainer, of
        the model, and of a card that is already there are kept. A card is written after hours of training, so nothing
        in it raises an error: if it cannot be written, the log says why.
        """
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        if not self.is_world_process_zero():
            return
        if self.model is None:
            logger.warning("No model card is written, because the search for hyperparameters left no model.")
            return
        try:
            path = Path(str(self.args.output_dir)) / REPOCARD_NAME
            path.parent.mkdir(parents=True, exist_ok=True)
            # Replaced in one move: an upload in the background may be reading it.
            write_text(path, render(self.model_card_facts(**arguments)))
        except Exception:
            logger.exception("The model card could not be written. Training and pushing go on without it.")

    def environment(self) -> dict[str, dict[str, str]]:
        """Return the hardware, and the versions of packages, as the card and the first line of the log have them."""
        args = self.args
        hardware = provenance.hardware(args.device.type, args.world_size, max(args.world_size, args.n_gpu))
        more = ("peft" if hasattr(self.model, "peft_config") else "", "trl" if hasattr(self, "_name") else "")
        return {"hardware": hardware, "versions": provenance.versions(*more)}

    def model_card_facts(self, **arguments: Any) -> dict[str, Any]:
        """
        Return what the card says, by the names that its template uses; [`~hf_hybrid.hub.card.render`] makes the card of
        it. The arguments are those of [`create_model_card`].
        """
        values: dict[str, Any] = dict.fromkeys(("language", "license", "model_name", "finetuned_from")) | arguments
        datasets = unique(listed(values.pop("dataset_tags", None)) + listed(values.pop("dataset_name", None)))
        values["datasets"] = [name for name in datasets if is_repo_id(name) and not is_local(name)]
        values |= {name: listed(values.get(name)) for name in ("tags", "tasks", "dataset", "dataset_args")}
        if values["model_name"] and is_local(values["model_name"]):
            values["model_name"] = Path(values["model_name"]).name  # where it lies means nothing to others
        values["tags"] = _tags(self, values["tags"], Path(str(self.args.output_dir)) / REPOCARD_NAME)
        return card_facts(self, values)

    def push_to_hub(self, *args, **kwargs):
        """
        As [`~transformers.Trainer.push_to_hub`], with the card of [`create_model_card`], which takes the other keyword
        arguments. If the upload fails, everything is in the output folder, and the log says how to push it again.
        """
        try:
            return super().push_to_hub(*args, **kwargs)
        except Exception as error:
            report_failed_push(self, error)
            raise

    def _refresh_card(self) -> None:
        """Write the card before a push collects the files."""
        self.create_model_card(model_name=(self.hub_model_id or "").split("/")[-1] or None)

    def _watch_uploads(self) -> None:
        """Report uploads that fail in the background: Trainer starts those of a checkpoint and never asks again."""
        jobs = getattr(getattr(self, "push_in_progress", None), "jobs", [])
        for job in set(jobs) - self._watched_uploads:
            self._watched_uploads.add(job)
            job.add_done_callback(self._report_upload)

    def _report_upload(self, job) -> None:
        if not job.cancelled() and job.exception() is not None:
            report_failed_push(self, job.exception())


def report_failed_push(trainer: Trainer, error: BaseException) -> None:
    """Log where the model is, and how to push it again."""
    folder, repo = trainer.args.output_dir, trainer.hub_model_id or trainer.args.hub_model_id
    lines = [line.strip() for line in str(error).splitlines() if not line.startswith("For more information")]
    logger.error(
        "Pushing to `%s` failed: %s. Nothing is lost: what was saved is in `%s`. Push it again with "
        "`trainer.push_to_hub()`, or with `hf upload %s %s`.",
        *(repo, " ".join(filter(None, lines)).rstrip("."), folder, repo or "REPO_ID", folder),
    )


def _class_tags(trainer: Trainer) -> list[str]:
    return [tag for cls in type(trainer).__mro__ for tag in vars(cls).get("_tag_names", ())]


def _tags(trainer: Trainer, more: list[str], card: Path) -> list[str]:
    """Tags of the trainer's classes, of the model, of the caller, and of a card that is there already."""
    there: list[str] = []
    if card.is_file():
        try:
            there = listed(ModelCard.load(card, ignore_metadata_errors=True).data.tags)
        except Exception as error:  # it may have been written by hand
            logger.warning("The tags of `%s` cannot be read, and the new card is without them: %s", card, error)
    there = [tag for tag in there if isinstance(tag, str) and not tag.startswith("base_model:")]
    return [*_class_tags(trainer), *listed(getattr(trainer.model, "model_tags", None)), *more, *there]
