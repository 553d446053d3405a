"""A rank's rows by step, call and key. They are kept until the last node that uses them on this rank has run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import final

from torch import Tensor

from prefect_rlhf.engines.weights.memory import storage_bytes
from prefect_rlhf.errors.errors import RlhfError


class RowsMissing(RlhfError):
    """A call or a transfer needs rows that this rank does not hold: the graph lacks a transfer."""


@final
class RowStore:
    """Rows as tensors of 0, 1 or 2 dimensions, on the host.

    >>> import torch
    >>> store = RowStore()
    >>> store.put(3, "reward_inference", "scores", {4: torch.tensor(0.5)})
    >>> store.get(3, "reward_inference", "scores", [4])
    [tensor(0.5000)]
    >>> store.free(3, [("reward_inference", "scores")]); len(store), store.num_bytes
    (0, 0)
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[tuple[str, str], dict[int, Tensor]]] = defaultdict(lambda: defaultdict(dict))

    def put(self, step: int, call: str, key: str, rows: Mapping[int, Tensor]) -> None:
        """Keep rows, in addition to the rows stored under the same key."""
        self._rows[step][call, key].update(rows)

    def get(self, step: int, call: str, key: str, rows: Sequence[int]) -> list[Tensor]:
        """Return the requested rows, in their order. Raises RowsMissing."""
        held = self._rows.get(step, {}).get((call, key), {})
        missing = [row for row in rows if row not in held]
        if missing:
            keys = ", ".join(f"{name}.{key}" for name, key in self.keys(step)) or "nothing"
            raise RowsMissing(f"{call}.{key} of step {step}: row {missing[0]} is not on this rank, which holds {keys}")
        return [held[row] for row in rows]

    def keys(self, step: int) -> tuple[tuple[str, str], ...]:
        """Return the (call, key) of each column stored for a step."""
        return tuple(self._rows.get(step, {}))

    def free(self, step: int, keys: Iterable[tuple[str, str]]) -> None:
        """Drop all rows of these (call, key) of a step."""
        held = self._rows.get(step, {})
        for key in keys:
            held.pop(key, None)
        if not held:
            self._rows.pop(step, None)

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages behind all rows, including padding that they keep alive."""
        held = [rows for step in list(self._rows.values()) for rows in list(step.values())]  # copies: threads may put
        return storage_bytes([row for rows in held for row in list(rows.values())])

    def __len__(self) -> int:
        """The number of rows held, over all steps and keys."""
        return sum(len(rows) for step in self._rows.values() for rows in step.values())
