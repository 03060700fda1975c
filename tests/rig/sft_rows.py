"""Rows of the kinds that people fine-tune on, in tokens that mean nothing."""

import random
from collections.abc import Callable

import torch

IGNORED = -100
WORDS = 97
SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Of a tiny model that reads such rows."""


def lively(build, *args, **options):
    """Build a model whose tokens matter: as it is initialised, one would hardly attend to another."""
    torch.manual_seed(0)
    model = build(*args, **options)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # states that last: with transformers' values hardly one is left after a token
            torch.nn.init.constant_(parameter, -2.0)
    return model


def row(*parts):
    """A row of `(tokens, whether they are learned)`."""
    ids = [token for tokens, _ in parts for token in tokens]
    labels = [token if learned else IGNORED for tokens, learned in parts for token in tokens]
    return {"input_ids": ids, "labels": labels}


class Text:
    """Draws tokens, of which 0, 1 and 2 are special."""

    def __init__(self, seed=0):
        self.draw = random.Random(seed)

    def __call__(self, least, most=None):
        return [self.draw.randrange(3, WORDS) for _ in range(self.draw.randint(least, most or least))]


def system(count=48):
    """A common system prompt before each question."""
    text = Text(1)
    prompt = text(30)
    return [row((prompt + text(3, 9), 0), (text(3, 9), 1)) for _ in range(count)]


def unrolled(count=48):
    """Conversations, one row per assistant turn, of which the last one is learned."""
    text, rows = Text(2), []
    while len(rows) < count:
        past = text(6)
        for _ in range(4):
            question, answer = text(2, 6), text(2, 8)
            rows.append(row((past + question, 0), (answer, 1)))
            past = past + question + answer
    return rows


def answers(count=48):
    """Four answers to each question."""
    text, rows = Text(3), []
    while len(rows) < count:
        question = text(15, 25)
        rows += [row((question, 0), (text(4, 12), 1)) for _ in range(4)]
    return rows


def instructions(count=48):
    """Nothing is shared; some rows go on behind their last label, and one has no label."""
    text = Text(4)
    rows = [row((text(3, 20), 0), (text(3, 30), 1)) for _ in range(count - 8)]
    rows += [row((text(5), 0), (text(5), 1), (text(5), 0)) for _ in range(7)] + [row((text(12), 0))]
    return rows


def agent(count=48):
    """A prompt with tools, tasks, trajectories of a task, and one row per action."""
    text, rows = Text(5), []
    prompt = text(20)
    while len(rows) < count:
        task = prompt + text(5, 9)
        for _ in range(2):
            past = task
            for _ in range(2):
                action = text(2, 5)
                rows.append(row((past, 0), (action, 1)))
                past = past + action + text(3, 6)
    return rows


def repeated(count=48):
    """The same few rows again and again, with other labels."""
    text, rows = Text(6), []
    while len(rows) < count:
        question, answer = text(9), text(6)
        rows += [row((question, 0), (answer, 1)), row((question, 1), (answer, 1)), row((question, 0), (answer, 1))]
    return rows


KINDS: dict[str, Callable[..., list[dict]]] = {
    kind.__name__: kind for kind in (system, unrolled, answers, instructions, agent, repeated)
}


def pad(rows, left=False):
    """Collate rows, padded on one side."""
    length = max(len(row["input_ids"]) for row in rows)

    def padded(values, filler):
        padding = [filler] * (length - len(values))
        return padding + values if left else values + padding

    return {
        "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([padded(row["labels"], IGNORED) for row in rows]),
    }


def slots_of(tree, index):
    """The slot of each token of a row that is computed, `[tokens]`."""
    return torch.cat([torch.arange(begin, end) for begin, end in tree.spans[index]])
