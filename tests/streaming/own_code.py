"""
What people do in a run to weights, gradients, an optimizer or a pass, beside what `rig/user_code.py` has.

It knows nothing of this package. [`KINDS`] makes the [`Code`] of one training by name. What a user's code records lies
in `user_code.notes_of(model)`, and is compared too.
"""

import copy
import functools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from rig import user_code
from rig.user_code import clip_gradients, decoder_layers, having, in_step, named, notes_of
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, prune, vector_to_parameters, weight_norm
from torch.optim.swa_utils import AveragedModel

SGD = {"optim": "sgd", "learning_rate": 1.0}
"""Where the size of a gradient matters: AdamW divides by it."""
EVALUATES = {"eval_strategy": "steps", "eval_steps": 1}
EAGER = {"attn_implementation": "eager"}


def nothing(*args):
    pass


class Code(NamedTuple):
    """What a user does in one training."""

    model: Callable = nothing
    """With the model, before the trainer is made."""
    made: Callable = nothing
    """With the trainer, before it trains."""
    drive: Callable = lambda trainer: trainer.train()
    at: dict[str, Callable] = {}
    """In callbacks: functions of what they name of options, state, model and optimizer, by event."""
    methods: dict[str, Callable] = {}
    """In a subclass: functions of the trainer, the method below and its arguments by name."""
    optimizer: Callable | None = None
    """Makes an optimizer for the model."""
    options: dict = {}
    config: dict = {}


def at(event, change, **more):
    return lambda: Code(at={event: change}, **more)


def before(change, **more):
    return lambda: Code(model=change, **more)


def loss_of(change, **more):
    """A loss from the trainer, the model, the batch and the outputs."""

    def compute_loss(trainer, own, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + change(trainer, model, inputs, outputs)
        return (loss, outputs) if return_outputs else loss

    return Code(methods={"compute_loss": compute_loss}, **more)


def on(part, change):
    """A change of each parameter whose name has this in it."""

    def changed(model):
        for parameter in named(model, part):
            change(parameter)

    return changed


def notes(values):
    """Note what a function of a model, or of an optimizer, gives."""
    return lambda model, optimizer: notes_of(model).extend(
        user_code.call(values, args=None, state=None, model=model, optimizer=optimizer)
    )


def copied(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def up_projections(model):
    return [layer.mlp.up_proj for layer in decoder_layers(model)]


# Weights.


def assigns(model):
    draw = torch.Generator().manual_seed(5)
    for parameter in named(model, ".mlp."):
        parameter.data = torch.randn(parameter.shape, generator=draw).to(parameter.dtype) * 0.1


def assigns_start(trainer):
    """Rewinding, as of lottery tickets, but for a tenth."""
    start = copied(trainer.model)
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        parameter.data = start[name] * 0.9
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.train()


def assigns_half(parameter):
    parameter.data = parameter.data * 0.5


@torch.no_grad()
def halves_in_place(parameter):
    parameter.mul_(0.5)


def halves_data_in_place(parameter):
    parameter.data.mul_(0.5)


def prunes(model):
    for projection in up_projections(model):
        prune.l1_unstructured(projection, "weight", 0.5)


def keeps_and_loads():
    kept = {}

    def keep(model):
        kept.update({name: value.clone() for name, value in model.state_dict().items()})

    return keep, lambda model: model.load_state_dict(kept)


def loads_start():
    keep, load = keeps_and_loads()
    return Code(at={"on_train_begin": keep, "on_step_end": in_step(2, load)})


def loads_best():
    keep, load = keeps_and_loads()
    return Code(at={"on_step_end": in_step(1, keep), "on_train_end": load})


def shifts(trainer, own, model, *args, **kwargs):
    kept = [(parameter, parameter.data) for parameter in model.parameters()]
    for parameter, data in kept:
        parameter.data = data + 0.05
    loss = own(model, *args, **kwargs)
    for parameter, data in kept:
        parameter.data = data
    return loss


def shifts_in_place(trainer, own, model, *args, **kwargs):
    for parameter in model.parameters():
        parameter.data.add_(0.05)
    loss = own(model, *args, **kwargs)
    for parameter in model.parameters():
        parameter.data.sub_(0.05)
    return loss


def by_vector(model):
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.9, model.parameters())


def looks_at_doubled(model):
    for change in (2.0, 0.5):
        for parameter in model.parameters():
            parameter.data.mul_(change)
        with torch.no_grad():
            notes_of(model).append(model(input_ids=torch.tensor([[5, 6, 7]])).logits)


def looks_ahead():
    slow = {}

    def steps(model):
        for name, parameter in model.named_parameters():
            slow[name].lerp_(parameter.detach(), 0.5)
            parameter.data.copy_(slow[name])

    return Code(at={"on_train_begin": lambda model: slow.update(copied(model)), "on_step_end": in_step(2, steps)})


@torch.no_grad()
def clamps(parameter):
    parameter.clamp_(-0.05, 0.05)


def ties_two_layers(model):
    first, second = up_projections(model)[1:3]
    second.weight = first.weight


def swaps_layers(model):
    layers = decoder_layers(model)
    layers[0], layers[1] = layers[1], layers[0]


def replaces_activation(model):
    for layer in decoder_layers(model):
        layer.mlp.act_fn = nn.GELU()


def replaces_parameter(model):
    projection = up_projections(model)[1]
    torch.manual_seed(3)
    projection.weight = nn.Parameter(torch.randn_like(projection.weight) * 0.1)


def makes_parameters(model):
    """As whoever wraps a linear layer does."""
    for projection in up_projections(model):
        projection.weight = nn.Parameter(projection.weight.data)


def begins_anew(model):
    torch.manual_seed(3)
    up_projections(model)[1].reset_parameters()


def copies_layer(model):
    layers = decoder_layers(model)
    layers[2].load_state_dict(layers[1].state_dict())


def copies_afterwards(trainer):
    trainer.train()
    notes_of(trainer).extend(parameter.detach() for parameter in copy.deepcopy(trainer.model).parameters())


class Rounds(nn.Module):
    """As quantisation-aware training does."""

    def forward(self, weight):
        return weight + ((weight * 64).round() / 64 - weight).detach()


def on_projections(change):
    return lambda model: [change(projection) for projection in up_projections(model)]


def rounds(projection):
    parametrize.register_parametrization(projection, "weight", Rounds())


# Gradients.


def flips(parameter):
    if parameter.grad is not None:
        parameter.grad.neg_()


def clips_by_layer(trainer, own, model):
    for layer in decoder_layers(model):
        nn.utils.clip_grad_norm_(layer.parameters(), 0.01)
    return trainer.accelerator.clip_grad_norm_(model.parameters(), 0.05)


def with_gradients(change):
    """A change of each gradient, which may return another one."""

    def changed(parameter):
        if parameter.grad is not None:
            parameter.grad = change(parameter.grad)

    return on("", changed)


def centralises(gradient):
    return gradient - gradient.mean(1, keepdim=True) if gradient.dim() == 2 else gradient


def adds_noise():
    draw = torch.Generator().manual_seed(7)

    def add(gradient):
        return gradient.add_(torch.randn(gradient.shape, generator=draw) * 0.01)

    return Code(at={"on_pre_optimizer_step": with_gradients(add)}, options=SGD)


notes_gradients = notes(lambda model: (p.grad.norm() for p in model.parameters() if p.requires_grad))


def leaves_out(trainer, model):
    if trainer.state.global_step == 1:
        model.zero_grad()


def own_backward(model):
    ids = torch.arange(5, 15)[None]
    model(input_ids=ids, labels=ids).loss.backward()


def probes(model):
    own_backward(model)
    model.zero_grad()


def probes_and_notes(model):
    own_backward(model)
    notes_gradients(model, None)
    model.zero_grad()


# A loss.


def square_of_all(trainer, model, inputs, outputs):
    return 0.01 * sum(parameter.square().sum() for parameter in model.parameters())


def one_matrix(trainer, model, inputs, outputs):
    return 0.01 * up_projections(model)[1].weight.abs().sum()


def stays_near_start():
    start = {}

    def distance(trainer, model, inputs, outputs):
        if not start:
            raise AssertionError("the start is not noted")
        return 0.1 * sum((parameter - start[name]).square().sum() for name, parameter in model.named_parameters())

    return loss_of(distance, made=lambda trainer: start.update(copied(trainer.model)))


def of_attentions(trainer, model, inputs, outputs):
    return sum(values.square().sum() for values in model(**inputs, output_attentions=True).attentions)


def of_hidden_states(trainer, model, inputs, outputs):
    return 0.01 * sum(values.square().mean() for values in model(**inputs, output_hidden_states=True).hidden_states)


def leaves_loss(model):
    for layer in decoder_layers(model):
        layer.mlp.register_forward_hook(lambda module, args, output: setattr(module, "aux", output.square().mean()))


def of_attributes(trainer, model, inputs, outputs):
    return 100 * sum(layer.mlp.aux for layer in decoder_layers(model))


def loss_in_a_list():
    left = []

    def leave(model):
        for layer in decoder_layers(model):
            layer.mlp.register_forward_hook(lambda module, args, output: left.append(output.square().mean()))

    def collect(trainer, model, inputs, outputs):
        total = 100 * sum(left)
        left.clear()
        return total

    return loss_of(collect, model=leave)


def passes_by_other_weights(trainer, own, model, inputs, return_outputs=False, num_items_in_batch=None):
    """As fast weights are."""
    other = {name: parameter * 0.9 for name, parameter in model.named_parameters()}
    outputs = torch.func.functional_call(model, other, kwargs=dict(inputs))
    return (outputs.loss, outputs) if return_outputs else outputs.loss


def against_adversary(trainer, own, model, inputs, return_outputs=False, num_items_in_batch=None):
    """The loss at inputs that are moved along its slope, as in virtual adversarial training."""
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    embedded = model.get_input_embeddings()(inputs["input_ids"])
    moved = embedded.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs_embeds=moved, **rest).loss, [moved])
    outputs = model(inputs_embeds=embedded + 0.1 * gradient / gradient.norm(), **rest)
    return (outputs.loss, outputs) if return_outputs else outputs.loss


def notes_saliency(model):
    ids = torch.arange(5, 15)[None]
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs_embeds=embedded, labels=ids).loss, [embedded])
    notes_of(model).append(gradient)


def notes_batch():
    def steer(trainer):
        layer = decoder_layers(trainer.model)[1]
        layer.mlp.register_forward_hook(lambda module, args, output: output + 0.05 * trainer.noted)

    def compute_loss(trainer, own, model, inputs, *args, **kwargs):
        trainer.noted = inputs["input_ids"].float().mean() / 30
        return own(model, inputs, *args, **kwargs)

    return Code(made=steer, methods={"compute_loss": compute_loss})


def slope(trainer, model, inputs, outputs):
    weight = up_projections(model)[1].weight
    (gradient,) = torch.autograd.grad(outputs.loss, [weight], create_graph=True, allow_unused=True)
    return 0.0 if gradient is None else 100 * gradient.square().sum()


def noise_of_own():
    draw = torch.Generator().manual_seed(1)

    def disturb(module, args, output):
        return output * (1 + 0.1 * torch.randn(output.shape, generator=draw))

    return Code(
        model=lambda model: [layer.mlp.act_fn.register_forward_hook(disturb) for layer in decoder_layers(model)]
    )


def two_passes(*scales):
    """The same batch in two states of the model; `None` is that of an evaluation."""
    now = [1.0]

    def put(model):
        for layer in decoder_layers(model):
            layer.self_attn.register_forward_hook(scale)

    def scale(module, args, output):
        return (output[0] * (now[0] if module.training else 0.5), *output[1:])

    def compute_loss(trainer, own, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, training = 0.0, model.training
        for wanted in scales:
            model.train(wanted is not None)
            now[0] = now[0] if wanted is None else wanted
            outputs = model(**inputs)
            loss = loss + outputs.loss
        model.train(training)
        return (loss, outputs) if return_outputs else loss

    return Code(model=put, methods={"compute_loss": compute_loss}, options=SGD)


def scales_adapters():
    def compute_loss(trainer, own, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = 0.0
        for scaling in (1.0, 3.0):
            for module in having(model, "lora_A"):
                module.scaling["default"] = scaling
            outputs = model(**inputs)
            loss = loss + outputs.loss
        return (loss, outputs) if return_outputs else loss

    return Code(methods={"compute_loss": compute_loss})


def has_teacher(event):
    """A copy of the model as it was."""
    teachers = []

    def distil(trainer, model, inputs, outputs):
        with torch.no_grad():
            target = teachers[0](**inputs).logits
        return (outputs.logits - target).square().mean()

    def copy_it(model):
        teachers.append(copy.deepcopy(model).requires_grad_(False))

    if event is None:
        return loss_of(distil, made=lambda trainer: copy_it(trainer.model))
    return loss_of(distil, at={event: copy_it})


def drops_layer_of_step():
    """Stochastic depth."""
    dropped = [0]

    def put(model):
        for number, layer in enumerate(decoder_layers(model)):
            layer.register_forward_hook(
                lambda module, args, output, number=number: args[0] if dropped[0] == number else None
            )

    def draw(state):
        dropped[0] = state.global_step % 4

    return Code(model=put, at={"on_step_begin": draw})


def drops_layers_by_chance():
    draw = random.Random(0)

    def put(model):
        for layer in decoder_layers(model):
            layer.register_forward_hook(lambda module, args, output: args[0] if draw.random() < 0.4 else None)

    return Code(model=put)


def keeps_running_mean():
    def put(model):
        for layer in decoder_layers(model):
            layer.mlp.register_buffer("running", torch.zeros(32), persistent=False)
            layer.mlp.register_forward_hook(centre)

    def centre(module, args, output):
        module.running.lerp_(output.detach().float().mean((0, 1)), 0.1)
        return output - module.running

    def note(model):
        notes_of(model).extend(layer.mlp.running.clone() for layer in decoder_layers(model))

    return Code(model=put, at={"on_step_end": note})


# An optimizer.


def adamw_with(change):
    def make(model):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        change(optimizer, model)
        return optimizer

    return lambda: Code(optimizer=make)


def wraps_step(optimizer, model):
    step = optimizer.step

    @functools.wraps(step)
    def clipped(*args, **kwargs):
        clip_gradients(model)
        return step(*args, **kwargs)

    optimizer.step = clipped


def states_of(optimizer):
    """The moments of what the optimizer holds."""
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [optimizer.state[parameter] for parameter in params if parameter in optimizer.state]


def resets_states(optimizer):
    """As ReLoRA does."""
    for values in states_of(optimizer):
        values["exp_avg"].zero_()
        values["exp_avg_sq"].zero_()


def damps_states(optimizer):
    for values in states_of(optimizer):
        values["exp_avg"].mul_(0.1)


def damps_states_of_model(model, optimizer):
    for parameter in model.parameters():
        if parameter.requires_grad:
            optimizer.state[parameter]["exp_avg"].mul_(0.1)


notes_states = notes(lambda optimizer: (values["exp_avg"].norm() for values in states_of(optimizer)))
notes_state_dict = notes(
    lambda optimizer: (values["exp_avg"].norm() for _, values in sorted(optimizer.state_dict()["state"].items()))
)


def loads_states():
    kept = []

    def step_end(state, optimizer):
        if state.global_step == 1:
            kept.append(copy.deepcopy(optimizer.state_dict()))
        if state.global_step == 2:
            optimizer.load_state_dict(kept[0])

    return Code(at={"on_step_end": step_end})


def sets_rate(state, optimizer):
    for group in optimizer.param_groups:
        group["lr"] = 0.001 if state.global_step % 2 else 0.05


def sets_decay(state, optimizer):
    for group in optimizer.param_groups:
        group["weight_decay"] = 5.0 * state.global_step


def freeze(*numbers):
    def change(model):
        for number in numbers:
            decoder_layers(model)[number].requires_grad_(False)

    return change


def unfreezes(model):
    decoder_layers(model)[1].requires_grad_(True)


def all_in_groups():
    return Code(
        model=freeze(0, 1),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        at={"on_step_end": in_step(1, unfreezes)},
    )


def lisa():
    draw = random.Random(0)

    def choose(model):
        layers = decoder_layers(model)
        chosen = draw.sample(range(len(layers)), 2)
        for number, layer in enumerate(layers):
            layer.requires_grad_(number in chosen)

    return Code(at={"on_step_begin": choose})


# What is read.


def norms(model):
    return (parameter.detach().float().norm() for parameter in model.parameters())


notes_norms = notes(norms)
notes_histograms = notes(lambda model: (p.detach().float().histc(10, -0.1, 0.1) for p in model.parameters()))
notes_arrays = notes(lambda model: (torch.tensor(float(abs(p.detach().numpy()).sum())) for p in model.parameters()))
notes_spectra = notes(lambda model: (torch.linalg.matrix_norm(w.weight.detach(), 2) for w in up_projections(model)))


def norms_of_state(module):
    return [value.float().norm() for _, value in sorted(module.state_dict().items())]


notes_state = notes(lambda model: norms_of_state(model))
notes_state_of_layers = notes(lambda model: sum(map(norms_of_state, decoder_layers(model)), []))


def notes_distance():
    start = {}
    note = notes(lambda model: ((p.detach() - start[name]).norm() for name, p in model.named_parameters()))
    return Code(at={"on_train_begin": lambda model: start.update(copied(model)), "on_step_end": note})


def notes_after_save(trainer, own, *args, **kwargs):
    own(*args, **kwargs)
    notes_of(trainer.model).extend(norms(trainer.model))


def notes_in_loss(trainer, model, inputs, outputs):
    with torch.no_grad():
        notes_of(model).extend(norms(model))
    return 0.0


def averages():
    """An exponential average of the weights."""
    shadow = {}

    def step_end(model):
        for name, parameter in model.named_parameters():
            shadow[name].lerp_(parameter.detach(), 0.5)

    begin, end = lambda model: shadow.update(copied(model)), notes(lambda: shadow.values())
    return shadow, {"on_train_begin": begin, "on_step_end": step_end, "on_train_end": end}


def swap(model, shadow):
    for name, parameter in model.named_parameters():
        kept = parameter.data.clone()
        parameter.data.copy_(shadow[name])
        shadow[name] = kept


def swaps_average_when_evaluated():
    shadow, events = averages()

    def evaluated(model):
        swap(model, shadow)
        ids = torch.arange(5, 15)[None]
        with torch.no_grad():
            notes_of(model).append(model(input_ids=ids, labels=ids).loss)
        swap(model, shadow)

    return Code(at={**events, "on_evaluate": evaluated}, options=EVALUATES)


def evaluates_average():
    shadow, events = averages()

    def evaluate(trainer, own, *args, **kwargs):
        swap(trainer.model, shadow)
        metrics = own(*args, **kwargs)
        swap(trainer.model, shadow)
        notes_of(trainer).append(metrics["eval_loss"])
        return metrics

    return Code(at=events, methods={"evaluate": evaluate}, options=EVALUATES)


def averaged_by_torch(loads):
    averaged = []

    def end(model):
        notes_of(model).extend(copied(averaged[0].module).values())
        if loads:
            model.load_state_dict(averaged[0].module.state_dict())

    begin = lambda model: averaged.append(AveragedModel(model))  # noqa: E731
    step_end = lambda model: averaged[0].update_parameters(model)  # noqa: E731
    return Code(at={"on_train_begin": begin, "on_step_end": step_end, "on_train_end": end})


def reads_in_hook(of):
    """By step and layer: a pass may be computed again."""
    norms = {}

    def put(trainer):
        for number, layer in enumerate(decoder_layers(trainer.model)):
            of(layer).register_forward_hook(functools.partial(read, trainer, number, layer))

    def read(trainer, number, layer, module, args, output):
        norms[trainer.state.global_step, number] = layer.mlp.up_proj.weight.detach().float().norm()

    return Code(made=put, at={"on_train_end": notes(lambda: (value for _, value in sorted(norms.items())))})


def reads_other_layer():
    def put(trainer):
        first, second = decoder_layers(trainer.model)[:2]
        second.register_forward_hook(
            lambda module, args, output: output * first.mlp.up_proj.weight.detach().float().norm()
        )

    return Code(made=put)


def notes_saved(model):
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        (file,) = Path(folder).glob("*.safetensors")
        notes_of(model).extend(value.float().norm() for _, value in sorted(load_file(file).items()))


def generates(model):
    ids = torch.tensor([[5, 6, 7]])
    notes_of(model).append(model.generate(ids, max_new_tokens=4, do_sample=False))


def evaluates():
    def put(trainer):
        evaluate = lambda: notes_of(trainer).append(trainer.evaluate()["eval_loss"])  # noqa: E731
        trainer.add_callback(user_code.callback("on_step_end", evaluate))

    return Code(made=put)


# Adapters.


def generates_merged(model):
    model.merge_adapter()
    generates(model)
    model.unmerge_adapter()


def merges(model):
    model.merge_adapter()
    notes_of(model).extend(norms(model))
    model.unmerge_adapter()


def adds_weighted(model):
    model.add_weighted_adapter(["default"], [0.5], "mixed", combination_type="linear")
    model.set_adapter("default")


def notes_adapters(model):
    from peft import get_peft_model_state_dict

    notes_of(model).extend(value.norm() for _, value in sorted(get_peft_model_state_dict(model).items()))


def relora(model, optimizer):
    """Merges adapters into their base for good, and begins them anew."""
    torch.manual_seed(3)
    model.merge_adapter()
    for module in having(model, "merged_adapters"):
        module.merged_adapters.clear()
    on("lora_A", functools.partial(nn.init.normal_, std=0.1))(model)
    on("lora_B", nn.init.zeros_)(model)
    optimizer.state.clear()


def step(change, **more):
    return lambda: Code(methods={"training_step": change}, **more)


def user_step(name, **more):
    return lambda: Code(methods={"training_step": user_code.STEPS[name]}, **more)


def user_callback(name, **more):
    event, change = user_code.CALLBACKS[name]
    return at(event, change, **more)


KINDS = {
    "nothing": Code,
    # Weights.
    "assigned before": lambda: Code(made=lambda trainer: assigns(trainer.model)),
    "assigned between trainings": lambda: Code(drive=assigns_start),
    "assigned at step end": at("on_step_end", on(".mlp.", assigns_half)),
    "assigned at step begin": at("on_step_begin", on(".mlp.", assigns_half)),
    "halved in place": at("on_step_end", on(".mlp.", halves_in_place)),
    "data halved in place": at("on_step_end", on(".mlp.", halves_data_in_place)),
    "clamped in place": at("on_step_end", on("", clamps)),
    "pruned": at("on_step_end", in_step(2, prunes)),
    "loaded at step end": loads_start,
    "best loaded at train end": loads_best,
    "halved at train end": at("on_train_end", on(".mlp.", halves_in_place)),
    "converted to bf16": lambda: Code(made=lambda trainer: trainer.model.to(torch.bfloat16)),
    "converted to fp64": lambda: Code(made=lambda trainer: trainer.model.double()),
    "converted to fp16": lambda: Code(made=lambda trainer: trainer.model.half(), options=SGD | {"learning_rate": 0.01}),
    "shifted around a step": step(shifts),
    "shifted in place around a step": step(shifts_in_place),
    "SAM": user_step("sharpness"),
    "FGM": user_step("twice"),
    "shrunk after a step": user_step("shrinks after"),
    "by a vector": at("on_step_end", by_vector),
    "doubled for a look": at("on_step_end", looks_at_doubled),
    "Lookahead": looks_ahead,
    "shared by two layers": before(ties_two_layers, options=SGD),
    "layers swapped": at("on_step_end", in_step(1, swaps_layers)),
    "activation replaced": at("on_step_end", in_step(1, replaces_activation)),
    "parameter replaced": at("on_step_end", in_step(1, replaces_parameter)),
    "parameters made before": lambda: Code(made=lambda trainer: makes_parameters(trainer.model)),
    "parameters made at train begin": at("on_train_begin", makes_parameters),
    "begun anew": at("on_step_end", in_step(1, begins_anew)),
    "layer copied": at("on_step_end", in_step(1, copies_layer)),
    "model copied afterwards": lambda: Code(drive=copies_afterwards),
    "weight norm": before(on_projections(parametrizations.weight_norm)),
    "weight norm of the trainer's model": lambda: Code(
        made=lambda trainer: on_projections(parametrizations.weight_norm)(trainer.model)
    ),
    "weight norm by a hook": before(on_projections(weight_norm)),
    "spectral norm": before(on_projections(parametrizations.spectral_norm)),
    "rounded in the pass": before(on_projections(rounds)),
    "rounded from the second step": at("on_step_end", in_step(1, on_projections(rounds))),
    # Gradients.
    "flipped before the update": at("on_pre_optimizer_step", on("layers.1.", flips), options=SGD),
    "flipped after a step": step(user_code.behind(on("layers.1.", flips)), options=SGD),
    "clipped by layer": lambda: Code(methods={"_clip_grad_norm": clips_by_layer}, options=SGD),
    "clipped by value": user_callback("clips before the update", options=SGD),
    "clipped after a step": user_step("clips gradients", options=SGD),
    "clipped between": user_callback("clips between", options=SGD),
    "noted between": user_callback("notes gradients between"),
    "noted before the update": at("on_pre_optimizer_step", notes_gradients),
    "noted after the update": at("on_optimizer_step", notes_gradients),
    "signs": at("on_pre_optimizer_step", with_gradients(lambda gradient: gradient.sign() * 0.001), options=SGD),
    "centralised": at("on_pre_optimizer_step", with_gradients(centralises), options=SGD),
    "noise": adds_noise,
    "dropped": at("on_pre_optimizer_step", on("layers.1.", lambda parameter: setattr(parameter, "grad", None))),
    "hook before": before(user_code.HOOKS["gradients clamped"], options=SGD),
    "hook in a run": at("on_train_begin", user_code.HOOKS["gradients clamped"], options=SGD),
    "accumulated hook before": before(user_code.halved_after_accumulation, options=SGD),
    "accumulated hook in a run": at("on_train_begin", user_code.halved_after_accumulation, options=SGD),
    "backward hook of a layer": before(user_code.HOOKS["gradient of a layer"], options=SGD),
    "detached": before(user_code.HOOKS["detaches"]),
    "updated at once": user_step("updates at once"),
    "updated between": user_callback("updates between"),
    "zeroed by the optimizer": at("on_pre_optimizer_step", in_step(1, lambda optimizer: optimizer.zero_grad())),
    "zeroed by the model": at("on_pre_optimizer_step", in_step(1, lambda model: model.zero_grad())),
    "zeroed after a step": step(user_code.behind(leaves_out)),
    "probed": at("on_step_end", probes),
    "probed and noted": at("on_step_end", probes_and_notes),
    "own backward counts": at("on_step_begin", own_backward, options=SGD),
    # A loss, and what a pass leaves or finds beside it.
    "square of all weights": lambda: loss_of(square_of_all),
    "one matrix": lambda: loss_of(one_matrix),
    "distance to the start": stays_near_start,
    "attentions": lambda: loss_of(of_attentions, config=EAGER, options=SGD),
    "hidden states": lambda: loss_of(of_hidden_states, options=SGD),
    "loss in attributes": lambda: loss_of(of_attributes, model=leaves_loss),
    "loss in a list": loss_in_a_list,
    "note of the batch": notes_batch,
    "gradient in the loss": lambda: loss_of(slope, config=EAGER),
    "noise of an own generator": noise_of_own,
    "two passes": lambda: Code(methods={"compute_loss": user_code.two_passes}, options=SGD),
    "two scales": lambda: two_passes(1.0, 3.0),
    "two modes": lambda: two_passes(1.0, None),
    "other weights": lambda: Code(methods={"compute_loss": passes_by_other_weights}),
    "adversary": lambda: Code(methods={"compute_loss": against_adversary}, options=SGD),
    "saliency": at("on_step_end", notes_saliency),
    "pass without gradients first": user_step("looks first"),
    "teacher before": lambda: has_teacher(None),
    "teacher in a run": lambda: has_teacher("on_train_begin"),
    "layer of the step dropped": drops_layer_of_step,
    "layers dropped by chance": drops_layers_by_chance,
    "running mean": keeps_running_mean,
    # An optimizer.
    "hook before its step": adamw_with(lambda opt, model: opt.register_step_pre_hook(lambda *_: clip_gradients(model))),
    "hook after its step": adamw_with(lambda opt, model: opt.register_step_post_hook(lambda *_: on("", clamps)(model))),
    "hook of the run's optimizer": user_callback("hook of the optimizer"),
    "step wrapped": adamw_with(wraps_step),
    "states reset": at("on_step_end", resets_states),
    "states damped": at("on_step_end", damps_states),
    "states cleared": at("on_step_end", lambda optimizer: optimizer.state.clear()),
    "states of the model's parameters": at("on_step_end", damps_states_of_model),
    "states noted": at("on_step_end", notes_states),
    "states saved": at("on_step_end", notes_state_dict),
    "states loaded": loads_states,
    "rate set before the update": at("on_pre_optimizer_step", sets_rate),
    "rate set between": at("on_substep_end", sets_rate),
    "rate set at step end": at("on_step_end", sets_rate),
    "decay set": at("on_step_begin", sets_decay),
    "clipping set": at("on_step_end", in_step(1, lambda args: setattr(args, "max_grad_norm", 0.05)), options=SGD),
    "unfrozen in a run": all_in_groups,
    "unfrozen before": lambda: Code(
        model=freeze(0, 1), made=lambda trainer: trainer.model.requires_grad_(True) and None
    ),
    "unfrozen, in no group": lambda: Code(
        model=freeze(1), at={"on_step_end": in_step(1, unfreezes)}, options=SGD | {"max_grad_norm": 0.05}
    ),
    "frozen in a run": at("on_step_end", in_step(1, freeze(2))),
    "frozen in turn": user_callback("freezes in turn"),
    "LISA": lisa,
    "accumulates longer from the next step": at("on_step_begin", user_code.sets_accumulation(4)),
    "accumulates longer": user_callback("accumulates longer"),
    "accumulates not": user_callback("accumulates not"),
    # What is read.
    **{
        f"read {when}": at(event, notes_norms)
        for when, event in {
            "at step end": "on_step_end", "at step begin": "on_step_begin", "between": "on_substep_end",
            "before the update": "on_pre_optimizer_step", "after the update": "on_optimizer_step",
            "at train end": "on_train_end",
        }.items()
    },
    "read when logged": at("on_log", notes_histograms),
    "read when evaluated": at("on_evaluate", notes_norms, options=EVALUATES),
    "read when saved": at("on_save", notes_norms, options={"save_strategy": "steps", "save_steps": 1}),
    "read after save_model": lambda: Code(
        methods={"save_model": notes_after_save}, options={"save_strategy": "steps", "save_steps": 1}
    ),
    "read in the loss": lambda: loss_of(notes_in_loss),
    "arrays": at("on_step_end", notes_arrays),
    "spectra": at("on_step_end", notes_spectra),
    "distance read": notes_distance,
    "average": lambda: Code(at=averages()[1]),
    "average swapped when evaluated": swaps_average_when_evaluated,
    "average evaluated": evaluates_average,
    "averaged by torch": lambda: averaged_by_torch(loads=False),
    "averaged by torch and loaded": lambda: averaged_by_torch(loads=True),
    "read in a hook of a layer": lambda: reads_in_hook(lambda layer: layer),
    "read in a hook inside a layer": lambda: reads_in_hook(lambda layer: layer.mlp),
    "read in another layer's hook": reads_other_layer,
    "state_dict of layers": at("on_step_end", notes_state_of_layers),
    "state_dict": at("on_step_end", notes_state),
    "save_pretrained": at("on_step_end", notes_saved),
    "generate": at("on_step_end", generates),
    "evaluate": evaluates,
    # Adapters.
    "two scales of adapters": scales_adapters,
    "merged and unmerged": user_callback("merges and unmerges"),
    "read while merged": at("on_step_end", merges),
    "generates while merged": at("on_step_end", generates_merged),
    "set_scale": user_callback("set_scale"),
    "scaling": user_callback("scaling"),
    "adapter of a layer disabled": user_callback("disables a layer"),
    "new matrices": user_callback("new matrices"),
    "weighted adapter added": at("on_step_end", in_step(1, adds_weighted)),
    "adapter switched": user_callback("switches adapter"),
    "adapters noted": at("on_step_end", notes_adapters),
    "ReLoRA": at("on_step_end", in_step(1, relora)),
    "near the base": lambda: Code(methods={"compute_loss": user_code.near_base}),
}  # fmt: skip
"""What makes a user's code anew for a training."""
HARMLESS = {
    "nothing",
    "parameters made before",
    "pass without gradients first",
    "probed",
    "unfrozen before",
    "merged and unmerged",
}
"""What leaves weights and losses as they are without it, and records nothing."""
