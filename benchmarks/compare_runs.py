"""Compare figures, speed and cost of two runs over the same documents.

python -m benchmarks.compare_runs RUN OTHER [--labels FILE] [--output PAGE]

It also writes a page of the documents whose answers differ.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypd import evaluation, storage, text
from raypd.errors import InputError, UserError
from raypd.estimation import agreement
from raypd.estimation.agreement import Agreement
from raypd.report import page, review
from raypd.report.texts import text_in
from raypd.run import layout, read
from raypd.run.load import load_record, load_run
from raypd.run.manifest import Manifest
from raypd.tasks.columns import row_values

Rows = list[dict[str, Any]]  # of one document
PAGE = "comparison.html"
_MAX_DOCUMENTS = 200  # shown on the page


@dataclass
class DifferingDocument:
    """A document with different answers.

    `position` is its source and row. `rows` has the attribute, our answer, theirs, and the label.
    """

    id: str
    category: str
    position: review.Position
    rows: list[list[str]]


@dataclass
class Comparison:
    """Two runs side by side."""

    root: str  # folder of the first run
    names: list[str]
    rows: list[list[str]]  # name of a figure, its value in each run, and the difference
    agreement: Agreement
    note: str
    documents: list[DifferingDocument]  # those with the most differences first

    def describe(self) -> str:
        """Return the comparison as a table for the terminal."""
        rows = [["", *self.names, ""], *self.rows]
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, f"same answers: {self.agreement}", self.note])

    def write(self, path: str) -> None:
        """Write the page.

        Args:
            path: The path of the page.

        Raises:
            ConfigError, InputError: If the input cannot be read again.
            RunError: If the page cannot be written.
        """
        config = load_run(self.root, [])
        shown = self.documents[:_MAX_DOCUMENTS]
        by_position = {document.position: document for document in shown}
        texts = {}
        for position, document in review.documents_at(config, self.root, by_position).items():
            if document.error is None:
                texts[position] = text_in(document, config)
        content: dict[str, Any] = {"comparison": self, "shown": shown, "texts": texts}
        html = page.fill("comparison.html.j2", folders=[Path(__file__).parent], **content)
        page.put(path, html.encode(), "the page ")


def compare(run: str, other: str, labels: str | None = None) -> Comparison:
    """Compare two runs.

    Args:
        run: The folder of a run.
        other: The folder of another.
        labels: A file of labels, for the figures of `raypd evaluate`; None to leave them out.

    Raises:
        ConfigError, InputError: If a run or the labels cannot be read, or no document is in both.
    """
    roots = [storage.absolute(path) for path in (run, other)]
    ours = _answered(roots[0])
    theirs = _answered(roots[1])
    common = [id for id in ours if id in theirs]
    if not common:
        raise InputError(
            f"{run}, {other}: no document is answered in both; ids are compared as text"
        )
    rows = _figures(*roots)
    targets: dict[str, Any] = {}
    if labels is not None:
        for id, gold in evaluation.read_labels(labels, "target").items():
            targets[id] = gold.get("target") or {}
        rows += _scores(run, other, labels)
    attributes = evaluation.asked_attributes(run)
    documents = []
    for id in common:
        first = ours[id][0]
        category = str(first.get("category") or "")
        target = evaluation.flat_values(targets.get(id, {}))
        cells = _differences(ours[id], theirs[id], attributes.get(category, {}), target)
        if cells:
            position = (first["source"], int(first["row"]))
            documents.append(DifferingDocument(id, category, position, cells))
    documents.sort(key=lambda document: -len(document.rows))
    same = agreement.compare(
        [agreement.normal_values(theirs[id]) for id in common],
        [agreement.normal_values(ours[id]) for id in common],
    )
    note = ", ".join(
        [
            f"{text.counted(len(documents), 'document')} answered differently",
            f"{len(ours) - len(common):,} by {run} alone",
            f"{len(theirs) - len(common):,} by {other} alone",
        ]
    )
    return Comparison(roots[0], [run, other], rows, same, note, documents)


def _answered(root: str) -> dict[str, Rows]:
    """Return the rows of the documents that a run has answered, by id."""
    return {id: rows for id, rows in evaluation.read_answers(root).items() if rows}


def _scores(run: str, other: str, labels: str) -> list[list[str]]:
    """Return the rows of the figures that both runs have against labels."""
    rows = []
    for pair in evaluation.evaluate(run, labels, other).differences:
        difference = f"{pair.ours - pair.theirs:+.3f} [{pair.low:+.3f} to {pair.high:+.3f}]"
        rows.append([pair.name, f"{pair.ours:.3f}", f"{pair.theirs:.3f}", difference])
    return rows


def _figures(run: str, other: str) -> list[list[str]]:
    """Return the rows of what the runs were made with, took and cost."""
    rows = []
    theirs = _facts(other)
    for name, value in _facts(run).items():
        other_value = theirs[name]
        if isinstance(value, (int, float)) and isinstance(other_value, (int, float)):
            ratio = f"x {value / other_value:.2f}" if other_value else ""
            rows.append([name, text.number(value), text.number(other_value), ratio])
        else:
            rows.append([name, _written(value), _written(other_value), ""])
    return rows


def _facts(root: str) -> dict[str, Any]:
    config = load_record(root).config
    manifest = read.record(Manifest, root, layout.MANIFEST) or Manifest()
    documents = manifest.documents or 1
    return {
        "model": config["model"]["name"],
        "adapter": config["model"].get("adapter"),
        "method": config["decoding"]["method"],
        "documents": manifest.documents,
        "failed": manifest.failed,
        "documents/s": manifest.documents_per_second,
        "tokens read a document": manifest.prefill_tokens / documents,
        "tokens decoded a document": manifest.decode_tokens / documents,
        "USD for 1,000 documents": (
            manifest.cost.usd_per_1000_documents if manifest.cost else None
        ),
    }


def _written(value: Any) -> str:
    """Return a value as it is, with nothing rounded."""
    if value is None:
        return text.NONE
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _differences(
    ours: Rows, theirs: Rows, paths: dict[str, str], target: dict[str, Any]
) -> list[list[str]]:
    """Return the attribute, our answer, theirs and the label, where the answers differ.

    `paths` has the names of attributes in the label.
    """
    our_values = {value.key: value for row in ours for value in row_values(row)}
    their_values = {value.key: value for row in theirs for value in row_values(row)}
    cells = []
    for key in dict.fromkeys([*our_values, *their_values]):
        value = our_values[key].value if key in our_values else None
        other_value = their_values[key].value if key in their_values else None
        if agreement.normal(value) == agreement.normal(other_value):
            continue
        name = (our_values.get(key) or their_values[key]).name
        label = target.get(paths.get(name, name))
        cells.append([name or key, _written(value), _written(other_value), _written(label)])
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_runs", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("run")
    parser.add_argument("other")
    parser.add_argument("--labels", help="JSON lines, as of `raypd evaluate`: figures of both")
    parser.add_argument("--output", help="the page; none: in RUN")
    arguments = parser.parse_args()
    try:
        comparison = compare(arguments.run, arguments.other, arguments.labels)
        path = storage.absolute(arguments.output or storage.join(arguments.run, PAGE))
        comparison.write(path)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(text.clean(f"{comparison.describe()}\npage: {path}"))


if __name__ == "__main__":
    main()
