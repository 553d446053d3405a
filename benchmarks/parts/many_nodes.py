"""What several machines cost: a gang's start, an empty call, a node of the graph; and the controller of 128 ranks.

    python -m benchmarks.parts.many_nodes '{"nodes": [1, 2, 4, 8], "ranks": 128}'

Machines are network namespaces of one device each (needs root and Ray); the ranks of the second part are stubs that
answer at once. The last line is JSON: `by_nodes` (seconds of the start, of an empty call to all ranks, and of
orchestration for a node of the same PPO graph) and `controller` (its own CPU seconds for a step, by kind of node).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.parts.stub_ranks import IdleRank, StubProcesses
from prefect_rlhf.blocks.lease import running_on
from prefect_rlhf.engines.gang.open import open_gang
from prefect_rlhf.engines.gang.process_gang import ProcessGang
from prefect_rlhf.engines.gang.processes.messages import GangSettings, Start
from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.training.run import prepare
from prefect_rlhf.flows.training.spec.run_spec import asked_run
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.tasks.running.dispatch import Dispatcher
from prefect_rlhf.tasks.running.journal import BEHIND, MODEL_FUNCTION_CALLS, covered_seconds
from prefect_rlhf.tasks.running.training_run import TrainingRun
from tests.support import plan_matrix
from tests.support.own_server import own_server
from tests.support.plan_matrix import plan
from tests.support.ray_nodes import joined, ray_nodes
from tests.support.runs import plan_file
from tests.support.tiny import make_model, make_prompts

EMPTY_CALLS, STEPS, DEVICES_PER_NODE = 200, 4, 8
LAYERS, HEADS = 32, 32
"""Of the stub ranks' models: as many parameters and shards as a model of 7B has."""


@dataclass(frozen=True)
class Sizes:
    """How many machines, one after another, and how many stub ranks."""

    nodes: tuple[int, ...] = (1, 2, 4, 8)
    ranks: int = 128


def main() -> None:
    """Measure both parts, print the figures."""
    sizes = Sizes(**json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
    with tempfile.TemporaryDirectory() as folder:
        by_nodes = {count: measured_on(count, Path(folder, str(count))) for count in sizes.nodes}
        print(json.dumps({"by_nodes": by_nodes, "controller": controller(sizes.ranks, Path(folder, "stubs"))}))


def measured_on(count: int, folder: Path) -> dict[str, float]:
    """Return what a gang on so many machines costs, and what its PPO does."""
    folder.mkdir()
    with ray_nodes((1,) * count) as nodes, joined(nodes):
        began = time.monotonic()
        with closing(open_gang((1,) * count, rank_factory=IdleRank, device="cpu", through_ray=True)) as gang:
            start = time.monotonic() - began
            seconds = []
            for _ in range(EMPTY_CALLS):
                began = time.monotonic()
                gang.call(IdleRank.nothing, dict.fromkeys(range(count), ()), doing="nothing", deadline_seconds=30)
                seconds.append(time.monotonic() - began)
        return {
            "start_seconds": round(start, 2),
            "empty_call_seconds": round(statistics.median(seconds), 6),
            "node_seconds": orchestration_of_a_node(count, folder),
        }


def orchestration_of_a_node(count: int, folder: Path) -> float:
    """Return the median over steps, without the first, of a step's seconds in no call divided by its nodes."""
    given = plan_matrix.parameters(folder) | {"steps": STEPS}
    where = f"0-{count - 1} dp{count}" if count > 1 else "0"
    shared = plan(f"{where} engine=megatron", *[where] * 5)
    with own_server():
        result = plan_matrix.run(given, shared, "shared", num_devices=count, nodes=count)
    each = []
    for step in range(2, STEPS + 1):
        spans = [span for span in result.spans if span["step"] == step and span["kind"] not in BEHIND]
        wall = max(span["end"] for span in spans) - min(span["start"] for span in spans)
        calls = (span for span in spans if span["kind"] in MODEL_FUNCTION_CALLS)
        each.append((wall - covered_seconds((s["end"] - s["seconds"], s["end"]) for s in calls)) / len(spans))
    return round(statistics.median(each), 4)


def controller(num_ranks: int, folder: Path) -> Mapping[str, object]:
    """Return the CPU seconds of this process for a step of PPO on stub ranks: in all, and by kind of node."""
    cluster = ClusterShape("stubs", num_ranks // DEVICES_PER_NODE, DEVICES_PER_NODE, 80 << 30)
    lease = Lease("stubs", "stubs", cluster, cluster.whole, cluster.whole.devices())
    folder.mkdir()
    run = stub_run(lease, folder)
    gang = stub_gang(num_ranks)
    with closing(gang):
        dispatcher = Dispatcher(run, gang)
        dispatcher.build(lambda instance, outcome: None)
        nodes = augment(run.graph, run.plan, STEPS).nodes
        seconds: Counter[str] = Counter()
        for step in range(1, STEPS + 1):
            for node in (node for node in nodes if node.step == step and node.kind != "export"):
                began = time.process_time()
                dispatcher.execute(node)
                if step > 1:  # the first makes what is kept for all
                    seconds[node.kind] += time.process_time() - began
            dispatcher.finish_step(step, step + 1)
    by_kind = {kind: round(total / (STEPS - 1), 4) for kind, total in seconds.most_common()}
    return {"ranks": num_ranks, "step_seconds": round(sum(by_kind.values()), 4), "by_kind": by_kind}


def stub_gang(num_ranks: int) -> ProcessGang[Rank]:
    """Return a gang of stubs, with the orders and replies of a real one."""
    settings = GangSettings(num_ranks, IdleRank, preload=())
    starts = {rank: Start(rank, rank % DEVICES_PER_NODE, "", 0, settings) for rank in range(num_ranks)}
    return ProcessGang(StubProcesses(num_ranks), starts)


def stub_run(lease: Lease, folder: Path) -> TrainingRun:
    """Return PPO as it would run on the lease: generation in tp 8, training in dp, tp 8 and pp 4."""
    last, nodes = lease.cluster.num_nodes * DEVICES_PER_NODE - 1, lease.cluster.num_nodes
    wide, deep = f"0-{last} dp{nodes} tp8", f"0-{last} dp{nodes // 4} tp8 pp4 micro_batches=8"
    shape = {"layers": LAYERS, "heads": HEADS, "hidden": 256}
    actor, scalar = make_model(folder / "actor", **shape), make_model(folder / "critic", scalar=True, **shape)
    prompts = make_prompts(folder / "prompts.parquet", num_train=512 * STEPS, num_held_out=8)
    compact = plan(f"{wide} engine=vllm", wide, wide, wide, deep, deep)
    file = plan_file(compact, folder / "plan.json", per_node=DEVICES_PER_NODE)
    given = {
        "prompts": {"path": prompts},
        "held_out": {"path": prompts, "split": "held_out"},
        "actor": {"path": actor},
        "ref": {"path": actor},
        "critic": {"path": scalar, "head": "scalar"},
        "reward": {"path": scalar, "head": "scalar"},
        "algo": {"batch_size": 512, "sampling": {"max_new_tokens": 52}, "evaluate_every": 2 * STEPS},
        "steps": STEPS,
        "plan": str(file),
        "output_dir": str(folder / "runs"),
    }
    asked = asked_run(ppo.algorithm, ppo.validate_parameters(given))
    with running_on(lease):
        prepared = prepare(asked, lease)
    (folder / "run").mkdir()
    return prepared.request.training_run(prepared.chosen.plan, folder / "run")


if __name__ == "__main__":
    main()
