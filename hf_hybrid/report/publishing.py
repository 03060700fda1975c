"""Publishing on the Hub: a card with every push, and a message that helps if a push fails."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from huggingface_hub.constants import REPOCARD_NAME

from hf_hybrid.checkpoint import write_json, write_text
from hf_hybrid.report.card import card_facts, render
from hf_hybrid.report.origins import is_repo_id
from hf_hybrid.report.provenance import listed, trackio_url, unique

logger = logging.getLogger(__name__)

BASELINE_NAME = "baseline.json"
_BASELINE = {"name": str, "eval_loss": (int, float), "backward_passes": int, "seconds": (int, float), "note": str}
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*|code|multilingual")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


class PublishingMixin:
    """
    Model cards and pushing, for any `Trainer` subclass that has `hybrid_summary()`.

    The tags of all its classes are also put on the model, for `model.push_to_hub`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if hasattr(self.model, "add_model_tags"):
            self.model.add_model_tags(_class_tags(self))
        self._watched_uploads = set()
        if self.args.hub_token and self.is_world_process_zero():
            logger.warning(
                "`hub_token` is part of the arguments, which Trainer writes to `training_args.bin` and pushes with the "
                "model: whoever can read the repository can read the token. Leave it out, and log in with `hf auth "
                "login` or set `HF_TOKEN`."
            )

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

        [`push_to_hub`] passes its keyword arguments here. Whatever is neither given nor known is left out.

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

        Raises:
            ValueError: If the Hub would refuse an argument. The message says which and why.
        """
        if not self.is_world_process_zero():
            return
        folder, path = Path(self.args.output_dir), Path(self.args.output_dir) / REPOCARD_NAME
        folder.mkdir(parents=True, exist_ok=True)
        given = {
            "language": language,
            "license": license,
            "tags": _tags(self, listed(tags), path),
            "model_name": model_name,
            "finetuned_from": finetuned_from,
            "tasks": listed(tasks),
            "datasets": unique([*listed(dataset_tags), *listed(dataset_name)]),
            "dataset": listed(dataset),
            "dataset_args": listed(dataset_args),
        }
        _check(given)
        # Replaced in one move: an upload in the background may be reading it.
        write_text(path, render(card_facts(self, given, _baseline(baseline, folder))))

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

    def _write_card(self) -> None:
        """Write the card before a push collects the files."""
        try:
            self.create_model_card(model_name=(self.hub_model_id or "").split("/")[-1] or None)
        except Exception:
            logger.exception("The model card could not be written. Training and the push go on without it.")

    def _watch_uploads(self) -> None:
        """Report uploads that fail in the background: Trainer starts those of a checkpoint and never asks again."""
        jobs = getattr(getattr(self, "push_in_progress", None), "jobs", [])
        for job in set(jobs) - self._watched_uploads:
            self._watched_uploads.add(job)
            job.add_done_callback(self._report_upload)

    def _report_upload(self, job) -> None:
        if not job.cancelled() and job.exception() is not None:
            report_failed_push(self, job.exception())


def report_failed_push(trainer, error: BaseException) -> None:
    """Log where the model is, and how to push it again."""
    folder, repo = trainer.args.output_dir, trainer.hub_model_id or trainer.args.hub_model_id
    lines = [line.strip() for line in str(error).splitlines() if not line.startswith("For more information")]
    logger.error(
        "Pushing to `%s` failed: %s. Nothing is lost: what was saved is in `%s`. Push it again with "
        "`trainer.push_to_hub()`, or with `hf upload %s %s`.",
        *(repo, " ".join(filter(None, lines)).rstrip("."), folder, repo or "REPO_ID", folder),
    )


# Arguments.


def _check(given: dict[str, Any]) -> None:
    """Refuse what the Hub would refuse when the card arrives there."""
    for option, values, accepts, must, remedy in (
        ("`language`", given["language"], _LANGUAGE.fullmatch, "hold ISO codes, `code` or `multilingual`",
         "English, for example, is `en`."),
        ("`license`", given["license"], _LICENSE.fullmatch, "be an identifier of the Hub's, in lower case",
         "The Apache License, for example, is `apache-2.0`. One without an identifier is `other`."),
        ("`dataset_tags` and `dataset_name`", given["datasets"], is_repo_id, "hold ids of data sets on the Hub",
         "Describe data that is elsewhere with `dataset`."),
    ):  # fmt: skip
        if wrong := [value for value in listed(values) if not accepts(value)]:
            raise ValueError(f"{option} must {must}, got `{wrong[0]}`: the Hub refuses other values. {remedy}")


def _class_tags(trainer) -> list[str]:
    return [tag for cls in type(trainer).__mro__ for tag in vars(cls).get("_tag_names", ())]


def _tags(trainer, more: list[str], card: Path) -> list[str]:
    """Tags of the trainer's classes, of the model, of the caller, and of a card that is there already."""
    there = (ModelCard.load(card, ignore_metadata_errors=True).data.tags or []) if card.is_file() else []
    there = [tag for tag in there if not tag.startswith(("trackio:", "base_model:"))]
    model, trackio = getattr(trainer.model, "model_tags", None), trackio_url()
    return [*_class_tags(trainer), *listed(model), *more, *there, *([f"trackio:{trackio}"] if trackio else [])]


def _baseline(given: Any, folder: Path) -> dict | None:
    """The baseline that was passed, which is then kept beside the model, or the one that was kept."""
    path = folder / BASELINE_NAME
    if given is None:
        return _checked(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
    baseline = _checked(given if isinstance(given, dict) else _measured(given))
    write_json(path, baseline)
    return baseline


def _checked(baseline: dict) -> dict:
    """The baseline, if a run can be compared with it."""
    keys = ", ".join(f"`{key}`" for key in _BASELINE)
    for key, value in baseline.items():
        if not isinstance(value, _BASELINE.get(key, ())) or isinstance(value, bool):
            raise ValueError(f"`baseline` cannot hold `{key}={value!r}`. It takes {keys}: names and notes, numbers.")
    if not baseline.get("name") or len(baseline) < 2:
        raise ValueError(f"`baseline` needs a `name` and at least one number, got `{baseline}`. It takes {keys}.")
    return baseline


def _measured(trainer) -> dict:
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
