"""From a node to what its ranks are told, and from their reports to what happened: no tensor passes through here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect_rlhf.engines.commands import BuildCommand, MoveWeightsCommand, RankReport, Restore, TransferCommand
from prefect_rlhf.engines.gang.protocol import Gang
from prefect_rlhf.engines.weights.versions import Fingerprints
from prefect_rlhf.placement.augmented.checkpointing import stateful_calls
from prefect_rlhf.placement.augmented.node import Node, Resource
from prefect_rlhf.placement.errors import InvalidInput, RlhfError, StaleWeights
from prefect_rlhf.placement.graph import Call
from prefect_rlhf.placement.layout.layout import Layout, layout_of
from prefect_rlhf.placement.plan import ModelInstance, instances, offloaded_parts, trained_instance
from prefect_rlhf.tasks.checkpoints.folders import beside, finish, folder_of, keep_newest
from prefect_rlhf.tasks.checkpoints.run_identity import run_identity
from prefect_rlhf.tasks.running.commands import call_commands
from prefect_rlhf.tasks.running.outcome import NodeOutcome
from prefect_rlhf.tasks.running.step_rows import StepRows
from prefect_rlhf.tasks.running.training_run import TrainingRun


class Dispatcher:
    """Tells a gang what each node asks of it, and holds every version's fingerprint against what ranks report."""

    def __init__(self, run: TrainingRun, gang: Gang) -> None:
        self.run, self.gang = run, gang
        self.fingerprints = Fingerprints()
        self._graph, self._plan = run.augmented.graph, run.augmented.plan
        self.rows = StepRows(run)
        self._layouts: dict[ModelInstance, Layout] = {}

    def build(self, on_built: Callable[[ModelInstance, NodeOutcome], None]) -> None:
        """Open the datasets and build every model instance; copies of one role must hold the same version 0.

        A run that goes on from a checkpoint checks all of that before it builds anything.
        """
        self._check_checkpoint()
        for source in self.run.sources.values():
            self._call("open_dataset", dict.fromkeys(range(self.gang.size), (source,)), f"open {source.name}")
        offloaded = offloaded_parts(self._graph, self._plan)
        for instance, calls in instances(self._graph, self._plan).items():
            order = self._build_order(instance, calls)
            reports = self._call("build", dict.fromkeys(order.ranks, (order,)), f"build {instance.name}")
            self._settle_built(order, reports)
            if instance in offloaded:
                away = (instance, offloaded[instance])
                self._call("offload", dict.fromkeys(order.ranks, away), f"offload {instance.name}")
            on_built(instance, NodeOutcome.of(reports))
        self._restore_states()

    def execute(self, node: Node) -> NodeOutcome:
        """Run one node on its ranks. Raises what the ranks raise; StaleWeights when weights are not their version."""
        match node.kind:
            case "transfer":
                return NodeOutcome.of(self._transfer(node))
            case "reallocate":
                return NodeOutcome.of(self._reallocate(node))
            case "offload" | "reload":
                return NodeOutcome.of(self._move_between_host_and_device(node))
            case "checkpoint":
                return NodeOutcome.of(self._checkpoint(node))
            case "commit":
                return self._commit(node)
            case "export":
                return NodeOutcome.of(self._export(node))
            case _:
                return NodeOutcome.of(self._run_call(node))

    def finish_step(self, step: int) -> None:
        """Forget what was known of a step whose nodes have all ended; its rows are free already."""
        self.rows.finish(step)

    def _run_call(self, node: Node) -> dict[int, RankReport]:
        assert node.call is not None and node.placement is not None  # every call node has both
        orders = call_commands(self.run, node, self.rows)
        reports = self._call(node.kind, {rank: (order,) for rank, order in orders.items()}, node.title)
        if node.kind == "generate":
            self.rows.generated(node, reports)
        if node.writes is not None:
            assert node.instance is not None  # only train_step writes
            self._settle(node.instance, node.writes, reports)
        return reports

    def _transfer(self, node: Node) -> dict[int, RankReport]:
        transfers, frees = self.rows.transfers(node), self.rows.take_frees(node)
        ranks = {self.run.rank(device) for device in node.devices}
        orders = {rank: (TransferCommand(node.step, transfers, frees.get(rank, ())),) for rank in ranks}
        return self._call("transfer", orders, node.title)

    def _reallocate(self, node: Node) -> dict[int, RankReport]:
        assert node.source is not None and node.target is not None and node.reads is not None  # set for this kind
        order = MoveWeightsCommand(
            node.source,
            node.target,
            node.reads,
            self._layout(node.source),
            self._layout(node.target),
            self.run.lease.devices,
        )
        ranks = {self.run.rank(device) for device in node.devices}
        reports = self._call("reallocate", dict.fromkeys(ranks, (order,)), node.title)
        self._settle(node.target, node.reads, reports)
        return reports

    def _move_between_host_and_device(self, node: Node) -> dict[int, RankReport]:
        assert node.instance is not None  # set for both kinds
        ranks = self.run.ranks(node.instance)
        reports = self._call(node.kind, dict.fromkeys(ranks, (node.instance, node.part)), node.title, "host_link")
        if node.kind == "reload" and node.part == "all" and node.reads is not None:
            self._settle(node.instance, node.reads, reports)
        return reports

    def _export(self, node: Node) -> dict[int, RankReport]:
        """Write `run_dir/<role>`, a Hugging Face folder; the ranks write, nothing passes through here."""
        instance = node.instance
        assert instance is not None  # set for this kind
        tokenizer = Path(self._graph.model(instance.role).path)
        arguments = (instance, self.run.run_dir / instance.role, tokenizer, self._layout(instance))
        return self._call("export", dict.fromkeys(self.run.ranks(instance), arguments), node.title)

    def _checkpoint(self, node: Node) -> dict[int, RankReport]:
        """Write a role's shards beside the last checkpoint."""
        instance = node.instance
        assert instance is not None and node.reads is not None  # set for this kind
        folder = beside(folder_of(self.run.run_dir, node.reads)) / instance.role
        arguments = (instance, node.reads, folder)
        return self._call("checkpoint", dict.fromkeys(self.run.ranks(instance), arguments), node.title)

    def _commit(self, node: Node) -> NodeOutcome:
        """Add what is small and rename; then throw away what is too old."""
        began, run, version = time.perf_counter(), self.run, node.step + 1
        versions = {m.role: version if self._graph.trained_by(m.role) else 0 for m in self._graph.models}
        fingerprints = {role: self.fingerprints.content(role, version) for role, version in versions.items()}
        names = tuple(call.name for call in stateful_calls(self._graph))
        ranks = {run.rank(device) for device in node.devices}
        held = self._call("states", dict.fromkeys(ranks, (names,)), node.title) if ranks else {}
        states = {name: state for found in held.values() for name, state in found.items()}
        problem = run_identity(self._graph, run.seed, run.checkpoint_every)
        try:
            finish(run.augmented, run.run_dir, version, problem, fingerprints, states)
            keep_newest(run.run_dir, run.keep_checkpoints)
        except OSError as error:
            raise RlhfError(f"{node.title}: {error}") from error
        return NodeOutcome(time.perf_counter() - began, fingerprint_seconds=0.0, bytes_moved=0, num_tokens=0)

    def _check_checkpoint(self) -> None:
        """Hold every shard against its checksums, each on one of the ranks, and learn what the weights must be."""
        checkpoint = self.run.checkpoint
        if checkpoint is None:
            return
        shards = [(role, index) for role in checkpoint.manifest.shards for index in checkpoint.shards(role)]
        by_rank = {rank: (shards[rank :: self.gang.size],) for rank in range(self.gang.size)}
        self._call("check_shards", by_rank, f"check {checkpoint.folder.name}")
        for role, fingerprint in checkpoint.manifest.fingerprints.items():
            self.fingerprints.learn(role, checkpoint.step if role in checkpoint.manifest.shards else 0, fingerprint)

    def _restore_states(self) -> None:
        """Give each stateful computation what its last run left, where it runs now."""
        states = self.run.checkpoint.manifest.states if self.run.checkpoint else {}
        for name, state in states.items():
            rank = self.run.rank(self._plan[name].mesh.devices()[0])  # a computation has one device
            modules = (self._graph.call(name).operation.module,)
            self._call("restore_states", {rank: ({name: state}, modules)}, f"restore the state of {name}")

    def _settle_built(self, order: BuildCommand, reports: Mapping[int, RankReport]) -> None:
        """Raises InvalidInput when a frozen role's weights are not those that the run to go on had."""
        instance, checkpoint = order.instance, self.run.checkpoint
        try:
            self._settle(instance, order.restore.version if order.restore else 0, reports)
        except StaleWeights as error:
            if checkpoint is None or instance.role in checkpoint.manifest.shards:
                raise
            seen = f"a checkpoint of a run with other weights of {instance.role}"
            raise InvalidInput("resume_from", seen, f"those in {order.model.path}, as in this run") from error

    def _settle(self, instance: ModelInstance, version: int, reports: Mapping[int, RankReport]) -> None:
        """Hold freshly written weights against the version's fingerprint, or make theirs the version's."""
        ranks = self.run.ranks(instance)
        digests = {rank: report.digest for rank, report in reports.items() if rank in ranks and report.digest}
        self.fingerprints.settle(instance, version, digests, self._layout(instance))

    def _build_order(self, instance: ModelInstance, calls: Sequence[Call]) -> BuildCommand:
        model, restore = self._graph.model(instance.role), None
        if instance != trained_instance(self._graph, self._plan, instance.role):
            model = replace(model, optimizer=None)  # a copy that is only read needs no gradients and no optimizer
        elif self.run.checkpoint is not None:
            restore = Restore(self.run.checkpoint.folder / instance.role, self.run.checkpoint.step)
        return BuildCommand(
            model=model,
            instance=instance,
            ranks=self.run.ranks(instance),
            layout=self._layout(instance),
            restore=restore,
            max_sequence_length=self.run.max_sequence_length,
            max_rows=max(map(self._rows_at_once, calls)),
        )

    def _rows_at_once(self, call: Call) -> int:
        """Of the fullest replica, as many as generation keeps in flight."""
        most = max(len(need.share.rows()) for need in self.rows.needs[call.name].values())
        return -(-most // self._plan[call.name].micro_batches)

    def _layout(self, instance: ModelInstance) -> Layout:
        if instance not in self._layouts:
            self._layouts[instance] = layout_of(instance, self._graph.model(instance.role), self.run.lease.mesh)
        return self._layouts[instance]

    def _call(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], doing: str, resource: Resource = "compute"
    ) -> dict[int, Any]:
        seconds = self.run.call_deadline_seconds
        return self.gang.call(method, arguments, doing=doing, deadline_seconds=seconds, resource=resource)
