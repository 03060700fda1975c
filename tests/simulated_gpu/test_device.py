"""The simulated device finds errors that are planted, and nothing in code that is right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.simulated
PROGRAM = """
import json, sys
sys.path[:0] = [sys.argv[1]]
try:
    from simulated_gpu import device
    device.install()
except RuntimeError as error:
    print(json.dumps({"unavailable": str(error)}))
    sys.exit()
import torch

def buffers():
    host = torch.full((64,), 7.0).pin_memory()
    return host, torch.zeros(64, device="cuda"), torch.cuda.Stream()

def ordered():
    host, there, side = buffers()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there.copy_(host, non_blocking=True)
    torch.cuda.current_stream().wait_event(side.record_event())
    return there.sum().item()

def not_waited_for():
    host, there, side = buffers()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there.copy_(host, non_blocking=True)
    return there.sum().item()

def overwritten_too_early():
    host, there, side = buffers()
    result = there * 2
    with torch.cuda.stream(side):
        there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return result.sum().item()

def host_writes_meanwhile():
    host, there, side = buffers()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), device.HostMode():
        there.copy_(host, non_blocking=True)
        host.zero_()
    torch.cuda.synchronize()
    return there.sum().item()

def host_reads_too_early():
    host, there, side = buffers()
    there.fill_(3.0)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), device.HostMode():
        host.copy_(there, non_blocking=True)
        value = host.sum().item()
    torch.cuda.synchronize()
    return value

def freed_in_flight():
    host, there, side = buffers()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(there, non_blocking=True)
    del there

def freed_in_flight_but_recorded():
    host, there, side = buffers()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(there, non_blocking=True)
    there.record_stream(side)
    del there

def unregistered_in_flight():
    host, there, side = torch.zeros(64), torch.zeros(64, device="cuda"), torch.cuda.Stream()
    torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there.copy_(host, non_blocking=True)
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    torch.cuda.synchronize()

def mixed():
    return torch.ones(3, device="cuda") + torch.ones(3)

def read_by_the_host():
    return torch.ones(3, device="cuda").numpy()

def backward():
    weight = torch.full((3, 3), 2.0, device="cuda", requires_grad=True)
    threads = []
    weight.register_post_accumulate_grad_hook(lambda _: threads.append(__import__("threading").get_ident()))
    (torch.ones(3, 3, device="cuda") @ weight).square().sum().backward()
    return weight.grad.cpu().tolist(), threads[0] != __import__("threading").get_ident()

def garbage():
    return torch.empty(16, device="cuda").cpu().tolist()

def counted():
    ones = torch.ones(8, device="cuda")
    ones.sum().item(), ones.cpu(), ones.nonzero()

def limited():
    device.limit = device.device_bytes + 100
    try:
        return torch.empty(200, dtype=torch.uint8, device="cuda")
    finally:
        device.limit = None

found = {}
for name in ("ordered", "not_waited_for", "overwritten_too_early", "host_writes_meanwhile", "host_reads_too_early",
             "freed_in_flight", "freed_in_flight_but_recorded", "unregistered_in_flight", "mixed", "read_by_the_host",
             "backward", "garbage", "counted", "limited"):
    device.reset()
    torch.cuda.synchronize()
    device.reset()
    before = device.device_bytes
    value, error = None, None
    try:
        value = globals()[name]()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    found[name] = {"value": value, "error": error, "races": list(device.found.races),
                   "stops": [kind for (_, kind), count in device.found.stops.items() for _ in range(count)],
                   "bytes": device.device_bytes - before}
print(json.dumps(found, default=str))
"""


@pytest.fixture(scope="module")
def found():
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout.splitlines()[-1])
    if "unavailable" in values:
        pytest.skip(values["unavailable"])
    return values


def test_ordered_copies_are_right_and_no_race(found):
    assert found["ordered"]["value"] == 7 * 64 and not found["ordered"]["races"]


def test_what_is_not_waited_for_is_a_race_and_a_wrong_number(found):
    assert found["not_waited_for"]["value"] == 0
    assert "RACE on device memory: read by compute" in found["not_waited_for"]["races"][0]


@pytest.mark.parametrize("name", ["overwritten_too_early", "host_writes_meanwhile", "host_reads_too_early"])
def test_unordered_accesses_are_races(name, found):
    assert found[name]["races"] and all(race.startswith("RACE") for race in found[name]["races"])


def test_late_copies_take_what_the_host_wrote_meanwhile(found):
    assert found["host_writes_meanwhile"]["value"] == 0
    assert found["host_reads_too_early"]["value"] == 7 * 64


def test_memory_that_is_freed_in_flight_is_found(found):
    assert found["freed_in_flight"]["races"][0].startswith("FREED")
    assert not found["freed_in_flight_but_recorded"]["races"]
    assert found["unregistered_in_flight"]["races"][0].startswith("UNLOCKED")


def test_devices_do_not_mix(found):
    assert "same device" in found["mixed"]["error"]
    assert found["read_by_the_host"]["error"].startswith("TypeError")


def test_backward_runs_on_a_thread_of_the_device(found):
    gradient, other_thread = found["backward"]["value"]
    assert gradient == [[36.0] * 3] * 3 and other_thread


def test_fresh_memory_holds_garbage(found):
    assert any(value != 0 for value in found["garbage"]["value"])


def test_stops_of_the_host_are_counted(found):
    assert found["counted"]["stops"] == ["aten::_local_scalar_dense", "copy to the host (pageable)", "aten::nonzero"]
    assert found["ordered"]["stops"] == ["aten::_local_scalar_dense"]


def test_memory_is_counted_and_may_end(found):
    assert found["limited"]["error"].startswith("OutOfMemoryError")
    assert all(result["bytes"] == 0 for result in found.values())
