"""The metrics of a call by name, as far as they are known before it has run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefect_rlhf.placement.graph import Call
from prefect_rlhf.tasks.host_rewards import HostRewards

PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True, slots=True)
class MetricNames:
    """The names that a call's metrics are known to have, and the beginnings of others that it may have beside them.

    >>> names = MetricNames(("exact", "failed", "seconds"), others=("exact/",))
    >>> names.excludes("exat"), names.excludes("exact/length")
    (True, False)
    """

    known: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def excludes(self, name: str) -> bool:
        """Say whether no metric of the call can have a name."""
        return name not in self.known and not name.startswith(self.others)


def metric_names(call: Call, tried: Sequence[str] | None = None) -> MetricNames:
    """Return the metrics of a call; `tried` are those that it had on made-up rows, where it ran on some.

    Those of a computation of this package have the same names on any rows; a person's own may make names of its rows.
    """
    if call.kind == "inference":
        return MetricNames()
    if call.kind == "generate":
        return MetricNames(("kept_mass",))
    if call.on_hosts:
        functions = tuple(HostRewards.model_validate_json(call.operation.settings).functions)
        return MetricNames((*functions, "failed", "seconds"), tuple(f"{function}/" for function in functions))
    is_ours = call.kind == "compute" and call.operation.module.partition(".")[0] == PACKAGE
    return MetricNames(tuple(tried or ()), () if is_ours and tried is not None else ("",))
