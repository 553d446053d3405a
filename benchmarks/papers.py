"""What the estimator says of the papers' settings, without devices: tables, and whether the papers' orders come out.

    python -m benchmarks.papers [--only real|hybridflow|app]

The last line is JSON: for every order its name, what the paper reports, the values here, and whether it holds.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from benchmarks import paper_app, paper_hybridflow, paper_real
from benchmarks.paper_checks import Comparison, Row
from prefect_rlhf.placement.table import table

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
    found = [compare() for paper in ([options.only] if options.only else PAPERS) for compare in PAPERS[paper]()]
    print(text(found))
    print(json.dumps([check.as_json() for one in found for check in one.checks]))
    return 0


def text(found: list[Comparison]) -> str:
    """One table for each title, then every order."""
    rows: dict[str, list[Row]] = defaultdict(list)
    for one in found:
        rows[one.title] += one.rows
    tables = [f"{title} (seconds an iteration)\n{table([dict(row) for row in every])}" for title, every in rows.items()]
    return "\n\n".join([*tables, "\n".join(str(check) for one in found for check in one.checks)])


if __name__ == "__main__":
    raise SystemExit(main())
