"""Plans from a config: equal to what torch's own tracker and real runs hold, though most layers are left out."""

import copy
import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import ByteText, config_values, hybrid_config, tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import TrainerCallback

from hf_hybrid import HybridTrainer
from hf_hybrid.compat import checkpointing_option
from hf_hybrid.export.bitnet import to_bitnet
from hf_hybrid.plan.accounting import ModelShape, measure_held
from hf_hybrid.plan.estimate import Estimator, PlanError
from hf_hybrid.plan.models import add_adapters, build, lora_config, read_config
from hf_hybrid.plan.planner import Planner, plan_memory, recommended
from hf_hybrid.plan.setups import Setup
from hf_hybrid.plan.stand_ins import packed_bytes
from hf_hybrid.plan.trace import (
    TRACED,
    Excerpt,
    Tracer,
    _tensors_without_data,
    enable_checkpointing,
    state_bytes,
    trace_step,
    unfold,
)
from hf_hybrid.plan.ways import Way, parse_size
from hf_hybrid.streaming.layers import decoder_layers, find_layers
from hf_hybrid.streaming.low_bit import AdamW8bit

GIB = 2**30
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
}
HYBRID = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32,
    "first_k_dense_replace": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
    "gpt2": transformers.GPT2Config(vocab_size=512, n_embd=64, n_layer=6, n_head=4, n_positions=128),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, head_dim=16, num_key_value_heads=2, sliding_window=16, **HYBRID),
    "deepseek": transformers.DeepseekV3Config(**SIZES, **EXPERTS),
}


def tracer(config, all_layers: bool = False, adapters: bool = False) -> Tracer:
    """Of a few layers, or of all of them."""
    whole = build(config, torch.float32)
    excerpt = Excerpt.of(whole)
    if all_layers:
        whole.config.use_cache = False
        whole.set_attn_implementation(excerpt.model.config._attn_implementation)
        excerpt = Excerpt(whole.train(), tuple(range(config.num_hidden_layers)), excerpt.listed)
    model = add_adapters(excerpt.model, lora_config(4)) if adapters else excerpt.model
    return Tracer(dataclasses.replace(excerpt, model=model))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("llama", {}, marks=pytest.mark.slow),
        pytest.param("llama", {"chunked_loss": True, "gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        ("llama", {"adapters": True, "activation_checkpointing": True}),
        pytest.param("gpt2", {"activation_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param("gemma3", {}, marks=pytest.mark.slow),
        ("deepseek", {"activation_checkpointing": True, "autocast": False}),
    ],
)
@pytest.mark.long
def test_layers_that_are_left_out_change_nothing(name, changes):
    """The excerpt has fewer layers than the model, and gives its peak to the byte."""
    options = {"autocast": True, "accelerator": "cuda", **changes}
    adapters = options.pop("adapters", False)
    some, whole = (tracer(CONFIGS[name], all_layers, adapters) for all_layers in (False, True))
    assert len(set(some.excerpt.stands_for)) < len(whole.excerpt.stands_for) == 6
    setup = Setup(32, 2, **options)
    assert some.peak(setup, 0) == whole.peak(setup, 0)
    assert some.activations(setup) == whole.activations(setup)


@pytest.mark.parametrize(
    ("name", "counts"), [("llama", (1, 4)), ("gemma3", (3,)), pytest.param("deepseek", (2, 5), marks=pytest.mark.slow)]
)
@pytest.mark.long
def test_peaks_with_some_layers_recomputed_are_those_of_all_layers(name, counts):
    """A trace of two layers of each kind gives the peak of a step of the whole model, to the byte."""
    some, whole = tracer(CONFIGS[name]), tracer(CONFIGS[name], all_layers=True)
    setup = Setup(32, 2, autocast=True, accelerator="cuda", activation_checkpointing="auto")
    peaks = []
    for count in counts:
        with FakeTensorMode():
            model = copy.deepcopy(whole.excerpt.model, _tensors_without_data(whole.excerpt.model, "cpu"))
            layers = decoder_layers(model)
            enable_checkpointing(model, "cuda", without=layers[count:])
            traced = trace_step(model, layers, setup)
        peaks.append(unfold(traced, whole.excerpt.stands_for))
        assert some.peak(dataclasses.replace(setup, recomputed_layers=count), 0) == peaks[-1]
    none, every = (some.peak(dataclasses.replace(setup, recomputed_layers=count), 0) for count in (0, 6))
    held = [sum(peak.held) for peak in (none, *peaks, every)]
    assert held == sorted(held, reverse=True) and held[0] > held[-1]


@pytest.mark.parametrize(
    ("checkpointing", "dtype", "qat"),
    [(False, "mixed", "none"), (True, "mixed", "none"), (False, "mixed", "bitnet"), (False, "float32", "bitnet")],
)
@pytest.mark.long
def test_the_peak_is_that_of_torchs_tracker_over_a_real_step(checkpointing, dtype, qat):
    """On tensors with data, through the model's own attention."""
    model = tiny_model(num_hidden_layers=5, vocab_size=1024, use_cache=False).train()
    asked = {"sequence_length": 48, "batch_size": 4, "activation_checkpointing": checkpointing, "dtype": dtype}
    planned = plan_memory(model, qat=qat, memory="off", accelerator="cpu", **asked)
    if qat == "bitnet":
        less = plan_memory(model, memory="off", accelerator="cpu", **asked)
        assert planned.peak_device_bytes > 1.01 * less.peak_device_bytes
        to_bitnet(model)
    if checkpointing:
        enable_checkpointing(model, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    batch = torch.randint(1024, (4, 48))
    tracker = MemTracker()
    tracker.track_external(model, optimizer, batch)
    with tracker, torch.compiler.set_stance("force_eager"):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "mixed"):
            loss = model(input_ids=batch, labels=batch)["loss"]
        loss.backward()
        optimizer.step()
    measured = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    # accelerate's fp32 copy of the logits is in the plan, and not in this step; it is not there at the peak.
    assert planned.stage == "backward"
    assert planned.peak_device_bytes == pytest.approx(measured, rel=0.01)


class AtTheUpdate(TrainerCallback):
    """What model and optimizer hold when an update is due, with the states of the step before."""

    def on_pre_optimizer_step(self, args, state, control, model, optimizer, **kwargs):
        self.held = measure_held(model, getattr(optimizer, "optimizer", optimizer))


@pytest.mark.parametrize("states", ["exact", "8bit"])
def test_weights_gradients_and_states_are_those_of_a_run(tmp_path, states):
    """Planned with accumulation, so that all gradients are there at the peak as they are at the update."""
    model = tiny_model(hidden_size=128, intermediate_size=256)
    asked = {"sequence_length": 2, "dtype": "float32", "memory": "off", "gradient_accumulation_steps": 2}
    planned = plan_memory(model, optimizer_states=states, **asked)
    seen = AtTheUpdate()
    config = hybrid_config(tmp_path, max_steps=2, enable_predict=False, optimizer_states=states)
    HybridTrainer(model, config, train_dataset=ByteText(40), callbacks=[seen]).train()
    for category in ("weights", "gradients"):
        assert planned.table.get(category, "device") == seen.held.get(category, "host")
    # The 8-bit optimizer keeps the number of the step and that of the parameter on the host.
    on_host = (4 + 8) * sum(1 for _ in model.parameters()) if states == "8bit" else 0
    assert planned.table.get("states", "device") == seen.held.get("states", "host") - on_host


def test_a_streamed_plan_holds_what_the_engine_holds(tmp_path):
    model = tiny_model(num_hidden_layers=4, vocab_size=1024)
    asked = {"dtype": "float32", "memory": "stream", "accelerator": "cpu"}
    planned = plan_memory(model, sequence_length=32, batch_size=4, vram="3MiB", **asked)
    options = {name: planned.options[name] for name in ("memory", "resident_layers")}
    config = hybrid_config(tmp_path, max_steps=2, enable_predict=False, **options)
    trainer = HybridTrainer(model, config, train_dataset=ByteText(40))
    trainer.train()
    held = trainer.memory_summary()["held"]
    assert planned.resident_layers == trainer.memory.plan.resident_layers
    for category in ("weights", "gradients", "states"):
        assert planned.table.get(category, "host") == pytest.approx(held[category]["host"], rel=0.01)


def ask_both(model, vram, tmp_path, **asked):
    """The plan of `plan_memory` and of a trainer, for the same setup."""
    data, ram = ByteText(40), 2**30
    batch = {"gradient_accumulation_steps": asked.get("gradient_accumulation_steps", 1)}
    planned = plan_memory(
        model, sequence_length=32, batch_size=4, dtype="float32", vram=vram, ram=ram, accelerator="cpu", **asked
    )
    options = {name: asked[name] for name in ("memory", "enable_predict", "optimizer_states") if name in asked}
    if "qat" in asked:
        to_bitnet(model)
    budgets = {"vram_budget_gib": vram / 2**30, "host_budget_gib": ram / 2**30}
    config = hybrid_config(tmp_path, **batch, **options, **budgets)
    try:
        return planned, HybridTrainer(model, config, train_dataset=data)
    except PlanError as refusal:
        return planned, refusal


@pytest.mark.parametrize(
    ("share", "asked"),
    [
        (1.0, {}),
        (0.999, {"enable_predict": True}),
        (0.7, {"gradient_accumulation_steps": 3}),
        pytest.param(0.5, {}, marks=pytest.mark.slow),
        (0.3, {}),
        pytest.param(1.0, {"qat": "bitnet"}, marks=pytest.mark.slow),
        (0.7, {"qat": "bitnet"}),
    ],
)
@pytest.mark.long
def test_trainer_and_plan_give_the_same_answer(share, asked, tmp_path):
    """From what just fits on the device to what cannot be trained; also which layers stay there, to the byte."""
    model = tiny_model(num_hidden_layers=6, vocab_size=1024)
    asked = {"memory": "auto", "enable_predict": False, **asked}
    resident = plan_memory(
        model, sequence_length=32, batch_size=4, dtype="float32", accelerator="cpu", **{**asked, "memory": "off"}
    )
    planned, answer = ask_both(model, int(share * resident.peak_device_bytes), tmp_path, **asked)
    if isinstance(answer, PlanError):
        assert not planned.fits and answer.plan.table == planned.table
    elif not answer.memory.streams:
        assert planned.fits and planned.mode == "resident" and share == 1.0
    else:
        theirs = answer.memory.plan
        assert planned.fits and planned.mode == "streamed" and theirs.traced
        assert theirs.to_dict() == planned.to_dict()


def test_a_live_model_is_traced_as_it_is(tmp_path):
    """Also with a packed base and adapters; its weights, its mode and the random state are left alone."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = tiny_model(num_hidden_layers=5, hidden_size=64).eval()
    for layer in model.model.layers:
        layer.mlp.up_proj = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32)
    model = add_adapters(model, lora_config(4)).eval()
    before, state = list(model.parameters()), torch.get_rng_state()
    live = Tracer.of(model)
    assert live.excerpt.stands_for == (0, 1, 1, 1, 2)
    assert live.activations(Setup(32, 2)).boundary > 0 and live.peak(Setup(32, 2), 0).get("activations") > 0
    assert all(mine is theirs for mine, theirs in zip(before, model.parameters())) and not model.training
    assert torch.equal(state, torch.get_rng_state()) and len(model.base_model.model.model.layers) == 5


def test_boundaries_of_a_resident_model_wait_on_the_host():
    model = tiny_model(num_hidden_layers=6)
    shape = ModelShape.of(model, [name for name, _ in find_layers(model)])
    live = Estimator(shape, Tracer.of(model))
    near, far = (live.plan(Setup(64, 4, memory="off", offload_activations=away)).table for away in (False, True))
    assert far.get("activations", "host") == 4 * live.tracer.activations(Setup(64, 4)).boundary
    assert far.get("activations", "device") < near.get("activations", "device")
    tiny = live.plan(Setup(1, 1, memory="off", offload_activations=True))  # its peak is at the update
    assert tiny.table.get("activations", "device") >= 0


def test_a_model_that_cannot_be_traced_is_estimated():
    class NeedsValues(torch.nn.Module):
        def forward(self, hidden_states, **kwargs):
            return hidden_states * float(hidden_states.sum())

    model = tiny_model(num_hidden_layers=3)
    for layer in model.model.layers:
        layer.mlp = NeedsValues()
    shape = ModelShape.of(model, [name for name, _ in find_layers(model)])
    for memory in ("off", "stream"):
        answers = [Estimator(shape, tracer).plan(Setup(32, memory=memory)) for tracer in (Tracer.of(model), None)]
        assert answers[0].table == answers[1].table and not answers[0].traced


@pytest.mark.parametrize("kind, traced", [("FourierFTConfig", True), ("ShiraConfig", False)])
def test_indices_that_adapters_keep_beside_their_weights_are_traced_or_estimated_in_silence(kind, traced, caplog):
    """Torch logged a traceback. SHiRA's sparse weights have no storage that could be followed."""
    peft, log = pytest.importorskip("peft"), logging.getLogger("torch._subclasses.fake_tensor")
    sizes = {"FourierFTConfig": {"n_frequency": 10}, "ShiraConfig": {"r": 2}}[kind]
    model = peft.get_peft_model(tiny_model(), getattr(peft, kind)(target_modules=["q_proj"], **sizes))
    shape = ModelShape.of(model, [name for name, _ in find_layers(model)])
    log.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "hf_hybrid")
    try:
        plan = Estimator(shape, Tracer.of(model)).plan(Setup(32, memory="stream"))
    finally:
        log.removeHandler(caplog.handler)
    assert plan.traced == traced and {record.name.partition(".")[0] for record in caplog.records} <= {"hf_hybrid"}
    assert ("Its activations are estimated from sizes" in caplog.text) == (not traced)


def test_boundaries_are_measured_in_tokens():
    """Between checkpointed layers one tensor is left, in fp32 under autocast; behind the last none is."""
    found = tracer(CONFIGS["llama"]).activations(Setup(32, 2, autocast=True, accelerator="cuda"))
    boundary = 2 * 32 * 64 * 4
    assert round(6 * found.boundary / boundary, 3) == 5 and found.always > boundary
    assert found.layer > boundary and found.loss > 2 * 32 * 512 * 4


def test_autocast_of_a_gpu_is_not_that_of_a_cpu():
    """GPT-2's activation function takes a power, which a GPU computes in fp32."""
    gpt2 = tracer(CONFIGS["gpt2"])
    held = [gpt2.peak(Setup(32, 2, autocast=True, accelerator=name), 0) for name in ("cuda", "cpu")]
    assert held[0].get("activations") > held[1].get("activations")
    assert held[0].get("weights") == held[1].get("weights")


def test_accumulated_gradients_are_there_from_the_start():
    asked = {"sequence_length": 32, "batch_size": 4, "memory": "off"}
    once, often = (plan_memory(CONFIGS["llama"], gradient_accumulation_steps=count, **asked).table for count in (1, 4))
    assert once.get("gradients", "device") < often.get("gradients", "device")
    total = sum(p.numel() for p in build(CONFIGS["llama"], torch.float32).parameters())
    assert often.get("gradients", "device") == 4 * total


def test_8bit_states_are_those_of_the_optimizer():
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((100, 50), (7,), (300, 100))]
    optimizer = AdamW8bit(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for parameter in parameters:
        states = optimizer.state[parameter].items()
        held = sum(t.untyped_storage().nbytes() for name, t in states if name not in ("step", "rounding_id"))
        assert held == state_bytes(parameter, Setup(32, optimizer_states="8bit"))


def test_packed_weights_are_those_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    for shape in ((64, 64), (100, 300), (512, 1024)):
        packed, state = functional.quantize_4bit(torch.randn(shape), compress_statistics=True, quant_type="nf4")
        parts = (packed, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
        held = sum(part.numel() * part.element_size() for part in parts)
        assert packed_bytes(shape[0] * shape[1]) == held


def test_a_packed_base_holds_less_and_trains_as_much():
    asked = {"sequence_length": 32, "memory": "off"}
    lora, qlora = (plan_memory(CONFIGS["llama"], peft=name, **asked) for name in ("lora", "qlora"))
    assert lora.shape.total.trainable == qlora.shape.total.trainable < lora.shape.total.weights / 2
    assert qlora.table.get("states", "device") == lora.table.get("states", "device")
    # Half a byte and the scales in place of two bytes, of what is not embeddings, head and adapters.
    assert qlora.table.get("weights", "device") < lora.table.get("weights", "device") - 1.2 * 6 * 36864


def test_what_does_not_fit_is_streamed_or_short():
    asked = {"sequence_length": 128, "batch_size": 8, "dtype": "float32", "accelerator": "cpu"}
    config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 256, "num_hidden_layers": 24})
    roomy = plan_memory(config, vram="1GiB", **asked)
    assert roomy.fits and roomy.mode == "resident" and roomy.device_shortfall == 0
    tight = plan_memory(config, vram=roomy.peak_device_bytes // 3, **asked)
    assert tight.mode == "streamed" and tight.peak_device_bytes < roomy.peak_device_bytes / 2
    resident = plan_memory(config, vram=roomy.peak_device_bytes - 1000, memory="off", **asked)
    assert not resident.fits and resident.device_shortfall == 1000
    on_gpu = plan_memory(config, vram="1GiB", **{**asked, "accelerator": "cuda"})
    assert on_gpu.margin_bytes > 0.6 * GIB and roomy.margin_bytes == 0


def test_leaps_are_counted_where_they_are_asked_for_but_for_adapters():
    asked = {"sequence_length": 32, "memory": "off"}
    without, with_leaps = (plan_memory(CONFIGS["llama"], enable_predict=on, **asked) for on in (False, True))
    assert without.categories["drift"]["device"] == 0
    assert with_leaps.categories["drift"]["device"] >= 8 * with_leaps.shape.total.trainable
    asked["peft"] = "lora"
    without, planned = (plan_memory(CONFIGS["llama"], enable_predict=on, **asked) for on in (False, True))
    assert planned.options["enable_predict"] and planned.categories == without.categories


def test_a_model_without_a_list_of_layers_is_traced_whole():
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1})
    planned = plan_memory(config, sequence_length=32, memory="off")
    assert planned.peak_device_bytes > 12 * planned.shape.total.weights
    with pytest.raises(ValueError, match="no list of decoder layers"):
        plan_memory(config, sequence_length=32, memory="stream")


def way(title, kind="full", fits=True, **setup):
    return SimpleNamespace(way=Way(title, Setup(32, **setup), kind), fits=fits)


def test_the_first_exact_plan_that_fits_is_recommended():
    plans = [
        way("resident", fits=False), way("8-bit", optimizer_states="8bit"), way("streamed"),
        way("QLoRA", "QLoRA"), way("LoRA int8", "LoRA", base_precision="int8"),
    ]  # fmt: skip
    assert recommended(plans, "full").way.title == "streamed"
    assert recommended(plans[:2], "full").way.title == "8-bit"
    assert recommended(plans[:1], "full") is None
    assert recommended(plans, "LoRA").way.title == "LoRA int8", "nothing is exact"
    assert recommended([*plans, way("LoRA", "LoRA")], "LoRA").way.title == "LoRA"
    assert recommended(plans, "QLoRA").way.title == "QLoRA"


@pytest.mark.long
def test_usual_plans_share_their_traces():
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 3})
    planner = Planner(config, sequence_length=32, vram=GIB, ram=GIB, accelerator="cuda", enable_predict=False)
    plans = planner.plans()
    titles = [plan.way.title for plan in plans]
    assert len(set(titles)) == len(titles) == 18
    assert sum(len(found.tracer.traces) for found in planner._estimators.values()) < len(plans)
    resident = {plan.way.title: plan.peak_device_bytes for plan in plans if plan.mode == "resident"}
    full = "full, bf16 autocast"
    assert resident[f"{full}, chunked loss, checkpointing"] < resident[f"{full}, chunked loss"]
    packed, adapters = (f"{name}, chunked loss, checkpointing" for name in ("QLoRA", "LoRA"))
    assert resident[packed] < resident[adapters] < resident["LoRA"] < resident[full]
    assert plans[0].options[checkpointing_option()] is False
    assert {checkpointing_option()} <= {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert set(plans[0].categories) == {*TRACED, "states", "drift", "total"}


def test_sizes():
    sizes = {
        "24GiB": 24 * GIB,
        "24GB": 24 * 10**9,
        "1.5gib": 3 * GIB // 2,
        "512 MiB": 2**29,
        "7": 7 * GIB,
        10**9: 10**9,
    }
    assert {text: parse_size(text, "vram") for text in sizes} == sizes


@pytest.mark.parametrize("text", ["24 apples", "GiB", "-1GiB", "0", "2000TiB", "", "1e9GiB"])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="`vram` must be"):
        parse_size(text, "vram")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 0}, "`sequence_length` must be at least 1, got 0"),
        ({"sequence_length": 4096}, "over the 2048 positions"),
        ({"batch_size": 0}, "`batch_size` must be at least 1"),
        ({"batch_size": 10**7}, "tokens at once"),
        ({"gradient_accumulation_steps": 0}, "`gradient_accumulation_steps` must be at least 1"),
        ({"dtype": "fp8"}, "`dtype` must be one of mixed, float32, bfloat16"),
        ({"memory": "disk"}, "`memory` must be one of"),
        ({"peft": "ia3"}, "`peft` must be lora, qlora"),
        ({"optimizer_states": "4bit"}, "`optimizer_states` must be one of"),
        ({"accelerator": "tpu"}, "`accelerator` must be one of"),
        ({"vram": "lots"}, "`vram` must be a size"),
        ({"peft": "qlora", "memory": "stream"}, "is not planned with"),
        ({"peft": "lora", "qat": "bitnet"}, "`qat=bitnet` trains all weights, and `peft` freezes them"),
        ({"qat": "int4"}, "`qat` must be none or bitnet, got `int4`"),
    ],
)
def test_arguments_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plan_memory(CONFIGS["llama"], **{"sequence_length": 32, **changes})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.BertConfig(), "is an encoder"),
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.ViTConfig(), "no causal language model"),
        (transformers.LlamaConfig(vocab_size=-8), "can be built"),
    ],
)
def test_models_that_cannot_be_planned_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        plan_memory(config, sequence_length=32)


def test_a_config_is_left_as_it_was():
    config = copy.deepcopy(CONFIGS["gemma3"])
    before = config.to_dict()
    plan_memory(config, sequence_length=32, memory="off")
    assert config.to_dict() == before
    assert read_config(tiny_model()).num_hidden_layers == 2
    assert config_values("out")["use_cpu"], "these plans ran on a CPU"
