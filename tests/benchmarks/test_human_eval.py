"""Programs of a model: which pass, and that none gets at the network, much memory or endless
time.
"""

import pytest

from benchmarks import human_eval

PROMPT = 'import math\n\n\ndef twice(x):\n    """Twice x."""\n'
TEST = "def check(candidate):\n    assert candidate(2) == 4\n"


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        # What stands behind the body does not count.
        ("    return 2 * x\n\ndef more():\n    return 1 /\n", True),
        (
            (
                "Sure:\n```python\ndef twice(x):\n    return int(2 * math.sqrt(x * "
                "x))\n```\nIt doubles."
            ),
            True,
        ),
        ("    return x\n", False),
        ("    import os; os._exit(0)\n", False),
        ("    while True: pass\n", False),
        ("    return len(bytearray(1 << 31)) and 2 * x\n", False),
        (
            (
                "    import os\n    os.fork()\n    open('f', 'w').write(' ' * (1 << 21))\n    "
                "return 2 * x\n"
            ),
            False,
        ),
        (
            (
                "    import socket as s; s.create_connection(s.create_server(('', "
                "0)).getsockname()[:2])\n    return 4\n"
            ),
            False,
        ),
    ],
)
def test_a_program_passes_that_comes_to_the_end_of_its_tests(text, passed, monkeypatch):
    monkeypatch.setattr(human_eval, "_WALL_SECONDS", 3.0)
    assert human_eval.passes(human_eval.program(PROMPT, text, TEST, "twice")) is passed
