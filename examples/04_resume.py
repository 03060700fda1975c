"""
Kill a run inside a Predict phase, resume it, and compare with an uninterrupted run (under a minute on two idle CPU
cores).

    python examples/04_resume.py
    python examples/04_resume.py --save_steps 5 --max_steps 80

The script starts itself in another process. That process writes a checkpoint inside a Predict phase and kills itself
with SIGKILL. The script then resumes from this checkpoint and compares the final models weight by weight, bit by bit.
Your own script needs only `trainer.train(resume_from_checkpoint=True)`.

Nothing is downloaded. Every option of HybridConfig is a flag.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from hf_hybrid.cli.console import quiet_imports

with quiet_imports():
    from safetensors.torch import load_file
    from transformers import HfArgumentParser, TrainerCallback

    from hf_hybrid import HybridConfig, HybridTrainer

compare = runpy.run_path(str(Path(__file__).with_name("02_compare_with_trainer.py")))


@dataclass
class ScriptArguments:
    die: bool = field(default=False, metadata={"help": "The script sets this when it starts itself: die in Predict."})


class DieInPredict(TrainerCallback):
    """Send SIGKILL, which no program can catch, after a checkpoint inside a Predict phase."""

    def on_save(self, args, state, control, **kwargs):
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        saved = json.loads((checkpoint / "hybrid_state.json").read_text(encoding="utf-8"))
        if saved["parts"]["leaps"]["controller"]["phase"] == "predict":
            print(
                f"step {state.global_step}: checkpoint written, the next step belongs to Predict: SIGKILL", flush=True
            )
            os.kill(os.getpid(), signal.SIGKILL)


def train(args: HybridConfig, callbacks=(), resume: bool = False) -> HybridTrainer:
    train_set, _ = compare["byte_blocks"](64)
    trainer = HybridTrainer(
        compare["small_llama"](args.seed),
        args,
        train_dataset=train_set,
        data_collator=compare["collate"],
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return trainer


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, HybridConfig))
    parser.set_defaults(
        output_dir="out/resume", max_steps=60, learning_rate=3e-3, save_steps=1, save_total_limit=2,
        warmup_phase_steps=5, full_phase_steps=3, leap_worth=0.6, max_predict_steps=4, leap_budget=1.0,
        report_to="none", disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    script, args = parser.parse_args_into_dataclasses()
    folder = args.output_dir
    args.output_dir = f"{folder}/interrupted"
    if script.die:
        train(args, [DieInPredict()])
        raise SystemExit("no step was predicted, so nothing was killed")

    shutil.rmtree(folder, ignore_errors=True)
    status = subprocess.run([sys.executable, *sys.argv, "--die", "True"]).returncode
    if status != -signal.SIGKILL:
        raise SystemExit(f"The run was not killed. It ended with status {status}.")
    resumed = train(args, resume=True)
    print(f"resumed: {resumed.hybrid_summary()['steps_by_phase']}", flush=True)

    args.output_dir, args.save_strategy = f"{folder}/whole", "no"
    whole = train(args)
    print(f"never interrupted: {whole.hybrid_summary()['steps_by_phase']}")
    ours, theirs = (load_file(f"{folder}/{part}/model.safetensors") for part in ("whole", "interrupted"))
    different = [name for name in ours if not ours[name].equal(theirs[name])]
    print(f"{len(ours) - len(different)} of {len(ours)} tensors are equal to the last bit")
    raise SystemExit(1 if different else 0)


if __name__ == "__main__":
    main()
