"""A run on S3: report and status as on a local folder."""

from __future__ import annotations

import pytest

from raypd import storage
from raypd.config import StorageConfig
from raypd.report import data, page
from raypd.report.status import Watch
from tests import s3
from tests.report.builder import Plan, build


@pytest.fixture
def run(s3_server, tmp_path, monkeypatch):
    """The URI of a run in a new bucket."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    storage.configure(StorageConfig(endpoint_url=s3_server.url))
    s3_server.client().create_bucket(Bucket="reports")
    root = build(tmp_path / "run", Plan(units=12, sessions=2, config={"storage": {"endpoint_url": s3_server.url}}))
    for file in root.rglob("*"):
        if file.is_file():
            storage.put(f"s3://reports/runs/a/{file.relative_to(root)}", file.read_bytes())
    yield "s3://reports/runs/a", s3_server.url
    storage.configure(StorageConfig())


def test_report_and_status_of_a_run_on_s3(run):
    root, url = run
    override = [f"storage.endpoint_url={url}"]
    read = data.load(root, override)
    assert read.units.total("documents") == 300
    assert read.bill is not None
    where = page.write(read)
    assert where == "s3://reports/runs/a/report.html"
    assert b"</html>" in storage.read(where)
    found = Watch(root, override).look()
    assert (found.state, found.documents, found.usd) == ("complete", 300, read.bill.usd)
