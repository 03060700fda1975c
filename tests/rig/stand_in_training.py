"""
A process in the place of `hf-hybrid train` where sweeps are tested: it leaves what a training does, in no time.

The best rate is 1.5e-3, and above 1 a training diverges. At 666 it does not work. At 7e-4 it is killed once, at 8e-4
each time, by `KILLED_BY`. Chance kills a share `KILLED` of all, and a step takes `STEP_SECONDS`.

    python -S tests/rig/stand_in_training.py COMMAND --config FILE ...
"""

import hashlib
import json
import math
import os
import random
import re
import sys
import threading
import time
from pathlib import Path

TEXT = Path(sys.argv[sys.argv.index("--config") + 1]).read_text()


def option(name: str) -> str:
    return re.search(f"^{name}: (.*)$", TEXT, re.M)[1]


def rewards(reward: float, prefix: str) -> dict[str, float]:
    return {f"{prefix}reward": reward} if re.search("^reward:", TEXT, re.M) else {}


folder, rate, steps = Path(option("output_dir")), float(option("learning_rate")), int(option("max_steps"))
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
if rate == 666:
    sys.exit(f"it does not work, says {os.environ.get('PLAIN', 'nobody')}\n 50%|#####     | 5/10")
out = [str(sys.argv)]
for name in ("HF_HYBRID_PRIVATE_OPTIONS", "WANDB_API_KEY", "PLAIN"):
    out.append(f"{name} {hashlib.sha256(os.environ.get(name, '').encode()).hexdigest()}")
sys.stdout.write("\n".join(out) + "\n")
if rate in (7e-4, 8e-4) and not (folder / "was-killed").exists():
    if rate == 7e-4:
        (folder / "was-killed").touch()
    sys.stdout.write(" 3%|3         | 6/200")
    sys.stdout.flush()
    os.kill(os.getpid(), int(os.environ.get("KILLED_BY", 9)))
    time.sleep(60)
chance = random.Random(f"{folder} {time.time_ns()}")
fate = chance.random() < float(os.environ.get("KILLED", 0)) and chance.randrange(1, steps + 1)
end = 2 + math.log10(rate / 1.5e-3) ** 2
with (folder / "hybrid_log.jsonl").open("a") as log:
    for step in range(steps + 1):
        loss = end if rate < 1 else math.nan
        line = {"step": step, "loss": loss, **rewards(-loss, "")}
        line = line if step else {"step": 0, "begun": True, "max_steps": steps}
        log.write(json.dumps(line).replace("NaN", "null") + "\n")
        log.flush()
        time.sleep(float(os.environ.get("STEP_SECONDS", 0)))
        if step == 5:
            time.sleep(1 if end > 2.5 or rate > 1 else 0.05)  # long enough to be ended
        if fate and step == fate:
            os.kill(os.getpid(), chance.choice([9, 15]))
            time.sleep(9)
(folder / "model.safetensors").write_text(f"weights of {rate}")
(folder / "eval_results.json").write_text(json.dumps({"eval_loss": end, **rewards(1 - end, "eval_")}))
