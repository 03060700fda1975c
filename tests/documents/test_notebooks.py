"""
The notebooks as Jupyter executes them, cell by cell: only what installs packages is left out, and a tiny model takes
the place of the one on the Hub.

They need a kernel: `pip install nbclient ipykernel`. Without it they are skipped.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from cli.test_cli import byte_tokenizer

nbclient = pytest.importorskip("nbclient", reason="`pip install nbclient ipykernel` executes the notebooks")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytestmark = [pytest.mark.slow, pytest.mark.processes]

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """Execute a notebook in an empty folder, with constants replaced: the text that each of its code cells put out."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

    def executed(name: str, **constants) -> list[str]:
        notebook = nbformat.read(ROOT / "examples" / name, as_version=4)
        for cell in notebook.cells:
            cell.source = re.sub(r"^%pip install .*$", "", cell.source, flags=re.M)
            for constant, value in constants.items():
                cell.source = re.sub(rf"^{constant} = .*$", f"{constant} = {value!r}", cell.source, flags=re.M)
        resources = {"metadata": {"path": str(tmp_path)}}
        nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources).execute()
        return ["\n".join(map(text_of, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"]

    return executed


def text_of(output) -> str:
    return output.text if output.output_type == "stream" else output.get("data", {}).get("text/plain", "")


def test_colab(executed, tmp_path):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer(eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": 256}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes, **ids)).save_pretrained(tmp_path / "model")
    _, rows, trained, chatted, exported, in_python = executed("colab.ipynb", MODEL="./model", STEPS=3)
    assert int(rows) > 50
    assert "Done: 3 steps" in trained and "hf-hybrid chat out" in trained
    assert "error" not in chatted.lower() and "Traceback" not in chatted
    assert exported.count("held-out loss") == 2 and "GGUF tensors" not in exported
    merged, gguf = (
        json.loads((tmp_path / f"out-{kind}" / "export.json").read_text()) for kind in ("merged", "gguf-q8_0")
    )
    assert abs(merged["loss_change"]) < 0.05 and abs(gguf["loss_change"]) < 0.05
    assert (tmp_path / "out-gguf-q8_0" / "model.gguf").is_file()
    assert "'steps_by_phase'" in in_python or "steps" in in_python


def test_quickstart(executed):
    *_, losses, summary = executed("quickstart.ipynb")
    before, after = (float(re.search(rf"'{name}': ([\d.]+)", losses)[1]) for name in ("before", "after"))
    assert after < before - 1 and "predict" in summary
