"""Whether descriptions of attributes, or labelled examples, help a model that was not trained.

    python -m benchmarks.descriptions FOLDER
    python -m benchmarks.descriptions FOLDER smollm2-135m-instruct FILE.gguf

FOLDER holds OA-Mine, AE-110k and WDC-PAVE as JSON Lines of {id, category, title, description,
target}, and the descriptions of WDC-PAVE (attributes.json). Their first sentences are taken. Those
of the other sets are in descriptions.yaml. Each model answers the same documents of each set
with `guided` and three prompts: the names of the attributes; names with descriptions; names with
three labelled examples of the category. The table has strict F1, its paired difference to names
only (both with 95% intervals), and how many values are copied from a description. Names only show
how many values look like copies by chance.

A run that is complete in --work is kept, so that the same command resumes.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.table import machine
from benchmarks.works import task_of
from raypd.answering import components
from raypd.cluster.worker import DecodeWorker, WorkerSpec
from raypd.config import ModelConfig, RunConfig
from raypd.config.load import make_config
from raypd.config.yaml_file import parse
from raypd.dataset import planner, writer
from raypd.errors import RunError, UserError
from raypd.evaluation import evaluate, read_answers
from raypd.models.load import LoadedModel, load_model
from raypd.report.answer_check import is_copy
from raypd.run import manifest
from raypd.run.lease import RunLease
from raypd.tasks.columns import row_values

NAMES = "names only"
DESCRIPTIONS = "with descriptions"
EXAMPLES = "with three examples"
PROMPTS = (NAMES, DESCRIPTIONS, EXAMPLES)
# Name of a set -> the beginning of its files' names.
SETS = {"OA-Mine": "oamine", "AE-110k": "ae110k", "WDC-PAVE": "wdcpave"}
METRIC = "strict F1"
_WRITTEN = Path(__file__).with_suffix(".yaml")
_EMBEDDED = "smollm2-135m-instruct"

# Category -> attribute -> description.
Descriptions = dict[str, dict[str, str]]


@dataclass(frozen=True)
class DataSet:
    """A set of labelled documents.

    Attributes:
        name: What the table calls it.
        documents: The file of the documents that are answered.
        examples: The file of labelled documents for prompts.
        task: Section `task`, with the names of the attributes.
        descriptions: The descriptions of some or all attributes.
    """

    name: str
    documents: Path
    examples: Path
    task: dict[str, Any]
    descriptions: Descriptions

    def task_for(self, prompt: str) -> dict[str, Any]:
        """Return the section `task` of one of PROMPTS."""
        if prompt == DESCRIPTIONS:
            return described(self.task, self.descriptions)
        if prompt == EXAMPLES:
            return {**self.task, "examples": {"path": str(self.examples), "count": 3}}
        return self.task


@dataclass(frozen=True)
class Result:
    """What a model answered to one prompt."""

    f1: float
    low: float
    high: float
    # The difference to names only with its interval; None for names only.
    difference: tuple[float, float, float] | None
    copies: int
    values: int
    seconds: float


def described(task: dict[str, Any], descriptions: Descriptions) -> dict[str, Any]:
    """Return a section `task` in which attributes have their descriptions."""
    categories = {}
    for category, schema in task["categories"].items():
        attributes = []
        for attribute in schema["attributes"]:
            description = descriptions.get(category, {}).get(attribute["name"])
            attributes.append(
                {**attribute, "description": description} if description else attribute
            )
        categories[category] = {"attributes": attributes}
    return {**task, "categories": categories}


def first_sentence(text: str) -> str:
    """Return the first sentence of a text, without the period at its end."""
    return text.strip().partition(". ")[0].strip().removesuffix(".")


def read_set(name: str, folder: Path, work: Path, documents: int) -> DataSet:
    """Read a set, and write the documents that are answered into a file of their own.

    They are spread evenly over the file, which is sorted by category.

    Args:
        name: One of SETS.
        folder: The folder of the data.
        work: The folder of what is made.
        documents: The number of documents that are answered.
    """
    key = SETS[name]
    lines = (folder / f"{key}.test.dev.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    task = task_of(rows)
    taken = min(documents, len(rows))
    sample = work / f"{key}-{taken}.jsonl"
    sample.parent.mkdir(parents=True, exist_ok=True)
    chosen = [lines[number * len(rows) // taken] for number in range(taken)]
    sample.write_text("".join(f"{line}\n" for line in chosen), encoding="utf-8")
    return DataSet(
        name=name,
        documents=sample,
        examples=(folder / f"{key}.train.jsonl").resolve(),
        task=task,
        descriptions=_descriptions(key, folder, task),
    )


def _descriptions(key: str, folder: Path, task: dict[str, Any]) -> Descriptions:
    """Return the descriptions of a set: its own, or those that were written here."""
    descriptions: Descriptions = {}
    written = parse(_WRITTEN.read_text(encoding="utf-8"))
    if key in written:
        for category in task["categories"]:
            descriptions[category] = written[key]
        return descriptions
    text = (folder / "attributes.json").read_text(encoding="utf-8")
    for category, schema in json.loads(text)["wdc-pave"].items():
        descriptions[category] = {
            attribute: first_sentence(keys["description"])
            for attribute, keys in schema["attributes"].items()
            if keys["description"]
        }
    return descriptions


def answer(config: RunConfig, load: Callable[[ModelConfig], LoadedModel]) -> float:
    """Answer documents in this process, as a worker of a run does, unless the run is complete.

    Args:
        config: The configuration of the run.
        load: Returns the model, which several runs share.

    Returns:
        The seconds that the documents took, without loading the model.

    Raises:
        RunError: If documents could not be answered.
    """
    output = config.output.path
    manifest.claim(config, output)
    plan = list(planner.plan(config, output))
    if not all(writer.is_committed(output, unit.id) for unit in plan):
        lease = RunLease(output)
        build = partial(components.build, load=load)
        threads = config.engine.threads or torch.get_num_threads()
        worker = DecodeWorker(WorkerSpec(config, output, lease.id, threads, build))
        for unit in plan:
            result = worker.run(unit)
            if result.error is not None:
                raise RunError(result.error)
        worker.request_queue.close()
        # A worker freezes its engine for as long as its process lives; here the next run has
        # another one.
        del worker
        gc.unfreeze()
        gc.collect()
        lease.end("complete")
    summaries = [writer.read_summary(output, unit.id) for unit in plan]
    failed = sum(summary.failed for summary in summaries)
    if failed:
        raise RunError(f"{output}: {failed} documents failed, so its F1 compares with no other")
    return sum(summary.seconds for summary in summaries)


def copied_values(run: str, descriptions: Descriptions) -> tuple[int, int]:
    """Count the values that are a part of their attribute's description, or contain all of it.

    A value that stands in its document is no copy.

    Args:
        run: The folder of the run.
        descriptions: The descriptions, whether the prompt showed them or not.

    Returns:
        The number of copies, and of all values that are not null.
    """
    copies = 0
    values = 0
    for rows in read_answers(run).values():
        for row in rows:
            for value in row_values(row):
                if value.value is None:
                    continue
                values += 1
                description = descriptions.get(row["category"], {}).get(value.name or "", "")
                copies += value.span is None and is_copy(value.value, [description])
    return copies, values


def results_of(
    data: DataSet, model: dict[str, Any], work: Path, load: Callable[[ModelConfig], LoadedModel]
) -> Iterator[tuple[str, Result]]:
    """Yield each of PROMPTS with its result.

    Args:
        data: The documents.
        model: Section `model`.
        work: The folder of the runs.
        load: Returns the model.
    """
    first = ""
    for prompt in PROMPTS:
        output = str(work / data.documents.stem / prompt.replace(" ", "-"))
        tree = {
            "input": {"path": str(data.documents)},
            "output": {"path": output},
            "task": data.task_for(prompt),
            "model": model,
            "decoding": {"method": "guided"},
        }
        seconds = answer(make_config(tree), load)
        evaluation = evaluate(output, str(data.documents), first or None)
        measure = next(item for item in evaluation.measures if item.name == METRIC and not item.of)
        difference = None
        for item in evaluation.differences:
            if item.name == METRIC:
                difference = (item.ours - item.theirs, item.low, item.high)
        copies, values = copied_values(output, data.descriptions)
        first = first or output
        yield (
            prompt,
            Result(measure.value, measure.low, measure.high, difference, copies, values, seconds),
        )


def line(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def cells_of(result: Result) -> list[str]:
    """Return the cells of a result."""
    difference = ""
    if result.difference is not None:
        value, low, high = result.difference
        difference = f"{value:+.3f} ({low:+.3f} to {high:+.3f})"
    return [
        f"{result.f1:.3f} ({result.low:.3f} to {result.high:.3f})",
        difference,
        f"{result.copies} of {result.values}",
        f"{result.seconds:.0f}",
    ]


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of the data")],
    models: Annotated[
        list[str] | None, typer.Argument(help="Hub ids, folders or GGUF files; none: the embedded")
    ] = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents of each set")] = 60,
    work: Annotated[Path, typer.Option(help="Folder of what is made")] = Path("runs/descriptions"),
) -> None:
    """Print the table."""
    print(f"{machine()}; {documents} documents of each set\n")
    columns = [
        "model",
        "set",
        "prompt",
        METRIC,
        "difference to names only",
        "copied values",
        "seconds",
    ]
    print(line(columns))
    print("|---" * len(columns) + "|", flush=True)
    try:
        for name in models or [_EMBEDDED]:
            _print_model(name, folder, work, documents)
    except (UserError, RunError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


def _print_model(name: str, folder: Path, work: Path, documents: int) -> None:
    """Print the rows of a model, which is loaded once."""
    kept: list[LoadedModel] = []

    def load(config: ModelConfig) -> LoadedModel:
        if not kept:
            kept.append(load_model(config))
        return kept[0]

    model = {"name": name}
    short = Path(name).stem
    for set_name in SETS:
        data = read_set(set_name, folder, work, documents)
        for prompt, result in results_of(data, model, work / short, load):
            print(line([short, set_name, prompt, *cells_of(result)]), flush=True)


if __name__ == "__main__":
    typer.run(main)
