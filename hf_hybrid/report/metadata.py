"""The metadata of a model card, as the Hub accepts it: what is not known is left out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from transformers.modelcard import METRIC_TAGS

from hf_hybrid.report.facts import DataFacts, RunFacts
from hf_hybrid.report.markdown import one_line

_METRICS = (*METRIC_TAGS, "perplexity")


def metadata(facts: RunFacts, given: dict[str, Any]) -> dict[str, Any]:
    """
    The card's metadata. What is not known is left out.

    Args:
        facts: Of the run.
        given: Fields that the caller knows: `language`, `license` (with `license_name`, `license_link`), `tags`,
            `datasets`, `dataset_names` (for people), `dataset_args`.
    """
    model, name = facts.model, one_line(facts.name)
    adapter = model.adapter is not None
    results = evaluation_results(facts, given)
    tags = ["generated_from_trainer", *given.get("tags", ())]
    if adapter:
        tags += [model.adapter.lower(), *(["transformers"] if model.in_transformers else ())]
        tags += [f"base_model:adapter:{model.base}"] if model.base else []
    datasets = given.get("datasets") or unique(data.hub_id for data in (facts.train, *facts.evaluated.values()))
    data = ModelCardData(
        library_name="peft" if adapter else "transformers",
        language=given.get("language"),
        license=given.get("license"),
        license_name=given.get("license_name"),
        license_link=given.get("license_link"),
        base_model=model.base,
        base_model_relation=("adapter" if adapter else "finetune") if model.base else None,
        pipeline_tag=model.task,
        tags=unique(one_line(tag) for tag in tags),
        datasets=datasets or None,
        metrics=unique(result.metric_type for result in results if result.metric_type in _METRICS) or None,
        model_name=name,
        eval_results=results or None,
    )
    # With results, `ModelCardData` keeps the name only inside of the model index.
    return {**data.to_dict(), "model_name": name}


def evaluation_results(facts: RunFacts, given: dict[str, Any]) -> list[EvalResult]:
    """The evaluation as the Hub's model index has it; none where it was not of the weights that are published."""
    found = facts.evaluation
    if found is None or not found.of_final_weights:
        return []
    metrics = {**found.metrics, **({} if found.perplexity is None else {"perplexity": found.perplexity})}
    results = []
    for key, value in metrics.items():
        name, metric = _split_by_set(key, facts.evaluated)
        data = facts.evaluated.get(name, DataFacts())
        ids, names, args = given.get("datasets"), given.get("dataset_names"), given.get("dataset_args")
        # Results of the same type share an entry: evaluation sets without an id have their name instead.
        kind = ids[0] if ids else data.hub_id or name or "unknown"
        title = name or (names[0] if names else None) or data.hub_id or "evaluation set of the run"
        result = EvalResult(
            task_type=facts.model.task or "other",
            dataset_type=one_line(kind),
            dataset_name=one_line(title),
            dataset_config=data.config if data.hub_id else None,
            dataset_split=data.split if data.hub_id else None,
            dataset_args={"config": one_line(args[0])} if args else None,
            metric_type=one_line(metric),
            metric_name=one_line(metric.replace("_", " ").capitalize()),
            metric_value=value,
        )
        results.append(result)
    return results


def _split_by_set(key: str, evaluated: dict) -> tuple[str, str]:
    """With several evaluation sets a metric is logged as `NAME_metric`."""
    names = [name for name in evaluated if name and key.startswith(f"{name}_")]
    name = max(names, key=len, default="")
    return name, key.removeprefix(f"{name}_") if name else key


def unique(values: Iterable[str | None]) -> list[str]:
    """The values that there are, each once, in order."""
    return list(dict.fromkeys(value for value in values if value))
