"""What to do next with the labels of a run: only commands that work."""

import shlex

from raypd.config import LABELS_NEEDED


def fit_step(run: str, labels: str, labelled: int, unlabelled: int, column: str = "target") -> str:
    """Return the step towards a better model: a fit, or more labels if they are too few for one.

    Args:
        run: The folder of the run.
        labels: The file of labels.
        labelled: The number of labelled documents.
        unlabelled: Documents of the run that have an answer and no labels yet.
        column: The column of the labels.
    """
    if labelled < LABELS_NEEDED:
        more = more_labels(run, LABELS_NEEDED - labelled, unlabelled)
        return f"{more}, from which `raypd fit` makes a better model"
    words = [f"fit.labels={labels}"]
    if column != "target":
        words.append(f"training.labels_column={column}")
    return f"`raypd fit CONFIG {shlex.join(words)}` trains a better or cheaper model on the labels"


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
