"""Muon for hidden matrices, AdamW for the rest: who gets what, the steps of torch's own, and whole trainings."""

import copy
import dataclasses
import json
import pickle

import pytest
import torch
from conftest import ByteText, assert_same_weights, config_values, hybrid_config, tiny_model, weights
from rig.tiny_architectures import build_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_hybrid import HybridArguments, HybridConfig, HybridTrainer, optimizers
from hf_hybrid.optimizers import RATE_SCALE, MuonAdamW, muon_groups, split_parameters
from hf_hybrid.part import Part
from hf_hybrid.plan.accounting import ModelShape, WeightCount, storage_bytes
from hf_hybrid.plan.estimate import Estimator, PlanError
from hf_hybrid.plan.setups import Setup
from hf_hybrid.run.adapters import adapter_rate
from hf_hybrid.streaming.layers import find_layers

MLP = ["gate_proj", "up_proj", "down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def last_names(named) -> set[str]:
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return {name.split(".")[-2] for name in named}


def check_split(model) -> tuple[dict, dict]:
    """Every trainable parameter once, matrices in one part."""
    matrices, rest = split_parameters(model)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert sorted([*matrices, *rest]) == sorted(names)
    assert all(parameter.ndim in (2, 3) for parameter in matrices.values())
    return matrices, rest


# Who gets what.


@pytest.mark.parametrize("tied", [True, False])
def test_split_of_llama(tied):
    matrices, rest = check_split(tiny_model(tie_word_embeddings=tied))
    assert last_names(matrices) == {*ATTENTION, *MLP} and len(matrices) == 2 * 7
    assert ("lm_head.weight" in rest) is not tied and "model.embed_tokens.weight" in rest


def test_split_of_gpt2():
    """Conv1D holds its weight transposed; the head is the embedding; positions are an embedding too."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=16))
    matrices, rest = check_split(model)
    assert last_names(matrices) == {"c_attn", "c_proj", "c_fc"} and len(matrices) == 2 * 4
    assert {"transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.attn.c_attn.bias"} <= set(rest)


def mixture(**overrides):
    torch.manual_seed(0)
    values = {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    return MixtralForCausalLM(MixtralConfig(**{**values, **overrides}))


@pytest.mark.parametrize("vocabulary", [100, 96])
def test_split_of_a_mixture_of_experts(vocabulary):
    """Experts in one 3-D weight are Muon's, also if a side is as long as the vocabulary; a router is AdamW's."""
    model = mixture(vocab_size=vocabulary)
    matrices, rest = check_split(model)
    stacks = {name for name, parameter in matrices.items() if parameter.ndim == 3}
    experts = ("experts.gate_up_proj", "experts.down_proj")
    assert stacks == {f"model.layers.{layer}.mlp.{name}" for layer in range(2) for name in experts}
    assert last_names(set(matrices) - stacks) == set(ATTENTION)
    assert any("gate" in name for name in rest)


def test_split_leaves_3d_weights_that_are_no_experts():
    class Three(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, 3, 2))

    model = torch.nn.ModuleList([Three(), torch.nn.Conv1d(4, 4, 2)])
    assert not split_parameters(model)[0]
    model[0].num_experts = 4
    assert set(split_parameters(model)[0]) == {"0.weight"}


def test_split_of_mamba():
    model = MambaForCausalLM(MambaConfig(vocab_size=100, hidden_size=32, state_size=4, num_hidden_layers=2))
    matrices, rest = check_split(model)
    assert last_names(matrices) == {"in_proj", "x_proj", "dt_proj", "out_proj"}
    assert {"backbone.layers.0.mixer.A_log", "backbone.layers.0.mixer.conv1d.weight"} <= set(rest)
    assert rest["backbone.layers.0.mixer.A_log"].ndim == 2


def lora(**overrides):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(tiny_model(), LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **overrides}))


def test_split_of_adapters():
    """Adapters of hidden layers; not those of the head, nor one of rank 1, which is two vectors."""
    matrices, rest = check_split(lora())
    assert len(matrices) == 2 * 2 * 2 and not rest
    matrices, rest = check_split(lora(target_modules=["q_proj", "lm_head", "embed_tokens"], use_dora=True))
    assert len(matrices) == 2 * 2 and all("q_proj" in name for name in matrices)
    assert any("lm_head" in name for name in rest) and any("magnitude" in name for name in rest)
    matrices, rest = check_split(lora(r=1))
    assert not matrices and len(rest) == 2 * 2 * 2


def change_of_a_first_step(rank: int, alpha: int) -> float:
    """What AdamW's first step at the default rate of adapters changes in the logits."""
    model, ids = lora(r=rank, lora_alpha=alpha, target_modules="all-linear"), torch.arange(64).view(2, 32)
    rate = adapter_rate(alpha=alpha, width=model.config.hidden_size)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    before = model(input_ids=ids, labels=ids)
    before.loss.backward()
    optimizer.step()
    with torch.no_grad():
        return (model(input_ids=ids).logits - before.logits).norm().item()


def test_adapters_step_alike_whatever_their_rank_and_alpha():
    """At the default rate; at one rate for all, four times the `alpha` changes nearly four times as much."""
    changes = [change_of_a_first_step(rank, alpha) for rank, alpha in ((4, 8), (16, 8), (16, 32), (4, 32))]
    assert max(changes) < 1.5 * min(changes), changes


def test_the_default_rate_of_adapters():
    """1e-3 for SmolLM2 with `alpha` 32, a quarter of it for pairs, less where layers are wider."""
    rate = adapter_rate(alpha=32, width=576)
    assert rate == pytest.approx(1e-3)
    assert adapter_rate(alpha=32, width=576, preference=True) == pytest.approx(rate / 4)
    assert adapter_rate(alpha=16, width=1152) == pytest.approx(rate)


def test_split_leaves_out_what_is_frozen_tied_or_as_wide_as_the_vocabulary():
    model = tiny_model(intermediate_size=256)  # as long as the vocabulary
    model.model.layers[0].requires_grad_(False)
    matrices, _ = check_split(model)
    assert set(matrices) == {f"model.layers.1.self_attn.{name}.weight" for name in ATTENTION}
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(8, 4), "linear": torch.nn.Linear(4, 8)})
    assert set(split_parameters(model)[0]) == {"linear.weight"}
    model["linear"].weight = model["embedding"].weight
    assert not split_parameters(model)[0]


def test_split_of_a_model_as_wide_as_its_vocabulary_is_long():
    model = tiny_model(hidden_size=256, vocab_size=256, tie_word_embeddings=False)
    matrices, rest = check_split(model)
    layers = {name for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2}
    assert set(matrices) == layers and {"model.embed_tokens.weight", "lm_head.weight"} <= set(rest)


# Steps.


def make(model, lr_scale=1.0, **overrides) -> MuonAdamW:
    decay = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
    common = {"lr": 1e-2, "weight_decay": 0.1}
    groups = muon_groups(model, decay, **common)
    for group in groups:
        group["lr"] *= lr_scale if group["algorithm"] == "muon" else 1.0
    return MuonAdamW(groups, **common, **overrides)


def reference(model, lr_scale=1.0):
    """Torch's own optimizers, by hand, at the learning rate times `RATE_SCALE`."""
    rate = 1e-2 * RATE_SCALE
    layers = [p for name, p in model.named_parameters() if "_proj" in name]
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    groups = [{"params": [model.model.embed_tokens.weight], "weight_decay": 0.1}, {"params": norms, "weight_decay": 0}]
    muon = torch.optim.Muon(layers, lr=rate * lr_scale, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [torch.optim.AdamW(groups, lr=rate, fused=True), muon]


def give_gradients(model, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def walk(model, optimizer, steps) -> None:
    for step in steps:
        give_gradients(model, step)
        optimizer.step()


def test_equal_to_torch_bit_for_bit():
    """Also under a schedule, which scales the learning rates of both."""
    model, twin = tiny_model(), tiny_model()
    optimizers = [make(model, lr_scale=2.0), *reference(twin, lr_scale=2.0)]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in optimizers]
    assert [group["algorithm"] for group in optimizers[0].param_groups] == ["adamw", "adamw", "muon"]
    for step in range(5):
        give_gradients(model, step)
        give_gradients(twin, step)
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            schedule.step()
    assert_same_weights(weights(model), weights(twin))
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    assert [RATE_SCALE * rate for rate in rates[0]] == rates[1] + rates[2]
    assert rates[0][-1] == pytest.approx(2e-2 / 6), "groups keep the rate of `learning_rate`"
    optimizers[0].zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("most", [1, 4000, 2**24], ids=["one matrix at a time", "two", "all"])
def test_each_expert_is_stepped_like_a_matrix(most, monkeypatch):
    """By torch's Muon in fp32, which rounds to bf16 otherwise; under a schedule, with decay."""
    monkeypatch.setattr(optimizers, "AT_ONCE", most)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    model = mixture()
    optimizer = make(model, lr_scale=2.0)
    stacks = {name: p for name, p in model.named_parameters() if p.ndim == 3}
    twins = {name: [torch.nn.Parameter(one.clone()) for one in p.detach()] for name, p in stacks.items()}
    torchs = torch.optim.Muon(
        [one for twin in twins.values() for one in twin], lr=2e-2 * RATE_SCALE, weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in (optimizer, torchs)]
    for step in range(4):
        give_gradients(model, step)
        for name, twin in twins.items():
            stacks[name].grad[1] = 0  # no token came to this expert
            for one, gradient in zip(twin, stacks[name].grad):
                one.grad = gradient.clone()
        for each, schedule in zip((optimizer, torchs), schedules):
            each.step()
            schedule.step()
    for name, twin in twins.items():
        torch.testing.assert_close(stacks[name].detach(), torch.stack([one.detach() for one in twin]), msg=name)


@pytest.mark.parametrize("build", [tiny_model, mixture])
@pytest.mark.parametrize("way", ["state dict", "file", "deepcopy", "pickle"])
def test_going_on_from_a_copy(way, build, tmp_path):
    model = build()
    optimizer = make(model)
    walk(model, optimizer, range(3))
    if way in ("state dict", "file"):
        twin = copy.deepcopy(model)
        again, saved = make(twin), copy.deepcopy(optimizer.state_dict())  # torch's own shares its tensors
        if way == "file":
            torch.save(saved, tmp_path / "optimizer.pt")
            saved = torch.load(tmp_path / "optimizer.pt", weights_only=True)
        again.load_state_dict(saved)
    else:
        copied = copy.deepcopy if way == "deepcopy" else lambda both: pickle.loads(pickle.dumps(both))
        twin, again = copied((model, optimizer))
    assert all(parameter in again.state for parameter in twin.parameters())
    for change in (optimizer, again):
        change.param_groups[-1]["lr"] = 3e-3  # of the groups of now, not of those before loading
    walk(model, optimizer, range(3, 6))
    walk(twin, again, range(3, 6))
    assert_same_weights(weights(model), weights(twin))
    assert len(again.state) == len(optimizer.state) == len(list(model.parameters()))


def test_states_are_torchs_and_muon_keeps_one():
    model = tiny_model()
    optimizer = make(model)
    walk(model, optimizer, [0])
    for group in optimizer.param_groups:
        names = {"momentum_buffer"} if group["algorithm"] == "muon" else {"exp_avg", "exp_avg_sq", "step"}
        assert all(set(optimizer.state[parameter]) == names for parameter in group["params"])


def test_a_closure_is_called_once_and_groups_can_be_added():
    model = tiny_model()
    optimizer = make(model)
    added = torch.nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [added]})
    assert optimizer.param_groups[-1]["algorithm"] == "adamw"
    give_gradients(model, 0)
    added.grad = torch.ones(3)
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        calls.append(1)
        return 1.5

    assert optimizer.step(closure) == 1.5 and len(calls) == 1
    assert (added < 1).all()


def test_groups_that_cannot_be_stepped_are_refused():
    vector, matrix, stack = (torch.nn.Parameter(torch.ones((3,) * sides)) for sides in (1, 2, 3))
    with pytest.raises(ValueError, match=r"shape \(3,\), and Muon orthogonalises matrices"):
        MuonAdamW([{"params": [vector], "algorithm": "muon"}])
    with pytest.raises(ValueError, match=r"shape \(3, 3, 3\), .* in a group of their own"):
        MuonAdamW([{"params": [matrix, stack], "algorithm": "muon"}])
    with pytest.raises(ValueError, match="`algorithm` must be one of adamw, muon, got `sgd`"):
        MuonAdamW([{"params": [vector], "algorithm": "sgd"}])
    with pytest.raises(ValueError, match="more than one parameter group"):
        MuonAdamW([{"params": [matrix]}, {"params": [matrix], "algorithm": "muon"}])


# The option.


def test_the_config_says_muon(tmp_path):
    config = HybridConfig(**config_values(tmp_path, optim="muon", muon_momentum=0.5))
    assert config.optim == "muon" and config.to_dict()["optim"] == "muon"
    values = json.loads(config.to_json_string())
    assert (values["optim"], values["muon_momentum"]) == ("muon", 0.5)
    changed = dataclasses.replace(config, learning_rate=1e-4)
    assert (changed.optim, changed.learning_rate, changed.muon_momentum) == ("muon", 1e-4, 0.5)
    assert pickle.loads(pickle.dumps(config)).optim == "muon"


@pytest.mark.parametrize("way", ["command line", "json", "yaml"])
def test_from_outside(way, tmp_path):
    parser, file = HfArgumentParser(HybridConfig), tmp_path / "run"
    if way == "command line":
        (config,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--optim", "muon"])
    else:
        file.write_text(json.dumps({"output_dir": str(tmp_path), "optim": "muon"}))
        (config,) = (parser.parse_json_file if way == "json" else parser.parse_yaml_file)(str(file))
    assert config.optim == "muon"


def test_other_optimizers_stay_what_they_are(tmp_path):
    (config,) = HfArgumentParser(HybridConfig).parse_args_into_dataclasses(["--output_dir", "x", "--optim", "sgd"])
    assert config.optim == TrainingArguments(str(tmp_path), optim="sgd").optim
    with pytest.raises(ValueError, match="`optim` must be one of muon, .*adamw_torch_fused.*, got `moun`"):
        HybridConfig(**config_values(tmp_path, optim="moun"))
    with pytest.raises(ValueError):
        TrainingArguments(str(tmp_path), optim="muon")


def test_a_model_without_hidden_matrices_is_refused(tmp_path, train_set):
    model = tiny_model()
    model.model.layers.requires_grad_(False)
    message = "`optim=muon` finds no hidden matrix to train in `LlamaForCausalLM`: of its 2"
    with pytest.raises(ValueError, match=message):
        HybridTrainer(model, HybridConfig(**config_values(tmp_path, optim="muon")), train_dataset=train_set)


# Training.

PLAIN = {"optim": "muon", "enable_predict": False}


def trainer_for(folder, data, model=None, callbacks=(), **overrides):
    options = {"weight_decay": 0.1, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "warmup_steps": 3}
    config = HybridConfig(**config_values(folder, **{**options, **PLAIN, **overrides}))
    return HybridTrainer(model or tiny_model(), config, train_dataset=data, callbacks=list(callbacks))


def steps(trainer):
    return [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]


class Rates(TrainerCallback):
    """What the optimizer's groups say while it trains."""

    def __init__(self):
        self.rates = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.rates.append([group["lr"] for group in optimizer.param_groups])


def test_training(tmp_path, train_set):
    rates = Rates()
    trainer = trainer_for(tmp_path, train_set, callbacks=[rates], max_steps=20)
    trainer.train()
    losses = [loss for loss, _ in steps(trainer)]
    assert losses[-1] < losses[0] - 0.5
    assert all(adamw == norms == muon for adamw, norms, muon in rates.rates) and max(rates.rates)[0] == 3e-3
    logged = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert max(logged) == 3e-3, "the rate of `learning_rate` is what is logged"
    decays = [group["weight_decay"] for group in trainer.optimizer.param_groups]
    assert decays == [0.1, 0.0, 0.1]


@pytest.mark.parametrize(
    "options, momentum", [({}, 0.95), ({"muon_momentum": 0.8}, 0.8), ({"preset": "fast", "enable_predict": True}, 0.85)]
)
def test_the_momentum_is_the_options_or_the_presets(options, momentum, tmp_path, train_set):
    trainer = trainer_for(tmp_path, train_set, **options)
    trainer.create_optimizer()
    groups = [group for group in trainer.optimizer.param_groups if group["algorithm"] == "muon"]
    assert groups and all(group["momentum"] == momentum for group in groups)


def test_the_preset_fast_trains_adapters_as_plain_trainer_does(tmp_path, train_set, caplog):
    """Bit for bit. An option of Muon says that Muon is wanted, and so does `optim=muon` itself."""
    common = {"optim": None, "max_steps": 8, "seed": 7}
    exact = {"enable_predict": True, "share_rows": "off"}
    fast = trainer_for(tmp_path, train_set, lora(), preset="fast", **exact, **common)
    assert "`preset=fast` trains adapters by AdamW" in caplog.text
    options = {"weight_decay": 0.1, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "warmup_steps": 3}
    common["optim"] = TrainingArguments.optim
    plain = Trainer(lora(), TrainingArguments(**config_values(tmp_path, **options, **common)), train_dataset=train_set)
    for trainer in (fast, plain):
        trainer.train()
    assert type(getattr(fast.optimizer, "optimizer", fast.optimizer)) is torch.optim.AdamW
    assert_same_weights(weights(fast.model), weights(plain.model))
    for asked, momentum in (({"muon_momentum": 0.9, "optim": None}, 0.9), ({"optim": "muon"}, 0.85)):
        trainer = trainer_for(tmp_path, train_set, lora(), preset="fast", **{**common, **asked})
        trainer.create_optimizer()
        groups = [group for group in trainer.optimizer.param_groups if group["algorithm"] == "muon"]
        assert [group["momentum"] for group in groups] == [momentum]


def test_training_of_adapters_alone(tmp_path, train_set):
    """There is nothing for AdamW, and Muon has the rate of `learning_rate`."""
    trainer = trainer_for(tmp_path, train_set, lora(), max_steps=10)
    before = weights(trainer.model)
    trainer.train()
    assert {group["rate_scale"] for group in trainer.optimizer.param_groups} == {1.0}
    after = weights(trainer.model)
    assert all(torch.equal(before[name], after[name]) is ("lora" not in name) for name in before)
    assert steps(trainer)[-1][0] < steps(trainer)[0][0]


class RatesOfParts(Part):
    def __init__(self):
        self.seen = []

    def after_update(self, step, learning_rates):
        self.seen.append(learning_rates)


def test_phases_train(tmp_path, train_set):
    config, rates = hybrid_config(tmp_path, optim="muon", direction="auto", max_steps=25), RatesOfParts()
    trainer = HybridTrainer(tiny_model(), config, train_dataset=train_set, parts=[rates])
    trainer.train()
    summary = trainer.hybrid_summary()
    assert summary["steps_by_phase"]["full"] > 0 and summary["leaps_made"] == 0
    assert max(map(max, rates.seen)) == RATE_SCALE * config.learning_rate, "parts see the rate that weights move by"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.5
    assert HybridConfig.from_json(tmp_path).optim == "muon"


@pytest.mark.parametrize("enable_predict, memory", [(False, "off"), (True, "off"), (False, "stream")])
def test_resuming_ends_at_the_same_weights(enable_predict, memory, tmp_path, train_set):
    def build(folder):
        options = {"optim": "muon", "memory": memory, "max_steps": 12, "save_strategy": "steps", "save_steps": 7}
        if enable_predict:
            config = hybrid_config(folder, **options, direction="auto")
        else:
            config = HybridConfig(**config_values(folder, **options, enable_predict=False))
        return HybridTrainer(tiny_model(), config, train_dataset=train_set)

    whole, again = build(tmp_path), build(tmp_path / "again")
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert_same_weights(weights(again.model), weights(whole.model))
    for first, second in zip(whole.optimizer.param_groups, again.optimizer.param_groups):
        assert first["algorithm"] == second["algorithm"] and first["lr"] == second["lr"]


# Streamed.

STREAMED = {"memory": "stream", "accumulation_walk": "micro_batch"}


@pytest.mark.parametrize("options", [{"ends": True}, {"accumulation_walk": "layer"}], ids=str)
def test_streamed_equals_resident(options, tmp_path, train_set, monkeypatch):
    options = dict(options)
    monkeypatch.setattr(HybridArguments, "plan_values", {"stream_embeddings": options.pop("ends", None)})
    shared = {"max_steps": 6, "gradient_accumulation_steps": 2}
    model, twin = tiny_model(tie_word_embeddings=False), tiny_model(tie_word_embeddings=False)
    resident = trainer_for(tmp_path, train_set, model, **shared)
    streamed = trainer_for(tmp_path, train_set, twin, **shared, **{**STREAMED, **options})
    resident.train()
    streamed.train()
    assert steps(streamed) == steps(resident)
    assert_same_weights(weights(streamed.model), weights(resident.model))


def test_streamed_architectures_equal_resident(tmp_path):
    """Transposed matrices, fused experts, adapters that stay on the device over streamed layers."""
    data = ByteText(64)
    for build in (lambda: build_model("gpt2"), lambda: build_model("mixtral"), lora):
        resident = trainer_for(tmp_path, data, build(), max_steps=3)
        resident.train()
        streamed = trainer_for(tmp_path, data, build(), max_steps=3, **STREAMED)  # seeds the dropout anew
        streamed.train()
        assert streamed.memory.streamer.units
        assert_same_weights(weights(streamed.model), weights(resident.model))


def test_torchs_own_muon_can_be_streamed(tmp_path, train_set):
    """Somebody who hands over an optimizer over matrices alone."""

    def train(**overrides):
        model = tiny_model().requires_grad_(False)
        parameters = [p.requires_grad_() for name, p in model.named_parameters() if "_proj" in name]
        config = HybridConfig(**config_values(tmp_path, enable_predict=False, max_steps=4, **overrides))
        optimizers = (torch.optim.Muon(parameters, lr=1e-2), None)
        trainer = HybridTrainer(model, config, train_dataset=train_set, optimizers=optimizers)
        trainer.train()
        return weights(trainer.model)

    assert_same_weights(train(**STREAMED), train())


# Bytes.

LAYER = 4 * 32 * 32 + 3 * 32 * 64
EMBEDDING, NORMS = 256 * 32, 2 * 32


def shape_of(model) -> ModelShape:
    names = [name for name, _ in find_layers(model)]
    return ModelShape.of(model, names, split_parameters(model)[0].values())


def test_the_shape_counts_muons_weights():
    shape = shape_of(tiny_model())
    assert [(unit.trainable, unit.frozen, unit.muon) for unit in shape.layers] == [(LAYER + NORMS, 0, LAYER)] * 2
    assert (shape.total.muon, shape.embedding.muon, shape.rest.muon, shape.largest_muon) == (2 * LAYER, 0, 0, 32 * 64)
    assert shape.total.weights == sum(p.numel() for p in tiny_model().parameters())
    experts = shape_of(mixture())
    stacks = 4 * (96 * 32 + 48 * 32)
    attention = 32 * 32 * 2 + 16 * 32 * 2
    assert experts.total.muon == 2 * (stacks + attention) and experts.largest_muon == 4 * 96 * 32
    adapters = shape_of(lora())
    stays = adapters.place(stream_embeddings=True).stays
    assert stays.muon == stays.trainable - adapters.rest.trainable == adapters.total.muon > 0


def test_planned_states_are_those_that_are_held(tmp_path, train_set):
    """One value per weight of a hidden matrix, two of any other, on the right side."""
    for options, place, muon, adamw in (
        ({"memory": "auto"}, "device", 2 * LAYER, 2 * NORMS + EMBEDDING + 32),
        (STREAMED, "host", 2 * LAYER, 2 * NORMS),
    ):
        trainer = trainer_for(tmp_path, train_set, max_steps=2, **options)
        planned = plan_of(trainer).table
        steps = 4 * (2 * 9 + 2) * (place == "device")  # of resident parameters the steps are counted too
        aligned = 2 * 2 * 2 * 128 * (place == "host")  # those of norms, in pieces whose tensors begin at 256 bytes
        assert planned.get("states", place) == 4 * muon + 8 * adamw + steps + aligned
        trainer.train()
        states = [v for state in trainer.optimizer.state.values() for v in state.values() if v.numel() > 1]
        assert storage_bytes(states) == planned.get("states", "host") + planned.get("states", "device") - steps
        held = trainer.memory_summary()["held"]["states"]
        counters = 4 * (2 * 2 + 2)  # AdamW's, one per parameter
        assert held["device"] + held["host"] == storage_bytes(states) + counters


def plan_of(trainer):
    from hf_hybrid.build import make_plan

    return make_plan(trainer, None)


def test_a_refusal_does_not_propose_8bit_states():
    shape = shape_of(tiny_model())
    without = dataclasses.replace(shape, layers=shape_without_muon(shape))
    muon, adamw = (Estimator(one).plan(Setup(64)) for one in (shape, without))
    assert adamw.table.get("states", "device") - muon.table.get("states", "device") == 4 * 2 * LAYER
    with pytest.raises(PlanError) as caught:
        Estimator(shape).plan(Setup(64, vram=1000, ram=1000))
    assert "8bit" not in str(caught.value)


def shape_without_muon(shape: ModelShape) -> tuple[WeightCount, ...]:
    return tuple(WeightCount(layer.trainable, layer.frozen) for layer in shape.layers)
