"""`hf-hybrid report`: what it writes and says, what it refuses, and that it needs neither torch nor transformers."""

import sys
import time

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


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--every", "5"], "is for `--follow`"), (["--follow", "--every", "0"], "`--every` must be at least 1, got 0")],
)
def test_bad_options_of_following(tmp_path, refused, words, expected):
    hybrid_run(tmp_path)
    told = refused("report", tmp_path, *words)
    assert expected in told and told.count("\n") == 1 and not (tmp_path / "report").exists()


REFRESH = 'http-equiv="refresh" content="7"'


def test_a_report_follows_a_run_until_it_has_finished(tmp_path, monkeypatch, cli):
    hybrid_run(tmp_path / "run", steps=40, finished=False)
    page = tmp_path / "run" / "report" / "report.html"
    seen = []

    def sleep(seconds):
        seen.append((seconds, REFRESH in page.read_text(), "of 100" in page.read_text()))
        if len(seen) == 2:
            hybrid_run(tmp_path / "run")
        assert len(seen) < 6

    monkeypatch.setattr(time, "sleep", sleep)
    cli("report", tmp_path / "run", "--follow", "--every", "7")
    # Once more when it has finished, as its last evaluation comes after its last step.
    assert [refreshes for _, refreshes, _ in seen] == [True, True, False] and {every for every, *_ in seen} == {7}
    assert "Finished at step 100" in page.read_text() and "refresh" not in page.read_text()


@pytest.mark.parametrize("started", [False, True])
def test_following_waits_for_the_first_log(tmp_path, monkeypatch, cli, refused, started):
    run = tmp_path / "run"
    run.mkdir()
    if started:
        (run / "hybrid_log.jsonl").write_text('{"step": 0, "begun": true, "max_steps": 100}\n')
    assert f"`{run}` holds" in refused("report", run), "without `--follow` nothing is waited for"
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            hybrid_run(run)
        assert len(waits) < 9

    monkeypatch.setattr(time, "sleep", sleep)
    out, err = cli("report", run, "--follow", "--every", "7")
    assert out.count(f"`{run}` holds nothing to report on yet. It is read again every 7 s.") == 1
    assert not err and "Finished at step 100" in (run / "report" / "report.html").read_text()


def test_waiting_ends_with_ctrl_c_or_with_the_folder(tmp_path, monkeypatch, cli, refused):
    (tmp_path / "run").mkdir()
    ends = iter([KeyboardInterrupt, None])

    def sleep(seconds):
        if (end := next(ends)) is not None:
            raise end
        (tmp_path / "run").rmdir()

    monkeypatch.setattr(time, "sleep", sleep)
    out, _ = cli("report", tmp_path / "run", "--follow")
    assert "report.html" not in out and not list((tmp_path / "run").iterdir())
    assert "is not a folder" in refused("report", tmp_path / "run", "--follow")
    assert refused("report", tmp_path / "misspelt", "--follow"), "nobody waits for a folder that is not there"


def test_ctrl_c_ends_following(tmp_path, monkeypatch, cli):
    hybrid_run(tmp_path, steps=40, finished=False)

    def sleep(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    cli("report", tmp_path, "--follow")
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Did not finish" in page and "refresh" not in page, "nobody writes it anew"


@pytest.mark.processes
def test_a_report_needs_neither_torch_nor_transformers(tmp_path):
    hybrid_run(tmp_path)
    code = f"from hf_hybrid.cli.main import main\nsys.modules['matplotlib'] = None\nmain(['report', {str(tmp_path)!r}])"
    python(code, without={"torch", "transformers", "numpy"})
    assert (tmp_path / "report" / "report.html").is_file()
