"""Reads chat completions as different servers write them: the answer, or why there is none."""

import json
import re
from collections.abc import Mapping
from typing import Any

from raypd.decoding import TokenCounts
from raypd.models.reasoning import answer_range
from raypd.text import without_halves

# Bytes of a prompt and its answer together, which is the context length of an endpoint's task. It
# is generous: a server that cannot take a prompt refuses that document alone.
ENDPOINT_CONTEXT = 400_000

# Values of finish_reason in completions whose answer is complete.
_COMPLETE = {"stop", "eos", "eos_token", "end_turn", "stop_sequence", "complete", "completed"}
# Values of finish_reason in completions that the limit of tokens cut.
_CUT = {"length", "max_tokens", "max_output_tokens", "model_length", "max_length"}
# What finish_reason contains if a filter withheld the answer.
_WITHHELD = re.compile(
    "filter|safety|sensitive|recitation|prohibited|blocklist|blocked|spii|refus|moderation",
    re.IGNORECASE,
)
# What finish_reason contains if the model called a tool.
_CALLED = re.compile("tool|function", re.IGNORECASE)
# What finish_reason contains if the server gave up.
_BROKEN_OFF = re.compile("error|abort|cancel|insufficient|repetition|timeout", re.IGNORECASE)
# Keys of a message in which servers hand over the reasoning apart from the answer.
_REASONING_KEYS = ("reasoning_content", "reasoning", "reasoning_details", "thinking")
_ONLY_REASONING = "reasoning without an answer"


class NoAnswer(RuntimeError):
    """A chat completion without an answer that the server bills nevertheless.

    Attributes:
        counts: The tokens that the server bills.
    """

    def __init__(self, reason: str, counts: TokenCounts) -> None:
        super().__init__(reason)
        self.counts = counts


def paid_counts(error: BaseException | None) -> TokenCounts:
    """Return the tokens that the server bills although a request failed."""
    if isinstance(error, NoAnswer):
        return error.counts
    return TokenCounts()


def is_answered(completion: Any) -> bool:
    """Return whether a chat completion holds an answer, so that it need not be requested again."""
    try:
        choice = completion["choices"][0]
        text = message_text(choice["message"])
        if missing_answer(choice, text, ENDPOINT_CONTEXT) is not None:
            return False
        return hidden_reasoning(completion.get("usage"), text) is None
    except (LookupError, TypeError, AttributeError):
        return False


def is_complete(choice: Mapping[str, Any]) -> bool:
    """Return whether the model ended the answer of a choice by itself."""
    return _finish_reason(choice) in _COMPLETE


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message.

    Some servers write it as a list of parts, among which may be the model's reasoning.
    """
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return without_halves(content)
    texts = [part for part in content if part.get("type", "text") in ("text", "output_text")]
    return without_halves("".join(part.get("text", "") for part in texts))


def missing_answer(choice: Mapping[str, Any], text: str, limit: int) -> str | None:
    """Return why a choice of a chat completion holds no answer; None if it holds one.

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
        details = "no details"
        if choice.get("error"):
            details = json.dumps(choice["error"])[:200]
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


def hidden_reasoning(usage: Any, text: str) -> str | None:
    """Return the reason for an empty text if the server counted reasoning that it did not show.

    Args:
        usage: What the server wrote under `usage`.
        text: The text of the message.
    """
    if text.strip() or not isinstance(usage, Mapping):
        return None
    details = usage.get("completion_tokens_details")
    if isinstance(details, Mapping) and details.get("reasoning_tokens"):
        return _ONLY_REASONING
    return None


def answer_bounds(text: str, beginning: str) -> tuple[int, int]:
    """Return where the answer begins and ends in the text of a message, in characters.

    Args:
        text: The text of the message.
        beginning: The beginning of the answer that the prompt gave. A server may write it again,
            and then the answer begins after it.
    """
    begin, end = answer_range(text) or (0, len(text))
    repeated = beginning.strip()
    offset = -1
    if repeated:
        offset = text.find(repeated, begin, end)
    if offset < 0:
        return begin, end
    begin = offset + len(repeated)
    answer = text[begin:end]
    line_ends = len(answer) - len(answer.lstrip("\n"))
    return begin + line_ends, end


def max_answer_tokens(body: Mapping[str, Any]) -> int:
    """Return how many tokens a request allows the server to write."""
    limits = (body.get("max_completion_tokens"), body.get("max_tokens"))
    return max((limit for limit in limits if isinstance(limit, int)), default=ENDPOINT_CONTEXT)


def byte_logprobs(logprobs: Any, text: str) -> list[float]:
    """Return for each byte of a text the log probability of its token.

    Args:
        logprobs: What the server wrote under `logprobs`.
        text: The text of the message.

    Returns:
        One number per byte; none if the server gave none, or those of another text.
    """
    written = bytearray()
    logprob_of_byte: list[float] = []
    try:
        for token in logprobs["content"]:
            data = bytes(token.get("bytes") or token["token"].encode())
            logprob = float(token["logprob"])
            written += data
            logprob_of_byte += [logprob] * len(data)
    except (TypeError, KeyError, ValueError, AttributeError):
        return []
    if written != text.encode():
        return []
    return logprob_of_byte


def _finish_reason(choice: Mapping[str, Any]) -> str:
    return str(choice.get("finish_reason") or "").strip().lower()


def _refusal(message: Mapping[str, Any]) -> str:
    """Return what the server marks as a refusal; an empty string if it marks none."""
    if message.get("refusal"):
        return str(message["refusal"])
    content = message.get("content")
    if not isinstance(content, list):
        return ""
    refused = [part for part in content if part.get("type") == "refusal"]
    return " ".join(str(part.get("refusal") or part.get("text") or "") for part in refused)


def _has_reasoning(message: Mapping[str, Any]) -> bool:
    """Return whether the server handed over reasoning apart from the text."""
    if any(message.get(key) for key in _REASONING_KEYS):
        return True
    content = message.get("content")
    if not isinstance(content, list):
        return False
    return any(part.get("type") in ("thinking", "reasoning") for part in content)


def _only_reasoning(is_cut: bool, limit: int) -> str:
    if is_cut:
        return (
            f"{_ONLY_REASONING}: its {limit:,} tokens ended before the reasoning did; "
            "raise decoding.max_new_tokens"
        )
    return _ONLY_REASONING
