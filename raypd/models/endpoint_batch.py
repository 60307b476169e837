"""`model.endpoint.batch`: requests go to the server's batch API, which answers within a day, many
vendors at half the price. A batch of this run that is found there, after a kill or on another
worker, answers: none is paid twice.
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast

from raypd.config import MOST_REQUESTS, RunConfig
from raypd.decoding import Finished, Program, TokenCounts
from raypd.models.endpoint import EndpointEngine, Unreachable, is_answered, paid_counts

_log = logging.getLogger(__name__)
_MOST_BYTES = 100 << 20
_MOST_ANSWERED = 1 << 30
_DAY = 24 * 3600  # in which a batch is answered, or expires
_LONGEST_LOOK = 60.0  # seconds between two looks
# Of an answer that is none.
_OF_SHAPE = (LookupError, TypeError, AttributeError, ValueError, RecursionError)
_FAULTS = (RuntimeError, *_OF_SHAPE)
_OVER = ("completed", "failed", "expired", "cancelled")


class _BatchRequest(NamedTuple):
    tag: Any
    body: dict[str, Any]
    begun: str  # the beginning of the answer, which the prompt gives


class BatchEngine(EndpointEngine):
    """Collects requests, and sends them as a batch once a time brought no new ones."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(config, tokenizer)
        self._run = config.fingerprint()
        self._collected: dict[str, list[_BatchRequest]] = {}  # by custom_id, a digest of the body
        self._sent: dict[str, dict[str, list[_BatchRequest]]] = {}  # the same by id of their batch
        self._contents: dict[str, set[str]] = {}  # custom_ids of every batch that was looked into
        self._submitted = 0.0  # when, the last time (monotonic)
        self._tried = ""  # the file of which a batch was to be made last
        self._look = 0.0
        self._pause = 1.0
        self._came = "", ""  # the URL that answered last, and the beginning of what it said
        self._silent: dict[str, float] = {}  # when a batch first did not answer (monotonic)

    @property
    def pending(self) -> int:
        return sum(
            len(lines)
            for batch in (self._collected, *self._sent.values())
            for lines in batch.values()
        )

    def submit(self, program: Program[Any], *, tag: Any, sampling: Any, seed: int) -> None:
        feed = next(program)
        program.close()
        messages, begun = self._messages(list(feed.tokens))
        body = self._body(messages, feed.pattern, seed)
        draw = seed if self.config.decoding.sampling.temperature > 0 else 0
        digest = hashlib.sha256(json.dumps([body, draw], sort_keys=True).encode()).hexdigest()
        self._collected.setdefault(digest, []).append(_BatchRequest(tag, body, begun))
        self._submitted = time.monotonic()

    def close(self) -> None:
        """End the connections. Batches that were sent go on at the server; a later engine of the
        same run finds them there.
        """
        super().close()
        self._collected.clear()
        self._sent.clear()

    def step(self) -> list[Finished]:
        # A second; a minute while a cascade's other model works, which may bring more.
        quiet = time.monotonic() - self._submitted >= (1.0 if self.patience else _LONGEST_LOOK)
        finished = self._send() if self._collected and quiet else []
        time.sleep(self.patience or 0.0)
        if time.monotonic() >= self._look:
            finished += [ended for name in list(self._sent) for ended in self._read(name)]
            self._look = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_LOOK)
        return finished

    def _send(self) -> list[Finished]:
        """Gives what was collected to batches: those that have it already, and new ones."""
        try:
            for name, contents in self._earlier():
                for digest in contents & self._collected.keys():
                    self._sent.setdefault(name, {}).setdefault(digest, []).extend(
                        self._collected.pop(digest)
                    )
            while self._collected:
                self._send_some()
        except _FAULTS as fault:
            lines = [line for lines in self._collected.values() for line in lines]
            self._collected = {}
            return [Finished(line.tag, None, self._error(fault), TokenCounts()) for line in lines]
        self._look = 0.0
        self._pause = 1.0
        return []

    def _send_some(self) -> None:
        some: dict[str, list[_BatchRequest]] = {}
        data = bytearray()
        for digest, lines in self._collected.items():
            request = {
                "custom_id": digest,
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": lines[0].body,
            }
            line = json.dumps(request).encode() + b"\n"
            if some and (len(some) == MOST_REQUESTS or len(data) + len(line) > _MOST_BYTES):
                break
            some[digest] = lines
            data += line
        file = {"file": ("raypd.jsonl", data)}
        source = self._reply(
            f"{self._base}/files", self._most_bytes, data={"purpose": "batch"}, files=file
        )
        batch = {
            "input_file_id": source["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        batch["metadata"] = {"raypd": self._run}
        name = str(self._reply(f"{self._base}/batches", self._most_bytes, json=batch).get("id"))
        _log.info("batch %s: %d requests", name, len(some))
        self._sent[name], self._contents[name] = some, set(some)
        self._collected = {
            digest: lines for digest, lines in self._collected.items() if digest not in some
        }

    def _earlier(self) -> list[tuple[str, set[str]]]:
        """Batches of this run of the last day that may still answer, each with its custom_ids."""
        batches = [
            batch
            for batch in self._recent()
            if (batch.get("metadata") or {}).get("raypd") == self._run
        ]
        for batch in batches:
            if batch["id"] not in self._contents and batch["status"] != "cancelling":
                over = batch["status"] in _OVER  # what it failed to answer may be asked again
                lines = self._lines(batch.get("output_file_id" if over else "input_file_id"))
                # A refused or withheld answer counts as a failure, so --retry-errors asks again.
                good = {line["custom_id"] for line in lines if not over or _has_answer(line)}
                self._contents[batch["id"]] = good
        return [
            (batch["id"], self._contents[batch["id"]])
            for batch in batches
            if batch["id"] in self._contents
        ]

    def _recent(self) -> Iterator[dict[str, Any]]:
        """The server's batches of the last day."""
        after: str | None = ""
        while after is not None:
            page = self._reply(f"{self._base}/batches?limit=100{after}", 100 * self._most_bytes)
            recent = [
                batch
                for batch in page.get("data", [])
                if batch.get("created_at", 0) > time.time() - _DAY
            ]
            yield from recent
            if page.get("has_more") and len(recent) == len(page["data"]):
                after = f"&after={recent[-1]['id']}"
            else:
                after = None

    def _read(self, name: str) -> list[Finished]:
        """The answers of a batch, once it is over."""
        answers: dict[Any, dict[str, Any]] = {}
        try:
            batch = self._reply(f"{self._base}/batches/{name}", self._most_bytes)
            if (status := batch.get("status")) not in _OVER:
                return []
            files = batch.get("output_file_id"), batch.get("error_file_id")
            answers = {line.get("custom_id"): line for file in files for line in self._lines(file)}
            lost: Exception = RuntimeError(
                f"{self._base}/batches: batch {name} is {status}, without an answer to it"
            )
        except Unreachable as error:
            _log.warning("batch %s: %s", name, error)
            if time.monotonic() - self._silent.setdefault(name, time.monotonic()) < _DAY:
                return []  # the batch goes on meanwhile
            lost = error
        except _FAULTS as fault:
            lost = self._error(fault)
        finished = []
        for digest, lines in self._sent.pop(name).items():
            first, *same = [self._finished(line, answers.get(digest, lost)) for line in lines]
            # Sent, and paid, once.
            finished += [first, *(replace(one, counts=TokenCounts()) for one in same)]
            if first.error is not None:  # it may be asked again
                self._contents[name].discard(digest)
        return finished

    def _finished(self, line: _BatchRequest, answer: dict[str, Any] | Exception) -> Finished:
        try:
            if isinstance(answer, Exception):
                raise answer
            reply = answer.get("response") or {}
            if _status(answer) != 200:
                words = json.dumps(answer.get("error") or reply.get("body"))
                raise RuntimeError(f"{self._base}/batches: {self._shown(words)[:300]}")
            continuation, counts = self._answer(reply.get("body") or {}, line.body, line.begun)
        except _FAULTS as fault:
            return Finished(line.tag, None, self._error(fault, answer), paid_counts(fault))
        return Finished(line.tag, continuation, None, counts)

    def _error(self, fault: Exception, answer: Any = None) -> Exception:
        """A fault as an error row says it. answer: where it is not what came last."""
        if not isinstance(fault, _OF_SHAPE):
            return fault
        url, text = self._came if answer is None else (f"{self._base}/batches", json.dumps(answer))
        return self._unexpected(text, url)

    def _request(
        self, url: str, most: int, **request: Any
    ) -> tuple[int, Mapping[str, str], bytearray]:
        # It makes a batch; an attempt before may have, though its answer was lost.
        if "json" in request:
            file = request["json"]["input_file_id"]
            tried = self._tried
            for batch in self._recent() if file == tried else ():
                if batch.get("input_file_id") == file:
                    return 200, {}, bytearray(json.dumps(batch).encode())
            self._tried = file
        return super()._request(url, most, **request)

    def _data(self, url: str, most: int, **request: Any) -> bytearray:
        data = super()._data(url, most, **request)
        self._failed_in_a_row, self._came = 0, (url, data[: 1 << 16].decode(errors="replace"))
        return data

    def _lines(self, file: str | None) -> list[dict[str, Any]]:
        """A file of the server, a JSON object a line; None: it has none.

        Raises RuntimeError, or one of _OF_SHAPE.
        """
        if file is None:
            return []
        data = self._data(f"{self._base}/files/{file}/content", _MOST_ANSWERED)
        return [json.loads(line) for line in data.splitlines() if line.strip()]


def _status(line: dict[str, Any]) -> Any:
    return (line.get("response") or {}).get("status_code")


def _has_answer(line: dict[str, Any]) -> bool:
    return _status(line) == 200 and is_answered(line["response"].get("body"))
