"""Generate text with SPACE.

Masks draft tokens, and the model verifies them in the same pass, so that the text equals that of
plain decoding. The model here is not trained to draft, so hardly any draft is accepted;
docs/training.md trains one.

    python examples/space.py
"""

from pathlib import Path

import raypd
from raypd.models.prepare import add_tokens

MODEL = "models/example-space"
PROMPTS = ["Name three colours of the rainbow.", "Write a Python function that adds two numbers."]

if not Path(MODEL).exists():
    add_tokens("smollm2-135m-instruct", MODEL, ["space"])

plain = raypd.LLM("smollm2-135m-instruct", settings={"decoding.max_new_tokens": 48})
space = raypd.LLM(MODEL, settings={"decoding.method": "space", "decoding.max_new_tokens": 48})
plain_texts = [generated.value for generated in plain.generate(PROMPTS)]
space_texts = [generated.value for generated in space.generate(PROMPTS)]
for prompt, plain_text, space_text in zip(PROMPTS, plain_texts, space_texts, strict=True):
    print(f"{prompt}\n  {plain_text!r}\n  the same with SPACE: {plain_text == space_text}")
