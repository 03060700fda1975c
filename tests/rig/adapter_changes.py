"""What a callback may change about adapters in a run: functions of the model, which may return what undoes it."""

import functools

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from transformers import TrainerCallback


def layers(model):
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def products(model, kind="lora_B"):
    return [getattr(layer, kind)["default"] for layer in layers(model)]


def freeze(kind):
    def change(model):
        for product in products(model, kind):
            product.weight.requires_grad_(False)
        return lambda: [product.weight.requires_grad_(True) for product in products(model, kind)]

    return change


def freeze_one(model):
    products(model)[1].weight.requires_grad_(False)
    return lambda: products(model)[1].weight.requires_grad_(True)


def hooked(register, of=products):
    def change(model):
        handles = [register(part) for part in of(model)]
        return lambda: [handle.remove() for handle in handles]

    return change


def halve(weight):
    weight.grad.mul_(0.5)


def accumulated(product):
    return product.weight.register_post_accumulate_grad_hook(halve)


def behind(factor):
    return lambda part: part.register_forward_hook(lambda module, inputs, output: output * factor)


def before(part):
    return part.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))


def backward(part):
    return part.register_full_backward_hook(lambda module, given, wanted: (given[0] * 0.5,))


def bases(model):
    return [layer.base_layer for layer in layers(model)]


def dropouts(model):
    return products(model, "lora_dropout")


def everywhere(model):
    """A hook on all modules of the process."""
    chosen = set(products(model))
    return register_module_forward_hook(lambda module, inputs, output: output * 2 if module in chosen else None).remove


@torch.no_grad()
def shrink(model):
    for product in products(model):
        product.weight.mul_(0.5)


def shrink_data(model):
    for product in products(model):
        product.weight.data.mul_(0.5)


def assign_data(model):
    for product in products(model):
        product.weight.data = product.weight.data * 0.5


def lower_rank(model):
    for layer in layers(model):
        layer.lora_A["default"].weight.data = layer.lora_A["default"].weight.data[:2].clone()
        layer.lora_B["default"].weight.data = layer.lora_B["default"].weight.data[:, :2].clone()
        layer.lora_A["default"].weight.grad = layer.lora_B["default"].weight.grad = None


def new_weights(model):
    for product in products(model, "lora_A"):
        product.weight = nn.Parameter(product.weight.detach() * 0.5)


def new_modules(model):
    for layer in layers(model):
        old = layer.lora_B["default"]
        layer.lora_B["default"] = nn.Linear(old.in_features, old.out_features, bias=False)
        layer.lora_B["default"].weight = old.weight
        layer.lora_B["default"].register_forward_hook(lambda module, inputs, output: output * 2)


def new_base(model):
    for layer in layers(model):
        base = nn.Linear(layer.in_features, layer.out_features, bias=False)
        base.weight = nn.Parameter(layer.base_layer.weight.detach() * 0.5, requires_grad=False)
        layer.base_layer = base


class Halved(nn.Module):
    def forward(self, x):
        return x * 0.5


def drop(model):
    """As a module with dropout, but every run draws the same."""
    for layer in layers(model):
        layer.lora_dropout["default"] = Halved()


def scale(model):
    for layer in layers(model):
        layer.set_scale("default", 3.0)
    return lambda: [layer.set_scale("default", 1.0) for layer in layers(model)]


def merge(model):
    for layer in layers(model)[:2]:
        layer.merge()
    return lambda: [layer.unmerge() for layer in layers(model)[:2]]


def disable(model):
    for layer in layers(model)[:2]:
        layer.enable_adapters(False)
    return lambda: [layer.enable_adapters(True) for layer in layers(model)[:2]]


def switch(model):
    torch.manual_seed(5)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    model.set_adapter("other")
    return lambda: model.set_adapter("default")


def two_at_once(model):
    undo = switch(model)
    model.base_model.set_adapter(["default", "other"])
    return undo


def bias(model):
    for product in products(model):
        product.bias = nn.Parameter(torch.full((product.out_features,), 0.1), requires_grad=False)


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def parametrized(model):
    for product in products(model):
        parametrize.register_parametrization(product, "weight", Doubled())


def replaced(of):
    def change(model):
        for part in of(model):
            part.forward = functools.partial(doubled, part.forward)
        return lambda: [vars(part).pop("forward", None) for part in of(model)]

    return change


def doubled(forward, *args):
    return forward(*args) * 2


def tied(model):
    first = products(model, "lora_A")[0]
    for layer in layers(model):
        if layer.in_features == first.in_features:
            layer.lora_A["default"].weight = first.weight


CHANGES = {
    "A frozen": freeze("lora_A"),
    "B frozen": freeze("lora_B"),
    "one frozen": freeze_one,
    "gradient hooks": hooked(lambda product: product.weight.register_hook(lambda gradient: gradient * 0)),
    "hooks behind gradients": hooked(accumulated),
    "hooks behind A": hooked(behind(2), functools.partial(products, kind="lora_A")),
    "hooks behind B": hooked(behind(2)),
    "hooks before B": hooked(before),
    "hooks backward": hooked(backward),
    "hooks behind the base": hooked(behind(0), bases),
    "hooks before the base": hooked(before, bases),
    "hooks behind dropout": hooked(behind(2), dropouts),
    "hooks behind layers": hooked(behind(0.5), layers),
    "a hook on all modules": everywhere,
    "weights": shrink,
    "weights, data": shrink_data,
    "weights, assigned": assign_data,
    "rank": lower_rank,
    "new weights": new_weights,
    "new modules": new_modules,
    "new base": new_base,
    "dropout": drop,
    "scale": scale,
    "merged": merge,
    "disabled": disable,
    "another": switch,
    "two": two_at_once,
    "bias": bias,
    "parametrized": parametrized,
    "forward of B": replaced(products),
    "forward of layers": replaced(layers),
    "forward of the base": replaced(bases),
    "tied": tied,
}


class Changes(TrainerCallback):
    """Does the change in the second step, and undoes what can be undone in the fourth."""

    def __init__(self, when, change):
        self.change, self.calls = change, 0
        setattr(self, when, self.event)

    def event(self, args, state, control, model=None, **kwargs):
        self.calls += 1
        if self.calls == 2:
            self.undo = self.change(model)
        elif self.calls == 4 and self.undo:
            self.undo()
            self.undo = None
