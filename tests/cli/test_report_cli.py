"""`hf-hybrid report`: what it writes and says, what it refuses, and that it needs neither torch nor transformers."""

import subprocess
import sys
import time

import pytest
from rig.run_folders import hybrid_run

from hf_hybrid.cli.main import main


def test_command(tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    hybrid_run(tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "there")]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[0] == str(tmp_path / "there" / "report.html") and "report.json" in told.out
    assert "hf-hybrid[report]" in caplog.text
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "`" + str(tmp_path / "nothing") + "` is not a folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "file")]) == 2
    assert "`output`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--every", "5"], "is for `--follow`"), (["--follow", "--every", "0"], "`--every` must be at least 1, got 0")],
)
def test_bad_options_of_following(tmp_path, capsys, words, expected):
    hybrid_run(tmp_path)
    assert main(["report", str(tmp_path), *words]) == 2
    told = capsys.readouterr().err
    assert expected in told and told.count("\n") == 1 and not (tmp_path / "report").exists()


REFRESH = 'http-equiv="refresh" content="7"'


def test_a_report_follows_a_run_until_it_has_finished(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    hybrid_run(tmp_path / "run", steps=40, finished=False)
    page = tmp_path / "run" / "report" / "report.html"
    seen = []

    def sleep(seconds):
        seen.append((seconds, REFRESH in page.read_text(), "of 100" in page.read_text()))
        if len(seen) == 2:
            hybrid_run(tmp_path / "run")
        assert len(seen) < 6

    monkeypatch.setattr(time, "sleep", sleep)
    assert main(["report", str(tmp_path / "run"), "--follow", "--every", "7"]) == 0
    # Once more when it has finished, as its last evaluation comes after its last step.
    assert [refreshes for _, refreshes, _ in seen] == [True, True, False] and {every for every, *_ in seen} == {7}
    assert "Finished at step 100" in page.read_text() and "refresh" not in page.read_text()


@pytest.mark.parametrize("started", [False, True])
def test_following_waits_for_the_first_log(tmp_path, monkeypatch, capsys, started):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = tmp_path / "run"
    run.mkdir()
    if started:
        (run / "hybrid_log.jsonl").write_text('{"step": 0, "begun": true, "max_steps": 100}\n')
    assert main(["report", str(run)]) == 2, "without `--follow` nothing is waited for"
    assert f"`{run}` holds" in capsys.readouterr().err
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            hybrid_run(run)
        assert len(waits) < 9

    monkeypatch.setattr(time, "sleep", sleep)
    assert main(["report", str(run), "--follow", "--every", "7"]) == 0
    told = capsys.readouterr()
    assert told.out.count(f"`{run}` holds nothing to report on yet. It is read again every 7 s.") == 1
    assert not told.err and "Finished at step 100" in (run / "report" / "report.html").read_text()


def test_waiting_ends_with_ctrl_c_or_with_the_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "run").mkdir()
    ends = iter([KeyboardInterrupt, None])

    def sleep(seconds):
        if (end := next(ends)) is not None:
            raise end
        (tmp_path / "run").rmdir()

    monkeypatch.setattr(time, "sleep", sleep)
    assert main(["report", str(tmp_path / "run"), "--follow"]) == 0
    assert "report.html" not in capsys.readouterr().out and not list((tmp_path / "run").iterdir())
    assert main(["report", str(tmp_path / "run"), "--follow"]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "misspelt"), "--follow"]) == 2, "nobody waits for a folder that is not there"


def test_ctrl_c_ends_following(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    hybrid_run(tmp_path, steps=40, finished=False)

    def sleep(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    assert main(["report", str(tmp_path), "--follow"]) == 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Did not finish" in page and "refresh" not in page, "nobody writes it anew"


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
