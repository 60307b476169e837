"""The page as HTML: escaped, labelled, of a bearable size; how it looks is test_browser's."""

import base64
import hashlib
import random
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from raypd import storage
from raypd.answering import components
from raypd.cli import summary
from raypd.config import RunConfig
from raypd.dataset import writer
from raypd.errors import InputError
from raypd.report import data, page, sample, texts
from raypd.tasks.columns import value_row
from tests.report.builder import Plan, build, document, edit_bill, value
from tests.report.test_browser import hostile_plan
from tests.runs import run_here, says, with_keys, with_values, write_jsonl

TITLES = ["  Boots <b>of</b> Acme, red", "Acme &amp; Acme", "of nobody"]


class Tags(HTMLParser):
    """All start tags with their attributes, and the text without tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.text = "".join(self.texts)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


def shown(run) -> str:
    """The words of its page."""
    return " ".join(Tags(page.render(run)).text.split())


def test_figures_stand_on_the_page(make):
    run = make(
        units=20,
        documents=25,
        sessions=2,
        budget_usd=2.0,
    )
    text = shown(run)
    axes = [
        "running time, minutes",
        "spent, USD",
        "documents/s",
        "confidence, 0 to 1",
        "budget $2.00",
    ]
    use = "GPUs 70% busy, 40 GiB at most, 1,500 of 2,520 MHz"
    says(text, "500", "of the budget of $2.00", "2 sessions", use, *run.sample.errors, *axes)
    assert f"use:    {use}" in summary._cost_lines(run.bill.cost, 0.0)


def test_a_run_without_a_price_says_so_and_draws_no_money(make):
    text = shown(
        make(
            units=6,
            usd_per_hour=0.0,
            budget_usd=None,
            sessions=2,
        )
    )
    assert text.count("no price") == 1
    assert "set cost.prices (USD per hour)" in text
    assert not re.search(r"\$\d|spent, USD|Where the money went|Cost by category", text)
    assert "documents/s" in text  # the other charts stand


def test_a_category_that_nobody_named_is_not_shown(make, no_charts):
    def rows(first, count):
        draw = random.Random(0)
        categories = {"record": ["Brand", "Color"]}
        return [document(n, draw, categories) for n in range(first, first + count)]

    run = make(
        units=4,
        documents=100,
        categories={"record": ["Brand", "Color"]},
        rows=rows,
    )
    html = page.render(run)
    assert "Brand" in html
    assert run.bill.usd
    for trace in (">record<", "Cost by category", "Cost by model", ">category<", 'id="category"'):
        assert trace not in html
    html = page.render(make(units=2, documents=20))
    for trace in (">coffee<", "Cost by category", ">category<", 'id="category"'):
        assert trace in html


@pytest.mark.parametrize(
    ("source", "setting", "position"),
    [
        ("shop.csv", "auto", ""),
        ("shop.jsonl.gz", "auto", ""),
        ("mail.eml", "files", ""),
        ("shop.parquet", "auto", ", row 7"),
        ("shop.parquet#2", "auto", ", row 7"),
        ("folder/part-0", "parquet", ", row 7"),
        ("shop.json", "json", ", row 7"),
        ("anything", "auto", ""),
    ],
)
def test_a_document_is_shown_with_its_row_and_never_with_a_byte(
    source, setting, position, make, no_charts
):
    def rows(first, count):
        draw = random.Random(0)
        row = document(first, draw)
        return [{**row, "source": source, "row": 7}]

    run = make(
        units=1,
        documents=1,
        rows=rows,
        config={"input": {"format": setting}},
    )
    assert f"<bdi>{source}</bdi>{position}</span>" in page.render(run)


def test_flagged_answers_are_counted_apart_and_shown_as_they_were_decoded(make, no_charts):
    run = make(units=1, documents=1)
    values = [
        ("5", "ok", None),
        ("long te", "truncated", None),
        (None, "truncated", "12"),
        (None, "null", None),
    ]
    values += [
        (None, "ambiguous", "7/8"),
        (None, "ambiguous", "<5"),
        (None, "invalid", "five"),
        ("6", "ok", None),
    ]
    rows = [
        {
            "id": str(n),
            "source": "x.jsonl",
            "row": 2_000_054 + n,
            "status": "ok",
            "category": "shoes",
            "values": [value("Size", shown, 0.5, status, raw)],
        }
        for n, (shown, status, raw) in enumerate(values)
    ]
    run.sample = sample.AnswerSample(documents=[sample.document_of([row]) for row in rows])
    for row in rows:
        run.sample.add(row)
    (attribute,) = run.sample.attributes.values()
    # Has a value, null, cut, ambiguous, invalid or unsure.
    assert attribute.shares == ["25%", "12%", "25%", "25%", "12%"]
    text = shown(run)
    says(text, "x.jsonl", "7/8 ambiguous", "<5 ambiguous", "12 cut", "five invalid")
    assert "2000054" not in text


def test_nothing_of_a_document_becomes_markup(tmp_path):
    html = page.render(data.load(str(build(tmp_path / "run", hostile_plan()))))
    found = Tags(html)
    allowed = """
        html head meta title style body script svg rect path text desc header main section footer
        nav article figure figcaption details summary h1 h2 h3 p div span bdi code pre strong output
        button form dl dt dd ul li table thead tbody tr th td label input select option
        """
    assert {tag for tag, _ in found.tags} <= {*allowed.split()}
    for tag, attributes in found.tags:
        assert not [name for name in attributes if re.match("on|(style|src|srcdoc|href)$", name)], (
            tag
        )
    assert sum(tag == "script" for tag, _ in found.tags) == 1
    assert not re.search("[\u202a-\u202e\u2066-\u2069\0\x1b\u2028]", html)
    assert "\\u202e" in found.text  # shown, not swallowed


def test_the_policy_allows_the_pages_own_style_and_script_and_nothing_else(make):
    html = page.render(make(units=3))
    expected = "default-src 'none'; "
    for tag in ("style", "script"):
        content = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        expected += (
            f"{tag}-src "
            f"'sha256-{base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()}'; "
        )
    policy = {
        "http-equiv": "Content-Security-Policy",
        "content": expected + "base-uri 'none'; form-action 'none'",
    }
    tags = Tags(html[: html.index("<style>")]).tags  # it holds for what comes after it
    assert [a for t, a in tags if t == "meta" and "http-equiv" in a] == [policy]


def test_charts_are_well_formed_named_and_without_a_style_of_their_own(make):
    charts = re.findall(
        r"<div class=\"(?:wide|narrow)\">(<svg.*?</svg>)</div>",
        page.render(make(units=20)),
        re.DOTALL,
    )
    assert len(charts) >= 8
    for chart in charts:
        tree = ElementTree.fromstring(chart)
        assert all(child.text for child in tree[:2])
        assert tree.get("aria-labelledby") == f"{tree[0].get('id')} {tree[1].get('id')}"
        for e in tree.iter():
            assert e.get("style") is None
            assert "#" not in e.get("fill", "")
            assert (
                not e.tag.endswith("path") or "f-" in e.get("class", "") or e.get("fill") == "none"
            )


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (
            {"ledger": False},
            ["no bill was kept for this run"],
        ),
        ({"units": 4, "missing": 4, "how": "interrupted"}, ["No document is committed yet."]),
        (
            {"missing": 3, "how": "interrupted"},
            ["This run is not finished", "unfinished: interrupted"],
        ),
        ({"budget_usd": None}, ["no budget was set"]),
        ({"usd_per_hour": 0.0}, ["set cost.prices (USD per hour)"]),
        ({"model": "fake"}, ["Made-up answers."]),
    ],
)
def test_what_is_missing_is_shown(make, no_charts, keys, parts):
    says(shown(make(**{"units": 6, **keys})), *parts)


def test_the_smallest_bill_is_told_in_full(tmp_path):
    root = build(
        tmp_path / "run",
        Plan(
            units=5,
            workers=1,
            usd_per_hour=0.5,
            budget_usd=None,
        ),
    )
    local = {
        "instance_type": None,
        "market": "local",
        "region": None,
        "price_source": "cost.prices.local",
    }
    edit_bill(
        root,
        lambda tree: (
            tree["nodes"][0].update(local),
            tree["notes"].append("other runs used the cluster"),
        ),
    )
    text = shown(data.load(str(root)))
    says(
        text,
        "local machine",
        "cost.prices.local",
        "other runs used the cluster",
        "The one worker was busy",
    )


def test_the_same_run_makes_the_same_page_without_secrets(tmp_path):
    root = build(tmp_path / "run", Plan(units=12, config={"hub": {"api_key": "hunter2hunter2"}}))
    edit_bill(root, lambda tree: [worker.update(worker="$\\frac{<$") for worker in tree["workers"]])
    first, second = (
        re.sub(r"Made .*? from", "", page.render(data.load(str(root)))) for _ in range(2)
    )
    assert first == second
    assert "$\\frac{<$" in Tags(first).text  # matplotlib would read it as mathematics
    assert "(hidden)" in first
    assert re.search("hunter2|Made-up", first) is None


@pytest.mark.slow
def test_ten_thousand_units(tmp_path):
    root = build(
        tmp_path / "run",
        Plan(
            units=10_000,
            documents=20,
            workers=64,
            sessions=3,
            budget_usd=500,
        ),
    )
    began = time.process_time()
    html = page.render(data.load(str(root)))
    assert time.process_time() - began < 60
    assert len(html) < 3_000_000
    assert "200,000" in html


def test_long_answers_do_not_make_the_page_large(make):
    values = [value(f"a{i}", "x" * 5000) for i in range(100)]
    row = {
        "status": "ok",
        "source": "s",
        "attempts": 1,
        "category": "c",
        "record": "",
        "values": values,
    }

    def rows(first, count):
        return [
            {
                **row,
                "id": str(n),
                "row": n,
            }
            for n in range(first, first + count)
        ]

    assert (
        len(
            page.render(
                make(
                    units=20,
                    documents=12,
                    rows=rows,
                )
            )
        )
        < 2_000_000
    )


@pytest.fixture
def run(tmp_path: Path, config) -> RunConfig:
    """A run of the fake model whose values are put where they stand in the texts."""
    made = config(str(write_jsonl(tmp_path / "in/a.jsonl", TITLES)), id_column="id")
    made = with_keys(made, model={"name": "fake", "fake": {"load_seconds": 0, "step_seconds": 0}})
    run_here(made, components.build)
    ((unit, path),) = writer.objects(made.output.path)
    summary, table = writer.read_table(made.output.path, unit)
    found = [
        [("Acme", 18), ("cme, red", 19)],
        [("Acme", 0), ("Acme", 11)],
        [],
    ]
    spans = [
        [
            {
                **value_row(f"a{n}", text, "ok", 0.9),
                "span": {"begin": at, "end": at + len(text)},
                "span_exact": True,
            }
            for n, (text, at) in enumerate(own)
        ]
        for own in found
    ]
    assert writer.replace_rows(
        made.output.path, path, with_values(table, "values", spans), summary, storage.version(path)
    )
    return made


def test_values_are_marked_where_they_stand_and_without_them_the_page_holds_no_text(
    run: RunConfig,
) -> None:
    found = data.load(run.output.path)
    texts.add(found)
    shown = [
        [(piece, marks) for piece, marks in one.text if piece] for one in found.sample.documents
    ]
    # Of two that overlap the first.
    assert shown == [
        [
            ("  Boots <b>of</b> ", ""),
            ("Acme", "a0"),
            (", red", ""),
        ],
        [
            ("Acme", "a0"),
            (" &amp; ", ""),
            ("Acme", "a1"),
        ],
        [("of nobody", "")],
    ]
    html = page.render(found)
    assert all(
        part in html
        for part in ("Boots &lt;b&gt;of&lt;/b&gt; ", '<mark title="a0"><bdi>Acme</bdi></mark>')
    )
    assert "<b>of" not in html
    assert "Boots" not in page.render(data.load(run.output.path))
    Path(str(run.input.path)).unlink()
    with pytest.raises(InputError, match=r"a\.jsonl: no such file"):
        texts.add(data.load(run.output.path))
