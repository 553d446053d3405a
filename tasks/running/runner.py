"""Runs an augmented graph: every node becomes one Prefect task run, steps grouped into subflow runs.

The next group is submitted when the last one begins its last step, so the end of a group never drains the pipeline.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import asdict
from typing import Any

from prefect import Flow, Task, get_run_logger
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from prefect_rlhf.placement.augmented.node import Node
from prefect_rlhf.placement.errors import RlhfError
from prefect_rlhf.tasks.failures import failed
from prefect_rlhf.tasks.running.device_locks import DeviceLocks
from prefect_rlhf.tasks.running.dispatch import Dispatcher
from prefect_rlhf.tasks.running.journal import Journal, TaskRunSpan
from prefect_rlhf.tasks.running.outcome import NodeOutcome
from prefect_rlhf.tasks.running.task_runner import MeshTaskRunner
from prefect_rlhf.tasks.running.training_run import TrainingRun

MAX_GROUPS_IN_FLIGHT = 2


class GraphRunner:
    """Submits nodes, keeps what happened, and stops at the first failure."""

    def __init__(self, run: TrainingRun, dispatcher: Dispatcher, journal: Journal, steps_per_group: int) -> None:
        self.run, self.dispatcher, self.journal = run, dispatcher, journal
        self._groups = [StepGroup(nodes) for nodes in run.augmented.in_groups(steps_per_group)]
        self._group_of = {node.id: group for group in self._groups for node in group.nodes}
        self._left = Counter(node.step for node in run.augmented)
        self._ended_steps: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._locks = DeviceLocks(frozenset(run.lease.devices), run.augmented)
        self._task_runner = MeshTaskRunner(run.augmented, self._locks)
        self._tasks = {
            kind: Task(
                fn=self._run_node,
                name=kind,
                task_run_name=self._title,  # type: ignore[arg-type]  # Prefect's protocol asks for its own class method
                cache_policy=NO_CACHE,
                persist_result=False,
            )
            for kind in {node.kind for node in run.augmented}
        }

    def run_all(self, on_step: Callable[[Mapping[str, float]], None]) -> None:
        """Run every node; `on_step` gets each step's metrics as the step ends. Raises a failed node's own error."""
        with ThreadPoolExecutor(MAX_GROUPS_IN_FLIGHT + 1, thread_name_prefix="groups") as threads:
            driver = threads.submit(copy_context().run, self._start_groups, threads)
            driver.add_done_callback(lambda _: self._ended_steps.put(None))
            try:
                for step in iter(self._ended_steps.get, None):  # ends: the driver does, since each call has a deadline
                    on_step(self.journal.finish_step(step))
                driver.result()
            except BaseException as error:  # a cancellation too: without a gang every call in flight ends at once
                self._fail(error)
                self.dispatcher.gang.close()
                raise
        if self._failure is not None:
            raise self._failure

    def _start_groups(self, threads: ThreadPoolExecutor) -> None:
        running: list[Future[None]] = []
        for group in self._groups:
            running.append(threads.submit(copy_context().run, self._run_group, group))
            group.submitted.wait()  # both end: a failure sets all of them
            group.at_last_step.wait()
            if self._failure is not None:
                break
        for future in running:
            future.result()

    def _run_group(self, group: StepGroup) -> None:
        flow = Flow(
            lambda: self._submit(group),
            name="rlhf-steps",
            flow_run_name=group.name,
            task_runner=self._task_runner,  # type: ignore[arg-type]  # a runner of Any is one of Any's futures
            validate_parameters=False,
        )
        try:
            state: State[Any] = flow(return_state=True)
            if not state.is_completed():
                error = state.result(raise_on_failure=False)
                self._fail(error if isinstance(error, BaseException) else RlhfError(f"{group.name}: {state.message}"))
        except Exception as error:  # noqa: BLE001  whatever ends a group ends the run, with the first error's own words
            self._fail(error)

    def _submit(self, group: StepGroup) -> State[Any] | None:
        futures = [self._tasks[node.kind].submit(node.id) for node in group.nodes]
        group.submitted.set()
        for future in futures:
            future.wait()
        if isinstance(self._failure, RlhfError):
            return failed(self._failure)
        if self._failure is not None:
            raise self._failure
        return None

    def _title(self, parameters: Mapping[str, Any]) -> str:
        return self.run.augmented.node(parameters["node"]).title

    def _run_node(self, node: str) -> State[Any] | None:
        """Do the work of a task run: the node of this id."""
        planned = self.run.augmented.node(node)
        self._group_of[node].node_began()
        lease, devices = self.run.lease, tuple(map(str, sorted(planned.devices)))
        start = time.time()
        try:
            outcome = self.dispatcher.execute(planned)
            end = time.time()
            self._locks.end(planned)  # the ranks are free; what is left is bookkeeping
        except Exception as error:
            self._fail(error)
            if isinstance(error, RlhfError):
                return failed(error)
            raise
        finally:
            get_run_logger().info("pool %s · lease %s · devices %s", lease.pool, lease.id, " ".join(devices))
        self.journal.record(_span(planned, self.run, devices, (start, end), outcome))
        self._end_node(planned)
        return None

    def _end_node(self, node: Node) -> None:
        with self._lock:
            self._left[node.step] -= 1
            ended = self._left[node.step] == 0
            if ended:
                del self._left[node.step]
        if ended:
            self.dispatcher.finish_step(node.step, oldest=min(self._left, default=node.step + 1))
            self._ended_steps.put(node.step)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
        self._locks.stop()
        for group in self._groups:
            group.give_up()


def _span(
    node: Node, run: TrainingRun, devices: tuple[str, ...], seconds: tuple[float, float], outcome: NodeOutcome
) -> TaskRunSpan:
    return TaskRunSpan(
        node=node.id,
        title=node.title,
        kind=node.kind,
        call=node.call.name if node.call else None,
        step=node.step,
        pool=run.lease.pool,
        lease=run.lease.id,
        devices=devices,
        start=seconds[0],
        end=seconds[1],
        reads=node.reads,
        writes=node.writes,
        **asdict(outcome),
    )


class StepGroup:
    """Nodes that are shown as one subflow run, and how far they are."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self.nodes = nodes
        steps = [node.step for node in nodes]
        self.name = f"step {steps[0]}" if min(steps) == max(steps) else f"steps {min(steps)}-{max(steps)}"
        self.submitted = threading.Event()  # its nodes can be waited for
        self.at_last_step = threading.Event()  # only about a step's worth of its nodes has not begun
        self._not_begun = len(nodes)
        self._last_step = steps.count(max(steps))
        self._lock = threading.Lock()

    def node_began(self) -> None:
        """Count a node that began."""
        with self._lock:
            self._not_begun -= 1
            if self._not_begun < self._last_step:
                self.at_last_step.set()

    def give_up(self) -> None:
        """Let go of whoever waits for this group."""
        self.submitted.set()
        self.at_last_step.set()
