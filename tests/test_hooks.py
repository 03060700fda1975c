"""
The contract with transformers' Trainer: hooks that are overridden are there, are called, and take what we rely on.

Recorded with transformers 5.17, 5.23 and 5.24. A hook that changed is named with what became of it: read Trainer's new
code before a line of these tables is changed.
"""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import transformers
from conftest import ByteText, hybrid_config, tiny_model
from transformers import Trainer, TrainerCallback, trainer, trainer_callback
from transformers.trainer_callback import CallbackHandler

import hf_hybrid
from hf_hybrid import HybridTrainer

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_hybrid"

# What our overrides pass on: the first parameters of Trainer's method, in this order. A `*` before the names: by
# keyword, in any order.
HOOKS = {
    # Public.
    "__init__": "model args data_collator train_dataset eval_dataset processing_class model_init compute_loss_func "
    "compute_metrics callbacks optimizers optimizer_cls_and_kwargs preprocess_logits_for_metrics",
    "train": "resume_from_checkpoint trial ignore_keys_for_eval",
    "call_model_init": "trial",
    "create_accelerator_and_postprocess": "",
    "create_optimizer": "model",
    "get_batch_samples": "epoch_iterator num_batches device",
    "training_step": "model inputs num_items_in_batch",
    "floating_point_ops": "inputs",
    "compute_loss": "model inputs return_outputs num_items_in_batch",
    "evaluation_loop": "dataloader description prediction_loss_only ignore_keys metric_key_prefix",
    "evaluate": "eval_dataset ignore_keys metric_key_prefix",
    "predict": "test_dataset ignore_keys metric_key_prefix",
    "prediction_step": "model inputs prediction_loss_only ignore_keys",
    "log": "logs start_time",
    "save_model": "output_dir _internal_call",
    "create_model_card": "* language license tags model_name finetuned_from tasks dataset_tags dataset dataset_args",
    "push_to_hub": "commit_message blocking token revision",
    # Private: CONTRIBUTING.md says why each is needed.
    "_move_model_to_device": "model device",
    "_track_num_input_tokens": "inputs",
    "_clip_grad_norm": "model",
    "_get_grad_norm": "model * grad_norm",
    "_save": "output_dir state_dict",
    "_load_best_model": "",
    "_finalize_training": "trial num_train_samples start_time",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_get_output_dir": "trial",
    "_save_checkpoint": "model trial",
    "_push_from_checkpoint": "checkpoint_folder",
    "_save_optimizer_and_scheduler": "output_dir",
    "_load_optimizer_and_scheduler": "checkpoint",
    "_load_rng_state": "checkpoint",
    "_load_scaler": "checkpoint",
}
# Called by users, not by Trainer itself.
ENTRIES = {"__init__", "train", "predict"}
# Private methods that are called and not overridden, with what is passed.
CALLED = {
    "_determine_best_metric": "* metrics trial",
    "_evaluate": "trial ignore_keys_for_eval",
    "_get_learning_rate": "",
    "_prepare_inputs": "inputs",
}
# What Trainer has of its own making, as attributes of an instance.
ATTRIBUTES = {"_train_batch_size", "_tr_loss"}
# Of our callbacks: what they take by name from an event, beside `args`, `state` and `control`.
EVENTS = {
    "on_init_end": "model processing_class",
    "on_train_begin": "model optimizer lr_scheduler",
    "on_train_end": "",
    "on_epoch_begin": "",
    "on_epoch_end": "",
    "on_step_begin": "",
    "on_pre_optimizer_step": "model optimizer",
    "on_optimizer_step": "",
    "on_step_end": "",
    "on_prediction_step": "",
    "on_evaluate": "model processing_class",
    "on_predict": "",
    "on_save": "",
    "on_push_begin": "",
    "on_log": "logs",
}
VERSION = f"transformers {transformers.__version__}"
MIXINS = [cls for cls in HybridTrainer.__mro__ if cls.__module__.startswith("hf_hybrid.")]


def of_trainer(name: str) -> bool:
    """Whether a name is a hook of Trainer; special methods are Python's, but for `__init__`."""
    return hasattr(Trainer, name) and (name == "__init__" or not name.startswith("__"))


def overrides() -> dict[str, list[type]]:
    found: dict[str, list[type]] = {}
    for cls in MIXINS:
        for name in vars(cls):
            if of_trainer(name):
                found.setdefault(name, []).append(cls)
    found.pop("_tag_names", None)
    return found


def parameters(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def check_parameters(name: str, recorded: str) -> None:
    assert hasattr(Trainer, name), f"{VERSION}: `Trainer.{name}` is gone"
    ordered, _, by_keyword = recorded.partition("*")
    ordered, by_keyword = ordered.split(), by_keyword.split()
    found = parameters(getattr(Trainer, name))
    said = f"{VERSION}: `Trainer.{name}` takes `{', '.join(found)}`"
    assert found[: len(ordered)] == ordered, f"{said}; it is called with `{', '.join(ordered)}` in this order"
    assert set(by_keyword) <= set(found), f"{said}; `{', '.join(set(by_keyword) - set(found))}` would not be taken"


def test_every_override_is_recorded():
    assert set(overrides()) <= set(HOOKS), f"record in HOOKS: {sorted(set(overrides()) - set(HOOKS))}"
    ours = {name for cls in MIXINS for name in vars(cls)}
    assert set(HOOKS) <= ours, f"not overridden any more: {sorted(set(HOOKS) - ours)}"


@pytest.mark.parametrize("name", HOOKS)
def test_hook_is_there(name):
    check_parameters(name, HOOKS[name])


@pytest.mark.parametrize("name", CALLED)
def test_method_that_is_called_is_there(name):
    check_parameters(name, CALLED[name])


@pytest.mark.parametrize("name", sorted(set(HOOKS) - ENTRIES))
def test_hook_is_called_by_trainer(name):
    """A hook that nobody calls any more would be overridden in vain, and silently."""
    sources = inspect.getsource(trainer) + inspect.getsource(trainer_callback)
    calls = re.findall(rf"self\.{name}\(", sources)
    assert calls, f"{VERSION}: Trainer does not call its `{name}` any more"


@pytest.mark.parametrize("name", sorted(set(HOOKS) - {"__init__"}))
def test_override_takes_what_trainer_takes(name):
    """Whoever calls Trainer's method, Trainer first, may pass all that it takes."""
    found = inspect.signature(getattr(Trainer, name)).parameters
    for cls in overrides()[name]:
        ours = inspect.signature(vars(cls)[name]).parameters
        if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= {p.kind for p in ours.values()}:
            continue
        where = f"{VERSION}: `{cls.__name__}.{name}`"
        missing = [
            other for other in found if other not in ours and found[other].kind is not inspect.Parameter.VAR_KEYWORD
        ]
        assert not missing, f"{where} does not take `{', '.join(missing)}`"
        required = {p.name for p in ours.values() if p.default is p.empty}
        optional = {p.name for p in found.values() if p.default is not p.empty}
        assert not required & optional, f"{where} asks for `{', '.join(required & optional)}`, which may be left out"


def test_every_private_method_that_is_called_is_recorded():
    used = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {cls.__name__ for cls in MIXINS if cls.__module__.rsplit(".", 1)[-1] == path.stem}
        inside = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name in names]
        of_self = {id(node) for cls in inside for node in ast.walk(cls)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                holder = ast.unparse(node.value)
                if holder.split(".")[-1] == "trainer" or (id(node) in of_self and holder in ("self", "super()")):
                    used.add(node.attr)
    own = {name for cls in MIXINS for name in vars(cls)}
    methods = {name for name in used if hasattr(Trainer, name)}
    assert methods - own == set(CALLED), f"record in CALLED: {sorted(methods - own ^ set(CALLED))}"
    made = set(re.findall(r"self\.(_\w+)(?:: [^=\n]+)? = ", inspect.getsource(Trainer)))
    ours = {name for cls in MIXINS for name in re.findall(r"self\.(_\w+)\b[^\n]* = ", inspect.getsource(cls))}
    assert (used & made) == ATTRIBUTES, f"record in ATTRIBUTES: {sorted(used & made ^ ATTRIBUTES)}"
    assert not ours & made - ATTRIBUTES, f"{VERSION}: Trainer has attributes {sorted(ours & made)} of its own"


def test_new_names_are_not_trainers():
    """What is ours by name must not become Trainer's, or it would be overridden by accident."""
    public = {name for cls in MIXINS for name in vars(cls) if not name.startswith("_")} - set(HOOKS)
    assert {"phase_name", "run_position", "hybrid_summary", "memory_summary"} <= public
    assert not public & set(dir(Trainer)), f"{VERSION}: Trainer has {sorted(public & set(dir(Trainer)))} of its own"


def test_every_private_override_has_its_reason():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Hooks of Trainer")[1].split("\n## ")[0]
    told = set(re.findall(r"`(_\w+)`", "".join(re.findall(r"^\| ([^|]+) \|", text, re.M))))
    private = {name for name in HOOKS if name.startswith("_") and not name.startswith("__")}
    assert told == private | set(CALLED) | ATTRIBUTES, f"CONTRIBUTING.md: {sorted(told ^ (private | set(CALLED)))}"


# Callbacks.


def callback_classes() -> list[type]:
    """Every callback of the package that can be imported here."""
    found = []
    for module in pkgutil.walk_packages(hf_hybrid.__path__, "hf_hybrid."):
        if module.name.endswith("__main__"):
            continue
        try:
            members = vars(importlib.import_module(module.name)).values()
        except ImportError as error:
            assert re.search("trl|axolotl|ipython|matplotlib", str(error), re.I), error
            continue
        classes = [cls for cls in members if inspect.isclass(cls) and issubclass(cls, TrainerCallback)]
        found += [cls for cls in classes if cls.__module__ == module.name]
    return found


@pytest.mark.filterwarnings("ignore")
def test_events_of_callbacks_are_there():
    classes = callback_classes()
    assert {"HookRouter", "HybridProgressCallback", "MemoryProfilerCallback"} <= {cls.__name__ for cls in classes}
    for cls in classes:
        for name, method in vars(cls).items():
            if not name.startswith("on_"):
                continue
            assert hasattr(TrainerCallback, name), f"{VERSION}: callbacks have no event `{name}` any more"
            taken = parameters(inspect.unwrap(method))
            assert taken[:3] == ["args", "state", "control"] and taken[-1] == "kwargs", (cls, name)
            recorded = set(EVENTS.get(name, "unrecorded").split())
            assert set(taken[3:-1]) <= recorded != {"unrecorded"}, f"record in EVENTS: `{cls.__name__}.{name}`"


@pytest.mark.parametrize("name", EVENTS)
def test_event_brings_what_is_taken(name):
    assert hasattr(TrainerCallback, name), f"{VERSION}: callbacks have no event `{name}` any more"
    brought = []

    class Listening(TrainerCallback):
        def __getattribute__(self, attribute):
            if attribute != name:
                return super().__getattribute__(attribute)
            return lambda args, state, control, **kwargs: brought.append(set(kwargs))

    handler = CallbackHandler([Listening()], *[None] * 4)
    own = [key for key in parameters(getattr(CallbackHandler, name)) if key in ("logs", "metrics")]
    control = transformers.TrainerControl()
    getattr(handler, name)(None, transformers.TrainerState(), control, **dict.fromkeys(own, {}))
    missing = set(EVENTS[name].split()) - brought[0]
    assert not missing, f"{VERSION}: `{name}` does not bring `{', '.join(missing)}` any more"


# And in a run.


def test_hooks_are_called_in_a_run(tmp_path, monkeypatch):
    """The source says that a hook is called; a run says that it is reached."""
    called = set()

    def listen(name):
        original = getattr(HybridTrainer, name)

        def listening(self, *args, **kwargs):
            called.add(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(HybridTrainer, name, listening)

    for name in HOOKS:
        listen(name)
    args = hybrid_config(
        tmp_path, max_steps=12, save_strategy="steps", save_steps=6, eval_strategy="steps", eval_steps=6,
        load_best_model_at_end=True, include_num_input_tokens_seen="all",
    )  # fmt: skip
    held_out = ByteText(8, offset=500)
    run = HybridTrainer(tiny_model(), args, train_dataset=ByteText(100), eval_dataset=held_out)
    run.train()
    run.predict(held_out)
    run.create_model_card()
    again = HybridTrainer(
        args=args, model_init=lambda: tiny_model(), train_dataset=ByteText(100), eval_dataset=held_out
    )
    again.train(True)
    assert called == set(HOOKS) - {"push_to_hub", "_push_from_checkpoint"}
