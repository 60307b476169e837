"""Zip files, which are the containers of office documents and e-books."""

import io
import zipfile


def check_unpacked(data: bytes, limit: int, name: str, no_such_file: str) -> None:
    """Refuse a zip file that is too large when unpacked.

    Args:
        data: The file.
        limit: Bytes that all its parts together may have.
        name: The format with its article, for the message.
        no_such_file: The beginning of the message about data that is not a zip file.

    Raises:
        ValueError: The file is too large or is not a zip file.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            unpacked = sum(file.file_size for file in archive.infolist())
    except MemoryError:
        raise
    except Exception as error:  # zipfile raises many kinds
        raise ValueError(f"{no_such_file}: {error or type(error).__name__}") from None
    if unpacked > limit:
        raise ValueError(f"{name} that has {unpacked} bytes unpacked, more than {limit}")
