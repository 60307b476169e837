"""RTF: the text."""

import re

from raypd.dataset.file_parsers.html import in_lines


def rtf_text(data: bytes) -> str:
    """Return the text of an RTF file, a line for each paragraph.

    Raises:
        ValueError: The file cannot be read; the text says why.
    """
    from striprtf.striprtf import rtf_to_text  # imported here because most runs do not need it

    if not data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{\\rtf"):
        raise ValueError("not an RTF file: it does not begin with {\\rtf")
    # RTF itself is ASCII; the few files that break this rule are read in their code page.
    code_page = re.search(rb"\\ansicpg(\d+)", data[:4096])
    encoding = "cp1252"
    if code_page is not None and code_page[1] not in (b"0", b"1"):
        encoding = f"cp{code_page[1].decode()}"
    try:
        source = data.decode(encoding, "replace")
        text = rtf_to_text(source, encoding=encoding, errors="replace")
    except MemoryError:
        raise
    except Exception as error:  # the library raises many kinds for a damaged file
        raise ValueError(f"the RTF file cannot be read: {error or type(error).__name__}") from None
    return in_lines(text.splitlines())
