"""A user's code in the places where people put it: weights and losses stay those of Trainer and of TRL."""

import functools
import itertools
import logging

import pytest

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

import crossings  # noqa: E402
from crossings import Crossing, apart, left_by  # noqa: E402
from rig import user_code  # noqa: E402

TABLE = """
trainer full | training_step | masks labels | above* below object* class*
trainer full | training_step | masks labels in place, masks labels of the dict, own mean | above below object class
trainer full | training_step | notes losses, notes gradients, replaces tokens, nothing, same | above below object class
trainer full | training_step | masks labels by numpy, own step, twice, clips gradients | above* below object class
trainer full | training_step | doubles gradients, notes inputs | above* below object class
trainer full | training_step | looks first, other positions, sharpness, halves, shrinks after | above below object
trainer full | training_step | noise, hides tokens, replays, skips, logs double, syncs, reverses rows | above below
trainer full | training_step | replaces tokens in place, keeps one row, other count, freezes by turns | above object
trainer full | training_step | copies | above object
trainer full | training_step | hides tokens in place | above object*
trainer full | training_step | updates at once | above* below object
trainer full | training_step | by place | above below* object class
trainer full | training_step | puts padding behind | above
trainer full | _prepare_inputs | masks labels of the dict, copies | above object
trainer full | _prepare_inputs | masks labels by numpy | above object class
trainer full | _prepare_inputs | masks labels | above* below object class*
trainer full | _prepare_inputs | masks labels in place | above below object
trainer full | _prepare_inputs | replaces tokens, same | above below object class
trainer full | _prepare_inputs | hides tokens in place | above class
trainer full | _prepare_inputs | keeps one row | above
trainer full | compute_loss | masks labels by numpy, masks labels in place, replaces tokens | above object class
trainer full | compute_loss | reads logits, notes inputs | above object class
trainer full | compute_loss | masks labels, scales, focal, own cross-entropy, nothing | above below object class
trainer full | compute_loss | hides tokens, two passes | above object
trainer full | compute_loss | hides tokens in place | object class
trainer full | compute_loss | penalty | above* below object* class
trainer full | compute_loss | state | above below object* class
trainer full | compute_loss | same | above
trainer full | get_batch_samples | masks labels by numpy, a tuple, hides tokens in place | above object
trainer full | get_batch_samples | masks labels | above below object* class
trainer full | get_batch_samples | turns the window | above below object
trainer full | get_batch_samples | other count of the window, same | above below object class
trainer full | get_batch_samples | first batch twice | above object class
trainer full | forward | masks labels by numpy | object after
trainer full | forward | masks labels | object class before after*
trainer full | forward | replaces tokens, focal | object before after
trainer full | forward | hides tokens | object class after
trainer full | forward | scales, state | object class before after
trainer full | forward | penalty | object* class before after
trainer full | callback | new data, generates between, generates, looks between, notes gradients between | -
trainer full | callback | notes gradients, hook of the optimizer, freezes in turn, shrinks weights, clips between | -
trainer full | callback | clips before the update, nothing between, accumulates longer, puts a hook, pauses learning | -
trainer full | callback | shrinks weights between, updates between, accumulates not | -*
trainer full | _get_num_items_in_batch | other items | above below object class
trainer full | _clip_grad_norm | clips by value | above below object class
trainer full | backward | doubles the loss, clips behind it | object
trainer full | collator | masks labels | -*
trainer full | collator | hides tokens in place, other positions, puts padding behind | -
trainer full | hook | gradients halved, halved after accumulation, output of a layer, output by column | before after
trainer full | hook | output less its mean, input of a layer, gradient of a layer, output of the head | before after
trainer full | hook | output of the embeddings, output of attention, detaches, reads a layer | before after
trainer full | hook | gradients clamped | before after*
trainer whole | training_step | masks labels, twice | above object
trainer whole | training_step | masks labels by numpy, own step, notes losses | above
trainer whole | _prepare_inputs | masks labels | above class
trainer whole | compute_loss | penalty, state | object
trainer whole | forward | penalty | object after
trainer whole | hook | gradients clamped | after
trainer balanced | training_step | masks labels | above object
trainer balanced | compute_loss | penalty | object
trainer balanced | forward | scales | object after
trainer balanced | hook | gradients clamped | after
trainer balanced | callback | router's weight | -*
trainer reads_keys | collator | number without dimensions, word | -*
trainer reads_keys | collator | float, list, number for each row, None | -
trainer reads_keys | training_step | number without dimensions | above below object
trainer reads_keys | training_step | float | above object
trainer reads_keys | training_step | word | above class
trainer reads_keys | _prepare_inputs | float | above object*
trainer reads_keys | compute_loss | float | above object class
trainer reads_keys | get_batch_samples | word | above
trainer experts | callback | router's loss | -*
trainer lora | training_step | masks labels | above below object class
trainer lora | training_step | twice, clips gradients, own step | above object
trainer lora | training_step | looks first, noise, nothing, freezes by turns | above
trainer lora | callback | new data, looks between, generates, notes gradients between, freezes in turn at the end | -
trainer lora | callback | shrinks weights at the end, shrinks weights between, clips between, set_scale | -
trainer lora | callback | merges and unmerges, disables a layer, puts a hook | -
trainer lora | callback | freezes in turn, shrinks weights, scaling, switches adapter, new matrices | -*
trainer lora | compute_loss | penalty, near base, state | above object
trainer lora | hook | gradients halved, gradients clamped, halved after accumulation, no gradient of B | before after
trainer lora | hook | output of adapters | before after*
trainer lora | hook | output of a layer | after
trainer lora_fp32 | callback | freezes in turn, switches adapter, new matrices, merges and unmerges | -
trainer lora_fp32 | hook | output of adapters | before after
trainer stream | training_step | masks labels | above below object class
trainer stream | training_step | own step, own mean, looks first, masks labels by numpy, notes losses, halves | above
trainer stream | training_step | replays, twice, skips, doubles gradients, updates at once | above
trainer stream | training_step | nothing, clips gradients | above object
trainer stream | callback | looks between, generates, freezes in turn, accumulates not, nothing between | -
trainer stream | callback | shrinks weights, shrinks weights at the end, clips before the update, clips between | -
trainer stream | callback | pauses learning, hook of the optimizer, puts a hook | -
trainer stream | _prepare_inputs | masks labels | above object class
trainer stream | compute_loss | masks labels, scales, state | above object
trainer stream | get_batch_samples | masks labels | above
trainer stream | collator | masks labels | -
trainer stream | forward | scales, masks labels | object before after
trainer stream | _clip_grad_norm | clips by value | above object
trainer stream | backward | doubles the loss | object
trainer stream | hook | halved after accumulation, gradient of a layer, output of a layer | before after
trainer stream | hook | gradients halved | before after
trainer stream | hook | gradients clamped, output by column | after
sft full | training_step | masks labels | above* below between object class
sft full | training_step | own step, notes losses, twice, clips gradients, nothing | above between
sft full | training_step | own mean, masks labels by numpy, looks first | above
sft full | training_step | hides tokens in place | above object
sft full | training_step | by place | above below between
sft full | _prepare_inputs | masks labels | above below between object class
sft full | _prepare_inputs | replaces tokens in place | above
sft full | compute_loss | masks labels, penalty | above below between object class
sft full | compute_loss | state | above between object class
sft full | compute_loss | reads logits | above
sft full | get_batch_samples | masks labels | above object
sft full | collator | masks labels | -
sft full | forward | masks labels | object after
sft full | hook | output by column, gradients clamped | after
sft full | callback | accumulates not | -
sft lora | training_step | masks labels | above between
sft lora | callback | freezes in turn, scaling | -
sft lora | hook | no gradient of B | after
dpo full | training_step | masks labels | above below between object
dpo full | training_step | masks labels in place, masks labels by numpy, looks first | above
dpo full | training_step | own step | above between object
dpo full | training_step | notes losses, notes gradients, twice | above between
dpo full | training_step | clips gradients | above* between object
dpo full | _prepare_inputs | masks labels by numpy, masks labels in place | above object
dpo full | _prepare_inputs | masks labels | above* below between object class
dpo full | _prepare_inputs | hides tokens in place | above
dpo full | compute_loss | masks labels by numpy, replaces tokens in place, hides tokens, state | above object
dpo full | compute_loss | masks labels | above* below between object class
dpo full | compute_loss | masks labels in place | above between object
dpo full | compute_loss | replaces tokens | above between
dpo full | compute_loss | penalty, nothing | above between object class
dpo full | callback | notes gradients between, looks between, shrinks weights between, clips between | -
dpo full | callback | accumulates not | -
dpo full | _compute_loss | masks labels | above between object class
dpo full | get_batch_samples | masks labels | above object
dpo full | backward | doubles the loss, clips behind it | object
dpo full | collator | masks labels | -
dpo full | hook | gradients clamped, output by column, output of a layer | after
dpo lora | compute_loss | masks labels | above object
dpo lora | callback | freezes in turn, scaling, shrinks weights | -
dpo lora | hook | no gradient of B | after
grpo full | _prepare_inputs | masks labels | above below between object class
grpo full | _prepare_inputs | doubles advantages | above* between object class
grpo full | compute_loss | masks labels, state | above between object class
grpo full | compute_loss | doubles advantages | above between
grpo full | compute_loss | penalty | above* between object class
grpo full | compute_loss | masks labels by numpy | above
grpo full | _compute_loss | masks labels | above between object class
grpo full | _compute_loss | replaces tokens | above between
grpo full | _compute_loss | penalty | above between object
grpo full | training_step | own step, clips gradients | above between object
grpo full | training_step | notes losses, nothing | above between
grpo full | callback | notes gradients between, clips between, shrinks weights between | -
grpo full | _calculate_rewards | praises every second | above between object class
grpo full | _generate_and_score_completions | doubles what it scored | above between object class
grpo full | _get_per_token_logps_and_entropies | halves them | above between object class
grpo full | backward | clips behind it | object
grpo full | hook | output by column, gradients clamped | after
grpo lora | callback | freezes in turn, scaling | -
grpo lora | compute_loss | penalty | above
reward full | training_step | replaces tokens | above below* object class
reward full | training_step | replaces tokens in place, looks first, clips gradients | below
reward full | training_step | own step | above below object
reward full | training_step | notes losses | above below
reward full | training_step | twice | below object
reward full | _prepare_inputs | replaces tokens | below object class
reward full | _prepare_inputs | hides tokens in place | below
reward full | compute_loss | replaces tokens, state, nothing | below object class
reward full | compute_loss | hides tokens in place | below object
reward full | compute_loss | penalty | above below object class
reward full | collator | replaces tokens | -
reward full | callback | shrinks weights between | -
reward full | hook | output by column | before after
reward full | hook | gradients clamped | after
reward lora | callback | freezes in turn, scaling | -
kto full | compute_loss | masks labels | below object class
kto full | compute_loss | masks labels in place | below
kto full | compute_loss | penalty | below object
kto full | _prepare_inputs | masks labels | below object
kto full | training_step | replaces tokens in place | below
"""
"""What is trained, the place, each thing that the user's code does there, and the ways: `*` is in the default suite."""


def read(table):
    made = []
    for line in table.strip().splitlines():
        (trainer, weights), place, changes, ways = (cell.split() for cell in line.split("|"))
        for change, way in itertools.product(" ".join(changes).split(", "), ways):
            crossing = Crossing(trainer, weights, place[0], change, way.strip("*-"))
            marks = [] if way[-1] == "*" else [pytest.mark.slow]
            if crossing.change not in user_code.HARMLESS:  # a user's code may fail on what this package tries out
                marks.append(pytest.mark.falls_back)
            made.append(pytest.param(crossing, id=str(crossing), marks=marks))
    return made


CROSSINGS = read(TABLE)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Trainings of Trainer and TRL. The way does not matter to them: one stands for all."""

    @functools.cache
    def of_any_way(crossing):
        try:
            return left_by(crossings.train(crossing, False, tmp_path_factory.mktemp("plain")))
        except Exception as error:
            return error

    def train(crossing):
        if crossing.weights == "stream":
            crossing = crossing._replace(weights="full")
        if crossing.way in ("below", "between", "object", "class") and crossing.place in crossings.METHODS:
            crossing = crossing._replace(way="above")
        return of_any_way(crossing)

    return train


def rounding(crossing):
    """Return how far weights and losses may be apart."""
    return (1e-4, 4e-3) if crossing.weights == "lora" else (1e-6, 1e-5)


def saves(summary):
    return any(summary.get(name) for name in ("tokens_padding", "tokens_shared", "micro_batches_saved", "rows_skipped"))


@pytest.mark.parametrize("crossing", CROSSINGS)
def test_training_is_that_of_trainer(crossing, plain, tmp_path, caplog):
    caplog.set_level(logging.INFO, "hf_hybrid")
    theirs = plain(crossing)
    if isinstance(theirs, Exception):
        raise theirs
    of_weights, of_losses = rounding(crossing)
    if crossing.change not in user_code.HARMLESS:
        without = plain(Crossing(crossing.trainer, crossing.weights, "", ""))
        matters = theirs.losses != pytest.approx(without.losses, abs=3 * of_losses)
        assert matters or apart(theirs, without) > 3 * of_weights, "the user's code does nothing here"
    ours = left_by(crossings.train(crossing, True, tmp_path))
    assert ours.weights.keys() == theirs.weights.keys() and apart(theirs, ours) < of_weights
    assert ours.losses == pytest.approx(theirs.losses, abs=of_losses)
    assert ours.notes == pytest.approx(theirs.notes, rel=5 * of_losses, abs=5 * of_losses)
    assert saves(ours.summary) or ours.summary.get("plain_rows_because", "no rows are laid out")


@pytest.mark.parametrize(("weights", "change"), [("full", "attention's dropout"), ("lora", "adapters' dropout")])
def test_no_prefix_is_shared_once_a_callback_has_put_dropout(weights, change, tmp_path):
    """Two trainings draw other numbers. Tokens without influence on a label may be left out: one in each row."""
    crossing = Crossing("trainer", weights, "callback", change)
    at_first, in_all = (
        crossings.train(crossing, True, tmp_path / str(steps), max_steps=steps).hybrid_summary() for steps in (1, 3)
    )
    assert at_first["tokens_shared"] > 0 and in_all["tokens_shared"] - at_first["tokens_shared"] <= 2 * 4
    assert "when the run had begun" in in_all["plain_rows_because"] and not in_all["dropout_drawn_once"]
