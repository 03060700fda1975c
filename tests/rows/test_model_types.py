"""Which of the registered model types share rows, and why the others do not."""

import re

import pytest
import torch
from rig.tiny_architectures import FIRST_DATA_TOKEN, VOCAB, build_model, causal_lm_types

from hf_hybrid.rows.exchange import Exchange

LEAST = 125
"""Model types that share rows."""
READS_THE_MASK = r"`\w+` reads the mask, and is no attention of transformers' interface"
OWN = "the attention of `.*` is its own"
STATE = "has a state, and (is not told where rows end|needs)|no convolution"
OF_PLACES = "(hidden states|the loss) of the first batch"
"""Positions count the padding token, or places of what the model is given."""
KNOWN = {
    READS_THE_MASK: (
        "codegen falcon gpt_neo gpt_neox_japanese gptj megatron-bert mpt openai-gpt prophetnet rembert roformer xlnet "
        "axk2 deepseek_v32 doge dots3_note_text glm_moe_dsa hy_v4 qwen4_exp qwen4_exp_text"
    ),
    OWN: "bloom kimi_linear mvp trocr xglm xlm",
    STATE: ("deepseek_v4 falcon_mamba inkling2_text inkling_text jamba mamba minimax recurrent_gemma rwkv xlstm zaya"),
    OF_PLACES: (
        "bart blenderbot blenderbot-small camembert cpmant data2vec-text marian mbart pegasus plbart roberta "
        "roberta-prelayernorm whisper xlm-roberta xlm-roberta-xl xmod"
    ),
    "dropout": "big_bird",
    "its attention is not causal": "bigbird_pegasus",
    "its config does not tell what it costs": "blt",
}
"""Why these types compute padded rows."""
NO_ROWS = (
    "dots3_note gemma3n gemma4_assistant gemma4_unified_assistant git musicgen musicgen_melody reformer"
).split()  # fmt: skip
"""Types that take no rows of text, or cannot be built so small."""


def batch():
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(FIRST_DATA_TOKEN, VOCAB, (4, 24), generator=draw)
    ids[:, :16] = ids[0, :16]
    mask = torch.ones_like(ids)
    mask[1, 20:], mask[2, 18:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def reason_plain(model_type):
    """Why a tiny model of a type computes padded rows; `None` if it shares."""
    model, rows = build_model(model_type).eval(), Exchange()
    config = model.config.get_text_config()
    config.use_cache = False
    if hasattr(config, "attention_chunk_size"):
        config.attention_chunk_size = 128
    with torch.no_grad(), rows.on(model):
        model(**batch())
    assert (rows.counts["tokens_shared"] > 0) == (rows.plain_because is None), model_type
    assert not rows.failed, model_type  # "please report"
    return rows.plain_because


@pytest.mark.slow
@pytest.mark.processes  # some compile
@pytest.mark.filterwarnings("ignore")
def test_registered_types_share_rows_or_are_known_not_to():
    reasons = {kind: reason_plain(kind) for kind in causal_lm_types() if kind not in NO_ROWS}
    known = {kind: reason for reason, kinds in KNOWN.items() for kind in kinds.split()}
    others = {kind: reason for kind, reason in reasons.items() if reason is not None}
    assert {kind: why for kind, why in others.items() if not re.search(known.get(kind, "$^"), why)} == {}
    assert len(reasons) - len(others) >= LEAST
