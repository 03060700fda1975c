"""Texts that people share: no secret, no folder of the machine, and nothing else changed."""

import dataclasses
import time
from pathlib import Path

import pytest
from transformers import GenerationConfig

from hf_hybrid import HybridConfig, HybridDPOConfig, HybridSFTConfig
from hf_hybrid.records.redaction import clean, has_secret, is_secret_name, redact, shareable
from hf_hybrid.trl.rl import HybridGRPOConfig

SECRETS = """
hub_token api-key db.password --hub-token HF_TOKEN WANDB_API_KEY WANDB_KEY AWS_SECRET_ACCESS_KEY AZURE_OPENAI_KEY
AZURE_STORAGE_KEY AZURE_STORAGE_CONNECTION_STRING MLFLOW_TRACKING_PASSWORD PGPASSWORD MYSQL_PWD DB_PASS DATABASE_URL
SLACK_WEBHOOK_URL GITHUB_PAT SSH_KEY SIGNING_KEY PASSPHRASE SENTRY_DSN Authorization X-Amz-Signature sig apiKey
accessToken clientSecret Set-Cookie
""".split()
HARMLESS = """
pad_token max_tokens keyboard key PWD OLDPWD num_key_value_heads linear_key_head_dim public_key keys monkeys pattern
passes dataset_url author KeyError design mean_token_accuracy trainable_token_indices OMP_NUM_THREADS
CUDA_VISIBLE_DEVICES HF_HOME
""".split()


def test_names_of_secrets():
    assert [name for name in SECRETS if not is_secret_name(name)] == []
    assert [name for name in HARMLESS if is_secret_name(name)] == []


@pytest.mark.parametrize("config", [HybridConfig, HybridSFTConfig, HybridDPOConfig, HybridGRPOConfig])
def test_no_option_but_a_token_of_the_hub_is_a_secret(config):
    names = [field.name for field in dataclasses.fields(config)]
    assert [name for name in names if is_secret_name(name)] == ["hub_token"]


def test_no_option_of_adapters_or_of_generation_is_a_secret():
    peft = pytest.importorskip("peft")
    names = [field.name for kind in (peft.LoraConfig, peft.IA3Config) for field in dataclasses.fields(kind)]
    assert [name for name in (*names, *GenerationConfig().to_dict()) if is_secret_name(name)] == []


@pytest.mark.parametrize(
    "value",
    [
        "AIza" + "x" * 35,
        "nvapi-" + "x" * 30,
        "r8_" + "x" * 30,
        "AccountKey=abcdefgh==;",
        "hooks.slack.com/services/T0/B1/xyzw",
        "gsk_" + "x" * 30,
        "ya29." + "x" * 30,
        "npm_" + "x" * 30,
        "pypi-" + "x" * 30,
        "dckr_pat_" + "x" * 20,
        "SG." + "x" * 20 + "." + "x" * 20,
        "pplx-" + "x" * 30,
        "sk_live_" + "x" * 20,
        "ASIA" + "X" * 16,
        "Bearer " + "x1" * 8,
        "-----BEGIN OPENSSH PRIVATE KEY-----\nx/x\n-----END OPENSSH PRIVATE KEY-----",
    ],
)
def test_formats_of_secrets(value):
    assert has_secret(f"a {value}") and redact(f"a {value}, b").startswith("a REMOVED") and not has_secret("AIza")


HIDDEN = "s3cr3t/Valu+9"


@pytest.mark.parametrize(
    "text, shown",
    [
        ("https://b.s3.amazonaws.com/x?X-Amz-Date=1&X-Amz-Signature={}", "https://b.s3.amazonaws.com/x?REMOVED"),
        ("https://a.blob.core.windows.net/x?sv=1&sig={}#a", "https://a.blob.core.windows.net/x?REMOVED#a"),
        ("https://host/x?of_no_known_name={}, b", "https://host/x?REMOVED b"),
        ("https://host/x?{}", "https://host/x?REMOVED"),
        ("https://host/x#access_token={}", "https://host/x#REMOVED"),
        ("host/x?token={}", "host/x?token=REMOVED"),
        ("curl -H 'Authorization: Bearer {}' -v", "curl -H 'Authorization: REMOVED' -v"),
        ("authorization: Basic {}", "authorization: REMOVED"),
        ("it failed: password={} b", "it failed: password=REMOVED b"),
        ("DB_PASS: {}", "DB_PASS: REMOVED"),
        ("--hub_token {} --lr 1", "--hub_token REMOVED --lr 1"),
        ("['--api-key={}']", "['--api-key=REMOVED']"),
        ("--client-secret 'a {}' b", "--client-secret 'REMOVED' b"),
        ("{{'accessToken': '{}'}}", "{{'accessToken': 'REMOVED'}}"),
        ('{{"a": "{{\\"token\\": \\"{}\\"}}"}}', '{{"a": "{{\\"token\\": \\"REMOVED\\"}}"}}'),
        ('"password": "a\\"{}"', '"password": "REMOVED"'),
        ('password: "{}\nb', 'password: "REMOVED"\nb'),
    ],
)
def test_a_secret_is_known_by_its_name_and_its_place(text, shown):
    assert redact(text.format(HIDDEN)) == shown.format() and has_secret(text.format(HIDDEN))


@pytest.mark.parametrize(
    "text",
    [
        "pad_token='<pad>' max_tokens=5 token: 5 token=None key: value {\"eos_token\": \"<|end|>\"} KeyError: 'x'",
        "mean_token_accuracy: 0.5, pass_rate=0.25, num_key_value_heads=2, tokens: many",
        "https://huggingface.co/org/model/raw/x?revision=main&download=true#usage and https://wandb.ai/a/b/runs/c",
        "Is it https://host/x? Yes: 2 + 2 = 4, Path: /think, -token",
    ],
)
def test_what_is_known_to_be_good_stays(text):
    assert redact(text) == text and not has_secret(text)


def test_values_under_secret_names_in_mappings_are_removed():
    values = {
        "token": "a", "x": {"api_key": "b", "lr": 1e-3}, "credentials": {"user": "c", "more": ["d"]},
        "secret": None, "auth": True, "pass_rate": 0.5, "pad_token": "<pad>",
    }  # fmt: skip
    assert shareable(values) == {
        "token": "REMOVED", "x": {"api_key": "REMOVED", "lr": 1e-3},
        "credentials": {"user": "REMOVED", "more": ["REMOVED"]},
        "secret": None, "auth": True, "pass_rate": 0.5, "pad_token": "<pad>",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["ey-", "a-", "--a ", "token=\\", "a://", '"token": "', "-----BEGIN PRIVATE KEY-----"])
def test_hostile_texts_take_no_time(text):
    seconds = time.process_time()
    redact(text * 20_000)
    assert time.process_time() - seconds < 2


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
