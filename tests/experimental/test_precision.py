"""Precision by phase: what is read, what it comes to, and that working copies change no bit under autocast."""

import functools
import sys

import pytest
import torch
from conftest import ByteText, assert_same_weights, hybrid_config, losses, tiny_model, weights
from rig import trainers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hf_hybrid import HybridTrainer
from hf_hybrid.experimental.precision import PhaseMemory, held_precision, layer_linears, parse_precision, resolve
from hf_hybrid.leaps.probe import SequenceLosses
from hf_hybrid.part import Part, Phase
from hf_hybrid.run.run import Run

pytestmark = pytest.mark.slow


def by_phase(warmup, full, predict, correct):
    return {Phase.WARMUP: warmup, Phase.FULL: full, Phase.PREDICT: predict, Phase.CORRECT: correct}


@pytest.mark.parametrize(
    "text, expected",
    [
        ("auto", by_phase("auto", "auto", "auto", "auto")),
        ("bf16", by_phase("bf16", "bf16", "bf16", "bf16")),
        ("full=bf16,correct=fp32,predict=int8", by_phase("auto", "bf16", "int8", "fp32")),
        (" BF16, predict = Int8 ", by_phase("bf16", "bf16", "int8", "bf16")),
    ],
)
def test_reads_what_people_write(text, expected):
    assert parse_precision(text) == expected


@pytest.mark.parametrize(
    "text, message",
    [
        *(
            (text, f"`{text}` must be a precision .*auto, fp32, fp16, bf16, int8, int8_bitsandbytes.*`full=bf16`")
            for text in ("bfloat16", "ful=bf16", "full=xyz", "predict=int8_bnb", "")
        ),
        ("int8", "`int8` in `weight_precision=int8` is for forward-only probes: write `predict=int8`"),
        ("full=int8", "write `predict=int8`"),
        ("full=bf16,full=fp32", "`full=fp32` must .*each phase has one"),
        ("bf16,fp32", "`fp32` must .*each phase has one"),
    ],
)
def test_refuses_what_it_cannot_read(text, message):
    with pytest.raises(ValueError, match=message):
        parse_precision(text)


@pytest.mark.parametrize(
    "text, situation, expected",
    [
        ("auto", {"weights": "fp32"}, by_phase(*4 * ["fp32"])),
        ("auto", {"weights": "bf16"}, by_phase(*4 * ["bf16"])),
        ("auto", {"weights": "fp32", "autocast": "bf16"}, by_phase(*4 * ["fp32"])),
        ("bf16", {"weights": "bf16"}, by_phase(*4 * ["bf16"])),
        ("bf16", {"weights": "fp32", "autocast": "bf16"}, by_phase(*4 * ["bf16"])),
        ("predict=int8", {"weights": "fp32"}, by_phase("fp32", "fp32", "int8", "fp32")),
        ("predict=int8", {"weights": "bf16"}, by_phase("bf16", "bf16", "int8", "bf16")),
        ("predict=fp16", {"weights": "fp32"}, by_phase("fp32", "fp32", "fp16", "fp32")),
    ],
)
def test_resolves(text, situation, expected):
    assert resolve(parse_precision(text), **situation) == expected


@pytest.mark.parametrize(
    "text, situation, message",
    [
        ("full=bf16", {"weights": "fp32"}, r"`full=bf16` needs autocast .*it is off. Set `bf16=True`"),
        ("predict=fp16", {"weights": "fp32", "autocast": "bf16"}, "it is on with bf16. .* ask for `predict=auto`"),
        ("correct=fp32", {"weights": "bf16"}, r"found: bf16. Load the model with `dtype=torch.float32`"),
    ],
)
def test_refuses_what_the_run_cannot_give(text, situation, message):
    with pytest.raises(ValueError, match=message):
        resolve(parse_precision(text), **situation)


def test_int8_needs_linear_layers():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=8))
    with pytest.raises(ValueError, match="`weight_precision`: `predict=int8` rounds the `nn.Linear` modules"):
        PhaseMemory("predict=int8").check(model)


def test_int8_needs_torch_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    PhaseMemory("predict=int8").check(tiny_model())


def test_one_part_does_what_is_asked_for_and_none_where_nothing_is(tmp_path):
    def parts(**options):
        trainer = HybridTrainer(tiny_model(), hybrid_config(tmp_path, **options), train_dataset=ByteText(40))
        return [part for part in trainer.parts if isinstance(part, PhaseMemory)]

    assert parts() == []
    (part,) = parts(weight_precision="full=bf16,predict=int8", predict_states="host", bf16=True)
    assert part.int8 and part.predict_states == "host" and part.autocast == "bf16"
    with pytest.raises(ValueError, match="`full=bf16` needs autocast"):
        parts(weight_precision="full=bf16")


def test_held_precision():
    model = tiny_model()
    assert held_precision(model) == "fp32"
    model.model.layers[0].to(torch.bfloat16)
    assert held_precision(model) == "bf16 and fp32"
    assert held_precision(torch.nn.Linear(2, 2)) == "none"
    assert set(PhaseMemory().check(model).values()) == {"bf16 and fp32"}
    with pytest.raises(ValueError, match="found: bf16 and fp32"):
        PhaseMemory("bf16", autocast="bf16").check(model)


def computing_dtype(module):
    """Of the weight that a module computes with."""
    forward = vars(module).get("forward")
    return module.weight.dtype if forward is None else forward.args[0].dtype


class Spy(Part):
    """Inside the window: notes what the modules hold when a pass begins, and what the optimizer finds after it."""

    def __init__(self):
        self.inside = []

    def begin(self, run):
        self.model, self.linears = run.model, layer_linears(run.model)
        self.masters = dict(run.model.named_parameters())

    def dtypes(self):
        return {computing_dtype(module) for module in self.linears}

    def before_forward(self, phase):
        self.inside.append((phase, self.dtypes()))

    def before_probe(self):
        self.inside.append((Phase.PREDICT, self.dtypes()))

    def on_phase_change(self, old, new):
        self.check_outside()

    def check_outside(self):
        assert all(self.masters[name] is p and p.dtype == torch.float32 for name, p in self.model.named_parameters())
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in self.model.parameters())


def train(folder, *plugins, model=None, **overrides):
    values = {"bf16": True, "gradient_accumulation_steps": 2, "max_steps": 6, **overrides}
    return trainers.train(folder, model=model, probe_dataset=ByteText(40, offset=400), parts=plugins, **values)


def lora_model():
    peft = pytest.importorskip("peft")
    torch.manual_seed(7)
    return peft.get_peft_model(
        tiny_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    )


def shared_model():
    model = tiny_model()
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    return model


CASES = {
    "accumulation": {},
    "single": {"gradient_accumulation_steps": 1},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "lora": {},
    "shared": {},
    "biases": {},
}
MODELS = {"lora": lora_model, "shared": shared_model, "biases": lambda: tiny_model(attention_bias=True, mlp_bias=True)}


@pytest.mark.parametrize("case", CASES)
def test_bf16_copies_change_no_bit_of_a_bf16_run(case, tmp_path):
    make, spy = MODELS.get(case, tiny_model), Spy()
    plain = train(tmp_path / "plain", model=make(), **CASES[case])
    plugin = PhaseMemory("bf16", autocast="bf16")
    copies = train(tmp_path / "copies", plugin, spy, model=make(), **CASES[case])
    assert losses(copies) == losses(plain) and len(losses(plain)) == 6
    assert_same_weights(weights(copies.model), weights(plain.model))
    assert len(spy.inside) >= 6 and all(dtypes == {torch.bfloat16} for _, dtypes in spy.inside)
    spy.check_outside()


def test_bf16_copies_in_warmup_are_plain_trainer(tmp_path):
    values = {"bf16": True, "gradient_accumulation_steps": 2, "max_steps": 6}
    plain = trainers.train(tmp_path / "plain", Trainer, TrainingArguments, **values)
    plugin = PhaseMemory("bf16", autocast="bf16")
    hybrid = train(tmp_path / "hybrid", plugin, warmup_phase_steps=6)
    assert losses(hybrid) == losses(plain)
    assert_same_weights(weights(hybrid.model), weights(plain.model))


def test_each_phase_has_its_own_precision(tmp_path):
    spy = Spy()
    plugin = PhaseMemory("full=bf16,correct=fp32,predict=bf16", autocast="bf16")
    train(tmp_path, plugin, spy, max_steps=40, probe_budget=0.5, save_strategy="steps", save_steps=10)
    expected = by_phase({torch.float32}, {torch.bfloat16}, {torch.bfloat16}, {torch.float32})
    assert {phase for phase, _ in spy.inside} == set(Phase)
    assert all(dtypes == expected[phase] for phase, dtypes in spy.inside)


def test_saved_and_evaluated_are_the_masters(tmp_path):
    plugin = PhaseMemory("bf16", autocast="bf16")
    trainer = train(tmp_path, plugin)
    trainer.run = Run([plugin], model=trainer.model, optimizer=None, max_steps=1)
    plugin.begin(trainer.run)
    before = weights(trainer.model)
    plugin.before_forward(Phase.FULL)
    assert computing_dtype(trainer.model.model.layers[0].mlp.up_proj) == torch.bfloat16
    trainer.save_model(tmp_path / "broken_off")  # as after a forward pass that ran out of memory
    saved = type(trainer.model).from_pretrained(tmp_path / "broken_off")
    assert_same_weights(weights(trainer.model), before)
    assert_same_weights(weights(saved), before)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_probes_without_autocast(tmp_path, precision):
    model = tiny_model()
    trainer = HybridTrainer(model, hybrid_config(tmp_path), train_dataset=ByteText(100))
    plugin, spy, before = PhaseMemory(f"predict={precision}"), Spy(), weights(model)
    for part in (plugin, spy):
        part.begin(Run(model=model, optimizer=None, max_steps=1))
    batch = trainer.data_collator([ByteText(4)[i] for i in range(4)])
    full = SequenceLosses(trainer)(batch)
    trainer.run = Run([plugin, spy])
    half = SequenceLosses(trainer)(batch)
    assert half != full and half.values == pytest.approx(full.values, rel=1e-2)
    assert spy.inside == [(Phase.PREDICT, {torch.bfloat16 if precision == "bf16" else torch.float16})]
    assert not torch.is_autocast_enabled("cpu")
    spy.check_outside()
    assert_same_weights(weights(model), before)


def test_fp16_gradients_add_up_in_fp32_on_the_masters():
    model = tiny_model()
    plugin = PhaseMemory("full=fp16", autocast="fp16")
    plugin.begin(Run(model=model, optimizer=None, max_steps=1))
    batches = [ByteText(8)[i]["input_ids"][None] for i in range(3)]

    def gradients(*, copies):
        model.zero_grad()
        for batch in batches:
            if copies:
                plugin.before_forward(Phase.FULL)
            with torch.autocast("cpu", torch.float16):
                loss = model(input_ids=batch, labels=batch).loss
            (loss * 128).backward()
            if copies:
                plugin.after_backward(Phase.FULL)
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    plain = gradients(copies=False)
    assert_same_weights(gradients(copies=True), plain)
    assert all(gradient.dtype == torch.float32 for gradient in plain.values())


def test_failure_half_way_restores(monkeypatch):
    model = tiny_model()
    plugin = PhaseMemory("bf16", autocast="bf16")
    plugin.begin(Run(model=model, optimizer=None, max_steps=1))
    calls = []

    def failing(weight, dtype):
        calls.append(weight)
        if len(calls) > 3:
            raise torch.OutOfMemoryError("no")
        return weight.detach().to(torch.bfloat16)

    for module in layer_linears(model):
        monkeypatch.setattr(module.weight, "to", functools.partial(failing, module.weight), raising=False)
    with pytest.raises(torch.OutOfMemoryError):
        plugin.before_forward(Phase.FULL)
    assert len(calls) == 4 and not any("forward" in vars(module) for module in model.modules())


def test_a_forward_that_a_user_put_there_stays():
    model = tiny_model()
    plugin, ids = PhaseMemory("bf16", autocast="bf16"), ByteText(8)[0]["input_ids"][None]
    plugin.begin(Run(model=model, optimizer=None, max_steps=1))
    changed, *others = layer_linears(model)
    changed.forward = lambda rows: rows.new_zeros(*rows.shape[:-1], changed.out_features)
    plugin.before_forward(Phase.FULL)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(input_ids=ids).logits
    plugin.after_backward(Phase.FULL)
    assert "forward" in vars(changed) and not any("forward" in vars(module) for module in others)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found, model(input_ids=ids).logits)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    context = Run(model=tiny_model(), optimizer=None, max_steps=1)
    PhaseMemory("predict=bf16").begin(context)
    with pytest.raises(ValueError, match="`warmup=bf16` works in one process only"):
        PhaseMemory("bf16", autocast="bf16").begin(context)
