"""The files of infra/ with the values of the example settings in their placeholders."""

from __future__ import annotations

import contextlib
import http.server
import json
import runpy
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from tests.processes import ROOT

INFRA = ROOT / "infra"


def load_module(path: Path) -> SimpleNamespace:
    """The functions of a script of infra/, which is no package."""
    return SimpleNamespace(**runpy.run_path(str(path)))


FILL = load_module(INFRA / "fill.py")
SETTINGS: dict[str, str] = FILL.read_settings(INFRA / "settings.example.env")


def text(name: str) -> str:
    return FILL.fill((INFRA / name).read_text(), SETTINGS)


def documents(name: str) -> list[Any]:
    return list(yaml.load_all(text(name), yaml.CSafeLoader))


def policy(name: str) -> dict[str, Any]:
    return json.loads(text(f"iam/{name}.json"))


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers requests in the place of a service; writes no log."""

    def say(self, code: int, body: str = "") -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def serving(handler: type[Handler]) -> Iterator[str]:
    """A server on a port of the system's choice; its URL."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
