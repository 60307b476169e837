"""A row that a process of its own measures. The process imports this module and no heavy one."""

import time


def squared(name: str) -> tuple[str, dict[str, int]]:
    """Return a row; that of "9" takes too long."""
    if name == "9":
        time.sleep(60)
    return name, {"square": int(name) ** 2}
