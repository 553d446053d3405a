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
    """A run of a graph under a plan."""

    graph: DataflowGraph
    plan: ExecutionPlan
    num_steps: int
    """The last step."""
    lease: Lease
    sources: Mapping[str, RowSource]
    """The datasets by parameter name."""
    tokenizers: Tokenizers
    """Decode each call's rows."""
    run_dir: Path
    seed: int
    max_sequence_length: int
    call_deadline_seconds: float
    """Limit of a call."""
    checkpoint: Checkpoint | None = None
    """What the run resumes from, if set."""
    exports: bool = True
    """False for a run that only measures."""
    checkpoint_every: int | None = None
    """In steps; None writes none."""
    keep_checkpoints: int = 2
    """How many of the newest are kept, beside the `best` model's."""
    best: BestModel | None = None
    export_merged: bool = False
    """Whether models with an adapter are written as whole models too."""
    role_deadlines: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Limits in seconds that replace `call_deadline_seconds` for some roles' calls."""
    start_deadline_seconds: float | None = None
    """Limit of each phase of the ranks' start: their imports, then the join; None: see `open_gang`."""
    switched_after: int | None = None
    """A run that switched from another plan begins after so many steps, with the states that its ranks hold in host
    memory."""
    lineage: Lineage = field(default_factory=Lineage, hash=False)
    """Goes into its checkpoints."""
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
