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
    assert re.search(r"- torch: 2\.\d+", text) and re.search(r"- RAM: [\d.]+ GiB", text)
    assert "- CUDA_VISIBLE_DEVICES: 7" in text and "- CUDA of torch: " in text
    assert "hf_xxx" not in text and str(Path.home()) not in text and str(ROOT) not in text


def test_env_does_not_fail_where_torch_is_broken(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    text = env.report()
    assert "- hf_hybrid: " in text and "- Hardware: unknown (ModuleNotFoundError)" in text
