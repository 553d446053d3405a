"""The rows of the steps in flight: their numbers, lengths and ranks, and when ranks may free them.

Values that do not depend on the step are computed once per run.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from functools import cached_property

from prefect_rlhf.engines.commands import RankReport, RowTransfer
from prefect_rlhf.placement.augmented.augment import unrolled_nodes
from prefect_rlhf.placement.augmented.checkpointing import StepRange
from prefect_rlhf.placement.augmented.node import Node, subject_of
from prefect_rlhf.placement.augmented.row_uses import RowKey, row_uses, use_counts
from prefect_rlhf.placement.augmented.unroll import runs_at
from prefect_rlhf.placement.augmented.work import Generate, ModelCall, Transfer
from prefect_rlhf.placement.devices.mesh import Device
from prefect_rlhf.placement.graph import Call
from prefect_rlhf.placement.row_set import RowSet
from prefect_rlhf.placement.rows.moves import row_transfers
from prefect_rlhf.placement.rows.shares import PlacedCall, ToldByCall, knows_lengths, placed_by_row_set
from prefect_rlhf.tasks.data.rows.row_order import row_ids
from prefect_rlhf.tasks.running.training_run import TrainingRun


class StepRows:
    """Rows by step. Thread-safe. Devices are the plan's devices, ranks are the gang's ranks."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self._graph, self._plan = run.graph, run.plan
        self._row_ids: dict[int, dict[RowSet, tuple[int, ...]]] = {}
        self._told: dict[int, dict[str, tuple[int, ...]]] = {}
        self._uses_left: dict[int, Counter[tuple[Device, RowKey]]] = {}
        self._versions: dict[int, dict[str, Mapping[str, int]]] = {}
        self._uses: dict[str, Mapping[Device, frozenset[RowKey]]] = {}  # by subject, the same in every step
        self._lock = threading.Lock()

    @cached_property
    def by_row_set(self) -> Mapping[str, tuple[PlacedCall, ...]]:
        """Return each call's placement on each of its row sets, by call name."""
        return {call.name: placed_by_row_set(self._graph, self._plan, call.name) for call in self._graph}

    def row_ids(self, call: Call, step: int) -> tuple[int, ...]:
        """Return the dataset's row number for each of the call's rows at `step`.

        An evaluation call always uses the dataset's first items; other calls use the next items of the seeded order.
        """
        by_rows = self._row_ids.setdefault(step, {})
        if call.rows not in by_rows:
            dataset = next(dataset for dataset in self._graph.datasets if dataset.name == call.rows.dataset)
            num_items = call.span // call.rows.rows_per_item
            is_trained_on = call.every is None
            in_order = row_ids(step, num_items, self.run.seed, dataset.num_items) if is_trained_on else None
            items = tuple(range(num_items)) if in_order is None else in_order
            by_rows[call.rows] = call.rows.dataset_rows(items)
        return by_rows[call.rows]

    def told(self, step: int) -> ToldByCall:
        """Return the facts that calls have reported about the step's rows so far."""
        return self._told.get(step, {})

    def lengths_for(self, call: Call, step: int) -> tuple[int, ...] | None:
        """Return the length of each of the call's rows in tokens, by row number; None if no generate call has reported
        them.

        Rows in parts that were not generated yet have length 0.
        """
        return self.told(step)[call.rows.numbered.name] if knows_lengths(self._graph, call) else None

    def generated(self, work: Generate, step: int, reports: Mapping[int, RankReport]) -> None:
        """Record the row lengths that a generate call, or a part of it, reported."""
        call = work.call
        lengths = list(self.told(step).get(call.name, (0,) * call.num_rows))
        for device, need in self.by_row_set[call.name][0].needs().items():
            reported = reports[self.run.rank(device)].row_lengths
            for row, length in zip(need.share.rows(part=work.part), reported, strict=True):
                lengths[row] = length
        self._note(call, step, tuple(lengths))

    def chosen(self, call: Call, step: int, reports: Mapping[int, RankReport]) -> None:
        """Record which rows a call chose."""
        self._note(call, step, next(iter(reports.values())).chosen_rows)

    def _note(self, call: Call, step: int, told: tuple[int, ...]) -> None:
        with self._lock:
            self._told.setdefault(step, {})[call.name] = told

    def transfers(self, work: Transfer, step: int) -> tuple[RowTransfer, ...]:
        """Return the rows that a transfer moves, given the reported lengths and choices; possibly empty."""
        moves = row_transfers(self._graph, self._plan, work.call.name, work.moves, self.told(step), work.part)
        rank = self.run.rank
        return tuple(RowTransfer(rank(m.source), rank(m.target), m.producer, m.keys, m.rows) for m in moves)

    def take_frees(self, node: Node) -> dict[int, tuple[RowKey, ...]]:
        """Return the rows that each rank frees after `node`, because no other node of the step will use them on that
        rank.

        Call it when the node's commands are built. Nodes on a device run one after another in an order that the graph
        does not fix, so the last node to get its commands is the rows' last user.
        """
        frees: dict[int, tuple[RowKey, ...]] = {}
        with self._lock:
            if node.step not in self._uses_left:
                self._uses_left[node.step] = self._uses_in(node.step)
            left = self._uses_left[node.step]
            for device, keys in self._uses_of(node).items():
                for key in keys:
                    left[device, key] -= 1
                frees[self.run.rank(device)] = tuple(sorted(key for key in keys if not left[device, key]))
        return frees

    def begin(self, node: Node) -> None:
        """Record a node's weight versions before its followers request them."""
        if node.call is not None:
            self.versions(node)

    def versions(self, node: Node) -> Mapping[str, int]:
        """Return the weight version of each role that contributed to a node's rows, including the node's own role.

        Call it for the node's inputs first.
        """
        with self._lock:
            of_step = self._versions.setdefault(node.step, {})
            if node.id not in of_step:
                own = {node.work.instance.role: node.work.reads} if isinstance(node.work, ModelCall) else {}
                merged: dict[str, int] = {}
                for versions in (own, *(of_step[d.node] for d in reversed(node.dependencies) if d.kind == "data")):
                    merged.update(versions)  # for a role with several versions, the first input's version counts
                of_step[node.id] = merged
            return of_step[node.id]

    def finish(self, step: int) -> None:
        """Drop a step's rows."""
        with self._lock:
            for by_step in (self._row_ids, self._uses_left, self._told, self._versions):
                by_step.pop(step, None)

    def _uses_of(self, node: Node) -> Mapping[Device, frozenset[RowKey]]:
        subject = subject_of(node.id)
        if subject not in self._uses:
            self._uses[subject] = row_uses(self._graph, self._plan, node)
        return self._uses[subject]

    def _uses_in(self, step: int) -> Counter[tuple[Device, RowKey]]:
        """Count the nodes of a step that use each key on each device; a step may be handed out in parts."""
        counts: Counter[tuple[Device, RowKey]] = Counter()
        for call in self._graph:
            if runs_at(call, step, self.run.num_steps):
                counts += self._uses_by_call[call.name]
        return counts

    @cached_property
    def _uses_by_call(self) -> Mapping[str, Counter[tuple[Device, RowKey]]]:
        """Uses by each call and its input transfers, the same in every step; the only step of a run has all calls."""
        nodes: dict[str, list[Node]] = {call.name: [] for call in self._graph}
        for node in unrolled_nodes(self._graph, self._plan, StepRange(1), (1,)):
            if node.call is not None:
                nodes[node.call.name].append(node)
        return {name: use_counts(self._uses_of(node) for node in of_call) for name, of_call in nodes.items()}
