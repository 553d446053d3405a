"""What stateful computations left after each step, until a checkpoint has it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, cast, final

from prefect_rlhf.engines.files.saved_state import SavedState
from prefect_rlhf.placement.errors import InvalidInput

State = Mapping[str, Any] | InvalidInput
"""A state as a checkpoint holds it, or why none can."""


@final
class LeftStates:
    """States by call and step. A checkpoint is written behind later steps, which change the states meanwhile.

    Kept are the two newest of each call, since a run may be stopped after any step, and those that a regular checkpoint
    still has to write. Safe to call from many threads.
    """

    def __init__(self, checkpoint_every: int | None) -> None:
        self._every = checkpoint_every
        self._left: dict[str, dict[int, State]] = defaultdict(dict)
        self._lock = threading.Lock()

    def leave(self, call: str, step: int, state: State) -> None:
        """Keep what a call left at `step`; forget what no checkpoint will ask for."""
        with self._lock:
            states = self._left[call]
            states[step] = state
            *older, _ = sorted(states)
            for before, after in zip(older[:-1], older[1:], strict=True):
                if self._every is None or before // self._every == after // self._every:
                    del states[before]

    def written_after(self, step: int) -> dict[str, SavedState]:
        """Return what each call had left once `step` was over, and forget all from before.

        Raises InvalidInput for a state that no checkpoint can hold.
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
