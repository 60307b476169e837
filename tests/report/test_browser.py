"""The page in a real browser: nothing of a document runs, nothing is asked from the network,
nothing is cut off.
"""

import io
import re

import numpy as np
import pytest
from PIL import Image

from raypd.report import data, page
from tests.processes import LONG, wait_for
from tests.report import hostile
from tests.report.browser import DESKTOP, PHONE, open_page
from tests.report.builder import Plan, build, value
from tests.servers import Reply, serving

_pages: dict[str, str] = {}  # by the plan, since some are looked at in several ways
SMALL = {"width": 320, "height": 640}
TABLET = {"width": 768, "height": 1024}


def hostile_plan() -> Plan:
    """A run whose ids, sources, categories, names, values, errors and configuration are all
    hostile.
    """
    texts = hostile.TEXTS

    def text(number):
        return texts[number % len(texts)]

    def row(n: int):
        values = [
            value(text(n + i), text(n + i + 1), i / 30, text(i) if i == 3 else "ok")
            for i in range(len(texts))
        ]
        made = {
            "id": text(n),
            "source": text(n + 1),
            "row": n,
            "attempts": 1,
            "category": text(n + 2),
            "status": "ok",
            "error": None,
            "record": "{}",
            "values": values,
            "truncated": n % 5 == 0,
        }
        return (
            made
            if n % 4
            else {
                **made,
                "status": "error",
                "error": text(n // 4),
                "values": None,
            }
        )

    return Plan(
        units=8,
        documents=12,
        workers=3,
        sessions=2,
        model=texts[1],
        categories={texts[0]: [texts[2]]},
        rows=lambda first, count: [row(n) for n in range(first, first + count)],
        config={"input": {"path": texts[4], texts[5]: texts[6]}},
    )


def _page(tmp_path, plan: Plan):
    if repr(plan) not in _pages:
        _pages[repr(plan)] = page.render(data.load(str(build(tmp_path / "run", plan))))
    file = tmp_path / "report.html"
    file.write_text(_pages[repr(plan)])
    return file


def test_hostile_documents_run_nothing_and_load_nothing(browser, tmp_path):
    file = _page(tmp_path, hostile_plan())
    tab, asked, errors = open_page(browser, file, viewport=PHONE)
    for query in ("script", "<img", "\u202e", "'\"><svg onload=alert(1)>"):
        tab.fill("#query", query)
    tab.fill("#query", "")
    for n in range(tab.locator("#category option").count()):
        tab.locator("#category").select_option(index=n)
    tab.locator("#category").select_option(index=0)
    while tab.locator("#on").is_visible() and tab.locator("#on").is_enabled():
        tab.click("#on")
    tab.wait_for_load_state("networkidle")
    assert tab.evaluate(f"window.{hostile.MARK}") is None
    assert asked == [file.as_uri()]
    assert errors == []
    assert tab.evaluate("document.scrollingElement.scrollWidth") <= PHONE["width"]
    forbidden = "article a, article img, article script, iframe, base, link"
    assert tab.evaluate(f"document.querySelectorAll('{forbidden}').length") == 0


def test_the_policy_holds_where_escaping_would_fail(browser, tmp_path):
    """Shown by a page whose escaping was broken on purpose: nothing in it runs all the same."""
    file = _page(tmp_path, Plan(units=3))
    requested: list[str] = []

    def record(call) -> Reply:
        requested.append(call.path)
        return Reply(404)

    with serving(record) as url:
        evil = "".join(hostile.TEXTS[1:10]).replace("127.0.0.1:9", url.removeprefix("http://"))
        file.write_text(
            file.read_text().replace('<div id="documents">', f'{evil}<div id="documents">', 1)
        )
        tab, _, errors = open_page(browser, file)
        tab.wait_for_load_state("networkidle")
        assert tab.evaluate(f"window.{hostile.MARK}") is None
        assert requested == []
        file.write_text(
            re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", file.read_text())
        )
        tab, *_ = open_page(browser, file)  # the same without the policy: so this test could fail
        tab.wait_for_function(f"window.{hostile.MARK} !== undefined", timeout=1000 * LONG)
        wait_for(lambda: requested, "nothing was asked for")
    assert any("Content Security Policy" in error for error in errors)


@pytest.mark.parametrize(
    "size", [PHONE, DESKTOP, *(pytest.param(s, marks=pytest.mark.slow) for s in (SMALL, TABLET))]
)
def test_it_fits_every_screen(browser, tmp_path, size):
    tab, _, errors = open_page(
        browser,
        _page(
            tmp_path,
            Plan(
                units=30,
                workers=5,
                sessions=2,
            ),
        ),
        viewport=size,
    )
    assert tab.evaluate("document.scrollingElement.scrollWidth") <= size["width"]
    shown = tab.evaluate(
        "[...document.querySelectorAll('figure [role=img]')].filter(s => "
        "s.getBoundingClientRect().width > 0).length"
    )
    assert shown == 4  # one form of each chart
    # The letters of the charts are never too small to read, nor out of their picture.
    letters = tab.evaluate("""
        [...document.querySelectorAll('figure svg text')]
            .map(t => [t.getBoundingClientRect(), t])
            .filter(([r]) => r.width > 0)
            .map(([r, t]) => {
                const scale = Math.hypot(t.getCTM().a, t.getCTM().b);
                return [scale * t.getAttribute('font-size'), r.left, r.right];
            })
        """)
    assert min(size for size, *_ in letters) >= 8.8
    assert not [left for _, left, right in letters if left < 0 or right > size["width"]]
    assert errors == []


def test_what_a_finger_touches_is_large_enough(browser, tmp_path):
    tab, *_ = open_page(browser, _page(tmp_path, Plan(units=30, workers=5)), viewport=PHONE)
    heights = tab.evaluate("""
        [...document.querySelectorAll('summary, button, input, select')]
            .map((e) => e.getBoundingClientRect()).filter((r) => r.width > 0).map((r) => r.height)
        """)
    assert len(heights) > 5
    assert min(heights) >= 40


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_table_that_goes_on_has_a_shadow_at_that_side(browser, tmp_path, scheme):
    tab, *_ = open_page(
        browser, _page(tmp_path, Plan(units=30, workers=5)), viewport=PHONE, color_scheme=scheme
    )

    def shadows(label: str, scrolled: float) -> tuple[bool, bool]:
        table = tab.locator(f".scroll[aria-label='{label}']").first
        table.evaluate(
            "(e, part) => { e.scrollLeft = part * (e.scrollWidth - e.clientWidth); }", scrolled
        )
        seen = np.asarray(Image.open(io.BytesIO(table.screenshot())).convert("RGB"), int)
        color = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        plain = np.array([int(part) for part in re.findall(r"\d+", color)])
        # Lines and letters are few.
        dark = [np.median(abs(seen[:, at] - plain).sum(-1)) > 20 for at in (1, -2)]
        return bool(dark[0]), bool(dark[1])

    assert [shadows("Machines", at) for at in (0.0, 0.5, 1.0)] == [
        (False, True),
        (True, True),
        (True, False),
    ]
    tab.set_viewport_size(DESKTOP)
    assert shadows("Machines", 0.0) == (False, False)


def test_search_filter_order_and_paging(browser, tmp_path):
    tab, *_ = open_page(browser, _page(tmp_path, Plan(units=40, documents=25)))
    articles = tab.locator("#documents article")
    assert articles.count() == 20
    assert tab.inner_text("#place") == "1 to 20 of 240"
    tab.click("#on")
    assert tab.inner_text("#place") == "21 to 40 of 240"
    tab.select_option("#status", "error")
    assert tab.inner_text("#place").startswith("1 to ")
    assert set(articles.evaluate_all("found => found.map(a => a.dataset.status)")) == {"error"}
    tab.select_option("#status", "")
    tab.select_option("#category", "coffee")
    tab.select_option("#order", "unsure")
    sure = [float(s) for s in articles.evaluate_all("found => found.map(a => a.dataset.sure)")]
    assert sure == sorted(sure)
    first = articles.first.locator("h3 bdi").first.inner_text()
    for query, count in ((f"{first.lower()} coffee", 1), ("no such thing", 0)):
        tab.fill("#query", query)
        assert articles.count() == count
        assert tab.locator("#nothing").is_visible() == (not count)


def test_without_scripts_all_documents_are_there(browser, tmp_path):
    tab, *_ = open_page(
        browser, _page(tmp_path, Plan(units=40, documents=25)), java_script_enabled=False
    )
    assert tab.locator("#documents article").count() == 240
    assert tab.locator("#find").is_hidden() is True


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(browser, tmp_path, scheme):
    """Contrast of at least 4.5 to 1 (WCAG AA), also in charts, labels and notes."""
    plan = Plan(
        units=20,
        missing=2,
        how="failed",
        model="fake",
    )
    tab, *_ = open_page(browser, _page(tmp_path, plan), color_scheme=scheme)
    found = tab.evaluate(
        """() => {
          const rgb = (c) => c.match(/[\\d.]+/g).map(Number);
          const light = (c) => { const [r, g, b] = rgb(c).slice(0, 3).map((v) => v / 255)
            .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
          const behind = (e) => { for (; e; e = e.parentElement) {
            const c = getComputedStyle(e).backgroundColor; if (c !== 'rgba(0, 0, 0, 0)') return c; }
            return 'rgb(255,255,255)'; };
          const says = (e) => [...e.childNodes].some(
            (n) => n.nodeType === 3 && n.textContent.trim());
          return [...document.querySelectorAll('body *')]
            .filter((e) => says(e) && e.getBoundingClientRect().width > 0 && !e.disabled
              && !['SCRIPT', 'STYLE', 'title', 'desc'].includes(e.tagName))
            .map((e) => { const s = getComputedStyle(e);
              const a = light(e instanceof SVGElement ? s.fill : s.color), b = light(behind(e));
              const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
              return [contrast, e.textContent.trim().slice(0, 40)]; });
        }"""
    )
    assert len(found) > 100
    assert [pair for pair in found if pair[0] < 4.5] == []
