"""The estimator in the papers' settings, without devices: tables, and whether the papers' orders come out.

    python -m benchmarks.papers [--only real|hybridflow|app]

The last line is JSON: for every order its name, what the paper reports, the values here, and whether it holds.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial

from benchmarks.papers import app as paper_app
from benchmarks.papers import hybridflow as paper_hybridflow
from benchmarks.papers import real as paper_real
from benchmarks.papers.checks import Comparison, Row
from prefect_rlhf.errors.table import table

Compare = Callable[[], Comparison]


def real() -> Iterator[Compare]:
    yield from (partial(paper_real.contexts, size) for size in paper_real.SIZES)
    yield paper_real.algorithms


def hybridflow() -> Iterator[Compare]:
    for model, best in paper_hybridflow.BEST.items():
        yield from (partial(paper_hybridflow.placements, model, devices) for devices in best)
    yield from (partial(paper_hybridflow.shards, model) for model in paper_hybridflow.SHARDS)


def app() -> Iterator[Compare]:
    yield from (partial(paper_app.interleaving, model, n) for model in ("llama-7b", "llama-13b") for n in (1, 2, 4))
    yield from (partial(paper_app.separation, nodes) for nodes in (4, 8))


PAPERS: Mapping[str, Callable[[], Iterator[Compare]]] = {"real": real, "hybridflow": hybridflow, "app": app}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PAPERS, help="one paper; by default all")
    options = parser.parse_args()
    papers = [options.only] if options.only else PAPERS
    comparisons = [compare() for paper in papers for compare in PAPERS[paper]()]
    print(text(comparisons))
    print(json.dumps([asdict(check) for comparison in comparisons for check in comparison.checks]))
    return 0


def text(comparisons: Sequence[Comparison]) -> str:
    """Write one table for each title, then every order."""
    by_title: dict[str, list[Row]] = defaultdict(list)
    for comparison in comparisons:
        by_title[comparison.title] += comparison.rows
    tables = [
        f"{title} (seconds an iteration)\n{table([dict(row) for row in rows])}" for title, rows in by_title.items()
    ]
    orders = "\n".join(str(check) for comparison in comparisons for check in comparison.checks)
    return "\n\n".join([*tables, orders])


if __name__ == "__main__":
    raise SystemExit(main())
