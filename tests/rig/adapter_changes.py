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


def products_of_a(model):
    return products(model, "lora_A")


def bases(model):
    return [layer.base_layer for layer in layers(model)]


def dropouts(model):
    return products(model, "lora_dropout")


def each(change, of=products, undo=None):
    """A change of all such parts, and what undoes it."""

    def changed(model):
        for part in of(model):
            change(part)
        return undo and (lambda: [undo(part) for part in of(model)])

    return changed


def freeze(product):
    product.weight.requires_grad_(False)


def unfreeze(product):
    product.weight.requires_grad_(True)


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


def everywhere(model):
    """A hook on all modules of the process."""
    chosen = set(products(model))
    return register_module_forward_hook(lambda module, inputs, output: output * 2 if module in chosen else None).remove


@torch.no_grad()
def shrink(product):
    product.weight.mul_(0.5)


def shrink_data(product):
    product.weight.data.mul_(0.5)


def assign_data(product):
    product.weight.data = product.weight.data * 0.5


def lower_rank(layer):
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    a.data, b.data, a.grad, b.grad = a.data[:2].clone(), b.data[:, :2].clone(), None, None


def new_weights(product):
    product.weight = nn.Parameter(product.weight.detach() * 0.5)


def new_modules(layer):
    old = layer.lora_B["default"]
    layer.lora_B["default"] = nn.Linear(old.in_features, old.out_features, bias=False)
    layer.lora_B["default"].weight = old.weight
    layer.lora_B["default"].register_forward_hook(lambda module, inputs, output: output * 2)


def new_base(layer):
    base = nn.Linear(layer.in_features, layer.out_features, bias=False)
    base.weight = nn.Parameter(layer.base_layer.weight.detach() * 0.5, requires_grad=False)
    layer.base_layer = base


class Halved(nn.Module):
    def forward(self, x):
        return x * 0.5


def drop(layer):
    """As a module with dropout, but every run draws the same."""
    layer.lora_dropout["default"] = Halved()


def two_layers(model):
    return layers(model)[:2]


def switch(model):
    torch.manual_seed(5)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    model.set_adapter("other")
    return lambda: model.set_adapter("default")


def two_at_once(model):
    undo = switch(model)
    model.base_model.set_adapter(["default", "other"])
    return undo


def bias(product):
    product.bias = nn.Parameter(torch.full((product.out_features,), 0.1), requires_grad=False)


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def parametrized(product):
    parametrize.register_parametrization(product, "weight", Doubled())


def replaced(of):
    return each(double_forward, of, lambda part: vars(part).pop("forward", None))


def double_forward(part):
    part.forward = functools.partial(doubled, part.forward)


def doubled(forward, *args):
    return forward(*args) * 2


def tied(model):
    first = products(model, "lora_A")[0]
    for layer in layers(model):
        if layer.in_features == first.in_features:
            layer.lora_A["default"].weight = first.weight


CHANGES = {
    "A frozen": each(freeze, products_of_a, unfreeze),
    "B frozen": each(freeze, undo=unfreeze),
    "one frozen": each(freeze, lambda model: products(model)[1:2], unfreeze),
    "gradient hooks": hooked(lambda product: product.weight.register_hook(lambda gradient: gradient * 0)),
    "hooks behind gradients": hooked(accumulated),
    "hooks behind A": hooked(behind(2), products_of_a),
    "hooks behind B": hooked(behind(2)),
    "hooks before B": hooked(before),
    "hooks backward": hooked(backward),
    "hooks behind the base": hooked(behind(0), bases),
    "hooks before the base": hooked(before, bases),
    "hooks behind dropout": hooked(behind(2), dropouts),
    "hooks behind layers": hooked(behind(0.5), layers),
    "a hook on all modules": everywhere,
    "weights": each(shrink),
    "weights, data": each(shrink_data),
    "weights, assigned": each(assign_data),
    "rank": each(lower_rank, layers),
    "new weights": each(new_weights, products_of_a),
    "new modules": each(new_modules, layers),
    "new base": each(new_base, layers),
    "dropout": each(drop, layers),
    "scale": each(lambda layer: layer.set_scale("default", 3.0), layers, lambda layer: layer.set_scale("default", 1.0)),
    "merged": each(lambda layer: layer.merge(), two_layers, lambda layer: layer.unmerge()),
    "disabled": each(lambda layer: layer.enable_adapters(False), two_layers, lambda layer: layer.enable_adapters(True)),
    "another": switch,
    "two": two_at_once,
    "bias": each(bias),
    "parametrized": each(parametrized),
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
