"""Check functions before a run: import them in a process, which is killed if the import takes too long."""

from __future__ import annotations

from collections.abc import Collection

from prefect_rlhf.engines.hosts.function import HostFunction
from prefect_rlhf.engines.hosts.pool import START_SECONDS, HostPool
from prefect_rlhf.engines.hosts.settings import HostSettings
from prefect_rlhf.placement.errors import InvalidInput


def check_function(
    function: HostFunction, columns: Collection[str] | None = None, seconds: float = START_SECONDS
) -> None:
    """Raise InvalidInput if `function` cannot be imported, is not a function, or takes other arguments.

    With `columns`, those of the dataset, also if the function needs a column that is missing there.
    """
    with HostPool((function,), HostSettings(workers=1), seconds) as pool:
        (loaded,) = pool.load()
    if columns is None:
        return
    lacking = function.lacking(loaded.named, {*columns, "prompt", "response", "completion_ids"})
    if lacking:
        expected = f"a dataset with a column {lacking[0]}, which {function.function} needs"
        raise InvalidInput(function.field, sorted(columns), expected)
