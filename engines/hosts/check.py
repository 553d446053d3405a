"""Functions are refused before anything runs: imported in a process that is ended when that takes too long."""

from __future__ import annotations

from collections.abc import Collection

from prefect_rlhf.engines.hosts.function import HostFunction
from prefect_rlhf.engines.hosts.pool import START_SECONDS, HostPool
from prefect_rlhf.engines.hosts.settings import HostSettings
from prefect_rlhf.placement.errors import InvalidInput


def check_function(
    function: HostFunction, columns: Collection[str] | None = None, seconds: float = START_SECONDS
) -> None:
    """Raise InvalidInput for a function that cannot be imported, is none, or takes other arguments.

    Also for one that needs what is not among `columns`, those of the dataset, where they are given.
    """
    with HostPool((function,), HostSettings(workers=1), seconds) as pool:
        (loaded,) = pool.load()
    if columns is None:
        return
    lacking = function.lacking(loaded.named, {*columns, "prompt", "response", "completion_ids"})
    if lacking:
        expected = f"a dataset with a column {lacking[0]}, which {function.function} needs"
        raise InvalidInput(function.field, sorted(columns), expected)
