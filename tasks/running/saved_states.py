"""States of stateful computations after each step, kept until a checkpoint has written them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, cast, final

from prefect_rlhf.engines.files.saved_state import SavedState
from prefect_rlhf.errors.errors import InvalidInput

State = Mapping[str, Any] | InvalidInput
"""A state in a checkpoint's form, or the reason why a checkpoint cannot hold it."""


@final
class LeftStates:
    """States by call and step, because later steps change a state while a checkpoint is being written.

    The two newest states of each call are kept, because a run may be stopped after any step. States that a regular
    checkpoint has yet to write are kept too. Thread-safe.
    """

    def __init__(self, checkpoint_every: int | None) -> None:
        self._every = checkpoint_every
        self._left: dict[str, dict[int, State]] = defaultdict(dict)
        self._lock = threading.Lock()

    def leave(self, call: str, step: int, state: State) -> None:
        """Keep a call's state after `step`, and drop states that no checkpoint will need."""
        with self._lock:
            states = self._left[call]
            states[step] = state
            *older, _ = sorted(states)
            for before, after in zip(older[:-1], older[1:], strict=True):
                if self._every is None or (before - 1) // self._every == (after - 1) // self._every:
                    del states[before]

    def newest(self, call: str) -> SavedState | None:
        """Return a call's newest state, or None. Raises InvalidInput for a state that cannot be saved."""
        with self._lock:
            states = self._left.get(call)
            state = states[max(states)] if states else None
        if isinstance(state, InvalidInput):
            raise state
        return cast(SavedState | None, state)

    def written_after(self, step: int) -> dict[str, SavedState]:
        """Return each call's state after `step`, and drop all earlier states.

        Raises InvalidInput for a state that a checkpoint cannot hold.
        """
        found: dict[str, SavedState] = {}
        with self._lock:
            for call, states in self._left.items():
                newest = max((at for at in states if at <= step), default=None)
                if newest is None:
                    continue
                state = states[newest]
                if isinstance(state, InvalidInput):
                    raise state
                found[call] = cast(SavedState, state)
                for at in [at for at in states if at < newest]:
                    del states[at]
        return found
