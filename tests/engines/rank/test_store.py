"""The row store: rows under (step, call, key), until they are freed."""

import pytest
import torch

from prefect_rlhf.engines.rank.store import RowsMissing, RowStore

pytestmark = pytest.mark.quick


def filled():
    store = RowStore()
    store.put(1, "generate", "tokens", {0: torch.tensor([1, 2]), 2: torch.tensor([3])})
    store.put(1, "reward", "scores", {0: torch.tensor(0.5)})
    store.put(2, "generate", "tokens", {0: torch.tensor([9])})
    return store


def test_rows_come_in_the_order_asked_for():
    """Rows are found by number and step, in any order."""
    assert [row.tolist() for row in filled().get(1, "generate", "tokens", [2, 0])] == [[3], [1, 2]]


def test_a_keys_rows_may_arrive_in_parts():
    """What arrives later joins what is there."""
    store = filled()
    store.put(1, "generate", "tokens", {1: torch.tensor([7])})
    assert [row.tolist() for row in store.get(1, "generate", "tokens", [0, 1, 2])] == [[1, 2], [7], [3]]


def test_freed_keys_are_gone():
    """All rows of the key at that step, and nothing else; freeing what is not here is no error."""
    store = filled()
    store.free(1, [("generate", "tokens"), ("generate", "values")])
    assert store.keys(1) == (("reward", "scores"),)
    store.free(1, [("reward", "scores")])
    assert (store.keys(1), len(store.keys(2)), len(store), store.num_bytes) == ((), 1, 1, 8)


def test_bytes_count_whole_storages():
    """Two rows that are views of one padded tensor keep all of it."""
    store = RowStore()
    padded = torch.zeros(2, 8)
    store.put(1, "infer", "values", {0: padded[0, :3], 1: padded[1, :5]})
    assert store.num_bytes == 2 * 8 * 4


@pytest.mark.parametrize(
    ("step", "call", "key", "rows"),
    [(1, "generate", "tokens", [0, 1]), (1, "generate", "values", [0]), (3, "generate", "tokens", [0])],
)
def test_missing_rows_are_told(step, call, key, rows):
    """A row that is not here names call, key, step and row."""
    with pytest.raises(RowsMissing, match=rf"{call}.{key} of step {step}: row {rows[-1]} is not on this rank"):
        filled().get(step, call, key, rows)
