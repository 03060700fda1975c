"""
A Modelfile for Ollama, beside a GGUF file.

Ollama does not read the chat template of a GGUF file. It compares the text with templates that it knows, and serves a
model with another one without any, in silence. So the template of the run is written in Ollama's own language, Go's.

A Jinja template is a program, and no other language has its like in general. But most of them write each message as
fixed text by role around its content: ChatML, Llama 3, Phi, Zephyr. These texts are read off from rendered chats, and
what they make of further chats is compared with the template. A template that does anything else is not written, and
the Modelfile says so.
"""

from __future__ import annotations

from typing import Any

MODELFILE_NAME = "Modelfile"
_WORDS = {"system": "alpha one", "user": "bravo two", "assistant": "charlie three"}


def modelfile(tokenizer: Any, gguf_name: str) -> str:
    """Return the text of a Modelfile, with the chat template of a tokenizer if it can be written in Go's language."""
    lines = [f"FROM ./{gguf_name}"]
    if not getattr(tokenizer, "chat_template", None):
        return lines[0] + "\n"
    if (found := _read_off(tokenizer)) is None:
        return "\n".join([*lines, "# " + NOT_WRITTEN, ""])
    parts, generation, default = found
    branches = [
        f'if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}' for role, (before, after) in parts.items()
    ]
    messages = "{{ else ".join(branches)
    lines.append(f'TEMPLATE """{{{{- range .Messages }}}}{{{{ {messages}{{{{ end }}}}{{{{ end }}}}{generation}"""')
    if default:
        lines.append(f'SYSTEM """{default}"""')
    stops = dict.fromkeys([parts["assistant"][1].strip(), tokenizer.eos_token or ""])
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if stop and '"' not in stop]
    return "\n".join(lines) + "\n"


NOT_WRITTEN = "The chat template does more than Ollama's language can say here: write a TEMPLATE, or use llama-server."


def _read_off(tokenizer: Any) -> tuple[dict[str, tuple[str, str]], str, str] | None:
    """The texts around a message of each role, that before an answer, and the system message that is the default."""

    def render(*roles: str, generate: bool = False) -> str:
        chat = [{"role": role, "content": _WORDS[role]} for role in roles]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=generate)
        return text.removeprefix(tokenizer.bos_token or "")  # which servers add

    def write(*roles: str, generate: bool = False) -> str:
        return "".join(_WORDS[role].join(parts[role]) for role in roles) + generation * generate

    try:
        chat = ("system", "user", "assistant", "user")
        before, rest = render(*chat).split(_WORDS["system"])
        to_user, to_answer, again, after_user = _cut(rest, *chat[1:])
        after_answer = render(*chat[:3]).rpartition(_WORDS["assistant"])[2]
        before_user = again.removeprefix(after_answer)
        generation = render(*chat, generate=True).removeprefix(render(*chat))
        parts = {
            "system": (before, to_user.removesuffix(before_user)),
            "user": (before_user, after_user),
            "assistant": (to_answer.removeprefix(after_user), after_answer),
        }
        start, _, end = render("user", generate=True).rpartition(write("user", generate=True))
        default = start.removeprefix(before).removesuffix(parts["system"][1]) if start else ""
    except Exception:  # whatever a template does with chats that it is not for
        return None
    chats = [chat, chat[:2], (*chat, *chat[2:]), (*chat, "assistant")]
    agree = all(render(*of, generate=g) == write(*of, generate=g) for of in chats for g in (False, True))
    agree = agree and start == (default.join(parts["system"]) if default else "") and not end
    text = "".join([*(part for pair in parts.values() for part in pair), generation, default])
    return (parts, generation, default) if agree and "{{" not in text and '"""' not in text else None


def _cut(text: str, *roles: str) -> list[str]:
    """Cut a text at the words of messages, one after the other."""
    cut = []
    for role in roles:
        before, word, text = text.partition(_WORDS[role])
        if not word:
            raise ValueError(f"no message of {role}")
        cut.append(before)
    return [*cut, text]
