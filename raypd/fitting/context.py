"""What every step of a fit shares: its folder, its limits, and the configurations of its runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypd import storage
from raypd.billing import BudgetReached, book
from raypd.cluster import run_extract
from raypd.config import RunConfig, with_changes
from raypd.errors import RunError
from raypd.run import Manifest, layout
from raypd.text import Say
from raypd.verify import retry_errors

# The runs that label or are scored need every value, however unsure.
UNCALIBRATED: dict[str, Any] = {"output.min_confidence": 0.0, "model.calibration": "none"}
# A plain file is no table with versions, and needs no reader.
PLAIN_FILE: dict[str, Any] = {"input.version": None, "input.reader": None}
_MIN_BUDGET = 1e-6  # USD; 0 would not be a budget


@dataclass(frozen=True)
class FitContext:
    """The configuration of a fit, its folder, and how it talks to the user."""

    config: RunConfig
    folder: str
    verbose: bool
    say: Say
    ends: float | None = None  # unix second of the deadline

    def part(self, name: str) -> str:
        """Return the path of the labelled documents of "train", "validation" or "test"."""
        return storage.join(self.folder, f"{name}.jsonl")

    def spent(self) -> float:
        """Return the USD that all sessions of all runs and trainings below the folder cost."""
        outputs = set()
        for ledger in Path(self.folder).rglob(layout.LEDGER):
            if ledger.is_dir():
                outputs.add(str(ledger.parent))
        # A retry's bill lies in two folders, and counts once.
        usd_by_session = {}
        for output in outputs:
            for bill in book.bills(output):
                usd_by_session[bill.session] = bill.usd
        return sum(usd_by_session.values())

    def limited(self, config: RunConfig, *, retries: bool = False) -> RunConfig:
        """Return a configuration of a run whose budget is what is left of the fit's.

        Args:
            config: The configuration of a run or a training.
            retries: Whether it is for a retry. A run counts its own earlier sessions against its
                budget, and a retry does not.
        """
        budget = self.config.cost.budget_usd
        if budget is None:
            return config
        remaining = budget - self.spent()
        if not retries:
            own_bills = book.bills(storage.absolute(config.output.path))
            remaining += sum(bill.usd for bill in own_bills)
        return with_changes(config, {"cost.budget_usd": max(remaining, _MIN_BUDGET)})


def extract(context: FitContext, config: RunConfig) -> Manifest:
    """Run a model over documents.

    What a server did not answer is retried now, and whenever the same command is repeated.

    Args:
        context: The fit.
        config: The configuration of the run.

    Raises:
        BudgetReached: If the budget is spent or the deadline is over.
        UserError: Whatever else a run raises.
    """
    manifest = run_extract(context.limited(config), verbose=context.verbose)
    if manifest.failed and config.model.endpoint is not None:
        try:
            retry_errors(context.limited(config, retries=True), verbose=context.verbose)
        except BudgetReached:
            raise
        except RunError as error:  # too many documents have failed again
            context.say(str(error))
        # A second run decodes nothing; it counts the answers of the retry.
        manifest = run_extract(config, verbose=context.verbose)
    return manifest


def is_run(path: str) -> bool:
    """Return whether a path is the folder of a run, and not a file of labelled documents."""
    return storage.exists(storage.join(storage.absolute(path), layout.RUN))


def teacher_keys(config: RunConfig) -> dict[str, Any]:
    """Return the keys that turn a configuration into the teacher's.

    Unless the user's keys say otherwise, the teacher decodes by a method that works with weights
    that were not trained for it, or with a server.
    """
    keys = config.fit.teacher or {}
    if "model.name" not in keys:
        return dict(keys)
    method = "guided"
    if any(key.startswith("model.endpoint") for key in keys):
        method = "autoregressive"
    elif keys["model.name"] == "fake":
        method = "hyper_parallel"
    return {"decoding.method": method, "model.adapter": None, "model.revision": None, **keys}


def teacher_config(config: RunConfig, documents: str, output: str) -> RunConfig:
    """Return the configuration of the teacher's run.

    Args:
        config: The configuration of the fit.
        documents: The file of documents to label.
        output: The folder of the run.
    """
    keys = {
        **UNCALIBRATED,
        **teacher_keys(config),
        **input_keys(documents),
        "output.path": output,
    }
    return with_changes(config, keys)


def input_keys(documents: str) -> dict[str, Any]:
    """Return the keys that read a file which a fit wrote in place of the corpus."""
    return {
        "input.path": documents,
        "input.format": "jsonl",
        "input.encoding": "utf-8",
        "input.id_column": "id",
        **PLAIN_FILE,
        # The file holds the text of HTML columns, and not their markup.
        "input.html_columns": [],
    }
