"""Rows with pictures train as TRL does, and a picture that rows of a window share is encoded once."""

import functools
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_same_weights, config_values, mostly_slow, weights
from test_windows import apart, checkpointing_option

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

from peft import LoraConfig, get_peft_model  # noqa: E402
from rig import vision  # noqa: E402
from rig.byte_llama import llama_config  # noqa: E402
from rig.processes import together  # noqa: E402
from rig.trainers import fitted  # noqa: E402
from transformers import (  # noqa: E402
    Gemma3ForSequenceClassification,
    LlamaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import (  # noqa: E402
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

import hf_hybrid  # noqa: E402
from hf_hybrid import HybridConfig, HybridTrainer  # noqa: E402
from hf_hybrid.streaming.layers import decoder_layers  # noqa: E402

ONCE = tuple(name for name in vision.KINDS if name != "paligemma")
"""Kinds of models whose pictures are encoded once."""


def reward(completions, **_):
    return [sum(map(ord, str(completion))) % 7 / 7 for completion in completions]


SAMPLED = {"num_generations": 4, "max_completion_length": 6, "beta": 0.0, "shuffle_dataset": False}
TRAINERS = {
    "sft": (SFTTrainer, SFTConfig, vision.sft_rows, {"max_length": None}),
    "chats": (SFTTrainer, SFTConfig, vision.conversations, {"max_length": None}),
    "dpo": (DPOTrainer, DPOConfig, functools.partial(vision.pairs, 24), {"max_length": None}),
    "kto": (KTOTrainer, KTOConfig, vision.judged, {"max_length": None}),
    "grpo": (GRPOTrainer, GRPOConfig, vision.prompts, SAMPLED),
    "rloo": (RLOOTrainer, RLOOConfig, vision.prompts, SAMPLED),
}
"""Classes, rows, and options that TRL needs."""


class Padded:
    """Collates rows for `Trainer`, padded on one side; answers have labels."""

    def __init__(self, processor, side):
        self.processor, self.side = processor, side

    def __call__(self, rows):
        prompts = [self.text(row["prompt"], len(row["images"])) for row in rows]
        texts = [prompt + self.text(row["completion"], 0) for prompt, row in zip(prompts, rows, strict=True)]
        images = [row["images"] for row in rows]
        options = {"padding": True, "padding_side": self.side, "return_tensors": "pt"}
        batch = self.processor(images=images if any(images) else None, text=texts, **options)
        answers = self.processor.tokenizer([self.text(row["completion"], 0) for row in rows])["input_ids"]
        labels = torch.full_like(batch["input_ids"], -100)
        for row, answer in enumerate(answers):
            last = int(batch["attention_mask"][row].nonzero().max()) + 1
            labels[row, last - len(answer) : last] = batch["input_ids"][row, last - len(answer) : last]
        return {**batch, "labels": labels}

    def text(self, messages, images):
        parts = [{"type": "image"}] * images + [{"type": "text", "text": messages[-1]["content"]}]
        return self.processor.apply_chat_template([{**messages[-1], "content": parts}], tokenize=False)


def adapters(which):
    """Put adapters into the language model, or into the image encoder as well."""
    target = "all-linear" if which == "both" else r".*\.(language_model|text_model)\..*\.(q_proj|v_proj|down_proj)"

    def added(model, name):
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=target, task_type="CAUSAL_LM"))
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:  # zero at first, so that A would get no gradient
                torch.nn.init.normal_(parameter, std=0.1)
        return model

    return added


def frozen(model, name):
    vision.tower_of(name, model).requires_grad_(False)
    return model


class Watch(TrainerCallback):
    """
    Keeps the gradients of the first window, and what the image encoder of the model is given in each step: `learned` in
    passes that learn, `read` in those that generate or compute log-probabilities beforehand. Of an encoder that is not
    trained all are in `learned`.
    """

    def __init__(self, tower):
        self.learned, self.read = [], []
        self.always = not any(parameter.requires_grad for parameter in tower.parameters())
        tower.register_forward_pre_hook(self.encode, with_kwargs=True)

    def encode(self, tower, args, kwargs):
        """Note pictures, or tiles of them, as they are."""
        pixels, grid = args[0] if args else kwargs["pixel_values"], kwargs.get("grid_thw")
        sizes = [1] * len(pixels) if grid is None else grid.prod(-1).tolist()
        steps = self.learned if self.always or torch.is_grad_enabled() else self.read
        steps[-1] += [
            picture.numpy().tobytes() for picture in vision.pictures_in(pixels.detach().float(), sizes, kwargs)
        ]

    def on_step_begin(self, args, state, control, **kwargs):
        self.learned.append([])
        self.read.append([])

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        if not state.global_step:
            self.found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def build(name, kind, ours, folder, rows=None, change=None, side=None, system=0, **options):
    """
    Make a trainer, and what watches it.

    Args:
        name: Of the model.
        kind: Of the trainer, as in [`TRAINERS`].
        ours: Whether it is ours.
        folder: Its output.
        rows: Its data; default: rows of which several share a picture, and some have two or none.
        change: From model and name to the model that is trained.
        side: Where rows are padded by a collator of our own, for `Trainer`. Default: TRL pads.
        system: Words of a system prompt.
    """
    model, processor = vision.vision_model(name)
    model = change(model, name) if change else model
    tower = vision.tower_of(name, model.get_base_model() if hasattr(model, "peft_config") else model)
    watch = Watch(tower)
    rate = 5e-4 if name.startswith("gemma4") else 0.01  # its gradients change much with its weights
    values = {"gradient_accumulation_steps": 3, "max_steps": 4, "optim": "sgd", "learning_rate": rate}
    values |= {"max_grad_norm": 0.0, "train_sampling_strategy": "sequential", "bf16": False}
    trainer, config, make_rows, own = TRAINERS[kind]
    rows = make_rows(several=name in vision.SEVERAL, system=system) if rows is None else rows
    given = {"train_dataset": rows, "processing_class": processor, "callbacks": [watch]}
    if side is not None:
        trainer, config, own = Trainer, TrainingArguments, {"remove_unused_columns": False}
        given["data_collator"] = Padded(processor, side)
    if kind in ("dpo", "kto") and not hasattr(model, "peft_config"):
        given["ref_model"] = vision.vision_model(name, seed=1)[0]
    if kind in ("grpo", "rloo"):
        given["reward_funcs"] = reward
    if ours:
        plain = trainer is Trainer
        trainer = HybridTrainer if plain else getattr(hf_hybrid, f"Hybrid{trainer.__name__}")
        config = HybridConfig if plain else getattr(hf_hybrid, f"Hybrid{config.__name__}")
        own = {**own, "enable_predict": False, "share_rows": "on"}
    args = config(**config_values(folder, **{**values, **own, **options}))
    return trainer(model, args=args, **given), watch


def both(name, kind, folder, **options):
    """Train with TRL and here. Return trainers and watches, TRL's first."""
    found = []
    for ours in (False, True):
        trainer, watch = build(name, kind, ours, folder / ("ours" if ours else "plain"), **options)
        found += [fitted(trainer), watch]
    return SimpleNamespace(**dict(zip(("plain", "theirs", "trained", "ours"), found, strict=True)))


def assert_same(run, half=False, logs=True):
    # A bias of keys has no gradient but rounding.
    gradients = apart(*({n: g for n, g in of.found.items() if "k_proj.bias" not in n} for of in (run.theirs, run.ours)))
    pairs = zip(run.plain.model.parameters(), run.trained.model.parameters(), strict=True)
    after = max((theirs - ours).abs().max().item() for theirs, ours in pairs)
    assert gradients < (0.1 if half else 1e-5) and after < (1e-2 if half else 1e-6)
    pairs = zip(run.plain.state.log_history, run.trained.state.log_history, strict=True)
    for theirs, ours in pairs if logs else ():
        keys = [key for key in ("loss", "grad_norm", "rewards/margins", "reward") if key in theirs]
        expected = pytest.approx([theirs[k] for k in keys], rel=0.1 if half else 1e-4, abs=1e-5)
        assert [ours[k] for k in keys] == expected


def assert_once(run, least=1.0, of="learned", times=1):
    """
    Each distinct picture is encoded once in a window, or `times`; with TRL it was `least` times as many. The first
    window may be compared with padded rows.
    """
    before, after = (getattr(watch, of)[1:] for watch in (run.theirs, run.ours))
    for expected, encoded in zip(before, after, strict=True):
        assert times * len(set(encoded)) == len(encoded) and set(encoded) == set(expected)
    assert sum(map(len, before)) >= least * sum(map(len, after)) > 0
    assert run.trained.hybrid_summary()["plain_rows_because"] is None


QUICK = ["qwen2_vl", "qwen3_5", "idefics3", "llava_next", "gemma3"]


@pytest.mark.parametrize("name", mostly_slow(vision.KINDS, QUICK))
def test_answers_on_pictures_are_learned_as_by_trl(name, tmp_path):
    run = both(name, "sft", tmp_path, max_steps=8)
    assert_same(run)
    if name in ONCE:
        assert_once(run, least=2.0)


PAIRED = [(name, kind) for kind in ("chats", "dpo", "kto", "grpo", "rloo") for name in vision.KINDS]
QUICK_PAIRS = [("gemma3", "dpo"), ("qwen2_vl", "grpo"), ("llava", "chats")]


@pytest.mark.parametrize("name, kind", mostly_slow(PAIRED, QUICK_PAIRS))
def test_other_trainers_on_pictures_do_as_trl(name, kind, tmp_path):
    run = both(name, kind, tmp_path, **({} if kind == "chats" else {"gradient_accumulation_steps": 1}))
    assert_same(run)
    if name in ONCE:
        assert_once(run, least=2.0 if kind == "dpo" else 1.0)


VARIANTS = {
    "recomputed": {checkpointing_option(): True},
    "bf16": {"bf16": True},
    "adapters in the language model": {"change": adapters("language")},
    "adapters in both": {"change": adapters("both")},
    "frozen encoder": {"change": frozen},
    "a system prompt": {"system": 12},
    "padded on the left": {"side": "left"},
    "padded on the right": {"side": "right"},
    "one row each": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 6},
    "one micro-batch": {"gradient_accumulation_steps": 1},
    "weights that average": {"optim_args": "momentum=0.9", "weight_decay": 0.01},
}
OF_KINDS = [(name, case) for name in ("qwen3_vl", "gemma3", "qwen3_5", "idefics3", "paligemma") for case in VARIANTS]
QUICK_VARIANTS = [
    ("qwen3_vl", "recomputed"),
    ("qwen3_vl", "adapters in the language model"),
    ("gemma3", "padded on the left"),
    ("idefics3", "frozen encoder"),
]


@pytest.mark.parametrize("name, case", mostly_slow(OF_KINDS, QUICK_VARIANTS))
def test_trainings_on_pictures_compose(name, case, tmp_path):
    run = both(name, "sft", tmp_path, **VARIANTS[case])
    assert_same(run, half=case == "bf16")
    if name in ONCE:
        assert_once(run)


@pytest.mark.parametrize("name", ["qwen2_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_a_resumed_run_on_pictures_ends_at_the_same_bits(name, kind, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = fitted(build(name, kind, True, tmp_path, **options)[0])
    resumed = fitted(build(name, kind, True, tmp_path / "resumed", **options)[0], str(tmp_path / "checkpoint-2"))
    assert_same_weights(weights(whole.model), weights(resumed.model))


@pytest.mark.parametrize("name", mostly_slow(vision.KINDS, ["gemma3", "qwen2_vl"]))
def test_pictures_that_token_ids_do_not_tell_apart(name, tmp_path):
    """All pictures have one size and all questions are one: only the pictures differ."""

    def alike(row, index):
        return {**row, "images": [vision.picture(index // 4, (24, 24))], "prompt": question}

    question = [{"role": "user", "content": "w7 w8 w9"}]
    rows = vision.sft_rows(several=False).map(alike, with_indices=True)
    run = both(name, "sft", tmp_path, rows=rows)
    assert_same(run)
    if name in ONCE:
        assert_once(run, least=4.0)


def doubled(model, name):
    """The model with a `get_image_features` of a user, which doubles what it finds."""
    encoder = model.model
    own = encoder.get_image_features

    def get_image_features(*args, **kwargs):
        found = own(*args, **kwargs)
        found.pooler_output = [2 * features for features in found.pooler_output]
        return found

    encoder.get_image_features = get_image_features
    return model


def test_a_users_features_of_images_are_those_that_are_learned(tmp_path):
    run, plain = (both("qwen2_vl", "sft", tmp_path / str(change), change=change) for change in (doubled, None))
    assert_same(run)
    assert_once(run)
    assert vars(run.trained.model.model)["get_image_features"].__name__ == "get_image_features"
    assert apart(weights(run.trained.model), weights(plain.trained.model)) > 1e-4


class Moves(TrainerCallback):
    """Code of a user that changes a frozen image encoder between micro-batches."""

    def on_substep_end(self, args, state, control, model, **kwargs):
        with torch.no_grad():
            model.model.visual.patch_embed.proj.weight.mul_(1.1)


def test_an_encoder_that_changes_between_micro_batches_encodes_again(tmp_path):
    runs = []
    for ours in (False, True):
        # 4 rows share an image. To recompute layers, transformers has their inputs ask for gradients.
        options = {"per_device_train_batch_size": 2, "change": frozen, checkpointing_option(): False}
        trainer, watch = build("qwen2_vl", "sft", ours, tmp_path / str(ours), **options)
        trainer.add_callback(Moves())
        runs += [fitted(trainer), watch]
    assert_same(SimpleNamespace(**dict(zip(("plain", "theirs", "trained", "ours"), runs, strict=True))))
    assert runs[2].hybrid_summary()["images_shared"] > 0


def limited(trainer, most):
    """Let layers fail as memory does that ends, where a pass has more than so many tokens or places."""
    failed = []

    def check(layer, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        if trainer.state.global_step and hidden.shape[:-1].numel() > most:
            failed.append(hidden.shape)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    decoder_layers(trainer.model)[1].register_forward_pre_hook(check, with_kwargs=True)
    return failed


LIMITS = {"qwen2_vl": 75, "llava": 80, "smolvlm": 140}
SPLIT = [(name, shares) for name in LIMITS for shares in ("off", "on")]


@pytest.mark.parametrize("name, shares", mostly_slow(SPLIT, [("qwen2_vl", "off"), ("smolvlm", "on")]))
def test_a_window_on_pictures_that_does_not_fit_is_computed_in_parts(name, shares, tmp_path):
    """Rows have one picture, two or none. Each part gets those of its rows."""
    weights_of = []
    for size, steps in ((4, 2), (2, 4)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "side": "right"}
        trainer, _ = build(name, "sft", True, tmp_path / f"{size}", **options, share_rows=shares)
        failed = limited(trainer, LIMITS[name]) if size == 4 else ["nothing"]
        trainer.train()
        weights_of.append(weights(trainer.model))
        assert failed
    assert apart(*weights_of) < 1e-6


@pytest.mark.parametrize("kind", ["sft", "chats", "dpo", "kto"])
def test_a_length_that_cuts_through_an_image_is_refused_before_training(kind, tmp_path):
    with pytest.raises(ValueError, match=r"`max_length=9` .* in row \d+ of `train_dataset` images end with token \d\d"):
        build("smolvlm", kind, True, tmp_path, max_length=9)
    build("smolvlm", kind, True, tmp_path, max_length=200)


def test_a_reward_model_is_not_trained_past_its_images(tmp_path):
    args = hf_hybrid.HybridRewardConfig(**config_values(tmp_path, max_length=None, bf16=False))
    model = LlamaForSequenceClassification(llama_config(num_labels=1))
    with pytest.raises(ValueError, match="images in `images`, and TRL's reward trainer reads text alone"):
        hf_hybrid.HybridRewardTrainer(model, args, train_dataset=vision.pairs(4), processing_class=vision.tokenizer())


class Judged:
    """Collates pairs with their images: TRL's collator reads text alone."""

    def __init__(self, processor):
        self.processor = processor

    def __call__(self, rows):
        images, texts = [row["images"] for row in rows] * 2, []
        for row, name in [(row, name) for name in ("chosen", "rejected") for row in rows]:
            words = [part["content"] for part in (*row["prompt"], *row[name])]
            texts.append(" ".join([*["<boi>"] * len(row["images"]), *words]))
        return dict(self.processor(images=images, text=texts, padding=True, return_tensors="pt"))


def test_a_reward_model_that_sees_is_trained_as_by_trl_on_what_a_users_collator_reads(tmp_path):
    """transformers has one such model. Its loss reads scores, and its decoder gets no tokens, so rows stay padded."""
    found, ours = [], (hf_hybrid.HybridRewardTrainer, hf_hybrid.HybridRewardConfig)
    for trainer, config in ((RewardTrainer, RewardConfig), ours):
        processor = vision.processor_of("gemma3")
        torch.manual_seed(0)
        settings = vision.config_of("gemma3", processor)
        settings.num_labels = settings.text_config.num_labels = 1
        model = Gemma3ForSequenceClassification(settings)
        values = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.01, "bf16": False, "remove_unused_columns": False}
        rows = vision.pairs(24, several=False)
        given = {"data_collator": Judged(processor), "train_dataset": rows, "processing_class": processor.tokenizer}
        made = trainer(model, args=config(**config_values(tmp_path / trainer.__name__, **values)), **given)
        found.append(fitted(made))
    assert apart(*(weights(trainer.model) for trainer in found)) < 1e-6
    assert "its decoder gets no tokens" in found[1].hybrid_summary()["plain_rows_because"]


def two_processes(name, folder):
    for ours in (False, True):
        options = {"per_device_train_batch_size": 2, "max_steps": 3, "ddp_find_unused_parameters": True}
        trainer = fitted(build(name, "sft", ours, folder / f"{ours}", **options)[0])
        if trainer.is_world_process_zero():
            torch.save(weights(trainer.accelerator.unwrap_model(trainer.model)), folder / f"{ours}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.processes
@pytest.mark.parametrize("name", mostly_slow(["qwen2_vl", "qwen3_vl", "idefics3"], ["qwen2_vl"]))
def test_two_processes_on_pictures_do_as_those_of_trl(name, tmp_path):
    assert together(2, lambda: two_processes(name, tmp_path)) == [0, 0]
    theirs, found = (torch.load(tmp_path / f"{ours}.pt") for ours in (False, True))
    assert max((theirs[key] - found[key]).abs().max().item() for key in theirs) < 1e-6
