"""Examples of conversations: SAR-SFT's equations, APAR's layout, PASTA's marks, and their labels.

Training has to see what decoding sees.
"""

import json
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from raypd.config import RunConfig
from raypd.config.load import make_config
from raypd.decoding.methods.apar import apar
from raypd.decoding.methods.pasta import Interpreter
from raypd.decoding.methods.registry import FORK, MASK
from raypd.decoding.text import Prompt
from raypd.errors import ConfigError, InputError
from raypd.models.control_tokens import add_control_tokens
from raypd.tasks import columns
from raypd.tasks.base import Document, Record
from raypd.training import annotate, generation, teacher
from raypd.training.annotate import marked
from raypd.training.data import check_training, prepare
from raypd.training.example import Skip, trace
from raypd.training.generation import GenerationExamples, OutlineTeacher
from raypd.training.packing import pack
from raypd.training.structure import Promise, Sync, outline, promises
from tests.runs import committed, run_config, with_keys, write_rows
from tests.tiny import EOS, tiny_model, tiny_tokenizer
from tests.training.data import allowed, generation_tree, recorded

POINTS = (
    "1. Routine: go to bed at the same time.\n2. Light: keep the room dark.\n3. Calm: read a book."
)
LIST = f"Sleep well.\n\n{POINTS}\n\nGood night."
LONG = LIST.replace("the room dark", "the whole room very dark")
LONG = LONG.replace("read a book", "read a good old book")
WORDS = [
    st.text(
        "ab",
        min_size=1,
        max_size=4,
    ),
    st.text("cd", min_size=1, max_size=5),
]
ANSWER = (
    "Two fit. Porto is small and very cheap. Vienna has more museums than one week. Both are near."
)
MARKS = {
    "Porto is small and very cheap.": "Porto",
    "Vienna has more museums than one week.": "Vienna",
}
TAGGED = ANSWER.replace(" Both", "<sync/> Both")
for block, topic in MARKS.items():
    TAGGED = TAGGED.replace(block, f'<async topic="{topic}">{block}</async>')


def make(method, training=None, **decoding):
    tokenizer = tiny_tokenizer()
    if method in ("apar", "space"):
        add_control_tokens(tiny_model("llama"), tokenizer, method)
    config = RunConfig.model_validate(generation_tree(method, training, **decoding))
    return GenerationExamples(config, tokenizer, 4096)


def document(*pairs, **fields):
    turns = [turn for turn, _ in pairs]
    responses = [response for _, response in pairs]
    return Document(
        0,
        "0",
        {
            "turns": turns,
            "responses": responses,
            **fields,
        },
    )


def text_of(tokens):
    return tiny_tokenizer().decode(list(tokens))


def test_every_answer_is_an_example_after_the_turns_before_it():
    first, second = make("autoregressive")([document(("a?", "b."), ("c?", "d."))])
    assert text_of(first.targets.values()) == "b.<|im_end|>"
    assert text_of(second.targets.values()) == "d.<|im_end|>"
    turns = "user\na?<|im_end|>\nassistant\nb.<|im_end|>\nuser\nc?<|im_end|>\nassistant\nd."
    assert text_of(second.tokens) == turns


def test_space_masks_k_tokens_and_cuts_the_text_after_them():
    """Equations 2 and 3 by hand.

    Half of the draws have no masks, and the last mask predicts one token beyond the masked ones.
    """
    examples = make("space", mask_tokens=3)
    mask = examples.tokenizer.get_vocab()[MASK]
    answer = [*b"abcdefghij", EOS]
    (text,) = examples([document(("x", "abcdefghij"))])
    starts = []
    for example in [text.drawn() for _ in range(200)]:
        fed = example.tokens.tolist()
        prompt = min(example.targets) + 1
        targets = [example.targets[i] for i in range(prompt - 1, len(fed))]
        assert targets == answer[: len(targets)]
        if mask not in fed:
            assert fed[prompt:] == answer[:-1]
            continue
        start = fed.index(mask) - prompt
        starts.append(start)
        assert fed[prompt:] == [*answer[:start], mask, mask, mask]
        assert len(targets) == start + 3 + 1
    assert 70 < len(starts) < 130
    assert set(starts) == set(range(8))  # 0 .. N - k


@pytest.fixture
def masked_text():
    """An example of SPACE whose draws have four groups of three masks."""
    (text,) = make(
        "space",
        mask_tokens=3,
        training={"mask_groups": 4},
    )([document(("x", "abcdefghij"))])
    return text


def test_groups_of_masks_stand_beside_the_text_at_different_starts(masked_text):
    n = len(masked_text)
    prompt = min(masked_text.targets) + 1
    starts = set()
    for example in [masked_text.drawn() for _ in range(50)]:
        assert example.tokens[:n].tolist() == masked_text.tokens.tolist()
        assert len(set(example.tokens[n:].tolist())) == 1  # the mask
        assert len(example) == n + 4 * 3
        group_starts = example.positions[n::3].tolist()
        assert len(set(group_starts)) == 4
        starts |= {start - prompt for start in group_starts}
    assert starts == set(range(8))


def test_a_group_of_masks_sees_and_predicts_what_it_would_alone(masked_text):
    """Equation 3: masks after the first `start` tokens, and nothing else."""
    n = len(masked_text)
    prompt = min(masked_text.targets) + 1
    answer = [*b"abcdefghij", EOS]
    example = masked_text.drawn()
    visible = example.visibility()
    assert (visible[:n, :n] == masked_text.visibility()).all()
    assert not visible[:n, n:].any()
    for first in range(n, n + 12, 3):
        start = int(example.positions[first])
        for j in range(3):
            keys = np.flatnonzero(visible[first + j]).tolist()
            assert keys == [*range(start), *range(first, first + j + 1)]
            assert example.positions[first + j] == start + j
            assert example.targets[first + j] == answer[start - prompt + j + 1]


def test_a_short_text_has_only_as_many_groups_as_starts():
    examples = make("space", mask_tokens=3, training={"mask_groups": 4})
    (short,) = examples([document(("x", "abc"))])
    assert len(short.drawn()) == len(short) + 3


@pytest.mark.parametrize("mask_groups", [1, 4])
def test_a_validation_always_has_the_same_masks(tmp_path, mask_groups):
    tokenizer = tiny_tokenizer()
    (mask,) = add_control_tokens(tiny_model("llama"), tokenizer, "space")
    rows = [
        {
            "id": str(i),
            "turns": ["x"],
            "responses": [f"{i} abcdefghijkl"],
        }
        for i in range(9)
    ]
    path = write_rows(tmp_path / "in.jsonl", rows)
    training = {"mask_groups": mask_groups, "validation": str(path)}
    tree = generation_tree("space", training, path, mask_tokens=3)
    _, _, _, validation = prepare(RunConfig.model_validate(tree), tokenizer, 4096)
    first = [pack(group) for group in validation]
    second = [pack(group) for group in validation]
    assert any(mask in batch["input_ids"] for batch in first)
    for batch, other_batch in zip(first, second, strict=True):
        assert torch.equal(batch["position_ids"], other_batch["position_ids"])


def test_apar_lays_out_roots_and_details():
    """A root, [Fork], the next root ...

    The target at [Fork] is the sibling's first token, and at [Child] the detail's first token.
    """
    examples = make("apar")
    fork, child = examples.control
    (example,) = examples([document(("How?", LIST))])
    targets = list(example.targets.values())
    assert targets.count(child) == 0
    assert targets.count(EOS) == 4  # each thread has an end
    at_fork = []
    at_child = []
    for index, token in enumerate(example.tokens.tolist()):
        if token == fork:
            at_fork.append(chr(example.targets[index]))
        if token == child:
            at_child.append(chr(example.targets[index]))
    assert sorted(at_fork) == ["\n", "2", "3"]
    assert at_child == [" ", " ", " "]


@settings(max_examples=10, deadline=None)
@given(
    st.lists(
        st.tuples(st.text("ab", max_size=4), st.text("cd", min_size=1, max_size=5)), max_size=4
    ),
    st.text("e"),
)
def test_apar_training_sees_what_decoding_sees(items, end):
    examples = make("apar")

    def program():
        return apar(Prompt([5, 6, 7]), 10**6, *examples.control, frozenset([EOS]), 10**6)

    paragraphs = examples._paragraphs([*items, (end, "")])
    example, answer = trace(program(), OutlineTeacher(paragraphs))
    assert answer.cut is None
    assert text_of(answer.tokens) == "".join(root + detail for root, detail in items) + end
    assert recorded(program(), example, size=260) == allowed(example)


@pytest.mark.parametrize(
    ("answer", "details"),
    [
        (LIST, [" go to bed at the same time.\n", " keep the room dark.\n", " read a book."]),
        ("1. A: too few.\n2. B: of them.", []),
        ("1. A: x\n2. B: y\n3. C: z", []),  # points of less than ten characters
        (
            "One sentence. And a second one.\n\nAnother. With more to it.",
            [" And a second one.", " With more to it."],
        ),
        ("One sentence.\n\nAnother.", []),
        (
            "1. Solar is clean. It needs the sun.\n\n2. Wind is cheap. It needs the wind.",
            [" It needs the sun.", " It needs the wind."],
        ),
        # The full stop of a number ends no sentence.
        ("Do this:\n1. Solar panels.\n\nThen this:\n 12. Wind mills.", []),
        (LIST + "\n```python\nx\n```", []),
        (LIST + " See https://example.org", []),
        (LIST + " $x^2$", []),
    ],
)
def test_details_are_points_or_what_follows_first_sentences(answer, details):
    parts = outline(answer)
    assert [detail for _, detail in parts] == [*details, ""]
    assert "".join(root + detail for root, detail in parts) == answer


def test_bad_input_is_counted_with_its_reason():
    examples = make("apar")
    reasons = {
        "empty turn": document(("a", "")),
        "column 'turns': expected text": document(),
        # The first turn is left out, too.
        "control token": document(("a", "b"), ("c", f"d {FORK}")),
        "column 'responses': expected text": Document(0, "0", {"turns": "a", "responses": 7}),
        "different lengths": document(("a", "b"), responses=["b", "c"]),
        "more than 4096 tokens": document(("a", "x" * 5000)),
        "x": Document(0, "0", error="f, byte 0: x"),
    }
    assert list(examples(list(reasons.values()))) == []
    assert examples.lost == len(reasons)
    for reason, counted in zip(reasons, examples.skipped, strict=True):
        assert reason in counted


def test_apar_takes_as_many_plain_answers_as_structured_ones():
    examples = make("apar")
    plain = [document(("a", f"plain {i}")) for i in range(5)]
    chosen = list(examples([document(("a", LIST)), *plain]))
    assert len(chosen) == 2
    assert dict(examples.skipped) == {"unstructured answers beyond the 1:1 of APAR": 4}


@pytest.mark.parametrize("end", ["", "\n"])
def test_pasta_waits_for_its_promises_only_if_text_follows(end):
    assert Sync() in promises(LONG)
    assert Sync() not in promises(LONG.removesuffix("\n\nGood night.") + end)


def test_pasta_promises_blocks_and_joins_them(monkeypatch):
    """<async> is never a target, but </async> is.

    After the last block the main thread waits for all of them.
    """
    answers = []

    def keep(program, teacher):
        example, answer = trace(program, teacher)
        answers.append(answer)
        return example, answer

    monkeypatch.setattr(generation, "trace", keep)
    (example,) = make("pasta")([document(("How?", LONG))])
    (answer,) = answers
    assert answer.text == LONG
    blocks = {
        " go to bed at the same time.\n": '<promise topic="Routine" tokens="40"/>',
        " keep the whole room very dark.\n": '<promise topic="Light" tokens="50"/>',
        " read a good old book.": '<promise topic="Calm" tokens="40"/>',
    }
    raw = LONG
    for block, promise in blocks.items():
        raw = raw.replace(block, f"{promise}<async>{block}</async>")
    raw = raw.replace("book.</async>", "book.</async><sync/>")
    assert answer.raw == raw
    assert answer.tokens == len(raw) - 3 * len("<async>") + 1
    assert len(example.targets) == answer.tokens
    assert [thread.promised for thread in answer.threads[1:]] == [40, 50, 40]


def test_markup_of_another_kind_is_text_of_an_answer():
    examples = make("pasta")
    (example,) = examples([document(("How?", "Write <b>bold</b>,"))])
    assert text_of(example.targets.values()) == "Write <b>bold</b>,<|im_end|>"
    # The interpreter would read this one as its own tag.
    assert not list(examples([document(("How?", "Write <sync> here."))]))
    assert list(examples.skipped) == ["answers whose text reads as tags of PASTA-LANG"]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(*WORDS, st.booleans()), max_size=3), st.text("e", min_size=1))
def test_pasta_training_sees_what_decoding_sees(items, end):
    examples = make("pasta")
    pieces = []
    for root, block, has_sync in items:
        pieces += [root, Promise("topic", block)]
        if has_sync:
            pieces.append(Sync())
    with mock.patch.object(generation, "Interpreter", wraps=Interpreter) as called:
        example = examples._pasta([5, 6, 7], [*pieces, end])
    (call,) = called.call_args_list
    assert recorded(Interpreter(*call.args, **call.kwargs).run(), example) == allowed(example)


def test_pieces_are_in_the_order_of_the_text():
    porto, vienna = (Promise(topic, block) for block, topic in MARKS.items())
    assert marked(TAGGED, ANSWER) == [
        "Two fit. ",
        porto,
        " ",
        vienna,
        Sync(),
        " Both are near.",
    ]
    assert marked(ANSWER, ANSWER) == [ANSWER]


def test_white_space_around_an_answer_and_in_tags_is_ignored():
    pieces = marked(TAGGED, ANSWER)
    assert marked(f"\n{TAGGED}\n", ANSWER + " ") == pieces
    assert marked(TAGGED.replace("<async topic", "<async\ntopic"), ANSWER) == pieces


def test_the_examples_that_a_teacher_is_shown_are_well_marked():
    _, *demonstrations = annotate._PROMPT.split("Answer:\n")
    promised = []
    for demonstration in demonstrations[:-1]:
        answer, tagged = demonstration.split("\n\nMarked:\n")
        pieces = marked(tagged, answer)
        promised.append(sum(isinstance(piece, Promise) for piece in pieces))
    assert promised == [2, 2, 0]


@pytest.mark.parametrize(
    ("tagged", "reason"),
    [
        (None, "did not mark"),
        (TAGGED.replace("cheap", "small"), "changed"),
        (TAGGED.replace("</async>", "", 1), "not well-formed"),
        (TAGGED.replace("<sync/>", "<sync>"), "not well-formed"),
        (TAGGED.replace('"Porto"', '"the city of Porto"'), "topics"),
        (TAGGED.replace('"Porto"', '""'), "topics"),
        (
            '<async topic="two">Two fit.</async>' + ANSWER.removeprefix("Two fit."),
            "less than 5 words",
        ),
    ],
)
def test_unusable_marks_are_left_out_with_their_reason(tagged, reason):
    with pytest.raises(Skip, match=reason):
        marked(tagged, ANSWER)


def config_of(tmp_path, **training):
    conversations = [
        {
            "id": str(i),
            "turns": ["Which?"],
            "responses": [f"{ANSWER} {i}"],
        }
        for i in range(4)
    ]
    path = write_rows(tmp_path / "in.jsonl", conversations)
    training = {"validation_share": 0.5, "seed": 1, "max_skipped_share": 0.3, **training}
    return make_config(generation_tree("pasta", training, path))


def test_a_teacher_s_run_marks_the_responses(tmp_path):
    config = config_of(tmp_path, annotations=str(tmp_path / "marked"))
    requests = list(annotate.requests(config))
    assert len(requests) == 4
    for number, request in enumerate(requests):
        assert request["prompt"].count(f"{ANSWER} {number}\n") == 1
    texts = [f"{TAGGED} {number}" for number in range(3)] + ["Something else."]
    documents = []
    records = []
    for number, (request, text) in enumerate(zip(requests, texts, strict=True)):
        documents.append(
            Document(
                number,
                request["id"],
                {},
                source="q.jsonl",
                row=number,
            )
        )
        row = {
            "sample": 0,
            "turn": 0,
            "text": text,
            "raw": text,
            "finish_reason": "stop",
            "tokens": 9,
            "counters": "{}",
            "warnings": [],
        }
        records.append(Record(number, row))
    committed(tmp_path / "marked", config, documents, records)
    data, _, train, validation = prepare(config, tiny_tokenizer(), 4096)
    assert data.skipped == {"responses that the teacher changed": 1}
    raw = TAGGED
    for topic, length in (("Porto", 40), ("Vienna", 50)):
        promise = f'<promise topic="{topic}" tokens="{length}"/>'
        raw = raw.replace(f'<async topic="{topic}">', promise)
    # The targets of threads interleave, so that only their characters are compared.
    learned = []
    for group in [*train, *validation]:
        learned += [sorted(text_of(example.targets.values())) for example in group]
    expected = [sorted(f"{raw} {number}<|im_end|>") for number in range(3)]
    assert sorted(learned) == sorted(expected)


def test_a_run_that_marks_other_responses_is_refused(tmp_path):
    config = config_of(tmp_path, annotations=str(tmp_path / "nothing"))
    with pytest.raises(InputError, match="marks no response"):
        prepare(config, tiny_tokenizer(), 4096)


def test_marks_are_for_pasta_alone(tmp_path):
    config = config_of(tmp_path, annotations=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"is for decoding.method pasta"):
        check_training(with_keys(config, decoding={"method": "apar"}))


def documents(count):
    return [
        Document(
            i,
            "the same id",
            {},
            source="a.jsonl",
            row=i,
        )
        for i in range(count)
    ]


def test_a_folder_without_answers_holds_no_labels(tmp_path):
    with pytest.raises(InputError, match="holds no answers"):
        teacher.label_documents(documents(1), str(tmp_path), run_config())


def test_valid_records_of_an_extraction_are_labels(tmp_path):
    def record(index, status):
        values = [
            {"name": "Brand", "value": f"b{index}", "status": status},
            {"name": "Nick", "status": "null"},
        ]
        text = json.dumps({"Brand": f"b{index}"})
        columns = {"category": "c", "record": text, "values": values, "truncated": False}
        return Record(index, columns)

    records = [
        record(0, "ok"),
        record(1, "null"),
        record(2, "truncated"),
        Record(3, error="it failed"),
    ]
    committed(tmp_path, run_config(), documents(4), records, columns.EXTRACTION)
    labelled = documents(5)
    teacher.label_documents(labelled, str(tmp_path), run_config())
    for index in (0, 1):
        assert labelled[index].fields["target"] == {"Brand": f"b{index}", "Nick": None}
        assert labelled[index].error is None
    for index in (2, 3):
        assert "an answer that failed, was cut or is not valid" in labelled[index].error
    assert "no answer in the run" in labelled[4].error


@pytest.mark.parametrize(
    ("name", "text", "fields"),
    [
        (
            "labels.jsonl",
            '{"id": 7, "target": {"Brand": "b"}}\n',
            {"target": {"Brand": "b"}},
        ),
        ("labels.csv", "id,a,other\n7,b,c\n", {"a": "b"}),
        ("labels.json", '[{"id": 7, "a": "b", "other": "c"}]', {"a": "b"}),
    ],
)
def test_labels_of_a_file_are_joined_by_id(tmp_path, name, text, fields):
    (tmp_path / name).write_text(text)
    labelled = [Document(0, "7", {}), Document(1, "8", {})]
    teacher.label_documents(labelled, str(tmp_path / name), run_config())
    assert labelled[0].fields == fields
    assert labelled[1].error == "training.labels: no label in the file"


LABEL = '{"id": 7, "target": {"Brand": "b"}}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": 7}\n', r"labels\.jsonl: no column 'target'"),
        (LABEL * 2 + LABEL.replace('"b"', "null"), r"labels\.jsonl:3: the id '7' has"),
    ],
)
def test_a_file_without_labels_or_with_two_for_one_id_is_refused(tmp_path, text, message):
    (tmp_path / "labels.jsonl").write_text(text)
    with pytest.raises(InputError, match=message):
        teacher.label_documents(documents(1), str(tmp_path / "labels.jsonl"), run_config())


def test_whole_conversations_of_a_run_are_labels(tmp_path):
    def turn(index, number, reason="stop", sample=0):
        columns = {
            "sample": sample,
            "turn": number,
            "text": f"{index}.{number}",
            "finish_reason": reason,
        }
        return Record(index, columns)

    records = [
        turn(0, 1),
        turn(0, 0),
        turn(0, 0, sample=1),
        turn(1, 0, "length"),
        turn(2, 0),
        turn(3, 0, "length"),
    ]
    committed(tmp_path, run_config("generation"), documents(4), records)
    labelled = documents(4)
    teacher.label_documents(labelled, str(tmp_path), run_config("generation"))
    labels = [document.fields.get("target") for document in labelled]
    assert labels == [["0.0", "0.1"], None, ["2.0"], None]
