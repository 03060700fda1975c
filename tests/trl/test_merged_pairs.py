"""Micro-batches of preference pairs are computed in one pass of each model, and training stays TRL's."""

import collections
import functools
import logging
import os

import pytest
import torch
from conftest import assert_same_weights, mostly_slow, weights

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

from peft import LoraConfig  # noqa: E402
from rig.fails_backward import Fails  # noqa: E402
from rig.pairs import (  # noqa: E402
    LOSSES,
    PAIRS,
    apart,
    build,
    dpo,
    history,
    lora,
    lora_and_head,
    trained_adapters,
    with_states,
)  # fmt: skip
from rig.processes import together  # noqa: E402
from rig.trainers import fitted  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.nn.attention import varlen  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback  # noqa: E402
from trl import DPOConfig, DPOTrainer  # noqa: E402

from hf_hybrid import HybridDPOConfig, HybridDPOTrainer  # noqa: E402
from hf_hybrid import trainer as trainer_module  # noqa: E402
from hf_hybrid.compat import checkpointing_option  # noqa: E402
from hf_hybrid.rows import attention, costs, merging, recurrent  # noqa: E402

WINDOW = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 3}
"""Windows of three micro-batches. The epoch's last one has fewer: 24 pairs are four windows."""


@pytest.fixture(autouse=True)
def launches_cost(monkeypatch):
    """As on a GPU. On a CPU micro-batches are merged only for what they share."""
    monkeypatch.setattr(merging, "WITHOUT_LAUNCHES", ())


def entered(module):
    """Return a list that gets the arguments of each forward pass of a module. A hook would be a user's."""
    seen, own = [], module.forward

    @functools.wraps(own)
    def forward(*args, **kwargs):
        seen.append((args, kwargs))
        return own(*args, **kwargs)

    module.forward = forward
    return seen


def both(folder, theirs=DPOTrainer, ours=HybridDPOTrainer, **options):
    """Train with TRL and with this package. Return both trainers."""
    trained = []
    for trainer, config in ((theirs, DPOConfig), (ours, HybridDPOConfig)):
        made = {name: value() if callable(value) else value for name, value in {**WINDOW, **options}.items()}
        trained.append(fitted(dpo(trainer, config, folder / trainer.__name__, **made)))
    return trained


def assert_same(plain, merged, *, saved=True):
    """Weights and all that is logged are TRL's, and micro-batches were merged, or were not."""
    assert apart(weights(plain.model), weights(merged.model)) < 1e-6
    for theirs, ours in zip(history(plain), history(merged), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert merged.hybrid_summary()["plain_rows_because"] is None
    assert bool(merged.hybrid_summary()["micro_batches_saved"]) is saved


CASES = {
    "reference": {},
    "adapters": {"peft_config": lora, "reference": None},
    "adapters and head": {"peft_config": lora_and_head, "reference": None},
    "adapters trained before": {"model": trained_adapters, "reference": None},
    "adapters and reference": {"peft_config": lora},
    "reference beforehand": {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 4, "ld_alpha": 0.5},
    "reference that follows": {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5},
    "every loss": {"loss_type": LOSSES, "label_smoothing": 0.1, "learning_rate": 0.01},
    "weighted": {"use_weighting": True, "f_divergence_type": "js_divergence", "max_grad_norm": 0.1},
    "nothing recomputed": {checkpointing_option(): False},
    "states": {"model": lambda: with_states("bamba"), "reference": lambda: with_states("bamba", 0.9)},
    "evaluation": {"eval_dataset": PAIRS.select(range(4)), "eval_strategy": "steps", "eval_steps": 1},
    "an epoch": {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 5},
}


@pytest.mark.parametrize("case", mostly_slow(CASES, ["adapters", "every loss", "nothing recomputed", "an epoch"]))
def test_training_is_that_of_trl(case, tmp_path, monkeypatch):
    monkeypatch.setattr(recurrent, "LEAST", 4)
    assert_same(*both(tmp_path, **CASES[case]))


@pytest.mark.parametrize("lacks_last", [False, True])
def test_adapters_under_autocast_get_the_gradients_of_micro_batches_one_by_one(lacks_last, tmp_path):
    """Products of adapters hand their gradients over after each micro-batch: here after the last one alone."""
    trained, kind = [], without_last(HybridDPOTrainer, enters=False) if lacks_last else HybridDPOTrainer
    for held in (0.0, 1.5):
        options = {"peft_config": lora(), "reference": None, "bf16": True, "enable_predict": True, "leap_gain": 0}
        trainer = dpo(kind, HybridDPOConfig, tmp_path / str(held), **WINDOW, **options)
        trainer.rows.held = lambda held=held: held
        trainer.train()
        assert bool(trainer.hybrid_summary()["micro_batches_saved"]) is bool(held)
        trained.append(trainer)
    norms = [[entry["grad_norm"] for entry in t.state.log_history if "grad_norm" in entry] for t in trained]
    assert norms[0] == pytest.approx(norms[1], rel=2e-2)


@pytest.mark.slow
@pytest.mark.processes
def test_processes_exchange_gradients_in_the_last_backward_pass(tmp_path):
    """Under DDP, and where it looks for parameters that no pass has used. Processes need not merge alike."""
    assert together(2, lambda: train_on_processes(tmp_path)) == [0, 0]
    for case in ON_PROCESSES:
        theirs, *ours = (
            load_file(tmp_path / f"{case}-{name}{rank}.safetensors")
            for name, rank in (("DPOTrainer", 0), ("HybridDPOTrainer", 0), ("HybridDPOTrainer", 1))
        )
        assert all(apart(theirs, found) < 1e-6 for found in ours)


ON_PROCESSES = {
    "adapters": {"peft_config": lora, "reference": None},
    "unused are looked for": {"ddp_find_unused_parameters": True, checkpointing_option(): False},
    "recomputed": {"ddp_find_unused_parameters": False},
}


def train_on_processes(folder):
    # gloo has a device `cpu:0`, to which torch copies what is on the CPU each time, unlike a GPU.
    setattr(trainer_module, "send_to_device", lambda batches, device, **options: batches)  # noqa: B010
    setattr(merging, "WITHOUT_LAUNCHES", ())  # noqa: B010
    for case, options in ON_PROCESSES.items():
        for trainer, config in ((DPOTrainer, DPOConfig), (HybridDPOTrainer, HybridDPOConfig)):
            made = {name: value() if callable(value) else value for name, value in {**WINDOW, **options}.items()}
            trained = dpo(trainer, config, folder / case / trainer.__name__, **made)
            trained._prepare_inputs = lambda inputs: inputs
            if trainer is HybridDPOTrainer:
                trained.rows.held = lambda: 1.6
            trained.train()
            assert trainer is DPOTrainer or trained.hybrid_summary()["micro_batches_saved"] > 0
            state = {name: tensor.detach().clone() for name, tensor in trained.model.state_dict().items()}
            save_file(state, folder / f"{case}-{trainer.__name__}{os.environ['RANK']}.safetensors")


def test_each_model_is_entered_once_for_a_window(tmp_path):
    """Where two micro-batches fit into one and a half of the largest padded one, not where they do not."""
    trainer = dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path, **{**WINDOW, "gradient_accumulation_steps": 2})
    policy, reference = (entered(model.get_decoder()) for model in (trainer.model, trainer.ref_model))
    trainer.train()
    # Before that they are compared, in both ways, and it is found in two passes what they draw. And the policy has run
    # a backward pass.
    assert (len(policy), len(reference)) == (5 + 3, 4 + 3)
    assert trainer.hybrid_summary()["micro_batches_saved"] == 3
    trainer.rows.held = lambda: 1.0
    policy.clear()
    trainer.train()
    assert len(policy) == 2 + 2 * 3 and trainer.hybrid_summary()["micro_batches_saved"] == 0


# The user's code.


def merged_memory(trainer):
    """Pairs stay apart where a class has a loss of its own. What merged pairs make of one is tested nevertheless."""
    return 1.5


def differentiating(base):
    """A trainer whose loss is weighed by the gradient of a weight, as in GradNorm."""

    class Differentiating(base):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            (gradient,) = torch.autograd.grad(loss, [self.model.lm_head.weight], retain_graph=True)
            return loss / (1 + gradient.norm().detach())

    return Differentiating


def test_trainers_with_a_loss_of_their_own_merge_nothing(tmp_path):
    assert_same(*both(tmp_path, differentiating(DPOTrainer), differentiating(HybridDPOTrainer)), saved=False)


def test_a_window_has_several_passes(tmp_path):
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 6}
    plain, merged = both(tmp_path, **options)
    assert_same(plain, merged)
    assert merged.hybrid_summary()["micro_batches_saved"] == 10


def changing(base, which, what="completion_mask"):
    """A trainer whose loss changes some micro-batches of a window: the labels, or with a hole in the mask."""

    class Changing(base):
        _merged_memory = merged_memory
        count = 0

        def compute_loss(self, model, inputs, *args, **kwargs):
            if self.model.training:
                if self.count % 3 in which:
                    inputs = {**inputs, what: inputs[what].clone()}
                    inputs[what][:, -3:] = 0
                    if what == "attention_mask":
                        inputs[what][:, 8:9] = 0
                self.count += 1
            return super().compute_loss(model, inputs, *args, **kwargs)

    return Changing


@pytest.mark.parametrize("case", [((0,),), ((1,),), ((2,),), ((0, 1, 2),), ((2,), "attention_mask")])
def test_a_micro_batch_that_was_changed_is_computed_by_itself(case, tmp_path):
    """Also the last one, in whose backward pass the others would have reached the model; padded, if it has a hole."""
    plain, merged = both(tmp_path, changing(DPOTrainer, *case), changing(HybridDPOTrainer, *case))
    assert apart(weights(plain.model), weights(merged.model)) < 1e-6
    assert plain.state.log_history[0]["grad_norm"] == pytest.approx(merged.state.log_history[0]["grad_norm"], rel=1e-5)


def without_last(base, enters=True):
    """A trainer that leaves the loss of a window's last micro-batch out, or does not even enter the model for it."""

    class WithoutLast(base):
        _merged_memory = merged_memory

        def compute_loss(self, model, inputs, *args, **kwargs):
            ends_window = self.accelerator.sync_gradients
            loss = super().compute_loss(model, inputs, *args, **kwargs) if enters or not ends_window else None
            return torch.zeros((), requires_grad=True) if ends_window else loss

    return WithoutLast


@pytest.mark.parametrize("recomputes", [True, False])
@pytest.mark.parametrize("enters", [True, False])
def test_gradients_are_not_lost_with_the_loss_that_would_take_them_through_the_model(enters, recomputes, tmp_path):
    kinds = without_last(DPOTrainer, enters), without_last(HybridDPOTrainer, enters)
    plain, merged = both(tmp_path, *kinds, **{checkpointing_option(): recomputes})
    assert_same(plain, merged)
    assert all(entry["grad_norm"] > 0 for entry in merged.state.log_history[:3])


def clipping(model):
    """Let a hook clip a gradient: that of several micro-batches is another one."""
    model.lm_head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def counting(model):
    model.lm_head.register_forward_hook(lambda *args: None)


@pytest.mark.parametrize("hook", [clipping, counting])
def test_hooks_get_each_micro_batch(hook, tmp_path):
    def hooked():
        hook(model := build("llama"))
        return model

    assert_same(*both(tmp_path, model=hooked), saved=False)


def test_what_a_hook_kept_of_a_model_can_be_part_of_a_loss(tmp_path):
    class Penalised(HybridDPOTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss + self.states.square().mean()

    trainer = dpo(Penalised, HybridDPOConfig, tmp_path, **WINDOW)

    def keep(module, args, output):
        trainer.states = output

    trainer.model.get_decoder().norm.register_forward_hook(keep)
    trainer.train()
    assert trainer.hybrid_summary()["tokens_shared"] and not trainer.hybrid_summary()["micro_batches_saved"]


def test_an_error_in_a_window_leaves_nothing_for_the_next_training(tmp_path):
    def failing(base):
        class Failing(base):
            _merged_memory = merged_memory
            count = 0

            def compute_loss(self, *args, **kwargs):
                loss = super().compute_loss(*args, **kwargs)
                self.count += 1
                if self.count == 5:
                    raise KeyboardInterrupt
                return loss

        return Failing

    trained = []
    for kind, config in ((failing(DPOTrainer), DPOConfig), (failing(HybridDPOTrainer), HybridDPOConfig)):
        trainer = dpo(kind, config, tmp_path / kind.__base__.__name__, **WINDOW)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.model.zero_grad()
        trained.append(trainer)
    plain, merged = trained
    assert not merged.rows._passes and not merged.rows._window  # they hold the graph of a pass
    for trainer in trained:
        trainer.train()
    assert_same(plain, merged)


def regularised(base):
    """A trainer that enters the policy again: with gradients, and without."""

    class Regularised(base):
        _merged_memory = merged_memory

        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
            given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
            given |= {"labels": labels, "fused_lm_head": True, "use_cache": False}
            with torch.no_grad():
                before = self.model(**given).log_probs
            return loss + 0.01 * (model(**given).log_probs - 2 * before).square().mean()

    return Regularised


@pytest.mark.parametrize("adapters", [{}, {"peft_config": lora, "reference": None}], ids=["reference", "adapters"])
def test_a_model_that_is_entered_again_computes_again(adapters, tmp_path):
    plain, merged = both(tmp_path, regularised(DPOTrainer), regularised(HybridDPOTrainer), **adapters)
    assert_same(plain, merged)


class OwnStep(HybridDPOTrainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


def test_trainers_with_a_step_of_their_own_merge_nothing(tmp_path):
    plain, merged = both(tmp_path, ours=OwnStep)
    assert_same(plain, merged, saved=False)


# Memory.


class Substeps(TrainerCallback):
    """Notes the gradient norm of a model between two micro-batches."""

    def __init__(self):
        self.norms = []

    def on_substep_end(self, args, state, control, model, **kwargs):
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self.norms.append(torch.nn.utils.get_total_norm(grads).item())


def test_a_callback_between_micro_batches_finds_their_gradients(tmp_path):
    seen = []

    def notes():
        seen.append(Substeps())
        return [seen[-1]]

    assert_same(*both(tmp_path, callbacks=notes), saved=False)
    theirs, ours = (callback.norms for callback in seen)
    assert len(ours) == 6 and ours == pytest.approx(theirs, rel=1e-4)


def test_micro_batches_that_do_not_fit_together_are_computed_one_by_one(tmp_path, caplog):
    (plain,) = [dpo(DPOTrainer, DPOConfig, tmp_path / "trl", **WINDOW)]
    plain.train()
    merged = dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path, **WINDOW, save_strategy="steps", save_steps=2)
    sizes = []

    def limit(layer, args):
        if torch.is_grad_enabled() and merged.model.training:
            sizes.append(args[0].shape[1])
            if merged.state.global_step == 1 and sizes[-1] > 60:
                raise torch.OutOfMemoryError("CUDA out of memory.")

    layer, own = merged.model.get_decoder().layers[1], merged.model.get_decoder().layers[1].forward
    layer.forward = functools.wraps(own)(lambda *args, **kwargs: limit(layer, args) or own(*args, **kwargs))
    with caplog.at_level(logging.WARNING):
        merged.train()
    assert_same(plain, merged)
    assert "micro-batches are computed one by one from here on" in caplog.text and max(sizes) > 60
    assert [event["action"] for event in merged.hybrid_summary()["out_of_memory"]] == [
        "micro-batches are computed one by one"
    ]
    assert max(sizes[-3:]) <= 60 and merged.rows.state_dict()["one_by_one"]
    resumed = dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path / "resumed", **WINDOW)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_weights(weights(merged.model), weights(resumed.model))
    assert resumed.rows.state_dict()["one_by_one"]
    resumed.train()
    assert not resumed.rows.state_dict()


@pytest.mark.falls_back
def test_a_kernel_that_fails_backward_leaves_pairs_padded(tmp_path, monkeypatch):
    own = attention.Layout.by_segment
    monkeypatch.setattr(attention.Layout, "by_segment", lambda *args: Fails.apply(own(*args)))
    plain, found = both(tmp_path, peft_config=lora, reference=None)
    assert_same_weights(weights(plain.model), weights(found.model))
    (failed,) = found.hybrid_summary()["failed_savings"]
    assert "the backward pass of a tree does not run (RuntimeError: No valid triton configs" in failed


# Launches.

VIEWS = set(
    "view _unsafe_view t transpose permute expand slice select unsqueeze squeeze detach as_strided alias split "
    "split_with_sizes unbind unsafe_split empty empty_like new_empty empty_strided new_empty_strided _reshape_alias "
    "reshape lift_fresh unflatten _local_scalar_dense".split()
)


class Launches(TorchDispatchMode):
    """Counts operations that would launch a kernel on a GPU; those on lists of tensors launch one for 48 of them."""

    def __init__(self):
        super().__init__()
        self.ops = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if name.rstrip("_") not in VIEWS:
            self.ops[name] += -(-len(next(iter(args))) // 48) if name.startswith("_foreach") else 1
        return func(*args, **(kwargs or {}))


class Counting(TrainerCallback):
    """Counts in the second step."""

    def __init__(self, launches):
        self.launches = launches

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.launches.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.launches.__exit__(None, None, None)


@torch.library.custom_op("hf_hybrid_tests::varlen", mutates_args=())
def _one_call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return query.clone()


@torch.library.custom_op("hf_hybrid_tests::varlen_backward", mutates_args=())
def _one_call_back(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return grad.clone(), torch.zeros_like(key), torch.zeros_like(value)


_one_call.register_autograd(
    lambda ctx, grad: _one_call_back(grad.contiguous(), *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_an_even_step_of_1b_launches_half_as_much(tmp_path, monkeypatch):
    """Layers and heads of Llama 3.2 1B, tiny widths, attention in one call: 6,708 before micro-batches were merged."""
    monkeypatch.setattr(
        varlen, "varlen_attn", lambda query, key, value, *others, **options: _one_call(query, key, value)
    )
    monkeypatch.setattr(attention, "MOST_KEYS_IN_FLOAT32", 0)
    made = attention.Layout.__init__

    def on_flash(layout, segments, device, tensors=None, images=None):
        made(layout, segments, device, attention.tensors_of(segments) if tensors is None else tensors, images)
        layout.on_flash = True

    monkeypatch.setattr(attention.Layout, "__init__", on_flash)
    config = LlamaConfig(
        hidden_size=64, head_dim=8, intermediate_size=64, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=61, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    words = "w2 w3 w4 w5 w6 w7 w8 w9 w10 w11"
    last = " ".join(reversed(words.split()))
    rows = [{"prompt": f"w{n + 12} {words} {words[3:]} ", "chosen": words, "rejected": last} for n in range(16)]
    monkeypatch.setattr("rig.pairs.PAIRS", type(PAIRS).from_list(rows))
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = dpo(
        HybridDPOTrainer, HybridDPOConfig, tmp_path, model=model, reference=None, peft_config=adapters, bf16=True,
        gradient_accumulation_steps=2, max_steps=2, optim="adamw_torch_fused", learning_rate=1e-6, logging_steps=10,
        enable_predict=True, **{checkpointing_option(): False},
    )  # fmt: skip
    monkeypatch.setattr(
        trainer.rows.comparison, "reason_not_same", lambda *args, **options: None
    )  # the stand-in computes something else
    launches = Launches()
    trainer.add_callback(Counting(launches))
    trainer.train()
    assert trainer.hybrid_summary()["micro_batches_saved"] == 2
    assert sum(launches.ops.values()) <= 3800


def test_micro_batches_that_keep_a_gpu_busy_stay_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "BUSY", 0.0)
    merged = fitted(dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path, **WINDOW))
    assert merged.hybrid_summary()["micro_batches_saved"] == 0 and merged.hybrid_summary()["tokens_shared"] > 0


@pytest.mark.parametrize("system", [0, 24])
def test_on_a_cpu_micro_batches_are_merged_for_what_they_share(system, tmp_path, monkeypatch):
    """There is no launch to save, and large products are not faster than small ones."""
    monkeypatch.setattr(merging, "WITHOUT_LAUNCHES", ("cpu",))
    begin = " ".join(["sys"] * system)
    rows = [{**pair, "prompt": f"{begin} {pair['prompt']}"} for pair in PAIRS]
    monkeypatch.setattr("rig.pairs.PAIRS", type(PAIRS).from_list(rows))
    merged = fitted(dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path, **WINDOW))
    assert bool(merged.hybrid_summary()["micro_batches_saved"]) is bool(system)


def test_a_resumed_run_ends_at_the_same_bits(tmp_path):
    options = {**WINDOW, "model": None, "save_strategy": "steps", "save_steps": 1}
    whole = fitted(dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path, **options))
    resumed = dpo(HybridDPOTrainer, HybridDPOConfig, tmp_path / "resumed", **{**options, "model": build("llama", 5)})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert apart(weights(whole.model), weights(resumed.model)) == 0.0
    counts = [trainer.hybrid_summary() for trainer in (whole, resumed)]
    assert len({summary["micro_batches_saved"] for summary in counts}) == 1
