"""What to do next with the labels of a run: only commands that work."""

import html
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from raypd import storage
from raypd.config import LABELS_NEEDED
from raypd.dataset import label_rows
from raypd.errors import InputError
from raypd.run import layout

# The file of labels of a page of `raypd evaluate`, and their column.
_OF_PAGE = re.compile('<main data-labels="([^"]*)" data-column="([^"]*)">')


@dataclass(frozen=True)
class KnownLabels:
    """Labels that a run's folder or its configuration names.

    Attributes:
        path: The file; "" if the configuration names it.
        documents: The documents that it has; LABELS_NEEDED stands for any larger number.
        column: The column of the labels.
    """

    path: str
    documents: int
    column: str = "target"

    @property
    def are_enough(self) -> bool:
        """Whether a fit can be made from them."""
        return self.documents >= LABELS_NEEDED


def known_labels(root: str, config: Mapping[str, Any]) -> KnownLabels | None:
    """Return the labels that a fit would best be made from; None if there are none.

    These are the labels of the configuration, those of the last evaluation, or those of
    `raypd review`. The first two count only if they are enough, because a review adds to its own.

    Args:
        root: The folder of the run.
        config: The configuration of the run, as recorded.
    """
    configured = (config.get("fit") or {}).get("labels")
    if configured and _are_configured(storage.absolute(configured)):
        return KnownLabels("", LABELS_NEEDED)
    path, column = labels_of_page(storage.join(root, layout.EVALUATION))
    if path and _count_labels(path) >= LABELS_NEEDED:
        return KnownLabels(path, LABELS_NEEDED, column)
    path = storage.join(root, layout.LABELS)
    documents = _count_labels(path)
    return KnownLabels(path, documents) if documents else None


def labels_of_page(path: str) -> tuple[str, str]:
    """Return the file of labels that a page of `raypd evaluate` is of, and their column.

    Both are "" if there is no page, or it does not say.

    Args:
        path: The page.
    """
    if not storage.exists(path):
        return "", ""
    found = _OF_PAGE.search(storage.read(path).decode(errors="replace"))
    if found is None:
        return "", ""
    return html.unescape(found[1]), html.unescape(found[2])


def _are_configured(labels: str) -> bool:
    """Return whether fit.labels has labels: enough, or those of a folder, which are not counted."""
    if storage.exists(labels) and not storage.is_folder(labels):
        return _count_labels(labels) >= LABELS_NEEDED
    try:
        next(storage.find(labels))
    except InputError:
        return False
    return True


def _count_labels(path: str) -> int:
    """Return how many documents a file of labels has, up to LABELS_NEEDED.

    It is 0 for a file that does not exist or cannot be read.
    """
    try:
        return sum(1 for _ in islice(label_rows(path, None), LABELS_NEEDED))
    except InputError:
        return 0


def fit_step(run: str, labels: str, labelled: int, unlabelled: int, column: str = "target") -> str:
    """Return the step towards a better model: a fit, or more labels if they are too few for one.

    Args:
        run: The folder of the run.
        labels: The file of labels; "" if CONFIG names it.
        labelled: The number of labelled documents.
        unlabelled: Documents of the run that have an answer and no labels yet.
        column: The column of the labels.
    """
    if labelled < LABELS_NEEDED:
        more = more_labels(run, LABELS_NEEDED - labelled, unlabelled)
        return f"{more}, from which `raypd fit` makes a better model"
    return f"{fit_command(labels, column)} trains a better or cheaper model on the labels"


def fit_command(labels: str, column: str = "target") -> str:
    """Return the command of a fit.

    Args:
        labels: The file of labels; "" if CONFIG names it.
        column: The column of the labels.
    """
    words = ["raypd", "fit", "CONFIG"]
    if labels:
        words.append(f"fit.labels={labels}")
        if column != "target":
            words.append(f"training.labels_column={column}")
    return f"`{shlex.join(words)}`"


def more_labels(run: str, needed: int, unlabelled: int) -> str:
    """Return how to get more labelled documents.

    Args:
        run: The folder of the run.
        needed: The number of documents to label.
        unlabelled: Documents of the run that have an answer and no labels yet.
    """
    if unlabelled >= needed:
        return f"`raypd review {shlex.quote(run)}` for {needed} more labels"
    missing = f"extract and label {needed - unlabelled} more documents"
    if unlabelled > 0:
        return f"`raypd review {shlex.quote(run)}` for {unlabelled} more labels, then {missing}"
    return f"all answered documents of this run have labels: {missing}"
