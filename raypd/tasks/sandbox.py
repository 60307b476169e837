"""Renders templates: in Jinja's sandbox; a user's in a process of its own, which is this file with
JSON on stdin.
"""

import contextlib
import ctypes
import json
import re
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 2  # of the processor, so that a busy machine refuses no template
_MEMORY = 1 << 30


class TemplateFault(Exception):
    """What is wrong with a template, and in which line."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Of a model's own template, in this process: no single operation takes minutes, or all
    memory.
    """

    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        wide = operator == "%" and isinstance(left, str) and re.search(r"%[^a-z%]*(\*|\d{5})", left)
        if operator == "%":
            sizes = []
        else:
            sizes = [len(n) if hasattr(n, "__len__") else abs(n) for n in (left, right)]
        if wide or max(sizes, default=0) > 10_000:  # as a number, or characters, or items
            raise jinja2.sandbox.SecurityError(f"{operator} with more than 10,000")
        return super().call_binop(context, operator, left, right)


def render(text: str, values: list[dict[str, Any]]) -> list[str]:
    """A template of raypd's own with each of some values, in this process. Raises TemplateFault."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    try:
        template = environment.from_string(text)
        return [template.render(**names) for names in values]
    except jinja2.TemplateSyntaxError as error:
        raise TemplateFault(f"not a valid Jinja2 template: {error.message}", error.lineno) from None
    except jinja2.UndefinedError as error:
        raise TemplateFault(
            f"{error.message}; it may use category, instruction and documents"
        ) from None
    except MemoryError:
        raise TemplateFault("it takes too much memory") from None
    except Exception as error:  # a template can raise whatever a filter or an operator does
        raise TemplateFault(f"{type(error).__name__}: {error}") from None


def render_apart(text: str, values: list[dict[str, Any]]) -> list[str]:
    """As `render`, for templates of others: in a process that ends after CPU_SECONDS, with little
    memory.
    """
    # Imported here, because the process that renders reads this file, too, and needs nothing of it.
    from raypd.schema import Unfinished, run_apart

    try:
        answer = run_apart(__file__, [text, values])
    except Unfinished as reason:
        raise TemplateFault(f"it cannot be rendered: {reason}") from None
    if answer is None:
        raise TemplateFault(f"it is not rendered within {CPU_SECONDS} s: does a loop of it end?")
    if "fault" in answer:
        raise TemplateFault(answer["fault"], answer["line"])
    return list(answer["texts"])


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends Python code of this thread with a TimeoutError: a template of the model's own, which may
    never end.
    """
    thread = ctypes.c_ulong(threading.get_ident())
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    timer = threading.Timer(seconds, raise_in, (thread, ctypes.py_object(TimeoutError)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _main() -> None:
    import resource  # not on every system

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    # Objects that have their keys and nothing to call: in a dict `attribute.values` would be a
    # method.
    text, values = json.load(sys.stdin, object_hook=lambda tree: SimpleNamespace(**tree))
    try:
        answer: dict[str, Any] = {"texts": render(text, list(map(vars, values)))}
    except TemplateFault as fault:
        answer = {"fault": str(fault), "line": fault.line}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    _main()
