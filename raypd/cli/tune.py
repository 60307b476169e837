"""The command `raypd tune`: print what was tried, and write the new configuration."""

from pathlib import Path

import typer

from raypd.config import load_config, rewrite
from raypd.errors import ConfigError
from raypd.estimation import TuneOptions, show_tune, tune, views
from raypd.run import console


def run(
    path: str,
    overrides: list[str],
    output: str | None,
    options: TuneOptions,
    verbose: bool,
) -> None:
    """Find the cheapest settings, and write a configuration with them.

    Args:
        path: The YAML of the run.
        overrides: Keys of the configuration, as key=value.
        output: The configuration to write; None for CONFIG.tuned.yaml.
        options: The options of the search.
        verbose: Whether to show the messages of Ray and the worker.

    Raises:
        ConfigError: Before anything is measured, if the configuration cannot be written.
    """
    config = load_config(path, overrides)
    source = Path(path)
    target = _target(source, output)
    if not 0 <= options.agreement <= 1:
        raise ConfigError(f"--agreement {options.agreement:g}: a share of values, from 0 to 1")
    measurements = target.with_suffix(".jsonl")
    try:
        result = tune.tune(config, options, measurements, verbose=verbose, say=console.say)
    except KeyboardInterrupt:
        raise console.Interrupted(
            f"interrupted: the measurements so far are in {measurements}; run the same command "
            "again to resume"
        ) from None
    show_tune(result)
    changed = "nothing had to be changed"
    if result.best.changes:
        changed = f"changed: {tune.describe(result.best.changes)}"
    rewrite.write(source, overrides, result.best.changes, target, f"{changed}\n{views.why(result)}")
    print(f"configuration: {target}")
    print(f"measurements:  {measurements}")
    print(
        f"Next: `raypd estimate {target}` estimates a run with it, `raypd {config.task.command} "
        f"{target}` runs it"
    )


def run_cascade(
    path: str,
    overrides: list[str],
    output: str | None,
    options: TuneOptions,
    labels: str,
    f1_floor: float | None,
    verbose: bool,
) -> None:
    """Find the threshold of the cascade, and write a configuration with it.

    Args:
        path: The YAML of the run.
        overrides: Keys of the configuration, as key=value.
        output: The configuration to write; None for CONFIG.tuned.yaml.
        options: Of these, the sample and the minutes count.
        labels: Labelled documents.
        f1_floor: The F1 that the cascade must hold; None for fit.f1_floor.
        verbose: Whether to show the messages of Ray and the worker.

    Raises:
        ConfigError: Before anything is measured, if the configuration cannot be written.
        typer.Exit: If no threshold holds the floor.
    """
    from raypd.evaluation import describe_cascade, tune_cascade

    config = load_config(path, overrides)
    source = Path(path)
    target = _target(source, output)
    if f1_floor is None:
        f1_floor = config.fit.f1_floor
    tuning = tune_cascade(config, labels, f1_floor, options.sample, options.minutes, verbose)
    description = describe_cascade(tuning)
    print(description)
    if tuning.best is None:
        raise typer.Exit(1)
    changes = {"cascade.under": tuning.best.under, "cascade.share": 1.0}
    rewrite.write(source, overrides, changes, target, description.splitlines()[-1])
    print(f"configuration: {target}\nNext: `raypd extract {target}`")


def _target(source: Path, output: str | None) -> Path:
    """Return the configuration to write, after checking that it may be written."""
    target = source.with_name(f"{source.stem}.tuned.yaml")
    if output is not None:
        target = Path(output)
    rewrite.check_target(target, source)
    return target
