"""
A head for TRL 1.15 on a CPU: its own is a Triton kernel, without which none of its trainers computes a loss.

    PYTHONPATH=tests python -m pytest -p rig.head_of_trl_1_15 ...

TRL 1.16 computes the same in plain operations where there is no GPU.
"""

import torch
import trl.trainer.utils


class PlainHead:
    """`ChunkedLogProbFunction` of `trl.kernels`, by all logits at once."""

    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, chunk_size, softcap, scale, outputs):
        logits = torch.nn.functional.linear(hidden, weight, bias).float() * scale
        logits = logits if softcap is None else softcap * (logits / softcap).tanh()
        log_probs = (logits / temperature).log_softmax(-1)
        picked, probs = log_probs.gather(-1, targets[:, None])[:, 0], log_probs.exp()
        with torch.no_grad():
            values = {
                "log_sum_sq_probs": probs.square().sum(-1).log(),
                "mean_logits": (logits / temperature).mean(-1),
                "is_top1": log_probs.argmax(-1) == targets,
            }
        values["entropy"] = -(probs * log_probs).sum(-1)
        return picked, *(values[name] if name in outputs else None for name in
                         ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"))  # fmt: skip


if trl.trainer.utils._ChunkedLogProbFunction is None:
    trl.trainer.utils._ChunkedLogProbFunction = PlainHead
