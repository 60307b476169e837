"""The configuration: one pydantic tree, read from YAML by `load`.

Every key has a default; unknown keys are errors.
"""

from typing import TYPE_CHECKING

from raypd.lazy import LazyExports

if TYPE_CHECKING:
    from raypd.config import (
        model_card_file as model_card_file,
        render as render,
        rewrite as rewrite,
    )
    from raypd.config.cluster import (
        ClusterConfig as ClusterConfig,
        CostConfig as CostConfig,
        deadline_at as deadline_at,
    )
    from raypd.config.data import (
        EXCEL as EXCEL,
        TABLE_ENDINGS as TABLE_ENDINGS,
        TABLES as TABLES,
        TEXT_FILES as TEXT_FILES,
        InputConfig as InputConfig,
        OutputConfig as OutputConfig,
        StorageConfig as StorageConfig,
    )
    from raypd.config.input_formats import INPUT_FORMATS as INPUT_FORMATS
    from raypd.config.json_schema import (
        UNSUPPORTED_KEYWORDS as UNSUPPORTED_KEYWORDS,
        Conflict as Conflict,
        Tree as Tree,
        conjunction as conjunction,
        permitted_values as permitted_values,
        referred as referred,
        types_of as types_of,
        unsupported_keyword as unsupported_keyword,
        validator as validator,
    )
    from raypd.config.load import (
        COMMAND_LINE as COMMAND_LINE,
        leaves_method_open as leaves_method_open,
        load_config as load_config,
        make_config as make_config,
        value_at as value_at,
        value_of as value_of,
        with_changes as with_changes,
    )
    from raypd.config.model import (
        MOST_REQUESTS as MOST_REQUESTS,
        MOST_SEQS as MOST_SEQS,
        CascadeConfig as CascadeConfig,
        DecodingConfig as DecodingConfig,
        EndpointConfig as EndpointConfig,
        EngineConfig as EngineConfig,
        FakeConfig as FakeConfig,
        ModelConfig as ModelConfig,
    )
    from raypd.config.model_card_file import (
        card_of as card_of,
        has_earlier_template as has_earlier_template,
    )
    from raypd.config.run import RunConfig as RunConfig
    from raypd.config.schema import (
        DEEPEST as DEEPEST,
        MOST_PROPERTIES as MOST_PROPERTIES,
        UNNAMED_CATEGORY as UNNAMED_CATEGORY,
        imported as imported,
        is_file as is_file,
        task_of as task_of,
    )
    from raypd.config.secrets import (
        HIDDEN as HIDDEN,
        redact as redact,
        without_credentials as without_credentials,
    )
    from raypd.config.sections import set_key as set_key, with_current_keys as with_current_keys
    from raypd.config.tasks import (
        ANSWER_KEYS as ANSWER_KEYS,
        DETAILS as DETAILS,
        KINDS as KINDS,
        METHODS as METHODS,
        OWN_COLUMNS as OWN_COLUMNS,
        Category as Category,
        ExtractionConfig as ExtractionConfig,
        GenerationConfig as GenerationConfig,
        QuestionAnsweringConfig as QuestionAnsweringConfig,
        TaskSection as TaskSection,
    )
    from raypd.config.training import (
        LABELS_NEEDED as LABELS_NEEDED,
        PreferenceConfig as PreferenceConfig,
    )
    from raypd.config.yaml_file import dump as dump

__getattr__ = LazyExports(
    __name__,
    {
        "cluster": ("ClusterConfig", "CostConfig", "deadline_at"),
        "data": (
            "EXCEL",
            "InputConfig",
            "OutputConfig",
            "StorageConfig",
            "TABLE_ENDINGS",
            "TABLES",
            "TEXT_FILES",
        ),
        "input_formats": ("INPUT_FORMATS",),
        "json_schema": (
            "Conflict",
            "Tree",
            "UNSUPPORTED_KEYWORDS",
            "conjunction",
            "permitted_values",
            "referred",
            "types_of",
            "unsupported_keyword",
            "validator",
        ),
        "load": (
            "COMMAND_LINE",
            "leaves_method_open",
            "load_config",
            "make_config",
            "value_at",
            "value_of",
            "with_changes",
        ),
        "model": (
            "CascadeConfig",
            "DecodingConfig",
            "EndpointConfig",
            "EngineConfig",
            "FakeConfig",
            "MOST_REQUESTS",
            "MOST_SEQS",
            "ModelConfig",
        ),
        "model_card_file": ("card_of", "has_earlier_template"),
        "run": ("RunConfig",),
        "schema": (
            "DEEPEST",
            "MOST_PROPERTIES",
            "UNNAMED_CATEGORY",
            "imported",
            "is_file",
            "task_of",
        ),
        "secrets": ("HIDDEN", "redact", "without_credentials"),
        "sections": ("set_key", "with_current_keys"),
        "tasks": (
            "ANSWER_KEYS",
            "Category",
            "DETAILS",
            "ExtractionConfig",
            "GenerationConfig",
            "KINDS",
            "METHODS",
            "OWN_COLUMNS",
            "QuestionAnsweringConfig",
            "TaskSection",
        ),
        "training": ("LABELS_NEEDED", "PreferenceConfig"),
        "yaml_file": ("dump",),
    },
    modules=("model_card_file", "render", "rewrite"),
)
