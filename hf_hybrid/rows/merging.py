"""
One pass of a model for several micro-batches, where their losses must stay apart.

A loss of preference pairs is no sum over labels. TRL computes it for each micro-batch, and collects metrics there. But
what it reads of a model, the values of targets, may come from one pass over the rows of several micro-batches. So the
host launches the layers once, and prefixes are shared among all of these rows:

    micro-batch 1     rows of 1 and 2 -> model -> values     values of 1 -> loss -> backward, as far as the values
    micro-batch 2                                            values of 2 -> loss -> backward, through the model

- **A later micro-batch** enters the model as before. While models are open, their `forward` is a stand-in that returns
  what the pass gave, and hooks read the values of this micro-batch from it.
- **Gradients.** All micro-batches but the last read the values from leaves, in which autograd adds up gradients. The
  last one reads them from [`Joined`], whose backward pass adds those of the leaves. So the model's backward pass runs
  once, where processes exchange gradients. If the last one does not read them, its loss gets a zero that leads there.
  If a user's code puts another loss in its place, what the leaves hold is taken through the model behind it.
- **What was laid out.** A micro-batch that the trainer, or a user's code, has changed is computed by itself. So is a
  second pass of a micro-batch, and one with other adapters or with gradients where the first had none.
- **Hooks** of a user get what modules compute, and gradients, of one micro-batch at a time.
- **Is it worth it?** On a GPU always, unless each micro-batch keeps it busy by itself. On a CPU there is no launch to
  save, so only for prefixes that micro-batches share.
- **Memory.** Which micro-batches are merged is decided once per window, see [`MergedRows.held`]. If memory runs out,
  all are computed one by one from then on.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_hybrid.part import Step
from hf_hybrid.rows.attention import FlatRow
from hf_hybrid.rows.exchange import Exchange, Origins, values_in
from hf_hybrid.rows.images import Joined, adapters_of, numbers_in
from hf_hybrid.rows.tree import Row, Tree, by_batch, join
from hf_hybrid.rows.windows import WITHOUT_LAUNCHES

if TYPE_CHECKING:
    from hf_hybrid.run.run import Run


class JointPass:
    """A pass of a model over some micro-batches of a window. `rows` are how each reads it, by its number."""

    def __init__(self, rows: Mapping[int, FlatRow]):
        self.unread, self.last, self.row = dict(rows), max(rows), rows[max(rows)]
        self.output: Any = None
        """What the model returned, once it has."""
        self.number = -1
        """The micro-batch that it is read for."""
        self._values: dict[str, Tensor] = {}
        self._leaves: dict[str, Tensor] = {}
        self._is_joined = False

    @property
    def waits(self) -> bool:
        """Whether gradients may wait for the model's backward pass."""
        return bool(self._leaves) and not self._is_joined

    def values_of(self, output: Any) -> dict[str, Tensor]:
        """Return the values of all targets for a micro-batch, of what the model returned for the first one."""
        if self.output is None:
            self.output, self._values = output, values_in(output)
            self._leaves = {name: v.detach().requires_grad_() for name, v in self._values.items() if v.requires_grad}
        return {**self._values, **(self.join() if self.number == self.last else self._leaves)}

    def join(self) -> dict[str, Tensor]:
        """Return the values whose backward pass runs through the model, once."""
        if not self.waits:
            return {}
        self._is_joined = True
        joined = Joined.apply(tuple(self._leaves.values()), *(self._values[name] for name in self._leaves))
        return dict(zip(self._leaves, joined, strict=True))

    @property
    def left(self) -> list[tuple[Tensor, Tensor]]:
        """Values and their gradients that no backward pass has taken through the model."""
        grads = ((self._values[name], leaf.grad) for name, leaf in self._leaves.items())
        return [(values, grad) for values, grad in grads if grad is not None]


class MergedRows(Exchange):
    """
    Shares rows, and computes several micro-batches of a window in one pass of each model. `micro_batches_saved` counts
    those that the trained model is not entered for.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.held: Callable[[], float] = lambda: 0.0
        """
        Returns the memory that the micro-batches of a pass may take, as a multiple of that of the largest padded one.
        With 0 none are merged.
        """
        self._number: int | None = None  # of the micro-batch whose loss is computed
        self._groups: dict[nn.Module, dict[int, tuple[Tree, dict[int, FlatRow]]]] = {}  # by their first micro-batch
        self._passes: dict[tuple, JointPass] = {}
        self._one_by_one = False

    # A window.

    def begin(self, run: Run) -> None:
        self._one_by_one = False
        super().begin(run)

    def begin_step(self, step: Step) -> None:
        super().begin_step(step)
        self._forget()

    def end_step(self, step: Step) -> None:
        self._forget()

    def clean_up(self) -> None:
        super().clean_up()
        self._forget()  # an error in the middle of a window would leave its graph

    def _forget(self) -> None:
        self._window, self._groups = [], {}
        self._passes.clear()

    def spare_memory(self) -> str | None:
        merged = any(self._groups.values())
        self._forget()
        if not merged:
            return super().spare_memory()
        self._one_by_one = True
        return "micro-batches are computed one by one"

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **({"one_by_one": True} if self._one_by_one else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._one_by_one = state.get("one_by_one", False)
        super().load_state_dict(state)

    # A micro-batch.

    @contextlib.contextmanager
    def around(self, ends_window: bool) -> Generator[None]:
        with super().around(ends_window):
            yield
            for (model, *_), joint in self._passes.items() if ends_window else ():
                if left := joint.left:  # there is another loss in place of the last one
                    self._begin_again(model, joint)
                    torch.autograd.backward([values for values, _ in left], [grad for _, grad in left])

    @contextlib.contextmanager
    def micro_batch(self, inputs: Mapping[str, Any], may_change: bool = False) -> Generator[None]:
        """Inside, a trainer computes the loss of these inputs. `may_change`: of others that it makes of them."""
        number = self.number_of(inputs, may_change)
        self._number = number if self._backward_follows and torch.is_grad_enabled() else None
        try:
            yield
        finally:
            self._number = None

    def with_what_waits(self, loss: Tensor) -> Tensor:
        """
        Return the loss of the last micro-batch of a window. Its backward pass runs through all passes that wait for
        one: those whose own last micro-batch was computed by itself.
        """
        for (model, *_), joint in self._passes.items():
            for values in joint.join().values():
                loss = loss + values.masked_fill(torch.ones_like(values, dtype=torch.bool), 0.0).sum().to(loss.device)
                self._begin_again(model, joint)
                joint.unread.clear()
        return loss

    def _begin_again(self, model: nn.Module, joint: JointPass) -> None:
        """Note that the backward pass of a pass that is over comes now: layers may be recomputed in it."""
        self._open(model)
        self._begin(model, joint.row)
        self._pass.row = None

    def _open(self, model: nn.Module) -> None:
        before = set(self._opened)
        super()._open(model)
        for opened in self._opened.keys() - before:
            self._opened[opened].enter_context(self._standing_in(opened))

    @contextlib.contextmanager
    def _standing_in(self, model: Any) -> Generator[None]:
        """Context in which a model returns what a pass gave, if it is entered for one that ran."""
        own, is_set = model.forward, "forward" in vars(model)

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            joint = self._pass.joint
            return own(*args, **kwargs) if joint is None or joint.output is None else joint.output

        model.forward = forward
        try:
            yield
        finally:
            if is_set:
                model.forward = own
            else:
                del model.forward

    def _row_of(self, model: nn.Module, inputs: dict[str, Any], origins: Origins = (None, None)) -> FlatRow | None:
        """As [`Exchange`] does; or how a micro-batch of the window reads a pass that it takes part in."""
        number = None if self._pass.observed is not None else self._number
        joint = None if number is None else self._pass_of(model, number, inputs)
        if number is None or joint is None:
            return super()._row_of(model, inputs, origins)
        self._pass.joint, joint.number = joint, number
        if joint.output is not None and joint.waits:
            self.counts["micro_batches_saved"] += 1
        return joint.unread.pop(number)

    # Which.

    def _pass_of(self, model: nn.Module, number: int, inputs: Mapping[str, Any]) -> JointPass | None:
        """Return the pass that a micro-batch takes part in, if there is one, or if it is the first of several."""
        laid_out = self._window[number].tensors
        if any(inputs.get(name) is not laid_out[name][0] for name in ("input_ids", "attention_mask")):
            return None
        is_plain = self.reason_not_exchanged(model, inputs) or self.facts_of(model).balances(inputs)
        if is_plain or not inputs.get("fused_lm_head"):
            return None
        if model not in self._groups:
            self._groups[model] = self._group(model, inputs)
        groups = self._groups[model]
        first = next((first for first, (_, rows) in groups.items() if number in rows), None)
        adapters = adapters_of(model.modules() if hasattr(model, "peft_config") else ())
        key = model, model.training, torch.is_grad_enabled(), adapters, first
        if (known := self._passes.get(key)) is not None:
            return known if known.output is not None and number in known.unread else None
        if number != first:
            return None
        tree, rows = groups[first]
        self._passes[key] = JointPass(rows)
        if self._is_counting:
            batches = [self._window[number].copied.batch for number in rows]
            self._count(batches, tree, sum(batch.ids.numel() for batch in batches))
        return self._passes[key]

    def _group(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[int, tuple[Tree, dict[int, FlatRow]]]:
        """Return which micro-batches of the window a model computes in one pass, by their first one."""
        facts, device = self.facts_of(model), inputs["input_ids"].device
        held = 0.0 if len(self._window) < 2 or self._one_by_one else self.held()
        if not held or (facts.encoder is not None and not self._code_ahead(facts)):
            return {}
        batches = [laid_out.copied.batch for laid_out in self._window]
        most = held * max(batch.ids.numel() for batch in batches)

        def divided(rows: Sequence[Row], **options: Any) -> list[Tree]:
            costs, own, merged = facts.costs, by_batch(rows, most, **options), join(rows, most, **options)
            launches = device.type not in WITHOUT_LAUNCHES and not costs.keep_busy(own, device)
            return merged if launches or costs.pays(merged, own) else own

        plan, groups = self._plan(model, batches, divided, device, device.type == "cuda", False), {}
        if plan.cost > self.worth * plan.padded:
            return {}
        for tree in plan.trees:
            numbers = sorted({row.batch for row in tree.rows})
            if len(numbers) < 2:
                continue
            if not self._is_same(model, tree, batches, self._computing(model, inputs), device):
                return {}
            ((rows,), _) = FlatRow.on(device, [(tree, batches)], repeats=False, images=self.images)
            groups[numbers[0]] = tree, rows
        if self.images is not None and groups:
            trees = {tree.rows[0].batch: tree for tree in plan.trees}
            agains = self._in_turn(facts, [numbers_in(tree) for tree in trees.values()], batches)
            for first, again in zip(trees, agains):
                for number, row in groups.get(first, (None, {}))[1].items():
                    row = row._replace(images=row.images._replace(again=again))
                    groups[first][1][number], self._window[number].copied.again = row, again
        return groups
