"""Programs that a model wrote: which of them pass, and what they are kept from."""

import pytest

from benchmarks import human_eval

PROMPT = 'import math\n\n\ndef twice(x):\n    """Twice x."""\n'
TEST = "def check(candidate):\n    assert candidate(2) == 4\n"
CONTINUES_AFTER_THE_BODY = "    return 2 * x\n\ndef more():\n    return 1 /\n"
WHOLE_FUNCTION_IN_A_FENCE = """\
Sure:
```python
def twice(x):
    return int(2 * math.sqrt(x * x))
```
It doubles."""
WRONG = "    return x\n"
EXITS = "    import os; os._exit(0)\n"
LOOPS = "    while True: pass\n"
TAKES_MEMORY = "    return len(bytearray(1 << 31)) and 2 * x\n"
FORKS_AND_WRITES = """\
    import os
    os.fork()
    open('f', 'w').write(' ' * (1 << 21))
    return 2 * x
"""
CONNECTS = """\
    import socket as s
    s.create_connection(s.create_server(('', 0)).getsockname()[:2])
    return 4
"""


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        (CONTINUES_AFTER_THE_BODY, True),
        (WHOLE_FUNCTION_IN_A_FENCE, True),
        (WRONG, False),
        (EXITS, False),
        (LOOPS, False),
        (TAKES_MEMORY, False),
        (FORKS_AND_WRITES, False),
        (CONNECTS, False),
    ],
)
def test_a_program_passes_if_it_reaches_the_end_of_its_tests(text, passed, monkeypatch):
    monkeypatch.setattr(human_eval, "_WALL_SECONDS", 3.0)
    assert human_eval.passes(human_eval.program(PROMPT, text, TEST, "twice")) is passed
