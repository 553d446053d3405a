"""Requests to the Hub: every wait has a limit, and a process sends no request if its user has set offline mode."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # huggingface_hub reads both
WISH = "RLHF_HUB_OFFLINE"
"""The user's own values of these variables, for ranks: there HF_HUB_OFFLINE is 1, so that no library sends requests to
the Hub."""
ANSWER_SECONDS = 20.0  # without a byte, for a request that has no limit of huggingface_hub's own
_lock = threading.RLock()


def wish() -> str:
    """Return the user's value of HF_HUB_OFFLINE, even if a gang has set the variable to 1 in this process."""
    return os.environ.get(WISH, next((value for name in OFFLINE if (value := os.environ.get(name))), ""))


@contextmanager
def asking() -> Iterator[None]:
    """Let huggingface_hub ask the Hub while the body runs, unless the user wants no requests.

    A rank's libraries stay offline; their setting is suspended only while this process sends requests.
    """
    from huggingface_hub import constants

    with _lock:
        _limit_waits()
        was_offline = constants.HF_HUB_OFFLINE
        if WISH in os.environ:
            constants.HF_HUB_OFFLINE = os.environ[WISH].upper() in constants.ENV_VARS_TRUE_VALUES
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = was_offline


def _limit_waits() -> None:
    """Give a limit to each request of huggingface_hub, which has no limit for some requests, such as lists of files."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    make = _http._GLOBAL_CLIENT_FACTORY  # a person may have set a factory, with certificates of their own
    if getattr(make, "has_limits", False):
        return

    def limited() -> Any:
        client = make()
        hooks = client.event_hooks
        client.event_hooks = hooks | {"request": [*hooks.get("request", ()), _with_limit]}
        return client

    limited.has_limits = True  # type: ignore[attr-defined]
    set_client_factory(limited)


def _with_limit(request: Any) -> None:
    given = request.extensions.get("timeout") or {}
    kinds = ("connect", "read", "write", "pool")
    request.extensions["timeout"] = {kind: given.get(kind) or ANSWER_SECONDS for kind in kinds}
