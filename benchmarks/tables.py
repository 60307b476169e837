"""The papers' tables: make what a table needs, and write its rows into docs/quality.md.

    python -m benchmarks.tables --list
    python -m benchmarks.tables ippd-2-squad --data DATA_FOLDER
    python -m benchmarks.tables ippd-2-race --set model.name=MODEL     # every run with a key
    python -m benchmarks.tables apar-4 --judge model.name=MODEL        # who judges its texts

The same as make commands: `make table NAME=ippd-2-squad DATA=DATA_FOLDER`, with SET=... and
JUDGE=...

Trainings and runs that exist in --work are kept, so that the same command resumes. --limit takes
only the first documents of each file, to try a table; the page then says so. Without a judge the
columns of one stay empty.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Annotated, Any

import typer

from benchmarks import human_eval, judge, speedup
from benchmarks.table import machine
from raypd.config import ModelConfig
from raypd.config.yaml_file import parse
from raypd.errors import UserError
from raypd.evaluation import Measure, Score, evaluate, measures_of, read_answers
from raypd.models.load import load_tokenizer
from raypd.run import layout, read
from raypd.run.manifest import Manifest
from raypd.tasks.columns import row_values

_REGISTRY = Path(__file__).with_suffix(".yaml")
_PAGE = Path(__file__).parents[1] / "docs" / "quality.md"
# A folder that is complete has one of these files.
_DONE = (layout.MANIFEST, layout.TRAINING, "config.json")
_DATA_FILE = re.compile(r"\{data\}/([\w./]+(\[\d+:\d+\])?)")
_SECTION = re.compile(r"<!-- table (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)
_WIDTH = 140  # of the notes on the page
_MISSING = re.compile(r"<!-- missing -->\n.*?<!-- end -->\n", re.DOTALL)


class Maker:
    """Makes what tables need.

    Attributes:
        data: The folder of the data.
        work: The folder of what is made.
        limit: The number of documents of each file; None for all.
        keys: key=value of every run.
        judge: key=value of who judges texts; none if nobody does.
    """

    def __init__(
        self,
        data: Path,
        work: Path,
        limit: int | None,
        keys: Sequence[str] = (),
        judge: Sequence[str] = (),
    ) -> None:
        self.data = data
        self.work = work
        self.limit = limit
        self.keys = keys
        self.judge = judge

    def make(self, name: str, words: str) -> Path:
        """Run a command, unless its folder is complete.

        Args:
            name: The name of the folder.
            words: The command, in which {data}, {work} and {out} stand for folders.

        Returns:
            The folder of the command's output.

        Raises:
            SystemExit: If the command fails.
        """
        out = self.work / name
        if any((out / file).exists() for file in _DONE):
            return out
        if "{out}" not in words:
            words = f"{words} output.path={{out}}"
        words = _DATA_FILE.sub(lambda match: str(self.file(match[1])), words)
        command = words.replace("{out}", str(out)).replace("{work}", str(self.work))
        command = command.replace("{{", "{").replace("}}", "}")
        if not command.startswith("benchmarks."):
            command = f"raypd {command}"
        print(f"+ {command}", file=sys.stderr, flush=True)
        done = subprocess.run([sys.executable, "-m", *_split(command)])
        if done.returncode:
            raise SystemExit(
                f"{name}: its command ended with {done.returncode}; the same one goes on"
            )
        return out

    def file(self, name: str) -> Path:
        """Return a file of the data, or one with some of its lines.

        Args:
            name: The name of the file; `name[begin:end]` takes these lines.
        """
        name, _, span = name.removesuffix("]").partition("[")
        source = self.data / name
        if not source.is_file():
            raise SystemExit(f"{source}: no such file; --data names the folder of the data")
        if self.limit is None and not span:
            return source
        begin = 0
        end = sys.maxsize
        if span:
            begin, end = map(int, span.split(":"))
        if self.limit is not None:
            end = min(end, begin + self.limit)
        part = self.work / "data" / (f"{begin}-{end}" if span else "") / name
        part.parent.mkdir(parents=True, exist_ok=True)
        with source.open(encoding="utf-8") as lines:
            text = "".join(islice(lines, begin, end))
        if not part.exists() or part.read_text(encoding="utf-8") != text:
            part.write_text(text, encoding="utf-8")
        return part


def _split(command: str) -> list[str]:
    """Split a command into words; a value in braces, which may contain blanks, is one word."""
    joined = re.sub(r"\{[^}]*\}", lambda match: match[0].replace(" ", "\0"), command)
    return [word.replace("\0", " ") for word in shlex.split(joined)]


def figure(
    column: str, run: Path, first: Path, labels: Path | None, ids: set[str] | None = None
) -> str:
    """Return the cell of a run in a column; "" if there is none.

    Args:
        column: A measure of `raypd evaluate` or of a judge, a figure of the run, or the name of a
            counter, whose mean is taken.
        run: The folder of the run.
        first: The folder of the run that ratios are to.
        labels: The file of labels; None without labels.
        ids: The documents that count in columns of answers; None for all.
    """
    if column in _RUN_FIGURES:
        return _RUN_FIGURES[column](_manifest(run), _manifest(first))
    if column == "same answers":
        return "" if run == first else _same_answers(run, first)
    if column == "theoretical speedup":
        return "1" if run == first else _theoretical_speedup(run, first)
    if column == "pass@1":
        share, problems = human_eval.pass_at_1(str(run), str(labels))
        return f"{share:.3f} of {problems}"
    measures: list[Measure] = []
    if column in judge.METRICS:
        measures = _judged(run, ids)
    elif labels is not None:
        measures = evaluate(str(run), str(labels)).measures
    for measure in measures:
        if measure.name == column and not measure.of:
            return f"{measure.value:.3f} ({measure.low:.3f} to {measure.high:.3f})"
    if column in judge.METRICS:
        return ""
    return _answer_figure(column, run, ids)


def _manifest(run: Path) -> Manifest:
    return read.record(Manifest, str(run), layout.MANIFEST) or Manifest()


def _documents_per_second(manifest: Manifest, first: Manifest) -> str:
    return f"{_speed(manifest):.3g}"


def _times_the_first(manifest: Manifest, first: Manifest) -> str:
    return f"{_speed(manifest) / _speed(first):.2f}"


def _prefill_seconds(manifest: Manifest, first: Manifest) -> str:
    return f"{manifest.cost.seconds.get('prefill', 0.0):.0f}" if manifest.cost else ""


def _decode_seconds(manifest: Manifest, first: Manifest) -> str:
    return f"{manifest.cost.seconds.get('decode', 0.0):.0f}" if manifest.cost else ""


def _tokens_decoded(manifest: Manifest, first: Manifest) -> str:
    return f"{manifest.decode_tokens / max(1, manifest.documents):.1f}"


# Column -> a function of the manifests of a run and of the first run.
_RUN_FIGURES = {
    "documents/s": _documents_per_second,
    "x the first": _times_the_first,
    "prefill s": _prefill_seconds,
    "decode s": _decode_seconds,
    "tokens decoded": _tokens_decoded,
}
# The counters of columns that end with " saved".
_SAVED = {"cached saved": "max_cached_tokens", "attended saved": "attended_tokens"}


def _theoretical_speedup(run: Path, first: Path) -> str:
    answers = speedup.read_answers(str(run), False)
    baseline = speedup.read_answers(str(first), True)
    return f"{geometric_mean(speedup.speedups(answers, baseline)):.3f}"


def _answer_figure(column: str, run: Path, ids: set[str] | None) -> str:
    """Return the cell of a column that is computed from the rows of answers."""
    by_document = read_answers(str(run))
    rows = []
    for id, answers in by_document.items():
        if ids is None or id in ids:
            rows += answers
    if column == "tokens/s":
        # The length of answers differs between models, so documents/s cannot be compared.
        tokens = sum(row["tokens"] for row in rows) / len(by_document)
        return f"{_speed(_manifest(run)) * tokens:.3g}"
    if column == "tokens per answer":
        return f"{fmean(row['tokens'] for row in rows):.1f}"
    if column == "parallel":
        return f"{fmean((_counter(row, 'threads') or 0) > 1 for row in rows):.0%}"
    if column in _SAVED:
        name = _SAVED[column]
        ours = fmean(_counter(row, f"apar.{name}") or 0.0 for row in rows)
        flat = fmean(_counter(row, f"flattened.{name}") or 0.0 for row in rows)
        return f"{1 - ours / flat:.1%}"
    counts = []
    for row in rows:
        count = _counter(row, column)
        if count is not None:
            counts.append(count)
    return f"{fmean(counts):.2f}" if counts else ""


def _judged(run: Path, ids: set[str] | None) -> list[Measure]:
    """Return what a judge said of a run's texts; nothing if no judge was asked.

    `ids` are the documents that count; None for all.
    """
    output = f"{run}-judge"
    if not judge.is_run(output):
        return []
    scores = {}
    for id, parts in judge.parts_of_texts(judge.read_verdicts(output)).items():
        if ids is None or id in ids:
            scores[id] = Score("", parts)
    return measures_of(scores, judge.METRICS) if scores else []


def _speed(manifest: Manifest) -> float:
    """Return the documents per second of decoding.

    The start of Ray and the loading of the model, which dominate a short run, are left out.
    """
    phases = manifest.cost.seconds if manifest.cost else {}
    seconds = phases.get("prefill", 0.0) + phases.get("decode", 0.0)
    return manifest.documents / seconds if seconds else manifest.documents_per_second


def _same_answers(run: Path, first: Path) -> str:
    """Return the share of answers that are equal in both runs, letter for letter.

    Answers that were cut are included.
    """
    answers = _raw_answers(run)
    first_answers = _raw_answers(first)
    keys = answers.keys() & first_answers.keys()
    same = sum(answers[key] == first_answers[key] for key in keys)
    return f"{same / len(keys):.1%} of {len(keys):,}"


def _raw_answers(run: Path) -> dict[tuple[str, str], tuple[Any, str | None]]:
    """Return (value, raw text) by document and key of the value."""
    answers = {}
    for id, rows in read_answers(str(run)).items():
        for row in rows:
            for value in row_values(row):
                answers[id, value.key] = (value.value, value.raw)
    return answers


def _counter(row: dict[str, Any], name: str) -> float | None:
    """Return a counter of an answer, whose name may be nested; None if it has none."""
    tree: Any = json.loads(row.get("counters") or "{}")
    for key in name.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def section(name: str, table: dict[str, Any], maker: Maker, steps: dict[str, str]) -> str:
    """Make what a table needs, and return the table as Markdown.

    Args:
        name: The name of the table.
        table: Its entry in the registry.
        maker: Makes the runs.
        steps: The commands of the registry that tables may need, by name.
    """
    for step in table.get("needs", []):
        maker.make(step, steps[step])
    columns = table["columns"]
    lines = [_line(["", "paper", *columns]), "|---" * (2 + len(columns)) + "|"]
    for key, entry in table.get("sets", {}).items():
        lines.append(_line([key, entry["paper"], *_described(maker.file(entry["file"]))]))
    for key, entry in table.get("formulas", {}).items():
        lines.append(_formula_line(key, entry, maker))
    runs = _runs(name, table, maker)
    is_judged = bool(maker.judge) and "judged" in table
    if is_judged:
        _ask_judge(table["judged"], [run.folder for run in runs], maker)
    labels = maker.file(table["labels"]) if "labels" in table else None
    groups = _groups(table, maker)
    for run in runs:
        for group, ids in groups.items():
            cells = [figure(column, run.folder, run.first, labels, ids) for column in columns]
            paper = run.paper[group] if group else run.paper
            lines.append(_line([_row_name(run.name, group, ids), str(paper), *cells]))
    about = _about(name, maker, is_judged)
    note = [textwrap.fill(table["note"], _WIDTH), ""] if "note" in table else []
    return "\n".join([f"## {table['title']}", "", *note, about, "", *lines, ""])


def _line(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return " | ".join(["|" if not cells[0] else f"| {cells[0]}", *cells[1:]]) + " |"


def _row_name(name: str, group: str, ids: set[str] | None) -> str:
    if not group:
        return name
    count = f" ({len(ids)})" if ids else ""
    return f"{name}, {group}{count}"


def _formula_line(name: str, entry: dict[str, Any], maker: Maker) -> str:
    """Return the line of IPPD's ratios, computed from the lengths of texts in a file."""
    _, *lengths = _described(maker.file(entry["file"]))
    ratios = intra_prompt_ratios(*(float(length) for length in lengths))
    paper = ", ".join(f"{ratio:.2f}" for ratio in intra_prompt_ratios(*entry["paper"]))
    return _line([name, paper, *(f"{ratio:.2f}" for ratio in ratios)])


@dataclass(frozen=True)
class _Run:
    """A row of a table."""

    name: str
    folder: Path
    first: Path  # the folder of the run that ratios are to
    paper: Any  # the paper's row; by group where a table has categories


def _runs(name: str, table: dict[str, Any], maker: Maker) -> list[_Run]:
    """Make the runs of a table.

    A table may have its runs several times, with another number of sequences at a time; ratios are
    to the first run with the same number.
    """
    folder = "/".join([name, *map(_file, maker.keys)])
    runs = []
    for count in table.get("at_a_time", [None]):
        first: Path | None = None
        for key, entry in table.get("runs", {}).items():
            row = key
            words = [entry["run"]]
            if count is not None:
                row = f"{count}, {key}"
                words.append(f"engine.max_num_seqs={count}")
            output = maker.make(f"{folder}/{_file(row)}", " ".join([*words, *maker.keys]))
            first = first or output
            runs.append(_Run(row, output, first, entry["paper"]))
    return runs


def _ask_judge(judged: dict[str, Any], folders: Sequence[Path], maker: Maker) -> None:
    """Let a judge score the texts of runs, or compare them with those of the first run."""
    for folder in folders:
        other = None
        if judged["by"] == "pairs":
            other = str(folders[0])
        if judged["by"] == "scores" or folder != folders[0]:
            documents = judged.get("documents")
            judge.judge(str(folder), other, f"{folder}-judge", None, maker.judge, documents)


def _about(name: str, maker: Maker, is_judged: bool) -> str:
    """Return when, where and by which command a table was made."""
    documents = "all documents"
    command = f"make table NAME={name}"
    if maker.limit:
        documents = f"the first {maker.limit} documents of each file, to try it"
        command += f" LIMIT={maker.limit}"
    if maker.keys:
        command += f" SET='{' '.join(maker.keys)}'"
    if is_judged:
        command += f" JUDGE='{' '.join(maker.judge)}'"
    return f"{time.strftime('%Y-%m-%d')}; {machine()}; {documents}: `{command}`"


def intra_prompt_ratios(
    questions: float, context: float, question: float, answer: float
) -> tuple[float, float, float]:
    """Compute the ratios of IPPD's A.2, with one context per prompt.

    Args:
        questions: The questions per context.
        context: The tokens of a context.
        question: The tokens of a question.
        answer: The tokens of an answer.

    Returns:
        How many keys and values prefix caching reads for each one that IPPD reads, in prefill and
        in a decoding step; and how many products of attention IPPD's prefill computes for each one
        of prefix caching's.
    """
    alone = context + question
    stacked = context + questions * question
    written = answer / 2
    prefill = questions * alone / stacked
    decode = questions * (alone + written) / (stacked + questions * written)
    products = stacked**2 / (alone**2 + (questions - 1) * question * alone)
    return prefill, decode, products


def _read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _described(path: Path) -> list[str]:
    """Return what a file contains, as cells.

    These are the number of documents, and the attributes per category. Of questions they are the
    number of contexts, the questions per context, and the mean tokens of contexts, questions (with
    their choices) and answers by the embedded model's tokenizer.
    """
    documents = _read_rows(path)
    if "questions" not in documents[0]:
        attributes: defaultdict[str, set[str]] = defaultdict(set)
        for document in documents:
            attributes[document["category"]] |= set(document["target"])
        return [f"{len(documents):,}", f"{fmean(map(len, attributes.values())):.2f}"]
    contexts = [document["context"] for document in documents]
    questions = []
    answers = []
    for document in documents:
        for question in document["questions"]:
            choices = question.get("choices", [])
            questions.append("\n".join([question["question"], *choices]))
            if question["answers"]:
                answers.append("A" if choices else question["answers"][0])
    means = [len(questions) / len(documents)]
    tokenizer = load_tokenizer(ModelConfig())
    for texts in (contexts, questions, answers):
        means.append(fmean(len(tokenizer.encode(x, add_special_tokens=False)) for x in texts))
    return [f"{len(documents):,}", *(f"{mean:.2f}" for mean in means)]


def _groups(table: dict[str, Any], maker: Maker) -> dict[str, set[str] | None]:
    """Return the documents of each group of rows, by name; None for all documents.

    A table with `categories` has a group of all documents, one without those in `left_out`, and one
    per category. Other tables have a single group without a name.
    """
    if "categories" not in table:
        return {"": None}
    left_out = table["categories"]["left_out"]
    categories: defaultdict[str, set[str]] = defaultdict(set)
    remaining = set()
    for document in _read_rows(maker.file(table["categories"]["file"])):
        categories[document["category"]].add(document["id"])
        if document["category"] not in left_out:
            remaining.add(document["id"])
    groups: dict[str, set[str] | None] = {"all": None}
    groups[f"without {', '.join(left_out)}"] = remaining
    groups |= dict(sorted(categories.items()))
    return groups


def _file(name: str) -> str:
    """Return a name that can be a file's."""
    return re.sub(r"[^\w]+", "-", name)


def page(text: str, registry: dict[str, Any], new_sections: dict[str, str]) -> str:
    """Return the page with new sections in place of those that it had.

    What people have written before and after the tables stays.

    Args:
        text: The page as it is.
        registry: All tables.
        new_sections: The new sections by table.
    """
    sections = dict(_SECTION.findall(text)) | new_sections
    introduction, remarks = _written_parts(text)
    lines = [introduction.rstrip() + "\n"] if introduction else []
    missing = []
    for key, table in registry["tables"].items():
        if key in sections:
            lines.append(f"<!-- table {key} -->\n{sections[key]}<!-- end -->\n")
        else:
            missing.append(f"| `{key}`: {table['title']} | {table.get('why', 'not run yet')} |")
    lines.append("<!-- missing -->")
    if missing:
        lines += ["## Not made yet", "", "| table | why |", "|---|---|", *missing, ""]
    lines += ["## Cannot be made here", "", "| what | why |", "|---|---|"]
    lines += [f"| {key} | {reason} |" for key, reason in registry["missing"].items()]
    return "\n".join([*lines, "<!-- end -->", ""]) + remarks


def _written_parts(text: str) -> tuple[str, str]:
    """Return what people have written before the tables of a page, and what after them."""
    tables = [match.start() for match in _SECTION.finditer(text)]
    missing = _MISSING.search(text)
    if missing is None:
        return text[: min(tables, default=0)], ""
    return text[: min([*tables, missing.start()])], text[missing.end() :]


def main(
    name: Annotated[str | None, typer.Argument(help="A table; none: the list")] = None,
    data: Annotated[Path, typer.Option(help="Folder of the data")] = Path("data"),
    work: Annotated[Path, typer.Option(help="Folder of what is made")] = Path("runs/tables"),
    limit: Annotated[int | None, typer.Option(min=1, help="First documents of each file")] = None,
    keys: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Of every run: model.name=..."),
    ] = None,
    judge_keys: Annotated[
        list[str] | None,
        typer.Option("--judge", metavar="KEY=VALUE", help="Of who judges texts: model.name=..."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--list", help="List the tables, and bring the page up to the list")
    ] = False,
) -> None:
    """Make a table of a paper, and write it into docs/quality.md."""
    registry = parse(_REGISTRY.read_text(encoding="utf-8"))
    sections = {}
    if name is not None and not everything:
        if name not in registry["tables"]:
            raise SystemExit(f"{name}: no such table; choose from {', '.join(registry['tables'])}")
        folder = work if limit is None else work / f"first-{limit}"
        try:
            maker = Maker(data, folder.resolve(), limit, keys or [], judge_keys or [])
            sections[name] = section(name, registry["tables"][name], maker, registry["steps"])
        except UserError as error:
            raise SystemExit(f"error: {error}") from None
    before = _PAGE.read_text(encoding="utf-8") if _PAGE.exists() else ""
    text = page(before, registry, sections)
    _PAGE.write_text(text, encoding="utf-8")
    print(sections.get(str(name)) or text)


if __name__ == "__main__":
    typer.run(main)
