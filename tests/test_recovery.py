"""Out of memory, in `hf_hybrid/recovery.py`: every phase survives it, to the bits of smaller micro-batches."""

import functools
import itertools
import json
import operator

import pytest
import torch
from conftest import (
    ByteText,
    assert_same_weights,
    config_values,
    hybrid_config,
    losses,
    mostly_slow,
    tiny_model,
    weights,
)
from rig import trainers
from rig.fake_device import MESSAGE, FakeDevice, RowLimit
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_hybrid import HybridTrainer, Part
from hf_hybrid.compat import checkpointing_option
from hf_hybrid.leaps import trajectory as trajectory_module
from hf_hybrid.leaps.directions import Orthogonal
from hf_hybrid.recovery import UnrecoveredMemoryError, UnsplittableBatchError, is_out_of_memory, split_batch
from hf_hybrid.run.run import RandomStates
from hf_hybrid.saving.state import VALUES_NAME

TEXT = ByteText(400)


def oom():
    return torch.OutOfMemoryError(MESSAGE.format(limit=0))


def build(folder, size=4, steps=2, *, model=None, callbacks=(), parts=(), **options):
    """A trainer with `size` sequences per micro-batch and `steps` micro-batches per window."""
    phases = {"warmup_phase_steps": 2, "full_phase_steps": 2, "correct_phase_steps": 1, "max_predict_steps": 2}
    sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "max_steps": 12}
    arguments = {"model": model, "train_dataset": TEXT, "callbacks": list(callbacks), "parts": parts}
    return trainers.build(folder, **arguments, **{**phases, **sizes, **options})


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    """Runs with two sequences per micro-batch from the start, by their options; each is made once."""
    runs = {}

    def run(double=False, size=2, steps=4, **options):
        key = (double, size, tuple(options.items()))
        if key not in runs:
            model = tiny_model().double() if double else tiny_model()
            runs[key] = build(tmp_path_factory.mktemp("smaller"), size, steps, model=model, **options)
            runs[key].train()
        return runs[key]

    return run


def train_limited(trainer, most, **limit):
    with RowLimit(trainer, most, **limit).active() as device:
        trainer.train()
    return device


def fails_at(monkeypatch, target, name, call, error=None):
    """Let a function run out of memory at one call. Returns the list of its calls."""
    real, calls = getattr(target, name), []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise error or oom()
        return real(*args, **kwargs)

    monkeypatch.setattr(target, name, failing)
    return calls


def events(trainer):
    return trainer.hybrid_summary()["out_of_memory"]


# The same arithmetic as with smaller micro-batches from the start: the same bits.


@pytest.mark.parametrize(
    "predict, after", mostly_slow([(False, 0), (False, 1), (True, 0), (True, 1)], [(False, 0), (True, 1)])
)
def test_first_step_equals_smaller_micro_batches_bit_for_bit(tmp_path, smaller, predict, after):
    trainer = build(tmp_path / "big", enable_predict=predict)
    device = train_limited(trainer, 2, after=after)
    expected = smaller(enable_predict=predict)
    phase = "warmup" if predict else None
    assert device.failed == [(phase, 4, True)]  # once: the smaller size stays
    (event,) = events(trainer)
    assert (event["step"], event["phase"], event["from_size"], event["to_size"]) == (0, phase, 4, 2)
    assert event["action"] == "split micro-batches" and "out of memory" in event["error"]
    assert_same_weights(weights(trainer.model), weights(expected.model))
    assert losses(trainer) == pytest.approx(losses(expected), rel=1e-6)
    if predict:
        assert trainer.hybrid_summary()["predicted_steps"] == expected.hybrid_summary()["predicted_steps"] > 0


def test_plain_trainer_with_smaller_micro_batches_is_met_as_well(tmp_path):
    trainer = build(tmp_path / "big", enable_predict=False, max_steps=6)
    train_limited(trainer, 1)
    args = config_values(tmp_path / "plain", max_steps=6, per_device_train_batch_size=1, gradient_accumulation_steps=8)
    plain = Trainer(tiny_model(), TrainingArguments(**args), train_dataset=TEXT)
    plain.train()
    assert [(e["from_size"], e["to_size"]) for e in events(trainer)] == [(4, 2), (2, 1)]
    assert_same_weights(weights(trainer.model), weights(plain.model))


def test_dropout_draws_what_the_smaller_run_draws_if_the_step_begins_alike(tmp_path):
    """Masks are drawn per part, from where the step began: equal in the first step, a matter of luck later on."""
    options = {"enable_predict": False, "max_steps": 4}
    trainer = build(tmp_path / "big", 4, 2, model=tiny_model(attention_dropout=0.2), **options)
    device = train_limited(trainer, 2, after=1)
    smaller = build(tmp_path / "small", 2, 4, model=tiny_model(attention_dropout=0.2), **options)
    smaller.train()
    assert device.failed
    assert_same_weights(weights(trainer.model), weights(smaller.model))


@pytest.mark.parametrize("phase", ["warmup", "full", "correct"])
def test_every_real_phase_survives(tmp_path, smaller, phase):
    """Steps before it were computed with the large size, so the last bits differ; in fp64 these are far away."""
    options = {"max_steps": 16}
    trainer = build(tmp_path / "big", model=tiny_model().double(), **options)
    device = train_limited(trainer, 2, phases={phase}, after=1)
    expected = smaller(double=True, **options)
    assert device.failed == [(phase, 4, True)] == [(events(trainer)[0]["phase"], 4, True)]
    first, second = trainer.hybrid_summary(), expected.hybrid_summary()
    assert first["steps_by_phase"] == second["steps_by_phase"] and first["predicted_steps"] > 0
    assert [leap["verdict"] for leap in first["leaps"]] == [leap["verdict"] for leap in second["leaps"]]
    for name, weight in weights(trainer.model).items():
        torch.testing.assert_close(weight, weights(expected.model)[name], rtol=0, atol=1e-6)


def test_a_byte_budget_is_kept_to(tmp_path):
    """Whatever the failed attempt held is gone before the next: else the smaller parts would not fit either."""
    peaks = {}
    for size, steps in ((4, 1), (2, 2)):
        trainer = build(tmp_path / f"peak-{size}", size, steps, enable_predict=False, max_steps=3)
        with FakeDevice() as device:
            trainer.train()
        peaks[size], reference = device.peak, trainer
    assert peaks[2] < 0.8 * peaks[4]
    trainer = build(tmp_path / "limited", 4, 1, enable_predict=False, max_steps=3)
    with FakeDevice(limit=peaks[2] + 0.05 * peaks[4]) as device:
        trainer.train()
    assert device.raised == 1 and device.peak <= device.limit
    assert_same_weights(weights(trainer.model), weights(reference.model))


# Resume.


def test_resume_keeps_the_smaller_size(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 6, "max_steps": 12}
    trainer = build(tmp_path, **options)
    train_limited(trainer, 2, after=4)
    saved = json.loads((tmp_path / "checkpoint-6" / VALUES_NAME).read_text())["parts"]["out_of_memory"]
    assert saved["policy"]["micro_batch_size"] == 2
    resumed = build(tmp_path / "resumed", **options)
    with RowLimit(resumed, 2).active() as device:
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert device.failed == [] and device.calls > 0
    assert events(resumed) == events(trainer) and len(events(trainer)) == 1
    assert_same_weights(weights(resumed.model), weights(trainer.model))


def test_a_run_that_never_ran_out_leaves_nothing_behind(tmp_path):
    trainer = build(tmp_path, save_strategy="steps", save_steps=6, max_steps=6)
    step = vars(trainer).get("optimizer")
    trainer.train()
    assert step is None and events(trainer) == []
    assert "out_of_memory" not in json.loads((tmp_path / "checkpoint-6" / VALUES_NAME).read_text())["parts"]


# Stronger policy, and the end of the ladder.


def needs_checkpointing():
    """A model that fits one sequence at a time, and only with activation checkpointing."""

    def check(module, args, kwargs):
        if torch.is_grad_enabled() and not (len(args[0]) == 1 and module.gradient_checkpointing):
            raise oom()

    model = tiny_model()
    model.get_submodule("model.layers.1").register_forward_pre_hook(check, with_kwargs=True)
    return model


@pytest.mark.parametrize("predict", mostly_slow([False, True], [True]))
def test_activations_are_checkpointed_when_one_sequence_does_not_fit(tmp_path, smaller, predict):
    model = needs_checkpointing()
    options = {"enable_predict": predict, "save_strategy": "steps", "save_steps": 6, "max_steps": 12}
    trainer = build(tmp_path / "big", model=model, **options)
    trainer.train()
    assert [e["action"] for e in events(trainer)] == ["split micro-batches"] * 2 + ["activation checkpointing"]
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())  # as it was
    assert_same_weights(weights(trainer.model), weights(smaller(size=1, steps=8, enable_predict=predict).model))
    resumed = build(tmp_path / "resumed", model=needs_checkpointing(), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "big" / "checkpoint-6"))
    assert len(events(resumed)) == 3
    assert_same_weights(weights(resumed.model), weights(trainer.model))


def test_nothing_is_recomputed_where_the_user_wrote_that(tmp_path):
    options = {"enable_predict": False, "max_steps": 2, checkpointing_option(): False}
    trainer = build(tmp_path, model=needs_checkpointing(), **options)
    with pytest.raises(UnrecoveredMemoryError):
        trainer.train()
    assert [event["action"] for event in events(trainer)] == ["split micro-batches"] * 2


def test_checkpointing_by_phase_is_widened(tmp_path):
    model = needs_checkpointing()
    trainer = build(tmp_path, 1, 2, model=model, checkpoint_phases="full", max_steps=6)
    trainer.train()
    assert [(e["action"], e["phase"]) for e in events(trainer)] == [("activation checkpointing", "warmup")]
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize(
    "predict, phases",
    mostly_slow([(False, None), (True, {"full"}), (True, {"correct"})], [(False, None), (True, {"full"})]),
)
def test_what_fits_nowhere_ends_in_a_checkpoint_of_the_last_good_state(tmp_path, predict, phases):
    options = {"enable_predict": predict, "max_grad_norm": 0.5}
    trainer = build(tmp_path / "run", **options)
    with RowLimit(trainer, 0, phases=phases, after=5).active(), pytest.raises(UnrecoveredMemoryError) as caught:
        trainer.train()
    step = trainer.state.global_step
    message = str(caught.value)
    assert 0 < step < 12 and f"in step {step + 1}" in message and "with 1 sequence at a time" in message
    for tried in ("split micro-batches (4 to 2)", "(2 to 1)", "activation checkpointing", "`memory=auto`"):
        assert tried in message
    checkpoint = tmp_path / "run" / f"checkpoint-{step}"
    assert str(checkpoint) in message and is_out_of_memory(caught.value)
    # More memory was found: the policy of the checkpoint is not needed any more.
    resumed = build(tmp_path / "run", out_of_memory="raise", **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    whole = build(tmp_path / "whole", **options)
    whole.train()
    assert_same_weights(weights(resumed.model), weights(whole.model))


def test_raise_is_what_transformers_does(tmp_path):
    trainer = build(tmp_path, out_of_memory="raise")
    with RowLimit(trainer, 2).active(), pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    assert not isinstance(caught.value, UnrecoveredMemoryError)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_other_errors_are_not_touched(tmp_path):
    trainer = build(tmp_path)
    trainer.model.get_submodule("model.layers.1").register_forward_pre_hook(_fail)
    with pytest.raises(RuntimeError, match="not about memory"):
        trainer.train()
    assert events(trainer) == []


def _fail(*_):
    raise RuntimeError("not about memory")


@pytest.mark.parametrize(
    "place, value, message",
    [
        ("accelerator.__class__.num_processes", property(lambda self: 2), "more than one process"),
        ("args.optim", "galore_adamw_layerwise", "inside the backward pass"),
    ],
)
def test_what_cannot_be_retried(tmp_path, monkeypatch, place, value, message):
    trainer = build(tmp_path, enable_predict=False)
    of, _, name = place.rpartition(".")
    monkeypatch.setattr(operator.attrgetter(of)(trainer), name, value)
    batch = trainer.data_collator([TEXT[i] for i in range(4)])
    with RowLimit(trainer, 2).active(), pytest.raises(UnrecoveredMemoryError, match=message):
        trainer.training_step(trainer.model, batch)


# Losses that are means: parts count by their share of the sequences.


@pytest.mark.parametrize("size", [3, 4])
def test_uneven_parts_of_a_mean_loss_add_up(tmp_path, size):
    gradients = []
    batch = {name: torch.stack([TEXT[i][name] for i in range(size)]) for name in ("input_ids", "labels")}
    for most in (8, 2, 1):
        trainer = build(tmp_path / str(most), size, 1, enable_predict=False)
        trainer.current_gradient_accumulation_steps = 1
        with RowLimit(trainer, most).active():
            loss = trainer.training_step(trainer.model, dict(batch), None)
        gradients.append([loss, *(parameter.grad for parameter in trainer.model.parameters())])
    for other in gradients[1:]:
        for expected, found in zip(gradients[0], other):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_loss_that_nobody_can_divide_is_not_split(tmp_path):
    trainer = build(tmp_path, enable_predict=False)
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.logits.square().mean()
    batch = trainer.data_collator([TEXT[i] for i in range(4)])
    trainer.create_optimizer_and_scheduler(1)
    with RowLimit(trainer, 2).active(), pytest.raises(UnrecoveredMemoryError, match="cannot be counted"):
        trainer.training_step(trainer.model, batch)


# Predict: leaps and probes.


class WeightsAround(Part):
    """Whether weights changed between the end of a real step and the forward pass of the next real step."""

    def __init__(self):
        self.trainer, self.changed, self.before = None, [], None

    def now(self):
        """The weights themselves, also where layers are streamed."""
        trained = self.trainer.run.weights
        trained.store.finish_updates()
        return {name: p.detach().clone() for name, p in zip(trained.names, trained.parameters)}

    def before_forward(self, phase):
        if self.before is not None:
            now = self.now()
            self.changed.append(any(not torch.equal(now[name], self.before[name]) for name in now))
            self.before = None


class Remember(TrainerCallback):
    """Tells `WeightsAround` the weights at the end of every real step."""

    def __init__(self, around):
        self.around = around

    def on_step_end(self, args, state, control, **kwargs):
        if self.around.trainer.phase_name != "predict":
            self.around.before = self.around.now()


def train_watched(folder, **options):
    around = WeightsAround()
    trainer = build(folder, callbacks=[Remember(around)], parts=[around], max_steps=16, **options)
    around.trainer = trainer
    trainer.train()
    return trainer, around


@pytest.mark.parametrize(
    "place, memory",
    mostly_slow(
        list(itertools.product(("snapshot", "middle", "end"), ("off", "stream"))),
        [("snapshot", "off"), ("middle", "stream"), ("end", "off")],
    ),
)
def test_a_leap_that_does_not_fit_is_undone_to_the_last_bit(tmp_path, monkeypatch, place, memory):
    """Before anything is written, in the middle of it, and after it."""
    target, name, call = {
        "snapshot": (trajectory_module.Trajectory, "_save", 1),
        "middle": (trajectory_module, "_add", 2),
        "end": (trajectory_module.Trajectory, "_begin_block", 1),
    }[place]
    calls = fails_at(monkeypatch, target, name, call)
    trainer, around = train_watched(tmp_path, memory=memory)
    (event,) = events(trainer)
    assert event["action"] == "leap undone" and event["phase"] == "predict"
    # The first leap changed nothing; later ones did, so that the comparison can fail.
    assert around.changed[event["step"] - 1] is False and any(around.changed)
    summary = trainer.hybrid_summary()
    assert len(calls) > call and summary["leaps"][0]["step"] > event["step"]
    assert summary["steps_by_phase"]["predict"] > 0 and summary["steps"] == 16


def test_a_leap_that_the_host_cut_short_in_streamed_weights_is_undone(tmp_path, monkeypatch):
    """The leap was kept and is being written into the weights of streamed layers: the snapshot is whole by then."""
    fails_at(monkeypatch, trajectory_module, "_add", 8, MemoryError())
    trainer, around = train_watched(tmp_path, memory="stream")
    (event,) = events(trainer)
    assert event["action"] == "leap undone" and around.changed[event["step"] - 1] is False and any(around.changed)
    assert trainer.hybrid_summary()["steps"] == 16


def test_a_leap_whose_probe_does_not_fit_is_undone(tmp_path):
    trainer = build(tmp_path, max_steps=16)
    trainer.probe_sequences = 8
    device = train_limited(trainer, 0, training=False, probes=True)
    assert device.failed and {phase for phase, _, _ in device.failed} <= {"predict"}
    assert "leap undone" in [e["action"] for e in events(trainer)]
    assert trainer.hybrid_summary()["steps"] == 16
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_probes_compute_no_more_at_a_time_than_steps_do(tmp_path):
    trainer = build(tmp_path, max_steps=16)
    trainer.probe_sequences = 8
    device = train_limited(trainer, 2, probes=True)
    assert [(e["action"], e["from_size"], e["to_size"]) for e in events(trainer)] == [("split micro-batches", 4, 2)]
    assert device.failed and any(leap["loss_before"] is not None for leap in trainer.hybrid_summary()["leaps"])


# What looks at gradients.


def test_a_gradient_that_the_predictor_cannot_take_in_still_trains(tmp_path, monkeypatch):
    fails_at(monkeypatch, Orthogonal, "observe_gradients", 2)
    trainer = build(tmp_path / "limited", max_steps=4, warmup_phase_steps=4)
    trainer.train()
    free = build(tmp_path / "free", max_steps=4, enable_predict=False)
    free.train_dataset = trainer.train_dataset
    free.train()
    assert [e["action"] for e in events(trainer)] == ["predictor missed a gradient"]
    assert_same_weights(weights(trainer.model), weights(free.model))


def test_buffers_that_do_not_fit_go_to_the_host(tmp_path, monkeypatch):
    fails_at(monkeypatch, Orthogonal, "__init__", 1)
    trainer = build(tmp_path)
    trainer.train()
    assert [e["action"] for e in events(trainer)] == ["buffers on the host"]
    assert trainer.hybrid_summary()["predicted_steps"] > 0


# The optimizer's step.


class FailAt(TorchDispatchMode):
    """Raises at the given calls of one operation, counted over the run."""

    def __init__(self, operation, calls):
        super().__init__()
        self.operation, self.fail_at, self.calls = operation, set(calls), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is self.operation:
            self.calls += 1
            if self.calls in self.fail_at:
                raise oom()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("predict", [False, True])
def test_states_that_do_not_fit_say_so_and_name_the_checkpoint(tmp_path, predict):
    """The optimizer's step is never made twice: some weights may have been stepped and others not."""
    options = {"enable_predict": predict, "max_steps": 6, "save_strategy": "steps", "save_steps": 1}
    trainer = build(tmp_path / "run", **options)
    with FailAt(torch.ops.aten.zeros_like, range(8, 500)), pytest.raises(UnrecoveredMemoryError) as caught:
        trainer.train()
    message = str(caught.value)
    assert "in the step of `AdamW`" in message and "is not saved" in message and "`optimizer_states=8bit`" in message
    assert "no checkpoint was saved yet" in message and not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_step_that_was_half_made_is_not_saved(tmp_path):
    trainer = build(tmp_path, enable_predict=False, optim="adamw_torch", max_steps=4)
    with FailAt(torch.ops.aten._foreach_sqrt, [1]), FailAt(torch.ops.aten.sqrt, [1]):
        with pytest.raises(UnrecoveredMemoryError, match="stepped and others not"):
            trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))


# Streamed layers.


def stream(folder, size, steps, **options):
    options = {"enable_predict": False, "memory": "stream", "max_steps": 5, **options}
    return build(folder, size, steps, model=tiny_model(num_hidden_layers=3), **options)


@pytest.mark.usefixtures("of_a_library")
@pytest.mark.parametrize(
    "walk, predict", mostly_slow([("layer", False), ("micro_batch", False), ("layer", True)], [("layer", True)])
)
def test_streamed_windows_are_split(tmp_path, walk, predict):
    options = {"accumulation_walk": walk, "enable_predict": predict, "max_steps": 8 if predict else 4}
    trainer = stream(tmp_path / "big", 4, 2, **options)
    device = train_limited(trainer, 2, after=1)
    smaller = stream(tmp_path / "small", 2, 4, **options)
    smaller.train()
    assert device.failed and [(e["from_size"], e["to_size"]) for e in events(trainer)] == [(4, 2)]
    assert_same_weights(weights(trainer.model), weights(smaller.model))


@pytest.mark.usefixtures("of_a_library")
def test_a_walk_that_does_not_fit_goes_by_micro_batch(tmp_path):
    """All micro-batches of a walk are there at once: when one sequence each is too much, they go one by one."""
    trainer = stream(tmp_path / "big", 2, 2, accumulation_walk="layer")
    window = trainer.memory.window
    layer = trainer.model.get_submodule("model.layers.2")

    def check(module, args, kwargs):
        if window.order == "layer":
            raise oom()

    handle = layer.register_forward_pre_hook(check, with_kwargs=True)
    trainer.train()
    handle.remove()
    assert [e["action"] for e in events(trainer)] == ["split micro-batches", "walk by micro-batch"]
    smaller = stream(tmp_path / "small", 1, 4, accumulation_walk="micro_batch")
    smaller.train()
    assert_same_weights(weights(trainer.model), weights(smaller.model))


@pytest.mark.parametrize("states", mostly_slow(["exact", "8bit"], ["8bit"]))
def test_a_streamed_update_that_was_cut_short_is_not_retried(tmp_path, monkeypatch, states):
    trainer = stream(tmp_path, 2, 2, optimizer_states=states)
    streaming, begin = trainer.memory, trainer.memory.begin

    def fail_later():
        begin()
        fails_at(monkeypatch, streaming.optimizer, "_step", 3)

    streaming.begin = fail_later
    with pytest.raises(UnrecoveredMemoryError, match="was cut short.*Resume from the last checkpoint"):
        trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))


# Parts.


def test_parts_of_a_batch():
    batch = {
        "input_ids": torch.arange(10).view(5, 2),
        "names": list("abcde"),
        "inner": {"mask": torch.ones(5, 2), "scale": 2.0},
        "position_ids": torch.arange(2).view(1, 2),
        "count": torch.tensor(5),
        "nothing": None,
        "text": "hello",
    }
    parts = split_batch(batch, 2)
    assert [len(part["input_ids"]) for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), batch["input_ids"])
    assert parts[1]["names"] == ["c", "d"] and parts[2]["inner"]["mask"].shape == (1, 2)
    assert all(part["position_ids"] is batch["position_ids"] and part["text"] == "hello" for part in parts)
    assert parts[0]["input_ids"].untyped_storage().data_ptr() == batch["input_ids"].untyped_storage().data_ptr()


def test_pairs_stay_together():
    chosen, rejected = torch.arange(6).view(3, 2), torch.arange(10, 16).view(3, 2)
    batch = {"input_ids": torch.cat([chosen, rejected]), "ref_chosen_logps": torch.arange(3.0)}
    parts = split_batch(batch, 2, blocks=2)
    assert torch.equal(parts[0]["input_ids"], torch.cat([chosen[:2], rejected[:2]]))
    assert torch.equal(parts[1]["input_ids"], torch.cat([chosen[2:], rejected[2:]]))
    assert [part["ref_chosen_logps"].tolist() for part in parts] == [[0.0, 1.0], [2.0]]


class PairTrainer(HybridTrainer):
    """Its loss compares the first half of the rows with the second, as TRL's DPO does."""

    blocks_of_rows = 2

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        chosen, rejected = model(input_ids=inputs["input_ids"]).logits.float().mean(dim=(1, 2)).chunk(2)
        return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


@pytest.mark.parametrize("kind", [PairTrainer, HybridTrainer])
def test_pairs_are_split_as_pairs_or_not_at_all(tmp_path, kind):
    gradients, batch = [], {"input_ids": torch.stack([TEXT[i]["input_ids"] for i in range(8)])}
    for most in (8, 4):
        config = hybrid_config(tmp_path / f"{most}", per_device_train_batch_size=4, enable_predict=False)
        trainer = kind(tiny_model(), config, train_dataset=TEXT)
        trainer.current_gradient_accumulation_steps = 1
        trainer.compute_loss = functools.partial(PairTrainer.compute_loss, trainer)
        with RowLimit(trainer, most).active():
            if kind is HybridTrainer and most == 4:
                with pytest.raises(UnrecoveredMemoryError, match="8 rows for 4 examples"):
                    trainer.optimizer = trainer.create_optimizer()
                    trainer.create_scheduler(1)
                    trainer.training_step(trainer.model, batch)
                return
            trainer.training_step(trainer.model, batch)
        gradients.append([parameter.grad for parameter in trainer.model.parameters()])
    for expected, found in zip(*gradients):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("batch", [{"input_ids": torch.zeros(4, 2), "pixels": torch.zeros(7, 3)}, [1, 2], {"a": 1}])
def test_batches_without_rows_are_not_split(batch):
    with pytest.raises(UnsplittableBatchError):
        split_batch(batch, 1)


def test_random_states_come_back():
    import random

    import numpy

    def draw():
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    states = RandomStates.now(torch.device("cpu"))
    first = draw()
    states.restore()
    assert draw() == first != draw()


@pytest.mark.parametrize(
    "error, expected",
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 5 bytes."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("out of memory (2)"), True),  # what `torch.cuda.check_error` raises
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture"), True),
        (torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
        (KeyError("labels"), False),
    ],
)
def test_what_counts(error, expected):
    assert is_out_of_memory(error) is expected
    wrapped = RuntimeError("in a worker")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is expected


def test_the_allocator_of_the_cpu_counts():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
