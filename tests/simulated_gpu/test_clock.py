"""The clock of the simulated device, on cases whose times are computed by hand."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from benchmarks.tables.memory import clock
from hf_hybrid.cli.cards import CARDS, HOSTS, LAUNCH_SECONDS
from hf_hybrid.cli.planner import Planner
from hf_hybrid.cli.times import LAUNCHES, step_time
from hf_hybrid.cli.ways import Way
from simulated_gpu.resources import UPDATE, Cache, HostMemory, Turns
from simulated_gpu.results import TESTS, python_path


def test_work_gets_what_copies_leave():
    memory = HostMemory(100.0)
    assert memory.copy(1.0, 50.0, rate=25.0) == pytest.approx(3.0)
    # One second alone (100), two beside the copy (150), and half a second alone (50).
    assert memory.end_of_work(0.0, 300.0) == pytest.approx(3.5)
    assert memory.work(0.0, 300.0) == pytest.approx(3.5)
    # Nothing is left until 3.5.
    assert memory.work(0.0, 100.0) == pytest.approx(4.5)
    assert memory.copy(0.0, 25.0, rate=25.0) == pytest.approx(1.0)  # a copy waits for no work


def test_two_copies_share_a_slow_memory():
    memory = HostMemory(40.0)
    assert memory.copy(0.0, 25.0, rate=25.0) == pytest.approx(1.0)
    # 15 of 25 in the first second, the other 10 at 25 per second.
    assert memory.copy(0.0, 25.0, rate=25.0) == pytest.approx(1.4)
    assert memory.work(0.0, 15.0 * 0.4) == pytest.approx(1.4)


def test_what_is_past_can_be_forgotten():
    memory = HostMemory(10.0)
    for start in range(5):
        memory.copy(start, 5.0, rate=10.0)
    memory.forget(3.0)
    assert memory.work(3.0, 15.0) == pytest.approx(5.5)  # beside two more copies of half a second


def _tensor(address, size):
    return SimpleNamespace(data_ptr=lambda: address, nbytes=size)


def test_the_cache_moves_each_byte_once():
    cache = Cache(100)
    first, second, third = _tensor(0, 40), _tensor(100, 40), _tensor(200, 40)
    assert cache.move([first], []) == 40
    assert cache.move([first], []) == 0
    assert cache.move([], [first]) == 40  # goes back once, however often it is written
    assert cache.move([], [first]) == 0
    assert cache.move([], [second]) == 80  # its lines come, and go back
    assert cache.move([third], []) == 40
    assert cache.move([first], []) == 40  # the third took its place
    cache.lose(third)
    assert cache.move([third], []) == 40


def test_the_earlier_thread_runs_first():
    turns, seen, future = Turns(), [], Future()

    def update():
        turns.begin_task()
        for _ in range(3):
            seen.append(("update", turns.me.time))
            turns.me.time += 2.0
            turns.give_way()
        turns.end_task(future)

    turns.me.time = 1.0
    turns.submitted()
    thread = threading.Thread(target=update, name="lazy_update_0")
    thread.start()
    for _ in range(3):
        turns.me.time += 1.5
        turns.give_way()
        seen.append(("host", turns.me.time))
    assert turns.wait_for(future) == pytest.approx(7.0 - 5.5)
    thread.join()
    order = [("update", 1.0), ("host", 2.5), ("update", 3.0), ("host", 4.0), ("update", 5.0), ("host", 5.5)]
    assert seen == order
    assert not turns.actors[UPDATE].runs


CASE = """
import json
from simulated_gpu import device as sim
from simulated_gpu.clock import Clock, HOST_CALL, KERNEL
import torch
from hf_hybrid.cli.cards import Card, Host

class Plain(Card):  # rates as they are given
    products = property(lambda self: self.peak_products)
    memory = property(lambda self: self.peak_memory)
    bus = property(lambda self: self.peak_bus)

class PlainHost(Host):
    memory = property(lambda self: self.peak_memory)

sim.install()
weights = torch.zeros(1000, dtype=torch.uint8, pin_memory=True)
target = torch.empty(1000, dtype=torch.uint8, device="cuda")
left, right = torch.ones(10, 20, device="cuda"), torch.ones(20, 30, device="cuda")
side = torch.cuda.Stream()
host = torch.ones(1000)
clock = sim.clock = Clock(Plain("card", 1e3, 1.0, 1e3, 1e6, 1e2, 0, ""), PlainHost("host", 4e3, 0, ""), launch=0.25)
told = []
with sim.HostMode():
    with torch.cuda.stream(side):
        target.copy_(weights, non_blocking=True)      # launched at 0.25, 10 s over the bus
    arrived = side.record_event()
    torch.mm(left, right)                             # launched at 0.5: 12000 operations, 12 s, and the kernel's own
    told.append(clock.streams["compute"] - KERNEL)
    torch.cuda.current_stream().wait_event(arrived)   # was over before
    told.append(clock.streams["compute"] - KERNEL)
    host.mul_(2.0)                                    # at 0.5: 8000 bytes at 4000 less the copy's 100 per second
    told.append(clock.now() - HOST_CALL)
    torch.cuda.current_stream().synchronize()
    told.append(clock.now() - KERNEL)
print(json.dumps(told))
"""


@pytest.mark.simulated
def test_a_copy_a_product_and_work_of_the_host():
    environment = {**os.environ, "PYTHONPATH": python_path(TESTS.parent, TESTS)}
    done = subprocess.run([sys.executable, "-c", CASE], env=environment, capture_output=True, text=True)
    if "Unavailable" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]
    product, waited, worked, stopped = json.loads(done.stdout.splitlines()[-1])
    assert product == waited == pytest.approx(12.5)
    assert worked == pytest.approx(0.5 + 8000 / 3900, abs=1e-4)
    assert stopped == pytest.approx(12.5)


@pytest.mark.parametrize("kind,trained", [("full", "autocast"), ("8bit", "same"), ("lora", "adapters")])
def test_the_planner_has_the_kernels_that_the_clock_counted(kind, trained):
    four, sixteen = (clock(kind, "7b", count, "rtx4090", "desktop") for count in (4, 16))
    launched = (sixteen["busy"]["launches"] - four["busy"]["launches"]) / LAUNCH_SECONDS
    passes = 12 * 8 * 4  # micro-batches, layers, and forward, forward again and a backward pass, which counts twice
    assert LAUNCHES[trained] == pytest.approx(launched / passes, rel=0.03)


STEPS = """
import json, sys
from simulated_gpu import clock
resident = (("resident_layers", {resident}),)
found = clock.time_step(clock.Work("{kind}", "7b", {count}, "{card}", "{host}", layers={layers}, options=resident))
print(json.dumps(found.seconds))
"""


@pytest.mark.simulated
@pytest.mark.parametrize(
    "kind,count,card,host,layers,resident",
    [
        ("full", 1, "rtx4090", "desktop", 3, 0),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("full", 4, "rtx4090", "desktop", 8, 0),
                ("full", 4, "rtx4090", "poor", 8, 0),
                ("full", 4, "h100", "server", 8, 0),
                ("full", 1, "rtx4090", "desktop", 8, 2),
                ("full", 4, "rtx4090", "desktop", 8, 1),
                ("full", 1, "h100", "server", 8, 4),
                ("full", 4, "h100", "server", 8, 3),
                ("full", 16, "h100", "server", 8, 4),
                ("8bit", 4, "rtx4090", "desktop", 8, 0),
                ("8bit", 1, "h100", "server", 8, 4),
                ("lora", 4, "rtx4090", "desktop", 8, 0),
                ("lora", 4, "h100", "server", 8, 0),
            )
        ),
    ],
)
def test_the_planner_says_what_the_clock_says(kind, count, card, host, layers, resident):
    code = STEPS.format(kind=kind, count=count, card=card, host=host, layers=layers, resident=resident)
    environment = {**os.environ, "PYTHONPATH": python_path(TESTS.parent, TESTS)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if "Unavailable" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]
    config = LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=layers, num_attention_heads=32,
        max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    trains = "adapters" if kind == "lora" else "all"
    planner = Planner(
        config, peft="lora" if kind == "lora" else None, sequence_length=4096, gradient_accumulation_steps=count,
        memory="stream", enable_predict=False, optimizer_states="8bit" if kind == "8bit" else "exact",
        accelerator="cuda",
    )  # fmt: skip
    setup = replace(planner.setup, autocast=True, resident_layers=resident, stream_embeddings=False)
    planned = planner.plan(Way("timed", setup, trains, "float32" if kind == "full" else "bfloat16"))
    estimated = step_time(planned, CARDS[card], HOSTS[host]).seconds
    assert estimated == pytest.approx(json.loads(done.stdout.splitlines()[-1]), rel=0.1)
