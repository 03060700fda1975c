"""
A simulated CUDA device for a torch without CUDA: it finds races, wrong placements and host stops, not speed.

**Tensors.** A device tensor is a `torch.Tensor` of device `cuda:0` over host bytes: DLPack lets a capsule say where its
bytes are, and ours says "CUDA". A fallback for the CUDA dispatch key runs every kernel on the CPU over the same bytes.
All Python code sees `device.type == "cuda"`, autograd runs its backward pass on a thread of the device, an operation
that mixes devices fails, and the host cannot read device bytes but by a copy. Fresh memory holds garbage.

**Order.** A GPU runs the work of one stream in order; streams and the host run beside each other unless an event, a
wait or a synchronisation orders them. Each of them, an *actor*, has a vector clock: what it knows to be over of every
other (Lamport 1978; Mattern 1989). A kernel or copy ticks its stream's clock. `record_event` copies a clock,
`wait_event` and `synchronize` join it into the waiting actor's. Two accesses to the same bytes of which one writes are
a race if neither actor knew the other's to be over, whether or not it went wrong this time. The contracts of the
allocators are checked the same way: memory that is given back while a stream may still use it ("FREED"), and
page-locked memory that is unregistered meanwhile ("UNLOCKED").

**Lateness.** A copy on a side stream runs as late as its events allow, so that what is not waited for also shows as
wrong numbers. Kernels run at once.

**Graphs.** A captured graph repeats the operations that were recorded, on the same bytes (rig/graphs.py).

**Stops.** Whatever makes the host wait for the device is counted, by the package whose code asked for it.

What it cannot show: speed; late kernels (the clocks find those races, the numbers do not); CUDA's own kernels (SDPA,
bitsandbytes, cuBLAS in lower precision), which compute as on the CPU; the device's random generator, which is the
CPU's; fragmentation; several devices; races between threads of the host, which share one clock.

Import this module before torch: autograd's engine looks for devices once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import types
import weakref
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Unavailable(RuntimeError):
    """The device cannot be simulated here; the message says why."""


# The C++ part, built once for each torch.


def build() -> Path:
    """The compiled `guard.cpp`, out of a cache folder.

    Raises:
        Unavailable: If there is no C++ compiler, or this torch has other headers than ours are written for.
    """
    source = Path(__file__).with_name("guard.cpp")
    torch_version = importlib.metadata.version("torch")
    key = hashlib.sha256(source.read_bytes() + f"{torch_version} {sys.version}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hf_hybrid"
    target = cache / f"simulated_gpu_{key}.so"
    if target.exists():
        return target
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise Unavailable("There is no C++ compiler (`g++` or `clang++`) to build tests/simulated_gpu/guard.cpp with.")
    top = Path(importlib.util.find_spec("torch").origin).parent
    headers = [top / "include", top / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    cache.mkdir(parents=True, exist_ok=True)
    made = cache / f"{target.stem}.{os.getpid()}"  # several workers may build at once
    command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", "-w", "-D_GLIBCXX_USE_CXX11_ABI=1"]
    command += [part for folder in headers for part in ("-I", str(folder))]
    command += [str(source), "-L", str(top / "lib"), "-lc10", "-ltorch_cpu", "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Unavailable(f"guard.cpp does not compile against torch {torch_version}:\n{done.stderr[-2000:]}")
    made.replace(target)
    return target


if "torch" in sys.modules:
    raise Unavailable("The device must be imported before torch.")
_libraries = Path(importlib.util.find_spec("torch").origin).parent / "lib"
for _library in (_libraries / "libc10.so", _libraries / "libtorch_cpu.so", build()):
    try:
        ctypes.CDLL(str(_library), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise Unavailable(f"{_library} cannot be loaded: {error}") from error

import torch  # noqa: E402
from rig.graphs import RecordedGraph, record  # noqa: E402
from torch.cuda import _gpu_trace as trace  # noqa: E402 - what torch's CUDA sanitizer is told
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

Tensor = torch.Tensor
aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
COMPUTE, HOST = "compute", "host"
PACKAGES = ("hf_hybrid", "transformers", "accelerate", "trl", "peft", "bitsandbytes")
TOTAL = 16 << 30
PAGEABLE_STAGED = 64 << 10
"""Bytes up to which the driver copies pageable memory into a buffer of its own and returns at once."""


@dataclass
class Findings:
    """What was seen since [`reset`]."""

    races: Counter = field(default_factory=Counter)
    stops: Counter = field(default_factory=Counter)
    """By (package whose code asked, kind)."""
    stop_sites: Counter = field(default_factory=Counter)
    """By site, also the looks."""
    looks: Counter = field(default_factory=Counter)
    """By site that waited for an event, the fewest launches behind it: the device was not idle."""
    conversions: Counter = field(default_factory=Counter)
    """Copies between host and device that change the dtype, which the device converts before or after they travel."""


found = Findings()
device_bytes = peak_bytes = reserved_bytes = 0
limit: int | None = None
"""Bytes of device memory that may be allocated."""
fault: Callable[[int], bool] | None = None
"""Asked at each allocation of so many bytes of device memory; `True` runs out of memory there."""
refuse_registration = False
"""Let the driver refuse to page-lock host memory."""
_lock = threading.RLock()
_thread = threading.local()


def reset() -> None:
    """Forget what was found so far."""
    for counter in vars(found).values():
        counter.clear()


# Where in the code something happened.

Site = tuple[tuple[types.CodeType, int], ...]
_ours: dict[str, bool] = {}
"""Whether a file is of the package. A string keeps its hash, which a code object computes anew from all it holds."""


def _site(most: int = 4) -> Site:
    """The innermost frames of the package; formatted only if somebody asks."""
    frame, frames = sys._getframe(2), []
    while frame is not None and len(frames) < most:
        code = frame.f_code
        ours = _ours.get(file := code.co_filename)
        if ours is None:
            ours = _ours[file] = "/hf_hybrid/" in file and "/tests/" not in file
        if ours:
            frames.append((code, frame.f_lineno))
        frame = frame.f_back
    return tuple(frames)


def _show(site: Site | str) -> str:
    if isinstance(site, str):
        return site
    parts = [f"{code.co_filename.rsplit('/hf_hybrid/', 1)[-1]}:{line}({code.co_name})" for code, line in site]
    return " < ".join(parts) or "outside of the package"


def _owner() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in PACKAGES:
            return package
        frame = frame.f_back
    return "other"


# Streams, events, and what each actor knows of the others.

Clock = dict[str, int]


def _join(clock: Clock, other: Clock) -> None:
    for actor, time in other.items():
        if time > clock.get(actor, 0):
            clock[actor] = time


_host: Clock = {HOST: 0}


class Stream:
    """A queue of work. The default stream runs at once, others as late as they may."""

    _count = 0
    all: list[Stream] = []
    """Work goes on when nobody holds its stream any more."""

    def __new__(cls, device=None, priority=0, **_):
        self = object.__new__(cls)
        Stream._count += 1
        self.name = f"side{Stream._count}"
        self.device, self.device_index, self.device_type = DEVICE, 0, 1
        self.stream_id = self.cuda_stream = Stream._count
        self.clock, self.at_once = {}, False
        self._tasks, self._done = [], 0
        Stream.all.append(self)
        trace.StreamCreationCallbacks.fire_callbacks(self.cuda_stream)
        return self

    def __init__(self, *args, **kwargs):
        pass

    def wait_event(self, event: Event) -> None:
        with _lock:
            if event.clock is not None:
                trace.EventWaitCallbacks.fire_callbacks(id(event), self.cuda_stream)
                _join(self.clock, event.clock)
                other, count = event.place
                self.enqueue(lambda: other.run(count))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _stop("stream.synchronize", self)

    def query(self) -> bool:
        return self._done == len(self._tasks)

    def is_capturing(self) -> bool:
        return False

    def enqueue(self, task: Callable[[], None]) -> None:
        if self.at_once:
            task()
        else:
            self._tasks.append(task)

    def run(self, count: int | None = None) -> None:
        """Do what was enqueued, or the first so many tasks."""
        count = len(self._tasks) if count is None else count
        while self._done < count:
            task, self._tasks[self._done] = self._tasks[self._done], None
            self._done += 1
            task()

    @property
    def enqueued(self) -> int:
        return len(self._tasks)

    def __enter__(self):
        self._before = current_stream()
        _thread.stream = self
        return self

    def __exit__(self, *error):
        _thread.stream = self._before


class Event:
    """A point in a stream; `clock` is what is over when the stream has passed it."""

    def __init__(self, *args, **kwargs):
        self.clock: Clock | None = None
        self.place: tuple[Stream, int] | None = None
        trace.EventCreationCallbacks.fire_callbacks(id(self))

    def __del__(self):
        trace.EventDeletionCallbacks.fire_callbacks(id(self))

    def record(self, stream: Stream | None = None) -> None:
        with _lock:
            stream = stream or current_stream()
            trace.EventRecordCallbacks.fire_callbacks(id(self), stream.cuda_stream)
            _join(stream.clock, _host)
            self.clock, self.place = dict(stream.clock), (stream, stream.enqueued)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        with _lock:
            if self.clock is None:
                return True
            stream, count = self.place
            over = stream.at_once or stream._done >= count
            if over:
                _join(_host, self.clock)
            return over

    def synchronize(self) -> None:
        if self.clock is not None and not (self.place[0] is default_stream and self._looked()):
            _stop("event.synchronize", event=self)

    def _looked(self) -> bool:
        """
        Whether the device goes on computing while the host waits for this event: it has work behind it. What the host
        knows to be over it does not wait for at all.
        """
        with _lock:
            now, then, known = (clock.get(COMPUTE, 0) for clock in (default_stream.clock, self.clock, _host))
            if then > known and now > then:
                site = f"{_owner()}: look @ {_show(_site())}"
                found.stop_sites[site] += 1
                found.looks[site] = min(now - then, found.looks.get(site, now))
                trace.EventSynchronizationCallbacks.fire_callbacks(id(self))
                _join(_host, self.clock)
            return then <= known or now > then

    def elapsed_time(self, other: Event) -> float:
        return 1.0


default_stream = Stream()
default_stream.name, default_stream.at_once, default_stream.cuda_stream = COMPUTE, True, 0


def current_stream(device=None) -> Stream:
    """The stream that this thread enqueues to."""
    return getattr(_thread, "stream", None) or default_stream


@contextlib.contextmanager
def _on_stream(stream: Stream | None):
    before = current_stream()
    _thread.stream = stream or before
    try:
        yield
    finally:
        _thread.stream = before


def _count_stop(kind: str) -> None:
    owner = _owner()
    found.stops[owner, kind] += 1
    found.stop_sites[f"{owner}: {kind} @ {_show(_site())}"] += 1


def _stop(kind: str, stream: Stream | None = None, event: Event | None = None) -> None:
    """The host waits: for an event, or for all that a stream was given."""
    with _lock:
        _count_stop(kind)
        if event is not None:
            trace.EventSynchronizationCallbacks.fire_callbacks(id(event))
            stream, count = event.place
            stream.run(count)
            _join(_host, event.clock)
        else:
            stream = stream or default_stream
            _finish(stream)


def _finish(stream: Stream) -> None:
    trace.StreamSynchronizationCallbacks.fire_callbacks(stream.cuda_stream)
    stream.run()
    _join(stream.clock, _host)
    _join(_host, stream.clock)


def synchronize(device=None) -> None:
    """Wait for every stream."""
    trace.DeviceSynchronizationCallbacks.fire_callbacks()
    with _lock:
        _count_stop("device.synchronize")
        for stream in Stream.all:
            stream.run()
            _join(_host, stream.clock)


# Memory, and who touched it.


@dataclass(eq=False)
class Region:
    """A range of bytes with the accesses that a later one could race with."""

    start: int
    size: int
    kind: str
    stream: Stream | None = None
    """Of device memory: whose work the allocator knows about."""
    accesses: list[tuple[int, int, str, int, bool, Site | str, str]] = field(default_factory=list)
    """(first byte, byte after the last, actor, its time, writes, site, operation)"""
    recorded: set[str] = field(default_factory=set)

    def __lt__(self, other: Region) -> bool:
        return self.start < other.start


_regions: dict[int, tuple[Tensor, Region]] = {}
"""By the address of a device storage: the host tensor under it, and its region."""
_locked: list[Region] = []
"""Page-locked host memory, by address."""
_locked_bytes: Counter = Counter()
"""By kind: "registered" by the driver, "pinned" by torch's allocator, which rounds up to powers of two."""


def page_locked_bytes() -> dict[str, int]:
    """Bytes of page-locked host memory, by who locked them."""
    return {kind: _locked_bytes[kind] for kind in ("registered", "pinned")}


def _extent(tensor: Tensor) -> tuple[int, int] | None:
    span = tensor.numel()
    if span == 0:
        return None
    if not tensor.is_contiguous():
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1
    start = tensor.data_ptr()
    return start, start + span * tensor.element_size()


def _region_at(address: int) -> Region | None:
    index = bisect_right(_locked, address, key=lambda region: region.start) - 1
    region = _locked[index] if index >= 0 else None
    return region if region is not None and address < region.start + region.size else None


def _region_of(tensor: Tensor) -> Region | None:
    storage = tensor.untyped_storage().data_ptr()
    if storage in _regions:
        return _regions[storage][1]
    return _region_at(storage + tensor.storage_offset() * tensor.element_size()) if _locked else None


def is_page_locked(tensor: Tensor) -> bool:
    """Whether the driver can copy this host tensor beside the host."""
    region = _region_of(tensor)
    return region is not None and region.kind != "device memory"


def _touch(tensor: Tensor, actor: str, clock: Clock, write: bool, operation: str) -> None:
    extent = _extent(tensor)
    region = _region_of(tensor) if extent else None
    if region is None:
        return
    low, high = extent
    kept, site = [], None
    for access in region.accesses:
        its_low, its_high, its_actor, its_time, its_write, its_site, its_operation = access
        if its_low < high and low < its_high and (write or its_write):
            if its_actor != actor and clock.get(its_actor, 0) < its_time:
                site = site or _site()
                kinds = ["write" if writes else "read" for writes in (write, its_write)]
                found.races[
                    f"RACE on {region.kind}: {kinds[0]} by {actor} {operation} [{_show(site)}] against an earlier "
                    f"{kinds[1]} by {its_actor} {its_operation} [{_show(its_site)}]"
                ] += 1
            if write and low <= its_low and its_high <= high:
                continue  # whoever is ordered behind this write is ordered behind that access
        elif not write and not its_write and its_actor == actor and low <= its_low and its_high <= high:
            continue
        kept.append(access)
    kept.append((low, high, actor, clock.get(actor, 0), write, site or _site(), operation))
    region.accesses = kept


def _execute(operation: str, stream: Stream, reads: list[Tensor], writes: list[Tensor]) -> None:
    """A kernel or a copy is enqueued: it begins after what the host did before."""
    with _lock:
        _join(stream.clock, _host)
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        for tensors, write in ((reads, False), (writes, True)):
            for tensor in tensors:
                _touch(tensor, stream.name, stream.clock, write, operation)


def _execute_on_host(operation: str, reads: list[Tensor], writes: list[Tensor]) -> None:
    with _lock:
        _host[HOST] += 1
        for tensors, write in ((reads, False), (writes, True)):
            for tensor in tensors:
                _touch(tensor, HOST, _host, write, operation)


class _DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", _DLDevice)]


_pointer_of_capsule = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of_capsule.restype, _pointer_of_capsule.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_torch_empty = torch.empty


def _as_device_tensor(host: Tensor) -> Tensor:
    capsule = torch.utils.dlpack.to_dlpack(host)
    address = _pointer_of_capsule(capsule, b"dltensor")
    ctypes.cast(address, ctypes.POINTER(_DLTensor)).contents.device.type = 2  # kDLCUDA
    return torch.utils.dlpack.from_dlpack(capsule)


def _allocate(size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Bytes on the device, for the current stream, full of garbage."""
    _ask_for(size)
    host = _torch_empty(max(size, 1), dtype=torch.uint8).fill_(0xA5)
    return _placed(host if dtype == torch.uint8 else host.view(dtype), size)


def _ask_for(size: int) -> None:
    """Whether there are so many bytes on the device.

    Raises:
        torch.OutOfMemoryError: If there are not.
    """
    if (fault is not None and fault(size)) or (limit is not None and device_bytes + size > limit):
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes (simulated).")


def _placed(host: Tensor, size: int) -> Tensor:
    """The device tensor over the bytes of a host tensor that nobody else has; `size` of them count."""
    global device_bytes, peak_bytes, reserved_bytes
    tensor = _as_device_tensor(host)
    with _lock:
        stream = current_stream()
        _join(stream.clock, _host)
        address = host.data_ptr()
        region = Region(address, size, "device memory", stream)
        # The allocator gives out what an earlier owner may still use, on this stream.
        now = stream.clock.get(stream.name, 0)
        region.accesses.append((address, address + max(size, 1), stream.name, now, True, _site(), "allocation"))
        _regions[address] = (host, region)
        device_bytes += size
        peak_bytes, reserved_bytes = max(peak_bytes, device_bytes), max(reserved_bytes, device_bytes)
    trace.MemoryAllocationCallbacks.fire_callbacks(address)
    weakref.finalize(tensor.untyped_storage(), _free, address).atexit = False
    return tensor


def _free(address: int) -> None:
    global device_bytes
    trace.MemoryDeallocationCallbacks.fire_callbacks(address)
    with _lock:
        _, region = _regions.pop(address)
        device_bytes -= region.size
        for _, _, actor, time, write, site, operation in region.accesses:
            if actor in (region.stream.name, HOST) or actor in region.recorded:
                continue
            if region.stream.clock.get(actor, 0) < time and _host.get(actor, 0) < time:
                found.races[
                    f"FREED: device memory goes back to stream {region.stream.name} while {actor} may still "
                    f"{'write' if write else 'read'} it: {operation} [{_show(site)}]; freed at [{_show(_site())}]"
                ] += 1


def _lock_pages(start: int, size: int, kind: str) -> None:
    with _lock:
        insort(_locked, Region(start, size, f"{kind} host memory"))
        _locked_bytes[kind] += _power_of_two(size) if kind == "pinned" else size


def _unlock_pages(start: int, kind: str) -> None:
    with _lock:
        region = next((region for region in _locked if region.start == start), None)
        if region is None:
            return
        _locked.remove(region)
        _locked_bytes[kind] -= _power_of_two(region.size) if kind == "pinned" else region.size
        if kind == "pinned":
            return  # torch's allocator waits for the copies that it saw
        for _, _, actor, time, write, site, operation in region.accesses:
            if actor != HOST and _host.get(actor, 0) < time:
                found.races[
                    f"UNLOCKED: host memory is unregistered while {actor} may still "
                    f"{'write' if write else 'read'} it: {operation} [{_show(site)}]; at [{_show(_site())}]"
                ] += 1


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


# Operators.

_cpu_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_below_autograd = torch._C._AutoDispatchBelowADInplaceOrView


def is_on_device(value) -> bool:
    """Whether this is a tensor of the simulated device."""
    return isinstance(value, Tensor) and value.is_cuda


def _strided(size, stride, dtype: torch.dtype) -> Tensor:
    span = 0 if 0 in size else sum((n - 1) * step for n, step in zip(size, stride)) + 1
    with _below_autograd():
        if span == 0:
            raw = _allocate(0)
            typed = raw if dtype == torch.uint8 else aten.view.dtype(raw[:0], dtype)
        else:
            typed = _allocate(span * dtype.itemsize, dtype)
            if span > 1 and (*size,) == (span,):
                return typed
        return aten.as_strided.default.redispatch(_cpu_keys, typed, list(size), list(stride), 0)


def _contiguous_stride(size) -> list[int]:
    stride, step = [], 1
    for length in reversed(size):
        stride.insert(0, step)
        step *= max(length, 1)
    return stride


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    if memory_format in (None, torch.contiguous_format):
        return _strided(size, _contiguous_stride(size), dtype)
    return _strided(size, _torch_empty(size, device="meta", memory_format=memory_format).stride(), dtype)


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None) -> Tensor:
    return _strided(size, stride, dtype or torch.get_default_dtype())


def host_view(tensor: Tensor) -> Tensor:
    """A CPU tensor over the bytes of a device tensor; reading it is what no host can."""
    if not tensor.numel():  # `out=` may let it grow, and with it its storage
        return _torch_empty(0, dtype=tensor.dtype).as_strided(tensor.size(), tensor.stride())
    base = _regions[tensor.untyped_storage().data_ptr()][0]
    view = _torch_empty(0, dtype=tensor.dtype)
    return view.set_(base.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


_READ_BY_HOST = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2",
    "aten::unique_dim", "aten::is_nonzero", "aten::_unique", "aten::unique_consecutive", "aten::bincount",
}  # fmt: skip
_INDEXING = {"aten::index", "aten::_index_put_impl_", "aten::index_put_", "aten::index_put"}


# Arguments and results of operators nest tensors in lists, tuples and dictionaries alone. torch's pytree, which takes
# anything, took a quarter of the time of a scenario.


def _leaves(value) -> Iterator[object]:
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, dict):
        yield from _leaves(tuple(value.values()))
    else:
        yield value


def _map(function: Callable, value):
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)([_map(function, inner) for inner in value])
    if isinstance(value, dict):
        return {name: _map(function, inner) for name, inner in value.items()}
    return function(value)


class _Operator(NamedTuple):
    """What is asked of an operator's schema at every call."""

    name: str
    parameters: tuple[tuple[str, bool, bool], ...]
    """(name, passed by keyword, written) of each argument."""
    tensors: tuple[bool, ...]
    """Whether each argument is a `Tensor`, and neither optional nor a list."""


@functools.cache
def _operator(op) -> _Operator:
    arguments = op._schema.arguments
    parameters = ((a.name, a.kwarg_only, a.alias_info is not None and a.alias_info.is_write) for a in arguments)
    return _Operator(op._schema.name, tuple(parameters), tuple(str(a.type) == "Tensor" for a in arguments))


def _reads_and_writes(op, args, kwargs, counts: Callable[[object], bool]) -> tuple[list[Tensor], list[Tensor]]:
    reads, writes = [], []
    for index, (name, by_keyword, written) in enumerate(_operator(op).parameters):
        value = kwargs.get(name) if by_keyword or index >= len(args) else args[index]
        if isinstance(value, Tensor):
            if counts(value):
                (writes if written else reads).append(value)
        elif isinstance(value, (list, tuple)):
            (writes if written else reads).extend(leaf for leaf in _leaves(value) if counts(leaf))
    return reads, writes


def _run_on_cpu(op, *args, **kwargs):
    """Any operator with a device tensor among its arguments: the CPU's kernel over the same bytes."""
    (name, _, tensors), args, kwargs = _operator(op), list(args), dict(kwargs)
    lowered: dict[int, tuple[Tensor, Tensor]] = {}
    """By the identity of a view on the host: the view, and the device tensor under it."""

    def lower(value):
        if isinstance(value, Tensor):
            if value.is_cuda:
                view = host_view(value)
                lowered[id(view)] = view, value
                return view
            if value.is_cpu and value.dim() > 0 and name not in _INDEXING:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but `{name}` got cuda:0 and a cpu tensor of shape "
                    f"{tuple(value.shape)} (simulated)."
                )
        return torch.device("cpu") if isinstance(value, torch.device) else value

    low_args, low_kwargs = _map(lower, args), _map(lower, kwargs)
    reads, writes = _reads_and_writes(op, args, kwargs, is_on_device)
    stream = current_stream()
    _execute(name, stream, reads, writes)
    if name in _READ_BY_HOST or (name in _INDEXING and _has_mask(args, kwargs)) or _reads_inside(name, args, kwargs):
        _stop(name, stream)
    else:
        stream.run()  # a kernel on a side stream runs at once, behind what was enqueued before
    if "device" in low_kwargs:
        low_kwargs["device"] = torch.device("cpu")
    for index, value in enumerate(args):  # C++ wraps a number for `Tensor`, and boxing to Python unwraps it again
        if tensors[index] and isinstance(value, (bool, int, float)):
            low_args[index] = torch.tensor(value)
    with _below_autograd():
        if name == "aten::histc" and not (counted := low_args[0]).is_floating_point():  # a GPU counts whole numbers too
            result = op(counted.float(), *low_args[1:], **low_kwargs).to(counted.dtype)
        else:
            result = op(*low_args, **low_kwargs)
    for view, original in lowered.values():
        if view.shape != original.shape:  # `out=` grew
            _below_cpu(aten.resize_.default, (original, list(view.shape)), {})
            if view.numel():
                host_view(original).copy_(view)
                _execute(f"{name}(grown)", stream, [], [original])
    owners = {view.untyped_storage().data_ptr(): original for view, original in lowered.values()}

    def lift(value):
        if not isinstance(value, Tensor):
            return value
        if id(value) in lowered:
            return lowered[id(value)][1]
        size = value.numel()
        owner = owners.get(value.untyped_storage().data_ptr()) if size else None
        with _below_autograd():
            if owner is not None:
                shape = (list(value.shape), list(value.stride()), value.storage_offset())
                return aten.as_strided.default.redispatch(_cpu_keys, owner, *shape)
            if size and value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes:
                _ask_for(value.nbytes)
                made = _placed(value, value.nbytes)  # a fresh result, whose bytes become the device's
            else:
                made = _strided(value.shape, value.stride(), value.dtype)
                if size:
                    host_view(made).copy_(value)
            if size:
                _execute(f"{name}(result)", stream, [], [made])
            return made

    return _map(lift, result)


def _reads_inside(name: str, args, kwargs) -> bool:
    """Whether the kernel of CUDA is made of others, of which one is read by the host; the CPU's are not seen here."""
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    if name != "aten::isin" or not all(isinstance(arg, Tensor) for arg in args[:2]):
        return False
    elements, among = args[:2]  # it sorts both where that is faster (isin_Tensor_Tensor_out in TensorCompare.cpp)
    return among.numel() >= 10 * elements.numel() ** 0.145


def _has_mask(args, kwargs) -> bool:
    indices = kwargs.get("indices", args[1] if len(args) > 1 else ())
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _below_cpu(op, args, kwargs):
    """Views and resizes need no kernel: the CPU's code runs on the device tensor itself."""
    if op is aten.resize_.default:
        tensor, size = args[0], list(args[1])
        if list(tensor.shape) != size:
            fresh = _strided(size, _contiguous_stride(size), tensor.dtype)
            with _below_autograd():
                tensor.set_(fresh.untyped_storage(), 0, size, _contiguous_stride(size))
        return tensor
    with _below_autograd():
        return op.redispatch(_cpu_keys, *args, **kwargs)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`copy_` where one side or both are on the device."""
    stream = current_stream()
    if is_on_device(target) and is_on_device(source):
        _execute("copy on the device", stream, [source], [target])
        stream.run()
        with _below_autograd():
            host_view(target).copy_(host_view(source))
        return target
    leaves = not is_on_device(target)
    on_host = target if leaves else source
    way = "copy to the host" if leaves else "copy to the device"
    if source.dtype != target.dtype:
        found.conversions[f"{way}: {source.dtype} to {target.dtype} @ {_show(_site())}"] += 1
    if source.shape != target.shape:
        with _below_autograd():
            source = source.expand(target.shape)
    low_target = target if leaves else host_view(target)
    low_source = host_view(source) if leaves else source.detach()

    def run(low_source=low_source):
        _thread.inside = getattr(_thread, "inside", 0) + 1
        try:
            with _below_autograd(), torch.no_grad():
                low_target.copy_(low_source)
        finally:
            _thread.inside -= 1

    locked = is_page_locked(on_host)
    if non_blocking and locked:
        _execute(way, stream, [source], [target])
        stream.enqueue(run)
    elif leaves:
        _execute(way, stream, [source], [])
        _stop(way if locked else f"{way} (pageable)", stream)
        _execute_on_host(way, [], [target])
        run()
    else:
        _execute_on_host(way, [source], [])
        _execute(way, stream, [], [target])
        if locked or not non_blocking or on_host.nbytes > PAGEABLE_STAGED:
            _stop(way if locked else f"{way} (pageable)", stream)
        stream.run()
        run(low_source.clone())  # staged: the source may change as soon as this returns
    return target


class HostMode(TorchDispatchMode):
    """Sees what the host does with page-locked memory, which copies may be reading or writing meanwhile."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _locked and not getattr(_thread, "inside", 0) and not _is_view(op):
            tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            leaves = torch.device(kwargs.get("device") or "cpu").type == "cuda"  # a copy, which counts as one
            if tensors and not leaves and not any(is_on_device(tensor) for tensor in tensors):
                reads, writes = _reads_and_writes(op, args, kwargs, lambda value: isinstance(value, Tensor))
                _execute_on_host(str(op), reads, writes)
        return op(*args, **kwargs)


@functools.cache
def _is_view(op) -> bool:
    if op.is_view or op in (aten.lift_fresh.default, aten._reshape_alias.default):
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


# In the place of torch.cuda.


class _Runtime:
    """`torch.cuda.cudart()`."""

    class cudaError:
        success = 0

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:
        if refuse_registration:
            return 2
        _lock_pages(address, size, "registered")
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        _unlock_pages(address, "registered")
        return 0


def _check_error(result: int) -> None:
    if result != 0:
        error = torch.cuda.CudaError.__new__(torch.cuda.CudaError)
        error.args = (f"out of memory ({result})",)
        raise error


def _statistics(device=None) -> dict:
    both = {"allocated": (device_bytes, peak_bytes), "reserved": (reserved_bytes, reserved_bytes)}
    counts = {f"{name}_bytes": {"all": {"current": now, "peak": peak}} for name, (now, peak) in both.items()}
    nothing = {"current": 0, "peak": 0}
    return {**counts, "inactive_split_bytes": {"all": nothing}, "num_alloc_retries": 0, "num_ooms": 0}


def _flat_statistics(device=None) -> dict:
    nested = _statistics()
    flat = {f"{k}.all.{name}": v for k, s in nested.items() if isinstance(s, dict) for name, v in s["all"].items()}
    return flat | {name: value for name, value in nested.items() if not isinstance(value, dict)}


def _reset_peak(device=None) -> None:
    global peak_bytes
    peak_bytes = device_bytes


def _empty_cache() -> None:
    global reserved_bytes
    reserved_bytes = device_bytes


def _set_fraction(fraction: float, device=None) -> None:
    global limit
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    limit = None if fraction >= 1 else int(fraction * TOTAL)


def _memory_info(device=None) -> tuple[int, int]:
    return TOTAL - reserved_bytes, TOTAL


PROPERTIES = types.SimpleNamespace(
    name="Simulated GPU", total_memory=TOTAL, major=8, minor=0, uuid="simulated", multi_processor_count=1,
    gcnArchName="", L2_cache_size=1 << 20, warp_size=32, max_threads_per_multi_processor=2048,
)  # fmt: skip

_memory_functions = {
    "memory_allocated": lambda device=None: device_bytes,
    "memory_reserved": lambda device=None: reserved_bytes,
    "max_memory_allocated": lambda device=None: peak_bytes,
    "max_memory_reserved": lambda device=None: reserved_bytes,
    "memory_stats": _flat_statistics,
    "reset_peak_memory_stats": _reset_peak,
    "empty_cache": _empty_cache,
    "synchronize": synchronize,
    "current_stream": current_stream,
    "set_stream": lambda stream: setattr(_thread, "stream", stream),
    "device_count": lambda: 1,
    "is_available": lambda: True,
}
_of_cuda = {
    **_memory_functions,
    "_lazy_init": lambda: None,
    "_initialized": False,
    "is_initialized": lambda: True,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "device": type("device", (contextlib.nullcontext,), {}),
    "Stream": Stream,
    "Event": Event,
    "stream": _on_stream,
    "default_stream": lambda device=None: default_stream,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_current_stream_capturing": lambda: False,
    "get_device_properties": lambda device=None: PROPERTIES,
    "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
    "get_device_name": lambda device=None: PROPERTIES.name,
    "get_arch_list": lambda: ["sm_80"],
    "mem_get_info": _memory_info,
    "memory_stats_as_nested_dict": _statistics,
    "host_memory_stats_as_nested_dict": lambda: {"allocated_bytes": {"current": _locked_bytes["pinned"]}},
    "get_per_process_memory_fraction": lambda device=None: 1.0 if limit is None else limit / TOTAL,
    "set_per_process_memory_fraction": _set_fraction,
    "ipc_collect": lambda: None,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "set_rng_state_all": lambda states: None,
    "cudart": lambda: _Runtime,
    "check_error": _check_error,
    "CUDAGraph": RecordedGraph,
    "graph": record,
    "graph_pool_handle": lambda: (0, 1),
}
_of_accelerator = {
    **_memory_functions,
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "current_device_index": lambda: 0,
    "current_device_idx": lambda: 0,
    "set_device_index": lambda device: None,
    "set_device_idx": lambda device: None,
    "get_memory_info": _memory_info,
    "empty_host_cache": lambda: None,
}
_kept: list = []


def install() -> None:
    """
    Let torch have the device, in this process and for good.

    Raises:
        Unavailable: If this torch cannot be given the device.
    """
    if _kept:
        return
    for name, value in _of_cuda.items():
        setattr(torch.cuda, name, value)
    for name, value in _of_accelerator.items():
        setattr(torch.accelerator, name, value)
    for name in ("get_rng_state", "set_rng_state", "get_rng_state_all", "set_rng_state_all"):
        setattr(torch.cuda.random, name, _of_cuda[name])
    torch._C._cuda_isCurrentStreamCapturing = lambda: False
    torch._C._cuda_clearCublasWorkspaces = lambda: None
    torch.empty, torch.zeros = _pinning(torch.empty), _pinning(torch.zeros)
    torch.Tensor.record_stream = lambda self, stream: _regions[self.untyped_storage().data_ptr()][1].recorded.add(
        stream.name
    )
    torch.Tensor.pin_memory = lambda self, *_: torch.empty(self.shape, dtype=self.dtype, pin_memory=True).copy_(self)
    torch.Tensor.is_pinned = lambda self, *_: is_page_locked(self)
    try:
        everything, some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        everything.fallback(_run_on_cpu, "CUDA")
        some.impl("empty.memory_format", _empty, "CUDA")
        some.impl("empty_strided", _empty_strided, "CUDA")
        some.impl("copy_", _copy, "CUDA")
        views = ("as_strided", "view", "_reshape_alias", "unfold", "resize_")
        sources = ("set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor")
        for name in (*views, *sources):
            base, _, overload = name.partition(".")
            op = getattr(getattr(aten, base), overload or "default")
            some.impl(name, functools.partial(lambda op, *args, **kwargs: _below_cpu(op, args, kwargs), op), "CUDA")
        # Beside its kernels this has a formula of many operations, which a device without a kernel would compute.
        some.impl("silu_backward", functools.partial(_run_on_cpu, aten.silu_backward.default), "CUDA")
        _kept.extend((everything, some))
        if torch.ones(2, device="cuda").add(1).cpu().tolist() != [2.0, 2.0]:
            raise RuntimeError("a sum came out wrong")
    except Exception as error:
        raise Unavailable(f"torch {torch.__version__} cannot be given a simulated device: {error}") from error
    begin = threading.Thread._bootstrap_inner

    def begin_watched(thread):
        with HostMode():
            begin(thread)

    threading.Thread._bootstrap_inner = begin_watched
    reset()


def _pinning(make):
    @functools.wraps(make)
    def made(*args, pin_memory=False, **kwargs):
        tensor = make(*args, **kwargs)
        if pin_memory and tensor.numel():
            if tensor.device.type != "cpu":
                raise RuntimeError(f"Only dense CPU tensors can be pinned, not one of `{tensor.device}` (simulated).")
            start = tensor.untyped_storage().data_ptr()
            _lock_pages(start, tensor.untyped_storage().nbytes(), "pinned")
            weakref.finalize(tensor.untyped_storage(), _unlock_pages, start, "pinned").atexit = False
        return tensor

    return made
