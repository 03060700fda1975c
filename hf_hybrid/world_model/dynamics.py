"""
Learns online how a run trains: observes it window by window, imagines its loss, and says how sure it is.

Time is counted in windows of some real steps. After each window call [`DynamicsModel.observe_window`]; then compare
what could be done, and give the plan that will be carried out to [`DynamicsModel.forecast`] with `keep=True`, so that
what comes of it calibrates the next forecasts. See [`train_on_records`] for learning offline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from hf_hybrid.world_model.forecasts import (
    CONFIDENCE_HORIZON,
    HISTORY,
    SCORED,
    TOLERANCE,
    VARIANCE,
    Calibration,
    Forecast,
    LossHistory,
    log_loss,
    platt_scaled,
    power_law,
    student_t_cdf,
)
from hf_hybrid.world_model.replay import Replay
from hf_hybrid.world_model.rssm import ACTIONS, FEATURES, RSSM, LossHead, State, load_weights
from hf_hybrid.world_model.rssm_records import MIN_SCALE, train_on_records
from hf_hybrid.world_model.rssm_training import to_device, update

__all__ = ["DynamicsModel", "train_on_records"]

Tensor = torch.Tensor


class DynamicsModel:
    """
    A world model of one run and everything that it needs to learn.

    All decisions follow from saved state: nothing is sampled but what is learned from, with generators of its own, so
    that processes that observe the same numbers stay identical.

    Args:
        start (`Path`, *optional*): Start weights, see `rssm.save_weights`. Their normalisation of the features is kept;
            without start weights it is learned from the run.
        model (`RSSM`, *optional*): The ensemble; by default one of the standard size.
        device (`str` or `torch.device`): Where the ensemble lives.
        learning_rate (`float`): Of Adam.
        learn_every (`int`): Windows from one call of [`learn`] to the next; 0 never learns.
        updates (`int`): Gradient steps of each call.
        batch_size (`int`), chunk (`int`), starts (`int`), horizon (`int`): Chunks of each gradient step, windows of a
            chunk to observe, windows of a chunk to imagine from, and windows to imagine.
        capacity (`int`): Windows to keep in the replay.
        latent_dtype (`str`): Of the replay's latent states, `"float32"` or `"int8"`.
        tolerance (`float`), confidence_horizon (`int`): See [`confidence`].
        seed (`int`): Of everything that is random.

    Raises:
        ValueError: If `start` cannot be read or does not fit, or a number is out of range.
    """

    def __init__(
        self,
        start: Path | None = None,
        *,
        model: RSSM | None = None,
        device: str | torch.device = "cpu",
        learning_rate: float = 3e-4,
        learn_every: int = 5,
        updates: int = 1,
        batch_size: int = 4,
        chunk: int = 8,
        starts: int = 2,
        horizon: int = 20,
        capacity: int = 2048,
        latent_dtype: str = "float32",
        tolerance: float = TOLERANCE,
        confidence_horizon: int = CONFIDENCE_HORIZON,
        seed: int = 0,
    ):
        counts = {"updates": updates, "batch_size": batch_size, "chunk": chunk, "starts": starts, "horizon": horizon}
        for name, value in {**counts, "capacity": capacity, "confidence_horizon": confidence_horizon}.items():
            if value < 1:
                raise ValueError(f"`{name}` is {value}: it counts something, of which there must be one or more.")
        self.model = (RSSM(seed=seed) if model is None else model).to(device)
        self.learn_every, self.updates_per_call, self.batch_size = learn_every, updates, batch_size
        self.chunk, self.starts, self.horizon = chunk, starts, horizon
        self.tolerance, self.confidence_horizon = tolerance, confidence_horizon
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=learning_rate, fused=True)
        self.generator = torch.Generator().manual_seed(seed)
        self.sampler = torch.Generator(device).manual_seed(seed)
        self.replay = Replay(self.model, capacity, latent_dtype)
        self.history, self.calibration = LossHistory(), Calibration()
        self.state = self.model.initial(1)
        self.observation = self.model.feature_mean.new_zeros(FEATURES + len(HISTORY))
        self.learns_normalisation = start is None
        self.windows = 0
        self.updates = 0
        """Gradient steps made."""
        self.seconds = 0.0
        """Spent in this object."""
        self.confidence = 0.0
        """
        Predictive, calibrated probability that the loss `confidence_horizon` windows ahead is at most `tolerance`
        (relative) above that of the last window, by the forecast that was kept last, with a logit rescaled as offline
        training found right; 0 before there is one.
        """
        self._pending: list[dict] = []
        if start is not None:
            self.load_start_weights(start)

    def load_start_weights(self, path: str | Path) -> None:
        """
        Begin with the weights and the feature normalisation of a file.

        Raises:
            ValueError: If there is no such file, or it does not fit.
        """
        load_weights(self.model, path)
        self.learns_normalisation = False

    # Observing and learning.

    @torch.no_grad()
    def observe_window(self, features: Sequence[float], action: Sequence[float], mean_loss: float) -> None:
        """
        Take in a window of the run; learns when it is time to.

        Args:
            features (`Sequence[float]`): The 64 features after its last step.
            action (`Sequence[float]`): `ACTIONS` of it: gain, horizon, progress, rate.
            mean_loss (`float`): Mean training loss of its real steps.

        Raises:
            ValueError: If the loss is not finite.
        """
        if not math.isfinite(mean_loss):
            raise ValueError(f"`mean_loss` is {mean_loss}: nothing can be learned from it. Leave such windows out.")
        began = time.perf_counter()
        value = log_loss(mean_loss)
        self._score(value)
        observation = torch.tensor([*features, *self.history.observe(value)], dtype=torch.float32)
        done = torch.tensor(action, dtype=torch.float32)
        weights = -torch.rand(self.model.members, generator=self.generator).clamp_min(1e-6).log()
        self.replay.append(self.state, observation, done, value, weights)
        self.observation = observation.to(self.observation.device)
        if self.learns_normalisation:
            self._update_normalisation()
        self.state = self.model.observe(self.state, self.observation[None], done[None].to(self.observation.device))
        self.windows += 1
        if self.learn_every and self.windows % self.learn_every == 0:
            self.learn()
        self.seconds += time.perf_counter() - began

    def _update_normalisation(self) -> None:
        """Running mean and deviation; before the run, 0 and 1 are worth ten windows."""
        count = self.windows + 11
        mean, scale = self.model.feature_mean, self.model.feature_scale
        difference = self.observation[:FEATURES] - mean
        mean += difference / count
        variance = scale.square()
        variance += (difference * (self.observation[:FEATURES] - mean) - variance) / count
        scale.copy_(variance.sqrt().clamp_min(MIN_SCALE))

    def learn(self) -> dict[str, float]:
        """
        A few gradient steps on chunks of the replay.

        Returns:
            `dict[str, float]`: The terms of `rssm_loss` in the last step; empty while there is too little to learn.
        """
        observed, losses = min(self.chunk, len(self.replay) - 1), {}
        for _ in range(self.updates_per_call if observed > 0 else 0):
            batch = self.replay.chunks(self.batch_size, observed, self.starts, self.horizon, self.generator)
            losses = update(self.model, self.optimizer, to_device(batch, self.observation.device), self.sampler)
            self.updates += 1
        return losses

    # Imagining.

    @torch.no_grad()
    def _imagine(self, actions: Tensor) -> LossHead:
        if not self.windows:
            raise ValueError("Nothing can be imagined before the first window. Call `observe_window` first.")
        began = time.perf_counter()
        count = len(actions)
        state = State(*(part.expand(-1, count, -1) for part in self.state))
        observation = self.observation.expand(count, -1)
        head = self.model.forecast(state, observation, actions.to(observation.device))
        head = LossHead(*(part.cpu() for part in head))
        self.seconds += time.perf_counter() - began
        return head

    def forecast(self, actions, *, keep: bool = False) -> Forecast:
        """
        What the loss will do if this is done.

        Args:
            actions (`Tensor` or nested sequence): `[K, 4]`, `ACTIONS` of the next windows; `K` is at least 1.
            keep (`bool`): This is what will be done: update the confidence, and let what comes of it calibrate later
                forecasts. The last one kept after a window counts.

        Raises:
            ValueError: If the actions are not `[K, 4]`, or no window has been observed.
        """
        actions = _as_actions(actions)
        if actions.ndim != 2:
            raise ValueError(f"`actions` has the shape {list(actions.shape)}: one future is [K, {len(ACTIONS)}].")
        head = self._imagine(actions[None])
        mean, disagreement = head.mean[:, 0].mean(0), head.mean[:, 0].std(0, unbiased=False)
        variance = VARIANCE * (2 * head.log_scale[:, 0]).exp().mean(0) + disagreement.square()
        raw = (variance / VARIANCE).sqrt().tolist()
        factors = [self.calibration.factor(k) for k in range(1, len(raw) + 1)]
        scale = [value * factor for value, factor in zip(raw, factors)]
        forecast = Forecast(mean.tolist(), scale, disagreement.tolist())
        if keep:
            ahead = min(self.confidence_horizon, len(scale))
            probability = forecast.probability_below(math.log1p(self.tolerance), ahead)
            self.confidence = platt_scaled(probability, *self.model.confidence_map.tolist())
            self._keep(forecast, raw, factors)
        return forecast

    def compare(self, actions_a, actions_b) -> tuple[Tensor, Tensor]:
        """
        Imagined log loss of future `a` minus that of future `b`: negative where `a` is better.

        Args:
            actions_a, actions_b (`Tensor` or nested sequence): `[..., K, 4]`, broadcast against each other, so that
                several candidates are compared in one go.

        Returns:
            `tuple[Tensor, Tensor]`: Mean of the ensemble and standard deviation between its members, `[..., K]`.

        Raises:
            ValueError: If the actions are not `[..., K, 4]` with the same `K`, or no window has been observed.
        """
        a, b = _as_actions(actions_a), _as_actions(actions_b)
        if a.shape[-2] != b.shape[-2]:
            raise ValueError(
                f"`actions_a` is {a.shape[-2]} windows long and `actions_b` {b.shape[-2]}: only futures of the same "
                "length can be compared. Cut the longer one."
            )
        rows = [part.reshape(-1, *part.shape[-2:]) for part in (a, b)]
        means = self._imagine(torch.cat(rows)).mean.movedim(0, -1).split([len(part) for part in rows])
        mean_a, mean_b = (mean.reshape(*part.shape[:-1], -1) for mean, part in zip(means, (a, b)))
        difference = mean_a - mean_b
        return difference.mean(-1), difference.std(-1, unbiased=False)

    def probability_better(self, actions_with, actions_without, horizon: int) -> Tensor:
        """
        Probability that the loss `horizon` windows ahead is lower with one future than with another.

        A Student-t around the mean difference; its variance is that between members, plus that of the errors which the
        ensemble made on branches it was trained on, rescaled like the forecasts of this run.

        Args:
            actions_with, actions_without (`Tensor` or nested sequence): `[..., K, 4]` as for [`compare`].
            horizon (`int`): Windows ahead, 1 to `K`.

        Returns:
            `Tensor`: `[...]`.

        Raises:
            ValueError: If `horizon` is not between 1 and `K`, and as [`compare`].
        """
        mean, disagreement = self.compare(actions_with, actions_without)
        if not 1 <= horizon <= mean.shape[-1]:
            raise ValueError(
                f"`horizon` is {horizon}, but the actions are {mean.shape[-1]} windows long. Pass more or less."
            )
        both = torch.broadcast_tensors(_as_actions(actions_with), _as_actions(actions_without))
        first, second = (part.reshape(-1, *part.shape[-2:])[:, :horizon].to(self.observation.device) for part in both)
        error = self.model.pair_log_scale(first, second)[..., -1].exp().mean(0).cpu() * self.calibration.factor(horizon)
        mean, disagreement = (part[..., horizon - 1].flatten() for part in (mean, disagreement))
        z = -mean / (disagreement.square() / VARIANCE + error.square()).sqrt()
        return torch.tensor([student_t_cdf(value) for value in z.tolist()]).view(both[0].shape[:-2])

    # Calibrating.

    def _keep(self, forecast: Forecast, raw: list[float], factors: list[float]) -> None:
        back, increments = power_law(self.observation[None, FEATURES:].cpu(), len(raw))
        law = (back + increments.cumsum(-1))[0].tolist()
        kept = {str(k): [forecast.mean[k - 1], raw[k - 1], factors[k - 1], law[k - 1]] for k in SCORED if k <= len(raw)}
        self._pending = [entry for entry in self._pending if entry["window"] != self.windows]
        self._pending.append({"window": self.windows, "log_loss": self.history.last, "kept": kept})

    def _score(self, value: float) -> None:
        """Forecasts that were made for the window that has just ended meet what came."""
        now = self.windows + 1
        for entry in self._pending:
            k = now - entry["window"]
            if str(k) in entry["kept"]:
                self.calibration.score(k, value - entry["log_loss"], *entry["kept"][str(k)])
        self._pending = [entry for entry in self._pending if now - entry["window"] < max(SCORED)]

    # Saving.

    def state_dict(self) -> tuple[dict[str, Tensor], dict]:
        """Tensors and plain values from which a resumed run continues bit for bit."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        tensors.update({f"replay.{name}": tensor for name, tensor in self.replay.tensors().items()})
        tensors.update({"state.deterministic": self.state.deterministic, "state.stochastic": self.state.stochastic})
        tensors["observation"] = self.observation
        tensors["generator"], tensors["sampler"] = self.generator.get_state(), self.sampler.get_state()
        values = {
            "windows": self.windows,
            "updates": self.updates,
            "seconds": self.seconds,
            "confidence": self.confidence,
            "learns_normalisation": self.learns_normalisation,
            "history": self.history.state_dict(),
            "calibration": self.calibration.state_dict(),
            "pending": [dict(entry) for entry in self._pending],
        }
        return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, values

    @torch.no_grad()
    def load_state_dict(self, tensors: dict[str, Tensor], values: dict) -> None:
        """
        Restore what [`state_dict`] returned.

        Raises:
            ValueError: If it belongs to an ensemble of other sizes.
        """
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            group, _, rest = name.partition(".")
            groups.setdefault(group, {})[rest] = tensor
        try:
            self.model.load_state_dict(groups["model"])
        except RuntimeError as error:
            raise ValueError(
                "The state of the dynamics model belongs to an ensemble of other sizes. Resume with the version that "
                "wrote it."
            ) from error
        device = self.observation.device
        parameters = dict(self.model.named_parameters())
        self.optimizer.state.clear()
        for name, value in groups.get("optimizer", {}).items():
            key, _, parameter = name.partition(".")
            self.optimizer.state[parameters[parameter]][key] = value.to(device, copy=True)
        self.replay.load(groups.get("replay", {}))
        self.state = State(*(groups["state"][name].to(device, copy=True) for name in State._fields))
        self.observation = tensors["observation"].to(device, copy=True)
        self.generator.set_state(tensors["generator"].cpu())
        self.sampler.set_state(tensors["sampler"].cpu())
        for name in ("windows", "updates", "seconds", "confidence", "learns_normalisation"):
            setattr(self, name, values[name])
        self.history.load_state_dict(values["history"])
        self.calibration.load_state_dict(values["calibration"])
        self._pending = [dict(entry) for entry in values["pending"]]


def _as_actions(values) -> Tensor:
    actions = torch.as_tensor(values, dtype=torch.float32)
    if actions.ndim < 2 or actions.shape[-1] != len(ACTIONS) or not actions.shape[-2]:
        raise ValueError(
            f"The actions have the shape {list(actions.shape)}: they are [..., K, {len(ACTIONS)}], with "
            f"{', '.join(ACTIONS)} of each window."
        )
    return actions
