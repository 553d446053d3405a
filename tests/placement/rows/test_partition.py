"""Partitions: every row goes to one replica, mini-batches do not depend on the plan, and work is even."""

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.rows.partition import RowPartition, balance
from tests.support.cases import examples

pytestmark = pytest.mark.quick

SPEEDS = st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=1, max_size=5).map(tuple)


@st.composite
def partitions(draw, speeds=SPEEDS):
    """A rule by tokens that rows can follow, with any number of items, and lengths for it."""
    mini_batches, width = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_rows = draw(st.integers(mini_batches, 24)) * width
    lengths = draw(st.lists(st.integers(1, 50), min_size=num_rows, max_size=num_rows))
    return RowPartition(num_rows, draw(speeds), mini_batches, width, "generate"), tuple(lengths)


def rows_of_mini_batches(parts):
    """The rows of each mini-batch, whichever replica has them."""
    return [sorted(row for part in parts for row in part[m]) for m in range(len(parts[0]))]


@settings(max_examples=examples(200))
@given(partitions(), st.booleans())
def test_each_row_is_in_a_single_mini_batch_and_replica(drawn, by_tokens):
    """Mini-batches follow each other, and differ by at most one item; items stay whole."""
    rule, lengths = drawn
    parts, width = rule.partitions(lengths if by_tokens else None), rule.rows_per_item
    by_mini_batch = rows_of_mini_batches(parts)
    assert [row for rows in by_mini_batch for row in rows] == list(range(rule.num_rows))
    sizes = [len(rows) for rows in by_mini_batch]
    assert min(sizes) > 0 and max(sizes) - min(sizes) in (0, width)
    for rows in (rows for part in parts for rows in part):
        assert rows == tuple(sorted(rows))
        assert {row // width * width + i for row in rows for i in range(width)} == set(rows)


@settings(max_examples=examples(100))
@given(partitions(), SPEEDS, st.integers(1, 3))
def test_mini_batches_are_the_same_rows_under_every_plan(drawn, speeds, finer):
    """Whatever the replicas, and by how much finer a call on the same rows cuts them."""
    rule, lengths = drawn
    mini_batches = rows_of_mini_batches(rule.partitions(lengths))
    assert rows_of_mini_batches(replace(rule, speeds=speeds).partitions()) == mini_batches
    if rule.num_rows >= rule.mini_batches * finer * rule.rows_per_item:
        fine = rows_of_mini_batches(replace(rule, mini_batches=rule.mini_batches * finer).partitions())
        merged = [sum(fine[start : start + finer], []) for start in range(0, len(fine), finer)]
        assert merged == mini_batches


@settings(max_examples=examples(200))
@given(partitions(st.integers(1, 5).map(lambda dp: (1.0,) * dp)))
def test_replicas_by_count_differ_by_at_most_an_item(drawn):
    """Of each mini-batch, and of all of them: who has one more of the one has not one more of the next."""
    rule, _ = drawn
    items = [[len(rows) // rule.rows_per_item for rows in part] for part in rule.partitions()]
    for of_mini_batch in zip(*items, strict=True):
        assert max(of_mini_batch) - min(of_mini_batch) <= 1
    totals = [sum(of_replica) for of_replica in items]
    assert max(totals) - min(totals) <= 1


@settings(max_examples=examples(200))
@given(partitions())
def test_by_tokens_every_mini_batch_ends_about_as_early_as_it_can(drawn):
    """Graham's bound for any list of items: at most dp - 1 of the longest one over what all speeds together take."""
    rule, lengths = drawn
    for of_mini_batch in zip(*rule.partitions(lengths), strict=True):
        tokens = [sum(lengths[row] for row in rows) for rows in of_mini_batch]
        starts = (rows[i] for rows in of_mini_batch for i in range(0, len(rows), rule.rows_per_item))
        longest = max(sum(lengths[start : start + rule.rows_per_item]) for start in starts)
        finish = max(sum_ / speed for sum_, speed in zip(tokens, rule.speeds, strict=True))
        assert finish <= (sum(tokens) + (rule.dp - 1) * longest) / sum(rule.speeds) + 1e-9


def test_a_single_item_leaves_a_replica_empty():
    assert RowPartition(2, (1.0, 1.0), 1, 2).partitions() == (((0, 1),), ((),))


def test_single_items_go_to_replicas_one_after_another():
    """Else one replica would have all rows of an inference that follows the train_step's mini-batches."""
    assert RowPartition(4, (1.0, 1.0), 4).partitions() == (((0,), (), (2,), ()), ((), (1,), (), (3,)))
    by_tokens = RowPartition(3, (1.0, 1.0), 3, lengths_of="generate").partitions((9, 2, 3))
    assert by_tokens == (((0,), (), ()), ((), (1,), (2,)))


@settings(max_examples=examples(60))
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
        (
            RowPartition(7, (1.0,) * 2, rows_per_item=2),
            "num_rows: got 7, expected a multiple of 2, the rows of an item",
        ),
        (RowPartition(6, (1.0,), 4, rows_per_item=2), "mini_batches: got 4, expected at most 3, the items of a step"),
    ],
)
def test_rows_that_cannot_be_partitioned_are_refused(rule, message):
    with pytest.raises(InvalidInput, match=message):
        rule.partitions()
