"""A model, or people, say how good a run's answers are (docs/judge.md).

    python -m benchmarks.judge RUN model.name=NAME model.endpoint.url=URL
    python -m benchmarks.judge RUN OTHER --export blind.csv

The judge's questions are a run of extraction whose attributes are verdicts, so that they are
resumed, priced and tried again as those of any run. An extraction: each value is of one of five
classes (HPD, appendix E). Texts: a score from 1 to 10, or which of two runs has the better answer,
asked in both orders; an answer wins where both orders say so.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import blind
from benchmarks.config import read_tree
from raypd import storage
from raypd.cluster import driver
from raypd.config import ExtractionConfig, GenerationConfig, RunConfig
from raypd.config.load import make_config
from raypd.errors import ConfigError, InputError, UserError
from raypd.evaluation import score
from raypd.evaluation.score import Evaluation, Measure, Metric, Score, mean, share
from raypd.report.review import documents_at
from raypd.report.texts import text_in
from raypd.run import layout
from raypd.run.load import load_run
from raypd.run.text import clean, counted, usd
from raypd.tasks.base import Document
from raypd.tasks.columns import row_values
from raypd.tasks.documents import conversation

CLASSES = ("correct", "incorrect", "missing", "correct null", "hallucination")
# An outcome -> its class.
_BY_LABELS = {score.VC: 0, score.VW: 1, score.VN: 2, score.NN: 3, score.NV: 4}
# Which answer is A -> its points.
_POINTS = {"AB": {"A": 1, "B": -1, "tie": 0}, "BA": {"A": -1, "B": 1, "tie": 0}}
_OF_VALUES = """\
You check values that a system extracted from a document. For each attribute below, decide from the document alone \
whether it states a value, and compare that with the value extracted, which stands behind the document.
- correct: the document clearly states a value, and the extracted one is right and complete, in whatever words.
- incorrect: the document clearly states a value, and another or an incomplete one was extracted.
- missing: the document clearly states a value, and null or nothing was extracted.
- correct null: the document states no value, and none was extracted: null, or a word such as "none".
- hallucination: the document states no value, and one was extracted."""  # noqa: E501
_OF_TEXT = (
    "You grade the answer to a request: whether it is right, helpful, to the point and complete."
)
_OF_PAIR = """\
You compare two answers, A and B, to the same request: which is more correct, helpful, relevant and complete. Neither \
their order nor their length counts. Say tie where neither is better."""  # noqa: E501
_PRECISION, _RECALL = share([0, 3], [0, 1, 3, 4]), share([0, 3], [0, 1, 2, 3])  # of CLASSES
METRICS: dict[str, Metric] = {
    "LLM-F1": ("classes", lambda sums: _f1(_PRECISION(sums), _RECALL(sums))),
    "LLM-P": ("classes", _PRECISION),
    "LLM-R": ("classes", _RECALL),
    "as labelled": ("as labelled", mean),
    "score of 10": ("judge", mean),
    "win rate": (
        "compared",
        lambda sums: (sums[..., 0] + sums[..., 1] / 2) / np.maximum(1, sums.sum(-1)),
    ),
    "(W+T)/(T+L)": ("compared", share([0, 1], [1, 2])),  # of wins, ties, losses
    "in both orders": ("both orders", mean),
    "as the judge": ("as the judge", mean),
}
# Question -> what is judged -> the verdict; None: unclear.
Verdicts = Mapping[str, Mapping[str, str | None]]


def _f1(precision: np.ndarray, recall: np.ndarray) -> np.ndarray:
    return 2 * precision * recall / np.maximum(1e-12, precision + recall)


@dataclass
class AnsweredDocument:
    """A document and what a run says to it. request: its text, the context, or the prompt."""

    id: str
    category: str
    request: str
    answer: str
    rows: list[dict[str, Any]]


@dataclass
class Judgement:
    """What a judge says of a run, or of two. verdicts: how often each was given; unclear: questions
    without one.
    """

    measures: list[Measure]
    verdicts: dict[str, int]
    unclear: int = 0
    output: str = ""
    usd: float | None = None

    def describe(self) -> str:
        """As a table, for the user."""
        lines = [score.describe(Evaluation(self.measures))]
        lines.append(", ".join(f"{verdict} {count:,}" for verdict, count in self.verdicts.items()))
        if self.unclear:
            lines.append(f"{counted(self.unclear, 'question')} without a verdict: left out")
        price = f" ({usd(self.usd)})" if self.usd else ""
        return "\n".join(
            [*lines, *([f"questions and verdicts: {self.output}{price}"] if self.output else [])]
        )


def judge(
    run: str,
    other: str | None,
    output: str,
    base: str | None,
    keys: Sequence[str],
    limit: int | None = None,
) -> Judgement:
    """Asks a model about a run's answers. other: a run to compare with, or labels of an extraction.

    limit: so many documents, by chance, the same in every call. base, keys: YAML with the judge's
    sections `model`, `decoding`, ..., and `key=value` over it. Raises ConfigError: no model is
    named, or `output` judges something else; InputError: nothing is answered; what `run_extract`
    raises.
    """
    ours = answered(run)
    theirs = answered(other) if other is not None and is_run(other) else None
    drawn = (
        sorted(ours, key=lambda id: hashlib.sha256(id.encode()).digest())
        if limit is not None
        else [*ours]
    )
    ours = {id: ours[id] for id in drawn if theirs is None or id in theirs}
    ours = dict(islice(ours.items(), limit))
    rows, task = _questions(run, ours, theirs)
    if not rows:
        raise InputError(
            f"{run}: no document is answered"
            + (f" there and in {other}" if theirs is not None else "")
        )
    verdicts, spent = ask(rows, task, output, base, keys)
    if "category" not in rows[0]:
        parts = parts_of_texts(verdicts)
    else:
        by_labels = _by_labels(run, ours, other) if other is not None else {}
        parts = {id: _of_values(said, by_labels.get(id, {})) for id, said in verdicts.items()}
    if not parts:
        raise InputError(
            f"{output}: no question has a verdict; `raypd errors {output}` says what failed"
        )
    said = Counter(
        verdict
        for values in verdicts.values()
        for verdict in values.values()
        if verdict is not None
    )
    unclear = (
        len(rows) - len(verdicts) + sum(None in values.values() for values in verdicts.values())
    )
    scores = {id: Score(ours[id].category, of) for id, of in parts.items()}
    return Judgement(
        score.measures_of(scores, METRICS), dict(said.most_common()), unclear, output, spent
    )


def parts_of_texts(verdicts: Verdicts) -> dict[str, dict[str, list[float]]]:
    """Document -> counts for `METRICS`: of its score, or of the comparison of its two answers."""
    graded = {id: said["score"] for id, said in verdicts.items() if said.get("score") is not None}
    if graded:
        return {id: {"judge": [float(of or 0), 1.0]} for id, of in graded.items()}
    pairs = pair_verdicts(verdicts).items()
    return {
        id: {"compared": wins(better), "both orders": [float(same), 1.0]}
        for id, (better, same) in pairs
    }


def export(run: str, other: str, file: str) -> str:
    """Writes what both runs answered, differently, for people; what to do with it.

    Raises InputError: there is none.
    """
    ours, theirs = answered(run), answered(other)
    both = [(document, theirs[id].answer) for id, document in ours.items() if id in theirs]
    pairs = [
        (d.id, d.category, d.request, d.answer, answer) for d, answer in both if d.answer != answer
    ]
    if not pairs:
        raise InputError(f"{run}, {other}: no document has an answer in both that differs")
    blind.write(pairs, file)
    return (
        f"{file}: {counted(len(pairs), 'pair')}\nnext: write 1, 2 or tie as `better`, then the "
        "same with --apply"
    )


def apply(file: str, judged: str) -> Judgement:
    """Wins of a CSV that was filled in; and how often people agree with the judge's run in the
    folder `judged`, if any.

    Raises InputError, with the line.
    """
    people, skipped = blind.read(file)
    by_judge = pair_verdicts(read_verdicts(judged)) if is_run(judged) else {}
    scores, said = {}, Counter[str]()
    for id, (category, better) in people.items():
        scores[id] = Score(category, {"compared": wins(better)})
        said[("RUN is better", "tie", "OTHER is better")[1 - better]] += 1
        if by_judge:
            same = id in by_judge and by_judge[id][0] == better
            scores[id].parts["as the judge"] = [float(same), float(id in by_judge)]
    return Judgement(score.measures_of(scores, METRICS), dict(said.most_common()), skipped)


def ask(
    rows: Sequence[dict[str, str]],
    task: dict[str, Any],
    output: str,
    base: str | None,
    keys: Sequence[str],
) -> tuple[Verdicts, float | None]:
    """The judge's run over rows of {id, category?, text}: what it says, and what it cost."""
    manifest = driver.run_extract(_config(rows, task, output, base, keys))
    return read_verdicts(output), manifest.cost.usd if manifest.cost else None


def is_run(path: str) -> bool:
    return storage.exists(storage.join(storage.absolute(path), layout.RUN))


def answered(run: str) -> dict[str, AnsweredDocument]:
    """Id -> document, of those that a run has answered.

    Raises ConfigError, InputError: its input cannot be read.
    """
    root = storage.absolute(run)
    config = load_run(root, [])
    rows = {id: rows for id, rows in score.read_answers(run).items() if rows}
    places = {id: (of[0]["source"], of[0]["row"]) for id, of in rows.items()}
    documents = documents_at(config, root, dict.fromkeys(places.values()))
    answers = {}
    for id in [id for id, place in places.items() if place in documents]:
        document, of = documents[places[id]], rows[id]
        category = of[0].get("category") or document.fields.get(
            config.input.category_column or "category"
        )
        answers[id] = AnsweredDocument(id, str(category or ""), *_texts(config, document, of), of)
    return answers


def _texts(config: RunConfig, document: Document, rows: list[dict[str, Any]]) -> tuple[str, str]:
    """What was asked, and all that was answered; of several samples the first."""
    if not isinstance(config.task, GenerationConfig):
        values = [value for row in rows for value in row_values(row)]
        lines = [f"{value.name}: {json.dumps(value.value, ensure_ascii=False)}" for value in values]
        return text_in(document, config), "\n".join(lines)
    turns, asked = conversation(document.fields.get(config.task.prompt_column), config.task)
    least = min(row["sample"] for row in rows)
    texts = [
        row["text"] for row in sorted(rows, key=lambda row: row["turn"]) if row["sample"] == least
    ]
    request = "\n\n".join([*(f"({turn['role']}) {turn['content']}" for turn in turns), asked[0]])
    later = [
        f"(user) {turn}\n\n(answer) {text}"
        for turn, text in zip(asked[1:], texts[1:], strict=False)
    ]
    return request, "\n\n".join([texts[0], *later])


def _questions(
    run: str, ours: Mapping[str, AnsweredDocument], theirs: Mapping[str, AnsweredDocument] | None
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """The rows of the judge's run, and its task."""
    if theirs is not None:
        return pair_questions([(document, theirs[id]) for id, document in ours.items()])
    judged = load_run(storage.absolute(run), []).task
    if not isinstance(judged, ExtractionConfig):
        task = _task(
            _OF_TEXT,
            {"answers": [{"name": "score", "type": "integer", "minimum": 1, "maximum": 10}]},
        )
        return [
            {"id": d.id, "text": f"[request]\n{d.request}\n\n[answer]\n{d.answer}"}
            for d in ours.values()
        ], task
    classes = {
        name: [
            {"name": a.name, "description": a.description, "type": "enum", "values": CLASSES}
            for a in of.attributes
        ]
        for name, of in judged.categories.items()
    }
    texts = [(d, f"{d.request}\n\n[values that were extracted]\n{d.answer}") for d in ours.values()]
    return [{"id": d.id, "category": d.category, "text": text} for d, text in texts], _task(
        _OF_VALUES, classes
    )


def pair_questions(
    pairs: Sequence[tuple[AnsweredDocument, AnsweredDocument]],
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Rows that ask which of two answers is better, in both orders, and their task."""
    rows = []
    for pair in pairs:
        for order, (a, b) in zip(_POINTS, (pair, pair[::-1]), strict=True):
            text = f"[request]\n{a.request}\n\n[answer A]\n{a.answer}\n\n[answer B]\n{b.answer}"
            rows.append({"id": f"{a.id} {order}", "text": text})
    return rows, _task(
        _OF_PAIR, {"answers": [{"name": "better", "type": "enum", "values": ["A", "B", "tie"]}]}
    )


def _task(instruction: str, attributes: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    categories = {
        name: {"attributes": [{**a, "required": True} for a in of]}
        for name, of in attributes.items()
    }
    return {
        "kind": "extraction",
        "instruction": instruction,
        "template": str(Path(__file__).with_suffix(".j2")),
        "categories": categories,
    }


def _config(
    rows: Sequence[dict[str, str]],
    task: dict[str, Any],
    output: str,
    base: str | None,
    keys: Sequence[str],
) -> RunConfig:
    """The judge's run; its questions are written, once. Raises ConfigError."""
    tree = read_tree(Path(base)) if base is not None else {}
    if not tree.get("model") and not any(key.startswith(("model=", "model.name=")) for key in keys):
        raise ConfigError(
            "name the judge: model.name=..., with model.endpoint.url=... for a server, or "
            "--judge YAML"
        )
    file = storage.join(storage.absolute(output), "questions.jsonl")
    source = {
        "path": file,
        "text_columns": ["text"],
        "category_column": "category" if "category" in rows[0] else None,
    }
    config = make_config(
        {**tree, "input": source, "output": {"path": output}, "task": task}, list(keys)
    )
    storage.configure(config.storage)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    storage.make_folder(storage.absolute(output))
    if not storage.put_new(file, text) and storage.read(file) != text:
        raise ConfigError(
            f"{output}: holds questions about other answers; name another folder with --output"
        )
    return config


def read_verdicts(output: str) -> Verdicts:
    """Of a judge's run."""
    return {
        id: {
            value.name: value.value if value.status == "ok" else None
            for value in row_values(rows[0])
        }
        for id, rows in score.read_answers(output).items()
        if rows
    }


def pair_verdicts(verdicts: Verdicts) -> dict[str, tuple[int, bool]]:
    """Document -> (1: ours is better, -1: theirs, 0: a tie; whether both orders say so), where both
    have a verdict.
    """
    pairs = {}
    for id in dict.fromkeys(question[:-3] for question in verdicts):
        said = [
            points.get(verdicts.get(f"{id} {order}", {}).get("better") or "")
            for order, points in _POINTS.items()
        ]
        if said[0] is not None and said[1] is not None:
            pairs[id] = (said[0] if said[0] == said[1] else 0, said[0] == said[1])
    return pairs


def wins(better: int) -> list[float]:
    """A comparison as counts of wins, ties and losses."""
    return [float(better == 1), float(better == 0), float(better == -1)]


def _of_values(
    said: Mapping[str, str | None], by_labels: Mapping[str, str]
) -> dict[str, list[float]]:
    """Counts of the five classes, and how often they are those by the labels, of how many."""
    counts = Counter(said.values())
    both = [said[name] == of for name, of in by_labels.items() if said.get(name) is not None]
    return {
        "classes": [float(counts[name]) for name in CLASSES],
        "as labelled": [float(sum(both)), float(len(both))],
    }


def _by_labels(
    run: str, documents: Mapping[str, AnsweredDocument], labels: str
) -> dict[str, dict[str, str]]:
    """Document -> attribute -> the class of its value by the labels."""
    names, classes = score.asked_attributes(run), {}
    for id, gold in [
        item for item in score.read_labels(labels, "target").items() if item[0] in documents
    ]:
        document, accepted = documents[id], gold.get("accepted") or {}
        target, record = map(
            score.flat_values, (gold.get("target") or {}, json.loads(document.rows[0]["record"]))
        )
        classes[document.id] = {
            name: CLASSES[
                _BY_LABELS[score.outcome(record.get(path), accepted.get(path) or [target[path]])]
            ]
            for name, path in names.get(document.category, {}).items()
            if path in target
        }
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
        keys, other = [other, *(keys or [])], None
    where = output or f"{run.rstrip('/')}-judge{f'-{Path(other).stem}' if other else ''}"
    try:
        if (export_to or apply_from) and (other is None or not is_run(other)):
            raise ConfigError("--export and --apply compare two runs: RUN OTHER")
        if export_to is not None:
            print(clean(export(run, str(other), export_to)))
            return
        if apply_from is not None:
            judgement = apply(apply_from, where)
        else:
            judgement = judge(run, other, where, judge_yaml, keys or [], documents)
    except UserError as error:
        raise SystemExit(clean(f"error: {error}")) from None
    print(json.dumps(asdict(judgement), indent=1) if as_json else clean(judgement.describe()))


if __name__ == "__main__":
    typer.run(main)
