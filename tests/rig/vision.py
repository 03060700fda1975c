"""
Tiny random models that see pictures, each with its processor, and rows with pictures for TRL's trainers.

Processors are transformers' own, which prepare pictures with PIL. Nothing is loaded and nothing needs torchvision.
"""

import random

import pytest
import torch
import transformers
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

WORDS = 61
ENDS = ("<row>", "</row>", "<system>", "<user>", "<assistant>")
PICTURE = {
    "image_token": "<image>", "video_token": "<video>", "vision_start_token": "<picture>",
    "vision_end_token": "</picture>", "boi_token": "<boi>", "eoi_token": "<eoi>",
}  # fmt: skip
TILES = ("<fake_token_around_image>", "<global-img>", *(f"<row_{n // 3 + 1}_col_{n % 3 + 1}>" for n in range(9)))
TEMPLATE = """
{%- for message in messages %}<row> <{{ message.role }}> {% if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{{ 'PLACE' if part.type == 'image' else part.text }} {% endfor %}{% endif %}
{{- ' </row> ' }}{% endfor %}{% if add_generation_prompt %}<row> <assistant> {% endif %}"""
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1,
}  # fmt: skip
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12, "query_pre_attn_scalar": 8}
PER_LAYER = {
    "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8, "global_head_dim": 8,
    "use_bidirectional_attention": "vision",
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
THREE = {**ROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0}
QWEN = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN2 = {**QWEN, "embed_dim": 16, "mlp_ratio": 2, "hidden_size": 32}
QWEN2_5 = {
    **QWEN, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32, "window_size": 16,
    "fullatt_block_indexes": [1],
}  # fmt: skip
QWEN3 = {**QWEN, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32, "num_position_embeddings": 16}
DEEP = {**QWEN3, "deepstack_visual_indexes": [0, 1]}
TOWER = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 24,
    "patch_size": 6, "projection_dim": 32,
}  # fmt: skip
PATCHES = {
    "head_dim": 8, "num_key_value_heads": 2, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 280,
}  # fmt: skip
SQUARE = {"height": 24, "width": 24}
CROP = {"size": {"shortest_edge": 24}, "crop_size": SQUARE}
GRIDS = [[24, 48], [48, 24], [48, 48]]


class NoVideos:
    """Transformers prepares videos with torchvision."""

    @classmethod
    def get_attributes(cls):
        return ["image_processor", "tokenizer"]


class Qwen2Processor(NoVideos, transformers.Qwen2VLProcessor):
    pass


class Qwen3Processor(NoVideos, transformers.Qwen3VLProcessor):
    pass


try:
    _Gemma4: type | None = transformers.Gemma4Processor
except ModuleNotFoundError:  # that of transformers 5.17 is imported with torchvision alone
    _Gemma4 = None


class Gemma4Processor(NoVideos, _Gemma4 or transformers.ProcessorMixin):
    """It takes no sounds either."""

    def __init__(self, image_processor, tokenizer, chat_template=None):
        self.image_token, self.image_token_id = tokenizer.image_token, tokenizer.image_token_id
        self.boi_token, self.eoi_token, self.boa_token, self.eoa_token = (
            tokenizer.boi_token,
            tokenizer.eoi_token,
            "",
            "",
        )
        transformers.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class PrefixProcessor(transformers.PaliGemmaProcessor):
    """TRL's completions come without pictures; they are what the model learns behind a prompt that is all seen."""

    def __call__(self, images=None, text=None, return_tensors=None, **options):
        learned = images is None
        if learned:
            known = ("padding", "padding_side", "add_special_tokens")
            options = {name: value for name, value in options.items() if name in known}
            inputs = self.tokenizer(text, return_tensors=return_tensors, return_token_type_ids=True, **options)
        else:
            inputs = super().__call__(images=images, text=text, return_tensors=return_tensors, **options)
            inputs.pop("labels")
        types = [[int(learned)] * len(row) for row in inputs["input_ids"]]
        inputs["token_type_ids"] = types if return_tensors is None else torch.tensor(types)
        return inputs


def _qwen(processor, vision, place="<picture><image></picture>", rope=THREE, **text):
    sizes = {"size": {"shortest_edge": 64, "longest_edge": 1024}, "patch_size": 4, "merge_size": 2}
    return {
        "processor": (processor, {}), "pictures": ("Qwen2VLImageProcessorPil", sizes), "place": place,
        "text": {"rope_parameters": rope, **text}, "vision": vision, "tower": "visual",
    }  # fmt: skip


def _tiles(kind):
    sizes = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 24}}
    return {
        "processor": (transformers.Idefics3Processor, {"image_seq_len": 4}), "pictures": (f"{kind}ProcessorPil", sizes),
        "text": {"model_type": "llama"}, "vision": TOWER, "model": {"scale_factor": 2}, "tower": "vision_model",
    }  # fmt: skip


def _llava(name, sizes, **model):
    strategy = {"vision_feature_select_strategy": "default", "patch_size": 6, "num_additional_image_tokens": 1}
    return {
        "processor": (getattr(transformers, f"{name}Processor"), strategy),
        "pictures": (f"{name}ImageProcessorPil", sizes), "text": {"model_type": "llama"},
        "vision": {**TOWER, "model_type": "clip_vision_model"}, "model": model, "tower": "vision_tower",
    }  # fmt: skip


SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
KINDS = {
    "qwen2_vl": _qwen(Qwen2Processor, QWEN2, rope=ROPE),
    "qwen2_5_vl": _qwen(Qwen2Processor, QWEN2_5, rope=ROPE),
    "qwen3_vl": _qwen(Qwen3Processor, DEEP, num_hidden_layers=3),  # what is added behind the last one changes nothing
    "qwen3_5": _qwen(Qwen3Processor, QWEN3, **DELTA),
    "idefics3": _tiles("Idefics3Image"),
    "smolvlm": _tiles("SmolVLMImage"),
    "llava": _llava("Llava", CROP, image_seq_length=16),
    "llava_next": _llava("LlavaNext", {**CROP, "image_grid_pinpoints": GRIDS}, image_grid_pinpoints=GRIDS),
    "gemma3": {
        "processor": (transformers.Gemma3Processor, {"image_seq_length": 4}), "place": "<boi>", "tower": "vision_tower",
        "pictures": ("Gemma3ImageProcessorPil", {"size": SQUARE}), "text": SLIDING, "vision": SIGLIP,
        "model": {"mm_tokens_per_image": 4, "boi_token_index": "<boi>", "eoi_token_index": "<eoi>"},
    },
    "gemma4": {
        "processor": (Gemma4Processor, {}), "tower": "vision_tower", "text": {**SLIDING, **PER_LAYER},
        "pictures": ("Gemma4ImageProcessorPil", {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}),
        "vision": {**TOWER, **PATCHES},
        "model": {"boi_token_id": "<boi>", "eoi_token_id": "<eoi>", "audio_token_id": 2, "audio_config": None},
    },
    "paligemma": {
        "processor": (PrefixProcessor, {}), "tower": "vision_tower",
        "pictures": ("SiglipImageProcessorPil", {"size": SQUARE, "image_seq_length": 16}),
        "text": {"model_type": "gemma"}, "vision": SIGLIP, "model": {"projection_dim": 32, "hidden_size": 32},
    },
}  # fmt: skip
"""Of each kind: its processor, which prepares pictures how, a picture's place in text, sizes, the encoder's name."""
SEVERAL = [name for name in KINDS if name != "paligemma"]
"""Those whose rows may have two pictures, or none."""


def tokenizer(place="<image>"):
    """Of words, which are separated by spaces."""
    special = ["<pad>", *ENDS[1:2], ENDS[0], *ENDS[2:], *PICTURE.values(), *TILES, "<end_of_utterance>"]
    words = [*special, *(f"w{number}" for number in range(WORDS))]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="</row>", bos_token="<row>", padding_side="left",
        extra_special_tokens=PICTURE, chat_template=TEMPLATE.replace("PLACE", place),
    )  # fmt: skip


def processor_of(name):
    kind = KINDS[name]
    text = tokenizer(kind.get("place", "<image>"))
    pictures, sizes = kind["pictures"]
    made, options = kind["processor"]
    try:
        prepares = getattr(transformers, pictures)(**sizes)
    except ImportError as error:  # of some kinds transformers 5.17 has none without torchvision
        pytest.skip(str(error).strip())
    return made(prepares, text, chat_template=text.chat_template, **options)


def config_of(name, processor, **text):
    """Its configuration; `text` changes that of the language model."""
    kind, words = KINDS[name], processor.tokenizer
    own = {key: words.convert_tokens_to_ids(v) if isinstance(v, str) else v for key, v in kind.get("model", {}).items()}
    ids = {f"{token}_id": words.convert_tokens_to_ids(PICTURE[token]) for token in list(PICTURE)[:4]}
    return AutoConfig.for_model(
        name,
        text_config={**TEXT, "vocab_size": len(words), **kind["text"], **text},
        vision_config=kind["vision"],
        **ids,
        **own,
    )


def vision_model(name, seed=0, **text):
    """A model whose tokens and pictures matter, and its processor."""
    processor = processor_of(name)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config_of(name, processor, **text)).float()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("A_log"):  # states that last
            torch.nn.init.constant_(parameter, -2.0)
        elif parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.15)
    model.generation_config.update(pad_token_id=0, eos_token_id=1)
    return model, processor


def tower_of(name, model):
    """The image encoder of such a model."""
    return model.get_submodule(f"model.{KINDS[name]['tower']}")


# Rows.

SIZES = [(24, 24), (40, 16), (16, 32), (32, 32)]
"""Width and height of pictures, in turn, two by two: rows of other pictures may have the same tokens."""
MESSAGES = List({"role": Value("string"), "content": Value("string")})


def picture(seed, size=None):
    """A picture of noise. Default: a size that its seed tells."""
    width, height = size or SIZES[seed // 2 % len(SIZES)]
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height))


def pictures_of(number, each, several, none):
    """Seeds of the pictures of a row: `each` rows share one. Of five some may have two (`several`), or `none`."""
    own = number // each
    return [] if none and number % 5 == 4 else [own, own + 1] if several and number % 5 == 3 else [own]


def words(draw, least, most):
    return " ".join(f"w{draw.randrange(1, WORDS)}" for _ in range(draw.randint(least, most)))


def _rows(count, each, several, system, **columns):
    draw, found = random.Random(count), []
    begin = [{"role": "system", "content": words(draw, system, system)}] if system else []
    questions = [words(draw, 2, 6) for _ in range(each)]
    for number in range(count):
        # TRL samples no completions where some prompts have pictures and others have none.
        seeds = pictures_of(number, each, several, none=several and bool(columns))
        row = {"images": [picture(seed) for seed in seeds]}
        row["prompt"] = [*begin, {"role": "user", "content": questions[number % each]}]
        for column, lengths in columns.items():
            row[column] = [{"role": "assistant", "content": words(draw, *lengths)}]
        found.append(row)
    kinds = {"images": List(ImageFeature()), "prompt": MESSAGES, **dict.fromkeys(columns, MESSAGES)}
    return Dataset.from_list(found, features=Features(kinds))


def sft_rows(count=24, each=4, several=True, system=0, longest=8):
    """The same `each` questions on every picture, and answers, behind a system prompt of `system` words."""
    return _rows(count, each, several, system, completion=(2, longest))


def conversations(count=24, each=4, several=True, system=0):
    """The same as whole conversations, in which all is learned."""

    def joined(row):
        return {"images": row["images"], "messages": row["prompt"] + row["completion"]}

    rows = [joined(row) for row in sft_rows(count, each, several, system)]
    return Dataset.from_list(rows, features=Features({"images": List(ImageFeature()), "messages": MESSAGES}))


def pairs(count=16, each=2, several=True, system=0, longest=8):
    """Preferences among two answers."""
    return _rows(count, each, several, system, chosen=(2, longest), rejected=(2, longest))


def judged(count=16, each=2, several=True, system=0):
    """Answers that are good or bad."""
    rows = sft_rows(count, each, several, system)
    return rows.add_column("label", [number % 2 == 0 for number in range(count)])


def prompts(count=8, each=2, several=True, system=0):
    """Questions alone."""
    return _rows(count, each, several, system)
