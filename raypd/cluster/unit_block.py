"""Blocks of documents, which a reader makes and a worker fetches."""

import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray

from raypd.config import RunConfig
from raypd.dataset import read_unit
from raypd.run import Unit
from raypd.tasks import Document

_FETCH_SECONDS = 30.0  # to wait for a block in a worker

# Why a worker reads a unit itself, as the continuation of a message after "because".
READING_FAILED = "reading ahead failed"
BLOCK_LOST = "the block with their documents was lost"
STREAM_STALLED = "the readers had delivered nothing for a long time"
STREAM_FAILED = "the process of a reader died"
READERS_BEHIND = "the readers were too slow (cluster.readers allows more of them)"


@dataclass(frozen=True)
class UnitBlock:
    """Where the documents of a unit are in the object store."""

    reference: Any  # to the block
    index: int  # of the unit in the block
    node: str = ""  # where the block was made; "" if unknown


def read_block(units: Sequence[Unit], config: RunConfig, wanted_units: int) -> pa.Table:
    """Read the first units of a block into a table with one row.

    If a unit cannot be read, its documents are null. The worker then reads it once more, because it
    knows how to retry, and how to report an error.

    Args:
        units: The units of the block.
        config: The configuration of the run.
        wanted_units: How many of the units to read; the documents of the others are null, because
            workers read them.
    """
    documents: list[bytes | None] = [None] * len(units)
    for index, unit in enumerate(units[:wanted_units]):
        try:
            documents[index] = pickle.dumps(read_unit(unit, config))
        except Exception as error:
            _log(unit, f"could not be read ahead: {type(error).__name__}: {error}")
    return pa.table(
        {
            "units": pa.array([[unit.id for unit in units]], pa.list_(pa.string())),
            "documents": pa.array([documents], pa.list_(pa.large_binary())),
        }
    )


def fetch_documents(unit: Unit, block: UnitBlock) -> tuple[list[Document] | None, str]:
    """Return the documents of a unit.

    Returns:
        (the documents, ""); or (None, why the worker has to read the unit itself).
    """
    try:
        table: pa.Table = ray.get(block.reference, timeout=_FETCH_SECONDS)
        unit_id = table["units"][0][block.index].as_py()
        pickled = table["documents"][0][block.index].as_py()
    except Exception as error:
        # Whatever happened to the block, the input still exists.
        _log(unit, f"its block is lost: {type(error).__name__}: {error}")
        return None, BLOCK_LOST
    if unit_id != unit.id:
        _log(unit, f"its block holds {unit_id}")
        return None, BLOCK_LOST
    if pickled is None:
        return None, READING_FAILED
    documents: list[Document] = pickle.loads(pickled)
    return documents, ""


def _log(unit: Unit, event: str) -> None:
    print(f"raypd: unit {unit.id}: {event}", file=sys.stderr, flush=True)
