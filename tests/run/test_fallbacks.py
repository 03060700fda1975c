"""Two kinds of fall-back, and how loudly each is said."""

import logging

import pytest

from hf_hybrid.run.fallbacks import Fallbacks

pytestmark = pytest.mark.falls_back


def said(caplog):
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_what_cannot_be_exact_is_one_sentence_at_level_info(caplog):
    caplog.set_level(logging.INFO)
    fallbacks = Fallbacks("Rows are computed padded (`share_rows`)")
    for _ in range(3):
        fallbacks.cannot_be_exact("the model has an encoder")
    assert said(caplog) == [(logging.INFO, "Rows are computed padded (`share_rows`): the model has an encoder.")]
    assert fallbacks.because == "the model has an encoder" and fallbacks.failed == []


def test_what_the_user_can_change_is_a_warning_with_what_it_is_worth(caplog):
    caplog.set_level(logging.INFO)
    fallbacks = Fallbacks("Padding is left out, but no shared prefix (`share_rows`)")
    fallbacks.cannot_be_exact("dropout (0.05) would be drawn once", advice="About 45% would be saved without.")
    ((level, sentence),) = said(caplog)
    assert level == logging.WARNING
    assert sentence.endswith("dropout (0.05) would be drawn once. About 45% would be saved without.")


def test_an_exception_is_named_and_stays(caplog):
    fallbacks = Fallbacks("Rows are computed padded (`share_rows`)")
    for _ in range(2):
        why = fallbacks.did_not_work(TypeError("no such argument"), "the model does not take a tree", cost="45% lost.")
    assert why == fallbacks.because == "the model does not take a tree (TypeError: no such argument)"
    assert fallbacks.failed == [why]
    ((level, sentence),) = said(caplog)
    assert level == logging.WARNING and why in sentence and "45% lost." in sentence


def test_one_process_speaks(caplog):
    caplog.set_level(logging.INFO)
    fallbacks = Fallbacks("Rows are computed padded", tells=lambda: False)
    fallbacks.cannot_be_exact("the model has an encoder")
    assert not said(caplog) and fallbacks.because


def test_a_module_of_the_users_is_no_fault_of_the_package(caplog):
    """Nobody is asked to report it, and it is no failed saving."""
    caplog.set_level(logging.INFO)
    told = Fallbacks("Rows are computed padded")
    reason = told.did_not_work_with("`Mine`", ValueError("no"), "the model does not take ten tokens")
    assert reason == told.because == "the model does not take ten tokens with `Mine` (ValueError: no)"
    assert not told.failed and "eport this" not in caplog.text
