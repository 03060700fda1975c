"""
How long a step takes on this machine, kept from one command to the next.

`hf-hybrid plan --measure` measures a step of a plan, and each training that lasts measures its own. Both are kept in a
file of the cache, by machine, model shape and plan, a training also by its data. So the banner of a run says how long
the run will take before it begins. A run that nothing is known of says so after three steps.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants

import hf_hybrid
from hf_hybrid.files import write_json
from hf_hybrid.hub.provenance import cpu
from hf_hybrid.machine import describe_device
from hf_hybrid.plan.estimate import Plan, PlanError
from hf_hybrid.records.readings import as_dict, read_json

logger = logging.getLogger(__name__)

LEAST_SECONDS = 10.0
"""Of a training's steps that are kept: fewer would say little, and nobody asks how long such a run will take."""
MOST = 1000
"""Entries of the file: the last ones."""
WORK = (
    "sequence_length batch_size gradient_accumulation_steps autocast offload_activations optimizer_states "
    "states_per_weight base_precision accumulation_walk update_in_backward processes cpu_offload"
).split()
"""Fields of a setup that decide how long a step takes. The others are budgets, and what a plan decides."""
DECIDED = "mode resident_layers stream_embeddings recomputed_layers kept_graphs".split()
"""Fields of a plan that do."""
SHAPE = "layers embedding head rest hidden vocab element_bytes trainable_bytes tied".split()
"""Fields of a model's shape that do."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and the day they were measured; `of_plan`: by `plan --measure`, with rows of full length."""

    seconds: float
    day: str
    of_plan: bool

    @property
    def source(self) -> str:
        """In words."""
        by = "`plan --measure` with rows of full length" if self.of_plan else "the last run of this plan and data"
        return f"{by}, {self.day}"


@dataclass(frozen=True)
class StepTimes:
    """The kept times of a plan on a device; `data` says what a training reads, and is empty for `plan --measure`."""

    plan: Plan
    device: torch.device
    data: str = ""

    @functools.cached_property
    def known(self) -> StepTime | None:
        """Of an earlier training with this data, or else of `plan --measure`; `None` if there was none."""
        kept = _read()
        for data in dict.fromkeys((self.data, "")):
            if (entry := kept.get(self._key(data))) is not None:
                return StepTime(entry["seconds"], entry["day"], of_plan=not data)
        return None

    def keep(self, seconds: float) -> None:
        """Keep what a step took. Where the cache cannot be written, nothing is kept."""
        key, day = self._key(self.data), datetime.date.today().isoformat()
        kept = {name: entry for name, entry in _read().items() if name != key}
        kept[key] = {"seconds": seconds, "day": day}
        try:
            _path().parent.mkdir(parents=True, exist_ok=True)
            write_json(_path(), dict(list(kept.items())[-MOST:]))
        except OSError as error:
            logger.info("`%s` could not be written: %s", _path(), error)

    def _key(self, data: str) -> str:
        machine = [describe_device(self.device).get("name", ""), cpu(), torch.get_num_threads()]
        machine += [hf_hybrid.__version__, torch.__version__]
        plan = {name: getattr(self.plan, name) for name in DECIDED}
        plan |= {name: getattr(self.plan.setup, name) for name in WORK}
        shape = asdict(self.plan.shape)
        values = [machine, plan, [shape[name] for name in SHAPE], data]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def plan_of(trainer: Any) -> Plan | None:
    """Return the plan of a run; `None` where none can be made."""
    from hf_hybrid.build import make_plan

    try:
        return trainer.memory.plan if trainer.memory.streams else make_plan(trainer, None)
    except (PlanError, ValueError, TypeError, AttributeError):
        return None


def _path() -> Path:
    return Path(constants.HF_HOME) / "hf_hybrid" / "step_times.json"


def _read() -> dict[str, Any]:
    """The entries of the file; none where it cannot be read."""
    return as_dict(read_json(_path(), []))
