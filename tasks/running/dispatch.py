"""Sends a node's commands to its ranks and combines their reports; no tensor passes through the controller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from prefect_rlhf.engines.commands import (
    BuildCommand,
    FollowCommand,
    MoveStateCommand,
    MoveWeightsCommand,
    RankReport,
    RowTransfer,
    StateRegion,
    TransferCommand,
)
from prefect_rlhf.engines.gang.protocol import Gang
from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.engines.weights.state_moves import state_moves
from prefect_rlhf.engines.weights.versions import Fingerprints
from prefect_rlhf.errors.errors import StaleWeights
from prefect_rlhf.placement.augmented.node import Node
from prefect_rlhf.placement.augmented.offloading import is_overwritten
from prefect_rlhf.placement.augmented.work import (
    Checkpoint,
    Commit,
    Compute,
    Export,
    Follow,
    Generate,
    HostCopy,
    ModelCall,
    Offload,
    Reallocate,
    Reload,
    TrainStep,
    Transfer,
)
from prefect_rlhf.placement.graph import Call
from prefect_rlhf.placement.layout.layout import Layout, held_parts, layout_of
from prefect_rlhf.placement.layout.sharing import in_build_order, shared_weights
from prefect_rlhf.placement.models.weights import Weights
from prefect_rlhf.placement.plan import (
    ModelInstance,
    device_coordinates,
    has_state,
    instances,
    moved_parts,
    offloaded_parts,
    stored_instance,
    trained_instance,
)
from prefect_rlhf.placement.plans.switch import closed_instances, moving_roles
from prefect_rlhf.placement.rows.shares import most_rows
from prefect_rlhf.tasks.data.tokenizer import response_ends
from prefect_rlhf.tasks.running.checkpoint_nodes import Checkpointing
from prefect_rlhf.tasks.running.commands import call_commands
from prefect_rlhf.tasks.running.outcome import NodeOutcome, outcome_of
from prefect_rlhf.tasks.running.rank_calls import RankCalls
from prefect_rlhf.tasks.running.steps.step_rows import StepRows
from prefect_rlhf.tasks.running.training_run import TrainingRun


class Dispatcher:
    """Sends each node's commands to a gang, and compares each version's reported fingerprints with the known
    fingerprint.
    """

    def __init__(self, run: TrainingRun, gang: Gang[Rank], before: Dispatcher | None = None) -> None:
        """Dispatch a run's nodes. After a switch, fingerprints and states of computations are those of `before`."""
        self.run, self.gang = run, gang
        self.fingerprints: Fingerprints = Fingerprints() if before is None else before.fingerprints
        self.rows = StepRows(run)
        self._call = RankCalls(run, gang)
        earlier: Checkpointing | None = None if before is None else before.checkpointing
        self.checkpointing: Checkpointing = Checkpointing(run, self.fingerprints, self._call, earlier)
        self._graph, self._plan = run.graph, run.plan
        self._layouts: dict[tuple[ModelInstance, tuple[str, ...]], Layout] = {}

    def build(self, on_built: Callable[[ModelInstance, NodeOutcome], None]) -> None:
        """Open the datasets and build every model instance; all copies of weights must hold the same version 0.

        A resumed run verifies the whole checkpoint before it builds a model. Raises InvalidInput if the run to resume
        had other frozen weights.
        """
        self.checkpointing.check(self.gang.size)
        for source in self.run.sources.values():
            self._call(Rank.open_dataset, dict.fromkeys(range(self.gang.size), (source,)), f"open {source.name}")
        users = instances(self._graph, self._plan)
        for instance in in_build_order(self._graph, self._plan):
            command, reports = self._build(instance, users[instance])
            try:
                self._settle(instance, command.restore.version if command.restore else 0, reports, command.weights)
            except StaleWeights as error:
                raise self.checkpointing.refusal(error, command) from error
            self._offload_built(instance)
            on_built(instance, outcome_of(reports))
        self.checkpointing.restore_states()

    def switch_from(self, before: Dispatcher, on_built: Callable[[ModelInstance, NodeOutcome], None]) -> NodeOutcome:
        """Switch plans: take over the ranks from another plan of the run, after its last step.

        Instances that differ are closed and rebuilt. Trained instances get the state that checkpoint nodes copied to
        host memory, and must then have their version's fingerprint.
        """
        closed = closed_instances(self._graph, before.run.plan, self._plan)
        everywhere = range(self.gang.size)
        self._call(Rank.close_instances, dict.fromkeys(everywhere, (closed,)), "close models")
        bytes_moved, users = 0, instances(self._graph, self._plan)
        for instance in closed_instances(self._graph, self._plan, before.run.plan):
            command, reports = self._build(instance, users[instance])
            on_built(instance, outcome_of(reports))
            if command.restore is None:
                self._settle(instance, 0, reports, command.weights)
            else:
                bytes_moved += self._move_state(before, instance, command.restore.version)
            self._offload_built(instance)
        self.checkpointing.move_states(before.checkpointing)
        moved = moving_roles(self._graph, before.run.plan, self._plan)
        copied = (stored_instance(self._graph, before.run.plan, role) for role in sorted(moved))
        unused = tuple(dict.fromkeys((*closed, *filter(None, copied))))
        freed = self._call(Rank.drop_copies, dict.fromkeys(everywhere, (unused,)), "free copies of training states")
        return replace(outcome_of(freed), bytes_moved=bytes_moved)

    def _move_state(self, before: Dispatcher, target: ModelInstance, version: int) -> int:
        """Send the copies of a role's state to the ranks of its new instance; return the bytes sent."""
        source = stored_instance(self._graph, before.run.plan, target.role)
        assert source is not None  # the same roles have a state under any plan
        holders, takers = self.run.ranks(source), self.run.ranks(target)
        copied = self._call(Rank.copied_state, dict.fromkeys(holders, (source,)), f"list the state of {source.name}")
        held = {rank: regions for rank, (_, regions) in copied.items()}
        num_updates = max(updates for updates, _ in copied.values())
        layout = self._layout(target, self._weights(target, trained=True))
        lacking: Mapping[int, Sequence[StateRegion]] = {
            rank: [StateRegion("main", name, region) for name, region in layout.of_rank(rank).items()]
            for rank in takers
        }
        bytes_moved = 0
        for is_last in (False, True):
            moves = state_moves(held, lacking)
            command = MoveStateCommand(source, target, version, num_updates, moves, is_last)
            arguments = dict.fromkeys(sorted({*holders, *takers}), (command,))
            found = self._call(Rank.move_state, arguments, f"restore {target.name}")
            bytes_moved += sum(report.bytes_moved for report, _ in found.values())
            lacking = {rank: regions for rank, (_, regions) in found.items()}
        reports = {rank: report for rank, (report, _) in found.items()}
        self._settle(target, version, reports, self._weights(target))
        return bytes_moved

    def _offload_built(self, instance: ModelInstance) -> None:
        """Move a new instance to host memory if the plan keeps it there."""
        for part in moved_parts(self._graph, self._plan).get(instance, ()):
            arguments = (instance, part, not is_overwritten(self._graph, self._plan, instance))
            self._call(Rank.offload, dict.fromkeys(self.run.ranks(instance), arguments), f"offload {instance.name}")

    def execute(self, node: Node) -> NodeOutcome:
        """Run a node on its ranks. Raises the ranks' errors, and StaleWeights if weights differ from their version."""
        self.rows.begin(node)
        work = node.work
        match work:
            case ModelCall():
                reports = self._run_call(node, work)
            case Compute():
                reports = self._compute(node, work)
            case Transfer():
                reports = self._transfer(node, work)
            case Reallocate():
                reports = self._reallocate(node, work)
            case Follow():
                reports = self._follow(node, work)
            case HostCopy():
                reports = self._move_between_host_and_device(node, work)
            case Checkpoint():
                reports = self.checkpointing.copy(node, work)
            case Commit():
                return self.checkpointing.commit(node)
            case Export():
                reports = self._export(node, work)
            case _:
                assert_never(work)
        return outcome_of(reports)

    def finish_step(self, step: int, oldest: int) -> None:
        """Drop data that no later node needs, after a step's last node; `oldest` is the first unfinished step."""
        self.rows.finish(step)
        self.fingerprints.forget_before(oldest - 1 - self._graph.staleness)  # the oldest version that it reads

    def _run_call(self, node: Node, work: ModelCall) -> dict[int, RankReport]:
        reports = self._send(node, work)
        if isinstance(work, Generate):
            self.rows.generated(work, node.step, reports)
        if isinstance(work, TrainStep):
            self._settle(work.instance, work.writes, reports, self._weights(work.instance, trained=True))
        return reports

    def _compute(self, node: Node, work: Compute) -> dict[int, RankReport]:
        reports = self._send(node, work)
        if work.call.chooses is not None:
            self.rows.chosen(work.call, node.step, reports)
        self.checkpointing.left(work.call, node.step, reports)
        return reports

    def _send(self, node: Node, work: ModelCall | Compute) -> dict[int, RankReport]:
        commands = call_commands(self.run, node, work, self.rows)
        arguments = {rank: (command,) for rank, command in commands.items()}
        return self._call(Rank.run_call, arguments, node.title, node.resources[0], work.call.role)

    def _transfer(self, node: Node, work: Transfer) -> dict[int, RankReport]:
        frees = self.rows.take_frees(node)
        parts: dict[int, list[RowTransfer]] = {self.run.rank(device): [] for device in node.devices}
        for transfer in self.rows.transfers(work, node.step):
            parts[transfer.source].append(transfer)
            parts[transfer.target].append(transfer)
        commands = {
            rank: (TransferCommand(node.step, tuple(transfers), frees.get(rank, ())),)
            for rank, transfers in parts.items()
            if transfers or frees.get(rank)  # other ranks get no command
        }
        return self._call(Rank.transfer, commands, node.title)

    def _reallocate(self, node: Node, work: Reallocate) -> dict[int, RankReport]:
        source, target, version = work.source, work.target, work.reads
        moved = self._weights(target, trained=True)
        layouts = self._layout(source, moved), self._layout(target, moved)
        command = MoveWeightsCommand(source, target, version, *layouts, self.run.lease.devices)
        ranks = [self.run.rank(device) for device in node.devices]
        reports = self._call(Rank.reallocate, dict.fromkeys(ranks, (command,)), node.title)
        self._settle(target, version, reports, moved)
        return reports

    def _follow(self, node: Node, work: Follow) -> dict[int, RankReport]:
        source, target, written = work.source, work.target, self._weights(work.target, trained=True)
        leader, own = self._graph.model(source.role), self._graph.model(target.role)
        layouts = self._layout(source, written), self._layout(target, written)
        move = MoveWeightsCommand(source, target, work.reads, *layouts, self.run.lease.devices)
        is_copy = work.share == 1 and leader.dtype == own.dtype
        command = FollowCommand(move, work.held, work.share, leader.dtype, is_copy)
        ranks = [self.run.rank(device) for device in node.devices]
        reports = self._call(Rank.follow, dict.fromkeys(ranks, (command,)), node.title)
        self._settle(target, work.writes, reports, written)
        return reports

    def _move_between_host_and_device(self, node: Node, work: HostCopy) -> dict[int, RankReport]:
        arguments = dict.fromkeys(self.run.ranks(work.instance), (work.instance, work.part, work.copies))
        method = Rank.offload if isinstance(work, Offload) else Rank.reload
        reports = self._call(method, arguments, node.title, node.resources[0])
        if isinstance(work, Reload) and work.part != "optimizer" and work.copies:
            self._settle(work.instance, work.reads, reports, self._weights(work.instance))
        return reports

    def _export(self, node: Node, work: Export) -> dict[int, RankReport]:
        """Write `run_dir/<role>`, see `write_trained`. The ranks write it; no data passes through the controller."""
        instance = work.instance
        tokenizer = self._graph.model(instance.role).path
        layout = self._layout(instance, self._weights(instance))
        arguments = (instance, self.run.run_dir / instance.role, tokenizer, layout, self.run.export_merged)
        return self._call(Rank.export, dict.fromkeys(self.run.ranks(instance), arguments), node.title)

    def _settle(
        self, instance: ModelInstance, version: int, reports: Mapping[int, RankReport], written: Sequence[Weights]
    ) -> None:
        """Compare newly written weights with the version's fingerprint; the first copy defines that fingerprint."""
        ranks = self.run.ranks(instance)
        digests = {
            rank: report.digest for rank, report in reports.items() if rank in ranks and report.digest is not None
        }
        self.fingerprints.settle(instance, written, version, digests, self._layout(instance, written))

    def _build(self, instance: ModelInstance, calls: Sequence[Call]) -> tuple[BuildCommand, dict[int, RankReport]]:
        """Build an instance on its ranks; return the fullest replica's command and the reports.

        Replicas differ only in how many rows they make room for: their own, as the certificate counts.
        """
        of_replica = most_rows(self._graph, self._plan, calls)
        rows = {self.run.rank(device): of_replica[at.dp] for device, at in device_coordinates(instance)}
        command = self._build_command(instance, calls, max(of_replica))
        commands = {number: replace(command, max_rows=number) for number in of_replica}
        arguments = {rank: (commands[number],) for rank, number in rows.items()}
        return command, self._call(Rank.build, arguments, f"build {instance.name}")

    def _build_command(self, instance: ModelInstance, calls: Sequence[Call], max_rows: int) -> BuildCommand:
        model = self._graph.model(instance.role)
        is_trained = instance == trained_instance(self._graph, self._plan, instance.role)
        weights = self._weights(instance)
        needs_ends = "lm" in model.head and (is_trained or any(call.kind == "generate" for call in calls))
        return BuildCommand(
            model=model if is_trained else replace(model, optimizer=None),  # a read-only copy needs no optimizer
            instance=instance,
            ranks=self.run.ranks(instance),
            layout=self._layout(instance, weights),
            restore=self.checkpointing.restore(instance) if has_state(self._graph, self._plan, instance) else None,
            max_sequence_length=self.run.max_sequence_length,
            max_rows=max_rows,
            cache_bytes=self._plan[calls[0].name].cache_bytes,
            is_offloaded=offloaded_parts(self._graph, self._plan).get(instance) == "all",
            end_tokens=response_ends(model.path, model.eos_token, model.chat_template) if needs_ends else None,
            weights=weights,
            shared=shared_weights(self._graph, self._plan).get(instance, {}),
            seed=self.run.seed,
        )

    def _weights(self, instance: ModelInstance, trained: bool = False) -> tuple[Weights, ...]:
        """Return the weights that an instance holds, or only the trained weights among them."""
        held = held_parts(self._graph.model(instance.role), instance.engine)
        every = (own for own in self._graph.weights(instance.role) if own.part in held)
        return tuple(own for own in every if own.trained or not trained)

    def _layout(self, instance: ModelInstance, weights: Sequence[Weights]) -> Layout:
        """Return the layout of some of an instance's weights."""
        key = instance, tuple(own.part for own in weights)
        if key not in self._layouts:
            self._layouts[key] = layout_of(instance, self._graph.model(instance.role), self.run.lease.mesh, key[1])
        return self._layouts[key]
