"""Azure's own emulator, Azurite, and a server in this process in the place of Google's storage."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import itertools
import os
import re
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from tests.processes import wait_for
from tests.s3 import free_ports
from tests.servers import Call, Reply, serving

ACCOUNT = "devstoreaccount1"  # Azurite's own, with the key that its documentation names
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """The URL of Azurite's account. npm install azurite, with its program in .azurite, or in the
    PATH.
    """
    here = Path(__file__).parent.parent / ".azurite/node_modules/.bin"
    program = shutil.which("azurite-blob", path=f"{here}:{os.environ['PATH']}") or pytest.skip(
        "needs make azurite"
    )
    (port,) = free_ports(1)
    command = [
        program,
        "--blobPort",
        str(port),
        "--blobHost",
        "127.0.0.1",
        "--inMemoryPersistence",
        "--skipApiVersionCheck",
        "--disableTelemetry",
    ]
    with (
        open(folder / "azurite.log", "wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            wait_for(
                lambda: b"success" in (folder / "azurite.log").read_bytes(),
                f"see {folder}/azurite.log",
            )
            yield f"http://127.0.0.1:{port}/{ACCOUNT}"
        finally:
            process.kill()


def make_container(url: str, name: str) -> None:
    """obstore makes none."""
    date = email.utils.formatdate(usegmt=True)
    path = f"/{ACCOUNT}/{name}"
    head = [
        "PUT",
        *[""] * 11,
        f"x-ms-date:{date}",
        "x-ms-version:2021-08-06",
        f"/{ACCOUNT}{path}",
        "restype:container",
    ]
    signed = hmac.digest(base64.b64decode(KEY), "\n".join(head).encode(), "sha256")
    headers = {
        "x-ms-date": date,
        "x-ms-version": "2021-08-06",
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}",
    }
    place = f"{url}/{name}?restype=container"
    urllib.request.urlopen(
        urllib.request.Request(
            place,
            method="PUT",
            headers=headers,
        )
    ).close()


class Google:
    """Objects as Google's XML API has them by its documentation; fail: what it answers in place of
    the object.
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}  # key -> content, generation
        self.fail: Callable[[Call], Reply | None] = lambda call: None
        self._lock, self._numbers = threading.Lock(), itertools.count(1)

    def reply(self, call: Call) -> Reply:
        with self._lock:
            return self.fail(call) or self.answer(call)

    def answer(self, call: Call) -> Reply:
        url = urlsplit(call.path)
        _, bucket, *keys = url.path.split("/", 2)
        key = unquote(keys[0]) if keys else ""
        if bucket != "bucket":
            return Reply(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        if "list-type" in url.query:
            return Reply(200, self._listing(parse_qs(url.query)))
        content, generation = self.objects.get(key, (b"", 0))
        wanted = call.headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != generation:
            return Reply(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        if call.method == "PUT":
            self.objects[key] = (content, generation) = (call.body, next(self._numbers))
            return Reply(200, b"", self._headers(content, generation))
        if not generation:
            return Reply(404, b"<Error><Code>NoSuchKey</Code></Error>")
        if call.method == "DELETE":
            del self.objects[key]
            return Reply(204)
        headers = self._headers(content, generation)
        if call.headers.get("If-Match", headers["ETag"]) != headers["ETag"]:
            return Reply(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", call.headers.get("Range", "")):
            begin = int(match[1])
            end = min(int(match[2]) + 1, len(content))
            if begin >= len(content):
                return Reply(416, b"<Error><Code>InvalidRange</Code></Error>")
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            return Reply(206, content[begin:end], headers)
        return Reply(200, content, headers)

    def _headers(self, content: bytes, generation: int) -> dict[str, str]:
        return {
            "ETag": f'"{hashlib.md5(content).hexdigest()}"',
            "x-goog-generation": str(generation),
            "Last-Modified": email.utils.formatdate(usegmt=True),
        }

    def _listing(self, query: dict[str, list[str]]) -> bytes:
        prefix = query.get("prefix", [""])[0]
        folded = dict[str, None]()
        items = []
        for key, (content, generation) in sorted(self.objects.items()):
            head, slash, _ = key.removeprefix(prefix).partition("/")
            if key.startswith(prefix) and slash and "delimiter" in query:
                folded[
                    f"<CommonPrefixes><Prefix>{escape(prefix + head)}/</Prefix></CommonPrefixes>"
                ] = None
            elif key.startswith(prefix):
                tag = self._headers(content, generation)["ETag"]
                items.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00Z</LastModified>"
                    f"<ETag>{escape(tag)}</ETag><Size>{len(content)}</Size></Contents>"
                )
        return f"<ListBucketResult>{''.join(items)}{''.join(folded)}</ListBucketResult>".encode()


@contextlib.contextmanager
def google(patch: pytest.MonkeyPatch) -> Iterator[Google]:
    """A server that this process takes for Google's; its bucket is `bucket`."""
    store = Google()
    with serving(store.reply) as url:
        patch.setenv("GOOGLE_BASE_URL", url)
        patch.setenv("GOOGLE_BEARER_TOKEN", "a-s3cret-token")
        yield store
