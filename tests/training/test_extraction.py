"""Examples of attribute extraction: what is fed, predicted and seen (HPD, section 4.4)."""

import json
from pathlib import Path
from unicodedata import category

import hypothesis
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface

from raypd.config import Category, RunConfig
from raypd.config.schema import categories_of
from raypd.errors import ConfigError, InputError
from raypd.schema import Attribute
from raypd.tasks.base import Document
from raypd.training import attention
from raypd.training.data import check_training, prepare
from raypd.training.example import Skip, trace
from raypd.training.extraction import ExtractionExamples, slots_teacher, value_text
from raypd.training.packing import batches, count_tokens, layout_of, pack
from tests.runs import says, with_keys
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training.data import allowed, dense_logits, recorded, tree, write_corpus


@pytest.fixture
def make(tmp_path):
    def make(**sections):
        config = RunConfig.model_validate(
            tree(tmp_path / "none", tmp_path / "out", "none", **sections)
        )
        return ExtractionExamples(config, tiny_tokenizer(), 4096)

    return make


def documents(tmp_path, count=6):
    lines = write_corpus(tmp_path / "corpus.jsonl", count).read_text().splitlines()
    return [Document(row, str(row), json.loads(line)) for row, line in enumerate(lines)]


def document(row=0, title="Acme red 7", **target):
    return Document(
        row,
        str(row),
        {
            "category": "shoes",
            "title": title,
            "target": target,
        },
    )


def values(example):
    """Return the targets of each slot as text.

    A slot's targets stand at its end, and at the K_max - 1 positions after it.
    """
    tokens = {int(example.positions[i]): token for i, token in example.targets.items()}
    texts = []
    for index in sorted(example.targets):
        if example.steps[index] > 0:
            continue
        value = []
        position = int(example.positions[index])
        while position in tokens:
            value.append(tokens[position])
            position += 1
        texts.append(tiny_tokenizer().decode(value))
    return texts


def test_targets_are_the_values_up_to_what_ends_them(make):
    (example,) = make()(
        [
            document(
                Brand="Acme",
                Color="red",
                Size=7,
            )
        ]
    )
    assert values(example) == [' "Acme"', ' "r', " 7\n"]  # no other color begins with r
    (example,) = make()(
        [
            document(
                Brand="Acme",
                Color=None,
                Size=None,
            )
        ]
    )
    assert values(example) == [' "Acme"', " n", " n"]  # null is clear at its first letter


def test_texts_in_slots_have_no_quotes(make):
    slots = make(decoding={"skeleton": "slots"})
    first, second = slots(
        [
            document(
                Brand="A",
                Color="red",
                Size=7,
            ),
            document(1, Brand=None),
        ]
    )
    assert values(first) == [" A\n", ' "r', " 7\n"]
    assert values(second) == ["\n"]
    assert value_text(Attribute(name="a", many=True), None, bare=True) == " null\n"


def without_controls(text: str) -> str:
    """A text with blanks in place of control characters, and single blanks."""
    return " ".join("".join(" " if category(c) == "Cc" else c for c in text).split())


@settings(max_examples=30, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6))
@hypothesis.example("a\x02b\x7f c\x85")
def test_a_text_without_quotes_is_read_as_it_was_taught(tmp_path_factory, brand):
    folder = tmp_path_factory.mktemp("taught")
    decoding = {"skeleton": "slots", "max_value_tokens": 40}
    keys = tree(folder / "none", folder / "out", "none", decoding=decoding)
    config = RunConfig.model_validate(keys)
    make = ExtractionExamples(config, tiny_tokenizer(), 4096)
    attributes = make.categories["shoes"].attributes
    assume(without_controls(brand))
    (request,) = make.task.plan([document()])
    labels = [value_text(a, brand if a.name == "Brand" else None, True) for a in attributes]
    teacher = slots_teacher([make.encode(label) for label in labels])
    (record,) = request.finish(trace(request.program, teacher)[1])
    assert record.columns["record"]["Brand"] == without_controls(brand)


@pytest.mark.parametrize("text", ["\x02", " \x00\x9f\n", "\t"])
def test_a_text_of_control_characters_is_not_taught_without_quotes(text):
    with pytest.raises(Skip, match="a label is empty text"):
        value_text(Attribute(name="Brand"), text, bare=True)


def test_an_attribute_without_a_label_is_not_trained_not_even_as_null(make):
    examples = make()
    learned = [
        values(example) for example in examples([document(Size=None), document(1, Brand="Acme")])
    ]
    assert learned == [[" n"], [' "Acme"']]
    assert examples.lost == 0
    reason = "attributes without a label; null says that there is no value"
    assert dict(examples.skipped) == {reason: 4}


def test_autoregressive_needs_a_label_per_attribute(make):
    examples = make(decoding={"method": "autoregressive"})
    assert list(examples([document(Brand="Acme")])) == []
    says("".join(examples.skipped), "'Color'", "no label")


def test_values_of_an_object_that_may_be_missing_are_null_without_a_label(make):
    texts = {"city": {"type": "string"}, "zip": {"type": "string"}}
    address = {"type": "object", "properties": texts, "required": ["city", "zip"]}
    schema = {"title": "shoes", "properties": {"to": address, "nick": {"type": "string"}}}
    categories = {
        name: Category.model_validate(tree) for name, tree in categories_of(schema, Path()).items()
    }
    config = make().config
    task = config.task.model_copy(update={"categories": categories})
    config = config.model_copy(update={"task": task})
    examples = ExtractionExamples(config, tiny_tokenizer(), 4096)
    labelled = [
        document(0),
        document(1, to={"city": "Ulm"}),
        document(2, to=None, nick="x"),
        document(3, to="Ulm"),
    ]
    learned = [values(example) for example in examples(labelled)]
    assert learned == [
        [" n"] * 3,
        [' "Ulm"', " n"],
        [" n", " n", ' "x"'],
    ]
    says(
        "".join(examples.skipped), "attributes without a label", "a label of 'to' is not an object"
    )


@settings(max_examples=10, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["Acme", "Zeta corp", None]),
            st.sampled_from(["red", None]),
            st.sampled_from([7, 1200, None]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["none", "documents", "values"]),
    st.sampled_from(["keys", "slots"]),
)
def test_training_sees_what_decoding_sees(tmp_path_factory, targets, isolate, skeleton):
    tmp = tmp_path_factory.mktemp("seen")
    decoding = {"isolate": isolate, "stacked_documents": 2, "skeleton": skeleton}
    config = RunConfig.model_validate(tree(tmp / "none", tmp / "out", "none", decoding=decoding))
    make = ExtractionExamples(config, tiny_tokenizer(), 4096)
    corpus = []
    for row, (brand, color, size) in enumerate(targets):
        corpus.append(
            document(
                row,
                "Acme",
                Brand=brand,
                Color=color,
                Size=size,
            )
        )
    for example, request in zip(make(corpus), make.task.plan(corpus), strict=True):
        assert recorded(request.program, example) == allowed(example)


@pytest.mark.parametrize("kernel", ["products", "fused"])
@pytest.mark.parametrize("isolate", ["none", "documents", "values"])
def test_a_packed_pass_is_each_example_alone(make, tmp_path, isolate, kernel, monkeypatch):
    """Its loss and gradients are those of an unmodified model.

    That model gets each example alone, with a dense mask.
    """
    monkeypatch.setattr(attention, "products", getattr(attention, kernel))  # the kernel of a CPU
    examples = make(decoding={"isolate": isolate, "stacked_documents": 2})
    (group,) = batches(list(examples(documents(tmp_path))), 100, 100_000, 0)
    assert group[0].shared > 0
    packed = tiny_model("llama").double()
    reference = tiny_model("llama").double()
    AttentionInterface.register(attention.NAME, attention.attention)
    packed.set_attn_implementation(attention.NAME)
    batch = pack(group)
    assert batch["input_ids"].shape[1] == count_tokens(group)
    logits = packed(
        batch["input_ids"],
        position_ids=batch["position_ids"],
        logits_to_keep=batch["label_index"],
        use_cache=False,
        layout=layout_of(batch),
    ).logits[0]
    cross_entropy(logits, batch["shift_labels"], reduction="sum").backward()
    start = 0
    for example in group:
        alone = dense_logits(reference, example)
        rows = slice(start, start + len(alone))
        torch.testing.assert_close(
            logits[rows],
            alone,
            atol=1e-6,
            rtol=1e-6,
        )
        cross_entropy(alone, batch["shift_labels"][rows], reduction="sum").backward()
        start += len(alone)
    expected = dict(reference.named_parameters())
    for name, parameter in packed.named_parameters():
        gradient = expected[name].grad
        torch.testing.assert_close(
            parameter.grad,
            gradient,
            atol=1e-5,
            rtol=1e-5,
            msg=name,
        )


def test_autoregressive_writes_the_record_token_by_token(make):
    examples = make(decoding={"method": "autoregressive"})
    (example,) = examples(
        [
            document(
                Brand="Acme",
                Color=None,
                Size=7,
            )
        ]
    )
    *written, end = example.targets.values()
    assert tiny_tokenizer().decode(written) == '"Brand": "Acme",\n"Color": null,\n"Size": 7\n}'
    # Decoding stops at the last value, but other servers stop at the end of the turn.
    assert end == tiny_tokenizer().eos_token_id
    assert example.positions.tolist() == list(range(len(example)))


def test_columns_called_as_the_attributes_are_labels(make):
    examples = make()
    fields = {
        "category": "shoes",
        "title": "x",
        "Brand": "Acme",
        "Color": "",
        "Size": 7.0,
    }
    wrong = {**fields, "Color": "purple"}
    (example,) = examples([Document(0, "0", fields), Document(1, "1", wrong)])
    assert values(example) == [' "Acme"', " n", " 7\n"]
    assert [*examples.skipped] == [
        "a label is not a value of 'Color', which is one of red, blue, green, black"
    ]


def test_bad_input_is_counted_with_its_reason(make):
    examples = make()
    bad = [
        document(0, Brand="Acme", Weight="1 kg", Height=None),
        document(1),
        Document(
            2,
            "2",
            {
                "category": "shoes",
                "title": "x",
                "target": "[]",
            },
        ),
        document(3, Brand="A name of more than twelve tokens", Size=None),
        document(4, Color="purple"),
        document(5, Size="large"),
        Document(
            6,
            "6",
            {
                "category": "hats",
                "title": "x",
                "target": {"Brand": "x"},
            },
        ),
        document(7, title=" ", Brand="Acme"),
        Document(8, "8", {}, error="in.jsonl, byte 7: not JSON"),
        document(9, Brand=" "),
    ]
    usable = list(examples(bad))
    # The value of more than twelve tokens is no target.
    assert [values(example) for example in usable] == [[' "Acme"'], [" n"]]
    assert examples.lost == 8
    assert examples.lost_labels == 2
    assert examples.labels == 7
    reasons = "\n".join(sorted(examples.skipped))
    assert "Height" not in reasons  # null is no label
    says(
        reasons,
        "'Weight'",
        "'target': empty",
        "expected an object",
        "more than 12 tokens",
        "'Color'",
        "'Size'",
        "'hats'",
        "empty: nothing in title",
        "not JSON",
        "null says that there is no value",
    )


def test_windows_have_no_labels_of_their_own(make):
    with pytest.raises(ConfigError, match=r"task\.long_documents"):
        check_training(with_keys(make().config, task={"long_documents": "split"}))


@pytest.mark.parametrize(
    "target", [{"Weight": "1 kg"}, {"Brand": "A name of more than twelve tokens"}]
)
def test_a_training_is_refused_if_too_many_labels_are_left_out(tmp_path, target):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 1)
    row = {
        "category": "shoes",
        "title": "x",
        "target": target | {"Size": None},
    }
    more = [json.dumps({"id": f"more {n}", **row}) for n in range(9)]
    corpus.write_text(corpus.read_text() + "\n".join(more))
    sections = {"validation": str(write_corpus(tmp_path / "held_out.jsonl", 1))}
    config = RunConfig.model_validate(tree(corpus, tmp_path / "out", "none", training=sections))
    message = r"9 of 1\d labels cannot be trained on .*max_skipped_share is 10%"
    with pytest.raises(InputError, match=message):
        prepare(config, tiny_tokenizer(), 4096)


@pytest.mark.parametrize(("label", "text"), [(0.5, " 0.5\n"), (2, " 2\n")])
def test_a_number_with_values_is_written_as_one_of_them(label, text):
    assert (
        value_text(
            Attribute(
                name="a",
                type="number",
                values=[0.5, 2],
            ),
            label,
        )
        == text
    )


def test_an_integer_that_a_table_stores_as_a_float_is_written_without_a_point():
    assert value_text(Attribute(name="b", type="integer"), 7.0) == " 7\n"


def test_a_number_that_is_none_of_its_values_is_refused():
    with pytest.raises(Skip, match="a label is not a valid number"):
        value_text(
            Attribute(
                name="a",
                type="number",
                values=[0.5, 2],
            ),
            3,
        )
