"""
Cross-entropy for large vocabularies: the head and its loss run a few hundred tokens at a time.

The logits of a batch are often its largest tensor. 8,192 tokens and 128,256 words in fp32 are 3.9 GiB, and the backward
pass holds their gradient beside them. But all the loss needs of a token's logits is two numbers, and the gradient by
the logits, `softmax(logits) - one_hot(target)`, is known as soon as the logits are. So [`linear_cross_entropy`] takes
`chunk_tokens` rows of hidden states at a time, computes their logits, adds up the loss, and turns the logits in place
into their gradient, which it multiplies out to the gradients of hidden states and head at once. Then the logits of this
chunk are gone. The backward pass only scales what is there by the incoming gradient. Memory is independent of the
number of tokens. Nothing is computed twice, but for the gradient of a head in half precision: a sum of many chunks
would round with each of them. The idea is that of Cut Cross-Entropy (Wijmans et al., 2024, arXiv
2411.09009) and of Liger Kernel (Hsu et al., 2024, arXiv 2410.10989), without a kernel of its own.

**Into any model.** A Hub model computes its loss itself: hidden states, head, perhaps a scale or a cap on the logits,
its loss function, perhaps router losses on top. Copying that per architecture would be endless. [`ChunkedCausalLoss`]
lets the model run as it is and replaces the two ends of this chain. The head is told the targets and returns the summed
loss of all tokens. The model gets a tiny tensor in place of the logits, sends it through whatever comes next, and calls
its loss function, which hands out the head's loss. What the model does to logits in between is measured once, by
sending known numbers through: a factor and a tanh cap are recognised and move into the chunks; anything else is
refused.

**Other losses** of logits, as the distance to a teacher's, are differentiated chunk by chunk too ([`sum_in_chunks`]).

**Whether to.** Chunks add in another order, so the loss differs in its last digits. [`ChunkedLossSwitch`] uses them
where they are asked for, or where logits are large, and only after the first batch has shown that both losses agree.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_hybrid.optimizers import ask
from hf_hybrid.run.run import as_before
from hf_hybrid.run.trainer_view import TrainerView, vocabulary_size
from hf_hybrid.streaming.layers import base_model

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100
DISTANCE = "generalized_jsd_loss"
"""Method of TRL's trainers: the distance between logits of two models."""
DISTANCE_LOGITS = 2**24
"""Logits of each model that are there at once for the distance between two."""
FEW_CHUNKS = 8
"""Chunks whose gradients of the head are added in half precision."""


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk_tokens: int = 512,
) -> torch.Tensor:
    """
    Summed cross-entropy of `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`, without all its logits.

    `hidden` is `[..., width]`, `weight` `[vocabulary, width]` of the same type, `bias` `[vocabulary]`, and `targets`
    are int64, `[...]`, with -100 for tokens that do not count. `chunk_tokens` tokens have logits at once, in float32.
    Under autocast `hidden` is cast as `nn.Linear` does, but not to float16, in which the gradients of single logits
    vanish before a loss scale can reach them. Nothing reads the weight after this function, and a second backward pass
    through the same loss raises `RuntimeError`.

    Returns the loss, a float32 scalar (float64 for float64 input).
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != torch.float16:
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).to(hidden.device)
    with torch.autocast(device, enabled=False):
        return _ChunkedLoss.apply(rows, weight, bias, targets, softcap, scale, chunk_tokens, torch.is_grad_enabled())


def _loss_and_slope(logits, targets, softcap, scale, words=0, log_mass=None) -> tuple[torch.Tensor, ...]:
    """
    Summed loss, its gradient by `logits`, `[tokens, vocabulary]`, which is written into their memory, and the logarithm
    of the sum of the exponentials of each token. With this `log_mass`, `logits` may be those of `words` and the next.
    """
    kept, index = targets.ne(IGNORE_INDEX)[:, None], targets[:, None] - words
    here = kept & (index >= 0) & (index < logits.shape[1])
    index = index.where(here, 0)  # an ignored id need not be an index
    scores = logits if scale == 1 else logits.mul_(scale)
    if softcap is not None:
        squashed = scores.div_(softcap).tanh_()
        scores = squashed * softcap
    top = scores.amax(-1, keepdim=True) if log_mass is None else log_mass
    picked = scores.sub_(top).gather(1, index)
    scores.exp_()
    mass = scores.sum(-1, keepdim=True) if log_mass is None else torch.ones_like(top)
    loss = (mass.log() - picked).where(here, 0).sum()
    slope = scores.mul_(kept * scale / mass).scatter_add_(1, index, (here * -scale).to(scores.dtype))
    return loss, slope if softcap is None else slope.mul_(squashed.square_().neg_().add_(1)), top + mass.log()


class _ChunkedLoss(torch.autograd.Function):
    # Not `F.linear_cross_entropy` of torch 2.13, nor TRL's: `python -m benchmarks.skips.losses` compares them.

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, softcap, scale, chunk_tokens, with_grad):
        exact = torch.promote_types(hidden.dtype, torch.float32)
        needed = zip((hidden, weight, bias), (hidden.dtype, weight.dtype, exact), ctx.needs_input_grad)
        grads = [torch.zeros_like(v, dtype=dtype) if with_grad and need else None for v, dtype, need in needed]
        hidden_grad, weight_grad, bias_grad = grads
        total = torch.zeros((), dtype=exact, device=hidden.device)
        log_masses = []
        # A sum in half precision is rounded with each chunk that is added. Beyond a few the gradient of the weight is
        # computed again, block by block of words: a product over all tokens is rounded once.
        in_blocks = exact != hidden.dtype and len(targets) > FEW_CHUNKS * chunk_tokens

        def add(rows: slice) -> None:  # a function, so that the logits of one chunk are gone before the next
            logits = F.linear(hidden[rows], weight, bias).to(exact)
            loss, slope, log_mass = _loss_and_slope(logits, targets[rows], softcap, scale)
            total.add_(loss)
            log_masses.append(log_mass)
            if bias_grad is not None:
                bias_grad.add_(slope.sum(0))
            slope = slope.to(hidden.dtype)
            if hidden_grad is not None:
                torch.mm(slope, weight, out=hidden_grad[rows])
            if weight_grad is not None and not in_blocks:
                weight_grad.addmm_(slope.t(), hidden[rows])

        def compute(gradient: torch.Tensor, words: slice) -> None:
            logits = F.linear(hidden, weight[words], None if bias is None else bias[words]).to(exact)
            _, slope, _ = _loss_and_slope(logits, targets, softcap, scale, words.start, torch.cat(log_masses))
            torch.mm(slope.to(hidden.dtype).t(), hidden, out=gradient[words])

        for start in range(0, len(targets), chunk_tokens):
            add(slice(start, start + chunk_tokens))
        if weight_grad is not None and in_blocks:
            block = max(chunk_tokens * len(weight) // len(targets), 1)
            for start in range(0, len(weight), block):
                compute(weight_grad, slice(start, start + block))
        ctx.grads, ctx.has_labels = grads, targets.ne(IGNORE_INDEX).any()
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grad_outputs):
        if ctx.grads is None:
            raise RuntimeError("The gradients of the chunked loss are used up: `retain_graph=True` does not work here.")
        grads, ctx.grads = ctx.grads, None  # scaled in place: a copy of the weight's gradient would cost as much again
        # Without a label the loss is divided by zero. Its gradient is zero, as with torch's cross-entropy, and not NaN.
        factor = grad_outputs[0].where(ctx.has_labels, 0)
        return (*(None if grad is None else grad.mul_(factor) for grad in grads), *5 * [None])


def sum_in_chunks(
    loss_of: Callable[[torch.Tensor, slice], torch.Tensor],
    states: torch.Tensor,
    weights: Iterable[torch.Tensor],
    chunk_tokens: int,
) -> torch.Tensor:
    """
    Summed loss of `states`, `[tokens, width]`: `loss_of` computes that of a part, from what it is told that part is, by
    `weights`. Gradients are computed chunk by chunk, so that nothing else of a chunk is left behind it.
    """
    return _SumInChunks.apply(loss_of, chunk_tokens, torch.is_grad_enabled(), states, *weights)


class _SumInChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss_of, chunk_tokens, with_grad, states, *weights):
        needs = [with_grad and need for need in ctx.needs_input_grad[3:]]
        trained = [weight for weight, need in zip(weights, needs[1:]) if need]
        exact = torch.promote_types(states.dtype, torch.float32)
        few = len(states) <= FEW_CHUNKS * chunk_tokens  # beyond them a sum in half precision loses what chunks add
        sums = [torch.zeros_like(w, dtype=w.dtype if few else torch.promote_types(w.dtype, exact)) for w in trained]
        of_states = torch.zeros_like(states) if needs[0] else None
        total = torch.zeros((), dtype=exact, device=states.device)

        def add(rows: slice) -> None:  # a function, so that all of one chunk is gone before the next
            part = states[rows].detach().requires_grad_(needs[0])
            with torch.set_grad_enabled(any(needs)):
                loss = loss_of(part, rows)
            total.add_(loss.detach())
            if any(needs):
                found = [*torch.autograd.grad(loss, [part] * needs[0] + trained, allow_unused=True)]
                if of_states is not None:
                    of_states[rows] = found.pop(0)
                for gradient, more in zip(sums, found):
                    gradient.add_(0 if more is None else more)  # an adapter that does not compute now

        for start in range(0, len(states), chunk_tokens):
            add(slice(start, start + chunk_tokens))
        found = iter(sums)
        ctx.grads = [of_states, *(next(found).to(w.dtype) if need else None for w, need in zip(weights, needs[1:]))]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grad_outputs):
        grads, ctx.grads = ctx.grads, None
        return None, None, None, *(None if grad is None else grad.mul_(grad_outputs[0]) for grad in grads)


@dataclass
class _Call:
    """One forward pass in which the model gets a small tensor instead of its logits `[batch, tokens, vocabulary]`."""

    labels: torch.Tensor
    targets: torch.Tensor  # the labels, shifted
    probe: torch.Tensor | None  # numbers to send through the model; without them the loss is computed
    kept: torch.Tensor | None = None  # indices of the tokens that count
    output: Any = None  # of the head, once it has run: the summed loss, or logits while probing
    stand_in: Any = None  # what the model got in its place: [batch, tokens, 1], or [batch, tokens, len(probe)]
    arrived: Any = None  # the stand-in as the model hands it to its loss function


PROBE = (2.0**-10, 1e6, 0.0, 1.0, -1.0, 10.0, -100.0, 1000.0)
"""Numbers to send through a model in place of logits: the first gives the factor, the second the cap."""


def transfer_of(arrived: torch.Tensor, name: str) -> tuple[float, float | None]:
    """Return by which factor and which tanh cap a model of this name has changed [`PROBE`]."""
    arrived, probe = arrived.cpu(), torch.tensor(PROBE)
    small, large = arrived.reshape(-1, len(probe))[0, :2].tolist()
    scale, cap = small / PROBE[0], None
    expected = scale * probe
    if not math.isclose(large, scale * PROBE[1], rel_tol=1e-3):
        cap = abs(large)
        expected = cap * torch.tanh(expected / cap)
    if not torch.allclose(arrived, expected.expand_as(arrived), rtol=1e-4, atol=1e-6):
        raise RuntimeError(f"`{name}` changes its logits by more than a factor and a tanh cap.")
    return scale, cap


class ChunkedCausalLoss:
    """
    Computes a causal LM's own loss from its labels, without the logits of all tokens.

    Use it as a context manager or between `install()` and `remove()`; the model also works as usual then, and several
    threads may compute losses. The head's weight is read only while `head.forward(input, targets=None)` runs, which
    gives the summed loss where there are `targets`. Others may wrap that `forward` until `remove()` if they pass
    `targets` on.

    `model` is a causal LM or the PEFT model around it, not yet wrapped for several devices; `chunk_tokens` is that of
    `linear_cross_entropy`. Raises `ValueError` where `reason_not_chunked` has one.
    """

    TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-4, 1e-2  # relative; a bfloat16 model also rounds capped and scaled logits
    CHECKED_TOKENS = 64

    def __init__(self, model: nn.Module, chunk_tokens: int = 512):
        reason, base = self.reason_not_chunked(model), base_model(model)
        head = head_of(base)
        if reason is not None or not (isinstance(base, PreTrainedModel) and isinstance(head, nn.Linear)):
            raise ValueError(f"`model` cannot use the chunked loss: {reason}. Leave its loss as it is.")
        self.base, self.head = base, head
        self.chunk_tokens = chunk_tokens
        self.disagreement: str | None = None  # why the last `agrees` was False
        self._transfer: tuple[float, float | None] | None = None  # factor and cap between head and loss
        self._calls: dict[int, _Call] = {}  # by thread
        self._hooks: list[Any] = []

    @staticmethod
    def reason_not_chunked(model: nn.Module) -> str | None:
        """Return why `model` cannot use the chunked loss, or `None`. Only `agrees` makes a forward pass."""
        base = base_model(model)
        if not isinstance(base, PreTrainedModel):
            return f"`{type(base).__name__}` is not a transformers model"
        if base.config.is_encoder_decoder:
            return f"`{type(base).__name__}` is an encoder-decoder model"
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            return "prompt learning adds tokens that have no labels"
        head = head_of(base)
        if type(head) is not nn.Linear:
            return f"its head is `{type(head).__module__}.{type(head).__name__}`, not `torch.nn.Linear`"
        if type(head.weight.data) is not torch.Tensor or not head.weight.is_floating_point():
            return f"the weight of its head is a `{type(head.weight.data).__name__}` of `{head.weight.dtype}`"
        if "forward" in vars(head):
            return "the `forward` of its head is replaced already"
        if base.loss_function is not ForCausalLMLoss:
            return f"its loss is `{getattr(base.loss_function, '__name__', base.loss_function)}`, not `ForCausalLMLoss`"
        return None

    def install(self) -> ChunkedCausalLoss:
        """Extend `head.forward` on the instance. Call this before anything else wraps it."""
        if "forward" in vars(self.head):
            raise RuntimeError("`head.forward` is replaced already. Install the chunked loss first, and only once.")
        self.head.forward = self._forward
        self.base.loss_function = self._loss
        called: Any = self.base.get_output_embeddings()  # the head, or what PEFT put around it
        self._hooks = [
            self.base.register_forward_pre_hook(self._before_model, with_kwargs=True),
            called.register_forward_pre_hook(self._before_head, with_kwargs=True),
            called.register_forward_hook(self._after_head),
        ]
        return self

    def remove(self) -> None:
        """Undo `install()`."""
        if vars(self.head).get("forward") != self._forward:
            raise RuntimeError("`head.forward` is not the installed one. Take off its wrapper before `remove()`.")
        del self.head.forward, self.base._loss_function
        while self._hooks:
            self._hooks.pop().remove()

    __enter__ = install

    def __exit__(self, *_) -> None:
        self.remove()

    def agrees(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch=None) -> bool:
        """
        Whether both losses are equal on a small part of a batch. If not, `disagreement` says why.

        Runs three small forward passes without gradients, in evaluation mode; random state and mode are restored.
        """
        try:
            part = checked_part(inputs, self.CHECKED_TOKENS)
            dtype = self._measure(model, part)
            if num_items_in_batch is not None:
                part["num_items_in_batch"] = num_items_in_batch
            with self._quiet(model):
                own = model(**part)[0]
            with self._quiet(model), self.active(part):
                loss = model(**part)[0]
            tolerance = self.TOLERANCE if dtype == torch.float32 else self.LOW_PRECISION_TOLERANCE
            equal = bool((loss - own).abs() <= tolerance * own.abs())  # not with NaN either
            self.disagreement = None if equal else f"chunked loss `{loss.item()}`, the model's own `{own.item()}`"
        except Exception as error:  # whatever a model raises that does something else with its logits
            self.disagreement = f"{type(error).__name__}: {error}"
        return self.disagreement is None

    @contextlib.contextmanager
    def active(self, inputs: dict[str, Any], probe: torch.Tensor | None = None) -> Generator[_Call]:
        """Context in which the next forward pass on this thread, with these `inputs`, computes its loss in chunks."""
        if not self._hooks:
            raise RuntimeError("The chunked loss is not installed. Call `install()` or use it as a context manager.")
        thread = threading.get_ident()
        self._calls[thread] = call = _Call(inputs["labels"], _targets(inputs), probe)
        try:
            yield call
        finally:
            del self._calls[thread]
        if call.arrived is None:
            raise RuntimeError(f"`{type(self.base).__name__}` does not give the output of its head to `loss_function`.")

    def _measure(self, model, inputs) -> torch.dtype:
        """Find factor and cap between head and loss, and return the dtype of the logits."""
        probe = torch.tensor(PROBE)
        with self._quiet(model), self.active(inputs, probe) as call:
            model(**inputs)
        self._transfer = transfer_of(call.arrived, type(self.base).__name__)
        return call.output.dtype

    @staticmethod
    @contextlib.contextmanager
    def _quiet(model: nn.Module) -> Generator[None]:
        """Context of a pass in evaluation mode with fixed random numbers, which leaves no trace."""
        with as_before(model, next(model.parameters()).device):
            model.eval()
            torch.manual_seed(0)
            yield

    def _pending(self) -> _Call | None:
        """Return the call of this thread whose head has not run. A head that runs again computes another loss."""
        call = self._calls.get(threading.get_ident())
        return call if call is not None and call.output is None else None

    def _before_model(self, base, args, kwargs):
        """Take the labels that the model really gets: shared rows exchange the batch."""
        call = self._pending()
        if call is not None and kwargs.get("labels") is not None:
            call.labels, call.targets = kwargs["labels"], _targets(kwargs)
            if call.probe is None:  # the host waits for their number: before the first layer, and not behind the last
                call.kept = indices_that_count(call.targets)

    def _before_head(self, head, args, kwargs):
        call = self._pending()
        return None if call is None or call.probe is not None else (args, {**kwargs, "targets": call.targets})

    def _forward(self, input: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        weight, bias = self.head.weight, self.head.bias
        if targets is None:
            return F.linear(input, weight, bias)
        if self._transfer is None:
            raise RuntimeError("It is not known what the model does to its logits. Call `agrees` first.")
        scale, cap = self._transfer
        call, flat = self._pending(), targets.reshape(-1).to(input.device)
        known = call.kept if call is not None and call.targets is targets else None
        kept = (indices_that_count(targets) if known is None else known).to(input.device)
        if len(kept) < len(flat):  # no logits for tokens that do not count
            input, targets = input.reshape(-1, input.shape[-1])[kept], flat[kept]
        return linear_cross_entropy(
            input, weight, targets, bias=bias, scale=scale, softcap=cap, chunk_tokens=self.chunk_tokens
        )

    def _after_head(self, head, args, output):
        call = self._pending()
        if call is None:
            return None
        values = output.new_zeros(1) if call.probe is None else call.probe.to(output.device)
        call.output, call.stand_in = output, values.expand(*call.targets.shape, -1).clone()
        return call.stand_in

    def _loss(self, logits, labels, vocab_size, num_items_in_batch=None, ignore_index=IGNORE_INDEX, **kwargs):
        call = self._calls.get(threading.get_ident())
        if call is None or call.output is None or logits.shape != call.stand_in.shape:
            return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, **kwargs)
        same = labels is call.labels or torch.equal(labels, call.labels.to(labels.device))
        if not same or vocab_size != len(self.head.weight) or ignore_index != IGNORE_INDEX or logits.requires_grad:
            name = type(self.base).__name__
            raise RuntimeError(f"`{name}` changes its labels or vocabulary, or learns how to scale its logits.")
        call.arrived = logits
        if call.probe is not None:
            return logits.new_zeros(())
        count = call.targets.ne(IGNORE_INDEX).sum() if num_items_in_batch is None else num_items_in_batch
        return call.output / (count.to(call.output.device) if torch.is_tensor(count) else count)


def head_of(base: nn.Module) -> nn.Module | None:
    """Return the head of a model, or the copy of it that PEFT trains (`modules_to_save`)."""
    head: Any = ask(base, "get_output_embeddings")
    copies = getattr(head, "modules_to_save", None)
    return head if copies is None else copies[head.active_adapters[0]]


def _targets(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return what each token of a batch predicts: the labels, shifted."""
    targets = inputs.get("shift_labels")
    return F.pad(inputs["labels"], (0, 1), value=IGNORE_INDEX)[..., 1:] if targets is None else targets


def indices_that_count(targets: torch.Tensor) -> torch.Tensor:
    """Return the indices of the tokens that count."""
    return targets.reshape(-1).ne(IGNORE_INDEX).nonzero()[:, 0]


BIG_VOCABULARY = 32_000
"""Words from which `chunked_loss=auto` pays; below, the model's own loss is kept, to the last bit."""


class ChunkedLossSwitch:
    """Computes a trainer's loss in chunks if the options ask for it, the model allows it and both losses agree."""

    def __init__(self):
        self.loss: Any = None  # while it is installed
        self._agreed: bool | None = None
        self._required = False

    def install(self, trainer: TrainerView) -> None:
        """
        Prepare the trainer's model for a run.

        Raises:
            ValueError: If `chunked_loss=on` and the model cannot use it.
        """
        options = trainer.hybrid_args
        words = vocabulary_size(base_model(trainer.model)) or 0
        pays = options.memory != "off" and words >= BIG_VOCABULARY
        self._required = options.chunked_loss == "on"
        if self.loss is not None or not (self._required or (options.chunked_loss == "auto" and pays)):
            return
        self._agreed = None
        if (reason := self.reason_not_chunked(trainer)) is None:
            self.loss = self.loss_of(trainer)
        else:
            self._refuse(reason)

    def reason_not_chunked(self, trainer: TrainerView) -> str | None:
        if hasattr(trainer, DISTANCE):
            return "its loss is a distance between logits, which `HybridGKDTrainer` takes in chunks"
        if trainer.args.label_smoothing_factor or trainer.compute_loss_func is not None:
            return "the trainer has its own loss (`compute_loss_func` or `label_smoothing_factor`)"
        return ChunkedCausalLoss.reason_not_chunked(trainer.model)

    def loss_of(self, trainer: TrainerView) -> Any:
        """Return the loss in chunks, installed: an object as [`ChunkedCausalLoss`]."""
        return ChunkedCausalLoss(trainer.model).install()

    def remove(self) -> None:
        """Leave the model as it was."""
        if self.loss is not None:
            self.loss.remove()
            self.loss = None

    def applies(self, model: nn.Module, inputs: dict[str, Any], items: Any) -> bool:
        """Whether this loss is computed in chunks. The first batch with labels decides, by a comparison."""
        labels = inputs.get("labels")
        if self.loss is None or labels is None:
            return False
        if self._agreed is None and labels.ne(IGNORE_INDEX).any():
            self._agreed = self.loss.agrees(model, inputs, items)
            if not self._agreed:
                self._refuse(str(self.loss.disagreement))
        return bool(self._agreed)

    @property
    def in_use(self) -> bool:
        """Whether the last batches were computed in chunks."""
        return self.loss is not None and bool(self._agreed)

    def _refuse(self, reason: str) -> None:
        if self._required:
            raise ValueError(f"`chunked_loss=on` cannot be used: {reason}. Set `chunked_loss=off`.")
        logger.warning("The loss is computed from all logits (`chunked_loss`): %s.", reason)


def checked_part(inputs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return the row with most labels, cut to `tokens` from its first label on. Inputs of other shapes are cut less."""
    labels = inputs["labels"]
    shapes = [value.shape for value in inputs.values() if torch.is_tensor(value)]
    if any(shape[:1] != labels.shape[:1] for shape in shapes):
        return dict(inputs)
    kept = labels.ne(IGNORE_INDEX)
    row = int(kept.sum(-1).argmax())
    start = max(int(kept[row].int().argmax()) - 1, 0)
    cut = (slice(row, row + 1), slice(start, start + tokens))[: 2 if all(s == labels.shape for s in shapes) else 1]
    return {name: value[cut] if torch.is_tensor(value) else value for name, value in inputs.items()}
