"""The items of a dataset that enter each step: seeded permutations, one after another, a pure function of the step."""

import random
from functools import lru_cache


def row_ids(step: int, batch_size: int, seed: int, num_items: int) -> tuple[int, ...]:
    """Return the items of a step. Each item occurs once per epoch; a run resumed at `step` continues the same order.

    >>> first, second = row_ids(0, 2, seed=1, num_items=4), row_ids(1, 2, seed=1, num_items=4)
    >>> sorted(first + second)
    [0, 1, 2, 3]
    """
    positions = range(step * batch_size, (step + 1) * batch_size)
    return tuple(_permutation(seed, at // num_items, num_items)[at % num_items] for at in positions)


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_items: int) -> tuple[int, ...]:
    items = list(range(num_items))
    random.Random(f"row order {seed} {epoch}").shuffle(items)  # a string's seed is hashed the same everywhere
    return tuple(items)
