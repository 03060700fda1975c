"""`hf_hybrid/report/page.py` and its plots: pages are whole, load nothing, and show what is in files as text."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from rig.pages import Page
from rig.run_folders import NASTY, hybrid_run, leap, log, phases, profile, step_record, write

from hf_hybrid.report.page import write_report
from hf_hybrid.report.plots import PALETTE, running_mean


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A run with everything in it, under a name that is markup, and its files by name."""
    folder = tmp_path_factory.mktemp("runs") / "<b>run</b>"
    leaps = hybrid_run(folder, leaps=[leap(12 + 6 * k, "kept" if k % 3 else "rejected") for k in range(14)])
    profile(folder, [step_record(step, phase) for step, phase in phases(leaps, 100).items()])
    log(folder, leaps)
    summary = json.loads((folder / "hybrid_summary.json").read_text())
    summary |= {"tokens": 5000, "tokens_shared": 900}
    summary["divergence_events"] = [{"step": 3, "phase": "full", "level": "warning", "reason": NASTY, "action": "none"}]
    done = {"step": 9, "phase": "full", "action": "smaller micro-batches", "from_size": 8, "to_size": 4}
    summary["out_of_memory"] = [{**done, "error": NASTY}]
    write(folder / "hybrid_summary.json", summary)
    return {path.name: path for path in write_report(folder)}


def test_the_page_has_the_five_numbers_all_plots_and_tables(reported):
    page = Page(reported["report.html"].read_text())
    assert page.open == [], "every element is closed"
    for text in (
        "Eval loss",
        "3.100",
        "Steps",
        "planned 100",
        "Predicted steps",
        "Backward passes",
        "Wall time",
        "Peak memory",
        "12.0 GiB",
    ):
        assert text in page.text
    headings = (
        "Loss", "Learning rate", "Savings", "Steps", "Leaps", "Memory",
        "Recovered from out of memory", "smaller micro-batches", "Divergence events", "Options",
    )  # fmt: skip
    assert all(heading in page.text for heading in headings)
    assert page.tags.count("h1") == 1 and page.tags.count("svg") == 3
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(labels) == 3 and all(len(label) > 20 for label in labels)
    assert {"memory.png", "loss.png", "rate.png"} <= set(reported)
    assert all(reported[name].read_bytes().startswith(b"\x89PNG") for name in reported if name.endswith(".png"))


@pytest.mark.parametrize("why", ["adapters are trained", NASTY, None])
def test_a_report_without_leaps_has_no_word_about_them(tmp_path, why):
    folder = tmp_path / "run"
    hybrid_run(folder, leaps=[])
    summary = json.loads((folder / "hybrid_summary.json").read_text())
    write(folder / "hybrid_summary.json", {**summary, "no_leaps": why, "learning_rate_scale": 40.0})
    write(folder / "hybrid_config.json", {"learning_rate": 1e-3})
    for path in folder.glob("checkpoint-*/hybrid_state.json"):
        write(path, {**json.loads(path.read_text()), "options": {}})
    phases = ["warmup"] * 10 + ["full"] * 90
    profile(folder, [step_record(step, phase) for step, phase in enumerate(phases, start=1)])
    files = {path.name: path for path in write_report(folder)}
    page = files["report.html"].read_text()
    words = re.sub(r"<style.*?</style>|var\(--\w+\)", "", page, flags=re.DOTALL).lower()
    assert re.findall(r"leap|predict|phase|warmup|\bfull\b|correct|\broll", words) == []
    assert "it ended at 40 times the scheduled rate." in page and "planned 100" in page and "Steps" in page


def test_the_page_loads_nothing(reported):
    page = Page(reported["report.html"].read_text())
    loading = {"src", "href", "data", "srcset", "action", "poster", "background"}
    links = [value for _, name, value in page.attributes if name in loading]
    assert links and all(value.startswith("#") or value == "data:," for value in links)
    assert all(match.startswith("#") for match in re.findall(r"url\(([^)]*)\)", reported["report.html"].read_text()))
    assert "script" not in page.tags and "iframe" not in page.tags and "@import" not in page.text
    policy = next(value for tag, name, value in page.attributes if tag == "meta" and "default-src" in (value or ""))
    assert policy.startswith("default-src 'none'")


def test_what_comes_from_files_stays_text(reported):
    page = Page(reported["report.html"].read_text())
    assert "script" not in page.tags and "b" not in page.tags
    # Run name, preset, out-of-memory error, reason, name of the device: all there, as they were.
    assert "<b>run</b>" in page.text and page.text.count(NASTY) >= 4


def test_plots_take_their_colours_from_the_page(reported):
    text = reported["report.html"].read_text()
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.S))
    assert not any(colour in drawn for colour in PALETTE.values())
    used = set(re.findall(r"var\(--(\w+)\)", text))
    defined = [set(re.findall(r"--(\w+):", block)) for block in re.findall(r":root \{(.*?)\}", text, re.S)]
    assert len(defined) == 2 and all(used <= names for names in defined), "light and dark"
    assert {"ink", "line", "muted"} <= used
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids))


def test_without_matplotlib_everything_but_the_plots_is_written(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    hybrid_run(tmp_path)
    files = {path.name for path in write_report(tmp_path)}
    assert files == {"report.html", "report.json"}
    assert 'pip install "hf-hybrid[report]"' in caplog.text
    assert 'pip install "hf-hybrid[report]"' in Page((tmp_path / "report" / "report.html").read_text()).text


def scored_run(folder):
    """A run of GRPO as it is logged, with samples."""
    history = [
        {"step": step, "loss": 0.1, "grad_norm": 1.0 + step, "reward": step / 10, "rewards/<b>f</b>/mean": step / 20,
         "rewards/g/mean": step / 20, "num_tokens": 100 * step, "seconds": 2.0 * step}
        for step in range(1, 11)
    ]  # fmt: skip
    history.insert(5, {"step": 5, "eval_loss": 0.1, "eval_reward": 0.4, "seconds": 10.0})
    lines = [{"step": 0, "begun": True, "max_steps": 10}, *history]
    folder.mkdir(parents=True)
    (folder / "hybrid_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = [{"step": 5, "prompt": NASTY, "completion": f"{NASTY}\nsecond line", "tokens": 3, "ended": False}]
    samples.append({"step": 5, "prompt": "two", "completion": "also at step 5", "tokens": 3, "ended": True})
    samples.append({"step": 10, "prompt": NASTY, "completion": "done", "tokens": 1, "ended": True})
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))


def test_half_of_an_emoji_does_not_end_a_report(tmp_path):
    half, folder = "a\ud83db", tmp_path / "run"  # as JSON has it where a text was cut
    hybrid_run(folder)
    lines = [{"step": 0, "begun": True}, {"step": 5, "prompt": half, "completion": half, "tokens": 3, "ended": True}]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "hybrid_log.jsonl").write_text(json.dumps({"step": 5, "loss": 1.0, f"rewards/{half}": 1.0}) + "\n")
    for file, values in (
        ("hybrid_config.json", {"run_name": half, half: half}),
        ("hybrid_summary.json", {"divergence_events": [{"step": 3, "phase": "full", "level": half, "reason": half}]}),
    ):
        write(folder / file, {**json.loads((folder / file).read_text()), **values})
    page, *_ = write_report(folder)
    assert page.read_text().count("a?b") >= 5


def test_reward_gradient_norm_and_samples(tmp_path):
    scored_run(tmp_path / "run")
    files = {path.name: path for path in write_report(tmp_path / "run")}
    assert {"scores.png", "gradient.png", "loss.png"} <= set(files)
    text = files["report.html"].read_text()
    page = Page(text)
    assert page.open == [] and "script" not in page.tags and "b" not in page.tags
    assert "Eval: Reward0.4000best 0.400" in page.text and "Reward1.000at first 0.100" in page.text
    assert page.text.count(NASTY) == 3 and "second line …" in page.text
    assert text.index("done") < text.index("second line") < text.index("also at step 5"), "the newest step first"
    series = json.loads(files["report.json"].read_text())["series"]
    at_five = {(row["panel"], row["name"]): dict(row["points"])[5] for row in series if row["figure"] != "rate"}
    assert at_five["reward", "training"] == 0.5 and at_five["reward", "eval"] == 0.4
    assert at_five["rewards", "<b>f</b>"] == 0.25


def test_running_means():
    means = running_mean([(1, 1.0), (2, 2.0), (3, 6.0), (4, 1.0)], 3)
    assert [step for step, _ in means] == [2, 3] and [mean for _, mean in means] == pytest.approx([3.0, 3.0])


def test_long_runs_are_drawn(tmp_path):
    leaps = hybrid_run(tmp_path, leaps=[leap(s, "rolled_back" if s % 4 else "kept") for s in range(12, 98, 5)])
    known = phases(leaps, 100)
    profile(tmp_path, [step_record(step, known[1 + step % 100]) for step in range(1, 3001)])
    files = {path.name for path in write_report(tmp_path)}
    assert {"memory.png", "loss.png"} <= files
    assert (tmp_path / "report" / "report.html").stat().st_size < 3_000_000


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_has_nothing_to_complain_about(reported, tmp_path, width):
    shot = tmp_path / "page.png"
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path / 'browser'}", "--enable-logging=stderr", "--v=0",
        f"--window-size={width},2000", f"--screenshot={shot}",
    ]  # fmt: skip
    done = subprocess.run(
        ["chromium", *flags, reported["report.html"].as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert shot.stat().st_size > 10_000
    assert "CONSOLE" not in done.stderr


def test_links_in_the_folder_of_a_report_are_replaced(tmp_path):
    """Whoever may write to the folder of a run must not choose what the report is written over."""
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_text("of another user")
    hybrid_run(run)
    names = [path.name for path in write_report(run, tmp_path / "names")]
    (run / "report").mkdir()
    links = [run / "report" / name for name in names]
    for link in links:
        link.symlink_to(precious)
    write_report(run)
    assert precious.read_text() == "of another user"
    assert {"report.html", "report.json", "loss.png"} <= set(names)
    assert all(path.stat().st_size and not path.is_symlink() for path in links)
