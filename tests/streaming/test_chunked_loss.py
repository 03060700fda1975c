"""The chunked loss is the model's own loss, gradients included, in a fraction of its memory."""

import itertools
import logging

import pytest
import torch
import torch.nn.functional as F
from conftest import config_values, losses, mostly_slow, tiny_model, weights
from rig.live_bytes import LiveBytes
from rig.tiny_architectures import build_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.streaming.layers import base_model, embeddings_and_head, find_layers
from hf_hybrid.streaming.loss import ChunkedCausalLoss, head_of, linear_cross_entropy
from hf_hybrid.streaming.streamer import LayerStreamer
from hf_hybrid.streaming.walk import LayerWalk

VOCAB, TOKENS = 256, 16

# Between them: plain heads, tied heads, a bias, caps, factors, router losses; at values that matter for tiny logits.
MODELS = {
    "llama": {},
    "gpt2": {},
    "phi": {},
    "qwen3": {},
    "gemma2": {"final_logit_softcapping": 0.3},
    "recurrent_gemma": {"logits_soft_cap": 0.3},
    "cohere": {},
    "granite": {"logits_scaling": 4.0},
    "falcon_h1": {},
    "mixtral": {"output_router_logits": True},
}
OWN_LOSS = ["bart", "xlnet"]  # do not use the common loss function
PADDED_VOCABULARY = ["inkling_text"]  # drops logits of ids that do not exist


def batch(seed=0, rows=2, tokens=TOKENS):
    ids = torch.randint(32, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found, expected, tolerance=1e-4):
    assert found.keys() == expected.keys()
    norm = sum(g.double().square().sum() for g in expected.values()).sqrt()
    for name, gradient in expected.items():
        assert (found[name] - gradient).double().norm() <= tolerance * (gradient.double().norm() + 1e-3 * norm), name


def assert_same_training(model, inputs, chunked, num_items=None, **tolerance):
    items = {} if num_items is None else {"num_items_in_batch": num_items}
    model.train()
    torch.manual_seed(0)
    own = model(**inputs, **items).loss
    expected = gradients(model, own)
    torch.manual_seed(0)
    loss = loss_in_chunks(chunked, model, inputs, num_items)
    found = gradients(model, loss)
    assert loss.item() == pytest.approx(own.item(), rel=1e-5)
    assert_same_gradients(found, expected, **tolerance)


def assert_is_the_models_own(model, inputs=None, counts=(40,), **options):
    inputs = batch() if inputs is None else inputs
    with ChunkedCausalLoss(model, **options) as chunked:
        assert chunked.agrees(model, inputs, 40), chunked.disagreement
        for num_items in counts:
            assert_same_training(model, inputs, chunked, num_items)


def loss_in_chunks(chunked, model, inputs, num_items=None):
    """The model's loss, computed in chunks whether or not it agrees."""
    if chunked._transfer is None:
        chunked._measure(model, inputs)
    items = {} if num_items is None else {"num_items_in_batch": num_items}
    with chunked.active(inputs):
        return model(**inputs, **items)[0]


# The function.


def reference(hidden, weight, targets, bias=None, softcap=None, scale=1.0):
    logits = scale * F.linear(hidden, weight, bias).reshape(-1, len(weight))
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets.reshape(-1), reduction="sum")


def head(dtype=torch.float64, shape=(3, 7), width=8, vocabulary=11):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*shape, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(vocabulary, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, shape, generator=generator)
    targets.view(-1)[::4] = -100
    return hidden, weight, targets, bias


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"scale": 0.3}, {"softcap": 1.5, "scale": 4.0}], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_equal_to_cross_entropy(options, with_bias, chunk_tokens):
    hidden, weight, targets, bias = head()
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    options = {**options, "bias": bias if with_bias else None}
    expected = reference(hidden, weight, targets, **options)
    found = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens, **options)
    torch.testing.assert_close(found, expected)
    for own, other in zip(torch.autograd.grad(3 * found, inputs), torch.autograd.grad(3 * expected, inputs)):
        torch.testing.assert_close(own, other)


def test_nothing_to_predict():
    hidden, weight, targets, _ = head()
    assert linear_cross_entropy(hidden, weight, torch.full_like(targets, -100)).item() == 0
    assert linear_cross_entropy(hidden[:0], weight, targets[:0]).item() == 0


def test_huge_logits_stay_finite():
    hidden, weight, targets, _ = head(torch.float32)
    loss = linear_cross_entropy(hidden * 1e4, weight, targets)
    torch.testing.assert_close(loss, reference(hidden * 1e4, weight, targets))
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, [hidden, weight]))


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_loses_no_more_than_the_head_itself(autocast):
    """The sum over many tokens is float32; per gradient, bfloat16 keeps 8 bits."""
    hidden, weight, targets, _ = head(torch.float32, (2048,), 64, 1000)
    exact = reference(hidden, weight, targets)
    expected = torch.autograd.grad(exact, [hidden, weight])
    if not autocast:
        hidden, weight = (value.detach().bfloat16().requires_grad_() for value in (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=128)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-3)
    for found, other in zip(torch.autograd.grad(loss, [hidden, weight]), expected):
        assert found.dtype == hidden.dtype
        assert (found - other).norm() < 0.02 * other.norm()


def test_float16_autocast_loses_no_small_gradients():
    hidden, weight, targets, _ = head(torch.float32, (32,), 8, 5000)
    with torch.autocast("cpu", torch.float16):
        loss = linear_cross_entropy(hidden, weight, targets)
    expected = torch.autograd.grad(reference(hidden, weight, targets), [hidden, weight])
    torch.testing.assert_close(torch.autograd.grad(loss, [hidden, weight]), expected)


def test_weight_is_not_read_after_the_forward():
    hidden, weight, targets, _ = head()
    expected = torch.autograd.grad(reference(hidden, weight, targets), [hidden, weight])
    weight = nn.Parameter(weight.detach())
    loss = linear_cross_entropy(hidden, weight, targets)
    weight.data = torch.full((), float("nan"), dtype=weight.dtype).expand(weight.shape)
    loss.backward()
    torch.testing.assert_close((hidden.grad, weight.grad), expected)
    with pytest.raises(RuntimeError, match="retain_graph"):
        loss.backward()


def test_a_batch_without_labels_has_gradients_of_zero():
    hidden, weight, targets, _ = head()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100)) / torch.tensor(0)
    found = torch.autograd.grad(loss, [hidden, weight])
    assert loss.isnan() and not any(gradient.any() for gradient in found)


def test_only_asked_for_gradients_are_computed():
    hidden, weight, targets, _ = head()
    assert not linear_cross_entropy(hidden.detach(), weight.detach(), targets).requires_grad
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, targets).grad_fn is None
    (found,) = torch.autograd.grad(linear_cross_entropy(hidden, weight.detach(), targets), [hidden])
    torch.testing.assert_close(found, torch.autograd.grad(reference(hidden, weight, targets), [hidden])[0])


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "scale": 0.5}], ids=str)
def test_many_chunks_round_the_gradient_of_a_bfloat16_head_once(options):
    """A sum of 64 chunks would be four times as far from the exact gradient."""
    hidden, weight, targets, bias = (v.detach() for v in head(torch.float32, (4096,), 16, 301))
    hidden, weight, bias = ((value + 1).bfloat16() for value in (hidden, weight, bias))
    found, exact = [], []
    for loss, dtype, into in (
        (linear_cross_entropy, torch.bfloat16, found), (reference, torch.bfloat16, found),
        (reference, torch.float64, exact),
    ):  # fmt: skip
        inputs = [value.to(dtype).requires_grad_() for value in (hidden, weight, bias)]
        chunks = {"chunk_tokens": 64} if loss is linear_cross_entropy else {}
        into.append(torch.autograd.grad(loss(*inputs[:2], targets, bias=inputs[2], **options, **chunks), inputs))
    ours, plain = ([(g - e).norm() / e.norm() for g, e in zip(gradients, exact[0])] for gradients in found)
    assert all(mine < max(1.2 * theirs, 0.004) for mine, theirs in zip(ours, plain))


def test_head_needs_less_than_a_fifth_of_the_memory():
    def peak(loss):
        hidden, weight, targets, _ = head(torch.float32, (2048,), 64, 16384)
        with LiveBytes() as live:
            loss(hidden, weight, targets).backward()
        return live.peak

    plain = peak(lambda h, w, t: F.cross_entropy(F.linear(h, w), t, reduction="sum"))
    chunked = peak(linear_cross_entropy)
    assert plain > 2048 * 16384 * 4 * 2
    assert chunked < 0.2 * plain


# The models.


@pytest.mark.parametrize("model_type", MODELS)
def test_equal_to_the_models_own_loss(model_type):
    model = build_model(model_type)
    for name, value in MODELS[model_type].items():
        assert hasattr(model.config, name)
        setattr(model.config, name, value)
    if model_type == "falcon_h1":
        model.lm_head_multiplier = 0.5
    assert_is_the_models_own(model, counts=(None, 40, torch.tensor(40)), chunk_tokens=5)


def test_loss_in_use_without_being_compared_first():
    model, inputs = tiny_model(), batch()
    inputs["shift_labels"] = inputs["labels"].roll(-2, dims=1)
    with ChunkedCausalLoss(model) as chunked:
        assert_same_training(model, inputs, chunked)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(autocast):
    model, inputs = tiny_model() if autocast else tiny_model().bfloat16(), batch()
    with ChunkedCausalLoss(model) as chunked, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert chunked.agrees(model, inputs), chunked.disagreement
        assert loss_in_chunks(chunked, model, inputs).dtype == torch.float32
        assert_same_training(model, inputs, chunked, tolerance=0.02)


@pytest.mark.parametrize("target", [["q_proj", "v_proj"], "all-linear"], ids=str)
def test_lora(target):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=4, target_modules=target, lora_dropout=0.1))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    assert_is_the_models_own(model)


@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_of_the_head_that_is_trained(tied):
    peft = pytest.importorskip("peft")
    options = {"ensure_weight_tying": True} if tied else {}
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], **options)
    model = peft.get_peft_model(tiny_model(tie_word_embeddings=tied), config)
    copy = model.base_model.model.lm_head.modules_to_save["default"]
    assert copy.weight.requires_grad
    nn.init.normal_(copy.weight, std=0.05)
    assert_is_the_models_own(model)
    assert copy.weight.grad.any()


@pytest.mark.parametrize("case", ["prompt", "head"])
def test_peft_methods_that_cannot_work(case):
    peft = pytest.importorskip("peft")
    config, words = {
        "prompt": (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "prompt learning"),
        "head": (peft.LoraConfig(target_modules=["q_proj", "lm_head"]), "lora.layer.Linear`"),
    }[case]
    model = peft.get_peft_model(tiny_model(tie_word_embeddings=False), config)
    assert words in ChunkedCausalLoss.reason_not_chunked(model)


@pytest.mark.parametrize("model_type", OWN_LOSS + PADDED_VOCABULARY)
def test_models_with_losses_of_their_own_disagree(model_type):
    model = build_model(model_type)
    with ChunkedCausalLoss(model) as chunked:
        assert not chunked.agrees(model, batch())
        assert chunked.disagreement
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            loss_in_chunks(chunked, model, batch())
    model(**batch()).loss.backward()


class Scaled(type(tiny_model())):
    """A model that does something to its logits before the loss."""

    change = staticmethod(lambda model, logits: logits)

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.change(self, self.lm_head(self.model(input_ids).last_hidden_state))
        return (self.loss_function(logits, labels, self.config.vocab_size, **kwargs), logits)


def scaled(change):
    torch.manual_seed(0)
    model = Scaled(tiny_model().config)
    model.change = change
    return model


@pytest.mark.parametrize(
    ("change", "agrees"),
    [
        (lambda model, logits: 0.5 * logits, True),
        (lambda model, logits: 7.0 * torch.tanh(3 * logits / 7.0), True),
        (lambda model, logits: logits + 1e-3, False),
        (lambda model, logits: logits.clamp(-50, 50), False),
        (lambda model, logits: logits.relu(), False),
        (lambda model, logits: logits * torch.linspace(1, 1.01, logits.shape[1])[:, None], False),
        (lambda model, logits: logits + torch.zeros(VOCAB), False),
        (lambda model, logits: logits[..., :200], False),
    ],
    ids=["factor", "cap", "shift", "clamp", "relu", "per token", "per id", "fewer ids"],
)
def test_changes_of_the_logits_are_found_even_if_today_they_do_nothing(change, agrees):
    inputs = {name: value.clamp(max=199) for name, value in batch().items() if name != "attention_mask"}
    model = scaled(change)
    with ChunkedCausalLoss(model) as chunked:
        assert chunked.agrees(model, inputs, 40) == agrees
        if agrees:
            own = model(**inputs)[0]
            assert loss_in_chunks(chunked, model, inputs).item() == pytest.approx(own.item(), rel=1e-5)


def test_learned_scale_is_refused():
    model = scaled(lambda model, logits: logits * model.scale)
    model.scale = nn.Parameter(torch.tensor(2.0))
    with ChunkedCausalLoss(model) as chunked, pytest.raises(RuntimeError, match="learns how to scale"):
        loss_in_chunks(chunked, model, batch())


def test_labels_changed_by_the_model_are_refused():
    class Masking(Scaled):
        def forward(self, input_ids, labels=None, **kwargs):
            return super().forward(input_ids, labels.where(input_ids != 7, -100), **kwargs)

    model, inputs = Masking(tiny_model().config), batch()
    with ChunkedCausalLoss(model) as chunked:
        assert chunked.agrees(model, inputs)
        inputs["input_ids"][1, 3] = 7
        with pytest.raises(RuntimeError, match="changes its labels"):
            loss_in_chunks(chunked, model, inputs)


def test_extra_predictions_with_the_same_head_keep_their_own_loss():
    class Twice(Scaled):
        def forward(self, input_ids, labels=None, **kwargs):
            loss, logits = super().forward(input_ids, labels, **kwargs)
            more = self.lm_head(self.model(input_ids.flip(1)).last_hidden_state)
            return (loss + 0.3 * self.loss_function(more, labels, self.config.vocab_size, **kwargs), logits)

    model, inputs = Twice(tiny_model().config), batch()
    with ChunkedCausalLoss(model) as chunked:
        assert chunked.agrees(model, inputs, 40), chunked.disagreement
        own = model(**inputs)[0]
        assert loss_in_chunks(chunked, model, inputs).item() == pytest.approx(own.item(), rel=1e-5)


def test_comparing_leaves_no_trace():
    model = tiny_model(attention_dropout=0.5).train()
    model.model.layers[0].eval()
    with ChunkedCausalLoss(model) as chunked:
        before, modes = torch.get_rng_state(), [module.training for module in model.modules()]
        assert chunked.agrees(model, batch())
        assert torch.equal(torch.get_rng_state(), before)
        assert [module.training for module in model.modules()] == modes
        assert all(parameter.grad is None for parameter in model.parameters())


def test_comparison_is_small_and_sees_labels():
    seen, model = [], tiny_model(vocab_size=VOCAB, max_position_embeddings=512)
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    inputs = batch(rows=3, tokens=300)
    inputs["labels"][:2] = -100
    inputs["labels"][2, :200] = -100
    with ChunkedCausalLoss(model) as chunked:
        assert chunked.agrees(model, inputs), chunked.disagreement
        assert set(seen) == {torch.Size([1, 64, 32])}
        inputs["labels"][:] = -100
        assert not chunked.agrees(model, inputs)


def test_model_works_as_usual_while_installed_and_afterwards():
    model, inputs = tiny_model(), batch()
    before = model(**inputs)
    state = set(vars(model)), set(vars(model.lm_head))
    with ChunkedCausalLoss(model) as chunked:
        loss_in_chunks(chunked, model, inputs)
        during = model(**inputs)
        assert torch.equal(during.logits, before.logits) and torch.equal(during.loss, before.loss)
        with pytest.raises(RuntimeError, match="first, and only once"):
            chunked.install()
        assert "replaced" in ChunkedCausalLoss.reason_not_chunked(model)
    assert (set(vars(model)), set(vars(model.lm_head))) == state
    assert not model.lm_head._forward_hooks and not model.lm_head._forward_pre_hooks
    with pytest.raises(RuntimeError, match="install"):
        loss_in_chunks(chunked, model, inputs)


def test_what_cannot_work_is_said_beforehand():
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2))
    other_head, other_loss = tiny_model(), tiny_model()
    other_head.lm_head = nn.Sequential(nn.Linear(32, VOCAB))
    other_loss.loss_function = lambda logits, labels, **kwargs: logits.sum()
    cases = {t5: "encoder-decoder", other_head: "Sequential`", other_loss: "loss", nn.Linear(2, 2): "transformers"}
    for model, words in cases.items():
        assert words in ChunkedCausalLoss.reason_not_chunked(model)
        with pytest.raises(ValueError, match=words):
            ChunkedCausalLoss(model)


# A head whose weight is there only while it computes.


def test_wrapped_head():
    model, inputs = tiny_model(tie_word_embeddings=False), batch()
    weight, values = model.lm_head.weight, model.lm_head.weight.data
    missing = torch.full((), float("nan")).expand(values.shape)

    def wrap(original, way):
        def forward(*args, **kwargs):
            weight.data = values
            try:
                return way(original, *args, **kwargs)
            finally:
                weight.data = missing

        return forward

    ways = (lambda call, *a, **k: call(*a, **k), lambda call, *a, **k: checkpoint(call, *a, use_reentrant=False, **k))
    expected = gradients(model, model(**inputs).loss)
    for way in ways:
        with ChunkedCausalLoss(model) as chunked:
            installed = model.lm_head.forward
            model.lm_head.forward = wrap(installed, way)
            weight.data = missing
            assert chunked.agrees(model, inputs), chunked.disagreement
            assert_same_gradients(gradients(model, loss_in_chunks(chunked, model, inputs)), expected)
            with pytest.raises(RuntimeError, match="Take off"):
                chunked.remove()
            model.lm_head.forward = installed
            weight.data = values


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("walked", [True, False])
def test_streamed_model(tied, walked):
    """Also with micro-batches that are all under way at once."""
    model, batches = tiny_model(tie_word_embeddings=tied), [batch(seed) for seed in range(3)]
    expected = gradients(model, sum(model(**inputs, num_items_in_batch=100).loss for inputs in batches))
    model.zero_grad()
    with ChunkedCausalLoss(model) as chunked:
        streamer = LayerStreamer(model, find_layers(model), embeddings_and_head(model), device=torch.device("cpu"))
        streamer.attach()
        assert chunked.agrees(model, batches[0]), chunked.disagreement
        steps = [lambda inputs=inputs: loss_in_chunks(chunked, model, inputs, 100).backward() for inputs in batches]
        if walked:
            LayerWalk(streamer).run(steps)
        else:
            for step in steps:
                step()
        streamer.gradients_arrived()
        found = {name: streamer.counterpart(parameter).grad for name, parameter in model.named_parameters()}
        assert_same_gradients(found, expected)
        streamer.detach()


# In a training.


def big_vocabulary(adapters=False):
    model = tiny_model(num_hidden_layers=2, vocab_size=40_000)
    if not adapters:
        return model
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))


@pytest.mark.parametrize(
    "memory, adapters",
    mostly_slow([*itertools.product(["off", "stream"], [False, True])], [("off", True), ("stream", False)]),
)
@pytest.mark.long
def test_chunked_loss_is_the_loss(memory, adapters, tmp_path, train_set):
    options = {"max_steps": 6, "gradient_accumulation_steps": 2, "weight_decay": 0.1}
    arguments = TrainingArguments(**config_values(tmp_path, **options))
    plain = Trainer(big_vocabulary(adapters), arguments, train_dataset=train_set)
    config = HybridConfig(
        **config_values(tmp_path, **options), enable_predict=False, memory=memory,
        chunked_loss="auto" if memory == "stream" else "on",
    )  # fmt: skip
    config.plan_values = {"stream_embeddings": memory == "stream"}
    chunked = HybridTrainer(big_vocabulary(adapters), config, train_dataset=train_set)
    seen = []
    head_of(base_model(chunked.model)).register_forward_hook(
        lambda head, args, kwargs, output: seen.append("targets" in kwargs), with_kwargs=True
    )
    plain.train()
    chunked.train()
    assert seen.count(True) >= 12
    torch.testing.assert_close(losses(chunked), losses(plain), rtol=1e-5, atol=0)
    assert "forward" not in vars(chunked.model.lm_head)
    for name, weight in weights(plain.model).items():
        torch.testing.assert_close(chunked.model.get_parameter(name), weight, rtol=0, atol=2e-4)


def test_chunked_loss_is_not_forced_on_a_loss_of_ones_own(tmp_path, train_set, caplog):
    options = config_values(tmp_path, max_steps=2)

    def own_loss(outputs, labels, num_items_in_batch=None):
        return outputs.logits.float().square().mean()

    with pytest.raises(ValueError, match="`chunked_loss=on` cannot be used"):
        config = HybridConfig(**options, enable_predict=False, chunked_loss="on")
        HybridTrainer(big_vocabulary(), config, train_dataset=train_set, compute_loss_func=own_loss).train()
    config = HybridConfig(**options, enable_predict=False, memory="stream")
    trainer = HybridTrainer(big_vocabulary(), config, train_dataset=train_set, compute_loss_func=own_loss)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "computed from all logits" in caplog.text
