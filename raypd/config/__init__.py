"""The configuration: one pydantic tree, read from YAML by `load`.

Every key has a default; unknown keys are errors.
"""
# ruff: noqa: F401, I001 -- what the other rooms import from here

from raypd.config.cluster import ClusterConfig, CostConfig, deadline_at
from raypd.config.data import TABLES, TEXT_FILES, InputConfig, OutputConfig, StorageConfig
from raypd.config.model import (
    SAMPLING_KEYS,
    CascadeConfig,
    DecodingConfig,
    FakeConfig,
    Method,
    ModelConfig,
)
from raypd.config.run import RunConfig
from raypd.config.secrets import HIDDEN, redact, without_credentials
from raypd.config.tasks import (
    ANSWER_KEYS,
    KINDS,
    METHODS,
    OWN_COLUMNS,
)
from raypd.config.tasks import (
    Category,
    ExtractionConfig,
    GenerationConfig,
    QuestionAnsweringConfig,
)
from raypd.config.training import FitConfig, PreferenceConfig, TrainingConfig
from raypd.schema import Attribute, bare
