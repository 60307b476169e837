"""Listing S3: pages of a thousand keys, of which one is held at a time."""

from collections.abc import Iterator
from typing import Any

from raypd.errors import InputError, did_you_mean
from raypd.storage.common import Object, StorageError, Unavailable, choose, literal
from raypd.storage.s3_client import S3Client, split


def find(client: S3Client, path: str) -> Iterator[Object]:
    bucket, key = split(path)
    try:
        if key and not key.endswith("/"):
            with client.translated(path, "s3:ListBucket"):  # not HEAD: it needs another permission, and has no reason
                item = client.first(bucket, key)
            if item is not None and item["Key"] == key:
                yield _object(path, item)
                return
        prefix = literal(path)
        glob = path if prefix != path else None
        prefix = prefix if glob else _folder(path)

        def none(listed: bool) -> str:
            if glob is not None:
                empty = split(prefix)[1] and not listed
                return f"{path}: no object matches" + (f"; none is under {prefix} at all" if empty else "")
            if listed:
                return f"{path}: it holds only hidden objects (a part of their names begins with . or _)"
            return f"{path}: no such object, and none under it{_near(client, path.rstrip('/'))}"

        yield from choose(_objects(client, prefix), glob, none)
    except Unavailable:
        raise
    except (StorageError, FileNotFoundError) as error:
        raise InputError(str(error)) from None


def walk(client: S3Client, folder: str) -> Iterator[Object]:
    return _objects(client, _folder(folder))


def names(client: S3Client, folder: str) -> list[str]:
    objects = _objects(client, _folder(folder), Delimiter="/")
    return [item.name for item in objects if not item.name.startswith(".")]


def folders(client: S3Client, folder: str) -> list[str]:
    pages = _pages(client, _folder(folder), Delimiter="/")
    return [p["Prefix"].split("/")[-2] for page in pages for p in page.get("CommonPrefixes", [])]


def is_folder(client: S3Client, path: str) -> bool:
    with client.translated(path, "s3:ListBucket"):
        return client.first(*split(_folder(path))) is not None


def _folder(path: str) -> str:
    return path.rstrip("/") + "/"


def _object(prefix: str, item: dict[str, Any]) -> Object:
    path = f"s3://{split(prefix)[0]}/{item['Key']}"
    return Object(path, path[prefix.rfind("/") + 1 :], item["Size"], item["ETag"].strip('"'))


def _objects(client: S3Client, prefix: str, **options: str) -> Iterator[Object]:
    for page in _pages(client, prefix, **options):
        # Keys that end in / are folders that some tools make.
        yield from (_object(prefix, item) for item in page.get("Contents", []) if not item["Key"].endswith("/"))


def _pages(client: S3Client, path: str, **options: str) -> Iterator[dict[str, Any]]:
    bucket, prefix = split(path)
    with client.translated(path, "s3:ListBucket"):
        paginator = client.boto().get_paginator("list_objects_v2")
        yield from paginator.paginate(Bucket=bucket, Prefix=prefix, **options)


def _near(client: S3Client, path: str) -> str:
    """The sibling that a misspelt key most likely means, from one page of its parent."""
    parent, _, name = path.rpartition("/")
    if not split(path)[1]:
        return ""
    try:
        page = next(iter(_pages(client, parent + "/", Delimiter="/")), {})
    except OSError:
        return ""
    beside = [p["Prefix"] for p in page.get("CommonPrefixes", [])] + [c["Key"] for c in page.get("Contents", [])]
    hint = did_you_mean(name, [key.rstrip("/").rpartition("/")[2] for key in beside], lambda key: f"{parent}/{key}")
    return f"; {hint}" if hint else ""
