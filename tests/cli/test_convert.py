"""`hf-hybrid convert`: files of other tools, with our names."""

import json

import pytest
import yaml
from rig.byte_llama import assistant, chat_tokenizer, save_llama, user

from hf_hybrid.cli.options import ALIASES, DPO, SFT, TRAIN, CommandLine
from hf_hybrid.cli.other_tools import advice, table

pytest.importorskip("trl")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# The 80 commonest keys in 250 example files of Axolotl (July 2026), and the 60 commonest in 66 of LLaMA-Factory (August
# 2026), the commonest first.
AXOLOTL = (
    "base_model output_dir sequence_len micro_batch_size learning_rate optimizer bf16 datasets "
    "gradient_accumulation_steps lr_scheduler logging_steps num_epochs tf32 sample_packing warmup_ratio "
    "saves_per_epoch val_set_size attn_implementation gradient_checkpointing weight_decay wandb_name wandb_project "
    "wandb_entity wandb_watch wandb_log_model evals_per_epoch adapter lora_r lora_alpha dataset_prepared_path "
    "lora_dropout special_tokens resume_from_checkpoint load_in_4bit load_in_8bit lora_model_dir lora_target_modules "
    "plugins lora_target_linear model_type chat_template tokenizer_type gradient_checkpointing_kwargs fsdp_config "
    "eval_sample_packing strict pad_to_sequence_len trust_remote_code fp16 liger_rms_norm liger_glu_activation "
    "remove_unused_columns eot_tokens liger_layer_norm processor_type skip_prepare_dataset fsdp max_steps liger_rope "
    "lora_mlp_kernel fsdp_version lora_qkv_kernel lora_o_kernel warmup_steps save_steps rl "
    "liger_fused_linear_cross_entropy loss_watchdog_threshold loss_watchdog_patience quantize_moe_experts use_kernels "
    "seed torchdistx_path deepspeed activation_offloading gptq_groupsize gptq_model_v1 ddp_find_unused_parameters "
    "tokenizer_use_mistral_common lora_modules_to_save "
).split()
LLAMA_FACTORY = (
    "model_name_or_path template trust_remote_code stage finetuning_type cutoff_len preprocessing_num_workers "
    "output_dir do_train dataset logging_steps overwrite_output_dir per_device_train_batch_size "
    "gradient_accumulation_steps learning_rate lr_scheduler_type save_steps report_to plot_loss warmup_ratio "
    "dataloader_num_workers bf16 max_samples ddp_timeout num_train_epochs save_only_model overwrite_cache lora_rank "
    "lora_target resume_from_checkpoint image_max_pixels video_max_pixels deepspeed max_steps use_v1_kernels "
    "flash_attn use_kt adapter_name_or_path oft_block_size oft_target infer_backend export_dir export_size "
    "export_device export_legacy_format quantization_bit disable_gradient_checkpointing kt_cpu_activation kt_config "
    "pure_bf16 quantization_method pref_beta freeze_vision_tower freeze_multi_modal_projector freeze_language_model "
    "packing tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel use_distributed_optimizer "
).split()

FILES = {
    "axolotl chats": """
base_model: model
model_type: AutoModelForCausalLM
plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]
datasets:
  - {path: json, data_files: chats.jsonl, type: chat_template, split: train, field_messages: messages}
dataset_prepared_path: prepared
val_set_size: 0.2
sequence_len: 128
sample_packing: false
adapter: lora
lora_r: 4
lora_alpha: 8
lora_target_linear: true
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
bf16: auto
tf32: false
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
warmup_ratio: 0.1
evals_per_epoch: 2
saves_per_epoch: 1
wandb_project:
special_tokens: {pad_token: "<|end|>", eos_token: "<|im_end|>"}
tokens: ["<|im_start|>"]
chat_template: chatml
eot_tokens: ["<|im_end|>"]
sdp_attention: true
""",
    "axolotl texts": """
base_model: model
datasets:
  - {path: texts.jsonl, type: completion, field: body}
val_set_size: 0.0
sequence_len: 64
sample_packing: true
pad_to_sequence_len: true
micro_batch_size: 1
max_steps: 2
optimizer: adamw_torch_fused
lr_scheduler: constant
learning_rate: 1e-4
evals_per_epoch: 4
saves_per_epoch: 0
loss_watchdog_threshold: 5.0
liger_rope: true
flex_attention: false
""",
    "axolotl pairs": """
base_model: model
rl: dpo
datasets:
  - {path: pairs.jsonl, split: train, type: chatml.intel}
sequence_len: 128
adapter: qlora
load_in_4bit: false
lora_target_modules: [q_proj, v_proj]
micro_batch_size: 2
max_steps: 1
optimizer: adamw_torch
learning_rate: 5e-5
group_by_length: false
""",
    "llama-factory chats": """
model_name_or_path: model
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 4
lora_target: all
dataset: chats.jsonl, more.jsonl
template: qwen3_nothink
cutoff_len: 128
max_samples: 6
dataloader_num_workers: 0
overwrite_cache: true
overwrite_output_dir: true
plot_loss: true
logging_steps: 1
save_steps: 500
save_only_model: false
report_to: none
per_device_train_batch_size: 2
gradient_accumulation_steps: 1
learning_rate: 1.0e-4
num_train_epochs: 1.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
ddp_timeout: 180000000
resume_from_checkpoint: null
val_size: 0.2
""",
    "llama-factory pairs": """
model_name_or_path: model
stage: dpo
finetuning_type: full
pref_beta: 0.2
pref_loss: sigmoid
dataset: pairs.jsonl
template: llama3
cutoff_len: 128
per_device_train_batch_size: 2
max_steps: 1
flash_attn: auto
disable_gradient_checkpointing: true
""",
    "llama-factory texts": """
model_name_or_path: model
stage: pt
finetuning_type: full
dataset: texts.jsonl
text_column: body
cutoff_len: 32
per_device_train_batch_size: 2
max_steps: 1
bf16: false
optim: adamw_torch
""",
    "handbook chats": """
model_name_or_path: model
model_revision: main
torch_dtype: float32
dataset_mixture:
  datasets:
    - {id: chats.jsonl, split: train, columns: [messages], weight: 0.5}
    - {id: more.jsonl, split: train, columns: [messages], weight: 0.5}
  seed: 0
chat_template: "{% for m in messages %}{{ m['content'] }}{% endfor %}"
max_length: 128
max_steps: 1
per_device_train_batch_size: 2
use_peft: true
lora_r: 4
overwrite_output_dir: true
""",
    "trl pairs": """
model_name_or_path: model
dataset_name: pairs.jsonl
max_prompt_length: 64
beta: 0.1
loss_type: sigmoid
per_device_train_batch_size: 2
max_steps: 1
gradient_checkpointing: false
""",
    "trl rewards": """
model_name_or_path: model
dataset_name: questions.jsonl
reward_funcs: [numeric_answer]
num_generations: 2
max_completion_length: 4
per_device_train_batch_size: 2
max_steps: 1
use_vllm: false
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert")
    save_llama(folder / "model", chat_tokenizer(TEMPLATE), max_position_embeddings=256)
    rows = {
        "chats": [{"messages": [user(f"Say {i}"), assistant(f"{i}!")]} for i in range(10)],
        "more": [{"messages": [user(f"Or {i}"), assistant(f"{i}?")]} for i in range(10)],
        "texts": [{"body": f"number {i} " * 20} for i in range(10)],
        "pairs": [{"prompt": f"Say {i}: ", "chosen": f"{i}", "rejected": "no"} for i in range(10)],
        "questions": [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(10)],
    }
    for name, held in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, held)), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_tool_trains_once_it_is_converted(folder, name, cli, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    source, target = tmp_path / "other.yaml", tmp_path / "run.yaml"
    source.write_text(FILES[name], encoding="utf-8")
    text, _ = cli("convert", source)
    target.write_text(text, encoding="utf-8")
    values = yaml.safe_load(text)
    told = {line.split(":")[0].removeprefix("#   ") for line in text.split("# Left out:")[-1].splitlines()}
    told |= {key for line in text.splitlines() if line.startswith("#   empty: ") for key in line[11:].split(", ")}
    for key in yaml.safe_load(FILES[name]):  # nothing goes without a word
        entry = table().get(key)
        names = {ALIASES.get(key, key), *(() if entry is None else entry.names)}
        names = {name.split()[0] for name in names} | {name.replace("_steps", "_strategy") for name in names}
        assert names & values.keys() or key in told, key
    cli(values["command"], "--config", target, "--use_cpu", "--output_dir", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "train_results.json").read_text())["train_runtime"] > 0


def test_values_are_taken_over(folder, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    (tmp_path / "a.yml").write_text(FILES["axolotl chats"])
    values = yaml.safe_load(cli("convert", tmp_path / "a.yml")[0])
    assert values["command"] == "sft" and values["peft"] == "lora" and values["dataset"] == ["chats.jsonl"]
    assert (values["eval_strategy"], values["eval_steps"], values["save_strategy"]) == ("steps", 0.5, "epoch")
    assert values["attn_implementation"] == "sdpa" and values["activation_checkpointing"] is True
    assert not {"bf16", "assistant_only_loss", "report_to", "env"} & values.keys()
    assert values["chat_template_path"] == "chatml" and values["eos_token"] == "<|im_end|>"
    assert values["add_tokens"] == ["<|im_end|>", "<|im_start|>"]
    (tmp_path / "b.yml").write_text(
        "base_model: model\nwandb_project: mine\nrl: ipo\nload_in_4bit: true\nadapter: qlora\n"
        "tokens: {eos_token: <e>, pad_token: <p>}\nchat_template: tokenizer_default"
    )
    values = yaml.safe_load(cli("convert", tmp_path / "b.yml")[0])
    assert values["env"] == {"WANDB_PROJECT": "mine"} and values["report_to"] == "wandb" and values["peft"] == "qlora"
    assert values["command"] == "dpo" and values["loss_type"] == ["ipo"]
    assert values["eos_token"] == "<e>" and values["add_tokens"] == ["<e>"] and "chat_template_path" not in values


@pytest.mark.parametrize("keys, count", [(AXOLOTL, 80), (LLAMA_FACTORY, 60)])
def test_no_common_key_is_without_a_word(keys, count):
    known = vars(CommandLine([], SFT).values)
    assert len(set(keys)) == count
    silent = [key for key in keys if key not in known and not advice(key, known) and key != "model_name_or_path"]
    assert silent == []


def test_every_name_of_the_table_leads_to_an_option():
    known = [vars(CommandLine([], command).values) for command in (TRAIN, SFT, DPO)]
    lost = [name for name, entry in table().items() if not entry.reason and not any(map(entry.own, known))]
    assert lost == ["max_new_tokens", "group_size", "trl"], "they are options of GRPO"


def test_a_foreign_file_is_refused_in_one_message(folder, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    (tmp_path / "a.yml").write_text(FILES["axolotl chats"])
    said = refused("sft", "--config", tmp_path / "a.yml")
    for line in (
        "base_model: Write `--model` in its place.",
        "adapter: Write `--peft` in its place.",
        "bf16: Write `--bf16` in its place.",
        "lora_target_linear: Leave it out: all linear layers but the head get adapters by default.",
        "evals_per_epoch: Write `--eval_steps` in its place.",
        "eot_tokens: Leave it out: the chat template says where an answer ends.",
        f"`hf-hybrid convert {tmp_path / 'a.yml'} > run.yaml` writes a file of another tool",
    ):
        assert line in said
