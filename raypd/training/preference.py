"""Preference rounds for PASTA (BoNBoN, section 4): a model learns from the best and the worst of
its own answers, by theoretical speedup (section 5.1) + quality_weight x (wins less losses against
the baseline, in both orders). A run keeps texts, not tokens: a sample counts where the interpreter,
fed with the tokens of its text, makes the same.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from raypd import storage
from raypd.config import ANSWER_KEYS, GenerationConfig, RunConfig
from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.dataset.writer import rows_of
from raypd.decoding.methods.pasta_lang import Lexer, Piece, readable
from raypd.errors import ConfigError, InputError, raised_as
from raypd.run.load import load_record
from raypd.run.read import by_document
from raypd.tasks.base import Document, Record
from raypd.tasks.documents import conversation
from raypd.tasks.prompting import encode
from raypd.training.example import Example, Skip, listed, trace
from raypd.training.generation import GenerationExamples, ThreadsTeacher, TokenPiece
from raypd.training.teacher import Place, Row

_COLUMNS = [
    *("id", "source", "row", "status", "sample", "turn", "text", "finish_reason"),
    *("tokens", "raw", "counters", "warnings"),
]
_ORDERS = ("first", "second")  # where the sample stands
_VERDICT = re.compile(r"\b(first|second|tie)\b", re.IGNORECASE)
_UNLIKE = "samples whose text does not come back token by token"
_PROMPT = (Path(__file__).parent / "templates" / "compare.txt").read_text(encoding="utf-8").strip()


def check(config: RunConfig) -> None:
    """Raises ConfigError: a run of `training.preference` is not there, not decoded as `config`
    says, or cannot be.
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
    if not isinstance(preference.judged, dict) and (
        preference.samples is None or preference.rounds > 1
    ):
        advice = "give keys of its model, such as {model.name: ...}: it is asked about new samples"
        raise ConfigError(
            f"training.preference.judged {preference.judged}: is a judge's run; {advice}"
        )
    overrides = [
        f"storage.{key}={value}"
        for key, value in config.storage.model_dump(exclude_defaults=True).items()
    ]
    for name, method in (("samples", "pasta"), ("baseline", "autoregressive"), ("judged", None)):
        run = getattr(preference, name)
        if not isinstance(run, str):  # it is made
            continue
        with raised_as(ConfigError, f"training.preference.{name}", ConfigError):
            recorded = _recorded(run, method, overrides)
            if name == "samples":
                _check_alike(config, run, recorded)


def _recorded(run: str, method: str | None, overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration of a run of generation.

    Raises ConfigError where it is none, or none with the method.
    """
    recorded = load_record(storage.absolute(run), overrides).config
    kind, used = recorded["task"]["kind"], recorded["decoding"]["method"]
    if kind != "generation" or method not in (None, used):
        expected = f"with decoding.method {method}" if method else "of `raypd generate`"
        raise ConfigError(f"{run}: is a run of task.kind {kind} with {used}; give one {expected}")
    return recorded


def _check_alike(config: RunConfig, run: str, recorded: dict[str, Any]) -> None:
    keys = [
        ("task", name)
        for name in ("prompt_column", "system", "chat_template", "thinking", "too_long")
    ]
    for section, name in [
        *keys,
        *(("decoding", name) for name in ANSWER_KEYS["generation"]["pasta"]),
    ]:
        here = getattr(getattr(config, section), name)
        if (there := recorded[section].get(name, here)) != here:
            advice = "set it to the run's, since examples are what decoding fed"
            raise ConfigError(
                f"{run}: was decoded with {section}.{name} {there!r}, and here it is {here!r}: "
                f"{advice}"
            )


def _rows(run: str) -> dict[Place, list[Row]]:
    """The first answers of a run (later ones have other prompts) to each of its documents, in the
    order of samples.
    """
    rows = by_document(
        row for row in rows_of(run, _COLUMNS) if row["status"] == "ok" and row["turn"] == 0
    )
    return {
        place: sorted(answers, key=lambda row: int(row["sample"]))
        for place, answers in rows.items()
    }


def _runs(config: RunConfig) -> tuple[str, str, str]:
    """Folders: of samples, the baseline, the judge."""
    keys = config.training.preference
    assert keys is not None
    return str(keys.samples), str(keys.baseline), str(keys.judged)


def _compared(
    samples: str, baseline: str, skipped: Counter[str]
) -> Iterator[tuple[Place, Row, list[Row]]]:
    """(place of a prompt, the baseline's answer, all samples that came to their end), for each that
    has both.
    """
    answers = _rows(baseline)
    for place, rows in _rows(samples).items():
        complete = [row for row in rows if row["finish_reason"] == "stop"]
        if place not in answers:
            skipped["prompts that the baseline did not answer"] += 1
            continue
        if len(complete) < len(rows):
            skipped["samples that were cut"] += len(rows) - len(complete)
        yield place, answers[place][0], complete


def comparisons(config: RunConfig, skipped: Counter[str]) -> Iterator[dict[str, str]]:
    """What the judge is asked of each sample, in both orders, for `raypd generate`."""
    assert isinstance(config.task, GenerationConfig)
    samples, baseline, _ = _runs(config)
    read = (document for unit in plan(config) for document in read_unit(unit, config))
    documents = {(document.source, document.place): document for document in read}
    for place, answer, rows in _compared(samples, baseline, skipped):
        if (document := documents.get(place)) is None:
            skipped["prompts that are not in input.path any more"] += 1
            continue
        turns, following = conversation(document.fields.get(config.task.prompt_column), config.task)
        request = "\n\n".join(
            [*(f"[{turn['role']}] {turn['content']}" for turn in turns), following[0]]
        )
        for row in rows:
            for order in _ORDERS:
                first, second = (row, answer) if order == "first" else (answer, row)
                prompt = _PROMPT.format(request=request, first=first["text"], second=second["text"])
                yield {"id": _comparison(place, row, answer, order), "prompt": prompt}


def _comparison(place: Place, row: Row, answer: Row, order: str) -> str:
    """The id of a comparison, with a digest of both texts, so that verdicts on another round's
    samples do not count.
    """
    digest = hashlib.sha256(json.dumps([row["text"], answer["text"]]).encode()).hexdigest()[:8]
    return json.dumps([*place, row["sample"], digest, order])


def _verdicts(run: str, skipped: Counter[str]) -> dict[str, int]:
    """Id of a comparison -> 1: the sample won; -1: it lost; 0: a tie, or unclear."""
    verdicts = {}
    for row in chain.from_iterable(_rows(run).values()):
        try:
            *_, order = json.loads(row["id"])
        except (TypeError, ValueError):
            advice = "give the judge's run over a round's comparisons.jsonl"
            raise ConfigError(
                f"training.preference.judged {run}: {row['id']!r} is no comparison; {advice}"
            ) from None
        last = (row["text"].strip().splitlines() or [""])[-1]
        words = (
            {word.lower() for word in _VERDICT.findall(last)}
            if row["finish_reason"] == "stop"
            else set()
        )
        if len(words) != 1:
            skipped["verdicts that say none of first, second and tie: taken as a tie"] += 1
        verdicts[row["id"]] = (
            (1 if order in words else -1) if len(words) == 1 and "tie" not in words else 0
        )
    return verdicts


def label(documents: Iterable[Document], config: RunConfig) -> Counter[str]:
    """Puts the samples, each with its `score`, into labels_column of the documents; documents
    without get an error. Raises InputError: no sample is of any of them; ConfigError: the run that
    judged judges something else.
    """
    preference, skipped, (runs, baseline, judged) = (
        config.training.preference,
        Counter[str](),
        _runs(config),
    )
    assert preference is not None
    verdicts = _verdicts(judged, skipped)
    scored: dict[Place, list[Row]] = {}
    for place, answer, samples in _compared(runs, baseline, skipped):
        scored[place] = []
        for row in samples:
            keys = [_comparison(place, row, answer, order) for order in _ORDERS]
            if not all(key in verdicts for key in keys):
                skipped["samples that the judge did not answer in both orders"] += 1
                continue
            row["counters"] = json.loads(row["counters"])
            speedup = answer["tokens"] / row["counters"]["longest_path"]
            row["score"] = speedup + preference.quality_weight * sum(verdicts[key] for key in keys)
            scored[place].append(row)
    matched = 0
    for document in documents:
        samples = scored.get((document.source, document.place), [])
        matched += bool(samples)
        document.fields[config.training.labels_column] = samples
        if not samples and document.error is None:
            document.error = (
                "training.preference: no sample that the baseline and the judge answered, too"
            )
    if not matched:
        raise InputError(
            f"training.preference: no prompt of input.path has a sample of {runs} that was "
            f"judged in {judged} against "
            f"{baseline}; give runs over the same input{listed(skipped)}"
        )
    return skipped


class PairExamples(GenerationExamples):
    """Of each prompt with scored samples the best and the worst, in turn.

    Prompts without a pair are not lost.
    """

    def examples(self, document: Document) -> Iterator[Example]:
        ranked = sorted(document.fields[self.column], key=lambda row: -row["score"])
        sampled = cache(lambda place: self._sampled(document, ranked[place]))
        places = range(len(ranked))
        best = next((place for place in places if sampled(place)), 0)
        worst = next((place for place in reversed(places) if sampled(place)), best)
        if best == worst:
            raise Skip("prompts with less than two samples that come back")
        if ranked[best]["score"] == ranked[worst]["score"]:
            self.skipped[
                "prompts whose samples all score alike (more samples would tell them apart)"
            ] += 1
            return
        for example in (sampled(best), sampled(worst)):
            assert example is not None
            # All of the prompt but its last token, which predicts.
            example.shared = min(example.targets)
            yield example

    def _sampled(self, document: Document, row: Row) -> Example | None:
        """What the interpreter fed for a sample; None, and counted, where its tokens cannot be told
        from its text.
        """
        request = next(self.task.plan([document]))
        if isinstance(request, Record):
            raise Skip(str(request.error))
        try:
            example, answer = trace(request.program, ThreadsTeacher(*self._threads(row["raw"])))
            counted = (
                answer.raw,
                answer.warnings,
                answer.tokens,
                len(answer.threads),
                answer.longest_path,
            )
            kept = (row["counters"]["threads"], row["counters"]["longest_path"])
            if counted != (row["raw"], row["warnings"] or [], row["tokens"], *kept):
                raise ValueError(_UNLIKE)
        except ValueError:  # the interpreter asked for another token than the text has, or none
            self.skipped[_UNLIKE] += 1
            return None
        return example

    def _threads(self, raw: str) -> tuple[list[TokenPiece], list[list[int]]]:
        """Tokens of the main thread, and of each child up to </async>.

        Raises ValueError where tags do not match.
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
            if _tag(piece) == "promise":
                tags = [_tag(inner) for inner in pieces]
                end = tags.index("close")  # ValueError: the child has none
                if tags[0] != "open":
                    raise ValueError(f"{readable(piece.text)} has no content")
                children.append([id for inner in pieces[1 : end + 1] for id in self._ids(inner)])
                del pieces[: end + 1]
        return [*main, ([self.task.end], "text")], children

    def _ids(self, piece: Piece) -> list[int]:
        return encode(self.tokenizer, readable(piece.text), special=piece.tag is not None)


def _tag(piece: Piece) -> str:
    return "text" if piece.tag is None else piece.tag.kind
