"""Partitions: every row goes to one replica, mini-batches are the plan's own business, and work is even."""

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.rows.partition import RowPartition, balance

SPEEDS = st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=1, max_size=5).map(tuple)


@st.composite
def partitions(draw):
    """A rule by tokens that rows can follow, and lengths for it."""
    speeds, mini_batches, width = draw(SPEEDS), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_rows = draw(st.integers(len(speeds), 9)) * mini_batches * width
    lengths = draw(st.lists(st.integers(1, 50), min_size=num_rows, max_size=num_rows))
    return RowPartition(num_rows, speeds, mini_batches, width, "generate"), tuple(lengths)


@settings(max_examples=200)
@given(partitions(), st.booleans())
def test_each_mini_batch_is_the_same_rows_under_every_plan_and_nobody_gets_none(drawn, by_tokens):
    """Mini-batch m is the m-th equal part of the rows; items stay whole; each replica has some of each mini-batch."""
    rule, lengths = drawn
    parts = rule.partitions(lengths if by_tokens else None)
    size, width = rule.num_rows // rule.mini_batches, rule.rows_per_item
    for m in range(rule.mini_batches):
        assert all(part[m] for part in parts)
        assert sorted(row for part in parts for row in part[m]) == list(range(m * size, (m + 1) * size))
        for part in parts:
            assert part[m] == tuple(sorted(part[m]))
            assert {row // width * width + i for row in part[m] for i in range(width)} == set(part[m])


@settings(max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=3, max_size=7), st.sampled_from([(1.0, 1.0), (1.0, 1.0, 1.0)]))
def test_the_last_replica_to_finish_is_at_most_a_third_late(tokens, speeds):
    """Graham's bound for longest first, 4/3 - 1/(3 dp), against every possible partition tried out."""

    def finish(parts):
        return max(sum(tokens[i] for i in part) for part in parts)

    dp = len(speeds)
    every = product(range(dp), repeat=len(tokens))
    best = min(finish([[i for i, d in enumerate(to) if d == r] for r in range(dp)]) for to in every)
    assert finish(balance(tokens, speeds)) <= best * (4 / 3 - 1 / (3 * dp)) + 1e-9


def test_rows_stay_in_order_where_moving_them_would_not_pay():
    """Rows of one length are partitioned as generate's are."""
    assert (
        RowPartition(8, (1.0, 1.0), 2, 1, "generate").partitions((7,) * 8)
        == RowPartition(8, (1.0, 1.0), 2).partitions()
    )


def test_a_replica_on_slower_devices_gets_less():
    """By count and by tokens in proportion to speed."""
    half_speed = RowPartition(12, (1.0, 0.5), lengths_of="generate")
    assert [len(part[0]) for part in half_speed.partitions()] == [8, 4]
    lengths = (30, 1, 2, 9, 9, 9, 1, 2, 3, 4, 10, 10)
    tokens = [sum(lengths[row] for row in part[0]) for part in half_speed.partitions(lengths)]
    assert tokens == [60, 30] and math.fsum(tokens) == sum(lengths)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (RowPartition(6, (1.0,) * 2, mini_batches=4), r"num_rows: got 6, expected a multiple of 4 \(4 mini-batches"),
        (RowPartition(8, (1.0,) * 3, mini_batches=4), "dp: got 3, expected at most 2, the items of a mini-batch"),
    ],
)
def test_rows_that_cannot_be_partitioned_are_refused(rule, message):
    with pytest.raises(InvalidInput, match=message):
        rule.partitions()
