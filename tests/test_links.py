"""Links between the pages lead to a file and a heading that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/*.md", "infra/README.md")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    names = set()
    for heading in HEADING.findall(page.read_text()):
        words = re.sub(r"[^\w\- ]", "", heading.strip().lower())
        names.add(words.replace(" ", "-"))
    return names


def broken_links(page: Path) -> list[str]:
    """Return the links of a page that lead nowhere; other sites are not asked."""
    broken = []
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page
        if path:
            target = (page.parent / path).resolve()
        if not target.exists():
            broken.append(f"{page.relative_to(ROOT)}: {link}: no such file")
        elif anchor and anchor not in anchors(target):
            broken.append(f"{page.relative_to(ROOT)}: {link}: no such heading")
    return broken


def test_links_lead_to_files_and_headings() -> None:
    pages = [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
    assert ROOT / "README.md" in pages
    broken = []
    for page in pages:
        broken.extend(broken_links(page))
    assert not broken, "\n".join(broken)


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/index.md").read_text()
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert page.name == "index.md" or f"({page.name}" in index, page.name
