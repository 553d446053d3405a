"""The rows that a choice keeps, against a slow and plain account; and a partition of kept rows deals each once."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.placement.row_set import Choice, RowSet
from prefect_rlhf.placement.rows.partition import RowPartition

GROUP, GROUPS = 4, 5
NUM_ROWS = GROUP * GROUPS
PROMPTS = RowSet("prompts", "prompts")
ROLLOUT = RowSet("rollout", "prompts", GROUP, PROMPTS)


def choice(at_most=GROUPS, per_group=None):
    return Choice(NUM_ROWS, GROUP, at_most, at_most, per_group)


def slowly(places, at_most, per_group):
    """What stays: one group after the other, its rows one by one."""
    kept, groups_kept = [], 0
    for group in range(GROUPS):
        left = {row: places[row] for row in range(group * GROUP, (group + 1) * GROUP)}
        left = {row: place for row, place in left.items() if not math.isnan(place) and place > 0}
        if not left or (per_group is not None and len(left) < per_group) or groups_kept == at_most:
            continue
        groups_kept += 1
        for _ in range(per_group or len(left)):
            first = min(left, key=lambda row: (left[row], row))
            kept.append(first)
            del left[first]
    return tuple(kept)


@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, -1.0, math.nan]), min_size=NUM_ROWS, max_size=NUM_ROWS),
    st.integers(1, GROUPS),
    st.none() | st.integers(1, GROUP),
)
def test_the_first_groups_with_rows_enough_stay_in_the_order_of_places(places, at_most, per_group):
    rows = range(NUM_ROWS)
    kept = choice(at_most, per_group).kept(places, rows, ROLLOUT.groups(rows))
    assert kept == slowly(places, at_most, per_group)
    assert len(kept) <= choice(at_most, per_group).count.at_most


@given(
    st.sets(st.integers(0, NUM_ROWS - 1)),
    st.integers(1, 3),
    st.integers(1, 4),
    st.lists(st.integers(1, 9), min_size=NUM_ROWS, max_size=NUM_ROWS),
    st.booleans(),
)
def test_every_kept_row_goes_to_a_single_replica_however_few_rows_exist(kept, mini_batches, dp, lengths, by_tokens):
    """And what a mini-batch has does not depend on replicas."""

    def dealt(count):
        lengths_of = "rollout" if by_tokens else None
        rule = RowPartition(NUM_ROWS, (1.0,) * count, mini_batches, lengths_of=lengths_of, kept_by="kept")
        return rule.partitions(tuple(lengths), tuple(sorted(kept)))

    for mini_batch in range(mini_batches):
        rows = sorted(row for replica in dealt(dp) for row in replica[mini_batch])
        assert rows == list(dealt(1)[0][mini_batch])
    assert sorted(row for replica in dealt(dp) for batch in replica for row in batch) == sorted(kept)


def test_kept_rows_read_their_source_rows_but_not_the_reverse():
    kept = RowSet("kept", "prompts", 1, ROLLOUT, choice())
    again = RowSet("again", "prompts", 1, kept, choice())
    other = RowSet("other", "prompts", 1, ROLLOUT, choice())
    assert all(again.may_read(rows) for rows in (kept, ROLLOUT, PROMPTS))
    assert not any(rows.may_read(kept) for rows in (ROLLOUT, PROMPTS, other))
    assert (again.per_row(ROLLOUT), again.per_row(PROMPTS)) == (1, GROUP)
    assert again.groups((9, 2)) == ROLLOUT.groups((9, 2)) == (2, 0)


@pytest.mark.parametrize(("per_group", "adjacent"), [(2, 2), (None, 1)])
def test_rows_stand_together_only_where_each_group_keeps_as_many(per_group, adjacent):
    assert RowSet("kept", "prompts", 1, ROLLOUT, choice(per_group=per_group)).adjacent == adjacent
