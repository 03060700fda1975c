"""The memory options of a trainer: plans within budgets, refusals with their bytes, exact options change no bit."""

import pytest
from conftest import ByteText, assert_same_weights, losses, tiny_model, weights
from rig import trainers

from hf_hybrid import HybridTrainer
from hf_hybrid.compat import checkpointing_option
from hf_hybrid.plan.estimate import PlanError

LAYERS = 4


def build(folder, data, model=None, **options):
    model = tiny_model(num_hidden_layers=LAYERS) if model is None else model
    return trainers.build(folder, model=model, train_dataset=data, **options)


# Plans.


def test_auto_streams_only_what_does_not_fit(tmp_path, train_set):
    roomy = build(tmp_path, train_set, memory="auto")
    assert not roomy.memory.streams
    tight = build(tmp_path, train_set, memory="auto", vram_budget_gib=0.002)
    assert tight.memory.plan.peak_device_bytes <= 0.002 * 2**30
    tight.train()
    roomy.train()
    assert_same_weights(weights(tight.model), weights(roomy.model))


def test_more_memory_keeps_more_layers(tmp_path, train_set):
    least = build(tmp_path, train_set, memory="stream").memory.plan.peak_device_bytes / 2**30
    kept = [
        build(tmp_path, train_set, memory="stream", vram_budget_gib=budget).memory.plan.resident_layers
        for budget in (least, 1.5 * least, 1.0)
    ]
    assert kept[0] < kept[1] <= kept[2] == LAYERS


def test_what_is_left_keeps_graphs(tmp_path, train_set):
    """As many as fit beside the layers that stay, unless the options ask that layers are recomputed or parked."""
    options = {"memory": "stream", "resident_layers": 1, "gradient_accumulation_steps": 3}
    least = build(tmp_path, train_set, **options).memory.plan
    assert least.kept_graphs == 0, "no limit is known"
    budget = {"vram_budget_gib": 1.5 * least.peak_device_bytes / 2**30}
    plan = build(tmp_path, train_set, **options, **budget).memory.plan
    assert plan.fits and plan.resident_layers == 1 and 0 < plan.kept_graphs < 3 * LAYERS
    assert f"{plan.kept_graphs} of {3 * LAYERS} passes through layers not recomputed" in plan.describe()
    more = build(tmp_path, train_set, **options, plan_values={"kept_graphs": plan.kept_graphs + 1}).memory.plan
    assert plan.peak_device_bytes <= plan.setup.vram < more.peak_device_bytes
    for more in ({checkpointing_option(): True}, {"offload_activations": True}):
        assert build(tmp_path, train_set, **options, vram_budget_gib=1.0, **more).memory.plan.kept_graphs == 0

    class OwnLoss(HybridTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    assert build(tmp_path, train_set, kind=OwnLoss, **options, vram_budget_gib=1.0).memory.plan.kept_graphs == 0
    everything = build(tmp_path, train_set, **options, vram_budget_gib=1.0, **{checkpointing_option(): "auto"})
    assert everything.memory.plan.kept_graphs == 3 * LAYERS


def test_micro_batches_come_one_by_one_if_all_layers_stay(tmp_path, train_set):
    """No layer travels then, so that the activations of one micro-batch are enough. The update is the same."""
    options = {"memory": "stream", "gradient_accumulation_steps": 3, "vram_budget_gib": 1.0, "enable_predict": False}
    model = tiny_model(num_hidden_layers=LAYERS, tie_word_embeddings=False)
    one_by_one = build(tmp_path, train_set, model, **options)
    assert one_by_one.memory.plan.resident_layers == LAYERS and one_by_one.memory.window.order == "micro_batch"
    assert "micro-batches one by one" in one_by_one.memory.plan.describe()
    model = tiny_model(num_hidden_layers=LAYERS, tie_word_embeddings=False)
    together = build(tmp_path, train_set, model, **options, accumulation_walk="layer")
    assert together.memory.plan.peak_device_bytes > one_by_one.memory.plan.peak_device_bytes
    one_by_one.train()
    together.train()
    assert_same_weights(weights(one_by_one.model), weights(together.model))


@pytest.mark.parametrize(
    "options,limit",
    [
        ({"vram_budget_gib": 0.0005, "memory": "stream"}, "vram_budget_gib"),
        ({"host_budget_gib": 0.0005, "memory": "stream"}, "host_budget_gib"),
    ],
)
def test_impossible_plans_are_refused_with_their_bytes(options, limit, tmp_path, train_set):
    model = tiny_model(num_hidden_layers=LAYERS)
    with pytest.raises(PlanError) as refusal:
        build(tmp_path, train_set, model, **options)
    text = str(refusal.value)
    assert limit in text and "weights" in text and "states" in text and "total" in text.lower()
    assert "No change of options fits" in text or "Nearest plan that works" in text


@pytest.mark.long
def test_the_nearest_plan_works(tmp_path, train_set):
    options = {"memory": "stream", "vram_budget_gib": 0.00125, "per_device_train_batch_size": 16}
    with pytest.raises(PlanError) as refusal:
        build(tmp_path, train_set, **options)
    assert refusal.value.changes
    build(tmp_path, train_set, **{**options, **refusal.value.changes}).train()


def test_unsupported_optimizer_is_refused_with_the_bytes(tmp_path, train_set):
    with pytest.raises(PlanError, match="`optim=ademamix`") as refusal:
        build(tmp_path, train_set, memory="stream", optim="ademamix", direction="auto")
    assert "optim=adamw_torch_fused" in str(refusal.value) and "weights" in str(refusal.value)


def test_quantised_trainable_base_is_refused_with_the_bytes(tmp_path, train_set):
    model = tiny_model(num_hidden_layers=LAYERS)
    model.is_quantized = True
    with pytest.raises(PlanError, match="quantised and has no adapters") as refusal:
        build(tmp_path, train_set, model, memory="stream")
    assert "LoRA" in str(refusal.value)


# Exactness.


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    trainer = build(tmp_path_factory.mktemp("plain"), ByteText(400), max_steps=16)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_phases": "full, correct"},
        {"offload_activations": True},
        {"predict_states": "host"},
        {"weight_precision": "fp32"},
        {"chunked_loss": "off"},
    ],
    ids=str,
)
def test_exact_options_change_no_bit(options, plain, tmp_path, train_set):
    changed = build(tmp_path, train_set, max_steps=16, **options)
    changed.train()
    assert losses(changed) == losses(plain)
    assert_same_weights(weights(changed.model), weights(plain.model))


# Telling.


def test_what_was_streamed_is_in_the_summary(tmp_path, train_set):
    trainer = build(tmp_path, train_set, memory="stream")
    trainer.train()
    memory = trainer.hybrid_summary()["memory"]
    assert memory["plan"]["mode"] == "streamed"
    assert memory["statistics"]["loads"] > 0 and memory["statistics"]["bytes_in"] > 0
    held = memory["held"]
    model_bytes = sum(p.numel() * 4 for p in trainer.model.model.layers.parameters())
    assert model_bytes <= held["weights"]["host"] <= 1.1 * model_bytes
    assert held["states"]["host"] == pytest.approx(2 * model_bytes, rel=0.01)
