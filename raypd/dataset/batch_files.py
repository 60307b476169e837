"""The two files that OpenAI's batch API gives back: a line of answers or an error for every
request. They are a view of the committed rows, in the order of the input, written anew whenever the
run has ended.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from itertools import groupby
from typing import Any

from raypd import storage
from raypd.config import RunConfig
from raypd.dataset import writer
from raypd.dataset.jsonl import BOM, Line, lines, open_lines
from raypd.dataset.listing import objects
from raypd.dataset.split import line_limit
from raypd.errors import ConfigError, InputError, RunError, raised_as
from raypd.run import layout
from raypd.tasks.base import Document
from raypd.tasks.openai_batch import RESPONSE_FORMAT, SCHEMA, TOO_LONG, BadRequest, read_request
from raypd.text import one_line

_SERVER_ERROR = "server_error"
_COLUMNS = ["row", "status", "error", "sample", "text", "finish_reason", "tokens", "counters"]


def check(config: RunConfig) -> None:
    """Raises ConfigError where the input is not one batch file; InputError: unreadable, or a
    custom_id stands twice.
    """
    line_of_id: dict[str, int] = {}
    path = str(config.input.path)
    for line, fields in _lines(config):
        id = fields.get("custom_id") if fields is not None else None
        if isinstance(id, str) and (first := line_of_id.setdefault(id, line.number)) != line.number:
            advice = (
                f"custom_id {one_line(id, 80)!r} stands on line {first} already; give each "
                "request its own"
            )
            raise InputError(f"{path}:{line.number}: {advice}")


def write(config: RunConfig, output: str) -> tuple[int, int]:
    """Writes output.jsonl and errors.jsonl; lines of each.

    Raises RunError: rows of another input; InputError.
    """
    answers: list[str] = []
    errors: list[str] = []
    rows = _rows(output)
    for line, fields in _lines(config):
        place, created, answer_rows = next(rows, (None, 0, []))
        if place != line.offset:
            raise RunError(
                f"{config.input.path}:{line.number}: {output} has no rows of it; was the file "
                "changed?"
            )
        name = hashlib.sha256(f"{config.fingerprint()}/{line.offset}".encode()).hexdigest()[:24]
        body = (fields or {}).get("body")
        reason = next((row["error"] for row in answer_rows if row["status"] != "ok"), None)
        if reason is None:
            response = _response(200, name, _completion(config, name, created, body, answer_rows))
            answers.append(_encoded(name, fields, response, None))
        else:
            errors.append(_error(config, name, line, fields, reason))
    for name, encoded in ((layout.BATCH_OUTPUT, answers), (layout.BATCH_ERRORS, errors)):
        path = storage.join(output, name)
        with raised_as(
            RunError, f"{path}: cannot be written", advice="; the same command writes it"
        ):
            storage.put(path, "".join(encoded).encode())
    return len(answers), len(errors)


def _lines(config: RunConfig) -> Iterator[tuple[Line, dict[str, Any] | None]]:
    files = list(objects(config.input))
    if len(files) != 1 or files[0].format != "jsonl":
        raise ConfigError(
            f"input.path {config.input.path}: task.openai takes one batch file, .jsonl[.gz|.zst]"
        )
    (file,) = files
    read = raised_as(InputError, f"{file.path}: cannot be read", OSError, EOFError)
    with read, closing(open_lines(file.path, file.compression)) as opened:
        for line in lines(opened, line_limit(config.input.max_document_bytes)):
            try:
                fields = json.loads(
                    (line.data or b"").removeprefix(BOM if line.offset == 0 else b"")
                )
            except (ValueError, RecursionError):
                fields = None
            yield line, fields if isinstance(fields, dict) else None


def _rows(output: str) -> Iterator[tuple[int, int, list[dict[str, Any]]]]:
    """(byte of the line, unix second of the commit, rows) of every request, in the order of the
    input.
    """
    units = (
        (writer.read_summary(output, unit, path), path) for unit, path in writer.objects(output)
    )
    for summary, path in sorted(units, key=lambda item: item[0].start):
        table = writer.read_table(output, summary.unit, _COLUMNS, path)[1]
        for place, rows in groupby(table.to_pylist(), key=lambda row: row["row"]):
            yield place, int(summary.committed_at), list(rows)


def _completion(
    config: RunConfig, name: str, created: int, body: Any, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """A chat.completion.

    `model` is the one that was asked for; the fingerprint stands for the one that answered.
    """
    prompt = json.loads(rows[0]["counters"])["prompt_tokens"]
    answer = sum(row["tokens"] for row in rows)
    choices = []
    for row in sorted(rows, key=lambda row: row["sample"]):
        message = {"role": "assistant", "content": row["text"], "refusal": None}
        finish = row["finish_reason"]
        choices.append(
            {"index": row["sample"], "message": message, "logprobs": None, "finish_reason": finish}
        )
    return {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        "created": created,
        "model": body["model"],
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
        },
        "system_fingerprint": f"fp_{config.fingerprint()}",
    }


def _error(
    config: RunConfig, name: str, line: Line, fields: dict[str, Any] | None, reason: str
) -> str:
    """A line of errors.jsonl: of a line that is no request with its number, else what the API
    answers to it.
    """
    fault = (
        BadRequest(reason, None, "invalid_json_line")
        if fields is None
        else _fault(config, fields, reason)
    )
    if fields is None or not isinstance(fields.get("custom_id"), str):
        error = {
            "code": fault.code,
            "message": f"line {line.number}: {reason}",
            "param": fault.param,
        }
        return _encoded(name, None, None, {**error, "line": line.number})
    status = 500 if fault.code == _SERVER_ERROR else 400
    kind = "invalid_request_error" if status == 400 else _SERVER_ERROR
    body = {"error": {"message": reason, "type": kind, "param": fault.param, "code": fault.code}}
    return _encoded(name, fields, _response(status, name, body), None)


def _fault(config: RunConfig, fields: dict[str, Any], reason: str) -> BadRequest:
    if reason.startswith(SCHEMA):
        return BadRequest(reason, RESPONSE_FORMAT, "invalid_value")
    try:
        read_request(Document(0, "", fields), config)
    except BadRequest as error:
        return error
    if reason.startswith(TOO_LONG):
        return BadRequest(reason, "messages", "context_length_exceeded")
    return BadRequest(reason, None, _SERVER_ERROR)


def _response(status: int, name: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{name}", "body": body}


def _encoded(name: str, fields: dict[str, Any] | None, response: Any, error: Any) -> str:
    id = None if fields is None else fields.get("custom_id")
    return (
        json.dumps(
            {"id": f"batch_req_{name}", "custom_id": id, "response": response, "error": error}
        )
        + "\n"
    )
