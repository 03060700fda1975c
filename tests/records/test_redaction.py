"""Texts that people share: no secret, no folder of the machine, and nothing else changed."""

from pathlib import Path

import pytest

from hf_hybrid.records.redaction import clean, is_secret_name, redact, shareable


@pytest.mark.parametrize("name, secret", [("hub_token", True), ("pad_token", False), ("max_tokens", False),
                                          ("api-key", True), ("keyboard", False), ("db.password", True)])  # fmt: skip
def test_names_of_secrets(name, secret):
    assert is_secret_name(name) is secret


def test_secrets_that_are_named_and_folders_of_the_user(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/alice"))
    assert redact("a mytoken b", ["mytoken"]) == "a REMOVED b"
    assert clean("/home/alice/x") == "~/x" and clean("/home/alicent/x") == "x" and clean(f"{tmp_path}") == "."


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/data/ada/out/", "out"),
        ("C:\\Users\\ada\\text.txt", "text.txt"),
        ("--data=/srv/ada/x.json", "--data=x.json"),
        ("`/srv/ada/x.json` is empty", "`x.json` is empty"),
        ("file:///srv/ada/x", "x"),
        ("https://host/ada/x and org/model, ../ada/x, ~/ada/x, 1/2, /think", None),
    ],
)
def test_paths_from_the_root_become_names(value, shown):
    expected = value if shown is None else shown
    assert clean(value) == expected and shareable({"a": [value, 1, None]}) == {"a": [expected, 1, None]}
