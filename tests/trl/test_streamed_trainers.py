"""
Every trainer of TRL with streamed layers: the weights of TRL's resident run, to the last bit; within 1e-6 where rows
share prefixes.
"""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from conftest import assert_same_weights, mostly_slow, weights

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

from accelerate import cpu_offload  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from rig.rollouts import TOKENIZER  # noqa: E402
from rig.rollouts import reward as reward_of_text  # noqa: E402
from rig.tiny_architectures import build_model  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    TrainerCallback,
)
from trl import (  # noqa: E402
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer  # noqa: E402
from trl.experimental.gkd import GKDConfig, GKDTrainer  # noqa: E402
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # noqa: E402
from trl.experimental.tpo import TPOConfig, TPOTrainer  # noqa: E402
from trl.trainer import dpo_trainer  # noqa: E402

from hf_hybrid import (  # noqa: E402
    HybridDPOConfig,
    HybridDPOTrainer,
    HybridGKDConfig,
    HybridGKDTrainer,
    HybridGRPOConfig,
    HybridGRPOTrainer,
    HybridKTOTrainer,
    HybridRewardTrainer,
    HybridRLOOConfig,
    HybridRLOOTrainer,
    hybrid_config,
)
from hf_hybrid.build import estimator_for  # noqa: E402
from hf_hybrid.streaming.low_bit import dequantize_rows, quantize_rows  # noqa: E402
from hf_hybrid.trainer import HybridTrainerMixin  # noqa: E402
from hf_hybrid.trl import distillation  # noqa: E402

LAYERS = 4
OURS = {
    DPOTrainer: HybridDPOTrainer,
    KTOTrainer: HybridKTOTrainer,
    RewardTrainer: HybridRewardTrainer,
    GRPOTrainer: HybridGRPOTrainer,
    RLOOTrainer: HybridRLOOTrainer,
    GKDTrainer: HybridGKDTrainer,
}
CONFIGS = {
    GRPOConfig: HybridGRPOConfig, RLOOConfig: HybridRLOOConfig, DPOConfig: HybridDPOConfig, GKDConfig: HybridGKDConfig,
}  # fmt: skip


def words(seed, count):
    draw = torch.Generator().manual_seed(seed)
    return " ".join("abcdefgh"[int(torch.randint(8, (1,), generator=draw))] * (1 + n % 3) for n in range(count))


PAIRS = [
    {"prompt": words(n, 4 + n % 5), "chosen": " " + words(n + 50, 2 + n % 7), "rejected": " " + words(n + 90, 3)}
    for n in range(16)
]
JUDGED = [
    {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
    for pair in PAIRS
    for side in ("chosen", "rejected")
]
TRIPLES = [{**pair, "reference": words(n + 30, 4 + n % 5)} for n, pair in enumerate(PAIRS)]
COMPLETED = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS]
CHATS = [
    {"messages": [{"role": "user", "content": p["prompt"]}, {"role": "assistant", "content": p["chosen"]}]}
    for p in PAIRS
]
PROMPTS = [{"prompt": f"hard {n}"} for n in range(16)]
ROLLOUTS = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}


def model(kind=LlamaForCausalLM, seed=0, layers=LAYERS, **config):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4}
    ids = {"vocab_size": len(TOKENIZER), "pad_token_id": TOKENIZER.pad_token_id, "num_labels": 1, "eos_token_id": 1}
    made = kind(LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=False, **ids, **config))
    for parameter in made.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.1)
    return made


def judge():
    return model(LlamaForSequenceClassification, seed=5)


TRAINERS = {
    "dpo": (DPOTrainer, DPOConfig, PAIRS, LlamaForCausalLM, {"ref_model": {"seed": 1}}, {}),
    "kto": (KTOTrainer, KTOConfig, JUDGED, LlamaForCausalLM, {"ref_model": {"seed": 1}}, {}),
    "reward": (RewardTrainer, RewardConfig, PAIRS, LlamaForSequenceClassification, {}, {}),
    "cpo": (CPOTrainer, CPOConfig, PAIRS, LlamaForCausalLM, {}, {}),
    "orpo": (ORPOTrainer, ORPOConfig, PAIRS, LlamaForCausalLM, {}, {}),
    "tpo": (TPOTrainer, TPOConfig, TRIPLES, LlamaForCausalLM, {}, {}),
    "distillation": (
        DistillationTrainer, DistillationConfig, COMPLETED, LlamaForCausalLM,
        {"teacher_model": {"seed": 1, "layers": 2 * LAYERS}}, {"max_completion_length": 6},
    ),
    "gkd": (
        GKDTrainer, GKDConfig, CHATS, LlamaForCausalLM,
        {"teacher_model": {"seed": 1, "layers": 2 * LAYERS}}, {"max_new_tokens": 6, "lmbda": 0.5},
    ),
    "grpo": (GRPOTrainer, GRPOConfig, PROMPTS, LlamaForCausalLM, {}, ROLLOUTS),
    "rloo": (RLOOTrainer, RLOOConfig, PROMPTS, LlamaForCausalLM, {}, ROLLOUTS),
}  # fmt: skip
RESIDENT = {"memory": "off", "resident_layers": None, "share_rows": "off"}
REFERENCES = {"grpo": True, "rloo": True}
"""Those that load their reference by its name."""


def made(name, folder, streamed, *, peft_config=None, config=None, others=None, policy=None, our_class=None, **options):
    trainer_class, config_class, rows, kind, beside, own = TRAINERS[name]
    values = {
        "max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 0.1,
        "optim": "adamw_torch", "report_to": "none", "use_cpu": True, "save_strategy": "no", "logging_steps": 1,
        "bf16": False, "disable_tqdm": True, "seed": 1, **own, **options,
    }  # fmt: skip
    if streamed:
        config_class = CONFIGS.get(config_class) or hybrid_config(config_class)
        trainer_class = our_class or OURS.get(trainer_class, trainer_class)
        if not issubclass(trainer_class, HybridTrainerMixin):
            trainer_class = type(f"Hybrid{name}", (HybridTrainerMixin, trainer_class), {})
        phases = {"share_rows": "off"} if name in ("grpo", "rloo") else {"enable_predict": False}
        values = {"memory": "stream", "resident_layers": 0, **phases, **values}
    policy = policy or model(kind, **(config or {}))
    keywords = {other: model(**given) for other, given in beside.items()} if others is None else others
    if peft_config is not None or "precompute_ref_log_probs" in options:
        keywords.pop("ref_model", None)
    if REFERENCES.get(name):
        path = str(folder.parent / "policy")
        model(kind, **(config or {})).save_pretrained(path)
        policy = kind.from_pretrained(path)
        keywords["reward_funcs"] = [reward_of_text, judge()]
        keywords["reward_processing_classes"] = [None, TOKENIZER]
    if name == "gkd":
        TOKENIZER.chat_template = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] }}{% endfor %}"
    return trainer_class(
        model=policy,
        args=config_class(str(folder), **values),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:4]),
        processing_class=TOKENIZER,
        peft_config=peft_config,
        **keywords,
    )


def trained(*args, resume=None, **options):
    trainer = made(*args, **options)
    torch.manual_seed(7)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def lora(**options):
    return LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0, **options)


def check_same(theirs, ours):
    assert losses(ours) == losses(theirs) and len(losses(ours)) == theirs.state.max_steps
    assert_same_weights(weights(ours.model), weights(theirs.model))
    return ours.memory_summary()["statistics"]


@pytest.mark.parametrize("name", mostly_slow(TRAINERS, ["dpo", "distillation", "grpo"]))
def test_weights_are_those_of_trl(name, tmp_path, caplog):
    theirs, ours = (trained(name, tmp_path / str(streamed), streamed) for streamed in (False, True))
    found = check_same(theirs, ours)
    assert found["streamed_units"] == LAYERS and found["loads"] > 3 * LAYERS
    assert ours.memory.window.by_layer and "micro-batch by micro-batch" not in caplog.text


IN_CHUNKS = {
    "streamed": ({"beta": 0.5, "lmbda": 0.5}, {}),
    "streamed, adapters": ({"beta": 1.0, "lmbda": 0.0, "peft_config": lora}, {}),
    "resident, a cap and a factor": (
        {
            "beta": 0.0, "lmbda": 0.0, "seq_kd": True, "policy": lambda: build_model("gemma2"),
            "others": lambda: {"teacher_model": build_model("cohere", 1)},
        },
        RESIDENT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", mostly_slow(IN_CHUNKS, ["streamed"]))
def test_logits_to_distil_from_are_made_a_few_tokens_at_a_time(case, tmp_path, monkeypatch, caplog):
    options, place = IN_CHUNKS[case]
    runs, seen, logits = [], [], distillation.ChunkedDistance._logits
    monkeypatch.setattr(distillation, "DISTANCE_LOGITS", 3 * 256)
    monkeypatch.setattr(distillation.ChunkedDistance, "_logits", lambda *args: seen.append(logits(*args)) or seen[-1])
    for streamed in (False, True):
        own = {name: value() if callable(value) else value for name, value in options.items()}
        own |= {"chunked_loss": "on", **place} if streamed else {}
        own |= {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 1e-2, "optim": "sgd"}
        random.seed(3)
        runs.append(trained("gkd", tmp_path / str(streamed), streamed, **own))
    theirs, ours = (weights(trainer.model) for trainer in runs)
    assert 400 < max(map(torch.Tensor.numel, seen)) <= 3 * 256 and len(seen) > 30 and "chunked_loss" not in caplog.text
    for key in ("loss", "eval_loss"):
        logged = [[entry[key] for entry in run.state.log_history if key in entry] for run in runs]
        assert logged[1] == pytest.approx(logged[0], rel=1e-5) and len(logged[0]) > 1
    assert all(torch.allclose(theirs[name], ours[name], rtol=0, atol=1e-6) for name in theirs)


def test_a_distance_of_a_users_own_sees_all_logits(tmp_path):
    class Mine(HybridGKDTrainer):
        @staticmethod
        def generalized_jsd_loss(student_logits, teacher_logits, **given):
            return GKDTrainer.generalized_jsd_loss(student_logits, 2 * teacher_logits, **given)

    trainer = made("gkd", tmp_path, True, chunked_loss="on", our_class=Mine)
    with pytest.raises(ValueError, match="`Mine.generalized_jsd_loss` is not TRL's"):
        trainer.train()


def loads_per_window(trainer, steps=3):
    """Copies of a layer in an optimizer step: of the policy and of models that are evaluated, from the second on."""
    counts = []

    class Count(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            found = trainer.memory.statistics()
            counts.append((found["loads"], found.get("evaluated", {}).get("loads", 0)))

    trainer.add_callback(Count())
    torch.manual_seed(7)
    trainer.train()
    return [(after - before) for before, after in zip(counts[1], counts[2])]


def adapters_over(pack):
    return get_peft_model(pack(model()), lora(init_lora_weights=False))


SHARED = {
    "dpo": ("dpo", {}, (2, 1)),
    "dpo, adapters": ("dpo", {"peft_config": lora}, (2, 0)),
    "dpo, adapters, a single micro-batch": ("dpo", {"peft_config": lora, "gradient_accumulation_steps": 1}, (2, 0)),
    "dpo, adapters over int8": ("dpo", {"policy": lambda: adapters_over(in_int8), "others": dict}, (2, 0)),
    "dpo, adapters over 4 bits": ("dpo", {"policy": lambda: adapters_over(in_four_bits), "others": dict}, (2, 0)),
    "dpo, all graphs kept": ("dpo", {"peft_config": lora, "gradient_checkpointing": False}, (2, 0)),
    "kto": ("kto", {}, (2, 1)),
    "kto, adapters": ("kto", {"peft_config": lora}, (2, 0)),
    "kto, adapters, no distance": ("kto", {"peft_config": lora, "loss_type": "apo_zero_unpaired"}, (2, 0)),
    "reward": ("reward", {}, (2, 0)),
    # Completions take a copy for each of their tokens, and log-probabilities before the update one.
    "grpo": ("grpo", {"gradient_accumulation_steps": 4}, (2 + 6, 1 + 1)),
    "grpo, adapters": (
        "grpo",
        {"peft_config": lora, "steps_per_generation": 4, "others": lambda: {"reward_funcs": [reward_of_text]}},
        (2 + 6 + 1, 0),
    ),
    "rloo": ("rloo", {"gradient_accumulation_steps": 4}, (2 + 6 + 1, 1 + 1)),
    "rloo, adapters": (
        "rloo",
        {"peft_config": lora, "gradient_accumulation_steps": 4, "others": lambda: {"reward_funcs": [reward_of_text]}},
        (2 + 6 + 1, 0),
    ),
}


@pytest.mark.parametrize("case", mostly_slow(SHARED, ["dpo, adapters", "kto, adapters", "rloo, adapters"]))
def test_rows_share_and_a_layer_comes_in_once_for_all_passes(case, tmp_path, monkeypatch):
    """Policy and reference are computed in one visit if they are one base, and so is KTO's distance."""
    name, options, most = SHARED[case]
    if "adapters" in case:
        monkeypatch.setitem(REFERENCES, name, False)

    def of_case(**own):
        given = {key: value() if callable(value) else value for key, value in options.items()}
        return {"optim": "sgd", "learning_rate": 1e-2, **given, **own}

    own = {"base_precision": "int8"} if "int8" in case else {}
    theirs, trains = trained(name, tmp_path / "theirs", False, **of_case()), "lora" if "adapters" in case else ""
    for shares in ("on", "off"):
        ours = made(name, tmp_path / shares, True, **of_case(share_rows=shares, **own))
        copies, found, shared = loads_per_window(ours), weights(ours.model), shares == "on"
        for key, weight in weights(theirs.model).items():
            assert trains not in key or torch.allclose(found[key], weight, rtol=0, atol=1e-6 * shared), key
        assert losses(ours) == pytest.approx(losses(theirs), abs=1e-5 * shared)
        assert (ours.hybrid_summary().get("tokens_shared", 0) > 0) == shared
        assert ours.memory.window.by_layer and all(a <= b * LAYERS for a, b in zip(copies, most)), copies


def twice(kind):
    """A trainer with a method of a user's, which reads what a pass tells."""

    class Twice(kind):
        def _compute_kl_logps(self, model, batch):
            return 2 * super()._compute_kl_logps(model, batch)

    return Twice


def test_methods_of_a_user_get_what_passes_tell(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "hf_hybrid")
    theirs = twice(KTOTrainer)
    monkeypatch.setitem(OURS, theirs, twice(HybridKTOTrainer))
    monkeypatch.setitem(TRAINERS, "kto", (theirs, *TRAINERS["kto"][1:]))
    runs = [trained("kto", tmp_path / str(s), s, peft_config=lora(), max_steps=2) for s in (False, True)]
    check_same(*runs)
    assert "walk of its own (`memory`): `Twice._compute_kl_logps` is not TRL's" in caplog.text


def test_memory_runs_out_beside_the_policy(tmp_path, monkeypatch):
    options = {"max_grad_norm": 0.0, "optim": "sgd", "max_steps": 2, "learning_rate": 1e-2}
    theirs = trained("dpo", tmp_path / "theirs", False, peft_config=lora(), **options)
    use, calls = dpo_trainer.use_adapter, []

    def fail_once(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:  # in the second step
            raise torch.OutOfMemoryError("planted")
        return use(*args, **kwargs)

    monkeypatch.setattr(dpo_trainer, "use_adapter", fail_once)
    ours = trained("dpo", tmp_path / "ours", True, peft_config=lora(), **options)
    assert [event["action"] for event in ours.hybrid_summary()["out_of_memory"]] and len(calls) > 4
    pairs = zip(weights(theirs.model).values(), weights(ours.model).values(), strict=True)
    assert all(torch.allclose(weight, other, rtol=0, atol=1e-6) for weight, other in pairs)


CASES = {
    "adapters": {"peft_config": lora},
    "adapters, a trained copy of the embeddings": {"peft_config": lambda: lora(modules_to_save=["embed_tokens"])},
    "precomputed": {"precompute_ref_log_probs": True},
    "adapters, precomputed": {"peft_config": lora, "precompute_ref_log_probs": True},
    "reference that follows": {"sync_ref_model": True, "ref_model_sync_steps": 2},
    "losses": {"loss_type": ["ipo", "sft", "apo_zero"], "loss_weights": [1.0, 0.5, 0.3]},
}


@pytest.mark.parametrize(
    "walk, case",
    mostly_slow(
        [*itertools.product(["layer", "micro_batch"], CASES)], [("layer", "adapters"), ("micro_batch", "precomputed")]
    ),
)
def test_preference_pairs(case, walk, tmp_path):
    options = {name: value() if callable(value) else value for name, value in CASES[case].items()}
    theirs = trained("dpo", tmp_path / "theirs", False, gradient_accumulation_steps=2, **options)
    options = {name: value() if callable(value) else value for name, value in CASES[case].items()}
    own = {"gradient_accumulation_steps": 2, "accumulation_walk": walk}
    ours = made("dpo", tmp_path / "ours", True, **own, **options)
    policy, reference = loads_per_window(ours)
    check_same(theirs, ours)
    passes, by_layer = (1, True) if walk == "layer" else (2, False)
    precomputed = "precompute_ref_log_probs" in options
    # Two slots hold the layers at which a pass turns round, and those that the next begins with.
    adapters = "peft_config" in options
    assert policy <= passes * LAYERS * (2 + (adapters and not precomputed and not by_layer))
    ends = 2  # embeddings and head share a slot
    assert reference == (0 if adapters or precomputed else passes * (LAYERS + ends))


def in_int8(base):
    """The same model with the matrices of its layers rounded as an int8 base rounds them."""
    for weight in base.model.layers.parameters():
        if weight.dim() == 2:
            dequantize_rows(*quantize_rows(weight.data), weight.data)
    return base


def in_four_bits(base):
    """The same model, whose layers hold their matrices in 4 bits."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for parent in [part for layer in base.model.layers for part in (layer.self_attn, layer.mlp)]:
        for name, old in list(parent.named_children()):
            if isinstance(old, torch.nn.Linear):
                sizes = old.in_features, old.out_features
                new = bitsandbytes.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4")
                new.weight = bitsandbytes.nn.Params4bit(old.weight.data, False, quant_type="nf4", module=new)
                setattr(parent, name, new.to("cpu"))
    return base


@pytest.mark.parametrize(
    "kind, name",
    mostly_slow([*itertools.product(["int8", "nf4"], ["dpo", "grpo"])], [("int8", "dpo"), ("nf4", "grpo")]),
)
def test_adapters_over_a_base_in_few_bits(kind, name, tmp_path, monkeypatch):
    packed, own = (in_int8, {"base_precision": "int8"}) if kind == "int8" else (in_four_bits, {})
    monkeypatch.setitem(REFERENCES, name, False)
    options = {"others": {"reward_funcs": [reward_of_text]} if name == "grpo" else {}, "max_steps": 2}
    theirs, ours = (
        trained(
            name, tmp_path / str(streamed), streamed, **options, **(own if streamed else {}),
            policy=get_peft_model(packed(model()), lora()),
        )
        for streamed in (False, True)
    )  # fmt: skip
    assert losses(ours) == losses(theirs)
    trained_weights = ({n: w for n, w in weights(t.model).items() if "lora" in n} for t in (theirs, ours))
    assert_same_weights(*trained_weights)


def test_adapters_that_are_trained_on_have_a_copy_as_reference(tmp_path):
    """TRL exchanges the active adapter around the pass of the reference, inside of each micro-batch."""
    start = get_peft_model(model(), lora(init_lora_weights=False))
    start.save_pretrained(tmp_path / "adapter")

    def policy():
        return PeftModel.from_pretrained(model(), tmp_path / "adapter", is_trainable=True)

    theirs = trained("dpo", tmp_path / "theirs", False, policy=policy(), others={})
    ours = trained("dpo", tmp_path / "ours", True, policy=policy(), others={})
    assert "ref" in ours.model.peft_config
    check_same(theirs, ours)
    assert ours.model.active_adapter == theirs.model.active_adapter == "default"


def test_a_reference_that_was_put_on_devices_is_streamed(tmp_path):
    """As TRL loads it, with accelerate's hooks: of what did not fit on the device they hold the weights."""
    theirs = trained("dpo", tmp_path / "theirs", False)
    reference = cpu_offload(model(seed=1), torch.device("cpu"))
    assert reference.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    reference.hf_device_map = {"model.layers.0": "cpu", "": 0}
    ours = trained("dpo", tmp_path / "ours", True, others={"ref_model": reference})
    check_same(theirs, ours)
    assert ours.memory.statistics()["evaluated"]["loads"] > 0


ARCHITECTURES = (
    "llama", "qwen3_moe", "qwen3_next", "mixtral", "gemma3_text", "gpt2", "gpt_neox", "phi3", "lfm2", "bamba",
    "mamba2", "deepseek_v3", "gpt_oss",
)  # fmt: skip
TIED = {"gemma3_text", "gpt2", "lfm2"}
"""Embeddings and head add up their gradients in another order."""


@pytest.mark.parametrize("kind", mostly_slow(ARCHITECTURES, ["qwen3_moe"]))
def test_architectures(kind, tmp_path, caplog):
    """A mixture's loss reads router logits, which hooks take out of layers: its micro-batches are walked one by one."""
    runs = [
        trained(
            "dpo", tmp_path / str(streamed), streamed, policy=build_model(kind), learning_rate=1e-2, max_steps=2,
            others={"ref_model": build_model(kind, 1)}, per_device_train_batch_size=1,
        )
        for streamed in (False, True)
    ]  # fmt: skip
    theirs, ours = (weights(trainer.model) for trainer in runs)
    assert all(torch.allclose(theirs[n], ours[n], rtol=0, atol=2e-5 if kind in TIED else 0) for n in theirs)
    assert ours.keys() == theirs.keys() and runs[1].memory.statistics()["evaluated"]["loads"] > 0
    assert runs[1].memory.window.by_layer == ("router" not in caplog.text)


def test_a_killed_run_goes_on(tmp_path):
    options = {"peft_config": lora(), "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trained("dpo", tmp_path / "whole", True, **options)
    options |= {"peft_config": lora(), "resume": str(tmp_path / "whole" / "checkpoint-2")}
    resumed = trained("dpo", tmp_path / "resumed", True, **options)
    assert_same_weights(weights(resumed.model), weights(whole.model))


@pytest.mark.parametrize("name", ["dpo", "distillation"])
def test_memory_runs_out_in_the_pass_of_a_model_that_is_evaluated(name, tmp_path):
    """The window is computed again, in parts: its update is that of the whole micro-batches."""
    options = {"max_grad_norm": 0.0, "optim": "sgd", "max_steps": 2}
    theirs, ours = trained(name, tmp_path / "theirs", False, **options), made(name, tmp_path / "ours", True, **options)
    other, failed = ours.ref_model if name == "dpo" else ours.teacher_model, []

    def fail(layer, args):
        if len(failed) < 1 and ours.state.global_step == 1:
            failed.append(1)
            raise torch.OutOfMemoryError("planted")

    other.model.layers[2].mlp.register_forward_pre_hook(fail)
    torch.manual_seed(7)
    ours.train()
    assert failed and [event["action"] for event in ours.hybrid_summary()["out_of_memory"]]
    pairs = zip(weights(theirs.model).values(), weights(ours.model).values(), strict=True)
    assert all(torch.allclose(weight, other, rtol=0, atol=1e-6) for weight, other in pairs)


OUT_OF_MEMORY = {
    "update": ("grpo", True, 1, ["split micro-batches"], {}),
    "update, twice": ("rloo", True, 2, ["split micro-batches", "walk by micro-batch"], {}),
    "update, of tokens": ("grpo", True, 1, ["split micro-batches"], {"loss_type": "bnpo", "beta": 0.0}),
    "update, on the device": ("grpo", False, 1, ["split micro-batches"], {"loss_type": "grpo"}),
    "reference": ("grpo", True, 0, ["split log-probabilities"], {}),
    "reference, on the device": ("rloo", False, 0, ["split log-probabilities"], {}),
}


@pytest.mark.parametrize("case", mostly_slow(OUT_OF_MEMORY, ["update", "update, on the device", "reference"]))
def test_completions_are_made_once_when_memory_runs_out(case, tmp_path, monkeypatch):
    name, streamed, fails, actions, own = OUT_OF_MEMORY[case]
    options = {"max_grad_norm": 0.0, "optim": "sgd", "max_steps": 3, "temperature": 1.0, **own}
    theirs = trained(name, tmp_path / "theirs", False, **options)
    ours = made(name, tmp_path / "ours", True, **options, **({} if streamed else RESIDENT))
    planted, rewarded, silu, reward = [], [], torch.nn.functional.silu, ours.reward_funcs[0]

    def fail(*_):
        if ours.state.global_step == 1 and len(planted) < max(fails, 1):
            planted.append(1)
            raise torch.OutOfMemoryError("planted")

    if fails:
        update = lambda *given, **more: (fail() if torch.is_grad_enabled() else None) or silu(*given, **more)  # noqa: E731
        monkeypatch.setattr(torch.nn.functional, "silu", update)
    else:
        ours.ref_model.model.layers[2].mlp.register_forward_pre_hook(fail)
    ours.reward_funcs[0] = lambda *given, **more: rewarded.append(1) or reward(*given, **more)
    torch.manual_seed(7)
    ours.train()
    assert [event["action"] for event in ours.hybrid_summary()["out_of_memory"]] == actions
    assert len(planted) == max(fails, 1) and len(rewarded) == 3
    pairs = zip(weights(theirs.model).values(), weights(ours.model).values(), strict=True)
    assert all(torch.allclose(weight, other, rtol=0, atol=1e-6) for weight, other in pairs)
    entries = [[entry for entry in run.state.log_history if "loss" in entry] for run in (theirs, ours)]
    for key in ("loss", "reward", "completions/mean_length"):
        assert [e[key] for e in entries[1]] == pytest.approx([e[key] for e in entries[0]], rel=1e-4, abs=1e-6)


def easy_or_hard(prompts, completions, **_):
    """Prompts with an odd number give no advantage."""
    pairs = zip(prompts, completions)
    return [1.0 if int(prompt[5:]) % 2 else sum(map(ord, text)) % 7 / 7 for prompt, text in pairs]


def test_rows_without_advantage_are_left_out_of_streamed_layers_too(tmp_path, monkeypatch):
    """Micro-batches that are empty then call no layer, and the window is walked without them."""
    monkeypatch.setitem(REFERENCES, "grpo", False)
    options = {"others": {"reward_funcs": [easy_or_hard]}, "beta": 0.0, "gradient_accumulation_steps": 4}
    resident = trained("grpo", tmp_path / "resident", True, **options, **RESIDENT)
    streamed = trained("grpo", tmp_path / "streamed", True, **options)
    check_same(resident, streamed)
    found = streamed.hybrid_summary()
    assert found["backward_passes_avoided_exactly"] > 0 and found["rows_skipped"] > 0
    assert streamed.memory.window.by_layer


def budget(trainer, mode):
    """A budget in GiB that a plan of this kind needs, and hardly more."""
    estimator, setup = estimator_for(trainer, None)
    setup = replace(setup, vram=None, evaluated_on_host=mode != "resident", kept_graphs=0)
    plan = estimator.streamed(setup, 0, False) if mode == "streamed" else estimator.lightest(setup)
    return 1.001 * plan.peak_device_bytes / 2**30


def test_auto_streams_what_has_to_be(tmp_path):
    """All on the device, then the layers of models that are evaluated on the host, then all layers."""
    deep = {"config": {"layers": 12}, "per_device_train_batch_size": 1}
    asked = made("dpo", tmp_path, True, memory="auto", resident_layers=None, **deep)
    theirs = trained("dpo", tmp_path / "theirs", False, **deep)
    for mode in ("resident", "evaluated", "streamed"):
        options = {"memory": "auto", "resident_layers": None, "vram_budget_gib": budget(asked, mode), **deep}
        ours = trained("dpo", tmp_path / mode, True, share_rows="off", **options)
        assert ours.memory.streams == (mode == "streamed") and (ours.memory.evaluated is None) == (mode == "resident")
        assert_same_weights(weights(ours.model), weights(theirs.model))
        assert mode == "resident" or ours.memory.statistics()["evaluated"]["loads"] > 0


def test_what_is_trained_is_not_streamed_as_evaluated(tmp_path):
    """A second model with an optimizer of the user's, whose loss nobody knows."""

    class Two(HybridTrainerMixin, RewardTrainer):
        def __init__(self, *args, other, **given):
            self.other = other
            super().__init__(*args, **given)

        def compute_loss(self, model, inputs, *args, **given):
            return super().compute_loss(model, inputs, *args, **given)

    args = hybrid_config(RewardConfig)(str(tmp_path), memory="stream", enable_predict=False, use_cpu=True, bf16=False)
    rows = Dataset.from_list(PAIRS)
    for frozen in (False, True):
        other = judge().requires_grad_(not frozen)
        trainer = Two(judge(), args, train_dataset=rows, processing_class=TOKENIZER, other=other)
        assert (trainer.memory.evaluated is None) == (not frozen)
        assert all(parameter.requires_grad != frozen for parameter in other.parameters())
