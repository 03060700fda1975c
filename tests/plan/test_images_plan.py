"""Plans count images: what an encoder holds, of rows that a collator makes, beside what real steps hold."""

import dataclasses
import itertools
import weakref

import pytest
import torch
from conftest import config_values, mostly_slow
from rig import vision
from rig.live_bytes import LiveBytes, storages
from transformers import TrainerCallback

from hf_hybrid import HybridConfig, HybridTrainer, plan_memory
from hf_hybrid.build import estimator_for, make_plan
from hf_hybrid.compat import checkpointing_option
from hf_hybrid.plan.images import SomeImages, encoder_of


class Held(TrainerCallback):
    """The most bytes that the forward and backward pass of the second step hold, with weights and states."""

    def __init__(self):
        self.live = LiveBytes()

    def hold(self, tensors):
        for storage in storages(tensors):
            if storage._cdata not in self.live.sizes:
                self.live.sizes[storage._cdata] = storage.nbytes()
                self.live.now += storage.nbytes()
                weakref.finalize(storage, self.live._remove, storage._cdata)

    def on_step_begin(self, args, state, control, model, optimizer, **kwargs):
        if state.global_step == 1:
            states = [value for of_one in optimizer.state.values() for value in of_one.values()]
            self.hold([*model.parameters(), *model.buffers(), *states])
            model.register_forward_pre_hook(lambda _, args, kwargs: self.hold(kwargs), with_kwargs=True)
            self.live.__enter__()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.live.__exit__(None, None, None)


def trainer_of(name, folder, change=None, **options):
    """A trainer whose rows have one picture each, all of one size, and one length."""
    model, processor = vision.vision_model(name)

    def collated(rows):
        texts = [f"<row> {vision.KINDS[name].get('place', '<image>')} {row['text']}" for row in rows]
        batch = processor(images=[[row["image"]] for row in rows], text=texts, padding=True, return_tensors="pt")
        return {**batch, "labels": batch["input_ids"].clone()}

    rows = [{"image": vision.picture(seed, (32, 32)), "text": "w1 w2 w3 w4 w5"} for seed in range(16)]
    values = {"max_steps": 2, "gradient_accumulation_steps": 1, "enable_predict": False, "share_rows": "off"}
    config = HybridConfig(**config_values(folder, remove_unused_columns=False, **{**values, **options}))
    if change is not None:
        change(vision.tower_of(name, model))
    return HybridTrainer(model, config, train_dataset=rows, data_collator=collated, callbacks=[Held()])


def frozen(tower):
    tower.requires_grad_(False)


CASES = {
    "all": {},
    "recomputed": {checkpointing_option(): True},
    "frozen": {"change": frozen},
    "bf16": {"bf16": True},
}


OF_CASES = [*itertools.product(["qwen2_vl", "llava", "smolvlm"], CASES)]
QUICK = [("qwen2_vl", case) for case in CASES] + [("llava", "frozen"), ("smolvlm", "recomputed")]


@pytest.mark.parametrize("name, case", mostly_slow(OF_CASES, QUICK))
def test_the_planned_peak_with_images_is_that_of_a_step(name, case, tmp_path):
    trainer = trainer_of(name, tmp_path, **CASES[case])
    estimator, setup = estimator_for(trainer, None)
    planned = estimator.resident(
        dataclasses.replace(setup, memory="off", activation_checkpointing=case == "recomputed")
    )
    trainer.train()
    held = next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Held))
    assert planned.traced and planned.peak_device_bytes == pytest.approx(held.live.peak, rel=0.05)


@pytest.mark.parametrize(
    "name", mostly_slow(vision.KINDS, ["qwen2_vl", "qwen3_vl", "idefics3", "llava_next", "gemma3"])
)
@pytest.mark.long
def test_encoders_of_all_kinds_are_traced(name, tmp_path):
    trainer = trainer_of(name, tmp_path)
    before = torch.get_rng_state()
    estimator, setup = estimator_for(trainer, None)
    assert torch.equal(before, torch.get_rng_state())
    frozen(vision.tower_of(name, trainer.model))
    cheaper, _ = estimator_for(trainer, None)
    setup = dataclasses.replace(setup, memory="off", activation_checkpointing=False)
    with_encoder, without = estimator.resident(setup), cheaper.resident(setup)
    assert with_encoder.traced and without.traced, "the encoder's activations are counted where they are kept"
    assert with_encoder.table.get("activations", "device") > without.table.get("activations", "device")


def test_images_of_micro_batches_that_wait_are_counted(tmp_path):
    trainer = trainer_of("qwen2_vl", tmp_path)
    estimator, setup = estimator_for(trainer, None)
    setup = dataclasses.replace(setup, memory="off", gradient_accumulation_steps=2)
    two, three = (estimator.resident(dataclasses.replace(setup, gradient_accumulation_steps=n)) for n in (2, 3))
    of_a_row = 64 * 96 * 4 + 3 * 8
    assert three.peak_device_bytes - two.peak_device_bytes == setup.batch_size * of_a_row


def test_rows_that_cannot_be_collated_are_planned_without_images(tmp_path, caplog):
    trainer = trainer_of("qwen2_vl", tmp_path)
    trainer.data_collator = lambda rows: rows[0]["labels"]
    with caplog.at_level("INFO", logger="hf_hybrid"):
        assert make_plan(trainer, None).setup.sequence_length == 1024
    assert "The rows cannot be collated (KeyError('labels'))" in caplog.text


# From a config alone.


@pytest.mark.parametrize("name", ["qwen2_vl", "llava", "smolvlm"])
def test_a_plan_from_a_config_is_the_peak_of_a_step_half_of_whose_tokens_are_those_of_images(name):
    model, _ = vision.vision_model(name)
    encoder, length = encoder_of(model), 64
    values = SomeImages.assumed(encoder, length).tensors
    given = {key: torch.cat([value] * 2) for key, value in values.items()}
    with torch.no_grad():
        features = encoder.get_image_features(**given, return_dict=True).pooler_output
    tokens = sum(one.shape[:-1].numel() for one in features) // 2
    assert tokens == pytest.approx(length / 2, abs=8)
    ids = torch.full((2, length), 30)
    ids[:, 4 : 4 + tokens] = encoder.config.image_token_id
    if "image_grid_thw" in given:
        given["mm_token_type_ids"] = (ids == encoder.config.image_token_id).long()
    asked = {"sequence_length": length, "batch_size": 2, "dtype": "float32", "memory": "off", "accelerator": "cpu"}
    planned = plan_memory(model, **asked, enable_predict=False)
    states = planned.table.get("states", "device")
    held = Held()
    model.train()
    held.hold([ids, *given.values(), *model.parameters(), *model.buffers()])
    with held.live:
        model(input_ids=ids, labels=ids, use_cache=False, **given).loss.backward()
    assert planned.traced and planned.peak_device_bytes - states == pytest.approx(held.live.peak, rel=0.05)


def test_a_config_that_does_not_tell_what_an_image_is_is_refused():
    with pytest.raises(ValueError, match="does not tell how images are cut into tiles. Make a trainer"):
        plan_memory(vision.vision_model("llava_next")[0], sequence_length=64)
