"""`raypd report --texts`: adds the texts of documents from the run's input, with values marked.

The page then contains whatever the input contains.
"""

from collections.abc import Iterator, Sequence

from raypd import storage
from raypd.config import ExtractionConfig, RunConfig
from raypd.dataset import planner, read_unit
from raypd.errors import ConfigError, InputError, raised_as
from raypd.report.data import RunReport
from raypd.run import load_run
from raypd.tasks import Document, text_of
from raypd.text import clean

# The maximum number of units whose documents are read.
_UNITS = 8
# The maximum number of characters of a text.
_CHARACTERS = 4000


def add(run: RunReport, overrides: Sequence[str] = ()) -> None:
    """Add texts to the documents of the sample.

    Args:
        run: The run.
        overrides: Keys of the configuration that have changed since the run, such as `input.path`.

    Raises:
        ConfigError: The run is not a single run of an extraction.
        InputError: Its input cannot be read.
    """
    config = load_run(run.root, list(overrides))
    if not isinstance(config.task, ExtractionConfig) or run.table is not None:
        raise ConfigError(f"{run.root}: --texts is for a single run of an extraction")
    by_position = {(document.source, document.row): document for document in run.sample.documents}
    units = dict.fromkeys(document.unit for document in run.sample.documents if document.unit)
    unit_ids = list(units)[:_UNITS]
    for unit in planner.plan(config, run.root):
        if unit.id not in unit_ids:
            continue
        with raised_as(InputError, "--texts", InputError, storage.StorageError):
            documents = read_unit(unit, config)
        for document in documents:
            sampled = by_position.get((clean(document.source, 200), document.row))
            if sampled is not None and document.error is None:
                spans = [
                    (entry.span, entry.name) for entry in sampled.entries if entry.span is not None
                ]
                sampled.text = list(marked(text_in(document, config), spans))


def text_in(document: Document, config: RunConfig) -> str:
    """Return the text that spans refer to.

    It is the text column itself, or the text that is assembled from several columns; without text
    columns, it is the prompt.
    """
    columns = config.text_columns() or [*config.task.wanted_columns(config.input).values()]
    if len(columns) == 1:
        return str(document.fields.get(columns[0]))
    return text_of(document, columns)


def marked(text: str, spans: Sequence[tuple[tuple[int, int], str]]) -> Iterator[tuple[str, str]]:
    """Cut a text into pieces, so that values can be marked.

    Args:
        text: The text.
        spans: (begin, end) of values and their names. If values overlap, the first one is marked.

    Yields:
        (piece, names of the values in it).
    """
    # In a PDF, each page ends with a form feed; here, every page but the last ends with an empty
    # line.
    text = text.rstrip("\n\f").replace("\f", "\n")
    names: dict[tuple[int, int], list[str]] = {}
    for span, name in spans:
        names.setdefault(span, []).append(name)
    position = 0
    for begin, end in sorted(names, key=lambda span: (span[0], -span[1])):
        if position <= begin < end <= min(len(text), _CHARACTERS):
            yield clean(text[position:begin]), ""
            yield clean(text[begin:end]), ", ".join(names[begin, end])
            position = end
    yield clean(text[position:], max(1, _CHARACTERS - position)), ""
