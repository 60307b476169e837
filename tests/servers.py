"""A web server in this process that answers in the place of a service."""

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field


@dataclass
class Call:
    """What a client asks."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Reply:
    """What it is told."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def serving(reply: Callable[[Call], Reply], port: int = 0) -> Iterator[str]:
    """The URL of a server on loopback; port 0: one of the system's choice."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            made = reply(Call(self.command, self.path, self.headers, body))
            self.send_response(made.status)
            for name, value in {"Content-Length": str(len(made.body)), **made.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(made.body)

        do_GET = do_HEAD = do_PUT = do_POST = answer

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
