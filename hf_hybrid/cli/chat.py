"""`hf-hybrid chat`: talk to the model of a run, a checkpoint, adapters or an export in the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_hybrid.arguments import check_range
from hf_hybrid.cli import console
from hf_hybrid.cli.options import OptionError

HELP = (
    "/reset forgets the conversation, /system TEXT sets a system message, /image FILE shows the next question an image "
    "(if the model sees), /exit or Ctrl-D ends."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = (
        "Talk to a model with its chat template: the output folder of a run, a checkpoint, adapters, an export, or an "
        f"id on the Hub. {HELP}"
    )
    add = parser.add_argument
    add("model", help="output folder of a run, folder of a model or of adapters, a .gguf export, or an id on the Hub")
    add("--max_new_tokens", type=int, default=512, help="tokens of an answer at most (default: 512)")
    add("--temperature", type=float, help="0: always the likeliest token (default: as the model's generation config)")
    add("--top_p", type=float, help="sample among the likeliest tokens of this probability (default: as the model)")
    add("--system", help="system message")
    add("--seed", type=int, default=0, help="of the sampling (default: 0)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="of the weights")
    add("--cpu", action="store_true", help="compute on the CPU")
    add("--trust_remote_code", action="store_true", help="run the code that a model on the Hub brings with it")


def run(args: argparse.Namespace) -> int:
    """Chat. Returns 0; 130 after Ctrl-C."""
    _check(args)
    try:
        with console.speaking():
            with console.quiet_imports():
                model, tokenizer = load(args)
            console.print_line(f"{args.model}. {HELP}")
            _talk(model, tokenizer, args)
    except (EOFError, KeyboardInterrupt) as end:
        console.write_out("\n")
        return 0 if isinstance(end, EOFError) else 130
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse wrong numbers and folders without a model, before torch is imported."""
    check_range("--max_new_tokens", args.max_new_tokens, {"at_least": 1})
    check_range("--temperature", args.temperature, {"at_least": 0, "at_most": 100})
    check_range("--top_p", args.top_p, {"above": 0, "at_most": 1})
    path, kinds = Path(args.model).expanduser(), ("config.json", "adapter_config.json", "*.gguf")
    if path.is_dir() and not any(any(path.glob(kind)) for kind in kinds):
        from hf_hybrid.saving.manifest import last_checkpoint

        last = last_checkpoint(path)
        hint = f" Its last checkpoint is `{last}`." if last else ""
        raise OptionError(f"`{args.model}` holds no model: none of {', '.join(kinds)}.{hint}")
    if not path.exists() and args.model.startswith((".", "/", "~")):
        raise OptionError(f"`{args.model}`: there is no such folder.")


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return model and tokenizer, or processor if it sees, ready to generate. Raises [`OptionError`]."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

    path = Path(args.model).expanduser()
    folder = path.parent if path.suffix == ".gguf" else path
    files = [] if (path / "config.json").is_file() else list(folder.glob("*.gguf" if folder == path else path.name))
    name = str(folder) if folder.exists() else args.model
    options: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    weights = {**options, "gguf_file": files[0].name} if files else options
    # A GGUF file has a tokenizer too, but not its chat template.
    of_tokenizer = options if (folder / "tokenizer_config.json").is_file() else weights
    sees = any((folder / file).is_file() for file in ("processor_config.json", "preprocessor_config.json"))
    loader: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    reader: Any = AutoProcessor if sees else AutoTokenizer
    try:
        if (path / "adapter_config.json").is_file() and not sees:
            from peft import AutoPeftModelForCausalLM as loader
        tokenizer: Any = reader.from_pretrained(name, **of_tokenizer)
        model: Any = loader.from_pretrained(name, dtype=args.dtype, **weights)
    except Exception as error:  # whatever a broken file leads to
        reason = " ".join(str(error.__cause__ or error).split())
        raise OptionError(f"`{args.model}` cannot be loaded: {reason}") from error
    if not tokenizer.chat_template:
        raise OptionError(
            f"The tokenizer of `{args.model}` has no chat template, so the model was not made for chats. Train it with "
            "`hf-hybrid sft`, or save a template beside it as `chat_template.jinja`."
        )
    device = None if args.cpu else torch.accelerator.current_accelerator(check_available=True)
    if device is not None and getattr(model, "hf_device_map", None) is None:
        model.to(device)
    torch.manual_seed(args.seed)
    return model.eval(), tokenizer


def _talk(model: Any, tokenizer: Any, args: argparse.Namespace) -> None:
    """Answer each line, until one asks for the end."""
    sees, images = hasattr(tokenizer, "image_processor"), []
    says = lambda role, text, shown=(): {  # noqa: E731
        "role": role, "content": [*shown, {"type": "text", "text": text}] if sees else text,
    }  # fmt: skip
    system, messages = args.system, []
    while (line := input("> ").strip()) not in ("/exit", "/quit"):
        word, _, rest = line.partition(" ")
        if word in ("/reset", "/system"):
            system, messages, images = rest.strip() if word == "/system" else system, [], []
        elif word == "/image" and sees and Path(rest.strip()).expanduser().is_file():
            images.append({"type": "image", "path": str(Path(rest.strip()).expanduser())})
        elif word == "/image":
            console.print_line(f"There is no file `{rest.strip()}`." if sees else "The model does not see.")
        elif word.startswith("/") and word[1:].isalpha():
            console.print_line(HELP)
        elif line:
            messages.append(says("user", line, images))
            first, images = [says("system", system)] if system else [], []
            answer = _answer(model, tokenizer, first + messages, args)
            messages.append(says("assistant", answer))


def _answer(model: Any, tokenizer: Any, messages: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Write the answer to a conversation as it is generated, and return it."""
    import torch
    from jinja2 import TemplateError
    from transformers import TextStreamer

    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True, "tokenize": True}
    try:
        inputs = tokenizer.apply_chat_template(messages, **options).to(model.device)
    except TemplateError as error:  # some templates take no system message
        raise OptionError(f"The chat template cannot format the conversation: {error}") from error
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    length = inputs["input_ids"].shape[1]
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limit = min(args.max_new_tokens, positions - length) if positions else args.max_new_tokens
    if limit < 1:
        raise OptionError(f"The conversation fills the {positions:,} positions of the model.")

    class Visible(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            super().on_finalized_text(console.visible(text), stream_end)

    stream = Visible(tokenizer, skip_prompt=True, skip_special_tokens=True)
    # The tokenizer's end of text ends an answer too: templates end it so.
    own_end, ends = tokenizer.eos_token_id, model.generation_config.eos_token_id
    known = {own_end, *(ends if isinstance(ends, list) else [ends])} - {None}
    ending = {"pad_token_id": tokenizer.pad_token_id or own_end, "eos_token_id": sorted(known) or None}
    asked = {name: getattr(args, name) for name in ("temperature", "top_p") if getattr(args, name) is not None}
    if asked:
        asked = {"do_sample": False} if args.temperature == 0 else {"do_sample": True, **asked}
    with torch.inference_mode():
        tokens = model.generate(**inputs, streamer=stream, max_new_tokens=limit, **ending, **asked)
    return tokenizer.decode(tokens[0, length:], skip_special_tokens=True).strip()
