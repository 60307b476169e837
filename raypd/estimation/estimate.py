"""`raypd estimate`: what a corpus will take and cost, before it is run.

The speed of a document comes from one of three places: a sample that is decoded here, an earlier run (`earlier`), or
the user. `machines` has what the corpus takes at that speed.
"""

from __future__ import annotations

import math
import time
import zlib

import numpy as np

from raypd import storage
from raypd.billing import prices
from raypd.config import RunConfig
from raypd.errors import ConfigError, RunError
from raypd.estimation import earlier, estimator, hosted, profile, sampling
from raypd.estimation.checks import check_model, check_sample, with_changes
from raypd.estimation.estimator import Array
from raypd.estimation.machines import GIVEN, TOKENS, EstimateOptions, MethodSpeed, Overhead, assemble, gpu_kind
from raypd.estimation.profile import DocumentCost, Profile
from raypd.estimation.sampling import CorpusSample, ScannedDocument
from raypd.estimation.views import show_estimate
from raypd.run import layout, records
from raypd.run.console import Interrupted
from raypd.run.layout import output_folder
from raypd.run.records import Estimate, RecordError, RunRecord
from raypd.run.text import counted

# Of each stratum all that was scanned, and what was measured of it.
_Strata = list[tuple[list[ScannedDocument], list[tuple[ScannedDocument, DocumentCost]]]]
_FEW = 30  # documents: the note says that more would be better


def run(config: RunConfig | None, options: EstimateOptions, as_json: bool, verbose: bool) -> None:
    """Estimates, prints, and writes estimate.json into the run's folder.

    Args:
        config: the run to estimate; None where throughput, documents and instance types are all given.
        options: what to measure, and for which machines.
        as_json: print estimate.json in place of the tables.
        verbose: show what Ray's processes print.

    Raises:
        Interrupted: Ctrl-C while it measured.
        UserError: as `estimate`; RunError, too, where estimate.json cannot be written.
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
        print(f"next: `raypd report {path.rpartition('/')[0]}` shows it as a page, and after the run beside the bill")


def estimate(config: RunConfig | None, options: EstimateOptions, verbose: bool = False) -> Estimate:
    """Makes the estimate. The arguments are those of `run`.

    Raises:
        ConfigError, InputError, ModelError: before anything is measured.
        RunError: the sample cannot be decoded.
    """
    if config is not None:
        storage.configure(config.storage)
    if options.throughput:
        result = _given(config, options)
    elif config is None:
        raise ConfigError("give a configuration, or --throughput with --documents and --instance")
    elif options.run is not None:
        result = earlier.estimate_from(config, options)
    else:
        result = _measured(config, options, verbose)
    if config is not None:
        result.fingerprint, result.model, result.task = config.fingerprint(), config.model.name, config.task.kind
    return result


def _write(result: Estimate, config: RunConfig) -> str | None:
    """Puts the estimate into the run's folder, for its report; its path, or None where the folder is another run's."""
    output = output_folder(config)
    path = storage.join(output, layout.ESTIMATE)
    try:
        if records.read(RunRecord, storage.join(output, layout.RUN)).fingerprint != config.fingerprint():
            return None
    except FileNotFoundError:
        pass
    except RecordError:
        return None
    try:
        storage.make_folder(output)
        records.write(path, result)
    except OSError as error:
        raise RunError(f"output.path {output}: cannot be written: {error}") from None
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
            limit = ends - time.monotonic()
            plain = (
                profiler.profile(changed, documents, max(1.0, limit), "measure autoregressive") if limit >= 0 else None
            )
            if plain is not None and plain.documents_per_second:
                baseline = [speed_of(sample, plain, notes)]
            else:
                notes.append("there was no time to measure autoregressive decoding: raise --minutes")
    total = sample.scan.documents if options.documents is None else estimator.exact(options.documents)
    overhead = Overhead(
        profiler.startup_seconds + profiled.load_seconds + profiled.warmup_seconds,
        profiler.unpaid_seconds + profiler.closing_seconds,
    )
    result = assemble(config, options, total, [speed], baseline, overhead, notes + _notes(config, sample, profiled))
    result.sample = {
        "documents": len(documents),
        "strata": len(sample.strata),
        "seconds": round(profiled.seconds, 3),
        "warmup_seconds": round(profiled.warmup_seconds, 3),
        "load_seconds": round(profiled.load_seconds, 3),
        "machine": profiled.worker.machine,
        "complete": profiled.complete,
    }
    _compare_hosted(config, result, total, sample, profiled)
    return result


def _compare_hosted(config: RunConfig, result: Estimate, total: Array, sample: CorpusSample, profiled: Profile) -> None:
    """Adds to an estimate what hosted batch services would ask for the same documents."""
    tokens = hosted.counter(config)
    for cost in profiled.costs:
        if cost is not None and cost.error is None:
            hosted.count(config, cost, tokens)
    strata = _strata(sample, profiled)
    sent, written = (_corpus_mean(sample, strata, name) for name in ("hosted_input", "hosted_output"))
    result.hosted_tokens = {"input": estimator.figure(sent), "output": estimator.figure(written)}
    result.hosted = hosted.estimates(config.cost, total, sent, written)


def _strata(sample: CorpusSample, profiled: Profile) -> _Strata:
    """The strata of which something was done."""
    strata: _Strata = []
    for place, members in enumerate(sample.strata):
        measured = zip(sample.drawn, profiled.costs, strict=True)
        done = [(document, cost) for (number, document), cost in measured if number == place and cost is not None]
        if not done:
            continue
        if not strata or (len(strata[-1][1]) > 1 and (len(done) > 1 or len(members) == 1)):
            strata.append(([], []))  # else it joins the one before: one document tells nothing of the scatter
        strata[-1][0].extend(members)
        strata[-1][1].extend(done)
    return strata


def speed_of(sample: CorpusSample, profiled: Profile, notes: list[str]) -> MethodSpeed:
    """The speed over the corpus: strata by their shares, with the scatter of documents, shares and machine.

    For every method the bootstrap draws the same documents again, as these were measured on the same ones. notes: gets
    what the user has to know of documents that failed or were not done.
    """
    strata = _strata(sample, profiled)
    scanned = sum(map(len, sample.strata))
    if missing := scanned - sum(len(members) for members, _ in strata):
        notes.append(
            f"{profiled.method}: {missing / scanned:.0%} of the corpus is of a kind of which no document was done"
        )
    costs = [cost for _, done in strata for _, cost in done]
    failed = [cost for cost in costs if cost.error is not None]
    if failed:
        notes.append(
            f"{profiled.method}: {len(failed)} of {counted(len(costs), 'document')} failed, "
            f"the first: {failed[0].error}"
        )
    machine = np.random.default_rng([sampling.SEED, zlib.crc32(profiled.method.encode())])
    pace = estimator.ratio(
        [took for _, took in profiled.samples], [expected for expected, _ in profiled.samples], machine
    )
    return MethodSpeed(
        profiled.method,
        _corpus_mean(sample, strata, "seconds") * (pace / pace[0]),
        f"measured on {profiled.worker.machine}, {counted(len(costs), 'document')}, {profiled.seconds:.0f} s",
        profiled.worker.gpu,
        profiled.worker.machine,
        {name: _corpus_mean(sample, strata, name) for name in TOKENS},
    )


def _corpus_mean(sample: CorpusSample, strata: _Strata, name: str) -> Array:
    """The mean of a document of the corpus, those that cannot be read included (they take nothing)."""
    scan, rng = sample.scan, np.random.default_rng(sampling.SEED)
    populations = np.array([len(members) for members, _ in strata], float)
    mean = estimator.stratified(
        values=np.array([getattr(cost, name) for _, done in strata for _, cost in done]),
        lengths=np.array([float(document.length) for _, done in strata for document, _ in done]),
        strata=np.repeat(np.arange(len(strata)), [len(done) for _, done in strata]),
        populations=populations * scan.documents[0] / len(scan.seen),
        mean_lengths=np.array([np.mean([document.length for document in members]) for members, _ in strata]),
        rng=rng,
    )
    mean = mean * (1 - sample.unreadable / len(scan.seen))
    if scan.whole or mean[0] <= 0:
        return mean
    # The shares of the strata are estimates themselves, from units that differ.
    totals = np.zeros(len(scan.units))
    for members, done in strata:
        each = np.mean([getattr(cost, name) for _, cost in done])
        np.add.at(totals, [document.unit for document in members], each)
    shares = estimator.ratio(totals.tolist(), scan.counts, rng, scan.units_planned)
    return mean * (shares / shares[0])


def _notes(config: RunConfig, sample: CorpusSample, profiled: Profile) -> list[str]:
    scan, notes = sample.scan, []
    if config.model.is_fake:
        notes.append("model: fake. These figures are made up: no model read the documents")
    if not profiled.complete:
        notes.append("the time given ended before the sample was done: what is missing is not in the figures")
    if len(sample.documents) < _FEW:
        drawn = counted(len(sample.documents), "document")
        notes.append(f"the sample is small ({drawn}): raise --sample for a narrower interval")
    if not scan.whole:
        notes.append(
            f"shares of categories and lengths are from {len(scan.units)} of {counted(scan.units_planned, 'unit')}"
        )
    if sample.unreadable:
        scanned = counted(len(scan.seen), "document")
        notes.append(f"{sample.unreadable} of {scanned} cannot be read: error rows in the run")
    return notes


def _given(config: RunConfig | None, options: EstimateOptions) -> Estimate:
    """From throughputs that were given; the corpus is planned unless its size was given."""
    main = _speeds(options, "--throughput", config.decoding.method if config is not None else "given")
    baseline = _speeds(options, "--baseline-throughput", "autoregressive")
    if options.documents is not None:
        total = estimator.exact(options.documents)
    elif config is not None:
        total = sampling.scan(config).documents
    else:
        raise ConfigError("--throughput without a configuration: give --documents, too")
    return assemble(config, options, total, main, baseline, None, [])


def _speeds(options: EstimateOptions, option: str, method: str) -> list[MethodSpeed]:
    """The speeds that an option gives, `[GPU=]RATE` each; without a GPU, of the one of the instance types asked for."""
    gpus = {gpu_kind(i) for i in prices.INSTANCES.values() if i.gpu}
    speeds = []
    for text in (options.throughput if option == "--throughput" else options.baseline_throughput) or []:
        gpu, _, rate = text.rpartition("=")
        if gpu and gpu not in gpus:
            raise ConfigError(f"{option} {text}: no instance type has a {gpu}; choose from {', '.join(sorted(gpus))}")
        try:
            per_second = float(rate)
        except ValueError:
            per_second = 0.0
        if not 0 < per_second < float("inf"):
            raise ConfigError(f"{option} {text}: give documents per second of one GPU, as in {option} L40S=6.28")
        wanted_gpus = {gpu} if gpu else {prices.INSTANCES[name].gpu for name in options.instances or []}
        if len(wanted_gpus) != 1:
            raise ConfigError(
                f"which GPU does {option} hold for? Give --instance with types of one GPU, or {option} GPU=RATE with "
                f"one of {', '.join(sorted(gpus))}"
            )
        speeds.append(MethodSpeed(method, estimator.exact(1 / per_second), GIVEN, wanted_gpus.pop()))
    return speeds
