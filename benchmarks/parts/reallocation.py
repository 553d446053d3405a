"""Seconds to bring weights from one layout into another, beside the raw transport of the same bytes.

Every pair of layouts runs on the ranks of a local gang, on storage that is fused as the engines fuse theirs (see
`Copy`). `seconds` is for what goes between ranks, from the source's storage into the target's.
`raw_seconds` is plain batched send and receive of one contiguous tensor for each pair of ranks, with as many bytes.
`total_seconds` is a whole reallocation, with what is copied within ranks. All are the best of some rounds that take
turns, from a barrier to the end of the slowest rank. Everything that arrived is compared with what was sent. The last
line is JSON.

    python -m benchmarks.parts.reallocation [--rounds 5] [--pairs N]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice

from benchmarks.parts.reallocation_rank import DTYPE, SPEC, Mover
from prefect_rlhf.engines.commands import MoveWeightsCommand
from prefect_rlhf.engines.gang.local import LocalGang
from prefect_rlhf.engines.gang.open import FORK_ENVIRONMENT, RANK_ENVIRONMENT
from prefect_rlhf.engines.gang.processes.messages import GangSettings
from prefect_rlhf.engines.gang.protocol import Arguments
from prefect_rlhf.engines.gang.protocol import Result as Answer
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.alignment import overlapping_order
from prefect_rlhf.placement.layout.layout import layout_of
from prefect_rlhf.placement.models.weights import num_parameters
from prefect_rlhf.placement.plan import EngineKind, ModelInstance
from tests.support.layouts import num_lacking

NUM_RANKS = 8
ONE_NODE, TWO_NODES, FOUR_NODES = (DeviceMesh(0, nodes, 0, NUM_RANKS // nodes) for nodes in (1, 2, 4))


@dataclass(frozen=True, slots=True)
class Pair:
    """Two copies of one model on eight ranks, which are the devices of `lease` in its order."""

    name: str
    source: ModelInstance
    target: ModelInstance
    lease: DeviceMesh

    def command(self) -> MoveWeightsCommand:
        layouts = (layout_of(instance, SPEC, self.lease) for instance in (self.source, self.target))
        return MoveWeightsCommand(self.source, self.target, 1, *layouts, devices=self.lease.devices())


def instance(mesh: str, engine: EngineKind, **degrees: int) -> ModelInstance:
    return ModelInstance("actor", engine, DeviceMesh.parse(mesh), Strategy(**degrees))


def pairs() -> Iterator[Pair]:
    """Meshes that are equal, nested, disjoint and overlapping; all three axes of parallelism on both sides."""
    figure_8 = instance("n0-1:0-3", "megatron", dp=2, tp=4), instance("n0-1:0-3", "vllm", dp=4, tp=2)
    yield _aligned("HybridFlow figure 8: dp2 tp4 to dp4 tp2, aligned", *figure_8, TWO_NODES)
    yield Pair("HybridFlow figure 8: dp2 tp4 to dp4 tp2, plain order", *figure_8, TWO_NODES)
    for name, source, target in (
        ("dp2 tp2 to dp4", {"dp": 2, "tp": 2}, {"dp": 4}),
        ("tp4 to dp2 tp2", {"tp": 4}, {"dp": 2, "tp": 2}),
        ("pp4 to dp4", {"pp": 4}, {"dp": 4}),
        ("tp2 pp2 to tp4", {"tp": 2, "pp": 2}, {"tp": 4}),
    ):
        four = "n0:0-3"
        yield _aligned(name, instance(four, "megatron", **source), instance(four, "vllm", **target), ONE_NODE)
    whole, front, back = "n0:0-7", "n0:0-3", "n0:4-7"
    disjoint = instance(front, "megatron", dp=2, tp=2), instance(back, "vllm", dp=2, tp=2)
    yield Pair("disjoint: dp2 tp2 on 0-3 to dp2 tp2 on 4-7", *disjoint, ONE_NODE)
    nested = instance(whole, "megatron", dp=2, tp=2, pp=2), instance(back, "vllm", dp=2, tp=2)
    yield _aligned("nested: dp2 tp2 pp2 on 0-7 to dp2 tp2 on 4-7", *nested, ONE_NODE)
    wider = instance(front, "megatron", tp=4), instance(whole, "vllm", dp=8)
    yield _aligned("nested: tp4 on 0-3 to dp8 on 0-7", *wider, ONE_NODE)
    overlapping = instance("n0-2:0-1", "megatron", dp=3, tp=2), instance("n1-3:0-1", "megatron", dp=3, pp=2)
    yield _aligned("overlapping: dp3 tp2 on 0-5 to dp3 pp2 on 2-7", *overlapping, FOUR_NODES)


def _aligned(name: str, source: ModelInstance, target: ModelInstance, lease: DeviceMesh) -> Pair:
    """The target has its coordinates where they overlap most with the source."""
    return Pair(name, source, replace(target, device_order=overlapping_order(target, source, SPEC)), lease)


@dataclass(frozen=True, slots=True)
class Result:
    """One pair of layouts, measured. `bytes_copied` stayed within ranks; `peak_extra_bytes` is of the worst rank."""

    name: str
    bytes_moved: int
    bytes_lower_bound: int
    seconds: float
    raw_seconds: float
    total_seconds: float
    peak_extra_bytes: int
    bytes_copied: int

    def line(self) -> str:
        return (
            f"{self.name}: {self.bytes_moved / 1e6:.0f} MB in {self.seconds:.3f} s, raw {self.raw_seconds:.3f} s "
            f"({self.raw_seconds / self.seconds:.0%}); with {self.bytes_copied / 1e6:.0f} MB copied "
            f"{self.total_seconds:.3f} s; {self.peak_extra_bytes / 1e6:.0f} MB staged"
        )


def measure(gang: LocalGang[Mover], pair: Pair, rounds: int) -> Result:
    """Best of `rounds` rounds, each of the three in turn."""

    def everywhere(method: Callable[[Mover, *Arguments], Answer], *arguments: *Arguments) -> list[Answer]:
        calls = dict.fromkeys(range(gang.size), arguments)
        return list(gang.call(method, calls, doing=pair.name, deadline_seconds=120).values())

    command = pair.command()
    everywhere(Mover.prepare, command)
    raw, exchanged, total = [], [], []
    for _ in range(rounds):
        raw.append(max(everywhere(Mover.raw)))
        exchanged.append(max(everywhere(Mover.exchange)))
        moves = everywhere(Mover.move)
        total.append(max(seconds for seconds, _ in moves))
    if wrong := {rank: names for rank, names in enumerate(everywhere(Mover.wrong)) if names}:
        raise SystemExit(f"{pair.name}: wrong weights {wrong}")
    return Result(
        name=pair.name,
        bytes_moved=sum(moved.bytes_moved for _, moved in moves),
        bytes_lower_bound=num_lacking(command.source_layout, command.target_layout) * DTYPE.itemsize,
        seconds=min(exchanged),
        raw_seconds=min(raw),
        total_seconds=min(total),
        peak_extra_bytes=max(moved.peak_extra_bytes for _, moved in moves),
        bytes_copied=sum(moved.bytes_copied for _, moved in moves),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="of which the best counts")
    parser.add_argument("--pairs", type=int, help="how many of the pairs of layouts; by default all")
    options = parser.parse_args()
    environment = {**RANK_ENVIRONMENT, **FORK_ENVIRONMENT}
    gang = LocalGang(GangSettings(NUM_RANKS, Mover, environment=environment, preload=("torch.distributed",)))
    results = []
    try:
        for pair in islice(pairs(), options.pairs):
            results.append(measure(gang, pair, options.rounds))
            print(results[-1].line(), file=sys.stderr, flush=True)
    finally:
        gang.close()
    print(json.dumps({"parameters": num_parameters(SPEC), "pairs": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()
