"""Secrets in a configuration are refused or hidden, and never in run.json; and the rest of the
section `storage`.
"""

import json
import pickle
import re
import time
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from raypd import storage
from raypd.answering import progress
from raypd.cli.main import report_errors
from raypd.config import RunConfig, StorageConfig
from raypd.config.data import StorageOptions
from raypd.config.load import load_config, make_config
from raypd.config.secrets import HIDDEN, redact
from raypd.errors import ConfigError, RunError
from raypd.run import console, lease, manifest
from tests.processes import ended, start
from tests.runs import TITLES, config_tree, write_jsonl

SECRET = "Pa55word-9f3c"
SIGNED = f"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F&X-Amz-Signature={SECRET}"  # noqa: E501
RUN = config_tree(None, "s3://bkt/in", "s3://bkt/out")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cluster.address", f"ray://me:{SECRET}@head:10001"),
        ("cluster.address", f"me:{SECRET}@head:6379"),
        ("cluster.address", f":{SECRET}@head:6379"),
        ("model.name", f"https://me:{SECRET}@hub.example/m"),
        ("model.adapter", f"https://hub.example/adapter?token={SECRET}"),
        ("model.adapter", f"s3://weights/adapter?{SIGNED}"),
        ("decoding.options.heads", f"https://hub.example/heads?x=1&access_token={SECRET}"),
        ("cascade.model.name", f"https://{SECRET}@hub.example/m"),
        ("model.endpoint.url", f"https://api.example/v1?api_key={SECRET}"),
        ("input.path", f"https://bucket.s3.amazonaws.com/in.jsonl?{SIGNED}"),
        ("input.path", f"[a.jsonl, 's3://bucket/in.jsonl?{SIGNED}']"),
        ("output.path", f"s3://bucket/out?{SIGNED}"),
        ("storage.options.endpoint_url", f"https://store.example?password={SECRET}"),
        ("storage.options.endpoint_url", f"http://me:{SECRET}@host:9000"),
        *(
            (key, f"s3://AKIA:{part}{SECRET}@bkt/in")
            for key in ("input.path", "output.path")
            for part in ("", "ab/")
        ),
        ("training.labels", f"s3://bucket/labels?{SIGNED}"),
        ("engine.vllm", f"{{hf_token: {SECRET}}}"),
        ("model.endpoint.parameters", f"{{extra_headers: {{Authorization: Bearer {SECRET}}}}}"),
    ],
)
def test_a_secret_is_refused_and_not_repeated(key: str, value: str) -> None:
    tree = config_tree(storage={"options": {"profile": "p"}})
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")) as caught:
        make_config(tree, [f"{key}={value}", "cluster.max_workers=0"])
    assert "cluster.max_workers" in str(caught.value)
    assert SECRET not in str(caught.value)
    assert re.search("credentials|user and password|secrets", str(caught.value))


def test_paths_and_addresses_without_one_are_taken() -> None:
    for key, value in {
        "cluster.address": "ray://head.example:10001",
        "model.name": "owner/model",
        "model.adapter": "/home/me@example.org/adapter",
        "model.endpoint.url": "https://me.example/v1?api-version=2026-01-01",
        "input.path": "s3://bucket/2026-11-21T10:00/me@example.org/what?.jsonl",  # colons as well
    }.items():
        make_config(config_tree(), [f"{key}={value}"])


def test_messages_and_logs_hide_what_has_the_form_of_a_secret(capsys, monkeypatch) -> None:
    """Those of values that no key of raypd's holds: RAY_ADDRESS, what a server or a library
    quotes.
    """
    text = (
        f"no answer from redis://me:{SECRET}@host:6379, me:{SECRET}@host:6379 or "
        f"https://b.example/k?{SIGNED}"
    )
    console.say(text)
    progress.RunDisplay(1, 0).say(text)
    monkeypatch.setattr("os._exit", lambda code: None)
    with report_errors():
        raise RunError(text)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert SECRET not in line
        assert "AKIA" not in line
        assert line.count(HIDDEN) == 2 + 3
        assert "@host:6379" in line
    assert redact("at 12:30 me@example.org, 10:20@30") == "at 12:30 me@example.org, 10:20@30"


def test_an_override_is_not_repeated_with_its_secret() -> None:
    for override in (f"https://me:{SECRET}@host", f"cluster.max_workers=https://me:{SECRET}@host"):
        with pytest.raises(ConfigError, match="hidden") as caught:
            make_config(config_tree(), [override])
        assert SECRET not in str(caught.value)


def test_ray_address_with_a_password_as_a_user_sees_it(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", ["a"])
    run = config_tree(
        None,
        "in.jsonl",
        tmp_path / "out",
        input=TITLES,
        model="fake",
    )
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    said = ended(
        start(
            "-m",
            "raypd",
            "extract",
            str(tmp_path / "run.yaml"),
            RAY_ADDRESS=f"me:{SECRET}@127.0.0.1:1",
        ),
        1,
    )
    assert f"RAY_ADDRESS {HIDDEN}@127.0.0.1:1: no Ray cluster answers" in said
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in text for text in [said.encode(), *written])


def test_a_new_run_folder_is_its_owners_alone(tmp_path: Path, config) -> None:
    def modes(output: Path) -> tuple[int, int]:
        return output.stat().st_mode & 0o777, (output / "run.json").stat().st_mode & 0o777

    write_jsonl(tmp_path / "a.jsonl", ["a"])
    manifest.claim(config(str(tmp_path / "a.jsonl"), "new/run"), str(tmp_path / "new/run"))
    assert modes(tmp_path / "new/run") == (0o700, 0o600)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    manifest.claim(config(str(tmp_path / "a.jsonl"), "shared"), str(shared))
    assert modes(shared) == (0o755, 0o600)
    with lease.held(str(tmp_path / "nights"), print):
        assert (tmp_path / "nights").stat().st_mode & 0o777 == 0o700
    storage.put(str(tmp_path / "plain/a"), b"")
    assert (tmp_path / "plain/a").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "a0: &a0 [x]\n"
            + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)),
            "aliases",
        ),
        (
            "a0: &a0 {}\n"
            + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 60)),
            "aliases",
        ),
        ("input: &a [*a]\n", "aliases"),
        ("input: " + "[" * 5000 + "]" * 5000 + "\n", "nested too deeply"),
    ],
)
def test_yaml_that_grows_without_end_is_refused_at_once(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    began = time.process_time()
    with pytest.raises(ConfigError, match=rf"run\.yaml.*{words}"):
        load_config(tmp_path / "run.yaml")
    assert time.process_time() - began < 5


def test_aliases_as_people_write_them_are_taken(tmp_path: Path) -> None:
    attributes = "".join(f"      - &a{n} {{name: a{n}}}\n" for n in range(50))
    again = "".join(f"    c{n}: {{attributes: *all}}\n" for n in range(500))
    task = f"task:\n  categories:\n    c:\n      attributes: &all\n{attributes}{again}"
    (tmp_path / "run.yaml").write_text(f"input: {{path: x.jsonl}}\noutput: {{path: out}}\n{task}")
    assert len(load_config(tmp_path / "run.yaml").task.categories) == 501


@pytest.mark.parametrize(
    "key",
    ["access_key", "aws_secret_access_key", "secret", "session_token", "password", "credentials"],
)
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


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("storage.options.endpoint_url", "host:9000", "write http://host:port"),
        ("storage.options.sse", "kms", "aws:kms"),
        ("storage.options.kms_key_id", "k", "needs sse aws:kms"),
        ("storage.endpoint", "x", "did you mean 'options.endpoint_url'"),
        (
            "storage.options.max_attemps",
            2,
            "unknown option; did you mean 'max_attempts'",
        ),
        ("storage.options.max_attempts", 0, "greater than or equal to 1"),
    ],
)
def test_wrong_settings_are_explained(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(RUN, [f"{key}={value}"])


def test_settings_are_the_documentation_s_reach_workers_and_are_not_in_the_fingerprint() -> None:
    config = make_config(
        RUN,
        ["storage.options.endpoint_url=http://host:9000", "storage.options.requester_pays=true"],
    )
    assert pickle.loads(pickle.dumps(config)).storage == config.storage
    assert config.fingerprint() == make_config(RUN).fingerprint()
    assert (
        config.fingerprint()
        == make_config(RUN, ["output.partition={date: 2026-11-21}"]).fingerprint()
    )
    text = (Path(__file__).resolve().parents[2] / "docs/storage.md").read_text()
    tree = yaml.safe_load(text[text.index("    storage:\n") :].split("\n\n")[0])["storage"]
    assert set(tree) == set(StorageConfig.model_fields)
    assert set(tree["options"]) == set(StorageOptions.model_fields)
    assert StorageConfig.model_validate(tree).requests.sse == "aws:kms"
