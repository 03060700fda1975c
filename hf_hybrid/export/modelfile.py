"""
A Modelfile for Ollama, beside a GGUF file.

Ollama does not read the chat template of a GGUF file. It compares the text with templates that it knows, and serves a
model with another one without any, in silence. So the template of the run is written in Ollama's own language, Go's.

A Jinja template is a program, and no other language has its like in general. But most of them write each message as
fixed text by role around its content: ChatML, Llama 3, Phi, Gemma. These texts are read off from rendered chats that
end in a question, as those do that are served, and what they make of further chats is compared with the template. A
template that does anything else is not written, and the Modelfile says so.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from jinja2 import TemplateError

MODELFILE_NAME = "Modelfile"
_WORDS = {"system": "alpha one", "user": "bravo two", "assistant": "charlie three"}


def modelfile(tokenizer: Any, gguf_name: str) -> str:
    """Return the text of a Modelfile, with the chat template of a tokenizer if it can be written in Go's language."""
    lines = [f"FROM ./{gguf_name}"]
    if not getattr(tokenizer, "chat_template", None):
        return lines[0] + "\n"
    if (template := _read_off(tokenizer)) is None:
        return "\n".join([*lines, "# " + NOT_WRITTEN, ""])
    lines += [f"# {said}" for word, said in NOT_THE_SAME.items() if word in tokenizer.chat_template]
    lines.append(f'TEMPLATE """{template.in_go()}"""')
    stops = dict.fromkeys([template.assistant[1].strip(), tokenizer.eos_token or ""])
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if stop and '"' not in stop]
    return "\n".join(lines) + "\n"


NOT_WRITTEN = "The chat template does more than Ollama's language can say here: write a TEMPLATE, or use llama-server."
NOT_THE_SAME = {
    "strftime_now": "The date in the template is that of the export.",
    "</think>": "Reasoning stays in earlier answers, where the chat template leaves it out.",
}
"""What is said of templates that have these words."""


class Template(NamedTuple):
    """The texts around messages by role, and what stands before an answer. A chat without a system message `starts`."""

    system: tuple[str, str]
    user: tuple[str, str]
    assistant: tuple[str, str]
    start: str
    generation: str
    joined: bool
    """The first question goes on in the turn of the system message."""

    def write(self, *roles: str) -> str:
        """Return the chat of [`_WORDS`]."""
        text = "" if roles[0] == "system" else self.start
        for place, role in enumerate(roles):
            before, after = getattr(self, role)
            goes_on = self.joined and roles[0] == "system" and place == 1
            text += before * (not goes_on) + _WORDS[role] + after
        return text + self.generation

    def in_go(self) -> str:
        """Return the same in Ollama's language."""
        start = f"{{{{ if not .System }}}}{self.start}{{{{ end }}}}" if self.start else ""
        branches = []
        for role in _WORDS:
            before, after = getattr(self, role)
            if role == "user" and self.joined:
                before = f"{{{{ if or (not $.System) (ne $i 1) }}}}{before}{{{{ end }}}}"
            branches.append(f'if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}')
        messages = "{{ else ".join(branches)
        return f"{start}{{{{ range $i, $_ := .Messages }}}}{{{{ {messages}{{{{ end }}}}{{{{ end }}}}{self.generation}"


def _read_off(tokenizer: Any) -> Template | None:
    """The texts of a chat template, or `None` if it does anything else."""

    def render(*roles: str, generate: bool = True) -> str:
        chat = [{"role": role, "content": _WORDS[role]} for role in roles]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=generate)
        return text.removeprefix(tokenizer.bos_token or "")  # which servers add

    def after(*roles: str, begins: str) -> str:
        """What stands behind the last message and begins another text too; some templates end a whole chat."""
        text = render(*roles, generate=False).rpartition(_WORDS[roles[-1]])[2]
        return text if begins.startswith(text) else text.removesuffix(tokenizer.eos_token or "")

    chat = ("system", "user", "assistant", "user")
    try:
        first, to_answer, again, end = _cut(render(*chat[1:]), *chat[1:])
        after_user, after_answer = after("user", begins=to_answer), after(*chat[1:3], begins=again)
        user = again.removeprefix(after_answer)
        system = (first, "\n\n"), True  # where the template takes none, as Ollama's for such models
        with contextlib.suppress(TemplateError):
            before, to_user, *_ = _cut(render(*chat), *chat)
            system = (before, to_user.removesuffix(user)), not to_user.endswith(user)
        found = Template(
            system=system[0],
            user=(user, after_user),
            assistant=(to_answer.removeprefix(after_user), after_answer),
            start=first.removesuffix(user),
            generation=end.removeprefix(after_user),
            joined=system[1],
        )
        chats: list[tuple[str, ...]] = [chat[1:], chat[1:2], (*chat[1:], *chat[2:])]
        with contextlib.suppress(TemplateError):
            render(*chat)
            chats += [chat, chat[:2], (*chat, *chat[2:])]
        agree = all(render(*of) == found.write(*of) for of in chats)
    except Exception:  # whatever a template does with chats that it is not for
        return None
    text = "".join([*found.system, *found.user, *found.assistant, found.start, found.generation])
    return found if agree and "{{" not in text and '"""' not in text else None


def _cut(text: str, *roles: str) -> list[str]:
    """Cut a text at the words of messages, one after the other."""
    cut = []
    for role in roles:
        before, word, text = text.partition(_WORDS[role])
        if not word:
            raise ValueError(f"no message of {role}")
        cut.append(before)
    return [*cut, text]
