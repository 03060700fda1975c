"""The profiler's parts against numbers known beforehand: a made-up device, allocator, driver, kernel and disk."""

import json
import mmap
import sys
import types

import pynvml
import pytest
import torch
from conftest import tiny_model
from rig import trainers
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from hf_hybrid.records import profiler as profiler_module
from hf_hybrid.records.profiler import DeviceMemory, Driver, HostMemory, MemoryProbes, MemoryProfilerCallback
from hf_hybrid.records.readings import Totals

MIB = 2**20


# A device whose allocator can be told what it holds.


class FakeDevice:
    def __init__(self):
        self.allocated = self.peak = 0

    def hold(self, count):
        self.allocated, self.peak = count, max(self.peak, count)

    def read(self):
        values = {"allocated": self.allocated, "peak_allocated": self.peak}
        return {**values, "reserved": self.peak + 5 * MIB, "peak_reserved": self.peak + 5 * MIB}

    def reset_peak(self):
        self.peak = self.allocated


class FakeDriver:
    def read(self):
        return {"used": 900 * MIB, "total": 1000 * MIB}


class FakeSteps(TrainerCallback):
    """
    Moves the fake device's memory as a step does: up in forward, down to what is kept, up a little in the update.

    Runs before the profiler, so that each moment is as it finds it.
    """

    KEPT, ACTIVATIONS, UPDATE = 100 * MIB, 60 * MIB, 70 * MIB

    def __init__(self, device, extra=lambda step: 0):
        self.device, self.extra = device, extra

    def on_train_begin(self, args, state, control, **kwargs):
        self.device.hold(self.KEPT)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.device.hold(self.KEPT + self.ACTIVATIONS + self.extra(state.global_step + 1))
        self.device.hold(self.KEPT)

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.device.hold(self.KEPT + self.UPDATE)
        self.device.hold(self.KEPT)


@pytest.fixture
def fake(monkeypatch):
    device = FakeDevice()

    class Probes(MemoryProbes):
        def __init__(self, _):
            super().__init__(torch.device("cpu"))
            self.device, self.driver = device, FakeDriver()

    # What lives on the CPU is, for this test, on the device.
    held_bytes = profiler_module.held_bytes

    def on_device(*args):
        found = held_bytes(*args)
        for category, _, host in found.rows():
            found._bytes[category, "device"], found._bytes[category, "host"] = host, 0
        return found

    monkeypatch.setattr(profiler_module, "MemoryProbes", Probes)
    monkeypatch.setattr(profiler_module, "held_bytes", on_device)
    return device


def run(folder, *callbacks, **values):
    return trainers.train(folder, Trainer, TrainingArguments, callbacks=list(callbacks), **{"max_steps": 8, **values})


def lines(folder, name="steps.jsonl"):
    """Without that of the beginning."""
    return [json.loads(line) for line in (folder / "profile" / name).read_text().splitlines()][1:]


def test_on_a_device_the_categories_add_up_to_its_peak(tmp_path, fake):
    profiler = MemoryProfilerCallback(account_every=1)
    trainer = run(tmp_path, FakeSteps(fake), profiler)
    weights = sum(p.nbytes for p in trainer.model.parameters())
    counted = [r for r in lines(tmp_path) if r["held"] is not None]
    assert len(counted) == 7
    for record in counted:
        held = {category: places["device"] for category, places in record["held"].items()}
        assert held["weights"] == held["gradients"] == weights
        assert held["activations"] == FakeSteps.ACTIVATIONS
        assert record["measured"] == record["device"]["peak_allocated"] == FakeSteps.KEPT + FakeSteps.UPDATE
        assert record["device"]["allocated"] == FakeSteps.KEPT
        # What is allocated and no category's, and what the update needed above forward and backward.
        outside = FakeSteps.KEPT - (sum(held.values()) - held["activations"])
        assert record["unexplained"] == outside + FakeSteps.UPDATE - FakeSteps.ACTIVATIONS
        assert sum(held.values()) + record["unexplained"] == record["measured"]
        assert record["nvml"] == {"used": 900 * MIB, "total": 1000 * MIB}
    summary = profiler.summary()
    peak = FakeSteps.KEPT + FakeSteps.UPDATE
    assert summary["peak"] == {"bytes": peak, "where": "device", "step": 1, "phase": "train"}
    accounted = summary["phases"]["train"]["accounted"]
    assert sum(p["device"] for p in accounted["held"].values()) + accounted["unexplained"] == accounted["measured"]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logged[-1]["memory/peak_device_gib"] == 170 / 1024 and logged[-1]["memory/allocated_gib"] == 100 / 1024
    assert logged[-1]["memory/device_used_gib"] == 900 / 1024 and logged[-1]["memory/reserved_gib"] == 175 / 1024
    assert summary["phases"]["train"]["nvml_used"]["max"] == 900 * MIB


def test_on_a_device_every_hybrid_phase_adds_up(tmp_path, fake):
    profiler = MemoryProfilerCallback(account_every=1)
    trainer = trainers.build(tmp_path, callbacks=[FakeSteps(fake)])
    trainer.add_callback(profiler)
    profiler.attach(trainer)
    trainer.callback_handler.callbacks.insert(0, trainer.pop_callback(FakeSteps))
    trainer.train()
    phases = profiler.summary()["phases"]
    assert set(phases) == {"warmup", "full", "predict", "correct"}
    for found in phases.values():
        accounted = found["accounted"]
        total = sum(places["device"] for places in accounted["held"].values())
        assert total + accounted["unexplained"] == pytest.approx(accounted["measured"])
        assert accounted["measured"] == found["peak_allocated"]["max"] == 170 * MIB


def test_tensors_are_counted_within_a_quarter_percent_of_the_time(tmp_path, monkeypatch):
    """With a clock that the test moves: counting takes 1 s, a step 10 s."""
    now = [0.0]
    monkeypatch.setattr(profiler_module, "time", types.SimpleNamespace(perf_counter=lambda: now[0], time=lambda: 0.0))
    held_bytes = profiler_module.held_bytes

    def slow(*args):
        now[0] += 1.0
        return held_bytes(*args)

    class Steps(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            now[0] += 10.0

    monkeypatch.setattr(profiler_module, "held_bytes", slow)
    profiler = MemoryProfilerCallback()
    run(tmp_path, Steps(), profiler, max_steps=90)
    counted = [r["step"] for r in lines(tmp_path) if r["held"] is not None]
    assert counted == [2, 40, 80], "one second in four hundred"
    assert profiler.own_seconds == pytest.approx(3.0)


# A run on CUDA.


def test_on_cuda_a_process_writes_what_its_allocator_and_driver_say(tmp_path, monkeypatch):
    """The hooks called by hand: no Trainer takes a GPU that is not there."""
    stats = {name: {"all": {"current": 3, "peak": 4}} for name in ("allocated_bytes", "reserved_bytes")}
    properties = types.SimpleNamespace(name="A GPU", total_memory=80, uuid="abc")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    args = types.SimpleNamespace(output_dir=str(tmp_path), process_index=1, world_size=2, device=torch.device("cuda:0"))
    state, model = TrainerState(max_steps=2), tiny_model()
    profiler = MemoryProfilerCallback()
    profiler.on_train_begin(args, state, None, model=model, optimizer=None)
    profiler.on_step_begin(args, state, None)
    profiler.on_pre_optimizer_step(args, state, None, model=model, optimizer=None)
    profiler.on_optimizer_step(args, state, None)
    state.global_step = 1
    profiler.on_step_end(args, state, None)
    profiler.on_train_end(args, state, None)
    (record,) = lines(tmp_path, "steps-rank1.jsonl")
    assert record["device"] == {"allocated": 3, "peak_allocated": 4, "reserved": 3, "peak_reserved": 4}
    assert record["nvml"] == {"used": 7, "total": 9} and record["measured"] == 4
    assert not (tmp_path / "profile" / "steps.jsonl").exists(), "the first process writes it"


# What is read.


def test_the_allocator_is_read_in_one_call(monkeypatch):
    stats = {
        "allocated_bytes": {"all": {"current": 10, "peak": 20}},
        "reserved_bytes": {"all": {"current": 30, "peak": 40}},
    }
    asked, reset = [], []
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: asked.append(device) or stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    memory = DeviceMemory(torch.device("cuda:1"))
    assert memory.read() == {"allocated": 10, "peak_allocated": 20, "reserved": 30, "peak_reserved": 40}
    memory.reset_peak()
    assert asked == reset == [torch.device("cuda:1")]


def fake_nvml(error=None, samples=None):
    def handle(identity):
        assert identity == "GPU-abc"
        return "handle"

    def info(found):
        assert found == "handle"
        if error:
            raise pynvml.NVMLError(error)
        return types.SimpleNamespace(used=7, total=9)

    def taken(found, kind, since):
        assert found == "handle" and kind == pynvml.NVML_GPU_UTILIZATION_SAMPLES
        result = samples.pop(0)
        if isinstance(result, int):
            raise pynvml.NVMLError(result)
        assert result.pop("since") == since
        values = [pynvml.c_nvmlSample_t(at, pynvml.c_nvmlValue_t(uiVal=value)) for at, value in result.items()]
        return pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, values

    names = ("NVMLError", "NVML_ERROR_NOT_FOUND", "NVML_GPU_UTILIZATION_SAMPLES")
    return types.SimpleNamespace(
        **{name: getattr(pynvml, name) for name in names},
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetMemoryInfo=info,
        nvmlDeviceGetSamples=taken,
    )


def test_the_driver_is_asked_for_the_device_by_its_identity(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="abc"))
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    assert Driver(torch.device("cuda:0")).read() == {"used": 7, "total": 9}
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(pynvml.NVML_ERROR_GPU_IS_LOST))
    assert Driver(torch.device("cuda:0")).read() is None


def test_samples_of_the_driver_are_read_once(monkeypatch):
    properties = types.SimpleNamespace(name="A GPU", total_memory=80, uuid="abc")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    some, none = {"since": 0, 7: 90, 9: 40}, pynvml.NVML_ERROR_NOT_FOUND
    known = {"since": 9, 0: 100, 9: 40, 12: 30}  # a ring that is not full yet, and one that was read
    nvml = fake_nvml(samples=[some, none, known, pynvml.NVML_ERROR_NOT_SUPPORTED])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    driver = Driver(torch.device("cuda:0"))
    assert [driver.utilization() for _ in range(5)] == [[90, 40], [], [30], [], []]
    assert driver.read() is None, "nothing is asked any more"


def test_without_a_driver_nothing_is_said_aloud(caplog):
    caplog.set_level("DEBUG", logger="hf_hybrid")
    driver = Driver(torch.device("cuda:0"))  # there is none on the machines that run these tests
    assert driver.read() is None and driver.utilization() == []
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


def touch(size):
    """Memory of `size` bytes that no earlier test has left in the allocator's lists, each page of it written."""
    memory = mmap.mmap(-1, size)
    for page in range(0, size, mmap.PAGESIZE):
        memory[page] = 1
    return memory


def test_the_peak_of_resident_memory(tmp_path):
    memory = HostMemory()
    memory.reset_peak()
    before = memory.read()
    touch(64 * MIB).close()
    after = memory.read()
    assert memory.peak_source in ("high-water mark", "sampled")
    if memory.peak_source == "high-water mark":
        assert after["peak_rss"] - before["rss"] > 56 * MIB, "though it is gone"
        memory.reset_peak()
        assert memory.read()["peak_rss"] < after["peak_rss"] - 40 * MIB


def test_where_the_kernel_keeps_no_mark_the_peak_is_sampled(tmp_path):
    memory = HostMemory(tmp_path)  # no /proc
    assert memory.peak_source == "sampled"
    memory.reset_peak()
    before = memory.read()
    ballast = touch(64 * MIB)
    seen = memory.read()
    ballast.close()
    after = memory.read()
    assert seen["rss"] - before["rss"] > 56 * MIB
    assert after["peak_rss"] == seen["peak_rss"] == seen["rss"] > after["rss"]
    memory.reset_peak()
    assert memory.read()["peak_rss"] < seen["rss"]


# What is written.


def test_a_full_disk_does_not_end_the_training(tmp_path, caplog, monkeypatch):
    profiler = MemoryProfilerCallback()

    class Break(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                monkeypatch.setattr("hf_hybrid.records.log.append_line", self.fail)

        @staticmethod
        def fail(path, entry):
            raise OSError(28, "No space left on device")

    trainer = run(tmp_path, profiler, Break(), max_steps=6)
    assert trainer.state.global_step == 6 and len(lines(tmp_path)) == 2
    assert caplog.text.count("cannot be written") == 1
    assert profiler.summary()["phases"]["train"]["records"] == 6


def test_the_spread_of_a_reading():
    totals = Totals()
    for value in (3, 1, 2):
        totals.add({"step_seconds": value, "host": {"rss": 1}, "step": 1, "phase": "train", "measured": 1})
    assert totals.phases["train"]["step_seconds"] == {"count": 3, "mean": 2, "max": 3, "min": 1}
    assert MemoryProfilerCallback().summary()["phases"] == {}, "nothing was profiled yet"
