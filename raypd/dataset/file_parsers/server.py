"""The process that reads files in foreign formats.

It reads requests from stdin and writes answers to stdout, both as a line of JSON followed by a body
of bytes. `parser_process` starts it and talks to it.
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from raypd.dataset.file_parsers.epub import book_text
from raypd.dataset.file_parsers.html import visible_text
from raypd.dataset.file_parsers.mail import mail_of_eml, mail_of_msg
from raypd.dataset.file_parsers.ocr import recognized_page
from raypd.dataset.file_parsers.pdf import pdf_pages
from raypd.dataset.file_parsers.rtf import rtf_text
from raypd.dataset.file_parsers.slides import slide_texts
from raypd.dataset.file_parsers.word import word_text
from raypd.dataset.file_parsers.workbook import sheet_rows
from raypd.dataset.file_parsers.xml import xml_text

_MAX_ROW_BYTES = 512 << 20  # of all rows of a sheet, as JSON


def _rows_as_lines(data: bytes) -> bytes:
    """Return a line of JSON for each row of a workbook's first sheet."""
    lines = []
    size = 0
    for row in sheet_rows(data):
        line = json.dumps(row).encode()
        lines.append(line)
        size += len(line)
        if size > _MAX_ROW_BYTES:
            raise ValueError(
                f"a workbook with more than {_MAX_ROW_BYTES >> 20} MiB of values: save the sheet "
                "as CSV"
            )
    return b"\n".join(lines)


# The registry: kind -> function that reads a file, given its bytes and the limit of the request.
# All return values that JSON can represent.
_PARSERS: dict[str, Callable[[bytes, int], Any]] = {
    "html": lambda data, limit: visible_text(data.decode()),
    "docx": word_text,
    "pdf": lambda data, limit: pdf_pages(data),
    "pptx": slide_texts,
    "rtf": lambda data, limit: rtf_text(data),
    "epub": book_text,
    "xml": lambda data, limit: xml_text(data),
    "eml": lambda data, limit: mail_of_eml(data),
    "msg": lambda data, limit: mail_of_msg(data),
}


def _answer(request: dict[str, Any], data: bytes) -> bytes:
    """Return what a request asks for.

    Raises:
        ValueError: The file cannot be read; the text says why.
    """
    kind = request["kind"]
    if kind == "excel":
        return _rows_as_lines(data)
    if kind == "ocr":
        return json.dumps(recognized_page(data, request["page"])).encode()
    return json.dumps(_PARSERS[kind](data, request["limit"])).encode()


def _resident_memory() -> int:
    """Return the bytes of memory that this process uses now; 0 if the system does not tell."""
    # Not `ru_maxrss`, which begins with the memory of the parent process.
    try:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _serve(requests: BinaryIO, answers: BinaryIO, memory: int, idle_memory: int) -> None:
    """Answer requests until stdin ends, which it does when the parent process ends.

    Args:
        requests: The stream of requests.
        answers: The stream of answers.
        memory: Bytes of address space that this process may take.
        idle_memory: Bytes; if the process still uses more memory after an answer, it ends.
    """
    import resource  # not on every system

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    while line := requests.readline():
        request = json.loads(line)
        data = requests.read(request["bytes"])
        cpu_limit = math.ceil(time.process_time()) + request["seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit, hard_limit))
        header: dict[str, Any] = {"error": None}
        body = b""
        try:
            body = _answer(request, data)
        except MemoryError:
            # A parser that is not written in Python would end the process, too.
            sys.exit(1)
        except ValueError as error:
            header["error"] = str(error)
        except BaseException as error:  # a panic in Rust is not an Exception
            header["error"] = f"it cannot be read: {type(error).__name__}: {error}"
        header["bytes"] = len(body)
        header["last"] = _resident_memory() > idle_memory
        answers.write(json.dumps(header).encode() + b"\n" + body)
        answers.flush()
        if header["last"]:
            return


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[1]), int(sys.argv[2]))
