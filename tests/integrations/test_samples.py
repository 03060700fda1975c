"""Samples of generations: they change no bit of the training, and say why where they are left out."""

import json
import shutil

import pytest
import torch
from conftest import ByteText, assert_same_weights, config_values, hybrid_config, losses, tiny_model, weights
from rig import trainers
from transformers import LlamaForSequenceClassification, Trainer, TrainingArguments

from hf_hybrid import HybridTrainer, SampleCallback
from hf_hybrid.cli.main import main
from hf_hybrid.integrations import samples as room
from hf_hybrid.report.samples import read_prompts, samples_of

rollouts = pytest.importorskip("rig.rollouts")
TOKENIZER = rollouts.TOKENIZER


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("easy 1\n\n  hard 2 \n")
    return path


def train(folder, model=None, callbacks=(), resume=None, **options):
    values = {"max_steps": 12, "eval_strategy": "steps", "eval_steps": 4, **options}
    torch.manual_seed(1)  # of dropout
    model = tiny_model(attention_dropout=0.1, vocab_size=256) if model is None else model
    values |= {"model": model, "samples": 64, "eval_dataset": ByteText(4, offset=64), "processing_class": TOKENIZER}
    return trainers.train(folder, resume=resume, callbacks=list(callbacks), **values)


def test_prompts_are_completed_at_evaluations_and_no_bit_of_the_training_changes(tmp_path, prompts):
    plain = train(tmp_path / "plain")
    sampled = train(tmp_path / "sampled", callbacks=[SampleCallback(prompts, 5)])
    assert_same_weights(weights(plain.model), weights(sampled.model))
    assert losses(plain) == losses(sampled)
    assert not (tmp_path / "plain" / "samples.jsonl").exists()
    found = samples_of(tmp_path / "sampled")
    assert [(line["step"], line["prompt"]) for line in found] == [
        (step, prompt) for step in (4, 8, 12) for prompt in ("easy 1", "hard 2")
    ]
    assert all(0 < line["tokens"] <= 5 and isinstance(line["ended"], bool) for line in found)
    tokens = room.tokens_of("easy 1", TOKENIZER)
    greedy = sampled.model.eval().generate(tokens, do_sample=False, max_new_tokens=5, eos_token_id=1, pad_token_id=0)
    assert found[-2]["completion"] == TOKENIZER.decode(greedy[0, tokens.shape[1] :], skip_special_tokens=True)


def test_modes_and_random_states_are_as_before():
    model = tiny_model(vocab_size=len(TOKENIZER))
    model.train()
    model.model.layers[0].eval()  # a module that its user froze
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    generate = model.generate

    def draws(*args, **kwargs):
        torch.rand(3)
        return generate(*args, **kwargs)

    model.generate = draws
    room.complete(model, TOKENIZER, ["ab"], 3)
    assert [module.training for module in model.modules()] == modes and torch.equal(torch.get_rng_state(), state)


def test_only_the_first_process_completes_prompts(tmp_path):
    from transformers import TrainerControl, TrainerState

    args = TrainingArguments(**config_values(tmp_path, eval_strategy="steps", eval_steps=1))
    callback, model = SampleCallback(["ab"], 2), tiny_model(vocab_size=len(TOKENIZER))
    for first in (False, True):
        state = TrainerState(is_world_process_zero=first, global_step=3)
        callback.on_train_begin(args, state, TrainerControl())
        callback.on_evaluate(args, state, TrainerControl(), model=model, processing_class=TOKENIZER)
        assert len(samples_of(tmp_path)) == first and (tmp_path / "samples.jsonl").exists() == first


def test_a_prompt_is_the_message_of_a_user_where_there_is_a_chat_template():
    tokenizer = rollouts.make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert tokenizer.decode(room.tokens_of("ab", tokenizer)[0]) == "<user>ab"


@pytest.mark.parametrize("kind", ["sft", "grpo", pytest.param("dpo", marks=pytest.mark.slow)])
def test_trainers_of_trl(tmp_path, prompts, kind):
    from datasets import Dataset

    from hf_hybrid import HybridDPOConfig, HybridDPOTrainer, HybridSFTConfig, HybridSFTTrainer

    def run(folder, **options):
        values = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, **options}
        more = {}
        if kind == "grpo":
            trainer, config, data = rollouts.HybridGRPOTrainer, rollouts.HybridGRPOConfig, rollouts.prompts(0.3)
            values |= {"num_generations": 2, "max_completion_length": 4}
            more["reward_funcs"] = rollouts.reward
        elif kind == "sft":
            trainer, config = HybridSFTTrainer, HybridSFTConfig
            data = Dataset.from_dict({"text": [f"easy {number % 9} is good" for number in range(24)]})
        else:
            trainer, config = HybridDPOTrainer, HybridDPOConfig
            rows = [{"prompt": f"a {n % 9}", "chosen": " good", "rejected": " bad"} for n in range(24)]
            data = Dataset.from_list(rows)
        more |= {"train_dataset": data, "eval_dataset": data.select(range(2 if kind == "grpo" else 4))}
        args = config(**config_values(folder, **values))
        trainer = trainer(rollouts.policy(), args=args, processing_class=TOKENIZER, **more)
        trainer.train()
        return weights(trainer.model)

    without, sampled = run(tmp_path / "a"), run(tmp_path / "b", sample_prompts=str(prompts))
    assert_same_weights(without, sampled)
    assert [line["step"] for line in samples_of(tmp_path / "b")] == [2, 2, 4, 4]


def test_a_resumed_run_supersedes_later_samples_and_a_new_run_all(tmp_path, prompts):
    options = {"sample_prompts": prompts}
    train(tmp_path / "out", save_strategy="steps", save_steps=4, **options)
    first = samples_of(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoint-12")
    train(tmp_path / "out", resume=True, save_strategy="steps", save_steps=4, **options)
    assert samples_of(tmp_path / "out") == first
    for checkpoint in (tmp_path / "out").glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    train(tmp_path / "out", max_steps=4, **options)
    assert {line["step"] for line in samples_of(tmp_path / "out")} == {4}


def test_the_callback_works_in_plain_trainer_and_samples_a_step_once(tmp_path):
    values = config_values(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    evaluated = {"a": ByteText(2), "b": ByteText(2)}
    data = {"train_dataset": ByteText(8), "eval_dataset": evaluated, "processing_class": TOKENIZER}
    callback = SampleCallback(["ab"], max_new_tokens=2)
    Trainer(tiny_model(), TrainingArguments(**values), callbacks=[callback], **data).train()
    assert [line["step"] for line in samples_of(tmp_path)] == [1, 2]


@pytest.mark.parametrize("why", ["shards", "error", "streamed", "no evaluation"])
def test_what_leaves_samples_out_is_said_and_training_goes_on(tmp_path, prompts, why, monkeypatch, caplog):
    options, model = {"sample_prompts": prompts, "max_steps": 8}, tiny_model()
    if why == "shards":
        monkeypatch.setattr(room, "sharding_of", lambda args: "fsdp")
    elif why == "error":
        monkeypatch.setattr(model, "generate", lambda *args, **kwargs: 1 / 0)
    elif why == "streamed":
        options |= {"memory": "stream", "vram_budget_gib": 1.0}
    else:
        options |= {"eval_strategy": "no", "eval_steps": None}
    trainer = train(tmp_path / "out", model=model, **options)
    assert trainer.state.global_step == 8 and samples_of(tmp_path / "out") == []
    expected = {"shards": "a part of the weights", "error": "ZeroDivisionError", "streamed": "once for each token"}
    assert expected.get(why, "`eval_strategy=no` makes none") in caplog.text
    assert caplog.text.count("No samples") == (why != "no evaluation"), "said once"


# Refusals.


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read"),
        (b"", "has no prompt"),
        (b"\n \n", "has no prompt"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
        (b"a\n" * 33, "has 33 prompts, and at most 32"),
    ],
)
def test_files_without_usable_prompts(tmp_path, content, expected):
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=expected) as error:
        read_prompts(path)
    assert f"`sample_prompts={path}`" in str(error.value)


def test_a_trainer_that_cannot_complete_prompts_is_refused_when_it_is_made(tmp_path, prompts):
    data = ByteText(8)
    config = hybrid_config(tmp_path / "out", sample_prompts=prompts)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        HybridTrainer(tiny_model(), config, train_dataset=data)
    callback = [SampleCallback(prompts)]
    with pytest.raises(ValueError, match="needs a tokenizer"):
        Trainer(tiny_model(), TrainingArguments(**config_values(tmp_path)), train_dataset=data, callbacks=callback)
    classifier = LlamaForSequenceClassification(tiny_model().config)
    with pytest.raises(ValueError, match="generates text, and `LlamaForSequenceClassification` does not"):
        HybridTrainer(classifier, config, train_dataset=data, processing_class=TOKENIZER)
    prompts.write_text("a" * 64)
    with pytest.raises(ValueError, match="a prompt of 64 tokens .* 64 positions. Shorten it"):
        HybridTrainer(tiny_model(), config, train_dataset=data, processing_class=TOKENIZER)
    for wrong in ({"prompts": []}, {"prompts": [1]}, {"prompts": ["a"], "max_new_tokens": 0}):
        with pytest.raises(ValueError, match="prompt|max_new_tokens"):
            SampleCallback(**wrong)


@pytest.mark.parametrize("command", ["train", "sft"])
def test_the_command_line_refuses_a_missing_file_first(tmp_path, capsys, command):
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    words = ["--model", str(tmp_path / "none"), "--dataset", str(tmp_path / "data.jsonl")]
    assert main([command, *words, "--sample_prompts", str(tmp_path / "missing.txt")]) == 2
    told = capsys.readouterr().err
    assert "cannot be read: No such file" in told and len(told.splitlines()) == 1
