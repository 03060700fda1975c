"""`hf-hybrid grpo | rloo`: prompts that are held out, what is said of rewards that do not differ, and the report."""

import json
import re
from types import SimpleNamespace

import pytest
from conftest import mostly_slow
from rig.byte_llama import chat_tokenizer, save_llama

from hf_hybrid import HybridGRPOConfig
from hf_hybrid.cli import data, progress
from hf_hybrid.cli.data import Reader
from hf_hybrid.cli.options import DataOptions
from hf_hybrid.cli.recipe import compare_rewards

pytest.importorskip("trl")

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
QUESTIONS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(150)]
MINE = """\
import os, signal

def differs(completions, **columns):
    return [float(number) for number, _ in enumerate(completions)]

def same(completions, **columns):
    return [0.25 for _ in completions]

def mixed(completions, number, **columns):
    return [float(n % 2 and place % 2) for place, n in enumerate(number)]

def stops(completions, trainer_state, **columns):
    if trainer_state.global_step == 5 and not os.path.exists("stopped"):
        open("stopped", "w").close()
        os.kill(os.getpid(), signal.SIGINT)
    return [0.0 for _ in completions]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_rewards")
    save_llama(folder / "model", chat_tokenizer(TEMPLATE), max_position_embeddings=128)
    files = {"many": QUESTIONS, "few": QUESTIONS[:40], "own": QUESTIONS[:4]}
    for name, rows in files.items():
        rows = [{**row, "number": number} for number, row in enumerate(rows)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "mine.py").write_text(MINE)
    return folder


@pytest.fixture
def run(folder, tmp_path, monkeypatch, cli):
    """Run a command on a file, and return what it wrote to stdout, without line breaks."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")

    def run(name, reward, *words, file="many", steps=2, status=0):
        always = ["--use_cpu", "--report_to", "none", "--max_steps", steps, "--output_dir", tmp_path / "out"]
        always += ["--num_generations", "2", "--per_device_train_batch_size", "4", "--max_completion_length", "4"]
        given = ["--model", "model", "--dataset", f"{file}.jsonl", "--reward", f"mine.py:{reward}"]
        out, _ = cli(name, *given, *always, *words, status=status)
        assert all(len(line) <= 80 for line in out.splitlines() if str(tmp_path) not in line), out
        return out

    return run


@pytest.fixture
def left(tmp_path):
    """What a run has left in a file of JSON."""
    return lambda name: json.loads((tmp_path / "out" / f"{name}.json").read_text())


def held_out(folder, command="grpo", file="many", **options):
    """Which rows a run holds out, by their numbers, and what it says of them."""
    said = {}
    reader = Reader(command, DataOptions(dataset=[str(folder / f"{file}.jsonl")], **options), 42)
    train, held = reader.train_and_eval(chat_tokenizer(TEMPLATE), said.__setitem__)
    numbers = [] if held is None else held["number"][:]
    assert len(train) + len(numbers) == (150 if file == "many" else 40) and not {*numbers} & {*train["number"]}
    return numbers, said["eval"]


@pytest.mark.parametrize("command", mostly_slow(["grpo", "rloo"], ["grpo"]))
def test_prompts_are_held_out_and_rewarded_before_and_after(run, left, cli, tmp_path, monkeypatch, command):
    seen = []
    monkeypatch.setattr(
        data, "held_out", lambda rows, *how, split=data.held_out: seen.append(split(rows, *how)) or seen[-1]
    )
    out = run(command, "differs", "--save_steps", "1")
    assert "eval       32 of 150 rows, which are not trained on" in out
    assert "step 0/2  eval: reward 3.5" in out and re.search(r"eval       reward \S+ \(\S+ before the training\)", out)
    logged = left("trainer_state")["log_history"]
    before = next(entry for entry in logged if "eval_reward" in entry)
    assert before["step"] == 0 and f"({before['eval_reward']:.3g} before the training)" in out
    cli("report", tmp_path / "out")
    found = left("report/report")["scores"]["reward"]["held_out"]
    assert found["before"] == before["eval_reward"] and found["last"] == left("eval_results")["eval_reward"]
    assert "Before training: Reward" in (tmp_path / "out" / "report" / "report.html").read_text()
    # The same rows stay held out in a run that goes on, and what was measured before it is not measured again.
    for path in (tmp_path / "out").glob("checkpoint-2"):
        path.rename(tmp_path / "gone")
    out = run(command, "differs", "--save_steps", "1")
    assert "continues from step 1" in out and "step 0/2" not in out
    assert f"({before['eval_reward']:.3g} before the training)" in out
    first, again = (split[1]["number"][:] for split in seen)
    assert first == again and len(first) == 32


def test_data_of_the_user_and_shares_win_and_few_prompts_are_all_trained_on(run, folder, refused, tmp_path):
    numbers, said = held_out(folder)
    assert len(numbers) == 32 and numbers == held_out(folder, "rloo")[0] and said.startswith("32 of 150 rows")
    assert held_out(folder, file="few") == ([], "none: 40 prompts are too few to hold out 32. --eval_share 0.2 does")
    assert len(held_out(folder, eval_share=0.1)[0]) == 15 and len(held_out(folder, file="few", eval_share=0.2)[0]) == 8
    out = run("grpo", "differs", "--eval_dataset", "own.jsonl", "--eval_strategy", "steps", "--eval_steps", "1")
    assert "own.jsonl: `question` with `answer`, 4 rows" in out and "32 of 150" not in out
    assert [line.split()[1] for line in out.splitlines() if " eval: reward" in line] == ["0/2", "1/2", "2/2"]
    words = [
        "--model",
        "model",
        "--reward",
        "mine.py:same",
        "--eval_strategy",
        "steps",
        "--output_dir",
        tmp_path / "no",
    ]
    assert "has nothing to evaluate on" in refused("grpo", *words, "--dataset", "few.jsonl", "--use_cpu")


@pytest.mark.parametrize("steps, times", [(2, 1), (1000, 2), (10**6, 4)])
def test_held_out_prompts_take_little_of_a_run(tmp_path, steps, times):
    """A completion of each at least; more where they take a twentieth of the run's at most."""
    rows = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_generations": 4}
    args = HybridGRPOConfig(str(tmp_path), use_cpu=True, report_to=[], max_steps=steps, **rows)
    trainer = SimpleNamespace(args=args, num_generations=4, num_generations_eval=4)
    compare_rewards(trainer, 32)
    assert args.eval_on_start and trainer.num_generations_eval == times
    assert times == 1 or 2 * 32 * times <= steps * 4 / 20


# Rewards that do not differ.


def test_advice_comes_after_five_rounds_and_at_the_end(run):
    out = run("grpo", "same", file="few", steps=7)
    assert out.count("No reward differed in ") == 2
    at_once, at_end = (out.index(f"No reward differed in {rounds} rounds") for rounds in (5, 7))
    assert out.index("step 4/7") < at_once < out.index("step 5/7") < at_end < out.index("Done: 7 steps")
    assert "  2 of 2 prompts: all completions got the same reward\n" in out
    assert "--max_completion_length 4, which cut 100% of the last ones;" in out[at_end:]


def test_advice_comes_at_ctrl_c_too(run, folder):
    out = run("grpo", "stops", file="few", steps=9, status=130)
    assert out.index("No reward differed in 5 rounds") < out.index("No reward differed in 6 rounds")
    assert out.index("No reward differed in 6 rounds") < out.index("Stopped at step 6 of 9.")


def test_prompts_of_which_all_completions_got_the_same_reward_are_counted(run, left):
    """Those of all rounds since the last line."""
    out = run("grpo", "mixed", "--gradient_accumulation_steps", "2", "--logging_steps", "2", file="few", steps=4)
    told = [tuple(map(int, found)) for found in re.findall(r"  (\d+) of (\d+) prompts: all completions got", out)]
    shares = [entry["frac_reward_zero_std"] for entry in left("trainer_state")["log_history"] if "reward" in entry]
    assert [of for _, of in told] == [8] * len(told) and len(shares) == 2
    assert [alike for alike, _ in told] == [round(8 * share) for share in shares if share]
    assert "No reward differed" not in out or all(share == 1 for share in shares)


def test_a_difference_begins_the_count_anew():
    said = []
    trainer = type("Trainer", (), {"_metrics": {"train": {"frac_reward_zero_std": []}}, "remove_callback": print})()
    counted = progress.Progress.__new__(progress.Progress)
    counted.trainer, counted.seen, counted.alike, counted.advised = trainer, 0, 0, 0
    counted._advise = lambda: said.append(counted.alike) or setattr(counted, "advised", counted.alike)
    rounds = trainer._metrics["train"]["frac_reward_zero_std"]
    for share in (1, 1, 1, 1, 0.5, 1, 1, 1, 1, 1, 1):
        rounds.append(share)
        counted.count_rounds()
    assert said == [5]
