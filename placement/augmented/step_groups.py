"""Groups of steps, made when the run reaches them: a long run starts as fast as a short run.

A group is cut out of a window: the steps of the previous group, its own steps, and some steps on either side. A node of
step s depends only on steps within `REACH` + staleness of s: a version is read and then overwritten, after its last
reader, within this range. Two effects reach further back. An evaluation every k steps starts with copies of the weights
as its previous run left them, and a checkpoint waits until its predecessor is on disk. So the steps of these nodes are
unrolled too, without the steps between. Other distant nodes need not wait for each other: at most two groups are in
flight, so all older groups have ended, except for files that are still being written.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, replace

import networkx as nx

from prefect_rlhf.placement.augmented.augment import unrolled_nodes
from prefect_rlhf.placement.augmented.checkpointing import StepRange
from prefect_rlhf.placement.augmented.node import BEHIND, Node
from prefect_rlhf.placement.augmented.unroll import latest_run
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan

REACH = 2  # steps, beyond the staleness


@dataclass(frozen=True, slots=True)
class PlanEnd:
    """The next plan's first step, and the roles with training state that then moves through host memory."""

    step: int
    moving: frozenset[str]


class StepGroups:
    """Hands out a run's nodes, in groups of `steps_per_group` steps. Thread-safe.

    A node joins a later group than its step's if it waits for a node of a later step. With staleness, for example, a
    train_step waits for the readers of the weights that it overwrites. The groups together are the whole graph in a
    valid order; within a group the order is that of the whole graph. A node names its dependencies in its own group and
    in the previous group. Older groups have ended, so there it names only nodes with rows that it reads, and nodes that
    may still be writing to disk.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        plan: ExecutionPlan,
        num_steps: int,
        steps_per_group: int,
        finished: int = 0,
        checkpoint_every: int | None = None,
        exports: bool = True,
        ends: PlanEnd | None = None,
        is_saved: bool = True,
    ) -> None:
        """Begin after `finished` steps; see `augment`. Without `exports`, the last step ends the run.

        The run leaves its plan where `ends` says, for another. Unless the state at its beginning `is_saved`, an early
        stop comes after the next step at the earliest.
        """
        self.graph, self.plan = graph, plan
        self._steps = StepRange(num_steps, finished, checkpoint_every, exports=exports)
        if ends is not None:
            self._steps = replace(self._steps, stopped=ends.step - 1, moving=ends.moving)
        first_step = self._steps.all().start
        self._is_saved = is_saved
        self._steps_per_group = steps_per_group
        self._next = first_step  # the first step without handed-out nodes
        self._unfinished = first_step  # the first step with nodes left to hand out
        self._handed_out: dict[int, dict[str, Node]] = defaultdict(dict)  # by step, of those in flight
        self._previous = range(first_step, first_step), frozenset[str]()  # group: its steps and its nodes
        self._stopped_after: int | None = None
        self._is_over = False  # whether `next_group` has reported the end
        self._lock = threading.Lock()

    @property
    def stopped_after(self) -> int | None:
        """The step after which a stopped run ends with a checkpoint; None while it continues to its end."""
        return None if self._stopped_after is None else max(0, self._stopped_after)

    @property
    def first_unfinished(self) -> int:
        """The first step with nodes left; earlier steps were handed out completely."""
        return self._unfinished

    @property
    def switches(self) -> bool:
        """Whether the run leaves its plan for another at `end`."""
        return self._steps.moving is not None

    def switch(self, begun: int, moving: frozenset[str]) -> int | None:
        """Leave the plan as early as `stop` would end the run; return the last step under it, or None if the plan
        stays.

        The training states of the `moving` roles are then in host memory. With staleness, the last step precedes a
        regular checkpoint.
        """
        with self._lock:
            steps = self._steps
            if self._is_over or self._stopped_after is not None or steps.stopped is not None:
                return None
            for last in range(max(begun, steps.finished + 1), steps.num_steps):
                shorter = replace(steps, stopped=last, moving=moving)
                if shorter.can_switch(last, self.graph.staleness) and self._is_part_of(shorter):
                    self._end_with(shorter, last)
                    return last
            return None

    def stop(self, begun: int) -> int:
        """End the run early, and return its last step; `begun` is the latest step with a node that has begun.

        Nodes of later steps that were handed out are void: the caller ensures that they never begin, and that other
        nodes wait for their predecessors instead. The next groups contain the remaining steps up to the last step and a
        checkpoint after it, without exports. The last step is `begun`, or the next possible step. With staleness, a
        checkpoint between two regular checkpoints would change the weights that later steps read. So if
        `checkpoint_every` is set, the last step precedes a regular checkpoint. The nodes handed out must also be right
        for a shorter run: if weights leave the devices only after a later step has read them, that step runs too. If no
        other step is left, or `next_group` has reported the end, the run continues to its end, with exports, and
        `num_steps` is returned. If the plan ends with a switch, the run continues to the switch, and the last step
        before it is returned.
        """
        with self._lock:
            if self._stopped_after is not None:
                return self._stopped_after
            steps, end = self._steps, self.end
            if self._is_over:
                return end
            for last in range(max(begun, steps.all().start - self._is_saved), end + (steps.moving is not None)):
                shorter = replace(steps, stopped=last, moving=None)
                is_drained = last <= steps.finished or shorter.is_drained(last, self.graph.staleness)
                if is_drained and self._is_part_of(shorter):
                    self._end_with(shorter, last)
                    self._stopped_after = last
                    return last
            return end

    @property
    def end(self) -> int:
        """The last step under this plan: before a switch, or of the run."""
        steps = self._steps
        return steps.num_steps if steps.moving is None or steps.stopped is None else steps.stopped

    def _is_part_of(self, shorter: StepRange) -> bool:
        """Whether the nodes handed out are part of the shorter run's graph, and wait for all that they wait for there.

        They may wait for it through other nodes, also through nodes of later steps (see `DeviceLocks.go_on_to`).
        """
        end, begin = shorter.all().stop, min(self._handed_out, default=self._next)
        window = unrolled_nodes(self.graph, self.plan, shorter, self._window(range(begin, end), shorter))
        awaited = {node.id: set(node.depends_on) for node in window}
        old = {node.id for node in window if node.step < begin}  # they ended, so later nodes need not wait for them
        handed_out = [node for nodes in self._handed_out.values() for node in nodes.values()]
        void = {node.id for node in handed_out if node.step >= end}  # an offload among them may be handed out again
        waits = nx.DiGraph((before, node.id) for node in handed_out for before in node.depends_on)
        waits.add_nodes_from(node.id for node in handed_out)
        return all(
            node.id in awaited and awaited[node.id] - old <= nx.ancestors(waits, node.id) - void
            for node in handed_out
            if node.step < end
        )

    def _end_with(self, shorter: StepRange, last: int) -> None:
        self._steps = shorter
        self._next = min(self._next, last + 1)
        self._unfinished = min(self._handed_out, default=self._next)  # an offload may now belong to an earlier step
        for step in [step for step in self._handed_out if step > last]:
            del self._handed_out[step]

    def next_group(self) -> tuple[Node, ...]:
        """Return the next nodes, each after its dependencies; an empty tuple after the last group.

        Raises GraphError if nodes wait for each other.
        """
        with self._lock:
            end = self._steps.all().stop
            while self._next < end or self._unfinished < self._next:
                last = max(1, self._next) + self._steps_per_group  # step 0 joins the first steps
                if group := self._cut(range(self._next, min(last, end))):
                    return group
            self._is_over = True
            return ()

    def _cut(self, steps: range) -> tuple[Node, ...]:
        """Cut out the nodes of these steps and of earlier steps that depend on no later step.

        Expects steps that follow the previous group's.
        """
        # The window starts with the previous group, not with this one: a node of an earlier step may join this group
        # because it waited for a step that was not unrolled then, and it must meet its neighbours in the same order as
        # in the whole graph.
        begin = min(self._previous[0].start, self._unfinished)
        window = unrolled_nodes(self.graph, self.plan, self._steps, self._window(range(begin, steps.stop), self._steps))
        later: set[str] = set()
        nodes: list[Node] = []
        for node in window:
            if node.step < self._unfinished or node.id in self._handed_out.get(node.step, ()):
                continue
            # `window` is in topological order, so one pass suffices: a node is postponed if it belongs to a later step
            # or depends on a postponed node. A node that is postponed today is handed out with the group that holds its
            # last dependency.
            if node.step >= steps.stop or not later.isdisjoint(node.depends_on):
                later.add(node.id)
            else:
                nodes.append(node)
        self._note(steps, nodes, {node.step for node in window if node.id in later})
        ids = frozenset(node.id for node in nodes)
        # The runner keeps two groups in flight. Nodes of older groups have ended, so a dependency on them only costs
        # time and names a node that the runner has forgotten. Data dependencies stay, because they name the rows'
        # producers; commits stay, because they may still be writing.
        known = ids.union(self._previous[1], (node.id for node in window if node.kind in BEHIND))
        self._previous = steps, ids
        return tuple(_waiting_only_for(known, node) for node in nodes)

    def _window(self, steps: range, run: StepRange) -> list[int]:
        """Return the steps of the run to unroll, so that the nodes of these steps equal the whole graph's."""
        reach = self.graph.staleness + REACH
        every = run.all()
        begin = max(every.start, steps.start - reach)
        earlier = {latest_run(call, begin - 1) for call in self.graph if call.every is not None}
        if run.every is not None:
            earlier.add((begin - 1) // run.every * run.every)  # the last that a checkpoint follows
        before = sorted(step for step in earlier if every.start <= step < begin)
        return [*before, *range(begin, min(every.stop, steps.stop + reach))]

    def _note(self, steps: range, nodes: list[Node], incomplete: set[int]) -> None:
        """Remember the nodes handed out, for each step with nodes left."""
        for node in nodes:
            self._handed_out[node.step][node.id] = node
        self._next = steps.stop
        self._unfinished = min((step for step in incomplete if step < steps.stop), default=steps.stop)
        latest_ended = self._previous[0].start - 1  # since two groups are in flight
        kept = min(self._unfinished, latest_ended) - self.graph.staleness
        for step in [step for step in self._handed_out if step < kept]:
            del self._handed_out[step]


def _waiting_only_for(known: frozenset[str], node: Node) -> Node:
    kept = tuple(d for d in node.dependencies if d.node in known or d.kind == "data")
    return node if kept == node.dependencies else replace(node, dependencies=kept)
