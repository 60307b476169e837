"""`raypd generate FILE --openai`: its files against the `openai` package's types, its texts against
transformers.
"""

import json
import re
from functools import reduce
from pathlib import Path

import jsonschema
import pytest
import torch
from openai.types.batch_error import BatchError
from openai.types.chat import ChatCompletion
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM, AutoTokenizer

from raypd.answering import components
from raypd.cli.run import config_over, run_task
from raypd.cluster import driver
from raypd.dataset import batch_files
from raypd.errors import ConfigError, InputError, RunError
from raypd.tasks import openai_batch
from raypd.tasks.json_schema import expression
from tests.runs import run_here
from tests.tiny import save_tiny

PRODUCT = {
    "type": "object",
    "properties": {
        "brand": {"type": "string"},
        "size": {"$ref": "#/$defs/size"},
        "prices": {
            "type": "array",
            "items": {"type": "number"},
            "minItems": 1,
            "maxItems": 3,
        },
        "new": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["brand", "size", "prices", "new"],
    "additionalProperties": False,
    "$defs": {
        "size": {"$ref": "#/$defs/2"},
        "2": {"$ref": "#/$defs/3"},
        "3": {"$ref": "#/$defs/4"},
        "4": {"$ref": "#/$defs/5"},
        "5": {"enum": ["S", "M", 7]},
    },
}
RECURSIVE = {"type": "object", "properties": {"next": {"$ref": "#"}}}
# The last is in it 2^40 times.
TWICE = {f"{n}": {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(40)}
DOUBLED = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/0"}},
    "$defs": {**TWICE, "40": {"type": "string"}},
}
NESTED = reduce(
    lambda schema, _: {"type": "object", "properties": {"a": schema}},
    range(300),
    {"type": "string"},
)
# A pattern of each that may be the first.
OPTIONAL = {"type": "object", "properties": {f"{n}": {} for n in range(500)}}
BOUNDED = {
    "type": "object",
    "properties": {"a": {"type": "object", "properties": {"b": {"minimum": 3}}}},
}


def held_to(schema):
    return {
        "type": "json_schema",
        "json_schema": {
            "name": "n",
            "strict": True,
            "schema": schema,
        },
    }


def request(id: str, content="Say it.", **body):
    messages = [{"role": "user", "content": content}]
    parameters = {"model": "gpt-4.1-mini", "messages": messages, "max_tokens": 8, "temperature": 0}
    return {
        "custom_id": id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": parameters | body,
    }


def write(path, *lines) -> str:
    path.write_text(
        "".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in lines)
    )
    return str(path)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def body(line):
    return line["response"]["body"]


def texts(folder) -> list[str]:
    """Of a run's first choice for each request."""
    return [
        body(line)["choices"][0]["message"]["content"] for line in read(folder / "output.jsonl")
    ]


@pytest.fixture
def generate(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """The command with a real engine over a small random model, in this process; gives the run's
    folder.
    """
    model = save_tiny(tmp_path / "model")

    def finish(run, planned):
        return driver.finish(run, run.output.path, run_here(run, components.build, planned))

    monkeypatch.setattr(
        driver, "run_extract", lambda run, *, planned=None, **_: finish(run, planned)
    )

    def run(source: str, *overrides: str, output: str = "out", retry: bool = False):
        settings = [
            "cluster.unit_documents=3",
            "model.dtype=float32",
            "model.device=cpu",
            *overrides,
        ]
        config = config_over(
            source, "generation", settings, None, str(model), str(tmp_path / output), openai=True
        )
        run_task(config, "generation", retry, False, False)
        return tmp_path / output

    return run


def test_every_request_has_its_line_in_one_of_the_two_files(tmp_path, generate) -> None:
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    source = write(
        tmp_path / "batch.jsonl",
        request("greedy", max_tokens=None, max_completion_tokens=20),
        request(
            "three",
            n=3,
            temperature=1.5,
            seed=7,
            max_tokens=5,
        ),
        "",
        '{"custom_id": "broken"',
        request(
            "chat",
            messages=turns,
            stream=False,
            user="u",
            metadata={"a": "b"},
            top_p=None,
        ),
        request("schema", response_format=held_to(BOUNDED)),
        {**request("no id"), "custom_id": None},
        request("long", "x" * 5000),
        request(
            "three again",
            n=3,
            temperature=1.5,
            seed=7,
            max_tokens=5,
        ),
    )
    folder = generate(source)
    answers = read(folder / "output.jsonl")
    errors = read(folder / "errors.jsonl")
    assert [entry["custom_id"] for entry in answers] == ["greedy", "three", "chat", "three again"]
    assert all(
        entry["error"] is None and entry["response"]["status_code"] == 200 for entry in answers
    )
    found = {
        line["custom_id"]: ChatCompletion.model_validate(body(line), strict=True)
        for line in answers
    }
    assert {one.model for one in found.values()} == {"gpt-4.1-mini"}
    three, again = (
        [choice.message.content for choice in found[name].choices]
        for name in ("three", "three again")
    )
    assert again == three  # a seed of its own decides
    assert [choice.index for choice in found["three"].choices] == [0, 1, 2]
    assert len({*three}) == 3
    assert found["three"].usage.completion_tokens <= 15
    assert {choice.finish_reason for choice in found["three"].choices} <= {"stop", "length"}
    assert len({line["id"] for line in answers + errors}) == 8
    # what an unmodified model writes to the same messages
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    flat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        *turns[2:],
    ]
    how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    for name, messages, limit in (
        ("greedy", [{"role": "user", "content": "Say it."}], 20),
        ("chat", flat, 8),
    ):
        prompt = tokenizer.apply_chat_template(messages, **how)
        size = prompt["input_ids"].shape[1]
        written = model.generate(
            **prompt,
            max_new_tokens=limit,
            do_sample=False,
            pad_token_id=0,
        )[0, size:]
        choice = found[name].choices[0]
        usage = found[name].usage
        assert choice.message.content == tokenizer.decode(written, skip_special_tokens=True)
        assert choice.finish_reason == ("stop" if written[-1] == 2 else "length")
        counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
        assert counts == (size, len(written), size + len(written))
    assert [line["custom_id"] for line in errors] == [None, "schema", None, "long"]
    broken, schema, nameless, long = errors
    for number, line in ((4, broken), (7, nameless)):
        fault = BatchError.model_validate(line["error"], strict=True)
        assert line["response"] is None
        assert fault.line == number
        assert fault.message.startswith(f"line {number}: ")
    assert broken["error"]["code"] == "invalid_json_line"
    for line, words, param in (
        (schema, "minimum cannot be enforced", "response_format"),
        (long, "too long", "messages"),
    ):
        fault = TypeAdapter(ErrorObject).validate_python(body(line)["error"], strict=True)
        assert line["error"] is None
        assert line["response"]["status_code"] == 400
        assert fault.type == "invalid_request_error"
        assert fault.param == param
        assert words in fault.message
    # everything is committed: the files come back as they were, whatever became of them
    before = {name: (folder / name).read_bytes() for name in ("output.jsonl", "errors.jsonl")}
    (folder / "output.jsonl").unlink()
    (folder / "errors.jsonl").write_text("half a li")
    generate(source)
    assert {name: (folder / name).read_bytes() for name in before} == before
    (folder / "errors.jsonl").unlink()
    generate(source, retry=True)
    assert read(folder / "errors.jsonl") == errors


def test_parameters_are_those_of_the_request(tmp_path, generate) -> None:
    """A stop text cuts; what a request leaves out is as the configuration says, which samples at 1
    as the API does.
    """
    (text,) = texts(generate(write(tmp_path / "a.jsonl", request("a", max_tokens=12)), output="a"))
    stop = text[4]
    free = {key: value for key, value in request("free")["body"].items() if key != "temperature"}
    source = write(
        tmp_path / "b.jsonl",
        request("text", max_tokens=12, stop=stop),
        request("list", max_tokens=12, stop=["nowhere", stop]),
        {**request("free"), "body": free},
    )
    *cut, warm = texts(generate(source, output="b"))
    assert cut == [text[: text.index(stop)]] * 2
    assert body(read(tmp_path / "b/output.jsonl")[0])["choices"][0]["finish_reason"] == "stop"
    assert (
        texts(generate(source, "decoding.sampling.temperature=0", output="c"))[2]
        == text[:8]
        != warm
    )


def test_an_answer_is_held_to_its_response_format(tmp_path, generate) -> None:
    """A random model, at temperature 1, writes what an unmodified validator accepts, within the
    tokens that it may.
    """
    draws = [
        request(f"schema {n}", temperature=1, max_tokens=90, response_format=held_to(PRODUCT))
        for n in range(4)
    ]
    objects = [
        request(
            f"object {n}", temperature=1, max_tokens=limit, response_format={"type": "json_object"}
        )
        for n, limit in enumerate((8, 8, 300, 300))
    ]
    short = request("short", max_tokens=9, response_format=held_to(PRODUCT))
    folder = generate(write(tmp_path / "batch.jsonl", *draws, *objects, short))
    choices = {
        line["custom_id"]: body(line)["choices"][0] for line in read(folder / "output.jsonl")
    }
    assert len(choices) == len(draws) + len(objects)
    for name, choice in choices.items():
        content = choice["message"]["content"]
        ended = choice["finish_reason"] == "stop"
        if name.startswith("schema"):
            jsonschema.validate(json.loads(content), PRODUCT)
        assert content.startswith("{")
        assert ended or name.startswith("object")
        assert not ended or isinstance(json.loads(content), dict)
    (line,) = read(folder / "errors.jsonl")
    fault = body(line)["error"]
    assert line["custom_id"] == "short"
    assert fault["param"] == "response_format"
    assert re.search(r"its shortest answer has \d+ tokens, but only 9", fault["message"])
    source = write(tmp_path / "b.jsonl", draws[0], request("text"))
    (line,) = read(generate(source, "decoding.method=pasta", output="other") / "errors.jsonl")
    assert "pasta cannot restrict an answer to it" in body(line)["error"]["message"]


CASES = Path(__file__).parent / "response_format.jsonl"


def test_every_answer_to_a_schema_is_valid_under_it(tmp_path, generate) -> None:
    """Schemas that public reports are about: none of their answers is other than the schema says,
    and none is cut.
    """
    lines = read(CASES)
    for line in lines:
        line["body"]["temperature"] = 1
    folder = generate(write(tmp_path / "batch.jsonl", *lines))
    assert read(folder / "errors.jsonl") == []
    answers = read(folder / "output.jsonl")
    assert len(answers) == len(lines)
    for line, answer in zip(lines, answers, strict=True):
        choice = body(answer)["choices"][0]
        schema = line["body"]["response_format"]["json_schema"]["schema"]
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        assert choice["finish_reason"] == "stop"


def test_an_answer_that_does_not_match_its_schema_is_an_error(
    tmp_path, generate, monkeypatch
) -> None:
    """A decoder that keeps to another schema (as a server may) is found out."""
    other = expression(json.dumps({"type": "object", "properties": {"b": {"const": 1}}}))
    monkeypatch.setattr(openai_batch, "expression", lambda schema: other)
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
    }
    wrong = request("wrong", max_tokens=60, response_format=held_to(schema))
    stopped = request(
        "stopped",
        max_tokens=60,
        stop="{",
        response_format=held_to(schema),
    )
    source = write(tmp_path / "batch.jsonl", wrong, stopped, request("text"))
    folder = generate(source, "cluster.max_failed_share=1")
    (answer,) = read(folder / "output.jsonl")
    assert answer["custom_id"] == "text"
    faults = {
        line["custom_id"]: (line["response"]["status_code"], body(line)["error"]["message"])
        for line in read(folder / "errors.jsonl")
    }
    assert faults["wrong"][0] == 500
    assert "response_format: the answer does not match it: $: 'a' is a req" in faults["wrong"][1]
    assert "it is not JSON" in faults["stopped"][1]


ODD = held_to({"type": "object", "properties": {"a": {"type": "foo"}}})
WRONG = [  # other keys of a line or of its body, the parameter that is named, and words
    ({"url": "/v1/embeddings"}, "url", "only /v1/chat/completions is"),
    ({"method": "GET"}, "method", "expected POST"),
    ({"body": None}, "body", "valid dictionary"),
    ({"bodies": 1}, "bodies", "unknown key"),
    ({"stream": True}, "stream", "stream is not supported"),
    ({"logprobs": True}, "logprobs", "not supported"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"temprature": 1}, "temprature", "not supported"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format",
        "required for type json_schema, with name and schema",
    ),
    ({"response_format": held_to({"type": "array"})}, "response_format", "its type must be object"),
    ({"response_format": held_to(RECURSIVE)}, "response_format", "# contains itself"),
    ({"response_format": held_to(DOUBLED)}, "response_format", "more than 5,000 schemas"),
    ({"response_format": held_to(NESTED)}, "response_format", "or nested more than 50 deep"),
    ({"response_format": held_to(OPTIONAL)}, "response_format", "its pattern takes too long"),
    (
        {"response_format": held_to({"type": "object", "properties": [1]})},
        "response_format",
        "$.properties: [1] is not of type 'object'",
    ),
    ({"response_format": ODD}, "response_format", "$.properties.a.type: 'foo'"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
    ({"stop": ["x", ""]}, "stop", "empty"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "messages.0",
        "image_url is not supported",
    ),
    (
        {
            "messages": [
                {
                    "role": "tool",
                    "content": "x",
                    "tool_call_id": "1",
                }
            ]
        },
        "messages.0",
        "tool_call_id",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x"}]},
        "messages",
        "last turn must be the user's",
    ),
    ({"temperature": 3}, "temperature", "less than or equal to 2"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"max_tokens": "8"}, "max_tokens", "valid integer"),
    ({"max_completion_tokens": 4}, "max_tokens", "both set"),
    ({"messages": []}, "messages", "at least 1 item"),
]


def test_what_cannot_be_done_is_said(tmp_path) -> None:
    lines = [request("ok"), *(request(str(number)) for number in range(len(WRONG)))]
    for line, (changes, *_) in zip(lines[1:], WRONG, strict=True):
        (line if changes.keys() & {"url", "method", "body", "bodies"} else line["body"]).update(
            changes
        )
    settings = [
        "model.fake.load_seconds=0",
        "model.fake.step_seconds=0",
        "model.fake.answer_tokens=2",
    ]
    source = write(tmp_path / "batch.jsonl", *lines)
    config = config_over(
        source, "generation", settings, None, "fake", str(tmp_path / "out"), openai=True
    )
    run_here(config, components.build)
    assert batch_files.write(config, str(tmp_path / "out")) == (1, len(WRONG))
    for number, (line, (_, param, words)) in enumerate(
        zip(read(tmp_path / "out/errors.jsonl"), WRONG, strict=True)
    ):
        fault = body(line)["error"]
        assert line["custom_id"] == str(number)
        assert line["response"]["status_code"] == 400
        assert fault["param"] == param
        assert words in fault["message"]


def test_what_is_no_batch_is_refused_before_anything_runs(tmp_path, generate) -> None:
    source = write(tmp_path / "a.jsonl", request("x"), "", "no json", request("y"), request("x"))
    with pytest.raises(InputError, match=r"a\.jsonl:5: custom_id 'x' also occurs on line 1"):
        generate(source)
    write(tmp_path / "b.jsonl", request("x"))
    with pytest.raises(ConfigError, match="takes one batch file"):
        generate(source, f"input.path=[{source}, {tmp_path}/b.jsonl]")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="needs the batch file itself"):
        config_over("run.yaml", "generation", [], None, None, None, openai=True)


def test_a_file_that_was_changed_is_not_taken_for_the_runs(tmp_path, generate) -> None:
    source = write(tmp_path / "a.jsonl", request("x"), request("y"))
    folder = generate(source)
    config = config_over(source, "generation", [], None, "fake", str(folder), openai=True)
    write(tmp_path / "a.jsonl", request("longer"), request("y"))
    with pytest.raises(RunError, match=r"a\.jsonl:2: .* has no rows for this"):
        batch_files.write(config, str(folder))


def test_the_seed_counts_where_a_request_may_sample() -> None:
    cold = "decoding.sampling.temperature=0"
    runs = [
        config_over("a.jsonl", "generation", [cold, *more], None, None, None, openai=True)
        for more in ([], ["decoding.sampling.seed=1"])
    ]
    assert runs[0].fingerprint() != runs[1].fingerprint()
