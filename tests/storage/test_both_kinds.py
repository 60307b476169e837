"""What the rest of raypd relies on, held for a local folder, a real S3 server, Azurite and Google's
API alike.
"""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from raypd import storage
from raypd.errors import InputError
from tests.processes import ended, start

# The system refuses a write in its middle, as on a full disk, and needs no right to mount one.
FULL_DISK = """
import errno, os, resource, sys
from raypd import storage
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
folder = sys.argv[1] + "/units"
assert storage.put_new(folder + "/a", b"a" * 40_000)
for write in (storage.put_new, storage.put):
    try:
        write(folder + "/b", os.urandom(100_000))
    except OSError as error:
        assert error.errno == errno.EFBIG, error
        assert str(error).endswith("File too large: '" + folder + "/b'"), error
    else:
        raise AssertionError("it fitted")
assert os.listdir(folder) == ["a"], os.listdir(folder)
assert storage.put_new(folder + "/c", b"c" * 40_000)
"""


@pytest.fixture(params=["local", "s3", "gs", "az"])
def root(request: pytest.FixtureRequest, tmp_path) -> str:
    if request.param == "local":
        return str(tmp_path / "folder")
    return f"{request.getfixturevalue('bucket' if request.param == 's3' else request.param)}/folder"


def fill(root: str, *names: str) -> None:
    for name in names:
        storage.put(storage.join(root, *name.split("/")), name.encode())


def found(path: str) -> list[str]:
    return [item.name for item in storage.find(path)]


def test_put_read_replace_and_delete(root: str) -> None:
    path = storage.join(root, "a b+ü%41.txt")
    assert not storage.exists(path)
    with pytest.raises(FileNotFoundError):
        storage.read(path)
    stamp = storage.put_new(path, b"first")
    item = next(storage.find(path))
    assert item.stamp == stamp
    assert storage.put_new(path, b"second") is None
    assert storage.read(path) == b"first"
    before = storage.version(path)
    conditional = ((path, b"third"), (path, b"fourth"), (storage.join(root, "other"), b""))
    stamps = [storage.put_if(where, text, before) for where, text in conditional]
    item = next(storage.find(path))
    assert stamps == [item.stamp, None, None]
    assert storage.read(path) == b"third"
    storage.put(path, b"")
    assert storage.read(path) == b""
    assert next(storage.find(path)).size == 0
    assert storage.exists(path) is True
    assert storage.names(root) == ["a b+ü%41.txt"]
    for _ in range(2):
        storage.delete(path)
    assert storage.names(root) == []


def test_of_many_writers_at_once_one_wins(root: str) -> None:
    path = storage.join(root, "x")
    # Short: weed looks at its condition before it has read a body.
    texts = [b"%d" % i * 1000 for i in range(6)]
    write = partial(storage.put_new, path)
    for _ in range(2):
        with ThreadPoolExecutor(6) as pool:
            won = list(pool.map(write, texts))
        (winner,) = [i for i, stamp in enumerate(won) if stamp is not None]
        assert storage.read(path) == texts[winner]
        write = partial(storage.put_if, path, version=storage.version(path))
        texts = [2 * text for text in texts]


def test_a_local_file_is_written_whole_and_replaces(root: str, tmp_path) -> None:
    path = storage.join(root, "table.parquet")
    # Below and above the size from which S3 gets several parts.
    for megabytes in (1, 70):
        source = tmp_path / "source"
        source.write_bytes(random.Random(megabytes).randbytes(megabytes << 20))
        storage.put_file(path, str(source))
        assert next(storage.find(path)).size == megabytes << 20
        assert storage.read(path) == source.read_bytes()
    assert storage.names(root) == ["table.parquet"]


@pytest.mark.parametrize("write", [storage.put, storage.put_new])
def test_a_local_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch, write) -> None:
    """Otherwise a power cut could leave an empty commit."""
    synced: set[int] = set()
    named: list[int] = []
    fsync = os.fsync

    def note_sync(handle: int) -> None:
        fsync(handle)
        synced.add(os.fstat(handle).st_ino)

    def checked(move):
        def wrapper(source: str, target: str) -> None:
            number = os.stat(source).st_ino
            assert number in synced
            move(source, target)
            named.append(number)

        return wrapper

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", checked(os.replace))
    monkeypatch.setattr(os, "link", checked(os.link))
    write(str(tmp_path / "file"), b"text")
    assert named == [(tmp_path / "file").stat().st_ino]
    # The folder with the new name is on the disk as well.
    assert tmp_path.stat().st_ino in synced


def test_many_files_are_deleted_and_no_others(root: str) -> None:
    names = [f"units/{number}" for number in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(partial(fill, root), [*names, "units/kept", "other"]))
    # Listed while they are deleted, and one is gone already.
    paths = (item.path for item in storage.walk(storage.join(root, "units")))
    storage.delete(storage.join(root, "units", "7"))
    storage.delete_all(path for path in paths if not path.endswith("kept"))
    assert [item.name for item in storage.walk(root)] == ["other", "units/kept"]
    storage.delete_all([])


def test_any_range_is_read_whole_from_an_offset_line_by_line_and_behind_the_end(root: str) -> None:
    path = storage.join(root, "lines")
    lines = [b"%d " % i * 300 + b"\n" for i in range(9000)]  # more than the first range of a read
    storage.put(path, b"".join(lines))
    with storage.open_read(path, sum(map(len, lines[:4000]))) as file:
        assert list(file) == lines[4000:]
    with storage.open_read(path, 10**9) as file:
        assert file.read() == b""
    assert storage.read(path) == b"".join(lines)
    # pyarrow takes a short read for the end of the file.
    data = random.Random(1).randbytes(300_000)
    draws = random.Random(2)
    path = storage.join(root, "x")
    storage.put(path, data)
    with storage.open_file(path) as file:
        for _ in range(60):
            begin = draws.randrange(300_000)
            length = draws.choice([1, 100, 40_000, 70_000, 200_000])
            assert file.read_at(length, begin) == data[begin : begin + length]
        file.seek(65_530)
        assert file.read(10) == data[65_530:65_540]
        assert file.size() == 300_000


def test_a_replaced_object_is_noticed_at_the_first_byte_and_between_two_reads(root: str) -> None:
    path = storage.join(root, "x")
    storage.put(path, b"a" * (3 << 20))
    planned = storage.version(path)
    assert not storage.is_remote(path) or next(storage.find(path)).stamp == planned
    file = storage.open_read(path, 0, planned)
    assert file.read(5) == b"aaaaa"
    storage.put(path, b"b" * (3 << 20))
    if storage.is_remote(path):
        with pytest.raises(storage.Changed, match=r"/folder/x: has changed since it was planned"):
            file.read()
    else:
        assert file.read() == b"a" * ((3 << 20) - 5)  # an open file stays what it was
    for opened in (
        lambda: storage.open_read(path, 0, planned),
        lambda: storage.open_file(path, planned),
    ):
        with pytest.raises(storage.Changed):
            opened().read()
    storage.delete(path)
    with pytest.raises(OSError, match="/folder/x"):
        storage.open_read(path, 0, planned).read()


def test_find_folders_globs_keys_and_hidden_names(root: str) -> None:
    seen = ["a.jsonl", "in/b.jsonl", "in/deep/c.jsonl", "in/deep/d.txt", "in2/g.jsonl"]
    fill(root, *seen, "_tmp/e.jsonl", "in/.f.jsonl")
    of_in = [name.removeprefix("in/") for name in seen[1:4]]
    for path, names in {
        "": seen,
        "/": seen,
        "/in": of_in,
        "/in/**": of_in,
        "/in/b.jsonl": ["b.jsonl"],
        "/*.jsonl": ["a.jsonl"],
        "/in*/*.jsonl": ["in/b.jsonl", "in2/g.jsonl"],
        "/in/deep/[!c].t?t": ["d.txt"],
        "/in/deep/[a-c]*": ["c.jsonl"],
        "/**/*.jsonl": [name for name in seen if name.endswith("l")],
    }.items():
        assert found(root + path) == names, path
    for path, names in {
        "": [*seen, "_tmp/e.jsonl", "in/.f.jsonl"],
        "/in": [*of_in, ".f.jsonl"],
    }.items():
        assert sorted(item.name for item in storage.walk(root + path)) == sorted(names)
    assert storage.folders(root + "/in") == ["deep"]
    assert [storage.is_folder(root + path) for path in ("/in", "/in/b.jsonl", "/i")] == [
        True,
        False,
        False,
    ]
    first = next(storage.find(root + "/in"))
    assert first.size == 10
    assert storage.read(first.path) == b"in/b.jsonl"
    # A name with special characters is first of all a name.
    fill(root, "a[1].jsonl", "a1.jsonl", "b*.jsonl", "b1.jsonl")
    for path, name in (
        ("a[1].jsonl", "a[1].jsonl"),
        ("b*.jsonl", "b*.jsonl"),
        ("a[[]1].jsonl", "a[1].jsonl"),
    ):
        assert found(f"{root}/{path}") == [name]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("part", "no such .*did you mean .*/folder/parts\\?"),
        ("*.csv", "matches"),
        ("nothing/*.csv", "/folder/nothing"),
        ("only", "only hidden"),
    ],
)
def test_nothing_found_is_said_with_what_was_meant(root: str, path: str, reason: str) -> None:
    fill(root, "parts/a.jsonl", "only/_b.jsonl")
    with pytest.raises(InputError, match=f"^{root}/{path.replace('*', '[*]')}: .*{reason}"):
        list(storage.find(f"{root}/{path}"))


def test_nothing_is_no_folder_to_walk() -> None:
    for look in (lambda path: list(storage.walk(path)), storage.names, storage.folders):
        assert look("/no/such/folder") == []
    assert storage.join("s3://b/p/", "units", "u") == "s3://b/p/units/u"
    assert storage.absolute("s3://b/p/") == "s3://b/p"
    assert storage.absolute("file:///a/../b") == "/b"
    for path, words in (
        ("gcs://b", r"gcs://b: gcs:// is not a storage.*write gs://"),
        ("az://b@c", "hold no credentials"),
        ("s3://a b/x", "not the name of a bucket"),
    ):
        with pytest.raises(InputError, match=words):
            storage.absolute(path)


def test_a_write_that_the_disk_refuses_in_its_middle_leaves_nothing(tmp_path) -> None:
    ended(start("-c", FULL_DISK, str(tmp_path)))
    assert storage.names(str(tmp_path / "units")) == ["a", "c"]
