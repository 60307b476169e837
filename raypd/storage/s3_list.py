"""Listing S3: pages of a thousand keys, of which one is held at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raypd.errors import InputError
from raypd.storage import s3_client
from raypd.storage.common import MAGIC, Object, StorageError, Unavailable, hidden, near, pattern


def find(path: str, include_hidden: bool) -> Iterator[Object]:
    """The objects that a key, a folder (all below it) or a glob stands for, in the order of their keys.

    Raises InputError where there is none, and where the bucket cannot be listed; Unavailable.
    """
    bucket, key = s3_client.split(path)
    try:
        exact = _exact(bucket, key) if key and not key.endswith("/") else None
        if exact is not None:
            yield _object(bucket, exact, exact["Key"].rpartition("/")[2])
            return
        magic = MAGIC.search(key)
        prefix = key[: magic.start()] if magic else _folder(key)
        root = len(prefix[: prefix.rfind("/") + 1])
        wanted = pattern(key) if magic else None
        found = any_at_all = False
        for item in _listed(bucket, prefix):
            any_at_all = True
            name = item["Key"][root:]
            if (wanted is None or wanted.fullmatch(item["Key"])) and (include_hidden or not hidden(name)):
                found = True
                yield _object(bucket, item, name)
        if not found:
            raise InputError(_none(path, bucket, key, prefix, bool(magic), any_at_all))
    except Unavailable:
        raise
    except (StorageError, FileNotFoundError) as error:
        raise InputError(str(error)) from None


def walk(folder: str) -> Iterator[Object]:
    """Every object below a folder, hidden ones too."""
    bucket, key = s3_client.split(folder)
    prefix = _folder(key)
    for item in _listed(bucket, prefix):
        yield _object(bucket, item, item["Key"][len(prefix) :])


def names(folder: str) -> list[str]:
    """Names of the objects right in a folder."""
    bucket, key = s3_client.split(folder)
    prefix = _folder(key)
    found = (item["Key"][len(prefix) :] for item in _listed(bucket, prefix, Delimiter="/"))
    return [name for name in found if not name.startswith(".")]


def folders(folder: str) -> list[str]:
    """Names of the folders right in a folder."""
    bucket, key = s3_client.split(folder)
    prefix = _folder(key)
    pages = _pages(bucket, prefix, Delimiter="/")
    return [p["Prefix"][len(prefix) : -1] for page in pages for p in page.get("CommonPrefixes", [])]


def is_folder(path: str) -> bool:
    """Whether there is anything below a path."""
    bucket, key = s3_client.split(path)
    with s3_client.translated(path, "s3:ListBucket"):
        page = s3_client.client().list_objects_v2(Bucket=bucket, Prefix=_folder(key), MaxKeys=1, **s3_client.extra())
    return bool(page.get("Contents"))


def _folder(key: str) -> str:
    return key if not key or key.endswith("/") else key + "/"


def _object(bucket: str, item: dict[str, Any], name: str) -> Object:
    return Object(f"s3://{bucket}/{item['Key']}", name, item["Size"], item["ETag"].strip('"'))


def _exact(bucket: str, key: str) -> dict[str, Any] | None:
    """The listing's entry of one key. Not HEAD: that needs another permission, and answers without a reason."""
    with s3_client.translated(f"s3://{bucket}/{key}", "s3:ListBucket"):
        page = s3_client.client().list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1, **s3_client.extra())
    first = next(iter(page.get("Contents", [])), None)
    return first if first is not None and first["Key"] == key else None


def _listed(bucket: str, prefix: str, **more: str) -> Iterator[dict[str, Any]]:
    for page in _pages(bucket, prefix, **more):
        # Keys that end in / are folders that some tools make.
        yield from (item for item in page.get("Contents", []) if not item["Key"].endswith("/"))


def _pages(bucket: str, prefix: str, **more: str) -> Iterator[dict[str, Any]]:
    with s3_client.translated(f"s3://{bucket}/{prefix}", "s3:ListBucket"):
        paginator = s3_client.client().get_paginator("list_objects_v2")
        yield from paginator.paginate(Bucket=bucket, Prefix=prefix, **more, **s3_client.extra())


def _none(path: str, bucket: str, key: str, prefix: str, magic: bool, any_at_all: bool) -> str:
    if magic:
        under = f"; none is under s3://{bucket}/{prefix} at all" if prefix and not any_at_all else ""
        return f"{path}: no object matches{under}"
    if any_at_all:
        return f"{path}: it holds only hidden objects (a part of their names begins with . or _)"
    return f"{path}: no such object, and none under it{_hint(bucket, key.rstrip('/'))}"


def _hint(bucket: str, key: str) -> str:
    """The sibling that a misspelt key most likely means, from one page of its parent."""
    if not key:
        return ""
    parent, _, name = key.rpartition("/")
    prefix = _folder(parent)
    try:
        page = next(iter(_pages(bucket, prefix, Delimiter="/")), {})
    except OSError:
        return ""
    beside = [p["Prefix"] for p in page.get("CommonPrefixes", [])] + [c["Key"] for c in page.get("Contents", [])]
    meant = near(name, [k[len(prefix) :].rstrip("/") for k in beside])
    return f"; did you mean s3://{bucket}/{prefix}{meant}?" if meant else ""
