"""The order of rows: every item once per epoch, and a step's rows depend on nothing but its number."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf import PPO
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.tasks.data.rows.row_order import FIRST, items_read, row_ids
from tests.flows.test_algorithms import traced


@given(seed=st.integers(0, 5), num_items=st.integers(1, 30), batch_size=st.integers(1, 9), epochs=st.integers(1, 3))
def test_each_epoch_has_every_item_once(seed, num_items, batch_size, epochs):
    """Even where a batch begins in one epoch and ends in the next."""
    steps = -(-num_items * epochs // batch_size)
    seen = [item for step in range(1, steps + 1) for item in row_ids(step, batch_size, seed, num_items)]
    for epoch in range(epochs):
        assert sorted(seen[epoch * num_items : (epoch + 1) * num_items]) == list(range(num_items))


def test_each_epoch_and_seed_has_its_own_order():
    orders = {row_ids(epoch, 50, seed, 50) for epoch in (1, 2, 3) for seed in range(3)}
    assert len(orders) == 9


@given(num_items=st.integers(8, 60), steps=st.integers(0, 9), seed=st.integers(0, 3))
def test_a_run_reads_its_steps_items_and_the_first_items(num_items, steps, seed):
    """Every row that a step or an evaluation reads is checked, and few others are."""
    graph = traced(ppo, algo=PPO(batch_size=8))
    dataset, *others = graph.datasets
    graph = replace(graph, datasets=(replace(dataset, num_items=num_items), *others))
    in_steps = {item for step in range(1, steps + 1) for item in row_ids(step, 8, seed, num_items)}
    expected = sorted(in_steps | set(range(min(FIRST, num_items))))
    assert list(items_read(graph, steps, seed)[dataset.name]) == expected


def test_the_order_is_the_same_in_every_release():
    """A run that resumes under another version of the package goes on with the rows that it would have had."""
    assert row_ids(3, 4, seed=7, num_items=10) == (9, 1, 0, 8)
