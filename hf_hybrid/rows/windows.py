"""
Windows as trees: the micro-batches of an accumulation window are arranged again before the window is computed.

    Trainer's window        ( s a . . )( s b b b )( s c c . )( d d . . )      4 micro-batches, padded
    this one                    -          -          -      ( s a b b b c c d d )

`s` is a prefix that three rows share. A sum over the window does not depend on the micro-batch in which a row is
computed. Micro-batches that are not needed stay in their place as `None`, because `Trainer` counts them.

**Means.** Models of images and text do not take the number of labels in the window (`accepts_loss_kwargs`). There each
micro-batch of `Trainer` has the mean of its own losses, and the window has the mean of these. So each row brings the
number of labels of its micro-batch along, and the losses of its targets are divided by that. Where there is more than
their cross-entropy, each micro-batch is a tree of its own, whose loss is a mean as before.

**Code of a user between micro-batches** (`training_step`, `_prepare_inputs`, hooks of gradients, `on_substep_end`) gets
each micro-batch as `Trainer` gives it, and finds the gradients that `Trainer` would have by then. So there each is a
tree of its own, and it is used if the model gets what was laid out: the same tensors, into which nobody has written.

How many are needed? As few as hold no more tokens than the largest padded one. But where the micro-batches of `Trainer`
keep a GPU busy even without padding (costs.py), launching fewer saves no time. There each stays as it is, without its
padding. Or rows of several stand together, if they share so much that this costs clearly less, in micro-batches that
hold no more tokens than the largest of `Trainer` without padding.

Each window must pass four tests, the cheap ones first. May it be arranged as a tree at all (its tensors, the model)?
Can anything be saved (padding, tokens that predict nothing, shared prefixes)? Does the tree cost less than `WORTH` of
the padded rows? Was a window of its kind compared with padded rows? The first `no` keeps Trainer's window, to the last
bit. All processes give the same answer: they exchange gradients, and TRL's metrics, in each micro-batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from hf_hybrid.machine import mixed_precision_of, sharding_of, windows_may_change
from hf_hybrid.part import Phase, Step
from hf_hybrid.rows.attention import FlatRow
from hf_hybrid.rows.costs import share_saved
from hf_hybrid.rows.exchange import DIVISORS, MICRO_BATCHES, Copied, Exchange, Seen, seen_now
from hf_hybrid.rows.facts import ModelFacts, Plan, dropout_of
from hf_hybrid.rows.foreseen import LITTLE, Foreseen
from hf_hybrid.rows.images import FIRST, has_images
from hf_hybrid.rows.recurrent import layers_with_state
from hf_hybrid.rows.tree import (
    IGNORED,
    IMAGES,
    LEAST,
    PACKED,
    WORD,
    Batch,
    Row,
    Tree,
    batches_of,
    by_batch,
    divide,
    join,
    padded,
    places_of,
    reason_not_documents,
    reason_not_rows,
)
from hf_hybrid.run.run import Run
from hf_hybrid.run.trainer_view import LossView, TrainerView, own_losses, unknown_loss

REMEMBERED = 200_000
"""Tokens of the first windows that are kept, to say what their rows would share if they all stood together."""
WITHOUT_LAUNCHES = ("cpu",)
"""Devices whose windows are merged as far as padded rows allow, however large the micro-batches are."""
NO_LABEL = "no token of this batch has a label"


def reason_not_window(window: Sequence[Any], facts: ModelFacts) -> str | None:
    """Return why a batch of a window is not rows that this room can read, as far as its form tells."""
    for inputs in window:
        if (reason := reason_not_rows(inputs, facts.of_images)) is not None:
            return reason
    return None


def may_save(batches: Sequence[Any]) -> bool:
    """
    Whether a window has padding, tokens that predict nothing, or rows that begin alike. Cheap, and often no.

    The batches are on the host, as the loader gives them. One that holds anything else than such rows may save
    something too: [`Exchange`] looks at what it holds.
    """
    starts: list[tuple[int, ...]] = []
    for batch in batches:
        ids, labels = (batch.get(name) for name in ("input_ids", "labels")) if isinstance(batch, Mapping) else (0, 0)
        if not torch.is_tensor(ids) or not torch.is_tensor(labels) or ids.dim() != 2 or ids.shape[1] < LEAST:
            return True
        if any(torch.is_tensor(value) and value.dim() and value.shape != ids.shape for value in batch.values()):
            return True
        mask = batch.get("attention_mask")
        if len(batch) > 2 + (mask is not None) or (labels < 0).any() or (mask is not None and (mask == 0).any()):
            return True
        starts += map(tuple, ids[:, :LEAST].tolist())
    return len(set(starts)) < len(starts)


class SharedWindows(Exchange):
    """
    Lays out the accumulation windows of `Trainer` and of TRL's `SFTTrainer`, whose losses are sums over the labels of a
    window, or means over those of its micro-batches.

    `micro_batches_saved` counts those of this process that are left over. `shared_if_together` is the share of the
    tokens of the first windows that would be shared if all rows that begin alike stood in one window.
    """

    def __init__(self, trainer: LossView, reason_plain: str | None = None):
        half_precision = mixed_precision_of(trainer.args) != "no"
        super().__init__(reason_plain=reason_plain, half_precision=half_precision, compiles=trainer.args.torch_compile)
        self.trainer = trainer
        self.comparison.is_possible = trainer.accelerator.num_processes == 1 and not trainer.memory.streams
        self._is_counting = self._balances = self._stays_apart = self.in_every_pass = False  # what counts is windows
        self._is_fused = "fused_lm_head" in trainer.more_inputs
        """Whether TRL computes head and loss, and the model only what comes before."""
        self._first_rows: list[Row] = []
        self._loss: Any = None
        self._in_loss: str | None = None
        """What [`reason_in_loss`] returned of it."""
        self._seen: list[Seen] = []
        """The batches of the step as they were when it began, where code of a user may change them."""

    @property
    def model(self) -> nn.Module:
        """The model that hooks see: without what wraps it for several devices."""
        return self.trainer.accelerator.unwrap_model(self.trainer.model)

    @property
    def models(self) -> list[nn.Module]:  # ty: ignore[incompatible-property-override]
        return [self.model]

    # A run.

    def begin(self, run: Run) -> None:
        super().begin(run)
        self._loss = None
        self._first_rows, self._first_tokens = [], 0
        in_order = self.trainer.memory.streams or sharding_of(self.trainer.args) is not None
        self.comparison.in_any_order = not in_order

    def _saved(self) -> str:
        together, share = self._shared_if_together() or 0.0, self.counts["tokens_shared"] / self.counts["tokens"]
        more = f" If rows that begin alike stood together in the data, {together:.0%} would be shared."
        return super()._saved() + more * (together > share + 0.05)

    def clean_up(self) -> None:
        super().clean_up()
        self._seen = []

    def summary(self) -> dict[str, Any]:
        return {**super().summary(), "shared_if_together": self._shared_if_together()}

    def _shared_if_together(self) -> float | None:
        return share_saved(Tree.of(self._first_rows)) if self._first_rows else None

    def foresee(self, windows: Sequence[Sequence[Mapping[str, Any]]]) -> Foreseen:
        """
        Return what would be saved in these windows of micro-batches, on the host. Nothing is computed and nothing said,
        so random numbers that the model draws beside dropout, and the comparison of the first window, are not known.
        """
        facts, dropout = self.facts_of(self.model), dropout_of(self.model)
        if (reason := self.reason_plain or self._reason_not_trees(facts)) is not None:
            return Foreseen(reason)
        self._stays_apart = not self.trainer.model_accepts_loss_kwargs and self._has_other_means()
        total = padding = shared = 0
        for window in windows:
            if (reason := reason_not_window(window, facts)) is not None:
                return Foreseen(reason)
            batches = self._batches_of(window, facts)
            if isinstance(batches, str):
                return Foreseen(batches)
            shares = not (dropout and self._balances)
            options = {"shares": shares, "compact": self._is_compact, "whole": self._balances}
            plan = facts.plan(batches, self._divider(batches), **options)
            if plan.reason is not None:
                return Foreseen(plan.reason)
            tokens, size = sum(batch.tokens for batch in batches), sum(places_of(batches))
            total += size
            if 0 < len(plan.trees) <= len(batches) and plan.cost <= self.worth * plan.padded:
                padding += size - tokens
                shared += tokens - sum(tree.size for tree in plan.trees)
        if not shared + padding:
            return Foreseen(LITTLE)
        draws = "a shared prefix draws it once" if shared else "no prefix is shared beside a router's loss"
        but = [f"under dropout ({dropout:g}) {draws}"] if dropout else []
        if facts.again:
            but.append("layers with a state compute a prefix for each row")
        if layers_with_state(self.model):
            but.append("the first step finds out if the model's layers with a state can do this")
        if self._balances:
            but.append("rows of a micro-batch stay together, for the router's loss")
        return Foreseen(None, shared / total, padding / total, tuple(but))

    # A step.

    def begin_step(self, step: Step) -> None:
        self.host.known.clear()
        self._looked_at.clear()
        self.images = None
        self._is_laid_out = self.in_every_pass = False
        # Code of a user that acts on the first one does so before they are arranged.
        acts = step.acts is not None and all(isinstance(batch, Mapping) for batch in step.batches)
        self._seen = [seen_now(batch) for batch in step.batches] if acts else []

    def arrange(self, step: Step) -> None:
        """Lay out the micro-batches of a step, once `on_step_begin` has been called: together, or each by itself."""
        self._looked_at.clear()
        trainer, self._acts = self.trainer, step.acts
        if step.phase is Phase.PREDICT or not step.batches:
            return
        looks = self.reason_plain is None and trainer.accelerator.num_processes == 1 and not self.compiles
        if looks and not may_save(step.on_host):
            self.fallbacks.because = self.fallbacks.because or LITTLE
            self.counts["tokens"] += sum(batch["input_ids"].numel() for batch in step.batches)
            return
        before, facts = self.reason_plain, self.facts_of(self.model)  # all processes know this reason
        reason = self._reason_not_arranged(step, facts)
        batches: Any = [] if reason is not None else self._batches_of(step.on_host, facts)
        if isinstance(batches, str):
            self.fallbacks.cannot_be_exact(reason := batches)
            batches = []
        because = None if reason is not None else self._who_acts(facts)
        if (apart := because is not None) and len(step.batches) > 1:
            self.apart.cannot_be_exact(because)
        if reason is None and (reason := next(filter(None, map(reason_not_documents, step.on_host)), None)) is not None:
            self.fallbacks.cannot_be_exact(reason)
        self._stays_apart = apart or (step.items is None and self._has_other_means())
        if step.items is None and not self._stays_apart:
            batches = [batch.as_mean() for batch in batches]
        plan = self._plan_window(batches) if reason is None and self.reason_plain is None else Plan(reason or "")
        count = 0 if before is not None else self._agreed(plan, batches)
        if count and (reason := self._compare_window(plan, batches, step.items is not None)) is not None:
            count, plan = 0, plan._replace(reason=reason)
        if plan.reason is None and not count:
            self.fallbacks.because = self.plain_because or (LITTLE if plan.cost else NO_LABEL)
        self.in_every_pass = apart and count > 0
        if self.in_every_pass:
            self._lay_out_each(plan.trees, batches, step)
        elif count:
            self._lay_out(plan.trees, batches, step, count)
        self._count_window(step, batches, plan.trees)

    def _batches_of(self, window: Sequence[Mapping[str, Any]], facts: ModelFacts) -> list[Batch] | str:
        """Return the batches of a window that is on the host, or why one cannot be read."""
        if facts.encoder is None:
            return batches_of(window)
        coded = [self.with_images(facts, inputs, batch) for inputs, batch in zip(window, batches_of(window))]
        reasons = [reason for reason in coded if isinstance(reason, str)]
        return reasons[0] if reasons else [batch for batch in coded if isinstance(batch, Batch)]

    def _reason_not_arranged(self, step: Step, facts: ModelFacts) -> str | None:
        """Return why a step gets no trees, and say it. Find out what the model draws."""
        trainer = self.trainer
        loss = vars(trainer).get("compute_loss"), trainer.compute_loss_func, trainer.args.label_smoothing_factor
        if loss != self._loss:  # people set it in a run too
            self._loss, self._in_loss = loss, reason_in_loss(trainer)
        reason = self.reason_plain or self._in_loss or reason_not_window(step.batches, facts)
        if (reason := reason or self._reason_not_trees(facts)) is not None:
            self.fallbacks.cannot_be_exact(reason)
        # All processes find it out in the same step, as FSDP2 joins their passes.
        if self.reason_plain is None and facts.reason is None:
            model = self.model
            model.train()  # as `training_step` does
            if True not in facts.drawn:
                with trainer.memory.running(), trainer.compute_loss_context_manager():
                    self.drawn_by(model, trainer.args.device)
        return facts.reason or reason

    def _reason_not_trees(self, facts: ModelFacts) -> str | None:
        """Return why the model gets no trees; and find out whether there is a router's loss, of the model or of TRL."""
        self._balances = facts.router is not None and getattr(self.trainer, "aux_loss_enabled", facts.balances({}))
        return self.reason_not_trees(facts, balances=self._balances, fused=self._is_fused)

    def _has_other_means(self) -> bool:
        """Whether a mean loss is one that [`Batch.divisors`] do not give: it must be of one micro-batch as a whole."""
        return self._balances or unknown_loss(self.trainer) is not None

    # Which trees.

    @property
    def _is_compact(self) -> bool:
        """Whether the head of padded rows scores the tokens with labels alone: in TRL's, and in the chunked loss."""
        return self.trainer.args.device.type == "cuda" and self.trainer.loss_in_chunks

    def _divider(self, batches: list[Batch]) -> Callable[..., list[Tree]]:
        """Return what divides the rows of these batches into trees."""
        by_size = self._fewest if self.trainer.args.device.type in WITHOUT_LAUNCHES else self._divide
        most = min(max(places_of(batches)), self.facts_of(self.model).most_slots)
        # DDP waits for gradients of an encoder in the last micro-batch of a window, so images stay in theirs.
        several = self.trainer.accelerator.num_processes > 1 and any(map(IMAGES, batches))
        return functools.partial(by_batch if self._stays_apart or several else by_size, most=most)

    def _plan_window(self, batches: list[Batch]) -> Plan:
        device, divided = self.trainer.args.device, self._divider(batches)
        plan = self._plan(self.model, batches, divided, device, self._is_compact, self._balances)
        # Long rows that share little with their neighbours may need more micro-batches.
        return plan if len(plan.trees) <= len(batches) else Plan(cost=plan.padded, padded=plan.padded)

    def _fewest(self, rows: Sequence[Row], most: float, **options: Any) -> list[Tree]:
        """Divide the rows of a window, which come batch by batch, into as few trees as memory allows."""
        return (join if self._balances else divide)(rows, most, **options)

    def _divide(self, rows: Sequence[Row], most: float, **options: Any) -> list[Tree]:
        """As [`_fewest`], or into what keeps a GPU busy."""
        costs, own = self.facts_of(self.model).costs, by_batch(rows, most, **options)
        if not costs.keep_busy(own, self.trainer.args.device):
            return self._fewest(rows, most, **options)
        merged = self._fewest(rows, max(sum(row.length for row in tree.rows) for tree in own), **options)
        return merged if costs.pays(merged, own) and len(merged) <= len(own) else own

    def _agreed(self, plan: Plan, batches: list[Batch]) -> int:
        """Return the number of micro-batches that every process computes, 0 for Trainer's own."""
        trainer, longest = self.trainer, max((tree.longest for tree in plan.trees), default=0)
        facts, sees = self.facts_of(self.model), self.images is not None and any(map(IMAGES, batches))
        packed = facts.unknown_packed(batches) if any(map(PACKED, batches)) else None
        mine = [float(plan.reason is not None), plan.cost, plan.padded, float(len(plan.trees)), float(longest)]
        mine += [float(self.reason_plain is not None), float(packed is not None)]
        mine.append(float(sees and not facts.compared_images))
        if trainer.accelerator.num_processes > 1:
            of_all = trainer.accelerator.gather(torch.tensor([mine], device=trainer.args.device))
            mine = of_all.amax(0).tolist()
        unable, cost, price, count, self._longest, never, self._has_unknown, self._has_new_images = mine
        if never and self.reason_plain is None:
            self.reason_plain = "another process cannot compute its rows as a tree"
            self.fallbacks.cannot_be_exact(self.reason_plain)
        return 0 if unable or not count or cost > self.worth * price else int(count)

    # The comparison. All processes make it in the same window, because forward passes may join them.

    def _compare_window(self, plan: Plan, batches: list[Batch], counted: bool) -> str | None:
        """Compare some rows of the first window with padded ones, and return why they are not the same."""
        model, device, longest = self.model, self.trainer.args.device, int(self._longest)
        facts = self.facts_of(model)
        adds_up = facts.adds_up or self._is_fused
        # All processes make equally many passes: one that has no such batch takes another.
        packed = (facts.unknown_packed(batches) or batches[0]) if self._has_unknown else None
        if self._has_compared(model, longest) and adds_up and packed is None and not self._has_new_images:
            return None
        tree = plan.trees[-1] if plan.trees else _nothing(batches)[1]
        if self._has_new_images:
            tree = next((tree for tree in plan.trees if any(map(has_images, tree.rows))), tree)
        of_packed = None if packed is None else (packed, Tree.of(packed.rows() or _nothing(batches)[1].rows))
        reason = self.comparison.reason_not_same(model, tree, batches, self._quiet_loss, device, of_packed)
        if reason is None and not adds_up:
            reason = self.comparison.reason_no_sum(model, tree, batches, self._quiet_loss, device, counted)
        facts.note_compared(longest, packed, bool(self._has_new_images))
        if self.trainer.accelerator.num_processes > 1:
            failed = torch.tensor([float(reason is not None)], device=device)
            if self.trainer.accelerator.gather(failed).max() and reason is None:
                reason = "another process found that they are not the same"
                self.fallbacks.cannot_be_exact(reason)
        self.reason_plain = reason
        return reason

    def _quiet_loss(self, inputs: dict[str, Tensor], items: Tensor | None = None) -> Tensor:
        """Return the trainer's loss of a batch without leaving a trace in TRL's metrics."""
        trainer = self.trainer
        # DDP waits for gradients of weights after a pass that has any.
        model = self.model if torch.is_grad_enabled() else trainer.model
        with quiet_metrics(trainer), self.on(self.model), trainer.memory.running():
            with trainer.compute_loss_context_manager():
                return trainer.compute_loss(model, dict(inputs), num_items_in_batch=items)

    # The layout.

    def _lay_out(self, trees: Sequence[Tree], batches: list[Batch], step: Step, count: int) -> None:
        """Lay out the window of a step anew: the last `count` of its micro-batches are computed."""
        kept = {(row.batch, row.number) for tree in trees for row in tree.rows}
        left = [(n, row) for n, batch in enumerate(batches) for row in range(len(batch.ids)) if (n, row) not in kept]
        # Rows without labels are not computed, but TRL counts their tokens.
        micro_batches = [padded(tree, batches, () if index else left) for index, tree in enumerate(trees)]
        micro_batches = [_nothing(batches)] * (count - len(micro_batches)) + micro_batches  # other processes have more
        step.parts_add_up = batches[0].divisors is not None
        names = ("input_ids", "attention_mask", "labels", MICRO_BATCHES, DIVISORS)
        names = names[: 5 if step.parts_add_up else 3 + self._balances]
        tensors: list[Any] = []
        for batch, _ in micro_batches:
            tensors += (batch.ids if self.images is None else batch.decoded, *batch[1 : len(names)])
        trees_of_batches = [(tree, [batch]) for batch, tree in micro_batches]
        options: Any = {"repeats": not self._is_fused, "balances": self._balances, "images": self.images}
        rows, moved = FlatRow.on(self.trainer.args.device, trees_of_batches, tensors, **options)
        agains: Sequence[Any] = [None] * count
        if self.images is not None and sharding_of(self.trainer.args) is None and not self.trainer.memory.streams:
            passes = [of_tree[0].images.numbers for of_tree in rows]
            agains = self._in_turn(self.facts_of(self.model), passes, batches)
        step.window, self._is_laid_out = [None] * (len(step.batches) - count), True
        for (batch, tree), of_tree, again in zip(micro_batches, rows, agains):
            inputs, row = dict(zip(names, moved)), of_tree[0]
            del moved[: len(names)]
            if batch.images is not None:  # a part of what does not fit into memory brings its own
                inputs |= send_to_device(batch.images.padded(*batch[:2]), self.trainer.args.device, non_blocking=True)
                row = row._replace(images=row.images._replace(again=again))
            self.host.known[inputs["input_ids"]] = Copied(batch, tree, row)
            step.window.append(inputs)

    def _lay_out_each(self, trees: Sequence[Tree], batches: list[Batch], step: Step) -> None:
        """Lay out each micro-batch by itself: it is known by the tensors that the model gets."""
        device, numbers = self.trainer.args.device, [tree.rows[0].batch for tree in trees]
        step.batches = send_to_device(step.batches, device, non_blocking=True)
        for tree in trees:
            tree.rows = [row._replace(batch=0) for row in tree.rows]  # there is no other batch in it
        self._is_laid_out = bool(self._seen) or step.acts is None
        if not self._is_laid_out:  # the code came since `on_step_begin`
            return
        own = [(tree, [batches[number]]) for number, tree in zip(numbers, trees)]
        options: Any = {"repeats": not self._is_fused, "balances": self._balances, "images": self.images}
        rows, _ = FlatRow.on(device, own, **options)
        for number, tree, of_tree in zip(numbers, trees, rows):
            seen = self._seen[number] if self._seen else seen_now(step.batches[number])
            self.host.known[seen["input_ids"][0]] = Copied(batches[number], tree, of_tree[0], seen)

    def _count_window(self, step: Step, batches: list[Batch], trees: Sequence[Tree]) -> None:
        if self.trainer.state.epoch < 1:  # later ones hold the same rows again
            for row in [row for tree in trees if tree.shares for row in tree.rows]:
                if self._first_tokens < REMEMBERED:
                    self._first_rows.append(row)
                    self._first_tokens += row.length
        tokens = sum(batch.tokens for batch in batches)
        self.counts["tokens"] += tokens
        is_exchanged = step.window is not None or self.in_every_pass
        if self.images is not None:
            self._count_images(batches, is_exchanged)
        if is_exchanged:
            self.counts["tokens_padding"] += sum(places_of(batches)) - tokens
            self.counts["tokens_shared"] += tokens - sum(tree.size for tree in trees)
            self.counts["micro_batches_saved"] += (step.window or []).count(None)


class BalancedWindows(SharedWindows):
    """
    Windows of a trainer of TRL that logs a router's loss, as the mean over micro-batches. That of a micro-batch here is
    the sum over those of Trainer that it stands for.
    """

    trainer: Any

    def arrange(self, step: Step) -> None:
        super().arrange(step)
        self._logged_before = len(self._logged)

    def end_step(self, step: Step) -> None:
        logged, count = self._logged, len(step.batches)
        if step.window is not None and (entries := logged[self._logged_before :]):
            logged[self._logged_before :] = [sum(entries) / count] * count

    @property
    def _logged(self) -> list[float]:
        return self.trainer._metrics["train"].get("aux_loss", [])


@contextlib.contextmanager
def quiet_metrics(trainer: Any) -> Generator[None]:
    """Context whose losses leave no trace in the metrics that TRL's `compute_loss` collects, tokens among them."""
    kept = {name: vars(trainer)[name] for name in ("_metrics", "_total_train_tokens") if name in vars(trainer)}
    if "_metrics" in kept:
        trainer._metrics = {mode: defaultdict(list) for mode in kept["_metrics"]}
    try:
        yield
    finally:
        vars(trainer).update(kept)


def _nothing(batches: list[Batch]) -> tuple[Batch, Tree]:
    """Return a micro-batch of two tokens without a label, and its tree: it has a loss and gradients of zero."""
    ids = batches[0].ids[:1, :2]
    ids = ids.masked_fill(ids >= FIRST, 0)
    if ids.shape[1] < 2:
        ids = ids.repeat(1, 2)
    divisors = None if batches[0].divisors is None else torch.ones(1, dtype=torch.long)
    batch = Batch(ids, torch.ones_like(ids), torch.full_like(ids, IGNORED), torch.tensor([-1]), divisors)
    return batch, Tree.of([Row(0, ids[0].numpy().astype(WORD).tobytes(), 1, 0, 0, 0, 0)])


def reason_in_loss(trainer: TrainerView) -> str | None:
    """Return why a trainer's loss may read more than the model's."""
    if trainer.compute_loss_func is not None:
        return "`compute_loss_func` reads logits of padded rows"
    if trainer.args.label_smoothing_factor:
        return f"`label_smoothing_factor={trainer.args.label_smoothing_factor}` reads logits of padded rows"
    if own := own_losses(trainer):
        return f"`{'.'.join(own[0][1:])}` may read more than the loss"
    return None


def reason_not_shared(trainer: TrainerView) -> str | None:
    """Return why windows stay as Trainer makes them, as far as that is known of the trainer and its options."""
    args = trainer.args
    if (reason := reason_in_loss(trainer)) is not None:
        return reason
    if not windows_may_change(args):
        return f"`{sharding_of(args)}` is not known to take windows in which processes agree on micro-batches"
    if (sharding := sharding_of(args)) is not None and args.torch_compile:
        return f"`{sharding}` compiles with `torch_compile=True` what it wraps"
    if args.n_gpu > 1:
        return "`DataParallel` divides each batch over several GPUs"
    if args.neftune_noise_alpha is not None:
        return f"`neftune_noise_alpha={args.neftune_noise_alpha}` scales its noise by the length of a padded row"
    return None
