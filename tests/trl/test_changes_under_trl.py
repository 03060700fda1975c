"""TRL's trainers under bf16 autocast hear what a callback changes about adapters: weights are TRL's up to rounding."""

import pytest
import torch
from conftest import config_values, mostly_slow

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from rig import rollouts  # noqa: E402
from rig.adapter_changes import CHANGES, Changes  # noqa: E402
from rig.rollouts import TOKENIZER, policy  # noqa: E402
from trl import DPOConfig, DPOTrainer, GRPOTrainer, RLOOTrainer, SFTConfig, SFTTrainer  # noqa: E402

from hf_hybrid import (  # noqa: E402
    HybridDPOConfig,
    HybridDPOTrainer,
    HybridGRPOTrainer,
    HybridRLOOTrainer,
    HybridSFTConfig,
    HybridSFTTrainer,
)
from hf_hybrid.compat import checkpointing_option  # noqa: E402

PAIRS = Dataset.from_list([
    {"prompt": f"number {n}: ", "chosen": "right " * (n % 3 + 1), "rejected": "wrong " * (n % 4 + 1)} for n in range(32)
])  # fmt: skip
TEXTS = Dataset.from_list([{"text": f"number {n}: " + "right " * (n % 5 + 1)} for n in range(32)])
TRLS = (GRPOTrainer, RLOOTrainer)
KINDS = {
    "sft": ((SFTTrainer, SFTConfig), (HybridSFTTrainer, HybridSFTConfig), TEXTS),
    "dpo": ((DPOTrainer, DPOConfig), (HybridDPOTrainer, HybridDPOConfig), PAIRS),
    "grpo": ((GRPOTrainer, None), (HybridGRPOTrainer, None), None),
    "rloo": ((RLOOTrainer, None), (HybridRLOOTrainer, None), None),
}


def trained(folder, kind, config, data, bf16, callbacks=()):
    """Return the weights of the adapters, as one vector, and the trainer. Completions are sampled in fp32."""
    torch.manual_seed(0)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    options = {"bf16": bf16, "max_steps": 5, "gradient_accumulation_steps": 2, "learning_rate": 0.1, "optim": "sgd"}
    given = {"peft_config": adapters, "callbacks": [*callbacks]}
    if data is None:
        more = {"optim_args": None, "weight_decay": 0.0, **({} if kind in TRLS else {"share_rows": "auto"})}
        trainer = rollouts.build(kind, folder, 0.0, **given, **options, **more)
    else:
        # TRL's step of DPO makes adapters trainable again between its passes, so a recomputed layer would be another.
        more = {checkpointing_option(): False, "max_grad_norm": 0.0, "max_length": None}
        more |= {"auto_lr": "off"} if kind is HybridSFTTrainer else {}
        args = config(**config_values(folder, **options, **more))
        trainer = kind(policy(), args=args, train_dataset=data, processing_class=TOKENIZER, **given)
    trainer.train()
    weights = {name: p.detach().flatten() for name, p in trainer.model.named_parameters() if ".default." in name}
    return torch.cat([weights[name] for name in sorted(weights)]), trainer


CASES = [
    (kind, change, bf16)
    for kind in KINDS
    for change in (
        "A frozen",
        "one frozen",
        "gradient hooks",
        "hooks behind B",
        "new weights",
        "scale",
        "weights, data",
    )
    for bf16 in (True, False)
]


@pytest.mark.parametrize(
    ("kind", "change", "bf16"),
    mostly_slow(CASES, [("grpo", "A frozen", True), ("dpo", "hooks behind B", True), ("sft", "scale", True)]),
)
def test_a_change_is_heard(kind, change, bf16, tmp_path):
    (trls, ours, data), when = KINDS[kind], "on_step_begin"
    without, _ = trained(tmp_path / "without", *trls, data, bf16)
    theirs, _ = trained(tmp_path / "trl", *trls, data, bf16, [Changes(when, CHANGES[change])])
    found, trainer = trained(tmp_path / "ours", *ours, data, bf16, [Changes(when, CHANGES[change])])
    effect = (theirs - without).norm()
    assert (found - theirs).norm() < (0.1 if bf16 else 1e-4) * effect and effect > 1e-4 * theirs.norm()
    assert any(part.name == "adapter_products" for part in trainer.parts) == bf16
