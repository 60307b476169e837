"""Tasks, which turn a document into a prompt with slots, and decoded tokens into checked
records.
"""

from typing import TYPE_CHECKING

from raypd.lazy import LazyExports

if TYPE_CHECKING:
    from raypd.tasks import (
        calibration as calibration,
        columns as columns,
        labels as labels,
        values as values,
    )
    from raypd.tasks.base import (
        Document as Document,
        Record as Record,
        Request as Request,
        Task as Task,
        TextBox as TextBox,
    )
    from raypd.tasks.build import (
        build_task as build_task,
        check_task as check_task,
        task_alone as task_alone,
    )
    from raypd.tasks.calibration import (
        Calibration as Calibration,
        calibration_of as calibration_of,
        clipped_probability as clipped_probability,
        features as features,
    )
    from raypd.tasks.cascade import (
        Cascade as Cascade,
        SecondProgram as SecondProgram,
        doubt as doubt,
        merged as merged,
    )
    from raypd.tasks.columns import (
        SHAPES as SHAPES,
        RowValue as RowValue,
        columns_of as columns_of,
        parts_of as parts_of,
        record_row as record_row,
        row_values as row_values,
        rows_of as rows_of,
        shape_of as shape_of,
        typed_row as typed_row,
        value_row as value_row,
    )
    from raypd.tasks.distinct import Distinct as Distinct, gives_the_same as gives_the_same
    from raypd.tasks.documents import (
        billed_as as billed_as,
        category_of as category_of,
        conversation as conversation,
        input_fields as input_fields,
        kind_of as kind_of,
        questions_of as questions_of,
        text_of as text_of,
        unpacked as unpacked,
        with_nested as with_nested,
        words_of as words_of,
    )
    from raypd.tasks.extraction import ExtractionTask as ExtractionTask
    from raypd.tasks.few_shot import LabelledExamples as LabelledExamples
    from raypd.tasks.generation import GenerationTask as GenerationTask
    from raypd.tasks.labels import (
        about_missing as about_missing,
        label_columns as label_columns,
        labels_of as labels_of,
    )
    from raypd.tasks.missing import (
        json_constant as json_constant,
        parse_json as parse_json,
        plain_value as plain_value,
    )
    from raypd.tasks.model_card import (
        check_card as check_card,
        untrained as untrained,
        write_card as write_card,
    )
    from raypd.tasks.openai_batch import (
        RESPONSE_FORMAT as RESPONSE_FORMAT,
        SCHEMA as SCHEMA,
        TOO_LONG as TOO_LONG,
        BadRequest as BadRequest,
        read_request as read_request,
    )
    from raypd.tasks.prompting import (
        DOCUMENTS as DOCUMENTS,
        check_template as check_template,
        encode as encode,
        end_of_turn as end_of_turn,
        messages as messages,
    )
    from raypd.tasks.record import (
        Row as Row,
        lacks as lacks,
        record_of as record_of,
        value_in as value_in,
    )
    from raypd.tasks.training_documents import (
        TrainedOn as TrainedOn,
        trained_on as trained_on,
        trained_on_of as trained_on_of,
    )
    from raypd.tasks.values import is_number as is_number

__getattr__ = LazyExports(
    __name__,
    {
        "base": ("Document", "Record", "Request", "Task", "TextBox"),
        "build": ("build_task", "check_task", "task_alone"),
        "calibration": ("Calibration", "calibration_of", "clipped_probability", "features"),
        "cascade": ("Cascade", "SecondProgram", "doubt", "merged"),
        "columns": (
            "RowValue",
            "SHAPES",
            "columns_of",
            "parts_of",
            "record_row",
            "row_values",
            "rows_of",
            "shape_of",
            "typed_row",
            "value_row",
        ),
        "distinct": ("Distinct", "gives_the_same"),
        "documents": (
            "billed_as",
            "category_of",
            "conversation",
            "input_fields",
            "kind_of",
            "questions_of",
            "text_of",
            "unpacked",
            "with_nested",
            "words_of",
        ),
        "extraction": ("ExtractionTask",),
        "few_shot": ("LabelledExamples",),
        "generation": ("GenerationTask",),
        "labels": ("about_missing", "label_columns", "labels_of"),
        "missing": ("json_constant", "parse_json", "plain_value"),
        "model_card": ("check_card", "untrained", "write_card"),
        "openai_batch": ("BadRequest", "RESPONSE_FORMAT", "SCHEMA", "TOO_LONG", "read_request"),
        "prompting": ("DOCUMENTS", "check_template", "encode", "end_of_turn", "messages"),
        "record": ("Row", "lacks", "record_of", "value_in"),
        "training_documents": ("TrainedOn", "trained_on", "trained_on_of"),
        "values": ("is_number",),
    },
    modules=("calibration", "columns", "labels", "values"),
)
