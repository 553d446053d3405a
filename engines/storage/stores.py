"""The store behind a remote path: pyarrow's own file system for s3:// and gs://, fsspec's for all other schemes.

Credentials and endpoints are those of the environment. Every request has a time limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

from prefect_rlhf.placement.errors import InvalidInput, OutputFailed
from prefect_rlhf.placement.remote_path import scheme_of

CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 20.0  # without a byte
ATTEMPTS = 3
S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
S3_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
GCS_EMULATOR = "CLOUD_STORAGE_EMULATOR_ENDPOINT"
NO_BUCKET = "status code: 404"  # in what GCS says
EXTRAS = {"s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "gs": "GOOGLE_APPLICATION_CREDENTIALS"}
_WORDS = (  # in the errors of stores, and what is wrong then
    (("NO_SUCH_BUCKET", "NoSuchBucket", NO_BUCKET), "a bucket that is there"),
    (("ACCESS_DENIED", "UNAUTHENTICATED", "PERMISSION_DENIED", "access token", "HTTP status 403", "HTTP status 401",
      "INVALID_ACCESS_KEY", "SIGNATURE_DOES_NOT_MATCH", "Forbidden"), "credentials"),
    (("NETWORK_CONNECTION", "UNAVAILABLE", "curlCode", "Cannot connect", "timed out", "Timeout", "Retry policy"),
     "a store that answers"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Store:
    """A file system of pyarrow's interface, and a path in it."""

    files: Any
    path: str


def open_store(url: str, field: str) -> Store:
    """Return the store of a remote path. Nothing is asked of it, but of AWS where a bucket is when no variable says so.

    Raises InvalidInput, at `field`, for a scheme that nobody here knows.
    """
    scheme, rest = scheme_of(url), url.partition("://")[2].rstrip("/")
    if scheme in ("s3", "gs"):
        with explained(url, field):
            return Store(_s3(rest.partition("/")[0]) if scheme == "s3" else _gcs(), rest)
    return _fsspec(url, field)


@contextmanager
def explained(url: str, field: str) -> Iterator[None]:
    """Raise what a store answers to a reader as InvalidInput at `field`: what was asked for, and what is missing."""
    try:
        yield
    except Exception as error:
        if (expected := _expected(error, url)) is None:
            raise
        raise InvalidInput(field, url, expected) from error


@contextmanager
def uploading(url: str) -> Iterator[None]:
    """Raise what a store answers to a writer as OutputFailed, which names the remote path."""
    try:
        yield
    except Exception as error:
        if (expected := _expected(error, url)) is None:
            raise
        raise OutputFailed(f"{url} cannot be written: it takes {expected}") from error


def _expected(error: Exception, url: str) -> str | None:
    """Return what would be right, with the store's words; None for what is no answer of a store."""
    if not isinstance(error, OSError | TimeoutError) and not type(error).__module__.startswith(("aiohttp", "botocore")):
        return None
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    scheme = scheme_of(url)
    found = next((said for words, said in _WORDS if any(word in text for word in words)), None)
    if found == "credentials":
        found = f"credentials that may use it, in the environment ({EXTRAS.get(scheme, f'as {scheme} wants them')})"
    elif found == "a store that answers":
        found = f"{found} at {_endpoint(scheme)}"
    elif isinstance(error, FileNotFoundError):
        found = "a path with something there"
    return f"{found or 'a path that its store can serve'} ({text:.200})"


def _endpoint(scheme: str) -> str:
    names = {"s3": S3_ENDPOINTS, "gs": (GCS_EMULATOR,)}.get(scheme, ())
    set_here = next((f"{os.environ[name]} ({name})" for name in names if os.environ.get(name)), None)
    return set_here or "its address"


def _first_set(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


@lru_cache(maxsize=16)
def _s3(bucket: str) -> Any:
    from pyarrow import fs  # only here and below: the libraries of stores are large

    endpoint, region = _first_set(S3_ENDPOINTS), _first_set(S3_REGIONS)
    if region is None and endpoint is None:
        region = fs.resolve_s3_region(bucket)
    retries = fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS)
    limits = {"connect_timeout": CONNECT_SECONDS, "request_timeout": REQUEST_SECONDS, "retry_strategy": retries}
    return fs.S3FileSystem(endpoint_override=endpoint, region=region, **limits)


@lru_cache(maxsize=1)
def _gcs() -> Any:
    from pyarrow import fs

    limit = timedelta(seconds=ATTEMPTS * CONNECT_SECONDS)
    return fs.GcsFileSystem(anonymous=bool(os.environ.get(GCS_EMULATOR)), retry_time_limit=limit)


def _fsspec(url: str, field: str) -> Store:
    from fsspec.core import url_to_fs
    from pyarrow import fs

    try:
        files, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InvalidInput(field, url, f"a scheme that fsspec knows here: s3, gs, ... ({error!s:.120})") from error
    return Store(fs.PyFileSystem(fs.FSSpecHandler(files)), path.rstrip("/"))
