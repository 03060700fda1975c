"""
One model trained in one mode, in a process of its own, which `peaks.py` starts with a specification in JSON.

Appends the row of each window to the results as soon as it is measured, and leaves without giving the model back: a
base kept as int8 would be expanded for that.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3MoeConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from benchmarks.memory.floors import measure_machine, step_floor_seconds
from benchmarks.results import Results, provenance
from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.machine import page_locked_bytes
from hf_hybrid.plan.accounting import ModelShape, measure_held, storage_bytes
from hf_hybrid.plan.estimate import Estimator, Plan, PlanError
from hf_hybrid.plan.setups import Setup
from hf_hybrid.plan.trace import Tracer
from hf_hybrid.streaming.layers import find_layers

GIB = 2**30
WARM_UP = 2
LEARNING_RATE, MAX_NORM = 1e-5, 1.0
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


# The model and its data.


class RandomTokens(Dataset):
    """Sequences of random tokens, the same in every process."""

    def __init__(self, vocab: int, length: int, samples: int = 4096):
        self.vocab, self.length, self.samples = vocab, length, samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        tokens = torch.randint(self.vocab, (self.length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Weights:
    """Makes matrices of full rank at the speed of a copy: their rows are stretches of one vector of normal numbers."""

    STEP, OFFSET = 37, 7919

    def __init__(self, dtype: torch.dtype, shapes: list[torch.Size]):
        size = max(shape[:-1].numel() * self.STEP + shape[-1] for shape in shapes) + self.OFFSET
        self.vector = torch.randn(size, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
        self.count = 0

    def make(self, shape: torch.Size, *, shared: bool) -> torch.Tensor:
        """Make a matrix, or a stack of them. A shared one is a view of the vector and takes no memory."""
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.vector.dtype)
        self.count += 1
        place = (shape[:-1].numel(), shape[-1]), (self.STEP, 1), 131 * self.count % self.OFFSET
        rows = self.vector.as_strided(*place).view(shape)
        return rows.data if shared else rows.contiguous()  # `data`: writing into one must not count for the others


def build(spec: dict) -> nn.Module:
    """Build the model on the host, with adapters if the mode has them."""
    shape, mode = spec["model"], spec["mode"]
    dtype = torch.bfloat16 if mode["low_bit"] else getattr(torch, shape["weights"])
    kind = Qwen3MoeConfig if shape["experts"] else LlamaConfig
    config = kind(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=max(spec["sequence"], 2048),
        tie_word_embeddings=shape["tied"],
        use_cache=False,
        attn_implementation="sdpa",
        dtype=dtype,
        **shape["experts"],
    )
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config)
    weights = Weights(dtype, [parameter.shape for parameter in model.parameters()])
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            tied = shape["tied"] and module is model.get_output_embeddings()
            if not tied:
                data = weights.make(parameter.shape, shared=shape["shared"])
                module.register_parameter(name, nn.Parameter(data, requires_grad=not mode["adapters"]))
    model.tie_weights()
    if any(parameter.is_meta for parameter in model.parameters()):
        raise RuntimeError("Some weights were not made.")
    return with_adapters(model) if mode["adapters"] else model


def with_adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=ADAPTED, task_type="CAUSAL_LM"))


# What is measured.


class HostMemory:
    """
    Peak of the process's resident memory above what it was when this was made.

    The kernel's own peak where it can be reset, else the largest of samples every hundredth of a second.
    """

    def __init__(self):
        self.sampled = 0
        self.exact = self._reset()
        if not self.exact:
            threading.Thread(target=self._sample, daemon=True).start()
        self.start = self._now()

    @staticmethod
    def _status(name: str) -> int | None:
        text = Path("/proc/self/status").read_text()
        return next((int(row.split()[1]) * 2**10 for row in text.splitlines() if row.startswith(f"{name}:")), None)

    def _reset(self) -> bool:
        try:
            Path("/proc/self/clear_refs").write_text("5")
            peak, now = self._status("VmHWM"), self._now()
        except OSError:
            return False
        return peak is not None and abs(peak - now) < 2**26

    @staticmethod
    def _now() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _sample(self) -> None:
        while True:
            self.sampled = max(self.sampled, self._now())
            time.sleep(0.01)

    def peak(self, *, reset: bool = False) -> int:
        """The peak since the last reset."""
        peak = self._status("VmHWM") if self.exact else max(self.sampled, self._now())
        if reset:
            self.sampled = 0
            if self.exact:
                self._reset()
        return peak - self.start


class DeviceMemory:
    """Peaks of a GPU; nothing on a CPU."""

    def __init__(self, device: str, cap_gib: float | None):
        self.on_gpu = device == "cuda"
        if not self.on_gpu:
            return
        torch.zeros(1, device="cuda")
        free, self.total = torch.cuda.mem_get_info()
        self.elsewhere = self.total - free - torch.cuda.memory_reserved()  # the context, and other processes
        if cap_gib is not None:
            torch.cuda.set_per_process_memory_fraction(min((cap_gib * GIB - self.elsewhere) / self.total, 1.0))

    def wait(self) -> None:
        """Wait until everything queued is done."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def peaks(self) -> dict[str, int]:
        """The peaks since the last call."""
        if not self.on_gpu:
            return {}
        peaks = {
            "device_reserved": torch.cuda.max_memory_reserved(),
            "device_allocated": torch.cuda.max_memory_allocated(),
            # The allocator gives nothing back while it works, so that now is the peak.
            "device_used": _used_by_this_process() or self.total - torch.cuda.mem_get_info()[0],
            "device_context": self.elsewhere,
            "host_pinned": page_locked_bytes(),
        }
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return peaks


def _used_by_this_process() -> int | None:
    """Bytes that the driver counts for this process; `None` where it does not tell, for example in a container."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return next((p.usedGpuMemory for p in processes if p.pid == os.getpid()), None)
    except Exception:  # no driver library, or one that does not know the call
        return None


def processor_seconds() -> tuple[float, float]:
    """CPU seconds of all processes of the machine, stolen time included, and of this one."""
    fields = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK"), time.process_time()


class Meter(TrainerCallback):
    """Measures seconds of steps, and the bytes held at the end of the second backward pass."""

    def __init__(self, host: HostMemory, device: DeviceMemory, count_held):
        self.host, self.device, self.count_held = host, device, count_held
        self.set_up_peak: int | None = None
        self.begin()

    def begin(self) -> None:
        """Start to measure a window."""
        self.ends: list[float] = []
        self.busy: list[tuple[float, float]] = []
        self.held: dict = {}

    def on_step_begin(self, *args, **kwargs):
        if not self.ends and self.set_up_peak is None:
            self.set_up_peak = self.host.peak(reset=True)

    def on_pre_optimizer_step(self, *args, **kwargs):
        if len(self.ends) == 1:
            self.held = self.count_held()

    def on_step_end(self, *args, **kwargs):
        self.device.wait()
        self.ends.append(time.perf_counter())
        self.busy.append(processor_seconds())

    def row(self) -> dict:
        """The measurements since `begin`."""
        seconds = [after - before for before, after in zip(self.ends, self.ends[1:])]
        peak = self.host.peak(reset=True)
        (all_before, own_before), (all_after, own_after) = self.busy[WARM_UP - 1], self.busy[-1]
        elsewhere = (all_after - all_before) - (own_after - own_before)
        return {
            "outcome": "measured",
            "seconds": statistics.median(seconds[WARM_UP - 1 :]),
            "processors_busy_elsewhere": max(elsewhere / (self.ends[-1] - self.ends[WARM_UP - 1]), 0.0),
            "seconds_of_steps": seconds,
            **self.device.peaks(),
            "host_peak": max(self.set_up_peak, peak),
            "host_training_peak": peak,
            **self.held,
        }


# Training.


@dataclasses.dataclass
class Run:
    """One way to train that can do several windows, one after the other."""

    spec: dict
    model: nn.Module
    meter: Meter = None
    shape: ModelShape = None

    def __post_init__(self):
        self.mode, self.on_gpu = self.spec["mode"], self.spec["device"] == "cuda"
        self.data = RandomTokens(self.spec["model"]["vocab"], self.spec["sequence"])
        self.shape = self.shape or ModelShape.of(self.model, [name for name, _ in find_layers(self.model)])
        exact_in_fp32 = self.spec["model"]["weights"] == "float32" and not self.mode["low_bit"]
        self.autocast = self.on_gpu and (exact_in_fp32 or self.mode["adapters"])

    def window(self, micro_batches: int) -> list[float]:
        """Train with so many micro-batches per step. Returns the losses."""
        raise NotImplementedError

    def held(self) -> dict[str, int]:
        """Count the bytes of weights, gradients and states."""
        raise NotImplementedError

    def statistics(self) -> dict:
        return {}

    def plan(self, micro_batches: int) -> Plan:
        """The plan of this mode."""
        own = {
            "plain": {"memory": "off", "activation_checkpointing": self.mode["checkpointing"]},
            "zero3": {"memory": "stream", "accumulation_walk": "micro_batch", "stream_embeddings": True},
            "fsdp2": {"memory": "stream", "accumulation_walk": "micro_batch", "stream_embeddings": True},
        }
        setup = Setup(
            sequence_length=self.spec["sequence"],
            gradient_accumulation_steps=micro_batches,
            optimizer_states="8bit" if self.mode["low_bit"] else "exact",
            enable_predict=False,
            autocast=self.autocast,
            **own[self.mode["trainer"]],
        )
        return Estimator(self.shape, Tracer.of(self.model)).plan(setup)


class TrainerRun(Run):
    """Plain `Trainer`, or `HybridTrainer` with streamed layers."""

    def __post_init__(self):
        super().__post_init__()
        self.folder = tempfile.TemporaryDirectory()
        streamed = self.mode["trainer"] == "streamed"
        values, common = self._values(), {"train_dataset": self.data}
        if streamed:
            options = dict(self.mode["options"])
            ends = {name: options.pop(name) for name in ("stream_embeddings",) if name in options}
            config = HybridConfig(**{**values, "memory": "stream", "enable_predict": False, **options})
            config.plan_values = ends
            self.trainer = HybridTrainer(self.model, config, **common)
            # Several windows with one streamer: the model is not given back in between.
            self.trainer.memory.end = self.trainer.memory.finish_updates
            self.trainer._chunked_loss.remove = lambda: None
        else:
            if self.mode["low_bit"]:
                from hf_hybrid.streaming.low_bit import AdamW8bit

                own = {"lr": LEARNING_RATE, "weight_decay": 0.0, "seed": values["seed"]}
                common["optimizer_cls_and_kwargs"] = (AdamW8bit, own)
            self.trainer = Trainer(self.model, TrainingArguments(**values), **common)
        self.trainer.remove_callback(PrinterCallback)

    def _values(self) -> dict:
        known = {field.name for field in dataclasses.fields(TrainingArguments)}
        checkpointing = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
        return {
            "output_dir": self.folder.name,
            "max_steps": self.spec["steps"],
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": max(self.spec["windows"]),  # what a plan has to have room for
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "max_grad_norm": MAX_NORM,
            "optim": "adamw_torch_fused",
            "seed": 0,
            "bf16": self.autocast,
            "use_cpu": not self.on_gpu,
            "dataloader_pin_memory": self.on_gpu,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            checkpointing: self.mode["checkpointing"],
            f"{checkpointing}_kwargs": {"use_reentrant": False} if self.mode["checkpointing"] else None,
        }

    @property
    def streaming(self):
        memory = getattr(self.trainer, "memory", None)
        return memory if memory is not None and memory.streams else None

    def window(self, micro_batches: int) -> list[float]:
        self.trainer.args.gradient_accumulation_steps = micro_batches
        if self.meter not in self.trainer.callback_handler.callbacks:
            self.trainer.add_callback(self.meter)
        set_seed(0)
        self.trainer.train()
        return [entry["loss"] for entry in self.trainer.state.log_history if "loss" in entry]

    def held(self) -> dict[str, int]:
        if self.streaming is None:
            table = measure_held(self.model, self.trainer.optimizer, host_storages=set())
            return {"device_held": table.total("device"), "host_held": 0}
        streamer, states = self.streaming.streamer, self.trainer.optimizer.state
        rest = [p for p in self.model.parameters() if id(p) not in streamer.streamed]
        gradients = [p.grad for p in rest if p.grad is not None]
        own = [value for p in rest for value in states.get(p, {}).values() if torch.is_tensor(value)]
        away = [v for p, s in states.items() if id(p) in streamer.masters for v in s.values() if torch.is_tensor(v)]
        engine, parking = streamer.tensors_held(), self.streaming.window.parking
        return {
            "device_held": storage_bytes(
                [*engine["slots"], *engine["expanded"], *rest, *gradients, *own, *self.model.buffers()]
            ),
            "host_held": storage_bytes(
                [*engine["host_weights"], *engine["host_gradients"], *away, *(parking.spare if parking else [])]
            ),
        }

    def statistics(self) -> dict:
        return {} if self.streaming is None else {"streaming": self.streaming.streamer.statistics()}

    def plan(self, micro_batches: int) -> Plan:
        if self.streaming is None:
            return super().plan(micro_batches)
        plan = self.streaming.plan
        decided = {"resident_layers": plan.resident_layers, "stream_embeddings": plan.stream_embeddings}
        setup = dataclasses.replace(
            plan.setup, memory="stream", vram=None, ram=None, gradient_accumulation_steps=micro_batches, **decided
        )
        return Estimator(self.shape, Tracer.of(self.model)).plan(setup)


class Zero3Run(TrainerRun):
    """Plain `Trainer` with DeepSpeed's ZeRO-3 on one process: weights, masters, states and the update on the host."""

    def __post_init__(self):
        import deepspeed

        # Of the whole model; afterwards each parameter is a part that nobody else can read.
        self.autocast, self.on_gpu, self.mode = True, self.spec["device"] == "cuda", self.spec["mode"]
        self.shape = ModelShape.of(self.model, [name for name, _ in find_layers(self.model)])
        self.plans = {count: Run.plan(self, count) for count in self.spec["windows"]}
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
        with socket.create_server(("localhost", 0)) as free:
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        place = {"device": "cpu", "pin_memory": self.on_gpu}
        self.engine = {
            "zero_optimization": {
                "stage": 3,
                "offload_param": place,
                "offload_optimizer": place,
                "overlap_comm": True,
                "contiguous_gradients": True,
            },
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
            "gradient_clipping": MAX_NORM,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": max(self.spec["windows"]),
        }
        deepspeed.zero.Init(module=self.model.to(torch.bfloat16), config_dict_or_path=self.engine)
        super().__post_init__()
        self.autocast = True

    def _values(self) -> dict:
        return {**super()._values(), "bf16": True, "deepspeed": self.engine}

    def held(self) -> dict[str, int]:
        return {}

    def plan(self, micro_batches: int) -> Plan:
        return self.plans[micro_batches]


class Fsdp2Run(Run):
    """
    FSDP2 with CPU offload on one process: a layer's weights are brought in for every pass of every micro-batch. In a
    training loop of its own, with the loss, accumulation and clipping of Trainer.
    """

    def __post_init__(self):
        super().__post_init__()
        newer = getattr(self.model, "activation_checkpointing_enable", None)
        enable = newer or self.model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        self.model.train()
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        self.folder = tempfile.TemporaryDirectory()
        store = dist.FileStore(str(Path(self.folder.name) / "store"), 1)
        backend = "cpu:gloo,cuda:nccl" if self.on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        if self.on_gpu:
            torch.cuda.set_device(0)
        options = {
            "mesh": init_device_mesh(self.spec["device"], (1,)),
            "offload_policy": CPUOffloadPolicy(pin_memory=self.on_gpu),
        }
        if self.autocast:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for _, layer in find_layers(self.model):
            fully_shard(layer, **options)
        fully_shard(self.model, **options)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self.spec["device"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def window(self, micro_batches: int) -> list[float]:
        set_seed(0)
        loader = iter(DataLoader(self.data, batch_size=1, shuffle=True))
        losses = []
        for _ in range(self.spec["steps"]):
            self.meter.on_step_begin()
            batches = [next(loader) for _ in range(micro_batches)]
            losses.append(self.step([{k: v.to(self.spec["device"]) for k, v in b.items()} for b in batches]))
            self.meter.on_step_end()
        return losses

    def step(self, batches: list[dict]) -> float:
        items = sum(int(batch["labels"][:, 1:].ne(-100).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            loss = self.model(**batch, num_items_in_batch=items).loss
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.meter.on_pre_optimizer_step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def held(self) -> dict[str, int]:
        found = list(self.model.parameters())
        found += [p.grad for p in found if p.grad is not None]
        found += [v for state in self.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        return {"host_held": storage_bytes(t.to_local() if hasattr(t, "to_local") else t for t in found)}


RUNS = {"plain": TrainerRun, "streamed": TrainerRun, "zero3": Zero3Run, "fsdp2": Fsdp2Run}


# One process.


def why_skipped(spec: dict) -> str | None:
    """The reason why this machine cannot run the mode; `None` if it can."""
    mode = spec["mode"]
    is_zero3 = mode["trainer"] == "zero3"
    needs = {"peft": mode["adapters"], "bitsandbytes": mode["low_bit"], "deepspeed": is_zero3}
    if is_zero3 and spec["device"] != "cuda":
        return "ZeRO-3 offload needs a GPU"
    missing = [name for name, needed in needs.items() if needed and importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} is not installed" if missing else None


def machine(device: str, size: int) -> dict:
    """Measure the rates that floors are computed with, by products of square matrices of this size."""
    rates = measure_machine(0.5, size)
    for dtype in (torch.float32, torch.bfloat16):
        a, best = torch.randn(size, size, device=device, dtype=dtype), 0.0
        for _ in range(10):
            start = time.perf_counter()
            a @ a
            if device == "cuda":
                torch.cuda.synchronize()
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
        rates[f"flops_{str(dtype).partition('.')[2]}"] = best
    threads = torch.get_num_threads()
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return {"processor": platform.machine(), "threads": threads, "gpu": gpu, "rates": rates}


PER_STEP = ("loads", "bytes_in", "bytes_out")


def measure(run: Run, micro_batches: int) -> dict:
    """Measure one row."""
    run.meter.begin()
    before = run.statistics()
    losses = run.window(micro_batches)
    row = run.meter.row()
    tokens, plan, rates = micro_batches * run.spec["sequence"], run.plan(micro_batches), run.spec["machine"]["rates"]
    working = "bfloat16" if run.autocast or next(run.model.parameters()).dtype == torch.bfloat16 else "float32"
    links = {name: rates.get(name) for name in ("h2d", "d2h", "dram")}
    counts, experts = [(p.dim(), p.numel()) for p in run.model.parameters()], run.spec["model"]["experts"]
    idle = 1 - experts["num_experts_per_tok"] / experts["num_experts"] if experts else 0.0
    stacks, everything = (sum(count for dim, count in counts if dim >= least) for least in (3, 0))
    reached = 1 - idle * stacks / everything
    floor = step_floor_seconds(plan, tokens, {"flops": rates[f"flops_{working}"], **links}, reached)
    row |= {"floor": floor, "tokens_per_second": tokens / row["seconds"], "losses": losses}
    row |= {"device_plan": plan.peak_device_bytes, "host_plan": plan.peak_host_bytes}
    if before:
        row |= {"resident_layers": plan.resident_layers, "stream_embeddings": plan.stream_embeddings}
        after = run.statistics()["streaming"]
        row["streaming_per_step"] = {
            name: (after[name] - before["streaming"][name]) / run.spec["steps"] for name in PER_STEP
        }
    return row


def do(spec: dict, record) -> None:
    """Train all windows; `record` gets each row as soon as it is there."""
    reason = why_skipped(spec)
    if reason is not None:
        for micro_batches in spec["windows"]:
            record(micro_batches, {"outcome": "skipped", "detail": reason})
        return
    device = DeviceMemory(spec["device"], spec["cap_gib"])
    host = HostMemory()
    waiting = list(spec["windows"])
    try:
        model = build(spec)
        run = RUNS[spec["mode"]["trainer"]](spec, model)
        run.meter = Meter(host, device, run.held)
        while waiting:
            row = measure(run, waiting[0])
            record(waiting.pop(0), {**row, "host_peak_is_exact": host.exact})
    except Exception as error:
        kinds = {torch.OutOfMemoryError: "out of memory", MemoryError: "out of memory", PlanError: "refused"}
        outcome = next((name for kind, name in kinds.items() if isinstance(error, kind)), "failed")
        traceback.print_exc()
        for micro_batches in waiting:
            record(micro_batches, {"outcome": outcome, "detail": f"{type(error).__name__}: {error}"[-1500:]})


def main() -> None:
    spec = json.loads(sys.argv[1])
    logging.disable_progress_bar()
    origin = {**provenance(torch.get_num_threads(), spec["device"]), "command": spec["command"]}
    if spec.get("machine") is True:
        results = Results(Path(spec["results"]), "machine", ("device",))
        results.add({"device": spec["device"], **machine(spec["device"], spec["product"]), **origin})
        return
    results = Results(Path(spec["results"]), "peaks", ("model", "mode", "device", "cap_gib", "tokens"))
    settings = {name: spec[name] for name in ("device", "cap_gib", "sequence", "steps")}

    def record(micro_batches: int, row: dict) -> None:
        counts = {"tokens": micro_batches * spec["sequence"], "micro_batches": micro_batches}
        key = {"model": spec["name"], "mode": spec["mode_name"], **settings, "settings": spec["mode"]}
        results.add({**key, **counts, **row, **origin})

    do(spec, record)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing is unpinned, expanded or given back


if __name__ == "__main__":
    main()
