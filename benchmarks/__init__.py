"""The measurements behind the numbers of the documents, in folders by question; see README.md."""

import sys
from pathlib import Path

# What tests and benchmarks share, tiny models and a counter of live bytes, belongs to the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
