"""`model.endpoint.batch`: requests go to the server's batch API.

It answers within a day, at many vendors for half the price. Nothing is paid twice: after a kill, or
on another worker, the engine finds this run's batches at the server and reads their answers.
"""

import hashlib
import json
import logging
import time
from dataclasses import replace
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast

from raypd.config import MOST_REQUESTS, DecodingConfig, EngineConfig, ModelConfig
from raypd.decoding import Finished, Program, TokenCounts
from raypd.models.batch_client import BATCH_SECONDS, BatchClient
from raypd.models.byte_prompt import messages_of
from raypd.models.chat_completion import is_answered, paid_counts
from raypd.models.endpoint import EndpointEngine
from raypd.models.endpoint_client import Unreachable

_log = logging.getLogger(__name__)

# Bytes of a batch's file, half of what OpenAI's API takes.
_MAX_BATCH_BYTES = 100 << 20
# A batch is sent when no request has been submitted for this many seconds.
_QUIET_SECONDS = 1.0
# The seconds between two checks of the batches: at first, and at most (they double in between).
# Also the quiet time that the engine waits for while a cascade's other model may submit more.
_MIN_LOOK_SECONDS = 1.0
_MAX_LOOK_SECONDS = 60.0
# The errors that are raised when an answer of the server has an unexpected form.
_FORM_ERRORS = (LookupError, TypeError, AttributeError, ValueError, RecursionError)
_ERRORS = (RuntimeError, *_FORM_ERRORS)
# Values of a batch's status after which it gets no further answers.
_ENDED = ("completed", "failed", "expired", "cancelled")


class BatchRequest(NamedTuple):
    """A prompt that was submitted.

    Attributes:
        tag: The tag of its program.
        body: The body of the request.
        beginning: The beginning of the answer, which the prompt gives.
    """

    tag: Any
    body: dict[str, Any]
    beginning: str


# Requests by custom_id, a digest of the body. Prompts that are the same share one.
Requests = dict[str, list[BatchRequest]]


class BatchEngine(EndpointEngine):
    """Collects requests, and sends them as a batch when no new ones come."""

    client_class = BatchClient
    client: BatchClient

    def __init__(
        self,
        model: ModelConfig,
        decoding: DecodingConfig,
        sizes: EngineConfig,
        tokenizer: PreTrainedTokenizerFast,
        fingerprint: str,
    ) -> None:
        """Make the engine.

        Args:
            model: The section `model`, with the server as `endpoint`.
            decoding: The section `decoding`.
            sizes: The section `engine`.
            tokenizer: The tokenizer of the prompts, made by `byte_tokenizer`.
            fingerprint: That of the run, by which its batches are found at the server.

        Raises:
            ConfigError: If the server cannot be used from this machine.
        """
        super().__init__(model, decoding, sizes, tokenizer)
        self._run = fingerprint
        # Requests that are in no batch yet.
        self._collected: Requests = {}
        # Requests whose answers are awaited, by the id of their batch.
        self._sent: dict[str, Requests] = {}
        # The custom_ids of each batch whose file was read, by the id of the batch.
        self._contents: dict[str, set[str]] = {}
        # Times on the monotonic clock: of the last submission, of the next look at the batches,
        # and since when a batch cannot be read.
        self._submitted = 0.0
        self._next_look = 0.0
        self._unreachable_since: dict[str, float] = {}
        self._look_seconds = _MIN_LOOK_SECONDS

    @property
    def pending(self) -> int:
        count = 0
        for requests in (self._collected, *self._sent.values()):
            count += sum(map(len, requests.values()))
        return count

    def submit(self, program: Program[Any], *, tag: Any, sampling: Any, seed: int) -> None:
        """Collect the prompt of a program for the next batch."""
        feed = next(program)
        program.close()
        messages, beginning = messages_of(self.tokenizer, list(feed.tokens))
        body = self._request_body(messages, feed.pattern, seed)
        # Without sampling the seed does not change the answer.
        draw = seed if self.decoding.sampling.temperature > 0 else 0
        digest = hashlib.sha256(json.dumps([body, draw], sort_keys=True).encode()).hexdigest()
        self._collected.setdefault(digest, []).append(BatchRequest(tag, body, beginning))
        self._submitted = time.monotonic()

    def close(self) -> None:
        """Close the connections.

        Batches that were sent continue at the server; a later engine of the same run finds them.
        """
        super().close()
        self._collected.clear()
        self._sent.clear()

    def step(self) -> list[Finished]:
        """Send a batch if it is time, and return the answers of batches that have ended."""
        finished: list[Finished] = []
        # A step that may not wait is one of a cascade whose other model is computing.
        quiet_seconds = _QUIET_SECONDS if self.patience else _MAX_LOOK_SECONDS
        if self._collected and time.monotonic() - self._submitted >= quiet_seconds:
            finished += self._send()
        time.sleep(self.patience or 0.0)
        if time.monotonic() >= self._next_look:
            for name in list(self._sent):
                finished += self._answers(name)
            self._next_look = time.monotonic() + self._look_seconds
            self._look_seconds = min(2 * self._look_seconds, _MAX_LOOK_SECONDS)
        return finished

    def _send(self) -> list[Finished]:
        """Assign the collected requests to earlier batches that have them, and to new ones.

        Returns:
            The requests that could not be sent, as errors.
        """
        try:
            for name, contents in self._earlier_batches():
                for digest in contents & self._collected.keys():
                    group = self._collected.pop(digest)
                    self._sent.setdefault(name, {}).setdefault(digest, []).extend(group)
            while self._collected:
                self._send_batch()
        except _ERRORS as error:
            shown = self._readable(error)
            failed = [request for group in self._collected.values() for request in group]
            self._collected = {}
            return [Finished(request.tag, None, shown, TokenCounts()) for request in failed]
        self._next_look = 0.0
        self._look_seconds = _MIN_LOOK_SECONDS
        return []

    def _send_batch(self) -> None:
        """Make a batch of as many collected requests as a batch may have."""
        requests: Requests = {}
        lines = bytearray()
        for digest, group in self._collected.items():
            request = {
                "custom_id": digest,
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": group[0].body,
            }
            line = json.dumps(request).encode() + b"\n"
            is_full = len(requests) == MOST_REQUESTS or len(lines) + len(line) > _MAX_BATCH_BYTES
            if requests and is_full:
                break
            requests[digest] = group
            lines += line
        name = self.client.create_batch(lines, self._run, self._max_bytes)
        _log.info("batch %s: %d requests", name, len(requests))
        self._sent[name] = requests
        self._contents[name] = set(requests)
        for digest in requests:
            del self._collected[digest]

    def _earlier_batches(self) -> list[tuple[str, set[str]]]:
        """Return this run's batches of the last day that may still answer.

        Returns:
            The id of each batch, and the custom_ids of its requests.
        """
        earlier = []
        for batch in list(self.client.recent_batches(self._max_bytes)):
            if (batch.get("metadata") or {}).get("raypd") != self._run:
                continue
            name = batch["id"]
            if name not in self._contents:
                if batch["status"] == "cancelling":
                    continue
                self._contents[name] = self._batch_contents(batch)
            earlier.append((name, self._contents[name]))
        return earlier

    def _batch_contents(self, batch: dict[str, Any]) -> set[str]:
        """Return the custom_ids of the requests that a batch has answered or may still answer."""
        if batch["status"] not in _ENDED:
            return {line["custom_id"] for line in self.client.lines(batch.get("input_file_id"))}
        # A refused or withheld answer counts as a failure, so that --retry-errors requests it
        # again, as it does what an ended batch failed to answer.
        lines = self.client.lines(batch.get("output_file_id"))
        return {line["custom_id"] for line in lines if _has_answer(line)}

    def _answers(self, name: str) -> list[Finished]:
        """Return the answers of a batch, once it has ended."""
        answers: dict[Any, dict[str, Any]] = {}
        try:
            batch = self.client.batch(name, self._max_bytes)
            status = batch.get("status")
            if status not in _ENDED:
                return []
            answers = self._answer_lines(batch)
            missing: Exception = RuntimeError(
                f"{self.client.base_url}/batches: batch {name} is {status}, without an answer to "
                "this request"
            )
        except Unreachable as error:
            _log.warning("batch %s: %s", name, error)
            now = time.monotonic()
            since = self._unreachable_since.setdefault(name, now)
            # The batch continues during an outage of the server.
            if now - since < BATCH_SECONDS:
                return []
            missing = error
        except _ERRORS as error:
            missing = self._readable(error)
        return self._finish_batch(name, answers, missing)

    def _answer_lines(self, batch: dict[str, Any]) -> dict[Any, dict[str, Any]]:
        """Return the lines of an ended batch's files of answers and errors, by custom_id."""
        lines: dict[Any, dict[str, Any]] = {}
        for key in ("output_file_id", "error_file_id"):
            for line in self.client.lines(batch.get(key)):
                lines[line.get("custom_id")] = line
        return lines

    def _finish_batch(
        self, name: str, answers: dict[Any, dict[str, Any]], missing: Exception
    ) -> list[Finished]:
        """Return the results of a batch's requests.

        Args:
            name: The id of the batch.
            answers: The lines of its files, by custom_id.
            missing: The error of a request without a line.
        """
        finished = []
        for digest, group in self._sent.pop(name).items():
            answer = answers.get(digest)
            if answer is None:
                results = [Finished(request.tag, None, missing, TokenCounts()) for request in group]
            else:
                results = [self._finished(request, answer) for request in group]
            # The server was sent the request once, and bills it once.
            for position in range(1, len(results)):
                results[position] = replace(results[position], counts=TokenCounts())
            finished += results
            if results[0].error is not None:
                # The request may be sent again.
                self._contents[name].discard(digest)
        return finished

    def _finished(self, request: BatchRequest, answer: dict[str, Any]) -> Finished:
        """Return the result of a request from the line that answers it."""
        try:
            reply = answer.get("response") or {}
            if _status(answer) != 200:
                message = json.dumps(answer.get("error") or reply.get("body"))
                shown = self.client.without_key(message)[:300]
                raise RuntimeError(f"{self.client.base_url}/batches: {shown}")
            completion = reply.get("body") or {}
            continuation, counts = self._read_answer(completion, request.body, request.beginning)
        except _FORM_ERRORS:
            url = f"{self.client.base_url}/batches"
            error: Exception = self.client.unexpected(json.dumps(answer), url)
            return Finished(request.tag, None, error, TokenCounts())
        except RuntimeError as failure:
            return Finished(request.tag, None, failure, paid_counts(failure))
        return Finished(request.tag, continuation, None, counts)

    def _readable(self, error: Exception) -> Exception:
        """Return an error that shows what the server answered last, if its form was the cause."""
        if not isinstance(error, _FORM_ERRORS):
            return error
        return self.client.unexpected(self.client.last_text, self.client.last_url)


def _status(line: dict[str, Any]) -> Any:
    return (line.get("response") or {}).get("status_code")


def _has_answer(line: dict[str, Any]) -> bool:
    """Return whether a line of a batch's answers holds an answer."""
    return _status(line) == 200 and is_answered(line["response"].get("body"))
