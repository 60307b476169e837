"""Where everything stands in the folder of a run, and in the folder of nightly runs."""

from __future__ import annotations

RUN = "run.json"  # the configuration, its fingerprint and versions
LEASE = "lease.json"  # who works on the run
SESSIONS = "sessions"  # <id>.json: when each session began and ended
PLAN = "plan"  # <id>/<number>.parquet: its units
PLAN_TOTALS = "plan/plan.json"
PLAN_ALONE = "plan/alone.json"  # objects that share no unit
UNITS = "units"  # [key=value/]<unit>.parquet: the rows
FAILURES = "failures"  # <unit>.txt: why a unit failed; <unit>.hand.json: rows in flight when its process died
RETRIES = "retries"  # <number>/: a second chance for failed documents, laid out like a run
LEDGER = "ledger"  # <session>.json: the bill
MANIFEST = "manifest.json"  # totals, written at the end
ESTIMATE = "estimate.json"  # what `raypd estimate` found, before the run
REPORT = "report.html"  # the page that `raypd report` makes

STATE = "state.json"  # of nightly runs: the last good night
NIGHTS = "nights"  # <night>/: a run over what is new or changed, table/, index/, files.txt
CURRENT = "current"  # files.txt: the objects of the table, for readers
