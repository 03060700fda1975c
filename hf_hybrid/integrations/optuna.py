"""
End the trials of a sweep that cannot win.

A pruner stops a trial early to save its remaining steps. Optuna's own pruners compare the losses of trials at the same
step. That misleads where the learning rate decays: a large rate looks bad for most of the run, because its loss falls
last, in the decay. This pruner compares where the trials *will end*. `forecast/final_loss.py` forecasts the last
loss of a run, with an interval, from the losses so far and the learning rates of all steps, also of those to come.

A trial is ended when the probability that it ends below its strongest rival, by half a percent or more, is under a
threshold. Three rules keep the verdict fair:

- **The rival counts with a loss that it will almost surely reach.** That is the upper end of its own interval, or the
  median once it has run to its end.
- **Both are compared from the same step.** Early forecasts often have similar errors, because trials share data and
  schedule. If the rival has made more steps, the error of its own forecast at the trial's step is known. If that
  forecast was too high, the trial's forecast is lowered by the same factor. If it was too low, nothing changes.
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
        own, rival = self.forecast(trial), self._rival(study, trial, trial.last_step)
        if own is None or rival is None:
            return False
        mark, correction = rival
        return own.probability_below((mark - MARGIN * abs(mark)) / correction) < self.threshold

    def expected_end(self, study: optuna.Study, trial: FrozenTrial) -> tuple[float, float, float] | None:
        """
        Low, median and high (90 %) of the loss at which a trial would end, as it was judged: lowered by what is known
        of its strongest rival. `None` if too little is known of it, or if its loss was not finite.
        """
        own = self.forecast(trial)
        if own is None or trial.last_step is None:
            return None
        rival = self._rival(study, trial, trial.last_step)
        correction = 1.0 if rival is None else rival[1]
        return correction * own.low, correction * own.median, correction * own.high

    def _rival(self, study: optuna.Study, trial: FrozenTrial, last_step: int) -> tuple[float, float] | None:
        """
        Return what the strongest other trial is nearly sure to reach, and the factor by which its forecast was too high
        after the `last_step` of `trial`, at most 1. `None` without another trial that a forecast knows.
        """
        rivals = []
        for other in study.get_trials(deepcopy=False):
            if other.number == trial.number or other.state == TrialState.FAIL:
                continue
            if (forecast := self.forecast(other)) is not None:
                reached = forecast.median if other.state == TrialState.COMPLETE else forecast.high
                rivals.append((reached, other.number, other, forecast))
        if not rivals:
            return None
        mark, _, rival, latest = min(rivals)  # numbers differ, so trials are never compared
        step = last_step if rival.last_step is None else min(last_step, rival.last_step)
        earlier = self.forecast(rival, step)
        if earlier is None or min(earlier.median, latest.median) <= 0:
            return mark, 1.0
        return mark, min(latest.median / earlier.median, 1.0)

    def forecast(self, trial: FrozenTrial, step: int | None = None) -> FinalLoss | None:
        """
        Forecast the final loss of a trial from what it had reported by `step`, by default from all that it reported.

        Returns `None` if that is too little, or if the loss was not finite.
        """
        step = trial.last_step if step is None else step
        if step is None:
            return None
        key = (trial.number, step)
        if key not in self._forecasts:
            losses = {at: loss for at, loss in sorted(trial.intermediate_values.items()) if at <= step}
            rates = scheduled_rates(self.args, self.max_steps(trial), trial.params)
            known = losses and all(map(math.isfinite, losses.values()))
            self._forecasts[key] = (
                forecast_final_loss(list(losses), list(losses.values()), rates, len(rates)) if known else None
            )
        return self._forecasts[key]

    def standing(self, study: optuna.Study, trial: FrozenTrial) -> tuple[int, float] | None:
        """
        How good a trial was, for a comparison with others: the smallest is the best. `None` while it runs.

        Finished trials come first, by their values. Then come those that were ended, by where they would have ended.
        """
        if trial.state == TrialState.COMPLETE and trial.value is not None:
            return 0, trial.value
        if trial.state not in (TrialState.PRUNED, TrialState.FAIL):
            return None
        end = self.expected_end(study, trial)
        return 1, math.inf if end is None else end[1]

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
