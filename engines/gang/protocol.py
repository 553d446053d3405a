"""The gang: a process per device for the life of a flow run, behind one small interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar, TypeVarTuple

from prefect_rlhf.placement.augmented.resources import Resource

AnyRank = TypeVar("AnyRank", covariant=True)
"""The class of a gang's ranks: `engines.rank.Rank`, or a rank for profiles, trials or tests."""
Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class Gang(Protocol[AnyRank]):
    """Rank processes that run methods of their rank, an AnyRank.

    Thread-safe if no two calls in flight share a resource of a rank; the scheduler of the calls ensures that. Each
    resource has a thread of its own, so calls of the host link and of the disk run concurrently with a computation.
    """

    size: int

    def call(
        self,
        method: Callable[[AnyRank, *Arguments], Result],
        arguments: Mapping[int, tuple[*Arguments]],
        *,
        doing: str,
        deadline_seconds: float,
        resource: Resource = "compute",
    ) -> dict[int, Result]:
        """Run `method` on each rank of `arguments` at the same time; return each rank's result.

        `method` is a method of the ranks' class, such as `Rank.build`. Only its name is sent, so a rank of a subclass
        runs its own method.

        Raises RankFailed (a rank raised: its reason, in one line), RankLost (a rank died) or RankSilent (no answer
        before the deadline). Each names the rank and `doing`. After RankLost or RankSilent the gang is closed.
        """
        ...

    def close(self) -> None:
        """End every rank process. Idempotent, returns within seconds, never raises."""
        ...
