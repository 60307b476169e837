"""Create the RayJob of tonight from a template.

    python submit_nightly.py TEMPLATE

This runs in the pod of nightly-cronjob.yaml with the rights of its service account. ${RAYPD_RUN} in
the template becomes nightly-YYYY-MM-DD (UTC), so that the API server refuses a second run of the
same night by its name; this is no error. The template's entrypoint is made for single runs: the
script is replaced by jobs/nightly.py, and the output by the folder of all nights.
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
    """Return the RayJob of a night.

    Raises:
        ValueError: If the template has no ${RAYPD_RUN}, or is not a RayJob.
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
    """Create the job.

    Args:
        job: The RayJob.
        server: The URL of the API server.
        token: The token of the service account.
        context: Checks the certificate of the server.

    Returns:
        Whether it was created; False if a job with its name exists.

    Raises:
        urllib.error.HTTPError: If the server refuses it for another reason.
    """
    namespace = job["metadata"]["namespace"]
    url = f"{server}/apis/{job['apiVersion']}/namespaces/{namespace}/rayjobs"
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(job).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60, context=context):
            return True
    except urllib.error.HTTPError as error:
        if error.code == 409:
            return False
        raise


def server_url(host: str, port: str) -> str:
    """Return the URL of the API server; an IPv6 address needs brackets."""
    if ":" in host:
        host = f"[{host}]"
    return f"https://{host}:{port}"


def main() -> int:
    try:
        today = datetime.datetime.now(datetime.UTC).date()
        job = tonights_job(Path(sys.argv[1]).read_text(), today)
        host = os.environ["KUBERNETES_SERVICE_HOST"]
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
        token = (ACCOUNT / "token").read_text().strip()
        created = create(job, server_url(host, port), token, context)
    except urllib.error.HTTPError as error:
        answer = error.read().decode()
        print(f"submit_nightly.py: the API server says {error.code}: {answer}", file=sys.stderr)
        return 1
    except (OSError, ValueError, IndexError, KeyError) as error:
        print(f"submit_nightly.py: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    outcome = "exists already"
    if created:
        outcome = "created"
    print(f"RayJob {job['metadata']['name']} {outcome}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
