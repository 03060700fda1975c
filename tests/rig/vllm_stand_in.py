"""
Stands in for vLLM: the names that TRL takes from it, answered by a transformers model on a CPU.

TRL's own `VLLMGeneration` runs: it asks, synchronises weights, merges adapters, and puts its engine to sleep. In
colocate mode it finds [`LLM`] here, in server mode [`VLLMClient`] in place of its client, whose group of NCCL needs a
GPU. Both fail where vLLM would be wrong: without weights before the first completion or after a sleep that discarded
them, while the cache sleeps, and with a prefix cache that is older than the weights.

Completions come from a generator of the engine's own, so two trainings with the same weights get the same ones. The
log-probabilities are wrong by about a third, as those of another precision are by less, and a few are missing.
"""

import os
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
from trl.generation import vllm_generation

OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that TRL sets for a vLLM inside of its process."""


class Completion(NamedTuple):
    token_ids: list[int]
    logprobs: list[float]
    """NaN where missing."""


class Engine:
    """
    Draws completions.

    Attributes:
        model (`torch.nn.Module`): Its weights are NaN until they are loaded.
        loaded (`dict[str, Tensor]`): The weights as they were loaded last.
        synchronised (`int`): How often all weights were loaded.
        prompts (`list[list[int]]`): All that were completed, those of the same call one after the other.
        sleeps (`int`): How often the weights were discarded.
    """

    def __init__(self, model, seed=0):
        self.model, self.generator = model.eval().requires_grad_(False), torch.Generator().manual_seed(seed)
        self.asleep, self.prefixes_are_old = set(), False
        self.synchronised = self.sleeps = 0
        self.prompts, self.loaded = [], {}
        self.forget_weights()

    def forget_weights(self):
        for parameter in self.model.parameters():
            parameter.fill_(float("nan"))

    def load_weights(self, named):
        assert "weights" not in self.asleep, "vLLM would write to memory that it has given back"
        mine = dict(self.model.named_parameters())
        for name, value in named:
            mine[name].copy_(value)
            self.loaded[name] = value.clone()
        self.prefixes_are_old = True

    def forget_prefixes(self):
        self.prefixes_are_old, self.synchronised = False, self.synchronised + 1

    def complete(self, prompts, temperature, most) -> list[Completion]:
        assert not self.asleep, f"{self.asleep} of vLLM sleep"
        assert not self.prefixes_are_old, "vLLM would take keys and values of the weights before"
        assert all(parameter.isfinite().all() for parameter in self.model.parameters()), "vLLM has no weights"
        self.prompts += prompts
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        drawn = []
        for _ in range(most):
            places = (mask.cumsum(1) - 1).clamp(min=0)
            logits = self.model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).logits[:, -1]
            log_probs = (logits / temperature).log_softmax(dim=-1)
            token = torch.multinomial(log_probs.exp(), 1, generator=self.generator)
            drawn.append((token, log_probs.gather(1, token)))
            ids, mask = torch.cat([ids, token], dim=1), torch.cat([mask, torch.ones_like(token)], dim=1)
        tokens, log_probs = (torch.cat(parts, dim=1) for parts in zip(*drawn))
        log_probs = log_probs + 0.3 * torch.randn(log_probs.shape, generator=self.generator)
        missing = torch.rand(log_probs.shape, generator=self.generator) < 0.05
        log_probs = log_probs.masked_fill(missing, float("nan"))
        ends = torch.isin(tokens, torch.tensor(self.model.generation_config.eos_token_id))
        lengths = [int(row.int().argmax()) + 1 if row.any() else most for row in ends]
        return [
            Completion(row[:length].tolist(), values[:length].tolist())
            for row, values, length in zip(tokens, log_probs, lengths)
        ]


def _check(sampling):
    """Refuse what the engine does not know."""
    neutral = {"repetition_penalty": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    assert {name: sampling[name] for name in neutral} == neutral and sampling["logprobs"] in (0, None), sampling


class LLM:
    """As `vllm.LLM`, with the attributes that TRL follows to the weights."""

    model_of_next = None
    """Returns the model that vLLM would load from a folder."""
    made = []
    """The engines of the trainings so far."""

    def __init__(self, model, *, enable_sleep_mode, max_model_len, logprobs_mode, seed, **options):
        assert logprobs_mode == "processed_logprobs"
        self.engine, self.can_sleep = Engine(type(self).model_of_next(), seed), enable_sleep_mode
        self.made.append(self.engine)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=self.engine))
        longest = max_model_len or self.engine.model.config.max_position_embeddings
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=worker), model_config=SimpleNamespace(max_model_len=longest)
        )

    def sleep(self, level):
        assert self.can_sleep and level == 2
        self.engine.asleep = {"weights", "kv_cache"}
        self.engine.forget_weights()
        self.engine.sleeps += 1

    def wake_up(self, tags):
        self.engine.asleep -= set(tags)

    def reset_prefix_cache(self):
        self.engine.forget_prefixes()

    def generate(self, prompts, sampling_params, use_tqdm):
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        assert sampling_params["n"] == 1
        _check(sampling_params)
        outputs = []
        for row in self.engine.complete(ids, sampling_params["temperature"], sampling_params["max_tokens"]):
            values = zip(row.token_ids, row.logprobs)
            log_probs = [{token: SimpleNamespace(logprob=value, rank=1)} for token, value in values]
            log_probs = None if sampling_params["logprobs"] is None else log_probs
            outputs.append(SimpleNamespace(token_ids=row.token_ids, logprobs=log_probs))
        return [SimpleNamespace(prompt_token_ids=ids[n], outputs=[output]) for n, output in enumerate(outputs)]


class VLLMClient:
    """As TRL's client of a vLLM server."""

    def __init__(self, base_url, group_port, connection_timeout):
        self.engine = Engine(LLM.model_of_next())
        LLM.made.append(self.engine)

    def init_communicator(self, device):
        pass

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata, named_params):
        named = list(named_params)
        assert metadata == [(name, str(value.dtype)[6:], list(value.shape)) for name, value in named]
        self.engine.load_weights(named)

    def reset_prefix_cache(self):
        self.engine.forget_prefixes()

    def generate(self, prompts, features, n, temperature, max_tokens, **sampling):
        _check(sampling)
        rows = self.engine.complete([prompt for prompt in prompts for _ in range(n)], temperature, max_tokens)
        log_probs = [[[None if value != value else value] for value in row.logprobs] for row in rows]
        log_probs = None if sampling["logprobs"] is None else log_probs
        return {"prompt_ids": prompts, "completion_ids": [row.token_ids for row in rows], "logprobs": log_probs}


@contextmanager
def installed(model):
    """Let TRL find this vLLM, which would load what `model` returns. The environment is restored afterwards."""
    names = {
        "LLM": LLM, "SamplingParams": dict, "StructuredOutputsParams": None, "VLLMClient": VLLMClient,
        "is_vllm_available": lambda: True,
    }  # fmt: skip
    before = {name: os.environ[name] for name in OF_LAUNCHERS if name in os.environ}
    LLM.model_of_next, LLM.made = staticmethod(model), []
    with patch.multiple(vllm_generation, create=True, **names):
        try:
            yield
        finally:
            for name in OF_LAUNCHERS:
                os.environ.pop(name, None)
            os.environ.update(before)
