"""HTTP answers that end in time.

The timeout of `requests` applies to each read. A server that sends a byte from time to time would
hold a request forever, so this adapter limits the time of a whole answer.
"""

import io
import time
from http.client import HTTPResponse
from types import SimpleNamespace
from typing import Any

from requests.adapters import HTTPAdapter

# Received bytes that give an answer one more second. Large answers may take long; 64 KiB/s is
# slower than any working connection.
_BYTES_PER_EXTRA_SECOND = 1 << 16


class TimedAdapter(HTTPAdapter):
    """Makes connections whose answers, headers included, must arrive within the timeout.

    The timeout grows by a second with each _BYTES_PER_EXTRA_SECOND received bytes.
    """

    def get_connection_with_tls_context(self, *args: Any, **keywords: Any) -> Any:
        pool = super().get_connection_with_tls_context(*args, **keywords)
        # A pool is reused for further requests to the same host.
        if "ConnectionCls" not in vars(pool):
            pool.ConnectionCls = _timed_connection(type(pool).ConnectionCls)
        return pool


def _timed_connection(connection_class: type) -> type:
    """Return a subclass of a connection whose answers end in time."""
    return type(
        "TimedConnection", (connection_class,), {"response_class": staticmethod(_timed_response)}
    )


def _timed_response(sock: Any, *args: Any, **keywords: Any) -> HTTPResponse:
    """Return the response that reads from a socket, in place of `http.client.HTTPResponse`."""
    raw = sock.makefile("rb", 0)
    end = time.monotonic() + sock.gettimeout()
    read = raw.readinto

    def read_in_time(buffer: Any) -> int:
        nonlocal end
        if time.monotonic() > end:
            raise TimeoutError
        size = int(read(buffer))
        end += size / _BYTES_PER_EXTRA_SECOND
        return size

    raw.readinto = read_in_time
    # HTTPResponse takes a socket, but only calls its `makefile`.
    timed_socket: Any = SimpleNamespace(makefile=lambda _: io.BufferedReader(raw))
    return HTTPResponse(timed_socket, *args, **keywords)
