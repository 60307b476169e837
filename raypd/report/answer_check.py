"""What a run's answers show without labels: which model gave them, what is wrong with them, and
what to do next.

Nothing here says how many values are right, because only labels can tell that.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any

from raypd import storage
from raypd.config import ModelConfig, card_of
from raypd.dataset import unit_objects
from raypd.errors import UserError
from raypd.report.advice import fit_command, fit_step, known_labels
from raypd.report.sample import AnswerSample, SampleAttribute, first_rows
from raypd.run import RunRecord, layout, read, read_record
from raypd.tasks import calibration_of
from raypd.text import clean, count, share

# The embedded model, whose answers only show how raypd works.
EMBEDDED = "smollm2-135m-instruct"
# A model that is worth a try where the embedded one was used.
LARGER = "Qwen/Qwen3-1.7B"
# Objects that are read to check the answers of a run that may be large, and rows of each.
_OBJECTS = 16
_ROWS = 512
# Fewer answers than this show no pattern.
_FEW = 5
# Shares of an attribute's answers from which a warning is given.
_SAME = 0.6
_SAME_OF_MANY = 0.9
_SAME_OF_TWO = 0.98
_COPIED = 0.2
_NAME = 1 / 3
_YEAR = 0.1
_TEXTS_ELSEWHERE = 0.5
_NUMBERS_ELSEWHERE = 0.05
_NULL = 0.98
_CUT = 0.1
_AMBIGUOUS = 0.05
# Confidences are nearly constant if 90% of them lie in a range of this width.
_CONSTANT_WIDTH = 0.02
# A model that is this sure of every value may be right.
_SURE = 0.97
_SHOWN_CHARACTERS = 60
_RESUME = "run the same command again to resume"
# A run on a CPU that is slower and longer than this is better moved to a GPU.
_SLOW_PER_SECOND = 0.5
_LONG_SECONDS = 1800.0
_CHOICE_TYPES = ("enum", "boolean")
_DATE_TYPES = ("date", "date-time")
# Dates of most documents are of these years.
_FIRST_YEAR = "1900"
_LAST_YEAR = "2100"
# Their values are always shorter than any limit.
_NUMBER_TYPES = ("number", "integer")

Tree = Mapping[str, Any]


@dataclass(frozen=True)
class AnswerCheck:
    """What is known of a run's answers without labels.

    Attributes:
        model: Which model answered, and what that means.
        confidence: What its confidences are; "" if there are none.
        warnings: A line for each attribute and fault.
        next_step: The one thing to do next; "" while the run goes on well.
    """

    model: str
    confidence: str = ""
    warnings: list[str] = field(default_factory=list)
    next_step: str = ""


@dataclass(frozen=True)
class RunProgress:
    """How far a run is, as far as the next step depends on it.

    Attributes:
        state: complete, running, interrupted, ...
        documents: Documents that were processed.
        failed: Those of them that failed.
        seconds: Seconds of all sessions.
        on_gpu: Whether a GPU was used.
    """

    state: str
    documents: int
    failed: int
    seconds: float
    on_gpu: bool = False


def check_run(root: str, progress: RunProgress) -> AnswerCheck:
    """Check the answers of a run from some of its objects.

    Storage must be configured for the run.

    Args:
        root: The folder of the run.
        progress: How far it is.

    Raises:
        ConfigError: If there is no run.
        OSError: If storage does not answer.
    """
    record = read_record(root)
    return check(root, record, read_answers(root), progress)


def read_answers(root: str) -> AnswerSample:
    """Return the answers of some objects of a run; objects that cannot be read are left out."""
    sample = AnswerSample()
    objects = chain.from_iterable(unit_objects(run) for run in read.runs(root))
    for item in read.spread_stream(objects, _OBJECTS):
        for row in first_rows(item.path, _ROWS) or ():
            sample.add(row)
    return sample


def check(root: str, record: RunRecord, sample: AnswerSample, progress: RunProgress) -> AnswerCheck:
    """Check answers.

    Args:
        root: The folder of the run.
        record: Its record.
        sample: Some of its answers.
        progress: How far the run is.
    """
    config = record.config
    card = record.model_card or _card(config)
    faults = warnings(config, sample)
    next_step = _next_step(root, config, card, faults, progress)
    confidence = ""
    if sample.confidences:
        confidence = describe_confidence(config, record.calibrated_on)
    return AnswerCheck(
        describe_model(config, card), confidence, [fault.text for fault in faults], next_step
    )


# ------------------------------------------------------------------------
# the model


def describe_model(config: Tree, card: Tree) -> str:
    """Return which model answered, and whether it was trained for that.

    Args:
        config: The configuration of the run, as recorded.
        card: The card beside the weights; empty without one.
    """
    model = config.get("model") or {}
    name = clean(str(model.get("adapter") or model.get("name") or "unknown"), 120)
    if name == "fake":
        return "fake: the answers are made up, no model read the documents"
    endpoint = model.get("endpoint")
    if endpoint:
        return f"{name} at {clean(str(endpoint.get('url')), 120)}, not trained for this task"
    if card.get("method"):
        documents = card.get("documents")
        trained = "trained for this task"
        if documents:
            trained += f" on {count(documents)} documents"
        if card["method"] != (config.get("decoding") or {}).get("method"):
            trained += f", but for decoding.method {card['method']}, not for this run's method"
        return f"{name}, {trained}"
    if name == EMBEDDED:
        return f"{name}, the embedded toy: small, and not trained for this task"
    return f"{name}, not trained for this task"


_UNCALIBRATED = (
    "uncalibrated: how probable the model finds its own text, not how often it is right "
    "(`raypd calibrate`)"
)


def describe_confidence(config: Tree, calibrated_on: int = -1) -> str:
    """Return what the confidences of a run are.

    Args:
        config: The configuration of the run, as recorded.
        calibrated_on: Labelled values of the calibration with which the run began: 0 without one,
            -1 if it is not known; then the file beside the weights counts.
    """
    if calibrated_on > 0:
        return f"calibrated on {count(calibrated_on)} labelled values"
    if calibrated_on == 0:
        return _UNCALIBRATED
    method = str((config.get("decoding") or {}).get("method") or "")
    calibration = None
    try:
        calibration = calibration_of(ModelConfig.model_validate(config.get("model")), method)
    except (UserError, ValueError, OSError):
        return ""
    if calibration is None:
        return _UNCALIBRATED
    return f"calibrated on {count(calibration.values)} labelled values"


def _card(config: Tree) -> Tree:
    """Return the card beside the weights of a record that holds none."""
    return card_of(config.get("model"), str((config.get("task") or {}).get("kind") or ""))


# ------------------------------------------------------------------------
# answers that say nothing


@dataclass(frozen=True)
class AnswerFault:
    """A fault of an attribute's answers."""

    # null, cut, endless (a number that was cut), ambiguous, name (of the category or attribute),
    # copied, same, year, elsewhere (not in the documents) or confidence
    kind: str
    text: str
    category: str = ""
    attribute: str = ""


def faults_of(root: str) -> list[AnswerFault]:
    """Return what is wrong with the answers of each attribute of a run.

    Storage must be configured for the run.

    Args:
        root: The folder of the run.

    Raises:
        ConfigError: If there is no run.
        OSError: If storage does not answer.
    """
    return warnings(read_record(root).config, read_answers(root))


def warnings(config: Tree, sample: AnswerSample) -> list[AnswerFault]:
    """Return what is wrong with the answers of each attribute.

    Args:
        config: The configuration of the run, as recorded.
        sample: Some of its answers.
    """
    task = config.get("task") or {}
    categories = task.get("categories") or {}
    faults = []
    for (category, name), attribute in sorted(sample.attributes.items()):
        schema = categories.get(category) or {}
        label = repr(name)
        if len(categories) > 1:
            label = f"{name!r} of {category!r}"
        keys: Tree = {}
        for candidate in schema.get("attributes") or ():
            if isinstance(candidate, Mapping) and candidate.get("name") == name:
                keys = candidate
        prompt_texts = [
            str(keys.get("description") or ""),
            str(schema.get("description") or ""),
            str(task.get("instruction") or ""),
            name,
        ]
        for fault in _faults(label, attribute, keys, prompt_texts, config):
            faults.append(replace(fault, category=category, attribute=name))
    return faults


def _faults(
    label: str,
    attribute: SampleAttribute,
    keys: Tree,
    prompt_texts: Sequence[str],
    config: Tree,
) -> list[AnswerFault]:
    """Return what is wrong with the answers of one attribute."""
    total = attribute.statuses.total()
    if total < _FEW:
        return []
    faults = []
    nulls = attribute.statuses["null"]
    cut = attribute.statuses["truncated"]
    if nulls >= _NULL * total:
        of = "all" if nulls == total else f"{count(nulls)} of"
        faults.append(AnswerFault("null", f"{label} is null in {of} {count(total)} documents"))
    if cut >= _CUT * total:
        limit = (config.get("decoding") or {}).get("max_value_tokens")
        faults.append(
            AnswerFault(
                "endless" if keys.get("type") in _NUMBER_TYPES else "cut",
                f"{label} was cut in {count(cut)} of {count(total)} documents: its values are "
                f"longer than decoding.max_value_tokens ({limit}), or the model does not stop "
                "where a value ends, which a trained or a larger model does",
            )
        )
    ambiguous = attribute.statuses["ambiguous"]
    if ambiguous >= max(2, _AMBIGUOUS * total):
        faults.append(
            AnswerFault(
                "ambiguous",
                f"{label} is ambiguous in {count(ambiguous)} of {count(total)} documents, and so "
                "null: the model wrote several numbers, or one that is only a part of a number or "
                "of a range in the document; bounds (minimum, maximum) may help, or a description "
                "that says which number is meant (docs/values.md#misread-numbers)",
            )
        )
    if keys.get("type") not in _CHOICE_TYPES:
        named = _named(attribute, keys)
        if named.total() > max(1, _NAME * total):
            faults.append(AnswerFault("name", f"{label} {_of_names(named, attribute, total)}"))
        copied = _copied(attribute.texts, attribute.texts_elsewhere, prompt_texts)
        if faults and faults[-1].kind == "name":
            copied -= named
        if copied and copied.total() >= max(2, _COPIED * total):
            text = copied.most_common(1)[0][0]
            faults.append(
                AnswerFault(
                    "copied",
                    f"{label} is copied from its description or the prompt in "
                    f"{count(copied.total())} of {count(total)} documents ({_shown(text)})",
                )
            )
    same = _same(attribute, keys, total)
    if same is not None and not _has_fault(faults, "copied", "name"):
        faults.append(AnswerFault("same", f"{label} {same}"))
    if keys.get("type") in _DATE_TYPES:
        years = _unlikely_years(attribute)
        if years is not None:
            faults.append(AnswerFault("year", f"{label} {years}"))
    is_fake = (config.get("model") or {}).get("name") == "fake"
    if not is_fake and not _has_fault(faults, "cut", "copied", "name", "same"):
        elsewhere = _elsewhere(attribute, keys)
        if elsewhere is not None:
            faults.append(AnswerFault("elsewhere", f"{label} {elsewhere}"))
    if _is_constant(attribute.confidences):
        faults.append(
            AnswerFault(
                "confidence",
                f"{label} has nearly the same confidence everywhere ({attribute.median}), which "
                "does not tell right values from wrong ones",
            )
        )
    return faults


def _same(attribute: SampleAttribute, keys: Tree, total: int) -> str | None:
    """Return that most answers of an attribute are one value; None if they are not."""
    if not attribute.texts:
        return None
    text, documents = attribute.texts.most_common(1)[0]
    limit = _SAME
    if keys.get("type") in _CHOICE_TYPES:
        limit = _SAME_OF_MANY if len(keys.get("values") or ()) > 2 else _SAME_OF_TWO
    if documents < max(_FEW, limit * total):
        return None
    of = "all" if documents == total else f"{count(documents)} of"
    return f"has the same value in {of} {count(total)} documents ({_shown(text)})"


def _has_fault(faults: Sequence[AnswerFault], *kinds: str) -> bool:
    return any(fault.kind in kinds for fault in faults)


def _named(attribute: SampleAttribute, keys: Tree) -> Counter[str]:
    """Return the values that are the name of the category or of the attribute, with their counts.

    Those that stand in their documents are left out. Nothing says where the items of a list stand.
    """
    named: Counter[str] = Counter()
    if keys.get("many"):
        return named
    names = {_normal(attribute.category), _normal(attribute.name)}
    for text, documents in attribute.texts_elsewhere.items():
        if _normal(text) in names - {""}:
            named[text] = documents
    return named


def _of_names(named: Counter[str], attribute: SampleAttribute, total: int) -> str:
    """Return that many answers of an attribute are the name of its category, or its own."""
    text, _ = named.most_common(1)[0]
    whose = "the attribute's own name"
    if _normal(text) == _normal(attribute.category):
        whose = "the name of its category"
    return (
        f"is {_shown(text)} in {count(named.total())} of {count(total)} documents: this is "
        f"{whose}, which the model copies from the prompt"
    )


def _unlikely_years(attribute: SampleAttribute) -> str | None:
    """Return that many dates of an attribute are of years that few documents have; None if not."""
    unlikely: Counter[str] = Counter()
    for text, documents in attribute.texts.items():
        if not _FIRST_YEAR <= text[:4] <= _LAST_YEAR:
            unlikely[text] = documents
    dates = attribute.texts.total()
    if dates < _FEW or unlikely.total() <= _YEAR * dates:
        return None
    text = unlikely.most_common(1)[0][0]
    return (
        f"has years before {_FIRST_YEAR} or after {_LAST_YEAR} in {count(unlikely.total())} of "
        f"{count(dates)} dates ({_shown(text)})"
    )


def _elsewhere(attribute: SampleAttribute, keys: Tree) -> str | None:
    """Return that many values of an attribute are not in their documents; None if they are."""
    limit = _TEXTS_ELSEWHERE
    right_if = "you asked for a paraphrase"
    is_number = keys.get("type") in _NUMBER_TYPES
    if is_number:
        limit = _NUMBERS_ELSEWHERE
        right_if = "the documents write them in words or in another unit, or if they are judgements"
    elif keys.get("type") != "text":
        return None
    if keys.get("many") or (is_number and keys.get("values")):
        return None
    values = attribute.texts.total()
    elsewhere = attribute.texts_elsewhere
    if values < _FEW or elsewhere.total() <= max(1, limit * values):
        return None
    text = elsewhere.most_common(1)[0][0]
    shown = f"such as {text}" if is_number else _shown(text)
    return (
        f"has values that do not occur in their documents: {share(elsewhere.total(), values)} of "
        f"{count(values)} ({shown}); this is right only if {right_if}"
    )


def _copied(
    texts: Counter[str], texts_elsewhere: Counter[str], prompt_texts: Sequence[str]
) -> Counter[str]:
    """Return the values that stand in the prompt and not in their documents, with their counts."""
    copied: Counter[str] = Counter()
    for text, documents in texts_elsewhere.items():
        if is_copy(text, prompt_texts):
            copied[text] = min(documents, texts[text])
    return copied


def is_copy(value: str, prompt_texts: Iterable[str]) -> bool:
    """Return whether a value is copied from one of some texts of the prompt.

    Args:
        value: A value that does not stand in its document.
        prompt_texts: Descriptions and other texts; empty ones do not count.
    """
    normal = _normal(value)
    if len(normal) < 4:
        return False
    return any(_stands_in(normal, _normal(text)) for text in prompt_texts if text)


def _stands_in(value: str, prompt: str) -> bool:
    """Return whether a value is a part of a prompt's text, by whole words, or has all of it."""
    if f" {value} " in f" {prompt} ":
        return True
    # A model also wraps a description in a sentence of its own.
    return len(prompt.split()) > 1 and f" {prompt} " in f" {value} "


# The same descriptions are compared with every value.
@lru_cache(maxsize=1024)
def _normal(text: str) -> str:
    """Return the words of a text in lower case."""
    return " ".join(re.findall(r"\w+", text.replace("'", "").casefold()))


def _shown(text: str) -> str:
    return json.dumps(clean(text, _SHOWN_CHARACTERS), ensure_ascii=False)


def _is_constant(confidences: Sequence[float]) -> bool:
    """Return whether confidences are nearly the same, and none that may be right everywhere."""
    if len(confidences) < 2 * _FEW:
        return False
    ordered = sorted(confidences)
    margin = len(ordered) // 20
    low = ordered[margin]
    high = ordered[-1 - margin]
    return high - low < _CONSTANT_WIDTH and high < _SURE


# ------------------------------------------------------------------------
# what to do next


def _next_step(
    root: str, config: Tree, card: Tree, faults: Sequence[AnswerFault], progress: RunProgress
) -> str:
    """Return the one step that fits the state of a run; "" while it goes on well."""
    for_answers = _step_for_answers(root, config, card, faults, progress)
    if progress.state not in ("complete", "running"):
        return "; then ".join(filter(None, [_RESUME, for_answers]))
    if for_answers or progress.state == "running":
        return for_answers
    return _step_after_run(root, config, card, progress)


def _step_for_answers(
    root: str, config: Tree, card: Tree, faults: Sequence[AnswerFault], progress: RunProgress
) -> str:
    """Return the step that mends what is wrong with the answers; "" if nothing is."""
    model = config.get("model") or {}
    shown_root = clean(root)
    kinds = {fault.kind for fault in faults}
    degenerate = kinds & {"same", "copied", "name", "null", "endless", "year"}
    if model.get("name") == "fake":
        return (
            "choose a model that reads the documents: `raypd init DATA --for laptop` (or gpu, api)"
        )
    if progress.documents and progress.failed == progress.documents:
        return f"`raypd errors {shown_root}` says why no document was answered"
    task = config.get("task") or {}
    if degenerate and task.get("kind") == "extraction" and not card:
        return _better_model(root, config)
    is_toy = model.get("name") == EMBEDDED and not card
    if kinds == {"cut"} and not is_toy:
        # The toy repeats itself where it has nothing to say.
        limit = (config.get("decoding") or {}).get("max_value_tokens") or 0
        return (
            f"for longer values, run the same command with decoding.max_value_tokens={2 * limit} "
            "and a new output.path"
        )
    return ""


def _step_after_run(root: str, config: Tree, card: Tree, progress: RunProgress) -> str:
    """Return what to do with the answers of a complete run, with which nothing is wrong."""
    model = config.get("model") or {}
    task = config.get("task") or {}
    shown_root = clean(root)
    slow = progress.documents < _SLOW_PER_SECOND * progress.seconds
    on_cpu = not progress.on_gpu and model.get("endpoint") is None
    if slow and on_cpu and progress.seconds > _LONG_SECONDS:
        return "use a GPU: `raypd estimate CONFIG` says which one, and what it takes"
    if task.get("kind") != "extraction":
        return f"`raypd evaluate {shown_root} LABELS` says how many answers are right"
    known = known_labels(root, config)
    has_page = storage.exists(storage.join(root, layout.EVALUATION))
    page = storage.join(shown_root, layout.EVALUATION)
    if known is not None and card:
        # The model is the result of a fit or of a training already.
        if has_page:
            return f"{page} shows which values were wrong"
        labels = clean(known.path) or "LABELS"
        return f"`raypd evaluate {shown_root} {labels}` says how many values are right"
    if known is not None:
        labels = clean(known.path)
        unlabelled = progress.documents - progress.failed - known.documents
        then = fit_step(shown_root, labels, known.documents, unlabelled, known.column)
        if has_page:
            return f"{page} shows which values were wrong; {then}"
        return (
            f"`raypd evaluate {shown_root} {labels or 'LABELS'}` says how many values are right; "
            f"{then}"
        )
    if model.get("name") == EMBEDDED and not card:
        return _better_model(root, config)
    return (
        f"`raypd review {shown_root}` lets you correct some values; then `raypd evaluate` says how "
        "many are right"
    )


def _better_model(root: str, config: Tree) -> str:
    """Return what helps a model that was not trained for the task."""
    task = config.get("task") or {}
    known = known_labels(root, config)
    fit = ""
    if known is not None and known.are_enough:
        fit = fit_command(clean(known.path), known.column)
    if (config.get("model") or {}).get("name") == EMBEDDED:
        larger = (
            f"use a larger model (model.name={LARGER}) or a server (`raypd init DATA --for api`)"
        )
        if fit:
            return f"{larger}; or train this one on your labels: {fit}"
        review = f"`raypd review {clean(root)}` makes labels for `raypd fit`"
        return f"{larger}; or train this one: {review}"
    if not task.get("examples"):
        return (
            "show the model three documents with their correct values (task.examples; "
            "docs/start.md), or choose a larger model"
        )
    if fit:
        return f"{fit} trains a model on your labels"
    return f"`raypd review {clean(root)}` makes labels, and `raypd fit` trains a model on them"


def lines(answer_check: AnswerCheck) -> list[str]:
    """Return a check as lines for a terminal or a notebook, without the next step."""
    text = [f"model: {answer_check.model}"]
    if answer_check.confidence:
        text.append(f"confidence: {answer_check.confidence}")
    text += [f"warning: {warning}" for warning in answer_check.warnings]
    return text
