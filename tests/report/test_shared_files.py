"""What a run leaves for others (options, summary, log, profile, report, card) names no folder, and holds no secret."""

import json
import shutil
import sys

from conftest import ByteText, hybrid_config, tiny_model
from rig import trainers
from transformers import AutoModelForCausalLM

from hf_hybrid import HybridTrainer
from hf_hybrid.records.profiler import MemoryProfilerCallback
from hf_hybrid.report.page import write_report

# Files of Trainer's own that are pushed too: it needs the paths in them.
OF_TRAINER = {"training_args.bin", "trainer_state.json"}


def test_no_shared_file_names_a_folder_of_the_machine(tmp_path, monkeypatch):
    home, folder = tmp_path / "home-of-ada", tmp_path / "disk-of-ada" / "out"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # plots take time
    tiny_model().save_pretrained(home / "models" / "base")
    model = AutoModelForCausalLM.from_pretrained(home / "models" / "base")
    config = hybrid_config(folder, max_steps=8, save_strategy="steps", save_steps=4, run_name=str(home / "runs" / "a"))
    for resume in (None, str(folder / "checkpoint-4")):
        if resume is not None:
            shutil.rmtree(folder / "checkpoint-8")  # a run goes on from the last one
        trainer = HybridTrainer(model, config, train_dataset=ByteText(64), callbacks=[MemoryProfilerCallback()])
        trainer.train(resume_from_checkpoint=resume)
    assert trainer.hybrid_summary()["resumed"]["checkpoint"] == str(folder / "checkpoint-4"), "memory holds it in full"
    trainer.save_model()
    trainer.create_model_card()
    write_report(folder)
    files = [path for path in folder.rglob("*") if path.is_file() and "checkpoint-" not in str(path)]
    names = {path.name for path in files}
    assert {"README.md", "hybrid_config.json", "hybrid_summary.json", "hybrid_log.jsonl"} < names
    assert {"report.html", "report.json", "steps.jsonl"} < names
    found = {path.name for path in files if b"-of-ada" in path.read_bytes() or bytes(tmp_path) in path.read_bytes()}
    assert found <= OF_TRAINER
    assert json.loads((folder / "hybrid_config.json").read_text())["output_dir"] == "out"


def test_no_shared_file_holds_a_secret(monkeypatch, tmp_path):
    address = "https://a.blob.core.windows.net/c/rows?sv=1&sig=s3cr3tValue9"
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", address, "--header", "Authorization: Bearer s3cr3tValue9"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    options = {"max_steps": 8, "run_name": address, "fsdp_config": {"api_key": "s3cr3tValue9"}}
    trainer = trainers.train(tmp_path, samples=64, **options)
    trainer.log({"loss": 1.0, "said": "password=s3cr3tValue9", "token": "s3cr3tValue9"})
    trainer.create_model_card()
    write_report(tmp_path)
    texts = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert [name for name, text in texts.items() if b"s3cr3tValue9" in text and name not in OF_TRAINER] == []
    assert [name for name in texts if b"REMOVED" not in texts[name]] == ["hybrid_summary.json"]
