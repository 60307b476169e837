"""Text with SPACE: masks draft tokens and the model verifies them in the same pass, so that the
text is that of plain decoding. The model here is not trained to draft, so hardly a draft is
accepted; docs/training.md trains one.

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
for prompt, one, other in zip(
    PROMPTS, plain.generate(PROMPTS), space.generate(PROMPTS), strict=True
):
    print(f"{prompt}\n  {one.value!r}\n  the same with SPACE: {one.value == other.value}")
