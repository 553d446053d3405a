"""Of the windows that may be open at once, a certificate counts the heaviest: compared with all sets of them."""

import random
from itertools import combinations

from prefect_rlhf.placement.memory.windows import heaviest_clique


def is_clique(places, beside):
    return all(beside[one] >> other & 1 for one, other in combinations(places, 2))


def test_the_heaviest_windows_that_overlap_are_found_among_all_sets_of_them():
    draw = random.Random(0)
    for size in range(9):
        for _ in range(20):
            weights = tuple(draw.randrange(1, 6) for _ in range(size))
            beside = [0] * size
            for one, other in combinations(range(size), 2):
                if draw.random() < 0.6:
                    beside[one] |= 1 << other
                    beside[other] |= 1 << one
            found = heaviest_clique(weights, tuple(beside))
            chosen = [place for place in range(size) if found >> place & 1]
            sets = (places for count in range(size + 1) for places in combinations(range(size), count))
            most = max(sum(weights[place] for place in places) for places in sets if is_clique(places, beside))
            assert is_clique(chosen, beside)
            assert sum(weights[place] for place in chosen) == most
