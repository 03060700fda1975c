"""What a Trainer does for the Hub: writes the card, pushes, and says what to do when pushing fails."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from huggingface_hub.constants import REPOCARD_NAME

from hf_hybrid.arguments import HybridArguments, hybrid_values
from hf_hybrid.config import config_values
from hf_hybrid.report.card import render
from hf_hybrid.report.facts import is_repo_id, license_of, run_facts
from hf_hybrid.report.provenance import trackio_url
from hf_hybrid.state_io import write_json

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
                More tags; those of the trainer, of the model, and of a card that is already there are kept.
            model_name, finetuned_from, tasks, dataset_args:
                As [`~transformers.Trainer.create_model_card`].
            dataset_tags, dataset_name (`str` or `list[str]`, *optional*):
                Ids of data sets on the Hub. Default: where `datasets` got the training and evaluation sets from.
            dataset (`str` or `list[str]`, *optional*): Names of the data sets for people.
            baseline (`dict` or `Trainer`, *optional*):
                What to compare with: a trained plain `Trainer`, or a dictionary of `name` and at least one of
                `eval_loss`, `backward_passes` and `seconds`; also `note`. It is kept as `baseline.json` in the output
                folder, and found there by later calls.

        Raises:
            ValueError: If an argument cannot stand in a card; the message says which and why.
        """
        if not self.is_world_process_zero():
            return
        given = {
            "language": _checked_language(language),
            "license": _checked_license(license),
            "tags": _listed(tags),
            "datasets": _checked_ids([*_listed(dataset_tags), *_listed(dataset_name)]),
            "dataset_names": _listed(dataset),
            "dataset_args": _listed(dataset_args),
        }
        write_card(self, given, baseline, name=model_name, finetuned_from=finetuned_from, tasks=tasks)

    def push_to_hub(self, *args, **kwargs):
        """
        As [`~transformers.Trainer.push_to_hub`], with the card of [`create_model_card`], which takes the other keyword
        arguments. If the upload fails, everything is in the output folder, and the log says how to push it again.
        """
        self._warn_of_token()
        try:
            return super().push_to_hub(*args, **kwargs)
        except Exception as error:
            self._report_failed_push(error)
            raise

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._warn_of_token()
        self._report_failed_jobs()
        busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        skipped = self.args.hub_strategy == "end" or (busy and not self.args.hub_always_push)
        if self.is_world_process_zero() and not skipped:
            try:
                self.create_model_card(model_name=(self.hub_model_id or "").split("/")[-1] or None)
            except Exception:
                logger.exception("The model card could not be written. Training and the push go on without it.")
        super()._push_from_checkpoint(checkpoint_folder)

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        self._report_failed_jobs()

    def _report_failed_jobs(self) -> None:
        """Uploads in the background fail silently: Trainer waits for them and asks for no result."""
        jobs = getattr(getattr(self, "push_in_progress", None), "jobs", [])
        for job in [job for job in jobs if job.done() and not job.cancelled()]:
            if job.exception() is not None:
                self._report_failed_push(job.exception())
                jobs.remove(job)

    def _report_failed_push(self, error: BaseException) -> None:
        folder, repo = self.args.output_dir, getattr(self, "hub_model_id", None) or self.args.hub_model_id
        lines = [line.strip() for line in str(error).splitlines()]
        what = " ".join(line for line in lines if line and not line.startswith("For more information")).rstrip(".")
        logger.error(
            "Pushing to `%s` failed: %s. Nothing is lost: what was saved is in `%s`. Push it again with "
            "`trainer.push_to_hub()`, or with `hf upload %s %s`.",
            repo,
            what,
            folder,
            repo or "REPO_ID",
            folder,
        )

    def _warn_of_token(self) -> None:
        if self.args.hub_token and not getattr(self, "_warned_of_token", False):
            self._warned_of_token = True
            logger.warning(
                "`hub_token` is part of the arguments, which Trainer writes to `training_args.bin` and pushes with the "
                "model: whoever can read the repository can read the token. Leave it out, and log in with `hf auth "
                "login` or set `HF_TOKEN`."
            )


def write_card(trainer, given: dict[str, Any], baseline: Any, **overrides) -> None:
    """
    Write `README.md` into the output folder of `trainer`.

    Args:
        given: What the caller knows, as [`~hf_hybrid.report.metadata.metadata`] takes it.
        baseline: As [`~PublishingMixin.create_model_card`] takes it.
        overrides: `name`, `finetuned_from` and `tasks` of [`~hf_hybrid.report.facts.run_facts`].
    """
    folder = Path(trainer.args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    found = _baseline(baseline, folder)
    options, others = _changed_options(trainer.args, trainer.hybrid_args)
    facts = run_facts(trainer, hybrid_options=options, other_options=others, **overrides)
    if given["license"] is None and facts.model.base:
        given.update(license_of(facts.model.base))
    given["tags"] = _tags(trainer, given["tags"], folder / REPOCARD_NAME)
    # In one move: an upload in the background may be reading it.
    unfinished = folder / f"_{REPOCARD_NAME}"
    unfinished.write_text(render(facts, given, found), encoding="utf-8")
    os.replace(unfinished, folder / REPOCARD_NAME)


def _listed(value: str | list[str] | tuple[str, ...] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _checked_language(language: str | list[str] | None) -> str | list[str] | None:
    for code in _listed(language):
        if not _LANGUAGE.fullmatch(code):
            raise ValueError(
                f"`language` must hold ISO codes, `code` or `multilingual`, got `{code}`: the Hub refuses cards with "
                "other values. English, for example, is `en`."
            )
    return language or None


def _checked_license(license: str | None) -> str | None:
    if license is not None and not _LICENSE.fullmatch(license):
        raise ValueError(
            f"`license` must be an identifier of the Hub's, in lower case, got `{license}`. The Apache License, for "
            "example, is `apache-2.0`; one that the Hub has no identifier for is `other`."
        )
    return license


def _checked_ids(ids: list[str]) -> list[str]:
    for name in ids:
        if not is_repo_id(name):
            raise ValueError(
                f"`dataset_tags` and `dataset_name` must hold ids of data sets on the Hub, got `{name}`: the Hub "
                "refuses cards with other values. Describe data that is elsewhere with `dataset`."
            )
    return list(dict.fromkeys(ids))


def _changed_options(args, hybrid: HybridArguments) -> tuple[dict, dict]:
    changed, ours = config_values(args), hybrid_values(hybrid)
    return {k: v for k, v in changed.items() if k in ours}, {k: v for k, v in changed.items() if k not in ours}


def _class_tags(trainer) -> list[str]:
    return [tag for cls in type(trainer).__mro__ for tag in vars(cls).get("_tag_names", ())]


def _tags(trainer, more: list[str], card: Path) -> list[str]:
    """Those of the trainer's classes, of the model, of the caller, and of a card that is there already."""
    model = getattr(trainer.model, "model_tags", None) or []
    there = []
    if card.is_file():
        there = ModelCard.load(card, ignore_metadata_errors=True).data.tags or []
        there = [tag for tag in there if not tag.startswith(("trackio:", "base_model:"))]
    trackio = trackio_url()
    return [*_class_tags(trainer), *_listed(model), *more, *there, *([f"trackio:{trackio}"] if trackio else [])]


# Baselines.


def _baseline(given: Any, folder: Path) -> dict | None:
    """What was passed, which is then kept beside the model, or what was kept."""
    path = folder / BASELINE_NAME
    if given is None:
        return check_baseline(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
    baseline = check_baseline(given if isinstance(given, dict) else measure_baseline(given))
    write_json(path, baseline)
    return baseline


def check_baseline(baseline: dict) -> dict:
    """
    Refuse what cannot be compared with.

    Raises:
        ValueError: If a key is unknown, missing or holds a value of another type.
    """
    keys = ", ".join(f"`{key}`" for key in _BASELINE)
    for key, value in baseline.items():
        if key not in _BASELINE or not isinstance(value, _BASELINE[key]) or isinstance(value, bool):
            raise ValueError(f"`baseline` cannot hold `{key}={value!r}`. It takes {keys}: names and notes, numbers.")
    if not baseline.get("name") or len(baseline) < 2:
        raise ValueError(f"`baseline` needs a `name` and at least one number, got `{baseline}`. It takes {keys}.")
    return baseline


def measure_baseline(trainer) -> dict:
    """
    What a trained plain `Trainer` reached, as a baseline.

    Raises:
        ValueError: If it was not trained.
    """
    log = getattr(getattr(trainer, "state", None), "log_history", None) or []
    seconds = next((entry["train_runtime"] for entry in reversed(log) if "train_runtime" in entry), None)
    if seconds is None:
        raise ValueError(
            f"`baseline` must be a trained `Trainer` or a dictionary, got `{type(trainer).__name__}` without a "
            "finished training. Call its `train()` and `evaluate()` first."
        )
    loss = next((entry["eval_loss"] for entry in reversed(log) if "eval_loss" in entry), None)
    steps, args = trainer.state.global_step, trainer.args
    found = {
        "name": type(trainer).__name__,
        "eval_loss": loss,
        "backward_passes": steps * args.gradient_accumulation_steps,
        "seconds": seconds,
        "note": f"{steps:,} steps, learning rate {args.learning_rate:g}",
    }
    return {key: value for key, value in found.items() if value is not None}
