"""The augmented graph: every task run of the training run, with the moves of weights and data made explicit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.mesh import DeviceMesh
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, Placement

NodeKind = Literal["generate", "inference", "train_step", "compute", "transfer", "reallocate", "offload", "reload"]


@dataclass(frozen=True, slots=True)
class RowMove:
    """Keys that a transfer brings from the ranks that made them to the ranks that need them.

    `producer` is the call whose placement says who holds which rows; None with a dataset's rows, which every rank reads
    for itself.
    """

    producer: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One task run.

    `meshes` are all devices it occupies. `reads` is the weight version a call or move uses, `writes` the one it makes.
    `source` and `target` are set for moves of weights. `depends_on` are node ids that must have ended.
    """

    id: str
    kind: NodeKind
    step: int
    meshes: tuple[DeviceMesh, ...]
    depends_on: tuple[str, ...]
    reason: str
    call: Call | None = None
    placement: Placement | None = None
    instance: ModelInstance | None = None
    source: ModelInstance | None = None
    reads: int | None = None
    writes: int | None = None
    moves: tuple[RowMove, ...] = ()

    @property
    def title(self) -> str:
        """The task run's name: call, step, mesh and strategy, weight version.

        `actor.generate · step 3 · n0:0-1 dp2 · v3`
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class AugmentedGraph:
    """What is estimated, drawn and run. Nodes are in a topological order."""

    graph: DataflowGraph
    plan: ExecutionPlan
    num_steps: int
    nodes: tuple[Node, ...]
