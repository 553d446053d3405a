"""Which part of which parameter goes from which rank to which, so that a target layout is filled from a source.

A target rank is sent nothing that it holds already, and nothing twice: what moves is the least that can.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.layout.layout import Layout, Region
from prefect_rlhf.placement.layout.regions import intersection, num_elements, subtract
from prefect_rlhf.placement.mesh import Device


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of a parameter that rank `target` copies from rank `source`; the same rank when it stays there."""

    source: int
    target: int
    parameter: str
    region: Region

    @property
    def num_elements(self) -> int:
        return num_elements(self.region)


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """`local` pieces are copied within a rank, `moved` ones between ranks. Iterates over all of them."""

    local: tuple[Piece, ...]
    moved: tuple[Piece, ...]

    def __iter__(self) -> Iterator[Piece]:
        yield from self.local
        yield from self.moved


def reshard(source: Layout, target: Layout, devices: Sequence[Device] = ()) -> ReshardPlan:
    """The pieces that fill `target` from `source`: every element of it exactly once.

    `devices[rank]` says where a rank is, so that the nearest holder is asked, the least loaded of equally near ones;
    without it all ranks are equally near. Raises InvalidInput when `source` lacks something or shapes differ.
    """
    _check_shapes(source, target)
    sent: dict[int, int] = defaultdict(int)
    local: list[Piece] = []
    moved: list[Piece] = []
    for name in target.shapes:
        holders = _holders(source.regions.get(name, {}))
        for rank, wanted in sorted(target.regions.get(name, {}).items()):
            for piece in _fill(name, rank, wanted, holders, sent, devices):
                (local if piece.source == rank else moved).append(piece)
    return ReshardPlan(tuple(local), tuple(moved))


def num_lacking(source: Layout, target: Layout) -> int:
    """Elements that ranks need under `target` and do not hold under `source`: no plan moves fewer.

    >>> shapes, whole, half = {"w": (4, 8)}, ((0, 4), (0, 8)), ((0, 4), (0, 4))
    >>> num_lacking(Layout(shapes, {"w": {0: half, 1: whole}}), Layout(shapes, {"w": {0: whole, 2: half}}))
    32
    """
    lacking = 0
    for name, wanted in target.regions.items():
        for rank, region in wanted.items():
            held = source.regions.get(name, {}).get(rank)
            common = None if held is None else intersection(region, held)
            lacking += num_elements(region) - (0 if common is None else num_elements(common))
    return lacking


def _holders(regions: Mapping[int, Region]) -> dict[Region, list[int]]:
    """The ranks that hold each distinct region."""
    found: dict[Region, list[int]] = defaultdict(list)
    for rank, region in sorted(regions.items()):
        found[region].append(rank)
    return found


def _fill(
    name: str,
    rank: int,
    wanted: Region,
    holders: Mapping[Region, Sequence[int]],
    sent: dict[int, int],
    devices: Sequence[Device],
) -> Iterator[Piece]:
    """Pieces that cover `wanted`, what is nearest first; `sent` counts elements by source and is updated."""

    def distance(item: tuple[Region, Sequence[int]]) -> int:
        return min(_distance(rank, holder, devices) for holder in item[1])

    missing = [wanted]
    for region, ranks in sorted(holders.items(), key=distance):
        rest: list[Region] = []
        for part in missing:
            common = intersection(part, region)
            if common is None:
                rest.append(part)
                continue
            source = _nearest(rank, ranks, sent, devices)
            if source != rank:
                sent[source] += num_elements(common)
            yield Piece(source, rank, name, common)
            rest.extend(subtract(part, common))
        missing = rest
    if missing:
        raise InvalidInput(f"layout.{name}", missing[0], "a region that some rank of the source layout holds")


def _nearest(rank: int, holders: Sequence[int], sent: Mapping[int, int], devices: Sequence[Device]) -> int:
    return min(holders, key=lambda holder: (_distance(rank, holder, devices), sent.get(holder, 0), holder))


def _distance(rank: int, holder: int, devices: Sequence[Device]) -> int:
    """0 for the rank itself, 1 on its node, 2 beyond."""
    if holder == rank:
        return 0
    return 2 if devices and devices[holder].node != devices[rank].node else 1


def _check_shapes(source: Layout, target: Layout) -> None:
    for name in sorted(source.shapes.keys() | target.shapes.keys()):
        held, wanted = source.shapes.get(name), target.shapes.get(name)
        if held != wanted:
            right = f"{wanted} as in the target" if wanted else "no such parameter: the target has none"
            raise InvalidInput(f"layout.{name}", held, right)
