"""The runs that a training needs and lacks are made in its folder, and go on as any run: of a
preference round (PASTA, section 4) the baseline, the samples and the judge's word on both; a
teacher's marks.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from raypd import storage
from raypd.cluster.driver import run_extract
from raypd.config import RunConfig
from raypd.config.load import with_changes
from raypd.errors import ConfigError, ModelError, raised_as
from raypd.models.load import Purpose, check_model_config
from raypd.run import console, layout
from raypd.run.training import TrainingRecord
from raypd.training import annotate, preference
from raypd.training.data import check
from raypd.training.example import listed
from raypd.training.job import run_training

SAMPLES = 10  # of a prompt, as in the paper
_KEY = "training.preference"
# Where keys say nothing else.
_PLAIN: dict[str, Any] = {"model": {}, "decoding": {"method": "autoregressive"}}


def train(config: RunConfig, *, verbose: bool = False) -> TrainingRecord:
    """As `run_training`, after the runs that it lacks; of preference rounds, each from the weights
    before, the last.
    """
    storage.configure(config.storage)
    check(config)
    # `check` has looked into runs, each as it reached its own storage.
    storage.configure(config.storage)
    output, keys = layout.output_folder(config), config.training.preference
    given = (
        {f"{_KEY}.{name}": getattr(keys, name) for name in ("baseline", "judged")}
        if keys is not None
        else {}
    )
    for key, value in (given | {"training.annotations": config.training.annotations}).items():
        if isinstance(value, dict):  # known before the first of them is run
            with raised_as(ConfigError, key, ConfigError, ModelError):
                run = with_changes(config, {"training": {}, **_PLAIN, "task.samples": 1, **value})
                if run.model.has_weights:
                    purpose: Purpose = "vllm" if run.engine.kind == "vllm" else "decode"
                    check_model_config(run.model, machine=False, purpose=purpose)
    if isinstance(teacher := config.training.annotations, dict):
        path = _run(
            config,
            "marked",
            _over(output, "responses", annotate.requests(config)) | teacher,
            verbose,
        )
        config = with_changes(config, {"training.annotations": path})
    if keys is None:
        return run_training(config, verbose=verbose)
    for number in range(1, keys.rounds + 1):
        folder = output if number == keys.rounds else storage.join(output, f"round-{number}")
        config = _with_runs(with_changes(config, {"output.path": folder}), verbose)
        record = run_training(config, verbose=verbose)
        again = {f"{_KEY}.samples": None, f"{_KEY}.judged": keys.judged}
        config = with_changes(config, {"model.name": record.weights, **again})
    return record


def _with_runs(config: RunConfig, verbose: bool) -> RunConfig:
    """The configuration of a round with the folders of its runs, after those that are keys, or
    none, were made.
    """
    keys = config.training.preference
    assert keys is not None
    if isinstance(keys.baseline, dict):
        plain = {"method": "autoregressive", "max_new_tokens": config.decoding.max_new_tokens}
        asked = {"model": {}, "decoding": plain, "task.samples": 1, **keys.baseline}
        config = with_changes(
            config, {f"{_KEY}.baseline": _run(config, "baseline", asked, verbose)}
        )
    if keys.samples is None:
        drawn = {"task.samples": SAMPLES, "decoding.sampling.temperature": 1.0}
        config = with_changes(config, {f"{_KEY}.samples": _run(config, "samples", drawn, verbose)})
    if isinstance(keys.judged, dict):
        skipped = Counter[str]()
        asked = (
            _over(config.output.path, "comparisons", preference.comparisons(config, skipped))
            | keys.judged
        )
        if skipped:
            console.say(f"left out:{listed(skipped)}")
        config = with_changes(config, {f"{_KEY}.judged": _run(config, "judged", asked, verbose)})
    return with_changes(config, {f"{_KEY}.rounds": 1})


def _over(folder: str, name: str, prompts: Iterable[Mapping[str, str]]) -> dict[str, Any]:
    """The keys of a run of text over prompts, which are kept in a file."""
    file = storage.join(folder, f"{name}.jsonl")
    if not storage.exists(file):
        storage.put(file, "".join(json.dumps(prompt) + "\n" for prompt in prompts).encode())
    source = {"path": file, "id_column": "id", "text_columns": ["prompt"], "category_column": None}
    return {"input": source, "task": {"kind": "generation"}, **_PLAIN}


def _run(config: RunConfig, name: str, changes: Mapping[str, Any], verbose: bool) -> str:
    path = storage.join(layout.output_folder(config), name)
    console.say(f"{name}: {path}")
    run_extract(
        with_changes(config, {"training": {}, **changes, "output.path": path}), verbose=verbose
    )
    return path
