"""A call's time as a value with named terms, each with the source of its formula."""

from __future__ import annotations

from collections.abc import Mapping
from operator import add
from types import MappingProxyType
from typing import NamedTuple


class Seconds(NamedTuple):
    """Seconds by cause; `SOURCES` has the formula of each.

    A named tuple, since a search adds up millions of them, and a dataclass takes twice as long to make.

    >>> (Seconds(compute=2.0) + Seconds(launch=1.0).times(3)).total
    5.0
    """

    compute: float = 0.0
    memory_traffic: float = 0.0
    launch: float = 0.0
    tp_communication: float = 0.0
    pp_communication: float = 0.0
    ep_communication: float = 0.0
    pipeline_bubble: float = 0.0
    dp_communication: float = 0.0
    optimizer: float = 0.0
    call: float = 0.0
    transfer: float = 0.0
    orchestration: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def __add__(self, other: Seconds) -> Seconds:  # type: ignore[override]  # adds terms; a tuple would be longer
        return Seconds(*map(add, self, other))

    def times(self, factor: float) -> Seconds:
        """Return each term `factor` times."""
        return Seconds(*[factor * term for term in self])

    @property
    def worked(self) -> float:
        """The seconds that ranks work, by their own clocks: all but orchestration."""
        return self._replace(orchestration=0.0).total

    def by_term(self) -> dict[str, float]:
        """Return the terms that take any time, the longest first."""
        named = zip(self._fields, self, strict=True)
        return dict(sorted(((name, value) for name, value in named if value), key=lambda item: -item[1]))


SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "compute": "matrix products and attention: 2 FLOPs per weight and token, 4 x width x context / 2 per token of "
        "causal attention, backward twice (Narayanan et al. 2021, appendix), over the datasheet's peak",
        "memory_traffic": "weights, key-value cache, element-wise passes over memory bandwidth (ReaL, figures 10, 11)",
        "launch": "kernel launches of each layer, fewer with CUDA graphs (ReaL, sections 8.1 and 8.2, table 6)",
        "tp_communication": "two ring all-reduces of [tokens, hidden] per layer, forward and backward (Shoeybi et al. "
        "2019; ReaL, section 2.2)",
        "pp_communication": "[tokens, hidden] between neighbouring stages (Narayanan et al. 2021, section 2.2)",
        "ep_communication": "two all-to-alls of [tokens, hidden] for each expert of a token, per layer, forward and "
        "backward (Lepikhin et al. 2021, section 3.1)",
        "pipeline_bubble": "(pp - 1) micro-batches of a stage's time (Narayanan et al. 2021, section 2.2)",
        "dp_communication": "reduce-scatter of gradients, all-gather of weights (Rajbhandari et al. 2020, section 7)",
        "optimizer": "Adam's passes over gradients, weights and moments at memory bandwidth",
        "call": "a constant for each call (ReaL, tables 4 to 6)",
        "transfer": "bytes of weights, rows or checkpoints over the busiest link or to disk (ReaL, sections 5.1 and 6)",
        "orchestration": "a constant for each task run: messages to ranks and Prefect's states (docs/plans.md)",
    }
)
"""The source of each term's formula."""
