"""What becomes of a record as servers write it: numbers that are ends of ranges, text in place of a
record, answers that were cut.
"""

import json

import pytest

from raypd import LLM
from tests.models.test_endpoint import said
from tests.servers import Reply, serving

ATTRIBUTES = [
    {"name": "Salary", "type": "number"},
    {"name": "Years", "type": "integer"},
    {"name": "Title"},
    {"name": "Tags", "many": True},
]


def extracted(document: str, content: str, finish: str = "stop", attributes=ATTRIBUTES):
    """The answer for a document whose server writes this content."""
    reply = Reply(200, body=json.dumps(said(content, finish)).encode())
    with serving(lambda call: reply) as url:
        settings = {"model.endpoint": {"url": f"{url}/v1", "key_variable": None, "retries": 0}}
        (answer,) = LLM("m", settings=settings).extract([document], attributes)
    return answer


def test_an_end_of_a_range_is_no_value():
    record = '{"Salary": 54000, "Years": 3, "Title": "Nurse", "Tags": ["a"]}'
    answer = extracted("Nurse, 54k to 60k a year, von 3 bis 5 Jahren", record)
    assert answer.value == {
        "Salary": None,
        "Years": None,
        "Title": "Nurse",
        "Tags": ["a"],
    }
    assert answer.status["Salary"] == answer.status["Years"] == "ambiguous"
    answer = extracted("Nurse, 54 000 a year, 3 years, size 36 to 38", record)
    assert answer.value["Salary"] == 54000
    assert answer.value["Years"] == 3


def test_both_ends_of_a_range_may_be_asked_for():
    names = [{"name": "salary_min", "type": "number"}, {"name": "salary_max", "type": "number"}]
    record = '{"salary_min": 54000, "salary_max": 60000}'
    answer = extracted("Nurse, 54k to 60k a year", record, attributes=names)
    assert answer.value == {"salary_min": 54000, "salary_max": 60000}


@pytest.mark.parametrize("pay", ["37k", "\u00a337k", "37 k", "37 million"])
def test_a_number_without_the_word_behind_it_is_no_value(pay):
    document = f"Nurse (York). {pay} plus benefits."
    names = [{"name": "salary", "type": "number", "description": "the full amount in pounds"}]
    answer = extracted(document, '{"salary": 37}', attributes=names)
    assert (answer.value, answer.status) == ({"salary": None}, {"salary": "ambiguous"})
    names[0]["description"] = "in thousands"
    answer = extracted(document, '{"salary": 37}', attributes=names)
    assert (answer.value, answer.status) == ({"salary": 37}, {"salary": "ok"})


@pytest.mark.parametrize("pay", ["\u00a337,090", "37.090 EUR", "\u00a337'090"])
def test_a_thousandth_of_an_amount_is_no_value_unless_thousands_are_asked_for(pay):
    document = f"Nurse (York). {pay} plus benefits."
    names = [{"name": "salary", "type": "number", "description": "the full amount in pounds"}]
    answer = extracted(document, '{"salary": 37.09}', attributes=names)
    assert (answer.value, answer.status) == ({"salary": None}, {"salary": "ambiguous"})
    names[0]["description"] = "in thousands"
    answer = extracted(document, '{"salary": 37.09}', attributes=names)
    assert (answer.value, answer.status) == ({"salary": 37.09}, {"salary": "ok"})


def test_the_full_amount_of_thousands_is_a_value():
    names = [{"name": "salary", "type": "number"}]
    answer = extracted("Nurse (York). \u00a337k", '{"salary": 37000}', attributes=names)
    assert (answer.value, answer.status) == ({"salary": 37000}, {"salary": "ok"})


def test_what_was_not_reached_is_cut_and_not_invalid():
    answer = extracted("Nurse", '{"Salary": 5, "Years": 3, "Title": "Nur', "length")
    assert answer.status == {
        "Salary": "ok",
        "Years": "ok",
        "Title": "truncated",
        "Tags": "truncated",
    }
    # A model that ends by itself leaves keys out.
    answer = extracted("Nurse", '{"Salary": 5, "Title": "Nurse"}')
    assert answer.status["Tags"] == "invalid"


@pytest.mark.parametrize(
    ("written", "title"),
    [
        ('"a\\u0000b"', "ab"),
        ('"a\\ud83d"', "a"),
        ('"\\ud83d\\ude00"', "\U0001f600"),
        ("NaN", None),
        ("Infinity", None),
    ],
)
def test_a_text_holds_nothing_that_tables_cannot_hold(written, title):
    answer = extracted("Nurse", f'{{"Title": {written}, "Salary": 1, "Years": 2, "Tags": []}}')
    assert answer.error is None
    assert answer.value["Title"] == title
    assert answer.status["Title"] == ("invalid" if title is None else "ok")


def test_half_a_character_of_a_server_is_left_out():
    answer = extracted("Nurse", '{"Title": "a\ud83d", "Salary": 1, "Years": 2, "Tags": []}')
    assert answer.error is None
    assert answer.value["Title"] == "a"


def test_a_number_that_was_misread_by_a_factor_of_a_thousand_is_no_value():
    names = [{"name": "net", "type": "number"}, {"name": "salary", "type": "number"}]
    document = "Netto 16.303,76 EUR, salary USD 31,500"
    answer = extracted(document, '{"net": 16.303, "salary": 31.500}', attributes=names)
    assert answer.value == {"net": None, "salary": None}
    assert answer.status == {"net": "ambiguous", "salary": "ambiguous"}
    answer = extracted(document, '{"net": 16303.76, "salary": 31500}', attributes=names)
    assert answer.value == {"net": 16303.76, "salary": 31500}


@pytest.mark.parametrize("bound", [{}, {"maximum": 9}, {"values": ["1", "2", "3"]}])
@pytest.mark.parametrize("km", ["1850", "null"])
def test_a_count_is_no_part_of_a_number_that_it_cannot_be(bound, km):
    names = [{"name": "drivers", "type": "integer", **bound}, {"name": "km", "type": "number"}]
    document = "I am the only driver. We will drive 1,850 km."
    answer = extracted(document, f'{{"drivers": 1, "km": {km}}}', attributes=names)
    # Without a bound, only the other attribute shows that 1,850 is not the number of drivers.
    is_known = bool(bound) or km == "1850"
    assert answer.status["drivers"] == ("ok" if is_known else "ambiguous")
    assert answer.value["drivers"] == (1 if is_known else None)
