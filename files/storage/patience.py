"""Retries of requests to a store that is away, for a limited time and with growing pauses."""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from prefect_rlhf.files.storage.answers import expected_of, is_away

PATIENCE_SECONDS = 60.0
"""How long to wait for a store, from the first request without an answer; pyarrow's own retries count."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 15.0

Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)
_given_up: set[str] = set()  # stores that did not answer within PATIENCE_SECONDS, nor since


def patiently(url: str, request: Callable[[], Answer]) -> Answer:
    """Return the answer to a request to a remote path's store; repeat the request while the store is away.

    Each wait is a line of the log. Raises the error of the request: at once if waiting cannot help or if an earlier
    wait for the store failed and it has not answered since, otherwise after PATIENCE_SECONDS.
    """
    scheme, _, rest = url.partition("://")
    store = f"{scheme}://{rest.partition('/')[0]}"
    since, pause = time.monotonic(), FIRST_PAUSE_SECONDS
    while True:
        try:
            answer = request()
        except Exception as error:
            left = PATIENCE_SECONDS - (time.monotonic() - since)
            if not is_away(error) or store in _given_up:
                raise
            if left <= 0:
                _given_up.add(store)
                raise
            pause = min(pause, left, LONGEST_PAUSE_SECONDS)
            _log.warning(
                "%s: waiting %.0f s, at most %.0f s in total, for %s", url, pause, left, expected_of(error, url)
            )
            time.sleep(pause)
            pause *= 2
        else:
            _given_up.discard(store)
            return answer
