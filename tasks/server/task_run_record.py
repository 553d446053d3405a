"""Completes the server's record of task runs: lost events are sent again.

Task runs exist in Prefect's client, and the server receives them as events over a web socket. It confirms an event
after reading it, keeps it in memory, and writes it a moment later. A server that is killed in between loses the event,
and a server with a database that stays locked drops it after five tries. So the event of each task run's end is kept
here until the server itself reports the task run in a final state. The groups in flight bound the number of kept
events.

A server writes events in their sending order, minutes late under load. So an end counts as lost only once an event that
was sent well after it has been written. Resending events that are merely late would slow a slow server further.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from uuid import UUID, uuid4

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import TaskRunFilter, TaskRunFilterId
from prefect.client.schemas.objects import TERMINAL_STATES
from prefect.events.clients import RETRYABLE_EXCEPTIONS, PrefectEventsClient
from prefect.events.schemas.events import Event
from prefect.events.worker import EventsWorker
from prefect.exceptions import PrefectHTTPStatusError

from prefect_rlhf.tasks.server.patience import PATIENCE, RETRY_SECONDS, ServerAway, wait_for_server

PREFIX = "prefect.task-run."
FINAL = sorted(state.value for state in TERMINAL_STATES)
ASK_EVERY_SECONDS = 10.0
OUT_OF_ORDER_SECONDS = 10.0  # a server that retries may write events up to this much out of order
STILL_SECONDS = 15.0  # without a new written event, the server has lost the rest
TIMES_AGAIN = 3  # at the end of a run
STOPPED_SECONDS = 3.0  # for all of that, if a run is stopped interactively or by its worker
AT_ONCE = 200  # task runs in a single request to the server
KEPT = 10_000  # ends, of some kilobytes each; they accumulate only if the server writes more slowly than the run

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SentEvent:
    """The event of a task run's end, and when it was last sent (monotonic seconds)."""

    event: Event
    sent_at: float = field(default_factory=time.monotonic)


class TaskRunRecord:
    """The ends of task runs that the server has not confirmed as written. Thread-safe."""

    def __init__(self) -> None:
        self._sent: dict[UUID, SentEvent] = {}
        self._written_up_to = 0.0  # the time of sending of the latest written end
        self._lock = threading.Lock()

    def note(self, event: Event) -> None:
        """Keep the event if it is the end of a task run."""
        name = event.resource.id
        if event.event.startswith(PREFIX) and event.payload["validated_state"]["type"] in FINAL:
            with self._lock:
                self._sent[UUID(name.removeprefix(PREFIX))] = SentEvent(event)
                if len(self._sent) > KEPT:
                    del self._sent[next(iter(self._sent))]

    def ends(self) -> Mapping[UUID, SentEvent]:
        """Return the kept events by task run, oldest first."""
        with self._lock:
            return dict(self._sent)

    def drop(self, written: Iterable[UUID]) -> None:
        """Drop task runs whose end the server has written."""
        with self._lock:
            for id in written:
                self._sent.pop(id, None)

    def check(self, client: SyncPrefectClient) -> int:
        """Drop ends that the server has written, and resend lost ends; return the number of ends not yet written."""
        ends = self.ends()
        for ids in _parts(list(ends)):
            missing = _missing(client, ids)
            self._written_up_to = max([self._written_up_to, *(ends[id].sent_at for id in ids if id not in missing)])
            self.drop(set(ids) - missing)
        self.send_again(client, sent_before=self._written_up_to - OUT_OF_ORDER_SECONDS)
        return len(self.ends())

    def send_again(self, client: SyncPrefectClient, sent_before: float) -> None:
        """Resend the oldest events that were sent before a time (monotonic seconds)."""
        late = [sent for sent in self.ends().values() if sent.sent_at < sent_before][:AT_ONCE]
        if late:  # under new ids, because the server drops known ids; times and states stay the task run's
            copies = [sent.event.model_copy(update={"id": uuid4(), "follows": None}) for sent in late]
            client.request("POST", "/events", json=[event.model_dump(mode="json") for event in copies])
        for sent in late:
            sent.sent_at = time.monotonic()


def _parts(ids: list[UUID]) -> Iterator[list[UUID]]:
    for first in range(0, len(ids), AT_ONCE):
        yield ids[first : first + AT_ONCE]


def _missing(client: SyncPrefectClient, ids: list[UUID]) -> set[UUID]:
    """Return the task runs whose end the server does not know; if it knows all, a single count request suffices."""
    of_ids: dict[str, Any] = {"id": {"any_": [str(id) for id in ids]}}
    final = {"task_runs": {**of_ids, "state": {"type": {"any_": FINAL}}}}
    if client.request("POST", "/task_runs/count", json=final).json() == len(ids):
        return set()
    found = client.read_task_runs(task_run_filter=TaskRunFilter(id=TaskRunFilterId(any_=ids)), limit=AT_ONCE)
    return set(ids) - {run.id for run in found if run.state_type in TERMINAL_STATES}


_record = TaskRunRecord()  # of the run in progress; each run has a new record


def record_task_runs() -> None:
    """Make Prefect's events client record its events, and retry an unreachable server as long as requests do."""
    if hasattr(PrefectEventsClient._emit, "__wrapped__"):
        return  # an earlier run of this process wrapped it
    emit, reconnect = PrefectEventsClient._emit, PrefectEventsClient._reconnect

    @wraps(emit)
    async def noting_emit(self: PrefectEventsClient, event: Event) -> None:
        _record.note(event)
        with suppress(ServerAway):  # the event remains in Prefect's queue for the next connection
            await emit(self, event)

    @wraps(reconnect)
    async def patient_reconnect(self: Any) -> None:
        self.failing_since = getattr(self, "failing_since", None) or time.monotonic()
        while True:
            try:
                await reconnect(self)
            except RETRYABLE_EXCEPTIONS as error:
                PATIENCE.failed(self.failing_since, self._api_url, type(error).__name__)
            else:
                self.failing_since = None
                return
            await asyncio.sleep(RETRY_SECONDS)

    PrefectEventsClient._emit = noting_emit  # type: ignore[method-assign]
    PrefectEventsClient._reconnect = patient_reconnect  # type: ignore[method-assign]


@contextmanager
def complete_record() -> Iterator[None]:
    """Retry during server outages in the body, and return once the server has written the end of each task run.

    During the body, the server is queried every ten seconds. If it stays unreachable or does not write, a line is
    logged.
    """
    global _record
    wait_for_server()
    record_task_runs()
    _record = TaskRunRecord()  # it excludes task runs outside of this run
    with get_client(sync_client=True) as client:
        over = threading.Event()
        asking = threading.Thread(target=copy_context().run, args=(_ask, client, over), name="record", daemon=True)
        asking.start()
        seconds = math.inf
        try:
            yield
        except BaseException as error:
            seconds = math.inf if isinstance(error, Exception) else STOPPED_SECONDS
            raise
        finally:
            over.set()
            asking.join(seconds if seconds < math.inf else None)
            _settle(client, seconds)


def _ask(client: SyncPrefectClient, over: threading.Event) -> None:
    while not over.wait(ASK_EVERY_SECONDS):
        try:
            _record.check(client)
        except (ServerAway, PrefectHTTPStatusError) as error:
            _log.debug("the server was not queried for its task runs: %s", error)


def _settle(client: SyncPrefectClient, seconds: float) -> None:
    """Wait at most `seconds` until the server has written the end of each started task run."""
    deadline = time.monotonic() + seconds
    try:
        client.request("GET", "/health")  # waits for an unreachable server
        _wait_until_sent(min(seconds, PATIENCE.seconds))
        left = _wait_until_written(client, deadline)
    except (ServerAway, PrefectHTTPStatusError) as error:
        _log.warning("task runs that ended may be shown as running: %s", error)
        return
    if left:
        _log.warning("the server did not write the end of %d task runs", left)


def _wait_until_sent(seconds: float) -> None:
    """Wait until emitted events are on the wire; Prefect's own wait has no limit."""
    worker = EventsWorker.instance()
    waiting = threading.Thread(target=worker.wait_until_empty, name="events", daemon=True)
    waiting.start()
    waiting.join(seconds)


def _wait_until_written(client: SyncPrefectClient, deadline: float) -> int:
    """Wait while the server continues to write; if it has stopped, resend the rest, a few times."""
    left, times = -1, 0
    still_since = time.monotonic()
    while now_left := _record.check(client):
        now = time.monotonic()
        if now_left != left:
            left, still_since = now_left, now
        elif now - still_since > STILL_SECONDS:
            if times == TIMES_AGAIN:
                break
            _record.send_again(client, sent_before=now)
            times, still_since = times + 1, now
        if now > deadline:
            break
        time.sleep(0.1)
    return now_left
