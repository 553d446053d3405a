"""The gang: one process per device for the life of a flow run, behind one small interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from prefect_rlhf.placement.augmented.node import Resource


class Gang(Protocol):
    """Rank processes that run methods of their `engines.rank.Rank`.

    Thread-safe if no two calls in flight share a resource of a rank; the scheduler of the calls ensures that. Each
    resource has a thread of its own, so calls of the host link and of the disk run concurrently with a computation.
    """

    size: int

    def call(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        *,
        doing: str,
        deadline_seconds: float,
        resource: Resource = "compute",
    ) -> dict[int, Any]:
        """Run `method` on each rank of `arguments` at the same time; return each rank's result.

        Raises RankFailed (a rank raised: its reason, in one line), RankLost (a rank died) or RankSilent (no answer
        before the deadline). Each names the rank and `doing`. After RankLost or RankSilent the gang is closed.
        """
        ...

    def close(self) -> None:
        """End every rank process. Idempotent, returns within seconds, never raises."""
        ...
