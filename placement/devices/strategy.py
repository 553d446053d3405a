"""A parallelisation strategy (dp, tp, pp, ep), and the device for each of its coordinates on a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from operator import mul
from types import MappingProxyType

from prefect_rlhf.placement.devices.axes import OFFERED, ORDER
from prefect_rlhf.placement.devices.hashed_once import HashedOnce, hashed_once


@hashed_once
@dataclass(frozen=True, slots=True, order=True)
class Strategy(HashedOnce):
    """Degrees of data, tensor, pipeline and expert parallelism.

    Expert parallelism divides dp and needs no devices of its own (as in Megatron): `ep` neighbouring replicas of a
    stage divide its experts among them, tp splits each expert, and dp / ep such groups hold the same experts.

    >>> str(Strategy(dp=2)), Strategy(dp=2, tp=4, pp=2).num_devices, str(Strategy(dp=8, ep=4))
    ('dp2', 16, 'dp8 ep4')
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def num_devices(self) -> int:
        return _num_devices(self)

    @property
    def replica_devices(self) -> int:
        """The devices of a replica."""
        return self.num_devices // self.dp

    @property
    def degrees(self) -> Mapping[str, int]:
        """The degree of each axis, in the order of the table."""
        return _degrees(self)

    def stride(self, axis: str) -> int:
        """Return the distance, in the order of coordinates, between devices that differ by 1 along only this axis.

        >>> [Strategy(dp=2, tp=4, pp=2).stride(axis) for axis in ("tp", "dp", "pp")]
        [1, 4, 8]
        """
        return _strides(self)[axis]

    def span(self, axis: str) -> int:
        """Return how many devices, in the order of coordinates, a group along an axis spans from its first to its last.

        >>> [Strategy(dp=2, tp=4, pp=2).span(axis) for axis in ("tp", "dp", "pp")]
        [4, 8, 16]
        """
        return _strides(self)[axis] * int(getattr(self, axis))

    def __str__(self) -> str:
        return " ".join(f"{axis}{degree}" for axis, degree in self.degrees.items() if degree > 1) or "dp1"

    def coordinates(self) -> tuple[Coordinate, ...]:
        """Return the coordinates of a mesh's devices, in order: tp varies fastest, then dp, then pp (as in Megatron).

        >>> [(c.pp, c.dp, c.tp) for c in Strategy(dp=2, pp=2).coordinates()]
        [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
        """
        return _coordinates(self)


@dataclass(frozen=True, slots=True, order=True)
class Coordinate:
    """A device's data-parallel replica, tensor-parallel shard and pipeline stage."""

    dp: int
    tp: int
    pp: int


# Planning requests these of the same few hundred strategies many times.
@lru_cache(maxsize=4096)
def _degrees(strategy: Strategy) -> Mapping[str, int]:
    return MappingProxyType({axis: getattr(strategy, axis) for axis in OFFERED})


@lru_cache(maxsize=4096)
def _num_devices(strategy: Strategy) -> int:
    return prod(getattr(strategy, axis) for axis in ORDER)


@lru_cache(maxsize=4096)
def _strides(strategy: Strategy) -> dict[str, int]:
    inner = accumulate((getattr(strategy, axis) for axis in ORDER), mul, initial=1)
    return dict(zip(ORDER, inner, strict=False))  # the last product is of all


@lru_cache(maxsize=4096)
def _coordinates(strategy: Strategy) -> tuple[Coordinate, ...]:
    outermost_first = ORDER[::-1]
    places = product(*(range(getattr(strategy, axis)) for axis in outermost_first))
    return tuple(Coordinate(**dict(zip(outermost_first, place, strict=True))) for place in places)


def strategies(num_devices: int) -> Iterator[Strategy]:
    """Yield all strategies for a number of devices; all have ep 1.

    The order is: most data parallelism first, then tensor before pipeline parallelism.

    >>> [str(strategy) for strategy in strategies(4)]
    ['dp4', 'dp2 tp2', 'dp2 pp2', 'tp4', 'tp2 pp2', 'pp4']
    """
    for dp in _divisors(num_devices):
        for tp in _divisors(num_devices // dp):
            yield Strategy(dp, tp, num_devices // (dp * tp))


def _divisors(number: int) -> Iterator[int]:
    """Yield the divisors, the largest first."""
    return (divisor for divisor in range(number, 0, -1) if number % divisor == 0)
