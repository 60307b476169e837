"""The common part of `raypd extract`, `answer` and `generate`: the configuration and the run."""

import json
import os
from typing import Any

from raypd import storage
from raypd.config import (
    KINDS,
    GenerationConfig,
    QuestionAnsweringConfig,
    RunConfig,
    load_config,
    make_config,
    task_of,
)
from raypd.dataset import LABEL_ENDINGS, label_rows, look, look_for_columns
from raypd.errors import ConfigError, InputError, RunError, raised_as
from raypd.run import Manifest, layout, say
from raypd.tasks import questions_of
from raypd.text import clean, count, counted, share


def config_over(
    source: str,
    kind: str,
    overrides: list[str],
    method: str | None,
    model: str | None,
    output: str | None,
    openai: bool = False,
    schema: str | None = None,
    questions: str | None = None,
) -> RunConfig:
    """Load a configuration from a YAML file, or make one around a data file.

    Args:
        source: A YAML file, or the data.
        kind: The kind of the task.
        overrides: Keys of the configuration, as key=value; they win over the options.
        method: decoding.method.
        model: model.name.
        output: output.path.
        openai: Whether the data is a batch file of OpenAI's API. Its requests are sampled unless
            they say otherwise, as OpenAI does.
        schema: What to extract.
        questions: A file with the questions of every context.

    Raises:
        ConfigError: If the options do not fit the source, or the configuration is wrong.
    """
    options = {"decoding.method": method, "model.name": model, "output.path": output}
    changes = [f"{key}={value}" for key, value in options.items() if value is not None]
    if questions is not None:
        listed = json.dumps(read_questions(questions))
        changes.append(f"task.questions={listed}")
    changes += overrides
    if source.endswith((".yaml", ".yml")):
        if openai:
            raise ConfigError(
                f"{source}: --openai needs the batch file itself; give settings after it as "
                "key=value"
            )
        if schema is not None:
            raise ConfigError(f"{source}: has its own task; --schema is for a data file")
        return load_config(source, changes)
    has_task = any(change.startswith("task.") for change in overrides)
    if kind == "extraction" and schema is None and not has_task:
        advice = (
            "--schema 'Brand, Color', a YAML of attributes or categories, a JSON Schema, or a "
            "pydantic model (module:Class)"
        )
        raise ConfigError(
            f"{source}: give a run's YAML, or say what to extract from this data: {advice}"
        )
    return _config_around_data(source, kind, changes, method or kind, schema, openai)


def _config_around_data(
    source: str,
    kind: str,
    changes: list[str],
    run_name: str,
    schema: str | None,
    openai: bool,
) -> RunConfig:
    """Make a configuration for a data file; its columns are looked up for an extraction."""
    name = os.path.basename(source).split(".")[0]
    task: dict[str, Any] = {"kind": kind}
    if schema is not None:
        task |= task_of(schema)
    tree: dict[str, Any] = {
        "input": {"path": source},
        "output": {"path": f"runs/{name}-{run_name}"},
        "task": task,
    }
    if kind == "extraction":
        look_for_columns(source, tree, changes, say)
    if kind == "question_answering":
        _look_for_question(source, tree, changes)
    if openai:
        tree["input"] |= {"id_column": "custom_id", "category_column": None}
        tree["task"] |= {"openai": True, "prompt_column": "body"}
        tree["decoding"] = {"sampling": {"temperature": 1.0}}
    return make_config(tree, changes)


def read_questions(path: str) -> list[Any]:
    """Read the questions of a file: a line each, a JSON list, JSON lines, or a table.

    Args:
        path: The file; .json, .jsonl, .csv, .tsv and .xlsx hold records (`question`, `choices`),
            any other a question a line.

    Raises:
        ConfigError: If the file holds no questions.
    """
    questions: list[Any] = []
    of_row = QuestionAnsweringConfig(questions_column="question")
    if path.lower().endswith(LABEL_ENDINGS):
        for _, _, row in label_rows(path, None, only_objects=False):
            question = row
            if isinstance(row, dict) and isinstance(row.get("question"), str):
                (question,) = questions_of(row, of_row)
            questions.append(question)
    else:
        with raised_as(ConfigError, f"--questions {path}: cannot be read", OSError, ValueError):
            text = storage.read(storage.absolute(path)).decode("utf-8-sig")
        questions = [line.strip() for line in text.splitlines() if line.strip()]
    if not questions:
        raise ConfigError(f"--questions {path}: contains no questions")
    return questions


def _look_for_question(source: str, tree: dict[str, Any], changes: list[str]) -> None:
    """Read the column `question` where the data has no column `questions`."""
    named = ("task.questions=", "task.questions_column=")
    if any(change.startswith(named) for change in changes):
        return
    try:
        columns = look.look(source).columns
    except (InputError, OSError):
        # The run says what is wrong with the data.
        return
    if "questions" not in columns and "question" in columns:
        tree["task"]["questions_column"] = "question"


def run_task(
    config: RunConfig, kind: str, retry_errors: bool, all_errors: bool, verbose: bool
) -> None:
    """Run a task, and print a few documents, the totals and the paths of the results.

    Args:
        config: The configuration.
        kind: The kind of task that the command runs.
        retry_errors: Retry the failed documents of a run instead.
        all_errors: Retry those as well whose failure the input causes.
        verbose: Whether to show the messages of Ray and the workers.

    Raises:
        ConfigError: If the configuration has another kind of task.
        RunError: If too many documents failed.
    """
    if config.task.command != KINDS[kind].command:
        raise ConfigError(f"task.kind is {config.task.kind}: use `raypd {config.task.command}`")
    batch = isinstance(config.task, GenerationConfig) and config.task.openai
    if batch:
        from raypd.dataset import batch_files

        storage.configure(config.storage)
        batch_files.check(config)
    manifest = None
    next_step = ""
    if retry_errors or all_errors:
        from raypd.verify import retry

        result = retry.retry_errors(config, everything=all_errors, verbose=verbose)
        print(clean(result.describe()))
        output = layout.output_folder(config)
        next_step = f"`raypd report {output}` shows what the run did and cost"
        if result.waiting:
            next_step = "run the command without --retry-errors to process the rest"
        elif result.failed or result.left_out:
            next_step = f"`raypd errors {output}` says why documents failed"
    else:
        from raypd.cli.summary import print_summary
        from raypd.cluster import run_extract

        manifest = run_extract(config, verbose=verbose)
        next_step = print_summary(manifest)
    if batch:
        _write_batch_files(config)
    if manifest is not None and manifest.failed:
        _report_failures(manifest, config.cluster.max_failed_share)
    if next_step:
        print(clean(f"Next: {next_step}"))


def _write_batch_files(config: RunConfig) -> None:
    """Write the results in the format of OpenAI's batch API."""
    from raypd.dataset import batch_files

    output = layout.output_folder(config)
    answered, failed = batch_files.write(config, output)
    answers = clean(storage.join(output, layout.BATCH_OUTPUT))
    errors = clean(storage.join(output, layout.BATCH_ERRORS))
    print(f"answers:  {answers} ({counted(answered, 'request')})")
    print(f"errors:   {errors} ({counted(failed, 'request')})")


def _report_failures(manifest: Manifest, max_failed_share: float) -> None:
    """Print the share of failed documents and the most frequent reason.

    Raises:
        RunError: If the share is above the limit, or all documents failed.
    """
    from raypd.verify import dead_letters

    failed_share = share(manifest.failed, manifest.documents)
    documents = counted(manifest.documents, "document")
    message = f"{count(manifest.failed)} of {documents} failed ({failed_share})"
    # Units of earlier versions do not tell their reasons to the manifest.
    reason = next(iter(manifest.reasons), None) or dead_letters.most_frequent(manifest.output)
    if reason:
        message += f", most often because: {clean(reason, 300)}"
    message += f"\n`raypd errors {manifest.output}` lists them"
    if dead_letters.has_retriable(manifest.output):
        message += "; --retry-errors retries those that may succeed"
    else:
        message += "; all of them are caused by the input"
    if not manifest.ok:
        raise RunError(f"no document was answered: {message}")
    if manifest.failed > max_failed_share * manifest.documents:
        raise RunError(
            f"more documents failed than cluster.max_failed_share, {max_failed_share:g}: {message}"
        )
    print(message)
