"""The store of a remote path: pyarrow's own file system for s3:// and gs://, fsspec's for all other schemes.

Credentials and endpoints are read from the environment. Every request has a time limit.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

from prefect_rlhf.errors.errors import refusing
from prefect_rlhf.files.remote_path import scheme_of
from prefect_rlhf.files.storage.answers import GCS_EMULATOR, S3_ENDPOINTS, explained
from prefect_rlhf.files.storage.patience import patiently

CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 20.0  # without a byte
ATTEMPTS = 3
S3_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")


@dataclass(frozen=True, slots=True)
class Store:
    """A file system with pyarrow's interface, and a path in it, for the remote path `url` given as `field`."""

    files: Any
    path: str
    url: str
    field: str


def open_store(url: str, field: str) -> Store:
    """Return the store of a remote path. The only request is to AWS for a bucket's region, if no variable sets it.

    Raises InvalidInput, at `field`, for an unknown scheme and for an archive that does not open.
    """
    scheme, rest = scheme_of(url), url.partition("://")[2].rstrip("/")
    if scheme in ("s3", "gs"):
        with explained(url, field):
            return Store(_s3(rest.partition("/")[0]) if scheme == "s3" else _gcs(), rest, url, field)
    return _fsspec(url, field)


def _first_set(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


@lru_cache(maxsize=16)
def _s3(bucket: str) -> Any:
    from pyarrow import fs  # only in these functions: the libraries of stores are large

    endpoint, region = _first_set(S3_ENDPOINTS), _first_set(S3_REGIONS)
    if region is None and endpoint is None:
        region = patiently(f"s3://{bucket}", lambda: fs.resolve_s3_region(bucket))
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
    from fsspec.registry import get_filesystem_class
    from pyarrow import fs

    expected = "a scheme that fsspec knows here: s3, gs, ..."
    with refusing((ImportError, ValueError), field, url, expected):
        get_filesystem_class(scheme_of(url))
    # ImportError: of a file system within, as of zip://a.zip::sftp://host/b
    with refusing(ImportError, field, url, expected), explained(url, field):
        files, path = url_to_fs(url)
    return Store(fs.PyFileSystem(fs.FSSpecHandler(files)), path.rstrip("/"), url, field)
