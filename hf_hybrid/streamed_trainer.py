"""Routes Trainer's hooks to the streaming memory engine. No algorithm lives here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from hf_hybrid.arguments import HybridArguments
from hf_hybrid.memory_setup import StreamedTraining, check_streamable, set_up_memory
from hf_hybrid.optimizers import MuonAdamW, check_hidden_matrices, muon_groups
from hf_hybrid.plan.accounting import ByteTable, measure_held, storage_address
from hf_hybrid.streaming.loss import ChunkedLossSwitch


class StreamedTrainerMixin:
    """
    Training of models that do not fit on the device, for any `Trainer` subclass.

    Takes over the model for a run and for evaluations, and gives it back as ordinary host weights whenever somebody
    else reads them: for saving, for the best checkpoint, and at the end.

    Args:
        device_map (`dict[str, int | str]`, *optional*):
            Accelerate's form: module name to device. Layers on `"cpu"` or `"disk"` are streamed, others stay on the
            device with their optimizer states. Default: the map that the model was loaded with, if any.
    """

    def __init__(self, *args, device_map: dict | None = None, **kwargs):
        self.streaming: StreamedTraining | None = None
        self._device_map, self._planned = device_map, False
        self._loss = ChunkedLossSwitch()
        self._held: ByteTable | None = None
        super().__init__(*args, **kwargs)
        self.hybrid_args: HybridArguments = self.args if isinstance(self.args, HybridArguments) else HybridArguments()
        if self._makes_muon:
            check_hidden_matrices(self.model)
        if self._memory_mode == "off":
            if device_map is not None:
                raise ValueError("`device_map` says which layers are streamed. Set `memory=auto` or `memory=stream`.")
            return
        self._set_up_streaming()
        self._move_model_to_device(self.model, self.args.device)

    def create_accelerator_and_postprocess(self):
        # The first that Trainer does with the model: what cannot work is refused before it is moved or judged.
        if self._memory_mode != "off" and self.model is not None:
            check_streamable(self.args, self.model, self._device_map)
        super().create_accelerator_and_postprocess()

    @property
    def _memory_mode(self) -> str:
        # Asked for while Trainer is still being built.
        return getattr(self.args, "memory", "off")

    def _set_up_streaming(self) -> None:
        self.streaming, self._planned = set_up_memory(self, self._device_map), True
        if self.streaming is not None:
            self.args._n_gpu = 1  # no DataParallel: as Trainer does where a model is spread over devices
            self.accelerator.device_placement = False

    def _move_model_to_device(self, model, device):
        # Not before the plan says whether the model moves as a whole; then only if it does.
        if self._memory_mode == "off" or (self._planned and self.streaming is None):
            super()._move_model_to_device(model, device)

    # A run.

    def train(self, *args, **kwargs):
        self._held = None
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._held is None and self.optimizer is not None:
                self._measure_memory()
            if self.streaming is not None:
                self.streaming.end()
            self._loss.remove()

    def create_optimizer(self, model=None):
        self._loss.install(self)  # before anything else wraps the head
        if self.streaming is None:
            return self._create_plain_optimizer(model)
        if self.streaming.model is not self.model:  # `model_init` made a new one
            self._set_up_streaming()
        if self.optimizer is None or self.streaming.optimizer is None:
            self.optimizer = self.streaming.wrap(self._create_plain_optimizer(model))
        self.streaming.begin()
        return self.optimizer

    def _create_plain_optimizer(self, model=None):
        if self.hybrid_args.optimizer_states == "8bit" and self.optimizer is None:
            self.optimizer_cls_and_kwargs = self._low_bit_optimizer()
        if self._makes_muon:
            self.optimizer = self._muon_optimizer(self.model if model is None else model)
        return super().create_optimizer(model)

    @property
    def _makes_muon(self) -> bool:
        given = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        return self.args.optim == "muon" and not given

    def _muon_optimizer(self, model: nn.Module) -> MuonAdamW:
        args = self.args
        common = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
        decay_names = self.get_decay_parameter_names(model)
        groups = muon_groups(model, decay_names, **common, lr_scale=self.hybrid_args.muon_lr_scale)
        common |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        return MuonAdamW(groups, **common, momentum=self.hybrid_args.preset_value("muon_momentum"))

    def _low_bit_optimizer(self):
        from hf_hybrid.streaming.low_bit import AdamW8bit

        args = self.args
        betas = (args.adam_beta1, args.adam_beta2)
        return AdamW8bit, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, "seed": args.seed}

    def get_batch_samples(self, *args, **kwargs):
        batches, items = super().get_batch_samples(*args, **kwargs)
        if self.streaming is not None:
            self.streaming.window.begin(batches)
        return batches, items

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.streaming is None:
            return super().training_step(model, inputs, num_items_in_batch)
        # One call computes the whole window if it is walked layer by layer; the others return what it found.
        step = functools.partial(super().training_step, model, num_items_in_batch=num_items_in_batch)
        return self.streaming.window.next(step, inputs)

    def _clip_grad_norm(self, model):
        if self.streaming is None:
            return super()._clip_grad_norm(model)
        return self.streaming.optimizer.clip(model.parameters(), self.args.max_grad_norm, now=self._reads_gradients)

    @property
    def _reads_gradients(self) -> bool:
        """Whether somebody looks at clipped gradients before the optimizer does."""
        return self.hybrid_args.enable_predict

    def _get_grad_norm(self, model, grad_norm=None):
        if self.streaming is not None and grad_norm is None:
            grad_norm = self.streaming.optimizer.total_norm(model.parameters())
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    # The loss.

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        compute = functools.partial(super().compute_loss, model, inputs, return_outputs, num_items_in_batch)
        if return_outputs or not self._loss.applies(model, inputs, num_items_in_batch):
            return compute()
        with self._loss.active(inputs):
            return compute()

    @property
    def loss_in_chunks(self) -> bool:
        """Whether the training loss is computed without holding all logits."""
        return self._loss.in_use

    # Whoever reads weights finds them.

    @contextlib.contextmanager
    def _own_weights(self) -> Iterator[None]:
        if self.streaming is None:
            yield
            return
        with self.streaming.suspended():
            yield

    def _save(self, *args, **kwargs):
        with self._own_weights():
            super()._save(*args, **kwargs)

    def _load_best_model(self):
        with self._own_weights():
            super()._load_best_model()

    def evaluation_loop(self, *args, **kwargs):
        if self.streaming is None:
            return super().evaluation_loop(*args, **kwargs)
        with self.streaming.running():
            return super().evaluation_loop(*args, **kwargs)

    # Telling.

    def memory_summary(self) -> dict:
        """
        `held`: bytes by category on device and host at the end of the last training, exact for what is held between
        steps (activations and temporary memory are not); `plan` and `statistics` (loads, bytes moved, seconds waited)
        of the streaming engine, `None` where nothing is streamed.
        """
        streaming = self.streaming
        return {
            "held": None if self._held is None else self._held.to_dict(),
            "plan": None if streaming is None else streaming.plan.to_dict(),
            "statistics": None if streaming is None else streaming.streamer.statistics(),
        }

    def _measure_memory(self, drift: Iterable[Tensor] = ()) -> None:
        streaming, extra, host = self.streaming, {"drift": list(drift)}, None
        if streaming is not None and streaming.optimizer is None:
            return  # it failed before it began
        if streaming is not None:
            extra = streaming.tensors_held(extra)
            on_cpu = self.args.device.type == "cpu"
            host = {storage_address(t) for t in streaming.host_tensors(extra["drift"])} if on_cpu else None
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        self._held = measure_held(self.model, optimizer, extra=extra, host_storages=host)
