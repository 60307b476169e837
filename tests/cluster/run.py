"""A run with the fake engine in a process of its own, to be killed: python -m tests.cluster.run CONFIG [key=value]"""

import sys

from raypd.cli.main import report_errors
from raypd.cluster.driver import run_extract
from raypd.config.load import load_config
from tests.cluster import fakes

if __name__ == "__main__":
    with report_errors():
        result = run_extract(load_config(sys.argv[1], sys.argv[2:]), build=fakes.build)
        print(f"documents={result.documents} ok={result.ok} failed={result.failed}")
