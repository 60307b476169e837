"""Email messages: headers, body, and attached files."""

import base64
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from raypd.config import InputConfig
from raypd.dataset.formats.base import Columns, Fields, SeenColumns, SourceRow
from raypd.dataset.formats.documents import ID, TEXT, DocumentFormat
from raypd.dataset.formats.ranges import RowGroups
from raypd.dataset.parser_process import parse
from raypd.run import Part

# Returns the format of an attached file by its name; None if it is not a document.
FormatOf = Callable[[str], DocumentFormat | None]


class MailFormat(DocumentFormat):
    """Email messages.

    Args:
        format_of: Finds the format of an attached file.
    """

    def __init__(self, format_of: FormatOf) -> None:
        self._format_of = format_of

    def text(self, data: bytes, part: Part, source: InputConfig) -> str:
        message = json.loads(parse(self.name, data))
        pieces = [self._message_text(message)]
        if source.attachments == "text":
            for number in self._readable(message, source):
                name, content = _attached_file(message, number)
                text = self._attachment(name, content, part, source)[TEXT]
                pieces.append(f"--- {name} ---\n{text}")
        return "\n\n".join(pieces)

    def count(
        self, part: Part, source: InputConfig, columns: Columns
    ) -> tuple[RowGroups, SeenColumns]:
        """Read the file to count the attachments if they are separate documents."""
        groups, seen = super().count(part, source, columns)
        if source.attachments != "documents":
            return groups, seen
        # Errors of the file are raised when its only row is read.
        with contextlib.suppress(ValueError):
            message = self._message(self._data(part, source), source)
            for number in self._readable(message, source):
                _, content = _attached_file(message, number)
                groups.append((1, len(content)))
        return groups, seen

    def read(self, part: Part, source: InputConfig, columns: Columns) -> Iterator[SourceRow]:
        """Yield the message, and its attachments if they are separate documents."""
        if source.attachments != "documents":
            yield from super().read(part, source, columns)
            return
        rows = self._rows(part, source)
        for number, row in enumerate(rows):
            if part.start <= number < part.end:
                yield row

    def _rows(self, part: Part, source: InputConfig) -> Iterator[SourceRow]:
        data = self._data(part, source)
        try:
            message = self._message(data, source)
        except ValueError as error:
            yield SourceRow(0, "", partial(_fail, str(error)))
            return
        yield SourceRow(0, "", lambda: {ID: part.name, TEXT: self._message_text(message)})
        names: Counter[str] = Counter()
        for row, number in enumerate(self._readable(message, source), 1):
            name, content = _attached_file(message, number)
            names[name] += 1
            # Attachments with the same name need different ids, too.
            copy = f" ({names[name]})" if names[name] > 1 else ""
            document_id = f"{part.name}/{name}{copy}"
            fields = partial(self._attachment_fields, document_id, name, content, part, source)
            yield SourceRow(row, f"attachment {name}", fields)

    def _message(self, data: bytes, source: InputConfig) -> Any:
        self.check_size(data, source)
        return json.loads(parse(self.name, data))

    def _attachment_fields(
        self, id: str, name: str, content: bytes, part: Part, source: InputConfig
    ) -> Fields:
        return {ID: id, **self._attachment(name, content, part, source)}

    def _attachment(self, name: str, content: bytes, part: Part, source: InputConfig) -> Fields:
        format = self._format_of(name)
        assert format is not None
        # The attachments of an attached message are named, not read.
        inner_source = source.model_copy(update={"attachments": "names"})
        return format.content(content, part, inner_source)

    def _readable(self, message: Any, source: InputConfig) -> list[int]:
        """Return the numbers of the attachments that raypd reads."""
        numbers = []
        for number, attachment in enumerate(message["attachments"]):
            format = self._format_of(attachment["name"])
            if format is not None and (source.ocr != "none" or not format.needs_ocr):
                numbers.append(number)
        return numbers

    def _message_text(self, message: Any) -> str:
        lines = list(message["headers"])
        names = [attachment["name"] for attachment in message["attachments"]]
        if names:
            lines.append(f"Attachments: {', '.join(names)}")
        return "\n".join(lines) + f"\n\n{message['body']}"


class Eml(MailFormat):
    """Messages in the Internet Message Format (RFC 5322)."""

    media_types = ("message/rfc822",)


class Msg(MailFormat):
    """Messages as Outlook saves them."""

    media_types = ("application/vnd.ms-outlook",)


def _attached_file(message: Any, number: int) -> tuple[str, bytes]:
    """Return the name and the bytes of an attachment."""
    attachment = message["attachments"][number]
    return attachment["name"], base64.b64decode(attachment["data"])


def _fail(reason: str) -> Fields:
    raise ValueError(reason)
