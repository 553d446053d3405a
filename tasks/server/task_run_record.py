"""The server's record of task runs, made complete: what it lost is sent again.

Prefect's task runs are the client's; the server learns of them by events on a web socket. It confirms an event once it
has read it, keeps it in memory, and writes it a moment later: a server that is killed in between has lost it, and one
whose database stays locked drops it after five tries. So the event of each task run's end is kept here until the
server itself says that the task run is in a final state. What is kept is bounded by the groups in flight.

A server writes what it was sent in that order, minutes late where it has much to do: so an end is lost only where one
that was sent well after it is written. To send again what is merely late would make a slow server slower.
"""

from __future__ import annotations

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
OUT_OF_ORDER_SECONDS = 10.0  # by which a server that tries again may write in another order
STILL_SECONDS = 15.0  # in which a server that has nothing later to write writes something, or has lost it
TIMES_AGAIN = 3  # at the end of a run
STOPPED_SECONDS = 3.0  # for all of that, where a run is stopped by hand or by its worker
AT_ONCE = 200  # task runs that the server gives for one question
KEPT = 10_000  # ends, of some kilobytes each; only a server that writes less than a run makes lets them add up

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SentEvent:
    """The event of a task run's end, and when it was last sent (monotonic seconds)."""

    event: Event
    sent_at: float = field(default_factory=time.monotonic)


class TaskRunRecord:
    """The ends of task runs that the server is not known to have written; safe to use from many threads."""

    def __init__(self) -> None:
        self._sent: dict[UUID, SentEvent] = {}
        self._written_up_to = 0.0  # when the latest that is written was sent
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
        """Return what is kept, by task run, oldest first."""
        with self._lock:
            return dict(self._sent)

    def drop(self, written: Iterable[UUID]) -> None:
        """Let go of task runs whose end the server has written."""
        with self._lock:
            for id in written:
                self._sent.pop(id, None)

    def check(self, client: SyncPrefectClient) -> int:
        """Let go of what the server has written, send again what it has lost; return how many it has not written."""
        ends = self.ends()
        for ids in _parts(list(ends)):
            missing = _missing(client, ids)
            self._written_up_to = max([self._written_up_to, *(ends[id].sent_at for id in ids if id not in missing)])
            self.drop(set(ids) - missing)
        self.send_again(client, sent_before=self._written_up_to - OUT_OF_ORDER_SECONDS)
        return len(self.ends())

    def send_again(self, client: SyncPrefectClient, sent_before: float) -> None:
        """Send again the oldest of what was sent before a moment (monotonic seconds)."""
        late = [sent for sent in self.ends().values() if sent.sent_at < sent_before][:AT_ONCE]
        if late:
            _send_again(client, [sent.event for sent in late])
        for sent in late:
            sent.sent_at = time.monotonic()


def _parts(ids: list[UUID]) -> Iterator[list[UUID]]:
    for first in range(0, len(ids), AT_ONCE):
        yield ids[first : first + AT_ONCE]


def _missing(client: SyncPrefectClient, ids: list[UUID]) -> set[UUID]:
    """Return those of whose end the server does not know; where it knows all, that is one number's cost."""
    of_ids: dict[str, Any] = {"id": {"any_": [str(id) for id in ids]}}
    final = {"task_runs": {**of_ids, "state": {"type": {"any_": FINAL}}}}
    if client.request("POST", "/task_runs/count", json=final).json() == len(ids):
        return set()
    found = client.read_task_runs(task_run_filter=TaskRunFilter(id=TaskRunFilterId(any_=ids)), limit=AT_ONCE)
    return set(ids) - {run.id for run in found if run.state_type in TERMINAL_STATES}


def _send_again(client: SyncPrefectClient, events: list[Event]) -> None:
    """Send under new ids, since the server leaves out an id that it saw; times and states are those of the task run."""
    copies = [event.model_copy(update={"id": uuid4(), "follows": None}) for event in events]
    client.request("POST", "/events", json=[event.model_dump(mode="json") for event in copies])


_record = TaskRunRecord()  # of the run in progress; a new one for each


def record_task_runs() -> None:
    """Let Prefect's client of events note what it sends, and wait for a server as long as requests do."""
    if hasattr(PrefectEventsClient._emit, "__wrapped__"):
        return  # an earlier run of this process did
    emit, reconnect = PrefectEventsClient._emit, PrefectEventsClient._reconnect

    @wraps(emit)
    async def noting_emit(self: PrefectEventsClient, event: Event) -> None:
        _record.note(event)
        with suppress(ServerAway):  # the event stays with those that Prefect sends again at the next connection
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
    """Wait for a server that goes away in the body, and return when it has written the end of each task run.

    It is asked every ten seconds meanwhile. One that stays away, or does not write, costs a line of the log.
    """
    global _record
    wait_for_server()
    record_task_runs()
    _record = TaskRunRecord()  # task runs that nobody asked about, as outside of a run, are no part of it
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
            _log.debug("the server was not asked about its task runs: %s", error)


def _settle(client: SyncPrefectClient, seconds: float) -> None:
    """Wait until the server has written the end of each task run that began, for `seconds` at most."""
    deadline = time.monotonic() + seconds
    try:
        client.request("GET", "/health")  # waits for a server that is away
        _wait_until_sent(min(seconds, PATIENCE.seconds))
        left = _wait_until_written(client, deadline)
    except (ServerAway, PrefectHTTPStatusError) as error:
        _log.warning("task runs that ended may be shown as running: %s", error)
        return
    if left:
        _log.warning("the server did not write the end of %d task runs", left)


def _wait_until_sent(seconds: float) -> None:
    """Wait until what was emitted is on the wire; Prefect's own wait has no limit."""
    worker = EventsWorker.instance()
    waiting = threading.Thread(target=worker.wait_until_empty, name="events", daemon=True)
    waiting.start()
    waiting.join(seconds)


def _wait_until_written(client: SyncPrefectClient, deadline: float) -> int:
    """Wait as long as the server goes on writing; where it has stopped, send the rest again, a few times."""
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
