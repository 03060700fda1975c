"""`hf-hybrid report`: what it writes and says, what it refuses, and that it needs neither torch nor transformers."""

import subprocess
import sys

import pytest
from rig.run_folders import hybrid_run

from hf_hybrid.cli.main import main


def test_command(tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    hybrid_run(tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "there")]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[0] == str(tmp_path / "there" / "report.html") and "leaps.csv" in told.out
    assert "hf-hybrid[report]" in caplog.text
    assert main(["report", str(tmp_path / "run"), str(tmp_path / "run")]) == 0
    assert "comparison.html" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "`" + str(tmp_path / "nothing") + "` is not a folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "file")]) == 2
    assert "`output`" in capsys.readouterr().err


@pytest.mark.processes
def test_a_report_needs_neither_torch_nor_transformers(tmp_path):
    hybrid_run(tmp_path)
    code = (
        "import sys\n"
        "from hf_hybrid.cli.main import main\n"
        "sys.modules['matplotlib'] = None\n"
        f"assert main(['report', {str(tmp_path)!r}]) == 0\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
