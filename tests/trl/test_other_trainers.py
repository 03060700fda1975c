"""Trainers of TRL with a loss of their own, with the mixin: rows without padding, and the weights of TRL's trainers."""

import copy
import pickle
from importlib.metadata import version

import pytest
import torch
from conftest import assert_same_weights, mostly_slow, tiny_model, weights
from packaging.version import Version

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from rig.processes import together  # noqa: E402
from rig.rollouts import TOKENIZER  # noqa: E402
from rig.trainers import fitted  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import (  # noqa: E402
    DistillationConfig,
    DistillationTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    TrlParser,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer  # noqa: E402
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer  # noqa: E402
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # noqa: E402
from trl.experimental.tpo import TPOConfig, TPOTrainer  # noqa: E402

from hf_hybrid import (  # noqa: E402
    HybridConfig,
    HybridCPOTrainer,
    HybridKTOTrainer,
    HybridORPOTrainer,
    HybridRewardTrainer,
    HybridTrainer,
    hybrid_config,
)
from hf_hybrid.rows.any_loss import RowsForAnyLoss  # noqa: E402
from hf_hybrid.trainer import HybridTrainerMixin  # noqa: E402


def words(seed, count):
    draw = torch.Generator().manual_seed(seed)
    return " ".join("abcdefgh"[int(torch.randint(8, (1,), generator=draw))] * (1 + n % 3) for n in range(count))


PAIRS = [
    {"prompt": words(n, 8 + 3 * n % 19), "chosen": " " + words(n + 50, 2 + n), "rejected": " " + words(n + 90, 3)}
    for n in range(16)
]
JUDGED = [
    {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
    for pair in PAIRS
    for side in ("chosen", "rejected")
]
TRIPLES = [{**pair, "reference": words(n + 30, 4 + n % 5)} for n, pair in enumerate(PAIRS)]
COMPLETED = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS]


def model(kind=LlamaForCausalLM, seed=0, **config):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": len(TOKENIZER), "pad_token_id": TOKENIZER.pad_token_id, "num_labels": 1}
    made = kind(LlamaConfig(**sizes, num_key_value_heads=2, **ids, **config))
    for parameter in made.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.1)
    return made


TRAINERS = {
    "reward": (RewardTrainer, RewardConfig, PAIRS, LlamaForSequenceClassification, ()),
    "kto": (KTOTrainer, KTOConfig, JUDGED, LlamaForCausalLM, ("ref_model",)),
    "cpo": (CPOTrainer, CPOConfig, PAIRS, LlamaForCausalLM, ()),
    "orpo": (ORPOTrainer, ORPOConfig, PAIRS, LlamaForCausalLM, ()),
    "tpo": (TPOTrainer, TPOConfig, TRIPLES, LlamaForCausalLM, ()),
    "distillation": (DistillationTrainer, DistillationConfig, COMPLETED, LlamaForCausalLM, ("teacher_model",)),
}


def train(name, folder, hybrid, *, peft_config=None, config=None, **options):
    trainer_class, config_class, rows, kind, others = TRAINERS[name]
    values = {
        "max_steps": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.1,
        "optim": "sgd", "report_to": "none", "use_cpu": True, "save_strategy": "no", "logging_steps": 1, "bf16": False,
        "disable_tqdm": True, **({"max_completion_length": 6} if name == "distillation" else {}), **options,
    }  # fmt: skip
    made = trainer_class
    if hybrid:
        ours = {
            RewardTrainer: HybridRewardTrainer, KTOTrainer: HybridKTOTrainer, ORPOTrainer: HybridORPOTrainer,
            CPOTrainer: HybridCPOTrainer,
        }.get(trainer_class)  # fmt: skip
        made = ours or type(f"Hybrid{name}", (HybridTrainerMixin, trainer_class), {})
    beside = {other: model(seed=1) for other in others if peft_config is None or other == "teacher_model"}
    trainer = made(
        model=model(kind, **(config or {})),
        args=config_class(str(folder), **values),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:4]),
        processing_class=TOKENIZER,
        peft_config=peft_config,
        **beside,
    )
    trainer.train()
    return trainer


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def check_equal(theirs, ours):
    pairs = zip(weights(theirs.model).values(), weights(ours.model).values(), strict=True)
    assert all(torch.allclose(weight, other, rtol=0, atol=1e-6) for weight, other in pairs)
    assert losses(ours) == pytest.approx(losses(theirs), abs=1e-5) and len(losses(ours)) == 4
    found = ours.hybrid_summary()
    assert found["plain_rows_because"] is None and found["tokens_padding"] > 0
    return found


@pytest.mark.parametrize("name", TRAINERS)
def test_weights_are_those_of_trl(name, tmp_path):
    if name == "distillation" and Version(version("trl")) < Version("1.16"):
        pytest.importorskip("triton")  # in which that of TRL 1.15 is written
    theirs, ours = (train(name, tmp_path / str(hybrid), hybrid) for hybrid in (False, True))
    found = check_equal(theirs, ours)
    evaluated = []
    for trainer in (theirs, ours):
        torch.manual_seed(3)  # distillation generates
        evaluated.append(trainer.evaluate()["eval_loss"])
    assert evaluated[0] == pytest.approx(evaluated[1], abs=1e-5)
    assert any((weight != before).any() for weight, before in zip(ours.model.parameters(), theirs_before(name)))
    if name in ("reward", "cpo", "orpo"):  # both sides of a pair have its prompt
        assert found["tokens_shared"] > 0.2 * found["tokens"]


def test_pairs_that_a_step_draws_and_judges(tmp_path, monkeypatch):
    """The loss is computed in `training_step`, of tokens that the model generates there."""

    class Judged(OnlineDPOTrainer):
        def __init__(self, **given):
            super().__init__(reward_funcs=lambda completions, **_: [float(len(c) % 3) for c in completions], **given)

    rows = [{"prompt": PAIRS[n]["prompt"]} for n in range(16)]
    monkeypatch.setitem(TRAINERS, "judged", (Judged, OnlineDPOConfig, rows, LlamaForCausalLM, ()))
    theirs, ours = (train("judged", tmp_path / str(hybrid), hybrid, max_new_tokens=6) for hybrid in (False, True))
    found = check_equal(theirs, ours)
    assert found["tokens_shared"] > 0.2 * found["tokens"]


def theirs_before(name):
    return model(TRAINERS[name][3]).parameters()


@pytest.mark.parametrize("name", mostly_slow(["reward", "kto", "orpo"], ["reward"]))
def test_adapters_and_recomputation(name, tmp_path):
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS" if name == "reward" else None)
    options = {"peft_config": adapters, "gradient_checkpointing": True, "learning_rate": 1.0}
    check_equal(*(train(name, tmp_path / str(hybrid), hybrid, **options) for hybrid in (False, True)))


@pytest.mark.parametrize("name", TRAINERS)
def test_autocast_is_off_behind_each_forward_pass(name, tmp_path, monkeypatch):
    """One object of autocast serves all forward passes of a model: one within another would leave it on."""
    if name == "distillation" and Version(version("trl")) < Version("1.16"):
        pytest.importorskip("triton")
    entered, enter, leave = [], torch.autocast.__enter__, torch.autocast.__exit__

    def enter_once(self):
        assert self not in entered
        entered.append(self)
        return enter(self)

    def leave_last(self, *error):
        assert entered.pop() is self
        return leave(self, *error)

    monkeypatch.setattr(torch.autocast, "__enter__", enter_once)
    monkeypatch.setattr(torch.autocast, "__exit__", leave_last)
    trainer = train(name, tmp_path, True, bf16=True)
    found = trainer.hybrid_summary()
    assert found["plain_rows_because"] is None and found["tokens_padding"] > 0
    assert not torch.is_autocast_enabled("cpu")


def test_under_dropout_a_shared_prefix_draws_once(tmp_path):
    trainer = train("reward", tmp_path, True, config={"attention_dropout": 0.1}, disable_dropout=False)
    found = trainer.hybrid_summary()
    assert found["tokens_padding"] > 0 < found["tokens_shared"] and found["dropout_drawn_once"]


def test_what_would_be_saved_is_said_before(tmp_path):
    """As far as batches tell it: not what a loss puts together or generates."""
    trainer = train("reward", tmp_path, True, max_steps=1, num_train_epochs=1)
    said, found = trainer.would_save(), trainer.hybrid_summary()
    whole = found["tokens"] + found["tokens_padding"]
    assert said["reason"] is None and said["but"] == ()
    assert said["shared"] == pytest.approx(found["tokens_shared"] / whole, abs=0.1)
    assert said["padding"] == pytest.approx(found["tokens_padding"] / whole, abs=0.1)
    assert train("cpo", tmp_path, True, max_steps=1).would_save() is None
    assert (
        train("reward", tmp_path, True, max_steps=1, neftune_noise_alpha=5.0).would_save()["reason"].startswith("`nef")
    )


class Margin(RewardTrainer):
    """A loss of the user's, that counts."""

    of_padding, calls = 0.0, 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.calls += 1
        loss = super().compute_loss(model, inputs) + 0.01 * model(**inputs).logits.square().mean()
        if self.of_padding:
            loss = loss + self.of_padding * model.model(**inputs).last_hidden_state.square().mean()
        return (loss, None) if return_outputs else loss


class OfPadding(Margin):
    of_padding = 0.01


class Later(Margin):
    @property
    def of_padding(self):
        return 0.01 * (self.state.global_step >= 2)


def test_a_loss_that_reads_padding_later_is_noticed(tmp_path, monkeypatch, caplog):
    """The step in which it begins is the only one that reads states of other tokens, and a warning names it."""
    monkeypatch.setitem(TRAINERS, "later", (Later, *TRAINERS["reward"][1:]))
    theirs, ours = (train("later", tmp_path / str(hybrid), hybrid, learning_rate=1e-3) for hybrid in (False, True))
    assert losses(ours)[:2] == pytest.approx(losses(theirs)[:2], abs=1e-6)
    assert losses(ours)[3] == pytest.approx(losses(theirs)[3], abs=1e-3)
    assert ours.hybrid_summary()["plain_rows_because"].endswith("reads states of padding since step 2")
    assert len([r for r in caplog.records if r.levelname == "WARNING" and "since step 2" in r.getMessage()]) == 1


class Normed(RewardTrainer):
    """It divides by what the mask hides afterwards."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        states = model.model(**inputs).last_hidden_state
        normed = states / states.norm(dim=-1, keepdim=True) * inputs["attention_mask"][..., None]
        loss = super().compute_loss(model, inputs) + normed.sum(1).square().mean()
        return (loss, None) if return_outputs else loss


class OfLayers(RewardTrainer):
    """It reads what a hook leaves in the layers."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        for layer in model.model.layers:
            if not layer.mlp._forward_hooks:
                layer.mlp.register_forward_hook(lambda mlp, args, output: setattr(mlp, "aux", output.square().mean()))
        loss = super().compute_loss(model, inputs)
        loss = loss + sum(layer.mlp.aux for layer in model.model.layers)
        return (loss, None) if return_outputs else loss


def test_what_a_hook_leaves_for_the_loss_is_that_of_padded_rows(tmp_path, monkeypatch):
    monkeypatch.setitem(TRAINERS, "layers", (OfLayers, *TRAINERS["reward"][1:]))
    theirs, ours = (train("layers", tmp_path / str(hybrid), hybrid) for hybrid in (False, True))
    assert_same_weights(weights(theirs.model), weights(ours.model))
    assert "a hook of yours may leave" in ours.hybrid_summary()["plain_rows_because"]


def test_what_is_hidden_behind_a_division_is_no_nan(tmp_path, monkeypatch):
    monkeypatch.setitem(TRAINERS, "normed", (Normed, *TRAINERS["reward"][1:]))
    check_equal(*(train("normed", tmp_path / str(hybrid), hybrid) for hybrid in (False, True)))


def test_a_loss_that_nobody_knows_shares_unless_it_reads_padding(tmp_path, monkeypatch):
    """The gradient tells. Nothing of the user is called for it."""
    for kind in (Margin, OfPadding):
        monkeypatch.setitem(TRAINERS, "margin", (kind, *TRAINERS["reward"][1:]))
        theirs, ours = (train("margin", tmp_path / f"{kind.__name__}{hybrid}", hybrid) for hybrid in (False, True))
        assert theirs.calls == ours.calls == 8
        if kind is Margin:
            found = check_equal(theirs, ours)
            assert found["tokens_shared"] > 0
    found = ours.hybrid_summary()
    assert_same_weights(weights(theirs.model), weights(ours.model))
    assert found["plain_rows_because"] == "the loss of `Margin.compute_loss` reads states of padding"
    assert found["tokens_shared"] == found["tokens_padding"] == 0 < found["tokens"]


def test_a_config_of_trl_gets_the_options(tmp_path):
    kind, folder = hybrid_config(RewardConfig), str(tmp_path)
    written = kind(folder, share_rows="on", max_length=64, use_cpu=True)
    (parsed,) = TrlParser(kind).parse_args_and_config(
        ["--output_dir", folder, "--share_rows", "on", "--max_length", "64", "--use_cpu", "true"]
    )
    for config in (written, parsed, copy.deepcopy(written), pickle.loads(pickle.dumps(written))):
        assert isinstance(config, RewardConfig) and type(config) is kind is hybrid_config(RewardConfig)
        assert (config.share_rows, config.max_length, config.bf16) == ("on", 64, False)
    again = pickle.loads(pickle.dumps(written))
    assert again == written and again._written == written._written
    with pytest.raises(ValueError, match="`share_rows` must be one of"):
        kind(folder, use_cpu=True, share_rows="perhaps")


@pytest.mark.parametrize("option", ["compute_loss_func", "label_smoothing_factor"])
def test_other_losses_of_a_trainer(option, tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch

    lengths = [9, 30, 17, 41, 12, 25, 38, 8] * 6
    rows = [
        {"input_ids": (ids := [(7 * n + k) % 90 + 2 for k in range(length)]), "labels": ids}
        for n, length in enumerate(lengths)
    ]

    def pad(batch):
        width = max(len(row["input_ids"]) for row in batch)
        filled = {"input_ids": 0, "labels": -100}
        found = {
            name: torch.tensor([row[name] + [fill] * (width - len(row[name])) for row in batch])
            for name, fill in filled.items()
        }
        return {**found, "attention_mask": (found["labels"] != -100).long()}

    def run(kind, config, **options):
        values = {
            "max_steps": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "optim": "sgd",
            "learning_rate": 0.1, "report_to": "none", "use_cpu": True, "save_strategy": "no", "logging_steps": 1,
        }  # fmt: skip
        smoothed = {"label_smoothing_factor": 0.1} if option == "label_smoothing_factor" else {}
        args = config(str(tmp_path / kind.__name__), **values, **smoothed, **options)
        more = {} if smoothed else {"compute_loss_func": loss}
        trainer = fitted(kind(tiny_model(), args, data_collator=pad, train_dataset=rows, **more))
        return trainer

    theirs, options = run(Trainer, TrainingArguments), {"leap_gain": 0, "auto_lr": "off"}
    on, asked = (
        check_equal(theirs, run(HybridTrainer, HybridConfig, **options, **o)) for o in ({"share_rows": "on"}, {})
    )
    assert on["tokens_padding"] > asked["tokens_padding"] > 0.6 * on["tokens_padding"]  # in one step it asked


def test_states_that_differ_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_hybrid.rows.comparison.apart", lambda plain, tree: 0.5)
    theirs, ours = (train("reward", tmp_path / str(hybrid), hybrid) for hybrid in (False, True))
    assert_same_weights(weights(theirs.model), weights(ours.model))
    assert "5.0e-01 of their length away" in ours.hybrid_summary()["plain_rows_because"]
    assert isinstance(ours.rows, RowsForAnyLoss)


def test_what_makes_batches_stay_padded(tmp_path):
    trainer = train("reward", tmp_path, True, neftune_noise_alpha=5.0, max_steps=1)
    assert "neftune_noise_alpha" in trainer.hybrid_summary()["plain_rows_because"]


@pytest.mark.processes
@pytest.mark.slow
def test_two_processes(tmp_path):
    def run():
        for hybrid in (False, True):
            trainer = train("reward", tmp_path / str(hybrid), hybrid, per_device_train_batch_size=2)
            if trainer.is_world_process_zero():
                torch.save((weights(trainer.model), losses(trainer)), tmp_path / f"{hybrid}.pt")
        assert trainer.hybrid_summary()["tokens_padding"] > 0

    assert together(2, run) == [0, 0]
    (theirs, expected), (ours, found) = (torch.load(tmp_path / f"{hybrid}.pt") for hybrid in (False, True))
    assert found == pytest.approx(expected, abs=1e-5)
    assert all(torch.allclose(weight, ours[name], rtol=0, atol=1e-6) for name, weight in theirs.items())


def test_a_number_for_each_epoch_is_left_to_trl(tmp_path):
    assert hybrid_config(OnlineDPOConfig)(str(tmp_path), beta=[0.1, 0.2], use_cpu=True).beta == [0.1, 0.2]


# What a user's code changes on the way to the loss.


def hides_a_token(method, model, inputs, *args, **kwargs):
    mask = inputs["attention_mask"].clone()
    mask[:, 2] = 0
    return method(model, {**inputs, "attention_mask": mask}, *args, **kwargs)


def reads_padding(method, model, inputs, *args, **kwargs):
    names = "input_ids", "attention_mask"
    return method(model, inputs, *args, **kwargs) + 0.1 * model(**{n: inputs[n] for n in names}).logits.square().mean()


def other_tokens(method, inputs):
    """Padding is another token then."""
    return {name: 2 + 7 * value % 90 if "input_ids" in name else value for name, value in method(inputs).items()}


def twice(method, *args):
    return method(*args) + method(*args)


CHANGES = {
    "mask": ("reward", "compute_loss", hides_a_token, "has a hole in its mask"),
    "no padding": ("reward", "compute_loss", reads_padding, None),  # the scores of last tokens
    "padding": ("kto", "compute_loss", reads_padding, "`trainer.compute_loss` reads states of padding"),
    "part of a loss": ("kto", "_compute_loss", reads_padding, "`trainer._compute_loss` reads states of padding"),
    "scored tokens": ("reward", "_prepare_inputs", other_tokens, "a token that the mask hides"),
    "tokens": ("kto", "_prepare_inputs", other_tokens, None),
    "step": ("reward", "training_step", twice, None),
}


@pytest.mark.parametrize("change", mostly_slow(CHANGES, ["part of a loss", "scored tokens"]))
def test_what_is_put_on_a_trainer_counts(change, tmp_path, monkeypatch):
    name, method, changed, reason = CHANGES[change]
    trainer_class, calls = TRAINERS[name][0], []

    class Patched(trainer_class):
        def train(self, *args, **kwargs):
            before = getattr(self, method)
            setattr(self, method, lambda *args, **kwargs: calls.append(0) or changed(before, *args, **kwargs))
            return super().train(*args, **kwargs)

    Patched.__name__, Patched.__module__ = trainer_class.__name__, trainer_class.__module__  # no class of the user
    monkeypatch.setitem(TRAINERS, name, (Patched, *TRAINERS[name][1:]))
    theirs, ours = (train(name, tmp_path / str(hybrid), hybrid) for hybrid in (False, True))
    pairs = zip(weights(theirs.model).values(), weights(ours.model).values(), strict=True)
    assert max((weight - other).abs().max().item() for weight, other in pairs) <= 1e-6
    assert len(calls) == 2 * 8
    because = ours.hybrid_summary()["plain_rows_because"]
    assert reason in because if reason else because is None


@pytest.mark.parametrize("name", mostly_slow(["reward", "kto", "orpo"], ["reward"]))
def test_autocast_is_off_wherever_a_user_looks(name, tmp_path, monkeypatch):
    """Also after an interruption in a forward pass."""
    seen, trainer_class = [], TRAINERS[name][0]

    class Looks(TrainerCallback):
        def look(self, args, state, control, **kwargs):
            seen.append(torch.is_autocast_enabled("cpu"))
            if state.global_step == 2:
                layers = kwargs["model"].base_model.layers
                layers[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))

        on_step_begin = on_pre_optimizer_step = on_optimizer_step = on_step_end = look

    class Watched(trainer_class):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, callbacks=[Looks()], **kwargs)

    Watched.__name__, Watched.__module__ = trainer_class.__name__, trainer_class.__module__
    monkeypatch.setitem(TRAINERS, name, (Watched, *TRAINERS[name][1:]))
    with pytest.raises(KeyboardInterrupt):
        train(name, tmp_path, True, bf16=True)
    assert seen == [False] * 9 and not torch.is_autocast_enabled("cpu")
