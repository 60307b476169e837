"""Examples of attribute extraction: what is fed, what is predicted, and who sees whom, as HPD's
section 4.4 has it.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface

from raypd.config import Attribute, Category, RunConfig
from raypd.config.schema import categories_of
from raypd.errors import ConfigError, InputError
from raypd.tasks.base import Document
from raypd.training import attention
from raypd.training.data import check, prepare
from raypd.training.example import Skip, trace
from raypd.training.extraction import ExtractionExamples, slots_teacher, value_text
from raypd.training.packing import Layout, batches, count_tokens, pack
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
    return Document(row, str(row), {"category": "shoes", "title": title, "target": target})


def values(example):
    """The targets of each slot as text: a slot's targets stand at its end and at the K_max - 1
    positions behind it.
    """
    ends = [int(example.positions[i]) for i in sorted(example.targets) if example.steps[i] == 0]
    tokens = {int(example.positions[i]): token for i, token in example.targets.items()}
    runs = [itertools.takewhile(tokens.__contains__, itertools.count(end)) for end in ends]
    return [tiny_tokenizer().decode([tokens[place] for place in run]) for run in runs]


def test_targets_are_the_values_up_to_what_ends_them(make):
    (example,) = make()([document(Brand="Acme", Color="red", Size=7)])
    assert values(example) == [' "Acme"', ' "r', " 7\n"]  # no other color begins with r
    (example,) = make()([document(Brand="Acme", Color=None, Size=None)])
    assert values(example) == [' "Acme"', " n", " n"]  # null is clear at its first letter
    slots = make(decoding={"skeleton": "slots"})
    first, second = slots([document(Brand="A", Color="red", Size=7), document(1, Brand=None)])
    assert (values(first), values(second)) == ([" A\n", ' "r', " 7\n"], ["\n"])
    assert value_text(Attribute(name="a", many=True), None, bare=True) == " null\n"


@settings(max_examples=30, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6).filter(str.strip))
def test_a_text_without_quotes_is_read_as_it_was_taught(tmp_path_factory, brand):
    tmp, decoding = tmp_path_factory.mktemp("taught"), {"skeleton": "slots", "max_value_tokens": 40}
    config = RunConfig.model_validate(tree(tmp / "none", tmp / "out", "none", decoding=decoding))
    make = ExtractionExamples(config, tiny_tokenizer(), 4096)
    (request,) = make.task.plan([document()])
    gold = [
        value_text(a, brand if a.name == "Brand" else None, True)
        for a in make.categories["shoes"].attributes
    ]
    (record,) = request.finish(
        trace(request.program, slots_teacher([make.encode(text) for text in gold]))[1]
    )
    assert json.loads(record.columns["record"])["Brand"] == " ".join(brand.split())


def test_without_a_label_nothing_is_learned_of_an_attribute_not_even_null(make):
    examples, control = make(), make(decoding={"method": "autoregressive"})
    learned = [
        values(example) for example in examples([document(Size=None), document(1, Brand="Acme")])
    ]
    assert learned == [[" n"], [' "Acme"']]
    skipped = {"attributes without a label; null says that there is no value": 4}
    assert (examples.lost, dict(examples.skipped)) == (0, skipped)
    assert list(control([document(Brand="Acme")])) == []  # it writes every attribute
    place = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "zip": {"type": "string"}},
    }
    to = {**place, "required": ["city", "zip"]}
    schema = {"title": "shoes", "properties": {"to": to, "nick": {"type": "string"}}}
    categories = {
        name: Category.model_validate(tree) for name, tree in categories_of(schema, Path()).items()
    }
    config = control.config.model_copy(
        update={"task": control.config.task.model_copy(update={"categories": categories})}
    )
    decoding = config.decoding.model_copy(update={"method": "hyper_parallel"})
    optional = ExtractionExamples(
        config.model_copy(update={"decoding": decoding}), tiny_tokenizer(), 4096
    )
    labels = [{}, {"to": {"city": "Ulm"}}, {"to": None, "nick": "x"}, {"to": "Ulm"}]
    taught = [
        values(example)
        for example in optional([document(n, **each) for n, each in enumerate(labels)])
    ]
    assert taught == [[" n"] * 3, [' "Ulm"', " n"], [" n", " n", ' "x"']]
    says("".join(optional.skipped), "attributes without a label", "a label of 'to' is no object")
    says("".join(control.skipped), "'Color'", "no label")


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
    corpus = [document(i, "Acme", Brand=b, Color=c, Size=s) for i, (b, c, s) in enumerate(targets)]
    for example, request in zip(make(corpus), make.task.plan(corpus), strict=True):
        assert recorded(request.program, example) == allowed(example)


@pytest.mark.parametrize("kernel", ["products", "fused"])
@pytest.mark.parametrize("isolate", ["none", "documents", "values"])
def test_a_packed_pass_is_each_example_alone(make, tmp_path, isolate, kernel, monkeypatch):
    """Loss and gradients of a packed pass against an unmodified model that gets each example with a
    dense mask.
    """
    monkeypatch.setattr(attention, "products", getattr(attention, kernel))  # what a CPU takes
    examples = list(
        make(decoding={"isolate": isolate, "stacked_documents": 2})(documents(tmp_path))
    )
    (group,) = batches(examples, 100, 100_000, 0)
    assert group[0].shared > 0
    packed, reference = tiny_model("llama").double(), tiny_model("llama").double()
    AttentionInterface.register(attention.NAME, attention.attention)
    packed.set_attn_implementation(attention.NAME)
    batch = pack(group)
    assert batch["input_ids"].shape[1] == count_tokens(group)
    logits = packed(
        batch["input_ids"],
        position_ids=batch["position_ids"],
        logits_to_keep=batch["label_index"],
        use_cache=False,
        layout=Layout(batch["visible"]),
    ).logits[0]
    torch.nn.functional.cross_entropy(logits, batch["shift_labels"], reduction="sum").backward()
    begin = 0
    for example in group:
        alone = dense_logits(reference, example)
        here = slice(begin, begin + len(alone))
        torch.testing.assert_close(logits[here], alone, atol=1e-6, rtol=1e-6)
        torch.nn.functional.cross_entropy(
            alone, batch["shift_labels"][here], reduction="sum"
        ).backward()
        begin += len(alone)
    for (name, parameter), expected in zip(
        packed.named_parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter.grad, expected.grad, atol=1e-5, rtol=1e-5, msg=name)


def test_the_control_writes_the_record_token_by_token(make):
    (example,) = make(decoding={"method": "autoregressive"})(
        [document(Brand="Acme", Color=None, Size=7)]
    )
    *written, end = example.targets.values()
    assert tiny_tokenizer().decode(written) == '"Brand": "Acme",\n"Color": null,\n"Size": 7\n}'
    # Decoding stops at the last value; what else serves it, at the end.
    assert end == tiny_tokenizer().eos_token_id
    assert example.positions.tolist() == list(range(len(example)))


def test_columns_called_as_the_attributes_are_labels(make):
    fields, examples = (
        {"category": "shoes", "title": "x", "Brand": "Acme", "Color": "", "Size": 7.0},
        make(),
    )
    (example,) = examples(
        [Document(0, "0", fields), Document(1, "1", {**fields, "Color": "purple"})]
    )
    assert values(example) == [' "Acme"', " n", " 7\n"]
    assert [*examples.skipped] == [
        "a label is no value of 'Color', which is one of red, blue, green, black"
    ]


def test_bad_input_is_counted_with_its_reason(make):
    examples = make()
    bad = [
        document(0, Brand="Acme", Weight="1 kg", Height=None),
        document(1),
        Document(2, "2", {"category": "shoes", "title": "x", "target": "[]"}),
        document(3, Brand="A name of more than twelve tokens", Size=None),
        document(4, Color="purple"),
        document(5, Size="large"),
        Document(6, "6", {"category": "hats", "title": "x", "target": {"Brand": "x"}}),
        document(7, title=" ", Brand="Acme"),
        Document(8, "8", {}, error="in.jsonl, byte 7: not JSON"),
        document(9, Brand=" "),
    ]
    usable = list(examples(bad))
    # The long value is no target.
    assert [values(example) for example in usable] == [[' "Acme"'], [" n"]]
    assert (examples.lost, examples.lost_labels, examples.labels) == (8, 2, 7)
    reasons = "\n".join(sorted(examples.skipped))
    assert "Height" not in reasons  # a label of null is none
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
    with pytest.raises(ConfigError, match=r"task\.too_long"):
        check(with_keys(make().config, task={"too_long": "windows"}))


@pytest.mark.parametrize(
    "target", [{"Weight": "1 kg"}, {"Brand": "A name of more than twelve tokens"}]
)
def test_too_many_labels_that_are_left_out_end_the_training(tmp_path, target):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 1)
    row = {"category": "shoes", "title": "x", "target": target | {"Size": None}}
    corpus.write_text(
        corpus.read_text() + "\n".join([json.dumps({"id": f"more {n}", **row}) for n in range(9)])
    )
    sections = {"validation": str(write_corpus(tmp_path / "held_out.jsonl", 1))}
    config = RunConfig.model_validate(tree(corpus, tmp_path / "out", "none", training=sections))
    with pytest.raises(
        InputError, match=r"9 of 1\d labels cannot be trained on .*max_skipped_share is 10%"
    ):
        prepare(config, tiny_tokenizer(), 4096)


def test_a_label_of_a_number_is_whole_or_one_of_its_values():
    step, pieces = (
        Attribute(name="a", type="number", values=[0.5, 2]),
        Attribute(name="b", type="integer"),
    )
    assert [value_text(*label) for label in ((step, 0.5), (step, 2), (pieces, 7.0))] == [
        " 0.5\n",
        " 2\n",
        " 7\n",
    ]
    with pytest.raises(Skip, match="a label is no number"):
        value_text(step, 3)
