"""The cost of a run next to its calls: nodes of the graph, transfers of a few rows, fingerprints of weights.

    python -m benchmarks.parts.orchestration '{"steps": 40, "transfers": 300, "fingerprints": 15}'

The last line is JSON. `node`: PPO under `split` on two devices whose calls return at once, with a Prefect server:
processor milliseconds of the controller for a node, and milliseconds from the end of a node's last dependency to its
own start (quartiles). `transfer`: 16 rows of 30 tokens each way between two ranks: milliseconds of a call as the
controller sees it and as the slower rank sees it (medians), and processor milliseconds of a rank. `fingerprint`:
processor milliseconds (least) to digest bfloat16 weights in the shapes of SmolLM2-135M on a thread, and to check them.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
from prefect import flow

from benchmarks.parts.orchestration_rank import CALL, KEYS, RankWithRows
from prefect_rlhf.engines.commands import RowTransfer, TransferCommand
from prefect_rlhf.engines.engine import Shard
from prefect_rlhf.engines.gang.open import open_gang
from prefect_rlhf.engines.weights.fingerprint import Factors, Sample, digest
from prefect_rlhf.placement.augmented.node import Node
from prefect_rlhf.placement.augmented.step_groups import StepGroups
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.tasks.running.journal import Journal
from prefect_rlhf.tasks.running.outcome import NodeOutcome
from prefect_rlhf.tasks.running.runner import GraphRunner
from prefect_rlhf.tasks.running.stop_request import StopRequest
from prefect_rlhf.tasks.running.train import imports_frozen
from prefect_rlhf.tasks.server.task_run_record import complete_record
from tests.own_server import own_server, runs_go_to
from tests.strategies import TWO_DEVICES, ppo
from tests.tasks import row_world

VOCABULARY, HIDDEN, MLP, LAYERS, KEY_VALUES = 49152, 576, 1536, 30, 192  # SmolLM2-135M


@dataclass(frozen=True)
class Sizes:
    """How often each is repeated."""

    steps: int = 40
    transfers: int = 300
    fingerprints: int = 15


def main() -> None:
    """Measure all three, print the figures."""
    sizes = Sizes(**json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
    with tempfile.TemporaryDirectory() as folder, own_server() as url, runs_go_to(url):
        cost_of_a_node(Path(folder, "first"), 2)  # imports, connections and caches
        node = cost_of_a_node(Path(folder, "second"), sizes.steps)
    torch.set_num_threads(1)
    transfer, fingerprint = cost_of_a_transfer(sizes.transfers), cost_of_a_fingerprint(sizes.fingerprints)
    print(json.dumps({"node": node, "transfer": transfer, "fingerprint": fingerprint}))


@dataclass
class Idle:
    """A dispatcher whose calls return at once. It notes when they begin and end."""

    begun: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)

    def execute(self, node: Node) -> NodeOutcome:
        self.begun[node.id] = self.ended[node.id] = time.perf_counter()
        return NodeOutcome(seconds=0.0, device_bytes={}, resident_bytes={}, store_bytes={})

    def finish_step(self, step: int, oldest: int) -> None:
        pass


def cost_of_a_node(folder: Path, steps: int) -> Mapping[str, object]:
    """Run the nodes of `steps` steps of PPO as task runs."""
    plan = preset("split", ppo(), TWO_DEVICES, TWO_DEVICES.whole)
    run = row_world.training_run(row_world.with_operations(ppo()), plan, steps, folder)
    idle, groups = Idle(), StepGroups(run.graph, plan, steps, 10, checkpoint_every=None)
    runner = GraphRunner(run, idle, Journal(folder), groups, StopRequest())  # type: ignore[arg-type]  # a stub

    def all_nodes() -> float:
        with complete_record(), imports_frozen():
            began = time.process_time()
            runner.run_all(lambda metrics: None)
            return time.process_time() - began

    seconds = flow(all_nodes, name="orchestration")()
    after = {node.id: [idle.ended[name] for name in node.depends_on] for node in row_world.whole_graph(run)}
    waits = [1000 * (idle.begun[node] - max(ends)) for node, ends in after.items() if ends]
    return {
        "nodes": len(after),
        "processor_ms": round(1000 * seconds / len(after), 2),
        "ms_between_nodes": [round(wait, 2) for wait in statistics.quantiles(waits)],
    }


def cost_of_a_transfer(times: int) -> Mapping[str, float]:
    """Exchange the same rows between two ranks, again and again."""
    ways = (RowTransfer(0, 1, CALL, KEYS, tuple(range(16))), RowTransfer(1, 0, CALL, KEYS, tuple(range(16, 32))))
    both = dict.fromkeys((0, 1), (TransferCommand(1, ways),))
    seen, on_ranks = [], []
    with closing(open_gang((2,), rank_factory=RankWithRows, device="cpu", engines=())) as gang:
        gang.call(RankWithRows.hold, {0: (range(16),), 1: (range(16, 32),)}, doing="hold", deadline_seconds=60)
        clock = {0: (), 1: ()}
        before = gang.call(RankWithRows.processor_seconds, clock, doing="clock", deadline_seconds=60)
        for _ in range(times):
            began = time.perf_counter()
            reports = gang.call(RankWithRows.transfer, both, doing="transfer", deadline_seconds=60)
            seen.append(time.perf_counter() - began)
            on_ranks.append(max(report.seconds for report in reports.values()))
        after = gang.call(RankWithRows.processor_seconds, clock, doing="clock", deadline_seconds=60)
    return {
        "call_ms": round(1000 * statistics.median(seen), 2),
        "rank_ms": round(1000 * statistics.median(on_ranks), 2),
        "rank_processor_ms": round(1000 * max(after[rank] - before[rank] for rank in clock) / times, 2),
    }


def cost_of_a_fingerprint(times: int) -> Mapping[str, float]:
    """Digest and check random weights, again and again."""
    shards, table = smollm2(), Factors()
    digest(shards, table)
    taken = Sample(shards, "key", table)
    return {
        "digest_ms": least(lambda: digest(shards, table), times),
        "check_ms": least(lambda: taken.changed(shards), times),
    }


def smollm2() -> dict[str, Shard]:
    """Return random weights in the shapes of SmolLM2-135M."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(LAYERS):
        of_layer = {"norm_1": (HIDDEN,), "norm_2": (HIDDEN,), "q": (HIDDEN, HIDDEN), "o": (HIDDEN, HIDDEN)}
        of_layer |= {"k": (KEY_VALUES, HIDDEN), "v": (KEY_VALUES, HIDDEN)}
        of_layer |= {"gate": (MLP, HIDDEN), "up": (MLP, HIDDEN), "down": (HIDDEN, MLP)}
        shapes |= {f"{layer}.{name}": shape for name, shape in of_layer.items()}
    weights = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    return {name: Shard(tuple((0, size) for size in weight.shape), weight) for name, weight in weights.items()}


def least(work: Callable[[], object], times: int) -> float:
    """Return the least processor milliseconds of the repetitions."""
    seconds = []
    for _ in range(times):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return round(1000 * min(seconds), 2)


if __name__ == "__main__":
    main()
