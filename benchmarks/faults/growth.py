"""Does the controller of a long run grow? PPO on tiny models, real ranks and a real Prefect server, call after call.

    python -m benchmarks.faults.growth '{"calls": 10000}'

The last line is JSON: `calls` (model function calls made), `rss_mib` (of the controller alone, when a tenth, two
tenths, ... of them had ended), `ratio` of the last to the first of those, and the largest number of `threads`.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from prefect_rlhf.flows.commands import cli
from prefect_rlhf.tasks.running.journal import MODEL_FUNCTION_CALLS, read_spans
from tests.support.plan_matrix import plan
from tests.support.runs import plan_file
from tests.support.tiny import ppo_parameters

CALLS_PER_STEP = 6  # of PPO
SAMPLE_SECONDS = 0.5
SHARED = plan("0-1 dp2 engine=megatron", "0-1 dp2", "0-1 dp2", "0-1 dp2", "0-1 dp2", "0-1 dp2")
"""Two ranks, so that they are processes of their own; one copy of the actor generates and trains."""


@dataclass(frozen=True)
class Growth:
    """How long to look: model function calls, and steps shown as one subflow run."""

    calls: int = 10_000
    steps_per_group: int = 10


@dataclass(frozen=True)
class Sample:
    """This process at a moment, in Unix seconds."""

    time: float
    rss_bytes: int
    threads: int


def main() -> None:
    """Train for as long as told, print what the controller's memory did."""
    growth = Growth(**json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = ppo_parameters(folder) | {
            "plan": str(plan_file(SHARED, folder / "shared.json")),
            "steps": math.ceil(growth.calls / CALLS_PER_STEP),
            "steps_per_group": growth.steps_per_group,
        }
        parameters = folder / "parameters.json"
        parameters.write_text(json.dumps(given))
        samples: list[Sample] = []
        over = threading.Event()
        sampling = threading.Thread(target=sample, args=(samples, over), daemon=True)
        sampling.start()
        status = cli.main(["ppo", "--parameters", str(parameters), "--devices", "2"])
        over.set()
        if status:
            sys.exit(status)
        print(json.dumps(measured(Path(given["output_dir"]) / "latest", samples)))


def sample(samples: list[Sample], over: threading.Event) -> None:
    """Look at this process now and then."""
    process = psutil.Process()
    while not over.wait(SAMPLE_SECONDS):
        samples.append(Sample(time.time(), process.memory_info().rss, process.num_threads()))


def measured(run_dir: Path, samples: Sequence[Sample]) -> dict[str, object]:
    """Return the last line: memory at each tenth of the calls."""
    ends = sorted(span.end for span in read_spans(run_dir) if span.kind in MODEL_FUNCTION_CALLS)
    tenths = [ends[min(len(ends) - 1, len(ends) * tenth // 10)] for tenth in range(1, 11)]
    times = [one.time for one in samples]
    rss = [samples[max(0, bisect_right(times, end) - 1)].rss_bytes / (1 << 20) for end in tenths]
    return {
        "calls": len(ends),
        "rss_mib": [round(value, 1) for value in rss],
        "ratio": round(rss[-1] / rss[0], 4),
        "threads": max(one.threads for one in samples),
        "seconds": round(ends[-1] - ends[0], 1),
    }


if __name__ == "__main__":
    main()
