"""`model.endpoint`: a server with an OpenAI-compatible API answers in place of weights, such as a teacher.

The tasks make prompts and read answers as with weights: a tokenizer of single bytes, with a token for each role, turns
messages into ids, and the engine here turns them back into messages.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from urllib3.util import Retry

from raypd.config import RunConfig
from raypd.decoding.counts import Finished, TokenCounts
from raypd.decoding.methods.autoregressive import Continuation
from raypd.decoding.program import Program
from raypd.errors import ConfigError

CONTEXT = 400_000  # bytes of a prompt and its answer; what the server cannot take it refuses, for that document alone
_ROLES, _END = ("system", "user", "assistant"), "<|end|>"
_AGAIN = (408, 429, 500, 502, 503, 504)
_WAIT_SECONDS = 1.0
_AT_ONCE = 64  # requests, where engine.max_num_seqs is auto


def check_endpoint(config: RunConfig) -> None:
    """Raises ConfigError for what can be known before a request is made."""
    endpoint = config.model.endpoint
    assert endpoint is not None
    if config.decoding.method != "autoregressive":
        raise ConfigError(
            f"decoding.method {config.decoding.method}: a server behind model.endpoint decodes its own way; "
            "set decoding.method: autoregressive"
        )
    if endpoint.key_variable is not None and not os.environ.get(endpoint.key_variable):
        raise ConfigError(
            f"model.endpoint.key_variable: the environment variable {endpoint.key_variable} holds no key; set it "
            "(on a cluster in the job's runtime environment), or set the key to null for a server without one"
        )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are bytes; then come a token for the beginning of each role's message, and one for the end."""
    letters = bytes_to_unicode()
    backend = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    marks = [f"<|{role}|>" for role in _ROLES]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=_END, extra_special_tokens=dict(zip(_ROLES, marks, strict=True))
    )
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '" + _END + "' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    return tokenizer


class EndpointEngine:
    """Sends prompts to the server: `engine.max_num_seqs` at a time, so many a minute as the configuration allows."""

    sequences: Sequence[Any] = ()

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerFast) -> None:
        assert config.model.endpoint is not None
        self.config, self.endpoint, self.tokenizer = config, config.model.endpoint, tokenizer
        self._end = tokenizer.eos_token_id
        self._roles = {tokenizer.convert_tokens_to_ids(f"<|{role}|>"): role for role in _ROLES}
        self._running: dict[Future[tuple[Continuation, TokenCounts]], Any] = {}
        at_once = _AT_ONCE if config.engine.max_num_seqs == "auto" else config.engine.max_num_seqs
        self._pool = ThreadPoolExecutor(at_once)
        self._lock, self._next = threading.Lock(), 0.0  # when the next request may be sent (monotonic)
        self._session = requests.Session()
        retry = Retry(self.endpoint.retries, status_forcelist=_AGAIN, allowed_methods=None, backoff_factor=1.0)
        adapter = HTTPAdapter(pool_maxsize=at_once, max_retries=retry)
        self._session.mount("http://", adapter)
        self._session.mount("https://", adapter)
        check_endpoint(config)  # on this machine, too
        if self.endpoint.key_variable is not None:
            self._session.headers["Authorization"] = f"Bearer {os.environ[self.endpoint.key_variable]}"

    @property
    def pending(self) -> int:
        return len(self._running)

    def submit(self, program: Program[Any], *, tag: Any, sampling: Any, seed: int) -> None:
        """Sends the server the prompt of a program that would write its answer token by token."""
        prompt = next(program).tokens
        program.close()
        self._running[self._pool.submit(self._ask, list(prompt), seed)] = tag

    def step(self) -> list[Finished]:
        """The answers that have come, after at most a second."""
        done, _ = wait(self._running, _WAIT_SECONDS, FIRST_COMPLETED)
        finished = []
        for future in done:
            tag, error = self._running.pop(future), future.exception()
            if isinstance(error, Exception):
                finished.append(Finished(tag, None, error, TokenCounts()))
            else:
                answer, counts = future.result()
                finished.append(Finished(tag, answer, None, counts))
        return finished

    def _ask(self, prompt: list[int], seed: int) -> tuple[Continuation, TokenCounts]:
        messages, begun = self._messages(prompt)
        sampling = self.config.decoding.sampling
        body: dict[str, Any] = {
            "model": self.config.model.name,
            "messages": messages,
            "max_completion_tokens": self.config.decoding.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.top_p is not None else 1.0,
            "seed": seed % 2**31,
        }
        self._wait_for_turn()
        url = f"{self.endpoint.url.rstrip('/')}/chat/completions"
        answer = self._session.post(url, json=body, timeout=self.endpoint.timeout_seconds)
        if not answer.ok:
            raise RuntimeError(f"{url}: {answer.status_code} {answer.reason}: {answer.text[:300].strip()}")
        tree = answer.json()
        (choice, *_), usage = tree["choices"], tree.get("usage") or {}
        text = choice["message"]["content"] or ""
        if begun and begun.strip() in text:  # the answer's beginning, which the prompt gives; a server writes it again
            text = text.partition(begun.strip())[2].lstrip("\n")
        stopped = choice.get("finish_reason") == "stop"
        ids = [*self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]]
        shared = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        counts = TokenCounts(
            int(usage.get("prompt_tokens") or 0) - shared, shared, int(usage.get("completion_tokens") or 0), 1
        )
        return Continuation([*ids, self._end] if stopped else ids, [], stopped), counts

    def _messages(self, prompt: list[int]) -> tuple[list[dict[str, str]], str]:
        """(messages of the ids, the beginning of the answer behind them)."""
        messages: list[dict[str, str]] = []
        text: list[int] = []
        role, begun = "user", ""
        for id in [*prompt, None]:
            if id in self._roles or id == self._end or id is None:
                content = self.tokenizer.decode(text)
                if id == self._end:
                    messages.append({"role": role, "content": content})
                elif id is None:
                    begun = content
                else:
                    role = self._roles[id]
                text = []
            else:
                text.append(id)
        return messages, begun

    def _wait_for_turn(self) -> None:
        """Spaces requests evenly over the minute."""
        if self.endpoint.requests_per_minute is None:
            return
        with self._lock:
            now = time.monotonic()
            turn = self._next = max(now, self._next + 60.0 / self.endpoint.requests_per_minute)
        time.sleep(max(0.0, turn - now))
