"""The gain of streamed parts by predicted and by measured seconds of a step; prints JSON as its last line.

    python -m benchmarks.planner.streamed_parts [--parts 4] [--rounds 1] [--steps 4] [--batch-size 16]
        [--response-tokens 32] [--model FOLDER] [--prompts FILE]

RAFT (`raft.py`) of three models of SmolLM2's shape on two CPU ranks of a thread each, with eight responses
to each of the demo's prompts. A rank generates, the other has the inferences of reward and reference model, and both
train on the best responses. Two plans differ only in the parts of generation and inferences: a single part, or
`--parts`. They run in turn, `--rounds` times each, so that a change of the machine's load affects both. The machine is
probed first, unless it is known. A step's seconds are the median of the steps after the first, over all rounds. `gain`
is the quotient of both plans' seconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from prefect.testing.utilities import prefect_test_harness

from benchmarks.beside_trl.our_ppo import with_scalar_head
from benchmarks.beside_trl.ppo_work import PPOWork
from benchmarks.beside_trl.step_work import check_files
from benchmarks.planner.demo_step import predicted_and_measured
from benchmarks.planner.raft import raft
from prefect_rlhf.blocks.lease import leased_devices
from prefect_rlhf.flows.hardware.probes import probed_speeds
from tests.runs import Compact, leased, plan_file

RANKS = 2
SAMPLES = 8  # responses to a prompt, of which a step trains on the best


def main() -> None:
    """Probe, predict and run both plans in turn, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="prompts of a step")
    parser.add_argument("--response-tokens", type=int, default=32)
    parser.add_argument("--model", default=PPOWork.model)
    parser.add_argument("--prompts", default=PPOWork.prompts)
    arguments = parser.parse_args()
    check_files(PPOWork(model=arguments.model, prompts=arguments.prompts))
    predicted: dict[int, float] = {}
    measured: dict[int, list[float]] = {}
    with probed_devices() as folder:
        parameters = job(arguments, folder)
        for parts in (1, arguments.parts) * arguments.rounds:
            file = plan_file(in_parts(parts), folder / f"parts_{parts}.json", ["best_penalised"])
            predicted[parts], seconds = predicted_and_measured(raft, {**parameters, "plan": str(file)}, str(parts))
            measured.setdefault(parts, []).extend(seconds)
            shown = [round(each, 2) for each in seconds]
            print(f"{parts} parts: predicted {predicted[parts]:.2f} s, measured {shown}", flush=True)
    print(json.dumps(summary(predicted, {parts: median(seconds) for parts, seconds in measured.items()})))


@contextmanager
def probed_devices() -> Iterator[Path]:
    """Yield a folder for files, with a server and leased devices, whose speeds are probed unless they are known."""
    with (
        prefect_test_harness(server_startup_timeout=120),
        tempfile.TemporaryDirectory() as folder,
        leased(RANKS),
    ):
        with leased_devices() as lease:
            probed_speeds(lease, ["bfloat16"], print)
        yield Path(folder)


def job(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the parameters of the flow: a step more than is measured, and responses of equal length."""
    return {
        "prompts": {"path": arguments.prompts},
        "actor": {"path": arguments.model},
        "ref": {"path": arguments.model},
        "reward": {"path": str(with_scalar_head(Path(arguments.model), folder / "reward_model")), "head": "scalar"},
        "algo": {
            "batch_size": arguments.batch_size,
            "samples_per_prompt": SAMPLES,
            "sampling": {"max_new_tokens": arguments.response_tokens, "stop_at_eos": False},
            "update": {"epochs": 1, "mini_batches": 1},
        },
        "output_dir": str(folder / "runs"),
        "steps": arguments.steps + 1,
    }


def in_parts(parts: int) -> Compact:
    """Return the plan with generation and inferences in so many parts."""
    return {
        "actor_generate": f"0 engine=vllm parts={parts}",
        "reward_inference": f"1 engine=megatron parts={parts}",
        "ref_inference": f"1 engine=megatron parts={parts}",
        "actor_train": "0-1 engine=megatron dp2",
    }


def summary(predicted: Mapping[int, float], measured: Mapping[int, float]) -> dict[str, Any]:
    """Return the last line; both have the seconds of a step by the number of parts."""
    whole, parts = min(measured), max(measured)
    return {
        "parts": parts,
        "gain": round(measured[whole] / measured[parts], 3),
        "predicted_gain": round(predicted[whole] / predicted[parts], 3),
        "measured_seconds": [round(measured[whole], 2), round(measured[parts], 2)],
        "predicted_seconds": [round(predicted[whole], 2), round(predicted[parts], 2)],
    }


if __name__ == "__main__":
    main()
