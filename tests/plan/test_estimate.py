"""Plans: bytes by hand, big models within their targets, and refusals whose advice works."""

from dataclasses import replace

import pytest
import torch
from conftest import ByteText, hybrid_config, tiny_model
from peft import LoraConfig, get_peft_model

from hf_hybrid import HybridTrainer
from hf_hybrid.build import make_plan
from hf_hybrid.compat import checkpointing_option
from hf_hybrid.leaps.directions import DIRECTIONS, GradientMemory
from hf_hybrid.plan.accounting import ModelShape, WeightCount, storage_bytes
from hf_hybrid.plan.estimate import Estimator, Plan, PlanError, refuse
from hf_hybrid.plan.setups import Setup
from hf_hybrid.streaming.layers import embeddings_and_head, find_layers, working_dtypes
from hf_hybrid.streaming.streamer import LayerStreamer

GIB = 2**30

# The tiny Llama: four attention matrices of 32 x 32, three MLP matrices of 32 x 64, two norms; 256 tokens; one norm.
LAYER = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
SLOT = 4 * LAYER + 2 * 128  # tensors begin at multiples of 256 bytes, and a norm has 128
SLOT_IN_BF16 = 2 * (LAYER - 64) + 2 * 256  # but for the norms
EMBEDDING = 256 * 32
REST = 32
TOTAL = 2 * LAYER + EMBEDDING + REST
TOKENS = 64
BOUNDARY = TOKENS * 32 * 4
SAVED = 49 / 2 * BOUNDARY
LOGITS = TOKENS * 256 * 4


@pytest.fixture(scope="module")
def tiny() -> ModelShape:
    return ModelShape.of(tiny_model(), ["model.layers.0", "model.layers.1"])


def plan(shape: ModelShape, **setup) -> Plan:
    """Without a trace: activations are estimated from the sizes."""
    return Estimator(shape).plan(Setup(**setup))


def llama_8b() -> ModelShape:
    sizes = {"hidden": 4096, "vocab": 128256, "element_bytes": 2, "trainable_bytes": 2}
    words = WeightCount(128256 * 4096)
    return ModelShape(
        (WeightCount(218_112_000),) * 32, words, words, WeightCount(4096), **sizes, largest_trainable=128256 * 4096
    )


def adapters_on_50b() -> ModelShape:
    """64 layers of 8192, rank 16 on four matrices each, in fp32 on a bf16 base."""
    sizes = {"hidden": 8192, "vocab": 128256, "element_bytes": 2, "trainable_bytes": 4}
    layers, words = (WeightCount(1_500_000, 748_400_000),) * 64, WeightCount(0, 128256 * 8192)
    return ModelShape(layers, words, words, WeightCount(0, 8192), **sizes, largest_trainable=16 * 28672)


def columns(table, place):
    return [table.get(category, place) for category, _, _ in table.rows()]


def test_resident_by_hand(tiny):
    buffers = tiny.buffer_bytes
    result = plan(tiny, sequence_length=TOKENS)
    drift = TOTAL * (4 + 4) + 4 * EMBEDDING
    assert result.mode == "resident" and result.setup == Setup(TOKENS)
    held = [4 * TOTAL, 4 * TOTAL, 8 * TOTAL, 2 * SAVED + 2.5 * LOGITS, drift, buffers]
    assert columns(result.table, "device") == held
    assert result.peak_host_bytes == 0
    with_host = plan(tiny, sequence_length=TOKENS, buffers_device="cpu", activation_checkpointing=True)
    assert with_host.table.get("activations", "device") == 2 * BOUNDARY + -(-1.15 * SAVED // 1)
    assert with_host.table.get("drift", "host") == drift and with_host.table.get("drift", "device") == 0


def test_resident_under_autocast(tiny):
    assert plan(tiny, sequence_length=TOKENS, autocast=True).table.get("weights", "device") == (4 + 2) * TOTAL


def test_streamed_by_hand(tiny):
    result = plan(tiny, sequence_length=TOKENS, gradient_accumulation_steps=3, memory="stream", enable_predict=False)
    assert (result.mode, result.resident_layers, result.stream_embeddings) == ("streamed", 0, False)
    stay = EMBEDDING + REST
    assert columns(result.table, "device") == [
        2 * SLOT + 4 * stay,
        4 * stay + 4 * LAYER,
        8 * stay,
        2 * 3 * BOUNDARY + -(-1.15 * SAVED // 1),
        0,
        tiny.buffer_bytes,
    ]
    assert columns(result.table, "host") == [2 * SLOT, 2 * SLOT, 4 * SLOT, 0, 0, 0], "each in one piece"


def test_on_a_gpu_the_gradients_of_one_more_unit_are_leaving(tiny):
    base = {"sequence_length": TOKENS, "memory": "stream", "enable_predict": False}
    there, here = (plan(tiny, accelerator=name, **base).table.get("gradients", "device") for name in ("cuda", "cpu"))
    assert there - here == 4 * LAYER


def test_what_options_change_in_a_streamed_plan(tiny):
    base = {"sequence_length": TOKENS, "gradient_accumulation_steps": 3, "memory": "stream", "enable_predict": False}
    before = plan(tiny, **base).table

    def change(**options):
        after = plan(tiny, **{**base, **options}).table
        moved = {
            (category, place): after.get(category, place) - before.get(category, place)
            for category, _, _ in after.rows()
            for place in ("device", "host")
        }
        return {key: count for key, count in moved.items() if count}

    assert change(prefetch_layers=2) == {}, "each of the two layers has a slot"
    assert change(resident_layers=1) == {
        ("weights", "device"): 4 * LAYER - SLOT,
        ("gradients", "device"): 4 * LAYER,
        ("states", "device"): 8 * LAYER,
        ("weights", "host"): -SLOT,
        ("gradients", "host"): -SLOT,
        ("states", "host"): -2 * SLOT,
    }
    assert change(accumulation_walk="micro_batch") == {
        ("activations", "device"): -2 * 2 * BOUNDARY,
        ("gradients", "device"): 4 * 32 * 64,  # the sum so far of the largest matrix, which comes back
    }
    assert change(update_in_backward=True) == {
        ("gradients", "host"): -2 * SLOT,
        ("buffers", "device"): 2 * 2 * SLOT,  # states of two layers, beside the layer that is recomputed
    }
    in_backward = {"update_in_backward": True, "accumulation_walk": "micro_batch"}
    assert ("gradients", "host") not in change(**in_backward), "the sum of several passes lies there"
    stay = EMBEDDING + REST
    assert change(enable_predict=True) == {
        ("drift", "host"): 8 * 2 * LAYER + 4 * EMBEDDING,  # beside the weights, and scratch of the largest parameter
        ("drift", "device"): 8 * stay + 4 * EMBEDDING,
    }
    assert change(enable_predict=True, buffers_device="cpu") == {("drift", "host"): 8 * TOTAL + 4 * EMBEDDING}
    rounded = change(autocast=True)
    assert rounded.pop(("activations", "device")) == -3 * BOUNDARY - -(-1.15 * SAVED // 1)
    masters = 4 * (LAYER - 64)
    assert rounded == {
        ("weights", "device"): -2 * (SLOT - SLOT_IN_BF16),
        ("weights", "host"): 2 * (SLOT_IN_BF16 + masters - SLOT),  # the rounded copy that travels
        # Recomputing holds half as much, so the peak is the update's: masters, gradients and states of two layers.
        # In the first step the states of the largest parameter are made beside them.
        ("buffers", "device"): 2 * (masters + 3 * SLOT) + 8 * 32 * 64,
        ("gradients", "device"): -4 * LAYER,
    }
    assert change(stream_embeddings=True) == {
        ("weights", "host"): 4 * EMBEDDING,
        ("gradients", "host"): 4 * EMBEDDING,
        ("states", "host"): 8 * EMBEDDING,
        ("states", "device"): -8 * EMBEDDING,
        ("gradients", "device"): 4 * EMBEDDING,  # of a micro-batch, beside the sum of those before
    }


def test_offloaded_boundaries_leave_two(tiny):
    shape = replace(tiny, layers=tiny.layers * 4)
    options = {"sequence_length": TOKENS, "memory": "stream", "enable_predict": False}
    near, far = plan(shape, **options).table, plan(shape, **options, offload_activations=True).table
    assert far.get("activations", "host") == 7 * BOUNDARY, "all but the last layer's"
    assert near.get("activations", "device") - far.get("activations", "device") == 6 * BOUNDARY


def test_chunks_shrink_the_loss():
    options = {"sequence_length": 2048, "memory": "stream", "enable_predict": False}
    whole, chunked = (plan(adapters_on_50b(), **options, chunked_loss=chunks) for chunks in (False, True))
    boundaries = 2048 * 8192 * 2 * 64
    assert whole.table.get("activations", "device") == boundaries + 2048 * 128256 * 4 * 2.5
    assert chunked.table.get("activations", "device") == boundaries + 1024 * 128256 * 4 * 2


# Buffers of leaps.


def run(folder, memory="auto", **options):
    """A tiny run: what its leaps hold at the end, and what was planned for it."""
    keyword, config = options.pop("keyword", None), {"max_steps": 18, "logging_steps": 18, "memory": memory, **options}
    trainer = HybridTrainer(
        tiny_model(), hybrid_config(folder, **config), train_dataset=ByteText(200), direction=keyword
    )
    planned = make_plan(trainer, None)
    trainer.train()
    summary = trainer.hybrid_summary()
    assert summary["leaps"]
    return summary["buffer_bytes"], planned


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_planned_buffers_are_those_that_a_run_holds(direction, tmp_path):
    held, planned = run(tmp_path, direction=direction)
    assert sum(held.values()) == TOTAL * (4 * DIRECTIONS[direction].values_per_weight + 4) + 4 * EMBEDDING
    assert planned.table.get("drift", "device") == sum(held.values())
    assert planned.table.get("drift", "host") == 0


@pytest.mark.parametrize("options", [{}, {"plan_values": {"buffers_device": "cpu"}}], ids=str)
def test_planned_buffers_of_streamed_weights(options, tmp_path):
    held, planned = run(tmp_path, memory="stream", **options)
    scratch = 4 * EMBEDDING  # one per place; here both places are the same
    assert held["scratch"] == scratch
    places = [planned.table.get("drift", place) for place in ("device", "host")]
    assert sum(places) == sum(held.values()) + scratch * (min(places) > 0)
    assert (places[0] > 0) == ("plan_values" not in options)


def test_a_direction_of_the_user_is_planned_by_its_own_number(tmp_path):
    class Twice(GradientMemory):
        values_per_weight = 2

        def __init__(self, context):
            super().__init__(context)
            self.buffers["other"] = [context.buffer(parameter, zero=True) for parameter in context.parameters]

    held, planned = run(tmp_path, keyword=Twice)
    assert planned.table.get("drift", "device") == sum(held.values())


@pytest.mark.parametrize("rescue", ["on", "off"])
def test_adapters_are_planned_without_leaps(rescue, tmp_path):
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    options = {"direction": "auto", "auto_lr": rescue, "learning_rate": 2e-5}
    trainer = HybridTrainer(model, hybrid_config(tmp_path, **options), train_dataset=ByteText(200))
    planned = make_plan(trainer, None).table
    trainer.train()
    summary = trainer.hybrid_summary()
    assert summary["no_leaps"] and (summary["learning_rate_scale"] > 1) is (rescue == "on")
    held = sum(summary["buffer_bytes"].values())
    assert planned.get("drift", "device") == planned.get("drift", "host") == held == 0


def test_leaps_of_8bit_states_hold_as_much(tiny):
    sizes = {states: plan(tiny, sequence_length=TOKENS, optimizer_states=states).table for states in ("exact", "8bit")}
    assert len({table.get("drift", "device") for table in sizes.values()}) == 1


def test_orthogonal_leaps_need_room_to_orthogonalise():
    """An fp32 and four bf16 copies of the largest hidden matrix, at a moment when nothing else is computed."""
    options = {"sequence_length": 16, "activation_checkpointing": True}
    shape = replace(llama_8b(), largest_leap=10**9)
    along, without = plan(shape, **options).table, plan(llama_8b(), **options).table
    assert along.get("buffers", "device") == 12 * 10**9 and without.get("buffers", "device") == 0
    streamed = plan(shape, memory="stream", **options).table
    assert streamed.get("buffers", "host") == 16 * 10**9, "four in fp32 where a CPU computes"
    assert plan(shape, enable_predict=False, **options).table.get("buffers", "device") == 0


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("working", [None, torch.bfloat16])
@pytest.mark.parametrize("ends", [False, True])
def test_weights_and_gradients_are_what_the_streamer_holds(working, ends, int8):
    model = tiny_model(hidden_size=128, num_hidden_layers=4, tie_word_embeddings=False)
    if int8:
        model.model.layers.requires_grad_(False)
    layers = find_layers(model)
    streamer = LayerStreamer(
        model,
        layers,
        embeddings_and_head(model) if ends else (),
        device=torch.device("cpu"),
        resident=1,
        dtype_of=working_dtypes(model, working is not None),
        int8=int8,
    )
    planned = plan(
        ModelShape.of(model, [name for name, _ in layers]),
        sequence_length=TOKENS,
        memory="stream",
        resident_layers=1,
        stream_embeddings=ends,
        autocast=working is not None,
        base_precision="int8" if int8 else "same",
        enable_predict=False,
    ).table
    streamer.attach()
    ids = torch.zeros(2, 8, dtype=torch.long)
    with torch.autocast("cpu", enabled=working is not None):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    streamer.gradients_arrived()
    held = {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in streamer.tensors_held().items()}
    rest = storage_bytes(p for p in model.parameters() if id(p) not in streamer.streamed)
    matrices = 4 * 128 * 128 + 3 * 128 * model.config.intermediate_size
    expanded = (2 if working else 4) * (matrices + 2 * 128)  # the plan does not know that norms stay as they are
    closely = {"rel": 0.02 if int8 else 0}  # of int8 matrices the number of rows is not known
    assert held["host_gradients"] == planned.get("gradients", "host")
    assert held["host_weights"] == pytest.approx(planned.get("weights", "host"), **closely)
    device = planned.get("weights", "device") + (expanded if int8 else 0)
    assert held["slots"] + held["expanded"] + rest == pytest.approx(device, **closely)


def test_8b_with_all_parameters_trained_fits_8_gib():
    options = {"sequence_length": 2048, "optimizer_states": "8bit", "enable_predict": False}
    fitted = plan(llama_8b(), vram=8 * GIB, ram=55 * GIB, **options)
    assert fitted.mode == "streamed" and fitted.stream_embeddings and fitted.resident_layers > 0
    assert fitted.fits and fitted.device_shortfall == fitted.host_shortfall == 0
    least = plan(llama_8b(), memory="stream", stream_embeddings=True, **options)
    slots, wide, boundaries = 2 * 2 * 218_112_000, 2 * 128256 * 4096, 2048 * 4096 * 2 * 32
    per_weight = 2 + 2 + 2 + 2 * 4 / 256  # weights, gradients, two codes and their scales
    aligned = 32 * 2 * 128  # scales begin at multiples of 256 bytes
    # The embeddings are updated while the first layer comes, and in the first step their states are made beside that.
    ring = (per_weight - 2) * (218_112_000 + 128256 * 4096) + aligned // 32
    made = (per_weight - 4) * 128256 * 4096 + 13 * 2**24  # and what the update works in
    assert least.peak_device_bytes == slots + wide + boundaries + ring + made + 4096 * per_weight  # and the last norm
    assert least.peak_host_bytes == (32 * 218_112_000 + 2 * 128256 * 4096) * per_weight + aligned


def test_50b_with_adapters_fits_12_gib():
    options = {"sequence_length": 2048, "base_precision": "int8", "enable_predict": False}
    fitted = plan(adapters_on_50b(), vram=12 * GIB, ram=60 * GIB, **options)
    assert (fitted.mode, fitted.to_dict()["base_precision"]) == ("streamed", "int8")
    assert fitted.table.get("states", "host") == 0, "adapters are trained on the device"
    assert "frozen layers in int8" in fitted.describe()


def test_resident_layers_fill_the_budget():
    options = {"sequence_length": 2048, "optimizer_states": "8bit", "enable_predict": False, "stream_embeddings": True}
    for budget in (6, 8, 12, 40):
        fitted = plan(llama_8b(), memory="stream", vram=budget * GIB, **options)
        more = fitted.resident_layers + 1
        assert fitted.peak_device_bytes <= budget * GIB
        if more <= 32:
            over = plan(llama_8b(), memory="stream", resident_layers=more, **options)
            assert over.peak_device_bytes > budget * GIB
        else:
            assert budget == 40


def test_the_lightest_technique_that_fits_is_chosen():
    options = {"sequence_length": 2048, "optimizer_states": "8bit"}
    options |= {"enable_predict": False, "activation_checkpointing": True}
    chosen = [plan(llama_8b(), vram=budget * GIB, **options) for budget in (80, 24, 6)]
    assert [p.mode for p in chosen] == ["resident", "streamed", "streamed"]
    assert [p.stream_embeddings for p in chosen] == [False, False, True]
    assert plan(llama_8b(), **options).mode == "resident", "no limit"
    assert plan(llama_8b(), memory="stream", **options).resident_layers == 0


def test_what_was_asked_for_is_respected():
    roomy = {"sequence_length": 512, "vram": 400 * GIB, "enable_predict": False}
    assert plan(llama_8b(), **roomy, resident_layers=3).resident_layers == 3
    assert plan(llama_8b(), **roomy, memory="stream", stream_embeddings=True).stream_embeddings
    assert plan(llama_8b(), **roomy, memory="stream", prefetch_layers=3).to_dict()["prefetch_layers"] == 3
    assert plan(llama_8b(), **roomy).setup.optimizer_states == "exact"
    assert plan(adapters_on_50b(), **roomy, base_precision="int8").mode == "streamed"


IMPOSSIBLE = {
    "host too small": (llama_8b(), {"sequence_length": 2048, "vram": 16 * GIB, "ram": 60 * GIB}),
    "device too small": (llama_8b(), {"sequence_length": 2048, "batch_size": 4, "vram": 6 * GIB}),
    "resident does not fit": (llama_8b(), {"sequence_length": 2048, "memory": "off", "vram": 24 * GIB}),
    "too many resident layers": (llama_8b(), {"sequence_length": 512, "resident_layers": 30, "vram": 12 * GIB}),
    "a large window": (
        llama_8b(),
        {
            "sequence_length": 4096,
            "gradient_accumulation_steps": 16,
            "memory": "stream",
            "vram": 10 * GIB,
            "enable_predict": False,
        },
    ),
    "a frozen base too large for the host": (
        adapters_on_50b(),
        {"sequence_length": 2048, "memory": "stream", "vram": 16 * GIB, "ram": 64 * GIB},
    ),
}
FIELDS = {"per_device_train_batch_size": "batch_size", checkpointing_option(): "activation_checkpointing"}


@pytest.mark.parametrize(("shape", "asked"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_advice_of_a_refusal_works(shape, asked):
    with pytest.raises(PlanError) as caught:
        plan(shape, **asked)
    error = caught.value
    assert not error.plan.fits and error.nearest.fits
    text = str(error)
    assert str(error.plan.table) in text and "Nearest plan that works: `" in text
    for option, value in error.changes.items():
        assert f"`{option}={value}`" in text
    changed = {FIELDS.get(option, option): value for option, value in error.changes.items()}
    if "chunked_loss" in changed:
        changed["chunked_loss"] = changed["chunked_loss"] == "on"
    again = plan(shape, **{**asked, **changed})
    assert again.fits
    assert again.table == error.nearest.table


def test_buffers_of_leaps_go_to_the_host_where_they_alone_do_not_fit():
    shape = replace(llama_8b(), layers=(WeightCount(218_112_000),) * 2)
    options = {"sequence_length": 256, "memory": "off", "activation_checkpointing": True}
    assert not plan(shape, **options, vram=40 * GIB).buffers_on_host
    decided = plan(shape, **options, vram=14 * GIB)
    assert decided.fits and decided.buffers_on_host and decided.table.get("drift", "device") == 0
    assert "buffers of leaps on the host" in decided.describe()


def test_no_layer_is_fetched_ahead_where_its_buffer_does_not_fit():
    options = {"sequence_length": 512, "memory": "stream", "resident_layers": 0, "enable_predict": False}
    options["stream_embeddings"] = False
    roomy = plan(llama_8b(), **options)
    least = plan(llama_8b(), **options, prefetch_layers=0)
    decided = plan(llama_8b(), **options, vram=(roomy.peak_device_bytes + least.peak_device_bytes) // 2)
    assert (roomy.setup.prefetch_layers, decided.setup.prefetch_layers) == (1, 0)


def test_refusal_says_which_limit_is_exceeded_by_how_much():
    with pytest.raises(PlanError) as caught:
        plan(llama_8b(), sequence_length=2048, memory="stream", resident_layers=0, ram=90 * GIB)
    over = caught.value.plan.peak_host_bytes - 90 * GIB
    assert f"({over} bytes) over `host_budget_gib=90`" in str(caught.value)
    assert "vram_budget_gib" not in str(caught.value)
    assert caught.value.changes == {"enable_predict": False}


def test_speed_is_given_up_before_exactness():
    with pytest.raises(PlanError) as caught:
        plan(llama_8b(), sequence_length=1024, batch_size=2, memory="off", vram=28 * GIB, enable_predict=False)
    assert caught.value.changes == {"memory": "auto"}
    with pytest.raises(PlanError) as caught:
        plan(adapters_on_50b(), sequence_length=4096, memory="stream", vram=12 * GIB, enable_predict=False)
    assert caught.value.nearest.setup.base_precision == "same"


def test_a_layer_larger_than_the_device_and_nothing_that_works():
    with pytest.raises(PlanError) as caught:
        plan(llama_8b(), sequence_length=1, vram=GIB // 4, memory="stream", enable_predict=False)
    error = caught.value
    assert error.nearest is None and error.changes == {}
    assert "the largest layer alone takes 416.02 MiB" in str(error)
    assert "No change of options fits these limits. The smallest need found: " in str(error)


def test_refusals_for_other_reasons_look_the_same(tiny):
    planned = plan(tiny, sequence_length=TOKENS)
    error = refuse("`optim=lomo` cannot be streamed.", planned, "Set `optim=adamw_torch_fused`.")
    assert isinstance(error, ValueError) and error.plan is planned
    assert str(error).split("\n\n") == [
        "`optim=lomo` cannot be streamed.",
        planned.describe(),
        "Set `optim=adamw_torch_fused`.",
    ]
    plain = refuse("No.", tiny)
    assert f"{4 * TOTAL / 2**10:.2f} KiB" in str(plain) and "No change of options is known to work." in str(plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "on"}, "`memory` must be one of off, auto, stream, got `on`"),
        ({"optimizer_states": "4bit"}, "`optimizer_states` must be one of exact, 8bit"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"prefetch_layers": -1}, "`prefetch_layers` must be at least 0"),
    ],
)
def test_values_out_of_range_are_refused(tiny, options, message):
    with pytest.raises(ValueError, match=message):
        plan(tiny, **{"sequence_length": TOKENS, **options})
