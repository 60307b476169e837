"""Answer many questions about one context in parallel, in one prompt (IPPD).

This runs in the current process, without Ray.

    python examples/questions.py
"""

import raypd

CONTEXT = (
    "The night train from Vienna to Venice leaves at 21:27 and arrives at 8:34. It has couchettes "
    "and\nsleeping cars. Bicycles need a reservation. Breakfast is served from six. The dining car "
    "was taken off in 2019."
)

QUESTIONS = [
    "When does the train leave?",
    "Where does the train arrive?",
    {
        "question": "What needs a reservation?",
        "choices": ["breakfast", "bicycles", "the dining car"],
    },
    "When was the dining car taken off?",
]

llm = raypd.LLM("smollm2-135m-instruct")
for question, answer in zip(QUESTIONS, llm.answer(CONTEXT, QUESTIONS), strict=True):
    text = question
    if isinstance(question, dict):
        text = question["question"]
    print(f"{text} {answer.value} ({answer.confidence:.0%})")
