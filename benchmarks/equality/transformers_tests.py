"""
transformers' own trainer tests, with HybridTrainer in Trainer's place. Which tests does that lose?

    git clone --branch v5.23.0 https://github.com/huggingface/transformers CHECKOUT   # the installed version
    python -m benchmarks.equality.transformers_tests CHECKOUT                           # three runs of all tests
    python -m benchmarks.equality.transformers_tests CHECKOUT -k hyperparameter         # of some of them

The tests run three times: with plain `Trainer`, with `HybridTrainer` and `enable_predict=False`, and with the default
options. `HybridTrainer` and `HybridConfig` replace `transformers.Trainer` and `transformers.TrainingArguments` before a
test module is imported; nothing else is changed. Tests of data collators, which use no trainer, and of several
processes are left out. Install Optuna for the tests of searches. Tests that need a hub or a GPU fail or are skipped in
each run alike.

Printed is how many tests pass in each run, and each test that passes with plain `Trainer` and not with `HybridTrainer`,
with its error. The exit status is 1 if `enable_predict=False` loses a test.

Each run is a process of pytest, to which this file is a plugin.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as Tree
from pathlib import Path

ARM = "HYBRID_TRANSFORMERS_TESTS_ARM"
ARMS = ("plain", "enable_predict=False", "default")
LEFT_OUT = ("distributed", "test_data_collator.py", "test_trainer_tpu.py")
TOP = Path(__file__).resolve().parents[2]


def pytest_configure(config) -> None:
    """Of the plugin: put HybridTrainer in Trainer's place."""
    arm = os.environ.get(ARM, "plain")
    if arm == "plain":
        return
    import transformers  # noqa: F401

    from hf_hybrid import HybridConfig, HybridTrainer

    @dataclasses.dataclass
    class WithoutLeaps(HybridConfig):
        enable_predict: bool = False

    WithoutLeaps.__qualname__ = "WithoutLeaps"  # a run writes its arguments with pickle, which looks for them here
    globals()["WithoutLeaps"] = WithoutLeaps
    package = sys.modules["transformers"]  # while it is imported, it puts another object in its own place
    package.Trainer = HybridTrainer
    package.TrainingArguments = HybridConfig if arm == "default" else WithoutLeaps


def outcomes(checkout: Path, arm: str, more: list[str]) -> dict[str, str | None]:
    """Run the tests. Returns the error of each by its name; `None` if it passed. Skipped tests are left out."""
    folder = checkout / "tests" / "trainer"
    with tempfile.TemporaryDirectory() as work:
        report = Path(work, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", __spec__.name, f"--junitxml={report}", str(folder)]
        command += [f"--ignore={folder / name}" for name in LEFT_OUT]
        places = [str(TOP), str(checkout), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, ARM: arm, "PYTHONPATH": os.pathsep.join(filter(None, places))}
        done = subprocess.run([*command, *more], cwd=work, env=environment, capture_output=True, text=True)
        if not report.is_file():
            raise SystemExit(f"pytest did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        cases = list(Tree.parse(report).iter("testcase"))
    found = {}
    for case in cases:
        wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
        if case.find("skipped") is None:
            name = f"{case.get('classname', '').split('.trainer.')[-1]}.{case.get('name')}"
            found[name] = None if wrong is None else (wrong.get("message") or "").strip().split("\n")[0]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of transformers' sources, with tests/trainer")
    args, more = parser.parse_known_args()
    checkout = args.checkout.resolve()
    if not (checkout / "tests" / "trainer").is_dir():
        parser.error(f"`{checkout}` has no folder tests/trainer")
    found = {arm: outcomes(checkout, arm, more) for arm in ARMS}
    passed = {arm: {name for name, error in of.items() if error is None} for arm, of in found.items()}
    for arm, names in passed.items():
        print(f"{arm}: {len(names)} of {len(found[arm])} pass", flush=True)
    for arm in ARMS[1:]:
        for name in sorted(passed["plain"] - passed[arm]):
            print(f"lost with {arm}: {name}: {found[arm].get(name, 'not run')}")
    return int(bool(passed["plain"] - passed["enable_predict=False"]))


if __name__ == "__main__":
    sys.exit(main())
