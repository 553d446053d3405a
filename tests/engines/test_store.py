"""The row store: rows under (step, call, key), until their step is finished."""

import pytest
import torch

from prefect_rlhf.engines.store import RowsMissing, RowStore


def filled():
    store = RowStore()
    store.put(1, "generate", "tokens", {0: torch.tensor([1, 2]), 2: torch.tensor([3])})
    store.put(1, "reward", "scores", {0: torch.tensor(0.5)})
    store.put(2, "generate", "tokens", {0: torch.tensor([9])})
    return store


def test_rows_come_in_the_order_asked_for():
    """Rows are found by number and step, in any order."""
    assert [row.tolist() for row in filled().get(1, "generate", "tokens", [2, 0])] == [[3], [1, 2]]


def test_rows_of_one_key_may_come_in_parts():
    """What arrives later joins what is there."""
    store = filled()
    store.put(1, "generate", "tokens", {1: torch.tensor([7])})
    assert [row.tolist() for row in store.get(1, "generate", "tokens", [0, 1, 2])] == [[1, 2], [7], [3]]


def test_finished_steps_are_freed():
    """A finished step leaves nothing; others stay; finishing an unknown step is no error."""
    store = filled()
    store.finish([1, 17])
    assert store.steps == (2,)
    assert store.keys(1) == ()
    assert len(store) == 1


@pytest.mark.parametrize(
    ("step", "call", "key", "rows"),
    [(1, "generate", "tokens", [0, 1]), (1, "generate", "values", [0]), (3, "generate", "tokens", [0])],
)
def test_missing_rows_are_told(step, call, key, rows):
    """A row that is not here names call, key, step and row."""
    with pytest.raises(RowsMissing, match=rf"{call}.{key} of step {step}: row {rows[-1]} is not on this rank"):
        filled().get(step, call, key, rows)
