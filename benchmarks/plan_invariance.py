"""One PPO run under many plans, compared with the run on one device; prints JSON as its last line.

    python -m benchmarks.plan_invariance [--plans N]

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

from prefect.testing.utilities import prefect_test_harness

from tests import plan_matrix
from tests.plan_matrix import FOUR_RANKS, ONE, REAL_EXAMPLE, Result


def main() -> None:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=len(FOUR_RANKS), help="how many of the plans on four ranks")
    wanted = parser.parse_args().plans
    if not 1 <= wanted <= len(FOUR_RANKS):
        sys.exit(f"--plans: got {wanted}, expected 1 to {len(FOUR_RANKS)}")
    runs = [(name, compact, 4) for name, compact in list(FOUR_RANKS.items())[:wanted]]
    runs.append(("real_example", REAL_EXAMPLE, 8))
    with prefect_test_harness(server_startup_timeout=120), tempfile.TemporaryDirectory() as folder:
        given = plan_matrix.parameters(Path(folder))
        alone = plan_matrix.run(given, ONE, "one", num_devices=1)
        rows = []
        for name, compact, num_devices in runs:
            rows.append(compared(name, alone, plan_matrix.run(given, compact, name, num_devices)))
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(summary(rows)))


def compared(name: str, alone: Result, result: Result) -> dict[str, object]:
    """One plan's row."""
    return {
        "plan": name,
        "loss_difference": plan_matrix.loss_difference(alone, result),
        "weight_difference": plan_matrix.weight_difference(alone, result),
        "near_ties": plan_matrix.first_differences(alone, result),
    }


def summary(rows: list[dict[str, object]]) -> dict[str, object]:
    """The last line."""
    return {
        "num_plans": len(rows),
        "tokens_equal": not any(row["near_ties"] for row in rows),
        "max_loss_difference": max(row["loss_difference"] for row in rows),  # type: ignore[type-var]  # numbers
        "max_weight_difference": max(row["weight_difference"] for row in rows),  # type: ignore[type-var]  # numbers
        "near_ties": [row for row in rows if row["near_ties"]],
    }


if __name__ == "__main__":
    main()
