"""Runs every engine on every work: each in a process of its own, tuned first, then timed in turn
with the others.

All engines of a work live side by side, and only one of them works at a time; the others wait for a
line of input. So what the machine does in the meantime, warm or busy, hits all of them.
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
from raypd.models.embedded import quiet
from raypd.models.load import load_model, load_tokenizer
from raypd.run.text import one_line

AUTO = "auto"  # of raypd, which says for itself how many it decodes at a time
_LOG_END = 2000  # characters of a log that are looked at for the reason why a process ended


@dataclass
class Row:
    """An engine on a work: what it was set to, seconds of every repeat and tokens of one; or why
    there are none.
    """

    engine: str
    setting: int | str | None = None
    seconds: list[float] = field(default_factory=list)
    tried: dict[str, float] = field(default_factory=dict)  # setting -> seconds
    # Of benchmark.vllm_forms: what is faster than the first.
    form: dict[str, Any] = field(default_factory=dict)
    fed: int | None = 0  # None: the engine does not say what it took from its cache
    decoded: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    agreement: float | None = None  # share of answers that are those of `agrees_with`
    agrees_with: str | None = None
    error: str | None = None


@dataclass
class Result:
    """A work and its rows; floor: seconds of the arithmetic that cannot be avoided, at the
    ceilings.
    """

    name: str
    group: str  # the work of the configuration that it is a part of
    varied: int | None  # the value of the key that varies
    unit: str = ""
    count: int = 0
    floor: float | None = None
    flops: float | None = None  # ceiling of products, in operations a second
    pair_flops: float | None = None  # of attention
    rows: list[Row] = field(default_factory=list)
    skipped: str | None = None


class _Failed(Exception):
    """An engine that did not do its work; its row says why."""


class _Process:
    """One engine's process.

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
                start_new_session=True,  # it is ended with all that it has started
            )

    def ask(self, seconds: float) -> dict[str, Any]:
        """Lets it do its work once. Raises _Failed."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        return self.answer(seconds)

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next line that it writes. Raises _Failed."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise _Failed(f"took more than {seconds:g} s (benchmark.most_seconds)")
        line = self._process.stdout.readline()
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            said = [
                text
                for text in self.log.read_bytes()[-_LOG_END:].decode(errors="replace").splitlines()
                if text
            ]
            raise _Failed(f"its process ended: {said[-1] if said else 'no word'}") from None
        if "error" in found:
            raise _Failed(found["error"])
        return found

    def close(self) -> None:
        """Ends it and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Comparison:
    """The works of a configuration, in a folder that is gone when they are done."""

    def __init__(self, config: BenchmarkRun, folder: Path, say: Callable[[str], None]) -> None:
        self.config, self.settings, self.folder, self.say = config, config.benchmark, folder, say
        self._models: dict[str | None, tuple[str, str, int]] = {}  # name -> folder, dtype, context
        self._live: list[_Process] = []
        self._started = 0

    def results(self) -> Iterator[Result]:
        """Every work, as it is done. Raises ModelError, ConfigError."""
        self._model(None)
        for group, base in self.settings.works.items():
            if self.settings.only and group not in self.settings.only:
                continue
            for name, config in varied(group, base).items():
                key = next(iter(base.vary), None)
                result = Result(name, group, None if key is None else getattr(config, key))
                try:
                    self._compare(result, config)
                except InputError as error:
                    result.skipped = str(error)
                finally:
                    self.close()
                yield result

    def close(self) -> None:
        """Ends the processes that live."""
        while self._live:
            self._live.pop().close()

    def _compare(self, result: Result, config: WorkConfig) -> None:
        at, _, context = self._model(None)
        tokenizer = load_tokenizer(ModelConfig(name=at))
        work = make_work(
            config, self.settings.data, tokenizer, context, self.settings.most_documents
        )
        result.unit, result.count = work.unit, work.count
        file = self.folder / "work.json"
        file.write_text(json.dumps({**asdict(work), "units": [0] * work.count}))
        running: dict[str, _Process] = {}
        found: dict[str, dict[str, Any]] = {}
        for engine in config.engines or self.settings.engines:
            if shape_of(engine, work) is None:
                continue
            row = Row(engine)
            result.rows.append(row)
            try:
                running[engine] = self._tuned(
                    row, work, file, getattr(config, "models", {}).get(engine)
                )
            except _Failed as error:
                row.error = one_line(error, 300)
                self.say(f"{result.name}: {engine}: {row.error}")
        try:
            ceiling = self._start("ceiling", "units", 1, file, None, {})
            ceiling.answer(self.settings.most_seconds)
            ceilings = []
            for repeat in range(self.settings.repeats):
                ceilings.append(ceiling.ask(self.settings.most_seconds))
                self._turn(result, running, found)
                self.say(f"{result.name}: {repeat + 1} of {self.settings.repeats} repeats")
        except _Failed as error:
            raise RunError(
                f"{result.name}: the machine's ceiling could not be measured: {error}"
            ) from None
        self._judge(result, work, found, tokenizer)
        result.flops, result.pair_flops = (
            max(one[key] for one in ceilings) for key in ("flops", "pair_flops")
        )
        told = next(
            (found[row.engine] for row in result.rows if "later" in found.get(row.engine, {})), None
        )
        if work.decoded is not None:
            told = {"decoded": work.decoded, "later": work.decoded - work.values}
        if told is not None:
            fed = ceilings[0]["layers"] * (work.unavoidable + told["later"])
            result.floor = 2 * (fed + ceilings[0]["head"] * told["decoded"]) / result.flops
            result.floor += (
                ceilings[0]["pair"]
                * (work.attended + told["later"] * work.keys)
                / result.pair_flops
            )

    def _turn(
        self, result: Result, running: dict[str, _Process], found: dict[str, dict[str, Any]]
    ) -> None:
        """Each engine once, one after the other; `found` gets what they answer."""
        for row in result.rows:
            if row.error is not None:
                continue
            try:
                done = found[row.engine] = running[row.engine].ask(self.settings.most_seconds)
            except _Failed as error:
                row.error, row.seconds = one_line(error, 300), []
                self.say(f"{result.name}: {row.engine}: {row.error}")
                self._end(running[row.engine])
            else:
                row.seconds.append(done["seconds"])
                row.fed, row.decoded = done["fed"], done["decoded"]

    def _tuned(self, row: Row, work: Work, file: Path, model: str | None) -> _Process:
        """Starts an engine with one setting after the other, and lets it do the work where there
        are several; the process of the fastest stays. Raises _Failed.
        """
        shape = str(shape_of(row.engine, work))
        settings: list[int | str] = (
            [AUTO] if shape == "units" else self._settings(row.engine, len(getattr(work, shape)))
        )
        forms = self.settings.vllm_forms if row.engine.startswith("vllm") else {}
        trials: list[tuple[int | str | None, dict[str, Any]]] = [
            (setting, {}) for setting in settings
        ]
        trials += [(None, {key: value}) for key, values in forms.items() for value in values[1:]]
        first = {key: values[0] for key, values in forms.items()}
        best: _Process | None = None
        reason: _Failed | None = None
        for number, change in trials:
            setting, form = row.setting if number is None else number, {**row.form, **change}
            if setting is None:
                break  # none of max_num_seqs worked
            name = label(setting, form)
            process = self._start(row.engine, shape, setting, file, model, {**first, **form})
            try:
                versions = process.answer(self.settings.most_seconds)["versions"]
                if len(trials) > 1:
                    row.tried[name] = process.ask(self.settings.most_seconds)["seconds"]
                    self.say(f"  {row.engine}, {name} at a time: {row.tried[name]:.2f} s")
            except _Failed as error:
                reason = error
                self._end(process)
                if "is not installed" in str(error):
                    break
                self.say(f"  {row.engine}, {name} at a time: {one_line(error, 300)}")
                continue
            if best is not None and row.tried[name] > min(row.tried.values()):
                self._end(process)
                continue
            if best is not None:
                self._end(best)
            best, row.setting, row.form, row.versions = process, setting, form, versions
        if best is None:
            raise reason or _Failed("no setting was tried")
        return best

    def _settings(self, engine: str, requests: int) -> list[int | str]:
        """What a peer is tried with."""
        settings = sorted(
            self.settings.batch_sizes if engine == "generate" else self.settings.max_num_seqs
        )
        # The first that takes all at once is tried, too.
        enough = sum(setting < requests for setting in settings)
        return [*settings[: enough + 1]]

    def _start(
        self,
        engine: str,
        shape: str,
        setting: int | str,
        file: Path,
        model: str | None,
        form: Mapping[str, Any],
    ) -> _Process:
        """A process of an engine, which loads and warms up. Raises _Failed, ModelError."""
        settings = self.settings
        at, dtype, _ = self._model(model)
        name = "raypd" if engine.startswith("raypd") else engine.partition("-")[0]
        job = {
            "engine": name,
            "shape": shape,
            "setting": setting,
            "work": str(file),
            "model": at,
            "dtype": dtype,
            "device": self.config.model.device,
            "threads": settings.threads,
            "guided": engine == "raypd-guided",
            "arguments": {
                **settings.vllm_arguments,
                **{k: v for k, v in form.items() if not k.isupper()},
            },
        }
        self._started += 1
        path = self.folder / f"{self._started}-{engine}.json"
        path.write_text(json.dumps(job))
        root = str(Path(__file__).parents[1])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.getenv("PYTHONPATH")])]),
        }
        command = [sys.executable, "-m", "benchmarks.engines", str(path)]
        if name not in ("raypd", "ceiling"):
            command = [sys.executable, peers.__file__, str(path)]
        if name in ("vllm", "openvino"):
            command[0] = getattr(settings, f"{name}_python") or sys.executable
            del environment["PYTHONPATH"]  # it may have packages that do not fit that environment
        if name == "vllm":
            known = {
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{(settings.threads or os.cpu_count() or 1) - 1}",
                "VLLM_CPU_KVCACHE_SPACE": "4",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
            }
            given = {
                **settings.vllm_environment,
                **{key: value for key, value in form.items() if key.isupper()},
            }
            environment |= known | {
                key: str(value) for key, value in given.items() if value is not None
            }
        if settings.threads is not None:
            environment["OMP_NUM_THREADS"] = str(settings.threads)
        try:
            process = _Process(command, environment, path.with_suffix(".log"))
        except OSError as error:
            raise _Failed(
                f"{command[0]} (benchmark.{name}_python) cannot be started: {error.strerror}"
            ) from None
        self._live.append(process)
        return process

    def _end(self, process: _Process) -> None:
        self._live.remove(process)
        process.close()

    def _model(self, name: str | None) -> tuple[str, str, int]:
        """A model saved once, adapter merged, for all engines alike: folder, dtype, context.

        Raises ModelError.
        """
        if name not in self._models:
            given = self.config.model
            if given.quantization != "none":
                raise ConfigError(
                    "model.quantization: engines quantize each in its own way; set none"
                )
            if name is not None:
                given = given.model_copy(update={"name": name, "adapter": None, "revision": None})
            loaded = load_model(given)
            at = self.folder / f"model-{len(self._models)}"
            with quiet():
                loaded.model.save_pretrained(at)
                loaded.tokenizer.save_pretrained(at)
            self._models[name] = (
                str(at),
                str(loaded.dtype).removeprefix("torch."),
                loaded.context_length,
            )
        return self._models[name]

    def _judge(
        self,
        result: Result,
        work: Work,
        found: dict[str, dict[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Writes to each row the share of its answers that raypd's are, too, decoded in the most
        similar way.
        """
        said = {
            row.engine: answers.read(
                found[row.engine]["answers"], shape_of(row.engine, work), work, tokenizer
            )
            for row in result.rows
            if row.error is None and work.decoded is None
        }
        for row in result.rows:
            other = next(
                (name for name in ("raypd-guided", "raypd") if name in said and name != row.engine),
                None,
            )
            if row.engine in said and other is not None and not row.engine.startswith("raypd"):
                row.agreement, row.agrees_with = (
                    answers.agreement(said[row.engine], said[other]),
                    other,
                )


def varied(name: str, work: WorkConfig) -> dict[str, WorkConfig]:
    """The works that one of the configuration stands for.

    Raises ConfigError for a value that it cannot have.
    """
    try:
        return work.varied(name)
    except ValidationError as error:
        raise ConfigError(f"benchmark.works.{name}.vary: {error.errors()[0]['msg']}") from None


def label(setting: int | str | None, form: Mapping[str, Any]) -> str:
    """An engine's setting in a table: 64, block_size: 16."""
    return ", ".join([str(setting), *(f"{key}: {value}" for key, value in form.items())])


def shape_of(engine: Engine | str, work: Work) -> str | None:
    """Which requests of a work an engine gets; None: the work has none for it."""
    if engine == "raypd":
        return "units"
    if engine == "raypd-guided":
        return "units" if "run" in work.raypd and work.unit == "documents" else None
    if engine.endswith("-whole"):
        return "whole" if work.whole else None
    return "each" if engine.endswith("-each") or not work.whole else "whole"


def compare(config: BenchmarkRun, say: Callable[[str], None]) -> Generator[Result, None, None]:
    """Every work of a configuration, as it is done.

    Args:
        config: what is compared.
        say: gets a line for every step.

    Raises:
        ModelError, ConfigError, RunError: nothing can be compared.
    """
    with tempfile.TemporaryDirectory(prefix="raypd-benchmark-") as folder:
        comparison = Comparison(config, Path(folder), say)
        try:
            yield from comparison.results()
        finally:
            comparison.close()
