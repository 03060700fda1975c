"""Random options, a little of `fuzz.py`; `run.py` draws more of them."""

import pytest

from chaos import fuzz

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("draw, count", [(fuzz.constructions, 8), (fuzz.command_lines, 6)])
def test_options_train_or_are_refused_by_name(draw, count):
    wrong = [result for result in draw(count, seed=0) if result.outcome not in ("trained", "refused")]
    assert not wrong
