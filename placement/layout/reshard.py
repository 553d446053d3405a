"""Finds the regions of parameters that move from rank to rank to fill a target layout from a source layout.

A target rank never receives an element that it already holds, or an element twice, so the moved bytes are minimal.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.mesh import Device
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.layout.regions import Region, intersection, num_elements, subtract


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of a parameter that rank `target` copies from rank `source`; the ranks are equal if it stays there."""

    source: int
    target: int
    parameter: str
    region: Region

    @property
    def num_elements(self) -> int:
        return num_elements(self.region)


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """`local` pieces are copied within a rank, `moved` pieces between ranks. Iterates over all of them."""

    local: tuple[Piece, ...]
    moved: tuple[Piece, ...]

    def __iter__(self) -> Iterator[Piece]:
        yield from self.local
        yield from self.moved


def reshard(source: Layout, target: Layout, devices: Sequence[Device] = ()) -> ReshardPlan:
    """Return the pieces that fill `target` from `source`: every element of it exactly once.

    `devices[rank]` is a rank's device. The nearest holder sends, and of equally near holders the least loaded; without
    `devices`, all ranks are equally near. Raises InvalidInput if `source` lacks an element or shapes differ.
    """
    for name in sorted(source.shapes.keys() | target.shapes.keys()):
        source_shape, target_shape = source.shapes.get(name), target.shapes.get(name)
        if source_shape != target_shape:
            right = f"{target_shape} as in the target" if target_shape else "no such parameter in the target"
            raise InvalidInput(f"layout.{name}", source_shape, right)
    sent: dict[int, int] = defaultdict(int)
    local: list[Piece] = []
    moved: list[Piece] = []
    for name in target.shapes:
        holders: dict[Region, list[int]] = defaultdict(list)
        for rank, region in sorted(source.regions.get(name, {}).items()):
            holders[region].append(rank)
        for rank, region in sorted(target.regions.get(name, {}).items()):
            for piece in _fill(name, rank, region, holders, sent, devices):
                (local if piece.source == rank else moved).append(piece)
    return ReshardPlan(tuple(local), tuple(moved))


def _fill(
    name: str,
    rank: int,
    target: Region,
    holders: Mapping[Region, Sequence[int]],
    sent: dict[int, int],
    devices: Sequence[Device],
) -> Iterator[Piece]:
    """Yield pieces that cover `target`, the nearest first; `sent` counts elements by source and is updated."""

    def distance(holder: int) -> int:
        """0 for the rank itself, 1 on its node, 2 beyond."""
        if holder == rank:
            return 0
        return 2 if devices and devices[holder].node != devices[rank].node else 1

    missing = [target]
    for region, ranks in sorted(holders.items(), key=lambda item: min(map(distance, item[1]))):
        rest: list[Region] = []
        for part in missing:
            common = intersection(part, region)
            if common is None:
                rest.append(part)
                continue
            source = min(ranks, key=lambda holder: (distance(holder), sent.get(holder, 0), holder))
            if source != rank:
                sent[source] += num_elements(common)
            yield Piece(source, rank, name, common)
            rest.extend(subtract(part, common))
        missing = rest
    if missing:
        raise InvalidInput(f"layout.{name}", missing[0], "a region that some rank of the source layout holds")
