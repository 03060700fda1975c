"""Checkpointing that follows the phase: what is saved for backward, measured, and that nothing else changes."""

import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from conftest import ByteText, assert_same_weights, hybrid_config, tiny_model, weights
from rig.live_bytes import saved_for_backward
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import ResNetConfig, ResNetForImageClassification

from hf_hybrid import HybridTrainer, Part
from hf_hybrid.compat import checkpointing_option
from hf_hybrid.part import Phase
from hf_hybrid.phase_memory import activations
from hf_hybrid.phase_memory.activations import ActivationCheckpointing, BoundaryOffload
from hf_hybrid.run.run import Run

LAYERS = 8
HIDDEN = 128
TOKENS = torch.arange(2 * 128).view(2, 128) * 37 % 256
BOUNDARY = TOKENS.numel() * HIDDEN * 4
SETTING = {"use_reentrant": False}


def enable(model, **newer):
    """Transformers' own checkpointing; its methods had another name in older versions, and took less."""
    if checkpointing_option() == "activation_checkpointing":
        model.activation_checkpointing_enable(SETTING, **newer)
    else:
        model.gradient_checkpointing_enable(SETTING)


def disable(model):
    getattr(model, f"{checkpointing_option()}_disable")()


def deep_model(**overrides):
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 352, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    values = {**sizes, "num_key_value_heads": 4, "max_position_embeddings": 256, **overrides}
    return tiny_model(**values).train()


def loss_of(model, tokens=TOKENS):
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def gradients(model, tokens=TOKENS, offload=None):
    model.zero_grad()
    with offload or nullcontext():
        loss = loss_of(model, tokens)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


class Counted(BoundaryOffload):
    """Counts the layer inputs that left, and those whose way back was not started ahead of time."""

    made = []

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.tensors = self.waits = 0
        self.made.append(self)

    def _park(self, tensor):
        self.tensors += 1
        return super()._park(tensor)

    def _fetch(self, packed):
        self.waits += not torch.is_tensor(packed) and packed.on_device is None
        return super()._fetch(packed)

    def host_bytes(self):
        """Of all buffers, free or not: they are never fewer than before."""
        pools = [buffers for _, buffers in self._ways.values()]
        return sum(b.numel() for pool in pools for b in (*pool.spare, *pool._lent.values()))

    def bytes_offloaded(self):
        return sum(transfers.bytes_out for transfers, _ in self._ways.values())


def switched_on(model):
    return [m.gradient_checkpointing for m in model.modules() if hasattr(m, "gradient_checkpointing")]


def started(plugin, model):
    plugin.begin(Run(model=model, optimizer=None, max_steps=10))
    return plugin


# What it saves.


def test_layers_alone_save_nine_tenths_and_offload_leaves_one_boundary():
    """Counted: everything the forward pass made and backward needs, from embeddings to the final norm, no head."""
    model = deep_model()

    def forward():
        return model.model(TOKENS, use_cache=False).last_hidden_state

    plain = saved_for_backward(model, forward)
    plugin = started(ActivationCheckpointing(), model)
    checkpointed = saved_for_backward(model, forward)
    plugin.end()
    assert saved_for_backward(model, forward) == plain
    plugin = started(ActivationCheckpointing(offload=True, min_bytes=BOUNDARY), model)
    forward()  # the first pass creates the host buffers; from then on they exist before the forward pass
    offloaded = saved_for_backward(model, forward)
    plugin.end()
    assert checkpointed <= 0.1 * plain, (checkpointed, plain)
    assert checkpointed - offloaded == (LAYERS - 1) * BOUNDARY
    with torch.no_grad():
        assert saved_for_backward(model, forward) == 0


def test_the_measure_counts_each_storage_once_and_sees_keyword_arguments_of_checkpointed_layers():
    linear = nn.Linear(8, 8)
    given = torch.randn(4, 8)
    made = 4 * 8 * 4
    assert saved_for_backward(linear, lambda: linear(given)) == 0  # weight and batch were there before
    assert saved_for_backward(linear, lambda: (x := linear(given).exp()) * x.view(4, 8)) == made
    assert saved_for_backward(linear, lambda: {"out": [linear(given).exp()]}) == made

    def with_keyword():
        return torch.utils.checkpoint.checkpoint(
            lambda x, scale: linear(x) * scale, given, scale=given + 1, use_reentrant=False
        )

    assert saved_for_backward(linear, with_keyword) == made

    def with_weights_brought_in():
        linear.weight.data = linear.weight.data.clone()
        return linear(given.clone().requires_grad_())

    assert saved_for_backward(linear, with_weights_brought_in) == made


class Watch(Part):
    """Where the run is, and how many tensors autograd was given to save during probes."""

    def __init__(self):
        self.place, self.saved_in_probes, self.probes = None, 0, 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor)

    def _count(self, tensor):
        self.saved_in_probes += 1
        return tensor

    def before_forward(self, phase):
        self.place = phase

    def before_probe(self):
        self.place = "probe"
        self.probes += 1
        self.hooks.__enter__()

    def after_probe(self):
        self.hooks.__exit__()


def plugin_of(trainer, kind):
    return next(plugin for plugin in trainer.parts if isinstance(plugin, kind))


class MeasuredTrainer(HybridTrainer):
    """Measures every forward pass, with head and loss, in a pass of its own."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        compute = super().compute_loss
        size = saved_for_backward(model, lambda: compute(model, dict(inputs), *args, **kwargs))
        self.sizes.setdefault(plugin_of(self, Watch).place, []).append(size)
        return compute(model, inputs, *args, **kwargs)


def run(tmp_path, *plugins, model=None, trainer_class=HybridTrainer, **overrides):
    # The runs are short and their batches tiny: leaps within the usual budget would come after their end.
    config = hybrid_config(tmp_path, leap_budget=100.0, **overrides)
    trainer = trainer_class(model or deep_model(), config, train_dataset=ByteText(200), parts=plugins)
    trainer.sizes = {}
    trainer.train()
    return trainer


@pytest.mark.long
def test_every_real_phase_of_a_run_saves_nine_tenths_predict_saves_nothing_and_results_are_the_same(
    tmp_path, monkeypatch
):
    """Counted: everything that the whole forward pass made and backward needs, head and loss included."""
    monkeypatch.setattr(activations, "BoundaryOffload", Counted)
    plain, checkpointed, offloaded = (
        run(tmp_path, Watch(), *plugins, trainer_class=MeasuredTrainer, max_steps=16)
        for plugins in ([], [ActivationCheckpointing()], [ActivationCheckpointing(offload=True, min_bytes=0)])
    )
    for trainer in (checkpointed, offloaded):
        for log, expected in zip(trainer.state.log_history, plain.state.log_history):
            assert log.get("loss") == expected.get("loss")
        assert_same_weights(weights(trainer.model), weights(plain.model))
    assert set(plain.sizes) == {Phase.WARMUP, Phase.FULL, Phase.CORRECT, "probe"}
    for phase in (Phase.WARMUP, Phase.FULL, Phase.CORRECT):
        assert max(checkpointed.sizes[phase]) <= 0.1 * min(plain.sizes[phase])
        # In the very first forward pass the host buffers are new and count.
        assert max(offloaded.sizes[phase][1:]) < 0.6 * min(checkpointed.sizes[phase])
    for trainer in (plain, checkpointed, offloaded):
        watch = plugin_of(trainer, Watch)
        assert set(trainer.sizes["probe"]) == {0}
        assert watch.probes > 0 and watch.saved_in_probes == 0
        assert trainer.hybrid_summary()["steps_by_phase"]["predict"] > 0
    assert Counted.made[-1].tensors > 0


# When it is on.


def test_it_is_on_in_the_phases_named_and_off_in_the_others(tmp_path):
    model = deep_model(num_hidden_layers=2)
    seen = {}

    class Look(Part):
        def before_forward(self, phase):
            seen.setdefault(phase, set()).update(switched_on(model))

    run(tmp_path, ActivationCheckpointing(phases=(Phase.FULL, "correct")), Look(), model=model)
    assert seen == {Phase.WARMUP: {False}, Phase.FULL: {True}, Phase.CORRECT: {True}}
    assert not any(switched_on(model))
    plugin = started(ActivationCheckpointing(), model)
    assert all(switched_on(model))
    plugin.on_phase_change(Phase.FULL, Phase.PREDICT)
    assert not any(switched_on(model))
    plugin.on_phase_change(Phase.PREDICT, Phase.CORRECT)
    assert all(switched_on(model))
    plugin = started(ActivationCheckpointing(phases="full"), model)
    assert not any(switched_on(model))
    plugin.before_forward(Phase.FULL)  # where a run without warmup, or a resumed one, begins
    assert all(switched_on(model))


def test_what_the_user_set_comes_back(tmp_path):
    model = deep_model()
    run(tmp_path, ActivationCheckpointing(), model=model, max_steps=6, **{checkpointing_option(): True})
    assert all(switched_on(model))  # as Trainer leaves it
    enable(model, every_n_layers=2)
    before = switched_on(model), [layer._gradient_checkpointing_func for layer in model.model.layers]
    plugin = started(ActivationCheckpointing(offload=True), model)
    assert all(switched_on(model))
    plugin.end()
    assert (switched_on(model), [layer._gradient_checkpointing_func for layer in model.model.layers]) == before


def test_a_run_that_failed_leaves_nothing_for_the_next_one(tmp_path):
    model = deep_model(num_hidden_layers=2)
    plugin = ActivationCheckpointing(offload=True, min_bytes=0)

    class Fails(Part):
        def after_backward(self, phase):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(tmp_path, plugin, Fails(), model=model)
    assert not any(switched_on(model))
    run(tmp_path, plugin, model=model, max_steps=6)
    assert not any(switched_on(model))
    assert not any("_gradient_checkpointing_func" in vars(layer) for layer in model.model.layers)


def test_switching_adds_no_hooks_and_frozen_lower_layers_get_no_backward_pass():
    model = deep_model()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:4].requires_grad_(False)
    plugin = started(ActivationCheckpointing(offload=True, min_bytes=0), model)
    for _ in range(3):
        plugin.on_phase_change(Phase.FULL, Phase.PREDICT)
        plugin.on_phase_change(Phase.PREDICT, Phase.CORRECT)
    assert not model.model.embed_tokens._forward_hooks
    recomputed = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: recomputed.append(module))
    gradients(model)
    assert len(recomputed) == LAYERS + 4
    plugin.end()
    model.enable_input_require_grads()
    plugin = started(plugin, model)
    plugin.end()
    assert len(model.model.embed_tokens._forward_hooks) == 1
    model.disable_input_require_grads()
    assert not model.model.embed_tokens._forward_hooks


@pytest.mark.parametrize("offload", [False, True])
def test_adapters_inside_wrappers(offload):
    peft = pytest.importorskip("peft")

    def adapted():
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(deep_model(num_hidden_layers=3), config)

    reference, model = adapted(), adapted()
    started(ActivationCheckpointing(offload=offload, min_bytes=0), nn.ModuleDict({"module": model}))
    assert all(switched_on(model))
    assert_same_weights(gradients(reference), gradients(model))


# The way to the host and back.


def test_offloaded_inputs_come_back_to_the_bit_and_recomputed_tensors_stay():
    model = deep_model()
    expected = gradients(model)
    enable(model)
    offload = Counted(model, min_bytes=BOUNDARY)
    for step in range(1, 4):
        assert_same_weights(gradients(model, offload=offload), expected)
        # One per layer: recomputing in the backward pass moved nothing more.
        assert offload.tensors == step * LAYERS
        assert offload.bytes_offloaded() == step * LAYERS * BOUNDARY
    assert offload.host_bytes() == LAYERS * BOUNDARY, "buffers are used again"
    assert offload.waits == 0, "each is on its way back before it is needed"


def test_graphs_that_are_kept_dropped_or_alive_together():
    model = deep_model()
    expected = gradients(model)
    enable(model)
    short = TOKENS[:, :64]
    with Counted(model, min_bytes=0) as offload:
        loss_of(model)  # never used
        other, kept = loss_of(model, short), loss_of(model)
        model.zero_grad()
        kept.backward(retain_graph=True)
        assert offload.waits == 0
        model.zero_grad()
        kept.backward()
        assert offload.waits == 1, "the first pass took the newest, and the others are fetched ahead again"
        assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())
        model.zero_grad()
        other.backward()
    grads = {"loss": other.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}
    disable(model)
    assert_same_weights(grads, gradients(model, short))
    assert offload.host_bytes() <= 2 * LAYERS * BOUNDARY, "two graphs at a time, so two sets of buffers"


def test_parameters_small_tensors_and_other_arguments_stay():
    model = deep_model(num_hidden_layers=2)
    enable(model)
    layer = model.model.layers[0]
    positions = model.model.rotary_emb(torch.zeros(1, 1), torch.arange(16)[None])
    learned = nn.Parameter(torch.randn(1, 16, HIDDEN))
    model.register_parameter("learned", learned)
    offload = Counted(model, min_bytes=16 * HIDDEN * 4)
    with offload:
        for given in (learned, learned.view(1, 16, HIDDEN), torch.randn(1, 15, HIDDEN)):
            layer(given, position_embeddings=[part[:, : given.shape[1]] for part in positions]).sum().backward()
        assert offload.tensors == 0
        layer(learned * 1, None, torch.zeros(4096), position_embeddings=positions).sum().backward()
    assert offload.tensors == 1, "the input moves, the argument after it does not"
    layer(learned * 1, position_embeddings=positions).sum().backward()
    assert offload.tensors == 1, "outside of the context nothing moves"


def test_a_layer_that_overwrites_its_input_is_an_error_as_it_is_without_offload():
    model = deep_model(num_hidden_layers=2)
    enable(model)
    model.model.layers[0].input_layernorm.register_forward_pre_hook(lambda module, args: args[0].add_(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(model)
    with pytest.raises(RuntimeError, match="modified in place"):
        gradients(model, offload=BoundaryOffload(model, min_bytes=0))


class LateStream(TorchFunctionMode):
    """
    Stands in for a copy stream at its slowest: a copy happens only when someone waits for it. Copies hold no memory,
    so one that nobody waited for before its memory was given up is found out.
    """

    def __init__(self, *args):
        super().__init__()
        self.copies, self.issued, self.ordered = [], 0, False

    def wait_stream(self, stream):
        self.ordered = True

    def record_event(self):
        return self, self.issued

    def wait_event(self, event):
        stream, number = event
        while stream.copies and stream.issued - len(stream.copies) < number:
            target, source = (self._tensor(*end) for end in stream.copies.pop(0))
            target.copy_(source)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.Tensor.copy_:
            return function(*args, **(kwargs or {}))
        assert self.ordered, "the copy does not wait for what computes its source"
        self.ordered, self.issued = False, self.issued + 1
        self.copies.append([(weakref.ref(t.untyped_storage()), t.dtype, t.storage_offset(), t.shape) for t in args])
        return args[0]

    @staticmethod
    def _tensor(storage, dtype, offset, shape):
        assert storage() is not None, "memory was given up before the copy was done"
        return torch.empty(0, dtype=dtype).set_(storage(), offset, shape)


def test_copies_are_waited_for_however_late_they_are(monkeypatch):
    model = deep_model()
    expected = gradients(model)
    short = gradients(model, TOKENS[:, :64])
    enable(model)
    compute = LateStream()
    late = SimpleNamespace(Stream=LateStream, stream=lambda stream: stream, current_stream=lambda device: compute)
    monkeypatch.setattr(torch, "get_device_module", lambda device: late)
    offload = Counted(model, min_bytes=0)
    for _ in range(2):
        assert_same_weights(gradients(model, offload=offload), expected)
        assert_same_weights(gradients(model, TOKENS[:, :64], offload=offload), short)
        with offload:
            torch.autograd.grad(loss_of(model), model.model.layers[5].mlp.up_proj.weight)  # ends half way
    assert offload.waits == 0
    assert offload.host_bytes() <= LAYERS * BOUNDARY


# What cannot be.


def test_errors_say_what_to_do(monkeypatch):
    with pytest.raises(ValueError, match="`predict` is no phase of `checkpoint_phases`.*Predict has no backward pass"):
        ActivationCheckpointing(phases=["full", "predict"])
    with pytest.raises(ValueError, match="`fully` is no phase of `checkpoint_phases`"):
        ActivationCheckpointing(phases="fully")
    with pytest.raises(ValueError, match="`Linear` does not support activation checkpointing. Remove"):
        started(ActivationCheckpointing(), nn.Linear(2, 2))
    sizes = {"embedding_size": 4, "hidden_sizes": [4], "depths": [1]}
    unsupported = ResNetForImageClassification(ResNetConfig(**sizes))
    with pytest.raises(ValueError, match="`ResNetForImageClassification` does not support"):
        started(ActivationCheckpointing(), unsupported)
    with pytest.raises(ValueError, match="`offload=True` needs `GradientCheckpointingLayer`s"):
        BoundaryOffload(unsupported)
    model = deep_model(num_hidden_layers=1)
    model.parameters = lambda: iter([SimpleNamespace(device=torch.device("mps"))])
    monkeypatch.delattr(torch.mps, "Stream", raising=False)  # torch 2.15 has it
    with pytest.raises(ValueError, match="needs a device with streams, not `mps`"):
        BoundaryOffload(model)


# Of the options.


def test_wrong_checkpoint_phase(tmp_path, train_set):
    with pytest.raises(ValueError, match="`predict`"):
        config = hybrid_config(tmp_path, checkpoint_phases="full,predict")
        HybridTrainer(tiny_model(), config, train_dataset=train_set)


class WatchCheckpointing(Part):
    def __init__(self, model):
        self.model, self.seen = model, {}

    def before_forward(self, phase):
        self.seen.setdefault(phase, set()).add(self.model.model.layers[0].gradient_checkpointing)


def test_checkpointing_follows_the_phase(tmp_path, train_set):
    model = tiny_model()
    watch = WatchCheckpointing(model)
    config = hybrid_config(tmp_path, max_steps=16, checkpoint_phases="full")
    HybridTrainer(model, config, train_dataset=train_set, parts=[watch]).train()
    assert watch.seen == {Phase.WARMUP: {False}, Phase.FULL: {True}, Phase.CORRECT: {False}}


def test_activations_are_offloaded_without_leaps_too(tmp_path, train_set, monkeypatch):
    parked = []
    monkeypatch.setattr(
        activations.HostBuffers, "take", lambda self, like: parked.append(like.shape) or torch.empty_like(like)
    )
    monkeypatch.setattr(activations.HostBuffers, "give_back", lambda self, tensor: None)
    model = tiny_model()
    config = hybrid_config(tmp_path, max_steps=2, enable_predict=False, offload_activations=True)
    trainer = HybridTrainer(model, config, train_dataset=train_set)
    next(p for p in trainer.parts if isinstance(p, ActivationCheckpointing)).min_bytes = 1
    trainer.train()
    assert len(parked) == 2 * 2, "the input of each of two layers, in each of two steps"
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
