"""What the answers of a store mean: what is missing, and whether it may come by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from prefect_rlhf.placement.errors import InvalidInput, OutputFailed, RlhfError
from prefect_rlhf.placement.remote_path import scheme_of

S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
GCS_EMULATOR = "CLOUD_STORAGE_EMULATOR_ENDPOINT"
NO_BUCKET = "status code: 404"  # in what GCS says
EXTRAS = {"s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "gs": "GOOGLE_APPLICATION_CREDENTIALS"}
BUCKET, CREDENTIALS, ANSWER = "a bucket that is there", "credentials", "a store that answers"
_WORDS = (  # in the errors of stores, and what is wrong then
    (("NO_SUCH_BUCKET", "NoSuchBucket", NO_BUCKET), BUCKET),
    (("ACCESS_DENIED", "UNAUTHENTICATED", "PERMISSION_DENIED", "access token", "HTTP status 403", "HTTP status 401",
      "INVALID_ACCESS_KEY", "SIGNATURE_DOES_NOT_MATCH", "Forbidden"), CREDENTIALS),
    (("NETWORK_CONNECTION", "UNAVAILABLE", "curlCode", "Cannot connect", "timed out", "Timeout", "Retry policy",
      "Connection re", "Server disconnected", "SLOW_DOWN", "THROTTLING", "INTERNAL_FAILURE",  # refused or reset
      *(f"{words} {code}" for words in ("HTTP status", "ClientResponseError:") for code in (429, 500, 502, 503, 504))),
     ANSWER),
)  # fmt: skip


@contextmanager
def explained(url: str, field: str) -> Iterator[None]:
    """Raise what a store answers to a reader as InvalidInput at `field`: what was asked for, and what is missing."""
    try:
        yield
    except Exception as error:
        if (expected := expected_of(error, url)) is None:
            raise
        raise InvalidInput(field, url, expected) from error


@contextmanager
def uploading(url: str) -> Iterator[None]:
    """Raise what a store answers to a writer as OutputFailed, which names the remote path."""
    try:
        yield
    except Exception as error:
        if (expected := expected_of(error, url)) is None:
            raise
        raise OutputFailed(f"{url} cannot be written: it takes {expected}") from error


def expected_of(error: Exception, url: str) -> str | None:
    """Return what would be right, with the store's words; None for an error that is no answer of a store."""
    if not _is_answer(error, url):
        return None
    text, found, scheme = _text(error), _missing(error), scheme_of(url)
    if found == CREDENTIALS:
        found = f"credentials that may use it, in the environment ({EXTRAS.get(scheme, f'as {scheme} wants them')})"
    elif found == ANSWER:
        found = f"{found} at {_endpoint(scheme)}"
    elif isinstance(error, FileNotFoundError):
        found = "a path with something there"
    elif isinstance(error, NotImplementedError):
        found = f"a scheme that allows this: {scheme} does not"
    return f"{found or 'a path that its store can serve'} ({text:.200})"


def is_away(error: Exception) -> bool:
    """Say whether an error is one of a store that does not answer now and may later, such as a refused connection."""
    return not isinstance(error, RlhfError) and _missing(error) == ANSWER


def _is_answer(error: Exception, url: str) -> bool:
    """Say whether an error is of a store or of its library; of an archive's library it may be any."""
    if isinstance(error, RlhfError):
        return False
    known = isinstance(error, OSError | ValueError | NotImplementedError) or type(error).__module__ != "builtins"
    return known or scheme_of(url) not in EXTRAS


def _missing(error: Exception) -> str | None:
    return next((said for words, said in _WORDS if any(word in _text(error) for word in words)), None)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _endpoint(scheme: str) -> str:
    names = {"s3": S3_ENDPOINTS, "gs": (GCS_EMULATOR,)}.get(scheme, ())
    set_here = next((f"{os.environ[name]} ({name})" for name in names if os.environ.get(name)), None)
    return set_here or "its address"
