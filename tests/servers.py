"""A web server in this process that answers in the place of a service."""

import contextlib
import http.server
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Call:
    """What a client asks."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Reply:
    """What it is told. body: several parts are written one by one, with a Content-Length of
    `headers`. broken: "reset" in place of an answer, "cut" behind half of the body. pause: seconds
    between two bytes of headers.
    """

    status: int
    body: bytes | Iterable[bytes] = b""
    headers: dict[str, str] = field(default_factory=dict)
    broken: str = ""
    pause: float = 0.0


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no news; a fault of a reply is."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def serving(reply: Callable[[Call], Reply], port: int = 0) -> Iterator[str]:
    """The URL of a server on loopback; port 0: one of the system's choice."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            made = reply(Call(self.command, self.path, self.headers, self.read()))
            if made.broken == "reset":
                self.reset()
                return
            self.send_response(made.status)
            parts = [made.body] if isinstance(made.body, bytes) else made.body
            length = {"Content-Length": str(len(made.body))} if isinstance(made.body, bytes) else {}
            for name, value in {**length, **made.headers}.items():
                self.send_header(name, value)
            for byte in b"".join(self._headers_buffer) if made.pause else ():
                self.wfile.write(bytes([byte]))
                time.sleep(made.pause)
            self._headers_buffer = [] if made.pause else self._headers_buffer
            self.end_headers()
            for part in parts if self.command != "HEAD" else ():
                self.wfile.write(part[: len(part) // 2] if made.broken else part)
            if made.broken:
                time.sleep(0.02)  # a reset at once would take the bytes before it away as well
                self.reset()

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def read(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers["Content-Length"] or 0))
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():  # trailers
                pass
            return data

        def reset(self) -> None:
            """Ends the connection as a broken network does, not with an orderly close."""
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
                self.connection.close()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with _Server(("127.0.0.1", port), Handler) as server:
        threading.Thread(
            target=server.serve_forever,
            args=(0.05,),
            daemon=True,
        ).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
