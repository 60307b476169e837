"""Reads files in foreign formats in separate processes, with limits on time and memory.

The parsers of HTML, PDF, office files and email can be made to run for hours, to ask for all memory
or to abort. In a separate process, that costs only one document, or one object of the input.
"""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

# The folder that contains raypd, for the process.
_ROOT = str(Path(__file__).parents[2])
# CPU seconds for a file, so that no file is refused because the machine is busy.
SECONDS = {
    "html": 10,
    "xml": 10,
    "rtf": 20,
    "docx": 20,
    "pptx": 20,
    "epub": 20,
    "eml": 20,
    "msg": 20,
    "pdf": 60,
    "excel": 120,
    "ocr": 120,  # of each page
}
_NAMES = {
    "html": "HTML",
    "xml": "XML",
    "rtf": "an RTF file",
    "docx": "a Word file",
    "pptx": "a PowerPoint file",
    "epub": "an EPUB",
    "eml": "a mail",
    "msg": "a message of Outlook",
    "pdf": "a PDF",
    "excel": "a workbook",
    "ocr": "a scanned page",
}
_MEMORY = 2 << 30  # bytes of address space of a process
_IDLE_MEMORY = 256 << 20  # bytes; a process that still uses more after its answer ends
# The same for a process that recognizes scans, whose models stay loaded.
_OCR_MEMORY = 4 << 30
_OCR_IDLE_MEMORY = 2 << 30
_WALL_SECONDS = 900.0  # a process that makes no progress
_MAX_PROCESSES = max(1, os.cpu_count() or 1)


def parse(kind: str, data: bytes, limit: int = 0, page: int = 0) -> bytes:
    """Parse a file in a separate process.

    Args:
        kind: What the file is, a key of SECONDS.
        data: The file; HTML as UTF-8.
        limit: Bytes that a zipped file may have when unpacked.
        page: The page to recognize ("ocr"), from 0.

    Returns:
        JSON: a text, a list of the texts of pages or slides ("pdf", "pptx"), a message ("eml",
        "msg"), the rows of a page ("ocr"), or a line for each row ("excel").

    Raises:
        ValueError: The file cannot be read, or not within the limits; the text says why.
    """
    idle = _idle_ocr if kind == "ocr" else _idle
    request = {"kind": kind, "seconds": SECONDS[kind], "limit": limit, "page": page}
    with _slots:
        process = _idle_process(idle) or _started(kind)
        try:
            header, body = _exchange(process, request, data)
        except _ProcessEnded:
            _end(process)
            raise ValueError(_reason(kind, process.returncode)) from None
        except BaseException:  # such as Ctrl-C: the process may still send this file's answer
            _end(process)
            raise
        if header["last"]:
            _end(process)
        else:
            with _lock:
                idle.append(process)
    if header["error"] is not None:
        raise ValueError(header["error"])
    return body


class _ProcessEnded(Exception):
    """The process ended before it answered."""


_slots = threading.BoundedSemaphore(_MAX_PROCESSES)
_lock = threading.Lock()
_idle: list[subprocess.Popen[bytes]] = []
_idle_ocr: list[subprocess.Popen[bytes]] = []


def _idle_process(idle: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes] | None:
    with _lock:
        while idle:
            process = idle.pop()
            if process.poll() is None:
                return process
            _end(process)
    return None


def _started(kind: str) -> subprocess.Popen[bytes]:
    memory = _OCR_MEMORY if kind == "ocr" else _MEMORY
    idle_memory = _OCR_IDLE_MEMORY if kind == "ocr" else _IDLE_MEMORY
    command = [sys.executable, "-P", "-m", "raypd.dataset.file_parsers.server"]
    path = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [*command, str(memory), str(idle_memory)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # Ctrl-C is only for the parent. When the parent ends, the process ends by itself.
        start_new_session=True,
    )


def _exchange(
    process: subprocess.Popen[bytes], request: dict[str, Any], data: bytes
) -> tuple[dict[str, Any], bytes]:
    """Send a request and return the header and the body of its answer.

    Raises:
        _ProcessEnded: The process ended, by itself or after _WALL_SECONDS.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    request = {**request, "bytes": len(data)}
    timer = threading.Timer(_WALL_SECONDS, process.send_signal, [signal.SIGXCPU])
    timer.daemon = True
    timer.start()
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.write(data)
        process.stdin.flush()
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise _ProcessEnded
        header = json.loads(line)
        body = process.stdout.read(header["bytes"])
        if len(body) < header["bytes"]:
            raise _ProcessEnded
        return header, body
    except BrokenPipeError:
        raise _ProcessEnded from None
    finally:
        timer.cancel()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and release its pipes; one that has ended keeps its exit code."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # for data that was not sent yet
                pipe.close()
    try:
        # A process that was about to end by itself keeps the signal that says why.
        process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _reason(kind: str, exit_code: int) -> str:
    if exit_code == -signal.SIGXCPU:
        return f"{_NAMES[kind]} that could not be read within {SECONDS[kind]} s"
    memory = (_OCR_MEMORY if kind == "ocr" else _MEMORY) >> 30
    return f"{_NAMES[kind]} whose parser crashed or needed more than {memory} GiB of memory"


@atexit.register
def close() -> None:
    """End the idle processes."""
    with _lock:
        processes = [*_idle, *_idle_ocr]
        _idle.clear()
        _idle_ocr.clear()
    for process in processes:
        _end(process)
