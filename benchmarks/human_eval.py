"""pass@1 of programs that a model wrote, as human-eval has it (SPACE, table 4).

    raypd generate humaneval.jsonl -o runs/programs task.prompt_column=turns
    python -m benchmarks.human_eval runs/programs humaneval.jsonl

Labels are JSON lines of {id, test, entry_point, prompt | turns}. Each program runs in a process of
its own without network, with little memory and time (Linux, `unshare`). It could still read files
of the user who runs it.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from functools import cache

_CPU_SECONDS, _WALL_SECONDS, _MEMORY, _FILE = 10, 60.0, 1 << 30, 1 << 20
_PASSED = 86  # exit code; a program that ends by itself, at 0, has not come to the end of its tests
_APART = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
# Of a function's body, for models that write on.
_ENDS = re.compile(r"\n(?=class |def |#|@|if |print|assert |```)")
_FENCED = re.compile(r"```(?:python|py)?\n(.*?)(?:```|\Z)", re.DOTALL)


def program(prompt: str, text: str, test: str, name: str) -> str:
    """Prompt, answer and tests of a function `name` as a program; the answer is code in a fence, or
    the body itself.
    """
    fenced = _FENCED.search(text)
    code = fenced[1] if fenced else text
    # The whole function: only what stands before it.
    if re.search(rf"^def {re.escape(name)}\b", code, re.MULTILINE):
        code = f"{prompt[: max(0, prompt.rfind(f'def {name}'))]}\n{code}"
    else:
        code = prompt + _ENDS.split(code)[0]
    return f"{code}\n\n{test}\n\ncheck({name})\n"


def passes(text: str) -> bool:
    """Whether a program comes to its end.

    Raises RuntimeError: processes here cannot be cut off from the network.
    """
    if not _can_unshare():
        raise RuntimeError(
            "programs are tested in processes without network, which this machine refuses: "
            "`unshare --map-root-user "
            "--net` must work (in Docker with --privileged)"
        )
    with tempfile.TemporaryDirectory() as folder:
        command = [*_APART, sys.executable, "-I", __file__]
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                command,
                input=text.encode(),
                cwd=folder,
                env={},
                timeout=_WALL_SECONDS,
                capture_output=True,
            )
            return done.returncode == _PASSED
    return False


@cache
def _can_unshare() -> bool:
    return (
        shutil.which(_APART[0]) is not None
        and not subprocess.run([*_APART, "true"], capture_output=True).returncode
    )


def run_here() -> None:
    """Runs the program on stdin with limits, and ends this process."""
    text = sys.stdin.read()
    for limit, most in (
        (resource.RLIMIT_CPU, _CPU_SECONDS),
        (resource.RLIMIT_AS, _MEMORY),
        (resource.RLIMIT_FSIZE, _FILE),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(limit, (most, most))
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(quiet, descriptor)
    try:
        exec(compile(text, "program", "exec"), {"__name__": "program"})
    except BaseException:  # SystemExit, too
        os._exit(1)
    os._exit(_PASSED)


def pass_at_1(run: str, labels: str) -> tuple[float, int]:
    """(share of samples that pass, the mean over problems; problems).

    A problem that failed has none that passes.
    """
    from raypd.evaluation.score import read_answers, read_labels  # not in the programs' processes

    answers, shares = read_answers(run), []
    for id, gold in [
        (id, gold) for id, gold in read_labels(labels, "target").items() if id in answers
    ]:
        prompt = gold.get("prompt") or gold["turns"][0]
        texts = [
            program(prompt, row["text"], gold["test"], gold["entry_point"]) for row in answers[id]
        ]
        shares.append(sum(map(passes, texts)) / max(1, len(texts)))
    return sum(shares) / max(1, len(shares)), len(shares)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        run_here()
    share, problems = pass_at_1(*sys.argv[1:])
    print(f"pass@1: {share:.3f} of {problems} problems")
