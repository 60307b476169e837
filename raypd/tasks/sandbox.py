"""Renders templates in Jinja's sandbox.

A user's template is rendered in a separate process, which runs this file with JSON on stdin.
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

# The limit on the processor time of a user's template, in seconds. A limit on wall time would
# reject good templates on a busy machine.
CPU_SECONDS = 2
# The limit on the memory of a process that renders a user's template, in bytes.
_MEMORY = 1 << 30
# The size of an operand, as a number or in characters or items, above which an operation may take
# too long or too much memory.
_MAX_OPERAND = 10_000
# A format with a width of at least five digits, or with a width from an argument.
_WIDE_FORMAT = re.compile(r"%[^a-z%]*(\*|\d{5})")


class TemplateFault(Exception):
    """An error in a template.

    Attributes:
        line: The line of the template, or None.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Renders a model's own template in this process.

    No single operation can take minutes or all memory.
    """

    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            # A modulo of numbers is cheap, but the operator may also format text with a width.
            is_large = isinstance(left, str) and _WIDE_FORMAT.search(left) is not None
        else:
            is_large = max(_operand_size(left), _operand_size(right)) > _MAX_OPERAND
        if is_large:
            raise jinja2.sandbox.SecurityError(f"{operator} with more than {_MAX_OPERAND:,}")
        return super().call_binop(context, operator, left, right)


def _operand_size(operand: Any) -> float:
    """Return the size of an operand: its number of characters or items, or its absolute value."""
    if hasattr(operand, "__len__"):
        return len(operand)
    return abs(operand)


def render(text: str, values: list[dict[str, Any]]) -> list[str]:
    """Render one of raypd's own templates in this process.

    Args:
        text: The template.
        values: The variables of each rendering.

    Returns:
        A text for each element of `values`.

    Raises:
        TemplateFault: It cannot be rendered.
    """
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
    except Exception as error:
        # A template can raise whatever a filter or an operator raises.
        raise TemplateFault(f"{type(error).__name__}: {error}") from None


def render_apart(text: str, values: list[dict[str, Any]]) -> list[str]:
    """Render a user's template in a process with little memory that ends after CPU_SECONDS.

    Arguments, results and errors are those of `render`.
    """
    # The rendering process also runs this file and must start fast.
    from raypd.schema import Unfinished, run_apart

    try:
        answer = run_apart(__file__, [text, values])
    except Unfinished as reason:
        raise TemplateFault(f"it cannot be rendered: {reason}") from None
    if answer is None:
        raise TemplateFault(f"it is not rendered within {CPU_SECONDS} s: check that its loops end")
    if "fault" in answer:
        raise TemplateFault(answer["fault"], answer["line"])
    return list(answer["texts"])


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in this thread if the block takes too long.

    A model's own template may never end.
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
    """Render the template from stdin, and write the texts or the error to stdout."""
    # This module does not exist on every system.
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    # macOS has no such limit.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    # Templates see objects, because in a dict `attribute.values` would be a method.
    text, values = json.load(sys.stdin, object_hook=lambda tree: SimpleNamespace(**tree))
    try:
        answer: dict[str, Any] = {"texts": render(text, list(map(vars, values)))}
    except TemplateFault as fault:
        answer = {"fault": str(fault), "line": fault.line}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    _main()
