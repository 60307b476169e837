"""Where everything stands in the folder of a run, and in the folder of nightly runs."""

import os
from pathlib import Path

from raypd import storage
from raypd.config import RunConfig

RUN = "run.json"  # the configuration, its fingerprint and versions
LEASE = "lease.json"  # who works on the run
SESSIONS = "sessions"  # <id>.json: when each session began and ended
PLAN = "plan"  # <id>/<number>.parquet: its units
PLAN_TOTALS = "plan/plan.json"
PLAN_ALONE = "plan/alone.json"  # objects that share no unit
UNITS = "units"  # [key=value/]<unit>.parquet: the rows
# <unit>.txt: why a unit failed; <unit>.attempts.json: who is at it, its deaths; cards/: of GPUs.
FAILURES = "failures"
RETRIES = "retries"  # <number>/: a second chance for failed documents, laid out like a run
RETRY = "retry.json"  # in that folder: what it is going to try
RETRIED = "done.json"  # in that folder: what it brought
LEDGER = "ledger"  # <session>.json: the bill
MANIFEST = "manifest.json"  # totals, written at the end
BATCH_OUTPUT = "output.jsonl"  # of a batch file (task.openai): the answers, written at the end
BATCH_ERRORS = "errors.jsonl"  # and the requests that have none
ESTIMATE = "estimate.json"  # what `raypd estimate` found, before the run
TRAINING = "training.json"  # what `raypd train` did
CHECKPOINTS = "checkpoints"  # of a training, by learning rate
FIT = "fit.json"  # what `raypd fit` found
REPORT = "report.html"  # the page that `raypd report` makes

STATE = "state.json"  # of nightly runs: the last good night
CURRENT = "current/files.txt"  # the objects of the table, for readers
NIGHTS = "nights"  # <night>/: a run over what is new or changed, and:
NIGHT = "night.json"  # what the night began with; a start that finds the same goes on with it
ADDED = "added"  # a run over added attributes
TABLE = "table"  # <unit>.parquet: objects of the table that were written anew
INDEX = "index"  # <number>.parquet: what is known of every document
FILES = "files.txt"  # all objects of its table


def output_folder(config: RunConfig) -> str:
    """The run's folder, absolute.

    A relative path in a job's copy of its working folder would vanish with the copy.
    """
    path = config.output.path
    here = os.getcwd()
    # `ray job submit --working-dir`.
    in_copy = "runtime_resources/working_dir_files" in here or "_ray_pkg_" in here
    if in_copy and "://" not in path and not Path(path).expanduser().is_absolute():
        path = str(Path.home() / "raypd" / path)
    return storage.absolute(path)
