"""The model card says what the run was and nothing else; what is pushed is the model, and comes back as it was."""

import importlib.metadata
import json
import math
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ByteText, hybrid_config, tiny_model
from huggingface_hub import ModelCard, ModelCardData
from rig import trainers
from rig.hub_server import TOKEN, YAML_BLOCK, card_errors
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_hybrid import HybridTrainer, MemoryProfilerCallback, __version__
from hf_hybrid.hub import card as origins
from hf_hybrid.hub.card import code, is_repo_id, license_of, rewards_of, text
from hf_hybrid.hub.provenance import command, hardware, tracker_links
from hf_hybrid.part import Part
from hf_hybrid.records.log import load_log
from hf_hybrid.records.summary import format_seconds

TESTS = Path(__file__).parents[1]


def metadata_of(card: str) -> dict:
    return yaml.safe_load(YAML_BLOCK.search(card).group(2))


def body_of(card: str) -> str:
    return card[YAML_BLOCK.search(card).end() :]


def section(card: str, heading: str) -> str:
    """Text of a section, without those below it; empty if there is none."""
    found = re.search(rf"^#+ {heading}\n(.*?)(?=^#|\Z)", card, re.DOTALL | re.MULTILINE)
    return found.group(1).strip() if found else ""


def new_trainer(folder, model=None, **options) -> HybridTrainer:
    options = {"eval_dataset": ByteText(16, offset=500), "max_steps": 20, **options}
    return trainers.build(folder, model=model, **options)


def after_training(folder, model=None, **options) -> HybridTrainer:
    trainer = new_trainer(folder, model, **options)
    trainer.train()
    return trainer


def card_of(trainer, **kwargs) -> str:
    """The card, which has to be one that the Hub takes and that hides no hole."""
    trainer.create_model_card(**kwargs)
    path = Path(trainer.args.output_dir) / "README.md"
    card = path.read_text(encoding="utf-8")
    assert card_errors(card) == []
    ModelCard.load(path)
    body = re.sub(r"```.*?```", "code", body_of(card), flags=re.DOTALL)
    assert not re.search(r"\bNone\b|\bnan\b|More [Ii]nformation [Nn]eeded", body)
    headings = [*re.finditer(r"^(#+) .*$", body, re.MULTILINE)]
    for this, following in zip(headings, [*headings[1:], None]):
        between = body[this.end() : following.start() if following else len(body)].strip()
        assert between or len(following.group(1)) > len(this.group(1)), f"nothing under {this.group()}"
    return card


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> HybridTrainer:
    trainer = after_training(
        tmp_path_factory.mktemp("card") / "small", eval_strategy="steps", eval_steps=10, max_steps=30
    )
    trainer.evaluate()
    return trainer


# The card.


def test_card_says_what_the_run_recorded(trained):
    card, summary = (
        card_of(trained, language="en", license="apache-2.0", dataset="Python's help"),
        trained.hybrid_summary(),
    )
    fields = metadata_of(card)
    assert fields["library_name"] == "transformers" and fields["pipeline_tag"] == "text-generation"
    assert fields["license"] == "apache-2.0" and fields["language"] == "en" and fields["model_name"] == "small"
    assert {"generated_from_trainer", "hf-hybrid"} <= set(fields["tags"])
    assert "base_model" not in fields and "trained from random weights" in card
    loss = trained.state.log_history[-1]["eval_loss"]
    found = {metric["type"]: metric["value"] for metric in fields["model-index"][0]["results"][0]["metrics"]}
    assert found == {"loss": loss, "perplexity": math.exp(loss)} and fields["metrics"] == ["perplexity"]
    phases = section(card, "Phases")
    for phase, count in summary["steps_by_phase"].items():
        assert f"| {phase.capitalize()} | {count} |" in phases
    assert f"{summary['backward_passes']} done, {summary['backward_passes_avoided']} avoided" in phases
    assert f"Leaps: {len(summary['leaps'])}\n" in phases and "| `leap_worth` | `0.5` |" in section(card, "Settings")
    assert "| `learning_rate` | `0.003` |" in section(card, "Settings")
    assert "| weights | " in section(card, "Memory") and "400 sequences" in section(card, "Data")
    assert "16 sequences" in section(card, "Data")
    assert f"| kept without a test | {summary['leaps_by_verdict'].get('unprobed', 0)} |" in phases
    assert f"| kept after a test | {summary['leaps_by_verdict'].get('kept', 0)} |" in phases
    assert "`logging_steps`" not in card and "`sequences per step` | `4`" in section(card, "Settings")
    assert "CPU" in section(card, "Hardware and time") and "Wall time" in section(card, "Hardware and time")
    assert re.search(r"^- Tokens per second, without evaluation and saving: [\d,.]+$", card, re.M)
    assert f"- torch {torch.__version__.split('+')[0]}" in section(card, "Versions")
    assert section(card, "Course of the training").count("\n") == 4  # heads, rule, evaluations at 10, 20 and 30
    assert "very small model" in section(card, "Limits and intended use")
    assert "No licence is stated" not in card and "No licence is stated" in card_of(trained)


def test_card_is_the_same_when_it_is_written_again(trained):
    assert card_of(trained, tags="mine") == card_of(trained, tags="mine") == card_of(trained)  # tags stay
    assert "mine" in metadata_of(card_of(trained))["tags"]


def test_no_metadata_field_of_transformers_and_trl_is_missing(trained, tmp_path):
    given = {
        "language": "en", "license": "mit", "dataset_tags": "Salesforce/wikitext", "dataset": "WikiText",
        "finetuned_from": "openai-community/gpt2", "tags": ["mine"],
    }  # fmt: skip
    ours = metadata_of(card_of(trained, **given))
    there = Path(trained.args.output_dir) / "README.md"
    there.unlink()
    Trainer.create_model_card(trained, **given)
    theirs = metadata_of(there.read_text())
    there.unlink()
    assert {key for key, value in theirs.items() if value} <= ours.keys()
    assert ours["base_model"] == theirs["base_model"] and ours["datasets"] == theirs["datasets"]
    utils = pytest.importorskip("trl.trainer.utils")
    card = utils.generate_model_card(
        "openai-community/gpt2", "small", "me/small", "Salesforce/wikitext", ["mine"], None, None, "SFT"
    )
    assert {key.replace("licence", "license") for key in metadata_of(str(card))} <= ours.keys()


def test_strings_of_others_cannot_break_the_card(tmp_path, monkeypatch):
    nasty = 'a|b: `c` <script>x</script> [l](http://e) {{ 7*7 }}\n---\n# "q" #no *s* ${HOME}'
    monkeypatch.setattr(sys, "argv", ["train.py", "--note", "```\n# heading\n```\ud83d", "--x", nasty])
    trainer = new_trainer(
        tmp_path / "out", eval_dataset={"a|b": ByteText(8, offset=500), "ok": ByteText(8, offset=600)}
    )
    trainer.train()
    trainer.evaluate()
    card = card_of(trainer, model_name=nasty, dataset=nasty, tags=[nasty])
    fields, body = metadata_of(card), body_of(card).rsplit("\n*Written by", 1)[0]
    assert "\n" not in fields["model_name"] and fields["model_name"].startswith("a|b: `c` <script>")
    tokens = pytest.importorskip("markdown_it").MarkdownIt("commonmark", {"html": True}).enable("table").parse(body)
    inline = [part for token in tokens for part in token.children or []]
    assert not any(part.type in ("html_inline", "em_open") for part in inline)
    links = [part.attrs["href"] for part in inline if part.type == "link_open"]
    assert links and all(link.startswith(("https://kellerjordan.github.io/", "https://arxiv.org/")) for link in links)
    assert not any(token.type == "html_block" for token in tokens)
    levels = [token.tag for token in tokens if token.type == "heading_open"]
    # Title, results, usage, training with its parts, limits, citation.
    assert levels == ["h1", "h2", "h2", "h2", *["h3"] * 7, "h2", "h2"]
    cells = sum(token.type == "td_open" for token in tokens)
    rows = sum(token.type == "tr_open" for token in tokens) - sum(token.type == "thead_open" for token in tokens)
    assert 2 * rows < cells < 3 * rows + 1  # no `|` of a name began a cell
    results = fields["model-index"][0]["results"]
    assert {result["dataset"]["name"] for result in results} == {"a|b", "ok"}


def test_card_of_a_checkout_that_is_not_installed_has_its_version(tmp_path, monkeypatch):
    def version(package: str) -> str:
        if package == "hf_hybrid":
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.2.3"

    trainer = HybridTrainer(tiny_model(), hybrid_config(tmp_path, max_steps=1), train_dataset=ByteText(8))
    monkeypatch.setattr(importlib.metadata, "version", version)
    trainer.create_model_card()
    assert f"*Written by `hf_hybrid` {__version__} on " in (tmp_path / "README.md").read_text()


def test_markdown_helpers():
    assert text("a*b_c|d\n# e") == r"a\*b\_c\|d \# e"
    assert code("a|b`c") == r"`a\|b'c`" and code("`") == "`'`" and code("") == ""


def test_what_was_not_evaluated_says_so(tmp_path):
    trainer = new_trainer(tmp_path / "out")
    trainer.evaluate()  # of the weights before training
    trainer.train()
    card = card_of(trainer)
    assert "It was not evaluated." in card and "Results" not in card and "model-index" not in metadata_of(card)


def test_only_an_evaluation_of_the_final_weights_is_a_result(tmp_path):
    trainer = after_training(tmp_path / "out", eval_strategy="steps", eval_steps=15)
    log = trainer.state.log_history
    log[:] = [entry for entry in log if "eval_loss" not in entry or entry["step"] == 15]  # Trainer adds one at the end
    card = card_of(trainer)
    assert "model-index" not in metadata_of(card) and "not of the weights published here" in section(card, "Results")
    assert "at step 15" in card
    trainer.args.load_best_model_at_end, trainer.state.best_global_step = True, 15
    assert "model-index" in metadata_of(card_of(trainer))


@pytest.mark.parametrize("leaps", [True, False])
def test_wall_time_is_that_of_all_starts(tmp_path, leaps):
    class Slow(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 6:
                raise InterruptedError

    options = {"save_strategy": "steps", "save_steps": 4, "logging_steps": 1, "max_steps": 8, "enable_predict": leaps}
    with pytest.raises(InterruptedError):
        new_trainer(tmp_path / "out", callbacks=[Slow()], **options).train()
    with pytest.raises(InterruptedError):
        new_trainer(tmp_path / "out", callbacks=[Slow()], **options).train(resume_from_checkpoint=True)
    trainer = new_trainer(tmp_path / "out", **options)
    runtime = trainer.train(resume_from_checkpoint=True).metrics["train_runtime"]
    seconds, starts = load_log(tmp_path / "out").wall_time()
    assert starts == 3 and runtime < seconds
    assert f"Wall time of training, over 3 starts: {format_seconds(seconds)}" in section(
        card_of(trainer), "Hardware and time"
    )


def test_perplexity_is_not_claimed_of_other_losses(tmp_path):
    trainer = after_training(tmp_path / "out", label_smoothing_factor=0.1, max_steps=6)
    trainer.evaluate()
    assert "erplexity" not in section(card_of(trainer), "Results")
    assert [m["type"] for m in metadata_of(card_of(trainer))["model-index"][0]["results"][0]["metrics"]] == ["loss"]


def test_without_phases_there_is_no_table_of_phases(tmp_path):
    trainer = after_training(tmp_path / "out", enable_predict=False, max_steps=4)
    card = card_of(trainer)
    assert section(card, "Phases") == "" and "held out" not in card
    assert "hf-hybrid" in metadata_of(card)["tags"] and "hf-hybrid" in trainer.model.model_tags


def test_savings_that_did_not_work_are_named(tmp_path):
    trainer = after_training(tmp_path / "out", enable_predict=False, max_steps=1)
    assert "did not work" not in card_of(trainer)
    failed = [f"no tree (KeyError: '{Path.home()}/private/a|b')", "no <b>window</b>"]
    trainer.parts.append(type("Failing", (Part,), {"failed": failed})())
    (row,) = [line for line in card_of(trainer).splitlines() if "did not work" in line]
    assert "no tree (KeyError: '" in row and "; no \\<b\\>window" in row and str(Path.home()) not in row
    assert trainer.hybrid_summary()["failed_savings"] == failed


def test_memory_is_that_of_the_profiler_where_there_is_one(tmp_path):
    profiler = MemoryProfilerCallback()
    trainer = after_training(tmp_path / "out", callbacks=[profiler])
    memory = section(card_of(trainer), "Memory")
    for phase, found in profiler.summary()["phases"].items():
        assert f"| {phase.capitalize()} | {found['records']} |" in memory
    assert "resident memory" in memory and "| weights |" not in memory


# Where the model and its data come from.


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model().save_pretrained(folder)
    return folder


def test_base_model_is_one_on_the_hub_whose_weights_were_loaded(saved, tmp_path):
    local = LlamaForCausalLM.from_pretrained(saved)
    card = card_of(new_trainer(tmp_path / "a", local))
    assert "base_model" not in metadata_of(card) and "local folder" in card and str(saved) not in card
    local.config._name_or_path = "someone/model"  # as `from_pretrained` leaves it
    card = card_of(new_trainer(tmp_path / "b", local))
    assert metadata_of(card)["base_model"] == "someone/model" and metadata_of(card)["base_model_relation"] == "finetune"
    assert "[someone/model](https://huggingface.co/someone/model)" in card
    config = local.config
    card = card_of(new_trainer(tmp_path / "c", AutoModelForCausalLM.from_config(config)))
    assert "base_model" not in metadata_of(card) and "without its weights" in card
    assert is_repo_id("gpt2") and not is_repo_id("a/b/c") and not is_repo_id("x|y") and not is_repo_id(None)


def test_a_config_file_is_not_taken_for_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.json").write_text("{}")
    model = tiny_model()
    model.config._name_or_path = "tiny.json"
    card = card_of(new_trainer(tmp_path / "out", model))
    assert "base_model" not in metadata_of(card) and "huggingface.co/tiny.json" not in card


def test_weights_in_four_bits_are_counted_as_what_they_stand_for():
    packed = torch.nn.Parameter(torch.zeros(16, 1, dtype=torch.uint8), requires_grad=False)
    packed.quant_state = types.SimpleNamespace(shape=torch.Size([4, 8]))
    assert origins.count_parameters([packed, torch.nn.Parameter(torch.zeros(3))]) == 35


def test_adapter_says_how_to_load_it(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2)
    trainer = after_training(tmp_path / "out", peft.get_peft_model(tiny_model(), config), max_steps=6)
    trainer.save_model()  # PEFT writes a card of its own
    card = card_of(trainer)
    fields = metadata_of(card)
    assert fields["library_name"] == "peft" and {"lora", "hf-hybrid"} <= set(fields["tags"])
    assert "base_model" not in fields and "The base model is not on the Hub" in card
    assert "PeftModel.from_pretrained(base" in section(card, "Usage") and "- peft " in section(card, "Versions")
    trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert f"{trainable:,} of them" in card


@pytest.mark.parametrize("options", [{"direction": "auto"}, {"enable_predict": False}], ids=["auto", "off"])
def test_a_lora_card_has_its_settings_and_nothing_of_leaps(monkeypatch, tmp_path, options):
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(sys, "argv", ["train.py"])  # the command of the tests may say anything
    targets = ["q_proj", "v_proj"]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=targets, r=4, lora_alpha=9, lora_dropout=0.05, use_rslora=True
    )
    defaults = dict.fromkeys(("warmup_phase_steps", "full_phase_steps", "correct_phase_steps", "max_predict_steps"))
    options = {**defaults, "leap_worth": None, **options}
    model, profiler = peft.get_peft_model(tiny_model(), config), MemoryProfilerCallback()
    trainer = after_training(tmp_path / "out", model, callbacks=[profiler], max_steps=12, auto_lr="off", **options)
    card = card_of(trainer)
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.*)` \|$", section(card, "Adapter"), re.MULTILINE))
    assert rows == {
        "r": "4", "lora_alpha": "9", "lora_dropout": "0.05", "target_modules": "q_proj, v_proj", "use_rslora": "True",
    }  # fmt: skip
    assert "Training: 400 sequences" in section(card, "Data")
    words = body_of(card).split("## Citation")[0].lower()
    words = words.replace("`enable_predict` | `false`", "")  # a setting that was made
    assert re.findall(r".*(?:leap|predict|phase|warmup \||probe|correct|\broll).*", words) == []
    assert re.search(r"^\| Train \| 12 \|", section(card, "Memory"), re.MULTILINE)


def test_licence_is_that_of_the_base_model(monkeypatch, saved, tmp_path):
    stated = ModelCardData(license="other", license_name="gemma-like", x=1)
    asked = []

    def model_info(name, timeout):
        asked.append(name)
        if name == "someone/unreachable":
            raise ConnectionError("no network")
        return types.SimpleNamespace(card_data=stated if name == "someone/stated" else None)

    assert license_of("someone/offline") == {}  # the tests run offline
    monkeypatch.setattr(origins, "model_info", model_info)
    model = LlamaForCausalLM.from_pretrained(saved)
    model.config._name_or_path = "someone/stated"
    trainer = new_trainer(tmp_path / "out", model)
    fields = metadata_of(card_of(trainer))
    assert (fields["license"], fields["license_name"]) == ("other", "gemma-like")
    assert metadata_of(card_of(trainer, license="mit"))["license"] == "mit"
    assert license_of("someone/silent") == {} and license_of("someone/unreachable") == {}
    card_of(trainer)
    assert asked.count("someone/stated") == 1  # not asked again for every checkpoint


def test_every_data_set_is_listed(tmp_path):
    trainer = new_trainer(tmp_path / "out", eval_dataset={"a|b": ByteText(8), "ok": ByteText(8)})
    listed = section(card_of(trainer), "Data")
    assert "- Training: 400 sequences" in listed and "- Evaluation `ok`: 8 sequences\n" in f"{listed}\n"


@pytest.mark.parametrize("local", ["./data/my_sft", str(TESTS), "tests/report"])  # the last is an id in form
def test_a_path_in_the_place_of_a_data_set_is_left_out(trained, monkeypatch, local):
    monkeypatch.chdir(TESTS.parent)
    card = card_of(trained, dataset_name=[local, "Salesforce/wikitext"])
    assert metadata_of(card)["datasets"] == ["Salesforce/wikitext"] and str(TESTS) not in card


def test_paths_in_the_place_of_names_do_not_reach_the_card(trained, saved):
    card = card_of(trained, model_name=str(saved / "mine"), finetuned_from=str(saved))
    assert metadata_of(card)["model_name"] == "mine" and "base_model" not in metadata_of(card)
    assert "fine-tuned from weights in a local folder" in card and str(saved) not in card


@pytest.mark.parametrize("damaged", ["README.md", "folder"])
def test_damaged_files_beside_the_model_do_not_stop_the_card(trained, damaged, monkeypatch, caplog):
    folder = Path(trained.args.output_dir)
    if damaged == "folder":
        monkeypatch.setattr(trained.args, "output_dir", str(folder / "hybrid_log.jsonl"))  # no folder can be made there
        trained.create_model_card()
        assert "could not be written" in caplog.text
        return
    (folder / damaged).write_text("---\ntags: [a\n---\n")
    card_of(trained)
    (folder / damaged).unlink()
    assert any(record.levelname == "WARNING" and damaged[:4].lower() in record.getMessage().lower()
               for record in caplog.records)  # fmt: skip


# Command, secrets, paths, trackers.


def test_command_has_no_secrets_and_no_home(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/alice"))
    argv = [
        f"{tmp_path}/train.py", "--hub_token", "s3cret", "--api-key=s3cret", "--key", "0123456789abcdef", "--pad_token",
        "<pad>", "--max_tokens", "5", "--data", "/home/alice/data set/x", "--out", f"{tmp_path}/out",
        "--url", "https://bob:s3cret@host/x", "--config", '{"secret": "s3cret", "lr": "1"}', "--id", TOKEN,
    ]  # fmt: skip
    shown = command(("mytoken",), argv)
    assert "s3cret" not in shown and TOKEN not in shown and "0123456789abcdef" not in shown and "alice" not in shown
    assert shown.startswith("python train.py --hub_token REMOVED --api-key=REMOVED --key REMOVED --pad_token '<pad>'")
    assert "--max_tokens 5" in shown and "--out out " in shown
    assert "--data ~/'data set/x'" in shown  # a shell does not expand what is quoted
    assert '"lr": "1"' in shown and '"secret": "REMOVED"' in shown


def test_command_of_modules_and_notebooks(monkeypatch, tmp_path):
    assert command(argv=["-c"]) is None and command(argv=["/x/ipykernel_launcher.py", "-f", "k.json"]) is None
    monkeypatch.setattr(sys, "argv", ["/site/trl/cli.py", "sft"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "trl.cli", "sft"], raising=False)
    assert command() == "python -m trl.cli sft"
    for module, shown in (("hf_hybrid", "hf-hybrid"), ("hf_hybrid.cli.trial", "hf-hybrid train")):
        monkeypatch.setattr(sys, "argv", ["/site/of_ours.py", "--max_steps", "2"])  # as launchers start processes
        monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "-m", module, *sys.argv[1:]], raising=False)
        assert command() == f"{shown} --max_steps 2"
    monkeypatch.setattr(sys, "argv", [str(Path(sys.executable).parent / "trl"), "sft", "-m", "gpt2"])
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, *sys.argv], raising=False)
    assert command() == "trl sft -m gpt2"
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py"), "-m", "gpt2"])
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-X", "dev", "-u", *sys.argv], raising=False)
    assert command() == "python train.py -m gpt2"
    (tmp_path / "train").touch()  # a script without a suffix is not a command
    assert command(argv=[str(tmp_path / "train"), "-m", "gpt2"]) == "python train -m gpt2"


def test_trackers_in_use_are_linked(monkeypatch, trained):
    run = types.SimpleNamespace(url="https://wandb.ai/me/run")
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=run))
    assert tracker_links() == {"Weights & Biases": run.url}
    assert "(https://wandb.ai/me/run)" in card_of(trained)


def test_method_of_the_trainer_is_named_and_cited(tmp_path):
    trainer = after_training(tmp_path / "out", max_steps=4)
    trainer.evaluate()
    trainer._name = "DPO"
    trainer._paper = {"title": "Direct {Preference}", "id": "2305.18290", "citation": "@inproceedings{x}"}
    card = card_of(trainer)
    assert "It was trained by DPO with" in card and "erplexity" not in section(card, "Results")
    assert r"DPO: [Direct \{Preference\}](https://huggingface.co/papers/2305.18290)" in section(card, "Citation")
    assert "```bibtex\n@inproceedings{x}\n```" in section(card, "Citation")
    assert "@software{hf_hybrid" in section(card, "Citation")


def test_rewards_are_those_of_the_log():
    log = [{"step": 1, "reward": 0.25}, {"step": 2, "loss": 0.0}, {"step": 3, "reward": 0.5}]
    trainer = types.SimpleNamespace(state=types.SimpleNamespace(log_history=log), reward_func_names=["exact_match"])
    found = rewards_of(trainer)
    first, last = {"step": 1, "mean": 0.25}, {"step": 3, "mean": 0.5}
    assert found == {"names": ["exact_match"], "first": first, "last": last}
    del trainer.reward_func_names
    assert rewards_of(trainer) is None


def test_the_software_is_cited_as_the_repository_says(trained, tmp_path):
    cff = yaml.safe_load((TESTS.parent / "CITATION.cff").read_text())
    cited = section(card_of(trained), "Citation")
    found = dict(re.findall(r'^  (\w+) += "\{?(.*?)\}?",?$', cited, re.MULTILINE))
    assert found == {
        "title": cff["title"], "author": cff["authors"][0]["name"], "license": cff["license"], "version": __version__,
    }  # fmt: skip
    assert re.search(r'^```bibtex\n@software\{hf_hybrid,\n(  \w+ += ".*",?\n){4}\}\n```$', cited, re.MULTILINE)
    known = {reference["title"]: reference["url"] for reference in cff["references"]}
    by_direction = {"orthogonal": ["Muon: An", "Muon is"], "gradient_memory": ["The AdEMAMix"], "none": []}
    for direction, papers in by_direction.items():
        trainer = after_training(tmp_path / direction, direction=direction)
        assert trainer.hybrid_summary()["leaps"]
        links = dict(re.findall(r"^- \[(.*)\]\((.*)\)$", section(card_of(trainer), "Citation"), re.MULTILINE))
        assert links.items() <= known.items() and len(links) == len(papers)
        assert all(title.startswith(start) for title, start in zip(links, papers))
    trainer = after_training(tmp_path / "muon", optim="muon", enable_predict=False, max_steps=2)
    assert "Muon is Scalable" in section(card_of(trainer), "Citation")


def test_hardware_names_the_accelerators(monkeypatch):
    properties = types.SimpleNamespace(name="NVIDIA H200", total_memory=140 * 2**30)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = hardware("cuda", processes=4, devices=4)
    assert found["Accelerator"] == "4 x NVIDIA H200, 140 GiB each" and found["Processes"] == "4"
    assert hardware("mps", processes=1, devices=1)["Accelerator"] == "1 x mps"
    assert "Accelerator" not in hardware("cpu", processes=1, devices=1)


CARDS = TESTS.parent / "model_cards"


@pytest.fixture(scope="module")
def generator() -> dict:
    return runpy.run_path(str(CARDS / "generate.py"))


def test_cards_of_this_repository_say_what_the_template_says(generator):
    """`python model_cards/generate.py --render` writes them again after a change of the template."""
    records = generator["read_records"]()
    assert {path.stem for path in CARDS.glob("*.md")} == set(generator["COMMANDS"]) == set(records)
    for name, words in generator["COMMANDS"].items():
        card = (CARDS / f"{name}.md").read_text(encoding="utf-8")
        assert card == generator["card_of"](name, records)
        run = words.split()[1] if words.startswith("export") else name
        command = section(card, "Command")
        assert card_errors(card) == [] and f"hf-hybrid {generator['COMMANDS'][run]}\n" in command
        if words.startswith("export"):
            assert not re.search(r"^A \S+ adapter", card, re.M) and "\n## Serving\n" in card
        for written in (card, json.dumps(records[name])):
            assert not re.search(r"/(?:home|root|work|tmp)/", written)


def test_records_of_cards_hold_what_a_trainer_records(trained, generator):
    """A fact that the card gained or lost needs new runs: `python model_cards/generate.py MODEL`."""
    facts = trained.model_card_facts()
    for name, record in generator["read_records"]().items():
        if not generator["COMMANDS"][name].startswith("export"):
            assert record.keys() == facts.keys()
            for part in ("model", "arguments", "memory", "state"):
                assert record[part].keys() == facts[part].keys(), part


def test_a_card_that_cannot_be_written_does_not_stop_the_training(tmp_path, monkeypatch, caplog):
    trainer = new_trainer(tmp_path / "out", max_steps=6)
    trainer.hub_model_id = "me/x"
    monkeypatch.setattr(trainer, "hybrid_summary", lambda: 1 / 0)
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    assert "could not be written" in caplog.text and not (tmp_path / "out" / "README.md").exists()


# Pushing, against a server on this machine.


@pytest.fixture(scope="module")
def scenario(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("hub")
    started = [sys.executable, str(TESTS / "hub" / "hub_scenario.py"), str(folder)]
    result = subprocess.run(started, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.processes
def test_what_was_pushed_loads_elsewhere(scenario):
    push = scenario["push"]
    assert push["equal"] and push["text"] == "A leap" and push["usage"] == "LlamaForCausalLM"
    assert {"model.safetensors", "README.md", "config.json", "tokenizer.json"} <= set(push["files"])
    whole = {f"last-checkpoint/hybrid_{name}" for name in ("state.safetensors", "manifest.json")}
    assert whole <= set(push["files"])
    assert push["multipart"] and push["messages"][-1] == "End of training"
    assert push["private"] and push["create"]["visibility"] == "private"


@pytest.mark.processes
def test_every_push_holds_the_real_weights_of_its_step(scenario):
    push, streamed = scenario["push"], scenario["streamed"]
    assert push["weights"] == push["saved"] and len(push["weights"]) == 5
    assert set(push["predicted"]) & {int(step) for step in push["weights"]}, "no push fell into Predict"
    # Probes in int8 change nothing that is pushed, nor does streaming.
    assert streamed["weights"] == streamed["resident"] and len(streamed["weights"]) == 4 and streamed["equal"]


@pytest.mark.processes
def test_cards_of_the_way_say_that_the_training_goes_on(scenario):
    cards = dict(zip(scenario["push"]["messages"], scenario["push"]["cards"]))
    half = cards["Training in progress, step 12"]
    assert card_errors(half) == [] and "Training is not finished: 12 of 20 steps." in half
    final = scenario["push"]["card"]
    assert card_errors(final) == [] and "not finished" not in final
    fields = metadata_of(final)
    assert fields["license"] == "apache-2.0" and fields["model-index"][0]["results"]


@pytest.mark.processes
def test_shards_load_and_the_model_carries_the_tags(scenario):
    sharded = scenario["sharded"]
    assert sum(name.startswith("model-0000") for name in sharded["files"]) > 1
    assert "model.safetensors.index.json" in sharded["files"] and "model.safetensors" not in sharded["files"]
    assert sharded["equal"] and "hf-hybrid" in sharded["tags"]


@pytest.mark.processes
def test_adapter_is_pushed_with_its_base_and_licence(scenario):
    card, fields = scenario["adapter"]["card"], metadata_of(scenario["adapter"]["card"])
    assert card_errors(card) == [] and scenario["adapter"]["usage"] == "PeftModelForCausalLM"
    assert fields["base_model"] == "tester/model" and fields["license"] == "apache-2.0"
    assert fields["library_name"] == "peft" and "base_model:adapter:tester/model" in fields["tags"]
    assert "adapter_model.safetensors" in scenario["adapter"]["files"]


@pytest.mark.processes
def test_failed_pushes_lose_nothing_and_say_so(scenario):
    failing = scenario["failing"]
    assert failing["steps"] == 20 and failing["equal"] and failing["on_server"] == [".gitattributes"]
    assert {"README.md", "model.safetensors", "tokenizer.json", "checkpoint-20"} <= set(failing["files"])
    assert failing["error"].startswith("HfHubHTTPError: Server error '500")
    for messages in (failing["background"], failing["messages"]):
        assert any("Pushing to `tester/failing` failed" in m and "hf upload" in m for m in messages)
    assert failing["again"]


@pytest.mark.processes
def test_token_in_the_arguments_is_not_pushed_with_them(scenario):
    warned = [message for message in scenario["failing"]["background"] if "`hub_token` is part" in message]
    assert not warned and not scenario["failing"]["token_in_arguments"]


def test_token_in_arguments_of_another_class_is_warned_of(tmp_path, caplog):
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", hub_token="hf_s3cret")
    HybridTrainer(tiny_model(), arguments, train_dataset=ByteText(4))
    assert "`hub_token` is part of the arguments" in caplog.text and "s3cret" not in caplog.text


@pytest.mark.processes
def test_example_pushes_a_card(scenario):
    card = scenario["example"]["card"]
    assert card_errors(card) == [] and scenario["example"]["usage"] == "LlamaForCausalLM"
    assert "09_push_to_hub.py --repo_id tester/example" in section(card, "Command")


def test_the_trainers_own_methods_come_before_those_of_the_trainer_that_they_extend():
    order = HybridTrainer.__mro__
    own = [cls for cls in order if cls.__module__.startswith("hf_hybrid.")]
    assert order[: len(own)] == tuple(own) and HybridTrainer.create_model_card is not Trainer.create_model_card
