"""Hyper-rectangles of a tensor: intersection, difference, and runs of elements as rectangles."""

from collections.abc import Iterator
from math import prod

Region = tuple[tuple[int, int], ...]
"""(start, stop) for each axis of the global tensor."""


def shape_of(region: Region) -> tuple[int, ...]:
    """Return the shape of a tensor with the elements of a region.

    >>> shape_of(((2, 6), (4, 8)))
    (4, 4)
    """
    return tuple(stop - start for start, stop in region)


def num_elements(region: Region) -> int:
    """Count the elements of a region."""
    return prod(shape_of(region))


def intersection(one: Region, other: Region) -> Region | None:
    """Return the intersection of two regions, or None.

    >>> intersection(((0, 4), (0, 8)), ((2, 6), (4, 8)))
    ((2, 4), (4, 8))
    """
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def subtract(region: Region, hole: Region) -> list[Region]:
    """Return disjoint regions that together are `region` without `hole`, which lies inside it.

    >>> subtract(((0, 4), (0, 8)), ((2, 4), (4, 8)))
    [((0, 2), (0, 8)), ((2, 4), (0, 4))]
    """
    rest: list[Region] = []
    core = list(region)
    for axis, ((start, stop), (first, last)) in enumerate(zip(region, hole, strict=True)):
        for side in ((start, first), (last, stop)):
            if side[0] < side[1]:
                rest.append((*core[:axis], side, *core[axis + 1 :]))
        core[axis] = (first, last)
    return rest


def rectangles(region: Region, start: int, stop: int) -> Iterator[Region]:
    """Yield regions that contain the elements `start` to `stop` of `region`, in row-major order.

    An optimizer's share can be cut anywhere, so it is such a range of a parameter. A matrix has at most three regions:
    the end of a row, whole rows, the beginning of a row.

    >>> list(rectangles(((10, 14), (0, 8)), 5, 26))
    [((10, 11), (5, 8)), ((11, 13), (0, 8)), ((13, 14), (0, 2))]
    >>> list(rectangles(((4, 9),), 1, 3))
    [((5, 7),)]
    """
    (origin, _), *rest = region
    width = prod(last - first for first, last in rest)
    (top, left), (bottom, right) = divmod(start, width), divmod(stop, width)
    if left and top < bottom:
        yield from _within_row(origin + top, rest, left, width)
        top, left = top + 1, 0
    if top < bottom:
        yield ((origin + top, origin + bottom), *rest)
    if left < right:
        yield from _within_row(origin + bottom, rest, left, right)


def _within_row(row: int, rest: list[tuple[int, int]], start: int, stop: int) -> Iterator[Region]:
    for inner in rectangles(tuple(rest), start, stop):
        yield ((row, row + 1), *inner)
