"""Preemption: processes that are asked to end at different moments save the same step, and go on to the same bits."""

import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import ByteText, mostly_slow, tiny_model, weights
from rig import trainers
from rig.processes import together
from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from hf_hybrid import HybridTrainer
from hf_hybrid.saving.manifest import is_committed
from hf_hybrid.saving.preemption import Preemption

STEPS = 24


class Asked(TrainerCallback):
    """Sends this process a signal some time after a step, and makes steps last long enough for it."""

    def __init__(self, delays, number, step=5, pause=0.02):
        self.delays, self.number, self.step, self.pause = delays, number, step, pause
        self.timer: threading.Timer | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        time.sleep(self.pause)
        delay = self.delays[args.process_index]
        if state.global_step == self.step and delay is not None:
            self.timer = threading.Timer(delay, os.kill, (os.getpid(), self.number))
            self.timer.start()

    def on_train_end(self, *args, **kwargs):
        if self.timer is not None:
            self.timer.cancel()  # a process that has ended its training would be killed


def trainer_of(folder, callbacks=(), leaps=False, **options):
    torch.manual_seed(0)
    values = {"max_steps": STEPS, "per_device_train_batch_size": 1, "save_strategy": "steps", "save_steps": STEPS}
    values |= {"ddp_find_unused_parameters": False, "enable_jit_checkpoint": True, "enable_predict": leaps, **options}
    model = tiny_model(attention_dropout=0.1)
    return trainers.build(folder, model=model, samples=200, callbacks=list(callbacks), **values)


def preempted(folder: Path, delays, leaps: bool, number: int = signal.SIGTERM) -> None:
    """Train on as many processes as there are delays, and go on when they have ended. Leaves the weights in a file."""

    def first() -> None:
        trainer = trainer_of(folder, [Asked(delays, number)], leaps)
        trainer.train()
        assert trainer.preemption.ended and 5 < trainer.state.global_step < STEPS
        (folder / f"ended-{trainer.args.process_index}.json").write_text(json.dumps(trainer.state.global_step))

    def second() -> None:
        trainer = trainer_of(folder, leaps=leaps)
        trainer.train(resume_from_checkpoint="auto")
        assert not trainer.preemption.ended
        torch.save(weights(trainer.model), folder / f"weights-{trainer.args.process_index}.pt")

    folder.mkdir(exist_ok=True)
    for part in (first, second):
        assert together(len(delays), part, timeout=120) == [0] * len(delays)
    steps = {json.loads(path.read_text()) for path in folder.glob("ended-*.json")}
    assert len(steps) == 1 and is_committed(folder / f"checkpoint-{steps.pop()}")


def undisturbed(folder: Path, processes: int, leaps: bool) -> dict:
    """Train without a signal, and return the weights."""

    def all_of_it() -> None:
        trainer = trainer_of(folder, leaps=leaps)
        trainer.train()
        if trainer.is_world_process_zero():
            torch.save(weights(trainer.model), folder / "weights.pt")

    folder.mkdir()
    assert together(processes, all_of_it, timeout=120) == [0] * processes
    return torch.load(folder / "weights.pt")


def assert_same(folder: Path, expected: dict, processes: int = 2) -> None:
    """With three processes DDP adds gradients in another order in the first step, also in plain Trainer."""
    for path in folder.glob("weights-*.pt"):
        found = torch.load(path)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor) or (
                processes > 2 and torch.allclose(found[name], tensor, atol=1e-4)
            )


@pytest.mark.processes
def test_two_processes_that_are_asked_at_different_moments_save_the_same_step(tmp_path):
    expected = undisturbed(tmp_path / "whole", 2, leaps=False)
    for number, delays in enumerate([(0.0, 0.1), (None, 0.03)]):
        preempted(tmp_path / str(number), delays, leaps=False)
        assert_same(tmp_path / str(number), expected)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("leaps", [False, True])
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_that_are_asked_at_any_skew_go_on_to_the_same_bits(tmp_path, processes, leaps):
    expected = undisturbed(tmp_path / "whole", processes, leaps)
    chance = random.Random(f"{processes} {leaps}")
    for number in range(int(os.environ.get("PREEMPTIONS", "3"))):
        delays = [chance.choice([None, 0.0, chance.uniform(0, 0.3)]) for _ in range(processes)]
        delays[chance.randrange(processes)] = chance.uniform(0, 0.2)
        kind = chance.choice([signal.SIGTERM, signal.SIGUSR1])
        preempted(tmp_path / str(number), delays, leaps, kind)
        assert_same(tmp_path / str(number), expected, processes)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_one_process_saves_at_the_end_of_the_step_in_which_the_signal_arrives(tmp_path, number):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}

    class Asks(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                os.kill(os.getpid(), number)

    trainer = trainer_of(tmp_path, [Asks()], gradient_accumulation_steps=2)
    # As transformers' own tests find its callback.
    (callback,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, JITCheckpointCallback))
    assert callback is trainer.preemption and callback.trainer is trainer and callback.jit_manager is not None
    assert {number: signal.getsignal(number) for number in before} == before
    trainer.train()
    assert trainer.state.global_step == 6 and is_committed(tmp_path / "checkpoint-6") and trainer.preemption.ended
    assert {number: signal.getsignal(number) for number in before} == before


def test_outside_of_the_main_thread_it_is_said_that_no_signal_is_handled(tmp_path, caplog):
    def in_thread(function):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function).result()

    with pytest.raises(ValueError, match="main thread"):
        in_thread(lambda: trainer_of(tmp_path))
    trainer = trainer_of(tmp_path)
    in_thread(trainer.train)
    assert trainer.state.global_step == STEPS and "Call `train` in the main thread" in caplog.text


def test_without_the_option_nothing_is_added(tmp_path):
    trainer = trainers.build(tmp_path, samples=8)
    assert trainer.preemption is None
    assert not [c for c in trainer.callback_handler.callbacks if isinstance(c, Preemption)]


def test_an_evaluation_that_is_no_best_one_does_not_keep_the_checkpoint_from_being_saved(tmp_path):
    class Worse(HybridTrainer):
        def evaluation_loop(self, *args, **kwargs):
            found = super().evaluation_loop(*args, **kwargs)
            found.metrics["eval_loss"] = 1.0 + self.state.global_step
            return found

    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "metric_for_best_model": "eval_loss"}
    trainer = trainer_of(tmp_path, [Asked([0.0], signal.SIGUSR1)], kind=Worse, eval_dataset=ByteText(2), **options)
    trainer.train()
    step = trainer.state.global_step
    assert 5 <= step < STEPS and is_committed(tmp_path / f"checkpoint-{step}")


def test_the_last_checkpoint_stays_though_another_is_the_best(tmp_path):
    """`Trainer` deletes it with `save_total_limit=1` at the end of a training."""
    options = {"max_steps": 12, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": 1}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_dataset": ByteText(4)}
    trainer = trainer_of(tmp_path, [Asked([0.0], signal.SIGUSR1, step=4, pause=0.1)], **options)
    losses = iter(range(1, 20))
    trainer._evaluate = lambda trial, ignored: {"eval_loss": float(next(losses))}
    trainer.train()
    last = trainer.state.global_step
    assert trainer.preempted and trainer.state.best_global_step == 2
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", f"checkpoint-{last}"}


class Ended(TrainerCallback):
    """Asks this process to end in a step, and counts its evaluations."""

    def __init__(self, step=None):
        self.step, self.evaluated = step, []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_evaluate(self, args, state, control, **kwargs):
        self.evaluated.append(state.global_step)


def evaluated(folder, strategy, ended, resume=None, **options):
    """Train six steps with an evaluation after every second one, or each epoch of three."""
    torch.manual_seed(0)
    values = {"max_steps": 6, "per_device_train_batch_size": 2, "eval_strategy": strategy, "eval_steps": 2}
    values |= {"save_strategy": strategy, "save_steps": 2, "load_best_model_at_end": True}
    values |= {"metric_for_best_model": "loss", "enable_jit_checkpoint": True, "samples": 6, **options}
    model = tiny_model(attention_dropout=0.1)
    data = {"eval_dataset": ByteText(4, offset=99)}
    return trainers.train(folder, model=model, callbacks=[ended], resume=resume, **data, **values)


def logged(trainer):
    """The log without what a clock says."""
    timed = ("runtime", "per_second", "flos")
    entries = trainer.state.log_history
    return [{k: v for k, v in entry.items() if not any(word in k for word in timed)} for entry in entries]


@pytest.mark.parametrize("options", [{"enable_predict": False}, {"direction": "orthogonal"}], ids=["off", "leaps"])
@pytest.mark.parametrize(
    "strategy, step", mostly_slow([("steps", 4), ("epoch", 3), ("epoch", 4)], [("steps", 4), ("epoch", 4)])
)
@pytest.mark.long
def test_an_evaluation_at_the_last_step_is_left_to_the_run_that_goes_on(tmp_path, strategy, step, options):
    whole = evaluated(tmp_path / "whole", strategy, Ended(), **options)
    first = Ended(step)
    evaluated(tmp_path / "out", strategy, first, **options)
    assert is_committed(tmp_path / "out" / f"checkpoint-{step}") and step not in first.evaluated
    second = Ended()
    again = evaluated(tmp_path / "out", strategy, second, "auto", **options)
    assert first.evaluated + second.evaluated == ([2, 4, 6] if strategy == "steps" else [3, 6])
    assert logged(again)[:-1] == logged(whole)[:-1]  # the last one is of one call of `train`
    assert again.state.best_global_step == whole.state.best_global_step
    assert Path(again.state.best_model_checkpoint).name == Path(whole.state.best_model_checkpoint).name
    for name, tensor in weights(whole.model).items():
        assert torch.equal(weights(again.model)[name], tensor)
