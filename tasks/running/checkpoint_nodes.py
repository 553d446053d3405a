"""Checkpoint and commit nodes, and resuming: the commands to ranks, and the controller's own part."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, replace

from prefect_rlhf.engines.commands import BuildCommand, RankReport, Restore
from prefect_rlhf.engines.files.saved_state import SavedState
from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.engines.weights.versions import Fingerprint, Fingerprints
from prefect_rlhf.errors.errors import RlhfError, StaleWeights
from prefect_rlhf.files.atomic_file import writing
from prefect_rlhf.placement.augmented.checkpointing import stateful_calls
from prefect_rlhf.placement.augmented.node import Node
from prefect_rlhf.placement.augmented.work import Checkpoint
from prefect_rlhf.placement.graph import Call
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.tasks.checkpoints.folders import beside, finish, folder_of, keep_newest
from prefect_rlhf.tasks.checkpoints.frozen_models import other_weights
from prefect_rlhf.tasks.checkpoints.run_identity import run_identity
from prefect_rlhf.tasks.running.outcome import NodeOutcome, outcome_of
from prefect_rlhf.tasks.running.rank_calls import RankCalls
from prefect_rlhf.tasks.running.saved_states import LeftStates
from prefect_rlhf.tasks.running.training_run import TrainingRun


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """A run's checkpoints. After a switch it takes over the computations' states from the plan `before`."""

    run: TrainingRun
    fingerprints: Fingerprints
    call: RankCalls
    before: InitVar[Checkpointing | None] = None
    _states: LeftStates = field(init=False)
    _copied: dict[int, dict[str, Fingerprint]] = field(init=False)  # by step and weights: in host memory, not on disk

    def __post_init__(self, before: Checkpointing | None) -> None:
        states = LeftStates(self.run.checkpoint_every) if before is None else before._states
        object.__setattr__(self, "_states", states)
        object.__setattr__(self, "_copied", defaultdict(dict))

    def check(self, num_ranks: int) -> None:
        """Verify the checksums of all shards, each on one rank, and record the weights' expected fingerprints."""
        checkpoint = self.run.checkpoint
        if checkpoint is None:
            return
        shards = [(name, index) for name in checkpoint.manifest.shards for index in checkpoint.shards(name)]
        by_rank = {rank: (shards[rank::num_ranks],) for rank in range(num_ranks)}
        self.call(Rank.check_shards, by_rank, f"check {checkpoint.folder.name}")
        graph = self.run.graph
        role_of = {own.name: model.role for model in graph.models for own in graph.weights(model.role) if own.trained}
        for name, fingerprint in checkpoint.manifest.fingerprints.items():
            version = graph.version_after(role_of[name], checkpoint.step) if name in role_of else 0
            self.fingerprints.learn(name, version, fingerprint)

    def restore(self, instance: ModelInstance) -> Restore | None:
        """Return the location of an instance's state in a resumed or switched run; None in a new run."""
        checkpoint, graph = self.run.checkpoint, self.run.graph
        if self.run.switched_after is not None:
            return Restore(None, graph.version_after(instance.role, self.run.switched_after))
        return Restore(checkpoint.folder, graph.version_after(instance.role, checkpoint.step)) if checkpoint else None

    def restore_states(self) -> None:
        """Restore each stateful computation's state from the checkpoint, on the rank that now runs it."""
        states = self.run.checkpoint.manifest.states if self.run.checkpoint else {}
        for name, state in states.items():
            self._restore_state(name, state)
            self._states.leave(name, self.run.finished, state)

    def move_states(self, before: Checkpointing) -> None:
        """Move computations' states to the ranks that need them under this plan.

        Raises InvalidInput for a state that has to move and cannot be saved.
        """
        for call in stateful_calls(self.run.graph):
            if self._rank_of(call.name) != before._rank_of(call.name):
                state = self._states.newest(call.name)
                if state is not None:
                    self._restore_state(call.name, state)

    def _rank_of(self, call: str) -> int:
        """Return the rank of a computation, which has a single device."""
        return self.run.rank(self.run.plan[call].mesh.devices()[0])

    def _restore_state(self, name: str, state: SavedState) -> None:
        operation = self.run.graph.call(name).operation
        arguments = {name: state}, ((operation.module, operation.file),)
        self.call(Rank.restore_states, {self._rank_of(name): arguments}, f"restore the state of {name}")

    def refusal(self, error: StaleWeights, command: BuildCommand) -> RlhfError:
        """Return the error for built weights that differ from their version.

        For frozen weights, the path may now hold other weights than in the run to resume.
        """
        if self.run.checkpoint is None or all(own.trained for own in command.weights):
            return error
        return other_weights(command.instance.role, command.model.path)

    def left(self, call: Call, step: int, reports: Mapping[int, RankReport]) -> None:
        """Keep the new state of a stateful computation until the next checkpoint."""
        for report in reports.values():
            if report.state is not None:
                self._states.leave(call.name, step, report.state)

    def copy(self, node: Node, work: Checkpoint) -> dict[int, RankReport]:
        """Make ranks copy their parts of trained weights to host memory, and record the weights' fingerprints."""
        instance, version = work.instance, work.reads
        reports = self.call(Rank.checkpoint, dict.fromkeys(self.run.ranks(instance), (instance, version)), node.title)
        trained = (own.name for own in self.run.graph.weights(instance.role) if own.trained)
        self._copied[node.step] |= {name: self.fingerprints.content(name, version) for name in trained}
        return reports

    def commit(self, node: Node) -> NodeOutcome:
        """Make ranks write their copies to disk while later steps run; then add the manifest and rename the folder.

        Old checkpoints are deleted afterwards.
        """
        began, run, graph = time.perf_counter(), self.run, self.run.graph
        folder = folder_of(run.run_dir, node.step)
        ranks = [run.rank(device) for device in node.devices]
        reports = self.call(Rank.commit, dict.fromkeys(ranks, (beside(folder), folder)), node.title, "disk")
        frozen = (own.name for own in graph.all_weights() if not own.trained)
        fingerprints = {name: self.fingerprints.content(name, 0) for name in frozen} | self._copied.pop(node.step)
        identity = run_identity(graph, run.seed, run.checkpoint_every)
        states = self._states.written_after(node.step)
        with writing(folder):
            finish(graph, run.plan, run.run_dir, node.step, identity, fingerprints, states, run.lineage)
            spared = run.best.spared(run.run_dir) if run.best else None
            keep_newest(run.run_dir, run.keep_checkpoints, spared)
        return replace(outcome_of(reports), seconds=time.perf_counter() - began)
