"""The configuration: one pydantic tree; `load` reads it from YAML.

Every key has a documented default, and unknown keys are errors.
"""
# ruff: noqa: F401 -- what the other rooms import from here

from raypd.config.cluster import ClusterConfig, CostConfig, NightlyConfig
from raypd.config.data import InputConfig, OutputConfig, StorageConfig
from raypd.config.model import (
    ANSWER_KEYS,
    METHODS,
    SAMPLING_KEYS,
    DecodingConfig,
    EngineConfig,
    FakeConfig,
    Method,
    ModelConfig,
    SamplingConfig,
)
from raypd.config.run import RunConfig
from raypd.config.section import Section, without_credentials
from raypd.config.tasks import (
    KINDS,
    Attribute,
    Category,
    ExtractionConfig,
    GenerationConfig,
    QuestionAnsweringConfig,
    TaskConfig,
)
from raypd.config.training import TrainingConfig
