"""
GRPO and RLOO: their configs, their trainers, and the part of the run that leaves rows out ([`Rollouts`]).

groups.py explains which rows and why the update stays TRL's, decoding.py how completions are sampled.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only

from hf_hybrid.arguments import HybridArguments, as_declared, check_range, hybrid_values, option, options_of
from hf_hybrid.compat import trl_error
from hf_hybrid.machine import PendingRead, device_memory, sharding_of, shards_by_fsdp2, windows_may_change
from hf_hybrid.optimizers import optimizer_name, steps_in_backward
from hf_hybrid.part import Part, Step
from hf_hybrid.plan.of_trainer import bytes_cached
from hf_hybrid.recovery import free_memory, is_out_of_memory
from hf_hybrid.rows.exchange import Exchange
from hf_hybrid.rows.facts import Marks, of_user
from hf_hybrid.rows.images import adapters_of
from hf_hybrid.rows.randomness import Drawn, changed_buffer, drawn_in_training
from hf_hybrid.rows.tree import Rows, rows_of_states
from hf_hybrid.run.fallbacks import Fallbacks
from hf_hybrid.run.run import RandomStates
from hf_hybrid.run.trainer_view import module_of_user, overridden
from hf_hybrid.run.weights import gathered
from hf_hybrid.saving.state import OWN
from hf_hybrid.streaming.layers import base_model
from hf_hybrid.trl.completions import indices
from hf_hybrid.trl.decoding import Decoding, reason_not_this_model
from hf_hybrid.trl.groups import (
    MEAN_OF_LOSS,
    ON_HOST,
    Batch,
    ExactSkips,
    GenerationBatch,
    Mean,
    Sampled,
    SamplerDistance,
    rewarded_alike,
    rows_of_completions,
    rows_that_count,
    take,
    tokens_in_loss,
    total_rewards,
)
from hf_hybrid.trl.sft_dpo import TRLConfigBase, TRLTrainerMixin, as_reference, config_for, options_of_rows
from hf_hybrid.trl.turns import Turns
from hf_hybrid.trl.users import UsersState, restore_table, table_of

if TYPE_CHECKING:
    from hf_hybrid.run.run import Run

try:
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
except ImportError as error:
    raise trl_error(error) from error

if TYPE_CHECKING:
    from transformers import TrainingArguments as _Arguments

    _Trainer = GRPOTrainer  # what the mixin reads is in `RLOOTrainer` too
else:
    _Arguments = _Trainer = object

logger = logging.getLogger(__name__)


class RowsStay(NamedTuple):
    """Why every row is computed, and computed where TRL has it."""

    why: str
    """A clause."""
    change: str = ""
    """What the user can do about it, as an imperative clause; empty if there is nothing."""


# A part of the run.


COUNTS = (
    "rows", "rows_skipped", "backward_passes_avoided_exactly", "rows_of_rounding", "log_probs_skipped",
)  # fmt: skip
"""
Rows of all micro-batches, those not computed, and micro-batches without any; rows whose advantage was nothing but
rounding, and is zero here; and rows whose log-probabilities before the update were left out.
"""
OF_SAMPLER = "log_probs_of_sampler"
"""Key of a micro-batch for the log-probabilities with which its completions were drawn, shape [rows, tokens]."""
OF_MICRO_BATCHES = (
    "training_step", "_prepare_inputs", "compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies",
    "get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights",
)  # fmt: skip
"""Methods of TRL's trainers that see a micro-batch: where a user has one, micro-batches are TRL's."""
OF_GENERATION = ("_generate_and_score_completions", "_generate", "_calculate_rewards")
"""Those that see a generation batch: where a user has one, its rewards are asked for where TRL asks, and stay."""
OF_TURN = ("_generate_single_turn",)
"""That which sees prompts: where a user has one, it may complete others than TRL gives."""
OF_TURNS = ("_generate", "_generate_single_turn")
"""Those that may complete rows several times, as TRL does with tools."""
SETTINGS = ("beta", "loss_type", "top_entropy_quantile", "_entropy_bonus_enabled", "aux_loss_enabled")
"""Attributes of a trainer that decide whether rows may be left out. A callback may change them, and put methods in."""


class Rollouts(Part):
    """
    What a run leaves out of its generation batches, and where it stands in them. TRL keeps the latter in memory alone,
    and generates anew after a resume. On this process it counts [`COUNTS`]. Of the trainer it reads the options and
    TRL's generation batch, which a resume writes: its rewards and tools are asked for once.
    """

    name = "rollouts"
    skips: ExactSkips
    """Plans the micro-batches of each window, once a run begins."""

    def __init__(self, trainer: RolloutTrainerMixin):
        self.trainer = trainer
        self.leaves_out = False  # rows that do not count
        self.by_prompt = False  # rows of the same prompt are put together
        self.plans = False  # micro-batches; where no row moves, to know which images they have in common
        self.keeps_all = False
        """Whether each micro-batch keeps a row: the first of a window begins DeepSpeed's sums of gradients."""
        tells = trainer.is_world_process_zero
        self.every_row = Fallbacks("Every row is computed, also those without advantage (`exact_skips`)", tells)
        self.users_rewards = Fallbacks("Rewards are asked for where TRL asks, and all advantages are TRL's", tells)
        self.of_users = UsersState(trainer)
        self.window_begins_at = 0  # TRL's number of the first micro-batch of the window
        self.generated_at: int | None = None
        """The number of the micro-batch before which completions were made last."""
        self.generates = False
        """They are made now."""
        self.planned: Counter[str] = Counter()
        """What the window has added to the counts."""
        self.logged: dict[str, int] = {}
        """Entries of TRL's metrics before the first loss of the window."""
        self.counts: Counter[str] = Counter()
        """Those of the run, once it begins."""
        self._before: dict[str, Any] | None = None
        """The place before the step under way."""
        self._settings: Any = None
        """What was decided depends on them."""

    def begin(self, run: Run) -> None:
        trainer = self.trainer
        self.skips, self._before = ExactSkips(trainer._mean, trainer._rows_that_count, trainer._agree), None
        self.every_row.because = self._settings = None
        self.keeps_all = trainer._sharding == "deepspeed"
        self.counts = run.counts
        vars(self).pop("users", None)
        # An error or an interrupt may have ended the last run in the middle of a generation batch.
        trainer._step, trainer._buffered_inputs, trainer.distance = trainer.epochs.place()[1], None, SamplerDistance()
        for pending in (*trainer._metrics.values(), trainer._pending_metrics, trainer._pending_extra_logs):
            pending.clear()
        self.of_users.begin()
        has_turns = getattr(trainer, "tools", None) or getattr(trainer, "rollout_func", None)
        if has_turns and not (trainer.decoding.off or trainer.use_vllm or trainer.memory.streams):
            tokens = trainer.max_completion_length or 0
            logger.info(
                "Between turns keys and values of conversations wait: %.3g GiB for completions of %d tokens, and of "
                "their prompts. Nothing waits if that is over half of the memory that is free then.",
                bytes_cached(trainer, tokens) / 2**30, tokens,
            )  # fmt: skip
        if trainer.memory.streams and not trainer.use_vllm:
            size, seconds = trainer.memory.streamer.copies_of_a_pass()
            tokens = trainer.max_completion_length
            logger.info(
                "Each token of completions brings in %.2f GiB of layers, for all rows at once: about %.2g s, estimated "
                "from a copy of one layer that was timed now. %d tokens take %.0f s, and what computing them takes.",
                size / 2**30, seconds, tokens, tokens * seconds,
            )  # fmt: skip

    @functools.cached_property
    def users(self) -> dict[tuple[str, ...], str | None]:
        """By the names of methods: one that is not TRL's for GRPO and RLOO, as `Class.method`."""
        known = HybridGRPOTrainer.__mro__ + HybridRLOOTrainer.__mro__  # TRL itself has subclasses
        others = [kind for kind in type(self.trainer).__mro__ if kind not in known]
        return {
            names: overridden(self.trainer, *names)
            or next((f"{kind.__name__}.{name}" for kind in others for name in names if name in vars(kind)), None)
            for names in (OF_MICRO_BATCHES, OF_GENERATION, OF_TURN, OF_TURNS)
        }

    def choose_rows(self) -> None:
        """Decide which rows are left out: in the first step, and where a callback has changed what decides."""
        trainer = self.trainer
        names = SETTINGS + OF_MICRO_BATCHES + OF_GENERATION + OF_TURN
        marks = trainer.rows.facts_of(trainer.model).marks or Marks.of(trainer.model, base_model(trainer.model))
        settings = [trainer.run.step.acts, *map(vars(trainer).get, names), *marks.draws, *marks.parts]
        changed = settings != self._settings
        if not (changed if trainer.accelerator.num_processes == 1 else trainer._agree(int(changed))):
            return
        self._settings, self.skips.mean, trainer._drawn = settings, trainer._mean, None
        vars(self).pop("users", None)
        self.leaves_out = getattr(trainer.args, "exact_skips", "auto") == "auto"
        if self.leaves_out and (reason := trainer._reason_not_left_out()) is not None:
            self.leaves_out = False
            advice = (
                f"To leave them out, {reason.change}. TRL logs the share of their groups as `frac_reward_zero_std`."
            )
            self.every_row.cannot_be_exact(reason.why, advice=advice if reason.change else "")
        shares = trainer.rows.may_share
        may_move = self.leaves_out or (shares and self.skips.mean != "tokens" and trainer._reason_not_moved() is None)
        self.by_prompt = may_move and shares and trainer._drawn_in_training() != "by batch"
        # What a process finds out about itself, another may not: all of them plan, or none.
        every_row, own_prompts = trainer._agree(int(not self.leaves_out)), trainer._agree(int(not self.by_prompt))
        if self.leaves_out and every_row:
            self.every_row.cannot_be_exact("another process computes every row")
        self.leaves_out, self.by_prompt = not every_row, not own_prompts
        sees = self.users[OF_MICRO_BATCHES] is None and trainer.rows.facts_of(trainer.model).encoder is not None
        self.plans = self.leaves_out or self.by_prompt or sees

    @property
    def failed(self) -> Sequence[str]:
        return self.every_row.failed

    def begin_step(self, step: Step) -> None:
        self.skips.planned.clear()  # of what an exception has left of the window before
        self.window_begins_at, self._before = self.trainer._step, self._place()
        self.generated_at, self.generates, self.planned = None, False, Counter()

    def end_step(self, step: Step) -> None:
        self._before = None

    def plan(self) -> list[Batch]:
        """
        Plan the micro-batches up to the end of the window or of the generation batch. Return those that are computed.
        """
        trainer, generated = self.trainer, self.trainer._buffered_inputs or []
        per_generation = len(generated)
        window_ends_at = self.window_begins_at + int(trainer.current_gradient_accumulation_steps)
        generates_at = trainer._step - trainer._step % (per_generation * trainer.num_iterations)
        generates_at += per_generation * trainer.num_iterations
        coming = range(trainer._step, min(window_ends_at, generates_at))
        batches = [generated[step % per_generation] for step in coming]
        needs_one = trainer.accelerator.num_processes > 1 or not self.skips.knows(trainer.model)
        counts = self.skips.plan(
            batches,
            at_least=len(coming) if self.keeps_all else int(needs_one and coming.stop == window_ends_at),
            leave_out=self.leaves_out,
            by_prompt=self.by_prompt,
        )
        self.counts.update(counts)
        self.planned.update(counts)
        return self.skips.computed

    def summary(self) -> dict[str, Any]:
        return {**{name: self.counts[name] for name in COUNTS}, "every_row_because": self.every_row.because}

    # Checkpoints.

    def _layout(self) -> dict[str, int]:
        """Return the options that decide which rows a micro-batch has."""
        args = self.trainer.args
        names = ("per_device_train_batch_size", "steps_per_generation", "num_iterations", "num_generations")
        return {**{name: getattr(args, name) for name in names}, "processes": self.trainer.accelerator.num_processes}

    def _place(self) -> dict[str, Any]:
        """Return where the run stands in TRL's generation batches."""
        trainer = self.trainer
        per_generation: Any = trainer.args.steps_per_generation  # TRL's config fills it in
        generates = trainer._step % (per_generation * trainer.num_iterations) == 0
        return {
            "step": trainer._step,
            "batches": [] if generates else [*map(dict, trainer._buffered_inputs or ())],
            "metrics": {name: list(values) for name, values in trainer._metrics["train"].items()},
            "distance": copy.copy(trainer.distance),
            "users": self.of_users.now() if self.of_users.is_any and trainer._step else {},
        }

    def state_dict(self) -> dict[str, Any]:
        place = self._place() if self._before is None else self._before
        batches = tree_map_only(Tensor, Tensor.clone, place["batches"])  # they are views of one generation batch
        more = {"batches": batches, "distance": place["distance"].state_dict(), "layout": self._layout()}
        more |= {"reached": self.skips.reached(self.trainer.model), "table": table_of(self.trainer)}
        return {OWN: {**place, **more}}

    def resume(self, state: dict[str, Any]) -> None:
        if self.name not in state:
            self.load_state_dict({})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer, place = self.trainer, state.get(OWN)
        if place is not None:
            self.of_users.restore(place.get("users", {}))  # like others below not in older checkpoints
            self.skips.take_up(trainer.model, place.get("reached", {}))
        usable = place is not None and place["layout"] == self._layout()
        if trainer._agree(int(not usable)) or place is None:  # on any process
            logger.warning(
                "The checkpoint %s: completions are generated anew, as TRL does after a resume.",
                "lacks the completions of a process"
                if place is None
                else "was saved with another division of generation batches",
            )
            return
        device = trainer.args.device
        batches = tree_map_only(Tensor, lambda tensor: tensor.to(device), place["batches"])
        trainer._step, trainer._buffered_inputs = place["step"], batches or None
        trainer._metrics["train"].update(place["metrics"])
        trainer.distance.load_state_dict(place.get("distance", {}))
        restore_table(trainer, place.get("table", {}))


# Configs.

_OF_LEAPS = {
    *options_of("Phases", "Leaps", "Verification", "Learning rate and optimizer", "Divergence"),
}.difference(("enable_predict", "preset", "muon_momentum"))
_NO_LEAPS = "a leap is verified on batches that training has not reached, and here these are not generated yet"


@dataclass
class ExactSkipArguments:
    """Options of trainers that sample completions and compare their rewards, beside those of [`HybridArguments`]."""

    exact_skips: Literal["auto", "off"] = option(
        "auto",
        "Leave out rows whose gradient is exactly zero, because all completions of their prompt got the same reward. "
        "auto: if the update stays TRL's, under dropout its distribution; otherwise every row is computed, and the log "
        "says why. off: never.",
        group="GRPO and RLOO",
    )
    equal_rewards: Literal["zero", "trl"] = option(
        "zero",
        "What the advantage is where all completions of a prompt got the same reward. zero: zero. trl: what rounding "
        "leaves of the difference, which is often not zero if rewards are not whole numbers, and is trained on.",
    )
    rollouts: Literal["auto", "off"] = option(
        "auto",
        "How transformers' `generate` samples completions. auto: a prompt is computed once for all of its completions. "
        "On a CPU rows that have ended leave the batch; on a CUDA device the pass of a token is captured as a graph. "
        "Completions and random numbers stay TRL's. Where that is not known to be exact, and on other devices, it is "
        "left to TRL, and the log says why. off: as TRL does it.",
    )


@dataclass
class RolloutConfigBase(ExactSkipArguments, TRLConfigBase, _Arguments):
    """The options and checks of [`HybridGRPOConfig`] and [`HybridRLOOConfig`]."""

    enable_predict: bool = option(False, f"Refused: {_NO_LEAPS}.")
    exactness = "rounding"

    def __post_init__(self):
        for name, kind in get_type_hints(ExactSkipArguments).items():
            setattr(self, name, as_declared(name, getattr(self, name), kind))
        super().__post_init__()
        if not vars(self)["use_vllm"]:  # to vLLM -1 are all tokens
            check_range("top_k", vars(self)["top_k"], {"at_least": 0})
        if self.enable_predict:
            raise ValueError(f"`enable_predict=True` does not work here: {_NO_LEAPS}. Leave it out.")
        for name, value in hybrid_values(self).items():
            is_changed = value not in (getattr(HybridArguments, name), "off")
            if (is_changed and name in _OF_LEAPS) or value in ("conservative", "aggressive"):
                raise ValueError(
                    f"`{name}={value}` does not work with completions that are generated in training: it belongs to "
                    "phases with leaps. Leave it out."
                )


@dataclass
class HybridGRPOConfig(RolloutConfigBase, GRPOConfig):
    """
    [`~trl.GRPOConfig`] with `exact_skips` and those options of [`HybridArguments`] that need no leaps: `optim="muon"`
    and its options, `preset="fast"`, and those of memory, of memory that runs out, checkpoints, samples and the memory
    profile. One default of the former differs, `bf16`, as in [`HybridSFTConfig`].

    Raises:
        ValueError: As [`HybridConfig`], and for options of leaps.
    """


@dataclass
class HybridRLOOConfig(RolloutConfigBase, RLOOConfig):
    """[`~trl.RLOOConfig`] with the options of [`HybridGRPOConfig`], and the same checks."""


# Trainers.


class PromptRows(Exchange):
    """Shares the rows of completions. Before a run their prompts are known, which rollouts compute as one tree."""

    unforeseen = ("these are shares of the tokens of prompts: completions are not there yet",)
    tokens_of: Callable[[list], list[list[int]] | None]

    def rows_foreseen(self, batch: Any) -> Rows | None:
        if "images" in batch[0] or "image" in batch[0]:  # the same tokens stand for other images
            return None
        if (prompts := self.tokens_of([row["prompt"] for row in batch])) is None:
            return None
        ids = [torch.tensor(row).flip(0) for row in prompts]
        padded = [pad_sequence(t, batch_first=True).flip(1) for t in (ids, [torch.ones_like(row) for row in ids])]
        return rows_of_states(dict(zip(("input_ids", "attention_mask"), padded)))


class RolloutTrainerMixin(TRLTrainerMixin, _Trainer):  # ty: ignore[incompatible-method-override]
    """
    Common part of both trainers. It hands TRL's loss the planned micro-batches in place of TRL's own. `self.rollouts`
    is the part of the run that plans them.
    """

    config_class: type
    method: str
    """As TRL names output folders."""
    can_leap = False
    draws_first = True
    args: GRPOConfig
    model: torch.nn.Module
    _buffered_inputs: list[Batch] | None
    _drawn: Drawn | None = None
    """Which random numbers the model draws in training, once a run has asked."""
    _cannot_draw: str | None = None
    """Why that could not be found out."""
    _gathers = False
    """Whether completions are computed by weights that FSDP2 has gathered."""

    def __init__(self, model, reward_funcs=None, args=None, *positional, **kwargs):
        args = config_for(args, model, self.config_class, self.method)
        for name in ("probe_dataset", "direction"):
            if kwargs.get(name) is not None:
                raise ValueError(f"`{name}` is for leaps, which are not made here: {_NO_LEAPS}. Leave it out.")
        _, why, half_precision = options_of_rows(args)
        if args.torch_compile:
            why = "`torch_compile=True` would compile anew for each length of a generation"
        # `auto` is on: without leaps the trainer is not asked to be TRL's to the bit.
        self.rows = PromptRows(getattr(args, "share_rows", "auto") == "off", why, half_precision)
        tools = "environment_factories"  # prompts have those of the environments of a step
        self.rows.tokens_of = lambda rows: None if getattr(self, tools, None) else self._tokenize_prompts(rows)[0]
        super().__init__(model, reward_funcs, args, *positional, **kwargs)

    def own_parts(self) -> list[Part]:
        self.rollouts, self.generation, self.distance = Rollouts(self), GenerationBatch(), SamplerDistance()
        self.decoding = Decoding(getattr(self.args, "rollouts", "auto") == "off", self.is_world_process_zero)
        return [*super().own_parts(), self.rollouts, self.decoding]

    @property
    def generated(self) -> list[Batch]:
        """The micro-batches of TRL's generation batch; none before the first."""
        return self._buffered_inputs or []

    @property
    def _mean(self) -> Mean:
        """What the loss is divided by."""
        raise NotImplementedError

    _rows_that_count = staticmethod(rows_that_count)

    # Completions.

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        decoding, generation, completing = self.decoding, self.generation, contextlib.nullcontext()
        generation.turns += 1
        if self.model.training:
            decoding.counts["turns"] += len(prompt_ids)
        if not decoding.off:
            model = self.accelerator.unwrap_model(self.model_wrapped, keep_torch_compile=False)
            if (why := self._reason_not_decoded(model)) is None:
                users = self.rollouts.users
                if getattr(self, "tools", None) or getattr(self, "rollout_func", None) or users[OF_TURNS]:
                    self._begin_turn()
                prompts = None if users[OF_TURN] else prompt_ids
                completing = decoding.completing(model, prompts, counts=self.model.training)
            else:
                decoding.fallbacks.cannot_be_exact(why)
        with completing:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    def _begin_turn(self) -> None:
        """Keep what is computed of conversations that may go on, unless the model draws random numbers."""
        if self.generation.turns < 3 and self.generation.inputs:
            draws = self.model.training and self._drawn_in_training() != "nothing"
            if self.generation.turns == 1 and not draws:
                self.decoding.turns = Turns()
            elif draws and self.generation.turns == 2:
                self.decoding.anew.cannot_be_exact("the model draws random numbers, in TRL new ones in each turn")

    @functools.cached_property
    def _sharding(self) -> str | None:
        return sharding_of(self.args)

    def _reason_not_decoded(self, model: Any) -> str | None:
        """Return why completions are left to TRL or to another engine; `None` if they are not."""
        for engine in ("use_vllm", "use_transformers_continuous_batching"):
            if getattr(self, engine, False):
                return f"`{engine}=True` has an engine of its own"
        if self.memory.streams:
            return "layers are streamed (`memory`), and come in once for each token of all rows"
        if self._sharding is not None and not (self._gathers and model.device.type == "cpu"):
            return f"with `{self._sharding}` processes generate in step"
        if (why := reason_not_this_model(model)) is not None:
            return why
        if self.model.training and self._drawn_in_training() == "by batch":
            return "a forward pass in training draws a random number for the whole batch"
        return None

    def _fits_whole(self, model: Any) -> bool:
        """Whether FSDP2 shards this model, and every process has room for two of it."""
        if not (shards_by_fsdp2(self.args) and hasattr(model, "unshard")):
            return False
        free, size = device_memory(self.args.device), sum(w.numel() * w.element_size() for w in model.parameters())
        return not self._agree(int(free is not None and free < 2 * size))

    def _drawn_in_training(self) -> Drawn:
        """Return which random numbers the model draws in training. Where that is not found out, it may be any."""
        if self._drawn is None:
            bare = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            self._cannot_draw = None
            try:
                self._drawn = drawn_in_training(bare, self.args.device)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self._drawn = "by batch"
                own, doing = module_of_user(bare), "the model does not take ten tokens"
                self._cannot_draw = self.rollouts.every_row.did_not_work_with(own, error, doing)
        return self._drawn

    # Rewards and advantages.

    def _sampled(self, prompts: list[Any], output: tuple) -> Sampled:
        """Return what is needed of the tuple that TRL's `_generate` returns."""
        raise NotImplementedError

    def _total_rewards(self) -> Tensor | None:
        """Return the rewards that are compared within a group, shape [rows]; `None` if others take part."""
        pending: Any = self.generation.on_host
        return total_rewards(torch.tensor(pending.read()), self.reward_weights)

    def _rewarded_alike(self) -> Tensor | None:
        """
        Return which rows of all processes are in a group of equal rewards, on the host; `None` if their advantage is
        not zero.
        """
        zero = getattr(self.args, "equal_rewards", "zero") == "zero"
        rewards = self._total_rewards() if zero else None
        group: Any = self.num_generations if self.model.training else self.num_generations_eval
        return None if rewards is None else rewarded_alike(rewards, group)

    def _own_rows(self, values: Tensor) -> Tensor:
        """Return the values of this process's rows, of those of all processes."""
        count = len(values) // self.accelerator.num_processes
        return values[self.accelerator.process_index * count :][:count]

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        generation = self.generation
        if generation.rewards_first and generation.rewards is not None:
            return generation.rewards
        copies = [*map(list, completion_ids_list)]  # reward functions may change them, and a plan reads them later
        rewards = super()._calculate_rewards(inputs, prompts, completions, copies)
        generation.on_host = PendingRead(rewards)  # TRL waits for some of them before anybody reads these
        return rewards

    def _generate(self, prompts):
        if not hasattr(self, "decoding"):  # made without `__init__`, as by TRL's tests
            return super()._generate(prompts)
        if self._sharding is None:
            output = super()._generate(prompts)
        else:
            model = self.accelerator.unwrap_model(self.model_wrapped, keep_torch_compile=False)
            self._gathers = not (self.decoding.off or self.use_vllm) and self._fits_whole(model)
            with gathered(model) if self._gathers else contextlib.nullcontext():
                output = super()._generate(prompts)
        self.decoding.turns = None
        self.generation.sampled = self._sampled(prompts, output)
        return output

    def _generate_and_score_completions(self, inputs):
        # Log-probabilities of rows without advantage are read by nobody: rewards are asked for first.
        users, rewards_first = self.rollouts.users[OF_GENERATION], self.rollouts.leaves_out and self.model.training
        generation = GenerationBatch(inputs, torch.is_grad_enabled(), rewards_first and users is None)
        self.generation, self.decoding.chosen, self.decoding.turns = generation, None, None
        before = Counter(self.decoding.counts)
        try:
            batch: Batch = super()._generate_and_score_completions(inputs)
        finally:
            generation.rewards_first, self.decoding.turns = False, None
        if self.model.training and (generation.turns > 1 or getattr(self, "tools", None)):
            self._log_turns(self.decoding.counts - before, len(inputs))
        if users is not None:
            self.rollouts.users_rewards.cannot_be_exact(f"`{users}` is not TRL's")
            return batch
        if generation.left_out is not None and "old_per_token_logps" in batch:
            batch["old_per_token_logps"].masked_fill_(generation.left_out[:, None], 0.0)
        # RLOO keeps sums over the tokens of a row, with which they cannot be compared.
        if (chosen := self.decoding.chosen) is not None and generation.turns == 1 and "old_logps" not in batch:
            padding = batch["completion_ids"].shape[1] - chosen.shape[1]
            batch[OF_SAMPLER] = torch.nn.functional.pad(chosen.log(), (0, padding))
        logged: Any = self._logs["advantages"]  # of all processes, on the host
        training, rows = self.model.training, len(batch["advantages"]) * self.accelerator.num_processes
        of_log = self._own_rows(torch.tensor([*logged][-rows:])) if training else torch.empty(0)
        if (alike := self._rewarded_alike()) is not None:
            own = self._own_rows(alike)
            batch["advantages"] = batch["advantages"].masked_fill(own.to(self.args.device, non_blocking=True), 0.0)
            if training:
                self.rollouts.counts["rows_of_rounding"] += int(of_log[own].ne(0).sum())
                of_log[own] = 0.0
            for place, zero in zip(range(-1, -len(logged) - 1, -1), reversed(alike.tolist())):
                logged[place] = 0.0 if zero else logged[place]
        sampled, plans = generation.sampled, training and self.rollouts.plans
        is_plain = batch["advantages"].dim() == 1 and not self.mask_truncated_completions
        if plans and is_plain and sampled is not None and sampled.is_whole:
            # It is shuffled and divided with the rest.
            widths = batch["prompt_ids"].shape[1], batch["completion_ids"].shape[1]
            batch[ON_HOST] = sampled.on_host(*widths, of_log)
        return batch

    def _log_turns(self, counts: Counter[str], rows: int) -> None:
        """Put what a generation batch of so many rows has counted into TRL's metrics."""
        names = {"prompt_tokens_computed": "turns/tokens_prefilled", "prompt_tokens_shared": "turns/tokens_kept"}
        metrics = {"turns/mean": counts["turns"] / rows, **{of: counts[name] for name, of in names.items()}}
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def _old_rows(self, attention_mask: Tensor, kept: int) -> list[int] | None:
        """
        Ask for the rewards. Return the rows of this process that may have an advantage, or `None` for all of them.

        `attention_mask`, of shape [rows, width], is that of prompts and completions; `kept` the width of the latter.
        """
        generation, inputs = self.generation, self.generation.inputs
        sampled: Any = generation.sampled
        sampled.extend(inputs)
        with torch.set_grad_enabled(generation.with_grad):
            of_rows = sampled.prompts, sampled.completions, sampled.completion_ids
            generation.rewards = self._calculate_rewards(inputs, *of_rows)
        if (alike := self._rewarded_alike()) is None:
            return None
        counts = ~self._own_rows(alike)
        if self.mask_truncated_completions:
            counts &= attention_mask[:, -kept:].any(dim=1).cpu()
        if self._sharding is None:
            return counts.nonzero()[:, 0].tolist()
        # All processes gather sharded layers, in equally many passes. Some fill up with rows that do not count.
        return sorted(counts.int().argsort(descending=True, stable=True)[: self._agree(int(counts.sum()))].tolist())

    def _in_a_walk(self, compute, model, input_ids, attention_mask, kept, batch_size, **kwargs) -> Tensor | None:
        """
        Return log-probabilities of rows, so many of which are computed at a time, where streamed layers come in once
        for all of them; `None` elsewhere. Those of adapters bring their base along, if it is the reference.
        """
        if not (batch_size and self.memory.streams and self.model.training) or torch.is_grad_enabled():
            return None
        adapters = adapters_of(self.accelerator.unwrap_model(model).modules())
        ways: list[Callable[[], Any]] = [contextlib.nullcontext]
        if self.beta and self.ref_model is None and adapters and not adapters[0] and "ref" not in adapters[1]:
            ways.append(functools.partial(as_reference, self))

        def compute_part(way: Callable[[], Any], rows: Tensor) -> Tensor:
            others = take([{name: value for name, value in kwargs.items() if value is not None}], rows)
            with torch.no_grad(), way():
                return compute(model, input_ids[rows], attention_mask[rows], kept, **others)[0]

        parts = torch.arange(len(input_ids)).split(batch_size)
        found = self.memory.together([functools.partial(compute_part, way, rows) for way in ways for rows in parts])
        if found is None:
            return None
        if len(ways) > 1:
            self.generation.of_reference = input_ids, torch.cat(found[len(parts) :])
        return torch.cat(found[: len(parts)])

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, *args, **kwargs
    ):
        generation, in_loss, chosen = self.generation, self._in_loss, None  # another micro-batch may run meanwhile
        if (of_reference := generation.of_reference) is not None and of_reference[0] is input_ids:
            return of_reference[1], None, None
        most = None if torch.is_grad_enabled() else self.recovery.policy.scored_rows
        batch_size = batch_size if most is None else min(batch_size or most, most)
        if generation.rewards_first and generation.sampled is not None and generation.rewards is None:
            chosen = self._old_rows(attention_mask, logits_to_keep)
        try:
            with self.rows.on(self.accelerator.unwrap_model(model)):
                compute = super()._get_per_token_logps_and_entropies
                if chosen is None or len(chosen) == len(input_ids):
                    rows = model, input_ids, attention_mask, logits_to_keep, batch_size
                    if (found := self._in_a_walk(compute, *rows, **kwargs)) is not None:
                        return found, None, None
                    log_probs, *others = compute(*rows, *args, **kwargs)
                    if in_loss is not None:
                        self._compare_with_sampler(in_loss, log_probs.detach())
                    return log_probs, *others
                self.rollouts.counts["log_probs_skipped"] += len(input_ids) - len(chosen)
                # To TRL, NaN is what vLLM could not say: a ratio of 1, without a part in the metrics of the difference.
                corrects = self.use_vllm and getattr(self, "vllm_importance_sampling_correction", False)
                shape = (len(input_ids), logits_to_keep)
                log_probs = torch.full(shape, float("nan") if corrects else 0.0, device=input_ids.device)
                rows = indices(chosen, input_ids.device)
                generation.left_out = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
                generation.left_out[rows] = False
                if chosen:
                    others = take([{n: v for n, v in kwargs.items() if v is not None}], torch.tensor(chosen))
                    given = model, input_ids[rows], attention_mask[rows], logits_to_keep, batch_size
                    computed = self._in_a_walk(compute, *given, **others)
                    computed = compute(*given, *args, **others)[0] if computed is None else computed
                    log_probs = log_probs.to(computed.dtype).index_copy(0, rows, computed)
                return log_probs, None, None
        except Exception as error:
            self._score_fewer(error, min(batch_size or len(input_ids), len(input_ids)))
        return self._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, batch_size, *args, **kwargs
        )

    def _score_fewer(self, error: Exception, rows: int) -> None:
        """Score fewer rows at a time from here on, if memory ran out in a pass without gradients."""
        if torch.is_grad_enabled() or rows == 1:
            raise error
        generates, self.rollouts.generates = self.rollouts.generates, False  # completions are there
        self.recovery.catch(error)
        self.rollouts.generates, smaller = generates, (rows + 1) // 2
        self.recovery.policy.scored_rows = smaller
        self.recovery.note("split log-probabilities", before=rows, after=smaller)
        logger.warning("Log-probabilities of %d rows do not fit: %d at a time from here on.", rows, smaller)
        free_memory()

    _in_loss: Batch | None = None
    """The micro-batch whose loss is computed."""

    def _compare_with_sampler(self, inputs: Batch, log_probs: Tensor) -> None:
        """
        Add to the distance between the log-probabilities with which the completions were drawn and those of the
        training pass, shape [rows, tokens].
        """
        of_sampler, several = inputs.get(OF_SAMPLER), self.accelerator.num_processes > 1
        if not self.model.training or (of_sampler is None and (not several or self.use_vllm)):
            return
        found = log_probs.new_full((2,), float("nan"))  # where TRL completes, and another process may not
        if of_sampler is not None:
            mask = tokens_in_loss(inputs).bool()
            if (old := inputs.get("old_per_token_logps")) is not None:  # the policy has moved since
                log_probs, mask = old, mask & old.ne(0)  # zero: a row without advantage, for which it was not computed
            distance = (log_probs - of_sampler).abs().masked_fill(~mask, 0.0)
            found = torch.stack([distance.sum() / mask.sum().clamp(min=1), distance.max()])
        self.distance.add(self.accelerator.gather(found) if several else found)

    def _agree(self, count: int) -> int:
        if self.accelerator.num_processes == 1:
            return count
        return int(self.accelerator.gather(torch.tensor([count], device=self.args.device)).max())

    def _reason_not_left_out(self) -> RowsStay | None:
        """Return why leaving rows out would change the update, or `None` if it would not."""
        return self._reason_not_moved()

    def _reason_not_moved(self) -> RowsStay | None:
        """Return why other rows in a micro-batch would change the update, or `None` if they would not."""
        if (place := self.rollouts.users[OF_MICRO_BATCHES]) is not None:
            return RowsStay(f"`{place}` is not TRL's, and sees each micro-batch", f"train without `{place}`")
        if steps_in_backward(optimizer := optimizer_name(self.args)):
            return RowsStay(f"`optim={optimizer}` steps inside the backward pass", "set another `optim`")
        if self.run.step.acts is not None:
            return RowsStay(self.run.step.acts)
        of_weights = [of for w in self.model.parameters() for of in (w._backward_hooks, w._post_accumulate_grad_hooks)]
        if of_user([hook for of in of_weights if of for hook in of.values()]):
            return RowsStay("a hook on a weight sees the gradient of each micro-batch")
        if not windows_may_change(self.args):
            return RowsStay(f"`{self._sharding}` counts the backward passes of a step")
        if self.aux_loss_enabled:
            # It needs every layer of a row, forward and backward. The head alone could be left out.
            why = "the router's loss (`router_aux_loss_coef`) has a gradient in every layer of every row"
            return RowsStay(why, "set `router_aux_loss_coef=0.0`")
        if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in self.model.modules()):
            return RowsStay("batch normalisation mixes rows")
        if self._drawn_in_training() == "by batch":
            if self._cannot_draw is not None:
                return RowsStay(self._cannot_draw)
            why = "the model draws a random number for several rows (LayerDrop, for example)"
            return RowsStay(why, "set that rate to 0 in its config")
        bare = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if (buffer := changed_buffer(bare, self.args.device)) is not None:
            return RowsStay(f"a forward pass changes the buffer `{buffer}`, which counts every row")
        return None

    # A window.

    @property
    def cannot_repeat(self) -> str | None:  # ty: ignore[incompatible-property-override]
        rollouts = self.rollouts
        if rollouts.generates or (rollouts.generated_at or 0) > rollouts.window_begins_at:
            return (
                "Completions of a step are not generated twice. Lower `per_device_train_batch_size` and raise "
                "`gradient_accumulation_steps`."
            )
        return None

    @property
    def rows_at_once(self) -> int | None:  # ty: ignore[incompatible-property-override]
        return None if self._reason_not_moved() is not None else self.args.per_device_train_batch_size

    def begin_again(self) -> None:
        """The completions of the window are there. What losses have counted and logged of it goes."""
        rollouts, self._step = self.rollouts, self.rollouts.window_begins_at
        rollouts.counts.subtract(rollouts.planned)
        rollouts.planned.clear()
        for name, values in self._metrics["train"].items():
            del values[rollouts.logged.get(name, 0) :]

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.rollouts.leaves_out and self.accelerator.sync_gradients:
            self.rollouts.skips.fill_gradients(self.model)
        return loss

    def _prepare_inputs(self, inputs):
        rollouts = self.rollouts
        if self.model.training and self._step == rollouts.window_begins_at:
            rollouts.skips.planned.clear()  # of a window that begins again
            rollouts.choose_rows()
        per_generation: Any = self.args.steps_per_generation  # TRL's config fills it in
        if self.model.training and rollouts.generated_at == self._step:  # the window is computed again
            inputs = self.generated[self._step % per_generation]
        else:
            due = self._buffered_inputs is None or self._step % (per_generation * self.num_iterations) == 0
            rollouts.generates = self.model.training and due
            inputs = super()._prepare_inputs(inputs)  # generates if it is time to
            if rollouts.generates:
                rollouts.generated_at, rollouts.generates = self._step, False
            if self._step == rollouts.window_begins_at and self.recovery.retries:
                self.recovery.random, metrics = RandomStates.now(self.args.device), self._metrics["train"]
                rollouts.logged = dict(zip(metrics, map(len, metrics.values())))
        if not rollouts.plans or not self.model.training:
            return inputs
        if not rollouts.skips.planned:
            planned = rollouts.plan()
            here = rollouts.skips.on_host
            completions = [batch["completion_ids"] for batch in planned]
            self.rows.copy_ahead(completions, map(rows_of_completions, here), planned)
        return rollouts.skips.planned.popleft()

    def _compute_loss(self, model, inputs):
        if inputs is None:
            return torch.zeros((), device=self.args.device, requires_grad=True)
        most = self.recovery.policy.micro_batch_size
        if most is not None and len(inputs["completion_ids"]) > most and torch.is_grad_enabled():
            return self._loss_in_parts(model, inputs, most)
        self._in_loss, planned = inputs, self.rollouts.plans
        try:
            with self.rows.host.computing(inputs["completion_ids"]) if planned else contextlib.nullcontext():
                return super()._compute_loss(model, inputs)
        finally:
            self._in_loss = None

    def _loss_in_parts(self, model, inputs: Batch, most: int) -> Tensor:
        """Return the loss of the last rows, and that of the others, whose gradients are there then."""
        parts = [take([inputs], rows) for rows in torch.arange(len(inputs["completion_ids"])).split(most)]
        of_parts: list[Any] = [len(part["completion_ids"]) for part in parts]
        if self._mean == "tokens":
            of_parts = [tokens_in_loss(part).sum() for part in parts]
        whole, later = sum(of_parts[1:], of_parts[0]), self.current_gradient_accumulation_steps
        whole = whole.clamp(min=1) if torch.is_tensor(whole) else whole
        is_divided = getattr(self, "loss_is_scaled_for_ga", None) or self.compute_loss_func is not None
        done: Any = 0.0
        for part, size in zip(parts, of_parts):
            loss = self._compute_loss(model, part) * (1.0 if self._mean == "items" else size / whole)
            if part is not parts[-1]:
                self.accelerator.backward(loss if is_divided else loss / later)
                done = done + loss.detach()
        return loss + done

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            logs |= self.distance.take()
        left_out = self.rollouts.leaves_out and self._buffered_inputs and not self._metrics["train"].get("entropy")
        # Of several processes each computes a row in every window, and a callback may log on one alone.
        if left_out and "loss" in logs and self.model.training and self.accelerator.num_processes == 1:
            # Every row since the last entry was left out, and callbacks count on TRL's metrics of tokens. Its loss
            # measures them. One forward pass of the last micro-batch is little beside the steps that were left out, and
            # the values are those of real rows. Under dropout it draws random numbers, which training draws again.
            inputs = dict(self.generated[(self._step - 1) % len(self.generated)])
            inputs.pop("old_per_token_logps", None)  # not computed for these rows: their ratios are taken to be 1
            inputs.pop(OF_SAMPLER, None)  # of a policy that has moved since
            as_before = RandomStates.now(self.args.device).again()
            with as_before, torch.no_grad(), self.compute_loss_context_manager(), self.rows.evaluating():
                self._compute_loss(self.model_wrapped, inputs)
        super().log(logs, *args, **kwargs)


class HybridGRPOTrainer(RolloutTrainerMixin, GRPOTrainer):  # ty: ignore[incompatible-method-override]
    """
    Drop-in for [`~trl.GRPOTrainer`] that leaves out rows without advantage, whose gradient is exactly zero, and
    computes a prompt once when it samples its completions.

    Completions, rewards, weights, losses and schedule are those of TRL's trainer up to rounding. docs/grpo.md says
    what is not. There are no leaps.

    Args:
        model, reward_funcs, args, positional, kwargs:
            As [`~trl.GRPOTrainer`]; `args` is best a [`HybridGRPOConfig`].

    Raises:
        TypeError: If `args` is a hybrid config without TRL's options.
        ValueError: As [`HybridTrainerMixin`], and for `probe_dataset` and `direction`, which are for leaps.

    Example:

    ```python
    from hf_hybrid import HybridGRPOConfig, HybridGRPOTrainer

    trainer = HybridGRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", reward, HybridGRPOConfig("out"), train_dataset=prompts)
    trainer.train()
    print(trainer.hybrid_summary()["backward_passes_avoided_exactly"])
    ```
    """

    config_class, method = HybridGRPOConfig, "GRPO"

    @property
    def _mean(self) -> Mean:
        return MEAN_OF_LOSS.get(self.loss_type, "items")

    def _tool_call_loop(self, *args, **kwargs):
        output = super()._tool_call_loop(*args, **kwargs)
        if self.model.training:
            self.decoding.counts.update(tool_calls=output[4], tool_errors=output[5])
        return output

    def _sampled(self, prompts: list[Any], output: tuple) -> Sampled:
        prompt_ids, completion_ids, tool_mask, completions, _, extra, *_ = output
        return Sampled(prompts, completion_ids, completions, prompt_ids, tool_mask is None, extra)

    def _total_rewards(self) -> Tensor | None:
        if self.multi_objective_aggregation != "sum_then_normalize":
            return None  # the batch has a part in each advantage
        return super()._total_rewards()

    def _reason_not_left_out(self) -> RowsStay | None:
        if self.beta != 0.0:
            why = f"with `beta={self.beta}` every row has a loss, its distance from the reference"
            return RowsStay(why, "set `beta=0.0`, TRL's default")
        return super()._reason_not_left_out()

    def _reason_not_moved(self) -> RowsStay | None:
        if self.loss_type not in MEAN_OF_LOSS:
            return RowsStay(f"nothing is known of `loss_type={self.loss_type}`")
        if self._entropy_bonus_enabled:
            names = "`entropy_coef`, `use_adaptive_entropy`"
            return RowsStay(f"the entropy bonus ({names}) counts every row", f"leave out {names}")
        if self.top_entropy_quantile < 1.0:
            why = f"the threshold of `top_entropy_quantile={self.top_entropy_quantile}` is taken over every row"
            return RowsStay(why, "set `top_entropy_quantile=1.0`, TRL's default")
        return super()._reason_not_moved()


class HybridRLOOTrainer(RolloutTrainerMixin, RLOOTrainer):  # ty: ignore[incompatible-method-override]
    """
    Drop-in for [`~trl.RLOOTrainer`] that leaves out rows without advantage, see [`HybridGRPOTrainer`].

    RLOO takes `beta` times the distance from the reference off the rewards, and its default `beta` is not zero. As soon
    as the model has moved, hardly any advantage is then exactly zero, and hardly any row can be left out.

    Arguments are those of [`~trl.RLOOTrainer`], with a [`HybridRLOOConfig`] as `args`.
    """

    config_class, method = HybridRLOOConfig, "RLOO"
    _mean: Mean = "rows"

    def _sampled(self, prompts: list[Any], output: tuple) -> Sampled:
        prompt_ids, completion_ids, completions = output
        return Sampled(prompts, completion_ids, completions, prompt_ids)

    def _total_rewards(self) -> Tensor | None:
        if self.beta != 0.0 or self.normalize_advantages:
            return None  # the distance from the reference, or the batch, has a part in each advantage
        total, limits = super()._total_rewards(), self.reward_clip_range
        return total.clamp(*limits) if limits and total is not None else total

    def __init__(self, model, reward_funcs, *positional, **kwargs):
        super().__init__(model, reward_funcs, *positional, **kwargs)

    @staticmethod
    def _rows_that_count(batch: Batch) -> Tensor:
        # A row without a token in the loss has no gradient either, but TRL logs its loss, which is minus its advantage.
        return batch["advantages"].ne(0)
