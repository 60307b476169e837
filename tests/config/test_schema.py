"""task.schema, a pydantic model or a JSON Schema, as attributes; and patterns: the same texts match
as by `re`.
"""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from raypd.config.load import load_config, make_config
from raypd.config.render import render
from raypd.config.schema import categories_of, task_of
from raypd.errors import ConfigError
from raypd.schema import Attribute
from raypd.tasks.base import Document
from raypd.tasks.documents import category_of
from raypd.tasks.values import check
from tests.runs import config_tree, extraction, run_config

MODULE = '''
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Annotated, Literal, Optional
from pydantic import BaseModel, Field

class Fit(Enum):
    over = "over-ear"
    inner = "in-ear"

class Maker(BaseModel):
    name: str
    founded: Optional[date] = None

class Offer(BaseModel):
    shop: str
    price: Optional[float] = Field(None, ge=0)

class Product(BaseModel):
    """What a shop
    sells."""
    brand: str = Field(description="who made it", max_length=40)
    fit: Fit
    weight: Optional[float] = Field(gt=0, le=5)
    price: Optional[Decimal] = None
    count: int = Field(ge=1, lt=100)
    colors: list[Literal["red", "blue"]] = Field([], max_length=3)
    sku: Annotated[str, Field(pattern="^[A-Z]{2}[0-9]{4}$")]
    maker: Maker
    seller: Optional[Maker] = None
    offers: list[Offer] = Field([], max_length=5)
'''
RUN = "input: {path: in.jsonl, text_columns: [text]}\noutput: {path: out}\ntask: {schema: %s}\n"
DOUBLED = {
    f"d{n}": {"properties": {key: {"$ref": f"#/$defs/d{n + 1}"} for key in "ab"}} for n in range(40)
} | {"d40": {"type": "string"}}
PATTERNS = (
    r"^(a|b)*$",
    "a$|^b",
    "a^b",
    "(|a)+",
    "x*?y",
    "[^a]",
    "[]a]+",
    r"\Aab\Z",
    r"\bfoo\b.*",
    ".*\n?",
    "(?s:.)+",
    "(?i)ab+c",
    "(?i:ab)c",
    "(?i)a(?-i:b)",
    "(?i)k",
    "(?x) a b # c",
    "(?m)^a$\n^b$",
    "(?<!a)b|ab",
    r"\d+",
    r"(?u)\d+",
    r"(?a:\w)+",
    r"\w+\s?",
    "(ab){2}",
    "(a?){3}b",
    "((a|b){1,2}){2}",
    "(?P<n>a)(b)?",
    "a{,2}",
    "(a+)+b|a*",
    "[b-]+",
)
TEXTS = (
    "",
    "a\n",
    "a\nb",
    "12",
    "1٣",
    "foo b",
    " foo",
    "xxy",
    "é",
    "\u017f",
    "\u212a",
    "ABC",
    "abC",
    "aB",
    "]a",
    "b-",
)


def load(folder: Path, schema: Any, *overrides: str) -> Any:
    """The configuration of a file whose task.schema is YAML's own text, or this JSON Schema in a
    file.
    """
    if isinstance(schema, dict):
        (folder / "own.json").write_text(json.dumps(schema))
        schema = "own.json"
    (folder / "run.yaml").write_text(RUN % schema)
    return load_config(folder / "run.yaml", list(overrides))


def test_a_pydantic_model_beside_the_configuration_becomes_attributes(tmp_path: Path) -> None:
    (tmp_path / "shop_models.py").write_text(MODULE)
    config = load(tmp_path, "shop_models:Product")
    (category,) = config.task.categories.values()
    assert list(config.task.categories) == ["Product"]
    assert category.description == "What a shop sells."
    assert config.input.category_column is None  # documents need not name it
    made = {a.name: a for a in category.attributes}
    assert list(made) == [
        "brand",
        "fit",
        "weight",
        "price",
        "count",
        "colors",
        "sku",
        "maker.name",
        "maker.founded",
        "seller.name",
        "seller.founded",
        "offers",
    ]
    assert made["brand"].description == "who made it"
    assert made["brand"].max_length == 40
    assert made["brand"].required
    assert made["fit"].type == "enum"
    assert made["fit"].values == ["over-ear", "in-ear"]
    assert made["fit"].required
    assert not made["weight"].required
    assert not made["weight"].omit_null
    assert [made["weight"].fits(x) for x in (0, 0.01, 5, 5.1)] == [False, True, True, False]
    assert made["price"].type == "number"
    assert [made["count"].fits(x) for x in (0, 1, 99, 100, 1.5, True)] == [
        False,
        True,
        True,
        False,
        False,
        False,
    ]
    assert made["colors"].many
    assert made["colors"].max_items == 3
    assert made["colors"].omit_null
    assert [made["sku"].fits(x) for x in ("AB1234", "AB12345")] == [True, False]
    assert made["maker.founded"].key_path == ["maker", "founded"]
    assert made["maker.founded"].type == "date"
    assert made["maker.name"].required
    assert not made["seller.name"].required
    assert category.optional_objects == [["seller"]]
    assert "max_items: 3" in render(config)
    offers = made["offers"]
    assert [(c.name, c.type, c.required, c.omit_null) for c in offers.columns] == [
        ("shop", "text", True, False),
        ("price", "number", False, True),
    ]
    rows = [
        [{"shop": "a", "price": 1}],
        [{"shop": "a"}],
        [{"shop": "a", "price": -1}],
        [{}] * 6,
    ]
    assert [offers.fits(row) for row in rows] == [True, True, False, False]


def test_the_fingerprint_is_of_the_attributes_and_not_of_where_they_stand(tmp_path: Path) -> None:
    schema = {"title": "shoe", "properties": {"size": {"type": ["integer", "null"]}}}
    ours = load(tmp_path, schema)
    (tmp_path / "same.yaml").write_text(
        "title: shoe\nproperties: {size: {type: [integer, 'null']}}\n"
    )
    for other in ("same.yaml", json.dumps(schema)):
        assert load(tmp_path, other).fingerprint() == ours.fingerprint()
    schema["properties"]["size"]["maximum"] = 60  # type: ignore[index]
    assert load(tmp_path, schema).fingerprint() != ours.fingerprint()
    task = extraction(
        shoe=[
            {
                "name": "size",
                "type": "integer",
                "omit_null": True,
            }
        ]
    )
    same = run_config(task, input={"text_columns": ["text"], "category_column": None})
    assert same.fingerprint() == ours.fingerprint()


def test_objects_that_a_constant_tells_apart_are_one(tmp_path: Path) -> None:
    (tmp_path / "pets.py").write_text(
        "from typing import *\nfrom pydantic import *\n"
        "class Cat(BaseModel):\n    kind: Literal['cat']\n    name: str\n    lives: int\n"
        "class Dog(BaseModel):\n    kind: Literal['dog']\n    name: str\n    breed: str\n"
        "class Owner(BaseModel):\n    pet: Annotated[Union[Cat, Dog], "
        "Field(discriminator='kind')]\n"
    )
    made = load(tmp_path, "pets:Owner").task.categories["Owner"].attributes
    assert [(a.name, a.values, a.required, a.omit_null) for a in made] == [
        ("pet.kind", ["cat", "dog"], True, False),
        ("pet.name", [], True, False),
        ("pet.lives", [], False, True),
        ("pet.breed", [], False, True),
    ]


def test_bounds_and_null_as_draft_4_and_open_api_have_them(tmp_path: Path) -> None:
    whole = {
        "type": "integer",
        "minimum": 1,
        "exclusiveMinimum": True,
        "maximum": 9,
        "exclusiveMaximum": False,
    }
    null = {"allOf": [{"$ref": "#/$defs/n"}], "nullable": True}
    schema = {
        **of(
            a=whole,
            b=null,
            c={"$ref": "#/$defs/n"},
        ),
        "required": ["a", "b", "c"],
        "$defs": {"n": whole},
    }
    made = load(tmp_path, schema).task.categories["record"].attributes
    assert [[a.fits(n) for n in (1, 2, 9, 10)] for a in made] == [[False, True, True, False]] * 3
    assert [a.required for a in made] == [True, False, True]


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def made(schema: dict[str, Any]) -> Attribute:
    """The attribute that property `a` becomes."""
    (category,) = categories_of(of(a=schema), Path()).values()
    (attribute,) = category["attributes"]
    return Attribute(**attribute)


OBJECT = of(x={"type": "string"})
SEARCHES = [
    "^SKU-",
    "[A-Z]{2}",
    "^S$|^M$",
    "^[^/]{1,5}$",
    "(^|,)x",
    "x(,|$)",
    "a$",
    r"\S+@\S+",
    "^(a|b|cd)*e?$",
    "^a{2,}b|c$",
    "^a?b",
    "^$",
    "",
    r"\$$",
    "(?:ab)+?c",
    "(?i)^sku",
]
SEARCHED_TEXTS = [
    *("", "SKU-88213", "a SKU-1", "sku-1", "S", "M", "SM", "a/b", "ABCDEF", "code DE-79", ",x"),
    *("ax", "a,x", "x,", "x", "ba", "aab", "bab", "bc", "c", "cda", "abe", "q@r", "5 $", "$ 5"),
    *("a\nb", "SKU-\n1", "ababc"),
]


@pytest.mark.parametrize("pattern", SEARCHES)
def test_a_pattern_of_json_schema_is_a_search(pattern: str) -> None:
    """The same texts fit as jsonschema accepts; its `$` is the end alone, as in ECMAScript."""
    attribute = made({"type": "string", "pattern": pattern})
    end_alone = {"pattern": re.sub(r"(?<!\\)\$", r"\\Z", pattern)}
    for text in SEARCHED_TEXTS:
        is_valid = jsonschema.Draft202012Validator(end_alone).is_valid(text)
        assert attribute.fits(text) == is_valid, text


def test_a_pattern_of_ones_own_matches_the_whole_value() -> None:
    attribute = Attribute(name="a", type="pattern", pattern="SKU-[0-9]")
    assert attribute.fits("SKU-1")
    assert not attribute.fits("SKU-12")


def test_a_pattern_beside_a_format_drops_neither() -> None:
    attribute = made({"type": "string", "format": "date", "pattern": "^2024-|-01$"})
    assert attribute.type == "date"
    fitting = [attribute.fits(text) for text in ("2024-02-29", "2023-05-01", "2023-05-02")]
    assert fitting == [True, True, False]
    assert not attribute.fits("2024-soon")
    assert made(
        {
            "type": "string",
            "format": "color",
            "pattern": "^#",
        }
    ).fits("#fff")


@pytest.mark.parametrize(
    ("schema", "fitting", "others"),
    [
        (
            {"anyOf": [{"type": "string", "enum": ["new", "used"]}, {"const": "like new"}]},
            ["new", "used", "like new"],
            ["old"],
        ),
        ({"anyOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, ["a", "b", "c"], ["d"]),
        ({"oneOf": [{"const": 1}, {"enum": [2, 3]}]}, [1, 2, 3], [4]),
        ({"enum": [1, 2, 30], "maximum": 9}, [1, 2], [30]),
        (
            {"anyOf": [{"type": "integer", "maximum": 4}, {"type": "integer", "minimum": 5}]},
            [-9, 4, 5, 99],
            [],
        ),
        (
            {
                "anyOf": [
                    {"type": "number", "minimum": 0, "maximum": 5},
                    {"type": "number", "minimum": 3, "exclusiveMaximum": 9},
                ]
            },
            [0, 4, 8.9],
            [-1, 9],
        ),
        ({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}]}, [0], [-1]),
        (
            {"anyOf": [{"type": "number", "minimum": 3}, {"type": "null"}], "minimum": 0},
            [3],
            [0, 2],
        ),
        ({"$ref": "#/properties/b", "maximum": 50}, [0, 9], [-1, 10]),
        ({"allOf": [{"type": "number", "minimum": 3}, {"maximum": 4}]}, [3, 4], [2, 5]),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": False}, [["x", "x"]], []),
        (
            {"type": "string", "if": {"minLength": 2}, "not": False, "patternProperties": {}},
            ["x"],
            [],
        ),
        ({"type": "integer", "multipleOf": 1}, [3], []),
    ],
)
def test_every_bound_and_value_counts(
    schema: dict[str, Any], fitting: list[Any], others: list[Any]
) -> None:
    """And jsonschema says the same of each value."""
    beside = {"type": "number", "minimum": 0, "maximum": 9}
    tree = of(a=schema, b=beside)
    (category,) = categories_of(tree, Path()).values()
    attribute = Attribute(**category["attributes"][0])
    for value in fitting + others:
        assert attribute.fits(value) == (value in fitting), value
        assert jsonschema.Draft202012Validator(tree).is_valid({"a": value}) == (value in fitting)


@pytest.mark.parametrize(
    ("ref", "definitions"),
    [
        ("#/$defs/Maker%20Info", {"Maker Info": {"type": "integer"}}),
        ("#/$defs/a~1b~0c%25", {"a/b~c%": {"type": "integer"}}),
        ("#/$defs/Size%C3%9F", {"Size\u00df": {"type": "integer"}}),
        ("#/$defs/one/anyOf/1", {"one": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}),
        ("#/$defs/", {"": {"type": "integer"}}),
    ],
)
def test_references_are_pointers_in_a_uri(ref: str, definitions: dict[str, Any]) -> None:
    tree = {**of(a={"$ref": ref}), "$defs": definitions}
    (category,) = categories_of(tree, Path()).values()
    assert category["attributes"][0]["type"] == "integer"
    validator = jsonschema.Draft202012Validator(tree)
    assert validator.is_valid({"a": 1})
    assert not validator.is_valid({"a": "1"})


WRONG = {
    "required": None,
    "description": 5,
    "enum": 5,
    "$ref": 5,
    "anyOf": 5,
    "allOf": {},
    "exclusiveMinimum": "1",
}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        *[
            (of(a={"type": "integer", k: v}), rf"a\.{re.escape(k)}: .* is not of its type")
            for k, v in WRONG.items()
        ],
        (of(a={**OBJECT, "required": True}), r"\$.properties.a.required: True is not of its type"),
        ("{properties: {5: {type: string}}}", r"\$.properties.5: expected a name, as text"),
        (of(a={"anyOf": [{"$ref": 5}, {}]}), r"\$.properties.a.anyOf.\$ref: 5 is not of its type"),
        (
            of(a={"anyOf": [of(b=5), of(b={"const": "x"})]}),
            r"\$.properties.a.anyOf.properties.b: expected a name",
        ),
        (
            of(a={"type": "integer", "minimum": 1e999, "exclusiveMinimum": True}),
            "cannot convert float infinity",
        ),
        (
            of(offers={"type": "array", "items": of(parts={"type": "array", "items": OBJECT})}),
            r"own.json: \$.properties.offers: .*column 'parts': a column is a single value",
        ),
        (
            of(offers={"type": "array", "items": of(maker=OBJECT)}),
            (
                r"\$.properties.offers.items.properties.maker: an object in a list's objects "
                r"cannot be decoded"
            ),
        ),
        (
            of(offers={"type": "array", "items": {"type": "object"}}),
            r"\$.properties.offers.items: an object without",
        ),
        (
            of(a=of(b={"type": "object"})),
            r"\$.properties.a.properties.b: an object without `properties`",
        ),
        (
            {"$defs": {"N": of(next={"$ref": "#/$defs/N"})}, "$ref": "#/$defs/N"},
            r"\$.properties.next: #/\$defs/N contains itself",
        ),
        (of(a={"anyOf": [OBJECT, OBJECT]}), r"\$.properties.a.anyOf: a choice of objects"),
        (
            of(a={"anyOf": [{"type": "string"}, {"type": "boolean"}]}),
            r"\$.properties.a.anyOf: a choice of several types",
        ),
        (of(a={}), r"\$.properties.a: a value of any kind"),
        (
            of(a={"type": ["bolean", "null"]}),
            r"own.json: \$.properties.a.type: 'bolean' is not a type .*; did you mean 'boolean'",
        ),
        (
            of(a={"type": "array", "items": {"type": "xyz"}}),
            r"items.type: 'xyz' is not a type of JSON Schema; choose from string, number, integer",
        ),
        (of(a={"enum": [1, "b"]}), r"\$.properties.a.enum: values other than texts or numbers"),
        (
            of(a={"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 2}),
            "`min_items` is above",
        ),
        (of(a={"enum": [1, True]}), r"\$.properties.a.enum: values other than texts or numbers"),
        (
            of(a={"enum": [1e300, 2]}),
            r"\$.properties.a: .*value '1e.300': write it as a JSON value",
        ),
        (of(a={"enum": ['a "b"']}), r"\$.properties.a: .*without quotes and backslashes"),
        (
            of(a={"type": "string", "pattern": "["}),
            r"\$.properties.a.pattern: it is not a regular expression",
        ),
        (
            of(a={"type": "string", "pattern": "a(?!b)"}),
            r"\$.properties.a.pattern: look-around cannot",
        ),
        (
            of(a={"type": "string", "pattern": "^0", "format": "uuid"}),
            r"\$.properties.a.pattern: beside format uuid",
        ),
        (
            of(a={"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b"}]}),
            r"\$.properties.a.pattern: two different ones",
        ),
        (
            of(a={"type": "integer", "enum": ["x"]}),
            r"\$.properties.a.enum: its other keywords permit none",
        ),
        (
            of(a={"type": "number", "minimum": 3, "maximum": 2}),
            r"\$.properties.a: .*`minimum` \(3\) is above `maximum` \(2\)",
        ),
        (
            of(a={"type": "number", "minimum": 3, "exclusiveMaximum": 3}),
            r"\$.properties.a: .*`minimum` \(3\) is above",
        ),
        (
            of(a={"type": "integer", "minimum": 1.2, "maximum": 1.8}),
            r"\$.properties.a: .*no integer is from 1.2 to 1.8",
        ),
        (
            of(a={"type": "string", "minLength": 3, "maxLength": 2}),
            r"\$.properties.a: .*`min_length` \(3\) is above `max_length` \(2\)",
        ),
        (
            of(a={"anyOf": [{"type": "number", "maximum": 1}, {"type": "number", "minimum": 2}]}),
            r"\$.properties.a.anyOf: bounds with a gap",
        ),
        (
            of(a={"anyOf": [{"type": "number", "maximum": 1}, {"type": "integer"}]}),
            r"\$.properties.a.anyOf: integers beyond the bounds",
        ),
        (
            of(a={"anyOf": [{"type": "number", "minimum": 9, "maximum": 1}, {"type": "string"}]}),
            r"\$.properties.a.anyOf: minimum \(9\) is above maximum",
        ),
        (
            of(a={"anyOf": [{"type": "number", "multipleOf": 5}, {"type": "string"}]}),
            r"\$.properties.a.anyOf.multipleOf: cannot be enforced",
        ),
        (
            of(a={"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
            r"\$.properties.a.uniqueItems: cannot be enforced",
        ),
        (
            of(a={"type": "integer", "multipleOf": 5}),
            r"\$.properties.a.multipleOf: cannot be enforced",
        ),
        (
            of(a={"type": "integer", "default": 1.5}),
            r"\$.properties.a.default: 1.5 is not of its type",
        ),
        (of(**{"a" * 201: {"type": "string"}}), r"at most 200 characters"),
        (
            of(Color={"type": "string"}, color_={"type": "string"}),
            "'Color' and 'color_' differ only in case or punctuation",
        ),
        (
            of(a={"$ref": "#/$defs/none"}),
            r"\$.properties.a.\$ref: #/\$defs/none is not in the schema",
        ),
        ("nowhere.json", r"nowhere.json: no such file$"),
        ("no_such_module:Thing", r"no_such_module:Thing: cannot be imported: ModuleNotFoundError"),
        ("thing", "neither a file .* nor a pydantic model"),
    ],
)
def test_what_cannot_be_decoded_is_refused_with_its_place(
    tmp_path: Path, schema: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, schema)


@pytest.mark.parametrize("given", [5, [5], Path, [Path("a.json")]])
def test_what_is_no_schema_of_python_is_refused(given: Any) -> None:
    with pytest.raises(
        ConfigError, match="name the attributes, or give a pydantic model or a JSON Schema, not "
    ):
        task_of(given)


def test_one_schema_at_a_time_and_names_are_one(tmp_path: Path) -> None:
    assert task_of("Brand, Battery life ,") == task_of(["Brand", "Battery life"])
    with pytest.raises(ConfigError, match=r"task.schema and task.categories are both set"):
        load(tmp_path, OBJECT, "task.categories={c: {attributes: [{name: a}]}}")


def _nested(levels: int, wrap: Any) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = wrap(schema)
    return schema


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": DOUBLED},
            "more than 5,000 properties",
        ),
        (_nested(3000, lambda inner: {"properties": {"a": inner}}), "nested more than 50 deep"),
        (
            {"properties": {"a": _nested(3000, lambda inner: {"anyOf": [inner]})}},
            r"\$\.properties\.a: schemas are nested",
        ),
        (
            {"properties": {"a": {"enum": ["x" * 1_000_000]}}},
            "an enum value of 1,000,000 characters; limit 1,000",
        ),
        (
            {"properties": {"a": {"enum": [f"{n:0900}" for n in range(999)]}}},
            "899,100 characters; limit 400,000",
        ),
    ],
)
def test_a_schema_that_explodes_is_refused_at_once(tmp_path: Path, schema: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        categories_of(schema, tmp_path)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ([[{"name": "Status"}]], "'Status' .* needs the same column as raypd's own data"),
        (
            [[{"name": "a"}], [{"name": "A", "type": "number"}]],
            "c1: 'A' .number. needs the same column as task.categories.c0: 'a' .text.",
        ),
        (
            [[{"name": "a", "path": ["x", "y"]}, {"name": "x"}]],
            "'x' .text. needs the same column as .*'a' .object.",
        ),
        ([[{"name": "x"}, {"name": "x__status"}]], "'x__status' .* needs the same column as"),
        ([[{"name": "x"}, {"name": "x__window"}]], "'x__window' .* needs the same column as"),
    ],
)
def test_attributes_that_cannot_have_a_column_each(attributes: Any, words: str) -> None:
    task = extraction(**{f"c{i}": listed for i, listed in enumerate(attributes)})
    tree = config_tree(task, output={"columns": "typed"})
    with pytest.raises(ConfigError, match=words):
        make_config(tree)
    make_config(tree, ["output.columns=record"])


def test_a_schema_nested_too_deeply_is_one_line() -> None:
    with pytest.raises(
        ConfigError, match="the configuration, or a schema in it, is nested too deeply"
    ):
        make_config(
            config_tree({"schema": _nested(400, lambda inner: {"properties": {"a": inner}})})
        )


def test_a_name_alone_is_an_attribute_wherever_attributes_are_listed(tmp_path: Path) -> None:
    rows = {"name": "lines", "type": "rows", "columns": ["item", {"name": "n", "type": "integer"}]}
    tree = {"categories": {"bill": {"attributes": ["Total", rows]}}}
    total, lines = make_config(config_tree(tree)).extraction.categories["bill"].attributes
    assert total == Attribute(name="Total")
    assert [column.name for column in lines.columns] == ["item", "n"]
    file = tmp_path / "bill.yaml"
    file.write_text("attributes: [Total]\ndescription: of a shop\n")
    category = make_config(config_tree({"schema": str(file)})).extraction.categories["record"]
    assert category.description == "of a shop"
    assert task_of({"attributes": ["Total"]}) == {
        "categories": {"record": {"attributes": ["Total"]}}
    }
    with pytest.raises(ConfigError, match=r"without a category: set task\.schema"):
        make_config(config_tree({"categories_file": str(file)}))


def test_documents_of_one_kind_need_no_category(tmp_path: Path) -> None:
    size = {"name": "Size", "type": "number"}
    short = make_config(config_tree({"attributes": ["Brand", size]}))
    whole = make_config(
        config_tree(extraction(record=["Brand", size]), input={"category_column": None})
    )
    assert short.task == whole.task
    assert short.fingerprint() == whole.fingerprint()
    named = make_config(config_tree(extraction(shoes=["Brand"])))
    assert category_of(Document(0, "0"), named.input, named.task.categories) == "shoes"
    several = make_config(config_tree(extraction(shoes=["Brand"], hats=["Brand"])))
    misspelt = make_config(
        config_tree(extraction(shoes=["Brand"]), input={"category_column": "kinds"})
    )
    wanted = [
        "input.category_column" in c.wanted_columns() for c in (short, named, several, misspelt)
    ]
    assert wanted == [False, False, True, True]
    text = "input: {path: a}\noutput: {path: b}\ntask:\n  attributes:\n  - a\n  - {type: x}\n"
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(
        ConfigError, match=r"run\.yaml:6: task\.attributes\.1\.type: choose from text"
    ):
        load_config(tmp_path / "run.yaml")
    with pytest.raises(
        ConfigError, match=r"task\.attributes: Input should be a valid list \(it is 'Brand'\)"
    ):
        make_config(config_tree({"attributes": "Brand"}))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_same_texts_match_as_by_re(pattern: str) -> None:
    attribute = Attribute(name="a", type="pattern", pattern=pattern)
    for text in (
        *TEXTS,
        *("".join(chars) for length in (1, 2, 3, 4) for chars in product("ab", repeat=length)),
    ):
        assert attribute.fits(text) == bool(re.fullmatch(attribute.value_type.regex, text)), text


@pytest.mark.parametrize(
    ("pattern", "text"), [("^(a+)+$", "a" * 2000 + "!"), ("(a|aa)+$", "a" * 5000 + "b")]
)
def test_a_text_that_holds_re_up_does_not_match(pattern: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"\$\.properties\.a\.default: .* is not of its type"):
        categories_of(
            {
                "properties": {
                    "a": {
                        "type": "string",
                        "pattern": pattern,
                        "default": text,
                    }
                }
            },
            Path(),
        )
    assert (
        check(
            Attribute(
                name="a",
                type="pattern",
                pattern=pattern,
                many=True,
            ),
            f'["{text}"]',
        ).status
        == "invalid"
    )


@pytest.mark.parametrize("pattern", ["(" * 3000 + "a" + ")" * 3000, "a{99999999999999}"])
def test_a_pattern_that_python_cannot_read_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="'a': the pattern is not a regular expression: "):
        Attribute(name="a", type="pattern", pattern=pattern)


def attribute_of(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The keys of the attribute that a property becomes."""
    tree = {"type": "object", "properties": {"a": schema}, **more}
    (category,) = categories_of(tree, Path()).values()
    return category["attributes"][0]


@pytest.mark.parametrize(
    "null",
    [
        {"type": "null"},
        {"type": ["null"]},
        {"type": "null", "description": "none"},
        {"const": None},
        {"enum": [None]},
    ],
)
def test_null_may_be_written_in_several_ways(null):
    assert attribute_of({"anyOf": [{"type": "integer"}, null]})["type"] == "integer"


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        # As pydantic writes a Decimal and a naive datetime.
        ({"anyOf": [{"type": "number"}, {"type": "string"}], "default": "0"}, "number"),
        ({"type": "string", "format": "date-time", "default": "2020-01-01T00:00:00"}, "date-time"),
        ({"$ref": "#/$defs/x", "default": "b"}, "enum"),
    ],
)
def test_a_default_is_valid_where_the_schema_says_so(schema, kind):
    assert attribute_of(schema, **{"$defs": {"x": {"enum": ["a", "b"]}}})["type"] == kind


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "items": {"type": "string"}, "enum": [["a"]]}, "$.properties.a.enum"),
        (
            {"type": "object", "properties": {"b": {"type": "string"}}, "const": {"b": "x"}},
            "$.properties.a.const",
        ),
        (
            {"oneOf": [{"type": "number", "maximum": 2}, {"type": "number", "minimum": 1}]},
            "valid under two of its schemas",
        ),
        ({"type": "string", "format": "date", "maxLength": 5}, "$.properties.a.maxLength"),
        ({"type": "string", "format": "date-time", "minLength": 21}, "$.properties.a.minLength"),
        ({"type": "integer", "minimum": 2**70}, "above every integer of 64 bits"),
        ({"type": "integer", "maximum": -(2**70)}, "below every integer of 64 bits"),
        ({"type": "string", "default": 5}, "5 is not of its type"),
    ],
)
def test_what_would_be_ignored_is_refused(schema, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        attribute_of(schema)


def test_a_value_is_valid_under_one_of_the_schemas_of_oneof():
    options = [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]
    assert attribute_of({"oneOf": options})["values"] == ["a", "c"]
    assert attribute_of({"anyOf": options})["values"] == ["a", "b", "c"]
    ranges = [{"type": "number", "maximum": 2}, {"type": "number", "minimum": 3}]
    with pytest.raises(ConfigError, match="gap"):
        attribute_of({"oneOf": ranges})


def test_a_schema_file_that_is_missing_is_reported_with_a_similar_one(tmp_path: Path) -> None:
    (tmp_path / "tree.yaml").write_text("title: Title\n")
    with pytest.raises(ConfigError, match=r"nope.yaml: no such file$"):
        load(tmp_path, "nope.yaml")
    with pytest.raises(ConfigError, match=r"trees.yaml: no such file; did you mean .*/tree.yaml\?"):
        load(tmp_path, "trees.yaml")
