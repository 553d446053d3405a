"""How a search ended, as a value."""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """The value is the sentence for people."""

    OPTIMAL = "proved: no plan of the whole space ends sooner"
    WITHIN_GAP = "stopped: no plan can be better by more than the gap that was asked for"
    OUT_OF_BUDGET = "stopped when the budget was spent"
    INTERRUPTED = "stopped when asked to"
    INFEASIBLE = "proved: no plan fits the devices' memory"
