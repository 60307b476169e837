"""A run on S3: report and status as on a local folder."""

from __future__ import annotations

from raypd import storage
from raypd.report import data, page
from raypd.report.status import Watch
from tests.report.builder import Plan, build


def test_report_and_status_of_a_run_on_s3(connected, bucket, tmp_path):
    root = build(tmp_path / "run", Plan(units=12, sessions=2, config={"storage": {"endpoint_url": connected.url}}))
    for file in filter(lambda path: path.is_file(), root.rglob("*")):
        storage.put(f"{bucket}/runs/a/{file.relative_to(root)}", file.read_bytes())
    override = [f"storage.endpoint_url={connected.url}"]
    read = data.load(f"{bucket}/runs/a", override)
    assert read.units.total("documents") == 300
    where = page.write(read)
    assert where == f"{bucket}/runs/a/report.html"
    assert b"</html>" in storage.read(where)
    found = Watch(f"{bucket}/runs/a", override).look()
    assert (found.state, found.documents, found.usd) == ("complete", 300, read.bill.usd)
