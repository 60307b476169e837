"""The configuration: one pydantic tree; `config_file` reads it from YAML.

Every key has a documented default, and unknown keys are errors.
"""

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

__all__ = [
    "ANSWER_KEYS",
    "KINDS",
    "METHODS",
    "SAMPLING_KEYS",
    "Attribute",
    "Category",
    "ClusterConfig",
    "CostConfig",
    "DecodingConfig",
    "EngineConfig",
    "ExtractionConfig",
    "FakeConfig",
    "GenerationConfig",
    "InputConfig",
    "Method",
    "ModelConfig",
    "NightlyConfig",
    "OutputConfig",
    "QuestionAnsweringConfig",
    "RunConfig",
    "SamplingConfig",
    "Section",
    "StorageConfig",
    "TaskConfig",
    "TrainingConfig",
    "without_credentials",
]
