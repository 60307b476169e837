"""The section `storage`: what it takes, and that no secret gets in, or out again through an error."""

import pickle
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from raypd.config import RunConfig, StorageConfig
from raypd.config.load import load_config, make_config
from raypd.errors import ConfigError
from tests.runs import config_tree

SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
RUN = config_tree(None, "s3://bkt/in", "s3://bkt/out")


@pytest.mark.parametrize("key", [
    "access_key", "aws_secret_access_key", "secret", "session_token", "password", "credentials"])  # fmt: skip
def test_credentials_are_refused_by_name_and_not_repeated(tmp_path: Path, key: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"storage:\n  region: eu-west-1\n  {key}: {SECRET}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["input.path=s3://b/i", "output.path=s3://b/o"])
    assert f"{key}: no credentials in a configuration: set AWS_ACCESS_KEY_ID" in str(caught.value)
    with pytest.raises(ConfigError) as refusal:
        make_config(RUN, [f"storage.{key}={SECRET}"])
    with pytest.raises(ValidationError) as raw:
        RunConfig.model_validate({**RUN, "storage": {key: SECRET}})
    assert not any(SECRET in str(error.value) for error in (caught, refusal, raw))


@pytest.mark.parametrize(("key", "value", "message"), [
    *((key, f"s3://AKIAEXAMPLE:{secret}@bkt/in", f"{key}.*a URI must hold no credentials")
      for key in ("input.path", "output.path") for secret in (SECRET, f"ab/{SECRET}")),
    ("storage.endpoint_url", f"http://me:{SECRET}@host:9000", "a URI must hold no credentials"),
    ("storage.endpoint_url", "host:9000", "write http://host:port"), ("storage.sse", "kms", "aws:kms"),
    ("storage.kms_key_id", "k", "needs sse aws:kms"), ("storage.endpoint", "x", "did you mean 'endpoint_url'"),
    ("storage.max_attempts", 0, "greater than or equal to 1")])  # fmt: skip
def test_wrong_settings_are_explained_and_no_secret_repeated(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_config(RUN, [f"{key}={value}"])
    assert SECRET not in str(caught.value)


def test_settings_reach_workers_and_are_no_part_of_the_fingerprint() -> None:
    config = make_config(RUN, ["storage.endpoint_url=http://host:9000", "storage.requester_pays=true"])
    assert pickle.loads(pickle.dumps(config)).storage == config.storage
    assert config.fingerprint() == make_config(RUN).fingerprint()
    assert config.fingerprint() == make_config(RUN, ["output.partition={date: 2026-11-21}"]).fingerprint()
    paths = make_config(RUN, ["input.path=s3://bkt/2026-11-21T10:00/me@example.org"])
    assert paths.input.path == "s3://bkt/2026-11-21T10:00/me@example.org"  # at signs and colons are no credentials


def test_the_settings_of_the_documentation_are_taken() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/storage.md").read_text()
    tree = yaml.safe_load(text[text.index("    storage:\n") :].split("\n\n")[0])["storage"]
    assert (set(tree), StorageConfig.model_validate(tree).sse) == (set(StorageConfig.model_fields), "aws:kms")
