"""Threads for work that mostly waits for storage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Given = TypeVar("Given")
Result = TypeVar("Result")


def in_threads(function: Callable[[Given], Result], items: Iterable[Given], threads: int) -> Iterator[Result]:
    """`map` in a pool that takes no more of `items` than its threads need, in the order of the items."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
