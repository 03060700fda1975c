"""
A clock for the simulated device: how long a step takes, what it waits for, and how far that is from the floor.

    python tests/simulated_gpu/clock.py                      # every row; some minutes
    python tests/simulated_gpu/clock.py --only "full 4" --timeline FOLDER

The simulated device (device.py) sees every kernel, copy, event, wait and host stop in the order in which the package
enqueues them. Here each gets a duration from the rates of a card and a host (hf_hybrid/cli/cards.py), which makes
the simulator a discrete-event model of a step. All seconds are estimates from data sheets. What can be trusted more is
the *ratio* of a step to its floor, the busiest resource if everything overlapped perfectly.

**Scale.** A model that is K times narrower, with K times fewer tokens and words, enqueues exactly the same kernels and
copies. Bytes are multiplied by K^2 and operations of products and attention by K^3. So layers of width 128 stand for
those of width 4096. What the package cuts into chunks of a fixed size is cut into chunks K^2 times smaller.

**Device.** Every stream has a time. A kernel begins when its stream is free and the host has launched it. It takes the
larger of operations / products and bytes / device memory. An event has the time of its stream.

**Host threads.** Trainer's thread (with those that it waits for: micro-batches and autograd) and the thread of the lazy
update are two actors with a time each. Only the earlier one runs ([`Turns`]). So what one of them finds, for example
whether an update is done, is what it would find at that time.

**Host memory.** Copies over the bus and operations of the host share its bytes per second ([`HostMemory`]). Copies come
first: the bus does not wait. An operation gets what they leave. It moves only what is not in the last-level cache:
bytes that it reads, bytes that it writes, and, where it did not read them before, the lines that it writes to.
"""

from __future__ import annotations

import argparse
import math
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    # Not this folder: its kernels.py would hide the package of that name, which transformers looks for.
    sys.path[:1] = [str(HERE.parent), str(HERE.parents[1])]

from simulated_gpu import device as sim  # noqa: E402, I001 - before torch

import torch  # noqa: E402

from hf_hybrid.cli.cards import CARDS, HOSTS, LAUNCH_SECONDS, Card, Host  # noqa: E402
from simulated_gpu.resources import MAIN, UPDATE, Cache, HostMemory, Turns  # noqa: E402

HOST_CALL = 6e-6
"""
Seconds of an operation of torch on the host beside its memory. On one core of an AMD EPYC the three of an update took
6.2 us each in the package's loop over parts (tenth percentile 5.4, `python -m benchmarks.planning.launches`). What it
takes to wake the threads that share an operation is not in it.
"""
KERNEL = 2e-6
"""Seconds of a kernel beside its work."""
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


class Clock:
    """
    Times of everything that the simulated device is told, for one card and host.

    `scale` is K: how many times narrower the model is than the one that is timed.
    """

    def __init__(self, card: Card, host: Host, *, scale: int = 1, launch: float = LAUNCH_SECONDS):
        self.card, self.host, self.launch = card, host, launch
        self.bytes, self.operations = scale**2, scale**3
        self.memory, self.cache, self.turns = HostMemory(host.memory), Cache(host.cache / scale**2), Turns()
        self.streams: Counter = Counter()
        """Time of each stream."""
        self.busy: Counter = Counter()
        """Seconds of work by resource, and of host memory at its full rate."""
        self.waited: Counter = Counter()
        """Seconds that the host waited, by what for."""
        self.lanes: list[tuple[str, float, float, str]] = []
        """For the timeline: lane, beginning, end, what."""
        self._lock = threading.RLock()

    def now(self) -> float:
        """Time of this thread."""
        return self.turns.me.time

    # What device.py tells.

    def enqueued(self, operation: str, stream, reads: list, writes: list) -> None:
        """A kernel or a copy was given to a stream."""
        with self._lock:
            me = self.turns.me
            if not operation.endswith("(result)"):
                me.time += self.launch
                self.busy["launches"] += self.launch
            start = max(self.streams[stream.name], me.time)
            if operation in ("copy to the host", "copy to the device"):
                size = _nbytes(reads if operation == "copy to the host" else writes) * self.bytes
                end = self.memory.copy(start, size, self.card.bus)
                self.busy[operation] += size / self.card.bus
                self.busy["host memory"] += size / self.memory.rate
                if operation == "copy to the host":
                    for tensor in writes:
                        self.cache.lose(tensor)
            else:
                seconds, resource = self._kernel(operation, reads, writes)
                end = start + seconds
                self.busy[resource] += seconds
            self.streams[stream.name] = end
            lane = "compute" if stream is sim.default_stream else operation.replace("copy ", "copies ")
            if lane in ("compute", "copies to the host", "copies to the device") and end > start:
                self.lanes.append((lane, start, end, operation))
        if stream is sim.default_stream:  # not on other streams: copies begin under locks of the package
            self.turns.give_way()

    def _kernel(self, operation: str, reads: list, writes: list) -> tuple[float, str]:
        result = operation.endswith("(result)")
        name = operation.removesuffix("(result)")
        if result and (name in PRODUCTS or "attention" in name):
            return 0.0, "products"
        operations = 0 if result else _operations(name, reads)
        # Written in place means read, too.
        size = _nbytes(reads) + _nbytes(writes) * (1 if result or name == "copy on the device" else 2)
        seconds = max(operations * self.operations / self.card.products, size * self.bytes / self.card.memory)
        return seconds + (0 if result else KERNEL), "products" if operations else "device memory"

    def recorded(self, event, stream) -> None:
        """An event was recorded on a stream."""
        event.over_at = max(self.streams[stream.name], self.turns.me.time)

    def waits(self, stream, event) -> None:
        """A stream waits for an event."""
        self.streams[stream.name] = max(self.streams[stream.name], event.over_at)

    def is_over(self, event) -> bool:
        """Whether the event has happened at the time of this thread."""
        return event.over_at <= self.now()

    def stopped(self, why: str, stream, event) -> None:
        """The host waits for an event, or for all that a stream was given."""
        me = self.turns.me
        until = self.streams[(stream or sim.default_stream).name] if event is None else event.over_at
        self._has_waited(why, until)
        me.time = max(me.time, until)
        self.turns.give_way()

    def computed_on_host(self, op, args: tuple, kwargs: dict, result: object) -> None:
        """An operation on tensors of the host."""
        tensors = [t for t in sim._leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in sim._leaves(result) if isinstance(t, torch.Tensor)]
        if "empty" in str(op) or not tensors or any(tensor.device.type != "cpu" for tensor in tensors + made):
            return
        reads, writes = sim._reads_and_writes(op, args, kwargs, lambda value: isinstance(value, torch.Tensor))
        if "_fused_adam" in str(op):  # its gradients are written only where it is given a `grad_scale`
            reads, writes = [*reads, *args[1]], [t for values in (args[0], *args[2:4]) for t in values]
        known = {t.data_ptr() for t in tensors}
        writes = writes + [t for t in made if t.data_ptr() not in known]
        # Between reads and writes of one tensor nothing leaves the cache.
        both = {t.data_ptr() for t in writes}
        reads = [t for t in reads if t.data_ptr() not in both]
        self.work(str(op), self.cache.move(reads, writes) * self.bytes)

    def work(self, what: str, size: float) -> None:
        """The host moves so many bytes in its memory."""
        me = self.turns.me
        me.time += HOST_CALL
        start = me.time
        while True:
            end = self.memory.end_of_work(start, size)
            me.time = end
            self.turns.give_way()  # what comes before this end may take some of the memory's bytes per second
            if self.memory.end_of_work(start, size) <= end + 1e-9:
                break
        me.time = self.memory.work(start, size)
        with self._lock:
            self.busy["host memory"] += size / self.memory.rate
            self.busy[f"{me.name}: {what}"] += size / self.memory.rate
            if size:
                self.lanes.append(("host update" if me.name == UPDATE else "host", start, me.time, what))
        self.memory.forget(min(actor.time for actor in self.turns.actors.values()) - 1.0)

    def waits_for(self, future: Future) -> None:
        """The host waits for a task of the thread of the update."""
        start = self.turns.me.time
        if self.turns.me.name == MAIN and self.turns.wait_for(future):
            self._has_waited("for an update of the host", self.turns.me.time, start)

    def _has_waited(self, why: str, until: float, start: float | None = None) -> None:
        start = self.turns.me.time if start is None else start
        if until > start:
            self.waited[why] += until - start
            self.lanes.append(("waits of the host", start, until, why))


def _nbytes(tensors: list) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _operations(name: str, reads: list) -> float:
    """Of a matrix product or of attention, which is causal."""
    shapes = [tensor.shape for tensor in reads if tensor.dim() >= 2]
    if name in PRODUCTS and len(shapes) >= 2:
        left, right = shapes[-2:]
        return 2 * math.prod(left) * right[-1]
    if "scaled_dot_product" in name or "flash_attention" in name:
        batch, heads, length, width = next(shape for shape in shapes if len(shape) == 4)
        return (5 if "backward" in name else 2) * 2 * batch * heads * length**2 * width / 2
    return 0


@dataclass
class Threads:
    """Executors and futures of this process take part in the turns of a clock."""

    clock: Clock

    def __enter__(self) -> Threads:
        clock, submit, result = self.clock, ThreadPoolExecutor.submit, Future.result
        self._before = submit, result

        def timed_submit(executor, function, *args, **kwargs):
            if not executor._thread_name_prefix.startswith("lazy_update"):
                return submit(executor, function, *args, **kwargs)
            there, box = threading.Event(), []

            def run():
                there.wait()
                clock.turns.begin_task()
                try:
                    return function(*args, **kwargs)
                finally:
                    clock.turns.end_task(box[0])

            clock.turns.submitted()
            box.append(submit(executor, run))
            there.set()
            return box[0]

        def timed_result(future, timeout=None):
            if getattr(future, "over_at", None) is not None or future in self._tasks():
                clock.waits_for(future)
            return result(future, timeout)

        self._futures: list[Future] = []

        def submit_and_note(executor, function, *args, **kwargs):
            future = timed_submit(executor, function, *args, **kwargs)
            if executor._thread_name_prefix.startswith("lazy_update"):
                self._futures.append(future)
            return future

        ThreadPoolExecutor.submit, Future.result = submit_and_note, timed_result
        return self

    def _tasks(self) -> list[Future]:
        self._futures = [future for future in self._futures if not hasattr(future, "over_at")]
        return self._futures

    def __exit__(self, *error) -> None:
        ThreadPoolExecutor.submit, Future.result = self._before


# What is timed.


@dataclass(frozen=True)
class Shape:
    """A Llama: as published, and how many of its layers are run."""

    name: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = False


SHAPES = {
    "1b": Shape("1b", 2048, 8192, 16, 32, 8, 32000, True),
    "7b": Shape("7b", 4096, 11008, 32, 32, 32, 32000),
    "13b": Shape("13b", 5120, 13824, 40, 40, 40, 32000),
}


@dataclass(frozen=True)
class Work:
    """A training whose step is timed."""

    kind: str
    """A key of [`KINDS`]."""
    model: str = "7b"
    micro_batches: int = 4
    card: str = "rtx4090"
    host: str = "desktop"
    tokens: int = 4096
    """Of a micro-batch."""
    layers: int = 8
    """That are run; of the whole model, see [`Timing.whole`]."""
    scale: int = 32
    options: tuple = ()
    """More options of `HybridConfig`, as pairs."""

    def __str__(self) -> str:
        more = "".join(f", {name}={value}" for name, value in self.options)
        return f"{self.kind} {self.model}, {self.micro_batches} x {self.tokens}, {self.card}, {self.host}{more}"


KINDS: dict[str, dict] = {
    "full": {},
    "8bit": {"optimizer_states": "8bit"},
    "lora": {},
    "parked": {"offload_activations": True},
    "leaps": {"enable_predict": True},
}
"""
Streamed trainings: all weights (fp32 under bf16 autocast, exact AdamW on the host); all weights in bf16 with states in
8 bits; adapters over a streamed bf16 base; and as the first, with activations on the host, or with leaps.
"""


@dataclass
class Timing:
    """A step of [`Work`], in steady state."""

    work: Work
    seconds: float
    busy: dict[str, float]
    waited: dict[str, float]
    lanes: list[tuple[str, float, float, str]]
    weights: float

    @property
    def resources(self) -> dict[str, float]:
        """Seconds that each resource is busy in a step."""
        busy = self.busy
        return {
            "compute": busy.get("products", 0) + busy.get("device memory", 0),
            "copies in": busy.get("copy to the device", 0),
            "copies out": busy.get("copy to the host", 0),
            "host memory": busy.get("host memory", 0),
            "launches": busy.get("launches", 0),
        }

    @property
    def bound(self) -> str:
        """The busiest resource."""
        return max(self.resources, key=self.resources.__getitem__)

    @property
    def floor(self) -> float:
        """Seconds of a step in which everything overlaps perfectly."""
        return self.resources[self.bound]

    @property
    def ratio(self) -> float:
        """Of the step to its floor."""
        return self.seconds / self.floor


def time_step(work: Work, *, steps: int = 3) -> Timing:
    """
    Train the small model that stands for the one of `work`, and return its last step. In a process of its own.

    The first update makes the optimizer's states, and is part of the second step. So the third is the first of many.
    """
    import tempfile

    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

    from hf_hybrid import HybridConfig, HybridTrainer, machine
    from hf_hybrid.streaming import low_bit

    scale, shape = work.scale, SHAPES[work.model]
    clock = Clock(CARDS[work.card], HOSTS[work.host], scale=scale)
    sim.install()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    low_bit.CHUNK = max(low_bit.CHUNK // scale**2 // low_bit.BLOCK, 1) * low_bit.BLOCK
    machine.PART //= scale**2
    heads = 4
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab // scale,
            hidden_size=shape.hidden // scale,
            intermediate_size=shape.ffn // scale,
            num_hidden_layers=work.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads * shape.kv_heads // shape.heads,
            max_position_embeddings=work.tokens // scale,
            tie_word_embeddings=shape.tied,
            use_cache=False,
        )
    )
    if work.kind in ("8bit", "lora"):
        model = model.to(torch.bfloat16)
    if work.kind == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=1, target_modules="all-linear"))
    length, words = work.tokens // scale, shape.vocab // scale
    ids = [torch.randint(0, words, (length,)) for _ in range(2 * max(work.micro_batches, 4))]
    marks = []

    class Marks(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            marks.append((clock.now(), Counter(clock.busy), Counter(clock.waited)))

    values = {
        "max_steps": steps,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": work.micro_batches,
        "max_grad_norm": 1.0,
        "logging_steps": 1000,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "enable_predict": False,
        "memory": "stream",
        "resident_layers": 0,
        "bf16": True,
        "optim": "adamw_torch_fused",
        "seed": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        config = HybridConfig(folder, **{**values, **KINDS[work.kind], **dict(work.options)})
        data = [{"input_ids": row, "labels": row} for row in ids]
        trainer = HybridTrainer(model, config, train_dataset=data, callbacks=[Marks()])
        weights = sum(parameter.numel() for parameter in model.parameters()) * scale**2
        sim.clock = clock
        with sim.HostMode(), Threads(clock):
            trainer.train()
        sim.clock = None
    (begin, busy, waited), (end, busy_after, waited_after) = marks[-2:]
    return Timing(
        work,
        end - begin,
        {name: busy_after[name] - busy[name] for name in busy_after},
        {name: waited_after[name] - waited[name] for name in waited_after},
        [lane for lane in clock.lanes if lane[2] > begin and lane[1] < end],
        weights,
    )


# What is shown.

LANES = ("compute", "copies to the device", "copies to the host", "host update", "host", "waits of the host")


def draw(timing: Timing, path: Path) -> None:
    """Draw the step: what each lane does when."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    begin = min(lane[1] for lane in timing.lanes)
    figure, axes = pyplot.subplots(figsize=(14, 4))
    colours = dict(zip(LANES, ("tab:blue", "tab:green", "tab:olive", "tab:red", "tab:purple", "lightgrey")))
    for row, name in enumerate(LANES):
        bars = [(start - begin, end - start) for lane, start, end, _ in timing.lanes if lane == name]
        axes.broken_barh(bars, (row - 0.4, 0.8), color=colours[name], linewidth=0)
    axes.set_yticks(range(len(LANES)), LANES)
    axes.invert_yaxis()
    axes.set_xlabel("seconds (estimated from data sheets)")
    axes.set_title(
        f"{timing.work}: step {timing.seconds:.2f} s, floor {timing.floor:.2f} s ({timing.bound}), "
        f"ratio {timing.ratio:.2f}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def timed(works: list[Work]) -> Iterator[Timing]:
    """Time each, in a process of its own."""
    import multiprocessing

    import hf_hybrid.trainer  # noqa: F401 - once, and not in each process

    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        yield from pool.imap(time_step, works)


KEY = ("kind", "model", "micro_batches", "tokens", "card", "host", "layers", "options")
"""Fields of a recorded row that tell it from others."""


def record(timing: Timing) -> None:
    """Append a row to the results of benchmarks/planning, which docs/evaluation/streaming_time.md shows."""
    from benchmarks.results import Results, provenance

    work = timing.work
    results = Results(HERE.parents[1] / "benchmarks" / "planning" / "results.jsonl", "clock", KEY)
    results.add(
        {
            **{name: getattr(work, name) for name in KEY if name != "options"},
            "options": ", ".join(f"{name}={value}" for name, value in work.options),
            "seconds": round(timing.seconds, 4),
            "floor": round(timing.floor, 4),
            "of": timing.bound,
            "busy": {name: round(seconds, 4) for name, seconds in timing.resources.items()},
            **provenance(),
        }
    )


def usual_works(only: str = "") -> list[Work]:
    """The rows of the table: kinds, models, micro-batches, and the two machines; or those that `only` is a part of."""
    works = [
        Work(kind, model, count, card, host)
        for kind in KINDS
        for model in SHAPES
        for card, host in (("rtx4090", "desktop"), ("h100", "server"))
        for count in (1, 4, 16)
    ]
    return [work for work in works if only in str(work)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="Rows whose name has this in it, as `full 7b, 4 x 4096, rtx4090`.")
    parser.add_argument("--timeline", type=Path, metavar="FOLDER", help="Draw each row.")
    parser.add_argument("--details", action="store_true", help="What is busy, and what the host waits for.")
    parser.add_argument("--record", action="store_true", help="Append the rows to benchmarks/planning/results.jsonl.")
    parser.add_argument("--layers", type=int, help="That are run, of Llama's 16, 32 or 40; default 8.")
    parser.add_argument("--card", choices=CARDS)
    parser.add_argument("--host", choices=HOSTS)
    parser.add_argument("--option", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    args = parser.parse_args()
    from dataclasses import replace

    works = usual_works(args.only)
    given = {name: getattr(args, name) for name in ("card", "host", "layers") if getattr(args, name)}
    options = tuple((name, _value(text)) for name, text in args.option)
    works = list(dict.fromkeys(replace(work, **given, options=options) for work in works))
    print("| training | step | floor | of | ratio | tokens/s |\n|---|---|---|---|---|---|")
    for timing in timed(works):
        work = timing.work
        rate = work.micro_batches * work.tokens / timing.seconds
        print(
            f"| {work} | {timing.seconds:.2f} | {timing.floor:.2f} | {timing.bound} | {timing.ratio:.2f} "
            f"| {rate:,.0f} |",
            flush=True,
        )
        if args.record:
            record(timing)
        if args.details:
            for title, found in (("busy", timing.busy), ("waited", timing.waited)):
                for name, seconds in sorted(found.items(), key=lambda item: -item[1])[:14]:
                    print(f"    {title} {seconds:8.3f} s  {name}")
        if args.timeline:
            args.timeline.mkdir(parents=True, exist_ok=True)
            name = str(work).replace(", ", "_").replace(" ", "_")
            draw(timing, args.timeline / f"{name}.png")


def _value(text: str):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


if __name__ == "__main__":
    # Under its own name, so that processes and threads find one module and not two.
    from simulated_gpu import clock

    clock.main()
