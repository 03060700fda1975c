"""What differs between admitted versions, by the installed ones; and the warning of what is newer than was tested."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import transformers
from conftest import ByteText, hybrid_config, tiny_model
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_hybrid import HybridTrainer, compat
from hf_hybrid.cli import export, tokens

ROOT = Path(__file__).parent.parent
VERSION = tuple(int(number) for number in transformers.__version__.split(".")[:2])


@pytest.fixture
def anew():
    compat.warn_of_untested_versions.cache_clear()
    yield
    compat.warn_of_untested_versions.cache_clear()


def test_names_of_the_installed_transformers():
    assert compat.checkpointing_option() == ("activation" if VERSION >= (5, 23) else "gradient") + "_checkpointing"
    assert compat.cache_name() == ("cache" if VERSION >= (5, 24) else "past_key_values")
    assert compat.cache_name() in compat.CACHES
    output = tiny_model()(input_ids=ByteText(1)[0]["input_ids"][None], use_cache=True)
    assert isinstance(output, CausalLMOutputWithPast) and output[compat.cache_name()] is not None


def test_what_is_newer_is_named_once(anew, monkeypatch, caplog, tmp_path):
    newer = {"torch": "2.99.1+cu130", "transformers": "5.99.0.dev0", "trl": "1.99.0", "peft": "0.99.2"}
    for name, version in newer.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__version__=version))
    compat.warn_of_untested_versions()
    compat.warn_of_untested_versions()
    told = [record.message for record in caplog.records]
    assert len(told) == 4 and all(any(f"{name} {version} is newer" in text for text in told)
                                  for name, version in newer.items())  # fmt: skip


def test_a_trainer_warns_of_them(anew, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(compat, "NEWEST_TESTED", {"transformers": (5, 0)})
    for _ in range(2):
        HybridTrainer(tiny_model(), hybrid_config(tmp_path), train_dataset=ByteText(8))
    told = [record.message for record in caplog.records if "newest version" in record.message]
    assert len(told) == 1 and f"transformers {transformers.__version__} is newer than 5.0" in told[0]
    assert 'pip install "transformers==5.0.*"' in told[0]


def test_nothing_is_said_of_tested_versions(anew, monkeypatch, caplog):
    for name, (major, minor) in compat.NEWEST_TESTED.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__version__=f"{major}.{minor}.9+cpu"))
    monkeypatch.setitem(sys.modules, "peft", None)  # not imported
    compat.warn_of_untested_versions()
    assert not caplog.records


def imported(name):
    spec = importlib.util.find_spec(name)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("trl.trainer.utils", lambda: imported("hf_hybrid.trl.sft_dpo")),
        ("trl", lambda: imported("hf_hybrid.trl.rl")),
        ("trl.chat_template_utils", lambda: tokens._way(None)),
        ("trl.data_utils", lambda: export._chosen([], None, None)),
    ],
    ids=["sft_dpo", "rl", "templates", "export"],
)
def test_a_newer_trl_in_which_a_name_has_moved(module, use, monkeypatch):
    """The error names the version that was tested, and the command that installs it."""
    pytest.importorskip("trl")
    importlib.import_module("hf_hybrid.trl.rl")
    if module == "trl":
        monkeypatch.setitem(sys.modules, "trl", ModuleType("trl"))
    else:
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setattr(sys.modules["trl"], "__version__", "1.18.1", raising=False)
    with pytest.raises(ImportError) as error:
        use()
    newest = ".".join(map(str, compat.NEWEST_TESTED["trl"]))
    assert f"tested up to {newest}. It cannot be imported here (cannot import name " in str(error.value)
    assert f'TRL 1.18.1 is installed). Install it with `pip install "trl=={newest}.*"`.' in str(error.value)


def test_the_tested_versions_are_those_of_the_documents():
    """`constraints.txt` pins none that is newer, and docs/support.md names each."""
    pins = dict(re.findall(r"^(\w+)==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), flags=re.M))
    page = (ROOT / "docs" / "support.md").read_text()
    for name, tested in compat.NEWEST_TESTED.items():
        assert tuple(map(int, pins[name].split("."))) <= tested
        row = next(line for line in page.splitlines() if re.match(rf"\| {name}\b", line, flags=re.I))
        assert ".".join(map(str, tested)) in row
