"""The values that stay fixed for a whole training run: graph, devices, rows and seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from prefect_rlhf.engines.commands import RowSource
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import Device
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance
from prefect_rlhf.placement.rows.tokenizers import Tokenizers
from prefect_rlhf.tasks.checkpoints.best import BestModel
from prefect_rlhf.tasks.checkpoints.folders import Checkpoint
from prefect_rlhf.tasks.checkpoints.lineage import Lineage


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A run of `graph` under `plan`, up to `num_steps` steps; `exports` is false for a run that only measures.

    `sources` are the datasets by parameter name. `tokenizers` decode each call's rows. The run resumes from
    `checkpoint`, if set. It writes a checkpoint every `checkpoint_every` steps, and keeps the newest `keep_checkpoints`
    and that of the `best` model. With `export_merged`, models with an adapter are written as whole models too.
    `role_deadlines` replaces `call_deadline_seconds` for some roles' calls, in seconds. A run that switched from
    another plan begins after `switched_after` steps, with the states that its ranks hold in host memory. `lineage` goes
    into its checkpoints.
    """

    graph: DataflowGraph
    plan: ExecutionPlan
    num_steps: int
    lease: Lease
    sources: Mapping[str, RowSource]
    tokenizers: Tokenizers
    run_dir: Path
    seed: int
    max_sequence_length: int
    call_deadline_seconds: float
    checkpoint: Checkpoint | None = None
    exports: bool = True
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    best: BestModel | None = None
    export_merged: bool = False
    role_deadlines: Mapping[str, float] = field(default_factory=dict, hash=False)
    switched_after: int | None = None
    lineage: Lineage = field(default_factory=Lineage, hash=False)
    _ranks: Mapping[Device, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ranks", {device: rank for rank, device in enumerate(self.lease.devices)})

    @property
    def finished(self) -> int:
        """How many steps were finished before this run's first: those of its checkpoint, or under other plans."""
        if self.switched_after is not None:
            return self.switched_after
        return self.checkpoint.step if self.checkpoint else 0

    def under(self, plan: ExecutionPlan, step: int) -> TrainingRun:
        """Return the run after a switch to another plan before `step`."""
        return replace(self, plan=plan, switched_after=step - 1)

    def rank(self, device: Device) -> int:
        """Return the gang's rank on `device`: its position in the lease."""
        return self._ranks[device]

    def ranks(self, instance: ModelInstance) -> tuple[int, ...]:
        """Return an instance's ranks, in the order of its coordinates."""
        return tuple(self._ranks[device] for device in instance.devices)
