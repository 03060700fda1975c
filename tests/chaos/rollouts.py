"""
`kill -9`, Ctrl-C and SIGTERM in trainings with GRPO and RLOO, and resume: the bits of a run that was left alone.

A life is one process of a training. It writes a journal: what reward functions, tools and environments were asked for,
with which prompts and completions, and where a step or an evaluation ended. A life is killed at one of these lines, or
some milliseconds later, which may be in a rollout, in a reward function, in a tool, between micro-batches, in an
evaluation or in a save. What the next life asks for must be, line by line, what the run that was left alone asked for
behind the step of the checkpoint. So no prompt is lost or repeated, and nothing is asked for again that is in a
checkpoint.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers import TrainerCallback

from chaos import Case, Result, kills, trainings
from chaos.children import Ended, Moment, run

STEPS = 8
STEP, EVALUATED, BEGUN = "step", "evaluated", "begun"
"""Lines of a journal that nobody was asked for."""
ASKED = ("reward", "tool", "reset", "rollout")
CLOCKS = ("step_time", "runtime", "per_second")


class Journal:
    """
    What a life asks for, a line each. `fatal` is the kind and the number of a line, seconds, and the signal that this
    process gets so many seconds after that line.
    """

    def __init__(self, path: Path, fatal: tuple[str, int, float, int] | None = None):
        self.file, self.fatal, self.seen = open(path, "a", buffering=1), fatal, dict[str, int]()

    def __call__(self, kind: str, *what: Any) -> None:
        self.file.write(f"{kind} {hashlib.sha256(repr(what).encode()).hexdigest()[:12]}\n")
        self.seen[kind] = self.seen.get(kind, 0) + 1
        if self.fatal is not None and (kind, self.seen[kind]) == self.fatal[:2]:
            seconds, number = self.fatal[2:]
            all_of_them = number == signal.SIGKILL  # of a run with several processes
            strike = partial(os.killpg, os.getpgid(0), number) if all_of_them else partial(os.kill, os.getpid(), number)
            if seconds:
                timer = threading.Timer(seconds, strike)
                timer.daemon = True
                timer.start()
            else:
                strike()


class Steps(TrainerCallback):
    """Writes down where steps and evaluations end."""

    def __init__(self, journal: Journal):
        self.journal = journal

    def on_train_begin(self, args, state, control, **kwargs):
        due = self.trainer.saver.evaluation_is_due
        self.journal.file.write(f"{BEGUN} {state.global_step} {int(due)}\n")

    def on_step_end(self, args, state, control, **kwargs):
        self.journal(STEP, state.global_step)

    def on_evaluate(self, args, state, control, **kwargs):
        self.journal(EVALUATED, state.global_step)


class SavesInsideSteps(TrainerCallback):
    """Saves between the micro-batches of steps, in the first of which completions are generated."""

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step % 4 < 2:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)


# What a user brings.


def drawn() -> list[float]:
    """A number of each of the global generators."""
    return [random.random(), float(numpy.random.random()), torch.rand(()).item()]


class Judge:
    """A reward function that draws from the global generators and from one of its own, and counts its calls."""

    __name__ = "judge"

    def __init__(self, journal: Journal):
        self.journal, self.own, self.calls = journal, numpy.random.default_rng(0), 0

    def __call__(self, prompts, completions, **columns) -> list[float]:
        from rig import rollouts

        self.journal("reward", prompts, completions, noise := [*drawn(), self.own.random(), self.calls])
        self.calls += 1
        plain = rollouts.reward if isinstance(prompts[0], str) else rollouts.reward_of_conversation
        columns["log_metric"]("noise", sum(noise))
        columns["log_extra"]("noise", [sum(noise)] * len(prompts))
        return [value if value in (0, 1) else value + sum(noise) / 50 for value in plain(prompts, completions)]

    def __getstate__(self) -> dict[str, int]:
        return {"calls": self.calls}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def judges_who_wait(journal: Journal) -> list[Callable]:
    """Two reward functions that TRL awaits together."""

    def judge(name: str) -> Callable:
        async def waits(prompts, completions, **_) -> list[float]:
            journal("reward", name, prompts, completions)
            await asyncio.sleep(0.002)
            return [sum(map(ord, completion)) % 5 / 5 + random.Random(name).random() for completion in completions]

        waits.__name__ = name
        return waits

    return [judge("first"), judge("second")]


def tools(journal: Journal) -> list[Callable]:
    def double(number: int) -> int:
        """
        Double a number.

        Args:
            number: The number.

        Returns:
            Twice the number.
        """
        journal("tool", number, noise := drawn())
        if noise[0] < 0.2:
            raise OSError("the tool is out of order")
        return 2 * number + int(3 * noise[1])

    return [double]


def environment(journal: Journal, **kinds) -> type:
    """An environment that makes its own prompts, by a generator of its own, and counts its games."""

    class Game:
        def __init__(self):
            self.own, self.games, self.total = random.Random(7), 0, 0

        def reset(self, prompt, **_):
            self.games, self.total = self.games + 1, 0
            self.asked = self.own.randint(0, 99)
            journal("reset", self.asked, self.games)
            return f" {self.asked}"

        def double(self, number: int) -> int:
            """
            Double a number.

            Args:
                number: The number.

            Returns:
                Twice the number.
            """
            journal("tool", number, self.total)
            self.total += number + self.games
            return 2 * number

        def get_reward(self) -> float:
            journal("reward", self.total, self.asked)
            return (self.total + self.asked) % 7 / 7

        def __getstate__(self):
            return {"games": self.games}

        def __setstate__(self, state):
            self.games = state["games"]

    return Game


class Rollout:
    """A `rollout_func` that completes by the trainer's model and marks tokens of its own."""

    def __init__(self, journal: Journal):
        self.journal, self.own = journal, torch.Generator().manual_seed(3)

    def __call__(self, prompts, trainer) -> dict[str, list]:
        ids = trainer._tokenize_prompts(prompts)[0]
        beside = torch.randint(0, 9, (), generator=self.own).item()
        self.journal("rollout", ids, beside)
        completions, _ = trainer._generate_single_turn(ids, None, {}, trainer.num_generations)
        masks = [[1] * len(completion) + [0] for completion in completions]
        completions = [[*completion, 2 + beside] for completion in completions]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None, "env_mask": masks}


# The trainings.

MIDDLE = {"steps_per_generation": 4, "num_iterations": 2, "save_strategy": "steps"}
ADAM = {"optim": "adamw_torch", "optim_args": None, "learning_rate": 3e-3}
KINDS: dict[str, dict[str, Any]] = {
    "GRPO, tools": {**ADAM, "save_steps": 1, "with": "tools", "max_completion_length": 48},
    "GRPO, games": {**ADAM, "save_steps": 1, "with": "environment", "max_completion_length": 48},
    "GRPO": {"save_steps": 3, "share_rows": "auto"},
    "GRPO, every step": {**ADAM, "save_steps": 1, "save_total_limit": 2, "logging_steps": 3, "log_completions": True},
    "GRPO, across windows": {"save_steps": 1, "steps_per_generation": 3, "gradient_accumulation_steps": 4},
    "GRPO, nothing to learn": {**ADAM, "save_steps": 1, "share": 1.0, "routed": True},
    "GRPO, tools, two processes": {"save_steps": 1, "with": "tools", "max_completion_length": 48, "processes": 2},
    "GRPO, own rollouts": {"save_steps": 1, "with": "rollout"},
    "GRPO, rewards that wait": {"save_steps": 1, "with": "async"},
    "GRPO, a reference that follows": {
        **ADAM, "save_steps": 1, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2,
        "ref_model_mixup_alpha": 0.5,
    },
    "GRPO, adaptive entropy": {**ADAM, "save_steps": 1, "use_adaptive_entropy": True},
    "GRPO, LoRA, dropout": {**ADAM, "save_steps": 1, "lora": True, "beta": 0.05},
    "GRPO, evaluations": {"save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2,
                          "per_device_eval_batch_size": 4},
    "GRPO, told to end": {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 1,
                          "per_device_eval_batch_size": 4, "enable_jit_checkpoint": True},
    "GRPO, saves inside steps": {"save_strategy": "no", "inside": True, "share_rows": "auto"},
    "GRPO, later epochs": {"save_steps": 1, "gradient_accumulation_steps": 8, "per_device_train_batch_size": 32,
                           "dataloader_num_workers": 1},
    "GRPO, stream": {"save_steps": 1, "stream": True},
    "RLOO": {**ADAM, "save_steps": 1, "trainer": "RLOO", "beta": 0.05},
    "RLOO, a reference that follows": {
        **ADAM, "save_steps": 3, "trainer": "RLOO", "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1,
        "ref_model_mixup_alpha": 0.3,
    },
}  # fmt: skip


def build(kind: str, folder: Path, journal: Journal):
    from rig import rollouts

    import hf_hybrid

    values = {"max_steps": STEPS, "save_only_model": False, **MIDDLE, **KINDS[kind]}
    values.pop("processes", None)
    brings, share = values.pop("with", None), values.pop("share", 0.5)
    name = values.pop("trainer", "GRPO")
    own: dict[str, Any] = {"reward_funcs": Judge(journal)}
    if brings == "async":
        own["reward_funcs"] = judges_who_wait(journal)
    elif brings == "tools":
        own |= {"tools": tools(journal), "data": rollouts.conversations}
    elif brings == "environment":
        own = {"environment_factory": environment(journal), "data": rollouts.conversations}
    elif brings == "rollout":
        own["rollout_func"] = Rollout(journal)
    if values.pop("stream", False):
        own["data"] = lambda share: rollouts.prompts(share).to_iterable_dataset(num_shards=2)
    if values.pop("lora", False):
        from peft import LoraConfig

        own["peft_config"] = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    torch.manual_seed(0)
    own["model"] = Routed.of(rollouts.policy()) if values.pop("routed", False) else rollouts.policy()
    if "beta" in values and "peft_config" not in own:  # TRL reads the reference from where the model comes from
        if not (base := folder.parent / "base").exists():
            own["model"].save_pretrained(base)
        own["model"] = type(own["model"]).from_pretrained(base)
    callbacks = [Steps(journal), *([SavesInsideSteps()] if values.pop("inside", False) else [])]
    kind = getattr(hf_hybrid, f"Hybrid{name}Trainer")
    trainer = rollouts.build(kind, folder, share, callbacks=callbacks, **own, **values)
    for callback in callbacks:
        callback.trainer = trainer
    return trainer


class Routed(torch.nn.Module):
    """An MLP of which a token's sign picks one half: not every batch reaches both."""

    def __init__(self, mlp: torch.nn.Module):
        super().__init__()
        self.mlp, self.extra = mlp, torch.nn.Parameter(torch.ones(()))

    @classmethod
    def of(cls, model):
        for layer in model.model.layers:
            layer.mlp = cls(layer.mlp)
        return model

    def forward(self, hidden):
        out = self.mlp(hidden)
        return out * self.extra if hidden.shape[1] > 9 else out


def train(kind: str, folder: Path, resume: bool, fatal: tuple | None = None) -> dict[str, Any]:
    """One life."""
    journals = folder.parent / "journals"
    journals.mkdir(exist_ok=True)
    life = len({path.name.split("-")[0] for path in journals.iterdir()})

    def trained():
        rank = int(os.environ.get("RANK", 0))
        trainer = build(kind, folder, Journal(journals / f"{life:02}-{rank}", fatal if rank == 0 else None))
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    if KINDS[kind].get("processes") == 2:
        trainings._begin_second(trained)
    return facts(trained(), folder)


def facts(trainer, folder: Path) -> dict[str, Any]:
    """What must not differ from a run that was left alone."""
    summary, digest = trainer.hybrid_summary(), hashlib.sha256()
    named = dict(trainer.accelerator.unwrap_model(trainer.model).state_dict())
    for place, states in trainer.optimizer.state_dict()["state"].items():
        named |= {f"{place}.{name}": value for name, value in states.items() if torch.is_tensor(value)}
    for name, value in sorted(named.items()):
        digest.update(name.encode() + value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    # `Trainer` begins the mean of a loss of several steps anew.
    left_out = CLOCKS if trainer.args.logging_steps == 1 else (*CLOCKS, "loss")
    log = [
        {name: value for name, value in entry.items() if not any(word in name for word in left_out)}
        for entry in trainer.state.log_history
        if "train_loss" not in entry
    ]
    names = ("rows", "rows_skipped", "backward_passes_avoided_exactly", "rows_of_rounding", "log_probs_skipped",
             "rows_decoded", "rows_decoded_saved", "prompt_tokens_shared")  # fmt: skip
    tables = sorted(folder.glob("completions/*.parquet"))
    return {
        "step": trainer.state.global_step,
        "bits": digest.hexdigest(),
        "counts": {name: summary[name] for name in names},
        "log": json.dumps(log, sort_keys=True),
        "tables": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tables},
    }


# The cases.


def reference(kind: str, folder: Path) -> tuple[Ended, Result]:
    """Train twice, left alone."""
    ends, case = [], f"references/{kind}/0"
    for name in ("first", "second"):
        (folder / name).mkdir()
        ended = run(train, kind, folder / name / "out", False, log=folder / f"{name}.log", watched=folder / name)
        if ended.how != "returned":
            return ended, Result(case, "cannot train", f"{ended.value}\n{ended.trace}")
        (ended.value["lives"],) = lives(folder / name)
        ends.append(ended)
    wrong = [name for name, value in ends[0].value.items() if value != ends[1].value[name]]
    return ends[0], Result(case, "other bits" if wrong else "same bits", str(wrong))


def lives(folder: Path) -> list[dict[str, list[str]]]:
    """Return the lines of the journals of each life, by process."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted((folder / "journals").glob("*-*")):
        life, rank = path.name.split("-")
        found.setdefault(life, {})[rank] = path.read_text().splitlines()
    return list(found.values())


def kill(case: Case) -> Result:
    """Kill and resume one training."""
    expected, done = case.expected.value, False
    for _ in range(kills.ATTEMPTS):
        again = case.interruptions == 0 or case.chance.random() < kills.AGAIN
        fatal, moment = planned(case) if again else (None, None)
        ended = kills.attempt(case, partial(train, fatal=fatal), moment=moment)
        done = ended.how == "returned" and ended.value["step"] == STEPS
        if done and case.interruptions == 0:  # it ended before it could be killed
            for made in filter(Path.is_dir, case.folder.iterdir()):
                shutil.rmtree(made)
            continue
        if done or not again or (ended.how == "raised" and "KeyboardInterrupt" not in ended.value):
            break
        case.interruptions += 1
    if not done:
        return case.result("hang" if ended.how == "hang" else "lost", f"{ended.how}: {ended.value}\n{ended.trace}")
    made, case.asked = lives(case.folder), len(asked_for(expected["lives"]))
    case.asked_twice = sum(map(len, map(asked_for, made))) - case.asked
    for number, life in enumerate(made):
        for rank, lines in life.items():
            if wrong := misled(lines, expected["lives"][rank]):
                return case.result("other calls", f"life {number}, process {rank}: {wrong}")
    wrong = [f"{name}: {value} instead of {expected[name]}" for name, value in ended.value.items()
             if value != expected[name]]  # fmt: skip
    return case.result("other bits" if wrong else "same bits", "\n".join(wrong))


def planned(case: Case) -> tuple[tuple[str, int, float, int] | None, Moment | None]:
    """Return a line at which a life ends and how, or a change of files or an instant."""
    chance, options, number = case.chance, KINDS[case.kind], signal.SIGKILL
    if "enable_jit_checkpoint" in options:
        number = signal.SIGTERM
    elif options.get("processes", 1) == 1 and chance.random() < 0.15:
        number = signal.SIGINT
    if number == signal.SIGKILL and chance.random() < 0.25:
        return None, kills.moment(chance, case.expected)
    kinds = [line.split()[0] for line in case.expected.value["lives"]["0"]]
    kind = chance.choice([name for name in (*ASKED, STEP) if name in kinds])
    seconds = 0.0 if chance.random() < 0.4 else chance.expovariate(1 / 0.02)
    return (kind, chance.randint(1, kinds.count(kind)), seconds, number), None


def asked_for(life: dict[str, list[str]]) -> list[str]:
    """Return what the processes of a life asked for."""
    return [line for lines in life.values() for line in lines if line.split()[0] in ASKED]


def misled(lines: list[str], expected: list[str]) -> str:
    """Return where the lines of a life are not those behind the same step of a run that was left alone, if anywhere."""
    if not lines:
        return ""
    marks, (_, step, evaluates) = [line.split()[0] for line in expected], lines[0].split()
    begin = 1
    if step != "0":
        begin = [place for place, mark in enumerate(marks) if mark == STEP][int(step) - 1] + 1
        next_step = marks.index(STEP, begin) if STEP in marks[begin:] else len(marks)
        if evaluates == "0" and EVALUATED in marks[begin:next_step]:
            begin = marks.index(EVALUATED, begin) + 1
    for place, (line, other) in enumerate(zip(lines[1:], expected[begin:])):
        if line != other:
            return f"from step {step} on line {place} is `{line}` instead of `{other}`"
    return "" if len(lines) - 1 <= len(expected) - begin else f"it goes on with {lines[len(expected) - begin + 1 :]}"
