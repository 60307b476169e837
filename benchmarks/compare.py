"""Run every engine on every work.

Each engine has a process of its own. It is tuned first, and then timed in turn with the others. All
engines of a work live side by side, and only one of them works at a time while the others wait for
a line of input. Whatever else the machine does in the meantime therefore affects all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from benchmarks import answers, peers
from benchmarks.config import BenchmarkRun, Engine, WorkConfig
from benchmarks.works import Work, make_work
from raypd.config import ModelConfig
from raypd.errors import ConfigError, InputError, RunError
from raypd.models.cache import quiet
from raypd.models.load import load_model, load_tokenizer
from raypd.text import one_line

AUTO = "auto"  # the setting of raypd, which chooses itself how many sequences it decodes at a time
_LOG_BYTES = 2000  # at the end of a log, searched for the reason why a process ended
_ERROR_LENGTH = 300  # characters of an error that a row holds
# Variables of vLLM's process, unless the configuration sets them.
_VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass
class Row:
    """An engine on a work: its setting, the seconds of every repeat, and the tokens of one.

    `error` says why there are none.
    """

    engine: str
    setting: int | str | None = None
    seconds: list[float] = field(default_factory=list)
    tried: dict[str, float] = field(default_factory=dict)  # setting -> seconds
    # The values of benchmark.vllm_forms that are faster than the first of each.
    form: dict[str, Any] = field(default_factory=dict)
    fed: int | None = 0  # None: the engine does not say what it took from its cache
    decoded: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    agreement: float | None = None  # share of answers equal to those of `agrees_with`
    agrees_with: str | None = None
    error: str | None = None


@dataclass
class Result:
    """A work and its rows.

    `floor` is the time in seconds of the arithmetic that no engine can avoid, at the ceilings of
    the machine.
    """

    name: str
    group: str  # the work of the configuration that it is a part of
    varied: int | None  # the value of the key that varies
    unit: str = ""
    count: int = 0
    floor: float | None = None
    flops: float | None = None  # ceiling of products, in operations per second
    pair_flops: float | None = None  # ceiling of attention
    rows: list[Row] = field(default_factory=list)
    skipped: str | None = None


@dataclass(frozen=True)
class _SavedModel:
    """A model that was saved once for all engines, its adapter merged."""

    folder: str
    dtype: str
    context_length: int


class _Failed(Exception):
    """An engine did not do its work; its row says why."""


class _Process:
    """The process of one engine.

    Its standard output holds answers alone; what libraries print goes to a log.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with open(log, "wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment,
                # A session of its own, so that `close` ends whatever the engine has started.
                start_new_session=True,
            )

    def ask(self, seconds: float) -> dict[str, Any]:
        """Let the engine do its work once.

        Args:
            seconds: The time that it may take.

        Raises:
            _Failed: If it does not answer in time, or answers with an error.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        return self.answer(seconds)

    def answer(self, seconds: float) -> dict[str, Any]:
        """Return the next line that the engine writes.

        Args:
            seconds: The time that it may take.

        Raises:
            _Failed: If no line comes in time, or it is an error.
        """
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not ready:
            raise _Failed(f"took more than {seconds:g} s (benchmark.most_seconds)")
        line = self._process.stdout.readline()
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise _Failed(f"its process ended: {self._last_line()}") from None
        if "error" in answer:
            raise _Failed(answer["error"])
        return answer

    def _last_line(self) -> str:
        """Return the last line of the log that is not empty."""
        text = self.log.read_bytes()[-_LOG_BYTES:].decode(errors="replace")
        lines = [line for line in text.splitlines() if line]
        return lines[-1] if lines else "no word"

    def close(self) -> None:
        """End the process, and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Comparison:
    """The works of a configuration, in a folder that is deleted when they are done."""

    def __init__(self, config: BenchmarkRun, folder: Path, say: Callable[[str], None]) -> None:
        self.config = config
        self.settings = config.benchmark
        self.folder = folder
        self.say = say
        # By name; None is the model of the configuration.
        self._models: dict[str | None, _SavedModel] = {}
        self._live: list[_Process] = []
        self._started = 0

    def results(self) -> Iterator[Result]:
        """Yield every work as it is done.

        Raises:
            ModelError, ConfigError: If nothing can be compared.
        """
        self._model(None)
        for group, base in self.settings.works.items():
            if self.settings.only and group not in self.settings.only:
                continue
            for name, config in varied(group, base).items():
                key = next(iter(base.vary), None)
                value = None if key is None else getattr(config, key)
                result = Result(name, group, value)
                try:
                    self._compare(result, config)
                except InputError as error:
                    result.skipped = str(error)
                finally:
                    self.close()
                yield result

    def close(self) -> None:
        """End all processes."""
        while self._live:
            self._live.pop().close()

    def _compare(self, result: Result, config: WorkConfig) -> None:
        """Tune all engines on a work, time them, and fill the result."""
        model = self._model(None)
        tokenizer = load_tokenizer(ModelConfig(name=model.folder))
        work = make_work(
            config,
            self.settings.data,
            tokenizer,
            model.context_length,
            self.settings.most_documents,
        )
        result.unit = work.unit
        result.count = work.count
        file = self.folder / "work.json"
        # raypd takes nothing but the number of its units.
        file.write_text(json.dumps({**asdict(work), "units": [0] * work.count}))
        running = self._start_engines(result, config, work, file)
        latest: dict[str, dict[str, Any]] = {}  # by engine
        ceilings = self._time(result, running, latest, file)
        self._add_agreement(result, work, latest, tokenizer)
        result.flops = max(ceiling["flops"] for ceiling in ceilings)
        result.pair_flops = max(ceiling["pair_flops"] for ceiling in ceilings)
        counts = self._decoded_tokens(result, work, latest)
        if counts is not None:
            result.floor = _floor(result, work, ceilings[0], counts)

    def _start_engines(
        self, result: Result, config: WorkConfig, work: Work, file: Path
    ) -> dict[str, _Process]:
        """Start and tune the engines that the work has requests for; add their rows."""
        models = getattr(config, "models", {})
        running: dict[str, _Process] = {}
        for engine in config.engines or self.settings.engines:
            if shape_of(engine, work) is None:
                continue
            row = Row(engine)
            result.rows.append(row)
            try:
                running[engine] = self._tuned(row, work, file, models.get(engine))
            except _Failed as error:
                self._fail(result, row, error)
        return running

    def _fail(self, result: Result, row: Row, error: _Failed) -> None:
        row.error = one_line(error, _ERROR_LENGTH)
        row.seconds = []
        self.say(f"{result.name}: {row.engine}: {row.error}")

    def _time(
        self,
        result: Result,
        running: dict[str, _Process],
        latest: dict[str, dict[str, Any]],
        file: Path,
    ) -> list[dict[str, Any]]:
        """Time all engines in every repeat, and the ceiling of the machine beside them.

        `latest` gets the last answer of each engine. Returns the ceilings.
        """
        seconds = self.settings.most_seconds
        repeats = self.settings.repeats
        ceilings = []
        try:
            ceiling = self._start("ceiling", "units", 1, file, None, {})
            ceiling.answer(seconds)
            for repeat in range(repeats):
                ceilings.append(ceiling.ask(seconds))
                self._repeat(result, running, latest)
                self.say(f"{result.name}: {repeat + 1} of {repeats} repeats")
        except _Failed as error:
            raise RunError(
                f"{result.name}: the machine's ceiling could not be measured: {error}"
            ) from None
        return ceilings

    def _repeat(
        self, result: Result, running: dict[str, _Process], latest: dict[str, dict[str, Any]]
    ) -> None:
        """Let each engine do the work once, one after the other."""
        for row in result.rows:
            if row.error is not None:
                continue
            try:
                answer = running[row.engine].ask(self.settings.most_seconds)
            except _Failed as error:
                self._fail(result, row, error)
                self._end(running[row.engine])
                continue
            latest[row.engine] = answer
            row.seconds.append(answer["seconds"])
            row.fed = answer["fed"]
            row.decoded = answer["decoded"]

    @staticmethod
    def _decoded_tokens(
        result: Result, work: Work, latest: dict[str, dict[str, Any]]
    ) -> dict[str, int] | None:
        """Return how many tokens are decoded, and how many of them are fed ("later").

        Where the model itself ends its answers, these are the first engine's that tells. None if
        no engine does.
        """
        if work.decoded is not None:
            return {"decoded": work.decoded, "later": work.decoded - work.values}
        for row in result.rows:
            if "later" in latest.get(row.engine, {}):
                return latest[row.engine]
        return None

    def _tuned(self, row: Row, work: Work, file: Path, model: str | None) -> _Process:
        """Try the settings of an engine; return the process of the fastest.

        An engine with a single setting is started, but does not do the work yet. Raises _Failed if
        no setting works.
        """
        shape = str(shape_of(row.engine, work))
        settings: list[int | str] = [AUTO]
        if shape != "units":
            settings = self._settings(row.engine, len(getattr(work, shape)))
        forms = self.settings.vllm_forms if row.engine.startswith("vllm") else {}
        first_form = {key: values[0] for key, values in forms.items()}
        # A trial without a setting takes the best one, and a change of the form.
        trials: list[tuple[int | str | None, dict[str, Any]]] = []
        trials += [(setting, {}) for setting in settings]
        for key, values in forms.items():
            trials += [(None, {key: value}) for value in values[1:]]
        best: _Process | None = None
        failure: _Failed | None = None
        for trial_setting, change in trials:
            setting = row.setting if trial_setting is None else trial_setting
            if setting is None:
                break  # no max_num_seqs worked
            form = {**row.form, **change}
            name = label(setting, form)
            process = self._start(row.engine, shape, setting, file, model, {**first_form, **form})
            try:
                versions = process.answer(self.settings.most_seconds)["versions"]
                if len(trials) > 1:
                    row.tried[name] = process.ask(self.settings.most_seconds)["seconds"]
                    self.say(f"  {row.engine}, {name} at a time: {row.tried[name]:.2f} s")
            except _Failed as error:
                failure = error
                self._end(process)
                if "is not installed" in str(error):
                    break
                self.say(f"  {row.engine}, {name} at a time: {one_line(error, _ERROR_LENGTH)}")
                continue
            if best is not None and row.tried[name] > min(row.tried.values()):
                self._end(process)
                continue
            if best is not None:
                self._end(best)
            best = process
            row.setting = setting
            row.form = form
            row.versions = versions
        if best is None:
            raise failure or _Failed("no setting was tried")
        return best

    def _settings(self, engine: str, requests: int) -> list[int | str]:
        """Return the settings that an engine other than raypd is tried with."""
        is_generate = engine == "generate"
        sizes = self.settings.batch_sizes if is_generate else self.settings.max_num_seqs
        settings: list[int | str] = []
        for size in sorted(sizes):
            settings.append(size)
            if size >= requests:
                break  # this one takes all requests at once
        return settings

    def _start(
        self,
        engine: str,
        shape: str,
        setting: int | str,
        file: Path,
        model: str | None,
        form: Mapping[str, Any],
    ) -> _Process:
        """Start the process of an engine, which loads its model and warms up.

        Raises _Failed if it cannot be started, ModelError if its model cannot be loaded.
        """
        settings = self.settings
        saved = self._model(model)
        name = "raypd" if engine.startswith("raypd") else engine.partition("-")[0]
        arguments = {key: value for key, value in form.items() if not key.isupper()}
        job = {
            "engine": name,
            "shape": shape,
            "setting": setting,
            "work": str(file),
            "model": saved.folder,
            "dtype": saved.dtype,
            "device": self.config.model.device,
            "threads": settings.threads,
            "guided": engine == "raypd-guided",
            "arguments": {**settings.vllm_arguments, **arguments},
        }
        self._started += 1
        path = self.folder / f"{self._started}-{engine}.json"
        path.write_text(json.dumps(job))
        command = self._command(name, path)
        try:
            process = _Process(command, self._environment(name, form), path.with_suffix(".log"))
        except OSError as error:
            raise _Failed(
                f"{command[0]} (benchmark.{name}_python) cannot be started: {error.strerror}"
            ) from None
        self._live.append(process)
        return process

    def _command(self, name: str, job: Path) -> list[str]:
        """Return the command of an engine's process."""
        if name in ("raypd", "ceiling"):
            return [sys.executable, "-m", "benchmarks.engines", str(job)]
        python = sys.executable
        if name in ("vllm", "openvino"):
            python = getattr(self.settings, f"{name}_python") or sys.executable
        return [python, peers.__file__, str(job)]

    def _environment(self, name: str, form: Mapping[str, Any]) -> dict[str, str]:
        """Return the environment variables of an engine's process."""
        settings = self.settings
        environment = dict(os.environ)
        if name in ("vllm", "openvino"):
            # The path may hold packages that do not fit the environment of these engines.
            environment.pop("PYTHONPATH", None)
        else:
            root = str(Path(__file__).parents[1])
            paths = [root, *filter(None, [os.getenv("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        if name == "vllm":
            cores = settings.threads or os.cpu_count() or 1
            environment |= _VLLM_ENVIRONMENT
            environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{cores - 1}"
            variables = {key: value for key, value in form.items() if key.isupper()}
            for key, value in {**settings.vllm_environment, **variables}.items():
                if value is not None:
                    environment[key] = str(value)
        if settings.threads is not None:
            environment["OMP_NUM_THREADS"] = str(settings.threads)
        return environment

    def _end(self, process: _Process) -> None:
        self._live.remove(process)
        process.close()

    def _model(self, name: str | None) -> _SavedModel:
        """Save a model once for all engines, its adapter merged; None is that of the configuration.

        Raises ModelError if it cannot be loaded.
        """
        if name not in self._models:
            config = self.config.model
            if config.quantization != "none":
                raise ConfigError(
                    "model.quantization: engines quantize each in its own way; set none"
                )
            if name is not None:
                config = config.model_copy(update={"name": name, "adapter": None, "revision": None})
            loaded = load_model(config)
            folder = self.folder / f"model-{len(self._models)}"
            with quiet():
                loaded.model.save_pretrained(folder)
                loaded.tokenizer.save_pretrained(folder)
            dtype = str(loaded.dtype).removeprefix("torch.")
            self._models[name] = _SavedModel(str(folder), dtype, loaded.context_length)
        return self._models[name]

    @staticmethod
    def _add_agreement(
        result: Result,
        work: Work,
        latest: dict[str, dict[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Add to the other engines' rows how many of their answers are raypd's.

        They are compared with raypd's most similar way to decode.
        """
        if work.decoded is not None:
            return  # the answers are given
        read = {}
        for row in result.rows:
            if row.error is None:
                output = latest[row.engine]["answers"]
                read[row.engine] = answers.read(output, shape_of(row.engine, work), work, tokenizer)
        reference = None
        for name in ("raypd-guided", "raypd"):
            if name in read:
                reference = name
                break
        for row in result.rows:
            if reference is None or row.engine not in read or row.engine.startswith("raypd"):
                continue
            row.agreement = answers.agreement(read[row.engine], read[reference])
            row.agrees_with = reference


def _floor(result: Result, work: Work, ceiling: dict[str, Any], counts: Mapping[str, int]) -> float:
    """Return the seconds of the arithmetic that no engine can avoid."""
    assert result.flops is not None
    assert result.pair_flops is not None
    fed = work.unavoidable + counts["later"]
    weights = ceiling["layers"] * fed + ceiling["head"] * counts["decoded"]
    pairs = work.attended + counts["later"] * work.keys
    return 2 * weights / result.flops + ceiling["pair"] * pairs / result.pair_flops


def varied(name: str, work: WorkConfig) -> dict[str, WorkConfig]:
    """Return the works that one of the configuration stands for, by name.

    Args:
        name: The name of the work.
        work: The work, with the key that varies.

    Raises:
        ConfigError: For a value that the key cannot have.
    """
    try:
        return work.varied(name)
    except ValidationError as error:
        raise ConfigError(f"benchmark.works.{name}.vary: {error.errors()[0]['msg']}") from None


def label(setting: int | str | None, form: Mapping[str, Any]) -> str:
    """Return the name of an engine's setting in a table, such as "64, block_size: 16"."""
    return ", ".join([str(setting), *(f"{key}: {value}" for key, value in form.items())])


def shape_of(engine: Engine | str, work: Work) -> str | None:
    """Return which requests of a work an engine gets; None if the work has none for it."""
    if engine == "raypd":
        return "units"
    if engine == "raypd-guided":
        has_values = "run" in work.raypd and work.unit == "documents"
        return "units" if has_values else None
    if engine.endswith("-whole"):
        return "whole" if work.whole else None
    if engine.endswith("-each") or not work.whole:
        return "each"
    return "whole"


def compare(config: BenchmarkRun, say: Callable[[str], None]) -> Generator[Result, None, None]:
    """Yield every work of a configuration as it is done.

    Args:
        config: What is compared.
        say: Gets a line per step.

    Raises:
        ModelError, ConfigError, RunError: If nothing can be compared.
    """
    with tempfile.TemporaryDirectory(prefix="raypd-benchmark-") as folder:
        comparison = Comparison(config, Path(folder), say)
        try:
            yield from comparison.results()
        finally:
            comparison.close()
