"""Runs an augmented graph: every node becomes a Prefect task run, and groups of steps are subflow runs.

The next group is submitted when the previous group begins its last step, so the pipeline never drains between groups.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import Any

from prefect import Flow, Task, get_run_logger
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled

from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.placement.augmented.node import BEHIND, Node
from prefect_rlhf.placement.augmented.step_groups import StepGroups
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.plans.switch import moving_roles
from prefect_rlhf.tasks.run_log import run_log
from prefect_rlhf.tasks.running.device_locks import DeviceLocks
from prefect_rlhf.tasks.running.dispatch import Dispatcher
from prefect_rlhf.tasks.running.journal import Journal, TaskRunSpan, measured_on
from prefect_rlhf.tasks.running.outcome import NodeOutcome
from prefect_rlhf.tasks.running.steps.step_ledger import StepLedger
from prefect_rlhf.tasks.running.stop_request import STOP_POLL_SECONDS, StopRequest
from prefect_rlhf.tasks.running.switch.requests import Switches
from prefect_rlhf.tasks.running.task_runner import MeshTaskRunner
from prefect_rlhf.tasks.running.training_run import TrainingRun
from prefect_rlhf.tasks.server.failures import failed, failed_task_run, say_nothing_of_cancelled_runs
from prefect_rlhf.tasks.server.patience import hurry

MAX_GROUPS_IN_FLIGHT = 2
STOPPED = "The run was stopped"  # in the states of groups and nodes that ended without their own failure
NEVER_BEGAN = "Never began"  # the state of a group whose steps were handed out before the run ended


class GraphRunner:
    """Submits nodes, records their outcomes, and stops at the first failure, or early and cleanly on request."""

    def __init__(
        self,
        run: TrainingRun,
        dispatcher: Dispatcher,
        journal: Journal,
        groups: StepGroups,
        stop: StopRequest,
        switches: Switches | None = None,
    ) -> None:
        """Run the `groups`. If a check asks for one of the `switches`, they end early, as for a stop."""
        self.run, self.dispatcher, self.journal = run, dispatcher, journal
        self._groups, self._stop, self._switches = groups, stop, switches or Switches()
        self._in_flight: list[GroupRun] = []
        self._nodes: dict[str, Node] = {}  # of the groups in flight
        self._ledger = StepLedger()
        self._ended_steps: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._is_stopped = False  # interactively, at once: later ends are not failures
        self._lock = threading.Lock()
        self._locks = DeviceLocks(frozenset(run.lease.devices))
        self._task_runner = MeshTaskRunner(self._nodes, self._locks, self._work)
        self._tasks: dict[str, Task[[str], Any]] = {}

    def run_all(self, on_step: Callable[[Mapping[str, float]], None]) -> int | None:
        """Run every node; `on_step` gets each step's metrics when the step ends. Raises a failed node's own error.

        Returns None, or the number of finished steps if a request stopped the run early.
        """
        # Threads: the driver hands out groups, a second thread writes finished steps, each group in flight runs its
        # subflow in its own thread, and the spare thread is for a group with a commit left. This thread only waits,
        # because signals are delivered to the main thread and may interrupt it anywhere.
        with ThreadPoolExecutor(MAX_GROUPS_IN_FLIGHT + 3, thread_name_prefix="groups") as threads:
            driver = threads.submit(copy_context().run, self._start_groups, threads)
            driver.add_done_callback(lambda _: self._ended_steps.put(None))
            steps = threads.submit(copy_context().run, self._finish_steps, on_step)
            try:
                self._wait_for({driver, steps})  # both end, because each call has a deadline
                steps.result()
                driver.result()
            except BaseException as error:  # also a cancellation
                if not isinstance(error, Exception):
                    self._is_stopped = True
                    say_nothing_of_cancelled_runs()
                # The end of this `with` waits for all threads, and some of them wait for ranks until a deadline of up
                # to hours. Without a gang their calls fail at once, so a cancelled run ends within seconds.
                self._fail(error)
                self.dispatcher.gang.close()
                if self._is_stopped:
                    hurry()  # a person who stops a run need not wait for an absent server
                # The end of `with` closes the pool first. A group that the driver has just handed out could not start
                # then, and nobody would take it back.
                wait({driver})
                raise
        if self._failure is not None:
            raise self._failure
        return self._groups.stopped_after

    def _finish_steps(self, on_step: Callable[[Mapping[str, float]], None]) -> None:
        """Record each step as it ends, in a separate thread, because signals interrupt the waiting thread."""
        for step in iter(self._ended_steps.get, None):
            on_step(self.journal.finish_step(step))

    def _wait_for(self, threads: Set[Future[None]]) -> None:
        """Wait until both threads have ended or one has failed, and check for a request to stop, also before this."""
        while not _are_over(threads):
            if self._stop and self._ledger.last_step is None:
                self._stop_early()
            elif self._switches.asked is not None and self._ledger.last_step is None:
                self._switch_early(self._switches.asked)
            try:
                wait(threads, STOP_POLL_SECONDS, FIRST_EXCEPTION)
            except TerminationSignal as termination:
                self._stop.take_notice(termination)

    def _stop_early(self) -> None:
        """End the steps that have a started node; a checkpoint follows, and no node of a later step begins."""
        # The locks are held until the later steps are gone: otherwise a node of a later step could begin between the
        # choice of the last step and the end of this method. The driver may hand out a group meanwhile: the ledger
        # either drops the counts of its later nodes here, or knows the last step when it counts the group.
        last = self._groups.stop(self._locks.hold())
        if self._groups.stopped_after is not None and last > self.run.finished:
            run_log().info("%s: step %d is the last step; a checkpoint follows", self._stop, last)
        elif self._groups.stopped_after is not None:
            run_log().info("%s: no other step begins", self._stop)
        self._end_after(last)

    def _switch_early(self, plan: ExecutionPlan) -> None:
        """Leave the plan after the steps that have a started node; the run continues under the next plan."""
        last = self._groups.switch(self._locks.hold(), moving_roles(self.run.graph, self.run.plan, plan))
        if last is None:
            self._switches.ask(None)  # too few steps are left
            self._locks.go_on_to(self.run.num_steps)
        else:
            self._end_after(last)

    def _end_after(self, last: int) -> None:
        with self._lock:
            self._ledger.stop_after(last)
            for group in self._in_flight:  # a group that is being submitted is submitted whole before the next group
                group.at_last_step.set()
        self._locks.go_on_to(last)

    def _start_groups(self, threads: ThreadPoolExecutor) -> None:
        in_flight: deque[GroupRun] = deque()
        running: list[Future[None]] = []
        with self._stop.not_to_interrupt():
            while self._failure is None and (group := self._hand_out()):
                in_flight.append(group)
                running = [future for future in running if not future.done()]  # also a group with a commit left
                running.append(threads.submit(copy_context().run, self._run_group, group))
                # DeviceLocks regards an unannounced dependency as ended, so this group is submitted whole before the
                # next group. The next group is made when about a step of this group's nodes has not begun: later,
                # devices would idle; earlier, a stop would void more task runs. Each wait ends, because the end of the
                # group's thread, for any reason, sets all events.
                group.submitted.wait()
                group.at_last_step.wait()
                while len(in_flight) >= MAX_GROUPS_IN_FLIGHT:
                    in_flight.popleft().over.wait()
            for future in running:
                future.result()

    def _hand_out(self) -> GroupRun | None:
        """Return the next group of nodes and register them; None if no group is left."""
        # `next_group` and the counts change in one critical section. Between them, `_end_whole_steps` would find a step
        # that was handed out whole and has no node left, although its last nodes have not begun.
        with self._lock:
            nodes = self._groups.next_group()
            self._ledger.hand_out(nodes)
            if nodes:
                group = GroupRun(nodes)
                self._in_flight.append(group)
                self._nodes.update((node.id, node) for node in nodes)
                for kind in {node.kind for node in nodes} - self._tasks.keys():
                    self._tasks[kind] = self._task(kind)
        # After a stop, the nodes that a step still lacked may not exist any more. Then this group completes the step
        # without adding a node to it, and no end of a node would notice.
        self._end_whole_steps()
        return group if nodes else None

    def _task(self, kind: str) -> Task[[str], Any]:
        return Task(
            fn=self._run_node,
            name=kind,
            cache_policy=NO_CACHE,
            persist_result=False,
        )

    def _run_group(self, group: GroupRun) -> None:
        if self._failure is not None:  # since the group was handed out
            self._take_back(group)
            return
        flow = Flow(
            lambda: self._submit(group),
            name="rlhf-steps",
            flow_run_name=group.name,
            task_runner=self._task_runner,  # type: ignore[arg-type]  # a runner of Any is one of Any's futures
            validate_parameters=False,
        )
        try:
            state: State[Any] = flow(return_state=True)
            if not state.is_completed() and not group.never_began:
                self._fail(_error_of(state, group.name))
        except BaseException as error:  # noqa: BLE001  any error of a group ends the run, with the first error's message
            self._fail(error)
        finally:
            self._take_back(group)

    def _take_back(self, group: GroupRun) -> None:
        group.let_go()
        group.over.set()
        with self._lock:
            self._in_flight.remove(group)
            for node in group.nodes:
                if self._nodes.get(node.id) is node:  # otherwise it was void and handed out again
                    del self._nodes[node.id]

    def _submit(self, group: GroupRun) -> State[Any] | None:
        futures = [self._tasks[node.kind].submit(node.id) for node in group.nodes]
        group.submitted.set()
        for node, future in zip(group.nodes, futures, strict=True):
            future.wait()
            if future.state.is_failed() or future.state.is_crashed():  # also if Prefect never called our function
                self._fail(_error_of(future.state, node.title))
        if group.never_began:
            return Cancelled(name=NEVER_BEGAN, message=f"The run ended before {group.name}")
        if self._is_stopped:
            return Cancelled(message=STOPPED)
        if isinstance(self._failure, RlhfError):
            return failed(self._failure)
        if self._failure is not None:
            raise self._failure
        return None

    def _work(self, node: Node) -> tuple[float, float, NodeOutcome]:
        """Execute a node; return when it started and ended (Unix seconds), and its outcome."""
        try:
            self._note_begun(node)
            start = time.time()
            outcome = self.dispatcher.execute(node)
            end = time.time()
        except BaseException as error:
            self._fail(error)
            raise
        # The ranks are free, so the devices are too: the journal writes to disk, and the next node on these devices
        # must not wait for that, nor for the task run.
        self._locks.end(node)
        return start, end, outcome

    def _run_node(self, node: str) -> State[Any] | None:
        """Record the work of the node with this id: the body of its task run."""
        planned = self._nodes[node]
        lease, devices = self.run.lease, sorted(planned.devices)
        try:
            shown = " ".join(map(str, devices))
            get_run_logger().info("pool %s · lease %s · devices %s", lease.pool, lease.id, shown)
            start, end, outcome = self._task_runner.result_of(node)
            # The step ends only after the journal has the span, which `finish_step` reads.
            self.journal.record(_span(planned, measured_on(lease, devices, (start, end), outcome)))
            self._end_node(planned)
        except BaseException as error:
            self._fail(error)
            if self._is_stopped:
                return Cancelled(message=STOPPED)
            if isinstance(error, RlhfError):
                return failed_task_run(error)
            raise
        return None

    def _note_begun(self, node: Node) -> None:
        with self._lock:
            for group in self._in_flight:
                group.node_began(node)

    def _end_node(self, node: Node) -> None:
        """Record the end of a node, and of its group and step; only the end of a group waits for a commit."""
        if node.kind in BEHIND:
            return
        with self._lock:
            for group in self._in_flight:
                group.node_ended(node)
            self._ledger.end(node)
        self._end_whole_steps()

    def _end_whole_steps(self) -> None:
        """End the steps whose nodes were all handed out and have ended."""
        with self._lock:
            ended = self._ledger.take_ended(self._groups.first_unfinished)
        # Outside of the lock, because the thread of a node that ends must not wait for this work. The ledger returned
        # each step once, so no other thread ends the same step again.
        for step in ended.steps:
            self.dispatcher.finish_step(step, oldest=ended.oldest)
            if step not in ended.again:
                self._ended_steps.put(step)

    def _fail(self, error: BaseException) -> None:
        """Fail the run with the first error's own message.

        An error that is not an Exception is wrapped, because it could end more than this run.
        """
        # The failure is stored before the locks stop. `stop` cancels turns, which wakes the threads of groups. They
        # decide by `_failure` whether their subflow runs failed.
        with self._lock:
            ours = error if isinstance(error, Exception) else RlhfError(f"{type(error).__name__}: {error}")
            self._failure = self._failure or ours
        self._locks.stop()
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            for group in self._in_flight:
                group.let_go()


def _are_over(threads: Set[Future[None]]) -> bool:
    """Whether all threads have ended, or one with an error."""
    ended = [thread for thread in threads if thread.done()]
    return len(ended) == len(threads) or any(thread.exception() is not None for thread in ended)


def _error_of(state: State[Any], subject: str) -> BaseException:
    """Return the error that ended a task run or subflow run, or an RlhfError with its state's message."""
    error = state.result(raise_on_failure=False)
    return error if isinstance(error, BaseException) else RlhfError(f"{subject}: {state.name}: {state.message}")


def _span(node: Node, measured: Mapping[str, Any]) -> TaskRunSpan:
    return TaskRunSpan(
        node=node.id,
        title=node.title,
        kind=node.kind,
        call=node.call.name if node.call else None,
        step=node.step,
        reads=node.reads,
        writes=node.writes,
        depends_on=node.depends_on,
        **measured,
    )


class GroupRun:
    """The nodes that the UI shows as one subflow run, and their progress."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self.nodes = nodes
        steps = [node.step for node in nodes]
        self.name = f"step {steps[0]}" if min(steps) == max(steps) else f"steps {min(steps)}-{max(steps)}"
        self.submitted = threading.Event()  # all its nodes have been submitted
        self.at_last_step = threading.Event()  # at most about a step's nodes have not begun
        self.over = threading.Event()  # all nodes have ended, except nodes that run behind later steps
        self._not_begun = {node.id for node in nodes}
        self._not_ended = {node.id for node in nodes if node.kind not in BEHIND}
        self._last_step = steps.count(max(steps))

    @property
    def never_began(self) -> bool:
        """Whether no node has begun. The UI shows a group as soon as its nodes are handed out."""
        return len(self._not_begun) == len(self.nodes)

    def node_began(self, node: Node) -> None:
        """Count a started node if it belongs to this group."""
        self._not_begun.discard(node.id)
        if len(self._not_begun) < self._last_step:
            self.at_last_step.set()

    def node_ended(self, node: Node) -> None:
        """Count an ended node if it belongs to this group."""
        self._not_ended.discard(node.id)
        if not self._not_ended:
            self.over.set()

    def let_go(self) -> None:
        """Release all threads that wait for this group's nodes to begin."""
        self.submitted.set()
        self.at_last_step.set()
