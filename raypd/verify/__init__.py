"""After a run: prove that nothing was lost, list failed documents, retry them, and export."""

from typing import TYPE_CHECKING

from raypd.lazy import LazyExports

if TYPE_CHECKING:
    from raypd.verify import (
        dead_letters as dead_letters,
        export as export,
        findings as findings,
        retry as retry,
        scratch as scratch,
        table_object as table_object,
        verification as verification,
    )
    from raypd.verify.retry import retry_errors as retry_errors
    from raypd.verify.scratch import Scratch as Scratch
    from raypd.verify.table_object import read_object as read_object, write_object as write_object
    from raypd.verify.verification import (
        Verification as Verification,
        add_documents as add_documents,
        add_rows as add_rows,
        verify as verify,
    )

__getattr__ = LazyExports(
    __name__,
    {
        "retry": ("retry_errors",),
        "scratch": ("Scratch",),
        "table_object": ("read_object", "write_object"),
        "verification": ("Verification", "add_documents", "add_rows", "verify"),
    },
    modules=(
        "dead_letters",
        "export",
        "findings",
        "retry",
        "scratch",
        "table_object",
        "verification",
    ),
)
