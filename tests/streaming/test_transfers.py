"""What the host and the device hold for copies: buffers used again, slots given back, memory given out in turn."""

import gc
import random
import weakref

import pytest
import torch
from conftest import ByteText, hybrid_config, tiny_model

from hf_hybrid import HybridTrainer, machine
from hf_hybrid.streaming.transfers import HostBuffers, Ring

STREAMED = {"memory": "stream", "enable_predict": False, "resident_layers": 1, "gradient_accumulation_steps": 2}


def streamed(folder, **overrides):
    model = tiny_model(num_hidden_layers=4)
    return HybridTrainer(model, hybrid_config(folder, **{**STREAMED, **overrides}), train_dataset=ByteText(40))


def test_a_thousand_lengths_keep_no_more_than_the_longest_needs():
    buffers, draw = HostBuffers(pin=False), random.Random(0)
    for length in draw.sample(range(1, 2001), 1000):
        for lent in [buffers.take(torch.empty(length, 8)) for _ in range(3)]:
            buffers.give_back(lent)
    assert len(buffers.spare) == 3 and sum(b.nbytes for b in buffers.spare) <= 3 * 2000 * 8 * 4


@pytest.mark.usefixtures("of_a_library")
def test_a_window_that_fails_gives_its_buffers_back(tmp_path):
    trainer = streamed(tmp_path, accumulation_walk="layer", offload_activations=True, max_steps=4)
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 4 + 7:  # the walks are compared before
            assert trainer.memory.window.parking._lent
            raise RuntimeError("say")

    trainer.model.model.layers[2].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="say"):
        trainer.train()
    assert not trainer.memory.window.parking._lent


def test_slots_do_not_double_when_the_model_is_saved(tmp_path, monkeypatch):
    trainer, slots, seen = streamed(tmp_path, max_steps=4, save_strategy="steps", save_steps=2), [], []
    streamer = trainer.memory.streamer
    attach = streamer.attach

    def attach_and_look():
        gc.collect()
        seen.append(sum(slot() is not None for slot in slots))
        attach()
        slots.extend(weakref.ref(slot.buffer) for pool in streamer._pools for slot in pool.slots)

    monkeypatch.setattr(streamer, "attach", attach_and_look)
    trainer.train()
    assert len(seen) >= 3, "the model was saved in the middle of the run"
    assert slots and not any(seen), "slots of before live on when new ones are made"


def test_a_ring_gives_nothing_out_twice():
    """What has left may be overwritten, the oldest first; what waits for its update may not, until it is forgotten."""
    ring = Ring(10, torch.device("cpu"))

    def take(size):
        slot = ring.take(size)
        return slot, None if slot is None else slot.buffer.data_ptr() - ring.whole.buffer.data_ptr()

    (first, place), (second, other) = take(4), take(6)
    assert sorted((place, other)) in ([0, 4], [0, 6]) and take(1) == (None, None)
    first.sent = "gone"
    ring.give_back(first)
    third, inside = take(3)
    assert third.sent == "gone" and place <= inside <= place + 1
    assert take(2) == (None, None), "one byte of the first is left"
    second.sent = "gone later"
    ring.give_back(second)
    assert take(4)[0].sent == "gone later"
    ring.forget()
    assert take(10)[0].sent is None, "copies in have waited for all that has left"


def test_pages_that_cannot_be_locked_are_ordinary_memory(monkeypatch, caplog):
    def refuse(size):
        raise RuntimeError("out of memory (2)")

    monkeypatch.setattr(machine, "_page_locked", refuse)
    machine._warn_of_pageable_memory.cache_clear()
    found = [machine.host_tensor(torch.Size((3, 5)), torch.bfloat16, pin=True) for _ in range(3)]
    assert all(t.shape == (3, 5) and t.dtype == torch.bfloat16 for t in found)
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "ulimit -l" in caplog.text


def test_devices_without_streams_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_hybrid.plan.of_trainer.copies_beside", lambda device: False)
    config = hybrid_config(tmp_path, **STREAMED)
    monkeypatch.setattr(type(config), "device", torch.device("mps"), raising=False)
    with pytest.raises(ValueError, match="`memory=stream` cannot be used here: `mps` has no streams"):
        HybridTrainer(tiny_model(num_hidden_layers=4), config, train_dataset=ByteText(40))
