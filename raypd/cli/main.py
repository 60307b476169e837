"""The command line: thin commands, whose longer options are in `options`.

Modules that take long to import are imported within the commands that need them.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

import raypd
import raypd.cli.options as o
from raypd import storage
from raypd.cli.run import config_over, run_task
from raypd.config import LABELS_NEEDED, RunConfig, leaves_method_open, load_config, render
from raypd.errors import ConfigError, RunError, UserError, did_you_mean, raised_as
from raypd.run import layout, load
from raypd.text import clean, counted, said

if TYPE_CHECKING:
    from raypd.evaluation import Evaluation

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # The tables of rich cut off the names of options in a terminal with 80 columns.
    rich_markup_mode=None,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # Click's help stays within 80 columns of a wider terminal unless it is told otherwise.
        "max_content_width": 200,
    },
)
_config_app = typer.Typer(help="Look at configurations.", no_args_is_help=True)
app.add_typer(_config_app, name="config")
_model_app = typer.Typer(
    help="List models, and prepare one for a decoding method.", no_args_is_help=True
)
app.add_typer(_model_app, name="model")
_schema_app = typer.Typer(help="Find out which attributes documents have.", no_args_is_help=True)
app.add_typer(_schema_app, name="schema")
_prices_app = typer.Typer(help="Prices of machines per hour.", no_args_is_help=True)
app.add_typer(_prices_app, name="prices")


def _version(show: bool) -> None:
    if show:
        print(f"raypd {raypd.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version")
    ] = False,
) -> None:
    """Extract structured data from very large document collections."""


def _print_next(step: str) -> None:
    """Print the next step, with which a command ends.

    Args:
        step: What to do, with commands in backticks.
    """
    print(clean(f"Next: {step}"))


@app.command()
def quickstart(folder: o.QuickstartTo = "configs") -> None:
    """Write the quickstart example, its data and training configurations into a new folder."""
    if os.path.exists(folder):
        raise ConfigError(f"{folder} already exists; choose another folder")
    shutil.copytree(Path(__file__).parents[1] / "configs", folder)
    _name_paths(Path(folder), folder)
    config = os.path.join(folder, "quickstart", "extract.yaml")
    _print_next(f"`raypd extract {config}`")


def _name_paths(copied: Path, folder: str) -> None:
    """Make the commands in the comments of copied configurations name the copies.

    Args:
        copied: The folder of the copies.
        folder: The same as the user gave it.
    """

    def named(found: re.Match[str]) -> str:
        return shlex.quote(os.path.join(folder, found[1]))

    for path in [*copied.rglob("*.yaml"), *copied.rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        # The files of an installed package may be read-only.
        path.chmod(path.stat().st_mode | stat.S_IWUSR)
        path.write_text(re.sub(r"\bconfigs/([\w/.-]*\w)", named, text), encoding="utf-8")


@app.command()
def init(
    data: o.Sampled,
    schema: o.Schema = None,
    output: o.ConfigTo = None,
    target: o.Target = None,
    force: Annotated[bool, Option("--force", help="Overwrite an existing file")] = False,
) -> None:
    """Write a configuration for your own data.

    Looks at the columns of the first rows, and chooses a model. Example: raypd init tickets.jsonl
    --schema ticket.json --for laptop
    """
    import raypd.cli.init as init_command
    import raypd.cli.init_model as init_model

    if target is None and sys.stdin.isatty() and sys.stdout.isatty():
        question = f"Which model ({', '.join(init_model.TARGETS)})?"
        target = typer.prompt(question, default="laptop")
        if target not in init_model.TARGETS:
            raise typer.BadParameter(f"{target!r}: give one of {', '.join(init_model.TARGETS)}")
    choice = init_model.choose(target or "toy")
    print(clean(init_command.run(data, schema, output, choice, force)))


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

    Examples: raypd extract run.yaml; raypd extract data.jsonl --schema product.json. A second run
    with the same output.path resumes.
    """
    config = config_over(
        source,
        "extraction",
        overrides or [],
        method=method,
        model=model,
        output=output,
        schema=schema,
    )
    run_task(
        config,
        "extraction",
        retry_errors=retry_errors,
        all_errors=all_errors,
        verbose=verbose,
    )


@app.command()
def answer(
    source: o.Source,
    overrides: o.Overrides = None,
    questions: o.Questions = None,
    method: o.Method = None,
    model: o.Model = None,
    output: o.Output = None,
    retry_errors: o.RetryErrors = False,
    all_errors: o.AllErrors = False,
    verbose: o.Verbose = False,
) -> None:
    """Answer questions about every context.

    Examples: raypd answer questions.jsonl (columns context and questions; or a CSV with context,
    question and choices); raypd answer contexts.csv --questions questions.txt. A YAML can have
    further settings.
    """
    config = config_over(
        source,
        "question_answering",
        overrides or [],
        method=method,
        model=model,
        output=output,
        questions=questions,
    )
    run_task(
        config,
        "question_answering",
        retry_errors=retry_errors,
        all_errors=all_errors,
        verbose=verbose,
    )


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
    """Write an answer to every prompt.

    Example: raypd generate prompts.jsonl --method space. A YAML can have further settings.
    """
    config = config_over(
        source,
        "generation",
        overrides or [],
        method=method,
        model=model,
        output=output,
        openai=openai,
    )
    run_task(
        config,
        "generation",
        retry_errors=retry_errors,
        all_errors=all_errors,
        verbose=verbose,
    )


@app.command()
def nightly(
    config: Annotated[
        str, Argument(help="YAML of the nightly run; its output.path is the folder of all nights")
    ],
    overrides: o.Overrides = None,
    full: Annotated[bool, Option("--full", help="Extract every document again")] = False,
    retry_errors: Annotated[
        bool, Option("--retry-errors", help="Also retry documents that failed before")
    ] = False,
    verbose: o.Verbose = False,
) -> None:
    """Update a table to tonight's input.

    Extracts only what is new or changed since the last successful night. Run the same command again
    to resume an interrupted night. If two commands use one folder, the second ends with a message.
    """
    from raypd.nights import run_night

    night = run_night(
        load_config(config, overrides or []),
        full=full,
        retry_errors=retry_errors,
        verbose=verbose,
    )
    print(clean(night.describe()))
    if night.failed:
        _print_next(f"`raypd errors {night.root}` says why documents failed")
    else:
        _print_next(f"`raypd verify {night.root}` proves that the table holds all of the input")


@app.command()
def train(config: o.Config, overrides: o.Overrides = None, verbose: o.Verbose = False) -> None:
    """Fine-tune a model for its decoding method.

    Section `training` contains the settings. Run the same command again to resume an interrupted
    training from its latest checkpoint.
    """
    from raypd import training

    loaded = load_config(config, overrides or [], trains=True)
    result = training.train(loaded, verbose=verbose)
    print(clean(result.describe()))
    weights = f"{result.weights_key}={result.weights}"
    if result.weights_key == "decoding.options.heads":
        _print_next(f"`raypd generate PROMPTS {weights} --method medusa` decodes with the heads")
    else:
        _print_next(
            f"run labelled documents that were not used for training with {weights}, then `raypd "
            "evaluate RUN LABELS` says how many answers are right"
        )


@app.command()
def fit(config: o.Config, overrides: o.Overrides = None, verbose: o.Verbose = False) -> None:
    """Find the cheapest model that reaches an F1 on your documents.

    Labels a sample, trains candidates, scores and prices each, and writes the configuration to run.
    Section `fit` contains the settings. Run the same command again to resume.
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

    For an extraction, a page (evaluation.html in the run's folder) shows wrong values next to their
    labels.
    """
    from raypd import evaluation as scoring

    evaluation = scoring.evaluate(run, labels, against, tolerance, labels_column)
    if as_json:
        print(json.dumps(asdict(evaluation), indent=1))
        return
    print(clean(scoring.describe(evaluation)))
    try:
        written = scoring.write_page(run, labels, evaluation, labels_column, tolerance)
        if written is not None:
            path, replaced = written
            note = f" (in place of the page with the labels {replaced})" if replaced else ""
            print(clean(f"wrong values: {path}{note}"))
    except UserError as error:
        # The scores are valid without the page.
        print(clean(f"wrong values: no page: {error}"))
    _print_next(_after_evaluation(run, labels, evaluation, labels_column, tolerance))


def _after_evaluation(
    run: str, labels: str, evaluation: "Evaluation", labels_column: str, tolerance: float
) -> str:
    """Return what to do after an evaluation: only commands that work."""
    from raypd.dataset import unit_rows
    from raypd.evaluation import calibrate_command
    from raypd.report import fit_step, known_labels
    from raypd.run import NoRun, read_record

    report_step = f"`raypd report {run}` shows the run with its time and cost"
    if evaluation.calibration_error is None:
        return report_step
    labelled = max((measure.documents for measure in evaluation.measures), default=0)
    labelled += evaluation.trained
    # A document without an answer has nothing to review.
    failed = unit_rows.count_failed(run) - evaluation.failed
    unlabelled = max(0, evaluation.unlabelled - failed)
    better = fit_step(run, labels, labelled, unlabelled, labels_column)
    if labelled < LABELS_NEEDED:
        known = None
        # A folder that contains only units names no labels.
        with contextlib.suppress(NoRun):
            known = known_labels(run, read_record(run).config)
        if known is not None and known.are_enough:
            # These labels are too few for a fit, but others that the run knows are enough.
            return fit_step(run, known.path, known.documents, unlabelled, known.column)
        return f"{better}; or show the model three of the labels (task.examples)"
    steps = []
    command = calibrate_command(run, labels, evaluation.reliability, labels_column, tolerance)
    if command is not None:
        steps.append(f"`{command}` turns confidences into probabilities if that improves them")
    if not evaluation.trained:
        steps.append(better)
    return "; ".join(steps) or report_step


@app.command()
def calibrate(
    run: o.Run,
    labels: o.Labels,
    output: o.CalibrationTo = None,
    tolerance: o.Tolerance = 0.0,
    labels_column: o.LabelsColumn = "target",
) -> None:
    """Turn confidences into the probability that a value is right.

    Needs a run with model.calibration=none, and labels that its model has not seen. A calibration
    next to the weights applies to every run with them; set model.calibration to use another file.
    Writes nothing if the confidences are as good without a calibration.
    """
    from raypd.evaluation import calibrate_run

    words, step = calibrate_run(run, labels, output, labels_column, tolerance)
    print(clean(words))
    _print_next(step)


@app.command()
def verify(
    run: o.Run, overrides: o.Overrides = None, threads: o.Threads = 8, as_json: o.AsJson = False
) -> None:
    """Prove that a run lost and duplicated nothing.

    Reads its input again and compares; the exit code is 1 if something is wrong. If the input was
    moved, input.path=... names its new location. For a nightly folder, it compares the table of
    the last successful night.
    """
    from raypd.nights import table_check
    from raypd.verify import findings, verification

    config = load.load_run(run, overrides or [])
    if layout.is_nightly(run):
        result = table_check.verify_table(run, config, threads)
    else:
        result = verification.verify(run, config, threads)
    if as_json:
        print(json.dumps({"passed": result.passed, **asdict(result)}, indent=2))
    else:
        print(clean(findings.describe(result)))
        if result.passed:
            _print_next(f"`raypd report {run}` shows what the run did and cost")
    if not result.passed:
        raise typer.Exit(1)


@app.command()
def errors(
    run: o.Run,
    overrides: o.Overrides = None,
    as_json: o.AsJson = False,
    output: Annotated[
        str | None,
        Option("--output", "-o", help="Write all failures into a file: .csv, .jsonl or .parquet"),
    ] = None,
) -> None:
    """List the documents without an answer, grouped by reason, and the units that failed."""
    from raypd.verify import dead_letters, export, findings

    load.load_record(run, overrides or [])
    if output is not None:
        count = export.write_file(output, dead_letters.SCHEMA, dead_letters.letters(run))
        print(f"{output}: {counted(count, 'failure')}")
        _print_next(findings.after_errors(dead_letters.summarize(run)))
        return
    summary = dead_letters.summarize(run)
    if as_json:
        print(json.dumps(asdict(summary), indent=2))
    else:
        print(clean(findings.describe_errors(summary)))
        _print_next(findings.after_errors(summary))


@app.command()
def export(run: o.Run, file: o.ExportTo, overrides: o.Overrides = None) -> None:
    """Write a run's answers into one file, with a column for each attribute.

    Column row is where the document begins in its source: a byte offset in JSON Lines, CSV and
    WARC, otherwise the number of its row, from 0. Example: raypd export runs/products answers.csv
    """
    from raypd.dataset import plan, writer
    from raypd.verify import export as verify_export

    count = verify_export.export(run, file, overrides or [])
    print(f"{count:,} documents: {file}")
    planned = plan.stored(run)
    if planned is not None:
        committed = len(writer.committed(run))
        if committed < planned.units:
            print(
                f"incomplete: {committed} of {planned.units} units are committed",
                file=sys.stderr,
            )
            _print_next("repeat the command of the run to resume it, then export again")
            return
    _print_next(f"`raypd verify {run}` proves that no document is missing")


@app.command()
def compact(run: o.Run, overrides: o.Overrides = None) -> None:
    """Copy a run's rows into a few large table files, and delete the units.

    A large run does so at its end (output.target_file_mb). Other programs then read the table files
    that current/files.txt lists. raypd's own commands read them as well.
    """
    from raypd.dataset import compaction

    config = load.load_run(run, overrides or [])
    print(clean(compaction.compact_run(config, storage.absolute(run)).describe()))
    _print_next(f"`raypd verify {run}` proves that no document is missing")


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
        str | None, Option("--from", metavar="RUN", help="Use the figures of an earlier run")
    ] = None,
    throughput: o.Throughput = None,
    baseline_throughput: o.BaselineThroughput = None,
    model: o.PredictedModel = None,
    tokens: o.PredictedTokens = None,
    documents: Annotated[
        float | None, Option(min=1, help="Documents in the corpus; default: count them")
    ] = None,
    instance: Annotated[
        list[str] | None,
        Option("--instance", help="Show only this instance type; may be given more than once"),
    ] = None,
    nodes: Annotated[
        int | None,
        Option(
            min=1,
            help="Maximum number of nodes in the table of instance types with a GPU; default: 8",
        ),
    ] = None,
    head: Annotated[str, Option(help="Instance type of the head node, or none")] = "m7i.2xlarge",
    as_json: o.AsJson = False,
    verbose: o.Verbose = False,
) -> None:
    """Estimate the time and cost of a run.

    The speed is measured on a sample, taken from an earlier run, given, or predicted from the data
    sheet of a GPU.
    """
    from raypd.estimation import EstimateOptions, estimate as estimation

    loaded = None
    if config is not None:
        loaded = load_config(config, overrides or [])
    options = EstimateOptions(
        sample=sample,
        minutes=minutes,
        baseline=baseline,
        run=run,
        throughput=throughput,
        baseline_throughput=baseline_throughput,
        model=model,
        tokens=tokens,
        documents=documents,
        instances=instance,
        nodes=nodes,
        head=head,
    )
    estimation.run(loaded, options, as_json, verbose)


@app.command()
def tune(
    config: o.Config,
    overrides: o.Overrides = None,
    output: o.TunedTo = None,
    sample: o.Sample = 32,
    minutes: o.Minutes = None,
    budget_usd: Annotated[
        float | None, Option(help="Maximum cost of the measurement, at the price of one node")
    ] = None,
    agreement: Annotated[
        float, Option(help="Minimum share of values that must agree with the reference")
    ] = 0.9,
    judge: o.Judge = "low",
    reference: o.Reference = "auto",
    instance: Annotated[
        str | None,
        Option("--instance", help="Instance type whose price is used to compare settings"),
    ] = None,
    fresh: Annotated[bool, Option("--fresh", help="Discard earlier measurements")] = False,
    cascade: o.CascadeLabels = None,
    f1_floor: o.F1Floor = None,
    verbose: o.Verbose = False,
) -> None:
    """Find the cheapest settings.

    Measures a sample, and writes a configuration whose answers still agree.

    With --cascade LABELS: finds the threshold below which the second model (cascade.model) must be
    asked to reach a minimum F1.
    """
    import raypd.cli.tune as tune_command

    options = tune_command.TuneOptions(
        sample=sample,
        minutes=minutes,
        budget_usd=budget_usd,
        agreement=agreement,
        judge=judge,
        reference=reference,
        instance=instance,
        fresh=fresh,
    )
    if cascade is not None:
        tune_command.run_cascade(
            config, overrides or [], output, options, cascade, f1_floor, verbose=verbose
        )
    else:
        tune_command.run(config, overrides or [], output, options, verbose=verbose)


@app.command()
def report(
    run: o.Run, overrides: o.Overrides = None, output: o.PageTo = None, texts: o.Texts = False
) -> None:
    """Write a page about what a run did and cost.

    One HTML file that loads nothing, for any browser, phone or printer.
    """
    from raypd.report import data, page

    run_data = data.load(storage.absolute(run), overrides or [])
    if texts:
        from raypd.report import texts as report_texts

        report_texts.add(run_data, overrides or [])
    target = None
    if output is not None:
        target = storage.absolute(output)
    print(page.write(run_data, target))
    next_step = ""
    if run_data.check is not None:
        next_step = run_data.check.next_step
    _print_next(next_step or "open the page in a browser")


@app.command()
def review(
    run: o.Run,
    overrides: o.Overrides = None,
    documents: Annotated[
        int | None,
        Option(
            "--documents",
            min=1,
            help="Documents to review, half of them at random, half the least certain; default: as "
            "many as `raypd fit` needs",
        ),
    ] = None,
    apply: Annotated[
        str | None, Option("--apply", metavar="FILE", help="CSV with the corrected values")
    ] = None,
    output: Annotated[
        str | None,
        Option("--output", "-o", help="File of the labels; default: in the run's folder"),
    ] = None,
) -> None:
    """Review random documents and the least certain ones, correct them, and turn them into labels.

    Writes a page with a box for each value, and the same as CSV. --apply FILE turns the corrected
    values into labels for `raypd evaluate`, `raypd calibrate`, `raypd fit` (fit.labels) and `raypd
    train` (input.path).
    """
    from raypd.report import review as reviews

    root = storage.absolute(run)
    if apply is None:
        page, table, left_out = reviews.write(root, documents or LABELS_NEEDED, overrides or [])
        print(clean(f"page:  {page}\ntable: {table}"))
        if left_out:
            print(f"left out: {counted(left_out, 'document')} with labels in the run's folder")
        _print_next(f"correct the values in either file, then `raypd review {run} --apply FILE`")
        return
    labels, count, new, changed = reviews.apply(root, apply, output, overrides or [])
    print(clean(f"labels: {labels} ({counted(count, 'document')}, {new:,} of them from {apply})"))
    print(
        f"{counted(changed, 'value')} changed. The labels hold the corrections; the answers of the "
        "run stay as they are"
    )
    if count < LABELS_NEEDED:
        print(
            f"`raypd fit` needs about {LABELS_NEEDED} labelled documents: label "
            f"{LABELS_NEEDED - count} more"
        )
    _print_next(f"`raypd evaluate {run} {labels}`")


@app.command()
def status(
    run: o.Run,
    overrides: o.Overrides = None,
    watch: o.Watch = False,
    every: o.Every = 5.0,
    as_json: o.AsJson = False,
) -> None:
    """Show the status of a run: progress, speed, cost, workers, errors.

    Reads only the run's folder, so it works on any machine.
    """
    from raypd.report import Watch, terminal

    interval = None
    if watch:
        interval = every
    terminal.show(Watch(storage.absolute(run), overrides or []), interval=interval, as_json=as_json)


@_config_app.command()
def show(config: o.Shown = None, overrides: o.Overrides = None) -> None:
    """Print the whole configuration, one section or one key, with defaults and explanations."""
    width = shutil.get_terminal_size().columns
    if config is None:
        print(render.render(width=width), end="")
    elif config in RunConfig.model_fields and not os.path.isfile(config):
        sections = []
        for section in render.render(width=width).split("\n\n"):
            if re.match(rf"(# )?{config}:", section):
                sections.append(section)
        print("\n\n".join(sections).rstrip())
    elif config in render.known_keys() and not os.path.isfile(config):
        print(render.render_key(config, width), end="")
    elif "=" in config and not os.path.exists(config):
        raise typer.BadParameter(f"{config!r}: give the configuration first, then key=value")
    elif not config.endswith((".yaml", ".yml")) and not os.path.exists(config):
        raise ConfigError(_no_such_key(config))
    else:
        loaded = load_config(config, overrides or [])
        remarks = {}
        if leaves_method_open(config, overrides or []):
            remarks["decoding.method"] = f"auto (here: {loaded.decoding.method})"
        print(render.render(loaded, width, remarks), end="")


def _no_such_key(name: str) -> str:
    """Say that a name is no configuration, section or key, and which key was probably meant."""
    keys = render.known_keys()
    hint = did_you_mean(name, keys)
    for key in keys:
        if key.endswith(f".{name}"):
            hint = f"did you mean {key!r}?"
            break
    problem = f"{name}: no such configuration file, section or key"
    return "; ".join(filter(None, [problem, hint or "`raypd config show` lists all keys"]))


@_schema_app.command("suggest")
def schema_suggest(
    data: Annotated[str, Argument(help="The data: a file, a folder or a glob")],
    overrides: o.Overrides = None,
    category: o.OfCategory = None,
    sample: Annotated[int, Option("--sample", min=1, help="Documents to ask the model about")] = 32,
    output: Annotated[
        str | None, Option("--output", "-o", help="File to write; default: stdout")
    ] = None,
    force: Annotated[bool, Option("--force", help="Overwrite an existing file")] = False,
) -> None:
    """Propose attributes that documents have, as YAML to edit for task.categories_file.

    The model runs in this process.
    """
    from raypd.estimation import suggest

    refusal = f"{output} already exists; choose another file, or give --force"
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
    print(clean(f"attributes: {output}"))
    _print_next(
        f"edit {output}, then `raypd extract CONFIG task.categories_file={output}` extracts them"
    )


@_model_app.command("list")
def list_models() -> None:
    """Print the families of models, which of them have fast layers, and which can be trained."""
    from raypd.models import families_table

    print(families_table())
    _print_next("`raypd estimate CONFIG model.name=NAME` measures how fast a model is here")


@_model_app.command("add-tokens")
def add_tokens(
    model: o.BaseModel, output: o.NewModel, method: o.ForMethods, seed: o.Seed = 0
) -> None:
    """Write a copy of a model that has the control tokens of a decoding method."""
    from raypd.models import prepare

    ids = prepare.add_tokens(model, output, method, seed)
    tokens = ", ".join(f"{token} ({id})" for token, id in ids.items())
    print(f"{output}: {model} with {tokens}")
    print("The model has not learned to write these tokens yet.")
    _print_next(f"`raypd train CONFIG model.name={output}` trains it for the method")


@_model_app.command("add-heads")
def add_heads(
    model: o.BaseModel, output: o.NewHeads, heads: o.Heads = 2, layers: o.Layers = 2
) -> None:
    """Write untrained Medusa heads for a model; the defaults are those of APAR (table 6)."""
    from raypd.models import prepare

    heads_config = prepare.add_heads(model, output, heads, layers)
    shape = f"{heads_config.count} Medusa heads x {heads_config.layers} layers"
    drafts = len(heads_config.tree.paths)
    print(f"{output}: {shape} for {model}, which draft a tree of {drafts} tokens")
    print(
        "The heads are not trained yet. The text is right with any heads; trained heads make "
        "decoding faster."
    )
    _print_next(f"`raypd train CONFIG decoding.options.heads={output}` trains them")


@_prices_app.command("refresh")
def prices_refresh(region: o.Regions = None) -> None:
    """Fetch today's on-demand and spot prices from AWS (needs credentials) for the next runs."""
    from raypd.billing import prices_aws

    print(f"written: {prices_aws.refresh(region or prices_aws.SHIPPED_REGIONS)}")
    _print_next("`raypd prices show` prints them")


@_prices_app.command("show")
def prices_show(instance_type: o.InstanceType = None, region: o.Region = "us-east-1") -> None:
    """Print the prices that a bill would use, and their sources."""
    from raypd.billing import prices_aws

    prices_aws.show(region, instance_type)
    _print_next("`raypd estimate CONFIG` says what a run costs at these prices")


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """End the process at a user's error with its message, without a traceback.

    Exit codes: 2 for the configuration, the input and the model; 1 for a run that could not
    continue; 130 if it was interrupted.
    """
    try:
        yield
        return
    except (KeyboardInterrupt, SystemExit) as error:
        # At Ctrl-C, typer exits with 130 and without a message.
        if isinstance(error, SystemExit) and error.code != 130:
            raise
        code = 130
        message = "interrupted"
    except UserError as error:
        code = _exit_code(error)
        message = f"error: {error}"
        if code == 130:
            message = str(error)
    except OSError as error:
        # The error of a disk names the file.
        code = 1
        message = f"error: {error}"
    print(said(message), file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    # sys.exit would wait for threads of Ray that are busy, and let them print tracebacks.
    os._exit(code)


def _exit_code(error: UserError) -> int:
    default = 2
    if isinstance(error, RunError):
        default = 1
    code: int = getattr(error, "exit_code", default)
    return code
