"""Figures, speed and cost of two runs over the same documents, and a page of where their answers
differ.

python -m benchmarks.compare_runs RUN OTHER [--labels FILE] [--output PAGE]
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypd import storage
from raypd.errors import InputError, UserError
from raypd.estimation import agreement
from raypd.estimation.agreement import Agreement
from raypd.evaluation import score
from raypd.report import page, review
from raypd.report.texts import text_in
from raypd.run import layout, read, text
from raypd.run.load import load_record, load_run
from raypd.run.records import Manifest
from raypd.tasks.columns import row_values

Rows = list[dict[str, Any]]  # of a document
PAGE = "comparison.html"
_DOCUMENTS = 200  # that are shown


@dataclass
class DifferingDocument:
    """rows: what was asked, our answer, theirs, the label."""

    id: str
    category: str
    place: review.Place
    rows: list[list[str]]


@dataclass
class Comparison:
    """Two runs side by side. rows: a figure, of each run, and the difference. documents: most
    differences first.
    """

    root: str  # of the first
    names: list[str]
    rows: list[list[str]]
    agreement: Agreement
    note: str
    documents: list[DifferingDocument]

    def describe(self) -> str:
        """As a table, for the user."""
        cells = [["", *self.names, ""], *self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        return "\n".join([*lines, f"same answers: {self.agreement}", self.note])

    def write(self, path: str) -> None:
        """Raises ConfigError, InputError: the input cannot be read again; RunError: the page cannot
        be written.
        """
        config, shown = load_run(self.root, []), self.documents[:_DOCUMENTS]
        documents = review.documents_at(
            config, self.root, {document.place: document for document in shown}
        )
        texts = {place: text_in(of, config) for place, of in documents.items() if of.error is None}
        content: dict[str, Any] = {"comparison": self, "shown": shown, "texts": texts}
        filled = page.fill("comparison.html.j2", folders=[Path(__file__).parent], **content)
        page.put(path, filled.encode(), "the page ")


def compare(run: str, other: str, labels: str | None = None) -> Comparison:
    """Two runs, and with labels the figures of `raypd evaluate`.

    Raises ConfigError, InputError as `evaluate`.
    """
    roots = [storage.absolute(path) for path in (run, other)]
    ours, theirs = (
        {id: rows for id, rows in score.read_answers(root).items() if rows} for root in roots
    )
    both = [id for id in ours if id in theirs]
    if not both:
        raise InputError(
            f"{run}, {other}: no document is answered in both; ids are compared as text"
        )
    rows, targets = _figures(*roots), {}
    if labels is not None:
        targets = {
            id: gold.get("target") or {} for id, gold in score.read_labels(labels, "target").items()
        }
        for pair in score.evaluate(run, labels, other).differences:
            off = f"{pair.ours - pair.theirs:+.3f} [{pair.low:+.3f} to {pair.high:+.3f}]"
            rows.append([pair.name, f"{pair.ours:.3f}", f"{pair.theirs:.3f}", off])
    attributes, documents = score.asked_attributes(run), []
    for id in both:
        first = ours[id][0]
        category = str(first.get("category") or "")
        labelled = score.flat_values(targets.get(id, {}))
        cells = _differences(ours[id], theirs[id], attributes.get(category, {}), labelled)
        if cells:
            documents.append(
                DifferingDocument(id, category, (first["source"], int(first["row"])), cells)
            )
    documents.sort(key=lambda document: -len(document.rows))
    same = agreement.compare(
        *([agreement.normal_values(side[id]) for id in both] for side in (theirs, ours))
    )
    names = [run, other]
    alone = [
        f"{len(side) - len(both):,} by {name} alone"
        for side, name in zip((ours, theirs), names, strict=True)
    ]
    note = ", ".join([f"{text.counted(len(documents), 'document')} answered differently", *alone])
    return Comparison(roots[0], names, rows, same, note, documents)


def _figures(*roots: str) -> list[list[str]]:
    """What the runs were made with, took and cost."""
    columns = []
    for root in roots:
        config, totals = (
            load_record(root).config,
            read.record(Manifest, root, layout.MANIFEST) or Manifest(),
        )
        count = totals.documents or 1
        columns.append(
            {
                "model": config["model"]["name"],
                "adapter": config["model"].get("adapter"),
                "method": config["decoding"]["method"],
                "documents": totals.documents,
                "failed": totals.failed,
                "documents/s": totals.documents_per_second,
                "tokens read a document": totals.prefill_tokens / count,
                "tokens decoded a document": totals.decode_tokens / count,
                "USD for 1,000 documents": totals.cost.usd_per_1000_documents
                if totals.cost
                else None,
            }
        )
    rows = []
    for name, ours in columns[0].items():
        theirs = columns[1][name]
        if isinstance(ours, (int, float)) and isinstance(theirs, (int, float)):
            ratio = f"x {ours / theirs:.2f}" if theirs else ""
            rows.append([name, text.number(ours), text.number(theirs), ratio])
        else:
            rows.append([name, _written(ours), _written(theirs), ""])
    return rows


def _written(value: Any) -> str:
    """A value as it is, nothing rounded."""
    if value is None:
        return text.NONE
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _differences(
    ours: Rows, theirs: Rows, paths: dict[str, str], target: dict[str, Any]
) -> list[list[str]]:
    """What was asked, our answer, theirs and the label, where they are not the same. paths: names
    in the label.
    """
    values, others = (
        {value.key: value for row in rows for value in row_values(row)} for rows in (ours, theirs)
    )
    cells = []
    for key in dict.fromkeys([*values, *others]):
        pair = [side[key].value if key in side else None for side in (values, others)]
        if agreement.normal(pair[0]) != agreement.normal(pair[1]):
            name = (values.get(key) or others[key]).name
            cells.append([name or key, *map(_written, [*pair, target.get(paths.get(name, name))])])
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_runs", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("run")
    parser.add_argument("other")
    parser.add_argument("--labels", help="JSON lines, as of `raypd evaluate`: figures of both")
    parser.add_argument("--output", help="the page; none: in RUN")
    given = parser.parse_args()
    try:
        comparison = compare(given.run, given.other, given.labels)
        where = storage.absolute(given.output or storage.join(given.run, PAGE))
        comparison.write(where)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(text.clean(f"{comparison.describe()}\npage: {where}"))


if __name__ == "__main__":
    main()
