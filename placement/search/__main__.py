"""Compiles the search ahead of its first use, as when an image is built: `python -m prefect_rlhf.placement.search`."""

from __future__ import annotations

import time

from prefect_rlhf.placement.search.alternatives import alternatives
from prefect_rlhf.placement.search.driver import SMALLEST, search


def main() -> None:
    """Use every function that is compiled once, so that its code is on disk."""
    began = time.monotonic()
    plan = search(SMALLEST, budget_seconds=1.0).plan
    assert plan is not None  # a call on a device has a plan
    alternatives(SMALLEST, plan)
    print(f"The search is compiled ({time.monotonic() - began:.0f} s).")  # noqa: T201 - the answer of a command


if __name__ == "__main__":
    main()
