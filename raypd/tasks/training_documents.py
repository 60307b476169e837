"""Records which documents a model was trained or validated on, in a file next to its weights.

The file contains digests of the documents' ids and texts, and not the texts themselves. An
evaluation leaves these documents out, because their answers say little about documents that the
model has not seen.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from raypd import storage
from raypd.errors import ModelError
from raypd.run import layout
from raypd.tasks.base import Document
from raypd.tasks.documents import text_of, words_of

FILE = "trained_on.json"
_DIGEST_LENGTH = 16
# The files of a fit, whose folder contains the weights of its candidates.
_FIT_PARTS = ("train.jsonl", "validation.jsonl")
_MOST_PARENTS = 6


@dataclass
class TrainedOn:
    """Digests of the documents that a model was trained or validated on."""

    ids: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    # It is empty if the texts are not known.
    text_columns: list[str] = field(default_factory=list)

    def among(self, rows: Mapping[str, Mapping[str, Any]], text_columns: Sequence[str]) -> set[str]:
        """Return which labelled documents the model was trained or validated on.

        A document is one of them if its id or its text is among theirs. If the labels contain texts
        and none of the texts is, the labels are of other documents that have the same ids by
        chance, such as 1, 2, 3.

        Args:
            rows: The labels by document id, which may also contain columns of the input.
            text_columns: The columns of the documents' texts; empty if labels would contain them in
                another form, such as HTML.

        Returns:
            The ids of the documents.
        """
        ids = set(self.ids)
        with_known_id = {key for key in rows if _digest(key) in ids}
        if not text_columns or list(text_columns) != self.text_columns:
            return with_known_id
        texts = {}
        for key, row in rows.items():
            if all(name in row for name in text_columns):
                digest = _text_digest(Document(0, key, dict(row)), text_columns)
                if digest:
                    texts[key] = digest
        known_texts = set(self.texts)
        with_known_text = {key for key, digest in texts.items() if digest in known_texts}
        if with_known_text:
            return with_known_id | with_known_text
        return with_known_id - texts.keys()

    def merge(self, other: "TrainedOn") -> None:
        """Add the documents of another training."""
        if not self.ids:
            self.text_columns = other.text_columns
        elif other.ids and self.text_columns != other.text_columns:
            # Their texts cannot be compared, so only the ids count.
            self.text_columns = []
        self.ids = sorted({*self.ids, *other.ids})
        self.texts = sorted({*self.texts, *other.texts})

    def write(self, folder: Path) -> None:
        """Write the digests into the folder of the weights."""
        Path(folder, FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def trained_on(documents: Iterable[Document], text_columns: Sequence[str]) -> TrainedOn:
    """Return what to store about the documents of a training.

    Args:
        documents: The documents of training and validation.
        text_columns: The columns of their texts.
    """
    ids = set()
    texts = set()
    for document in documents:
        ids.add(_digest(document.id))
        texts.add(_text_digest(document, text_columns))
    return TrainedOn(sorted(ids), sorted(texts - {""}), list(text_columns))


def trained_on_of(model: Mapping[str, Any]) -> TrainedOn:
    """Return the documents that a model was trained or validated on, as far as they are known.

    Args:
        model: The section `model` of a configuration.

    Raises:
        ModelError: The file next to the weights cannot be read.
    """
    found = TrainedOn()
    for folder in (model.get("adapter"), model.get("name")):
        if not folder or not (storage.is_remote(folder) or Path(folder).is_dir()):
            continue
        found.merge(_beside(folder))
    return found


def _beside(folder: str) -> TrainedOn:
    """Return the contents of the file next to the weights.

    Weights that an earlier version trained have no such file. If they are in the folder of a fit,
    that fit's documents count.
    """
    path = storage.join(folder, FILE)
    try:
        if storage.exists(path):
            read = TrainedOn(**json.loads(storage.read(path)))
            if not all(isinstance(value, list) for value in asdict(read).values()):
                raise TypeError("it holds no lists of digests")
            return read
        if not storage.is_remote(folder):
            return _of_fit(Path(folder))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ModelError(
            f"{path}: which documents the model was trained on cannot be read ({error})"
        ) from None
    return TrainedOn()


def _of_fit(folder: Path) -> TrainedOn:
    """Return the ids of the documents of the fit that has a candidate's weights in a folder."""
    ids = set()
    for parent in list(folder.resolve().parents)[:_MOST_PARENTS]:
        if (parent / layout.FIT).is_file():
            for name in _FIT_PARTS:
                part = parent / name
                lines = part.read_text(encoding="utf-8").splitlines() if part.is_file() else []
                for line in lines:
                    ids.add(_digest(str(json.loads(line)["id"])))
            break
    return TrainedOn(sorted(ids))


def _digest(text: str) -> str:
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.sha256(data).hexdigest()[:_DIGEST_LENGTH]


def _text_digest(document: Document, columns: Sequence[str]) -> str:
    """Return a digest of a document's words; "" if it has none."""
    try:
        words = words_of(text_of(document, list(columns)))
    except ValueError:
        return ""
    return _digest(words) if words else ""
