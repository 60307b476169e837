"""Storage against a real S3 server behind a proxy that fails calls: nothing lost, nothing doubled,
and an end to it.
"""

import os
import time
from types import SimpleNamespace

import pytest

from raypd import storage
from raypd.config import StorageConfig
from tests import s3
from tests.fault_proxy import Faults, Proxy
from tests.processes import LONG

MIB = 1 << 20


@pytest.fixture(autouse=True)
def behind_the_proxy(proxy: Proxy, bucket: str) -> None:
    use(proxy)


def use(proxy: Proxy, **settings: float) -> None:
    storage.configure(
        StorageConfig.model_validate(
            {"options": {"endpoint_url": proxy.url, "max_attempts": 6, **settings}}
        )
    )


def test_the_proxy_fails_as_it_is_told_and_an_end_is_made_of_it(proxy, bucket) -> None:
    storage.put(f"{bucket}/x", b"some bytes")
    assert storage.read(f"{bucket}/x") == b"some bytes"
    assert proxy.failed.total() == 0
    use(proxy, max_attempts=2)  # nothing is tried for ever
    for kind, reason in {
        "503": "overloaded",
        "500": "InternalError",
        "reset": "[Cc]onnection",
        "lost": "[Cc]onnection",
        "cut": "broke off 2 times, the last time at byte",
    }.items():
        proxy.faults = Faults(share=1.0, kinds=(kind,))
        with pytest.raises(storage.StorageError, match=f"{bucket}/x: .*{reason}"):
            storage.read(f"{bucket}/x")
        assert proxy.failed[kind] == 2


def test_a_fifth_of_all_calls_fails_and_every_object_is_there_once(proxy, bucket) -> None:
    proxy.faults = Faults(share=0.2, seed=7)
    wanted = {f"{i:03d}": b"%d" % i * 1000 for i in range(45)}
    assert all(storage.put_new(f"{bucket}/units/{name}", text) for name, text in wanted.items())
    assert not any(storage.put_new(f"{bucket}/units/{name}", b"another") for name in wanted)
    assert [item.name for item in storage.find(f"{bucket}/units")] == [*wanted]
    assert {name: storage.read(f"{bucket}/units/{name}") for name in wanted} == wanted
    assert min(proxy.failed[kind] for kind in ("503", "500", "reset", "lost", "cut")) > 0, (
        proxy.failed
    )


def test_a_body_that_breaks_off_is_taken_up_where_it_broke(proxy, bucket) -> None:
    data = os.urandom(3 * MIB)
    storage.put(f"{bucket}/x", data)
    proxy.log.clear()
    proxy.faults = Faults(
        share=1.0,
        kinds=("cut",),
        most=2,
    )
    assert storage.read(f"{bucket}/x") == data
    ranges = [headers["Range"] for method, _, headers in proxy.log if method == "GET"]
    first, second, third = (int(text.removeprefix("bytes=").split("-")[0]) for text in ranges[:3])
    # Of what was sent before the reset the system may take some away.
    assert 0 == first <= second <= MIB // 2
    assert max(1, second) <= third <= second + (MIB - second) // 2
    assert all("If-Match" in headers for _, _, headers in proxy.log[1:])


def test_an_object_replaced_while_its_body_broke_off_is_not_mixed(
    proxy, bucket, monkeypatch
) -> None:
    storage.put(f"{bucket}/x", b"a" * MIB)
    file = storage.open_read(f"{bucket}/x", 0, storage.version(f"{bucket}/x"))

    def replace(seconds):
        return storage.put(f"{bucket}/x", b"b" * MIB)

    monkeypatch.setattr(
        "raypd.storage.s3.time", SimpleNamespace(**{**vars(time), "sleep": replace})
    )
    proxy.faults = Faults(
        share=1.0, kinds=("cut",), most=1, only=lambda method, path: method == "GET"
    )
    with pytest.raises(storage.Changed):
        file.read()
    assert proxy.failed["cut"] == 1


def test_the_answer_to_our_own_conditional_write_is_lost(proxy, bucket) -> None:
    """The SDK's second try meets what the first has written: that is success, and another's object
    is not.
    """
    proxy.faults = Faults(
        share=1.0, kinds=("lost",), most=1, only=lambda method, path: "/a" in path
    )
    assert storage.put_new(f"{bucket}/a", b"mine") == storage.version(f"{bucket}/a")
    assert proxy.failed["lost"] == 1
    version = storage.version(f"{bucket}/a")
    proxy.failed.clear()
    assert storage.put_if(f"{bucket}/a", b"mine again", version) is not None
    assert proxy.failed["lost"] == 1
    proxy.failed.clear()
    assert not storage.put_new(f"{bucket}/a", b"yours")
    assert storage.read(f"{bucket}/a") == b"mine again"


def test_objects_in_parts_under_faults(proxy, bucket, monkeypatch) -> None:
    monkeypatch.setattr("raypd.storage.s3.MULTIPART_BYTES", 6 * MIB)
    monkeypatch.setattr("raypd.storage.s3.PART_BYTES", 5 * MIB)
    data = os.urandom(17 * MIB)
    proxy.faults = Faults(share=0.3, seed=3)
    assert storage.put_new(f"{bucket}/big", data)
    assert not storage.put_new(f"{bucket}/big", data[::-1])
    assert storage.read(f"{bucket}/big") == data
    proxy.faults = Faults()
    name = bucket.removeprefix("s3://")
    assert storage.version(f"{bucket}/big").endswith("-4")
    with pytest.MonkeyPatch.context() as patch:  # a part that cannot be sent leaves no parts behind
        patch.setattr("raypd.storage.s3.PART_BYTES", 1000)
        proxy.faults = Faults(
            share=1.0, kinds=("500",), only=lambda method, path: "partNumber=3" in path
        )
        with pytest.raises(storage.StorageError, match="InternalError"):
            storage.put(f"{bucket}/never", data)
    assert not s3.Server(proxy.url).client().list_multipart_uploads(Bucket=name).get("Uploads")
    assert not storage.exists(f"{bucket}/never")


def test_a_server_that_hangs_is_given_up(proxy, bucket) -> None:
    storage.put(f"{bucket}/x", b"some bytes")
    use(proxy, max_attempts=2, read_timeout=0.3)
    proxy.faults = Faults(
        share=1.0,
        kinds=("hang",),
        hang_seconds=LONG,
    )
    with pytest.raises(storage.StorageError, match=r"(?i)/x: read timeout.*gave up at attempt 2"):
        storage.read(f"{bucket}/x")
    with pytest.raises(storage.StorageError, match=r"(?i)timeout"):
        storage.put_new(f"{bucket}/y", b"")
    use(proxy, max_attempts=9, read_timeout=0.5)  # a busy server may take longer than that, too
    proxy.faults = Faults(
        share=1.0, kinds=("hang",), hang_seconds=LONG, most=proxy.failed.total() + 1
    )
    assert storage.read(f"{bucket}/x") == b"some bytes"  # hung once


def test_an_object_in_parts_does_not_replace_one_that_came_meanwhile(
    proxy, bucket, monkeypatch, s3_server
) -> None:
    monkeypatch.setattr("raypd.storage.s3.MULTIPART_BYTES", 6 * MIB)

    def come_between(method: str, path: str) -> bool:
        if method == "POST" and "uploadId=" in path:
            s3_server.client().put_object(
                Bucket=bucket.removeprefix("s3://"), Key="big", Body=b"first"
            )
        return False

    proxy.faults = Faults(only=come_between)
    assert not storage.put_new(f"{bucket}/big", os.urandom(7 * MIB))
    assert storage.read(f"{bucket}/big") == b"first"
