"""The output columns of every kind of task, beside those that all have (raypd.dataset.writer)."""

from __future__ import annotations

import pyarrow as pa

VALUE = pa.struct(
    [
        ("name", pa.string()),
        ("value", pa.string()),  # as text, whatever its type; null where there is none
        ("number", pa.float64()),
        ("boolean", pa.bool_()),
        ("confidence", pa.float32()),  # of a choice its probability, else the mean of its tokens' (docs/methods.md)
        ("status", pa.string()),  # ok | null | truncated (cut at K_max) | invalid | ambiguous (not one number)
        ("raw", pa.string()),  # what was decoded, where no value could be made of it
    ]
)
EXTRACTION = pa.schema(
    [
        ("category", pa.string()),
        ("record", pa.string()),  # the values as a JSON object
        ("values", pa.list_(VALUE)),
        ("truncated", pa.bool_()),  # the document was cut to fit
    ]
)
QUESTION_ANSWERING = pa.schema(
    [
        ("question_id", pa.string()),  # its own, or its number in the row (from 0)
        ("question", pa.string()),
        ("answer", pa.string()),  # text, or the choice's text; null where the context does not say
        ("choice_index", pa.int32()),  # of the answer among the choices, from 0; null for free answers
        ("confidence", pa.float32()),  # of a choice its probability, else the mean of its tokens'
        ("answer_status", pa.string()),  # ok | null | truncated (cut at max_answer_tokens) | invalid (empty)
        ("truncated", pa.bool_()),  # the context was cut to fit
    ]
)
GENERATION = pa.schema(
    [
        ("sample", pa.int32()),  # of task.samples
        ("turn", pa.int32()),  # of a conversation
        ("text", pa.string()),
        ("finish_reason", pa.string()),  # stop: all threads of the text came to their end; else length
        ("tokens", pa.int32()),
        ("confidence", pa.float32()),  # geometric mean of the token probabilities
        ("raw", pa.string()),  # with markup, where the method writes any
        ("counters", pa.string()),  # prompt_tokens and the method's own, as a JSON object
        ("warnings", pa.list_(pa.string())),
    ]
)
BY_KIND = {"extraction": EXTRACTION, "question_answering": QUESTION_ANSWERING, "generation": GENERATION}
