"""A judge of preference rounds that is no model: the answer closer to a reference is better.

    python -m benchmarks.rouge_judge prompts.jsonl train configs/train/pasta_preference.yaml \
        input.path=prompts.jsonl

runs a command of raypd with `training.preference.judged` added, beside a server with the API of a
judge. prompts.jsonl has JSON lines of `turns` (a prompt) and `reference`. An answer is closer if
its ROUGE-L is higher by at least 0.02; otherwise it is a tie. ROUGE-L compares words and not their
meaning: a model that agrees with people is the better judge.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rouge_score.rouge_scorer import RougeScorer

_PORT = 8379  # the same in every call, because a resumed run has to find the server again
_MIN_LEAD = 0.02
# The form of raypd/training/templates/compare.txt.
_PARTS = re.compile(
    r"<request>\n(.*)\n</request>\s*<first>\n(.*)\n</first>\s*<second>\n(.*)\n</second>", re.DOTALL
)


def references(path: Path) -> dict[str, str]:
    """Read the reference of each prompt."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["turns"][0].strip(): row["reference"][0] for row in rows}


def verdict(question: str, references: dict[str, str], scorer: RougeScorer) -> str:
    """Judge two answers.

    Args:
        question: The prompt of the judge.
        references: The reference of each prompt.
        scorer: Computes ROUGE-L.

    Returns:
        "first", "second" or "tie".

    Raises:
        LookupError: If the question is none of a preference round, or of another prompt.
    """
    parts = _PARTS.search(question)
    if parts is None:
        raise LookupError("no request and two answers in the question")
    request, first, second = parts.groups()
    reference = references[request.removeprefix("[user] ").strip()]
    first_score = scorer.score(reference, first)["rougeL"].fmeasure
    second_score = scorer.score(reference, second)["rougeL"].fmeasure
    lead = first_score - second_score
    if abs(lead) < _MIN_LEAD:
        return "tie"
    return "first" if lead > 0 else "second"


def server(references: dict[str, str], port: int = _PORT) -> ThreadingHTTPServer:
    """Return a server that answers each question with a chat completion.

    Its text is the verdict. A question that cannot be judged gets status 400 and the reason.

    Args:
        references: The reference of each prompt.
        port: The port of 127.0.0.1; 0 for any that is free.
    """
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                with lock:
                    word = verdict(body["messages"][-1]["content"], references, scorer)
            except LookupError as error:
                self.answer(400, {"error": f"{error}"})
            else:
                choice = {
                    "index": 0,
                    "message": {"role": "assistant", "content": word},
                    "finish_reason": "stop",
                }
                self.answer(200, {"choices": [choice]})

        def answer(self, status: int, tree: dict[str, object]) -> None:
            data = json.dumps(tree).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Print no line per question."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Report every error but that of a client that closed its connection."""
            if not isinstance(sys.exception(), OSError):
                super().handle_error(request, client_address)  # type: ignore[arg-type]

    return Server(("127.0.0.1", port), Handler)


def main(path: str, *command: str) -> int:
    """Run a command of raypd beside the server; return its exit status.

    Args:
        path: The file of prompts and references.
        command: The words of the command.
    """
    if not Path(path).is_file():
        raise SystemExit(
            f"{path}: no such file; it holds prompts with their references, as JSON lines"
        )
    judge = server(references(Path(path)))
    threading.Thread(target=judge.serve_forever, daemon=True).start()
    endpoint = f"{{url: http://127.0.0.1:{_PORT}/v1, key_variable: null}}"
    judged = f"training.preference.judged={{model.name: rouge-l, model.endpoint: {endpoint}}}"
    return subprocess.run([sys.executable, "-m", "raypd", *command, judged]).returncode


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
