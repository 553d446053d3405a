"""Publishing artifacts: a server that is away for a while is waited for; one that stays away costs a picture only."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import httpx
from prefect.exceptions import PrefectHTTPStatusError

Arguments = ParamSpec("Arguments")
Artifact = TypeVar("Artifact")

PATIENCE_SECONDS = 120.0
RETRY_SECONDS = 2.0


def publish(
    create: Callable[Arguments, Artifact], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Artifact | None:
    """Call `create` until the server takes it; None when it did not within two minutes.

    Prefect's own retries do not cover a client's first connection, and each artifact opens a new client.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return create(*args, **kwargs)
        except (httpx.TransportError, PrefectHTTPStatusError):
            if time.monotonic() > deadline:
                return None
            time.sleep(RETRY_SECONDS)
