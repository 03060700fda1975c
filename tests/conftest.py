"""
Tiny models from config and text that ships with Python: nothing here needs a network or a GPU.

Importing this file is cheap: with `-n`, so does the process that hands out the tests, while the others wait for it.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path
from pydoc_data import topics
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

    from hf_hybrid import HybridConfig

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
# The tests see no GPU, and torch's CUDA sanitizer would ask for one. Those marked gpu have processes that see one.
os.environ.setdefault("HIDDEN_FROM_TESTS_CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
if "TORCH_CUDA_SANITIZER" in os.environ:
    os.environ["HIDDEN_FROM_TESTS_TORCH_CUDA_SANITIZER"] = os.environ.pop("TORCH_CUDA_SANITIZER")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Data of tests need not survive a loss of power, and waiting for the disk would take a tenth of the time.
os.fsync = os.fstat
# accelerate looks for this package in every backward pass, in every folder of the path.
sys.modules.setdefault("lomo_optim", None)
# Without TRL, Python would take our folder `trl` of its tests for it.
if (spec := importlib.util.find_spec("trl")) is None or spec.origin is None:
    sys.modules["trl"] = None


def _own_lock_of_bars() -> None:
    """A forked process that a test kills inside a progress bar would leave the lock that its parent's bars wait for."""
    if "tqdm" in sys.modules:
        kinds, lock = [sys.modules["tqdm"].tqdm], threading.RLock()
        for kind in kinds:  # a subclass that made the first bar has a lock of its own
            kind.set_lock(lock)
            kinds += kind.__subclasses__()


os.register_at_fork(after_in_child=_own_lock_of_bars)

SLOWEST_FIRST = (
    "simulated_gpu/test_scenarios.py",
    "rows/test_windows.py",
    "streaming/test_streaming.py",
    "cli/test_plan_cli.py",
    "cli/test_fine_tuning.py",
    "documents/test_examples.py",
    "trl/test_grpo.py",
    "run/test_weights.py",
    "plan/test_planning.py",
    "rows/test_images.py",
    "leaps/test_leaps.py",
    "trl/test_sft_dpo.py",
    "cli/test_first_files.py",
    "trl/test_shared_rows.py",
    "hub/test_card_and_hub.py",
    "run/test_monitor.py",
    "trl/test_decoding.py",
    "saving/test_state.py",
    "cli/test_cli.py",
    "test_machine.py",
    "test_side_effects.py",
)
"""Files that take about 10 seconds of a processor and more."""
LENGTH = 32
TIMES = ("seconds_by_phase", "tokens_per_second")
"""Values of the summary that no two runs have in common."""
HERE = Path(__file__).parent


def pytest_configure(config):
    """Let xdist keep our order of files; it would begin with those that have many tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    """Begin with the slowest files, so that the processes end together."""
    rank = {str(HERE / name): number for number, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: rank.get(str(item.path), len(rank)))


# A test that starts a process says so, and an inner loop can leave it out (see CONTRIBUTING.md).

STARTS_PROCESSES = ("processes", "simulated", "gpu")
"""Markers, of which such a test has one."""
_started: list[object] = []
"""What the present test has called to start one."""
_starters: set[tuple[str, str]] = set()
"""Where a fixture is from, and its name, if it started one: it may last for several tests."""


def _noting(start):
    @functools.wraps(start)
    def noted(*args, **kwargs):
        # matplotlib lists the fonts once per machine, in whichever test draws first.
        if not any(isinstance(arg, list) and arg[:1] == ["fc-list"] for arg in args):
            _started.append(start)
        return start(*args, **kwargs)

    return noted


platform.processor()  # asks a process, once; whoever asks first would be told to have started one
os.fork, subprocess.Popen.__init__ = _noting(os.fork), _noting(subprocess.Popen.__init__)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    before = len(_started)
    try:
        return (yield)
    finally:
        if len(_started) > before:
            _starters.add((fixturedef.baseid, fixturedef.argname))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    result = yield
    starts = any(name in item.fixturenames and item.nodeid.startswith(place) for place, name in _starters)
    starts, _started[:] = starts or bool(_started), []
    if starts and not any(map(item.get_closest_marker, STARTS_PROCESSES)):
        pytest.fail("it starts processes: mark it with `@pytest.mark.processes`", pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Every garbage collection would look through the million objects that the libraries make at import."""
    gc.disable()
    try:
        return (yield)
    finally:
        if "hf_hybrid.plan.trace" in sys.modules:
            from rig import traces

            folder = None
            if hasattr(session.config, "workerinput"):  # the processes of xdist share what lies above their folders
                folder = session.config._tmp_path_factory.getbasetemp().parent / "traces"
                folder.mkdir(exist_ok=True)
            traces.remember(folder)
        if (imports := sys.modules.get("accelerate.utils.imports")) is not None:
            # every backward pass asks for two packages, and the answer is read from the disk
            imports._is_package_available = functools.cache(imports._is_package_available)
        _freeze()
        gc.enable()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


_tests = itertools.count(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Each new trainer collects garbage, and would look through all that earlier tests imported."""
    result = yield
    if next(_tests) % 16 == 0:
        _freeze()
    return result


def mostly_slow(values, quick) -> list:
    """Parameters of a test, of which the default suite has the `quick` ones."""

    def slow(value):
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)

    return [value if value in quick else slow(value) for value in values]


def tiny_model(seed: int = 0, **overrides) -> LlamaForCausalLM:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    values = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**{**values, **overrides}))


class ByteText:
    """English text as bytes, in blocks of `LENGTH`."""

    def __init__(self, samples: int, offset: int = 0):
        import torch

        text = "".join(topics.topics[name] for name in sorted(topics.topics)).encode()
        blocks = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // LENGTH * LENGTH]
        self.blocks = blocks.view(-1, LENGTH)[offset : offset + samples].long()

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def config_values(output_dir, **overrides) -> dict:
    """Arguments that plain `TrainingArguments` takes as well. `None` leaves out the rate or the optimizer."""
    values = {
        "output_dir": str(output_dir),
        "max_steps": 30,
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        **overrides,
    }
    return {
        name: value for name, value in values.items() if value is not None or name not in ("learning_rate", "optim")
    }


def hybrid_config(output_dir, **overrides) -> HybridConfig:
    """A short run that goes through all four phases several times. `plan_values` are set on the config."""
    from hf_hybrid import HybridConfig

    phases = {
        "warmup_phase_steps": 4,
        "full_phase_steps": 3,
        "correct_phase_steps": 2,
        "max_predict_steps": 3,
        "leap_worth": 0.5,
        "direction": "orthogonal",
    }
    plan_values = overrides.pop("plan_values", {})
    config = HybridConfig(**config_values(output_dir, **{**phases, **overrides}))
    config.plan_values = {**config.plan_values, **plan_values}
    return config


def weights(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_weights(first: dict, second: dict) -> None:
    import torch

    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"{len(different)} of {len(first)} parameters differ, first {different[:3]}"


def losses(trainer) -> list[float]:
    """The losses that were logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def finite(model) -> bool:
    import torch

    return all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.fixture(autouse=True)
def fallbacks_are_errors(request, monkeypatch):
    """
    A saving that is off because of an unforeseen exception is an error in every test, unless the test is about that and
    has the marker `falls_back`. Processes that a test starts do the same (`rig/strict.py`).
    """
    if not request.node.get_closest_marker("falls_back"):
        from rig import strict

        monkeypatch.setattr(*strict.replacement())


@pytest.fixture
def of_a_library(request, monkeypatch) -> None:
    """What the file of a test, or the rig, puts into a model or trainer counts as a library's, not as a user's."""
    from hf_hybrid.run import trainer_view

    monkeypatch.setattr(trainer_view, "LIBRARIES", (*trainer_view.LIBRARIES, "rig", request.module.__name__))


@pytest.fixture
def cli(capsys):
    """Run `hf-hybrid` in this process, check how it ended, and return what it wrote to stdout and to stderr."""
    from hf_hybrid.cli.main import main

    def run(*words, status=0):
        capsys.readouterr()
        ended = main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert ended == status and "Traceback" not in err, err
        return out, err

    return run


@pytest.fixture
def refused(cli):
    """Run a command that refuses what it is given with status 2, and return the sentence."""

    def run(*words):
        _, err = cli(*words, status=2)
        assert f"hf-hybrid {words[0]}: error: " in err, err
        return err

    return run


@pytest.fixture
def train_set() -> ByteText:
    return ByteText(400)
