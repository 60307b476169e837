"""A headless Chromium of the system, for tests of the page."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-component-update",
    "--disable-background-networking",
    "--disable-sync",
]
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A running browser; skips the test where there is none."""
    program = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if program is None:
        pytest.skip("needs Chromium: install your system's package `chromium`")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install -e '.[dev]'"
    )
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield running
        running.close()


def open_page(browser: Any, file: Path, **keys: Any) -> tuple[Any, list[str], list[str]]:
    """The page; what it asked for, and what it complained of."""
    asked: list[str] = []
    errors: list[str] = []
    tab = browser.new_page(**keys)
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on(
        "console",
        lambda message: (
            errors.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    tab.on("dialog", lambda dialog: (errors.append(dialog.message), dialog.dismiss()))
    tab.goto(file.as_uri())
    return tab, asked, errors
