"""`hf-hybrid report`: what it writes and says, what it refuses, and that it needs neither torch nor transformers."""

import sys

import pytest
from rig.processes import python
from rig.run_folders import hybrid_run


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_command(tmp_path, cli, refused, caplog):
    hybrid_run(tmp_path / "run")
    out, _ = cli("report", tmp_path / "run", "--output", tmp_path / "there")
    assert out.splitlines()[0] == str(tmp_path / "there" / "report.html") and "report.json" in out
    assert "hf-hybrid[report]" in caplog.text
    assert f"`{tmp_path / 'nothing'}` is not a folder" in refused("report", tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    assert "`output`" in refused("report", tmp_path / "run", "-o", tmp_path / "file")


@pytest.mark.processes
def test_a_report_needs_neither_torch_nor_transformers(tmp_path):
    hybrid_run(tmp_path)
    code = f"from hf_hybrid.cli.main import main\nsys.modules['matplotlib'] = None\nmain(['report', {str(tmp_path)!r}])"
    python(code, without={"torch", "transformers", "numpy"})
    assert (tmp_path / "report" / "report.html").is_file()
