"""The command line: thin commands, options in `options`; what takes long to import is imported when
it is needed.
"""

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

import raypd
from raypd import storage
from raypd.cli import options as o
from raypd.cli.run import config_over, run_task
from raypd.config import RunConfig
from raypd.config.load import load_config
from raypd.config.render import render
from raypd.errors import ConfigError, RunError, UserError, raised_as
from raypd.run import layout, load
from raypd.text import clean, said

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut names of options off where a terminal has 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)
_config_app = typer.Typer(help="Look at configurations.", no_args_is_help=True)
app.add_typer(_config_app, name="config")
_model_app = typer.Typer(help="Make a model ready for a decoding method.", no_args_is_help=True)
app.add_typer(_model_app, name="model")
_schema_app = typer.Typer(help="Find out what documents have.", no_args_is_help=True)
app.add_typer(_schema_app, name="schema")
_prices_app = typer.Typer(help="What machines cost an hour.", no_args_is_help=True)
app.add_typer(_prices_app, name="prices")


def _version(show: bool) -> None:
    if show:
        print(f"raypd {raypd.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print it")
    ] = False,
) -> None:
    """Structured answers out of very large document collections."""


@app.command()
def quickstart(folder: o.QuickstartTo = "configs") -> None:
    """Write the quickstart, its data, and configurations of trainings into a folder."""
    if os.path.exists(folder):
        raise ConfigError(f"{folder}: is there already; give the name of a new folder")
    shutil.copytree(Path(__file__).parents[1] / "configs", folder)
    print(clean(f"next: `raypd extract {os.path.join(folder, 'quickstart', 'extract.yaml')}`"))


@app.command()
def init(data: o.Sampled, schema: o.Schema = None, output: o.ConfigTo = None) -> None:
    """Write a configuration for data of your own.

    Looks at the columns of its first rows. raypd init tickets.jsonl --schema ticket.json"""
    from raypd.cli import init as init_command

    print(clean(init_command.run(data, schema, output)))


@app.command()
def extract(
    source: o.Source,
    overrides: o.Overrides = None,
    schema: o.Schema = None,
    method: o.Method = None,
    model: o.Model = None,
    output: o.Output = None,
    retry_errors: o.RetryErrors = False,
    all_errors: o.AllErrors = False,
    verbose: o.Verbose = False,
) -> None:
    """Extract attributes from every document.

    raypd extract run.yaml, or data.jsonl --schema product.json. A second run with the same
    output.path resumes.
    """
    config = config_over(
        source, "extraction", overrides or [], method, model, output, schema=schema
    )
    run_task(config, "extraction", retry_errors, all_errors, verbose)


@app.command()
def answer(
    source: o.Source,
    overrides: o.Overrides = None,
    method: o.Method = None,
    model: o.Model = None,
    output: o.Output = None,
    retry_errors: o.RetryErrors = False,
    all_errors: o.AllErrors = False,
    verbose: o.Verbose = False,
) -> None:
    """Answer the questions of every context. raypd answer questions.jsonl, or a YAML with more to
    say.
    """
    config = config_over(source, "question_answering", overrides or [], method, model, output)
    run_task(config, "question_answering", retry_errors, all_errors, verbose)


@app.command()
def generate(
    source: o.Source,
    overrides: o.Overrides = None,
    method: o.Method = None,
    model: o.Model = None,
    output: o.Output = None,
    openai: o.OpenAI = False,
    retry_errors: o.RetryErrors = False,
    all_errors: o.AllErrors = False,
    verbose: o.Verbose = False,
) -> None:
    """Write an answer to every prompt. raypd generate prompts.jsonl --method space, or a YAML with
    more to say.
    """
    config = config_over(source, "generation", overrides or [], method, model, output, openai)
    run_task(config, "generation", retry_errors, all_errors, verbose)


@app.command()
def nightly(
    config: Annotated[
        str, Argument(help="YAML of the nightly run; its output.path is the folder of all nights")
    ],
    overrides: o.Overrides = None,
    full: Annotated[bool, Option("--full", help="Extract every document anew")] = False,
    retry_errors: Annotated[
        bool, Option("--retry-errors", help="Also try what failed before again")
    ] = False,
    verbose: o.Verbose = False,
) -> None:
    """Bring a table up to tonight's input.

    Extracts only what is new or changed since the last good night. The same command goes on where a
    night was cut off; of two at once, one says that the other is at work.
    """
    from raypd.nights.nightly import run_night

    made = load_config(config, overrides or [])
    print(clean(run_night(made, full=full, retry_errors=retry_errors, verbose=verbose).describe()))


@app.command()
def train(config: o.Config, overrides: o.Overrides = None, verbose: o.Verbose = False) -> None:
    """Fine-tune a model for its decoding method.

    Section `training` says how. The same command goes on from the latest checkpoint of a training
    that was cut off.
    """
    from raypd import training

    record = training.train(load_config(config, overrides or [], trains=True), verbose=verbose)
    print(clean(record.describe()))


@app.command()
def fit(config: o.Config, overrides: o.Overrides = None, verbose: o.Verbose = False) -> None:
    """Find the cheapest model that holds an F1 on your documents.

    Labels a sample, trains candidates, scores and prices each, and writes the configuration to run.
    Section `fit` says how. The same command goes on where it was cut off.
    """
    from raypd.fitting import describe, missing, run_fit

    result = run_fit(config, overrides or [], verbose=verbose)
    print(clean(describe(result, missing(result))))
    if result.stopped is not None:
        raise typer.Exit(3)


@app.command()
def evaluate(
    run: o.Run,
    labels: o.Labels,
    against: o.Against = None,
    tolerance: o.Tolerance = 0.0,
    labels_column: o.LabelsColumn = "target",
    as_json: o.AsJson = False,
) -> None:
    """Score a run's answers against labels: values, answers to questions, texts (ROUGE-L).

    Of an extraction a page (evaluation.html in the run's folder) shows what was wrong, label beside
    value.
    """
    from raypd import evaluation as scoring

    evaluation = scoring.evaluate(run, labels, against, tolerance, labels_column)
    if as_json:
        print(json.dumps(asdict(evaluation), indent=1))
        return
    print(clean(scoring.describe(evaluation)))
    try:
        where = scoring.write_page(run, labels, evaluation, labels_column, tolerance)
    except UserError as error:  # the figures stand
        where = f"no page: {error}"
    if where is not None:
        print(clean(f"what was wrong: {where}"))


@app.command()
def calibrate(
    run: o.Run,
    labels: o.Labels,
    output: o.CalibrationTo = None,
    tolerance: o.Tolerance = 0.0,
    labels_column: o.LabelsColumn = "target",
) -> None:
    """Turn confidences into how often such values are right.

    From a run that was made with model.calibration=none and labels that its model has not seen.
    What is written beside the weights counts in every run with them; any other is named by
    model.calibration.
    """
    from raypd.evaluation import calibrate_run

    print(clean(calibrate_run(run, labels, output, labels_column, tolerance)))


@app.command()
def verify(
    run: o.Run, overrides: o.Overrides = None, threads: o.Threads = 8, as_json: o.AsJson = False
) -> None:
    """Prove that a run lost and doubled nothing.

    Reads its input again and compares. Exit code 1 when it has. RUN knows its configuration;
    input.path=... says where the input lies now, if it was moved. Of a nightly folder the table of
    the last good night is compared.
    """
    from raypd.nights import table_check
    from raypd.verify import findings, verification

    config = load.load_run(run, overrides or [])
    result = (table_check.verify_table if layout.is_nightly(run) else verification.verify)(
        run, config, threads
    )
    tree = {"passed": result.passed, **asdict(result)}
    print(json.dumps(tree, indent=2) if as_json else clean(findings.describe(result)))
    if not result.passed:
        raise typer.Exit(1)


@app.command()
def errors(
    run: o.Run,
    overrides: o.Overrides = None,
    as_json: o.AsJson = False,
    output: Annotated[
        str | None, Option("--output", "-o", help="Write them: .csv, .jsonl or .parquet")
    ] = None,
) -> None:
    """List the documents without an answer.

    They are grouped by reason, with the units that failed.
    """
    from raypd.verify import dead_letters, export, findings

    load.load_record(run, overrides or [])
    if output is not None:
        print(
            f"{export.write_file(output, dead_letters.SCHEMA, dead_letters.letters(run)):,} "
            f"failures in {output}"
        )
    else:
        summary = dead_letters.summarize(run)
        print(
            json.dumps(asdict(summary), indent=2)
            if as_json
            else clean(findings.describe_errors(summary))
        )


@app.command()
def export(run: o.Run, file: o.ExportTo, overrides: o.Overrides = None) -> None:
    """Write a run's answers into one file. raypd export runs/products answers.csv: a column for
    each attribute.
    """
    from raypd.dataset import plan, writer
    from raypd.verify.export import export as write

    print(f"{write(run, file, overrides or []):,} documents: {file}")
    if (planned := plan.stored(run)) and (done := len(writer.committed(run))) < planned.units:
        print(
            f"not whole: {done} of {planned.units} units are committed; the run's command goes on",
            file=sys.stderr,
        )


@app.command()
def estimate(
    config: Annotated[
        str | None, Argument(help="YAML of the run; not needed with --throughput, --model")
    ] = None,
    overrides: o.Overrides = None,
    sample: o.Sample = 64,
    minutes: o.Minutes = None,
    baseline: o.Baseline = False,
    run: Annotated[
        str | None, Option("--from", metavar="RUN", help="Take an earlier run's figures")
    ] = None,
    throughput: o.Throughput = None,
    baseline_throughput: o.BaselineThroughput = None,
    model: o.PredictedModel = None,
    tokens: o.PredictedTokens = (400, 300, 80, 80, 5),
    documents: Annotated[
        float | None, Option(min=1, help="Size of the corpus, in place of counting")
    ] = None,
    instance: Annotated[
        list[str] | None, Option("--instance", help="Only these instance types")
    ] = None,
    nodes: Annotated[int, Option(min=1, help="Most nodes of the table")] = 8,
    head: Annotated[str, Option(help="Instance type of the head node, or none")] = "m7i.2xlarge",
    as_json: o.AsJson = False,
    verbose: o.Verbose = False,
) -> None:
    """Say what a run will take and cost.

    From a sample that is decoded, an earlier run, given throughputs, or, for a GPU that is not
    there, data sheets.
    """
    from raypd.estimation import estimate as estimates
    from raypd.estimation.machines import EstimateOptions

    made = load_config(config, overrides or []) if config is not None else None
    counted = (
        sample,
        minutes,
        baseline,
        run,
        throughput,
        baseline_throughput,
        model,
        tokens,
        documents,
    )
    estimates.run(made, EstimateOptions(*counted, instance, nodes, head), as_json, verbose)


@app.command()
def tune(
    config: o.Config,
    overrides: o.Overrides = None,
    output: o.TunedTo = None,
    sample: o.Sample = 32,
    minutes: o.Minutes = None,
    budget_usd: Annotated[
        float | None, Option(help="Most money for it, at the price of one node")
    ] = None,
    agreement: Annotated[
        float, Option(help="Least share of values that must agree with the reference")
    ] = 0.9,
    judge: o.Judge = "low",
    reference: o.Reference = "auto",
    instance: Annotated[
        str | None, Option("--instance", help="Instance type whose price counts")
    ] = None,
    fresh: Annotated[bool, Option("--fresh", help="Forget what was measured before")] = False,
    cascade: o.CascadeLabels = None,
    f1_floor: o.F1Floor = None,
    verbose: o.Verbose = False,
) -> None:
    """Find the cheapest settings.

    A sample is measured; the configuration written still answers alike.

    With --cascade LABELS: when the second model (cascade.model) is asked, so that F1 still holds a
    floor.
    """
    from raypd.cli import tune as tune_command

    limits = tune_command.TuneOptions(
        sample, minutes, budget_usd, agreement, judge, reference, instance, fresh
    )
    tune_command.run(config, overrides or [], output, limits, verbose, cascade, f1_floor)


@app.command()
def report(
    run: o.Run, overrides: o.Overrides = None, output: o.PageTo = None, texts: o.Texts = False
) -> None:
    """Write what a run did and cost as a page.

    One HTML file that loads nothing, for any browser, phone or printer.
    """
    from raypd.report import data, page

    found = data.load(storage.absolute(run), overrides or [])
    if texts:
        from raypd.report.texts import add

        add(found, overrides or [])
    print(page.write(found, storage.absolute(output) if output is not None else None))


@app.command()
def review(
    run: o.Run,
    overrides: o.Overrides = None,
    documents: Annotated[
        int, Option("--documents", min=1, help="How many, half of them the least sure")
    ] = 40,
    apply: Annotated[
        str | None, Option("--apply", metavar="FILE", help="The corrected CSV")
    ] = None,
    output: Annotated[
        str | None, Option("--output", "-o", help="Where labels go; none: into the run")
    ] = None,
) -> None:
    """Look at the least sure values, correct them, and make labels of that.

    Writes a page with a box for each value, and the same as CSV; --apply FILE makes labels of what
    was corrected, for `raypd evaluate`, `raypd calibrate`, `raypd fit` (fit.labels) and `raypd
    train` (input.path).
    """
    from raypd.report import review as reviews

    root = storage.absolute(run)
    if apply is None:
        html, table = reviews.write(root, documents, overrides or [])
        print(
            clean(
                f"page:  {html}\ntable: {table}\nnext: correct either, then `raypd review {run} "
                "--apply FILE`"
            )
        )
        return
    where, count = reviews.apply(root, apply, output, overrides or [])
    print(clean(f"labels: {where} ({count:,} documents)\nnext: `raypd evaluate {run} {where}`"))


@app.command()
def status(
    run: o.Run,
    overrides: o.Overrides = None,
    watch: o.Watch = False,
    every: o.Every = 5.0,
    as_json: o.AsJson = False,
) -> None:
    """Show how a run stands.

    Progress, speed, cost, workers, errors; reads its folder, so it runs on any machine.
    """
    from raypd.report import terminal
    from raypd.report.status import Watch

    terminal.show(
        Watch(storage.absolute(run), overrides or []),
        again=every if watch else None,
        as_json=as_json,
    )


@_config_app.command()
def show(config: o.Shown = None, overrides: o.Overrides = None) -> None:
    """Print the whole configuration, or one section, with its defaults; every key with what it
    means.
    """
    if config in RunConfig.model_fields and not os.path.isfile(config):
        sections = (
            section for section in render().split("\n\n") if re.match(rf"(# )?{config}:", section)
        )
        print("\n\n".join(sections).rstrip())
    elif config is None:
        print(render(), end="")
    elif "=" in config and not os.path.exists(config):
        raise typer.BadParameter(f"{config!r}: give the configuration first, then key=value")
    else:
        print(render(load_config(config, overrides or [])), end="")


@_schema_app.command("suggest")
def schema_suggest(
    data: Annotated[str, Argument(help="The data: a file that a run reads, a folder or a glob")],
    overrides: o.Overrides = None,
    category: o.OfCategory = None,
    sample: Annotated[
        int, Option("--sample", min=1, help="Documents that the model is asked about")
    ] = 32,
    output: Annotated[
        str | None, Option("--output", "-o", help="File for it; none: stdout")
    ] = None,
    force: Annotated[bool, Option("--force", help="Write over a file that is there")] = False,
) -> None:
    """Propose attributes that documents have, as YAML to edit for task.categories_file.

    Runs in this process.
    """
    from raypd.estimation import suggest

    refusal = f"{output}: is there already; give another name, or --force"
    if output is not None and not force and storage.exists(output):
        raise ConfigError(refusal)
    suggestion, about = suggest.suggest(data, category, sample, overrides or [])
    text = suggestion.as_yaml(about)
    if output is None:
        print(clean(text), end="")
        return
    with raised_as(ConfigError, f"{output}: cannot be written"):
        if force:
            storage.put(output, text.encode())
        elif not storage.put_new(output, text.encode()):
            raise ConfigError(refusal)


@_model_app.command("add-tokens")
def add_tokens(
    model: o.BaseModel, output: o.NewModel, method: o.ForMethods, seed: o.Seed = 0
) -> None:
    """Write a copy of a model that has the control tokens of a decoding method."""
    from raypd.models import prepare

    ids = prepare.add_tokens(model, output, method, seed)
    print(f"{output}: {model} with " + ", ".join(f"{token} ({id})" for token, id in ids.items()))
    print("Train it before you decode with it: it has not learnt to write them.")


@_model_app.command("add-heads")
def add_heads(
    model: o.BaseModel, output: o.NewHeads, heads: o.Heads = 2, layers: o.Layers = 2
) -> None:
    """Write untrained Medusa heads for a model: 2 heads of 2 layers, as APAR's (table 6), unless
    told otherwise.
    """
    from raypd.models import prepare

    heads_config = prepare.add_heads(model, output, heads, layers)
    shape = f"{heads_config.count} Medusa heads x {heads_config.layers} layers"
    print(
        f"{output}: {shape} for {model}, which draft a tree of {len(heads_config.tree.paths)} "
        "tokens"
    )
    print(
        "Train them before you decode with them: the text is right with any heads, and faster "
        "with trained ones."
    )


@_prices_app.command("refresh")
def prices_refresh(region: o.Regions = None) -> None:
    """Ask AWS for today's on-demand and spot prices (needs credentials) and keep them for the next
    runs.
    """
    from raypd.billing import prices_aws

    print(f"written: {prices_aws.refresh(region or prices_aws.SHIPPED_REGIONS)}")


@_prices_app.command("show")
def prices_show(instance_type: o.InstanceType = None, region: o.Region = "us-east-1") -> None:
    """Print the prices that a bill would be made with, and where each is from."""
    from raypd.billing import prices_aws

    prices_aws.show(region, instance_type)


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Ends the process at a user's error with its text, no traceback.

    Exit codes: 2 for the configuration, the input and the model; 1 for a run that could not go on;
    130 interrupted.
    """
    try:
        yield
        return
    except (KeyboardInterrupt, SystemExit) as end:  # typer ends with 130 at Ctrl-C, without a word
        if isinstance(end, SystemExit) and end.code != 130:
            raise
        message = "interrupted"
        code = 130
    except UserError as error:
        code = getattr(error, "exit_code", 1 if isinstance(error, RunError) else 2)
        message = str(error) if code == 130 else f"error: {error}"
    except OSError as error:  # of a disk: what went wrong, and with which file
        message = f"error: {error}"
        code = 1
    print(said(message), file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    # Not sys.exit: threads of Ray that are in the middle of something would hold the process or
    # print a traceback.
    os._exit(code)
