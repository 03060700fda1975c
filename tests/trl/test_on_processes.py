"""TRL's trainers on two processes, under DDP and FSDP2: one process with all batches, or TRL's own on two processes."""

import functools
import json
import os

import pytest
import torch
from conftest import TIMES, mostly_slow
from peft import LoraConfig
from rig import deepspeed_on_cpu, fsdp2_on_cpu
from rig.processes import together
from safetensors.torch import load_file, save_file

pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.filterwarnings("ignore::FutureWarning")]

from rig import rollouts  # noqa: E402
from rig.chats import PHASES, dpo, sft  # noqa: E402
from rig.pairs import STATES, with_states  # noqa: E402
from rig.pairs import dpo as dpo_of_words  # noqa: E402
from rig.trainers import fitted  # noqa: E402
from trl import DPOConfig, DPOTrainer, GRPOTrainer, RLOOTrainer, SFTConfig, SFTTrainer  # noqa: E402

from hf_hybrid import (  # noqa: E402
    HybridDPOConfig,
    HybridDPOTrainer,
    HybridGRPOTrainer,
    HybridRLOOTrainer,
    HybridSFTConfig,
    HybridSFTTrainer,
)
from hf_hybrid.rows import recurrent  # noqa: E402

ADAPTERS = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
LEAPS = {**PHASES, "max_steps": 16, "leap_worth": 1.0}
PLAIN = {"enable_predict": False, "max_steps": 6}
TRAINERS = {
    "plain_sft": functools.partial(sft, HybridSFTTrainer, HybridSFTConfig, **PLAIN),
    "plain_dpo": functools.partial(dpo, HybridDPOTrainer, HybridDPOConfig, **PLAIN),
    "sft": functools.partial(sft, HybridSFTTrainer, HybridSFTConfig, **LEAPS),
    "dpo": functools.partial(dpo, HybridDPOTrainer, HybridDPOConfig, **LEAPS),
    "packed_sft": functools.partial(sft, HybridSFTTrainer, HybridSFTConfig, packing=True, **LEAPS),
    "dpo_of_adapters": functools.partial(dpo, HybridDPOTrainer, HybridDPOConfig, peft_config=ADAPTERS, **LEAPS),
}
SHARED = {"optim": "sgd", "learning_rate": 0.3, "max_steps": 8, "leap_gain": 0, "share_rows": "on"}


def dpo_with_states(architecture, trainer, config, folder, **options):
    """Without the router's loss, which is a mean of each process."""
    model, reference = with_states(architecture), with_states(architecture, scale=0.9)
    options |= {"learning_rate": 0.01, "router_aux_loss_coef": 0.0}
    return dpo_of_words(trainer, config, folder, model, reference, **options)


DPO_BUILDERS = {"shared_dpo": dpo}
DPO_BUILDERS |= {f"shared_dpo_of_{kind}": functools.partial(dpo_with_states, kind) for kind in STATES}
SHARING = {
    "shared_sft": (functools.partial(sft, HybridSFTTrainer, HybridSFTConfig), sft, SFTTrainer, SFTConfig),
    **{
        name: (functools.partial(build, HybridDPOTrainer, HybridDPOConfig), build, DPOTrainer, DPOConfig)
        for name, build in DPO_BUILDERS.items()
    },
}
ROLLOUTS = {"grpo": HybridGRPOTrainer, "plain_grpo": GRPOTrainer, "rloo": HybridRLOOTrainer, "plain_rloo": RLOOTrainer}
SHARDING = {"ddp": {}, "fsdp2": {"fsdp": True}}
SHARDING |= {f"zero{stage}": {"deepspeed": deepspeed_on_cpu.options(stage)} for stage in (1, 2, 3)}
DECISIONS = ("steps_by_phase", "leaps_by_verdict", "forward_only_passes", "roll_backs")


def build(name, folder, **options):
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if name in ROLLOUTS:
        loss = {"loss_type": "grpo"} if "grpo" in name else {}
        return rollouts.build(ROLLOUTS[name], folder, share=0.6, max_steps=4, **loss, **options)
    options["per_device_train_batch_size"] = 4 // processes
    return SHARING[name][0](folder, **SHARED, **options) if name in SHARING else TRAINERS[name](folder, **options)


def train(name, folder, **options):
    trainer = build(name, folder / name, **options)
    trainer.probe_sequences = 4
    trainer.train()
    summary = trainer.hybrid_summary() if hasattr(trainer, "hybrid_summary") else {}
    found = {key: value for key, value in summary.items() if key not in (*TIMES, "memory", "planner")}
    found["losses"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return found, {key: tensor.clone() for key, tensor in (state or {}).items()}  # ZeRO-3 gives the first process alone


def run(folder, sharding):
    on_deepspeed = "deepspeed" in SHARDING[sharding]
    (deepspeed_on_cpu if on_deepspeed else fsdp2_on_cpu).enable()
    recurrent.LEAST = 4  # tokens of a tiny prompt that a pass has to save
    for name in ROLLOUTS if on_deepspeed else (*TRAINERS, *SHARING, *ROLLOUTS):
        found, weights = train(name, folder, **SHARDING[sharding])
        rank = int(os.environ["RANK"])
        (folder / f"{name}{rank}.json").write_text(json.dumps(found))
        if rank == 0:
            save_file(weights, folder / f"{name}.safetensors")
    torch.distributed.barrier()


@pytest.fixture(scope="module", params=mostly_slow(SHARDING, ["ddp", "fsdp2"]))
def launched(request, tmp_path_factory):
    if "deepspeed" in SHARDING[request.param]:
        pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp(request.param)
    assert together(2, lambda: run(folder, request.param)) == [0, 0]
    return request.param, folder


def of(folder, name):
    return [json.loads((folder / f"{name}{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", TRAINERS)
def test_two_processes_are_one_with_their_batches_together(launched, tmp_path, name):
    sharding, folder = launched
    if "deepspeed" in SHARDING[sharding]:
        pytest.skip("makes no leaps")
    first, second = of(folder, name)
    alone, expected = train(name, tmp_path)
    assert first["leaps"] == second["leaps"] and first["losses"] == second["losses"]
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert {key: first[key] for key in DECISIONS} == {key: alone[key] for key in DECISIONS}
    assert len(first["leaps"]) >= 2 or name.startswith("plain")
    found = load_file(folder / f"{name}.safetensors")
    assert all(torch.allclose(found[key], expected[key], rtol=0, atol=1e-5) for key in expected)
    if name.startswith("dpo"):  # the plain one is TRL's, with `enable_predict=False`
        assert (first["tokens_shared"] > 0) is (sharding == "ddp")
        assert ("fsdp" in (first["plain_rows_because"] or "")) is (sharding == "fsdp2")


@pytest.mark.parametrize("name", SHARING)
def test_shared_rows_on_two_processes_are_trls_on_one(launched, tmp_path, name):
    sharding, folder = launched
    if "deepspeed" in SHARDING[sharding]:
        pytest.skip("rows/test_windows_on_processes.py has it")
    _, build_plain, trainer, config = SHARING[name]
    options = {option: value for option, value in SHARED.items() if option not in ("leap_gain", "share_rows")}
    plain = fitted(build_plain(trainer, config, tmp_path, per_device_train_batch_size=4, **options))
    found, expected = load_file(folder / f"{name}.safetensors"), plain.accelerator.get_state_dict(plain.model)
    assert all((found[key] - expected[key]).norm() <= 1e-6 * expected[key].norm() for key in expected)
    shares = sharding == "ddp" or name == "shared_sft"
    assert all((process["tokens_shared"] > 0) is shares for process in of(folder, name))


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_rows_without_advantage(launched, name):
    """Processes have different numbers of rows that count."""
    _, folder = launched
    found, plain = (load_file(folder / f"{run}.safetensors") for run in (name, f"plain_{name}"))
    assert all(torch.allclose(found[key], plain[key], rtol=0, atol=1e-7) for key in plain)
    for process in of(folder, name):
        assert process["rows_skipped"] > 0 and process["every_row_because"] is None


@pytest.mark.parametrize("what", ["completions", "rows"])
def test_a_process_that_cannot_save_does_not_leave_the_other_waiting(what, tmp_path):
    """One leaves completions to TRL, or computes every row. Both end at the weights of TRL's trainer."""

    def run():
        for kind in (GRPOTrainer, HybridGRPOTrainer):
            model = rollouts.policy()
            if os.environ["RANK"] == "1" and what == "completions":
                model.generate = functools.partial(type(model).generate, model)
            options = {"share": 0.7, "model": model, "max_steps": 3, "logging_steps": 1, "use_cpu": True}
            trainer = rollouts.build(kind, tmp_path / kind.__name__, **options)
            if os.environ["RANK"] == "1" and what == "rows" and kind is HybridGRPOTrainer:
                trainer._drawn_in_training = lambda: "by batch"  # as after an error
            trainer.train()
            if trainer.is_world_process_zero():
                torch.save(rollouts.weights(trainer.model), tmp_path / f"{kind.__name__}.pt")
        if os.environ["RANK"] == "0":
            because = trainer.hybrid_summary()["every_row_because"]
            assert because == (None if what == "completions" else "another process computes every row")

    assert together(2, run, timeout=60) == [0, 0]
    theirs, ours = (torch.load(tmp_path / f"{kind.__name__}.pt") for kind in (GRPOTrainer, HybridGRPOTrainer))
    assert max((weight - ours[name]).abs().max().item() for name, weight in theirs.items()) <= 1e-6


def ending_apart(name, folder, **options):
    """Train, with completions that end at the first token on one process and at the last on the other."""
    model, options = rollouts.policy(), {"max_steps": 4, "num_iterations": 2, "use_cpu": True, **options}
    ends = range(2, len(rollouts.TOKENIZER)) if os.environ["RANK"] == "0" else ()
    model.generation_config.eos_token_id = [1, *ends]
    return fitted(rollouts.build(ROLLOUTS[name], folder, model=model, share=0.3, loss_type="grpo", **options))


@pytest.mark.parametrize("options", [{}, rollouts.WITH_TOOLS], ids=["one turn", "tools"])
def test_completions_under_fsdp2_end_where_those_of_each_process_end(tmp_path, options):
    """TRL goes on until all have ended, and gathers the weights for each token. Weights at the end are those of DDP."""

    def run():
        expected = rollouts.weights(ending_apart("plain_grpo", tmp_path / "theirs", **options).model)
        fsdp2_on_cpu.enable()
        ours = ending_apart("grpo", tmp_path / "ours", fsdp=True, **options)
        found, summary = ours.accelerator.get_state_dict(ours.model), ours.hybrid_summary()
        assert summary["plain_rollouts_because"] is None and summary["prompt_tokens_shared"] > 0
        if os.environ["RANK"] == "0":  # it alone has them
            assert max((found[name] - weight).abs().max().item() for name, weight in expected.items()) <= 1e-6

    assert together(2, run, timeout=60) == [0, 0]
