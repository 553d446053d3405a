"""Records the calls that a gang's ranks are running, because two calls must not share a resource of a rank."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.placement.augmented.resources import RESOURCES, Resource


class CallsInFlight:
    """Which call occupies each resource of each rank. The caller has to wait for a free rank itself."""

    def __init__(self) -> None:
        self._doing: dict[tuple[int, Resource], str] = {}
        self._changing = threading.Lock()

    def idle(self, rank: int) -> Resource | None:
        """Return a resource of a rank that no call occupies; None if calls occupy all of them."""
        with self._changing:
            return next((resource for resource in RESOURCES if (rank, resource) not in self._doing), None)

    @contextmanager
    def noted(self, ranks: Iterable[int], resource: Resource, doing: str) -> Iterator[None]:
        """Reserve a resource of these ranks while the block runs. Raises RlhfError if another call occupies it."""
        keys = [(rank, resource) for rank in ranks]
        with self._changing:
            for key in keys:
                if key in self._doing:
                    overlap = f"rank {key[0]} was asked for {doing} while it was running {self._doing[key]}"
                    raise RlhfError(f"{overlap}: two calls cannot share the {resource} of a rank")
            self._doing |= dict.fromkeys(keys, doing)
        try:
            yield
        finally:
            with self._changing:
                for key in keys:
                    del self._doing[key]
