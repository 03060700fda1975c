"""Conversations of several turns: those of TRL, where a turn computes its own new tokens only."""

import contextlib
import functools
import logging

import numpy as np
import pytest
import torch
from conftest import mostly_slow, weights

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

from peft import LoraConfig, get_peft_model  # noqa: E402
from rig import rollouts  # noqa: E402
from rig.completions import ARCHITECTURES, OTHERS, WITH_STATES, capturing, config_for, model  # noqa: E402
from rig.rollouts import WITH_GAME, WITH_TOOLS, CallsTools, Game, build, calls_tools, distance, double, policy  # noqa: E402
from rig.trainers import fitted  # noqa: E402
from trl import GRPOTrainer, RLOOTrainer  # noqa: E402

from hf_hybrid import HybridGRPOTrainer, HybridRLOOTrainer  # noqa: E402
from hf_hybrid.trl import decoding as decoding_module  # noqa: E402
from hf_hybrid.trl import turns as turns_module  # noqa: E402
from hf_hybrid.trl.decoding import Decoding  # noqa: E402
from hf_hybrid.trl.groups import tokens_in_loss  # noqa: E402
from hf_hybrid.trl.turns import Conversation, Turns, passes_of  # noqa: E402


@pytest.fixture(autouse=True)
def no_launches(monkeypatch):
    """Every token that need not be computed counts, however few there are."""
    monkeypatch.setitem(turns_module.LAUNCHES, "cpu", 0)


@pytest.fixture(params=["growing", "captured"])
def passes(request):
    """How tokens are computed."""
    with capturing() if request.param == "captured" else contextlib.nullcontext():
        yield request.param


# Of a model.


def converse(model, config, decoding=None, *, turns=4, changes=lambda turn, row, tokens: tokens, between=lambda: None):
    """
    Complete conversations of so many turns, of which fewer go on each time, as TRL does. `changes` makes the next
    prompt of a conversation, before what a tool answers, and `between` runs while tools do. Return all prompts and
    completions, and the state of the generator.
    """
    generator = torch.Generator().manual_seed(3)

    def text(count):
        return torch.randint(9, 97, (count,), generator=generator).tolist()

    system = text(20)
    rows, found = [system + text(3 + 4 * (n // 3)) for n in range(6)], []
    rows = [list(rows[n // 3 * 3]) for n in range(6)]  # three completions of each
    torch.manual_seed(7)
    if decoding is not None:
        decoding.turns = Turns()
    for turn in range(turns):
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        with contextlib.nullcontext() if decoding is None else decoding.completing(model, rows, counts=True):
            out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        ends = torch.tensor(config.eos_token_id)
        after = []
        for row, completion in zip(rows, out[:, width:]):
            end = torch.isin(completion, ends).nonzero()
            completion = completion[: int(end[0]) + 1 if len(end) else None].tolist()
            found.append((row, completion))
            after.append(row + completion)
        goes_on = [n for n in range(len(rows)) if turn < 2 or n % 3]
        rows = [changes(turn, n, after[n]) + text(2 + (5 * n + turn) % 7) for n in goes_on]
        between()
    return found, torch.get_rng_state()


def check(made, config, changes=lambda turn, row, tokens: tokens, between=lambda: None):
    """Converse by `generate`, and with what is kept. Return what was counted."""
    decoding = Decoding(off=False)
    with torch.no_grad():
        theirs, state = converse(made, config, changes=changes, between=between)
        ours, state_of_ours = converse(made, config, decoding, changes=changes, between=between)
    assert theirs == ours
    assert torch.equal(state, state_of_ours)
    assert decoding.plain_because is None and not decoding.failed
    counts = decoding.counts
    assert counts["prompt_tokens_computed"] + counts["prompt_tokens_shared"] == sum(len(row) for row, _ in ours)
    return decoding


QUICK = {"llama", "mistral, a window that fits", "qwen3_5_text", "lfm2", "gemma3_text"}


@pytest.mark.parametrize(
    "name", mostly_slow([*ARCHITECTURES, *OTHERS, *sorted(WITH_STATES.keys() - {"mamba2"})], [*QUICK])
)
def test_a_turn_computes_its_own_tokens(name, passes):
    made = model(name)
    if passes == "captured" and name == "falcon_h1":
        pytest.skip("its layers attend and have a state")
    decoding = check(made, config_for(name, max_new_tokens=9))
    assert decoding.anew.because is None
    counts = decoding.counts
    if passes == "growing":  # of 22 conversations all but two begin with one: its last token, and what a tool answers
        assert counts["prompt_tokens_computed"] < 50 + 20 * 8
    assert counts["prompt_tokens_computed"] < 0.4 * (counts["prompt_tokens_computed"] + counts["prompt_tokens_shared"])


def test_passes():
    """Rows whose states must not see padding have passes of their own, of powers of two."""
    assert passes_of([3, 9, 8], with_state=False) == [(9, [1, 2]), (3, [0])]
    assert passes_of([3, 9, 8], with_state=True) == [(8, [1, 2]), (2, [0]), (1, [0, 1])]
    for new in ([1], [63, 64, 65], [*range(1, 40)]):
        done = np.zeros(len(new), int)
        for size, rows in passes_of(new, with_state=True):
            done[rows] += size
        assert done.tolist() == new


CHANGES = {
    "a beginning that changes": lambda turn, row, tokens: [9, *tokens[1:]] if row % 2 else tokens,
    "thinking that is dropped": lambda turn, row, tokens: tokens[:26] + tokens[28:],
    "cut": lambda turn, row, tokens: tokens[:-2],
    "a conversation of another": lambda turn, row, tokens: [*range(20, 60, 2)] if row == 1 else tokens,
    "all begin anew": lambda turn, row, tokens: [10 + turn] * 3 + tokens,
}


@pytest.mark.parametrize("name", mostly_slow(["llama", "lfm2"], ["lfm2"]))
@pytest.mark.parametrize("change", CHANGES)
def test_a_conversation_is_computed_from_where_it_differs(name, change, passes):
    decoding = check(model(name), config_for(name, max_new_tokens=9), CHANGES[change])
    assert decoding.anew.because is None
    share = decoding.counts["prompt_tokens_shared"] / decoding.counts["prompt_tokens_computed"]
    assert share > (0.5 if name == "llama" and change != "all begin anew" else 0.1)


def doubled(made):
    with torch.no_grad():
        made.model.layers[0].self_attn.k_proj.weight.mul_(2.0)


def behind_the_back(made):
    made.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1.0


def of_a_number(made):
    made.model.layers[0].self_attn.scaling *= 2


def hooked(made):
    made.model.layers[0].register_forward_hook(lambda layer, args, output: output * 1.5)


def patched(made):
    own = made.model.layers[0].mlp.forward
    made.model.layers[0].mlp.forward = lambda states: 2 * own(states)


@pytest.mark.parametrize("act", [doubled, behind_the_back, of_a_number, hooked, patched])
def test_a_tool_that_changes_the_model(act):
    """What was computed before is of another model."""

    def conversations(decoding):
        made, acts = model.__wrapped__("llama"), iter([lambda made: None, act, lambda made: None, act])
        with torch.no_grad():
            return converse(made, config_for("llama", max_new_tokens=9), decoding, between=lambda: next(acts)(made))

    decoding = Decoding(off=False)
    (theirs, _), (ours, _) = conversations(None), conversations(decoding)
    assert theirs == ours and decoding.plain_because is None
    assert decoding.counts["prompt_tokens_shared"] > 100  # the turn before


def test_a_tool_that_turns_an_adapter_off():
    def conversations(decoding):
        torch.manual_seed(0)
        adapted = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        made = get_peft_model(model.__wrapped__("llama"), adapted).eval()
        with torch.no_grad():
            between = iter([made.disable_adapter_layers, made.enable_adapter_layers, lambda: None, lambda: None])
            return converse(made, config_for("llama", max_new_tokens=9), decoding, between=lambda: next(between)())

    (theirs, _), (ours, _) = conversations(None), conversations(Decoding(off=False))
    assert theirs == ours


def test_little_memory(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "hf_hybrid")
    monkeypatch.setattr(turns_module, "host_memory", lambda: 60_000)
    decoding = check(model("llama"), config_for("llama", max_new_tokens=9))
    assert "half of the free memory" in decoding.anew.because and decoding.counts["bytes_between_turns"] < 50_000
    assert len([record for record in caplog.records if "half of the free memory" in record.message]) == 1


def test_a_model_that_does_not_go_on(caplog):
    """It counts the tokens of a pass. Two short rows show it."""
    caplog.set_level(logging.INFO, "hf_hybrid")
    made = model.__wrapped__("llama")

    made.model.layers[0].register_forward_hook(lambda layer, args, output: output * (1 + output.shape[1] / 50))
    decoding = check(made, config_for("llama", max_new_tokens=9))
    assert "in two pieces" in decoding.anew.because
    assert len([record for record in caplog.records if "in two pieces" in record.message]) == 1


def test_what_is_kept_is_looked_up_by_its_tokens():
    turns, words = Turns(), lambda *tokens: np.array(tokens, ">u4").tobytes()
    for tokens in ((1, 2), (1, 2, 3, 4), (1, 3), (256,)):
        turns.known.append(Conversation(words(*tokens), np.arange(len(tokens))))
    turns.known.sort(key=lambda one: one.ids)
    for prompt, count in (((1, 2, 3, 9), 3), ((1, 2, 3, 4), 3), ((1, 2), 1), ((1, 9), 1), ((7,), 0), ((1, 3, 3), 2)):
        assert len(turns._beginning_of(words(*prompt), False).slots) == count
    for prompt, count in (((1, 2, 3, 9), 2), ((1, 2, 3, 4, 5), 4), ((1, 2), 0), ((1, 9), 0), ((256, 1), 1)):
        assert len(turns._beginning_of(words(*prompt), True).slots) == count


# Trainings.


def half(number: int) -> float:
    """
    Halve a number.

    Args:
        number: The number.

    Returns:
        Half of the number.
    """
    if number % 2:
        raise ValueError("it is odd")
    return number / 2


class Talks(CallsTools):
    """Each of the first two letters of a completion that is a vowel, a consonant or a digit calls a tool."""

    def parse_response(self, ids, prefix=None, tools=None):
        text = self.decode(ids, skip_special_tokens=True)
        kinds = {"aeiou": "double", "bcdfghjklm": "half", "0123456789": "unknown"}
        calls = [
            (name, len(text) + place)
            for place, of in enumerate(text[:2])
            for letters, name in kinds.items()
            if of in letters
        ]
        calls = [{"type": "function", "function": {"name": name, "arguments": {"number": n}}} for name, n in calls]
        return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def talkative() -> Talks:
    calls = calls_tools()
    tokenizer = Talks(tokenizer_object=calls.backend_tokenizer, pad_token="<pad>", eos_token="<eos>")
    tokenizer.response_template, tokenizer.chat_template = calls.response_template, calls.chat_template
    return tokenizer


async def later(number: int) -> int:
    """
    Double a number.

    Args:
        number: The number.

    Returns:
        Twice the number.
    """
    return 2 * number


class Counting(Game):
    """A game that refuses after some moves."""

    def double(self, number: int) -> int:
        """
        Double a number.

        Args:
            number: The number.

        Returns:
            Twice the number.
        """
        if self.total > 20:
            raise RuntimeError("the game is over")
        return super().double(number) + self.total


def asked(prompts, trainer):
    """A `rollout_func`: conversations of two to four turns, one after the other and then together, with one answer."""
    rows = [rollouts.TOKENIZER(prompt)["input_ids"] for prompt in prompts]
    prompt_ids, masks = [*map(list, rows)], [[] for _ in rows]
    groups = [[n] for n in range(len(rows) // 2)] + [[*range(len(rows) // 2, len(rows))]]
    for group in groups:
        for turn in range(2 + group[0] % 3):
            completed, _ = trainer._generate_single_turn([rows[n] for n in group], None, {}, 1)
            for n, completion in zip(group, completed):
                answer = [] if turn == 1 + group[0] % 3 else [70 + turn] * (1 + n % 4)
                rows[n] = rows[n] + completion + answer
                masks[n] += [1] * len(completion) + [0] * len(answer)
    completions = [row[len(prompt) :] for row, prompt in zip(rows, prompt_ids)]
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None, "env_mask": masks}


TALK = {**WITH_TOOLS, "tools": [double, half], "processing_class": talkative, "max_completion_length": 90}
AGENTS = {
    "several calls, some of which fail": TALK,
    "a turn limit": {**TALK, "max_tool_calling_iterations": 2},
    "an end in the middle": {**TALK, "max_completion_length": 30},
    "async": {**TALK, "tools": [later, half]},
    "an environment": {**WITH_GAME, "max_completion_length": 90},
    "an environment that refuses": {**WITH_GAME, "environment_factory": Counting, "max_completion_length": 90},
    "a rollout function": {"rollout_func": asked},
}


def trained(kind, folder, monkeypatch, *, make=policy, processing_class=None, **options):
    """Train. Return the trainer, what the reward function got, and masks of tools."""
    seen, masks = [], []
    own = options.pop("reward_funcs", None) or (None if "environment_factory" in options else rollouts.reward)

    def rewarded(prompts, completions, completion_ids, **columns):
        seen.append((prompts, completions, completion_ids, rewards := own(prompts=prompts, completions=completions)))
        return rewards

    if processing_class is not None:
        monkeypatch.setattr(rollouts, "calls_tools", processing_class)
    options = {"max_steps": 3, "logging_steps": 1, **options}
    if kind in (GRPOTrainer, RLOOTrainer):
        options.pop("share_rows", None)
    trainer = build(kind, folder / kind.__name__, model=make(), reward_funcs=own and rewarded, **options)
    generate = trainer._generate_and_score_completions

    def generated(inputs):
        batch = generate(inputs)
        masks.append({name: batch[name].tolist() for name in ("completion_ids", "completion_mask", "tool_mask")})
        return batch

    if kind in (GRPOTrainer, HybridGRPOTrainer):
        trainer._generate_and_score_completions = generated
    return fitted(trainer), seen, masks


def long_policy(**overrides):
    return policy(max_position_embeddings=256, **overrides)


MAKES = {"llama": long_policy}
for name in ("gemma3_text", "lfm2", "qwen3_5_text"):

    def make(name=name):
        made = model.__wrapped__(
            name, **({} if name in OTHERS else {"max_position_embeddings": 256, "vocab_size": len(rollouts.TOKENIZER)})
        )
        made.generation_config.eos_token_id = [1, *range(30, 45)]
        made.generation_config.pad_token_id = 0
        return made

    MAKES[name] = make


def check_training(folder, monkeypatch, kinds=(GRPOTrainer, HybridGRPOTrainer), within=1e-6, **options):
    theirs, ours = (trained(kind, folder, monkeypatch, **options) for kind in kinds)
    assert theirs[1] == ours[1] and theirs[2] == ours[2]
    assert distance(weights(theirs[0].model), weights(ours[0].model)) <= within
    for name in ("reward", "tools/call_frequency", "tools/failure_frequency", "completions/mean_length"):
        assert [e.get(name) for e in theirs[0].state.log_history] == [e.get(name) for e in ours[0].state.log_history]
    found = ours[0].hybrid_summary()
    assert found["plain_rollouts_because"] is None and found["failed_savings"] == []
    return ours[0]


def test_turns_are_one_row(tmp_path, monkeypatch, caplog):
    """Rows of a prompt share the beginning of all turns. Tokens of tools are in no loss. The log says what waits."""
    caplog.set_level(logging.INFO, "hf_hybrid")
    options = {"num_iterations": 2, "gradient_accumulation_steps": 4, "share_rows": "auto"}
    trainer = check_training(tmp_path, monkeypatch, make=long_policy, **TALK, **options)
    found = trainer.hybrid_summary()
    assert found["tokens_shared"] > 0 and found["plain_rows_because"] is None and found["rows_skipped"] > 0
    masks = [mask for batch in trainer.generated for mask in batch["tool_mask"].tolist()]
    assert len(masks) == 16 and any(0 in mask[: len(mask) - mask[::-1].index(1)] for mask in masks if 1 in mask)
    assert all(tokens_in_loss(batch).le(batch["tool_mask"]).all() for batch in trainer.generated)
    (said,) = (record.args for record in caplog.records if "Between turns" in record.msg)
    config = trainer.model.config
    of_a_token = 4 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert said == (16 * 90 * of_a_token / 2**30, 90)
    prompts = sum(batch["prompt_mask"].sum().item() for batch in trainer.generated)
    assert found["bytes_between_turns"] <= (16 * 90 + prompts) * of_a_token


@pytest.mark.parametrize(
    "agent",
    mostly_slow(AGENTS, ["several calls, some of which fail", "an end in the middle", "a rollout function"]),
)
def test_runs_are_those_of_trl(agent, tmp_path, monkeypatch):
    ours = check_training(tmp_path, monkeypatch, make=long_policy, **AGENTS[agent])
    found, entries = ours.hybrid_summary(), [e for e in ours.state.log_history if "turns/mean" in e]
    assert found["turns"] == sum(round(entry["turns/mean"] * 8) for entry in entries) > 3 * 8
    assert found["prompt_tokens_computed"] == sum(entry["turns/tokens_prefilled"] for entry in entries)
    assert found["prompt_tokens_shared"] > found["prompt_tokens_computed"] and found["bytes_between_turns"] > 0
    if "tools" in AGENTS[agent]:
        assert found["tool_calls"] == sum(round(entry["tools/call_frequency"] * 8) for entry in entries) > 0
        assert found["tool_errors"] > 0


class TwoTurns:
    """Over a trainer of RLOO, which has no tools: each completion is told something, and completed again."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        first = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        told = [prompt + ids + [70, 71, 72] for prompt, ids in zip(prompt_ids, first)]
        after = super()._generate_single_turn(told, *args, **kwargs)
        return [row[len(prompt) :] + ids for row, prompt, ids in zip(told, prompt_ids, after)]


def test_turns_of_a_subclass(tmp_path, monkeypatch):
    kinds = [type(f"Two{kind.__name__}", (TwoTurns, kind), {}) for kind in (RLOOTrainer, HybridRLOOTrainer)]
    for own, kind in zip(kinds, (RLOOTrainer, HybridRLOOTrainer)):
        monkeypatch.setitem(rollouts.CONFIGS, own, rollouts.CONFIGS[kind])
    found = check_training(tmp_path, monkeypatch, kinds, make=long_policy).hybrid_summary()
    assert found["turns"] == 2 * 3 * 8 and found["prompt_tokens_shared"] > found["prompt_tokens_computed"]


def test_under_dropout_each_turn_draws_anew(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "hf_hybrid")
    make = functools.partial(long_policy, attention_dropout=0.1)
    trainer, *_ = trained(HybridGRPOTrainer, tmp_path, monkeypatch, make=make, **{**TALK, "max_steps": 2})
    found = trainer.hybrid_summary()
    assert found["bytes_between_turns"] == 0 and found["turns"] > 16 and found["plain_rollouts_because"] is None
    assert len([record for record in caplog.records if "in TRL new ones" in record.message]) == 1


@pytest.mark.falls_back
def test_an_unforeseen_error_changes_no_completion(tmp_path, monkeypatch):
    def fails(*_):
        raise IndexError("of a new version")

    monkeypatch.setattr(Turns, "_pass", fails)
    monkeypatch.setattr(decoding_module, "reason_not_in_pieces", lambda _: None)
    theirs, ours = (
        trained(kind, tmp_path, monkeypatch, make=long_policy, **TALK) for kind in (GRPOTrainer, HybridGRPOTrainer)
    )
    assert theirs[1:] == ours[1:] and "IndexError: of a new version" in ours[0].hybrid_summary()["failed_savings"][0]


@pytest.mark.parametrize("name", mostly_slow(MAKES, ["qwen3_5_text"]))
def test_runs_of_architectures_are_those_of_trl(name, passes, tmp_path, monkeypatch):
    check_training(tmp_path, monkeypatch, make=MAKES[name], within=2e-6, **TALK)
