"""A user's own code beside streamed layers does what it does under Trainer, or it is refused in a sentence."""

import functools
import re
from typing import Any, NamedTuple

import pytest
import torch
from conftest import config_values, losses, tiny_model, weights
from own_code import HARMLESS, KINDS, SGD, Code
from rig.user_code import callback, notes_of, subclass
from transformers import Trainer, TrainingArguments

from hf_hybrid import HybridConfig, HybridTrainer

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.falls_back]

LAYERS, STEPS = 4, 3
OPTIONS = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.01,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.01,
    "optim": "adamw_torch",
    "remove_unused_columns": False,
}
STREAM = {"memory": "stream", "enable_predict": False}


class Mode(NamedTuple):
    """How layers are streamed."""

    options: dict = {}
    """Of Trainer, too."""
    ours: dict = {}
    decided: dict = {}
    """What a plan decides otherwise."""
    lora: bool = False
    resident: dict | None = None
    """Options of ours for what is compared with, if it is this package's trainer without streaming: by AdamW."""


LEAPS = {
    "warmup_phase_steps": 2, "full_phase_steps": 2, "correct_phase_steps": 1, "max_predict_steps": 2, "leap_worth": 0.5,
    "direction": "orthogonal", "enable_predict": True,
}  # fmt: skip
CLIPS_NOT = {"max_grad_norm": 0.0}
MODES = {
    "walk": Mode(),
    "single": Mode({"gradient_accumulation_steps": 1}),
    "micro": Mode(ours={"accumulation_walk": "micro_batch"}),
    "graphs": Mode(decided={"kept_graphs": 100}),
    "inback": Mode(CLIPS_NOT, {"out_of_memory": "raise"}),
    "inback_single": Mode({**CLIPS_NOT, "gradient_accumulation_steps": 1}, {"out_of_memory": "raise"}),
    "lora": Mode(lora=True),
    "lora_micro": Mode(ours={"accumulation_walk": "micro_batch"}, lora=True),
    "bf16": Mode({"bf16": True}),
    "8bit": Mode(ours={"optimizer_states": "8bit"}, resident={"optimizer_states": "8bit", "enable_predict": False}),
    "resident": Mode(ours={"resident_layers": 1}),
    "offload": Mode(ours={"offload_activations": True}),
    "ends": Mode(decided={"stream_embeddings": True}),
    "leaps": Mode({"max_steps": 9}, LEAPS, resident=LEAPS),
}
CORE = ("walk", "single", "micro", "graphs", "inback")
ADAPTERS = ("lora", "lora_micro")
"""For what is about adapters."""
MANY = (*CORE, "lora", "bf16", "resident", "ends")
ALL = (*MANY, "inback_single", "8bit", "offload", "leaps")
TABLE = """
nothing                               | all
assigned before                       | all walk*
assigned between trainings            | core lora
assigned at step end                  | all walk* lora*
assigned at step begin                | core
halved in place                       | all
data halved in place                  | core lora
clamped in place                      | core
pruned                                | many
loaded at step end                    | core lora ends
best loaded at train end              | many single*
halved at train end                   | core
converted to bf16                     | all
converted to fp64                     | walk single micro inback
converted to fp16                     | walk single
shifted around a step                 | all
shifted in place around a step        | core lora
SAM                                   | many
FGM                                   | walk single ends
shrunk after a step                   | walk single ends lora
by a vector                           | many
doubled for a look                    | many lora*
Lookahead                             | many
shared by two layers                  | many
layers swapped                        | core lora
activation replaced                   | core
parameter replaced                    | core
parameters made before                | many walk*
parameters made at train begin        | core
begun anew                            | core lora single*
layer copied                          | core lora
model copied afterwards               | core lora ends
weight norm                           | many
weight norm of the trainer's model    | core
weight norm by a hook                 | core
spectral norm                         | many
rounded in the pass                   | many
rounded from the second step          | core
flipped before the update             | all walk* inback*
flipped after a step                  | all
clipped by layer                      | walk single micro graphs lora bf16 resident ends
clipped by value                      | core lora
clipped after a step                  | core
clipped between                       | walk micro graphs inback lora
noted between                         | walk micro graphs inback lora
noted before the update               | many
noted after the update                | core
signs                                 | many
centralised                           | core
noise                                 | core
dropped                               | core lora
hook before                           | many
hook in a run                         | core
accumulated hook before               | many micro*
accumulated hook in a run             | core lora
backward hook of a layer              | core
detached                              | core
updated at once                       | walk single micro graphs inback
updated between                       | walk micro graphs inback
zeroed by the optimizer               | many walk*
zeroed by the model                   | many
zeroed after a step                   | core
probed                                | all walk*
probed and noted                      | core lora
own backward counts                   | many
square of all weights                 | all walk*
one matrix                            | core bf16
distance to the start                 | core
attentions                            | many walk*
hidden states                         | many
loss in attributes                    | all walk*
loss in a list                        | core
note of the batch                     | all walk*
gradient in the loss                  | core
noise of an own generator             | many single*
two passes                            | core lora ends*
two scales                            | all single*
two modes                             | core
other weights                         | core
adversary                             | core lora ends
saliency                              | core lora
pass without gradients first          | core
teacher before                        | core lora
teacher in a run                      | core lora
layer of the step dropped             | core
layers dropped by chance              | core
running mean                          | core resident
hook before its step                  | many
hook after its step                   | many walk*
hook of the run's optimizer           | core
step wrapped                          | many
states reset                          | many walk*
states damped                         | core lora ends
states cleared                        | core
states of the model's parameters      | core lora
states noted                          | core lora
states saved                          | core
states loaded                         | core
rate set before the update            | many
rate set between                      | walk micro graphs inback
rate set at step end                  | core
decay set                             | core
clipping set                          | core inback*
unfrozen in a run                     | core bf16 resident ends walk*
unfrozen before                       | core bf16 resident ends walk*
unfrozen, in no group                 | walk single micro graphs
frozen in a run                       | core
frozen in turn                        | core lora
LISA                                  | core bf16 resident ends
accumulates longer                    | walk single micro graphs inback lora
accumulates longer from the next step | walk single micro graphs inback
accumulates not                       | walk micro graphs inback
read at step end                      | all walk*
read at step begin                    | core
read between                          | walk micro graphs inback
read before the update                | core
read after the update                 | core
read when logged                      | core
read when evaluated                   | core ends
read when saved                       | core
read at train end                     | many
read after save_model                 | core
read in the loss                      | core
arrays                                | core
spectra                               | core
distance read                         | core
state_dict of layers                  | core lora
average                               | many
average swapped when evaluated        | core
average evaluated                     | core
averaged by torch                     | core lora
averaged by torch and loaded          | core
read in a hook of a layer             | core
read in a hook inside a layer         | core
read in another layer's hook          | core
state_dict                            | many
save_pretrained                       | core 8bit ends
generate                              | many
evaluate                              | many
two scales of adapters                | adapters
merged and unmerged                   | adapters
read while merged                     | adapters
generates while merged                | adapters
set_scale                             | adapters
scaling                               | adapters
adapter of a layer disabled           | adapters
new matrices                          | adapters
weighted adapter added                | adapters
adapter switched                      | adapters
adapters noted                        | adapters
ReLoRA                                | adapters
near the base                         | adapters
"""
"""A user's code, and the modes beside which it stands: `*` is in the default suite."""
GROUPS = {"core": CORE, "many": MANY, "all": ALL, "adapters": ADAPTERS}


def read(table):
    made = []
    for line in table.strip().splitlines():
        kind, modes = line.split("|")
        words = modes.split()
        quick = {word.strip("*") for word in words if word.endswith("*")}
        named = [mode for word in words for mode in GROUPS.get(word, (word.strip("*"),))]
        for mode in dict.fromkeys(named):
            marks = [] if mode in quick else [pytest.mark.slow]
            made.append(pytest.param(kind.strip(), mode, id=f"{kind.strip()}, {mode}", marks=marks))
    return made


CROSSINGS = read(TABLE)


class Rows(torch.utils.data.Dataset):
    """They differ in length, and their first tokens are not learned."""

    def __init__(self, count, seed=0):
        draw = torch.Generator().manual_seed(seed)
        self.rows = [torch.randint(5, 60, (10 + number * 5 % 7,), generator=draw) for number in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        ids = self.rows[index]
        labels = torch.where(torch.arange(len(ids)) < 3, -100, ids)
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def collate(rows):
    fillers = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return {name: pad([row[name] for row in rows], padding_value=filler) for name, filler in fillers.items()}


def make_model(lora, **config):
    model = tiny_model(num_hidden_layers=LAYERS, vocab_size=64, tie_word_embeddings=False, **config)
    return model if not lora else with_adapters(model)


def with_adapters(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig("CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    )


class Trained(NamedTuple):
    """What a training left, and what the user's code recorded."""

    weights: dict
    losses: list[float]
    notes: list


def make_trainer(code, mode, folder, ours: dict | None):
    """Return a trainer with the user's code: Trainer, or with these options this package's."""
    model = make_model(mode.lora, **code.config)
    code.model(model)
    kind: Any = Trainer if ours is None else HybridTrainer
    for name, change in code.methods.items():
        kind = subclass(kind, name, change)
    own = code.options if mode.resident is None else {n: v for n, v in code.options.items() if n not in SGD}
    arguments = config_values(folder, **{**OPTIONS, **mode.options, **own, **(ours or {})})
    config: Any = TrainingArguments(**arguments) if ours is None else HybridConfig(**arguments)
    if ours is not None and ours.get("memory") == "stream":
        config.plan_values = dict(mode.decided)
    torch.manual_seed(0)
    trainer = kind(
        model,
        config,
        train_dataset=Rows(40),
        eval_dataset=Rows(4, seed=3),
        data_collator=collate,
        callbacks=[callback(event, change) for event, change in code.at.items()],
        optimizers=(None if code.optimizer is None else code.optimizer(model), None),
    )
    code.made(trainer)
    return trainer


def left_by(trainer):
    return Trained(weights(trainer.model), losses(trainer), notes_of(trainer) + notes_of(trainer.model))


def flat(values):
    values = values.values() if isinstance(values, dict) else values
    return torch.cat([torch.zeros(0), *(torch.as_tensor(value).detach().double().flatten() for value in values)])


def apart(first, second):
    """Return the largest difference of any number, in parts of the largest number that is above 1."""
    first, second = flat(first), flat(second)
    assert first.shape == second.shape, f"{len(first)} numbers beside {len(second)}"
    return ((first - second).abs().max() / first.abs().max().clamp(min=1)).item() if len(first) else 0.0


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """Trainings without streaming. Modes that share their options share these."""

    @functools.cache
    def train(kind, options, lora, resident):
        code = Code() if kind is None else KINDS[kind]()
        ours = None if resident is None else dict(resident)
        mode = Mode(dict(options), lora=lora, resident=ours)
        trainer = make_trainer(code, mode, tmp_path_factory.mktemp("beside"), ours)
        code.drive(trainer)
        return left_by(trainer)

    def of_mode(kind, mode):
        resident = None if mode.resident is None else tuple({**mode.resident, "memory": "off"}.items())
        return train(kind, tuple(mode.options.items()), mode.lora, resident)

    return of_mode


def changes(theirs, without):
    """Return whether the user's code recorded something, or changed what was trained."""
    if theirs.notes or shapes(theirs) != shapes(without):
        return True
    return apart(theirs.losses, without.losses) > 1e-4 or apart(theirs.weights, without.weights) > 1e-4


def shapes(trained):
    return {name: (weight.shape, weight.dtype) for name, weight in trained.weights.items()}


ROUNDED = {
    *((kind, "bf16") for kind in ("shared by two layers", "hidden states", "attentions", "two scales", "hook before")),
    ("square of all weights", "leaps"),
}
"""
Where autocast adds up the gradients of several uses of a weight in bf16, or a hook gets one in bf16; and where rows
share under a loss of one's own, which they do not with streamed layers.
"""
REFUSAL = re.compile(r"`?(memory=stream|memory=off|memory=\"?(stream|off)|accumulation_walk=)|streamed|streaming")


@pytest.mark.parametrize(("kind", "mode"), CROSSINGS)
def test_it_does_what_it_does_under_trainer(kind, mode, beside, tmp_path):
    most = 1e-3 if (kind, mode) in ROUNDED else 1e-6
    code, mode = KINDS[kind](), MODES[mode]
    theirs, without = beside(kind, mode), beside(None, mode)
    assert kind in HARMLESS or changes(theirs, without), "the user's code does nothing here"
    trainer = None
    try:
        trainer = make_trainer(code, mode, tmp_path, {**STREAM, **mode.ours})
        assert trainer.memory.streams
        code.drive(trainer)
    except Exception as error:
        if not REFUSAL.search(str(error)):
            raise
        if trainer is not None and trainer.state.global_step >= trainer.args.max_steps:
            pytest.fail(f"It is refused after the last step: {error}")
        return
    ours = left_by(trainer)
    assert shapes(ours) == shapes(theirs)
    found = {name: apart(getattr(theirs, name), getattr(ours, name)) for name in Trained._fields}
    wrong = {name: difference for name, difference in found.items() if not difference <= most}
    assert not wrong, wrong
