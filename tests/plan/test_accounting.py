"""Byte tables, what live objects hold, what a model's shape says, what the machine has left: against sums by hand."""

from dataclasses import dataclass, replace

import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from hf_hybrid.machine import device_memory, workspace_bytes
from hf_hybrid.plan.accounting import (
    ByteTable,
    ModelShape,
    ParameterCount,
    WeightCount,
    format_bytes,
    host_memory,
    measure_held,
    storage_address,
    storage_bytes,
)

# The tiny Llama: four attention matrices of 32 x 32, three MLP matrices of 32 x 64, two norms; 256 tokens; one norm.
LAYER = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
EMBEDDING = 256 * 32
TOTAL = 2 * LAYER + EMBEDDING + 32
PARAMETERS = 2 * 9 + 2
LAYERS = ["model.layers.0", "model.layers.1"]


def test_table_adds_up():
    table = ByteTable()
    table.add("weights", "device", 100)
    table.add("weights", "device", 20.5)
    table.add("states", "host", 7)
    assert table.get("weights", "device") == 121  # a fraction of a byte is a byte
    assert table.total("device") == 121 and table.total("host") == 7
    assert [row for row in table.rows() if any(row[1:])] == [("weights", 121, 0), ("states", 0, 7)]
    assert table.to_dict()["states"] == {"device": 0, "host": 7}
    assert table.to_dict()["total"] == {"device": 121, "host": 7}
    assert table != ByteTable()


def test_table_as_text():
    table = ByteTable()
    table.add("weights", "device", 3 * 2**29)
    table.add("gradients", "host", 5 * 2**20)
    lines = str(table).splitlines()
    assert lines[1].split() == ["weights", "1.50", "GiB", "-"]
    assert lines[2].split() == ["gradients", "-", "5.00", "MiB"]
    assert lines[-1].split() == ["total", "1.50", "GiB", "5.00", "MiB"]
    assert len({len(line) for line in lines}) == 1, "fixed width"


@pytest.mark.parametrize("arguments", [("weight", "device", 1), ("weights", "gpu", 1), ("weights", "device", -1)])
def test_table_refuses_what_it_does_not_know(arguments):
    with pytest.raises(ValueError, match="no table has `category="):
        ByteTable().add(*arguments)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (2**20, "1.00 MiB"), (2**40, "1024.00 GiB")]
)
def test_units(count, text):
    assert format_bytes(count) == text


def test_views_share_a_storage():
    whole = torch.zeros(100)
    part = whole[10:20]
    assert storage_bytes([part]) == 400, "a view keeps all of it alive"
    assert storage_bytes([whole, part, torch.zeros(3, dtype=torch.bfloat16)]) == 406
    assert storage_bytes([torch.empty(100, device="meta")]) == 0


def test_sparse_tensors_are_their_parts():
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 4), (5, 4), check_invariants=True)
    assert storage_bytes([sparse]) == 2 * 8 + 2 * 4 * 4


def trained():
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(1, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return model, optimizer


def test_what_training_holds_to_the_byte():
    model, optimizer = trained()
    table = measure_held(model, optimizer, extra={"drift": [torch.zeros(5)], "activations": [torch.zeros(2, 3)]})
    buffers = storage_bytes(model.buffers())
    assert [host for _, _, host in table.rows()] == [
        4 * TOTAL,
        4 * TOTAL,
        8 * TOTAL + 4 * PARAMETERS,  # a step counter each
        24,
        20,
        buffers,
    ]
    assert table.total("device") == 0
    optimizer.zero_grad()
    assert measure_held(model, optimizer).get("gradients", "host") == 0
    assert measure_held(None).total("host") == 0


def test_host_and_device_on_one_cpu():
    model, optimizer = trained()
    on_host = {storage_address(p) for p in model.model.layers.parameters()}
    table = measure_held(model, optimizer, host_storages=on_host)
    assert table.get("weights", "host") == 4 * 2 * LAYER
    assert table.get("weights", "device") == 4 * (EMBEDDING + 32)
    assert table.get("states", "device") == 8 * TOTAL + 4 * PARAMETERS


def test_a_storage_counts_once_where_it_is_met_first():
    model = tiny_model()
    packed = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = packed[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    table = measure_held(model, extra={"drift": [packed]})
    assert table.get("weights", "host") == 4 * TOTAL and table.get("drift", "host") == 0


@dataclass
class Coded:
    codes: torch.Tensor
    scale: float = 1.0


def test_states_at_any_depth():
    model = torch.nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {
        "a": [torch.zeros(3), {"b": (torch.zeros(4),)}],
        "c": Coded(torch.zeros(5)),
        "n": 1,
    }
    assert measure_held(model, optimizer).get("states", "host") == 4 * (3 + 4 + 5)


def numbers(unit: WeightCount) -> tuple[int, int, int]:
    return unit.trainable, unit.frozen, unit.muon


def test_shape_of_a_tied_model():
    model = tiny_model()
    shape = ModelShape.of(model, LAYERS)
    shapes, norm = [(32, 32)] * 4 + [(64, 32)] * 2 + [(32, 64)], ParameterCount(32, True, False)
    matrices = [ParameterCount(rows * columns, True) for rows, columns in shapes]
    layer = WeightCount(LAYER, parameters=(*matrices, norm, norm))
    embedding = ParameterCount(EMBEDDING, True, False)  # read, and never rounded
    assert shape == ModelShape(
        layers=(layer, layer),
        embedding=WeightCount(EMBEDDING, parameters=(embedding,)),
        head=WeightCount(),
        rest=WeightCount(32, parameters=(norm,)),
        hidden=32,
        vocab=256,
        element_bytes=4,
        trainable_bytes=4,
        largest_trainable=EMBEDDING,
        tied=True,
        buffer_bytes=storage_bytes(model.buffers()),
    )
    assert numbers(shape.total) == (TOTAL, 0, 0)
    leaps = [model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].self_attn.q_proj.weight]
    both = ModelShape.of(model, LAYERS, leaps=leaps)
    assert both == replace(shape, largest_leap=32 * 64)


def test_shape_of_an_untied_model_in_bf16_and_without_memory():
    shape = ModelShape.of(tiny_model(tie_word_embeddings=False).bfloat16(), LAYERS)
    assert numbers(shape.embedding) == numbers(shape.head) == (EMBEDDING, 0, 0) and not shape.tied
    assert shape.element_bytes == shape.trainable_bytes == 2
    with torch.device("meta"):
        on_meta = tiny_model(tie_word_embeddings=False)
    assert ModelShape.of(on_meta, LAYERS).total.weights == shape.total.weights


def test_shape_of_another_architecture():
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16))
    shape = ModelShape.of(model, ["transformer.h.0", "transformer.h.1"])
    assert (shape.hidden, shape.vocab, shape.tied) == (32, 64, True)
    assert shape.total.weights == sum(p.numel() for p in model.parameters())
    assert not any(piece.rounds for piece in shape.total.by_parameter), "its matrices are not those of linear layers"


def test_shape_of_adapters():
    model = get_peft_model(tiny_model().bfloat16(), LoraConfig(r=2, target_modules=["q_proj"]))
    shape = ModelShape.of(model, [f"base_model.model.{name}" for name in LAYERS])
    adapter = 2 * 2 * 32
    assert numbers(shape.layers[0]) == (adapter, LAYER, 0) and numbers(shape.embedding) == (0, EMBEDDING, 0)
    assert (shape.element_bytes, shape.trainable_bytes) == (2, 4)
    layers, ends, whole, resident, kept = shape.place(stream_embeddings=True, resident_layers=1)
    assert (whole, kept) == ([], 1), "no layer is trained but for its adapters"
    assert [numbers(unit) for unit in [*layers, *ends]] == [(0, LAYER, 0)] * 2 + [(0, EMBEDDING, 0), (0, 0, 0)]
    assert not any(piece.trained for layer in layers for piece in layer.by_parameter)
    assert numbers(resident) == (2 * adapter, 32, 0), "adapters stay on the device"
    assert sum(piece.count for piece in resident.by_parameter if piece.trained) == 2 * adapter


def test_shape_without_layers_is_refused():
    with pytest.raises(ValueError, match="`layer_names` is empty"):
        ModelShape.of(tiny_model(), [])
    with pytest.raises(ValueError, match="no `hidden_size`"):
        ModelShape.of(torch.nn.Sequential(torch.nn.Linear(2, 2)), ["0"])


def machine(root, cgroup, groups):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 2000 kB\nMemFree: 10 kB\nMemAvailable:    1000 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for folder, files in groups.items():
        (root / "sys/fs/cgroup" / folder).mkdir(parents=True)
        for name, text in files.items():
            (root / "sys/fs/cgroup" / folder / name).write_text(text)
    return root


def version_2(limit, used, cache=0):
    return {"memory.max": limit, "memory.current": used, "memory.stat": f"anon 5\ninactive_file {cache}\n"}


def version_1(limit, used, cache=0):
    stat = f"inactive_file 1\ntotal_inactive_file {cache}\n"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


@pytest.mark.parametrize(
    ("cgroup", "groups", "left"),
    [
        ("0::/\n", {}, 1000 * 1024),
        ("0::/job\n", {"job": version_2("max", "7000")}, 1000 * 1024),
        ("0::/job\n", {"job": version_2("9000\n", "7000\n", 500)}, 2500),
        ("0::/job/step\n", {"job": version_2("9000", "7000"), "job/step": version_2("max", "100")}, 2000),
        ("0::/job\n", {"job": version_2("9000", "9500")}, 0),
        ("3:cpu:/job\n2:memory:/job\n0::/\n", {"memory/job": version_1("8000", "7000", 300)}, 1300),
        ("2:memory:/on/the/host\n", {"memory": version_1("8000", "7000")}, 1000),
    ],
)
def test_host_memory_heeds_control_groups(tmp_path, cgroup, groups, left):
    assert host_memory(machine(tmp_path, cgroup, groups)) == left


def test_host_memory_without_proc(tmp_path):
    assert host_memory(tmp_path) > 2**28
    assert host_memory() > 0


def test_device_memory_counts_what_torch_keeps_unused(monkeypatch):
    assert device_memory() is device_memory(torch.device("cpu")) is None, "tests see no GPU"
    told = {"mem_get_info": (100, 200), "memory_reserved": 50, "memory_allocated": 30}
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert device_memory(torch.device("cuda")) == 120


@pytest.mark.parametrize(
    ("capability", "asked", "expected"),
    [
        ((8, 0), None, (2 * 4096 + 8 * 16) * 2**10),
        ((9, 0), None, 32 * 2**20),
        ((9, 0), ":16:8", 128 * 2**10),
        (None, None, (2 * 4096 + 8 * 16) * 2**10),
    ],
)
def test_workspaces_are_those_of_torch(capability, asked, expected, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if asked is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", asked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert workspace_bytes() == expected
