"""Creates the RayJob of tonight from a template: python submit_nightly.py TEMPLATE

Runs in the pod of nightly-cronjob.yaml with the rights of its service account. ${RAYPD_RUN} in the
template becomes nightly-YYYY-MM-DD (UTC), so the API server refuses a second run of the same night
by its name; that is no error. Of the template's entrypoint, made for single runs, the job becomes
jobs/nightly.py and the output the folder of all nights.
"""

from __future__ import annotations

import datetime
import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

import yaml

OUTPUT = "/shared/nightly"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def tonights_job(template: str, today: datetime.date) -> dict:
    """The RayJob of one night.

    Raises ValueError when the template has no ${RAYPD_RUN} or is no RayJob.
    """
    if "${RAYPD_RUN}" not in template:
        raise ValueError("the template has no ${RAYPD_RUN}: fill it with --keep RAYPD_RUN")
    run = f"nightly-{today.isoformat()}"
    job = yaml.safe_load(template.replace("${RAYPD_RUN}", run))
    if not isinstance(job, dict) or job.get("kind") != "RayJob":
        raise ValueError("the template is not a RayJob")
    command = job["spec"]["entrypoint"].replace("jobs/extract.py", "jobs/nightly.py")
    job["spec"]["entrypoint"] = command.replace(
        f"output.path=/shared/runs/{run}", f"output.path={OUTPUT}"
    )
    return job


def create(job: dict, server: str, token: str, context: ssl.SSLContext | None = None) -> bool:
    """Creates the job; False when one of its name exists.

    Raises urllib.error.HTTPError for any other refusal.
    """
    url = f"{server}/apis/{job['apiVersion']}/namespaces/{job['metadata']['namespace']}/rayjobs"
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(job).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60, context=context):
            return True
    except urllib.error.HTTPError as error:
        if error.code == 409:
            return False
        raise


def main() -> int:
    try:
        job = tonights_job(
            Path(sys.argv[1]).read_text(), datetime.datetime.now(datetime.UTC).date()
        )
        host, port = (
            os.environ["KUBERNETES_SERVICE_HOST"],
            os.environ.get("KUBERNETES_SERVICE_PORT", "443"),
        )
        server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
        created = create(job, server, (ACCOUNT / "token").read_text().strip(), context)
    except urllib.error.HTTPError as error:
        print(
            f"submit_nightly.py: the API server says {error.code}: {error.read().decode()}",
            file=sys.stderr,
        )
        return 1
    except (OSError, ValueError, IndexError, KeyError) as error:
        print(f"submit_nightly.py: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"RayJob {job['metadata']['name']} {'created' if created else 'exists already'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
