"""
What people write around a trainer: functions that change a batch, a loss, a step, a model, or what they read of it.

They know nothing of this package and hold for Trainer and for TRL's trainers. `run/crossings.py` puts them in their
places. A change with a state is made anew for each training, so all of them are made by calls.
"""

import functools
import inspect

import torch
from torch import nn
from transformers import TrainerCallback

IGNORED = -100


def by_name(*functions):
    return {function.__name__.replace("_", " "): function for function in functions}


def call(change, **given):
    """Call a function with those of the arguments that it names."""
    return change(*(given[name] for name in inspect.signature(change).parameters))


def notes_of(trainer_or_model):
    return vars(trainer_or_model).setdefault("users_notes", [])


def calls_of(trainer_or_model):
    """Count the calls of a user's code."""
    own = vars(trainer_or_model)
    own["users_calls"] = own.get("users_calls", 0) + 1
    return own["users_calls"]


# A batch.


def tokens_of(inputs):
    """Return the name of what a model reads, and that of what says which of it is learned."""
    ids = "completion_ids" if "completion_ids" in inputs else "input_ids"
    return ids, "labels" if "labels" in inputs and inputs["labels"].dim() == 2 else "completion_mask"


def masks_labels(inputs):
    ids, learned = tokens_of(inputs)
    even = inputs[ids] % 2 == 0
    return {**inputs, learned: inputs[learned].masked_fill(even, IGNORED if learned == "labels" else 0)}


def masks_labels_in_place(inputs):
    ids, learned = tokens_of(inputs)
    inputs[learned].masked_fill_(inputs[ids] % 2 == 0, IGNORED if learned == "labels" else 0)
    return inputs


def masks_labels_of_the_dict(inputs):
    inputs.update(masks_labels(inputs))
    return inputs


def masks_labels_by_numpy(inputs):
    """torch does not count this change."""
    ids, learned = tokens_of(inputs)
    inputs[learned].numpy()[inputs[ids].numpy() % 2 == 0] = IGNORED if learned == "labels" else 0
    return inputs


def replaces_tokens(inputs):
    ids, _ = tokens_of(inputs)
    return {**inputs, ids: inputs[ids].masked_fill(inputs[ids] % 7 == 3, 9)}


def replaces_tokens_in_place(inputs):
    ids, _ = tokens_of(inputs)
    inputs[ids].masked_fill_(inputs[ids] % 7 == 3, 9)
    return inputs


def hides_tokens(inputs):
    mask = inputs["attention_mask"].clone()
    mask[:, 1:4] = 0
    return {**inputs, "attention_mask": mask}


def hides_tokens_in_place(inputs):
    inputs["attention_mask"][:, 1:4] = 0
    return inputs


def keeps_one_row(inputs):
    return {name: value[:1] for name, value in inputs.items()}


def puts_padding_behind(inputs):
    fillers = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED, "completion_mask": 0}
    return {name: nn.functional.pad(value, (0, 3), value=fillers[name]) for name, value in inputs.items()}


def copies(inputs):
    return {name: value.clone() if torch.is_tensor(value) else value for name, value in inputs.items()}


def same(inputs):
    return inputs


def reverses_rows(inputs):
    return {name: value.flip(0) for name, value in inputs.items()}


def other_positions(inputs):
    ids = inputs["input_ids"]
    return {**inputs, "position_ids": torch.arange(ids.shape[1]).expand_as(ids) * 2}


def doubles_advantages(inputs):
    return {**inputs, "advantages": inputs["advantages"] * 2} if "advantages" in inputs else inputs


def with_key(**values):
    return lambda inputs: {**inputs, **values}


BATCHES = {
    **by_name(
        masks_labels, masks_labels_in_place, masks_labels_of_the_dict, masks_labels_by_numpy, replaces_tokens,
        replaces_tokens_in_place, hides_tokens, hides_tokens_in_place, keeps_one_row, other_positions,
        doubles_advantages, same, copies, puts_padding_behind, reverses_rows,
    ),
    "number without dimensions": with_key(loss_scale=torch.tensor(3.0)),
    "float": with_key(loss_scale=3.0),
    "list": with_key(loss_scale=[3.0, 3.0]),
    "number for each row": with_key(loss_scale=torch.full((2,), 3.0)),
    "word": with_key(task="b"),
    "None": with_key(loss_scale=None),
}  # fmt: skip
"""Functions of a batch. The keys are for the model of [`reads_keys`]."""


def reads_keys(kind):
    """Return a model's class whose loss is multiplied by what a batch has beside its rows."""

    class ReadsKeysForCausalLM(kind):
        def forward(self, *args, loss_scale=None, task="a", **kwargs):
            outputs = super().forward(*args, **kwargs)
            if outputs.loss is not None and (loss_scale is not None or task == "b"):
                scale = 1.0 if loss_scale is None else torch.as_tensor(loss_scale).mean()
                outputs.loss = outputs.loss * scale * (2.0 if task == "b" else 1.0)
            return outputs

    return ReadsKeysForCausalLM


# A loss: functions of the loss and the model.


def scales(loss, model):
    return loss * 3


def penalty(loss, model):
    return loss + 0.01 * sum(parameter.square().sum() for parameter in model.parameters() if parameter.requires_grad)


def state(loss, model):
    return loss / calls_of(model)


def focal(loss, model):
    return loss * loss.detach().clamp(max=2.0)


LOSSES = by_name(scales, penalty, state, focal)

# A method: functions of the trainer, the method below, and its arguments.


def subclass(kind, name, change):
    def method(self, *args, **kwargs):
        return change(self, functools.partial(getattr(super(made, self), name)), *args, **kwargs)

    made = type("OfTheUser", (kind,), {name: method})
    return made


# A step: functions of the trainer, the method below, and its arguments.


def table(model):
    return next(parameter for parameter in model.parameters() if parameter.requires_grad)


def twice(trainer, own, model, inputs, *args, **kwargs):
    """Adversarial training as in FGM."""
    loss, weight = own(model, inputs, *args, **kwargs), table(model)
    before = weight.data.clone()
    moved = weight.data if weight.grad is None else weight.grad
    weight.data.add_(moved / (moved.norm() + 1e-9))
    own(model, inputs, *args, **kwargs)
    weight.data.copy_(before)
    return loss


def sharpness(trainer, own, model, inputs, *args, **kwargs):
    """SAM: only the gradients at the moved weights count."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [(p, p.data.clone(), None if p.grad is None else p.grad.clone()) for p in trained]
    own(model, inputs, *args, **kwargs)
    for parameter, _, gradient in before:
        if parameter.grad is not None:
            parameter.data.add_(0.1 * parameter.grad / (parameter.grad.norm() + 1e-9))
        parameter.grad = gradient
    loss = own(model, inputs, *args, **kwargs)
    for parameter, data, _ in before:
        parameter.data.copy_(data)
    return loss


def each_gradient(change):
    def changed(model):
        for parameter in model.parameters():
            if parameter.grad is not None:
                change(parameter.grad)

    return changed


clip_gradients = each_gradient(lambda gradient: gradient.clamp_(-1e-3, 1e-3))


def behind(change):
    """A step that ends with a change, which names what it needs of trainer, model and loss."""

    def step(trainer, own, model, inputs, *args, **kwargs):
        loss = own(model, inputs, *args, **kwargs)
        call(change, trainer=trainer, model=model, loss=loss)
        return loss

    return step


def halves(trainer, own, model, inputs, *args, **kwargs):
    parts = [{name: value[n : n + 1] for name, value in inputs.items()} for n in range(len(inputs["input_ids"]))]
    return sum(own(model, part, *args, **kwargs) for part in parts)


def replays(trainer, own, model, inputs, *args, **kwargs):
    kept = vars(trainer).setdefault("users_batches", [])
    kept.append({name: value.clone() for name, value in inputs.items()})
    if len(kept) > 1:
        own(model, kept[-2], *args, **kwargs)
    return own(model, inputs, *args, **kwargs)


def skips(trainer, own, model, inputs, *args, **kwargs):
    return torch.zeros(()) if calls_of(trainer) % 4 == 2 else own(model, inputs, *args, **kwargs)


def other_count(trainer, own, model, inputs, num_items_in_batch=None):
    return own(model, inputs, num_items_in_batch if num_items_in_batch is None else num_items_in_batch * 2)


def logs_double(trainer, own, model, inputs, *args, **kwargs):
    return own(model, inputs, *args, **kwargs) * 2


def step_optimizer(optimizer, model):
    getattr(optimizer, "optimizer", optimizer).step()  # accelerate's waits for the end of a window
    model.zero_grad()


def syncs(trainer, own, model, inputs, *args, **kwargs):
    """What `accelerator.accumulate` does at the end of a window, in the middle of it."""
    before = trainer.accelerator.sync_gradients
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    loss = own(model, inputs, *args, **kwargs)
    trainer.accelerator.gradient_state._set_sync_gradients(before)
    return loss


@torch.no_grad()
def shrinks_table(model):
    table(model).mul_(0.99)


def freezes_by_turns(trainer, own, model, inputs, *args, **kwargs):
    weight = table(model)
    weight.requires_grad_(calls_of(trainer) % 2 == 0)
    loss = own(model, inputs, *args, **kwargs)
    weight.requires_grad_(True)
    return loss


def own_step(trainer, own, model, inputs, num_items_in_batch=None):
    """As in many repositories: Trainer's step written anew."""
    model.train()
    inputs = trainer._prepare_inputs(inputs)
    with trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
    if num_items_in_batch is None or not trainer.model_accepts_loss_kwargs:
        loss = loss / trainer.current_gradient_accumulation_steps
    trainer.accelerator.backward(loss)
    if hasattr(trainer, "_step"):  # which GRPO counts there
        trainer._step += 1
    return loss.detach()


def own_mean(trainer, own, model, inputs, num_items_in_batch=None):
    """A step that asks the model itself."""
    model.train()
    with trainer.compute_loss_context_manager():
        loss = model(**trainer._prepare_inputs(inputs)).loss / trainer.args.gradient_accumulation_steps
    trainer.accelerator.backward(loss)
    return loss.detach()


def looks_first(trainer, own, model, inputs, *args, **kwargs):
    with torch.no_grad():
        model(**{name: inputs[name] for name in ("input_ids", "attention_mask")})
    return own(model, inputs, *args, **kwargs)


def norm_of_gradients(model):
    return sum(p.grad.float().square().sum().item() for p in model.parameters() if p.grad is not None) ** 0.5


def nothing(trainer, own, model, inputs, *args, **kwargs):
    return own(model, inputs, *args, **kwargs)


def by_place(trainer, own, model, inputs, *args):
    return own(model, masks_labels(inputs), *args)


def notes_inputs(trainer, own, model, inputs, *args, **kwargs):
    if isinstance(inputs, dict):
        ids, learned = tokens_of(inputs)
        notes_of(trainer).extend((inputs[ids].sum().item(), inputs[learned].sum().item(), *inputs[ids].shape))
    return own(model, inputs, *args, **kwargs)


STEPS = {
    "clips gradients": behind(clip_gradients),
    "doubles gradients": behind(each_gradient(lambda gradient: gradient.mul_(2))),
    "noise": behind(each_gradient(lambda gradient: gradient.add_(0.1 * torch.randn_like(gradient)))),
    "updates at once": behind(lambda trainer, model: step_optimizer(trainer.optimizer, model)),  # inside a window
    "shrinks after": behind(shrinks_table),
    "notes losses": behind(lambda trainer, loss: notes_of(trainer).append(loss.item())),
    "notes gradients": behind(lambda trainer, model: notes_of(trainer).append(norm_of_gradients(model))),
    **by_name(
        twice, sharpness, replays, skips, other_count, logs_double, freezes_by_turns, by_place, own_step, own_mean,
        looks_first, halves, syncs, nothing, notes_inputs,
    ),
}  # fmt: skip

# A loss from the arguments of `compute_loss`.


def two_passes(trainer, own, model, inputs, *args, **kwargs):
    """The mean of two passes, one of them with other tokens, as R-Drop has."""
    return (own(model, inputs, *args, **kwargs) + own(model, replaces_tokens(inputs), *args, **kwargs)) / 2


def own_cross_entropy(trainer, own, model, inputs, return_outputs=False, num_items_in_batch=None):
    labels = inputs["labels"]
    outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
    loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return (loss, outputs) if return_outputs else loss


def reads_logits(trainer, own, model, inputs, return_outputs=False, num_items_in_batch=None):
    loss, outputs = own(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
    logits = outputs["logits"] if isinstance(outputs, dict) and "logits" in outputs else outputs.logits
    loss = loss + 0.01 * logits.float().square().mean()
    return (loss, outputs) if return_outputs else loss


def near_base(trainer, own, model, inputs, *args, **kwargs):
    """Stay near the base of adapters."""
    loss = own(model, inputs, *args, **kwargs)
    alone = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad(), model.disable_adapter():
        base = model(**alone).logits.float()
    return loss + (model(**alone).logits.float() - base).square().mean()


WHOLE_LOSSES = by_name(two_passes, reads_logits, near_base) | {"own cross-entropy": own_cross_entropy}

# Windows: what `get_batch_samples` returns.

WINDOWS = {
    "turns the window": lambda batches, items: (batches[::-1], items),
    "other count of the window": lambda batches, items: (batches, items if items is None else items * 2),
    "first batch twice": lambda batches, items: ([batches[0]] * len(batches), items),
    "a tuple": lambda batches, items: (tuple(batches), items),
}

# What other methods return, and what is done around them.


def other_items(trainer, own, *args):
    items = own(*args)
    return items if items is None else items * 2


def clips_by_value(trainer, own, model):
    clip_gradients(model)
    return own(model)


def doubles_the_loss(trainer, own, loss, **kwargs):
    own(loss * 2, **kwargs)


def clips_behind_it(trainer, own, loss, **kwargs):
    own(loss, **kwargs)
    clip_gradients(trainer.model)


def praises_every_second(trainer, own, *args, **kwargs):
    rewards = own(*args, **kwargs).clone()
    rewards[::2] += 1
    return rewards


def doubles_what_it_scored(trainer, own, *args, **kwargs):
    return doubles_advantages(own(*args, **kwargs))


def halves_them(trainer, own, *args, **kwargs):
    log_probabilities, *others = own(*args, **kwargs)
    return (log_probabilities * 0.5, *others)


OTHERS = by_name(
    other_items, clips_by_value, doubles_the_loss, clips_behind_it, praises_every_second, doubles_what_it_scored,
    halves_them,
)  # fmt: skip

# Callbacks: functions of what they name of options, state, model and optimizer.


def in_step(number, change):
    """Make a change once, when so many steps are made."""

    def changed(args, state, model, optimizer):
        if state.global_step == number:
            call(change, args=args, state=state, model=model, optimizer=optimizer)

    return changed


def named(model, part):
    return [parameter for name, parameter in model.named_parameters() if part in name]


def having(model, name):
    return [module for module in model.modules() if hasattr(module, name)]


def freezes_in_turn(state, model):
    parts = ("lora_A", "lora_B") if named(model, "lora_A") else ("layers.0.", "layers.1.")
    for turn, part in enumerate(parts):
        for parameter in named(model, part):
            parameter.requires_grad_(state.global_step % 2 == turn)


def shrinks(model):
    with torch.no_grad():
        for parameter in named(model, "lora_B") or named(model, "layers.0."):
            parameter.mul_(0.5)


def updates(model, optimizer):
    step_optimizer(optimizer, model)


def sets_accumulation(count):
    return in_step(1, lambda args: setattr(args, "gradient_accumulation_steps", count))


def sets_scaling(state, model):
    for module in having(model, "lora_A"):
        module.scaling["default"] = 2.0 / (1 + state.global_step)


def calls_set_scale(model):
    for module in having(model, "set_scale"):
        module.set_scale("default", 0.25)


def switches_adapter(model):
    if "other" not in model.peft_config:
        torch.manual_seed(3)
        model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("other")


def merges_and_unmerges(model):
    model.merge_adapter()
    model.unmerge_adapter()


def disables_a_layer(model):
    having(model, "lora_A")[0].enable_adapters(False)


def new_matrices(model):
    torch.manual_seed(3)
    for module in having(model, "lora_A"):
        old = module.lora_A["default"].weight
        module.lora_A["default"].weight = nn.Parameter(torch.randn_like(old) * 0.1)


def sets_router(state, model):
    model.router_aux_loss_coef = 1.0 * state.global_step


def turns_router_on(state, model):
    model.config.output_router_logits = state.global_step >= 1


def puts_dropout(model):
    for module in having(model, "lora_dropout"):
        module.lora_dropout["default"] = nn.Dropout(0.5)


def sets_dropout(model):
    for layer in decoder_layers(model):
        layer.self_attn.attention_dropout = 0.5


def pauses_learning(state, optimizer):
    for group in optimizer.param_groups:
        group["lr"] = 0.0 if state.global_step == 1 else 0.01


def new_data(model):
    torch.manual_seed(3)
    for parameter in named(model, "lora_A") or named(model, "layers.0."):
        parameter.data = torch.randn_like(parameter) * 0.1


def generates(model):
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)


def looks(model):
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7, 8]]))


def notes_norm(model):
    notes_of(model).append(norm_of_gradients(model))


def hooks_optimizer(model, optimizer):
    getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(lambda *of_step: clip_gradients(model))


CALLBACKS = {
    "freezes in turn": ("on_step_begin", freezes_in_turn),
    "freezes in turn at the end": ("on_step_end", freezes_in_turn),
    "shrinks weights": ("on_step_begin", shrinks),
    "shrinks weights at the end": ("on_step_end", shrinks),
    "shrinks weights between": ("on_substep_end", shrinks),
    "clips between": ("on_substep_end", clip_gradients),
    "clips before the update": ("on_pre_optimizer_step", clip_gradients),
    "updates between": ("on_substep_end", updates),
    "accumulates longer": ("on_step_end", sets_accumulation(4)),
    "accumulates not": ("on_step_end", sets_accumulation(1)),
    "scaling": ("on_step_begin", sets_scaling),
    "set_scale": ("on_step_end", in_step(1, calls_set_scale)),
    "switches adapter": ("on_step_end", in_step(1, switches_adapter)),
    "disables a layer": ("on_step_end", in_step(1, disables_a_layer)),
    "new matrices": ("on_step_end", in_step(1, new_matrices)),
    "puts a hook": ("on_step_end", in_step(1, lambda model: of_mlp(model, halved))),
    "router's weight": ("on_step_begin", sets_router),
    "router's loss": ("on_step_begin", turns_router_on),
    "pauses learning": ("on_step_begin", pauses_learning),
    "hook of the optimizer": ("on_train_begin", hooks_optimizer),
    "new data": ("on_step_end", in_step(1, new_data)),
    "notes gradients between": ("on_substep_end", notes_norm),
    "notes gradients": ("on_pre_optimizer_step", notes_norm),
    "generates between": ("on_substep_end", generates),
    "generates": ("on_step_begin", generates),
    "looks between": ("on_substep_end", looks),
    "merges and unmerges": ("on_step_end", merges_and_unmerges),
    "nothing between": ("on_substep_end", lambda: None),
    "attention's dropout": ("on_step_end", in_step(1, sets_dropout)),
    "adapters' dropout": ("on_step_end", in_step(1, puts_dropout)),
}
"""Events, and what is done there."""


def callback(event, change):
    """Return a callback that does this at an event."""

    def at(self, args, state, control, model=None, optimizer=None, **kwargs):
        call(change, args=args, state=state, model=model, optimizer=optimizer)

    return type("OfTheUser", (TrainerCallback,), {event: at})()


# Hooks: functions of the model.


def decoder_layers(model):
    return next(module for name, module in model.named_modules() if name.endswith("layers"))


def hook_output(module, change):
    module.register_forward_hook(lambda module, inputs, output: change(output))


def of_mlp(model, change):
    hook_output(decoder_layers(model)[0].mlp, change)


def on_parameters(change):
    def put(model):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(change)

    return put


def halved_after_accumulation(model):
    def halve(parameter):
        parameter.grad.mul_(0.5)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(halve)


def by_column(output):
    return output * torch.linspace(0.5, 1.5, output.shape[1])[:, None].to(output.dtype)


def less_mean(output):
    return output - output.mean(1, keepdim=True)


def halved(output):
    return output * 0.5


def input_of_a_layer(model):
    decoder_layers(model)[0].mlp.register_forward_pre_hook(lambda module, args: (args[0] * 0.5, *args[1:]))


def gradient_of_a_layer(model):
    decoder_layers(model)[0].mlp.register_full_backward_hook(lambda module, gin, gout: (gin[0] * 0.5, *gin[1:]))


def output_of_adapters(model):
    for module in having(model, "lora_B"):
        hook_output(module.lora_B["default"], lambda output: output * 3)


def no_gradient_of_b(model):
    for parameter in named(model, "lora_B"):
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient * 0)


def detached(output):
    return output.detach() if torch.is_tensor(output) else (output[0].detach(), *output[1:])


HOOKS = {
    "gradients halved": on_parameters(halved),
    "gradients clamped": on_parameters(lambda gradient: gradient.clamp(-1e-3, 1e-3)),
    "output of a layer": lambda model: of_mlp(model, halved),
    "output by column": lambda model: of_mlp(model, by_column),
    "output less its mean": lambda model: of_mlp(model, less_mean),
    "no gradient of B": no_gradient_of_b,
    "reads a layer": lambda model: of_mlp(model, lambda output: None),
    "output of the head": lambda model: hook_output(model.get_output_embeddings(), halved),
    "output of the embeddings": lambda model: hook_output(model.get_input_embeddings(), lambda output: output * 1.5),
    "output of attention": lambda model: hook_output(
        decoder_layers(model)[0].self_attn, lambda output: (output[0] * 0.5, *output[1:])
    ),
    "detaches": lambda model: hook_output(decoder_layers(model)[0], detached),
    **by_name(halved_after_accumulation, input_of_a_layer, gradient_of_a_layer, output_of_adapters),
}
HARMLESS = {
    "same", "copies", "puts padding behind", "reverses rows", "None", "own step", "halves", "syncs", "nothing",
    "looks first", "notes inputs", "notes losses", "notes gradients", "turns the window", "a tuple", "nothing between",
    "notes gradients between", "generates between", "generates", "looks between", "merges and unmerges",
    "reads a layer",
}  # fmt: skip
"""What leaves weights and losses as they are without it."""
