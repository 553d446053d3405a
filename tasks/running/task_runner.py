"""The Prefect task runner that binds a task run to its devices: it starts when its inputs and devices are free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4, uuid5

from prefect.client.schemas.objects import State, TaskRunResult
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.states import Cancelled
from prefect.task_engine import run_task_sync
from prefect.task_runners import TaskRunner

from prefect_rlhf.tasks.running.device_locks import DeviceLocks

if TYPE_CHECKING:
    from prefect import Task
    from prefect.client.schemas.objects import RunInput

    from prefect_rlhf.placement.augmented.node import Node


class MeshTaskRunner(TaskRunner[PrefectConcurrentFuture[Any]]):
    """Runs tasks whose only parameter `node` is the id of a node, each in a thread after the locks grant its turn.

    Devices are acquired before a task run begins, so a task run that the UI shows as running does run. The dependencies
    of a node become inputs of its task run, which the UI draws; only the locks wait for them. Copies that Prefect makes
    for subflows share the locks.
    """

    def __init__(self, nodes: Mapping[str, Node], locks: DeviceLocks, namespace: UUID | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Prefect leaves it unannotated
        self._nodes, self._locks = nodes, locks  # nodes by id, as they are handed out
        self._namespace = namespace or uuid4()
        self._threads: ThreadPoolExecutor | None = None

    def duplicate(self) -> MeshTaskRunner:
        return type(self)(self._nodes, self._locks, self._namespace)

    def submit(
        self,
        task: Task[Any, Any],
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None = None,
        dependencies: dict[str, set[RunInput]] | None = None,
    ) -> PrefectConcurrentFuture[Any]:
        """Submit a node's task. Raises DeviceOutsideLease for a node on a device that the run does not hold."""
        if self._threads is None:
            raise RuntimeError("MeshTaskRunner.submit was called outside of its context manager")
        node = self._nodes[parameters["node"]]
        run_id = self._task_run_id(node.id)
        run = partial(
            run_task_sync,
            task=task,
            task_run_id=run_id,
            parameters=parameters,
            return_type="state",
            dependencies={"node": {TaskRunResult(id=self._task_run_id(name)) for name in node.depends_on}},
            context={},
        )
        ended: Future[State[Any]] = Future()
        begin = partial(self._begin, self._threads, partial(copy_context().run, self._run, node, run, ended), ended)
        self._locks.announce(node).add_done_callback(begin)
        return PrefectConcurrentFuture(task_run_id=run_id, wrapped_future=ended)

    def _task_run_id(self, node: str) -> UUID:
        return uuid5(self._namespace, node)

    @staticmethod
    def _begin(
        threads: ThreadPoolExecutor, run: Callable[[], None], ended: Future[State[Any]], turn: Future[None]
    ) -> None:
        if turn.cancelled():
            ended.set_result(Cancelled(message="The run ended before this node began"))
        else:
            threads.submit(run)

    def _run(self, node: Node, run: Callable[[], Any], ended: Future[State[Any]]) -> None:
        try:
            state = run()
        except BaseException as error:
            self._locks.stop()
            ended.set_exception(error)
            raise
        else:
            if not state.is_completed():  # also if Prefect never called the task's body
                self._locks.stop()
        finally:
            self._locks.end(node)  # already done by the task's body, unless it failed
        ended.set_result(state)

    def __enter__(self) -> MeshTaskRunner:
        super().__enter__()
        self._threads = ThreadPoolExecutor(4 * len(self._locks.leased) + 4, thread_name_prefix="mesh")
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
