"""Interprets a store's errors: which part is missing, and whether waiting may help."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from prefect_rlhf.errors.errors import InvalidInput, OutputFailed, RlhfError
from prefect_rlhf.files.remote_path import scheme_of

S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
GCS_EMULATOR = "CLOUD_STORAGE_EMULATOR_ENDPOINT"
NO_BUCKET = "status code: 404"  # in GCS's text
EXTRAS = {"s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "gs": "GOOGLE_APPLICATION_CREDENTIALS"}
BUCKET, CREDENTIALS, ANSWER = "an existing bucket", "credentials", "a store that answers"
_WORDS = (  # texts in the errors of stores, and the missing part
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
    """Translate a reader's store error into InvalidInput at `field`, with the path and the missing part."""
    try:
        yield
    except Exception as error:
        if (expected := expected_of(error, url)) is None:
            raise
        raise InvalidInput(field, url, expected) from error


@contextmanager
def uploading(url: str) -> Iterator[None]:
    """Translate a writer's store error into OutputFailed, which names the remote path."""
    try:
        yield
    except Exception as error:
        if (expected := expected_of(error, url)) is None:
            raise
        raise OutputFailed(f"{url} cannot be written: expected {expected}") from error


def expected_of(error: Exception, url: str) -> str | None:
    """Return the expected value, with the store's own text; None for an error that does not come from a store."""
    if not _is_answer(error, url):
        return None
    text, found, scheme = _text(error), _missing(error), scheme_of(url)
    if found == CREDENTIALS:
        names = EXTRAS.get(scheme, f"in the variables of {scheme}")
        found = f"credentials with access to it, in the environment ({names})"
    elif found == ANSWER:
        found = f"{found} at {_endpoint(scheme)}"
    elif isinstance(error, FileNotFoundError):
        found = "a path that exists"
    elif isinstance(error, NotImplementedError):
        found = f"a scheme that allows this: {scheme} does not"
    return f"{found or 'a path that its store can serve'} ({text:.200})"


def is_away(error: Exception) -> bool:
    """Whether a store does not answer now but may answer later, for example after a refused connection."""
    return not isinstance(error, RlhfError) and _missing(error) == ANSWER


def _is_answer(error: Exception, url: str) -> bool:
    """Return whether an error comes from a store or its library; an archive's library may raise any error."""
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
