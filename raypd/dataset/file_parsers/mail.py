"""Email messages: headers, body and attachments."""

import base64
import codecs
import contextlib
import email
import email.message
import email.policy
import mimetypes
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypedDict

from raypd.dataset.file_parsers.html import in_lines, visible_text

_HEADERS = ("From", "To", "Cc", "Date", "Subject")
_NO_NAME = "attachment"
# Parts that only prove who wrote the message.
_SIGNATURES = ("application/pgp-signature", "application/pkcs7-signature")
# The first instant of Outlook's clock, which means that there is no date.
_NO_DATE = datetime(1601, 1, 1, tzinfo=UTC)


class AttachedFile(TypedDict):
    """A file that is attached to a message."""

    name: str
    # Base64.
    data: str


class Mail(TypedDict):
    """A message."""

    # Lines such as "From: ...".
    headers: list[str]
    body: str
    attachments: list[AttachedFile]


class _Content(NamedTuple):
    """The content of a message's parts."""

    plain: list[str]
    html: list[str]
    attachments: list[AttachedFile]


def mail_of_eml(data: bytes) -> Mail:
    """Return a message in the Internet Message Format (RFC 5322).

    The body is the plain text or, if there is none, the visible text of the HTML.

    Raises:
        ValueError: It is not a message.
    """
    # Programs that save an email as text may put a byte order mark or empty lines before its
    # headers.
    data = data.removeprefix(codecs.BOM_UTF8).lstrip(b"\r\n")
    message = email.message_from_bytes(data, policy=email.policy.default)
    headers = _headers({name: _header(message, name) for name in _HEADERS})
    if not headers:
        raise ValueError(f"not a mail: it has none of the headers {', '.join(_HEADERS)}")
    content = _Content([], [], [])
    _collect(message, content)
    body = in_lines(_lines(content.plain))
    if not body:
        body = "\n".join(visible_text(html) for html in content.html)
    return {"headers": headers, "body": body, "attachments": content.attachments}


def _header(message: email.message.Message, name: str) -> str:
    try:
        return str(message.get(name, ""))
    except Exception:  # the standard library raises many kinds for a malformed header
        for raw_name, value in message.raw_items():
            if raw_name.casefold() == name.casefold():
                return str(value)
        return ""


def _headers(values: dict[str, str]) -> list[str]:
    """Return the headers that are not empty, as lines."""
    lines = []
    for name, value in values.items():
        plain = " ".join(value.split())
        if plain:
            lines.append(f"{name}: {plain}")
    return lines


def _collect(message: Any, content: _Content) -> None:
    """Sort the parts of a message into texts and attachments; an attached message is a file."""
    for part in message.iter_parts() if message.is_multipart() else [message]:
        kind = part.get_content_type()
        if part is not message and part.is_multipart() and kind != "message/rfc822":
            _collect(part, content)
            continue
        name = _file_name(part)
        is_attached = part.get_content_disposition() == "attachment" or name is not None
        if kind == "text/plain" and not is_attached:
            content.plain.append(_text(part))
        elif kind == "text/html" and not is_attached:
            content.html.append(_text(part))
        elif kind == "message/rfc822":
            inner = part.get_payload()
            data = inner[0].as_bytes() if isinstance(inner, list) and inner else b""
            content.attachments.append(_attached(name or "message.eml", data))
        elif kind in _SIGNATURES or (kind.startswith("image/") and part.get("Content-ID")):
            # A picture with an id is shown inside the body.
            continue
        else:
            # A part that is not text to show, such as an invitation, is also a file.
            ending = mimetypes.guess_extension(kind) or ""
            content.attachments.append(_attached(name or f"{_NO_NAME}{ending}", _payload(part)))


def _file_name(part: Any) -> str | None:
    try:
        name = part.get_filename()
    except Exception:  # as for headers
        return _NO_NAME
    return None if name is None else " ".join(str(name).split())


def _payload(part: Any) -> bytes:
    payload = part.get_payload(decode=True)
    return payload if isinstance(payload, bytes) else b""


def _text(part: Any) -> str:
    """Return the text of a part; bytes that do not fit its charset are replaced."""
    data = _payload(part)
    # Emails from old programs name no charset, or a wrong one.
    for charset in (part.get_content_charset(), "utf-8"):
        with contextlib.suppress(LookupError, UnicodeDecodeError):
            if charset and codecs.lookup(charset).name != "iso8859-1":
                return data.decode(charset)
    # Text that is labelled Latin-1 is read as cp1252, as on the web.
    return data.decode("cp1252", "replace")


def _lines(texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        yield from text.splitlines()


def _attached(name: str, data: bytes) -> AttachedFile:
    return {"name": name, "data": base64.b64encode(data).decode()}


def mail_of_msg(data: bytes) -> Mail:
    """Return a message of Outlook (.msg).

    Raises:
        ValueError: The file cannot be read; the text says why.
    """
    from oxmsg import Message  # imported here because most runs do not need it

    try:
        message = Message.load(data)
        values = {name: message.message_headers.get(name, "") for name in _HEADERS}
        values["From"] = values["From"] or message.sender or ""
        if not values["To"]:
            values["To"] = ", ".join(filter(None, map(_recipient, message.recipients)))
        if not values["Date"] and message.sent_date is not None and message.sent_date > _NO_DATE:
            values["Date"] = message.sent_date.isoformat(" ")
        values["Subject"] = message.subject
        body = in_lines((message.body or "").splitlines())
        if not body and message.html_body:
            body = visible_text(message.html_body)
        attachments = [
            _attached(attachment.file_name or _NO_NAME, attachment.file_bytes or b"")
            for attachment in message.attachments
        ]
    except MemoryError:
        raise
    except Exception as error:  # from olefile and python-oxmsg, which check little
        raise ValueError(
            f"not a readable message of Outlook: {error or type(error).__name__}"
        ) from None
    return {"headers": _headers(values), "body": body, "attachments": attachments}


def _recipient(recipient: Any) -> str:
    if recipient.name and recipient.email_address:
        return f"{recipient.name} <{recipient.email_address}>"
    return str(recipient.email_address or recipient.name or "")
