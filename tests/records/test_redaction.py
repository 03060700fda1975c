"""Texts that people share: no secret, no folder of the machine, and nothing else changed."""

import dataclasses
from pathlib import Path

import pytest

from hf_hybrid import HybridConfig, HybridDPOConfig, HybridSFTConfig
from hf_hybrid.records.redaction import clean, has_secret, is_secret_name, redact, shareable
from hf_hybrid.trl.rl import HybridGRPOConfig

SECRETS = """
hub_token api-key db.password --hub-token HF_TOKEN WANDB_API_KEY WANDB_KEY AWS_SECRET_ACCESS_KEY AZURE_OPENAI_KEY
AZURE_STORAGE_KEY AZURE_STORAGE_CONNECTION_STRING MLFLOW_TRACKING_PASSWORD PGPASSWORD MYSQL_PWD DB_PASS DATABASE_URL
SLACK_WEBHOOK_URL GITHUB_PAT SSH_KEY SIGNING_KEY PASSPHRASE SENTRY_DSN
""".split()
HARMLESS = """
pad_token max_tokens keyboard key PWD OLDPWD num_key_value_heads linear_key_head_dim public_key keys monkeys pattern
passes dataset_url OMP_NUM_THREADS CUDA_VISIBLE_DEVICES HF_HOME
""".split()


def test_names_of_secrets():
    assert [name for name in SECRETS if not is_secret_name(name)] == []
    assert [name for name in HARMLESS if is_secret_name(name)] == []


@pytest.mark.parametrize("config", [HybridConfig, HybridSFTConfig, HybridDPOConfig, HybridGRPOConfig])
def test_no_option_but_a_token_of_the_hub_is_a_secret(config):
    names = [field.name for field in dataclasses.fields(config)]
    assert [name for name in names if is_secret_name(name)] == ["hub_token"]


@pytest.mark.parametrize(
    "value",
    [
        "AIza" + "x" * 35,
        "nvapi-" + "x" * 30,
        "r8_" + "x" * 30,
        "AccountKey=abcdefgh==;",
        "hooks.slack.com/services/T0/B1/xyzw",
    ],
)
def test_formats_of_secrets(value):
    assert has_secret(f"a {value}") and redact(f"a {value}, b").startswith("a REMOVED") and not has_secret("AIza")


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
