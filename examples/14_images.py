"""
Questions about images, of which rows share them (under a minute on two CPU cores, nothing is downloaded).

    pip install "hf-hybrid[trl]" pillow
    python examples/14_images.py
    hf-hybrid chat out/shapes/model

It draws coloured shapes, asks three questions about each, and builds a small LLaVA that begins with random weights.
Rows of a batch that are about one shape share its image, which is encoded once. In the chat `/image out/shapes/3.png`
shows the model a shape, and `what is it ?` asks. Every option of HybridSFTConfig is a flag too. The same in a command:

    hf-hybrid sft --model out/shapes/begin --dataset out/shapes/rows.jsonl --output_dir out/shapes/again \
        --learning_rate 3e-3 --num_train_epochs 80 --per_device_train_batch_size 24
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path

from hf_hybrid.cli.console import quiet_imports

with quiet_imports():
    from datasets import Dataset, Image, List
    from PIL import Image as Picture
    from PIL import ImageDraw
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoConfig,
        AutoModelForImageTextToText,
        CLIPImageProcessorPil,
        HfArgumentParser,
        LlavaProcessor,
        PreTrainedTokenizerFast,
        set_seed,
    )

    from hf_hybrid import HybridSFTConfig, HybridSFTTrainer

COLOURS = ("red", "green", "blue", "yellow")
SHAPES = {"square": "rectangle", "disc": "ellipse", "triangle": "polygon"}
QUESTIONS = ("what colour ?", "which shape ?", "what is it ?")
FOLDER, SIZE, PATCH = Path("out/shapes"), 24, 6
TEMPLATE = """
{%- for message in messages %}<{{ message.role }}> {% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }} {% endfor %}{% endif %}
{%- if message.role == 'assistant' %} <end> {% endif %}{% endfor %}
{%- if add_generation_prompt %}<assistant> {% endif %}"""


def draw(folder: Path) -> list[dict]:
    """Draw each shape in each colour, in two sizes, and return the rows: three questions about each."""
    rows, found = [], itertools.product(COLOURS, SHAPES, (2, 5))
    for number, (colour, shape, edge) in enumerate(found):
        picture, box = Picture.new("RGB", (SIZE, SIZE), "white"), (edge, edge, SIZE - edge, SIZE - edge)
        corners = (edge, SIZE - edge, SIZE // 2, edge, SIZE - edge, SIZE - edge) if shape == "triangle" else box
        getattr(ImageDraw.Draw(picture), SHAPES[shape])(corners, fill=colour)
        picture.save(folder / f"{number}.png")
        for question, answer in zip(QUESTIONS, (colour, shape, f"a {colour} {shape}"), strict=True):
            messages = [{"role": "user", "content": f"<image> {question}"}, {"role": "assistant", "content": answer}]
            rows.append({"image": f"{number}.png", "messages": messages})
    return rows


def build(folder: Path) -> None:
    """Save a small LLaVA with random weights, and its processor."""
    words = "<pad> <end> <user> <assistant> <image> ? a what which is it colour shape".split()
    words += [*COLOURS, *SHAPES]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(words[:5])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<end>",
        extra_special_tokens={"image_token": "<image>"},
        chat_template=TEMPLATE,
    )
    square = {"height": SIZE, "width": SIZE}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=square),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        "llava",
        text_config={
            "model_type": "llama",
            "vocab_size": len(words),
            "max_position_embeddings": 256,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 1,
            **sizes,
        },
        vision_config={
            "model_type": "clip_vision_model",
            "image_size": SIZE,
            "patch_size": PATCH,
            "projection_dim": 64,
            **sizes,
        },
        image_token_index=words.index("<image>"),
        image_seq_length=(SIZE // PATCH) ** 2,
    )
    set_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    model.generation_config.update(pad_token_id=0, eos_token_id=1, bos_token_id=None)
    for part in (model, processor):
        part.save_pretrained(folder)


@dataclass
class ScriptArguments:
    freeze_encoder: bool = field(default=False, metadata={"help": "Train the language model alone."})


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, HybridSFTConfig))
    parser.set_defaults(
        output_dir="out/shapes/model", max_steps=240, per_device_train_batch_size=24, max_length=None,
        learning_rate=3e-3, logging_steps=20, save_strategy="no", report_to="none", dataloader_pin_memory=False,
        use_cpu=True, bf16=False, activation_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    script, args = parser.parse_args_into_dataclasses()
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = draw(FOLDER)
    (FOLDER / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build(FOLDER / "begin")
    processor = LlavaProcessor.from_pretrained(FOLDER / "begin")
    model = AutoModelForImageTextToText.from_pretrained(FOLDER / "begin")
    if script.freeze_encoder:
        model.model.vision_tower.requires_grad_(False)
    data = Dataset.from_list([  # TRL puts the images in front of what the user says
        {
            "images": [str(FOLDER / row["image"])],
            "prompt": [{"role": "user", "content": row["messages"][0]["content"].removeprefix("<image> ")}],
            "completion": row["messages"][1:],
        }
        for row in rows
    ]).cast_column("images", List(Image()))  # fmt: skip
    trainer = HybridSFTTrainer(model, args, train_dataset=data, eval_dataset=data, processing_class=processor)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    trainer.save_model()
    summary = trainer.hybrid_summary()
    print(f"evaluation loss     {before:.3f} -> {trainer.evaluate()['eval_loss']:.3f}")
    print(f"images              {summary['images']:,} in rows, {summary['images_shared']:,} of them not encoded again")
    print(f"tokens              {summary['tokens']:,} in rows, {summary['tokens_shared']:,} of them not computed again")
    print(f"model               {args.output_dir}")


if __name__ == "__main__":
    main()
