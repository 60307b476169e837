"""The names of all files and folders of a run and of nightly runs."""

from pathlib import Path

from raypd import storage
from raypd.config import RunConfig

RUN = "run.json"  # the configuration, its fingerprint and versions
LEASE = "lease.json"  # the session that works on the run
SESSIONS = "sessions"  # <id>.json: when each session began and ended
PLAN = "plan"  # <id>/<number>.parquet: the units of a plan
PLAN_TOTALS = "plan/plan.json"
PLAN_ALONE = "plan/alone.json"  # objects that must not share a unit
UNITS = "units"  # [key=value/]<unit>.parquet: the rows
# <session>-<number>.parquet: what the units contain, ten thousand per file
SUMMARIES = "summaries"
COMPACTION = "compaction.json"  # the table files that replace the units
# <compaction>/[key=value/]<number>.parquet: the rows of many units; of nightly runs also
# <night>/<number>.parquet
TABLE = "table"
TABLE_UNITS = "table_units"  # <compaction>/<number>.parquet: the units of each table file
# <unit>.txt: why a unit failed. <unit>.attempts.json: the attempts at a unit and the worker deaths
# that it caused. cards/: the faults of each GPU.
FAILURES = "failures"
RETRIES = "retries"  # <number>/: a retry of failed documents, with the layout of a run
RETRY = "retry.json"  # in the folder of a retry: the documents to retry
RETRIED = "done.json"  # in the folder of a retry: its outcome
READING = "reading"  # <session>.json: what was read ahead of the workers in a session
LEDGER = "ledger"  # <session>.json: the bill of a session
MANIFEST = "manifest.json"  # totals, written at the end
BATCH_OUTPUT = "output.jsonl"  # answers to a batch file (task.openai), written at the end
BATCH_ERRORS = "errors.jsonl"  # requests of a batch file that failed
ESTIMATE = "estimate.json"  # the result of `raypd estimate`
CURRENT = "current/files.txt"  # the files of the table, for other readers; also of nightly runs
TRAINING = "training.json"  # the result of `raypd train`
CHECKPOINTS = "checkpoints"  # training checkpoints, by learning rate
FIT = "fit.json"  # the result of `raypd fit`
LABELS = "labels.jsonl"  # what `raypd review --apply` makes of corrected values
EVALUATION = "evaluation.html"  # the page that `raypd evaluate` writes of an extraction
REPORT = "report.html"  # the page that `raypd report` writes

PUBLISHED = "published.json"  # nightly runs: the table files that other programs read
STATE = "state.json"  # nightly runs: the last successful night
INPUT = "input"  # plan/: the plan of the last night
NIGHTS = "nights"  # <night>/: a run over new and changed documents, with the files below
NIGHT = "night.json"  # the input of the night; a night that was cut off resumes if it is unchanged
ADDED = "added"  # a run over added attributes
# TABLE/<unit>.parquet: objects of the table that were rewritten
INDEX = "index"  # <number>.parquet: the index of all documents
FILES = "files.txt"  # all objects of the table after the night


def output_folder(config: RunConfig) -> str:
    """Return the absolute path of the run's folder.

    `ray job submit --working-dir` runs a job in a temporary copy of the working folder. A relative
    output path is then resolved below the home folder, because the copy is deleted after the job.
    """
    path = config.output.path
    is_relative = "://" not in path and not Path(path).expanduser().is_absolute()
    if is_relative and storage.in_copy_of_job():
        path = str(Path.home() / "raypd" / path)
    return storage.absolute(path)


def is_nightly(output: str) -> bool:
    """Return whether a folder holds nightly runs, at least one of which was successful."""
    if storage.exists(storage.join(output, RUN)):
        return False
    return storage.exists(storage.join(output, STATE))
