"""
GRPO and RLOO with images: a prompt is computed once, an image encoded once, and rows without advantage are left out.
Completions and weights stay TRL's.
"""

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from conftest import config_values, mostly_slow, weights

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

from peft import LoraConfig, get_peft_model  # noqa: E402
from rig import vision  # noqa: E402
from rig.completions import WAYS, capturing, check_equal, config  # noqa: E402
from rig.trainers import fitted  # noqa: E402
from torch.nn.functional import pad  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: E402

from hf_hybrid import HybridGRPOConfig, HybridGRPOTrainer, HybridRLOOConfig, HybridRLOOTrainer  # noqa: E402
from hf_hybrid.trl.decoding import Decoding  # noqa: E402
from hf_hybrid.trl.turns import Turns  # noqa: E402

COPIES = 4
CLASSES = {
    "grpo": ((GRPOTrainer, GRPOConfig), (HybridGRPOTrainer, HybridGRPOConfig)),
    "rloo": ((RLOOTrainer, RLOOConfig), (HybridRLOOTrainer, HybridRLOOConfig)),
}


class Encoded(TrainerCallback):
    """Images, or tiles of them, that a model encodes: a list for each of its passes, and what is before the first."""

    def __init__(self, name, model):
        self.passes, self.compared = [[]], None
        model.get_input_embeddings().register_forward_pre_hook(lambda *_: self.passes.append([]))
        vision.tower_of(name, model).register_forward_pre_hook(self.encode, with_kwargs=True)

    def encode(self, tower, args, kwargs):
        pixels, grid = args[0] if args else kwargs["pixel_values"], kwargs.get("grid_thw")
        sizes = [1] * len(pixels) if grid is None else grid.prod(-1).tolist()
        self.passes[-1] += [image.numpy().tobytes() for image in vision.pictures_in(pixels.detach(), sizes, kwargs)]

    def on_step_end(self, args, state, control, **kwargs):
        self.compared = self.compared or len(self.passes)  # the first step compares rows with padded ones

    @property
    def all(self):
        return [*itertools.chain(*self.passes)]


def reward(completions):
    """Every second prompt of a generation has equal rewards."""
    values = [sum(map(ord, str(completion))) % 7 / 7 for completion in completions]
    return [0.1 if row // COPIES % 2 else value for row, value in enumerate(values)]


def trained(trainer, config, name, folder, change=None, **options):
    """Train; the result has the trainer, the completions of its generations, and images that passes encoded."""
    model, processor = vision.vision_model(name)
    encoded = Encoded(name, model)
    model, rows = model if change is None else change(model), vision.prompts(several=name in vision.SEVERAL)
    rate = 5e-4 if name.startswith("gemma4") else 0.05  # its gradients change much with its weights
    values = {"gradient_accumulation_steps": 4, "max_steps": 3, "optim": "sgd", "learning_rate": rate, "bf16": False}
    values |= {"max_grad_norm": 0.0, "num_generations": COPIES, "max_completion_length": 8, "beta": 0.0}
    args = config(**config_values(folder, **{**values, **options}))
    sampled = []

    def rewarding(completions, completion_ids, **_):
        sampled.append(completion_ids)
        return reward(completions)

    made = trainer(model, rewarding, args, train_dataset=rows, processing_class=processor, callbacks=[encoded])
    return SimpleNamespace(trainer=fitted(made), completions=sampled, encoded=encoded)


def both(name, folder, kind="grpo", ours=None, **options):
    """Train with TRL and here, where options are `ours` too."""
    plain, hybrid = CLASSES[kind]
    theirs = trained(*plain, name, folder / "plain", **options)
    return theirs, trained(*hybrid, name, folder / "ours", **{**options, **(ours or {})})


def assert_same(theirs, ours):
    assert theirs.completions == ours.completions
    before, after = weights(theirs.trainer.model), weights(ours.trainer.model)
    assert max((before[name] - after[name]).abs().max().item() for name in before) < 5e-6


@pytest.fixture(params=["growing", "captured"])
def passes(request):
    """How tokens are computed."""
    with capturing() if request.param == "captured" else contextlib.nullcontext():
        yield request.param


# Completions.


def batch_of(name, processor):
    """What TRL gives `generate` for six prompts with copies: two questions each on three images, of two sizes."""
    texts, images = [], []
    for row in vision.prompts(6, several=name in vision.SEVERAL, system=20):
        parts = [{"type": "image"}] * len(row["images"]) + [{"type": "text", "text": row["prompt"][-1]["content"]}]
        messages = [*row["prompt"][:-1], {"role": "user", "content": parts}]
        texts += [processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)] * COPIES
        images += [row["images"]] * COPIES
    options = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    return dict(processor(images=images, text=texts, **options))


IN_TREES = [name for name in vision.KINDS if name not in ("qwen3_5", "paligemma")]
QUICK_WAYS = {
    *((name, "sampled") for name in ("qwen2_vl", "qwen3_5", "idefics3", "gemma3")),
    ("paligemma", "sampled"), ("qwen2_5_vl", "greedy"), ("smolvlm", "repetitions"), ("llava", "top p"),
}  # fmt: skip


@pytest.mark.parametrize("name, way", mostly_slow([*itertools.product(vision.KINDS, WAYS)], QUICK_WAYS))
def test_completions_are_those_of_generate(name, way, passes):
    model, processor = vision.vision_model(name)
    inputs, encoded = batch_of(name, processor), Encoded(name, model.eval())
    ends = {"eos_token_id": [1, *range(30, 45)], "max_new_tokens": 24}
    before, decoding = len(encoded.passes), Decoding(off=False)
    check_equal(model, None, inputs, config(**{**ends, **WAYS[way]}), decoding)
    assert decoding.plain_because is None and (decoding.padded.because is None) == (name in IN_TREES)
    distinct = len(set(encoded.all))
    assert before == 1 and len(encoded.all) >= (4 * COPIES // 2 + 1) * distinct  # TRL's, and each once
    assert decoding.counts["prompt_tokens_shared"] > inputs["attention_mask"].sum() * (COPIES - 1) // COPIES - 1


def shown(given, inputs, image):
    """What `generate` is given if a tool shows each row a copy of the first image, in another brightness."""
    grid, ids, mask, numbers = given["image_grid_thw"], given["input_ids"], inputs["attention_mask"], []
    pixels, rows = [*given["pixel_values"].split(grid.prod(-1).tolist())], []
    places, number = (ids[0] == image).nonzero(), 0
    for row, left in enumerate((ids == image).sum(1)):
        rows.append(torch.cat([inputs["input_ids"][row][mask[row] == 1], ids[0, places[0] - 1 : places[-1] + 2]]))
        while left > 0:
            left, number = left - grid[number].prod() // 4, number + 1
            numbers.append(number - 1)
        numbers.append(len(pixels))
        pixels.append(pixels[0] * (row // COPIES + 1) / 8)
    grid = torch.cat([grid, grid[:1].expand(len(rows), -1)])[numbers]
    flipped = [torch.nn.utils.rnn.pad_sequence(of, True).flip(1) for of in (
        [row.flip(0) for row in rows], [torch.ones_like(row) for row in rows],
    )]  # fmt: skip
    made = {"input_ids": flipped[0], "attention_mask": flipped[1], "image_grid_thw": grid}
    kinds = {key: (flipped[0] == image).to(inputs[key].dtype) for key in ("mm_token_type_ids",) if key in inputs}
    return {**inputs, **made, **kinds, "pixel_values": torch.cat([pixels[number] for number in numbers])}


def talk(name, decoding=None, between=lambda model: None, shows=False):
    """Three turns with the images of the first: what the model says, the generator's state, and what it encoded."""
    model, processor = vision.vision_model(name)
    given, encoded = batch_of(name, processor), Encoded(name, model.eval())
    inputs, said, last = dict(given), [], model.config.get_text_config().vocab_size - 1
    torch.manual_seed(7)
    if decoding is not None:
        decoding.turns = Turns()
    for turn in range(3):
        with contextlib.nullcontext() if decoding is None else decoding.completing(model, None, counts=True):
            ends = config(eos_token_id=[1, *range(30, 45)], max_new_tokens=8)
            said.append(model.generate(**inputs, generation_config=ends))
        told = torch.randint(last - 9, last, (len(said[-1]), 6), generator=torch.Generator().manual_seed(turn))
        words = said[-1].where(said[-1] >= last - vision.WORDS, last)  # no tokens of images
        ids = torch.cat([words, told], dim=1)
        ids[:, : inputs["input_ids"].shape[1]] = inputs["input_ids"]
        more = ids.shape[1] - inputs["input_ids"].shape[1]
        inputs |= {"input_ids": ids, "attention_mask": pad(inputs["attention_mask"], (0, more), value=1)}
        inputs |= {key: pad(inputs[key], (0, more)) for key in ("token_type_ids", "mm_token_type_ids") if key in inputs}
        if shows and turn == 0:
            inputs = shown(given, inputs, model.config.image_token_id)
        between(model)
    return said, torch.get_rng_state(), encoded.all


@pytest.mark.parametrize("name", mostly_slow(vision.KINDS, ["qwen2_vl", "qwen3_5", "gemma3"]))
def test_later_turns_go_on_behind_images(name, passes):
    """Images are encoded in the first turn alone."""
    decoding = Decoding(off=False)
    (theirs, state, _), (ours, state_of_ours, encoded) = talk(name), talk(name, decoding)
    assert all(map(torch.equal, theirs, ours)) and torch.equal(state, state_of_ours)
    assert decoding.plain_because is None
    if name == "paligemma":
        assert "tokens that are of no image may see" in decoding.anew.because
    else:
        assert decoding.anew.because is None and len(encoded) == len(set(encoded))
        assert decoding.counts["prompt_tokens_shared"] > 3 * decoding.counts["prompt_tokens_computed"]


@pytest.mark.parametrize("name", mostly_slow(["qwen2_vl", "qwen3_vl", "qwen3_5"], ["qwen2_vl"]))
def test_images_that_a_tool_shows_are_computed(name, passes):
    """They are encoded with those before, each once; the turn behind goes on again."""
    (theirs, state, _), (ours, state_of_ours, encoded) = (
        talk(name, shows=True),
        talk(name, decoding := Decoding(off=False), shows=True),
    )
    assert all(map(torch.equal, theirs, ours)) and torch.equal(state, state_of_ours)
    assert decoding.plain_because is None and decoding.anew.because is None
    assert len(set(encoded)) > len(set(talk(name)[2])) and len(encoded) == len(set(encoded))
    assert decoding.counts["prompt_tokens_shared"] > 2 * decoding.counts["prompt_tokens_computed"]


def test_an_encoder_that_changes_between_turns_encodes_again():
    def change(model):
        with torch.no_grad():
            next(vision.tower_of("qwen2_vl", model).parameters()).mul_(2.0)

    theirs, ours = talk("qwen2_vl", between=change), talk("qwen2_vl", decoding := Decoding(off=False), change)
    assert all(map(torch.equal, theirs[0], ours[0])) and decoding.plain_because is None


# Trainings.


DIVISIONS = {
    "one step": {},
    "several steps": {"num_iterations": 2},
    "means of tokens": {"loss_type": "bnpo", "steps_per_generation": 8, "per_device_train_batch_size": 2},
}
OF_ROWS = [
    *itertools.product(vision.KINDS, ["grpo"], DIVISIONS),
    *((name, "rloo", "one step") for name in vision.KINDS),
]
QUICK = [
    *((name, "grpo", "one step") for name in ("qwen2_vl", "idefics3", "gemma3")),
    ("smolvlm", "grpo", "several steps"), ("qwen3_vl", "rloo", "one step"),
]  # fmt: skip


@pytest.mark.parametrize("name, kind, division", mostly_slow(OF_ROWS, QUICK))
def test_rows_without_advantage_are_left_out_with_their_images(name, kind, division, tmp_path):
    ours = {"rollouts": "off"}
    theirs, here = both(name, tmp_path, kind, ours, **DIVISIONS[division])
    assert_same(theirs, here)
    summary = here.trainer.hybrid_summary()
    assert summary["every_row_because"] is None and summary["rows_skipped"] >= summary["rows"] / 4
    assert (summary["log_probs_skipped"] > 0) == (division != "one step" or kind == "rloo")


def adapted(model):
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


RUNS = {
    "grpo": {},
    "rloo": {},
    "several steps": {"num_iterations": 2},
    "adapters and a reference": {"change": adapted, "beta": 0.1},
}
OF_RUNS = [*itertools.product(vision.KINDS, RUNS)]
QUICK_RUNS = [
    ("qwen3_5", "several steps"), ("idefics3", "adapters and a reference"), ("gemma3", "grpo"), ("qwen2_5_vl", "rloo"),
]  # fmt: skip


@pytest.mark.parametrize("name, run", mostly_slow(OF_RUNS, QUICK_RUNS))
def test_runs_with_images_are_those_of_trl(name, run, tmp_path):
    theirs, ours = both(name, tmp_path, run if run in CLASSES else "grpo", **RUNS[run])
    assert_same(theirs, ours)
    summary = ours.trainer.hybrid_summary()
    assert summary["plain_rollouts_because"] is None and summary["prompt_tokens_shared"] > 0
    if name != "paligemma":
        assert summary["plain_rows_because"] is None
        passes = ours.encoded.passes[ours.encoded.compared :]
        assert any(passes) and all(len(of_pass) == len(set(of_pass)) for of_pass in passes)
        assert len(theirs.encoded.all) > 3 * len(ours.encoded.all)
