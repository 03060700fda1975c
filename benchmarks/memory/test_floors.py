"""The least that a step moves and takes, against sums by hand, and the rates of this machine."""

from dataclasses import replace

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.memory.floors import measure_machine, step_floor_seconds, step_traffic
from hf_hybrid.plan.accounting import ModelShape, WeightCount
from hf_hybrid.plan.estimate import Estimator, Plan
from hf_hybrid.plan.setups import Setup


def plan(shape: ModelShape, **setup) -> Plan:
    """Without a trace: activations are estimated from the sizes."""
    return Estimator(shape).plan(Setup(**setup))


def only_layers(trainable: int, frozen: int, stored: int) -> ModelShape:
    nothing = WeightCount()
    layers = (WeightCount(trainable, frozen),) * 10
    return ModelShape(layers, nothing, nothing, nothing, 4096, 1000, 2, stored, trainable)


@pytest.mark.parametrize(
    ("shape", "options", "per_weight"),
    [
        # In each direction 8 of 10 layers come, as two lie in the slots.
        # fp32 masters: rounded weights twice, gradients, states, masters; gradients, states, masters and weights back.
        (
            only_layers(10**6, 0, 4),
            {"autocast": True},
            {"h2d": 3.2 + 4 + 8 + 4, "d2h": 4 + 8 + 4 + 2, "dram": 19.2 + 18},
        ),
        # 8-bit states: weights twice, gradients and states; gradients, states and weights back.
        (
            only_layers(10**6, 0, 2),
            {"optimizer_states": "8bit"},
            {"h2d": 3.2 + 2 + 2.03125, "d2h": 2 + 2 + 2.03125, "dram": 13.2625},
        ),
        # A frozen base in int8, adapters resident: the base twice.
        (only_layers(10, 10**6, 4), {"base_precision": "int8"}, {"h2d": 1.6, "d2h": 0, "dram": 1.6}),
    ],
)
def test_traffic_of_a_step(shape, options, per_weight):
    planned = plan(shape, sequence_length=64, memory="stream", enable_predict=False, **options)
    traffic = step_traffic(planned)
    weights = 10 * shape.layers[0].weights
    assert {name: count / weights for name, count in traffic.items()} == pytest.approx(per_weight, rel=1e-2)


def test_traffic_follows_the_walk_and_what_is_resident():
    shape = only_layers(10**6, 0, 4)

    def into(**options):
        return step_traffic(plan(shape, sequence_length=64, memory="stream", gradient_accumulation_steps=4, **options))[
            "h2d"
        ]

    once = into()
    sums = 3 * 4 * 10 * 10**6  # of gradients, which come back to be added to
    update = 3 * 4 * 10 * 10**6  # gradients and states
    assert into(accumulation_walk="micro_batch") == 4 * (once - update) + update + sums
    layer = 4 * 10**6
    assert once == 16 * layer + update
    assert into(resident_layers=5) == 6 * layer + update / 2, "trained layers live on the device"
    frozen = only_layers(10, 10**6, 4)
    kept = step_traffic(plan(frozen, sequence_length=64, memory="stream", resident_layers=5))["h2d"]
    assert kept == step_traffic(plan(frozen, sequence_length=64, memory="stream"))["h2d"] * 6 / 16, (
        "and copies of others"
    )
    offloaded = into(offload_activations=True) - once
    assert offloaded == 4 * 9 * 64 * 4096 * 2
    assert step_traffic(plan(shape, sequence_length=64)) == {"h2d": 0, "d2h": 0, "dram": 0}


def test_floor_is_the_slower_of_computing_and_moving():
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, tie_word_embeddings=True))
    tiny, total = ModelShape.of(model, ["model.layers.0", "model.layers.1"]), model.num_parameters()
    full, adapters = only_layers(10**6, 0, 2), only_layers(10, 10**6, 2)

    def floor(shape, tokens, flops, memory="stream", **rates):
        return step_floor_seconds(plan(shape, sequence_length=64, memory=memory), tokens, {"flops": flops, **rates})

    assert floor(full, 4096, 1e12) == 8 * 10**7 * 4096 / 1e12
    assert floor(adapters, 4096, 1e12) == pytest.approx(6 * 10**7 * 4096 / 1e12, rel=1e-4)
    assert floor(full, 1, 1e15, h2d=1e6, d2h=1e9, dram=1e9) == pytest.approx((3.2 + 6) * 10**7 / 1e6, rel=1e-3)
    # Tied embeddings multiply as the head; lookups alone do not. Without checkpointing nothing is computed twice.
    assert floor(tiny, 1, 1.0, memory="auto") == 6 * total
    untied = replace(tiny, head=tiny.embedding, tied=False)
    assert floor(untied, 1, 1.0, memory="auto") == 6 * total


def test_this_machine():
    rates = measure_machine(seconds=0.01)
    assert rates.keys() == {"dram"} and rates["dram"] > 1e8
