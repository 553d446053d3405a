"""The losses of a train_step: a weighted sum, each loss on its own rows.

>>> from prefect_rlhf.tasks.rl.losses import nll
>>> both = nll().on("rows") + 0.1 * nll().on("others", name="kept")
>>> [(term.weight, term.name) for term in both.terms]
[(1.0, 'nll'), (0.1, 'kept')]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NoReturn

from prefect_rlhf.errors.errors import GraphError
from prefect_rlhf.placement.graph import MeanOver, Operation


@dataclass(frozen=True, slots=True)
class LossOn:
    """A loss on rows; `Bound.on` documents its fields."""

    name: str
    operation: Operation
    rows: tuple[object, ...]
    mean_over: MeanOver
    temperature: float
    batch_size: int | None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Terms:
    """A weighted sum of losses, as you write it: `a + 0.1 * b`. You can add and multiply it further."""

    terms: tuple[LossOn, ...]

    def __add__(self, other: object) -> Terms:
        if not isinstance(other, Terms):
            raise GraphError(f"got {other!r:.80} in a sum of losses, expected a loss on rows: nll(algo).on(rows)")
        return Terms((*self.terms, *other.terms))

    def __radd__(self, other: object) -> Terms:
        return self if other == 0 else self + other  # sum() begins with 0

    def __sub__(self, other: object) -> Terms:
        return self + (-1.0 * other if isinstance(other, Terms) else other)

    def __mul__(self, factor: object) -> Terms:
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not math.isfinite(factor) or not factor:
            raise GraphError(
                f"got {factor!r:.80} as the weight of {self.terms[0].name}, expected a finite number other than 0: "
                "leave out a term that should not count, and multiply by values of the run within the loss"
            )
        return Terms(tuple(replace(term, weight=factor * term.weight) for term in self.terms))

    __rmul__ = __mul__

    def __neg__(self) -> Terms:
        return -1.0 * self

    def _refuse(self, *_: object) -> NoReturn:
        """Raise GraphError: a loss has no value yet."""
        raise GraphError(f"loss {self.terms[0].name} has no value while the body is traced")

    __bool__ = __float__ = _refuse
