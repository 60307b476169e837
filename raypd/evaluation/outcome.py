"""Compares an answer with its label: the answer may be a value, a question's answer, or a text."""

import json
import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from raypd.evaluation.labels import Row

# The outcomes of a value, as in the literature. They index the counts of `parts_of_record`.
# A correct value.
VC = 0
# A wrong value.
VW = 1
# A value although the label is null.
NV = 2
# No value although the label has one.
VN = 3
# No value, and the label is null.
NN = 4
OUTCOMES = (VC, VW, NV, VN, NN)


def outcome(answer: Any, forms: Sequence[Any], tolerance: float = 0.0, fold: bool = True) -> int:
    """Compare a value with its label.

    Args:
        answer: The value; None if there is none.
        forms: All correct forms of the label.
        tolerance: The share by which a number may differ from its label.
        fold: Whether case is ignored. White space is always ignored.

    Returns:
        One of OUTCOMES.
    """
    accepted = {_comparable(form, fold) for form in forms} - {""}
    text = _comparable(answer, fold)
    if not accepted:
        return NV if text else NN
    if not text:
        return VN
    if text in accepted:
        return VC
    if _is_number(answer):
        for form in forms:
            if _is_number(form) and abs(answer - form) <= tolerance * abs(form):
                return VC
    return VW


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _comparable(value: Any, fold: bool) -> str:
    """Return a text that is equal for equal values; "" for null."""
    if value is None:
        return ""
    if isinstance(value, dict):
        # The cells of a row may be in any order, and a null is equivalent to a missing cell.
        texts = {_comparable(name, fold): _comparable(cell, fold) for name, cell in value.items()}
        cells = {name: text for name, text in texts.items() if text}
        return json.dumps(cells, sort_keys=True)
    if isinstance(value, list):
        return json.dumps([_comparable(item, fold) for item in value])
    if isinstance(value, str):
        text = value
    elif isinstance(value, float):
        text = f"{value:.15g}"
    else:
        text = json.dumps(value)
    if fold:
        text = text.casefold()
    return " ".join(text.split())


def parts_of_record(
    record: Row, target: Row, labels: Row, tolerance: float
) -> dict[str, list[float]]:
    """Count the outcomes of a document's values.

    Args:
        record: The values of the answer by name.
        target: The labels by name.
        labels: The document's labels, with `scored` and `accepted` if it has them.
        tolerance: The share by which a number may differ from its label.

    Returns:
        The number of each outcome: `strict` over all labels, `scored` over the names in `scored`
        and with every accepted form, and `scored exact`, which is the same with case compared.
    """
    scored = labels.get("scored")
    accepted = labels.get("accepted") or {}
    strict = [0.0] * len(OUTCOMES)
    loose = [0.0] * len(OUTCOMES)
    exact = [0.0] * len(OUTCOMES)
    for name, label in target.items():
        value = record.get(name)
        strict[outcome(value, [label], tolerance)] += 1
        if scored is None or name in scored:
            forms = accepted.get(name) or [label]
            loose[outcome(value, forms, tolerance)] += 1
            exact[outcome(value, forms, tolerance, fold=False)] += 1
    return {"strict": strict, "scored": loose, "scored exact": exact}


def parts_of_questions(rows: list[Row], questions: list[Row]) -> dict[str, list[float]]:
    """Score the answers to a document's questions; a failed question is wrong.

    Args:
        rows: The rows that answer the document.
        questions: The labelled questions.

    Returns:
        (sum, count) of `exact match` and `token F1` over open questions, and of `accuracy` over
        questions with choices.
    """
    row_by_question = {row["question_id"]: row for row in rows}
    exact = [0.0, 0.0]
    overlap = [0.0, 0.0]
    accuracy = [0.0, 0.0]
    for number, question in enumerate(questions):
        row = row_by_question.get(str(question.get("id", number)))
        if question.get("choices"):
            accuracy[0] += row is not None and _has_right_choices(row, question)
            accuracy[1] += 1
            continue
        exact[1] += 1
        overlap[1] += 1
        if row is not None:
            answer = row["answer"] or ""
            answers = question["answers"] or [""]
            exact[0] += max(_squad(answer) == _squad(gold) for gold in answers)
            overlap[0] += max(token_f1(answer, gold) for gold in answers)
    return {"exact match": exact, "token F1": overlap, "accuracy": accuracy}


def _has_right_choices(row: Row, question: Row) -> bool:
    """Return whether a row names a correct choice; for a multi-select, exactly all correct ones."""
    if not question.get("multi_select"):
        return row["choice_index"] in question["answer_idx"]
    # The answer is written like "B, D" or "BD".
    letters = "".join(re.findall(r"\b[A-Z]+\b", row["answer"] or ""))
    chosen = {string.ascii_uppercase.index(letter) for letter in letters}
    return chosen == set(question["answer_idx"])


def _squad(text: str) -> str:
    """Return a text in the form in which SQuAD compares it.

    It is in lower case, without punctuation, articles and extra white space.
    """
    bare = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def token_f1(answer: str, gold: str) -> float:
    """Return the F1 over the words of two texts, as SQuAD computes it."""
    answer_words = _squad(answer).split()
    gold_words = _squad(gold).split()
    if not answer_words or not gold_words:
        return float(answer_words == gold_words)
    common = (Counter(answer_words) & Counter(gold_words)).total()
    return 2 * common / (len(answer_words) + len(gold_words))


def parts_of_texts(rows: list[Row], labels: Row) -> dict[str, list[float]]:
    """Score texts against the reference of their turn, by ROUGE-L.

    Args:
        rows: The rows that answer the document: one text per turn and sample.
        labels: The document's labels; `reference` is a text, or a list with a text per turn.

    Returns:
        (sum, count) of ROUGE-L over texts that have a reference.
    """
    references = labels["reference"]
    if isinstance(references, str):
        references = [references]
    total = 0.0
    count = 0
    for row in rows:
        reference = references[row["turn"]] if row["turn"] < len(references) else None
        if reference:
            total += _rouge().score(reference, row["text"])["rougeL"].fmeasure
            count += 1
    return {"ROUGE-L": [total, max(1.0, count)]}


@cache
def _rouge() -> Any:
    # The import takes a second.
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)
