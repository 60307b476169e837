"""`raypd estimate`: what a corpus will take and cost, before it is run, from a sample, an earlier
run or the user.
"""

import contextlib
import math
import time
import zlib
from collections.abc import Sequence

import numpy as np

from raypd import storage
from raypd.answering.check import check_model
from raypd.billing import prices
from raypd.config import RunConfig
from raypd.config.load import with_changes
from raypd.errors import ConfigError, RunError, raised_as
from raypd.estimation import bootstrap, earlier, hosted, prediction, profile, sampling
from raypd.estimation.bootstrap import Array
from raypd.estimation.machines import (
    GIVEN,
    TOKENS,
    EstimateOptions,
    MethodSpeed,
    Overhead,
    assemble,
)
from raypd.estimation.profile import DocumentCost, Profile, check_sample
from raypd.estimation.records import Estimate
from raypd.estimation.sampling import CorpusSample
from raypd.estimation.views import show_estimate
from raypd.run import layout, records
from raypd.run.console import Interrupted
from raypd.run.layout import output_folder
from raypd.run.left_out import describe
from raypd.run.manifest import RunRecord
from raypd.run.records import RecordError
from raypd.text import counted

_BASELINE_SECONDS = 60.0  # where --minutes says no other
_FEW = 30  # documents: the note says that more would be better
_MILLION = 1e6  # documents of a prediction without a corpus
_PREDICTED = (
    "predicted from data sheets, measured by nobody (Qwen3-8B on an L40S: 31 documents/s "
    "by it, 6.28 of others in the "
    "HPD paper: docs/estimate.md says why). Choose a card by it, then measure"
)


def run(config: RunConfig | None, options: EstimateOptions, as_json: bool, verbose: bool) -> None:
    """Estimates, prints (as_json: estimate.json in place of tables), and writes estimate.json into
    the run's folder. Raises Interrupted at Ctrl-C, what `estimate` raises, and RunError where
    estimate.json cannot be written.
    """
    try:
        result = estimate(config, options, verbose)
    except KeyboardInterrupt:
        raise Interrupted("interrupted: nothing was written") from None
    path = _write(result, config) if config is not None else None
    if as_json:
        print(records.encoded(result).decode(), end="")
        return
    show_estimate(result)
    if path is not None:
        print(f"estimate: {path}")
        print(
            f"next: `raypd report {path.rpartition('/')[0]}` shows it as a page, and after the "
            "run beside the bill"
        )


def estimate(config: RunConfig | None, options: EstimateOptions, verbose: bool = False) -> Estimate:
    """Raises ConfigError, InputError, ModelError, RunError. config: None where speed, documents and
    types are given.
    """
    if config is not None:
        storage.configure(config.storage)
    if options.throughput or options.model:
        result = _given(config, options)
    elif config is None:
        raise ConfigError(
            "give a configuration, --model, or --throughput with --documents and --instance"
        )
    elif options.run is not None:
        result = earlier.estimate_from(config, options)
    else:
        result = _measured(config, options, verbose)
    if config is not None:
        result.fingerprint = config.fingerprint()
        result.model = config.model.name
        result.task = config.task.kind
    return result


def _write(result: Estimate, config: RunConfig) -> str | None:
    """Puts it into the run's folder, for its report; its path, or None where the folder is another
    run's.
    """
    output = output_folder(config)
    path = storage.join(output, layout.ESTIMATE)
    try:
        with contextlib.suppress(FileNotFoundError):
            if (
                records.read(RunRecord, storage.join(output, layout.RUN)).fingerprint
                != config.fingerprint()
            ):
                return None
    except RecordError:
        return None
    with raised_as(RunError, f"output.path {output}: cannot be written"):
        storage.make_folder(output)
        records.write(path, result)
    return path


def _measured(config: RunConfig, options: EstimateOptions, verbose: bool) -> Estimate:
    check_model(config)
    sample = sampling.draw(config, options.sample)
    documents = sample.documents
    ends = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    notes: list[str] = []
    with profile.RemoteProfiler(config, verbose) as profiler:
        limit = max(1.0, ends - time.monotonic())
        profiled = profiler.profile(config, documents, limit, f"measure {config.decoding.method}")
        check_sample(profiled)
        speed = speed_of(sample, profiled, notes)
        baseline: list[MethodSpeed] = []
        if options.baseline and config.decoding.method != "autoregressive":
            changed = with_changes(config, {"decoding.method": "autoregressive"})
            if options.minutes is None:
                limit = _BASELINE_SECONDS
            else:
                limit = max(1.0, ends - time.monotonic())
            plain = profiler.profile(changed, documents, limit, "measure autoregressive", slow=True)
            if plain.documents_per_second:
                baseline = [speed_of(sample, plain, notes)]
                limit = changed.decoding.max_new_tokens
                if cut := sum(
                    cost is not None and cost.decode_tokens >= limit for cost in plain.costs
                ):
                    note = (
                        f"autoregressive: {cut} of {counted(len(plain.costs), 'answer')} did "
                        "not end before"
                    )
                    notes.append(
                        f"{note} decoding.max_new_tokens={limit}: with weights trained to end "
                        "it costs less"
                    )
            else:
                notes.append(
                    "there was no time to measure autoregressive decoding: raise --minutes"
                )
    if options.documents is None:
        total = sample.scan.documents
    else:
        total = bootstrap.exact(options.documents)
    overhead = Overhead(
        profiler.startup_seconds + profiled.load_seconds + profiled.warmup_seconds,
        profiler.unpaid_seconds + profiler.closing_seconds,
    )
    result = assemble(
        config,
        options,
        total,
        [speed],
        baseline,
        overhead,
        notes + _notes(config, sample, profiled),
    )
    times = {
        name: round(getattr(profiled, name), 3)
        for name in ("seconds", "warmup_seconds", "load_seconds")
    }
    complete = {"machine": profiled.worker.machine, "complete": profiled.complete}
    result.sample = {"documents": len(documents), **times, **complete}
    done = _done(sample, profiled)
    tokens = hosted.counter(config)
    if server := float(_corpus_mean(sample, done, [cost.server_usd for _, cost in done])[0]):
        earlier.add_server(result, server)
    counts = [hosted.count(config, cost, tokens) for _, cost in done]
    sent, written = (_corpus_mean(sample, done, values) for values in zip(*counts, strict=True))
    result.hosted_tokens = {"input": bootstrap.figure(sent), "output": bootstrap.figure(written)}
    result.hosted = hosted.estimates(config.cost, total, sent, written)
    return result


# Of what was done: the place in the sample's order, and what it took.
_Done = list[tuple[int, DocumentCost]]


def _done(sample: CorpusSample, profiled: Profile) -> _Done:
    measured = zip(sample.places, profiled.costs, strict=True)
    return sorted(
        ((place, cost) for place, cost in measured if cost is not None), key=lambda item: item[0]
    )


def speed_of(sample: CorpusSample, profiled: Profile, notes: list[str]) -> MethodSpeed:
    """The speed over the corpus, with the scatter of documents, units and machine. notes: gets
    words on failed ones. The bootstrap draws the same documents for every method, as these were
    measured on the same ones.
    """
    done = _done(sample, profiled)
    if errors := [cost.error for _, cost in done if cost.error is not None]:
        failed = f"{len(errors)} of {counted(len(done), 'document')} failed"
        notes.append(f"{profiled.method}: {failed}, the first: {errors[0]}")
    if not profiled.complete:
        notes.append(
            f"{profiled.method}: the time ended before the sample was done: a guess; raise "
            "--minutes"
        )
    machine = np.random.default_rng([sampling.SEED, zlib.crc32(profiled.method.encode())])
    worker = profiled.worker
    expected, took = zip(*profiled.samples, strict=True)
    pace = bootstrap.ratio(took, expected, machine)
    source = (
        f"measured on {worker.machine}, {counted(len(done), 'document')}, {profiled.seconds:.0f} s"
    )
    names = ("seconds", *TOKENS)
    seconds, *tokens = (
        _corpus_mean(sample, done, [getattr(cost, name) for _, cost in done]) for name in names
    )
    fed = dict(zip(TOKENS, tokens, strict=True))
    return MethodSpeed(
        profiled.method, seconds * (pace / pace[0]), source, worker.gpu, worker.machine, fed
    )


def _corpus_mean(sample: CorpusSample, done: _Done, values: Sequence[float]) -> Array:
    """The mean of a document of the corpus, those that cannot be read included (they take
    nothing).
    """
    scan = sample.scan
    rng = np.random.default_rng(sampling.SEED)
    places = [place for place, _ in done]
    amounts = np.array(values, float)
    lengths = np.array([document.length for document in sample.readable], float)
    readable = len(lengths) / len(scan.scanned)
    mean = readable * bootstrap.mean(
        amounts, lengths[places], float(lengths.mean()), readable * scan.documents[0], rng
    )
    if scan.whole or mean[0] <= 0:
        return mean
    # Units differ in what they hold, and some of them were read: each of their documents is as
    # those drawn beside it.
    units = [document.unit for document in sample.readable]
    each = np.interp(np.arange(len(lengths)), places, amounts)
    totals = np.bincount(units, each, len(scan.units))
    by_unit = bootstrap.ratio(totals.tolist(), scan.counts, rng, scan.units_planned)
    return mean * (by_unit / by_unit[0])


def _notes(config: RunConfig, sample: CorpusSample, profiled: Profile) -> list[str]:
    scan = sample.scan
    notes = []
    if scan.left_out:
        notes.append(describe(scan.left_out))
    if config.model.is_fake:
        notes.append("model: fake. These figures are made up: no model read the documents")
    if len(sample.documents) < _FEW:
        drawn = counted(len(sample.documents), "document")
        notes.append(f"the sample is small ({drawn}): raise --sample for a narrower interval")
    if not scan.whole:
        planned = counted(scan.units_planned, "unit")
        notes.append(f"shares of categories and lengths are from {len(scan.units)} of {planned}")
    if sample.unreadable:
        scanned = counted(len(scan.scanned), "document")
        notes.append(f"{sample.unreadable} of {scanned} cannot be read: error rows in the run")
    return notes


def _given(config: RunConfig | None, options: EstimateOptions) -> Estimate:
    """The corpus is planned unless its size was given."""
    notes: list[str] = []
    if options.model is not None:
        main, baseline = prediction.speeds(
            options.model, options.tokens, options.instances or prices.INSTANCES
        )
        notes.append(_PREDICTED)
    else:
        main = _speeds(
            options, "--throughput", config.decoding.method if config is not None else "given"
        )
        baseline = _speeds(options, "--baseline-throughput", "autoregressive")
    if options.documents is not None:
        total = bootstrap.exact(options.documents)
    elif config is not None:
        corpus = sampling.scan(config)
        total = corpus.documents
        if corpus.left_out:
            notes.append(describe(corpus.left_out))
    elif options.model is not None:
        total = bootstrap.exact(_MILLION)
        notes.append("of a million documents; --documents says how many there are")
    else:
        raise ConfigError("--throughput without a configuration: give --documents, too")
    return assemble(config, options, total, main, baseline, None, notes)


def _speeds(options: EstimateOptions, option: str, method: str) -> list[MethodSpeed]:
    """The speeds that an option gives, `[GPU=]RATE` each; without a GPU, of the one of the instance
    types asked for.
    """
    gpus = {instance.gpu for instance in prices.INSTANCES.values() if instance.gpu}
    speeds = []
    for text in (
        options.throughput if option == "--throughput" else options.baseline_throughput
    ) or []:
        gpu, _, rate = text.rpartition("=")
        if gpu and gpu not in gpus:
            raise ConfigError(
                f"{option} {text}: no instance type has a {gpu}; choose from "
                f"{', '.join(sorted(gpus))}"
            )
        try:
            per_second = float(rate)
        except ValueError:
            per_second = 0.0
        if not 0 < per_second < float("inf"):
            raise ConfigError(
                f"{option} {text}: give documents per second of one GPU, as in {option} L40S=6.28"
            )
        if gpu:
            of_types = {gpu}
        else:
            of_types = {prices.INSTANCES[name].gpu for name in options.instances or []}
        if len(of_types) != 1:
            advice = f"or {option} GPU=RATE with one of {', '.join(sorted(gpus))}"
            raise ConfigError(
                f"which GPU does {option} hold for? Give --instance with types of one GPU, {advice}"
            )
        speeds.append(MethodSpeed(method, bootstrap.exact(1 / per_second), GIVEN, of_types.pop()))
    return speeds
