"""Object stores and a cache of their own for the tests of storage."""

import pytest

from prefect_rlhf.files.remote_path import CACHE_VARIABLE
from prefect_rlhf.files.storage import patience
from tests.support.object_stores import gcs_emulator, s3_emulator


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of mirrors, empty at first."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    """A store that is away is given up at once, unless a test says otherwise; none is known to be away."""
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(patience, "_given_up", set())


@pytest.fixture(params=[s3_emulator, gcs_emulator], ids=["s3", "gs"])
def bucket(request, monkeypatch):
    """The remote path of an empty bucket."""
    with request.param(monkeypatch) as url:
        yield url


@pytest.fixture
def s3(monkeypatch):
    """The remote path of an empty bucket of S3's emulator."""
    with s3_emulator(monkeypatch) as url:
        yield url
