"""pass@1 of programs that a model wrote, as human-eval defines it (SPACE, table 4).

    raypd generate humaneval.jsonl -o runs/programs task.prompt_column=turns
    python -m benchmarks.human_eval runs/programs humaneval.jsonl

Labels are JSON lines of {id, test, entry_point, prompt | turns}. Each program runs in a process of
its own without network, and with little memory and time (Linux, `unshare`). It can still read the
files of the user who runs it.
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

_CPU_SECONDS = 10
_WALL_SECONDS = 60.0
_MEMORY_BYTES = 1 << 30
_FILE_BYTES = 1 << 20
# The exit code of a program that reached the end of its tests. One that exits by itself has 0.
_PASSED = 86
_ISOLATED = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
# What ends a function's body, for models that continue to write.
_BODY_END = re.compile(r"\n(?=class |def |#|@|if |print|assert |```)")
_FENCED = re.compile(r"```(?:python|py)?\n(.*?)(?:```|\Z)", re.DOTALL)


def program(prompt: str, text: str, test: str, name: str) -> str:
    """Build a program of prompt, answer and tests.

    Args:
        prompt: The head of a function, and what stands before it.
        text: The model's answer: code in a fence, or the function's body.
        test: Code that defines `check`.
        name: The name of the function.
    """
    fenced = _FENCED.search(text)
    code = fenced[1] if fenced else text
    # If the answer has the whole function, the prompt adds only what stands before it.
    if re.search(rf"^def {re.escape(name)}\b", code, re.MULTILINE):
        code = f"{prompt[: max(0, prompt.rfind(f'def {name}'))]}\n{code}"
    else:
        code = prompt + _BODY_END.split(code)[0]
    return f"{code}\n\n{test}\n\ncheck({name})\n"


def passes(text: str) -> bool:
    """Run a program; return whether it reaches its end.

    Args:
        text: The program.

    Raises:
        RuntimeError: If this machine cannot run a process without network.
    """
    if not _can_unshare():
        raise RuntimeError(
            "programs are tested in processes without network, which this machine refuses: "
            "`unshare --map-root-user --net` must work (in Docker with --privileged)"
        )
    with tempfile.TemporaryDirectory() as folder:
        command = [*_ISOLATED, sys.executable, "-I", __file__]
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
    if shutil.which(_ISOLATED[0]) is None:
        return False
    return subprocess.run([*_ISOLATED, "true"], capture_output=True).returncode == 0


def run_here() -> None:
    """Run the program on standard input with limits, and end this process."""
    text = sys.stdin.read()
    limits = {
        resource.RLIMIT_CPU: _CPU_SECONDS,
        resource.RLIMIT_AS: _MEMORY_BYTES,
        resource.RLIMIT_FSIZE: _FILE_BYTES,
        resource.RLIMIT_NPROC: 0,
    }
    for resource_number, limit in limits.items():
        resource.setrlimit(resource_number, (limit, limit))
    null_device = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null_device, descriptor)
    try:
        exec(compile(text, "program", "exec"), {"__name__": "program"})
    except BaseException:  # a program may raise SystemExit, too
        os._exit(1)
    os._exit(_PASSED)


def pass_at_1(run: str, labels: str) -> tuple[float, int]:
    """Test the programs of a run.

    Args:
        run: The folder of the run.
        labels: The file of labels.

    Returns:
        The share of samples that pass, averaged over problems, and the number of problems. A
        problem that failed has no sample that passes.
    """
    # Imported here, because the processes of the programs import this module, too.
    from raypd.evaluation import read_answers, read_labels

    answers = read_answers(run)
    shares = []
    for id, gold in read_labels(labels, "target").items():
        if id not in answers:
            continue
        prompt = gold.get("prompt") or gold["turns"][0]
        passed = 0
        for row in answers[id]:
            text = program(prompt, row["text"], gold["test"], gold["entry_point"])
            passed += passes(text)
        shares.append(passed / max(1, len(answers[id])))
    return sum(shares) / max(1, len(shares)), len(shares)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        run_here()
    share, problems = pass_at_1(*sys.argv[1:])
    print(f"pass@1: {share:.3f} of {problems} problems")
