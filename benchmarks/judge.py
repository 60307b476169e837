"""A model, or people, judge how good a run's answers are (docs/judge.md).

    python -m benchmarks.judge RUN model.name=NAME model.endpoint.url=URL
    python -m benchmarks.judge RUN OTHER --export blind.csv

The judge's questions are a run of extraction whose attributes are verdicts, so that they are
resumed, priced and retried like those of any run. Of an extraction, each value is put into one of
five classes (HPD, appendix E). Texts get a score from 1 to 10, or the judge says which of two runs
has the better answer. It is asked in both orders, and an answer wins if both orders say so.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import blind
from benchmarks.config import read_tree
from raypd import evaluation, storage
from raypd.cluster import driver
from raypd.config import ExtractionConfig, GenerationConfig, RunConfig
from raypd.config.load import make_config
from raypd.errors import ConfigError, InputError, UserError
from raypd.evaluation import Evaluation, Measure, Metric, Score
from raypd.evaluation.outcome import NN, NV, VC, VN, VW, outcome
from raypd.evaluation.score import mean, share
from raypd.report.review import documents_at
from raypd.report.texts import text_in
from raypd.run import layout
from raypd.run.load import load_run
from raypd.tasks.base import Document
from raypd.tasks.columns import row_values
from raypd.tasks.documents import conversation
from raypd.text import clean, counted, usd

CORRECT = "correct"
INCORRECT = "incorrect"
MISSING = "missing"
CORRECT_NULL = "correct null"
HALLUCINATION = "hallucination"
CLASSES = (CORRECT, INCORRECT, MISSING, CORRECT_NULL, HALLUCINATION)
# An outcome by the labels -> its class.
_CLASS_OF = {VC: CORRECT, VW: INCORRECT, VN: MISSING, NN: CORRECT_NULL, NV: HALLUCINATION}
# The order of the two answers -> a verdict -> the points of the first run's answer.
_POINTS = {"AB": {"A": 1, "B": -1, "tie": 0}, "BA": {"A": -1, "B": 1, "tie": 0}}
_JUDGE_VALUES = """\
You check values that a system extracted from a document. For each attribute below, decide from \
the document alone whether it states a value, and compare that with the value extracted, which \
stands behind the document.
- correct: the document clearly states a value, and the extracted one is right and complete, in \
whatever words.
- incorrect: the document clearly states a value, and another or an incomplete one was extracted.
- missing: the document clearly states a value, and null or nothing was extracted.
- correct null: the document states no value, and none was extracted: null, or a word such as \
"none".
- hallucination: the document states no value, and one was extracted."""
_JUDGE_TEXT = (
    "You grade the answer to a request: whether it is right, helpful, to the point and complete."
)
_JUDGE_PAIR = """\
You compare two answers, A and B, to the same request: which is more correct, helpful, relevant \
and complete. Neither their order nor their length counts. Say tie where neither is better."""

# These take the sums of CLASSES.
_PRECISION = share([0, 3], [0, 1, 3, 4])
_RECALL = share([0, 3], [0, 1, 2, 3])


def _f1(sums: np.ndarray) -> np.ndarray:
    """Compute F1: [..., 5] sums of CLASSES -> [...]."""
    precision = _PRECISION(sums)
    recall = _RECALL(sums)
    return 2 * precision * recall / np.maximum(1e-12, precision + recall)


def _win_rate(sums: np.ndarray) -> np.ndarray:
    """Compute the share of wins: [..., 3] wins, ties, losses -> [...]; a tie is half a win."""
    return (sums[..., 0] + sums[..., 1] / 2) / np.maximum(1, sums.sum(-1))


METRICS: dict[str, Metric] = {
    "LLM-F1": Metric("classes", _f1),
    "LLM-P": Metric("classes", _PRECISION),
    "LLM-R": Metric("classes", _RECALL),
    "as labelled": Metric("as labelled", mean),
    "score of 10": Metric("judge", mean),
    "win rate": Metric("compared", _win_rate),
    "(W+T)/(T+L)": Metric("compared", share([0, 1], [1, 2])),
    "in both orders": Metric("both orders", mean),
    "as the judge": Metric("as the judge", mean),
}
# Id of a question -> what is judged -> the verdict; None if it is unclear.
Verdicts = Mapping[str, Mapping[str, str | None]]
Rows = list[dict[str, Any]]
Task = dict[str, Any]  # section `task` of the judge's run


@dataclass
class AnsweredDocument:
    """A document and a run's answer. `request` is its text, the context, or the prompt."""

    id: str
    category: str
    request: str
    answer: str
    rows: Rows


@dataclass(frozen=True)
class PairVerdict:
    """What a judge says of two answers.

    Attributes:
        better: 1 if ours is better, -1 if theirs is, 0 for a tie.
        is_same: Whether both orders say so.
    """

    better: int
    is_same: bool


@dataclass
class Judgement:
    """What a judge says of a run, or of two."""

    measures: list[Measure]
    verdicts: dict[str, int]  # how often each was given
    unclear: int = 0  # questions without a verdict
    output: str = ""
    usd: float | None = None

    def describe(self) -> str:
        """Return the judgement as a table for the terminal."""
        lines = [evaluation.describe(Evaluation(self.measures))]
        lines.append(", ".join(f"{verdict} {count:,}" for verdict, count in self.verdicts.items()))
        if self.unclear:
            lines.append(f"{counted(self.unclear, 'question')} without a verdict: left out")
        if self.output:
            price = f" ({usd(self.usd)})" if self.usd else ""
            lines.append(f"questions and verdicts: {self.output}{price}")
        return "\n".join(lines)


def judge(
    run: str,
    other: str | None,
    output: str,
    base: str | None,
    keys: Sequence[str],
    limit: int | None = None,
) -> Judgement:
    """Ask a model about a run's answers.

    Args:
        run: The folder of the run.
        other: A run to compare with, or the labels of an extraction.
        output: The folder of the judge's run.
        base: YAML with the judge's sections `model`, `decoding`, ...
        keys: key=value over that YAML.
        limit: The number of documents, drawn at random and the same in every call; None for all.

    Raises:
        ConfigError: If no model is named, or `output` judges something else.
        InputError: If nothing is answered.
        UserError: Whatever the judge's run raises.
    """
    theirs = answered(other) if other is not None and is_run(other) else None
    ours = _drawn(answered(run), theirs, limit)
    rows, task = _questions(run, ours, theirs)
    if not rows:
        both = f" there and in {other}" if theirs is not None else ""
        raise InputError(f"{run}: no document is answered{both}")
    verdicts, spent = ask(rows, task, output, base, keys)
    if "category" not in rows[0]:
        parts = parts_of_texts(verdicts)
    else:
        classes = _classes_by_labels(run, ours, other) if other is not None else {}
        parts = {
            id: _parts_of_values(values, classes.get(id, {})) for id, values in verdicts.items()
        }
    if not parts:
        raise InputError(
            f"{output}: no question has a verdict; `raypd errors {output}` says what failed"
        )
    counts = Counter[str]()
    unclear = len(rows) - len(verdicts)
    for values in verdicts.values():
        counts.update(verdict for verdict in values.values() if verdict is not None)
        unclear += None in values.values()
    scores = {id: Score(ours[id].category, numbers) for id, numbers in parts.items()}
    return Judgement(
        evaluation.measures_of(scores, METRICS),
        dict(counts.most_common()),
        unclear,
        output,
        spent,
    )


def _drawn(
    ours: dict[str, AnsweredDocument],
    theirs: Mapping[str, AnsweredDocument] | None,
    limit: int | None,
) -> dict[str, AnsweredDocument]:
    """Return the documents that are judged: those that both runs answered, or some of them."""
    ids = [id for id in ours if theirs is None or id in theirs]
    if limit is not None:
        ids.sort(key=lambda id: hashlib.sha256(id.encode()).digest())
    return {id: ours[id] for id in ids[:limit]}


def parts_of_texts(verdicts: Verdicts) -> dict[str, dict[str, list[float]]]:
    """Return the numbers of METRICS by document, of scores or of comparisons.

    Args:
        verdicts: The verdicts of a judge's run over texts.
    """
    parts: dict[str, dict[str, list[float]]] = {}
    for id, values in verdicts.items():
        score = values.get("score")
        if score is not None:
            parts[id] = {"judge": [float(score or 0), 1.0]}
    if parts:
        return parts
    for id, verdict in pair_verdicts(verdicts).items():
        parts[id] = {
            "compared": wins(verdict.better),
            "both orders": [float(verdict.is_same), 1.0],
        }
    return parts


def export(run: str, other: str, file: str) -> str:
    """Write the answers of two runs that differ, for people.

    Args:
        run: The folder of a run.
        other: The folder of another.
        file: The CSV file that is written.

    Returns:
        What to do with the file.

    Raises:
        InputError: If no answers differ.
    """
    theirs = answered(other)
    pairs = []
    for id, document in answered(run).items():
        if id in theirs and theirs[id].answer != document.answer:
            pair = blind.Pair(
                document.id,
                document.category,
                document.request,
                document.answer,
                theirs[id].answer,
            )
            pairs.append(pair)
    if not pairs:
        raise InputError(f"{run}, {other}: no document has an answer in both that differs")
    blind.write(pairs, file)
    return (
        f"{file}: {counted(len(pairs), 'pair')}\nnext: write 1, 2 or tie as `better`, then the "
        "same with --apply"
    )


def apply(file: str, judged: str) -> Judgement:
    """Count the wins in a CSV that people filled in, and how often they agree with a judge.

    Args:
        file: The CSV file.
        judged: The folder of the judge's run, if there is one.

    Raises:
        InputError: If a line cannot be read.
    """
    votes, skipped = blind.read(file)
    verdicts = pair_verdicts(read_verdicts(judged)) if is_run(judged) else {}
    names = {1: "RUN is better", 0: "tie", -1: "OTHER is better"}
    counts = Counter[str]()
    scores = {}
    for id, vote in votes.items():
        counts[names[vote.better]] += 1
        scores[id] = Score(vote.category, {"compared": wins(vote.better)})
        if verdicts:
            is_judged = id in verdicts
            is_same = is_judged and verdicts[id].better == vote.better
            scores[id].parts["as the judge"] = [float(is_same), float(is_judged)]
    measures = evaluation.measures_of(scores, METRICS)
    return Judgement(measures, dict(counts.most_common()), skipped)


def ask(
    rows: Sequence[dict[str, str]],
    task: Task,
    output: str,
    base: str | None,
    keys: Sequence[str],
) -> tuple[Verdicts, float | None]:
    """Run the judge over questions.

    Args:
        rows: The questions, {id, category?, text}.
        task: The task, whose attributes are verdicts.
        output: The folder of the run.
        base: YAML with the judge's sections `model`, `decoding`, ...
        keys: key=value over that YAML.

    Returns:
        The verdicts, and the cost of the run in USD (None if it has no bill).
    """
    manifest = driver.run_extract(_config(rows, task, output, base, keys))
    cost = manifest.cost.usd if manifest.cost else None
    return read_verdicts(output), cost


def is_run(path: str) -> bool:
    """Return whether a path is the folder of a run."""
    return storage.exists(storage.join(storage.absolute(path), layout.RUN))


def answered(run: str) -> dict[str, AnsweredDocument]:
    """Return the documents that a run has answered, by id.

    Args:
        run: The folder of the run.

    Raises:
        ConfigError, InputError: If its input cannot be read.
    """
    root = storage.absolute(run)
    config = load_run(root, [])
    rows_by_id = {id: rows for id, rows in evaluation.read_answers(run).items() if rows}
    keys = {id: (rows[0]["source"], rows[0]["row"]) for id, rows in rows_by_id.items()}
    documents = documents_at(config, root, dict.fromkeys(keys.values()))
    category_column = config.input.category_column or "category"
    answers = {}
    for id, key in keys.items():
        if key not in documents:
            continue
        rows = rows_by_id[id]
        category = rows[0].get("category") or documents[key].fields.get(category_column)
        request, answer = _texts(config, documents[key], rows)
        answers[id] = AnsweredDocument(id, str(category or ""), request, answer, rows)
    return answers


def _texts(config: RunConfig, document: Document, rows: Rows) -> tuple[str, str]:
    """Return the request of a document, and its whole answer; of several samples the first."""
    if isinstance(config.task, GenerationConfig):
        return _conversation_texts(config.task, document, rows)
    lines = []
    for row in rows:
        for value in row_values(row):
            lines.append(f"{value.name}: {json.dumps(value.value, ensure_ascii=False)}")
    return text_in(document, config), "\n".join(lines)


def _conversation_texts(task: GenerationConfig, document: Document, rows: Rows) -> tuple[str, str]:
    """Return a conversation up to the first answer, and everything after it."""
    messages, prompts = conversation(document.fields.get(task.prompt_column), task)
    first_sample = min(row["sample"] for row in rows)
    texts = [
        row["text"]
        for row in sorted(rows, key=lambda row: row["turn"])
        if row["sample"] == first_sample
    ]
    request = [f"({message['role']}) {message['content']}" for message in messages]
    request.append(prompts[0])
    answer = [texts[0]]
    for prompt, text in zip(prompts[1:], texts[1:], strict=False):
        answer.append(f"(user) {prompt}\n\n(answer) {text}")
    return "\n\n".join(request), "\n\n".join(answer)


def _questions(
    run: str, ours: Mapping[str, AnsweredDocument], theirs: Mapping[str, AnsweredDocument] | None
) -> tuple[list[dict[str, str]], Task]:
    """Return the rows of the judge's run, and its task."""
    if theirs is not None:
        return pair_questions([(document, theirs[id]) for id, document in ours.items()])
    judged = load_run(storage.absolute(run), []).task
    if isinstance(judged, ExtractionConfig):
        return _value_questions(judged, ours)
    rows = []
    for document in ours.values():
        text = f"[request]\n{document.request}\n\n[answer]\n{document.answer}"
        rows.append({"id": document.id, "text": text})
    score = {"name": "score", "type": "integer", "minimum": 1, "maximum": 10}
    return rows, _task(_JUDGE_TEXT, {"answers": [score]})


def _value_questions(
    judged: ExtractionConfig, documents: Mapping[str, AnsweredDocument]
) -> tuple[list[dict[str, str]], Task]:
    """Return rows that ask for the class of each value, and their task."""
    attributes: dict[str, list[dict[str, Any]]] = {}
    for name, category in judged.categories.items():
        attributes[name] = [
            {
                "name": attribute.name,
                "description": attribute.description,
                "type": "enum",
                "values": CLASSES,
            }
            for attribute in category.attributes
        ]
    rows = []
    for document in documents.values():
        text = f"{document.request}\n\n[values that were extracted]\n{document.answer}"
        rows.append({"id": document.id, "category": document.category, "text": text})
    return rows, _task(_JUDGE_VALUES, attributes)


def pair_questions(
    pairs: Sequence[tuple[AnsweredDocument, AnsweredDocument]],
) -> tuple[list[dict[str, str]], Task]:
    """Return rows that ask which of two answers is better, in both orders, and their task.

    Args:
        pairs: The two answers to each request.
    """
    rows = []
    for pair in pairs:
        for order in _POINTS:
            a, b = pair if order == "AB" else pair[::-1]
            text = f"[request]\n{a.request}\n\n[answer A]\n{a.answer}\n\n[answer B]\n{b.answer}"
            rows.append({"id": f"{a.id} {order}", "text": text})
    better = {"name": "better", "type": "enum", "values": ["A", "B", "tie"]}
    return rows, _task(_JUDGE_PAIR, {"answers": [better]})


def _task(instruction: str, attributes_by_category: Mapping[str, Rows]) -> Task:
    """Return the section `task` of a judge's run, all of whose attributes are required."""
    categories = {}
    for name, attributes in attributes_by_category.items():
        categories[name] = {
            "attributes": [{**attribute, "required": True} for attribute in attributes]
        }
    return {
        "kind": "extraction",
        "instruction": instruction,
        "template": str(Path(__file__).with_suffix(".j2")),
        "categories": categories,
    }


def _config(
    rows: Sequence[dict[str, str]],
    task: Task,
    output: str,
    base: str | None,
    keys: Sequence[str],
) -> RunConfig:
    """Return the configuration of the judge's run; write its questions, if they are not there.

    Raises ConfigError if no model is named, or the folder holds other questions.
    """
    tree = read_tree(Path(base)) if base is not None else {}
    if not tree.get("model") and not any(key.startswith(("model=", "model.name=")) for key in keys):
        raise ConfigError(
            "name the judge: model.name=..., with model.endpoint.url=... for a server, or "
            "--judge YAML"
        )
    folder = storage.absolute(output)
    file = storage.join(folder, "questions.jsonl")
    tree["input"] = {
        "path": file,
        "text_columns": ["text"],
        "category_column": "category" if "category" in rows[0] else None,
    }
    tree["output"] = {"path": output}
    tree["task"] = task
    config = make_config(tree, list(keys))
    storage.configure(config.storage)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    questions = "".join(lines).encode()
    storage.make_folder(folder)
    if not storage.put_new(file, questions) and storage.read(file) != questions:
        raise ConfigError(
            f"{output}: holds questions about other answers; name another folder with --output"
        )
    return config


def read_verdicts(output: str) -> Verdicts:
    """Read the verdicts of a judge's run.

    Args:
        output: The folder of the run.
    """
    verdicts = {}
    for id, rows in evaluation.read_answers(output).items():
        if rows:
            verdicts[id] = {
                value.name: value.value if value.status == "ok" else None
                for value in row_values(rows[0])
            }
    return verdicts


def pair_verdicts(verdicts: Verdicts) -> dict[str, PairVerdict]:
    """Return the verdicts on pairs that have one in both orders, by document id.

    Args:
        verdicts: The verdicts by question, whose ids end with the order.
    """
    pairs = {}
    for id in dict.fromkeys(question[:-3] for question in verdicts):
        points = []
        for order, points_of in _POINTS.items():
            word = verdicts.get(f"{id} {order}", {}).get("better")
            points.append(points_of.get(word or ""))
        first, second = points
        if first is None or second is None:
            continue
        is_same = first == second
        pairs[id] = PairVerdict(first if is_same else 0, is_same)
    return pairs


def wins(better: int) -> list[float]:
    """Return a comparison as counts of wins, ties and losses."""
    return [float(better == 1), float(better == 0), float(better == -1)]


def _parts_of_values(
    verdicts: Mapping[str, str | None], classes: Mapping[str, str]
) -> dict[str, list[float]]:
    """Return the counts of the five classes of a document's values.

    `classes` has the classes by the labels: "as labelled" is how often the judge agrees with them,
    and of how many.
    """
    counts = Counter(verdicts.values())
    is_same = [
        verdicts[name] == label for name, label in classes.items() if verdicts.get(name) is not None
    ]
    return {
        "classes": [float(counts[name]) for name in CLASSES],
        "as labelled": [float(sum(is_same)), float(len(is_same))],
    }


def _classes_by_labels(
    run: str, documents: Mapping[str, AnsweredDocument], labels: str
) -> dict[str, dict[str, str]]:
    """Return the class of each value by the labels: document id -> attribute -> class."""
    names = evaluation.asked_attributes(run)
    classes: dict[str, dict[str, str]] = {}
    for id, gold in evaluation.read_labels(labels, "target").items():
        if id not in documents:
            continue
        document = documents[id]
        accepted = gold.get("accepted") or {}
        target = evaluation.flat_values(gold.get("target") or {})
        record = evaluation.flat_values(json.loads(document.rows[0]["record"]))
        classes[id] = {}
        for name, path in names.get(document.category, {}).items():
            if path in target:
                forms = accepted.get(path) or [target[path]]
                classes[id][name] = _CLASS_OF[outcome(record.get(path), forms)]
    return classes


def main(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run (its output.path)")],
    other: Annotated[
        str | None,
        typer.Argument(metavar="[OTHER]", help="A run to compare with, or labels of an extraction"),
    ] = None,
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys of the judge's run")
    ] = None,
    judge_yaml: Annotated[
        str | None, typer.Option("--judge", "-j", help="YAML with the judge's model, ...")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Of the judge's run; none: beside RUN")
    ] = None,
    documents: Annotated[
        int | None, typer.Option(min=1, help="How many, by chance; none: all")
    ] = None,
    export_to: Annotated[
        str | None, typer.Option("--export", help="Write answers of both, blind, for people")
    ] = None,
    apply_from: Annotated[str | None, typer.Option("--apply", help="That CSV, filled in")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Ask a model, or people, how good a run's answers are. The same command resumes."""
    if other is not None and "=" in other and not os.path.exists(other):
        keys = [other, *(keys or [])]
        other = None
    if output is None:
        output = f"{run.rstrip('/')}-judge"
        if other is not None:
            output += f"-{Path(other).stem}"
    try:
        if (export_to or apply_from) and (other is None or not is_run(other)):
            raise ConfigError("--export and --apply compare two runs: RUN OTHER")
        if export_to is not None:
            print(clean(export(run, str(other), export_to)))
            return
        if apply_from is not None:
            judgement = apply(apply_from, output)
        else:
            judgement = judge(run, other, output, judge_yaml, keys or [], documents)
    except UserError as error:
        raise SystemExit(clean(f"error: {error}")) from None
    if as_json:
        print(json.dumps(asdict(judgement), indent=1))
    else:
        print(clean(judgement.describe()))


if __name__ == "__main__":
    typer.run(main)
