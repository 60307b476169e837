"""What is sent to S3, Google's and Azure's storage and made of their answers, where no test server
knows them.
"""

import io
import itertools
import re
import sys
from dataclasses import replace
from unittest import mock

import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from urllib3.exceptions import ProtocolError

from raypd import storage
from raypd.config import StorageConfig
from raypd.errors import ConfigError, InputError, RunError
from raypd.run import lease
from raypd.storage import s3
from tests.s3 import SECRET, environment
from tests.servers import Reply

Answer = tuple[int, dict[str, str], bytes]
EMPTY = b"<ListBucketResult></ListBucketResult>"


class Raw(io.BytesIO):
    """A body as urllib3 hands it out."""

    def stream(self, amt: int = 1 << 16, decode_content: bool | None = None):
        return iter(lambda: self.read(amt), b"")


class Store:
    """Answers requests with what a test gives it, and keeps them."""

    def __init__(self) -> None:
        self.requests: list[AWSPreparedRequest] = []
        self.answer = parts_and_lists

    def __call__(self, request: AWSPreparedRequest, **_) -> AWSResponse:
        self.requests.append(request)
        for name, value in request.headers.items():
            request.headers[name] = value.decode() if isinstance(value, bytes) else value
        status, headers, body = self.answer(request)
        raw = Raw(b"" if request.method == "HEAD" else body)
        return AWSResponse(request.url, status, {"Content-Length": str(len(body)), **headers}, raw)

    def use(self, **settings) -> None:
        storage.configure(StorageConfig(options={"max_attempts": 3, **settings}))
        storage.backend("s3://").boto().meta.events.register_first("before-send.s3", self)

    def header(self, name: str) -> list[str | None]:
        return [request.headers.get(name) for request in self.requests]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path):
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    nowhere = dict.fromkeys(
        ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), str(tmp_path / "none")
    )
    for name, value in {
        **environment(),
        **nowhere,
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0.0
    )
    monkeypatch.setattr("raypd.storage.s3.time.sleep", lambda seconds: None)
    # A client of an earlier test is not taken again.
    storage.configure(StorageConfig(options={"max_attempts": 9}))
    fake = Store()
    fake.use()
    yield fake
    storage.configure(StorageConfig())


def refusal(code: str, message: str = "", status: int = 403, **headers: str):
    text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    return lambda request: (status, headers, text)


def parts_and_lists(request: AWSPreparedRequest) -> Answer:
    if request.method == "POST" and "uploads" in request.url:
        return (
            200,
            {},
            b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>",
        )
    if request.method == "POST":
        return (
            200,
            {},
            b'<CompleteMultipartUploadResult><ETag>"e"</ETag></CompleteMultipartUploadResult>',
        )
    return (200, {}, EMPTY) if "list-type" in request.url else (200, {"ETag": '"e"'}, b"")


def test_encryption_and_the_payer_stand_in_every_request_that_needs_them(store: Store) -> None:
    store.use(sse="aws:kms", kms_key_id="arn:key", requester_pays=True)
    storage.put_new("s3://bkt/a", b"x")
    storage.put("s3://bkt/a", b"x" * (s3.MULTIPART_BYTES + 1))
    storage.version("s3://bkt/a")
    storage.read("s3://bkt/a")
    list(storage.walk("s3://bkt/f"))
    assert store.header("x-amz-request-payer") == ["requester"] * len(store.requests)
    encryption = "x-amz-server-side-encryption"
    for request in store.requests:
        write = (
            request.method == "PUT" and "partNumber" not in request.url
        ) or "?uploads" in request.url
        own = [request.headers.get(name) for name in (encryption, f"{encryption}-aws-kms-key-id")]
        assert own == (["aws:kms", "arn:key"] if write else [None, None])
    assert store.header(encryption).count("aws:kms") == 2
    store.requests.clear()
    store.use(sse="AES256")
    storage.put("s3://bkt/a", b"x")
    assert store.header(encryption) == ["AES256"]
    assert store.header("x-amz-request-payer") == [None]


def test_each_storage_has_settings_and_a_connection_of_its_own(store: Store) -> None:
    unsigned = storage.Storage(StorageConfig(options={"anonymous": True}))
    unsigned.backend("s3://").boto().meta.events.register_first("before-send.s3", store)
    for each in (storage.default, unsigned, storage.default):
        assert list(each.backend("s3://").walk("s3://bkt/f")) == []
    assert [header is None for header in store.header("Authorization")] == [False, True, False]


def test_the_start_of_a_glob_narrows_the_listing(store: Store) -> None:
    for glob, prefix in (
        ("p/part-*.jsonl", "p%2Fpart-"),
        ("p/*/x", "p%2F"),
        ("**", ""),
        ("p/a[1]", "p%2Fa"),
    ):
        store.requests.clear()
        with pytest.raises(InputError):
            list(storage.find(f"s3://bkt/{glob}"))
        assert re.search(r"[?&]prefix=([^&]*)", store.requests[-1].url)[1] == prefix


@pytest.mark.parametrize(
    ("code", "status", "of_the_store", "words"),
    [
        ("NoSuchBucket", 404, False, "there is no bucket 'bkt'; check name"),
        ("AccessDenied", 403, False, "forbidden: the credentials (env) need s3:"),
        (
            "ExpiredToken",
            400,
            True,
            "the credentials have expired: renew them, then run the same command again to resume",
        ),
        ("InvalidAccessKeyId", 403, True, "does not accept the credentials (env)"),
        ("SignatureDoesNotMatch", 403, True, "does not accept the credentials"),
        ("RequestTimeTooSkewed", 403, True, "the clock of this machine is wrong"),
        (
            "IllegalLocationConstraintException",
            400,
            False,
            "is in region eu-west-1: set storage.options.region=eu-west-1",
        ),
        ("SlowDown", 503, True, "the store is overloaded (SlowDown), still so at attempt 3"),
        ("ThrottlingException", 400, True, "overloaded"),
        ("TooManyRequests", 429, True, "overloaded"),
        ("InternalError", 500, True, "the store answered InternalError to s3:"),
        ("RequestTimeout", 400, True, "the store answered RequestTimeout"),
        ("InvalidObjectState", 403, False, "the object is archived"),
        ("NotImplemented", 501, False, "the store answered NotImplemented"),
        ("Odd", 502, True, "the store answered Odd"),
        ("Odd", 400, False, "the store says: you sent ***"),
    ],
)
def test_a_refusal_says_what_to_do_and_whether_it_is_about_the_store(
    store, code, status, of_the_store, words
) -> None:
    store.answer = refusal(
        code, f"you sent {SECRET}", status, **{"x-amz-bucket-region": "eu-west-1"}
    )
    for n, call in enumerate(
        (
            lambda path: list(storage.find(path)),
            storage.read,
            lambda path: storage.put_new(path, b""),
            lambda path: storage.open_file(path, None, 10).read(),
        )
    ):
        kind = storage.StorageError if n else InputError
        with pytest.raises(
            storage.Unavailable if of_the_store else kind, match=r"^s3://bkt/a: "
        ) as caught:
            call("s3://bkt/a")
        assert isinstance(caught.value, storage.Unavailable) == of_the_store
        assert words in str(caught.value)
        assert SECRET not in repr(caught.value) + str(caught.value)


def test_a_body_that_breaks_off_and_lost_credentials_are_outages(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = mock.PropertyMock(side_effect=ProtocolError("Connection broken: reset"))
    monkeypatch.setattr(AWSResponse, "content", broken)
    with pytest.raises(storage.Unavailable, match=r"s3://bkt/f.*Connection broken"):
        list(storage.walk("s3://bkt/f"))
    # As botocore says it.
    words = "Credentials were refreshed, but the refreshed credentials are still expired."
    store.answer = mock.Mock(side_effect=RuntimeError(words))
    with pytest.raises(
        storage.Unavailable, match=r"s3://bkt/a: .*still expired; renew the credentials"
    ):
        storage.read("s3://bkt/a")


def test_a_bucket_in_another_region_is_followed_where_the_store_says_which(store: Store) -> None:
    def redirect(request: AWSPreparedRequest) -> Answer:
        if "eu-west-1" not in request.url:
            return refusal("PermanentRedirect", "", 301, **{"x-amz-bucket-region": "eu-west-1"})(
                request
            )
        return parts_and_lists(request)

    store.answer = redirect
    assert list(storage.walk("s3://bkt/f")) == []


def test_a_head_that_gives_no_reason_is_looked_into(store: Store) -> None:
    listing: dict[str, Answer] = {}
    store.answer = lambda request: listing["is"] if "list-type" in request.url else (403, {}, b"")
    longer_key = (
        b"<ListBucketResult><Contents><Key>ab</Key><Size>1</Size></Contents></ListBucketResult>"
    )
    # With s3:ListBucket under a prefix alone, S3 calls a key that does not exist forbidden.
    for listed in (EMPTY, longer_key):
        listing["is"] = (200, {}, listed)
        assert not storage.exists("s3://bkt/a")
        with pytest.raises(FileNotFoundError):
            storage.read("s3://bkt/a")
    own_key = (200, {}, longer_key.replace(b">ab<", b">a<"))
    for listing["is"], words in (
        (own_key, r"forbidden: .* need s3:GetObject"),
        (refusal("ExpiredToken", "", 400)(None), "credentials have expired"),
    ):
        with pytest.raises(storage.StorageError, match=words):
            storage.exists("s3://bkt/a")


def test_no_credentials_and_no_such_profile(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for profile, words in (
        (None, r"s3://bkt/a: Unable to locate credentials: set AWS_ACCESS_KEY_ID"),
        ("nightly", r"profile \(nightly\) could not be found; it is storage.options.profile"),
    ):
        storage.configure(StorageConfig(options={"profile": profile}))
        with pytest.raises(InputError, match=words):
            list(storage.find("s3://bkt/a"))


def test_a_conflict_with_a_write_in_progress_is_tried_again(store: Store) -> None:
    conflict = refusal("ConditionalRequestConflict", "", 409)
    answers = [conflict, conflict, store.answer]
    store.answer = lambda request: answers.pop(0)(request)
    assert storage.put_new("s3://bkt/a", b"x")
    store.answer = conflict
    with pytest.raises(storage.StorageError, match="ConditionalRequestConflict"):
        storage.put_new("s3://bkt/a", b"x")


def test_a_refusal_whose_body_breaks_off_is_asked_for_again(store: Store) -> None:
    def cut(request: AWSPreparedRequest) -> Answer:
        raise ProtocolError("Connection broken: reset")

    answers = [cut, cut, refusal("NoSuchKey", status=404)]
    store.answer = lambda request: answers.pop(0)(request)
    with pytest.raises(FileNotFoundError):
        storage.read("s3://bkt/a")
    store.answer = cut
    with pytest.raises(
        storage.Unavailable, match=r"broke off 3 times, .* byte 0 .*Connection broken"
    ):
        storage.read("s3://bkt/a")


def test_a_deletion_that_is_refused_for_one_key_is_an_error(store: Store) -> None:
    answer = b"<DeleteResult><Error><Key>b</Key><Code>AccessDenied</Code></Error></DeleteResult>"
    store.answer = lambda request: (200, {}, answer)
    with pytest.raises(storage.StorageError, match="s3:DeleteObject"):
        storage.delete_all(["s3://bkt/a", "s3://bkt/b"])


def test_a_store_without_conditional_writes_is_refused_at_the_start_of_a_run(store: Store) -> None:
    with pytest.raises(
        RunError, match=r"output\.path s3://bkt/run: this store ignores conditional writes"
    ):
        lease.RunLease("s3://bkt/run")
    store.answer = refusal("NotImplemented", "If-None-Match is not known", 501)
    with pytest.raises(
        storage.StorageError, match=r"answered NotImplemented .* If-None-Match is not known"
    ):
        lease.RunLease("s3://bkt/run")


def test_a_long_listing_is_asked_for_page_by_page(store: Store) -> None:
    """No page is asked for before the one before it is read, so that one is held at a time."""

    def page(request: AWSPreparedRequest) -> Answer:
        if "max-keys=1" in request.url:  # whether the path itself is a key
            return 200, {}, EMPTY
        token = re.search(r"continuation-token=(\d+)", request.url)
        begin = int(token[1]) if token else 0
        text = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{begin + 1000}</NextContinuationToken>"  # noqa: E501
        for i in range(begin, begin + 1000):
            text += f"<Contents><Key>in/{i:09d}.jsonl</Key><Size>{i}</Size><ETag>&quot;{i:x}&quot;</ETag></Contents>"  # noqa: E501
        return 200, {}, f"<ListBucketResult>{text}</ListBucketResult>".encode()

    store.answer = page
    for i, item in enumerate(itertools.islice(storage.find("s3://bkt/in/*.jsonl"), 3500)):
        assert item.name == f"{i:09d}.jsonl"
        assert item.size == i
        assert item.stamp == f"{i:x}"
        assert len(store.requests) == 2 + i // 1000


def test_a_store_that_does_not_know_if_match_is_not_believed(store: Store) -> None:
    etags = iter(['"one"', '"one"', '"two"'])

    def answer(request: AWSPreparedRequest) -> Answer:
        begin = int(request.headers["Range"].removeprefix("bytes=").split("-")[0])
        return (
            206,
            {"ETag": next(etags), "Content-Range": f"bytes {begin}-x/{5 << 20}"},
            b"x" * (1 << 20),
        )

    store.answer = answer
    file = storage.open_file("s3://bkt/a", "one")
    assert file.read_at(1 << 20, 0) == file.read_at(1 << 20, 1 << 20)
    with pytest.raises(storage.Changed):
        file.read_at(1 << 20, 2 << 20)


def test_a_store_without_ranges_is_used_for_what_is_small_and_else_refused(store: Store) -> None:
    store.answer = lambda request: (200, {"ETag": '"e"'}, b"0123456789")
    assert storage.read("s3://bkt/a") == b"0123456789"
    with (
        storage.open_read("s3://bkt/a", 5) as file,
        pytest.raises(storage.StorageError, match="for a range of bytes"),
    ):
        file.read()


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (
            401,
            "",
            storage.Unavailable,
            "401 .*refuses these credentials.*set GOOGLE_APPLICATION_CREDENTIALS",
        ),
        (
            403,
            "AccessDenied",
            storage.StorageError,
            r"forbidden: .* must allow to (read|write|list) here .*403 AccessD",
        ),
        (400, "InvalidArgument", storage.StorageError, "answered 400 InvalidArgument to"),
        (404, "NoSuchBucket", storage.StorageError, "there is no gs://bucket"),
        (429, "SlowDown", storage.Unavailable, "429"),
        (503, "", storage.Unavailable, "answered 503"),
    ],
)
def test_refusals_name_the_path_and_what_to_do(google, gs, status, code, kind, words) -> None:
    storage.configure(StorageConfig(options={"max_attempts": 2}))
    secret = "a-s3cret-token"
    google.fail = lambda call: Reply(
        status, f"<Error><Code>{code}</Code><M>{secret}</M></Error>".encode()
    )
    path = f"{gs}/folder/x"
    reads = (
        lambda: storage.read(path),
        lambda: storage.put_new(path, b"x"),
        lambda: storage.names(f"{gs}/folder"),
    )
    for ask in reads:
        with pytest.raises(kind, match=f"^{gs}/folder.*: .*{words}") as caught:
            ask()
        assert type(caught.value) is kind
        assert secret not in str(caught.value)


def test_what_passes_is_tried_again_and_what_was_sent_twice_is_written_once(google, gs) -> None:
    calls = itertools.count()
    google.fail = lambda call: None if next(calls) % 3 else Reply(503)  # every third
    wanted = {f"{number:02d}": b"%d" % number * 1000 for number in range(9)}
    assert all(storage.put_new(f"{gs}/units/{name}", text) for name, text in wanted.items())
    assert {item.name: storage.read(item.path) for item in storage.find(f"{gs}/units")} == wanted

    def lost(call):
        google.fail = lambda call: None
        google.answer(call)
        return Reply(503)

    google.fail = lost  # written, and the answer says otherwise
    assert storage.put_new(f"{gs}/a", b"mine")
    google.fail = lost
    assert storage.put_if(f"{gs}/a", b"mine again", storage.version(f"{gs}/a"))
    assert not storage.put_new(f"{gs}/a", b"yours")
    assert storage.read(f"{gs}/a") == b"mine again"


def test_a_body_that_breaks_off_is_taken_up_or_an_outage(google, gs) -> None:
    storage.put(f"{gs}/x", bytes(range(256)) * 4000)
    google.fail = lambda call: (
        replace(google.answer(call), broken="cut") if call.method == "GET" else None
    )
    with pytest.raises(storage.Unavailable, match=f"{gs}/x: "):
        storage.read(f"{gs}/x")


def test_without_the_extra_a_bucket_or_credentials(az, monkeypatch) -> None:
    with pytest.raises(storage.StorageError, match="az://no-such/x: there is no az://no-such"):
        storage.put("az://no-such/x", b"")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "bm8=")
    storage.configure(StorageConfig(options={"max_attempts": 2}))
    with pytest.raises(
        storage.StorageError, match=f"{az}/x: forbidden: .* must allow to read here .*403 Authoriz"
    ):
        storage.read(f"{az}/x")
    assert storage.absolute(f"{(box := 'abfss://box@account.dfs.core.windows.net/a')}/") == box
    with pytest.raises(InputError, match="write gs://bucket/prefix"):
        storage.absolute("abfss://box/a")
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(
        ConfigError, match=r"gs://b/x needs the package obstore: pip install 'raypd\[cloud\]'"
    ):
        storage.read("gs://b/x")
