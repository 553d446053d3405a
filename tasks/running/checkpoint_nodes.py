"""Checkpoint and commit nodes, and going on from a checkpoint: what ranks are told, and what the controller adds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prefect_rlhf.engines.commands import BuildCommand, RankReport, Restore
from prefect_rlhf.engines.weights.versions import Fingerprints
from prefect_rlhf.placement.augmented.checkpointing import stateful_calls
from prefect_rlhf.placement.augmented.node import Node
from prefect_rlhf.placement.errors import InvalidInput, RlhfError, StaleWeights
from prefect_rlhf.tasks.checkpoints.folders import beside, finish, folder_of, keep_newest
from prefect_rlhf.tasks.checkpoints.run_identity import run_identity
from prefect_rlhf.tasks.running.outcome import NodeOutcome
from prefect_rlhf.tasks.running.training_run import TrainingRun


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """The checkpoints of one run. `call` lets ranks do something, as `Gang.call` does."""

    run: TrainingRun
    fingerprints: Fingerprints
    call: Callable[..., dict[int, Any]]

    def check(self, num_ranks: int) -> None:
        """Hold every shard against its checksums, each on one of the ranks, and learn what the weights must be."""
        checkpoint = self.run.checkpoint
        if checkpoint is None:
            return
        shards = [(role, index) for role in checkpoint.manifest.shards for index in checkpoint.shards(role)]
        by_rank = {rank: (shards[rank::num_ranks],) for rank in range(num_ranks)}
        self.call("check_shards", by_rank, f"check {checkpoint.folder.name}")
        for role, fingerprint in checkpoint.manifest.fingerprints.items():
            self.fingerprints.learn(role, checkpoint.step if role in checkpoint.manifest.shards else 0, fingerprint)

    def restore_of(self, role: str) -> Restore | None:
        """Return where a trained role's state is, in a run that goes on."""
        checkpoint = self.run.checkpoint
        return Restore(checkpoint.folder / role, checkpoint.step) if checkpoint else None

    def restore_states(self) -> None:
        """Give each stateful computation what its last run left, where it runs now."""
        graph, plan = self.run.augmented.graph, self.run.augmented.plan
        states = self.run.checkpoint.manifest.states if self.run.checkpoint else {}
        for name, state in states.items():
            rank = self.run.rank(plan[name].mesh.devices()[0])  # a computation has one device
            arguments = {name: state}, (graph.call(name).operation.module,)
            self.call("restore_states", {rank: arguments}, f"restore the state of {name}")

    def refusal(self, error: StaleWeights, command: BuildCommand) -> RlhfError:
        """Return the error for built weights that are not their version: a frozen role's path may have others."""
        checkpoint, role = self.run.checkpoint, command.instance.role
        if checkpoint is None or role in checkpoint.manifest.shards:
            return error
        return InvalidInput(
            "resume_from",
            f"a checkpoint of a run with other weights of {role}",
            f"those in {command.model.path}, as in this run",
        )

    def write(self, node: Node) -> dict[int, RankReport]:
        """Let ranks write a role's shards beside the last checkpoint."""
        instance = node.instance
        assert instance is not None and node.reads is not None  # set for a checkpoint
        folder = beside(folder_of(self.run.run_dir, node.reads)) / instance.role
        arguments = (instance, node.reads, folder)
        return self.call("checkpoint", dict.fromkeys(self.run.ranks(instance), arguments), node.title)

    def commit(self, node: Node) -> NodeOutcome:
        """Add the manifest to the shards and rename; then throw away what is too old."""
        began, run, graph, version = time.perf_counter(), self.run, self.run.augmented.graph, node.step + 1
        versions = {m.role: version if graph.trained_by(m.role) else 0 for m in graph.models}
        fingerprints = {role: self.fingerprints.content(role, version) for role, version in versions.items()}
        names = tuple(call.name for call in stateful_calls(graph))
        ranks = {run.rank(device): (names,) for device in node.devices}
        by_rank = self.call("states", ranks, node.title) if ranks else {}
        states = {name: state for of_rank in by_rank.values() for name, state in of_rank.items()}
        identity = run_identity(graph, run.seed, run.checkpoint_every)
        try:
            finish(run.augmented, run.run_dir, version, identity, fingerprints, states)
            keep_newest(run.run_dir, run.keep_checkpoints)
        except OSError as error:
            raise RlhfError(f"{node.title}: {error}") from error
        seconds = time.perf_counter() - began
        return NodeOutcome(seconds=seconds, device_bytes={}, resident_bytes={}, store_bytes={})
