"""`hf_hybrid/arguments.py`: every option is explained, read and checked by itself; what a preset decides."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from rig.processes import python

from hf_hybrid import HybridArguments
from hf_hybrid.arguments import PRESETS

PACKAGE = Path(__file__).parent.parent / "hf_hybrid"


@pytest.mark.processes
def test_help_is_complete_and_cheap():
    """The options alone need neither torch nor transformers, and argparse can print them."""
    code = (
        "import dataclasses, argparse\n"
        "from hf_hybrid import HybridArguments\n"
        "parser = argparse.ArgumentParser()\n"
        "for f in dataclasses.fields(HybridArguments):\n"
        "    assert len(f.metadata['help']) > 20, f.name\n"
        "    parser.add_argument('--' + f.name, help=f.metadata['help'])\n"
        "print(parser.format_help())\n"
    )
    text = python(code, without={"torch", "transformers"})
    assert "--leap_worth" in text and "5% of" in text
    assert "Must be at least 0 and less than 1." in text


def test_options_are_few():
    assert len(dataclasses.fields(HybridArguments)) <= 46


def test_every_option_is_read_by_something():
    source = {path: path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "arguments.py"}
    text = "\n".join(source.values())
    unread = [
        field.name
        for field in dataclasses.fields(HybridArguments)
        if not re.search(rf'options\.{field.name}\b|hybrid_args\.{field.name}\b|["\']{field.name}["\']', text)
    ]
    # Read by `preset_value` and `final_gain`.
    assert set(unread) <= {"preset", "leap_gain"}


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("enable_predict", "False", "`enable_predict` must be `True` or `False`, got `'False'`"),
        ("enable_predict", None, "`enable_predict` must be `True` or `False`, got `None`"),
        ("profile_memory", 1, "`profile_memory` must be `True` or `False`, got `1`"),
        ("async_save", "no", "`async_save` must be `True` or `False`, got `'no'`"),
        ("resident_layers", 2.5, "`resident_layers` must be an integer, got `2.5`"),
        ("leap_budget", None, "`leap_budget` must be a finite number, got `None`"),
        ("full_phase_steps", 1.5, "`full_phase_steps` must be an integer, got `1.5`"),
        ("full_phase_steps", True, "`full_phase_steps` must be an integer, got `True`"),
        ("full_phase_steps", "4", "`full_phase_steps` must be an integer, got `'4'`"),
        ("resident_layers", float("inf"), "`resident_layers` must be an integer, got `inf`"),
        ("leap_gain", "much", "`leap_gain` must be a finite number, got `'much'`"),
        ("leap_gain", float("nan"), "`leap_gain` must be at least 0, got nan"),
        ("resident_layers", float("nan"), "`resident_layers` must be an integer, got `nan`"),
        ("leap_gain", False, "`leap_gain` must be a finite number, got `False`"),
        ("leap_gain", "inf", "`leap_gain` must be a finite number, got `'inf'`"),
        ("leap_budget", float("inf"), "`leap_budget` must be a finite number, got `inf`"),
        ("probe_budget", [0.1], "`probe_budget` must be a finite number, got `[0.1]`"),
        ("vram_budget_gib", 10**400, "`vram_budget_gib` must be a finite number, got `1000"),
        ("sample_prompts", ["full"], "`sample_prompts` must be text, got `['full']`"),
        ("preset", True, "`preset` must be one of conservative, balanced, aggressive, fast, got `True`"),
        ("preset", ["fast"], "`preset` must be one of conservative, balanced, aggressive, fast, got `['fast']`"),
        ("memory", True, "`memory` must be one of off, auto, stream, got `on`"),
    ],
)
def test_values_of_another_type_are_refused(option, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        HybridArguments(**{option: value})


@pytest.mark.parametrize("value", [{}, float("nan"), float("inf")])
def test_every_option_refuses_what_none_can_use(value):
    for field in dataclasses.fields(HybridArguments):
        with pytest.raises(ValueError, match=f"`{field.name}` must be "):
            HybridArguments(**{field.name: value})


def test_numbers_have_the_type_of_their_option():
    numbers = HybridArguments(
        leap_gain="1e-1", leap_worth=np.float32(0.5), probe_budget=0, full_phase_steps=2.0, resident_layers=np.int64(9)
    )
    values = [numbers.leap_gain, numbers.leap_worth, numbers.full_phase_steps, numbers.resident_layers]
    assert values == [0.1, 0.5, 2, 9] and [type(value) for value in values] == [float, float, int, int]
    assert numbers.probe_budget == 0


def test_presets_are_ordered_and_options_win():
    names = list(PRESETS)
    for option in ("leap_worth", "divergence_threshold"):
        values = [HybridArguments(preset=name).preset_value(option) for name in names[:3]]
        assert values == sorted(values) and len(set(values)) == 3
    gains = [HybridArguments(preset=name).final_gain(3.0) for name in names[:3]]
    assert gains == sorted(gains) and len(set(gains)) == 3
    assert HybridArguments(preset="aggressive", leap_worth=0.5).preset_value("leap_worth") == 0.5
    assert HybridArguments(leap_gain=0.5).final_gain(3.0) == 0.5 and HybridArguments().final_gain(4.0) == 4.0
