"""What a session has read ahead of its workers, as stored in the folder of its run."""

from dataclasses import dataclass, field


@dataclass
class ReadingRecord:
    """reading/<session>.json: what the readers of a session did.

    Attributes:
        session: The id of the session.
        units: Units that were read ahead.
        bytes: Bytes of their documents in the object store.
        reader_seconds: Seconds that readers took for them.
        read_by_workers: Units that were to be read ahead and were read by workers, by the reason.
        operators: Ray Data's statistics of its operators in the last execution.
    """

    session: str = ""
    units: int = 0
    bytes: int = 0
    reader_seconds: float = 0.0
    read_by_workers: dict[str, int] = field(default_factory=dict)
    operators: str = ""
