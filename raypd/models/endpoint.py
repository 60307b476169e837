"""`model.endpoint`: a server with an OpenAI-compatible API answers in place of weights.

A tokenizer of bytes, with a token for each role, turns messages into ids as with weights; the
engine turns them back.
"""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
from requests.exceptions import ReadTimeout, RequestException
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from urllib3.exceptions import HTTPError, ReadTimeoutError

from raypd.config import HIDDEN, RunConfig, redact
from raypd.decoding import Continuation, Finished, Program, TokenCounts
from raypd.errors import ConfigError
from raypd.models.reasoning import answer_range
from raypd.models.timed_http import TimedAdapter

# Bytes of a prompt and its answer; what the server cannot take it refuses, for that document alone.
CONTEXT = 400_000
_ROLES = ("system", "user", "assistant")
_END = "<|end|>"
_AGAIN = (408, 429, 500, 502, 503, 504)
# What servers say of a prompt that is too long for the model.
_CONTEXT_ERROR = re.compile(r"context[_ ]length|context[_ ]window|max_model_len", re.IGNORECASE)
_REFUSED = (400, 401, 403, 404, 413, 422)  # a prompt, a key or a name; no pause helps
_AT_ONCE = 64  # requests, where engine.max_num_seqs is auto
_CHUNK = 1 << 14  # bytes that are read at a time
_BYTES, _BYTES_A_TOKEN = 1 << 20, 64  # of an answer, and for each token that it may have
_BYTES_OF_TEXT = 4  # for each token, about
_TEMPLATE_TOKENS = 4096  # that a server may count for a prompt over its bytes
_LONGEST_WAIT = 600.0  # seconds that a server may ask to wait
_IN_A_ROW = 20  # requests that failed, after which all wait
_PAUSE = 30.0  # seconds of that, doubled while requests fail, up to _LONGEST_WAIT
# Values of finish_reason, as servers of several makers write them: the answer is complete; ...
_COMPLETE = {"stop", "eos", "eos_token", "end_turn", "stop_sequence", "complete", "completed"}
# ... the limit of tokens cut it; ...
_CUT = {"length", "max_tokens", "max_output_tokens", "model_length", "max_length"}
# ... a filter withheld it; ...
_WITHHELD = re.compile(
    "filter|safety|sensitive|recitation|prohibited|blocklist|blocked|spii|refus|moderation",
    re.IGNORECASE,
)
# ... the model called a tool; ...
_CALLED = re.compile("tool|function", re.IGNORECASE)
# ... or the server gave up.
_BROKEN_OFF = re.compile("error|abort|cancel|insufficient|repetition|timeout", re.IGNORECASE)
# Keys of a message in which servers hand over the reasoning apart from the answer.
_REASONING_KEYS = ("reasoning_content", "reasoning", "reasoning_details", "thinking")


class NoAnswer(RuntimeError):
    """A chat completion came and is paid, but holds no answer.

    Attributes:
        counts: The tokens that the server bills for it.
    """

    def __init__(self, reason: str, counts: TokenCounts) -> None:
        super().__init__(reason)
        self.counts = counts


class Unreachable(RuntimeError):
    """The server does not answer, or refuses for now, for as long as is tried."""


def check_endpoint(config: RunConfig) -> None:
    """Raises ConfigError for what can be known before a request is made."""
    endpoint = config.model.endpoint
    assert endpoint is not None
    if config.decoding.method != "autoregressive":
        method = f"decoding.method {config.decoding.method}"
        raise ConfigError(
            f"{method}: a server behind model.endpoint decodes its own way; set method: "
            "autoregressive"
        )
    if endpoint.key_variable is not None and not os.environ.get(endpoint.key_variable):
        raise ConfigError(
            "model.endpoint.key_variable: the environment variable "
            f"{endpoint.key_variable} holds no key; set it "
            "(on a cluster in the job's runtime environment), or set the key to null for a "
            "server without one"
        )
    how: dict[str, Any] = {"timeout": 5, "allow_redirects": False, "stream": True}
    for path in ("batches", "files") if endpoint.batch else ("chat/completions",):
        url = f"{endpoint.url.rstrip('/')}/{path}"
        # What cannot be reached from here may be from a worker. An empty request costs nothing, and
        # holds no document.
        with contextlib.suppress(RequestException), requests.Session() as session:
            session.mount(f"{urlsplit(url).scheme}://", TimedAdapter())
            reply = session.get(url, **how) if endpoint.batch else session.post(url, json={}, **how)
            if reply.is_redirect:
                moved = (
                    f"{url} redirects to {redact(urljoin(url, reply.headers['location']))[:200]}"
                )
                raise ConfigError(
                    f"model.endpoint.url: {moved}; documents are not sent there: set the right URL"
                )
            if endpoint.batch and reply.status_code == 404:
                raise ConfigError(
                    f"model.endpoint.batch: {endpoint.url} has no batch API (/{path}); set it "
                    "to false"
                )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are bytes; then come a token for the beginning of each role's message, and one
    for the end.
    """
    backend = Tokenizer(
        models.BPE(vocab={letter: byte for byte, letter in bytes_to_unicode().items()}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    marks = [f"<|{role}|>" for role in _ROLES]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=_END,
        extra_special_tokens=dict(zip(_ROLES, marks, strict=True)),
    )
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '"
        + _END
        + "' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    return tokenizer


class EndpointEngine:
    """Sends prompts to the server: `engine.max_num_seqs` at a time, so many a minute as the
    configuration allows.
    """

    sequences: Sequence[Any] = ()

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerFast) -> None:
        assert config.model.endpoint is not None
        self.config = config
        self.endpoint = config.model.endpoint
        self.tokenizer = tokenizer
        self._end = tokenizer.eos_token_id
        self._roles = {tokenizer.convert_tokens_to_ids(f"<|{role}|>"): role for role in _ROLES}
        self._running: dict[Future[tuple[Continuation, TokenCounts]], Any] = {}
        at_once = _AT_ONCE if config.engine.max_num_seqs == "auto" else config.engine.max_num_seqs
        self._pool = ThreadPoolExecutor(at_once)
        # When the next request may be sent (monotonic)
        self._lock = threading.Lock()
        self._next = 0.0
        self._failed_in_a_row = 0
        self._answers = self._tokens = 0
        self.patience: float | None = 1.0
        self.waiting = ""
        self._session = requests.Session()
        self._session.mount(
            f"{urlsplit(self.endpoint.url).scheme}://", TimedAdapter(pool_maxsize=at_once)
        )
        check_endpoint(config)  # on this machine, too
        self._base = self.endpoint.url.rstrip("/")
        self._url = f"{self._base}/chat/completions"
        # Of an answer.
        self._most_bytes = _BYTES + _BYTES_A_TOKEN * _most_written(self._body([], None, 0))
        if self.endpoint.key_variable is not None:
            self._key = os.environ[self.endpoint.key_variable]
        else:
            self._key = ""
        if self._key:
            self._session.headers["Authorization"] = f"Bearer {self._key}"

    @property
    def pending(self) -> int:
        return len(self._running)

    def submit(self, program: Program[Any], *, tag: Any, sampling: Any, seed: int) -> None:
        """Sends the server the prompt of a program that would write its answer token by token."""
        feed = next(program)
        program.close()
        self._running[self._pool.submit(self._ask, list(feed.tokens), feed.pattern, seed)] = tag

    def step(self) -> list[Finished]:
        """Return the answers that have arrived after at most `patience` seconds."""
        done, _ = wait(self._running, self.patience, FIRST_COMPLETED)
        finished = []
        for future in done:
            tag = self._running.pop(future)
            error = future.exception()
            if isinstance(error, Exception):
                finished.append(Finished(tag, None, error, paid_counts(error)))
            else:
                answer, counts = future.result()
                finished.append(Finished(tag, answer, None, counts))
        return finished

    def close(self) -> None:
        """End the connections. Requests that are under way are abandoned."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._running.clear()
        self._session.close()

    def _ask(self, prompt: list[int], schema: Any, seed: int) -> tuple[Continuation, TokenCounts]:
        messages, begun = self._messages(prompt)
        body = self._body(messages, schema, seed)
        return self._answer(self._reply(self._url, self._most_bytes, json=body), body, begun)

    def _answer(
        self, tree: Any, body: Mapping[str, Any], begun: str
    ) -> tuple[Continuation, TokenCounts]:
        """Returns the answer of a chat completion and the tokens that it took.

        Raises:
            NoAnswer: It is a refusal, a tool call, reasoning alone, or was withheld or broken off.
            RuntimeError: It is no chat completion.
        """
        try:
            choice = tree["choices"][0]
            message = choice["message"]
            written = self._shown(_text_of(message), 16)
            reason = _missing_answer(choice, written, _most_written(body))
            if reason is None and "content" not in message:
                raise KeyError("content")
        except (LookupError, TypeError, AttributeError):
            raise self._unexpected(json.dumps(tree), self._url) from None
        counts = self._counts(tree.get("usage") or {}, body)
        if reason is None:
            reason = _hidden_reasoning(tree.get("usage"), written)
        if reason is not None:
            raise NoAnswer(" ".join(redact(self._shown(reason)).split()), counts)
        begin, end = _answer_within(written, begun)
        text = written[begin:end]
        stopped = _finish_reason(choice) in _COMPLETE
        ids = [
            *self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        ]
        logprobs = _byte_logprobs(choice.get("logprobs"), written)
        if logprobs:
            first_byte = len(written[:begin].encode())
            logprobs = logprobs[first_byte : first_byte + len(ids)]
        if stopped:
            return Continuation([*ids, self._end], [*logprobs, *logprobs[-1:]], stopped), counts
        return Continuation(ids, logprobs, stopped), counts

    def _body(self, messages: list[dict[str, str]], schema: Any, seed: int) -> dict[str, Any]:
        """What is sent; a parameter that is null is left out."""
        sampling = self.config.decoding.sampling
        body: dict[str, Any] = {
            "model": self.config.model.name,
            "messages": messages,
            "max_completion_tokens": self.config.decoding.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.top_p < 1 else None,
            "seed": seed % 2**31 if sampling.temperature > 0 else None,
            "logprobs": self.endpoint.logprobs or None,
        }
        if isinstance(schema, Mapping):
            form = {"name": "record", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return {
            name: value
            for name, value in {**body, **self.endpoint.parameters}.items()
            if value is not None
        }

    def _counts(self, usage: Any, body: Mapping[str, Any]) -> TokenCounts:
        """The tokens that the bill counts.

        Raises RuntimeError for numbers that cannot be true of the request.
        """
        try:
            shared = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
            prompt = int(usage.get("prompt_tokens") or 0)
            answer = int(usage.get("completion_tokens") or 0)
        except (TypeError, ValueError, AttributeError, OverflowError):
            raise self._unexpected(json.dumps(usage), self._url) from None
        most = len(json.dumps(body)) + _TEMPLATE_TOKENS, _most_written(body)
        if not (0 <= shared <= prompt <= most[0] and 0 <= answer <= most[1]):
            raise self._failure(
                f"{self._url}: its usage says {prompt:,} tokens read ({shared:,} cached) "
                f"and {answer:,} written; at "
                f"most {most[0]:,} were sent and {most[1]:,} asked for"
            )
        with self._lock:
            self._answers = self._answers + 1
            self._tokens = self._tokens + prompt + answer
            self._failed_in_a_row = 0
            self.waiting = ""
        return TokenCounts(prompt - shared, shared, answer, 1)

    def _reply(self, url: str, most: int, **request: Any) -> dict[str, Any]:
        """The object that the server answers; what is refused for now is tried again.

        Raises RuntimeError.
        """
        data = self._data(url, most, **request)
        try:
            tree = json.loads(data)
        except (ValueError, RecursionError):
            tree = None
        if not isinstance(tree, dict):
            raise self._unexpected(data.decode(errors="replace"), url)
        return tree

    def _data(self, url: str, most: int, **request: Any) -> bytearray:
        for attempt in range(self.endpoint.retries + 1):
            self._wait_for_turn(request.get("json") if url == self._url else None)
            wait = min(2.0**attempt, _LONGEST_WAIT)
            try:
                status, headers, data = self._request(url, most, **request)
            except (ReadTimeout, ReadTimeoutError):
                reason = (
                    f"{url}: no whole answer in model.endpoint.timeout_seconds: "
                    f"{self.endpoint.timeout_seconds:g}"
                )
            except (RequestException, HTTPError) as error:
                reason = self._shown(f"{url}: {error}")
            else:
                if status == 200:
                    return data
                words = " ".join(redact(self._shown(data.decode(errors="replace"))[:2000]).split())
                reason = f"{url}: {status}: {words[:300]}"
                if 300 <= status < 400:
                    where = self._shown(headers.get("location", ""))[:200]
                    reason = f"{url}: {status}: redirects to {where}; documents are not sent there"
                if _CONTEXT_ERROR.search(words):
                    # raypd does not know the context of a server, and counts bytes there.
                    reason += (
                        "; task.max_document_tokens (bytes, of a server) with task.long_documents: "
                        "split sends long documents in parts"
                    )
                if status not in _AGAIN:
                    raise RuntimeError(reason) if status in _REFUSED else self._failure(reason)
                with contextlib.suppress(ValueError, OverflowError):
                    said = headers.get("retry-after", "0")  # seconds, or a date
                    if said[:1].isdigit():
                        asked = float(said)
                    else:
                        asked = parsedate_to_datetime(said).timestamp() - time.time()
                    wait = max(wait, asked)
                if wait > _LONGEST_WAIT:
                    raise self._failure(f"{reason} (it asks to wait {wait:,.0f} s)")
            self._failure(reason)
            if attempt < self.endpoint.retries:
                if wait >= _PAUSE:
                    self.waiting = f"{reason}: waiting {wait:.0f} s"
                time.sleep(wait)
        raise Unreachable(reason)

    def _request(
        self, url: str, most: int, **request: Any
    ) -> tuple[int, Mapping[str, str], bytearray]:
        """(status, headers, body) of a request, a GET where it has no body.

        Raises RuntimeError: it has no end.
        """
        how = {
            "timeout": self.endpoint.timeout_seconds,
            "stream": True,
            "allow_redirects": False,
            **request,
        }
        with self._session.request("POST" if request else "GET", url, **how) as reply:
            data = bytearray()
            while chunk := reply.raw.read1(_CHUNK, decode_content=True):
                data += chunk
                if len(data) > most:
                    raise self._failure(f"{url}: the answer has more than {most:,} bytes")
            return reply.status_code, reply.headers, data

    def _failure(self, reason: str) -> RuntimeError:
        """An error of the server.

        After many in a row all requests wait, longer each time, so that it can come back.
        """
        with self._lock:
            self._failed_in_a_row += 1
            rounds, rest = divmod(self._failed_in_a_row, _IN_A_ROW)
            if rest == 0:
                pause = min(_PAUSE * 2 ** (rounds - 1), _LONGEST_WAIT)
                self._next = max(self._next, time.monotonic() + pause)
                self.waiting = (
                    f"{self._failed_in_a_row} requests failed in a row: no more for "
                    f"{pause:.0f} s: {reason}"
                )
        return RuntimeError(reason)

    def _unexpected(self, text: str, url: str) -> RuntimeError:
        words = " ".join(redact(self._shown(text)[:2000]).split())
        expected = "a chat completion" if url == self._url else "an answer of the batch API"
        return self._failure(f"{url}: expected {expected}, found {words[:200]}")

    def _shown(self, text: str, least: int = 8) -> str:
        """What the server says, without the key that it was sent. least: characters of a key that
        is a secret.
        """
        return str(text.replace(self._key, HIDDEN) if len(self._key) >= least else text)

    def _messages(self, prompt: list[int]) -> tuple[list[dict[str, str]], str]:
        """(messages of the ids, the beginning of the answer behind them)."""
        messages: list[dict[str, str]] = []
        role = "user"
        begin = 0
        for place, id in enumerate(prompt):
            if id == self._end:
                messages.append(
                    {"role": role, "content": self.tokenizer.decode(prompt[begin:place])}
                )
            if id == self._end or id in self._roles:
                role = self._roles.get(id, role)
                begin = place + 1
        return messages, self.tokenizer.decode(prompt[begin:])

    def _wait_for_turn(self, body: Mapping[str, Any] | None) -> None:
        """body: of a request to the model."""
        requests = self.endpoint.requests_per_minute
        tokens = self.endpoint.tokens_per_minute
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._next)
            minutes = [1 / requests if requests is not None else 0.0]
            if tokens is not None and body is not None:
                mean = self._tokens / self._answers if self._answers else 0.0
                # Until an answer tells, as vendors count: of the text, and all that may be written.
                if not mean:
                    mean = (
                        len(json.dumps(body)) / _BYTES_OF_TEXT + self.config.decoding.max_new_tokens
                    )
                minutes.append(mean / tokens)
            self._next = turn + 60.0 * max(minutes)
        time.sleep(max(0.0, turn - now))


def paid_counts(error: BaseException | None) -> TokenCounts:
    """Returns the tokens that the server bills although a request failed."""
    if isinstance(error, NoAnswer):
        return error.counts
    return TokenCounts()


def is_answered(completion: Any) -> bool:
    """Returns whether a chat completion holds an answer, so that it need not be asked again."""
    try:
        choice = completion["choices"][0]
        written = _text_of(choice["message"])
        reason = _missing_answer(choice, written, CONTEXT)
        return reason is None and _hidden_reasoning(completion.get("usage"), written) is None
    except (LookupError, TypeError, AttributeError):
        return False


def _finish_reason(choice: Mapping[str, Any]) -> str:
    return str(choice.get("finish_reason") or "").strip().lower()


def _text_of(message: Mapping[str, Any]) -> str:
    """The text of a message. Some servers write it as parts, the model's reasoning among them."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = [part for part in content if part.get("type", "text") in ("text", "output_text")]
    return "".join(part.get("text", "") for part in texts)


def _refusal(message: Mapping[str, Any]) -> str:
    """What the server marks as a refusal; "" where it marks none."""
    if message.get("refusal"):
        return str(message["refusal"])
    content = message.get("content")
    if not isinstance(content, list):
        return ""
    refused = [part for part in content if part.get("type") == "refusal"]
    return " ".join(str(part.get("refusal") or part.get("text") or "") for part in refused)


def _has_reasoning(message: Mapping[str, Any]) -> bool:
    """Whether the server handed over reasoning apart from the text."""
    if any(message.get(key) for key in _REASONING_KEYS):
        return True
    content = message.get("content")
    if not isinstance(content, list):
        return False
    return any(part.get("type") in ("thinking", "reasoning") for part in content)


def _missing_answer(choice: Mapping[str, Any], text: str, limit: int) -> str | None:
    """Why a choice of a chat completion holds no answer; None where it holds one.

    Args:
        choice: The choice as the server sent it.
        text: The text of its message.
        limit: Tokens that the server was allowed to write.
    """
    message = choice["message"]
    finish = _finish_reason(choice)
    refusal = _refusal(message)
    if refusal:
        return f"the model refused: {refusal[:200]}"
    if _WITHHELD.search(finish):
        return f"the server withheld the answer (finish_reason {finish[:80]})"
    called = message.get("tool_calls") or message.get("function_call")
    if called or _CALLED.search(finish):
        return "the model called a tool and wrote no answer (tool_calls)"
    if _BROKEN_OFF.search(finish):
        details = json.dumps(choice["error"])[:200] if choice.get("error") else "no details"
        return f"the server broke the answer off (finish_reason {finish[:80]}): {details}"
    is_cut = finish in _CUT
    if text.strip():
        if answer_range(text) is not None:
            return None
        return _only_reasoning(is_cut, limit)
    if _has_reasoning(message):
        return _only_reasoning(is_cut, limit)
    if is_cut:
        return f"the model wrote no text within its {limit:,} tokens: raise decoding.max_new_tokens"
    if message.get("content", "") is None:
        return f"the message has no content (finish_reason {finish[:80] or 'null'})"
    return None


def _only_reasoning(is_cut: bool, limit: int) -> str:
    if is_cut:
        return (
            f"reasoning without an answer: its {limit:,} tokens ended before the reasoning did; "
            "raise decoding.max_new_tokens"
        )
    return "reasoning without an answer"


def _hidden_reasoning(usage: Any, text: str) -> str | None:
    """The reason where a server only counts the reasoning, and the text is empty."""
    if text.strip() or not isinstance(usage, Mapping):
        return None
    details = usage.get("completion_tokens_details")
    if isinstance(details, Mapping) and details.get("reasoning_tokens"):
        return "reasoning without an answer"
    return None


def _answer_within(written: str, begun: str) -> tuple[int, int]:
    """Where the answer stands in what the server wrote: behind the reasoning, and behind the
    beginning that the prompt gave it and a server writes again.
    """
    begin, end = answer_range(written) or (0, len(written))
    opening = begun.strip()
    place = written.find(opening, begin, end) if opening else -1
    if place < 0:
        return begin, end
    begin = place + len(opening)
    begin += len(written[begin:end]) - len(written[begin:end].lstrip("\n"))
    return begin, end


def _most_written(body: Mapping[str, Any]) -> int:
    """Tokens that a request lets the server write."""
    limits = (body.get("max_completion_tokens"), body.get("max_tokens"))
    return max((limit for limit in limits if isinstance(limit, int)), default=CONTEXT)


def _byte_logprobs(logprobs: Any, text: str) -> list[float]:
    """For each byte of a text the log probability of its token; [] where the server gives none, or
    of another text.
    """
    try:
        tokens = [
            (bytes(t.get("bytes") or t["token"].encode()), float(t["logprob"]))
            for t in logprobs["content"]
        ]
    except (TypeError, KeyError, ValueError, AttributeError):
        return []
    each = [logprob for data, logprob in tokens for _ in data]
    return each if b"".join(data for data, _ in tokens) == text.encode() else []
