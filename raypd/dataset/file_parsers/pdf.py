"""PDF: the text of the pages."""

import io
import re


def pdf_pages(data: bytes) -> list[str]:
    """Return the text of each page of a PDF; "" for a page without text.

    Raises:
        ValueError: The file cannot be read; the text says why.
    """
    import pypdf  # imported here because most runs need none of it

    try:
        pdf = pypdf.PdfReader(io.BytesIO(data))
        if pdf.is_encrypted and not pdf.decrypt(""):
            raise ValueError("it has a password")
        return [re.sub("[\0\f]", " ", page.extract_text()).strip() for page in pdf.pages]
    except MemoryError:
        raise
    # Pypdf's own for some faults of a file, and any of Python's for others.
    except Exception as error:
        raise ValueError(f"a PDF that cannot be read: {error or type(error).__name__}") from None
