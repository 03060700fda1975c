"""
`hf-hybrid convert`: a YAML file of Axolotl, LLaMA-Factory, the alignment handbook or TRL's scripts, with our names.

`other_tools.yaml` says what each of their names is here. Values that need more than a table are read by functions of
[`Conversion`].
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from hf_hybrid.cli.console import quiet_imports, write_out
from hf_hybrid.cli.loading import named_template
from hf_hybrid.cli.options import ALIASES, TRAINING, CommandLine, read_file
from hf_hybrid.cli.other_tools import Entry, table
from hf_hybrid.cli.yaml_file import ENVIRONMENT, split_private

METHODS = {"pt": "train", "rm": "reward", "ipo": "dpo"} | {
    name: name for name in ("sft", "dpo", "kto", "grpo", "reward")
}
"""By what other tools call them: commands."""
OF_PARTS = {"name": "dataset_config", "config": "dataset_config", "split": "dataset_split"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = (
        "Write a YAML file of Axolotl, LLaMA-Factory, the alignment handbook or TRL's scripts as one for --config. "
        "Comments name what is left out, and why: hf-hybrid convert axolotl.yml > run.yaml"
    )
    parser.add_argument("file", help="YAML file of another tool")


def run(args: argparse.Namespace) -> int:
    """Write the converted file to stdout. Returns 0."""
    with quiet_imports():
        write_out(Conversion(read_file(args.file)).as_yaml(args.file))
    return 0


class Conversion:
    """A file of another tool as `options` of a `command`, and `left`: what is left out, with the reason."""

    def __init__(self, values: dict[str, Any]):
        self.values = {key.replace("-", "_"): value for key, value in values.items()}
        self.options: dict[str, Any] = {}
        self.left: list[tuple[str, str]] = []
        self.command = self._command()
        self.known = vars(CommandLine([], TRAINING[self.command]).values)
        for key, value in self.values.items():
            self._convert(key, value)

    def as_yaml(self, source: str) -> str:
        """Return the text of the file."""
        import yaml

        shown, private = split_private(self.options)
        shown |= {name: held for name, held in self.options.items() if name == ENVIRONMENT}
        text = f"# From {Path(source).name}. To train: hf-hybrid {self.command} --config THIS_FILE\n"
        text += yaml.safe_dump({"command": self.command, **shown}, sort_keys=False)
        empty = ", ".join(key for key, reason in self.left if not reason)
        left = [entry for entry in (*self.left, ("empty", empty)) if entry[1]]
        left += [(key, "it may be secret") for key in private]
        return text + "".join(["# Left out:\n" * bool(left), *(f"#   {key}: {reason}\n" for key, reason in left)])

    def _command(self) -> str:
        method = self.values.get("rl") or self.values.get("stage")
        if method == "ipo":
            self.options["loss_type"] = ["ipo"]
        if method not in (None, *METHODS):
            self.left.append((str(method), "no command trains so; the file is for `hf-hybrid sft`"))
        if method is None and "reward_funcs" in self.values:
            return "grpo"
        if method is None and {"beta", "max_prompt_length"} & self.values.keys():  # of TRL's scripts and the handbook
            return "dpo"
        return "train" if self.values.get("pretraining_dataset") else METHODS.get(str(method), "sft")

    def _convert(self, key: str, value: Any) -> None:
        entry = table().get(key, Entry((ALIASES.get(key, key),)))
        own, reason = entry.own(self.known), entry.reason
        if value in (None, "", [], {}):
            self.left.append((key, ""))
        elif own is None:
            reason = reason or f"no option of `hf-hybrid {self.command}`"
        elif own.startswith("columns "):
            self.options.setdefault("columns", []).append(own.removeprefix("columns ").replace("NAME", str(value)))
        elif entry.function:
            reason = getattr(self, f"_{entry.function}")(key, value, own)
        else:
            value = entry.values.get(str(value).lower(), entry.values.get("*", value))
            reason = value[2:] if isinstance(value, str) and value.startswith("- ") else ""
            if not reason:
                self.options.setdefault(own, value)
        if reason:
            self.left.append((key, reason))

    # Functions that the table names: each takes up a value, and returns why it leaves something out.

    def _names(self, key: str, value: Any, own: str) -> str:
        text = value if isinstance(value, str) else ",".join(value)
        names = (
            [name.strip() for name in text.split(",")] if re.fullmatch(r"[\w., /-]+", text) else [value]
        )  # a pattern
        if own == "lora_target_modules" and names in (["all"], ["all-linear"]):
            return "all linear layers but the head get adapters by default"
        self.options[own] = names
        listed = [name for name in names if own != "lora_target_modules" and "/" not in name and "." not in name]
        return f"{', '.join(listed)}: write the files that dataset_info.json names" if listed else ""

    def _datasets(self, key: str, value: Any, own: str) -> str:
        names, unread = [], set[str]()
        for part in value if isinstance(value, list) else [value]:
            part = dict(part) if isinstance(part, dict) else {"path": part}
            files = part.pop("data_files", None) or part.get("path") or part.get("id")
            names += files if isinstance(files, list) else [str(files)]
            found = {"messages": part.pop("field_messages", None), "text": part.pop("field", None)}
            if columns := [f"{new}={old}" for new, old in found.items() if old not in (None, new, "conversations")]:
                self.options["columns"] = columns
            for theirs in OF_PARTS.keys() & part.keys():
                self.options.setdefault(OF_PARTS[theirs], part[theirs])
            unread |= part.keys() - {"path", "id", "ds_type", "weight", *OF_PARTS}
        self.options[own] = list(dict.fromkeys(names))
        return f"{', '.join(sorted(unread))}: rows are recognised by their columns" if unread else ""

    def _pretraining(self, key: str, value: Any, own: str) -> str:
        self.options["streaming"] = True
        return self._datasets(key, value, own)

    def _mixture(self, key: str, value: Any, own: str) -> str:
        parts = value.get("datasets") or [{"id": name, "weight": weight} for name, weight in value.items()]
        if all("weight" in part for part in parts):
            self.options["dataset_weights"] = [part["weight"] for part in parts]
        return self._datasets(key, parts, own)

    def _per_epoch(self, key: str, value: Any, own: str) -> str:
        strategy = own.replace("_steps", "_strategy")
        if own == "eval_steps" and not (self.values.get("val_set_size") or self.values.get("test_datasets")):
            return "nothing is held out"
        epochs = self.values.get("num_epochs") or 1
        by_steps = {strategy: "steps", own: round(1 / (max(value, 1) * epochs), 6)}  # a share of the run
        self.options |= by_steps if value > 1 else {strategy: "epoch" if value else "no"}
        return ""

    def _nested(self, key: str, value: Any, own: str) -> str:
        for inner, held in value.items():
            self._convert(inner, held)
        return ""

    def _template(self, key: str, value: Any, own: str) -> str:
        if not (value == "plain" or "{" in str(value) or "/" in str(value) or named_template(str(value))):
            return "the template of the tokenizer is used; chat_template_path takes a file, a model or a name of TRL's"
        self.options[own] = value
        return ""

    def _tokens(self, key: str, value: Any, own: str) -> str:
        if isinstance(value, dict):  # as older files have it
            return self._special_tokens(key, value, "eos_token")
        tokens = [token.strip() for token in value.split(",")] if isinstance(value, str) else value
        self.options[own] = list(dict.fromkeys([*self.options.get(own, ()), *tokens]))
        return ""

    def _special_tokens(self, key: str, value: Any, own: str) -> str:
        more = [*(value.get("additional_special_tokens") or ())]
        if end := value.get("eos_token"):
            self.options[own] = end
            more.append(end)
        if more:
            self._tokens(key, more, "add_tokens")  # which adds none that is there
        others = ", ".join(value.keys() - {"eos_token", "additional_special_tokens"})
        return f"{others}: as the tokenizer has it" if others else ""

    def _wandb(self, key: str, value: Any, own: str) -> str:
        self.options.setdefault(own, "wandb")
        self.options.setdefault(ENVIRONMENT, {})[key.upper()] = str(value)
        return ""
