"""
End the trials of a sweep that cannot win.

A pruner stops a trial early to save its remaining steps. Optuna's own pruners compare the losses of trials at the same
step. That misleads where the learning rate decays: a large rate looks bad for most of the run, because its loss falls
last, in the decay. This pruner compares where the trials *will end*. `forecast/final_loss.py` forecasts the last
loss of a run, with an interval, from the losses so far and the learning rates of all steps, also of those to come.

A trial is ended when the probability that it ends below its strongest rival, by half a percent or more, is under a
threshold. Two rules keep the verdict fair:

- **The rival counts with a loss that it will almost surely reach.** That is the upper end of its own interval, or the
  median once it has run to its end.
- **No verdict without evidence.** While there are too few losses for a forecast, the trial continues. Only a loss that
  is not finite ends a trial at once.

Reference: pruning by a forecast of the final value is the idea of Domhan, Springenberg and Hutter, "Speeding up
automatic hyperparameter optimization of deep neural networks by extrapolation of learning curves", IJCAI 2015.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_hybrid.forecast.final_loss import FinalLoss, forecast_final_loss

try:
    import optuna
    from optuna.trial import FrozenTrial, TrialState
except ImportError as error:
    raise ImportError(
        f"`ForecastPruner` and `hf-hybrid sweep` need Optuna, which cannot be imported here ({error}). Install it with "
        '`pip install "hf-hybrid[sweep]"`.'
    ) from error

if TYPE_CHECKING:
    from transformers import TrainingArguments

MARGIN = 0.005
"""A trial that could win by less than this share of the loss is not worth its steps."""
MAX_STEPS = "max_steps"
"""User attribute of a trial: its optimizer steps, where `TrainingArguments.max_steps` does not say them."""


class ForecastPruner(optuna.pruners.BasePruner):
    """
    Ends a trial whose forecast says that it cannot win. For `optuna.create_study`, and for a search of `Trainer`:

    ```python
    pruner = ForecastPruner(args)
    trainer.hyperparameter_search(direction="minimize", backend="optuna", hp_space=space, pruner=pruner)
    ```

    `Trainer` reports the value of `compute_objective` after each evaluation, so evaluate at least twenty times in a run
    (`eval_strategy="steps"`, `eval_steps=0.05`). The reported values must be losses, and their steps optimizer steps.

    Args:
        args (`TrainingArguments`): Those of the trials. `max_steps`, `learning_rate`, the scheduler and its warm-up are
            read, where a trial has a parameter of that name from the trial. A trial without `max_steps` here needs the
            user attribute `"max_steps"`.
        threshold (`float`, *optional*, defaults to 0.15): A trial is ended when the probability that it beats the best
            other trial is below. 0 ends only trials whose loss is not finite.
    """

    def __init__(self, args: TrainingArguments, *, threshold: float = 0.15):
        if not 0 <= threshold < 0.5:
            raise ValueError(
                f"`threshold={threshold}` must be at least 0 and below 0.5: it is the probability of winning under "
                "which a trial is ended. Give a small one, such as 0.15."
            )
        self.args, self.threshold = args, threshold
        self._forecasts: dict[tuple[int, int], FinalLoss | None] = {}  # by trial, and step that it was made after

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Whether the trial should end now. Raises `ValueError` if the study maximizes, or nothing says its steps."""
        if study.direction != optuna.study.StudyDirection.MINIMIZE:
            raise ValueError("`ForecastPruner` compares losses, so the study must have `direction='minimize'`.")
        if trial.last_step is None:
            return False
        if not math.isfinite(trial.intermediate_values[trial.last_step]):
            return True
        if trial.last_step >= self.max_steps(trial):
            return False  # nothing is left to save
        own, mark = self.forecast(trial), self._mark(study, trial)
        return (
            own is not None and mark is not None and own.probability_below(mark - MARGIN * abs(mark)) < self.threshold
        )

    def _mark(self, study: optuna.Study, trial: FrozenTrial) -> float | None:
        """What the strongest other trial is nearly sure to reach; `None` without one that a forecast knows."""
        others = study.get_trials(deepcopy=False)
        others = [other for other in others if other.number != trial.number and other.state != TrialState.FAIL]
        known = [(other, found) for other in others if (found := self.forecast(other)) is not None]
        reached = (found.median if other.state == TrialState.COMPLETE else found.high for other, found in known)
        return min(reached, default=None)

    def forecast(self, trial: FrozenTrial) -> FinalLoss | None:
        """Forecast the final loss of a trial; `None` if it reported too little, or a loss that was not finite."""
        if trial.last_step is None:
            return None
        key = (trial.number, trial.last_step)
        if key not in self._forecasts:
            losses = dict(sorted(trial.intermediate_values.items()))
            rates = scheduled_rates(self.args, self.max_steps(trial), trial.params)
            known = losses and all(map(math.isfinite, losses.values()))
            self._forecasts[key] = (
                forecast_final_loss(list(losses), list(losses.values()), rates, len(rates)) if known else None
            )
        return self._forecasts[key]

    def standing(self, trial: FrozenTrial) -> tuple[int, float] | None:
        """
        How good a trial was, for a comparison with others: the smallest is the best. `None` while it runs.

        Finished trials come first, by their values. Then come those that were ended, by where they would have ended.
        """
        if trial.state == TrialState.COMPLETE and trial.value is not None:
            return 0, trial.value
        if trial.state not in (TrialState.PRUNED, TrialState.FAIL):
            return None
        end = self.forecast(trial)
        return 1, math.inf if end is None else end.median

    def max_steps(self, trial: FrozenTrial) -> int:
        """Optimizer steps of a trial."""
        steps = trial.params.get("max_steps") or trial.user_attrs.get(MAX_STEPS) or self.args.max_steps
        if steps <= 0:
            raise ValueError(
                f"`max_steps={steps}` does not say how many steps trial {trial.number} has, and the forecast needs to "
                "know. Set `max_steps` in the `TrainingArguments` that `ForecastPruner` gets, or "
                "`trial.set_user_attr('max_steps', ...)`."
            )
        return steps


def scheduled_rates(args: TrainingArguments, max_steps: int, parameters: dict[str, Any]) -> np.ndarray:
    """
    The learning rates of the steps 1 to `max_steps` under the scheduler of `args`, with `parameters` in its options'
    place. A scheduler that watches the loss has a constant rate here.
    """
    import torch
    from transformers import get_scheduler

    from hf_hybrid.forecast.run_forecast import schedule_of

    args = copy.copy(args)
    for name in parameters.keys() & vars(args).keys():
        setattr(args, name, parameters[name])
    options = args.lr_scheduler_kwargs  # text only until the arguments are made
    scheduler = get_scheduler(
        args.lr_scheduler_type,
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate),
        num_warmup_steps=args.get_warmup_steps(max_steps),
        num_training_steps=max_steps,
        scheduler_specific_kwargs=dict(options) if isinstance(options, dict) else {},
    )
    return args.learning_rate * schedule_of(scheduler, max_steps)
