"""One PPO run under many plans, compared with the run on one device; prints JSON as its last line.

    python -m benchmarks.parts.plan_invariance [--plans N] [--four-ranks]

Real Prefect, gang, Megatron-core and vLLM on four CPU ranks (ReaL's example on eight), tiny models in float32:
`num_plans`, `tokens_equal` (in all steps under all plans), `max_loss_difference` (losses and gradient norms),
`max_weight_difference`, and `near_ties`: where tokens differ at all, by how much their log-probabilities do there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from prefect.testing.utilities import prefect_test_harness

from tests.support import plan_matrix
from tests.support.plan_matrix import FOUR_RANKS, ONE, REAL_EXAMPLE
from tests.support.runs import Compact, first_differences, loss_difference, weight_difference


def main() -> None:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=len(FOUR_RANKS), help="how many of the plans on four ranks")
    parser.add_argument("--four-ranks", action="store_true", help="leave out ReaL's example, which has eight")
    options = parser.parse_args()
    if not 1 <= options.plans <= len(FOUR_RANKS):
        sys.exit(f"--plans: got {options.plans}, expected 1 to {len(FOUR_RANKS)}")
    plans: dict[str, tuple[Compact | Path, int]] = {
        name: (compact, 4) for name, compact in list(FOUR_RANKS.items())[: options.plans]
    }
    if not options.four_ranks:
        plans["real_example"] = REAL_EXAMPLE, 8
    rows: list[dict[str, Any]] = []
    with prefect_test_harness(server_startup_timeout=120), tempfile.TemporaryDirectory() as folder:
        parameters = plan_matrix.parameters(Path(folder))
        alone = plan_matrix.run(parameters, ONE, "one", num_devices=1)
        for name, (plan, num_devices) in plans.items():
            result = plan_matrix.run(parameters, plan, name, num_devices)
            rows.append(
                {
                    "plan": name,
                    "loss_difference": loss_difference(alone, result),
                    "weight_difference": weight_difference(alone, result),
                    "near_ties": first_differences(alone, result),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    last_line = {
        "num_plans": len(rows),
        "tokens_equal": not any(row["near_ties"] for row in rows),
        "max_loss_difference": max(row["loss_difference"] for row in rows),
        "max_weight_difference": max(row["weight_difference"] for row in rows),
        "near_ties": [row for row in rows if row["near_ties"]],
    }
    print(json.dumps(last_line))


if __name__ == "__main__":
    main()
