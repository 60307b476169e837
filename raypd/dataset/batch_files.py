"""The two files that OpenAI's batch API returns: one line per request, an answer or an error.

They are a view of the committed rows in the order of the input, and are written each time the run
ends.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import raypd.dataset.summaries as summaries
import raypd.dataset.unit_rows as unit_rows
from raypd import storage
from raypd.config import GenerationConfig, RunConfig
from raypd.dataset.committed import CommittedUnits
from raypd.dataset.jsonl import BOM, Line, line_limit, lines, open_lines
from raypd.dataset.listing import objects
from raypd.errors import ConfigError, InputError, RunError, raised_as
from raypd.run import layout
from raypd.tasks import RESPONSE_FORMAT, SCHEMA, TOO_LONG, BadRequest, Document, read_request
from raypd.text import one_line

_SERVER_ERROR = "server_error"
_COLUMNS = ["row", "status", "error", "sample", "text", "finish_reason", "tokens", "counters"]
_NAME_DIGITS = 24


class _AnsweredRequest(NamedTuple):
    """The committed rows of one request."""

    offset: int  # of the request's line
    created: int  # Unix seconds of the commit
    rows: list[dict[str, Any]]


def check(config: RunConfig) -> None:
    """Check that the input is a batch file.

    Args:
        config: The configuration of a run with `task.openai`.

    Raises:
        ConfigError: The input is not one file of JSON Lines.
        InputError: The file cannot be read, or two requests have the same custom_id.
    """
    line_of_id: dict[str, int] = {}
    for line, fields in _lines(config):
        custom_id = None
        if fields is not None:
            custom_id = fields.get("custom_id")
        if not isinstance(custom_id, str):
            continue
        first = line_of_id.setdefault(custom_id, line.number)
        if first != line.number:
            raise InputError(
                f"{config.input.path}:{line.number}: custom_id {one_line(custom_id, 80)!r} "
                f"also occurs on line {first}; give each request its own"
            )


def write(config: RunConfig, output: str) -> tuple[int, int]:
    """Write output.jsonl and errors.jsonl into a run's folder.

    Args:
        config: The configuration of a run with `task.openai` that has ended.
        output: The run's folder.

    Returns:
        The number of lines in each file.

    Raises:
        RunError: The committed rows do not belong to this input, or a file cannot be written.
        InputError: The input cannot be read.
    """
    output_lines: list[str] = []
    error_lines: list[str] = []
    answers = _answers(output)
    for line, fields in _lines(config):
        answer = next(answers, None)
        if answer is None or answer.offset != line.offset:
            raise RunError(
                f"{config.input.path}:{line.number}: {output} has no rows for this "
                "request; was the file changed?"
            )
        digest = hashlib.sha256(f"{config.fingerprint()}/{line.offset}".encode()).hexdigest()
        name = digest[:_NAME_DIGITS]
        reason = _first_error(answer)
        if reason is None:
            assert fields is not None
            completion = _completion(config, name, answer, fields["body"]["model"])
            response = _response(200, name, completion)
            output_lines.append(_encoded(name, fields, response, None))
        else:
            error_lines.append(_error(config, name, line, fields, reason))
    _put(storage.join(output, layout.BATCH_OUTPUT), output_lines)
    _put(storage.join(output, layout.BATCH_ERRORS), error_lines)
    return len(output_lines), len(error_lines)


def _put(path: str, lines: list[str]) -> None:
    advice = "; the same command writes it"
    with raised_as(RunError, f"{path}: cannot be written", advice=advice):
        storage.put(path, "".join(lines).encode())


def _lines(config: RunConfig) -> Iterator[tuple[Line, dict[str, Any] | None]]:
    """Yield each line of the batch file and its object, or None if the line is not an object."""
    files = list(objects(config.input))
    if len(files) != 1 or files[0].format != "jsonl":
        raise ConfigError(
            f"input.path {config.input.path}: task.openai takes one batch file, .jsonl[.gz|.zst]"
        )
    file = files[0]
    read = raised_as(InputError, f"{file.path}: cannot be read", OSError, EOFError)
    with read, closing(open_lines(file.path, file.compression)) as opened:
        for line in lines(opened, line_limit(config.input.max_document_bytes)):
            yield line, _object_of(line)


def _object_of(line: Line) -> dict[str, Any] | None:
    if line.data is None:
        return None
    data = line.data
    if line.offset == 0:
        data = data.removeprefix(BOM)
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _answers(output: str) -> Iterator[_AnsweredRequest]:
    """Yield the committed rows of every request, in the order of the input."""
    units: list[dict[str, Any]] = []
    for table in summaries.read(CommittedUnits(output)):
        units += table.select(["name", "start", "committed_at"]).to_pylist()
    units.sort(key=itemgetter("start"))
    paths = [summaries.path_of(output, unit["name"]) for unit in units]
    tables = unit_rows.of_paths(paths, _COLUMNS)
    for unit, table in zip(units, tables, strict=True):
        for offset, rows in groupby(table.to_pylist(), key=itemgetter("row")):
            yield _AnsweredRequest(offset, int(unit["committed_at"]), list(rows))


def _first_error(answer: _AnsweredRequest) -> str | None:
    for row in answer.rows:
        if row["status"] != "ok":
            return str(row["error"])
    return None


def _completion(
    config: RunConfig, name: str, answer: _AnsweredRequest, model: str
) -> dict[str, Any]:
    """Return a chat.completion.

    Args:
        config: The run's configuration; its fingerprint identifies the model that answered.
        name: The request's name in ids.
        answer: The committed rows.
        model: The model that the request names.
    """
    prompt_tokens = json.loads(answer.rows[0]["counters"])["prompt_tokens"]
    completion_tokens = sum(row["tokens"] for row in answer.rows)
    choices = []
    for row in sorted(answer.rows, key=lambda row: row["sample"]):
        message = {"role": "assistant", "content": row["text"], "refusal": None}
        choice = {
            "index": row["sample"],
            "message": message,
            "logprobs": None,
            "finish_reason": row["finish_reason"],
        }
        choices.append(choice)
    return {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        "created": answer.created,
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "system_fingerprint": f"fp_{config.fingerprint()}",
    }


def _error(
    config: RunConfig, name: str, line: Line, fields: dict[str, Any] | None, reason: str
) -> str:
    """Return a line of errors.jsonl: the API's answer to a failed request.

    A line that is not a request, or that has no custom_id, is identified by its number.
    """
    if fields is None:
        fault = BadRequest(reason, None, "invalid_json_line")
    else:
        fault = _fault(config, fields, reason)
    if fields is None or not isinstance(fields.get("custom_id"), str):
        error = {
            "code": fault.code,
            "message": f"line {line.number}: {reason}",
            "param": fault.param,
            "line": line.number,
        }
        return _encoded(name, None, None, error)
    status = 400
    kind = "invalid_request_error"
    if fault.code == _SERVER_ERROR:
        status = 500
        kind = _SERVER_ERROR
    body = {"error": {"message": reason, "type": kind, "param": fault.param, "code": fault.code}}
    return _encoded(name, fields, _response(status, name, body), None)


def _fault(config: RunConfig, fields: dict[str, Any], reason: str) -> BadRequest:
    """Return the code and parameter that the API gives for an error of a run."""
    if reason.startswith(SCHEMA):
        return BadRequest(reason, RESPONSE_FORMAT, "invalid_value")
    assert isinstance(config.task, GenerationConfig)
    try:
        read_request(Document(0, "", fields), config.task, config.decoding)
    except BadRequest as error:
        return error
    if reason.startswith(TOO_LONG):
        return BadRequest(reason, "messages", "context_length_exceeded")
    return BadRequest(reason, None, _SERVER_ERROR)


def _response(status: int, name: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{name}", "body": body}


def _encoded(name: str, fields: dict[str, Any] | None, response: Any, error: Any) -> str:
    """Return a line of either file."""
    custom_id = None if fields is None else fields.get("custom_id")
    line = {
        "id": f"batch_req_{name}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return json.dumps(line) + "\n"
