"""Solve a closed planning problem: `python -m benchmarks.solve_problem FILE [--budget-seconds S] [--evaluations N]`.

FILE is JSON, or gzipped JSON, as `benchmarks.planner.closed_problem` reads it. The last line printed is JSON; progress
goes to standard error. Ctrl-C ends the search with the best plan so far.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, too: it reads files with `benchmarks`

from benchmarks.planner.closed_problem import ClosedProblem, load_closed_problem  # noqa: E402  after the path is set
from prefect_rlhf.errors.errors import InvalidInput  # noqa: E402  after the path is set
from prefect_rlhf.placement.search.driver import SearchResult, search  # noqa: E402  after the path is set
from prefect_rlhf.placement.search.rules.ready_first import ReadyFirst, period_seconds  # noqa: E402  after the path


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 with a plan, 2 for bad input, 1 without a plan, 130 when stopped before the search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--budget-seconds", type=float, help="processor time (default: 5, without --evaluations)")
    parser.add_argument("--evaluations", type=float, help="bounds and schedules of plans: the same on any machine")
    parser.add_argument("--method", choices=["exact", "metropolis-hastings"], default="exact")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        closed = load_closed_problem(options.file)
        if closed.not_read:
            show(f"not read: {', '.join(closed.not_read)}")
        for flag, limit in (("budget-seconds", options.budget_seconds), ("evaluations", options.evaluations)):
            if limit is not None and not limit > 0:
                raise InvalidInput(f"--{flag}", limit, "more than 0")
        seconds = 5.0 if options.budget_seconds is None and options.evaluations is None else options.budget_seconds
        result = search(
            closed.problem,
            math.inf if seconds is None else seconds,
            options.method,
            options.seed,
            max_evaluations=math.inf if options.evaluations is None else options.evaluations,
            progress=show,
            rule=ReadyFirst,
        )
    except InvalidInput as error:
        show(error)
        return 2
    except KeyboardInterrupt:
        show("stopped before the search began")
        return 130
    return report(closed, result)


def show(line: object) -> None:
    """Print to standard error, at once."""
    print(line, file=sys.stderr, flush=True)


def report(closed: ClosedProblem, result: SearchResult) -> int:
    """Print the result, last as one line of JSON."""
    print(f"{result.outcome.name}: {result.outcome.value}")
    if result.plan is None:
        show(f"no plan of {closed.problem.name} found in {result.cpu_seconds:.3f} s")
        return 1
    print(f"binding: {result.binding}")
    print(f"{period_seconds(closed.problem, result.plan):.3f} s per iteration, {result.evaluations:,} evaluations")
    last_line = {
        "plan": closed.plan_in_file(result.plan),
        "makespan_seconds": result.seconds,
        "lower_bound_seconds": result.lower_bound_seconds,
        "gap": result.gap,
        "evaluations": result.evaluations,
        "cpu_seconds": result.cpu_seconds,
    }
    print(json.dumps(last_line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
