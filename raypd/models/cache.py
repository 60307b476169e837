"""The cache of models on a machine's disk, and how complete folders get there atomically."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock
from transformers.utils import logging as switches


def cache_folder() -> Path:
    """Return $RAYPD_CACHE, else $XDG_CACHE_HOME/raypd, else ~/.cache/raypd.

    It is not created here.
    """
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get("RAYPD_CACHE") or f"{shared}/raypd"
    return Path(folder).expanduser().absolute()


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Make a folder in the cache unless it exists; one process makes it and the others wait.

    Args:
        folder: The folder, which appears only when it is complete.
        make: Writes its files into a temporary folder.

    Raises:
        OSError: The cache cannot be written.
    """
    if folder.is_dir():
        # A cache that was filled beforehand may be read-only, so no lock is taken.
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f"{folder.name}.lock"):
        if not folder.is_dir():
            # A process that was killed may have left a partial folder.
            for leftover in folder.parent.glob(f".{folder.name}.*"):
                shutil.rmtree(leftover, ignore_errors=True)
            with written_whole(folder) as scratch:
                make(scratch)
    return folder


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that gets its name at the end of the block.

    After an error it is removed.
    """
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield scratch
        # save_pretrained makes weights readable by their owner alone.
        for path in scratch.iterdir():
            path.chmod(0o644)
        scratch.chmod(0o755)
        os.rename(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Load without transformers' progress bars, which fill a worker's log."""
    shown = switches.is_progress_bar_enabled()
    switches.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            switches.enable_progress_bar()
