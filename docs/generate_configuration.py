"""
Write docs/configuration.md from the options themselves: names, values, ranges, defaults and help texts.

    python docs/generate_configuration.py      # tests/documents/test_docs.py fails when the page is out of date
"""

from __future__ import annotations

from dataclasses import Field, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from hf_hybrid.arguments import PRESETS, HybridArguments, in_words
from hf_hybrid.leaps.directions import DIRECTIONS
from hf_hybrid.trl.rl import ExactSkipArguments

PAGE = Path(__file__).with_name("configuration.md")
INTRODUCTION = """\
# Configuration

```python
from hf_hybrid import HybridConfig

config = HybridConfig("out", preset="conservative", full_phase_steps=20, learning_rate=2e-5)
```

`HybridConfig` is `transformers.TrainingArguments` plus the options below. It changes no default of the former. `optim`
takes one more value, `muon`, and `activation_checkpointing` takes `auto`, which recomputes [as few layers as
fit](memory.md#how-many-layers-are-recomputed). `HybridSFTConfig` and `HybridDPOConfig` add the same options to TRL's
configs. `HybridGRPOConfig` and `HybridRLOOConfig` refuse those of leaps
([GRPO](grpo.md#what-is-refused)). `python docs/generate_configuration.py` writes this page from
`hf_hybrid/arguments.py`. An option has the same name on the command line and in YAML:

```bash
hf-hybrid train --config run.yaml --preset conservative --full_phase_steps 20
```

```yaml
preset: conservative
full_phase_steps: 20
learning_rate: 2.0e-5
```

A config with a value that cannot work is refused at construction. The error names the option, the value and what to
change. This includes numbers of `TrainingArguments` that plain `Trainer` reads only when training begins, such as a
batch size of 0. A run writes the options that differ from their defaults to `hybrid_config.json`, and
`HybridConfig.from_json("out")` reads them.
"""


def values_of(option: Field, hint: object) -> str:
    """The values that an option takes."""
    if type(None) in get_args(hint):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    kind = {bool: "`True`, `False`", int: "integer", float: "number", str: "text"}[hint]
    limits = option.metadata["help"].limits
    return f"{kind}, {in_words(limits)}" if limits else kind


def row(option: Field, hint: object) -> str:
    """A line of a table. The part of a help text behind "Default:" goes into the column of defaults."""
    text, _, said = option.metadata["help"].text.replace("%%", " %").replace("|", "\\|").partition(" Default: ")
    default = said.strip().rstrip(".") if option.default is None else f"`{option.default}`"
    return f"| `{option.name}` | {values_of(option, hint)} | {default or 'none'} | {text.strip()} |"


def table(heading: list[str], rows: list[list[object]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for options in (HybridArguments, ExactSkipArguments):
        hints = get_type_hints(options)
        for option in fields(options):
            if option.metadata["help"].group:
                head = "| option | values | default | |\n|---|---|---|---|"
                parts.append(f"## {option.metadata['help'].group}\n\n{head}\n")
            parts[-1] += row(option, hints[option.name]) + "\n"
    names = list(next(iter(PRESETS.values())))
    presets = [[f"`{name}`", *(values[name] for values in PRESETS.values())] for name in names]
    parts.append(
        "## What a preset decides\n\nA preset sets these values unless you set the option. `gain_factor` multiplies "
        "the gain of the direction.\n`fast` also sets `optim=muon`, unless you set `optim`. With adapters it then "
        "trains by AdamW all the same.\n\n" + table(["", *(f"`{name}`" for name in PRESETS)], presets) + "\n"
    )
    gains = [[f"`{name}`", direction.gain, direction.gain_power] for name, direction in DIRECTIONS.items()]
    parts.append(
        "## Gain by direction\n\nThe gain of a leap is `gain * progress ** gain_power` (times `gain_factor`), in units "
        "of the real steps since the last\nleap.\n\n" + table(["`direction`", "`gain`", "`gain_power`"], gains) + "\n"
    )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
