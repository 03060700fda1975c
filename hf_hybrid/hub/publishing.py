"""Publishing on the Hub: a card with every push, and a message that helps if a push fails."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from huggingface_hub import ModelCard
from huggingface_hub.constants import REPOCARD_NAME

from hf_hybrid.config import HybridConfigBase
from hf_hybrid.files import write_json, write_text
from hf_hybrid.hub.card import card_facts, render
from hf_hybrid.hub.origins import is_dataset_id, is_local
from hf_hybrid.hub.provenance import listed, trackio_url, unique
from hf_hybrid.records.redaction import clean

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_hybrid.trainer import HybridTrainerMixin
else:
    Trainer = object

logger = logging.getLogger(__name__)

BASELINE_NAME = "baseline.json"
_BASELINE = {"name": str, "eval_loss": (int, float), "backward_passes": int, "seconds": (int, float), "note": str}
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*|code|multilingual")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


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
        baseline: Any = None,
    ) -> None:
        """
        Write the model card, `README.md` in the output folder, from what the run recorded.

        [`push_to_hub`] passes its keyword arguments here. Whatever is neither given nor known is left out. What the Hub
        would refuse, such as the path of a data set, is left out with a warning. A card is written after hours of
        training, so nothing in it raises an error: if it cannot be written at all, the log says why.

        Args:
            language (`str` or `list[str]`, *optional*): ISO codes, `code` or `multilingual`.
            license (`str`, *optional*):
                The Hub's identifier, for example `apache-2.0`. Default: what the base model states on the Hub.
            tags (`str` or `list[str]`, *optional*):
                More tags. Those of the trainer, of the model, and of a card that is already there are kept.
            model_name, finetuned_from, tasks, dataset_args:
                As [`~transformers.Trainer.create_model_card`].
            dataset_tags, dataset_name (`str` or `list[str]`, *optional*):
                Ids of data sets on the Hub. Default: where `datasets` got the training and evaluation sets from.
            dataset (`str` or `list[str]`, *optional*): Names of the data sets for people.
            baseline (`dict` or `Trainer`, *optional*):
                What to compare with: a trained plain `Trainer`, or a dictionary of `name` and at least one of
                `eval_loss`, `backward_passes` and `seconds`; also `note`. It is kept as `baseline.json` in the output
                folder, where later calls find it.
        """
        if not self.is_world_process_zero():
            return
        if self.model is None:
            logger.warning("No model card is written, because the search for hyperparameters left no model.")
            return
        given = {
            **{"language": language, "license": license, "tags": tags, "model_name": model_name, "tasks": tasks},
            **{"finetuned_from": finetuned_from, "dataset_tags": dataset_tags, "dataset_name": dataset_name},
            **{"dataset": dataset, "dataset_args": dataset_args, "baseline": baseline},
        }
        try:
            self._write_card(given)
        except Exception:
            logger.exception("The model card could not be written. Training and pushing go on without it.")

    def model_card_facts(self, **given: Any) -> tuple[dict[str, Any], list[str]]:
        """
        Return what the card says, as plain values by the names that its template uses, and phrases on what is left out.

        `hf_hybrid.hub.card.render` makes the card of them. `given` are arguments of [`create_model_card`].
        """
        values = {**dict.fromkeys(("language", "license", "model_name", "finetuned_from")), **given}
        baseline, path = values.pop("baseline", None), Path(str(self.args.output_dir)) / REPOCARD_NAME
        values["datasets"] = unique(listed(values.pop("dataset_tags", None)) + listed(values.pop("dataset_name", None)))
        values |= {name: listed(values.get(name)) for name in ("tags", "tasks", "dataset", "dataset_args")}
        values, left_out = _acceptable(values)
        try:
            compared = _baseline(baseline, path.parent)
        except ValueError as error:  # of a file that is damaged, too
            compared = None
            left_out.append(f"the baseline ({error})")
        values["tags"] = _tags(self, values["tags"], path)
        return card_facts(cast("HybridTrainerMixin", self), values, compared), left_out

    def _write_card(self, given: dict[str, Any]) -> None:
        path = Path(str(self.args.output_dir)) / REPOCARD_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        facts, left_out = self.model_card_facts(**given)
        # Replaced in one move: an upload in the background may be reading it.
        write_text(path, render(facts))
        if left_out:
            logger.warning("The model card `%s` leaves out %s.", path, "; ".join(left_out))

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


# Arguments.


_ACCEPTED = {
    "datasets": (is_dataset_id, "`dataset_tags` and `dataset_name`",
                 "no id of a data set on the Hub; describe data that is elsewhere with `dataset`"),
    "language": (lambda value: _LANGUAGE.fullmatch(str(value)), "`language`",
                 "the Hub takes ISO codes, `code` and `multilingual`; English is `en`"),
    "license": (lambda value: _LICENSE.fullmatch(str(value)), "`license`",
                "the Hub takes its own identifiers, in lower case, for example `apache-2.0` or `other`"),
}  # fmt: skip
"""What the Hub takes in the metadata, by argument, and what to say of other values."""


def _acceptable(given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments without values that the Hub would refuse in a card, and a phrase for each that lost some."""
    kept, left_out = dict(given), []
    for name, (accepts, option, why) in _ACCEPTED.items():
        wrong = [value for value in listed(given[name]) if not accepts(value)]
        if wrong:
            left_out.append(f"{', '.join(f'`{clean(value)}`' for value in wrong)} of {option} ({why})")
            right = [value for value in listed(given[name]) if value not in wrong]
            kept[name] = right if name == "datasets" else right or None
    if isinstance(given["model_name"], str) and is_local(given["model_name"]):
        kept["model_name"] = Path(given["model_name"]).name  # where it lies means nothing to others
    return kept, left_out


def _class_tags(trainer: Trainer) -> list[str]:
    return [tag for cls in type(trainer).__mro__ for tag in vars(cls).get("_tag_names", ())]


def _tags(trainer: Trainer, more: list[str], card: Path) -> list[str]:
    """Tags of the trainer's classes, of the model, of the caller, and of a card that is there already."""
    there = _tags_of(card) if card.is_file() else []
    there = [tag for tag in there if not tag.startswith(("trackio:", "base_model:"))]
    model, trackio = getattr(trainer.model, "model_tags", None), trackio_url()
    return [*_class_tags(trainer), *listed(model), *more, *there, *([f"trackio:{trackio}"] if trackio else [])]


def _tags_of(card: Path) -> list[str]:
    """The tags of a card that may have been written by hand; none if its metadata cannot be read."""
    try:
        tags = ModelCard.load(card, ignore_metadata_errors=True).data.tags
    except Exception as error:
        logger.warning("The tags of `%s` cannot be read, and the new card is without them: %s", card, error)
        return []
    return [tag for tag in listed(tags) if isinstance(tag, str)]


def _baseline(given: Any, folder: Path) -> dict | None:
    """The baseline that was passed, which is then kept beside the model, or the one that was kept."""
    path = folder / BASELINE_NAME
    if given is None:
        return _checked(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
    baseline = _checked(given if isinstance(given, dict) else _measured(given))
    write_json(path, baseline)
    return baseline


def _checked(baseline: Any) -> dict:
    """The baseline, if a run can be compared with it."""
    keys = ", ".join(f"`{key}`" for key in _BASELINE)
    if not isinstance(baseline, dict):
        raise ValueError(f"`{BASELINE_NAME}` holds no baseline. It takes {keys}.")
    for key, value in baseline.items():
        if not isinstance(value, _BASELINE.get(key, ())) or isinstance(value, bool):
            raise ValueError(f"`baseline` cannot hold `{key}={value!r}`. It takes {keys}: names and notes, numbers.")
    if not baseline.get("name") or len(baseline) < 2:
        raise ValueError(f"`baseline` needs a `name` and at least one number, got `{baseline}`. It takes {keys}.")
    return baseline


def _measured(trainer: Any) -> dict:
    """What a trained plain `Trainer` reached."""
    log = getattr(getattr(trainer, "state", None), "log_history", ())
    last = {key: value for entry in log for key, value in entry.items()}
    if "train_runtime" not in last:
        raise ValueError(
            f"`baseline` must be a trained `Trainer` or a dictionary, got `{type(trainer).__name__}` without a "
            "finished training. Call its `train()` and `evaluate()` first."
        )
    steps, args = trainer.state.global_step, trainer.args
    found = {
        "name": type(trainer).__name__,
        "backward_passes": steps * args.gradient_accumulation_steps,
        "seconds": last["train_runtime"],
        "note": f"{steps:,} steps, learning rate {args.learning_rate:g}",
    }
    return found | {key: value for key, value in last.items() if key == "eval_loss"}
