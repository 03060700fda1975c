"""Fall-backs of the second kind (hf_hybrid/run/fallbacks.py) as errors: no test may pass with a saving switched off."""

from hf_hybrid.run import fallbacks


class SavingIsOffError(AssertionError):
    """A saving did not work, and the training went on without it."""


def _raise(self, error, doing, **_):
    raise SavingIsOffError(f"{self.what}: {doing}") from error


def replacement():
    """Return what `monkeypatch.setattr` takes."""
    return fallbacks.Fallbacks, "did_not_work", _raise


def be_strict() -> None:
    """For the rest of this process, which a test has started."""
    setattr(*replacement())
