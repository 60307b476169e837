"""Examples of conversations: SAR-SFT's equations, APAR's layout; training sees what decoding sees;
PASTA's marks.
"""

import json
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
from raypd.training.data import check, prepare
from raypd.training.example import Skip, trace
from raypd.training.generation import GenerationExamples, OutlineTeacher
from raypd.training.packing import pack
from raypd.training.structure import Promise, Sync, outline, promises
from tests.runs import committed, run_config, with_keys
from tests.tiny import EOS, tiny_model, tiny_tokenizer
from tests.training.data import allowed, generation_tree, recorded

POINTS = (
    "1. Routine: go to bed at the same time.\n2. Light: keep the room dark.\n3. Calm: read a book."
)
LIST = f"Sleep well.\n\n{POINTS}\n\nGood night."
LONG = LIST.replace("the room dark", "the whole room very dark").replace(
    "read a book", "read a good old book"
)
WORDS = [st.text("ab", min_size=1, max_size=4), st.text("cd", min_size=1, max_size=5)]
ANSWER = (
    "Two fit. Porto is small and very cheap. Vienna has more museums than one week. Both are near."
)
MARKS = {
    "Porto is small and very cheap.": "Porto",
    "Vienna has more museums than one week.": "Vienna",
}
TAGGED = ANSWER.replace(" Both", "<sync/> Both")


def make(method, training=None, **decoding):
    tokenizer = tiny_tokenizer()
    if method in ("apar", "space"):
        add_control_tokens(tiny_model("llama"), tokenizer, method)
    return GenerationExamples(
        RunConfig.model_validate(generation_tree(method, training, **decoding)), tokenizer, 4096
    )


def document(*pairs, **fields):
    turns, responses = zip(*pairs, strict=True) if pairs else ((), ())
    return Document(0, "0", {"turns": list(turns), "responses": list(responses), **fields})


def test_every_answer_is_an_example_behind_the_turns_before_it():
    examples, decode = (
        list(make("autoregressive")([document(("a?", "b."), ("c?", "d."))])),
        tiny_tokenizer().decode,
    )
    assert [decode(list(one.targets.values())) for one in examples] == [
        "b.<|im_end|>",
        "d.<|im_end|>",
    ]
    turns = "user\na?<|im_end|>\nassistant\nb.<|im_end|>\nuser\nc?<|im_end|>\nassistant\nd."
    assert decode(examples[1].tokens) == turns


def test_space_masks_k_tokens_cuts_behind_them_and_keeps_the_label_one_past_the_last():
    """Equations 2 and 3 by hand; half of the examples are as they were."""
    examples = make("space", mask_tokens=3)
    mask, answer = examples.tokenizer.get_vocab()[MASK], [*b"abcdefghij", EOS]
    places = []
    for example in [e.drawn() for e in 200 * list(examples([document(("x", "abcdefghij"))]))]:
        fed = example.tokens.tolist()
        prompt = min(example.targets) + 1
        targets = [example.targets[i] for i in range(prompt - 1, len(fed))]
        assert targets == answer[: len(targets)]
        if mask in fed:
            places.append(m := fed.index(mask) - prompt)
            assert (fed[prompt:], len(targets)) == ([*answer[:m], mask, mask, mask], m + 3 + 1)
        else:
            assert fed[prompt:] == answer[:-1]
    assert 70 < len(places) < 130
    assert set(places) == set(range(8))  # 0 .. N - k


def test_masks_at_several_places_see_and_predict_what_each_would_alone():
    examples = make("space", mask_tokens=3, training={"mask_groups": 4})
    mask = examples.tokenizer.get_vocab()[MASK]
    (text,) = examples([document(("x", "abcdefghij"))])
    prompt, n = min(text.targets) + 1, len(text)
    answer = [*b"abcdefghij", EOS]
    starts = set()
    for example in [text.drawn() for _ in range(50)]:
        assert example.tokens[:n].tolist() == text.tokens.tolist()
        assert example.tokens[n:].tolist() == 4 * 3 * [mask]
        visible = example.visibility()
        assert (visible[:n, :n] == text.visibility()).all()
        assert not visible[:n, n:].any()
        for place in range(n, n + 12, 3):
            m = int(example.positions[place])
            starts.add(m - prompt)
            for j in range(3):  # equation 3: masks behind the first m tokens, and nothing else
                assert np.flatnonzero(visible[place + j]).tolist() == [
                    *range(m),
                    *range(place, place + j + 1),
                ]
                assert example.positions[place + j] == m + j
                assert example.targets[place + j] == answer[m - prompt + j + 1]
        assert len(set(example.positions[n::3].tolist())) == 4
    assert starts == set(range(8))
    (short,) = examples([document(("x", "abc"))])  # one place: two groups would be the same
    assert len(short.drawn()) == len(short) + 3


@pytest.mark.parametrize("mask_groups", [1, 4])
def test_a_validation_has_the_same_masks_each_time(tmp_path, mask_groups):
    tokenizer, path = tiny_tokenizer(), tmp_path / "in.jsonl"
    (mask,) = add_control_tokens(tiny_model("llama"), tokenizer, "space")
    rows = [{"id": str(i), "turns": ["x"], "responses": [f"{i} abcdefghijkl"]} for i in range(9)]
    path.write_text("\n".join(map(json.dumps, rows)))
    tree = generation_tree(
        "space", {"mask_groups": mask_groups, "validation": str(path)}, path, mask_tokens=3
    )
    _, _, validation = prepare(RunConfig.model_validate(tree), tokenizer, 4096)
    assert any(mask in pack(group)["input_ids"] for group in validation)
    first, again = (
        torch.cat([pack(group)["position_ids"][0] for group in validation]) for _ in range(2)
    )
    assert torch.equal(first, again)


def test_apar_lays_out_roots_and_details():
    """Root [Fork] next root ...; the label at [Fork] is the sibling's first token, at [Child] the
    detail's first.
    """
    examples = make("apar")
    (example,) = examples([document(("How?", LIST))])
    (fork, child), tokens, targets = (
        examples.control,
        example.tokens.tolist(),
        list(example.targets.values()),
    )
    assert (targets.count(child), targets.count(EOS)) == (0, 4)  # an end of every thread
    following = [
        (token, chr(example.targets[i])) for i, token in enumerate(tokens) if token in (fork, child)
    ]
    assert sorted(following) == sorted(
        [(fork, "2"), (fork, "3"), (fork, "\n"), *[(child, " ")] * 3]
    )


@settings(max_examples=10, deadline=None)
@given(
    st.lists(
        st.tuples(st.text("ab", max_size=4), st.text("cd", min_size=1, max_size=5)), max_size=4
    ),
    st.text("e"),
)
def test_apar_training_sees_what_decoding_sees(items, behind):
    examples = make("apar")
    programs = [
        apar(Prompt([5, 6, 7]), 10**6, *examples.control, frozenset([EOS]), 10**6) for _ in range(2)
    ]
    example, answer = trace(
        programs[0], OutlineTeacher(examples._paragraphs([*items, (behind, "")]))
    )
    assert answer.cut is None
    assert (
        tiny_tokenizer().decode(answer.tokens)
        == "".join(root + detail for root, detail in items) + behind
    )
    assert recorded(programs[1], example, size=260) == allowed(example)


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
        (
            "Do this:\n1. Solar panels.\n\nThen this:\n 12. Wind mills.",
            [],
        ),  # a number ends no sentence
        (LIST + "\n```python\nx\n```", []),
        (LIST + " See https://example.org", []),
        (LIST + " $x^2$", []),
    ],
)
def test_structure(answer, details):
    parts = outline(answer)
    assert [detail for _, detail in parts] == [*details, ""]
    assert "".join(root + detail for root, detail in parts) == answer


def test_bad_input_is_counted_with_its_reason():
    examples = make("apar")
    reasons = {
        "empty turn": document(("a", "")),
        "column 'turns': expected text": document(),
        # The first turn is not kept either.
        "control token": document(("a", "b"), ("c", f"d {FORK}")),
        "column 'responses': expected text": Document(0, "0", {"turns": "a", "responses": 7}),
        "different lengths": document(("a", "b"), responses=["b", "c"]),
        "more than 4096 tokens": document(("a", "x" * 5000)),
        "x": Document(0, "0", error="f, byte 0: x"),
    }
    assert (list(examples(list(reasons.values()))), examples.lost) == ([], len(reasons))
    assert all(reason in counted for reason, counted in zip(reasons, examples.skipped, strict=True))


def test_apar_takes_as_many_plain_answers_as_structured_ones():
    examples = make("apar")
    chosen = list(
        examples([document(("a", LIST)), *[document(("a", f"plain {i}")) for i in range(5)]])
    )
    assert (len(chosen), dict(examples.skipped)) == (
        2,
        {"unstructured answers beyond the 1:1 of APAR": 4},
    )


@pytest.mark.parametrize("end", ["", "\n"])
def test_pasta_waits_for_its_promises_only_where_text_follows(end):
    assert Sync() in promises(LONG)
    assert Sync() not in promises(LONG.removesuffix("\n\nGood night.") + end)


def test_pasta_promises_blocks_and_joins_them(monkeypatch):
    """<async> is never a target, </async> is; behind the last block the main thread waits for
    all.
    """
    answers = []
    monkeypatch.setattr(
        generation, "trace", lambda *given: answers.append(trace(*given)) or answers[-1]
    )
    (example,) = make("pasta")([document(("How?", LONG))])
    ((_, joined),) = answers
    assert joined.text == LONG
    blocks = [
        " go to bed at the same time.\n",
        " keep the whole room very dark.\n",
        " read a good old book.",
    ]
    marked = LONG
    for topic, block, length in zip(
        ("Routine", "Light", "Calm"), blocks, (40, 50, 40), strict=True
    ):
        promise = f'<promise topic="{topic}" tokens="{length}"/>'
        marked = marked.replace(
            block, f"{promise}<async>{block}</async>" + "<sync/>" * (topic == "Calm")
        )
    assert joined.raw == marked
    assert len(example.targets) == joined.tokens == len(marked) - 3 * len("<async>") + 1
    assert [thread.promised for thread in joined.threads[1:]] == [40, 50, 40]


def test_markup_of_another_kind_is_text_of_an_answer():
    examples = make("pasta")
    (example,) = examples([document(("How?", "Write <b>bold</b>,"))])
    assert tiny_tokenizer().decode(list(example.targets.values())[:-1]) == "Write <b>bold</b>,"
    # The interpreter would take it for its own.
    assert not list(examples([document(("How?", "Write <sync> here."))]))
    assert list(examples.skipped) == ["answers whose text reads as tags of PASTA-LANG"]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(*WORDS, st.booleans()), max_size=3), st.text("e", min_size=1))
def test_pasta_training_sees_what_decoding_sees(items, behind):
    examples = make("pasta")
    parts = [(root, Promise("topic", block), *[Sync()] * joins) for root, block, joins in items]
    with mock.patch.object(generation, "Interpreter", wraps=Interpreter) as called:
        example = examples._pasta([5, 6, 7], [*sum(parts, ()), behind])
    (call,) = called.call_args_list
    assert recorded(Interpreter(*call.args, **call.kwargs).run(), example) == allowed(example)


for block, topic in MARKS.items():
    TAGGED = TAGGED.replace(block, f'<async topic="{topic}">{block}</async>')


def test_pieces_are_in_the_order_of_the_text_as_the_teacher_is_shown():
    porto, vienna = (Promise(topic, block) for block, topic in MARKS.items())
    assert marked(TAGGED, ANSWER) == ["Two fit. ", porto, " ", vienna, Sync(), " Both are near."]
    assert marked(f"\n{TAGGED}\n", ANSWER + " ") == marked(TAGGED, ANSWER)
    assert marked(TAGGED.replace("<async topic", "<async\ntopic"), ANSWER) == marked(TAGGED, ANSWER)
    assert marked(ANSWER, ANSWER) == [ANSWER]
    _, *demonstrations = annotate._PROMPT.split("Answer:\n")
    pieces = [marked(*reversed(shown.split("\n\nMarked:\n"))) for shown in demonstrations[:-1]]
    assert [sum(isinstance(piece, Promise) for piece in answer) for answer in pieces] == [2, 2, 0]


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
def test_what_cannot_be_used_is_left_out_with_its_reason(tagged, reason):
    with pytest.raises(Skip, match=reason):
        marked(tagged, ANSWER)


def config_of(tmp_path, **training):
    conversations = [
        {"id": str(i), "turns": ["Which?"], "responses": [f"{ANSWER} {i}"]} for i in range(4)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, conversations)))
    training = {"validation_share": 0.5, "seed": 1, "max_skipped_share": 0.3} | training
    return make_config(generation_tree("pasta", training, tmp_path / "in.jsonl"))


def test_a_run_over_what_the_teacher_is_asked_marks_the_responses(tmp_path):
    config = config_of(tmp_path, annotations=str(tmp_path / "marked"))
    requests = list(annotate.requests(config))
    assert [request["prompt"].count(f"{ANSWER} {i}\n") for i, request in enumerate(requests)] == [
        1
    ] * 4
    texts = [f"{TAGGED} {i}" for i in range(3)] + ["Something else."]
    documents = [
        Document(i, request["id"], {}, source="q.jsonl", place=i)
        for i, request in enumerate(requests)
    ]
    row = {
        "sample": 0,
        "turn": 0,
        "finish_reason": "stop",
        "tokens": 9,
        "counters": "{}",
        "warnings": [],
    }
    records = [Record(i, row | {"text": text, "raw": text}) for i, text in enumerate(texts)]
    committed(tmp_path / "marked", config, documents, records)
    data, train, validation = prepare(config, tiny_tokenizer(), 4096)
    assert data.skipped == {"responses that the teacher changed": 1}
    examples = [example for group in [*train, *validation] for example in group]
    want = TAGGED
    for topic, length in (("Porto", 40), ("Vienna", 50)):
        want = want.replace(
            f'<async topic="{topic}">', f'<promise topic="{topic}" tokens="{length}"/>'
        )
    learned = [
        "".join(sorted(tiny_tokenizer().decode(list(example.targets.values()))))
        for example in examples
    ]
    # Threads interleave.
    assert sorted(learned) == sorted("".join(sorted(f"{want} {i}<|im_end|>")) for i in range(3))


def test_a_run_over_something_else_is_one_message(tmp_path):
    config = config_of(tmp_path, annotations=str(tmp_path / "nothing"))
    with pytest.raises(InputError, match="marks no response"):
        prepare(config, tiny_tokenizer(), 4096)
    with pytest.raises(ConfigError, match=r"is for decoding.method pasta"):
        check(with_keys(config, decoding={"method": "apar"}))


def documents(count):
    return [Document(i, "the same id", {}, source="a.jsonl", place=i) for i in range(count)]


def test_whole_answers_of_an_extraction_are_labels(tmp_path):
    def answer(index, status):
        values = [
            {"name": "Brand", "value": f"b{index}", "status": status},
            {"name": "Nick", "status": "null"},
        ]
        record = json.dumps({"Brand": f"b{index}"})
        return Record(
            index, {"category": "c", "record": record, "values": values, "truncated": False}
        )

    with pytest.raises(InputError, match="holds no answers"):
        teacher.label(documents(1), str(tmp_path), run_config())
    records = [
        answer(0, "ok"),
        answer(1, "null"),
        answer(2, "truncated"),
        Record(3, error="it failed"),
    ]
    committed(tmp_path, run_config(), documents(4), records, columns.EXTRACTION)
    labelled = documents(5)
    teacher.label(labelled, str(tmp_path), run_config())
    reasons = 2 * ["an answer that failed, was cut or is not valid"] + ["no answer"]
    errors = [(None, f"training.labels: {reason} in the run that labels") for reason in reasons]
    labels = [(document.fields.get("target"), document.error) for document in labelled]
    assert labels == [*(({"Brand": f"b{n}", "Nick": None}, None) for n in (0, 1)), *errors]


def test_corrected_labels_are_joined_by_id_and_whole_conversations_are_labels(tmp_path):
    file = tmp_path / "labels.jsonl"
    file.write_text('{"id": 7, "target": {"Brand": "b"}}\n')
    (tmp_path / "labels.csv").write_text("id,a,other\n7,b,c\n")
    (tmp_path / "labels.json").write_text('[{"id": 7, "a": "b", "other": "c"}]')
    for end, fields in (
        (".jsonl", {"target": {"Brand": "b"}}),
        (".csv", {"a": "b"}),
        (".json", {"a": "b"}),
    ):
        labelled = [Document(0, "7", {}), Document(1, "8", {})]
        teacher.label(labelled, str(file.with_suffix(end)), run_config())
        assert [labelled[0].fields, labelled[1].error] == [
            fields,
            "training.labels: no label in the file",
        ]
    line = '{"id": 7, "target": {"Brand": "b"}}\n'
    for lines, words in (
        ('{"id": 7}\n', ": no column 'target'"),
        (line * 2 + line.replace('"b"', "null"), ":3: the id '7' has"),
    ):
        file.write_text(lines)
        with pytest.raises(InputError, match=rf"labels\.jsonl{words}"):
            teacher.label(labelled, str(file), run_config())

    def turn(index, number, reason="stop", sample=0):
        return Record(
            index,
            {
                "sample": sample,
                "turn": number,
                "text": f"{index}.{number}",
                "finish_reason": reason,
            },
        )

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
    teacher.label(labelled, str(tmp_path), run_config("generation"))
    assert [document.fields.get("target") for document in labelled] == [
        ["0.0", "0.1"],
        None,
        ["2.0"],
        None,
    ]
