"""What a card must say against its model: sentences that follow from the run, each only where it is true."""

from __future__ import annotations

from hf_hybrid.report.facts import RunFacts

SMALL = 10_000_000


def limits(facts: RunFacts, license_is_known: bool, has_baseline: bool) -> list[str]:
    """Plain sentences; never empty, as no run knows everything."""
    model, found = facts.model, facts.evaluation
    said = []
    if model.parameters < SMALL and not model.adapter:
        said.append("A very small model, made to show or test a training method: its text is of no use in itself.")
    elif model.base:
        said.append("Intended for what its base model is meant for; that model's limits and biases hold here too.")
    else:
        said.append("Intended for research; nobody has checked what it writes.")
    if found is None:
        said.append("It was not evaluated.")
    elif set(found.metrics) <= {"loss"} or all(key.endswith("loss") for key in found.metrics):
        said.append("It was evaluated by its loss alone: not on tasks, not for truth, safety or bias.")
    if 0 < facts.steps < facts.planned_steps:
        how = "is not finished" if facts.seconds is None else "stopped early"
        said.append(f"Training {how}: {facts.steps:,} of {facts.planned_steps:,} steps.")
    if not facts.steps:
        said.append("No training step was made.")
    events = facts.summary.get("divergence_events") or []
    if events:
        many = "s" if len(events) > 1 else ""
        said.append(f"Training was unstable at times: {len(events):,} divergence event{many}.")
    more = (
        " The comparison measures no speed-up: that takes several seeds and a tuned baseline." if has_baseline else ""
    )
    said.append(f"All numbers are of one run with one seed.{more}")
    if not license_is_known:
        said.append("No licence is stated, because the run knows of none; ask the author before you use the model.")
    return said
