"""Consecutive elements of a region as rectangles: what an optimizer that is cut anywhere holds of a parameter."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from prefect_rlhf.placement.layout import Region


def rectangles(region: Region, start: int, stop: int) -> Iterator[Region]:
    """The regions, in order, of the elements `start` to `stop` of `region` in row-major order.

    Of a matrix at most three: the end of a row, whole rows, the beginning of a row.

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
