"""A proxy that stands before a real S3 server and fails a share of the calls, as networks and stores do.

    with fault_proxy.proxy(server.url) as s3:
        s3.faults = Faults(share=0.05, kinds=("503", "reset", "cut"), seed=1)     # may change while calls go on
        ...
        assert s3.failed["cut"]

Requests go on with their Host header, which the client has signed. Which call fails is drawn from (seed, number of the
call), so that a run of calls one after the other fails at the same places every time.
"""

import contextlib
import http.client
import random
import socket
import struct
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_CODES = {
    "503": (503, "Slow Down", b"SlowDown"),
    "500": (500, "Internal Server Error", b"InternalError"),
    "403": (403, "Forbidden", b"AccessDenied"),
}
_REFUSAL = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>%s</Code><Message>raypd test fault</Message>'
    b"<RequestId>0</RequestId></Error>"
)


@dataclass(frozen=True)
class Faults:
    """What goes wrong.

    share: of calls that fail, 0 to 1. kinds: each as likely as the others:
      503         SlowDown, not passed on to the server
      500         InternalError, not passed on
      403         AccessDenied, not passed on
      reset       the connection is reset before the call is passed on
      lost        the call is passed on and done, and the connection reset in place of its answer
      cut         the answer's head and half of its body, then a reset (an answer without a body: as `lost`)
      hang        not a byte for `hang_seconds`, then a reset
    most: failures altogether; None: no end.
    only: calls that may fail, told by method and path (with query).
    """

    share: float = 0.0
    kinds: tuple[str, ...] = ("503", "500", "reset", "lost", "cut")
    seed: int = 0
    hang_seconds: float = 30.0
    most: int | None = None
    only: Callable[[str, str], bool] = lambda method, path: True


class Proxy:
    """A running proxy. `url` is the endpoint to use; `calls` and `failed` count calls by method and faults by kind."""

    def __init__(self, upstream: str) -> None:
        self.upstream = urllib.parse.urlsplit(upstream)
        self.faults = Faults()
        self.calls: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.log: list[tuple[str, str, dict[str, str]]] = []  # method, path, headers of every call
        self._lock = threading.Lock()
        self._numbers = 0
        self._stopped = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()

    def draw(self, method: str, path: str, headers: dict[str, str]) -> tuple[str | None, Faults]:
        """The fault of the next call, or None, and the setting that it was drawn from."""
        with self._lock:
            faults = self.faults
            self.calls[method] += 1
            self.log.append((method, path, headers))
            if not faults.only(method, path) or (faults.most is not None and self.failed.total() >= faults.most):
                return None, faults
            self._numbers += 1
            chance = random.Random(f"{faults.seed} {self._numbers}")
            if chance.random() >= faults.share:
                return None, faults
            kind = chance.choice(faults.kinds)
            self.failed[kind] += 1
            return kind, faults

    def wait(self, seconds: float) -> None:
        """Sleeps, but no longer than the proxy lives."""
        self._stopped.wait(seconds)


@contextlib.contextmanager
def proxy(upstream: str) -> Iterator[Proxy]:
    """Starts a proxy before a server's URL, on a port of the system's choice."""
    made = Proxy(upstream)
    try:
        yield made
    finally:
        made.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    proxy: Proxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def _handle(self) -> None:
        body = self._body()
        proxy = self.server.proxy
        fault, faults = proxy.draw(self.command, self.path, dict(self.headers))
        if fault in _CODES:
            self._refuse(*_CODES[fault])
        elif fault == "reset":
            self._reset()
        elif fault == "hang":
            proxy.wait(faults.hang_seconds)
            self._reset()
        else:
            self._pass_on(body, fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():  # trailers
            pass
        return data

    def _pass_on(self, body: bytes, fault: str | None) -> None:
        proxy = self.server.proxy
        connection = http.client.HTTPConnection(proxy.upstream.hostname or "", proxy.upstream.port, timeout=120)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect", "transfer-encoding", "content-length"):
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if fault == "lost" or (fault == "cut" and not data):
            self._reset()
            return
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        if fault == "cut":
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            time.sleep(0.02)  # a reset at once would take the bytes before it away as well
            self._reset()
        else:
            self.wfile.write(data)

    def _refuse(self, status: int, words: str, code: bytes) -> None:
        text = _REFUSAL % code
        self.send_response_only(status, words)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _reset(self) -> None:
        """Ends the connection as a broken network does, not with an orderly close."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
