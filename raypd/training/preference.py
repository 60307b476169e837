"""Preference rounds for PASTA: a model learns from its own best and worst answers (BoNBoN).

A sample's score (section 4) is its theoretical speedup (section 5.1) + quality_weight x (wins less
losses against the baseline, in both orders). A run stores texts instead of tokens, so a sample
counts only if the interpreter, fed with the tokens of its text, produces the same text and
counters.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from raypd import storage
from raypd.config import ANSWER_KEYS, GenerationConfig, RunConfig
from raypd.dataset import planner, read_unit, rows_of
from raypd.decoding import Lexer, MarkupPiece, PastaOptions, readable
from raypd.errors import ConfigError, InputError, raised_as
from raypd.run import by_document, load_record
from raypd.tasks import Document, Record, conversation, encode
from raypd.training.example import Example, Skip, listed, trace
from raypd.training.generation import GenerationExamples, ThreadsTeacher, TokenPiece
from raypd.training.teacher import DocumentKey, Row

# The values of options that a run did not set.
_DEFAULTS = asdict(PastaOptions())
_COLUMNS = [
    "id",
    "source",
    "row",
    "status",
    "sample",
    "turn",
    "text",
    "finish_reason",
    "tokens",
    "raw",
    "counters",
    "warnings",
]
_ORDERS = ("first", "second")  # whether the sample is the first or the second of the two answers
_VERDICT = re.compile(r"\b(first|second|tie)\b", re.IGNORECASE)
_NOT_REPRODUCED = "samples whose text does not come back token by token"
_PROMPT = (Path(__file__).parent / "templates" / "compare.txt").read_text(encoding="utf-8").strip()


def check(config: RunConfig) -> None:
    """Check the keys and the runs of a preference round.

    Args:
        config: The configuration, whose section `training.preference` is set.

    Raises:
        ConfigError: If a run is missing, was not decoded as `config` says, or cannot be used.
    """
    preference = config.training.preference
    assert preference is not None
    if config.training.labels is not None:
        raise ConfigError("training.labels and training.preference are both set: keep one")
    if config.model.adapter is not None:
        raise ConfigError(
            "model.adapter: a preference round begins from model.name alone; use "
            "training.weights full"
        )
    has_new_samples = preference.samples is None or preference.rounds > 1
    if has_new_samples and not isinstance(preference.judged, dict):
        advice = "give keys of its model, such as {model.name: ...}: it is asked about new samples"
        raise ConfigError(
            f"training.preference.judged {preference.judged}: is a judge's run; {advice}"
        )
    storage_settings = config.storage.model_dump(exclude_defaults=True)
    overrides = [f"storage.{key}={value}" for key, value in storage_settings.items()]
    methods = (("samples", "pasta"), ("baseline", "autoregressive"), ("judged", None))
    for name, method in methods:
        run = getattr(preference, name)
        if not isinstance(run, str):  # the run does not exist yet
            continue
        with raised_as(ConfigError, f"training.preference.{name}", ConfigError):
            recorded = _recorded_config(run, method, overrides)
            if name == "samples":
                _check_equal_decoding(config, run, recorded)


def _recorded_config(run: str, method: str | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of a generation run.

    Raises ConfigError if the folder holds another kind of run, or one with another method.
    """
    recorded = load_record(storage.absolute(run), overrides).config
    kind = recorded["task"]["kind"]
    recorded_method = recorded["decoding"]["method"]
    if kind != "generation" or method not in (None, recorded_method):
        expected = f"with decoding.method {method}" if method else "of `raypd generate`"
        raise ConfigError(
            f"{run}: is a run of task.kind {kind} with {recorded_method}; give one {expected}"
        )
    return recorded


def _check_equal_decoding(config: RunConfig, run: str, recorded: dict[str, Any]) -> None:
    """Raise ConfigError if a run was decoded with other values than those in `config`."""
    task_keys = ("prompt_column", "system", "chat_template", "thinking", "too_long")
    keys = [("task", name) for name in task_keys]
    keys += [("decoding", name) for name in ANSWER_KEYS["generation"]["pasta"]]
    for section, name in keys:
        value = getattr(getattr(config, section), name)
        recorded_value = recorded[section].get(name, value)
        if recorded_value != value:
            raise _differs(run, f"{section}.{name}", recorded_value, value)
    options = asdict(config.decoding.method_options)
    for name, value in options.items():
        recorded_value = recorded["decoding"].get("options", {}).get(name, _DEFAULTS[name])
        if recorded_value != value:
            raise _differs(run, f"decoding.options.{name}", recorded_value, value)


def _differs(run: str, key: str, recorded_value: Any, value: Any) -> ConfigError:
    """Return the error about a run that was decoded with another value of a key."""
    return ConfigError(
        f"{run}: was decoded with {key} {recorded_value!r}, and here it is {value!r}: set it to "
        "the run's, since examples are what decoding fed"
    )


def _samples_by_document(run: str) -> dict[DocumentKey, list[Row]]:
    """Return each document's answers to its first prompt, in the order of samples.

    The prompts of later turns depend on earlier answers, and cannot be compared.
    """
    rows = by_document(
        row for row in rows_of(run, _COLUMNS) if row["status"] == "ok" and row["turn"] == 0
    )
    return {
        key: sorted(answers, key=lambda row: int(row["sample"])) for key, answers in rows.items()
    }


@dataclass(frozen=True)
class _RoundRuns:
    """The folders of a round's runs."""

    samples: str
    baseline: str
    judged: str


def _runs(config: RunConfig) -> _RoundRuns:
    keys = config.training.preference
    assert keys is not None
    return _RoundRuns(str(keys.samples), str(keys.baseline), str(keys.judged))


def _compared(
    runs: _RoundRuns, skipped: Counter[str]
) -> Iterator[tuple[DocumentKey, Row, list[Row]]]:
    """Yield (key of a prompt, the baseline's answer, the complete samples) per answered prompt."""
    answers = _samples_by_document(runs.baseline)
    for key, rows in _samples_by_document(runs.samples).items():
        if key not in answers:
            skipped["prompts that the baseline did not answer"] += 1
            continue
        complete = [row for row in rows if row["finish_reason"] == "stop"]
        if len(complete) < len(rows):
            skipped["samples that were cut"] += len(rows) - len(complete)
        yield key, answers[key][0], complete


def comparisons(config: RunConfig, skipped: Counter[str]) -> Iterator[dict[str, str]]:
    """Yield the judge's prompt for every sample and both orders, as rows {id, prompt}.

    Args:
        config: The configuration of the round.
        skipped: Counts what is left out, by reason.
    """
    assert isinstance(config.task, GenerationConfig)
    documents: dict[DocumentKey, Document] = {}
    for unit in planner.plan(config):
        for document in read_unit(unit, config):
            documents[document.source, document.row] = document
    for key, answer, rows in _compared(_runs(config), skipped):
        if key not in documents:
            skipped["prompts that are no longer in input.path"] += 1
            continue
        prompts = documents[key].fields.get(config.task.prompt_column)
        turns, following = conversation(prompts, config.task)
        messages = [f"[{turn['role']}] {turn['content']}" for turn in turns]
        request = "\n\n".join([*messages, following[0]])
        for row in rows:
            for order in _ORDERS:
                texts = [row["text"], answer["text"]]
                if order == "second":
                    texts.reverse()
                prompt = _PROMPT.format(request=request, first=texts[0], second=texts[1])
                yield {"id": _comparison_id(key, row, answer, order), "prompt": prompt}


def _comparison_id(key: DocumentKey, row: Row, answer: Row, order: str) -> str:
    """Return the id of a comparison.

    It contains a digest of both texts, so that verdicts on another round's samples do not count.
    """
    digest = hashlib.sha256(json.dumps([row["text"], answer["text"]]).encode()).hexdigest()[:8]
    return json.dumps([*key, row["sample"], digest, order])


def _verdicts(run: str, skipped: Counter[str]) -> dict[str, int]:
    """Map the id of a comparison to 1 (the sample won), -1 (it lost) or 0 (a tie, or unclear)."""
    verdicts = {}
    for row in chain.from_iterable(_samples_by_document(run).values()):
        try:
            *_, order = json.loads(row["id"])
        except (TypeError, ValueError):
            advice = "give the judge's run over a round's comparisons.jsonl"
            raise ConfigError(
                f"training.preference.judged {run}: {row['id']!r} is not a comparison; {advice}"
            ) from None
        words = _verdict_words(row)
        if len(words) != 1:
            skipped["verdicts that say none of first, second and tie: counted as a tie"] += 1
        if len(words) != 1 or "tie" in words:
            verdicts[row["id"]] = 0
        else:
            verdicts[row["id"]] = 1 if order in words else -1
    return verdicts


def _verdict_words(row: Row) -> set[str]:
    """Return which verdicts appear in the last line of a complete answer of the judge."""
    if row["finish_reason"] != "stop":
        return set()
    lines = row["text"].strip().splitlines() or [""]
    return {word.lower() for word in _VERDICT.findall(lines[-1])}


def label(documents: Iterable[Document], config: RunConfig) -> Counter[str]:
    """Put the samples, each with its `score`, into labels_column of their documents.

    Documents without samples get an error.

    Args:
        documents: The documents, which are changed in place.
        config: The configuration of the round.

    Returns:
        How often something was left out, by reason.

    Raises:
        InputError: If none of the documents has a sample.
        ConfigError: If the judge's run is about something else.
    """
    runs = _runs(config)
    skipped = Counter[str]()
    samples_by_document = _scored_samples(config, runs, skipped)
    has_samples = False
    for document in documents:
        samples = samples_by_document.get((document.source, document.row), [])
        document.fields[config.training.labels_column] = samples
        if samples:
            has_samples = True
        elif document.error is None:
            document.error = (
                "training.preference: no sample that both the baseline and the judge answered"
            )
    if not has_samples:
        raise InputError(
            f"training.preference: no prompt of input.path has a sample of {runs.samples} that was "
            f"judged in {runs.judged} against {runs.baseline}; give runs over the same input"
            f"{listed(skipped)}"
        )
    return skipped


def _scored_samples(
    config: RunConfig, runs: _RoundRuns, skipped: Counter[str]
) -> dict[DocumentKey, list[Row]]:
    """Return each document's samples that were judged in both orders, with their `score`."""
    preference = config.training.preference
    assert preference is not None
    verdicts = _verdicts(runs.judged, skipped)
    samples_by_document: dict[DocumentKey, list[Row]] = {}
    for key, answer, rows in _compared(runs, skipped):
        samples = []
        for row in rows:
            ids = [_comparison_id(key, row, answer, order) for order in _ORDERS]
            if not all(id in verdicts for id in ids):
                skipped["samples that the judge did not answer in both orders"] += 1
                continue
            row["counters"] = json.loads(row["counters"])
            speedup = answer["tokens"] / row["counters"]["longest_path"]
            wins = sum(verdicts[id] for id in ids)
            row["score"] = speedup + preference.quality_weight * wins
            samples.append(row)
        samples_by_document[key] = samples
    return samples_by_document


class PairExamples(GenerationExamples):
    """Makes two examples per prompt with scored samples: the best, then the worst.

    Prompts whose samples all score alike are counted, but are not lost.
    """

    def examples(self, document: Document) -> Iterator[Example]:
        ranked = sorted(document.fields[self.column], key=lambda row: -row["score"])
        best_index, best = self._first_reproduced(document, ranked)
        from_the_worst = ranked[best_index + 1 :][::-1]
        worst_index, worst = self._first_reproduced(document, from_the_worst)
        if ranked[best_index]["score"] == from_the_worst[worst_index]["score"]:
            reason = "prompts whose samples all score alike (more samples would tell them apart)"
            self.skipped[reason] += 1
            return
        for example in (best, worst):
            # The two share the whole prompt except its last token, which predicts.
            example.shared = min(example.targets)
            yield example

    def _first_reproduced(self, document: Document, rows: Sequence[Row]) -> tuple[int, Example]:
        """Return the index and the example of the first sample that can be reproduced.

        Raises Skip if there is none.
        """
        for index, row in enumerate(rows):
            example = self._reproduced(document, row)
            if example is not None:
                return index, example
        raise Skip("prompts with less than two samples that come back")

    def _reproduced(self, document: Document, row: Row) -> Example | None:
        """Return what the interpreter fed for a sample.

        Returns None, and counts the sample, if its tokens cannot be determined from its text.
        """
        request = next(self.task.plan([document]))
        if isinstance(request, Record):
            raise Skip(str(request.error))
        try:
            example, answer = trace(request.program, ThreadsTeacher(*self._threads(row["raw"])))
        except ValueError:  # the interpreter sampled where the text has no token
            self.skipped[_NOT_REPRODUCED] += 1
            return None
        is_equal = (
            answer.raw == row["raw"]
            and answer.warnings == (row["warnings"] or [])
            and answer.tokens == row["tokens"]
            and len(answer.threads) == row["counters"]["threads"]
            and answer.longest_path == row["counters"]["longest_path"]
        )
        if not is_equal:
            self.skipped[_NOT_REPRODUCED] += 1
            return None
        return example

    def _threads(self, raw: str) -> tuple[list[TokenPiece], list[list[int]]]:
        """Return the tokens of the main thread, and those of each child up to </async>.

        Raises ValueError if tags do not match.
        """
        if "\ufffd" in raw:
            raise ValueError("bytes that are no text")
        lexer = Lexer(lambda flaw: None)
        pieces = [*lexer.feed(raw.encode().decode("latin-1")), *lexer.close()]
        main: list[TokenPiece] = []
        children: list[list[int]] = []
        while pieces:
            piece = pieces.pop(0)
            main.append((self._ids(piece), _tag(piece)))
            if _tag(piece) != "promise":
                continue
            tags = [_tag(inner) for inner in pieces]
            end = tags.index("close")  # raises ValueError if the child has no end
            if tags[0] != "open":
                raise ValueError(f"{readable(piece.text)} has no content")
            block: list[int] = []
            for inner in pieces[1 : end + 1]:
                block += self._ids(inner)
            children.append(block)
            del pieces[: end + 1]
        main.append(([self.task.end], "text"))
        return main, children

    def _ids(self, piece: MarkupPiece) -> list[int]:
        return encode(self.tokenizer, readable(piece.text), special=piece.tag is not None)


def _tag(piece: MarkupPiece) -> str:
    return "text" if piece.tag is None else piece.tag.kind
