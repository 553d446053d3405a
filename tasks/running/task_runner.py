"""The Prefect task runner that binds a task run to its devices: it starts when inputs and devices are free."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from types import TracebackType
from typing import TYPE_CHECKING, Any

from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.task_engine import run_task_sync
from prefect.task_runners import TaskRunner

from prefect_rlhf.tasks.running.device_locks import DeviceLocks

if TYPE_CHECKING:
    from prefect import Task
    from prefect.client.schemas.objects import RunInput

    from prefect_rlhf.placement.augmented.node import Node


class MeshTaskRunner(TaskRunner[PrefectConcurrentFuture[Any]]):
    """Runs tasks whose parameters hold a `node` in threads, each holding its node's devices while it runs.

    Devices are taken after the futures in `wait_for` have ended, so a task run that the UI shows as running does run.
    Copies that Prefect makes for subflows share the locks.

    Raises DeviceOutsideLease from `submit` for a node on a device that the run does not hold.
    """

    def __init__(self, locks: DeviceLocks, max_workers: int = 64) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Prefect leaves it unannotated
        self._locks = locks
        self._max_workers = max_workers
        self._threads: ThreadPoolExecutor | None = None

    def duplicate(self) -> MeshTaskRunner:
        return type(self)(self._locks, self._max_workers)

    def submit(
        self,
        task: Task[Any, Any],
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None = None,
        dependencies: dict[str, set[RunInput]] | None = None,
    ) -> PrefectConcurrentFuture[Any]:
        if self._threads is None:
            raise RuntimeError("MeshTaskRunner.submit was called outside of its context manager")
        node: Node = parameters["node"].unwrap()
        self._locks.announce(node, parameters["order"])
        run_id, upstream = uuid.uuid4(), list(wait_for or ())
        run = {
            "task": task,
            "task_run_id": run_id,
            "parameters": parameters,
            "wait_for": upstream,
            "return_type": "state",
            "dependencies": dependencies,
            "context": {},
        }
        future = self._threads.submit(copy_context().run, self._run_on_devices, node, run)
        return PrefectConcurrentFuture(task_run_id=run_id, wrapped_future=future)

    def _run_on_devices(self, node: Node, run: dict[str, Any]) -> Any:
        for future in run["wait_for"]:
            future.wait()  # ends: every task run does, each call in it has a deadline
        with self._locks.hold(node):
            return run_task_sync(**run)

    def __enter__(self) -> MeshTaskRunner:
        super().__enter__()
        self._threads = ThreadPoolExecutor(self._max_workers, thread_name_prefix="mesh")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._threads is not None:
            if error is not None:
                self._locks.forget_announced()
            self._threads.shutdown(wait=True, cancel_futures=error is not None)
            self._threads = None
        super().__exit__(kind, error, traceback)
