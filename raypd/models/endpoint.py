"""`model.endpoint`: a server with an OpenAI-compatible API answers in place of weights.

The engine turns the ids of a prompt into messages, sends them, and turns the answer into ids.
"""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
from requests.exceptions import RequestException
from transformers import PreTrainedTokenizerFast

from raypd.config import DecodingConfig, EndpointConfig, EngineConfig, ModelConfig, redact
from raypd.decoding import Continuation, Finished, Program, TokenCounts
from raypd.errors import ConfigError
from raypd.models.byte_prompt import messages_of
from raypd.models.chat_completion import (
    NoAnswer,
    answer_bounds,
    byte_logprobs,
    hidden_reasoning,
    is_complete,
    max_answer_tokens,
    message_text,
    missing_answer,
    paid_counts,
)
from raypd.models.endpoint_client import EndpointClient
from raypd.models.timed_http import TimedAdapter

# Requests in flight if engine.max_num_seqs is auto.
_REQUESTS_IN_FLIGHT = 64
# Bytes that the answer to a prompt may have, and more for each token that it may have. A token
# with its log probability takes about 64 bytes of JSON.
_ANSWER_BYTES = 1 << 20
_ANSWER_BYTES_PER_TOKEN = 64
# Tokens of a chat template that a server may count on top of the bytes of a prompt.
_TEMPLATE_TOKENS = 4096
# A key of fewer characters may occur in an answer by chance, so it is not taken out there.
_MIN_SECRET_IN_ANSWER = 16
# Seconds that the check before a run waits for the server.
_CHECK_TIMEOUT = 5


def check_endpoint(endpoint: EndpointConfig, method: str) -> None:
    """Check what can be known before a prompt is sent.

    A server that cannot be reached from this machine passes, because workers may reach it.

    Args:
        endpoint: The section `model.endpoint`.
        method: The decoding method.

    Raises:
        ConfigError: If the decoding method needs weights, the key is not set, or the server
            redirects or has no batch API.
    """
    if method != "autoregressive":
        raise ConfigError(
            f"decoding.method {method}: a server behind model.endpoint decodes "
            "its own way; set method: autoregressive"
        )
    if endpoint.key_variable is not None and not os.environ.get(endpoint.key_variable):
        raise ConfigError(
            "model.endpoint.key_variable: the environment variable "
            f"{endpoint.key_variable} holds no key; set it (on a cluster in the job's runtime "
            "environment), or set model.endpoint.key_variable to null if the server needs no key"
        )
    paths = ["chat/completions"]
    if endpoint.batch:
        paths = ["batches", "files"]
    for path in paths:
        with contextlib.suppress(RequestException):
            _check_path(endpoint, path)


def _check_path(endpoint: EndpointConfig, path: str) -> None:
    """Send a request without content, which costs nothing and contains no document."""
    url = f"{endpoint.url.rstrip('/')}/{path}"
    with requests.Session() as session:
        session.mount(f"{urlsplit(url).scheme}://", TimedAdapter())
        options: dict[str, Any] = {
            "timeout": _CHECK_TIMEOUT,
            "allow_redirects": False,
            "stream": True,
        }
        if endpoint.batch:
            reply = session.get(url, **options)
        else:
            reply = session.post(url, json={}, **options)
        if reply.is_redirect:
            target = redact(urljoin(url, reply.headers["location"]))[:200]
            raise ConfigError(
                f"model.endpoint.url: {url} redirects to {target}; documents are not sent there: "
                "set the URL that answers without a redirect"
            )
        if endpoint.batch and reply.status_code == 404:
            raise ConfigError(
                f"model.endpoint.batch: {endpoint.url} has no batch API (/{path}); set "
                "model.endpoint.batch to false"
            )


class EndpointEngine:
    """Sends prompts to the server, `engine.max_num_seqs` at a time.

    Attributes:
        client: Sends the requests.
    """

    # Makes the client; the engine of batches has another one.
    client_class: type[EndpointClient] = EndpointClient
    # Decoding happens at the server.
    sequences: Sequence[Any] = ()

    def __init__(
        self,
        model: ModelConfig,
        decoding: DecodingConfig,
        sizes: EngineConfig,
        tokenizer: PreTrainedTokenizerFast,
    ) -> None:
        """Make the engine.

        Args:
            model: The section `model`, with the server as `endpoint`.
            decoding: The section `decoding`.
            sizes: The section `engine`.
            tokenizer: The tokenizer of the prompts, made by `byte_tokenizer`.

        Raises:
            ConfigError: If the server cannot be used from this machine.
        """
        endpoint = model.endpoint
        assert endpoint is not None
        # The driver has checked its own machine, and a worker may be on another one.
        check_endpoint(endpoint, decoding.method)
        self.model_name = model.name
        self.decoding = decoding
        self.endpoint = endpoint
        self.tokenizer = tokenizer
        self.patience: float | None = 1.0
        in_flight = sizes.max_num_seqs
        if in_flight == "auto":
            in_flight = _REQUESTS_IN_FLIGHT
        self.client = self.client_class(endpoint, decoding.max_new_tokens, in_flight)
        self._pool = ThreadPoolExecutor(in_flight)
        self._running: dict[Future[tuple[Continuation, TokenCounts]], Any] = {}
        answer_tokens = max_answer_tokens(self._request_body([], None, 0))
        self._max_bytes = _ANSWER_BYTES + _ANSWER_BYTES_PER_TOKEN * answer_tokens

    @property
    def waiting(self) -> str:
        return self.client.waiting

    @property
    def pending(self) -> int:
        return len(self._running)

    def submit(self, program: Program[Any], *, tag: Any, sampling: Any, seed: int) -> None:
        """Send the server the prompt of a program that would write its answer token by token."""
        feed = next(program)
        program.close()
        future = self._pool.submit(self._request, list(feed.tokens), feed.pattern, seed)
        self._running[future] = tag

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
        """Close the connections and abandon requests in flight."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._running.clear()
        self.client.close()

    def _request(
        self, prompt: list[int], schema: Any, seed: int
    ) -> tuple[Continuation, TokenCounts]:
        messages, beginning = messages_of(self.tokenizer, prompt)
        body = self._request_body(messages, schema, seed)
        completion = self.client.reply(self.client.chat_url, self._max_bytes, json=body)
        return self._read_answer(completion, body, beginning)

    def _request_body(
        self, messages: list[dict[str, str]], schema: Any, seed: int
    ) -> dict[str, Any]:
        """Return the body of a request. Parameters that are null are left out.

        Args:
            messages: The prompt.
            schema: A JSON Schema that the answer must be valid under; other patterns are for
                engines that decode here, and are ignored.
            seed: Determines the answer if the server samples.
        """
        sampling = self.decoding.sampling
        body: dict[str, Any] = {
            "model": self.model_name,
            "messages": messages,
            "max_completion_tokens": self.decoding.max_new_tokens,
            "temperature": sampling.temperature,
        }
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.temperature > 0:
            body["seed"] = seed % 2**31
        if self.endpoint.logprobs:
            body["logprobs"] = True
        if isinstance(schema, Mapping):
            form = {"name": "record", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        body.update(self.endpoint.parameters)
        return {name: value for name, value in body.items() if value is not None}

    def _read_answer(
        self, completion: Any, body: Mapping[str, Any], beginning: str
    ) -> tuple[Continuation, TokenCounts]:
        """Return the answer of a chat completion and the tokens that it took.

        Args:
            completion: What the server answered.
            body: The body of the request.
            beginning: The beginning of the answer, which the prompt gave.

        Raises:
            NoAnswer: If it is a refusal, a tool call or reasoning alone, or if the server withheld
                it or broke it off.
            RuntimeError: If it is not a chat completion.
        """
        limit = max_answer_tokens(body)
        try:
            choice = completion["choices"][0]
            message = choice["message"]
            text = self.client.without_key(message_text(message), _MIN_SECRET_IN_ANSWER)
            reason = missing_answer(choice, text, limit)
            if reason is None and "content" not in message:
                raise KeyError("content")
        except (LookupError, TypeError, AttributeError):
            raise self.client.unexpected(json.dumps(completion), self.client.chat_url) from None
        usage = completion.get("usage")
        counts = self._token_counts(usage or {}, body)
        if reason is None:
            reason = hidden_reasoning(usage, text)
        if reason is not None:
            raise NoAnswer(self.client.one_line(reason), counts)
        return self._continuation(choice, text, beginning), counts

    def _continuation(self, choice: Mapping[str, Any], text: str, beginning: str) -> Continuation:
        begin, end = answer_bounds(text, beginning)
        encoded = self.tokenizer(
            text[begin:end], add_special_tokens=False, split_special_tokens=True
        )
        tokens = list(encoded["input_ids"])
        logprobs = byte_logprobs(choice.get("logprobs"), text)
        if logprobs:
            # A token of the answer is a byte.
            first_byte = len(text[:begin].encode())
            logprobs = logprobs[first_byte : first_byte + len(tokens)]
        if not is_complete(choice):
            return Continuation(tokens, logprobs, False)
        # The end token gets the probability of the token before it, because servers give none.
        return Continuation(
            [*tokens, self.tokenizer.eos_token_id], [*logprobs, *logprobs[-1:]], True
        )

    def _token_counts(self, usage: Any, body: Mapping[str, Any]) -> TokenCounts:
        """Return the tokens that the bill counts.

        Args:
            usage: What the server wrote under `usage`.
            body: The body of the request.

        Raises:
            RuntimeError: If the numbers cannot be true of the request.
        """
        client = self.client
        try:
            details = usage.get("prompt_tokens_details") or {}
            cached = int(details.get("cached_tokens") or 0)
            prompt = int(usage.get("prompt_tokens") or 0)
            answer = int(usage.get("completion_tokens") or 0)
        except (TypeError, ValueError, AttributeError, OverflowError):
            raise client.unexpected(json.dumps(usage), client.chat_url) from None
        # A token has at least one byte, so the bytes of the request bound its tokens.
        max_prompt = len(json.dumps(body)) + _TEMPLATE_TOKENS
        max_answer = max_answer_tokens(body)
        is_possible = 0 <= cached <= prompt <= max_prompt and 0 <= answer <= max_answer
        if not is_possible:
            raise client.failure(
                f"{client.chat_url}: the answer's usage says that {prompt:,} tokens were read "
                f"({cached:,} of them cached) and {answer:,} written, but the request has at most "
                f"{max_prompt:,} tokens and allows {max_answer:,} to be written"
            )
        client.count_answer(prompt + answer)
        return TokenCounts(prompt - cached, cached, answer, 1)
