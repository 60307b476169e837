"""A teacher's marks become examples of `pasta`, where its text without them is the answer; a run's answers, labels."""

import json

import pytest

from raypd.config.load import make_config
from raypd.errors import ConfigError, InputError
from raypd.tasks import columns
from raypd.tasks.base import Document, Record
from raypd.training import annotate, teacher
from raypd.training.annotate import marked
from raypd.training.data import check, prepare
from raypd.training.example import Skip
from raypd.training.structure import Promise, Sync
from tests.runs import committed, run_config, with_keys
from tests.tiny import tiny_tokenizer
from tests.training.data import generation_tree

ANSWER = "Two fit. Porto is small and very cheap. Vienna has more museums than one week. Both are near."
MARKS = {"Porto is small and very cheap.": "Porto", "Vienna has more museums than one week.": "Vienna"}
TAGGED = ANSWER.replace(" Both", "<sync/> Both")
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


@pytest.mark.parametrize(("tagged", "reason"), [
    (None, "did not mark"), (TAGGED.replace("cheap", "small"), "changed"),
    (TAGGED.replace("</async>", "", 1), "not well-formed"), (TAGGED.replace("<sync/>", "<sync>"), "not well-formed"),
    (TAGGED.replace('"Porto"', '"the city of Porto"'), "topics"), (TAGGED.replace('"Porto"', '""'), "topics"),
    ('<async topic="two">Two fit.</async>' + ANSWER.removeprefix("Two fit."), "less than 5 words")])  # fmt: skip
def test_what_cannot_be_used_is_left_out_with_its_reason(tagged, reason):
    with pytest.raises(Skip, match=reason):
        marked(tagged, ANSWER)


def config_of(tmp_path, **training):
    conversations = [{"id": str(i), "turns": ["Which?"], "responses": [f"{ANSWER} {i}"]} for i in range(4)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, conversations)))
    training = {"validation_share": 0.5, "seed": 1, "max_skipped_share": 0.3} | training
    return make_config(generation_tree("pasta", training, tmp_path / "in.jsonl"))


def test_a_run_over_what_the_teacher_is_asked_marks_the_responses(tmp_path):
    config = config_of(tmp_path, annotations=str(tmp_path / "marked"))
    requests = list(annotate.requests(config))
    assert [request["prompt"].count(f"{ANSWER} {i}\n") for i, request in enumerate(requests)] == [1] * 4
    texts = [f"{TAGGED} {i}" for i in range(3)] + ["Something else."]
    documents = [Document(i, request["id"], {}, source="q.jsonl", place=i) for i, request in enumerate(requests)]
    row = {"sample": 0, "turn": 0, "finish_reason": "stop", "tokens": 9, "counters": "{}", "warnings": []}
    records = [Record(i, row | {"text": text, "raw": text}) for i, text in enumerate(texts)]
    committed(tmp_path / "marked", config, documents, records)
    data, train, validation = prepare(config, tiny_tokenizer(), 4096)
    assert data.skipped == {"responses that the teacher changed": 1}
    examples = [example for group in [*train, *validation] for example in group]
    want = TAGGED
    for topic, length in (("Porto", 40), ("Vienna", 50)):
        want = want.replace(f'<async topic="{topic}">', f'<promise topic="{topic}" tokens="{length}"/>')
    learned = ["".join(sorted(tiny_tokenizer().decode(list(example.targets.values())))) for example in examples]
    assert sorted(learned) == sorted("".join(sorted(f"{want} {i}<|im_end|>")) for i in range(3))  # threads interleave


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
        values = [{"name": "Brand", "value": f"b{index}", "status": status}]
        record = json.dumps({"Brand": f"b{index}"})
        return Record(index, {"category": "c", "record": record, "values": values, "truncated": False})

    with pytest.raises(InputError, match="holds no answers"):
        teacher.label(documents(1), str(tmp_path), "target")
    records = [answer(0, "ok"), answer(1, "null"), answer(2, "truncated"), Record(3, error="it failed")]
    committed(tmp_path, run_config(), documents(4), records, columns.EXTRACTION)
    labelled = documents(5)
    teacher.label(labelled, str(tmp_path), "target")
    reasons = 2 * ["an answer that failed, was cut or is not valid"] + ["no answer"]
    errors = [(None, f"training.labels: {reason} in the run that labels") for reason in reasons]
    labels = [(document.fields.get("target"), document.error) for document in labelled]
    assert labels == [({"Brand": "b0"}, None), ({"Brand": "b1"}, None), *errors]


def test_corrected_labels_are_joined_by_id_and_whole_conversations_are_labels(tmp_path):
    file = tmp_path / "labels.jsonl"
    file.write_text('{"id": 7, "target": {"Brand": "b"}}\n')
    labelled = [Document(0, "7", {}), Document(1, "8", {})]
    teacher.label(labelled, str(file), "target")
    assert labelled[0].fields == {"target": {"Brand": "b"}}
    assert labelled[1].error == "training.labels: no label in the file"
    file.write_text('{"id": 7}\n')
    with pytest.raises(InputError, match=r"labels\.jsonl: expected JSON lines of id and 'target'"):
        teacher.label(labelled, str(file), "target")

    def turn(index, number, reason="stop", sample=0):
        return Record(index, {"sample": sample, "turn": number, "text": f"{index}.{number}", "finish_reason": reason})

    records = [turn(0, 1), turn(0, 0), turn(0, 0, sample=1), turn(1, 0, "length"), turn(2, 0), turn(3, 0, "length")]
    committed(tmp_path, run_config("generation"), documents(4), records)
    labelled = documents(4)
    teacher.label(labelled, str(tmp_path), "responses")
    assert [document.fields.get("responses") for document in labelled] == [["0.0", "0.1"], None, ["2.0"], None]
