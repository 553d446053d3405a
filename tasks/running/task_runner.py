"""The Prefect task runner that binds task runs to devices: a task run starts when its inputs and devices are free.

A node's work starts first, in a thread of its own, and its task run follows, so devices do not wait for Prefect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4, uuid5

from prefect.client.schemas.objects import State, StateDetails, TaskRun, TaskRunResult
from prefect.context import FlowRunContext, TagsContext
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.states import Cancelled, Pending
from prefect.task_engine import run_task_sync
from prefect.task_runners import TaskRunner

from prefect_rlhf.tasks.running.device_locks import DeviceLocks

if TYPE_CHECKING:
    from prefect import Task
    from prefect.client.schemas.objects import RunInput

    from prefect_rlhf.placement.augmented.node import Node

THREADS_OF_A_DEVICE = 8  # a node on each resource and its successor, with a thread for the work and for the task run


class MeshTaskRunner(TaskRunner[PrefectConcurrentFuture[Any]]):
    """Runs tasks with a single parameter `node`, a node's id, each in a thread once the locks grant its turn.

    Devices are acquired before a task run begins, so a task run that the UI shows as running really runs. The node's
    `work` begins at that moment; the task gets its result from `result_of`. A node's dependencies become its task run's
    inputs, which the UI draws, but only the locks wait for them. Copies that Prefect makes for subflows share all of
    this.
    """

    def __init__(self, nodes: Mapping[str, Node], locks: DeviceLocks, work: Callable[[Node], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Prefect leaves it unannotated
        self._nodes, self._locks, self._work = nodes, locks, work  # nodes by id, as they are handed out
        self._begun: dict[str, Future[Any]] = {}  # the work of nodes, by id
        self._namespace = uuid4()
        self._threads: ThreadPoolExecutor | None = None

    def duplicate(self) -> MeshTaskRunner:
        copied = type(self)(self._nodes, self._locks, self._work)
        copied._begun, copied._namespace = self._begun, self._namespace
        return copied

    def result_of(self, node: str) -> Any:
        """Wait for a begun node's work and return its result. Raises the work's error."""
        return self._begun[node].result()

    def submit(
        self,
        task: Task[Any, Any],
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None = None,
        dependencies: dict[str, set[RunInput]] | None = None,
    ) -> PrefectConcurrentFuture[Any]:
        """Submit a node's task. Raises DeviceOutsideLease for a node on a device that the run does not hold."""
        if (threads := self._threads) is None:
            raise RuntimeError("MeshTaskRunner.submit was called outside of its context manager")
        node = self._nodes[parameters["node"]]
        run_id = self._task_run_id(node.id)
        run = partial(self._run, task, parameters, node)
        ended: Future[State[Any]] = Future()
        work_context, run_context = copy_context(), copy_context()  # a thread each

        def begin(turn: Future[None]) -> None:
            if turn.cancelled():
                ended.set_result(Cancelled(message="The run ended before this node began"))
                return
            self._begun[node.id] = threads.submit(work_context.run, self._work, node)
            threads.submit(run_context.run, run, ended)

        self._locks.announce(node).add_done_callback(begin)
        return PrefectConcurrentFuture(task_run_id=run_id, wrapped_future=ended)

    def _task_run_id(self, node: str) -> UUID:
        return uuid5(self._namespace, node)

    def _run(self, task: Task[Any, Any], parameters: dict[str, Any], node: Node, ended: Future[State[Any]]) -> None:
        try:
            task_run = self._task_run(task, node)
            state = run_task_sync(task, task_run=task_run, parameters=parameters, return_type="state", context={})
            assert isinstance(state, State)  # the type that was asked for
        except BaseException as error:
            self._locks.stop()
            ended.set_exception(error)
            raise
        else:
            if not state.is_completed():  # also if Prefect never called the task's body
                self._locks.stop()
        finally:
            wait({self._begun[node.id]})  # it ends, because each call has a deadline
            del self._begun[node.id]
            self._locks.end(node)  # already done by the work, unless it failed
        ended.set_result(state)

    def _task_run(self, task: Task[Any, Any], node: Node) -> TaskRun:
        """Return the task run of a node that begins now. Prefect's own would send another event."""
        flow_run = FlowRunContext.get()
        assert flow_run is not None and flow_run.flow_run is not None  # tasks are submitted by a group's subflow
        run_id, flow_run_id = self._task_run_id(node.id), flow_run.flow_run.id
        state: State[Any] = Pending(state_details=StateDetails(task_run_id=run_id, flow_run_id=flow_run_id))
        return TaskRun(
            id=run_id,
            name=node.title,
            flow_run_id=flow_run_id,
            task_key=task.task_key,
            dynamic_key=str(run_id),
            task_version=task.version,
            tags=sorted(task.tags | TagsContext.get().current_tags),
            task_inputs={"node": [TaskRunResult(id=self._task_run_id(name)) for name in node.depends_on]},
            expected_start_time=state.timestamp,
            state_id=state.id,
            state_type=state.type,
            state_name=state.name,
            state=state,
        )

    def __enter__(self) -> MeshTaskRunner:
        super().__enter__()
        self._threads = ThreadPoolExecutor(THREADS_OF_A_DEVICE * len(self._locks.leased) + 8, thread_name_prefix="mesh")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._threads is not None:
            if error is not None:
                self._locks.stop()
            self._threads.shutdown(wait=True)
            self._threads = None
        super().__exit__(kind, error, traceback)
