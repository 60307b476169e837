"""A decoding method as somebody else would write it: two tokens a pass, the second a repeat; as a
script it runs it.
"""

from typing import Any

from raypd.decoding.methods.registry import REGISTRY, MethodSpec
from raypd.decoding.program import Feed, Program
from raypd.decoding.text import GeneratedText, Prompt, Stops, TextMethod


class EchoAnswer:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def generated(self, decode) -> GeneratedText:
        return GeneratedText(
            decode(self.tokens),
            0,
            len(self.tokens),
            [],
            counters={"repeated": len(self.tokens) // 2},
        )


class EchoText(TextMethod):
    def program(self, prompt: Prompt, stops: Stops, seed: int) -> Program[Any]:
        at = len(prompt.tokens)
        predictions = yield Feed(prompt.tokens, range(at), sample_at=[at - 1])
        tokens: list[int] = []
        while len(tokens) < self.options.max_new_tokens:
            (token,) = predictions.tokens
            tokens += [token, token]
            predictions = yield Feed([token, token], [at, at + 1], sample_at=[1])
            at += 2
        return EchoAnswer(tokens)


REGISTRY["echo"] = MethodSpec(
    {"generation": ("max_new_tokens",)}, text_method="tests.decoding.toy_method:EchoText"
)

if __name__ == "__main__":
    import json

    from raypd.decoding.engine import Engine
    from tests.tasks.test_generation import make, one
    from tests.tiny import tiny_model

    model = tiny_model("llama")
    request = one(make(decoding={"method": "echo", "max_new_tokens": 6}, model=model), "Hi")
    (answer,) = Engine(model).run([request.program])
    (record,) = request.finish(answer)
    print(json.dumps(record.columns))
