"""The papers' tables: the trainings and runs that one needs, and its rows beside the paper's, in
docs/quality.md.

    python -m benchmarks.tables --list python -m benchmarks.tables ippd-2-squad --data DATA_FOLDER
    # make table NAME=ippd-2-squad DATA=DATA_FOLDER python -m benchmarks.tables ippd-2-race --set
    model.name=MODEL       # SET=model.name=MODEL: every run with a key python -m benchmarks.tables
    apar-4 --judge model.name=MODEL          # JUDGE=model.name=MODEL: who judges its texts

What exists in --work is kept; the same command goes on where it was cut off. --limit takes the
first documents of each file alone, to try a table; the page then says so. Without a judge the
columns of one stay empty.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
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
from raypd.evaluation.score import Measure, Score, evaluate, measures_of, read_answers
from raypd.models.load import load_tokenizer
from raypd.run import layout, read
from raypd.run.records import Manifest
from raypd.tasks.columns import row_values

_REGISTRY, _PAGE = (
    Path(__file__).with_suffix(".yaml"),
    Path(__file__).parents[1] / "docs" / "quality.md",
)
# One of them is in a folder that is whole.
_DONE = (layout.MANIFEST, layout.TRAINING, "config.json")
_SECTION = re.compile(r"<!-- table (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)
_HEAD = """# The papers' tables

See the papers' tables as they come out here, each beside the paper's row, and make them: `make table NAME=...
DATA=...`, trainings and all, writes this page. The model is SmolLM2-135M, or what a table's command names
(Qwen2.5-Coder in 4 bits, by `python -m benchmarks.gguf`): both are smaller than any of the papers, so compare rows.

Where the methods lose here. HPD: stacked documents that see each other, as the paper's do, are six points of F1 behind
isolated ones (raypd's default) and no faster, since the instruction is computed once either way. IPPD: against a prompt
a question whose context is cached it gains a fifth at most (on SQuAD the paper's loses to prefix caching), and in
bfloat16 a quarter of the answers differ on SQuAD, of an untrained model that seldom ends by itself, and 7% on RACE,
where accuracy stays the same. APAR: nothing is gained where nothing is parallel (coding, math), and in MT bench's
extraction its threads hold more in the cache than the flat text; one text at a time it is 1.6 times as fast as the
plain model, but Medusa's heads, trained for half an hour, draft 9 tokens for half a token more a pass, and on two cores
slow both down (0.8 of the plain model, with APAR 1.2). SPACE: its masks cost arithmetic, of which two cores
have none to spare: one text at a time (human-eval) two masks are best (1.9 times; the paper's five 1.2), four at a
time (MT bench) one (1.5), from eight on none pays. In bfloat16 a quarter of the texts differ, and trained with masks
the model is two points of ROUGE-L below one trained without (0.190, 0.210; the intervals overlap). PASTA: two
preference rounds over 50 prompts, six steps each, judged by ROUGE-L, change neither speed nor quality; predicted
lengths are as good as fixed ones, and as the oracle's.
"""  # noqa: E501


class Maker:
    """Makes what a table needs. limit: documents of each file; None: all. keys: of every run;
    judge: of who judges.
    """

    def __init__(
        self,
        data: Path,
        work: Path,
        limit: int | None,
        keys: Sequence[str] = (),
        judge: Sequence[str] = (),
    ) -> None:
        self.data, self.work, self.limit, self.keys, self.judge = data, work, limit, keys, judge

    def make(self, name: str, words: str) -> Path:
        """The folder of a command's output; it is run where that is not whole yet.

        Raises SystemExit as it ends.
        """
        out = self.work / name
        if any((out / file).exists() for file in _DONE):
            return out
        words = words if "{out}" in words else f"{words} output.path={{out}}"
        words = re.sub(
            r"\{data\}/([\w./]+(\[\d+:\d+\])?)", lambda match: str(self.file(match[1])), words
        )
        command = words.replace("{out}", str(out)).replace("{work}", str(self.work))
        command = command if command.startswith("benchmarks.") else f"raypd {command}"
        print(f"+ {command}", file=sys.stderr, flush=True)
        done = subprocess.run(
            [sys.executable, "-m", *_split(command.replace("{{", "{").replace("}}", "}"))]
        )
        if done.returncode:
            raise SystemExit(
                f"{name}: its command ended with {done.returncode}; the same one goes on"
            )
        return out

    def file(self, name: str) -> Path:
        """A file of the data, or some of its lines: the first, or those that `name[begin:end]`
        says.
        """
        name, _, span = name.removesuffix("]").partition("[")
        begin, end = map(int, span.split(":")) if span else (0, None)
        whole = self.data / name
        if not whole.is_file():
            raise SystemExit(f"{whole}: no such file; --data names the folder of the data")
        if self.limit is None and not span:
            return whole
        if self.limit is not None:
            end = min(begin + self.limit, end or sys.maxsize)
        head = self.work / "data" / (f"{begin}-{end}" if span else "") / name
        head.parent.mkdir(parents=True, exist_ok=True)
        with whole.open(encoding="utf-8") as lines:
            text = "".join(islice(lines, begin, end))
        if not head.exists() or head.read_text(encoding="utf-8") != text:
            head.write_text(text, encoding="utf-8")
        return head


def _split(command: str) -> list[str]:
    """Words of a command; a value in braces, which may hold blanks, is one."""
    return [
        word.replace("\0", " ")
        for word in shlex.split(re.sub(r"\{[^}]*\}", lambda m: m[0].replace(" ", "\0"), command))
    ]


def figure(
    column: str, run: Path, first: Path, labels: Path | None, among: set[str] | None = None
) -> str:
    """What a run has in a column: a measure of `raypd evaluate`, or of the run itself, or the mean
    of a counter.

    among: the documents that count, where a column is of answers; None: all.
    """
    manifest, before = (
        read.record(Manifest, str(folder), layout.MANIFEST) or Manifest() for folder in (run, first)
    )
    if column == "documents/s":
        return f"{_pace(manifest):.3g}"
    if column == "x the first":
        return f"{_pace(manifest) / _pace(before):.2f}"
    if column in ("prefill s", "decode s"):
        return f"{manifest.cost.seconds.get(column[:-2], 0.0):.0f}" if manifest.cost else ""
    if column == "tokens decoded":
        return f"{manifest.decode_tokens / max(1, manifest.documents):.1f}"
    if column == "same answers":
        return "" if run == first else _same(run, first)
    if column == "theoretical speedup":
        if run == first:
            return "1"
        answers = speedup.read_answers(str(run), False), speedup.read_answers(str(first), True)
        return f"{geometric_mean(speedup.speedups(*answers)):.3f}"
    if column == "pass@1":
        share, problems = human_eval.pass_at_1(str(run), str(labels))
        return f"{share:.3f} of {problems}"
    if column in judge.METRICS:
        measures = _judged(run, among)
    else:
        measures = evaluate(str(run), str(labels)).measures if labels is not None else []
    for measure in measures:
        if (measure.name, measure.of) == (column, ""):
            return f"{measure.value:.3f} ({measure.low:.3f} to {measure.high:.3f})"
    if column in judge.METRICS:
        return ""
    by_document = read_answers(str(run))
    rows = [row for id in by_document if among is None or id in among for row in by_document[id]]
    # An answer's length is its model's, so that documents/s do not compare.
    if column == "tokens/s":
        return f"{_pace(manifest) * sum(row['tokens'] for row in rows) / len(by_document):.3g}"
    if column == "tokens an answer":
        return f"{fmean(row['tokens'] for row in rows):.1f}"
    if column == "parallel":
        return f"{fmean((_counter(row, 'threads') or 0) > 1 for row in rows):.0%}"
    if column.endswith(" saved"):
        name = {"cached": "max_cached_tokens", "attended": "attended_tokens"}[column.split()[0]]
        ours, flat = (
            fmean(_counter(row, f"{way}.{name}") or 0.0 for row in rows)
            for way in ("apar", "flattened")
        )
        return f"{1 - ours / flat:.1%}"
    counts = [count for row in rows if (count := _counter(row, column)) is not None]
    return f"{fmean(counts):.2f}" if counts else ""


def _judged(run: Path, among: set[str] | None) -> list[Measure]:
    """What a judge said of a run's texts, of some documents (None: all); none where no judge was
    asked.
    """
    output = f"{run}-judge"
    if not judge.is_run(output):
        return []
    parts = judge.parts_of_texts(judge.read_verdicts(output))
    scores = {id: Score("", of) for id, of in parts.items() if among is None or id in among}
    return measures_of(scores, judge.METRICS) if scores else []


def _pace(manifest: Manifest) -> float:
    """Documents a second of decoding: the start of Ray and the model are left out, which a short
    run is full of.
    """
    spent = manifest.cost.seconds if manifest.cost else {}
    seconds = spent.get("prefill", 0.0) + spent.get("decode", 0.0)
    return manifest.documents / seconds if seconds else manifest.documents_per_second


def _same(run: Path, first: Path) -> str:
    """Answers that are the same as the first run's, letter for letter, those that were cut
    included.
    """
    sides = []
    for folder in (run, first):
        side: dict[tuple[str, str], tuple[str | None, str | None]] = {}
        for key, rows in read_answers(str(folder)).items():
            side |= {
                (key, value.key): (value.value, value.raw)
                for row in rows
                for value in row_values(row)
            }
        sides.append(side)
    keys = sides[0].keys() & sides[1].keys()
    return f"{sum(sides[0][key] == sides[1][key] for key in keys) / len(keys):.1%} of {len(keys):,}"


def _counter(row: dict[str, Any], name: str) -> float | None:
    tree: Any = json.loads(row.get("counters") or "{}")
    for key in name.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def section(name: str, table: dict[str, Any], maker: Maker, steps: dict[str, str]) -> str:
    """A table as Markdown, after all that it needs was made."""
    for step in table.get("needs", []):
        maker.make(step, steps[step])
    lines = [
        "| | paper | " + " | ".join(table["columns"]) + " |",
        "|---" * (2 + len(table["columns"])) + "|",
    ]
    for key, of in table.get("sets", {}).items():
        lines.append(
            "| " + " | ".join([key, of["paper"], *_described(maker.file(of["file"]))]) + " |"
        )
    for key, of in table.get("formulas", {}).items():
        lengths = map(float, _described(maker.file(of["file"]))[1:])
        cells = [f"{ratio:.2f}" for ratio in intra_prompt_ratios(*lengths)]
        paper = ", ".join(f"{ratio:.2f}" for ratio in intra_prompt_ratios(*of["paper"]))
        lines.append("| " + " | ".join([key, paper, *cells]) + " |")
    folder = "/".join([name, *map(_file, maker.keys)])
    runs = {}
    for count in table.get("at_a_time", [None]):
        for key, of in table.get("runs", {}).items():
            row, words = (
                (key, [])
                if count is None
                else (f"{count}, {key}", [f"engine.max_num_seqs={count}"])
            )
            runs[row] = maker.make(
                f"{folder}/{_file(row)}", " ".join([of["run"], *words, *maker.keys])
            )
    labels = maker.file(table["labels"]) if "labels" in table else None
    first = next(iter(runs.values()), None)
    judged = table.get("judged", {}) if maker.judge else {}
    for run in runs.values():
        if judged and (judged["by"] == "scores" or run != first):
            other = str(first) if judged["by"] == "pairs" else None
            judge.judge(str(run), other, f"{run}-judge", None, maker.judge, judged.get("documents"))
    papers = [of["paper"] for of in table.get("runs", {}).values()]
    for number, (key, run) in enumerate(runs.items()):
        paper = papers[number % len(papers)]
        first = run if number % len(papers) == 0 else first  # of those with as many at a time
        for group, among in _groups(table, maker).items():
            cells = [
                figure(column, run, first or run, labels, among) for column in table["columns"]
            ]
            row = f"{key}, {group}" + (f" ({len(among)})" if among else "") if group else key
            lines.append(
                "| " + " | ".join([row, str(paper[group] if group else paper), *cells]) + " |"
            )
    part = (
        f"the first {maker.limit} documents of each file, to try it"
        if maker.limit
        else "all documents"
    )
    limit = f" LIMIT={maker.limit}" if maker.limit else ""
    given = {"SET": maker.keys, "JUDGE": maker.judge if judged else []}
    more = "".join(f" {variable}='{' '.join(keys)}'" for variable, keys in given.items() if keys)
    about = (
        f"{time.strftime('%Y-%m-%d')}; {machine()}; {part}: `make table NAME={name}{limit}{more}`"
    )
    return "\n".join([f"## {table['title']}", "", about, "", *lines, ""])


def intra_prompt_ratios(
    questions: float, context: float, question: float, answer: float
) -> tuple[float, float, float]:
    """IPPD's A.2, with one context a prompt.

    Args: questions on a context; tokens of it, of a question, of an answer. Returns: keys and
    values that prefix caching reads for one that IPPD reads, in prefill and in a step of decoding;
    products of attention in IPPD's prefill for one of prefix caching's.
    """
    alone, stacked, written = context + question, context + questions * question, answer / 2
    prefill = questions * alone / stacked
    decode = questions * (alone + written) / (stacked + questions * written)
    return prefill, decode, stacked**2 / (alone**2 + (questions - 1) * question * alone)


def _described(path: Path) -> list[str]:
    """What a file holds: documents and attributes of a category; or contexts, questions of one, and
    the mean tokens of contexts, questions (with their choices) and answers by the embedded model's
    tokenizer.
    """
    documents = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if "questions" not in documents[0]:
        attributes: defaultdict[str, set[str]] = defaultdict(set)
        for document in documents:
            attributes[document["category"]] |= set(document["target"])
        return [f"{len(documents):,}", f"{fmean(map(len, attributes.values())):.2f}"]
    tokenizer = load_tokenizer(ModelConfig())
    questions = [question for document in documents for question in document["questions"]]
    texts = (
        [document["context"] for document in documents],
        ["\n".join([question["question"], *question.get("choices", [])]) for question in questions],
        [
            "A" if question.get("choices") else question["answers"][0]
            for question in questions
            if question["answers"]
        ],
    )
    means = [
        fmean(len(tokenizer.encode(text, add_special_tokens=False)) for text in of_kind)
        for of_kind in texts
    ]
    return [
        f"{len(documents):,}",
        *(f"{mean:.2f}" for mean in (len(questions) / len(documents), *means)),
    ]


def _groups(table: dict[str, Any], maker: Maker) -> dict[str, set[str] | None]:
    """Documents by category, of a table with `categories`: all of them, those but `left_out`, each
    category.
    """
    if "categories" not in table:
        return {"": None}
    path, left_out = maker.file(table["categories"]["file"]), table["categories"]["left_out"]
    documents = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    categories: defaultdict[str, set[str]] = defaultdict(set)
    for document in documents:
        categories[document["category"]].add(document["id"])
    others = {document["id"] for document in documents if document["category"] not in left_out}
    return {
        "all": None,
        f"without {', '.join(left_out)}": others,
        **dict(sorted(categories.items())),
    }


def _file(name: str) -> str:
    return re.sub(r"[^\w]+", "-", name)


def page(text: str, registry: dict[str, Any], made: dict[str, str]) -> str:
    """The page with new sections in the place of those that it had."""
    sections = dict(_SECTION.findall(text)) | made
    lines = [
        _HEAD,
        *(
            f"<!-- table {key} -->\n{sections[key]}<!-- end -->\n"
            for key in registry["tables"]
            if key in sections
        ),
    ]
    unmade = {key: of for key, of in registry["tables"].items() if key not in sections}
    left = [
        ": ".join([f"* `{key}`", of["title"], *filter(None, [of.get("why")])])
        for key, of in unmade.items()
    ]
    lines += ["## Not made yet", "", *left, ""] if left else []
    lines += [
        "## Cannot be made here",
        "",
        *(f"* {key}: {why}" for key, why in registry["missing"].items()),
    ]
    return "\n".join(lines) + "\n"


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
    made = {}
    if name is not None and not everything:
        if name not in registry["tables"]:
            raise SystemExit(f"{name}: no such table; choose from {', '.join(registry['tables'])}")
        folder = work if limit is None else work / f"first-{limit}"
        try:
            maker = Maker(data, folder.resolve(), limit, keys or [], judge_keys or [])
            made[name] = section(name, registry["tables"][name], maker, registry["steps"])
        except UserError as error:
            raise SystemExit(f"error: {error}") from None
    text = page(_PAGE.read_text(encoding="utf-8") if _PAGE.exists() else "", registry, made)
    _PAGE.write_text(text, encoding="utf-8")
    print(made.get(str(name)) or text)


if __name__ == "__main__":
    typer.run(main)
