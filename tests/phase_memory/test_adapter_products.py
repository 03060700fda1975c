"""LoRA in fewer kernels beside PEFT's forward: what is computed, in how many calls, and which layers keep PEFT's."""

import pytest
import torch
from conftest import ByteText, assert_same_weights, losses, tiny_model, weights
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from rig import trainers
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.skips.adapters import kernels_per_layer, llama, micro_batch, part_for, tokens
from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.compat import checkpointing_option
from hf_hybrid.part import Step
from hf_hybrid.phase_memory.adapter_products import AdapterProducts, plain_lora_layers
from hf_hybrid.run.run import Run

TEXT = ByteText(200)


def lora(model=None, **options):
    """Adapters whose `B` are not zero, over fp32 weights."""
    model = get_peft_model(
        tiny_model() if model is None else model, LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", **options)
    )
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model


def build(folder, kind=HybridTrainer, config=HybridConfig, *, model=None, **options):
    values = {"max_steps": 6, "bf16": True, "gradient_accumulation_steps": 2, **options}
    return trainers.build(folder, kind, config, model=model or lora(), train_dataset=TEXT, **values)


def train(*args, resume=None, **options):
    trainer = build(*args, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def part_of(trainer):
    return next((part for part in trainer.parts if isinstance(part, AdapterProducts)), None)


def moved(model):
    """What was trained, as one vector."""
    return torch.cat([p.detach().float().flatten() for p in model.parameters() if p.requires_grad])


class Twin(nn.Module):
    """A LoRA layer written plainly: the operands in bf16, the arithmetic in fp32, one rounding for each result."""

    def __init__(self, module):
        super().__init__()
        (name,) = module.active_adapters
        self.weight, self.scaling = module.base_layer.weight, module.scaling[name]
        self.a, self.b = module.lora_A[name].weight, module.lora_B[name].weight

    def forward(self, x):
        def rounded(tensor):
            return tensor.bfloat16().float()

        x = rounded(x)
        hidden = rounded(x @ rounded(self.a).t())
        base = rounded(x @ rounded(self.weight).t())
        return rounded(base + hidden @ rounded(self.scaling * self.b).t())


def test_a_layer_is_its_plain_twin():
    module = plain_lora_layers(llama(1, 64))[0]
    part, x = AdapterProducts([module], torch.bfloat16), torch.randn(2, 5, 64, requires_grad=True)
    twin, gradient = Twin(module), torch.randn(2, 5, 64)
    (want := twin(x)).backward(gradient)
    expected = [x.grad, twin.a.grad, twin.b.grad]
    x.grad = twin.a.grad = twin.b.grad = None
    part.begin(Run(model=module))
    part.begin_step(Step(0))
    part.before_forward(None)
    with torch.autocast("cpu", torch.bfloat16):
        got = module(x)
    got.backward(gradient.bfloat16())
    part.after_backward(None)
    assert got.dtype == torch.bfloat16 and torch.allclose(got.float(), want, rtol=2**-8, atol=2**-8)
    for ours, reference in zip((x.grad, twin.a.grad, twin.b.grad), expected, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - reference).norm() < 0.01 * reference.norm()


def test_a_layer_takes_less_than_half_of_pefts_kernels():
    assert kernels_per_layer(part_for) < 0.5 * kernels_per_layer()


def test_layers_that_read_the_same_input_multiply_it_once():
    part = part_for(llama(2, 64))
    names = [[layer.module.base_layer.out_features for layer in group.layers] for group in groups(part)]
    assert sorted(names) == 2 * [[64]] + 2 * [[64]] + 2 * [[64, 32, 32]] + 2 * [[256, 256]]


def groups(part):
    return part._groups


@pytest.mark.parametrize(
    "options", [{}, {checkpointing_option(): True}, {"max_grad_norm": 0.05}], ids=["stored", "recomputed", "clipped"]
)
def test_a_training_is_pefts_up_to_rounding(options, tmp_path):
    """Nearer to a training in fp32 than the distance of PEFT's, and a tenth; losses agree to three digits."""
    options = {"optim": "sgd", "learning_rate": 1.0, **options}
    exact = train(tmp_path / "exact", Trainer, TrainingArguments, **{**options, "bf16": False})
    peft = train(tmp_path / "peft", Trainer, TrainingArguments, **options)
    ours = train(tmp_path / "ours", **options)
    assert len(part_of(ours).layers) == 14 and not groups(part_of(ours)), "given back"
    far = [(moved(trainer.model) - moved(exact.model)).norm() for trainer in (peft, ours)]
    assert far[1] < 1.1 * far[0] < 0.1 * (moved(exact.model) - moved(lora())).norm()
    assert losses(ours) == pytest.approx(losses(peft), rel=2e-3)


@pytest.mark.parametrize("walk", ["layer", "micro_batch"])
def test_over_a_streamed_base_a_training_has_the_same_bits(walk, tmp_path):
    """A walk by layer computes all micro-batches before the weights get their gradients: they add up in fp32."""
    options = {"gradient_accumulation_steps": 3, "max_steps": 3}
    wide = [lora(tiny_model(hidden_size=128, intermediate_size=256)) for _ in range(2)]  # small beside their base
    resident = train(tmp_path, model=wide[0], **options)
    streamed = train(tmp_path, model=wide[1], memory="stream", accumulation_walk=walk, **options)
    assert part_of(streamed) is not None and streamed.memory.streams
    plan, weights_of_adapters = streamed.memory.plan, len(moved(streamed.model))
    planned = plan.table.get("buffers", "device") - plan.shape.buffer_bytes
    assert planned == (2 + 4) * weights_of_adapters, "copies, and their gradients"
    assert torch.equal(moved(streamed.model), moved(resident.model))


def test_a_run_resumes_to_the_same_bits(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 3}
    whole = train(tmp_path / "whole", **options)
    assert len(part_of(whole).layers) == 14
    resumed = train(tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-3"), **options)
    assert_same_weights(weights(whole.model), weights(resumed.model))


def test_other_trainable_weights_train_beside_them(tmp_path):
    """`modules_to_save` gets gradients from autograd itself."""
    options = {"optim": "sgd", "learning_rate": 0.5}
    peft = train(tmp_path / "peft", Trainer, TrainingArguments, model=lora(modules_to_save=["lm_head"]), **options)
    ours = train(tmp_path / "ours", model=lora(modules_to_save=["lm_head"]), **options)
    assert part_of(ours) is not None
    assert (moved(ours.model) - moved(peft.model)).norm() < 2e-3 * moved(peft.model).norm()


class Looks(TrainerCallback):
    def on_step_end(self, args, state, control, model, **kwargs):
        self.patched = [m for m in model.modules() if isinstance(m, LoraLayer) and "forward" in vars(m)]
        with torch.no_grad():
            self.logits = model(input_ids=TEXT[0]["input_ids"][None]).logits
            with model.disable_adapter():
                self.without = model(input_ids=TEXT[0]["input_ids"][None]).logits


def test_between_micro_batches_the_model_is_pefts(tmp_path):
    looks = Looks()
    trainer = train(tmp_path, callbacks=[looks])
    assert part_of(trainer) is not None and not looks.patched
    assert not torch.equal(looks.logits, looks.without)
    with torch.no_grad():
        assert torch.equal(looks.logits, trainer.model(input_ids=TEXT[0]["input_ids"][None]).logits)


def test_inside_of_a_micro_batch_other_forwards_are_pefts():
    """The reference of DPO without adapters, another adapter, and what computes without autocast."""
    model = llama(1, 64)
    part, ids = part_for(model), tokens(8)

    def passes():
        with torch.no_grad():
            found = [model(ids).logits]  # not under autocast
            with torch.autocast("cpu", torch.bfloat16), model.disable_adapter():
                found.append(model(ids).logits)
            return found

    want = passes()
    part.begin_step(Step(0))
    part.before_forward(None)
    assert all(map(torch.equal, passes(), want))
    part.after_backward(None)


def test_gradients_of_an_aborted_micro_batch_are_dropped():
    model = llama(1, 64)
    part = part_for(model)
    micro_batch(model, tokens(16), part)
    want = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    part.before_forward(None)
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=tokens(32), labels=tokens(32)).loss.backward()
    model.zero_grad()  # out of memory: the micro-batch is computed again, and the gradients of this one are not
    micro_batch(model, tokens(16), part)
    assert all(torch.equal(p.grad, want[name]) for name, p in model.named_parameters() if name in want)


@pytest.mark.parametrize("after", [0, 1])
def test_after_memory_ran_out_a_step_is_that_of_smaller_micro_batches(after, tmp_path):
    options = {"max_steps": 3, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.5}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    smaller = train(tmp_path / "smaller", **{**options, **sizes})
    trainer, seen = build(tmp_path / "big", **options), []

    def fails(gradient):
        """Memory runs out in the backward pass, between two layers."""
        seen.append(len(gradient))
        if len(gradient) > 2 and len(seen) > after:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def watch(layer, args, output):
        output = output[0] if isinstance(output, tuple) else output
        if output.requires_grad:
            output.register_hook(fails)

    trainer.model.get_base_model().model.layers[0].register_forward_hook(watch)
    trainer.train()
    assert max(seen) == 4 and trainer.hybrid_summary()["out_of_memory"] and part_of(trainer) is not None
    assert (moved(trainer.model) - moved(smaller.model)).norm() < 1e-3 * (moved(smaller.model) - moved(lora())).norm()


def test_a_run_that_fails_before_its_first_step_leaves_the_layers_alone(tmp_path):
    trainer = build(tmp_path, callbacks=[Refuses()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(Refuses)
    trainer.train()
    assert not any("forward" in vars(module) for module in trainer.model.modules() if isinstance(module, LoraLayer))


class Refuses(TrainerCallback):
    def on_train_begin(self, *args, **kwargs):
        raise KeyboardInterrupt


def two_adapters():
    model = lora()
    model.add_adapter("other", LoraConfig(r=4, target_modules="all-linear"))
    model.base_model.set_adapter(["default", "other"])
    return model


def hooked():
    model = lora()
    for module in plain_lora_layers(model):
        module.lora_A["default"].register_forward_hook(lambda *_: None)
    return model


def watched():
    """A hook keeps what a base layer returned, as activation capture does."""
    model = lora()
    for module in plain_lora_layers(model):
        module.base_layer.register_forward_hook(lambda *_: None)
    return model


def tied():
    """All layers use the `B` of the first of their size."""
    model, first = lora(), {}
    for module in plain_lora_layers(model):
        product = module.lora_B["default"]
        product.weight = first.setdefault(product.weight.shape, product.weight)
    return model


@pytest.mark.parametrize(
    "model, options",
    [
        (lambda: lora(lora_dropout=0.1), {}),
        (lambda: lora(use_dora=True), {}),
        (lambda: lora(lora_bias=True), {}),
        (two_adapters, {}),
        (hooked, {}),
        (tied, {}),
        (watched, {}),
        (tiny_model, {}),
        (lora, {"bf16": False}),
        (lora, {"enable_predict": False}),
        (lora, {"share_rows": "off"}),
        (lora, {"memory": "stream"}),
    ],
    ids=[
        "dropout", "dora", "bias", "two adapters", "hooks", "tied", "kept outputs", "no adapters", "fp32", "switch",
        "Trainer's rows", "adapters that travel with their base",
    ],
)  # fmt: skip
def test_where_pefts_forward_stays(model, options, tmp_path):
    assert part_of(build(tmp_path, model=model(), **options)) is None


def test_adapters_over_4_bits_are_plain():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = tiny_model()
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj"):
            linear = getattr(layer.mlp, name)
            four = bitsandbytes.nn.Linear4bit(32, 64, bias=False, compute_dtype=torch.bfloat16)
            four.load_state_dict({"weight": linear.weight.data})
            setattr(layer.mlp, name, four.to("cpu"))
    model.is_loaded_in_4bit = True
    adapted = lora(model)
    kinds = [type(module).__name__ for module in plain_lora_layers(adapted)]
    assert kinds.count("Linear4bit") == 4 and kinds.count("Linear") == 10
    want = llama_gradients(adapted)
    got = llama_gradients(adapted, part_for(adapted))
    assert all((got[name] - want[name]).norm() < 0.05 * want[name].norm() for name in want)


def llama_gradients(model, part=None):
    model.zero_grad()
    micro_batch(model, tokens(16), part)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
