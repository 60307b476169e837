"""Where documents come from, where the table goes, and how storage is reached."""

import re
from collections.abc import Iterable
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from raypd.config.input_formats import INPUT_FORMATS
from raypd.config.options import OptionsOf
from raypd.config.secrets import SECRETS, Uri, check_secrets
from raypd.schema import Section

# The readers of formats that are recognized by file extension: input.format -> extension -> reader.
ENDINGS: dict[str, dict[str, str]] = {}
for _name, _format in INPUT_FORMATS.items():
    if _format.setting != "auto":
        ENDINGS.setdefault(_format.setting, {}).update(dict.fromkeys(_format.endings, _name))
# The extensions of files that contain one document each.
TEXT_FILES = ENDINGS["files"]
EXCEL = INPUT_FORMATS["excel"].endings
# Formats of documents, which have one column of text.
_TEXT_FORMATS = ("files", "warc")
# The extensions of files that contain tables.
TABLE_ENDINGS = tuple(
    ending
    for entry in INPUT_FORMATS.values()
    if entry.setting not in _TEXT_FORMATS
    for ending in entry.endings
)
_COMPRESSED = (".gz", ".zst")

TABLES = ("delta", "iceberg")

if TYPE_CHECKING:
    _Setting = str
else:
    _settings = [
        name if entry.setting == "auto" else entry.setting for name, entry in INPUT_FORMATS.items()
    ]
    _Setting = Literal[tuple(dict.fromkeys(["auto", *_settings, *TABLES]))]


def _encodes_text(name: str) -> str:
    if name == "auto":
        return name
    try:
        "".encode(name)
    except LookupError as error:
        raise ValueError(
            f"{error}; Python's names are utf-8, latin-1, cp1252, utf-16, shift_jis, ...; auto "
            "detects it"
        ) from None
    return name


def _ends_in(path: Any, endings: Iterable[str]) -> bool:
    """Return whether a path has one of some extensions, also if the file is compressed."""
    if not isinstance(path, str):
        return False
    name = path.lower()
    for compression in _COMPRESSED:
        name = name.removesuffix(compression)
    return name.endswith(tuple(endings))


class InputConfig(Section, use_attribute_docstrings=True):
    """Where the documents are and which columns hold what."""

    path: Annotated[str | list[str], AfterValidator(check_secrets)]
    """A file, folder or glob, or a list of them; local, s3://, gs:// or az://. Tables: .jsonl,
    .csv, .tsv (also .gz, .zst), .parquet, .arrow, .json, .xlsx, .xls, .ods. Documents: .txt, .md,
    .html, .pdf, .docx, .pptx, .rtf, .epub, .xml, .eml, .msg. Web archives: .warc
    """
    format: _Setting = "auto"
    """Format of the files. auto: by their names; json: each .json holds an object or an array;
    excel: the first sheet of a workbook; files: each .txt, .md, .html, .pdf, .docx, .pptx, .rtf,
    .epub, .xml, .eml or .msg is a document with the columns id (its name) and text; warc: each
    response is a document with the columns id (its URL), text, date, status and content_type;
    delta, iceberg: path is the folder of the table
    """
    ocr: Literal["none", "auto"] = "none"
    """auto: recognize the text of PDF pages without text, and of pictures (.png, .jpg, .tiff);
    needs pip install 'raypd[ocr]'
    """
    attachments: Literal["names", "text", "documents"] = "names"
    """What happens to files attached to mails (.eml, .msg). names: the headers list them; text:
    their text follows the body; documents: each becomes a document. text and documents
    apply only to formats that raypd reads
    """
    reader: str | None = Field(None, pattern=r"^[\w.]+:[\w.]+$")
    """Your own function that reads each file, as module:function; it receives the file's name
    and its bytes (a binary file) and yields a dict per document
    """
    version: int | None = Field(
        None,
        description="Version of a Delta table or id of an Iceberg snapshot; null: the newest when "
        "the run starts",
    )
    encoding: Annotated[str, AfterValidator(_encodes_text)] = "utf-8"
    """Encoding of CSV, TSV and text files by its name in Python (latin-1, cp1252, utf-16,
    shift_jis); auto: detect it for each file
    """
    id_column: str | None = Field(
        "id", description="Column with the document's id; null: the id is source:row"
    )
    text_columns: list[str] = Field(["title", "description"], min_length=1)
    """Columns whose texts make up the document, in this order. message.body is the text body of
    the objects in the column message
    """
    html_columns: list[str] = Field(
        [], description="Those text columns that hold HTML; raypd reads its visible text"
    )
    category_column: str | None = Field(
        "category", description="Column with the document's category; null: use input.category"
    )
    category: str | None = Field(
        None, description="Category of every document if there is no category column"
    )
    max_document_bytes: int = Field(
        1_000_000, ge=1, description="A longer document becomes an error row"
    )
    on_damaged: Literal["fail", "skip"] = "fail"
    """How a run ends if files cannot be read. fail: with exit code 1; skip: with 0. Everything else
    is processed in both cases
    """

    @model_validator(mode="before")
    @classmethod
    def _files(cls, tree: Any) -> Any:
        """Set the format that the extensions of all paths imply, and the columns of text files,
        which have a single column `text`.
        """
        if not isinstance(tree, dict):
            return tree
        path = tree.get("path")
        form = tree.get("format", "auto")
        paths = path if isinstance(path, list) else [path]
        if form == "auto" and paths and tree.get("reader") is None:
            for name, endings in ENDINGS.items():
                if all(_ends_in(path, endings) for path in paths):
                    form = name
        columns: dict[str, Any] = {}
        if form in _TEXT_FORMATS:
            columns = {"text_columns": ["text"], "category_column": None}
        return {**columns, **tree, "format": form}

    @model_validator(mode="after")
    def _one_table(self) -> Self:
        if self.format in TABLES and not isinstance(self.path, str):
            raise ValueError(f"format {self.format}: the path is one table")
        if self.format not in TABLES and self.version is not None:
            raise ValueError("version: only for a table (format delta or iceberg)")
        if self.reader is not None and self.format != "auto":
            raise ValueError("reader: reads files of any format; leave format at auto")
        return self


def _plain_names(partition: dict[str, str]) -> dict[str, str]:
    for key, value in partition.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]*", key):
            advice = "because table readers skip folders whose names begin with _"
            raise ValueError(
                f"{key!r}: use only a-z, 0-9 and _, as Athena requires, and begin with a letter, "
                f"{advice}"
            )
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
            raise ValueError(f"{value!r}: use only letters, digits and . _ -")
    return partition


def _as_written(partition: Any) -> Any:
    """Turn the date that YAML reads in 2026-11-21, and the number in 7, back into text."""
    if not isinstance(partition, dict):
        return partition
    return {
        key: str(value) if isinstance(value, (int, date)) else value
        for key, value in partition.items()
    }


class OutputConfig(Section, use_attribute_docstrings=True):
    """Where the table goes."""

    path: Uri
    """Folder of the run; local (relative to the current folder), s3://, gs:// or az://. A second
    run into the same folder resumes
    """
    columns: Literal["record", "typed"] = "record"
    """Columns of an extraction. record: a JSON object and a list of values; typed: a column of its
    own type for each attribute instead
    """
    min_confidence: float = Field(0.0, ge=0, le=1)
    """Confidence threshold of an extraction: a value below it becomes null with status unsure; its
    text stays in raw
    """
    partition: Annotated[
        dict[str, str], BeforeValidator(_as_written), AfterValidator(_plain_names)
    ] = Field({})
    """Folder level of the units, as Hive, Spark and Athena name it: {date: 2026-11-21} writes into
    units/date=2026-11-21/. It is the same for everything that one session writes
    """
    target_file_mb: int | None = Field(128, ge=1)
    """Size of table files. At its end, a run whose units together are at least as large is
    compacted: a few large files in table/ replace the units; null: only `raypd compact` does so
    """


def _endpoint_is_a_url(url: str | None) -> str | None:
    if url is not None and not re.match(r"https?://[^/]", url):
        raise ValueError("write http://host:port or https://host")
    return url


class StorageOptions(Section, use_attribute_docstrings=True):
    """The keys of `storage.options`; gs:// and az:// use anonymous, the timeouts and attempts."""

    endpoint_url: Annotated[Uri | None, AfterValidator(_endpoint_is_a_url)] = Field(
        None, description="Server with S3's API, http(s)://host[:port]; null: AWS"
    )
    region: str | None = Field(
        None, description="AWS region; null: AWS_REGION, then the profile's, then the instance's"
    )
    profile: str | None = Field(
        None, description="Profile in AWS's credential files; null: AWS_PROFILE or none"
    )
    anonymous: bool = Field(False, description="Send unsigned requests, for public buckets")
    requester_pays: bool = Field(
        False, description="Agree to pay for requests to someone else's bucket"
    )
    sse: Literal["none", "AES256", "aws:kms"] = "none"
    """Server-side encryption of every write; none: the bucket's default"""
    kms_key_id: str | None = Field(
        None, description="KMS key (ARN or id) for sse aws:kms; null: the bucket's"
    )
    connect_timeout: float = Field(10.0, gt=0, description="Seconds to wait for a connection")
    read_timeout: float = Field(30.0, gt=0, description="Seconds to wait for a byte of an answer")
    max_attempts: int = Field(
        10, ge=1, description="Attempts per request that is throttled, times out or breaks off"
    )

    @model_validator(mode="after")
    def _key_has_its_kind(self) -> Self:
        if self.kms_key_id is not None and self.sse != "aws:kms":
            raise ValueError("kms_key_id needs sse aws:kms")
        return self


class StorageConfig(Section, use_attribute_docstrings=True):
    """How to reach S3. Credentials come from the environment, AWS's files or the instance's role,
    never from the configuration.
    """

    options: Annotated[dict[str, Any], OptionsOf({"": StorageOptions})] = Field({})
    """Options such as {region: eu-west-1, profile: nightly} or {anonymous: true}"""

    @property
    def requests(self) -> StorageOptions:
        """The options of requests, with their defaults."""
        return StorageOptions.model_validate(self.options)

    @model_validator(mode="before")
    @classmethod
    def _no_secrets(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        options = tree.get("options")
        names = [*tree, *(options if isinstance(options, dict) else ())]
        secrets = [str(name) for name in names if SECRETS.search(str(name))]
        if secrets:
            raise ValueError(
                f"{secrets[0]}: no credentials in a configuration: set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY in the environment, storage.options.profile, or give the "
                "instances a role"
            )
        return tree
