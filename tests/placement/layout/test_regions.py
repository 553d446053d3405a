"""Flat ranges of a region as rectangles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.placement.layout.regions import rectangles

pytestmark = pytest.mark.quick


@st.composite
def ranges(draw):
    """A region of one to three axes, and a range of its elements."""
    spans = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=3))
    region = tuple((start, start + size) for start, size in spans)
    count = int(np.prod([size for _, size in spans]))
    start = draw(st.integers(0, count))
    return region, start, draw(st.integers(start, count))


@given(ranges())
def test_they_are_the_elements_of_the_range_in_order(case):
    """Against numpy: number the elements of the region and read the rectangles one after the other."""
    region, start, stop = case
    shape = [last - first for first, last in region]
    numbers = np.arange(np.prod(shape)).reshape(shape)
    found: list[int] = []
    for rectangle in rectangles(region, start, stop):
        inside = tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(rectangle, region, strict=True))
        assert numbers[inside].size > 0
        found += numbers[inside].flatten().tolist()
    assert found == list(range(start, stop))
    assert len(list(rectangles(region, start, stop))) <= 2 * len(region) - 1
