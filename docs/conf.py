"""Build the documentation as a site: `make docs`.

The pages are the Markdown files that GitHub shows. The navigation is read from the table of
docs/index.md, so that a page has its place in one list alone.
"""

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import raypd  # noqa: E402

project = "raypd"
version = raypd.__version__
release = raypd.__version__
copyright = "the raypd developers"

extensions = ["myst_parser"]
root_doc = "README"
source_suffix = {".md": "markdown"}
# The build reads the root of the repository, so that links from page to page hold as they are.
_PAGES = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs", "infra", "examples"}
exclude_patterns = [entry.name for entry in ROOT.iterdir() if entry.name not in _PAGES]
include_patterns = ["*.md", "docs/*.md", "infra/README.md"]
templates_path = ["_templates"]

myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = f"raypd {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_additional_pages = {"index": "to_start.html"}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

_GROUP = re.compile(r"^\| \*\*(.+?)\*\* \|", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]+\.md)(#[^)\s]*)?\)")
_FOLDER_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s:]+)\)")
# Pages that the index does not put into a group.
_MORE = ["CONTRIBUTING", "CHANGELOG"]


def _docname(link: str) -> str:
    """Return the name of the page that a link of docs/index.md leads to."""
    path = (ROOT / "docs" / link).resolve().relative_to(ROOT)
    return path.with_suffix("").as_posix()


def _toctree(caption: str, pages: list[str]) -> str:
    entries = "\n".join(f"/{page}" for page in pages)
    options = ":hidden:\n"
    if caption:
        options += f":caption: {caption}\n"
    return f"\n```{{toctree}}\n{options}\n{entries}\n```\n"


def _navigation() -> str:
    """Return a toctree for each group of docs/index.md.

    A page is in the group that names it as a whole, without a heading, or else in the first one
    that names it.
    """
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    parts = _GROUP.split(index)[1:]
    named: list[tuple[str, str, bool]] = []
    for caption, rows in zip(parts[::2], parts[1::2], strict=True):
        for link, heading in _LINK.findall(rows):
            named.append((_docname(link), caption.capitalize(), not heading))
    whole = {page for page, _, is_whole in named if is_whole}
    groups: dict[str, list[str]] = {"": ["docs/index"]}
    seen: set[str] = set()
    for page, caption, is_whole in named:
        if page in seen or (page in whole and not is_whole):
            continue
        seen.add(page)
        groups.setdefault(caption, []).append(page)
    groups["Project"] = [page for page in _MORE if page not in seen]
    toctrees = [_toctree(caption, pages) for caption, pages in groups.items() if pages]
    return "".join(toctrees)


def _without_folder_links(docname: str, text: str) -> str:
    """Return a page whose links to folders, which no site has, are plain text."""
    folder = (ROOT / docname).parent

    def replaced(match: re.Match[str]) -> str:
        if (folder / match.group(2)).is_dir():
            return match.group(1)
        return match.group()

    return _FOLDER_LINK.sub(replaced, text)


def _read_source(app: Any, docname: str, source: list[str]) -> None:
    """Prepare a page for the site."""
    source[0] = _without_folder_links(docname, source[0])
    if docname == root_doc:
        source[0] += _navigation()


def _highlight(app: Any, doctree: nodes.document) -> None:
    """Highlight indented code blocks, which name no language.

    Most are commands and configurations, and both look right as shell.
    """
    for block in doctree.findall(nodes.literal_block):
        if block.get("language", "none") in ("none", "default"):
            block["language"] = "bash"


def setup(app: Any) -> None:
    """Connect the hooks; Sphinx calls it."""
    app.connect("source-read", _read_source)
    app.connect("doctree-read", _highlight)
