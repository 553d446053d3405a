"""Failures in the replies of several ranks: which to raise, with its rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from prefect_rlhf.engines.gang.processes.messages import Reply
from prefect_rlhf.errors.errors import CollectiveFailed, InvalidInput, RankFailed, RlhfError


def raise_first_failure(
    replies: Mapping[int, Reply], doing: str, name: Callable[[int], str] = "rank {}".format, silent: str = ""
) -> None:
    """Raise the failure that explains the others. A broken collective only follows another rank's failure.

    If all failures are broken collectives, the error names the ranks that are `silent`.
    """
    errors: dict[int, Exception] = {}
    for rank, reply in sorted(replies.items()):
        if reply.error:
            errors[rank] = reply.error
            logging.getLogger(__name__).debug("rank %d in %s:\n%s", rank, doing, reply.traceback)
    if errors:
        rank = min(errors, key=lambda rank: (isinstance(errors[rank], CollectiveFailed), rank))
        raise _with_rank(errors[rank], name(rank), doing, replies[rank].traceback, silent)


def _with_rank(error: Exception, rank: str, doing: str, traceback: str, silent: str) -> Exception:
    """Return the same error with its rank and call; an InvalidInput keeps its text and only gets a note."""
    if isinstance(error, RankFailed):
        waited = f"; {silent} did not answer" if silent and isinstance(error, CollectiveFailed) else ""
        failure = type(error)(f"{rank} failed in {doing}: {error}{waited}")
        failure.traceback = traceback
        return failure
    if isinstance(error, RlhfError) and not isinstance(error, InvalidInput):
        return type(error)(f"{rank}: {error}")
    error.add_note(f"on {rank} in {doing}")
    return error
