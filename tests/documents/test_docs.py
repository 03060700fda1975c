"""What the docs say is run: code blocks, commands, links, the page of options, and the files that numbers come from."""

import ast
import importlib
import json
import re
import runpy
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ByteText, config_values, tiny_model
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from hf_hybrid import HybridArguments, HybridConfig, HybridTrainer, __version__
from hf_hybrid.cli import options
from hf_hybrid.cli.main import COMMANDS, build_parser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PAGES += [*sorted((ROOT / "benchmarks").rglob("*.md")), *sorted((ROOT / "tests").glob("*/README.md"))]
PAGES += sorted((ROOT / "hf_hybrid").rglob("README.md"))
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.M | re.S)
CHAT = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
pytestmark = pytest.mark.filterwarnings("ignore")


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, *languages: str) -> list[str]:
    found = BLOCK.findall(path.read_text(encoding="utf-8"))
    return [text for language, text in found if language in languages]


def prose(path: Path) -> str:
    """A page without its blocks."""
    return BLOCK.sub("", path.read_text(encoding="utf-8"))


# Python: every page is run from top to bottom, in one namespace, without a network.

QWEN = '"Qwen/Qwen2.5-0.5B"'
# What stands for something that a test cannot have: (in the page, in the test). `TINY` is a model of a few weights.
STAND_INS: dict[str, list[tuple[str, str]]] = {
    "docs/mixed_precision.md": [("bf16=True", "bf16=True, use_cpu=True")],
    "docs/quickstart.md": [("max_steps=300", "max_steps=12")],
    "docs/sweeps.md": [("max_steps=200", "max_steps=20"), ("n_trials=10", "n_trials=2")],
    "README.md": [('"HuggingFaceTB/SmolLM2-135M-Instruct"', "TINY")],
    "docs/sft.md": [(QWEN, "TINY")],
    "docs/dpo.md": [('"Qwen/Qwen2.5-0.5B-Instruct"', "TINY")],
    "docs/peft_and_trl.md": [(QWEN, "TINY")],
    "docs/coming_from.md": [(QWEN, "TINY")],
    "docs/exact_skips.md": [
        ('"Qwen/Qwen3-0.6B"', "TINY"),
        ('load_dataset("trl-lib/ultrafeedback_binarized", split="train")', "preferences"),
    ],
    "docs/grpo.md": [
        ('"Qwen/Qwen2-0.5B-Instruct"', "TINY"),
        ('load_dataset("trl-lib/DeepMath-103K", split="train")', "conversations.select([0]).map(lambda _: PROBLEM)"),
        ("from trl.rewards import accuracy_reward", "accuracy_reward = lambda prompts, **_: [1.0] * len(prompts)"),
    ],
    "docs/planning.md": [('"Qwen/Qwen2.5-7B"', "QWEN_CONFIG")],
    # Real pushes, to a local Hub, are in tests/hub/test_card_and_hub.py: a process fixes its endpoint when it starts
    "docs/hub.md": [
        ("trainer.push_to_hub(", "trainer.create_model_card("),
        ('trainer.model.push_to_hub("your-name/model"', 'trainer.model.save_pretrained("pushed"'),
    ],
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """A model and its tokenizer in a folder."""
    folder = str(tmp_path_factory.mktemp("tiny"))
    words = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="!", eos_token="!", chat_template=CHAT)
    fast.save_pretrained(folder)
    tiny_model(max_position_embeddings=1024).save_pretrained(folder)
    return folder


def small_trainer(folder: str, trained: bool = False) -> HybridTrainer:
    config = HybridConfig(**config_values(folder, max_steps=12))
    data = {"train_dataset": ByteText(100), "eval_dataset": ByteText(8, offset=200)}
    trainer = HybridTrainer(tiny_model(), config, **data)
    if trained:
        trainer.train()
    return trainer


def names_of(page: str, tiny: str) -> dict:
    """What a page takes for granted: a model, data, and where it speaks of a run, one."""
    dialogue = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because it is so."}]
    names = {
        "TINY": tiny,
        "QWEN_CONFIG": str(ROOT / "examples" / "model_configs" / "qwen2.5-7b.json"),
        "model": tiny_model(),
        "model_init": lambda: tiny_model(),
        "dataset": ByteText(40),
        "train_dataset": ByteText(100),
        "eval_dataset": ByteText(8, offset=200),
        "preferences": Dataset.from_dict({"prompt": ["Why?"] * 4, "chosen": ["Because."] * 4, "rejected": ["No."] * 4}),
        "PROBLEM": {"prompt": [{"role": "user", "content": "Two and two?"}]},
        "conversations": Dataset.from_dict({"messages": [dialogue] * 40}),
    }
    if page == "docs/hub.md":
        plain = Trainer(
            tiny_model(),
            TrainingArguments(**config_values("plain", max_steps=2)),
            train_dataset=ByteText(40),
            eval_dataset=ByteText(8, offset=200),
        )
        plain.train()
        plain.evaluate()
        names.update(trainer=small_trainer("out"), plain=plain)
    if page == "docs/export.md":
        names.update(trainer=small_trainer("out"))
    if page == "docs/profiling.md":
        names.update(Trainer=Trainer, args=TrainingArguments(**config_values("out", max_steps=4)))
    if page == "docs/reports.md":
        for folder in ("out", "out-a", "out-b"):
            small_trainer(folder, trained=True)
    return names


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "python")], ids=page_name)
@pytest.mark.long
def test_python_blocks_run(path, tiny, tmp_path, monkeypatch):
    page = page_name(path)
    if re.search("Hybrid(SFT|DPO|GRPO)", "".join(blocks(path, "python"))):
        pytest.importorskip("trl")
    if page == "docs/export.md":
        pytest.importorskip("torchao")
    monkeypatch.chdir(tmp_path)
    Path("my_texts.txt").write_text("\n\n".join(["Some words that are learned.", "And some more of them."] * 30))
    torch.manual_seed(0)
    namespace, unused = names_of(page, tiny), [old for old, _ in STAND_INS.get(page, [])]
    for block in blocks(path, "python"):
        for old, new in STAND_INS.get(page, []):
            unused = [left for left in unused if left != old or old not in block]
            block = block.replace(old, new)
        exec(compile(block, page, "exec"), namespace)
    assert not unused, f"the page does not say {unused} any more"


def test_the_readme_shows_what_its_code_prints(tiny, tmp_path, monkeypatch, capsys):
    """The numbers are those of another model and other data; the words are the same."""
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    path = ROOT / "README.md"
    shown = blocks(path, "text")[0]
    assert int(re.match(r"[\d,]+", shown).group().replace(",", "")) > 0
    (code,) = blocks(path, "python")
    (old, new), namespace = STAND_INS["README.md"][0], names_of("README.md", tiny)
    capsys.readouterr()
    exec(compile(code.replace(old, new), "README.md", "exec"), namespace)
    printed = [
        line for line in capsys.readouterr().out.splitlines() if "tokens were not" in line or "of padding" in line
    ]
    assert [re.sub(r"\d[\d,]*", "N", line) for line in printed] == re.sub(r"\d[\d,]*", "N", shown).splitlines()


# Commands: they name files that are there, and flags that these take.


def script_flags(path: Path) -> set[str]:
    """Flags of a script: its dataclasses' fields, keys of its tables, strings like flags, and its config's options."""
    files = path.parent.glob("*.py") if path.name == "__main__.py" else [path]
    nodes, found = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))], set()
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        if isinstance(node, ast.Dict):
            found |= {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}
        if isinstance(node, ast.Constant) and re.fullmatch(r"--\w[\w-]*", str(node.value)):
            found.add(node.value[2:])
        if isinstance(node, ast.Name) and node.id in ("HybridConfig", "HybridSFTConfig", "HybridDPOConfig"):
            found |= {option.name for option in fields(HybridConfig)}
    return found


def check_script(words: list[str]) -> None:
    path = ROOT / words[0]
    assert path.is_file(), f"{words[0]} does not exist"
    flags = {word[2:].split("=")[0] for word in words[1:] if word.startswith("--")}
    assert flags <= script_flags(path) | {"help"}, f"{words[0]} does not take {flags - script_flags(path)}"


def check_python(words: list[str]) -> None:
    if words[0] != "-m":
        return check_script(words)
    if words[1].startswith("benchmarks."):
        script = words[1].replace(".", "/") + ".py"
        package = script.replace(".py", "/__main__.py")
        return check_script([package if (ROOT / package).is_file() else script, *words[2:]])
    assert words[1] in ("pytest", "hf_hybrid"), words
    for word in words[2:]:
        if word.startswith("tests/"):
            assert (ROOT / word.split("::")[0]).exists(), word


def check_pip(words: list[str]) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = set(re.findall(r"^(\w+) = \[", text.split("[project.optional-dependencies]")[1].split("\n[")[0], re.M))
    for word in words:
        for extra in re.findall(r"^(?:hf[-_]hybrid|\.)\[([\w,]+)\]$", word):
            assert set(extra.split(",")) <= extras, f"no extra `{extra}`"
    if "-c" in words:
        assert (ROOT / words[words.index("-c") + 1]).is_file()


def check_hf_hybrid(words: list[str], folder: Path) -> None:
    command, *rest = words
    assert command in COMMANDS, f"hf-hybrid has no command `{command}`"
    if command == "data":
        command, rest = "sft", ["--dataset", *rest]
    if command not in options.TRAINING:
        return build_parser(command).parse_args([command, *rest])
    (folder / "run.yaml").write_text("max_steps: 3\n")
    (folder / "hybrid_config.json").write_text('{"max_steps": 3}')
    stand_in = {"run.yaml": "run.yaml", "out/gpt2-sweep/best.yaml": "run.yaml"}
    stand_in["out/gpt2/hybrid_config.json"] = "hybrid_config.json"
    rest = [str(folder / stand_in[word]) if word in stand_in else word for word in rest]
    line = options.CommandLine(rest, options.TRAINING[command])
    assert line.values


def check_launcher(words: list[str]) -> None:
    for before, word in zip(["", *words], words):
        if before == "--config_file" or word.startswith(("examples/", "benchmarks/")):
            assert (ROOT / word).is_file(), word
    script = next((index for index, word in enumerate(words) if word.startswith("examples/") and word[-3:] == ".py"), 0)
    if script:
        check_script(words[script:])


def commands(path: Path) -> list[str]:
    """Single commands of the shell blocks of a page."""
    lines = "\n".join(blocks(path, "bash", "sh", "console")).replace("\\\n", " ").splitlines()
    return [part.strip() for line in lines for part in line.split("&&") if part.strip() and part.strip()[0] != "#"]


@pytest.mark.parametrize("path", [path for path in PAGES if commands(path)], ids=page_name)
def test_commands_exist(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in commands(path):
        words = shlex.split(command, comments=True)
        while words and (re.fullmatch(r"[A-Z_]+=\S*", words[0]) or words[0] == "srun"):
            words.pop(0)
        program, *rest = words[: words.index(">")] if ">" in words else words
        if program == "python":
            check_python(rest)
        elif program == "pip":
            check_pip(rest)
        elif program == "hf-hybrid":
            check_hf_hybrid(rest, tmp_path)
        elif program in ("accelerate", "torchrun"):
            check_launcher(rest)
        else:
            assert program in ("docker", "mkdocs", "pre-commit", "ruff"), f"{page_name(path)}: what is `{command}`?"


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_files_that_a_page_names_exist(path):
    text = re.sub(r"`out[^`]*`", "", path.read_text(encoding="utf-8"))
    named = re.findall(r"(?<![\w/.])((?:benchmarks|docs|examples|hf_hybrid|tests)/[\w/.-]*\.\w+)", text)
    missing = sorted({name for name in named if not (ROOT / name.rstrip(".")).exists()})
    assert not missing, f"{page_name(path)} names {missing}"


RESULTS = sorted((ROOT / "benchmarks").glob("*/results.jsonl"))


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("path", RESULTS, ids=page_name)
@pytest.mark.long
def test_results_say_where_they_come_from(path):
    """Every line names its benchmark and the command; what no command repeats says so in a line before it."""
    explained, commands = set(), set()
    for line in lines_of(path):
        if "about" in line:
            explained.add((line["benchmark"], line["set"]))
        elif (line["benchmark"], line.get("set")) not in explained:
            assert line["benchmark"] and line["hardware"], line
            commands.add(line["command"])
    for command in sorted(commands):
        if command.startswith("python "):
            check_python(shlex.split(command)[1:])


def test_every_file_of_results_is_cited():
    pages = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    assert RESULTS
    for path in RESULTS:
        assert page_name(path) in pages, f"no page names {page_name(path)}"


def test_losses_by_seed_are_in_the_results():
    """`4.546 / 4.564 / 4.509`: each is the final loss of a run. Generated tables have a test of their own."""
    page = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").rglob("*.md"))
    rows = lines_of(ROOT / "benchmarks/speedup/results.jsonl")
    losses = {f"{loss:.3f}" for row in rows if (loss := row.get("eval_loss", row.get("loss"))) is not None}
    told = re.findall(r"(?<![\d.])\d\.\d{3}(?: / \d\.\d{3})+(?!\d)", page)
    assert len(told) > 20
    for numbers in told:
        missing = set(numbers.split(" / ")) - losses
        assert not missing, f"no run ended at {sorted(missing)}, of {numbers}"


# Links.


def slugs(path: Path) -> set[str]:
    """Anchors of a page, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ +(.+?)\s*$", prose(path), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_links_resolve(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), f"{page_name(path)} links to {target}"
        if anchor:
            assert anchor in slugs(found), f"{page_name(path)} links to {target}, which has {sorted(slugs(found))}"


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=page_name)
def test_a_page_is_short(path):
    """The notebook may be long."""
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= (150 if page_name(path) == "docs/results.md" else 300), f"{page_name(path)} has {lines} lines"


WANTED = (
    "SFT", "DPO", "GRPO", "LoRA", "QLoRA", "wandb", "mlflow", "early stopping", "flash attention", "multi-GPU", "FAQ",
    "Alpaca", "ShareGPT", "Liger", "packing", "Docker", "Colab", "Unsloth", "vLLM", "24 GB", "learning rate", "resume",
)  # fmt: skip


@pytest.mark.parametrize("words", WANTED)
def test_a_reader_finds(words):
    """The site's search looks into the text of the pages that the navigation lists."""
    assert any(words.lower() in prose(path).lower() for path in DOCS.rglob("*.md")), f"no page says `{words}`"


RIGHT = {
    "SFT": "sft.md", "DPO": "dpo.md", "GRPO": "grpo.md", "LoRA": "peft_and_trl.md", "24 GB": "card_24gb.md",
    "wandb": "faq.md", "early stopping": "faq.md", "flash attention": "faq.md", "multi-GPU": "faq.md", "FAQ": "faq.md",
    "resume": "resume.md", "Docker": "support.md",
}  # fmt: skip
"""The page that the site's search must show first."""


@pytest.mark.parametrize("words", RIGHT)
def test_the_right_page_is_found_first(words):
    """
    The search counts a word in a title a thousand times as much as one in the text, and one in a short title most. So
    the page is first whose title has all words, or else a heading in it; of several the shortest.
    """
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    separator = next(plugin["search"]["separator"] for plugin in config["plugins"] if "search" in plugin)
    wanted, hits = set(re.split(separator, words.lower())), []
    for path in DOCS.rglob("*.md"):
        for level, heading in re.findall(r"^(#+) (.*)$", prose(path), re.M):
            found = re.split(separator, heading.lower())
            if wanted <= set(found):
                hits.append((len(level), len(found), path.relative_to(DOCS).as_posix()))
    assert hits and min(hits)[-1] == RIGHT[words], sorted(hits)


# Options, and the site.


def test_the_page_of_options_is_what_the_generator_writes():
    written = runpy.run_path(str(DOCS / "generate_configuration.py"))["page"]()
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == written, (
        "run `python docs/generate_configuration.py`"
    )
    for option in fields(HybridArguments):
        assert written.count(f"\n| `{option.name}` | ") >= 1, f"`{option.name}` has no line"


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "yaml")], ids=page_name)
def test_yaml_blocks_hold_options(path):
    known = {option.name for option in fields(HybridConfig)} | {"plugins", "hybrid"}
    for block in blocks(path, "yaml"):
        values = yaml.safe_load(block)
        assert set(values) <= known, set(values) - known
        assert set(values.get("hybrid", {})) <= {option.name for option in fields(HybridArguments)}


def nav_pages(entry) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    return [page for value in values for page in nav_pages(value)]


def test_every_page_is_in_the_navigation_once():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert sorted(nav_pages(config["nav"])) == pages


def test_the_first_page_lists_every_page():
    """The README says that it does."""
    first = DOCS / "index.md"
    listed = {(DOCS / link).resolve() for link in re.findall(r"\]\(([^)\s#]+\.md)", prose(first))}
    missing = sorted(page_name(path) for path in set(DOCS.rglob("*.md")) - {first} if path.resolve() not in listed)
    assert not missing, f"docs/index.md does not list {missing}"


def test_symbols_of_the_api_pages_exist_and_are_documented():
    symbols = [name for path in (DOCS / "api").glob("*.md") for name in re.findall(r"^::: (\S+)", prose(path), re.M)]
    assert len(symbols) > 10
    for symbol in symbols:
        module, name = symbol.rsplit(".", 1)
        try:
            found = getattr(importlib.import_module(module), name)
        except ImportError as error:
            assert module.startswith(("hf_hybrid.trl.", "hf_hybrid.integrations.")), error
            continue
        assert found.__doc__, symbol


# What the repository says of itself in several places.


def test_a_release_is_what_it_says():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (part,) = re.findall(rf"^## \[{re.escape(__version__)}\].*?\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    assert 10 < len(part.splitlines()) <= 40
    assert f"hf_hybrid-{__version__}-py3-none-any.whl" in (ROOT / "README.md").read_text(encoding="utf-8")
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    assert release[True]["push"]["tags"] == ["v*"]  # YAML reads the key `on` as a bool
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    assert release["jobs"]["publish"]["if"].endswith("vars.PUBLISH == 'true'")


def test_versions_agree():
    read = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("constraints.txt", "pyproject.toml")}
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__ and citation["license"] == "Apache-2.0"
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    ruff = next(repo["rev"] for repo in hooks if "ruff" in repo["repo"])
    assert f"ruff=={ruff.removeprefix('v')}" in read["constraints.txt"].split()
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    least = re.search(r'requires-python = ">=([\d.]+)"', read["pyproject.toml"]).group(1)
    assert jobs["tests"]["strategy"]["matrix"]["python"][0] == least
    script = "".join(step.get("run", "") for step in jobs["wheel"]["steps"])
    for pattern in re.search(r"^hf_hybrid = \[(.*)\]$", read["pyproject.toml"], re.M).group(1).split(","):
        name = pattern.strip(' "')
        checked = name.split("/*")[0] if "*" in name.split("/")[-1] else name
        assert checked.split("/")[-1] in script, f"the wheel is not checked for {name}"
