"""Rows of turns with drawn lengths, each by itself and in rounds, in a simulation of steps; prints ratios as JSON.

    python -m benchmarks.planner.simulate_rounds [--rows 256] [--tokens 200] [--step-ms 12] [--row-ms 0.02]
        [--tool-ms 50]

A step takes `step_ms`, and `row_ms` for each row in it: 12 and 0.02 are guesses for a model of 7B parameters on a GPU;
14 and 1.1 were measured with SmolLM2-135M on a CPU core. Lengths of turns are log-normal, with the deviation that the
planner assumes and a mean of `tokens`. A ratio is the seconds in rounds over those of rows by themselves, the median of
five draws.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from collections.abc import Callable, Sequence
from statistics import median

from prefect_rlhf.flows.planning.assumptions import DEVIATION

Lengths = Sequence[Sequence[int]]
"""Tokens of each turn, by row."""
TURNS = (4, 10)
DRAWS = 5


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=float, default=200.0)
    for name, value in (("step-ms", 12.0), ("row-ms", 0.02), ("tool-ms", 50.0)):
        parser.add_argument(f"--{name}", type=float, default=value)
    given = parser.parse_args()
    step, row, tool = (value / 1000 for value in (given.step_ms, given.row_ms, given.tool_ms))
    ratios = {}

    def step_seconds(rows: int) -> float:
        return step + row * rows

    for turns in TURNS:
        draws = [drawn(given.rows, turns, given.tokens, seed) for seed in range(DRAWS)]
        of_each = [in_rounds(each, step, row, tool) / by_row(each, step_seconds, tool) for each in draws]
        ratios[f"ratio_{turns}_turns"] = round(median(of_each), 2)
    print(json.dumps(ratios))


def drawn(rows: int, turns: int, tokens: float, seed: int) -> Lengths:
    """Return log-normal lengths of turns."""
    draw, centre = random.Random(seed), math.log(tokens) - DEVIATION**2 / 2
    return [[max(1, round(draw.lognormvariate(centre, DEVIATION))) for _ in range(turns)] for _ in range(rows)]


def by_row(lengths: Lengths, step_seconds: Callable[[int], float], tool: float) -> float:
    """Return the seconds until all rows are over, if each row goes on once it has its answer.

    `step_seconds` are those of a step by its number of rows.
    """
    turn, left = [0] * len(lengths), [each[0] for each in lengths]
    running, waiting, now = set(range(len(lengths))), list[tuple[float, int]](), 0.0
    while running or waiting:
        now = now if running else max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            running.add(heapq.heappop(waiting)[1])
        now += step_seconds(len(running))
        for each in tuple(running):
            left[each] -= 1
            if not left[each]:
                running.remove(each)
                turn[each] += 1
                if turn[each] < len(lengths[each]):
                    left[each] = lengths[each][turn[each]]
                    heapq.heappush(waiting, (now + tool, each))
    return now


def in_rounds(lengths: Lengths, step: float, row: float, tool: float) -> float:
    """Return the seconds until all rows are over, if all wait for the longest turn and the tool of each round."""
    rounds = list(zip(*lengths, strict=True))
    decoding = sum(step * max(each) + row * sum(each) for each in rounds)
    return decoding + tool * (len(rounds) - 1)


if __name__ == "__main__":
    main()
