"""`raypd estimate`: predict the time and cost of a run before it starts.

The speed is measured on a sample, taken from an earlier run, or given by the user.
"""

import math
import time
import zlib
from collections.abc import Sequence
from operator import itemgetter

import numpy as np

import raypd.estimation.bootstrap as bootstrap
import raypd.estimation.earlier as earlier
import raypd.estimation.hosted as hosted
import raypd.estimation.prediction as prediction
import raypd.estimation.profile as profile
import raypd.estimation.sampling as sampling
import raypd.estimation.workload as workload
from raypd import storage
from raypd.answering import check_model
from raypd.billing import prices
from raypd.config import RunConfig, with_changes
from raypd.errors import ConfigError, RunError, raised_as
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
from raypd.estimation.roofline import DocumentTokens
from raypd.estimation.sampling import CorpusSample
from raypd.estimation.views import show_estimate
from raypd.run import Interrupted, RecordError, RunRecord, layout, left_out, output_folder, records
from raypd.tasks import untrained
from raypd.text import counted

# Seconds to measure autoregressive decoding, unless --minutes is given.
_BASELINE_SECONDS = 60.0
# A note recommends a larger sample below this many documents.
_SMALL_SAMPLE = 30
# The number of documents in a prediction without a corpus.
_MILLION = 1e6
_PREDICTED = (
    "predicted from data sheets, not measured (for Qwen3-8B on an L40S the prediction is 31 "
    "documents/s, and the HPD paper measured 6.28; docs/estimate.md says why). Choose a GPU by "
    "it, then measure"
)
_NEEDS_TRAINING = (
    "hyper_parallel needs a model that was trained for it (`raypd fit`). Without training, "
    "decoding.method auto runs guided, which is slower and is not predicted"
)
# The fingerprint of an estimate for another model; no configuration has this fingerprint.
_OTHER_MODEL = ""


def run(config: RunConfig | None, options: EstimateOptions, as_json: bool, verbose: bool) -> None:
    """Estimate, print the result, and write estimate.json into the run's folder.

    Args:
        config: The configuration; None if the speed is given or predicted.
        options: The options of the command.
        as_json: Whether to print estimate.json instead of tables.
        verbose: Whether to show the messages of Ray and the worker.

    Raises:
        Interrupted: At Ctrl-C.
        RunError: If estimate.json cannot be written.
        UserError: As raised by `estimate`.
    """
    try:
        result = estimate(config, options, verbose)
    except KeyboardInterrupt:
        raise Interrupted("interrupted: nothing was written") from None
    path = None
    if config is not None:
        path = _write(result, config)
    if as_json:
        print(records.encoded(result).decode(), end="")
        return
    show_estimate(result)
    if config is not None and path is None:
        output = output_folder(config)
        print(
            f"estimate: not saved, because {output} has the run or the estimate of another "
            "configuration or model. The figures above are not affected. To save this estimate, "
            "give another output.path"
        )
    if path is not None:
        folder = path.rpartition("/")[0]
        print(f"estimate: {path}")
        next_step = f"Next: `raypd report {folder}` shows it as a page"
        if result.fingerprint != _OTHER_MODEL:
            next_step += ", and after the run next to the bill"
        print(next_step)


def estimate(config: RunConfig | None, options: EstimateOptions, verbose: bool = False) -> Estimate:
    """Estimate the time and cost of a corpus.

    Args:
        config: The configuration; None if the speed, the documents and the instance types are
            given.
        options: The options of `raypd estimate`.
        verbose: Whether to show the messages of Ray and the worker.

    Raises:
        ConfigError, InputError, ModelError: If the configuration, the input or the model is at
            fault.
        RunError: If nothing could be measured.
    """
    if config is not None:
        storage.configure(config.storage)
    if options.throughput or options.model:
        result = _with_given_speed(config, options)
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
        if options.model not in (None, config.model.name):
            result.fingerprint = _OTHER_MODEL
    if options.model is not None:
        result.model = options.model
    return result


def _write(result: Estimate, config: RunConfig) -> str | None:
    """Write estimate.json into the run's folder, for its report.

    Returns:
        Its path, or None if the folder belongs to a run with another configuration, or if the
        result is for a model other than the configuration's, for which there is an estimate.
    """
    output = output_folder(config)
    path = storage.join(output, layout.ESTIMATE)
    try:
        run_record = records.read(RunRecord, storage.join(output, layout.RUN))
        if run_record.fingerprint != result.fingerprint:
            return None
    except FileNotFoundError:
        pass
    except RecordError:
        return None
    if result.fingerprint == _OTHER_MODEL and _has_own_estimate(path, config):
        return None
    with raised_as(RunError, f"output.path {output}: cannot be written"):
        storage.make_folder(output)
        records.write(path, result)
    return path


def _has_own_estimate(path: str, config: RunConfig) -> bool:
    """Return whether there is an estimate for a configuration with its own model."""
    try:
        return records.read(Estimate, path).fingerprint == config.fingerprint()
    except (FileNotFoundError, RecordError):
        return False


def _measured(config: RunConfig, options: EstimateOptions, verbose: bool) -> Estimate:
    """Decode a sample, and estimate the corpus from its speed."""
    check_model(config)
    sample = sampling.draw(config, options.sample)
    deadline = math.inf
    if options.minutes is not None:
        deadline = time.monotonic() + 60 * options.minutes
    notes: list[str] = []
    baseline: list[MethodSpeed] = []
    with profile.RemoteProfiler(config, verbose) as profiler:
        limit = max(1.0, deadline - time.monotonic())
        label = f"measure {config.decoding.method}"
        profiled = profiler.profile(config, sample.documents, limit, label)
        check_sample(profiled, options.sample_option, options.minutes_option)
        speed = speed_of(sample, profiled, notes)
        if options.baseline and config.decoding.method != "autoregressive":
            limit = _BASELINE_SECONDS
            if options.minutes is not None:
                limit = max(1.0, deadline - time.monotonic())
            baseline = _measured_baseline(config, sample, profiler, limit, notes)
    if options.documents is None:
        documents = sample.scan.documents
    else:
        documents = bootstrap.exact(options.documents)
    overhead = Overhead(
        startup=profiler.startup_seconds + profiled.load_seconds + profiled.warmup_seconds,
        unpaid=profiler.unpaid_seconds + profiler.closing_seconds,
    )
    notes += _notes(config, sample, profiled)
    result = assemble(config, options, documents, [speed], baseline, overhead, notes)
    result.sample = {
        "documents": len(sample.documents),
        "seconds": round(profiled.seconds, 3),
        "warmup_seconds": round(profiled.warmup_seconds, 3),
        "load_seconds": round(profiled.load_seconds, 3),
        "machine": profiled.worker.machine,
        "complete": profiled.complete,
    }
    _add_services(result, config, sample, profiled, documents)
    return result


def _measured_baseline(
    config: RunConfig,
    sample: CorpusSample,
    profiler: profile.RemoteProfiler,
    limit: float,
    notes: list[str],
) -> list[MethodSpeed]:
    """Measure autoregressive decoding on the same sample; empty if there was no time for it.

    Args:
        config: The configuration of the run.
        sample: The sample.
        profiler: The worker to measure on.
        limit: Seconds that the measurement may take.
        notes: Gets notes about the measurement.
    """
    changed = with_changes(config, {"decoding.method": "autoregressive"})
    profiled = profiler.profile(
        changed, sample.documents, limit, "measure autoregressive", slow=True
    )
    if not profiled.documents_per_second:
        notes.append("there was no time to measure autoregressive decoding: raise --minutes")
        return []
    speed = speed_of(sample, profiled, notes)
    max_new_tokens = changed.decoding.max_new_tokens
    cut = 0
    for cost in profiled.costs:
        if cost is not None and cost.decode_tokens >= max_new_tokens:
            cut += 1
    if cut:
        notes.append(
            f"autoregressive: {cut} of {counted(len(profiled.costs), 'answer')} did not end "
            f"before decoding.max_new_tokens={max_new_tokens}: with weights trained to end "
            "their answers it costs less"
        )
    return [speed]


def _add_services(
    result: Estimate,
    config: RunConfig,
    sample: CorpusSample,
    profiled: Profile,
    documents: Array,
) -> None:
    """Add the prices of an endpoint's server and of hosted batch services."""
    measured = _measured_costs(sample, profiled)
    server_usd = _corpus_mean(sample, measured, [cost.server_usd for _, cost in measured])
    if server_usd[0]:
        earlier.add_server(result, float(server_usd[0]))
    count_tokens = hosted.counter(config)
    counts = [hosted.count(config, cost, count_tokens) for _, cost in measured]
    sent = _corpus_mean(sample, measured, [input_tokens for input_tokens, _ in counts])
    written = _corpus_mean(sample, measured, [output_tokens for _, output_tokens in counts])
    result.hosted_tokens = {"input": bootstrap.figure(sent), "output": bootstrap.figure(written)}
    result.hosted = hosted.estimates(config.cost, documents, sent, written)


# (index in CorpusSample.readable, cost) of the documents that were answered, by index.
_MeasuredCosts = list[tuple[int, DocumentCost]]


def _measured_costs(sample: CorpusSample, profiled: Profile) -> _MeasuredCosts:
    """Return the costs of the answered documents, in the order of the corpus."""
    measured = []
    for index, cost in zip(sample.readable_indices, profiled.costs, strict=True):
        if cost is not None:
            measured.append((index, cost))
    return sorted(measured, key=itemgetter(0))


def speed_of(sample: CorpusSample, profiled: Profile, notes: list[str]) -> MethodSpeed:
    """Compute the speed over the corpus, with the variation of documents, units and the machine.

    The bootstrap draws the same documents for every method, because all methods were measured on
    the same documents.

    Args:
        sample: The sample that was measured.
        profiled: The measurement.
        notes: Gets notes on failed documents and on a measurement that was cut short.
    """
    measured = _measured_costs(sample, profiled)
    errors = [cost.error for _, cost in measured if cost.error is not None]
    if errors:
        failed = f"{len(errors)} of {counted(len(measured), 'document')} failed"
        notes.append(f"{profiled.method}: {failed}, the first: {errors[0]}")
    if not profiled.complete:
        notes.append(
            f"{profiled.method}: the time was up before the sample was done, so this is a guess; "
            "raise --minutes"
        )
    machine_rng = np.random.default_rng([sampling.SEED, zlib.crc32(profiled.method.encode())])
    expected = [expected_seconds for expected_seconds, _ in profiled.samples]
    actual = [actual_seconds for _, actual_seconds in profiled.samples]
    pace = bootstrap.ratio(actual, expected, machine_rng)
    seconds = _corpus_mean(sample, measured, [cost.seconds for _, cost in measured])
    seconds = seconds * (pace / pace[0])
    if not profiled.complete:
        # A document that was not answered in time may take any number of seconds.
        seconds = np.r_[seconds[0], np.full(bootstrap.DRAWS, np.nan)]
    tokens = {
        name: _corpus_mean(sample, measured, [getattr(cost, name) for _, cost in measured])
        for name in TOKENS
    }
    worker = profiled.worker
    document_count = counted(len(measured), "document")
    if profiled.answers is not None:
        given, wanted = profiled.answers
        document_count = f"{given:,} of {counted(wanted, 'answer')}"
    return MethodSpeed(
        method=profiled.method,
        seconds=seconds,
        source=f"measured on {worker.machine}, {document_count}, {profiled.seconds:.0f} s",
        gpu=worker.gpu,
        machine=worker.machine,
        tokens=tokens,
    )


def _corpus_mean(sample: CorpusSample, measured: _MeasuredCosts, values: Sequence[float]) -> Array:
    """Estimate the mean over all documents of the corpus.

    Documents that cannot be read are included at zero cost.

    Args:
        sample: The sample.
        measured: The documents that were answered.
        values: One value per answered document.
    """
    scan = sample.scan
    rng = np.random.default_rng(sampling.SEED)
    indices = [index for index, _ in measured]
    amounts = np.array(values, float)
    lengths = np.array([document.length for document in sample.readable], float)
    readable_share = len(lengths) / len(scan.scanned)
    mean = readable_share * bootstrap.mean(
        amounts,
        lengths[indices],
        float(lengths.mean()),
        readable_share * scan.documents[0],
        rng,
    )
    if scan.complete or mean[0] <= 0:
        return mean
    # Units differ in content, and only some of them were read. Each document in these units is
    # assumed to be like the measured documents next to it.
    units = [document.unit for document in sample.readable]
    interpolated = np.interp(np.arange(len(lengths)), indices, amounts)
    totals = np.bincount(units, interpolated, len(scan.units))
    by_unit = bootstrap.ratio(totals.tolist(), scan.counts, rng, scan.units_planned)
    return mean * (by_unit / by_unit[0])


def _notes(config: RunConfig, sample: CorpusSample, profiled: Profile) -> list[str]:
    """Return what a reader of the estimate should know about the sample."""
    scan = sample.scan
    notes = []
    if scan.left_out:
        notes.append(left_out.describe(scan.left_out))
    notes += scan.unsplit
    if config.model.is_fake:
        notes.append("model: fake. These figures are made up: no model read the documents")
    if len(sample.documents) < _SMALL_SAMPLE:
        drawn = counted(len(sample.documents), "document")
        notes.append(f"the sample is small ({drawn}): raise --sample for a narrower interval")
    if not scan.complete:
        planned = counted(scan.units_planned, "unit")
        notes.append(f"shares of categories and lengths are from {len(scan.units)} of {planned}")
    if sample.unreadable:
        scanned = counted(len(scan.scanned), "document")
        notes.append(f"{sample.unreadable} of {scanned} cannot be read: error rows in the run")
    return notes


def _is_trained(config: RunConfig | None, model: str) -> bool:
    """Return whether a configuration has weights of this model trained for hyper_parallel."""
    if config is None or config.model.name != model:
        return False
    return config.decoding.method == "hyper_parallel" and untrained(config) is None


def _with_given_speed(config: RunConfig | None, options: EstimateOptions) -> Estimate:
    """Estimate from a speed that is given or predicted.

    The corpus is planned unless its size is given.
    """
    notes: list[str] = []
    corpus: sampling.CorpusScan | None = None
    if options.model is not None:
        instances = options.instances or prices.INSTANCES
        tokens = DocumentTokens(*(options.tokens or ()))
        source = "workload W1 of docs/benchmark.md; a configuration or --tokens gives yours"
        if options.tokens:
            source = "as --tokens gives them"
        elif config is not None:
            sample = sampling.draw(config, options.sample)
            corpus = sample.scan
            of_config = workload.of_config(config, sample)
            tokens = of_config.tokens
            source = of_config.source
        kv_cache = "auto" if config is None else config.model.kv_cache
        main, baseline = prediction.speeds(options.model, tokens, instances, kv_cache)
        notes.append(f"assumed per document: {tokens.describe()} ({source})")
        if kv_cache != "auto":
            notes.append(f"with model.kv_cache {kv_cache}: 1 byte for each number of the KV cache")
        if not _is_trained(config, options.model):
            notes.append(_NEEDS_TRAINING)
        notes.append(_PREDICTED)
    else:
        method = "given"
        if config is not None:
            method = config.decoding.method
        main = _speeds(options.throughput, "--throughput", method, options)
        baseline = _speeds(
            options.baseline_throughput, "--baseline-throughput", "autoregressive", options
        )
    if options.documents is not None:
        documents = bootstrap.exact(options.documents)
    elif config is not None:
        if corpus is None:
            corpus = sampling.scan(config)
        documents = corpus.documents
        if corpus.left_out:
            notes.append(left_out.describe(corpus.left_out))
        notes += corpus.unsplit
    elif options.model is not None:
        documents = bootstrap.exact(_MILLION)
        notes.append("for a million documents; --documents sets another number")
    else:
        raise ConfigError("--throughput without a configuration: also give --documents")
    return assemble(config, options, documents, main, baseline, None, notes)


def _speeds(
    throughputs: list[str] | None, option: str, method: str, options: EstimateOptions
) -> list[MethodSpeed]:
    """Read the speeds that an option gives, each as `[GPU=]RATE`.

    A speed without a GPU applies to the GPU of `options.instances`.
    """
    gpus = {instance.gpu for instance in prices.INSTANCES.values() if instance.gpu}
    gpu_names = ", ".join(sorted(gpus))
    speeds = []
    for text in throughputs or []:
        gpu, _, rate = text.rpartition("=")
        if gpu and gpu not in gpus:
            raise ConfigError(
                f"{option} {text}: no instance type has a {gpu}; choose from {gpu_names}"
            )
        try:
            per_second = float(rate)
        except ValueError:
            per_second = 0.0
        if not 0 < per_second < math.inf:
            raise ConfigError(
                f"{option} {text}: give documents per second of one GPU, as in {option} L40S=6.28"
            )
        if gpu:
            matching_gpus = {gpu}
        else:
            matching_gpus = {prices.INSTANCES[name].gpu for name in options.instances or []}
        if len(matching_gpus) != 1:
            raise ConfigError(
                f"which GPU does {option} apply to? Give --instance with types of one GPU, or "
                f"{option} GPU=RATE with one of {gpu_names}"
            )
        seconds = bootstrap.exact(1 / per_second)
        speeds.append(MethodSpeed(method, seconds, GIVEN, matching_gpus.pop()))
    return speeds
