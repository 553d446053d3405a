"""The items of a dataset in each step: seeded permutations, one after another, as a pure function of the step."""

import random
from collections.abc import Sequence
from functools import lru_cache

from prefect_rlhf.placement.graph import Call, DataflowGraph

FIRST = 16  # items: trials of functions read some of these


def row_ids(step: int, batch_size: int, seed: int, num_items: int) -> tuple[int, ...]:
    """Return the items of a step. Each item occurs once per epoch; a run resumed at `step` continues the same order.

    >>> first, second = row_ids(1, 2, seed=1, num_items=4), row_ids(2, 2, seed=1, num_items=4)
    >>> sorted(first + second)
    [0, 1, 2, 3]
    """
    positions = range((step - 1) * batch_size, step * batch_size)
    return tuple(_permutation(seed, at // num_items, num_items)[at % num_items] for at in positions)


def items_read(graph: DataflowGraph, steps: int, seed: int) -> dict[str, Sequence[int]]:
    """Return which items of each dataset the steps read, in the dataset's order.

    Evaluations read the first items, and so do trials of a user's functions.
    """
    read: dict[str, Sequence[int]] = {}
    for dataset in graph.datasets:
        calls = [part for call in graph for part in call.by_row_set if part.rows.dataset == dataset.name]
        in_all_steps = steps * max([_items(call) for call in calls if call.every is None], default=0)
        first = max([FIRST, *(_items(call) for call in calls if call.every is not None)])
        if max(first, in_all_steps) >= dataset.num_items:
            read[dataset.name] = range(dataset.num_items)
        else:
            read[dataset.name] = sorted({*range(first), *_permutation(seed, 0, dataset.num_items)[:in_all_steps]})
    return read


def _items(call: Call) -> int:
    """Return the items behind the call's rows of a step."""
    return call.span // call.rows.rows_per_item


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_items: int) -> tuple[int, ...]:
    items = list(range(num_items))
    random.Random(f"row order {seed} {epoch}").shuffle(items)  # a string's seed is hashed the same everywhere
    return tuple(items)
