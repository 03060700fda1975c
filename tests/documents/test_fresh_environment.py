"""
README's commands and the notebooks in fresh environments, from the installation on, which needs a package index. A tiny
model takes the place of one on the Hub.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rig.byte_llama import assistant, chat_tokenizer, save_llama, user

pytestmark = [pytest.mark.slow, pytest.mark.processes]

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
EXECUTE = """
import nbclient, nbformat, sys
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[1])
"""


@pytest.fixture
def repository(tmp_path) -> Path:
    """A copy of the files that a clone has."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.split("\0")[:-1]:
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "clone" / name)
    return tmp_path / "clone"


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """The variables of a shell in a new environment without packages."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = f"{tmp_path / 'venv' / 'bin'}{os.pathsep}{variables['PATH']}"
    return {**variables, "PATH": path, "HF_HUB_OFFLINE": "1", "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}


@pytest.fixture
def executed(environment, repository):
    """Execute a notebook in its folder, with constants replaced: what each of its code cells put out."""
    folder = repository / "examples"
    subprocess.run(["pip", "install", "--quiet", "ipykernel", "nbclient"], env=environment, check=True)

    def executed(name: str, **constants) -> list[str]:
        notebook = json.loads((folder / name).read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            source = "".join(cell["source"])
            for constant, value in constants.items():
                source = re.sub(rf"^{constant} = .*$", f"{constant} = {value!r}", source, flags=re.M)
            cell["source"] = source
        (folder / name).write_text(json.dumps(notebook), encoding="utf-8")
        subprocess.run(["python", "-c", EXECUTE, name], cwd=folder, env=environment, check=True)
        cells = json.loads((folder / name).read_text(encoding="utf-8"))["cells"]
        return ["\n".join(map(text_of, cell["outputs"])) for cell in cells if cell["cell_type"] == "code"]

    return executed


def text_of(output: dict) -> str:
    return "".join(output["text"] if "text" in output else output.get("data", {}).get("text/plain", ""))


def test_readme(environment, repository):
    """But for the tests, which CI runs by that command."""
    save_llama(repository / "MODEL", chat_tokenizer(TEMPLATE))
    chats = [[user(f"Say {n}."), assistant(f"{n}")] for n in range(60)]
    (repository / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    shutil.copy(repository / "README.md", repository / "my.txt")
    readme = (repository / "README.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```bash\n(.*?)^```$", readme, re.M | re.S):
        if "pytest" in block:
            continue
        if "dist/" in block:
            wheel = ["pip", "wheel", "--quiet", "--no-deps", "-w", "dist", "."]
            subprocess.run(wheel, cwd=repository, env=environment, check=True)
        ended = subprocess.run(
            ["bash", "-e"], input=block.replace("hf-hybrid chat out", "echo Hello | hf-hybrid chat out"),
            cwd=repository, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
        assert "Traceback" not in ended.stderr


def test_colab(executed, repository):
    folder = repository / "examples"
    save_llama(folder / "model", chat_tokenizer(TEMPLATE))
    _, rows, trained, chatted, exported, in_python = executed("colab.ipynb", MODEL="./model", STEPS=3)
    assert int(rows) > 50
    assert "Done: 3 steps" in trained and "hf-hybrid chat out" in trained
    assert "error" not in chatted.lower() and "Traceback" not in chatted
    assert exported.count("eval loss") == 2 and "GGUF tensors" not in exported
    merged, gguf = (
        json.loads((folder / f"out-{kind}" / "export.json").read_text()) for kind in ("merged", "gguf-q8_0")
    )
    assert abs(merged["loss_change"]) < 0.05 and abs(gguf["loss_change"]) < 0.05
    assert (folder / "out-gguf-q8_0" / "model.gguf").is_file()
    assert "'steps_by_phase'" in in_python or "steps" in in_python


def test_quickstart(executed):
    *_, losses, summary = executed("quickstart.ipynb")
    before, after = (float(re.search(rf"'{name}': ([\d.]+)", losses)[1]) for name in ("before", "after"))
    assert after < before - 1 and "predict" in summary
