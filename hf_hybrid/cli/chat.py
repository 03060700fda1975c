"""
`hf-hybrid chat`: talk to the model of a run, a checkpoint, adapters or an export in the terminal.

On a terminal every line is a message, and the answer appears as it is generated. From a pipe every line is a message
too, and only answers are written, so that a script can use it: `echo "2 + 2?" | hf-hybrid chat out`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hf_hybrid.cli import screen
from hf_hybrid.cli.options import OptionError

PROGRAM = "hf-hybrid chat"
HELP = "/reset forgets the conversation, /system TEXT sets a system message, /exit or Ctrl-D ends."


def add_parser(subparsers, summary: str) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "chat",
        help=summary,
        description=(
            "Talk to a model with its chat template: the output folder of a run, a checkpoint, adapters, an export, or "
            f"an id on the Hub. {HELP} From a pipe, every line is a message and only the answers are written."
        ),
    )

    def add(name: str, **options) -> None:
        names = dict.fromkeys((name, name.replace("_", "-")))
        parser.add_argument(*names, **options)

    add("model", help="output folder of a run, folder of a model or of adapters, a .gguf export, or an id on the Hub")
    add("--max_new_tokens", type=int, default=512, help="tokens of an answer at most (default: 512)")
    text = "0: always the likeliest token; default: as the model's generation config says"
    add("--temperature", type=float, help=text)
    add("--top_p", type=float, help="sample among the likeliest tokens of this probability (default: as the model)")
    add("--system", help="system message")
    add("--seed", type=int, default=0, help="of the sampling (default: 0)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="of the weights")
    add("--cpu", action="store_true", help="compute on the CPU")
    add("--trust_remote_code", action="store_true", help="run the code that a model on the Hub brings with it")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Chat. Returns 0; 2 after a message if the model or an option cannot be used; 130 after Ctrl-C."""
    try:
        check(args)
        with screen.speaking():
            return _talk(args)
    except (OptionError, ImportError) as error:
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
        return 2


def _talk(args: argparse.Namespace) -> int:
    with screen.quiet_imports():
        model, tokenizer = load(args)
    chat = Chat(model, tokenizer, args)
    interactive = sys.stdin.isatty()
    if interactive:
        screen.say(f"{args.model}. {HELP}")
    try:
        for line in _lines(interactive):
            if line in ("/exit", "/quit"):
                break
            chat.take(line, sys.stdout.write)
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return 130
    return 0


def check(args: argparse.Namespace) -> None:
    """Refuse wrong numbers and folders without a model, before torch is imported. Raises [`OptionError`]."""
    for name, wrong, range_ in (
        ("max_new_tokens", args.max_new_tokens < 1, "at least 1"),
        ("temperature", args.temperature is not None and not 0 <= args.temperature < 100, "between 0 and 100"),
        ("top_p", args.top_p is not None and not 0 < args.top_p <= 1, "greater than 0 and at most 1"),
    ):
        if wrong:
            raise OptionError(f"`--{name}` must be {range_}, got {getattr(args, name)}.")
    path = Path(args.model).expanduser()
    if path.is_dir():
        kinds = ("config.json", "adapter_config.json")
        if not any((path / name).is_file() for name in kinds) and not any(path.glob("*.gguf")):
            from hf_hybrid.saving.manifest import last_checkpoint

            last = last_checkpoint(path)
            hint = f" Its last checkpoint is `{last}`." if last else ""
            raise OptionError(f"`{args.model}` holds no model: neither {' nor '.join(kinds)} nor a .gguf file.{hint}")
    elif not path.exists() and (args.model.startswith((".", "/", "~")) or args.model.count("/") > 1):
        raise OptionError(f"`{args.model}`: there is no such folder.")


def _lines(interactive: bool) -> Iterator[str]:
    while True:
        if interactive:
            try:
                line = input("> ")
            except EOFError:
                sys.stdout.write("\n")
                return
        else:
            line = sys.stdin.readline()
            if not line:
                return
        if line.strip():
            yield line.strip()


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """
    Return model and tokenizer, ready to generate.

    Raises:
        OptionError: If they cannot be loaded, or the tokenizer has no chat template.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_hybrid.export.gguf import quiet_reading

    path = Path(args.model).expanduser()
    name, given = str(path) if path.exists() else args.model, {"trust_remote_code": args.trust_remote_code}
    files = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").is_file() else []
    if path.is_file() and path.suffix == ".gguf":
        files, name = [path], str(path.parent)
    if files:
        given["gguf_file"] = files[0].name
    own_tokenizer = (Path(name) / "tokenizer_config.json").is_file()  # a GGUF file has one without its chat template
    device = None if args.cpu else torch.accelerator.current_accelerator(check_available=True)
    adapters = (path / "adapter_config.json").is_file()
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            name, **{key: value for key, value in given.items() if key != "gguf_file" or not own_tokenizer}
        )
        if adapters:
            from peft import AutoPeftModelForCausalLM

            model: Any = AutoPeftModelForCausalLM.from_pretrained(name, dtype=args.dtype, **given)
        else:
            with quiet_reading():
                model = AutoModelForCausalLM.from_pretrained(name, dtype=args.dtype, **given)
    except ImportError:
        raise
    except Exception as error:  # whatever a broken file leads to
        while error.__cause__ is not None:
            error = error.__cause__
        raise OptionError(f"`{args.model}` cannot be loaded: {' '.join(str(error).split())}") from error
    if not tokenizer.chat_template:
        raise OptionError(
            f"The tokenizer of `{args.model}` has no chat template, so the model was not made for chats. Train it with "
            "`hf-hybrid sft`, or save a template beside it as `chat_template.jinja`."
        )
    model.eval()
    if device is not None and getattr(model, "hf_device_map", None) is None:
        model.to(device)
    torch.manual_seed(args.seed)
    return model, tokenizer


class Chat:
    """
    A conversation.

    Args:
        model, tokenizer: Of the assistant.
        args (`Namespace`): With `system`, `max_new_tokens`, `temperature` and `top_p`.

    Attributes:
        messages (`list[dict]`): What was said.
    """

    def __init__(self, model: Any, tokenizer: Any, args: argparse.Namespace):
        self.model, self.tokenizer, self.args, self.system = model, tokenizer, args, args.system
        self.messages: list[dict[str, str]] = []

    def take(self, line: str, write: Callable[[str], Any]) -> None:
        """Do what a line asks for, and write the answer as it is generated."""
        word, _, rest = line.partition(" ")
        if word == "/reset":
            self.messages = []
        elif word == "/system":
            self.messages, self.system = [], rest.strip() or None
        elif word.startswith("/") and word[1:].isalpha():
            write(f"{HELP}\n")
        else:
            self.messages.append({"role": "user", "content": line})
            self.messages.append({"role": "assistant", "content": self._answer(write)})

    def _answer(self, write: Callable[[str], Any]) -> str:
        import torch
        from transformers import TextStreamer

        class Stream(TextStreamer):
            text = ""

            def on_finalized_text(self, text: str, stream_end: bool = False):
                self.text += text
                write(text + ("\n" if stream_end else ""))
                sys.stdout.flush()

        system = [{"role": "system", "content": self.system}] if self.system else []
        try:
            inputs = self.tokenizer.apply_chat_template(
                system + self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            ).to(self.model.device)
        except Exception as error:  # whatever a template does with a conversation that it was not made for
            self.messages.pop()
            raise OptionError(f"The chat template cannot format the conversation: {error}") from error
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        room = None if longest is None else longest - inputs["input_ids"].shape[1]
        if room is not None and room < 1:
            self.messages.pop()
            raise OptionError(f"The conversation fills the {longest:,} positions of the model. /reset forgets it.")
        stream = Stream(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        limit = self.args.max_new_tokens if room is None else min(self.args.max_new_tokens, room)
        with torch.inference_mode():
            self.model.generate(**inputs, streamer=stream, max_new_tokens=limit, **self._sampling())
        return stream.text.strip()

    def _sampling(self) -> dict[str, Any]:
        temperature, top_p = self.args.temperature, self.args.top_p
        given: dict[str, Any] = {"pad_token_id": self.tokenizer.pad_token_id or self.tokenizer.eos_token_id}
        ends = self.model.generation_config.eos_token_id
        if self.tokenizer.eos_token_id is not None:  # what the template ends an answer with
            known = ends if isinstance(ends, list) else [ends] if ends is not None else []
            given["eos_token_id"] = sorted({*known, self.tokenizer.eos_token_id})
        if temperature == 0:
            return {**given, "do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if temperature is not None or top_p is not None:
            given |= {"do_sample": True, **({} if temperature is None else {"temperature": temperature})}
            given |= {} if top_p is None else {"top_p": top_p}
        return given
