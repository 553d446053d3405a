"""Reads weights of ranks on this host directly from the other process's memory: a single copy, no staging, no message.

Linux allows this between processes of the same user (process_vm_readv) unless a security policy forbids it. Memory on a
GPU or on another host is left to messages.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, compress
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefect_rlhf.engines.process_groups import uses_nccl
from prefect_rlhf.engines.weights.rank_transfers import RankTransfers, WeightMessage
from prefect_rlhf.engines.weights.send_receive import send_receive

NODE = "PREFECT_RLHF_NODE"
"""Environment variable with a rank's node. Only ranks on the same node read each other's memory."""
HEAD = 3  # numbers of an offer before the numbers of its messages
SHORT_ROW_BYTES = 2048  # separate reads of rows shorter than this are slower than messages
MOST_SEGMENTS = 1024  # of a call, on either side (IOV_MAX)
MOST_BYTES = 1 << 20  # of a segment, so that a call stays below 2 GiB, the limit of Linux
REFUSED = (errno.EPERM, errno.ENOSYS)

Integers = npt.NDArray[np.int64]


def read_peer_memory(transfers: RankTransfers) -> RankTransfers:
    """Read this rank's missing weights from ranks with readable memory; return the transfers left for messages.

    Collective over the ranks of the transfers. A rank returns when all its readers are done. Raises OSError if a rank
    that is read from has ended.
    """
    outgoing, incoming = transfers.outgoing, transfers.incoming
    if any(uses_nccl(message.like) for message in chain(*outgoing.values(), *incoming.values())):
        return transfers
    offers = {peer: _offer(messages) for peer, messages in outgoing.items()}
    heads = {peer: _integers(HEAD + len(messages)) for peer, messages in incoming.items()}
    send_receive({peer: [head] for peer, (head, _) in offers.items()}, {peer: [head] for peer, head in heads.items()})
    tables = {peer: _integers(int(head[2]), 4) for peer, head in heads.items()}
    send_receive({peer: [table] for peer, (_, table) in offers.items()}, {peer: [t] for peer, t in tables.items()})
    were_read = {peer: _read(head, tables[peer], incoming[peer]) for peer, head in heads.items()}
    replies = {peer: _integers(1) for peer in offers}
    send_receive({peer: [was_read] for peer, was_read in were_read.items()}, {peer: [r] for peer, r in replies.items()})
    return replace(
        transfers,
        outgoing={peer: _left(messages, offers[peer][0], replies[peer]) for peer, messages in outgoing.items()},
        incoming={peer: _left(messages, heads[peer], were_read[peer]) for peer, messages in incoming.items()},
    )


def _integers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64)


def _offer(messages: Sequence[WeightMessage]) -> tuple[Tensor, Tensor]:
    """Return the description that other ranks need to read messages from this process.

    The first tensor is host, process, number of blocks, and for each message whether it is offered; the second is the
    table of the offered messages. A row that is not whole in memory is offered only if it is long: Linux looks up its
    page alone.
    """
    offered = [
        all(block.is_contiguous() or block[0].nbytes >= SHORT_ROW_BYTES for block in _blocks([message]))
        for message in messages
    ]
    table = _table(_blocks(compress(messages, offered)))
    return torch.tensor([_host(), os.getpid(), len(table), *offered]), table


def _left(messages: Sequence[WeightMessage], head: Tensor, was_read: Tensor) -> list[WeightMessage]:
    return [message for message, offered in zip(messages, head[HEAD:], strict=True) if not (offered and was_read)]


def _blocks(messages: Iterable[WeightMessage]) -> list[Tensor]:
    return [block for message in messages for piece in message.pieces for block in piece]


def _table(blocks: Sequence[Tensor]) -> Tensor:
    """Tabulate blocks as [blocks, 4]: address, number of rows, bytes of a row, bytes from row to row."""
    return torch.tensor([_rows(block) for block in blocks], dtype=torch.int64).view(-1, 4)


def _rows(block: Tensor) -> tuple[int, int, int, int]:
    if block.is_contiguous():
        return block.data_ptr(), 1, block.nbytes, 0
    assert block[0].is_contiguous(), "a slice of columns has whole rows"
    return block.data_ptr(), len(block), block[0].nbytes, block.stride(0) * block.element_size()


def _read(head: Tensor, table: Tensor, messages: Sequence[WeightMessage]) -> Tensor:
    """Copy the offered messages into their blocks; return 1 if that was allowed, else 0."""
    host, pid = head[:2].tolist()
    if host != _host():
        return torch.zeros(1, dtype=torch.int64)
    own = _table(_blocks(compress(messages, head[HEAD:].tolist())))
    copied = all(_copy(pid, remote, local) for remote, local in _calls(_segments(table), _segments(own)))
    return torch.tensor([int(copied)])


def _segments(table: Tensor) -> tuple[Integers, Integers]:
    """Return the address of each row, and its bytes."""
    begin, rows, size, stride = table.numpy().T
    row = np.arange(rows.sum()) - np.repeat(rows.cumsum() - rows, rows)
    return np.repeat(begin, rows) + row * np.repeat(stride, rows), np.repeat(size, rows)


def _calls(source: tuple[Integers, Integers], target: tuple[Integers, Integers]) -> Iterator[tuple[Integers, Integers]]:
    """Cut both sides into the segments of successive calls: [segments, 2] of address and bytes."""
    # process_vm_readv copies the bytes of one list into the bytes of the other, for any segments. Cuts at the
    # ends of the rows of both sides make the segments equal in pairs, so the lists can be split after any segment. Each
    # side then joins its adjacent segments again, because the kernel looks up every segment.
    ends = [sizes.cumsum() for _, sizes in (source, target)]
    total = int(source[1].sum())
    assert total == target[1].sum(), "both sides have the same bytes"
    cuts = np.unique(np.concatenate([*ends, np.arange(0, total + 1, MOST_BYTES)]))
    sizes = np.diff(cuts)
    sides = []
    for (begin, size), end in zip((source, target), ends, strict=True):
        index = np.searchsorted(end, cuts[:-1], side="right")
        sides.append(begin[index] + cuts[:-1] - (end - size)[index])
    for first in range(0, len(sizes), MOST_SEGMENTS):
        part = slice(first, first + MOST_SEGMENTS)
        yield _joined(sides[0][part], sizes[part]), _joined(sides[1][part], sizes[part])


def _joined(begin: Integers, sizes: Integers) -> Integers:
    """Join adjacent segments: [segments, 2]."""
    first = np.flatnonzero(np.concatenate([[True], begin[1:] != begin[:-1] + sizes[:-1]]))
    return np.stack([begin[first], np.add.reduceat(sizes, first)], axis=1)


def _copy(pid: int, remote: Integers, local: Integers) -> bool:
    """Make a call; return whether it was allowed. Raises OSError for anything else: the other process has ended."""
    call = _process_vm_readv()
    if call is None:
        return False
    expected = int(local[:, 1].sum())
    copied = call(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if copied == expected:
        return True
    number = ctypes.get_errno() if copied < 0 else errno.EFAULT
    if number in REFUSED:
        return False
    raise OSError(number, f"{os.strerror(number)}: reading weights from process {pid}")


@cache
def _process_vm_readv() -> ctypes._NamedFuncPointer | None:
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is not None:
        vector = [ctypes.c_void_p, ctypes.c_ulong]  # an array of struct iovec, and its length
        call.argtypes, call.restype = [ctypes.c_int, *vector, *vector, ctypes.c_ulong], ctypes.c_ssize_t
    return call


@cache
def _host() -> int:
    """Return a number that is equal for processes of the same boot and PID namespace, which share process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return crc32(f"{boot}{Path('/proc/self/ns/pid').stat().st_ino} {os.environ.get(NODE)}".encode())
    except OSError:
        return os.getpid()  # equal to no other process's
