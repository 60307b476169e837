"""A judge of preference rounds that is no model: of two answers the one that is nearer to the
reference is better.

    python -m benchmarks.rouge_judge prompts.jsonl train configs/train/pasta_preference.yaml
    input.path=prompts.jsonl

runs a command of raypd, with `training.preference.judged` added, beside a server of the API that a
judge is asked by. prompts.jsonl: JSON lines of `turns` (a prompt) and `reference`. Nearer is
ROUGE-L higher by at least 0.02, else it is a tie. ROUGE-L sees words, not sense: where a model that
agrees with people can be had, it is the better judge.
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

_PORT = 8379  # the same one in every call: a run that goes on asks where it began
_TIE = 0.02
_PARTS = re.compile(
    r"<request>\n(.*)\n</request>\s*<first>\n(.*)\n</first>\s*<second>\n(.*)\n</second>", re.DOTALL
)  # as of raypd/training/templates/compare.txt


def references(path: Path) -> dict[str, str]:
    """Prompt -> reference."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["turns"][0].strip(): row["reference"][0] for row in rows}


def verdict(question: str, known: dict[str, str], scorer: RougeScorer) -> str:
    """first, second or tie.

    Raises LookupError: the question is none of a preference round, or of another prompt.
    """
    parts = _PARTS.search(question)
    if parts is None:
        raise LookupError("no request and two answers in the question")
    request, first, second = parts.groups()
    reference = known[request.removeprefix("[user] ").strip()]
    lead = (
        scorer.score(reference, first)["rougeL"].fmeasure
        - scorer.score(reference, second)["rougeL"].fmeasure
    )
    return "tie" if abs(lead) < _TIE else "first" if lead > 0 else "second"


def server(known: dict[str, str], port: int = _PORT) -> ThreadingHTTPServer:
    """A chat completion that holds a verdict, for each question; 400 and the reason where there is
    none.
    """
    scorer, lock = RougeScorer(["rougeL"], use_stemmer=True), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                with lock:
                    word = verdict(body["messages"][-1]["content"], known, scorer)
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
            """Not a line for each question."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A client that closed its connection is no news; a fault of an answer is."""
            if not isinstance(sys.exception(), OSError):
                super().handle_error(request, client_address)  # type: ignore[arg-type]

    return Server(("127.0.0.1", port), Handler)


def main(path: str, *command: str) -> int:
    """The command's exit status."""
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
    sys.exit(main(*sys.argv[1:]) if sys.argv[1:] else __doc__)
