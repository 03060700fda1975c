"""Streamed training is plain training: equal to the last bit, with few layers on the device at a time."""

import gc
import itertools
import threading
import time

import pytest
import torch
from conftest import ByteText, assert_same_weights, config_values, hybrid_config, mostly_slow, tiny_model, weights
from rig.tiny_architectures import build_model, samples
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.compat import checkpointing_option
from hf_hybrid.plan.estimate import PlanError
from hf_hybrid.streaming import optimizer
from hf_hybrid.streaming.layers import NoLayerListError, find_layers
from hf_hybrid.streaming.streamer import LayerStreamer
from hf_hybrid.streaming.walk import CannotWalkError, LayerWalk, _MicroBatch

LAYERS = 4
OPTIONS = {
    "max_steps": 3,
    "gradient_accumulation_steps": 3,
    "weight_decay": 0.1,
    "max_grad_norm": 0.3,
    "warmup_steps": 1,
    "lr_scheduler_type": "cosine",
}
STREAMED = {"memory": "stream", "enable_predict": False}


BY_MICRO_BATCH = {"accumulation_walk": "micro_batch"}


def llama(**options):
    return tiny_model(**{"num_hidden_layers": LAYERS, **options})


def untied():
    return llama(tie_word_embeddings=False)


def steps(trainer):
    return [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]


def train_plain(folder, data, model=None, **overrides):
    model = llama() if model is None else model
    arguments = TrainingArguments(**config_values(folder, **{**OPTIONS, **overrides}))
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    return trainer


def make_streamed(folder, data, model=None, callbacks=(), device_map=None, **overrides):
    model = llama() if model is None else model
    decided = ("stream_embeddings", "prefetch_layers", "kept_graphs")
    plan_values = {name: overrides.pop(name) for name in decided if name in overrides}
    config = HybridConfig(**config_values(folder, **{**OPTIONS, **STREAMED, **overrides}))
    config.plan_values = plan_values
    return HybridTrainer(model, config, train_dataset=data, callbacks=list(callbacks), device_map=device_map)


def assert_same_run(streamed, plain):
    assert steps(streamed) == steps(plain)
    assert_same_weights(weights(streamed.model), weights(plain.model))


def same_as_trainer(folder, data, build=llama, *, plain=None, streamed=BY_MICRO_BATCH, **shared):
    """Train streamed and, unless `plain` has, with Trainer. Return the streamed trainer, if both runs are equal."""
    plain = train_plain(folder, data, build(), **shared) if plain is None else plain
    trainer = make_streamed(folder, data, build(), **streamed, **shared)
    trainer.train()
    assert_same_run(trainer, plain)
    return trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train_plain(tmp_path_factory.mktemp("plain"), ByteText(400))


def params_of(trainer):
    return [param for unit in trainer.memory.streamer.units for param in unit.storage.params]


def layer_passes(trainer):
    """Counts how often layers compute, again or for the first time, from the second step on: walks are compared."""
    counted = []

    class FromTheSecond(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                counted.clear()

    trainer.add_callback(FromTheSecond())
    for layer in trainer.model.get_decoder().layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: counted.append(module))
    return counted


# Equal to plain Trainer.


@pytest.mark.parametrize(
    "walk, ends, tied",
    mostly_slow(
        [*itertools.product(["micro_batch", "layer"], [None, True], [True, False])],
        [("micro_batch", None, False), ("micro_batch", True, True), ("layer", None, True), ("layer", True, False)],
    ),
)
@pytest.mark.long
def test_equal_to_trainer(walk, ends, tied, plain, tmp_path, train_set):
    build = llama if tied else untied
    if not tied:
        plain = train_plain(tmp_path, train_set, build())
    trainer = make_streamed(tmp_path, train_set, build(), accumulation_walk=walk, stream_embeddings=ends)
    trainer.train()
    assert len(trainer.memory.streamer.units) == LAYERS + (0 if ends is None else 1 if tied else 2)
    if walk == "layer" and tied:
        # Head and embeddings add up their gradients in another order: rounding, nothing else.
        torch.testing.assert_close(steps(trainer), steps(plain), rtol=1e-5, atol=0)
        return
    assert_same_run(trainer, plain)


@pytest.mark.parametrize(
    "options",
    [{"prefetch_layers": 0}, {"prefetch_layers": 3}, {"resident_layers": 2, "prefetch_layers": 10**9}],
    ids=str,
)
def test_prefetch_and_residency_change_no_number(options, plain, tmp_path, train_set):
    same_as_trainer(tmp_path, train_set, plain=plain, streamed=BY_MICRO_BATCH | options)


GRAPHS = [
    {"accumulation_walk": "layer"},
    {"accumulation_walk": "micro_batch"},
    {"accumulation_walk": "layer", "resident_layers": 2, "kept_graphs": 9},
    {"accumulation_walk": "micro_batch", "resident_layers": 2, "kept_graphs": 3, "prefetch_layers": 0},
    {"accumulation_walk": "layer", "max_grad_norm": 0.0, "out_of_memory": "raise", "optim": "adamw_torch"},
    {"accumulation_walk": "layer", "bf16": True},
    {"accumulation_walk": "layer", "kept_graphs": 100, "prefetch_layers": 3},
]


@pytest.mark.parametrize("options", mostly_slow(GRAPHS, GRAPHS[:5]), ids=str)
@pytest.mark.usefixtures("of_a_library")
def test_passes_that_keep_their_graphs_are_not_recomputed(options, tmp_path, train_set):
    """Slots are the next layers' in between, and residents' and others' gradients are those of Trainer."""
    options = {"kept_graphs": 5, **options}
    shared = {name: options[name] for name in ("max_grad_norm", "bf16", "optim") if name in options}
    plain = train_plain(tmp_path, train_set, untied(), **shared)
    trainer = make_streamed(tmp_path, train_set, untied(), **options)
    counted = layer_passes(trainer)
    trainer.train()
    in_flight = 3 if options["accumulation_walk"] == "layer" else 1
    graphs = min(options["kept_graphs"], LAYERS * in_flight)
    assert trainer.memory.statistics()["kept_graphs"] == graphs
    assert len(counted) == 2 * 3 * (2 * LAYERS - graphs / in_flight), "by step and micro-batch"
    assert_same_run(trainer, plain)


def adapted(kind="lora", targets=("q_proj",), base=llama):
    """A model with adapters of a kind."""
    peft = pytest.importorskip("peft")
    kinds = {
        "lora": lambda **names: peft.LoraConfig(r=4, init_lora_weights=False, **names),
        "ia3": lambda **names: peft.IA3Config(feedforward_modules=[], **names),
        "dora": lambda **names: peft.LoraConfig(r=4, use_dora=True, **names),
        "shira": lambda **names: peft.ShiraConfig(r=4, random_seed=0, **names),
    }
    torch.manual_seed(1)
    return peft.get_peft_model(base(), kinds[kind](target_modules=list(targets)))


def lora(base=llama):
    return adapted(targets=("q_proj", "v_proj"), base=base)


def wide():
    return llama(hidden_size=64)


@pytest.mark.parametrize(
    "walk, kind",
    mostly_slow(
        [*itertools.product(["micro_batch", "layer"], ["lora", "ia3", "dora", "shira", "int8"])],
        [("micro_batch", "int8"), ("layer", "dora")],
    ),
)
@pytest.mark.usefixtures("of_a_library")
def test_graphs_over_a_frozen_base(walk, kind, tmp_path, train_set):
    """The places of frozen weights too are found again, also where they are expanded from int8 or read by adapters."""
    own = {"accumulation_walk": walk, "base_precision": "int8" if kind == "int8" else "same"}

    def train(graphs):
        model = adapted("lora" if kind == "int8" else kind, base=wide)
        trainer = make_streamed(tmp_path, train_set, model, **own, kept_graphs=graphs)
        counted = layer_passes(trainer)
        trainer.train()
        return trainer, len(counted)

    (kept, passes), (recomputed, most) = train(5), train(0)
    assert passes < most
    assert_same_run(kept, recomputed)


def test_experts_that_travel_by_use_are_recomputed(tmp_path):
    """The router has to choose again, so that those of the pass are there."""
    model = build_model("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.experts.requires_grad_(False)
    trainer = make_streamed(tmp_path, samples(), model, kept_graphs=100)
    assert trainer.memory.statistics()["kept_graphs"] == 0


OTHERS = [
    *({"optim": name} for name in ("adamw_torch", "sgd", "adafactor", "rmsprop")),
    {"max_grad_norm": 0.0},
    {"attention_dropout": 0.2},  # drops the same when it is computed again
]


@pytest.mark.parametrize("options", mostly_slow(OTHERS, [OTHERS[2], *OTHERS[4:]]), ids=str)
def test_other_optimizers_no_clipping_and_dropout(options, tmp_path, train_set):
    options = dict(options)
    dropout = {"attention_dropout": options.pop("attention_dropout", 0.0)}
    same_as_trainer(tmp_path, train_set, lambda: llama(**dropout), **options)


IN_BACKWARD = {"max_grad_norm": 0.0, "out_of_memory": "raise"}


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 1},
        {"accumulation_walk": "micro_batch"},
        pytest.param({"stream_embeddings": True}, marks=pytest.mark.slow),
        {"bf16": True, "resident_layers": 1},
        {"optim": "muon", "gradient_accumulation_steps": 1},
        {"offload_activations": True, "prefetch_layers": 0},
    ],
    ids=str,
)
def test_layers_are_updated_in_the_backward_pass_where_nothing_is_clipped(options, tmp_path, train_set, monkeypatch):
    deferred, held = [], []
    real = optimizer.LazyOptimizer.update
    noting = lambda self, unit: (deferred.extend({unit} & self.pending.keys()), real(self, unit))  # noqa: E731
    monkeypatch.setattr(optimizer.LazyOptimizer, "update", noting)

    class Gradients(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            held.append([unit.name for unit in streamer.layers if any(p.gradient is not None for p in unit.trainable)])

    of_trainer = {name: options[name] for name in options if name in ("gradient_accumulation_steps", "bf16")}
    if "optim" in options:
        plain = make_streamed(tmp_path, train_set, untied(), memory="off", max_grad_norm=0.0, **options)
        plain.train()
    else:
        plain = train_plain(tmp_path, train_set, untied(), max_grad_norm=0.0, **of_trainer)
    trainer = make_streamed(tmp_path, train_set, untied(), [Gradients()], **IN_BACKWARD, **options)
    streamer = trainer.memory.streamer
    trainer.train()
    assert_same_run(trainer, plain)
    ends = [unit for unit in streamer.ends if options.get("stream_embeddings")]
    assert set(deferred) == set(ends), "only embeddings and head wait for the next forward pass"
    several_passes = options.get("accumulation_walk") == "micro_batch"
    assert len(held) == OPTIONS["max_steps"] and all(bool(names) == several_passes for names in held), (
        "gradients add up on the host"
    )


def test_a_layer_whose_calls_do_not_all_count_is_updated_before_its_next_forward(tmp_path, train_set):
    """The backward pass never comes to such a call, so nobody can say that the gradients are complete."""

    def build():
        model = llama()

        def call(*_):
            model.model.layers[1](torch.ones(1, 1, 32), position_embeddings=(torch.ones(1, 1, 16),) * 2)

        model.model.layers[2].register_forward_hook(call)
        return model

    own, options = {"out_of_memory": "raise"}, {"gradient_accumulation_steps": 1, "max_grad_norm": 0.0}
    same_as_trainer(tmp_path, train_set, build, streamed=own, **options)


@pytest.mark.usefixtures("of_a_library")
def test_weights_of_no_step_are_not_saved(tmp_path, train_set, caplog):
    """After a layer was updated in the backward pass: a save waits for the step, and after an error it is said."""

    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 4:
                model.model.layers[0].register_full_backward_hook(fail)

    def fail(*_):
        raise RuntimeError("planted")

    def save(*_):
        if trainer.state.global_step == 2:
            trainer._save_checkpoint(trainer.model, trial=None)
            assert not list(tmp_path.glob("checkpoint-*"))

    trainer = make_streamed(tmp_path, train_set, untied(), [Fails()], **IN_BACKWARD, max_steps=5)
    trainer.model.model.layers[0].register_full_backward_hook(save)
    with pytest.raises(RuntimeError, match="planted"), caplog.at_level("WARNING"):
        trainer.train()
    assert "of no step. Load the last checkpoint" in caplog.text
    (saved,) = tmp_path.glob("checkpoint-*")
    assert saved.name == "checkpoint-3"
    plain = train_plain(tmp_path / "plain", train_set, untied(), max_grad_norm=0.0, max_steps=5)
    resumed = make_streamed(tmp_path, train_set, untied(), **IN_BACKWARD, max_steps=5)
    resumed.train(resume_from_checkpoint=str(saved))
    assert_same_weights(weights(resumed.model), weights(plain.model))


def test_bf16_autocast(tmp_path, train_set):
    """Matrices travel rounded to bf16, which is what autocast computes with."""
    params = params_of(same_as_trainer(tmp_path, train_set, bf16=True))
    assert {param.dtype for param in params if "proj" in param.name} == {torch.bfloat16}


def test_updates_come_in_the_order_in_which_weights_are_needed(tmp_path, train_set, monkeypatch):
    """The embeddings first: a forward pass that waits for the last update waits for all."""
    order = []
    real = optimizer.LazyOptimizer.update
    noting = lambda self, unit: (order.append(unit.name), real(self, unit))  # noqa: E731
    monkeypatch.setattr(optimizer.LazyOptimizer, "update", noting)
    trainer = make_streamed(tmp_path, train_set, untied(), stream_embeddings=True, max_steps=1)
    trainer.train()
    layers = [unit.name for unit in trainer.memory.streamer.layers]
    assert len(layers) == LAYERS and order[1:-1] == layers
    assert "embed" in order[0] and "head" in order[-1]


@pytest.mark.parametrize("walk", ["micro_batch", "layer"])
def test_embeddings_come_while_the_step_before_ends(walk, tmp_path, train_set, monkeypatch):
    order = []
    load, step = LayerStreamer.fetch, optimizer.LazyOptimizer.step

    def fetch(streamer, unit):
        before = unit.loads
        load(streamer, unit)
        order.extend([unit.name] * (unit.loads - before))

    monkeypatch.setattr(LayerStreamer, "fetch", fetch)
    monkeypatch.setattr(optimizer.LazyOptimizer, "step", lambda *args: (order.append("step"), step(*args)))
    trainer = make_streamed(tmp_path, train_set, untied(), stream_embeddings=True, max_steps=3, accumulation_walk=walk)
    trainer.train()
    ends = [index for index, name in enumerate(order) if name == "step"]
    assert len(ends) == 3 and all("embed" in order[end - 1] for end in ends), order
    loads = [name for name in order[ends[0] :] if "embed" in name]
    assert len(loads) == (2 if walk == "layer" else 2 + 2 * 2), "and no more often than before"


def test_gradients_of_bf16_copies_add_up_in_fp32(tmp_path, train_set):
    """In bf16 the sum over the micro-batches of a window would be off by half a percent."""
    plain = train_plain(tmp_path, train_set, bf16=True, gradient_accumulation_steps=8, max_steps=1)
    trainer = make_streamed(tmp_path, train_set, bf16=True, gradient_accumulation_steps=8, max_steps=1)
    trainer.train()
    moments = trainer.optimizer.optimizer.state
    for ours, theirs in zip(trainer.model.parameters(), plain.model.parameters()):
        ours = moments[trainer.memory.parameter(ours)]["exp_avg"]
        theirs = plain.optimizer.state[theirs]["exp_avg"]
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


def test_trainers_own_checkpointing_is_not_done_twice(plain, tmp_path, train_set):
    own = {**BY_MICRO_BATCH, checkpointing_option(): True}
    trainer = same_as_trainer(tmp_path, train_set, plain=plain, streamed=own)
    calls = sum(unit.calls for unit in trainer.memory.streamer.layers)
    assert calls == OPTIONS["max_steps"] * OPTIONS["gradient_accumulation_steps"] * LAYERS


@pytest.mark.parametrize(
    "model_type", mostly_slow(["gpt2", "gemma2", "qwen2_moe", "falcon", "opt"], ["gpt2", "qwen2_moe"])
)
def test_architectures(model_type, tmp_path):
    """A cross-section; all of them: `python -m benchmarks.equality.streamed`."""
    same_as_trainer(tmp_path, samples(), lambda: build_model(model_type))


def test_router_losses_reach_the_routers(tmp_path, caplog):
    """Router logits leave the layers through hooks, with their gradients: windows are not walked by layer then."""

    def build():
        model = build_model("mixtral")
        model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.5
        model.router_aux_loss_coef = 0.5
        return model

    data = ByteText(64)
    make_streamed(tmp_path, data, build())
    assert "output_router_logits" in caplog.text, "before it trains"
    same_as_trainer(tmp_path, data, build, streamed={}, max_steps=4)
    with pytest.raises(RuntimeError, match="accumulation_walk=micro_batch"):
        make_streamed(tmp_path, data, build(), accumulation_walk="layer")


@pytest.mark.parametrize("walk", ["micro_batch", "layer"])
def test_lora_over_a_streamed_base(walk, tmp_path, train_set):
    trainer = same_as_trainer(tmp_path, train_set, lora, streamed={"accumulation_walk": walk})
    assert all("lora" not in param.name for param in params_of(trainer))


@pytest.mark.parametrize("kind", mostly_slow(["lora", "ia3", "dora", "shira"], ["lora", "shira"]))
def test_a_base_that_adapters_read_travels_as_it_is(kind, tmp_path, train_set):
    """DoRA takes norms of an fp32 base under autocast, SHiRA adds to it; others call the layer, which rounds."""
    params = params_of(same_as_trainer(tmp_path, train_set, lambda: adapted(kind), streamed={}, bf16=True))
    rounded = torch.bfloat16 if kind in ("lora", "ia3") else torch.float32
    assert {param.dtype for param in params if "q_proj.base_layer" in param.name} == {rounded}
    assert {param.dtype for param in params if "k_proj" in param.name} == {torch.bfloat16}


def test_lora_over_an_int8_base(tmp_path, train_set):
    """The base is what int8 holds of it, and one byte per weight on the host."""
    model = lora(wide)
    before = weights(model)
    trainer = make_streamed(tmp_path, train_set, model, base_precision="int8")
    storage = trainer.memory.streamer.layers[0].storage
    assert storage.packed_bytes < 1.2 * sum(p.parameter.numel() for p in storage.params)
    trainer.train()
    after = weights(trainer.model)
    for name, weight in before.items():
        if "lora" in name:
            assert not torch.equal(after[name], weight)
        else:
            step = weight.abs().amax(dim=-1, keepdim=True) / 127
            assert ((after[name] - weight).abs() <= 0.51 * step).all(), name
    assert steps(trainer)[-1][0] < steps(trainer)[0][0]


def test_int8_base_stays_packed_where_it_does_not_fit(tmp_path, train_set, monkeypatch, caplog):
    model = lora(wide)
    trainer = make_streamed(tmp_path, train_set, model, base_precision="int8", max_steps=4)
    monkeypatch.setattr(trainer.memory, "host_memory", lambda: 1000)
    trainer.train()
    assert "stays packed" in caplog.text
    adapters = {name: w for name, w in trainer.model.named_parameters() if "lora" in name}
    assert adapters and all(torch.isfinite(w).all() for w in adapters.values())
    base = next(w for name, w in trainer.model.named_parameters() if "base_layer" in name)
    with pytest.raises(RuntimeError, match="q_proj.*packed as int8 .`memory=stream`"):
        base.norm()
    assert base.detach().is_meta
    trainer.save_model(tmp_path / "adapters")
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()
    monkeypatch.undo()
    trainer.train()  # goes on, and leaves the whole model
    assert all(torch.isfinite(w).all() for w in weights(trainer.model).values())


def quantised(kind):
    """A base in bitsandbytes' 4-bit or 8-bit form."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = wide()
    for parent in [part for layer in model.model.layers for part in (layer.self_attn, layer.mlp)]:
        for name, old in list(parent.named_children()):
            if isinstance(old, torch.nn.Linear):
                sizes = (old.in_features, old.out_features)
                if kind == "nf4":
                    new = bitsandbytes.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4")
                    weight = bitsandbytes.nn.Params4bit(
                        old.weight.data, requires_grad=False, quant_type="nf4", module=new
                    )
                else:
                    new = bitsandbytes.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
                    weight = bitsandbytes.nn.Int8Params(old.weight.data, requires_grad=False, has_fp16_weights=False)
                new.weight = weight
                setattr(parent, name, new.to("cpu"))
    return lora(lambda: model)


@pytest.fixture(scope="module")
def plain_4bit(tmp_path_factory):
    return train_plain(tmp_path_factory.mktemp("plain"), ByteText(400), quantised("nf4"))


@pytest.mark.parametrize(
    "options",
    [
        {"accumulation_walk": "micro_batch"},
        {"accumulation_walk": "layer"},
        # One slot: a layer's weights come when its backward pass asks for the first tensor that autograd saved.
        {"accumulation_walk": "micro_batch", "prefetch_layers": 0},
        {"accumulation_walk": "layer", "kept_graphs": 5},
        pytest.param({"accumulation_walk": "micro_batch", "kept_graphs": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_lora_over_a_4bit_base(options, plain_4bit, tmp_path, train_set):
    """The packed bytes travel."""
    build = lambda: quantised("nf4")  # noqa: E731
    params = params_of(same_as_trainer(tmp_path, train_set, build, plain=plain_4bit, streamed=options))
    assert sum(param.nbytes for param in params if param.dtype == torch.uint8) > 0.9 * sum(p.nbytes for p in params)


def test_bitsandbytes_int8_base_is_refused(tmp_path, train_set):
    with pytest.raises(ValueError, match="quantised by bitsandbytes to int8"):
        make_streamed(tmp_path, train_set, quantised("int8"))


def test_partly_frozen_model(tmp_path, train_set):
    def build():
        model = llama()
        model.model.layers[:2].requires_grad_(False)
        return model

    same_as_trainer(tmp_path, train_set, build)


class SaveInTheMiddle(TrainerCallback):
    """What users write: save the model themselves, whenever they like."""

    def __init__(self, folder):
        self.folder = folder

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 3:
            model.save_pretrained(self.folder)


@pytest.mark.parametrize("states", mostly_slow(["exact", "8bit"], ["8bit"]))
def test_a_callback_that_saves_gets_weights(states, tmp_path, train_set):
    if states == "8bit":
        pytest.importorskip("bitsandbytes")
    save = SaveInTheMiddle(tmp_path / "saved")
    options = {"stream_embeddings": True, "optimizer_states": states, "accumulation_walk": "micro_batch"}
    make_streamed(tmp_path, train_set, callbacks=[save], **options).train()
    saved = type(tiny_model()).from_pretrained(tmp_path / "saved")
    whole = make_streamed(tmp_path, train_set, **options, save_strategy="steps", save_steps=3)
    whole.train()
    expected = type(tiny_model()).from_pretrained(tmp_path / "checkpoint-3")
    assert_same_weights(weights(saved), weights(expected))


def test_training_again_after_an_error(tmp_path, train_set):
    """Gradients of the window that failed are not in the next."""
    model = llama()
    plain = train_plain(tmp_path, train_set, max_steps=2)
    trainer = make_streamed(tmp_path, train_set, model, max_steps=2, **BY_MICRO_BATCH)
    calls = []

    def fail_once(*_):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_hook(fail_once)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    handle.remove()
    trainer.train()
    assert_same_weights(weights(trainer.model), weights(plain.model))


# What is on the device, and how often it travels.


class LiveWeights(TrainerCallback):
    """Counts, at every use of a layer, the distinct storages behind the parameters of all layers."""

    def __init__(self, model):
        self.model, self.peak_bytes, self.peak_layers, self.seen = model, 0, 0, 0
        for module in model.model.layers[0].modules(), model.model.layers[-1].modules():
            for inner in module:
                if isinstance(inner, torch.nn.Linear):
                    inner.register_forward_hook(lambda *_: self.count())
                    inner.register_full_backward_pre_hook(lambda *_: self.count())

    def count(self):
        self.seen += 1
        real = []
        for layer in self.model.model.layers:
            storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in layer.parameters()}
            real.append({key: size for key, size in storages.items() if size > 64})  # more than a placeholder
        self.peak_layers = max(self.peak_layers, sum(bool(storages) for storages in real))
        merged = {key: size for storages in real for key, size in storages.items()}
        self.peak_bytes = max(self.peak_bytes, sum(merged.values()))


@pytest.mark.parametrize("walk", ["micro_batch", "layer"])
@pytest.mark.parametrize("prefetch,kept", [pytest.param(0, 0, marks=pytest.mark.slow), (1, 0), (1, 2)])
@pytest.mark.usefixtures("of_a_library")
def test_live_layers(walk, prefetch, kept, tmp_path, train_set):
    model = tiny_model(num_hidden_layers=8)
    layer = sum(p.numel() * p.element_size() for p in model.model.layers[0].parameters())
    watch = LiveWeights(model)
    options = {"prefetch_layers": prefetch, "resident_layers": kept, "accumulation_walk": walk, "max_steps": 2}
    trainer = make_streamed(tmp_path, train_set, model, [watch], **options)
    live = Allocations(trainer)
    trainer.train()
    assert watch.seen > 50
    assert watch.peak_layers == 1 + kept, watch.peak_layers  # the others are placeholders for whoever looks
    slots, updates = (prefetch + 1) * layer, (prefetch + 1) * 3 * layer  # of each gradient and two moments
    assert live.peak <= 1.1 * (slots + updates)  # 1.1: alignment of tiny tensors
    assert live.peak >= 0.9 * layer


class Allocations:
    """Bytes of device buffers that torch really holds for slots, found by the garbage collector, not by bookkeeping."""

    def __init__(self, trainer):
        self.peak, self.calls = 0, 0
        gc.collect()
        self.before = self.byte_buffers()  # held, so that no new buffer gets an old one's address
        host = {unit.storage.packed.data_ptr() for unit in trainer.memory.streamer.units}
        self.memory = trainer.memory
        for layer in trainer.model.model.layers[::3]:  # the garbage collector's list is long
            layer.mlp.register_forward_hook(lambda *_: self.count(host))

    @staticmethod
    def byte_buffers():
        return [t for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype == torch.uint8]

    def count(self, host):
        self.calls += 1
        if self.calls % 5:
            return
        all_of_it = [(*one.written(), *one.needed()) for one in self.memory.optimizer._beside.values()]
        beside = [buffer for of_unit in all_of_it for _, buffer, *_ in of_unit]
        old = host | {t.untyped_storage().data_ptr() for t in (*self.before, *beside)}
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.byte_buffers()}
        large = [size for key, size in sizes.items() if key not in old and size > 10_000]  # random states are smaller
        self.peak = max(self.peak, sum(large))


def test_weights_travel_twice_per_step_but_where_a_pass_turns_round(tmp_path, train_set):
    """What lies in the two slots is needed next: by the backward pass, and by the next step, which updates it there."""
    model, loads = tiny_model(num_hidden_layers=6), []
    options = {"gradient_accumulation_steps": 8, "max_steps": 5, "accumulation_walk": "layer"}
    trainer = make_streamed(tmp_path, train_set, model, **options)

    class Count(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            loads.append([unit.loads for unit in trainer.memory.streamer.layers])

    trainer.add_callback(Count())
    trainer.train()
    steps = [[after - before for after, before in zip(*two)] for two in zip(loads[1:], loads)]
    assert steps == [[1, 1, 2, 2, 1, 1]] * 4


def test_passes_that_begin_anew_find_the_first_layers(tmp_path, train_set):
    """As those for the tokens of a completion: the layer whose last use is longest ago is needed next."""
    model = tiny_model(num_hidden_layers=6)
    model.model.layers.requires_grad_(False)
    trainer = make_streamed(tmp_path, train_set, model, resident_layers=2)  # and two slots for those that travel
    batch, loads = {"input_ids": torch.arange(8)[None]}, []
    with trainer.memory.running(), torch.no_grad():
        expected, _ = trainer.memory.streamer.copies_of_a_pass()
        for _ in range(4):
            before = trainer.memory.streamer.transfers.bytes_in
            trainer.model(**batch)
            loads.append(trainer.memory.streamer.transfers.bytes_in - before)
    layer = trainer.memory.streamer.layers[0].storage.packed_bytes
    assert loads[0] == 6 * layer and expected == 4 * layer and all(0 < load <= expected for load in loads[1:])


def test_no_more_layers_are_kept_than_there_are(tmp_path, train_set):
    """Each layer that is kept or fetched ahead takes a buffer, so that 10^9 of them would never be made."""
    trainer = make_streamed(tmp_path, train_set, resident_layers=10**9, prefetch_layers=10**9)
    assert trainer.memory.plan.resident_layers == trainer.memory.plan.setup.prefetch_layers == 4
    assert trainer.memory_summary()["statistics"]["resident_units"] == 4


def test_resident_layers_travel_less(tmp_path, train_set):
    totals = []
    for kept in (0, 2, LAYERS):
        trainer = make_streamed(tmp_path, train_set, resident_layers=kept, max_steps=2)
        trainer.train()
        totals.append(trainer.memory_summary()["statistics"]["loads"])
    assert totals[0] > totals[1] > totals[2]


# Windows.


def test_a_model_that_uses_its_embeddings_after_its_layers_too_falls_back(tmp_path, caplog):
    """The loss frees a graph that the walk needs. What that window had added is dropped, and computed again."""
    same_as_trainer(tmp_path, samples(), lambda: build_model("hrm_text"), streamed={}, max_steps=2)
    assert "uses what it computed before its layers after them too" in caplog.text


def test_a_model_that_cannot_be_walked_is_found_before_a_layer_is_updated(tmp_path, caplog):
    own = {"out_of_memory": "raise"}
    same_as_trainer(tmp_path, samples(), lambda: build_model("blt"), streamed=own, max_grad_norm=0.0)
    assert "after them too" in caplog.text


def test_it_does_not_begin_again_after_a_layer_was_updated(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_hybrid.streaming.walk.difference", lambda *_: None)  # later windows may be others
    trainer = make_streamed(tmp_path, samples(), build_model("blt"), **IN_BACKWARD)
    with pytest.raises(CannotWalkError, match="after them too. Set `accumulation_walk=micro_batch`"):
        trainer.train()


class Uneven(torch.utils.data.Dataset):
    """Sequences of different lengths with padding and masked labels."""

    def __init__(self):
        self.text = ByteText(64)

    def __len__(self):
        return len(self.text)

    def __getitem__(self, index):
        length = 8 + 3 * (index % 8)
        ids = self.text[index]["input_ids"][:length]
        labels = torch.where(torch.arange(length) < index % 5, -100, ids)
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def collate(rows):
    pad = torch.nn.utils.rnn.pad_sequence
    values = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {k: pad([row[k] for row in rows], batch_first=True, padding_value=v) for k, v in values.items()}


class KeepGradients(TrainerCallback):
    def __init__(self, trainer):
        self.trainer, self.gradients = trainer, {}

    def on_pre_optimizer_step(self, *args, **kwargs):
        counterpart = self.trainer.memory.streamer.counterpart
        self.gradients = {n: counterpart(p).grad.clone() for n, p in self.trainer.model.named_parameters()}


def test_gradients_of_uneven_windows(tmp_path):
    """Layer by layer and micro-batch by micro-batch: the same gradients, also where every micro-batch is longer."""
    found = {}
    for walk in ("micro_batch", "layer"):
        config = HybridConfig(
            **config_values(tmp_path, **STREAMED, max_steps=1, gradient_accumulation_steps=8, accumulation_walk=walk)
        )
        trainer = HybridTrainer(llama(), config, train_dataset=Uneven(), data_collator=collate)
        trainer.add_callback(KeepGradients(trainer))
        trainer.train()
        found[walk] = trainer.callback_handler.callbacks[-1].gradients
    for name, gradient in found["micro_batch"].items():
        relative = (found["layer"][name] - gradient).norm() / gradient.norm()
        assert relative <= 1e-6, (name, relative)


class WithReference:
    """As preference losses do: another pass without gradients, behind the one that is trained."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, False, num_items_in_batch)
        with torch.no_grad():
            reference = model(**inputs).loss
        return loss * (1 + reference)


class PlainWithReference(WithReference, Trainer):
    pass


class StreamedWithReference(WithReference, HybridTrainer):
    pass


@pytest.mark.usefixtures("of_a_library")
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_second_pass_inside_a_window(prefetch, tmp_path, train_set):
    arguments = config_values(tmp_path, **{**OPTIONS, "max_steps": 4})

    plain = PlainWithReference(untied(), TrainingArguments(**arguments), train_dataset=train_set)
    config = HybridConfig(**arguments, **STREAMED, accumulation_walk="layer")
    config.plan_values = {"prefetch_layers": prefetch}
    streamed = StreamedWithReference(untied(), config, train_dataset=train_set)
    plain.train()
    streamed.train()
    assert_same_run(streamed, plain)


def test_micro_batches_compute_on_the_stream_of_the_walk(tmp_path, train_set, monkeypatch):
    """A thread begins with the default stream: work of a model between its layers would not wait for the layers."""
    entered = []
    monkeypatch.setattr("hf_hybrid.streaming.walk.copies_beside", lambda device: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"of thread {threading.get_ident()}")
    monkeypatch.setattr(torch.accelerator, "set_stream", entered.append)
    make_streamed(tmp_path, train_set, max_steps=1).train()
    assert entered == [f"of thread {threading.get_ident()}"] * (2 + OPTIONS["gradient_accumulation_steps"])


def test_a_micro_batch_that_fails_at_once_ends_the_walk(monkeypatch):
    """Also while its thread has not quite ended."""
    run = _MicroBatch.run
    monkeypatch.setattr(_MicroBatch, "run", lambda job: (run(job), time.sleep(1)))
    model, errors = tiny_model(), []
    streamer = LayerStreamer(model, find_layers(model), device=torch.device("cpu"))
    streamer.attach()

    def fail():
        raise ArithmeticError

    def walk_through():
        with pytest.raises(ArithmeticError) as error:
            LayerWalk(streamer).run([fail, fail])
        errors.append(error)

    thread = threading.Thread(target=walk_through, daemon=True)
    thread.start()
    thread.join(30)
    assert errors


@pytest.mark.usefixtures("of_a_library")
def test_micro_batches_that_part_are_not_counted_twice(tmp_path, train_set, plain, caplog):
    """One goes through fewer layers, so its loss has left gradients when that shows."""
    model, calls = llama(), []

    def shorten(module, *_):
        calls.append(1)
        module.config.num_hidden_layers = LAYERS - (len(calls) == 4 + 2)  # behind those that are compared

    model.model.register_forward_pre_hook(shorten)
    trainer = make_streamed(tmp_path, train_set, model)
    trainer.train()
    assert "do not call the same layers" in caplog.text
    assert_same_run(trainer, plain)  # each of the calls that count went through all layers


@pytest.mark.usefixtures("of_a_library")
def test_an_error_in_one_micro_batch_leaves_the_weights(tmp_path, train_set):
    model = llama()
    before, calls = weights(model), []

    def fail(*_):
        calls.append(1)
        if len(calls) == 4 + 7:  # the walks are compared, then one step is made
            raise RuntimeError("out of memory, say")

    model.model.layers[2].register_forward_hook(fail)
    options = {"accumulation_walk": "layer", "gradient_accumulation_steps": 4, "warmup_steps": 0}
    trainer = make_streamed(tmp_path, train_set, model, **options)
    with pytest.raises(RuntimeError, match="out of memory, say"):
        trainer.train()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    changed = [n for n, p in model.named_parameters() if not torch.equal(before[n], p)]
    assert len(changed) == len(before)  # one step was made, and is there


# Everything around a run.


def test_checkpoints_are_those_of_trainer(tmp_path, train_set):
    """Streamed saves are read by plain Trainer, and the other way round."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    plain = train_plain(tmp_path / "plain", train_set, **saving)
    trainer = make_streamed(tmp_path / "streamed", train_set, **BY_MICRO_BATCH, **saving)
    trainer.train()
    assert_same_run(trainer, plain)
    for folder in ("plain", "streamed"):
        checkpoint = str(tmp_path / folder / "checkpoint-3")
        resumed = make_streamed(tmp_path / f"{folder}-1", train_set, **BY_MICRO_BATCH)
        resumed.train(resume_from_checkpoint=checkpoint)
        assert_same_weights(weights(resumed.model), weights(plain.model))
    arguments = TrainingArguments(**config_values(tmp_path / "again", **OPTIONS))
    again = Trainer(llama(), arguments, train_dataset=train_set)
    again.train(resume_from_checkpoint=str(tmp_path / "streamed" / "checkpoint-3"))
    assert_same_weights(weights(again.model), weights(plain.model))


def test_evaluations_and_saves_make_each_update_once(tmp_path, train_set, monkeypatch):
    """An evaluation makes those that are pending as it goes; a save after it finds none, and moves no weights."""
    updates, real = [], optimizer.LazyOptimizer.update
    monkeypatch.setattr(optimizer.LazyOptimizer, "update", lambda *args: (updates.append(1), real(*args)))
    often = {"save_strategy": "steps", "save_steps": 1}
    loads = {}
    for name, options in {"saved": often, "both": {**often, "eval_strategy": "steps", "eval_steps": 1}}.items():
        config = HybridConfig(**config_values(tmp_path / name, **{**OPTIONS, **STREAMED, **options}))
        model, held_out = llama(), ByteText(8, offset=500)
        trainer = HybridTrainer(model, config, train_dataset=train_set, eval_dataset=held_out)
        updates.clear()
        trainer.train()
        assert len(updates) == LAYERS * OPTIONS["max_steps"]
        loads[name] = trainer.memory_summary()["statistics"]["loads"]
    assert loads["both"] == loads["saved"]


def test_evaluation_and_best_model(tmp_path, train_set):
    options = {name: "steps" for name in ("eval_strategy", "save_strategy")}
    options |= {"eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
    held_out = ByteText(16, offset=500)
    plain = Trainer(
        llama(),
        TrainingArguments(**config_values(tmp_path / "plain", **{**OPTIONS, **options})),
        train_dataset=train_set,
        eval_dataset=held_out,
    )
    config = HybridConfig(
        **config_values(tmp_path / "streamed", **{**OPTIONS, **options, **STREAMED}), **BY_MICRO_BATCH
    )
    streamed = HybridTrainer(llama(), config, train_dataset=train_set, eval_dataset=held_out)
    before = plain.evaluate()["eval_loss"]
    assert streamed.evaluate()["eval_loss"] == before
    assert_same_weights(weights(streamed.model), weights(plain.model))
    plain.train()
    streamed.train()
    losses = [[e["eval_loss"] for e in t.state.log_history if "eval_loss" in e] for t in (plain, streamed)]
    assert losses[0] == losses[1] and len(losses[0]) >= 2
    assert_same_weights(weights(streamed.model), weights(plain.model))
    assert streamed.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    written = [t.model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False) for t in (plain, streamed)]
    assert torch.equal(*written) and written[0].shape[1] > 2


def test_second_training_goes_on(tmp_path, train_set):
    plain = train_plain(tmp_path, train_set, max_steps=4)
    streamed = make_streamed(tmp_path, train_set, max_steps=4, **BY_MICRO_BATCH)
    streamed.train()
    plain.train()
    streamed.train()
    assert_same_weights(weights(streamed.model), weights(plain.model))


def test_model_init(tmp_path, train_set):
    arguments = config_values(tmp_path, **OPTIONS)

    plain = Trainer(model_init=lambda: llama(), args=TrainingArguments(**arguments), train_dataset=train_set)
    config = HybridConfig(**arguments, **STREAMED, **BY_MICRO_BATCH)
    streamed = HybridTrainer(model_init=lambda: llama(), args=config, train_dataset=train_set)
    plain.train()
    streamed.train()
    assert_same_run(streamed, plain)


def test_device_map_says_what_lives_where(plain, tmp_path, train_set):
    places = {"": 0, **{f"model.layers.{index}": "cpu" for index in (1, 3)}}
    own = {**BY_MICRO_BATCH, "device_map": places}
    trainer = same_as_trainer(tmp_path, train_set, plain=plain, streamed=own)
    assert [unit.name for unit in trainer.memory.streamer.units] == ["model.layers.1", "model.layers.3"]


@pytest.mark.parametrize(
    "places,memory,complaint",
    [
        ({"": 0}, "stream", "keeps no decoder layer on `cpu`"),
        ({"model.layers.0": "cpu"}, "stream", "says nothing about `model.layers.1`"),
        ({"": "cpu"}, "off", "Set `memory=auto`"),
    ],
)
def test_device_maps_that_cannot_work(places, memory, complaint, tmp_path, train_set):
    with pytest.raises(ValueError, match=complaint):
        make_streamed(tmp_path, train_set, device_map=places, memory=memory)


def test_model_offloaded_by_accelerate(plain, tmp_path, train_set):
    """`accelerate.cpu_offload` trains nothing; its hooks are taken off."""
    from accelerate import cpu_offload

    same_as_trainer(tmp_path, train_set, lambda: cpu_offload(llama(), execution_device="cpu"), plain=plain)


# Leaps.


@pytest.mark.parametrize("direction", mostly_slow(["orthogonal", "gradient_memory"], ["orthogonal"]))
def test_leaps_of_streamed_weights(direction, tmp_path, train_set):
    runs = []
    for memory in ("off", "stream"):
        options = {**OPTIONS, "max_steps": 18, "direction": direction, "probe_budget": 0.2, "memory": memory}
        config = hybrid_config(tmp_path, **options, **BY_MICRO_BATCH)
        trainer = HybridTrainer(llama(), config, train_dataset=train_set)
        trainer.train()
        runs.append(trainer)
    resident, streamed = (trainer.hybrid_summary() for trainer in runs)
    assert len(resident["leaps"]) >= 2 and any(leap["verdict"] != "unprobed" for leap in resident["leaps"])
    assert streamed["leaps"] == resident["leaps"]
    assert_same_run(runs[1], runs[0])


# What is refused.


@pytest.mark.parametrize(
    "options,complaint",
    [
        ({"fp16": True}, "`fp16=True`"),
        ({"torch_compile": True}, "`torch_compile=True`"),
        ({"bf16_full_eval": True}, "`bf16_full_eval`"),
    ],
)
def test_combinations_that_are_refused(options, complaint, tmp_path, train_set):
    with pytest.raises(ValueError, match=complaint):
        make_streamed(tmp_path, train_set, **options)


def test_unsupported_optimizer_is_refused(tmp_path, train_set):
    class Coupled(torch.optim.SGD):
        pass

    model = llama()
    config = HybridConfig(**config_values(tmp_path, **OPTIONS, **STREAMED))
    with pytest.raises(PlanError, match="Coupled"):
        HybridTrainer(model, config, train_dataset=train_set, optimizers=(Coupled(model.parameters(), lr=0.1), None))


def test_the_layers_are_those_of_the_language_model_where_the_image_encoder_is_larger():
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(hidden_size=48, intermediate_size=96, num_hidden_layers=5),
            text_config=LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64),
        )
    )
    assert [name for name, _ in find_layers(model)] == [f"model.language_model.layers.{index}" for index in (0, 1)]


def test_models_without_layers_are_refused(tmp_path, train_set):
    model = build_model("openai-gpt")
    model.transformer.h = torch.nn.Sequential(*model.transformer.h)
    with pytest.raises(NoLayerListError, match="looked for an `nn.ModuleList`"):
        make_streamed(tmp_path, train_set, model)


# Code of a user.


class Reverses(TrainerCallback):
    """Turns the gradients of a layer round before the update, and drops all of step 3."""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        for name, parameter in model.named_parameters():
            if "layers.1." in name:
                parameter.grad.neg_()
        if state.global_step == 2:
            model.zero_grad()


@pytest.mark.parametrize("own", [{}, {"out_of_memory": "raise"}], ids=["clipped", "in backward"])
def test_gradients_are_where_a_callback_looks_for_them(own, tmp_path, train_set):
    same = {**OPTIONS, "max_steps": 4, "gradient_accumulation_steps": 1, **({"max_grad_norm": 0.0} if own else {})}
    plain = Trainer(
        llama(),
        TrainingArguments(**config_values(tmp_path / "plain", **same)),
        train_dataset=train_set,
        callbacks=[Reverses()],
    )
    plain.train()
    streamed = make_streamed(tmp_path / "streamed", train_set, callbacks=[Reverses()], **{**same, **own})
    streamed.train()
    assert_same_weights(weights(plain.model), weights(streamed.model))


def test_weights_that_were_assigned_are_trained(tmp_path, train_set):
    def halve(model):
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5

    found = []
    for memory in ({}, STREAMED):
        kind, config = (HybridTrainer, HybridConfig) if memory else (Trainer, TrainingArguments)
        values = config_values(tmp_path / str(len(found)), **{**OPTIONS, "gradient_accumulation_steps": 1}, **memory)
        trainer = kind(llama(), config(**values), train_dataset=train_set)
        for _ in range(2):
            halve(trainer.model)
            trainer.train()
        found.append(weights(trainer.model))
    assert_same_weights(*found)


def test_a_model_that_was_converted_is_refused(tmp_path, train_set):
    trainer = make_streamed(tmp_path, train_set)
    trainer.model.to(torch.bfloat16)
    with pytest.raises(ValueError, match="torch.bfloat16.*before the trainer is made"):
        trainer.train()
