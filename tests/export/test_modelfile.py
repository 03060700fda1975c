"""The Modelfile beside a GGUF file: the chat template of the run, as Ollama writes it, or a word that it is not."""

import re

import pytest
from rig.byte_llama import byte_tokenizer, chat_tokenizer

from hf_hybrid.cli.loading import named_template
from hf_hybrid.export.modelfile import NOT_WRITTEN, modelfile

TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + ASKS
DEFAULT = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
LLAMA_3 = (
    "{% for m in messages %}{{ bos_token if loop.first else '' }}<|start_header_id|>{{ m['role'] }}<|end_header_id|>"
    "\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant"
    "<|end_header_id|>\n\n{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>\n{{ m['content'] }}{{ eos_token }}\n"
    "{% elif m['role'] == 'system' %}<|system|>\n{{ m['content'] }}{{ eos_token }}\n{% else %}<|assistant|>\n"
    "{{ m['content'] }}{{ eos_token }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'system' %}{{ raise_exception('no system') }}{% else %} {{ m['content'] }}"
    "{% endif %}{% endfor %}"
)
FORGETS = CHATML.replace("m['content']", "(m['content'] if loop.last else '...')")


def served(text, chat):
    """What Ollama makes of a chat by the Modelfile: a range over messages, and a branch for each role."""
    template = re.search(r'TEMPLATE """(.*?)"""', text, re.S)[1]
    form = r"(?:{{ if not \.System }}(.*?){{ end }})?{{ range \$i, \$_ := \.Messages }}(.*){{ end }}{{ end }}(.*)"
    start, body, generation = re.fullmatch(form, template, re.S).groups()
    branches = re.findall(r'if eq \.Role "(\w+)" }}(.*?){{ \.Content }}(.*?)(?={{ else |\Z)', body, re.S)
    parts, has_system = {role: (before, after) for role, before, after in branches}, chat[0]["role"] == "system"
    made = "" if has_system else start or ""
    for place, message in enumerate(chat):
        before, after = parts[message["role"]]
        if joined := re.fullmatch(r"{{ if or \(not \$\.System\) \(ne \$i 1\) }}(.*){{ end }}", before, re.S):
            before = "" if has_system and place == 1 else joined[1]
        made += before + message["content"] + after
    return made + generation


@pytest.mark.parametrize(
    "template, stop",
    [
        *((CHATML, "<|im_end|>"), (DEFAULT, "<|im_end|>"), (LLAMA_3, "<|eot_id|>"), (ZEPHYR, None), (LLAMA_2, None)),
        *(("llama3_1", "<|eot_id|>"), ("llama3_2", "<|eot_id|>"), ("qwen3", "<|im_end|>"), ("qwen2_5", "<|im_end|>")),
        *(("phi3", "<|end|>"), ("gemma3", "<end_of_turn>"), ("gemma", "<end_of_turn>")),
    ],
)
def test_a_template_of_fixed_texts_is_written(template, stop):
    file = None if "{" in template else named_template(template)
    tokenizer = chat_tokenizer(template if file is None else file.read_text(), bos_token="<s>")
    text = modelfile(tokenizer, "model.gguf")
    assert text.startswith("FROM ./model.gguf\n") and NOT_WRITTEN not in text
    stops = re.findall(r'PARAMETER stop "(.*)"', text)
    assert stops == list(dict.fromkeys([stop or tokenizer.eos_token, tokenizer.eos_token]))
    turns = [{"role": role, "content": f"a {role}  says"} for role in ("system", "user", "assistant", "user")]
    chats = (turns[1:], turns[1:2], [*turns[1:], *turns[2:]], turns, turns[:2], [*turns, *turns[2:], *turns[2:]])
    for chat in chats[:3] if template in ("gemma", LLAMA_2) else chats:  # which take no system message
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert served(text, chat) == rendered.removeprefix(tokenizer.bos_token or "")


@pytest.mark.parametrize("template", [FORGETS, CHATML.replace("m['content']", "m['content'] | upper")])
def test_any_other_template_is_named_and_not_written(template):
    text = modelfile(chat_tokenizer(template), "model.gguf")
    assert "TEMPLATE" in NOT_WRITTEN and 'TEMPLATE """' not in text and NOT_WRITTEN in text


def test_without_a_chat_template_there_is_none():
    assert modelfile(byte_tokenizer(), "model.gguf") == "FROM ./model.gguf\n"
