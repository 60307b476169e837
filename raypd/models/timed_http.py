"""HTTP whose answers end: `requests` limits each read alone, so a server that drips would hold one
without end.
"""

import io
import time
from http.client import HTTPResponse
from types import SimpleNamespace
from typing import Any

from requests.adapters import HTTPAdapter

_SLOWEST = 1 << 16  # bytes that make the time of an answer a second longer


class TimedAdapter(HTTPAdapter):
    def get_connection_with_tls_context(self, *given: Any, **keys: Any) -> Any:
        pool = super().get_connection_with_tls_context(*given, **keys)
        if "ConnectionCls" not in vars(pool):
            pool.ConnectionCls = type(
                "Timed", (type(pool).ConnectionCls,), {"response_class": staticmethod(_timed)}
            )
        return pool


def _timed(sock: Any, *given: Any, **keys: Any) -> HTTPResponse:
    """All of an answer, headers too, comes in the socket's timeout, or a second later for each
    _SLOWEST bytes.
    """
    raw = sock.makefile("rb", 0)
    end = time.monotonic() + sock.gettimeout()
    read = raw.readinto

    def read_in_time(buffer: Any) -> int:
        nonlocal end
        if time.monotonic() > end:
            raise TimeoutError
        end += (size := read(buffer)) / _SLOWEST
        return int(size)

    raw.readinto = read_in_time
    return HTTPResponse(SimpleNamespace(makefile=lambda _: io.BufferedReader(raw)), *given, **keys)  # type: ignore[arg-type]
