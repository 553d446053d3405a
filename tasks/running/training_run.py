"""The values that are fixed for a whole training run: its graph, its devices, its rows and its seed."""

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


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Steps `first_step` to `num_steps` of `graph` under `plan`; `exports` is false for a run that only measures.

    `sources` are the datasets by parameter name. `tokenizers` decode the rows of each call. The run resumes from
    `checkpoint`, if set. Every `checkpoint_every` steps it writes a checkpoint; it keeps the newest `keep_checkpoints`
    and the checkpoint of the `best` model. `role_deadlines` replace `call_deadline_seconds` for calls of some roles, in
    seconds. A run that came from another plan begins at step `moved_at`, with the states that its ranks have in host
    memory. `commits` are those of the Hub's repositories, which checkpoints record.
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
    role_deadlines: Mapping[str, float] = field(default_factory=dict, hash=False)
    moved_at: int | None = None
    commits: Mapping[str, str] = field(default_factory=dict, hash=False)
    _ranks: Mapping[Device, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ranks", {device: rank for rank, device in enumerate(self.lease.devices)})

    @property
    def first_step(self) -> int:
        """The run's first step: the number of steps that its checkpoint has finished, or that other plans have made."""
        if self.moved_at is not None:
            return self.moved_at
        return self.checkpoint.step if self.checkpoint else 0

    def under(self, plan: ExecutionPlan, step: int) -> TrainingRun:
        """Return the run after a move to another plan before `step`."""
        return replace(self, plan=plan, moved_at=step)

    def rank(self, device: Device) -> int:
        """Return the gang's rank on `device`: its position in the lease."""
        return self._ranks[device]

    def ranks(self, instance: ModelInstance) -> tuple[int, ...]:
        """Return the ranks of an instance, in the order of its coordinates."""
        return tuple(self._ranks[device] for device in instance.devices)
