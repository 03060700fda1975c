"""
How far `plan_memory` is from the peak of a training step, for eight architectures, three sizes and four ways to train.

    python -m benchmarks.planning.accuracy                  # torch's memory tracker under fake tensors; half an hour
    python -m benchmarks.planning.accuracy --models llama --ways adamw
    python -m benchmarks.planning.accuracy --gpu            # the allocator's peak of a real Trainer run
    python -m benchmarks.planning.accuracy --gpu --smoke    # the same with tiny models, to check the plumbing

The reference without a GPU is `torch.distributed._tools.mem_tracker.MemTracker` over a step of the model with all its
layers: forward, backward, clipping and update, computed by torch under `FakeTensorMode` with the CPU's rules of
autocast (the plan is made for these rules, too), batches without padding. With `--gpu` it is
`torch.cuda.max_memory_allocated` of the third step of `transformers.Trainer`. Neither shares code with the plan, which
traces a few layers with a tracker of its own. 8-bit states are those of bitsandbytes.
Each row is appended to the results as soon as it is there; rows that are there are kept. `--smoke` writes to a
temporary file unless `--results` names one.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import transformers
from accelerate.utils import convert_outputs_to_fp32
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.results import Results, command_line, provenance
from hf_hybrid.compat import checkpointing_option
from hf_hybrid.plan.planner import plan_memory

HERE = Path(__file__).resolve().parent
REFERENCES = {False: "MemTracker under FakeTensorMode", True: "torch.cuda.max_memory_allocated"}
CHECKPOINTING = checkpointing_option()
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


@dataclass(frozen=True)
class Way:
    """One way to train a model, for the reference and for the plan."""

    weights: torch.dtype
    autocast: bool
    lora: bool = False
    checkpointing: bool = False
    eight_bit: bool = False

    def asked(self) -> dict:
        """The arguments of `plan_memory` that ask for this way."""
        dtype = "mixed" if self.autocast else str(self.weights).removeprefix("torch.")
        states = "8bit" if self.eight_bit else "exact"
        return {
            "dtype": dtype,
            "peft": LoraConfig(**LORA) if self.lora else None,
            "activation_checkpointing": self.checkpointing,
            "optimizer_states": states,
            "memory": "off",
        }


WAYS = {
    "adamw": Way(torch.float32, True),
    "adamw-checkpointing": Way(torch.float32, True, checkpointing=True),
    "lora": Way(torch.bfloat16, True, lora=True),
    "8bit": Way(torch.bfloat16, False, eight_bit=True),
}


def _sized(config: type, heads: tuple[int, int, int], vocabulary: int, **more) -> list:
    """Make configurations of three sizes, and a tiny one."""
    configs = []
    for layers, width, count in zip((4, 8, 10, 2), (768, 2048, 4096, 64), (*heads, 4)):
        sizes = {name: value(width, count) if callable(value) else value for name, value in more.items()}
        shape = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": count}
        configs.append(config(**shape, vocab_size=vocabulary, **sizes))
    return configs


def _wide(factor: float):
    return lambda width, _: int(factor * width) // 64 * 64


_GROUPED = {"num_key_value_heads": lambda _, heads: heads // 4}
MODELS = {
    "gpt2": _sized(transformers.GPT2Config, (12, 16, 32), 50257, n_positions=4096, attn_pdrop=0.0),
    "llama": _sized(
        transformers.LlamaConfig, (12, 16, 32), 32000, intermediate_size=_wide(2.6875), max_position_embeddings=4096
    ),
    "qwen2": _sized(
        transformers.Qwen2Config, (12, 16, 32), 152064, intermediate_size=_wide(5.25), **_GROUPED, max_window_layers=99
    ),
    "gemma3": _sized(
        transformers.Gemma3TextConfig, (4, 8, 16), 262144, intermediate_size=_wide(4), head_dim=256, **_GROUPED,
        sliding_window=512,
    ),
    "mistral": _sized(
        transformers.MistralConfig, (12, 16, 32), 32000, intermediate_size=_wide(3.5), **_GROUPED, sliding_window=4096
    ),
    "phi": _sized(
        transformers.PhiConfig, (12, 16, 32), 51200, intermediate_size=_wide(4), max_position_embeddings=4096
    ),
    "mixtral": _sized(
        transformers.MixtralConfig, (12, 16, 32), 32000, intermediate_size=_wide(3.5), **_GROUPED, sliding_window=None
    ),
    "gpt_neox": _sized(
        transformers.GPTNeoXConfig, (12, 16, 32), 50432, intermediate_size=_wide(4), max_position_embeddings=4096
    ),
}  # fmt: skip
BATCHES = ((8, 512), (4, 1024), (2, 2048), (2, 32))  # of each size
TINY = 3
"""The size that shows whether the benchmark runs, and nothing of the plan: fixed costs are most of its bytes."""


class _GroupedProducts(TorchDispatchMode):
    """
    Gives grouped products in fp32 the shapes of those in bf16, the only ones that torch 2.13 can compute without data.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32:
            result = func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **(kwargs or {}))
            return result.new_empty_strided(result.shape, result.stride(), dtype=torch.float32)
        return func(*args, **(kwargs or {}))


def build(config, way: Way) -> nn.Module:
    """Build the model with all its layers on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=way.weights)
        if way.lora:
            model = get_peft_model(model, LoraConfig(**LORA))
    model.config.use_cache = False
    if way.checkpointing:
        enable = getattr(model, f"{CHECKPOINTING}_enable")
        enable(**{f"{CHECKPOINTING}_kwargs": {"use_reentrant": False, "preserve_rng_state": False}})
    return model.train()


def fill(model: nn.Module) -> nn.Module:
    """Put fake tensors in the place of the meta tensors."""
    made = {}
    for tensor in (*model.parameters(), *model.buffers()):
        made[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            made[id(tensor)] = nn.Parameter(made[id(tensor)], tensor.requires_grad)
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: made[id(tensor)] for name, tensor in tensors.items() if tensor is not None})
    return model


def eight_bit_optimizer(parameters):
    """The 8-bit AdamW of bitsandbytes, without its tables: they are computed from data, which fake tensors lack."""
    import bitsandbytes as bnb

    class AdamW8bit(bnb.optim.AdamW8bit):
        def fill_qmap(self):
            self.name2qmap.update(dynamic=torch.empty(256), udynamic=torch.empty(256))

    return AdamW8bit(parameters)


class _Tracker(MemTracker):
    """torch's tracker without its statistics of every module after every operation, which take most of its time."""

    def _update_peak_stats(self, peak_state):
        for device, held in self._curr_mem_snap.items():
            if held["Total"] > self._peak_mem.get(device, 0):
                self._peak_mem[device] = held["Total"]


def tracked_peak(config, way: Way, batch: tuple[int, int]) -> int:
    """Peak of a whole step by torch's tracker. It is the second step, so that optimizer states exist."""
    model = build(config, way)
    plain = mock.patch("transformers.masking_utils.find_packed_sequence_indices", lambda *_: None)
    with FakeTensorMode(), _GroupedProducts(), plain:
        fill(model)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = eight_bit_optimizer(parameters) if way.eight_bit else torch.optim.AdamW(parameters, fused=True)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        inputs = {name: torch.empty(batch, dtype=torch.int64) for name in ("input_ids", "labels")}
        tracker = _Tracker()
        for parameter in model.parameters():
            if not parameter.requires_grad:  # it would hang a hook on its gradient
                tracker._param_to_grad_hook_handles[parameter] = (mock.Mock(), mock.Mock())
        tracker.track_external(model, optimizer, *inputs.values())
        with tracker:
            _loss(model, inputs, way).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return tracker._peak_mem[torch.device("cpu")]


def _loss(model: nn.Module, inputs: dict, way: Way) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way.autocast):
        outputs = model(**inputs)
    return (convert_outputs_to_fp32(lambda: outputs)() if way.autocast else outputs)["loss"]


class _Peak(TrainerCallback):
    """Keeps the allocator's peak of the third step."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args, state, control, **kwargs):
        self.peak = torch.cuda.max_memory_allocated()


def allocated_peak(config, way: Way, batch: tuple[int, int]) -> int:
    """Peak of torch's allocator in a step of a real run."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=way.weights)
        model = get_peft_model(model, LoraConfig(**LORA)) if way.lora else model
    size, length = batch
    tokens = torch.randint(config.vocab_size, (4 * size, length))
    rows = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in tokens]
    peak, optimizer = _Peak(), None
    if way.eight_bit:
        import bitsandbytes as bnb

        # `optim="adamw_bnb_8bit"` would keep the moments of embeddings in fp32.
        optimizer = bnb.optim.AdamW8bit, {"lr": 1e-5}
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=3, per_device_train_batch_size=size, bf16=way.autocast, save_strategy="no",
            optim="adamw_torch_fused", report_to="none", disable_tqdm=True,
            **{CHECKPOINTING: way.checkpointing, f"{CHECKPOINTING}_kwargs": {"use_reentrant": False}},
        )  # fmt: skip
        Trainer(model, args, train_dataset=rows, callbacks=[peak], optimizer_cls_and_kwargs=optimizer).train()
    return peak.peak


def measure(name: str, size: int, way: str, gpu: bool, reference: int | None = None) -> dict:
    """Make one row: the plan, and the reference if it is not known."""
    config, batch = MODELS[name][size], BATCHES[size]
    accelerator = "cuda" if gpu else "cpu"
    start = time.perf_counter()
    asked = {"sequence_length": batch[1], "batch_size": batch[0], "accelerator": accelerator, **WAYS[way].asked()}
    plan = plan_memory(config, **asked)
    seconds = time.perf_counter() - start
    if reference is None:
        reference = (allocated_peak if gpu else tracked_peak)(config, WAYS[way], batch)
    return {
        "model": name,
        "layers": config.num_hidden_layers,
        "weights": plan.shape.total.weights,
        "way": way,
        "batch_size": batch[0],
        "sequence_length": batch[1],
        "planned_bytes": plan.peak_device_bytes,
        "reference_bytes": reference,
        "error": plan.peak_device_bytes / reference - 1,
        "stage": plan.stage,
        "plan_seconds": round(seconds, 2),
    }


def table(rows: list[dict]) -> str:
    """A table of models and sizes, with the GiB of the reference and the error of the plan for each way."""
    lines = ["| model | weights | batch | " + " | ".join(WAYS) + " |", "|---|---|---|" + "---|" * len(WAYS)]
    for name, configs in MODELS.items():
        for config, batch in zip(configs, BATCHES):
            found = {r["way"]: r for r in rows if (r["model"], r["layers"]) == (name, config.num_hidden_layers)}
            if not found:
                continue
            cells = [
                f"{found[way]['reference_bytes'] / 2**30:.2f}, {100 * found[way]['error']:+.2f} %"
                if way in found
                else "-"
                for way in WAYS
            ]
            weights = next(iter(found.values()))["weights"] / 1e9
            lines.append(f"| {name}, {config.num_hidden_layers} layers | {weights:.2f} B | {batch[0]} x {batch[1]} | "
                         + " | ".join(cells) + " |")  # fmt: skip
    worst = max((abs(row["error"]) for row in rows), default=0.0)
    return "\n".join([*lines, "", f"{len(rows)} rows, largest error {100 * worst:.2f} %"])


def main() -> None:
    parser = command_line(__doc__, HERE)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--sizes", nargs="+", type=int, choices=range(TINY), default=list(range(TINY)))
    parser.add_argument("--smoke", action="store_true", help="Tiny models instead of the sizes, to check the plumbing.")
    parser.add_argument(
        "--replan", action="store_true", help="Plan anew also where a row is there, and keep its reference."
    )
    parser.add_argument("--gpu", action="store_true", help="Measure real steps on this machine's GPU.")
    args = parser.parse_args()
    if args.gpu and not torch.cuda.is_available():
        parser.error("`--gpu` needs a GPU, and torch sees none.")
    if args.gpu and torch.cuda.device_count() > 1:
        parser.error("Trainer would spread each batch over all GPUs. Set CUDA_VISIBLE_DEVICES=0.")
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    scratch = tempfile.TemporaryDirectory()
    if args.smoke and args.results == HERE / "results.jsonl":
        args.results = Path(scratch.name) / "results.jsonl"
    results = Results(args.results, "accuracy", ("reference", "model", "layers", "way"))
    made_by = {"reference": REFERENCES[args.gpu]}
    for size, name, way in itertools.product([TINY] if args.smoke else args.sizes, args.models, args.ways):
        known = results.get(**made_by, model=name, layers=MODELS[name][size].num_hidden_layers, way=way)
        if known and not args.replan:
            continue
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            row = measure(name, size, way, args.gpu, known and known["reference_bytes"])
            origin = provenance(torch.get_num_threads(), "cuda" if args.gpu else "cpu")
            print(json.dumps(results.add({**made_by, **row, **origin})), flush=True)
        gc.collect()
    print(table(results.rows(**made_by)))


if __name__ == "__main__":
    main()
