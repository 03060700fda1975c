"""
How often is the advantage of a group with equal rewards not zero in TRL? Seconds.

    python -m benchmarks.skips.equal_rewards

TRL subtracts the mean of the group and divides by its standard deviation plus 1e-4, in fp32. Each possible reward of a
kind is given to all completions of a group.
"""

from __future__ import annotations

from pathlib import Path

import torch
from trl.trainer.utils import nanstd

from benchmarks.results import Results, command_line, provenance

KINDS = {
    "0 or 1": torch.tensor([0.0, 1.0]),
    "whole numbers to 500": torch.arange(501.0),
    "one decimal, 0 to 1": torch.arange(11) / 10,
    "two decimals, 0 to 1": torch.arange(101) / 100,
    "uniform, 0 to 10": 10 * torch.rand(1000, generator=torch.Generator().manual_seed(0)),
}
GROUPS = (2, 4, 8, 16)


def advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Return TRL's advantages of groups with equal rewards, shape [groups, rows of a group]."""
    groups = rewards.repeat_interleave(group).view(-1, group)
    return (groups - torch.nanmean(groups, dim=1, keepdim=True)) / (nanstd(groups, dim=1).unsqueeze(1) + 1e-4)


def main() -> None:
    args = command_line(__doc__, Path(__file__).parent).parse_args()
    results = Results(args.results, "equal_rewards", ("kind",))
    print(f"| rewards | {' | '.join(f'{group} completions' for group in GROUPS)} | largest advantage |")
    print(f"|{'---|' * (len(GROUPS) + 2)}")
    for kind, rewards in KINDS.items():
        found = {group: advantages(rewards, group) for group in GROUPS}
        shares = {str(group): values.ne(0).any(dim=1).float().mean().item() for group, values in found.items()}
        largest = max(values.abs().max().item() for values in found.values())
        results.add({**provenance(1), "kind": kind, "not_zero": shares, "largest": largest})
        print(f"| {kind} | {' | '.join(f'{share:.0%}' for share in shares.values())} | {largest:.0e} |")


if __name__ == "__main__":
    main()
