"""What a training loads before its data are there: the tokenizer, the model's config and weights, and adapters."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import re
from collections.abc import Generator
from dataclasses import fields
from pathlib import Path
from typing import Any

from hf_hybrid.cli.options import REWARD, AdapterOptions, ModelOptions, OptionError, Options
from hf_hybrid.records.readings import as_dict, read_json

logger = logging.getLogger(__name__)

BASE_NAME = "_hybrid_base"
"""In `output_dir`: the base of new adapters, with the adapters of `--model` merged (`--adapter new`)."""

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['role'].capitalize() + ': ' + message['content'] + '\\n\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
"""`--chat_template_path plain`: for a base model without a template. It needs no tokens of its own."""
OTHER_NAMES = {
    "chatml": "qwen3instruct2507", "qwen3nothink": "qwen3instruct2507", "qwen": "qwen25", "gemma2": "gemma",
    "deepseek3": "deepseekv3", "phi": "phi3", "qwen2vl": "qwen25vl", "qwen3vlnothink": "qwen3vl",
}  # fmt: skip
"""What other tools call templates that TRL has, both as [`named_template`] compares them."""

# Before torch is imported.


def check_model(name: str) -> None:
    """Refuse a path that holds no model and no adapters. What may be an id on the Hub is not looked at."""
    path = Path(name).expanduser()
    if path.is_dir():
        if _adapter_values(name) is None and not (path / "config.json").is_file():
            raise OptionError(f"`--model {name}` holds no `config.json`, so it is not the folder of a model.")
    elif not path.exists() and (name.startswith((".", "/", "~")) or path.suffix == ".json" or name.count("/") > 1):
        raise OptionError(f"`--model {name}`: there is no such file or folder.")


def _adapter_values(name: str) -> dict[str, Any] | None:
    """What trained adapters in a folder say of themselves, `None` if it is no folder of adapters."""
    path = Path(name).expanduser()
    if not (path / "adapter_config.json").is_file() or (path / "config.json").is_file():
        return None
    values = as_dict(read_json(path / "adapter_config.json", []))
    if not isinstance(values.get("base_model_name_or_path"), str):
        raise OptionError(f"`--model {name}` holds adapters whose `adapter_config.json` does not name their base.")
    return values


def take_adapter(options: Options) -> Path | None:
    """
    Put the base in the place of trained adapters that `--model` names, and return their folder. With `--adapter new`
    that is the base in which they are merged, and no adapters are left.
    """
    model, adapters, name = options.model, options.adapters, str(options.model.model)
    values, folder = _adapter_values(name), Path(name).expanduser()
    if values is None:
        return None
    adapters.use_peft = True
    if (folder / "tokenizer_config.json").is_file():
        model.tokenizer = model.tokenizer or name
    if adapters.adapter == "new":
        from hf_hybrid.export.source import check_source, plain_folder

        work = Path(options.config.output_dir).resolve() / BASE_NAME
        if options.config.local_process_index == 0:
            check_source(folder)
            plain_folder(folder, work, as_trained=False)
        model.model = str(work / "plain")
        return None
    for described in fields(adapters):
        value = getattr(adapters, described.name)
        if described.name.startswith(("lora_", "use_rslora", "use_dora")) and value != described.default:
            raise OptionError(
                f"`--{described.name} {value}` shapes new adapters, and training goes on with those in `{name}`. Leave "
                "it out, or merge those into their base: `--adapter new`."
            )
    model.model, model.model_revision = values["base_model_name_or_path"], values.get("revision")
    return folder


# Small files.


def load_tokenizer(options: ModelOptions, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of the options, as it is saved."""
    from transformers import AutoTokenizer

    model = str(options.model)
    name = options.tokenizer or (str(Path(model).parent) if Path(model).suffix == ".json" else model)
    revision = "main" if options.tokenizer else options.model_revision or "main"
    with refusing(f"No tokenizer can be loaded from `{name}`", "Name one with `--tokenizer`."):
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)


def equip(tokenizer: Any, options: ModelOptions, args: Any) -> list[str]:
    """
    Give a tokenizer the tokens, the chat template and the end-of-text token of the options, of which TRL has some in
    `args`. Without one a template ends answers by the token that it writes behind them. Return the tokens that are new.
    """
    path, end = (getattr(args, name, getattr(options, name, None)) for name in ("chat_template_path", "eos_token"))
    known = tokenizer.get_vocab()
    tokenizer.add_tokens(options.add_tokens or [])
    if path == "plain" and (end or tokenizer.eos_token) is None:
        raise OptionError("`--chat_template_path plain` ends answers by an end-of-text token, and there is none.")
    if path is not None:
        with refusing(f"`--chat_template_path {path:.80}` cannot be taken"):
            of_model = _take_template(tokenizer, path)
            if tokenizer.bos_token is None and "bos_token" in tokenizer.chat_template:
                tokenizer.chat_template = "{% set bos_token = '' %}" + tokenizer.chat_template
            end = end or of_model or _end_of_answers(tokenizer)
        args.chat_template_path = None  # done
    if end is not None and end not in tokenizer.get_vocab():
        raise OptionError(
            f"`--eos_token {end}` is not in the vocabulary of the tokenizer. Add it: `--add_tokens {end}`."
        )
    if end is not None:
        tokenizer.add_special_tokens({"eos_token": end})
    return sorted(tokenizer.get_vocab().keys() - known.keys(), key=tokenizer.convert_tokens_to_ids)


def named_template(name: str) -> Path | None:
    """Return the file of a template that TRL has, by its name there or in other tools (`qwen_25` is `qwen2_5`)."""
    trl, plain = importlib.util.find_spec("trl"), lambda name: re.sub(r"[\W_]", "", name.lower())
    folder = Path(*trl.submodule_search_locations or ()) / "chat_templates" if trl else Path()
    files = {plain(file.stem): file for file in folder.glob("*.jinja")}
    return files.get(OTHER_NAMES.get(plain(name), plain(name)))


def _take_template(tokenizer: Any, path: str) -> str | None:
    """Set the template that a path, a name, another model or itself is; return the end-of-text token of a model."""
    from transformers import AutoTokenizer

    if path == "plain" or "{%" in path or "{{" in path:
        tokenizer.chat_template = PLAIN_TEMPLATE if path == "plain" else path
        return None
    place = Path(path).expanduser()
    file = place if place.is_file() else None if place.is_dir() else named_template(path)
    if file is not None:
        tokenizer.chat_template = file.read_text(encoding="utf-8")
        return None
    if not place.is_dir() and "/" not in path:
        raise OptionError(
            f"`--chat_template_path {path}` is neither a file nor `plain`, `chatml` or a template of TRL (llama3, "
            "gemma, qwen3, ...), nor a folder or an id on the Hub of a model that has one."
        )
    source: Any = AutoTokenizer.from_pretrained(  # as `trl.clone_chat_template`
        str(place) if place.is_dir() else path, trust_remote_code=False
    )
    tokenizer.chat_template, known = source.get_chat_template(), tokenizer.get_vocab()
    tokenizer.add_tokens([token for token in source.added_tokens_decoder.values() if token.content not in known])
    return source.eos_token


def _end_of_answers(tokenizer: Any) -> str | None:
    """Return the first token of its own that the chat template writes behind an answer."""
    chat = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "answer"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    added = tokenizer.get_added_vocab()
    return next((token for token in tokenizer.tokenize(text.rpartition("answer")[2]) if token in added), None)


def read_config(options: ModelOptions, trust_remote_code: bool = False) -> Any:
    """Return the config of a causal language model, and warn if only a part of the model is trained."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name, revision = str(options.model), options.model_revision or "main"
    remedy = "It must be a folder, a config.json, or an id on the Hub, which needs the network (HF_HUB_OFFLINE=1 "
    with refusing(f"`--model {name}` cannot be loaded", remedy + "forbids it) unless it is cached."):
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    is_encoder = any(architecture.endswith("MaskedLM") for architecture in getattr(config, "architectures", None) or ())
    known = takes_images(config) or type(config) in AutoModelForCausalLM._model_mapping or hasattr(config, "auto_map")
    if getattr(config, "is_encoder_decoder", False) or is_encoder or not known:
        raise OptionError(
            f"`--model {name}` is no causal language model but a `{config.model_type}`. Train it in Python with "
            "`HybridTrainer`, which takes what `Trainer` takes."
        )
    return config


def takes_images(config: Any) -> bool:
    """Whether a model of this config answers to images and text."""
    from transformers import AutoModelForImageTextToText

    return type(config) in AutoModelForImageTextToText._model_mapping


def load_processor(options: ModelOptions, tokenizer: Any, trust_remote_code: bool, as_given: bool) -> Any:
    """Load what prepares images for a model, with this tokenizer; `as_given`: with its chat template too."""
    from transformers import AutoProcessor

    name, revision = str(options.model), options.model_revision or "main"
    with refusing(f"The data have images, and no processor for them can be loaded from `{name}`"):
        processor: Any = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    if not hasattr(processor, "image_processor"):
        raise OptionError(f"The data have images, and `{name}` has no processor for them (`processor_config.json`).")
    processor.tokenizer = tokenizer
    if as_given or not processor.chat_template:
        processor.chat_template = tokenizer.chat_template
    return processor


def check_text(config: Any, name: str) -> None:
    """Refuse data without images for a model that has no way to train on text alone, and say it of one that has."""
    from transformers import AutoModelForCausalLM

    if takes_images(config) and type(config) not in AutoModelForCausalLM._model_mapping:
        raise OptionError(
            f"`--model {name}` is no causal language model but a `{config.model_type}`, which takes images, and the "
            "data have none in `images` or `image`. Train it on text in Python with `HybridTrainer`."
        )
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        logger.warning("`%s` takes images or sounds too. Only its text is trained on.", name)


def around_images(model: Any) -> str:
    """Return a pattern of the names of all modules that are outside of the language model."""
    decoder = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is decoder)
    return rf"(?!{re.escape(name)}\.).*"


def check_sizes(config: Any, name: str, vocabulary: int, sequence_length: int) -> None:
    """Refuse an absurd depth, more tokens of the tokenizer than are embedded, and sequences longer than positions."""
    from hf_hybrid.plan.models import MOST_LAYERS

    text, positions = config.get_text_config(), _positions_of(config)
    layers, embedded = getattr(text, "num_hidden_layers", None), text.vocab_size
    if isinstance(layers, int) and layers > MOST_LAYERS:  # they would take minutes and more to build
        raise OptionError(f"`--model {name}`: `num_hidden_layers={layers}` is over {MOST_LAYERS}. Correct the config.")
    if embedded is not None and vocabulary > embedded:
        raise OptionError(
            f"The tokenizer has {vocabulary} tokens, and the model `{name}` embeds {embedded}. Set "
            "`--tokenizer` to the one that belongs to the model."
        )
    if 0 < positions < sequence_length:
        raise OptionError(
            f"`sequence_length={sequence_length}` is over the {positions} positions of the model "
            "(`max_position_embeddings`). Lower it, or raise that number in the config of the model."
        )


def _positions_of(config: Any) -> int:
    """How many positions a model knows, 0 for any number."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 0


def learns_positions(config: Any) -> bool:
    """Whether a model has weights for its positions, and so none for others."""
    return bool(_positions_of(config)) and not getattr(config.get_text_config(), "rope_parameters", None)


def check_positions(config: Any, longest: int, remedy: str) -> None:
    """Refuse rows that are longer than the positions that a model learned, and warn where they can be computed."""
    positions = _positions_of(config)
    if not 0 < positions < longest:
        return
    text = f"Rows have up to {longest:,} tokens, and the model has {positions:,} positions (`max_position_embeddings`)"
    if learns_positions(config):
        raise OptionError(f"{text}. {remedy}")
    logger.warning("%s; it was not trained on those beyond. %s", text, remedy)


def reason_of(error: BaseException) -> str:
    """What an error says, or else the error that it hides: `datasets` wraps what went wrong in a file."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return text if text.endswith(".") else f"{text}."


@contextlib.contextmanager
def refusing(what: str, remedy: str = "") -> Generator[None]:
    """Context in which any error (of a broken file, of absurd sizes) is an [`OptionError`] that says `what`."""
    try:
        yield
    except OptionError:
        raise
    except Exception as error:
        raise OptionError(f"{what}: {reason_of(error)} {remedy}".rstrip()) from error


# Weights.


def make_repository(name: str, option: str, folder: str, how: dict[str, Any]) -> None:
    """Make a repository on the Hub, before the work whose `folder` is pushed there, or refuse the option."""
    from huggingface_hub import create_repo

    remedy = "Connect to the network and log in (`hf auth login`), or push later:"
    with refusing(f"`{option}`: `{name}` cannot be made on the Hub", f"{remedy} `hf upload {name} {folder}`."):
        create_repo(name, exist_ok=True, **how)


def load_model(
    options: Options, config: Any, adapter: Path | None = None, images: bool = False, vocabulary: int = 0
) -> Any:
    """
    Load the model of a config, with the trained adapters of a folder (`adapter`) or without any, with what encodes
    `images`, and with embeddings for a `vocabulary` of so many tokens. The caller has set the seed that random weights
    are drawn with. An `ImportError` says what to install for quantisation.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

    from hf_hybrid.export.source import shard_names

    scores = options.command is REWARD
    if scores:
        config.num_labels = 1
    kind: Any = AutoModelForImageTextToText if images else AutoModelForCausalLM
    kind = AutoModelForSequenceClassification if scores else kind
    model, adapters, args, name = options.model, options.adapters, options.config, str(options.model.model)
    if model.qat == "bitnet" and adapters.use_peft:
        raise OptionError("`--qat bitnet` trains all weights, and `--peft` freezes them. Leave one out.")
    if not images:
        check_text(config, name)
    dtype = model.dtype or ("auto" if adapters.use_peft else "float32")
    common: dict[str, Any] = {"trust_remote_code": options.trust_remote_code, "dtype": dtype}
    if model.attn_implementation is not None:
        common["attn_implementation"] = model.attn_implementation
    path = Path(name)
    for index in path.glob("*.index.json") if path.is_dir() else ():
        try:
            shard_names(index)  # they must lie in the folder
        except ValueError as error:
            raise OptionError(f"`--model {path}` cannot be loaded: `{index.name}` {error}.") from None
    without_weights = path.is_dir() and not any(any(path.glob(f"*.{kind}")) for kind in ("safetensors", "bin"))
    if model.from_scratch or path.suffix == ".json" or without_weights:
        if adapters.use_peft:
            raise OptionError(f"`--peft lora` adapts trained weights, and `{name}` has none.")
        common["dtype"] = torch.float32 if dtype == "auto" else getattr(torch, dtype)
        with refusing(f"`--model {name}` cannot be built"):
            loaded = kind.from_config(config, **common)
        # DeepSpeed's `ds_id` marks parameters that lie on other processes, and are empty on this one.
        weights = loaded.named_parameters()
        empty = [key for key, weight in weights if not weight.numel() and not hasattr(weight, "ds_id")]
        if empty:
            raise OptionError(f"`--model {name}`: `{empty[0]}` has no elements. Correct the sizes in the config.")
    else:
        common |= {"revision": model.model_revision or "main", **_quantization(adapters, args)}
        common |= {**(getattr(args, "model_init_kwargs", None) or {}), "config": config, "output_loading_info": True}
        with refusing(f"`--model {name}` cannot be loaded"):
            loaded, info = kind.from_pretrained(name, **common)
        if scores:  # a head that scores begins at random, in place of that of the language model
            info = {what: {*keys} - {"score.weight", "lm_head.weight"} for what, keys in info.items() if "keys" in what}
        if not model.allow_new_weights:
            _check_keys(name, loaded, info)
        # bitsandbytes packs linear layers, not experts in one tensor.
        size = sum(weight.nbytes for weight in loaded.parameters() if weight.ndim == 3)
        if size and (adapters.load_in_4bit or adapters.load_in_8bit):
            logger.warning("The experts of the model are not quantised, and take %.3g GiB.", size / 2**30)
    if vocabulary > loaded.get_input_embeddings().weight.shape[0]:
        loaded.resize_token_embeddings(vocabulary)
    if model.qat == "bitnet":
        from hf_hybrid.export.bitnet import to_bitnet

        return to_bitnet(loaded)
    if adapter is not None:
        from peft import PeftModel

        return PeftModel.from_pretrained(_prepared(loaded, adapters), str(adapter), is_trainable=True)
    return loaded


def _check_keys(name: str, model: Any, info: dict[str, Any]) -> None:
    """Refuse a checkpoint that lacks weights of the model, which would be random, or that has others."""
    parts = []
    for what, keys in (("lacks", info["missing_keys"]), ("has, in vain,", info["unexpected_keys"])):
        if keys:
            names = ", ".join(f"`{key}`" for key in sorted(keys)[:3]) + (" ..." if len(keys) > 3 else "")
            parts.append(f"{what} {len(keys):,} weights: {names}")
    if parts:
        raise OptionError(
            f"`--model {name}` is no whole `{type(model).__name__}`: it {'; it '.join(parts)}. Set "
            "`--allow_new_weights true` if what it lacks shall begin at random."
        )


def _quantization(adapters: AdapterOptions, args: Any) -> dict[str, Any]:
    """How `from_pretrained` packs a base, and where: while layers are streamed, in host memory."""
    if not (adapters.load_in_4bit or adapters.load_in_8bit):
        return {}
    import torch
    from accelerate import PartialState
    from transformers import BitsAndBytesConfig

    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise ImportError(
            '`--peft qlora` needs bitsandbytes. Install it: pip install "hf-hybrid[peft,quantization]"'
        ) from None
    config = BitsAndBytesConfig(
        load_in_8bit=adapters.load_in_8bit,
        load_in_4bit=adapters.load_in_4bit,
        bnb_4bit_quant_type=adapters.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=adapters.use_bnb_nested_quant,
        bnb_4bit_compute_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        bnb_4bit_quant_storage=adapters.bnb_4bit_quant_storage,
    )
    device = PartialState().device if args.memory == "off" else "cpu"
    return {"quantization_config": config, "device_map": {"": device}}


# Adapters.


def adapters_config(options: AdapterOptions) -> Any:
    """Return the `peft.LoraConfig` of the options, `None` without adapters."""
    if not options.use_peft:
        if options.load_in_8bit or options.load_in_4bit:
            bits = 8 if options.load_in_8bit else 4
            raise OptionError(
                f"`--load_in_{bits}bit` quantises a base, which cannot be trained itself. Add `--use_peft true`."
            )
        return None
    from hf_hybrid.plan.models import lora_config

    more = {"target_parameters": options.lora_target_parameters} if options.lora_target_parameters else {}
    targets = options.lora_target_modules or (None if options.lora_target_parameters else "all-linear")
    if isinstance(targets, list) and len(targets) == 1:
        targets = targets[0]  # a regular expression, or `all-linear`
    return lora_config(
        options.lora_r, targets, lora_alpha=options.lora_alpha, lora_dropout=options.lora_dropout,
        use_rslora=options.use_rslora, use_dora=options.use_dora, modules_to_save=options.lora_modules_to_save,
        task_type=options.lora_task_type, **more,
    )  # fmt: skip


def train_tokens(config: Any, model: Any, ids: list[int]) -> None:
    """Have adapters train the embeddings of new tokens at both ends of a model, where they do not train all of them."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = {name.rpartition(".")[2]: end for name, end in model.named_modules() if any(end is one for one in ends)}
    biased = [name for name, end in names.items() if getattr(end, "bias", None) is not None]  # which peft leaves out
    whole = [*(config.modules_to_save or ()), *biased]
    if adapted := [name for name in names if name in (config.target_modules or ()) and name not in whole]:
        raise OptionError(
            f"Rows of new tokens are trained in `{adapted[0]}`, and `--lora_target_modules` puts adapters there. Leave "
            f"it out there, or train all of it: `--lora_modules_to_save {adapted[0]}`."
        )
    config.modules_to_save = whole or None
    config.trainable_token_indices = {name: ids for name in names if name not in whole} or None


def finish_tokens(model: Any) -> None:
    """Save of new tokens that adapters train their rows alone, and not whole tables; and let TRL read such a head."""
    configs = getattr(model, "peft_config", {}).values()
    if any(getattr(config, "trainable_token_indices", None) for config in configs):
        model.save_pretrained = functools.partial(model.save_pretrained, save_embedding_layers=False)
        head = model.get_output_embeddings()
        if head is not None and not hasattr(head, "bias"):
            head.bias = None  # it has none, and peft's module around it does not say so


def add_adapters(model: Any, config: Any, options: AdapterOptions) -> Any:
    """Put adapters on a model for `HybridTrainer`; TRL's trainers do it themselves."""
    from peft import get_peft_model

    return get_peft_model(_prepared(model, options), config)


def _prepared(model: Any, options: AdapterOptions) -> Any:
    """A base that adapters can be trained on, quantised or not."""
    from peft import prepare_model_for_kbit_training

    if not (options.load_in_4bit or options.load_in_8bit):
        return model
    # Activation checkpointing is an option of TrainingArguments and stays one.
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
