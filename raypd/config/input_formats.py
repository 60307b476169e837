"""The registry of input formats: their names, their file extensions, and the classes that read
them. The configuration reads it, so it imports nothing, and names the readers as text.
"""

from typing import NamedTuple


class InputFormat(NamedTuple):
    """A format of input files, as the configuration knows it."""

    # "module:class" of its `Format`, in raypd.dataset.formats.
    reader: str
    # File extensions in lower case, with the dot. A compressed file adds .gz or .zst.
    endings: tuple[str, ...]
    # The value of `input.format` that selects files of this format by extension. Under auto, the
    # format's own name is also a value, which reads every file as this format.
    setting: str = "auto"


def _document(reader: str, *endings: str) -> InputFormat:
    """Return a format whose files contain one document each."""
    return InputFormat(reader, endings, setting="files")


# To add a format, write its class and add its line here. Messages list the formats in this order.
INPUT_FORMATS = {
    "jsonl": InputFormat("json_lines:JsonLines", (".jsonl", ".ndjson")),
    "csv": InputFormat("csv_files:Csv", (".csv",)),
    "tsv": InputFormat("csv_files:Tsv", (".tsv",)),
    "parquet": InputFormat("parquet:Parquet", (".parquet",)),
    "arrow": InputFormat("arrow:Arrow", (".arrow",)),
    "text": _document("documents:Text", ".txt", ".text", ".md", ".markdown"),
    "html": _document("html:Html", ".html", ".htm"),
    "pdf": _document("pdf:Pdf", ".pdf"),
    "docx": _document("word:Word", ".docx"),
    "pptx": _document("slides:Slides", ".pptx"),
    "rtf": _document("rtf:Rtf", ".rtf"),
    "epub": _document("epub:Epub", ".epub"),
    "xml": _document("xml_files:Xml", ".xml"),
    "picture": _document("picture:Picture", ".png", ".jpg", ".jpeg", ".tif", ".tiff"),
    "eml": _document("mail:Eml", ".eml"),
    "msg": _document("mail:Msg", ".msg"),
    "warc": InputFormat("warc:Warc", (".warc",), setting="warc"),
    "json": InputFormat("json_files:Json", (".json",), setting="json"),
    "excel": InputFormat("workbook:Workbook", (".xlsx", ".xlsm", ".xls", ".ods"), setting="excel"),
}
