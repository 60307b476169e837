"""A proxy before a real S3 server that fails a share of the calls: `with
fault_proxy.proxy(server.url) as s3`; s3.faults may change while calls go on, s3.failed counts.
Which call fails is drawn from (seed, number of the call).
"""

import contextlib
import http.client
import random
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tests.servers import Call, Reply, serving

_CODES = {
    "503": (503, b"SlowDown"),
    "500": (500, b"InternalError"),
    "403": (403, b"AccessDenied"),
}
_REFUSAL = (
    b'<?xml version="1.0"?><Error><Code>%s</Code><Message>raypd test '
    b"fault</Message><RequestId>0</RequestId></Error>"
)


@dataclass(frozen=True)
class Faults:
    """share: of calls that fail, 0 to 1. kinds, alike likely: 503, 500, 403 (not passed on), reset
    (not passed on either), lost (passed on and done, then reset), cut (head and half of the body,
    then a reset), hang (no byte for `hang_seconds`, then a reset). most: failures altogether. only:
    calls that may fail, by method and path.
    """

    share: float = 0.0
    kinds: tuple[str, ...] = ("503", "500", "reset", "lost", "cut")
    seed: int = 0
    hang_seconds: float = 30.0
    most: int | None = None
    only: Callable[[str, str], bool] = lambda method, path: True


class Proxy:
    """A running proxy.

    `url` is the endpoint to use; `calls` and `failed` count calls by method and faults by kind.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = urllib.parse.urlsplit(upstream).netloc
        self.url = ""
        self.faults = Faults()
        self.calls: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        # Method, path, headers of every call.
        self.log: list[tuple[str, str, Mapping[str, str]]] = []
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._numbers = 0

    def reply(self, call: Call) -> Reply:
        fault, faults = self._draw(call)
        if fault in _CODES:
            status, code = _CODES[fault]
            return Reply(status, _REFUSAL % code, {"Content-Type": "application/xml"})
        if fault == "hang":
            self.stopped.wait(faults.hang_seconds)
        answer = Reply(0) if fault in ("hang", "reset") else self._passed_on(call)
        answer.broken = {None: "", "cut": "cut" if answer.body else "reset"}.get(fault, "reset")
        return answer

    def _draw(self, call: Call) -> tuple[str | None, Faults]:
        """The fault of the next call, or None, and the setting that it was drawn from."""
        with self._lock:
            faults = self.faults
            self.calls[call.method] += 1
            self.log.append((call.method, call.path, call.headers))
            over = faults.most is not None and self.failed.total() >= faults.most
            if over or not faults.only(call.method, call.path):
                return None, faults
            self._numbers += 1
            chance = random.Random(f"{faults.seed} {self._numbers}")
            if chance.random() >= faults.share:
                return None, faults
            kind = chance.choice(faults.kinds)
            self.failed[kind] += 1
            return kind, faults

    def _passed_on(self, call: Call) -> Reply:
        """What the server answers."""
        with contextlib.closing(
            http.client.HTTPConnection(self.upstream, timeout=120)
        ) as connection:
            connection.putrequest(
                call.method,
                call.path,
                skip_host=True,
                skip_accept_encoding=True,
            )
            for name, value in call.headers.items():
                if name.lower() not in (
                    "connection",
                    "expect",
                    "transfer-encoding",
                    "content-length",
                ):
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(call.body)))
            connection.endheaders(call.body)
            answer = connection.getresponse()
            body = answer.read()
        ours = ("connection", "transfer-encoding", "date", "server")
        return Reply(
            answer.status, body, {n: v for n, v in answer.getheaders() if n.lower() not in ours}
        )


@contextlib.contextmanager
def proxy(upstream: str) -> Iterator[Proxy]:
    """Starts a proxy before a server's URL, on a port of the system's choice."""
    made = Proxy(upstream)
    with serving(made.reply) as made.url:
        try:
            yield made
        finally:
            made.stopped.set()
