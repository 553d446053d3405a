"""The rules, for one rank. Ranks compare notes through the world's store, a note for each call and peer."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from tests.support.nccl_rules import FOLDER

SECONDS = "NCCL_RULES_SECONDS"
"""Environment variable: the limit for a peer to come to the same call, 60 by default."""


class BrokenRule(RuntimeError):
    """A call that NCCL would not survive."""


class Rules:
    """What this rank has called so far, and the checks of its next call."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self._store = dist.PrefixStore("nccl rules", dist.distributed_c10d._get_default_store().clone())
        self._used: set[str] = set()  # groups by name
        self._calls: Counter[int] = Counter()  # on groups shared with each peer
        self._sent: Counter[str] = Counter()
        self._thread: tuple[int, str] | None = None
        self._recorded: set[str] = set()
        self._seconds = float(os.environ.get(SECONDS, "60"))

    def collective(self, group: dist.ProcessGroup, name: str) -> None:
        """Check a collective."""
        members = self._begin(group, name)
        if group.group_name not in self._used:
            self._used.add(group.group_name)
            self._store.add(f"used {group.group_name}", 1)
        self._in_order(members, f"{name} on {_named(group)}")

    def batch(self, group: dist.ProcessGroup, peers: Sequence[int]) -> None:
        """Check a batch of messages with these peers."""
        members = self._begin(group, "batch")
        if group.group_name not in self._used:
            self._first_batch(group, members, peers)
            self._used.add(group.group_name)
        self._in_order(peers, f"a batch of messages on {_named(group)}")

    def send(self, group: dist.ProcessGroup, peer: int) -> None:
        """Check a message outside of a batch, and wait for its receive, as NCCL does."""
        self._message(group)
        message = f"{group.group_name} {self.rank}>{peer}"
        self._sent[message] += 1
        number = self._sent[message]
        if self._received(message) < number:
            self._store.set(f"sends {self.rank}", f"{peer}|{number}|{message}")
            self._await(
                lambda: self._received(message) >= number,
                lambda: f"the send to rank {peer} on {_named(group)} ends with its receive, which never comes",
                self._check_circle,
            )
            self._store.set(f"sends {self.rank}", "")
        self._in_order([peer], f"a message from {self.rank} to {peer} on {_named(group)}")

    def receive(self, group: dist.ProcessGroup, peer: int) -> None:
        """Check a receive outside of a batch."""
        self._message(group)
        self._store.add(f"received {group.group_name} {peer}>{self.rank}", 1)
        self._in_order([peer], f"a message from {peer} to {self.rank} on {_named(group)}")

    def _message(self, group: dist.ProcessGroup) -> None:
        self._begin(group, "message")
        if group.group_name not in self._used:
            self._break(f"the first use of {_named(group)} is a message outside of a batch")

    def _begin(self, group: dist.ProcessGroup, name: str) -> list[int]:
        """Record the call and check its thread; return the members of its group."""
        if name not in self._recorded:
            self._recorded.add(name)
            self._record(name)
        this = threading.get_ident()
        thread, before = self._thread or (this, _named(group))
        if thread != this:
            self._break(f"{before} and {_named(group)} are used from two threads")
        self._thread = this, _named(group)
        return dist.get_process_group_ranks(group)

    def _first_batch(self, group: dist.ProcessGroup, members: Sequence[int], peers: Sequence[int]) -> None:
        """A batch with all members is made by all of them; else wait until each has begun to use the group."""
        used = f"used {group.group_name}"
        self._store.add(used, 1)
        if {*peers, self.rank} != {*members}:
            self._await(
                lambda: self._store.add(used, 0) >= len(members),
                lambda: f"the first use of {_named(group)} is a batch of messages that some members do not make",
            )

    def _in_order(self, peers: Sequence[int], call: str) -> None:
        """Compare the call with the peers' call of the same number on groups shared with this rank."""
        for peer in sorted({*peers} - {self.rank}):
            pair = f"{min(peer, self.rank)}-{max(peer, self.rank)}"
            theirs = self._store.compare_set(f"call {pair} {self._calls[peer]}", "", call).decode()
            self._calls[peer] += 1
            if theirs != call:
                self._break(f"rank {self.rank} makes {call} where rank {peer} makes {theirs}")

    def _check_circle(self) -> None:
        """Raise if this rank's send waits for a rank that waits in a send, and so on to this rank."""
        circle = list(self._waiting_sends())
        if not circle:
            return
        # Ranks whose wait was the same before and after the counts were read have waited at one moment.
        blocked = all(self._received(message) < number for _, _, number, message in circle)
        if blocked and list(self._waiting_sends()) == circle:
            ranks = ", ".join(str(rank) for rank, *_ in circle)
            self._break(f"ranks {ranks} send to each other before any of them receives, outside of a batch")

    def _waiting_sends(self) -> Iterator[tuple[int, int, int, str]]:
        """Yield (rank, peer, number, message) of the circle of sends that begins here; nothing without a circle."""
        circle, rank = [], self.rank
        while True:
            sends = self._store.compare_set(f"sends {rank}", "", "").decode()
            if not sends or rank in [each for each, *_ in circle]:
                return
            peer, number, message = sends.split("|", 2)
            circle.append((rank, int(peer), int(number), message))
            rank = int(peer)
            if rank == self.rank:
                yield from circle
                return

    def _received(self, message: str) -> int:
        return self._store.add(f"received {message}", 0)

    def _await(
        self, done: Callable[[], bool], otherwise: Callable[[], str], check: Callable[[], None] = lambda: None
    ) -> None:
        deadline = time.monotonic() + self._seconds
        while not done():
            check()
            if time.monotonic() > deadline:
                self._break(otherwise())
            time.sleep(0.002)

    def _break(self, what: str) -> None:
        self._record(f"broken: {what}")
        raise BrokenRule(what)

    def _record(self, line: str) -> None:
        if folder := os.environ.get(FOLDER):
            with Path(folder, str(os.getpid())).open("a") as file:
                file.write(f"{line}\n")


def _named(group: dist.ProcessGroup) -> str:
    """Name a group by its ranks and the beginning of its name: two groups may have the same ranks."""
    return f"group {dist.get_process_group_ranks(group)} ({group.group_name[:6]})"


class Exempt(threading.local):
    """Whether this thread's calls are exempt: they are parts of a call that is checked, or of the host's."""

    now = False

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Exempt the calls of the block."""
        before, self.now = self.now, True
        try:
            yield
        finally:
            self.now = before
