"""The HTTP client of `model.endpoint`: pacing, retries, and limits on what a server may send."""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import requests
from requests.exceptions import ReadTimeout, RequestException
from urllib3.exceptions import HTTPError, ReadTimeoutError

from raypd.config import HIDDEN, EndpointConfig, redact
from raypd.models.timed_http import TimedAdapter

# Statuses that say that the server cannot answer now; the request is sent again.
_RETRIED = (408, 429, 500, 502, 503, 504)
# Statuses that say that the prompt, the key or the name of the model is wrong. A pause would not
# help, and they do not count as failures of the server.
_REFUSED = (400, 401, 403, 404, 413, 422)
# What servers say of a prompt that is too long for the model.
_TOO_LONG = re.compile(r"context[_ ](length|window)|max_model_len", re.IGNORECASE)
# Bytes that are read from a connection at a time.
_CHUNK_BYTES = 1 << 14
# Characters of a message of the server that are searched for secrets before it is shown.
_MAX_MESSAGE = 2000
# Bytes of text per token, as vendors estimate them before they answer.
_BYTES_PER_TOKEN = 4
# Longest pause between two attempts, in seconds. A server that wants a longer one has failed.
_MAX_WAIT = 600.0
# After each run of this many consecutive failures, all requests pause so that the server can
# recover.
_FAILURES_BEFORE_PAUSE = 20
# Seconds of the first such pause. Each further one is twice as long, up to _MAX_WAIT.
_PAUSE = 30.0
# A shorter key is not a secret: a local server accepts any key, and messages may contain it.
_MIN_SECRET = 8


class Unreachable(RuntimeError):
    """The server did not answer any of the attempts that the configuration allows."""


class HttpReply(NamedTuple):
    """What a server answered to one request."""

    status: int
    headers: Mapping[str, str]
    body: bytearray


class EndpointClient:
    """Sends requests to the server, no more per minute than the configuration allows.

    Many threads use it at the same time.

    Attributes:
        endpoint: The section `model.endpoint`.
        base_url: The server's URL, without a trailing slash.
        chat_url: The URL of chat completions.
        waiting: What requests have been waiting for, if they wait for long; otherwise "".
        failures_in_a_row: Requests that the server failed since it last answered.
        next_turn: When the next request may be sent, on the monotonic clock.
    """

    def __init__(self, endpoint: EndpointConfig, max_new_tokens: int, connections: int) -> None:
        """Open no connection yet.

        Args:
            endpoint: The section `model.endpoint`; the variable that holds the key must be set.
            max_new_tokens: Tokens that an answer may have, for the first estimates of tokens.
            connections: Connections that are kept open.
        """
        self.endpoint = endpoint
        self.base_url = endpoint.url.rstrip("/")
        self.chat_url = f"{self.base_url}/chat/completions"
        self.waiting = ""
        self.failures_in_a_row = 0
        self.next_turn = 0.0
        self._max_new_tokens = max_new_tokens
        self._lock = threading.Lock()
        self._answers = 0
        self._tokens = 0
        self._session = requests.Session()
        self._session.mount(
            f"{urlsplit(endpoint.url).scheme}://", TimedAdapter(pool_maxsize=connections)
        )
        self._key = ""
        if endpoint.key_variable is not None:
            self._key = os.environ[endpoint.key_variable]
        if self._key:
            self._session.headers["Authorization"] = f"Bearer {self._key}"

    def close(self) -> None:
        """Close all connections."""
        self._session.close()

    def reply(self, url: str, max_bytes: int, **content: Any) -> dict[str, Any]:
        """Return the JSON object that the server answers.

        Args:
            url: Where to send the request.
            max_bytes: Bytes that the answer may have.
            content: `json`, or `data` and `files`, as `requests` takes them; a request without
                content is a GET.

        Raises:
            Unreachable: If every attempt failed.
            RuntimeError: If the server refuses the request, or its answer is not a JSON object.
        """
        data = self.data(url, max_bytes, **content)
        try:
            tree = json.loads(data)
        except (ValueError, RecursionError):
            tree = None
        if not isinstance(tree, dict):
            raise self.unexpected(data.decode(errors="replace"), url)
        return tree

    def data(self, url: str, max_bytes: int, **content: Any) -> bytearray:
        """Return the bytes that the server answers; the arguments and errors are those of
        `reply`.
        """
        chat_body = None
        if url == self.chat_url:
            chat_body = content.get("json")
        reason = ""
        for attempt in range(self.endpoint.retries + 1):
            self._wait_for_turn(chat_body)
            seconds = min(2.0**attempt, _MAX_WAIT)
            try:
                reply = self.request(url, max_bytes, **content)
            except (ReadTimeout, ReadTimeoutError):
                reason = (
                    f"{url}: no complete answer within model.endpoint.timeout_seconds "
                    f"({self.endpoint.timeout_seconds:g} s)"
                )
            except (RequestException, HTTPError) as error:
                reason = self.without_key(f"{url}: {error}")
            else:
                if reply.status == 200:
                    return reply.body
                reason = self._refusal(url, reply)
                if _TOO_LONG.search(reason):
                    # raypd does not know the context length of a server, so it counts bytes there.
                    reason += (
                        "; task.max_document_tokens (bytes, for a server) with "
                        "task.long_documents=split sends long documents in parts"
                    )
                if reply.status in _REFUSED:
                    raise RuntimeError(reason)
                if reply.status not in _RETRIED:
                    raise self.failure(reason)
                seconds = max(seconds, _requested_wait(reply.headers))
                if seconds > _MAX_WAIT:
                    raise self.failure(f"{reason} (the server asks to wait {seconds:,.0f} s)")
            self._count_failure(reason)
            if attempt < self.endpoint.retries:
                if seconds >= _PAUSE:
                    self.waiting = f"{reason}: waiting {seconds:.0f} s"
                time.sleep(seconds)
        raise Unreachable(reason)

    def request(self, url: str, max_bytes: int, **content: Any) -> HttpReply:
        """Send one request and return what the server answers, whatever its status.

        Raises:
            RuntimeError: If the answer has more than `max_bytes` bytes.
            RequestException, HTTPError: If the connection fails or takes too long.
        """
        method = "POST" if content else "GET"
        with self._session.request(
            method,
            url,
            timeout=self.endpoint.timeout_seconds,
            stream=True,
            # A redirect would send documents to a server that the configuration does not name.
            allow_redirects=False,
            **content,
        ) as reply:
            body = bytearray()
            while True:
                chunk = reply.raw.read1(_CHUNK_BYTES, decode_content=True)
                if not chunk:
                    break
                body += chunk
                if len(body) > max_bytes:
                    raise self.failure(f"{url}: the answer has more than {max_bytes:,} bytes")
            return HttpReply(reply.status_code, reply.headers, body)

    def count_answer(self, tokens: int) -> None:
        """Note that the server answered a prompt, for the pace of later requests.

        Args:
            tokens: Tokens of the prompt and its answer.
        """
        with self._lock:
            self._answers += 1
            self._tokens += tokens
            self.failures_in_a_row = 0
            self.waiting = ""

    def failure(self, reason: str) -> RuntimeError:
        """Count a failure of the server and return it as an error."""
        self._count_failure(reason)
        return RuntimeError(reason)

    def unexpected(self, text: str, url: str) -> RuntimeError:
        """Count an answer in an unexpected form as a failure, and return an error that shows it.

        Args:
            text: What the server answered.
            url: The URL that answered it.
        """
        expected = "an answer of the batch API"
        if url == self.chat_url:
            expected = "a chat completion"
        shown = self.one_line(text)[:200]
        return self.failure(f"{url}: expected {expected}, found {shown}")

    def without_key(self, text: str, min_length: int = _MIN_SECRET) -> str:
        """Return text from the server without the key that it was sent.

        Args:
            text: The text.
            min_length: Characters that the key must have to count as a secret.
        """
        if len(self._key) < min_length:
            return text
        return text.replace(self._key, HIDDEN)

    def one_line(self, text: str) -> str:
        """Return the beginning of text from the server on one line, without secrets."""
        # The key is taken out first, because the cut might leave a part of it.
        beginning = self.without_key(text)[:_MAX_MESSAGE]
        return " ".join(str(redact(beginning)).split())

    def _refusal(self, url: str, reply: HttpReply) -> str:
        """Return what an answer with a status other than 200 says."""
        if 300 <= reply.status < 400:
            target = self.without_key(reply.headers.get("location", ""))[:200]
            return f"{url}: {reply.status}: redirects to {target}; documents are not sent there"
        text = reply.body.decode(errors="replace")
        return f"{url}: {reply.status}: {self.one_line(text)[:300]}"

    def _count_failure(self, reason: str) -> None:
        """Count a failure; after many in a row, make all requests pause."""
        with self._lock:
            self.failures_in_a_row += 1
            pauses, remainder = divmod(self.failures_in_a_row, _FAILURES_BEFORE_PAUSE)
            if remainder:
                return
            seconds = min(_PAUSE * 2 ** (pauses - 1), _MAX_WAIT)
            self.next_turn = max(self.next_turn, time.monotonic() + seconds)
            self.waiting = (
                f"{self.failures_in_a_row} requests failed in a row; all requests pause for "
                f"{seconds:.0f} s: {reason}"
            )

    def _wait_for_turn(self, chat_body: Mapping[str, Any] | None) -> None:
        """Sleep until a request may be sent.

        Args:
            chat_body: The body of a request to the model; None for other requests, which take no
                tokens.
        """
        with self._lock:
            now = time.monotonic()
            turn = max(now, self.next_turn)
            self.next_turn = turn + self._seconds_between_requests(chat_body)
        time.sleep(max(0.0, turn - now))

    def _seconds_between_requests(self, chat_body: Mapping[str, Any] | None) -> float:
        minutes = 0.0
        if self.endpoint.requests_per_minute is not None:
            minutes = 1 / self.endpoint.requests_per_minute
        if self.endpoint.tokens_per_minute is not None and chat_body is not None:
            tokens = self._expected_tokens(chat_body)
            minutes = max(minutes, tokens / self.endpoint.tokens_per_minute)
        return 60.0 * minutes

    def _expected_tokens(self, chat_body: Mapping[str, Any]) -> float:
        """Return the mean tokens of the answers so far.

        Before the first answer it is estimated as vendors do it: from the length of the text, plus
        all tokens that may be written.
        """
        if self._answers and self._tokens:
            return self._tokens / self._answers
        return len(json.dumps(chat_body)) / _BYTES_PER_TOKEN + self._max_new_tokens


def _requested_wait(headers: Mapping[str, str]) -> float:
    """Return the seconds that a server asks to wait; 0 if it asks for nothing readable."""
    value = headers.get("retry-after", "0")
    with contextlib.suppress(ValueError, OverflowError):
        if value[:1].isdigit():
            return float(value)
        return parsedate_to_datetime(value).timestamp() - time.time()
    return 0.0
