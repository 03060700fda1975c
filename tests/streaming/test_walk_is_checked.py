"""The walk by layer is checked: code of a user, and a comparison of a few tokens, tell where it would mix something."""

import pytest
import torch
from conftest import ByteText, assert_same_weights, config_values, mostly_slow, tiny_model, weights
from rig.tiny_architectures import build_model, samples
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.run.run import RandomStates
from hf_hybrid.streaming import walk
from hf_hybrid.streaming.comparison import difference
from hf_hybrid.streaming.walk import CannotWalkError

OPTIONS = {"max_steps": 3, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.1}
STREAMED = {"memory": "stream", "resident_layers": 0, "enable_predict": False}


def model_of(kind=LlamaForCausalLM, **options):
    model = tiny_model(num_hidden_layers=3, tie_word_embeddings=False, attn_implementation="eager", **options)
    model.__class__ = kind
    return model


def trained(base, folder, model, data=None, compute_loss_func=None, callbacks=(), plan_values=None, **options):
    """Train by `Trainer`, or by a class of this package with streamed layers."""
    streams = issubclass(base, HybridTrainer)
    values = config_values(folder, **{**OPTIONS, **(STREAMED if streams else {}), **options})
    config = HybridConfig(**values) if streams else TrainingArguments(**values)
    if streams:
        config.plan_values = plan_values or {}
    data = ByteText(40) if data is None else data
    trainer = base(model, config, train_dataset=data, compute_loss_func=compute_loss_func, callbacks=list(callbacks))
    trainer.train()
    return trainer


def assert_close(one, other):
    for (name, first), second in zip(weights(one.model).items(), weights(other.model).values()):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-6, msg=name)


# Code of a user.


def note(model, inputs):
    vars(model)["note"] = inputs["input_ids"].float().mean() / 100


def reads_note(model):
    return lambda module, args, output: output * (1 + vars(model)["note"])


def hooks():
    """A hook notes something of the batch, and one in a layer reads it."""
    model = model_of()
    model.register_forward_pre_hook(lambda module, args, kwargs: note(module, kwargs), with_kwargs=True)
    model.model.layers[1].mlp.register_forward_hook(reads_note(model))
    return model, {}


class Noting(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        note(self, {"input_ids": input_ids})
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


def own_forward():
    """The model's `forward` notes it, and a function in place of that of a layer's module reads it."""
    model = model_of(Noting)
    mlp = model.model.layers[1].mlp
    real = mlp.forward
    mlp.forward = lambda hidden: real(hidden) * (1 + vars(model)["note"])
    return model, {}


class Penalised(torch.nn.Module):
    """A module that leaves a loss in an attribute."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, hidden):
        output = self.inside(hidden)
        self.left = output.square().mean()
        return output


def own_module():
    model = model_of()
    for layer in model.model.layers:
        layer.mlp = Penalised(layer.mlp)

    def loss(outputs, labels, num_items_in_batch):
        return outputs.logits.square().mean() + 100 * sum(layer.mlp.left for layer in model.model.layers)

    return model, {"compute_loss_func": loss}


def attentions():
    """The config asks for what leaves the layers past their outputs."""
    model = model_of()
    model.config.output_attentions = True

    def loss(outputs, labels, num_items_in_batch):
        return outputs.logits.square().mean() + sum(each.square().sum() for each in outputs.attentions)

    return model, {"compute_loss_func": loss}


class WithNote:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        note(model, inputs)
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss * (1 + model.note) + 100 * model.model.layers[0].mlp.left


class PlainWithNote(WithNote, Trainer):
    pass


class StreamedWithNote(WithNote, HybridTrainer):
    pass


def left_by_class(monkeypatch):
    """As a library does: what a layer leaves can be seen in no hook, class or function of a user."""
    kind = type(model_of().model.layers[0].mlp)
    real = kind.forward

    def forward(self, hidden):
        self.left = (output := real(self, hidden)).square().mean()
        return output

    monkeypatch.setattr(kind, "forward", forward)


@pytest.mark.parametrize("make", [hooks, own_forward, own_module, attentions], ids=lambda make: make.__name__)
def test_code_of_a_user_beside_the_layers_is_obeyed(make, tmp_path, caplog):
    plain, streamed = (
        trained(base, tmp_path, model, **more) for base, (model, more) in ((Trainer, make()), (HybridTrainer, make()))
    )
    assert_close(streamed, plain)
    said = [record.message for record in caplog.records if "micro-batch by micro-batch" in record.message]
    assert len(said) == 1 and not streamed.memory.window.by_layer
    model, more = make()
    with pytest.raises(CannotWalkError, match="accumulation_walk=micro_batch"):
        trained(HybridTrainer, tmp_path, model, **more, accumulation_walk="layer")


def test_a_loss_of_a_user_is_obeyed(tmp_path, caplog, monkeypatch):
    left_by_class(monkeypatch)
    plain, streamed = (trained(base, tmp_path, model_of()) for base in (PlainWithNote, StreamedWithNote))
    assert_close(streamed, plain)
    assert "`WithNote.compute_loss` may note something" in caplog.text


def test_code_that_comes_in_a_run_is_obeyed(tmp_path):
    class Steers(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 1:
                model.register_forward_pre_hook(lambda module, args, kwargs: note(module, kwargs), with_kwargs=True)
                model.model.layers[1].mlp.register_forward_hook(reads_note(model))

    plain, streamed = (trained(base, tmp_path, model_of(), callbacks=[Steers()]) for base in (Trainer, HybridTrainer))
    assert_close(streamed, plain)


# What a library does cannot be seen: it is compared.


def adds_what_layers_left():
    """A loss in an attribute of the layers, which the model adds to its own."""
    model = model_of()
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: vars(module).update(left=output.square().mean()))

    def add(module, args, output):
        output.loss = output.loss + 100 * sum(layer.mlp.left for layer in model.model.layers)

    model.register_forward_hook(add)
    return model


def notes_in_training():
    model = model_of(attention_dropout=0.0)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: note(module, kwargs) if module.training else None, with_kwargs=True
    )
    layer = model.model.layers[1].mlp
    layer.register_forward_hook(lambda module, *rest: reads_note(model)(module, *rest) if module.training else None)
    return model


@pytest.mark.usefixtures("of_a_library")
@pytest.mark.parametrize("options", [{}, {"offload_activations": True}, {"max_grad_norm": 0.0}], ids=str)
@pytest.mark.parametrize("make", [adds_what_layers_left, notes_in_training], ids=lambda make: make.__name__)
def test_what_a_library_leaves_beside_the_layers_is_found(make, options, tmp_path, caplog):
    only = {**options, "out_of_memory": "raise"}
    plain = trained(Trainer, tmp_path, make(), max_grad_norm=options.get("max_grad_norm", 1.0))
    streamed = trained(HybridTrainer, tmp_path, make(), **only)
    assert_close(streamed, plain)
    said = [record.message for record in caplog.records if "of its size away" in record.message]
    assert len(said) == 1 and "beside their inputs and outputs" in said[0]
    with pytest.raises(CannotWalkError, match="of its size away"):
        trained(HybridTrainer, tmp_path, make(), **only, accumulation_walk="layer")


@pytest.mark.usefixtures("of_a_library")
def test_a_window_of_one_whose_activations_leave_is_compared_too(tmp_path, caplog):
    plain = trained(Trainer, tmp_path, adds_what_layers_left(), gradient_accumulation_steps=1)
    options = {"gradient_accumulation_steps": 1, "offload_activations": True}
    streamed = trained(HybridTrainer, tmp_path, adds_what_layers_left(), **options)
    assert_close(streamed, plain)
    assert "of its size away" in caplog.text


# And nothing else changes.


def lora(dropout=0.1):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False, lora_dropout=dropout)
    return get_peft_model(model_of(hidden_size=64), config)


class Bytes(TrainerCallback):
    """Bytes that have travelled at the end of each step."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, *args, **kwargs):
        statistics = self.trainer.memory.statistics()
        self.seen.append((statistics["bytes_in"], statistics["bytes_out"]))


SITUATIONS = {
    "plain": (model_of, {}),
    "tied": (lambda: tiny_model(num_hidden_layers=3), {"plan_values": {"stream_embeddings": True}}),
    "dropout": (lambda: model_of(attention_dropout=0.2), {}),
    "adapters": (lora, {}),
    "adapters multiplied here": (
        lambda: lora(0.0),
        {"bf16": True, "enable_predict": True, "direction": "none", "optim": "adamw_torch"},
    ),
    "adapters of int8": (lora, {"base_precision": "int8"}),
    "bf16": (model_of, {"bf16": True}),
    "model in bf16": (lambda: model_of().to(torch.bfloat16), {}),
    "parked": (model_of, {"offload_activations": True}),
    "graphs": (model_of, {"plan_values": {"kept_graphs": 3}}),
    "in backward": (model_of, {"max_grad_norm": 0.0, "out_of_memory": "raise", "optim": "adamw_torch"}),
    "chunked loss": (model_of, {"chunked_loss": "on"}),
    "some resident": (model_of, {"resident_layers": 1}),
    "gradients before the recomputation": (lambda: build_model("jetmoe"), {"data": samples()}),
    "mixture": (lambda: build_model("qwen3_moe"), {"data": samples()}),
}


QUICK = ("plain", "adapters", "in backward", "graphs", "some resident", "gradients before the recomputation", "mixture")


@pytest.mark.parametrize("name", mostly_slow(SITUATIONS, QUICK))
def test_nothing_remains_of_the_comparison(name, tmp_path, monkeypatch, caplog):
    """Also the bytes of later steps are the same."""
    make, options = SITUATIONS[name]
    found = []

    def looked(streamer, *rest):
        model = streamer.model
        for parameter in model.parameters():  # what a user has added before
            if id(parameter) not in streamer.streamed and parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 1e-3)
        model.train()
        modes = [module.training for module in model.modules()]
        gradients = [parameter.grad for parameter in model.parameters()]
        copies = [None if gradient is None else gradient.clone() for gradient in gradients]
        buffers = [buffer.clone() for buffer in model.buffers()]
        host = [param.master.grad for param in streamer.masters.values()]
        units = [(u.calls, u.open_calls, u.open_graphs, u.bound) for u in streamer.units]
        held, random = (streamer.updates, streamer.last_pass, streamer.walk), RandomStates.now(streamer.device)
        loads, back = [unit.loads for unit in streamer.units], streamer.transfers.bytes_out
        found.append(difference(streamer, *rest))
        loads = [unit.loads - before for unit, before in zip(streamer.units, loads)]
        assert 0 < sum(loads) and max(loads) <= 8, "docs/memory.md says so"
        whole = sum(unit.storage.packed_bytes for unit in streamer.units)
        assert streamer.transfers.bytes_out - back < whole / 10, "and that few gradients leave"
        assert RandomStates.now(streamer.device).same_as(random)
        assert held == (streamer.updates, streamer.last_pass, streamer.walk)
        assert units == [(u.calls, u.open_calls, u.open_graphs, u.bound) for u in streamer.units]
        assert modes == [module.training for module in model.modules()]
        assert all(map(torch.equal, buffers, model.buffers()))
        for parameter, gradient, copy in zip(model.parameters(), gradients, copies):
            assert parameter.grad is gradient and (gradient is None or torch.equal(gradient, copy))
            parameter.grad = None
        assert all(param.master.grad is grad for param, grad in zip(streamer.masters.values(), host))
        return found[-1]

    runs = []
    for look in (looked, lambda *_: None):
        monkeypatch.setattr(walk, "difference", look)
        counts = Bytes()

        class Ours(HybridTrainer):
            def train(self, *args, counts=counts, **kwargs):
                counts.trainer = self
                return super().train(*args, **kwargs)

        runs.append((trained(Ours, tmp_path, make(), **options, callbacks=[counts]), counts.seen))
    (compared, bytes_of_it), (alone, bytes_alone) = runs
    assert found == [None] and compared.memory.window.by_layer
    assert "micro-batch by micro-batch" not in caplog.text
    assert_same_weights(weights(compared.model), weights(alone.model))
    later = [[tuple(b - a for a, b in zip(*two)) for two in zip(seen, seen[1:])] for seen in (bytes_of_it, bytes_alone)]
    assert later[0] == later[1]


def test_without_code_of_a_user_the_walk_is_that_of_before(tmp_path, monkeypatch):
    """By layer, with plain Trainer's bits, and compared once in each run."""
    compared = []
    monkeypatch.setattr(walk, "difference", lambda *args: compared.append(difference(*args)))
    plain = trained(Trainer, tmp_path, model_of())
    streamed = trained(HybridTrainer, tmp_path, model_of())
    assert_same_weights(weights(streamed.model), weights(plain.model))
    assert streamed.memory.window.by_layer and compared == [None]
    streamed.train()
    assert compared == [None, None]


def test_hooks_on_weights_do_not_see_it(tmp_path):
    seen = []

    def halve(weight):
        weight.grad.mul_(0.5)

    def watched():
        model, calls = model_of(), []
        model.lm_head.weight.register_hook(lambda gradient: calls.append(gradient.norm().item()))
        model.model.layers[1].mlp.up_proj.weight.register_post_accumulate_grad_hook(halve)
        seen.append(calls)
        return model

    plain, streamed = (trained(base, tmp_path, watched()) for base in (Trainer, HybridTrainer))
    assert streamed.memory.window.by_layer and len(seen[0]) == 6
    assert_close(streamed, plain)
    assert seen[0] == pytest.approx(seen[1])


@pytest.mark.usefixtures("of_a_library")
@pytest.mark.parametrize("call", [2, 3, 5, 7])
def test_memory_that_runs_out_in_the_comparison(call, tmp_path, monkeypatch):
    """The window is computed again with less, and the comparison first."""
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == call:
            raise torch.OutOfMemoryError("planted")

    plain = trained(Trainer, tmp_path, model_of())
    failing = model_of()
    failing.model.layers[1].register_forward_hook(fail)
    streamed = trained(HybridTrainer, tmp_path, failing, plan_values={"kept_graphs": 0})
    assert [event["error"] for event in streamed.recovery.events] == ["planted"]
    assert_close(streamed, plain)
