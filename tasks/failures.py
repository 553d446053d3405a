"""Foreseeable failures in Prefect: one line as the state's message, no traceback."""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import State
from prefect.states import Failed

from prefect_rlhf.placement.errors import RlhfError


def failed(error: RlhfError) -> State[Any]:
    """Return the state of a task or flow run that an error of ours ended; asking it for a result raises the error."""
    return Failed(message=f"{type(error).__name__}: {error}", data=error)
