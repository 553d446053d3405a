"""What several ranks answered: results, or the first failure with the rank it came from."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from prefect_rlhf.engines.gang.messages import Reply
from prefect_rlhf.placement.errors import CollectiveFailed, InvalidInput, RankFailed, RlhfError


def raise_first_failure(answers: Mapping[int, Reply], doing: str) -> None:
    """Raise the failure that explains the others: a broken collective is the echo of another rank's trouble."""
    failed = {rank: answer for rank, answer in sorted(answers.items()) if answer.error}
    for rank, answer in failed.items():
        logging.getLogger(__name__).debug("rank %d in %s:\n%s", rank, doing, answer.traceback)
    errors = {rank: answer.error for rank, answer in failed.items() if answer.error}
    for rank, error in sorted(errors.items(), key=lambda item: isinstance(item[1], CollectiveFailed)):
        raise _with_rank(error, rank, doing)


def _with_rank(error: Exception, rank: int, doing: str) -> Exception:
    """The same error, saying where it happened; an InvalidInput says what to change, so it only gets a note."""
    if isinstance(error, RankFailed):
        return type(error)(f"rank {rank} failed in {doing}: {error}")
    if isinstance(error, RlhfError) and not isinstance(error, InvalidInput):
        return type(error)(f"rank {rank}: {error}")
    error.add_note(f"on rank {rank} in {doing}")
    return error
