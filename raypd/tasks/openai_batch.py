"""Reads the request in a document of task `generation`.

With `task.openai` the document is a line of an OpenAI API batch file. A parameter that raypd cannot
follow is an error and is never ignored. This module does not import torch, because `model: fake`
works without it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raypd.config import DecodingConfig, GenerationConfig
from raypd.tasks.base import Document
from raypd.tasks.documents import conversation
from raypd.tasks.json_schema import expression

URL = "/v1/chat/completions"
# The beginning of an error record if the prompt does not fit into the context.
TOO_LONG = "too long"
RESPONSE_FORMAT = "response_format"
# The beginning of an error record if the schema cannot be used.
SCHEMA = "response_format.json_schema.schema"
_LINE_KEYS = ("custom_id", "method", "url", "body")
# Parameters that are accepted because they do not change an answer.
_LABELS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# Values with which an unsupported parameter is not in use.
_UNUSED_VALUES = {
    "stream": (False,),
    "logprobs": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
}
# Parts of pydantic's locations that name a member of a union rather than a key of the request.
_UNION_MEMBERS = ("str", "list[_ContentPart]", "list[str]")


class BadRequest(ValueError):
    """A request that cannot be fulfilled, described as in OpenAI's API.

    Attributes:
        param: The wrong parameter, or None.
        code: OpenAI's code for the error, or None.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True)
class AnswerFormat:
    """The required form of the answer to a request.

    Attributes:
        json: Whether the answer must be a JSON object.
        pattern: The regular expression that the answer is restricted to; None: any form.
        schema: The JSON Schema of the expression, as JSON, against which a finished answer is
            checked.
    """

    json: bool = False
    pattern: str | None = None
    schema: str | None = None


@dataclass(frozen=True)
class Parameters:
    """How a request is to be answered.

    Attributes:
        max_new_tokens: The maximum number of tokens of an answer.
        temperature: The sampling temperature; 0 is greedy.
        top_p: The probability mass of the tokens that are sampled from.
        stop: Strings before which the answer ends.
        samples: The number of answers.
        seed: The request's own seed, which then alone determines its draws; None: the run's.
        format: The form of the answer.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    samples: int
    seed: int | None = None
    format: AnswerFormat = AnswerFormat()


@dataclass
class ChatRequest:
    """A conversation and how to continue it.

    Attributes:
        turns: The turns so far (`role`, `content`).
        unanswered: The user's turns to answer.
        parameters: How to answer them.
    """

    turns: list[dict[str, str]]
    unanswered: list[str]
    parameters: Parameters


class _ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: str
    text: str | None = None


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: str | list[_ContentPart]


class _JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    # Every answer is restricted to its schema, whatever the value of this key.
    strict: bool | None = None


class _ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _ChatBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    model: str
    messages: list[_Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = Field(None, ge=1, le=128)
    response_format: _ResponseFormat | None = None


def read_request(
    document: Document, task: GenerationConfig, decoding: DecodingConfig
) -> ChatRequest:
    """Return the request in a document.

    Args:
        document: A row with a prompt, or a line of a batch file.
        task: Section `task`, whose values are the defaults of a line.
        decoding: Section `decoding`, whose values are also defaults.

    Raises:
        ValueError: If the row has no prompt.
        BadRequest: If the line asks for something that cannot be done.
    """
    if task.openai:
        return _read_line(document.fields, task, decoding)
    sampling = decoding.sampling
    turns, unanswered = conversation(document.fields.get(task.prompt_column), task)
    parameters = Parameters(
        max_new_tokens=decoding.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        stop=tuple(task.stop),
        samples=task.samples,
    )
    return ChatRequest(turns, unanswered, parameters)


def _read_line(
    fields: dict[str, Any], task: GenerationConfig, decoding: DecodingConfig
) -> ChatRequest:
    """Return the request in a line of a batch file."""
    _check_line(fields)
    body = _read_body(fields.get("body"))
    sampling = decoding.sampling
    stop = _stop_strings(body.stop, task.stop)
    messages = [_turn(number, message) for number, message in enumerate(body.messages)]
    try:
        turns, unanswered = conversation(messages, task)
    except ValueError as error:
        raise BadRequest(str(error), "messages", "invalid_value") from None
    max_new_tokens = body.max_completion_tokens or body.max_tokens
    parameters = Parameters(
        max_new_tokens=max_new_tokens or decoding.max_new_tokens,
        temperature=sampling.temperature if body.temperature is None else body.temperature,
        top_p=sampling.top_p if body.top_p is None else body.top_p,
        stop=stop,
        samples=body.n or task.samples,
        seed=body.seed,
        format=_answer_format(body.response_format, decoding.method),
    )
    return ChatRequest(turns, unanswered, parameters)


def _check_line(fields: dict[str, Any]) -> None:
    """Raise BadRequest if a line does not belong to a batch file of chat completions."""
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadRequest(
            "custom_id: each request needs one, as text", "custom_id", "missing_required_parameter"
        )
    method = fields.get("method")
    if method != "POST":
        raise BadRequest(f"method: expected POST, found {method!r}", "method", "invalid_method")
    url = fields.get("url")
    if url != URL:
        raise BadRequest(f"url: {url!r} is not supported; only {URL} is", "url", "invalid_url")
    unknown = sorted(fields.keys() - set(_LINE_KEYS))
    if unknown:
        raise BadRequest(
            f"{unknown[0]}: unknown key; a line has {', '.join(_LINE_KEYS)}",
            unknown[0],
            "unknown_parameter",
        )


def _read_body(tree: Any) -> _ChatBody:
    """Return the body of a line; raise BadRequest if it has a parameter that raypd cannot
    follow.
    """
    try:
        body = _ChatBody.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        location = [str(part) for part in first["loc"] if part not in _UNION_MEMBERS]
        param = ".".join(location) or "body"
        raise BadRequest(f"{param}: {first['msg']}", param, "invalid_value") from None
    for name, value in (body.model_extra or {}).items():
        if name in _LABELS or value is None or value in _UNUSED_VALUES.get(name, ()):
            continue
        raise BadRequest(f"{name} is not supported: leave it out", name, "unsupported_parameter")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise BadRequest(
            "max_tokens and max_completion_tokens are both set: keep one",
            "max_tokens",
            "invalid_value",
        )
    return body


def _stop_strings(stop: str | list[str] | None, default: Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings of a request, or those of the configuration if it has none."""
    if stop is None:
        return tuple(default)
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in strings:
        raise BadRequest("stop: an empty text", "stop", "invalid_value")
    return strings


def _answer_format(response: _ResponseFormat | None, method: str) -> AnswerFormat:
    """Return the form of an answer; raise BadRequest if an answer cannot be restricted to it."""
    if response is None or response.type == "text":
        return AnswerFormat()
    if method != "autoregressive":
        raise BadRequest(
            f"response_format {response.type}: decoding.method {method} cannot restrict an answer "
            "to it; autoregressive can",
            RESPONSE_FORMAT,
            "unsupported_parameter",
        )
    if response.type == "json_object":
        return AnswerFormat(json=True)
    if response.json_schema is None:
        raise BadRequest(
            "response_format.json_schema: required for type json_schema, with name and schema",
            RESPONSE_FORMAT,
            "missing_required_parameter",
        )
    schema = response.json_schema.schema_
    try:
        if schema.get("type") != "object":
            raise ValueError("its type must be object")
        schema_text = json.dumps(schema)
        pattern = expression(schema_text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{SCHEMA}: {error}", RESPONSE_FORMAT, "invalid_value") from None
    return AnswerFormat(json=True, pattern=pattern, schema=schema_text)


def _turn(number: int, message: _Message) -> dict[str, str]:
    """Return a message as a turn of a conversation.

    Args:
        number: The number of the message, from 0.
        message: The message. Its role `developer` is the system role of newer models.

    Raises:
        BadRequest: The message contains something other than text.
    """
    where = f"messages.{number}"
    for name, value in (message.model_extra or {}).items():
        if value is not None and value != []:
            raise BadRequest(
                f"{where}.{name} is not supported: leave it out", where, "unsupported_parameter"
            )
    role = "system" if message.role == "developer" else message.role
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    texts = []
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise BadRequest(
                f"{where}.content: {part.type} is not supported, only text is",
                where,
                "unsupported_content",
            )
        texts.append(part.text)
    return {"role": role, "content": "\n".join(texts)}
