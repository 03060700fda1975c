"""
What a user puts in place of a method of GRPO's or RLOO's trainer: it is called as often as in TRL, and its results are
trained on, wherever it is put.
"""

import functools
from collections import Counter

import pytest
import torch
from conftest import mostly_slow, weights

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

from peft import LoraConfig  # noqa: E402
from rig import rollouts  # noqa: E402
from rig.rollouts import build, distance  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOTrainer, RLOOTrainer  # noqa: E402

from hf_hybrid import HybridGRPOTrainer, HybridRLOOTrainer  # noqa: E402
from hf_hybrid.trl.rl import OF_GENERATION, OF_MICRO_BATCHES  # noqa: E402

KINDS = {"grpo": (GRPOTrainer, HybridGRPOTrainer), "rloo": (RLOOTrainer, HybridRLOOTrainer)}


def rewards(trainer, method, *args, **kwargs):
    found = method(*args, **kwargs)
    return found + 0.1 * torch.arange(len(found))[:, None]


def longer_completions(trainer, method, prompts):
    prompt_ids, completion_ids, *others = method(prompts)
    return (prompt_ids, [[*ids, 7, 9] for ids in completion_ids], *others)


def other_prompts(trainer, method, prompt_ids, *args, **kwargs):
    completed = method([[*reversed(ids), 5] for ids in prompt_ids], *args, **kwargs)
    cut = [ids[:4] for ids in (completed[0] if isinstance(completed, tuple) else completed)]
    return (cut, completed[1]) if isinstance(completed, tuple) else cut


def more_tokens(trainer, method, prompts):
    prompt_ids, *others = method(prompts)
    return ([[5, *ids] for ids in prompt_ids], *others)


def other_batch(trainer, method, inputs):
    batch = method(inputs)
    batch["advantages"] = batch["advantages"] + 0.1 * torch.arange(len(batch["advantages"]))
    batch["completion_mask"][:, -2:] = 0
    batch["note"] = torch.ones(len(batch["advantages"]))
    return batch


def other_inputs(trainer, method, inputs):
    batch = method(inputs)
    if trainer.model.training:
        assert batch is not None
        batch = {**batch, "completion_mask": batch["completion_mask"].clone()}
        batch["completion_mask"][:, :1] = 0
        batch["advantages"] = batch["advantages"] + 0.3
    return batch


def larger_step(trainer, method, *args, **kwargs):
    loss = method(*args, **kwargs)
    for parameter in trainer.model.parameters():
        parameter.grad.mul_(1.1)  # in each micro-batch
    return loss


def step_twice(trainer, method, *args, **kwargs):
    return method(*args, **kwargs) + method(*args, **kwargs)


def loss_with_penalty(trainer, method, *args, **kwargs):
    norms = sum(parameter.square().sum() for parameter in trainer.model.parameters())
    return method(*args, **kwargs) + 0.01 * norms


def masked_loss(trainer, method, model, inputs):
    mask = inputs["completion_mask"].clone()
    mask[::2, 1:] = 0
    return 0.5 * method(model, {**inputs, "completion_mask": mask})


def other_log_probs(trainer, method, *args, **kwargs):
    log_probs, *others = method(*args, **kwargs)
    return (log_probs * (1 + 0.1 * torch.arange(len(log_probs)))[:, None], *others)


def more_keys(trainer, method, logs, *args, **kwargs):
    logs["mine"] = 1.0
    return method(logs, *args, **kwargs)


CHANGES = {
    "_calculate_rewards": rewards,
    "_generate": longer_completions,
    "_generate_single_turn": other_prompts,
    "_tokenize_prompts": more_tokens,
    "_generate_and_score_completions": other_batch,
    "_prepare_inputs": other_inputs,
    "training_step": larger_step,
    "training_step twice": step_twice,
    "compute_loss": loss_with_penalty,
    "_compute_loss": masked_loss,
    "_get_per_token_logps_and_entropies": other_log_probs,
    "log": more_keys,
}
"""What users do with a method of this name: `method` is that which they override."""
OPTIONS = {"plain": {}, "replayed": {"num_iterations": 2}}


def as_method(change, calls, below):
    """Return a method that changes `below(trainer)`, and counts."""

    def method(trainer, *args, **kwargs):
        calls[change.__name__] += 1
        return change(trainer, below(trainer), *args, **kwargs)

    return method


def run(kind, hybrid, way, name, options, folder, monkeypatch):
    theirs, ours = KINDS[kind]
    change, calls, name = CHANGES[name], Counter(), name.split()[0]
    base = made = ours if hybrid else theirs
    if way in ("above", "below"):
        below = theirs if way == "below" else base
        made = type("Mine", (below,), {})
        setattr(made, name, as_method(change, calls, lambda trainer: getattr(super(made_of[0], trainer), name)))
        made_of = [made]
        if way == "below" and hybrid:
            made = type("Mixed", (ours, made), {})
    elif way == "class":
        method = getattr(theirs, name)
        monkeypatch.setattr(
            theirs,
            name,
            functools.wraps(method)(as_method(change, calls, lambda trainer: functools.partial(method, trainer))),
        )
    monkeypatch.setitem(rollouts.CONFIGS, made, rollouts.CONFIGS[base])
    more = {"share_rows": "auto"} if hybrid else {}
    trainer = build(made, folder, 0.5, **options, **more, max_steps=3, logging_steps=1)
    if way == "object":
        method = getattr(trainer, name)
        setattr(trainer, name, functools.partial(as_method(change, calls, lambda _: method), trainer))
    trainer.train()
    monkeypatch.undo()
    return weights(trainer.model), calls[change.__name__], trainer.state.log_history, trainer


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.mark.parametrize("options", mostly_slow(OPTIONS, ["replayed"]))
@pytest.mark.parametrize("kind", mostly_slow(KINDS, ["grpo"]))
@pytest.mark.parametrize("way", mostly_slow(["above", "below", "object", "class"], ["below"]))
@pytest.mark.parametrize("name", CHANGES)
def test_it_is_called_and_counts(name, way, kind, options, known, tmp_path, monkeypatch):
    case = kind, name, options
    if case not in known:
        known[case] = run(kind, False, "above", name, OPTIONS[options], tmp_path / "theirs", monkeypatch)[:3]
    theirs, calls, history = known[case]
    found, called, logged, trainer = run(kind, True, way, name, OPTIONS[options], tmp_path / "ours", monkeypatch)
    assert distance(theirs, found) <= 1e-6
    assert called == calls > 0
    assert [entry.get("mine") for entry in logged] == [entry.get("mine") for entry in history]
    name = name.split()[0]
    summary, places = trainer.hybrid_summary(), trainer.rollouts.users
    assert (places[OF_MICRO_BATCHES] is not None) is (name in OF_MICRO_BATCHES)
    assert (places[OF_GENERATION] is not None) is (name in OF_GENERATION)
    if name in OF_MICRO_BATCHES:
        assert f"{places[OF_MICRO_BATCHES]}` is not TRL's" in summary["every_row_because"]
    elif name not in OF_GENERATION:
        assert summary["rows_skipped"] > 0 and (summary["log_probs_skipped"] > 0 or options == "plain")
    assert summary["rows_decoded_saved"] > 0


# Callbacks that change what decides which rows are left out.


class Changes(TrainerCallback):
    """Calls `change` with the model (without its wrapper), the trainer and the step before each step."""

    def __init__(self, change):
        self.change, self.trainer = change, None

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.change(model, self.trainer, state.global_step)


def freezes_in_turn(model, trainer, step):
    for name, parameter in model.named_parameters():
        if "lora" in name or not hasattr(model, "peft_config"):
            parameter.requires_grad_(("layers.0" in name or "lm_head" in name) == step % 2)


def unfreezes_late(model, trainer, step):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name or step >= 2)


def sets_epsilon(model, trainer, step):
    trainer.epsilon_low = trainer.epsilon_high = 0.01 * step


def sets_beta(model, trainer, step):
    trainer.beta = 0.5 * (step >= 2)


def sets_loss(model, trainer, step):
    trainer.loss_type = ("dapo", "grpo", "bnpo", "dapo")[step]


def sets_quantile(model, trainer, step):
    trainer.top_entropy_quantile = 1.0 if step % 2 else 0.5


def sets_group(model, trainer, step):
    trainer.mask_truncated_completions = step % 2 == 1


def sets_hooks(model, trainer, step):
    if step == 1:
        model.get_input_embeddings().weight.register_hook(lambda gradient: gradient * 0.5 + 0.01)


def sets_temperature(model, trainer, step):
    trainer.generation_config.temperature, trainer.generation_config.top_k = 0.5 + step, 3 + step


def sets_dropout(model, trainer, step):
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3 * (step in (1, 3))


def puts_dropout(model, trainer, step):
    for module in model.modules():
        if "lora_dropout" in vars(module).get("_modules", {}) and step == 2:
            module.lora_dropout["default"] = torch.nn.Dropout(0.3)


def puts_a_loss(model, trainer, step):
    if step == 2:
        before = trainer._compute_loss
        trainer._compute_loss = lambda model, inputs: before(model, inputs) * (1 + inputs["advantages"][0].abs())


def puts_rewards(model, trainer, step):
    if step == 1:
        before = trainer._calculate_rewards
        trainer._calculate_rewards = lambda *args: before(*args) * torch.arange(8)[:, None] % 3


LORA = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}
ALL_OFF = {"exact_skips": "off", "rollouts": "off", "share_rows": "off"}
CALLBACKS = {
    "freezes in turn": (freezes_in_turn, {"share": 1.0}),
    "freezes adapters": (freezes_in_turn, {"share": 0.9, **LORA, "learning_rate": 1.0}),
    "unfreezes late": (unfreezes_late, {"share": 1.0}),
    "epsilon": (sets_epsilon, {"num_iterations": 2}),
    "beta": (sets_beta, {**LORA, "learning_rate": 1.0}),
    "loss": (sets_loss, {}),
    "quantile": (sets_quantile, {}),
    "truncated": (sets_group, {}),
    "hooks": (sets_hooks, {}),
    "a loss": (puts_a_loss, {}),
    "rewards": (puts_rewards, {"num_iterations": 2}),
    "temperature": (sets_temperature, {}),
    "dropout": (sets_dropout, ALL_OFF),
    "dropout of adapters": (puts_dropout, {**ALL_OFF, **LORA, "learning_rate": 1.0}),
}


def run_with(kind, change, folder, share=0.5, **options):
    callback = Changes(change)
    options = {"share_rows": "auto", **options}
    if kind in (GRPOTrainer, RLOOTrainer):
        options = {name: value for name, value in options.items() if name not in ALL_OFF}
    torch.manual_seed(0)  # adapters begin at random
    trainer = build(kind, folder, share, callbacks=[callback], max_steps=4, **options)
    callback.trainer = trainer
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", mostly_slow(KINDS, ["grpo"]))
@pytest.mark.parametrize("name", mostly_slow(CALLBACKS, ["freezes adapters", "unfreezes late", "beta", "dropout"]))
def test_what_a_callback_changes_counts(name, kind, tmp_path):
    change, options = CALLBACKS[name]
    theirs, ours = (run_with(base, change, tmp_path / base.__name__, **options) for base in KINDS[kind])
    assert distance(weights(theirs.model), weights(ours.model)) <= 1e-6
    assert ours.hybrid_summary()["failed_savings"] == []
