"""Patience with a store that is away: what was asked of it is asked again for a while, with growing pauses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from prefect_rlhf.engines.storage.answers import expected_of, is_away

PATIENCE_SECONDS = 60.0
"""How long a store is waited for, from the first request that it did not answer; pyarrow's own tries are within."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 15.0

Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)
_given_up: set[str] = set()  # stores that were waited for in vain and have not answered since


def patiently(url: str, request: Callable[[], Answer]) -> Answer:
    """Return the answer to a request to a remote path's store, which is made again while the store is away.

    Each wait is a line of the log. Raises what the request raises: at once where waiting cannot help, or where the
    store was waited for in vain before and has not answered since, and else after PATIENCE_SECONDS.
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
            _log.warning("%s: waits %.0f s, at most %.0f in all, for %s", url, pause, left, expected_of(error, url))
            time.sleep(pause)
            pause *= 2
        else:
            _given_up.discard(store)
            return answer
