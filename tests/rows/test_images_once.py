"""An image is encoded once for the micro-batches of a window, in each trainer, whatever code of a user does there."""

import functools
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_same_weights, mostly_slow, weights
from test_windows import apart, checkpointing_option

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

from rig import vision  # noqa: E402
from rig.processes import together  # noqa: E402
from rig.trainers import fitted  # noqa: E402
from test_images import (  # noqa: E402
    ONCE,
    Moves,
    adapters,
    assert_once,
    assert_same,
    both,
    build,
    doubled,
    frozen,
)
from transformers import TrainerCallback  # noqa: E402

KINDS = ("dpo", "kto", "grpo", "rloo")
ROWS = {
    "sft": functools.partial(vision.sft_rows, 64, 8),
    "dpo": functools.partial(vision.pairs, 48, 8),
    "kto": functools.partial(vision.judged, 64, 8),
    "grpo": functools.partial(vision.prompts, 16, 4),
    "rloo": functools.partial(vision.prompts, 16, 4),
}
"""Rows of which several micro-batches share a picture."""
SMALL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, checkpointing_option(): False}


def trained(name, kind, folder, **options):
    """Train with TRL and here, in micro-batches that are smaller than what shares a picture."""
    rows = ROWS[kind](several=name in vision.SEVERAL)
    return both(name, kind, folder, **{"rows": rows, **SMALL, **options})


def partly_frozen(model, name):
    """Features of the first layer need no gradient, those of the last one do."""
    encoder = vision.tower_of(name, model)
    for part in (encoder.patch_embed, encoder.pos_embed, encoder.blocks[0], encoder.deepstack_merger_list[0]):
        part.requires_grad_(False)
    return model


CASES = {
    "trained": {},
    "recomputed": {checkpointing_option(): True},
    "bf16": {"bf16": True},
    "adapters in the language model": {"change": adapters("language")},
    "adapters in both": {"change": adapters("both")},
    "frozen encoder": {"change": frozen},
    "partly frozen encoder": {"change": partly_frozen},
    "one row each": {"per_device_train_batch_size": 1},
    "an epoch that ends in a window": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 5},
}
OF_KINDS = [
    *((name, kind, "trained") for kind in KINDS for name in ONCE),
    *(("qwen3_vl", kind, case) for kind in KINDS for case in CASES if case != "trained"),
]
OF_KINDS.remove(("qwen3_vl", "kto", "one row each"))  # TRL wants two
for kind in ("grpo", "rloo"):  # they want 4 completions of each prompt
    OF_KINDS.remove(("qwen3_vl", kind, "an epoch that ends in a window"))
QUICK = [
    ("qwen2_vl", "grpo", "trained"), ("idefics3", "kto", "trained"), ("llava", "dpo", "trained"),
    ("qwen3_vl", "grpo", "recomputed"), ("qwen3_vl", "rloo", "adapters in both"),
    ("qwen3_vl", "dpo", "partly frozen encoder"), ("qwen3_vl", "rloo", "one row each"),
    ("qwen3_vl", "grpo", "frozen encoder"), ("qwen3_vl", "kto", "an epoch that ends in a window"),
]  # fmt: skip


@pytest.mark.parametrize("name, kind, case", mostly_slow(OF_KINDS, QUICK))
def test_micro_batches_encode_a_picture_once_between_them(name, kind, case, tmp_path):
    run = trained(name, kind, tmp_path, max_steps=8, **CASES[case])
    # In bf16 margins are near zero, and a completion that is drawn otherwise has another reward.
    assert_same(run, half=case == "bf16", logs=case != "bf16")
    # All passes read what an encoder finds that no trained weight can change, but that which begins completions.
    times = run.ours.always * ((kind in ("grpo", "rloo")) + (case == "frozen encoder" and kind in ("kto", "rloo")))
    assert_once(run, least=1.5 if times else 2.0, times=1 + times)
    if kind == "kto" and not run.ours.always:  # those of another answer, and the reference's where it has other weights
        assert_once(run, least=2.0, of="read", times=2 if case == "adapters in both" else 1)


PLANS = {
    "two iterations and a reference": {"num_iterations": 2, "beta": 0.1, "change": adapters("both")},
    "rows that stay where they are": {"top_entropy_quantile": 0.8},
    "means of tokens": {"loss_type": "bnpo", "beta": 0.1, "change": adapters("both"), checkpointing_option(): True},
    "windows of a generation": {"steps_per_generation": 8},
}


@pytest.mark.parametrize("case", mostly_slow(PLANS, [*PLANS][:2]))
def test_windows_of_completions_encode_a_picture_once(case, tmp_path):
    run = trained("qwen2_vl", "grpo", tmp_path, **PLANS[case])
    assert_same(run)
    assert_once(run, least=1.5)


# What a summary tells.


class Told(TrainerCallback):
    """The counts of images when a step ends, and how many the models have encoded by then."""

    def __init__(self, encoders, generates):
        self.found, self.encoded, self.generates = [], 0, generates
        for encoder in encoders:
            encoder.register_forward_pre_hook(self.encode, with_kwargs=True)

    def encode(self, tower, args, kwargs):
        pixels, grid = args[0] if args else kwargs["pixel_values"], kwargs.get("grid_thw")
        if torch.is_grad_enabled() or not self.generates:
            self.encoded += len(pixels) if grid is None else len(grid)

    def on_step_end(self, args, state, control, **kwargs):
        counts = self.trainer.rows.counts
        self.found.append((counts["images"] - counts["images_shared"], self.encoded))


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "grpo"])
def test_images_that_were_not_encoded_are_counted(kind, tmp_path):
    rows = ROWS[kind](several=True)
    trainer, _ = build("qwen2_vl", kind, True, tmp_path, rows=rows, **SMALL)
    models = [trainer.model, getattr(trainer, "ref_model", None)]
    towers = [vision.tower_of("qwen2_vl", model) for model in models if model is not None]
    told = Told(towers, generates=kind == "grpo")
    told.trainer = trainer
    trainer.add_callback(told)
    trainer.train()
    counted, encoded = ([after - before for before, after in zip(of, of[1:], strict=False)] for of in zip(*told.found))
    assert counted == encoded and min(counted) > 0


# Code of a user.


@pytest.mark.parametrize("change", [None, frozen])
@pytest.mark.parametrize("kind", mostly_slow(("sft", *KINDS), ["dpo", "kto", "grpo"]))
def test_an_encoder_that_changes_between_micro_batches_encodes_again(kind, change, tmp_path):
    runs = []
    for ours in (False, True):
        options = {**SMALL, "rows": ROWS[kind](several=True), "change": change}
        trainer, watch = build("qwen2_vl", kind, ours, tmp_path / str(ours), **options)
        trainer.add_callback(Moves())
        runs += [fitted(trainer), watch]
    assert_same(SimpleNamespace(**dict(zip(("plain", "theirs", "trained", "ours"), runs, strict=True))))


@pytest.mark.parametrize("kind", ["dpo", "kto", "grpo"])
def test_a_hook_sees_the_gradients_of_each_micro_batch(kind, tmp_path):
    seen = []

    def watched(model, name):
        seen.append([])
        weight = vision.tower_of(name, model).patch_embed.proj.weight
        weight.register_hook(lambda grad, seen=seen[-1]: seen.append(grad.clone()))
        return model

    run = trained("qwen2_vl", kind, tmp_path, change=watched, max_steps=2)
    assert_same(run)
    theirs, ours = seen
    assert len(theirs) == len(ours) == 8
    assert max((a - b).abs().max().item() for a, b in zip(theirs, ours, strict=True)) < 1e-5


def brighter(trainer, which):
    """Let the loss of some micro-batches be that of other pictures, as a class of a user's does."""
    own, count = trainer.compute_loss, iter(range(1000))

    def compute_loss(model, inputs, *args, **kwargs):
        if next(count) % 4 in which:
            inputs = {**inputs, "pixel_values": inputs["pixel_values"] + 0.5}
        return own(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss


@pytest.mark.parametrize("kind, which", [("dpo", (1, 3)), ("kto", (3,)), ("grpo", (0, 2))])
def test_pictures_that_a_users_loss_changes_are_those_that_are_learned(kind, which, tmp_path):
    runs = []
    for ours in (False, True):
        options = {**SMALL, "rows": ROWS[kind](several=True)}
        trainer, watch = build("qwen2_vl", kind, ours, tmp_path / str(ours), **options)
        brighter(trainer, which)
        runs += [fitted(trainer), watch]
    assert_same(SimpleNamespace(**dict(zip(("plain", "theirs", "trained", "ours"), runs, strict=True))))


@pytest.mark.parametrize("kind", mostly_slow(["dpo", "kto"], ["kto"]))
def test_a_users_features_of_images_are_encoded_once(kind, tmp_path):
    run = trained("qwen2_vl", kind, tmp_path, change=doubled)
    assert_same(run)
    assert_once(run, least=2.0)


# What ends a window.


class Fails:
    """Raises once, in the third micro-batch of the second step, as memory does that ends."""

    def __init__(self, trainer, error):
        self.trainer, self.error, self.count = trainer, error, 0
        trainer.model.get_input_embeddings().register_forward_pre_hook(self.check)

    def check(self, *_):
        if self.trainer.state.global_step == 1 and torch.is_grad_enabled():
            self.count += 1
            if self.count == 3:
                raise self.error


@pytest.mark.parametrize("kind", ["dpo", "kto", "sft"])
def test_after_memory_ran_out_each_micro_batch_encodes_its_own(kind, tmp_path):
    options = {**SMALL, "rows": ROWS[kind](several=True), "max_steps": 3}
    whole, _ = build("qwen2_vl", kind, True, tmp_path / "whole", **options)
    small, _ = build("qwen2_vl", kind, True, tmp_path / "small", **options)
    if kind == "sft":  # memory for two micro-batches
        failed = Fails(small, torch.OutOfMemoryError("CUDA out of memory."))
        failed.count = 2
    else:
        Fails(small, torch.OutOfMemoryError("CUDA out of memory."))
    assert apart(weights(fitted(whole).model), weights(fitted(small).model)) < 1e-6
    events = [event["action"] for event in small.hybrid_summary()["out_of_memory"]]
    if kind != "sft":
        assert events == ["an image is encoded in each micro-batch that has it"]


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_training_that_was_interrupted_in_a_window_begins_again(kind, tmp_path):
    found = []
    for ours in (False, True):
        options = {**SMALL, "rows": ROWS[kind](several=True), "max_steps": 3}
        trainer, _ = build("qwen2_vl", kind, ours, tmp_path / str(ours), **options)
        Fails(trainer, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.model.zero_grad()
        found.append(weights(fitted(trainer).model))
    assert apart(*found) < 1e-5


@pytest.mark.parametrize("kind", mostly_slow(KINDS, ["kto", "grpo"]))
def test_a_resumed_run_ends_at_the_same_bits(kind, tmp_path):
    options = {**SMALL, "rows": ROWS[kind](several=True), "save_strategy": "steps", "save_steps": 2}
    whole = fitted(build("qwen2_vl", kind, True, tmp_path, **options)[0])
    resumed = fitted(build("qwen2_vl", kind, True, tmp_path / "resumed", **options)[0], str(tmp_path / "checkpoint-2"))
    assert_same_weights(weights(whole.model), weights(resumed.model))


# Processes.


def stay(tensor, *args, own=torch.Tensor.to, **options):
    """Moves a tensor as on a GPU, where it stays the same if it is there: to `cpu:0` torch copies it."""
    device = args[0] if args else options.get("device")
    is_there = "dtype" not in options and isinstance(device, torch.device) and device.type == tensor.device.type
    return tensor if is_there else own(tensor, *args, **options)


def two_processes(kind, folder, changes):
    torch.Tensor.to = stay
    for ours in (False, True):
        options = {**SMALL, "rows": ROWS[kind](several=True), "max_steps": 3, "ddp_find_unused_parameters": True}
        options[checkpointing_option()] = True  # no process tries again if it holds too much
        trainer, watch = build("qwen2_vl", kind, ours, folder / f"{ours}", **options)
        if changes:  # the last micro-batch of each window
            brighter(trainer, (3,))
        fitted(trainer)
        encoded = [(len(step), len(set(step))) for step in watch.learned[1:]]
        model = trainer.accelerator.unwrap_model(trainer.model)
        torch.save((weights(model), encoded), folder / f"{ours}{trainer.accelerator.process_index}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.processes
@pytest.mark.parametrize("changes", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", mostly_slow(("sft", *KINDS), ["kto", "grpo"]))
def test_two_processes_encode_a_picture_once_each(kind, changes, tmp_path):
    assert together(2, lambda: two_processes(kind, tmp_path, changes)) == [0, 0]
    for process in range(2):
        (theirs, before), (found, encoded) = (torch.load(tmp_path / f"{ours}{process}.pt") for ours in (False, True))
        assert max((theirs[key] - found[key]).abs().max().item() for key in theirs) < 1e-6
        assert changes or all(count == distinct for count, distinct in encoded)
        assert changes or sum(count for count, _ in before) > sum(count for count, _ in encoded) > 0
