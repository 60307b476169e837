"""60 invoices with their lines as labels, the same in every run.

`python -m benchmarks.labelled.invoices` writes invoices.jsonl beside this file. The invoices test
lists of objects: 1 to 8 lines in six layouts, numbers and dates as four countries write them, and
amounts that are no line (shipping, tax, discount, an earlier payment).

`python -m benchmarks.labelled.invoices FOLDER` writes 130 other invoices with other prices to train
on. Both sets are written in two forms, with a configuration each: the lines as one slot (list), and
as a number of lines and a slot per cell of eight rows (slots). `... score RUN` scores either form.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from raypd.config.schema import categories_of
from raypd.dataset.unit_rows import rows_of

COUNT = 60
TRAIN_COUNT = 130
TRAIN_START = 1000  # the number of the first invoice to train on
ROWS = 8
COLUMNS = ("item", "quantity", "unit_price")
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
    """How a country writes amounts and days."""

    currency: str
    money: Callable[[float], str]
    day: Callable[[date], str]


def _german_money(amount: float) -> str:
    return f"{amount:,.2f} €".translate(str.maketrans(",.", ".,"))


def _german_day(day: date) -> str:
    return f"{day:%d.%m.%Y}"


def _british_money(amount: float) -> str:
    return f"£{amount:,.2f}"


def _british_day(day: date) -> str:
    return f"{day.day} {day:%B %Y}"


def _american_money(amount: float) -> str:
    return f"${amount:,.2f}"


def _american_day(day: date) -> str:
    return f"{day:%B} {day.day}, {day.year}"


def _iso_money(amount: float) -> str:
    return f"{amount:,.2f} EUR".replace(",", " ")


def _iso_day(day: date) -> str:
    return f"{day:%Y-%m-%d}"


COUNTRIES = [
    Country("EUR", _german_money, _german_day),
    Country("GBP", _british_money, _british_day),
    Country("USD", _american_money, _american_day),
    Country("EUR", _iso_money, _iso_day),
]
Line = dict[str, Any]  # {item, quantity, unit_price}
Lines = list[Line]


def _price(line: Line, country: Country) -> str:
    return country.money(line["unit_price"])


def _amount(line: Line, country: Country) -> str:
    return country.money(_sum([line]))


def _table(lines: Lines, country: Country) -> str:
    rows = ["Pos | Description | Qty | Unit price | Amount"]
    for number, line in enumerate(lines, 1):
        rows.append(
            f"{number} | {line['item']} | {line['quantity']} | {_price(line, country)} | "
            f"{_amount(line, country)}"
        )
    return "\n".join(rows)


def _columns(lines: Lines, country: Country) -> str:
    rows = []
    for line in lines:
        rows.append(
            f"{line['quantity']:>4}  {line['item']:<36} {_price(line, country):>14} "
            f"{_amount(line, country):>14}"
        )
    return "\n".join(rows)


def _times(lines: Lines, country: Country) -> str:
    return "\n".join(
        f"- {line['quantity']} x {line['item']} @ {_price(line, country)}" for line in lines
    )


def _behind(lines: Lines, country: Country) -> str:
    rows = []
    for line in lines:
        rows.append(
            f"{line['item']}\n   {line['quantity']} pcs at {_price(line, country)} each: "
            f"{_amount(line, country)}"
        )
    return "\n".join(rows)


def _prose(lines: Lines, country: Country) -> str:
    parts = []
    for line in lines:
        price = _price(line, country)
        parts.append(f"{line['quantity']} of “{line['item']}” at {price} apiece")
    return "We delivered " + "; ".join(parts) + "."


def _csv(lines: Lines, country: Country) -> str:
    rows = ["item;price;number"]
    for line in lines:
        rows.append(f"{line['item']};{_price(line, country)};{line['quantity']}")
    return "\n".join(rows)


LAYOUTS = [_table, _columns, _times, _behind, _prose, _csv]


def _sum(lines: Lines) -> float:
    return round(sum(line["quantity"] * line["unit_price"] for line in lines), 2)


def invoices(numbers: range = range(COUNT)) -> Iterator[dict[str, Any]]:
    """Yield rows of an input: id, title, description, and the labels in `target`.

    Args:
        numbers: The numbers of the invoices; the same number is the same invoice in every run.
    """
    for number in numbers:
        yield _invoice(number)


def _invoice(number: int) -> dict[str, Any]:
    # The order of the draws decides what the invoices are: it must not change.
    draws = random.Random(number)
    country = draws.choice(COUNTRIES)
    layout = LAYOUTS[number % len(LAYOUTS)]
    lines = _lines(draws, _prices(number))
    day = date(2024, 1, 8) + timedelta(days=draws.randrange(700))
    seller = draws.choice(SELLERS)
    buyer = draws.choice(BUYERS)
    form = draws.choice(["RE-{y}-{n:04d}", "INV{n:06d}", "{n}/{y}", "No. {n}"])
    code = form.format(y=day.year, n=draws.randrange(100, 9999))
    net = _sum(lines)
    extras = _extras(draws, net)
    total = round(net + sum(amount for _, amount in extras), 2)
    sums = [f"Net {country.money(net)}"]
    sums += [f"{name}: {country.money(amount)}" for name, amount in extras]
    sums.append(f"{draws.choice(['Total', 'Amount due', 'To pay'])}: {country.money(total)}")
    notes = [
        "",
        f"Paid for the invoice before this one: {country.money(net + 31.5)}. Thank you.",
        "Please pay within 14 days.",
        "Goods stay ours until they are paid.",
    ]
    note = draws.choice(notes)
    heading = f"Invoice {code}" if draws.random() < 0.6 else f"Invoice number: {code}"
    text = [
        seller,
        heading,
        f"Date: {country.day(day)}",
        f"To: {buyer}",
        "",
        layout(lines, country),
        "",
        *sums,
        note,
    ]
    return {
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


def _prices(number: int) -> dict[str, float]:
    """Return the price of each item; invoices to train on have other prices."""
    if number < TRAIN_START:
        return ITEMS
    draws = random.Random(7 * number + 1)
    return {item: round(price * draws.uniform(0.5, 2), 2) for item, price in ITEMS.items()}


def _lines(draws: random.Random, prices: dict[str, float]) -> Lines:
    count = draws.choice([1, 2, 2, 3, 3, 4, 5, 6, 8])
    lines = []
    for item in draws.sample(sorted(ITEMS), count):
        quantity = draws.choice([1, 1, 2, 3, 4, 6, 10, 12, 25, 40])
        lines.append({"item": item, "quantity": quantity, "unit_price": prices[item]})
    return lines


def _extras(draws: random.Random, net: float) -> list[tuple[str, float]]:
    """Return the names and amounts that are no line."""
    extras = []
    if draws.random() < 0.4:
        extras.append(("Shipping", draws.choice([4.9, 7.5, 12.0])))
    if draws.random() < 0.3:
        extras.append(("Discount for regular customers", -round(net * 0.05, 2)))
    base = net + sum(amount for _, amount in extras)
    if draws.random() < 0.7:
        rate = draws.choice([19, 20, 21])
        extras.append((f"VAT {rate}%", round(base * rate / 100, 2)))
    return extras


def as_slots(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the number of lines, and each cell of ROWS lines, as attributes.

    Args:
        row: A row of `invoices`.
    """
    target = dict(row["target"])
    lines = target.pop("lines")
    total = target.pop("total")
    target["number of lines"] = len(lines)
    for number in range(ROWS):
        for column in COLUMNS:
            value = lines[number][column] if number < len(lines) else None
            target[f"line {number + 1} {column}"] = value
    target["total"] = total
    return {**row, "target": target}


def write_both(folder: Path) -> None:
    """Write the rows to train on and to test, and a configuration, in both forms.

    Args:
        folder: The folder, which exists.
    """
    (category,) = categories_of(str(FILE.with_name("invoices.schema.json")), folder).values()
    attributes = category["attributes"]
    *head, lines, total = attributes
    lines["max_items"] = ROWS
    cells = []
    for number in range(1, ROWS + 1):
        for column in lines["columns"]:
            cells.append({**column, "name": f"line {number} {column['name']}"})
    count = {"name": "number of lines", "type": "integer", "description": lines["description"]}
    _write_form(folder, "list", attributes, max_value_tokens=320)
    _write_form(folder, "slots", [*head, count, *cells, total], max_value_tokens=24)


def _write_form(
    folder: Path, form: str, attributes: list[dict[str, Any]], max_value_tokens: int
) -> None:
    """Write the rows and the configuration of one form."""
    parts = {"train": range(TRAIN_START, TRAIN_START + TRAIN_COUNT), "test": range(COUNT)}
    for part, numbers in parts.items():
        text = ""
        for row in invoices(numbers):
            form_row = as_slots(row) if form == "slots" else row
            text += json.dumps(form_row, ensure_ascii=False) + "\n"
        (folder / f"{form}.{part}.jsonl").write_text(text)
    config = {
        "input": {"path": f"{form}.train.jsonl", "text_columns": ["description"]},
        "output": {"path": f"runs/{form}"},
        "decoding": {"method": "hyper_parallel", "max_value_tokens": max_value_tokens},
        "training": {
            "weights": "full",
            "learning_rates": [2e-4],
            "epochs": 2,
            "batch_size": 4,
            "evaluations": 2,
        },
        "task": {"kind": "extraction", "categories": {"invoice": {"attributes": attributes}}},
    }
    (folder / f"{form}.yaml").write_text(json.dumps(config, indent=2))


def score(run: str) -> str:
    """Return the F1 of the cells of lines, and how many invoices have all lines right.

    Args:
        run: The folder of a run of either form.
    """
    labels = {row["id"]: row["target"]["lines"] for row in invoices()}
    right = 0
    answered = 0
    complete = 0  # invoices
    for row in rows_of(run, ["id", "record"]):
        lines = _answered_lines(json.loads(row["record"] or "{}"))
        gold = labels[row["id"]]
        for line, label in zip(lines, gold, strict=False):
            right += sum(line.get(column) == label[column] for column in COLUMNS)
        for line in lines:
            answered += sum(line.get(column) is not None for column in COLUMNS)
        complete += lines == gold
    labelled = sum(len(gold) * len(COLUMNS) for gold in labels.values())
    f1 = 2 * right / (answered + labelled)
    return f"{run}: cells {f1:.3f}, all lines right in {complete} of {len(labels)}"


def _answered_lines(record: dict[str, Any]) -> Lines:
    """Return the lines of a record of either form."""
    if "number of lines" not in record:
        return record.get("lines") or []
    lines = []
    for number in range(min(ROWS, record["number of lines"] or 0)):
        lines.append({column: record.get(f"line {number + 1} {column}") for column in COLUMNS})
    return lines


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            rows = [json.dumps(row, ensure_ascii=False) + "\n" for row in invoices()]
            FILE.write_text("".join(rows))
        case ["score", *runs]:
            print(*map(score, runs), sep="\n")
        case [folder]:
            write_both(Path(folder))
