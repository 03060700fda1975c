"""A user's code in the places where people put it: weights and losses stay those of Trainer and of TRL."""

import functools
import logging

import pytest

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

from rig import crossings, user_code  # noqa: E402
from rig.crossings import Crossing, apart, left_by  # noqa: E402

TABLE = """
trainer full        | training_step    | masks labels               | above* below object* class*
trainer full        | training_step    | masks labels in place      | above below object class
trainer full        | training_step    | masks labels of the dict   | above below object class
trainer full        | training_step    | masks labels by numpy      | above* below object class
trainer full        | training_step    | own step                   | above* below object class
trainer full        | training_step    | own mean                   | above below object class
trainer full        | training_step    | looks first                | above below object
trainer full        | training_step    | noise                      | above below
trainer full        | training_step    | notes losses               | above below object class
trainer full        | training_step    | notes gradients            | above below object class
trainer full        | _prepare_inputs  | masks labels of the dict   | above object
trainer full        | _prepare_inputs  | masks labels by numpy      | above object class
trainer full        | compute_loss     | masks labels by numpy      | above object class
trainer full        | get_batch_samples | masks labels by numpy     | above object
trainer full        | get_batch_samples | a tuple                   | above object
trainer full        | forward          | masks labels by numpy      | object after
trainer full        | callback         | new data                   | -
trainer full        | callback         | generates between          | -
trainer full        | callback         | generates                  | -
trainer full        | callback         | looks between              | -
trainer full        | callback         | notes gradients between    | -
trainer full        | callback         | notes gradients            | -
trainer whole       | training_step    | masks labels               | above object
trainer whole       | training_step    | masks labels by numpy      | above
trainer whole       | training_step    | twice                      | above object
trainer whole       | training_step    | own step                   | above
trainer whole       | training_step    | notes losses               | above
trainer whole       | _prepare_inputs  | masks labels               | above class
trainer whole       | compute_loss     | penalty                    | object
trainer whole       | compute_loss     | state                      | object
trainer whole       | forward          | penalty                    | object after
trainer whole       | hook             | gradients clamped          | after
trainer full        | training_step    | replaces tokens            | above below object class
trainer full        | training_step    | replaces tokens in place   | above object
trainer full        | training_step    | hides tokens               | above below
trainer full        | training_step    | hides tokens in place      | above object*
trainer full        | training_step    | keeps one row              | above object
trainer full        | training_step    | other positions            | above below object
trainer full        | training_step    | twice                      | above* below object class
trainer full        | training_step    | sharpness                  | above below object
trainer full        | training_step    | clips gradients            | above* below object class
trainer full        | training_step    | halves                     | above below object
trainer full        | training_step    | replays                    | above below
trainer full        | training_step    | skips                      | above below
trainer full        | training_step    | other count                | above object
trainer full        | training_step    | logs double                | above below
trainer full        | training_step    | doubles gradients          | above* below object class
trainer full        | training_step    | updates at once            | above* below object
trainer full        | training_step    | shrinks after              | above below object
trainer full        | training_step    | freezes by turns           | above object
trainer full        | training_step    | by place                   | above below* object class
trainer full        | training_step    | syncs                      | above below
trainer full        | training_step    | nothing                    | above below object class
trainer full        | training_step    | same                       | above below object class
trainer full        | training_step    | copies                     | above object
trainer full        | training_step    | puts padding behind        | above
trainer full        | training_step    | reverses rows              | above below
trainer full        | training_step    | notes inputs               | above* below object class
trainer full        | _prepare_inputs  | masks labels               | above* below object class*
trainer full        | _prepare_inputs  | masks labels in place      | above below object
trainer full        | _prepare_inputs  | replaces tokens            | above below object class
trainer full        | _prepare_inputs  | hides tokens in place      | above class
trainer full        | _prepare_inputs  | keeps one row              | above
trainer full        | _prepare_inputs  | same                       | above below object class
trainer full        | _prepare_inputs  | copies                     | above object
trainer full        | compute_loss     | masks labels               | above below object class
trainer full        | compute_loss     | masks labels in place      | above object class
trainer full        | compute_loss     | replaces tokens            | above object class
trainer full        | compute_loss     | hides tokens               | above object
trainer full        | compute_loss     | hides tokens in place      | object class
trainer full        | compute_loss     | scales                     | above below object class
trainer full        | compute_loss     | penalty                    | above* below object* class
trainer full        | compute_loss     | state                      | above below object* class
trainer full        | compute_loss     | focal                      | above below object class
trainer full        | compute_loss     | two passes                 | above object
trainer full        | compute_loss     | own cross-entropy          | above below object class
trainer full        | compute_loss     | reads logits               | above object class
trainer full        | compute_loss     | notes inputs               | above object class
trainer full        | compute_loss     | nothing                    | above below object class
trainer full        | compute_loss     | same                       | above
trainer full        | get_batch_samples | masks labels              | above below object* class
trainer full        | get_batch_samples | hides tokens in place     | above object
trainer full        | get_batch_samples | turns the window          | above below object
trainer full        | get_batch_samples | other count of the window | above below object class
trainer full        | get_batch_samples | first batch twice         | above object class
trainer full        | get_batch_samples | same                      | above below object class
trainer full        | _get_num_items_in_batch | other items         | above below object class
trainer full        | _clip_grad_norm  | clips by value             | above below object class
trainer full        | backward         | doubles the loss           | object
trainer full        | backward         | clips behind it            | object
trainer full        | callback         | hook of the optimizer      | -
trainer balanced    | training_step    | masks labels               | above object
trainer balanced    | compute_loss     | penalty                    | object
trainer balanced    | forward          | scales                     | object after
trainer balanced    | hook             | gradients clamped          | after
trainer full        | collator         | masks labels               | -*
trainer full        | collator         | hides tokens in place      | -
trainer full        | collator         | other positions            | -
trainer full        | collator         | puts padding behind        | -
trainer reads_keys  | collator         | number without dimensions  | -*
trainer reads_keys  | collator         | float                      | -
trainer reads_keys  | collator         | list                       | -
trainer reads_keys  | collator         | number for each row        | -
trainer reads_keys  | collator         | word                       | -*
trainer reads_keys  | collator         | None                       | -
trainer reads_keys  | training_step    | number without dimensions  | above below object
trainer reads_keys  | training_step    | float                      | above object
trainer reads_keys  | training_step    | word                       | above class
trainer reads_keys  | _prepare_inputs  | float                      | above object*
trainer reads_keys  | compute_loss     | float                      | above object class
trainer reads_keys  | get_batch_samples | word                      | above
trainer full        | forward          | masks labels               | object class before after*
trainer full        | forward          | replaces tokens            | object before after
trainer full        | forward          | hides tokens               | object class after
trainer full        | forward          | scales                     | object class before after
trainer full        | forward          | penalty                    | object* class before after
trainer full        | forward          | state                      | object class before after
trainer full        | forward          | focal                      | object before after
trainer full        | callback         | freezes in turn            | -
trainer full        | callback         | shrinks weights            | -
trainer full        | callback         | shrinks weights between    | -*
trainer full        | callback         | clips between              | -
trainer full        | callback         | clips before the update    | -
trainer full        | callback         | updates between            | -*
trainer full        | callback         | nothing between            | -
trainer full        | callback         | accumulates longer         | -
trainer full        | callback         | accumulates not            | -*
trainer full        | callback         | puts a hook                | -
trainer full        | callback         | pauses learning            | -
trainer experts     | callback         | router's loss              | -*
trainer balanced    | callback         | router's weight            | -*
trainer full        | hook             | gradients halved           | before after
trainer full        | hook             | gradients clamped          | before after*
trainer full        | hook             | halved after accumulation  | before after
trainer full        | hook             | output of a layer          | before after
trainer full        | hook             | output by column           | before after
trainer full        | hook             | output less its mean       | before after
trainer full        | hook             | input of a layer           | before after
trainer full        | hook             | gradient of a layer        | before after
trainer full        | hook             | output of the head         | before after
trainer full        | hook             | output of the embeddings   | before after
trainer full        | hook             | output of attention        | before after
trainer full        | hook             | detaches                   | before after
trainer full        | hook             | reads a layer              | before after
trainer lora        | training_step    | masks labels               | above below object class
trainer lora        | training_step    | twice                      | above object
trainer lora        | training_step    | clips gradients            | above object
trainer lora        | training_step    | own step                   | above object
trainer lora        | training_step    | looks first                | above
trainer lora        | training_step    | noise                      | above
trainer lora        | training_step    | nothing                    | above
trainer lora        | callback         | new data                   | -
trainer lora        | callback         | looks between              | -
trainer lora        | callback         | generates                  | -
trainer lora        | callback         | notes gradients between    | -
trainer lora        | training_step    | freezes by turns           | above
trainer lora        | compute_loss     | penalty                    | above object
trainer lora        | compute_loss     | near base                  | above object
trainer lora        | compute_loss     | state                      | above object
trainer lora        | callback         | freezes in turn            | -*
trainer lora        | callback         | freezes in turn at the end | -
trainer lora        | callback         | shrinks weights            | -*
trainer lora        | callback         | shrinks weights at the end | -
trainer lora        | callback         | shrinks weights between    | -
trainer lora        | callback         | clips between              | -
trainer lora        | callback         | scaling                    | -*
trainer lora        | callback         | set_scale                  | -
trainer lora        | callback         | switches adapter           | -*
trainer lora        | callback         | merges and unmerges        | -
trainer lora        | callback         | disables a layer           | -
trainer lora        | callback         | new matrices               | -*
trainer lora        | callback         | puts a hook                | -
trainer lora        | hook             | gradients halved           | before after
trainer lora        | hook             | gradients clamped          | before after
trainer lora        | hook             | halved after accumulation  | before after
trainer lora        | hook             | output of adapters         | before after*
trainer lora        | hook             | no gradient of B           | before after
trainer lora        | hook             | output of a layer          | after
trainer lora_fp32   | callback         | freezes in turn            | -
trainer lora_fp32   | callback         | switches adapter           | -
trainer lora_fp32   | callback         | new matrices               | -
trainer lora_fp32   | callback         | merges and unmerges        | -
trainer lora_fp32   | hook             | output of adapters         | before after
trainer stream      | training_step    | masks labels               | above below object class
trainer stream      | training_step    | own step                   | above
trainer stream      | training_step    | own mean                   | above
trainer stream      | training_step    | looks first                | above
trainer stream      | training_step    | masks labels by numpy      | above
trainer stream      | training_step    | notes losses               | above
trainer stream      | callback         | looks between              | -
trainer stream      | callback         | generates                  | -
trainer stream      | training_step    | halves                     | above
trainer stream      | training_step    | replays                    | above
trainer stream      | training_step    | twice                      | above
trainer stream      | training_step    | skips                      | above
trainer stream      | training_step    | nothing                    | above object
trainer stream      | _prepare_inputs  | masks labels               | above object class
trainer stream      | compute_loss     | masks labels               | above object
trainer stream      | compute_loss     | scales                     | above object
trainer stream      | compute_loss     | state                      | above object
trainer stream      | get_batch_samples | masks labels              | above
trainer stream      | collator         | masks labels               | -
trainer stream      | forward          | scales                     | object before after
trainer stream      | forward          | masks labels               | object before after
trainer stream      | callback         | freezes in turn            | -
trainer stream      | callback         | accumulates not            | -
trainer stream      | callback         | nothing between            | -
trainer stream      | training_step    | clips gradients            | above object
trainer stream      | training_step    | doubles gradients          | above
trainer stream      | training_step    | updates at once            | above
trainer stream      | _clip_grad_norm  | clips by value             | above object
trainer stream      | backward         | doubles the loss           | object
trainer stream      | callback         | shrinks weights            | -
trainer stream      | callback         | shrinks weights at the end | -
trainer stream      | callback         | clips before the update    | -
trainer stream      | callback         | clips between              | -
trainer stream      | callback         | pauses learning            | -
trainer stream      | callback         | hook of the optimizer      | -
trainer stream      | callback         | puts a hook                | -
trainer stream      | hook             | halved after accumulation  | before after
trainer stream      | hook             | gradients clamped          | after
trainer stream      | hook             | gradient of a layer        | before after
trainer stream      | hook             | output of a layer          | before after
trainer stream      | hook             | output by column           | after
trainer stream      | hook             | gradients halved           | before after
sft full            | training_step    | masks labels               | above* below between object class
sft full            | training_step    | own step                   | above between
sft full            | training_step    | own mean                   | above
sft full            | training_step    | masks labels by numpy      | above
sft full            | training_step    | looks first                | above
sft full            | training_step    | notes losses               | above between
sft full            | training_step    | hides tokens in place      | above object
sft full            | training_step    | twice                      | above between
sft full            | training_step    | clips gradients            | above between
sft full            | training_step    | by place                   | above below between
sft full            | training_step    | nothing                    | above between
sft full            | _prepare_inputs  | masks labels               | above below between object class
sft full            | _prepare_inputs  | replaces tokens in place   | above
sft full            | compute_loss     | masks labels               | above below between object class
sft full            | compute_loss     | penalty                    | above below between object class
sft full            | compute_loss     | state                      | above between object class
sft full            | compute_loss     | reads logits               | above
sft full            | get_batch_samples | masks labels              | above object
sft full            | collator         | masks labels               | -
sft full            | forward          | masks labels               | object after
sft full            | hook             | output by column           | after
sft full            | hook             | gradients clamped          | after
sft full            | callback         | accumulates not            | -
sft lora            | training_step    | masks labels               | above between
sft lora            | callback         | freezes in turn            | -
sft lora            | callback         | scaling                    | -
sft lora            | hook             | no gradient of B           | after
dpo full            | training_step    | masks labels               | above below between object
dpo full            | training_step    | masks labels in place      | above
dpo full            | training_step    | masks labels by numpy      | above
dpo full            | training_step    | own step                   | above between object
dpo full            | training_step    | looks first                | above
dpo full            | training_step    | notes losses               | above between
dpo full            | training_step    | notes gradients            | above between
dpo full            | _prepare_inputs  | masks labels by numpy      | above object
dpo full            | compute_loss     | masks labels by numpy      | above object
dpo full            | callback         | notes gradients between    | -
dpo full            | callback         | looks between              | -
dpo full            | training_step    | twice                      | above between
dpo full            | training_step    | clips gradients            | above* between object
dpo full            | _prepare_inputs  | masks labels               | above* below between object class
dpo full            | _prepare_inputs  | masks labels in place      | above object
dpo full            | _prepare_inputs  | hides tokens in place      | above
dpo full            | compute_loss     | masks labels               | above* below between object class
dpo full            | compute_loss     | masks labels in place      | above between object
dpo full            | compute_loss     | replaces tokens            | above between
dpo full            | compute_loss     | replaces tokens in place   | above object
dpo full            | compute_loss     | hides tokens               | above object
dpo full            | compute_loss     | penalty                    | above between object class
dpo full            | compute_loss     | state                      | above object
dpo full            | compute_loss     | nothing                    | above between object class
dpo full            | _compute_loss    | masks labels               | above between object class
dpo full            | get_batch_samples | masks labels              | above object
dpo full            | backward         | doubles the loss           | object
dpo full            | backward         | clips behind it            | object
dpo full            | callback         | shrinks weights between    | -
dpo full            | callback         | clips between              | -
dpo full            | callback         | accumulates not            | -
dpo full            | collator         | masks labels               | -
dpo full            | hook             | gradients clamped          | after
dpo full            | hook             | output by column           | after
dpo full            | hook             | output of a layer          | after
dpo lora            | compute_loss     | masks labels               | above object
dpo lora            | callback         | freezes in turn            | -
dpo lora            | callback         | scaling                    | -
dpo lora            | callback         | shrinks weights            | -
dpo lora            | hook             | no gradient of B           | after
grpo full           | _prepare_inputs  | masks labels               | above below between object class
grpo full           | _prepare_inputs  | doubles advantages         | above* between object class
grpo full           | compute_loss     | masks labels               | above between object class
grpo full           | compute_loss     | doubles advantages         | above between
grpo full           | compute_loss     | penalty                    | above* between object class
grpo full           | compute_loss     | state                      | above between object class
grpo full           | _compute_loss    | masks labels               | above between object class
grpo full           | _compute_loss    | replaces tokens            | above between
grpo full           | _compute_loss    | penalty                    | above between object
grpo full           | compute_loss     | masks labels by numpy      | above
grpo full           | training_step    | own step                   | above between object
grpo full           | training_step    | notes losses               | above between
grpo full           | callback         | notes gradients between    | -
grpo full           | _calculate_rewards | praises every second     | above between object class
grpo full           | _generate_and_score_completions | doubles what it scored | above between object class
grpo full           | _get_per_token_logps_and_entropies | halves them | above between object class
grpo full           | backward         | clips behind it            | object
grpo full           | training_step    | clips gradients            | above between object
grpo full           | training_step    | nothing                    | above between
grpo full           | callback         | clips between              | -
grpo full           | callback         | shrinks weights between    | -
grpo full           | hook             | output by column           | after
grpo full           | hook             | gradients clamped          | after
grpo lora           | callback         | freezes in turn            | -
grpo lora           | callback         | scaling                    | -
grpo lora           | compute_loss     | penalty                    | above
reward full         | training_step    | replaces tokens            | above below* object class
reward full         | training_step    | replaces tokens in place   | below
reward full         | training_step    | own step                   | above below object
reward full         | training_step    | notes losses               | above below
reward full         | training_step    | looks first                | below
reward full         | training_step    | twice                      | below object
reward full         | training_step    | clips gradients            | below
reward full         | _prepare_inputs  | replaces tokens            | below object class
reward full         | _prepare_inputs  | hides tokens in place      | below
reward full         | compute_loss     | replaces tokens            | below object class
reward full         | compute_loss     | hides tokens in place      | below object
reward full         | compute_loss     | penalty                    | above below object class
reward full         | compute_loss     | state                      | below object class
reward full         | compute_loss     | nothing                    | below object class
reward full         | collator         | replaces tokens            | -
reward full         | callback         | shrinks weights between    | -
reward full         | hook             | output by column           | before after
reward full         | hook             | gradients clamped          | after
reward lora         | callback         | freezes in turn            | -
reward lora         | callback         | scaling                    | -
kto full            | compute_loss     | masks labels               | below object class
kto full            | compute_loss     | masks labels in place      | below
kto full            | _prepare_inputs  | masks labels               | below object
kto full            | training_step    | replaces tokens in place   | below
kto full            | compute_loss     | penalty                    | below object
"""
"""What is trained, the place, what the user's code does there, and the ways: `*` is in the default suite."""


def read(table):
    made = []
    for line in table.strip().splitlines():
        (trainer, weights), place, change, ways = (cell.split() for cell in line.split("|"))
        for way in ways:
            crossing = Crossing(trainer, weights, place[0], " ".join(change), way.strip("*-"))
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
    if crossing.weights == "stream" and crossing.change.startswith("shrinks weights"):
        with pytest.raises(RuntimeError, match="placeholders .`memory=stream`."):
            crossings.train(crossing, True, tmp_path)
        return
    ours = left_by(crossings.train(crossing, True, tmp_path))
    assert ours.weights.keys() == theirs.weights.keys() and apart(theirs, ours) < of_weights
    assert ours.losses == pytest.approx(theirs.losses, abs=of_losses)
    assert ours.notes == pytest.approx(theirs.notes, rel=5 * of_losses, abs=5 * of_losses)
    assert saves(ours.summary) or ours.summary.get("plain_rows_because", "no rows are laid out")


@pytest.mark.parametrize(("weights", "change"), [("full", "attention's dropout"), ("lora", "adapters' dropout")])
def test_dropout_that_a_callback_puts_is_seen(weights, change, tmp_path):
    crossing = Crossing("trainer", weights, "callback", change)
    at_first, in_all = (
        crossings.train(crossing, True, tmp_path / str(steps), max_steps=steps).hybrid_summary() for steps in (1, 3)
    )
    assert in_all["tokens_shared"] > at_first["tokens_shared"] > 0
    assert in_all["dropout_drawn_once"] and not at_first["dropout_drawn_once"]
