"""A rank process: it joins the world, then runs requests until the controller ends.

It has a pipe per resource of its device. The main thread runs the calls; a thread per other resource runs the copies
between device and host and the writes to disk concurrently. Each thread runs its requests one after another.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from prefect_rlhf.engines.gang.processes.faults import as_ours
from prefect_rlhf.engines.gang.processes.flight_recorder import write_record
from prefect_rlhf.engines.gang.processes.messages import RecordRequest, Reply, Request, Start
from prefect_rlhf.engines.gang.processes.preload import never_collected
from prefect_rlhf.engines.process_groups import open_communicators
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.processes.lifeline import exit_with
from prefect_rlhf.placement.engine_traits import register
from prefect_rlhf.placement.models.outputs import register as register_output

LOGGER = "prefect_rlhf"  # this module may be __main__
MOST_WARNINGS = 100  # the newest warnings that are kept for a reply

GONE = (EOFError, ConnectionError, TimeoutError)
"""Errors of a pipe if the controller, or its node, can no longer be reached."""


class Warnings(logging.Handler):
    """Keeps this process's warnings for the next reply to the controller, and prints them here immediately."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[str] = deque(maxlen=MOST_WARNINGS)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self._lines.append(record.getMessage())
        sys.stderr.write(f"{record.getMessage()}\n")

    def taken(self) -> tuple[str, ...]:
        """Return the lines since the last call. Each line is returned once, to the first thread that calls."""
        lines = []
        with suppress(IndexError):
            while True:
                lines.append(self._lines.popleft())
        return tuple(lines)


WARNINGS = Warnings()


def run(pipes: Sequence[int], lifeline: int, listener: int | None) -> NoReturn:
    """Serve `pipes`, in the order of RESOURCES.

    Ends by `os._exit`: no destructor of an engine may wait for ranks that have ended.
    """
    exit_with(lifeline)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller handles Ctrl-C
    connections: list[Connection[Reply, Request]] = [Connection(pipe) for pipe in pipes]
    logging.getLogger(LOGGER).addHandler(WARNINGS)
    status = 1
    try:
        serve(connections, listener)
        status = 0
    except BaseException:  # noqa: BLE001  no error may unwind into the fork server's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve(connections: Sequence[Connection[Reply, Request]], listener: int | None) -> None:
    """Reply to the two start messages, with an error if the start failed, then to each pipe's requests in order.

    The first message brings the imports; the second asks the rank to join the world.
    """
    connection, *beside = connections
    try:
        message = connection.recv_bytes()
        with never_collected():
            start = pickle.loads(message)  # imports the engines of spawned ranks
        send(connection, Reply())
        connection.recv_bytes()  # all ranks have done so
        target = join(start, listener)
        for other in beside:
            threading.Thread(target=serve_beside, args=(other, target, start), daemon=True).start()
        send(connection, Reply())
        reply_to_all(connection, target, partial(write_record_of, start))
    except GONE:
        return
    except Exception as error:  # noqa: BLE001  the start failed or a request does not unpickle: reply, then end
        send(connection, Reply(error=as_ours(error), traceback=traceback.format_exc()))


def serve_beside(connection: Connection[Reply, Request], target: object, start: Start) -> None:
    """Reply to another pipe's requests in a thread; end the rank if the thread fails."""
    try:
        use_device(start)
        reply_to_all(connection, target, partial(write_record_of, start))
    except GONE:
        return
    except BaseException:  # noqa: BLE001  if only the thread ended, the controller would wait for its reply
        traceback.print_exc()
        os._exit(1)


def reply_to_all(connection: Connection[Reply, Request], target: object, record: Callable[[], None]) -> NoReturn:
    """Reply to all requests in order. Raises an error of GONE when the controller ends."""
    while True:
        request: Request | RecordRequest = pickle.loads(connection.recv_bytes())
        reply = reply_of(record) if isinstance(request, RecordRequest) else reply_to(request, target)
        send(connection, replace(reply, warnings=WARNINGS.taken()))


def write_record_of(start: Start) -> None:
    """Write the rank's latest collectives, while another of its threads may wait in a collective."""
    if start.gang.records is not None:
        write_record(start.gang.records, start.rank, of_nccl=start.gang.device == "cuda")


def use_device(start: Start) -> None:
    """Set torch's settings for a thread: the number of its own threads, and the device.

    Raises InvalidInput if fewer GPUs are visible than the node has ranks, because two ranks on a GPU would hang at
    NCCL's first collective.
    """
    torch.set_num_threads(start.gang.num_threads)
    if start.gang.device == "cuda":
        if start.device >= (seen := torch.cuda.device_count()):
            expected = f"at least {start.device + 1} visible GPUs, a GPU for each rank of the node"
            raise InvalidInput(f"devices of rank {start.rank}", seen, expected)
        torch.cuda.set_device(start.device)


def join(start: Start, listener: int | None) -> object:
    """Become rank `start.rank` of the world of all ranks; return the object that runs the methods."""
    gang, rank = start.gang, start.rank
    for name, traits in gang.engines.items():
        register(name, traits)
    for key, output in gang.outputs.items():
        register_output(key, output)
    use_device(start)
    backend = "cpu:gloo,cuda:nccl" if gang.device == "cuda" else "gloo"
    timeout = timedelta(seconds=gang.start_seconds)
    store = TCPStore(start.host, start.port, gang.size, rank == 0, timeout, master_listen_fd=listener)
    limit = timedelta(seconds=gang.collective_seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=gang.size, timeout=limit)
    # Later, some ranks exchange weights in batches of messages, which is undefined as NCCL's first use of a group.
    open_communicators([dist.distributed_c10d._get_default_group()])
    return gang.rank_factory(rank, gang.size)


def reply_to(request: Request, target: object) -> Reply:
    """Run the request; translate an error into ours, with a one-line reason."""
    return reply_of(lambda: getattr(target, request.method)(*request.arguments))


def reply_of(work: Callable[[], object]) -> Reply:
    """Run some work; translate an error into ours, with a one-line reason."""
    try:
        return Reply(work())
    except Exception as error:  # noqa: BLE001  every failure of a rank is reported to the controller
        return Reply(error=as_ours(error), traceback=traceback.format_exc())


def send(connection: Connection[Reply, Request], message: Reply) -> None:
    """Send a reply, or the reason why it does not pickle."""
    try:
        data = pickle.dumps(message)
    except Exception as error:  # noqa: BLE001  pickling runs foreign code
        data = pickle.dumps(Reply(error=as_ours(error), traceback=traceback.format_exc()))
    connection.send_bytes(data)


if __name__ == "__main__":
    run([int(pipe) for pipe in sys.argv[1].split(",")], int(sys.argv[2]), int(sys.argv[3]) if sys.argv[3] else None)
