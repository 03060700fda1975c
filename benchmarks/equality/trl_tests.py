"""
TRL's own tests of its trainers, with the package's in their place. Which tests does that lose?

    git clone https://github.com/huggingface/trl CHECKOUT          # as near to the installed version as there is
    python -m benchmarks.equality.trl_tests CHECKOUT               # GRPO, RLOO, DPO, SFT, reward, KTO; half an hour
    python -m benchmarks.equality.trl_tests CHECKOUT grpo rloo -k loss_type

The tests run twice: with TRL's trainers and with ours, which replace those in the module `trl` before a test module is
imported. TRL is the installed one: of the checkout only `tests/` is used, in a copy beside which there is no `trl`. For
reward models and KTO ours are TRL's with the mixin. No hub is asked: the tiny models and the data that the tests name
are made here, in a folder of the same name below the working directory, where `from_pretrained` and `load_dataset` look
first. The models have random weights and a tokenizer that was trained on this project's documents; chat templates are
those that TRL installs. Tests of models or data that are not made here fail in both runs alike.

Printed is how many tests pass in each run, and each test that passes with TRL's trainer and not with ours, with its
error. The exit status is 1 if a test is lost.

Each run is a process of pytest, to which this file is a plugin.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as Tree
from pathlib import Path
from typing import Any

ARM = "HYBRID_TRL_TESTS_ARM"
ARMS = ("TRL's", "ours")
NAMES = {"grpo": "GRPO", "rloo": "RLOO", "dpo": "DPO", "sft": "SFT", "reward": "Reward", "kto": "KTO"}
MIXED = ("Reward", "KTO")
"""Those without a trainer in the package: the mixin makes one of TRL's."""
TOP = Path(__file__).resolve().parents[2]
OWNER = "trl-internal-testing"


def pytest_configure(config) -> None:
    """Of the plugin: put the package's trainers in TRL's place."""
    import trl
    import trl.import_utils  # noqa: F401

    import hf_hybrid
    from hf_hybrid.trainer import HybridTrainerMixin

    def absent(name: str):
        """Tests of another version may ask for packages that the installed one does not know."""
        if name.startswith("is_") and name.endswith("_available"):
            return lambda: False
        raise AttributeError(name)

    def gone(name: str):
        """Tests of a helper of another version fail when they call it, and not the whole file with them."""
        if name.startswith("__"):
            raise AttributeError(name)

        def fails(*args, **kwargs):
            raise NotImplementedError(f"the installed TRL has no `{name}`")

        return fails

    vars(sys.modules["trl.import_utils"])["__getattr__"] = absent
    for trainer in NAMES:
        vars(importlib.import_module(f"trl.trainer.{trainer}_trainer"))["__getattr__"] = gone
    if os.environ.get(ARM) != "ours":
        return
    for name in NAMES.values():
        if name in MIXED:
            theirs = getattr(trl, f"{name}Trainer")
            setattr(trl, f"{name}Trainer", type(f"Hybrid{name}Trainer", (HybridTrainerMixin, theirs), {}))
            continue
        for kind in ("Trainer", "Config"):
            setattr(trl, f"{name}{kind}", getattr(hf_hybrid, f"Hybrid{name}{kind}"))


# Models and data.

MODELS: dict[str, tuple[str, str | None]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("qwen2", "qwen2_5"),
    "tiny-Qwen2ForSequenceClassification-2.5": ("qwen2", "qwen2_5"),
    "tiny-Qwen3ForCausalLM": ("qwen3", "qwen3"),
    "tiny-Qwen3ForSequenceClassification": ("qwen3", "qwen3"),
    "tiny-Qwen3MoeForCausalLM": ("qwen3_moe", "qwen3"),
    "tiny-LlamaForCausalLM-3.2": ("llama", "llama3_2"),
    "tiny-LlamaForSequenceClassification-3.2": ("llama", "llama3_2"),
    "tiny-MistralForCausalLM-0.2": ("mistral", None),
    "tiny-GPTNeoXForCausalLM": ("gpt_neox", None),
    "tiny-CohereForCausalLM": ("cohere", None),
}
"""Names, kind of model, and TRL's chat template."""
QWEN = {
    330: ' "', 450: "de", 497: '",', 522: "</", 606: "name", 788: '":', 894: " any", 927: "sh", 944: "'t", 411: "out",
    1318: "text", 1414: " know", 1513: " don", 2765: " won", 4913: '{"', 5212: ' {"', 5392: " tool", 6023: "hi",
    6659: "call", 7692: "async", 9520: "step", 11248: "}}\n", 13477: "crement", 14172: "tool", 16252: " increment",
    16370: "arguments", 17453: "Done", 22785: "_tool", 35744: "increment", 64648: "multiply", 93054: "_multiply",
    95642: '"}}\n', 293: " b", 314: " {", 397: ">\n", 151643: "<|endoftext|>", 151644: "<|im_start|>",
    151645: "<|im_end|>", 151657: "<tool_call>", 151658: "</tool_call>",
}  # fmt: skip
"""Words of Qwen 3 by their numbers, by which the tests of tools write calls. The first 256 are bytes."""
LONG = [
    "tool_response", "multiply_tool", " got an unexpected keyword argument", '{"type": "function", "function": ',
    '"parameters": {"type": "object", "properties": ', '"description": ',
    "You may call one or more functions to assist with the user query.\n\nYou are provided with function signatures",
    "For each function call, return a json object with function name and arguments", " XML tags:\n",
]  # fmt: skip
"""What prompts with tools have, as words of their own: bytes would be many, and each has logits of 151,000 words."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]


def of_qwen() -> Any:
    """Return a tokenizer that reads text by its bytes, and knows the words of Qwen 3 that the tests write."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    words = {letter: number for number, letter in enumerate(letters.values())}
    words |= {"".join(letters[byte] for byte in word.encode()): number for number, word in QWEN.items()}
    made = Tokenizer(models.BPE(words, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made.add_tokens(LONG)
    return made


def make_models(folder: Path) -> None:
    """Write tiny models with random weights, and their tokenizer."""
    import torch
    import trl
    from tokenizers import ByteLevelBPETokenizer
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    trained = ByteLevelBPETokenizer()
    texts = [path.read_text(encoding="utf-8") for path in sorted((TOP / "docs").glob("*.md"))]
    trained.train_from_iterator(texts, vocab_size=2000, special_tokens=SPECIAL)
    for name, (kind, template) in MODELS.items():
        of_tests, special = (of_qwen(), SPECIAL[:3]) if template == "qwen3" else (trained._tokenizer, SPECIAL)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=of_tests, eos_token="<|im_end|>", pad_token="<|endoftext|>",
            additional_special_tokens=special,
        )  # fmt: skip
        if template is not None:
            written = Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja"
            tokenizer.chat_template = written.read_text(encoding="utf-8")
        sizes: dict[str, Any] = {
            "vocab_size": max(tokenizer.get_vocab().values()) + 1, "hidden_size": 8, "intermediate_size": 32,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
        }  # fmt: skip
        if kind == "qwen3_moe":
            sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        if kind in ("qwen3", "qwen3_moe"):
            sizes["head_dim"] = 8
        torch.manual_seed(0)
        one = "SequenceClassification" in name
        made = AutoModelForSequenceClassification if one else AutoModelForCausalLM
        config = AutoConfig.for_model(kind, **sizes, **({"num_labels": 1} if one else {}))
        model = made.from_config(config)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


QUESTIONS = [
    "What opens a file", "What closes a file", "What sorts a list", "What joins two strings", "What counts letters",
    "What reads a line", "What writes a line", "What ends a loop", "What names a class", "What makes a set",
    "What maps a key", "What splits a word", "What rounds a number", "What adds numbers", "What skips a turn",
    "What waits a second", "What raises an error", "What catches an error", "What imports a module",
]  # fmt: skip
RIGHT = (
    "open close sort join count readline write break class set dict split round sum continue sleep raise except import"
)
WRONG = "A longer answer that is not right"


def rows_of(kind: str) -> list[dict[str, Any]]:
    """Return the rows of a configuration of the data."""

    def row(question: str, answer: str) -> dict[str, Any]:
        chat = kind.startswith("conversational")
        asked = [{"role": "user", "content": f"{question}?"}]
        good, bad = ([{"role": "assistant", "content": text}] for text in (answer, WRONG))
        prompt: Any = asked if chat else f"{question}?"
        chosen: Any = good if chat else f" {answer}."
        rejected: Any = bad if chat else f" {WRONG}."
        return {
            "language_modeling": {"messages": asked + good} if chat else {"text": f"{question}? {answer}."},
            "prompt_only": {"prompt": prompt},
            "prompt_completion": {"prompt": prompt, "completion": chosen},
            "preference": {"prompt": prompt, "chosen": chosen, "rejected": rejected},
            "implicit_prompt_preference": {"chosen": prompt + chosen, "rejected": prompt + rejected},
            "unpaired_preference": {"prompt": prompt, "completion": chosen, "label": len(answer) % 2 == 0},
        }[kind.split("_", 1)[1]]

    return [row(*pair) for pair in zip(QUESTIONS, RIGHT.split(), strict=True)]


KINDS = [f"{form}_{kind}" for form in ("standard", "conversational") for kind in (
    "language_modeling", "prompt_only", "prompt_completion", "preference", "implicit_prompt_preference",
    "unpaired_preference",
)]  # fmt: skip


def make_data(folder: Path) -> None:
    """Write the data set with a configuration for each kind of rows: 17 rows to train on, 2 to test."""
    head = ["configs:"]
    for kind in KINDS:
        rows = rows_of(kind)
        (folder / kind).mkdir(parents=True)
        head += [f"- config_name: {kind}", "  data_files:"]
        for split, part in (("train", rows[:17]), ("test", rows[17:])):
            text = "".join(f"{json.dumps(row)}\n" for row in part)
            (folder / kind / f"{split}.jsonl").write_text(text, encoding="utf-8")
            head += [f"  - split: {split}", f"    path: {kind}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join(["---", *head, "---", ""]), encoding="utf-8")


# The runs.


def outcomes(arm: str, files: list[str], more: list[str], work: Path) -> dict[str, str | None]:
    """Run tests of `work/tests`. Returns the error of each by its name, `None` if it passed; none of skipped tests."""
    report = work / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", __spec__.name, "-p", "no:cacheprovider"]
    command += ["--rootdir", str(work), f"--junitxml={report}", *(str(work / "tests" / name) for name in files)]
    places = [str(TOP), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, ARM: arm, "PYTHONPATH": os.pathsep.join(filter(None, places)), "HF_HUB_OFFLINE": "1"}
    environment["HF_HOME"] = str(work / "hf")
    done = subprocess.run([*command, *more], cwd=work, env=environment, capture_output=True, text=True)
    if not report.is_file():
        raise SystemExit(f"pytest did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = {}
    for case in Tree.parse(report).iter("testcase"):
        wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
        if case.find("skipped") is None:
            name = f"{case.get('classname', '').split('.')[-1]}.{case.get('name')}"
            found[name] = None if wrong is None else (wrong.get("message") or "").strip().split("\n")[0]
    report.unlink()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of TRL's sources, with tests/")
    parser.add_argument("trainer", nargs="*", help=f"of {', '.join(NAMES)}; default: all")
    args, more = parser.parse_known_args()
    checkout, names = args.checkout.resolve(), args.trainer or list(NAMES)
    files = [f"test_{name}_trainer.py" for name in names]
    if unknown := set(names) - set(NAMES):
        parser.error(f"`{min(unknown)}` is none of {', '.join(NAMES)}")
    if missing := [name for name in files if not (checkout / "tests" / name).is_file()]:
        parser.error(f"`{checkout}` has no tests/{missing[0]}")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        shutil.copytree(checkout / "tests", work / "tests")
        make_models(work / OWNER)
        make_data(work / OWNER / "zen")
        found = {arm: outcomes(arm, files, more, work) for arm in ARMS}
    passed = {arm: {name for name, error in of.items() if error is None} for arm, of in found.items()}
    for arm, of in passed.items():
        print(f"{arm}: {len(of)} of {len(found[arm])} pass", flush=True)
    for name in sorted(passed["TRL's"] - passed["ours"]):
        print(f"lost: {name}: {found['ours'].get(name, 'not run')}")
    return int(bool(passed["TRL's"] - passed["ours"]))


if __name__ == "__main__":
    sys.exit(main())
