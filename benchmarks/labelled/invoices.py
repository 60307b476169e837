"""60 invoices with their lines as labels, the same in every run: `python -m
benchmarks.labelled.invoices` writes invoices.jsonl beside this file. What a list of objects is
tried with: 1 to 8 lines in six layouts, numbers and dates in the ways of four countries, and
amounts that are no line (shipping, tax, discount, what was paid before).

`python -m benchmarks.labelled.invoices FOLDER` writes 130 others, with other prices, to train on,
and for both the lines as one slot (list) and as a number and a slot for each cell of eight rows
(slots), with a configuration each; `... score RUN` compares.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from raypd.config.schema import categories_of
from raypd.dataset.writer import rows_of

COUNT, TRAIN, FIRST = 60, 130, 1000  # FIRST: number of the first to train on
ROWS, COLUMNS = 8, ("item", "quantity", "unit_price")
FILE = Path(__file__).with_name("invoices.jsonl")
SELLERS = [
    "Hallberg Büromöbel GmbH",
    "Norwood & Finch Ltd",
    "Atelier Cassel SARL",
    "Pine Street Hardware",
    "Kestrel Optics Inc.",
    "Lindqvist Kaffe AB",
    "Moreno Suministros S.L.",
    "Bluebell Stationers",
    "Drehwerk Sonnen KG",
    "Tidewater Marine Supply",
]
BUYERS = [
    "Oakhill Primary School",
    "Studio Varga",
    "Brandt Logistik",
    "Dr. Amelie Roux",
    "Harbour Café",
    "Quill Press",
]
ITEMS = {
    "desk lamp, black": 39.9,
    "oak shelf 80 x 30 cm": 74.5,
    "office chair Vireo": 289,
    "M6 hex bolts (100)": 8.2,
    "printer paper A4, 500 sheets": 5.35,
    "cordless drill CX-18": 129.95,
    "ground coffee 1 kg": 17.8,
    "stapler": 9.99,
    "paper filters No. 4": 2.49,
    "lens cloth": 1.1,
    "safety goggles": 12.75,
    "anchor rope 12 mm, per metre": 3.6,
    "bilge pump 750": 64,
    "toner HK-2305": 88.4,
    "whiteboard 120 x 90": 56.25,
    "repair, per hour": 72,
    "delivery pallet (returnable)": 15,
    "wall paint white 10 l": 44.9,
    "brush set, 5 pieces": 13.2,
    "USB-C cable 2 m": 11.5,
    "trestle table": 1180,
    "label roll": 4.05,
}


class Country(NamedTuple):
    """How amounts and days are written."""

    currency: str
    money: Callable[[float], str]
    day: Callable[[date], str]


def _comma(amount: float) -> str:
    return f"{amount:,.2f}".translate(str.maketrans(",.", ".,"))


COUNTRIES = [
    Country("EUR", lambda a: f"{_comma(a)} €", lambda d: f"{d:%d.%m.%Y}"),
    Country("GBP", lambda a: f"£{a:,.2f}", lambda d: f"{d.day} {d:%B %Y}"),
    Country("USD", lambda a: f"${a:,.2f}", lambda d: f"{d:%B} {d.day}, {d.year}"),
    Country("EUR", lambda a: f"{a:,.2f} EUR".replace(",", " "), lambda d: f"{d:%Y-%m-%d}"),
]
Lines = list[dict[str, Any]]


def _table(lines: Lines, c: Country) -> str:
    rows = [
        f"{n} | {x['item']} | {x['quantity']} | {c.money(x['unit_price'])} | {c.money(_sum([x]))}"
        for n, x in enumerate(lines, 1)
    ]
    return "\n".join(["Pos | Description | Qty | Unit price | Amount", *rows])


def _columns(lines: Lines, c: Country) -> str:
    return "\n".join(
        f"{x['quantity']:>4}  {x['item']:<36} {c.money(x['unit_price']):>14} "
        f"{c.money(_sum([x])):>14}"
        for x in lines
    )


def _times(lines: Lines, c: Country) -> str:
    return "\n".join(f"- {x['quantity']} x {x['item']} @ {c.money(x['unit_price'])}" for x in lines)


def _behind(lines: Lines, c: Country) -> str:
    return "\n".join(
        f"{x['item']}\n   {x['quantity']} pcs at {c.money(x['unit_price'])} each: "
        f"{c.money(_sum([x]))}"
        for x in lines
    )


def _prose(lines: Lines, c: Country) -> str:
    told = [f"{x['quantity']} of “{x['item']}” at {c.money(x['unit_price'])} apiece" for x in lines]
    return "We delivered " + "; ".join(told) + "."


def _csv(lines: Lines, c: Country) -> str:
    return "\n".join(
        [
            "item;price;number",
            *(f"{x['item']};{c.money(x['unit_price'])};{x['quantity']}" for x in lines),
        ]
    )


LAYOUTS = [_table, _columns, _times, _behind, _prose, _csv]


def _sum(lines: Lines) -> float:
    return round(sum(x["quantity"] * x["unit_price"] for x in lines), 2)


def invoices(numbers: range = range(COUNT)) -> Iterator[dict[str, Any]]:
    """Rows of an input: id, title, description, and the labels in `target`."""
    for number in numbers:
        draws = random.Random(number)
        dearer = random.Random(7 * number + 1)
        prices = (
            ITEMS
            if number < FIRST
            else {n: round(p * dearer.uniform(0.5, 2), 2) for n, p in ITEMS.items()}
        )
        country, layout = draws.choice(COUNTRIES), LAYOUTS[number % len(LAYOUTS)]
        names = draws.sample(sorted(ITEMS), draws.choice([1, 2, 2, 3, 3, 4, 5, 6, 8]))
        lines = [
            {
                "item": n,
                "quantity": draws.choice([1, 1, 2, 3, 4, 6, 10, 12, 25, 40]),
                "unit_price": prices[n],
            }
            for n in names
        ]
        day = date(2024, 1, 8) + timedelta(days=draws.randrange(700))
        seller, buyer = draws.choice(SELLERS), draws.choice(BUYERS)
        code = draws.choice(["RE-{y}-{n:04d}", "INV{n:06d}", "{n}/{y}", "No. {n}"]).format(
            y=day.year, n=draws.randrange(100, 9999)
        )
        net, extras = _sum(lines), []
        if draws.random() < 0.4:
            extras.append(("Shipping", draws.choice([4.9, 7.5, 12.0])))
        if draws.random() < 0.3:
            extras.append(("Discount for regular customers", -round(net * 0.05, 2)))
        base = net + sum(amount for _, amount in extras)
        if draws.random() < 0.7:
            extras.append(
                (f"VAT {(rate := draws.choice([19, 20, 21]))}%", round(base * rate / 100, 2))
            )
        total = round(net + sum(amount for _, amount in extras), 2)
        sums = [
            f"Net {country.money(net)}",
            *(f"{name}: {country.money(amount)}" for name, amount in extras),
        ]
        sums.append(f"{draws.choice(['Total', 'Amount due', 'To pay'])}: {country.money(total)}")
        note = draws.choice(
            [
                "",
                "Paid for the invoice before this one: "
                + country.money(net + 31.5)
                + ". Thank you.",
                "Please pay within 14 days.",
                "Goods stay ours until they are paid.",
            ]
        )
        text = [
            seller,
            f"Invoice {code}" if draws.random() < 0.6 else f"Invoice number: {code}",
            f"Date: {country.day(day)}",
            f"To: {buyer}",
            "",
            layout(lines, country),
            "",
            *sums,
            note,
        ]
        yield {
            "id": f"i{number + 1:02d}",
            "title": f"Invoice from {seller}",
            "description": "\n".join(text).strip(),
            "target": {
                "seller": seller,
                "invoice_number": code.removeprefix("No. "),
                "date": day.isoformat(),
                "currency": country.currency,
                "lines": lines,
                "total": total,
            },
        }


def as_slots(row: dict[str, Any]) -> dict[str, Any]:
    """The same with a number of lines, and each cell of ROWS as an attribute."""
    target = dict(row["target"])
    lines, total = target.pop("lines"), target.pop("total")
    cells = {
        f"line {n + 1} {c}": lines[n][c] if n < len(lines) else None
        for n in range(ROWS)
        for c in COLUMNS
    }
    return {**row, "target": {**target, "number of lines": len(lines), **cells, "total": total}}


def write_both(folder: Path) -> None:
    """Rows to train on and to test, and a configuration, of either form."""
    (category,) = categories_of(str(FILE.with_name("invoices.schema.json")), folder).values()
    tree = category["attributes"]
    *head, lines, total = tree
    lines["max_items"] = ROWS
    cells = [
        {**column, "name": f"line {n} {column['name']}"}
        for n in range(1, ROWS + 1)
        for column in lines["columns"]
    ]
    number = {"name": "number of lines", "type": "integer", "description": lines["description"]}
    for form, given, tokens in (("list", tree, 320), ("slots", [*head, number, *cells, total], 24)):
        for part, numbers in (("train", range(FIRST, FIRST + TRAIN)), ("test", range(COUNT))):
            rows = (row if form == "list" else as_slots(row) for row in invoices(numbers))
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (folder / f"{form}.{part}.jsonl").write_text(text)
        config = {
            "input": {"path": f"{form}.train.jsonl", "text_columns": ["description"]},
            "output": {"path": f"runs/{form}"},
            "decoding": {"method": "hyper_parallel", "max_value_tokens": tokens},
            "training": {
                "weights": "full",
                "learning_rates": [2e-4],
                "epochs": 2,
                "batch_size": 4,
                "evaluations": 2,
            },
            "task": {"kind": "extraction", "categories": {"invoice": {"attributes": given}}},
        }
        (folder / f"{form}.yaml").write_text(json.dumps(config, indent=2))


def score(run: str) -> str:
    """F1 of the lines' cells, each in its place, and how many invoices have all lines right; a run
    of either form.
    """
    labels = {row["id"]: row["target"]["lines"] for row in invoices()}
    right = given = whole = 0
    for row in rows_of(run, ["id", "record"]):
        record = json.loads(row["record"] or "{}")
        lines = record.get("lines") or []
        if "number of lines" in record:
            count = min(ROWS, record["number of lines"] or 0)
            lines = [{c: record.get(f"line {n + 1} {c}") for c in COLUMNS} for n in range(count)]
        gold = labels[row["id"]]
        right += sum(
            line.get(c) == label[c]
            for line, label in zip(lines, gold, strict=False)
            for c in COLUMNS
        )
        given += sum(line.get(c) is not None for line in lines for c in COLUMNS)
        whole += lines == gold
    cells = sum(len(gold) * len(COLUMNS) for gold in labels.values())
    return (
        f"{run}: cells {2 * right / (given + cells):.3f}, all lines right in {whole} of "
        f"{len(labels)}"
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            FILE.write_text(
                "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in invoices())
            )
        case ["score", *runs]:
            print(*map(score, runs), sep="\n")
        case [folder]:
            write_both(Path(folder))
