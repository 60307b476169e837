"""Listing S3: pages of a thousand keys, of which one is held at a time."""

from collections.abc import Iterator
from typing import Any

from raypd.storage.common import Object
from raypd.storage.s3_client import S3Client, split


def single(client: S3Client, path: str) -> Object | None:
    bucket, key = split(path)
    if not key:
        return None
    with client.translated(path, "s3:ListBucket"):  # not HEAD: it needs another permission, and has no reason
        item = client.first(bucket, key)
    return _object(path, item) if item is not None and item["Key"] == key else None


def walk(client: S3Client, folder: str) -> Iterator[Object]:
    return objects(client, _folder(folder))


def names(client: S3Client, folder: str) -> list[str]:
    items = objects(client, _folder(folder), Delimiter="/")
    return [item.name for item in items if not item.name.startswith(".")]


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


def objects(client: S3Client, prefix: str, **options: str) -> Iterator[Object]:
    for page in _pages(client, prefix, **options):
        # Keys that end in / are folders that some tools make.
        yield from (_object(prefix, item) for item in page.get("Contents", []) if not item["Key"].endswith("/"))


def _pages(client: S3Client, path: str, **options: str) -> Iterator[dict[str, Any]]:
    bucket, prefix = split(path)
    with client.translated(path, "s3:ListBucket"):
        paginator = client.boto().get_paginator("list_objects_v2")
        yield from paginator.paginate(Bucket=bucket, Prefix=prefix, **options)


def beside(client: S3Client, folder: str) -> list[str]:
    """From one page."""
    page = next(iter(_pages(client, folder + "/", Delimiter="/")), {})
    keys = [p["Prefix"] for p in page.get("CommonPrefixes", [])] + [c["Key"] for c in page.get("Contents", [])]
    return [key.rstrip("/").rpartition("/")[2] for key in keys]
