"""The order of rows: every item once per epoch, and a step's rows depend on nothing but its number."""

from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.tasks.data.row_order import row_ids


@given(seed=st.integers(0, 5), num_items=st.integers(1, 30), batch_size=st.integers(1, 9), epochs=st.integers(1, 3))
def test_each_epoch_has_every_item_once(seed, num_items, batch_size, epochs):
    """Even where a batch begins in one epoch and ends in the next."""
    steps = -(-num_items * epochs // batch_size)
    seen = [item for step in range(steps) for item in row_ids(step, batch_size, seed, num_items)]
    for epoch in range(epochs):
        assert sorted(seen[epoch * num_items : (epoch + 1) * num_items]) == list(range(num_items))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {row_ids(epoch, 50, seed, 50) for epoch in range(3) for seed in range(3)}
    assert len(orders) == 9


def test_the_order_is_the_same_in_every_release():
    """A run that resumes under another version of the package goes on with the rows that it would have had."""
    assert row_ids(2, 4, seed=7, num_items=10) == (9, 1, 0, 8)
