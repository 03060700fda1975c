"""A user's code in and around layers that are recomputed: what it makes is what Trainer makes of it, or is refused."""

from functools import partial

import pytest
import torch
from conftest import ByteText, assert_same_weights, config_values, mostly_slow, tiny_model, weights
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_hybrid import HybridConfig, HybridTrainer

LAYERS = 4
IN_BACKWARD = {"max_grad_norm": 0.0, "out_of_memory": "raise"}
SINGLE, MICRO = {"gradient_accumulation_steps": 1}, {"accumulation_walk": "micro_batch"}
OURS, PLANNED = ("out_of_memory", "accumulation_walk"), ("kept_graphs", "prefetch_layers")


def small(**overrides):
    return tiny_model(num_hidden_layers=LAYERS, **overrides)


def untied():
    return small(tie_word_embeddings=False)


def made(ours, folder, model, *, loss=None, callbacks=(), optimizers=(None, None), **options):
    """`loss` is a `compute_loss` of the user's; `callbacks` makes callbacks."""
    values = config_values(
        folder, **{"max_steps": 3, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, **options}
    )
    own, planned = ({name: values.pop(name) for name in names if name in values} for names in (OURS, PLANNED))
    base = HybridTrainer if ours else Trainer
    if loss is not None:
        base = type("Own", (base,), {"compute_loss": loss})
    if ours:
        config = HybridConfig(**values, **own, memory="stream", enable_predict=False, resident_layers=0)
        config.plan_values = {"kept_graphs": 0, **planned}
    else:
        config = TrainingArguments(**values)
    return base(
        model,
        config,
        train_dataset=ByteText(64),
        callbacks=list(callbacks() if callable(callbacks) else callbacks),
        optimizers=optimizers,
    )


def trained(ours, folder, prepare=lambda trainer: None, *, model=small, optimizers=None, **options):
    torch.manual_seed(0)
    model = model()
    given = (None, None) if optimizers is None else (optimizers(model), None)
    trainer = made(ours, folder, model, optimizers=given, **options)
    prepare(trainer)
    trainer.train()
    return trainer


def assert_as_trainer(folder, *given, **options):
    plain, streamed = (trained(ours, folder / str(ours), *given, **options) for ours in (False, True))
    assert_same_weights(weights(plain.model), weights(streamed.model))
    logs = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (plain, streamed)]
    assert logs[0] == logs[1]


def refused(folder, what, *given, **options):
    with pytest.raises(RuntimeError, match=what) as raised:
        trained(True, folder, *given, **options)
    assert "memory=" in str(raised.value)


# A layer that computes something else the second time.


def noise(generator):
    def prepare(trainer):
        own = torch.Generator().manual_seed(1) if generator else None
        for layer in trainer.model.model.layers:
            layer.mlp.act_fn.register_forward_hook(lambda m, a, o: o * (1 + 0.1 * torch.randn(o.shape, generator=own)))

    return prepare


@pytest.mark.parametrize("options", [SINGLE, {**SINGLE, **IN_BACKWARD}, MICRO, {**SINGLE, "bf16": True}], ids=str)
def test_noise_of_an_own_generator_is_refused(options, tmp_path):
    refused(tmp_path, "layers.3.*something else.*memory=stream.*global generator", noise(True), **options)


def test_noise_of_the_global_generator_is_drawn_again(tmp_path):
    assert_as_trainer(tmp_path, noise(False), **SINGLE)


def test_layers_that_keep_their_graphs_may_draw_from_any_generator(tmp_path):
    assert_as_trainer(tmp_path, noise(True), **SINGLE, kept_graphs=100)


class Noisy(torch.nn.Module):
    """In place of an activation function."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x):
        return torch.relu(x) * (1 + 0.1 * torch.randn(x.shape, generator=self.generator))


def own_module(trainer):
    trainer.model.model.layers[1].mlp.act_fn = Noisy()


def own_function(trainer):
    trainer.model.model.layers[1].mlp.act_fn.forward = Noisy().forward


@pytest.mark.parametrize("prepare", [own_module, own_function])
def test_a_module_or_function_of_the_user_in_a_layer_is_compared(prepare, tmp_path):
    refused(tmp_path, "layers.1.*something else", prepare, **SINGLE)


def lora():
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(small(), peft.LoraConfig(target_modules=["q_proj", "up_proj"], r=4))


def two_scales(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    """Two passes with gradients, and another scale of the adapters for the second."""
    losses = []
    for scale in (1.0, 3.0):
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["default"] = scale
        losses.append(model(**inputs).loss)
    return losses[0] + losses[1]


def test_two_passes_with_two_scales_are_refused(tmp_path):
    """In the first step too, in which the second matrices of adapters are 0 and only gradients depend on the scale."""
    refused(tmp_path, "something else.*scales and adapters", model=lora, loss=two_scales, **SINGLE)


def two_modes(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    """The second pass without dropout."""
    first = model(**inputs).loss
    return first + model.eval()(**inputs).loss


@pytest.mark.parametrize("options", [SINGLE, MICRO])
def test_two_passes_of_which_one_is_without_dropout_are_refused(options, tmp_path):
    """Both orders of saved tensors: torch finds another number of them, or nobody but the sample does."""
    refused(tmp_path, "something else", model=lambda: small(attention_dropout=0.2), loss=two_modes, **options)


def two_passes(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    return model(**inputs).loss + model(**inputs).loss


@pytest.mark.parametrize("options", [SINGLE, MICRO, {**SINGLE, **IN_BACKWARD}], ids=str)
def test_two_passes_in_one_mode_are_those_of_trainer(options, tmp_path):
    assert_as_trainer(tmp_path, model=lambda: small(attention_dropout=0.2), loss=two_passes, **options)


def test_nothing_is_compared_without_code_of_a_user(tmp_path, monkeypatch):
    trainer = trained(True, tmp_path)
    assert not trainer.memory.streamer.compares
    trainer = trained(
        True, tmp_path, lambda t: t.model.model.layers[2].register_forward_hook(lambda *_: None), **SINGLE
    )
    assert trainer.memory.streamer.compares


# Derivatives that the user takes.


def slope(create, times=1):
    """A weight of the loss by the gradients of a matrix, as balances of several losses have it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, norms = model(**inputs).loss, []
        for layer in model.model.layers[:times]:
            weight = layer.mlp.up_proj.weight
            (gradient,) = torch.autograd.grad(loss, [weight], create_graph=create, retain_graph=True)
            norms.append(gradient.pow(2).sum())
        return loss + 100 * sum(norms) if create else loss * (1 + sum(norms))

    return compute_loss


DERIVATIVES = [SINGLE, MICRO, {**SINGLE, "kept_graphs": 100}, {**SINGLE, "kept_graphs": 2}, {**SINGLE, **IN_BACKWARD}]


@pytest.mark.parametrize("options", [*DERIVATIVES, {**SINGLE, "prefetch_layers": 0}], ids=str)
def test_gradients_that_a_loss_takes_are_those_of_trainer(options, tmp_path):
    assert_as_trainer(tmp_path, loss=slope(False, times=2), **options)


@pytest.mark.parametrize("options", DERIVATIVES, ids=str)
def test_second_derivatives_of_layers_are_refused(options, tmp_path):
    model = lambda: small(attn_implementation="eager")  # noqa: E731
    refused(tmp_path, "create_graph=True.*model.layers", model=model, loss=slope(True), **options)


def twice(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    loss = model(**inputs).loss
    loss.backward(retain_graph=True)
    return loss * 0.5


@pytest.mark.parametrize("options", DERIVATIVES[:-1], ids=str)
def test_a_graph_is_differentiated_twice(options, tmp_path):
    assert_as_trainer(tmp_path, loss=twice, **options)


def test_a_layer_that_was_updated_in_the_backward_pass_is_not_differentiated_again(tmp_path):
    refused(tmp_path, "weights were updated.*max_grad_norm", loss=twice, **SINGLE, **IN_BACKWARD)


# Which parameters are trained.


class Rotates(TrainerCallback):
    """Trains one layer after the other (LISA)."""

    def on_step_begin(self, args, state, control, model, **kwargs):
        for index, layer in enumerate(model.model.layers):
            layer.requires_grad_(index == state.global_step % LAYERS)


def rotated(ours, folder, *, trainings=2, **options):
    trainer = trained(ours, folder, callbacks=[Rotates()], max_steps=5, **options)
    for _ in range(trainings - 1):
        trainer.train()
    return weights(trainer.model)


@pytest.mark.parametrize(
    "options",
    mostly_slow(
        [SINGLE, MICRO, {**SINGLE, **IN_BACKWARD}, {**MICRO, **IN_BACKWARD}], [SINGLE, {**MICRO, **IN_BACKWARD}]
    ),
    ids=str,
)
def test_layers_that_are_trained_in_turn(options, tmp_path):
    """Over saves, after which the model is taken over anew, and in a second training."""
    options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "save_only_model": True, **options}
    assert_same_weights(*(rotated(ours, tmp_path / str(ours), **options) for ours in (False, True)))


def freeze(index, model=small):
    """Makes the model with one layer frozen."""

    def make():
        made = model()
        made.model.layers[index].requires_grad_(False)
        return made

    return make


def unfreeze(trainer):
    for layer in trainer.model.model.layers:
        layer.requires_grad_()


def all_of(kind):
    return lambda model: kind(model.parameters(), lr=0.01)


FROZEN_FIRST = [SINGLE, {**SINGLE, "optimizers": all_of(torch.optim.AdamW)}, {**MICRO, **IN_BACKWARD}]


@pytest.mark.parametrize("options", FROZEN_FIRST, ids=["single", "own optimizer", "in backward"])
def test_a_layer_that_is_unfrozen_before_the_training_is_planned_for(options, tmp_path):
    """With weights that were assigned meanwhile; and in a second training, which has an optimizer."""

    def prepare(trainer):
        for parameter in trainer.model.model.layers[0].parameters():
            parameter.data = parameter.data * 1.5
        unfreeze(trainer)

    def train(ours):
        trainer = trained(ours, tmp_path / str(ours), prepare, model=freeze(1), **options)
        trainer.train()
        return weights(trainer.model)

    assert_same_weights(train(False), train(True))


class Unfreezes(TrainerCallback):
    def on_step_begin(self, args, state, control, model, **kwargs):
        if state.global_step == 1:
            model.model.layers[1].requires_grad_()


class FreezesFirst(Unfreezes):
    def on_train_begin(self, args, state, control, model, **kwargs):
        model.model.layers[1].requires_grad_(False)


@pytest.mark.parametrize("optim", [None, all_of(torch.optim.SGD)], ids=["trainer's", "own"])
def test_a_layer_that_is_unfrozen_in_a_run_is_refused(optim, tmp_path):
    given = {**SINGLE, "model": freeze(1), "callbacks": [Unfreezes()], "optimizers": optim}
    refused(tmp_path, "layers.1.*to be trained.*on_train_begin", **given)


@pytest.mark.parametrize("options", FROZEN_FIRST, ids=["single", "own optimizer", "in backward"])
def test_a_layer_that_is_frozen_in_on_train_begin_is_unfrozen_in_a_run(options, tmp_path):
    assert_as_trainer(tmp_path, callbacks=[FreezesFirst()], **options)


@pytest.mark.parametrize("optim", [None, all_of(torch.optim.AdamW)], ids=["trainer's", "own"])
def test_a_layer_that_is_frozen_before_the_training_is_unfrozen_in_a_run(optim, tmp_path):
    """A user's optimizer holds it and trains it. That of Trainer does not, and its gradients count in the norm."""
    prepare = lambda trainer: trainer.model.model.layers[1].requires_grad_(False)  # noqa: E731
    options = {**SINGLE, "callbacks": [Unfreezes()], "max_steps": 4, "max_grad_norm": 0.05, "optimizers": optim}
    assert_as_trainer(tmp_path, prepare, **options)


class AddsGroup(TrainerCallback):
    def on_step_end(self, args, state, control, model, optimizer, **kwargs):
        if state.global_step == 1:
            optimizer.add_param_group({"params": list(model.model.layers[1].parameters())})


def test_a_group_of_streamed_parameters_is_not_added_in_a_run(tmp_path):
    last = lambda model: torch.optim.SGD(model.model.layers[3].parameters(), lr=0.01)  # noqa: E731
    refused(tmp_path, "layers.1.*to be trained", callbacks=[AddsGroup()], optimizers=last, **SINGLE)


# Hooks on gradients, and a limit that changes.


class Hooks(TrainerCallback):
    """Changes gradients in place, replaces them, and notes what it sees."""

    def __init__(self, early):
        self.seen, self.early = {}, early

    def on_train_begin(self, args, state, control, model, **kwargs):
        if not self.early:
            self.register(model)

    def register(self, model):
        for index, layer in enumerate(model.model.layers):
            for name, parameter in layer.named_parameters():
                hook = partial(self.replace if index == 2 else self.clamp, self.seen.setdefault((index, name), []))
                parameter.register_post_accumulate_grad_hook(hook)

    @staticmethod
    def clamp(seen, parameter):
        seen.append(parameter.grad.clone())
        parameter.grad.clamp_(-1e-3, 1e-3)

    @staticmethod
    def replace(seen, parameter):
        seen.append(parameter.grad.clone())
        parameter.grad = None if parameter.dim() == 1 else parameter.grad * 0.5


def named(options):
    return " ".join(f"{name}={value}" for name, value in options.items() if name != "model")


LAYER = {"accumulation_walk": "layer", "model": untied}
BF16 = {"bf16": True}
HOOKED = [SINGLE, MICRO, LAYER, {**LAYER, **BF16}, {**MICRO, **IN_BACKWARD}, {**MICRO, **BF16}]


@pytest.mark.parametrize("early", mostly_slow([True, False], [False]), ids=["before", "in on_train_begin"])
@pytest.mark.parametrize("options", [*HOOKED, {**SINGLE, **IN_BACKWARD, "bf16": True}], ids=named)
def test_hooks_on_gradients_see_the_sum_and_change_it(options, early, tmp_path):
    seen = []

    def prepare(trainer):
        hooks = Hooks(early)
        seen.append(hooks.seen)
        trainer.add_callback(hooks)
        if early:
            hooks.register(trainer.model)

    assert_as_trainer(tmp_path, prepare, optim="sgd", learning_rate=0.5, **options)
    plain, streamed = ({key: torch.stack(gradients) for key, gradients in found.items()} for found in seen)
    assert_same_weights(plain, streamed)


class Limits(TrainerCallback):
    """Clips from step 2 on, and no more from step 4 on."""

    def __init__(self, event):
        setattr(self, event, self.limit)

    @staticmethod
    def limit(args, state, control, **kwargs):
        args.max_grad_norm = 0.05 if state.global_step in (1, 2) else 0.0


@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end"])
@pytest.mark.parametrize("options", [SINGLE, MICRO, {"accumulation_walk": "layer"}], ids=str)
def test_a_limit_of_gradients_that_is_set_in_a_run_counts(event, options, tmp_path):
    options = {"callbacks": lambda: [Limits(event)], "max_steps": 5, "optim": "sgd", "learning_rate": 0.5, **options}
    assert_as_trainer(tmp_path, model=untied, **options, **IN_BACKWARD)


def test_a_limit_that_is_set_at_the_beginning_of_an_epoch_counts(tmp_path):
    options = {"callbacks": lambda: [Limits("on_epoch_begin")], "max_steps": 5, "dataloader_drop_last": True}
    assert_as_trainer(tmp_path, **options, per_device_train_batch_size=32, **SINGLE, **IN_BACKWARD)


def test_an_optimizer_that_holds_few_parameters_is_clipped_by_the_norm_of_all(tmp_path):
    """As in Trainer, where each step begins without gradients."""
    last = lambda model: torch.optim.SGD(model.model.layers[3].parameters(), lr=0.5)  # noqa: E731
    assert_as_trainer(tmp_path, optimizers=last, max_grad_norm=0.05, **SINGLE)
