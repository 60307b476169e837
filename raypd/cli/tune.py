"""The command `raypd tune`: reads its options, prints what was tried, and writes the new
configuration.
"""

from pathlib import Path

import typer

from raypd.config import rewrite
from raypd.config.load import load_config
from raypd.errors import ConfigError
from raypd.estimation.tune import TuneOptions, describe, tune
from raypd.estimation.views import show_tune, why
from raypd.run import console


def run(
    path: str,
    overrides: list[str],
    output: str | None,
    options: TuneOptions,
    verbose: bool,
    labels: str | None = None,
    floor: float | None = None,
) -> None:
    """Tunes and writes; output None: CONFIG.tuned.yaml. labels: finds cascade.under, for an F1 of
    `floor`. Raises ConfigError before decoding: it cannot be written; Exit where no threshold holds
    the floor.
    """
    config = load_config(path, overrides)
    source = Path(path)
    target = Path(output) if output is not None else source.with_name(f"{source.stem}.tuned.yaml")
    rewrite.check_target(target, source)
    if labels is not None:
        from raypd.evaluation import describe_cascade, tune_cascade

        floor = config.fit.f1_floor if floor is None else floor
        tuning = tune_cascade(config, labels, floor, options.sample, options.minutes, verbose)
        words = describe_cascade(tuning)
        print(words)
        if tuning.best is None:
            raise typer.Exit(1)
        changes = {"cascade.under": tuning.best.under, "cascade.share": 1.0}
        rewrite.write(source, overrides, changes, target, words.splitlines()[-1])
        print(f"configuration: {target}\nnext: `raypd extract {target}`")
        return
    if not 0 <= options.agreement <= 1:
        raise ConfigError(f"--agreement {options.agreement:g}: a share of values, from 0 to 1")
    measurements = target.with_suffix(".jsonl")
    try:
        result = tune(config, options, measurements, verbose=verbose, say=console.say)
    except KeyboardInterrupt:
        advice = "the same command goes on from there"
        raise console.Interrupted(
            f"interrupted: what was measured stands in {measurements}; {advice}"
        ) from None
    show_tune(result)
    if result.best.changes:
        changed = f"changed: {describe(result.best.changes)}"
    else:
        changed = "nothing had to be changed"
    rewrite.write(source, overrides, result.best.changes, target, f"{changed}\n{why(result)}")
    print(f"configuration: {target}")
    print(f"measurements:  {measurements}")
    run_it = f"`raypd {config.task.command} {target}` runs it"
    print(f"next: `raypd estimate {target}` says what a run with it takes, {run_it}")
