"""What a document of task `generation` asks for; with `task.openai` it is a line of OpenAI's batch
files. What cannot be done is an error, and never passed over. No torch here: `model: fake` has
none.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raypd.config import GenerationConfig, RunConfig
from raypd.tasks.base import Document
from raypd.tasks.documents import conversation
from raypd.tasks.json_schema import expression

URL = "/v1/chat/completions"
TOO_LONG = "too long"  # an error record of a prompt that does not fit the context begins so
RESPONSE_FORMAT = "response_format"
# An error record of one that cannot be used begins so.
SCHEMA = "response_format.json_schema.schema"
_OF_A_LINE = ("custom_id", "method", "url", "body")
# Change no answer.
_LABELS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_NOTHING = {
    "stream": (False,),
    "logprobs": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
}


class BadRequest(ValueError):
    """Why a request is not done, as OpenAI's API says it: a message, the parameter, and a code."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True)
class Parameters:
    max_new_tokens: int
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    samples: int
    seed: int | None = None  # the request's own, which then alone decides the draws
    json: bool = False  # whether the answer is to be a JSON object
    pattern: str | None = None  # of a schema that it is held to, as a regular expression
    schema: str | None = None  # that schema, as JSON, which a finished answer is checked by


@dataclass
class ChatRequest:
    turns: list[dict[str, str]]  # the conversation up to now
    unanswered: list[str]  # the user's turns that are to be answered
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
    strict: bool | None = None  # an answer is always held to its schema


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


def read_request(document: Document, config: RunConfig) -> ChatRequest:
    """What a document asks for.

    Raises ValueError for no prompt, BadRequest for a request that cannot be done.
    """
    task = config.task
    decoding = config.decoding
    assert isinstance(task, GenerationConfig)
    sampling = decoding.sampling
    if not task.openai:
        keys = Parameters(
            decoding.max_new_tokens,
            sampling.temperature,
            sampling.top_p,
            tuple(task.stop),
            task.samples,
        )
        return ChatRequest(*conversation(document.fields.get(task.prompt_column), task), keys)
    body = _body(document.fields)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    if not all(stop or []):
        raise BadRequest("stop: an empty text", "stop", "invalid_value")
    try:
        turns, unanswered = conversation(
            [_turn(*message) for message in enumerate(body.messages)], task
        )
    except BadRequest:
        raise
    except ValueError as error:
        raise BadRequest(str(error), "messages", "invalid_value") from None
    parameters = Parameters(
        body.max_completion_tokens or body.max_tokens or decoding.max_new_tokens,
        sampling.temperature if body.temperature is None else body.temperature,
        sampling.top_p if body.top_p is None else body.top_p,
        tuple(task.stop if stop is None else stop),
        body.n or task.samples,
        body.seed,
        *_held_to(body.response_format, config),
    )
    return ChatRequest(turns, unanswered, parameters)


def _body(fields: dict[str, Any]) -> _ChatBody:
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadRequest(
            "custom_id: a request needs one, a text", "custom_id", "missing_required_parameter"
        )
    if fields.get("method") != "POST":
        raise BadRequest(
            f"method: expected POST, found {fields.get('method')!r}", "method", "invalid_method"
        )
    if fields.get("url") != URL:
        raise BadRequest(
            f"url: {fields.get('url')!r} is not supported; {URL} alone is", "url", "invalid_url"
        )
    if unknown := sorted(fields.keys() - set(_OF_A_LINE)):
        reason = f"{unknown[0]}: unknown key; a line has {', '.join(_OF_A_LINE)}"
        raise BadRequest(reason, unknown[0], "unknown_parameter")
    try:
        body = _ChatBody.model_validate(fields.get("body"))
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(
            str(part)
            for part in first["loc"]
            if part not in ("str", "list[_ContentPart]", "list[str]")
        )
        raise BadRequest(
            f"{param or 'body'}: {first['msg']}", param or "body", "invalid_value"
        ) from None
    for name, value in (body.model_extra or {}).items():
        if name not in _LABELS and value is not None and value not in _NOTHING.get(name, ()):
            raise BadRequest(
                f"{name} is not supported: leave it out", name, "unsupported_parameter"
            )
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise BadRequest(
            "max_tokens and max_completion_tokens are both set: keep one",
            "max_tokens",
            "invalid_value",
        )
    return body


def _held_to(
    response: _ResponseFormat | None, config: RunConfig
) -> tuple[bool, str | None, str | None]:
    """Whether an answer is JSON, the expression that it is held to, and its schema as JSON."""
    if response is None or response.type == "text":
        return False, None, None
    method = config.decoding.method
    if method != "autoregressive":
        reason = (
            f"response_format {response.type}: decoding.method {method} cannot hold an answer to it"
        )
        raise BadRequest(f"{reason}; autoregressive can", RESPONSE_FORMAT, "unsupported_parameter")
    if response.type == "json_object":
        return True, None, None
    if response.json_schema is None:
        reason = "response_format.json_schema: json_schema needs it, with name and schema"
        raise BadRequest(reason, RESPONSE_FORMAT, "missing_required_parameter")
    schema = response.json_schema.schema_
    try:
        if schema.get("type") != "object":
            raise ValueError("its type must be object")
        schema_text = json.dumps(schema)
        return True, expression(schema_text), schema_text
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{SCHEMA}: {error}", RESPONSE_FORMAT, "invalid_value") from None


def _turn(number: int, message: _Message) -> dict[str, str]:
    """A message as a turn of text; `developer` is what newer models call the system."""
    where = f"messages.{number}"
    for name, value in (message.model_extra or {}).items():
        if value not in (None, []):
            raise BadRequest(
                f"{where}.{name} is not supported: leave it out", where, "unsupported_parameter"
            )
    if isinstance(message.content, str):
        parts = [_ContentPart(type="text", text=message.content)]
    else:
        parts = message.content
    for part in parts:
        if part.type != "text" or part.text is None:
            reason = f"{where}.content: {part.type} is not supported, text alone is"
            raise BadRequest(reason, where, "unsupported_content")
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": "\n".join(part.text or "" for part in parts)}
