"""What becomes of the answers of Google's storage and of Azure's that are not what was asked for."""

import itertools
import sys
from dataclasses import replace

import pytest

from raypd import storage
from raypd.config import StorageConfig
from raypd.errors import ConfigError, InputError
from tests.servers import Reply


@pytest.mark.parametrize(("status", "code", "kind", "words"), [
    (401, "", storage.Unavailable, "401 .*lets nobody in .*set GOOGLE_APPLICATION_CREDENTIALS"),
    (403, "AccessDenied", storage.StorageError, r"forbidden: .* must allow to (read|write|list) here .*403 AccessD"),
    (400, "InvalidArgument", storage.StorageError, "answered 400 InvalidArgument to"),
    (404, "NoSuchBucket", storage.StorageError, "there is no gs://bucket"),
    (429, "SlowDown", storage.Unavailable, "429"), (503, "", storage.Unavailable, "answered 503")])  # fmt: skip
def test_refusals_name_the_path_and_what_to_do(google, gs, status, code, kind, words) -> None:
    storage.configure(StorageConfig(max_attempts=2))
    secret = "a-s3cret-token"
    google.fail = lambda call: Reply(status, f"<Error><Code>{code}</Code><M>{secret}</M></Error>".encode())
    path = f"{gs}/folder/x"
    reads = (lambda: storage.read(path), lambda: storage.put_new(path, b"x"), lambda: storage.names(f"{gs}/folder"))
    for ask in reads:
        with pytest.raises(kind, match=f"^{gs}/folder.*: .*{words}") as caught:
            ask()
        assert type(caught.value) is kind
        assert secret not in str(caught.value)


def test_what_passes_is_tried_again_and_what_was_sent_twice_is_written_once(google, gs) -> None:
    calls = itertools.count()
    google.fail = lambda call: None if next(calls) % 3 else Reply(503)  # every third
    wanted = {f"{number:02d}": b"%d" % number * 1000 for number in range(9)}
    assert all(storage.put_new(f"{gs}/units/{name}", text) for name, text in wanted.items())
    assert {item.name: storage.read(item.path) for item in storage.find(f"{gs}/units")} == wanted

    def lost(call):
        google.fail = lambda call: None
        google.answer(call)
        return Reply(503)

    google.fail = lost  # written, and the answer says otherwise
    assert storage.put_new(f"{gs}/a", b"mine")
    google.fail = lost
    assert storage.put_if(f"{gs}/a", b"mine again", storage.version(f"{gs}/a"))
    assert not storage.put_new(f"{gs}/a", b"yours")
    assert storage.read(f"{gs}/a") == b"mine again"


def test_a_body_that_breaks_off_is_taken_up_or_an_outage(google, gs) -> None:
    storage.put(f"{gs}/x", bytes(range(256)) * 4000)
    google.fail = lambda call: replace(google.answer(call), broken="cut") if call.method == "GET" else None
    with pytest.raises(storage.Unavailable, match=f"{gs}/x: "):
        storage.read(f"{gs}/x")


def test_without_the_extra_a_bucket_or_credentials(az, monkeypatch) -> None:
    with pytest.raises(storage.StorageError, match="az://no-such/x: there is no az://no-such"):
        storage.put("az://no-such/x", b"")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "bm8=")
    storage.configure(StorageConfig(max_attempts=2))
    with pytest.raises(storage.StorageError, match=f"{az}/x: forbidden: .* must allow to read here .*403 Authoriz"):
        storage.read(f"{az}/x")
    assert storage.absolute(f"{(box := 'abfss://box@account.dfs.core.windows.net/a')}/") == box
    with pytest.raises(InputError, match="write gs://bucket/prefix"):
        storage.absolute("abfss://box/a")
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"gs://b/x needs the package obstore: pip install 'raypd\[cloud\]'"):
        storage.read("gs://b/x")
