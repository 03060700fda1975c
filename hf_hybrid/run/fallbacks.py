"""
Why a saving is off: two kinds of fall-back.

A run that was promised a saving and does not get it trains as plain `Trainer` or TRL does. There are two reasons:

- **It cannot be exact here.** The package knows beforehand, and says so in one sentence (level INFO). Where the user
  can change that, the sentence is a warning. It names the change and says what it is worth.
- **It did not work.** A model, torch or transformers raised an exception that nobody foresaw. That is a fault of this
  package until somebody looks at it. So it is a warning that names the exception, and it stays in the summary
  (`failed_savings`), in the report and in the model card. In this package's own tests it is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Fallbacks:
    """
    What a part says of the saving that it leaves out. Each sentence is logged once.

    `what` happens instead, with the option in brackets: "Rows are computed padded (`share_rows`)". `tells` says whether
    this process writes to the log. `advice` is said of reasons that come without advice.
    """

    def __init__(self, what: str, tells: Callable[[], bool] = lambda: True, advice: str = ""):
        self.what, self.tells, self.advice = what, tells, advice
        self.because: str | None = None
        """The last reason, as a clause."""
        self.failed: list[str] = []
        """What did not work, with the exception."""
        self._logged: set[str] = set()

    def cannot_be_exact(self, reason: str, *, advice: str = "") -> None:
        """
        Note why the saving would change the update, as a clause. It is a warning if there is `advice`: what the user
        can change, and what that is worth, as a sentence.
        """
        advice = advice or self.advice
        self._log(reason, f"{self.what}: {reason}. {advice}".rstrip(), logging.WARNING if advice else logging.INFO)

    def did_not_work(self, error: BaseException, doing: str, *, cost: str = "") -> str:
        """
        Note an exception that nobody foresaw, and return it as a clause. `doing` is what raised it, as a clause: "the
        model does not take a tree". `cost` is what is lost without the saving, as a sentence.
        """
        reason = f"{doing} ({type(error).__name__}: {error})"
        logger.debug("%s", reason, exc_info=error)
        if reason not in self.failed:
            self.failed.append(reason)
        sentence = f"{self.what}, because something did not work: {reason}. {cost}".rstrip()
        sentence += " Please report this with the versions of torch and transformers."
        self._log(reason, sentence, logging.WARNING)
        return reason

    def did_not_work_with(self, own: str | None, error: BaseException, doing: str) -> str:
        """As [`did_not_work`]. `own` is a module of the user's, if the model has one: nobody else can mend that."""
        if own is None:
            return self.did_not_work(error, doing)
        reason = f"{doing} with {own} ({type(error).__name__}: {error})"
        logger.debug("%s", reason, exc_info=error)
        self.cannot_be_exact(reason)
        return reason

    def _log(self, reason: str, sentence: str, level: int) -> None:
        self.because = reason
        if reason not in self._logged and self.tells():
            logger.log(level, "%s", sentence)
        self._logged.add(reason)
