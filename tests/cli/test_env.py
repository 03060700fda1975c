"""`hf-hybrid env`: a list for a bug report that never fails."""

import re
import sys
from pathlib import Path

from hf_hybrid.cli import env
from hf_hybrid.cli.main import main

ROOT = Path(__file__).parents[2]


def test_env_is_a_list_for_a_bug_report(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert all(line.startswith("- ") for line in text.splitlines())
    assert re.search(r"- torch: 2\.\d+", text) and re.search(r"- RAM: [\d.]+ GiB, [\d.]+ GiB available", text)
    assert "- CUDA_VISIBLE_DEVICES: 7" in text and "- CUDA of torch: " in text
    assert "hf_xxx" not in text and str(Path.home()) not in text and str(ROOT) not in text


def test_env_says_what_is_missing_and_does_not_fail(monkeypatch):
    for package in ("peft", "bitsandbytes", "trl", "matplotlib", "deepspeed", "pynvml", "torch"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = env.report()
    assert '- peft: not installed (pip install "hf-hybrid[peft]")' in text
    assert '- bitsandbytes: not installed (pip install "hf-hybrid[quantization]")' in text
    assert '- gguf: not installed (pip install "hf-hybrid[export]")' in text
    assert '- trl: not installed (pip install "hf-hybrid[trl]")' in text
    assert '- matplotlib: not installed (pip install "hf-hybrid[report]")' in text
    assert "- GPUs by torch: unknown (ModuleNotFoundError)" in text


def test_env_reads_gpus_from_the_driver(monkeypatch):
    from types import SimpleNamespace

    class NVMLError(Exception):
        pass

    def unknown(handle):
        raise NVMLError

    fake = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: b"A GPU",
        nvmlSystemGetDriverVersion=lambda: "600.1",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=24 * 2**30, free=20 * 2**30),
        nvmlDeviceGetMaxPcieLinkGeneration=lambda handle: unknown(handle) if handle else 4,
        nvmlDeviceGetMaxPcieLinkWidth=lambda handle: 16,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert env._nvml_gpus() == ("A GPU, 24.0 GiB (20.0 free), PCIe 4 x16; A GPU, 24.0 GiB (20.0 free); driver 600.1")

    def no_driver():
        raise NVMLError

    fake.nvmlInit = no_driver
    assert env._nvml_gpus() == "none (no NVIDIA driver)"
