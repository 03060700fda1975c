"""
A process that trains, pushes and downloads against a Hub on this machine.

`tests/hub/test_card_and_hub.py` starts it, as the endpoint is read when `huggingface_hub` is imported, and judges
what it writes down.

    python tests/hub/hub_scenario.py FOLDER
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import re
import runpy
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from rig.hub_server import TOKEN, LocalHub  # noqa: E402

ROOT = TESTS.parent
FOLDER = Path(sys.argv[1]).absolute()
HUB = LocalHub(part_size=1_000_000)
os.environ.pop("HF_HUB_OFFLINE", None)
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # bitsandbytes would load torch's compiler when it is imported
os.environ.update(HUB.environment(FOLDER / "home"))

import huggingface_hub.constants  # noqa: E402, F401  (before conftest, which turns the Hub off)
import torch  # noqa: E402
from conftest import ByteText, hybrid_config, tiny_model  # noqa: E402
from huggingface_hub import ModelCard, constants  # noqa: E402
from huggingface_hub.utils import get_session, hf_raise_for_status  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from rig.byte_llama import byte_tokenizer  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402

from hf_hybrid import HybridTrainer  # noqa: E402

gc.collect()
gc.freeze()  # each training collects garbage, and would look through all that was imported
IDS = torch.arange(24).view(2, 12)
RESULTS: dict = {}
TRAINERS: list[HybridTrainer] = []


def validate(card: ModelCard) -> None:
    """By huggingface_hub; the first major version asks huggingface.co whatever the endpoint is."""
    if int(huggingface_hub.__version__.partition(".")[0]) > 1:
        card.validate()
        return
    body = {"repoType": "model", "content": str(card)}
    hf_raise_for_status(get_session().post(f"{constants.ENDPOINT}/api/validate-yaml", json=body))


class Wait(TrainerCallback):
    """Lets every push end before the next step, so that the test knows what each commit must hold."""

    def on_save(self, args, state, control, **kwargs):
        for job in [job for push in pushes_under_way() for job in push.jobs]:
            job.exception()


def pushes_under_way() -> list:
    return [push for trainer in TRAINERS if (push := getattr(trainer, "push_in_progress", None)) is not None]


def trainer_of(name: str, model=None, **overrides) -> HybridTrainer:
    values = {"max_steps": 20, "logging_steps": 1, "use_cpu": True, **overrides}
    trainer = HybridTrainer(
        tiny_model() if model is None else model,
        hybrid_config(FOLDER / name, **{"leap_worth": 10.0, "probe_budget": 1.0, **values}),
        train_dataset=ByteText(400),
        eval_dataset=ByteText(16, offset=500),
        processing_class=byte_tokenizer([], pad_token="!", eos_token="!"),
        callbacks=[Wait()],
    )
    TRAINERS.append(trainer)
    return trainer


def logits(model) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=IDS).logits


def downloaded(repo: str, cache: str) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(repo, cache_dir=FOLDER / cache)


def run_usage(card: str) -> str:
    """Run the code of a card's usage section as a reader would."""
    snippet = re.search(r"## Usage\n.*?```python\n(.*?)```", card, re.DOTALL).group(1)
    runs_in: dict = {}
    exec(snippet, runs_in)
    return type(runs_in["model"]).__name__


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def pushed_weights(name: str) -> dict[str, str]:
    """By step: digests of the weights in the commits made while training."""
    commits = HUB.repos[f"tester/{name}"].branches["main"]
    steps = [(re.fullmatch(r"Training in progress, step (\d+)", commit.message), commit) for commit in commits]
    return {step[1]: digest(commit.files["model.safetensors"]) for step, commit in steps if step}


def saved_weights(name: str) -> dict[str, str]:
    """By step: digests of the weights in the checkpoints."""
    folders = (FOLDER / name).glob("checkpoint-*")
    return {path.name.split("-")[1]: digest((path / "model.safetensors").read_bytes()) for path in folders}


class Errors(logging.Handler):
    """What the package logs as errors and warnings."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("hf_hybrid").addHandler(self)

    def emit(self, record):
        self.messages.append(record.getMessage())


ERRORS = Errors()


def push_and_load() -> None:
    """Checkpoints are pushed while training, the end by the user, and another machine loads it."""
    wide = tiny_model(hidden_size=256, intermediate_size=256)  # int8 is for matrices of this size on
    trainer = trainer_of(
        "model", wide, push_to_hub=True, hub_strategy="checkpoint", hub_private_repo=True, save_strategy="steps",
        save_steps=4, weight_precision="predict=int8", leap_budget=100.0,
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    trainer.push_to_hub(language="en", license="apache-2.0", dataset="Python's help texts")
    repo, name = HUB.repos["tester/model"], "tester/model"
    model, card = downloaded(name, "first-cache"), ModelCard.load(name)
    validate(card)
    tokenizer = AutoTokenizer.from_pretrained(name, cache_dir=FOLDER / "first-cache")
    RESULTS["push"] = {
        "private": repo.private,
        "create": HUB.bodies["/api/repos/create"][0],
        "equal": torch.equal(logits(model), logits(trainer.model)),
        "text": tokenizer.decode(tokenizer("A leap").input_ids),
        "files": sorted(repo.files()),
        "messages": [commit.message for commit in repo.branches["main"]],
        "weights": pushed_weights("model"),
        "saved": saved_weights("model"),
        "predicted": [entry["step"] for entry in trainer.state.log_history if entry.get("hybrid/phase") == 2],
        "cards": [commit.files.get("README.md", b"").decode() for commit in repo.branches["main"]],
        "card": card.content,
        "usage": run_usage(card.content),
        "multipart": any(re.search(r"/lfs/\w+/\d+", path) for _, path in HUB.requests),
        "phases": trainer.hybrid_summary()["steps_by_phase"],
    }


def push_streamed() -> None:
    """The same run with its layers streamed: what is pushed on the way is what the resident run pushed."""
    trainer = trainer_of(
        "streamed", push_to_hub=True, hub_strategy="every_save", save_strategy="steps", save_steps=5,
        memory="stream",
    )  # fmt: skip
    trainer.train()
    resident = trainer_of("resident", save_strategy="steps", save_steps=5)
    resident.train()
    RESULTS["streamed"] = {
        "weights": pushed_weights("streamed"),
        "resident": saved_weights("resident"),
        "equal": torch.equal(logits(downloaded("tester/streamed", "streamed")), logits(trainer.model)),
    }


def push_shards() -> None:
    """`model.push_to_hub` in shards carries the tags; what it pushes loads."""
    trainer = trainer_of("sharded", max_steps=6)
    trainer.train()
    trainer.model.push_to_hub("tester/sharded", max_shard_size="40KB")
    RESULTS["sharded"] = {
        "files": sorted(HUB.repos["tester/sharded"].files()),
        "equal": torch.equal(logits(downloaded("tester/sharded", "sharded")), logits(trainer.model)),
        "tags": ModelCard.load("tester/sharded").data.tags,
    }


def push_adapter() -> None:
    """An adapter of a base that is on the Hub, with the base's licence."""
    base = AutoModelForCausalLM.from_pretrained("tester/model")
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=4))
    trainer = trainer_of("adapter", model, max_steps=8, hub_model_id="adapter")
    trainer.train()
    trainer.push_to_hub()
    card = ModelCard.load("tester/adapter")
    validate(card)
    RESULTS["adapter"] = {
        "card": card.content,
        "files": sorted(HUB.repos["tester/adapter"].files()),
        "usage": run_usage(card.content),
    }


def fail_and_push_again() -> None:
    """The server fails when the large files are there already: first in the background, then in the foreground."""
    HUB.fail("/commit/")
    ERRORS.messages.clear()
    trainer = trainer_of(
        "failing", push_to_hub=True, hub_strategy="every_save", save_strategy="steps", save_steps=10,
        hub_token=TOKEN,
    )  # fmt: skip
    trainer.train()
    background = list(ERRORS.messages)
    error = None
    try:
        trainer.push_to_hub()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    local = AutoModelForCausalLM.from_pretrained(FOLDER / "failing")
    RESULTS["failing"] = {
        "background": background,
        "error": error,
        "messages": ERRORS.messages[len(background) :],
        "steps": trainer.state.global_step,
        "equal": torch.equal(logits(local), logits(trainer.model)),
        "files": sorted(path.name for path in (FOLDER / "failing").iterdir()),
        "token_in_arguments": TOKEN.encode() in (FOLDER / "failing" / "training_args.bin").read_bytes(),
        "on_server": sorted(HUB.repos["tester/failing"].files()),
    }
    HUB.fail(None)
    trainer.push_to_hub()
    RESULTS["failing"]["again"] = torch.equal(logits(downloaded("tester/failing", "again")), logits(trainer.model))


def push_example() -> None:
    """The example, as a user starts it."""
    script = str(ROOT / "examples" / "09_push_to_hub.py")
    options = {
        "--repo_id": "tester/example", "--dry_run": "False", "--max_steps": "8", "--disable_tqdm": "True",
        "--use_cpu": "True", "--output_dir": "example", "--per_device_train_batch_size": "2",
    }  # fmt: skip
    os.chdir(FOLDER)
    sys.argv = [script, *(part for pair in options.items() for part in pair)]
    runpy.run_path(script, run_name="__main__")
    card = ModelCard.load("tester/example")
    validate(card)
    RESULTS["example"] = {"card": card.content, "usage": run_usage(card.content)}


def main() -> None:
    with HUB:
        push_and_load()
        push_streamed()
        push_shards()
        push_adapter()
        fail_and_push_again()
        push_example()
    (FOLDER / "results.json").write_text(json.dumps(RESULTS))


if __name__ == "__main__":
    main()
