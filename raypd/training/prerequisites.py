"""The runs that a training depends on.

A preference round (PASTA, section 4) needs three runs: the baseline's answers, the samples, and the
judge's verdicts on both. If a teacher marks structure, one run of the teacher is needed. Runs that
the configuration describes by keys instead of by a folder are executed below the training's folder,
and resume like any other run.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import raypd.training.annotate as annotate
import raypd.training.preference as preference
from raypd import storage
from raypd.cluster import run_extract
from raypd.config import RunConfig, with_changes
from raypd.errors import ConfigError, ModelError, raised_as
from raypd.models import Purpose, check_model_config
from raypd.run import TrainingRecord, console, layout
from raypd.training.data import check_training
from raypd.training.example import listed
from raypd.training.job import run_training
from raypd.training.weights import check_weights

SAMPLES = 10  # samples per prompt, as in the paper
_KEY = "training.preference"


def _another_model() -> dict[str, Any]:
    """Return the keys of a run of another model, before those that the user gave for it.

    They are new in each call, because `with_changes` writes the user's keys into these objects.
    """
    return {"model": {}, "decoding": {"method": "autoregressive"}}


def train(config: RunConfig, *, verbose: bool = False) -> TrainingRecord:
    """Train a model, after the runs that the training depends on.

    Every preference round starts from the weights of the round before.

    Args:
        config: The configuration, whose section `training` says what is trained.
        verbose: Whether Ray's own messages are shown.

    Returns:
        The record of the training; with preference rounds, that of the last round.

    Raises:
        ConfigError: If a key of the training, or of a run that it depends on, cannot be used.
        UserError: Whatever `run_training` and the runs raise.
    """
    storage.configure(config.storage)
    check_training(config)
    # `check_training` opened other runs, and each of them configured its own storage.
    storage.configure(config.storage)
    check_weights(config)
    _check_dependencies(config)
    output = layout.output_folder(config)
    if isinstance(config.training.annotations, dict):
        config = _with_annotations(config, output, config.training.annotations, verbose)
    preference_keys = config.training.preference
    if preference_keys is None:
        return run_training(config, verbose=verbose)
    for number in range(1, preference_keys.rounds + 1):
        is_last = number == preference_keys.rounds
        folder = output if is_last else storage.join(output, f"round-{number}")
        config = _with_runs(with_changes(config, {"output.path": folder}), verbose)
        record = run_training(config, verbose=verbose)
        next_round = {
            "model.name": record.weights,
            f"{_KEY}.samples": None,
            f"{_KEY}.judged": preference_keys.judged,
        }
        config = with_changes(config, next_round)
    return record


def _check_dependencies(config: RunConfig) -> None:
    """Raise ConfigError for a dependency that cannot run, before the first of them starts."""
    runs: dict[str, Any] = {}
    if config.training.preference is not None:
        runs[f"{_KEY}.baseline"] = config.training.preference.baseline
        runs[f"{_KEY}.judged"] = config.training.preference.judged
    runs["training.annotations"] = config.training.annotations
    for key, run_keys in runs.items():
        if not isinstance(run_keys, dict):
            continue
        with raised_as(ConfigError, key, ConfigError, ModelError):
            changes = {"training": {}, **_another_model(), "task.samples": 1, **run_keys}
            run = with_changes(config, changes)
            if run.model.has_weights:
                purpose: Purpose = "vllm" if run.engine.kind == "vllm" else "decode"
                check_model_config(run.model, machine=False, purpose=purpose)


def _with_annotations(
    config: RunConfig, output: str, teacher: dict[str, Any], verbose: bool
) -> RunConfig:
    """Run the teacher over all responses; return a configuration that names its folder."""
    changes = _over_prompts(output, "responses", annotate.requests(config)) | teacher
    folder = _run(config, "marked", changes, verbose)
    return with_changes(config, {"training.annotations": folder})


def _with_runs(config: RunConfig, verbose: bool) -> RunConfig:
    """Execute the runs of one round; return a configuration that names their folders."""
    keys = config.training.preference
    assert keys is not None
    if isinstance(keys.baseline, dict):
        changes = {
            "model": {},
            "decoding": {
                "method": "autoregressive",
                "max_new_tokens": config.decoding.max_new_tokens,
            },
            "task.samples": 1,
            **keys.baseline,
        }
        folder = _run(config, "baseline", changes, verbose)
        config = with_changes(config, {f"{_KEY}.baseline": folder})
    if keys.samples is None:
        changes = {"task.samples": SAMPLES, "decoding.sampling.temperature": 1.0}
        folder = _run(config, "samples", changes, verbose)
        config = with_changes(config, {f"{_KEY}.samples": folder})
    if isinstance(keys.judged, dict):
        skipped = Counter[str]()
        prompts = preference.comparisons(config, skipped)
        changes = _over_prompts(config.output.path, "comparisons", prompts) | keys.judged
        if skipped:
            console.say(f"left out:{listed(skipped)}")
        folder = _run(config, "judged", changes, verbose)
        config = with_changes(config, {f"{_KEY}.judged": folder})
    return with_changes(config, {f"{_KEY}.rounds": 1})


def _over_prompts(folder: str, name: str, prompts: Iterable[Mapping[str, str]]) -> dict[str, Any]:
    """Store prompts in a file, unless it exists; return the keys of a generation run over it."""
    file = storage.join(folder, f"{name}.jsonl")
    if not storage.exists(file):
        lines = [json.dumps(prompt) + "\n" for prompt in prompts]
        storage.put(file, "".join(lines).encode())
    source = {"path": file, "id_column": "id", "text_columns": ["prompt"], "category_column": None}
    return {"input": source, "task": {"kind": "generation"}, **_another_model()}


def _run(config: RunConfig, name: str, changes: Mapping[str, Any], verbose: bool) -> str:
    """Execute a run in a subfolder of the training's folder; return that folder."""
    path = storage.join(layout.output_folder(config), name)
    console.say(f"{name}: {path}")
    run = with_changes(config, {"training": {}, **changes, "output.path": path})
    run_extract(run, verbose=verbose)
    return path
