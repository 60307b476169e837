"""The command line: `raypd extract CONFIG [key=value ...]`, `raypd config show [CONFIG] [key=value ...]`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import typer

import raypd
from raypd.config import RunConfig
from raypd.config_file import load_config, make_config
from raypd.errors import ConfigError, RunError, UserError

app = typer.Typer(
    help="Structured answers out of very large document collections.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Look at configurations.", no_args_is_help=True)
app.add_typer(config_app, name="config")
model_app = typer.Typer(help="Make a model ready for a decoding method; it must then be trained.", no_args_is_help=True)
app.add_typer(model_app, name="model")
prices_app = typer.Typer(help="What machines cost an hour.", no_args_is_help=True)
app.add_typer(prices_app, name="prices")

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to set, dotted")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"raypd {raypd.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it")] = False,
) -> None:
    """Structured answers out of very large document collections."""


Source = Annotated[str, typer.Argument(help="YAML of the run, or the data itself (.jsonl[.gz|.zst], .parquet)")]
Method = Annotated[str | None, typer.Option("--method", "-m", help="decoding.method")]
Model = Annotated[str | None, typer.Option(help="model.name")]
Output = Annotated[str | None, typer.Option("--output", "-o", help="output.path")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print what Ray has to say, too")]
RetryErrors = Annotated[bool, typer.Option("--retry-errors", help="Try the failed documents of a run again, no others")]
AllErrors = Annotated[bool, typer.Option("--all-errors", help="The same, also for what cannot be read in the input")]


@app.command()
def extract(
    config: Annotated[str, typer.Argument(help="YAML of the run; `raypd config show` lists all keys")],
    overrides: Overrides = None,
    retry_errors: RetryErrors = False,
    all_errors: AllErrors = False,
    verbose: Verbose = False,
) -> None:
    """Extract attributes from every document. A second run with the same output.path resumes."""
    run_job(load_config(config, overrides or []), "extraction", verbose, _retry(retry_errors, all_errors))


@app.command()
def answer(
    source: Source,
    overrides: Overrides = None,
    method: Method = None,
    model: Model = None,
    output: Output = None,
    retry_errors: RetryErrors = False,
    all_errors: AllErrors = False,
    verbose: Verbose = False,
) -> None:
    """Answer the questions of every context: raypd answer questions.jsonl, or a YAML with more to say."""
    made = _config(source, "question_answering", overrides, method, model, output)
    run_job(made, "question_answering", verbose, _retry(retry_errors, all_errors))


@app.command()
def generate(
    source: Source,
    overrides: Overrides = None,
    method: Method = None,
    model: Model = None,
    output: Output = None,
    retry_errors: RetryErrors = False,
    all_errors: AllErrors = False,
    verbose: Verbose = False,
) -> None:
    """Write an answer to every prompt: raypd generate prompts.jsonl --method space, or a YAML with more to say."""
    made = _config(source, "generation", overrides, method, model, output)
    run_job(made, "generation", verbose, _retry(retry_errors, all_errors))


def _config(
    source: str, kind: str, overrides: list[str] | None, method: str | None, model: str | None, output: str | None
) -> RunConfig:
    """A configuration from a YAML file, or around a data file; options go before overrides."""
    given = {"decoding.method": method, "model.name": model, "output.path": output}
    changes = [f"{key}={value}" for key, value in given.items() if value is not None] + (overrides or [])
    if source.endswith((".yaml", ".yml")):
        return load_config(source, changes)
    name = os.path.basename(source).split(".")[0]
    tree: dict[str, Any] = {
        "input": {"path": source},
        "output": {"path": f"runs/{name}-{method or kind}"},
        "task": {"kind": kind},
    }
    return make_config(tree, changes)


Retry = Literal["failed", "all"]


def _retry(retry_errors: bool, all_errors: bool) -> Retry | None:
    return "all" if all_errors else "failed" if retry_errors else None


def run_job(config: RunConfig, kind: str, verbose: bool = False, retry: Retry | None = None) -> None:
    """Runs a job of a kind, and prints a few documents, the totals and where the files lie; or retries its errors."""
    from raypd.cluster.pipeline import run_extract
    from raypd.cluster.summary import print_summary

    if config.task.kind != kind:
        command = {"extraction": "extract", "question_answering": "answer", "generation": "generate"}[config.task.kind]
        raise ConfigError(f"task.kind is {config.task.kind}: use `raypd {command}`")
    if retry is None:
        print_summary(run_extract(config, verbose=verbose))
        return
    from raypd.cluster.audit.retry import retry_errors

    print(retry_errors(config, everything=retry == "all", verbose=verbose).describe())


@app.command()
def nightly(
    config: Annotated[str, typer.Argument(help="YAML of the nightly run; its output.path is the folder of all nights")],
    overrides: Overrides = None,
    full: Annotated[bool, typer.Option("--full", help="Extract every document anew")] = False,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Also try what failed before again")] = False,
    verbose: Verbose = False,
) -> None:
    """Bring a table up to tonight's input: extract only what is new or changed since the last good night.

    The same command goes on where a night was cut off; of two at once, one says that the other is at work.
    """
    from raypd.cluster.audit.nightly import run_night

    made = load_config(config, overrides or [])
    print(run_night(made, full=full, retry_errors=retry_errors, verbose=verbose).describe())


Run = Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run (its output.path)")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON")]


@app.command()
def verify(
    run: Run,
    overrides: Overrides = None,
    threads: Annotated[int, typer.Option(min=1, help="Units that are compared at the same time")] = 8,
    as_json: AsJson = False,
) -> None:
    """Prove that a run has lost and doubled no document: read its input again and compare. Exit code 1 when it has.

    RUN knows its configuration; input.path=... says where the input lies now, if it was moved. Of a nightly folder the
    table of the last good night is compared.
    """
    from raypd import runs
    from raypd.cluster.audit import findings, table_check, verification

    config = runs.load_run(run, overrides or [])
    check = table_check.verify_table if runs.is_nightly(run) else verification.verify
    result = check(run, config, threads)
    print(result.to_json() if as_json else findings.describe(result))
    if not result.well:
        raise typer.Exit(1)


@app.command()
def errors(
    run: Run,
    overrides: Overrides = None,
    everything: Annotated[bool, typer.Option("--all", help="Every failed document on a line (tab-separated)")] = False,
    as_json: AsJson = False,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write them: .csv, .jsonl or .parquet")] = None,
) -> None:
    """List the dead letters of a run: documents without an answer, grouped by reason, and units that failed."""
    import json

    from raypd import runs
    from raypd.cluster.audit import dead_letters, findings

    runs.load_record(run, overrides or [])
    if output is not None:
        print(f"{findings.write_letters(run, output):,} failed documents: {output}")
    elif everything:
        findings.print_letters(run)
    else:
        summary = dead_letters.summarize(run)
        tree = json.dumps(summary.to_tree(), indent=2, ensure_ascii=False)
        print(tree if as_json else findings.describe_errors(summary))


@app.command()
def estimate(
    config: Annotated[str | None, typer.Argument(help="YAML of the run; not needed with --throughput")] = None,
    overrides: Overrides = None,
    sample: Annotated[int, typer.Option(min=2, help="Documents that are decoded to measure")] = 64,
    minutes: Annotated[float | None, typer.Option(help="Most time for measuring")] = None,
    no_baseline: Annotated[bool, typer.Option("--no-baseline", help="Do not measure autoregressive decoding")] = False,
    run: Annotated[str | None, typer.Option("--from", metavar="RUN", help="Take an earlier run's figures")] = None,
    throughput: Annotated[
        list[str] | None, typer.Option(metavar="[GPU=]RATE", help="Documents/s of one GPU, in place of measuring")
    ] = None,
    baseline: Annotated[
        list[str] | None, typer.Option(metavar="[GPU=]RATE", help="The same of autoregressive decoding")
    ] = None,
    documents: Annotated[float | None, typer.Option(min=1, help="Size of the corpus, in place of counting")] = None,
    instance: Annotated[list[str] | None, typer.Option(help="Only these instance types")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Most nodes of the table")] = 8,
    head: Annotated[str, typer.Option(help="Instance type of the head node, or none")] = "m7i.2xlarge",
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Say what a run will take and cost, from a sample that is decoded, an earlier run, or given throughputs."""
    from raypd.cluster.forecast import estimate_command

    estimate_command.run(
        load_config(config, overrides or []) if config is not None else None,
        estimate_command.options(
            sample=sample,
            minutes=minutes,
            baseline=not no_baseline,
            run=run,
            throughput=throughput,
            baseline_throughput=baseline,
            documents=documents,
            instances=instance,
            nodes=nodes,
            head=head,
        ),
        as_json,
        verbose,
    )


@app.command()
def tune(
    config: Annotated[str, typer.Argument(help="YAML of the run; it is not written to")],
    overrides: Overrides = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Where the new YAML goes; none: CONFIG.tuned.yaml beside it")
    ] = None,
    sample: Annotated[int, typer.Option(min=2, help="Documents that every setting is measured on")] = 32,
    minutes: Annotated[float | None, typer.Option(help="Most time for measuring")] = None,
    budget_usd: Annotated[float | None, typer.Option(help="Most money for it, at the price of one node")] = None,
    agreement: Annotated[float, typer.Option(help="Least share of values as autoregressive decoding gives them")] = 0.9,
    instance: Annotated[str | None, typer.Option(help="Instance type whose price counts")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what was measured before")] = False,
    verbose: Verbose = False,
) -> None:
    """Measure settings on a sample and write the cheapest configuration that still answers alike."""
    from raypd import tune_command

    tune_command.run(
        config,
        overrides or [],
        output=output,
        sample=sample,
        minutes=minutes,
        budget_usd=budget_usd,
        agreement=agreement,
        instance=instance,
        fresh=fresh,
        verbose=verbose,
    )


@app.command()
def report(
    run: Run,
    overrides: Overrides = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Where to write it; none: into the run")] = None,
) -> None:
    """Write what a run did and cost as one HTML page that loads nothing, for any browser, phone or printer."""
    from raypd.cluster import storage
    from raypd.report import data, page

    run = storage.absolute(run)
    where = storage.absolute(output) if output is not None else None
    print(page.write(data.load(run, overrides or []), where))


@app.command()
def status(
    run: Run,
    overrides: Overrides = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again until the run has ended")] = False,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Show how a run stands: progress, speed, cost, workers, errors. Reads its folder, so it runs on any machine."""
    from raypd.cluster import storage
    from raypd.report import terminal
    from raypd.report.status import Watch

    looking = Watch(storage.absolute(run), overrides or [])
    terminal.show(looking, again=every if watch else None, as_json=as_json)


@config_app.command()
def show(
    config: Annotated[str | None, typer.Argument(help="YAML of a run; none: the defaults")] = None,
    overrides: Overrides = None,
) -> None:
    """Print the whole configuration with its defaults; every key with what it means."""
    from raypd.reference import render

    if config is not None and "=" in config and not os.path.exists(config):
        raise typer.BadParameter(f"{config!r}: give the configuration first, then key=value")
    print(render(load_config(config, overrides or []) if config is not None else None), end="")


@model_app.command("add-tokens")
def add_tokens(
    model: Annotated[str, typer.Argument(help="Hub id, folder, or smollm2-135m-instruct")],
    output: Annotated[str, typer.Argument(help="New folder for the model with the tokens")],
    method: Annotated[list[str], typer.Option("--for", help="apar, pasta or space; may be given more than once")],
    seed: Annotated[int, typer.Option(help="Draws the embedding of space's [Mask]")] = 0,
) -> None:
    """Write a copy of a model that has the control tokens of a decoding method."""
    from raypd.models import prepare

    ids = prepare.add_tokens(model, output, method, seed)
    print(f"{output}: {model} with " + ", ".join(f"{token} ({id})" for token, id in ids.items()))
    print("Train it before you decode with it: it has not learnt to write them.")


@model_app.command("add-heads")
def add_heads(
    model: Annotated[str, typer.Argument(help="Hub id, folder, or smollm2-135m-instruct")],
    output: Annotated[str, typer.Argument(help="New folder for the heads: decoding.heads")],
    heads: Annotated[int, typer.Option(min=1, help="Tokens that are drafted behind the next one")] = 2,
    layers: Annotated[int, typer.Option(min=0, help="Residual blocks of a head")] = 1,
) -> None:
    """Write untrained Medusa heads for a model."""
    from raypd.models import prepare

    made = prepare.add_heads(model, output, heads, layers)
    print(f"{output}: {made.count} Medusa heads for {model}, which draft a tree of {len(made.tree.paths)} tokens")
    print("Train them before you decode with them: the text is right with any heads, and faster with trained ones.")


@prices_app.command("refresh")
def prices_refresh(
    region: Annotated[list[str] | None, typer.Option(help="AWS region; may be given more than once")] = None,
) -> None:
    """Ask AWS for today's on-demand and spot prices (needs credentials) and keep them for the next runs."""
    from raypd.cluster.cost import pricing_aws

    print(f"written: {pricing_aws.refresh(region or pricing_aws.SHIPPED_REGIONS)}")


@prices_app.command("show")
def prices_show(
    instance_type: Annotated[str | None, typer.Argument(help="Such as g6e.48xlarge; none: all")] = None,
    region: Annotated[str, typer.Option(help="AWS region")] = "us-east-1",
) -> None:
    """Print the prices that a bill would be made with, and where each is from."""
    from raypd.cluster.cost import pricing_aws

    pricing_aws.show(region, instance_type)


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Ends the process at an error that a user can act on with its text and no traceback.

    Exit codes: 2 for the configuration, the input and the model; 1 for a run that could not go on; 130 interrupted.
    """
    try:
        yield
    except KeyboardInterrupt:
        _leave("interrupted", 130)
    except UserError as error:
        _leave(str(error), getattr(error, "exit_code", 1 if isinstance(error, RunError) else 2))


def _leave(message: str, code: int) -> None:
    print(message if code == 130 else f"error: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # Not sys.exit: threads of Ray that are in the middle of something would hold the process or print a traceback.
    os._exit(code)


def main() -> None:
    """The entry point of `raypd`."""
    with report_errors():
        app()


if __name__ == "__main__":
    main()
