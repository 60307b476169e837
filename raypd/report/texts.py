"""`raypd report --texts`: documents' texts from the run's input, values marked; the page then holds
what that holds.
"""

from collections.abc import Iterator, Sequence

from raypd import storage
from raypd.config import ExtractionConfig, RunConfig
from raypd.dataset import planner, read_unit
from raypd.errors import ConfigError, InputError, raised_as
from raypd.report.data import RunReport
from raypd.run.load import load_run
from raypd.tasks.base import Document
from raypd.tasks.documents import text_of
from raypd.text import clean

_UNITS = 8  # whose documents are read
_CHARACTERS = 4000  # of a text


def add(run: RunReport, overrides: Sequence[str] = ()) -> None:
    """Gives the sample its texts. overrides: key=value of what has moved since the run
    (`input.path`). Raises ConfigError: the run has no documents of text, or is not one run;
    InputError: its input cannot be read.
    """
    config = load_run(run.root, list(overrides))
    if not isinstance(config.task, ExtractionConfig) or run.table is not None:
        raise ConfigError(f"{run.root}: --texts is for one run of extraction")
    shown = {(sampled.source, sampled.row): sampled for sampled in run.sample.documents}
    ids = list(dict.fromkeys(sampled.unit for sampled in run.sample.documents if sampled.unit))[
        :_UNITS
    ]
    for unit in planner.plan(config, run.root):
        if unit.id not in ids:
            continue
        with raised_as(InputError, "--texts", InputError, storage.StorageError):
            documents = read_unit(unit, config)
        for document in documents:
            sampled = shown.get((clean(document.source, 200), document.place))
            if sampled is not None and document.error is None:
                spans = [
                    (entry.span, entry.name) for entry in sampled.entries if entry.span is not None
                ]
                sampled.text = list(marked(text_in(document, config), spans))


def text_in(document: Document, config: RunConfig) -> str:
    """What spans count in: the column itself, or of several the text that is made of them; else the
    prompt.
    """
    columns = config.text_columns() or [*config.task.wanted_columns(config.input).values()]
    return str(document.fields.get(columns[0])) if len(columns) == 1 else text_of(document, columns)


def marked(text: str, spans: Sequence[tuple[tuple[int, int], str]]) -> Iterator[tuple[str, str]]:
    """A text in pieces, each with the names of the values that stand there; spans: where, and the
    name.
    """
    names: dict[tuple[int, int], list[str]] = {}
    for span, name in spans:
        names.setdefault(span, []).append(name)
    position = 0
    for (begin, end), marks in sorted(names.items(), key=lambda item: (item[0][0], -item[0][1])):
        # Of two that overlap the first is marked.
        if position <= begin < end <= min(len(text), _CHARACTERS):
            yield clean(text[position:begin]), ""
            yield clean(text[begin:end]), ", ".join(marks)
            position = end
    yield clean(text[position:], max(1, _CHARACTERS - position)), ""
